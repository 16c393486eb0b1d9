"""Findings that are known and accepted: a small JSON file for CI. The format: docs/shape-lint.md."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mpinspect.commands.outcome import UnusableError
from mpinspect.runtime.decoding import Between, DecodingError, json_of, typed

if TYPE_CHECKING:
    from mpinspect.reporting.finding import Finding
    from mpinspect.shapes.analysis import ShapeReport

SCHEMA = "mpinspect.shapes.baseline"
SCHEMA_VERSION = 1


@dataclass(frozen=True, order=True)
class Key:
    """What makes a finding the same one in the next run: not its figures, which move with every change of the model."""

    id: str
    layer: str
    size: Annotated[int, Between(-(1 << 63), (1 << 63) - 1)]

    def __str__(self) -> str:
        return " ".join([self.id, *([self.layer] if self.layer else []), *([str(self.size)] if self.size else [])])


@dataclass(frozen=True)
class _Document:
    """What a file holds beside its schema."""

    findings: tuple[Key, ...]
    gpu: str = ""
    dtype: str = ""


@dataclass(frozen=True)
class Comparison:
    """Findings that the baseline does not hold, and keys of it that nothing matches any more."""

    new: tuple[Finding, ...]
    gone: tuple[Key, ...]
    known: int


@dataclass(frozen=True)
class Baseline:
    """A file's keys, and the GPU and dtype that it was made for ("" where it does not say)."""

    keys: frozenset[Key]
    gpu: str = ""
    dtype: str = ""

    def other_than(self, report: ShapeReport) -> str:
        """A sentence where the report is for another GPU or dtype; else ""."""
        made = [(self.gpu, report.gpu.name), (self.dtype, report.dtype)]
        if all(then == now for then, now in made if then and now):
            return ""
        then, now = (", ".join(filter(None, names)) for names in zip(*made, strict=True))
        return (
            f"the baseline was made for {then} and this report is for {now}: findings may be new or gone for that alone"
        )


def key_of(finding: Finding) -> Key:
    size = finding.evidence.get("size")
    return Key(finding.id, finding.layer, size if isinstance(size, int) else 0)


def compare(findings: Iterable[Finding], baseline: Baseline) -> Comparison:
    found = list(findings)
    keys = {key_of(finding) for finding in found}
    new = tuple(finding for finding in found if key_of(finding) not in baseline.keys)
    return Comparison(new, tuple(sorted(baseline.keys - keys)), len(found) - len(new))


def read_baseline(path: str) -> Baseline:
    """A file's keys and what it was made for.

    Raises:
        UnusableError: it is missing, or no such file.
    """
    try:
        document = json_of(Path(path))
    except FileNotFoundError as error:
        raise UnusableError(f"there is no baseline {path}: write it with --write-baseline {path}") from error
    except OSError as error:
        raise UnusableError(f"the baseline {path} can't be read: {error.strerror or error}") from error
    except DecodingError as error:
        raise UnusableError(
            f"the baseline {path} can't be read: it {error}. Write it anew with --write-baseline"
        ) from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise UnusableError(f"{path} is no baseline of mpinspect lint: write one with --write-baseline")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise UnusableError(f"{path} is a baseline of another version than {SCHEMA_VERSION}: write it anew")
    try:
        read = typed(_Document, document)
    except DecodingError as error:
        raise UnusableError(f"the baseline {path} is damaged ({error}): write it anew with --write-baseline") from error
    return Baseline(frozenset(read.findings), read.gpu, read.dtype)


def write_baseline(path: str, report: ShapeReport) -> None:
    """Write every finding's key, sorted, one a line, so that diffs are readable.

    Raises:
        UnusableError: nothing was recorded, so that it would let everything pass; or it can't be written.
    """
    if not report.flops:
        raise UnusableError(f"{path} is not written: nothing was recorded, and a baseline of nothing says nothing")
    keys = sorted({key_of(finding) for finding in report.findings})
    lines = [json.dumps({"id": key.id, "layer": key.layer, "size": key.size}) for key in keys]
    head = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "gpu": report.gpu.name, "dtype": report.dtype}
    text = (
        json.dumps(head)[:-1]
        + ', "findings": ['
        + ",".join(f"\n  {line}" for line in lines)
        + ("\n" if lines else "")
        + "]}\n"
    )
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UnusableError(f"{path} can't be written: {error.strerror or error}") from error
