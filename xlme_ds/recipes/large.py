"""XLM-E Large: 24 + 6 layers of width 1,024 (Tables 8 to 10), a vocabulary of 2^19."""

from ..config import DataConfig, EngineConfig, ModelConfig, RunConfig

MODEL = ModelConfig(
    vocabulary=524_288,
    width=1024,
    heads=16,
    feed_forward=4096,
    generator_layers=6,
    discriminator_layers=24,
    norm="pre",
    relative_buckets=128,
    relative_max_distance=256,
)


def large_zero2() -> RunConfig:
    """Large as published: gradients and optimizer are partitioned."""
    return RunConfig(
        name="large", model=MODEL, data=DataConfig(2048, 2048, micro_batch=8), engine=EngineConfig(deepspeed="zero2")
    )


def large_pipe() -> RunConfig:
    """The same in two stages: the embedding and the generator beside a few layers, the other layers apart from them."""
    return RunConfig(
        name="large",
        model=MODEL,
        data=DataConfig(2048, 2048, micro_batch=8),
        engine=EngineConfig("pipeline", "pipe_zero1", pipeline_stages=2),
    )
