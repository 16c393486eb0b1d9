"""Detects infinities and NaNs in a step's arrays. The first non-finite array observed becomes an event.

A recorder knows only the order of the arrays passed to it, not the execution order; the event's explanation mentions this. The
kind of an array assigns it to the forward or the backward.
"""

from __future__ import annotations

from mpinspect.ranges.capture import culprit
from mpinspect.ranges.capture.arrays.samples import ArraySample
from mpinspect.ranges.capture.culprit import BACKWARD, FORWARD, Culprit, History, Seen
from mpinspect.ranges.kinds import ACTIVATION, ACTIVATION_GRADIENT, GRADIENT_KINDS, WEIGHT
from mpinspect.ranges.session import Event
from mpinspect.ranges.windows.tensors import TensorKey

_FORWARD_KINDS = (ACTIVATION, WEIGHT)
_WHY = "it was the first array observed in this step that was not finite"


class NonFiniteWatch:
    """Finds the non-finite event of each step in its samples."""

    def __init__(self) -> None:
        self._seen: list[Seen] = []
        #: The loss scale of each entry of ``_seen``.
        self._scales: list[float | None] = []
        self._times: dict[TensorKey, int] = {}
        self._history = History()

    def add(self, sample: ArraySample) -> None:
        """Add a sample of the open step; a repeated key is assumed to be from the next micro-batch."""
        name, kind = sample.key
        phase = FORWARD if kind in _FORWARD_KINDS else BACKWARD
        micro_batch = self._times.get(sample.key, 0)
        self._times[sample.key] = micro_batch + 1
        self._seen.append(Seen(phase, kind, name, owner(sample.key), -1, micro_batch, sample.largest))
        self._scales.append(sample.scale)

    def judge(self, step: int, skipped: bool | None) -> Event | None:
        """Return the event of the open step, or None; changes no state."""
        first = culprit.first_broken([look for look in self._seen if not self._history.excuses(look)])
        if first is None:
            return None
        return culprit.event_of(
            Culprit(first.phase, first.module, first, _WHY),
            self._seen,
            self._history,
            step=step,
            scale=self._scale_of(first),
            skipped=skipped,
            forward_finite=culprit.are_finite(look for look in self._seen if look.what == ACTIVATION),
        )

    def end_step(self, step: int, skipped: bool | None) -> Event | None:
        """End the step; return its event, or None."""
        event = self.judge(step, skipped)
        if event is not None:
            self._history.excuse_masks(event, self._seen)
        self._history.remember((look.key, look.largest) for look in self._seen)
        self._seen.clear()
        self._scales.clear()
        self._times.clear()
        return event

    def _scale_of(self, first: Seen) -> float | None:
        """Return a gradient's loss scale; for other arrays the scale of the step's gradients, None unless it is unique."""
        of_gradients = [each for each in zip(self._seen, self._scales, strict=True) if each[0].what in GRADIENT_KINDS]
        scales = {scale for look, scale in of_gradients if look is first} or {scale for _, scale in of_gradients}
        return scales.pop() if len(scales) == 1 else None


def owner(key: TensorKey) -> str:
    """Return the module that owns a tensor; for parameters, the name up to its last dot or slash."""
    if key.kind in (ACTIVATION, ACTIVATION_GRADIENT):
        return key.name
    cut = max(key.name.rfind("."), key.name.rfind("/"))
    return key.name[: max(cut, 0)]
