"""XLM-R as the baseline of XLM-E (Table 2 of its paper), on the rows that XLM-E reads; and XLM-E continued from XLM-R.

`continue_xlmr` and `continue_xlmr_large` turn an XLM-R into an XLM-E of the same shape, and add the gated relative
position bias. They read XLM-R from xlm-roberta-base or xlm-roberta-large in the current folder, or from --start.folder.
No paper has these two recipes.
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

XLMR = RunConfig(
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
]
