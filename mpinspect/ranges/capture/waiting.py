"""Holds parameter gradients until the end of their backward, to count them together.

These gradients are many and mostly small: counting each one alone would cost a kernel launch on a GPU, or Python code with
cold caches on a CPU. A gradient is held only if no known code could change it before the backward ends. In-place
changes are detected by the version counter; writes through ``.data`` or NumPy during the backward are not.
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
from mpinspect.runtime.device import current_stream
from mpinspect.runtime.distributed import has_process_group

#: Libraries that reduce gradients over processes without torch.distributed, from hooks on autograd nodes we can't detect.
_REDUCERS = ("horovod.torch", "byteps.torch")
#: Bytes above which a gradient is counted immediately: holding it would save less time than reading it takes.
_LARGEST_TO_WAIT = 16 << 20
#: Maximum number of bytes of gradients held at a time.
_MOST_WAITING = 64 << 20
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Enter = Callable[[Callable[[], None]], object]
Context = TypeVar("Context")


class WaitingGradients(Generic[Context]):
    """Holds the gradients of one backward.

    Args:
        show: called with the context passed to ``begin`` and the held gradients whose values are unchanged.
        note: called with a sentence on gradients that could not be counted.
        enter: calls a function as a guarded entry into the capture; used at the end of the backward.
    """

    def __init__(
        self, show: Callable[[Context, list[ParameterGradient]], None], note: Callable[[str], None], enter: Enter
    ) -> None:
        self._enter = enter
        self._show = show
        self._note = note
        #: Protects the fields below: backwards may run in several threads.
        self._lock = threading.Lock()
        self._waiting: list[ParameterGradient] = []
        self._bytes = 0
        #: The graph task whose gradients may be held, or NO_BACKWARD.
        self.task = NO_BACKWARD
        #: The thread where this backward began, and the context of its gradients.
        self._thread = 0
        self._context: Context | None = None
        self._readings: Sized = ()

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, context: Context, readings: Sized) -> None:
        """Start holding the gradients of the running backward, unless gradients of another thread's backward are held.

        Args:
            context: the context to pass to ``show``.
            readings: the tensors that the watch has read in this step.
        """
        if self._waiting:
            if self._thread != threading.get_ident():
                # The other thread's backward is still running.
                return
            # The held gradients are from an enclosing or an aborted backward, and this backward may change them.
            self.finish()
        with self._lock:
            if not self._waiting:
                task = torch._C._current_graph_task_id()
                self.task = NO_BACKWARD if task == -1 or _may_be_reduced() else task
                self._thread, self._context, self._readings = threading.get_ident(), context, readings

    def stop(self) -> None:
        """Hold no further gradients until the next ``begin``."""
        self.task = NO_BACKWARD

    def hold(self, watched: WatchedParameter, gradient: torch.Tensor) -> bool:
        """Hold a gradient of this ``task`` that has just arrived, if possible; return whether it is held.

        A gradient is not held if it isn't counted, if other code may change it, if it is large, or if too many are held.
        """
        parameter = watched.parameter
        if (
            not watched.counted
            or type(gradient) is not torch.Tensor
            or gradient.dtype not in _DTYPES
            or gradient.layout is not torch.strided
            or not gradient.is_contiguous()
            # A hook besides our own may change the gradient, or step an optimizer in the backward.
            or len(parameter._backward_hooks or ()) != 1
            or getattr(parameter, "_post_accumulate_grad_hooks", None)
        ):
            return False
        size = gradient.nbytes
        if size > _LARGEST_TO_WAIT or self._bytes + size > _MOST_WAITING:
            return False
        # A detached alias: autograd can still move the gradient itself to .grad, but would copy it if it had another reference.
        values = gradient.detach()
        stream = current_stream(gradient.device)
        waiting = ParameterGradient(watched, values, values._version, len(self._readings), stream)
        with self._lock:
            if self.task != torch._C._current_graph_task_id():
                # Another thread's backward has begun meanwhile.
                return False
            first = not self._waiting
            self._waiting.append(waiting)
            self._bytes += size
        if first:
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        return True

    def make_room(self, gradient: torch.Tensor) -> None:
        """Pass on the held gradients if this gradient would exceed the memory limit."""
        # A sparse gradient is never held, and has no nbytes.
        if gradient.layout is torch.strided and self._bytes + gradient.nbytes > _MOST_WAITING:
            self.finish()

    def finish_left_behind(self) -> None:
        """Pass on gradients still held from an aborted backward of this thread."""
        if self._waiting and self._thread == threading.get_ident():
            self.finish()

    def finish(self) -> None:
        """Pass the held gradients to ``show``, without those changed in place, and release them all."""
        with self._lock:
            waiting, self._waiting, self._bytes = self._waiting, [], 0
            context = self._context
        if not waiting:
            return
        intact = [each for each in waiting if each.values._version == each.version]
        if len(intact) < len(waiting):
            self._note(
                "weight gradients were changed in place before they could be counted: during their backward, or after a backward "
                "that an error ended"
            )
        assert context is not None
        self._show(context, intact)

    def end(self) -> None:
        """Pass on the held gradients and drop the backward's context, which is part of a reference cycle."""
        self.finish()
        with self._lock:
            if not self._waiting:
                self.task, self._context, self._readings = NO_BACKWARD, None, ()

    def _backward_ends(self) -> None:
        self._enter(self.end)


def _may_be_reduced() -> bool:
    """Return whether gradients may be reduced over processes on arrival, through .data, unseen by the version counter."""
    return has_process_group() or any(name in sys.modules for name in _REDUCERS)
