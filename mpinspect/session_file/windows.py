"""A window of a session file as bytes: a JSON header and integer columns, compressed.

One column per figure, one entry per tensor, each in the narrowest type that holds it: reading a thousand tensors
is then a handful of array views, and most counters, being small or zero, take next to no room.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpinspect.session import TensorKey, Window
from mpinspect.session_file import records
from mpinspect.tensor_columns import PER_BIN, PER_PEAK, PER_TENSOR, SIGNIFICANDS, Context, Lost, TensorColumns, narrowed

#: zlib's fastest level: 1 ms for 100 tensors; higher levels save a tenth of the size for several times the time.
COMPRESSION_LEVEL = 1

_HEADER = struct.Struct("<I")


def encode(window: Window, key_ids: Mapping[TensorKey, int]) -> bytes:
    """Bytes of a window; ``key_ids`` gives the number that stands for each tensor."""
    tensors = TensorColumns.of(window.tensors)
    numbers = np.array([key_ids[key] for key in tensors.order], dtype=np.int64)
    columns = {"key": narrowed(numbers), "context": narrowed(tensors.context)}
    columns |= {name: narrowed(tensors.columns[name]) for name in (*PER_TENSOR, *PER_PEAK, *PER_BIN)}
    columns |= {name: tensors.columns[name].astype("<f8", copy=False) for name in SIGNIFICANDS}
    header = records.encode(
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


class Decoder:
    """Decodes the windows of one file; those of the same tensors share one tuple of keys."""

    def __init__(self) -> None:
        self._orders: dict[tuple[bytes, str], tuple[TensorKey, ...]] = {}

    def decode(self, payload: bytes, keys: Sequence[TensorKey]) -> Window:
        """The window that ``encode`` was given, as columns. ``keys``: by number; more may follow for later windows.

        Raises ValueError, KeyError, IndexError or zlib.error if it is none.
        """
        body = zlib.decompress(payload)
        (header_size,) = _HEADER.unpack_from(body)
        start = _HEADER.size + header_size
        header = records.decode(body[_HEADER.size : start])
        return Window(
            header["first_step"],
            header["last_step"],
            header["sampled_steps"],
            self._tensors(_columns(body, start, header["columns"]), header, keys),
            dict(header["gradient_peaks"]),
        )

    def _tensors(
        self, columns: dict[str, npt.NDArray[Any]], header: dict[str, Any], keys: Sequence[TensorKey]
    ) -> TensorColumns:
        contexts = tuple(
            Context(tuple(context["dtypes"]), context["passed_through"], context["floor_exponent"])
            for context in header["contexts"]
        )
        lost = tuple(Lost(*entry) for entry in header["lost_updates"])
        return TensorColumns(self._order(columns["key"], keys), columns, contexts, columns["context"], lost)

    def _order(self, numbers: npt.NDArray[Any], keys: Sequence[TensorKey]) -> tuple[TensorKey, ...]:
        written = numbers.tobytes(), numbers.dtype.str
        if written not in self._orders:
            self._orders[written] = tuple(keys[number] for number in numbers.tolist())
        return self._orders[written]


def _columns(body: bytes, start: int, listed: list[tuple[str, str, int]]) -> dict[str, npt.NDArray[Any]]:
    """Views into ``body``."""
    columns: dict[str, npt.NDArray[Any]] = {}
    for name, dtype, length in listed:
        columns[name] = np.frombuffer(body, dtype=dtype, count=length, offset=start)
        start += columns[name].nbytes
    return columns
