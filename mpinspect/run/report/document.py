"""Lays out a run's joined report: what broke, a summary, a table of modules, then each part's own report."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import PurePath

from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.faults.registry import what_broke
from mpinspect.ranges.report.document import TERMS, change_blocks, title, verdict_blocks
from mpinspect.ranges.report.explorer import Mapped, picture
from mpinspect.ranges.report.front import NO_MAP, facts, listed, state_of, verdict_of
from mpinspect.ranges.report.scale_line import scale_in_brief, steps_and_samples
from mpinspect.reporting import forms
from mpinspect.reporting.document import (
    Block,
    Column,
    Document,
    Front,
    Item,
    Items,
    Limit,
    Line,
    Part,
    Parts,
    Tab,
    Tables,
    Term,
    Tone,
    Widget,
    bullets,
    section,
    table,
)
from mpinspect.reporting.finding import SEVERITIES, Finding, in_counts
from mpinspect.reporting.words import NOT_APPLICABLE, UNKNOWN, duration, number_of, percent, share
from mpinspect.run.report.by_module import VERDICTS_EXPLAINED, ModuleRow, by_module, folded
from mpinspect.run.report.module_notes import module_notes
from mpinspect.run.report.report import ModelPart, RunReport
from mpinspect.shapes.analysis.analysing import runs_in_fp32, suiting_in_16_bits
from mpinspect.shapes.analysis.report import ShapeReport, ShapeRow

#: The verdict on shapes that no reader can guess, with the others.
_VERDICTS = (Term("degraded", r"\bdegraded\b|\bnative\b", f"a verdict on matrix products. {VERDICTS_EXPLAINED}"),)
#: Most modules that are shown, sorted by FLOPs; JSON has all.
MODULES = Limit(8, 25)
#: Most notes in the lines that a run prints when it ends.
NOTES = Limit(3, 3, "more in the report")
#: Matches the routine sentence on a script whose models were inspected.
_ROUTINE = re.compile(r"(no|\d+) optimizers? (was|were) made; \d+ models? (was|were) inspected")
#: Most models shown in full in a terminal; further models have one line each, and report.md has all in full.
MAX_MODELS = 4
#: Kinds of product that cuDNN computes, in TF32 by default.
_OF_CUDNN = ("convolution", "recurrent")


def document(report: RunReport, *, everything: bool = False) -> Document:
    """Return the report as a document that contains each part's document; ``everything`` shows all layers."""
    return Document(
        f"mpinspect run {report.command}",
        (_models(report, everything), Parts(tuple(_wholes(report)))),
        alarm=report.first_line,
        verdict=_verdict(report),
        summary=(
            *section("In brief", Items(tuple(_brief(report)))),
            *section("Module by module", _modules(report), is_detail=report.is_shape_detail and report.kernels is None),
            *section("What was seen, and what was not", bullets(report.saw[1:] and report.saw)),
        ),
        terms=(*TERMS, *_VERDICTS),
        front=_front(report),
    )


def in_brief(report: RunReport) -> Document:
    """Return the lines that a run prints when it ends: the first break, the verdict with its change, and the notes.

    Everything else is in the files of the run.
    """
    noted = [sentence for sentence in report.saw if not (report.parts and _ROUTINE.fullmatch(sentence))]
    about = [Item(words, label) for label, words in _on_speed(report)]
    # An exception has a line of its own in the verdict.
    ended = report.outcome not in ("", "ended") and not report.ended
    return Document(
        f"mpinspect run {report.command}{f': {report.outcome}' if ended else ''}",
        (Items(tuple(about)), bullets(noted, NOTES if report.parts else None)),
        alarm=report.first_line,
        verdict=_verdict(report),
    )


def _verdict(report: RunReport) -> tuple[Block, ...]:
    """Return the verdict of a single model; for several models a line each, worst first, and the worst model's change.

    Only the models with the most severe findings have a line.
    """
    on_speed = in_counts(finding for finding in report.speed_findings if finding.severity != SEVERITIES[0])
    speed = (Line(f"On speed: {on_speed}."),) if on_speed else ()
    ended = (Line(report.ended, "error"),) if report.ended else ()
    if len(report.parts) == 1:
        return (*ended, *verdict_blocks(_without_end(report.parts[0].ranges).verdict), *speed)
    gravest = sorted(report.parts, key=_gravity, reverse=True)[:MAX_MODELS]
    precisions = _by_model((part.name, part.ranges.verdict.precision) for part in gravest)
    if len(precisions) == 1:
        precisions = [gravest[0].ranges.verdict.precision]
    lines = map(Line, _by_model((part.name, "".join(part.ranges.verdict.sentences[:1])) for part in gravest))
    change = change_blocks(gravest[0].ranges.verdict, f" in {gravest[0].name}") if gravest else ()
    return (*ended, *map(Line, precisions), *lines, *change, *speed)


def _by_model(said: Iterable[tuple[str, str]]) -> list[str]:
    """Return each sentence once, after the names of the models that it is about."""
    names: dict[str, list[str]] = {}
    for name, sentence in said:
        if sentence:
            names.setdefault(sentence, []).append(name)
    return [f"{', '.join(models)}: {sentence}" for sentence, models in names.items()]


def _without_end(ranges: RangeReport) -> RangeReport:
    """Return a model's report without the exception that ended the run, which the run's verdict begins with."""
    return replace(ranges, verdict=replace(ranges.verdict, ended="")) if ranges.verdict.ended else ranges


def _models(report: RunReport, everything: bool) -> Parts:
    """Return a part per model, in order, limited in a terminal to the models with the most severe findings."""
    parts = report.parts
    gravest = sorted(range(len(parts)), key=lambda place: _gravity(parts[place]), reverse=True)
    left = len(parts) - MAX_MODELS
    rest = f"more {'model' if left == 1 else 'models'}: below in brief; in full in report.md"
    is_only = len(parts) == 1
    return Parts(
        tuple(
            Part(
                f"ranges: {title(part.ranges) if is_only else part.name}",
                forms.document(_without_end(part.ranges), everything=everything, verdict=not is_only),
            )
            for part in parts
        ),
        None if everything else Limit(MAX_MODELS, len(parts), rest),
        tuple(gravest.index(place) for place in range(len(parts))),
    )


def _front(report: RunReport) -> Front:
    """Return the first screen of the run's page: one map with a switch between the models, and the findings of all of them."""
    several = len(report.parts) > 1
    gravest = max(report.parts, key=_gravity, default=None)
    state, tone = _state(report, gravest)
    found = [each for part in report.parts for each in listed(part.ranges, part.name if several else "")]
    ended = report.outcome not in ("", "ended") and not report.ended
    told = () if gravest is None else tuple(facts(gravest.ranges))
    differing = (f"{part.name} {part.differs}" for part in report.ranks if part.differs)
    script, space, arguments = report.command.partition(" ")
    return Front(
        f"{PurePath(script).name}{space}{arguments}" or report.command,
        state,
        tone,
        tuple(filter(None, (*told, *differing, report.outcome if ended else "", report.log_dir))),
        tuple(_panel(report)),
        tuple(sorted(found, key=lambda each: -SEVERITIES.index(each.finding.severity))),
        tuple(f"{label}: {words}" for label, words in _on_speed(report)),
        _picture(report),
        NO_MAP if report.parts else "No model was inspected, so there is no map.",
        tuple(_tabs(report)),
    )


def _picture(report: RunReport) -> Widget | None:
    """Return the map with a switch between the models and, of a job, between the sum of the ranks and some of the ranks."""
    notes = module_notes(report)
    several = len(report.parts) > 1
    names = [part.name if several else "" for part in report.parts]
    if report.ranks:
        names = [", ".join(filter(None, (name, "all ranks"))) for name in names]
    sums = (Mapped(name, part.ranges, notes[part.name]) for name, part in zip(names, report.parts, strict=True))
    of = "Rank" if report.ranks and not several else "Model"
    ranks = (Mapped(", ".join(filter(None, (part.name, part.differs))), part.ranges) for part in report.ranks)
    return picture(*sums, *ranks, of=of)


def _tabs(report: RunReport) -> Iterator[Tab]:
    """Yield the kernels, then the shapes."""
    if report.kernels is not None:
        yield Tab("Kernels", forms.document(report.kernels), _to_do(report.kernels.findings))
    if report.shapes is not None:
        shapes = () if report.is_shape_detail else report.shapes.listed
        yield Tab("Shapes", forms.document(report.shapes), _to_do(shapes))


def _to_do(findings: Iterable[Finding]) -> int:
    return sum(finding.severity != SEVERITIES[0] for finding in findings)


def _panel(report: RunReport) -> Iterator[Block]:
    """Yield the verdict beside the picture."""
    if len(report.parts) > 1:
        yield from _verdict_of_several(report)
    elif report.parts:
        yield from _only_verdict(report, report.parts[0].ranges)
    else:
        yield from _of_speed(report)


def _verdict_of_several(report: RunReport) -> Iterator[Block]:
    """Yield what ended the run, the models' verdicts, the change of the worst, and below them what they compute in."""
    gravest = sorted(report.parts, key=_gravity, reverse=True)[:MAX_MODELS]
    yield from (Line(report.ended, "error"),) if report.ended else ()
    tone: Tone = "good" if all(part.ranges.verdict.healthy for part in gravest) else "strong"
    said = _by_model((part.name, "".join(part.ranges.verdict.sentences[:1])) for part in gravest)
    yield from (Line(words, tone) for words in said)
    yield from change_blocks(gravest[0].ranges.verdict, f" in {gravest[0].name}")
    yield from (
        Line(words, "dim") for words in _by_model((part.name, part.ranges.verdict.precision) for part in gravest)
    )


def _of_speed(report: RunReport) -> Iterator[Block]:
    """Yield the verdict of a run without models: the finding that costs most, and its change."""
    kernels = () if report.kernels is None else report.kernels.findings
    found = next((each for each in (*kernels, *report.speed_findings) if each.severity != SEVERITIES[0]), None)
    yield from (Line(report.ended, "error"),) if report.ended else ()
    if found is not None:
        yield Line(found.message, "warning")
        yield from (Line(f"Change: {found.fix}"),) if found.fix else ()


def _only_verdict(report: RunReport, ranges: RangeReport) -> Iterator[Block]:
    yield from (Line(report.ended, "error"),) if report.ended else ()
    yield from verdict_of(_without_end(ranges))


def _state(report: RunReport, gravest: ModelPart | None) -> tuple[str, Tone]:
    """Return the run's state in a word or two and its tone: that of the model with the gravest findings."""
    if gravest is None:
        if report.by_error:
            return "Ended by an error", "error"
        if report.shapes is None and report.kernels is None:
            return "Nothing inspected", "unknown"
        return ("Time is lost", "warning") if _to_do(report.speed_findings) else ("No loss of speed found", "good")
    state, tone = state_of(gravest.ranges)
    return ("Ended by an error", "error") if report.ended and tone != "error" else (state, tone)


def _gravity(part: ModelPart) -> tuple[int, bool]:
    """Return the severity of a model's gravest finding, and whether an event broke the model."""
    severity = max((SEVERITIES.index(finding.severity) for finding in part.ranges.findings), default=-1)
    return severity, what_broke(part.ranges) is not None


def _wholes(report: RunReport) -> Iterator[Part]:
    if report.shapes is not None:
        title = "shapes of one step's matrix products"
        yield Part(title, forms.document(report.shapes), report.is_shape_detail, is_on_front=True)
    if report.kernels is not None:
        yield Part("kernels of one profiled step", forms.document(report.kernels), is_on_front=True)


# -- in brief -------------------------------------------------------------------------------------------------------


def _brief(report: RunReport) -> Iterator[Item]:
    """Yield the summary of the run, one item per subject."""
    seen = f"; {report.saw[0]}" if len(report.saw) == 1 else ""
    yield Item(f"{report.command}: {report.outcome}{seen}", "script")
    if report.first_line:
        # Repeated here, since the top of the report may have scrolled out of view.
        yield Item(report.first_line, "broke")
    for part in report.parts:
        ranks = len(part.ranges.session.ranks)
        counted = steps_and_samples(part.ranges.session.progress, f" on {number_of(ranks, 'rank')}" if ranks else "")
        verdict = part.ranges.verdict
        healthy = f"{verdict.opening}. " if verdict.healthy else ""
        worst = () if verdict.healthy else verdict.sentences[:1]
        yield Item(f"{healthy}{counted[0].upper()}{counted[1:]}. {scale_in_brief(part.ranges)}", part.name, worst)
    yield from (Item(words, label) for label, words in _on_speed(report))
    of_shapes = in_counts(_grave_on_shapes(report))
    if report.findings or of_shapes:
        words = (in_counts(report.findings), of_shapes and f"{of_shapes} on the speed of shapes (report.md)")
        yield Item("; ".join(filter(None, words)), "findings")
    if report.log_dir:
        yield Item(report.log_dir, "files")


def _on_speed(report: RunReport) -> Iterator[tuple[str, str]]:
    """Yield a label and a sentence for the shapes (if the report counts them as requested) and for the kernels."""
    if report.shapes_asked is not None:
        yield "shapes", _shapes(report)
    if report.kernels is not None:
        yield "kernels", _kernels(report)


def _grave_on_shapes(report: RunReport) -> list[Finding]:
    """Return the findings on shapes above "info" that ``report.findings`` and a terminal leave out."""
    found = () if report.shapes_asked is None or not report.is_shape_detail else report.shapes_asked.findings
    return [finding for finding in found if finding.severity != SEVERITIES[0]]


def _shapes(report: RunReport) -> str:
    shapes = report.shapes
    assert shapes is not None
    if not shapes.flops:
        return "no matrix product was recorded"
    suits = _share(shapes, lambda row: row.verdict == "native")
    in_tf32 = _share(shapes, lambda row: row.verdict == "native" and row.kind in _OF_CUDNN and _is_in_tf32(row))
    in_fp32 = _share(shapes, runs_in_fp32)
    words = f"{percent(suits)} of one step's FLOPs suit the Tensor Cores of {shapes.gpu.name}"
    if in_tf32:
        words += f" ({'' if in_tf32 == suits else f'{percent(in_tf32)} '}in TF32, cuDNN's default)"
    if degraded := _share(shapes, lambda row: row.verdict == "degraded"):
        degraded_tf32 = _share(shapes, lambda row: row.verdict == "degraded" and _is_in_tf32(row))
        tf32 = " (in TF32)" if degraded_tf32 == degraded else ""
        words += f"; {_how_many(degraded)} use them{tf32} with narrower loads or padded copies"
    # Not by the sum of the shares: it can end a rounding error below 1.
    if others := _share(shapes, lambda row: row.verdict not in ("native", "degraded") and not runs_in_fp32(row)):
        words += f"; {_how_many(others)} do not, by shape or dtype"
    if in_fp32:
        in_16_bits = suiting_in_16_bits(shapes)
        then = "all" if in_16_bits == 1 else f"{percent(in_16_bits)} of all"
        gain = f"; with those in 16 bits {then} would suit" if in_16_bits > suits else ""
        words += f"; {_how_many(in_fp32)} run in FP32{gain}"
    for worst in _grave_on_shapes(report)[:1]:
        words += f"; see {worst.id}{f' in {worst.layer!r}' if worst.layer else ''}"
    return words + (" (--lint, report.md)" if report.is_shape_detail else "")


def _is_in_tf32(row: ShapeRow) -> bool:
    return row.dtype == "float32" and not runs_in_fp32(row)


def _how_many(fraction: float) -> str:
    return {0.0: "none", 1.0: "all"}.get(fraction) or percent(fraction)


def _share(shapes: ShapeReport, counts: Callable[[ShapeRow], bool]) -> float:
    return sum(row.flops * row.calls for row in shapes.matmuls if counts(row)) / shapes.flops


def _kernels(report: RunReport) -> str:
    kernels = report.kernels
    assert kernels is not None
    used = kernels.tensor_core_fraction
    if used is None:
        return "no matrix product ran on a GPU in the profiled step"
    words = f"{percent(used)} of the matrix products' time ran on Tensor Cores"
    return f"{words}; {kernels.phrase}" if kernels.phrase else words


# -- module by module -----------------------------------------------------------------------------------------------


def _modules(report: RunReport) -> Tables:
    """Return the table of modules, repeated blocks in one row; an optional column without values is left out."""
    rows = folded(by_module(report))
    formats = {part.ranges.format for part in report.parts}
    judged = f" in {formats.pop()}" if len(formats) == 1 else ""
    columns = (
        Column("module", is_name=True),
        Column("FLOPs", is_optional=True),
        Column("shapes", is_optional=True),
        Column(f"L1 lost{judged} at 1"),
        Column("scale needed"),
        Column("kernels", is_optional=True),
        Column("on Tensor Cores", is_optional=True),
    )
    return table(columns, map(_figures, rows[: MODULES.page]), limit=MODULES, total=len(rows))


def _figures(row: ModuleRow) -> list[str]:
    return [
        f"{row.module or '(outside of submodules)'} {row.module_type}".strip(),
        NOT_APPLICABLE if row.flops_fraction is None else percent(row.flops_fraction),
        row.shape_verdict or NOT_APPLICABLE,
        share(row.lost_l1_share, is_estimate=True) if row.lost_l1_share else UNKNOWN,
        UNKNOWN if row.log2_scale_needed is None else f"2^{row.log2_scale_needed}",
        NOT_APPLICABLE if row.kernel_time_us is None else duration(row.kernel_time_us),
        NOT_APPLICABLE if row.tensor_core_fraction is None else percent(row.tensor_core_fraction),
    ]
