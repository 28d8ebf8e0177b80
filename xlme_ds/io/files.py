"""Files that are complete or absent after a crash: atomic writes, JSON files with a checksum, checksums of files."""

import errno
import hashlib
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

FORMAT = 1  # the key `format` of every JSON file that this package writes and reads again; readers take no other
TEMPORARY = re.compile(r"\..+\.\d+\.tmp")  # names that `replacing` gives
_LONE_CR = re.compile(rb"\r(?!\n|$)")
_CHECKSUM = "sha256"  # the key of an object's checksum of itself


@contextmanager
def replacing(path: Path, flush: bool = True) -> Iterator[IO[bytes]]:
    """A binary file with a temporary name, which is renamed to `path` when the block ends. Its bytes are on the disk by
    then, unless `flush` is false.

    After an error, such as a full disk, `path` is as it was before, and the OSError names it. The rename itself reaches
    the disk only with `to_disk` of the folder. Files that a manifest lists need that; a marker does not, as losing one
    costs little work.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path), open(temporary, "wb") as file:
            yield file
            file.flush()
            if flush:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename == str(temporary):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the name `path` to an OSError of a read or write, which Python raises without a file name."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def to_disk(*paths: Path) -> None:
    """Flush the content of files, and the names in folders, to the disk (fsync), so that no crash loses them."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system without fsync of folders
                raise
        finally:
            os.close(descriptor)


def write_text(path: Path, text: str, flush: bool = True) -> None:
    """Write a text file under a temporary name, then rename: a reader sees the old file or the new one."""
    with replacing(path, flush) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any, flush: bool = True) -> None:
    """Write `value` as JSON, as `write_text` writes."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n", flush)


def write_object(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object with the key `format`, the number of our file format."""
    write_json(path, {"format": FORMAT, **value})


def read_object(path: Path) -> dict[str, Any]:
    """The object that `write_object` wrote. Raises ValueError in one sentence for any other content."""
    value: dict[str, Any] = read_json(path, dict)
    number = value.pop("format", None)
    if number != FORMAT:
        raise ValueError(f"{path} has format {number}, this version reads {FORMAT}: make it again")
    return value


def write_signed(path: Path, value: Mapping[str, Any], context: str = "", flush: bool = True) -> None:
    """Write a JSON object with the key `format` and a checksum of the object and of `context`, which the reader must
    know."""
    content = {"format": FORMAT, **value}
    write_json(path, content | {_CHECKSUM: _checksum(content, context)}, flush)


def read_signed(path: Path, context: str = "") -> dict[str, Any]:
    """The object that `write_signed` wrote. Raises ValueError when it is damaged or of another format."""
    try:
        value = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it holds no object")
    if value.pop(_CHECKSUM, None) != _checksum(value, context):
        raise ValueError("it does not have its own checksum, its bytes changed")
    if (number := value.pop("format", None)) != FORMAT:
        raise ValueError(f"it has format {number}, this version reads {FORMAT}")
    return value


def _checksum(value: Mapping[str, Any], context: str) -> str:
    return hashlib.sha256(json.dumps([context, value], sort_keys=True).encode()).hexdigest()


def read_json(path: Path, kind: type) -> Any:
    """The value of a JSON file that holds a `kind`. Raises ValueError in one sentence for any other content."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=partial(_unique, path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} line {error.lineno} is not JSON ({error.msg}): restore or remove the file") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8: restore the file or remove it") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply: restore the file or remove it") from None
    if not isinstance(value, kind):
        raise ValueError(
            f"{path} holds a JSON {type(value).__name__}, not a {kind.__name__}: restore the file or remove it"
        )
    return value


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of `pairs`. Raises ValueError for a name that occurs twice; Python would keep the last value."""
    names = Counter(name for name, _ in pairs)
    if len(names) < len(pairs):
        raise ValueError(f"{path} has {max(names, key=names.__getitem__)} twice in one object: remove one")
    return dict(pairs)


def require_regular(path: Path, option: str) -> None:
    """Raise ValueError if `path` is a link, a device or a pipe: an atomic write would replace it by a file. A folder
    passes, as writing there fails by itself."""
    if os.path.lexists(path) and not (stat.S_ISREG(path.lstat().st_mode) or stat.S_ISDIR(path.lstat().st_mode)):
        raise ValueError(f"{option} {path} is no regular file: name another")


def require_line_feeds(data: bytes, name: object) -> None:
    """Raise ValueError for text whose lines end in carriage returns alone: it would be read as one line."""
    if len(_LONE_CR.findall(data)) > data.count(b"\n"):
        raise ValueError(f"{name} ends its lines by carriage returns alone: end them by line feeds")


def files_below(folder: Path, pattern: str = "*") -> list[Path]:
    """Paths in and below `folder` whose name fits `pattern`, sorted, without hidden ones (a dot at a name's start)."""
    paths = (path for path in folder.rglob(pattern) if path != folder)
    return sorted(path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    with naming(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
