"""Cross-attention masking (ERNIE-M, section 3.1): a masked token of one side is predicted from the other side alone.

B rows, T tokens, M masked positions. Of a pair with sides e and f, u its positions that are read as they are and m its
masked ones, every layer lets

    e_u see e_u      f_u see f_u      e_m see f_u and e_m      f_m see e_u and f_m

so that nothing of its own side reaches a masked position, through however many layers. (The paper's figure and text say
so; its equation, which would let e_m see nothing of e_m, differs.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.batch import Batch
from ..data.schema import TASKS
from .language_model import Masking

_ROLES = 8
"""Of a position in its item: 0 where it sees the whole item; else 1 + 2 · side + whether it is masked."""


@dataclass(frozen=True)
class CrossMasking(Masking):
    """Half of the translation pairs masked so, all their positions with `<mask>`; everything else as `Masking` has
    it."""

    def crossed(self, batch: Batch) -> Tensor:
        """Which positions belong to a pair of that half, bool [B, T]: a fair bit of the pair's randomness decides."""
        rows, tokens = batch.tokens_BT.shape
        item_BT = torch.arange(rows, device=batch.tokens_BT.device)[:, None] * (tokens + 1) + batch.segments_BT
        item_M = item_BT.flatten()[batch.masked_M]
        first_M = torch.ones_like(item_M, dtype=torch.bool)
        first_M[1:] = item_M[1:] != item_M[:-1]
        # The lowest of a uniform's 24 bits; what stands at a masked position follows from the highest.
        bit_M = (batch.uniforms_M.double() * 2**24).long() & 1
        drawn = torch.zeros(rows * (tokens + 1), dtype=torch.int64, device=item_M.device)
        drawn = drawn.index_add(0, item_M, bit_M * first_M)
        return (drawn[item_BT] > 0) & (batch.task_B == TASKS.index("para"))[:, None]

    def apply(self, batch: Batch, vocabulary: int) -> Tensor:
        """See `Masking`. A token left to be seen would tell its own side's other masked positions of it."""
        tokens_BT = super().apply(batch, vocabulary)
        hidden_BT = self.crossed(batch) & _masked(batch)
        return torch.where(hidden_BT, vocabulary - 1, tokens_BT)

    def groups(self, batch: Batch) -> Tensor:
        """See `Masking`: the item's number and the position's role in it."""
        role_BT = 1 + 2 * batch.sides_BT + _masked(batch).long()
        return batch.segments_BT * _ROLES + torch.where(self.crossed(batch), role_BT, 0)

    def allowed(self, groups_BT: Tensor) -> Tensor:
        """See `Masking`."""
        segment_BT, role_BT = groups_BT // _ROLES, groups_BT % _ROLES
        side_BT, masked_BT = (role_BT - 1) // 2, (role_BT - 1) % 2 == 1
        whole_BT = role_BT == 0

        def queries_and_keys(values_BT: Tensor) -> tuple[Tensor, Tensor]:
            return values_BT[:, :, None], values_BT[:, None, :]

        (side_q, side_k), (masked_q, masked_k) = queries_and_keys(side_BT), queries_and_keys(masked_BT)
        segment_q, segment_k = queries_and_keys(segment_BT)
        same_BTT = side_q == side_k
        of_pair_BTT = torch.where(masked_q, same_BTT == masked_k, same_BTT & ~masked_k)
        return ((segment_q == segment_k) & (whole_BT[:, :, None] | of_pair_BTT))[:, None]


def _masked(batch: Batch) -> Tensor:
    """bool [B, T]."""
    none = torch.zeros(batch.tokens_BT.numel(), dtype=torch.bool, device=batch.tokens_BT.device)
    return none.index_fill(0, batch.masked_M, True).view_as(batch.tokens_BT)
