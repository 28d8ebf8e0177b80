"""XLM-E XL: 48 + 8 layers of width 1,536 (Tables 8 to 10), a vocabulary of 2^19."""

from ..config import DataConfig, EngineConfig, ModelConfig, RunConfig

MODEL = ModelConfig(
    vocabulary=524_288,
    width=1536,
    heads=24,
    feed_forward=6144,
    generator_layers=8,
    discriminator_layers=48,
    norm="pre",
    relative_buckets=128,
    relative_max_distance=256,
    vocabulary_blocks=16,
    activation_checkpointing=True,
)


def xl_zero3() -> RunConfig:
    """XL as published, every kind of state partitioned (ZeRO-3)."""
    return RunConfig(
        name="xl", model=MODEL, data=DataConfig(2048, 2048, micro_batch=4), engine=EngineConfig(deepspeed="zero3")
    )


def xl_pipe() -> RunConfig:
    """The same in four stages, data parallel besides; only the optimizer is partitioned (ZeRO-1)."""
    return RunConfig(
        name="xl",
        model=MODEL,
        data=DataConfig(2048, 2048, micro_batch=4),
        engine=EngineConfig("pipeline", "pipe_zero1", pipeline_stages=4),
    )
