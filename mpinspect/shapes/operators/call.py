"""Read one call of an operator (tensors and scalars by position), and derive the shapes and strides of changed tensors."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mpinspect.shapes.records import ITEM_SIZES, Operand, contiguous_strides

#: One argument of an operator: a tensor, a list of tensors, or None for anything else.
Input = Operand | Sequence[Operand | None] | None


class UnknownSizesError(Exception):
    """The recorded shapes and scalars do not determine a product's sizes."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator.

    Args:
        op: the operator's name, "aten::mm".
        inputs: one entry for each positional argument, a sequence for a list of tensors.
        scalars: one entry for each positional argument: Python values or the strings that the profiler writes.
        output: the (first) result; None if unknown.
    """

    op: str
    inputs: Sequence[Input]
    scalars: Sequence[object]
    output: Operand | None

    def tensor(self, place: int, dims: int | None = None) -> Operand:
        """Return the tensor at a position.

        Raises:
            UnknownSizesError: there is no tensor, or its number of dimensions is not ``dims``.
        """
        found = self.optional(place)
        if found is None or (dims is not None and len(found.shape) != dims):
            raise UnknownSizesError
        return found

    def optional(self, place: int) -> Operand | None:
        """Return the tensor at a position, or None."""
        found = self._input(place)
        return _plain(found) if isinstance(found, Operand) else None

    def tensors(self, place: int) -> list[Operand]:
        """Return the list of tensors at a position; empty if unknown."""
        found = self._input(place)
        if found is None or isinstance(found, Operand):
            return []
        return [_plain(one) for one in found if one is not None]

    def _input(self, place: int) -> Input:
        return next(iter(self.inputs[place : place + 1]), None)

    def value(self, place: int, default: object = None) -> object:
        """Return the scalar at a position; the default if the scalar was not passed or not recorded."""
        found = next(iter(self.scalars[place : place + 1]), None)
        if isinstance(found, str):
            found = _read(found)
        return default if found is None else found

    def integer(self, place: int, default: int | None = None) -> int:
        """Return the int at a position. Raises UnknownSizesError if the value is not an int."""
        found = self.value(place, default)
        if not isinstance(found, int):
            raise UnknownSizesError
        return int(found)

    def flag(self, place: int) -> bool:
        """Return the bool at a position; False if it was not passed or not recorded."""
        return bool(self.value(place))

    def sizes(self, place: int, dims: int) -> tuple[int, ...]:
        """Return the ints at a position, one for each of ``dims`` dimensions; a single int applies to all dimensions.

        Raises:
            UnknownSizesError: there are no ints, or their number is neither 1 nor ``dims``.
        """
        found = self.value(place)
        if isinstance(found, int):
            found = [found]
        if not isinstance(found, Sequence) or not all(isinstance(size, int) for size in found):
            raise UnknownSizesError
        if len(found) == 1:
            return tuple(found) * dims
        if len(found) != dims:
            raise UnknownSizesError
        return tuple(found)

    def result(self, after: int) -> Operand | None:
        """Return the result if known, else the tensor passed as ``out=``, which the profiler writes after the arguments."""
        if self.output is not None:
            return self.output
        behind = [one for one in self.inputs[after:] if isinstance(one, Operand)]
        return next(reversed(behind), None)


def _plain(found: Operand) -> Operand:
    """Drop strides if their number differs from the number of sizes."""
    if found.strides is None or len(found.strides) == len(found.shape):
        return found
    return Operand(found.shape, None, found.dtype, found.offset)


def _read(text: str) -> object:
    if not text:
        return None
    try:
        value: object = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return value


def item_size(dtype: str) -> int:
    """Return the bytes of one element; dtypes missing from the table contain their bits in the name ("uint16", "quint8")."""
    known = ITEM_SIZES.get(dtype)
    if known is not None:
        return known
    return max(int(next(iter(re.findall(r"\d+", dtype)), 8)) // 8, 1)


def memory(operand: Operand | None) -> int:
    """Return the bytes that a tensor occupies: expanded elements (stride 0) count once."""
    if operand is None:
        return 0
    sizes = operand.shape
    if operand.strides is not None:
        sizes = tuple(size for size, stride in zip(operand.shape, operand.strides, strict=False) if stride or not size)
    return math.prod(sizes) * item_size(operand.dtype)


def traffic(*operands: Operand | None) -> int:
    """Return the least memory traffic in bytes: every operand read or written once."""
    return sum(memory(operand) for operand in operands)


def fresh(shape: Sequence[int], dtype: str) -> Operand:
    """Return a result tensor as torch allocates it: row-major, at the start of its storage."""
    return Operand(tuple(shape), contiguous_strides(shape), dtype)


def transposed(operand: Operand) -> Operand:
    """Exchange the last two dimensions without moving memory."""
    shape, strides = operand.shape, operand.strides
    if strides is not None:
        strides = (*strides[:-2], strides[-1], strides[-2])
    return _with(operand, (*shape[:-2], shape[-1], shape[-2]), strides)


def column(operand: Operand) -> Operand:
    """View a vector as a matrix of one column."""
    strides = operand.strides
    if strides is not None:
        strides = (*strides, 1)
    return _with(operand, (*operand.shape, 1), strides)


def leading(operand: Operand) -> Operand:
    """View a tensor with a leading dimension of size 1: a vector as a matrix of one row, an image as a batch of one."""
    strides = operand.strides
    if strides is not None:
        strides = (operand.shape[0] * strides[0], *strides)
    return _with(operand, (1, *operand.shape), strides)


def folded(operand: Operand, kept: int = 1) -> Operand:
    """Merge all dimensions except the last ``kept`` into one, like torch.reshape: a view if the strides allow it, else a copy.

    Raises:
        UnknownSizesError: the operand has fewer than ``kept`` dimensions.
    """
    cut = len(operand.shape) - kept
    if cut < 0:
        raise UnknownSizesError
    lead, rest = operand.shape[:cut], operand.shape[cut:]
    shape = (math.prod(lead), *rest)
    if operand.strides is None:
        return _with(operand, shape, None)
    if 0 in shape:
        return _with(operand, shape, contiguous_strides(shape))
    stride = _merged(lead, operand.strides[:cut])
    if stride is None:
        return Operand(shape, contiguous_strides(shape), operand.dtype)
    # With a single row, no stride leads to a next row: torch's view uses the stride of contiguous memory.
    lone = next(iter(rest), 1)
    return _with(operand, shape, (stride or lone, *operand.strides[cut:]))


def expanded(operand: Operand, batch: Sequence[int]) -> Operand:
    """Broadcast an operand to other leading dimensions (all before the last two)."""
    missing = len(batch) + 2 - len(operand.shape)
    shape = (*batch, *operand.shape[-2:])
    if operand.strides is None:
        return _with(operand, shape, None)
    old = zip(operand.shape[:-2], operand.strides[:-2], strict=False)
    kept = [
        0 if size == 1 and wanted != 1 else stride for (size, stride), wanted in zip(old, batch[missing:], strict=False)
    ]
    return _with(operand, shape, (*[0] * missing, *kept, *operand.strides[-2:]))


def is_channels_last(operand: Operand) -> bool | None:
    """Return whether an image is stored NHWC or NDHWC; None if strides are unknown or NCHW and NHWC strides coincide."""
    strides = operand.strides
    if strides is None or len(operand.shape) < 3 or len(strides) != len(operand.shape):
        return None
    if not _has_strides(operand, channels_last(operand.shape)):
        return strides[1] == 1 and operand.shape[1] > 1
    return None if _has_strides(operand, contiguous_strides(operand.shape)) else True


def _has_strides(operand: Operand, wanted: Sequence[int]) -> bool:
    """Return whether an operand has these strides, except in dimensions of size 1."""
    rows = zip(operand.shape, operand.strides or (), wanted, strict=True)
    return all(size <= 1 or stride == other for size, stride, other in rows)


def channels_last(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor (batch, channels, *positions) that is stored (batch, *positions, channels)."""
    stored = contiguous_strides((shape[0], *shape[2:], shape[1]))
    return (stored[0], stored[-1], *stored[1:-1])


def _merged(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """Return the stride of merged dimensions; 0 if they hold one element in total; None if no single stride fits."""
    merged, wanted = 0, 0
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if merged == 0 and wanted == 0:
            merged = stride
        elif stride != wanted:
            return None
        wanted = stride * size
    return merged


def _with(operand: Operand, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> Operand:
    return Operand(shape, strides, operand.dtype, operand.offset)
