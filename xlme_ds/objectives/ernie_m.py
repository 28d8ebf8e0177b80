"""The two stages of ERNIE-M (Ouyang et al., 2021).

**First stage** (`ErnieM`): MMLM on text, TLM and CAMLM on translation pairs. L = L_MMLM + L_TLM + L_CAMLM. Each term is
a mean over its own masked positions in the global batch; MMLM is the term `mlm`. Each time that a pair is read, a coin
decides whether it counts for TLM or for CAMLM.

In cross-attention masking (CAMLM; section 3.1) a masked token of one side (text) of a pair is predicted from the other
side alone. For a pair with sides e and f, each with masked positions m and unmasked positions u, every layer lets

    e_u see e_u      f_u see f_u      e_m see f_u and e_m      f_m see e_u and f_m

so nothing of a side's unmasked tokens reaches its masked positions, through any number of layers. This is the mask of
the paper's figure and text; in the paper's equation e_m does not see e_m.

**Second stage** (`BackTranslation`): back-translation masked language modelling on monolingual rows (section 3.1). The
model writes tokens of another language after a sentence, and then reads both as a pair.

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
from ..data.rows import PAD, TASKS, UNK
from ..data.shards import RowStore
from ..models.pipeline import Flops, LanguageModelStage, masked_head_flops
from ..models.text_encoder import LanguageModel, LanguageModelOutput, Masking
from .mlm import MaskedLanguageModelling
from .protocol import Quantity, require_sentences

# A position's role is 0 if it sees its whole item, else 1 + 2 · side + (1 if it is masked). All roles are smaller than
# _ROLE_LIMIT, so the number segment · _ROLE_LIMIT + role determines both segment and role.
_ROLE_LIMIT = 8


class CrossMasking(Masking):
    """Cross-attention masking of random translation pairs, about half of all. These pairs are called crossed. All other
    items are masked as in `Masking`."""

    def crossed(self, batch: Batch) -> Tensor:
        """Whether a position is in a crossed pair, bool [B, T]. A fair coin decides it for each pair."""
        rows, tokens = batch.tokens_BT.shape
        # Each item of the batch gets its own number: a row has at most `tokens` items, and segment 0 is padding.
        item_BT = torch.arange(rows, device=batch.tokens_BT.device)[:, None] * (tokens + 1) + batch.segments_BT
        item_M = item_BT.flatten()[batch.masked_M]
        first_of_item_M = torch.ones_like(item_M, dtype=torch.bool)
        first_of_item_M[1:] = item_M[1:] != item_M[:-1]
        # The coin is the lowest of the 24 bits of the item's first uniform number. The high bits cannot be used: they
        # decide what a position shows.
        bit_M = (batch.uniforms_M.double() * 2**24).long() & 1
        coins = torch.zeros(rows * (tokens + 1), dtype=torch.int64, device=item_M.device)
        coins = coins.index_add(0, item_M, bit_M * first_of_item_M)
        return (coins[item_BT] > 0) & (batch.task_B == TASKS.index("para"))[:, None]

    def apply(self, batch: Batch, vocabulary: int) -> Tensor:
        """The tokens that the model reads, [B, T]. In crossed pairs every masked position shows `<mask>`: an original
        token there would be visible to the other masked positions of its side."""
        tokens_BT = super().apply(batch, vocabulary)
        return torch.where(self.crossed(batch) & _is_masked(batch), vocabulary - 1, tokens_BT)

    def groups(self, batch: Batch) -> Tensor:
        """segment · _ROLE_LIMIT + role, int64 [B, T]."""
        role_BT = 1 + 2 * batch.sides_BT + _is_masked(batch).long()
        return batch.segments_BT * _ROLE_LIMIT + torch.where(self.crossed(batch), role_BT, 0)

    def attention_mask(self, groups_BT: Tensor) -> Tensor:
        """The attention mask, bool [B, 1, T, T], from the segments and roles of query and key."""
        segment_BT, role_BT = groups_BT // _ROLE_LIMIT, groups_BT % _ROLE_LIMIT
        side_BT, masked_BT = (role_BT - 1) // 2, (role_BT - 1) % 2 == 1
        sees_whole_item_BT = role_BT == 0

        same_side_BTT = side_BT[:, :, None] == side_BT[:, None, :]
        masked_key_B1T = masked_BT[:, None, :]
        # A masked query sees the masked keys of its side and the unmasked ones of the other side.
        for_masked_BTT = same_side_BTT == masked_key_B1T
        for_unmasked_BTT = same_side_BTT & ~masked_key_B1T
        crossed_BTT = torch.where(masked_BT[:, :, None], for_masked_BTT, for_unmasked_BTT)
        same_item_BTT = segment_BT[:, :, None] == segment_BT[:, None, :]
        return (same_item_BTT & (sees_whole_item_BT[:, :, None] | crossed_BTT))[:, None]


def _is_masked(batch: Batch) -> Tensor:
    """Whether a position is masked, bool [B, T]."""
    masked_N = torch.zeros(batch.tokens_BT.numel(), dtype=torch.bool, device=batch.tokens_BT.device)
    return masked_N.index_fill(0, batch.masked_M, True).view_as(batch.tokens_BT)


class ErnieM(MaskedLanguageModelling):
    """Masked language modelling with a third term, for the crossed pairs."""

    description = (
        "masked language modelling of one encoder, on {rows}; half of the pairs are masked so that each side is "
        "predicted from the other alone"
    )
    terms: tuple[str, ...] = ("mlm", "tlm", "camlm")
    quantities: Mapping[str, Quantity] = {
        **MaskedLanguageModelling.quantities,
        "camlm": Quantity("Masked-token loss from the other side alone", "nats a token", "para"),
        "accuracy_crossed": Quantity("Accuracy on masked tokens from the other side alone"),
    }
    accuracies = ("accuracy_mono", "accuracy_para", "accuracy_crossed")
    masking_class = CrossMasking
    masking: CrossMasking

    def term_of_masked(self, batch: Batch) -> Tensor:
        """The index of each masked position's term, int64 [M]: the index of its task, plus 1 in a crossed pair."""
        return batch.task_of_masked() + self.masking.crossed(batch).flatten()[batch.masked_M].long()


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
