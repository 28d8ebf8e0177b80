"""The baseline in XLM-E's setup: XLM-R's objective on the rows that XLM-E reads, alone and with translation pairs
(Table 2)."""

from dataclasses import replace

from ..config import DataConfig, EngineConfig, ModelConfig, ObjectiveConfig, RunConfig

MODEL = ModelConfig(
    vocabulary=250_002,
    width=768,
    heads=12,
    feed_forward=3072,
    discriminator_layers=12,
    norm="post",
    relative_bias="none",
)


def xlmr() -> RunConfig:
    """XLM-R Base: masked language modelling on monolingual rows."""
    return RunConfig(
        name="xlmr",
        model=MODEL,
        objective=ObjectiveConfig("mlm"),
        data=DataConfig(2048, 0, micro_batch=16),
        engine=EngineConfig(deepspeed="zero1"),
    )


def xlmr_tlm() -> RunConfig:
    """The same with translation language modelling: what the paper compares XLM-E with under equal training."""
    run = xlmr()
    return replace(run, name="xlmr_tlm", data=replace(run.data, para_rows=run.data.mono_rows))
