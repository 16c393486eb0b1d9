"""Divides a tensor among the threads of an OpenMP team, and defines the C functions that they run.

Every thread begins with its own part of the tensor, as torch's operations split tensors: its core wrote that part recently, so
the values may still be in its cache. A thread that has finished its part helps the others, so a thread on a busy core
takes fewer values.

All functions get a job: an array of int64 with the addresses of values and results. Each kind of work and dtype has its own
function, because numba can't cache on disk a function that takes a compiled function as argument.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np

from mpinspect.counting.cpu import kernels
from mpinspect.counting.cpu.compiling import compiled, compiled_for, function_of_c
from mpinspect.counting.cpu.memory import (
    as_type,
    call,
    call_for_int,
    call_parallel,
    fetch_and_add,
    float64_of_bits,
    pointer,
)
from mpinspect.counting.cpu.vectors import largest_doubled

#: The fields of a job: address and number of the values; address and width (int64s) of a thread's results; threads and the values
#: of a thread's part; address of ``omp_get_thread_num``, or 0; results given out; values given out, part by part.
VALUES, _LENGTH, _RESULTS, _WIDTH, _THREADS, _PART, _THREAD_NUMBER, _GIVEN, _TAKEN = range(9)
#: Values taken at a time; parts are multiples of _WHOLE, so of whole blocks. Both are a few microseconds of work.
_CHUNK, _WHOLE = 1 << 15, 1 << 12
#: The dtypes of rows of the layout NARROW.
NARROW_FLOATS = ("float32", "float16", "bfloat16")
_FLOAT32, _FLOAT16, _BFLOAT16 = range(3)
#: Bytes that ``largest_doubled`` reads per turn.
_VECTORS = 256

carray: Any = numba.carray  # type: ignore[attr-defined]


@compiled
def job_at(address: Any) -> Any:
    """Return the fields of the job at an address."""
    return carray(pointer(address, np.int64(0)), (_TAKEN,))


@compiled
def result_of(address: Any) -> Any:
    """Return this thread's array of results: int64, zeros."""
    job = job_at(address)
    number = fetch_and_add(address + 8 * _GIVEN, 1)
    return carray(pointer(job[_RESULTS] + 8 * number * job[_WIDTH], np.int64(0)), (job[_WIDTH],))


@compiled
def own_part(address: Any) -> Any:
    """Return the number of the part that this thread begins with."""
    thread_number = job_at(address)[_THREAD_NUMBER]
    return call_for_int(thread_number) if thread_number else np.int64(0)


@compiled
def next_values(address: Any, own: Any, turn: Any) -> Any:
    """Return the next values of the part ``turn`` parts after one's own: first index, count (0: all taken), turn."""
    job = job_at(address)
    while turn < job[_THREADS]:
        part = (own + turn) % job[_THREADS]
        begin = part * job[_PART]
        end = min(begin + job[_PART], job[_LENGTH])
        start = begin + fetch_and_add(address + 8 * (_TAKEN + part), _CHUNK)
        if start < end:
            return start, min(_CHUNK, end - start), turn
        turn += 1
    return np.int64(0), np.int64(0), turn


@compiled
def _count_words(address: Any, dtype: Any, size: Any) -> None:
    """Count values of NARROW_FLOATS, of this place and ``size`` bytes."""
    counting, values = kernels.counting32(result_of(address)), job_at(address)[VALUES]
    own = own_part(address)
    start, length, turn = next_values(address, own, 0)
    while length:
        if dtype == _FLOAT32:
            kernels.add_float32(counting, values + size * start, length)
        else:
            kernels.add_narrow(counting, values + size * start, length, dtype == _BFLOAT16)
        start, length, turn = next_values(address, own, turn)
    kernels.finish32(counting)


def _count_float32(address: Any) -> None:
    _count_words(address, _FLOAT32, 4)


def _count_float16(address: Any) -> None:
    _count_words(address, _FLOAT16, 2)


def _count_bfloat16(address: Any) -> None:
    _count_words(address, _BFLOAT16, 2)


def _count_float64(address: Any) -> None:
    counting, values = kernels.counting64(result_of(address)), job_at(address)[VALUES]
    own = own_part(address)
    start, length, turn = next_values(address, own, 0)
    while length:
        kernels.add_float64(counting, values + 8 * start, length)
        start, length, turn = next_values(address, own, turn)
    kernels.finish64(counting)


@compiled
def _largest_bits(address: Any, length: Any, one: Any, size: Any) -> Any:
    """Return the largest magnitude's bits; ``one`` is 1 as an unsigned integer as wide as a value, ``size`` bytes."""
    whole = length * size // _VECTORS
    high = largest_doubled(address, whole, one) if whole else as_type(one - one, one)
    bits = carray(pointer(address, one), (length,))
    for i in range(whole * _VECTORS // size, length):
        # The sign is shifted out at the top.
        high = max(high, as_type(bits[i] << one, one))
    return np.int64(as_type(high >> one, one))


@compiled
def _find_largest(address: Any, one: Any, size: Any) -> None:
    values, own = job_at(address)[VALUES], own_part(address)
    result = result_of(address)
    high = np.int64(0)
    start, length, turn = next_values(address, own, 0)
    while length:
        high = max(high, _largest_bits(values + size * start, length, one, size))
        start, length, turn = next_values(address, own, turn)
    result[0] = high


def _largest_of_16_bits(address: Any) -> None:
    _find_largest(address, np.uint16(1), 2)


def _largest_of_32_bits(address: Any) -> None:
    _find_largest(address, np.uint32(1), 4)


def _largest_of_64_bits(address: Any) -> None:
    _find_largest(address, np.uint64(1), 8)


@compiled
def run(work: Any, values: Any, length: Any, results: Any, team: Any) -> Any:
    """Run the work on at most as many threads as ``results`` has rows (int64, zeros); return the number of rows used."""
    threads, width = results.shape
    job = np.zeros(_TAKEN + threads, np.int64)
    job[VALUES], job[_LENGTH], job[_RESULTS], job[_WIDTH] = values, length, results.ctypes.data, width
    job[_THREADS], job[_PART] = threads, -(-length // (threads * _WHOLE)) * _WHOLE
    if threads == 1:
        call(work, job.ctypes.data)
    else:
        parallel, job[_THREAD_NUMBER] = team
        call_parallel(parallel, work, job.ctypes.data, threads)
    return job[_GIVEN]


@compiled_for("void(int64, int64, int64, int64, int64, int64, UniTuple(int64, 2))")
def fill_row(work: Any, values: Any, length: Any, row: Any, row_length: Any, threads: Any, team: Any) -> None:
    """Count values into a row of ``counting.layout``.

    Args:
        work: ``address_of("count float32")``, or of another encoding.
        values, length: their address and number.
        row, row_length: address of int64s to overwrite, and their number.
        threads: number of threads that share the work; more than one requires a team.
        team: addresses of ``GOMP_parallel`` and ``omp_get_thread_num``, or zeros.
    """
    rows = np.zeros((threads, row_length), np.int64)
    used = run(work, values, length, rows, team)
    kernels.merge(rows[:used], carray(pointer(row, np.int64(0)), (row_length,)))


@compiled_for("void(int64[:, ::1], int64, int64, UniTuple(int64, 2), int64)")
def fill_rows(table: Any, row_length: Any, threads: Any, team: Any, shared_from: Any) -> None:
    """Count many tensors, one after the other, each into its row. Small ones share scratch memory, which stays in the cache.

    Args:
        table: shape (tensors, 5): work, values, length, row and place in NARROW_FLOATS of each.
        shared_from: the least length that is shared among threads.
    """
    counting = kernels.counting32(np.zeros(row_length, np.int64))
    for k in range(len(table)):
        work, values, length, address, dtype = table[k]
        if length >= shared_from:
            fill_row(work, values, length, address, row_length, threads, team)
            continue
        row = carray(pointer(address, np.int64(0)), (row_length,))
        row[:] = 0
        counting = kernels.continued(counting, row)
        if dtype == _FLOAT32:
            kernels.add_float32(counting, values, length)
        else:
            kernels.add_narrow(counting, values, length, dtype == _BFLOAT16)
        kernels.finish32(counting)


@compiled_for("float64(int64, int64, int64, int64, int64, int64, UniTuple(int64, 2))")
def largest(work: Any, values: Any, length: Any, mantissa_bits: Any, bias: Any, threads: Any, team: Any) -> Any:
    """Return the largest magnitude of 1 or more values; infinity if one is infinite, NaN if one is NaN.

    Args:
        mantissa_bits, bias: of the values' encoding. The other arguments are the same as in ``fill_row``.
    """
    results = np.zeros((threads, 1), np.int64)
    used = run(work, values, length, results, team)
    bits = results[:used].max()
    if mantissa_bits == 52:
        return float64_of_bits(bits)
    # Converted to float64, every other value is normal, so a flush-denormals mode has no effect.
    field, mantissa = bits >> mantissa_bits, bits & ((1 << mantissa_bits) - 1)
    if field > 2 * bias:
        return np.nan if mantissa else np.inf
    if field == 0:
        return np.ldexp(np.float64(mantissa), 1 - bias - mantissa_bits)
    return np.ldexp(np.float64(mantissa + (1 << mantissa_bits)), field - bias - mantissa_bits)


_WORK: dict[str, Callable[[Any], None]] = {
    "count float32": _count_float32,
    "count float64": _count_float64,
    "count float16": _count_float16,
    "count bfloat16": _count_bfloat16,
    "largest of 16 bits": _largest_of_16_bits,
    "largest of 32 bits": _largest_of_32_bits,
    "largest of 64 bits": _largest_of_64_bits,
}


@cache
def address_of(work: str) -> int:
    """Return the address of the C function for this work, which takes a job's address; compiled or loaded at first use."""
    return function_of_c(_WORK[work])
