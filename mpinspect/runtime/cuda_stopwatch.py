"""Times what callbacks make a CUDA device do, by events in its stream, read later without waiting for them."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch


class CudaStopwatch:
    """Pairs of events around callbacks, on the device and stream that are current when one begins (Meter's DeviceStopwatch).

    Between the two lie the kernels of ours and the gaps between them where the host is slower: both keep the device from the
    training's own work.
    """

    def __init__(self) -> None:
        self._begun: Any = None
        self._pairs: list[tuple[Any, Any]] = []
        self._travelling: deque[list[tuple[Any, Any]]] = deque()
        #: Events that were read and can be recorded again.
        self._free: list[Any] = []

    def begin(self) -> None:
        """A callback begins. Nothing is recorded while the stream captures a graph: the graph would hold the event."""
        self._begun = None if torch.cuda.is_current_stream_capturing() else self._recorded()

    def end(self) -> None:
        """It is over."""
        if self._begun is not None:
            self._pairs.append((self._begun, self._recorded()))
            self._begun = None

    def end_step(self) -> None:
        """All callbacks of a step are over."""
        if self._pairs:
            self._travelling.append(self._pairs)
            self._pairs = []

    def arrived(self) -> list[float]:
        """Seconds of each step whose events have all been passed and that was not told of yet. Does not wait."""
        seconds = []
        while self._travelling and all(end.query() for _, end in self._travelling[0]):
            pairs = self._travelling.popleft()
            seconds.append(sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3)
            self._free += [event for pair in pairs for event in pair]
        return seconds

    def _recorded(self) -> Any:
        event: Any = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
