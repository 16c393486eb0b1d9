"""Recommends a loss scale for the gradients of a session, or of bare histograms."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.numeric.formats import FLOAT16, FloatFormat, FormatLike, as_format, floor_log2
from mpinspect.ranges.analysis.drift import (
    LONGEST_GROWTH_INTERVAL,
    block_histograms,
    divergence,
    has_finite_gradients,
    time_blocks,
)
from mpinspect.ranges.analysis.evidence import Evidence, evidence
from mpinspect.ranges.analysis.noise import is_rounding_noise, rounding_noise_ceilings
from mpinspect.ranges.analysis.overflow_odds import Ceiling, log2_highest, overflowed_at
from mpinspect.ranges.analysis.ranges import tensor_infos
from mpinspect.ranges.analysis.report import LossScaleAdvice
from mpinspect.ranges.analysis.scale_advice import Advised, Block, Decision, ScaleRules, decide, no_advice, scale_advice
from mpinspect.ranges.analysis.scale_window import HEADROOM, GradientRange, gradient_ranges, scale_window
from mpinspect.ranges.analysis.scale_words import EVERY_STEP_OVERFLOWED, advice_reason, nothing_to_serve, scale_unknown
from mpinspect.ranges.analysis.serving import LOST_L1_TOLERANCE
from mpinspect.ranges.analysis.visibility import Visibility, always_zero
from mpinspect.ranges.kinds import GRADIENT_KINDS
from mpinspect.ranges.session import Event, Session
from mpinspect.ranges.windows.tensors import TensorKey, TensorWindow, add_counts
from mpinspect.ranges.windows.window import Window

#: Largest |k| such that 2^k and its inverse are normal numbers in FP32.
FARTHEST = 126
#: The tensor kind of bare histograms.
_GRADIENT = "gradient"


def recommend_loss_scale(
    histograms: Session | ExponentHistogram | Mapping[str, ExponentHistogram] | Iterable[ExponentHistogram],
    *,
    format: FormatLike = FLOAT16,
    headroom: int = HEADROOM,
    tolerance: float = LOST_L1_TOLERANCE,
    growth_interval: int = LONGEST_GROWTH_INTERVAL,
) -> LossScaleAdvice:
    """Return the loss scale that fits these gradients.

    Args:
        histograms: histograms of unscaled gradients, one per layer: a mapping by name, an iterable (the layers are then
            named "0", "1", ...) or a single histogram. Or a whole session, which also gives each step's peak exponent
            (and so the confidence), drift and rounding noise.
        format: the storage format of the scaled gradients: a FloatFormat, a name or a dtype.
        headroom: powers of two to leave below the overflow, at least 0.
        tolerance: the largest share of its L1 mass that a layer may lose, in (0, 1).
        growth_interval: number of steps; an overflow probability of 1/growth_interval per step is accepted.

    A loss that is a mean over N samples already scales the gradients by 1/N. Changing the batch size by a factor of N,
    or accumulating gradients over N micro-batches, therefore moves the whole window by log2 N powers of two.

    Raises:
        ValueError: an option is out of its range, or ``format`` is unknown.
        TypeError: ``histograms`` has another type.
    """
    rules = ScaleRules(as_format(format), headroom, tolerance, growth_interval)
    if isinstance(histograms, Session):
        session = replace(histograms, progress=histograms.reached())
        seen = evidence(session)
        totals = seen.session.totals()
        ceilings = rounding_noise_ceilings(tensor_infos(session, totals), totals)
        return advise(seen, totals, ceilings, noise_of(totals, ceilings), rules).advice
    gradients = [
        GradientRange(TensorKey(name, _GRADIENT), Visibility(histogram))
        for name, histogram in _by_name(histograms).items()
    ]
    window = scale_window(gradients, rules.format, rules.tolerance)
    if window is None:
        return no_advice(nothing_to_serve(gradients))
    decision = decide(gradients, window, Ceiling(window.log2_highest), {}, (), rules)
    return _advised(decision, (), gradients).advice


def noise_of(totals: Mapping[TensorKey, TensorWindow], ceilings: Mapping[TensorKey, float]) -> frozenset[TensorKey]:
    """Return the keys of the tensors that hold only rounding noise."""
    return frozenset(key for key, ceiling in ceilings.items() if is_rounding_noise(totals[key].histogram, ceiling))


def advise(
    seen: Evidence,
    totals: dict[TensorKey, TensorWindow],
    ceilings: dict[TensorKey, float],
    noise: frozenset[TensorKey],
    rules: ScaleRules,
) -> Advised:
    """Return the advice for a session's evidence, given its totals, noise ceilings and rounding-noise tensors."""
    session, format = seen.session, rules.format
    scaled = _scaled(session, totals)
    gradients = gradient_ranges({key: Visibility.of(totals[key]) for key in scaled}, ceilings, noise)
    if not session.progress.scale_known:
        return Advised(no_advice(scale_unknown(session, gradients, rules.format, rules.tolerance)))
    if not session.windows and seen.left_out:
        return Advised(no_advice(seen.left_out))
    groups = time_blocks(session.windows)
    peaks = [add_counts(part.gradient_peaks for part in group) for group in groups]
    overflowed = _overflowed(session, format)
    exact = [_without_broken(session, group, of_steps) for group, of_steps in zip(groups, peaks, strict=True)]
    ceiling = log2_highest(
        [each for each in peaks if each], format, rules.growth_interval, [each for each in exact if each]
    )
    if ceiling is not None:
        if overflowed_at(overflowed) is not None and ceiling.log2_of_finite is None:
            return Advised(no_advice(EVERY_STEP_OVERFLOWED))
        ceiling = ceiling.below(overflowed_at(overflowed))
    window = scale_window(gradients, format, rules.tolerance)
    if window is None:
        return Advised(no_advice(nothing_to_serve(gradients, session)))
    if ceiling is None:
        ceiling = Ceiling(window.log2_highest).below(overflowed_at(overflowed))
    window = replace(window, log2_highest=ceiling.log2_highest)
    diverged = divergence(session.windows)
    if diverged:
        return Advised(no_advice(diverged), diverged=True)
    blocks = []
    for group, of_steps in zip(groups, peaks, strict=True):
        of_block = {key: each for key, each in block_histograms(group).items() if key in scaled}
        found = gradient_ranges(of_block, ceilings, noise)
        first, last = group[0].first_step, max(part.last_step for part in group)
        served = scale_window(found, format, rules.tolerance)
        top = log2_highest([of_steps], format, rules.growth_interval)
        own = overflowed_at(event for event in overflowed if first <= event.step <= last)
        if top is not None:
            # Use the whole run's margin: a margin from one block's few steps would differ.
            room = top.log2_highest + top.margin
            top = Ceiling(room - ceiling.margin, ceiling.margin).reaching(0).below(own)
            served = served and replace(served, log2_highest=top.log2_highest)
        blocks.append(Block(first, last, found, served, own is not None))
    zeros = () if format != FLOAT16 else tuple(always_zero(totals))
    decision = decide(gradients, window, ceiling, add_counts(peaks), blocks, rules, zeros)
    return _advised(decision, blocks, gradients, seen.left_out)


def _advised(
    decision: Decision, blocks: Sequence[Block], gradients: Sequence[GradientRange], left_out: str = ""
) -> Advised:
    window = decision.window
    if window.log2_highest < -FARTHEST or window.log2_lowest > FARTHEST:
        return Advised(no_advice("No scale that FP32 holds would bring these gradients into the format's range."))
    return Advised(scale_advice(decision, blocks, advice_reason(decision, gradients, left_out)), decision)


def _scaled(session: Session, totals: Mapping[TensorKey, TensorWindow]) -> Collection[TensorKey]:
    """Return the keys of the tensors that a loss scale has to serve: all, or only the 16-bit ones of a run in 16 bits.

    An FP32 gradient among 16-bit ones is known to be unrounded only if hooks captured it, as the ledger shows.
    """
    narrow = {key: window for key, window in totals.items() if window.passed_through != "float32"}
    is_narrow = session.precision.weights and any(key.kind in GRADIENT_KINDS for key in narrow)
    return (narrow if is_narrow else totals).keys()


def _without_broken(session: Session, group: list[Window], peaks: dict[int, int]) -> dict[int, int]:
    """Return a block's peaks without the peaks that are only lower bounds.

    In FP16 an overflow of any size at scale 2^k appears as a peak of 2^(16 - k): these exponents are left out. In other
    formats, windows with non-finite gradients are left out.
    """
    if FLOAT16.name not in session.passed_through():
        return add_counts(part.gradient_peaks for part in group if has_finite_gradients(part))
    first, last = group[0].first_step, max(part.last_step for part in group)
    shown = {
        FLOAT16.max_exponent + 1 - floor_log2(scale)
        for scale, start, end in session.progress.scale_spans()
        if scale and start <= last and end > first
    }
    return {exponent: count for exponent, count in peaks.items() if exponent not in shown}


def _overflowed(session: Session, format: FloatFormat) -> list[Event]:
    """Return the run's events if the format's range is no wider than FP16's: no loss scale makes infinities in FP32's range."""
    return list(session.events) if format.max_exponent <= FLOAT16.max_exponent else []


def _by_name(
    histograms: ExponentHistogram | Mapping[str, ExponentHistogram] | Iterable[ExponentHistogram],
) -> dict[str, ExponentHistogram]:
    if isinstance(histograms, ExponentHistogram):
        return {"0": histograms}
    if isinstance(histograms, Mapping):
        named = {str(name): histogram for name, histogram in histograms.items()}
    elif isinstance(histograms, Iterable):
        named = {str(index): histogram for index, histogram in enumerate(histograms)}
    else:
        raise TypeError(_wrong_type(histograms))
    for histogram in named.values():
        if not isinstance(histogram, ExponentHistogram):
            raise TypeError(_wrong_type(histogram))
    return named


def _wrong_type(found: object) -> str:
    return (
        f"histograms must hold ExponentHistogram, not {type(found).__name__}: count a tensor first, "
        "with mpinspect.count_exponents(tensor)"
    )
