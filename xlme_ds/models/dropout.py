"""Dropout whose randomness is data: what is dropped follows from 64 bits of the row (`Batch.keys_B`) and the place, nothing else.

So it is the same on any device and in any cut of a step, and once more where a checkpointed layer runs again. SplitMix64 (Steele,
Lea and Flood, 2014) makes the bits, 16 a number. B rows, T tokens, D width.
"""

import torch
from torch import Tensor

_STEP, _FIRST, _SECOND = (
    word - (1 << 64) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # as int64, which multiplies alike
APART = -1
"""A place for what is not of the encoder whose layers count from it."""
_BITS = 16
_A_WORD = 64 // _BITS


def derive(keys_B: Tensor, place: int) -> Tensor:
    """Keys of their own for one of the places that drop, int64 [B]."""
    return _mixed(keys_B + ((place * _STEP + (1 << 63)) % (1 << 64) - (1 << 63)))


def drop(x_BTD: Tensor, rate: float, keys_B: Tensor | None) -> Tensor:
    """`x_BTD` with a share `rate` of its numbers 0, by `keys_B`, and the others grown by what that takes; no keys: as it is.

    The share is `rate` rounded to a multiple of 2^-16.
    """
    dropped = round(rate * (1 << _BITS))
    if keys_B is None or not dropped:
        return x_BTD
    rows, tokens, width = x_BTD.shape
    words = -(-width // _A_WORD)  # of a token
    count = torch.arange(1, tokens * words + 1, device=keys_B.device)
    bits = _mixed(keys_B[:, None] + count * _STEP).view(torch.int16).view(rows, tokens, words * _A_WORD)
    out_BTD = bits[:, :, :width] < dropped - (1 << (_BITS - 1))
    return x_BTD.masked_fill(out_BTD, 0.0) * ((1 << _BITS) / ((1 << _BITS) - dropped))


def _mixed(words: Tensor) -> Tensor:
    """SplitMix64's output function, int64 in and out."""
    words = (words ^ _shifted(words, 30)) * _FIRST
    words = (words ^ _shifted(words, 27)) * _SECOND
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """To the right, zeros moving in."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
