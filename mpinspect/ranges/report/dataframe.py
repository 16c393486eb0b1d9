"""The layers as a pandas DataFrame: one row per tensor and one column per figure."""

from __future__ import annotations

import importlib
from typing import Any

from mpinspect.numeric.exponents import Interval
from mpinspect.ranges.analysis.layer_report import LayerReport
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.report.layers import flushed_at_recommended

#: Columns of integers that may be unknown, stored as pandas' nullable integers.
_INTEGERS = (
    "elements",
    "nonzero",
    "zeros",
    "infs",
    "nans",
    "max_exponent",
    "range_offset",
    "floor_exponent",
    "overflowed",
    "log2_scale_needed",
    "max_log2_scale",
)
_LABELS = ("name", "kind", "module", "module_type", "samples")


def render(report: RangeReport) -> Any:
    """Return one row per layer and kind, in the model's order; unknown figures are missing (NaN or ``<NA>``).

    Names are strings, counts and exponents integers (``Int64``), other figures ``float64``, ``rounding_noise`` is ``bool``,
    also where every figure of a column is unknown.

    An estimate ``x`` has its bounds in ``x_low`` and ``x_high``; for a measured figure all three are equal.
    ``flushed_fraction_scaled`` is at the recommended loss scale; the other figures are at scale 1.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        pandas = importlib.import_module("pandas")
    except ImportError as error:
        raise ImportError("to_dataframe() needs pandas: pip install mpinspect[pandas]") from error
    rows = [_row(layer, report) for layer in report.layers]
    columns = list(next(iter(rows), _LABELS))
    # Layers differ in the formats that updates were tested for, so the columns of lost updates are the last.
    columns += sorted({name for row in rows for name in row} - set(columns))
    frame = pandas.DataFrame(rows, columns=columns)
    # Without a known figure pandas would give a column the type "object".
    types = {name: "float64" for name in columns if name not in (*_LABELS, "rounding_noise")}
    types |= dict.fromkeys(set(_INTEGERS) & types.keys(), "Int64") | {"samples": "int64"}
    if rows:
        types["rounding_noise"] = "bool"
    return frame.astype(types)


def _row(layer: LayerReport, report: RangeReport) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(layer, name) for name in _LABELS}
    row |= _counted(layer)
    row |= {"range_offset": layer.range_offset, "floor_exponent": layer.floor_exponent}
    row |= _interval("flushed_fraction", layer.flushed_fraction)
    row |= _interval("already_flushed_fraction", layer.already_flushed_fraction)
    row |= _interval("flushed_fraction_scaled", flushed_at_recommended(layer, report))
    row |= {"subnormal_fraction": layer.subnormal_fraction, "overflowed": layer.overflowed}
    row |= _interval("lost_l1_share", layer.lost_l1_share)
    for name in ("noise_to_signal", "log2_scale_needed", "max_log2_scale", "rounding_noise"):
        row[name] = getattr(layer, name)
    for storage, lost in (layer.lost_updates or {}).items():
        row[f"lost_updates_{storage}"] = lost.fraction
    return row


def _counted(layer: LayerReport) -> dict[str, Any]:
    histogram = layer.histogram
    if histogram is None:
        return dict.fromkeys(("elements", "nonzero", "zeros", "infs", "nans", "min_abs", "max_abs", "max_exponent"))
    return {
        "elements": histogram.total,
        "nonzero": histogram.nonzero,
        "zeros": histogram.zeros,
        "infs": histogram.infs,
        "nans": histogram.nans,
        "min_abs": histogram.min_abs,
        "max_abs": histogram.max_abs,
        "max_exponent": layer.max_exponent,
    }


def _interval(name: str, interval: Interval | None) -> dict[str, float | None]:
    if interval is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}
