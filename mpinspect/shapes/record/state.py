"""A model run on stand-ins of its tensors, so that nothing of its own is touched: meta tensors, or leaves of the same memory.

Everything that a forward may change in a module is an entry of its ``__dict__``: parameters, buffers, hooks, train/eval flag,
what it keeps for later. A shallow copy of these entries and of the containers among them is put back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from mpinspect.runtime.untouched import RandomState

#: Hooks that act on the very parameters they were made for, or on what they see, and would see stand-ins: ours, and sharding's.
_INERT = ("mpinspect.", "torch.distributed.")

MakeTensor = Callable[[torch.Tensor], torch.Tensor]


class LazyModelError(ValueError):
    """A parameter has no shape yet."""


@contextmanager
def standing_in(model: torch.nn.Module, parameter: MakeTensor, buffer: MakeTensor) -> Iterator[dict[int, torch.Tensor]]:
    """Within the block parameters and buffers are other tensors (tied ones once); afterwards all is as before.

    Args:
        model: any module.
        parameter: from a parameter, detached, to the tensor of its stand-in.
        buffer: likewise for buffers.

    Yields:
        stand-ins by the id of the tensor that they stand for.

    Raises:
        LazyModelError: a lazy module that has not run yet.
    """
    modules = list(model.modules())
    owned = [tensor for module in modules for tensor in _tensors(module)]
    for tensor in owned:
        if is_lazy(tensor):
            raise LazyModelError(
                "a parameter has no shape yet (a lazy module): run one batch through the model first, then record it"
            )
    snapshots = [_Entries(module.__dict__) for module in modules]
    gradients = [(tensor, tensor.grad) for tensor in owned if tensor.is_leaf and tensor.grad is not None]
    random_state = RandomState.now()
    try:
        stand_ins: dict[int, torch.Tensor] = {}
        for tensor in owned:
            if id(tensor) not in stand_ins:
                stand_ins[id(tensor)] = _stand_in(tensor, parameter, buffer)
        for module in modules:
            _replace(module.__dict__, stand_ins)
            _silence(module)
        # Code may hold a parameter in some other way: its gradient must not be added to the user's.
        for tensor, _ in gradients:
            tensor.grad = None
        yield stand_ins
    finally:
        for snapshot in snapshots:
            snapshot.restore()
        for tensor in owned:
            if tensor.is_leaf and tensor.grad is not None:
                tensor.grad = None
        for tensor, gradient in gradients:
            tensor.grad = gradient
        random_state.restore()


class _Entries:
    """A ``__dict__`` and the containers in it."""

    def __init__(self, entries: dict[str, Any]) -> None:
        self.entries = entries
        self.kept = dict(entries)
        containers = [value for value in entries.values() if isinstance(value, (dict, list, set))]
        self.containers = [(value, value.copy()) for value in containers if value]
        self.empty = [value for value in containers if not value]

    def restore(self) -> None:
        entries, kept = self.entries, self.kept
        if len(entries) != len(kept) or any(entries.get(name, self) is not value for name, value in kept.items()):
            entries.clear()
            entries.update(kept)
        for value in self.empty:
            if value:
                value.clear()
        for value, content in self.containers:
            _refill(value, content)


def _refill(value: Any, content: Any) -> None:
    if isinstance(value, list):
        if len(value) != len(content) or any(one is not other for one, other in zip(value, content, strict=True)):
            value[:] = content
        return
    if isinstance(value, dict):
        same = len(value) == len(content) and all(
            one == other and value[one] is content[other] for one, other in zip(value, content, strict=True)
        )
    else:
        same = value == content
    if not same:
        value.clear()
        value.update(content)


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for held in (module._parameters, module._buffers):
        yield from (tensor for tensor in held.values() if tensor is not None)


def _stand_in(tensor: torch.Tensor, parameter: MakeTensor, buffer: MakeTensor) -> torch.Tensor:
    if isinstance(tensor, torch.nn.Parameter):
        made: torch.Tensor = torch.nn.Parameter(parameter(tensor.detach()), requires_grad=tensor.requires_grad)
    else:
        made = buffer(tensor.detach())
        if tensor.requires_grad and tensor.is_leaf:
            made.requires_grad_()
    made.__dict__.update(tensor.__dict__)
    return made


def _replace(entries: dict[str, Any], stand_ins: dict[int, torch.Tensor]) -> None:
    """In the entries and in containers among them: ``_parameters``, ``_buffers``, a list that an RNN keeps of its weights."""
    for name, value in entries.items():
        if isinstance(value, torch.Tensor):
            entries[name] = stand_ins.get(id(value), value)
        elif isinstance(value, dict):
            for key, one in value.items():
                if isinstance(one, torch.Tensor) and id(one) in stand_ins:
                    value[key] = stand_ins[id(one)]
        elif isinstance(value, list):
            for place, one in enumerate(value):
                if isinstance(one, torch.Tensor) and id(one) in stand_ins:
                    value[place] = stand_ins[id(one)]


def _silence(module: torch.nn.Module) -> None:
    for hooks in (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    ):
        for number, hook in list(hooks.items()):
            if _origin(hook).startswith(_INERT):
                del hooks[number]


def _origin(hook: Any) -> str:
    inner = getattr(hook, "func", hook)  # functools.partial
    return str(getattr(inner, "__module__", None) or type(inner).__module__)
