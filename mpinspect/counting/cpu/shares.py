"""The loops of ``kernels`` as C functions that the threads of an OpenMP team run together.

All of them get the same job: an array of int64 that says where the values lie and where the rows of the threads. A thread
draws a number, which is its row's, and then chunks of values, until there are none left: one whose core is busy
with something else takes fewer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from mpinspect.counting.cpu.compiling import compiled, function_of_c
from mpinspect.counting.cpu.kernels import add_bfloat16, add_float16, add_float32, add_float64
from mpinspect.counting.cpu.memory import fetch_and_add, pointer

#: The fields of a job: addresses of the values' bits, of the rows and of their ends; lengths; what threads draw from.
_BITS, _ROWS, _ENDS, _LENGTH, _ITEM_SIZE, _ROW_LENGTH, _CHUNK, _NUMBERS, _NEXT = range(9)
_FIELDS = 9

carray: Any = numba.carray  # type: ignore[attr-defined]

Bits = npt.NDArray[np.unsignedinteger[Any]]


def job(bits: Bits, rows: npt.NDArray[np.int64], ends: Bits, chunk: int) -> npt.NDArray[np.int64]:
    """What a team is to do; the arrays must outlive it.

    Args:
        bits: the values', one-dimensional, contiguous.
        rows, ends: one row and its two ends for each thread, as the loops of ``kernels`` take them.
        chunk: values to take at a time.
    """
    lengths = (len(bits), bits.itemsize, rows.shape[1], chunk)
    return np.array([bits.ctypes.data, rows.ctypes.data, ends.ctypes.data, *lengths, 0, 0], np.int64)


@compiled
def _fields(address: Any) -> Any:
    return carray(pointer(address, np.int64(0)), (_FIELDS,))


@compiled
def _row(job: Any, number: Any) -> Any:
    return carray(pointer(job[_ROWS] + 8 * number * job[_ROW_LENGTH], np.int64(0)), (job[_ROW_LENGTH],))


@compiled
def _ends(job: Any, number: Any, word: Any) -> Any:
    all_ends = carray(pointer(job[_ENDS], word), (2 * (number + 1),))
    return all_ends[2 * number :]


@compiled
def _next(address: Any, job: Any) -> Any:
    return fetch_and_add(address + 8 * _NEXT, job[_CHUNK])


@compiled
def _values(job: Any, start: Any, word: Any) -> Any:
    return carray(pointer(job[_BITS] + start * job[_ITEM_SIZE], word), (min(job[_CHUNK], job[_LENGTH] - start),))


# Four times alike: numba keeps nothing on disk of a function that is handed a compiled one.


def _share_of_float32(address: Any) -> None:
    job = _fields(address)
    number = fetch_and_add(address + 8 * _NUMBERS, 1)
    row, ends = _row(job, number), _ends(job, number, np.uint32(0))
    start = _next(address, job)
    while start < job[_LENGTH]:
        add_float32(_values(job, start, np.uint32(0)), row, ends)
        start = _next(address, job)


def _share_of_float64(address: Any) -> None:
    job = _fields(address)
    number = fetch_and_add(address + 8 * _NUMBERS, 1)
    row, ends = _row(job, number), _ends(job, number, np.uint64(0))
    start = _next(address, job)
    while start < job[_LENGTH]:
        add_float64(_values(job, start, np.uint64(0)), row, ends)
        start = _next(address, job)


def _share_of_float16(address: Any) -> None:
    job = _fields(address)
    number = fetch_and_add(address + 8 * _NUMBERS, 1)
    row, ends = _row(job, number), _ends(job, number, np.uint32(0))
    start = _next(address, job)
    while start < job[_LENGTH]:
        add_float16(_values(job, start, np.uint16(0)), row, ends)
        start = _next(address, job)


def _share_of_bfloat16(address: Any) -> None:
    job = _fields(address)
    number = fetch_and_add(address + 8 * _NUMBERS, 1)
    row, ends = _row(job, number), _ends(job, number, np.uint32(0))
    start = _next(address, job)
    while start < job[_LENGTH]:
        add_bfloat16(_values(job, start, np.uint16(0)), row, ends)
        start = _next(address, job)


_SHARES: dict[str, Callable[[Any], None]] = {
    "float32": _share_of_float32,
    "float64": _share_of_float64,
    "float16": _share_of_float16,
    "bfloat16": _share_of_bfloat16,
}


@cache
def address_of(encoding: str) -> int:
    """The C function, which takes a job's address, for values of this encoding; compiled, or found, at the first call."""
    return function_of_c(_SHARES[encoding])
