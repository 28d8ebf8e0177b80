"""XLM-E as published (Tables 8 to 10) in three sizes, and its ablations (Table 2).

`base`, `large` and `xl` run on any number of GPUs of 80 GB. The number determines their ZeRO stage; on 8, 64 and 512
A100s they are within 3% of the fastest layout that the planner finds. Names with an engine (`large_zero2`) use that one
engine, smaller micro-batches and less memory: `zero` partitions the state of a process, `pipe` cuts the model into
stages.
"""

from dataclasses import replace

from ..config import DataConfig, EngineConfig, ModelConfig, ObjectiveConfig, RunConfig

BASE = ModelConfig(
    vocabulary=250_002,  # XLM-R's
    width=768,
    heads=12,
    feed_forward=3072,
    generator_layers=4,
    discriminator_layers=12,
    norm="post",
    relative_buckets=32,
    relative_max_distance=128,
)
LARGE = ModelConfig(
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
XL = replace(LARGE, width=1536, heads=24, feed_forward=6144, generator_layers=8, discriminator_layers=48)


def _run(name: str, model: ModelConfig, micro_batch: int, engine: EngineConfig) -> RunConfig:
    """125,000 steps of 1M tokens of each task."""
    return RunConfig(name, model=model, data=DataConfig(2048, 2048, micro_batch), engine=engine)


def base() -> RunConfig:
    """XLM-E Base, 279M parameters (GPUs of 80 GB)."""
    return _run("base", BASE, 64, EngineConfig(deepspeed="auto"))


def large() -> RunConfig:
    """XLM-E Large, 840M parameters (GPUs of 80 GB)."""
    return _run("large", LARGE, 32, EngineConfig(deepspeed="auto"))


def xl() -> RunConfig:
    """XLM-E XL, 2.2B parameters (GPUs of 80 GB)."""
    return _run("xl", XL, 8, EngineConfig(deepspeed="auto"))


def base_zero1() -> RunConfig:
    """XLM-E Base under ZeRO-1, which partitions only the optimizer (GPUs of 24 GB)."""
    return _run("base_zero1", BASE, 16, EngineConfig())


def large_zero2() -> RunConfig:
    """XLM-E Large under ZeRO-2, which partitions gradients and optimizer (2 or more GPUs of 24 GB)."""
    return _run("large_zero2", LARGE, 8, EngineConfig(deepspeed="zero2"))


def large_pipe() -> RunConfig:
    """XLM-E Large as a pipeline of two stages (4 or more GPUs of 24 GB).

    The first has the embedding, the generator and a few layers.
    """
    return _run("large_pipe", LARGE, 8, EngineConfig("pipeline", "pipe_zero1", pipeline_stages=2))


def xl_zero3() -> RunConfig:
    """XLM-E XL under ZeRO-3, which partitions weights, gradients and optimizer (4 or more GPUs of 24 GB)."""
    return _run("xl_zero3", replace(XL, activation_checkpointing=True), 4, EngineConfig(deepspeed="zero3"))


def xl_pipe() -> RunConfig:
    """XLM-E XL as a pipeline of four stages, and data parallel under ZeRO-1 (8 or more GPUs of 24 GB)."""
    engine = EngineConfig("pipeline", "pipe_zero1", pipeline_stages=4)
    return _run("xl_pipe", replace(XL, activation_checkpointing=True), 4, engine)


def xlme() -> RunConfig:
    """XLM-E Base as `base_zero1`, under the name that comparisons give it (GPUs of 24 GB)."""
    return replace(base_zero1(), name="xlme")


def xlme_no_trtd() -> RunConfig:
    """XLM-E Base without translation replaced token detection, so without pairs: Table 2 (GPUs of 24 GB)."""
    return replace(xlme(), name="xlme_no_trtd", data=DataConfig(2048, 0, micro_batch=16))


def xlme_no_gate() -> RunConfig:
    """XLM-E Base without pairs and without the gated relative position bias: Table 2 (GPUs of 24 GB)."""
    return replace(xlme_no_trtd(), name="xlme_no_gate", model=replace(BASE, relative_bias="none"))


def xlme_all_tokens() -> RunConfig:
    """XLM-E Base whose discriminator predicts every token instead of judging it, a control (GPUs of 24 GB)."""
    return replace(xlme(), name="xlme_all_tokens", objective=ObjectiveConfig("all_tokens"))
