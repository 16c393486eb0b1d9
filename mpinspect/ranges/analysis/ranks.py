"""Adds up the sessions of a job's ranks into one session. Counts are sums, and every element is counted once.

The terms are each rank's own counts. Under DistributedDataParallel these are each rank's gradients before the all-reduce; under
FSDP2 and DTensor, its shards of each tensor; under a pipeline, its stage's layers. Elements that several ranks hold (replicas)
are counted on the first such rank. A merged session can be saved and merged again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from types import MappingProxyType

from mpinspect.ranges.analysis.parting import groups
from mpinspect.ranges.analysis.rank_ranges import RankRanges
from mpinspect.ranges.kinds import KINDS
from mpinspect.ranges.session import (
    Event,
    LayersRecord,
    Measurement,
    Precision,
    Progress,
    RankRecord,
    Session,
    added_operands,
)
from mpinspect.ranges.windows.tensors import TensorInfo, TensorKey, add_counts
from mpinspect.ranges.windows.window import Window, merge_windows
from mpinspect.runtime.background import give_way

#: Names of the measurements of a rank without a session, and of a rank with an unfinished session; ``text`` holds any details.
MISSING, UNFINISHED = "rank-missing", "rank-unfinished"
#: Name of the measurement of a rank's process that ended before its script. ``text`` is the cause ("by ValueError: 3"). The
#: figure "order" is an index into ENDINGS: its own fault, a signal, a collective that lost another rank, or the SIGTERM that
#: launchers send to the remaining ranks. The rank with the least order is the cause.
ENDED_EARLY = "rank-ended-early"
ENDINGS = ("itself", "killed", "in a collective", "stopped")
#: Maximum number of events in the sum, the earliest ones. Each rank's record has the number of all its events.
MOST_EVENTS = 1000


class NotOneModelError(ValueError):
    """Raised if a rank's tensors do not match the other ranks'; the message is a phrase that names one tensor."""


def merge_ranks(sessions: Iterable[Session]) -> Session:
    """Return the sum of the ranks' sessions, which may be sums themselves. Takes one session at a time from the iterable.

    Raises:
        NotOneModelError: a session is of another model than the earlier sessions, or a rank occurs twice.
        ValueError: there is no session.
    """
    total = RankSum()
    for session in sessions:
        total.add(session)
    return total.session()


class RankSum:
    """The sum of the ranks added so far. Memory: one rank's windows, and some bytes for each rank and tensor.

    ``info.rank`` of each session is its rank.
    """

    def __init__(self) -> None:
        self._sum: Session | None = None
        self._ranges = RankRanges()
        #: The ranks of each note, in the order of the notes.
        self._notes: dict[str, list[int]] = {}

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks added so far, in order."""
        return () if self._sum is None else tuple(rank.info.rank for rank in self._sum.ranks)

    def add(self, session: Session) -> None:
        """Add a rank's session, or the sum of several.

        Raises:
            NotOneModelError: the session does not fit; the sum is unchanged.
        """
        total, noted_by = session, []
        if not session.ranks:
            total, noted_by = of_rank(session), [session.info.rank]
        if self._sum is not None:
            total = _added(self._sum, total)
        if not session.ranks:
            self._ranges.add(session)
        for note in session.notes:
            self._notes.setdefault(note, []).extend(noted_by)
        self._sum = total

    def session(
        self,
        absent: Mapping[int, str] | None = None,
        unfinished: Mapping[int, str] = MappingProxyType({}),
        ended_early: Iterable[Measurement] = (),
    ) -> Session:
        """Return the sum. In a world of one rank it is a plain session without ``ranks``.

        Args:
            absent: ranks of the job without a session, each with its details; None: all ranks that were not added. A rank that
                recorded only another model (a stage of a pipeline) is not absent.
            unfinished: ranks whose sessions have not ended, each with its details: words that follow its name.
            ended_early: the measurements ENDED_EARLY of ranks whose processes ended before their scripts.

        Raises:
            ValueError: nothing was added.
        """
        if self._sum is None:
            raise ValueError("there is no rank to merge")
        known = set(self.ranks)
        if absent is None:
            others = (rank for rank in range(self._sum.info.world_size) if rank not in known)
            absent = dict.fromkeys(islice(others, MOST_EVENTS), "")
        found = (
            *islice(ended_early, MOST_EVENTS),
            *(Measurement(MISSING, rank=rank, text=why) for rank, why in islice(absent.items(), MOST_EVENTS)),
            *(Measurement(UNFINISHED, rank=rank, text=why) for rank, why in unfinished.items() if rank in known),
            *self._ranges.differing(),
        )
        # Measurements from an earlier sum of fewer ranks are replaced.
        again = {(each.what, each.rank) for each in found}
        kept = tuple(
            each
            for each in self._sum.measurements
            if (each.what, each.rank) not in again and not (each.what == MISSING and each.rank in known)
        )
        ranks = self._sum.ranks if self._sum.info.world_size > 1 else ()
        return replace(self._sum, notes=tuple(self._all_notes()), measurements=(*kept, *found), ranks=ranks)

    def _all_notes(self) -> Iterator[str]:
        """Yield the notes; a note that only some ranks have begins with their numbers."""
        for note, ranks in self._notes.items():
            if ranks and len(ranks) < len(self.ranks):
                note = f"{ranks_named(ranks)}: {note}"
            yield note


def ranks_named(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 0-3" or "ranks 1, 5 and 7", with at most five numbers or stretches."""
    if not ranks:
        return "ranks none"
    numbers, words, named = sorted(set(ranks)), [], 0
    for place, number in enumerate(numbers):
        if place < named:
            continue
        # Three neighbours or more are a stretch.
        end = next((i for i in range(place, len(numbers)) if numbers[i] - number != i - place), len(numbers))
        named, word = place + 1, str(number)
        if end - place > 2:
            named, word = end, f"{number}-{numbers[end - 1]}"
        words.append(word)
        if len(words) == 4 and len(numbers) - named > 1:
            words.append(f"{len(numbers) - named:,} more")
            break
    if len(numbers) == 1:
        return f"rank {words[0]}"
    return f"ranks {' and '.join(filter(None, (', '.join(words[:-1]), words[-1])))}"


# -- one rank -----------------------------------------------------------------------------------------------------------


def of_rank(session: Session) -> Session:
    """Return a rank's session as a sum of one rank: without replicas that another rank counts, with the rank in its events."""
    rank = session.info.rank
    elsewhere = frozenset(info.key for info in session.watched if not info.is_first)
    progress = session.reached()
    return replace(
        session,
        windows=tuple(window.without(elsewhere) for window in session.windows),
        events=tuple(replace(event, rank=rank) for event in session.events),
        measurements=tuple(replace(each, rank=rank) for each in session.measurements),
        progress=progress,
        ranks=(RankRecord(session.info, progress, len(session.events), len(session.watched)),),
    )


# -- the sum ------------------------------------------------------------------------------------------------------------


def _added(first: Session, second: Session) -> Session:
    """Return the sum of two sums of ranks; the caller merges their notes."""
    ranks = {rank.info.rank for rank in first.ranks}
    if twice := [rank.info.rank for rank in second.ranks if rank.info.rank in ranks]:
        raise NotOneModelError(f"there are two sessions of {ranks_named(twice)}")
    low, high = sorted((first, second), key=lambda each: each.ranks[0].info.rank)
    watched = _watched(low.watched, high.watched)
    shards = frozenset(info.key for info in watched if info.held == "shard")
    return replace(
        low,
        info=replace(
            low.info,
            started=min(filter(None, (low.info.started, high.info.started)), default=""),
            kinds=tuple(kind for kind in KINDS if kind in (*low.info.kinds, *high.info.kinds)),
            world_size=max(low.info.world_size, high.info.world_size),
        ),
        watched=watched,
        windows=tuple(_windows(first.windows, second.windows, shards)),
        events=tuple(sorted((*low.events, *high.events), key=_event_order)[:MOST_EVENTS]),
        progress=_progress(low.progress, high.progress),
        precision=_precision(low, high),
        measurements=_measurements(low.measurements, high.measurements),
        ranks=tuple(sorted((*first.ranks, *second.ranks), key=lambda rank: rank.info.rank)),
    )


def _event_order(event: Event) -> tuple[int, int, bool, bool, int]:
    """Return a sort key. At equal times, values that arose on the rank precede values that other ranks may have sent."""
    return event.step, event.micro_batch, event.phase != "forward", event.elsewhere, event.rank or 0


def _watched(low: Sequence[TensorInfo], high: Sequence[TensorInfo]) -> tuple[TensorInfo, ...]:
    found = {info.key: info for info in low}
    for info in high:
        known = found.get(info.key)
        if known is None:
            found[info.key] = info
            continue
        if known.shape and info.shape and known.shape != info.shape:
            raise NotOneModelError(f"{info.name} has the shape {_shape(info)} there and {_shape(known)} here")
        is_first = known.is_first or info.is_first
        # The sum lacks a tensor only if every rank has a reason for not capturing it.
        found[info.key] = replace(known, is_first=is_first, note=info.note and known.note)
    return tuple(found.values())


def _shape(info: TensorInfo) -> str:
    return " x ".join(map(str, info.shape))


def _windows(first: Sequence[Window], second: Sequence[Window], shards: frozenset[TensorKey]) -> Iterator[Window]:
    """Yield the windows of both, merged where they overlap into the shortest stretches that no window crosses.

    All ranks run the same steps, so each step is counted once. The peaks over all ranks are an upper bound (``largest_of``).
    """
    for ours, theirs in groups(first, second):
        give_way()
        parts = [merge_windows(*windows) for windows in (ours, theirs) if windows]
        if len(parts) < 2:
            yield parts[0]
            continue
        merged = merge_windows(*parts)
        steps = max(part.sampled_steps for part in parts)
        peaks = largest_of([part.gradient_peaks for part in parts])
        yield replace(merged, sampled_steps=steps, gradient_peaks=peaks).once(shards, parts)


def largest_of(peaks: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """Return peak exponent over all ranks -> number of steps, as an upper bound. ``peaks``: the same mapping for each rank.

    The number of steps that reach an exponent is at most the sum over the ranks, and at most the number of steps. The bound
    assumes that different ranks reach it in different steps.
    """
    steps = max((sum(each.values()) for each in peaks), default=0)
    reached, found = 0, {}
    for exponent, count in sorted(add_counts(peaks).items(), reverse=True):
        if more := min(reached + count, steps) - reached:
            found[exponent] = more
        reached += more
    return dict(sorted(found.items()))


def _progress(low: Progress, high: Progress) -> Progress:
    watched = [each.watched_steps for each in (low, high) if each.watched_steps is not None]
    moved = (low.weights_moved, high.weights_moved)
    return replace(
        low,
        steps=max(low.steps, high.steps),
        sampled_steps=max(low.sampled_steps, high.sampled_steps),
        skipped_steps=max(low.skipped_steps, high.skipped_steps),
        backwards=max(low.backwards, high.backwards),
        ended=low.ended and high.ended,
        scale_known=low.scale_known and high.scale_known,
        scale_unknown_reason=low.scale_unknown_reason or high.scale_unknown_reason,
        watched_steps=min(watched, default=None),
        measured_steps=max(low.measured_steps, high.measured_steps),
        elapsed_s=max(low.elapsed_s, high.elapsed_s),
        own_s=low.own_s + high.own_s,
        bare_s=low.bare_s + high.bare_s,
        weights_moved=next(known for known in (True, None, False) if known in moved),
    )


def _precision(low: Session, high: Session) -> Precision:
    one, other = low.precision, high.precision
    names = {info.name for info in low.watched}
    # Each copy of a model has all its elements; a shard or a stage has a part of them.
    is_parted = any(info.held == "shard" for info in high.watched) or not any(i.name in names for i in high.watched)
    join = _sums if is_parted else _maxima
    return Precision(
        join(one.weights, other.weights),
        join(one.gradients, other.gradients),
        tuple(dict.fromkeys((*one.autocast, *other.autocast))),
        tuple(dict.fromkeys((*one.outputs, *other.outputs))),
        tuple(dict.fromkeys((*one.losses, *other.losses))),
        tuple(
            {
                (each.type, str(each.states), each.masters > 0): each for each in (*other.optimizers, *one.optimizers)
            }.values()
        ),
        tuple({(each.type, each.enabled): each for each in (*other.scalers, *one.scalers)}.values()),
        tuple(dict.fromkeys((*one.reduced, *other.reduced))),
        tuple(dict.fromkeys((*one.unseen, *other.unseen))),
        _layers(one, other),
        tuple(dict.fromkeys((*one.asked, *other.asked))),
        added_operands(one.operands, other.operands),
    )


def _layers(one: Precision, other: Precision) -> tuple[LayersRecord, ...]:
    """Return the layers of both; a module of both has the record of the lower rank."""
    known = {module for record in one.layers for module in record.modules}
    added = (
        replace(record, modules=tuple(module for module in record.modules if module not in known))
        for record in other.layers
    )
    return (*one.layers, *(record for record in added if record.modules))


def _sums(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {dtype: one.get(dtype, 0) + other.get(dtype, 0) for dtype in dict.fromkeys((*one, *other))}


def _maxima(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {dtype: max(one.get(dtype, 0), other.get(dtype, 0)) for dtype in dict.fromkeys((*one, *other))}


def _measurements(low: Sequence[Measurement], high: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """Return the measurements of both. If several ranks measured the same thing, only the first rank's is included.

    Diagnoses then find one record per fault, as in a single process.
    """
    known = {(each.what, each.name) for each in low}
    return (*low, *(each for each in high if (each.what, each.name) not in known))
