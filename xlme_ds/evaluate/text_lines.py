"""Read lines of UTF-8 text files; a damaged file raises an error that names the line."""

import codecs
from collections.abc import Sequence
from pathlib import Path

from ..io.files import require_line_feeds


def split_lines(data: bytes, name: object) -> list[str]:
    """The lines of UTF-8 text without their ends. Raises ValueError for an empty file, for lines that end without line
    feeds, and for text in another encoding, naming the line."""
    if not data:
        raise ValueError(f"{name} is empty: fetch it again")
    require_line_feeds(data, name)
    data = data.removeprefix(codecs.BOM_UTF8)  # some editors write it first, it is no part of the text
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{name} line {number} is not UTF-8 ({error.reason}): convert or fetch the file") from None
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def read_sentence_pairs(our_path: Path, their_path: Path) -> tuple[list[str], list[str]]:
    """The lines of two files where line n translates line n; an empty line is an error, too."""
    sides = []
    for path in (our_path, their_path):
        try:
            sides.append(split_lines(path.read_bytes(), path))
        except OSError as error:
            raise ValueError(
                f"{path} cannot be read ({error.strerror}): a test has a file for each of two languages"
            ) from None
        for n, line in enumerate(sides[-1], start=1):
            if not line.strip():
                raise ValueError(f"{path} line {n} is empty: every line must be a sentence, fetch the file again")
    require_same_length(sides[0], our_path, sides[1], their_path)
    return sides[0], sides[1]


def require_same_length(ours: Sequence[object], our_name: object, theirs: Sequence[object], their_name: object) -> None:
    """Raise ValueError where two sides have different numbers of lines."""
    if len(ours) != len(theirs):
        raise ValueError(
            f"{our_name} has {len(ours)} lines but {their_name} has {len(theirs)}: "
            "line n must translate line n, fetch both again"
        )
