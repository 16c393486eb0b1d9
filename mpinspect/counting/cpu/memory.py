"""Operations that numba lacks: integers of a given width, bit casts, memory and C functions at addresses, atomic addition."""

from __future__ import annotations

from typing import Any

import numba.types
from llvmlite import ir
from numba.extending import intrinsic

from mpinspect.counting.cpu.vectors import I8, I32, I64, Code, emitted

types: Any = numba.types

_BYTE_POINTER: Any = I8.as_pointer()


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


@emitted(types.int64, types.int64, types.int64)
def fetch_and_add(code: Code, address: Any, amount: Any) -> Any:
    """Atomically add to the int64 at this address; return its previous value."""
    return code.builder.atomic_rmw("add", code.place(address, 0, I64), amount, "monotonic")


@emitted(types.int64, types.uint64)
def ones(code: Code, word: Any) -> Any:
    """Return the number of set bits of a uint64."""
    return code.builder.ctpop(word)


@emitted(types.int64, types.uint64)
def lowest_one(code: Code, word: Any) -> Any:
    """Return the number of the lowest set bit of a non-zero uint64."""
    return code.builder.cttz(word, ir.Constant(ir.IntType(1), 1))


@emitted(types.int64, types.float64)
def bits_of_float64(code: Code, value: Any) -> Any:
    """Return the bits of a float64 as an int64."""
    return code.builder.bitcast(value, I64)


@emitted(types.float64, types.int64)
def float64_of_bits(code: Code, bits: Any) -> Any:
    """Return the float64 with the bits of an int64."""
    return code.builder.bitcast(bits, ir.DoubleType())


@emitted(types.void, types.int64, types.int64)
def call(code: Code, function: Any, argument: Any) -> None:
    """Call the C function at an address with an int64; it has no result."""
    _called(code, ir.FunctionType(ir.VoidType(), [I64]), function, argument)


@emitted(types.int64, types.int64)
def call_for_int(code: Code, function: Any) -> Any:
    """Call the C function at an address without arguments, and return its int."""
    return code.builder.sext(_called(code, ir.FunctionType(I32, []), function), I64)


@emitted(types.void, *[types.int64] * 4)
def call_parallel(code: Code, parallel: Any, function: Any, argument: Any, threads: Any) -> None:
    """Call ``GOMP_parallel``, at the first address, with a C function, its argument and a number of threads."""
    c_type = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, _BYTE_POINTER, I32, I32])
    both = [code.builder.inttoptr(each, _BYTE_POINTER) for each in (function, argument)]
    _called(code, c_type, parallel, *both, code.builder.trunc(threads, I32), ir.Constant(I32, 0))


def _called(code: Code, c_type: Any, function: Any, *arguments: Any) -> Any:
    return code.builder.call(code.builder.inttoptr(function, c_type.as_pointer()), arguments)


as_type: Any = intrinsic(_as_type)
pointer: Any = intrinsic(_pointer)
