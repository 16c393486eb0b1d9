"""Finds the module that makes a forward non-finite, by checking later forwards module by module until one is finite."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mpinspect.runtime.distributed import local_part
from mpinspect.runtime.hooks import Uncopied
from mpinspect.runtime.outputs import tensors_in
from mpinspect.training.skipped_steps import NonFinite

#: The largest number of tensors recorded per step; in larger models only the first tensors are checked.
_MOST_LOOKS = 20_000


@dataclass(frozen=True)
class _Look:
    """The smallest and largest value (0-d, on the device) of one input or output tensor of a module."""

    layer: str
    call: int
    is_input: bool
    extremes: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Seen:
    """A `_Look` read on the host. ``value`` is "nan", "inf", "-inf" (no NaN or +inf), or "" if all values are finite."""

    layer: str
    call: int
    is_input: bool
    value: str


class ForwardSearch:
    """Records every module's outputs, and the inputs of modules without submodules, during a search for the culprit."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._handles: list[Any] = []
        self._looks: list[_Look] = []
        self._calls = 0
        self._silent = False
        #: (layer, value) of non-finite tensors in forwards with a finite loss: masks.
        self._harmless: set[tuple[str, str]] = set()

    def begin(self) -> NonFinite:
        """Hook every module, so that recording starts with the next forward, and return "loss" as culprit until then."""
        model = self._model()
        self._silent = bool(self._handles)
        if not self._handles and model is not None:
            for name, module in model.named_modules():
                hook = _Hook(self._look_at(name, is_leaf=not any(module.children())))
                self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
        return NonFinite("", "loss", "", self._detail())

    def _detail(self) -> str:
        if self._silent:
            return "every weight is finite, and no module hook ran in this forward: disable torch.compile to find the module"
        return "every weight is finite; the next forward will be checked module by module"

    def found(self) -> NonFinite | None:
        """Return the recorded forward's first non-finite module; None without a recording. Waits for the GPU."""
        seen = [look for look in self._read() if (look.layer, look.value) not in self._harmless]
        self.forget()
        if not seen:
            return None
        first = _first(seen)
        if first is None:
            detail = "every module's output was finite: it arose in the code after them, or in the loss"
            return NonFinite("", "loss", "", detail)
        value = first.value.removeprefix("-")
        if not first.is_input:
            return NonFinite(first.layer, first.layer, value, "its output was the first that was not finite")
        parent = first.layer.rpartition(".")[0]
        detail = f"it arose before {first.layer!r}, whose input was not finite"
        if not parent:
            detail += ": in the data, or in the model's own code"
        return NonFinite(parent, first.layer, value, detail)

    def forget(self) -> None:
        """Discard the recorded tensors' extremes."""
        self._looks.clear()

    def end(self) -> None:
        """End the search after a finite forward, and ignore its non-finite tensors from then on.

        Waits for the GPU if tensors were recorded.
        """
        self._harmless.update((look.layer, look.value) for look in self._read() if look.value)
        while self._handles:
            self._handles.pop().remove()

    def _read(self) -> list[_Seen]:
        if not self._looks:
            return []
        device = self._looks[0].extremes[0].device
        flat = [extreme.to(device, torch.float64) for look in self._looks for extreme in look.extremes]
        extremes = torch.stack(flat)
        values = [_value(low, high) for low, high in extremes.view(-1, 2).tolist()]
        return [
            _Seen(look.layer, look.call, look.is_input, value) for look, value in zip(self._looks, values, strict=True)
        ]

    def _look_at(self, layer: str, *, is_leaf: bool) -> Callable[..., None]:
        def look(inputs: Any, output: Any) -> None:
            self._calls += 1
            if is_leaf:
                self._add(layer, inputs, is_input=True)
            self._add(layer, output, is_input=False)

        return look

    def _add(self, layer: str, values: Any, *, is_input: bool) -> None:
        for tensor in map(local_part, tensors_in(values)):
            is_read = tensor.is_floating_point() and tensor.layout is torch.strided and tensor.element_size() > 1
            if is_read and tensor.numel() and len(self._looks) < _MOST_LOOKS:
                low, high = torch.aminmax(tensor.detach())
                self._looks.append(_Look(layer, self._calls, is_input, (low, high)))


class _Hook(Uncopied):
    """The forward hook."""

    def __init__(self, look: Callable[..., None]) -> None:
        self._look = look

    def __call__(self, module: torch.nn.Module, inputs: Any, named: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._look((inputs, named), output)


def _first(seen: list[_Seen]) -> _Seen | None:
    """Return the record of the tensor where the non-finite values arose; None if all values are finite.

    A -inf is usually a harmless mask, so the first NaN or +inf takes precedence. But if that NaN or +inf is an input, or its
    module had a -inf input, and an earlier module returned -inf (a logarithm of 0, say), that -inf is the origin.
    """
    worst = next((look for look in seen if look.value in ("nan", "inf")), None)
    masks = [look for look in seen if look.value == "-inf"]
    if worst is None:
        return next(iter(masks), None)
    handed = [look for look in seen if look.call == worst.call and look.is_input]
    if worst.is_input or any(look.value == "-inf" for look in handed):
        return next((look for look in masks if not look.is_input and look.call < worst.call), worst)
    return worst


def _value(low: float, high: float) -> str:
    if math.isnan(low) or math.isnan(high):
        return "nan"
    return next((str(bound) for bound in (high, low) if math.isinf(bound)), "")
