"""Machine translation: as in XLM, trained on pairs or on monolingual text, and with XLM-E Base as encoder.

The languages of each recipe are examples: set your own, and the size of your vocabulary. Set --start.folder to a run
whose encoder has the recipe's shape. `xlm_mt` reads pairs that were mixed with --layout xlm --row-tokens 256. `xlm_umt`
reads sentences that were mixed with --sentences in addition. The paper trains until the validation score stops
improving. So the learning rates here do not depend on train.steps, and a run can be made longer.
"""

from dataclasses import replace

from ..config import DataConfig, EngineConfig, ObjectiveConfig, RunConfig, ScheduleConfig, StartConfig, TrainConfig
from .xlm import XLM, XNLI_LANGUAGES
from .xlme import BASE

XLM_MT = RunConfig(
    name="xlm_mt",
    model=replace(XLM.model, vocabulary=60_000, discriminator_layers=6, language_embeddings=("en", "ro")),
    objective=ObjectiveConfig("mt", mask_fraction=1.0),
    data=DataConfig(mono_rows=0, para_rows=64, micro_batch=8),  # about 2,000 tokens on each of eight GPUs
    optimizer=replace(XLM.optimizer, warmup_steps=4000, beta2=0.98),  # the betas and the warm-up of XLM's code
    schedule=ScheduleConfig("inverse_sqrt"),
    engine=EngineConfig(deepspeed="zero1"),
    train=TrainConfig(steps=100_000),
    start=StartConfig(take="encoder"),
)

RECIPES = [
    ("XLM's translation, trained on pairs (fits a GPU of 24 GB).", XLM_MT),
    (
        "XLM's translation without pairs: back-translation, and denoising that fades out (fits a GPU of 24 GB).",
        replace(
            XLM_MT,
            name="xlm_umt",
            model=replace(XLM_MT.model, language_embeddings=("en", "fr")),
            objective=replace(XLM_MT.objective, denoising=("0:1", "100000:0.1", "300000:0"), back_translation=("0:1",)),
            data=DataConfig(mono_rows=64, para_rows=0, micro_batch=8),
        ),
    ),
    (
        "XLM's translation with XLM-E Base as encoder and DeltaLM's decoder (fits a GPU of 24 GB).",
        replace(
            XLM_MT,
            name="xlme_mt",
            model=replace(BASE, decoder="interleaved", language_embeddings=XNLI_LANGUAGES, dropout=0.1),
            start=StartConfig(take="discriminator"),  # the decoder (Ma et al., 2021) starts from it too
        ),
    ),
]
