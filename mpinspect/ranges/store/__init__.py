"""The session file: an append-only log of a run that survives ``kill -9``. The format: docs/session-format.md.

Appended records are never changed; a reader takes the complete, intact records and reports the unreadable parts.
The file needs no locks, no memory mapping and no seeks, so it is safe on network file systems.
"""

from mpinspect.ranges.store.frames import FILE_NAME, SCHEMA_VERSION, SessionError
from mpinspect.ranges.store.reader import read_session
from mpinspect.ranges.store.save import TakenError, save_session, session_bytes
from mpinspect.ranges.store.writer import SessionWriter

__all__ = [
    "FILE_NAME",
    "SCHEMA_VERSION",
    "SessionError",
    "SessionWriter",
    "TakenError",
    "read_session",
    "save_session",
    "session_bytes",
]
