"""Operations that numba lacks: integers of a given width, bit casts, memory and C functions at addresses, atomic addition."""

from __future__ import annotations

from typing import Any

import numba.types
from llvmlite import ir
from numba.extending import intrinsic

types: Any = numba.types

_BYTE_POINTER: Any = ir.IntType(8).as_pointer()


def _as_type(context: Any, value: Any, like: Any) -> Any:
    """Cast ``value`` to an integer of the type of ``like``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.cast(builder, arguments[0], value, like)

    return like(value, like), generate


def _pointer(context: Any, address: Any, like: Any) -> Any:
    """Return the address (int64) as a pointer to numbers of the type of ``like``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(address, like), generate


def _fetch_and_add(context: Any, address: Any, amount: Any) -> Any:
    """Atomically add to the int64 at this address; return its previous value."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where = builder.inttoptr(arguments[0], context.get_value_type(types.CPointer(types.int64)))
        return builder.atomic_rmw("add", where, arguments[1], "monotonic")

    return types.int64(types.int64, types.int64), generate


def _ones(context: Any, word: Any) -> Any:
    """Return the number of set bits of a uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


def _lowest_one(context: Any, word: Any) -> Any:
    """Return the number of the lowest set bit of a non-zero uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


def _bits_of_float64(context: Any, value: Any) -> Any:
    """Return the bits of a float64 as an int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(64))

    return types.int64(types.float64), generate


def _float64_of_bits(context: Any, bits: Any) -> Any:
    """Return the float64 with the bits of an int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), generate


def _call(context: Any, function: Any, argument: Any) -> Any:
    """Call the C function at an address with an int64; it has no result."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        c_type = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(builder.inttoptr(arguments[0], c_type.as_pointer()), [arguments[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _call_for_int(context: Any, function: Any) -> Any:
    """Call the C function at an address without arguments, and return its int."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        c_type = ir.FunctionType(ir.IntType(32), [])
        found = builder.call(builder.inttoptr(arguments[0], c_type.as_pointer()), [])
        return builder.sext(found, ir.IntType(64))

    return types.int64(types.int64), generate


def _call_parallel(context: Any, parallel: Any, function: Any, argument: Any, threads: Any) -> Any:
    """Call ``GOMP_parallel``, at the first address, with a C function, its argument and a number of threads."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        unsigned = ir.IntType(32)
        c_type = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, _BYTE_POINTER, unsigned, unsigned])
        builder.call(
            builder.inttoptr(arguments[0], c_type.as_pointer()),
            [
                builder.inttoptr(arguments[1], _BYTE_POINTER),
                builder.inttoptr(arguments[2], _BYTE_POINTER),
                builder.trunc(arguments[3], unsigned),
                ir.Constant(unsigned, 0),
            ],
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


as_type: Any = intrinsic(_as_type)
pointer: Any = intrinsic(_pointer)
fetch_and_add: Any = intrinsic(_fetch_and_add)
ones: Any = intrinsic(_ones)
lowest_one: Any = intrinsic(_lowest_one)
bits_of_float64: Any = intrinsic(_bits_of_float64)
float64_of_bits: Any = intrinsic(_float64_of_bits)
call: Any = intrinsic(_call)
call_for_int: Any = intrinsic(_call_for_int)
call_parallel: Any = intrinsic(_call_parallel)
