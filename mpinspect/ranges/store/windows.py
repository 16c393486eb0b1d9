"""A window of a session file as bytes: a JSON header and integer columns, compressed.

Each figure is a column with one entry per tensor, stored in the narrowest type that holds it: reading a thousand
tensors then takes a handful of array views, and most counters, being small or zero, take next to no room.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpinspect.ranges.store.checks import Limits, check_counts
from mpinspect.ranges.store.frames import json_bytes
from mpinspect.ranges.windows.columns import (
    PER_BIN,
    PER_PEAK,
    PER_TENSOR,
    SIGNIFICANDS,
    Context,
    Lost,
    TensorColumns,
    narrowed,
)
from mpinspect.ranges.windows.tensors import Count, Exponent, TensorKey
from mpinspect.ranges.windows.window import Window
from mpinspect.runtime.decoding import Between, DecodingError, OneOf, inflated, parsed, typed

#: zlib's fastest level: 1 ms for 100 tensors; higher levels save a tenth of the size for several times the time.
COMPRESSION_LEVEL = 1

_HEADER = struct.Struct("<I")
#: The types of columns, as NumPy names them.
_INTEGERS, _FLOAT = ("|i1", "<i2", "<i4", "<i8"), "<f8"


def encode(window: Window, key_ids: Mapping[TensorKey, int]) -> bytes:
    """Return a window as bytes; ``key_ids`` gives each tensor's number in the file."""
    tensors = window.columns()
    numbers = np.array([key_ids[key] for key in tensors.order], dtype=np.int64)
    columns = {"key": narrowed(numbers), "context": narrowed(tensors.context)}
    columns |= {name: narrowed(tensors.columns[name]) for name in (*PER_TENSOR, *PER_PEAK, *PER_BIN)}
    columns |= {name: tensors.columns[name].astype("<f8", copy=False) for name in SIGNIFICANDS}
    header = json_bytes(
        {
            "first_step": window.first_step,
            "last_step": window.last_step,
            "sampled_steps": window.sampled_steps,
            "gradient_peaks": [list(item) for item in window.gradient_peaks.items()],
            "contexts": [context._asdict() for context in tensors.contexts],
            "lost_updates": tensors.lost_updates,
            "columns": [[name, column.dtype.str, len(column)] for name, column in columns.items()],
        }
    )
    body = b"".join([_HEADER.pack(len(header)), header, *(column.tobytes() for column in columns.values())])
    return zlib.compress(body, COMPRESSION_LEVEL)


class _Column(NamedTuple):
    """The name, type and length of a column; the columns follow the header in this order."""

    name: str
    type: Annotated[str, OneOf((*_INTEGERS, _FLOAT))]
    entries: Count


class _Peak(NamedTuple):
    exponent: Exponent
    steps: Annotated[int, Between(1, (1 << 63) - 1)]


@dataclass(frozen=True)
class _Header:
    first_step: Count
    last_step: Count
    sampled_steps: Count
    gradient_peaks: tuple[_Peak, ...]
    contexts: tuple[Context, ...]
    lost_updates: tuple[Lost, ...]
    columns: tuple[_Column, ...]


class Decoder:
    """Decodes the windows of one file; windows of the same tensors share one tuple of keys."""

    def __init__(self) -> None:
        self._orders: dict[tuple[bytes, str], tuple[TensorKey, ...]] = {}
        self._limits = Limits()

    def decode(self, payload: bytes, keys: Sequence[TensorKey]) -> Window:
        """Return the window encoded in ``payload``, as columns. ``keys`` are the tensors' keys by number so far.

        Raises ValueError if the payload is no window, or if the windows so far exceed the limits of a file.
        """
        body = inflated(payload, self._limits.largest)
        header_size = _HEADER.unpack_from(body)[0] if len(body) >= _HEADER.size else 0
        start = _HEADER.size + header_size
        header = typed(_Header, parsed(body[_HEADER.size : start]))
        columns = _columns(body, start, header.columns)
        order = self._order(columns["key"], keys)
        tensors = TensorColumns(order, columns, header.contexts, columns["context"], header.lost_updates)
        check_counts(tensors)
        self._limits.take(columns["key"], tensors, len(body))
        return Window(header.first_step, header.last_step, header.sampled_steps, tensors, dict(header.gradient_peaks))

    def _order(self, numbers: npt.NDArray[Any], keys: Sequence[TensorKey]) -> tuple[TensorKey, ...]:
        written = numbers.tobytes(), numbers.dtype.str
        if written not in self._orders:
            self._orders[written] = _named(numbers.tolist(), keys)
        return self._orders[written]


def _named(numbers: list[int], keys: Sequence[TensorKey]) -> tuple[TensorKey, ...]:
    if numbers and not 0 <= min(numbers) <= max(numbers) < len(keys):
        raise DecodingError("has a tensor without a name")
    order = tuple(keys[number] for number in numbers)
    if len(set(order)) < len(order):
        raise DecodingError("has a tensor twice")
    return order


def _columns(body: bytes, start: int, listed: Sequence[_Column]) -> dict[str, npt.NDArray[Any]]:
    """Return the listed columns as views into ``body``, including columns unknown to this version.

    Raises DecodingError if a required column is missing or has a wrong type.
    """
    columns: dict[str, npt.NDArray[Any]] = {}
    for name, dtype, length in listed:
        columns[name] = np.frombuffer(body, dtype=dtype, count=length, offset=start)
        start += columns[name].nbytes
    for name in ("key", "context", *PER_TENSOR, *PER_PEAK, *PER_BIN, *SIGNIFICANDS):
        if name not in columns or (columns[name].dtype == _FLOAT) != (name in SIGNIFICANDS):
            raise DecodingError(f"has no column {name!r}, or one of a wrong type")
    return columns
