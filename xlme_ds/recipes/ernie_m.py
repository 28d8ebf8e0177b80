"""ERNIE-M (Ouyang et al., 2021; its Table 10): the first stage goes on from an XLM-R of the same shape, the second from
the first.

The paper names no gradient clipping: it is XLM-E's here. Its batch of 2,048 rows is half of pairs in the first stage.
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
from .xlmr import MODEL

BASE = replace(MODEL, dropout=0.1, attention_dropout=0.1)
LARGE = replace(BASE, width=1024, heads=16, feed_forward=4096, discriminator_layers=24)


def ernie_m() -> RunConfig:
    """The first stage of Base; give --start.folder an XLM-R, and mix the data with --alpha 0.1."""
    return _first_stage("ernie_m", BASE, learning_rate=2e-4, steps=150_000, micro_batch=16)


def ernie_m_stage2() -> RunConfig:
    """The second stage, on text alone; give --start.folder a run of the first. The paper has one number of steps, here
    each has it."""
    return _second_stage(ernie_m())


def ernie_m_large() -> RunConfig:
    """`ernie_m` of the size of XLM-R Large."""
    return _first_stage("ernie_m_large", LARGE, learning_rate=1e-4, steps=200_000, micro_batch=8)


def ernie_m_large_stage2() -> RunConfig:
    """`ernie_m_stage2` of the size of XLM-R Large."""
    return _second_stage(ernie_m_large())


def _first_stage(name: str, model: ModelConfig, learning_rate: float, steps: int, micro_batch: int) -> RunConfig:
    return RunConfig(
        name=name,
        model=model,
        objective=ObjectiveConfig("ernie_m"),
        data=DataConfig(1024, 1024, micro_batch),
        optimizer=OptimizerConfig(learning_rate=learning_rate, beta1=0.98, beta2=0.999),
        engine=EngineConfig(deepspeed="zero1"),
        train=TrainConfig(steps=steps),
        start=StartConfig(take="encoder"),
    )


def _second_stage(first: RunConfig) -> RunConfig:
    return replace(
        first,
        name=f"{first.name}_stage2",
        objective=ObjectiveConfig("btmlm", pseudo_fractions=(0.05, 0.1, 0.15, 0.2)),
        data=DataConfig(2048, 0, first.data.micro_batch),
    )
