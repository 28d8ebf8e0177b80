"""Dropout that draws no random numbers: the row's 64-bit seed (`Batch.seeds_B`) and the place in the model decide
which elements are dropped.

So the same elements are dropped on any device, for any division of a step into micro-batches, and when a checkpointed
layer runs again. SplitMix64 (Steele, Lea and Flood, 2014) makes 16 bits for each element.

B rows, T tokens, D width, H heads, S keys, G groups (heads, or one), W 64-bit words of a token.

`derive_seeds` and `_dropped` are custom operators, into which torch.compile does not trace. The code that it makes for
a GPU multiplies an arange in 32 bits (pytorch#175966), and its code for a CPU corrupted memory in these functions
(torch 2.13).
"""

import torch
from torch import Tensor

_STEP, _FACTOR_1, _FACTOR_2 = (
    word - (1 << 64) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # SplitMix64's uint64 constants as int64, with which sums and products have the same bits
OUTSIDE = -1  # the place of dropout outside of an encoder; inside it, 0 is the input and n + 1 is layer n
_BITS = 16  # random bits for each element
_PER_WORD = 64 // _BITS  # elements that one 64-bit word serves


@torch.library.custom_op("xlme_ds::derive_seeds", mutates_args=())
def derive_seeds(seeds_B: Tensor, place: int) -> Tensor:
    """Seeds for one `place` in the model, int64 [B]. `seeds_B` are the rows' seeds, or seeds that this function
    returned for a larger part of the model."""
    return _mixed(seeds_B + ((place * _STEP + (1 << 63)) % (1 << 64) - (1 << 63)))  # the product wrapped to int64


def drop(x_BTD: Tensor, rate: float, seeds_B: Tensor | None) -> Tensor:
    """A copy of `x_BTD` in which a fraction `rate` of the elements, chosen by `seeds_B`, is set to 0 and the others are
    divided by 1 − `rate`. `rate` is rounded to a multiple of 2^-16; if that is 0 or `seeds_B` is None, `x_BTD` itself
    is returned."""
    threshold = round(rate * (1 << _BITS))
    if seeds_B is None or not threshold:
        return x_BTD
    tokens, width = x_BTD.shape[1:]
    dropped_BTD = _dropped(seeds_B, 1, tokens, width, tokens, width, threshold).squeeze(1)
    return x_BTD.masked_fill(dropped_BTD, 0.0) * ((1 << _BITS) / ((1 << _BITS) - threshold))


def drop_weights(weights_BHTS: Tensor, rate: float, seeds_B: Tensor, row_tokens: int) -> Tensor:
    """Attention weights of which a fraction `rate` is dropped. The weights are those of the first T queries and the
    first S keys in rows of `row_tokens` tokens. T and S do not change which weights are dropped."""
    threshold = round(rate * (1 << _BITS))
    dropped_BHTS = _dropped(seeds_B, *weights_BHTS.shape[1:], row_tokens, row_tokens, threshold)
    return weights_BHTS.masked_fill(dropped_BHTS, 0.0) * ((1 << _BITS) / ((1 << _BITS) - threshold))


@torch.library.custom_op("xlme_ds::dropped", mutates_args=())
def _dropped(
    seeds_B: Tensor, groups: int, tokens: int, width: int, all_tokens: int, all_width: int, threshold: int
) -> Tensor:
    """Whether each element is dropped, bool [B, groups, tokens, width]. `threshold` is the rate times 2^16: an element
    is dropped if its 16 random bits, as a signed number, are below `threshold` − 2^15.

    The result is the beginning, in tokens and width, of a mask [B, groups, all_tokens, all_width], whose rest is not
    computed.
    """
    device, words_per_token = seeds_B.device, -(-all_width // _PER_WORD)
    words = -(-width // _PER_WORD)  # number of words that are computed for a token
    group_offsets = torch.arange(groups, device=device)[:, None, None] * (all_tokens * words_per_token)
    token_offsets = torch.arange(tokens, device=device)[:, None] * words_per_token
    counter_GTW = group_offsets + token_offsets + torch.arange(1, words + 1, device=device)
    bits = _mixed(seeds_B[:, None] + counter_GTW.flatten() * _STEP).view(torch.int16)
    return bits.view(len(seeds_B), groups, tokens, words * _PER_WORD)[..., :width] < threshold - (1 << (_BITS - 1))


derive_seeds.register_fake(lambda seeds_B, place: torch.empty_like(seeds_B))
_dropped.register_fake(
    lambda seeds_B, groups, tokens, width, all_tokens, all_width, threshold: seeds_B.new_empty(
        len(seeds_B), groups, tokens, width, dtype=torch.bool
    )
)


def _mixed(state: Tensor) -> Tensor:
    """SplitMix64's output function, int64 in and out."""
    state = (state ^ _shifted(state, 30)) * _FACTOR_1
    state = (state ^ _shifted(state, 27)) * _FACTOR_2
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, bits: int) -> Tensor:
    """`state` shifted right by `bits`, with zeros on the left, as for unsigned numbers."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
