"""How a loss scale changes: rules as data, and a pure function from one state to the next.

The defaults follow torch.amp.GradScaler; floor, ceiling, hysteresis and tolerance are additions:

    overflowed step:  the step is skipped; if a back-off is due, scale = max(scale * backoff_factor, floor)
    clean step:       after growth_interval of them in a row, scale = min(scale * growth_factor, ceiling)

Products are computed in FP64 and rounded once to FP32, which gives the same scales as FP32 arithmetic on the device.
"""

from __future__ import annotations

import ctypes
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

#: The smallest scale whose inverse is finite in FP32: 1 / 2^-128 is infinite in FP32.
_SMALLEST = 2.0**-127


@dataclass(frozen=True)
class ScaleState:
    """The current loss scale and its counters.

    Args:
        scale: the loss scale, a value of FP32.
        clean_steps: clean steps since the last skipped step, or since growth was last due (torch's growth tracker).
        skipped_in_a_row: skipped steps since the last clean one.
        steps_since_move: steps, skipped ones included, since the scale last moved.
        skips_since_move: skipped steps since the scale last moved.
    """

    scale: float
    clean_steps: int = 0
    skipped_in_a_row: int = 0
    steps_since_move: int = 0
    skips_since_move: int = 0

    def at(self, scale: float) -> ScaleState:
        """Return the state with another scale and no steps since the move; torch's growth tracker stays."""
        return replace(self, scale=scale, steps_since_move=0, skips_since_move=0)


@dataclass(frozen=True)
class ScaleRules:
    """The rules for changes of a loss scale.

    Args:
        growth_factor: 1 or more; the scale is multiplied by it after ``growth_interval`` clean steps in a row, unless the
            product is not finite in FP32.
        backoff_factor: above 0, at most 1; the scale is multiplied by it when a back-off is due.
        growth_interval: steps, 1 or more.
        floor: the smallest allowed scale; None for no floor.
        ceiling: the largest allowed scale; None: only FP32's range limits it.
        hysteresis: a back-off is due at this many skipped steps in a row, and at each further one in that row; a clean step
            resets the count (as in apex; Megatron resets it only when the scale grows).
        tolerance: a back-off is due only if at least this share of steps since the scale last moved was skipped (as in
            fairseq); 0 <= tolerance < 1.
    """

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    floor: float | None = None
    ceiling: float | None = None
    hysteresis: int = 1
    tolerance: float = 0.0

    @property
    def torchs(self) -> tuple[float, float, int]:
        """The rules that GradScaler has too: growth factor, backoff factor, growth interval."""
        return self.growth_factor, self.backoff_factor, self.growth_interval

    def with_torchs(self, growth_factor: float, backoff_factor: float, growth_interval: int) -> ScaleRules:
        """Return the same rules with other GradScaler parameters."""
        return replace(
            self, growth_factor=growth_factor, backoff_factor=backoff_factor, growth_interval=growth_interval
        )

    @property
    def are_torchs(self) -> bool:
        """Whether floor, ceiling, hysteresis and tolerance are unused, so that the rules are GradScaler's."""
        return self.floor is None and self.ceiling is None and self.hysteresis == 1 and self.tolerance == 0.0

    @property
    def is_static(self) -> bool:
        """Whether both factors are 1.0, so that the scale never changes by itself."""
        return self.growth_factor == 1.0 and self.backoff_factor == 1.0

    def next(self, state: ScaleState, *, skipped: bool) -> ScaleState:
        """Return the state after one more step."""
        if skipped:
            counted = _with_skip(state)
            if self._back_off_due(counted):
                return _moved(counted, self._backed_off(state.scale))
            return counted
        clean, steps = state.clean_steps + 1, state.steps_since_move + 1
        counted = ScaleState(state.scale, clean, 0, steps, state.skips_since_move)
        if clean == self.growth_interval:
            return _moved(replace(counted, clean_steps=0), self._grown(state.scale))
        return counted

    def collapses(self, state: ScaleState) -> bool:
        """Return whether an overflow in this state would call for a back-off although the scale is at its floor."""
        return self.floor is not None and state.scale <= self.floor and self._back_off_due(_with_skip(state))

    def clamped(self, scale: float) -> float:
        """Return ``scale`` clamped to [floor, ceiling]."""
        return self._lowered(self._raised(scale))

    def _raised(self, scale: float) -> float:
        return scale if self.floor is None else max(scale, self.floor)

    def _lowered(self, scale: float) -> float:
        return scale if self.ceiling is None else min(scale, self.ceiling)

    def check(self) -> None:
        """Raise ValueError or TypeError if a rule is invalid; the message lists the allowed values."""
        _check_number(
            "growth_factor", self.growth_factor, 1.0 <= self.growth_factor < math.inf, "1 or more, such as 2.0"
        )
        _check_number("backoff_factor", self.backoff_factor, 0.0 < self.backoff_factor <= 1.0, "above 0 and at most 1")
        _check_count("growth_interval", self.growth_interval)
        _check_count("hysteresis", self.hysteresis)
        _check_number("tolerance", self.tolerance, 0.0 <= self.tolerance < 1.0, "a share: 0 up to, not including, 1")
        for name, bound in (("floor", self.floor), ("ceiling", self.ceiling)):
            if bound is not None:
                checked_scale(bound, name)
        if self.floor is not None and self.ceiling is not None and self.floor > self.ceiling:
            raise ValueError(f"floor {self.floor:g} is above ceiling {self.ceiling:g}: no scale satisfies both")

    def _back_off_due(self, counted: ScaleState) -> bool:
        enough_in_a_row = counted.skipped_in_a_row >= self.hysteresis
        return enough_in_a_row and counted.skips_since_move >= self.tolerance * counted.steps_since_move

    def _backed_off(self, scale: float) -> float:
        return self._raised(float32(scale * self.backoff_factor))

    def _grown(self, scale: float) -> float:
        larger = float32(scale * self.growth_factor)
        if math.isinf(larger):
            larger = scale
        return self._lowered(larger)


def _with_skip(state: ScaleState) -> ScaleState:
    return ScaleState(
        state.scale, 0, state.skipped_in_a_row + 1, state.steps_since_move + 1, state.skips_since_move + 1
    )


def _moved(state: ScaleState, scale: float) -> ScaleState:
    return state if scale == state.scale else state.at(scale)


def float32(value: float) -> float:
    """Return the FP32 value nearest to ``value``; infinite beyond FP32's range."""
    return ctypes.c_float(value).value


def checked_scale(value: float, name: str) -> float:
    """Return ``value`` rounded to FP32, checked to be a valid loss scale.

    Raises:
        ValueError: zero, negative, NaN, infinite, or so small that its inverse is infinite in FP32.
        TypeError: ``value`` is not a number.
    """
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number such as 2.0**16, not {value!r}")
    scale = float32(float(value))
    if not (_SMALLEST <= scale < math.inf):
        raise ValueError(
            f"{name} is {value!r}: a loss scale must be finite, above 0, and its inverse finite in FP32 "
            "(2^-127 .. 2^127), such as 2.0**16"
        )
    return scale


def checked_window(lowest: float, highest: float) -> tuple[float, float]:
    """Return (lowest, highest) rounded to FP32; raise ValueError or TypeError if this is not a valid window."""
    lowest, highest = checked_scale(lowest, "lowest"), checked_scale(highest, "highest")
    if lowest > highest:
        raise ValueError(f"the window's lowest scale {lowest:g} is above its highest, {highest:g}")
    return lowest, highest


def _check_number(name: str, value: float, good: bool, wanted: str) -> None:
    if not good:
        raise ValueError(f"{name} is {value!r}: it must be {wanted}")


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}: it must be a whole number of steps, 1 or more")


#: Presets by name: keyword arguments of LossScaler.
PRESETS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        # torch.amp.GradScaler's defaults.
        "torch": {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000},
        # NVIDIA's talk on mixed precision with PyTorch, GTC 2018: start large, halve, double after 1000 clean steps.
        "talk": {"init_scale": 2.0**32, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1000},
        # apex.amp's dynamic loss scale: max_loss_scale is 2^24.
        "apex": {
            "init_scale": 2.0**16,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2000,
            "ceiling": 2.0**24,
        },
    }
)
