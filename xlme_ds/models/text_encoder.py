"""One trained encoder with an embedding of its own: what is evaluated, fine-tuned and exported.

B rows, T tokens, D width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..data.rows import EOS, LAYOUTS, PAD
from .electra import block_sizes
from .encoder import Encoder, lookup

# An encoder of a pre-training model, by the prefix of its parameters.
Which = Literal["encoder", "discriminator", "generator"]


class TextEncoder(nn.Module):
    """Tokens in, hidden states out. `cfg.discriminator_layers` is its depth; it reads nothing of the generator's
    settings."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        for n, size in enumerate(block_sizes(cfg)):
            self.register_parameter(f"embedding_{n}", nn.Parameter(torch.empty(size, cfg.width)))
        self.encoder = Encoder(cfg, cfg.discriminator_layers)

    @property
    def table(self) -> list[Tensor]:
        """The blocks of the token embedding."""
        return [getattr(self, f"embedding_{n}") for n in range(self.cfg.vocabulary_blocks)]

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Token embeddings, [B, T, D]."""
        return lookup(tokens_BT, self.table)

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        segments_BT: Tensor,
        languages_BT: Tensor | None = None,
        keys_B: Tensor | None = None,
    ) -> Tensor:
        """Last hidden states, [B, T, D]; `segments_BT` is 0 at padding, and a token sees those of its own number.

        `languages_BT` (places in `cfg.language_embeddings`) and `keys_B` (see `Batch`) are needed by models that have
        language embeddings, and for dropout.
        """
        return self.encoder(self.embed(tokens_BT), positions_BT, segments_BT, languages_BT, keys_B)

    def hidden_states(
        self, tokens_BT: Tensor, positions_BT: Tensor, segments_BT: Tensor, languages_BT: Tensor | None = None
    ) -> list[Tensor]:
        """Hidden states [B, T, D] of the embedding layer (index 0) and of every layer."""
        return self.encoder.hidden_states(self.embed(tokens_BT), positions_BT, segments_BT, languages_BT)


def one_item_a_row(tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
    """(positions, segments) of rows that hold one item each, padded after it; of a pair in XLM's layout, positions
    restart."""
    inside_BT = (tokens_BT != PAD).long()
    positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device) * inside_BT
    if LAYOUTS["xlm"].opening == tokens_BT[0, 0]:
        second_BT = second_sides(tokens_BT) * inside_BT
        positions_BT = torch.where(second_BT > 0, second_BT.cumsum(1) - 1, positions_BT)
    return positions_BT, inside_BT


def second_sides(tokens_BT: Tensor) -> Tensor:
    """1 on the second side of rows that hold a pair each, and after it, else 0; int64 [B, T]."""
    ends_BT = (tokens_BT == EOS).long()
    ends_BT[:, 0] = 0  # in XLM's layout it opens the item
    return (ends_BT.cumsum(1) - ends_BT).clamp(max=1)


def language_index(cfg: ModelConfig, code: str) -> int:
    """Place of a language in `cfg.language_embeddings` (of `zh` also that of `zh-Hans`); 0 for a model that has none.

    Raises ValueError for a language that is not there.
    """
    known = cfg.language_embeddings
    found = [n for n, each in enumerate(known) if each == code] or [
        n for n, each in enumerate(known) if each.startswith(f"{code}-")
    ]
    if known and not found:
        raise ValueError(
            f"model.language_embeddings has no {code}, only {' '.join(known)}: leave out what is in that language"
        )
    return found[0] if found else 0


def languages_of(cfg: ModelConfig, codes: Sequence[tuple[str, ...]], tokens_BT: Tensor) -> Tensor:
    """The languages of rows that hold one item each, int64 [B, T], from the codes of the sides of each."""
    pairs = [[language_index(cfg, code) for code in (of_row[0], of_row[-1])] for of_row in codes]
    first_B, second_B = torch.tensor(pairs, device=tokens_BT.device).unbind(1)
    languages_BT = torch.where(second_sides(tokens_BT) > 0, second_B[:, None], first_B[:, None])
    return languages_BT * (tokens_BT != PAD)


def take_encoder(state: Mapping[str, Tensor], cfg: ModelConfig, which: Which) -> TextEncoder:
    """One encoder out of the whole state of a pre-training model, in evaluation mode.

    The discriminator's embedding under gradient-disentangled sharing is the sum of the generator's and its difference.
    """
    layers = cfg.generator_layers if which == "generator" else cfg.discriminator_layers
    prefix = f"{which}."
    taken = {"encoder." + name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    for n in range(cfg.vocabulary_blocks):
        taken[f"embedding_{n}"] = state[f"embedding_{n}"]
        if which == "discriminator" and cfg.embedding_sharing == "gdes":
            taken[f"embedding_{n}"] = taken[f"embedding_{n}"] + state[f"difference_{n}"]
    return encoder_of(taken, replace(cfg, discriminator_layers=layers))


def encoder_of(state: Mapping[str, Tensor], cfg: ModelConfig) -> TextEncoder:
    """The encoder with these parameters, in evaluation mode."""
    encoder = TextEncoder(cfg)
    encoder.load_state_dict(state)
    return encoder.eval()
