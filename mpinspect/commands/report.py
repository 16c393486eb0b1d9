"""``mpinspect report``: what a recorded run says."""

from __future__ import annotations

import argparse
import sys

from mpinspect.commands.outcome import UnusableError, status
from mpinspect.commands.output import add_output_options, print_text, range_finding, save_to


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", help="the inspector's log_dir, or a session file; the run may still go on"
    )
    add_output_options(parser, range_finding)


def run(options: argparse.Namespace) -> int:
    from mpinspect.analysis import analyse
    from mpinspect.session_file import SessionError, read_session

    try:
        session = read_session(options.run_dir)
    except (SessionError, OSError) as error:
        raise UnusableError(error) from error
    report = analyse(session)
    if options.json:
        sys.stdout.write(report.to_json())
    else:
        print_text(report)
    save_to(report, options.png, options.md)
    return status(report.findings, options.fail_on)
