"""Finds lines of a test set in training data, by their token ids."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..cli import note
from ..data.collate import collate
from ..data.rows import EOS, PAD, TASKS, UNK
from ..data.shards import RowStore
from ..data.vocabulary import Vocabulary

_ROWS_PER_READ = 4096
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # base of the hash: odd, 2^64 / golden ratio


def seen_lines(
    folders: Sequence[Path], sides: Sequence[Sequence[np.ndarray]], vocabulary: Vocabulary
) -> list[set[int]]:
    """For each of `sides`, the lines of a test set as token ids: the indices of the lines that also occur in `folders`
    as one side of a pair or as a sentence. `xlme prep mix` wrote the folders; all their rows are read.

    Raises ValueError for rows of another vocabulary, and for a folder without pairs and without sentences.
    """
    lines_of_hash: list[dict[int, list[int]]] = [{} for _ in sides]
    for side, numbers in zip(sides, lines_of_hash, strict=True):
        for number, line in enumerate(side):
            numbers.setdefault(_hash(line), []).append(number)
    all_hashes = np.array(sorted(set().union(*lines_of_hash)), dtype=np.uint64)
    seen_numbers: list[set[int]] = [set() for _ in sides]
    for tokens, starts, ends in (texts for folder in folders for texts in _texts(folder, vocabulary)):
        hashes = _hashes(tokens, starts, ends)
        for at in np.flatnonzero(np.isin(hashes, all_hashes)):
            line = tokens[starts[at] : ends[at]]
            for side, numbers, seen_of_side in zip(sides, lines_of_hash, seen_numbers, strict=True):
                candidates = numbers.get(int(hashes[at]), ())
                seen_of_side.update(n for n in candidates if np.array_equal(side[n], line))
    return seen_numbers


def _texts(folder: Path, vocabulary: Vocabulary) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield, for `_ROWS_PER_READ` rows at a time: token ids without `<s>`, `</s>` and `<pad>`, and the start and end in
    them of each text (one side of a pair, or a sentence)."""
    stores = [(task, RowStore(folder / name)) for task, name in enumerate(TASKS) if (folder / name).is_dir()]
    # Monolingual rows that were mixed without --sentences: their items are not single lines.
    unsplit = [store for task, store in stores if TASKS[task] == "mono" and store.manifest.packed != "sentences"]
    stores = [(task, store) for task, store in stores if store not in unsplit]
    if not stores:
        raise ValueError(
            f"{folder} has neither pairs nor rows of mix --sentences, in which lines could be found: name the "
            "data of translation"
        )
    for store in unsplit:
        note(f"{store.folder} was mixed without --sentences: lines were not looked for in its {store.rows} rows")
    for task, store in stores:
        if store.manifest.vocabulary_sha256 != vocabulary.sha256:
            raise ValueError(f"{store.folder} was encoded with another vocabulary than the model's: name its own data")
        for first in range(0, store.rows, _ROWS_PER_READ):
            numbers = np.arange(first, min(first + _ROWS_PER_READ, store.rows))
            batch = collate([(task, store.read(numbers), numbers)], 0, 1.0)
            tokens = batch.tokens_BT.numpy().ravel()
            text = (batch.segments_BT * 2 + batch.sides_BT).numpy()  # each token's text, by its number in the row
            text = (text + np.arange(len(text))[:, None] * (text.max() + 1)).ravel()  # by its number in the batch
            in_a_text = (tokens >= UNK) & (tokens != PAD) & (tokens != EOS)
            tokens, text = tokens[in_a_text], text[in_a_text]
            starts = np.flatnonzero(np.append(True, text[1:] != text[:-1]))
            yield tokens, starts, np.append(starts[1:], len(tokens))


def _hashes(tokens: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """A polynomial hash, modulo 2^64, of each `tokens[start:end]`."""
    positions = np.arange(len(tokens)) - np.repeat(starts, ends - starts)  # of each token in its text
    powers = np.cumprod(np.full(int((ends - starts).max()), _FACTOR))
    return np.add.reduceat((tokens + 1).astype(np.uint64) * powers[positions], starts)


def _hash(line: np.ndarray) -> int:
    return int(_hashes(line, np.array([0]), np.array([len(line)]))[0]) if len(line) else 0
