"""Builds a probe report's document and JSON: how well FP16's gradients agree with the prediction from FP32's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.ranges.analysis.agreement import GradientAgreement, LayerProbe
from mpinspect.reporting.document import Cell, Column, Document, Item, Items, Limit, Line, Table, Tables, section
from mpinspect.reporting.json_text import Layout, Special, fields, headed, plain
from mpinspect.reporting.words import UNKNOWN, and_more, number_of, optional, percent

if TYPE_CHECKING:
    from mpinspect.ranges.probe import ProbeReport

#: Parameters, in the model's order.
LAYERS = Limit(60, 100, "more; all are in JSON")
NAMES = Limit(12, 50)
#: Larger differences between measured and predicted shares of a layer's non-zero elements are explained.
TELLING_DIFFERENCE = 0.01

_LEGEND = (
    "in FP32: autocast did not round this gradient, so nothing is predicted of it; noise: zero in theory, the values are "
    "rounding noise (in part: left out)"
)


def document(report: ProbeReport) -> Document:
    notes = [Item("got no gradient", names=report.without_gradient, limit=NAMES)] if report.without_gradient else []
    return Document(
        f"FP16 against FP32 on {number_of(report.batches, 'batch')}",
        (
            *_verdicts(report),
            _tables(report),
            *section("Notes", Items((*notes, *map(Item, report.notes)), marked=True)),
        ),
    )


def _verdicts(report: ProbeReport) -> Iterator[Line]:
    emulated = "emulated on the CPU: products summed in FP32, rounded to FP16"
    yield Line(f"FP16 is {emulated if report.emulated else f'run on {report.device}'}.")
    yield Line(_verdict(report))
    yield from _explanation(report)
    yield Line(f"Loss scale, from the FP32 pass: {report.loss_scale.reason}")


def _verdict(report: ProbeReport) -> str:
    worst = report.worst
    if worst is None:
        return "No weight gradient was in FP16: there is nothing to hold a prediction against."
    predicted, measured = worst.unscaled.predicted_flushed_fraction, worst.unscaled.measured_flushed_fraction
    figures = f"{worst.name}: predicted {percent(predicted)}, measured {percent(measured)}"
    return (
        "Flushed weight gradients at scale 1, predicted and measured: they differ by at most "
        f"{report.largest_difference:.4f} of a layer's non-zero elements ({figures})."
    )


def _explanation(report: ProbeReport) -> Iterator[Line]:
    """Yield the reasons why measured and predicted shares differ, for differences above TELLING_DIFFERENCE."""
    comparable = [layer for layer in report.layers if layer.comparable]
    more = [layer for layer in comparable if layer.unscaled.difference > TELLING_DIFFERENCE]
    fewer = [layer for layer in comparable if layer.unscaled.difference < -TELLING_DIFFERENCE]
    if more:
        yield Line(
            f"More elements became zero than the weight gradient's own range predicts in {_names(more)}: activation gradients "
            "on the way to them were flushed first. No prediction from weight gradients alone can include that; a loss scale "
            "prevents it.",
            "warning",
        )
    if fewer:
        yield Line(
            f"Fewer elements became zero in {_names(fewer)}: rounding on the way carried values across the edge.",
            "warning",
        )


def _names(layers: list[LayerProbe], limit: int = 5) -> str:
    return ", ".join(layer.name for layer in layers[:limit]) + and_more(len(layers) - limit)


def _tables(report: ProbeReport) -> Tables:
    """Return one table per loss scale that ran, each with the same parameters."""
    shown = report.layers[: LAYERS.page]
    runs = [("Loss scale 1", [(layer, layer.unscaled) for layer in shown])]
    if report.second_scale not in (None, 1.0):
        scaled = [(layer, layer.scaled) for layer in shown if layer.scaled is not None]
        runs.append((f"Loss scale {report.second_scale:g}", scaled))
    tables = []
    for place, (title, found) in enumerate(runs):
        rows = tuple(_row(layer, agreement) for layer, agreement in found)
        tables.append(Table(_COLUMNS, rows, title, tuple(len(runs) * number + place for number in range(len(rows)))))
    limit = Limit(len(runs) * LAYERS.terminal, len(runs) * LAYERS.page, LAYERS.rest)
    return Tables(tuple(tables), limit, len(runs) * len(report.layers), _LEGEND)


_COLUMNS = (
    Column("weight gradient", is_name=True),
    Column("predicted", meaning="share of the non-zero elements that FP16 would flush, from the FP32 counts alone"),
    Column("measured", meaning="share that became zero"),
    Column(
        "upstream",
        meaning="part of the measured share: FP16 would hold the FP32 value, but the values that it was computed from had "
        "been rounded or flushed",
    ),
    Column("cosine", priority=1),
    Column("error", meaning="L2 norm of the difference, divided by the FP32 gradient's"),
    Column("remark", is_left=True),
)


def _row(layer: LayerProbe, found: GradientAgreement) -> tuple[Cell, ...]:
    return (
        Cell(layer.name),
        Cell(percent(found.predicted_flushed_fraction)),
        Cell(percent(found.measured_flushed_fraction)),
        Cell(percent(found.lost_upstream_fraction)),
        Cell(optional(found.cosine, "{:.6f}".format, UNKNOWN)),
        Cell(optional(found.relative_error, "{:.1e}".format, UNKNOWN)),
        _remark(layer, found),
    )


def _remark(layer: LayerProbe, found: GradientAgreement) -> Cell:
    if found.overflowed:
        return Cell(f"overflow: {found.infs:,} inf, {found.nans:,} NaN", "error")
    if not layer.histogram.nonzero:
        return Cell("all zero in FP32")
    if layer.rounding_noise:
        return Cell("noise")
    if not layer.in_half:
        return Cell("in FP32")
    return Cell("noise in part" if found.nonzero < layer.histogram.nonzero else "")


# -- JSON ---------------------------------------------------------------------------------------------------------------

LAYOUT = Layout(9, indent=1)


def to_plain(report: ProbeReport) -> dict[str, Any]:
    """Return the report as plain dicts, lists, strings, numbers, booleans and None, without the reference session."""
    body = fields(report, also=("largest_difference",), but=("layers", "reference")) | {"layers": report.layers}
    return headed("mpinspect.probe", 1, plain(body, _SPECIAL))


def _histogram(histogram: ExponentHistogram) -> dict[str, Any]:
    names = ("min_exponent", "counts", "zeros", "infs", "nans")
    return {name: getattr(histogram, name) for name in names}


_FRACTIONS = ("predicted_flushed_fraction", "measured_flushed_fraction", "lost_upstream_fraction")


def _layer(layer: LayerProbe) -> dict[str, Any]:
    names = ("name", "shape", "histogram", "in_half", "rounding_noise", "unscaled", "scaled")
    return {name: getattr(layer, name) for name in names}


_SPECIAL: Special = {
    LayerProbe: _layer,
    ExponentHistogram: _histogram,
    GradientAgreement: lambda found: fields(found, also=_FRACTIONS),
}
