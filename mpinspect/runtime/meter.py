"""What the inspector itself costs: seconds of the training's thread inside its callbacks, and of the GPU in its kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

#: On a GPU the first steps that look are timed, and then one in so many: two events around every callback cost some
#: microseconds themselves. The others are taken to cost what the last one timed did.
_TIMED_FIRST, _TIMED_EVERY = 4, 16


class DeviceStopwatch(Protocol):
    """Times the work that callbacks hand to a device; nothing here waits for it."""

    def begin(self) -> None:
        """A callback begins."""

    def end(self) -> None:
        """It is over."""

    def end_step(self) -> None:
        """All callbacks of a step are over."""

    def arrived(self) -> list[float]:
        """Seconds of each step whose work is done by now and that was not told of yet."""


class Meter:
    """Adds up the time inside callbacks, step by step. The outermost callback is timed, whatever it calls.

    Args:
        clock: seconds, monotonic.
        device: times what runs on a GPU; None on a CPU.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, device: DeviceStopwatch | None = None) -> None:
        self.clock = clock
        self.running = False
        self._device = device
        self._timed_device: DeviceStopwatch | None = None
        self._own_s = self._began = 0.0
        self._step_began: float | None = None
        #: Steps so far in which anything was looked at, and whether this is one.
        self._looks, self._looked = 0, False
        self._usual_device_s = 0.0

    def begin(self) -> None:
        """Training enters the inspector."""
        self.running = True
        self._began = self.clock()
        if self._timed_device is not None:
            self._timed_device.begin()

    def end(self) -> None:
        """It leaves."""
        if self._timed_device is not None:
            self._timed_device.end()
        self._own_s += self.clock() - self._began
        self.running = False

    def end_step(self) -> tuple[float | None, float]:
        """The step is over, mostly inside of a callback: what is left of that belongs to the next step.

        Returns:
            seconds since the last call (None at the first), and those that were the inspector's own: on a GPU with the device's,
            as far as they are known, though the two may overlap.
        """
        now = self.clock()
        if self.running:
            self._own_s += now - self._began
            self._began = now
        step_s = None if self._step_began is None else now - self._step_began
        own_s, self._own_s, self._step_began = self._own_s, 0.0, now
        return step_s, own_s

    def next_step(self, looks: bool) -> float:
        """The next step is about to begin; whether anything is looked at in it.

        Returns:
            seconds that the device spent in steps before, told now; for one that was not timed the last that are known.
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
