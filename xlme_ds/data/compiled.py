"""Loops over rows as machine code, by numba: a module's are compiled at its first import, and cached."""

from collections.abc import Callable
from typing import Any

from ..io.folders import use_private_caches

use_private_caches()  # numba reads the variable when it is loaded

from numba import njit, types  # noqa: E402
from numba.core.types import Type  # noqa: E402

Kernel = Callable[..., Any]


def reads(dtype: Type, dimensions: int = 1) -> Type:
    """A contiguous array that is only read: numba has another type for those that may be written to, `dtype[::1]`."""
    return types.Array(dtype, dimensions, "C", readonly=True)


def compiled(signature: Any) -> Callable[[Kernel], Kernel]:
    """`numba.njit` for these types of arguments, without interpreter lock or index checks; NUMBA_DISABLE_JIT=1 leaves
    Python.

    The machine code is cached next to the module, else in the user's cache folder (or NUMBA_CACHE_DIR). It is compiled
    again when the function's own file changes: so a function calls only those of its file, and a constant of another
    file keeps the value that it had then.
    """

    def compile_one(function: Kernel) -> Kernel:
        try:
            return njit(signature, nogil=True, cache=True)(function)
        except (RuntimeError, OSError):  # no folder can be written: compiled at every start, for some seconds
            return njit(signature, nogil=True)(function)

    return compile_one
