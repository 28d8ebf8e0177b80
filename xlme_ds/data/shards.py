"""Random access to the rows of a mixed data folder; counts of tokens.

Rows are read from a shard where its index says (`row_index.py`) and compared with their checksums at every reading. So
no byte that changes on the disk gets into a batch, and a file that is cut short cannot end the process, as it would
under a memory map.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
from numba.types import boolean, int32, int64

from .compiled import compiled, reads
from .row_index import IndexedShard
from .rows import PAD, UNK, Rows
from .schema import Manifest, read_manifest

_MOST_OPEN = 16  # shards


class RowStore:
    """One task of a mixed data folder, addressed by record number 0 … rows−1.

    `languages`: the codes that number the languages of its rows; by default the data's own list. `scattered`: the rows
    that are read do not follow one another, so the system reads none after them. Raises ValueError for a folder that
    holds no rows, or text in another language.
    """

    def __init__(self, folder: Path, languages: Sequence[str] = (), scattered: bool = False):
        self.folder, self._scattered = Path(folder), scattered
        self.manifest: Manifest = read_manifest(self.folder)
        if self.manifest.stage != "mix":
            raise ValueError(
                f"{folder} was written by the stage {self.manifest.stage}: name the folder that `data_prep mix` wrote"
            )
        self.row_tokens: int = self.manifest.settings["row_tokens"]
        self.rows = self.manifest.rows
        self.languages = tuple(languages) or self.manifest.languages
        missing = [code for code in self.manifest.languages if code not in self.languages]
        if not (self.rows and self.row_tokens and all(shard.rows for shard in self.manifest.shards)):
            raise ValueError(f"{self.folder / 'manifest.json'} lists a shard without rows: mix the folder again")
        if missing:
            raise ValueError(
                f"{self.folder} has text in {', '.join(missing)}, which model.language_embeddings does not name: "
                f"set it to {' '.join(self.manifest.languages)}"
            )
        self._numbers = np.array([self.languages.index(code) for code in self.manifest.languages])
        self._starts = [0, *accumulate(shard.rows for shard in self.manifest.shards)]
        self._open: dict[int, IndexedShard] = {}  # by their number

    def read(self, records: np.ndarray) -> Rows:
        """The rows of `records` (int64), in the order given. Raises ValueError for a damaged shard."""
        jumps = np.flatnonzero(records[1:] - records[:-1] != 1) + 1
        pieces = []
        for first, last in pairwise([0, *jumps.tolist(), len(records)]):
            start = int(records[first])
            stop = start + last - first
            while start < stop:  # consecutive records, cut where a record batch ends
                pieces.append(self._piece(start, stop))
                start += len(pieces[-1].tokens)
        return joined(pieces)

    def ahead(self, first: int, last: int) -> None:
        """Have the system fetch records `first` to `last`, which are read next, if they lie in one shard. A shard that
        cannot be read is an error only when `read` needs it, for a run may end before."""
        number = self._shard_of(first)
        if first <= last and number == self._shard_of(last):
            with suppress(ValueError, OSError):
                self._shard(number).ahead(first - self._starts[number], last + 1 - self._starts[number])

    def _shard_of(self, record: int) -> int:
        return bisect_right(self._starts, record) - 1

    def _piece(self, start: int, stop: int) -> Rows:
        """Records `start` … `stop` − 1, or those of them that are in the record batch of the first."""
        number = self._shard_of(start)
        first = start - self._starts[number]
        shard = self._shard(number)
        with self._naming_shard(number):
            rows = _rows_of(*shard.read(first, min(first + stop - start, self.manifest.shards[number].rows)))
        if not _possible(*rows, self.manifest.vocabulary_size, len(self.manifest.languages)):
            raise ValueError(
                f"{self._path(number)} has ids or lengths that no row can have, near row {first}: mix {self.folder} "
                "again"
            )
        return rows._replace(languages=self._numbers[rows.languages])

    def _path(self, shard: int) -> Path:
        return self.folder / self.manifest.shards[shard].name

    def _shard(self, number: int) -> IndexedShard:
        """The shard, opened if it is not open yet."""
        if number not in self._open:
            listed = self.manifest.shards[number]
            with self._naming_shard(number):
                identity = listed.rows, self.row_tokens, listed.bytes, listed.sha256
                shard = IndexedShard(self._path(number), *identity, self._scattered)
            while len(self._open) >= _MOST_OPEN:
                self._open.pop(next(iter(self._open)))
            self._open[number] = shard
        return self._open[number]

    @contextmanager
    def _naming_shard(self, number: int) -> Iterator[None]:
        """Raise an error of reading a shard as a ValueError that names it."""
        try:
            yield
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ValueError(
                f"{self._path(number)} cannot be read ({why}): check the folder with `python -m data_prep verify`, "
                "restore the file or mix again"
            ) from None


def _rows_of(tokens: np.ndarray, lists: Sequence[tuple[np.ndarray, np.ndarray]]) -> Rows:
    (item_offsets, lengths), (_, languages) = lists
    return Rows(tokens, np.diff(item_offsets).astype(np.int64), lengths.astype(np.int64), languages.astype(np.int64))


@compiled(boolean(reads(int32, 2), reads(int64), reads(int64), reads(int64), int64, int64))
def _possible(
    tokens_BT: np.ndarray, items_B: np.ndarray, lengths: np.ndarray, languages: np.ndarray, vocabulary: int, codes: int
) -> bool:
    """Whether a model can read the rows: data that others made may hold anything under a right checksum."""
    batch, width = tokens_BT.shape
    item, ok = 0, True
    for row in range(batch):
        tokens_T, used = tokens_BT[row], 0
        for length in lengths[item : item + items_B[row]]:
            ok &= length > 0
            used += length
        ok &= (items_B[row] > 0) & (used <= width)
        for column in range(width):
            token = tokens_T[column]
            ok &= (token >= 0) & (token < vocabulary) & ((token == PAD) == (column >= used))
        item += items_B[row]
    for language in languages:
        ok &= (language >= 0) & (language < codes)
    return ok


def unigram_costs(train: RowStore | Mapping[RowStore, float], train_rows: int = 65_536) -> np.ndarray:
    """−log p (nats) of every id in a unigram model, float64 [V]: one plus the count in ordinary tokens of the first
    `train_rows` rows; of several with their shares, the mean of their counts, as if of equally many rows."""
    shares = {train: 1.0} if isinstance(train, RowStore) else train
    most = min(train_rows, max(store.rows for store in shares))
    counts = np.ones(next(iter(shares)).manifest.vocabulary_size)
    for store, share in shares.items():
        rows = min(train_rows, store.rows)
        for start in range(0, rows, 1024):
            tokens = store.read(np.arange(start, min(start + 1024, rows))).tokens
            occurrences = np.bincount(tokens[tokens > UNK], minlength=len(counts))
            counts += share * most / rows * occurrences
    return -np.log(counts / counts.sum())


def joined(pieces: Sequence[Rows]) -> Rows:
    """The rows of all pieces, one after the other."""
    if len(pieces) == 1:
        return pieces[0]
    return Rows(*map(np.concatenate, zip(*pieces, strict=True)))
