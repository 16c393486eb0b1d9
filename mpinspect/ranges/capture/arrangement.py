"""Arrangements: the tensor and loss scale of each sample of a step, to add up rows without a loop over tensors.

An arrangement depends on names and scales, not on values. Consecutive steps mostly have equal arrangements and share one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mpinspect.numeric.formats import floor_log2, is_power_of_two
from mpinspect.ranges.capture.backward_scale import BackwardScale
from mpinspect.ranges.kinds import GRADIENT_KINDS
from mpinspect.ranges.windows.columns import Context
from mpinspect.ranges.windows.tensors import TensorKey, floor_exponent, overflow_exponent

IntArray = npt.NDArray[np.int64]
#: Positions in an array: a slice if they are consecutive, so that NumPy copies nothing.
Positions = slice | IntArray

#: A placeholder for a missing exponent, below every real one.
NO_EXPONENT = -(1 << 14)
#: The context of a tensor without samples.
NOTHING_SAMPLED = Context((), "float32", None)


class SampleOf(NamedTuple):
    """The tensor, formats and loss scale of a sample. ``scale``: the index of its scale in the step's list of scales."""

    key: TensorKey
    dtype: str
    passed_through: str
    scale: int

    @property
    def is_gradient(self) -> bool:
        return self.key.kind in GRADIENT_KINDS

    @property
    def is_narrow(self) -> bool:
        return self.passed_through != "float32"

    @property
    def may_be_upcast(self) -> bool:
        """Whether this may be an FP16 tensor that was upcast to FP32."""
        return (self.dtype, self.passed_through) == ("float32", "float16")


class StepScale(NamedTuple):
    """A loss scale, if known, and the integer to subtract from counted exponents (None: no integer unscales them)."""

    value: float | None
    log2: int | None

    @property
    def is_in_rows(self) -> bool:
        """Whether the rows hold the values as they arrived; False if a scale was divided out before counting."""
        return self.log2 is not None and (self.value is None or self.value == 2.0**self.log2)

    @classmethod
    def of(cls, scale: BackwardScale, value: float | None) -> StepScale:
        """Return the StepScale of a backward's scale. ``value``: the scale as a number, which may reach the host later."""
        if scale.unknown or not scale.power_of_two:
            return cls(value, 0)
        if value is None or not is_power_of_two(value):
            return cls(value, None)
        return cls(value, floor_log2(value))


class RowSet(NamedTuple):
    """The shape of rows that were copied to the host together: int64 values in a row, and number of rows."""

    length: int
    rows: int


class Slot(NamedTuple):
    """One of a window's sums: one tensor at one loss scale. ``tensor``: the tensor's place in the roster."""

    tensor: int
    log2_scale: int


@dataclass(frozen=True)
class Roster:
    """The tensors of a step or window, and their sums.

    Args:
        order: the tensors' keys.
        contexts: the context of each tensor.
        slots: the sums, by length of row.
    """

    order: tuple[TensorKey, ...]
    contexts: tuple[Context, ...]
    slots: Mapping[int, tuple[Slot, ...]]

    @cached_property
    def numbered_contexts(self) -> tuple[tuple[Context, ...], IntArray]:
        """The distinct contexts, and for each tensor the index of its context among them."""
        numbers: dict[Context, int] = {}
        numbered = [numbers.setdefault(context, len(numbers)) for context in self.contexts]
        return tuple(numbers), np.array(numbered, dtype=np.int64)

    @cached_property
    def slot_arrays(self) -> dict[int, tuple[IntArray, IntArray]]:
        """By length of row: the tensors and the log2_scales of the slots, as two arrays."""
        arrays = {}
        for length, slots in self.slots.items():
            tensors, scales = np.array(slots, dtype=np.int64).reshape(-1, 2).T.copy()
            arrays[length] = tensors, scales
        return arrays

    def joined(self, other: Roster) -> Joined:
        """Return this roster with the other's new tensors and slots appended."""
        places = {key: place for place, key in enumerate(self.order)}
        tensors = [places.setdefault(key, len(places)) for key in other.order]
        contexts = list(self.contexts)
        for place, context in zip(tensors, other.contexts, strict=True):
            if place == len(contexts):
                contexts.append(context)
            elif contexts[place] != context:
                contexts[place] = contexts[place].merged(context)
        slots, positions = dict(self.slots), {}
        for length, others in other.slots.items():
            numbers = {slot: number for number, slot in enumerate(self.slots.get(length, ()))}
            moved = [numbers.setdefault(Slot(tensors[slot.tensor], slot.log2_scale), len(numbers)) for slot in others]
            slots[length] = tuple(numbers)
            positions[length] = np.array(moved, dtype=np.int64)
        order = self.order if len(places) == len(self.order) else tuple(places)
        return Joined(Roster(order, tuple(contexts), slots), np.array(tensors, dtype=np.int64), positions)


class Joined(NamedTuple):
    """Two rosters merged, with the new positions of the second's tensors and (by length of row) of its slots."""

    roster: Roster
    tensors: IntArray
    slots: dict[int, IntArray]


EMPTY_ROSTER = Roster((), (), {})


@dataclass(frozen=True)
class SampleSet:
    """The samples whose rows were copied together; the arrays have one entry for each counted sample.

    Args:
        length: int64 values in a row.
        counted: positions of the counted samples' rows among the copied rows.
        tensor: place in the roster.
        slot: position among the roster's slots of this length.
        log2_scale: number to subtract from exponents.
        overflow: least unscaled exponent that overflowed to infinity; NO_EXPONENT unless the sample is a gradient that passed
            through a narrow format.
        is_gradient: whether its peak counts among the step's gradients. If some gradients passed through a narrow format, the
            others are left out, since no loss scale makes them overflow.
        is_upcast: whether it is treated as an FP16 gradient upcast to FP32, and its row holds the values as they arrived.
    """

    length: int
    counted: Positions
    tensor: IntArray
    slot: IntArray
    log2_scale: IntArray
    overflow: IntArray
    is_gradient: npt.NDArray[np.bool_]
    is_upcast: npt.NDArray[np.bool_]

    @cached_property
    def one_for_each_slot(self) -> bool:
        """Whether there is exactly one sample for each of the first slots, in the slots' order."""
        return bool(np.array_equal(self.slot, np.arange(len(self.slot))))

    @cached_property
    def rounds(self) -> tuple[tuple[Positions, Positions], ...]:
        """The result of the function ``rounds`` for ``slot``."""
        return tuple(rounds(self.slot))

    def moved(self, joined: Joined) -> SampleSet:
        """Return the same samples with positions in the merged roster."""
        return replace(self, tensor=joined.tensors[self.tensor], slot=joined.slots[self.length][self.slot])


class Arrangement:
    """One step's samples.

    Args:
        samples: in the order of their rows.
        scales: the loss scales that ``samples`` refer to.
        row_sets: how the rows are grouped; their numbers of rows add up to the number of samples.
    """

    def __init__(self, samples: list[SampleOf], scales: list[StepScale], row_sets: list[RowSet]) -> None:
        self._made_from = (samples, scales, row_sets)
        builder = _Builder(scales, any(sample.is_gradient and sample.is_narrow for sample in samples))
        start = 0
        sample_sets = []
        for row_set in row_sets:
            sample_sets.append(builder.sample_set(row_set.length, samples[start : start + row_set.rows]))
            start += row_set.rows
        self.sample_sets = tuple(sample_sets)
        self.roster = builder.roster()
        #: The tensor's name for each sample that can't be counted because its scale is not a power of two.
        self.not_counted = tuple(builder.not_counted)

    def fits(self, samples: list[SampleOf], scales: list[StepScale], row_sets: list[RowSet]) -> bool:
        """Return whether these arguments would make an equal arrangement."""
        return self._made_from == (samples, scales, row_sets)


class _Builder:
    """Numbers the tensors and sums of a step in the order of its samples."""

    def __init__(self, scales: Sequence[StepScale], is_narrow: bool) -> None:
        self._scales = scales
        #: Whether any gradient of the step passed through a narrow format.
        self._is_narrow = is_narrow
        self._tensors: dict[TensorKey, int] = {}
        self._contexts: list[Context] = []
        self._slots: dict[int, dict[Slot, int]] = {}
        self.not_counted: list[str] = []

    def roster(self) -> Roster:
        slots = {length: tuple(numbered) for length, numbered in self._slots.items()}
        return Roster(tuple(self._tensors), tuple(self._contexts), slots)

    def sample_set(self, length: int, samples: Sequence[SampleOf]) -> SampleSet:
        slots = self._slots.setdefault(length, {})
        counted, figures = [], []
        for index, sample in enumerate(samples):
            scale = self._scales[sample.scale]
            value, log2_scale = scale
            if log2_scale is None:
                self.not_counted.append(sample.key.name)
                continue
            tensor = self._tensor(sample, value)
            slot = slots.setdefault(Slot(tensor, log2_scale), len(slots))
            overflow, is_upcast = NO_EXPONENT, False
            if sample.is_gradient and sample.is_narrow:
                overflow = overflow_exponent(sample.passed_through, value)
                is_upcast = scale.is_in_rows and sample.may_be_upcast
            counted.append(index)
            of_gradients = sample.is_gradient and (sample.is_narrow or not self._is_narrow)
            figures.append((tensor, slot, log2_scale, overflow, of_gradients, is_upcast))
        columns = np.array(figures, dtype=np.int64).reshape(-1, 6).T.copy()
        tensor_of, slot_of, log2_of, overflow_of, gradient_of, upcast_of = columns
        return SampleSet(
            length,
            _as_slice(np.array(counted, dtype=np.int64)),
            tensor_of,
            slot_of,
            log2_of,
            overflow_of,
            gradient_of.astype(bool),
            upcast_of.astype(bool),
        )

    def _tensor(self, sample: SampleOf, scale: float | None) -> int:
        narrow = sample.passed_through
        context = Context((sample.dtype,), narrow, floor_exponent(narrow, scale))
        tensor = self._tensors.setdefault(sample.key, len(self._tensors))
        if tensor == len(self._contexts):
            self._contexts.append(context)
        elif self._contexts[tensor] != context:
            self._contexts[tensor] = self._contexts[tensor].merged(context)
        return tensor


def rounds(targets: IntArray) -> Iterator[tuple[Positions, Positions]]:
    """Yield (targets, positions) in as few rounds as possible such that no target occurs twice in a round."""
    left = np.arange(len(targets))
    while len(left):
        first = np.sort(np.unique(targets[left], return_index=True)[1])
        yield _as_slice(targets[left[first]]), _as_slice(left[first])
        left = np.delete(left, first)


def _as_slice(indices: IntArray) -> Positions:
    """Return the same positions, as a slice if they are consecutive."""
    if not len(indices) or (np.diff(indices) != 1).any():
        return indices
    return slice(int(indices[0]), int(indices[-1]) + 1)
