"""Files that are complete or absent after a crash of the program (with `flush`, also of the machine): atomic writes,
JSON files with a checksum, checksums of files."""

import errno
import hashlib
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import IO, Any

FORMAT_VERSION = 1  # value of the key `format` in our JSON files; readers accept no other
TEMPORARY = re.compile(r"\..+\.\d+\.tmp")  # names of the temporary files of `atomic_write`
_LONE_CR = re.compile(rb"\r(?!\n|$)")
_CHECKSUM_KEY = "sha256"


@contextmanager
def atomic_write(path: Path, flush: bool = True) -> Iterator[IO[bytes]]:
    """Yield a binary file with a temporary name. When the block ends, the file is flushed to the disk, unless `flush`
    is false, and renamed to `path`.

    After an error, such as a full disk, `path` is unchanged. An OSError then names `path`. A crash of the machine may
    undo the rename until `fsync` is called on the folder. Files that a manifest lists need that call. The marker of a
    finished task does not need it: if the marker is lost, only this task runs again.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with errors_naming(path), open(temporary, "wb") as file:
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
def errors_naming(path: Path) -> Iterator[None]:
    """Add the name `path` to an OSError in the block: Python names no file in errors of reads and writes."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def fsync(*paths: Path) -> None:
    """Flush the content of files, and the names in folders, to the disk (fsync), so that no crash loses them."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: the file system has no fsync of folders
                raise
        finally:
            os.close(descriptor)


def write_text(path: Path, text: str, flush: bool = True) -> None:
    """Write a text file under a temporary name, then rename: a reader sees the old file or the new one."""
    with atomic_write(path, flush) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any, flush: bool = True) -> None:
    """Write `value` as JSON, in the way of `write_text`."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n", flush)


def write_versioned(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object: `value` and the key `format`."""
    write_json(path, {"format": FORMAT_VERSION, **value})


def read_versioned(path: Path) -> dict[str, Any]:
    """The `value` that `write_versioned` wrote. Raises ValueError in one sentence for any other content."""
    value: dict[str, Any] = read_json(path, dict)
    file_format = value.pop("format", None)
    if file_format != FORMAT_VERSION:
        raise ValueError(f"{path} has format {file_format}, this version reads {FORMAT_VERSION}: make it again")
    return value


def read_optional(path: Path) -> dict[str, Any]:
    """What `read_versioned` returns; empty if there is no file."""
    return read_versioned(path) if path.exists() else {}


def write_checksummed(path: Path, value: Mapping[str, Any], context: str = "", flush: bool = True) -> None:
    """Write a JSON object: `value`, the key `format`, and a checksum of both and of `context`. `context` is hashed but
    not stored: a reader must give the same one."""
    content = {"format": FORMAT_VERSION, **value}
    write_json(path, content | {_CHECKSUM_KEY: _checksum(content, context)}, flush)


def read_checksummed(path: Path, context: str = "") -> dict[str, Any]:
    """The `value` that `write_checksummed` wrote. Raises ValueError if the file is damaged, has another format, or was
    written with another `context`; the message does not name the file."""
    try:
        value = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it holds no object")
    if value.pop(_CHECKSUM_KEY, None) != _checksum(value, context):
        raise ValueError("its content does not match its checksum")
    if (file_format := value.pop("format", None)) != FORMAT_VERSION:
        raise ValueError(f"it has format {file_format}, this version reads {FORMAT_VERSION}")
    return value


def _checksum(value: Mapping[str, Any], context: str) -> str:
    return hashlib.sha256(json.dumps([context, value], sort_keys=True).encode()).hexdigest()


def read_json(path: Path, kind: type) -> Any:
    """The value of a JSON file. Raises ValueError in one sentence if the file is not JSON, or if the value is not of
    type `kind`."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=partial(_dict_of_unique, path))
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


def _dict_of_unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The (name, value) `pairs` as a dict. Raises ValueError for a repeated name; `json` would keep its last value."""
    names = Counter(name for name, _ in pairs)
    if len(names) < len(pairs):
        raise ValueError(f"{path} has {max(names, key=names.__getitem__)} twice in one object: remove one")
    return dict(pairs)


def real_path(path: Path) -> Path:
    """The absolute path without links. In a loop of links, where `Path.resolve` raises RuntimeError, the loop remains,
    and opening the path raises OSError."""
    return Path(os.path.realpath(path))


def require_writable_file(path: Path, option: str) -> None:
    """Raise ValueError, which begins with `option`, if `path` cannot be written as a file: its folder is missing or
    read-only, or `path` is a folder, or a link, device or pipe, which an atomic write would replace."""
    folder = path.absolute().parent
    if other_file := next((parent for parent in (folder, *folder.parents) if parent.is_file()), None):
        raise ValueError(f"{option} {path} is in {other_file}, which is a file: name a file in a folder")
    if not folder.is_dir():
        raise ValueError(f"{option} {path} is in no folder that exists: make {folder} first")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{option} {path} is in a folder that cannot be written: name a file in another folder")
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder: name a file in it")
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError(f"{option} {path} is no regular file: name another")


def refuse_carriage_returns(data: bytes, name: object) -> None:
    """Raise ValueError if more lines of a text end in a lone carriage return than in a line feed: our readers end lines
    at line feeds only, and would read the text as one line."""
    if len(_LONE_CR.findall(data)) > data.count(b"\n"):
        raise ValueError(f"{name} ends its lines by carriage returns alone: end them by line feeds")


def visible_paths(folder: Path, pattern: str = "*") -> list[Path]:
    """The sorted paths of files and folders below `folder` whose names fit `pattern`. Hidden ones (whose names start
    with a dot), and all that hidden folders contain, are left out. A link to a folder is followed, unless it leads to a
    folder that contains the link."""
    found: list[Path] = []
    # folder to visit -> the real paths of the folders from `folder` down to this folder, itself included
    real_paths: dict[str, tuple[Path, ...]] = {str(folder): (real_path(folder),)}
    for parent, folders, files in os.walk(folder, followlinks=True):
        passed = real_paths.pop(parent)
        real = {name: real_path(Path(parent, name)) for name in folders if name[0] != "."}
        # os.walk visits only the folders that stay in this list.
        folders[:] = [name for name in real if not any(path.is_relative_to(real[name]) for path in passed)]
        real_paths |= {os.path.join(parent, name): (*passed, real[name]) for name in folders}
        found += [Path(parent, name) for name in (*folders, *files) if name[0] != "." and fnmatchcase(name, pattern)]
    return sorted(found)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file in hexadecimal digits."""
    with errors_naming(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
