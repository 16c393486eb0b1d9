"""How times are worded, in findings as in reports."""

from __future__ import annotations


def duration(us: float) -> str:
    """Three digits and a unit: "0.85 us", "41.3 us", "12.6 ms", "3.20 s"."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        # 999.6 us would read 1000 us.
        if us >= 0.9995 * size:
            return f"{_three(us / size)} {unit}"
    return f"{_three(us)} us"


def _three(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
