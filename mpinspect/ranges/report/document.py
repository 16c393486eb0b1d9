"""Builds a range report's document: verdict, findings, non-finite values, loss scale, layers, formats, coverage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

from mpinspect.numeric.exponents import Interval
from mpinspect.numeric.formats import BFLOAT16, FLOAT16, FLOAT32, FORMATS
from mpinspect.ranges.analysis.formats_fit import CANDIDATES
from mpinspect.ranges.analysis.layer_report import LayerReport
from mpinspect.ranges.analysis.overhead import overhead_line
from mpinspect.ranges.analysis.precision import is_hidden, run_format
from mpinspect.ranges.analysis.ranges import NO_GRADIENT_SEEN
from mpinspect.ranges.analysis.recipe_comparison import recipe_report
from mpinspect.ranges.analysis.report import FormatVerdict, RangeReport, TimeBlock, Verdict
from mpinspect.ranges.analysis.serving import LOST_L1_TOLERANCE
from mpinspect.ranges.kinds import GRADIENT_KINDS, KINDS, UPDATE, kind_named
from mpinspect.ranges.report.explorer import NO_NOTES, ModuleNotes
from mpinspect.ranges.report.front import change_blocks, front
from mpinspect.ranges.report.layers import (
    Repeated,
    badness,
    flushed_words,
    has_no_values,
    log2_recommended,
    lost_l1_at_recommended,
    names_in,
    range_strip,
    repeated,
    seen_layers,
)
from mpinspect.ranges.report.opening import never_zeroed
from mpinspect.ranges.report.rank_words import rank_sentences
from mpinspect.ranges.report.recipes import in_run
from mpinspect.ranges.report.scale_line import (
    event_facts,
    event_line,
    event_maxima,
    events_line,
    in_same_places,
    reserve_line,
    scale_in_brief,
    scale_line,
    steps_and_samples,
)
from mpinspect.ranges.session import CALLS_LEFT_OUT, CLOSURES_LEFT_OUT, Event, Progress, Session, module_named
from mpinspect.ranges.windows.window import Window
from mpinspect.reporting.document import (
    Block,
    Cell,
    Column,
    Document,
    Findings,
    Item,
    Items,
    Limit,
    Line,
    Table,
    Tables,
    Term,
    Tone,
    bullets,
    cells,
    lines,
    most,
    nonempty,
    section,
)
from mpinspect.reporting.finding import SEVERITIES_EXPLAINED
from mpinspect.reporting.words import (
    NOT_APPLICABLE,
    UNKNOWN,
    class_beside,
    filled,
    number_of,
    optional,
    percent,
    share,
    some,
    steps_named,
    upper_first,
)

#: About as many rows as one reads; GitHub cuts a comment at 65,536 characters.
LAYERS = Limit(8, 100, "more (--all, JSON)", "more; to_dataframe() and JSON have all")
EVENTS = Limit(5, 10)
#: Reasons why layers never fired, and the names of layers for each reason.
REASONS, NAMES = Limit(20, 20), Limit(12, 50)
NOTES = Limit(20, 100)

#: The colour of a verdict, by its first word.
_TONES: dict[str, Tone] = {"Healthy": "good", "Error": "error", "Warning": "warning"}

#: The terms that a page explains where they first occur.
TERMS = (
    Term("severity", r"\b([Ee]rror|[Ww]arning|info|[Hh]ealthy)\b", SEVERITIES_EXPLAINED),
    Term(
        "loss scale",
        r"\b[Ll]oss scale",
        "the factor by which the loss is multiplied before the backward, so that small gradients survive in 16 bits",
    ),
    Term(
        "flushed",
        r"\bflush",
        "not zero, but rounds to zero in the format; shares flushed are shares of the non-zero elements",
    ),
    Term(
        "L1 lost",
        r"\bL1 lost|\bsum of magnitudes|\bserve|\bwindow",
        "the share of the sum of magnitudes that is flushed, which decides whether a layer is served, since small elements are "
        "many and weigh little",
    ),
    Term("subnormal", r"\bsubnormal", "survives, with fewer bits"),
    Term("served", r"\bserve", "L1 lost is at most 1%"),
    Term(
        "window",
        r"\bwindow",
        "the loss scales at which no gradient seen overflows, the powers of two in reserve included, and L1 lost is at most 1% "
        "in every layer",
    ),
    Term(
        "signs of the map",
        "interactive map",
        "hatched on the left: flushed; grey, up to the dotted line: subnormal; hatched on the right: overflow; ✕: infinities; "
        "○: NaNs, with a bar for their share; ■, ▲: the culprit of an error, of a warning; ▷: next to it; "
        "-: unknown, and in the column overflow: infinities, counted in the next column",
    ),
    Term("headroom", r"\bheadroom", "powers of two from the suggested scale up to the largest of the window"),
)
_LEGEND = (
    "~ estimate, <= at most, 0%: none was seen, zeros may have been values, [bounds] or a..b where far apart; ? not known; "
    "{0..11}: the worst of them"
)


def title(report: RangeReport, name: str = "") -> str:
    """Return the report's title: the model's class, after the name that it has in a run, and the format it is judged against."""
    model = report.session.info.model or "A model"
    if name not in ("", model):
        model = f"{name} ({model})"
    return f"{model} against {report.format}"


def document(
    report: RangeReport, *, everything: bool = False, verdict: bool = True, notes: ModuleNotes = NO_NOTES
) -> Document:
    """Return the report as a document.

    Args:
        everything: whether every layer has its own row; if not, repeated blocks share one and the worst rows are shown.
        verdict: whether the document begins with its title and the verdict; if not, it has no front.
        notes: what else is known about the modules, shown in the interactive map.
    """
    session = report.session
    # For a healthy run, the verdict is all that most readers want to know.
    is_healthy = bool(report.verdict.healthy) and not everything
    found = Document(
        "",
        (
            *section("Findings", Findings(report.findings), is_on_front=True),
            *section("Infinite or NaN", *_events(report.events)),
            *section(_scale_title(report), *_loss_scale(report), is_detail=is_healthy),
            *_layers(report, everything),
            *section("Other formats", *lines(*_formats(report)), is_detail=is_healthy),
            *section("Recipes of FP8 and FP4", *in_run(recipe_report(session), session)),
            *section(
                "Coverage",
                Line(_totals(report)),
                Line(overhead_line(session)),
                *lines(*_left_out(session)),
                _never_fired(report),
                # A run's own report gives the steps in its summary.
                is_detail=is_healthy and not verdict and not report.coverage.never_fired and not overhead_line(session),
            ),
            *section("Ranks", bullets(tuple(rank_sentences(session)))),
            *section("Notes", bullets(session.notes, NOTES)),
        ),
        terms=TERMS,
    )
    if not verdict:
        return found
    named = title(report)
    return replace(found, title=named, verdict=verdict_blocks(report.verdict), front=front(report, named, notes))


def verdict_blocks(verdict: Verdict) -> tuple[Block, ...]:
    """Return the verdict's blocks: what ended the run, the precision, the verdict itself in colour, and the change to make."""
    first, *more = verdict.sentences or ("",)
    blocks: tuple[Block, ...] = (
        Line(verdict.ended, "error"),
        Line(verdict.precision),
        Line(first, _TONES.get(verdict.opening.partition(" ")[0], "strong")),
        *map(Line, more),
        *change_blocks(verdict),
        Line(verdict.more, "dim"),
    )
    return nonempty(*blocks)


def _totals(report: RangeReport) -> str:
    session = report.session
    seen = session.passed_through() - {FLOAT32.name}
    # Under autocast the values of one layer may have gone through the narrow format of another.
    rounded = filled("; values may have been rounded to {} before they were counted", " and ".join(sorted(seen)))
    counted = steps_and_samples(session.progress, session.progress.so_far)
    return f"{counted}{rounded}; {report.coverage}"


# -- what broke -----------------------------------------------------------------------------------------------------


def _events(events: Sequence[Event]) -> Iterator[Block]:
    """Yield the first event in full and some of the others in one line each."""
    if not events:
        return
    same, *others = in_same_places(events)
    first = same[0]
    yield Line(f"first: {event_line(first)}", "error")
    yield Line("; ".join(event_facts(first)))
    if first.last_maxima:
        yield Line(event_maxima(first))
    if first.explanation:
        yield Line(first.explanation)
    if len(same) > 1:
        yield Line(f"in the same place: {number_of(len(same) - 1, 'time')} more, up to step {same[-1].step}")
    yield Items(tuple(Item(events_line(group)) for group in others), EVENTS)


# -- the loss scale -------------------------------------------------------------------------------------------------


def _scale_title(report: RangeReport) -> str:
    if run_format(report.session) is None and is_hidden(report.session):
        return "Loss scale, if the run computes in FP16"
    if _would_change(report):
        return "Loss scale, for a change to FP16"
    return "Loss scale"


def _would_change(report: RangeReport) -> bool:
    """Return whether the run computes in FP32, so that it would need a loss scale for a change to FP16 only."""
    return report.format == FLOAT16.name and run_format(report.session) == FLOAT32


def _loss_scale(report: RangeReport) -> Iterator[Line]:
    advice = report.loss_scale
    if report.session.info.inference:
        return
    if report.in_float16 is not None and advice.needed is False:
        yield Line(scale_in_brief(report), "strong")
        if report.in_float16.needed is not False:
            yield Line(f"In FP16: {report.in_float16.reason}")
        yield Line(reserve_line(report.in_float16))
        yield Line(_of_sums(report))
        return
    if not advice.available:
        yield Line("No window of loss scales can be given.", "strong")
        yield Line(advice.reason)
        return
    yield Line(scale_line(advice), "strong")
    yield Line(advice.reason)
    yield Line(reserve_line(advice, None if _would_change(report) else report.session.last_scale))
    yield Line(_of_sums(report))
    # If no scale serves all layers, none is suggested as a start.
    moves = advice.dynamic is not None and advice.dynamic.init_scale != advice.static_scale
    if advice.dynamic is not None and advice.needed is not False and (moves or not advice.serves_none):
        start, interval = advice.dynamic.init_scale, advice.dynamic.growth_interval
        which = "it" if start == advice.static_scale else "the scale of the first steps"
        scaler = f"torch.amp.GradScaler(device_type, init_scale={start:.17g}, growth_interval={interval})"
        yield Line(f"A dynamic scaler may begin with {which}: {scaler}")
    yield Line(_unseen_gradients(report))
    for pair in advice.conflicts[1:]:
        needs, limit = pair.needs_large, pair.needs_small
        yield Line(
            f"conflict: {needs!r} needs at least 2^{pair.log2_lowest}, {limit!r} overflows above 2^{pair.log2_highest}"
        )
    if _moves(advice.blocks):
        groups = [list(equal) for _, equal in groupby(advice.blocks, _window)]
        over_time = "The window over time, the narrowest within each span of sampled steps"
        if not advice.all_finite:
            over_time += " (none: not all was finite)"
        windows = (_block(group[0], group[-1], report.session.windows) for group in groups)
        yield Line(f"{over_time}: {'; '.join(windows)}")


def _of_sums(report: RangeReport) -> str:
    """Return a sentence on how much larger the sums in a 16-bit .grad may be than the single backwards; "" if it holds none."""
    progress, ledger = report.session.progress, report.session.precision
    narrow = {FLOAT16.name, BFLOAT16.name} & set(ledger.gradients or ledger.weights)
    if not narrow or not _accumulates(progress):
        return ""
    summed = -(-progress.backwards // max(progress.steps, 1))
    powers = number_of(math.ceil(math.log2(summed)), "power")
    return (
        f"The window is of single backwards: the sum of {summed:,} in an FP16 .grad may be up to {powers} of two larger, and "
        "overflow that much earlier."
    )


def _unseen_gradients(report: RangeReport) -> str:
    """Return a sentence on the gradients that no backward made although they should be trained; "" if there are none."""
    never = report.coverage.never_fired
    unseen = [name for name, kind, why in never if kind in GRADIENT_KINDS and why == NO_GRADIENT_SEEN]
    if not unseen:
        return ""
    return f"Never seen (Coverage): {number_of(len(unseen), 'gradient')}. The window does not cover them."


def _moves(blocks: tuple[TimeBlock, ...]) -> bool:
    """Return whether the window moves by more than one power of two; less is noise."""
    ends = [
        [end for block in blocks if (end := getattr(block, name)) is not None]
        for name in ("log2_lowest", "log2_highest")
    ]
    return any(max(end) - min(end) > 1 for end in ends if end)


def _window(block: TimeBlock) -> str:
    return optional(block.log2_lowest, f"2^{{}} .. 2^{block.log2_highest}".format, "none")


def _block(first: TimeBlock, last: TimeBlock, windows: Iterable[Window]) -> str:
    """Return the steps of neighbouring blocks, how many of them were sampled if not all, and the window that the blocks share."""
    start, end = first.first_step, last.last_step
    sampled = sum(each.sampled_steps for each in windows if start <= each.first_step and each.last_step <= end)
    part = f" ({sampled:,} sampled)" if 0 < sampled < end - start + 1 else ""
    return f"{steps_named(start, end)}{part}: {_window(first)}"


# -- the layers -----------------------------------------------------------------------------------------------------

#: Returns a figure of a row's layers in words, or the cell to show.
Figure = Callable[[Repeated], str | Cell]


def _layers(report: RangeReport, everything: bool) -> Iterator[Block]:
    """Yield a table for each kind of tensor counted, of updates only if any could be lost.

    With many layers, only those that findings name, the gradients nearest to overflow and with the most L1 lost, and the worst,
    and one row per repeated block.
    """
    counted = seen_layers(report)
    if not counted:
        yield from section("Layers", Line("No tensor was counted."))
        return
    limit = LAYERS.unless(everything)
    loses_updates = any(lost.nonzero for layer in counted for lost in (layer.lost_updates or {}).values())
    blocks = repeated((layer for layer in counted if layer.kind != UPDATE or loses_updates), limit.terminal)
    broken = _all_broken(blocks)
    blocks = [block for block in blocks if block.worst.kind not in broken]
    seen = [block.worst for block in blocks]
    named = names_in(report.findings)
    bounding = _bounding(blocks)

    def importance(place: int) -> tuple[float, ...]:
        # Readers search the tables for tensors that a finding names, and for the gradients that bound the loss scale.
        is_sought = place in bounding or any(layer.name in named for layer in blocks[place].members)
        return (is_sought, *badness(seen[place]))

    worst_first = sorted(range(len(seen)), key=importance, reverse=True)
    ranks = {place: rank for rank, place in enumerate(worst_first[: most(limit, len(seen))])}
    chosen = sorted(ranks, key=lambda place: (KINDS.index(seen[place].kind), place))
    is_mixed = any(layer.floor_exponent is not None for layer in counted if layer.kind in GRADIENT_KINDS)
    tables = []
    for kind, group in groupby(chosen, lambda place: seen[place].kind):
        places = list(group)
        if kind == UPDATE:
            title = f"Updates that rounding loses where weights are stored in a narrow format{_kept(report)}"
            columns = _update_columns([seen[place] for place in places])
        else:
            of = _of_each_backward(kind, report)
            title = f"{kind_named(kind).title}{of} in {report.format} {_as_counted(kind, report)}"
            columns = _range_columns(kind, report)
        rows = tuple(
            cells((_name(blocks[place], is_mixed), *(figure(blocks[place]) for _, figure in columns)))
            for place in places
        )
        headings = (Column("layer", is_name=True), *(column for column, _ in columns))
        tables.append(Table(headings, rows, title, tuple(ranks[place] for place in places)))
    yield Tables(tuple(tables), limit, len(seen), _LEGEND)
    yield from map(Line, broken.values())
    if not loses_updates and any(layer.kind == UPDATE for layer in counted):
        yield Line("Updates have no table: no finite update that could be lost was counted.")


def _all_broken(blocks: Sequence[Repeated]) -> dict[str, str]:
    """Return the kinds whose tensors all hold only infinities or NaNs, each with a sentence in place of its table."""
    found = {}
    for kind in KINDS:
        layers = [layer for block in blocks if block.worst.kind == kind for layer in block.members]
        counts = [layer.histogram for layer in layers if layer.histogram is not None]
        if len(layers) < 2 or not all(map(has_no_values, layers)) or not all(each.nonfinite for each in counts):
            continue
        infs, nans = sum(each.infs for each in counts), sum(each.nans for each in counts)
        tensors = number_of(len(layers), kind.replace("_", " "))
        found[kind] = (
            f"None of the {tensors} holds a finite non-zero value: together they hold {infs:,} inf and {nans:,} NaN."
        )
    return found


def _bounding(blocks: Sequence[Repeated]) -> set[int | None]:
    """Return the places of the gradient nearest to overflow, and of the one that loses the largest share of its L1."""
    offsets: dict[int, int] = {}
    lost: dict[int, float] = {}
    for place, block in enumerate(blocks):
        layer = block.worst
        if layer.kind in GRADIENT_KINDS and block.range_offset is not None:
            offsets[place] = block.range_offset
            if layer.lost_l1_share is not None and not layer.rounding_noise:
                lost[place] = layer.lost_l1_share.high
    return {min(offsets, key=offsets.__getitem__, default=None), max(lost, key=lost.__getitem__, default=None)}


def _kept(report: RangeReport) -> str:
    """Return in brackets the optimizer's state that holds the rounded-off parts of updates; "" without one."""
    states = [optimizer.compensation for optimizer in report.session.precision.optimizers if optimizer.compensation]
    return filled(" (for now: {} keeps them for later steps)", some(states))


def _of_each_backward(kind: str, report: RangeReport) -> str:
    """Return words for a run that adds up gradients, on purpose or not: they are counted before they are added."""
    adds_up = never_zeroed(report) is not None or _accumulates(report.session.progress)
    return " of each backward" if adds_up and kind in GRADIENT_KINDS else ""


def _accumulates(progress: Progress) -> bool:
    """Return whether there are more backwards than steps, without the backward of a step that has not ended."""
    return progress.backwards > progress.steps + 1


def _as_counted(kind: str, report: RangeReport) -> str:
    """Return at which loss scale a kind's values are given: as they arrived where it is not known."""
    is_unknown = any(change.scale is None for change in report.session.progress.scales)
    return "as they arrived, the loss scale unknown" if is_unknown and kind in GRADIENT_KINDS else "at scale 1"


def _range_columns(kind: str, report: RangeReport) -> list[tuple[Column, Figure]]:
    """Return the columns for layers of this kind, and their figures. A new column is added only here."""
    columns: list[tuple[Column, Figure]] = [
        (
            Column("offset", meaning="unused powers of two at the top"),
            lambda row: optional(row.range_offset, str, UNKNOWN),
        ),
        (
            Column("flushed", meaning="of the non-zero elements"),
            lambda row: flushed_words(row.worst, row.worst.flushed_fraction),
        ),
        (
            Column("L1 lost", meaning="of the sum of magnitudes, by flushing the tensor itself"),
            lambda row: _lost(row.worst.lost_l1_share),
        ),
    ]
    k = log2_recommended(report.loss_scale)
    # At scale 1 this column would repeat the one before, and without a scale to suggest it would be empty.
    if kind in GRADIENT_KINDS and k:
        columns.append(
            (
                Column(f"at 2^{k}", meaning="L1 lost at that scale"),
                lambda row: _lost(lost_l1_at_recommended(row.worst, report)),
            )
        )
    format = FORMATS[report.format]
    columns += [
        (
            Column("largest", meaning="finite magnitude, rounded down"),
            lambda row: optional(row.max_exponent, "2^{}".format),
        ),
        (
            Column("subnormal", priority=1, meaning="of those counted as non-zero, survive with fewer bits"),
            lambda row: optional(row.worst.subnormal_fraction, percent, UNKNOWN),
        ),
        (
            Column(
                "range",
                is_left=True,
                priority=2,
                meaning="the non-zero elements, small to large, against the format from its flush edge to its top",
            ),
            lambda row: (
                Cell()
                if row.worst.representative is None
                else Cell(strip=range_strip(row.worst.representative, format))
            ),
        ),
    ]
    return [(column, partial(_of_values, figure)) for column, figure in columns]


def _lost(lost_l1_share: Interval | None) -> str:
    return share(lost_l1_share, is_estimate=True, near=LOST_L1_TOLERANCE)


def _of_values(figure: Figure, row: Repeated) -> str | Cell:
    """Return a figure of finite non-zero values; "-" for layers that have none, not even flushed ones."""
    return NOT_APPLICABLE if has_no_values(row.worst) else figure(row)


#: The denominator of the share of lost updates, by whether the share was measured.
_LOST_UPDATES = {
    True: "measured: of the weights whose gradient is not zero, those that the step left as they were",
    False: "if stored so: of the updates that are not zero, those that rounding would undo",
}


def _update_columns(layers: list[LayerReport]) -> list[tuple[Column, Figure]]:
    """Return the columns for updates: for each storage format, the share of updates with w + dw rounded back to w."""

    def lost_in(storage: str) -> Figure:
        def words(row: Repeated) -> str:
            lost = (row.worst.lost_updates or {}).get(storage)
            if lost is None:
                return UNKNOWN
            if not lost.nonzero:
                return NOT_APPLICABLE
            # The word that the legend explains.
            return f"{percent(lost.fraction)} {_LOST_UPDATES[lost.measured].partition(':')[0]}"

        return words

    storages = sorted({storage for layer in layers for storage in layer.lost_updates or {}})
    measured = {lost.measured for layer in layers for lost in (layer.lost_updates or {}).values()}
    meaning = "; ".join(_LOST_UPDATES[how] for how in sorted(measured, reverse=True))
    return [(Column(f"lost in {storage}", meaning=meaning), lost_in(storage)) for storage in storages]


def _name(block: Repeated, is_mixed: bool) -> Cell:
    """Return the cell with a layer's name; for repeated layers, a note names the worst one, whose losses the row shows."""
    layer = block.worst
    loses = layer.lost_l1_share is not None and layer.lost_l1_share.high > LOST_L1_TOLERANCE
    notes = []
    if loses and block.name != layer.name:
        notes.append(f"the worst: {layer.name}")
    if layer.kind != UPDATE:
        notes += _remarks(block, is_mixed)
    name = block.name or "(the model)"
    return Cell(name + class_beside(layer.module, layer.module_type), notes=tuple(notes))


def _remarks(block: Repeated, is_mixed: bool) -> Iterator[str]:
    """Yield short remarks: non-finite values and overflow in all layers of the row; no non-zero values and noise in the worst.

    ``is_mixed``: whether other gradients of the run were rounded to 16 bits.
    """
    histograms = [each.histogram for each in block.members if each.histogram is not None]
    infs, nans = sum(each.infs for each in histograms), sum(each.nans for each in histograms)
    if infs or nans:
        yield f"{infs:,} inf, {nans:,} NaN"
    if overflowed := sum(each.overflowed or 0 for each in block.members):
        yield f"{overflowed:,} overflow"
    layer = block.worst
    histogram = layer.histogram
    if histogram is not None and not histogram.nonzero:
        if not histogram.zeros:
            yield "no finite value"
        else:
            yield "all finite values are zero" if histogram.nonfinite else "all zero"
    if layer.rounding_noise:
        yield "rounding noise"
    if is_mixed and layer.kind in GRADIENT_KINDS and layer.floor_exponent is None:
        yield "never rounded to 16 bits"


# -- the rest -------------------------------------------------------------------------------------------------------


def _formats(report: RangeReport) -> Iterator[str]:
    """Yield lines naming the formats whose range holds the values, and the others; kinds with equal lines share one."""
    told: dict[str, list[str]] = {}
    verdicts = report.formats
    for kind in dict.fromkeys(verdict.kind for verdict in verdicts):
        of_kind = [verdict for verdict in verdicts if verdict.kind == kind]
        yes = ", ".join(_format_name(verdict.format, verdict.scaling) for verdict in of_kind if verdict.fits)
        no = ", ".join(
            f"{_format_name(verdict.format, verdict.scaling, ' at scale 1')} ({_why_not(verdict)})"
            for verdict in of_kind
            if not verdict.fits
        )
        judged = {verdict.format for verdict in of_kind}
        hidden = ", ".join(
            _format_name(format.name, scaling, " at scale 1")
            for format, scaling in CANDIDATES
            if format.name not in judged
        )
        # Values that overflowed in the run were counted as infinite: their magnitudes are unknown.
        is_rest = any(layer.kind == kind and layer.histogram and layer.histogram.nonfinite for layer in report.layers)
        them = "the finite ones" if is_rest else "them"
        parts = (
            yes and f"range holds {them}: {yes}",
            no and f"does not: {no}",
            hidden and f"not known: {hidden} (values were flushed or overflowed before counting)",
            _unknown_range(report.layers, kind),
        )
        told.setdefault("; ".join(filter(None, parts)), []).append(f"{kind.replace('_', ' ')}s")
    for words, kinds in told.items():
        yield f"{', '.join(kinds)}: {words}"


def _unknown_range(layers: Sequence[LayerReport], kind: str) -> str:
    """Return a clause on the tensors of a kind that held nothing but zeros, infinities and NaNs; "" if none did."""
    of_kind = [(layer.name, layer.histogram) for layer in layers if layer.kind == kind and layer.histogram is not None]
    names = [name for name, counts in of_kind if counts.total and not counts.nonzero]
    return filled("of {} no finite value other than zero was seen", some(names))


def _format_name(name: str, scaling: str, unscaled: str = "") -> str:
    return f"{name}{unscaled}" if scaling == "none" else f"{name} with {scaling} scaling"


def _why_not(verdict: FormatVerdict) -> str:
    why = "values overflow in" if verdict.overflows else f"~{percent(verdict.worst_lost_l1_share)} of L1 lost in"
    return f"{why} {verdict.worst_layer or 'the model'}"


def _left_out(session: Session) -> Iterator[str]:
    """Yield sentences on the modules and on the closures whose calls were not all observed."""
    for what in (CALLS_LEFT_OUT, CLOSURES_LEFT_OUT):
        found = next((each for each in session.measurements if each.what == what), None)
        if found is None:
            continue
        observed = f"{found.figures['observed']:,.0f}"
        if what == CLOSURES_LEFT_OUT:
            yield f"The first {observed} calls of a closure in an optimizer's step were counted and watched, later ones were not."
            continue
        others = int(found.figures["modules"]) - 1
        times = f"{found.figures['calls']:,.0f} times in a forward"
        if others:
            times += f" (and {number_of(others, 'other module')} called as often or less)"
        yield (
            f"{upper_first(module_named(found.name))} is called up to {times}: up "
            f"to {observed} calls, evenly spread, were counted and watched."
        )


def _never_fired(report: RangeReport) -> Items:
    """Return a list of the tensors that never fired, grouped by kind and reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, kind, reason in report.coverage.never_fired:
        groups.setdefault((kind, reason or "reason unknown"), []).append(name or "(the model)")
    found = (
        Item(f"no {kind.replace('_', ' ')} ({reason})", names=tuple(names), limit=NAMES)
        for (kind, reason), names in groups.items()
    )
    return Items(tuple(found), REASONS)
