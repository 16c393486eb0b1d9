"""The base of the observers that measure for diagnoses, and small results that travel to the host by name."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from mpinspect.ranges.capture.host_rows import Arrivals, HostCopy
from mpinspect.ranges.capture.largest import is_plain, read_largest
from mpinspect.ranges.capture.layers import Layer, WatchedParameter
from mpinspect.ranges.capture.observations import Observer
from mpinspect.ranges.capture.optimizers import ModelOptimizers
from mpinspect.ranges.capture.recording import Recording
from mpinspect.ranges.capture.steps import StepClock
from mpinspect.ranges.faults.measure.masters import Masters
from mpinspect.ranges.records import Record
from mpinspect.ranges.session import Event

#: The dtypes whose sums lose terms.
NARROW = (torch.float16, torch.bfloat16)
#: Maximum number of names in one record, and of elements that are drawn from a tensor.
_MOST_NAMES, _MOST_DRAWN = 200, 4096


class Run(NamedTuple):
    """The parts of a run that observers read.

    Args:
        layers: the model's modules.
        parameters: the model's parameters.
        optimizers: the optimizers of the parameters.
        masters: finds the copies of the weights that optimizers step in their place.
        clock: the run's step clock.
        recording: receives the records, and holds the events.
    """

    layers: Sequence[Layer]
    parameters: Sequence[WatchedParameter]
    optimizers: ModelOptimizers
    masters: Masters
    clock: StepClock
    recording: Recording


class Measuring(Observer):
    """An observer that is at work in measured steps, and waits for no device: what it reads is judged once it has arrived.

    Args:
        run: the parts of the run.
    """

    #: Maximum number of records of one class.
    most_records = 10

    def __init__(self, run: Run) -> None:
        self._layers, self._parameters, self._optimizers, self._masters, self._clock, self._recording = run
        #: Judgements that wait for values, in the order of the steps.
        self._arrivals = Arrivals()
        self._recorded: Counter[type[Record]] = Counter()
        #: The number of the run's events that ``_new_events`` has returned.
        self._events = 0

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Activate this observer in measured steps."""
        self.at_work = self._clock.measured

    def end_step(self, step: int, sampled: bool) -> None:
        """Judge the values that have reached the host."""
        self._arrivals.take()

    def run_ends(self) -> None:
        """Judge all values; waits for the device."""
        self._arrivals.take(wait=True)

    def _new_events(self) -> list[Event]:
        """Return the run's events since the last call."""
        seen, self._events = self._events, len(self._recording.events)
        return self._recording.events[seen : self._events]

    def _send(self, results: Sent, judge: Callable[[dict[str, Any]], object]) -> None:
        """Call ``judge`` with small results by name, once they have reached the host."""
        self._arrivals.call(results.copies, lambda: judge(results.read()))

    def _record(self, record: Record) -> None:
        """Record the first few of each class."""
        self._recorded[type(record)] += 1
        if self._recorded[type(record)] <= self.most_records:
            self._recording.record(replace(record, names=record.names[:_MOST_NAMES]))

    def _record_names(self, record: Record) -> None:
        """Record it under the first of its names; it must have at least one."""
        self._record(replace(record, name=record.names[0]))


class Sent(NamedTuple):
    """Small results by name, being copied to the host: one copy for each device and dtype."""

    names: list[list[str]]
    copies: list[HostCopy]

    @classmethod
    def of(
        cls,
        tensors: Iterable[tuple[str, torch.Tensor]],
        stacked: Callable[[list[torch.Tensor]], torch.Tensor] = torch.stack,
    ) -> Sent:
        """Send a result for each tensor; never waits.

        Args:
            tensors: the tensors by name.
            stacked: returns the results of several tensors of one device and dtype, stacked along the first dimension.
        """
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[str], list[torch.Tensor]]] = {}
        for name, tensor in tensors:
            names, found = groups.setdefault((tensor.device, tensor.dtype), ([], []))
            names.append(name)
            found.append(tensor)
        return cls([names for names, _ in groups.values()], [HostCopy(stacked(found)) for _, found in groups.values()])

    def read(self) -> dict[str, Any]:
        """Return each name's number, or list of numbers. Waits for the device if the copies are not complete."""
        rows = zip(self.names, self.copies, strict=True)
        return {name: row for names, copy in rows for name, row in zip(names, copy.values().tolist(), strict=True)}


def drawn(tensor: torch.Tensor) -> torch.Tensor:
    """Return at most 4,096 evenly spaced elements of a tensor; only these are copied."""
    # An odd distance reaches all columns of a matrix whose row length is a power of two.
    distance = -(-tensor.numel() // _MOST_DRAWN) | 1
    return tensor.detach().take(torch.arange(0, tensor.numel(), distance, device=tensor.device))


class Magnitudes(NamedTuple):
    """The largest magnitude of each gradient, and the 2-norms of the FP16 ones, computed in FP32, on their way to the host."""

    values: Sent
    norms: Sent

    def copies(self) -> list[HostCopy]:
        """Return the copies that the other methods read."""
        return self.values.copies + self.norms.copies

    def read(self) -> dict[str, float]:
        """Return the magnitudes by name. Waits for the device like ``Sent.read``."""
        return self.values.read()

    def sum_of_squares(self) -> float:
        """Return the sum of squares of all finite FP16 gradients together. Waits for the device like ``Sent.read``."""
        return math.fsum(norm**2 for norm in self.norms.read().values() if math.isfinite(norm))


@torch.no_grad()
def magnitudes(parameters: Iterable[WatchedParameter]) -> Magnitudes:
    """Return the largest magnitude of each plain gradient, NaN if it holds a NaN. Takes one call per dtype; never waits."""
    found = [(each.name, grad) for each in parameters if is_plain(grad := each.parameter.grad)]
    in_half = [(name, gradient) for name, gradient in found if gradient.dtype is torch.float16]
    return Magnitudes(Sent.of(found, _largest), Sent.of(in_half, norms))


def norms(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of each of several tensors of one device and dtype, in FP32 or FP64."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))


def _largest(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the largest magnitude of each plain tensor, in FP32 or FP64: in one kernel on a GPU."""
    if not tensors[0].is_cpu:
        # NumPy has no BF16.
        found = torch.stack(torch._foreach_norm(tensors, math.inf))
        return found.to(torch.promote_types(found.dtype, torch.float32))
    return torch.tensor([abs(read_largest(tensor)) for tensor in tensors], dtype=torch.float64, device="cpu")
