"""An observer that finds normalisation layers' non-finite buffers, and running statistics whose updates do not change them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.layers import Layer
from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.faults.measure.measuring import Measuring, Run, Sent
from mpinspect.ranges.records import Statistics

_NORMS = (torch.nn.modules.batchnorm._NormBase,)
#: The number of updates after which a running statistic should have changed.
_FEWEST_WRITES = 4


class Buffers(Measuring):
    """Reads the normalisation layers' buffers in measured steps and in steps with a new event. Must run after the watch."""

    most_records = 5

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._norms = [layer for layer in run.layers if isinstance(layer.module, _NORMS)]
        #: Buffers that were not finite before the first step, and buffers already recorded.
        self._broken_before: set[str] = set()
        self._known: set[str] = set()
        #: Running statistics before the first step, as ``_statistics`` returns them; None before that.
        self._began: Sent | None = None

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Remember the buffers before the first step."""
        if self._began is None:
            self._began = self._statistics()
            self._find_broken(self._broken_before.update)

    def end_step(self, step: int, sampled: bool) -> None:
        """Read the buffers if the step is measured or has a new event; record broken ones whose values have arrived."""
        super().end_step(step, sampled)
        if self._new_events() or self._clock.measured:
            self._find_broken(partial(self._tell_broken, step))

    def run_ends(self) -> None:
        """Read the buffers once more, and record the running statistics that have not changed."""
        self._find_broken(partial(self._tell_broken, max(self._clock.step - 1, 0)))
        super().run_ends()
        if not self._clock.step or self._began is None:
            return
        began, dtypes = self._began.read(), {path: dtype_name(buffer.dtype) for path, buffer in self._buffers()}
        for name, (writes, value) in self._statistics().read().items():
            before, first = began.get(name, (writes, math.nan))
            if writes - before < _FEWEST_WRITES:
                continue
            if not math.isfinite(value):
                # It was written and is still broken: the forward before the first reading may have broken it.
                self._broken_before.discard(name)
                self._tell_broken(0, {name: dtypes[name]})
            elif value == first:
                text = f"{Statistics.STUCK}, {dtypes[name]}"
                self._record(Statistics(name=name, text=text, writes=writes - before))

    def _tell_broken(self, step: int, broken: dict[str, str]) -> None:
        for name, dtype in broken.items():
            if name not in self._known | self._broken_before:
                self._known.add(name)
                self._record(Statistics(name=name, step=step, text=f"{Statistics.NOT_FINITE}, {dtype}"))

    @torch.no_grad()
    def _find_broken(self, tell: Callable[[dict[str, str]], object]) -> None:
        """Find the buffers with an infinity or NaN; when the result has arrived, call ``tell`` with their dtypes, by name."""
        buffers = list(self._buffers())
        finite = Sent.of((name, buffer.isfinite().all()) for name, buffer in buffers)
        dtypes = {name: dtype_name(buffer.dtype) for name, buffer in buffers}
        self._send(finite, lambda are: tell({name: dtypes[name] for name, is_fine in are.items() if not is_fine}))

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers of normalisation layers, which the forward writes; other buffers may hold infinities, as masks do."""
        for layer in self._norms:
            for name, buffer in layer.module._buffers.items():
                if is_plain(buffer):
                    yield _path(layer, name), buffer

    @torch.no_grad()
    def _statistics(self) -> Sent:
        """Return for each running statistic its module's count of updates (``num_batches_tracked``), and its checksum."""
        pairs = []
        for layer in self._norms:
            written = layer.module._buffers.get("num_batches_tracked")
            for name in ("running_mean", "running_var"):
                buffer = layer.module._buffers.get(name)
                if is_plain(buffer) and written is not None:
                    count = written.to(buffer.device, torch.float64, non_blocking=True)
                    pairs.append((_path(layer, name), torch.stack([count, _sum(buffer)])))
        return Sent.of(pairs)


def _path(layer: Layer, name: str) -> str:
    return f"{layer.path}.{name}".lstrip(".")


@torch.no_grad()
def _sum(buffer: torch.Tensor) -> torch.Tensor:
    """Return a checksum of the values, to detect whether they have changed."""
    wide = buffer.detach().double().reshape(-1)
    return (wide * torch.arange(1, wide.numel() + 1, device=wide.device)).sum()
