"""Collects rows of counts into windows.

Rows stay on the device that counted them until their step ends (``host_rows``, ``device_rows``). Then a single copy brings them
to the host; from a GPU this copy is asynchronous, and its rows are usually added a step later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from mpinspect.counting import fastest
from mpinspect.ranges.capture.arrangement import Arrangement, IntArray, RowSet, SampleOf, StepScale
from mpinspect.ranges.capture.backward_scale import UNSCALED, BackwardScale
from mpinspect.ranges.capture.device_rows import DeviceRows
from mpinspect.ranges.capture.host_rows import HostCopy, HostRows, copy_groups
from mpinspect.ranges.capture.observations import Held
from mpinspect.ranges.capture.window_rows import WindowRows, never_in_float16
from mpinspect.ranges.kinds import GRADIENT_KINDS, WEIGHT_GRADIENT
from mpinspect.ranges.windows.tensors import NO_LOST_UPDATES, LostUpdates, TensorKey
from mpinspect.ranges.windows.window import Window
from mpinspect.runtime.device import on_stream
from mpinspect.runtime.guard import Unread

#: The formats of narrow dtypes: values of these dtypes were rounded before they are counted.
_NARROW = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8_e4m3",
    torch.float8_e5m2: "float8_e5m2",
}


def passed_through(dtype: torch.dtype) -> str:
    """Return the name of the narrow format that values of this dtype were rounded to; "float32" if none."""
    return _NARROW.get(dtype, "float32")


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without "torch.": "float16" for torch.float16."""
    return str(dtype).removeprefix("torch.")


class Sample(NamedTuple):
    """The counts of one tensor at one time.

    ``scale`` is the loss scale that multiplies its values; ``passed_through`` is the format that they were rounded to.
    """

    key: TensorKey
    row: torch.Tensor
    numel: int
    dtype: str
    passed_through: str = "float32"
    scale: BackwardScale = UNSCALED


class _Rows(NamedTuple):
    """Rows being copied to the host, and their samples and element counts in the order of the rows in ``copy``."""

    samples: list[SampleOf]
    numels: list[int]
    copy: HostCopy


@dataclass
class _Step:
    """A sampled step whose counts are being copied to the host.

    Args:
        scales: the step's loss scales, by number; ``scale_copies`` brings the values that are still on a device.
        gradient_scales: the numbers of the scales that gradients have.
    """

    step: int
    rows: list[_Rows]
    scales: list[BackwardScale]
    scale_copies: list[tuple[list[int], HostCopy]]
    gradient_scales: list[int]
    lost: list[tuple[TensorKey, str, bool]]
    lost_counts: list[tuple[list[int], HostCopy]]


class Tally:
    """Collects samples into windows, step by step.

    Args:
        drop: called with a sentence when samples are discarded.
        scale_seen: called with the step and the scale of its gradients (None: unknown), except for a backward that is
            ``is_aside``.
    """

    def __init__(self, drop: Callable[[str], None], scale_seen: Callable[[int, float | None], None]) -> None:
        #: The tensors that could not be counted.
        self.unread = Unread[TensorKey]()
        self._drop = drop
        self._scale_seen = scale_seen
        self._pending: list[Sample] = []
        self._pending_lost: list[tuple[TensorKey, str, bool, torch.Tensor]] = []
        self._travelling: deque[_Step] = deque()
        self._open = WindowRows()
        self._arrangement = Arrangement([], [], [])
        #: FP32 gradients that were never rounded to FP16, although other tensors of their steps were. A weight gradient is
        #: stored under its module's path, since a module computes the gradients of all its weights in one format.
        self._in_float32: set[TensorKey] = set()
        self._steps: list[int] = []
        self._gradient_peaks: dict[int, int] = {}
        self._host_rows = HostRows()
        self._device_rows: dict[torch.device, DeviceRows] = {}

    def count(
        self, key: TensorKey, tensor: torch.Tensor, divisor: float | torch.Tensor | None = None, later: bool = False
    ) -> torch.Tensor | None:
        """Return a tensor's row of counts for the current step's sample, like ``counting.count``; never waits for a GPU.

        The row may be part of a buffer that is reused from the next step on. None if the tensor can't be counted.
        ``later``: a device may count the tensor when the step ends, since it is not expected to change.
        """
        try:
            return self._row(tensor, divisor, later)
        except Exception as error:
            self.unread.failed(key, error)
            return None

    def _row(self, tensor: torch.Tensor, divisor: float | torch.Tensor | None, later: bool) -> torch.Tensor:
        if divisor is None and tensor.is_cpu:
            return self._host_rows.count(tensor)
        if divisor is None and tensor.is_cuda:
            return self._rows_on(tensor.device).count(tensor, later)
        return fastest.count(tensor, divisor)

    def count_together(self, waiting: Sequence[Held]) -> None:
        """Count gradients held until the end of their backward and set each one's ``found``; None if it can't be counted."""
        by_device: dict[int, list[Held]] = {}
        for each in waiting:
            by_device.setdefault(each.values.get_device(), []).append(each)
        for group in by_device.values():
            device = group[0].values.device
            if device.type in ("cpu", "cuda"):
                try:
                    (self._host_rows if device.type == "cpu" else self._rows_on(device)).count_together(group)
                except Exception as error:
                    # One gradient may have caused the error: count each one alone below.
                    self._drop(
                        f"weight gradients could not be counted together ({type(error).__name__}: {error}), so each is counted "
                        "alone; the training is not affected"
                    )
            for each in group:
                if each.found is None:
                    with on_stream(each.stream):
                        each.found = self.count(each.key, each.values)

    def _buffers(self) -> list[HostRows | DeviceRows]:
        return [self._host_rows, *self._device_rows.values()]

    def _rows_on(self, device: torch.device) -> DeviceRows:
        rows = self._device_rows.get(device)
        if rows is None:
            rows = self._device_rows[device] = DeviceRows(device, self._drop)
        return rows

    def add(self, sample: Sample) -> None:
        """Add a sample of the current step."""
        self._pending.append(sample)

    def add_lost_updates(self, key: TensorKey, format_name: str, counts: torch.Tensor, *, measured: bool) -> None:
        """Add lost-update counts of the current step: an int64 tensor (lost, non-zero)."""
        self._pending_lost.append((key, format_name, measured, counts))

    def drop_step(self) -> None:
        """Discard the samples of the current step."""
        self._pending.clear()
        self._pending_lost.clear()
        for rows in self._buffers():
            rows.drop()

    @property
    def open_steps(self) -> int:
        """The number of sampled steps in the open window."""
        return len(self._steps)

    def end_step(self, step: int) -> None:
        """Start copying the step's samples to the host, and add all samples that have arrived to the open window."""
        if self._pending or self._pending_lost:
            self._send(step)
        while self._travelling and all(copy.ready() for copy in _copies(self._travelling[0])):
            self._take_next()

    def close_window(self, *, wait: bool = False) -> Window | None:
        """Return the window since the last call, or None without samples; ``wait`` first waits for copies from a GPU."""
        while wait and self._travelling:
            self._take_next()
        if not self._steps:
            return None
        window, steps, peaks = self._open, self._steps, self._gradient_peaks
        self._open, self._steps, self._gradient_peaks = WindowRows(), [], {}
        return Window(min(steps), max(steps), len(steps), window.columns(), dict(sorted(peaks.items())))

    # -- to the host ------------------------------------------------------------------------------------------

    def _send(self, step: int) -> None:
        for rows in self._device_rows.values():
            rows.count_held()
        samples, self._pending = self._without_lost(self._pending), []
        lost, self._pending_lost = self._pending_lost, []
        copies = self._send_rows(samples)
        numbers: dict[int, int] = {}
        of = [
            SampleOf(
                sample.key, sample.dtype, sample.passed_through, numbers.setdefault(id(sample.scale), len(numbers))
            )
            for sample in samples
        ]
        scales = list({id(sample.scale): sample.scale for sample in samples}.values())
        self._travelling.append(
            _Step(
                step,
                [_Rows([of[i] for i in places], [samples[i].numel for i in places], copy) for places, copy in copies],
                scales,
                _copy_alike([scale.on_device for scale in scales], lambda number, error: None),
                list(dict.fromkeys(each.scale for each in of if each.key.kind in GRADIENT_KINDS)),
                [(key, name, measured) for key, name, measured, _ in lost],
                _copy_alike([counts for *_, counts in lost], lambda i, error: self.unread.failed(lost[i][0], error)),
            )
        )

    def _without_lost(self, samples: list[Sample]) -> list[Sample]:
        """Return the samples except those of tensors that were changed while they were held; note these tensors as unread."""
        lost = {row for rows in self._device_rows.values() for row in rows.lost}
        if not lost:
            return samples
        for sample in samples:
            if id(sample.row) in lost:
                self.unread.failed(sample.key, RuntimeError("changed in place after it arrived, before it was counted"))
        return [sample for sample in samples if id(sample.row) not in lost]

    def _send_rows(self, samples: list[Sample]) -> list[tuple[list[int], HostCopy]]:
        """Start copying rows to the host: a buffer's rows in one copy, others (or if that fails) grouped by shape and dtype."""
        rows: list[torch.Tensor | None] = [sample.row for sample in samples]
        copies = []
        for buffer in self._buffers():
            try:
                copies += buffer.send([sample.row for sample in samples])
            except Exception:
                buffer.drop()
        for places, _ in copies:
            for place in places:
                rows[place] = None
        return copies + _copy_alike(rows, lambda place, error: self.unread.failed(samples[place].key, error))

    def _take_next(self) -> None:
        """Add the earliest sent step to the open window; discard the step on an error."""
        step = self._travelling.popleft()
        try:
            self._take(step)
        except Exception as error:
            self._drop(f"the counts of a step were lost on their way to the host ({type(error).__name__}: {error})")

    def _take(self, step: _Step) -> None:
        scales = _arrived_scales(step)
        samples: list[SampleOf] = []
        numels: list[int] = []
        row_sets: list[IntArray] = []
        for rows in step.rows:
            try:
                row_sets.append(rows.copy.values())
            except Exception as error:
                for sample in rows.samples:
                    self.unread.failed(sample.key, error)
            else:
                samples += rows.samples
                numels += rows.numels
        arrangement = self._arranged(self._as_rounded(samples), scales, row_sets)
        found = never_in_float16(arrangement, row_sets)
        if found:
            self._in_float32 |= set(map(_of_module, found))
            arrangement = self._arranged(self._as_rounded(samples), scales, row_sets)
        for name in arrangement.not_counted:
            self._drop(f"a sample of {name} was discarded: its loss scale is not a power of two")
        peak = self._open.add_step(arrangement, row_sets, np.array(numels, dtype=np.int64))
        own = [number for number in step.gradient_scales if not step.scales[number].is_aside]
        for value in dict.fromkeys(scales[number].value for number in own):
            self._scale_seen(step.step, value)
        if step.lost:
            self._open.add_lost_updates(_arrived_lost(step))
        self._steps.append(step.step)
        if peak is not None:
            self._gradient_peaks[peak] = self._gradient_peaks.get(peak, 0) + 1

    def _as_rounded(self, samples: list[SampleOf]) -> list[SampleOf]:
        """Return the samples; gradients that were never rounded to FP16 get the format float32."""
        if not self._in_float32:
            return samples
        return [
            sample._replace(passed_through="float32")
            if sample.may_be_upcast and _of_module(sample.key) in self._in_float32
            else sample
            for sample in samples
        ]

    def _arranged(self, samples: list[SampleOf], scales: list[StepScale], row_sets: list[IntArray]) -> Arrangement:
        """Return the previous step's arrangement if it fits this step; else a new one."""
        shapes = [RowSet(rows.shape[1], len(rows)) for rows in row_sets]
        if not self._arrangement.fits(samples, scales, shapes):
            self._arrangement = Arrangement(samples, scales, shapes)
        return self._arrangement


def _of_module(key: TensorKey) -> TensorKey:
    """Return the key; a weight gradient's key gets its module's path as its name."""
    if key.kind == WEIGHT_GRADIENT:
        return TensorKey(key.name.rpartition(".")[0], key.kind)
    return key


def _copies(step: _Step) -> Iterable[HostCopy]:
    yield from (rows.copy for rows in step.rows)
    yield from (copy for _, copy in step.scale_copies)
    yield from (copy for _, copy in step.lost_counts)


def _copy_alike(
    tensors: list[torch.Tensor | None], failed: Callable[[int, Exception], None]
) -> list[tuple[list[int], HostCopy]]:
    """Copy tensors to the host, stacked by device, shape and dtype; return each copy with its tensors' places in the list."""
    groups: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor is not None:
            groups.setdefault((tensor.device, tensor.shape, tensor.dtype), []).append(index)
    given: Any = tensors
    return copy_groups(
        groups.values(), lambda places: HostCopy(torch.stack([given[place] for place in places])), failed
    )


def _arrived_scales(step: _Step) -> list[StepScale]:
    """Return the step's loss scales, with values copied from a device filled in."""
    values = [scale.value for scale in step.scales]
    for indices, copy in step.scale_copies:
        for index, value in zip(indices, copy.values().tolist(), strict=True):
            values[index] = value
    return [StepScale.of(scale, value) for scale, value in zip(step.scales, values, strict=True)]


def _arrived_lost(step: _Step) -> dict[tuple[TensorKey, str], LostUpdates]:
    """Return the step's lost updates, summed by tensor and format."""
    found: dict[tuple[TensorKey, str], LostUpdates] = {}
    for indices, copy in step.lost_counts:
        for index, (lost, nonzero) in zip(indices, copy.values().tolist(), strict=True):
            key, name, measured = step.lost[index]
            found[key, name] = found.get((key, name), NO_LOST_UPDATES) + LostUpdates(lost, nonzero, measured)
    return found
