"""``mpinspect diff``: compare two runs, or a run with a saved session."""

from __future__ import annotations

import argparse

from mpinspect.commands.output import UnusableError, add_output_options, finding_named, known_format, show, status

_RUN = "a run directory of mpinspect run, an inspector's log_dir, or a session file"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", help=f"the run to compare with: {_RUN}")
    parser.add_argument("second", metavar="B", help="the run to judge; it may still be running")
    add_output_options(
        parser, _finding, png=False, or_else="; findings are the differences, and those that B has and A has not"
    )
    parser.add_argument("--all", action="store_true", help="show every tensor")
    parser.add_argument(
        "--format",
        type=known_format,
        metavar="NAME",
        help="judge both against float16, bfloat16, float8_e4m3, ... (default: the narrower of the formats that they use)",
    )


def run(options: argparse.Namespace) -> int:
    from mpinspect.ranges.store import SessionError
    from mpinspect.run.diff import diff

    try:
        report = diff(options.first, options.second, format=options.format)
    except (SessionError, OSError) as error:
        raise UnusableError(error) from error
    show(report, options, everything=options.all)
    return status(report.findings, options.fail_on)


def _finding(text: str) -> str:
    from mpinspect.kernels.analysis import KERNEL_FINDING_IDS
    from mpinspect.ranges.faults.registry import FINDING_IDS
    from mpinspect.run.diff.report import DIFF_IDS

    return finding_named(text, (*DIFF_IDS, *FINDING_IDS, *KERNEL_FINDING_IDS))
