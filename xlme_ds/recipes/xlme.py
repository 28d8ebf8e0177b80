"""XLM-E as published (Tables 8 to 10) in three sizes, the quickstart, and the ablations of Table 2.

Names are size_engine: `zero` partitions what each process holds, `pipe` cuts the model into stages.
"""

from dataclasses import replace

from ..config import DataConfig, EngineConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig

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
XL = replace(
    LARGE,
    width=1536,
    heads=24,
    feed_forward=6144,
    generator_layers=8,
    discriminator_layers=48,
    vocabulary_blocks=16,
    activation_checkpointing=True,
)
QUICKSTART = ModelConfig(
    vocabulary=8192,
    width=128,
    heads=4,
    feed_forward=512,
    generator_layers=1,
    discriminator_layers=4,
    max_positions=256,
    embedding_sharing="gdes",
    init_std=0.05,  # 0.02 is for widths near 768; the product of width and variance is what counts
)


def base_zero1() -> RunConfig:
    """Base: 125K steps of 1M tokens a task; the model fits one GPU, so only the optimizer is partitioned."""
    return RunConfig("base", model=BASE, data=DataConfig(2048, 2048, micro_batch=16))


def large_zero2() -> RunConfig:
    """Large: gradients and optimizer are partitioned."""
    return RunConfig(
        "large", model=LARGE, data=DataConfig(2048, 2048, micro_batch=8), engine=EngineConfig(deepspeed="zero2")
    )


def large_pipe() -> RunConfig:
    """Large in two stages: one has the embedding, the generator and a few layers, the other has the other layers."""
    return replace(large_zero2(), engine=EngineConfig("pipeline", "pipe_zero1", pipeline_stages=2))


def xl_zero3() -> RunConfig:
    """XL: every kind of state is partitioned (ZeRO-3)."""
    return RunConfig("xl", model=XL, data=DataConfig(2048, 2048, micro_batch=4), engine=EngineConfig(deepspeed="zero3"))


def xl_pipe() -> RunConfig:
    """XL in four stages, data parallel besides; only the optimizer is partitioned (ZeRO-1)."""
    return replace(xl_zero3(), engine=EngineConfig("pipeline", "pipe_zero1", pipeline_stages=4))


def xlme() -> RunConfig:
    """`base_zero1` under the name that comparisons give it."""
    return replace(base_zero1(), name="xlme")


def xlme_no_trtd() -> RunConfig:
    """`xlme` without translation replaced token detection: no translation pairs are read."""
    run = base_zero1()
    return replace(run, name="xlme_no_trtd", data=replace(run.data, para_rows=0))


def xlme_no_gate() -> RunConfig:
    """`xlme_no_trtd` without the gated relative position bias."""
    return replace(xlme_no_trtd(), name="xlme_no_gate", model=replace(BASE, relative_bias="none"))


def quickstart() -> RunConfig:
    """The ten-minute run on two CPU cores, with every part of a large one: ZeRO-3, two processes, both tasks.

    91 languages of one short text; the settings are chosen by trial (docs/lab_log.md).
    """
    return RunConfig(
        "quickstart",
        model=QUICKSTART,
        data=DataConfig(8, 8, micro_batch=8),
        optimizer=OptimizerConfig(learning_rate=1.2e-3, warmup_steps=100),
        engine=EngineConfig(deepspeed="zero3_cpu"),
        train=TrainConfig(
            steps=1100, log_every=10, eval_every=100, eval_rows=128, save_every=100, keep_last=2, keep_every=0
        ),
    )
