"""Translation pairs kept out of training: packed rows of a data folder, or line-aligned text."""

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..data.schema import EOS, LAYOUTS
from ..data.shards import RowStore
from ..data.vocabulary import Vocabulary
from .text import same_lines, split_lines

PIVOT = "en"


class Pair(NamedTuple):
    """One item of a parallel row: both sides' ids without special tokens, and their language codes."""

    first: np.ndarray
    second: np.ndarray
    first_language: str
    second_language: str


def pairs(store: RowStore, limit: int | None = None) -> Iterator[Pair]:
    """The pairs of the first `limit` rows of a store of the task para (all rows by default)."""
    codes, between = store.languages, len(LAYOUTS[store.manifest.layout].between)
    for start in range(0, min(store.rows, limit or store.rows), 256):
        rows = store.read(np.arange(start, min(start + 256, store.rows, limit or store.rows)))
        item = 0
        lengths = iter(rows.lengths)
        for tokens, items in zip(rows.tokens, rows.items, strict=True):
            at = 0
            for _ in range(items):
                length = int(next(lengths))
                ids = tokens[at : at + length]
                middle = 1 + int(np.flatnonzero(ids[1:] == EOS)[0])
                first, second = rows.languages[2 * item : 2 * item + 2]
                yield Pair(ids[1:middle], ids[middle + between : -1], codes[first], codes[second])
                at += length
                item += 1


def heldout_pairs(folder: Path, vocabulary: Vocabulary) -> Iterator[Pair]:
    """The pairs of a mixed data folder, or of the line-aligned files in `folder`: X.en-de.en with X.en-de.de,
    en-de.txt.zip.

    Raises ValueError on another vocabulary's data, damaged files, and a folder without pairs.
    """
    if (folder / "para").is_dir():
        store = RowStore(folder / "para")
        if store.manifest.vocabulary_sha256 != vocabulary.sha256:
            raise ValueError(
                f"{folder} was encoded with another vocabulary than {vocabulary.path}: name a data folder of the run, or text"
            )
        yield from pairs(store)
    else:
        yield from _text_pairs(folder, vocabulary)


def _text_pairs(folder: Path, vocabulary: Vocabulary) -> Iterator[Pair]:
    found = False
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        zipped = path.name.endswith(".txt.zip")
        stem, _, code = path.name.removesuffix(".txt.zip").rpartition(".")
        language = _other_language(code if zipped else stem.rpartition(".")[2])
        if not language or not (zipped or code in (PIVOT, language)):
            continue
        ours, theirs = (path.with_name(f"{stem}.{side}") for side in (PIVOT, language))
        for side, other in ((ours, theirs), (theirs, ours)):
            if not zipped and not side.exists():
                raise ValueError(f"{other} has no other side: put {side.name} next to it")
        if not zipped and code != PIVOT:
            continue  # read with its English side
        sides = _zipped_sides(path, language) if zipped else [(str(side), side.read_bytes()) for side in (ours, theirs)]
        found = True
        (our_name, our_lines), (their_name, their_lines) = ((name, split_lines(data, name)) for name, data in sides)
        same_lines(our_lines, our_name, their_lines, their_name)
        for a, b in zip(our_lines, their_lines, strict=True):
            if a.strip() and b.strip():  # corpora write a sentence without a translation as an empty line
                yield Pair(vocabulary.encode(a), vocabulary.encode(b), PIVOT, language)
    if not found:
        raise ValueError(
            f"{folder} holds no pairs with {PIVOT}: put X.{PIVOT}-de.{PIVOT} and X.{PIVOT}-de.de or {PIVOT}-de.txt.zip there, "
            "or name a data folder that has para/"
        )


def _other_language(pair: str) -> str:
    """`de` of `en-de` and of `de-en`; nothing of a pair without the pivot."""
    if pair.startswith(f"{PIVOT}-"):
        return pair.removeprefix(f"{PIVOT}-")
    return pair.removesuffix(f"-{PIVOT}") if pair.endswith(f"-{PIVOT}") else ""


def _zipped_sides(path: Path, language: str) -> list[tuple[str, bytes]]:
    try:
        with zipfile.ZipFile(path) as archive:
            sides = []
            for code in (PIVOT, language):
                names = [name for name in archive.namelist() if name.rpartition(".")[2] == code]
                if len(names) != 1:
                    many = f"holds {', '.join(names)}: put each corpus into an archive of its own"
                    raise ValueError(
                        f"{path} {many if names else f'holds no file that ends in .{code}: fetch it again'}"
                    )
                sides.append((f"{path}:{names[0]}", archive.read(names[0])))
            return sides
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is a damaged zip file ({error}): fetch it again") from None
