"""``mpinspect report``: read a session or a run directory and show its report."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from mpinspect.commands.output import UnusableError, add_output_options, print_text, range_finding, save_to, status

if TYPE_CHECKING:
    from mpinspect.ranges.analysis.report import RangeReport
    from mpinspect.run.report import RunReport


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir",
        metavar="RUN_DIR",
        help="the inspector's log_dir, a run directory of mpinspect run, or a session file; the run may still go on",
    )
    add_output_options(parser, range_finding)


def run(options: argparse.Namespace) -> int:
    report = _read(options.run_dir)
    # Before printing, so that the message of a picture that can't be drawn does not stand below a report.
    save_to(report, options.png, options.md)
    if options.json:
        sys.stdout.write(report.to_json())
    else:
        print_text(report)
    return status(report.findings, options.fail_on)


def _read(path: str) -> RangeReport | RunReport:
    from mpinspect.ranges.analysis import analyse
    from mpinspect.ranges.store import SessionError, read_session
    from mpinspect.run.reading import is_run_directory, read_run

    try:
        return read_run(path) if is_run_directory(path) else analyse(read_session(path))
    except (SessionError, OSError) as error:
        raise UnusableError(error) from error
