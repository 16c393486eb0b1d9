"""Lays out a run's joined report: what broke, a summary, a table of modules, then each part's own report."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import PurePath

from mpinspect.kernels.report.document import costliest
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.faults.registry import what_broke
from mpinspect.ranges.report.document import TERMS, title, verdict_blocks
from mpinspect.ranges.report.explorer import Mapped, picture
from mpinspect.ranges.report.front import NO_MAP, change_blocks, facts, first_and_next, listed, merged, verdict_of
from mpinspect.ranges.report.front import state_of as ranges_state
from mpinspect.ranges.report.place import Began, began
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
    lines,
    section,
    table,
)
from mpinspect.reporting.finding import SEVERITIES, Finding, in_counts
from mpinspect.reporting.speed import alarms, as_tab, change, state_of
from mpinspect.reporting.words import (
    NOT_APPLICABLE,
    UNKNOWN,
    by_number,
    duration,
    filled,
    number_of,
    optional,
    percent,
    share,
    upper_first,
)
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
            *section("Seen and not seen", bullets(report.saw[1:] and report.saw), is_on_front=not report.parts),
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
    return Document(
        f"mpinspect run {report.command}{filled(': {}', report.outcome_beside)}",
        (Items(tuple(about)), bullets(noted, NOTES.unless(not report.parts))),
        alarm=report.first_line,
        verdict=_verdict(report),
    )


def _verdict(report: RunReport) -> tuple[Block, ...]:
    """Return the verdict of a single model; for several models a line each, worst first, and the worst model's change.

    Only the models with the most severe findings have a line.
    """
    ended = lines(report.ended, tone="error")
    speed = lines(filled("On speed: {}.", alarms(report.speed_findings)))
    if len(report.parts) == 1:
        return (*ended, *verdict_blocks(_without_end(report.parts[0].ranges).verdict), *speed)
    gravest = sorted(report.parts, key=_gravity, reverse=True)[:MAX_MODELS]
    if not gravest:
        return (*ended, *speed)
    precisions = _precisions(gravest)
    if len(precisions) == 1:
        precisions = [gravest[0].ranges.verdict.precision]
    change = _change(gravest)
    return (*ended, *lines(*precisions, *_openings(gravest)), *change, *speed)


def _change(gravest: list[ModelPart], *, code_first: bool = False) -> tuple[Block, ...]:
    """Return the change that the worst model needs, with the names of all models that need it."""
    verdict = gravest[0].ranges.verdict
    alike = (
        part.name
        for part in gravest
        if (part.ranges.verdict.change, part.ranges.verdict.code) == (verdict.change, verdict.code)
    )
    return change_blocks(verdict, f" in {', '.join(alike)}", code_first=code_first)


def _precisions(parts: Iterable[ModelPart]) -> list[str]:
    return _by_model((part.name, part.ranges.verdict.precision) for part in parts)


def _openings(parts: Iterable[ModelPart]) -> list[str]:
    """Return the first sentence of each model's verdict."""
    return _by_model((part.name, "".join(part.ranges.verdict.sentences[:1])) for part in parts)


def _by_model(said: Iterable[tuple[str, str]]) -> list[str]:
    """Return each sentence once, after the names of the models that it is about."""
    names: dict[str, list[str]] = {}
    for name, sentence in said:
        if sentence:
            names.setdefault(sentence, []).append(name)
    return [f"{', '.join(models)}: {sentence}" for sentence, models in names.items()]


def _without_end(ranges: RangeReport) -> RangeReport:
    """Return a model's report without the exception that ended the run, which the run's verdict begins with."""
    return replace(ranges, verdict=replace(ranges.verdict, ended=""))


def _models(report: RunReport, everything: bool) -> Parts:
    """Return a part per model, in order, limited in a terminal to the models with the most severe findings."""
    parts = report.parts
    gravest = sorted(range(len(parts)), key=lambda place: _gravity(parts[place]), reverse=True)
    left = len(parts) - MAX_MODELS
    rest = f"more {by_number(left, 'model', 'models')}: below in brief; in full in report.md"
    return Parts(
        tuple(
            Part(
                f"ranges: {label or title(part.ranges, part.name)}",
                forms.document(_without_end(part.ranges), everything=everything, verdict=bool(label)),
            )
            for label, part in zip(report.labels, parts, strict=True)
        ),
        Limit(MAX_MODELS, len(parts), rest).unless(everything),
        tuple(gravest.index(place) for place in range(len(parts))),
    )


def _front(report: RunReport) -> Front:
    """Return the first screen of the run's page: one map with a switch between the models, and the findings of all of them."""
    gravest = sorted(report.parts, key=_gravity, reverse=True)[:1]
    state, tone = _state(report)
    labelled = zip(report.labels, report.parts, strict=True)
    found = merged(each for label, part in labelled for each in listed(part.ranges, label))
    told = (fact for part in gravest for fact in facts(part.ranges))
    differing = (f"{part.name} {part.differs}" for part in report.ranks if part.differs)
    script, space, arguments = report.command.partition(" ")
    return Front(
        f"{PurePath(script).name}{space}{arguments}" or report.command,
        state,
        tone,
        tuple(filter(None, (*told, *differing, report.outcome_beside, report.log_dir))),
        tuple(_panel(report)),
        tuple(sorted(found, key=lambda each: -SEVERITIES.index(each.finding.severity))),
        tuple(f"{label}: {words}" for label, words in _on_speed(report)),
        _picture(report),
        (report.parts and NO_MAP) or "No model was inspected, so there is no map.",
        tuple(_tabs(report)),
        **_began(report)._asdict(),
    )


def _began(report: RunReport) -> Began:
    """Return where the gravest finding began, with the names of all models that share it."""
    if not report.parts:
        return Began()
    worst = max(report.parts, key=_gravity)
    place, alarm = began(_without_end(worst.ranges))
    alike = (part.name for part in report.parts if began(_without_end(part.ranges)).headline == place)
    headline = f"{', '.join(alike)}: {place}" if place and len(report.parts) > 1 else place
    return Began(headline, report.broke_elsewhere or alarm)


def _picture(report: RunReport) -> Widget | None:
    """Return the map with a switch between the models and, of a job, between the sum of the ranks and some of the ranks."""
    notes = module_notes(report)
    names, of = report.labels, "Model"
    if report.ranks:
        of = by_number(len(names), "Rank", of)
        names = tuple(", ".join(filter(None, (name, "all ranks"))) for name in names)
    sums = (Mapped(name, part.ranges, notes[part.name]) for name, part in zip(names, report.parts, strict=True))
    ranks = (Mapped(", ".join(filter(None, (part.name, part.differs))), part.ranges) for part in report.ranks)
    return picture(*sums, *ranks, of=of)


def _tabs(report: RunReport) -> Iterator[Tab]:
    """Yield the kernels, then the shapes."""
    if report.kernels is not None:
        yield as_tab("Kernels", forms.document(report.kernels), report.kernel_findings)
    if report.shapes is not None:
        yield as_tab("Shapes", forms.document(report.shapes), report.shape_findings)


def _panel(report: RunReport) -> Iterator[Block]:
    """Yield the verdict that stands next to the picture."""
    yield from lines(report.ended, tone="error")
    if len(report.parts) > 1:
        yield from _verdict_of_several(sorted(report.parts, key=_gravity, reverse=True)[:MAX_MODELS])
    elif report.parts:
        yield from verdict_of(_without_end(report.parts[0].ranges))
    else:
        yield from _of_speed(report)


def _verdict_of_several(gravest: list[ModelPart]) -> Iterator[Block]:
    """Yield the change of the worst model, the models' verdicts, and below them the models' precisions."""
    yield from _change(gravest, code_first=True)
    if all(part.ranges.verdict.healthy for part in gravest):
        said = [(part.name, *first_and_next(part.ranges.verdict)) for part in gravest]
        yield from lines(*_by_model((name, first) for name, first, _ in said), tone="good")
        yield from lines(*_by_model((name, following) for name, _, following in said))
        yield from lines(*_by_model((part.name, part.ranges.verdict.sentences[1]) for part in gravest))
    else:
        yield from lines(*_openings(gravest), tone="lead")
    yield from lines(*_precisions(gravest), tone="dim")


def _of_speed(report: RunReport) -> Iterator[Block]:
    """Yield the verdict of a run without models: what was seen, the finding that costs most, and its change."""
    yield from map(Line, map(upper_first, report.saw))
    yield from change((*report.kernel_findings, *report.shape_findings))


def _state(report: RunReport) -> tuple[str, Tone]:
    """Return the run's state in a word or two and its tone, by the model with the gravest findings."""
    if report.parts:
        state, tone = ranges_state(max(report.parts, key=_gravity).ranges)
        if tone == "error" or not report.ended:
            return state, tone
    if report.by_error or report.ended:
        return "Ended by an exception", "error"
    if report.shapes is None and report.kernels is None:
        return "Nothing inspected", "unknown"
    return state_of(report.speed_findings)


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
    script = f"{report.command}: {report.outcome}"
    # Several sentences have a section of their own.
    if len(report.saw) == 1:
        script += f"; {report.saw[0]}"
    yield Item(script, "script")
    if report.first_line:
        # Repeated here, since the top of the report may have scrolled out of view.
        yield Item(report.first_line, "broke")
    for part in report.parts:
        yield _model_in_brief(part)
    yield from (Item(words, label) for label, words in _on_speed(report))
    of_shapes = in_counts(_grave_on_shapes(report))
    if report.findings or of_shapes:
        words = (in_counts(report.findings), of_shapes and f"{of_shapes} on the speed of shapes (report.md)")
        yield Item("; ".join(filter(None, words)), "findings")
    if report.log_dir:
        yield Item(report.log_dir, "files")


def _model_in_brief(part: ModelPart) -> Item:
    session, verdict = part.ranges.session, part.ranges.verdict
    on_ranks = filled(" on {}", session.ranks and number_of(len(session.ranks), "rank"))
    words = f"{upper_first(steps_and_samples(session.progress, on_ranks))}. {scale_in_brief(part.ranges)}"
    if verdict.healthy:
        return Item(f"{verdict.opening}. {words}", part.name)
    return Item(words, part.name, verdict.sentences[:1])


def _on_speed(report: RunReport) -> Iterator[tuple[str, str]]:
    """Yield a label and a sentence for the shapes (if the report counts them as requested) and for the kernels."""
    if report.shapes_asked is not None:
        yield "shapes", _shapes(report)
    if report.kernels is not None:
        yield "kernels", _kernels(report)


def _grave_on_shapes(report: RunReport) -> list[Finding]:
    """Return the findings on shapes above "info" that ``report.findings`` and a terminal leave out."""
    if report.shapes_asked is None or not report.is_shape_detail:
        return []
    return [finding for finding in report.shapes_asked.findings if finding.is_alarm]


def _shapes(report: RunReport) -> str:
    shapes = report.shapes
    assert shapes is not None
    if not shapes.flops:
        return "no matrix product was recorded"
    clauses = [*_suiting(shapes), *_not_suiting(shapes)]
    for worst in _grave_on_shapes(report)[:1]:
        clauses.append(f"see {worst.id}{filled(' in {!r}', worst.layer)}")
    words = "; ".join(clauses)
    return f"{words} (--lint, report.md)" if report.is_shape_detail else words


def _suiting(shapes: ShapeReport) -> Iterator[str]:
    suits = _share(shapes, lambda row: row.verdict == "native")
    words = f"{percent(suits)} of one step's FLOPs suit the Tensor Cores of {shapes.gpu.name}"
    in_tf32 = _share(shapes, lambda row: row.verdict == "native" and row.kind in _OF_CUDNN and _is_in_tf32(row))
    if not in_tf32:
        yield words
    elif in_tf32 == suits:
        yield f"{words} (in TF32, cuDNN's default)"
    else:
        yield f"{words} ({percent(in_tf32)} in TF32, cuDNN's default)"
    degraded = _share(shapes, lambda row: row.verdict == "degraded")
    if degraded and degraded == _share(shapes, lambda row: row.verdict == "degraded" and _is_in_tf32(row)):
        yield f"{_how_many(degraded)} use them (in TF32) with narrower loads or padded copies"
    elif degraded:
        yield f"{_how_many(degraded)} use them with narrower loads or padded copies"


def _not_suiting(shapes: ShapeReport) -> Iterator[str]:
    # Not by the sum of the shares: it can end a rounding error below 1.
    if others := _share(shapes, lambda row: row.verdict not in ("native", "degraded") and not runs_in_fp32(row)):
        yield f"{_how_many(others)} do not, by shape or dtype"
    if in_fp32 := _share(shapes, runs_in_fp32):
        yield f"{_how_many(in_fp32)} run in FP32"
        in_16_bits = suiting_in_16_bits(shapes)
        if in_16_bits == 1:
            yield "with those in 16 bits all would suit"
        elif in_16_bits > _share(shapes, lambda row: row.verdict == "native"):
            yield f"with those in 16 bits {percent(in_16_bits)} of all would suit"


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
    return "; ".join(filter(None, (*costliest(kernels), words, kernels.phrase)))


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
        optional(row.flops_fraction, percent),
        row.shape_verdict or NOT_APPLICABLE,
        share(row.lost_l1_share, is_estimate=True),
        optional(row.log2_scale_needed, "2^{}".format, UNKNOWN),
        optional(row.kernel_time_us, duration),
        optional(row.tensor_core_fraction, percent),
    ]
