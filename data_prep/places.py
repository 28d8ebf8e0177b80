"""Corpus files wherever `pyarrow.fs` reaches: a local path, or a URI such as s3://, gs://, hdfs:// or file://."""

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from stat import S_ISDIR, S_ISFIFO, S_ISREG
from typing import Any

from pyarrow import fs


@dataclass(frozen=True)
class Place:
    """A file `name` (it may have folders) in `folder`, a local path or a URI. Pickles, for it holds no connection."""

    folder: str
    name: str

    def __str__(self) -> str:
        return f"{self.folder.rstrip('/')}/{self.name}"

    @property
    def parent(self) -> str:
        """Where the file is."""
        return str(self).rpartition("/")[0]

    @property
    def suffix(self) -> str:
        """The last ending with its dot, `.xz` of `en.txt.xz`; may be empty."""
        return Path(self.name).suffix

    @property
    def local(self) -> Path | None:
        """Its path, where it is on this machine's own file system."""
        system, root = filesystem(self.folder)
        return Path(root) / self.name if isinstance(system, fs.LocalFileSystem) else None

    @cached_property
    def size(self) -> int:
        """Bytes. Raises ValueError when it is neither a file nor a named pipe."""
        if self.local is None:
            system, root = filesystem(self.folder)
            info = system.get_file_info(f"{root}/{self.name}")
            if info.type != fs.FileType.File:
                raise ValueError(
                    f"{self} is a folder or not there, where a file must be: remove it, or restore the file"
                )
            return int(info.size)
        try:
            found = self.local.stat()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP) or not self.local.is_symlink():
                raise
            where = f"a link to {os.readlink(self.local)}"
            raise ValueError(f"{self} is {where}, where no file is: restore that file, or remove the link") from None
        if not (S_ISREG(found.st_mode) or S_ISFIFO(found.st_mode)):
            what = "a folder" if S_ISDIR(found.st_mode) else "a socket or device"
            raise ValueError(f"{self} is {what}, where a file must be: remove it, or give it another name")
        return found.st_size

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder, which may be there for other reasons than to be read."""
        if self.local is not None:
            return self.local.is_dir()
        system, root = filesystem(self.folder)
        return bool(system.get_file_info(f"{root}/{self.name}").type == fs.FileType.Directory)

    @property
    def pipe(self) -> bool:
        """Whether it is a named pipe: read once, and of no known size."""
        return self.local is not None and self.local.is_fifo()

    def open(self) -> Any:
        """The file's bytes as a seekable binary file."""
        if self.local is not None:
            return open(self.local, "rb")
        system, root = filesystem(self.folder)
        return system.open_input_file(f"{root}/{self.name}")


@cache
def filesystem(folder: str) -> tuple[fs.FileSystem, str]:
    """The file system of a URI or path, made once a process, and the folder's path in it. Raises ValueError."""
    try:
        if "://" in folder:
            system, path = fs.FileSystem.from_uri(folder)
        else:
            system, path = fs.LocalFileSystem(), folder
    except (OSError, ValueError) as error:  # pyarrow's errors are of these types
        raise ValueError(
            f"{folder} cannot be reached ({error}): name a folder, or a URI that pyarrow.fs knows"
        ) from None
    return system, path.rstrip("/") or "/"


def files_in(folder: str, deep: bool = False) -> list[Place]:
    """What a folder holds by name, in its subfolders too if `deep`; nothing whose name starts with a dot.

    Named pipes, links that lead nowhere and subfolders too: `Place.size` tells what cannot be read. Raises ValueError
    when it is no folder.
    """
    system, root = filesystem(folder)
    try:
        if isinstance(system, fs.LocalFileSystem):  # Arrow's own listing leaves out links that lead nowhere
            names = list(_local_names(root, deep))
        else:
            infos = system.get_file_info(fs.FileSelector(root, recursive=deep))
            names = [info.path[len(root) :].lstrip("/") for info in infos]
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError) or "not a directory" in str(error).lower():
            raise ValueError(f"{folder} is not a folder: name the one that holds the corpus files") from None
        raise ValueError(f"{folder} cannot be listed ({error}): check the name and your access to it") from None
    return [Place(folder, name) for name in sorted(names) if not Path(name).name.startswith(".")]


def _local_names(root: str, deep: bool) -> Iterator[str]:
    """Names below a local folder; a link to a folder that it is in is not followed."""

    def refuse(error: OSError) -> None:
        raise error

    for parent, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        for name in (*folders, *files):
            if any("\udc80" <= character <= "\udcff" for character in name):
                raise ValueError(
                    f"{parent} has the name {os.fsencode(name)!r}, which is not UTF-8: rename that file or folder"
                )
            yield os.path.relpath(os.path.join(parent, name), root)
        inside = os.path.realpath(parent)
        real = {name: os.path.realpath(os.path.join(parent, name)) for name in folders}
        folders[:] = [name for name in folders if deep and os.path.commonpath([real[name], inside]) != real[name]]
