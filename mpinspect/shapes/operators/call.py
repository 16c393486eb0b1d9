"""One call of an operator: its tensors and scalars by position, whoever wrote them down."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from mpinspect.shapes.records import Operand

#: What may stand at one position of an operator's arguments.
Input = Operand | Sequence[Operand | None] | None


class NotToldError(Exception):
    """The shapes and scalars at hand don't tell the product."""


@dataclass(frozen=True, slots=True)
class Call:
    """An operator's call.

    Args:
        op: as "aten::mm".
        inputs: one entry a positional argument, a sequence for a list of tensors.
        scalars: likewise, Python's values or the strings that the profiler writes.
        output: the (first) result; None where unknown.
    """

    op: str
    inputs: Sequence[Input]
    scalars: Sequence[object]
    output: Operand | None

    def tensor(self, place: int, dims: int | None = None) -> Operand:
        """The tensor at a position, with ``dims`` dimensions if that is given."""
        found = self.optional(place)
        if found is None or (dims is not None and len(found.shape) != dims):
            raise NotToldError
        return found

    def optional(self, place: int) -> Operand | None:
        """The tensor at a position, or None."""
        found = self.inputs[place] if place < len(self.inputs) else None
        return _plain(found) if isinstance(found, Operand) else None

    def tensors(self, place: int) -> list[Operand]:
        """The list of tensors at a position; empty where unknown."""
        found = self.inputs[place] if place < len(self.inputs) else None
        if found is None or isinstance(found, Operand):
            return []
        return [_plain(one) for one in found if one is not None]

    def value(self, place: int, default: object = None) -> object:
        """The scalar at a position; the default where it was not passed or not written down."""
        found = self.scalars[place] if place < len(self.scalars) else None
        if isinstance(found, str):
            found = _read(found)
        return default if found is None else found

    def integer(self, place: int, default: int | None = None) -> int:
        """An int at a position."""
        found = self.value(place, default)
        if not isinstance(found, int):
            raise NotToldError
        return int(found)

    def flag(self, place: int, default: bool = False) -> bool:
        """A bool at a position."""
        return bool(self.value(place, default))

    def sizes(self, place: int, dims: int, default: int | None = None) -> tuple[int, ...]:
        """Ints at a position, one a spatial dimension; one int stands for all of them."""
        found = self.value(place, default)
        if isinstance(found, int):
            found = [found]
        if not isinstance(found, Sequence) or not all(isinstance(size, int) for size in found):
            raise NotToldError
        if len(found) == 1:
            return tuple(found) * dims
        if len(found) != dims:
            raise NotToldError
        return tuple(found)

    def result(self, after: int) -> Operand | None:
        """The result: as known, or the tensor passed as ``out=``, which the profiler writes behind the arguments."""
        if self.output is not None:
            return self.output
        behind = [one for one in self.inputs[after:] if isinstance(one, Operand)]
        return behind[-1] if behind else None


def _plain(found: Operand) -> Operand:
    """Strides that are not those of its shape are not known."""
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
