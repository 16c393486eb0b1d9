"""The advice on the loss scale in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from mpinspect.analysis.report import ScaleConflict
from mpinspect.analysis.scale_window import GradientRange, ScaleWindow
from mpinspect.analysis.wording import format_name, percent, power, tensor
from mpinspect.formats import FloatFormat
from mpinspect.session import WEIGHT_GRADIENT, Session

#: Overflows at the recommended scale, steps looked at, and the bound of the probability.
Odds = tuple[int, int, float | None]


def advice_reason(
    gradients: Sequence[GradientRange],
    worst: GradientRange,
    window: ScaleWindow,
    conflicts: tuple[ScaleConflict, ...],
    needed: bool | None,
    chosen: int,
    format: FloatFormat,
    odds: Odds,
) -> str:
    """Why this scale: what scale 1 would do, the window, how sure."""
    sentences = [_at_scale_1(worst, window, needed, format)]
    sentences.append(_conflict(conflicts[0], chosen) if conflicts else _window(window, needed, chosen))
    if needed is None or (needed and window.log2_certain > window.log2_lowest):
        sentences.append(
            "Smaller gradients were flushed before they could be counted; whatever they were, "
            f"{power(window.log2_certain)} would keep them."
        )
    sentences.append(_confidence(odds, chosen))
    if {gradient.key.kind for gradient in gradients} == {WEIGHT_GRADIENT}:
        sentences.append(
            "Activation gradients were not captured; they often need a larger scale than weight gradients."
        )
    return " ".join(sentence for sentence in sentences if sentence)


def nothing_to_serve(gradients: Sequence[GradientRange], session: Session | None = None) -> str:
    """Why there is no advice although the scale is known, and what to do."""
    if any(gradient.histogram.total for gradient in gradients):
        if any(gradient.is_noise for gradient in gradients):
            return "No advice: the only gradients with a value are zero in theory and hold rounding noise."
        if any(gradient.seen.hidden for gradient in gradients):
            return (
                "No advice: every gradient seen is zero, infinite or NaN, and had been rounded to a narrow format before: "
                "take some steps with autocast off, or start with a loss scale of 2^16."
            )
        return "No advice: every gradient seen is zero, infinite or NaN; see the events for where that began."
    if session is not None and session.progress.backwards and not session.progress.sampled_steps:
        return "No advice: no step was sampled; run on, or lower every=."
    return (
        "No advice: no gradient was seen; run forward, backward and the optimizer's step inside the inspector's block."
    )


def _at_scale_1(worst: GradientRange, window: ScaleWindow, needed: bool | None, format: FloatFormat) -> str:
    name = format_name(format.name)
    lost = worst.histogram.lost_l1_share(format).estimate
    flushed = worst.histogram.flushed_fraction(format)
    what = tensor(worst.key.name, worst.key.kind)
    if needed is False:
        return (
            f"No loss scaling is needed: at scale 1 {name} loses {percent(lost)} of the sum of magnitudes of {what}, "
            "the worst layer."
        )
    if needed is None:
        return f"Whether a loss scale is needed is not known: {what} had been rounded before counting."
    if window.log2_highest < 0 and window.is_empty:
        return f"At scale 1 the largest gradients overflow {name}."
    if window.log2_highest < 0:
        return f"A loss scale below 1 is needed: at scale 1 the largest gradients overflow {name}."
    if window.log2_lowest <= 0:
        return f"A loss scale is very likely needed: {what} crowd at the lower end of what could be counted."
    return (
        f"A loss scale is needed: at scale 1 {name} flushes {percent(flushed)} of the non-zero elements of {what}, "
        f"{percent(lost)} of their sum of magnitudes."
    )


def _window(window: ScaleWindow, needed: bool | None, chosen: int) -> str:
    span = f"every scale from 2^{window.log2_lowest} to 2^{window.log2_highest} serves every layer without overflow"
    if needed is False:
        return f"{span[0].upper()}{span[1:]}."
    spare = window.log2_highest - chosen
    return f"{span[0].upper()}{span[1:]}; {power(chosen)} leaves {spare} powers of two of headroom."


def _conflict(pair: ScaleConflict, chosen: int) -> str:
    return (
        f"No one scale serves every layer: {pair.needs_large!r} needs at least 2^{pair.log2_lowest}, "
        f"{pair.needs_small!r} overflows above 2^{pair.log2_highest}; {power(chosen)} is the largest without overflow."
    )


def _confidence(odds: Odds, chosen: int) -> str:
    overflows, steps, bound = odds
    if bound is None:
        return "How likely an overflow is can't be told without the peaks of single steps."
    if overflows:
        return f"{overflows} of {steps} sampled steps would overflow at 2^{chosen}: P <= {bound:.2g} a step (95%)."
    return f"No overflow in {steps} sampled steps: P <= {bound:.2g} a step (95%)."
