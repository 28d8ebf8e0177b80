"""Causal language modelling (XLM, section 3.2) on monolingual rows and on translation pairs; in a pair, the second text
sees the first.

L = L_CLM on text + L_CLM on pairs, each a mean over the predicted tokens of its task. Ordinary tokens and `</s>` are
predicted, with two exceptions: the `</s>` that opens an item, and the `</s>` at the end of a monolingual item, because
the text may have been cut there. B rows, T tokens, M predicted tokens.
"""

from collections.abc import Mapping

from torch import Tensor

from ..data.batch import Batch
from ..models.attention import causal_mask
from ..models.text_encoder import Masking
from .mlm import MaskedLanguageModelling
from .protocol import Quantity


class CausalMasking(Masking):
    """Nothing is masked. `Batch.masked_M` has the positions of all predicted tokens. Each token is predicted from the
    hidden state at the position before it."""

    def apply(self, batch: Batch, vocabulary: int) -> Tensor:
        """The original tokens, [B, T]."""
        return batch.tokens_BT

    def predicted_from(self, masked_M: Tensor) -> Tensor:
        """The position before each predicted position, [M]. It is in the same item, because the special token that
        opens an item is not predicted."""
        return masked_M - 1

    attention_mask = staticmethod(causal_mask)


class CausalLanguageModelling(MaskedLanguageModelling):
    """Language modelling from left to right, with `mask_fraction` 1."""

    description = "causal language modelling of one encoder: every token from those before it"
    terms: tuple[str, ...] = ("clm", "clm_pairs")
    quantities: Mapping[str, Quantity] = {
        "clm": Quantity("Loss of every token from those before it", "nats a token", "mono", unigram=True),
        "clm_pairs": Quantity("Loss of every token from those before it", "nats a token", "para", unigram=True),
        "accuracy": Quantity("Accuracy on every token from those before it"),
    }
    masking_class = CausalMasking
    predicts_all = True
    used_settings = ("objective.z_loss",)
    export_class = "XLMEModel"  # a class without a head, because the classes with heads have no causal mask
