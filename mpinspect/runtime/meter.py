"""Measures the inspector's own cost: the training thread's time in its callbacks, and the GPU's in its kernels."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from mpinspect.runtime.device import timing_event

#: On a GPU the first few inspected steps are timed, then one in every 16, because two events around each callback take
#: some microseconds themselves. An untimed step is assumed to cost as much as the last timed one.
_TIMED_FIRST, _TIMED_EVERY = 4, 16


class EventStopwatch:
    """Records a pair of events around each callback, on the current device and stream, and never waits.

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
        """Return the seconds of each completed step not returned before."""
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


class Meter:
    """Adds up the time inside callbacks for each step; of nested callbacks only the outermost is timed.

    Args:
        clock: returns monotonic seconds.
        device: times the work on a GPU; None on a CPU.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, device: EventStopwatch | None = None) -> None:
        self.clock = clock
        self.running = False
        self._device = device
        self._timed_device: EventStopwatch | None = None
        self._own_s = self._began = 0.0
        self._step_began: float | None = None
        #: Number of inspected steps so far, and whether the current step is one.
        self._looks, self._looked = 0, False
        self._usual_device_s = 0.0

    def begin(self) -> None:
        """Start timing: the training calls the inspector."""
        self.running = True
        self._began = self.clock()
        if self._timed_device is not None:
            self._timed_device.begin()

    def end(self) -> None:
        """Stop timing: the inspector returns to the training."""
        if self._timed_device is not None:
            self._timed_device.end()
        self._own_s += self.clock() - self._began
        self.running = False

    def end_step(self) -> tuple[float | None, float]:
        """End the step and return its times; if a callback is running, its remaining time counts towards the next step.

        Returns:
            The seconds since the last call (None at the first), and the seconds of those spent in callbacks.
        """
        now = self.clock()
        if self.running:
            self._own_s += now - self._began
            self._began = now
        step_s = None
        if self._step_began is not None:
            step_s = now - self._step_began
        own_s, self._own_s, self._step_began = self._own_s, 0.0, now
        return step_s, own_s

    def next_step(self, looks: bool) -> float:
        """Prepare for the next step; ``looks``: whether the inspector inspects anything in that step.

        Returns:
            The device's seconds in earlier steps that became known now; an untimed step counts like the last timed one.
        """
        if self._device is None:
            return 0.0
        told = self._device_s_told(self._device)
        self._looked = looks
        self._looks += looks
        if looks and (self._looks <= _TIMED_FIRST or self._looks % _TIMED_EVERY == 0):
            self._timed_device = self._device
            if self.running:
                self._device.begin()
        return told

    def _device_s_told(self, device: EventStopwatch) -> float:
        told = 0.0
        if self._timed_device is not None:
            self._timed_device = None
            device.end()
            device.end_step()
        elif self._looked:
            told = self._usual_device_s
        for seconds in device.arrived():
            self._usual_device_s = seconds
            told += seconds
        return told
