"""Folders: locks for one process at a time, folders that are complete or absent after a crash, private caches."""

import errno
import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path

from .files import fsync

LOCK_FILE = ".lock"  # a process that works in a folder locks the folder's file of this name
_SIGNATURE = b"xlme_ds: "  # the start of a lock file that this package wrote
_NO_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # errors of file systems without locks


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, and flush their names to the disk."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        fsync(folder.parent)


def require_folder(folder: Path, advice: str) -> None:
    """Raise ValueError, with `advice`, unless `folder` is a folder."""
    if not folder.is_dir():
        raise ValueError(f"{folder} {'is not a folder' if folder.exists() else 'does not exist'}: {advice}")


def require_writable(folder: Path) -> None:
    """Raise ValueError unless `folder` can be written, or made if it does not exist."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ValueError(f"{nearest} is a file, not a folder: choose another output folder")
    if not os.access(nearest, os.W_OK):
        raise ValueError(f"{nearest} cannot be written: choose another output folder")


def require_new(folder: Path) -> None:
    """Raise ValueError if `folder` exists already, or cannot be made."""
    if os.path.lexists(folder):
        raise ValueError(f"{folder} exists already: choose another output folder")
    require_writable(folder)


def is_locked(folder: Path) -> bool:
    """Whether a process holds the lock of `folder`. This makes no lock file."""
    try:
        with open(folder / LOCK_FILE, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # there is no lock file, or it cannot be locked
    return False


class FolderLock(AbstractContextManager["FolderLock"]):
    """A lock on a folder, held until `close` or the end of the process. The lock file says which process holds it."""

    def __init__(self, file: FileIO):
        self._file = file
        file.seek(0)
        file.write(_SIGNATURE + f"process {os.getpid()} of {socket.gethostname()}\n".encode())
        file.truncate()

    def close(self) -> None:
        """Let other processes into the folder."""
        if not self._file.closed:
            self._file.truncate(0)
            self._file.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def lock_folder(folder: Path) -> FolderLock:
    """Make `folder` if it does not exist, and lock it against other processes; returns the lock.

    The lock file lies in the folder itself, so that every path to the folder leads to it. Raises ValueError when
    another process holds the lock, when another program's file has the name `LOCK_FILE`, and when the file system
    cannot lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    foreign_file_error = ValueError(f"{path} is no lock of this package, which needs the name: move it away")
    try:
        # These flags follow no link, do not wait for the other end of a pipe, and do not truncate an existing file.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise foreign_file_error from None
        raise
    with ExitStack() as opened:
        file = opened.enter_context(FileIO(descriptor, "r+"))
        is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        content = file.read(200) if is_regular else b""
        if not is_regular or (content and not content.startswith(_SIGNATURE)):
            raise foreign_file_error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.exists(path) or not os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return lock_folder(folder)  # the last holder removed the file after we had opened it
            new_lock = FolderLock(file)
        except BlockingIOError:
            process = content.removeprefix(_SIGNATURE).decode("ascii", "backslashreplace").strip() or "unknown process"
            raise ValueError(
                f"another process is still working in {folder} ({process}): wait for its end, or choose another folder"
            ) from None
        except OSError as error:
            if error.errno in _NO_FLOCK:
                raise ValueError(
                    f"{path} cannot be locked ({error.strerror}), and a second run could not be kept out: choose a "
                    "folder on a file system with flock, or have this one mounted with it"
                ) from None
            raise OSError(error.errno, error.strerror, str(path)) from None
        opened.pop_all()
    return new_lock


def private_folder(folder: Path) -> Path:
    """Make `folder` for this user alone and return it; if somebody else can write there, make a new folder next to it
    and return that."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()  # `stat` would follow a link, which may lead anywhere
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))


def user_cache() -> Path:
    """This package's folder in the user's cache folder. Raises OSError if it cannot be made."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if cache.startswith("~"):
        raise FileNotFoundError(f"{cache} is in no home folder")  # else the current folder would get a folder `~`
    return private_folder(Path(cache, "xlme_ds"))


def use_private_caches() -> None:
    """Make compilers cache machine code where nobody else can write. XLME_CACHE may name a folder, for example on a
    disk of the node: torch, numba and Triton then use it. Otherwise only torch's cache is moved, to the user's cache
    folder. An environment variable that is set already stays."""
    chosen = os.environ.get("XLME_CACHE") or None
    subfolders = {"TORCHINDUCTOR_CACHE_DIR": "inductor"}  # environment variable -> subfolder
    if chosen is not None:
        subfolders |= {"NUMBA_CACHE_DIR": "numba", "TRITON_CACHE_DIR": "triton"}
    if all(variable in os.environ for variable in subfolders):
        return
    try:
        folder = user_cache() if chosen is None else private_folder(Path(chosen))
    except OSError:  # the user has no home folder, or it cannot be written
        folder = Path(tempfile.mkdtemp(prefix="xlme-"))
    for variable, subfolder in subfolders.items():
        os.environ.setdefault(variable, str(folder / subfolder))


@contextmanager
def atomic_folder(to: Path) -> Iterator[Path]:
    """Yield a temporary folder to write into. When the block ends, the folder is flushed to the disk and renamed to
    `to`; after an error it is removed.

    Raises ValueError if `to` exists or cannot be made, or if the temporary name is taken. A temporary folder that a
    killed process left is no error: it is emptied.
    """
    require_new(to)
    partial = to.with_name(to.name + ".partial")
    # A lock file or an empty folder is from a killed process. If the process still runs, `lock_folder` raises.
    abandoned = partial.is_dir() and ((partial / LOCK_FILE).is_file() or not any(partial.iterdir()))
    if os.path.lexists(partial) and not abandoned:
        raise ValueError(f"{partial} is in the way: move it, or choose another output folder")
    with lock_folder(partial):
        try:
            clear_folder(partial)
            yield partial
            fsync(*(path for path in partial.rglob("*") if path.name != LOCK_FILE), partial)
            partial.rename(to)
            (to / LOCK_FILE).unlink()
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    fsync(to.parent)


def clear_folder(folder: Path, keep: Sequence[str] = ()) -> None:
    """Delete the content of a locked folder except for the lock and the names in `keep`; links are not followed."""
    for path in folder.iterdir():
        if path.name not in (LOCK_FILE, *keep):
            path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)
