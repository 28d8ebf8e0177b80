"""XLM (Conneau and Lample, 2019) as it was trained for XNLI, with twelve layers and the fifteen languages of that test.

Mix the data with --layout xlm --row-tokens 256. The paper does not give the attention dropout, the norms' epsilon, the
prediction layer, the betas and the gradient clipping: these are taken from the published code. The number of steps was
not published: here the number of steps and the schedule are those of XLM-E.
"""

from dataclasses import replace

from ..config import DataConfig, EngineConfig, ModelConfig, ObjectiveConfig, OptimizerConfig, RunConfig, TrainConfig

XNLI_LANGUAGES = ("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh-Hans")


XLM = RunConfig(
    name="xlm",
    model=ModelConfig(
        vocabulary=95_000,
        width=1024,
        heads=8,
        feed_forward=4096,
        discriminator_layers=12,
        max_positions=256,
        layout="xlm",
        language_embeddings=XNLI_LANGUAGES,
        dropout=0.1,
        attention_dropout=0.1,
        norm="post",
        norm_epsilon=1e-12,
        relative_bias="none",
        masked_head="linear",
    ),
    objective=ObjectiveConfig("mlm"),
    # A step reads 4,096 rows of one task, 64 on each of 64 GPUs. These rows have 2^20 tokens, as many as a step of
    # XLM-E reads of each task.
    data=DataConfig(mono_rows=4096, para_rows=4096, micro_batch=64, alternate=True),
    optimizer=OptimizerConfig(learning_rate=1e-4, beta2=0.999, epsilon=1e-8, weight_decay=0.0, clip=5.0),
    engine=EngineConfig(deepspeed="zero1"),
    train=TrainConfig(log_every=11),  # odd: tasks alternate, and an even interval would always log the same task
)

RECIPES = [
    ("XLM for XNLI: masked and translation language modelling in turns (fits a GPU of 24 GB).", XLM),
    (
        "XLM for XNLI: causal language modelling on text alone (fits a GPU of 24 GB).",
        replace(
            XLM,
            name="xlm_clm",
            objective=ObjectiveConfig("clm", mask_fraction=1.0),
            data=DataConfig(mono_rows=4096, para_rows=0, micro_batch=64),
            train=TrainConfig(),
        ),
    ),
]
