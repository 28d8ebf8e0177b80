"""Random token substitution (RTS; Di Liello et al., 2022, "Effective Pre-Training Objectives for Transformer-based
Autoencoders"): replaced token detection whose replacements are drawn uniformly from the ordinary tokens. There is no
generator and no softmax, so a step is cheap. A run of the objective `electra` can start from the discriminator that is
trained here.

L = L_MRTD + L_TRTD, each a mean over the tokens of its task. A replacement that equals the original token counts as
original. Tasks are in the order of data.rows.TASKS.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..config import EncoderName, ModelConfig, ObjectiveConfig
from ..data.batch import Batch
from ..data.rows import TASKS
from ..models.electra import Electra, ElectraOutput
from ..models.encoder import lookup
from ..models.pipeline import ElectraStage, Flops
from ..models.text_encoder import Masking
from .electra import ElectraObjective
from .protocol import Quantity

_RANDOM_TOKENS = Masking(random_fraction=1.0, keep_fraction=0.0)  # every masked position shows a random token


class SubstitutionModel(Electra):
    """`Electra` without generator. In its output `predicted_M` has the random tokens, and `nll_M` is 0."""

    has_generator = False

    def embed_for_discriminator(self, ids_BT: Tensor) -> Tensor:
        """The discriminator's token embeddings, [B, T, D]. This lookup gives the table a dense gradient. On a CPU the
        lookup of `Electra` gives a sparse gradient, which autograd adds to the masked head's dense one; here there is
        no masked head."""
        return lookup(ids_BT, self.embedding_blocks)

    def generate(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the first three fields of `ElectraOutput`. The masked positions get random tokens, which the batch's
        uniform random numbers choose."""
        return _generator_outputs(batch, _RANDOM_TOKENS.apply(batch, self.cfg.vocabulary))


def _generator_outputs(batch: Batch, corrupted_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    nll_M = torch.zeros_like(batch.uniforms_M)
    return nll_M, corrupted_BT.flatten()[batch.masked_M], corrupted_BT


class SubstitutionStage(ElectraStage, SubstitutionModel):
    """The part of `SubstitutionModel` that one pipeline stage runs. Stages send no outputs of a generator."""

    def _start(self, batch: Batch) -> tuple[Tensor, ...]:
        return self.discriminator_input(batch, self.generate(batch)[-1])

    def output(self, tensors: Sequence[Tensor], batch: Batch) -> ElectraOutput:
        """The output of `SubstitutionModel` for `batch`, from the tensors that the last stage returned."""
        *_, logits_BT, _segments_BT, corrupted_BT, _seeds_B = tensors
        return ElectraOutput(*_generator_outputs(batch, corrupted_BT), logits_BT)


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
    no_gdes = "has no generator, and model.embedding_sharing gdes needs one"

    def __init__(self, cfg: ObjectiveConfig):
        super().__init__(cfg)
        self.weights = torch.ones(len(self.terms), dtype=torch.float64)

    def as_probe(self, batch: Batch) -> Batch:
        """`batch` unchanged: no sample depends on rounding."""
        return batch

    def flops(self, cfg: ModelConfig, row_tokens: int) -> Flops:
        """The operations per token of ELECTRA's discriminator alone."""
        electra = super().flops(cfg, row_tokens)
        return Flops(layers=electra.layers, one_layer=electra.one_layer, head=electra.head)

    @staticmethod
    def counts(batch: Batch) -> Tensor:
        """The number of non-padding tokens of each task, float64 [2]."""
        return ElectraObjective.counts(batch)[len(TASKS) :]

    @classmethod
    def sums(cls, output: ElectraOutput, batch: Batch) -> Tensor:
        """The summed loss of each task, float32 [2]. The sums carry the gradient."""
        return super().sums(output, batch)[len(TASKS) :]

    def by_language(self, output: ElectraOutput, batch: Batch, languages: int) -> Tensor:
        """`sums` (index 0) and `counts` (index 1) of each language's tokens, float64 [2, 2, languages]."""
        return super().by_language(output, batch, languages)[:, len(TASKS) :]

    def summarise(self, sums: Tensor, counts: Tensor, statistics: Tensor) -> dict[str, float]:
        """ELECTRA's metrics without the generator's."""
        metrics = super().summarise(sums, counts, statistics)
        return {name: value for name, value in metrics.items() if not name.startswith("generator_")}
