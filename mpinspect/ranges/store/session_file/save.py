"""Writing a whole session at once."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from mpinspect.ranges.session import Session, TensorKey
from mpinspect.ranges.store.session_file import frames, records, windows
from mpinspect.ranges.store.session_file.files import cannot_write, claim
from mpinspect.ranges.store.session_file.frames import HEADER, frame
from mpinspect.runtime.appending import write_all


def save_session(session: Session, path: str | PathLike[str]) -> Path:
    """Write every field of a session to a new file; see ``Session.save``."""
    file = frames.session_path(path)
    key_ids: dict[TensorKey, int] = {}
    for window in session.windows:
        for key in window.tensors:
            key_ids.setdefault(key, len(key_ids))
    parts = [
        HEADER,
        frame(frames.INFO, records.encode(session.info)),
        frame(frames.WATCHED, records.encode(session.watched)),
        frame(frames.KEYS, records.encode(list(key_ids))),
        *(frame(frames.WINDOW, windows.encode(window, key_ids)) for window in session.windows),
        *(frame(frames.EVENT, records.encode(event)) for event in session.events),
        *(frame(frames.NOTE, records.encode(note)) for note in session.notes),
        frame(frames.PROGRESS, records.encode(session.progress)),
    ]
    try:
        with claim(file) as out:
            write_all(out, b"".join(parts))
    except OSError as error:
        file.unlink(missing_ok=True)
        raise cannot_write(file, error) from error
    return file
