"""Reads two runs and compares what both have: models, shapes, kernels."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from mpinspect.numeric.formats import FormatLike, as_format
from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.analysis.comparison import compare_ranges
from mpinspect.ranges.analysis.precision import ledger_line
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.session import Session
from mpinspect.ranges.store import SessionError, read_session
from mpinspect.ranges.windows.tensors import narrowest
from mpinspect.run.diff.products import Product, compare_kernels, compare_shapes, products
from mpinspect.run.diff.report import DiffReport, ModelDiff, Side
from mpinspect.run.reading import is_run_directory, read_run
from mpinspect.run.report import ModelPart

if TYPE_CHECKING:
    from mpinspect.kernels.analysis import KernelReport

#: A run directory, an inspector's log_dir, a session file, a session, or a report.
Run: TypeAlias = "str | PathLike[str] | Session | RangeReport"

Kept = TypeVar("Kept")
Found = TypeVar("Found")


def diff(first: Run, second: Run, *, format: FormatLike | None = None) -> DiffReport:
    """Compare two runs: what changed in settings, layers, events, shapes and kernels, and from which step they part.

    Args:
        first, second: a run directory of ``mpinspect run``, the inspector's log_dir, a session file, a ``Session``, or a
            ``RangeReport``, whose session is compared. The first is the one to compare with: a baseline.
        format: the number format to judge both against; None for the format that both use, or, where they use two, the
            narrower one.

    Raises:
        SessionError: a run can't be read, has no counts, or shares no layer with the other.
        ValueError: ``format`` is the name of no known format.
        OSError: a directory can't be listed.
        TypeError: ``first`` or ``second`` is none of these.
    """
    name = None
    if format is not None:
        name = as_format(format).name
    one, other = _read(first, name), _read(second, name)
    for run in (one, other):
        _require_counts(run)
    pairs = _pairs(one, other)
    models = tuple(ModelDiff(right.name, compare_ranges(*_alike(left.ranges, right.ranges))) for left, right in pairs)
    if not any(model.ranges.compared.tensors for model in models):
        raise SessionError(_nothing_in_common(one, other))
    paired = {id(part) for pair in pairs for part in pair}
    only_first, only_second = (tuple(part.name for part in run.parts if id(part) not in paired) for run in (one, other))
    return DiffReport(
        first=_side(one),
        second=_side(other, one),
        models=models,
        only_first=only_first,
        only_second=only_second,
        shapes=_both(one.shapes, other.shapes, compare_shapes),
        kernels=_both(one.kernels, other.kernels, compare_kernels),
    )


def _both(first: Kept | None, second: Kept | None, compare: Callable[[Kept, Kept], Found]) -> Found | None:
    """Return the comparison; None if either argument is None."""
    if first is None or second is None:
        return None
    return compare(first, second)


@dataclass(frozen=True)
class _Read:
    """A run as read from disk; ``shapes`` and ``kernels`` are None if missing, ``command`` is "" without a script."""

    path: str
    parts: tuple[ModelPart, ...]
    command: str = ""
    shapes: tuple[Product, ...] | None = None
    kernels: KernelReport | None = None
    notes: tuple[str, ...] = ()
    arguments: tuple[str, ...] | None = None


def _read(run: Run, format: str | None) -> _Read:
    if isinstance(run, RangeReport):
        run = run.session
    if not isinstance(run, (Session, str, PathLike)):
        kind = type(run).__name__
        raise TypeError(f"diff() compares sessions, reports or directories, not {kind}: pass its session() or report()")
    if isinstance(run, Session):
        return _Read("", (ModelPart(run.info.model, analyse(run, format)),))
    path = str(Path(run))
    if not is_run_directory(path):
        session = read_session(path)
        return _Read(path, (ModelPart(session.info.model, analyse(session, format)),))
    report = read_run(path, format)
    command = f"{report.command} ({report.outcome})"
    shapes = None
    if report.shapes is not None:
        shapes = products(report.shapes)
    return _Read(path, report.parts, command, shapes, report.kernels, report.saw, _arguments(report.command))


def _arguments(command: str) -> tuple[str, ...] | None:
    """Return the arguments of a script, each option with the values that follow it; None of a command that no shell takes."""
    found: list[str] = []
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    for each in map(shlex.quote, words[1:]):
        is_option = each.startswith("-") and not each[1:2].isdigit()
        if is_option or not found or not found[-1].startswith("-"):
            found.append(each)
        else:
            found[-1] += f" {each}"
    return tuple(found)


def _require_counts(run: _Read) -> None:
    if any(part.ranges.session.windows for part in run.parts):
        return
    why = "no recorded model can be read"
    if run.parts:
        why = "no step was sampled"
    if not all(part.ranges.session.progress.ended for part in run.parts):
        why = "the run has not written any yet, or was killed before it could"
    raise SessionError(f"{run.path or 'A session'} holds no counts to compare: {why}.")


def _pairs(first: _Read, second: _Read) -> list[tuple[ModelPart, ModelPart]]:
    """Return the models of both runs by name; where each run has one model, those two."""
    if len(first.parts) == len(second.parts) == 1:
        return [(first.parts[0], second.parts[0])]
    by_name = {part.name: part for part in first.parts}
    found = [(by_name[part.name], part) for part in second.parts if part.name in by_name]
    if not found:
        names = [", ".join(part.name for part in run.parts) for run in (first, second)]
        raise SessionError(
            f"{first.path} and {second.path} have no model in common: {names[0]} against {names[1]}. Give one model of each, "
            f"as {Path(first.path or 'runs/a') / first.parts[0].name}."
        )
    return found


def _alike(first: RangeReport, second: RangeReport) -> tuple[RangeReport, RangeReport]:
    """Return the reports, both judged in the narrower format of the two."""
    format = narrowest((first.format, second.format))
    one, other = (report if report.format == format else analyse(report.session, format) for report in (first, second))
    return one, other


def _nothing_in_common(first: _Read, second: _Read) -> str:
    names = [_some_layers(run.parts) for run in (first, second)]
    return (
        f"{first.path or 'The first'} and {second.path or 'the second'} have no layer in common ({names[0]} against "
        f"{names[1]}): give two runs of one model, with the same kinds of tensor captured."
    )


def _some_layers(parts: Sequence[ModelPart]) -> str:
    names = [f"{layer.name or '(the model)'!r}" for part in parts for layer in part.ranges.layers if layer.samples]
    if len(names) > 3:
        names = [*names[:3], "..."]
    return ", ".join(names)


def _side(run: _Read, before: _Read | None = None) -> Side:
    words = [run.command]
    notes = list(run.notes)
    if run.path and before is not None and before.path and Path(run.path).resolve() == Path(before.path).resolve():
        notes.append("it is the same run as A")
    for part in run.parts:
        session = part.ranges.session
        progress = session.progress
        words.append(", ".join(filter(None, (part.name, f"{progress.steps:,} steps", ledger_line(session)))))
        if not progress.ended:
            notes.append(f"{part.name or 'the run'} is still running, or was killed: only its data on disk is compared")
        notes += session.notes
    return Side(run.path, "; ".join(filter(None, words)), tuple(dict.fromkeys(notes)), run.arguments)
