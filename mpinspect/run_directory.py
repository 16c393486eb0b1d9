"""Reading back what ``mpinspect run`` left: the run directory's sessions and trace as one report. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from mpinspect.analysis import analyse
from mpinspect.analysis.run import ModelPart, RunReport
from mpinspect.kernel_profile import read_trace
from mpinspect.launch.record import FILE_NAME as RECORD
from mpinspect.session_file import FILE_NAME, SessionError, read_session
from mpinspect.trace_file import TraceError

TRACE, REPORT = "trace.json.gz", "report.json"


def is_run_directory(path: str | PathLike[str]) -> bool:
    """Whether ``mpinspect run`` wrote here: a process's directory, or that of several ranks."""
    folder = Path(path)
    return folder.is_dir() and not (folder / FILE_NAME).exists() and bool(_processes(folder))


def read_run(path: str | PathLike[str]) -> RunReport:
    """The report of a run directory, also while the run goes on and after it was killed.

    Shapes are not among it: they are in the ``report.md`` that the run wrote at its end, and the report says so.

    Raises:
        SessionError: nothing there can be read.
        OSError: the directory can't be listed.
    """
    folder = Path(path)
    processes = _processes(folder)
    if not processes:
        raise SessionError(f"{folder} holds neither a session nor a run of mpinspect run")
    records = {name: _record(place) for name, place in processes.items()}
    first = next(iter(records.values()))
    parts: list[ModelPart] = []
    saw: list[str] = []
    for name, place in processes.items():
        lead = f"{name}: " if name else ""
        for part in _models(place, name):
            if isinstance(part, ModelPart):
                parts.append(part)
            else:
                saw.append(lead + part)
        saw += [lead + str(sentence) for sentence in records[name].get("saw", ())]
        if _has_shapes(place):
            saw.append(f"{lead}shapes were recorded too: their report is in {place / 'report.md'}")
    traces = [place / TRACE for place in processes.values() if (place / TRACE).exists()]
    kernels = None
    if traces:
        try:
            kernels = read_trace(traces)
        except (TraceError, OSError) as error:
            saw.append(f"the trace can't be read: {error}")
    return RunReport(
        command=str(first.get("command", folder.name)),
        outcome=_outcome(first),
        parts=tuple(parts),
        kernels=kernels,
        saw=tuple(saw),
        log_dir=str(folder),
    )


def _processes(folder: Path) -> dict[str, Path]:
    """The directories that a process wrote its record to, by their name below ``folder`` ("" is that itself)."""
    found = {"": folder} if (folder / RECORD).exists() else {}
    below = sorted((path.parent for path in folder.glob(f"*/{RECORD}")), key=lambda path: _natural(path.name))
    return found | {path.name: path for path in below}


def _natural(name: str) -> tuple[str, int]:
    """rank2 before rank10."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)


def _record(place: Path) -> dict[str, Any]:
    try:
        record = json.loads((place / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _outcome(record: dict[str, Any]) -> str:
    outcome = str(record.get("outcome", "unknown"))
    return "running still, or killed" if outcome == "running" else outcome


def _models(place: Path, process: str) -> Iterator[ModelPart | str]:
    """A process's models; a sentence instead of one that can't be read."""
    for session_file in sorted(place.glob(f"*/{FILE_NAME}"), key=lambda path: path.stat().st_ctime):
        name = session_file.parent.name
        try:
            yield ModelPart(f"{process}/{name}" if process else name, analyse(read_session(session_file)))
        except (SessionError, OSError) as error:
            yield f"{name} can't be read: {error}"


def _has_shapes(place: Path) -> bool:
    try:
        report = json.loads((place / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(report, dict) and report.get("shapes") is not None
