"""From the windows of scales to one decision: whether a scale is needed, which, and how sure that is.

Every sentence on the loss scale, in the advice and in the findings, follows from the ``Decision``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mpinspect.numeric.formats import FLOAT16, FloatFormat
from mpinspect.ranges.analysis.drift import LONGEST_GROWTH_INTERVAL, growth_interval
from mpinspect.ranges.analysis.overflow_odds import Ceiling, log2_room, overflow_probability_bound
from mpinspect.ranges.analysis.report import DynamicSettings, LossScaleAdvice, ScaleConflict, TimeBlock
from mpinspect.ranges.analysis.scale_window import HEADROOM, GradientRange, ScaleWindow, scale_conflicts
from mpinspect.ranges.analysis.serving import LOST_L1_TOLERANCE
from mpinspect.ranges.session import TensorKey
from mpinspect.reporting.words import scale_of


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
    """A block of steps, its gradients and their window; None where it holds nothing that a scale should serve."""

    first_step: int
    last_step: int
    gradients: tuple[GradientRange, ...]
    window: ScaleWindow | None


@dataclass(frozen=True)
class Loss:
    """What scale 1 takes from one gradient that a scale has to serve, where it takes most.

    Args:
        gradient: over the run, or over the block of steps where it loses most.
        lost_l1_share, flushed_fraction: at scale 1, of what was seen; 0..1.
        log2_lowest: least k that serves it, by what was seen; over 0 where scale 1 does not.
        log2_certain: the same whatever was flushed before counting.
        steps: first and last step of that block; None for the whole run.
    """

    gradient: GradientRange
    lost_l1_share: float
    flushed_fraction: float
    log2_lowest: int
    log2_certain: int
    steps: tuple[int, int] | None = None

    @property
    def key(self) -> TensorKey:
        return self.gradient.key


@dataclass(frozen=True)
class Decision:
    """What is known of the loss scale that fits, once for every sentence.

    Args:
        needed: whether scale 1 fails a layer, or overflows; None where values flushed before counting leave it open.
        log2_scale: the scale that is recommended.
        window: of the whole run.
        ceiling: what the window's top rests on.
        losses: of the gradients that a scale has to serve, the one that loses most at scale 1 first.
        overflows, steps: how many of the steps seen overflow at ``log2_scale``, and how many were seen.
        conflicts: pairs of layers that no one scale serves.
        rules: what was asked for.
    """

    needed: bool | None
    log2_scale: int
    window: ScaleWindow
    ceiling: Ceiling
    losses: tuple[Loss, ...]
    overflows: int
    steps: int
    conflicts: tuple[ScaleConflict, ...]
    rules: ScaleRules

    @property
    def worst(self) -> Loss:
        """The gradient that loses most at scale 1."""
        return self.losses[0]

    @property
    def doubtful(self) -> Loss:
        """The gradient that needs the largest scale if everything that can have been flushed before counting was."""
        return max(self.losses, key=lambda loss: loss.log2_certain)

    @property
    def suffering(self) -> tuple[Loss, ...]:
        """The gradients that scale 1 does not serve, by what was seen; the worst first."""
        return tuple(loss for loss in self.losses if loss.log2_lowest > 0)

    @property
    def overflows_unscaled(self) -> bool:
        """Whether the largest gradients overflow at scale 1."""
        return self.window.log2_highest < 0

    @property
    def hides(self) -> bool:
        """Whether values flushed before counting may need a larger scale than those that were seen."""
        return self.needed is None or (self.needed and self.window.log2_certain > self.window.log2_lowest)


class Advised(NamedTuple):
    """The advice, and the decision that it states; None where nothing can be decided, as where the training diverged."""

    advice: LossScaleAdvice
    decision: Decision | None = None
    diverged: bool = False


def decide(
    gradients: Sequence[GradientRange],
    window: ScaleWindow,
    ceiling: Ceiling,
    peaks: Mapping[int, int],
    blocks: Sequence[Block],
    rules: ScaleRules,
) -> Decision:
    """Return the decision for these gradients.

    Args:
        gradients: all of them; at least one is to be served.
        window: their window over the whole run.
        ceiling: the window's top.
        peaks: for how many steps the peak exponent over all gradients was what; may be empty.
        blocks: windows over time, in order; may be empty.
        rules: what is asked for.
    """
    whole = window.serving(block.window for block in blocks if block.window)
    needed = _is_needed(whole)
    chosen = whole.choose(rules.headroom) if needed is not False else 0
    return Decision(
        needed,
        chosen,
        whole,
        ceiling,
        _losses(gradients, blocks, rules),
        sum(count for peak, count in peaks.items() if log2_room(peak, rules.format) < chosen),
        sum(peaks.values()),
        scale_conflicts(gradients, rules.format, rules.tolerance) if whole.is_empty else (),
        rules,
    )


def scale_advice(decision: Decision, blocks: Sequence[Block], reason: str) -> LossScaleAdvice:
    """Return the decision as users get it; ``reason`` says it in words."""
    format, chosen, window = decision.rules.format, decision.log2_scale, decision.window
    worst = decision.worst.gradient.histogram
    times = tuple(_time_block(block) for block in blocks)
    return LossScaleAdvice(
        available=True,
        needed=decision.needed,
        recommended=scale_of(chosen),
        lowest=scale_of(window.log2_lowest),
        highest=scale_of(window.log2_highest),
        headroom=window.log2_highest - chosen,
        flushed_fraction_unscaled=worst.flushed_fraction(format),
        flushed_fraction_scaled=worst.flushed_fraction(format, chosen),
        worst_layer=decision.worst.key.name,
        conflicts=decision.conflicts,
        samples=decision.steps - decision.overflows,
        overflow_probability_bound=overflow_probability_bound(decision.overflows, decision.steps),
        static_scale=scale_of(chosen),
        dynamic=DynamicSettings(
            scale_of(_at_first(decision, blocks)), growth_interval(times, decision.rules.growth_interval)
        ),
        blocks=times,
        reason=reason,
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


def _is_needed(window: ScaleWindow) -> bool | None:
    """By what was seen; None where what was flushed before counting may weigh enough to need one."""
    if window.log2_lowest > 0 or window.log2_highest < 0:
        return True
    return False if window.log2_certain <= 0 else None


def _losses(gradients: Sequence[GradientRange], blocks: Sequence[Block], rules: ScaleRules) -> tuple[Loss, ...]:
    """Return each gradient over the run; a block where it loses more counts where the run as a whole would hide that it fails."""
    losses = {gradient.key: _loss(gradient, rules) for gradient in gradients if gradient.is_served}
    for block in blocks:
        for gradient in block.gradients:
            known = losses.get(gradient.key)
            if known is None or not gradient.is_served:
                continue
            found = replace(_loss(gradient, rules), steps=(block.first_step, block.last_step))
            if found.log2_lowest > max(known.log2_lowest, 0):
                losses[gradient.key] = found

    def order(loss: Loss) -> tuple[bool, float, float]:
        share = max(loss.lost_l1_share, likely_hidden(loss.gradient, rules.format))
        return loss.log2_lowest > 0, share, loss.flushed_fraction

    return tuple(sorted(losses.values(), key=order, reverse=True))


def _loss(gradient: GradientRange, rules: ScaleRules) -> Loss:
    histogram, needs = gradient.histogram, gradient.needs(rules.format, rules.tolerance)
    return Loss(
        gradient,
        histogram.lost_l1_share(rules.format).estimate,
        histogram.flushed_fraction(rules.format),
        needs.log2_lowest,
        needs.log2_certain,
    )


def likely_hidden(gradient: GradientRange, format: FloatFormat) -> float:
    """Likely share of the L1 mass that scale 1 loses among the values flushed before counting, 0..1."""
    return gradient.seen.likely_hidden_l1_share() if gradient.seen.hidden_flush(format, 0) else 0.0


def _at_first(decision: Decision, blocks: Sequence[Block]) -> int:
    """Where a dynamic scaler begins: at the scale recommended; where none serves the run, as its first steps like it."""
    first = next((block.window for block in blocks if block.window), None)
    if first is None or not decision.window.is_empty:
        return decision.log2_scale
    return first.choose(decision.rules.headroom)


def _time_block(block: Block) -> TimeBlock:
    if block.window is None:
        return TimeBlock(block.first_step, block.last_step, None, None)
    return TimeBlock(block.first_step, block.last_step, block.window.log2_lowest, block.window.log2_highest)
