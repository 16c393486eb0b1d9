"""Analyses all recordings of a run and joins them into one report, including failures of its other processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from mpinspect.run.directory import process_name
from mpinspect.run.options import LaunchOptions
from mpinspect.run.outcome import Outcome, RecordedModel, Recordings, Seen
from mpinspect.run.record import STILL_RUNNING, TRACE, load_record, read_record
from mpinspect.runtime.briefly import brief
from mpinspect.runtime.decoding import DecodingError

if TYPE_CHECKING:
    from mpinspect.kernels.analysis import KernelReport
    from mpinspect.ranges.session import Event
    from mpinspect.run.report import ModelPart, RunReport
    from mpinspect.shapes.analysis import ShapeReport

#: Most seconds spent reading other processes' sessions: there may be hundreds, on a network file system.
_PATIENCE_S = 5.0
#: Most seconds that the first rank waits for the other ranks to end, and seconds between two checks.
_ENDS_WITHIN_S, _LOOK_S = 5.0, 0.05
_NO_GPU = f"--kernels: no GPU was at work in the profiled step, so there are no kernels to judge; its operators are in {TRACE}"

Made = TypeVar("Made")


def join(recordings: Recordings, seen: Seen, outcome: Outcome, options: LaunchOptions, directory: Path) -> RunReport:
    """Return the report of a run; if the analysis of a part fails, leave the part out and add a sentence about it."""
    from mpinspect.run.report import RunReport

    notes: list[str] = []
    gpu = options.gpu
    ranges = [_attempt(partial(_ranges, model), model.name, notes) for model in recordings.models]
    shapes = _attempt(partial(_shapes, recordings, gpu), "the shapes", notes)
    kernels = _attempt(partial(_kernels, recordings, gpu, shapes, notes), "the kernels' trace", notes)
    return RunReport(
        command=options.command,
        outcome=outcome.words,
        parts=tuple(part for part in ranges if part is not None),
        shapes=shapes,
        kernels=kernels,
        saw=tuple(dict.fromkeys([*seen.sentences(), *notes])),
        log_dir=str(directory),
        is_shape_detail=not options.lint,
        by_error=outcome.by_error,
    )


def _attempt(make: Callable[[], Made], what: str, notes: list[str]) -> Made | None:
    try:
        return make()
    except Exception as error:
        notes.append(f"{what} could not be analysed: {brief(error)}")
        return None


def _ranges(model: RecordedModel) -> ModelPart:
    from mpinspect.ranges.analyse import analyse
    from mpinspect.run.report import ModelPart

    return ModelPart(model.name, analyse(model.session))


def _shapes(recordings: Recordings, gpu: str | None) -> ShapeReport | None:
    if recordings.matmuls is None:
        return None
    from mpinspect.shapes.analysis import analyse_shapes
    from mpinspect.shapes.lint import choose_gpu

    chosen, notes = choose_gpu(gpu or "auto")
    names = ", ".join(model.name for model in recordings.models)
    return analyse_shapes(recordings.matmuls, chosen, model=names, notes=notes)


def _kernels(
    recordings: Recordings, gpu: str | None, shapes: ShapeReport | None, notes: list[str]
) -> KernelReport | None:
    if recordings.trace is None:
        return None
    from mpinspect.kernels.profile import read_trace

    report = read_trace(recordings.trace, gpu=gpu, shapes=shapes)
    if not any(rank.has_gpu_work for rank in report.ranks):
        notes.append(_NO_GPU)
        return None
    return report


# -- the other ranks ------------------------------------------------------------------------------------------------------


def with_ranks(
    models: list[RecordedModel], own: Path, ranks: list[Path], *, outcome: Outcome
) -> tuple[list[RecordedModel], list[Path], list[str]]:
    """Return this rank's models, with the counts that other ranks have on disk added.

    Waits for ranks that are about to end, except after an error, when they may hang in a collective. Reads for at most
    _PATIENCE_S seconds.

    Args:
        models: this rank's models.
        own: this rank's directory.
        ranks: the other ranks' directories.
        outcome: how this rank ended; its run.json does not hold it yet.

    Returns:
        The models of all ranks, the directories that were read, and sentences on missing parts.
    """
    from mpinspect.run.ranks import ModelsOfRanks

    running = _still_running(ranks, 0.0 if outcome.by_error else _ENDS_WITHIN_S)
    whole, read = ModelsOfRanks(), []
    whole.process(own.name, replace(read_record(own), outcome=outcome.words, by_error=outcome.by_error))
    for model in models:
        whole.add(own.name, model.name, model.session)
    enough = time.monotonic() + _PATIENCE_S
    for path in ranks if models else ():
        if time.monotonic() > enough:
            break
        whole.read(path)
        read.append(path)
    of_all = [RecordedModel(name, session) for name, session in whole.models()]
    more = "mpinspect report adds the rest"
    notes = [*whole.notes]
    if running:
        notes.append(f"{_named(running)} had not ended: only data already on disk is included, {more}")
    if left := [path for path in ranks if path not in read and models]:
        notes.append(f"{_named(left)} could not be read in {_PATIENCE_S:.0f} s: {more}")
    return of_all, read, notes


def _still_running(ranks: list[Path], patience_s: float) -> list[Path]:
    """Wait until the ranks have ended, ``patience_s`` seconds at most, and return those that have not."""
    enough = time.monotonic() + patience_s
    while running := [path for path in ranks if read_record(path).outcome == STILL_RUNNING]:
        if time.monotonic() > enough:
            break
        time.sleep(_LOOK_S)
    return running


def _named(paths: list[Path]) -> str:
    from mpinspect.ranges.analysis.ranks import ranks_named

    return ranks_named([int(path.name.removeprefix("rank")) for path in paths])


# -- failures in other processes -----------------------------------------------------------------------------------------


class _Break(NamedTuple):
    """A model's most severe event. ``process`` is the name of its process's directory; "" for this process."""

    event: Event
    process: str
    model: str


def with_others(report: RunReport, others: Iterable[Path], added: Collection[Path] = ()) -> RunReport:
    """Return the report with the failures that other processes have recorded so far; do not wait for those processes.

    Args:
        others: the other processes' directories; ``added``: of those, the ones whose models are in the report.
    """
    others = list(others)
    errors = [f"{process_name(path)} ended by {error}" for path in others if (error := _error(path))]
    first = _first(report, [path for path in others if path not in added])
    if first is None or not first.process:
        return replace(report, saw=(*errors, *report.saw))
    from mpinspect.ranges.analysis.first_line import first_line

    line = first_line(first.event)
    own_steps = [each.event.step for each in _own(report)]
    broke = "broke"
    if own_steps:
        broke = "broke earlier" if min(own_steps) > first.event.step else "broke first"
    said = f"{process_name(Path(first.process))} {broke}: {line}"
    elsewhere = f"{first.process}/{first.model}: {line}"
    return replace(report, broke_elsewhere=elsewhere, saw=(said, *errors, *report.saw))


def _first(report: RunReport, others: Iterable[Path]) -> _Break | None:
    """Return the most severe break.

    Among equally severe ones the earliest step wins, then a forward, then a break that arose in its own process, then this
    process's own.
    """
    from mpinspect.ranges.analysis.first_line import gravest

    breaks = [*_own(report), *_theirs(others)]
    breaks.sort(
        key=lambda each: (each.event.step, each.event.phase != "forward", each.event.elsewhere, bool(each.process))
    )
    event = gravest([each.event for each in breaks])
    return next((each for each in breaks if each.event is event), None)


def _own(report: RunReport) -> Iterator[_Break]:
    from mpinspect.ranges.analysis.first_line import gravest

    for part in report.parts:
        event = gravest(part.ranges.events)
        if event is not None:
            yield _Break(event, "", part.name)


def _theirs(others: Iterable[Path]) -> Iterator[_Break]:
    from mpinspect.ranges.analysis.first_line import gravest
    from mpinspect.ranges.store import FILE_NAME as SESSION
    from mpinspect.ranges.store import read_session

    enough = time.monotonic() + _PATIENCE_S
    for session in (session for path in others for session in sorted(path.glob(f"*/{SESSION}"))):
        if time.monotonic() > enough:
            return
        # The other process may be writing or removing its files.
        with suppress(Exception):
            event = gravest(read_session(session).events)
            if event is not None:
                yield _Break(event, session.parent.parent.name, session.parent.name)


def _error(directory: Path) -> str:
    """Return the exception that ended a process, in words; "" if it ended otherwise or can't be read."""
    with suppress(OSError, DecodingError):
        record = load_record(directory)
        if record.get("by_error") is True:
            return str(record.get("outcome") or "an exception")
    return ""
