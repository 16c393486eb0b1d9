"""A histogram as one line of ASCII: where the values lie between a format's edges."""

from __future__ import annotations

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.numeric.formats import FloatFormat

LEGEND = (
    "range, small to large: | marks the flush edge and the top of the format, < and > what lies beyond the picture; "
    ". under 0.1%, - under 1%, = under 10%, # 10% or more of the non-zero elements"
)

#: Powers of two that are drawn below the flush edge; what lies lower is one "<".
_BELOW = 15


def range_bar(histogram: ExponentHistogram, format: FloatFormat, step: int) -> str:
    """``step`` powers of two a character; the length depends on format and step only."""
    # The exponents that survive begin at the smallest subnormal's less one: its upper half rounds up.
    edge = format.min_subnormal_exponent - 1
    cells = [_shares(histogram, low, low + step) for low in range(edge - step * (_BELOW // step), edge, step)]
    kept = range(edge, format.max_exponent + 1, step)
    upper = [_shares(histogram, low, min(low + step, format.max_exponent + 1)) for low in kept]
    below = _shares(histogram, None, edge - step * (_BELOW // step))
    above = _shares(histogram, format.max_exponent + 1, None)
    return f"{'<' if below else ' '}{_line(cells)}|{_line(upper)}|{'>' if above else ' '}"


def _shares(histogram: ExponentHistogram, low: int | None, high: int | None) -> float:
    """Share of the non-zero elements with low <= exponent < high."""
    start = 0 if low is None else max(low - histogram.min_exponent, 0)
    stop = None if high is None else max(high - histogram.min_exponent, 0)
    return float(histogram.counts[start:stop].sum()) / max(histogram.nonzero, 1)


def _line(shares: list[float]) -> str:
    return "".join(_mark(share) for share in shares)


def _mark(share: float) -> str:
    if not share:
        return " "
    return "." if share < 1e-3 else "-" if share < 1e-2 else "=" if share < 1e-1 else "#"
