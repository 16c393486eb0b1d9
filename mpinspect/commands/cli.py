"""The command line: parses arguments and runs a command; each is a file in this folder and a row of ``COMMANDS``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from mpinspect.commands import compile as compile_ahead
from mpinspect.commands import demo, diff, kernels, lint, report, run
from mpinspect.commands.output import BROKEN_PIPE, INTERRUPTED, UNUSABLE, UnusableError
from mpinspect.reporting.streams import printable, say
from mpinspect.runtime.version import __version__

_EPILOG = "exit status: 0 fine, 1 a finding that --fail-on names, 2 wrong usage or unreadable input"


@dataclass(frozen=True)
class Command:
    """A command of ``mpinspect``.

    Args:
        add_options: declares its options.
        run: runs it and returns the exit status.
        split: only for a command that runs the user's own program: separates the command's words from the program's,
            which become ``options.rest``. For such a command the streams are not changed, and only UnusableError is caught.
    """

    name: str
    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    split: Callable[[Sequence[str]], tuple[list[str], list[str]]] | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status. On wrong usage argparse exits with status 2."""
    options = _options(sys.argv[1:] if argv is None else argv)
    try:
        # With ``rest`` a program of the user's owns the streams, and its exceptions pass through.
        status: int = _run(options) if options.rest is None else options.run(options)
    except UnusableError as error:
        say(sys.stderr, error)
        return UNUSABLE
    return status


def _run(options: argparse.Namespace) -> int:
    _escape_unprintable_names()
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        say(sys.stderr, "stopped")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe (`| head`): without this, Python would report it again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return status


def _options(words: Sequence[str]) -> argparse.Namespace:
    split = next((command.split for command in COMMANDS if [command.name] == list(words[:1])), None)
    if split is None:
        return _parsed(words, None)
    ours, theirs = split(words[1:])
    return _parsed([words[0], *ours], theirs)


def _parsed(words: Sequence[str], rest: list[str] | None) -> argparse.Namespace:
    options, unknown = _parser().parse_known_args(words, argparse.Namespace(rest=rest))
    if unknown:
        # The command's own parser prints the usage of that command.
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


class _Parser(argparse.ArgumentParser):
    """A parser whose errors escape control characters in the arguments that they quote."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mpinspect",
        description="Number ranges, loss scales and Tensor Cores: what mixed precision does to a model's training.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"mpinspect {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        part = commands.add_parser(command.name, help=command.help, description=command.help, epilog=_EPILOG)
        command.add_options(part)
        part.set_defaults(run=command.run, parser=part)
    return parser


def _escape_unprintable_names() -> None:
    """Make stdout and stderr escape characters that the terminal's encoding lacks instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


#: Every command; a new one is a row here.
COMMANDS = (
    Command(
        "report", "Show what a recorded run says: ranges, findings, the loss scale.", report.add_options, report.run
    ),
    Command(
        "diff",
        "Compare two runs: what changed, which layers moved, and the first step at which the runs part.",
        diff.add_options,
        diff.run,
    ),
    Command(
        "demo", "Train a small language model with the inspector on and show its report.", demo.add_options, demo.run
    ),
    Command(
        "lint",
        "Check whether a model's matrix products suit Tensor Cores, without running it on a GPU.",
        lint.add_options,
        lint.run,
    ),
    Command(
        "kernels",
        "Show from torch.profiler's traces which kernels ran on Tensor Cores, and which could have.",
        kernels.add_options,
        kernels.run,
    ),
    Command(
        "compile",
        "Compile the kernels that count on a CPU now (a minute or two, once a machine), before any training needs them.",
        compile_ahead.add_options,
        compile_ahead.run,
    ),
    Command(
        "run",
        "Run a training script, unmodified, with the inspector attached to what it trains.",
        run.add_options,
        run.run,
        run.split,
    ),
)
