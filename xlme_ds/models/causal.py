"""Causal language modelling (XLM, section 3.2): a token is predicted from those before it in its item. B rows, T
tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.batch import Batch
from .language_model import Masking


@dataclass(frozen=True)
class Causal(Masking):
    """Nothing is masked: the batch's masked positions, all ordinary tokens and ends of sentences, are what is
    predicted, each from the state before it."""

    random: float = 0.0
    keep: float = 1.0

    def apply(self, batch: Batch, vocabulary: int) -> Tensor:
        """See `Masking`: the tokens as they are."""
        return batch.tokens_BT

    def predicted_from(self, masked_M: Tensor) -> Tensor:
        """See `Masking`: the position before; an item opens with a special token, so it is of the same item."""
        return masked_M - 1

    def allowed(self, groups_BT: Tensor) -> Tensor:
        """See `Masking`: those of its item up to itself."""
        tokens = groups_BT.shape[1]
        before_TT = torch.ones(tokens, tokens, dtype=torch.bool, device=groups_BT.device).tril()
        return super().allowed(groups_BT) & before_TT
