"""How times are worded, in findings as in reports."""

from mpinspect.reporting.words import duration

__all__ = ["duration"]
