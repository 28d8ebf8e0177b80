"""The heads between an encoder and its loss. The masked language model's head ends in the softmax over the vocabulary
(`masked_head.py`); the discriminator's tells replaced tokens from original ones.

B rows, T tokens, M masked positions, V vocabulary, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from ..data.rows import UNK
from .layers import norm_of
from .masked_head import MaskedHeadOutput, vocabulary_softmax

# Logit of tokens that must not be predicted: their probability is exactly 0. A logit of −inf could give a NaN.
_EXCLUDED_LOGIT = -1e30


@dataclass(frozen=True)
class TiedTable:
    """The blocks of the tied embedding in one object, which hides the tensors from ZeRO-3.

    DeepSpeed 0.19.8 replaces tensors among a module's arguments by views, which hold the complete table until the
    backward pass. With one process and parameters on a disk, DeepSpeed reuses the views' memory for other parameters
    before the backward pass, which would then read wrong numbers.
    """

    blocks: Sequence[Tensor]


class MaskedLanguageModelHead(nn.Module):
    """Dense layer, GELU and LayerNorm (unless `model.masked_head` leaves them out), then logits: the products with the
    tied embedding plus a bias."""

    def __init__(self, cfg: ModelConfig, z_loss: float = 0.0, temperature: float = 1.0):
        super().__init__()
        self.chunk = cfg.head_chunk
        self.kernels = cfg.kernels
        self.z_loss, self.temperature = z_loss, temperature
        has_dense = cfg.masked_head == "dense"
        self.dense = nn.Linear(cfg.width, cfg.width, bias=cfg.biases) if has_dense else None
        self.norm = norm_of(cfg) if has_dense else None
        self.bias = nn.Parameter(torch.empty(cfg.vocabulary))

    def forward(
        self,
        hidden_MD: Tensor,
        table: TiedTable,
        targets_M: Tensor,
        uniforms_M: Tensor | None,
        exclude_special: bool = False,
    ) -> MaskedHeadOutput:
        """Returns the losses, samples and predictions at the masked positions. Samples are drawn with `uniforms_M`,
        uniform random numbers, if these are given.

        `exclude_special`: give special tokens the probability 0, for predictions that become part of a text. The loss
        is then meaningless.
        """
        bias_V: Tensor = self.bias
        if exclude_special:
            bias_V = bias_V.detach().clone()
            for special in (bias_V[: UNK + 1], bias_V[-1]):
                special.fill_(_EXCLUDED_LOGIT)  # an assignment would copy a number to the GPU, and the host would wait
        inputs = self._transform(hidden_MD), table.blocks, bias_V, targets_M, uniforms_M
        return vocabulary_softmax(*inputs, self.chunk, self.kernels, self.temperature, self.z_loss)

    def logits(self, hidden_MD: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        """All logits of a few positions, [M, V]. `blocks` are the blocks of the tied embedding."""
        hidden_MD = self._transform(hidden_MD)
        return torch.cat([hidden_MD @ block.t() for block in blocks], dim=1) + self.bias

    def _transform(self, hidden_MD: Tensor) -> Tensor:
        if self.dense is None or self.norm is None:
            return hidden_MD
        return self.norm(F.gelu(self.dense(hidden_MD)))


class ReplacedTokenHead(nn.Module):
    """Dense layer, GELU, and a linear map to one logit per token. A positive logit means that the head takes the token
    for a replaced one."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.dense = nn.Linear(cfg.width, cfg.width)
        self.output = nn.Linear(cfg.width, 1)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Logits, [B, T]."""
        return self.output(F.gelu(self.dense(hidden_BTD))).squeeze(-1)
