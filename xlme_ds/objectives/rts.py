"""Random token substitution (RTS; Di Liello et al., 2022, "Effective Pre-Training Objectives for Transformer-based
Autoencoders"): replaced token detection whose replacements are drawn uniformly from the ordinary tokens. There is no
generator and no softmax, so a step is cheap. A run of the objective `electra` can start from the discriminator that is
trained here.

L = L_MRTD + L_TRTD, each a mean over the tokens of its task. A replacement that equals the original token counts as
original. Tasks are in the order of data.rows.TASKS.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..config import EncoderName, ModelConfig, ObjectiveConfig
from ..data.batch import Batch
from ..models.electra import Electra, ElectraOutput
from ..models.pipeline import ElectraStage, Flops
from ..models.text_encoder import Masking
from .electra import ElectraObjective
from .protocol import Quantity

_RANDOM_TOKENS = Masking(random_fraction=1.0, keep_fraction=0.0)  # every masked position shows a random token


class SubstitutionModel(Electra):
    """`Electra` without generator. In its output `predicted_M` has the random tokens, and `nll_M` is 0."""

    has_generator = False

    def generate(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the first three fields of `ElectraOutput`. The masked positions get random tokens, which the batch's
        uniform random numbers choose."""
        corrupted_BT = _RANDOM_TOKENS.apply(batch, self.cfg.vocabulary)
        return torch.zeros_like(batch.uniforms_M), corrupted_BT.flatten()[batch.masked_M], corrupted_BT


class SubstitutionStage(ElectraStage, SubstitutionModel):
    """The part of `SubstitutionModel` that one pipeline stage runs."""


class RandomTokenSubstitution(ElectraObjective):
    """`ElectraObjective` without the terms and metrics of the generator."""

    description = "replaced token detection, of tokens that random ones replace"
    terms: tuple[str, ...] = ("mrtd", "trtd")
    quantities: Mapping[str, Quantity] = {
        name: quantity
        for name, quantity in ElectraObjective.quantities.items()
        if not quantity.unigram and name != "generator_accuracy"
    } | {"replaced_fraction": Quantity("Tokens that were replaced", "fraction")}
    encoders: Mapping[EncoderName, str] = {"discriminator": "replaced_head."}
    used_settings = ()
    model_classes = SubstitutionModel, SubstitutionStage
    means_over = ("tokens",)
    why_no_gdes = "has no generator, and model.embedding_sharing gdes needs one"

    def __init__(self, cfg: ObjectiveConfig):
        super().__init__(cfg)
        self.weights = torch.ones(len(self.terms), dtype=torch.float64)

    def as_probe(self, batch: Batch) -> Batch:
        """`batch` unchanged: no sample depends on rounding."""
        return batch

    def flops(self, cfg: ModelConfig, row_tokens: int) -> Flops:
        """The operations per token of ELECTRA's discriminator alone."""
        return replace(super().flops(cfg, row_tokens), generator=0.0, softmax_first=0.0)

    @classmethod
    def losses(cls, output: ElectraOutput, batch: Batch) -> list[Tensor]:
        """The discriminator's loss at every token, float32 [B, T]."""
        return super().losses(output, batch)[1:]
