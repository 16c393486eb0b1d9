"""Turns windows of safe scales into one decision: whether a loss scale is needed, which one, and with what confidence.

Every sentence on the loss scale, in the advice and in the findings, is derived from the ``Decision``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mpinspect.numeric.formats import BFLOAT16, FLOAT16, FloatFormat
from mpinspect.ranges.analysis.drift import LONGEST_GROWTH_INTERVAL, growth_interval
from mpinspect.ranges.analysis.overflow_odds import Ceiling, log2_room, overflow_probability_bound
from mpinspect.ranges.analysis.report import DynamicSettings, LossScaleAdvice, ScaleConflict, TimeBlock
from mpinspect.ranges.analysis.scale_window import HEADROOM, GradientRange, ScaleWindow
from mpinspect.ranges.analysis.serving import LOST_L1_TOLERANCE
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.reporting.words import scale_of

#: Maximum number of conflicting pairs of layers reported.
MAX_CONFLICTS = 5


@dataclass(frozen=True)
class ScaleRules:
    """The requirements on a loss scale.

    Args:
        format: the format in which the scaled gradients are stored.
        headroom: powers of two to leave below the overflow.
        tolerance: largest share of its L1 mass that a layer may lose, in (0, 1).
        growth_interval: number of steps, at least 1; one overflow in that many steps is accepted.
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
    """A block of steps, its gradients, their window (None without a gradient to serve), and whether the run overflowed."""

    first_step: int
    last_step: int
    gradients: tuple[GradientRange, ...]
    window: ScaleWindow | None
    overflowed: bool = False

    @property
    def shown(self) -> ScaleWindow | None:
        """The window to show; None if the run overflowed in the block: the finite values then reflect only the run's scale."""
        if self.overflowed or any(gradient.histogram.nonfinite for gradient in self.gradients):
            return None
        return self.window


@dataclass(frozen=True)
class Loss:
    """The loss at scale 1 of one gradient that a scale has to serve, over the run or in its worst block.

    Args:
        gradient: the gradient over the run, or over the block of steps where it loses most.
        lost_l1_share, flushed_fraction: shares of the counted values lost at scale 1, 0..1.
        log2_lowest: least k that serves the counted values; above 0 if scale 1 does not serve them.
        log2_certain: least k that serves the gradient in spite of any values flushed before counting.
        log2_highest: largest k without overflow of the values counted over the run.
        steps: first and last step of the block; None for the whole run.
    """

    gradient: GradientRange
    lost_l1_share: float
    flushed_fraction: float
    log2_lowest: int
    log2_certain: int
    log2_highest: int
    steps: tuple[int, int] | None = None

    @property
    def key(self) -> TensorKey:
        return self.gradient.key


@dataclass(frozen=True)
class Decision:
    """The recommended loss scale and the evidence for it, computed once for every sentence of the advice.

    Args:
        needed: whether scale 1 overflows or fails a layer; None if values flushed before counting make this
            undecidable.
        log2_scale: the recommended scale, as a power of two.
        window: the window of safe scales for the whole run.
        ceiling: the basis of the window's upper end.
        losses: one entry per gradient that a scale has to serve, the largest loss at scale 1 first.
        overflows, steps: the number of sampled steps that overflow at ``log2_scale``, and the number of sampled steps.
        conflicts: pairs of layers that no one scale serves.
        rules: the requirements on the scale.
        zeros: weights of modules whose counted gradients were all zero, perhaps because FP16 flushed them.
        all_finite: whether the run had no overflow and the counts have no infinity or NaN; otherwise the size of the gradients
            in those steps is unknown.
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
    all_finite: bool = True
    zeros: tuple[str, ...] = ()

    @property
    def worst(self) -> Loss:
        """The gradient that loses most at scale 1."""
        return self.losses[0]

    @property
    def neediest(self) -> Loss:
        """The gradient that needs the largest scale, judged by its counted values."""
        return max(self.losses, key=lambda loss: loss.log2_lowest)

    @property
    def doubtful(self) -> Loss:
        """The gradient that needs the largest scale on the assumption that every zero was flushed before counting."""
        return max(self.losses, key=lambda loss: loss.log2_certain)

    @property
    def likely(self) -> Loss:
        """The gradient that most likely lost values before counting, by the shape of its counts."""
        return max(self.losses, key=lambda loss: loss.gradient.seen.likely_hidden_l1_share())

    @property
    def likely_needed(self) -> bool:
        """Whether the values that ``likely`` lost probably weigh too much to lose."""
        return self.likely.gradient.seen.likely_hidden_l1_share() > self.rules.tolerance

    @property
    def needing_more(self) -> tuple[Loss, ...]:
        """The gradients whose needed scale overflows others."""
        return tuple(loss for loss in self.losses if loss.log2_lowest > self.window.log2_highest)

    @property
    def overflowing_first(self) -> tuple[Loss, ...]:
        """The gradients that overflow at the least scale that serves every layer."""
        return tuple(loss for loss in self.losses if loss.log2_highest < self.window.log2_lowest)

    @property
    def suffering(self) -> tuple[Loss, ...]:
        """The gradients whose counted values lose too much at scale 1; the worst first."""
        return tuple(loss for loss in self.losses if loss.log2_lowest > 0)

    @property
    def overflows_unscaled(self) -> bool:
        """Whether the largest gradients overflow at scale 1."""
        return self.window.log2_highest < 0

    @property
    def hides(self) -> bool:
        """Whether values flushed before counting may need a larger scale than the counted values do."""
        return self.needed is None or (self.needed and self.window.log2_certain > self.window.log2_lowest)


class Advised(NamedTuple):
    """The advice and the decision behind it; the decision is None if it is impossible, for example after a divergence."""

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
    zeros: tuple[str, ...] = (),
) -> Decision:
    """Return the decision for these gradients.

    Args:
        gradients: all gradients; a scale must have to serve at least one of them.
        window: the window of the gradients over the whole run.
        ceiling: the window's upper end.
        peaks: peak exponent over all gradients of a step -> number of steps; may be empty.
        blocks: windows over time, in order; may be empty.
        rules: the requirements on the scale.
        zeros: as in ``Decision``.
    """
    whole = window.serving(block.window for block in blocks if block.window)
    # The reserve for unseen steps must not exclude the least scale that serves every layer.
    ceiling = ceiling.reaching(whole.log2_lowest)
    whole = replace(whole, log2_highest=ceiling.log2_highest)
    needed, chosen = _is_needed(whole), 0
    if needed is not False:
        chosen = whole.choose(rules.headroom)
    if zeros and not whole.is_empty:
        # The need of these layers is unknown, but the largest scale serves them best.
        chosen = max(chosen, whole.log2_highest - rules.headroom)
        needed = needed or None
    losses = _losses(gradients, blocks, rules)
    conflicts: tuple[ScaleConflict, ...] = ()
    if whole.is_empty:
        conflicts = _conflicts(losses, whole.log2_highest)
    return Decision(
        needed,
        chosen,
        whole,
        ceiling,
        losses,
        sum(count for peak, count in peaks.items() if log2_room(peak, rules.format) < chosen),
        sum(peaks.values()),
        conflicts,
        rules,
        ceiling.log2_overflowed is None and not any(gradient.histogram.nonfinite for gradient in gradients),
        zeros,
    )


def scale_advice(decision: Decision, blocks: Sequence[Block], reason: str) -> LossScaleAdvice:
    """Return the decision in the form shown to users; ``reason`` is the decision in words."""
    format, chosen, window = decision.rules.format, decision.log2_scale, decision.window
    worst = decision.worst.gradient.histogram
    times = tuple(_time_block(block) for block in blocks)
    bound = None
    if decision.all_finite:
        bound = overflow_probability_bound(decision.overflows, decision.steps)
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
        overflow_probability_bound=bound,
        static_scale=scale_of(chosen),
        dynamic=DynamicSettings(
            scale_of(_at_first(decision, blocks)), growth_interval(times, decision.rules.growth_interval)
        ),
        blocks=times,
        reason=reason,
        all_finite=decision.all_finite,
        finer_from=_finer_from(decision),
        reserve=_reserve(decision.ceiling),
    )


def no_advice(reason: str) -> LossScaleAdvice:
    return LossScaleAdvice(available=False, reason=reason)


def _is_needed(window: ScaleWindow) -> bool | None:
    """Return whether the counted values need a scale; None if only values flushed before counting may need one."""
    if window.log2_lowest > 0 or window.log2_highest < 0:
        return True
    return False if window.log2_certain <= 0 else None


def _losses(gradients: Sequence[GradientRange], blocks: Sequence[Block], rules: ScaleRules) -> tuple[Loss, ...]:
    """Return each gradient's loss over the run, or over the block that needs the largest scale if that exceeds the run's."""
    losses = {gradient.key: _loss(gradient, rules) for gradient in gradients if gradient.is_served}
    for block in blocks:
        for gradient in block.gradients:
            known = losses.get(gradient.key)
            if known is None or not gradient.is_served:
                continue
            if gradient.needs(rules.format, rules.tolerance).log2_lowest > max(known.log2_lowest, 0):
                steps = (block.first_step, block.last_step)
                losses[gradient.key] = replace(_loss(gradient, rules), log2_highest=known.log2_highest, steps=steps)

    def order(loss: Loss) -> tuple[bool, float, float]:
        share = max(loss.lost_l1_share, likely_hidden(loss.gradient, rules.format))
        return loss.log2_lowest > 0, share, loss.flushed_fraction

    return tuple(sorted(losses.values(), key=order, reverse=True))


def _loss(gradient: GradientRange, rules: ScaleRules) -> Loss:
    histogram, needs = gradient.histogram, gradient.needs(rules.format, rules.tolerance)
    highest = histogram.max_log2_scale(rules.format)
    assert highest is not None, "a gradient that is served has values"
    return Loss(
        gradient,
        histogram.lost_l1_share(rules.format).estimate,
        histogram.flushed_fraction(rules.format),
        needs.log2_lowest,
        needs.log2_certain,
        highest,
    )


def _conflicts(losses: Sequence[Loss], log2_highest: int) -> tuple[ScaleConflict, ...]:
    """Return at most MAX_CONFLICTS pairs of layers that no one scale serves, worst first; a layer may conflict with itself.

    The first layer to overflow is given the window's top as its limit, which may be below the limit of its finite values.
    """
    needs_large = sorted(losses, key=lambda loss: (loss.log2_lowest, loss.key.name), reverse=True)[:MAX_CONFLICTS]
    needs_small = sorted((loss.log2_highest, loss.key.name) for loss in losses)[:MAX_CONFLICTS]
    needs_small[0] = (min(needs_small[0][0], log2_highest), needs_small[0][1])
    pairs = [
        ScaleConflict(large.key.name, large.log2_lowest, small, highest)
        for large in needs_large
        for highest, small in needs_small
        if large.log2_lowest > highest
    ]
    return tuple(sorted(pairs, key=lambda pair: pair.log2_highest - pair.log2_lowest)[:MAX_CONFLICTS])


def likely_hidden(gradient: GradientRange, format: FloatFormat) -> float:
    """Return the likely share of the L1 mass, 0..1, in values flushed before counting that scale 1 would lose too."""
    if not gradient.seen.hidden_flush(format, 0):
        return 0.0
    return gradient.seen.likely_hidden_l1_share()


def _at_first(decision: Decision, blocks: Sequence[Block]) -> int:
    """Return a dynamic scaler's initial scale: the recommended one, or the first block's if no scale serves the run."""
    first = next((block.shown for block in blocks if block.shown), None)
    at_odds = any(pair.needs_large != pair.needs_small for pair in decision.conflicts)
    if first is None or at_odds or not decision.window.is_empty:
        return decision.log2_scale
    return first.choose(decision.rules.headroom)


def _reserve(ceiling: Ceiling) -> int:
    """Return ``LossScaleAdvice.reserve``; it ends below the scale where the run itself overflowed."""
    if ceiling.log2_overflowed is None:
        return ceiling.margin
    return max(min(ceiling.margin, ceiling.log2_overflowed - 1 - ceiling.log2_highest), 0)


def _finer_from(decision: Decision) -> float | None:
    """Return ``LossScaleAdvice.finer_from``: below it the large gradients of some layer are subnormal in FP16."""
    if decision.rules.format != FLOAT16 or decision.needed is None:
        return None
    histograms = [loss.gradient.histogram for loss in decision.losses]
    in_bfloat16 = [histogram.noise_to_signal(BFLOAT16) for histogram in histograms]

    def is_finer(log2_scale: int) -> bool:
        # Both ratios are estimates: without subnormal values, FP16's is a 64th of BF16's.
        return all(
            histogram.noise_to_signal(FLOAT16, log2_scale) <= noise
            for histogram, noise in zip(histograms, in_bfloat16, strict=True)
        )

    scales = range(decision.window.log2_lowest, decision.window.log2_highest + 1)
    finer = scales[bisect_left(scales, True, key=is_finer) :]
    return next(map(scale_of, finer), None)


def _time_block(block: Block) -> TimeBlock:
    if block.shown is None:
        return TimeBlock(block.first_step, block.last_step, None, None)
    return TimeBlock(block.first_step, block.last_step, block.shown.log2_lowest, block.shown.log2_highest)
