"""ERNIE-M (Ouyang et al., 2021; its Table 10), which trains in two stages.

The first stage continues from an XLM-R of the same shape: name it by --start.folder, and mix the data with --alpha 0.1.
In this stage half of the 2,048 rows of a step are pairs. The second stage reads monolingual text alone and continues
from a run of the first. The paper gives only one number of steps; here each stage has that number. The paper does not
mention gradient clipping; here gradients are clipped as in XLM-E.
"""

from dataclasses import replace

from ..config import DataConfig, EngineConfig, ObjectiveConfig, OptimizerConfig, RunConfig, StartConfig, TrainConfig
from .xlmr import XLMR

ERNIE_M = RunConfig(
    name="ernie_m",
    model=replace(XLMR.model, dropout=0.1, attention_dropout=0.1),
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
