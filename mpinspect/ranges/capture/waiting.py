"""Parameters' gradients that wait for the end of their backward, to be counted together.

They are many and mostly small: one by one each costs a kernel's launch on a GPU, and on a CPU Python code that the products
before it have driven out of the caches. So a gradient waits where nothing is known that could change it in the meantime.
In-place changes are detected by the version counter; writes through ``.data`` or NumPy in the backward are not.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sized
from typing import Generic, TypeVar

import torch

from mpinspect.ranges.capture.layers import WatchedParameter
from mpinspect.ranges.capture.loss_scale import NO_BACKWARD
from mpinspect.ranges.capture.observations import ParameterGradient

#: They reduce gradients over processes from hooks on autograd's nodes, which can't be seen, and without torch.distributed.
_REDUCERS = ("horovod.torch", "byteps.torch")
#: A larger gradient is counted at once: its reading takes longer than what waiting saves.
_LARGEST_TO_WAIT = 16 << 20
#: No more bytes of gradients than these wait together.
_MOST_WAITING = 64 << 20
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Enter = Callable[[Callable[[], None]], object]
Context = TypeVar("Context")


class WaitingGradients(Generic[Context]):
    """Holds the gradients of one backward.

    Args:
        show: called with the context that ``begin`` was given, and the gradients that are still what they were.
        note: called with a sentence on what could not be counted.
        enter: runs ``finish`` when the backward ends, as an entrance of the training into the capture.
    """

    def __init__(
        self, show: Callable[[Context, list[ParameterGradient]], None], note: Callable[[str], None], enter: Enter
    ) -> None:
        self._enter = enter
        self._show = show
        self._note = note
        #: Backwards may run in several threads.
        self._lock = threading.Lock()
        self._waiting: list[ParameterGradient] = []
        self._bytes = 0
        #: The backward (graph task) whose gradients wait here; NO_BACKWARD: no gradient may.
        self.task = NO_BACKWARD
        #: The thread that began it, and the context of its gradients.
        self._thread = 0
        self._context: Context | None = None
        self._looks: Sized = ()

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, context: Context, looks: Sized) -> None:
        """Let the gradients of the backward that has just brought its first one wait, unless another thread's is at work.

        Args:
            context: for ``show``.
            looks: the tensors that the watch has read in this step.
        """
        if self._waiting:
            if self._thread != threading.get_ident():
                # That backward goes on beside this one.
                return
            # Of a backward around this one, or of one that broke off: what follows may change their gradients.
            self.finish()
        with self._lock:
            if not self._waiting:
                task = torch._C._current_graph_task_id()
                self.task = NO_BACKWARD if task == -1 or _may_be_reduced() else task
                self._thread, self._context, self._looks = threading.get_ident(), context, looks

    def stop(self) -> None:
        """No gradient may wait until the next ``begin``."""
        self.task = NO_BACKWARD

    def hold(self, watched: WatchedParameter, gradient: torch.Tensor) -> bool:
        """Hold a gradient of this ``task`` that has just arrived; returns whether it may wait.

        Not where it isn't counted, where more than its accumulation may touch it, where it is large, or there is no room.
        """
        parameter = watched.parameter
        if (
            not watched.counted
            or type(gradient) is not torch.Tensor
            or gradient.dtype not in _DTYPES
            or gradient.layout is not torch.strided
            or not gradient.is_contiguous()
            # Another hook than our own: one that may change the gradient, or an optimizer that steps in the backward.
            or len(parameter._backward_hooks or ()) != 1
            or getattr(parameter, "_post_accumulate_grad_hooks", None)
        ):
            return False
        size = gradient.nbytes
        if size > _LARGEST_TO_WAIT or self._bytes + size > _MOST_WAITING:
            return False
        # Another tensor with the same memory: .grad still takes the gradient over, where it would copy one that others hold.
        values = gradient.detach()
        stream = torch.cuda.current_stream(gradient.device) if gradient.is_cuda else None
        waiting = ParameterGradient(watched, values, values._version, len(self._looks), stream)
        with self._lock:
            if self.task != torch._C._current_graph_task_id():
                # Another thread's backward has come in between.
                return False
            first = not self._waiting
            self._waiting.append(waiting)
            self._bytes += size
        if first:
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        return True

    def make_room(self, gradient: torch.Tensor) -> None:
        """Show what waits, if it and this gradient together hold too much memory."""
        # A sparse gradient does not wait, and says nothing of its bytes.
        if gradient.layout is torch.strided and self._bytes + gradient.nbytes > _MOST_WAITING:
            self.finish()

    def finish_left_behind(self) -> None:
        """Show the gradients that an interrupted backward of this thread left behind."""
        if self._waiting and self._thread == threading.get_ident():
            self.finish()

    def finish(self) -> None:
        """Show what waits, and hold it no longer."""
        with self._lock:
            waiting, self._waiting, self._bytes = self._waiting, [], 0
            context = self._context
        if not waiting:
            return
        intact = [each for each in waiting if each.values._version == each.version]
        if len(intact) < len(waiting):
            self._note(
                "weight gradients were changed in place before they could be counted, in their backward or after one that broke "
                "off"
            )
        assert context is not None
        self._show(context, intact)

    def end(self) -> None:
        """Show what waits, and forget its backward, whose observers know who waits here: nothing may be left in a circle."""
        self.finish()
        with self._lock:
            if not self._waiting:
                self.task, self._context, self._looks = NO_BACKWARD, None, ()

    def _backward_ends(self) -> None:
        self._enter(self.end)


def _may_be_reduced() -> bool:
    """Return whether gradients may be averaged over processes as they arrive: through .data, which no version tells."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return True
    return any(name in sys.modules for name in _REDUCERS)
