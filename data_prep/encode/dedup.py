"""Find exact duplicates over a whole language or pair in bounded memory; the first one in input order is kept.

Texts are duplicates when they have the same normal form (`Vocabulary.normal_forms`): the model reads them alike. While
a block is encoded, a paragraph (or pair) that occurred earlier in the block is dropped at once, and `BlockHashes` notes
the others: a 64-bit hash (BLAKE2b) of each, sorted. When a language is encoded, the hashes of its blocks are merged,
one slice of their range at a time: of equal hashes all but the first are duplicates. Then blocks with duplicates are
rewritten.

Among n paragraphs, n²/2^65 are expected to be lost to equal hashes of unequal texts: 0.1 of two billion.

    <block>.noted.npy                         a record a paragraph, in order: tokens, characters, bytes, document
    <block>.hash.npy, <block>.position.npy    hash and position of each paragraph, sorted by hash
    <slice>.found.npy                         positions of duplicates, block by block
    <slice>.ends.npy                          where the positions of each block end
"""

from collections.abc import Sequence
from hashlib import blake2b
from itertools import compress
from pathlib import Path

import numpy as np

from data_prep.store import new_file
from xlme_ds.data.schema import Shard

_SLICE = 4_000_000  # hashes to merge at once, about 300 MB of memory
_NOTED = np.dtype([("tokens", "<u4"), ("characters", "<u4"), ("bytes", "<u4"), ("document", "<u4")])


class BlockHashes:
    """Hashes of the paragraphs (or pairs) of one block; for each batch of it call `repeated`, then `note`."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self._batch: list[bytes] = []
        self._hashes: list[bytes] = []
        self._noted: list[np.ndarray] = []

    def repeated(self, forms: Sequence[Sequence[bytes]], candidates: np.ndarray) -> np.ndarray:
        """Whether each paragraph or pair (normal forms by side) is one of `candidates` and occurred earlier in the
        block."""
        is_repeated = np.zeros(len(candidates), bool)
        self._batch = [b""] * len(candidates)
        for i in np.flatnonzero(candidates).tolist():
            digest = blake2b(b"\n".join([side[i] for side in forms]), digest_size=8).digest()
            is_repeated[i] = digest in self._seen
            self._seen.add(digest)
            self._batch[i] = digest
        return is_repeated

    def note(
        self, written: np.ndarray, texts: Sequence[Sequence[str]], tokens: np.ndarray, documents: np.ndarray
    ) -> None:
        """Note the paragraphs or pairs of the batch that are `written` (bool for each of the batch).

        The other arguments have an entry for each written one: `texts` by side, numbers of `tokens`, and `documents`,
        its record in the shard.
        """
        noted = np.zeros(len(tokens), _NOTED)
        noted["tokens"], noted["document"] = tokens, documents
        for side in texts:
            noted["characters"] += np.fromiter(map(len, side), np.uint32, len(side))
            noted["bytes"] += np.fromiter((len(text.encode()) for text in side), np.uint32, len(side))
        self._hashes += compress(self._batch, written)
        self._noted.append(noted)

    @property
    def paragraphs(self) -> int:
        """Number of paragraphs or pairs that were noted."""
        return len(self._hashes)

    def save(self, path: Path, root: Path) -> tuple[Shard, ...]:
        """Write the block's files next to `path`; returns them, with names relative to `root`."""
        noted = np.concatenate([np.zeros(0, _NOTED), *self._noted])
        hashes = np.frombuffer(b"".join(self._hashes), "<u8")
        assert len(noted) == len(hashes)
        order = np.argsort(hashes, kind="stable")
        return (
            _save(path.with_suffix(".noted.npy"), noted, root),
            _save(path.with_suffix(".hash.npy"), hashes[order], root),
            _save(path.with_suffix(".position.npy"), order.astype("<u4"), root),
        )


def number_of_slices(paragraphs: int) -> int:
    """Number of slices in which the hashes of this many paragraphs are merged."""
    return max(1, -(-paragraphs // _SLICE))


def find_duplicates(blocks: Sequence[Path], number: int, total: int, out: Path, root: Path) -> tuple[Shard, ...]:
    """Write the duplicates of slice `number` of `total`: all but the first of equal hashes, over all blocks in
    order."""
    lowest, highest = np.uint64(number * 2**64 // total), np.uint64((number + 1) * 2**64 // total - 1)
    hashes, positions = [np.zeros(0, "<u8")], [np.zeros(0, "<u4")]
    for block in blocks:
        all_hashes = _load(block.with_suffix(".hash.npy"))
        part = slice(np.searchsorted(all_hashes, lowest), np.searchsorted(all_hashes, highest, side="right"))
        hashes.append(np.array(all_hashes[part]))
        positions.append(np.array(_load(block.with_suffix(".position.npy"))[part]))
    block_of = np.repeat(np.arange(len(blocks), dtype=np.uint32), [len(part) for part in hashes[1:]])
    position = np.concatenate(positions)
    is_duplicate = np.ones(len(position), bool)
    # np.unique finds the first of each hash, which is kept: a block has it once, and the blocks are in input order
    is_duplicate[np.unique(np.concatenate(hashes), return_index=True)[1]] = False
    block_of, position = block_of[is_duplicate], position[is_duplicate]
    ends = np.searchsorted(block_of, np.arange(len(blocks)), side="right")
    return _save(out.with_suffix(".ends.npy"), ends, root), _save(out.with_suffix(".found.npy"), position, root)


def duplicates_of(block: int, slices: Sequence[Path]) -> np.ndarray:
    """Read the positions, int64, of the duplicates in one block from all slices."""
    positions = [np.zeros(0, np.int64)]
    for path in slices:
        ends = _load(path.with_suffix(".ends.npy"))
        begin = ends[block - 1] if block else 0
        positions.append(_load(path.with_suffix(".found.npy"))[begin : ends[block]].astype(np.int64))
    return np.concatenate(positions)


def load_notes(block: Path) -> np.ndarray:
    """Load the notes on a block, a record a paragraph: tokens, characters, bytes, document."""
    return np.array(_load(block.with_suffix(".noted.npy")))


def _save(path: Path, values: np.ndarray, root: Path) -> Shard:
    with new_file(path, flush=False) as file:  # removed when the stage is finished
        np.save(file, values)
    return file.shard(path, root)


def _load(path: Path) -> np.ndarray:
    try:
        values: np.ndarray = np.load(path, mmap_mode="r" if path.stat().st_size > 1 << 16 else None)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is damaged ({error}): delete it and give the same command again") from None
    return values
