"""The few scalars of a run that TensorBoard and the trackers show: one name and value for both, however many layers.

- ``loss_scale/used``, ``suggested``, ``lowest``, ``highest``: log2 of the scale in use (0: no scaling), of the one that fits the
  gradients of these steps, and of the ends of the window of safe scales;
- ``loss_scale/headroom``: powers of two between the scale in use and the highest safe one;
- ``flushed/worst_layer``: of the layer that loses most, the share of the sum of its gradient's magnitudes that is flushed at the
  scale in use, 0..1: an estimate (the report tolerates 0.01); ``flushed/worst_layer_unscaled``: the same at scale 1;
- ``steps/not_finite``, ``steps/skipped``: steps with an infinity or a NaN, and steps that the optimizer skipped, so far.

The format is the one in which the run computes, or FP16 for a run in FP32, as in the report. Unknown scalars are left out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from mpinspect.numeric.formats import FloatFormat
from mpinspect.ranges.analyse import judged_in
from mpinspect.ranges.analysis.loss_scale import noise_of, recommend_loss_scale
from mpinspect.ranges.analysis.noise import rounding_noise_ceilings
from mpinspect.ranges.analysis.ranges import tensor_infos
from mpinspect.ranges.analysis.visibility import Visibility
from mpinspect.ranges.kinds import GRADIENT_KINDS
from mpinspect.ranges.report.layers import log2_of
from mpinspect.ranges.session import Event, Measurement, Precision, Progress, Session
from mpinspect.ranges.windows.tensors import TensorInfo
from mpinspect.ranges.windows.window import Window
from mpinspect.runtime.background import give_way

USED = "loss_scale/used"


class ScalarSink(ABC):
    """A sink that computes a window's scalars when the progress record after it arrives, which contains the loss scale in use."""

    def __init__(self) -> None:
        self._watched: tuple[TensorInfo, ...] = ()
        self._precision = Precision()
        self._events: list[Event] = []
        self._waiting: list[Window] = []

    @abstractmethod
    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Log the scalars of a window whose last step this is."""

    def watched(self, infos: Sequence[TensorInfo]) -> None:
        """Keep the tensors' descriptions, which are needed to recognise gradients that are rounding noise."""
        self._watched = tuple(infos)

    def precision(self, precision: Precision) -> None:
        """Keep the run's dtypes, which determine the format to judge against."""
        self._precision = precision

    def event(self, event: Event) -> None:
        """Count a step that was not finite."""
        self._events.append(event)

    def note(self, note: str) -> None:  # noqa: B027
        """Ignore notes, which only the report shows."""

    def measurement(self, measurement: Measurement) -> None:  # noqa: B027
        """Ignore measurements, which only the report shows."""

    def window(self, window: Window) -> None:
        """Keep a window until its progress follows."""
        self._waiting.append(window)

    def progress(self, progress: Progress) -> None:
        """Log the scalars of the windows added since the last call."""
        while self._waiting:
            window = self._waiting[0]
            self.scalars(window.last_step, self._of(window, progress))
            del self._waiting[0]

    def _of(self, window: Window, progress: Progress) -> dict[str, float]:
        # With several ranks a step may have an event on each. Windows are written in batches, with the last one's progress.
        broken = {event.step for event in self._events if event.step <= window.last_step}
        later = {event.step for event in self._events if event.step > window.last_step and event.skipped}
        skipped = max(progress.skipped_steps - len(later), 0)
        found: dict[str, float] = {"steps/not_finite": len(broken), "steps/skipped": skipped}
        if not progress.scale_known or not any(key.kind in GRADIENT_KINDS for key in window.tensors):
            return found
        session = Session(
            watched=self._watched,
            windows=(window,),
            events=tuple(self._events),
            progress=progress,
            precision=self._precision,
        )
        format, used = judged_in(session), log2_of(progress.scale_at(window.last_step))
        advice = recommend_loss_scale(session, format=format)
        scales = {"suggested": advice.recommended, "lowest": advice.lowest, "highest": advice.highest}
        found |= {f"loss_scale/{name}": log2 for name, k in scales.items() if (log2 := log2_of(k)) is not None}
        found |= _flushed(session, format, {"flushed/worst_layer_unscaled": 0.0, "flushed/worst_layer": used})
        if used is not None:
            found[USED] = used
            if "loss_scale/highest" in found:
                found["loss_scale/headroom"] = found["loss_scale/highest"] - used
        return found


def _flushed(session: Session, format: FloatFormat, scales: Mapping[str, float | None]) -> dict[str, float]:
    """Return by name, for each known scale (in log2), the largest lost L1 share of any layer, 0..1."""
    totals = session.totals()
    noise = noise_of(totals, rounding_noise_ceilings(tensor_infos(session, totals), totals))
    worst: dict[str, float] = {}
    for key, tensor in totals.items():
        give_way()
        if key.kind not in GRADIENT_KINDS or key in noise or not tensor.histogram.nonzero:
            continue
        hidden = Visibility.of(tensor).likely_hidden_l1_share()
        for name, scale in scales.items():
            if scale is not None:
                lost = tensor.histogram.lost_l1_share(format, math.floor(scale)).estimate
                worst[name] = max(worst.get(name, 0.0), lost, hidden)
    return worst
