"""Detect infinities and NaNs in a step's arrays: the first non-finite array observed becomes an event.

A recorder knows only the order in which arrays are passed to it, not the execution order; the event says so. The kind
of an array tells whether it belongs to the forward or the backward.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from mpinspect.ranges.capture.arrays.samples import ArraySample
from mpinspect.ranges.capture.culprit import BACKWARD, FORWARD, History, word
from mpinspect.ranges.kinds import ACTIVATION, ACTIVATION_GRADIENT, GRADIENT_KINDS, WEIGHT
from mpinspect.ranges.session import Event, TensorKey

_FORWARD_KINDS = (ACTIVATION, WEIGHT)
_WHY = "it was the first array observed in this step that was not finite"


class _Look(NamedTuple):
    key: TensorKey
    largest: float
    micro_batch: int
    scale: float | None


class NonFiniteWatch:
    """Finds the non-finite event of each step in its samples."""

    def __init__(self) -> None:
        self._looks: list[_Look] = []
        self._times: dict[TensorKey, int] = {}
        self._history = History()

    def look(self, sample: ArraySample) -> None:
        """Add a sample of the open step; a repeated key is assumed to be from the next micro-batch."""
        micro_batch = self._times.get(sample.key, 0)
        self._times[sample.key] = micro_batch + 1
        self._looks.append(_Look(sample.key, sample.largest, micro_batch, sample.scale))

    def judge(self, step: int, skipped: bool | None) -> Event | None:
        """Return the event of the open step, or None if there is none; changes no state."""
        bad = (look for look in self._looks if not math.isfinite(look.largest))
        first = next((look for look in bad if not self._history.excuses(look.key, look.largest)), None)
        if first is None:
            return None
        in_forward = first.key.kind in _FORWARD_KINDS
        return Event(
            step,
            first.micro_batch,
            FORWARD if in_forward else BACKWARD,
            owner(first.key),
            first.key.kind,
            first.key.name,
            word(first.largest),
            first.scale if first.key.kind in GRADIENT_KINDS else self._scale(),
            self._history.last_maxima(first.key),
            skipped,
            self._finite((ACTIVATION,)),
            self._finite(GRADIENT_KINDS),
            _WHY,
        )

    def end_step(self, step: int, skipped: bool | None) -> Event | None:
        """End the step; return its event, or None if there is none."""
        event = self.judge(step, skipped)
        if event is not None and event.phase == FORWARD and event.gradients_finite:
            # All gradients are finite, so these values may be non-finite on purpose (a mask): report them only once.
            for look in self._looks:
                if look.key.kind in _FORWARD_KINDS and not math.isfinite(look.largest):
                    self._history.excuse(look.key, look.largest)
        for look in self._looks:
            self._history.remember(look.key, look.largest)
        self._looks.clear()
        self._times.clear()
        return event

    def _finite(self, kinds: tuple[str, ...]) -> bool | None:
        """Return whether all samples of these kinds are finite; None if there are none."""
        seen = [math.isfinite(look.largest) for look in self._looks if look.key.kind in kinds]
        return all(seen) if seen else None

    def _scale(self) -> float | None:
        """Return the loss scale of the step's gradients; None if there is none, or more than one."""
        scales = {look.scale for look in self._looks if look.key.kind in GRADIENT_KINDS}
        return scales.pop() if len(scales) == 1 else None


def owner(key: TensorKey) -> str:
    """Return the module to which a tensor belongs; for parameters, the name up to its last dot or slash."""
    if key.kind in (ACTIVATION, ACTIVATION_GRADIENT):
        return key.name
    cut = max(key.name.rfind("."), key.name.rfind("/"))
    return key.name[:cut] if cut > 0 else ""
