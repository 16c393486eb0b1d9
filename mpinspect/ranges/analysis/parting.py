"""Aligns the windows of two runs, and finds the first step where each tensor's counts differ.

There are two comparisons. Whether counts are *equal* is a fact if both runs counted the same steps. Whether a tensor *moved* is
an estimate: rounding, another seed or another batch changes the share of its elements in a power of two by about as much as
neighbouring stretches of the training differ. The excess of a change over this, summed over the powers of two, is the share
*beyond*.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mpinspect.ranges.session import Session
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.ranges.windows.window import Window, merge_windows
from mpinspect.reporting.words import steps_named

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]

#: Exponents outside this range share its ends: FP32's range, with room for loss scales.
_LOW, _HIGH = -160, 140
#: Zeros, infinities and NaNs have their own places after the exponents.
_OTHERS = 3
#: Number of stretches on each side that measure a tensor's usual variation.
_NEAR = 4
#: A share may change by this multiple of the largest change between nearby neighbouring stretches, in the steadier run. The
#: maxima of two samples of some ten changes from one distribution rarely differ by a factor of two.
_OF_NEIGHBOURS = 2.0
#: A share may also change by this many standard deviations of as many independent draws: small tensors differ by chance.
_OF_CHANCE = 3.0
#: A tensor moved if more than this share of its elements lies beyond. The demo's model stays below 0.047 in FP16 at the
#: recommended loss scale, and below 0.05 with another seed; unscaled in FP16 its output layer has 0.098 in the first steps.
LEAST_BEYOND = 0.05
#: Stretches of other steps are compared if they have at least this share of their steps in common.
_LEAST_OVERLAP = 0.5
#: Tensors compared at once: some 20 MB for each run and 128 stretches.
_AT_ONCE = 128


@dataclass(frozen=True)
class Stretch:
    """Windows of two runs over the same steps, or about the same.

    Args:
        first_step, last_step: of both runs together.
        first, second: each run's windows, merged.
        same_steps: whether both runs certainly counted the same steps.
    """

    first_step: int
    last_step: int
    first: Window
    second: Window
    same_steps: bool

    def __str__(self) -> str:
        return steps_named(self.first_step, self.last_step)


@dataclass(frozen=True)
class Course:
    """How one tensor of two runs compares, stretch by stretch.

    Args:
        differs: index of the first stretch of the same steps with unequal counts; None if all are equal.
        moved: index of the first stretch where the tensor moved; None if it did not.
        elsewhere: share of its elements that lie in other powers of two in the other run, in each stretch, 0..1 (half
            the sum of the differences of shares); NaN where a run did not count the tensor.
        beyond: the part of ``elsewhere`` in excess of the tensor's usual variation, in each stretch.
    """

    differs: int | None
    moved: int | None
    elsewhere: tuple[float, ...]
    beyond: tuple[float, ...]


def stretches(first: Session, second: Session) -> tuple[Stretch, ...]:
    """Return the shortest stretches that no window of either run crosses, in the order of their steps.

    Steps that only one run counted are left out.
    """
    return tuple(
        _made(*group, first, second)
        for group in groups(first.windows, second.windows)
        if all(group) and _overlap(*group)
    )


def courses(aligned: Sequence[Stretch], keys: Sequence[TensorKey]) -> dict[TensorKey, Course]:
    found: dict[TensorKey, Course] = {}
    for start in range(0, len(keys) if aligned else 0, _AT_ONCE):
        some = keys[start : start + _AT_ONCE]
        elsewhere, beyond, broke = _distances(aligned, some)
        moved = (beyond > LEAST_BEYOND) | broke
        for place, key in enumerate(some):
            differs = (row for row, stretch in enumerate(aligned) if stretch.same_steps and not _equal(stretch, key))
            found[key] = Course(
                next(differs, None),
                next(iter(np.flatnonzero(moved[:, place]).tolist()), None),
                tuple(elsewhere[:, place].tolist()),
                tuple(beyond[:, place].tolist()),
            )
    return found


# -- the steps ----------------------------------------------------------------------------------------------------------


def groups(first: Sequence[Window], second: Sequence[Window]) -> Iterator[tuple[list[Window], list[Window]]]:
    """Yield the windows that overlap, directly or through others, in the order of their steps; one side may be empty."""
    both = [(window.first_step, side, window) for side, windows in enumerate((first, second)) for window in windows]
    sides: tuple[list[Window], list[Window]] = ([], [])
    end = -1
    for start, side, window in sorted(both, key=lambda each: each[:2]):
        if start > end and any(sides):
            yield sides
            sides = ([], [])
        sides[side].append(window)
        end = max(end, window.last_step)
    if any(sides):
        yield sides


def _overlap(ours: Sequence[Window], theirs: Sequence[Window]) -> bool:
    common = min(ours[-1].last_step, theirs[-1].last_step) - max(ours[0].first_step, theirs[0].first_step) + 1
    whole = max(ours[-1].last_step, theirs[-1].last_step) - min(ours[0].first_step, theirs[0].first_step) + 1
    return common >= _LEAST_OVERLAP * whole


def _made(ours: Sequence[Window], theirs: Sequence[Window], first: Session, second: Session) -> Stretch:
    one, other = merge_windows(*ours), merge_windows(*theirs)
    extents = {(window.first_step, window.last_step, window.sampled_steps) for window in (one, other)}
    # With a budget, the measured time decides which steps are counted.
    by_rule = (
        first.info.every == second.info.every and first.progress.watched_steps is second.progress.watched_steps is None
    )
    is_dense = one.sampled_steps == one.last_step - one.first_step + 1
    return Stretch(
        min(one.first_step, other.first_step),
        max(one.last_step, other.last_step),
        one,
        other,
        len(extents) == 1 and (is_dense or by_rule),
    )


# -- the distances ------------------------------------------------------------------------------------------------------


def _distances(aligned: Sequence[Stretch], keys: Sequence[TensorKey]) -> tuple[Floats, Floats, Flags]:
    """Return, by stretch and tensor: the shares elsewhere and beyond, and whether only one run has infinities or NaNs."""
    first, elements = _shares([stretch.first for stretch in aligned], keys)
    second, others = _shares([stretch.second for stretch in aligned], keys)
    change = np.abs(first - second)
    by_chance = np.sqrt(2 * np.fmax(first, second) / np.fmax(np.fmin(elements, others), 1)[..., None])
    allowed = np.fmax(_OF_NEIGHBOURS * np.fmin(_by_itself(first), _by_itself(second)), _OF_CHANCE * by_chance)
    broken = [(shares[..., 1 - _OTHERS :] > 0).any(axis=2) for shares in (first, second)]
    return change.sum(axis=2) / 2, np.maximum(change - allowed, 0).sum(axis=2) / 2, broken[0] != broken[1]


def _shares(windows: Sequence[Window], keys: Sequence[TensorKey]) -> tuple[Floats, Floats]:
    """Return the shares of elements by window, tensor and place, NaN where a tensor was not counted; and the elements."""
    shares = np.zeros((len(windows), len(keys), _HIGH - _LOW + 1 + _OTHERS), dtype=np.float32)
    elements = np.zeros(shares.shape[:2], dtype=np.float32)
    for row, window in enumerate(windows):
        for place, key in enumerate(keys):
            tensor = window.tensors.get(key)
            if tensor is None or not tensor.histogram.total:
                shares[row, place] = np.nan
                continue
            histogram = tensor.histogram
            elements[row, place] = total = histogram.total
            places = np.arange(len(histogram.counts)) + (histogram.min_exponent - _LOW)
            if len(places) and (places[0] < 0 or places[-1] > _HIGH - _LOW):
                np.add.at(shares[row, place], np.clip(places, 0, _HIGH - _LOW), histogram.counts / total)
            else:
                shares[row, place, places] = histogram.counts / total
            shares[row, place, -_OTHERS:] = histogram.zeros / total, histogram.infs / total, histogram.nans / total
    return shares, elements


def _by_itself(shares: Floats) -> Floats:
    """Return the largest change between neighbouring stretches near each one, by tensor and place; 0 if unknown."""
    # steps[row] is the change from the previous stretch to this one.
    steps = np.zeros_like(shares)
    steps[1:] = np.nan_to_num(np.abs(shares[1:] - shares[:-1]))
    return np.stack([steps[max(0, row - _NEAR) : row + _NEAR + 2].max(axis=0) for row in range(len(shares))])


def _equal(stretch: Stretch, key: TensorKey) -> bool:
    one, other = stretch.first.tensors.get(key), stretch.second.tensors.get(key)
    if one is None or other is None:
        return one is other
    return one.samples == other.samples and one.histogram == other.histogram
