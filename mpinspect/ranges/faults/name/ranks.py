"""Ranks that differ: ended early, missing, uneven, unlike, broken, elsewhere in the range."""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from mpinspect.numeric.formats import FLOAT16
from mpinspect.ranges.analysis.comparison import scales_part
from mpinspect.ranges.analysis.evidence import own_scale
from mpinspect.ranges.analysis.first_line import first_line
from mpinspect.ranges.analysis.rank_ranges import DIFFERS, UNEQUAL
from mpinspect.ranges.analysis.ranks import ENDED_EARLY, ENDINGS, MISSING, UNFINISHED, ranks_named
from mpinspect.ranges.faults.name.case import SIGNIFICAND_BITS, Case
from mpinspect.ranges.faults.name.fault import Fault, Found
from mpinspect.ranges.kinds import WEIGHT_GRADIENT, phrase
from mpinspect.ranges.session import UNEVEN_INPUTS, Measurement, Progress, RankRecord, RunInfo, Session
from mpinspect.reporting.sentences import Sentences
from mpinspect.reporting.words import filled, steps_named, upper_first, with_power

Value = TypeVar("Value", bound=Hashable)
#: How many ranks the evidence lists.
_MOST_RANKS = 100


def _known_of(session: Session, what: str) -> dict[int, str]:
    """Return the ranks with this measurement, each with its text."""
    return {each.rank: each.text for each in session.measurements if each.what == what and each.rank is not None}


def _by_value(found: Mapping[int, str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, value in found.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


def _odd_ones(
    ranks: Sequence[RankRecord], of: Callable[[RankRecord], Value]
) -> tuple[Value, dict[Value, list[RankRecord]]]:
    """Return the commonest value (in a tie the first rank's), and the ranks with any other, by value."""
    common = Counter(map(of, ranks)).most_common(1)[0][0]
    odd: dict[Value, list[RankRecord]] = {}
    for rank in ranks:
        if (value := of(rank)) != common:
            odd.setdefault(value, []).append(rank)
    return common, odd


def _ranks_of(group: Sequence[RankRecord]) -> str:
    return ranks_named([rank.info.rank for rank in group])


# -- ended early --------------------------------------------------------------------------------------------------------

_KILLED, _IN_A_COLLECTIVE, _STOPPED = map(ENDINGS.index, ("killed", "in a collective", "stopped"))


class _Ended(Sentences):
    FIRST = "{first}."
    THEN = "Then {then}."
    ALL_KILLED = "Either the job was stopped, or one of them died and the launcher stopped the others."
    READ_LAUNCHER = (
        "Read the launcher's messages on {ranks}: signal 9 mostly means a lack of memory, 11 a crash in native code. The "
        "launcher stops the other ranks once one has ended."
    )
    READ_SCHEDULER = (
        "Read the messages of the launcher or the scheduler on the job: it stopped {ranks}. The launcher stops the other ranks "
        "once one has ended."
    )
    READ_EXCEPTION = "Read the exception that {ranks} printed. The launcher stops the other ranks once one has ended."


def _ended_early(case: Case) -> Iterator[Found]:
    """The ranks whose processes ended first, with their steps and causes, and how the others ended.

    False alarms: A job that its scheduler stops is reported as a warning.
    """
    return ended_early(case.session)


def ended_early(session: Session) -> Iterator[Found]:
    """Yield the finding on ranks whose processes ended first, if there are any."""
    left = [each for each in session.measurements if each.what == ENDED_EARLY and each.rank is not None]
    if not left:
        return
    order = min(each.figures["order"] for each in left)
    causes = [each for each in left if each.figures["order"] == order]
    others = [each for each in left if each not in causes]
    numbers = _ranks_in(causes)
    all_killed = order == _KILLED and len(causes) >= session.info.world_size
    reading = {_KILLED: _Ended.READ_LAUNCHER, _STOPPED: _Ended.READ_SCHEDULER}
    yield Found(
        (_Ended.FIRST, _Ended.ALL_KILLED.when(all_killed) or _Ended.THEN.when(others)),
        {"ranks": numbers[:_MOST_RANKS], "count": len(numbers), "world_size": session.info.world_size},
        {
            "first": upper_first("; ".join(_endings(causes, session, others))),
            "then": "; ".join(_endings(others, session)),
            "ranks": ranks_named(numbers),
        },
        reading.get(int(order), _Ended.READ_EXCEPTION),
        is_mild=all_killed or order == _STOPPED,
        step=min((rank.progress.steps for rank in session.ranks if rank.info.rank in numbers), default=None),
    )


def _ranks_in(left: Iterable[Measurement]) -> list[int]:
    return [each.rank for each in left if each.rank is not None]


def _endings(left: Sequence[Measurement], session: Session, later: Sequence[Measurement] = ()) -> Iterator[str]:
    """Yield how ranks ended, and the step, as the session shows it; ``later`` are the ranks that ended after them."""
    ranks: dict[str, list[int]] = {}
    for each in left:
        ranks.setdefault(each.text, []).append(each.rank or 0)
    waited = [each for each in later if each.figures["order"] == _IN_A_COLLECTIVE]
    for how, numbers in ranks.items():
        yield f"{ranks_named(numbers)} ended{_when(numbers, session, _ranks_in(waited))} {how}"


def _when(numbers: Sequence[int], session: Session, waited: Sequence[int]) -> str:
    """Return the step, from the records of the ranks and of the ranks that waited for them; "" if they recorded another model."""
    first = _first_end(numbers, session)
    if first is None:
        return " before a step was recorded," * bool(set(_known_of(session, MISSING)) & set(numbers))
    # A process that was killed did more than it wrote, but no more than those that waited for it.
    last = _first_end(waited, session)
    most = last.steps if last is not None and last.ended else -1
    if first.ended or most == first.steps:
        return f" in step {first.steps:,}"
    if most > first.steps:
        return f" in one of {steps_named(first.steps, most)}"
    if not first.steps:
        return " in step 0 or later"
    return f" after step {first.steps - 1:,}"


def _first_end(numbers: Sequence[int], session: Session) -> Progress | None:
    """Return the progress of the rank with the fewest steps; None if no rank recorded the model."""
    known = (rank.progress for rank in session.ranks if rank.info.rank in numbers)
    return min(known, key=lambda progress: progress.steps, default=None)


# -- missing, and with other events -------------------------------------------------------------------------------------


class _Missing(Sentences):
    LEFT_NOTHING = "{left} The report covers the others only."


def _rank_missing(case: Case) -> Iterator[Found]:
    """Ranks without a record that can be added.

    False alarms: A rank whose process ended early has a finding of its own.
    """
    session = case.session
    known = _known_of(session, ENDED_EARLY)
    gone = {rank: why for rank, why in _known_of(session, MISSING).items() if rank not in known}
    if not session.ranks or not gone:
        return
    world = session.info.world_size
    left = (
        f"{upper_first(ranks_named(ranks))} of {world:,} left no record that can be added{filled(': {}', why)}."
        for why, ranks in _by_value(gone).items()
    )
    yield Found(
        _Missing.LEFT_NOTHING,
        {"missing": list(gone)[:_MOST_RANKS], "count": len(gone), "world_size": world},
        {"left": " ".join(left)},
    )


class _Events(Sentences):
    SOME = "Infinities or NaNs occurred on {ranks} in {most:count step}, the others saw none{began}."
    MORE = "Infinities or NaNs occurred on {ranks} in {most:count step}, the others fewer{began}."
    LOOK = "Look at that rank's data, and at its device if the data are as the others'."


def _rank_events_differ(case: Case) -> Iterator[Found]:
    """Infinities or NaNs that only some ranks saw, or that some ranks saw far more often.

    False alarms: A single rank whose batch was broken on purpose is reported.
    """
    counts = {rank.info.rank: rank.events for rank in case.session.ranks}
    hit = {rank: count for rank, count in counts.items() if count}
    if not hit or len(counts) < 2 or min(counts.values()) * 2 > max(counts.values()):
        return
    most = [rank for rank, count in counts.items() if count * 2 > max(counts.values())]
    began, layer, step = "", "", None
    if case.session.events:
        first = case.session.events[0]
        began, layer, step = f", first at {first_line(first)}", first.module, first.step
    yield Found(
        _Events.SOME.when(len(hit) == len(most)) or _Events.MORE,
        {"events": {str(rank): count for rank, count in list(hit.items())[:_MOST_RANKS]}},
        {"ranks": ranks_named(most), "most": max(counts.values()), "began": began},
        _Events.LOOK,
        layer=layer,
        step=step,
    )


# -- other weights, ranges, scales and steps ----------------------------------------------------------------------------


class _Unequal(Sentences):
    WEIGHTS = (
        "Rank {rank} does not hold the weights that rank {first_rank} holds: {tensors:.0f} of {of:.0f} differ, {tensor} among "
        "them."
    )
    ON_ALL_RANKS = (
        "Something changes weights on one rank alone: load and initialise before wrapping, and step on all ranks."
    )


def _rank_replicas_unequal(case: Case) -> Iterator[Found]:
    """Ranks whose weights differ from the first rank's.

    False alarms: The weights are compared bit by bit at the same step.
    """
    for each in case.session.measurements:
        if case.session.ranks and each.what == UNEQUAL and each.rank is not None:
            yield Found(
                _Unequal.WEIGHTS,
                {"rank": each.rank, **each.figures},
                {"first_rank": case.session.ranks[0].info.rank, "tensor": phrase(each.name, each.text)},
                _Unequal.ON_ALL_RANKS,
                layer=each.name,
            )


class _Elsewhere(Sentences):
    ELSEWHERE = (
        "On rank {rank} {tensors:.0f} of {of:.0f} tensors lie in other powers of two than on the other ranks, by more than they "
        "change by themselves: {tensor} is {distance:.1f} powers {way} on average{others}."
    )
    LOOK = "Check whether this rank gets other data, another batch size or another loss."


def _rank_ranges_differ(case: Case) -> Iterator[Found]:
    """Ranks whose tensors lie in other powers of two than those of the other ranks.

    False alarms: Ranks that train other data on purpose (a curriculum, an expert) are reported.
    """
    found = [each for each in case.session.measurements if each.what == DIFFERS and each.rank is not None]
    if not case.session.ranks or not found:
        return
    worst = max(found, key=lambda each: (each.figures["tensors"], each.figures["beyond"]))
    others = [each.rank for each in found if each is not worst and each.rank is not None]
    yield Found(
        _Elsewhere.ELSEWHERE,
        {"ranks": [each.rank for each in found[:_MOST_RANKS]], **worst.figures},
        {
            "rank": worst.rank,
            "tensor": phrase(worst.name, worst.text),
            "way": ("lower", "higher")[worst.figures["powers"] > 0],
            "distance": abs(worst.figures["powers"]),
            "others": filled("; so do {}", others and ranks_named(others)),
        },
        _Elsewhere.LOOK,
        layer=worst.name,
        is_inferred=True,
    )


class _Scales(Sentences):
    PARTED = (
        "From step {step} on {parted} had another loss scale than rank {first_rank}: {other} on rank {rank}, {one} on rank "
        "{first_rank}."
    )
    SHARE = (
        "Ranks that average their gradients need one scale: share found_inf over the ranks (torch.amp.GradScaler under "
        "DistributedDataParallel does by itself; sharded gradients need their scaler's support)."
    )


def _rank_scales_differ(case: Case) -> Iterator[Found]:
    """Ranks that did not have the loss scale of the first one.

    False alarms: Ranks that do not average their gradients may have scales of their own.
    """
    if not case.session.ranks:
        return
    first, *others = case.session.ranks
    parted = {rank.info.rank: found for rank in others if (found := scales_part(first.progress, rank.progress))}
    if not parted:
        return
    rank, (step, one, other) = min(parted.items(), key=lambda pair: pair[1][0])
    yield Found(
        _Scales.PARTED,
        {"step": step, "ranks": list(parted)[:_MOST_RANKS], "scales": [one, other]},
        {
            "parted": ranks_named(list(parted)),
            "first_rank": first.info.rank,
            "rank": rank,
            "one": _scale(one),
            "other": _scale(other),
        },
        _Scales.SHARE,
        step=step,
    )


def _scale(scale: float | None) -> str:
    return "an unknown one" if scale is None else with_power(scale)


class _Steps(Sentences):
    DIFFER = "{ends}; the others' at {others:,}."
    AGREE = "The records of all ranks end at step {others:,}."
    STILL = "{still}"
    ATTACH = (
        "Each rank counts its steps from where it was attached, and steps of one number are added up: attach on all ranks "
        "before the same step, or look why some took fewer."
    )


#: The words for a rank whose session has not ended and whose process is unknown.
_UNFINISHED = "had not ended: still running, killed, or the file is cut off"


def _rank_steps_differ(case: Case) -> Iterator[Found]:
    """Ranks whose records end at another step, or have not ended.

    False alarms: Uneven inputs that the script joins on purpose are not reported.
    """
    session = case.session
    if not session.ranks:
        return
    common, odd = _odd_ones(session.ranks, lambda rank: rank.progress.steps)
    early, known = _known_of(session, ENDED_EARLY), _known_of(session, UNFINISHED)
    running = [rank.info.rank for rank in session.ranks if not rank.progress.ended and rank.info.rank not in early]
    unfinished = {rank: known.get(rank) or _UNFINISHED for rank in running}
    # All running, or all ended.
    are_alike = len(unfinished) in (0, len(session.ranks)) and len(set(unfinished.values())) < 2
    is_meant = any(each.what == UNEVEN_INPUTS for each in session.measurements)
    if (not odd and (early or are_alike)) or (is_meant and not running and not early):
        return
    ends = "; ".join(
        f"the record of {_ranks_of(group)} ends at step {steps:,}" for steps, group in list(odd.items())[:4]
    )
    still = (f"{upper_first(ranks_named(ranks))} {why}." for why, ranks in _by_value(unfinished).items())
    yield Found(
        (_Steps.DIFFER.when(odd) or _Steps.AGREE, _Steps.STILL.when(unfinished)),
        {
            "steps": {str(steps): [rank.info.rank for rank in group][:_MOST_RANKS] for steps, group in odd.items()},
            "others": common,
        },
        {"ends": upper_first(ends), "still": " ".join(still)},
        _Steps.ATTACH.when(not early and not unfinished),
        # Where ranks ended early they are the finding.
        is_mild=bool(early or (unfinished and are_alike)),
        step=min((*odd, common)),
    )


# -- other settings -----------------------------------------------------------------------------------------------------


class _Settings(Sentences):
    DIFFER = "The ranks differ: {sentences}."
    TWO_RUNS = "Ranks that began so far apart belong to two runs, or one was started again: leave only one run's folders there."
    ALIKE = "Start all ranks in the same environment and with the same options; counts are added up as they are."


#: Ranks that start further apart than this, in seconds, are of two runs, or one was started again.
_SECONDS_APART = 600.0


def _versions(info: RunInfo) -> str:
    return ", ".join(f"{name} {version}" for name, version in info.versions.items()) or "unknown versions"


_PARTS: dict[str, Callable[[RunInfo], str]] = {
    "model": lambda info: info.model or "?",
    "versions": _versions,
    "patterns": lambda info: f"include={list(info.include)}, exclude={list(info.exclude)}",
    "kinds": lambda info: ", ".join(info.kinds),
    "sampling": lambda info: f"every={info.every}, watch={info.watch}, max_overhead={info.max_overhead}",
}


def _rank_settings_differ(case: Case) -> Iterator[Found]:
    """Ranks whose settings, versions or models differ from most ranks', or that began at another time.

    False alarms: A rank of a pipeline has a model of its own.
    """
    ranks = case.session.ranks
    found: dict[str, list[str]] = {}
    # A damaged file lacks its run; another finding reports it.
    known = [rank for rank in ranks if rank.info != RunInfo(rank=rank.info.rank, world_size=rank.info.world_size)]
    for name, words in _PARTS.items() if known else ():
        common, odd = _odd_ones(known, lambda rank, words=words: words(rank.info))  # type: ignore[misc]
        found[name] = [f"{_ranks_of(group)}: {name} {value} (the others: {common})" for value, group in odd.items()]
    started = sorted(filter(None, (rank.info.started for rank in ranks)))
    if started and (apart := _seconds(started[0], started[-1])) > _SECONDS_APART:
        late = [rank.info.rank for rank in ranks if _seconds(started[0], rank.info.started) > _SECONDS_APART]
        found["start"] = [f"{ranks_named(late)} began up to {apart / 60:.0f} minutes after the first"]
    sentences = [sentence for each in found.values() for sentence in each]
    if sentences:
        if len(sentences) > 4:
            sentences[4:] = ["..."]
        yield Found(
            _Settings.DIFFER,
            {name: each[:20] for name, each in found.items() if each},
            {"sentences": "; ".join(sentences)},
            _Settings.TWO_RUNS.when("start" in found) or _Settings.ALIKE,
        )


def _seconds(first: str, second: str) -> float:
    try:
        one, other = map(datetime.datetime.fromisoformat, (first, second))
        return (other - one).total_seconds()
    except (TypeError, ValueError):
        return 0.0


# -- sums in 16 bits ----------------------------------------------------------------------------------------------------


class _Summed(Sentences):
    ROUNDED_AWAY = (
        "The gradients of {world_size:,} ranks are summed in {dtype:format}: one rank's share is rounded away when it is added "
        "to the sum of the others ({dtype:format} has {bits} significant bits)."
    )
    ROUNDED = (
        "The gradients of {world_size:,} ranks are summed in {dtype:format}: each addition rounds to it ({dtype:format} has "
        "{bits} significant bits)."
    )
    IN_FP32 = (
        "Sum in FP32: MixedPrecisionPolicy(reduce_dtype=torch.float32) for fully_shard; under DistributedDataParallel no "
        "compressing hook, and FP32 weights."
    )


def _summed_in_16_bits(case: Case) -> Iterator[Found]:
    """Gradients of ranks that are summed in 16 bits.

    False alarms: Below 256 ranks (BF16; 2048 in FP16) the severity is info.
    """
    world = case.session.info.world_size
    for dtype in case.precision.reduced:
        bits = SIGNIFICAND_BITS.get(dtype)
        if bits is None or world < 2 or not case.session.ranks:
            continue
        is_lost = world >= 2**bits
        yield Found(
            _Summed.ROUNDED_AWAY.when(is_lost) or _Summed.ROUNDED,
            {"dtype": dtype, "world_size": world, "headroom": case.advised.advice.headroom},
            {"bits": bits},
            _Summed.IN_FP32,
            is_mild=not is_lost,
        )


class _OnTheWay(Sentences):
    FLUSHED = (
        "The gradients are cast to FP16 for the sum over the ranks, at a loss scale of {scale:g}: {flushed:percent} of the "
        "non-zero elements of {weight!r} become zero. {count:count gradient} lost too much there."
    )
    SUM_IN_FP32 = (
        "Sum in FP32: no compressing hook under DistributedDataParallel, MixedPrecisionPolicy(reduce_dtype=torch.float32) for "
        "fully_shard. Under NCCL, BF16 (bf16_compress_hook) has the range of FP32 in half the bytes."
    )
    HOOK = "# in place of fp16_compress_hook\nhook = default_hooks.allreduce_hook\nddp.register_comm_hook(None, hook)"


def _flushed_on_the_way(case: Case) -> Iterator[Found]:
    """Gradients that fit FP32 and lose too much in FP16, in which the ranks' gradients are summed.

    False alarms: The counts are those of the gradients before the sum. A loss that the loop scales by hand counts as scaled.
    """
    decision = case.advised.decision
    if FLOAT16.name not in case.precision.reduced or decision is None:
        return
    scale = own_scale(case.session)[0] or 1.0
    log2_scale = math.floor(math.log2(scale))
    lost = [each for each in decision.losses if each.key.kind == WEIGHT_GRADIENT and each.log2_lowest > log2_scale]
    if lost:
        flushed = [each.gradient.histogram.flushed_fraction(FLOAT16, log2_scale) for each in lost]
        worst = max(flushed)
        yield Found(
            _OnTheWay.FLUSHED,
            {"flushed": worst, "gradients": len(lost), "loss_scale": scale},
            {"weight": lost[flushed.index(worst)].key.name, "count": len(lost), "scale": scale},
            _OnTheWay.SUM_IN_FP32,
            _OnTheWay.HOOK,
            layer=lost[flushed.index(worst)].key.name,
        )


RANK_ENDED_EARLY = Fault("rank-ended-early", "error", _ended_early, (_Ended,))
FAULTS = (
    Fault("rank-missing", "warning", _rank_missing, (_Missing,)),
    Fault("rank-events-differ", "warning", _rank_events_differ, (_Events,)),
    Fault("rank-replicas-unequal", "error", _rank_replicas_unequal, (_Unequal,)),
    Fault("rank-ranges-differ", "warning", _rank_ranges_differ, (_Elsewhere,)),
    Fault("rank-scales-differ", "warning", _rank_scales_differ, (_Scales,)),
    Fault("rank-steps-differ", "warning", _rank_steps_differ, (_Steps,)),
    Fault("rank-settings-differ", "warning", _rank_settings_differ, (_Settings,)),
    Fault("gradients-summed-in-16-bits", "warning", _summed_in_16_bits, (_Summed,)),
    Fault("gradients-flushed-in-sum", "warning", _flushed_on_the_way, (_OnTheWay,)),
)
