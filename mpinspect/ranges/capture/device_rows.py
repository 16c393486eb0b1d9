"""Rows of counts on a CUDA device: slots of a buffer allocated once, filled asynchronously and sent to the host in one copy.

Two buffers alternate from step to step. At the end of a step a separate stream copies the buffer to page-locked memory while
the training continues. Before a buffer is used again, the device, but never the host, waits for that copy. Memory is
allocated in the first two sampled steps and stays in torch's caches.

Most weight gradients are held until the end of their backward (``waiting``), to be counted in one launch. Output gradients are
held until they reach a number of bytes, or the step ends.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from mpinspect.counting import fastest
from mpinspect.counting.cuda import available
from mpinspect.counting.layout import MIN_BITS, NARROW, NO_MINIMUM
from mpinspect.counting.pieces import plain_values
from mpinspect.ranges.capture.device_magnitudes import held_bytes
from mpinspect.ranges.capture.host_rows import HostCopy
from mpinspect.ranges.capture.largest import version_of
from mpinspect.ranges.capture.observations import Held
from mpinspect.runtime.device import current_stream, new_stream, on_stream

#: Initial number of rows of a buffer: 3.4 MB. A buffer that was too small is replaced by one with twice the rows needed.
_FIRST_CAPACITY = 512


class _Held(NamedTuple):
    """A tensor to be counted into a row, on this stream; a changed version means changed values."""

    values: torch.Tensor
    version: int
    row: torch.Tensor
    stream: Any


@dataclass
class _Buffer:
    """Rows of the NARROW layout, and the streams and the copy that may still use them."""

    rows: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    streams: list[Any] = field(default_factory=list)
    copied: Any = None


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _one_at_a_time(method: _Method) -> _Method:
    """Return the method of ``DeviceRows`` under its lock: a user's backwards may run in several threads."""

    @functools.wraps(method)
    def run(self: DeviceRows, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]


class DeviceRows:
    """Manages the rows that one capture fills on one CUDA device.

    Args:
        device: with an index.
        note: called with a sentence about tensors that could not be counted.
    """

    def __init__(self, device: torch.device, note: Callable[[str], None]) -> None:
        self._lock = threading.RLock()
        self._device = device
        self._note = note
        self._buffers: list[_Buffer | None] = [None, None]
        self._turn = 0
        #: The buffer of the open step (None until a tensor is counted), and the number of rows that the step has requested.
        self._open: _Buffer | None = None
        self._asked = 0
        self._capacity = _FIRST_CAPACITY
        self._slot_of: dict[int, int] = {}
        self._ready: Any = None
        self._copy_stream: Any = None
        self._held: list[_Held] = []
        self._held_bytes = 0
        self._most_held = held_bytes(device)
        #: The ids of this step's rows without counts, because their held tensors were changed before they were counted.
        self.lost: set[int] = set()

    # -- counting -------------------------------------------------------------------------------------------------

    @_one_at_a_time
    def count(self, tensor: torch.Tensor, later: bool = False) -> torch.Tensor:
        """Return a tensor's row of counts, like ``counting.count``; overwritten two steps later. Never waits for the GPU.

        Args:
            later: the tensor is not expected to change in this step, so it may be counted together with others. Its row is
                filled when the step's rows are sent; if the tensor was changed, the row's id is in ``lost``.
        """
        counter: Any = available.counter()
        values, implicit_zeros = plain_values(tensor)
        if counter is None or implicit_zeros or values.dtype == torch.float64 or values.dtype not in counter.DTYPES:
            return fastest.count(tensor)
        slot = self._take()
        if slot is None:
            return fastest.count(tensor)
        if later and _is_dense(values, counter):
            self._held.append(_Held(values, version_of(values), self._row(slot), current_stream(self._device)))
            self._held_bytes += values.nbytes
            if self._held_bytes > self._most_held:
                self.count_held()
            return self._given(slot)
        try:
            counter.add(values, self._row(slot))
        except Exception as error:
            self._gave_up(error)
            return fastest.count(tensor)
        return self._given(slot)

    @_one_at_a_time
    def count_held(self) -> None:
        """Count the held tensors, each on the stream of its arrival. Never waits for the GPU."""
        held, self._held, self._held_bytes = self._held, [], 0
        by_stream: dict[Any, list[_Held]] = {}
        for each in held:
            if version_of(each.values) == each.version:
                by_stream.setdefault(each.stream, []).append(each)
            else:
                self.lost.add(id(each.row))
        for stream, group in by_stream.items():
            try:
                counter: Any = available.counter()
                with on_stream(stream):
                    counter.add_many([counter.Counted(each.values, each.row) for each in group])
            except Exception as error:
                self.lost.update(id(each.row) for each in group)
                self._gave_up(error)

    @_one_at_a_time
    def count_together(self, waiting: Sequence[Held]) -> None:
        """Count gradients at the end of their backward, each on the stream of its arrival."""
        by_stream: dict[Any, list[Held]] = {}
        for each in waiting:
            by_stream.setdefault(each.stream, []).append(each)
        for stream, group in by_stream.items():
            with on_stream(stream):
                self._count_on_stream(group)

    def _count_on_stream(self, group: list[Held]) -> None:
        counter: Any = available.counter()
        slots = []
        for each in group:
            slot = self._take() if counter is not None and _is_dense(each.values, counter) else None
            if slot is None:
                # The caller counts a gradient that fails here again on its own, and records its name if that fails too.
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

    @_one_at_a_time
    def send(self, rows: list[torch.Tensor]) -> list[tuple[list[int], HostCopy]]:
        """Copy the step's rows that lie in the buffer to the host, and return their indices with the copy. Never waits."""
        self.count_held()
        counted = {index: self._slot_of[id(row)] for index, row in enumerate(rows) if id(row) in self._slot_of}
        copies: list[tuple[list[int], HostCopy]] = []
        if self._open is not None and counted:
            copy = _SlotsCopy(self._open.rows, list(counted.values()), self._open.streams, self._copy_stream)
            self._open.copied = copy.event
            copies.append((list(counted), copy))
        self._close()
        return copies

    @_one_at_a_time
    def drop(self) -> None:
        """Drop the step's rows; their counts stay valid until the step after the next one."""
        self.count_held()
        self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._turn = 1 - self._turn
        if self._asked > self._capacity:
            self._capacity = 2 * self._asked
        self._open, self._asked = None, 0
        self._slot_of = {}
        self.lost = set()

    def _take(self) -> int | None:
        """Return the next free slot, with its row cleared; None if the buffer is full."""
        stream = current_stream(self._device)
        if self._open is None:
            self._open = self._begin(stream)
        elif stream is not None and stream not in self._open.streams:
            stream.wait_event(self._ready)
            self._open.streams.append(stream)
        slot = self._asked
        self._asked += 1
        return slot if slot < len(self._open.slots) else None

    def _begin(self, stream: Any) -> _Buffer:
        """Return the next buffer, cleared on this stream after all earlier work on the buffer is done."""
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
        self._copy_stream = self._copy_stream or new_stream(self._device)
        if self._copy_stream is not None:
            # If the buffer is freed during a copy, the caching allocator does not reuse its memory before the copy is done.
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
    """Return whether the multi-tensor kernels can count the values into a row of the NARROW layout."""
    return values.is_contiguous() and values.dtype in counter.DTYPES and values.dtype is not torch.float64


class _SlotsCopy(HostCopy):
    """An asynchronous copy of some rows of a buffer to the host, begun after the pending work of these streams."""

    def __init__(self, rows: torch.Tensor, slots: list[int], streams: list[Any], copy_stream: Any) -> None:
        self._slots = np.array(slots)
        used = rows[: max(slots) + 1]
        for stream in streams:
            copy_stream.wait_stream(stream)
        with on_stream(copy_stream):
            super().__init__(used)

    def values(self) -> npt.NDArray[Any]:
        """Return the rows as int64 of shape (slots, NARROW.length); waits for the GPU if the copy is not complete."""
        rows: npt.NDArray[Any] = super().values()[self._slots]
        return rows
