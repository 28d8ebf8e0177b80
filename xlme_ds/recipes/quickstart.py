"""The ten-minute run on two CPU cores, with all parts of a large run: ZeRO-3, two processes, both tasks."""

from ..config import DataConfig, EngineConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig

RECIPES = [
    (
        "A small XLM-E, trained on one short text in 91 languages (10 to 15 minutes on two CPU cores).",
        # The settings were chosen by trial (docs/lab/quickstart.md).
        RunConfig(
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
                init_std=0.05,  # width · init_std² is 0.32, nearly as in XLM-E Base (768 · 0.02² = 0.31)
            ),
            data=DataConfig(mono_rows=8, para_rows=8, micro_batch=8),
            optimizer=OptimizerConfig(learning_rate=1.2e-3, warmup_steps=100),
            engine=EngineConfig(deepspeed="zero3_cpu"),
            train=TrainConfig(
                steps=1100, log_every=10, eval_every=100, eval_rows=128, save_every=100, keep_last=2, keep_every=0
            ),
        ),
    )
]
