"""Makes the notes on shapes and kernels that the map of a model shows in each module's rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mpinspect.ranges.report.explorer import ModuleNotes, NoteCell
from mpinspect.reporting.finding import Finding
from mpinspect.reporting.words import NOT_APPLICABLE, and_more, duration, filled, format_name, percent
from mpinspect.run.report.by_module import VERDICTS, VERDICTS_EXPLAINED, ModuleRow, by_module
from mpinspect.run.report.report import RunReport
from mpinspect.shapes.report.document import TONES

if TYPE_CHECKING:
    from mpinspect.shapes.analysis import ShapeReport
    from mpinspect.shapes.analysis.report import ShapeRow

_COLUMNS = (
    (
        "shapes",
        f"whether the shapes of its matrix products suit Tensor Cores, by the worst product: {VERDICTS_EXPLAINED}",
    ),
    ("kernels", "share of the profiled step's kernel time"),
    ("on Tensor Cores", "share of its own kernel time"),
)
#: Most kernel names that are listed for a module, those with most time.
_MOST_KERNELS = 4


def module_notes(report: RunReport) -> dict[str, ModuleNotes]:
    """Return each model's notes, by the model's name; they are empty in a run without shapes and kernels."""
    rows = {row.module: row for row in by_module(report)}
    to_do = _to_do(report)
    lines: defaultdict[str, list[str]] = defaultdict(list)
    for module, line in (*_shapes(report), *_kernels(report)):
        if line not in lines[module]:
            lines[module].append(line)
    # A column that no module fills is left out, and so are the shapes if none asks for a change.
    all_cells = {module: _cells(row, is_to_do=module in to_do) for module, row in rows.items()}
    kept = [
        place
        for place in range(len(_COLUMNS))
        if any(cells[place].tone or (place and cells[place].rank) for cells in all_cells.values())
    ]
    cells = {module: tuple(found[place] for place in kept) for module, found in all_cells.items()}
    found = {}
    for label, part in zip(report.labels, report.parts, strict=True):
        # With several models each path begins with the model's name; that name alone means the model itself.
        own = {".".join(filter(None, (label, layer.module))): layer.module for layer in part.ranges.layers}
        found[part.name] = ModuleNotes(
            tuple(_COLUMNS[place] for place in kept),
            {own[module]: those for module, those in cells.items() if module in own},
            {own[module]: tuple(those) for module, those in lines.items() if module in own},
        )
    return found


def _to_do(report: RunReport) -> set[str]:
    """Return the modules with products whose shapes a finding asks to change; none if no shapes were asked for."""
    shapes = report.shapes_asked
    if shapes is None or report.is_shape_detail:
        return set()
    grave = {finding.id for finding in shapes.listed if finding.is_alarm}
    return {row.module for row in shapes.matmuls if row.finding in grave}


def _cells(row: ModuleRow, *, is_to_do: bool) -> tuple[NoteCell, ...]:
    """Return a module's cells; a verdict on its shapes has a colour only if a finding asks for a change."""
    cells = [NoteCell(NOT_APPLICABLE)] * len(_COLUMNS)
    if row.shape_verdict:
        tone = TONES[row.shape_verdict] if is_to_do else ""
        cells[0] = NoteCell(row.shape_verdict, tone, len(VERDICTS) - VERDICTS.index(row.shape_verdict))
    if row.kernel_time_fraction is not None:
        cells[1] = NoteCell(percent(row.kernel_time_fraction), "", row.kernel_time_fraction)
    if row.tensor_core_fraction is not None:
        cells[2] = NoteCell(percent(row.tensor_core_fraction), "", 1 + row.tensor_core_fraction)
    return tuple(cells)


def _shapes(report: RunReport) -> Iterator[tuple[str, str]]:
    """Yield a module and a sentence for each of its products, then for each finding that names the module."""
    shapes = report.shapes
    if shapes is None:
        return
    for row in shapes.matmuls:
        product = f"{row.role}, {row.m} x {row.n} x {row.k} in {format_name(row.dtype)}"
        verdict = f"{row.verdict} on {shapes.gpu.name}"
        if row.verdict != "native":
            verdict += filled(": {}", row.reason)
        yield row.module, f"Product, {product}: {verdict}"
    for row in shapes.matmuls:
        for finding in _findings_of(row, shapes):
            said = f"Shapes, {finding.severity}, {finding.id}: {finding.message}."
            if finding.is_alarm:
                said += filled(" Fix: {}", finding.fix)
            yield row.module, said


def _findings_of(row: ShapeRow, shapes: ShapeReport) -> list[Finding]:
    """Return the findings about a product; if several share its finding's id, only those that name its parameter."""
    found = [finding for finding in shapes.findings if finding.id == row.finding]
    return [each for each in found if len(found) == 1 or row.parameter in _parameters(each)]


def _parameters(finding: Finding) -> Sequence[str]:
    found = finding.evidence.get("parameters")
    # The evidence of a report that was read from a file may be anything.
    return found if isinstance(found, (list, tuple)) else ()


def _kernels(report: RunReport) -> Iterator[tuple[str, str]]:
    """Yield a module and a sentence on its kernels' time, with the names that took most of it."""
    kernels = report.kernels
    if kernels is None:
        return
    by_name: defaultdict[str, defaultdict[tuple[str, str], float]] = defaultdict(lambda: defaultdict(float))
    for row in kernels.kernels:
        if row.kernel.module_is_path:
            by_name[row.module][row.name, row.verdict] += row.time_us
    for module, times in by_name.items():
        longest = sorted(times.items(), key=lambda pair: -pair[1])
        named = ", ".join(f"{name} ({verdict}, {duration(time)})" for (name, verdict), time in longest[:_MOST_KERNELS])
        more = and_more(len(longest) - _MOST_KERNELS)
        yield module, f"Kernels, {duration(sum(times.values()))}: {named}{more}"
