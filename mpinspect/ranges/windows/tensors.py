"""Frozen records of one tensor and of its counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, NamedTuple

from mpinspect.numeric.exponents import ExponentHistogram, merge, ratio
from mpinspect.numeric.formats import FORMATS
from mpinspect.ranges.kinds import KINDS
from mpinspect.runtime.decoding import Between, OneOf

#: Values of ``TensorInfo.held``. "": unknown, or a single process. "own": each rank has its own value, like a gradient before
#: the all-reduce. "shard": a part of a tensor whose elements are divided among the ranks. "replica": a copy.
HELD = ("", "own", "shard", "replica")
# Allowed values of fields, checked when a session is read from a file (``decoding.typed``).
Kind = Annotated[str, OneOf(KINDS)]
#: A number of steps or elements; the file's columns have the same range.
Count = Annotated[int, Between(0, (1 << 63) - 1)]
#: Limit of a magnitude's exponent: float64's -1074..1023, shifted by a float64 loss scale, up to the next power of two.
LARGEST_EXPONENT = 4096
Exponent = Annotated[int, Between(-LARGEST_EXPONENT, LARGEST_EXPONENT)]


class TensorKey(NamedTuple):
    """Identifies a tensor by the dotted path of its parameter (of its module, for the activation kinds) and its kind."""

    name: str
    kind: Kind


@dataclass(frozen=True)
class TensorInfo:
    """One tensor that the inspector watches, whether or not it was ever seen.

    Args:
        name, kind: see TensorKey.
        module: dotted path of the module that owns it ("" is the model itself).
        module_type: class name of that module.
        shape: shape of the parameter; empty for activations, whose shape varies.
        dtype: storage dtype of the parameter ("float32"); "" for activations.
        note: why the tensor can't be captured, if known ("frozen: requires_grad is False"), else "".
        held: how this process's tensor relates to the other ranks' tensors of the same name: one of HELD.
        replicas: number of ranks that hold the same elements as this one, itself included; 1 unless replicated.
        is_first: whether this rank is the first with these replicas; a sum over ranks includes only the first one's counts.

    ``shape`` is the shape of the whole tensor, even if a rank holds only a shard.
    """

    name: str
    kind: Kind
    module: str
    module_type: str
    shape: tuple[Count, ...] = ()
    dtype: str = ""
    note: str = ""
    held: Annotated[str, OneOf(HELD)] = ""
    replicas: Count = 1
    is_first: bool = True

    @property
    def key(self) -> TensorKey:
        return TensorKey(self.name, self.kind)


@dataclass(frozen=True)
class LostUpdates:
    """Parameter updates that are lost if the weights are stored in a given format: w + dw rounds back to w.

    ``measured`` is True if the weights really are stored in the format: a lost update is then a weight that did not
    change despite a non-zero gradient. Otherwise the losses were computed by rounding each w and dw of a wider weight.
    """

    lost: int
    nonzero: int
    measured: bool = False

    def __add__(self, other: LostUpdates) -> LostUpdates:
        return LostUpdates(self.lost + other.lost, self.nonzero + other.nonzero, self.measured and other.measured)

    @property
    def fraction(self) -> float:
        """Share of the non-zero updates that are lost, 0..1."""
        return ratio(self.lost, self.nonzero)


#: The zero of the addition of LostUpdates.
NO_LOST_UPDATES = LostUpdates(0, 0, measured=True)


@dataclass(frozen=True)
class TensorWindow:
    """The counts of one tensor over one window of steps.

    Args:
        histogram: unscaled values of all samples together.
        samples: number of tensors counted (a module called twice gives two per step, each micro-batch one).
        peaks: ``peak_exponent`` (exponent of the largest magnitude, rounded to 11 bits) -> number of samples.
        dtypes: storage dtypes of the tensors counted.
        passed_through: name of the narrowest format that the values were rounded to before counting ("float16" under
            FP16 autocast, even for the FP32 ``.grad``), "float32" for unrounded values.
        floor_exponent: visibility floor: unscaled magnitudes up to 2^floor_exponent may have been flushed before
            counting (the format's flush edge divided by the smallest scale used); None if no value was flushed before counting.
        lost_updates: lost updates by name of the storage format; only for the kind "update".
        numel_max: number of elements of the largest single sample.
    """

    histogram: ExponentHistogram
    samples: int
    peaks: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    dtypes: tuple[str, ...] = ("float32",)
    passed_through: str = "float32"
    floor_exponent: int | None = None
    lost_updates: Mapping[str, LostUpdates] = field(default_factory=lambda: MappingProxyType({}))
    numel_max: int = 0


def merge_tensor_windows(parts: list[TensorWindow]) -> TensorWindow:
    """Merge windows of one tensor: add the counts, and take the highest floor and the narrowest format."""
    if len(parts) == 1:
        return parts[0]
    lost: dict[str, LostUpdates] = {}
    for part in parts:
        for name, updates in part.lost_updates.items():
            lost[name] = lost.get(name, NO_LOST_UPDATES) + updates
    return TensorWindow(
        merge(part.histogram for part in parts),
        sum(part.samples for part in parts),
        add_counts(part.peaks for part in parts),
        tuple(sorted({dtype for part in parts for dtype in part.dtypes})),
        narrowest(part.passed_through for part in parts),
        max((part.floor_exponent for part in parts if part.floor_exponent is not None), default=None),
        lost,
        max(part.numel_max for part in parts),
    )


def narrowest(formats: Iterable[str]) -> str:
    """Return the name of the format that flushes most; an unknown format counts as the worst."""
    return max(formats, key=lambda name: (FORMATS[name].flush_edge if name in FORMATS else float("inf"), name))


def add_counts(parts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """Return the sum of mappings exponent -> count, sorted by exponent."""
    total: dict[int, int] = {}
    for part in parts:
        for exponent, count in part.items():
            total[exponent] = total.get(exponent, 0) + count
    return dict(sorted(total.items()))


def floor_exponent(format_name: str, scale: float | None) -> int | None:
    """Return the largest exponent of an unscaled magnitude that a format may have flushed at a loss scale.

    This applies to values that were rounded to the format before counting. None for float32: the values were not rounded.
    An unknown scale counts as 1.
    """
    if format_name == "float32":
        return None
    return math.ceil(math.log2(FORMATS[format_name].flush_edge) - math.log2(scale or 1.0))


def overflow_exponent(format_name: str, scale: float | None) -> int:
    """Return the smallest unscaled exponent of a magnitude that overflowed to infinity in a format at a loss scale."""
    return math.floor(FORMATS[format_name].max_exponent + 1 - math.log2(scale or 1.0))
