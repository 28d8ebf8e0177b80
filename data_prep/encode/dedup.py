"""Finds exact duplicates in the inputs of a language or pair that have the filter `exact_duplicates`, in bounded
memory. Of equal texts, the first in input order is kept.

Texts are duplicates if they have the same normal form (`Vocabulary.normalise`), because the model reads them alike.

1. While a block is encoded, a paragraph (or pair) that repeats an earlier one of the block is dropped. `BlockHashes`
   stores a 64-bit hash (BLAKE2b) and the lengths of each paragraph that is kept.
2. After all blocks of a language are encoded, their hashes are merged, one slice of the range of hashes at a time
   (`find_duplicates`): of paragraphs with equal hashes, all but the first are duplicates.
3. Blocks with duplicates are written again without them (remove_duplicates.py).

Of n different paragraphs, about n²/2^65 are lost because their hash is another paragraph's by chance: 0.1 paragraphs
for n = 2 billion.

    <block>.lengths.npy       for each paragraph in order: its tokens, characters, bytes, and the index of its document
    <block>.hash.npy          the hashes of the paragraphs, sorted
    <block>.position.npy      the paragraphs' positions in the block, in the order of <block>.hash.npy
    <slice>.duplicates.npy    positions of the duplicates whose hash is in the slice, block by block
    <slice>.ends.npy          for each block, where its positions end in <slice>.duplicates.npy
"""

from collections.abc import Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.store import new_file

_SLICE_HASHES = 4_000_000  # hashes of a slice, which are merged at once, in about 300 MB of memory
_LENGTHS = np.dtype([("tokens", "<u4"), ("characters", "<u4"), ("bytes", "<u4"), ("document", "<u4")])


class BlockHashes:
    """The hashes and lengths of one block's paragraphs (or pairs) that are written."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self.hashes: list[bytes] = []  # of all paragraphs or pairs that `add` has stored
        self._lengths: list[np.ndarray] = []

    def find_repeats(self, forms: Sequence[Sequence[bytes]], candidates: np.ndarray) -> tuple[np.ndarray, list[bytes]]:
        """Find paragraphs or pairs that repeat an earlier one of the block, in this batch or an earlier batch.

        `forms[side][i]` is the normal form of one side of paragraph or pair i, and `candidates` (bool [paragraphs]) is
        True for those to check. Returns (repeated, hashes): `repeated` (bool [paragraphs]) is True where a candidate
        repeats an earlier one, and `hashes` has each candidate's hash, b"" elsewhere. The hashes are remembered for
        later batches.
        """
        is_repeated = np.zeros(len(candidates), bool)
        hashes = [b""] * len(candidates)
        for i in np.flatnonzero(candidates).tolist():
            hashes[i] = blake2b(b"\n".join([side[i] for side in forms]), digest_size=8).digest()
            is_repeated[i] = hashes[i] in self._seen
            self._seen.add(hashes[i])
        return is_repeated, hashes

    def add(
        self,
        hashes: Sequence[bytes],
        tokens: np.ndarray,
        characters: np.ndarray,
        sizes: np.ndarray,
        documents: np.ndarray,
    ) -> None:
        """Store the `hashes` (from `find_repeats`) and lengths of written paragraphs or pairs: for each, its numbers of
        tokens, of characters and of bytes (`sizes`), and the index of its record in the shard (`documents`)."""
        self.hashes += hashes
        self._lengths.append(np.rec.fromarrays([tokens, characters, sizes, documents], _LENGTHS))

    def save(self, path: Path, root: Path) -> list[dict[str, Any]]:
        """Write the block's three files next to `path`. Returns the files' entries for a marker, with names relative to
        `root`."""
        lengths = np.concatenate([np.zeros(0, _LENGTHS), *self._lengths])
        hashes = np.frombuffer(b"".join(self.hashes), "<u8")
        order = np.argsort(hashes, kind="stable")
        return [
            _save(path.with_suffix(".lengths.npy"), lengths, root),
            _save(path.with_suffix(".hash.npy"), hashes[order], root),
            _save(path.with_suffix(".position.npy"), order.astype("<u4"), root),
        ]


def number_of_slices(paragraphs: int) -> int:
    """Number of slices in which the hashes of this many paragraphs are merged."""
    return max(1, -(-paragraphs // _SLICE_HASHES))


def find_duplicates(
    blocks: Sequence[Path], slice_number: int, slice_count: int, out: Path, root: Path
) -> dict[str, Any]:
    """Find the duplicates in all `blocks` whose hashes are in slice `slice_number` (from 0) of `slice_count`, and write
    their positions. Returns the task's result."""
    lowest = np.uint64(slice_number * 2**64 // slice_count)
    highest = np.uint64((slice_number + 1) * 2**64 // slice_count - 1)  # inclusive: 2**64 is no uint64
    hash_parts, position_parts = [np.zeros(0, "<u8")], [np.zeros(0, "<u4")]  # np.concatenate needs an array
    for block in blocks:
        all_hashes = np.load(block.with_suffix(".hash.npy"), mmap_mode="r")
        in_slice = slice(np.searchsorted(all_hashes, lowest), np.searchsorted(all_hashes, highest, side="right"))
        hash_parts.append(np.array(all_hashes[in_slice]))
        all_positions = np.load(block.with_suffix(".position.npy"), mmap_mode="r")
        position_parts.append(np.array(all_positions[in_slice]))
    block_of = np.repeat(np.arange(len(blocks), dtype=np.uint32), [len(part) for part in hash_parts[1:]])
    positions = np.concatenate(position_parts)
    is_duplicate = np.ones(len(positions), bool)
    # np.unique gives the first index of each hash: its first occurrence in the input, because the blocks are in input
    # order and no block has a hash twice.
    is_duplicate[np.unique(np.concatenate(hash_parts), return_index=True)[1]] = False
    ends = np.cumsum(np.bincount(block_of[is_duplicate], minlength=len(blocks)))
    files = [
        _save(out.with_suffix(".ends.npy"), ends, root),
        _save(out.with_suffix(".duplicates.npy"), positions[is_duplicate], root),
    ]
    return {"files": files}


def load_duplicates(block_number: int, slices: Sequence[Path]) -> np.ndarray:
    """Read the positions of the duplicates in block `block_number` from all `slices`: uint32 [duplicates]."""
    positions = [np.zeros(0, "<u4")]  # np.concatenate needs an array
    for path in slices:
        ends = np.load(path.with_suffix(".ends.npy"), mmap_mode="r")
        begin = ends[block_number - 1] if block_number else 0
        duplicates = np.load(path.with_suffix(".duplicates.npy"), mmap_mode="r")
        positions.append(duplicates[begin : ends[block_number]])
    return np.concatenate(positions)


def _save(path: Path, values: np.ndarray, root: Path) -> dict[str, Any]:
    """Write an array; returns the file's entry for a marker."""
    with new_file(path, flush=False) as file:  # no flush: these files live only until the stage is finished
        np.save(file, values)
    return asdict(file.shard(path, root))
