"""TensorBoard log of every layer's exponent histograms over the steps, with exact counts, and of related scalars.

The horizontal axis of the histograms is log2 of the magnitude: values with exponent e lie between e and e + 1. Zeros,
infinities and NaNs have no exponent; their counts are scalars. Tags are ``exponents/<kind>/<layer>``,
``flushed_fraction/...`` (at scale 1), ``range_offset/...``, ``zero_fraction/...``, ``infs/...``, ``nans/...``,
``of_layers/<measure>/<kind>/...`` (the lowest, the median and the highest layer) and ``loss_scale/...`` (in log2); beside them
the run's scalars of ``scalars.py``, which trackers get too. On the same axis as the histograms, one more shows the format:
how many bits it keeps of a magnitude.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.numeric.formats import FLOAT16, FORMATS, FloatFormat, FormatLike, as_format
from mpinspect.ranges.analysis.report import LossScaleAdvice, RangeReport
from mpinspect.ranges.report.scalars import USED, ScalarSink
from mpinspect.ranges.report.tensorboard_events import EventFile
from mpinspect.ranges.report.tensorboard_layout import MARGIN, MEASURES, layout
from mpinspect.ranges.session import Event, Progress, ScaleChange, Session, TensorInfo, TensorKey, Window
from mpinspect.reporting.words import format_name
from mpinspect.runtime.background import Background, Seldom, give_way

#: TensorBoard draws 30 bars over the range of all steps. With a range of a multiple of 30 powers of two, each bar holds
#: whole exponents and no count is split. In 2^-43 .. 2^17, FP16's flush edge 2^-25 lies between two bars.
_BARS = 30
_LOWEST, _HIGHEST = -43, 17

#: Characters replaced in tags, since they make TensorBoard's URLs or tag tree ambiguous.
_UNSAFE = re.compile(r"[^\w.\-]+", re.ASCII)


class TensorBoardLog:
    """Writes windows and advice as TensorBoard events; each call writes to the file before it returns, unbuffered.

    Args:
        log_dir: directory of the events file; created if missing.
        format: the format for which flushed fractions and range offsets are computed.

    Raises:
        OSError: the directory or the file can't be written; every method may raise it.
    """

    def __init__(self, log_dir: str | PathLike[str], format: FormatLike = FLOAT16) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.plugins.histogram.metadata import create_summary_metadata
        from torch.utils.tensorboard import summary

        self._format = as_format(format)
        self._summary: Any = summary
        # Protocol buffers are made directly, since torch's functions convert every number to a tensor first.
        self._value: Any = Summary.Value
        self._tensor: Any = TensorProto
        self._histogram_metadata: Any = create_summary_metadata
        self._tags: dict[TensorKey, str] = {}
        self._taken: set[str] = set()
        #: Tags that have had infinities or NaNs: from then on these counts are written, even when they are zero.
        self._broken: set[str] = set()
        #: Tags of histograms whose description is written.
        self._explained: set[str] = set()
        self._file = EventFile(log_dir)
        self.charts(())
        self._file.add([self._bits_kept()], 0)

    def charts(self, infos: Sequence[TensorInfo]) -> None:
        """Add a layout of the custom scalars page, with charts of these tensors; TensorBoard shows the last one added."""
        made = layout(infos, {info.key: self._tag(info.key) for info in infos})
        self._file.add(self._summary.custom_scalars(made).value, 0)

    def write(self, window: Window) -> None:
        """Add a window's counts, which must be unscaled as in a session, at the window's last step."""
        values: list[Any] = []
        of_layers: dict[str, list[float]] = {}
        for key, tensor in window.columns().each():
            give_way()
            tag = self._tag(key)
            scalars = self._scalars(tag, tensor.histogram)
            values += [self._scalar(f"{name}/{tag}", value) for name, value in scalars.items()]
            for name in MEASURES.keys() & scalars.keys():
                of_layers.setdefault(f"of_layers/{name}/{key.kind}", []).append(scalars[name])
            if tensor.histogram.nonzero:
                # An empty histogram breaks TensorBoard's page.
                values.append(self._histogram(f"exponents/{tag}", tensor.histogram))
        for name, found in of_layers.items():
            margin = zip(MARGIN, (median(found), min(found), max(found)), strict=True)
            values += [self._scalar(f"{name}/{which}", value) for which, value in margin]
        self._file.add(values, window.last_step)

    def image(self, tag: str, png: bytes, width: int, height: int, step: int) -> None:
        """Add a PNG to the images page."""
        drawn = {"height": height, "width": width, "colorspace": 3, "encoded_image_string": png}
        self._file.add([self._value(tag=tag, image=drawn)], step)

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
        if histogram.nonfinite:
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
        low, high = _range(histogram.min_exponent, histogram.max_exponent)
        counts = np.zeros(high - low, dtype=np.int64)
        start = histogram.min_exponent - low
        counts[start : start + len(histogram.counts)] = histogram.counts
        return self._bars(tag, low, counts)

    def _bars(self, tag: str, low: int, counts: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
        """Return a histogram of counts by exponent from ``low`` on; each tag's first one describes the format's limits."""
        edges = np.arange(low, low + len(counts) + 1, dtype=np.float64)
        rows = np.stack([edges[:-1], edges[1:], counts], axis=1)
        # TensorBoard's own form: of the older message, HistogramProto, its fast loader drops the description.
        drawn = self._tensor(
            dtype="DT_DOUBLE",
            tensor_shape={"dim": [{"size": size} for size in rows.shape]},
            tensor_content=rows.astype("<f8").tobytes(),
        )
        if tag in self._explained:
            return self._value(tag=tag, tensor=drawn)
        self._explained.add(tag)
        return self._value(tag=tag, tensor=drawn, metadata=self._histogram_metadata(tag, _limits(self._format)))

    def _bits_kept(self) -> Any:
        """Return a histogram that shows the format: how many significant bits it keeps of a magnitude, by exponent."""
        format = self._format
        low, high = _range(format.min_subnormal_exponent, format.max_exponent)
        kept = np.array([format.significant_bits(exponent) for exponent in range(low, high)])
        return self._bars(f"exponents/_bits_that_{format.name}_keeps", low, kept)

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
    """Writes a run's records to a TensorBoardLog as they arrive, with the scalars of each window.

    Args:
        log_dir: directory of the events file.
        session: returns the run's session as far as it is written, for the verdict and the maps; None to write neither.
        clock: returns monotonic seconds.
    """

    #: The session file, on the same disk, comes first.
    yields = True

    def __init__(
        self,
        log_dir: str | PathLike[str],
        session: Callable[[], Session | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._log = TensorBoardLog(log_dir)
        self._session = session
        self._seldom = Seldom(clock)
        #: The thread that makes verdict and maps during the run; only the thread that calls this sink writes to the log.
        self._aside = Background()
        self._concluded: _Conclusion | None = None
        #: Whether the watched tensors have changed since the page's charts were written.
        self._charts_are_old = False
        self._scales: tuple[ScaleChange, ...] = ()

    def watched(self, infos: Sequence[TensorInfo]) -> None:
        """Keep the descriptions of the tensors, also for the page's charts."""
        super().watched(infos)
        self._charts_are_old = True

    def window(self, window: Window) -> None:
        """Write a window's counts; its scalars follow with the progress."""
        if self._charts_are_old:
            self._log.charts(self._watched)
            self._charts_are_old = False
        self._log.write(window)
        super().window(window)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Write a window's scalars except the scale in use, which ``progress`` writes at exactly the steps where it changes."""
        self._log.scalars(step, {name: value for name, value in values.items() if name != USED})

    def event(self, event: Event) -> None:
        """Write a line to the text page."""
        super().event(event)
        place = _UNSAFE.sub("_", event.module) or "the model itself"
        self._log.text("events", f"step {event.step}, {event.phase}: first {event.value} in {place}", event.step)

    def progress(self, progress: Progress) -> None:
        """Write the scalars of the windows added since the last call, and each new change of the loss scale in use."""
        super().progress(progress)
        known = set(self._scales)
        for change in progress.scales:
            if change not in known:
                self._log.scales(change.step, {"used": change.scale})
        self._scales = progress.scales
        self._write_conclusion()
        if self._seldom.is_due and not self._aside.busy:
            self._seldom.begin()
            self._aside.call(self._conclude_so_far)

    def conclude(self, session: Session) -> None:
        """Write the verdict and the maps of a session, which is this run's or made of this and others."""
        self._concluded = _conclude(session)
        self._write_conclusion()

    def close(self) -> None:
        """Write the run's verdict to the text page and its maps to the images page, and close the log."""
        try:
            self._aside.wait()
            if (session := self._session()) is not None:
                self.conclude(session)
        finally:
            self._log.close()

    def _conclude_so_far(self) -> None:
        # The next attempt may succeed; the last one, at the run's end, propagates its error.
        with self._seldom.doing(), suppress(Exception):
            session = self._session()
            self._concluded = None if session is None else _conclude(session)

    def _write_conclusion(self) -> None:
        concluded, self._concluded = self._concluded, None
        if concluded is not None:
            self._log.text("verdict", concluded.text, concluded.step)
            for tag, image in concluded.images.items():
                self._log.image(tag, *image, concluded.step)


class _Conclusion(NamedTuple):
    """What the text and images pages show of a run: the verdict in Markdown, and PNGs with width and height by tag."""

    step: int
    text: str
    images: dict[str, tuple[bytes, int, int]]


def _conclude(session: Session) -> _Conclusion:
    from mpinspect.ranges.analyse import analyse
    from mpinspect.ranges.report import tensorboard_map
    from mpinspect.ranges.report.document import title, verdict_blocks
    from mpinspect.reporting import markdown
    from mpinspect.reporting.document import Document, Findings

    report = analyse(session)
    said = Document(title(report), (Findings(report.findings),), verdict=verdict_blocks(report.verdict))
    images = {
        f"map/{kind}": tensorboard_map.draw(layers, FORMATS[report.format])
        for kind, layers in tensorboard_map.layers_by_kind(report).items()
    }
    return _Conclusion(max(session.progress.steps - 1, 0), markdown.render(said), images)


def _limits(format: FloatFormat) -> str:
    """Return a sentence on where a format's range ends."""
    flush = format.flush_exponent
    fewer = f", fewer bits are kept below 2^{format.min_normal_exponent}" if flush < format.min_normal_exponent else ""
    return (
        f"log2 of the magnitude. {format_name(format.name)} flushes to zero below 2^{flush}{fewer}, and overflows from "
        f"2^{format.max_exponent + 1} on. A loss scale of 2^k moves the values k to the right."
    )


def _range(lowest: int, highest: int) -> tuple[int, int]:
    """Return the lowest and one past the highest exponent drawn: the usual range, or a wider multiple of 30."""
    low, high = min(_LOWEST, lowest), max(_HIGHEST, highest + 1)
    width = -(-(high - low) // _BARS) * _BARS
    return (high - width, high) if low < _LOWEST else (low, low + width)
