"""Opens a run's files in ``log_dir``: the session file and the TensorBoard log. The module itself imports no torch."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from mpinspect.ranges.capture.sinks import Sink
from mpinspect.ranges.report.tensorboard_curves import MOST_CURVES
from mpinspect.ranges.session import RunInfo, Session
from mpinspect.ranges.store import SessionError, SessionWriter, TakenError, read_session

#: Number of sibling names to try if log_dir already holds another run.
_SIBLINGS = 1000


class Opened(NamedTuple):
    """The directory in use, absolute (None without a directory), the sinks that write to it, and sentences about errors."""

    path: Path | None
    sinks: list[Sink]
    troubles: list[str]


def open_sinks(log_dir: str | Path | None, info: RunInfo, curves: int | None = MOST_CURVES) -> Opened:
    """Begin a run's files in ``log_dir``, or in the next free sibling directory if it holds another run. Never raises.

    The TensorBoard log needs torch, which is imported here; if torch is missing, only the session file is written.

    Args:
        log_dir: the directory; None: no files.
        info: the run's description.
        curves: number of tensors of each kind with scalars of their own in the TensorBoard log; None: all.
    """
    if log_dir is None:
        return Opened(None, [], [])
    try:
        writer, troubles = _first_free(Path(log_dir), info)
    except (SessionError, OSError, ValueError) as error:
        why = str(error).rstrip(".")
        sentence = f"no file is written to {log_dir}: {why}. The run is held in memory: save the report yourself"
        return Opened(None, [], [sentence])
    path, sinks = writer.path.parent, list[Sink]([writer])
    try:
        from mpinspect.ranges.report.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(path, lambda: _written(path), curves=curves))
    except Exception as error:
        troubles.append(f"no TensorBoard log is written, only the session file: {error}")
    return Opened(path, sinks, troubles)


def _written(path: Path) -> Session | None:
    """Return the session in a directory; None if it can't be read, as when the directory has been deleted."""
    try:
        return read_session(path)
    except (SessionError, OSError):
        return None


def _first_free(wanted: Path, info: RunInfo) -> tuple[SessionWriter, list[str]]:
    """Begin a session in ``wanted``, or in the first sibling without one; return also a sentence on the sibling, if any.

    Raises:
        SessionError: no file can be created, or all names are taken.
    """
    try:
        return SessionWriter(wanted, info), []
    except TakenError as error:
        taken = error
    wanted = wanted.resolve()
    for number in range(2, _SIBLINGS):
        path = wanted.with_name(f"{wanted.name}-{number}")
        with contextlib.suppress(TakenError):
            return SessionWriter(path, info), [
                f"{wanted} holds another run already: this one is written to {path}. Give each run its own log_dir"
            ]
    raise taken
