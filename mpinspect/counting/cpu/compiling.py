"""How loops are compiled: kept on disk for other processes where there is a place to keep them.

numba makes no cache, and raises RuntimeError, where neither the package's folder nor a home of the user can be written to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Any) -> Any:
    """Compiled at its first call, once for each types of arguments. Holds no interpreter lock."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        return numba.njit(nogil=True)(function)


def compiled_for(signature: str) -> Callable[[Any], Any]:
    """Compiled now, for arguments of these types."""

    def decorate(function: Any) -> Any:
        try:
            return numba.njit(signature, nogil=True, cache=True)(function)
        except RuntimeError:
            return numba.njit(signature, nogil=True)(function)

    return decorate


#: What an address belongs to must not be collected.
_kept: list[Any] = []


def function_of_c(function: Any) -> int:
    """The address of a C function of one int64 that returns nothing, compiled now."""
    types: Any = numba.types
    signature = types.void(types.int64)
    cfunc: Any = numba.cfunc
    try:
        made = cfunc(signature, cache=True)(function)
    except RuntimeError:
        made = cfunc(signature)(function)
    _kept.append(made)
    address: int = made.address
    return address
