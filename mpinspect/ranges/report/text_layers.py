"""The layers' tables as rich renderables, for narrow and for wide terminals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mpinspect.numeric.formats import FORMATS
from mpinspect.ranges.analysis.report import LayerReport, RangeReport
from mpinspect.ranges.kinds import GRADIENT_KINDS, KINDS, UPDATE, kind_named
from mpinspect.ranges.report.range_bar import LEGEND as BAR_LEGEND
from mpinspect.ranges.report.range_bar import range_bar
from mpinspect.ranges.report.table import LayerRow, layer_row, log2_recommended, seen_layers, worst
from mpinspect.reporting.page import ruled_table
from mpinspect.reporting.words import percent

#: Rows shown: about as many as one looks through; the worst ones.
MAX_LAYERS = 40
#: Below this many columns the layers' names stand on lines of their own; from the next ones on the ranges are drawn.
_WIDE, _BARS, _FINE_BARS = 84, 118, 134
#: Below that: widths of the figures, by how many there are; 59 columns at most.
_NARROW_WIDTHS = {5: (6, 12, 11, 18, 7), 4: (6, 18, 18, 7)}

_LEGEND = (
    "~ an estimate, with its [bounds] where they lie far apart; ? not known; offset: unused powers of two at the top of "
    "the format; flushed: share of the non-zero elements; L1 lost: share of the sum of magnitudes that is flushed; "
    "largest: magnitude, rounded down"
)


def layer_tables(report: RangeReport, width: int) -> Iterator[RenderableType]:
    """A table for each kind that was seen, the worst layers only if they are many, and what the marks mean."""
    seen = seen_layers(report)
    if not seen:
        yield Text("\nNo tensor was counted.")
        return
    shown = worst(seen, MAX_LAYERS)
    for kind, layers in groupby(sorted(shown, key=lambda layer: KINDS.index(layer.kind)), lambda layer: layer.kind):
        rows = list(layers)
        if kind == UPDATE:
            yield Text("\nUpdates that rounding loses where weights are stored in a narrow format", style="bold")
            yield _update_table(rows)
            continue
        yield Text(f"\n{kind_named(kind).title} in {report.format} at scale 1", style="bold")
        if width < _WIDE:
            yield from _range_lines(rows, report, width)
        else:
            yield _range_table(rows, report, width)
    yield Text("")
    if len(shown) < len(seen):
        rest = f"The {len(shown)} worst of {len(seen):,} rows, worst first; all are in to_dataframe() and in JSON."
        yield Text(rest, style="bold")
    yield Text(_LEGEND, style="dim")
    if width >= _BARS:
        yield Text(BAR_LEGEND, style="dim")


def _columns(layers: list[LayerReport], report: RangeReport) -> list[tuple[str, Callable[[LayerRow], str]]]:
    """Heading and cell of the figures that these layers, all of one kind, are asked for."""
    columns: list[tuple[str, Callable[[LayerRow], str]]] = [
        ("offset", lambda row: row.range_offset),
        ("flushed", lambda row: row.flushed),
    ]
    k = log2_recommended(report.loss_scale)
    # At scale 1 it would say the same again.
    if layers[0].kind in GRADIENT_KINDS and k != 0:
        columns.append(("at ?" if k is None else f"at 2^{k}", lambda row: row.flushed_scaled))
    columns.append(("L1 lost", lambda row: row.lost_l1_share))
    columns.append(("largest", lambda row: row.largest))
    return columns


def _range_lines(layers: list[LayerReport], report: RangeReport, width: int) -> Iterator[RenderableType]:
    """For narrow terminals: the name on a line of its own, which leaves the figures a whole one."""
    columns = _columns(layers, report)
    yield _grid([Text(heading, style="bold") for heading, _ in columns])
    yield Text("-" * min(width, sum(_NARROW_WIDTHS[len(columns)]) + len(columns) - 1))
    for layer in layers:
        row = layer_row(layer, report)
        yield _name(row.name, row.remarks)
        yield _grid([Text(cell(row)) for _, cell in columns])


def _grid(cells: list[Text]) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    for heading_width in _NARROW_WIDTHS[len(cells)]:
        grid.add_column(width=heading_width, justify="right", overflow="fold")
    grid.add_row(*cells)
    return grid


def _range_table(layers: list[LayerReport], report: RangeReport, width: int) -> Table:
    columns = [*_columns(layers, report), ("subnormal", lambda row: row.subnormal)]
    table = ruled_table("layer", *(heading for heading, _ in columns), left=1)
    if width >= _BARS:
        table.add_column("range", no_wrap=True)
    for layer in layers:
        row = layer_row(layer, report)
        cells = [_name(row.name, row.remarks), *(Text(cell(row)) for _, cell in columns)]
        if width >= _BARS and layer.histogram is not None:
            step = 2 if width >= _FINE_BARS else 3
            cells.append(Text(range_bar(layer.histogram, FORMATS[report.format], step)))
        table.add_row(*cells)
    return table


def _update_table(layers: list[LayerReport]) -> Table:
    """Updates are asked another question: would w + dw differ from w if weights were stored in that format?"""
    storages = sorted({storage for layer in layers for storage in layer.lost_updates or {}})
    table = ruled_table("layer", *(f"lost in\n{storage}" for storage in storages), left=1)
    for layer in layers:
        row = [_name(layer.name, ())]
        for storage in storages:
            lost = (layer.lost_updates or {}).get(storage)
            how = "" if lost is None else " measured" if lost.measured else " if stored so"
            row.append(Text("?" if lost is None else percent(lost.fraction) + how))
        table.add_row(*row)
    return table


def _name(name: str, remarks: tuple[str, ...]) -> Text:
    text = Text(name)
    for remark in remarks:
        text.append(f"\n  {remark}", style="italic")
    return text
