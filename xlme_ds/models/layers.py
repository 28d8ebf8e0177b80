"""One Transformer layer, post-LN (Base) or pre-LN (Large and XL)."""

import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from .attention import Attention, AttentionBias, ItemBias
from .compiled import compiled, places
from .dropout import derive, drop
from .linear import Linear


class TransformerLayer(nn.Module):
    """Self-attention and a GELU feed-forward network, each with a residual connection."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.pre_norm = cfg.norm == "pre"
        self.dropout = cfg.dropout
        self.how = cfg.compile
        self.attention = Attention(cfg)
        self.attention_norm = nn.LayerNorm(cfg.width, eps=cfg.norm_epsilon)
        self.up = Linear(cfg.width, cfg.feed_forward)
        self.down = Linear(cfg.feed_forward, cfg.width)
        self.feed_forward_norm = nn.LayerNorm(cfg.width, eps=cfg.norm_epsilon)

    def forward(self, x_BTD: Tensor, bias: AttentionBias | ItemBias, keys_B: Tensor | None = None) -> Tensor:
        """The layer's output, [B, T, D]; what each branch adds, and attention weights, are dropped by `keys_B`, if
        there are any."""
        if self.how == "none" or not self.training:  # evaluations have rows of any number and length
            return self._run(x_BTD, bias, keys_B)
        out_BTD: Tensor = compiled(TransformerLayer._run, self.how)(places(self), self, x_BTD, bias, keys_B)
        return out_BTD

    def _run(self, x_BTD: Tensor, bias: AttentionBias | ItemBias, keys_B: Tensor | None) -> Tensor:
        weights_B = None if keys_B is None else derive(keys_B, 2)
        if self.pre_norm:
            x_BTD = x_BTD + self._drop(self.attention(self.attention_norm(x_BTD), bias, weights_B), keys_B, 0)
            return x_BTD + self._drop(self._feed_forward(self.feed_forward_norm(x_BTD)), keys_B, 1)
        x_BTD = self.attention_norm(x_BTD + self._drop(self.attention(x_BTD, bias, weights_B), keys_B, 0))
        return self.feed_forward_norm(x_BTD + self._drop(self._feed_forward(x_BTD), keys_B, 1))

    def _feed_forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD)))

    def _drop(self, x_BTD: Tensor, keys_B: Tensor | None, branch: int) -> Tensor:
        return x_BTD if keys_B is None else drop(x_BTD, self.dropout, derive(keys_B, branch))
