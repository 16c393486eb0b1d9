"""``mpinspect lint``: whether a model's matrix shapes suit Tensor Cores, without training it."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from mpinspect.commands.lint_inputs import build_inputs, input_spec
from mpinspect.commands.outcome import UnusableError, status
from mpinspect.commands.output import add_output_options, finding_named, print_text, save_to
from mpinspect.reporting.streams import printable, say

if TYPE_CHECKING:
    from mpinspect.commands.lint_baseline import Comparison
    from mpinspect.shapes.analysis import ShapeReport


_NO_INPUT = "No --input was given: add one for each argument of its forward, as --input 64,1024"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="MODULE:ATTR",
        help="a torch.nn.Module, or a class or function that makes one without arguments: package.module:build_model or "
        "path/to/file.py:build_model",
    )
    parser.add_argument(
        "--input",
        metavar="[NAME=][DTYPE:]SIZES",
        action="append",
        type=input_spec,
        default=[],
        dest="inputs",
        help="an input's sizes, as 64,1024 or input_ids=int64:8,128; without a name the next positional argument; float32, or "
        "int64 for names that end in _ids, _mask, labels and the like, unless a dtype is given; may be repeated",
    )
    parser.add_argument(
        "--dtype", help="autocast to this dtype (float16, bfloat16); without it the model runs as it is"
    )
    parser.add_argument(
        "--gpu",
        default="auto",
        help="volta, turing, ampere, ada, hopper, blackwell, a card as 'H100 PCIe', or auto: the GPU at hand, else ampere",
    )
    parser.add_argument("--no-backward", action="store_true", help="the forward only")
    parser.add_argument(
        "--real",
        action="store_true",
        help="run on real tensors (a GPU if there is one), where shapes depend on the data",
    )
    parser.add_argument("--fix", action="store_true", help="print only the table of sizes to pad")
    parser.add_argument("--baseline", metavar="FILE", help="findings that are known: only others count for --fail-on")
    parser.add_argument("--write-baseline", metavar="FILE", help="write this run's findings as a baseline")
    add_output_options(parser, _shape_finding, png=False)


def run(options: argparse.Namespace) -> int:
    from mpinspect.commands.lint_baseline import compare, read_baseline, write_baseline

    # A baseline that can't be read is told before the model is built, which may take a while.
    baseline = None if options.baseline is None else read_baseline(options.baseline)
    report = _report(options)
    comparison = None if baseline is None else compare(report.findings, baseline)
    _print(report, options)
    if options.fix or baseline is not None or options.write_baseline is not None:
        _warn_of_gaps(report)
    if baseline is not None and comparison is not None:
        other = baseline.other_than(report)
        if other:
            _warn(other)
        _print_comparison(comparison, other, options)
    if options.write_baseline is not None:
        write_baseline(options.write_baseline, report)
    save_to(report, options.md)
    return status(report.findings if comparison is None else comparison.new, options.fail_on)


def _report(options: argparse.Namespace) -> ShapeReport:
    import torch

    from mpinspect.commands.lint_target import describe, load_model
    from mpinspect.shapes.lint import choose_gpu, lint_shapes

    try:
        choose_gpu(options.gpu)
    except ValueError as error:
        raise UnusableError(error) from error
    device = "meta" if not options.real else "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(options.target, device)
    if options.real:
        model = model.to(device)
    args, kwargs = build_inputs(options.inputs, device)
    kind = "real" if options.real else "meta"
    try:
        return lint_shapes(model, args, kwargs, options.dtype, options.gpu, not options.no_backward, kind)
    except ValueError as error:
        # What the user did wrong, in a sentence already.
        hint = "" if options.inputs else f". {_NO_INPUT}"
        raise UnusableError(f"{options.target}: {str(error).rstrip('.')}{hint}") from error
    except (Exception, SystemExit) as error:
        raise UnusableError(f"{options.target} could not be run: {describe(error)}") from error


def _print(report: ShapeReport, options: argparse.Namespace) -> None:
    if options.json:
        sys.stdout.write(report.to_json())
    elif options.fix:
        from mpinspect.reporting.text import render
        from mpinspect.shapes.report.document import padding_document

        sys.stdout.write(render(padding_document(report), 100))
    else:
        print_text(report)


def _warn_of_gaps(report: ShapeReport) -> None:
    """On stderr where what is printed or written does not tell by itself that it is of a part of the model, or of nothing."""
    for finding in report.findings:
        if finding.id == "recording-incomplete":
            _warn(f"the recording is incomplete: {finding.message}")
        elif finding.id == "nothing-recorded":
            _warn(finding.message)


def _warn(sentence: str) -> None:
    say(sys.stderr, sentence, "mpinspect lint")


def _print_comparison(comparison: Comparison, other: str, options: argparse.Namespace) -> None:
    """What is new and what is gone; on stderr where stdout holds JSON."""
    from mpinspect.commands.lint_baseline import key_of

    lines = [
        f"Against {options.baseline}: {len(comparison.new)} new, {comparison.known} known, {len(comparison.gone)} gone"
    ]
    lines += [f"  new   {finding.severity}  {key_of(finding)}" for finding in comparison.new]
    lines += [f"  gone  {key}" for key in comparison.gone]
    # On stderr it stands already.
    lines += [f"  {other}"] if other and not options.json else []
    print("", *map(printable, lines), sep="\n", file=sys.stderr if options.json else sys.stdout)


def _shape_finding(text: str) -> str:
    from mpinspect.shapes.analysis import FINDING_IDS

    return finding_named(text, FINDING_IDS)
