"""Times a device's work for callbacks, with events in its stream that are read later without waiting."""

from __future__ import annotations

from collections import deque
from typing import Any

from mpinspect.runtime.device import timing_event


class EventStopwatch:
    """Records a pair of events around each callback, on the current device and stream (Meter's DeviceStopwatch).

    A pair encloses our kernels and the gaps between them while the host is slower; both delay the training's own work on
    the device. Recording starts once the process uses an accelerator: a model may be moved there during the run.
    """

    def __init__(self) -> None:
        self._begun: Any = None
        self._pairs: list[tuple[Any, Any]] = []
        self._travelling: deque[list[tuple[Any, Any]]] = deque()
        #: Events that have been read and can be reused.
        self._free: list[Any] = []

    def begin(self) -> None:
        """Record the begin of a callback."""
        self._begun = self._recorded()

    def end(self) -> None:
        """Record the end of the callback."""
        if self._begun is not None:
            self._pairs.append((self._begun, self._recorded()))
            self._begun = None

    def end_step(self) -> None:
        """Complete the pairs of a step; called after its last callback."""
        if self._pairs:
            self._travelling.append(self._pairs)
            self._pairs = []

    def arrived(self) -> list[float]:
        """Return the seconds of each completed step not returned before; does not wait for the GPU."""
        seconds = []
        while self._travelling and all(end.query() for _, end in self._travelling[0]):
            pairs = self._travelling.popleft()
            seconds.append(sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3)
            self._free += [event for pair in pairs for event in pair]
        return seconds

    def _recorded(self) -> Any:
        event: Any = self._free.pop() if self._free else timing_event()
        if event is not None:
            event.record()
        return event
