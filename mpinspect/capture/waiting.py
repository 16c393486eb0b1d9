"""Weight gradients that wait for the end of their backward, to be counted together.

They are many and mostly small: one by one each costs a kernel's launch on a GPU, and on a CPU Python code that the products
before it have driven out of the caches. So a gradient waits where nothing is known that could change it in the meantime.
What changes its memory all the same is told by its version, unless it goes round that too (``.data``, NumPy) in the backward.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

#: They reduce gradients over processes from hooks on autograd's nodes, which nobody can see, and without torch.distributed.
_REDUCERS = ("horovod.torch", "byteps.torch")
#: A larger gradient is counted at once: its reading takes longer than what waiting saves.
_LARGEST_TO_WAIT = 16 << 20
#: No more bytes of gradients than these wait together.
_MOST_WAITING = 64 << 20
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Enter = Callable[[Callable[[], None]], object]


@dataclass
class Waiting:
    """A gradient to be counted when the backward ends, if it is then what it was."""

    values: torch.Tensor
    version: int
    slot: int
    stream: Any


class WaitingGradients:
    """Those of one backward.

    Args:
        count: called with those that are still what they were.
        left_out: called with the slots of those that are not.
        note: called with a sentence on what could not be counted.
        enter: runs what is to be done when the backward ends, which is an entrance of the training into the capture.
    """

    def __init__(
        self,
        count: Callable[[list[Waiting]], None],
        left_out: Callable[[list[int]], None],
        note: Callable[[str], None],
        enter: Enter,
    ) -> None:
        self._enter = enter
        self._count = count
        self._left_out = left_out
        self._note = note
        #: Backwards may run in several threads.
        self._lock = threading.Lock()
        self._waiting: list[Waiting] = []
        self._bytes = 0
        #: The backward (graph task) that is at work, whose end counts what waits, and whether no other process takes part in it.
        self._task, self._alone = -1, True
        #: The thread that began it.
        self._thread = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def takes(self, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        """Whether this gradient, which has just arrived, may wait."""
        task = torch._C._current_graph_task_id()
        if task != self._task and not self._begin(task):
            return False
        if task == -1 or not self._alone or not _may_wait(parameter, gradient):
            return False
        if self._bytes + gradient.nbytes > _MOST_WAITING:
            self.count()
        return True

    def _begin(self, task: int) -> bool:
        """A gradient of another backward than before has come; whether what waits, if anything, is of this thread."""
        if self._waiting:
            if self._thread != threading.get_ident():
                # That backward goes on beside this one.
                return False
            # Of a backward around this one, or of one that broke off: what comes now may change their gradients.
            self.count()
        with self._lock:
            if self._waiting:
                return False
            self._task, self._thread = task, threading.get_ident()
        self._alone = not _may_be_reduced()
        return True

    def add(self, gradient: torch.Tensor, slot: int, stream: Any = None) -> bool:
        """Have one wait that it ``takes``; False if another thread's backward has come in between."""
        # Another tensor with the same memory: .grad still takes the gradient over, where it would copy one that others hold.
        values = gradient.detach()
        with self._lock:
            if self._task != torch._C._current_graph_task_id():
                return False
            first = not self._waiting
            self._waiting.append(Waiting(values, values._version, slot, stream))
            self._bytes += values.nbytes
        if first:
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        return True

    def count_left_behind(self) -> None:
        """Count what a backward of this thread left here that did not come to its end: nothing is held any longer."""
        if self._waiting and self._thread == threading.get_ident():
            self.count()

    def count(self) -> None:
        """Count what waits."""
        with self._lock:
            waiting, self._waiting, self._bytes = self._waiting, [], 0
        intact = [each for each in waiting if each.values._version == each.version]
        if len(intact) < len(waiting):
            self._left_out([each.slot for each in waiting if each.values._version != each.version])
            self._note(
                "weight gradients were changed in place before they could be counted, in their backward or after one that broke "
                "off"
            )
        if intact:
            try:
                self._count(intact)
            except BaseException:
                # Ctrl-C too: what their slots hold is of no gradient.
                self._left_out([each.slot for each in intact])
                raise

    def _backward_ends(self) -> None:
        self._enter(self.count)


def _may_be_reduced() -> bool:
    """Whether gradients may be averaged over processes as they come: by way of .data, which no version tells."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return True
    return any(name in sys.modules for name in _REDUCERS)


def _may_wait(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether nothing but the gradient's accumulation is known to touch it until the backward ends."""
    return (
        type(gradient) is torch.Tensor
        and gradient.dtype in _DTYPES
        and gradient.layout is torch.strided
        and gradient.is_contiguous()
        and gradient.nbytes <= _LARGEST_TO_WAIT
        # Our own hook, and no other: not one that may change the gradient, nor an optimizer that steps in the backward.
        and len(parameter._backward_hooks or ()) == 1
        and not getattr(parameter, "_post_accumulate_grad_hooks", None)
    )
