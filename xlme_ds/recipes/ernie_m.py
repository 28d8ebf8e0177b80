"""ERNIE-M Base, its first stage (Ouyang et al., 2021): goes on from an XLM-R of the same shape."""

from ..config import DataConfig, EngineConfig, ObjectiveConfig, OptimizerConfig, RunConfig, StartConfig, TrainConfig
from .xlmr import MODEL


def ernie_m() -> RunConfig:
    """2,048 rows a step, here half of them of pairs; give --start.folder an XLM-R, and mix the data with --alpha 0.1."""
    return RunConfig(
        name="ernie_m",
        model=MODEL,
        objective=ObjectiveConfig("ernie_m"),
        data=DataConfig(1024, 1024, micro_batch=16),
        optimizer=OptimizerConfig(learning_rate=2e-4, beta1=0.98, beta2=0.999),  # as its Table 10 prints them
        engine=EngineConfig(deepspeed="zero1"),
        train=TrainConfig(steps=150_000),
        start=StartConfig(take="encoder"),
    )
