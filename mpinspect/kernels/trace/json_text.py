"""A window onto JSON text that is read piece by piece: what stands here, and more text where that is wanted."""

from __future__ import annotations

import json
import re
from json.decoder import JSONDecodeError
from typing import Any

from mpinspect.kernels.trace.chunks import TextChunks

#: Characters that one value may have; more is taken for damage rather than read into memory, where it may take 24 times as much.
LONGEST_VALUE = 16 << 20
#: A decoding error this near the end of the text may be for want of the rest (the longest token that is no string: a number).
_NEAR_END = 64
#: Characters that a pattern searched for may match.
_LONGEST_MATCH = 4096

_MAY_GO_ON = re.compile(r"(?:\.|[eE][-+]?)?\Z")
WHITESPACE = re.compile(r"[ \t\r\n]*")

#: Control characters within strings are let through.
JSON = json.JSONDecoder(strict=False)


class IncompleteError(Exception):
    """The text ended within a value."""


class MalformedError(Exception):
    """What stands there is no JSON."""


class JsonText:
    """The text from ``at`` on; what is before is let go when more is read.

    Args:
        chunks: all of the text.
    """

    def __init__(self, chunks: TextChunks) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._gone = 0
        self._source = chunks
        self._chunks = iter(chunks)

    def peek(self, skipped: re.Pattern[str] = WHITESPACE) -> str:
        """Go to the next character that is not skipped and return it; "" at the end."""
        while True:
            match = skipped.match(self.text, self.at)
            assert match is not None
            self.at = match.end()
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def value(self) -> Any:
        """Decode the value that starts here and go to its end.

        Raises:
            IncompleteError, MalformedError: position unchanged.
        """
        while True:
            try:
                value, end = self.decode()
            except IncompleteError:
                if not self.double():
                    raise
                continue
            # A number at the end of the text may go on, also where the text ends at "1." or "1e+".
            if _MAY_GO_ON.match(self.text, end) and self.more():
                continue
            self.at = end
            return value

    def decode(self) -> tuple[Any, int]:
        """The value that starts here, of the text at hand, and its end. Raises as ``value``."""
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
        """Go to the end of the pattern's next match; False, at the end of the text, if there is none."""
        while (found := pattern.search(self.text, self.at)) is None:
            # The match may begin in the text at hand; what is before can go.
            self.at = max(self.at, len(self.text) - _LONGEST_MATCH)
            if not self.more():
                self.at = len(self.text)
                return False
        self.at = found.end()
        return True

    def double(self) -> bool:
        """As ``more``, but twice the text: what is decoded again and again until it is complete must not take ever longer."""
        return self.more(len(self.text) - self.at)

    def more(self, characters: int = 1) -> bool:
        """Append that many characters or somewhat more; False at the end. Positions before ``at`` are gone."""
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
        """Characters before this place."""
        return self._gone + self.at

    def byte(self, at: int | None = None) -> int:
        """Where in the (uncompressed) file a position of the text is, by default this one."""
        # U+FFFD mostly stands for one byte that is no UTF-8.
        rest = self.text[self.at if at is None else at :].replace("\ufffd", "?")
        return self._source.bytes_read - len(rest.encode("utf-8", "surrogatepass"))
