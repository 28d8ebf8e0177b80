"""XLM-E as published (Tables 8 to 10) in three sizes, and its ablations (Table 2).

`base`, `large` and `xl` run on any number of GPUs of 80 GB; the number of GPUs determines the ZeRO stage. On 8, 64 and
512 A100s their predicted speed is within 3% of that of the fastest layout that the planner finds. Recipes with an
engine in their names (`large_zero2`) have smaller micro-batches and need less memory: `zero` partitions the training
state over the GPUs, `pipe` divides the model into stages.
"""

from dataclasses import replace

from ..config import DataConfig, EngineConfig, ModelConfig, ObjectiveConfig, RunConfig

BASE = ModelConfig(
    vocabulary=250_002,  # the size of XLM-R's vocabulary
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
    """A run of 125,000 steps, each of which reads 1M tokens of each task."""
    return RunConfig(
        name, model=model, data=DataConfig(mono_rows=2048, para_rows=2048, micro_batch=micro_batch), engine=engine
    )


def base() -> RunConfig:
    """XLM-E Base, 279M parameters (fits a GPU of 80 GB)."""
    return _run("base", BASE, micro_batch=64, engine=EngineConfig(deepspeed="auto"))


def large() -> RunConfig:
    """XLM-E Large, 840M parameters (fits a GPU of 80 GB)."""
    return _run("large", LARGE, micro_batch=32, engine=EngineConfig(deepspeed="auto"))


def xl() -> RunConfig:
    """XLM-E XL, 2.2B parameters (fits a GPU of 80 GB)."""
    return _run("xl", XL, micro_batch=8, engine=EngineConfig(deepspeed="auto"))


def base_zero1() -> RunConfig:
    """XLM-E Base as base, but in smaller micro-batches and always under ZeRO-1 (fits a GPU of 24 GB)."""
    return _run("base_zero1", BASE, micro_batch=16, engine=EngineConfig())


def large_zero2() -> RunConfig:
    """XLM-E Large under ZeRO-2, which partitions gradients and optimizer (fits 2 or more GPUs of 24 GB)."""
    return _run("large_zero2", LARGE, micro_batch=8, engine=EngineConfig(deepspeed="zero2"))


def large_pipe() -> RunConfig:
    """XLM-E Large as a pipeline of two stages (fits 4 or more GPUs of 24 GB).

    The first stage has the embedding, the generator and a few layers of the discriminator.
    """
    return _run(
        "large_pipe",
        LARGE,
        micro_batch=8,
        engine=EngineConfig(kind="pipeline", deepspeed="pipe_zero1", pipeline_stages=2),
    )


def xl_zero3() -> RunConfig:
    """XLM-E XL under ZeRO-3, which partitions weights, gradients and optimizer (fits 4 or more GPUs of 24 GB)."""
    return _run(
        "xl_zero3", replace(XL, activation_checkpointing=True), micro_batch=4, engine=EngineConfig(deepspeed="zero3")
    )


def xl_pipe() -> RunConfig:
    """XLM-E XL as a pipeline of four stages, and data parallel under ZeRO-1 (fits 8 or more GPUs of 24 GB)."""
    engine = EngineConfig(kind="pipeline", deepspeed="pipe_zero1", pipeline_stages=4)
    return _run("xl_pipe", replace(XL, activation_checkpointing=True), micro_batch=4, engine=engine)


def xlme() -> RunConfig:
    """The same as base_zero1; the name used in comparisons (fits a GPU of 24 GB)."""
    return replace(base_zero1(), name="xlme")


def xlme_no_trtd() -> RunConfig:
    """XLM-E Base without translation replaced token detection, so without pairs: Table 2 (fits a GPU of 24 GB)."""
    return replace(xlme(), name="xlme_no_trtd", data=DataConfig(mono_rows=2048, para_rows=0, micro_batch=16))


def xlme_no_gate() -> RunConfig:
    """XLM-E Base without pairs and without the gated relative position bias: Table 2 (fits a GPU of 24 GB)."""
    return replace(xlme_no_trtd(), name="xlme_no_gate", model=replace(BASE, relative_bias="none"))


def xlme_all_tokens() -> RunConfig:
    """XLM-E Base whose discriminator predicts every token instead of judging it, a control (fits a GPU of 24 GB)."""
    return replace(xlme(), name="xlme_all_tokens", objective=ObjectiveConfig("all_tokens"))
