"""Writes files so that a failed write, a kill or a second writer leaves whole records and whole files only."""

from __future__ import annotations

import contextlib
import datetime
import errno
import itertools
import os
import time
from collections.abc import Callable, Iterator
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import BinaryIO

from mpinspect.runtime.finalizing import until_finalized

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

#: Error numbers of a disk that may work later: full, over quota or at a size limit, a failed device, a network file system
#: without a server or a valid ticket of the user, a process or a machine out of descriptors or memory.
_MAY_PASS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE, errno.EACCES),
    *(errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ENOLCK, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
)
#: Longest time that ``locked`` waits for another process, and seconds between two attempts.
_LOCK_WAIT_S, _LOCK_AGAIN_S = 5.0, 0.01


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

    @until_finalized
    def __del__(self) -> None:
        # A file that was dropped after an error is closed without a warning.
        with contextlib.suppress(OSError):
            self.file.close()

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


def timestamp() -> str:
    """Return the current time as files store it: UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def write_all(file: FileIO, data: bytes) -> None:
    """Write all of ``data``, repeating partial writes (after a signal, on a nearly full disk). Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def may_pass(error: BaseException) -> bool:
    """Return whether a failed write may succeed later."""
    return isinstance(error, OSError) and error.errno in _MAY_PASS


def create_numbered(directory: Path, name: str) -> tuple[Path, FileIO]:
    """Create ``name.0`` in the directory, or the first of ``name.1``, ... that does not exist; return its path and open file.

    The creation is exclusive: two writers never share a file, and no link is followed. Raises OSError.
    """
    for number in itertools.count():
        path = directory / f"{name}.{number}"
        with contextlib.suppress(FileExistsError):
            return path, path.open("xb", buffering=0)
    raise AssertionError


def replace_whole(
    path: Path, data: bytes | Callable[[BinaryIO], object], before: Callable[[], None] = lambda: None
) -> None:
    """Write ``data`` to a new file and rename it to ``path``, so that readers see the old file or the whole new one.

    A link at ``path`` is replaced, not followed. The data and the new name are flushed to disk.

    Args:
        path: the file; its directory exists.
        data: its new content, or a function that writes it to the file that it gets.
        before: called when the new file is complete; if it raises, ``path`` stays as it is.

    Raises:
        OSError: the file can't be written, and ``path`` is as it was.
    """
    # Shortened, since the file's own name may already have the greatest length that the file system allows.
    beside, out = create_numbered(path.parent, f"{path.name[:40]}.rewriting")
    try:
        with out:
            if callable(data):
                buffered = BufferedWriter(out)
                data(buffered)
                buffered.detach()
            else:
                write_all(out, data)
            os.fsync(out.fileno())
        before()
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    """Fsync a directory, so that a power failure does not undo a rename in it; no effect where the system can't."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def lock_of(folder: Path, *, wait_s: float = 0.0) -> int | None:
    """Return a descriptor that locks the folder until it is closed, in this process and in those that inherit it.

    Args:
        folder: an existing directory.
        wait_s: longest time to wait for another process that holds the lock.

    Returns:
        None if the system has no such locks (Windows, some network file systems).

    Raises:
        BlockingIOError: another process still holds the lock.
    """
    if fcntl is None:
        return None
    descriptor = None
    end = time.monotonic() + wait_s
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise
                time.sleep(_LOCK_AGAIN_S)
            else:
                return descriptor
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Run the block while no other process is in one for this folder, as far as locks exist and are released in 5 s."""
    lock = None
    with contextlib.suppress(BlockingIOError):
        lock = lock_of(folder, wait_s=_LOCK_WAIT_S)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)
