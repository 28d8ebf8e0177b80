"""Numba compiles loops over rows to machine code: a module's loops at its first import; the code is cached."""

import hashlib
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..io.folders import use_private_caches, user_cache

use_private_caches()  # numba reads the variable when it is loaded

from numba import njit, types  # noqa: E402
from numba.core import config  # noqa: E402
from numba.core.types import Type  # noqa: E402

Kernel = Callable[..., Any]


def reads(dtype: Type, dimensions: int = 1) -> Type:
    """The type of a contiguous array that is only read; one that may be written to is `dtype[::1]`."""
    return types.Array(dtype, dimensions, "C", readonly=True)


def compiled(signature: Any) -> Callable[[Kernel], Kernel]:
    """`numba.njit` for these types of arguments, without interpreter lock or index checks. With NUMBA_DISABLE_JIT=1 the
    function stays Python.

    The machine code is cached next to the module, or in the user's cache folder, or in NUMBA_CACHE_DIR. Numba compiles
    again only when the function's own file changes. So the cache folder is named after the constants that the module
    imports, and a compiled function may call only functions of its own file.
    """

    def compile_one(function: Kernel) -> Kernel:
        folder = _cache_folder(function)
        if folder is None:  # compiled at every start, for some seconds
            return njit(signature, nogil=True)(function)
        previous, config.CACHE_DIR = config.CACHE_DIR, str(folder)
        try:
            return njit(signature, nogil=True, cache=True)(function)
        finally:
            config.CACHE_DIR = previous

    return compile_one


def _cache_folder(function: Kernel) -> Path | None:
    """The folder for a function's machine code; None if none can be written."""
    cache_folder = config.CACHE_DIR
    beside = Path(cache_folder or Path(function.__code__.co_filename).parent / "__pycache__")
    for place in (lambda: beside, lambda: user_cache() / "numba"):
        with suppress(OSError):
            folder = place() / f"numba-{constants_hash(function)}"
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            return folder
    return None


def constants_hash(function: Kernel) -> str:
    """A hash of the constants that a function's module has so far, by name: machine code contains their values."""
    kinds = int | float | str | tuple | np.generic
    values = {
        name: repr(value)
        for name, value in function.__globals__.items()
        if isinstance(value, kinds) and not name.startswith("__")
    }
    return hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:16]
