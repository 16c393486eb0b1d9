"""Rows of counts on the CPU: memory made once, which numba's loops fill, and from which a step's rows go on in one copy."""

from __future__ import annotations

import threading
from typing import Any

import torch

from mpinspect.counting import fastest
from mpinspect.counting.layout import NARROW
from mpinspect.ranges.capture.host_copy import HostCopy
from mpinspect.ranges.capture.observations import ParameterGradient

#: Rows at first: 0.9 MB. Memory that was too small is made anew, with twice what the step would have needed.
_FIRST_CAPACITY = 128


class HostRows:
    """The rows that one capture fills on the CPU."""

    def __init__(self) -> None:
        #: Backwards may run in several threads.
        self._lock = threading.Lock()
        self._capacity = _FIRST_CAPACITY
        self._memory: torch.Tensor | None = None
        #: Its rows, their addresses and, by id, their numbers.
        self._slots: tuple[torch.Tensor, ...] = ()
        self._addresses: list[int] = []
        self._slot_of: dict[int, int] = {}
        #: How many rows the open step has asked for.
        self._asked = 0

    def count(self, tensor: torch.Tensor) -> torch.Tensor:
        """The row of a CPU tensor, as from ``counting.count``; overwritten in the next step."""
        counter = fastest.cpu_counter()
        if counter is None or not counter.takes(tensor):
            return fastest.count(tensor)
        slot = self._take()
        if slot is None:
            return fastest.count(tensor)
        counter.fill(tensor, self._addresses[slot])
        return self._slots[slot]

    def count_together(self, waiting: list[ParameterGradient]) -> None:
        """Count those gradients that can be counted in one call; of the others, and if the call fails, nothing is found."""
        counter: Any = fastest.cpu_counter()
        slots = []
        for each in waiting:
            slot = self._take() if counter is not None and counter.takes(each.values) else None
            if slot is not None:
                slots.append((each, slot))
        if not slots:
            return
        counter.fill_many([(each.values, self._addresses[slot]) for each, slot in slots])
        for each, slot in slots:
            each.found = self._slots[slot]

    def send(self, rows: list[torch.Tensor]) -> list[tuple[list[int], HostCopy]]:
        """Copy those of the step's rows that lie here: their indices, and the one copy. The next step begins."""
        counted = {index: self._slot_of[id(row)] for index, row in enumerate(rows) if id(row) in self._slot_of}
        copies = []
        if self._memory is not None and counted:
            # By NumPy: torch would share so small a copy among its threads, and wait for them where their cores are busy.
            chosen = self._memory.numpy()[list(counted.values())]
            copies = [(list(counted), HostCopy(torch.from_numpy(chosen)))]
        self._close()
        return copies

    def drop(self) -> None:
        """None of the step's rows becomes a sample; until the next step begins they hold what was counted."""
        self._close()

    def _close(self) -> None:
        with self._lock:
            if self._asked > self._capacity:
                self._capacity = 2 * self._asked
            self._asked = 0

    def _take(self) -> int | None:
        """The next slot, its row holding anything; None where the memory is full."""
        with self._lock:
            if not self._asked and len(self._slots) < self._capacity:
                with torch.inference_mode(False):
                    self._memory = torch.empty((self._capacity, NARROW.length), dtype=torch.int64, device="cpu")
                self._slots = self._memory.unbind(0)
                self._addresses = [row.data_ptr() for row in self._slots]
                self._slot_of = {id(row): slot for slot, row in enumerate(self._slots)}
            slot = self._asked
            self._asked += 1
            return slot if slot < len(self._slots) else None
