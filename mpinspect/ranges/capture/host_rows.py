"""Values on the host: rows of counts, filled by numba's loops in memory allocated once, and copies from a device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy.typing as npt
import torch

from mpinspect.counting import fastest
from mpinspect.counting.layout import NARROW
from mpinspect.ranges.capture.observations import Held
from mpinspect.runtime import device


class HostCopy:
    """A copy of a tensor to the host: immediate from a CPU, asynchronous and on the current stream from a GPU."""

    def __init__(self, stacked: torch.Tensor) -> None:
        #: The event recorded after the copy; None if the copy was immediate.
        self.event: Any
        # NumPy has neither BF16 nor FP8.
        is_wide = not stacked.is_floating_point() or stacked.dtype.itemsize > 2
        self._host, self.event = device.copied(stacked if is_wide else stacked.float())

    def ready(self) -> bool:
        """Return whether the copy is complete; does not wait."""
        return self.event is None or bool(self.event.query())

    def values(self) -> npt.NDArray[Any]:
        """Return the values; waits for the GPU if the copy is not complete."""
        if self.event is not None:
            self.event.synchronize()
        array: npt.NDArray[Any] = self._host.numpy()
        return array


class Arrivals:
    """Calls functions, in order, once the copies that they read are complete: at once on a CPU, a step later on a device."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[list[HostCopy], Callable[[], object]]] = deque()

    def call(self, copies: Iterable[HostCopy], function: Callable[[], object]) -> None:
        """Call a function as soon as these copies, and the copies of earlier functions, are complete."""
        self._waiting.append((list(copies), function))
        self.take()

    def take(self, *, wait: bool = False) -> None:
        """Call the functions whose copies are complete by now; ``wait``: wait for the device, and call all."""
        while self._waiting and (wait or all(copy.ready() for copy in self._waiting[0][0])):
            self._waiting.popleft()[1]()


def copy_groups(
    groups: Iterable[list[int]], copy: Callable[[list[int]], HostCopy], failed: Callable[[int, Exception], None]
) -> list[tuple[list[int], HostCopy]]:
    """Copy each group of tensors as one and return the groups with their copies.

    If the copy of a group fails, each of its tensors is copied alone, so that one bad tensor does not lose the others.

    Args:
        groups: places of tensors that can be stacked.
        copy: copies the tensors at some places as one tensor, stacked along the first dimension.
        failed: called with the place of a tensor that can't be copied, and the error.
    """
    copies = []
    for places in groups:
        try:
            copies.append((places, copy(places)))
        except Exception:
            for place in places:
                try:
                    copies.append(([place], copy([place])))
                except Exception as error:
                    failed(place, error)
    return copies


#: Initial number of rows: 0.9 MB. Memory that was too small is replaced by memory for twice the rows that the step needed.
_FIRST_CAPACITY = 128


class HostRows:
    """Manages the rows that one capture fills on the CPU."""

    def __init__(self) -> None:
        #: Protects the slots, because backwards may run in several threads.
        self._lock = threading.Lock()
        self._capacity = _FIRST_CAPACITY
        self._memory: torch.Tensor | None = None
        #: The rows of the memory, their addresses, and their slot numbers by id.
        self._slots: tuple[torch.Tensor, ...] = ()
        self._addresses: list[int] = []
        self._slot_of: dict[int, int] = {}
        #: The number of rows that the open step has requested.
        self._asked = 0

    def count(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor's row of counts, like ``counting.count``; the row is overwritten in the next step."""
        counter = fastest.cpu_counter()
        if counter is None or not counter.takes(tensor):
            return fastest.count(tensor)
        slots = self._take(1)
        if not slots:
            return fastest.count(tensor)
        counter.fill(tensor, self._addresses[slots[0]])
        return self._slots[slots[0]]

    def count_together(self, waiting: Sequence[Held]) -> None:
        """Count the gradients that numba's loops support in one call. The others get no row; after an error, all get no row."""
        counter: Any = fastest.cpu_counter()
        if counter is None:
            return
        taken = [each for each in waiting if counter.takes(each.values)]
        slots = list(zip(taken, self._take(len(taken)), strict=False))
        if not slots:
            return
        counter.fill_many([(each.values, self._addresses[slot]) for each, slot in slots])
        for each, slot in slots:
            each.found = self._slots[slot]

    def send(self, rows: list[torch.Tensor]) -> list[tuple[list[int], HostCopy]]:
        """Copy the step's rows that lie in this memory, return their indices with the copy, and begin the next step."""
        counted = {index: self._slot_of[id(row)] for index, row in enumerate(rows) if id(row) in self._slot_of}
        copies = []
        if self._memory is not None and counted:
            # NumPy copies: torch would split even this small copy among its threads and wait for them on busy cores.
            chosen = self._memory.numpy()[list(counted.values())]
            copies = [(list(counted), HostCopy(torch.from_numpy(chosen)))]
        self._close()
        return copies

    def drop(self) -> None:
        """Drop the step's rows; their counts stay valid until the next step begins."""
        self._close()

    def _close(self) -> None:
        with self._lock:
            if self._asked > self._capacity:
                self._capacity = 2 * self._asked
            self._asked = 0

    def _take(self, count: int) -> range:
        """Return up to ``count`` free slots, with their rows not cleared: fewer if the memory is full."""
        with self._lock:
            if not self._asked and len(self._slots) < self._capacity:
                with torch.inference_mode(False):
                    self._memory = torch.empty((self._capacity, NARROW.length), dtype=torch.int64, device="cpu")
                self._slots = self._memory.unbind(0)
                self._addresses = [row.data_ptr() for row in self._slots]
                self._slot_of = {id(row): slot for slot, row in enumerate(self._slots)}
            first, self._asked = self._asked, self._asked + count
            return range(first, min(self._asked, len(self._slots)))
