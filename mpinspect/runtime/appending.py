"""Appends whole records to a file; a failed write leaves no part of its record behind."""

from __future__ import annotations

import contextlib
import errno
from io import FileIO

#: Error numbers for a full disk, an exhausted quota or a file at its size limit, all of which may pass.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class AppendedFile:
    """Appends whole records to an unbuffered file.

    Args:
        file: the file, positioned at its end.
        size: its present size in bytes.

    Attributes:
        file, size: as given; ``size`` grows with each record.
    """

    def __init__(self, file: FileIO, size: int = 0) -> None:
        self.file = file
        self.size = size
        self._torn = False

    def append(self, data: bytes) -> None:
        """Write a whole record.

        Raises:
            OSError: the write failed. The part written is cut off again, at the latest before the next record, since
                half a record would hide all later records from readers.
        """
        self._mend()
        self._torn = True
        try:
            write_all(self.file, data)
        except OSError:
            with contextlib.suppress(OSError):
                self._mend()
            raise
        self._torn = False
        self.size += len(data)

    def _mend(self) -> None:
        if self._torn:
            self.file.truncate(self.size)
            self.file.seek(self.size)
            self._torn = False


def write_all(file: FileIO, data: bytes) -> None:
    """Write all of ``data``, repeating partial writes (after a signal, on a nearly full disk). Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def no_room(error: BaseException) -> bool:
    """Return whether a write failed for lack of space, so that a later write may succeed."""
    return isinstance(error, OSError) and error.errno in _NO_ROOM
