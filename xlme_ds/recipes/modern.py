"""Encoders with the layers of ModernBERT Base (`model.body modern`), trained with XLM-E's objective or with masked
language modelling, on rows of 1,024 tokens. No paper has these recipes."""

from dataclasses import replace

from ..config import DataConfig, ModelConfig, ObjectiveConfig, RunConfig

MODERN = RunConfig(
    name="modern_base",
    model=ModelConfig(
        vocabulary=250_002,
        width=768,
        heads=12,
        feed_forward=1152,
        generator_layers=7,
        discriminator_layers=22,
        max_positions=1024,
        body="modern",
        norm="pre",
        embedding_norm=True,
        absolute_positions=False,
        relative_bias="none",
    ),
    data=DataConfig(mono_rows=1024, para_rows=1024, micro_batch=16),
)

RECIPES = [
    (
        "XLM-E's objective with ModernBERT's body; the generator has a third of the layers (fits a GPU of 40 GB).",
        MODERN,
    ),
    (
        "Masked and translation language modelling with ModernBERT's body and mask rate, 30% (fits a GPU of 24 GB).",
        replace(MODERN, name="modern_base_mlm", objective=ObjectiveConfig("mlm", mask_fraction=0.3)),
    ),
]
