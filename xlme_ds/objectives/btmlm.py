"""ERNIE-M's second stage: back-translation masked language modelling on monolingual rows (Ouyang et al., 2021, section
3.1): one model writes a pseudo-parallel side, then reads it.

L = L_BTMLM, a mean over the masked positions of the global batch: a token is predicted from the rest of its sentence
and from tokens of another language that the same weights wrote after it. In an item `<s> x </s> y </s>` the places of y
are open at first (`data/pseudo_parallel.py`). The first pass, without gradient, fills each from x and its own `<mask>`
with its position: p(y_j | x, M_j). The second pass masks x and predicts it from the rest of x and from y:
p(x_m | x \\ M, y).

B rows, T tokens, M masked positions, P open places.
"""

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..config import ModelConfig, ObjectiveConfig, RunConfig
from ..data.batch import Batch
from ..data.collate import Collate, Purpose, languages_of_text
from ..data.pseudo_parallel import PseudoSides
from ..data.rows import PAD, UNK
from ..models.pipeline import Flops, LanguageModelStage, Part, masked_head_forward
from ..models.text_encoder import LanguageModel, LanguageModelOutput, Masking
from .mlm import MaskedLanguageModelling
from .protocol import Quantity, require_sentences

if TYPE_CHECKING:
    from ..data.shards import RowStore


class OpenSide(Masking):
    """The attention mask of both passes. While y is open, x sees x, and an open place sees x and itself. Once y is
    filled, every position sees its whole item."""

    def groups(self, batch: Batch) -> Tensor:
        """Twice the item's number, plus 1 from the row's first open place on."""
        open_BT = (batch.tokens_BT == PAD) & (batch.segments_BT > 0)
        return batch.segments_BT * 2 + open_BT.long().cummax(1).values

    def allowed(self, groups_BT: Tensor) -> Tensor:
        """A position sees itself and its item's x; once y is filled, no place is open and the whole item counts as
        x."""
        query_BT1, key_B1T = groups_BT[:, :, None], groups_BT[:, None, :]
        itself_TT = torch.eye(groups_BT.shape[1], dtype=torch.bool, device=groups_BT.device)
        of_item_BTT = (query_BT1 // 2 == key_B1T // 2) & (key_B1T % 2 == 0)
        return (of_item_BTT | itself_TT)[:, None]


def first_pass(batch: Batch) -> Batch:
    """The batch of the pass that fills the open places: its masked positions are the open places, ascending, and all
    show `<mask>`."""
    # With a uniform of 1 a position shows `<mask>`, whatever the shares of random and original tokens.
    open_P = batch.added.get("open_P", batch.masked_M[:0])
    always = torch.ones(len(open_P), dtype=torch.float32, device=open_P.device)
    return batch._replace(masked_M=open_P, uniforms_M=always, added={})


def second_pass(batch: Batch, first: Batch, predicted_P: Tensor) -> Batch:
    """`batch` with the open places filled: `first` is the result of `first_pass`, `predicted_P` the model's most likely
    tokens.

    Taking the most likely token needs no randomness. Only ordinary tokens are predicted (`LanguageModel.writing`): a
    special token would change the item's layout, and a `<mask>` in y would never be predicted.
    """
    tokens = batch.tokens_BT.flatten().index_copy(0, first.masked_M, predicted_P)
    return batch._replace(tokens_BT=tokens.view_as(batch.tokens_BT), added={})


class BackTranslationModel(LanguageModel):
    """`LanguageModel` that passes over a batch twice."""

    def forward(self, batch: Batch) -> LanguageModelOutput:  # type: ignore[override]
        """Fill the open places in evaluation mode, then mask and predict."""
        first, training = first_pass(batch), self.training
        self.eval()
        self.writing = True
        with torch.no_grad():
            predicted_P = super().forward(first).predicted_M
        self.writing = False
        self.train(training)
        return super().forward(second_pass(batch, first, predicted_P))


class BackTranslationStage(LanguageModelStage):
    """The part of `BackTranslationModel` that one stage runs, the same in both passes."""

    two_passes = True
    first_pass = staticmethod(first_pass)
    second_pass = staticmethod(second_pass)


class BackTranslation(MaskedLanguageModelling):
    """Masked language modelling of sentences; the model first fills open places after each sentence."""

    description = (
        "masked language modelling of one encoder on text, next to tokens of another language that it writes itself"
    )
    terms: tuple[str, ...] = ("btmlm",)
    quantities: Mapping[str, Quantity] = {
        "btmlm": Quantity("Masked-token loss next to tokens that it wrote", "nats a token", "mono", unigram=True),
        "accuracy": Quantity("Accuracy on masked tokens"),
    }
    accuracies = ("accuracy_mono",)
    masking_kind = OpenSide
    reads = (*MaskedLanguageModelling.reads, "objective.pseudo_fractions")

    def __init__(self, cfg: ObjectiveConfig):
        super().__init__(cfg)
        self.fractions = cfg.pseudo_fractions

    def check_rows(self, rows: "RowStore", purpose: Purpose) -> None:
        """Raise ValueError if a row holds the packed sentences of `mix --sentences`, not one item."""
        if purpose in ("train", "evaluate"):
            require_sentences(rows, needed=False)

    def batches(self, rows: "RowStore", purpose: Purpose) -> Collate:
        """Batches with open places (`PseudoSides`)."""
        if purpose in ("compare", "show"):
            return super().batches(rows, purpose)
        sides = PseudoSides(self.fractions, languages_of_text(rows))
        return lambda parts, seed, mask_fraction, step: sides.collate(parts, seed, mask_fraction)

    def probe(self, batch: Batch) -> Batch:
        """`batch` with a fixed ordinary token in all open places, as rounding could change the most likely tokens."""
        tokens = batch.tokens_BT.flatten().index_fill(0, batch.added["open_P"], UNK + 1)
        return batch._replace(tokens_BT=tokens.view_as(batch.tokens_BT), added={})

    def check(self, run: RunConfig) -> None:
        """Raise ValueError without places to write into, with rows of pairs, or with another layout than XLM-E's."""
        super().check(run)
        name = run.objective.name
        if not self.fractions:
            raise ValueError(
                f"objective.name {name} needs objective.pseudo_fractions: "
                "give shares of a sentence, for example 0.05 0.1 0.15 0.2"
            )
        if run.data.para_rows:
            raise ValueError(f"objective.name {name} reads monolingual rows alone: set data.para_rows to 0")
        if run.model.layout != "xlme":
            raise ValueError(
                f"objective.name {name} lays its sentences out as xlme has pairs: set model.layout to xlme"
            )

    def build(self, cfg: ModelConfig, part: Part | None = None) -> LanguageModel:
        """The model that passes over a batch twice, or its `part` that a pipeline's stage runs."""
        arguments = cfg, self.masking, self.z_loss
        return BackTranslationModel(*arguments) if part is None else BackTranslationStage(*arguments, part=part)

    def flops(self, cfg: ModelConfig, row_tokens: int) -> Flops:
        """Of a full row the share 1 / (1 + fraction) is sentence and the rest open places, which the first pass
        fills."""
        one_pass = super().flops(cfg, row_tokens)
        sentence = fmean(1 / (1 + fraction) for fraction in self.fractions)
        return replace(
            one_pass,
            softmax_last=masked_head_forward(cfg, self.mask_fraction * sentence),
            first_pass_layer=one_pass.layer,
            first_pass_softmax=masked_head_forward(cfg, 1 - sentence),
        )

    def term_of_masked(self, batch: Batch) -> Tensor:
        """Zeros, [M], because there is one term."""
        return torch.zeros_like(batch.masked_M)
