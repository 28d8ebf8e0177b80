"""Back-translation masked language modelling (BTMLM; ERNIE-M, section 3.1): one model writes a pseudo-parallel side,
then reads it.

Of an item `<s> x </s> y </s>` whose y is open (`data/pseudo_parallel.py`), the first pass, without gradient, fills each
place of y from x: p(y_j | x, M_j), the place's own `<mask>` with its position. The second masks x and predicts it from
what is left of x and y: p(x_m | x \\ M, y).

B rows, T tokens, P open places.
"""

import torch
from torch import Tensor

from ..data.batch import Batch
from ..data.schema import PAD
from .language_model import LanguageModel, LanguageModelOutput, Masking


class OpenSide(Masking):
    """Before y is filled x sees x, and everything behind it sees x and itself; once it is, the item sees the item."""

    def groups(self, batch: Batch) -> Tensor:
        """See `Masking`: twice the item's number, and 1 more from the first open place on."""
        return batch.segments_BT * 2 + _open(batch).long().cummax(1).values

    def allowed(self, groups_BT: Tensor) -> Tensor:
        """See `Masking`."""
        query_BT1, key_B1T = groups_BT[:, :, None], groups_BT[:, None, :]
        itself_TT = torch.eye(groups_BT.shape[1], dtype=torch.bool, device=groups_BT.device)
        of_item_BTT = (query_BT1 // 2 == key_B1T // 2) & (key_B1T % 2 == 0)
        return (of_item_BTT | itself_TT)[:, None]


def _open(batch: Batch) -> Tensor:
    """The places that are to be filled, bool [B, T]."""
    return (batch.tokens_BT == PAD) & (batch.segments_BT > 0)


def first_pass(batch: Batch) -> Batch:
    """What the model reads to fill the open places: they are the masked ones, in ascending order, all of them
    `<mask>`."""
    places_P = _open(batch).flatten().nonzero().squeeze(1)
    always = torch.ones(
        len(places_P), dtype=torch.float32, device=places_P.device
    )  # above every share that is not `<mask>`
    return batch._replace(masked_M=places_P, uniforms_M=always)


def second_pass(batch: Batch, first: Batch, predicted_P: Tensor) -> Batch:
    """`batch` with the open places filled: `first` is what `first_pass` gave, `predicted_P` the model's most likely
    tokens.

    The most likely ones, as a translation should be, and for which no randomness is needed; of the ordinary ones, as
    the model finds while it is `writing`: a special one would change the item's layout, and a `<mask>` would be one
    that nobody predicts.
    """
    tokens = batch.tokens_BT.flatten().index_copy(0, first.masked_M, predicted_P)
    return batch._replace(tokens_BT=tokens.view_as(batch.tokens_BT))


class BackTranslationModel(LanguageModel):
    """`LanguageModel` that passes over a batch twice."""

    def forward(self, batch: Batch) -> LanguageModelOutput:  # type: ignore[override]
        """Fill, in evaluation mode, mask and predict."""
        first, training = first_pass(batch), self.training
        self.eval()
        self.writing = True
        with torch.no_grad():
            predicted_P = super().forward(first).predicted_M
        self.writing = False
        self.train(training)
        return super().forward(second_pass(batch, first, predicted_P))
