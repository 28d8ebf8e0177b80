"""Compiles loops over rows to machine code, with numba. The first import of a module compiles its functions; later
imports load the cached code."""

import hashlib
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..io.folders import use_private_caches, user_cache

use_private_caches()  # it may set NUMBA_CACHE_DIR, which numba reads when it is imported

from numba import njit, types  # noqa: E402
from numba.core import config  # noqa: E402
from numba.core.types import Type  # noqa: E402

Array = np.ndarray
Kernel = Callable[..., Any]
LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)  # x & LOW and x >> HALF: the halves of 64 bits


def readonly(dtype: Type, dimensions: int = 1) -> Type:
    """The numba type of a contiguous array that a compiled function only reads. (The type of an array that it writes to
    is `dtype[::1]`.)"""
    return types.Array(dtype, dimensions, "C", readonly=True)


def compiled(signature: Any) -> Callable[[Kernel], Kernel]:
    """Decorator that compiles a function for one signature, without interpreter lock or index checks. With
    NUMBA_DISABLE_JIT=1 the function stays Python.

    The machine code is cached in NUMBA_CACHE_DIR, else next to the module or in the user's cache folder. Numba compiles
    again only when the function's file changes. But the machine code also contains constants and functions that the
    file imports from other files, so the name of the cache folder has a hash of these constants and files.
    """

    def compile_one(function: Kernel) -> Kernel:
        previous, folder = config.CACHE_DIR, _cache_folder(function)
        config.CACHE_DIR = str(folder)
        try:
            # Without a cache every process compiles, which takes seconds.
            return njit(signature, nogil=True, cache=folder is not None)(function)
        finally:
            config.CACHE_DIR = previous

    return compile_one


def _cache_folder(function: Kernel) -> Path | None:
    """The folder for a function's machine code; None if no folder can be written to."""
    preferred = Path(config.CACHE_DIR or Path(function.__code__.co_filename).parent / "__pycache__")
    for parent in (lambda: preferred, lambda: user_cache() / "numba"):  # called only if needed: `user_cache` may fail
        with suppress(OSError):
            folder = parent() / f"numba-{constants_hash(function)}"
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()  # fails if the folder cannot be written to
            return folder
    return None


def constants_hash(function: Kernel) -> str:
    """Hexadecimal hash of the constants that the function's module has defined or imported above the function, and of
    the files from which it has imported functions for compiled code."""
    constant_types = int | float | str | tuple | np.generic
    values = {
        name: repr(value)
        for name, value in function.__globals__.items()
        if isinstance(value, constant_types) and not name.startswith("__")
    }
    for name, value in function.__globals__.items():
        if hasattr(value, "py_func") and value.__module__ != function.__module__:
            source = Path(value.py_func.__code__.co_filename).read_text(encoding="utf-8")
            values[name] = source + constants_hash(value.py_func)
    return hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:16]
