"""XLM-E Base: 12 + 4 layers of width 768 (Tables 8 to 10), XLM-R's vocabulary."""

from ..config import DataConfig, EngineConfig, ModelConfig, RunConfig

MODEL = ModelConfig(
    vocabulary=250_002,
    width=768,
    heads=12,
    feed_forward=3072,
    generator_layers=4,
    discriminator_layers=12,
    norm="post",
    relative_buckets=32,
    relative_max_distance=128,
)


def base_zero1() -> RunConfig:
    """Base as published: 125K steps of 1M tokens a task; the model fits one GPU, so only the optimizer is
    partitioned."""
    return RunConfig(
        name="base", model=MODEL, data=DataConfig(2048, 2048, micro_batch=16), engine=EngineConfig(deepspeed="zero1")
    )
