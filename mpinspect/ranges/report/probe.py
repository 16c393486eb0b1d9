"""A probe's report as text, as HTML for notebooks, and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from mpinspect.ranges.analysis.agreement import GradientAgreement, LayerProbe
from mpinspect.reporting.page import html, plain_text, ruled_table
from mpinspect.reporting.words import percent
from mpinspect.runtime.version import __version__

if TYPE_CHECKING:
    from mpinspect.ranges.probe import ProbeReport

SCHEMA = "mpinspect.probe"
SCHEMA_VERSION = 1

#: Rows a table shows; the rest is in ``layers`` and in JSON.
MAX_LAYERS = 60
#: From here on a difference between measured and predicted is explained: 0.01 of a layer's non-zero elements.
TELLING_DIFFERENCE = 0.01

_LEGEND = (
    "predicted: share of the non-zero elements that FP16 would flush, from the FP32 counts alone; measured: share that came "
    "out zero; upstream: of the measured, what FP16 would hold at its FP32 value, but what it was computed from had been "
    "rounded or flushed before; error: L2 norm of the difference over that of the FP32 gradient; in FP32: autocast did not "
    "round this gradient, so nothing is predicted of it; noise: zero in theory, the values are rounding noise (in part: left out)"
)


def render(report: ProbeReport, width: int | None = None) -> str:
    """The report as text without colour, ``width`` columns wide (the terminal's by default, 100 where there is none)."""
    return plain_text(lambda report, width: _sections(report), report, width)


def render_html(report: ProbeReport, width: int = 110) -> str:
    """The same in a ``<pre>`` with colours; everything in it is escaped."""
    return html(lambda report, width: _sections(report), report, width)


def render_json(report: ProbeReport) -> str:
    """The report as strict JSON, ASCII only, versioned: every field but the reference session; ends with a newline."""
    document = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "mpinspect_version": __version__}
    for field in dataclasses.fields(report):
        if field.name not in ("layers", "reference"):
            document[field.name] = _plain(getattr(report, field.name))
    document["largest_difference"] = report.largest_difference
    document["layers"] = [_layer_document(layer) for layer in report.layers]
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def save(report: ProbeReport, path: str | Path) -> Path:
    """Write .txt or .json; parent directories are made.

    Raises:
        ValueError: another suffix.
    """
    path = Path(path)
    forms = {".txt": render, ".json": render_json}
    form = forms.get(path.suffix.lower())
    if form is None:
        raise ValueError(
            f"{path.name!r} names no form of a probe's report: give a name that ends in {' or '.join(forms)}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(form(report), encoding="utf-8")
    return path


def _sections(report: ProbeReport) -> Iterator[RenderableType]:
    yield from _headline(report)
    shown = report.layers[:MAX_LAYERS]
    yield from _table("Loss scale 1", [(layer, layer.unscaled) for layer in shown])
    scaled = [(layer, layer.scaled) for layer in shown if layer.scaled is not None]
    if report.second_scale not in (None, 1.0):
        yield from _table(f"Loss scale {_scale(report.second_scale)}", scaled)
    if len(report.layers) > MAX_LAYERS:
        yield Text(f"The first {MAX_LAYERS} of {len(report.layers):,} parameters; all are in JSON.")
    yield Text("")
    yield Text(_LEGEND, style="dim")
    if report.without_gradient or report.notes:
        yield Text("\nNotes", style="bold")
    if report.without_gradient:
        names = ", ".join(report.without_gradient[:12])
        more = len(report.without_gradient) - 12
        yield _indented(f"- got no gradient: {names}" + (f" and {more} more" if more > 0 else ""))
    for note in report.notes:
        yield _indented(f"- {note}")


def _headline(report: ProbeReport) -> Iterator[RenderableType]:
    how = (
        "emulated on the CPU: products summed in FP32, rounded to FP16"
        if report.emulated
        else f"run on {report.device}"
    )
    batches = "1 batch" if report.batches == 1 else f"{report.batches:,} batches"
    yield Text(f"FP16 against FP32 on {batches}", style="bold")
    yield Text(f"FP16 is {how}.")
    yield Text(_verdict(report))
    yield from _explanation(report)
    yield Text(f"Loss scale, from the FP32 pass: {report.loss_scale.reason}")


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


def _explanation(report: ProbeReport) -> Iterator[RenderableType]:
    """Why measured and predicted are not the same, where that matters."""
    telling = [layer for layer in report.layers if layer.comparable and _differs(layer)]
    more = [layer for layer in telling if layer.unscaled.difference > 0]
    fewer = [layer for layer in telling if layer.unscaled.difference < 0]
    if more:
        yield Text(
            f"More came out zero than the weight gradient's own range says in {_names(more)}: activation gradients on the "
            "way to them were flushed first. No prediction from weight gradients alone can see that; a loss scale cures it.",
            style="yellow",
        )
    if fewer:
        yield Text(
            f"Fewer came out zero in {_names(fewer)}: rounding on the way carried values across the edge.",
            style="yellow",
        )


def _differs(layer: LayerProbe) -> bool:
    return abs(layer.unscaled.difference) > TELLING_DIFFERENCE


def _names(layers: list[LayerProbe], limit: int = 5) -> str:
    more = len(layers) - limit
    return ", ".join(layer.name for layer in layers[:limit]) + (f" and {more} more" if more > 0 else "")


def _table(title: str, rows: list[tuple[LayerProbe, GradientAgreement]]) -> Iterator[RenderableType]:
    yield Text(f"\n{title}", style="bold")
    table = ruled_table("weight gradient", "predicted", "measured", "upstream", "cosine", "error", left=1)
    table.add_column("remark", overflow="fold")
    for layer, found in rows:
        table.add_row(
            Text(layer.name),
            percent(found.predicted_flushed_fraction),
            percent(found.measured_flushed_fraction),
            percent(found.lost_upstream_fraction),
            "?" if found.cosine is None else f"{found.cosine:.6f}",
            "?" if found.relative_error is None else f"{found.relative_error:.1e}",
            _remark(layer, found),
        )
    yield table


def _remark(layer: LayerProbe, found: GradientAgreement) -> Text:
    if found.overflowed:
        return Text(f"overflow: {found.infs:,} inf, {found.nans:,} NaN", style="bold red")
    if not layer.histogram.nonzero:
        return Text("all zero in FP32")
    if layer.rounding_noise:
        return Text("noise")
    if not layer.in_half:
        return Text("in FP32")
    return Text("noise in part" if found.nonzero < layer.histogram.nonzero else "")


def _layer_document(layer: LayerProbe) -> dict[str, Any]:
    histogram = layer.histogram
    return {
        "name": layer.name,
        "shape": list(layer.shape),
        "histogram": {
            "min_exponent": histogram.min_exponent,
            "counts": histogram.counts.tolist(),
            "zeros": histogram.zeros,
            "infs": histogram.infs,
            "nans": histogram.nans,
        },
        "in_half": layer.in_half,
        "rounding_noise": layer.rounding_noise,
        "unscaled": _agreement_document(layer.unscaled),
        "scaled": None if layer.scaled is None else _agreement_document(layer.scaled),
    }


def _agreement_document(found: GradientAgreement) -> dict[str, Any]:
    fractions = ("predicted_flushed_fraction", "measured_flushed_fraction", "lost_upstream_fraction")
    return dataclasses.asdict(found) | {name: getattr(found, name) for name in fractions}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def _scale(scale: float | None) -> str:
    return "?" if scale is None else f"{scale:g}"


def _indented(text: str) -> Padding:
    return Padding(Text(text), (0, 0, 0, 2))
