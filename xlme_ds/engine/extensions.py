"""Locks that a killed process left on DeepSpeed's extensions.

torch marks an extension that is being compiled or loaded with a file `lock` beside it, which its maker holds open, and waits
as long as there is one: what a killed process left is waited for in silence, for ever.
"""

import contextlib
import fcntl
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root

_STARTING = ".xlme_ds_starting"
"""Held, shared, by every process of ours that may be loading an extension, on whichever node."""


@contextlib.contextmanager
def loading_extensions() -> Iterator[None]:
    """Around what may load an extension: removes locks that are nobody's, names those that will be waited for, and keeps
    DeepSpeed's news of building and of memory off standard output.

    A lock is nobody's when no other process of ours is loading, and none of this machine's holds it open.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # without flock, or where nothing can be written, locks are only named
            root.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(open(root / _STARTING, "w"))
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_abandoned(root)
            fcntl.flock(file, fcntl.LOCK_SH)
        for path in root.glob("**/lock"):
            print(f"{path.parent} is being compiled; if no process does so, delete {path}", file=sys.stderr, flush=True)
        held.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield


def _remove_abandoned(root: Path) -> None:
    for path in root.glob("**/lock"):
        if not _is_open(path):
            path.unlink(missing_ok=True)
            print(f"removed {path}, which a process that was killed had left", file=sys.stderr, flush=True)


def _is_open(path: Path) -> bool:
    """Whether a process of this machine has `path` open, as far as this user may see."""
    wanted = str(path.resolve())
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # another user's, or ended meanwhile
            if os.readlink(descriptor) == wanted:
                return True
    return False
