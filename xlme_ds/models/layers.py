"""The Transformer layer, post-LN (Base) or pre-LN (Large and XL), and functions that count its operations and the bytes
that it saves for the backward pass. Tests compare these bytes with those that autograd saves.

B rows, H heads, T tokens, D width, F feed-forward size, K head size. A linear map has N tokens, I inputs and O outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from .attention import Gate, TorchBias, TritonBias, attention_bias
from .attention_cpu import TILE_BYTES
from .dropout import derive_seeds, drop
from .tiles import SKEWED_ROWS, SUMMED_ROWS, tiling_of

INT64_BYTES = 8  # bytes of a token id, position or segment (int64)
FLOAT32_BYTES = 4  # bytes of a float32

# `_Linear` divides the tokens of a batch into at most `_MOST_PIECES` pieces of at least `_PIECE_TOKENS` tokens. There
# are few pieces, because each addition of a piece rounds the sum to bf16.
_PIECE_TOKENS, _MOST_PIECES = 512, 8
_NORM_TOKENS = 128  # number of tokens whose gradients `_LayerNorm` sums at a time, so that they stay in the cache


class Linear(nn.Linear):
    """`nn.Linear` with a faster backward pass for bf16 on the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ + b."""
        if x.is_cuda or x.dtype != torch.bfloat16 or not torch.is_grad_enabled():
            return super().forward(x)
        return _Linear.apply(x, self.weight, self.bias)


class GeluLinear(Linear):
    """A linear map followed by GELU."""

    def forward(self, x: Tensor, triton: bool = False) -> Tensor:
        """GELU(x Wᵀ + b). `triton`: if there is a bias, use the Triton kernel in the backward pass."""
        if not triton or self.bias is None:
            return F.gelu(super().forward(x))
        from .gelu_triton import gelu_of_biased

        return gelu_of_biased(F.linear(x, self.weight, self.bias.detach()), self.bias)


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
    """Layer norm that sums the gradients of weight and bias in float32. On the CPU torch sums them in bf16. If the
    summands' mean is not 0, bf16 loses most of a sum over thousands of tokens."""

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

    def forward(self, x_BTD: Tensor, bias: TorchBias | TritonBias, seeds_B: Tensor | None = None) -> Tensor:
        """The attention output, [B, T, D]. `seeds_B` has the random bits for dropout of attention weights."""
        rows, tokens, width = x_BTD.shape
        qkv_BT3HK = self.qkv(x_BTD).view(rows, tokens, 3, self.heads, -1)
        return self.output(bias.attend(qkv_BT3HK, self.gate, self.dropout, seeds_B).reshape(rows, tokens, width))


@dataclass(frozen=True)
class MicroBatchShape:
    """The sizes of a micro-batch on one device, and the kernels in which its attention runs."""

    rows: int  # number of rows of both tasks
    row_tokens: int  # number of positions in a row
    tokens: int  # number of positions in all rows
    element_bytes: int  # bytes of a weight or activation
    on_gpu: bool  # whether the device is a GPU
    triton: bool  # whether attention runs in the Triton kernels
    pairs: int  # number of rows that hold translation pairs


class TransformerLayer(nn.Module):
    """Attention and a GELU feed-forward network, each with a residual connection.

    Another kind of layer is a subclass with its own `forward` and static methods.
    """

    # Called once in a forward pass; its result is the argument `bias` of all layers.
    shared_inputs = staticmethod(attention_bias)

    def __init__(self, cfg: ModelConfig, index: int = 0, attention: nn.Module | None = None):
        """`index`: the layer's index in its encoder; in this class all layers are alike. `attention`: a module that
        replaces `Attention` and takes the same inputs."""
        super().__init__()
        self.pre_norm = cfg.norm == "pre"
        self.dropout = cfg.dropout
        self.attention = Attention(cfg) if attention is None else attention
        self.attention_norm: nn.Module = norm_of(cfg)
        self.up: nn.Module = GeluLinear(cfg.width, cfg.feed_forward, bias=cfg.biases)
        self.down = Linear(cfg.feed_forward, cfg.width, bias=cfg.biases)
        self.feed_forward_norm = norm_of(cfg)

    @staticmethod
    def check(cfg: ModelConfig) -> None:
        """Raise ValueError for model settings that this kind of layer does not support; this one supports all."""

    def forward(self, x_BTD: Tensor, bias: TorchBias | TritonBias, seeds_B: Tensor | None = None) -> Tensor:
        """The layer's output, [B, T, D]. `seeds_B` has the random bits for dropout of attention weights and of the
        sublayers' outputs."""
        weight_seeds_B = None if seeds_B is None else derive_seeds(seeds_B, 2)
        x_BTD = self._add(x_BTD, self.attention_norm, lambda x: self.attention(x, bias, weight_seeds_B), seeds_B, 0)
        triton = isinstance(bias, TritonBias)
        return self._add(x_BTD, self.feed_forward_norm, lambda x: self._feed_forward(x, triton), seeds_B, 1)

    def _add(
        self, x_BTD: Tensor, norm: nn.Module, sublayer: Callable[[Tensor], Tensor], seeds_B: Tensor | None, place: int
    ) -> Tensor:
        """`x_BTD` plus a sublayer's output, with the norm before the sublayer (pre-LN) or after the sum (post-LN).
        `place`: the sublayer's place for `derive_seeds`."""
        out_BTD = sublayer(norm(x_BTD) if self.pre_norm else x_BTD)
        if seeds_B is not None:
            out_BTD = drop(out_BTD, self.dropout, derive_seeds(seeds_B, place))
        return x_BTD + out_BTD if self.pre_norm else norm(x_BTD + out_BTD)

    def _feed_forward(self, x_BTD: Tensor, triton: bool = False) -> Tensor:
        return self.down(self.up(x_BTD, triton))

    @staticmethod
    def flops(cfg: ModelConfig, layers: int, row_tokens: int) -> float:
        """Floating-point operations per token of a forward pass through an encoder's layers: projections, feed-forward
        network, scores and weighted sums."""
        return 2.0 * layers * (4 * cfg.width**2 + 2 * cfg.width * cfg.feed_forward + 2 * row_tokens * cfg.width)

    @staticmethod
    def saved_bytes(cfg: ModelConfig, batch: MicroBatchShape) -> float:
        """Bytes that the forward pass of one layer saves for the backward pass, with its input and without its output.

        Eight tensors [B, T, D] are saved: the inputs and outputs of both norms, the input of the output projection, and
        q, k and v. The feed-forward network saves two tensors [B, T, F]. With torch's fused kernel the gate saves two
        more tensors [B, T, D], because it copies q for each of its two products. Attention with dropout, which no fused
        kernel computes, saves one more instead, the scaled q. Dropout of the sublayers' outputs saves two masks with a
        byte for each element. For each token each norm saves its mean and scale. For each token and head the gate saves
        five numbers (in the Triton kernels, one), and a fused kernel saves the log of the softmax's sum.
        """
        tokens, gated, dropping = batch.tokens, cfg.relative_bias == "gated", cfg.attention_dropout > 0
        gate_copies = gated and batch.on_gpu and not batch.triton
        wide_tensors = 9 if dropping else 10 if gate_copies else 8
        activations = tokens * (wide_tensors * cfg.width + 2 * cfg.feed_forward) * batch.element_bytes
        gate_bytes = 0 if not gated else FLOAT32_BYTES if batch.triton else 5 * batch.element_bytes
        log_sum_bytes = FLOAT32_BYTES if batch.on_gpu and not dropping else 0
        per_head = tokens * cfg.heads * (gate_bytes + log_sum_bytes)
        norms = 4 * tokens * (FLOAT32_BYTES if batch.on_gpu else batch.element_bytes)  # mean and scale of each norm
        dropout_masks = 2 * tokens * cfg.width if cfg.dropout else 0
        return activations + per_head + norms + dropout_masks + TransformerLayer.score_bytes(cfg, batch)

    @staticmethod
    def score_bytes(cfg: ModelConfig, batch: MicroBatchShape) -> float:
        """Bytes that one layer saves for all pairs of a query and a key.

        Attention with dropout saves the weights before and after dropout, a dropout mask (one byte for each weight),
        and on the CPU the mask of items. Without dropout, torch's fused kernel saves the bias, and other kernels save
        nothing.
        """
        if cfg.attention_dropout:
            mask = 0 if batch.on_gpu else 1
            return batch.tokens * batch.row_tokens * (cfg.heads * (2 * batch.element_bytes + 1) + mask)
        if batch.triton or not batch.on_gpu:
            return 0.0
        heads = 1 if cfg.relative_bias == "none" else cfg.heads
        return batch.tokens * batch.row_tokens * heads * batch.element_bytes

    @staticmethod
    def shared_bytes(cfg: ModelConfig, batch: MicroBatchShape) -> float:
        """Saved bytes that all layers of an encoder share.

        The Triton kernels save where each token's item begins and ends, and a table of the distance bias d. The other
        kernels save a mask with a byte for each query and key of every row. (It is counted on a CPU too, although the
        CPU's kernels make `item_mask` one tile at a time.) They also save d and an index into the table of d for each
        query and key; all rows share these.
        """
        # The bounds of an item are two int32, which have as many bytes as float32.
        saved = batch.tokens * (2 * FLOAT32_BYTES if batch.triton else batch.row_tokens)
        if cfg.relative_bias == "none":
            return saved
        if batch.triton:  # the table of `attention_triton.skew`, [2, H, SKEWED_ROWS, columns]
            columns = 2 * SKEWED_ROWS * (-(-batch.row_tokens // SKEWED_ROWS) + 1)
            return saved + 2 * cfg.heads * SKEWED_ROWS * columns * batch.element_bytes
        return saved + batch.row_tokens**2 * (INT64_BYTES + cfg.heads * batch.element_bytes)

    @staticmethod
    def backward_bytes(cfg: ModelConfig, batch: MicroBatchShape) -> float:
        """Bytes of the gradients that the backward pass of one layer holds at its peak."""
        hidden = batch.tokens * cfg.width * batch.element_bytes
        feed_forward = 2 * batch.tokens * cfg.feed_forward * batch.element_bytes
        if batch.triton:  # for each SUMMED_ROWS rows and each head, at most 4 (T + side) sums of the gradient of d
            side = tiling_of("_backward_distances", cfg.width // cfg.heads, batch.element_bytes).keys
            attention = -(-batch.rows // SUMMED_ROWS) * cfg.heads * 4.0 * (batch.row_tokens + side) * FLOAT32_BYTES
        elif batch.on_gpu or cfg.attention_dropout:
            heads = cfg.heads if cfg.relative_bias != "none" or cfg.attention_dropout else 1
            attention = 3 * batch.tokens * batch.row_tokens * heads * batch.element_bytes
            attention -= feed_forward  # the feed-forward network's backward pass comes first and frees what it saved
        else:  # three tensors of the scores of one row, at most a thread's tile, and the gradients of q, k and v
            attention = 3 * min(batch.row_tokens**2 * cfg.heads * batch.element_bytes, TILE_BYTES) + 3 * hidden
        return max(feed_forward, attention) + 2 * hidden
