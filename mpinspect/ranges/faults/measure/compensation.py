"""Finds compensation: an optimizer's state that holds the rounding errors of its 16-bit weights (Kahan summation)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mpinspect.numeric.formats import FORMATS, FloatFormat
from mpinspect.ranges.capture.host_rows import Arrivals, HostCopy
from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.faults.measure.measuring import NARROW, drawn
from mpinspect.runtime.distributed import local_part

#: Maximum number of steps that read an optimizer's states: tiny updates add up to a weight's spacing only after many steps.
_MOST_STEPS = 12
#: Minimum number of non-zero elements for a judgement.
_FEWEST_ELEMENTS = 64
#: Maximum share of elements above the spacing: a rounding error is at most half of it, but may be larger at powers of two.
_MOST_BEYOND_SPACING = 0.001
#: Minimum share of elements above 1/16 of the spacing. Once updates have added up, 7 of 8 rounding errors are above it.
_SMALL, _FEWEST_ABOVE_SMALL = 1 / 16, 0.1
#: The spacings in the widest third of the weights must be this much wider than in the narrowest third, or the test is
#: impossible. The state's sizes must then differ by at least this share of that factor.
_LEAST_SPREAD, _FOLLOWED = 4.0, 0.7
#: Minimum share of each sign in the state, and in its product with the weights: weight decay gives a momentum the weight's
#: sign.
_FEWEST_OF_A_SIGN = 0.3

_Optimizer = torch.optim.Optimizer
_Values = npt.NDArray[np.float64]


class Compensation:
    """Names each optimizer's state that holds the rounding errors of its 16-bit weights, judged by the state's values.

    Reads a few thousand elements of one weight and its states in the first measured steps of an optimizer with 16-bit weights,
    until it finds such a state. Values on a device are judged at a later step.
    """

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[_Optimizer, str] = weakref.WeakKeyDictionary()
        self._looked: weakref.WeakKeyDictionary[_Optimizer, int] = weakref.WeakKeyDictionary()
        self._arrivals = Arrivals()

    def of(self, optimizer: _Optimizer) -> str:
        """Return the name of the optimizer's state that holds rounding errors; "" if it was not found."""
        return self._names.get(optimizer, "")

    def settle(self) -> None:
        """Judge all values read so far; waits for the device."""
        self._arrivals.take(wait=True)

    @torch.no_grad()
    def look(self, optimizer: _Optimizer) -> None:
        """Search the optimizer's states after its step, unless the search has ended."""
        self._arrivals.take()
        looked = self._looked.get(optimizer, 0)
        if looked >= _MOST_STEPS or self.of(optimizer):
            return
        weight = max(_sixteen_bit_weights(optimizer), key=lambda each: local_part(each).numel(), default=None)
        if weight is None:
            return
        self._looked[optimizer] = looked + 1
        part = local_part(weight)
        values, format = HostCopy(drawn(part).double()), FORMATS[dtype_name(part.dtype)]
        states = [(name, HostCopy(drawn(state).double())) for name, state in _states_like(optimizer, weight)]
        compare = partial(self._compare, weakref.ref(optimizer), states, values, format)
        self._arrivals.call([values, *(state for _, state in states)], compare)

    def _compare(
        self,
        reference: weakref.ref[_Optimizer],
        states: list[tuple[str, HostCopy]],
        values: HostCopy,
        format: FloatFormat,
    ) -> None:
        optimizer = reference()
        found = (name for name, state in states if is_compensation(state.values(), values.values(), format))
        name = next(found, None)
        if optimizer is not None and name is not None:
            self._names.setdefault(optimizer, name)


def is_compensation(state: _Values, weight: _Values, format: FloatFormat) -> bool:
    """Return whether a state's values look like rounding errors of the weights: below the spacing, and proportional to it.

    Args:
        state, weight: the same elements of both.
        format: the format that stores the weights.
    """
    kept = (state != 0) & np.isfinite(state) & np.isfinite(weight)
    state, weight = state[kept], weight[kept]
    if len(state) < _FEWEST_ELEMENTS:
        return False
    size, spacing = np.abs(state), spacing_of(weight, format)
    return (
        bool(np.mean(size > spacing) <= _MOST_BEYOND_SPACING)
        and bool(np.mean(size > _SMALL * spacing) >= _FEWEST_ABOVE_SMALL)
        and _has_both_signs(state)
        and _has_both_signs(state * np.sign(weight))
        and _follows(size, spacing)
    )


def spacing_of(values: _Values, format: FloatFormat) -> _Values:
    """Return the distance of each value of a format to the next larger magnitude; subnormals and zero have the smallest."""
    exponents = np.where(values == 0, format.min_normal_exponent, np.frexp(values)[1] - 1)
    spacing: _Values = np.ldexp(1.0, np.maximum(exponents, format.min_normal_exponent) - format.mantissa_bits)
    return spacing


def _has_both_signs(values: _Values) -> bool:
    return bool(min(np.mean(values > 0), np.mean(values < 0)) >= _FEWEST_OF_A_SIGN)


def _follows(size: _Values, spacing: _Values) -> bool:
    """Return whether the sizes grow about in proportion to the spacing; the sizes of a moment do not."""
    order, third = np.argsort(spacing, kind="stable"), len(spacing) // 3
    narrow, wide = order[:third], order[-third:]
    factor = np.median(spacing[wide]) / np.median(spacing[narrow])
    return bool(factor >= _LEAST_SPREAD and np.median(size[wide]) >= _FOLLOWED * factor * np.median(size[narrow]))


def _sixteen_bit_weights(optimizer: _Optimizer) -> Iterator[torch.Tensor]:
    """Yield the 16-bit weights that have a state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            part = local_part(parameter)
            is_narrow = is_plain(part) and part.dtype in NARROW
            if is_narrow and isinstance(optimizer.state.get(parameter), dict):
                yield parameter


def _states_like(optimizer: _Optimizer, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name of each floating-point state of the weight's shape, and this process's part of it."""
    state: dict[Any, Any] = optimizer.state[weight]
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            part = local_part(value)
            if is_plain(part) and part.shape == local_part(weight).shape:
                yield str(name), part
