"""Read lines of UTF-8 text files. Errors name the damaged file and, if one line is at fault, that line."""

from collections.abc import Sequence
from pathlib import Path

from ..io.files import refuse_carriage_returns


def split_lines(data: bytes, name: object) -> list[str]:
    """The lines of UTF-8 text, without LF or CR LF. Raises ValueError, which names the file `name`, for empty text, for
    lines that mostly end in CR alone, and for another encoding."""
    if not data:
        raise ValueError(f"{name} is empty: fetch it again")
    refuse_carriage_returns(data, name)
    try:
        text = data.decode("utf-8-sig")  # drops the byte order mark that some editors write before the text
    except UnicodeDecodeError as error:
        line_number = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{name} line {line_number} is not UTF-8 ({error.reason}): convert the file, or fetch it again"
        ) from None
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def read_sentence_pairs(first_path: Path, second_path: Path) -> tuple[list[str], list[str]]:
    """The lines of two files, in which line n of one translates line n of the other. Raises ValueError for files with
    different numbers of lines, for an empty line, and for a damaged or missing file."""
    first, second = _read_sentences(first_path), _read_sentences(second_path)
    require_same_length(first, first_path, second, second_path)
    return first, second


def _read_sentences(path: Path) -> list[str]:
    try:
        lines = split_lines(path.read_bytes(), path)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): a test needs one file for each of its two languages"
        ) from None
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            raise ValueError(f"{path} line {line_number} is empty instead of a sentence: fetch the file again")
    return lines


def require_same_length(
    first: Sequence[object], first_name: object, second: Sequence[object], second_name: object
) -> None:
    """Raise ValueError, which names both files, if they have different numbers of lines."""
    if len(first) != len(second):
        raise ValueError(
            f"{first_name} has {len(first)} lines but {second_name} has {len(second)}, so line n does not translate "
            "line n: fetch both again"
        )
