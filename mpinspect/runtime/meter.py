"""Measures the inspector's own cost: the training thread's time in its callbacks, and the GPU's in its kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

#: On a GPU the first few inspected steps are timed, then one in every 16, because two events around each callback take
#: some microseconds themselves. An untimed step is assumed to cost as much as the last timed one.
_TIMED_FIRST, _TIMED_EVERY = 4, 16


class DeviceStopwatch(Protocol):
    """Times the work that callbacks submit to a device, without waiting for the device."""

    def begin(self) -> None:
        """Record the begin of a callback."""

    def end(self) -> None:
        """Record the end of the callback."""

    def end_step(self) -> None:
        """Record the end of a step; called after its last callback."""

    def arrived(self) -> list[float]:
        """Return the seconds of each completed step not returned before."""


class Meter:
    """Adds up the time inside callbacks for each step; of nested callbacks only the outermost is timed.

    Args:
        clock: returns monotonic seconds.
        device: times the work on a GPU; None on a CPU.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, device: DeviceStopwatch | None = None) -> None:
        self.clock = clock
        self.running = False
        self._device = device
        self._timed_device: DeviceStopwatch | None = None
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

    def _device_s_told(self, device: DeviceStopwatch) -> float:
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
