"""The monolingual rows of a mixed data folder, apart by language, and what is known of them without a model."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..data.schema import TASKS, UNK, Rows, joined
from ..data.shards import RowStore, unigram_costs
from ..data.vocabulary import Vocabulary

MONO = TASKS.index("mono")

Costs = dict[str, tuple[float, int]]
"""By language: mean −log p (nats) of the predicted tokens, and how many they were."""


class Text(NamedTuple):
    """Rows of one language with their record numbers, in pieces."""

    rows: list[Rows]
    records: list[int]


def open_text(folder: Path, languages: Sequence[str] = ()) -> RowStore:
    """The monolingual rows of a mixed data folder; `languages`: see `RowStore`. Raises ValueError where there are
    none."""
    if not (folder / TASKS[MONO]).is_dir():
        raise ValueError(
            f"{folder} has no {TASKS[MONO]}/: name a data folder that `data_prep mix` wrote, with monolingual rows"
        )
    return RowStore(folder / TASKS[MONO], languages)


def by_language(store: RowStore, limit: int | None = None, most: int = 16) -> Iterator[tuple[str, Rows, np.ndarray]]:
    """(language, up to `most` of its rows, their record numbers), the first `limit` rows of every language, in one
    pass."""
    pending: dict[int, Text] = defaultdict(lambda: Text([], []))
    left: dict[int, int] = defaultdict(lambda: store.rows if limit is None else limit)
    codes = store.languages
    for record in range(store.rows):
        rows = store.read(np.array([record]))
        language = int(rows.languages[0])
        if left[language] == 0:
            continue
        left[language] -= 1
        text = pending[language]
        text.rows.append(rows)
        text.records.append(record)
        if len(text.records) == most:
            yield codes[language], joined(text.rows), np.array(text.records)
            del pending[language]
    for language, text in pending.items():
        yield codes[language], joined(text.rows), np.array(text.records)


class Facts(NamedTuple):
    """What the rows of a language are, whatever the model."""

    rows: int
    tokens_per_character: float
    """Ordinary tokens over the characters of their pieces, a space counting as one."""


def facts(store: RowStore, vocabulary: Vocabulary, limit: int | None = None) -> dict[str, Facts]:
    """The facts of every language. Raises ValueError for one without a token to predict, which a mean would leave
    out."""
    characters = np.array([len(vocabulary.piece(token)) for token in range(vocabulary.size)])
    sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(3, np.int64))
    for language, rows, _ in by_language(store, limit):
        tokens = rows.tokens[rows.tokens > UNK]
        sums[language] += len(rows.tokens), len(tokens), characters[tokens].sum()
    if bare := sorted(code for code, (_, tokens, _) in sums.items() if not tokens):
        raise ValueError(
            f"{store.folder} has no token of {', '.join(bare)} that the vocabulary knows{' in the first rows' if limit else ''}: "
            "mix without it, or with a vocabulary that has its script"
        )
    return {code: Facts(int(rows), tokens / letters) for code, (rows, tokens, letters) in sorted(sums.items())}


def counted_costs(train: RowStore, store: RowStore, limit: int | None = None) -> Costs:
    """What a unigram model costs that was counted on the rows of `train`, of all languages together, by language of
    `store`.

    Raises ValueError when the two have different vocabularies.
    """
    if train.manifest.vocabulary_sha256 != store.manifest.vocabulary_sha256:
        raise ValueError(
            f"{train.folder} was encoded with another vocabulary than {store.folder}: name the data of the run"
        )
    costs_V = unigram_costs(train)
    totals: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
    for language, rows, _ in by_language(store, limit):
        tokens = rows.tokens[rows.tokens > UNK]
        totals[language] += costs_V[tokens].sum(), len(tokens)
    return means(totals)


def means(totals: Mapping[str, np.ndarray]) -> Costs:
    """Costs from (sum, count) by language; a language without predicted tokens is left out."""
    return {
        language: (float(total / count), int(count)) for language, (total, count) in sorted(totals.items()) if count
    }
