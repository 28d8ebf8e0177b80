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


AUTO = EngineConfig(deepspeed="auto")
PIPELINE = EngineConfig(kind="pipeline", deepspeed="pipe_zero1")
XL_CHECKPOINTED = replace(XL, activation_checkpointing=True)
BASE_ZERO1 = _run("base_zero1", BASE, micro_batch=16, engine=EngineConfig())
XLME = replace(BASE_ZERO1, name="xlme")
NO_TRTD = replace(XLME, name="xlme_no_trtd", data=DataConfig(mono_rows=2048, para_rows=0, micro_batch=16))

RECIPES = [
    ("XLM-E Base, 279M parameters (fits a GPU of 40 GB).", _run("base", BASE, micro_batch=64, engine=AUTO)),
    ("XLM-E Large, 840M parameters (fits a GPU of 80 GB).", _run("large", LARGE, micro_batch=32, engine=AUTO)),
    ("XLM-E XL, 2.2B parameters (fits a GPU of 80 GB).", _run("xl", XL, micro_batch=8, engine=AUTO)),
    ("XLM-E Base as base, but in smaller micro-batches and always under ZeRO-1 (fits a GPU of 24 GB).", BASE_ZERO1),
    (
        "XLM-E Large under ZeRO-2, which partitions gradients and optimizer (fits 2 or more GPUs of 24 GB).",
        _run("large_zero2", LARGE, micro_batch=8, engine=EngineConfig(deepspeed="zero2")),
    ),
    (
        # The first stage has the embedding, the generator and a few layers of the discriminator.
        "XLM-E Large as a pipeline of two stages (fits 4 or more GPUs of 24 GB).",
        _run("large_pipe", LARGE, micro_batch=8, engine=replace(PIPELINE, pipeline_stages=2)),
    ),
    (
        "XLM-E XL under ZeRO-3, which partitions weights, gradients and optimizer (fits 4 or more GPUs of 24 GB).",
        _run("xl_zero3", XL_CHECKPOINTED, micro_batch=4, engine=EngineConfig(deepspeed="zero3")),
    ),
    (
        "XLM-E XL as a pipeline of four stages, and data parallel under ZeRO-1 (fits 8 or more GPUs of 24 GB).",
        _run("xl_pipe", XL_CHECKPOINTED, micro_batch=4, engine=replace(PIPELINE, pipeline_stages=4)),
    ),
    ("The same as base_zero1; the name used in comparisons (fits a GPU of 24 GB).", XLME),
    (
        "XLM-E Base without translation replaced token detection, so without pairs: Table 2 (fits a GPU of 24 GB).",
        NO_TRTD,
    ),
    (
        "XLM-E Base without pairs and without the gated relative position bias: Table 2 (fits a GPU of 24 GB).",
        replace(NO_TRTD, name="xlme_no_gate", model=replace(BASE, relative_bias="none")),
    ),
    (
        "XLM-E Base whose discriminator predicts every token instead of judging it, a control (fits a GPU of 24 GB).",
        replace(XLME, name="xlme_all_tokens", objective=ObjectiveConfig("all_tokens")),
    ),
]
