"""Joins three results for each module: its gradients' range, its matrix products' shapes, and its kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from mpinspect.numeric.exponents import Interval
from mpinspect.numeric.formats import floor_log2
from mpinspect.ranges.analysis.layer_report import LayerReport
from mpinspect.ranges.analysis.serving import LOST_L1_TOLERANCE
from mpinspect.ranges.kinds import GRADIENT_KINDS
from mpinspect.ranges.report.layers import common_name
from mpinspect.run.report.report import RunReport

#: Verdicts on shapes, worst first.
VERDICTS = ("off", "degraded", "unknown", "native")
VERDICTS_EXPLAINED = (
    "native: on Tensor Cores; degraded: on Tensor Cores, with narrower loads or padded copies; off: without "
    "Tensor Cores"
)

_T = TypeVar("_T")


@dataclass(frozen=True)
class ModuleRow:
    """One module that computes matrix products.

    Args:
        module: dotted path, preceded by the model's name if there are several models.
        module_type: its class; "" if unknown.
        flops_fraction: share of the recorded step's FLOPs, 0..1; None without --lint.
        shape_verdict: the worst of its products ("off", "degraded", "unknown", "native"); "" without --lint.
        lost_l1_share: the worst of its gradients' lost L1 shares at scale 1; None if one of them is unknown.
        log2_scale_needed: log2 of the smallest loss scale that suffices for its gradients, or of the largest if they overflow at
            scale 1; None if unknown.
        kernel_time_us: time of its kernels in the profiled step; None without --kernels or without a GPU.
        kernel_time_fraction: that time as a share of all kernel time, 0..1; None without ``kernel_time_us``.
        tensor_core_fraction: share of kernel_time_us on Tensor Cores, native or degraded, 0..1; None without that time.
    """

    module: str
    module_type: str = ""
    flops_fraction: float | None = None
    shape_verdict: str = ""
    lost_l1_share: Interval | None = None
    log2_scale_needed: int | None = None
    kernel_time_us: float | None = None
    kernel_time_fraction: float | None = None
    tensor_core_fraction: float | None = None


def by_module(report: RunReport) -> tuple[ModuleRow, ...]:
    """Return a row for each module in the shapes or kernels, sorted by FLOPs (without shapes: by time), largest first.

    Return no rows if the run has neither shapes nor kernels.
    """
    ranges = _gradients(report)
    flops, verdicts, types = _shapes(report)
    times = _times(report)
    rows = [
        ModuleRow(
            module,
            types.get(module, ""),
            flops.get(module),
            verdicts.get(module, ""),
            _worst_share(ranges.get(module, ())),
            _needed(ranges.get(module, ())),
            *times.get(module, (None, None, None)),
        )
        for module in dict.fromkeys([*flops, *times])
    ]
    return _sorted(rows)


def _sorted(rows: Iterable[ModuleRow]) -> tuple[ModuleRow, ...]:
    return tuple(sorted(rows, key=lambda row: (-(row.flops_fraction or 0.0), -(row.kernel_time_us or 0.0))))


def folded(rows: Iterable[ModuleRow]) -> tuple[ModuleRow, ...]:
    """Return the rows in the order of ``by_module``, repeated blocks merged into one row.

    Repeated blocks are modules of one class and verdict whose paths differ only in numbers. Their row has the sums of FLOPs and
    times, the worst loss, and the largest scale needed.
    """
    groups: dict[tuple[str, str, str], list[ModuleRow]] = {}
    for row in rows:
        # The last number is no block's: layers of one Sequential are not repetitions.
        pattern = re.sub(r"(^|\.)\d+(?=\.)", r"\1", row.module)
        groups.setdefault((row.module_type, row.shape_verdict, pattern), []).append(row)
    return _sorted(map(_as_one, groups.values()))


def _as_one(group: list[ModuleRow]) -> ModuleRow:
    times = [(row.kernel_time_us or 0.0, row.tensor_core_fraction) for row in group]
    known = [(time, fraction) for time, fraction in times if fraction is not None]
    whole = sum(time for time, _ in known)
    return replace(
        group[0],
        module=common_name([row.module for row in group]),
        flops_fraction=_sum(row.flops_fraction for row in group),
        lost_l1_share=_largest([row.lost_l1_share for row in group], key=_by_bounds),
        log2_scale_needed=_largest([row.log2_scale_needed for row in group], key=int),
        kernel_time_us=_sum(row.kernel_time_us for row in group),
        kernel_time_fraction=_sum(row.kernel_time_fraction for row in group),
        tensor_core_fraction=sum(time * fraction for time, fraction in known) / whole if whole else None,
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _largest(values: Sequence[_T | None], key: Callable[[_T], Any]) -> _T | None:
    """Return the largest value; None if any value is unknown, since it may be the largest, and if there are no values."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return max(known, key=key, default=None)


def _by_bounds(share: Interval) -> tuple[float, float]:
    return share.high, share.estimate


def _gradients(report: RunReport) -> dict[str, list[LayerReport]]:
    """Return each module's gradients, by path; with several models the path begins with the model's name."""
    found: dict[str, list[LayerReport]] = {}
    for label, part in zip(report.labels, report.parts, strict=True):
        advice = part.ranges.loss_scale
        for layer in part.ranges.layers:
            # Without advice (the run's scale is unknown, or its training diverged) a module's scale is left unknown, too.
            if layer.kind not in GRADIENT_KINDS or layer.histogram is None or not advice.available:
                continue
            # A gradient that overflows at scale 1 may have overflowed in the run, where only finite elements were counted.
            if advice.highest and layer.max_log2_scale is not None and layer.max_log2_scale < 0:
                layer = replace(layer, max_log2_scale=min(layer.max_log2_scale, floor_log2(advice.highest)))
            found.setdefault(".".join(filter(None, (label, layer.module))), []).append(layer)
    return found


def _shapes(report: RunReport) -> tuple[dict[str, float], dict[str, str], dict[str, str]]:
    """Return each module's share of the FLOPs, worst verdict, and class, by path."""
    flops: dict[str, float] = {}
    verdicts: dict[str, str] = {}
    types: dict[str, str] = {}
    for row in (report.shapes and report.shapes.matmuls) or ():
        flops[row.module] = flops.get(row.module, 0.0) + row.share
        verdicts[row.module] = min(verdicts.get(row.module, "native"), row.verdict, key=VERDICTS.index)
        types[row.module] = row.module_type
    return flops, verdicts, types


def _times(report: RunReport) -> dict[str, tuple[float | None, float | None, float | None]]:
    """Return each module's kernel time, its share of all and the share of it on Tensor Cores; skip modules without a path."""
    times: dict[str, tuple[float | None, float | None, float | None]] = {}
    for row in (report.kernels and report.kernels.by_module) or ():
        if row.is_path and row.time_us > 0:
            used = row.verdict_time_us.get("native", 0.0) + row.verdict_time_us.get("degraded", 0.0)
            times[row.module] = (row.time_us, row.fraction, used / row.time_us)
    return times


def _worst_share(layers: Iterable[LayerReport]) -> Interval | None:
    """Return the largest share; None if any gradient's share is unknown, since it may be the largest."""
    return _largest([_share(layer) for layer in layers if not layer.rounding_noise], key=_by_bounds)


def _needed(layers: Iterable[LayerReport]) -> int | None:
    """Return the exponent of the scale that serves all gradients without overflow; None if one of them is unknown.

    A gradient that may have lost too much before it was counted needs an unknown scale.
    """
    judged = [layer for layer in layers if not layer.rounding_noise]
    highest = min((layer.max_log2_scale for layer in judged if layer.max_log2_scale is not None), default=0)
    if highest < 0:
        return highest
    worst = _worst_share(judged)
    needed = max((layer.log2_scale_needed for layer in judged if layer.log2_scale_needed is not None), default=None)
    if worst is None or (not needed and worst.high > LOST_L1_TOLERANCE):
        return None
    return needed


def _share(layer: LayerReport) -> Interval | None:
    """Return a gradient's lost share; None if no finite value of it was seen."""
    histogram = layer.histogram
    if histogram is None or (histogram.nonfinite and not histogram.nonzero):
        return None
    return layer.lost_l1_share
