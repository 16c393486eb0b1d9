"""From raw rows of counts to windows: what was counted, gathered until somebody asks.

Rows stay on the device that counted them until the end of their step; then one copy takes them all to the host,
on a GPU asynchronously and looked at a step later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mpinspect.capture.loss_scale import BackwardScale, is_power_of_two
from mpinspect.capture.rounded_before import floor_exponent, overflow_exponent
from mpinspect.counting import layout
from mpinspect.exponents import ExponentHistogram
from mpinspect.session import GRADIENT_KINDS, LostUpdates, TensorKey, TensorWindow, Window, narrowest

IntArray = npt.NDArray[np.int64]

#: Dtypes that values are rounded to before they can be counted.
_NARROW = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8_e4m3",
    torch.float8_e5m2: "float8_e5m2",
}


def passed_through(dtype: torch.dtype) -> str:
    """Name of the narrow format that values of this dtype were rounded to; "float32" if none."""
    return _NARROW.get(dtype, "float32")


def dtype_name(dtype: torch.dtype) -> str:
    """The bare name: "float16" for torch.float16."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Sample:
    """One tensor counted once.

    ``scale`` is what its values are multiplied by; ``passed_through`` the format they were rounded to before.
    """

    key: TensorKey
    row: torch.Tensor
    numel: int
    dtype: str
    passed_through: str = "float32"
    scale: BackwardScale = field(default_factory=BackwardScale)


class HostCopy:
    """A tensor on its way to the host: at once from a CPU, asynchronously from a GPU."""

    def __init__(self, stacked: torch.Tensor) -> None:
        self._event: Any = None
        if stacked.device.type == "cuda":
            self._host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
            self._host.copy_(stacked, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(stacked.device))
        else:
            self._host = stacked.to("cpu")

    def ready(self) -> bool:
        """Whether the values are there; does not wait."""
        return self._event is None or bool(self._event.query())

    def values(self) -> npt.NDArray[Any]:
        """The values; waits for the GPU where they are not there yet."""
        if self._event is not None:
            self._event.synchronize()
        array: npt.NDArray[Any] = self._host.numpy()
        return array


@dataclass
class _Total:
    """Running sum of one tensor's rows that share a scale and a layout."""

    row: IntArray

    def add(self, row: IntArray) -> None:
        # The extremes of a row without values are neutral: infinity and zero.
        low = min(self.row[layout.MIN_BITS], row[layout.MIN_BITS])
        high = max(self.row[layout.MAX_BITS], row[layout.MAX_BITS])
        self.row += row
        self.row[layout.MIN_BITS], self.row[layout.MAX_BITS] = low, high


@dataclass
class _Gathered:
    """One tensor's share of the open window."""

    totals: dict[tuple[int, int], _Total] = field(default_factory=dict)
    samples: int = 0
    peaks: dict[int, int] = field(default_factory=dict)
    dtypes: set[str] = field(default_factory=set)
    passed_through: str = "float32"
    floor_exponent: int | None = None
    numel_max: int = 0
    lost_updates: dict[str, LostUpdates] = field(default_factory=dict)

    def window(self) -> TensorWindow:
        histogram = ExponentHistogram.empty()
        for (log2_scale, _), total in self.totals.items():
            histogram = histogram + layout.decode(total.row).shifted(-log2_scale)
        return TensorWindow(
            histogram,
            self.samples,
            dict(sorted(self.peaks.items())),
            tuple(sorted(self.dtypes)),
            self.passed_through,
            self.floor_exponent,
            self.lost_updates,
            self.numel_max,
        )


@dataclass
class _Step:
    """A sampled step on its way to the host."""

    step: int
    samples: list[Sample]
    rows: list[tuple[list[int], HostCopy]]
    scales: list[tuple[list[int], HostCopy]]
    lost: list[tuple[TensorKey, str, bool]]
    lost_counts: list[tuple[list[int], HostCopy]]


class Tally:
    """Gathers samples step by step into windows.

    Args:
        drop: called with a sentence whenever a sample had to be thrown away.
        scale_seen: called with the step and the scale of its gradients (None: not known).
    """

    def __init__(self, drop: Callable[[str], None], scale_seen: Callable[[int, float | None], None]) -> None:
        self._drop = drop
        self._scale_seen = scale_seen
        self._pending: list[Sample] = []
        self._pending_lost: list[tuple[TensorKey, str, bool, torch.Tensor]] = []
        self._travelling: deque[_Step] = deque()
        self._open: dict[TensorKey, _Gathered] = {}
        self._steps: list[int] = []
        self._gradient_peaks: dict[int, int] = {}

    def add(self, sample: Sample) -> None:
        """Take a sample of the current step."""
        self._pending.append(sample)

    def add_lost_updates(self, key: TensorKey, format_name: str, counts: torch.Tensor, *, measured: bool) -> None:
        """Take lost-update counts of the current step: an int64 tensor (lost, non-zero)."""
        self._pending_lost.append((key, format_name, measured, counts))

    def drop_step(self) -> None:
        """Forget the samples of the current step."""
        self._pending.clear()
        self._pending_lost.clear()

    @property
    def open_steps(self) -> int:
        """Sampled steps in the open window."""
        return len(self._steps)

    def end_step(self, step: int) -> None:
        """All samples of this step are in: send them to the host, and take in those that have arrived."""
        if self._pending or self._pending_lost:
            self._send(step)
        while self._travelling and all(copy.ready() for copy in _copies(self._travelling[0])):
            self._take(self._travelling.popleft())

    def close_window(self, *, wait: bool = False) -> Window | None:
        """The window since the last call, or None if nothing was sampled. ``wait`` for what is still on a GPU."""
        while wait and self._travelling:
            self._take(self._travelling.popleft())
        if not self._steps:
            return None
        tensors = {key: gathered.window() for key, gathered in self._open.items()}
        window = Window(
            min(self._steps), max(self._steps), len(self._steps), tensors, dict(sorted(self._gradient_peaks.items()))
        )
        self._open, self._steps, self._gradient_peaks = {}, [], {}
        return window

    # -- to the host ------------------------------------------------------------------------------------------

    def _send(self, step: int) -> None:
        samples, self._pending = self._pending, []
        lost, self._pending_lost = self._pending_lost, []
        on_device = [sample.scale.on_device for sample in samples]
        self._travelling.append(
            _Step(
                step,
                samples,
                _copy_alike([sample.row for sample in samples]),
                _copy_alike(on_device),
                [(key, name, measured) for key, name, measured, _ in lost],
                _copy_alike([counts for *_, counts in lost]),
            )
        )

    def _take(self, step: _Step) -> None:
        samples = _with_scales(step)
        peak_of_step: int | None = None
        for indices, copy in step.rows:
            rows = copy.values()
            for index, row, peak in zip(indices, rows, _peaks(rows), strict=True):
                peak = self._gather(samples[index], row, peak)
                if peak is not None and samples[index].key.kind in GRADIENT_KINDS:
                    peak_of_step = peak if peak_of_step is None else max(peak, peak_of_step)
        for scale in dict.fromkeys(sample.scale.value for sample in samples if sample.key.kind in GRADIENT_KINDS):
            self._scale_seen(step.step, scale)
        for indices, copy in step.lost_counts:
            for index, (lost, nonzero) in zip(indices, copy.values().tolist(), strict=True):
                self._gather_lost(*step.lost[index], lost, nonzero)
        self._steps.append(step.step)
        if peak_of_step is not None:
            self._gradient_peaks[peak_of_step] = self._gradient_peaks.get(peak_of_step, 0) + 1

    def _gather(self, sample: Sample, row: IntArray, peak: int | None) -> int | None:
        """Add one row to its tensor; returns its unscaled peak exponent."""
        log2_scale = _log2(sample.scale)
        if log2_scale is None:
            self._drop(
                f"a sample of {sample.key.name} was thrown away: its loss scale turned out to be no power of two"
            )
            return None
        gathered = self._open.setdefault(sample.key, _Gathered())
        total = gathered.totals.get((log2_scale, len(row)))
        if total is None:
            gathered.totals[log2_scale, len(row)] = _Total(row.copy())
        else:
            total.add(row)
        gathered.samples += 1
        gathered.dtypes.add(sample.dtype)
        gathered.numel_max = max(gathered.numel_max, sample.numel)
        if sample.passed_through != "float32":
            gathered.passed_through = narrowest((gathered.passed_through, sample.passed_through))
            floor = floor_exponent(sample.passed_through, sample.scale.value)
            gathered.floor_exponent = floor if gathered.floor_exponent is None else max(floor, gathered.floor_exponent)
        if peak is not None:
            peak -= log2_scale
        if row[layout.INFS] and sample.passed_through != "float32" and sample.key.kind in GRADIENT_KINDS:
            least = overflow_exponent(sample.passed_through, sample.scale.value)
            peak = least if peak is None else max(peak, least)
        if peak is None:
            return None
        gathered.peaks[peak] = gathered.peaks.get(peak, 0) + 1
        return peak

    def _gather_lost(self, key: TensorKey, format_name: str, measured: bool, lost: int, nonzero: int) -> None:
        kept = self._open.setdefault(key, _Gathered()).lost_updates
        found = LostUpdates(lost, nonzero, measured)
        kept[format_name] = kept[format_name] + found if format_name in kept else found


def _copies(step: _Step) -> Iterable[HostCopy]:
    yield from (copy for _, copy in step.rows)
    yield from (copy for _, copy in step.scales)
    yield from (copy for _, copy in step.lost_counts)


def _copy_alike(tensors: list[torch.Tensor | None]) -> list[tuple[list[int], HostCopy]]:
    """One copy for each group of tensors that share device, shape and dtype, with the places where they stood."""
    groups: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor is not None:
            groups.setdefault((tensor.device, tensor.shape, tensor.dtype), []).append(index)
    return [
        (indices, HostCopy(torch.stack([tensor for index in indices if (tensor := tensors[index]) is not None])))
        for indices in groups.values()
    ]


def _with_scales(step: _Step) -> list[Sample]:
    """The step's samples with the scales that came from the device filled in."""
    samples = list(step.samples)
    for indices, copy in step.scales:
        for index, value in zip(indices, copy.values(), strict=True):
            samples[index] = replace(samples[index], scale=replace(samples[index].scale, value=float(value)))
    return samples


def _log2(scale: BackwardScale) -> int | None:
    """Powers of two to take off the counted exponents; None if the row can't be unscaled by a shift."""
    if scale.unknown or not scale.power_of_two:
        return 0
    if scale.value is None or not is_power_of_two(scale.value):
        return None
    return math.frexp(scale.value)[1] - 1


def _peaks(rows: IntArray) -> list[int | None]:
    """For each row the exponent of its largest magnitude rounded to 11 bits; None where it has no value.

    Args:
        rows: int64, shape (n, length of a layout).
    """
    lowest = (layout.NARROW if rows.shape[1] == layout.NARROW.length else layout.WIDE).lowest_exponent
    bins = rows[:, layout.HEADER :].reshape(len(rows), -1, 3)
    occupied: npt.NDArray[np.bool_] = bins.sum(axis=2) > 0
    used: npt.NDArray[np.bool_] = occupied.sum(axis=1) > 0
    top = occupied.shape[1] - 1 - occupied[:, ::-1].argmax(axis=1)
    near_top = bins[np.arange(len(rows)), top, 2] > 0
    return [
        lowest + index + near if has_value else None
        for index, near, has_value in zip(top.tolist(), near_top.tolist(), used.tolist(), strict=True)
    ]
