"""The layer of ModernBERT (Warner et al., 2024, section 2.1): pre-LN without biases, rotary positions, GeGLU, and
attention that is global in every third layer and otherwise local.

B rows, H heads, T tokens, D width, F feed-forward size, K head size, C tokens of a window. S is the number of windows
of a row in shapes that begin with B, and of all rows in other shapes. In a local layer a position sees C/2 tokens on
each of its sides, so the C queries of a window need 2C keys: the layer's cost per token does not depend on the length
of rows.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..config import ModelConfig
from .attention import Gate, TorchBias, TritonBias, attention_bias, item_bounds
from .attention_cpu import item_mask
from .layers import FLOAT32_BYTES, Linear, MicroBatchShape, TransformerLayer

# Settings of ModelConfig for which this layer supports only one value, and that value.
FIXED_SETTINGS: dict[str, Any] = {
    "norm": "pre",
    "embedding_norm": True,
    "absolute_positions": False,
    "relative_bias": "none",
    "masked_head": "dense",
    "attention_dropout": 0.0,
    "layout": "xlme",
    "language_embeddings": (),
}


class Windows(NamedTuple):
    """Local attention by torch's kernels, which treat each window of queries like a row of a batch. (The Triton kernels
    need no windows: in local layers their `TritonBias` has narrower bounds.)"""

    # [S, 1, C, 2C] in the type of the queries. It is 0 if query and key are in one item and at most C/2 apart, else
    # −inf. A bool mask would be converted to such numbers in every layer, and each layer would save them.
    bias_S1CC: Tensor

    @classmethod
    def of(cls, groups_BT: Tensor, window: int, dtype: torch.dtype) -> "Windows":
        """The windows of all rows, with C = `window` tokens each. `groups_BT` has the number of each position's item.
        Every query has a key: padding sees padding, and the positions that fill up the last window see each other."""
        padded_BT = F.pad(groups_BT, (0, -groups_BT.shape[1] % window), value=-1)
        queries_BSC, keys_BSC = padded_BT.unflatten(1, (-1, window)), _window_keys(padded_BT, window, value=-1)
        column = torch.arange(2 * window, device=groups_BT.device)  # the keys begin C/2 before the queries
        near_CC = (column - window // 2 - column[:window, None]).abs() <= window // 2
        allowed_BSCC = (queries_BSC[..., None] == keys_BSC[..., None, :]) & near_CC
        bias_BSCC = torch.zeros((), dtype=dtype, device=groups_BT.device).where(allowed_BSCC, float("-inf"))
        return cls(bias_BSCC.flatten(0, 1)[:, None])

    def attend(self, qkv_BT3HK: Tensor, gate: Gate | None, dropout: float, seeds_B: Tensor | None) -> Tensor:
        """The attention output, [B, T, H, K]. `gate`, `dropout` and `seeds_B` are not used: `FIXED_SETTINGS` excludes
        gates and attention dropout."""
        rows, tokens, _, heads, size = qkv_BT3HK.shape
        window = self.bias_S1CC.shape[2]
        padded_BT3HK = F.pad(qkv_BT3HK, (0, 0, 0, 0, 0, 0, 0, -tokens % window))
        # A copy, because a view would keep the whole tensor, keys and values too, for the backward pass.
        q_SCHK = padded_BT3HK[:, :, 0].contiguous().view(-1, window, heads, size)
        k_SCHK, v_SCHK = (_window_keys(padded_BT3HK[:, :, k_or_v], window).flatten(0, 1) for k_or_v in (1, 2))
        # cuDNN's kernel is excluded, as in `attention.fused_attend`.
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION) if qkv_BT3HK.is_cuda else nullcontext():
            out_SHCK = F.scaled_dot_product_attention(
                q_SCHK.transpose(1, 2), k_SCHK.transpose(1, 2), v_SCHK.transpose(1, 2), attn_mask=self.bias_S1CC
            )
        return out_SHCK.transpose(1, 2).reshape(rows, -1, heads, size)[:, :tokens]


def _window_keys(x_BT: Tensor, window: int, value: float = 0.0) -> Tensor:
    """The entries of `x_BT` [B, T, …] that belong to the keys of each window, [B, S, 2C, …]: the window's C entries and
    C/2 entries on each of its sides. Entries beyond the row's ends are `value`. C is `window` and divides T."""
    half_on_each_side = (0, 0) * (x_BT.dim() - 2) + (window // 2, window // 2)
    padded_BT = F.pad(x_BT, half_on_each_side, value=value)
    halves_BSC = [half.unflatten(1, (-1, window)) for half in (padded_BT[:, :-window], padded_BT[:, window:])]
    return torch.cat(halves_BSC, dim=2)


class RotaryAttention(NamedTuple):
    """Attention of queries and keys that are rotated by their positions (Su et al., 2021, equation 34)."""

    cos_BTK: Tensor  # float32; dimensions i and i + K/2 have the same angle, as in GPT-NeoX
    sin_BTK: Tensor
    kernel: TorchBias | TritonBias | Windows

    def attend(self, qkv_BT3HK: Tensor, gate: Gate | None, dropout: float, seeds_B: Tensor | None) -> Tensor:
        """The attention output of `kernel` after the rotation, [B, T, H, K]."""
        cos, sin = self.cos_BTK[:, :, None, None], self.sin_BTK[:, :, None, None]
        q_and_k = qkv_BT3HK[:, :, :2]
        wide = q_and_k.to(torch.promote_types(q_and_k.dtype, torch.float32))
        first, second = wide.chunk(2, dim=-1)
        rotated = wide * cos + torch.cat([-second, first], dim=-1) * sin
        qkv_BT3HK = torch.cat([rotated.to(qkv_BT3HK.dtype), qkv_BT3HK[:, :, 2:]], dim=2)
        return self.kernel.attend(qkv_BT3HK, gate, dropout, seeds_B)


def rotary_cos_sin(positions_BT: Tensor, size: int, base: float) -> tuple[Tensor, Tensor]:
    """Returns (cos, sin) of the angles position · base^(−2i/K), float32 [B, T, K], where K is `size`. The last
    dimension has the angles for i = 0 to K/2 − 1, and then the same angles again."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=positions_BT.device) / size
    angles = positions_BT[..., None].float() * (1.0 / base**exponents)
    angles_BTK = torch.cat([angles, angles], dim=-1)
    return angles_BTK.cos(), angles_BTK.sin()


def _mean_over_layers(cfg: ModelConfig, layers: int, global_value: float, local_value: float) -> float:
    """The mean of a quantity over an encoder's layers. The first layer and then every `global_every`-th is global and
    has the value `global_value`; the others are local and have `local_value`."""
    global_layers = -(-layers // cfg.global_every)
    return local_value + global_layers / layers * (global_value - local_value)


class ModernLayer(TransformerLayer):
    """A global or local layer of ModernBERT; see `TransformerLayer`."""

    def __init__(self, cfg: ModelConfig, index: int = 0):
        super().__init__(cfg)
        self.is_global = index % cfg.global_every == 0
        if index == 0:  # the input of the first layer is already normalised
            self.attention_norm = nn.Identity()
        self.up = Linear(cfg.width, 2 * cfg.feed_forward, bias=False)

    @staticmethod
    def check(cfg: ModelConfig) -> None:
        """Raise ValueError for settings that this kind of layer does not support."""
        for name, value in FIXED_SETTINGS.items():
            actual = getattr(cfg, name)
            if actual != value:
                remedy = f"set it to {str(value).lower()}" if value != () else "leave it empty"
                raise ValueError(f"model.{name} is {actual}, which model.body modern does not support: {remedy}")
        if cfg.width // cfg.heads % 2:
            raise ValueError(
                f"model.width / model.heads is {cfg.width // cfg.heads}, which must be even, because rotary positions "
                "turn pairs of dimensions: choose another model.heads"
            )

    def forward(  # type: ignore[override]
        self, x_BTD: Tensor, bias: tuple[RotaryAttention, RotaryAttention], seeds_B: Tensor | None = None
    ) -> Tensor:
        """The layer's output, [B, T, D]. `bias`: the result of `shared_inputs`; `seeds_B`: the random bits for dropout
        of the sublayers' outputs."""
        of_global, of_local = bias
        return super().forward(x_BTD, of_global if self.is_global else of_local, seeds_B)  # type: ignore[arg-type]

    def _feed_forward(self, x_BTD: Tensor, triton: bool = False) -> Tensor:
        """GeGLU (Shazeer, 2020), [B, T, D]."""
        values_BTF, gate_BTF = self.up(x_BTD).chunk(2, dim=-1)
        return self.down(F.gelu(values_BTF) * gate_BTF)

    @staticmethod
    def shared_inputs(  # type: ignore[override]
        cfg: ModelConfig,
        groups_BT: Tensor,
        position_bias_HW: Tensor | None,
        dtype: torch.dtype,
        make_mask: Callable[[Tensor], Tensor] = item_mask,
        row_tokens: int | None = None,
    ) -> tuple[RotaryAttention, RotaryAttention]:
        """Returns (attention of global layers, attention of local layers). Rotary positions count from the start of
        each item.

        The arguments are the same as for `attention.attention_bias`, which chooses the kernels of global layers.
        """
        assert make_mask is item_mask, "objectives with another mask fail in their checks"
        full = attention_bias(cfg, groups_BT, position_bias_HW, dtype, make_mask, row_tokens)
        first_BT, end_BT = item_bounds(groups_BT)
        column_T = torch.arange(groups_BT.shape[1], dtype=torch.int32, device=groups_BT.device)
        local: TritonBias | Windows
        if isinstance(full, TritonBias):  # the kernels skip tiles of keys outside the bounds
            half = cfg.local_window // 2
            local = full._replace(
                first_BT=first_BT.maximum(column_T - half), end_BT=end_BT.minimum(column_T + half + 1)
            )
        else:
            local = Windows.of(groups_BT, cfg.local_window, dtype)
        size, positions_BT = cfg.width // cfg.heads, column_T - first_BT
        return (
            RotaryAttention(*rotary_cos_sin(positions_BT, size, cfg.rotary_base), full),
            RotaryAttention(*rotary_cos_sin(positions_BT, size, cfg.local_rotary_base), local),
        )

    @staticmethod
    def flops(cfg: ModelConfig, layers: int, row_tokens: int) -> float:
        """As `TransformerLayer.flops`. For a local layer, the C + 1 keys that a query sees are counted, not the 2C keys
        of its window."""
        keys = _mean_over_layers(cfg, layers, row_tokens, min(row_tokens, cfg.local_window + 1))
        return 2.0 * layers * (4 * cfg.width**2 + 3 * cfg.width * cfg.feed_forward + 2 * keys * cfg.width)

    @staticmethod
    def saved_bytes(cfg: ModelConfig, batch: MicroBatchShape) -> float:
        """As `TransformerLayer.saved_bytes`: the mean over the discriminator's global and local layers.

        Five tensors [B, T, D] are saved: the inputs and outputs of the two norms, and the input of the output
        projection. q, k and v are saved too. In a local layer with torch's kernels k and v are twice as large, because
        the windows' keys overlap. The feed-forward network saves four tensors [B, T, F], and a fused attention kernel
        saves the log of the softmax's sum.
        """
        mean = partial(_mean_over_layers, cfg, cfg.discriminator_layers)
        wide_tensors = (5 + mean(3, 3 if batch.triton else 5)) * batch.tokens * cfg.width
        feed_forward = 4 * batch.tokens * cfg.feed_forward
        scores = mean(TransformerLayer.score_bytes(cfg, batch), 0)
        log_sums = batch.tokens * cfg.heads * FLOAT32_BYTES
        mean_log_sums = mean(log_sums if batch.on_gpu else 0, log_sums)
        norms = 4 * batch.tokens * (FLOAT32_BYTES if batch.on_gpu else batch.element_bytes)
        dropout_masks = 2 * batch.tokens * cfg.width if cfg.dropout else 0
        return (wide_tensors + feed_forward) * batch.element_bytes + scores + mean_log_sums + norms + dropout_masks

    @staticmethod
    def shared_bytes(cfg: ModelConfig, batch: MicroBatchShape) -> float:
        """Saved bytes that all layers of an encoder share: cos and sin (float32) of both rotations, the bounds or
        biases of the local attention, and what `TransformerLayer.shared_bytes` counts for the global attention."""
        rotated = 2 * 2 * batch.tokens * (cfg.width // cfg.heads) * FLOAT32_BYTES
        windows = batch.tokens * 2 * (FLOAT32_BYTES if batch.triton else cfg.local_window * batch.element_bytes)
        return rotated + windows + TransformerLayer.shared_bytes(cfg, batch)

    @staticmethod
    def backward_bytes(cfg: ModelConfig, batch: MicroBatchShape) -> float:
        """Bytes of the gradients that the backward pass of one layer holds at its peak. The peak is in the feed-forward
        network (four tensors [B, T, F]), in local attention (q, k and v; with torch's kernels also the windows' q, k
        and v), or in global attention (`TransformerLayer.backward_bytes`)."""
        local_attention = (3 if batch.triton else 3 + 5) * batch.tokens * cfg.width * batch.element_bytes
        feed_forward = 4 * batch.tokens * cfg.feed_forward * batch.element_bytes
        return max(feed_forward, local_attention, TransformerLayer.backward_bytes(cfg, batch))
