"""Inputs of the encoder and the decoder of a translation model, made from a batch (XLM: Conneau and Lample, 2019;
Lample et al., 2018).

Rows of pairs are the same as in translation language modelling. Here the two sides of a pair are separated: the encoder
reads the source, the decoder the target. A monolingual sentence is a target; its source is a noised copy, or a
translation that the model wrote.

B rows; per row T tokens, S source tokens and R target tokens.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.batch import Batch
from ..data.rows import EOS, PAD, TASKS

_MULTIPLE = 8  # widths are multiples of this, which is faster on a GPU


class Side(NamedTuple):
    """The tokens that one network reads of every row, with padding only on the right; int64 [B, S] or [B, R]."""

    tokens: Tensor
    positions: Tensor  # from 0 in every item
    languages: Tensor
    segments: Tensor  # each token's item number in its row, from 1; 0 at padding


def target_mask(batch: Batch) -> Tensor:
    """Whether each token is a target, bool [B, T]. Targets are the second sides of pairs, and monolingual sentences.
    The last `</s>` of each belongs to the target, its opening token does not."""
    not_padding_BT, is_pairs_B1 = batch.segments_BT > 0, (batch.task_B == TASKS.index("para"))[:, None]
    second_BT = (batch.sides_BT == 1) & not_padding_BT
    # In XLM's layout, `</s>` also opens the second side.
    opens_BT = second_BT & ~F.pad(second_BT[:, :-1], (1, 0)) & (batch.tokens_BT == EOS)
    return torch.where(is_pairs_B1, second_BT & ~opens_BT, not_padding_BT & (batch.positions_BT > 0))


def rows_of(batch: Batch, task: str) -> Batch:
    """The rows of one task. Only the fields by row are selected; the fields of masked positions stay as in `batch`."""
    of_task_B = batch.task_B == TASKS.index(task)
    by_row = {name: value[of_task_B] for name, value in batch._asdict().items() if name.endswith(("_BT", "_B"))}
    return batch._replace(**by_row, added={name: value_BT[of_task_B] for name, value_BT in batch.added.items()})


def sources_of_pairs(batch: Batch) -> Side:
    """The first sides of pairs, with their special tokens."""
    source_BT = (batch.sides_BT == 0) & (batch.segments_BT > 0)
    return _packed(source_BT, batch.tokens_BT, batch.positions_BT, batch.languages_BT, batch.segments_BT)


def noised_sources(batch: Batch) -> Side:
    """The noised copies of monolingual sentences."""
    noised_BT = batch.added["noised_BT"]
    copied_BT = (noised_BT != PAD) & (batch.segments_BT > 0)
    return _packed(copied_BT, noised_BT, batch.positions_BT, batch.languages_BT, batch.segments_BT)


def targets(batch: Batch) -> Side:
    """Decoder inputs: targets shifted right, each beginning with `</s>`."""
    target_BT = target_mask(batch)
    column_T = torch.arange(target_BT.shape[1], device=target_BT.device)
    # The first target token of a sentence has position 1. The first target token of a pair follows a non-target.
    begins_BT = target_BT & ((batch.positions_BT == 1) | ~F.pad(target_BT[:, :-1], (1, 0)))
    start_BT = torch.where(begins_BT, column_T, 0).cummax(1).values  # the column in which each token's target begins
    before_BT = F.pad(batch.tokens_BT[:, :-1], (1, 0), value=PAD).masked_fill(begins_BT, EOS)
    return _packed(target_BT, before_BT, column_T - start_BT, batch.languages_BT, batch.segments_BT)


def translated_sources(
    batch: Batch, translate: Callable[[Side, Tensor], Sequence[Sequence[int]]], opening: int
) -> Side:
    """Translations of the sentences of monolingual rows. Those of the sentences of one row follow each other in the
    same row.

    `translate` gets the sentences, one in each row, and the language to translate each into. It returns the ordinary
    tokens of the translations. `opening`: the token before each translation. N sentences; L tokens in all translations,
    with special tokens.
    """
    is_first_BT = (batch.segments_BT > 0) & (batch.positions_BT == 0)
    row_N, start_N = is_first_BT.nonzero().unbind(1)
    item_N = batch.segments_BT[row_N, start_N]
    languages_N = batch.added["target_languages_BT"][row_N, start_N]
    in_sentence_NT = batch.segments_BT[row_N] == item_N[:, None]
    values = (values_BT[row_N] for values_BT in (batch.tokens_BT, batch.positions_BT, batch.languages_BT))
    translations = translate(_packed(in_sentence_NT, *values, in_sentence_NT.long()), languages_N)

    rows, device = len(batch.task_B), row_N.device
    lengths_N = torch.tensor([len(translation) + 2 for translation in translations], device=device)
    tokens_L = torch.tensor([token for tokens in translations for token in (opening, *tokens, EOS)], device=device)
    sentence_L = torch.arange(len(translations), device=device).repeat_interleave(lengths_N)
    row_L = row_N[sentence_L]
    lengths_B = torch.zeros(rows, dtype=torch.int64, device=device).index_add(0, row_L, torch.ones_like(row_L))
    index_L = torch.arange(len(tokens_L), device=device)
    position_L = index_L - _starts(lengths_N)[sentence_L]
    column_L = index_L - _starts(lengths_B)[row_L]
    values_of_side = (tokens_L, position_L, languages_N[sentence_L], item_N[sentence_L])
    blank_BS = torch.zeros(rows, _width(lengths_B), dtype=torch.int64, device=device)
    return Side(*(blank_BS.index_put((row_L, column_L), value_L) for value_L in values_of_side))


def _starts(lengths: Tensor) -> Tensor:
    """The index at which each of several sequences of these lengths begins, if they follow each other from index 0."""
    return lengths.cumsum(0) - lengths


def _width(lengths_B: Tensor) -> int:
    """Columns for rows of these lengths: the largest length, rounded up to a multiple of 8; at least 8."""
    return max(-(-int(lengths_B.max()) // _MULTIPLE), 1) * _MULTIPLE


def _packed(mask_BT: Tensor, *values: Tensor) -> Side:
    """Each of the `values`, [B, T], reduced to [B, S]: the values where the mask is true, moved to the left of the row,
    then zeros."""
    width = _width(mask_BT.sum(1))
    order_BS = (~mask_BT).long().sort(dim=1, stable=True).indices[:, :width]  # columns where the mask is true first
    mask_BS = mask_BT.gather(1, order_BS)
    return Side(*(value_BT.gather(1, order_BS) * mask_BS for value_BT in values))


def cross_attention_mask(target_items_BR: Tensor, source_items_BS: Tensor) -> Tensor:
    """Cross-attention mask, bool [B, 1, R, S], from the item numbers of target and source tokens: a target token sees
    the source tokens with its item number. Padding (0) sees everything, so that no softmax is empty."""
    query_BR1 = target_items_BR[:, :, None]
    return ((query_BR1 == source_items_BS[:, None]) | (query_BR1 == 0))[:, None]
