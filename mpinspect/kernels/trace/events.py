"""Decode Chrome's trace JSON as a stream: batches of events, and the other top-level values, in bounded memory.

Many events are decoded at once, up to a place that looks like the end of an event. The decoding verifies that guess: text
that starts at an event and is valid JSON between brackets also ends at an event. If the guess is wrong (the JSON has no such
places, or an event is invalid), events are decoded one by one. Text that looks like an event that attribution does not need is
removed before decoding; if the text was not an event (but an event within an event), the rest is invalid JSON, and everything
is decoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mpinspect.kernels.trace import unreadable
from mpinspect.kernels.trace.producers import producer
from mpinspect.kernels.trace.text import (
    JSON,
    LONGEST_VALUE,
    IncompleteError,
    JsonText,
    MalformedError,
    TextChunks,
    TraceError,
)

#: Calls that start no GPU work: most of a trace's runtime events (CUDA Runtime and HIP API references).
_IDLE_CALLS = "(?:cuda|cu|hip)(?:Event|Stream|Device|Func|Occupancy|Pointer|Peek|Get|Host|Init|Ctx|Module[GU])"

#: Matches events that attribution does not need, after the opening brace: decoding them would be half of all work. Only Kineto's
#: order of keys is recognised, with any white space; events with another order are decoded.
_NOT_NEEDED = re.compile(
    r"""
    \s*"ph":\s*"(?:
        X",\s*"cat":\s*"(?:
            python_function",\s*"name":\s*"(?!nn\.Module:)
          | cuda_(?:runtime|driver)",\s*"name":\s*"IDLE_CALLS
          | cuda_sync" | gpu_user_annotation" | overhead"
        )
      | [sf]",\s*"id":\s*\d+,\s*"pid":\s*-?\d+,\s*"tid":\s*-?\d+,\s*"ts":\s*[\d.]+,\s*"cat":\s*"ac2g"
      | i",\s*"cat":\s*"cpu_instant_event"
    )
    """.replace("IDLE_CALLS", _IDLE_CALLS),
    re.VERBOSE,
)

#: ``not_needed(text)`` is truthy if the event can be left out; the text lacks the event's opening brace.
not_needed = _NOT_NEEDED.match


#: Number of a file's first characters that are searched for marks of other profilers.
_FIRST = 4096
#: Maximum number of characters of stored top-level values: enough for the process groups of ten thousand ranks.
_LARGEST_TOP_LEVEL = 4 << 20
_SEPARATOR = re.compile(r"[ \t\r\n,]*")
#: The text from the end of an event to the first key of the next.
_NEXT_EVENT = re.compile(r'\}[ \t\r\n]*,?[ \t\r\n]*(?=\{[ \t\r\n]*")')
_EVENTS_KEY = re.compile(r'"traceEvents"[ \t\r\n]*:[ \t\r\n]*(?=\[)')

# Profilers have written invalid JSON: C's names of non-finite numbers, and Windows paths.
_BARE_NUMBER = re.compile(r"(?<=[:,\[\s])[-+]?(?:inf|infinity|nan(?:\(\w*\))?)(?=[\s,\]}])", re.IGNORECASE)
_BARE_BACKSLASH = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')


class EventStream:
    """The events of one trace, which can be read once.

    Args:
        chunks: the trace's text.

    Attributes:
        top_level: the other top-level values by key, at most 4 million characters in total; complete after the last batch.
        events: number of events read, including events that are not needed.
        damaged: number of events left out because they are invalid JSON.
        problem: sentence on where the text is cut off or damaged; "" if it is complete.
        is_cut: whether events are missing at the end.
        header_problem: sentence on damage before the events, which were readable nevertheless; "" without damage.
    """

    def __init__(self, chunks: TextChunks) -> None:
        self.top_level: dict[str, Any] = {}
        self.events = 0
        self.damaged = 0
        self.problem = ""
        self.is_cut = False
        self.header_problem = ""
        self._source = chunks
        self._text = JsonText(chunks)
        self._separator = ""
        self._seen_events = False
        self._kept = 0
        self._keys: list[str] = []

    def batches(self) -> Iterator[list[Any]]:
        """Yield lists of events in the file's order: the values of the array, which are dicts in any valid trace.

        Raises:
            TraceError: the file is empty, not JSON, or JSON that is not a trace.
        """
        first = self._text.peek()
        if first == "[":
            self._seen_events = True
            yield from self._finished(self._array())
        elif first == "{":
            yield from self._finished(self._object())
        else:
            raise TraceError(unreadable.no_json(self._source, self._text.text[self._text.at :][:_FIRST]))
        if not self._seen_events:
            raise TraceError(unreadable.no_trace(self._source, self._keys))

    def _finished(self, events: Iterator[list[Any]]) -> Iterator[list[Any]]:
        """Yield the events; then set ``problem`` and ``is_cut`` according to the end of the file."""
        try:
            yield from events
            if self._text.peek().strip("\0\x1a"):
                self.problem = f"Text after the end of the JSON, from byte {self._text.byte():,} on, is ignored."
        except IncompleteError:
            if not self.events:
                raise TraceError(unreadable.no_end(self._source)) from None
            self.is_cut, self.problem = True, unreadable.cut_short(self._source, self.events)
        except MalformedError as error:
            if not self._seen_events:
                if found := producer(self._keys):
                    raise TraceError(unreadable.of_another(self._source, found)) from None
                raise TraceError(f"{self._source.path} is not valid JSON: {error}. Export it again.") from None
            self.problem = f"The file is damaged after the events ({error}): the rest is left out."
        if self._source.problem and not self.problem:
            self.problem = unreadable.damaged_at_the_end(self._source)

    def _object(self) -> Iterator[list[Any]]:
        text = self._text
        text.at += 1
        while (char := text.peek(_SEPARATOR)) != "}":
            if not char:
                raise IncompleteError
            try:
                key = text.value()
                if not (colon := text.peek()):
                    raise IncompleteError
                if not isinstance(key, str) or colon != ":":
                    raise MalformedError(f"a key and a value were expected at byte {text.byte():,}")
                text.at += 1
                self._keys.append(key)
                if text.peek() == "[" and key == "traceEvents":
                    yield from self._array()
                else:
                    self._keep(key)
            except MalformedError:
                if self._seen_events or not text.find(_EVENTS_KEY):
                    raise
                self.header_problem = "The text before the events is damaged: the GPU's description may be missing."
                yield from self._array()
        text.at += 1

    def _keep(self, key: str) -> None:
        """Read a top-level value, and store it unless the total size of the values is too large."""
        before = self._text.position
        value = self._text.value()
        self._kept += self._text.position - before
        if self._kept <= _LARGEST_TOP_LEVEL:
            self.top_level[key] = value

    def _array(self) -> Iterator[list[Any]]:
        self._seen_events = True
        self._text.at += 1
        while (char := self._text.peek(_SEPARATOR)) != "]":
            if not char:
                raise IncompleteError
            batch = self._many()
            if batch is None:
                batch = self._few()
            self.events += len(batch)
            yield batch
        self._text.at += 1

    def _many(self) -> list[Any] | None:
        """Decode the needed events up to the last place that looks like an event's end; return None if this fails."""
        text, at = self._text.text, self._text.at
        end = text.rfind(self._separator, at) if self._separator and text[at] == "{" else -1
        if end < 0:
            return None
        events = text[at + 1 : end].split(self._separator)
        kept = [event for event in events if not not_needed(event)]
        try:
            batch: list[Any] = JSON.decode(f"[{{{self._separator.join(kept)}}}]") if kept else []
        except (ValueError, RecursionError):
            return None
        self.events += len(events) - len(kept)
        self._text.at = end + 1
        return batch

    def _few(self) -> list[Any]:
        """Decode the window's complete events one by one; return an empty list if more text was needed or one was damaged."""
        batch: list[Any] = []
        while True:
            try:
                event, end = self._text.decode()
            except IncompleteError:
                if not batch and not self._text.double():
                    raise
                return batch
            except MalformedError:
                return batch or self._mended()
            batch.append(event)
            text, self._text.at = self._text.text, end
            if text[end - 1] != "}" or (following := _NEXT_EVENT.match(text, end - 1)) is None:
                return batch
            self._text.at = following.end()
            # Most files use the same text between any two events, including the braces.
            if (separator := text[end - 1 : following.end() + 1]) != self._separator:
                self._separator = separator
                return batch

    def _mended(self) -> list[Any]:
        """Return the invalid event at this position with known faults repaired; if that fails, count the event as damaged."""
        text = self._text
        while (following := _NEXT_EVENT.search(text.text, text.at + 1)) is None:
            if len(text.text) - text.at > LONGEST_VALUE or not text.double():
                raise IncompleteError
        event = text.text[text.at : following.start() + 1]
        text.at = following.end()
        try:
            return [JSON.decode(_BARE_BACKSLASH.sub(r"\\\\", _BARE_NUMBER.sub("NaN", event)))]
        except (ValueError, RecursionError):
            self.damaged += 1
            return []
