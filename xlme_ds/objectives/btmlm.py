"""ERNIE-M's second stage: back-translation masked language modelling on monolingual rows (Ouyang et al., 2021, section
3.1). The model writes tokens of another language after a sentence, and then reads both as a pair.

L = L_BTMLM, a mean over the masked positions of the global batch. A row holds one item `<s> x </s> y </s>`: a sentence
x, and positions y that the model fills, called open (`data/pseudo_parallel.py`). The first pass, without gradient,
predicts a token of another language at every open position j, from x and a `<mask>` at j: p(y_j | x, M_j). The second
pass masks tokens of x and predicts them from the rest of x and from y: p(x_m | x \\ M, y).

B rows, T tokens, M masked positions, P open positions.
"""

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

import torch
from torch import Tensor

from ..config import ModelConfig, ObjectiveConfig, RunConfig
from ..data.batch import Batch
from ..data.collate import Collate, Purpose, languages_of_text
from ..data.pseudo_parallel import PseudoSides
from ..data.rows import PAD, UNK
from ..data.shards import RowStore
from ..models.pipeline import Flops, LanguageModelStage, masked_head_flops
from ..models.text_encoder import LanguageModel, LanguageModelOutput, Masking
from .mlm import MaskedLanguageModelling
from .protocol import Quantity, require_sentences


class OpenSideMasking(Masking):
    """The attention mask of both passes. In the first pass every position sees x and itself, and no open position sees
    another one. In the second pass no position is open, and every position sees its whole item."""

    def groups(self, batch: Batch) -> Tensor:
        """2 · segment, plus 1 at and after the row's first open position, int64 [B, T]."""
        open_BT = (batch.tokens_BT == PAD) & (batch.segments_BT > 0)
        return batch.segments_BT * 2 + open_BT.long().cummax(1).values

    def attention_mask(self, groups_BT: Tensor) -> Tensor:
        """The mask, bool [B, 1, T, T]: a query sees itself, and the keys of its item that come before the first
        open position."""
        query_BT1, key_B1T = groups_BT[:, :, None], groups_BT[:, None, :]
        same_item_BTT = query_BT1 // 2 == key_B1T // 2
        before_open_B1T = key_B1T % 2 == 0
        itself_TT = torch.eye(groups_BT.shape[1], dtype=torch.bool, device=groups_BT.device)
        return ((same_item_BTT & before_open_B1T) | itself_TT)[:, None]


def first_pass(batch: Batch) -> Batch:
    """The batch of the pass that fills the open positions. Its masked positions are the open positions, and all of them
    show `<mask>`."""
    open_P = batch.added.get("open_P", batch.masked_M[:0])  # a batch without `open_P` has no open positions
    # Where the uniform number is 1, `Masking.apply` shows `<mask>`, whatever fractions of random and original tokens
    # are set.
    ones_P = torch.ones(len(open_P), dtype=torch.float32, device=open_P.device)
    return batch._replace(masked_M=open_P, uniforms_M=ones_P, added={})


def second_pass(batch: Batch, first: Batch, predicted_P: Tensor) -> Batch:
    """`batch` with the open positions filled by `predicted_P`, the most likely tokens that the model predicted for
    `first`, the batch of the first pass.

    Taking the most likely token needs no randomness. `LanguageModel.exclude_special` makes the model predict only
    ordinary tokens here: a special token would change the item's layout, and a `<mask>` in y would never be predicted.
    """
    tokens = batch.tokens_BT.flatten().index_copy(0, first.masked_M, predicted_P)
    return batch._replace(tokens_BT=tokens.view_as(batch.tokens_BT), added={})


class BackTranslationModel(LanguageModel):
    """`LanguageModel` that runs two passes on a batch."""

    def forward(self, batch: Batch) -> LanguageModelOutput:  # type: ignore[override]
        """Fill the open positions in evaluation mode, then mask tokens of x and predict them."""
        first = first_pass(batch)
        training = self.training
        self.eval()
        self.exclude_special = True
        with torch.no_grad():
            predicted_P = super().forward(first).predicted_M
        self.exclude_special = False
        self.train(training)
        return super().forward(second_pass(batch, first, predicted_P))


class BackTranslationStage(LanguageModelStage):
    """The part of `BackTranslationModel` that one pipeline stage runs, the same in both passes."""

    two_passes = True
    first_pass = staticmethod(first_pass)
    second_pass = staticmethod(second_pass)


class BackTranslation(MaskedLanguageModelling):
    """Masked language modelling of sentences. The model first fills open positions after each sentence."""

    description = (
        "masked language modelling of one encoder on text, next to tokens of another language that it writes itself"
    )
    terms: tuple[str, ...] = ("btmlm",)
    quantities: Mapping[str, Quantity] = {
        "btmlm": Quantity("Masked-token loss next to tokens that it wrote", "nats a token", "mono", unigram=True),
        "accuracy": Quantity("Accuracy on masked tokens"),
    }
    accuracies = ("accuracy_mono",)
    masking_class = OpenSideMasking
    model_classes = BackTranslationModel, BackTranslationStage
    used_settings = (*MaskedLanguageModelling.used_settings, "objective.pseudo_fractions")

    def __init__(self, cfg: ObjectiveConfig):
        super().__init__(cfg)
        self.fractions = cfg.pseudo_fractions

    def check_rows(self, rows: RowStore, purpose: Purpose) -> None:
        """Raise ValueError if rows may hold several items (`mix --sentences` or `--documents`) instead of one."""
        if purpose in ("train", "evaluate"):
            require_sentences(rows, needed=False)

    def collate_for(self, rows: RowStore, purpose: Purpose) -> Collate:
        """Returns `PseudoSides.collate`, which opens positions. For the purposes `compare` and `show` it returns the
        plain `collate`."""
        if purpose in ("compare", "show"):
            return super().collate_for(rows, purpose)
        sides = PseudoSides(self.fractions, languages_of_text(rows))
        return lambda task_rows, seed, mask_fraction, step: sides.collate(task_rows, seed, mask_fraction)

    def as_probe(self, batch: Batch) -> Batch:
        """`batch` with the same ordinary token in all open positions. The model's own choice for a position, the most
        likely token, could change with rounding."""
        tokens = batch.tokens_BT.flatten().index_fill(0, batch.added["open_P"], UNK + 1)
        return batch._replace(tokens_BT=tokens.view_as(batch.tokens_BT), added={})

    def check(self, run: RunConfig) -> None:
        """Raise ValueError also if rows get no open positions, if the run reads pairs, or if the layout is not
        XLM-E's."""
        super().check(run)
        name = run.objective.name
        if not self.fractions:
            raise ValueError(
                f"objective.name {name} needs objective.pseudo_fractions: "
                "give fractions of a sentence's length, for example 0.05 0.1 0.15 0.2"
            )
        if run.data.para_rows:
            raise ValueError(f"objective.name {name} reads monolingual rows alone: set data.para_rows to 0")
        if run.model.layout != "xlme":
            raise ValueError(f"objective.name {name} needs the layout of pairs in xlme: set model.layout to xlme")

    def flops(self, cfg: ModelConfig, row_tokens: int) -> Flops:
        """Operations per token of both passes. The first pass has its softmax at the open positions, the second pass at
        the masked positions of the sentence."""
        one_pass = super().flops(cfg, row_tokens)
        # The mean fraction of a row's positions that the sentence takes. The rest of the row's positions is open.
        sentence_share = fmean(1 / (1 + fraction) for fraction in self.fractions)
        return replace(
            one_pass,
            softmax_last=masked_head_flops(cfg, self.mask_fraction * sentence_share),
            first_pass_layer=one_pass.one_layer,
            first_pass_softmax=masked_head_flops(cfg, 1 - sentence_share),
        )

    def term_of_masked(self, batch: Batch) -> Tensor:
        """The index of each masked position's term, int64 [M]: always 0, because there is one term."""
        return torch.zeros_like(batch.masked_M)
