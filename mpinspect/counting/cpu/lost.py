"""Counts updates that rounding would lose if FP32 weights were stored in FP16 or BF16, in one read of both tensors.

``capture.updates.lost_updates`` computes the same with torch's operations, a dozen passes for each format. This module works
on the bits, sixteen elements at a time. Importing compiles the loops or reads them from numba's cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba.types
import numpy as np
import torch
from llvmlite import ir

from mpinspect.counting.cpu import kernels, shares
from mpinspect.counting.cpu.compiling import compiled, compiled_for, function_of_c
from mpinspect.counting.cpu.memory import pointer
from mpinspect.counting.cpu.vectors import I64, LANES, VECTOR_BYTES, Code, Words, constant, emitted
from mpinspect.counting.pieces import fills_its_memory
from mpinspect.runtime.workers import NO_TEAM, TEAM

types: Any = numba.types
_Floats: Any = ir.VectorType(ir.FloatType(), LANES)

_MAGNITUDE, _INFINITY, _MANTISSA_BITS = 0x7FFFFFFF, 0x7F800000, 23
#: Elements from which several threads are faster.
_TEAM_FROM = 1 << 14


@dataclass(frozen=True)
class _Stored:
    """A format that weights may be stored in.

    Args:
        dropped: bits of an FP32 mantissa that the format lacks.
        end: bits of the smallest power of two that becomes infinity.
        least_field: FP32's exponent field of the format's smallest normal.
    """

    dropped: int
    end: int
    least_field: int

    @property
    def half_a_step(self) -> int:
        """Powers of two between a power of two and half the distance to the next larger value."""
        return _MANTISSA_BITS - self.dropped + 1


_FLOAT16, _BFLOAT16 = _Stored(13, (127 + 16) << _MANTISSA_BITS, 127 - 14), _Stored(16, _INFINITY, 1)
#: One half: adding it rounds off all bits below 2^-24, the step of FP16's subnormals.
_HALF = 0x3F000000


class _Judge:
    """Generates the instructions that judge sixteen weights and their updates."""

    def __init__(self, builder: Any, weight: Any, update: Any) -> None:
        self._builder = builder
        self._weight = builder.and_(weight, constant(Words, _MAGNITUDE))
        self._size = builder.and_(update, constant(Words, _MAGNITUDE))
        #: 1 for updates towards zero.
        self._inward = builder.lshr(builder.xor(weight, update), constant(Words, 31))
        self._moving = builder.and_(self._is(">", self._size, 0), self._is("<", self._size, _INFINITY))

    def lost_and_counted(self, stored: _Stored) -> list[Any]:
        """Return vectors with 1 for each lost update, and with 1 for each counted update."""
        builder = self._builder
        last = builder.and_(builder.lshr(self._weight, constant(Words, stored.dropped)), constant(Words, 1))
        # Round to nearest, ties to even; a carry out of the mantissa correctly increments the exponent.
        nudged = builder.add(self._weight, builder.add(last, constant(Words, (1 << stored.dropped - 1) - 1)))
        value = builder.and_(nudged, constant(Words, _MAGNITUDE << stored.dropped & 0xFFFFFFFF))
        half = self._half_a_step(stored, value)
        tie = builder.and_(builder.icmp_unsigned("==", self._size, half), self._is("==", self._odd(stored, value), 0))
        counted = builder.and_(self._moving, self._is("<", value, stored.end))
        lost = builder.and_(counted, builder.or_(tie, builder.icmp_unsigned("<", self._size, half)))
        return [builder.zext(lost, Words), builder.zext(counted, Words)]

    def _is(self, how: str, words: Any, value: int) -> Any:
        return self._builder.icmp_unsigned(how, words, constant(Words, value))

    def _half_a_step(self, stored: _Stored, value: Any) -> Any:
        """Return the bits of half the distance to the neighbour in the direction of the update."""
        builder, code = self._builder, Code(self._builder)
        field = builder.lshr(value, constant(Words, _MANTISSA_BITS))
        field = code.operation("umax", field, constant(Words, stored.least_field))
        # Below a power of two the step is half as long, except at the smallest normal: subnormals have the same step.
        power = self._is("==", builder.and_(value, constant(Words, (1 << _MANTISSA_BITS) - 1)), 0)
        power = builder.and_(power, self._is(">", value, stored.least_field << _MANTISSA_BITS))
        shorter = builder.and_(builder.zext(power, Words), self._inward)
        field = builder.sub(builder.sub(field, constant(Words, stored.half_a_step)), shorter)
        normal = builder.shl(field, constant(Words, _MANTISSA_BITS))
        if stored.least_field > stored.half_a_step + 1:
            return normal
        # A power of two that is an FP32 subnormal is one bit of the mantissa.
        place = code.operation("umin", builder.add(field, constant(Words, _MANTISSA_BITS - 1)), constant(Words, 31))
        subnormal = builder.shl(constant(Words, 1), place)
        return builder.select(builder.icmp_signed(">", field, constant(Words, 0)), normal, subnormal)

    def _odd(self, stored: _Stored, value: Any) -> Any:
        """Return the last bit of the stored weight's code."""
        builder = self._builder
        last = builder.lshr(value, constant(Words, stored.dropped))
        if stored is _FLOAT16:
            halved = builder.fadd(
                builder.bitcast(self._weight, _Floats), builder.bitcast(constant(Words, _HALF), _Floats)
            )
            subnormal = self._is("<", self._weight, stored.least_field << _MANTISSA_BITS)
            last = builder.select(subnormal, builder.bitcast(halved, Words), last)
        return builder.and_(last, constant(Words, 1))


@emitted(types.void, *[types.int64] * 4)
def judge(code: Code, weights: Any, updates: Any, turns: Any, found: Any) -> None:
    """Judge ``turns`` times sixteen elements (1 <= turns < 2^31 / 16) at two addresses; add to four int64s at ``found``."""
    builder = code.builder

    def body(turn: Any, counts: list[Any]) -> list[Any]:
        offset = builder.mul(turn, constant(I64, VECTOR_BYTES))
        weight, update = (code.load(builder.add(address, offset), 0) for address in (weights, updates))
        judge = _Judge(builder, weight, update)
        new = [*judge.lost_and_counted(_FLOAT16), *judge.lost_and_counted(_BFLOAT16)]
        return [builder.add(count, one) for count, one in zip(counts, new, strict=True)]

    counts = code.loop(turns, [constant(Words, 0)] * 4, body)
    for index, count in enumerate(counts):
        total = builder.zext(code.operation("vector.reduce.add", count, result=Words.element), I64)
        place = code.place(found, 8 * index, I64)
        builder.store(builder.add(builder.load(place), total), place)


@compiled
def _add(weights: Any, updates: Any, length: Any, found: Any) -> None:
    """Judge ``length`` elements, fewer than 2^31."""
    whole = length // LANES
    if whole:
        judge(weights, updates, whole, found)
    if length % LANES:
        # An update of zero does not count.
        rest = np.zeros((2, LANES), np.uint32)
        kernels.copy(shares.carray(pointer(weights, np.uint32(0)), (length,))[whole * LANES :], rest[0])
        kernels.copy(shares.carray(pointer(updates, np.uint32(0)), (length,))[whole * LANES :], rest[1])
        judge(rest[0].ctypes.data, rest[1].ctypes.data, 1, found)


def _work(address: Any) -> None:
    both = shares.carray(pointer(shares.job_at(address)[shares.VALUES], np.int64(0)), (2,))
    own, found = shares.own_part(address), shares.result_of(address)
    start, length, turn = shares.next_values(address, own, 0)
    while length:
        _add(both[0] + 4 * start, both[1] + 4 * start, length, found.ctypes.data)
        start, length, turn = shares.next_values(address, own, turn)


@compiled_for("void(int64, int64, int64, int64, int64, int64, UniTuple(int64, 2))")
def _count(work: Any, weights: Any, updates: Any, length: Any, found: Any, threads: Any, team: Any) -> None:
    both = np.array((weights, updates))
    results = np.zeros((threads, 4), np.int64)
    used = shares.run(work, both.ctypes.data, length, results, team)
    total = shares.carray(pointer(found, np.int64(0)), (4,))
    total[:] = 0
    kernels.add_rows(results[:used], total)


_WORK = function_of_c(_work)


def takes(weight: torch.Tensor, update: torch.Tensor) -> bool:
    """Return whether ``lost_updates`` can read these: FP32 on the CPU, dense, with equal shapes and strides."""
    return (
        all(map(_is_readable, (weight, update))) and weight.shape == update.shape and weight.stride() == update.stride()
    )


def _is_readable(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype is torch.float32
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and (tensor.is_contiguous() or fills_its_memory(tensor))
        and tensor.data_ptr() != 0
    )


def lost_updates(weight: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """Return the number of updates that are lost if the weight is stored in FP16, and in BF16.

    Args:
        weight, update: tensors that ``takes`` accepts.

    Returns:
        int64, shape (2, 2): lost and non-zero in FP16, lost and non-zero in BF16.
    """
    found, length, threads, team = torch.zeros(2, 2, dtype=torch.int64, device="cpu"), weight.numel(), 1, NO_TEAM
    if length >= _TEAM_FROM and TEAM.there:
        threads, team = torch.get_num_threads(), TEAM.addresses
    _count(_WORK, weight.data_ptr(), update.data_ptr(), length, found.data_ptr(), threads, team)
    return found
