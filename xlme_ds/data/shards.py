"""Random access to the rows of a mixed data folder, each compared with a checksum; counts of tokens.

Rows are read from a shard where its index says (`row_index.py`), each time with their checksums. A shard of an older
version has no index: it is read whole into memory and compared with the manifest's SHA-256 when it is first needed. So
no byte that changes on the disk, before or after, gets into a batch, and a file that is cut short cannot end the
process as it would under a memory map.
"""

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numba.types import boolean, int32, int64

from ..io.errors import refuse
from .compiled import compiled, reads
from .row_index import SUFFIX, IndexedShard
from .rows import PAD, UNK, Rows
from .schema import Manifest, read_manifest, record_batches, row_schema

_OPEN = 2  # shards that are held in memory
_INDEXED = 16  # shards that are open


class _Block(NamedTuple):
    """The columns of one record batch, as arrays without a copy."""

    tokens: np.ndarray  # int32 [N, T]
    items: np.ndarray  # where each row's items begin in `lengths`, and the end, [N + 1]
    lengths: np.ndarray
    sides: np.ndarray  # the same for `languages`
    languages: np.ndarray

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> "_Block":
        tokens, lengths, languages = batch.columns
        arrays = tokens.flatten(), lengths.offsets, lengths.values, languages.offsets, languages.values
        flat, *lists = (array.to_numpy(zero_copy_only=True) for array in arrays)
        return cls(flat.reshape(-1, tokens.type.list_size), *lists)

    def rows(self, start: int, stop: int) -> Rows:
        lengths = self.lengths[self.items[start] : self.items[stop]].astype(np.int64)
        languages = self.languages[self.sides[start] : self.sides[stop]].astype(np.int64)
        items = (self.items[start + 1 : stop + 1] - self.items[start:stop]).astype(np.int64)
        return Rows(self.tokens[start:stop], items, lengths, languages)


class RowStore:
    """One task of a mixed data folder, addressed by record number 0 … rows−1.

    `languages`: codes that the languages of its rows are numbered by; by default the data's own list. `scattered`:
    few rows are read here and there, so the disk shall not read on after them, which is faster where they follow one
    another. Raises ValueError for a folder that holds no rows, or text in another language.
    """

    def __init__(self, folder: Path, languages: Sequence[str] = (), scattered: bool = False):
        self.folder, self._scattered = Path(folder), scattered
        self.manifest: Manifest = read_manifest(self.folder)
        stage = f"{folder} was written by the stage {self.manifest.stage}: name the folder that `data_prep mix` wrote"
        refuse([(self.manifest.stage == "mix", stage)])
        self.row_tokens: int = self.manifest.settings["row_tokens"]
        self.rows = self.manifest.rows
        self.languages = tuple(languages) or self.manifest.languages
        missing = [code for code in self.manifest.languages if code not in self.languages]
        refuse(
            [
                (
                    self.rows > 0 and self.row_tokens > 0 and min(shard.rows for shard in self.manifest.shards) > 0,
                    f"{self.folder / 'manifest.json'} lists a shard without rows: mix the folder again",
                ),
                (
                    not missing,
                    f"{self.folder} has text in {', '.join(missing)}, which model.language_embeddings does not name: "
                    f"set it to {' '.join(self.manifest.languages)}",
                ),
            ]
        )
        self._numbers = np.array([self.languages.index(code) for code in self.manifest.languages])
        self._starts = [0, *accumulate(shard.rows for shard in self.manifest.shards)]
        self._open: dict[int, list[_Block]] = {}
        self._coming: dict[int, Future[list[_Block]]] = {}
        self._indexed: dict[int, IndexedShard | None] = {}
        self._reader = ThreadPoolExecutor(1, f"shards of {self.folder.name}")  # starts its thread with the first work

    def read(self, records: np.ndarray) -> Rows:
        """The rows of `records` (int64), in the order given. Raises ValueError for a damaged shard."""
        jumps = np.flatnonzero(records[1:] - records[:-1] != 1) + 1
        pieces = []
        for first, last in pairwise([0, *jumps.tolist(), len(records)]):
            start = int(records[first])
            stop = start + last - first
            while start < stop:  # consecutive records, cut where a block ends
                pieces.append(self._piece(start, stop))
                start += len(pieces[-1].tokens)
        return joined(pieces)

    def prepare(self, record: int) -> None:
        """Begin to read the shard of `record`, if it has no index and is not there, in a thread: `read` waits for
        it."""
        shard = self._shard_of(record)
        if self._shard(shard) is None and shard not in self._open and shard not in self._coming:
            self._coming[shard] = self._reader.submit(self._read_whole, shard)

    def ahead(self, first: int, last: int) -> None:
        """Tell the system that records `first` to `last` are read next, if they lie in one shard with an index: it
        fetches them meanwhile. A shard that cannot be read is an error when `read` needs it, for a run may end before.
        """
        shard = self._shard_of(first)
        with suppress(OSError, ValueError):
            indexed = self._shard(shard) if first <= last and shard == self._shard_of(last) else None
            if indexed is not None:
                indexed.ahead(first - self._starts[shard], last + 1 - self._starts[shard])

    def _shard_of(self, record: int) -> int:
        return bisect_right(self._starts, record) - 1

    def _piece(self, start: int, stop: int) -> Rows:
        """Records `start` … `stop` − 1, or as many of them as are in the block of the first."""
        shard = self._shard_of(start)
        indexed = self._shard(shard)
        if indexed is not None:
            with self._said(shard):
                first = start - self._starts[shard]
                rows = _rows_of(*indexed.read(first, min(first + stop - start, self.manifest.shards[shard].rows)))
        else:
            blocks = self._blocks(shard)
            # All blocks but the last of a shard are of one size.
            number, first = divmod(start - self._starts[shard], len(blocks[0].tokens))
            block = blocks[number]
            rows = block.rows(first, min(first + stop - start, len(block.tokens)))
        if not _possible(*rows, self.manifest.vocabulary_size, len(self.manifest.languages)):
            raise ValueError(
                f"{self._path(shard)} has ids or lengths that no row can have, near row {start - self._starts[shard]}: "
                f"mix {self.folder} again"
            )
        return rows._replace(languages=self._numbers[rows.languages])

    def _path(self, shard: int) -> Path:
        return self.folder / self.manifest.shards[shard].name

    def _shard(self, number: int) -> IndexedShard | None:
        """The shard, to be read by its index; None where it has none."""
        if number not in self._indexed:
            path, listed = self._path(number), self.manifest.shards[number]
            known = None
            if path.with_suffix(SUFFIX).exists():
                with self._said(number):
                    identity = listed.rows, self.row_tokens, listed.bytes, listed.sha256
                    known = IndexedShard(path, *identity, self._scattered)
            while len(self._indexed) >= _INDEXED:
                self._indexed.pop(next(iter(self._indexed)))
            self._indexed[number] = known
        return self._indexed[number]

    @contextmanager
    def _said(self, shard: int) -> Iterator[None]:
        """What is wrong with a shard, in one sentence."""
        try:
            yield
        except (OSError, ValueError, StopIteration, struct.error, pa.ArrowException) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ValueError(
                f"{self._path(shard)} cannot be read ({why}): check the folder with `python -m data_prep verify`, "
                "restore the file or mix again"
            ) from None

    def _blocks(self, shard: int) -> list[_Block]:
        if shard not in self._open:
            coming = self._coming.pop(shard, None)
            self._coming.clear()
            blocks = self._read_whole(shard) if coming is None else coming.result()
            following = (shard + 1) % len(self.manifest.shards)
            if shard - 1 in self._open and following not in self._open:  # reading in order: the next one meanwhile
                self._coming[following] = self._reader.submit(self._read_whole, following)
            if len(self._open) >= _OPEN:  # the oldest is no longer needed
                self._open.pop(next(iter(self._open)))
            self._open[shard] = blocks
        return self._open[shard]

    def _read_whole(self, shard: int) -> list[_Block]:
        path, listed = self._path(shard), self.manifest.shards[shard]
        with self._said(shard):
            content = path.read_bytes() if path.stat().st_size == listed.bytes else b""
            if len(content) != listed.bytes or hashlib.sha256(content).hexdigest() != listed.sha256:
                raise ValueError("it is not the file that the manifest lists, its bytes changed")
            batches = record_batches(content, row_schema(self.row_tokens))
            if sum(batch.num_rows for batch in batches) != listed.rows:
                raise ValueError("its row count is not the manifest's")
            if len({batch.num_rows for batch in batches[:-1]}) > 1 or batches[-1].num_rows > batches[0].num_rows:
                raise ValueError("its record batches have different sizes")
            return [_Block.of(batch) for batch in batches]


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
            found = np.bincount(tokens[tokens > UNK], minlength=len(counts))
            counts += share * most / rows * found
    return -np.log(counts / counts.sum())


def joined(pieces: Sequence[Rows]) -> Rows:
    """The rows of all pieces, one after the other."""
    if len(pieces) == 1:
        return pieces[0]
    return Rows(*map(np.concatenate, zip(*pieces, strict=True)))
