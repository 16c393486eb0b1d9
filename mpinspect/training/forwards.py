"""Hooks on a model's forwards: they record input shapes, for cuDNN's benchmark mode, and explain failures outside autocast."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import torch

from mpinspect.runtime.hooks import Uncopied
from mpinspect.training.suggestions import Seen

#: The largest number of distinct input shapes to remember; beyond it, shapes are certainly not constant.
_MOST_SHAPES = 16


class ForwardShapes:
    """Counts a model's training forwards and the distinct shapes of their inputs, with one hook on the model itself."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._forwards = 0
        self._shapes: set[tuple[torch.Size, ...]] = set()
        self._convolutions = any(isinstance(module, torch.nn.modules.conv._ConvNd) for module in model.modules())
        self._handle = model.register_forward_pre_hook(_Hook(self), with_kwargs=True)

    def seen(self, device: str, float32_fraction: float) -> Seen:
        """Return the counts so far, with the current values of torch's settings."""
        capability = None
        if device == "cuda":
            capability = torch.cuda.get_device_capability()
        return Seen(
            device,
            capability,
            self._forwards,
            len(self._shapes),
            self._convolutions,
            float32_fraction,
            torch.backends.cudnn.benchmark,
            _allows_tf32(torch.backends.cuda.matmul),
            _allows_tf32(torch.backends.cudnn),
        )

    def look(self, inputs: Any) -> None:
        """Record the start of a training forward and the shapes of its inputs."""
        self._forwards += 1
        if len(self._shapes) < _MOST_SHAPES:
            leaves = torch.utils._pytree.tree_leaves(inputs)
            self._shapes.add(tuple(leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor)))

    def detach(self) -> None:
        self._handle.remove()


class OutsideAutocast:
    """Adds a note to torch's dtype-mismatch errors if a model with 16-bit weights was called without ``autocast()``.

    The exception itself is unchanged. Hooks on the model and on its top-level submodules detect the failed forward.

    Args:
        model: a model with 16-bit weights.
        dtype: the dtype of these weights.
        device: device type of the model.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, device: str) -> None:
        self._device = device
        name = str(dtype).removeprefix("torch.")
        self._note = (
            f"the model's weights are {name}, and this forward ran outside of autocast(), which casts its inputs: call the "
            "model and the loss within `with precision.autocast():` of its MixedPrecision, in evaluation too"
        )
        # How torch's messages write the dtype: "Half" and "c10::Half", "torch.HalfTensor", "torch.float16".
        self._says_dtype = re.compile({"float16": r"Half|\bfloat16", "bfloat16": r"BFloat16|\bbfloat16"}[name])
        self._handles = [
            module.register_forward_hook(_FailedHook(self), always_call=True) for module in _called_alone(model)
        ]

    def explain(self, error: BaseException | None) -> None:
        """Add the note to ``error``, which ended a forward, if it reports a dtype mismatch outside autocast."""
        if not isinstance(error, Exception) or torch.is_autocast_enabled(self._device):
            return
        said = "\n".join((str(error), *getattr(error, "__notes__", ())))
        if self._says_dtype.search(str(error)) and self._note not in said:
            _add_note(error, self._note)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()


def _called_alone(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the model and its top-level submodules with a forward, which scripts may call directly (``model.encoder(x)``)."""
    yield model
    waiting = list(model.children())
    while waiting:
        module = waiting.pop()
        if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            waiting += module.children()
        else:
            yield module


def _add_note(error: Exception, note: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    elif len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}",)


def _allows_tf32(backend: Any) -> bool:
    try:
        return bool(backend.allow_tf32)
    except RuntimeError:
        # torch 2.9 added a second setting; reading the old one raises if the new one was set.
        return getattr(backend, "fp32_precision", "") == "tf32"


class _Hook(Uncopied):
    """The forward pre-hook."""

    def __init__(self, shapes: ForwardShapes) -> None:
        self._shapes = shapes

    def __call__(self, module: torch.nn.Module, inputs: Any, named: Any) -> None:
        if module.training and not torch.compiler.is_compiling():
            self._shapes.look((inputs, named))


class _FailedHook(Uncopied):
    """Hook that runs when a forward ends; an exception leaves the output None."""

    def __init__(self, watch: OutsideAutocast) -> None:
        self._watch = watch

    def __call__(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if output is None and not torch.compiler.is_compiling():
            self._watch.explain(sys.exc_info()[1])
