"""An observer that finds normalisation layers' non-finite buffers, and running statistics whose updates do not change them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.layers import Layer
from mpinspect.ranges.capture.observations import Observer
from mpinspect.ranges.capture.recording import Recording
from mpinspect.ranges.capture.steps import StepClock
from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.session import Measurement

_NORMS = (torch.nn.modules.batchnorm._NormBase,)
#: The number of updates after which a running statistic should have changed.
_FEWEST_WRITES = 4
_MOST_RECORDS = 5


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
        self._events = self._told = 0
        #: Buffers that were not finite before the first step, and those already recorded.
        self._known: set[str] | None = None
        #: Running statistics before the first step: their number of updates and a checksum of their values.
        self._began: dict[str, tuple[float, float]] = {}

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Remember the buffers before the first step."""
        if self._known is None:
            self._known = set(self._broken())
            self._began = {name: (writes, _sum(buffer)) for name, buffer, writes in self._statistics()}

    def end_step(self, step: int, sampled: bool) -> None:
        """Read the buffers if the step is measured or has a new event."""
        events, self._events = self._events, len(self._recording.events)
        if self._clock.measured or self._events > events:
            self._tell_broken(step)

    def run_ends(self) -> None:
        """Read the buffers once more, and record the running statistics that have not changed."""
        self._tell_broken(max(self._clock.step - 1, 0))
        if not self._clock.step:
            return
        for name, buffer, writes in self._statistics():
            before, value = self._began.get(name, (writes, math.nan))
            if writes - before >= _FEWEST_WRITES and _sum(buffer) == value:
                self._tell(name, 0, {"writes": writes - before}, f"stuck, {dtype_name(buffer.dtype)}")

    def _tell_broken(self, step: int) -> None:
        for name, dtype in self._broken().items():
            if self._known is not None and name not in self._known:
                self._known.add(name)
                self._tell(name, step, {}, f"not finite, {dtype}")

    def _tell(self, name: str, step: int, figures: dict[str, float], text: str) -> None:
        if self._told < _MOST_RECORDS:
            self._told += 1
            self._recording.measured(Measurement("statistics", name, step, figures, text=text))

    @torch.no_grad()
    def _broken(self) -> dict[str, str]:
        """Return the names and dtypes of the buffers that hold an infinity or NaN. Waits for the device."""
        by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
        for name, buffer in self._buffers():
            by_device.setdefault(buffer.device, []).append((name, buffer))
        broken: dict[str, str] = {}
        for found in by_device.values():
            finite = torch.stack([buffer.isfinite().all() for _, buffer in found]).tolist()
            broken |= {
                name: dtype_name(buffer.dtype) for (name, buffer), fine in zip(found, finite, strict=True) if not fine
            }
        return broken

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers of normalisation layers, which the forward writes; other buffers may hold infinities, as masks do."""
        for layer in self._norms:
            for name, buffer in layer.module._buffers.items():
                if is_plain(buffer):
                    yield _path(layer, name), buffer

    def _statistics(self) -> Iterator[tuple[str, torch.Tensor, float]]:
        """Yield each running statistic with its name and its module's count of updates (``num_batches_tracked``)."""
        for layer in self._norms:
            written = layer.module._buffers.get("num_batches_tracked")
            for name in ("running_mean", "running_var"):
                buffer = layer.module._buffers.get(name)
                if is_plain(buffer) and written is not None:
                    yield _path(layer, name), buffer, float(written)


def _path(layer: Layer, name: str) -> str:
    return f"{layer.path}.{name}" if layer.path else name


@torch.no_grad()
def _sum(buffer: torch.Tensor) -> float:
    """Return a checksum of the values, to detect whether they have changed."""
    wide = buffer.detach().double().reshape(-1)
    return float((wide * torch.arange(1, wide.numel() + 1, device=wide.device)).sum())
