"""Folders that one process at a time works in, and that a killed process leaves whole or not at all."""

import errno
import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from .files import to_disk

LOCK = ".lock"  # the file of a folder that a process holds while it works there
_HOLDER = b"xlme_ds: "
_NO_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def in_use(folder: Path) -> bool:
    """Whether a process holds the lock of `folder`; nothing is written."""
    try:
        with open(folder / LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # there is none
    return False


def lock(folder: Path) -> Any:
    """Keep other processes out of `folder`, which is made where it is missing, until the returned file is closed.

    The file lies in the folder itself, so that every path there leads to it, and says who holds it. Raises ValueError
    when another process does, when something else has the file's name, and when its file system cannot lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    foreign = f"{path} is no lock of this package, which needs the name: move it away"
    try:
        # Neither through a link nor waiting for the other end of a pipe; what is there is not touched before it is
        # known.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise ValueError(foreign) from None
        raise
    with ExitStack() as held:
        file = held.enter_context(os.fdopen(descriptor, "r+b", buffering=0))
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(foreign)
        holder = file.read(200)
        if holder and not holder.startswith(_HOLDER):
            raise ValueError(foreign)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.exists(path) or not os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return lock(folder)  # its holder removed it meanwhile
            file.seek(0)
            file.write(_HOLDER + f"process {os.getpid()} of {socket.gethostname()}\n".encode())
            file.truncate()
        except BlockingIOError:
            who = holder.removeprefix(_HOLDER).decode("ascii", "backslashreplace").strip() or "it does not say which"
            raise ValueError(
                f"another process is still working in {folder} ({who}): wait for its end, or choose another folder"
            ) from None
        except OSError as error:
            if error.errno in _NO_FLOCK:
                raise ValueError(
                    f"{path} cannot be locked ({error.strerror}), and a second run could not be kept out: choose a "
                    "folder on a file system with flock, or have this one mounted with it"
                ) from None
            raise OSError(error.errno, error.strerror, str(path)) from None
        held.pop_all()  # it stays open, and locked
    return file


def private(folder: Path) -> Path:
    """`folder`, made for this user alone; where somebody else can write it, a new one next to it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()  # a link may lead anywhere
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))


def use_private_caches() -> None:
    """Have compilers cache machine code, which is run, where nobody else can put any: in XLME_CACHE where that is set,
    a folder on a disk of the node, else in the user's cache folder, which torch's default is not."""
    names = {"NUMBA_CACHE_DIR": "numba", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    place = os.environ.get("XLME_CACHE")
    if place is None:
        names = {"TORCHINDUCTOR_CACHE_DIR": "inductor"}
        place = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "xlme_ds")
    if all(name in os.environ for name in names):
        return
    try:
        folder = private(Path(place))
    except OSError:  # no home, or one that cannot be written
        folder = Path(tempfile.mkdtemp(prefix="xlme-"))
    for name, kind in names.items():
        os.environ.setdefault(name, str(folder / kind))


@contextmanager
def made_whole(to: Path, option: str) -> Iterator[Path]:
    """A folder to write into, which gets the name `to` when all is in it and on the disk; else nothing is left of it.

    Raises ValueError naming `option` when something has that name, or the one that it is written under.
    """
    if os.path.lexists(to):
        raise ValueError(f"{to} exists already: choose another {option}")
    partial = to.with_name(to.name + ".partial")
    # One that was killed left its lock file, or an empty folder.
    left = partial.is_dir() and ((partial / LOCK).is_file() or not any(partial.iterdir()))
    if os.path.lexists(partial) and not left:
        raise ValueError(f"{partial} is in the way: move it, or choose another {option}")
    with lock(partial):
        try:
            empty(partial)
            yield partial
            to_disk(*(path for path in partial.rglob("*") if path.name != LOCK), partial)
            partial.rename(to)
            (to / LOCK).unlink()
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    to_disk(to.parent)


def empty(folder: Path, keep: Sequence[str] = ()) -> None:
    """Delete what is in a locked folder but the lock and what `keep` names; of a link to a folder the link alone."""
    for path in folder.iterdir():
        if path.name not in (LOCK, *keep):
            path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)
