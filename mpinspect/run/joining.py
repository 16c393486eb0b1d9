"""Everything that was recorded of a run, analysed and joined into one report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mpinspect.run.options import LaunchOptions
from mpinspect.run.outcome import Outcome, brief
from mpinspect.run.record import TRACE
from mpinspect.run.seen import Parts, RecordedModel, Seen

if TYPE_CHECKING:
    from mpinspect.kernels.analysis import KernelReport
    from mpinspect.run.report import ModelPart, RunReport
    from mpinspect.shapes.analysis import ShapeReport

NO_GPU = f"--kernels: no GPU was at work in the profiled step, so there are no kernels to judge; its operators are in {TRACE}"

Made = TypeVar("Made")


def join(parts: Parts, seen: Seen, outcome: Outcome, options: LaunchOptions, directory: Path) -> RunReport:
    """The report of a whole run. What fails in one part is said, and the others are there all the same."""
    from mpinspect.run.report import RunReport

    troubles: list[str] = []
    ranges = [_attempt(_ranges, model, model.name, troubles) for model in parts.models]
    shapes = _attempt(lambda gpu: _shapes(parts, gpu), options.gpu, "the shapes", troubles)
    kernels = _attempt(lambda gpu: _kernels(parts, gpu, shapes), options.gpu, "the kernels' trace", troubles)
    return RunReport(
        command=options.command,
        outcome=outcome.words,
        parts=tuple(part for part in ranges if part is not None),
        shapes=shapes,
        kernels=kernels,
        saw=tuple(dict.fromkeys([*seen.sentences(), *parts.notes, *troubles])),
        log_dir=str(directory),
    )


Given = TypeVar("Given")


def _attempt(make: Callable[[Given], Made], given: Given, what: str, troubles: list[str]) -> Made | None:
    try:
        return make(given)
    except Exception as error:
        troubles.append(f"{what} could not be analysed: {brief(error)}")
        return None


def _ranges(model: RecordedModel) -> ModelPart:
    from mpinspect.ranges.analysis import analyse
    from mpinspect.run.report import ModelPart

    return ModelPart(model.name, analyse(model.session))


def _shapes(parts: Parts, gpu: str | None) -> ShapeReport | None:
    if parts.matmuls is None:
        return None
    from mpinspect.shapes.analysis import analyse_shapes
    from mpinspect.shapes.lint import choose_gpu

    chosen, notes = choose_gpu(gpu or "auto")
    return analyse_shapes(parts.matmuls, chosen, model=", ".join(model.name for model in parts.models), notes=notes)


def _kernels(parts: Parts, gpu: str | None, shapes: ShapeReport | None) -> KernelReport | None:
    if parts.trace is None:
        return None
    from mpinspect.kernels.profile import read_trace

    report = read_trace(parts.trace, gpu=gpu, shapes=shapes)
    if not any(rank.has_gpu_work for rank in report.ranks):
        parts.notes.append(NO_GPU)
        return None
    return report
