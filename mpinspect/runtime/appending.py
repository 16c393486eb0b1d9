"""A file that only grows, by whole records: a write that fails leaves nothing of its record behind."""

from __future__ import annotations

import contextlib
import errno
from io import FileIO

#: What the system says where the disk, a quota or the size that a file may have is used up: there may be room again.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class AppendedFile:
    """Appends records to an unbuffered file, each of them as a whole.

    Args:
        file: at whose end is written.
        size: bytes that it has.

    Attributes:
        file, size: as given; ``size`` grows with each record.
    """

    def __init__(self, file: FileIO, size: int = 0) -> None:
        self.file = file
        self.size = size
        self._torn = False

    def append(self, data: bytes) -> None:
        """Write a record, complete when this returns.

        Raises:
            OSError: the disk refuses. Then the record is cut off again, at the latest before the next: half a record would
                hide all that follows from readers.
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
    """Write all of ``data``, of which an unbuffered write may take only a part (a full disk, a signal). Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def no_room(error: BaseException) -> bool:
    """Return whether a write failed for want of room, so that a later one may not."""
    return isinstance(error, OSError) and error.errno in _NO_ROOM
