"""Holds parameter gradients, and on a CPU small output gradients, until the end of their backward, to count them together.

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

from mpinspect.ranges.capture.layers import Layer, WatchedParameter
from mpinspect.ranges.capture.loss_scale import NO_BACKWARD
from mpinspect.ranges.capture.observations import Held, OutputGradient, ParameterGradient
from mpinspect.runtime.device import current_stream
from mpinspect.runtime.distributed import has_process_group

#: Libraries that reduce gradients over processes without torch.distributed, from hooks on autograd nodes we can't detect.
_REDUCERS = ("horovod.torch", "byteps.torch")
#: Bytes above which a gradient is counted immediately: holding it would save less time than reading it takes.
_LARGEST_TO_WAIT = 16 << 20
#: Maximum number of bytes of gradients held at a time.
_MOST_WAITING = 64 << 20
#: Bytes above which an output gradient is counted immediately: holding many would raise the peak of a backward's memory.
_LARGEST_OUTPUT = 64 << 10
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

    def __init__(self, show: Callable[[Context, list[Held]], None], note: Callable[[str], None], enter: Enter) -> None:
        self._enter, self._show, self._note = enter, show, note
        #: Protects the fields below: backwards may run in several threads.
        self._lock = threading.Lock()
        self._waiting: list[Held] = []
        self._bytes = 0
        #: The paths of the modules whose held output gradients were changed in place: theirs are not held again.
        self._changed: set[str] = set()
        #: The graph task whose gradients may be held, or NO_BACKWARD.
        self.task = NO_BACKWARD
        #: The thread where this backward began, and the context of its gradients.
        self._thread = 0
        self._context: Context | None = None
        self._readings: Sized = ()
        #: Whether small output gradients of that task may be held too.
        self.holds_outputs = False

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, context: Context, readings: Sized, outputs: bool = False) -> None:
        """Start holding the gradients of the running backward, unless gradients of another thread's backward are held.

        Args:
            context: the context to pass to ``show``.
            readings: the tensors that the watch has read in this step.
            outputs: whether small output gradients are held too.
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
                self.holds_outputs = outputs

    def stop(self) -> None:
        """Hold no further gradients until the next ``begin``."""
        self.task, self.holds_outputs = NO_BACKWARD, False

    def hold(self, watched: WatchedParameter, gradient: torch.Tensor) -> bool:
        """Hold a gradient of this ``task`` that has just arrived, if possible; return whether it is held.

        A gradient is not held if it isn't counted, if other code may change it, if it is large, or if too many are held.
        """
        parameter = watched.parameter
        if (
            not watched.counted
            or not _is_plain(gradient)
            or gradient.nbytes > _LARGEST_TO_WAIT
            # A hook besides our own may change the gradient, or step an optimizer in the backward.
            or len(parameter._backward_hooks or ()) != 1
            or getattr(parameter, "_post_accumulate_grad_hooks", None)
        ):
            return False
        # A detached alias: autograd can still move the gradient itself to .grad, but would copy it if it had another reference.
        values = gradient.detach()
        stream = None if gradient.is_cpu else current_stream(gradient.device)
        return self._keep(ParameterGradient(watched, values, values._version, len(self._readings), stream))

    def hold_output(self, layer: Layer, gradient: torch.Tensor, counted: bool, number: int, is_input: bool) -> bool:
        """Hold a small gradient of an output on a CPU in the same way; return whether it is held."""
        if not self.holds_outputs or not gradient.is_cpu or not _is_plain(gradient):
            return False
        if gradient.nbytes > _LARGEST_OUTPUT or layer.path in self._changed:
            return False
        values = gradient.detach()
        place = len(self._readings)
        held = OutputGradient(layer, values, counted, number, is_input, None, values._version, place)
        return self._keep(held)

    def _keep(self, held: Held) -> bool:
        size = held.values.nbytes
        if self._bytes + size > _MOST_WAITING:
            return False
        with self._lock:
            if self.task != torch._C._current_graph_task_id():
                # Another thread's backward has begun meanwhile.
                return False
            first = not self._waiting
            self._waiting.append(held)
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
            self._forget_changed(waiting)
        assert context is not None
        self._show(context, intact)

    def _forget_changed(self, waiting: list[Held]) -> None:
        changed = [each for each in waiting if each.values._version != each.version]
        outputs = [each.layer.path for each in changed if isinstance(each, OutputGradient)]
        self._changed.update(outputs)
        if outputs:
            self._note(
                f"the gradient of {', '.join(map(repr, outputs[:3]))} was changed in place during its backward before it could "
                "be counted; from now on it is counted when it arrives"
            )
        if len(outputs) < len(changed):
            self._note(
                "weight gradients were changed in place before they could be counted: during their backward, or after a backward "
                "that an error ended"
            )

    def end(self) -> None:
        """Pass on the held gradients and drop the backward's context, which is part of a reference cycle."""
        self.finish()
        with self._lock:
            if not self._waiting:
                self.task, self._context, self._readings = NO_BACKWARD, None, ()

    def _backward_ends(self) -> None:
        self._enter(self.end)


def _is_plain(gradient: torch.Tensor) -> bool:
    return (
        type(gradient) is torch.Tensor
        and gradient.dtype in _DTYPES
        and gradient.layout is torch.strided
        and gradient.is_contiguous()
    )


def _may_be_reduced() -> bool:
    """Return whether gradients may be reduced over processes on arrival, through .data, unseen by the version counter."""
    return has_process_group() or any(name in sys.modules for name in _REDUCERS)
