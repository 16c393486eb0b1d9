"""Streams, events, copies to page-locked memory and graph captures of a tensor's device.

No other module knows these. This one looks up torch's module for the device (``torch.cuda``, ``torch.xpu``, or an external
backend's), so that every accelerator with streams and events gets asynchronous copies. On devices without them, such as MPS,
copies wait.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch

#: Attributes of the modules of asynchronous devices.
_NEEDED = ("Event", "Stream", "current_stream", "stream")


_CPU = torch.device("cpu")
#: The modules that ``_module`` found, by device: a device's type takes torch longer than a look-up.
_modules: dict[torch.device, Any] = {_CPU: None}
#: The streams that ``current_stream`` found, by CUDA device and number: making a Stream takes torch ten times as long as
#: reading its number, and every gradient needs it.
_streams: dict[tuple[int, int], Any] = {}


def _module(device: torch.device) -> Any:
    """Return torch's module for a device with streams and events; None for other devices, the CPU among them."""
    if device not in _modules:
        module = getattr(torch, device.type, None)
        if device.type == "cpu" or not all(hasattr(module, name) for name in _NEEDED):
            return None
        _modules[device] = module
    return _modules[device]


#: The module that ``_accelerator`` found, since a process uses one kind of accelerator, and its ``is_current_stream_capturing``.
_found: Any = None
_captures: Any = bool
#: Returns the kind of accelerator that this torch is built for, or None; torch's public function takes ten times as long.
_asked: Any = getattr(torch._C, "_accelerator_getAccelerator", torch.accelerator.current_accelerator)


def _built_for() -> Any:
    global _asked
    try:
        return _asked()
    except RuntimeError:
        # torch 2.6 raises where later versions return None.
        _asked = type(None)
        return None


def _forget() -> None:
    """Forget the module in a forked process, which can't use its parent's accelerator: calls to the module would raise."""
    global _found
    _found = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _accelerator() -> Any:
    """Return torch's module for the accelerator that this process has used; None before the first use or without one."""
    global _found, _captures
    if _found is None:
        module = _module(_built_for() or _CPU)
        if module is not None and getattr(module, "is_initialized", bool)():
            _found, _captures = module, getattr(module, "is_current_stream_capturing", bool)
    return _found


def is_capturing() -> bool:
    """Return whether the current stream captures a graph, so that launches and copies would become a part of the graph.

    Never initialises a device. Called by every hook.
    """
    is_used = _found is not None or (_built_for() is not None and _accelerator() is not None)
    return is_used and bool(_captures())


def current_stream(device: torch.device) -> Any:
    """Return the current stream of a device; None for a device without streams."""
    module, index = _module(device), device.index
    if module is None:
        return None
    if module is not torch.cuda or index is None:
        return module.current_stream(device)
    found = index, raw_stream(index)
    if found not in _streams:
        _streams[found] = module.current_stream(device)
    return _streams[found]


def raw_stream(index: int) -> int:
    """Return the address of the current stream of the CUDA device with this index. Private in torch; seen in 2.11 and 2.15."""
    found: int = torch._C._cuda_getCurrentRawStream(index)
    return found


def stream_key(device: torch.device) -> object:
    """Return a key that identifies the current stream of a device; None for a device without streams."""
    if _module(device) is torch.cuda:
        return raw_stream(device.index)
    return getattr(current_stream(device), "stream_id", None)


def devices_named(devices: Iterable[torch.device]) -> str:
    """Return the devices in words, each once: "cpu", "cuda (NVIDIA H100 80GB HBM3)". Does not synchronise."""
    return ", ".join(dict.fromkeys(map(_named, dict.fromkeys(devices))))


def _named(device: torch.device) -> str:
    try:
        return f"{device.type} ({getattr(torch, device.type).get_device_name(device)})"
    # The CPU has no such function; a backend's may fail, and a name is worth no error.
    except Exception:
        return device.type


def memory_of(device: torch.device) -> int:
    """Return a device's memory in bytes; 0 if torch reports none."""
    properties: Any = getattr(_module(device), "get_device_properties", bool)
    return int(getattr(properties(device), "total_memory", 0))


def free_memory(device: torch.device) -> float:
    """Return the bytes that torch could still allocate on a CUDA device, those in its cache included, or on the host.

    Infinite for other devices, and where the system does not tell. Does not synchronise.
    """
    if device.type == "cpu":
        return _available_on_host()
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _available_on_host() -> float:
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return math.inf
    kilobytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return math.inf if kilobytes is None else 1024.0 * int(kilobytes)


def new_stream(device: torch.device) -> Any:
    """Return another stream of a device; None for a device without streams."""
    module = _module(device)
    return None if module is None else module.Stream(device)


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Return a context in which this stream is the current one; for None the context has no effect."""
    if stream is None or _is_current(stream):
        return nullcontext()
    context: AbstractContextManager[Any] = _module(stream.device).stream(stream)
    return context


def _is_current(stream: Any) -> bool:
    """Return whether a stream is known to be the current one already: entering torch's context takes several microseconds."""
    device = stream.device
    is_cuda = _module(device) is torch.cuda
    return is_cuda and stream.cuda_stream == stream_key(device) and torch.cuda.current_device() == device.index


def used_on_current_stream(tensor: torch.Tensor) -> None:
    """Reserve a tensor's memory until the current stream has read it, though another stream allocated it. Does not wait."""
    stream = current_stream(tensor.device)
    if isinstance(stream, torch.Stream):
        tensor.record_stream(stream)


def copied(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Begin to copy a tensor to the host, on the current stream; return the copy and the event after which it is complete.

    The event is None if the copy is already complete. The page-locked memory comes from torch's cache, which reuses its
    blocks, so no memory is allocated after the first steps.
    """
    module = _module(tensor.device)
    if module is None:
        return tensor.to("cpu"), None
    # Name the device: the user may have set another default device.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = module.Event()
    event.record(current_stream(tensor.device))
    return host, event


def timing_event() -> Any:
    """Return a new event that records times, of the accelerator that this process has used; None before, and without one."""
    module = _accelerator()
    return None if module is None else module.Event(enable_timing=True)


def random_state(device: torch.device) -> torch.Tensor | None:
    """Return the state of a device's random generator, stored on the host; None if it can't be read."""
    read = getattr(getattr(torch, device.type, None), "get_rng_state", None)
    state: torch.Tensor | None = None if read is None else read(device)
    return state


@cache
def computes_in_fp64(device: torch.device) -> bool:
    """Return whether a device has FP64, which MPS and some XPUs lack."""
    if device.type in ("cpu", "cuda"):
        return True
    try:
        torch.ones(1, dtype=torch.float64, device=device).mul_(2)
    except (RuntimeError, TypeError):
        return False
    return True
