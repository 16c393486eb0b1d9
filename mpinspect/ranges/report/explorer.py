"""The interactive map of a run's layers: packs the run's counts for a script that computes every figure from them."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.numeric.formats import FORMATS, FloatFormat
from mpinspect.ranges.analysis.report import LayerReport, RangeReport
from mpinspect.ranges.kinds import TABLE, UPDATE
from mpinspect.ranges.report.layers import log2_recommended, repeated, seen_layers
from mpinspect.ranges.session import Window, coarsen
from mpinspect.reporting.document import Widget
from mpinspect.reporting.streams import printable
from mpinspect.reporting.words import format_name

#: Most histograms in a page: 2,000 layers in 8 blocks of the run make a file of some megabytes.
_MOST_HISTOGRAMS = 16_000
#: Most blocks of the run on the slider.
_MOST_BLOCKS = 24


def widget(report: RangeReport) -> Iterator[Widget]:
    """Yield the report's map, or nothing if no tensor was counted."""
    if not _shown(report):
        return
    yield Widget(
        "The map",
        "mpinspect.ranges.report",
        "explorer",
        lambda: packed(report),
        "The interactive map needs JavaScript; the tables below say the same.",
    )


def packed(report: RangeReport) -> str:
    """Return ``data(report)`` as gzipped JSON in base64."""
    text = json.dumps(data(report), separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode("utf-8"), mtime=0)).decode("ascii")


def data(report: RangeReport) -> dict[str, Any]:
    """Return all that the script needs: formats, blocks of the run, and every tensor's counts in each block."""
    layers = _shown(report)
    windows = coarsen(report.session.windows, max(1, min(_MOST_BLOCKS, _MOST_HISTOGRAMS // len(layers))))
    groups, group_of = [], {}
    for place, group in enumerate(repeated(layers)):
        groups.append({"name": printable(group.name), "size": len(group.members)})
        group_of.update(dict.fromkeys((layer.key for layer in group.members), place))
    return {
        "model": printable(report.session.info.model),
        "format": report.format,
        "recommended": log2_recommended(report.loss_scale),
        "own": _own_scale(report),
        "formats": [_format(format) for format in FORMATS.values()],
        "kinds": [
            {"name": kind.name, "title": kind.title, "is_scaled": kind.is_scaled}
            for kind in TABLE
            if kind.name != UPDATE
        ],
        "blocks": [{"first": window.first_step, "last": window.last_step} for window in windows],
        "groups": groups,
        "tensors": [
            {
                "name": printable(layer.name),
                "kind": layer.kind,
                "group": group_of[layer.key],
                "floor": layer.floor_exponent,
                "noise": layer.rounding_noise,
                "blocks": _blocks(layer, windows),
            }
            for layer in layers
        ],
    }


def _own_scale(report: RangeReport) -> int:
    """Return the run's last known loss scale as a power of two, rounded down; 0 if it had none."""
    scales = [change.scale for change in report.session.progress.scales if change.scale and math.isfinite(change.scale)]
    return math.frexp(scales[-1])[1] - 1 if scales else 0


def _shown(report: RangeReport) -> list[LayerReport]:
    """Return the counted layers without updates, since flushing does not decide whether an update is lost."""
    return [layer for layer in seen_layers(report) if layer.kind != UPDATE]


def _blocks(layer: LayerReport, windows: Sequence[Window]) -> list[list[Any] | None]:
    found = [window.tensors.get(layer.key) for window in windows]
    return [None if tensor is None else _histogram(tensor.histogram) for tensor in found]


def _histogram(histogram: ExponentHistogram) -> list[Any]:
    """Return the histogram's fields in the order that the script's ``unpack`` expects."""
    return [
        histogram.min_exponent,
        histogram.zeros,
        histogram.infs,
        histogram.nans,
        histogram.min_significand,
        histogram.max_significand,
        histogram.counts.tolist(),
        histogram.powers_of_two.tolist(),
        histogram.near_top.tolist(),
    ]


def _format(format: FloatFormat) -> dict[str, Any]:
    return {
        "name": format.name,
        "label": format_name(format.name),
        "low": format.min_subnormal_exponent,
        "normal": format.min_normal_exponent,
        "top": format.max_exponent,
        "edge": format.overflow_significand,
        "tie": format.overflow_edge_overflows,
        "ftz": format.flushes_subnormals,
    }
