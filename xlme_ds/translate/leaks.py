"""Finds the lines of a test set that occur in training data with the same token ids."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..cli import note
from ..data.collate import collate
from ..data.rows import TASKS, UNK
from ..data.shards import RowStore
from ..data.vocabulary import Vocabulary

_ROWS_PER_READ = 4096


def seen_lines(
    folders: Sequence[Path], sides: Sequence[Sequence[np.ndarray]], vocabulary: Vocabulary
) -> list[set[int]]:
    """Find the lines of a test set that also occur in training data, as one side of a pair or as a sentence.

    `sides` has the lines of each side of the test set as token ids. `folders` are data folders that `xlme prep mix`
    wrote; their rows of pairs and of sentences are read. Returns for each side the set of the indices of the lines that
    occur. Raises ValueError for rows of another vocabulary, and for a folder without pairs and without sentences.
    """
    keys_of_sides = [[_key(line) for line in side] for side in sides]
    texts = (_key(ids) for folder in folders for ids in _texts(folder, vocabulary))
    seen = set[bytes]().union(*keys_of_sides).intersection(texts)
    return [{index for index, key in enumerate(keys) if key in seen} for keys in keys_of_sides]


def _key(ids: np.ndarray) -> bytes:
    return ids.astype(np.int32).tobytes()


def _texts(folder: Path, vocabulary: Vocabulary) -> Iterator[np.ndarray]:
    """Yield the ids of every text in the rows of a folder; `_ROWS_PER_READ` rows are read at a time. A text is one side
    of a pair or a sentence, without `<s>`, `</s>` and `<pad>`; none is empty."""
    stores = [(task, RowStore(folder / name)) for task, name in enumerate(TASKS) if (folder / name).is_dir()]
    # Monolingual rows that were mixed without --sentences do not hold single lines.
    unsplit = [store for task, store in stores if TASKS[task] == "mono" and store.manifest.packed_unit != "sentences"]
    stores = [(task, store) for task, store in stores if store not in unsplit]
    if not stores:
        raise ValueError(
            f"{folder} has neither pairs nor rows that were mixed with --sentences, in which lines could be found: "
            "name data that a translation model is trained on"
        )
    for store in unsplit:
        note(f"{store.folder} was mixed without --sentences: lines were not looked for in its {store.rows} rows")
    for task, store in stores:
        if store.manifest.vocabulary_sha256 != vocabulary.sha256:
            raise ValueError(
                f"{store.folder} was encoded with another vocabulary than the model's: name the data that the model "
                "was trained on"
            )
        for first in range(0, store.rows, _ROWS_PER_READ):
            row_numbers = np.arange(first, min(first + _ROWS_PER_READ, store.rows))
            batch = collate([(task, store.read(row_numbers), row_numbers)], 0, 1.0)
            # Number the texts: 2 · segment + side is a different number for each text of a row, and with `offset_B`
            # added also for each text of the batch.
            text_in_row_BT = (batch.segments_BT * 2 + batch.sides_BT).numpy()
            offset_B = np.arange(len(text_in_row_BT)) * (text_in_row_BT.max() + 1)
            text_of_token = (text_in_row_BT + offset_B[:, None]).ravel()
            tokens = batch.tokens_BT.numpy().ravel()
            is_in_text = tokens >= UNK  # the ids of `<s>`, `<pad>` and `</s>` are smaller
            tokens, text_of_token = tokens[is_in_text], text_of_token[is_in_text]
            yield from np.split(tokens, np.flatnonzero(np.diff(text_of_token)) + 1)
