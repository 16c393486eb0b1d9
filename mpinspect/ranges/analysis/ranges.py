"""Reports, per tensor, a format's effect on the counted values, and the watched tensors that were never seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter

from mpinspect.numeric.exponents import Interval
from mpinspect.numeric.formats import FloatFormat
from mpinspect.ranges.analysis.drift import time_blocks
from mpinspect.ranges.analysis.evidence import Evidence
from mpinspect.ranges.analysis.layer_report import LayerReport, layer_report
from mpinspect.ranges.analysis.report import Coverage
from mpinspect.ranges.analysis.scale_advice import Decision
from mpinspect.ranges.kinds import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    GRADIENT_KINDS,
    KINDS,
    OUTPUT_KINDS,
    UPDATE,
    WEIGHT_GRADIENT,
)
from mpinspect.ranges.session import FROZEN, NEEDS_NO_GRADIENT, Session, containers
from mpinspect.ranges.windows.tensors import TensorInfo, TensorKey, TensorWindow, merge_tensor_windows
from mpinspect.ranges.windows.window import merge_windows


def layer_reports(
    session: Session, totals: dict[TensorKey, TensorWindow], format: FloatFormat, noise: frozenset[TensorKey]
) -> tuple[LayerReport, ...]:
    """Return one report per tensor, in watching order; ``noise`` are the keys of tensors with only rounding noise."""
    return tuple(
        layer_report(info, totals.get(info.key), format, rounding_noise=info.key in noise)
        for info in tensor_infos(session, totals).values()
    )


def over_the_run(
    layers: Sequence[LayerReport], seen: Evidence, totals: dict[TensorKey, TensorWindow], format: FloatFormat
) -> tuple[LayerReport, ...]:
    """Return the reports with shares over the whole run; the counts are unchanged.

    Args:
        layers: the reports on everything counted.
        seen: the part of the session that represents the run.
        totals: the totals of that part; a tensor without a total gets no shares.
        format: the format to judge the tensors against.
    """
    blocks = []
    if seen.is_weighed:
        blocks = [merge_windows(*block).tensors for block in time_blocks(seen.session.windows)]
    found = []
    for layer in layers:
        if layer.histogram is not None:
            # In a tensor with infinities or NaNs the finite values are mostly zeros, which do not show the flushed share.
            parts = [part[layer.key] for part in blocks if layer.key in part]
            finite = [part for part in parts if not part.histogram.nonfinite]
            layer = _over_the_run(layer, totals.get(layer.key), finite, format)
        found.append(layer)
    return tuple(found)


def _over_the_run(
    layer: LayerReport, total: TensorWindow | None, blocks: Sequence[TensorWindow], format: FloatFormat
) -> LayerReport:
    info = TensorInfo(layer.name, layer.kind, layer.module, layer.module_type)
    run, parts = layer_report(info, total, format), [layer_report(info, block, format) for block in blocks]
    return replace(
        layer,
        flushed_fraction=_between(run, parts, attrgetter("flushed_fraction")),
        lost_l1_share=_between(run, parts, attrgetter("lost_l1_share")),
        already_flushed_fraction=_between(run, parts, attrgetter("already_flushed_fraction")),
        floor_exponent=run.floor_exponent,
        subnormal_fraction=run.subnormal_fraction,
        noise_to_signal=run.noise_to_signal,
        log2_scale_needed=run.log2_scale_needed,
        weighed=run.histogram,
    )


def with_needs(layers: Sequence[LayerReport], decision: Decision | None) -> tuple[LayerReport, ...]:
    """Return the reports with each gradient's ``log2_scale_needed`` raised to the need of its worst block."""
    if decision is None:
        return tuple(layers)
    needs = {loss.key: max(loss.log2_lowest, 0) for loss in decision.losses}
    return tuple(replace(layer, log2_scale_needed=needs.get(layer.key, layer.log2_scale_needed)) for layer in layers)


def _between(
    run: LayerReport, blocks: Sequence[LayerReport], share_of: Callable[[LayerReport], Interval | None]
) -> Interval | None:
    """Return the run's share with bounds widened to the lowest and the highest bound of the run and its blocks."""
    known = [(layer, found) for layer in (run, *blocks) if (found := share_of(layer)) is not None]
    if not known or known[0][0] is not run:
        return None
    # A block of only zeros may have lost every value but shows no survivors, so it gives no lower bound.
    lows = [found.low for layer, found in known if layer.histogram is not None and layer.histogram.nonzero]
    return replace(known[0][1], low=min(lows, default=0.0), high=max(found.high for _, found in known))


def overall_reports(totals: dict[TensorKey, TensorWindow], format: FloatFormat) -> tuple[LayerReport, ...]:
    """Return one report per kind over all its tensors pooled, for orientation only: scales are judged layer by layer."""
    reports = []
    for kind in KINDS:
        parts = [window for key, window in totals.items() if key.kind == kind]
        if parts:
            reports.append(layer_report(TensorInfo("", kind, "", ""), merge_tensor_windows(parts), format))
    return tuple(reports)


def tensor_infos(session: Session, counted: Iterable[TensorKey]) -> dict[TensorKey, TensorInfo]:
    """Return the TensorInfo of every watched tensor, and a minimal one of each tensor counted without being watched."""
    infos = {info.key: info for info in session.watched}
    for key in counted:
        infos.setdefault(key, TensorInfo(key.name, key.kind, key.name, ""))
    return infos


#: The reason for a gradient that never arrived although other tensors were seen or a backward ran.
NO_GRADIENT_SEEN = "no backward reached it: not called, detached, needing no gradient, or not used by the loss"

#: The reason for a missing update of a weight that no optimizer steps directly.
STEPS_MASTERS = "the optimizer steps masters, copies of the weights"


def coverage(session: Session, infos: dict[TensorKey, TensorInfo], totals: dict[TensorKey, TensorWindow]) -> Coverage:
    """Return how many tensors were watched and seen, and a reason for each that was never seen."""
    seen = {key for key, window in totals.items() if window.samples}
    frozen = _Frozen(infos.values())
    unseen = tuple(
        (key.name, key.kind, frozen.reason(info) or _reason(info, session, seen))
        for key, info in infos.items()
        if key not in seen
    )
    return Coverage(len(infos), len(infos) - len(unseen), unseen)


class _Frozen:
    """Finds modules whose activation gradients are not needed for any weight.

    All weights of such a module are frozen; for a module without weights, its nearest container with weights counts.
    """

    def __init__(self, infos: Iterable[TensorInfo]) -> None:
        #: Whether each module holds trained weights; modules without any weights are missing.
        self._trains: dict[str, bool] = {}
        for info in infos:
            if info.kind == WEIGHT_GRADIENT:
                for module in (info.module, *containers(info.module)[:-1]):
                    self._trains[module] = self._trains.get(module, False) or not info.note.startswith(FROZEN)

    def reason(self, info: TensorInfo) -> str:
        """Return why a tensor has no activation gradients if frozen weights are the reason; "" if not."""
        if info.kind != ACTIVATION_GRADIENT or info.note:
            return ""
        nearest = next((name for name in (info.module, *containers(info.module)[:-1]) if name in self._trains), None)
        if nearest is None or self._trains[nearest]:
            return ""
        return NEEDS_NO_GRADIENT


def _reason(info: TensorInfo, session: Session, seen: set[TensorKey]) -> str:
    if info.note:
        return info.note
    progress = session.progress
    if not seen and not progress.steps and not progress.backwards:
        return "no forward ran"
    if not seen and not progress.sampled_steps:
        return "no step was sampled"
    if info.kind in OUTPUT_KINDS and progress.hides(info.module):
        return "inside torch.compile, where no hook runs"
    if info.kind in GRADIENT_KINDS:
        if not progress.backwards and not seen:
            return "no backward ran"
        return NO_GRADIENT_SEEN
    if info.kind == ACTIVATION:
        return "its module's forward never ran"
    if info.kind == UPDATE and session.precision.has_masters:
        return STEPS_MASTERS
    if info.kind == UPDATE:
        return "no optimizer step was sampled"
    return "it was never counted"
