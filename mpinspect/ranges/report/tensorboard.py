"""TensorBoard log of every layer's exponent histograms over the steps, with exact counts, and of related scalars.

TensorBoard sorts groups of tags by name, so that the summary is the first:

- ``summary/``: the scale in use, the share flushed of the worst layer, skipped and non-finite steps, and the maps as images;
- ``summary_more/``: the run's other scalars of ``scalars.py``, which trackers get too;
- ``summary_over_layers/<measure>/<kind>/...``: the lowest, the median and the highest layer;
- ``tensor_exponents/<kind>/<layer>``: the histograms. Their horizontal axis is log2 of the magnitude: values with exponent e
  lie between e and e + 1. On the same axis, one more shows the format: how many bits it keeps of a magnitude;
- ``tensor_flushed_fraction/...`` (at scale 1), ``tensor_range_offset/...``, ``tensor_zero_fraction/...``, ``tensor_infs/...``,
  ``tensor_nans/...``: scalars of the worst tensors of each kind. A scalar that never changes is not written.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.numeric.formats import FLOAT16, FORMATS, FloatFormat, FormatLike, as_format
from mpinspect.ranges.analysis.first_line import first_line, gravest
from mpinspect.ranges.report.layers import log2_of
from mpinspect.ranges.report.scalars import USED, ScalarSink
from mpinspect.ranges.report.tensorboard_curves import MOST_CURVES, Curves, Worst
from mpinspect.ranges.report.tensorboard_events import EventFile
from mpinspect.ranges.report.tensorboard_layout import FLUSHED, MEASURES, layout, over_layers
from mpinspect.ranges.session import Event, Progress, ScaleChange, Session
from mpinspect.ranges.windows.tensors import TensorInfo, TensorKey
from mpinspect.ranges.windows.window import Window
from mpinspect.reporting import markdown
from mpinspect.reporting.words import format_name
from mpinspect.runtime.background import Background, Seldom, give_way

#: TensorBoard draws 30 bars over the range of all steps. With a range of a multiple of 30 powers of two, each bar holds
#: whole exponents and no count is split. In 2^-43 .. 2^17, FP16's flush edge 2^-25 lies between two bars.
_BARS = 30
_LOWEST, _HIGHEST = -43, 17

#: Characters replaced in tags, since they make TensorBoard's URLs or tag tree ambiguous.
_UNSAFE = re.compile(r"[^\w.\-]+", re.ASCII)

#: Tags of the scalars that are seen first, by their names in ``scalars.py``.
_SUMMARY = {
    USED: "summary/loss_scale",
    "flushed/worst_layer": "summary/flushed_worst_layer",
    "steps/not_finite": "summary/steps_not_finite",
    "steps/skipped": "summary/steps_skipped",
}


class TensorBoardLog:
    """Writes windows and advice as TensorBoard events; each call writes to the file before it returns, unbuffered.

    Args:
        log_dir: directory of the events file; created if missing.
        format: the format for which flushed fractions and range offsets are computed.
        curves: number of tensors of each kind, the worst ones, that get scalars of their own; None: all.

    Raises:
        OSError: the directory or the file can't be written; every method may raise it.
    """

    def __init__(
        self, log_dir: str | PathLike[str], format: FormatLike = FLOAT16, curves: int | None = MOST_CURVES
    ) -> None:
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
        self._most_curves = curves
        self._worst: dict[str, Worst] = {}
        self._curves = Curves()
        self._watched: Sequence[TensorInfo] = ()
        #: Tags of the curves written, and how many of them the page of charts has.
        self._drawn: set[str] = set()
        self._charted = -1
        #: Tags of histograms whose description is written.
        self._explained: set[str] = set()
        self._file = EventFile(log_dir)
        self._add_charts()
        self._file.add([self._bits_kept()], 0)

    def watched(self, infos: Sequence[TensorInfo]) -> None:
        """Keep the descriptions of the tensors, for the charts of the next window."""
        self._watched, self._charted = infos, -1

    def write(self, window: Window) -> None:
        """Add a window's counts, which must be unscaled as in a session, at the window's last step."""
        histograms: list[Any] = []
        scalars: dict[TensorKey, dict[str, float]] = {}
        for key, tensor in window.columns().each():
            give_way()
            scalars[key] = self._scalars(tensor.histogram)
            if tensor.histogram.nonzero:
                # An empty histogram breaks TensorBoard's page.
                histograms.append(self._histogram(f"tensor_exponents/{self._tag(key)}", tensor.histogram))
        self._file.add(histograms, window.last_step)
        for kind in dict.fromkeys(key.kind for key in scalars):
            of_kind = {key: each for key, each in scalars.items() if key.kind == kind}
            self._add_curves(window.last_step, self._groups(kind, of_kind))
        if self._charted != len(self._drawn):
            self._add_charts()

    def image(self, tag: str, png: bytes, width: int, height: int, step: int) -> None:
        """Add a PNG to the images page."""
        drawn = {"height": height, "width": width, "colorspace": 3, "encoded_image_string": png}
        self._file.add([self._value(tag=tag, image=drawn)], step)

    def scales(self, step: int, scales: dict[str, float | None]) -> None:
        """Add a scalar with log2 of each scale that is known, positive and finite."""
        logs = {f"loss_scale/{name}": log2 for name, k in scales.items() if (log2 := log2_of(k)) is not None}
        self.of_run(step, logs)

    def of_run(self, step: int, values: Mapping[str, float]) -> None:
        """Add scalars of the whole run, by their names in ``scalars.py``."""
        self.scalars(step, {_SUMMARY.get(name, f"summary_more/{name}"): value for name, value in values.items()})

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add scalars by tag."""
        self._file.add([self._value(tag=tag, simple_value=value) for tag, value in values.items()], step)

    def text(self, tag: str, words: str, step: int) -> None:
        """Add a sentence to the text page."""
        self._file.add(self._summary.text(tag, words).value, step)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    # -- inside -----------------------------------------------------------------------------------------------

    def _add_charts(self) -> None:
        """Add a layout of the custom scalars page, with the curves written so far; TensorBoard shows the last one added."""
        self._charted = len(self._drawn)
        tags = {info.key: self._tag(info.key) for info in self._watched}
        self._file.add(self._summary.custom_scalars(layout(self._watched, tags, self._drawn)).value, 0)

    def _groups(self, kind: str, scalars: Mapping[TensorKey, Mapping[str, float]]) -> Iterator[dict[str, float]]:
        """Yield scalars by tag, in groups with equal steps: of one kind's worst tensors, and of its median and extremes."""
        worst = self._worst.setdefault(kind, Worst(self._most_curves))
        worst.add({key: each[FLUSHED] for key, each in scalars.items() if FLUSHED in each})
        for key in sorted(worst.chosen & scalars.keys()):
            for name, value in scalars[key].items():
                yield {f"tensor_{name}/{self._tag(key)}": value}
        for measure in MEASURES:
            found = [each[measure] for each in scalars.values() if measure in each]
            if found:
                yield dict(zip(over_layers(measure, kind), (median(found), min(found), max(found)), strict=True))

    def _add_curves(self, step: int, groups: Iterable[dict[str, float]]) -> None:
        points: dict[int, dict[str, float]] = {}
        for values in groups:
            for each, known in self._curves.points(next(iter(values)), step, values):
                points.setdefault(each, {}).update(known)
        for each in sorted(points):
            self._drawn |= points[each].keys()
            self.scalars(each, points[each])

    def _scalars(self, histogram: ExponentHistogram) -> dict[str, float]:
        """Return one tensor's scalars by the name of their measure."""
        found: dict[str, float] = {"infs": histogram.infs, "nans": histogram.nans}
        if histogram.total:
            found["zero_fraction"] = histogram.zeros / histogram.total
        offset = histogram.range_offset(self._format)
        if offset is not None:
            found["range_offset"] = offset
            found[FLUSHED] = histogram.flushed_fraction(self._format)
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
        return self._bars(f"tensor_exponents/_bits_that_{format.name}_keeps", low, kept)

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
        curves: number of tensors of each kind that get scalars of their own; None: all.
        session: returns the run's session as far as it is written, for the verdict and the maps; None to write neither.
        clock: returns monotonic seconds.
    """

    #: The session file on the same disk has priority.
    yields = True

    def __init__(
        self,
        log_dir: str | PathLike[str],
        session: Callable[[], Session | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        *,
        curves: int | None = MOST_CURVES,
    ) -> None:
        super().__init__()
        self._log = TensorBoardLog(log_dir, curves=curves)
        self._session = session
        self._seldom = Seldom(clock)
        #: The thread that makes verdict and maps during the run; only the thread that calls this sink writes to the log.
        self._aside = Background()
        self._concluded: _Conclusion | None = None
        self._has_told = False
        self._verdict = ""
        self._scales: tuple[ScaleChange, ...] = ()

    def watched(self, infos: Sequence[TensorInfo]) -> None:
        """Keep the descriptions of the tensors, also for the page's charts."""
        super().watched(infos)
        self._log.watched(self._watched)

    def window(self, window: Window) -> None:
        """Write a window's counts; its scalars follow with the progress."""
        self._log.write(window)
        super().window(window)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Write a window's scalars except the scale in use, which ``progress`` writes at exactly the steps where it changes."""
        self._log.of_run(step, {name: value for name, value in values.items() if name != USED})

    def event(self, event: Event) -> None:
        """Write a line to the text page if it is the first event that no loss scaler caught."""
        super().event(event)
        if not self._has_told and gravest([event]) is not None:
            self._has_told = True
            self._log.text("first_event", markdown.escape(first_line(event)), event.step)

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
        """Write the verdict and the maps of a session: this run's, or the sum of several ranks'."""
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
        if concluded is None:
            return
        # TensorBoard lists every text of a tag, one below the other.
        if concluded.text != self._verdict:
            self._verdict = concluded.text
            self._log.text("verdict", concluded.text, concluded.step)
        for tag, image in concluded.images.items():
            self._log.image(tag, *image, concluded.step)


class _Conclusion(NamedTuple):
    """The content of the text and images pages for a run: the verdict in Markdown, and PNGs with width and height by tag."""

    step: int
    text: str
    images: dict[str, tuple[bytes, int, int]]


def _conclude(session: Session) -> _Conclusion:
    from mpinspect.ranges.analyse import analyse
    from mpinspect.ranges.report import tensorboard_map
    from mpinspect.ranges.report.document import title, verdict_blocks
    from mpinspect.reporting.document import Document, Findings

    report = analyse(session)
    said = Document(title(report), (Findings(report.findings),), verdict=verdict_blocks(report.verdict))
    images = {
        f"summary/map/{kind}": tensorboard_map.draw(layers, FORMATS[report.format])
        for kind, layers in tensorboard_map.layers_by_kind(report).items()
    }
    return _Conclusion(max(session.progress.steps - 1, 0), markdown.render(said), images)


def _limits(format: FloatFormat) -> str:
    """Return a sentence on where a format's range ends."""
    flushes = f"flushes to zero below 2^{format.flush_exponent}"
    if format.flush_exponent < format.min_normal_exponent:
        flushes += f", fewer bits are kept below 2^{format.min_normal_exponent}"
    return (
        f"log2 of the magnitude. {format_name(format.name)} {flushes}, and overflows from "
        f"2^{format.max_exponent + 1} on. A loss scale of 2^k moves the values k to the right."
    )


def _range(lowest: int, highest: int) -> tuple[int, int]:
    """Return the lowest and one past the highest exponent drawn: the usual range, or a wider multiple of 30."""
    low, high = min(_LOWEST, lowest), max(_HIGHEST, highest + 1)
    width = -(-(high - low) // _BARS) * _BARS
    return (high - width, high) if low < _LOWEST else (low, low + width)
