"""Decodes token by token, with cached keys and values, and writes the greedy translations of back-translation.

N hypotheses or sentences, which are the model's B rows; S source tokens, D width, V vocabulary.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..config import ModelConfig
from ..data.rows import BOS, EOS, PAD, UNK
from .decoder import KeysAndValues
from .sides import Side


class Writer(Protocol):
    """The members of a translation model (`TranslationModel`) that decoding uses."""

    cfg: ModelConfig
    any_rank: Callable[[bool], bool]

    def read_source(self, source: Side) -> Tensor:
        """Hidden states of the source, [N, S, D]."""

    def read_next(
        self, tokens_B: Tensor, position: int, languages_B: Tensor, source_BSD: Tensor, allowed_B11S: Tensor, past: dict
    ) -> Tensor:
        """The decoder's last hidden state of each row after one more token, [N, D]."""

    def scores(self, hidden_BD: Tensor) -> Tensor:
        """Logits of the next token, [N, V]."""


def longest_translation(source: int) -> int:
    """The largest number of tokens of a translation of `source` ordinary tokens (XLM's rule)."""
    return int(1.3 * source + 5)


class CachedDecoder:
    """Hypotheses of several sentences, which the decoder reads token by token."""

    def __init__(self, model: Writer, source: Side, languages_N: Tensor):
        self.model, self.languages_N = model, languages_N
        self.source_NSD = model.read_source(source)
        self.allowed_N11S = (source.items > 0)[:, None, None]
        self.past: dict[torch.nn.Module, KeysAndValues] = {}
        self.position = 0  # position of the next token that the decoder reads

    def log_probabilities(self, tokens_N: Tensor) -> Tensor:
        """Read `tokens_N`; returns the log-probabilities of the token that follows, float32 or wider [N, V]. Only
        ordinary tokens and `</s>` are possible."""
        hidden_ND = self.model.read_next(
            tokens_N, self.position, self.languages_N, self.source_NSD, self.allowed_N11S, self.past
        )
        scores_NV = self.model.scores(hidden_ND)
        self.position += 1
        scores_NV = scores_NV.to(torch.promote_types(scores_NV.dtype, torch.float32))
        scores_NV[:, [BOS, PAD, UNK, -1]] = float("-inf")  # -1: <mask>
        return scores_NV.log_softmax(-1)

    def keep(self, rows: list[int]) -> None:
        """Continue with the hypotheses of these rows; a row may occur several times."""
        rows_N = torch.tensor(rows, device=self.source_NSD.device)
        self.source_NSD, self.allowed_N11S = self.source_NSD[rows_N], self.allowed_N11S[rows_N]
        self.languages_N = self.languages_N[rows_N]
        self.past = {module: (keys[rows_N], values[rows_N]) for module, (keys, values) in self.past.items()}


@torch.no_grad()
def write(model: Writer, source: Side, languages_N: Tensor) -> list[list[int]]:
    """Greedy translations, as ordinary tokens, of the rows of `source`, each of which is one sentence, into the
    languages `languages_N`. Each has at most `longest_translation` tokens, and at most as many as the model can
    read."""
    decoder, tokens_N = CachedDecoder(model, source, languages_N), torch.full_like(languages_N, EOS)
    lengths = (source.items > 0).sum(1).tolist()  # including the two special tokens
    limits = [min(longest_translation(length - 2), model.cfg.max_positions - 2) for length in lengths]
    written: list[list[int]] = [[] for _ in limits]
    live = list(range(len(limits)))  # index of the sentence in each of the decoder's rows; finished ones are removed
    while model.any_rank(bool(live)):
        tokens_N = decoder.log_probabilities(tokens_N).argmax(-1)
        unfinished_rows = []
        for row, (sentence, token) in enumerate(zip(live, tokens_N.tolist(), strict=False)):
            if token != EOS:
                written[sentence].append(token)
                if len(written[sentence]) < limits[sentence]:
                    unfinished_rows.append(row)
        live = [live[row] for row in unfinished_rows]
        if len(unfinished_rows) < len(tokens_N):
            rows = unfinished_rows or [0]  # a rank that is done keeps decoding one row until the other ranks are done
            decoder.keep(rows)
            tokens_N = tokens_N[rows]
    return written
