"""DeepSpeed's extensions are compiled and loaded in a folder of our own, by one process at a time.

torch marks an extension that is being compiled or loaded with a file `lock` next to it, and waits as long as there is
one: a killed process leaves it, and all later ones wait for ever. In a folder that only our processes use, under a lock
that the system releases when its holder ends, whatever `lock` is found there was left.
"""

import contextlib
import fcntl
import hashlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

_load = cpp_extension.load


@contextlib.contextmanager
def loading_extensions() -> Iterator[None]:
    """Around what may load an extension; also keeps DeepSpeed's news of building and of memory off standard output."""
    cpp_extension.load = _load_alone  # type: ignore[assignment]  # DeepSpeed looks it up there each time
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        cpp_extension.load = _load


def _load_alone(name: str, **arguments: Any) -> Any:
    """torch's `load` in our folder, by no other process of ours at the same time."""
    folder = _root() / name
    with _locked(folder):
        if not (folder / f"{name}.so").exists():
            print(f"compiling {name} in {folder}, once for all runs", file=sys.stderr, flush=True)
        return _load(name=name, build_directory=str(folder), **arguments)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Alone in `folder`, and without the `lock` of a process that was killed. Raises ValueError where that cannot be
    had."""
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            fcntl.flock(held.enter_context(open(folder / ".xlme_ds.lock", "w")), fcntl.LOCK_EX)
            (folder / "lock").unlink(missing_ok=True)
        except OSError as error:
            raise ValueError(
                f"{folder}, where DeepSpeed's extensions are compiled: {error.strerror}: set TORCH_EXTENSIONS_DIR to a folder that "
                "this user can write and lock"
            ) from None
        yield


def _root() -> Path:
    """Within the folder that TORCH_EXTENSIONS_DIR names, or torch's in the user's cache; another one for another
    environment.

    The commands of the build have torch's path: of two environments that took turns each would compile anew.
    """
    parent = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    place = hashlib.sha256(torch.__file__.encode()).hexdigest()[:8]
    return Path(parent) / f"xlme_ds-py{sys.version_info.major}{sys.version_info.minor}-torch{torch.__version__}-{place}"
