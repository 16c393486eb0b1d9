"""What is known of values that were rounded to a narrow format, at some loss scale, before they could be counted."""

from __future__ import annotations

import math

from mpinspect.numeric.formats import FORMATS


def floor_exponent(format_name: str, scale: float | None) -> int:
    """Unscaled magnitudes up to 2^this may have been flushed by the format; a scale that is not known counts as 1."""
    return math.ceil(math.log2(FORMATS[format_name].flush_edge) - math.log2(scale or 1.0))


def overflow_exponent(format_name: str, scale: float | None) -> int:
    """Least exponent, unscaled, of a magnitude that became infinite in the format. How large it really was is not known."""
    return math.floor(FORMATS[format_name].max_exponent + 1 - math.log2(scale or 1.0))
