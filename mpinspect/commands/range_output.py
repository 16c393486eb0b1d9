"""What the commands that end in a report of ranges share: where it goes, and what makes them fail."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpinspect.commands.outcome import UnusableError, status

if TYPE_CHECKING:
    from mpinspect.analysis.report import RangeReport


def add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--png", metavar="PATH", type=with_suffix(".png"), help="write the pictures too")
    parser.add_argument("--md", metavar="PATH", type=with_suffix(".md"), help="write a Markdown report too")
    parser.add_argument(
        "--fail-on",
        metavar="WHAT",
        action="append",
        type=_named_finding,
        default=[],
        help="exit with 1 on findings of this severity or above ('warning', 'error'), or with this id; may be repeated",
    )


def conclude(report: RangeReport, options: argparse.Namespace) -> int:
    """Write the files asked for, and tell by the exit status whether a finding was named."""
    for path in filter(None, (options.png, options.md)):
        try:
            report.save(path)
        except OSError as error:
            raise UnusableError(f"{path} can't be written: {error.strerror or error}") from error
    return status(report.findings, options.fail_on)


def print_text(report: RangeReport) -> None:
    from rich.console import Console

    from mpinspect.reports import text

    if sys.stdout.isatty():
        text.render_console(report, Console())
    else:
        sys.stdout.write(text.render(report))


def _named_finding(text: str) -> str:
    from mpinspect.analysis.finding import SEVERITIES
    from mpinspect.analysis.report import FINDING_IDS

    # A name that no finding can have would let everything pass for ever.
    if text not in (*SEVERITIES, *FINDING_IDS):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a severity nor a finding: {', '.join((*SEVERITIES, *FINDING_IDS))}"
        )
    return text


def with_suffix(suffix: str) -> Callable[[str], str]:
    def path(text: str) -> str:
        if not text.lower().endswith(suffix):
            raise argparse.ArgumentTypeError(f"{text!r} must end in {suffix}")
        return text

    return path


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)
