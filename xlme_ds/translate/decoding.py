"""Beam search for the most likely translation of every source, token by token.

A candidate is an unfinished hypothesis with one more token. If it ends with `</s>` and is among the `beam` best
candidates of its sentence, it becomes a finished hypothesis. Of the candidates without `</s>`, the `beam` best
continue. The search ends when there are `beam` finished hypotheses, or when the hypotheses have XLM's largest length,
1.3 n + 5 tokens for a source of n tokens, or `model.max_positions` tokens. The finished hypothesis with the highest
score wins: score = (sum of log p) / length ** penalty, where the length counts a final `</s>`. Beam 1 takes the most
likely token each time.

A sentences, N hypotheses of all sentences together, S source tokens, D width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from ..cli import progress
from ..config import ModelConfig
from ..data.rows import BOS, EOS, LAYOUTS, PAD, UNK
from ..models.text_encoder import positions_and_segments
from .model import CachedDecoder, TranslationModel, max_translation_tokens
from .sides import Side

_MAX_BATCH_TOKENS = 4096  # upper bound of padded source tokens · beam in a batch of several sources
_MAX_LOGITS = 2**26  # upper bound of hypotheses · vocabulary in one decoding step: this bounds memory


def generation_settings(cfg: ModelConfig) -> dict[str, Any]:
    """The content of an export's generation_config.json, with which transformers' `generate` searches like `translate`,
    if both have the same number of beams."""
    return {
        "bos_token_id": BOS,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "decoder_start_token_id": EOS,
        "max_new_tokens": cfg.max_positions,  # an upper bound: the model class limits the length by the source's, too
        "suppress_tokens": [BOS, PAD, UNK, cfg.vocabulary - 1],
        "renormalize_logits": True,
    }


def translate(
    model: TranslationModel,
    sources: Sequence[np.ndarray],
    languages: tuple[int, int],
    beam: int = 1,
    length_penalty: float = 1.0,
) -> list[list[int]]:
    """The translations of `sources`. Sources and translations are ordinary tokens; a source has at most
    `model.cfg.max_positions` − 2 tokens.

    `languages`: source and target, as indices into `model.cfg.language_embeddings`. The model is in evaluation
    mode; its device and precision are used.
    """
    translations: list[list[int]] = [[] for _ in sources]
    order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
    batches = _batches(order, sources, beam, max_sentences=max(_MAX_LOGITS // (model.cfg.vocabulary * beam), 1))
    for indices in progress(batches, len(sources), "sentences", amount=len):
        limits = [min(max_translation_tokens(len(sources[index])), model.cfg.max_positions) for index in indices]
        searches = [Search(limit, beam, length_penalty) for limit in limits]
        _search(model, [sources[index] for index in indices], languages, searches)
        for index, search in zip(indices, searches, strict=True):
            translations[index] = search.best()
    return translations


def _batches(order: Sequence[int], sources: Sequence[np.ndarray], beam: int, max_sentences: int) -> Iterator[list[int]]:
    """Yield batches of source indices. `order` has short sources first, so a batch is padded to the length of its last
    source."""
    batch: list[int] = []
    for index in order:
        padded_tokens = (len(batch) + 1) * (len(sources[index]) + 2)
        if batch and (padded_tokens * beam > _MAX_BATCH_TOKENS or len(batch) == max_sentences):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


class Search:
    """The hypotheses of one sentence."""

    def __init__(self, limit: int, beam: int, length_penalty: float):
        self.limit, self.beam, self.length_penalty = limit, beam, length_penalty
        self.live: list[list[int]] = [[]]
        self.finished: list[tuple[float, list[int]]] = []  # (score, tokens)

    def advance(self, candidates: Iterator[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
        """Extend the live hypotheses by one token. Each of the `candidates` is (sum of log p, index into `live`, next
        token); the best comes first. Returns the candidates that continue; the list is empty if the search has
        ended."""
        continued: list[tuple[float, int, int]] = []
        for rank, (total, hypothesis, token) in enumerate(candidates):
            if len(continued) == self.beam:
                break
            if token != EOS:
                continued.append((total, hypothesis, token))
            elif rank < self.beam:
                self._finish(total, self.live[hypothesis], len(self.live[hypothesis]) + 1)
        self.live = [[*self.live[hypothesis], token] for _, hypothesis, token in continued]
        if len(self.finished) >= self.beam:
            return []
        if len(self.live[0]) == self.limit:
            for (total, _, _), tokens in zip(continued, self.live, strict=True):
                self._finish(total, tokens, len(tokens))
            return []
        return continued

    def _finish(self, total: float, tokens: list[int], length: int) -> None:
        self.finished.append((total / length**self.length_penalty, tokens))

    def best(self) -> list[int]:
        """The tokens of the best finished hypothesis."""
        _, tokens = max(self.finished, key=lambda scored: scored[0])
        return tokens


def source_side(model: TranslationModel, sources: Sequence[np.ndarray], language: int) -> Side:
    """The encoder's input: one row per sentence, with special tokens, on the model's device."""
    items = [torch.from_numpy(LAYOUTS[model.cfg.layout].item(source)).long() for source in sources]
    tokens_AS = pad_sequence(items, True, PAD).to(model.embedding_blocks[0].device)
    positions_AS, segments_AS = positions_and_segments(tokens_AS)
    return Side(tokens_AS, positions_AS, language * segments_AS, segments_AS)


@torch.no_grad()
def _search(
    model: TranslationModel, sources: Sequence[np.ndarray], languages: tuple[int, int], searches: Sequence[Search]
) -> None:
    source = source_side(model, sources, languages[0])
    decoder = CachedDecoder(model, source, torch.full_like(source.segments[:, 0], languages[1]))
    live, beam, device = list(searches), searches[0].beam, decoder.source_NSD.device
    tokens_N = torch.full((len(live),), EOS, device=device)
    totals_N = torch.zeros(len(live), device=device)
    while live:
        sums_NV = totals_N[:, None] + decoder.log_probabilities(tokens_N)
        vocabulary, hypotheses_per_sentence = sums_NV.shape[1], len(sums_NV) // len(live)
        best = sums_NV.view(len(live), -1).topk(2 * beam)  # of these at most `beam` are `</s>`, so `beam` can continue
        still_live: list[Search] = []
        continued: list[tuple[float, int, int]] = []  # (sum of log p, row, token)
        best_by_sentence = zip(live, best.values.tolist(), best.indices.tolist(), strict=True)
        for sentence, (search, totals, indices) in enumerate(best_by_sentence):
            candidates = ((total, *divmod(index, vocabulary)) for total, index in zip(totals, indices, strict=True))
            chosen = search.advance(candidates)
            first_row = sentence * hypotheses_per_sentence
            continued += [(total, first_row + hypothesis, token) for total, hypothesis, token in chosen]
            still_live += [search] if chosen else []
        live = still_live
        if live:
            totals, rows, tokens = (list(column) for column in zip(*continued, strict=True))
            decoder.reorder(rows)
            tokens_N, totals_N = torch.tensor(tokens, device=device), sums_NV.new_tensor(totals)
