"""Creates session files and saves a whole session at once; OS errors become messages with a remedy."""

from __future__ import annotations

from io import FileIO
from os import PathLike
from pathlib import Path

from mpinspect.ranges.session import Session
from mpinspect.ranges.store import frames, windows
from mpinspect.ranges.store.frames import HEADER, SessionError, frame, reason
from mpinspect.ranges.store.reader import read_session
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.reporting.words import filled
from mpinspect.runtime.appending import write_all


class TakenError(SessionError):
    """The session file exists already: the directory holds another run, which is read only if the message is printed."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self._file = file

    def __str__(self) -> str:
        directory = self._file.parent
        return f"{directory} already holds {_describe(self._file)}: give another log_dir, or delete {self._file} first."


def save_session(session: Session, path: str | PathLike[str]) -> Path:
    """Write every field of a session to a new file; see ``Session.save``."""
    file = frames.session_path(path)
    data = session_bytes(session)
    try:
        with claim(file) as out:
            write_all(out, data)
    except OSError as error:
        file.unlink(missing_ok=True)
        raise cannot_write(file, error) from error
    return file


def session_bytes(session: Session) -> bytes:
    """Return the content of a session file with every field of the session."""
    key_ids: dict[TensorKey, int] = {}
    for window in session.windows:
        for key in window.tensors:
            key_ids.setdefault(key, len(key_ids))
    parts = [
        HEADER,
        frame(frames.INFO, frames.json_bytes(session.info)),
        frame(frames.WATCHED, frames.json_bytes(session.watched)),
        frame(frames.KEYS, frames.json_bytes(list(key_ids))),
        *(frame(frames.WINDOW, windows.encode(window, key_ids)) for window in session.windows),
        *(frame(frames.EVENT, frames.json_bytes(event)) for event in session.events),
        *(frame(frames.NOTE, frames.json_bytes(note)) for note in session.notes),
        *(frame(frames.MEASUREMENT, frames.json_bytes(each)) for each in session.measurements),
        *(frame(frames.RANK, frames.json_bytes(rank)) for rank in session.ranks),
        frame(frames.PRECISION, frames.json_bytes(session.precision)),
        frame(frames.PROGRESS, frames.json_bytes(session.progress)),
    ]
    return b"".join(parts)


def claim(file: Path) -> FileIO:
    """Create and open the file, which must not exist yet: two runs in one file would be unreadable.

    The check and the creation are one operation (O_EXCL): exactly one of several processes or threads succeeds.

    Raises:
        TakenError: the file exists.
        SessionError: the file can't be created.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return file.open("xb", buffering=0)
    except FileExistsError:
        if not file.parent.is_dir():
            raise SessionError(f"{file.parent} is a file, not a directory: give another log_dir.") from None
        raise TakenError(file) from None
    except NotADirectoryError:
        raise SessionError(f"{file.parent} lies within a file, not a directory: give another log_dir.") from None
    except OSError as error:
        raise cannot_write(file, error) from error


def cannot_write(file: Path, error: OSError) -> SessionError:
    """Return the error to raise when a session file can't be written."""
    return SessionError(
        f"{file} can't be written: {reason(error)}. Give a log_dir with write permission and free space."
    )


def _describe(file: Path) -> str:
    """Return a few words that describe the run in a session file."""
    try:
        session = read_session(file)
    except SessionError:
        return f"a {file.name} that can't be read"
    model, started = filled(" of {}", session.info.model), filled(", started {}", session.info.started)
    return f"another run ({session.reached().steps:,} steps{model}{started})"
