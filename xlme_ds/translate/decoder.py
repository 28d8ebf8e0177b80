"""The decoder of a translation model: each target token sees the target tokens before it and all source tokens.

It has one of two forms (`model.decoder`). XLM's layer has self-attention, cross-attention and a feed-forward network.
DeltaLM's layer (Ma et al., 2021, section 3.1) consists of two encoder layers: self-attention and feed-forward, then
cross-attention and feed-forward. So each half can start from a whole layer of a pre-trained encoder.

B rows, S source tokens, R target tokens, H heads, K head size, D width.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..data.rows import EOS
from ..models.attention import TorchBias, TritonBias, dropout_attend, fused_attend
from ..models.dropout import derive_seeds
from ..models.encoder import Encoder
from ..models.layers import Attention, LayerNorm, Linear, TransformerLayer

KeysAndValues = tuple[Tensor, Tensor]  # each [B, H, tokens, K]


class SharedInputs(NamedTuple):
    """Inputs that all layers of a decoder share in one pass."""

    self_bias: TorchBias | TritonBias  # which target tokens a target token sees
    source_BSD: Tensor  # the encoder's last hidden states
    cross_bias: TorchBias  # which source tokens a target token sees
    # Attention module -> its keys and values: those of the earlier target tokens in self-attention, those of the source
    # in cross-attention. A pass over one more target token adds the keys and values of that token to self-attention's.
    # None in a pass over whole targets.
    past: dict[nn.Module, KeysAndValues] | None = None


class DecoderAttention(Attention):
    """Self-attention over whole targets, or for one new token at a time."""

    def forward(self, x_BRD: Tensor, shared: SharedInputs, seeds_B: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Attention output, [B, R, D]; see `Attention`."""
        if shared.past is None:
            return super().forward(x_BRD, shared.self_bias, seeds_B)
        assert isinstance(shared.self_bias, TorchBias)
        q_BHRK, k_BHRK, v_BHRK = _split_heads(self.qkv(x_BRD), 3, self.heads)
        if self in shared.past:
            past_k_BHRK, past_v_BHRK = shared.past[self]
            k_BHRK, v_BHRK = torch.cat([past_k_BHRK, k_BHRK], dim=2), torch.cat([past_v_BHRK, v_BHRK], dim=2)
        shared.past[self] = k_BHRK, v_BHRK
        gate_BHR1 = None if self.gate is None else self.gate(q_BHRK)
        return self.output(_join_heads(fused_attend(q_BHRK, k_BHRK, v_BHRK, gate_BHR1, shared.self_bias)))


class CrossAttention(nn.Module):
    """Attention of target tokens to the source tokens of their pair, without a position bias."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.heads = cfg.heads
        self.dropout = cfg.attention_dropout
        self.query = Linear(cfg.width, cfg.width)
        self.key_value = Linear(cfg.width, 2 * cfg.width)
        self.output = Linear(cfg.width, cfg.width)

    def forward(self, x_BRD: Tensor, shared: SharedInputs, seeds_B: Tensor | None = None) -> Tensor:
        """Attention output, [B, R, D]. `seeds_B`: a random seed per row for the dropout of attention weights; None: no
        dropout."""
        (q_BHRK,) = _split_heads(self.query(x_BRD), 1, self.heads)
        if shared.past is not None and self in shared.past:
            k_BHSK, v_BHSK = shared.past[self]
        else:
            k_BHSK, v_BHSK = _split_heads(self.key_value(shared.source_BSD), 2, self.heads)
            if shared.past is not None:
                shared.past[self] = k_BHSK, v_BHSK
        inputs = q_BHRK, k_BHSK, v_BHSK, None, shared.cross_bias
        out_BHRK = (
            fused_attend(*inputs)
            if seeds_B is None or not self.dropout
            else dropout_attend(*inputs, self.dropout, seeds_B)
        )
        return self.output(_join_heads(out_BHRK))


def _split_heads(x: Tensor, parts: int, heads: int) -> Tensor:
    """[B, tokens, parts · D] reshaped to [parts, B, H, tokens, K]; the parts are queries, keys or values."""
    return x.view(*x.shape[:2], parts, heads, -1).permute(2, 0, 3, 1, 4)


def _join_heads(out_BHRK: Tensor) -> Tensor:
    return out_BHRK.transpose(1, 2).flatten(2)


class DecoderLayer(TransformerLayer):
    """XLM's layer: self-attention, cross-attention and a feed-forward network, each with a residual connection."""

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg, attention=DecoderAttention(cfg))
        self.cross_attention = CrossAttention(cfg)
        self.cross_norm = LayerNorm(cfg.width, eps=cfg.norm_epsilon)

    def forward(self, x_BRD: Tensor, shared: SharedInputs, seeds_B: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """The layer's output, [B, R, D]; see `TransformerLayer`."""
        self_seeds_B, cross_seeds_B = (
            (None, None) if seeds_B is None else (derive_seeds(seeds_B, 2), derive_seeds(seeds_B, 4))
        )
        x_BRD = self._add(x_BRD, self.attention_norm, lambda x: self.attention(x, shared, self_seeds_B), seeds_B, 0)
        x_BRD = self._add(x_BRD, self.cross_norm, lambda x: self.cross_attention(x, shared, cross_seeds_B), seeds_B, 3)
        return self._add(x_BRD, self.feed_forward_norm, self._feed_forward, seeds_B, 1)


class Decoder(Encoder):
    """Positions, layers and norms of a decoder. In the interleaved form a DeltaLM layer is two modules of `layers`."""

    ragged = True

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg, decoder_depth(cfg))

    def _layer(self, number: int) -> nn.Module:
        if self.cfg.decoder == "xlm":
            return DecoderLayer(self.cfg)
        attention = CrossAttention(self.cfg) if number % 2 else DecoderAttention(self.cfg)
        return TransformerLayer(self.cfg, attention=attention)


def decoder_layers(cfg: ModelConfig) -> int:
    """Number of layers as the decoder's paper counts them: one layer of DeltaLM is two modules of `Decoder.layers`."""
    return cfg.decoder_layers or max(1, cfg.discriminator_layers // (1 if cfg.decoder == "xlm" else 2))


def decoder_depth(cfg: ModelConfig) -> int:
    """Number of modules in `Decoder.layers`. It is also the number of encoder layers that a decoder can start from."""
    return decoder_layers(cfg) * (1 if cfg.decoder == "xlm" else 2)


def decoder_settings(cfg: ModelConfig) -> dict[str, Any]:
    """The settings in an export's config.json that an export without a decoder lacks."""
    return {
        "is_encoder_decoder": True,
        "decoder_start_token_id": EOS,
        "decoder_form": cfg.decoder,
        "decoder_layers": decoder_layers(cfg),
    }


def decoder_from_encoder(encoder: Mapping[str, Tensor], cfg: ModelConfig) -> dict[str, Tensor]:
    """Decoder parameters made from an encoder's `state_dict`; layer n comes from the encoder's layer n.

    In XLM's form, the result lacks cross-attention and the norm of cross-attention, because an encoder has neither. In
    the interleaved form, the result has all parameters: in odd layers (counted from 0) the encoder's self-attention
    becomes cross-attention.
    """
    parameters = dict(encoder)
    if cfg.decoder == "interleaved":
        for number in range(1, decoder_depth(cfg), 2):
            prefix = f"layers.{number}.attention"
            for kind in ("weight", "bias"):
                qkv = parameters.pop(f"{prefix}.qkv.{kind}")
                parameters[f"{prefix}.query.{kind}"] = qkv[: cfg.width]
                parameters[f"{prefix}.key_value.{kind}"] = qkv[cfg.width :]
    return parameters
