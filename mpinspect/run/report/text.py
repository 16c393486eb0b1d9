"""The joined report as plain text: what broke, each model's ranges, shapes, kernels, and in the end all of it in brief."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.rule import Rule
from rich.text import Text

from mpinspect.reporting.escaping import escaped
from mpinspect.reporting.finding import SEVERITIES
from mpinspect.reporting.forms import form
from mpinspect.reporting.page import html, plain_text, ruled_table, titled, to_console
from mpinspect.reporting.rendering import RendersItself
from mpinspect.run.report import ModelPart, RunReport
from mpinspect.run.report.words import brief, module_table

#: Models shown in full; of a sweep's many the others have a line each, and report.md has all.
MAX_MODELS = 4


def render(report: RunReport, width: int | None = None) -> str:
    """The report as text without colour, ``width`` columns wide (the terminal's by default, 100 where there is none)."""
    blocks = []
    for block in _blocks(escaped(report)):
        if isinstance(block, RendersItself):
            blocks.append(form(block.kind, ".txt").render(block, width))
        else:
            blocks.append(plain_text(_page, block, width))
    return "\n".join(blocks)


def render_html(report: RunReport, width: int = 110) -> str:
    """The same in ``<pre>`` elements with colours, for notebooks; everything in it is escaped."""
    blocks = []
    for block in _blocks(escaped(report)):
        if isinstance(block, RendersItself):
            blocks.append(form(block.kind, ".txt").render_html(block, width))
        else:
            blocks.append(html(_page, block, width))
    return "\n".join(blocks)


def render_console(report: RunReport, console: Console) -> None:
    """Print the report to a rich console, in colour if that has any."""
    for block in _blocks(escaped(report)):
        if isinstance(block, RendersItself):
            form(block.kind, ".txt").render_console(block, console)
        else:
            to_console(_page, block, console)


def _blocks(report: RunReport) -> Iterator[RendersItself | list[RenderableType]]:
    """What the report consists of, from top to bottom: reports that render themselves, and lines of its own."""
    if report.first_line:
        yield [Text(report.first_line, style="bold red")]
    for title, part in _parts(report):
        yield [_rule(title)]
        yield part
    yield list(_closing(report))


def _page(lines: list[RenderableType], width: int) -> list[RenderableType]:
    return lines


def _parts(report: RunReport) -> Iterator[tuple[str, RendersItself]]:
    for part in _shown(report):
        yield f"ranges: {part.name}", part.ranges
    if report.shapes is not None:
        yield "shapes of one step's matrix products", report.shapes
    if report.kernels is not None:
        yield "kernels of one profiled step", report.kernels


def _shown(report: RunReport) -> list[ModelPart]:
    """The models shown in full, in their order: of many those with the gravest findings."""
    by_gravity = sorted(report.parts, key=lambda part: -_gravity(part))
    return [part for part in report.parts if part in by_gravity[:MAX_MODELS]]


def _gravity(part: ModelPart) -> int:
    return max((SEVERITIES.index(finding.severity) for finding in part.ranges.findings), default=-1)


def _rule(title: str) -> Rule:
    return Rule(Text(title, style="bold"), characters="-", align="left", style="dim")


def _closing(report: RunReport) -> Iterator[RenderableType]:
    """What stands last is what a terminal shows: all of it in brief."""
    yield _rule("the run")
    modules = module_table(report)
    if modules is not None:
        table = ruled_table(*modules.names, left=1)
        for row in modules.rows:
            table.add_row(*row)
        more = [Text(f"... and {modules.more:,} more", style="dim")] if modules.more else []
        yield from titled("Module by module", [table, *more])
    if report.saw:
        yield from titled("What was seen, and what was not", [Text(f"- {words}") for words in report.saw])
    left = len(report.parts) - len(_shown(report))
    if left:
        yield Text(f"\n{left} more {'model' if left == 1 else 'models'}: below in brief; in full in report.md")
    lines = [Text.assemble((f"{subject}  ", "bold"), words) for subject, words in brief(report)]
    if report.log_dir:
        lines.append(Text.assemble(("files  ", "bold"), report.log_dir))
    yield from titled("In brief", lines)
