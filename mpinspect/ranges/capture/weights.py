"""Tracks the weights in a run: whether they changed, and whether non-finite or huge weights broke a forward."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch.nn.parameter import is_lazy

from mpinspect.counting.pieces import detached_values
from mpinspect.ranges.capture.culprit import word
from mpinspect.ranges.capture.host_rows import HostCopy
from mpinspect.ranges.capture.largest import extremes, from_stacked, has_memory, read_largest, stacked, version_of
from mpinspect.ranges.capture.layers import WatchedParameter
from mpinspect.ranges.capture.steps import StepClock
from mpinspect.ranges.kinds import WEIGHT
from mpinspect.ranges.session import END, Event, is_below
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.runtime.distributed import local_part, world_size
from mpinspect.runtime.guard import Unread

_State = tuple[int, list[float] | None]

#: Magnitude from which finite weights count as broken by an update.
_HUGE = 2.0**20
#: Maximum number of events that cause a reading of the module's weights, which waits for a GPU. The first ones matter most.
_MOST_EVENTS_EXPLAINED = 3
#: Maximum number of frozen weights and buffers that are searched for writes.
_MOST_SEARCHED = 64


class WeightChanges:
    """Detects whether anything updated the weights.

    Args:
        parameters: the model's parameters.
    """

    def __init__(self, parameters: Sequence[WatchedParameter]) -> None:
        self._parameters = parameters
        #: Each weight with its version and a sample of its values at the beginning of the run.
        self._first: list[tuple[torch.Tensor, int, torch.Tensor | None]] = []
        #: The weight whose state shows updates, its state, and whether it held a gradient when the last backward ended.
        self._witness: torch.Tensor | None = None
        self._last: _State | None = None
        self._held_gradient = False
        #: Whether the last call of ``updated`` found the gradients cleared and equal values of the witness.
        self.only_cleared = False

    def remember(self) -> None:
        """Record the version and a sample of each weight at the beginning of the run. Does not wait for a GPU."""
        weights = [watched.parameter for watched in self._parameters if can_be_hooked(watched.parameter)]
        self._first = [(weight, version_of(weight), _sample(weight)) for weight in weights]
        self._witness = None
        self.updated()

    def moved(self) -> bool | None:
        """Return whether any weight has changed since ``remember``, or None if unknown; drop the samples. Waits for a GPU."""
        first, self._first = self._first, []
        if any(version_of(weight) != version for weight, version, _ in first):
            return True
        # ``weight.data -= ...`` changes the values but not the version.
        samples = [(_sample(weight), was) for weight, _, was in first]
        known = [(now, was) for now, was in samples if now is not None and was is not None]
        if any(now.device != was.device or not torch.equal(now, was) for now, was in known):
            return True
        return None if len(known) < len(samples) else False

    def backward_ended(self) -> None:
        """Choose the first weight that holds a gradient as the one whose state shows updates.

        After ``torch.autograd.grad``, or a backward whose gradients are not reduced yet (FSDP2), no weight may hold one.
        """
        held = next((watched.parameter for watched in self._parameters if watched.parameter.grad is not None), None)
        self._held_gradient = held is not None
        if held is not None and held is not self._witness:
            self._witness, self._last = held, _state(held)

    def updated(self) -> bool:
        """Return whether weights changed since the last call, or the gradients left by the last backward were cleared."""
        if self._witness is None:
            trained = (watched.parameter for watched in self._parameters if can_be_hooked(watched.parameter))
            self._witness = next(trained, None)
        if self._witness is None:
            return True
        before, self._last = self._last, _state(self._witness)
        is_cleared = self._held_gradient and self._witness.grad is None
        self.only_cleared = is_cleared and self._last == before and self._last[1] is not None
        return is_cleared or self._last != before


def can_be_hooked(parameter: torch.Tensor) -> bool:
    """Return whether a parameter can be hooked now, that is, it is neither frozen nor a lazy one without a shape."""
    return parameter.requires_grad and not is_lazy(parameter)


def _state(parameter: torch.Tensor) -> _State:
    """Return a parameter's version counter and, on a CPU, a sample of its values, to detect updates without an optimizer."""
    values = _sample(parameter) if parameter.is_cpu else None
    return version_of(parameter), None if values is None else values.tolist()


def _sample(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of a parameter's first values, at most four, on its device; None if they can't be accessed. Never waits."""
    try:
        local = detached_values(local_part(parameter))
        is_readable = not local.is_meta and local.layout is torch.strided and (not local.numel() or has_memory(local))
        # The whole of a weight in channels_last would be copied to flatten it.
        first = local[:4] if local.dim() else local
        return first.reshape(-1)[:4].clone() if is_readable else None
    except Exception:
        # A Tensor subclass.
        return None


class BrokenWeights:
    """Finds non-finite or huge weights that explain a non-finite forward.

    Args:
        parameters: the model's parameters.
    """

    def __init__(self, parameters: Collection[WatchedParameter]) -> None:
        #: The weights that could not be read.
        self.unread = Unread[TensorKey]()
        self._parameters = parameters
        self._events = 0
        #: Largest magnitudes of the weights before this step's optimizer updated them; None if not read.
        self._before_step: dict[str, float] | None = None

    @property
    def exhausted(self) -> bool:
        """Whether the limit of events to explain is reached."""
        return self._events >= _MOST_EVENTS_EXPLAINED

    def begin_step(self) -> None:
        """Discard the magnitudes read in the previous step."""
        self._before_step = None

    def read_before_step(self) -> None:
        """Read the weights before an optimizer applies the gradients of a broken forward. Waits for a GPU."""
        if self._before_step is None:
            self._before_step = self._magnitudes()

    def explain(self, event: Event, *, unmoved: bool) -> Event:
        """Return the event, explained by a weight of its module that was non-finite or huge before the forward, if any.

        Waits for a GPU if the weights are read now.

        Args:
            event: an event of the forward.
            unmoved: whether no optimizer has updated the weights since that forward.
        """
        self._events += 1
        largest = self._before_step
        if largest is None and unmoved:
            largest = self._magnitudes()
        own = {name: value for name, value in (largest or {}).items() if is_below(name, event.module)}
        broken = next((name for name, value in own.items() if not math.isfinite(value)), None)
        if broken is not None:
            reason = f"{broken!r} itself is not finite: an earlier optimizer step, or other code, wrote it"
            if is_many := world_size() > 1:
                reason += "; its gradients may be sums over the ranks, so look for the rank with the earliest event"
            return replace(event, explanation=reason, elsewhere=is_many)
        name = max(own, key=own.__getitem__, default="")
        if own.get(name, 0.0) < _HUGE:
            return event
        reason = f"{name!r} itself reaches {own[name]:.2g}: an earlier optimizer step, or other code, wrote it"
        return replace(event, explanation="; ".join(filter(None, [event.explanation, reason])))

    def hold_no_gradient(self, broke: Callable[[], bool]) -> bool:
        """Return whether no weight holds a gradient now; on a CPU also whether all hold zeros, if ``broke`` returns True.

        Does not wait for a GPU.
        """
        gradients = (gradient for watched in self._parameters if (gradient := watched.parameter.grad) is not None)
        first = next(gradients, None)
        if first is None:
            return True
        return first.is_cpu and broke() and not any(map(_magnitude, (first, *gradients)))

    def names(self) -> frozenset[str]:
        """Return the names of the weights that are non-finite now. Waits for a GPU."""
        return frozenset(name for name, value in self._magnitudes().items() if not math.isfinite(value))

    def left_behind(self, step: int, before: Collection[str]) -> Event | None:
        """Return an event if any trained weight became non-finite by the end of the run, after ``step``. Waits for a GPU.

        Args:
            before: names of the weights that were non-finite when the run began.
        """
        largest = self._magnitudes()
        trained = [watched for watched in self._parameters if watched.parameter.requires_grad]
        broken = [
            each for each in trained if not math.isfinite(largest.get(each.name, 0.0)) and each.name not in before
        ]
        if not broken:
            return None
        first = broken[0]
        how_many = f"{len(broken)} of {len(trained)} parameters are not finite"
        return Event(step, 0, END, first.owner, WEIGHT, first.name, word(largest[first.name]), explanation=how_many)

    def _magnitudes(self) -> dict[str, float]:
        """Return the largest magnitude of each weight that can be read, by name. Waits for a GPU once."""
        magnitudes: dict[str, float] = {}
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[str], list[tuple[torch.Tensor, ...]]]] = {}
        for watched in self._parameters:
            with self.unread.left_out(TensorKey(watched.name, WEIGHT)):
                values, found = _values(watched.parameter), None
                if values is not None and not values.is_cpu:
                    found = extremes(values)
                if found is None:
                    magnitudes[watched.name] = _magnitude(watched.parameter)
                else:
                    names, pairs = groups.setdefault((found[0].device, found[0].dtype), ([], []))
                    names.append(watched.name)
                    pairs.append(found)
        # Start all copies before waiting for the first one.
        copies = [(names, HostCopy(stacked(pairs))) for names, pairs in groups.values()]
        for names, copy in copies:
            magnitudes.update(zip(names, from_stacked(copy.values()), strict=True))
        return {watched.name: magnitudes[watched.name] for watched in self._parameters if watched.name in magnitudes}


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether all tensors are finite. Waits for a GPU."""
    return all(math.isfinite(_magnitude(tensor)) for tensor in tensors)


def _magnitude(parameter: torch.Tensor) -> float:
    """Return a parameter's largest magnitude, or NaN; 0 if it has no floating-point values to read."""
    values = _values(parameter)
    if values is None:
        return 0.0
    return read_largest(values)


def _values(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return this process's part of a parameter's floating-point values; None if there is nothing to read."""
    if is_lazy(parameter) or parameter.is_meta:
        return None
    weight = detached_values(local_part(parameter))
    if not weight.numel() or not (weight.is_floating_point() or weight.is_complex()):
        return None
    return weight


class RarerWork:
    """The work of a loop that most steps do not have: calls of the model without gradients, further backwards, and writes to
    frozen weights and buffers. A tensor that two steps in a row have written is no longer searched.

    Args:
        clock: the run's step clock, which counts the calls.
        model: the model; held weakly.
    """

    def __init__(self, clock: StepClock, model: torch.nn.Module) -> None:
        self._clock = clock
        frozen = (each for each in model.parameters() if not each.requires_grad and not is_lazy(each))
        buffers = (each for each in model.buffers() if each.is_floating_point() and not is_lazy(each))
        # An inference tensor has no version.
        plain = (
            each
            for each in itertools.chain(frozen, buffers)
            if type(each) in (torch.nn.Parameter, torch.Tensor) and not each.is_inference()
        )
        #: Each tensor with its version, and whether the last step wrote it.
        self._searched = [(weakref.ref(each), each._version, False) for each in itertools.islice(plain, _MOST_SEARCHED)]
        self._writes = 0
        #: All backwards before this step, the fewest of a step, and the steps that had more.
        self._backwards, self._fewest, self._with_more = clock.backwards, math.inf, 0

    def amount(self) -> int:
        """Return, at a step's end, the number so far of forwards without gradients, of steps with further backwards, and of
        written buffers and frozen weights.
        """
        backwards, self._backwards = self._clock.backwards - self._backwards, self._clock.backwards
        self._fewest = min(self._fewest, backwards or math.inf)
        self._with_more += backwards > self._fewest
        left = []
        for reference, version, was_written in self._searched:
            tensor = reference()
            is_written = tensor is not None and tensor._version != version
            if tensor is not None and not (is_written and was_written):
                self._writes += is_written
                left.append((reference, tensor._version, is_written))
        self._searched = left
        return self._clock.calls_without_gradient + self._with_more + self._writes
