"""The report as GitHub Markdown: a table of layers to paste into an issue or a job's summary."""

from __future__ import annotations

from collections.abc import Iterator

from mpinspect.ranges.analysis.overhead import overhead_line
from mpinspect.ranges.analysis.report import LossScaleAdvice, RangeReport
from mpinspect.ranges.kinds import UPDATE
from mpinspect.ranges.report.scale_line import scale_line
from mpinspect.ranges.report.table import LayerRow, layer_row, log2_recommended, seen_layers, worst
from mpinspect.reporting.finding import SEVERITIES
from mpinspect.reporting.markdown_page import escape, page, section, table
from mpinspect.reporting.words import percent, power_of_two

#: Rows of layers; GitHub cuts a comment at 65,536 characters.
MAX_LAYERS = 100
MAX_EVENTS = 10
MAX_NEVER_FIRED = 50


def render(report: RangeReport) -> str:
    """The report as GitHub-flavoured Markdown; names are escaped, tables' pipes included."""
    return page(_lines, report)


def _lines(report: RangeReport) -> Iterator[str]:
    session, progress = report.session, report.session.progress
    yield f"# {escape(session.info.model) or 'A model'} against {report.format}"
    yield ""
    yield f"{progress.steps:,} steps, {progress.sampled_steps:,} sampled, {progress.skipped_steps:,} skipped."
    overhead = overhead_line(session)
    if overhead:
        yield f"\n{overhead[0].upper()}{overhead[1:]}."
    yield from section("Infinite or NaN", _events(report))
    yield from section("Loss scale", _loss_scale(report.loss_scale))
    yield from section("Findings", _findings(report))
    yield from section("Layers", _layers(report))
    yield from section("Updates", _updates(report))
    yield from section("Other formats", _formats(report))
    yield from section("Coverage", _coverage(report))
    yield from section("Notes", [f"- {escape(note)}" for note in session.notes])


def _events(report: RangeReport) -> Iterator[str]:
    if not report.events:
        return
    columns = ["step", "phase", "module", "tensor", "value", "loss scale"]
    shown = report.events[:MAX_EVENTS]
    rows = [
        [
            str(event.step),
            event.phase,
            escape(event.module) or "(the model)",
            f"{escape(event.tensor)} ({escape(event.what)})",
            event.value,
            "?" if event.loss_scale is None else power_of_two(event.loss_scale),
        ]
        for event in shown
    ]
    yield from table(columns, rows, left=len(columns))
    if len(report.events) > len(shown):
        yield f"\n... and {len(report.events) - len(shown):,} more."


def _loss_scale(advice: LossScaleAdvice) -> Iterator[str]:
    if not advice.available:
        yield f"**No loss scale can be suggested.** {escape(advice.reason)}"
        return
    yield f"**{scale_line(advice)}.** {escape(advice.reason)}"


def _findings(report: RangeReport) -> Iterator[str]:
    for finding in sorted(report.findings, key=lambda finding: -SEVERITIES.index(finding.severity)):
        fix = f" *{escape(finding.fix)}*" if finding.fix else ""
        yield f"- **{finding.severity}** {escape(finding.id)}: {escape(finding.message)}{fix}"


def _layers(report: RangeReport) -> Iterator[str]:
    seen = [layer for layer in seen_layers(report) if layer.kind != UPDATE]
    if not seen:
        yield "No tensor was counted."
        return
    shown = worst(seen, MAX_LAYERS)
    k = log2_recommended(report.loss_scale)
    columns = ["layer", "kind", "range offset", "flushed at scale 1", "L1 lost", "subnormal"]
    columns += [f"flushed at {'?' if k is None else f'2^{k}'}", "largest", "remarks"]
    yield from table(columns, (_cells(layer_row(layer, report)) for layer in shown), left=2)
    if len(shown) < len(seen):
        yield f"\nThe {len(shown)} worst of {len(seen):,} rows; all are in the JSON report."
    yield "\n\\~ estimate, with its \\[bounds\\]; ? not known; - does not apply."


def _cells(row: LayerRow) -> list[str]:
    figures = (row.range_offset, row.flushed, row.lost_l1_share, row.subnormal, row.flushed_scaled, row.largest)
    return [escape(row.name), escape(row.kind), *map(escape, figures), escape(", ".join(row.remarks))]


def _updates(report: RangeReport) -> Iterator[str]:
    """Updates that rounding would lose if weights were stored in a format."""
    layers = [layer for layer in seen_layers(report) if layer.kind == UPDATE and layer.lost_updates]
    if not layers:
        return
    rows = [
        [escape(layer.name), escape(storage), percent(lost.fraction), "measured" if lost.measured else "if stored so"]
        for layer in worst(layers, MAX_LAYERS)
        for storage, lost in (layer.lost_updates or {}).items()
    ]
    yield from table(["layer", "stored in", "updates lost", ""], rows, left=2)


def _formats(report: RangeReport) -> Iterator[str]:
    if not report.formats:
        return
    rows = [
        [
            verdict.format,
            escape(verdict.kind),
            verdict.scaling,
            "yes" if verdict.fits else "no, values overflow" if verdict.overflows else "no",
            escape(verdict.worst_layer),
            f"\\~{percent(verdict.worst_lost_l1_share)}",
        ]
        for verdict in report.formats
    ]
    yield from table(["format", "for", "scaling", "would do", "worst layer", "its L1 lost"], rows, left=5)


def _coverage(report: RangeReport) -> Iterator[str]:
    yield f"{report.coverage}."
    never = report.coverage.never_fired
    if not never:
        return
    yield ""
    rows = [[escape(name), escape(kind), escape(reason)] for name, kind, reason in never[:MAX_NEVER_FIRED]]
    yield from table(["never seen", "kind", "reason"], rows, left=3)
    if len(never) > MAX_NEVER_FIRED:
        yield f"\n... and {len(never) - MAX_NEVER_FIRED:,} more."
