"""What the commands that end in a report share: where it goes, and what makes them fail."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from mpinspect.commands.outcome import UnusableError

if TYPE_CHECKING:
    from mpinspect.reporting.rendering import RendersItself

_FAIL_ON = "exit with 1 on findings of this severity or above ('warning', 'error'), or with this id"


def add_output_options(
    parser: argparse.ArgumentParser, fail_on: Callable[[str], Any], *, png: bool = True, or_else: str = ""
) -> None:
    """--json, --md, --fail-on, and --png where there is a picture.

    Args:
        fail_on: reads a word of --fail-on, or raises argparse.ArgumentTypeError.
        or_else: what --fail-on takes beside findings, for the help.
    """
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    if png:
        parser.add_argument("--png", metavar="PATH", type=with_suffix(".png"), help="write a picture too")
    parser.add_argument("--md", metavar="PATH", type=with_suffix(".md"), help="write a Markdown report too")
    parser.add_argument(
        "--fail-on",
        metavar="WHAT",
        action="append",
        type=fail_on,
        default=[],
        help=f"{_FAIL_ON}{or_else}; may be repeated",
    )


def print_text(report: RendersItself) -> None:
    """In colour on a terminal, and where FORCE_COLOR asks for it; without where NO_COLOR does."""
    from mpinspect.reporting.forms import document, render
    from mpinspect.reporting.text import colour_console, print_to

    console = colour_console(sys.stdout)
    if console is not None:
        print_to(document(report), console)
    else:
        sys.stdout.write(render(report, ".txt"))


def save_to(report: RendersItself, *paths: str | None) -> None:
    """Write the files asked for. Raises UnusableError where one can't be written."""
    for path in filter(None, paths):
        try:
            report.save(path)
        except OSError as error:
            raise UnusableError(f"{path} can't be written: {error.strerror or error}") from error
        except ValueError as error:
            raise UnusableError(f"{path} can't be written: {error}") from error


def finding_named(text: str, ids: Iterable[str]) -> str:
    """Reads a severity or one of a report's finding ids, for --fail-on. Raises argparse.ArgumentTypeError."""
    from mpinspect.reporting.finding import SEVERITIES

    known = (*SEVERITIES, *ids)
    # A name that no finding can have would let everything pass for ever.
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a severity nor a finding: {', '.join(known)}")
    return text


def range_finding(text: str) -> str:
    """Reads what --fail-on takes of a report of ranges."""
    from mpinspect.ranges.analysis.report import FINDING_IDS

    return finding_named(text, FINDING_IDS)


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


def gpu_name(text: str) -> str:
    """Reads a GPU's name, an architecture's, or "auto"."""
    from mpinspect.runtime import gpus

    if text.strip().lower() == "auto":
        return "auto"
    try:
        gpus.named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text.strip()
