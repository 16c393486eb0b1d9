"""Making and filling a session file: what the operating system may refuse, in sentences that say what to do."""

from __future__ import annotations

from io import FileIO
from pathlib import Path

from mpinspect.ranges.store.session_file.frames import SessionError, reason
from mpinspect.ranges.store.session_file.reader import read_session


def claim(file: Path) -> FileIO:
    """Make the file, which must not exist: two runs in one file would be unreadable."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return file.open("xb", buffering=0)
    except FileExistsError:
        if not file.parent.is_dir():
            raise SessionError(f"{file.parent} is a file, not a directory: give another log_dir.") from None
        raise SessionError(
            f"{file.parent} already holds {_describe(file)}: give another log_dir, or delete {file} first."
        ) from None
    except NotADirectoryError:
        raise SessionError(f"{file.parent} lies within a file, not a directory: give another log_dir.") from None
    except OSError as error:
        raise cannot_write(file, error) from error


def cannot_write(file: Path, error: OSError) -> SessionError:
    """The error to raise where a session file can't be made."""
    return SessionError(
        f"{file} can't be written: {reason(error)}. Give a log_dir that you may write to and that has room."
    )


def _describe(file: Path) -> str:
    """A few words on the run that a session file holds."""
    try:
        session = read_session(file)
    except SessionError:
        return f"a {file.name} that can't be read"
    model = f" of {session.info.model}" if session.info.model else ""
    started = f", started {session.info.started}" if session.info.started else ""
    return f"another run ({session.reached().steps:,} steps{model}{started})"
