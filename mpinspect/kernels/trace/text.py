"""Read a trace file, gzipped or not, in pieces, and decode the JSON values in its text."""

from __future__ import annotations

import codecs
import contextlib
import errno
import json
import re
import zlib
from collections.abc import Iterator
from json.decoder import JSONDecodeError
from pathlib import Path
from typing import Any, BinaryIO

from mpinspect.runtime.decoding import check_is_file


class TraceError(ValueError):
    """Raised if a file cannot be read as a trace. The message gives the reason and a remedy."""


#: Bytes read at a time. The decoded events of a piece fit a core's cache, which is twice as fast as using pieces of a megabyte.
CHUNK_BYTES = 1 << 16
_GZIP = b"\x1f\x8b"
#: Makes zlib expect a gzip header and trailer around the data.
_GZIP_WINDOW_BITS = 16 + zlib.MAX_WBITS


class TextChunks:
    """Iterate over a file's text in pieces. If gzip data are cut short or damaged, the text ends and ``problem`` is set.

    The text is UTF-8, with or without a byte order mark; invalid bytes become U+FFFD.

    Args:
        path: path of the file; "-" has no special meaning.
        chunk_bytes: maximum number of bytes to read, and to decompress, at a time.

    Attributes:
        bytes_read: bytes of text read so far, uncompressed.
        problem: clause on the position of truncated or damaged data; "" for intact data.

    Raises:
        TraceError: the file cannot be opened or read; raised while iterating.
    """

    def __init__(self, path: Path, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.path = path
        self.bytes_read = 0
        self.problem = ""
        self._chunk_bytes = chunk_bytes

    def __iter__(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        try:
            check_is_file(self.path)
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
        if first.startswith(_GZIP):
            return self._unzipped(pieces)
        return pieces

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
                    # Another gzip member follows (from cat or parallel gzip), or padding, or data that are not gzip.
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
    """Yield the data before the damage: zlib returns them only if its input is given byte by byte."""
    with contextlib.suppress(zlib.error):
        for place in range(len(data)):
            yield member.decompress(data[place : place + 1])


def cannot_read(path: Path, error: OSError) -> str:
    """Return a sentence on why the operating system refused to read a path."""
    if error.errno == errno.ENOENT:
        return (
            f"There is no {path}: give a trace that torch.profiler exported (.json or .json.gz), or a folder of them."
        )
    if error.errno == errno.EISDIR:
        return f"{path} is a folder, not a trace."
    return f"{path} can't be read: {error.strerror or error}."


#: Maximum number of characters of one value. A longer value counts as damage: decoded, it could take 24 times as much memory.
LONGEST_VALUE = 16 << 20
#: A decoding error this close to the end may only mean that more text is needed; the longest non-string token is a number.
_NEAR_END = 64
#: Maximum number of characters that a pattern for ``find`` may match.
_LONGEST_MATCH = 4096

_MAY_GO_ON = re.compile(r"(?:\.|[eE][-+]?)?\Z")
WHITESPACE = re.compile(r"[ \t\r\n]*")

#: A decoder that accepts control characters within strings.
JSON = json.JSONDecoder(strict=False)


class IncompleteError(Exception):
    """Raised if the text ends within a value."""


class MalformedError(Exception):
    """Raised if the text is not JSON."""


class JsonText:
    """A window onto JSON text: ``text`` from ``at`` on. Reading more text drops the text before ``at``.

    Args:
        chunks: the whole text, in pieces.
    """

    def __init__(self, chunks: TextChunks) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._gone = 0
        self._source = chunks
        self._chunks = iter(chunks)

    def peek(self, skipped: re.Pattern[str] = WHITESPACE) -> str:
        """Move to the next character that is not skipped and return it; "" at the end."""
        while True:
            match = skipped.match(self.text, self.at)
            assert match is not None
            self.at = match.end()
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def value(self) -> Any:
        """Decode the value that starts at ``at`` and move to its end.

        Raises:
            IncompleteError, MalformedError: the value is incomplete, or not JSON; the position is unchanged.
        """
        while True:
            try:
                value, end = self.decode()
            except IncompleteError:
                if not self.double():
                    raise
                continue
            # A number at the end of the text may continue, even after "1." or "1e+".
            if _MAY_GO_ON.match(self.text, end) and self.more():
                continue
            self.at = end
            return value

    def decode(self) -> tuple[Any, int]:
        """Return the value that starts at ``at`` and its end, without reading more text. Raises the same errors as ``value``."""
        try:
            return JSON.raw_decode(self.text, self.at)
        except JSONDecodeError as error:
            unfinished = error.msg.startswith("Unterminated") or error.pos >= len(self.text) - _NEAR_END
            if unfinished and len(self.text) - self.at < LONGEST_VALUE:
                raise IncompleteError from None
            raise MalformedError(f"{error.msg} at byte {self.byte(error.pos):,}") from None
        except (ValueError, RecursionError) as error:
            raise MalformedError(f"{error} at byte {self.byte():,}") from None

    def find(self, pattern: re.Pattern[str]) -> bool:
        """Move to the end of the pattern's next match and return True; without one, move to the end of the text: False."""
        while (found := pattern.search(self.text, self.at)) is None:
            # A match may start in the last characters of the window; earlier characters can be dropped.
            self.at = max(self.at, len(self.text) - _LONGEST_MATCH)
            if not self.more():
                self.at = len(self.text)
                return False
        self.at = found.end()
        return True

    def double(self) -> bool:
        """Double the text and return whether any was added; decoding again after each doubling takes linear time in total."""
        return self.more(len(self.text) - self.at)

    def more(self, characters: int = 1) -> bool:
        """Append at least ``characters`` characters; return False at the end of the text. Drops the text before ``at``."""
        pieces = [self.text[self.at :]]
        self._gone += self.at
        wanted = max(characters, 1)
        while wanted > 0 and not self.ended:
            piece = next(self._chunks, None)
            if piece is None:
                self.ended = True
            else:
                pieces.append(piece)
                wanted -= len(piece)
        self.text, self.at = "".join(pieces), 0
        return any(pieces[1:])

    @property
    def position(self) -> int:
        """Return the number of characters of the whole text before ``at``."""
        return self._gone + self.at

    def byte(self, at: int | None = None) -> int:
        """Return the byte offset in the uncompressed file of a position in ``text``, by default of ``at``."""
        if at is None:
            at = self.at
        # U+FFFD usually replaces one invalid byte.
        rest = self.text[at:].replace("\ufffd", "?")
        return self._source.bytes_read - len(rest.encode("utf-8", "surrogatepass"))
