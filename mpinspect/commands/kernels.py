"""``mpinspect kernels``: what ran on Tensor Cores, by torch.profiler's traces."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from mpinspect.commands.outcome import FOUND, OK, UnusableError, status
from mpinspect.commands.range_output import with_suffix

if TYPE_CHECKING:
    from mpinspect.analysis.tensor_cores import KernelReport
    from mpinspect.analysis.tensor_cores.conditions import Condition
    from mpinspect.gpus import Gpu


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "traces", metavar="TRACE", nargs="+", help="torch.profiler's trace, .json or .json.gz; or a folder: one a rank"
    )
    parser.add_argument(
        "--gpu", metavar="NAME", type=_gpu, help="the GPU, where the traces do not tell: hopper, A100, ..."
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--png", metavar="PATH", type=with_suffix(".png"), help="write the picture too")
    parser.add_argument("--md", metavar="PATH", type=with_suffix(".md"), help="write a Markdown report too")
    parser.add_argument(
        "--fail-on",
        metavar="WHAT",
        action="append",
        type=_condition,
        default=[],
        help="exit with 1 on findings of this severity or above ('warning', 'error'), with this id, or where a share is as "
        "said: 'tensor-core share < 60%%'; may be repeated",
    )


def run(options: argparse.Namespace) -> int:
    from mpinspect.analysis.tensor_cores import analyse_kernels
    from mpinspect.trace_file import TraceError, read_trace_files

    try:
        traces = read_trace_files(options.traces)
    except (TraceError, OSError) as error:
        raise UnusableError(error) from error
    report = analyse_kernels(traces, options.gpu)
    if options.json:
        sys.stdout.write(report.to_json())
    else:
        _print_text(report)
    return _conclude(report, options)


def _conclude(report: KernelReport, options: argparse.Namespace) -> int:
    for path in filter(None, (options.png, options.md)):
        try:
            report.save(path)
        except OSError as error:
            raise UnusableError(f"{path} can't be written: {error.strerror or error}") from error
    names = [what for what in options.fail_on if isinstance(what, str)]
    # Every condition is looked at: one that can't be told must not hide behind one that holds.
    held = [_holds(what, report) for what in options.fail_on if not isinstance(what, str)]
    return FOUND if any(held) or status(report.findings, names) == FOUND else OK


def _holds(condition: Condition, report: KernelReport) -> bool:
    held = condition.holds(report)
    if held is None:
        raise UnusableError(f"--fail-on {condition.text!r} can't be told: {condition.doubt(report)}")
    return held


def _print_text(report: KernelReport) -> None:
    from rich.console import Console

    from mpinspect.reports import kernels_text

    if sys.stdout.isatty():
        kernels_text.render_console(report, Console())
    else:
        sys.stdout.write(kernels_text.render(report))


def _condition(text: str) -> str | Condition:
    from mpinspect.analysis.finding import SEVERITIES
    from mpinspect.analysis.tensor_cores import KERNEL_FINDING_IDS
    from mpinspect.analysis.tensor_cores.conditions import parse

    if text in (*SEVERITIES, *KERNEL_FINDING_IDS):
        return text
    try:
        return parse(text)
    except ValueError as error:
        if any(sign in text for sign in "<>"):
            raise argparse.ArgumentTypeError(str(error)) from error
        names = ", ".join((*SEVERITIES, *KERNEL_FINDING_IDS))
        # A name that no finding can have would let everything pass for ever.
        raise argparse.ArgumentTypeError(f"{text!r} is neither a severity nor a finding ({names}); {error}") from error


def _gpu(text: str) -> Gpu | None:
    from mpinspect import gpus

    if text.strip().lower() == "auto":
        return None
    try:
        return gpus.named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
