"""Loops over rows as machine code, by numba; a module compiles its own when it is imported for the first time, and
caches that."""

from collections.abc import Callable
from typing import Any

from numba import njit, types
from numba.core.types import Type

Kernel = Callable[..., Any]


def reads(dtype: Type, dimensions: int = 1) -> Type:
    """A contiguous array that is only read: numba tells those that may be written to from those that may not."""
    return types.Array(dtype, dimensions, "C", readonly=True)


def writes(dtype: Type, dimensions: int = 1) -> Type:
    """A contiguous array that is written."""
    return types.Array(dtype, dimensions, "C")


def compiled(signature: Any) -> Callable[[Kernel], Kernel]:
    """`numba.njit` for these types of arguments; it holds no interpreter lock, checks no index, and NUMBA_DISABLE_JIT=1
    leaves Python.

    The machine code lies beside the module, else under the user's cache folder (or NUMBA_CACHE_DIR). It is renewed with
    the file of the
    function: so one calls only such functions as stand in its own file, and constants of other files stay as they were.
    """

    def compile_one(function: Kernel) -> Kernel:
        try:
            return njit(signature, nogil=True, cache=True)(function)
        except (
            RuntimeError,
            OSError,
        ):  # no folder can be written, or its disk is full: compiled at every start, for some seconds
            return njit(signature, nogil=True)(function)

    return compile_one
