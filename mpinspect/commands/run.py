"""``mpinspect run``: run an unmodified training script with the inspector attached to its models."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from mpinspect.commands.output import OK, UnusableError, gpu_name, positive, status
from mpinspect.numeric.recipes import RECIPES, as_recipe
from mpinspect.ranges.kinds import KINDS
from mpinspect.run.options import LaunchOptions

_USAGE = "mpinspect run [options] (SCRIPT | -m MODULE | -c CODE | -) [ARGUMENT ...]"
_FAIL_ON = (
    "exit with 1 if the script ended with 0 and there are findings of this severity or above ('warning', 'error'), or with "
    "this id; may be repeated"
)
#: Options that take no value.
FLAGS = ("-h", "--help", "--no-watch", "--lint", "--no-lint", "--kernels", "--eager-samples", "--full")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = _USAGE
    _add_script(parser)
    _add_sampling(parser)
    _add_reports(parser)


def _add_script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="SCRIPT",
        help="the script, as after python, or - for stdin; all words after it are the script's own arguments",
    )
    parser.add_argument("-m", action="store_true", dest="is_module", help="SCRIPT is a module, as after python -m")
    parser.add_argument(
        "-c", action="store_true", dest="is_code", help="SCRIPT is the program itself, as after python -c"
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--every",
        type=positive,
        metavar="N",
        help="sample every N-th step (10; with --max-overhead: 1, the smallest interval)",
    )
    parser.add_argument(
        "--dense", type=_natural, default=10, metavar="N", help="sample all of the first N steps (%(default)s)"
    )
    parser.add_argument(
        "--max-overhead",
        type=_overhead,
        metavar="SHARE",
        help="limit the inspection to this share of the training's time (0.02 is 2%%); none: no limit (default: no limit until "
        "the inspection has taken over half of the training's time)",
    )
    parser.add_argument(
        "--eager-samples",
        action="store_true",
        help="run compiled models uncompiled in sampled steps, to count inside them; changes the last bits of results",
    )
    parser.add_argument("--steps", type=positive, metavar="N", help="stop inspecting a model after N of its steps")
    parser.add_argument("--kinds", type=_kinds, metavar="A,B", help=f"kinds of tensors to count, of {', '.join(KINDS)}")
    pattern = "shell pattern over dotted paths of modules and parameters; may be repeated"
    parser.add_argument("--include", action="append", metavar="PATTERN", help=f"inspect only these: a {pattern}")
    parser.add_argument("--exclude", action="append", metavar="PATTERN", help=f"do not inspect these: a {pattern}")
    parser.add_argument(
        "--no-watch", action="store_false", dest="watch", help="do not check every step for infinities and NaNs"
    )
    parser.add_argument(
        "--recipes",
        type=_recipes,
        default=(),
        metavar="A,B",
        help=f"measure the values that every Linear layer would lose in recipes of FP8 and FP4, of {', '.join(RECIPES)}",
    )
    parser.add_argument(
        "--loss-scale",
        type=_scale,
        metavar="S",
        help="the factor by which the script itself multiplies its loss (1: it does not)",
    )


def _add_reports(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--log-dir",
        metavar="DIR",
        help="the run directory (runs/SCRIPT-DATE-TIME, or next to the folder of the script's own --output_dir)",
    )
    parser.add_argument(
        "--lint",
        action=argparse.BooleanOptionalAction,
        help="report the shapes of one step's matrix products in full (default: in brief, if they can be recorded)",
    )
    parser.add_argument("--kernels", action="store_true", help="profile one step: which kernels ran on Tensor Cores")
    parser.add_argument(
        "--gpu", type=gpu_name, metavar="NAME", help="judge for this GPU: hopper, A100, ... (the one at hand)"
    )
    parser.add_argument(
        "--tracker",
        type=_tracker,
        metavar="NAME",
        help="log a few scalars and the report's page to the run that the script has open: wandb, mlflow or trackio",
    )
    parser.add_argument(
        "--curves",
        type=_curves,
        default=20,
        metavar="N",
        help="scalars of the N worst tensors of each kind in the TensorBoard log (%(default)s), or all",
    )
    parser.add_argument(
        "--full", action="store_true", help="print the whole report at the end, as mpinspect report shows it"
    )
    parser.add_argument("--fail-on", action="append", type=_finding, default=[], metavar="WHAT", help=_FAIL_ON)


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command's words, ending with SCRIPT, and the script's arguments, which may look like our options."""
    ours: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            return [*ours, "--", *left[:1]], left[1:]
        form = word[:2]
        if form in ("-m", "-c"):
            if word != form:
                # As in Python, -mpackage.module may be one word.
                left.insert(0, word[2:])
            return [*ours, form, "--", *left[:1]], left[1:]
        if not word.startswith("-") or word == "-":
            return [*ours, "--", word], left
        ours.append(word)
        has_value = "=" in word or (word[1] != "-" and len(word) > 2)
        if not has_value and not any(flag.startswith(word) for flag in FLAGS):
            ours += left[:1]
            del left[:1]
    return ours, []


def run(options: argparse.Namespace) -> int:
    from mpinspect.run import UnusableDirectoryError, launch

    is_file = not options.is_module and not options.is_code and options.target != "-"
    if is_file and not Path(options.target).exists():
        # Like Python's message, with its status.
        raise UnusableError(f"can't open file {options.target!r}: there is no such script")
    options.arguments = options.rest
    options.every = options.every or (10 if options.max_overhead in (None, math.inf) else 1)
    given: dict[str, Any] = {field.name: getattr(options, field.name) for field in fields(LaunchOptions)}
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = tuple(value)
    asked = LaunchOptions(**given)
    try:
        report = launch(asked)
    except UnusableDirectoryError as error:
        raise UnusableError(error) from error
    if report is None:
        return OK
    return status(report.findings, asked.fail_on)


def _natural(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def _curves(text: str) -> int | None:
    return None if text == "all" else _natural(text)


def _scale(text: str) -> float:
    return _below(float("inf"), text, "a loss scale is a positive number, as 1024")


def _overhead(text: str) -> float:
    """Parse a share; "none" is inf."""
    if text == "none":
        return math.inf
    return _below(1, text, "give a share between 0 and 1, 0.02 for 2%, or none")


def _below(limit: float, text: str, advice: str) -> float:
    """Parse a number above 0 and below ``limit``."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < limit:
        raise argparse.ArgumentTypeError(f"{text!r}: {advice}")
    return number


def _tracker(text: str) -> str:
    from mpinspect.reporting.trackers import check_name

    try:
        return check_name(text)
    except (ValueError, ImportError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _kinds(text: str) -> tuple[str, ...]:
    named = tuple(filter(None, (name.strip() for name in text.split(","))))
    unknown = [name for name in named if name not in KINDS]
    if unknown or not named:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown) or text!r}: no kind of tensor; there are {', '.join(KINDS)}"
        )
    return named


def _recipes(text: str) -> tuple[str, ...]:
    try:
        return tuple(dict.fromkeys(as_recipe(name.strip()).name for name in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def known_findings() -> tuple[str, ...]:
    """Return the values that --fail-on accepts. Imports numpy."""
    from mpinspect.kernels.analysis import KERNEL_FINDING_IDS
    from mpinspect.ranges.faults.registry import FINDING_IDS
    from mpinspect.reporting.finding import SEVERITIES
    from mpinspect.shapes.analysis import FINDING_IDS as SHAPE_FINDING_IDS

    return (*SEVERITIES, *FINDING_IDS, *SHAPE_FINDING_IDS, *KERNEL_FINDING_IDS)


def _finding(text: str) -> str:
    import subprocess
    import sys

    # Ask another process: this one must not import numpy before the script does.
    ask = "from mpinspect.commands.run import known_findings; print(*known_findings())"
    answer = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    known = answer.stdout.split()
    # A misspelt id would match no finding, so that CI would pass for ever.
    if answer.returncode == 0 and text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a severity nor a finding: {', '.join(known)}")
    return text
