"""``mpinspect run``: run an unmodified training script with the inspector attached to its models."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from mpinspect.commands.output import OK, UnusableError, gpu_name, positive, status
from mpinspect.numeric.recipes import RECIPES, as_recipe
from mpinspect.ranges.kinds import KINDS
from mpinspect.run.options import LaunchOptions

_USAGE = "mpinspect run [options] (SCRIPT | -m MODULE | -c CODE | -) [ARGUMENT ...]"
_FAIL_ON = (
    "exit with 1 where the script ended with 0 and there are findings of this severity or above ('warning', 'error'), or with "
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
        "script",
        metavar="SCRIPT",
        help="the script, as after python, or - for stdin; all that follows it is the script's own",
    )
    parser.add_argument("-m", action="store_true", dest="is_module", help="SCRIPT is a module, as after python -m")
    parser.add_argument(
        "-c", action="store_true", dest="is_code", help="SCRIPT is the program itself, as after python -c"
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--every", type=positive, metavar="N", help="sample every N-th step (10; with --max-overhead at most: 1)"
    )
    parser.add_argument(
        "--dense", type=_natural, default=10, metavar="N", help="sample all of the first N steps (%(default)s)"
    )
    parser.add_argument(
        "--max-overhead",
        type=_overhead,
        metavar="SHARE",
        help="sample as often as this share of the training's time allows (0.02 is 2%%) instead; none: as often as --every says "
        "(without this option: until that takes over half of the training's time)",
    )
    parser.add_argument(
        "--eager-samples",
        action="store_true",
        help="run what torch.compile compiled uncompiled in sampled steps, to see inside; changes the last bits of results",
    )
    parser.add_argument("--steps", type=positive, metavar="N", help="stop inspecting a model after N of its steps")
    parser.add_argument("--kinds", type=_kinds, metavar="A,B", help=f"what to count, of {', '.join(KINDS)}")
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
        help=f"measure what recipes of FP8 and FP4 would lose of every Linear layer, of {', '.join(RECIPES)}",
    )
    parser.add_argument(
        "--loss-scale", type=_scale, metavar="S", help="of a script that multiplies its loss by hand (1 if it does not)"
    )


def _add_reports(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-dir",
        metavar="DIR",
        help="the run directory (runs/SCRIPT-DATE-TIME, or beside the folder that the script's own --output_dir names)",
    )
    parser.add_argument(
        "--lint",
        action=argparse.BooleanOptionalAction,
        help="lint the matrix products of one step as it ran, in full (without this option: in brief, where nothing hinders)",
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
            # As in Python, -mpackage.module may be one word.
            given = [word[2:]] if word != form else left[:1]
            return [*ours, form, "--", *given], left if word != form else left[1:]
        if not word.startswith("-") or word == "-":
            return [*ours, "--", word], left
        ours.append(word)
        if "=" not in word and not any(flag.startswith(word) for flag in FLAGS):
            ours += left[:1]
            del left[:1]
    return ours, []


def run(options: argparse.Namespace) -> int:
    from mpinspect.run import UnusableDirectoryError, launch

    is_file = not options.is_module and not options.is_code and options.script != "-"
    if is_file and not Path(options.script).exists():
        # Like Python's message, with its status.
        raise UnusableError(f"can't open file {options.script!r}: there is no such script")
    asked = LaunchOptions(
        target=options.script,
        is_module=options.is_module,
        is_code=options.is_code,
        full=options.full,
        arguments=tuple(options.rest),
        log_dir=options.log_dir,
        kinds=options.kinds,
        include=_several(options.include),
        exclude=_several(options.exclude),
        every=options.every or (10 if options.max_overhead in (None, math.inf) else 1),
        dense=options.dense,
        steps=options.steps,
        lint=options.lint,
        kernels=options.kernels,
        gpu=options.gpu,
        watch=options.watch,
        loss_scale=options.loss_scale,
        max_overhead=options.max_overhead,
        eager_samples=options.eager_samples,
        tracker=options.tracker,
        curves=options.curves,
        fail_on=tuple(options.fail_on),
        recipes=options.recipes,
    )
    try:
        report = launch(asked)
    except UnusableDirectoryError as error:
        raise UnusableError(error) from error
    return OK if report is None else status(report.findings, asked.fail_on)


def _several(given: Iterable[str] | None) -> tuple[str, ...] | None:
    return None if given is None else tuple(given)


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
    return math.inf if text == "none" else _below(1, text, "give a share between 0 and 1, 0.02 for 2%, or none")


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
