"""The report on stderr of a training that ended or broke, and may leave nothing else behind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpinspect.ranges.analysis.first_line import first_line, what_broke
from mpinspect.reporting.streams import printable, write

if TYPE_CHECKING:
    from mpinspect.ranges.analysis.report import RangeReport


def print_report(make: Callable[[], RangeReport]) -> None:
    """Print the report that ``make`` gives, led by what broke. Whatever fails here must not hide the user's exception."""
    try:
        report = make()
        broke = what_broke(report)
        write(sys.stderr, f"{printable(first_line(broke))}\n{report}\n" if broke is not None else f"{report}\n")
    except Exception as error:
        write(sys.stderr, f"mpinspect could not print its report: {error!r}\n")
