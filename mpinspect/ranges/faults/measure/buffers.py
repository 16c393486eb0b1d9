"""An observer that finds normalisation layers' non-finite buffers, and running statistics whose updates do not change them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from mpinspect.ranges.capture.host_rows import Arrivals, HostCopy
from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.layers import Layer
from mpinspect.ranges.capture.observations import Observer
from mpinspect.ranges.capture.recording import Recording
from mpinspect.ranges.capture.steps import StepClock
from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.records import Statistics

_NORMS = (torch.nn.modules.batchnorm._NormBase,)
#: The number of updates after which a running statistic should have changed.
_FEWEST_WRITES = 4
_MOST_RECORDS = 5


class _Statistics(NamedTuple):
    """The running statistics at one time, being copied to the host: their dtypes; the names and values, one for each device."""

    dtypes: dict[str, str]
    names: list[list[str]]
    copies: list[HostCopy]

    def read(self) -> dict[str, tuple[float, float]]:
        """Return by name the number of updates and a checksum of the values. Waits for the device."""
        return {
            name: (written, value)
            for names, copy in zip(self.names, self.copies, strict=True)
            for name, (written, value) in zip(names, copy.values().tolist(), strict=True)
        }


class Buffers(Observer):
    """Reads the normalisation layers' buffers in measured steps and in steps with a new event. Must run after the watch.

    Args:
        layers: the model's modules.
        clock: the run's step clock.
        recording: receives the measurements, and holds the events.
    """

    def __init__(self, layers: Sequence[Layer], clock: StepClock, recording: Recording) -> None:
        self._clock, self._recording = clock, recording
        self._norms = [layer for layer in layers if isinstance(layer.module, _NORMS)]
        self._events = self._records = 0
        #: Buffers that were not finite before the first step, and buffers already recorded.
        self._broken_before: set[str] = set()
        self._known: set[str] = set()
        #: Running statistics before the first step; None before that.
        self._began: _Statistics | None = None
        self._arrivals = Arrivals()

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Remember the buffers before the first step."""
        if self._began is None:
            self._began = self._statistics()
            self._find_broken(self._broken_before.update)

    def end_step(self, step: int, sampled: bool) -> None:
        """Read the buffers if the step is measured or has a new event; record broken ones whose values have arrived."""
        self._arrivals.take()
        events, self._events = self._events, len(self._recording.events)
        if self._clock.measured or self._events > events:
            self._find_broken(partial(self._tell_broken, step))

    def run_ends(self) -> None:
        """Read the buffers once more, and record the running statistics that have not changed."""
        self._find_broken(partial(self._tell_broken, max(self._clock.step - 1, 0)))
        self._arrivals.take(wait=True)
        if not self._clock.step or self._began is None:
            return
        began, ended = self._began.read(), self._statistics()
        for name, (writes, value) in ended.read().items():
            before, first = began.get(name, (writes, math.nan))
            if writes - before < _FEWEST_WRITES:
                continue
            if not math.isfinite(value):
                # It was written and stayed so: the forward that came before the first reading may have broken it.
                self._broken_before.discard(name)
                self._tell_broken(0, {name: ended.dtypes[name]})
            elif value == first:
                text = f"{Statistics.STUCK}, {ended.dtypes[name]}"
                self._record(Statistics(name=name, text=text, writes=writes - before))

    def _tell_broken(self, step: int, broken: dict[str, str]) -> None:
        for name, dtype in broken.items():
            if name not in self._known | self._broken_before:
                self._known.add(name)
                self._record(Statistics(name=name, step=step, text=f"{Statistics.NOT_FINITE}, {dtype}"))

    def _record(self, found: Statistics) -> None:
        if self._records < _MOST_RECORDS:
            self._records += 1
            self._recording.record(found)

    @torch.no_grad()
    def _find_broken(self, tell: Callable[[dict[str, str]], object]) -> None:
        """Call ``tell`` with the dtypes of the buffers that hold an infinity or NaN now, by name, once they are known."""
        by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
        for name, buffer in self._buffers():
            by_device.setdefault(buffer.device, []).append((name, buffer))
        copies = [
            HostCopy(torch.stack([buffer.isfinite().all() for _, buffer in found])) for found in by_device.values()
        ]
        dtypes = [(name, dtype_name(buffer.dtype)) for found in by_device.values() for name, buffer in found]

        def arrived() -> None:
            finite = [fine for copy in copies for fine in copy.values().tolist()]
            tell({name: dtype for (name, dtype), fine in zip(dtypes, finite, strict=True) if not fine})

        self._arrivals.call(copies, arrived)

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers of normalisation layers, which the forward writes; other buffers may hold infinities, as masks do."""
        for layer in self._norms:
            for name, buffer in layer.module._buffers.items():
                if is_plain(buffer):
                    yield _path(layer, name), buffer

    @torch.no_grad()
    def _statistics(self) -> _Statistics:
        """Return each running statistic's checksum with its module's count of updates (``num_batches_tracked``)."""
        dtypes: dict[str, str] = {}
        by_device: dict[torch.device, tuple[list[str], list[torch.Tensor]]] = {}
        for layer in self._norms:
            written = layer.module._buffers.get("num_batches_tracked")
            for name in ("running_mean", "running_var"):
                buffer = layer.module._buffers.get(name)
                if is_plain(buffer) and written is not None:
                    path = _path(layer, name)
                    dtypes[path] = dtype_name(buffer.dtype)
                    names, pairs = by_device.setdefault(buffer.device, ([], []))
                    names.append(path)
                    pairs.append(
                        torch.stack([written.to(buffer.device, torch.float64, non_blocking=True), _sum(buffer)])
                    )
        found = [(names, HostCopy(torch.stack(pairs))) for names, pairs in by_device.values()]
        return _Statistics(dtypes, [names for names, _ in found], [copy for _, copy in found])


def _path(layer: Layer, name: str) -> str:
    return f"{layer.path}.{name}".lstrip(".")


@torch.no_grad()
def _sum(buffer: torch.Tensor) -> torch.Tensor:
    """Return a checksum of the values, to detect whether they have changed."""
    wide = buffer.detach().double().reshape(-1)
    return (wide * torch.arange(1, wide.numel() + 1, device=wide.device)).sum()
