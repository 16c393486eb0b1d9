"""The loss scale that fits the gradients of a session, or of histograms alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mpinspect.analysis.drift import LONGEST_GROWTH_INTERVAL, block_histograms, time_blocks
from mpinspect.analysis.noise import is_rounding_noise, rounding_noise_ceilings
from mpinspect.analysis.overflow_odds import log2_highest
from mpinspect.analysis.ranges import tensor_infos
from mpinspect.analysis.report import LossScaleAdvice
from mpinspect.analysis.scale_advice import Block, ScaleRules, no_advice, scale_advice
from mpinspect.analysis.scale_window import HEADROOM, GradientRange, gradient_ranges, scale_window
from mpinspect.analysis.scale_words import nothing_to_serve
from mpinspect.analysis.serving import LOST_L1_TOLERANCE
from mpinspect.analysis.visibility import Visibility
from mpinspect.exponents import ExponentHistogram
from mpinspect.formats import FLOAT16, FormatLike, as_format
from mpinspect.session import Session, TensorKey, TensorWindow, add_counts

#: The kind of a gradient that is given as a bare histogram.
_GRADIENT = "gradient"


def recommend_loss_scale(
    histograms: Session | ExponentHistogram | Mapping[str, ExponentHistogram] | Iterable[ExponentHistogram],
    *,
    format: FormatLike = FLOAT16,
    headroom: int = HEADROOM,
    tolerance: float = LOST_L1_TOLERANCE,
    growth_interval: int = LONGEST_GROWTH_INTERVAL,
) -> LossScaleAdvice:
    """The loss scale that fits these gradients.

    Args:
        histograms: unscaled gradients, one histogram a layer: by name, or in any iterable (then named "0", "1", ...), or a
            single one; or a whole session, which adds the steps' peaks (and with them the confidence), drift and noise.
        format: the format that the scaled gradients are held in: a FloatFormat, a name or a dtype.
        headroom: powers of two to leave below the overflow, at least 0.
        tolerance: the lost L1 share up to which a layer counts as served, in (0, 1).
        growth_interval: steps; a probability of overflow of 1/growth_interval a step is accepted.

    A mean over N samples in the loss is a scale of 1/N that is already in the gradients: another batch size, or
    gradient accumulation over N micro-batches, moves the whole window by log2 N powers of two.

    Raises:
        ValueError: an option is out of its range, or names no format.
        TypeError: ``histograms`` is none of the above.
    """
    rules = ScaleRules(as_format(format), headroom, tolerance, growth_interval)
    if isinstance(histograms, Session):
        totals = histograms.totals()
        ceilings = rounding_noise_ceilings(tensor_infos(histograms, totals), totals)
        return advise(histograms, totals, ceilings, noise_of(totals, ceilings), rules)
    gradients = [
        GradientRange(TensorKey(name, _GRADIENT), Visibility(histogram))
        for name, histogram in _by_name(histograms).items()
    ]
    window = scale_window(gradients, None, rules.format, rules.tolerance)
    return scale_advice(gradients, window, {}, (), rules) if window else no_advice(nothing_to_serve(gradients))


def noise_of(totals: Mapping[TensorKey, TensorWindow], ceilings: Mapping[TensorKey, float]) -> frozenset[TensorKey]:
    """The tensors that hold nothing but rounding noise."""
    return frozenset(key for key, ceiling in ceilings.items() if is_rounding_noise(totals[key].histogram, ceiling))


def advise(
    session: Session,
    totals: dict[TensorKey, TensorWindow],
    ceilings: dict[TensorKey, float],
    noise: frozenset[TensorKey],
    rules: ScaleRules,
) -> LossScaleAdvice:
    """The advice for a session whose totals and noise are known already."""
    if not session.progress.scale_known:
        cause = session.progress.scale_unknown_reason or "the loss scale of a backward could not be told"
        return no_advice(
            f"No advice: {cause}. Give the scaler (scalers=) or the scale (loss_scale=; mpinspect run --loss-scale)."
        )
    gradients = gradient_ranges({key: Visibility.of(window) for key, window in totals.items()}, ceilings, noise)
    peaks = session.gradient_peaks()
    highest = log2_highest(peaks, rules.format, rules.growth_interval)
    window = scale_window(gradients, highest, rules.format, rules.tolerance)
    if window is None:
        return no_advice(nothing_to_serve(gradients, session))
    blocks = []
    for group in time_blocks(session.windows):
        found = gradient_ranges(block_histograms(group), ceilings, noise)
        top = log2_highest(add_counts(part.gradient_peaks for part in group), rules.format, rules.growth_interval)
        block = scale_window(found, top, rules.format, rules.tolerance)
        blocks.append(Block(group[0].first_step, max(part.last_step for part in group), block))
    return scale_advice(gradients, window, peaks, blocks, rules)


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
