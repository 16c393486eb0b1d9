"""Describes a merged session, and names the ranks that differ: missing, uneven, unlike, broken, elsewhere."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from mpinspect.numeric.exponents import merge
from mpinspect.ranges.analysis.comparison import scales_part
from mpinspect.ranges.analysis.first_line import first_line
from mpinspect.ranges.analysis.rank_ranges import DIFFERS, UNEQUAL
from mpinspect.ranges.analysis.ranks import ENDED_EARLY, ENDINGS, MISSING, UNFINISHED, ranks_named
from mpinspect.ranges.analysis.scale_advice import Advised
from mpinspect.ranges.faults.name.case import SIGNIFICAND_BITS
from mpinspect.ranges.kinds import OUTPUT_KINDS, WEIGHT_GRADIENT, phrase
from mpinspect.ranges.session import UNEVEN_INPUTS, Measurement, Progress, RankRecord, RunInfo, Session
from mpinspect.reporting.finding import INFERRED, Finding
from mpinspect.reporting.words import format_name, number_of, steps_named, upper_first, with_power

Value = TypeVar("Value", bound=Hashable)
#: Of a rank whose session has not ended, where nothing is known of its process.
_UNFINISHED = "had not ended: still running, killed, or the file is cut off"
_KILLED, _IN_A_COLLECTIVE, _STOPPED = map(ENDINGS.index, ("killed", "in a collective", "stopped"))
#: By how the first rank ended: who tells more. Else what is printed of its exception.
_TOLD_BY: dict[float, str] = {
    _KILLED: "what the launcher says of {}: signal 9 is mostly a lack of memory, 11 a crash in native code",
    _STOPPED: "what the launcher, or the scheduler, says of the job: it stopped {}",
}
#: Of the figures of averaged gradients those that count elements.
_EXPONENT = re.compile(r"-?[0-9]{1,4}")
#: Ranks that start further apart than this, in seconds, are of two runs, or one was started again.
_SECONDS_APART = 600.0


def ended_early(session: Session) -> Iterator[Finding]:
    """Yield an error that names the ranks whose processes ended first, in which step and how, and what became of the others."""
    left = [each for each in session.measurements if each.what == ENDED_EARLY and each.rank is not None]
    if not left:
        return
    order = min(each.figures["order"] for each in left)
    causes = [each for each in left if each.figures["order"] == order]
    others = [each for each in left if each not in causes]
    numbers = _ranks_in(causes)
    parts = ["; ".join(_ended(causes, session, others)), "; ".join(_ended(others, session))]
    all_killed = order == _KILLED and len(causes) >= session.info.world_size
    after = f" Then {parts[1]}." if parts[1] else ""
    if all_killed:
        after = " Either the job was stopped, or one of them died and the launcher stopped the others."
    yield Finding(
        "rank-ended-early",
        "warning" if all_killed or order == _STOPPED else "error",
        "",
        f"{upper_first(parts[0])}.{after}",
        {"ranks": numbers[:100], "count": len(numbers), "world_size": session.info.world_size},
        f"Read {_TOLD_BY.get(order, 'what is printed of the exception on {}').format(ranks_named(numbers))}. "
        "The launcher stops the other ranks once one has ended.",
        step=min((rank.progress.steps for rank in session.ranks if rank.info.rank in numbers), default=None),
    )


def _ranks_in(left: Iterable[Measurement]) -> list[int]:
    return [each.rank for each in left if each.rank is not None]


def _ended(left: Sequence[Measurement], session: Session, later: Sequence[Measurement] = ()) -> Iterator[str]:
    """Yield which ranks ended how, and in which step by what is in the session; ``later`` are the ranks that ended after them."""
    ranks: dict[str, list[int]] = {}
    for each in left:
        ranks.setdefault(each.text, []).append(each.rank or 0)
    waited = [each for each in later if each.figures["order"] == _IN_A_COLLECTIVE]
    for how, numbers in ranks.items():
        yield f"{ranks_named(numbers)} ended{_when(numbers, session, _ranks_in(waited))} {how}"


def _when(numbers: Sequence[int], session: Session, waited: Sequence[int]) -> str:
    """Return the step, by what the ranks wrote and by those that waited for them; "" if they recorded another model."""
    first = _first_end(numbers, session)
    if first is None:
        return " before a step was recorded," if _missing_ranks(session) & set(numbers) else ""
    if first.ended:
        return f" in step {first.steps:,}"
    # A process that was killed did more than it wrote, but no more than those that waited for it.
    last = _first_end(waited, session)
    if last is None or not last.ended or last.steps < first.steps:
        return f" after step {first.steps - 1:,}" if first.steps else " in step 0 or later"
    among = "" if first.steps == last.steps else "one of "
    return f" in {among}{steps_named(first.steps, last.steps)}"


def _first_end(numbers: Sequence[int], session: Session) -> Progress | None:
    """Return the progress of the rank that came least far; None if none of them recorded the model."""
    known = (rank.progress for rank in session.ranks if rank.info.rank in numbers)
    return min(known, key=lambda progress: progress.steps, default=None)


def rank_findings(session: Session, advised: Advised) -> Iterator[Finding]:
    """Yield a finding for each way in which ranks differ; none for a session of one process."""
    if not session.ranks:
        return
    yield from _missing(session)
    yield from _events(session)
    yield from _unequal(session)
    yield from _elsewhere(session)
    yield from _scales(session)
    yield from _steps(session)
    yield from _settings(session)
    yield from _summed(session, advised)


def rank_sentences(session: Session) -> Iterator[str]:
    """Yield sentences on the content of the ranks' sum; none for a session of one process."""
    if not session.ranks:
        return
    counted = [rank for rank in session.ranks if rank.progress.steps] or session.ranks
    ranks, world = [rank.info.rank for rank in counted], session.info.world_size
    whose = f"all {world:,} ranks" if len(ranks) >= world > 1 else f"{ranks_named(ranks)} of {world:,}"
    yield f"The counts of {whose} are added up; a step counts once."
    yield from _of_what(session)
    if session.precision.reduced:
        dtypes = " and ".join(map(format_name, session.precision.reduced))
        yield f"The ranks' gradients are summed in {dtypes}."
    if world > 1 and _held(session, WEIGHT_GRADIENT) & {"own"}:
        yield (
            f"A sum over {world:,} ranks can be {with_power(2.0 ** math.ceil(math.log2(world)))} times as large as the largest "
            "gradient of a rank: code that sums before it divides needs so much more headroom. DistributedDataParallel "
            "divides first, which flushes as many powers of two more where the sum is in FP16."
        )


def _held(session: Session, kind: str) -> set[str]:
    return {info.held for info in session.watched if info.kind == kind}


def _of_what(session: Session) -> Iterator[str]:
    gradients = _held(session, WEIGHT_GRADIENT)
    tensors = [rank.tensors for rank in session.ranks]
    if len(tensors) > 1 and min(tensors) and sum(tensors) == len(session.watched):
        yield "No two ranks watched one tensor: each counted layers of its own."
        return
    if "own" in gradients:
        yield "Weight gradients are each rank's own, before they are averaged over the ranks."
        yield from _averaged(session)
    if "shard" in gradients:
        yield "Weight gradients of sharded parameters are the ranks' shards, which together are the tensor, as in .grad."
    if any(info.replicas > 1 for info in session.watched):
        yield "What several ranks hold copies of is counted on the first of them."
    if any(info.kind in OUTPUT_KINDS for info in session.watched):
        yield "Activations and their gradients are what passed on each rank; a copy on another rank is counted, too."


def _averaged(session: Session) -> Iterator[str]:
    """Yield a sentence on the range of the averaged gradients in the last step of which it is known, beside the ranks' own."""
    pairs = [
        (each, window)
        for each in session.measurements
        for window in session.windows
        if each.what == "gradients-averaged" and window.first_step <= each.step <= window.last_step
    ]
    if not pairs:
        return
    last, window = max(pairs, key=lambda pair: pair[0].step)
    own = merge(each.histogram for key, each in window.tensors.items() if key.kind == WEIGHT_GRADIENT)
    counted = {
        name: count for name, count in last.figures.items() if _EXPONENT.fullmatch(name) and 0 < count < math.inf
    }
    averaged = {int(name): count for name, count in counted.items()}
    its_own = {own.min_exponent + place: float(count) for place, count in enumerate(own.counts) if count}
    if averaged and its_own:
        lower = _mean(its_own) - _mean(averaged)
        powers = f"{abs(lower):.1f} powers of two {'lower' if lower > 0 else 'higher'} than"
        yield (
            f"Averaged, as the optimizer was given them in step {last.step:,}, they reach from 2^{min(averaged)} to "
            f"2^{max(averaged)}, on average {powers if abs(lower) >= 0.05 else 'as large as'} the ranks' own in "
            f"{steps_named(window.first_step, window.last_step)} (2^{min(its_own)} to 2^{max(its_own)})."
        )


def _mean(counts: Mapping[int, float]) -> float:
    return sum(exponent * count for exponent, count in counts.items()) / sum(counts.values())


# -- ranks that differ --------------------------------------------------------------------------------------------------


def _missing_ranks(session: Session) -> set[int]:
    return {each.rank for each in session.measurements if each.what == MISSING and each.rank is not None}


def _missing(session: Session) -> Iterator[Finding]:
    # The way a rank ended explains why it left nothing.
    told = _known_of(session, ENDED_EARLY)
    gone = {rank: why for rank, why in _known_of(session, MISSING).items() if rank not in told}
    if not gone:
        return
    world = session.info.world_size
    left = (
        f"{upper_first(ranks_named(ranks))} of {world:,} left nothing that can be added{why and f': {why}'}."
        for why, ranks in _by_value(gone).items()
    )
    yield Finding(
        "rank-missing",
        "warning",
        "",
        f"{' '.join(left)} What is said here is of the others.",
        {"missing": list(gone)[:100], "count": len(gone), "world_size": world},
    )


def _known_of(session: Session, what: str) -> dict[int, str]:
    """Return the ranks of which this was measured, each with what is known of it."""
    return {each.rank: each.text for each in session.measurements if each.what == what and each.rank is not None}


def _by_value(found: Mapping[int, str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, value in found.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


def _events(session: Session) -> Iterator[Finding]:
    """Yield a finding if only some ranks saw infinities or NaNs, or if some saw far more of them."""
    counts = {rank.info.rank: rank.events for rank in session.ranks}
    hit = {rank: count for rank, count in counts.items() if count}
    if not hit or len(counts) < 2 or min(counts.values()) * 2 > max(counts.values()):
        return
    most = [rank for rank, count in counts.items() if count * 2 > max(counts.values())]
    first = session.events[0] if session.events else None
    begin = f", first at {first_line(first)}" if first is not None else ""
    fewer = "the others saw none" if len(hit) == len(most) else "the others fewer"
    yield Finding(
        "rank-events-differ",
        "warning",
        first.module if first is not None else "",
        f"Infinities or NaNs came on {ranks_named(most)} in {number_of(max(counts.values()), 'step')}, {fewer}{begin}.",
        {"events": {str(rank): count for rank, count in list(hit.items())[:100]}},
        "Look at that rank's data, and at its device if the data are as the others'.",
        step=first.step if first is not None else None,
    )


def _unequal(session: Session) -> Iterator[Finding]:
    for each in session.measurements:
        if each.what == UNEQUAL and each.rank is not None:
            yield Finding(
                "rank-replicas-unequal",
                "error",
                each.name,
                f"Rank {each.rank} does not hold the weights that rank {session.ranks[0].info.rank} holds: "
                f"{each.figures['tensors']:.0f} of {each.figures['of']:.0f} differ, {phrase(each.name, each.text)} among them.",
                {"rank": each.rank, **each.figures},
                "Something changes weights on one rank alone: load and initialise before wrapping, and step on all ranks.",
            )


def _elsewhere(session: Session) -> Iterator[Finding]:
    found = [each for each in session.measurements if each.what == DIFFERS and each.rank is not None]
    if not found:
        return
    worst = max(found, key=lambda each: (each.figures["tensors"], each.figures["beyond"]))
    powers = worst.figures["powers"]
    others = (
        f"; so do {ranks_named([each.rank for each in found if each is not worst and each.rank is not None])}"
        if found[1:]
        else ""
    )
    yield Finding(
        "rank-ranges-differ",
        "warning",
        worst.name,
        f"On rank {worst.rank} {worst.figures['tensors']:.0f} of {worst.figures['of']:.0f} tensors lie in other powers of two "
        f"than on the other ranks, by more than they change by themselves: {phrase(worst.name, worst.text)} is "
        f"{abs(powers):.1f} powers {'higher' if powers > 0 else 'lower'} on average{others}.",
        {"ranks": [each.rank for each in found[:100]], **worst.figures},
        "Look whether this rank gets other data, another batch size or another loss.",
        certainty=INFERRED,
    )


def _scales(session: Session) -> Iterator[Finding]:
    first, *others = session.ranks
    parted = {rank.info.rank: found for rank in others if (found := scales_part(first.progress, rank.progress))}
    if not parted:
        return
    rank, (step, one, other) = min(parted.items(), key=lambda pair: pair[1][0])
    yield Finding(
        "rank-scales-differ",
        "warning",
        "",
        f"From step {step} on {ranks_named(list(parted))} did not have the loss scale of rank {first.info.rank}: "
        f"{_scale(other)} on rank {rank}, {_scale(one)} on rank {first.info.rank}.",
        {"step": step, "ranks": list(parted)[:100], "scales": [one, other]},
        "Ranks that average their gradients need one scale: share found_inf over the ranks (torch.amp.GradScaler under "
        "DistributedDataParallel does by itself; sharded gradients need their scaler's support).",
        step=step,
    )


def _scale(scale: float | None) -> str:
    return "an unknown one" if scale is None else with_power(scale)


def _steps(session: Session) -> Iterator[Finding]:
    common, odd = _odd_ones(session.ranks, lambda rank: rank.progress.steps)
    told, known = _known_of(session, ENDED_EARLY), _known_of(session, UNFINISHED)
    running = [rank.info.rank for rank in session.ranks if not rank.progress.ended and rank.info.rank not in told]
    unfinished = {rank: known.get(rank) or _UNFINISHED for rank in running}
    # All running, or all ended.
    are_alike = len(unfinished) in (0, len(session.ranks)) and len(set(unfinished.values())) < 2
    is_meant = any(each.what == UNEVEN_INPUTS for each in session.measurements)
    if (not odd and (told or are_alike)) or (is_meant and not running and not told):
        return
    named = "; ".join(f"what {_ranks_of(group)} wrote ends at step {steps:,}" for steps, group in list(odd.items())[:4])
    ends = (
        f"{upper_first(named)}; the others' at {common:,}."
        if odd
        else f"What every rank wrote ends at step {common:,}."
    )
    still = "".join(f" {upper_first(ranks_named(ranks))} {why}." for why, ranks in _by_value(unfinished).items())
    yield Finding(
        "rank-steps-differ",
        # Where ranks ended early they are the finding.
        "info" if told or (unfinished and are_alike) else "warning",
        "",
        f"{ends}{still}",
        {
            "steps": {str(steps): [rank.info.rank for rank in group][:100] for steps, group in odd.items()},
            "others": common,
        },
        ""
        if told or unfinished
        else "Each rank counts its steps from where it was attached, and steps of one number are added up: attach on all ranks "
        "before the same step, or look why some took fewer.",
        step=min((*odd, common)),
    )


def _settings(session: Session) -> Iterator[Finding]:
    """Yield one finding on the ranks whose settings, versions or models differ from most ranks'."""
    parts: list[tuple[str, Callable[[RunInfo], str]]] = [
        ("model", lambda info: info.model or "?"),
        (
            "versions",
            lambda info: (
                ", ".join(f"{name} {version}" for name, version in info.versions.items()) or "unknown versions"
            ),
        ),
        ("patterns", lambda info: f"include={list(info.include)}, exclude={list(info.exclude)}"),
        ("kinds", lambda info: ", ".join(info.kinds)),
        ("sampling", lambda info: f"every={info.every}, watch={info.watch}, max_overhead={info.max_overhead}"),
    ]
    found: dict[str, list[str]] = {}
    # A damaged file tells nothing of its run, which is said elsewhere.
    told = [
        rank for rank in session.ranks if rank.info != RunInfo(rank=rank.info.rank, world_size=rank.info.world_size)
    ]
    for name, words in parts if told else ():
        common, odd = _odd_ones(told, lambda rank, words=words: words(rank.info))  # type: ignore[misc]
        found[name] = [f"{_ranks_of(group)}: {name} {value} (the others: {common})" for value, group in odd.items()]
    started = sorted(filter(None, (rank.info.started for rank in session.ranks)))
    if started and (apart := _seconds(started[0], started[-1])) > _SECONDS_APART:
        late = [rank.info.rank for rank in session.ranks if _seconds(started[0], rank.info.started) > _SECONDS_APART]
        found["start"] = [f"{ranks_named(late)} began up to {apart / 60:.0f} minutes after the first"]
    sentences = [sentence for each in found.values() for sentence in each]
    if sentences:
        yield Finding(
            "rank-settings-differ",
            "warning",
            "",
            f"The ranks are not alike: {'; '.join(sentences[:4])}{'; ...' if sentences[4:] else ''}.",
            {name: each[:20] for name, each in found.items() if each},
            "Ranks that began so far apart are of two runs, or one was started again: keep only one run's folders together."
            if "start" in found
            else "Start all ranks in the same environment and with the same options; counts are added up as they are.",
        )


def _seconds(first: str, second: str) -> float:
    import datetime

    try:
        one, other = map(datetime.datetime.fromisoformat, (first, second))
        return (other - one).total_seconds()
    except (TypeError, ValueError):
        return 0.0


def _summed(session: Session, advised: Advised) -> Iterator[Finding]:
    """Yield a finding if the ranks' gradients are summed in 16 bits."""
    world = session.info.world_size
    for dtype in session.precision.reduced:
        bits = SIGNIFICAND_BITS.get(dtype)
        if bits is None or world < 2:
            continue
        name, many = format_name(dtype), world >= 2**bits
        so = "one rank's share is rounded away beside the sum of the others" if many else "each addition rounds to it"
        yield Finding(
            "gradients-summed-in-16-bits",
            "warning" if many else "info",
            "",
            f"The gradients of {world:,} ranks are summed in {name}: {so} ({name} has {bits} significant bits).",
            {"dtype": dtype, "world_size": world, "headroom": advised.advice.headroom},
            "Sum in FP32: MixedPrecisionPolicy(reduce_dtype=torch.float32) for fully_shard; under DistributedDataParallel no "
            "compressing hook, and FP32 weights.",
        )


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
