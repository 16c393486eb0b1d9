"""Sums the open window's rows of counts, in one matrix for each row length, and converts them to columns.

Only integer arithmetic is used, so a flush-denormals mode, which treats subnormals as zero, has no effect.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from mpinspect.counting import layout
from mpinspect.counting.layout import INFS, MAX_BITS, MIN_BITS, NO_MINIMUM
from mpinspect.numeric.formats import FLOAT16
from mpinspect.ranges.capture.arrangement import (
    EMPTY_ROSTER,
    NO_EXPONENT,
    NOTHING_SAMPLED,
    Arrangement,
    Joined,
    Roster,
    SampleSet,
    rounds,
)
from mpinspect.ranges.windows.columns import PER_BIN, PER_PEAK, SIGNIFICANDS, Column, Lost, TensorColumns, narrowed
from mpinspect.ranges.windows.merging import merge_columns
from mpinspect.ranges.windows.tensors import NO_LOST_UPDATES, LostUpdates, TensorKey

IntArray = npt.NDArray[np.int64]

_MANTISSA = (1 << 52) - 1
_BIAS = 1023
_SMALLEST_SUBNORMAL = -1074
#: Mantissa bits of 2 - 2^-11, the smallest significand that rounds up to 2 in 11 bits.
_NEAR_TOP = 0x7FF << 41


def exponents_and_mantissas(bits: IntArray) -> tuple[IntArray, IntArray]:
    """Return the exponents and 52-bit mantissas (fraction bits) of finite positive float64 values, including subnormals.

    Args:
        bits: int64, the values' bits. For zero and infinity the results are meaningless.
    """
    is_subnormal = bits <= _MANTISSA
    if is_subnormal.any():
        # A subnormal's bits count multiples of the smallest subnormal; this integer as a float64 is a normal number.
        bits = np.where(is_subnormal, bits.astype(np.float64).view(np.int64), bits)
        return (bits >> 52) - _BIAS + _SMALLEST_SUBNORMAL * is_subnormal, bits & _MANTISSA
    return (bits >> 52) - _BIAS, bits & _MANTISSA


def peak_exponents(rows: IntArray) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Return the exponents of the rows' largest magnitudes, rounded to 11 bits, and which rows have a non-zero finite value.

    Args:
        rows: int64, shape (n, length of a layout).
    """
    largest = rows[:, layout.MAX_BITS]
    exponents, mantissas = exponents_and_mantissas(largest)
    near_top = mantissas >= _NEAR_TOP
    return exponents + near_top, largest > 0


def row_columns(rows: IntArray, log2_scales: IntArray) -> dict[str, Column]:
    """Decode rows like ``layout.decode``, with exponents reduced by log2_scale, into columns for ``TensorColumns``.

    Args:
        rows: int64, shape (n, length of a layout), contiguous.
        log2_scales: int64, shape (n,).

    Raises:
        ValueError: a row's extremes disagree with its counts.
    """
    low, low_mantissas = exponents_and_mantissas(rows[:, layout.MIN_BITS])
    high, high_mantissas = exponents_and_mantissas(rows[:, layout.MAX_BITS])
    has_values = rows[:, layout.MAX_BITS] > 0
    bins = np.where(has_values, high - low + 1, 0)
    if (bins < has_values).any():
        raise ValueError("a row's smallest magnitude is larger than its largest")
    return {
        "min_exponent": np.where(has_values, low - log2_scales, 0),
        "bins": bins,
        "zeros": rows[:, layout.ZEROS].copy(),
        "infs": rows[:, layout.INFS].copy(),
        "nans": rows[:, layout.NANS].copy(),
        "min_significand": _significands(low_mantissas, has_values),
        "max_significand": _significands(high_mantissas, has_values),
        **_bins(rows, low, bins),
    }


def _significands(mantissas: IntArray, has_values: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Return the significands of these mantissas, in [1, 2); 1 for rows without values."""
    return (np.where(has_values, mantissas, 0) | _BIAS << 52).view(np.float64)


def _bins(rows: IntArray, low: IntArray, bins: IntArray) -> dict[str, Column]:
    """Return the rows' counts of ``bins`` exponents from ``low`` on, concatenated.

    Raises:
        ValueError: a row's extremes disagree with its counts.
    """
    length = rows.shape[1]
    lowest = (layout.NARROW if length == layout.NARROW.length else layout.WIDE).lowest_exponent
    used = np.flatnonzero(bins)
    ends = np.cumsum(bins[used])
    starts = ends - bins[used]
    first = used * length + layout.HEADER + 3 * (low[used] - lowest)
    at = np.repeat(first - 3 * starts, bins[used])
    at += 3 * np.arange(len(at))
    flat = rows.reshape(-1)
    powers, others, tops = flat[at], flat[at + 1], flat[at + 2]
    counts = powers + others + tops
    inside = np.zeros(len(rows), dtype=np.int64)
    if len(used):
        inside[used] = np.add.reduceat(counts, starts)
    ends_are_used = (counts[starts] > 0).all() and (counts[ends - 1] > 0).all()
    if not ends_are_used or (inside != rows[:, layout.HEADER :].sum(axis=1)).any():
        raise ValueError(
            "a row's smallest or largest magnitude does not lie in its first or last exponent with a count"
        )
    return {"counts": narrowed(counts), "powers_of_two": narrowed(powers), "near_top": narrowed(tops)}


#: The bits, as float64, of FP16's smallest and largest magnitudes.
_LEAST_HALF, _LARGEST_HALF = np.array([2.0**FLOAT16.min_subnormal_exponent, FLOAT16.max_finite]).view(np.int64).tolist()


def never_in_float16(arrangement: Arrangement, row_sets: Sequence[IntArray]) -> set[TensorKey]:
    """Return the gradients marked as FP16 upcasts with finite values outside of FP16's range.

    Gradients of modules with autocast switched off have the same dtype as upcasts. A (still scaled) value below FP16's smallest
    or above its largest proves that the gradient was never rounded.
    """
    found: set[TensorKey] = set()
    for samples, arrived in zip(arrangement.sample_sets, row_sets, strict=True):
        if not samples.is_upcast.any():
            continue
        rows = arrived[samples.counted]
        largest = rows[:, MAX_BITS]
        outside = (largest > _LARGEST_HALF) | ((largest > 0) & (rows[:, MIN_BITS] < _LEAST_HALF))
        places = samples.tensor[outside & samples.is_upcast].tolist()
        found.update(arrangement.roster.order[place] for place in places)
    return found


#: A peak and its tensor are encoded as one integer: tensor * _EXPONENTS + exponent - NO_EXPONENT.
_EXPONENTS = -2 * NO_EXPONENT
#: Number of peaks collected before equal ones are counted together.
_LOOSE_PEAKS = 1 << 14


class WindowRows:
    """Sums the counts of the open window's steps, tensor by tensor."""

    def __init__(self) -> None:
        self._roster = EMPTY_ROSTER
        self._sums: dict[int, _Sums] = {}
        self._samples = np.zeros(0, dtype=np.int64)
        self._numel_max = np.zeros(0, dtype=np.int64)
        self._peaks = _Peaks()
        self._lost: dict[tuple[TensorKey, str], LostUpdates] = {}
        #: The last step's arrangement, and its sample sets with positions in this window's roster.
        self._placed: tuple[Arrangement, tuple[SampleSet, ...]] | None = None

    def add_step(self, arrangement: Arrangement, row_sets: Sequence[IntArray], numels: IntArray) -> int | None:
        """Add a step's rows; return the largest unscaled peak exponent of its gradients, or None.

        Args:
            arrangement: describes the samples to which the rows belong.
            row_sets: an int64 array of shape (rows, length) for each sample set; the arrays may be stored and modified.
            numels: int64, the number of elements of each sample, in the order of the sets.
        """
        largest, start = NO_EXPONENT, 0
        for samples, arrived in zip(self._place(arrangement), row_sets, strict=True):
            rows, numel = arrived[samples.counted], numels[start : start + len(arrived)][samples.counted]
            start += len(arrived)
            peaks = _unscaled_peaks(samples, rows)
            largest = max(largest, int(peaks[samples.is_gradient].max(initial=NO_EXPONENT)))
            self._peaks.add(samples.tensor, peaks)
            np.add.at(self._samples, samples.tensor, 1)
            np.maximum.at(self._numel_max, samples.tensor, numel)
            sums = self._sums.setdefault(samples.length, _Sums(samples.length))
            sums.add(rows, samples, len(self._roster.slots[samples.length]))
        return largest if largest > NO_EXPONENT else None

    def add_lost_updates(self, lost: Mapping[tuple[TensorKey, str], LostUpdates]) -> None:
        """Add a step's lost updates, given by tensor and storage format."""
        known = set(self._roster.order)
        unseen = tuple(dict.fromkeys(key for key, _ in lost if key not in known))
        if unseen:
            self._join(Roster(unseen, (NOTHING_SAMPLED,) * len(unseen), {}))
        for at, found in lost.items():
            self._lost[at] = self._lost.get(at, NO_LOST_UPDATES) + found

    def columns(self) -> TensorColumns:
        """Return the window's tensors as columns, in the order of first appearance.

        Raises:
            ValueError: a row's extremes disagree with its counts.
        """
        order = self._roster.order
        figures = {"samples": self._samples, "numel_max": self._numel_max, **self._peaks.columns(len(order))}
        sums = self._roster.slot_arrays
        if len(sums) == 1:
            ((length, (tensors, scales)),) = sums.items()
            if np.array_equal(tensors, np.arange(len(order))):
                # Usually each tensor has exactly one sum.
                return self._of_all(figures | row_columns(self._sums[length].rows, scales))
        parts = [self._of_all(figures | _nothing(_OF_VALUES, len(order)))]
        for length, (tensors, scales) in sums.items():
            rows = self._sums[length].rows
            for chosen, at in rounds(tensors):
                parts.append(self._of_some(np.arange(len(order))[chosen], row_columns(rows[at], scales[at])))
        return merge_columns(parts)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _place(self, arrangement: Arrangement) -> tuple[SampleSet, ...]:
        """Return a step's sample sets with positions in this window's roster, adding new tensors to the roster."""
        if self._placed is None or self._placed[0] is not arrangement:
            if self._roster is EMPTY_ROSTER:
                self._set_roster(arrangement.roster)
                sample_sets = arrangement.sample_sets
            else:
                joined = self._join(arrangement.roster)
                sample_sets = tuple(samples.moved(joined) for samples in arrangement.sample_sets)
            self._placed = arrangement, sample_sets
        return self._placed[1]

    def _join(self, roster: Roster) -> Joined:
        joined = self._roster.joined(roster)
        self._set_roster(joined.roster)
        return joined

    def _set_roster(self, roster: Roster) -> None:
        new = np.zeros(len(roster.order) - len(self._roster.order), dtype=np.int64)
        self._samples = np.concatenate([self._samples, new])
        self._numel_max = np.concatenate([self._numel_max, new])
        self._roster = roster

    def _of_all(self, columns: Mapping[str, Column]) -> TensorColumns:
        contexts, context = self._roster.numbered_contexts
        return TensorColumns(self._roster.order, columns, contexts, context, self._lost_of_tensors())

    def _of_some(self, tensors: IntArray, values: Mapping[str, Column]) -> TensorColumns:
        """Return columns of these tensors that hold the given values, and zero samples."""
        contexts, context = self._roster.numbered_contexts
        order = tuple(self._roster.order[tensor] for tensor in tensors.tolist())
        nothing = _nothing(_OF_SAMPLES, len(order))
        return TensorColumns(order, {**nothing, **values}, contexts, context[tensors])

    def _lost_of_tensors(self) -> tuple[Lost, ...]:
        if not self._lost:
            return ()
        places = {key: place for place, key in enumerate(self._roster.order)}
        return tuple(
            Lost(places[key], name, found.lost, found.nonzero, found.measured)
            for (key, name), found in self._lost.items()
        )


class _Sums:
    """Sums rows of one length, slot by slot."""

    def __init__(self, length: int) -> None:
        #: int64, (slots, length).
        self.rows = np.zeros((0, length), dtype=np.int64)

    def add(self, rows: IntArray, samples: SampleSet, slots: int) -> None:
        """Add rows to their samples' slots, growing to ``slots`` slots first; ``rows`` may be stored and modified."""
        if not len(self.rows) and samples.one_for_each_slot and len(rows) == slots:
            self.rows = np.ascontiguousarray(rows)
            return
        self._grow(slots)
        # A row without values has neutral extremes: infinity as minimum and zero as maximum.
        low, high = self.rows[:, MIN_BITS].copy(), self.rows[:, MAX_BITS].copy()
        np.minimum.at(low, samples.slot, rows[:, MIN_BITS])
        np.maximum.at(high, samples.slot, rows[:, MAX_BITS])
        for target, source in samples.rounds:
            self.rows[target] += rows[source]
        self.rows[:, MIN_BITS], self.rows[:, MAX_BITS] = low, high

    def _grow(self, slots: int) -> None:
        new = slots - len(self.rows)
        if new:
            neutral = np.zeros((new, self.rows.shape[1]), dtype=np.int64)
            neutral[:, MIN_BITS] = NO_MINIMUM
            self.rows = np.concatenate([self.rows, neutral])


class _Peaks:
    """Counts how often each peak exponent occurred, for each tensor."""

    def __init__(self) -> None:
        self._codes = np.zeros(0, dtype=np.int64)
        self._counts = np.zeros(0, dtype=np.int64)
        self._loose: list[IntArray] = []
        self._loose_count = 0

    def add(self, tensors: IntArray, exponents: IntArray) -> None:
        """Add the peak exponents of these tensors, ignoring NO_EXPONENT."""
        codes = tensors * _EXPONENTS + (exponents - NO_EXPONENT)
        self._loose.append(codes[exponents > NO_EXPONENT])
        self._loose_count += len(codes)
        if self._loose_count > _LOOSE_PEAKS:
            self._gather()

    def columns(self, tensors: int) -> dict[str, IntArray]:
        """Return the columns ``peaks`` and PER_PEAK of ``TensorColumns``, with exponents in ascending order."""
        self._gather()
        return {
            "peaks": np.bincount(self._codes // _EXPONENTS, minlength=tensors),
            "peak_exponents": self._codes % _EXPONENTS + NO_EXPONENT,
            "peak_counts": self._counts,
        }

    def _gather(self) -> None:
        loose = np.concatenate([self._codes[:0], *self._loose])
        counts = np.concatenate([self._counts, np.ones(len(loose), dtype=np.int64)])
        self._codes, codes = np.unique(np.concatenate([self._codes, loose]), return_inverse=True)
        self._counts = np.zeros(len(self._codes), dtype=np.int64)
        np.add.at(self._counts, codes, counts)
        self._loose, self._loose_count = [], 0


def _unscaled_peaks(samples: SampleSet, rows: IntArray) -> IntArray:
    """Return each row's unscaled peak exponent (largest magnitude, rounded to 11 bits), or NO_EXPONENT.

    A row with infinities has at least the exponent ``samples.overflow``.
    """
    exponents, has_values = peak_exponents(rows)
    peaks = np.where(has_values, exponents - samples.log2_scale, NO_EXPONENT)
    overflowed = rows[:, INFS] > 0
    return np.where(overflowed, np.maximum(peaks, samples.overflow), peaks)


_OF_SAMPLES = ("samples", "numel_max", "peaks", *PER_PEAK)
_OF_VALUES = ("min_exponent", "bins", "zeros", "infs", "nans", *SIGNIFICANDS, *PER_BIN)


def _nothing(names: Collection[str], tensors: int) -> dict[str, Column]:
    """Return the named columns for ``tensors`` tensors without any counts."""
    columns: dict[str, Column] = {}
    for name in names:
        if name in SIGNIFICANDS:
            columns[name] = np.ones(tensors)
        else:
            columns[name] = np.zeros(tensors * (name not in (*PER_BIN, *PER_PEAK)), dtype=np.int64)
    return columns
