"""What numba lacks: integers of a given width, memory by its address, and a counter that several threads draw from."""

from __future__ import annotations

from typing import Any

import numba.types
from numba.extending import intrinsic

types: Any = numba.types


def _as_type(context: Any, value: Any, like: Any) -> Any:
    """``value`` as an integer of the type of ``like``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.cast(builder, arguments[0], value, like)

    return like(value, like), generate


def _pointer(context: Any, address: Any, like: Any) -> Any:
    """The address (int64) as a pointer to numbers of the type of ``like``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(address, like), generate


def _fetch_and_add(context: Any, address: Any, amount: Any) -> Any:
    """Add to the int64 at this address, in one indivisible step; what it was before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where = builder.inttoptr(arguments[0], context.get_value_type(types.CPointer(types.int64)))
        return builder.atomic_rmw("add", where, arguments[1], "monotonic")

    return types.int64(types.int64, types.int64), generate


as_type: Any = intrinsic(_as_type)
pointer: Any = intrinsic(_pointer)
fetch_and_add: Any = intrinsic(_fetch_and_add)
