"""Lays out the differences of two runs, and their JSON: the headline, both runs, then each model, shapes and kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from mpinspect.ranges.analysis.comparison import RangeDiff
from mpinspect.ranges.analysis.layer_report import LayerReport
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.report.comparison import (
    BESIDE,
    ROWS,
    advice,
    began_apart,
    blocks,
    headline,
    headline_parts,
    maps,
    matters,
    trouble,
    undoes,
)
from mpinspect.ranges.report.front import NO_MAP
from mpinspect.ranges.windows.tensors import LostUpdates
from mpinspect.reporting.document import (
    Block,
    Column,
    Document,
    Findings,
    Front,
    Item,
    Items,
    Limit,
    Line,
    Listed,
    Part,
    Parts,
    Tone,
    bullets,
    lines,
    section,
    table,
)
from mpinspect.reporting.finding import Finding
from mpinspect.reporting.json_text import Layout, Special, fields, headed, plain
from mpinspect.reporting.words import NOT_APPLICABLE, and_more, by_number, duration, filled, number_of, percent
from mpinspect.run.diff.products import KernelsDiff, Product, ShapesDiff
from mpinspect.run.diff.report import DiffReport, ModelDiff, Side

#: Letters of the longest headline.
_LONGEST = 160
#: The most arguments of a run in a headline.
_ARGUMENTS = 3
#: The arguments of a run that has none of its own.
_NONE = "none"
#: The end of a sentence that lists some of the settings.
_AND_MORE = re.compile(r" and [\d,]+ more\.$")
_NOTES, _MODELS = Limit(8, 50), Limit(4, 50, "more models that differ less (JSON)")


def document(report: DiffReport, *, everything: bool = False) -> Document:
    """Return the report as a document whose title is the verdict; ``everything`` shows every tensor."""
    return Document(
        verdict(report),
        tuple(_blocks(report, everything)),
        verdict=(*_advice(report), _sides(report)),
        front=_front(report) if report.models else None,
    )


def _blocks(report: DiffReport, everything: bool) -> Iterator[Block]:
    if len(report.models) == 1:
        yield from blocks(report.models[0].ranges, everything=everything)
    else:
        yield _models(report, everything)
    yield from section("Models of one run alone", Items(tuple(_alone(report))))
    if report.shapes:
        yield from _shapes(report.shapes, everything)
    if report.kernels:
        yield from _kernels(report.kernels, everything)
    yield from section("Notes", bullets(_notes(report), _NOTES))


def _advice(report: DiffReport) -> Iterator[Block]:
    for model in sorted(report.models, key=_urgency)[:1]:
        yield from advice(model.ranges, verdict(report))


def _sides(report: DiffReport) -> Items:
    return Items((_side(report.first, "A"), _side(report.second, "B")))


def _listed(finding: Finding, of: ModelDiff | None, several: bool) -> Listed:
    place = of and of.ranges.second.session.with_classes(filled("'{}'", finding.layer))
    return Listed(finding, f"{of.name}: B" if of and several else "", place=place or "")


def _front(report: DiffReport) -> Front:
    """Return the first screen of the page: what changed first, and the maps of both runs of each model with their difference."""
    models = sorted(report.models, key=_urgency)
    several = len(models) > 1
    state, tone = _state(models[0].ranges)
    names = [
        filled("A {}", _own_name(report.first, report.second)),
        filled("B {}", _own_name(report.second, report.first)),
    ]
    changes = dict.fromkeys(change for model in models for change in model.ranges.settings)
    first, *others = _verdict_parts(report)
    settings = (Item(change.words) for change in changes if change.words not in " ".join(others))
    places = began_apart(models[0].ranges)
    causes = ". ".join(f"{name}: {place.headline}" for name, place in places.items())
    broken = "".join(places) if len(places) == 1 else ""
    alarm = places[broken].alarm if broken else ""
    state = f"Only {broken} is broken" if broken else state
    if alarm:
        # The front shows the broken run's event beside the headline, and below it all settings.
        others = [_AND_MORE.sub(".", each) for each in others if not each.startswith(f"{broken}: ")]
    # A finding's whole message is too long for a headline.
    lead = f"{models[0].name}: " * several + causes if causes else first * (len(first) <= _LONGEST)
    are_healthy = all(run.verdict.healthy for model in models for run in (model.ranges.first, model.ranges.second))
    said = (
        *lines("Both runs are healthy." * are_healthy),
        *lines(*([] if broken or lead == first else [first]), *others, tone="lead"),
        *(Line(f"{model.name}: {headline(model.ranges)}") for model in models[1 : _MODELS.terminal]),
    )
    change, is_change_first = tuple(_advice(report)), broken and not undoes(models[0].ranges)
    beside: tuple[Block, ...] = (
        *((*change, *said) if is_change_first else (*said, *change)),
        *section("More settings that differ", Items(tuple(settings), BESIDE)),
        _sides(report),
    )
    # Findings have evidence, which no set can hold.
    owners = {id(finding): model for model in models for finding in model.ranges.findings}
    named = [(model.name if several else "", model.ranges) for model in models]
    return Front(
        " -> ".join(filter(None, names)) or models[0].ranges.second.session.info.model,
        state,
        tone,
        (),
        beside,
        # The verdict, the settings and the picture have the content of infos.
        tuple(_listed(each, owners.get(id(each)), several) for each in report.findings if each.is_alarm),
        picture=next((replace(found, title="", of="Runs") for found in maps(named)), None),
        without=NO_MAP,
        headline=lead,
        alarm=alarm,
    )


def _state(diff: RangeDiff) -> tuple[str, Tone]:
    """Return the headline in a few words, and its tone."""
    broken = trouble(diff)
    if broken:
        # "B alone is not healthy", or "Neither is healthy".
        return re.split("[:,.]", broken, maxsplit=1)[0], "error"
    to_fix = [name for name, run in (("A", diff.first), ("B", diff.second)) if run.verdict.healthy is False]
    if len(to_fix) == 1:
        return f"{to_fix[0]} alone is not healthy", "warning"
    if diff.moved is not None:
        return f"They part at step {diff.moved.first_step:,}", "warning"
    if diff.differs is None:
        return "No difference", "good"
    return "No meaningful change", "good"


def verdict(report: DiffReport) -> str:
    """Return a few sentences: which run is not healthy, whether anything relevant differs, and the first difference."""
    return " ".join(_verdict_parts(report))


def _verdict_parts(report: DiffReport) -> list[str]:
    first, parts = min(report.models, key=_urgency, default=None), ["Nothing was compared."]
    if first:
        parts = list(headline_parts(first.ranges))
    if first and len(report.models) > 1:
        parts[0] = f"{first.name}: {parts[0]}"
    one, other = report.first.arguments, report.second.arguments
    if one is not None and other is not None and one != other:
        parts.insert(1, f"Arguments that differ: A {_without(one, other) or _NONE}; B {_without(other, one) or _NONE}.")
    return [*parts, *_changes_of_a_step(report)]


def _changes_of_a_step(report: DiffReport) -> Iterator[str]:
    """Return a sentence on the products of the recorded step that differ, and one on its kernels."""
    if report.shapes is not None and report.shapes.changes:
        count = len(report.shapes.changes)
        products = f"{number_of(count, 'matrix product')} {by_number(count, 'differs', 'differ')}"
        yield f"{products} in {report.shapes.aspects}."
    if report.kernels is not None and report.kernels.changes:
        yield f"Kernels differ in {number_of(len(report.kernels.changes), 'module')}."


def _own_name(side: Side, other: Side) -> str:
    """Return the arguments that only this run has, or else its directory's name."""
    own = ""
    if side.arguments is not None and other.arguments is not None:
        own = _without(side.arguments, other.arguments)
    return own or PurePath(side.path).name


def _without(arguments: Sequence[str], others: Sequence[str]) -> str:
    """Return in words the arguments that are not among the others."""
    own = [each for each in arguments if each not in others]
    return f"{' '.join(own[:_ARGUMENTS])}{and_more(len(own) - _ARGUMENTS)}"


def _urgency(model: ModelDiff) -> tuple[bool, bool, bool, int]:
    """Return a sort key: models that are not healthy first, then relevant differences, by the step of the parting."""
    diff = model.ranges
    parting = diff.moved or diff.differs
    return not trouble(diff), not matters(diff), parting is None, parting.first_step if parting else 0


def _side(side: Side, name: str) -> Item:
    return Item(": ".join(filter(None, (side.path, side.words))), name)


def _models(report: DiffReport, everything: bool) -> Parts:
    order = sorted(range(len(report.models)), key=lambda place: _urgency(report.models[place]))
    parts = [
        Part(f"{model.name}: {headline(model.ranges)}", Document("", blocks(model.ranges, everything=everything)))
        for model in report.models
    ]
    return Parts(tuple(parts), _MODELS.unless(everything), tuple(map(order.index, range(len(parts)))))


def _alone(report: DiffReport) -> Iterator[Item]:
    for name, models in (("A", report.only_first), ("B", report.only_second)):
        if models:
            yield Item(", ".join(models), name)


def _notes(report: DiffReport) -> Iterator[str]:
    for name, side, other in (("A", report.first, report.second), ("B", report.second, report.first)):
        # Notes of both runs that differ only in the directory's name are omitted.
        known = {note.replace(f"{other.path}/", f"{side.path}/") for note in other.notes}
        yield from (f"{name}: {note}" for note in side.notes if note not in known)


# -- shapes and kernels -------------------------------------------------------------------------------------------------


def _shapes(diff: ShapesDiff, everything: bool) -> Iterator[Block]:
    columns = (
        Column("module", is_name=True),
        Column("role", is_left=True),
        Column("A", is_left=True),
        Column("B", is_left=True),
    )
    rows = ((each.module, each.role, _products(each.first), _products(each.second)) for each in diff.changes)
    yield from section(
        f"Products of one step that differ in {diff.aspects}", table(columns, rows, limit=ROWS.unless(everything))
    )


def _products(products: tuple[Product, ...]) -> str:
    return "; ".join(dict.fromkeys(product.words for product in products)) or NOT_APPLICABLE


def _kernels(diff: KernelsDiff, everything: bool) -> Iterator[Block]:
    columns = (
        Column("module", is_name=True),
        Column("time in A"),
        Column("in B"),
        Column("on Tensor Cores in A"),
        Column("in B"),
    )
    rows = (
        (each.module, *map(duration, each.time_us), *map(percent, each.tensor_core_fraction)) for each in diff.changes
    )
    yield from section(
        "Kernels of one profiled step that differ",
        table(columns, rows, limit=ROWS.unless(everything)),
        Findings(diff.new),
    )


# -- JSON ---------------------------------------------------------------------------------------------------------------

#: Each layer and each finding has its own line.
LAYOUT = Layout(5)


def to_plain(report: DiffReport) -> dict[str, Any]:
    """Return the report as plain dicts, lists, strings, numbers, booleans and None."""
    body = {"verdict": verdict(report), "matters": any(each.is_alarm for each in report.findings)}
    return headed("mpinspect.diff", 1, plain(body | fields(report, also=("findings",)), _SPECIAL))


def _range_report(report: RangeReport) -> dict[str, Any]:
    """Return the fields that identify a run's report; ``mpinspect report`` prints all."""
    names = ("steps", "sampled_steps", "skipped_steps", "ended")
    progress = {name: getattr(report.session.progress, name) for name in names}
    return {"model": report.session.info.model, "format": report.format, **progress, "verdict": report.verdict}


_SPECIAL: Special = {
    RangeReport: _range_report,
    # The counts are in the session files.
    LayerReport: lambda layer: fields(layer, but=("name", "kind", "histogram")),
    LostUpdates: lambda updates: fields(updates, also=("fraction",)),
}
