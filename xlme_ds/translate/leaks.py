"""Finds the lines of a test set that occur in training data with the same token ids."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..cli import note
from ..data.rows import TASKS
from ..data.shards import RowStore
from ..data.vocabulary import Vocabulary

_ROWS_PER_READ = 4096


def seen_lines(
    folders: Sequence[Path], sides: Sequence[Sequence[np.ndarray]], vocabulary: Vocabulary
) -> list[set[int]]:
    """Find the lines of a test set that also occur in training data, as one side of a pair or as a sentence.

    `sides` has the lines of each side of the test set as token ids, int32. `folders` are data folders that `xlme prep
    mix` wrote; their rows of pairs and of sentences are read. Returns for each side the set of the indices of the lines
    that occur. Raises ValueError for rows of another vocabulary, and for a folder without pairs and without sentences.
    """
    keys_of_sides = [[line.tobytes() for line in side] for side in sides]
    texts = (text for folder in folders for text in _texts(folder, vocabulary))
    seen = set[bytes]().union(*keys_of_sides).intersection(texts)
    return [{index for index, key in enumerate(keys) if key in seen} for keys in keys_of_sides]


def _texts(folder: Path, vocabulary: Vocabulary) -> Iterator[bytes]:
    """Yield the int32 ids of every text in the rows of a folder; `_ROWS_PER_READ` rows are read at a time. A text is
    one side of a pair, or a sentence."""
    all_stores = [RowStore(folder / task) for task in TASKS if (folder / task).is_dir()]
    # Monolingual rows that were mixed without --sentences do not hold single lines.
    unsplit = [s for s in all_stores if s.folder.name == "mono" and s.manifest.packed_unit != "sentences"]
    stores = [store for store in all_stores if store not in unsplit]
    if not stores:
        raise ValueError(
            f"{folder} has neither pairs nor rows that were mixed with --sentences, in which lines could be found: "
            "name data that a translation model is trained on"
        )
    for store in unsplit:
        note(f"{store.folder} was mixed without --sentences: lines were not looked for in its {store.rows} rows")
    for store in stores:
        if store.manifest.vocabulary_sha256 != vocabulary.sha256:
            raise ValueError(
                f"{store.folder} was encoded with another vocabulary than the model's: name the data that the model "
                "was trained on"
            )
        for first in range(0, store.rows, _ROWS_PER_READ):
            row_numbers = np.arange(first, min(first + _ROWS_PER_READ, store.rows))
            yield from (text.tobytes() for text in store.read(row_numbers).texts())
