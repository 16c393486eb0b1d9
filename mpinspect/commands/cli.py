"""The command line: parses arguments and runs a command; each is a file in this folder and a row of ``COMMANDS``.

The file of a command has ``add_options(parser)``, which declares its options, and ``run(options)``, which returns the exit
status. A command that runs the user's own program also has ``split(words)``, which separates the command's words from the
program's. These become ``options.rest``; then the streams are not changed, and only UnusableError is caught.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

from mpinspect.commands.output import BROKEN_PIPE, INTERRUPTED, UNUSABLE, UnusableError
from mpinspect.reporting.streams import printable, say
from mpinspect.runtime.version import __version__

# ``typing`` is not imported, since that takes as long as all other imports; type checkers treat a variable of this name as True.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import ModuleType
    from typing import NoReturn

_EPILOG = "exit status: 0 fine, 1 a finding that --fail-on names, 2 wrong usage or unreadable input"


#: The commands, by the name of their file, with their help; a new one is a row here. Only the one that is called is imported.
COMMANDS = {
    "report": "Show the report of a recorded run: ranges, findings, the loss scale.",
    "diff": "Compare two runs: settings, findings, layers whose ranges moved, and the first step that differs.",
    "demo": "Train a small language model with the inspector on and show its report.",
    "lint": "Check whether a model's matrix products suit Tensor Cores, without running it on a GPU.",
    "kernels": "Show from torch.profiler's traces which kernels ran on Tensor Cores, and which could have.",
    "compile": "Compile the CPU's counting kernels in advance: a minute or two, once per machine.",
    "run": "Run an unmodified script with the inspector attached to the models that it trains or calls.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status. On wrong usage argparse exits with status 2."""
    if argv is None:
        argv = sys.argv[1:]
    options = _options(argv)
    try:
        return _run(options)
    except UnusableError as error:
        say(sys.stderr, error)
        return UNUSABLE


def _run(options: argparse.Namespace) -> int:
    status: int
    if options.rest is not None:
        # The user's program owns the streams, and its exceptions pass through.
        status = options.run(options)
        return status
    _escape_unprintable_names()
    try:
        status = options.run(options)
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
    if not words:
        _parser(None).print_help(sys.stderr)
        sys.exit(UNUSABLE)
    if not words[0].startswith("-") and words[0] not in COMMANDS:
        there_are = f": there are {', '.join(COMMANDS)}"
        _parser(None).error(f"there is no command {words[0]!r}{_meant(words[0], COMMANDS) or there_are}")
    split = words[0] in COMMANDS and getattr(_module(words[0]), "split", None)
    if not split:
        return _parsed(words, None)
    ours, theirs = split(words[1:])
    return _parsed([words[0], *ours], theirs)


def _parsed(words: Sequence[str], rest: list[str] | None) -> argparse.Namespace:
    called = next((word for word in words if word in COMMANDS), None)
    options, unknown = _parser(called).parse_known_args(words, argparse.Namespace(rest=rest))
    if unknown:
        # The command's own parser prints the usage of that command.
        names = options.parser._option_string_actions
        meant = next(filter(None, (_meant(word.partition("=")[0], names) for word in unknown if word[:2] == "--")), "")
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
    return options


def _meant(word: str, known: Iterable[str]) -> str:
    """Return a question that names the known word most like this one; "" if none is like it."""
    from difflib import get_close_matches

    # The dashes of options would make short ones alike.
    words = {each.lstrip("-"): each for each in known}
    found = get_close_matches(word.lstrip("-"), words, n=1, cutoff=0.6)
    return f"; did you mean {words[found[0]]}?" if found else ""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors escape control characters in the arguments that they quote."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def _parser(called: str | None) -> argparse.ArgumentParser:
    """Return the parser of all commands, with the options of the one that is called."""
    parser = _Parser(
        prog="mpinspect",
        description="Number ranges, loss scales and Tensor Cores: what mixed precision does to a model's training.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"mpinspect {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, help in COMMANDS.items():
        part = commands.add_parser(name, help=help, description=help, epilog=_EPILOG)
        if name == called:
            module = _module(name)
            module.add_options(part)
            part.set_defaults(run=module.run, parser=part)
    return parser


def _module(command: str) -> ModuleType:
    return import_module(f"mpinspect.commands.{command}")


def _escape_unprintable_names() -> None:
    """Make stdout and stderr escape characters that the terminal's encoding lacks instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
