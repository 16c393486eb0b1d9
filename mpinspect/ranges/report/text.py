"""The report as plain text: readable without colour, in ASCII but for names, in a narrow terminal as in a wide one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Console, RenderableType
from rich.text import Text

from mpinspect.ranges.analysis.overhead import overhead_line
from mpinspect.ranges.analysis.report import (
    FormatVerdict,
    LossScaleAdvice,
    RangeReport,
    TimeBlock,
)
from mpinspect.ranges.report.scale_line import scale_line, steps_and_samples
from mpinspect.ranges.report.text_layers import layer_tables
from mpinspect.ranges.session import END, Event, Session
from mpinspect.reporting.page import findings, html, plain_text, titled, to_console
from mpinspect.reporting.words import percent, power_of_two

#: Lines of lists that can be long.
MAX_EVENTS = 5
MAX_NAMES = 12
MAX_NOTES = 20


def render(report: RangeReport, width: int | None = None) -> str:
    """The report as text without colour, ``width`` columns wide (the terminal's by default, 100 where there is none)."""
    return plain_text(_sections, report, width)


def render_html(report: RangeReport, width: int = 110) -> str:
    """The same in a ``<pre>`` with colours, for notebooks; everything in it is escaped."""
    return html(_sections, report, width)


def render_console(report: RangeReport, console: Console) -> None:
    """Print the report to a rich console, in colour if that has any."""
    to_console(_sections, report, console)


def _sections(report: RangeReport, width: int) -> Iterator[RenderableType]:
    yield from _headline(report)
    if report.events:
        yield from titled("Infinite or NaN", _events(report.events))
    yield from titled("Loss scale", _loss_scale(report.loss_scale))
    yield from layer_tables(report, width)
    if report.findings:
        yield from titled("Findings", findings(report.findings))
    if report.formats:
        yield from titled("Other formats", _formats(report.formats))
    yield from titled("Coverage", _coverage(report))
    if report.session.notes:
        yield from titled("Notes", _capped([Text(f"- {note}") for note in report.session.notes], MAX_NOTES))


def _capped(lines: list[Text], limit: int) -> list[Text]:
    more = len(lines) - limit
    return lines if more <= 0 else [*lines[:limit], Text(f"... and {more:,} more", style="dim")]


def _headline(report: RangeReport) -> Iterator[Text]:
    session, progress = report.session, report.session.progress
    yield Text(f"{session.info.model or 'A model'} against {report.format}", style="bold")
    state = "" if progress.ended else " so far"
    yield Text(f"{steps_and_samples(progress, state)}{_computed_in(session)}")
    overhead = overhead_line(session)
    if overhead:
        yield Text(overhead)


def _computed_in(session: Session) -> str:
    """The narrow formats that values were rounded to on their way, as under autocast."""
    seen = session.passed_through() - {"float32"}
    return f"; values were rounded to {' and '.join(sorted(seen))}" if seen else ""


# -- what broke -----------------------------------------------------------------------------------------------------


def _events(events: tuple[Event, ...]) -> Iterator[Text]:
    """The first in full, some of the others in a line each."""
    first = events[0]
    yield Text(f"first: {_where(first)}", style="bold red")
    if first.phase == END:
        facts = ["no step told of it"]
    else:
        facts = [f"loss scale {power_of_two(first.loss_scale) if first.loss_scale else 'unknown'}"]
    if first.forward_finite is not None:
        facts.append(f"the forward was {'finite' if first.forward_finite else 'not finite'}")
    if first.gradients_finite is not None:
        facts.append(f"the gradients were {'finite' if first.gradients_finite else 'not finite'}")
    if first.skipped is not None:
        facts.append(f"the optimizer's step was {'skipped' if first.skipped else 'taken'}")
    yield Text("; ".join(facts))
    if first.last_maxima:
        yield Text(
            "largest magnitudes before, oldest first: " + ", ".join(f"{value:.3g}" for value in first.last_maxima)
        )
    if first.explanation:
        yield Text(first.explanation)
    yield from _capped([Text(_where(event)) for event in events[1:]], MAX_EVENTS)


def _where(event: Event) -> str:
    batch = f", micro-batch {event.micro_batch}" if event.micro_batch else ""
    tensor = f" of {event.tensor}" if event.tensor not in ("", event.module) else ""
    what = event.what.replace("_", " ")
    return f"step {event.step}{batch}, {event.phase}, {event.place}: {event.value} in the {what}{tensor}"


# -- the loss scale -------------------------------------------------------------------------------------------------


def _loss_scale(advice: LossScaleAdvice) -> Iterator[Text]:
    if not advice.available:
        yield Text("No loss scale can be suggested.", style="bold")
        yield Text(advice.reason)
        return
    yield Text(scale_line(advice), style="bold")
    yield Text(advice.reason)
    if advice.dynamic is not None and advice.needed is not False:
        start, interval = advice.dynamic.init_scale, advice.dynamic.growth_interval
        role = "The same" if start == advice.static_scale else "Where no fixed scale will do, the first steps' scale"
        scaler = f"torch.amp.GradScaler(init_scale={start:.17g}, growth_interval={interval})"
        yield Text(f"{role} as the start of a dynamic one: {scaler}")
    for pair in advice.conflicts[1:]:
        needs, limit = pair.needs_large, pair.needs_small
        yield Text(f"conflict: {needs} needs 2^{pair.log2_lowest}, {limit} overflows above 2^{pair.log2_highest}")
    if _moves(advice.blocks):
        groups = [list(equal) for _, equal in groupby(advice.blocks, _window)]
        yield Text("The window over time: " + "; ".join(_block(group[0], group[-1]) for group in groups))


def _moves(blocks: tuple[TimeBlock, ...]) -> bool:
    """Whether the window moves by more than a power of two, which is noise."""
    if any(block.log2_lowest is None for block in blocks):
        return True
    ends = [
        [end for block in blocks if (end := getattr(block, name)) is not None]
        for name in ("log2_lowest", "log2_highest")
    ]
    return any(max(end) - min(end) > 1 for end in ends if end)


def _window(block: TimeBlock) -> str:
    return f"2^{block.log2_lowest} .. 2^{block.log2_highest}" if block.log2_lowest is not None else "none"


def _block(first: TimeBlock, last: TimeBlock) -> str:
    """The steps of neighbouring blocks, and the window that all of them have."""
    if first.first_step == last.last_step:
        return f"step {first.first_step:,} {_window(first)}"
    return f"steps {first.first_step:,}-{last.last_step:,} {_window(first)}"


# -- the rest -------------------------------------------------------------------------------------------------------


def _formats(verdicts: tuple[FormatVerdict, ...]) -> Iterator[Text]:
    """A line a kind: the formats that would do, then those that would not and why."""
    for kind in dict.fromkeys(verdict.kind for verdict in verdicts):
        of_kind = [verdict for verdict in verdicts if verdict.kind == kind]
        yes = ", ".join(_format_name(verdict) for verdict in of_kind if verdict.fits)
        no = ", ".join(f"{_format_name(verdict)} ({_why_not(verdict)})" for verdict in of_kind if not verdict.fits)
        parts = ([f"would do: {yes}"] if yes else []) + ([f"would not: {no}"] if no else [])
        yield Text(f"{kind.replace('_', ' ')}s: {'; '.join(parts)}")


def _format_name(verdict: FormatVerdict) -> str:
    return verdict.format if verdict.scaling == "none" else f"{verdict.format} with {verdict.scaling} scaling"


def _why_not(verdict: FormatVerdict) -> str:
    why = "values overflow in" if verdict.overflows else f"~{percent(verdict.worst_lost_l1_share)} of L1 lost in"
    return f"{why} {verdict.worst_layer or 'the model'}"


def _coverage(report: RangeReport) -> Iterator[Text]:
    yield Text(str(report.coverage))
    groups: dict[tuple[str, str], list[str]] = {}
    for name, kind, reason in report.coverage.never_fired:
        groups.setdefault((kind, reason or "reason unknown"), []).append(name or "(the model)")
    lines = []
    for (kind, reason), names in groups.items():
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        lines.append(Text(f"no {kind.replace('_', ' ')} ({reason}): {', '.join(names[:MAX_NAMES])}{more}"))
    yield from _capped(lines, MAX_NOTES)
