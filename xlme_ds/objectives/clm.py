"""Causal language modelling on monolingual rows, and on translation pairs, whose second side sees the first (XLM,
section 3.2).

L = L_CLM + L_CLM on pairs, each a mean over the predicted tokens of its task: the ordinary ones, and every `</s>` after
an item's first token, except the last of monolingual text, where the row was cut. B rows, T tokens, M predicted tokens.
"""

from collections.abc import Mapping

from torch import Tensor

from ..data.batch import Batch
from ..models.attention import causal_mask
from ..models.text_encoder import Masking
from .mlm import MaskedLanguageModelling
from .protocol import Quantity


class Causal(Masking):
    """Nothing is masked. The batch's `masked_M` are all ordinary tokens and ends of sentences; each is predicted from
    the state before it."""

    def apply(self, batch: Batch, vocabulary: int) -> Tensor:
        """The tokens as they are."""
        return batch.tokens_BT

    def predicted_from(self, masked_M: Tensor) -> Tensor:
        """The position before; it is in the item too, since an item opens with a special token."""
        return masked_M - 1

    allowed = staticmethod(causal_mask)


class CausalLanguageModelling(MaskedLanguageModelling):
    """Every token is predicted: with `mask_fraction` 1, a batch's masked positions are all tokens."""

    description = "causal language modelling of one encoder: every token from those before it"
    terms: tuple[str, ...] = ("clm", "clm_pairs")
    quantities: Mapping[str, Quantity] = {
        "clm": Quantity("Loss of every token from those before it", "nats a token", "mono", unigram=True),
        "clm_pairs": Quantity("Loss of every token from those before it", "nats a token", "para", unigram=True),
        "accuracy": Quantity("Accuracy on every token from those before it"),
    }
    masking_kind = Causal
    predicts_all = True
    reads = ("objective.z_loss",)
    export_class = "XLMEModel"  # no class there has a head that sees one side alone
