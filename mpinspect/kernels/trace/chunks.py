"""A file, gzipped or not, as pieces of text. What is cut short or damaged ends the text, and ``problem`` says so."""

from __future__ import annotations

import codecs
import contextlib
import errno
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from mpinspect.kernels.trace.error import TraceError

#: Bytes read at a time: the decoded events of a piece still fit a core's cache (twice as fast as pieces of a megabyte).
CHUNK_BYTES = 1 << 16
_GZIP = b"\x1f\x8b"
#: zlib: a gzip header and trailer around the data.
_GZIP_WINDOW_BITS = 16 + zlib.MAX_WBITS


class TextChunks:
    """Iterating gives the text. UTF-8, with or without a byte order mark; bytes that are none become U+FFFD.

    Args:
        path: of the file; "-" has no special meaning.
        chunk_bytes: bytes read, and at most decompressed, at a time.

    Attributes:
        bytes_read: of the text so far, uncompressed.
        problem: sentence about what was cut off or damaged; "" if nothing.

    Raises:
        TraceError: while iterating: the file can't be opened or read.
    """

    def __init__(self, path: Path, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.path = path
        self.bytes_read = 0
        self.problem = ""
        self._chunk_bytes = chunk_bytes

    def __iter__(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        try:
            with self.path.open("rb") as file:
                for data in self._uncompressed(file):
                    self.bytes_read += len(data)
                    yield decoder.decode(data)
        except OSError as error:
            raise TraceError(cannot_read(self.path, error)) from error
        yield decoder.decode(b"", final=True)

    def _uncompressed(self, file: BinaryIO) -> Iterator[bytes]:
        first = file.read(max(self._chunk_bytes, len(_GZIP)))
        pieces = self._pieces(first, file)
        return self._unzipped(pieces) if first.startswith(_GZIP) else pieces

    def _pieces(self, first: bytes, file: BinaryIO) -> Iterator[bytes]:
        piece = first
        while piece:
            yield piece
            piece = file.read(self._chunk_bytes)

    def _unzipped(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        member = zlib.decompressobj(_GZIP_WINDOW_BITS)
        for piece in pieces:
            data = piece
            while data:
                if member.eof:
                    # Another member follows (files made by cat, or by parallel gzip), or padding, or what is no gzip.
                    data = data.lstrip(b"\0")
                    if not data:
                        break
                    member = zlib.decompressobj(_GZIP_WINDOW_BITS)
                before = member.copy()
                try:
                    yield member.decompress(data, self._chunk_bytes)
                except zlib.error as error:
                    yield from _until_damage(before, data)
                    self.problem = f"its gzip data are damaged after {self.bytes_read:,} bytes of text ({error})"
                    return
                data = member.unused_data if member.eof else member.unconsumed_tail
        yield member.flush()
        if not member.eof:
            self.problem = f"its gzip data are cut short after {self.bytes_read:,} bytes of text"


def _until_damage(member: zlib._Decompress, data: bytes) -> Iterator[bytes]:
    """What a failed decompression had before it failed: zlib gives it byte by byte only."""
    with contextlib.suppress(zlib.error):
        for place in range(len(data)):
            yield member.decompress(data[place : place + 1])


def cannot_read(path: Path, error: OSError) -> str:
    """A sentence on what the operating system refused."""
    if error.errno == errno.ENOENT:
        return (
            f"There is no {path}: give a trace that torch.profiler exported (.json or .json.gz), or a folder of them."
        )
    if error.errno == errno.EISDIR:
        return f"{path} is a folder, not a trace."
    return f"{path} can't be read: {os.strerror(error.errno) if error.errno else error}."
