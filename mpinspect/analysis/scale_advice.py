"""From the window of scales to the advice: whether one is needed, which, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mpinspect.analysis.drift import LONGEST_GROWTH_INTERVAL, growth_interval
from mpinspect.analysis.overflow_odds import log2_room, overflow_probability_bound
from mpinspect.analysis.report import DynamicSettings, LossScaleAdvice, TimeBlock
from mpinspect.analysis.scale_window import HEADROOM, GradientRange, ScaleWindow, scale_conflicts
from mpinspect.analysis.scale_words import advice_reason
from mpinspect.analysis.serving import LOST_L1_TOLERANCE
from mpinspect.analysis.wording import scale_of
from mpinspect.formats import FLOAT16, FloatFormat


@dataclass(frozen=True)
class ScaleRules:
    """What is asked for.

    Args:
        format: the format that the scaled gradients are held in.
        headroom: powers of two to leave below the overflow.
        tolerance: lost L1 share that serves a layer, in (0, 1).
        growth_interval: steps, at least 1: an overflow once in so many is accepted.
    """

    format: FloatFormat = FLOAT16
    headroom: int = HEADROOM
    tolerance: float = LOST_L1_TOLERANCE
    growth_interval: int = LONGEST_GROWTH_INTERVAL

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance is a share of the L1 mass and must lie in (0, 1), not {self.tolerance}")
        if self.growth_interval < 1:
            raise ValueError(f"growth_interval is a number of steps, at least 1, not {self.growth_interval}")
        if self.headroom < 0:
            raise ValueError(f"headroom is a number of powers of two, at least 0, not {self.headroom}")


@dataclass(frozen=True)
class Block:
    """A block of steps and its window; None where it holds nothing that a scale should serve."""

    first_step: int
    last_step: int
    window: ScaleWindow | None


def scale_advice(
    gradients: Sequence[GradientRange],
    window: ScaleWindow,
    peaks: Mapping[int, int],
    blocks: Sequence[Block],
    rules: ScaleRules,
) -> LossScaleAdvice:
    """The advice for these gradients.

    Args:
        gradients: all of them; at least one is to be served.
        window: their window over the whole run.
        peaks: for how many steps the peak exponent over all gradients was what; may be empty.
        blocks: windows over time, in order; may be empty.
        rules: what is asked for.
    """
    format = rules.format
    needed = is_needed(gradients, window, rules)
    chosen = window.choose(rules.headroom) if needed is not False else 0
    worst = worst_gradient(gradients, format)
    overflows = sum(count for peak, count in peaks.items() if log2_room(peak, format) < chosen)
    steps = sum(peaks.values())
    odds = overflow_probability_bound(overflows, steps)
    conflicts = scale_conflicts(gradients, format, rules.tolerance) if window.is_empty else ()
    times = tuple(_time_block(block) for block in blocks)
    first = next((block.window for block in blocks if block.window), window)
    # As large as the whole run likes it, as far as the first steps allow: an overflow then costs a step, no more.
    at_first = replace(first, log2_ample=max(first.log2_ample, chosen))
    return LossScaleAdvice(
        available=True,
        needed=needed,
        recommended=scale_of(chosen),
        lowest=scale_of(window.log2_lowest),
        highest=scale_of(window.log2_highest),
        headroom=window.log2_highest - chosen,
        flushed_fraction_unscaled=worst.histogram.flushed_fraction(format),
        flushed_fraction_scaled=worst.histogram.flushed_fraction(format, chosen),
        worst_layer=worst.key.name,
        conflicts=conflicts,
        samples=steps - overflows,
        overflow_probability_bound=odds,
        static_scale=1.0 if needed is False else scale_of(_static(window, blocks).choose(rules.headroom)),
        dynamic=DynamicSettings(
            scale_of(at_first.choose(rules.headroom)), growth_interval(times, rules.growth_interval)
        ),
        blocks=times,
        reason=advice_reason(gradients, worst, window, conflicts, needed, chosen, format, (overflows, steps, odds)),
    )


def no_advice(reason: str) -> LossScaleAdvice:
    """No advice, and why."""
    return LossScaleAdvice(
        available=False,
        needed=None,
        recommended=None,
        lowest=None,
        highest=None,
        headroom=None,
        flushed_fraction_unscaled=None,
        flushed_fraction_scaled=None,
        worst_layer="",
        conflicts=(),
        samples=0,
        overflow_probability_bound=None,
        static_scale=None,
        dynamic=None,
        blocks=(),
        reason=reason,
    )


def is_needed(gradients: Sequence[GradientRange], window: ScaleWindow, rules: ScaleRules) -> bool | None:
    """Whether scale 1 fails a layer: by what was seen, or very likely by what was flushed before; None where that is open."""
    if window.log2_lowest > 0 or window.log2_highest < 0:
        return True
    if window.log2_certain <= 0:
        return False
    return True if any(g.is_served and likely_hidden(g, rules.format) > rules.tolerance for g in gradients) else None


def likely_hidden(gradient: GradientRange, format: FloatFormat) -> float:
    """Likely share of the L1 mass that scale 1 loses among the values flushed before counting, 0..1."""
    return gradient.seen.likely_hidden_l1_share() if gradient.seen.hidden_flush(format, 0) else 0.0


def worst_gradient(gradients: Sequence[GradientRange], format: FloatFormat) -> GradientRange:
    """Of the gradients that are served, the one that loses the largest share of its L1 mass at scale 1."""

    def loss(gradient: GradientRange) -> tuple[float, float]:
        share = gradient.histogram.lost_l1_share(format).estimate
        return max(share, likely_hidden(gradient, format)), gradient.histogram.flushed_fraction(format)

    return max((gradient for gradient in gradients if gradient.is_served), key=loss)


def _static(window: ScaleWindow, blocks: Sequence[Block]) -> ScaleWindow:
    """The window that holds in every block."""
    known = [window, *(block.window for block in blocks if block.window)]
    return ScaleWindow(
        max(part.log2_lowest for part in known),
        max(part.log2_certain for part in known),
        window.log2_ample,
        min(part.log2_highest for part in known),
    )


def _time_block(block: Block) -> TimeBlock:
    if block.window is None:
        return TimeBlock(block.first_step, block.last_step, None, None)
    return TimeBlock(block.first_step, block.last_step, block.window.log2_lowest, block.window.log2_highest)
