"""The small networks between an encoder and its loss.

B rows, T tokens, M masked positions, D width, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from .layers import LAYER_NORM_EPSILON
from .masked_head import MaskedTokens, masked_softmax


class MaskedLanguageModelHead(nn.Module):
    """Dense, GELU, LayerNorm, then the decoder tied to the embedding plus a bias."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.chunk = cfg.head_chunk
        self.dense = nn.Linear(cfg.width, cfg.width)
        self.norm = nn.LayerNorm(cfg.width, eps=LAYER_NORM_EPSILON)
        self.bias = nn.Parameter(torch.empty(cfg.vocabulary))

    def forward(
        self, hidden_MD: Tensor, table: Callable[[], Sequence[Tensor]], targets_M: Tensor, uniforms_M: Tensor
    ) -> MaskedTokens:
        """Loss, sample and prediction at the masked positions; `table` gives the blocks of the tied embedding.

        Given as they are, ZeRO-3 puts views in their places (0.19.8), for which it keeps the whole table until the backward pass,
        and on one process with parameters on a disk they show by then whatever was read into the same buffer since.
        """
        features_MD = self.norm(F.gelu(self.dense(hidden_MD)))
        return masked_softmax(features_MD, table(), self.bias, targets_M, uniforms_M, self.chunk)


class ReplacedTokenHead(nn.Module):
    """Dense, GELU, linear to one logit a token: positive says the token was replaced."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.dense = nn.Linear(cfg.width, cfg.width)
        self.output = nn.Linear(cfg.width, 1)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Logits, [B, T]."""
        return self.output(F.gelu(self.dense(hidden_BTD))).squeeze(-1)
