"""Loops written in LLVM's own instructions, on vectors of 64 bytes; LLVM lowers them to the CPU's vector width.

numba prefers vectors of half that width on CPUs that have both, and it has no rotations. Whether it vectorises a loop at
all is unpredictable.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numba.core.cgutils
import numba.types
from llvmlite import ir
from numba.extending import intrinsic

types: Any = numba.types
_cgutils: Any = numba.core.cgutils

#: Bytes of a vector, and the 32-bit words in it.
VECTOR_BYTES, LANES = 64, 16

I8, I16, I32, I64 = (ir.IntType(width) for width in (8, 16, 32, 64))
Words: Any = ir.VectorType(I32, LANES)


def constant(kind: Any, value: int) -> Any:
    """Return a constant of this type: an integer, or a vector with this integer in every lane."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


class Code:
    """A builder of instructions, extended by the operations that the loops need."""

    def __init__(self, builder: Any, context: Any = None) -> None:
        self.builder, self.context = builder, context

    def operation(self, name: str, *operands: Any, result: Any = None, suffix: str = "") -> Any:
        """Return the result of an LLVM intrinsic, given by its name without the suffix, by default the operands' type."""
        kind = operands[0].type
        width = (kind.element if isinstance(kind, ir.VectorType) else kind).width
        suffix = suffix or (f"v{kind.count}i{width}" if isinstance(kind, ir.VectorType) else f"i{width}")
        c_type = ir.FunctionType(result or kind, [operand.type for operand in operands])
        function = _cgutils.get_or_insert_function(self.builder.module, c_type, f"llvm.{name}.{suffix}")
        return self.builder.call(function, operands)

    def place(self, address: Any, offset: int, kind: Any) -> Any:
        """Return the pointer ``offset`` bytes after an address."""
        return self.builder.inttoptr(self.builder.add(address, constant(I64, offset)), kind.as_pointer())

    def load(self, address: Any, offset: int, kind: Any = Words) -> Any:
        # Values are aligned; vectors may be unaligned.
        return self.builder.load(self.place(address, offset, kind), align=1)

    def store(self, value: Any, address: Any, offset: int) -> None:
        self.builder.store(value, self.place(address, offset, value.type), align=1)

    def prefetch(self, address: Any, offset: int, level: int = 1) -> None:
        """Prefetch a line into the cache of the first or second level; any address is allowed."""
        place = self.place(address, offset, I8)
        kinds = [place.type, I32, I32, I32]
        function = _cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(ir.VoidType(), kinds), "llvm.prefetch.p0"
        )
        # 0: for reading; 3: into every cache level; 1: data.
        self.builder.call(function, [place, constant(I32, 0), constant(I32, 4 - level), constant(I32, 1)])

    def memory(self) -> Any:
        """Return the address of memory for a vector, on the stack."""
        return self.builder.ptrtoint(_cgutils.alloca_once(self.builder, Words), I64)

    def full_adder(self, a: Any, b: Any, c: Any) -> tuple[Any, Any]:
        """Return the sum and the carry for each bit. The carry is ``a``, or ``c`` where ``a`` and ``b`` differ."""
        builder = self.builder
        differ = builder.xor(a, b)
        return builder.xor(differ, c), builder.xor(a, builder.and_(differ, builder.xor(a, c)))

    def loop(self, turns: Any, state: Sequence[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        """Emit a loop of ``turns`` turns (int64, 1 or more), whose body maps the turn's number and a state to a new state."""
        builder = self.builder
        entry = builder.block
        start, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
        builder.branch(start)
        builder.position_at_end(start)
        variables = [builder.phi(value.type) for value in (turns, *state)]
        following = body(variables[0], variables[1:])
        next_turn = builder.add(variables[0], constant(I64, 1))
        for variable, first, then in zip(variables, (constant(I64, 0), *state), (next_turn, *following), strict=True):
            variable.add_incoming(first, entry)
            variable.add_incoming(then, builder.block)
        builder.cbranch(builder.icmp_unsigned("<", next_turn, turns), start, done)
        builder.position_at_end(done)
        return following


def emitted(result: Any, *kinds: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a function for compiled code from one that emits its instructions.

    The emitting function gets a ``Code`` and the values of the arguments, each by a name, and returns the value of the result:
    a list of values for a tuple, None for ``void``.

    Args:
        result, kinds: numba's types of the result and of the arguments.
    """

    def made(emit: Callable[..., Any]) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            found = emit(Code(builder, context), *arguments)
            if isinstance(found, list):
                return context.make_tuple(builder, result, found)
            return context.get_dummy_value() if found is None else found

        @functools.wraps(emit)
        def define(context: Any, *given: Any) -> Any:
            return result(*kinds), generate

        return intrinsic(define)

    return made


def _largest_doubled(context: Any, address: Any, turns: Any, one: Any) -> Any:
    """Return the largest of the unsigned integers in ``turns`` times 256 bytes, without their highest bits and doubled.

    Args:
        one: 1 as an unsigned integer as wide as a value.
    """
    width, streams = one.bitwidth, 4
    kind = ir.VectorType(ir.IntType(width), VECTOR_BYTES * 8 // width)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = Code(builder)

        def body(turn: Any, largest: list[Any]) -> list[Any]:
            here = builder.add(arguments[0], builder.mul(turn, constant(I64, streams * VECTOR_BYTES)))
            loaded = [code.load(here, VECTOR_BYTES * stream, kind) for stream in range(streams)]
            return [
                code.operation("umax", high, builder.add(value, value))
                for high, value in zip(largest, loaded, strict=True)
            ]

        a, b, c, d = code.loop(arguments[1], [constant(kind, 0)] * streams, body)
        high = code.operation("umax", code.operation("umax", a, b), code.operation("umax", c, d))
        return code.operation("vector.reduce.umax", high, result=kind.element)

    return one(types.int64, types.int64, one), generate


@emitted(types.void, *[types.int64] * 4)
def add_rows(code: Code, a: Any, b: Any, c: Any, words: Any) -> None:
    """Add rows of 32-bit words at three addresses with full adders: sums go to the first row, carries to the third.

    Args:
        words: length of a row, a multiple of LANES.
    """
    builder = code.builder

    def body(turn: Any, _: list[Any]) -> list[Any]:
        rows = [builder.add(row, builder.mul(turn, constant(I64, VECTOR_BYTES))) for row in (a, b, c)]
        total, carry = code.full_adder(*(code.load(row, 0) for row in rows))
        code.store(total, rows[0], 0)
        code.store(carry, rows[2], 0)
        return []

    code.loop(builder.udiv(words, constant(I64, LANES)), [], body)


@emitted(types.void, *[types.int64] * 3)
def copy_row(code: Code, target: Any, source: Any, words: Any) -> None:
    """Copy a row of 32-bit words between addresses; their number is a multiple of LANES."""
    builder = code.builder

    def body(turn: Any, _: list[Any]) -> list[Any]:
        offset = builder.mul(turn, constant(I64, VECTOR_BYTES))
        code.store(code.load(builder.add(source, offset), 0), builder.add(target, offset), 0)
        return []

    code.loop(builder.udiv(words, constant(I64, LANES)), [], body)


largest_doubled: Any = intrinsic(_largest_doubled)
