"""Makes one report of the sessions and traces in a directory written by ``mpinspect run``. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from mpinspect.kernels.analysis import KernelReport
from mpinspect.kernels.profile import read_trace
from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.analysis.ranks import ranks_named
from mpinspect.ranges.session import Session
from mpinspect.ranges.store import FILE_NAME, SessionError, read_session
from mpinspect.run.directory import in_order, process_name
from mpinspect.run.each_rank import with_each_rank
from mpinspect.run.ranks import ModelsOfRanks
from mpinspect.run.record import FILE_NAME as RECORD
from mpinspect.run.record import REPORTS, TRACE, ProcessRecord, read_record
from mpinspect.run.report import ModelPart, RunReport
from mpinspect.runtime.decoding import DecodingError, json_of
from mpinspect.shapes.analysis import ShapeReport
from mpinspect.shapes.report.json import from_plain

#: Most bytes of a report.json that is read, enough for 20,000 layers.
_LARGEST_REPORT = 64 << 20


def is_run_directory(path: str | PathLike[str]) -> bool:
    """Return whether ``read_run`` can read this path: a directory of one or more processes, or of runs."""
    folder = Path(path)
    return folder.is_dir() and not (folder / FILE_NAME).exists() and bool(_processes(folder) or _runs_in(folder))


def read_run(
    path: str | PathLike[str], format: str | None = None, *, each_rank: bool = False, for_page: bool = False
) -> RunReport:
    """Return the report of a run directory, even if the run is still running or was killed.

    The counts of a job's ranks are added up: one report for each model, with the shapes of the first process that
    recorded them. Damaged or missing parts are named in the report.

    Args:
        path: the directory.
        format: the number format to judge the models against; None: the format that each uses.
        each_rank: whether to report each rank's models separately.
        for_page: whether to read single ranks too, which a page shows in addition to their sum.

    Raises:
        SessionError: nothing in the directory is readable, or it contains several runs.
        OSError: the directory can't be listed.
    """
    folder = Path(path)
    processes = _processes(folder)
    if not processes:
        raise SessionError(_nothing_in(folder))
    models = ModelsOfRanks(each=each_rank)
    saw: dict[str, list[str]] = {}
    unreadable: list[str] = []
    records = {name: read_record(place) for name, place in processes.items()}
    first = next(iter(records.values()))
    shapes: ShapeReport | None = None
    for name, record in records.items():
        if record is not first and not record.trouble and record.outcome not in ("ended", first.outcome):
            saw.setdefault(record.outcome, []).append(name)
        models.process(name, record)
        for found in _found(processes[name], record):
            if isinstance(found, ShapeReport):
                shapes = shapes or found
            elif isinstance(found, tuple):
                models.add(name, *found)
            else:
                saw.setdefault(str(found), []).append(name)
                if isinstance(found, SessionError):
                    models.unreadable(name)
                    unreadable.append(": ".join(filter(None, [name, str(found)])))
    parts = tuple(ModelPart(name, analyse(session, format)) for name, session in models.models())
    # Rank 0's own report repeats the notes on the other ranks: list each once.
    notes = [*models.notes, *_said({each: of for each, of in saw.items() if each not in models.notes}, len(processes))]
    return RunReport(
        command=first.command or folder.name,
        outcome=first.outcome,
        parts=parts,
        shapes=shapes,
        kernels=_kernels(processes.values(), first.gpu, shapes, notes),
        saw=tuple(notes),
        log_dir=str(folder),
        is_shape_detail=not first.lint,
        # Only a verdict on the sum of the ranks reports an early end; elsewhere it is the first line.
        broke_elsewhere="" if parts and not each_rank else models.ended_early,
        by_error=first.by_error,
        unreadable=tuple(unreadable),
        ranks=with_each_rank(folder, parts, format) if for_page and not each_rank else (),
    )


def _said(saw: dict[str, list[str]], processes: int) -> Iterator[str]:
    """Yield each sentence once; a sentence from only some of the processes begins with their names."""
    for sentence, names in saw.items():
        names = list(dict.fromkeys(names))
        ranks = [int(name.removeprefix("rank")) for name in names if name.removeprefix("rank").isdigit()]
        named = ", ".join(names)
        if len(ranks) == len(names) > 1:
            named = ranks_named(ranks)
        if named and len(names) < processes:
            sentence = f"{named}: {sentence}"
        yield sentence


def run_of_model(session_file: Path, part: ModelPart) -> RunReport:
    """Return the run that recorded a model, with the shapes and kernels of its process; its other models are empty.

    If the session is in no run directory, the report has this part alone. Unreadable parts are omitted and named in ``saw``.
    """
    place = session_file.parent.parent
    if not (place / RECORD).exists():
        return RunReport("", "", (part,))
    record, saw = read_record(place), list[str]()
    shapes: ShapeReport | None = None
    for found in _shapes(_report(place)[0], place):
        if isinstance(found, ShapeReport):
            shapes = found
        else:
            saw.append(found)
    names = [file.parent.name for file in sorted(place.glob(f"*/{FILE_NAME}"))]
    nothing = analyse(Session())
    parts = tuple(part if name == part.name else ModelPart(name, nothing) for name in names)
    kernels = _kernels([place], record.gpu, shapes, saw)
    return RunReport(record.command, record.outcome, parts, shapes, kernels, tuple(saw), by_error=record.by_error)


# -- which processes ------------------------------------------------------------------------------------------------------


def _processes(folder: Path) -> dict[str, Path]:
    """Return the directories of processes, by path relative to ``folder``; ``folder`` itself has the name ""."""
    below = [path for path in (*folder.glob("*"), *folder.glob("rank*/process-*")) if process_name(path)]
    names = {path.relative_to(folder).as_posix(): path for path in below}
    found = {"": folder} | {name: names[name] for name in sorted(names, key=in_order)}
    return {name: path for name, path in found.items() if _is_process(path)}


def _is_process(place: Path) -> bool:
    return (place / RECORD).exists() or any(place.glob(f"*/{FILE_NAME}"))


def _runs_in(folder: Path) -> list[str]:
    """Return the names of the run directories in a folder, except directories of single ranks and child processes."""
    return sorted(path.parent.name for path in folder.glob(f"*/{RECORD}") if not process_name(path.parent))


def _nothing_in(folder: Path) -> str:
    runs = [str(folder / name) for name in _runs_in(folder)]
    if runs:
        return f"{folder} is a folder of {len(runs)} runs: {', '.join(runs[:5])}{', ...' if runs[5:] else ''}. Give one of them."
    return f"{folder} holds neither a session nor a run of mpinspect run"


# -- one process ----------------------------------------------------------------------------------------------------------


def _found(place: Path, record: ProcessRecord) -> Iterator[tuple[str, Session] | ShapeReport | SessionError | str]:
    """Yield each model's name and session, the shapes, the process's sentences, and an error for each unreadable session."""
    report, trouble = _report(place)
    if trouble:
        yield trouble
    elif record.models and not report:
        yield f"{REPORTS[1]} is missing, and with it the shapes of one step's matrix products{_may_hold(place)}"
    where = ""
    if report:
        where = f"; {place / REPORTS[0]} and {REPORTS[1]} hold the whole"
    files = sorted(place.glob(f"*/{FILE_NAME}"), key=_made)
    names = [file.parent.name for file in files]
    for file in files:
        yield from _model(file, record, where)
    for name in record.models:
        if name not in names:
            yield SessionError(f"{name} was recorded, but its session file is missing{where}")
    if record.trouble:
        yield record.trouble
    yield from _seen(place, record, report, names)


def _model(file: Path, record: ProcessRecord, where: str) -> Iterator[tuple[str, Session] | SessionError | str]:
    """Yield a model's name and session, and a sentence on its damage; ``where``: a clause on files that hold the whole."""
    name = file.parent.name
    try:
        session = read_session(file)
    except (SessionError, OSError) as error:
        yield SessionError(f"{name} can't be read: {str(error).rstrip('.')}{where}")
        return
    yield name, session
    if session.progress.ended:
        return
    if record.ended and not session.progress.steps:
        yield SessionError(f"{name} can't be read: its session file is cut off before the first step{where}")
    elif where:
        yield f"the session file of {name} is damaged or cut off{where}"


def _seen(place: Path, record: ProcessRecord, report: dict[str, Any], names: list[str]) -> Iterator[ShapeReport | str]:
    """Yield the shapes, the process's sentences (from its record, else its report), and sentences on missing parts."""
    written = report.get("saw")
    if record.saw:
        yield from record.saw
    elif isinstance(written, list):
        yield from map(str, written)
    if not (place / RECORD).exists() and not process_name(place):
        yield f"everything in {place} is shown as one run: {', '.join(names)}"
        others = _runs_in(place)
        if others:
            yield f"separate runs inside it are left out: {', '.join(others)}"
    elif not record.ended and not report:
        yield "no report has been written yet: only the models' sessions are available"
    yield from _shapes(report, place)


def _may_hold(place: Path) -> str:
    """Return a clause that refers to the run's Markdown report, which may be intact; "" if it is missing too."""
    if not (place / REPORTS[0]).exists():
        return ""
    return f"; {REPORTS[0]} may hold them"


def _shapes(report: dict[str, Any], place: Path) -> Iterator[ShapeReport | str]:
    """Yield the shapes in a run's report, or a sentence on why they can't be read; no item if the report has no shapes."""
    if report.get("shapes") is None:
        return
    try:
        yield from_plain(report["shapes"])
    except DecodingError as error:
        yield f"the shapes can't be read: {REPORTS[1]} is damaged (shapes.{error}){_may_hold(place)}"


def _made(path: Path) -> float:
    try:
        return path.stat().st_ctime
    except OSError:
        return 0.0


def _report(place: Path) -> tuple[dict[str, Any], str]:
    """Return the fields of the run's final report.json ({} without one), and a sentence on its damage, or ""."""
    try:
        report = json_of(place / REPORTS[1], _LARGEST_REPORT)
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, f"{REPORTS[1]} can't be read: {error.strerror or error}"
    except DecodingError as error:
        return {}, f"{REPORTS[1]} is damaged and was ignored: it {error}"
    if not isinstance(report, dict):
        return {}, f"{REPORTS[1]} is damaged: it holds no report"
    return report, ""


def _kernels(
    places: Iterable[Path], gpu: str | None, shapes: ShapeReport | None, saw: list[str]
) -> KernelReport | None:
    traces = [place / TRACE for place in places if (place / TRACE).exists()]
    if not traces:
        return None
    try:
        report = read_trace(traces, gpu=gpu, shapes=shapes)
    except (ValueError, OSError) as error:
        saw.append(f"the trace can't be read: {error}")
        return None
    if not any(rank.has_gpu_work for rank in report.ranks):
        # There are no kernels to judge; the run's record already has a note on it.
        return None
    return report
