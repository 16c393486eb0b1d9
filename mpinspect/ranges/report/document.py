"""What a session's report says: what broke, the loss scale, findings, the layers' ranges, other formats, coverage, notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from mpinspect.numeric.formats import FORMATS
from mpinspect.ranges.analysis.overhead import overhead_line
from mpinspect.ranges.analysis.report import FormatVerdict, LayerReport, LossScaleAdvice, RangeReport, TimeBlock
from mpinspect.ranges.analysis.serving import LOST_L1_TOLERANCE
from mpinspect.ranges.kinds import GRADIENT_KINDS, KINDS, UPDATE, kind_named
from mpinspect.ranges.report.layers import badness, flushed_at_recommended, log2_recommended, range_strip, seen_layers
from mpinspect.ranges.report.scale_line import scale_line, steps_and_samples
from mpinspect.ranges.session import END, Event, Session
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
    bullets,
    lines,
    most,
    section,
)
from mpinspect.reporting.words import NOT_APPLICABLE, UNKNOWN, percent, power_of_two, share

#: About as many as one looks through; GitHub cuts a comment at 65,536 characters.
LAYERS = Limit(40, 100, "more rows that lose less; to_dataframe() and JSON have all")
EVENTS = Limit(5, 10)
#: Layers that never fired, by reason, and their names.
REASONS, NAMES = Limit(20, 20), Limit(12, 50)
NOTES = Limit(20, 100)

_LEGEND = "~ an estimate, with its [bounds] where they lie far apart; ? not known"


def document(report: RangeReport) -> Document:
    """The report as a document."""
    session = report.session
    return Document(
        f"{session.info.model or 'A model'} against {report.format}",
        (
            *lines(_totals(session)),
            *section("Infinite or NaN", *_events(report.events)),
            *section("Loss scale", *_loss_scale(report.loss_scale)),
            *section("Findings", Findings(report.findings)),
            *_layers(report),
            *section("Other formats", *lines(_formats(report.formats))),
            *section("Coverage", Line(str(report.coverage)), _never_fired(report)),
            *section("Notes", bullets(session.notes, NOTES)),
        ),
    )


def _totals(session: Session) -> Iterator[str]:
    seen = session.passed_through() - {"float32"}
    # The narrow formats that values were rounded to on their way, as under autocast.
    computed_in = f"; values were rounded to {' and '.join(sorted(seen))}" if seen else ""
    yield f"{steps_and_samples(session.progress, '' if session.progress.ended else ' so far')}{computed_in}"
    overhead = overhead_line(session)
    if overhead:
        yield overhead


# -- what broke -----------------------------------------------------------------------------------------------------


def _events(events: Sequence[Event]) -> Iterator[Block]:
    """The first in full, some of the others in a line each."""
    if not events:
        return
    first = events[0]
    yield Line(f"first: {_where(first)}", "error")
    yield Line("; ".join(_facts(first)))
    if first.last_maxima:
        yield Line(
            "largest magnitudes before, oldest first: " + ", ".join(f"{value:.3g}" for value in first.last_maxima)
        )
    if first.explanation:
        yield Line(first.explanation)
    yield Items(tuple(Item(_where(event)) for event in events[1:]), EVENTS)


def _facts(event: Event) -> Iterator[str]:
    if event.phase == END:
        yield "no step reported it"
    else:
        yield f"loss scale {power_of_two(event.loss_scale) if event.loss_scale else 'unknown'}"
    if event.forward_finite is not None:
        yield f"the forward was {'finite' if event.forward_finite else 'not finite'}"
    if event.gradients_finite is not None:
        yield f"the gradients were {'finite' if event.gradients_finite else 'not finite'}"
    if event.skipped is not None:
        yield f"the optimizer's step was {'skipped' if event.skipped else 'taken'}"


def _where(event: Event) -> str:
    batch = f", micro-batch {event.micro_batch}" if event.micro_batch else ""
    tensor = f" of {event.tensor}" if event.tensor not in ("", event.module) else ""
    what = event.what.replace("_", " ")
    return f"step {event.step}{batch}, {event.phase}, {event.place}: {event.value} in the {what}{tensor}"


# -- the loss scale -------------------------------------------------------------------------------------------------


def _loss_scale(advice: LossScaleAdvice) -> Iterator[Line]:
    if not advice.available:
        yield Line("No loss scale can be suggested.", "strong")
        yield Line(advice.reason)
        return
    yield Line(scale_line(advice), "strong")
    yield Line(advice.reason)
    if advice.dynamic is not None and advice.needed is not False:
        start, interval = advice.dynamic.init_scale, advice.dynamic.growth_interval
        role = "The same" if start == advice.static_scale else "Where no fixed scale will do, the first steps' scale"
        scaler = f"torch.amp.GradScaler(init_scale={start:.17g}, growth_interval={interval})"
        yield Line(f"{role} as the start of a dynamic one: {scaler}")
    for pair in advice.conflicts[1:]:
        needs, limit = pair.needs_large, pair.needs_small
        yield Line(f"conflict: {needs} needs 2^{pair.log2_lowest}, {limit} overflows above 2^{pair.log2_highest}")
    if _moves(advice.blocks):
        groups = [list(equal) for _, equal in groupby(advice.blocks, _window)]
        yield Line("The window over time: " + "; ".join(_block(group[0], group[-1]) for group in groups))


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


# -- the layers -----------------------------------------------------------------------------------------------------

#: A layer's figure in words, or its cell.
Figure = Callable[[LayerReport], str | Cell]


def _layers(report: RangeReport) -> Iterator[Block]:
    """A table for each kind that was seen; of many layers those that lose most."""
    seen = seen_layers(report)
    if not seen:
        yield from section("Layers", Line("No tensor was counted."))
        return
    worst_first = sorted(range(len(seen)), key=lambda place: badness(seen[place]), reverse=True)
    ranks = {place: rank for rank, place in enumerate(worst_first[: most(LAYERS, len(seen))])}
    chosen = sorted(ranks, key=lambda place: (KINDS.index(seen[place].kind), place))
    tables = []
    for kind, group in groupby(chosen, lambda place: seen[place].kind):
        places = list(group)
        of_kind = [seen[place] for place in places]
        columns = _update_columns(of_kind) if kind == UPDATE else _range_columns(kind, report)
        title = (
            "Updates that rounding loses where weights are stored in a narrow format"
            if kind == UPDATE
            else f"{kind_named(kind).title} in {report.format} at scale 1"
        )
        rows = tuple((_name(layer), *(_as_cell(figure(layer)) for _, figure in columns)) for layer in of_kind)
        headings = (Column("layer", is_name=True), *(column for column, _ in columns))
        tables.append(Table(headings, rows, title, tuple(ranks[place] for place in places)))
    yield Tables(tuple(tables), LAYERS, len(seen), _LEGEND)


def _as_cell(figure: str | Cell) -> Cell:
    return Cell(figure) if isinstance(figure, str) else figure


def _range_columns(kind: str, report: RangeReport) -> list[tuple[Column, Figure]]:
    """The figures that layers of this kind are asked for. A new column is written here and nowhere else."""
    columns: list[tuple[Column, Figure]] = [
        (
            Column("offset", meaning="unused powers of two at the top of the format"),
            lambda layer: UNKNOWN if layer.range_offset is None else str(layer.range_offset),
        ),
        (
            Column("flushed", meaning="share of the non-zero elements"),
            lambda layer: share(layer.flushed_fraction),
        ),
    ]
    k = log2_recommended(report.loss_scale)
    # At scale 1 it would say the same again.
    if kind in GRADIENT_KINDS and k != 0:
        columns.append(
            (Column("at ?" if k is None else f"at 2^{k}"), lambda layer: share(flushed_at_recommended(layer, report)))
        )
    format = FORMATS[report.format]
    columns += [
        (
            Column("L1 lost", meaning="share of the sum of magnitudes that is flushed"),
            lambda layer: share(layer.lost_l1_share, is_estimate=True, near=LOST_L1_TOLERANCE),
        ),
        (Column("largest", meaning="magnitude, rounded down"), _largest),
        (
            Column("subnormal", priority=1, meaning="share that survives with fewer bits"),
            lambda layer: UNKNOWN if layer.subnormal_fraction is None else percent(layer.subnormal_fraction),
        ),
        (
            Column(
                "range",
                is_left=True,
                priority=2,
                meaning="the non-zero elements, small to large, against the format from its flush edge to its top",
            ),
            lambda layer: Cell() if layer.histogram is None else Cell(strip=range_strip(layer.histogram, format)),
        ),
    ]
    return columns


def _update_columns(layers: list[LayerReport]) -> list[tuple[Column, Figure]]:
    """Updates are asked another question: would w + dw differ from w if weights were stored in that format?"""

    def lost_in(storage: str) -> Figure:
        def words(layer: LayerReport) -> str:
            lost = (layer.lost_updates or {}).get(storage)
            if lost is None:
                return UNKNOWN
            return f"{percent(lost.fraction)} {'measured' if lost.measured else 'if stored so'}"

        return words

    storages = sorted({storage for layer in layers for storage in layer.lost_updates or {}})
    return [(Column(f"lost in {storage}"), lost_in(storage)) for storage in storages]


def _largest(layer: LayerReport) -> str:
    """Largest finite magnitude as a power of two, rounded down."""
    if layer.histogram is None:
        return UNKNOWN
    return f"2^{layer.histogram.max_exponent}" if layer.histogram.nonzero else NOT_APPLICABLE


def _name(layer: LayerReport) -> Cell:
    return Cell(layer.name or "(the model)", notes=() if layer.kind == UPDATE else tuple(_remarks(layer)))


def _remarks(layer: LayerReport) -> Iterator[str]:
    """What else a reader of the row must know, each a few words."""
    histogram = layer.histogram
    if histogram is not None and histogram.infs + histogram.nans:
        yield f"{histogram.infs:,} inf, {histogram.nans:,} NaN"
    if layer.overflowed:
        yield f"{layer.overflowed:,} overflow"
    if histogram is not None and not histogram.nonzero:
        yield "all zero" if histogram.zeros else "no finite value"
    if layer.rounding_noise:
        yield "rounding noise"


# -- the rest -------------------------------------------------------------------------------------------------------


def _formats(verdicts: tuple[FormatVerdict, ...]) -> Iterator[str]:
    """A line a kind: the formats that would do, then those that would not and why."""
    for kind in dict.fromkeys(verdict.kind for verdict in verdicts):
        of_kind = [verdict for verdict in verdicts if verdict.kind == kind]
        yes = ", ".join(_format_name(verdict) for verdict in of_kind if verdict.fits)
        no = ", ".join(f"{_format_name(verdict)} ({_why_not(verdict)})" for verdict in of_kind if not verdict.fits)
        parts = ([f"would do: {yes}"] if yes else []) + ([f"would not: {no}"] if no else [])
        yield f"{kind.replace('_', ' ')}s: {'; '.join(parts)}"


def _format_name(verdict: FormatVerdict) -> str:
    return verdict.format if verdict.scaling == "none" else f"{verdict.format} with {verdict.scaling} scaling"


def _why_not(verdict: FormatVerdict) -> str:
    why = "values overflow in" if verdict.overflows else f"~{percent(verdict.worst_lost_l1_share)} of L1 lost in"
    return f"{why} {verdict.worst_layer or 'the model'}"


def _never_fired(report: RangeReport) -> Items:
    """The tensors that never arrived, by kind and reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, kind, reason in report.coverage.never_fired:
        groups.setdefault((kind, reason or "reason unknown"), []).append(name or "(the model)")
    found = (
        Item(f"no {kind.replace('_', ' ')} ({reason})", names=tuple(names), limit=NAMES)
        for (kind, reason), names in groups.items()
    )
    return Items(tuple(found), REASONS)
