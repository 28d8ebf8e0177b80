"""What the fault campaign does to disks and files."""

import contextlib
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path


def flip(rng: random.Random, path: Path) -> None:
    """Flip a bit of a file."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncate(rng: random.Random, path: Path) -> None:
    """Cut a file short."""
    os.truncate(path, rng.randrange(path.stat().st_size))


def delete(rng: random.Random, path: Path) -> None:
    """Delete a file."""
    path.unlink()


def damage(rng: random.Random, path: Path) -> None:
    """One of the three."""
    rng.choice([flip, truncate, delete])(rng, path)


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[None]:
    """A small file system of its own at `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    """Write to `path` until its file system is full."""
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while file.write(b"\0" * 4096):
            pass
