"""``mpinspect report``: read a session or a run directory and show its report."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mpinspect.commands.output import OK, UnusableError, add_output_options, known_format, range_finding, show, status

if TYPE_CHECKING:
    from mpinspect.ranges.analysis.report import RangeReport
    from mpinspect.run.report import RunReport


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir",
        metavar="RUN_DIR",
        help="the inspector's log_dir, a run directory of mpinspect run, or a session file; the run may still be running",
    )
    add_output_options(parser, range_finding)
    parser.add_argument(
        "--watch",
        action="store_true",
        help="show the report again after each write of the run, until the run ends; waits for a run that has not begun",
    )
    parser.add_argument("--all", action="store_true", help="show every layer, and every block of repeated ones")
    parser.add_argument(
        "--each-rank",
        action="store_true",
        help="show each rank's models separately instead of adding up the ranks' counts",
    )
    parser.add_argument(
        "--format",
        type=known_format,
        metavar="NAME",
        help="judge against float16, bfloat16, float8_e4m3, ... (default: the format that the run uses)",
    )


def run(options: argparse.Namespace) -> int:
    if options.watch and options.json:
        raise UnusableError("--watch shows text: leave --json out")
    if options.watch:
        from mpinspect.commands.watching import watch

        report = watch(
            options.run_dir, lambda: _read(options), lambda each: show(each, options, everything=options.all)
        )
    else:
        report = _read(options)
        show(report, options, everything=options.all)
    found, unreadable = status(report.findings, options.fail_on), getattr(report, "unreadable", ())
    if found == OK and options.fail_on and unreadable:
        raise UnusableError(f"--fail-on could judge only a part: {unreadable[0].rstrip('.')}.")
    return found


def _read(options: argparse.Namespace) -> RangeReport | RunReport:
    from mpinspect.ranges.analyse import analyse
    from mpinspect.ranges.store import SessionError, read_session
    from mpinspect.run.reading import is_run_directory, read_run

    path, format = options.run_dir, options.format
    try:
        if is_run_directory(path):
            run = read_run(path, format, each_rank=options.each_rank, for_page=options.html is not None)
            if run.unreadable and not run.parts:
                raise UnusableError(f"{run.unreadable[0].rstrip('.')}.")
            return run
        return analyse(read_session(path), format)
    except (SessionError, OSError) as error:
        raise UnusableError(error) from error
