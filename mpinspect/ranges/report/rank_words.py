"""Sentences on the content of the ranks' sum."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from mpinspect.numeric.exponents import merge
from mpinspect.ranges.analysis.ranks import ranks_named
from mpinspect.ranges.kinds import OUTPUT_KINDS, WEIGHT_GRADIENT
from mpinspect.ranges.session import Session
from mpinspect.reporting.words import format_name, steps_named, with_power

#: The figures of averaged gradients that count elements.
_EXPONENT = re.compile(r"-?[0-9]{1,4}")


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
        yield "Tensors with copies on several ranks are counted on the first of them."
    if any(info.kind in OUTPUT_KINDS for info in session.watched):
        yield "Activations and their gradients are counted on every rank, copies included."


def _averaged(session: Session) -> Iterator[str]:
    """Yield a sentence on the range of the averaged gradients in the last step in which it is known, and on the ranks' own."""
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
        powers = "as large as"
        if lower >= 0.05:
            powers = f"{lower:.1f} powers of two lower than"
        elif lower <= -0.05:
            powers = f"{-lower:.1f} powers of two higher than"
        yield (
            f"Averaged, as the optimizer was given them in step {last.step:,}, they reach from 2^{min(averaged)} to "
            f"2^{max(averaged)}, on average {powers} the ranks' own in "
            f"{steps_named(window.first_step, window.last_step)} (2^{min(its_own)} to 2^{max(its_own)})."
        )


def _mean(counts: Mapping[int, float]) -> float:
    return sum(exponent * count for exponent, count in counts.items()) / sum(counts.values())
