"""Rows of counts on a CUDA device: slots of a buffer made once, filled without a wait and sent to the host in one copy.

Two buffers take turns, step by step. At the end of a step a stream of its own copies the buffer to page-locked memory while
the training goes on; a buffer is used again only behind that copy, which the device waits for, never the host. Memory is
allocated in the first two sampled steps, and torch's caches keep it.

Weight gradients mostly wait for the end of their backward (``waiting``), to be counted in one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mpinspect.counting import fastest
from mpinspect.counting.cuda import available
from mpinspect.counting.layout import MIN_BITS, NARROW, NO_MINIMUM
from mpinspect.counting.pieces import plain_values
from mpinspect.ranges.capture.host_rows import HostCopy
from mpinspect.ranges.capture.observations import ParameterGradient

#: Rows of a buffer at first: 3.4 MB. One that was too small is made anew, twice what the step would have needed.
_FIRST_CAPACITY = 512


@dataclass
class _Buffer:
    """Rows of the NARROW layout, and the device's work on them that is not known to be over."""

    rows: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    streams: list[Any] = field(default_factory=list)
    copied: Any = None


class DeviceRows:
    """Keeps the rows that one capture fills on one CUDA device.

    Args:
        device: with an index.
        note: called with a sentence on what could not be counted.
    """

    def __init__(self, device: torch.device, note: Callable[[str], None]) -> None:
        self._device = device
        self._note = note
        self._buffers: list[_Buffer | None] = [None, None]
        self._turn = 0
        #: The buffer of the open step, None until something is counted in it, and how many rows the step has asked for.
        self._open: _Buffer | None = None
        self._asked = 0
        self._capacity = _FIRST_CAPACITY
        self._slot_of: dict[int, int] = {}
        self._ready: Any = None
        self._copy_stream: Any = None

    # -- counting -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def count(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the row of a tensor on this device, as from ``counting.count``; overwritten two steps later. Does not wait."""
        counter: Any = available.counter()
        values, implicit_zeros = plain_values(tensor)
        if counter is None or implicit_zeros or values.dtype == torch.float64 or values.dtype not in counter.DTYPES:
            return fastest.count(tensor)
        slot = self._take()
        if slot is None:
            return fastest.count(tensor)
        try:
            counter.add(values, self._row(slot))
        except Exception as error:
            self._gave_up(error)
            return fastest.count(tensor)
        return self._given(slot)

    @torch.no_grad()
    def count_together(self, waiting: list[ParameterGradient]) -> None:
        """Count gradients that waited, on the streams that they came on."""
        by_stream: dict[Any, list[ParameterGradient]] = {}
        for each in waiting:
            by_stream.setdefault(each.stream, []).append(each)
        for stream, group in by_stream.items():
            with torch.cuda.stream(stream):
                self._count_on_stream(group)

    def _count_on_stream(self, group: list[ParameterGradient]) -> None:
        counter: Any = available.counter()
        slots = []
        for each in group:
            slot = self._take() if counter is not None and _is_dense(each.values, counter) else None
            if slot is None:
                # What can't be counted is found out once more, and named, where each is counted alone.
                with suppress(Exception):
                    each.found = fastest.count(each.values)
            else:
                slots.append((each, slot))
        if not slots:
            return
        try:
            counter.add_many([counter.Counted(each.values, self._row(slot)) for each, slot in slots])
        except Exception as error:
            self._gave_up(error)
            return
        for each, slot in slots:
            each.found = self._given(slot)

    def _gave_up(self, error: Exception) -> None:
        available.gave_up(error)
        self._note(available.trouble())

    # -- the buffers ------------------------------------------------------------------------------------------------

    def send(self, rows: list[torch.Tensor]) -> list[tuple[list[int], HostCopy]]:
        """Send those of the step's rows that lie in the buffer to the host: their indices, and the one copy. Does not wait."""
        counted = {index: self._slot_of[id(row)] for index, row in enumerate(rows) if id(row) in self._slot_of}
        copies: list[tuple[list[int], HostCopy]] = []
        if self._open is not None and counted:
            copy = _SlotsCopy(self._open.rows, list(counted.values()), self._open.streams, self._copy_stream)
            self._open.copied = copy.event
            copies.append((list(counted), copy))
        self._close()
        return copies

    def drop(self) -> None:
        """Drop the step's rows; until the step after the next one they hold what was counted."""
        self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._turn = 1 - self._turn
        if self._asked > self._capacity:
            self._capacity = 2 * self._asked
        self._open, self._asked = None, 0
        self._slot_of = {}

    def _take(self) -> int | None:
        """Return the next free slot, its row cleared; None where the buffer is full."""
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        if self._open is None:
            self._open = self._begin(stream)
        elif stream is not None and stream not in self._open.streams:
            stream.wait_event(self._ready)
            self._open.streams.append(stream)
        slot = self._asked
        self._asked += 1
        return slot if slot < len(self._open.slots) else None

    def _begin(self, stream: Any) -> _Buffer:
        """Return the buffer whose turn it is, emptied on this stream, behind all that still works on it."""
        buffer = self._buffers[self._turn]
        if buffer is not None and stream is not None:
            if buffer.copied is not None:
                stream.wait_event(buffer.copied)
            for other in buffer.streams:
                if other != stream:
                    stream.wait_stream(other)
        if buffer is None or len(buffer.slots) < self._capacity:
            buffer = self._buffers[self._turn] = self._new_buffer()
        buffer.rows.zero_()
        buffer.rows[:, MIN_BITS].fill_(NO_MINIMUM)
        if stream is not None:
            self._ready = stream.record_event()
            buffer.streams = [stream]
        return buffer

    def _new_buffer(self) -> _Buffer:
        with torch.inference_mode(False):
            memory = torch.empty((self._capacity, NARROW.length), dtype=torch.int64, device=self._device)
        if self._device.type == "cuda":
            self._copy_stream = self._copy_stream or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            # Should the buffer go while it is being copied, its memory is not lent to others before that is over.
            memory.record_stream(self._copy_stream)
        return _Buffer(memory, memory.unbind(0))

    def _row(self, slot: int) -> torch.Tensor:
        assert self._open is not None
        return self._open.slots[slot]

    def _given(self, slot: int) -> torch.Tensor:
        row = self._row(slot)
        self._slot_of[id(row)] = slot
        return row


def _is_dense(values: torch.Tensor, counter: Any) -> bool:
    """Return whether the kernels for many tensors take it, into a row of the layout NARROW."""
    return values.is_contiguous() and values.dtype in counter.DTYPES and values.dtype is not torch.float64


class _SlotsCopy(HostCopy):
    """Some rows of a buffer on their way to the host, behind what these streams have to do."""

    def __init__(self, rows: torch.Tensor, slots: list[int], streams: list[Any], copy_stream: Any) -> None:
        self._slots = np.array(slots)
        used = rows[: max(slots) + 1]
        for stream in streams:
            copy_stream.wait_stream(stream)
        with torch.cuda.stream(copy_stream):
            super().__init__(used)

    def values(self) -> npt.NDArray[Any]:
        """Return them, int64, (slots, NARROW.length); waits for the GPU where they are not there yet."""
        rows: npt.NDArray[Any] = super().values()[self._slots]
        return rows
