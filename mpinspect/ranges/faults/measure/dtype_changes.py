"""Observers of dtypes that change in a run: of parameters between two steps, of states when loaded, in autocast regions."""

from __future__ import annotations

import weakref
from collections import Counter

import torch

from mpinspect.ranges.capture.loaded_states import CastStates, cast_states
from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.faults.measure.measuring import NARROW, Measuring, Run
from mpinspect.ranges.records import AutocastElsewhere, ParametersCast, StaleCasts, StatesCast

#: Maximum number of groups that are read in every step.
_MOST_GROUPS = 8


class DtypeChanges(Measuring):
    """Compares dtypes before each step of an optimizer; reads no tensor.

    Between measured steps only the first parameter of each group is compared, and all if one of these has changed.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._first: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[torch.dtype]] = weakref.WeakKeyDictionary()
        #: The optimizers whose parameters have been compared.
        self._compared: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, CastStates] = weakref.WeakKeyDictionary()

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the states that were cast since the last step, and the parameters that became 16 bits wide."""
        cast = cast_states(optimizer)
        if cast is not None and self._known.get(optimizer) is not cast:
            self._known[optimizer] = cast
            names = (type(optimizer).__name__, cast.line, *cast.states)
            self._record(StatesCast(step=self._clock.step, names=names, text=f"{cast.before} {cast.after}"))
        first = [group["params"][0].dtype for group in optimizer.param_groups[:_MOST_GROUPS] if group["params"]]
        if self.at_work or self._first.get(optimizer) != first:
            self._first[optimizer] = first
            self._compare(optimizer)

    def _compare(self, optimizer: torch.optim.Optimizer) -> None:
        before = self._recording.stepped_in
        now = {each.name: each.parameter.dtype for each in self._optimizers.parameters(optimizer)}
        is_new = optimizer not in self._compared
        self._compared.add(optimizer)
        self._recording.stepped_in = before | now
        wide = {name for name, dtype in before.items() if dtype.is_floating_point and dtype not in NARROW}
        narrower = [name for name, dtype in now.items() if name in wide and dtype in NARROW]
        if narrower:
            text = f"{dtype_name(before[narrower[0]])} {dtype_name(now[narrower[0]])}"
            found = ParametersCast(
                step=self._clock.step,
                names=tuple(narrower),
                text=text,
                of=len(now),
                count=len(narrower),
                is_new_optimizer=is_new,
            )
            self._record_names(found)


class Autocasts(Measuring):
    """Records regions for another device type than the model's, and forwards with outdated casts of weights.

    Autocast caches the 16-bit casts of FP32 weights until its outermost region ends. An update inside the region changes the
    weights but not the casts, so the next forward in the same region computes with the old weights.
    """

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
