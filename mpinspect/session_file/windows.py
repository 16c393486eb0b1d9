"""A window of a session file as bytes: a JSON header and integer columns, compressed.

One column per figure, one entry per tensor, each in the narrowest type that holds it: reading a thousand tensors
is then a handful of array copies, and most counters, being small or zero, take next to no room.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpinspect.exponents import ExponentHistogram, IntArray
from mpinspect.session import LostUpdates, TensorKey, TensorWindow, Window
from mpinspect.session_file import records

#: zlib's fastest level: 1 ms for 100 tensors; higher levels save a tenth of the size for several times the time.
COMPRESSION_LEVEL = 1

_HEADER = struct.Struct("<I")
_INTEGER_TYPES = ("<i1", "<i2", "<i4", "<i8")


def encode(window: Window, key_ids: Mapping[TensorKey, int]) -> bytes:
    """Bytes of a window; ``key_ids`` gives the number that stands for each tensor."""
    tensors = list(window.tensors.values())
    histograms = [tensor.histogram for tensor in tensors]
    contexts: dict[_Context, int] = {}
    context_of = [contexts.setdefault(_Context.of(tensor), len(contexts)) for tensor in tensors]
    columns = {
        "key": _integers(key_ids[key] for key in window.tensors),
        "context": _integers(context_of),
        "samples": _integers(tensor.samples for tensor in tensors),
        "numel_max": _integers(tensor.numel_max for tensor in tensors),
        "min_exponent": _integers(histogram.min_exponent for histogram in histograms),
        "bins": _integers(len(histogram.counts) for histogram in histograms),
        "zeros": _integers(histogram.zeros for histogram in histograms),
        "infs": _integers(histogram.infs for histogram in histograms),
        "nans": _integers(histogram.nans for histogram in histograms),
        "min_significand": np.array([histogram.min_significand for histogram in histograms], dtype="<f8"),
        "max_significand": np.array([histogram.max_significand for histogram in histograms], dtype="<f8"),
        "peaks": _integers(len(tensor.peaks) for tensor in tensors),
        "peak_exponents": _integers(exponent for tensor in tensors for exponent in tensor.peaks),
        "peak_counts": _integers(count for tensor in tensors for count in tensor.peaks.values()),
        "counts": _joined([histogram.counts for histogram in histograms]),
        "powers_of_two": _joined([histogram.powers_of_two for histogram in histograms]),
        "near_top": _joined([histogram.near_top for histogram in histograms]),
    }
    header = records.encode(
        {
            "first_step": window.first_step,
            "last_step": window.last_step,
            "sampled_steps": window.sampled_steps,
            "gradient_peaks": [list(item) for item in window.gradient_peaks.items()],
            "contexts": [context._asdict() for context in contexts],
            "lost_updates": _lost_updates(tensors),
            "columns": [[name, column.dtype.str, len(column)] for name, column in columns.items()],
        }
    )
    body = b"".join([_HEADER.pack(len(header)), header, *(column.tobytes() for column in columns.values())])
    return zlib.compress(body, COMPRESSION_LEVEL)


def decode(payload: bytes, keys: Sequence[TensorKey]) -> Window:
    """The window that ``encode`` was given. Raises ValueError, KeyError, IndexError or zlib.error if it is none."""
    body = zlib.decompress(payload)
    (header_size,) = _HEADER.unpack_from(body)
    start = _HEADER.size + header_size
    header = records.decode(body[_HEADER.size : start])
    return Window(
        header["first_step"],
        header["last_step"],
        header["sampled_steps"],
        _tensors(_columns(body, start, header["columns"]), header, keys),
        dict(header["gradient_peaks"]),
    )


class _Context(NamedTuple):
    """What many tensors of a window have in common, written once."""

    dtypes: tuple[str, ...]
    passed_through: str
    floor_exponent: int | None

    @classmethod
    def of(cls, tensor: TensorWindow) -> _Context:
        return cls(tuple(tensor.dtypes), tensor.passed_through, tensor.floor_exponent)


def _lost_updates(tensors: list[TensorWindow]) -> list[list[Any]]:
    """[position of the tensor, format, lost, non-zero, measured] of each that has them."""
    return [
        [position, name, updates.lost, updates.nonzero, updates.measured]
        for position, tensor in enumerate(tensors)
        for name, updates in tensor.lost_updates.items()
    ]


def _integers(values: Iterable[int]) -> npt.NDArray[Any]:
    return _narrowed(np.array(list(values), dtype=np.int64))


def _joined(arrays: list[IntArray]) -> npt.NDArray[Any]:
    return _narrowed(np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64))


def _narrowed(values: IntArray) -> npt.NDArray[Any]:
    """The same integers in the narrowest signed type that holds them all."""
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    for dtype in _INTEGER_TYPES:
        limits = np.iinfo(dtype)
        if limits.min <= low and high <= limits.max:
            return values.astype(dtype)
    raise AssertionError("an int64 fits <i8")


def _columns(body: bytes, start: int, listed: list[tuple[str, str, int]]) -> dict[str, npt.NDArray[Any]]:
    columns: dict[str, npt.NDArray[Any]] = {}
    for name, dtype, length in listed:
        column = np.frombuffer(body, dtype=dtype, count=length, offset=start)
        start += column.nbytes
        columns[name] = column.astype(np.float64 if column.dtype.kind == "f" else np.int64)
    return columns


def _tensors(
    columns: dict[str, npt.NDArray[Any]], header: dict[str, Any], keys: Sequence[TensorKey]
) -> dict[TensorKey, TensorWindow]:
    contexts = [
        _Context(tuple(context["dtypes"]), context["passed_through"], context["floor_exponent"])
        for context in header["contexts"]
    ]
    lost: dict[int, dict[str, LostUpdates]] = {}
    for position, name, lost_count, nonzero, measured in header["lost_updates"]:
        lost.setdefault(position, {})[name] = LostUpdates(lost_count, nonzero, measured)
    figures = (columns[name].tolist() for name in ("key", "context", "samples", "numel_max"))
    rows = zip(*figures, _histograms(columns), _peaks(columns), strict=True)
    tensors: dict[TensorKey, TensorWindow] = {}
    for position, (key, context, samples, numel_max, histogram, peaks) in enumerate(rows):
        dtypes, passed_through, floor_exponent = contexts[context]
        tensors[keys[key]] = TensorWindow(
            histogram, samples, peaks, dtypes, passed_through, floor_exponent, lost.get(position, {}), numel_max
        )
    return tensors


def _histograms(columns: dict[str, npt.NDArray[Any]]) -> list[ExponentHistogram]:
    """One per tensor: views into the columns, which the window's histograms share."""
    counts, powers, tops = columns["counts"], columns["powers_of_two"], columns["near_top"]
    spans = _spans(columns["bins"], len(counts))
    if len(powers) != len(counts) or len(tops) != len(counts):
        raise ValueError("a window has edge counters for other bins than counts")
    scalars = ("min_exponent", "zeros", "infs", "nans", "min_significand", "max_significand")
    figures = zip(*(columns[name].tolist() for name in scalars), strict=True)
    return [
        ExponentHistogram(counts[span], powers[span], tops[span], *row)
        for span, row in zip(spans, figures, strict=True)
    ]


def _peaks(columns: dict[str, npt.NDArray[Any]]) -> list[dict[int, int]]:
    pairs = list(zip(columns["peak_exponents"].tolist(), columns["peak_counts"].tolist(), strict=True))
    return [dict(pairs[span]) for span in _spans(columns["peaks"], len(pairs))]


def _spans(lengths: npt.NDArray[Any], total: int) -> list[slice]:
    """Where each tensor's entries lie in a column that joins them."""
    ends = list(accumulate(lengths.tolist(), initial=0))
    if ends[-1] != total:
        raise ValueError(f"a window's column has {total} entries where its tensors need {ends[-1]}")
    return [slice(start, end) for start, end in pairwise(ends)]
