"""Puts the decision on the loss scale into sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpinspect.numeric.formats import FloatFormat
from mpinspect.ranges.analysis.drift import block_histograms, time_blocks
from mpinspect.ranges.analysis.overflow_odds import overflow_probability_bound
from mpinspect.ranges.analysis.scale_advice import Decision
from mpinspect.ranges.analysis.scale_window import HEADROOM, GradientRange, scale_window
from mpinspect.ranges.kinds import WEIGHT_GRADIENT, phrase
from mpinspect.ranges.session import Session
from mpinspect.reporting.words import (
    at_most,
    filled,
    format_name,
    number_of,
    percent,
    some,
    steps_named,
    upper_first,
    with_power,
)

#: The reason why there is no advice if every step overflowed, and a remedy.
EVERY_STEP_OVERFLOWED = (
    "Every sampled step overflowed by an unknown amount. Let a dynamic scaler lower its scale, or run some steps with "
    "autocast off to measure the gradients."
)

#: Lost share above which the sentence on a served layer also explains why the loss is acceptable.
_WORTH_A_WORD = 1e-3

#: A larger bound of the share of overflowing steps is not printed: "fewer than one step in 3" alarms without information.
_RARE = 0.1


def advice_reason(decision: Decision, gradients: Sequence[GradientRange], left_out: str = "") -> str:
    """Return the reason for the advice: the effect of scale 1, the window and the confidence."""
    return " ".join(sentence for sentence in _reason(decision, gradients, left_out) if sentence)


def _reason(decision: Decision, gradients: Sequence[GradientRange], left_out: str) -> Iterator[str]:
    yield _at_scale_1(decision, gradients)
    yield _window(decision, gradients)
    yield _never_finite(gradients)
    yield _overflowed(decision)
    yield _hidden(decision)
    yield _confidence(decision)
    if {gradient.key.kind for gradient in gradients} == {WEIGHT_GRADIENT}:
        yield "Activation gradients were not captured; they often need a larger scale than weight gradients."
    yield left_out


def nothing_to_serve(gradients: Sequence[GradientRange], session: Session | None = None) -> str:
    """Return why there is no advice although the loss scale is known, and a remedy."""
    if any(gradient.histogram.total for gradient in gradients):
        if any(gradient.is_noise for gradient in gradients):
            return "The only gradients with a value are zero in theory and hold rounding noise."
        if any(gradient.seen.hidden for gradient in gradients):
            return (
                "Every gradient seen is zero, infinite or NaN, and had been rounded to a narrow format before counting. Begin "
                "with torch's default, 2^16, or run some steps with autocast off to measure the gradients."
            )
        return "Every gradient seen is zero, infinite or NaN; see the events for where that began."
    if session is not None and session.progress.backwards and not session.progress.sampled_steps:
        return "No step was sampled; run on, or lower every=."
    if session is not None and session.ended_by is not None:
        return "No gradient was seen: an exception ended the run before any arrived."
    if session is not None and session.precision.outputs:
        return "No gradient was seen: forwards ran without a backward. The loop may be skipping every non-finite loss."
    return "No gradient was seen; run forward, backward and the optimizer's step inside the inspector's block."


def scale_unknown(session: Session, gradients: Sequence[GradientRange], format: FloatFormat, tolerance: float) -> str:
    """Return why an unknown loss scale prevents advice, and how the gradients, still scaled, fit the format."""
    cause = (session.progress.scale_unknown_reason or "the loss scale of a backward is not known").rstrip(".")
    ask = "Give the scaler (scalers=) or the scale (loss_scale=; mpinspect run --loss-scale)."
    if "loss_scale=" in cause:
        ask = ""
    return " ".join(
        filter(None, (f"{upper_first(cause)}.", _as_they_arrive(session, gradients, format, tolerance), ask))
    )


def _as_they_arrive(session: Session, gradients: Sequence[GradientRange], format: FloatFormat, tolerance: float) -> str:
    """Return how the still-scaled gradients fit the format; "" if the scale was known for part of the run."""
    if any(change.scale is not None for change in session.progress.scales):
        # Some gradients were unscaled before counting and some were not, so the counts are mixed.
        return ""
    name, window = format_name(format.name), scale_window(gradients, format, tolerance)
    if any(gradient.histogram.infs for gradient in gradients) or (window and window.log2_highest < 0):
        return f"As the gradients arrive, they overflow {name}: the current factor of the loss is too large."
    if window is None:
        return ""
    if window.log2_lowest > 0:
        return (
            f"As the gradients arrive, {name} flushes too much of them. Multiply the current factor of the loss, even if "
            f"unknown, by 2^{window.log2_lowest} or more; up to 2^{window.log2_highest} no gradient seen would overflow."
        )
    worst = max(
        (gradient for gradient in gradients if not gradient.is_noise),
        key=lambda gradient: gradient.seen.lost_l1_share(format).high,
    )
    is_rest = bool(session.events) or any(gradient.histogram.nonfinite for gradient in gradients)
    finite = "finite " * is_rest
    high, hidden = worst.seen.lost_l1_share(format).high, any(gradient.seen.hidden for gradient in gradients)
    if high <= tolerance:
        most = at_most(max((high, *_in_parts(session, gradients, format))))
        much = f"{most} of the sum of magnitudes of any of them (an upper bound){_noise_apart(gradients)}"
        flushed = f"As the {finite}gradients arrive, {name} flushes {much}"
    elif hidden:
        flushed = f"How much of {phrase(*worst.key)} {name} flushed before it could be counted is not known"
    else:
        flushed = f"As the {finite}gradients arrive, {name} flushes little of the counted values"
    return f"{flushed}. Multiplied by up to 2^{window.log2_highest}, no {finite}gradient seen would overflow."


def _in_parts(session: Session, gradients: Sequence[GradientRange], format: FloatFormat) -> list[float]:
    """Return, for each gradient in each part of the run, an upper bound of the share that the format flushes."""
    judged = {gradient.key for gradient in gradients if not gradient.is_noise}
    parts = (part for block in time_blocks(session.windows) for part in block_histograms(block).items())
    return [seen.lost_l1_share(format).high for key, seen in parts if key in judged and not seen.histogram.nonfinite]


def in_steps(steps: tuple[int, int] | None) -> str:
    """Return " in steps 800-999", to follow a figure about a block of steps; "" for a figure about the whole run."""
    return filled(" in {}", steps and steps_named(*steps))


def _noise_apart(gradients: Sequence[GradientRange]) -> str:
    """Return words that leave out gradients of rounding noise; "" without such gradients."""
    return ", rounding noise apart" * any(gradient.is_noise for gradient in gradients)


def _at_scale_1(decision: Decision, gradients: Sequence[GradientRange]) -> str:
    worst, name = decision.worst, format_name(decision.rules.format.name)
    what = phrase(worst.key.name, worst.key.kind)
    lost = percent(worst.lost_l1_share)
    if decision.needed is False:
        none = upper_first(f"{_by_the_finite(decision)}no loss scaling is needed")
        if not worst.lost_l1_share:
            return f"{none}: at scale 1 {name} flushes no counted value{_noise_apart(gradients)}."
        told = f"{none}: at scale 1 {name} loses {lost} of the sum of magnitudes of {what}, the worst layer"
        if worst.lost_l1_share <= _WORTH_A_WORD:
            return f"{told}."
        return f"{told}; losses up to {percent(decision.rules.tolerance)} have not changed any training measured."
    if decision.needed is None and decision.zeros:
        return (
            f"Whether a loss scale is needed is not known: every gradient of {some(list(decision.zeros), 3)} was zero when it "
            "was counted, perhaps through rounding. The other gradients need none."
        )
    if decision.needed is None and decision.likely_needed:
        return (
            f"Whether a loss scale is needed is not known, but it is likely: {phrase(*decision.likely.key)} had been rounded "
            "before counting, and the counts are densest just above the smallest value, so some zeros were probably flushed "
            "values."
        )
    if decision.needed is None:
        doubtful = decision.doubtful.key
        return (
            f"Whether a loss scale is needed is not known: {phrase(*doubtful)} had been rounded before counting, and the "
            "values that this flushed may be too important to lose."
        )
    if decision.overflows_unscaled and decision.window.is_empty:
        return f"At scale 1 the largest gradients overflow {name}."
    if decision.overflows_unscaled:
        return f"A loss scale below 1 is needed: at scale 1 the largest gradients overflow {name}."
    return (
        f"A loss scale is needed: at scale 1 {name} flushes {percent(worst.flushed_fraction)} of the non-zero elements of "
        f"{what}{in_steps(worst.steps)}, about {lost} of their sum of magnitudes."
    )


def _window(decision: Decision, gradients: Sequence[GradientRange]) -> str:
    window, chosen = decision.window, decision.log2_scale
    if window.is_empty:
        return _no_scale(decision)
    if decision.needed is None:
        return f"{upper_first(_by_the_finite(decision))}2^{window.log2_highest} is the largest safe scale."
    noise = _noise_apart(gradients)
    span = (
        f"Every scale from 2^{window.log2_lowest} to 2^{window.log2_highest} serves every "
        f"{'finite ' * (not decision.all_finite)}gradient seen{noise}, without overflow"
    )
    if decision.needed is False:
        return f"{span}."
    spare = window.log2_highest - chosen
    return f"{span}; {with_power(2.0**chosen)} leaves {number_of(spare, 'power')} of two of headroom."


def _by_the_finite(decision: Decision) -> str:
    """Return the words that limit a statement to finite gradients; "" if all gradients were finite."""
    return "judging by the finite gradients " * (not decision.all_finite)


def _never_finite(gradients: Sequence[GradientRange]) -> str:
    """Return a sentence on gradients without a finite value, which the window does not cover; "" without any."""
    names = [
        gradient.key.name for gradient in gradients if gradient.histogram.nonfinite and not gradient.histogram.nonzero
    ]
    if not names:
        return ""
    return f"No finite gradient of {some(list(dict.fromkeys(names)))} was seen, so the window does not cover these."


def _no_scale(decision: Decision) -> str:
    largest = f"{_by_the_finite(decision)}{with_power(2.0**decision.log2_scale)} is the largest safe scale"
    pair = next(iter(decision.conflicts), None)
    if pair is not None and pair.needs_large != pair.needs_small:
        return (
            f"No one scale serves every layer: {pair.needs_large!r} needs at least 2^{pair.log2_lowest}, "
            f"{pair.needs_small!r} overflows above 2^{pair.log2_highest}; {largest}."
        )
    needs = decision.neediest
    return (
        f"No one scale serves the whole run: {needs.key.name!r} needs at least 2^{needs.log2_lowest}{in_steps(needs.steps)}, and "
        f"{largest}."
    )


def _overflowed(decision: Decision) -> str:
    """Return why the window's top is below the largest scale that the counts allow; "" if it is not."""
    ceiling, top = decision.ceiling, decision.window.log2_highest
    if ceiling.log2_overflowed is not None and ceiling.log2_overflowed == top + 1:
        of_finite = ceiling.log2_of_finite
        told = (
            f"The run overflowed at 2^{ceiling.log2_overflowed} by an unknown amount. The window excludes these gradients: "
            "keep a scaler that skips such steps."
        )
        if of_finite is None or of_finite <= top + HEADROOM:
            return told
        return f"{told} In the other sampled steps no gradient would overflow up to 2^{of_finite}."
    if not ceiling.lacking:
        return _in_reserve(decision)
    lacking = (
        f"The spread of the peaks calls for {number_of(ceiling.lacking, 'power')} of two more in reserve than 2^{top} leaves: "
        "unseen steps, or steps with another seed, may overflow there. A scaler skips such steps."
    )
    return " ".join(filter(None, (_in_reserve(decision), lacking)))


def _in_reserve(decision: Decision) -> str:
    """Return the sentence on the reserve at the window's top; "" without one."""
    ceiling, top = decision.ceiling, decision.window.log2_highest
    if not ceiling.margin:
        return ""
    below = f"still {number_of(ceiling.margin, 'power')} of two below the overflow"
    if not decision.all_finite:
        # If some steps were not finite, the spread of the finite ones is no evidence.
        return (
            f"At 2^{top} the largest finite gradient seen is {below}, as a margin. Steps with inf or NaN are excluded."
        )
    return (
        f"At 2^{top} the largest gradient seen is {below}, in reserve for unseen steps: judging by the spread of the "
        f"peaks so far, fewer than one step in {decision.rules.growth_interval} would overflow (95% confidence) in this run; "
        "another seed's gradients may be larger."
    )


def _hidden(decision: Decision) -> str:
    """Return the sentence on values flushed before counting; "" if they cannot change the scale."""
    window = decision.window
    if not decision.hides:
        return ""
    keeps = window.log2_certain <= window.log2_highest
    if decision.needed is None and decision.zeros:
        return (
            f"Whether {with_power(2.0**decision.log2_scale)} is enough for the gradients that were zero is not known. To find "
            "out, compute the gradients of a few batches in FP32 (autocast off, scale 1)."
        )
    certain = with_power(2.0**window.log2_certain)
    if decision.needed is None and keeps:
        return (
            f"{certain} would be enough in any case. To find out whether one is needed, run at a loss scale of at least "
            f"2^{window.log2_certain}, or count a few batches' gradients in FP32 (autocast off, scale 1)."
        )
    if decision.needed is None:
        return "To find out whether one is needed, count a few batches' gradients in FP32 (autocast off, scale 1)."
    if keeps:
        return f"Smaller gradients were flushed before they could be counted; whatever they were, {certain} would keep them."
    return (
        "Smaller gradients were flushed before they could be counted; no scale without overflow is sure to keep them."
    )


def _confidence(decision: Decision) -> str:
    overflows, steps, chosen = decision.overflows, decision.steps, decision.log2_scale
    # The bound at the window's top also holds at scale 1. Steps that were not finite prove nothing, since only their finite
    # values were counted.
    if (decision.needed is False and decision.ceiling.margin) or not decision.all_finite:
        return ""
    if not steps:
        return "The probability of an overflow is unknown without the peaks of single steps."
    counted = number_of(steps, "sampled step")
    bound = overflow_probability_bound(overflows, steps)
    assert bound is not None
    rarer = f"fewer than one step in {int(1 / bound)} would (95% confidence)"
    if overflows and bound <= _RARE:
        return f"{overflows} of {counted} would overflow at 2^{chosen}; {rarer}."
    if overflows:
        return f"{overflows} of {counted} would overflow at 2^{chosen}."
    if bound <= _RARE:
        return f"No overflow at 2^{chosen} in {counted}, so {rarer}."
    # The window already states that no observed value overflows.
    return ""
