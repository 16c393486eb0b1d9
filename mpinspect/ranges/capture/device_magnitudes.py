"""The largest magnitudes of tensors on a CUDA device, found by one kernel for many tensors and sent to the host in one copy.

Reading every output and gradient has two costs in a training step on a GPU: the memory is read once more, and each launch takes
the host as long as a small layer. So tensors are held and read in groups. In a step that is not sampled, most of a group is
read only if a value in the step is not finite: the kernel receives these tensors too, but each of its blocks first reads one
word on the device, which a non-finite value sets. Two kinds are always read, because later tensors depend on them: the outputs
of containers, and the last tensor of each group. Gradients of containers are not: a broken gradient spreads to all earlier
ones, whereas a bounded activation can hide a broken output. An infinity that vanishes within a block is therefore seen only in
sampled steps. A group is closed by the first tensor after it is full, so that the largest tensors (a language model's logits)
are rarely the last ones, which are always read.

A held tensor is an alias of its memory. If it is changed in place before its group is read, it is lost, and later tensors of
this name are read at once. The first steps read every tensor at once, to learn these names.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from mpinspect.counting.cuda import available
from mpinspect.counting.pieces import fills_its_memory
from mpinspect.ranges.capture.culprit import NOT_READ
from mpinspect.ranges.capture.host_rows import HostCopy
from mpinspect.ranges.capture.largest import Slot, version_of
from mpinspect.runtime.device import current_stream, memory_of, on_stream, stream_key

#: Number of steps that read tensors at once, to learn which are changed in place afterwards.
LEARNING_STEPS = 3
#: Maximum number of held bytes: this number, or this part of the device's memory if it is larger.
_HELD_BYTES, _HELD_PART = 64 << 20, 256
#: Initial number of slots. A buffer that was too small is followed by one of twice the size.
_FIRST_CAPACITY = 1024
#: The slot that is set to 1 by any value that is not finite.
_BROKEN = 0


class Kernels(Protocol):
    """The kernels that read tensors on the device (``mpinspect.counting.cuda.counter``)."""

    DTYPES: Any

    def largest_many(
        self, tensors: list[torch.Tensor], slots: list[int], broken: torch.Tensor, only_if_broken: bool
    ) -> None: ...

    def largest_of_slots(self, slots: npt.NDArray[np.uint64], is_double: bool) -> list[float | None]: ...


class StepMagnitudes:
    """The slots of one step on one device, int64 of shape (slots,), and their copy on the host once it was sent."""

    def __init__(self, slots: torch.Tensor, kernels: Kernels, stream: Any) -> None:
        self.slots: torch.Tensor | None = slots
        self._capacity = len(slots)
        self.address = slots.data_ptr()
        self._broken = slots[_BROKEN : _BROKEN + 1]
        self._device, self.stream, self._stream_key = slots.device, stream, stream_key(slots.device)
        #: The number of slots that were taken, or would have been in a larger buffer.
        self.used = _BROKEN + 1
        #: Slots of tensors that could not be read, or that were changed before.
        self.lost: set[int] = set()
        self._kernels = kernels
        self._copy: HostCopy | None = None
        self._found: dict[bool, list[float | None]] = {}

    def send(self) -> None:
        """Copy the slots to the host. Does not wait."""
        assert self.slots is not None
        with on_stream(self.stream):
            self._copy = HostCopy(self.slots[: self.used])
        self.slots = None

    def ready(self) -> bool:
        """Return whether the copy is complete; does not wait."""
        return self._copy is None or self._copy.ready()

    def broken(self) -> bool:
        """Return whether any value that was read is not finite. Waits for the device if the copy is not complete."""
        return self._copy is None or bool(self._copy.values()[_BROKEN])

    def largest(self, slot: int, is_double: bool) -> float | None:
        if slot in self.lost or self._copy is None:
            return None
        if is_double not in self._found:
            self._found[is_double] = self._kernels.largest_of_slots(self._copy.values().view(np.uint64), is_double)
        found = self._found[is_double][slot]
        return NOT_READ if found is None else found

    def take(self, count: int) -> int | None:
        """Return the first of ``count`` free slots; None if there are fewer, or on another stream than the step's first."""
        if stream_key(self._device) != self._stream_key:
            return None
        first = self.used
        self.used += count
        return first if self.used <= self._capacity else None

    def read(self, tensors: list[torch.Tensor], slots: Iterable[int], only_if_broken: bool) -> None:
        """Start reading tensors into slots. Does not wait."""
        places = [self.address + 8 * slot for slot in slots]
        self._kernels.largest_many(tensors, places, self._broken, only_if_broken)


class StepSlot:
    """The largest magnitude of one tensor, on the device until its step has been sent and has arrived."""

    __slots__ = ("_is_double", "_slot", "_step")

    def __init__(self, step: StepMagnitudes, slot: int, is_double: bool) -> None:
        self._step, self._slot, self._is_double = step, slot, is_double

    def largest(self) -> float | None:
        return self._step.largest(self._slot, self._is_double)


#: A held tensor's values, version, slot (None: already read, and held to see whether it is changed), whether it is always read,
#: whether it is spared, and its name; a plain tuple, since a step has hundreds.
_Held = tuple[torch.Tensor, int, int | None, bool, bool, Hashable]


class DeviceMagnitudes:
    """Finds the largest magnitudes of the tensors of one capture on one CUDA device.

    Args:
        device: with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._capacity = _FIRST_CAPACITY
        self._open: StepMagnitudes | None = None
        self._held: list[_Held] = []
        self._bytes = 0
        self._most = held_bytes(device)
        self._steps = 0
        #: Names of tensors that are changed in place soon after they were made.
        self._changed: set[Hashable] = set()

    def read(self, tensor: torch.Tensor, name: Hashable, *, always: bool, is_spared: bool = False) -> Slot | None:
        """Read a tensor, now or together with later ones. Never waits for the GPU.

        Args:
            name: the same for the same tensor of every step.
            always: whether to read it although everything is finite.
            is_spared: whether to read it only if a value is not finite, even as the last one of its group.

        Returns:
            None if these kernels can't read it: another layout or dtype, another stream than the step's first, kernels
            unavailable.
        """
        kernels, values = available.counter(), tensor.detach()
        if kernels is None or not _is_readable(values, kernels):
            return None
        step = self._open or self._begin(kernels)
        slot = step.take(1)
        if slot is None:
            return None
        is_learning, is_changed = self._steps < LEARNING_STEPS, name in self._changed
        if is_learning or is_changed:
            step.read([values], [slot], False)
        if not is_changed:
            is_full = self._bytes > self._most
            later = None if is_learning else slot
            self._held.append((values, version_of(values), later, always and not is_spared, is_spared, name))
            self._bytes += values.nbytes
            if is_full:
                self.flush()
        return StepSlot(step, slot, values.dtype is torch.float64)

    def read_now(self, tensors: list[torch.Tensor], only_if_broken: bool) -> tuple[StepMagnitudes, int] | None:
        """Read tensors at once; return the step and the first of their slots, or None like ``read``. Does not wait."""
        kernels = available.counter()
        if kernels is None or not all(_is_readable(each, kernels) for each in tensors):
            return None
        step = self._open or self._begin(kernels)
        first = step.take(len(tensors))
        if first is None:
            return None
        step.read(tensors, range(first, step.used), only_if_broken)
        return step, first

    def flush(self) -> None:
        """Read the held tensors. Does not wait.

        Raises:
            Exception: the kernels failed; the held tensors are lost.
        """
        held, self._held, self._bytes = self._held, [], 0
        step = self._open
        if step is None or step.slots is None:
            return
        intact: list[tuple[torch.Tensor, int, bool]] = []
        last_is_spared = False
        for values, version, slot, always, is_spared, name in held:
            if version_of(values) != version or not values.data_ptr():
                self._changed.add(name)
                if slot is not None:
                    step.lost.add(slot)
            elif slot is not None:
                intact.append((values, slot, always))
                last_is_spared = is_spared
        if not intact:
            return
        if not last_is_spared:
            # Later tensors depend on a group's last one.
            intact[-1] = (*intact[-1][:2], True)
        try:
            with on_stream(step.stream):
                for always in (True, False):
                    group = [each for each in intact if each[2] is always]
                    if group:
                        step.read([values for values, _, _ in group], [slot for _, slot, _ in group], not always)
        except Exception:
            step.lost.update(slot for _, slot, _ in intact)
            raise

    def send(self) -> StepMagnitudes | None:
        """Read the held tensors, copy the step's magnitudes to the host and begin the next step. Does not wait."""
        try:
            self.flush()
        finally:
            step, self._open = self._open, None
            if step is not None:
                self._steps += 1
                if step.used > self._capacity:
                    self._capacity = 2 * step.used
                step.send()
        return step

    def _begin(self, kernels: Kernels) -> StepMagnitudes:
        with torch.inference_mode(False):
            slots = torch.zeros(self._capacity, dtype=torch.int64, device=self._device)
        self._open = StepMagnitudes(slots, kernels, current_stream(self._device))
        return self._open


def is_on_device(tensor: torch.Tensor) -> bool:
    """Return whether kernels can read a tensor asynchronously."""
    return tensor.is_cuda


def _is_readable(values: torch.Tensor, kernels: Kernels) -> bool:
    return (
        type(values) is torch.Tensor
        and values.layout is torch.strided
        and values.dtype in kernels.DTYPES
        and values.numel() > 0
        and (values.is_contiguous() or fills_its_memory(values))
        and not values.is_neg()
        and values.data_ptr() != 0
    )


def held_bytes(device: torch.device) -> int:
    """Return how many bytes of a device's tensors may be held: a negligible part of its memory."""
    return max(_HELD_BYTES, memory_of(device) // _HELD_PART)
