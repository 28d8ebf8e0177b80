"""Random access to the rows of a mixed data folder.

Each shard has an index: where its data are in the Arrow file, and a checksum of every group of four rows. So a process
reads only the groups that it uses, and checks them each time: no byte that changed on the disk gets into a batch. A
file that was truncated raises an error, while a memory map of it would kill the process. The file NAME.index contains:

    64 bytes   header: "XLMEROWS"; version, rows, ids of a row, rows of a group, rows of a record batch, record batches
               (uint32 each); SHA-256 of the shard
    40 bytes   for every record batch, as int64: where these begin in the Arrow file: its tokens, the list offsets and
               then the values of its lengths, the list offsets and then the values of its languages
    4 bytes    CRC-32 of the bytes before
    8 bytes    for every group, as uint64: its checksum. A group is inside one record batch; the batch's last group may
               have fewer rows

Numbers are little-endian. The checksum h of a group begins at 0. These numbers change it, row by row: the ids, the
number of lengths, the lengths, the number of languages, the languages. For every number n, as an unsigned integer of 32
bits, h = (h xor n) · 0x9E3779B97F4A7C15 mod 2⁶⁴, then h = h xor (h >> 32). Both steps are bijections of h, so a change
of a single number always changes the checksum.
"""

import os
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, pairwise, product
from pathlib import Path

import numpy as np
import pyarrow as pa
from numba import njit
from numba.types import boolean, int16, int32, int64, uint64

from .compiled import HALF, LOW, Array, compiled, readonly
from .rows import PAD, Rows
from .schema import Manifest, Shard, read_manifest

_MAX_OPEN_SHARDS = 16
ROWS_PER_CHECKSUM = 4  # number of rows that share a checksum
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # for the checksum
INDEX_SUFFIX = ".index"
_HEADER = struct.Struct("<8s6I32s")
_MAGIC, _VERSION = b"XLMEROWS", 1
_OFFSETS = 5  # offsets in the index for each record batch


def group_checksums(batch: pa.RecordBatch) -> np.ndarray:
    """The checksum of each group of a record batch, uint64."""
    tokens, lengths, languages = batch.columns
    lists = []
    for column in (lengths, languages):
        offsets = column.offsets.to_numpy()
        lists += [offsets - offsets[0], column.values.to_numpy()[offsets[0] : offsets[-1]]]
    return _checksums(tokens.flatten().to_numpy(), tokens.type.list_size, ROWS_PER_CHECKSUM, *lists)


@njit(inline="always")
def _mix(check: np.uint64, number: int) -> np.uint64:
    check = (check ^ (np.uint64(number) & LOW)) * _MULTIPLIER
    return check ^ (check >> HALF)


@compiled(
    uint64[::1](readonly(int32), int64, int64, readonly(int32), readonly(int16), readonly(int32), readonly(int16))
)
def _checksums(
    tokens: Array, width: int, group_rows: int, item_at: Array, lengths: Array, side_at: Array, languages: Array
) -> Array:
    """The checksum of every `group_rows` consecutive rows, uint64. Row n has `tokens` from n · width to (n + 1) · width
    − 1, `lengths` from item_at[n] to item_at[n + 1] − 1, and `languages` from side_at[n] to side_at[n + 1] − 1."""
    rows = len(item_at) - 1
    checks = np.empty((rows + group_rows - 1) // group_rows, dtype=np.uint64)
    for index in range(len(checks)):
        check = np.uint64(0)
        for row in range(index * group_rows, min(rows, (index + 1) * group_rows)):
            for token in tokens[row * width : (row + 1) * width]:
                check = _mix(check, token)
            check = _mix(check, item_at[row + 1] - item_at[row])
            for length in lengths[item_at[row] : item_at[row + 1]]:
                check = _mix(check, length)
            check = _mix(check, side_at[row + 1] - side_at[row])
            for language in languages[side_at[row] : side_at[row + 1]]:
                check = _mix(check, language)
        checks[index] = check
    return checks


def index_bytes(path: Path, sha256: str, checks: Sequence[np.ndarray]) -> bytes:
    """The content of the index file of the shard at `path`. `checks`: the `group_checksums` of each record batch."""
    with pa.memory_map(str(path)) as mapped:
        start, reader = mapped.read_buffer().address, pa.ipc.open_file(mapped)
        batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
        offsets = np.array([_addresses(batch) for batch in batches], dtype="<i8").reshape(-1, _OFFSETS) - start
        row_counts, width = [batch.num_rows for batch in batches], reader.schema.field("tokens").type.list_size
    batch_rows = row_counts[0] if row_counts else 0  # every batch but the last has this number of rows
    sizes = sum(row_counts), width, ROWS_PER_CHECKSUM, batch_rows, len(row_counts)
    head = _HEADER.pack(_MAGIC, _VERSION, *sizes, bytes.fromhex(sha256)) + offsets.tobytes()
    return head + struct.pack("<I", zlib.crc32(head)) + b"".join(batch.astype("<u8").tobytes() for batch in checks)


def _addresses(batch: pa.RecordBatch) -> list[int]:
    """The memory addresses of the batch's data, in the order of the index's offsets."""
    tokens, *lists = batch.columns
    buffers = [tokens.flatten().buffers()[1]]
    for column in lists:
        buffers += [column.buffers()[1], column.buffers()[3]]
    return [buffer.address for buffer in buffers]


class IndexedShard:
    """Reads rows of a shard, and compares them with the checksums in its index. Raises ValueError or OSError if a file
    cannot be read, or differs from the expected file."""

    def __init__(self, path: Path, listed: Shard, row_tokens: int, scattered: bool):
        """`listed`: the shard in the manifest. `scattered`: reads skip rows, so the system should not read ahead."""
        self.row_tokens = row_tokens
        if not path.with_suffix(INDEX_SUFFIX).exists():
            raise ValueError(f"its index {path.with_suffix(INDEX_SUFFIX).name} does not exist")
        with open(path.with_suffix(INDEX_SUFFIX), "rb") as file:
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                raise ValueError("its index is cut off")
            *magic_and_version, count, width, self._group_rows, self._batch_rows, batches, digest = _HEADER.unpack(
                header
            )
            expected = listed.rows, row_tokens, listed.sha256
            is_other = magic_and_version != [_MAGIC, _VERSION] or (count, width, digest.hex()) != expected
            if is_other or batches > count:  # `batches` bounds the memory of the next read
                raise ValueError("its index belongs to another file than the manifest lists")
            offsets = file.read(8 * _OFFSETS * batches)
            if zlib.crc32(header + offsets).to_bytes(4, "little") != file.read(4):
                raise ValueError("its index changed since it was written")
            self._checks_at = file.tell()
        self._rows, self._offsets = listed.rows, np.frombuffer(offsets, "<i8").reshape(-1, _OFFSETS)
        if min(self._group_rows, self._batch_rows) < 1 or len(self._offsets) != -(-self._rows // self._batch_rows):
            raise ValueError("its index does not have all its rows")
        if ((self._offsets < 0) | (self._offsets > listed.bytes)).any():
            raise ValueError("its index has offsets that are not in the file")
        if path.stat().st_size != listed.bytes:
            raise ValueError("it is not the file that the manifest lists: its size changed")
        self._file = os.open(path, os.O_RDONLY)
        self._index = os.open(path.with_suffix(INDEX_SUFFIX), os.O_RDONLY)
        for descriptor in (self._file, self._index) if scattered else ():
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead

    def __del__(self) -> None:
        for descriptor in (getattr(self, "_file", None), getattr(self, "_index", None)):
            if descriptor is not None:
                os.close(descriptor)

    def prefetch(self, first: int, stop: int) -> None:
        """Ask the system to fetch the ids of rows `first` … `stop` − 1, which are read next. If the range ends in the
        next record batch, some ids of this next batch may not be fetched, which only makes reading them slower."""
        batch, row = divmod(first, self._batch_rows)
        row_bytes = 4 * self.row_tokens
        at = int(self._offsets[batch][0]) + row * row_bytes
        os.posix_fadvise(self._file, at, (stop - first) * row_bytes, os.POSIX_FADV_WILLNEED)

    def read(self, first: int, stop: int) -> Rows:
        """Rows `first` … `stop` − 1, but none after the record batch of row `first`."""
        batch, wanted_begin = divmod(first, self._batch_rows)
        rows_before = batch * self._batch_rows
        count = min(self._batch_rows, self._rows - rows_before)
        # From here on, rows are counted from the start of the record batch. Rows `wanted_begin` … `wanted_end` − 1 are
        # returned. Rows `begin` … `end` − 1 are read: complete groups, so that their checksums can be compared.
        wanted_end = min(stop - rows_before, count)
        begin = wanted_begin // self._group_rows * self._group_rows
        end = min(-(-wanted_end // self._group_rows) * self._group_rows, count)
        tokens_at, *lists_at = self._offsets[batch].tolist()
        row_bytes = 4 * self.row_tokens
        tokens = self._array(self._file, np.int32, (end - begin) * self.row_tokens, tokens_at + begin * row_bytes)
        lists: list[np.ndarray] = []  # offsets and values of the lengths, then of the languages
        for offsets_at, values_at in zip(lists_at[::2], lists_at[1::2], strict=True):
            offsets = self._array(self._file, np.int32, end - begin + 1, offsets_at + 4 * begin)
            # An item has at least one token and at most two languages, so a list has at most two values per token.
            if offsets[0] < 0 or (np.diff(offsets) < 0).any() or offsets[-1] - offsets[0] > 2 * tokens.size:
                raise ValueError("it is not the file that the manifest lists: its bytes changed")
            values = self._array(self._file, np.int16, offsets[-1] - offsets[0], values_at + 2 * int(offsets[0]))
            lists += [offsets - offsets[0], values]
        groups = range(begin // self._group_rows, -(-end // self._group_rows))
        groups_before = batch * -(-self._batch_rows // self._group_rows) + groups.start
        checks = self._array(self._index, np.uint64, len(groups), self._checks_at + 8 * groups_before)
        if (_checksums(tokens, self.row_tokens, self._group_rows, *lists) != checks).any():
            raise ValueError("its bytes changed since its index was written")
        low, high = wanted_begin - begin, wanted_end - begin  # the wanted rows' indices among the rows that were read
        item_offsets, lengths, side_offsets, languages = lists
        return Rows(
            tokens.reshape(-1, self.row_tokens)[low:high],
            np.diff(item_offsets[low : high + 1]).astype(np.int64),
            lengths[item_offsets[low] : item_offsets[high]].astype(np.int64),
            languages[side_offsets[low] : side_offsets[high]].astype(np.int64),
        )

    @staticmethod
    def _array(file: int, dtype: type, count: int, at: int) -> np.ndarray:
        """`count` numbers of an open file, from byte `at` on."""
        size = int(count) * np.dtype(dtype).itemsize
        content = os.pread(file, size, at)
        if len(content) != size:
            raise ValueError("it became shorter while it was read")
        return np.frombuffer(content, dtype)


class RowStore:
    """The rows of one task of a mixed data folder: records 0 … `rows` − 1.

    `languages`: the codes that the language indices of the rows refer to; by default the manifest's codes. `scattered`:
    whether reads skip rows, so that the system should not read ahead. Raises ValueError for a folder without rows, or
    with text in a language that is not among `languages`.
    """

    def __init__(self, folder: Path, languages: Sequence[str] = (), scattered: bool = False):
        self.folder, self._scattered = Path(folder), scattered
        self.manifest: Manifest = read_manifest(self.folder)
        if self.manifest.stage != "mix":
            raise ValueError(
                f"{folder} was written by the stage {self.manifest.stage}: name the folder that `xlme prep mix` wrote"
            )
        self.row_tokens: int = self.manifest.settings["row_tokens"]
        self.rows = self.manifest.rows
        self.languages = tuple(languages) or self.manifest.languages
        missing = [code for code in self.languages_of_text() if code not in self.languages]
        if not (self.rows and self.row_tokens and all(shard.rows for shard in self.manifest.shards)):
            raise ValueError(f"{self.folder / 'manifest.json'} lists a shard without rows: mix the folder again")
        if missing:
            raise ValueError(
                f"{self.folder} has text in {', '.join(missing)}, which model.language_embeddings does not name: "
                f"set model.language_embeddings to {' '.join((*self.languages, *missing))}, or take a model that has "
                "these languages"
            )
        # For each index into the manifest's languages, the index of that language in `self.languages`; -1 for a
        # language that only the other task's rows have.
        index_of = {code: index for index, code in enumerate(self.languages)}
        self._language_indices = np.array([index_of.get(code, -1) for code in self.manifest.languages])
        self._starts = [0, *accumulate(shard.rows for shard in self.manifest.shards)]  # first record of each shard
        self._open_shards: dict[int, IndexedShard] = {}  # by index in the manifest, in the order of opening

    def languages_of_text(self) -> list[str]:
        """The codes of the languages in which the rows have text; all of the manifest's if it has no counts."""
        counts, codes = self.manifest.counts["by_language"], self.manifest.languages
        used = {name for name, count in counts.items() if count.get("used", 1)}
        used_pairs = [pair for pair in product(codes, codes) if "-".join(pair) in used]
        used = used.union(*used_pairs)
        return [code for code in codes if not counts or code in used]

    def read(self, records: np.ndarray) -> Rows:
        """The rows of `records` (int64), in the order given. Raises ValueError for a damaged shard."""
        jumps = np.flatnonzero(records[1:] - records[:-1] != 1) + 1
        pieces = []
        for begin, end in pairwise([0, *jumps.tolist(), len(records)]):  # runs of consecutive records
            start = int(records[begin])
            stop = start + end - begin
            while start < stop:
                pieces.append(self._piece(start, stop))
                start += len(pieces[-1].tokens)
        return concatenated(pieces)

    def prefetch(self, first: int, last: int) -> None:
        """Ask the system to fetch records `first` to `last`, which are read next, if they are in one shard. An
        unreadable shard is an error only in `read`: the run may end before it needs the shard."""
        shard = self._shard_of(first)
        if first <= last and shard == self._shard_of(last):
            with suppress(ValueError, OSError):
                self._opened(shard).prefetch(first - self._starts[shard], last + 1 - self._starts[shard])

    def _shard_of(self, record: int) -> int:
        return bisect_right(self._starts, record) - 1

    def _piece(self, start: int, stop: int) -> Rows:
        """Records `start` … `stop` − 1, but none after the record batch of record `start`."""
        shard = self._shard_of(start)
        first = start - self._starts[shard]
        opened = self._opened(shard)
        with self._naming_shard(shard):
            rows = opened.read(first, min(first + stop - start, self.manifest.shards[shard].rows))
        if not _is_valid(*rows, self.manifest.vocabulary_size, len(self.manifest.languages)):
            raise ValueError(
                f"{self._path(shard)} has ids or lengths that no row can have, near row {first}: mix {self.folder} "
                "again"
            )
        return rows._replace(languages=self._language_indices[rows.languages])

    def _path(self, shard: int) -> Path:
        return self.folder / self.manifest.shards[shard].name

    def _opened(self, shard: int) -> IndexedShard:
        """The shard, opened if it is not open yet. If too many shards are open, the shard opened first is closed."""
        if shard not in self._open_shards:
            listed = self.manifest.shards[shard]
            with self._naming_shard(shard):
                opened = IndexedShard(self._path(shard), listed, self.row_tokens, self._scattered)
            while len(self._open_shards) >= _MAX_OPEN_SHARDS:
                self._open_shards.pop(next(iter(self._open_shards)))
            self._open_shards[shard] = opened
        return self._open_shards[shard]

    @contextmanager
    def _naming_shard(self, shard: int) -> Iterator[None]:
        """Turn an error of the `with` block into a ValueError that names the shard."""
        try:
            yield
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ValueError(
                f"{self._path(shard)} cannot be read ({why}): check the folder with `xlme prep verify`, then "
                "restore the file or mix again"
            ) from None


@compiled(boolean(readonly(int32, 2), readonly(int64), readonly(int64), readonly(int64), int64, int64))
def _is_valid(
    tokens_BT: Array, item_counts_B: Array, lengths: Array, languages: Array, vocabulary: int, language_count: int
) -> bool:
    """Whether all ids, lengths and language indices of the rows are possible. The checksums do not tell, because
    another program may have written wrong rows with right checksums."""
    batch, width = tokens_BT.shape
    item, ok = 0, True
    for row in range(batch):
        tokens_T, used = tokens_BT[row], 0
        for length in lengths[item : item + item_counts_B[row]]:
            ok &= length > 0
            used += length
        ok &= (item_counts_B[row] > 0) & (used <= width)
        for column in range(width):
            token = tokens_T[column]
            ok &= (token >= 0) & (token < vocabulary) & ((token == PAD) == (column >= used))
        item += item_counts_B[row]
    for language in languages:
        ok &= (language >= 0) & (language < language_count)
    return ok


def concatenated(pieces: Sequence[Rows]) -> Rows:
    """The rows of all `pieces`, in order."""
    if len(pieces) == 1:
        return pieces[0]
    return Rows(*map(np.concatenate, zip(*pieces, strict=True)))
