"""ERNIE-M's first stage: MMLM on text, TLM and CAMLM on translation pairs (Ouyang et al., 2021).

L = L_MMLM + L_TLM + L_CAMLM. Each term is a mean over its own masked positions in the global batch; MMLM is the term
`mlm`. Each time that a pair is read, a coin decides whether it counts for TLM or for CAMLM. B rows, T tokens, M masked
positions.

In cross-attention masking (CAMLM; section 3.1) a masked token of one side (text) of a pair is predicted from the other
side alone. For a pair with sides e and f, each with masked positions m and unmasked positions u, every layer lets

    e_u see e_u      f_u see f_u      e_m see f_u and e_m      f_m see e_u and f_m

so nothing of a side's unmasked tokens reaches its masked positions, through any number of layers. This is the mask of
the paper's figure and text; in the paper's equation e_m does not see e_m.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..data.batch import Batch
from ..data.rows import TASKS
from ..models.text_encoder import Masking
from .mlm import MaskedLanguageModelling
from .protocol import Quantity

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
