"""The tensors that the watch read in a step, and the evaluation of their values on the host, which may result in an event.

Values on a device are copied to the host together and asynchronously when the step ends, and are evaluated a step later.
A fused optimizer decides on the device whether it skips its step, so its ``found_inf`` is copied with these values.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from mpinspect.ranges.capture import culprit
from mpinspect.ranges.capture.backward_scale import BackwardScale
from mpinspect.ranges.capture.calls import StepCalls
from mpinspect.ranges.capture.culprit import BACKWARD, FORWARD, LOSS, NOT_READ, SCALED_LOSS, Seen
from mpinspect.ranges.capture.device_magnitudes import StepMagnitudes, StepSlot
from mpinspect.ranges.capture.host_rows import HostCopy, copy_groups
from mpinspect.ranges.capture.innocent import gradient_stays_finite, stays_finite
from mpinspect.ranges.capture.largest import Value, from_stacked, is_broken, on_host, stacked
from mpinspect.ranges.capture.layers import WatchedParameter
from mpinspect.ranges.capture.steps import LossLevel
from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.kinds import WEIGHT_GRADIENT
from mpinspect.ranges.session import Event, is_below
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.runtime.guard import Unread


class Reading(NamedTuple):
    """One tensor that was read, like ``culprit.Seen``, but its value may still be on a device."""

    phase: str
    what: str
    name: str
    module: str
    tensor: int
    micro_batch: int
    value: Value
    is_input: bool = False
    dtype: torch.dtype | None = None

    @property
    def is_broken(self) -> bool | None:
        """Whether the value is not finite; None if it is still on a device."""
        return is_broken(self.value)


class ReadTogether(NamedTuple):
    """Weight gradients that were read in one launch; most steps need no reading of each.

    Args:
        place: the number of readings before them.
        parameters, dtypes: the parameters, and their gradients' dtypes.
        micro_batch: its number, from 0.
        magnitudes, first: the step's slots, and the first of the gradients' slots, which are consecutive.
    """

    place: int
    parameters: list[WatchedParameter]
    dtypes: list[torch.dtype]
    micro_batch: int
    magnitudes: StepMagnitudes
    first: int

    def readings(self) -> Iterator[Reading]:
        """Yield the reading of each gradient."""
        for slot, (watched, dtype) in enumerate(zip(self.parameters, self.dtypes, strict=True), self.first):
            value = StepSlot(self.magnitudes, slot, dtype is torch.float64)
            name, owner = watched.name, watched.owner
            yield Reading(BACKWARD, WEIGHT_GRADIENT, name, owner, -1, self.micro_batch, value, False, dtype)


@dataclass
class StepLog:
    """Everything observed in one step. Holds no tensor of the model, only reduced values."""

    step: int = 0
    readings: list[Reading] = field(default_factory=list)
    #: The gradients that are not among the readings yet.
    together: list[ReadTogether] = field(default_factory=list)
    calls: StepCalls = field(default_factory=StepCalls)
    last_output: Reading | None = None
    #: Numbers of the inputs that no observed module made and that have not been read yet.
    unseen_inputs: set[int] = field(default_factory=set)
    #: Numbers of the tensors and names of the parameters' gradients that are made of values of all ranks.
    of_all_ranks: set[int | str] = field(default_factory=set)
    #: Whether the model is a pipeline stage that received its input from the previous stage.
    is_later_stage: bool = False
    #: Whether calls of modules that are called often in one forward were not observed.
    is_partial: bool = False
    #: Whether an output is not finite, or is on a device, so that this is not known yet.
    may_be_broken: bool = False
    #: Modules that can't have made the first infinity or NaN; None unless determined before the optimizer's step.
    innocent: frozenset[str] | None = None
    #: The loss scales of the step's backwards, by micro-batch.
    scales: dict[int, BackwardScale] = field(default_factory=dict)
    #: Whether a scaler multiplied a loss; the loss was read at that moment.
    loss_is_scaled: bool = False
    skipped: bool | None = None
    #: The last micro-batch whose backward began after the loop had cleared all earlier gradients.
    dropped_before: int | None = None
    found_inf: list[torch.Tensor] = field(default_factory=list)
    #: The slots of the readings, by device.
    magnitudes: list[StepMagnitudes] = field(default_factory=list)
    #: Whether only the modules that outline the model were observed.
    is_outlined: bool = False
    #: Whether a scaler checks the weight gradients of the last backward.
    is_checked: bool = False
    #: Whether weight gradients are read when they are clipped or an optimizer steps with them, and not as they arrive.
    reads_at_optimizers: bool = False
    #: Whether weight gradients are read only if another value is not finite.
    spares_weight_gradients: bool = False
    #: The names of the parameters whose gradients were read before they were clipped.
    read_before_clipping: set[str] = field(default_factory=set)
    #: Whether all readings are slots. Most slots are read only if a value is not finite.
    is_on_devices: bool = False
    #: Whether ``backward_broke`` has found such a gradient, and how many readings it has searched.
    _broke: bool = False
    _searched: int = 0

    def spread_out(self) -> None:
        """Add the gradients that were read together to the readings."""
        while self.together:
            group = self.together.pop()
            self.readings[group.place : group.place] = group.readings()

    def backward_broke(self) -> bool:
        """Return whether any gradient read so far is known on the host not to be finite."""
        new = itertools.islice(self.readings, self._searched, None)
        self._broke = self._broke or any(reading.phase == BACKWARD and reading.is_broken for reading in new)
        self._searched = len(self.readings)
        return self._broke


@dataclass
class _Travelling:
    log: StepLog
    copies: list[tuple[list[int], HostCopy]]
    found_inf: HostCopy | None = None

    def ready(self) -> bool:
        if self.found_inf is not None and not self.found_inf.ready():
            return False
        return all(copy.ready() for _, copy in self.copies) and all(each.ready() for each in self.log.magnitudes)


#: The doubt about a block of an outlined step, and the doubt if the weight gradients of the step before may not have been read.
_INSIDE_BLOCK = "the modules inside it were not observed in this step, between samples on a GPU (every=1 observes them)"
_INSIDE_BLOCK_OR_BEFORE = (
    "the modules inside it were not observed in this step, nor the weight gradients of the step before, between samples on a GPU "
    "(every=1 observes them)"
)


class Judge:
    """Names the first culprit of each step, and remembers every tensor's last maxima.

    Args:
        modules: the watched modules, by path.
        unread: receives the tensors whose values can't be copied to the host.
        loss_level: receives the losses that are read on the host.
    """

    def __init__(
        self, modules: Mapping[str, torch.nn.Module], unread: Unread[TensorKey], loss_level: LossLevel
    ) -> None:
        self._modules = modules
        self._unread, self._loss_level = unread, loss_level
        self._travelling: deque[_Travelling] = deque()
        self._history = culprit.History()
        self._skips_on_device = 0

    def send(self, log: StepLog) -> None:
        """Copy a step's values to the host. Does not wait."""
        found_inf = HostCopy(torch.stack(log.found_inf)) if log.found_inf else None
        self._travelling.append(_Travelling(log, self._copies(log), found_inf))

    def events(self, *, wait: bool) -> list[Event]:
        """Return the events of the steps whose values have reached the host. ``wait``: wait for the values of all steps sent."""
        events: list[Event] = []
        while self._travelling and (wait or self._travelling[0].ready()):
            event = self._judge(self._travelling.popleft())
            if event is not None:
                events.append(event)
        return events

    def take_skips_on_device(self) -> int:
        """Return how many more steps have become known as skipped on the device since the last call."""
        skips, self._skips_on_device = self._skips_on_device, 0
        return skips

    def find_innocent(self, log: StepLog) -> None:
        """Record which modules can't have made the last gradient's infinity or NaN, if any, before the weights are updated."""
        if log.innocent is None and log.readings and log.readings[-1].phase == BACKWARD and log.readings[-1].is_broken:
            # Values still on a device count as finite, to avoid waiting for them.
            seen = _seen(log.readings, [on_host(reading.value) or 0.0 for reading in log.readings])
            stories, _ = log.calls.stories()
            log.innocent = self._innocent(seen, stories)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _copies(self, log: StepLog) -> list[tuple[list[int], HostCopy]]:
        """Return one host copy for each device and kind of value, of shape (n, 2) or (n, HEADER), with its readings' places."""
        if log.is_on_devices:
            return []
        groups: dict[Any, list[int]] = {}
        values: dict[int, Any] = {
            index: reading.value for index, reading in enumerate(log.readings) if isinstance(reading.value, tuple)
        }
        for index, value in values.items():
            groups.setdefault((value[0].device, value[0].dtype, value[0].shape, len(value)), []).append(index)
        lost = set()

        def failed(index: int, error: Exception) -> None:
            lost.add(index)
            self._unread.failed(TensorKey(log.readings[index].name, log.readings[index].what), error)

        copies = copy_groups(
            groups.values(), lambda places: HostCopy(stacked([values[index] for index in places])), failed
        )
        if not lost:
            return copies
        log.readings = [reading for index, reading in enumerate(log.readings) if index not in lost]
        return self._copies(log)

    def _judge(self, arrived: _Travelling) -> Event | None:
        log = arrived.log
        if arrived.found_inf is not None:
            log.skipped = bool(log.skipped) or bool(arrived.found_inf.values().any())
            self._skips_on_device += log.skipped
        if log.is_on_devices and not any(each.broken() for each in log.magnitudes):
            # Most of these tensors were not read, so the few maxima would be a misleading history.
            return None
        log.spread_out()
        largest = _largest(log, arrived.copies)
        if all(map(math.isfinite, largest)):
            self._remember(log, largest)
            return None
        seen = _seen(log.readings, largest)
        # Gradients do not depend on the value of the loss: an infinite scaled loss with finite gradients is harmless.
        loss_matters = bool(log.skipped) or culprit.finite_gradients(seen) is not True
        suspicious = [
            look for look in seen if not self._history.excuses(look) and (look.what != SCALED_LOSS or loss_matters)
        ]
        stories, calls = log.calls.stories()
        innocent = log.innocent
        if innocent is None:
            innocent = self._innocent(suspicious, stories)
        read = {look.tensor for look in seen if look.phase == FORWARD and look.largest != NOT_READ}
        found = culprit.find_culprit(suspicious, stories, calls, read, innocent)
        event = None
        if found is not None:
            event = self._event(found, suspicious, calls, log)
        self._remember(log, largest)
        return event

    def _innocent(self, seen: list[Seen], stories: list[culprit.TensorStory]) -> frozenset[str]:
        """Return the modules that can't have made the first infinity or NaN from their inputs."""
        first = culprit.first_broken(seen)
        if first is None or first.tensor < 0:
            return frozenset()
        if first.phase == FORWARD:
            return frozenset([first.module] if stays_finite(self._modules[first.module]) else [])
        largest = culprit.largest_at_output(seen, stories, first)
        return frozenset(
            module
            for module in dict.fromkeys(stories[first.tensor].consumers)
            if largest.get(module, NOT_READ) != NOT_READ
            and gradient_stays_finite(self._modules[module], largest[module])
        )

    def _remember(self, log: StepLog, largest: list[float]) -> None:
        self._history.remember(
            ((reading.name, reading.what), value)
            for reading, value in zip(log.readings, largest, strict=True)
            if not reading.is_input and value != NOT_READ
        )
        losses = (value for reading, value in zip(log.readings, largest, strict=True) if reading.what == LOSS)
        finite = [loss for loss in losses if math.isfinite(loss) and loss != NOT_READ]
        # Of values on devices, only those of steps that broke are read.
        if finite and not log.is_on_devices:
            self._loss_level.add(max(finite))

    def _is_block(self, module: str, calls: list[culprit.CallRecord]) -> bool:
        """Return whether a module contains others without any observed call."""
        has_inside = any(is_below(path, module) for path in self._modules)
        return has_inside and not any(is_below(call.module, module) for call in calls)

    def _event(self, found: culprit.Culprit, seen: list[Seen], calls: list[culprit.CallRecord], log: StepLog) -> Event:
        if log.of_all_ranks & {found.first.name, found.first.tensor}:
            doubt = "the tensor combines values of all ranks, so it may have arisen on another one"
            found = replace(found, explanation=f"{found.explanation}; {doubt}", elsewhere=True)
        elif found.given and log.is_later_stage:
            reason = "the previous stage of the pipeline sent it: look at that stage's rank"
            found = replace(found, explanation=reason, elsewhere=True)
        if doubt := self._doubt(found, calls, log):
            found = replace(found, explanation=f"{found.explanation}; {doubt}")
        is_dropped = not log.skipped and _dropped(log, seen)
        scale = log.scales.get(found.first.micro_batch, next(reversed(log.scales.values()), None))
        event = culprit.event_of(
            found,
            seen,
            self._history,
            step=log.step,
            # Waits for the GPU if the scale is still there, which only happens if there is an event.
            scale=None if scale is None else scale.number(),
            skipped=is_dropped or log.skipped,
            dropped=is_dropped,
            forward_finite=culprit.finite_in_forward(seen),
        )
        self._history.excuse_masks(event, seen)
        return event

    def _doubt(self, found: culprit.Culprit, calls: list[culprit.CallRecord], log: StepLog) -> str:
        """Return which tensors or modules the step did not observe, so that another module may be the culprit; else ""."""
        if log.is_partial and (found.after or found.module != found.first.module):
            return "not every call of this step was observed, so it may have arisen in a module that is called often"
        may_be_clipped = log.reads_at_optimizers and found.first.name not in log.read_before_clipping
        if may_be_clipped and found.first.what == WEIGHT_GRADIENT:
            return (
                "in this step, between samples on a GPU, weight gradients were read when the optimizer stepped, after "
                "clipping, which spreads a NaN to all of them (every=1 reads them as they arrive)"
            )
        if not log.is_outlined or not self._is_block(found.module, calls):
            return ""
        if log.spares_weight_gradients and not log.is_checked:
            return _INSIDE_BLOCK_OR_BEFORE
        return _INSIDE_BLOCK


def _dropped(log: StepLog, seen: Iterable[Seen]) -> bool:
    """Return whether the loop dropped every non-finite gradient of the step before another backward."""
    return log.dropped_before is not None and all(
        look.finite for look in seen if look.phase == BACKWARD and look.micro_batch >= log.dropped_before
    )


def _seen(readings: Iterable[Reading], largest: Iterable[float]) -> list[Seen]:
    return [
        Seen(*read[:6], value, read.is_input, dtype_name(read.dtype) if read.dtype is not None else "")
        for read, value in zip(readings, largest, strict=True)
    ]


def _largest(log: StepLog, copies: list[tuple[list[int], HostCopy]]) -> list[float]:
    """Return the largest magnitude of each reading, which may be inf, NaN or NOT_READ; leave lost readings out of the log."""
    values = [reading.value for reading in log.readings]
    largest = [value if type(value) is float else _known(value) for value in values]
    for indices, copy in copies:
        for index, value in zip(indices, from_stacked(copy.values()), strict=True):
            largest[index] = value
    if None in largest:
        log.readings = [reading for reading, value in zip(log.readings, largest, strict=True) if value is not None]
    return [value for value in largest if value is not None]


def _known(value: Value) -> float | None:
    """Return the number that a value holds; 0 if its tensors' copy holds it."""
    if isinstance(value, float):
        return value
    if isinstance(value, tuple):
        return 0.0
    return value.largest()
