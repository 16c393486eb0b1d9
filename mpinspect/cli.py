"""The command line: arguments in, calls out. Each command is one function and one line of the table."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpinspect.version import __version__

if TYPE_CHECKING:
    from mpinspect.analysis.report import Finding, RangeReport

OK, FOUND, UNUSABLE = 0, 1, 2
#: What a shell reports for a program that SIGPIPE ended: 128 + 13.
BROKEN_PIPE = 141
#: And for one that Ctrl-C ended: 128 + 2.
INTERRUPTED = 130

_EPILOG = "exit status: 0 fine, 1 a finding that --fail-on names, 2 wrong usage or unreadable input"


class UnusableError(Exception):
    """The input can't be used: one sentence, printed on stderr, exit status 2."""


@dataclass(frozen=True)
class Command:
    """A command: its options, and what it does with them; returns the exit status."""

    name: str
    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. argparse itself exits (status 2) on wrong usage."""
    _let_names_through()
    options = _parser().parse_args(argv)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except UnusableError as error:
        print(f"mpinspect: {error}", file=sys.stderr)
        return UNUSABLE
    except BrokenPipeError:
        # The reader has gone (`| head`): Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mpinspect",
        description="Number ranges, loss scales and their findings for mixed-precision training.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"mpinspect {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        part = commands.add_parser(command.name, help=command.help, description=command.help, epilog=_EPILOG)
        command.add_options(part)
        part.set_defaults(run=command.run)
    return parser


# -- report -----------------------------------------------------------------------------------------------------------


def _add_report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", help="the inspector's log_dir, or a session file; the run may still go on"
    )
    _add_output_options(parser)


def _report(options: argparse.Namespace) -> int:
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
        _print_text(report)
    return _conclude(report, options)


# -- demo -------------------------------------------------------------------------------------------------------------


def _add_demo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log-dir", metavar="DIR", default="runs/demo", help="where the run is written (%(default)s)")
    parser.add_argument("--steps", type=_positive, metavar="N", help="training steps of a run (160; with --curves 140)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (%(default)s)")
    parser.add_argument("--quiet", action="store_true", help="print nothing")
    parser.add_argument(
        "--curves",
        action="store_true",
        help="also train in FP16 without loss scaling, with the recommended scale and with a dynamic one; print a table and "
        "draw the losses (curves.png). With --json: one document, the report under 'report', the runs under 'curves'",
    )
    parser.add_argument(
        "--seeds", type=_positive, metavar="N", help="with --curves: N seeds from --seed on, and their means (1)"
    )
    _add_output_options(parser)


def _demo(options: argparse.Namespace) -> int:
    if options.seeds and not options.curves:
        raise UnusableError("--seeds is for --curves: give both, or --seed for the one seed of the demo alone")
    try:
        report = _curves(options) if options.curves else _demo_alone(options)
    except OSError as error:
        raise UnusableError(f"the demo can't run: {error}") from error
    except KeyboardInterrupt as stop:
        print(f"mpinspect: stopped{f': {stop}' if str(stop) else ''}", file=sys.stderr)
        return INTERRUPTED
    return _conclude(report, options)


def _demo_alone(options: argparse.Namespace) -> RangeReport:
    from mpinspect.demo import run

    # It prints its report itself, as it goes.
    steps = {"steps": options.steps} if options.steps else {}
    report = run(log_dir=options.log_dir, seed=options.seed, quiet=options.quiet or options.json, **steps)
    if options.json:
        sys.stdout.write(report.to_json())
    return report


def _curves(options: argparse.Namespace) -> RangeReport:
    from mpinspect.demo_curves import Setting, run

    comparison = run(
        log_dir=options.log_dir,
        setting=Setting(steps=options.steps) if options.steps else Setting(),
        seeds=range(options.seed, options.seed + (options.seeds or 1)),
        quiet=options.quiet or options.json,
    )
    if options.json:
        sys.stdout.write(comparison.to_json())
    return comparison.report


# -- what commands that end in a report share -------------------------------------------------------------------------


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--png", metavar="PATH", type=_with_suffix(".png"), help="write the pictures too")
    parser.add_argument("--md", metavar="PATH", type=_with_suffix(".md"), help="write a Markdown report too")
    parser.add_argument(
        "--fail-on",
        metavar="WHAT",
        action="append",
        type=_named_finding,
        default=[],
        help="exit with 1 on findings of this severity or above ('warning', 'error'), or with this id; may be repeated",
    )


def _conclude(report: RangeReport, options: argparse.Namespace) -> int:
    """Write the files asked for, and tell by the exit status whether a finding was named."""
    for path in filter(None, (options.png, options.md)):
        try:
            report.save(path)
        except OSError as error:
            raise UnusableError(f"{path} can't be written: {error.strerror or error}") from error
    return FOUND if any(_names(finding, options.fail_on) for finding in report.findings) else OK


def _print_text(report: RangeReport) -> None:
    from rich.console import Console

    from mpinspect.reports import text

    if sys.stdout.isatty():
        text.render_console(report, Console())
    else:
        sys.stdout.write(text.render(report))


def _names(finding: Finding, fail_on: Iterable[str]) -> bool:
    """Whether one of ``fail_on`` is the finding's id, its severity or a milder one."""
    from mpinspect.analysis.report import SEVERITIES

    named = set(fail_on)
    up_to = SEVERITIES[: SEVERITIES.index(finding.severity) + 1]
    return finding.id in named or not named.isdisjoint(up_to)


def _named_finding(text: str) -> str:
    from mpinspect.analysis.report import FINDING_IDS, SEVERITIES

    # A name that no finding can have would let everything pass for ever.
    if text not in (*SEVERITIES, *FINDING_IDS):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a severity nor a finding: {', '.join((*SEVERITIES, *FINDING_IDS))}"
        )
    return text


def _with_suffix(suffix: str) -> Callable[[str], str]:
    def path(text: str) -> str:
        if not text.lower().endswith(suffix):
            raise argparse.ArgumentTypeError(f"{text!r} must end in {suffix}")
        return text

    return path


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _let_names_through() -> None:
    """A layer's name that the terminal's encoding lacks is printed escaped instead of ending the report."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


#: Every command; a new one is a line here.
COMMANDS = (
    Command("report", "Show what a recorded run says: ranges, findings, the loss scale.", _add_report_options, _report),
    Command(
        "demo", "Train a small language model with the inspector on and show its report.", _add_demo_options, _demo
    ),
)
