"""Verdicts on whether another number format would fit each kind of tensor, by its range (not its precision)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.numeric.formats import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FORMATS, FloatFormat
from mpinspect.ranges.analysis.report import FormatVerdict
from mpinspect.ranges.analysis.serving import LOST_L1_TOLERANCE
from mpinspect.ranges.analysis.visibility import Visibility
from mpinspect.ranges.kinds import GRADIENT_KINDS, KINDS, UPDATE
from mpinspect.ranges.windows.tensors import TensorKey, TensorWindow

NO_SCALING = "none"
#: One scale (a power of two) per tensor for the whole run; a scale updated every step can only do better.
PER_TENSOR = "per-tensor"

#: The formats judged: FP16 and BF16 unscaled, FP8 with per-tensor scales, as FP8 is used in practice.
CANDIDATES: tuple[tuple[FloatFormat, str], ...] = (
    (FLOAT16, NO_SCALING),
    (BFLOAT16, NO_SCALING),
    (FLOAT8_E5M2, PER_TENSOR),
    (FLOAT8_E4M3, PER_TENSOR),
)


def format_verdicts(
    totals: Mapping[TensorKey, TensorWindow], noise: frozenset[TensorKey], kinds: Sequence[str] = KINDS
) -> tuple[FormatVerdict, ...]:
    """Return a verdict for each candidate and each of these kinds seen, except updates, which are added and not stored."""
    verdicts = []
    for kind in kinds:
        histograms = {
            key.name: window.histogram
            for key, window in totals.items()
            if key.kind == kind and key not in noise and len(window.histogram.counts)
        }
        # Weight gradients are computed from activation gradients, so values lost there are lost here too.
        sources = GRADIENT_KINDS if kind in GRADIENT_KINDS else (kind,)
        unknown = {
            window.passed_through
            for key, window in totals.items()
            if key.kind in sources and key not in noise and _hides(window)
        }
        if histograms and kind != UPDATE:
            found = [format_verdict(kind, histograms, format, scaling) for format, scaling in CANDIDATES]
            # If the values seen already exceed a format, values lost before counting can't change the verdict.
            verdicts += [each for each in found if each.format not in unknown or not each.fits]
    return tuple(verdicts)


def _hides(window: TensorWindow) -> bool:
    """Return whether a format that a tensor passed through may have lost so much that the counts allow no verdict."""
    format, seen = FORMATS.get(window.passed_through), Visibility.of(window)
    if format is None or seen.floor_exponent is None:
        return False
    overflowed_unscaled = window.histogram.infs and seen.floor_exponent >= format.flush_exponent
    return bool(overflowed_unscaled) or seen.lost_l1_share(format).high > LOST_L1_TOLERANCE


def format_verdict(
    kind: str, histograms: Mapping[str, ExponentHistogram], format: FloatFormat, scaling: str
) -> FormatVerdict:
    """Return whether every tensor loses at most LOST_L1_TOLERANCE of its L1 mass without an overflow.

    Each histogram must hold a finite non-zero value. ``overflows`` is True if an overflow is certain or possible.
    """
    scales = {name: _log2_scale(histogram, format, scaling) for name, histogram in histograms.items()}
    lost = {name: histogram.lost_l1_share(format, scales[name]).estimate for name, histogram in histograms.items()}
    over = [name for name, histogram in histograms.items() if histogram.overflowed_bounds(format, scales[name])[1]]
    worst = next(iter(over), max(lost, key=lambda name: lost[name]))
    fits = not over and lost[worst] <= LOST_L1_TOLERANCE
    return FormatVerdict(format.name, kind, scaling, fits, worst, lost[worst], bool(over))


def _log2_scale(histogram: ExponentHistogram, format: FloatFormat, scaling: str) -> int:
    if scaling == NO_SCALING:
        return 0
    return histogram.max_log2_scale(format) or 0
