"""Find corpus files wherever `pyarrow.fs` reaches, and read their bytes as blocks or lines in bounded memory.

A file has a local path or a URI such as s3://, gs://, hdfs:// or file://. It may be plain, compressed or a zip file.
Only LF ends a line. No byte of a compressed file is skipped: each is data, or padding that the format allows. A damaged
or truncated file raises a ValueError that names the file, the last line read and, except in a zip file, the byte where
the damage was found.
"""

import errno
import lzma
import os
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from data_prep.readers.decompress import CHUNK, ENDINGS, decompressed
from data_prep.store import is_unfinished
from xlme_ds.io.files import real_path

MAX_LINE = 100_000  # bytes: readers cut a longer line of a document, and drop a pair with a longer line
MAX_ROW = 500_000  # bytes: a longer row of a table is dropped. Rows also hold the URLs of pages
MAX_EXCESS = 1_000_000  # bytes by which a block may exceed its wanted size, in order to end at a boundary
_READ_ERRORS = (EOFError, OSError, lzma.LZMAError, zlib.error, zipfile.BadZipFile, pa.ArrowException)


@dataclass(frozen=True)
class CorpusPath:
    """The file `name` in `folder`. `name` may begin with subfolders; `folder` is a local path or a URI. The object
    holds no connection, so it can be pickled."""

    folder: str
    name: str

    def __str__(self) -> str:
        return f"{self.folder.rstrip('/')}/{self.name}"

    @property
    def local_path(self) -> Path | None:
        """The file's path on the local file system; None on a remote one."""
        system, root = filesystem(self.folder)
        return Path(root) / self.name if isinstance(system, fs.LocalFileSystem) else None

    @cached_property
    def size(self) -> int:
        """The file's size in bytes. Raises ValueError if it is neither a file nor a named pipe."""
        if self.local_path is None:
            system, root = filesystem(self.folder)
            info = system.get_file_info(f"{root}/{self.name}")
            if info.type != fs.FileType.File:
                raise ValueError(f"{self} is a folder or does not exist: remove the folder, or restore the file")
            return int(info.size)
        try:
            size = self.local_path.stat().st_size
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP) or not self.local_path.is_symlink():
                raise
            raise ValueError(
                f"{self} is a link to {os.readlink(self.local_path)}, where no file is: restore that file, or remove "
                "the link"
            ) from None
        if not (self.local_path.is_file() or self.is_pipe):
            kind = "a folder" if self.is_folder else "a socket or device"
            raise ValueError(f"{self} is {kind}, where a file must be: remove it, or give it another name")
        return size

    @property
    def is_folder(self) -> bool:
        """Whether this is a folder: `list_folder` lists folders too."""
        system, root = filesystem(self.folder)
        return bool(system.get_file_info(f"{root}/{self.name}").type == fs.FileType.Directory)

    @property
    def is_pipe(self) -> bool:
        """Whether this is a named pipe, which can be read only once and has no known size."""
        return self.local_path is not None and self.local_path.is_fifo()

    def open(self) -> Any:
        """Open the file for reading bytes. The result is seekable, unless it is a named pipe."""
        if self.local_path is not None:
            return open(self.local_path, "rb")
        system, root = filesystem(self.folder)
        return system.open_input_file(f"{root}/{self.name}")


@cache
def filesystem(folder: str) -> tuple[fs.FileSystem, str]:
    """Returns (the file system of `folder`, the folder's path in that file system). `folder` is a URI or a local path.
    Raises ValueError if the file system cannot be reached."""
    try:
        system, path = fs.FileSystem.from_uri(folder) if "://" in folder else (fs.LocalFileSystem(), folder)
    except (OSError, ValueError) as error:  # pyarrow's errors are of these types
        raise ValueError(
            f"{folder} cannot be reached ({error}): name a folder, or a URI that pyarrow.fs knows"
        ) from None
    return system, path.rstrip("/") or "/"


def list_folder(folder: str, recursive: bool = False) -> list[CorpusPath]:
    """All entries of a folder and, if `recursive`, of its subfolders, sorted by name. Hidden files and folders, whose
    names begin with a dot, are left out.

    Named pipes, broken links and subfolders are listed too; `CorpusPath.size` raises an error for entries that cannot
    be read. Raises ValueError if `folder` is no folder, or if the stage `minhash` was writing it and did not finish.
    """
    system, root = filesystem(folder)
    is_local = isinstance(system, fs.LocalFileSystem)
    try:
        if is_local:  # Arrow's own listing leaves out broken links
            names = list(_local_names(root, recursive))
        else:
            infos = system.get_file_info(fs.FileSelector(root, recursive=recursive))
            names = [info.path[len(root) :].lstrip("/") for info in infos]
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError) or "not a directory" in str(error).lower():
            raise ValueError(
                f"{folder} is not a folder: name the one that holds the corpus files, named as en.txt"
            ) from None
        raise ValueError(f"{folder} cannot be listed ({error}): check the name and your access to it") from None
    real = real_path(Path(root))
    # Folders that may be the output folder of `minhash`, which writes documents into its subfolder mono/.
    stage_folders = ([real] if recursive else []) + ([real.parent] if real.name == "mono" else [])
    for stage_folder in stage_folders if is_local else ():
        if is_unfinished(stage_folder, "minhash"):
            raise ValueError(
                f"{folder} lacks documents, because minhash did not finish: give the command of {stage_folder} again"
            )
    return [
        CorpusPath(folder, name) for name in sorted(names) if not any(part.startswith(".") for part in Path(name).parts)
    ]


def _local_names(root: str, recursive: bool) -> Iterator[str]:
    """Yield the names in a local folder and, if `recursive`, in its subfolders, relative to the folder. A link to a
    folder is followed, unless it leads to a folder that contains the link: otherwise the walk would never end."""
    # folder to visit -> the real paths of the folders from the root down to this folder, itself included
    real_paths: dict[str, tuple[str, ...]] = {root: (os.path.realpath(root),)}

    def refuse(error: OSError) -> None:
        raise error

    for parent, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        for name in (*folders, *files):
            if any("\udc80" <= character <= "\udcff" for character in name):
                raise ValueError(
                    f"{parent} has the name {os.fsencode(name)!r}, which is not UTF-8: rename that file or folder"
                )
            yield os.path.relpath(os.path.join(parent, name), root)
        passed = real_paths.pop(parent)
        real = {name: os.path.realpath(os.path.join(parent, name)) for name in folders}
        circular = {name for name in folders if any(Path(path).is_relative_to(real[name]) for path in passed)}
        # os.walk visits only the folders that stay in this list.
        folders[:] = [name for name in folders if recursive and name[0] != "." and name not in circular]
        real_paths |= {os.path.join(parent, name): (*passed, real[name]) for name in folders}


def read_decompressed(path: CorpusPath, member: str | None = None) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file, or of a member of a zip file, in pieces.

    Raises ValueError if the file is damaged, OSError if it cannot be read for another reason.
    """
    lines_read = 0
    try:
        for piece in _pieces(path, member):
            yield piece
            lines_read += piece.count(b"\n")
    except _READ_ERRORS as error:
        name = f"{path}:{member}" if member else str(path)
        if isinstance(error, OSError) and is_read_failure(path, error):
            if error.errno is None:
                raise OSError(f"{name} cannot be read after line {lines_read} ({error})") from None
            raise OSError(error.errno, error.strerror, error.filename or name) from None
        advice = "it is truncated or damaged. Fetch it again"
        if "requires too much memory" in str(error):  # part of libzstd's message
            advice = "its window is over 128 MiB. Pack it again without zstd's --long or with --long=27"
        raise ValueError(f"{name} cannot be read after line {lines_read} ({error}): {advice}") from None
    check_unchanged(path)


def check_unchanged(path: CorpusPath) -> None:
    """Raise ValueError for a file whose size changed while it was read."""
    if path.is_pipe:  # has no known size
        return
    now = CorpusPath(path.folder, path.name).size  # of a new CorpusPath, because `path.size` is cached
    if now != path.size:
        raise ValueError(
            f"{path} had {path.size} bytes before it was read, and has {now} after it: give the command again when "
            "nothing writes to it"
        )


def is_read_failure(path: CorpusPath, error: BaseException) -> bool:
    """Whether the disk or a remote file system failed, or access was denied, so that the file may be undamaged. A
    remote file system raises OSError without an `errno`."""
    return getattr(error, "errno", None) is not None or (path.local_path is None and type(error) is OSError)


def _pieces(path: CorpusPath, member: str | None) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file or member. The ending of the file's name gives the format of compression.
    A file of zero bytes is empty text, whatever its ending."""
    if member is not None:
        with path.open() as packed, zipfile.ZipFile(packed) as archive, archive.open(member) as text:
            yield from iter(partial(text.read, CHUNK), b"")
        return
    if path.size == 0 and not path.is_pipe:
        return
    ending = Path(path.name).suffix
    with path.open() as file:
        if ending in ENDINGS:
            yield from decompressed(file, ending)
        else:
            yield from iter(partial(file.read, CHUNK), b"")


def clip_lines(parts: Iterable[bytes], limit: int) -> Iterator[bytes]:
    """Yield the `parts` of a text, and shorten lines over `limit` bytes. Such a line keeps more than `limit` bytes, so
    that readers see that it is too long.

    Only the first line of each part is shortened. So no line keeps more bytes than the larger of `limit` + 1 and the
    length of a part.
    """
    open_bytes = 0  # bytes so far of the line that continues in the next part
    for part in parts:
        end = part.find(b"\n")
        first_line_bytes = len(part) if end < 0 else end
        room = max(limit + 1 - open_bytes, 0)
        yield part if first_line_bytes <= room else part[:room] + part[first_line_bytes:]
        open_bytes = open_bytes + len(part) if end < 0 else len(part) - part.rfind(b"\n") - 1


def cut_blocks(parts: Iterable[bytes], size: int, boundary: re.Pattern[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield (block, is_cut): the bytes of `parts` in blocks that end at the first `boundary` after `size` bytes.

    If the MAX_EXCESS bytes after `size` have no boundary, the block is cut after the last line that ends in them, and
    `is_cut` is true. If no line ends in them, it is cut at the `cut_point` of the bytes after `size`. The blocks depend
    on the bytes alone, not on how they are divided into parts.
    """
    buffer, limit = bytearray(), size + MAX_EXCESS
    for part in chain(parts, [None]):  # None: the text has ended
        buffer += part or b""
        while len(buffer) >= size or (part is None and buffer):
            match = boundary.search(buffer, size - 1, limit)  # a boundary may begin with the last of the `size` bytes
            is_cut = match is None and len(buffer) >= limit
            if match:
                end = match.end()
            elif is_cut:
                end = buffer.rfind(b"\n", size, limit) + 1 or size + cut_point(buffer[size : size + MAX_LINE + 1])
            elif part is None:
                end = len(buffer)
            else:
                break  # the block ends in a later part
            block = bytes(memoryview(buffer)[:end])
            del buffer[:end]
            yield block, is_cut
            del block  # a block is large: its memory is free as soon as the caller also drops it


def split_lines(parts: Iterable[bytes], limit: int) -> Iterator[bytes]:
    """Yield lines without LF. A line over `limit` bytes may lose its end, but keeps more than `limit` bytes. It is
    yielded as soon as it is too long: its end may be gigabytes away."""
    line = bytearray()  # the beginning of a line that continues in the next part; empty if the line is yielded
    is_yielded = False  # whether that line was yielded already, because it is over `limit`
    for part in parts:
        first, *others = part.split(b"\n")
        if not is_yielded:
            line += first
        if others:
            if not is_yielded:
                yield bytes(line)
            *whole_lines, last = others
            yield from whole_lines
            line, is_yielded = bytearray(last), False
        if len(line) > limit:
            yield bytes(line)
            line, is_yielded = bytearray(), True
    if line:
        yield bytes(line)


def cut_line(line: bytes) -> list[bytes]:
    """Cut a line into pieces of at most MAX_LINE bytes, at `cut_point`."""
    pieces = []
    while len(line) > MAX_LINE:
        end = cut_point(line)
        pieces.append(line[:end])
        line = line[end:]
    return [*pieces, line]


def cut_point(line: bytes | bytearray) -> int:
    """The position where a line over MAX_LINE bytes is cut: after the last space or tab in its first MAX_LINE bytes. If
    they have none, the cut is after the last complete character in them."""
    end = max(line.rfind(b" ", 0, MAX_LINE), line.rfind(b"\t", 0, MAX_LINE)) + 1
    # In UTF-8 a byte of the form 10xxxxxx continues a character.
    return end or next((i for i in range(MAX_LINE, MAX_LINE - 4, -1) if line[i] & 0xC0 != 0x80), MAX_LINE)
