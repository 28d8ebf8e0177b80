"""Corpus files wherever `pyarrow.fs` reaches: a local path, or a URI such as s3://, gs://, hdfs:// or file://."""

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
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

    @cached_property
    def size(self) -> int:
        """Bytes."""
        if "://" not in self.folder:
            return Path(str(self)).stat().st_size
        system, root = filesystem(self.folder)
        return int(system.get_file_info(f"{root}/{self.name}").size)

    @property
    def pipe(self) -> bool:
        """Whether it is a named pipe: read once, and of no known size."""
        return "://" not in self.folder and Path(str(self)).is_fifo()

    def open(self) -> Any:
        """The file's bytes as a seekable binary file."""
        if "://" not in self.folder:
            return open(str(self), "rb")
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
    """The files (and named pipes) of a folder by name, in its subfolders too if `deep`; none whose name starts with a dot.

    Raises ValueError when it is no folder.
    """
    system, root = filesystem(folder)
    try:
        infos = system.get_file_info(fs.FileSelector(root, recursive=deep))
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError) or "not a directory" in str(error).lower():
            raise ValueError(f"{folder} is not a folder: name the one that holds the corpus files") from None
        raise ValueError(f"{folder} cannot be listed ({error}): check the name and your access to it") from None
    names = [
        info.path[len(root) :].lstrip("/") for info in infos if info.type in (fs.FileType.File, fs.FileType.Unknown)
    ]
    return [Place(folder, name) for name in sorted(names) if not Path(name).name.startswith(".")]
