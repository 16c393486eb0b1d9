"""``mpinspect kernels``: report from torch.profiler's traces which kernels ran on Tensor Cores."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mpinspect.commands.output import FOUND, UnusableError, add_output_options, gpu_name, show, status

if TYPE_CHECKING:
    from mpinspect.kernels.analysis import KernelReport
    from mpinspect.kernels.analysis.conditions import Condition


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "traces", metavar="TRACE", nargs="+", help="torch.profiler's trace, .json or .json.gz; or a folder: one a rank"
    )
    parser.add_argument(
        "--gpu", metavar="NAME", type=gpu_name, help="the GPU, if the traces do not name it: hopper, A100, ..."
    )
    add_output_options(parser, _condition, or_else=", or if a share meets a condition: 'tensor-core share < 60%%'")


def run(options: argparse.Namespace) -> int:
    from mpinspect.kernels.profile import read_trace
    from mpinspect.kernels.trace import TraceError

    try:
        report = read_trace(options.traces, gpu=options.gpu)
    except (TraceError, OSError) as error:
        raise UnusableError(error) from error
    show(report, options)
    return _status(report, options)


def _status(report: KernelReport, options: argparse.Namespace) -> int:
    names = [what for what in options.fail_on if isinstance(what, str)]
    # Check every condition: one that can't be decided is an error even if another one holds.
    held = [_holds(what, report) for what in options.fail_on if not isinstance(what, str)]
    if any(held):
        return FOUND
    return status(report.findings, names)


def _holds(condition: Condition, report: KernelReport) -> bool:
    held = condition.holds(report)
    if held is None:
        raise UnusableError(f"--fail-on {condition.text!r} can't be decided: {condition.doubt(report)}")
    return held


def _condition(text: str) -> str | Condition:
    from mpinspect.kernels.analysis import KERNEL_FINDING_IDS
    from mpinspect.kernels.analysis.conditions import parse
    from mpinspect.reporting.finding import SEVERITIES

    if text in (*SEVERITIES, *KERNEL_FINDING_IDS):
        return text
    try:
        return parse(text)
    except ValueError as error:
        if any(sign in text for sign in "<>"):
            raise argparse.ArgumentTypeError(str(error)) from error
        names = ", ".join((*SEVERITIES, *KERNEL_FINDING_IDS))
        # A misspelt id would match no finding, so that CI would pass for ever.
        raise argparse.ArgumentTypeError(f"{text!r} is neither a severity nor a finding ({names}); {error}") from error
