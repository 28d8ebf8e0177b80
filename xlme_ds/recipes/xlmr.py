"""XLM-R as the baseline of XLM-E (Table 2 of its paper), on the rows that XLM-E reads; XLM-E and ERNIE-M from XLM-R.

`continue_xlmr` and `continue_xlmr_large` turn an XLM-R into an XLM-E of the same shape, and add the gated relative
position bias. They read XLM-R from xlm-roberta-base or xlm-roberta-large in the current folder, or from --start.folder.
No paper has these two recipes.

ERNIE-M (Ouyang et al., 2021; its Table 10) trains in two stages, the first from an XLM-R.
The first stage continues from an XLM-R of the same shape: name it by --start.folder, and mix the data with --alpha 0.1.
In this stage half of the 2,048 rows of a step are pairs. The second stage reads monolingual text alone and continues
from a run of the first. The paper gives only one number of steps; here each stage has that number. The paper does not
mention gradient clipping; here gradients are clipped as in XLM-E.
"""

from dataclasses import replace

from ..config import (
    DataConfig,
    EngineConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    StartConfig,
    TrainConfig,
)
from .xlme import BASE, LARGE

XLMR_BASE = ModelConfig(
    vocabulary=250_002,
    width=768,
    heads=12,
    feed_forward=3072,
    discriminator_layers=12,
    norm="post",
    relative_bias="none",
)


XLMR = RunConfig(
    name="xlmr",
    model=XLMR_BASE,
    objective=ObjectiveConfig("mlm"),
    data=DataConfig(mono_rows=2048, para_rows=0, micro_batch=16),
    engine=EngineConfig(deepspeed="zero1"),
)
CONTINUE_XLMR = RunConfig(
    name="continue_xlmr",
    model=BASE,
    data=DataConfig(mono_rows=2048, para_rows=2048, micro_batch=16),
    # The learning rate is the one with which ERNIE-M continues from XLM-R. Rates for training from scratch are more
    # than twice as high and would undo what the weights have learned. The warm-up is short, because few parameters are
    # new: the head of the discriminator, and the relative biases, which begin at 0.
    optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=2_500),
    engine=EngineConfig(deepspeed="zero1"),
    train=TrainConfig(steps=50_000),
    start=StartConfig(folder="xlm-roberta-base", take="encoder"),
)

ERNIE_M = RunConfig(
    name="ernie_m",
    model=replace(XLMR_BASE, dropout=0.1, attention_dropout=0.1),
    objective=ObjectiveConfig("ernie_m"),
    data=DataConfig(mono_rows=1024, para_rows=1024, micro_batch=16),
    optimizer=OptimizerConfig(learning_rate=2e-4, beta1=0.98, beta2=0.999),
    engine=EngineConfig(deepspeed="zero1"),
    train=TrainConfig(steps=150_000),
    start=StartConfig(take="encoder"),
)
ERNIE_M_LARGE = replace(
    ERNIE_M,
    name="ernie_m_large",
    model=replace(ERNIE_M.model, width=1024, heads=16, feed_forward=4096, discriminator_layers=24),
    data=DataConfig(mono_rows=1024, para_rows=1024, micro_batch=8),
    optimizer=replace(ERNIE_M.optimizer, learning_rate=1e-4),
    train=TrainConfig(steps=200_000),
)


def _second_stage(first: RunConfig) -> RunConfig:
    return replace(
        first,
        name=f"{first.name}_stage2",
        objective=ObjectiveConfig("btmlm", pseudo_fractions=(0.05, 0.1, 0.15, 0.2)),
        data=DataConfig(mono_rows=2048, para_rows=0, micro_batch=first.data.micro_batch),
    )


RECIPES = [
    ("XLM-R Base in XLM-E's setup: masked language modelling on monolingual rows only (fits a GPU of 24 GB).", XLMR),
    (
        "XLM-R Base with translation language modelling, the paper's baseline for XLM-E (fits a GPU of 24 GB).",
        replace(XLMR, name="xlmr_tlm", data=DataConfig(mono_rows=2048, para_rows=2048, micro_batch=16)),
    ),
    ("XLM-E Base from the weights of XLM-R Base (fits a GPU of 24 GB).", CONTINUE_XLMR),
    (
        "XLM-E in XLM-R Large's shape, from XLM-R Large's weights (fits a GPU of 24 GB).",
        replace(
            CONTINUE_XLMR,
            name="continue_xlmr_large",
            model=replace(LARGE, vocabulary=250_002, norm="post"),
            data=DataConfig(mono_rows=2048, para_rows=2048, micro_batch=8),
            optimizer=replace(CONTINUE_XLMR.optimizer, learning_rate=1e-4),
            start=replace(CONTINUE_XLMR.start, folder="xlm-roberta-large"),
        ),
    ),
    ("ERNIE-M Base, first stage, on text and pairs, from an XLM-R (fits a GPU of 24 GB).", ERNIE_M),
    (
        "ERNIE-M Base, second stage, on text alone, from a run of the first (fits a GPU of 24 GB).",
        _second_stage(ERNIE_M),
    ),
    (
        "ERNIE-M Large, first stage, on text and pairs, from an XLM-R (fits 2 or more GPUs of 24 GB).",
        ERNIE_M_LARGE,
    ),
    (
        "ERNIE-M Large, second stage, on text alone, from a run of the first (fits a GPU of 24 GB).",
        _second_stage(ERNIE_M_LARGE),
    ),
]
