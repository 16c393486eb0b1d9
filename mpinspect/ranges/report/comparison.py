"""Lays out the differences of two runs of a model, A and B: headline, layers, settings, findings, events, scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpinspect.ranges.analysis.comparison import LayerChange, Parting, RangeDiff, Steps
from mpinspect.ranges.analysis.first_line import first_line, gravest
from mpinspect.ranges.analysis.layer_report import LayerReport
from mpinspect.ranges.analysis.parting import LEAST_BEYOND
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.faults.registry import depends_on_scale, what_broke
from mpinspect.ranges.kinds import kind_named, phrase
from mpinspect.ranges.report.explorer import Mapped, has_map, widget
from mpinspect.ranges.report.front import change_blocks
from mpinspect.ranges.report.place import Began, began
from mpinspect.ranges.report.scale_line import scale_in_brief
from mpinspect.reporting.document import (
    Block,
    Column,
    Findings,
    Item,
    Items,
    Limit,
    Line,
    Tables,
    Widget,
    bullets,
    section,
    table,
)
from mpinspect.reporting.finding import SEVERITIES
from mpinspect.reporting.words import (
    NOT_APPLICABLE,
    UNKNOWN,
    and_more,
    as_power,
    by_number,
    filled,
    indefinite,
    number_of,
    optional,
    percent,
    share,
    steps_named,
    upper_first,
)

#: Rows of tables of what changed.
ROWS = Limit(8, 100, "more that moved less (--all, JSON)", "more that moved less; JSON has all")
#: Settings on the front of a page.
BESIDE = Limit(8, 12)
#: Settings with their values in a headline.
_IN_HEADLINE = 3
SETTINGS, _NAMES, _GONE = Limit(20, 100), Limit(12, 50), Limit(5, 20)

_LAYERS = (
    Column("layer", is_name=True),
    Column("tensor", is_left=True, priority=1),
    Column("from step", is_left=True, meaning="the first step in which it moved beyond its normal variation"),
    Column("elsewhere", meaning="share of its elements in other powers of two in B, a mean over the steps"),
    Column("beyond", meaning="the part of that beyond its normal variation", priority=3),
    Column("zero", meaning="share that is zero", is_optional=True),
    Column("largest", priority=2),
    Column("flushed", meaning="share of the non-zero ones that the format flushes at scale 1", priority=1),
    Column("scales", meaning="log2 of those that suit it", priority=4),
    Column("updates lost", meaning="share that rounding loses", priority=3, is_optional=True),
)
_LEGEND = "A -> B; ~ estimate, <= at most, 0%..88% bounds, ? not known"
#: If the bounds of a share are further apart than this, they are shown in place of the estimate between them.
_FAR = 0.1


# -- the headline -------------------------------------------------------------------------------------------------------


def headline(diff: RangeDiff) -> str:
    """Return in a few sentences which run is not healthy, its settings that differ, and whether and where the runs part."""
    return " ".join(headline_parts(diff))


def headline_parts(diff: RangeDiff) -> tuple[str, ...]:
    """Return the parts of the headline, none of them empty."""
    said = _trouble(diff)
    events = [event for event in map(what_broke, (diff.first, diff.second)) if said and event is not None]
    if (
        said
        and not is_alike(diff)
        and (diff.moved is None or any(event.step <= diff.moved.last_step for event in events))
    ):
        # A run that broke moves all its ranges.
        return said
    if not said and (settings := _settings_of_broken(diff)):
        said = (f"{_broken_alone(diff)} alone is not healthy.", settings)
    return (*said, _parting(diff))


def is_alike(diff: RangeDiff) -> bool:
    """Return whether both runs have the same grave finding, or none."""
    return _grave(diff.first)[0] == _grave(diff.second)[0]


def trouble(diff: RangeDiff) -> str:
    """Return a sentence on the grave findings; "" without any."""
    return " ".join(_trouble(diff))


def _trouble(diff: RangeDiff) -> tuple[str, ...]:
    one, other = _grave(diff.first)[1], _grave(diff.second)[1]
    if not one and not other:
        return ()
    if is_alike(diff):
        return (f"Neither is healthy, in the same way: {other}.",)
    if one and other:
        return (f"Neither is healthy. A: {one}; B: {other}.",)
    name, settings = _broken_alone(diff), _settings_of_broken(diff)
    if settings:
        return (f"{name} alone is not healthy.", settings, f"{name}: {one or other}.")
    return (f"{name} alone is not healthy: {one or other}.",)


def began_apart(diff: RangeDiff) -> dict[str, Began]:
    """Return where each broken run began to break, by its name; nothing if both are broken in the same way."""
    broken = _broken(diff)
    found = {name: began(_run(diff, name)) for name in broken}
    is_apart = len(broken) == 1 or not is_alike(diff)
    return found if is_apart and all(each.headline for each in found.values()) else {}


def _broken(diff: RangeDiff) -> list[str]:
    """Return which runs are not healthy, of "A" and "B". Beside an error a warning is none."""
    runs = {"A": diff.first, "B": diff.second}
    grave = [name for name, run in runs.items() if _grave(run)[0]]
    return grave or [name for name, run in runs.items() if run.verdict.healthy is False]


def _broken_alone(diff: RangeDiff) -> str:
    """Return which run alone is not healthy, "A" or "B"; "" if neither is or both are."""
    broken = _broken(diff)
    return broken[0] if len(broken) == 1 else ""


def _settings_of_broken(diff: RangeDiff) -> str:
    """Return the settings that differ with their values and the advice to go back; "" unless one run alone is broken."""
    name, may_break = _broken_alone(diff), [change for change in diff.settings if change.may_break]
    if not name or not may_break:
        return ""
    may_break = [change for change in may_break if not change.follows] or may_break
    shown = ", ".join(change.words for change in may_break[:_IN_HEADLINE])
    what = "Settings that differ"
    if undoes(diff):
        those = by_number(len(may_break), "setting", "settings")
        what = {"A": f"First take B's {those}", "B": f"First undo the {those}"}[name]
    return f"{what}: {shown}{and_more(len(may_break) - _IN_HEADLINE)}."


def undoes(diff: RangeDiff) -> bool:
    """Return whether the broken run needs the other's settings, not the change of its finding.

    A run that differs in its dtypes is usually meant to have them, so its finding's change makes it work with them. That of a
    loss scale is undone as the finding says.
    """
    may_break = [change for change in diff.settings if change.may_break]
    name = _broken_alone(diff)
    if not name or not may_break or any(change.is_of_precision for change in may_break):
        return False
    gravest = next((finding for finding in _run(diff, name).findings if finding.is_alarm), None)
    return gravest is None or not depends_on_scale(gravest, None)


def _run(diff: RangeDiff, name: str) -> RangeReport:
    return {"A": diff.first, "B": diff.second}[name]


def _grave(report: RangeReport) -> tuple[tuple[object, ...], str]:
    """Return the identity and the words of the event that broke a run, or else of its first error; empty for neither."""
    event = what_broke(report)
    if event is not None:
        return (event.step, event.phase, event.module), first_line(event)
    errors = (finding for finding in report.findings if finding.severity == SEVERITIES[-1])
    return next((((error.id, error.layer), error.message.rstrip(".")) for error in errors), ((), ""))


def advice(diff: RangeDiff, above: str) -> Iterator[Block]:
    """Yield the fault of the broken run (B if both are broken), and its change, unless the settings that differ are the change.

    A warning of both runs is not a difference, so it has no change here.

    Args:
        above: the headline, whose sentences are not repeated.
    """
    if _broken_alone(diff) == "A":
        if not _settings_of_broken(diff):
            yield Line("B has no such finding. Settings that differ: none that was recorded.")
        yield from _change(diff, "A", above)
    elif diff.second.verdict.healthy is False and (trouble(diff) or any(finding.is_alarm for finding in diff.new)):
        yield from _change(diff, "B", above)


def _change(diff: RangeDiff, name: str, above: str) -> Iterator[Block]:
    run = _run(diff, name)
    if not undoes(diff):
        yield from change_blocks(run.verdict, f" in {name}")
    for sentence in run.verdict.sentences:
        if sentence.partition(": ")[2].rstrip(".") not in above:
            yield Line(f"{name}: {sentence}", "lead")


def _parting(diff: RangeDiff) -> str:
    """Return where the runs part."""
    moved = diff.moved
    if moved is not None:
        where = f"{by_number(1 + moved.last_step - moved.first_step, 'at', 'in')} {_named(moved)}"
        return f"They part {where}: {_how_far(diff, moved)}."
    if not diff.compared.stretches:
        return "Whether they part is not known: no step was counted in both."
    grave = next((finding for finding in diff.new if finding.is_alarm), None)
    if grave is not None:
        return f"B alone has {indefinite(grave.severity)}: {grave.message}"
    return f"{_nothing_moved(diff)}{_besides(diff)}."


def _nothing_moved(diff: RangeDiff) -> str:
    if diff.differs is not None:
        return (
            f"No meaningful change: the counts differ from {_named(diff.differs)} on, but no tensor moved beyond its normal "
            "variation"
        )
    if not diff.compared.same_steps:
        return "No meaningful change, though the runs counted other steps: whether they are equal is not known"
    return f"The ranges do not differ: {_equal(diff)}"


def _besides(diff: RangeDiff) -> str:
    """Return words on differences that no count shows: tensors of only one run, and settings; "" if there are none."""
    words = ""
    if alone := len(diff.only_first) + len(diff.only_second):
        words += f"; {number_of(alone, 'tensor')} in one run alone"
    # How far the runs went is not a setting.
    names = [change.name for change in diff.settings if change.name != "steps"]
    if diff.differs is None and names:
        words += f"; other settings: {', '.join(names[:3])}{and_more(len(names) - 3)}"
    return words


def matters(diff: RangeDiff) -> bool:
    """Return whether anything differs that a finding warns of."""
    return any(finding.is_alarm for finding in diff.findings)


def _named(parting: Parting) -> str:
    return steps_named(parting.first_step, parting.last_step)


def _how_far(diff: RangeDiff, parting: Parting) -> str:
    """Return words on a tensor's share that moved, as the tables show it, and on its zeros if they are half of that."""
    named = phrase(parting.name, parting.kind)
    change = next((each for each in diff.layers if (each.name, each.kind) == (parting.name, parting.kind)), None)
    if change is None:
        return named
    share, (one, other) = change.elsewhere_fraction, change.zeros_fraction
    zeros = f" ({percent(one)} of them zero in A, {percent(other)} in B)" * (abs(one - other) >= share / 2)
    return f"{percent(share)} of {named} lie in other powers of two, a mean over the steps{zeros}"


def _equal(diff: RangeDiff) -> str:
    compared = diff.compared
    assert compared.steps is not None
    where = steps_named(*compared.steps)
    if compared.sampled_steps > 1:
        where = f"all {compared.sampled_steps:,} steps counted of {where}"
    alike = f"the counts of {number_of(compared.tensors, 'tensor')} are equal in {where}"
    if compared.same_steps == compared.stretches:
        return alike
    return f"{alike}, as far as both runs counted the same steps, and none moved where they did not"


# -- the blocks ---------------------------------------------------------------------------------------------------------


def blocks(diff: RangeDiff, *, everything: bool) -> tuple[Block, ...]:
    """Return the blocks below the headline; ``everything`` shows every tensor."""
    moved = [change for change in diff.layers if change.moved_from is not None]
    return (
        *_tensors(f"Moved, worst first: {len(moved):,} of {len(diff.layers):,} tensors", moved, everything),
        *section("Settings that differ", _settings(diff), is_on_front=len(diff.settings) <= BESIDE.page),
        *section("Findings in B alone", Findings(diff.new), is_on_front=True),
        *section("Findings in A alone", bullets([finding.message for finding in diff.gone], _GONE)),
        *section("Infinite or NaN in one run alone", Items(tuple(_events(diff)))),
        *section("Loss scale", *_scales(diff)),
        *section("Counted in one run alone", Items(tuple(_alone(diff)))),
        *_unmoved(diff, moved, everything),
        *section("What was compared", *map(Line, _compared(diff))),
    )


def maps(diffs: Sequence[tuple[str, RangeDiff]]) -> Iterator[Widget]:
    """Yield one element with the maps of both runs of each model and their difference; nothing if no tensor was counted.

    Args:
        diffs: the models' names and differences, in the order of the switch. A model whose name is "" is the only one.
    """
    shown: list[Mapped] = []
    for name, diff in diffs:
        lead = filled("{}: ", name)
        first = diff.moved and (diff.moved.name, diff.moved.kind)
        # The headline's tensor is first.
        changes = tuple(
            (each.kind, each.name, each.elsewhere_fraction, each.moved_from and each.moved_from[0])
            for each in sorted(diff.layers, key=lambda each: (each.name, each.kind) != first)
        )
        # The page takes the maps in pairs.
        if len(diffs) == 1 or (has_map(diff.first) and has_map(diff.second)):
            shown += [Mapped(f"{lead}A", diff.first), Mapped(f"{lead}B", diff.second, changes=changes)]
    yield from widget(*shown, together=True)


def _tensors(title: str, shown: Sequence[LayerChange], everything: bool) -> Iterator[Block]:
    """Yield the table of these tensors; no block without tensors."""
    yield from section(title, table(_LAYERS, map(_row, shown), limit=ROWS.unless(everything), legend=_LEGEND))


def _unmoved(diff: RangeDiff, moved: Sequence[LayerChange], everything: bool) -> Iterator[Block]:
    """Yield the number of tensors that differ without having moved, and the table of them where ``everything`` is shown."""
    rest = [change for change in diff.layers if change.moved_from is None]
    # In stretches of different steps equality is unknown, so the distance decides.
    differ = [change for change in rest if change.elsewhere_fraction > 0 or change.differs_from is not None]
    if everything:
        yield from _tensors(f"Not moved: {len(rest):,} of {len(diff.layers):,} tensors", rest, everything)
    elif differ:
        yield Line(
            f"The counts of {number_of(len(differ), 'tensor')} differ within their normal variation (--all lists them)."
        )


def _row(change: LayerChange) -> tuple[str, ...]:
    first, second = change.first, change.second
    return (
        change.name or "(the model)",
        kind_named(change.kind).title.lower(),
        optional(change.moved_from, _span),
        percent(change.elsewhere_fraction),
        f"~{percent(change.beyond_fraction)}",
        _both(*map(percent, change.zeros_fraction)),
        _both(_largest(first), _largest(second)),
        _both(_flushed(first), _flushed(second)),
        _both(_window(first), _window(second)),
        _both(_updates(first), _updates(second)),
    )


def _both(first: str, second: str) -> str:
    return " -> ".join(dict.fromkeys((first, second)))


def _span(steps: Steps) -> str:
    return "-".join(dict.fromkeys(map(str, steps)))


def _largest(layer: LayerReport) -> str:
    return optional(layer.max_exponent, "2^{}".format)


def _window(layer: LayerReport) -> str:
    if layer.log2_scale_needed is None or layer.max_log2_scale is None:
        return NOT_APPLICABLE
    # Values flushed before they were counted may need a larger scale.
    hidden = layer.already_flushed_fraction is not None and layer.already_flushed_fraction.high > 0
    return f"{UNKNOWN if hidden else layer.log2_scale_needed}..{layer.max_log2_scale}"


def _flushed(layer: LayerReport) -> str:
    """Return the share flushed in words; only its bounds if these are far apart, as after a run in the format itself."""
    found = layer.flushed_fraction
    if found is None or found.high - found.low <= _FAR:
        return share(found)
    return f"{percent(found.low)}..{percent(found.high)}"


def _updates(layer: LayerReport) -> str:
    """Return the share of updates lost in the storage format that loses most."""
    fractions = (lost.fraction for lost in (layer.lost_updates or {}).values())
    return optional(max(fractions, default=None), percent, "")


def _settings(diff: RangeDiff) -> Tables:
    columns = (Column("setting", is_name=True), Column("A", is_left=True), Column("B", is_left=True))
    rows = ((change.name, change.first, change.second) for change in diff.settings)
    return table(columns, rows, limit=SETTINGS)


def _events(diff: RangeDiff) -> Iterator[Item]:
    for name, events in (("A", diff.events_only_first), ("B", diff.events_only_second)):
        if events:
            yield Item(first_line(gravest(events) or events[0]) + and_more(len(events) - 1, "; {:,} more"), name)


def _scales(diff: RangeDiff) -> Iterator[Block]:
    if diff.scales_part is not None:
        step, one, other = diff.scales_part
        yield Line(f"The scales differ from step {step} on: {as_power(one)} in A, {as_power(other)} in B.")
    skipped = [report.session.progress.skipped_steps for report in (diff.first, diff.second)]
    if skipped[0] != skipped[1]:
        yield Line(f"Skipped steps: {skipped[0]:,} in A, {skipped[1]:,} in B.")
    suggested = [scale_in_brief(report) for report in (diff.first, diff.second)]
    if suggested[0] != suggested[1]:
        yield Items((Item(suggested[0], "A"), Item(suggested[1], "B")))


def _alone(diff: RangeDiff) -> Iterator[Item]:
    for name, keys in (("A", diff.only_first), ("B", diff.only_second)):
        for kind in dict.fromkeys(key.kind for key in keys):
            names = tuple(key.name or "(the model)" for key in keys if key.kind == kind)
            yield Item(kind_named(kind).title.lower(), name, names=names, limit=_NAMES)


def _compared(diff: RangeDiff) -> Iterator[str]:
    """Yield the scope of the comparison: measured parts, estimated parts."""
    compared = diff.compared
    if compared.steps is None:
        yield f"The runs counted no steps in common: {_counted(diff.first)} in A, {_counted(diff.second)} in B."
        return
    stretches = number_of(compared.stretches, "stretch")
    if compared.same_steps != compared.stretches:
        stretches += f", {compared.same_steps:,} of them"
    yield (
        f"{upper_first(steps_named(*compared.steps))}, {compared.sampled_steps:,} of them counted, in {stretches} of "
        f"the same steps in both runs; {compared.tensors:,} tensors; judged against {diff.first.format}."
    )
    if diff.differs is not None:
        yield f"Measured: counts differ from {_named(diff.differs)} on, most in {_most(diff.differs)}."
    if compared.stretches == 1:
        yield "Estimated: one stretch does not show a tensor's own variation; only chance was allowed for."
    elif diff.differs is not None or not compared.same_steps:
        yield (
            f"Estimated: a tensor moved where more than {percent(LEAST_BEYOND)} of its elements change by more than between "
            "neighbouring stretches of the steadier run, and than by chance."
        )


def _most(parting: Parting) -> str:
    others = and_more(parting.tensors - 1, ", and in {:,} more")
    return f"{phrase(parting.name, parting.kind)}{others}"


def _counted(report: RangeReport) -> str:
    windows = report.session.windows
    if not windows:
        return "nothing"
    return steps_named(min(window.first_step for window in windows), max(window.last_step for window in windows))
