"""ERNIE-M Base (Ouyang et al., 2021): its first stage goes on from an XLM-R of the same shape, its second from the first."""

from dataclasses import replace

from ..config import DataConfig, EngineConfig, ObjectiveConfig, OptimizerConfig, RunConfig, StartConfig, TrainConfig
from .xlmr import MODEL


def ernie_m() -> RunConfig:
    """2,048 rows a step, here half of them of pairs; give --start.folder an XLM-R, and mix the data with --alpha 0.1."""
    return RunConfig(
        name="ernie_m",
        model=replace(MODEL, dropout=0.1),
        objective=ObjectiveConfig("ernie_m"),
        data=DataConfig(1024, 1024, micro_batch=16),
        optimizer=OptimizerConfig(learning_rate=2e-4, beta1=0.98, beta2=0.999),  # these and dropout as its Table 10 has them
        engine=EngineConfig(deepspeed="zero1"),
        train=TrainConfig(steps=150_000),
        start=StartConfig(take="encoder"),
    )


def ernie_m_stage2() -> RunConfig:
    """The second stage, on text alone; give --start.folder a run of the first. The paper has one number of steps, here each has it."""
    return replace(
        ernie_m(),
        name="ernie_m_stage2",
        objective=ObjectiveConfig("btmlm", pseudo_fractions=(0.05, 0.1, 0.15, 0.2)),
        data=DataConfig(2048, 0, micro_batch=16),
    )
