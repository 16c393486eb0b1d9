"""Rows of counts on the CPU: memory made once, which numba's loops fill, and from which a step's rows go on in one copy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from mpinspect.capture.host_copy import HostCopy
from mpinspect.capture.sent import Sent, sorted_out
from mpinspect.capture.waiting import Enter, Waiting, WaitingGradients
from mpinspect.counting import fastest
from mpinspect.counting.layout import MIN_BITS, NARROW, NO_MINIMUM

#: Rows at first: 0.9 MB. Memory that was too small is made anew, with twice what the step would have needed.
_FIRST_CAPACITY = 128


class HostRows:
    """The rows that one capture fills on the CPU.

    Args:
        note: called with a sentence on what could not be counted.
        enter: see WaitingGradients.
    """

    def __init__(self, note: Callable[[str], None], enter: Enter) -> None:
        self._note = note
        #: Backwards may run in several threads.
        self._lock = threading.Lock()
        self._capacity = _FIRST_CAPACITY
        self._memory: torch.Tensor | None = None
        #: Its rows, their addresses and, by id, their numbers.
        self._slots: tuple[torch.Tensor, ...] = ()
        self._addresses: list[int] = []
        self._slot_of: dict[int, int] = {}
        #: How many rows the open step has asked for, and slots of those that hold nothing.
        self._asked = 0
        self._not_counted: set[int] = set()
        self._waiting = WaitingGradients(self._count_together, self._leave_out, note, enter)

    @cached_property
    def _counter(self) -> Any:
        """``counting.cpu.counter``, or None. Asked for when something is counted first: that loads it."""
        return fastest.cpu_counter()

    def count(self, tensor: torch.Tensor) -> torch.Tensor:
        """The row of a CPU tensor, as from ``counting.count``; overwritten in the next step."""
        counter = self._counter
        if counter is None or not counter.takes(tensor):
            return fastest.count(tensor)
        slot = self._take()
        if slot is None:
            return fastest.count(tensor)
        counter.fill(tensor, self._addresses[slot])
        return self._slots[slot]

    def count_later(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The row of a parameter's gradient that has just arrived: filled by the end of this backward, or at once."""
        # What may wait is of a kind that the counter takes.
        if self._counter is None or not self._waiting.takes(parameter, gradient):
            return self.count(gradient)
        slot = self._take()
        if slot is None or not self._waiting.add(gradient, slot):
            return self.count(gradient)
        return self._slots[slot]

    def send(self, rows: list[torch.Tensor]) -> Sent:
        """Copy those of the step's rows that lie here, and begin the next step."""
        self._waiting.count()
        counted, done = sorted_out(rows, self._slot_of, self._not_counted)
        copies: list[tuple[list[int], HostCopy]] = []
        if self._memory is not None and counted:
            # By NumPy: torch would share so small a copy among its threads, and wait for them where their cores are busy.
            chosen = self._memory.numpy()[list(counted.values())]
            copies.append((list(counted), HostCopy(torch.from_numpy(chosen))))
        self._close()
        return Sent(copies, done)

    def drop(self) -> None:
        """None of the step's rows becomes a sample; until the next step begins they hold what was counted."""
        try:
            self._waiting.count()
        finally:
            self._close()

    def count_waiting(self) -> None:
        """Count what a backward left behind that did not come to its end."""
        self._waiting.count_left_behind()

    def _close(self) -> None:
        with self._lock:
            if self._asked > self._capacity:
                self._capacity = 2 * self._asked
            self._asked, self._not_counted = 0, set()

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

    def _count_together(self, waiting: list[Waiting]) -> None:
        assert self._counter is not None
        pairs = [(each.values, self._addresses[each.slot]) for each in waiting]
        try:
            self._counter.fill_many(pairs)
        except Exception:
            self._count_one_by_one(waiting)

    def _count_one_by_one(self, waiting: list[Waiting]) -> None:
        """Something about one of them is amiss: the others are none the worse for it."""
        assert self._counter is not None
        for each in waiting:
            try:
                self._counter.fill_many([(each.values, self._addresses[each.slot])])
            except Exception as error:
                self._leave_out([each.slot])
                self._note(f"a weight gradient could not be counted: {error}")

    def _leave_out(self, slots: list[int]) -> None:
        self._not_counted.update(slots)
        for slot in slots:
            # The watch looks at it.
            self._slots[slot].zero_()[MIN_BITS] = NO_MINIMUM
