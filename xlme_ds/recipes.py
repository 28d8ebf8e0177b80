"""Published runs by name, each one frozen configuration: XLM-E and its ablations, XLM-R, ERNIE-M, XLM; the quickstart.

XLM-E is as published (Tables 8 to 10) in three sizes; its names are size_engine: `zero` partitions what each process
holds, `pipe` cuts the model into stages.

XLM-R is the baseline in XLM-E's setup: its objective on the rows that XLM-E reads (Table 2).

ERNIE-M (Ouyang et al., 2021; its Table 10) has two stages: the first goes on from an XLM-R of the same shape (give it
as --start.folder, and mix the data with --alpha 0.1), the second, on text alone, from a run of the first. The paper has
one number of steps: here each stage has it. It names no gradient clipping: it is XLM-E's here. Its batch of 2,048 rows
is half of pairs in the first stage.

`continue_xlmr` and `continue_xlmr_large` turn an XLM-R into an XLM-E of its shape, with the gated bias: from the
folder xlm-roberta-base or xlm-roberta-large here, or another --start.folder. They are ours, no paper's.

XLM (Conneau and Lample, 2019) is as it was trained for XNLI: twelve layers, the fifteen languages of that test; mix the
data with --layout xlm --row-tokens 256. What the paper leaves open is its published code's: attention dropout, the
norms' epsilon, the prediction layer, betas, clipping. The number of steps was not published; it and the schedule are
XLM-E's.

`xlm_mt` is its supervised translation, with two languages in place of your own (give them, the vocabulary, and an `xlm`
of this shape as --start.folder; mix the pairs with --layout xlm --row-tokens 256). The paper trains until validation
stops to improve: the schedule has no end, and a run can be made longer. `xlm_umt` is the unsupervised one, on sentences
(mix --sentences) of two languages. `xlme_mt` translates with XLM-E Base: DeltaLM's
decoder (Ma et al., 2021), which starts from the discriminator too, and XLM's training.
"""

from dataclasses import replace

from .config import (
    DataConfig,
    EngineConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    StartConfig,
    TrainConfig,
)

_XLME_BASE = ModelConfig(
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
_XLME_LARGE = ModelConfig(
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
_XLME_XL = replace(
    _XLME_LARGE,
    width=1536,
    heads=24,
    feed_forward=6144,
    generator_layers=8,
    discriminator_layers=48,
    activation_checkpointing=True,
)
_AUTO = EngineConfig(deepspeed="auto")
# 125K steps of 1M tokens a task. Base fits one GPU, so only the optimizer is partitioned.
_BASE = RunConfig("base", model=_XLME_BASE, data=DataConfig(2048, 2048, micro_batch=16))
_LARGE = RunConfig(
    "large",
    model=_XLME_LARGE,
    data=DataConfig(2048, 2048, micro_batch=8),
    engine=EngineConfig(deepspeed="zero2"),
)
_XL = RunConfig(
    "xl", model=_XLME_XL, data=DataConfig(2048, 2048, micro_batch=4), engine=EngineConfig(deepspeed="zero3")
)
_NO_TRTD = replace(_BASE, name="xlme_no_trtd", data=replace(_BASE.data, para_rows=0))

_XLMR = RunConfig(
    name="xlmr",
    model=ModelConfig(
        vocabulary=250_002,
        width=768,
        heads=12,
        feed_forward=3072,
        discriminator_layers=12,
        norm="post",
        relative_bias="none",
    ),
    objective=ObjectiveConfig("mlm"),
    data=DataConfig(2048, 0, micro_batch=16),
    engine=EngineConfig(deepspeed="zero1"),
)

# ERNIE-M's rates from XLM-R, below half of those from scratch, which would undo what the weights know; a short warm-up,
# for only the discriminator's head and the biases, which begin at 0, are new.
_CONTINUE = RunConfig(
    name="continue_xlmr",
    model=_XLME_BASE,
    data=_BASE.data,
    optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=2_500),
    engine=EngineConfig(deepspeed="zero1"),
    train=TrainConfig(steps=50_000),
    start=StartConfig("xlm-roberta-base", take="encoder"),
)
_CONTINUE_LARGE = replace(
    _CONTINUE,
    name="continue_xlmr_large",
    model=replace(_XLME_LARGE, vocabulary=250_002, norm="post"),
    data=_LARGE.data,
    optimizer=replace(_CONTINUE.optimizer, learning_rate=1e-4),
    start=replace(_CONTINUE.start, folder="xlm-roberta-large"),
)

_ERNIE_M = RunConfig(
    name="ernie_m",
    model=replace(_XLMR.model, dropout=0.1, attention_dropout=0.1),
    objective=ObjectiveConfig("ernie_m"),
    data=DataConfig(1024, 1024, micro_batch=16),
    optimizer=OptimizerConfig(learning_rate=2e-4, beta1=0.98, beta2=0.999),
    engine=EngineConfig(deepspeed="zero1"),
    train=TrainConfig(steps=150_000),
    start=StartConfig(take="encoder"),
)
_ERNIE_M_LARGE = replace(
    _ERNIE_M,
    name="ernie_m_large",
    model=replace(_ERNIE_M.model, width=1024, heads=16, feed_forward=4096, discriminator_layers=24),
    data=DataConfig(1024, 1024, micro_batch=8),
    optimizer=replace(_ERNIE_M.optimizer, learning_rate=1e-4),
    train=TrainConfig(steps=200_000),
)

_XNLI_LANGUAGES = ("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh-Hans")
_XLM = RunConfig(
    name="xlm",
    model=ModelConfig(
        vocabulary=95_000,
        width=1024,
        heads=8,
        feed_forward=4096,
        discriminator_layers=12,
        max_positions=256,
        layout="xlm",
        language_embeddings=_XNLI_LANGUAGES,
        dropout=0.1,
        attention_dropout=0.1,
        norm="post",
        norm_epsilon=1e-12,
        relative_bias="none",
        masked_head="linear",
    ),
    objective=ObjectiveConfig("mlm"),
    # 64 rows on each of 64 GPUs are 2^20 tokens a step, as many as XLM-E's.
    data=DataConfig(4096, 4096, micro_batch=64, alternate=True),
    optimizer=OptimizerConfig(learning_rate=1e-4, beta2=0.999, epsilon=1e-8, weight_decay=0.0, clip=5.0),
    engine=EngineConfig(deepspeed="zero1"),
    train=TrainConfig(log_every=11),  # an even number would show one of the two tasks alone
)

# About 2,000 tokens on each of eight GPUs a step; betas and warm-up are its code's.
_XLM_MT = RunConfig(
    name="xlm_mt",
    model=replace(_XLM.model, vocabulary=60_000, discriminator_layers=6, language_embeddings=("en", "ro")),
    objective=ObjectiveConfig("mt", mask_fraction=1.0),
    data=DataConfig(0, 64, micro_batch=8),
    optimizer=replace(_XLM.optimizer, warmup_steps=4000, beta2=0.98),
    schedule=ScheduleConfig("inverse_sqrt"),
    engine=EngineConfig(deepspeed="zero1"),
    train=TrainConfig(steps=100_000),
    start=StartConfig(take="encoder"),
)


def _second_stage(first: RunConfig) -> RunConfig:
    return replace(
        first,
        name=f"{first.name}_stage2",
        objective=ObjectiveConfig("btmlm", pseudo_fractions=(0.05, 0.1, 0.15, 0.2)),
        data=DataConfig(2048, 0, first.data.micro_batch),
    )


RECIPES: dict[str, RunConfig] = {
    # The ten-minute run on two CPU cores, with every part of a large one: ZeRO-3, two processes, both tasks. 91
    # languages of one short text; the settings are chosen by trial (docs/lab/quickstart.md).
    "quickstart": RunConfig(
        "quickstart",
        model=ModelConfig(
            vocabulary=8192,
            width=128,
            heads=4,
            feed_forward=512,
            generator_layers=1,
            discriminator_layers=4,
            max_positions=256,
            embedding_sharing="gdes",
            init_std=0.05,  # 0.02 is for widths near 768; the product of width and variance is what counts
        ),
        data=DataConfig(8, 8, micro_batch=8),
        optimizer=OptimizerConfig(learning_rate=1.2e-3, warmup_steps=100),
        engine=EngineConfig(deepspeed="zero3_cpu"),
        train=TrainConfig(
            steps=1100, log_every=10, eval_every=100, eval_rows=128, save_every=100, keep_last=2, keep_every=0
        ),
    ),
    # For any number of GPUs of 80 GB: within 3% of the fastest layout that the planner finds for 8, 64 and 512 A100s.
    "base": replace(_BASE, data=replace(_BASE.data, micro_batch=64), engine=_AUTO),
    "large": replace(_LARGE, data=replace(_LARGE.data, micro_batch=32), engine=_AUTO),
    "xl": replace(
        _XL,
        model=replace(_XLME_XL, activation_checkpointing=False),
        data=replace(_XL.data, micro_batch=8),
        engine=_AUTO,
    ),
    # The same with less memory: one engine, and smaller micro-batches.
    "base_zero1": _BASE,
    "large_zero2": _LARGE,  # gradients and optimizer are partitioned
    # Two stages: one has the embedding, the generator and a few layers, the other has the other layers.
    "large_pipe": replace(_LARGE, engine=EngineConfig("pipeline", "pipe_zero1", pipeline_stages=2)),
    "xl_zero3": _XL,  # every kind of state is partitioned
    # Four stages, and data parallel; only the optimizer is partitioned (ZeRO-1).
    "xl_pipe": replace(_XL, engine=EngineConfig("pipeline", "pipe_zero1", pipeline_stages=4)),
    "xlme": replace(_BASE, name="xlme"),  # the name that comparisons give it
    # Table 2: without translation replaced token detection, so that no translation pairs are read; and without the
    # gated relative position bias too.
    "xlme_no_trtd": _NO_TRTD,
    "xlme_no_gate": replace(_NO_TRTD, name="xlme_no_gate", model=replace(_XLME_BASE, relative_bias="none")),
    # The discriminator predicts every token instead of judging it: how much of the gain is the loss at every token.
    "xlme_all_tokens": replace(_BASE, name="xlme_all_tokens", objective=ObjectiveConfig("all_tokens")),
    "xlmr": _XLMR,  # masked language modelling on monolingual rows
    # With translation language modelling: what the paper compares XLM-E with under equal training.
    "xlmr_tlm": replace(_XLMR, name="xlmr_tlm", data=DataConfig(2048, 2048, micro_batch=16)),
    "continue_xlmr": _CONTINUE,
    "continue_xlmr_large": _CONTINUE_LARGE,
    "ernie_m": _ERNIE_M,
    "ernie_m_stage2": _second_stage(_ERNIE_M),
    "ernie_m_large": _ERNIE_M_LARGE,
    "ernie_m_large_stage2": _second_stage(_ERNIE_M_LARGE),
    "xlm": _XLM,  # MLM and TLM in turns
    # Causal language modelling on monolingual rows.
    "xlm_clm": replace(
        _XLM,
        name="xlm_clm",
        objective=ObjectiveConfig("clm", mask_fraction=1.0),
        data=DataConfig(4096, 0, micro_batch=64),
        train=TrainConfig(),
    ),
    "xlm_mt": _XLM_MT,
    # Without pairs: denoising, which fades, and back-translation.
    "xlm_umt": replace(
        _XLM_MT,
        name="xlm_umt",
        model=replace(_XLM_MT.model, language_embeddings=("en", "fr")),
        objective=replace(_XLM_MT.objective, denoising=("0:1", "100000:0.1", "300000:0"), back_translation=("0:1",)),
        data=DataConfig(64, 0, micro_batch=8),
    ),
    "xlme_mt": replace(
        _XLM_MT,
        name="xlme_mt",
        model=replace(_XLME_BASE, decoder="interleaved", language_embeddings=_XNLI_LANGUAGES, dropout=0.1),
        data=DataConfig(0, 64, micro_batch=8),
        start=StartConfig(take="discriminator"),
    ),
}


def recipe(name: str) -> RunConfig:
    """The configuration of a recipe. Raises ValueError, naming the known ones, for another name."""
    if name not in RECIPES:
        raise ValueError(f"recipe {name} is not known: choose one of {', '.join(RECIPES)}")
    return RECIPES[name]
