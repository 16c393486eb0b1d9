"""The command line: arguments in, calls out. Each command is one file of ``commands`` and one line of the table."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from mpinspect.commands import demo, kernels, lint, report, run
from mpinspect.commands.outcome import BROKEN_PIPE, INTERRUPTED, UNUSABLE, UnusableError
from mpinspect.reporting.streams import printable, say
from mpinspect.runtime.version import __version__

_EPILOG = "exit status: 0 fine, 1 a finding that --fail-on names, 2 wrong usage or unreadable input"


@dataclass(frozen=True)
class Command:
    """A command: its options, and what it does with them; returns the exit status.

    ``split`` belongs to a command that runs somebody else's program: it parts the words of ours from theirs, which come as
    ``options.rest``. The streams are then theirs, and so is every exception that ends it but UnusableError.
    """

    name: str
    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    split: Callable[[Sequence[str]], tuple[list[str], list[str]]] | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. argparse itself exits (status 2) on wrong usage."""
    options = _options(sys.argv[1:] if argv is None else argv)
    if options.rest is not None:
        return _run_theirs(options)
    _let_names_through()
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except UnusableError as error:
        say(sys.stderr, error)
        return UNUSABLE
    except KeyboardInterrupt:
        say(sys.stderr, "stopped")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`| head`): Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return status


def _run_theirs(options: argparse.Namespace) -> int:
    try:
        status: int = options.run(options)
    except UnusableError as error:
        say(sys.stderr, error)
        return UNUSABLE
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
        # By the command's own parser: its usage is the one that helps.
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


class _Parser(argparse.ArgumentParser):
    """Its errors quote the arguments, which may hold anything."""

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


def _let_names_through() -> None:
    """A layer's name that the terminal's encoding lacks is printed escaped instead of ending the report."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


#: Every command; a new one is a line here.
COMMANDS = (
    Command(
        "report", "Show what a recorded run says: ranges, findings, the loss scale.", report.add_options, report.run
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
        "run",
        "Run a training script, unmodified, with the inspector attached to what it trains.",
        run.add_options,
        run.run,
        run.split,
    ),
)
