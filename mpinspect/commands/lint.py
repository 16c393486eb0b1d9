"""``mpinspect lint``: check whether a model's matrix shapes suit Tensor Cores, and compare the findings with a baseline.

A baseline is a small JSON file of accepted findings, for CI; docs/shape-lint.md describes it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mpinspect.commands.lint_model import build_inputs, input_spec
from mpinspect.commands.output import UnusableError, add_output_options, finding_named, print_text, save_to, status
from mpinspect.reporting.streams import printable, say
from mpinspect.runtime.appending import replace_whole
from mpinspect.runtime.decoding import Between, DecodingError, json_of, typed

if TYPE_CHECKING:
    from mpinspect.reporting.finding import Finding
    from mpinspect.shapes.analysis import ShapeReport

BASELINE_SCHEMA, BASELINE_VERSION = "mpinspect.shapes.baseline", 1
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
        help="run on real tensors (on a GPU if there is one), for models whose shapes depend on the data",
    )
    parser.add_argument("--fix", action="store_true", help="print only the table of sizes to pad")
    parser.add_argument(
        "--baseline", metavar="FILE", help="known findings: only findings not in it count for --fail-on"
    )
    parser.add_argument("--write-baseline", metavar="FILE", help="write this run's findings as a baseline")
    add_output_options(parser, _shape_finding, png=False)


def run(options: argparse.Namespace) -> int:
    baseline = None
    if options.baseline is not None:
        # Read it first: if it is broken, the model need not be built, which may take a while.
        baseline = read_baseline(options.baseline)
    report = _report(options)
    _print(report, options)
    if options.fix or baseline is not None or options.write_baseline is not None:
        _warn_of_gaps(report)
    findings = report.findings
    if baseline is not None:
        comparison = compare(findings, baseline)
        _print_comparison(comparison, baseline.other_than(report), options)
        findings = comparison.new
    if options.write_baseline is not None:
        write_baseline(options.write_baseline, report)
    save_to(report, options.md, options.html)
    return status(findings, options.fail_on)


def _report(options: argparse.Namespace) -> ShapeReport:
    import torch

    from mpinspect.commands.lint_model import describe, load_model
    from mpinspect.shapes.lint import choose_gpu, lint_shapes

    try:
        choose_gpu(options.gpu)
    except ValueError as error:
        raise UnusableError(error) from error
    kind = device = "meta"
    if options.real:
        kind, device = "real", "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(options.target, device)
    if options.real:
        model = model.to(device)
    args, kwargs = build_inputs(options.inputs, device)
    try:
        return lint_shapes(model, args, kwargs, options.dtype, options.gpu, not options.no_backward, kind)
    except ValueError as error:
        # lint_shapes raises ValueError with a sentence for wrong usage.
        reason = str(error).rstrip(".")
        if not options.inputs:
            reason += f". {_NO_INPUT}"
        raise UnusableError(f"{options.target}: {reason}") from error
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
    """Warn on stderr if the recording is incomplete or empty, which padding tables and baselines do not show."""
    for finding in report.findings:
        if finding.id == "recording-incomplete":
            _warn(f"the recording is incomplete: {finding.message}")
        elif finding.id == "nothing-recorded":
            _warn(finding.message)


def _warn(sentence: str) -> None:
    say(sys.stderr, sentence, "mpinspect lint")


def _print_comparison(comparison: Comparison, other: str, options: argparse.Namespace) -> None:
    """Print the new findings and the resolved ones, with --json on stderr. ``other``: a sentence to warn with, or ""."""
    if other:
        _warn(other)
    lines = [
        f"Against {options.baseline}: {len(comparison.new)} new, {comparison.known} known, {len(comparison.gone)} gone"
    ]
    lines += [f"  new   {finding.severity}  {key_of(finding)}" for finding in comparison.new]
    lines += [f"  gone  {key}" for key in comparison.gone]
    if options.json:
        print("", *map(printable, lines), sep="\n", file=sys.stderr)
        return
    if other:
        lines.append(f"  {other}")
    print("", *map(printable, lines), sep="\n")


def _shape_finding(text: str) -> str:
    from mpinspect.shapes.analysis import FINDING_IDS

    return finding_named(text, FINDING_IDS)


# -- the baseline --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Key:
    """Identifies a finding across runs, without its figures, which vary with every change of the model."""

    id: str
    layer: str
    size: Annotated[int, Between(-(1 << 63), (1 << 63) - 1)]

    def __str__(self) -> str:
        return " ".join(filter(None, [self.id, self.layer, str(self.size or "")]))


@dataclass(frozen=True)
class Comparison:
    """A report's findings compared with a baseline.

    Args:
        new: findings that are not in the baseline.
        gone: the baseline's keys without a matching finding.
        known: number of findings that are in the baseline.
    """

    new: tuple[Finding, ...]
    gone: tuple[Key, ...]
    known: int


@dataclass(frozen=True)
class Baseline:
    """The fields of a baseline file; ``gpu`` and ``dtype`` are those it was made for, "" if not in the file."""

    findings: tuple[Key, ...]
    gpu: str = ""
    dtype: str = ""

    def other_than(self, report: ShapeReport) -> str:
        """Return a sentence if the report is for another GPU or dtype, else ""."""
        made = [(self.gpu, report.gpu.name), (self.dtype, report.dtype)]
        if all(then == now for then, now in made if then and now):
            return ""
        then, now = (", ".join(filter(None, names)) for names in zip(*made, strict=True))
        return (
            f"the baseline was made for {then} and this report is for {now}: some findings differ for that reason alone"
        )


def key_of(finding: Finding) -> Key:
    """Return the key that identifies a finding across runs."""
    size = finding.evidence.get("size")
    return Key(finding.id, finding.layer, size if isinstance(size, int) else 0)


def compare(findings: Iterable[Finding], baseline: Baseline) -> Comparison:
    """Return the findings that the baseline lacks, and the baseline's keys without a finding."""
    found = [(finding, key_of(finding)) for finding in findings]
    known = frozenset(baseline.findings)
    new = tuple(finding for finding, key in found if key not in known)
    return Comparison(new, tuple(sorted(known.difference(key for _, key in found))), len(found) - len(new))


def read_baseline(path: str) -> Baseline:
    """Read a baseline file. Raises UnusableError if the file is missing, damaged, or no baseline."""
    try:
        document = json_of(Path(path))
    except FileNotFoundError as error:
        raise UnusableError(f"there is no baseline {path}: write it with --write-baseline {path}") from error
    except OSError as error:
        raise UnusableError(f"the baseline {path} can't be read: {error.strerror or error}") from error
    except DecodingError as error:
        raise UnusableError(
            f"the baseline {path} can't be read: it {error}. Rewrite it with --write-baseline"
        ) from error
    if not isinstance(document, dict) or document.get("schema") != BASELINE_SCHEMA:
        raise UnusableError(f"{path} is not a baseline of mpinspect lint: write one with --write-baseline")
    if document.get("schema_version") != BASELINE_VERSION:
        raise UnusableError(f"{path} is a baseline of another version than {BASELINE_VERSION}: write it anew")
    try:
        return typed(Baseline, document)
    except DecodingError as error:
        raise UnusableError(f"the baseline {path} is damaged ({error}): rewrite it with --write-baseline") from error


def write_baseline(path: str, report: ShapeReport) -> None:
    """Write the report's findings as a baseline, one key per line in sorted order, so that diffs are readable.

    Raises:
        UnusableError: the recording is empty, so a baseline would be useless; or the file can't be written.
    """
    if not report.flops:
        raise UnusableError(f"{path} is not written: no matrix product was recorded, so the baseline would be empty")
    keys = sorted({key_of(finding) for finding in report.findings})
    lines = [json.dumps({"id": key.id, "layer": key.layer, "size": key.size}) for key in keys]
    head = {
        "schema": BASELINE_SCHEMA,
        "schema_version": BASELINE_VERSION,
        "gpu": report.gpu.name,
        "dtype": report.dtype,
    }
    text = json.dumps(head)[:-1] + ', "findings": [' + ",".join(f"\n  {line}" for line in lines)
    if lines:
        text += "\n"
    text += "]}\n"
    try:
        # A full disk leaves the previous baseline intact.
        replace_whole(Path(path), text.encode("utf-8"))
    except OSError as error:
        raise UnusableError(f"{path} can't be written: {error.strerror or error}") from error
