"""An observer of autocast regions: their device types, and updates of the weights inside them.

Autocast caches the 16-bit casts of FP32 weights until its outermost region ends. An update inside the region changes the
weights but not the casts, so the next forward in the same region computes with the old weights.
"""

from __future__ import annotations

from collections import Counter

import torch

from mpinspect.ranges.faults.measure.measuring import Measuring, Run
from mpinspect.ranges.records import AutocastElsewhere, StaleCasts


class Autocasts(Measuring):
    """Records regions for another device type than the model's, and forwards with outdated casts of weights."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        #: Number of regions by device type.
        self._opened: Counter[str] = Counter()
        #: The devices of the FP32 weights, which autocast casts there; None: to be looked up.
        self._devices: set[str] | None = None
        #: Whether an optimizer has stepped in an autocast region whose cache was not cleared since.
        self._stepped_inside = False
        self._first_stale = 0
        self._stale = 0

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Observe the backwards of measured steps, and look up again where the weights are."""
        super().begin_step(sampled, watched)
        if self.at_work:
            self._devices = None

    def autocast_made(self, device: str, enabled: bool) -> None:
        """Count a region."""
        self._opened[device] += enabled

    def autocast_cache_cleared(self) -> None:
        """Record that the cache holds no casts."""
        self._stepped_inside = False

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Record a step inside a region whose cache holds casts of the weights."""
        if torch.is_autocast_cache_enabled() and self._is_cast():
            self._stepped_inside = True

    def backward_called(self, losses: list[torch.Tensor]) -> None:
        """Record that the forward of this backward used outdated casts."""
        if self._stepped_inside and self._is_cast():
            if not self._stale:
                self._first_stale = self._clock.step
            self._stale += 1

    def _is_cast(self) -> bool:
        """Return whether autocast is on for a device with FP32 weights that it casts."""
        if self._devices is None:
            self._devices = {
                each.parameter.device.type
                for each in self._parameters
                if each.parameter.dtype is torch.float32 and each.parameter.requires_grad
            }
        return any(torch.is_autocast_enabled(device) for device in self._devices)

    def run_ends(self) -> None:
        """Record the outdated casts, and the regions for another device type."""
        if self._stale:
            self._record(StaleCasts(step=self._first_stale, steps=self._stale))
        devices = {each.parameter.device.type for each in self._parameters}
        asked = [device for device, times in self._opened.items() if times]
        if asked and not devices.intersection(asked):
            names = (" and ".join(sorted(asked)), " and ".join(sorted(devices)))
            self._record(AutocastElsewhere(names=names, regions=sum(self._opened.values())))
