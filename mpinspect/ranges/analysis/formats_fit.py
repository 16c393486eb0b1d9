"""Whether another number format would do, for each kind of tensor: by range alone, not by precision."""

from __future__ import annotations

from collections.abc import Mapping

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.numeric.formats import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FloatFormat
from mpinspect.ranges.analysis.report import FormatVerdict
from mpinspect.ranges.analysis.serving import LOST_L1_TOLERANCE
from mpinspect.ranges.kinds import KINDS, UPDATE
from mpinspect.ranges.session import TensorKey, TensorWindow

NO_SCALING = "none"
#: One power of two a tensor and run: scales that follow the maximum from step to step can only do better.
PER_TENSOR = "per-tensor"

#: What is asked: formats with FP32's or FP16's exponent as they are, FP8 the way it is used.
CANDIDATES: tuple[tuple[FloatFormat, str], ...] = (
    (FLOAT16, NO_SCALING),
    (BFLOAT16, NO_SCALING),
    (FLOAT8_E5M2, PER_TENSOR),
    (FLOAT8_E4M3, PER_TENSOR),
)


def format_verdicts(totals: Mapping[TensorKey, TensorWindow], noise: frozenset[TensorKey]) -> tuple[FormatVerdict, ...]:
    """Return a verdict for each kind seen (updates aside: they are added, not held) and each candidate."""
    verdicts = []
    for kind in KINDS:
        histograms = {
            key.name: window.histogram
            for key, window in totals.items()
            if key.kind == kind and key not in noise and len(window.histogram.counts)
        }
        if histograms and kind != UPDATE:
            verdicts += [format_verdict(kind, histograms, format, scaling) for format, scaling in CANDIDATES]
    return tuple(verdicts)


def format_verdict(
    kind: str, histograms: Mapping[str, ExponentHistogram], format: FloatFormat, scaling: str
) -> FormatVerdict:
    """Return whether every one of these tensors keeps its L1 mass but for LOST_L1_TOLERANCE, and none overflows.

    Each histogram must hold a value. ``overflows`` is True where an overflow is certain or possible.
    """
    scales = {name: _log2_scale(histogram, format, scaling) for name, histogram in histograms.items()}
    lost = {name: histogram.lost_l1_share(format, scales[name]).estimate for name, histogram in histograms.items()}
    over = [name for name, histogram in histograms.items() if histogram.overflowed_bounds(format, scales[name])[1]]
    worst = over[0] if over else max(lost, key=lambda name: lost[name])
    fits = not over and lost[worst] <= LOST_L1_TOLERANCE
    return FormatVerdict(format.name, kind, scaling, fits, worst, lost[worst], bool(over))


def _log2_scale(histogram: ExponentHistogram, format: FloatFormat, scaling: str) -> int:
    if scaling == NO_SCALING:
        return 0
    highest = histogram.max_log2_scale(format)
    return 0 if highest is None else highest
