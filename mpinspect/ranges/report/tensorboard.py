"""TensorBoard log of every layer's exponent histograms over the steps, with exact counts, and of related scalars.

The horizontal axis of the histograms is log2 of the magnitude: values with exponent e lie between e and e + 1. Zeros,
infinities and NaNs have no exponent; their counts are scalars. Tags are ``exponents/<kind>/<layer>``,
``flushed_fraction/...`` (at scale 1), ``range_offset/...``, ``zero_fraction/...``, ``infs/...``, ``nans/...`` and
``loss_scale/...`` (in log2); beside them the run's scalars of ``scalars.py``, which trackers get too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.numeric.formats import FLOAT16, FormatLike, as_format
from mpinspect.ranges.analysis.report import LossScaleAdvice, RangeReport
from mpinspect.ranges.kinds import ACTIVATION_GRADIENT, WEIGHT_GRADIENT
from mpinspect.ranges.report.scalars import USED, ScalarSink
from mpinspect.ranges.report.tensorboard_events import EventFile
from mpinspect.ranges.session import Event, Progress, ScaleChange, TensorKey, Window
from mpinspect.ranges.store.columns import TensorColumns
from mpinspect.runtime.background import give_way

#: TensorBoard draws 30 bars over the range of all steps. With a range of a multiple of 30 powers of two, each bar holds
#: whole exponents and no count is split. In 2^-43 .. 2^17, FP16's flush edge 2^-25 lies between two bars.
_BARS = 30
_LOWEST, _HIGHEST = -43, 17

#: Characters replaced in tags, since they make TensorBoard's URLs or tag tree ambiguous.
_UNSAFE = re.compile(r"[^\w.\-]+", re.ASCII)

#: Charts of the "custom scalars" page by title, each with its type and tags.
_LAYOUT = {
    "mpinspect": {
        "loss scale, log2: suggested, and the safe window": [
            "Margin",
            ["loss_scale/suggested", "loss_scale/lowest", "loss_scale/highest"],
        ],
        "flushed at scale 1: activation gradients": ["Multiline", [f"flushed_fraction/{ACTIVATION_GRADIENT}/.*"]],
        "flushed at scale 1: weight gradients": ["Multiline", [f"flushed_fraction/{WEIGHT_GRADIENT}/.*"]],
        "range offset: activation gradients": ["Multiline", [f"range_offset/{ACTIVATION_GRADIENT}/.*"]],
        "range offset: weight gradients": ["Multiline", [f"range_offset/{WEIGHT_GRADIENT}/.*"]],
    }
}


class TensorBoardLog:
    """Writes windows and advice as TensorBoard events; each call writes to the file before it returns, unbuffered.

    Args:
        log_dir: directory of the events file; created if missing.
        format: the format for which flushed fractions and range offsets are computed.

    Raises:
        OSError: the directory or the file can't be written; every method may raise it.
    """

    def __init__(self, log_dir: str | PathLike[str], format: FormatLike = FLOAT16) -> None:
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
        from torch.utils.tensorboard import summary

        self._format = as_format(format)
        self._summary: Any = summary
        # Protocol buffers are made directly, since torch's functions convert every number to a tensor first.
        self._value: Any = Summary.Value
        self._histogram_proto: Any = HistogramProto
        self._tags: dict[TensorKey, str] = {}
        self._taken: set[str] = set()
        #: Tags that have had infinities or NaNs: from then on these counts are written, even when they are zero.
        self._broken: set[str] = set()
        self._file = EventFile(log_dir)
        self._file.add(self._summary.custom_scalars(_LAYOUT).value, 0)

    def write(self, window: Window) -> None:
        """Add a window's counts, which must be unscaled as in a session, at the window's last step."""
        values: list[Any] = []
        for key, tensor in TensorColumns.of(window.tensors).each():
            give_way()
            tag = self._tag(key)
            scalars = self._scalars(tag, tensor.histogram)
            values += [self._scalar(f"{name}/{tag}", value) for name, value in scalars.items()]
            if tensor.histogram.nonzero:
                # An empty histogram breaks TensorBoard's page.
                values.append(self._histogram(f"exponents/{tag}", tensor.histogram))
        self._file.add(values, window.last_step)

    def advice(self, step: int, advice: LossScaleAdvice | RangeReport) -> None:
        """Add the suggested loss scale and its window, in log2, at this step; unknown values are left out."""
        advice = advice.loss_scale if isinstance(advice, RangeReport) else advice
        self.scales(step, {"suggested": advice.recommended, "lowest": advice.lowest, "highest": advice.highest})

    def scales(self, step: int, scales: dict[str, float | None]) -> None:
        """Add a scalar ``loss_scale/<name>`` with log2 of each scale that is known, positive and finite."""
        known = {name: scale for name, scale in scales.items() if scale is not None and 0 < scale < math.inf}
        self._file.add([self._scalar(f"loss_scale/{name}", math.log2(k)) for name, k in known.items()], step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add scalars by tag."""
        self._file.add([self._scalar(tag, value) for tag, value in values.items()], step)

    def text(self, tag: str, words: str, step: int) -> None:
        """Add a sentence to the text page."""
        self._file.add(self._summary.text(tag, words).value, step)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    # -- inside -----------------------------------------------------------------------------------------------

    def _scalars(self, tag: str, histogram: ExponentHistogram) -> dict[str, float]:
        """Return one tensor's scalars, keyed by the first part of their tags."""
        found: dict[str, float] = {}
        if histogram.infs + histogram.nans:
            self._broken.add(tag)
        if tag in self._broken:
            found |= {"infs": histogram.infs, "nans": histogram.nans}
        if histogram.total:
            found["zero_fraction"] = histogram.zeros / histogram.total
        offset = histogram.range_offset(self._format)
        if offset is not None:
            found["range_offset"] = offset
            found["flushed_fraction"] = histogram.flushed_fraction(self._format)
        return found

    def _histogram(self, tag: str, histogram: ExponentHistogram) -> Any:
        """Return a summary value with one bucket per exponent, over a range that TensorBoard's bars divide evenly."""
        low, high = _range(histogram)
        counts = np.zeros(high - low, dtype=np.int64)
        start = histogram.min_exponent - low
        counts[start : start + len(histogram.counts)] = histogram.counts
        middles = np.arange(low, high) + 0.5
        drawn = self._histogram_proto(
            min=low,
            max=high,
            num=histogram.nonzero,
            sum=float((counts * middles).sum()),
            sum_squares=float((counts * middles**2).sum()),
            bucket_limit=range(low + 1, high + 1),
            bucket=counts.tolist(),
        )
        return self._value(tag=tag, histo=drawn)

    def _scalar(self, tag: str, value: float) -> Any:
        return self._value(tag=tag, simple_value=value)

    def _tag(self, key: TensorKey) -> str:
        """Return a tensor's unique tag, ``<kind>/<layer>``, in characters that TensorBoard accepts."""
        if key not in self._tags:
            plain = f"{key.kind}/{_UNSAFE.sub('_', key.name) or 'model'}"
            tag, number = plain, 2
            while tag in self._taken:
                tag, number = f"{plain}-{number}", number + 1
            self._taken.add(tag)
            self._tags[key] = tag
        return self._tags[key]


class TensorBoardSink(ScalarSink):
    """Writes a run's records to a TensorBoardLog as they arrive, with the scalars of each window."""

    def __init__(self, log_dir: str | PathLike[str]) -> None:
        super().__init__()
        self._log = TensorBoardLog(log_dir)
        self._scales: tuple[ScaleChange, ...] = ()

    def window(self, window: Window) -> None:
        """Write a window's counts; its scalars follow with the progress."""
        self._log.write(window)
        super().window(window)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Write a window's scalars, without the scale in use, which is written at the very steps at which it changes."""
        self._log.scalars(step, {name: value for name, value in values.items() if name != USED})

    def event(self, event: Event) -> None:
        """Write a line to the text page."""
        super().event(event)
        place = _UNSAFE.sub("_", event.module) or "the model itself"
        self._log.text("events", f"step {event.step}, {event.phase}: first {event.value} in {place}", event.step)

    def progress(self, progress: Progress) -> None:
        """Write the scalars of the windows that came before, and each new change of the loss scale in use."""
        super().progress(progress)
        known = set(self._scales)
        for change in progress.scales:
            if change not in known:
                self._log.scales(change.step, {"used": change.scale})
        self._scales = progress.scales

    def close(self) -> None:
        """Close the log."""
        self._log.close()


def _range(histogram: ExponentHistogram) -> tuple[int, int]:
    """Return the lowest and one past the highest exponent drawn: the usual range, or a wider multiple of 30."""
    low, high = min(_LOWEST, histogram.min_exponent), max(_HIGHEST, histogram.max_exponent + 1)
    width = -(-(high - low) // _BARS) * _BARS
    return (high - width, high) if low < _LOWEST else (low, low + width)
