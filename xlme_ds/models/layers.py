"""The Transformer layer, post-LN (Base) or pre-LN (Large and XL), and functions that count its operations and bytes.

`layer_class` chooses the class of an encoder's layers: `TransformerLayer` or `modern.ModernLayer`. B rows, H heads, T
tokens, D width, K head size. A linear map has N tokens, I inputs and O outputs.
"""

import pkgutil
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from . import layer_costs
from .attention import AttentionBias, Gate, ItemBias, shared_bias
from .dropout import derive, drop

# `_Linear` divides the tokens of a batch into at most `_MOST_PIECES` pieces of at least `_PIECE_TOKENS` tokens. There
# are few pieces because each time one is added, the sum is rounded to bf16.
_PIECE_TOKENS, _MOST_PIECES = 512, 8
_NORM_TOKENS = 128  # number of tokens whose gradients `_LayerNorm` sums at a time, so that they stay in the cache


class Linear(nn.Linear):
    """`nn.Linear` with a faster backward pass for bf16 on the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ + b."""
        if x.is_cuda or x.dtype != torch.bfloat16 or not torch.is_grad_enabled():
            return super().forward(x)
        return _Linear.apply(x, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    """x Wᵀ + b. The backward pass computes the weight's gradient piece by piece over the tokens and adds the results:
    for many tokens at once, oneDNN takes twice as long for this product as for others of its size."""

    @staticmethod
    def forward(ctx, x, weight_OI, bias_O):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight_OI)
        return F.linear(x, weight_OI, bias_O)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight_OI = ctx.saved_tensors
        x_NI, grad_NO = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        grad_weight = torch.empty_like(weight_OI)
        size = max(_PIECE_TOKENS, -(-len(x_NI) // _MOST_PIECES))
        for index, (part_NI, part_NO) in enumerate(zip(x_NI.split(size), grad_NO.split(size), strict=True)):
            beta = 0 if index == 0 else 1  # the first piece overwrites the empty tensor
            torch.addmm(grad_weight, part_NO.t(), part_NI, beta=beta, out=grad_weight)
        grad_bias = grad_NO.sum(0) if ctx.needs_input_grad[2] else None
        return (grad_NO @ weight_OI).view_as(x), grad_weight, grad_bias


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` with more exact gradients of weight and bias for bf16 on the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` normalised over its last dimension."""
        if x.is_cuda or x.dtype != torch.bfloat16 or not torch.is_grad_enabled():
            return super().forward(x)
        return _LayerNorm.apply(x, self.weight, self.bias, self.eps)


class _LayerNorm(torch.autograd.Function):
    """Layer norm that sums the gradients of weight and bias in float32. On the CPU torch sums them in bf16. If the mean
    over tokens is not 0, bf16 loses most of a sum over thousands of tokens."""

    @staticmethod
    def forward(ctx, x, weight_D, bias_D, eps):  # type: ignore[no-untyped-def]
        out, mean, scale = torch.native_layer_norm(x, weight_D.shape, weight_D, bias_D, eps)
        ctx.save_for_backward(x, mean, scale, weight_D, bias_D)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, mean, scale, weight_D, bias_D = ctx.saved_tensors
        input_only = True, False, False
        grad_x, _, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, weight_D.shape, mean, scale, weight_D, bias_D, input_only
        )
        sums_2D = x.new_zeros(2, len(weight_D), dtype=torch.float32)
        pieces = [tensor.reshape(-1, tensor.shape[-1]).split(_NORM_TOKENS) for tensor in (x, mean, scale, grad)]
        for part in zip(*pieces, strict=True):
            x_ND, mean_N1, scale_N1, grad_ND = (tensor.float() for tensor in part)
            sums_2D[0] += x_ND.sub_(mean_N1).mul_(scale_N1).mul_(grad_ND).sum(0)
            sums_2D[1] += grad_ND.sum(0)
        grad_weight_D, grad_bias_D = sums_2D.to(weight_D.dtype)
        return grad_x, grad_weight_D, grad_bias_D if ctx.needs_input_grad[2] else None, None


def norm_of(cfg: ModelConfig) -> LayerNorm:
    """A layer norm over the model's width."""
    return LayerNorm(cfg.width, eps=cfg.norm_epsilon, bias=cfg.biases)


class Attention(nn.Module):
    """Self-attention with fused query, key and value projections."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.heads = cfg.heads
        self.dropout = cfg.attention_dropout
        self.qkv = Linear(cfg.width, 3 * cfg.width, bias=cfg.biases)
        self.output = Linear(cfg.width, cfg.width, bias=cfg.biases)
        self.gate = Gate(cfg.heads, cfg.width // cfg.heads) if cfg.relative_bias == "gated" else None

    def forward(self, x_BTD: Tensor, bias: AttentionBias | ItemBias, keys_B: Tensor | None = None) -> Tensor:
        """The attention output, [B, T, D]. `keys_B` has the random bits for dropout of attention weights."""
        rows, tokens, width = x_BTD.shape
        qkv_BT3HK = self.qkv(x_BTD).view(rows, tokens, 3, self.heads, -1)
        return self.output(bias.attend(qkv_BT3HK, self.gate, self.dropout, keys_B).reshape(rows, tokens, width))


class TransformerLayer(nn.Module):
    """Attention and a GELU feed-forward network, each with a residual connection.

    Another kind of layer is a subclass with its own `build`, `forward` and static methods.
    """

    # Called once in a forward pass; its result is the argument `bias` of all layers.
    shared = staticmethod(shared_bias)
    operations = staticmethod(layer_costs.operations)
    saved_bytes = staticmethod(layer_costs.saved_bytes)
    shared_bytes = staticmethod(layer_costs.shared_bytes)
    backward_bytes = staticmethod(layer_costs.backward_bytes)

    def __init__(self, cfg: ModelConfig, attention: nn.Module | None = None):
        """`attention`: a module that replaces `Attention` and takes the same inputs."""
        super().__init__()
        self.pre_norm = cfg.norm == "pre"
        self.dropout = cfg.dropout
        self.attention = Attention(cfg) if attention is None else attention
        self.attention_norm: nn.Module = norm_of(cfg)
        self.up = Linear(cfg.width, cfg.feed_forward, bias=cfg.biases)
        self.down = Linear(cfg.feed_forward, cfg.width, bias=cfg.biases)
        self.feed_forward_norm = norm_of(cfg)

    @staticmethod
    def check(cfg: ModelConfig) -> None:
        """Raise ValueError for model settings that this kind of layer does not support; this one supports all."""

    @classmethod
    def build(cls, cfg: ModelConfig, index: int) -> nn.Module:
        """Build the layer with this index in an encoder. In this class all layers are alike."""
        return cls(cfg)

    def forward(self, x_BTD: Tensor, bias: AttentionBias | ItemBias, keys_B: Tensor | None = None) -> Tensor:
        """The layer's output, [B, T, D]. `keys_B` has the random bits for dropout of attention weights and of the
        sublayers' outputs."""
        weight_keys_B = None if keys_B is None else derive(keys_B, 2)
        x_BTD = self._add(x_BTD, self.attention_norm, lambda x: self.attention(x, bias, weight_keys_B), keys_B, 0)
        return self._add(x_BTD, self.feed_forward_norm, self._feed_forward, keys_B, 1)

    def _add(
        self, x_BTD: Tensor, norm: nn.Module, sublayer: Callable[[Tensor], Tensor], keys_B: Tensor | None, place: int
    ) -> Tensor:
        """`x_BTD` plus a sublayer's output, with the norm before the sublayer (pre-LN) or after the sum (post-LN).
        `place`: the sublayer's index, for dropout."""
        if self.pre_norm:
            return x_BTD + self._drop(sublayer(norm(x_BTD)), keys_B, place)
        return norm(x_BTD + self._drop(sublayer(x_BTD), keys_B, place))

    def _feed_forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD)))

    def _drop(self, x_BTD: Tensor, keys_B: Tensor | None, place: int) -> Tensor:
        return x_BTD if keys_B is None else drop(x_BTD, self.dropout, derive(keys_B, place))


_CLASSES = {"xlme": "xlme_ds.models.layers:TransformerLayer", "modern": "xlme_ds.models.modern:ModernLayer"}


def layer_class(cfg: ModelConfig) -> type[TransformerLayer]:
    """The class of an encoder's layers (`model.body`)."""
    chosen: type[TransformerLayer] = pkgutil.resolve_name(_CLASSES[cfg.body])
    return chosen
