"""Shared code of the commands: exit statuses, options for a report's output and failure, and parsers of arguments."""

from __future__ import annotations

import argparse
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from mpinspect.reporting.finding import Finding
    from mpinspect.reporting.rendering import RendersItself

OK, FOUND, UNUSABLE = 0, 1, 2
#: A shell's status of a program ended by SIGPIPE: 128 + 13.
BROKEN_PIPE = 141
#: A shell's status of a program ended by Ctrl-C: 128 + 2.
INTERRUPTED = 130

_FAIL_ON = "exit with 1 on findings of this severity or above ('warning', 'error'), or with this id"


class UnusableError(Exception):
    """The input can't be used. Its message, one sentence, is printed on stderr; the exit status is 2."""


def status(findings: Iterable[Finding], fail_on: Iterable[str]) -> int:
    """Return FOUND if ``fail_on`` names a finding by its id, its severity or a milder one, else OK."""
    from mpinspect.reporting.finding import SEVERITIES

    named = set(fail_on)
    for finding in findings:
        if not named.isdisjoint((finding.id, *SEVERITIES[: SEVERITIES.index(finding.severity) + 1])):
            return FOUND
    return OK


def add_output_options(
    parser: argparse.ArgumentParser, fail_on: Callable[[str], Any], *, png: bool = True, or_else: str = ""
) -> None:
    """Declare --json, --md, --html and --fail-on.

    Args:
        fail_on: parses an argument of --fail-on, or raises argparse.ArgumentTypeError.
        png: whether to declare --png too.
        or_else: help text on the other values that --fail-on accepts.
    """
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    if png:
        parser.add_argument("--png", metavar="PATH", type=with_suffix(".png"), help="write a picture too")
    parser.add_argument("--md", metavar="PATH", type=with_suffix(".md"), help="write a Markdown report too")
    parser.add_argument("--html", metavar="PATH", type=with_suffix(".html"), help="write a page for a browser too")
    parser.add_argument(
        "--fail-on",
        metavar="WHAT",
        action="append",
        type=fail_on,
        default=[],
        help=f"{_FAIL_ON}{or_else}; may be repeated",
    )


def print_text(report: RendersItself, **options: bool) -> None:
    """Print a report as text: in colour on a terminal or with FORCE_COLOR, without colour with NO_COLOR.

    The options are those of the report's document, such as ``everything``.
    """
    from mpinspect.reporting.forms import document
    from mpinspect.reporting.text import colour_console, print_to, render

    console = colour_console(sys.stdout)
    if console is not None:
        print_to(document(report, **options), console)
    else:
        sys.stdout.write(render(document(report, **options)))


def show(report: RendersItself, options: argparse.Namespace, **document: bool) -> None:
    """Save a report as the options of ``add_output_options`` ask, then print it as JSON, or as ``print_text`` does."""
    # Save before printing, so that an error from a picture does not follow a printed report.
    save_to(report, getattr(options, "png", None), options.md, options.html)
    if options.json:
        sys.stdout.write(report.to_json())
    else:
        print_text(report, **document)


def save_to(report: RendersItself, *paths: str | None) -> None:
    """Write the report to each path that is not None. Raises UnusableError if a path can't be written."""
    for path in filter(None, paths):
        try:
            report.save(path)
        except (OSError, ValueError) as error:
            raise UnusableError(f"{path} can't be written: {getattr(error, 'strerror', None) or error}") from error


def finding_named(text: str, ids: Iterable[str]) -> str:
    """Parse an argument of --fail-on: a severity or one of ``ids``. Raises argparse.ArgumentTypeError."""
    from mpinspect.reporting.finding import SEVERITIES

    known = (*SEVERITIES, *ids)
    # A misspelt id would match no finding, so that CI would pass for ever.
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a severity nor a finding: {', '.join(known)}")
    return text


def range_finding(text: str) -> str:
    """Parse an argument of --fail-on for a report of ranges."""
    from mpinspect.ranges.faults.registry import FINDING_IDS

    return finding_named(text, FINDING_IDS)


def known_format(text: str) -> str:
    """Parse the name of a number format, or raise argparse.ArgumentTypeError."""
    from mpinspect.numeric.formats import as_format

    try:
        return as_format(text).name
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def with_suffix(suffix: str) -> Callable[[str], str]:
    """Return a parser of paths that must end in ``suffix``."""

    def path(text: str) -> str:
        if not text.lower().endswith(suffix):
            raise argparse.ArgumentTypeError(f"{text!r} must end in {suffix}")
        return text

    return path


def positive(text: str) -> int:
    """Parse a whole number of 1 or more."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def gpu_name(text: str) -> str:
    """Parse the name of a GPU or an architecture, or "auto"."""
    from mpinspect.runtime import gpus

    if text.strip().lower() == "auto":
        return "auto"
    try:
        gpus.named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text.strip()
