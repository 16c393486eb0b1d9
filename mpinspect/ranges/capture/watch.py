"""The non-finite watch: at every step the largest magnitude of every output and gradient, in execution order.

One reduction a tensor. On a CPU its value is known at once; on a GPU it is left on the device, and the values travel to the
host together when the step ends, asynchronously, and are looked at a step later. Of gradients that are counted anyway the row
has it, which is read when the step ends. From them come the first culprit and a short
ring of each tensor's last maxima.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mpinspect.counting import layout
from mpinspect.counting.magnitude import largest_magnitude
from mpinspect.counting.pieces import detached_values
from mpinspect.ranges.capture import culprit
from mpinspect.ranges.capture.calls import Fresh, StepCalls
from mpinspect.ranges.capture.culprit import BACKWARD, FORWARD, LOSS, SCALED_LOSS, Seen
from mpinspect.ranges.capture.host_copy import HostCopy, copy_groups
from mpinspect.ranges.capture.innocent import gradient_stays_finite, stays_finite
from mpinspect.ranges.capture.last_values import LastValues
from mpinspect.ranges.capture.loss_scale import BackwardScale
from mpinspect.ranges.capture.waiting import Waiting
from mpinspect.ranges.kinds import ACTIVATION, ACTIVATION_GRADIENT, WEIGHT_GRADIENT
from mpinspect.ranges.session import Event, TensorKey
from mpinspect.runtime.distributed import local_part
from mpinspect.runtime.guard import Unread

#: Maxima remembered of each tensor.
RING_LENGTH = 8
#: In so many steps it is learned which outputs are handed on.
_LEARNING_STEPS = 3


#: The largest magnitude; while it is on a device the smallest and largest value of the tensor, or a row of counts.
_Value = float | tuple[torch.Tensor, ...]
#: That, or the row of the tensor's counts.
Found = torch.Tensor | _Value


class _Look(NamedTuple):
    """A look at one tensor."""

    phase: str
    what: str
    name: str
    module: str
    tensor: int
    micro_batch: int
    value: _Value
    is_input: bool = False


@dataclass
class _StepLog:
    """Everything seen in one step. Holds no tensor of the model, only reduced values."""

    step: int = 0
    looks: list[_Look] = field(default_factory=list)
    calls: StepCalls = field(default_factory=StepCalls)
    last_output: _Look | None = None
    #: Numbers of inputs that no module was seen to make and that were not looked at so far.
    unseen_inputs: set[int] = field(default_factory=set)
    #: Whether an output that is known already is not finite.
    broken: bool = False
    #: Modules that can't have made the first infinity or NaN, where that was found out before the weights moved.
    innocent: frozenset[str] | None = None
    scale: BackwardScale | None = None
    skipped: bool | None = None
    found_inf: list[torch.Tensor] = field(default_factory=list)


@dataclass
class _Travelling:
    log: _StepLog
    copies: list[tuple[list[int], HostCopy]]
    found_inf: HostCopy | None = None

    def ready(self) -> bool:
        copies = [copy for _, copy in self.copies] + ([self.found_inf] if self.found_inf is not None else [])
        return all(copy.ready() for copy in copies)


class Watch:
    """Sees tensors go by; tells the first culprit of each step.

    Args:
        modules: those that are watched, by path.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        #: The tensors that could not be looked at.
        self.unread = Unread[TensorKey]()
        self._modules = modules
        self._log = _StepLog()
        self._travelling: deque[_Travelling] = deque()
        self._maxima: dict[tuple[str, str], deque[float]] = {}
        #: The largest magnitude in the output before.
        self._last_output: LastValues[float] = LastValues()
        self._last_module = ""
        #: Modules whose output a container was seen to return.
        self._handed_on: set[str] = set()
        self._steps = 0
        #: Modules that return infinities (or NaNs) while every gradient is finite: masks.
        self._harmless: set[tuple[str, bool]] = set()
        self._skips_on_device = 0

    # -- while the step runs ------------------------------------------------------------------------------------

    def module_called(
        self, module: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> list[Fresh]:
        """Note that a module's forward ran. Returns the tensors not seen before in this step, inputs first."""
        fresh = self._log.calls.called(module, inputs, outputs)
        if fresh and fresh[0][2]:
            self._log.unseen_inputs.update(number for _, number, is_input in fresh if is_input)
        return fresh

    def unseen_input(self) -> int:
        """The number of a tensor that is not at hand: the one inside a wrapper."""
        return self._log.calls.unseen()

    def wrapped_input(self, number: int, module: str) -> None:
        """Tensor ``number`` is what a full backward hook's wrapper was put around before ``module`` got it."""
        self._log.calls.wrapped(number, module)

    def output(
        self, module: str, tensor: torch.Tensor, number: int, micro_batch: int, row: torch.Tensor | None
    ) -> bool:
        """The forward's output (``row``: its counts, where it was counted already). Whether it is known to be finite."""
        found: torch.Tensor | float | None = row
        tensor = local_part(tensor)
        before = self._last_output.found_in(tensor) if row is None and self._last_output.remembers else None
        if before is not None:
            found = before
            self._handed_on.add(self._last_module)
        look = self._look(FORWARD, ACTIVATION, module, module, number, micro_batch, tensor, found)
        self._log.last_output = look
        if look is None:
            return True
        if not isinstance(look.value, float):
            return False
        self._keep(module, tensor, look.value)
        if math.isfinite(look.value):
            return True
        self._log.broken = True
        return False

    def _keep(self, module: str, tensor: torch.Tensor, largest: float) -> None:
        """Remember what is known of an output, if it may be handed on: after a few steps those are known that were."""
        if self._steps < _LEARNING_STEPS or module in self._handed_on:
            self._last_output.keep(tensor, largest)
            self._last_module = module
        else:
            self._last_output.forget()

    @property
    def forward_is_broken(self) -> bool:
        """Whether an output of this step is known not to be finite."""
        return self._log.broken

    def look_at_inputs(self, module: str, inputs: Iterable[torch.Tensor], micro_batch: int) -> None:
        """An output of this call is not known to be finite: so it matters whether what went in was, where no module made it."""
        for tensor in inputs:
            number = self._log.calls.number_of(tensor)
            if number is not None and number in self._log.unseen_inputs:
                self._log.unseen_inputs.discard(number)
                self._look(FORWARD, ACTIVATION, module, module, number, micro_batch, tensor, None, is_input=True)

    def activation_gradient(
        self,
        module: str,
        gradient: torch.Tensor,
        number: int,
        micro_batch: int,
        found: Found | None,
        is_input: bool,
    ) -> Found | None:
        """The gradient at a module's output, or at an input that no module was seen to make.

        ``found``: what is known of it, where it was looked at or counted already. Returns what is known of it now.
        """
        value = self._read(TensorKey(module, ACTIVATION_GRADIENT), gradient, found, False)
        if value is None:
            return None
        self._log.looks.append(
            _Look(BACKWARD, ACTIVATION_GRADIENT, module, module, number, micro_batch, value, is_input)
        )
        return value if found is None else found

    @property
    def looks(self) -> Sized:
        """Those of this step."""
        return self._log.looks

    def weight_gradient(
        self, name: str, module: str, gradient: torch.Tensor, micro_batch: int, row: torch.Tensor | None
    ) -> None:
        """A parameter's gradient (``row``: its counts, where it was counted already)."""
        self._look(BACKWARD, WEIGHT_GRADIENT, name, module, -1, micro_batch, gradient, row)

    def waited(self, gradients: Iterable[Waiting], micro_batch: int) -> None:
        """Parameters' gradients that have waited: the looks at them, where nothing was found so far, take their places."""
        looks, merged, done = self._log.looks, [], 0
        for each in gradients:
            value = self._read(each.watched.gradient_key, each.values, each.found, False)
            if value is None:
                continue
            merged += looks[done : each.place]
            done = max(done, each.place)
            merged.append(
                _Look(BACKWARD, WEIGHT_GRADIENT, each.watched.name, each.watched.owner, -1, micro_batch, value)
            )
        looks[:] = merged + looks[done:]

    def loss(self, loss: torch.Tensor, micro_batch: int) -> None:
        """The loss that a scaler is about to multiply."""
        self._look(FORWARD, LOSS, "", "", -1, micro_batch, loss, None)

    def scaled_loss(self, loss: torch.Tensor, micro_batch: int) -> None:
        """The loss, once a scaler has multiplied it: the backward begins with it."""
        self._look(BACKWARD, SCALED_LOSS, "", "", -1, micro_batch, loss, None)

    def forward_broke(self) -> bool | None:
        """Whether the last output of this step is not finite, which mostly is so where anything before it was; None on a GPU."""
        return _is_broken(self._log.last_output)

    def weights_are_about_to_move(self) -> None:
        """An optimizer is about to step: where the last gradient is not finite, find out now who can't have made that."""
        looks = self._log.looks
        if self._log.innocent is None and looks and looks[-1].phase == BACKWARD and _is_broken(looks[-1]):
            seen = _seen(looks, [_at_once(look.value) for look in looks])
            stories, _ = self._log.calls.stories()
            self._log.innocent = self._innocent(seen, stories)

    def backward_scale(self, scale: BackwardScale) -> None:
        """The loss scale of this step's backward."""
        self._log.scale = scale

    def skipped(self, skipped: bool) -> None:
        """An optimizer's step was, or was not, skipped."""
        self._log.skipped = skipped or bool(self._log.skipped)

    def stepped_with(self, found_inf: torch.Tensor) -> None:
        """A fused optimizer was handed found_inf: whether it stepped is known when that has reached the host."""
        self._log.found_inf.append(found_inf.detach().clone().reshape(()))

    def take_skips_on_device(self) -> int:
        """Steps found meanwhile to have been skipped on the device, once each."""
        skips, self._skips_on_device = self._skips_on_device, 0
        return skips

    # -- when it ends ------------------------------------------------------------------------------------------

    def end_step(self, step: int) -> list[Event]:
        """Send this step's values to the host; the events of the steps whose values have arrived. Does not wait."""
        log, self._log = self._log, _StepLog()
        log.calls.forget_tensors()
        self._last_output.forget()
        log.step = step
        if log.looks or log.found_inf:
            self._steps += 1
            found_inf = HostCopy(torch.stack(log.found_inf)) if log.found_inf else None
            self._travelling.append(_Travelling(log, self._copies(log), found_inf))
        return self.drain(wait=False)

    def drain(self, *, wait: bool = True) -> list[Event]:
        """The events of the steps whose values have arrived (``wait``: of all that are on their way)."""
        events: list[Event] = []
        while self._travelling and (wait or self._travelling[0].ready()):
            event = self._judge(self._travelling.popleft())
            if event is not None:
                events.append(event)
        return events

    def _copies(self, log: _StepLog) -> list[tuple[list[int], HostCopy]]:
        """One copy to the host for each group of looks of one device and kind of value: shapes (n, 2) and (n, HEADER)."""
        groups: dict[Any, list[int]] = {}
        values: dict[int, Any] = {
            index: look.value for index, look in enumerate(log.looks) if isinstance(look.value, tuple)
        }
        for index, value in values.items():
            groups.setdefault((value[0].device, value[0].dtype, value[0].shape, len(value)), []).append(index)
        lost = set()

        def failed(index: int, error: Exception) -> None:
            lost.add(index)
            self.unread.failed(TensorKey(log.looks[index].name, log.looks[index].what), error)

        copies = copy_groups(
            groups.values(), lambda places: HostCopy(_stacked([values[index] for index in places])), failed
        )
        if not lost:
            return copies
        log.looks = [look for index, look in enumerate(log.looks) if index not in lost]
        return self._copies(log)

    def _judge(self, arrived: _Travelling) -> Event | None:
        log = arrived.log
        largest = _largest(log.looks, arrived.copies)
        if arrived.found_inf is not None:
            log.skipped = bool(log.skipped) or bool(arrived.found_inf.values().any())
            self._skips_on_device += log.skipped
        if all(map(math.isfinite, largest)):
            self._remember(log, largest)
            return None
        seen = _seen(log.looks, largest)
        # Gradients do not depend on the loss's own value: an infinite one that left them finite is nothing.
        loss_matters = bool(log.skipped) or culprit.finite_gradients(seen) is not True
        suspicious = [
            look
            for look in seen
            if (look.phase != FORWARD or (look.module, look.is_nan) not in self._harmless)
            and (look.what != SCALED_LOSS or loss_matters)
        ]
        stories, calls = log.calls.stories()
        innocent = log.innocent if log.innocent is not None else self._innocent(suspicious, stories)
        read = {look.tensor for look in log.looks}
        found = culprit.find_culprit(suspicious, stories, calls, read, innocent)
        event = self._event(found, suspicious, log) if found is not None else None
        self._remember(log, largest)
        return event

    def _innocent(self, seen: list[Seen], stories: list[culprit.TensorStory]) -> frozenset[str]:
        """Modules that can't have made the first infinity or NaN of what they were given."""
        first = culprit.first_broken(seen)
        if first is None or first.tensor < 0:
            return frozenset()
        if first.phase == FORWARD:
            return frozenset([first.module] if stays_finite(self._modules[first.module]) else [])
        largest = culprit.largest_at_output(seen, stories, first)
        return frozenset(
            module
            for module in dict.fromkeys(stories[first.tensor].consumers)
            if module in largest and gradient_stays_finite(self._modules[module], largest[module])
        )

    def _remember(self, log: _StepLog, largest: list[float]) -> None:
        for look, value in zip(log.looks, largest, strict=True):
            if not look.is_input and math.isfinite(value):
                self._ring(look.what, look.name).append(value)

    def _event(self, found: culprit.Culprit, seen: list[Seen], log: _StepLog) -> Event:
        gradients_finite = culprit.finite_gradients(seen)
        if found.phase == FORWARD and gradients_finite:
            # Infinite on purpose, perhaps (a mask), and every gradient is fine: said once, and no suspect from now on.
            self._harmless.update(
                (look.module, look.is_nan) for look in seen if look.phase == FORWARD and not look.finite
            )
        first = found.first
        return Event(
            log.step,
            first.micro_batch,
            found.phase,
            found.module,
            first.what,
            first.name,
            "nan" if math.isnan(first.largest) else "inf",
            _scale_value(log.scale),
            tuple(self._ring(first.what, first.name)),
            log.skipped,
            culprit.finite_in_forward(seen),
            gradients_finite,
            found.explanation,
            found.after,
        )

    # -- inside ---------------------------------------------------------------------------------------------------

    def _ring(self, what: str, name: str) -> deque[float]:
        ring = self._maxima.get((what, name))
        if ring is None:
            ring = self._maxima[what, name] = deque(maxlen=RING_LENGTH)
        return ring

    def _look(
        self,
        phase: str,
        what: str,
        name: str,
        module: str,
        number: int,
        micro_batch: int,
        tensor: torch.Tensor,
        found: Found | None,
        is_input: bool = False,
    ) -> _Look | None:
        value = self._read(TensorKey(name, what), tensor, found, phase == FORWARD)
        if value is None:
            return None
        look = _Look(phase, what, name, module, number, micro_batch, value, is_input)
        self._log.looks.append(look)
        return look

    def _read(self, key: TensorKey, tensor: torch.Tensor, found: Found | None, at_once: bool) -> _Value | None:
        """What is to be known of a tensor; None for those that have no value, or none that can be had."""
        try:
            return _value(tensor, found, at_once)
        except Exception as error:
            self.unread.failed(key, error)
            return None


def _value(tensor: torch.Tensor, found: Found | None, at_once: bool) -> _Value | None:
    """What is to be known of a tensor; None for those that have no value.

    ``at_once``: of a row on a CPU, which is filled by now; others are read when the step ends.
    """
    if isinstance(found, torch.Tensor):
        return _from_row(found.numpy()) if at_once and found.is_cpu else (found,)
    if found is not None:
        return found
    if not tensor.numel():
        return None
    tensor = local_part(tensor)
    largest = largest_magnitude(tensor)
    return extremes(tensor) if largest is None else largest


def extremes(tensor: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Smallest and largest value, 0-d each, NaN if there is one; on the tensor's device, without a wait.

    None for tensors that have none (empty) or whose dtype torch cannot reduce (FP8).
    """
    tensor = detached_values(tensor)
    if tensor.layout is not torch.strided:
        # Of an uncoalesced one the values before they are added up: coalescing waits for the GPU.
        tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.numel() or tensor.element_size() == 1:
        return None
    if tensor.is_cpu and not tensor.data_ptr() and not tensor._is_zerotensor():
        # Its memory was given back, as sharded training does between uses.
        return None
    return tuple(torch.aminmax(tensor))


def _scale_value(scale: BackwardScale | None) -> float | None:
    """The scale as a number; one still on a GPU is waited for, which only happens where there is an event to tell."""
    if scale is None or scale.on_device is None:
        return None if scale is None else scale.value
    return float(scale.on_device)


def _stacked(values: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """Extremes as (n, 2), float32 or float64; the heads of rows as (n, HEADER), int64."""
    if len(values[0]) == 1:
        return torch.stack([row for (row,) in values])[:, : layout.HEADER].contiguous()
    flat = torch.stack([value for pair in values for value in pair]).view(-1, 2)
    return flat if flat.dtype == torch.float64 else flat.to(torch.float32)


def _seen(looks: Iterable[_Look], largest: Iterable[float]) -> list[Seen]:
    return [
        Seen(look.phase, look.what, look.name, look.module, look.tensor, look.micro_batch, value, look.is_input)
        for look, value in zip(looks, largest, strict=True)
    ]


def _at_once(value: _Value) -> float:
    """The largest magnitude where it is known on the host; 0 where a device has it, which is not waited for."""
    if isinstance(value, float):
        return value
    if value[0].device.type != "cpu":
        return 0.0
    if len(value) == 1:
        return _from_row(value[0].numpy())
    return from_extremes(*(each.double().numpy().item() for each in value))


def _is_broken(look: _Look | None) -> bool | None:
    """Whether it is not finite; None where there is no look, and where a device has the value."""
    if look is None or (isinstance(look.value, tuple) and look.value[0].device.type != "cpu"):
        return None
    return not math.isfinite(_at_once(look.value))


def _largest(looks: list[_Look], copies: list[tuple[list[int], HostCopy]]) -> list[float]:
    """The largest magnitude of each look, inf or NaN included."""
    largest = [look.value if isinstance(look.value, float) else 0.0 for look in looks]
    for indices, copy in copies:
        values = copy.values()
        found = (
            _from_rows(values)
            if values.shape[1] == layout.HEADER
            else [from_extremes(*pair) for pair in values.tolist()]
        )
        for index, value in zip(indices, found, strict=True):
            largest[index] = value
    return largest


def from_extremes(low: float, high: float) -> float:
    """The largest magnitude between the smallest and the largest value; NaN if one is."""
    return math.nan if math.isnan(low) or math.isnan(high) else max(abs(low), abs(high))


def _from_row(row: Any) -> float:
    return _from_rows(row[None, : layout.HEADER])[0]


def _from_rows(heads: npt.NDArray[np.int64]) -> list[float]:
    """Of the heads of rows, shape (n, HEADER)."""
    largest = heads[:, layout.MAX_BITS].copy().view(np.float64)
    largest[heads[:, layout.INFS] > 0] = math.inf
    largest[heads[:, layout.NANS] > 0] = math.nan
    found: list[float] = largest.tolist()
    return found
