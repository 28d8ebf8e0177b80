"""One encoder with a masked head: what XLM, XLM-R and ERNIE-M train.

B rows, T tokens, M masked positions of the batch, D width.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import ModelConfig
from ..data.batch import Batch
from ..data.rows import UNK
from .attention import item_mask
from .encoder import lookup, read_whole
from .heads import MaskedLanguageModelHead
from .text_encoder import TextEncoder


class LanguageModelOutput(NamedTuple):
    """What one forward pass gives; the objective makes the losses of it."""

    nll_M: Tensor  # float32, −log p of the original token
    predicted_M: Tensor  # int64, the most likely token


@dataclass(frozen=True)
class Masking:
    """What a position that is to be predicted shows: a random token, the original, or else `<mask>`; and who sees
    whom."""

    random: float  # share of the positions
    keep: float

    def apply(self, batch: Batch, vocabulary: int) -> Tensor:
        """The tokens that the model reads, [B, T]. The batch's uniforms decide: below `keep`, the `random` above it,
        the rest."""
        targets_M = batch.tokens_BT.flatten()[batch.masked_M]
        uniforms_M, first, count = batch.uniforms_M.double(), UNK + 1, vocabulary - UNK - 2
        # A uniform is one of 2^24, those of random tokens are spread over all ordinary ids once more.
        within_M = (uniforms_M - self.keep) * (count / self.random if self.random else 0.0)
        random_M = first + within_M.long().clamp(0, count - 1)
        masked_M = torch.where(uniforms_M < self.keep + self.random, random_M, vocabulary - 1)
        read_M = torch.where(uniforms_M < self.keep, targets_M, masked_M)
        return batch.tokens_BT.flatten().index_copy(0, batch.masked_M, read_M).view_as(batch.tokens_BT)

    def predicted_from(self, masked_M: Tensor) -> Tensor:
        """Position of the last hidden state that each masked position is predicted from, [M]: here that position."""
        return masked_M

    def groups(self, batch: Batch) -> Tensor:
        """What `allowed` needs to know of every position, int64 [B, T]: here the number of its item."""
        return batch.segments_BT

    # Which key a query may see, bool [B, 1, T, T], by the groups: here those of its item.
    allowed = staticmethod(item_mask)


class LanguageModel(TextEncoder):
    """`TextEncoder` with a head that predicts masked tokens, tied to the embedding."""

    writing = False  # whether what is predicted is written into the text, and so no special token (BTMLM)

    def __init__(self, cfg: ModelConfig, masking: Masking):
        super().__init__(cfg)
        self.masking = masking
        self.masked_head = MaskedLanguageModelHead(cfg)

    def forward(self, batch: Batch) -> LanguageModelOutput:  # type: ignore[override]
        """Mask and predict."""
        table = read_whole(self.table)
        embedded_BTD = lookup(self.masking.apply(batch, self.cfg.vocabulary), self.table, sparse=True)
        distance_HW, groups_BT = self.encoder.distances(batch.tokens_BT.shape[1]), self.masking.groups(batch)
        read_BTD = self.encoder.embed(embedded_BTD, batch.positions_BT, batch.languages_BT, batch.keys_B)
        hidden_BTD = self.encoder.body(read_BTD, groups_BT, distance_HW, self.masking.allowed, batch.keys_B)
        return self.predict(hidden_BTD, batch.masked_M, batch.tokens_BT.flatten()[batch.masked_M], table)

    def predict(
        self, hidden_BTD: Tensor, masked_M: Tensor, targets_M: Tensor, table: list[Tensor]
    ) -> LanguageModelOutput:
        """The masked tokens from the last hidden states; `table`: the blocks of the tied embedding."""
        unused_M = torch.zeros(len(masked_M), device=masked_M.device)  # nothing is sampled
        hidden_MD = hidden_BTD.flatten(0, 1)[self.masking.predicted_from(masked_M)]
        found = self.masked_head(hidden_MD, lambda: table, targets_M, unused_M, self.writing)
        return LanguageModelOutput(found.nll_M, found.predicted_M)
