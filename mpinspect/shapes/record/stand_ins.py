"""Run a model on stand-ins (meta tensors, or leaves on the same memory) for its tensors and arguments, then restore it.

Everything that a forward may change in a module is an entry of the module's ``__dict__``: parameters, buffers, hooks,
train/eval flag, cached state. Shallow copies of the ``__dict__`` and of the containers in it are restored afterwards.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence

from mpinspect.runtime.outputs import tensors_in
from mpinspect.runtime.untouched import RandomState

#: Packages whose hooks are removed because stand-ins would mislead them: mpinspect's own and the sharding hooks.
_INERT = ("mpinspect.", "torch.distributed.")

MakeTensor = Callable[[torch.Tensor], torch.Tensor]


class LazyModelError(ValueError):
    """A parameter has no shape yet."""


@contextmanager
def standing_in(model: torch.nn.Module, parameter: MakeTensor, buffer: MakeTensor) -> Iterator[dict[int, torch.Tensor]]:
    """Replace parameters and buffers within the block (tied ones once), and restore everything afterwards.

    Args:
        model: any module.
        parameter: makes the stand-in's tensor from a detached parameter.
        buffer: makes the stand-in's tensor from a detached buffer.

    Yields:
        The stand-ins, by the id of the tensor that each replaces.

    Raises:
        LazyModelError: the model has a lazy module that has not run yet.
    """
    modules = list(model.modules())
    owned = [tensor for module in modules for tensor in _tensors(module)]
    if any(map(is_lazy, owned)):
        raise LazyModelError(
            "a parameter has no shape yet (a lazy module): run one batch through the model first, then record it"
        )
    snapshots = [_Entries(module.__dict__) for module in modules]
    gradients = [(tensor, tensor.grad) for tensor in owned if tensor.is_leaf and tensor.grad is not None]
    random_state = RandomState.now()
    try:
        tied_once = {id(tensor): tensor for tensor in owned}
        stand_ins = {key: _stand_in(tensor, parameter, buffer) for key, tensor in tied_once.items()}
        for module in modules:
            _replace(module.__dict__, stand_ins)
            _silence(module)
        # The model may refer to a parameter outside its modules: its gradient must not be added to the user's.
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
    """A copy of a ``__dict__`` and of the containers in it."""

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
    """Replace tensors in a ``__dict__`` and in its containers: ``_parameters``, ``_buffers``, the list of an RNN's weights."""
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
    for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks):
        for number, hook in list(hooks.items()):
            if _origin(hook).startswith(_INERT):
                del hooks[number]


def _origin(hook: Any) -> str:
    inner = getattr(hook, "func", hook)  # functools.partial
    return str(getattr(inner, "__module__", None) or type(inner).__module__)


#: Values nested deeper than this are assumed to belong to an object's internals.
_MAX_DEPTH = 8


def replaced(value: Any, change: MakeTensor, depth: int = 0) -> Any:
    """Return a copy of nested tuples, lists, mappings and dataclasses with ``change`` applied to every tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if depth > _MAX_DEPTH or value is None or isinstance(value, (str, bytes, int, float)):
        return value
    if isinstance(value, PackedSequence):
        # The host reads the batch sizes, whatever device the data is on.
        order = [None if one is None else change(one) for one in (value.sorted_indices, value.unsorted_indices)]
        made: Any = PackedSequence
        return made(change(value.data), value.batch_sizes, *order)
    if isinstance(value, tuple):
        items = [replaced(item, change, depth + 1) for item in value]
        return getattr(value, "_make", tuple)(items)
    if isinstance(value, list):
        return [replaced(item, change, depth + 1) for item in value]
    if isinstance(value, Mapping):
        return _mapping(value, change, depth)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(value, change, depth)
    return value


def _mapping(value: Mapping[Any, Any], change: MakeTensor, depth: int) -> Any:
    items = {key: replaced(item, change, depth + 1) for key, item in value.items()}
    if type(value) is dict:
        return items
    try:
        made = copy.copy(value)
        if hasattr(made, "data") and isinstance(made.data, dict):  # UserDict, Transformers' BatchEncoding
            made.data = dict(made.data)
        made.update(items)  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        return items
    return made


def _dataclass(value: Any, change: MakeTensor, depth: int) -> Any:
    made = copy.copy(value)
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            object.__setattr__(made, field.name, replaced(getattr(value, field.name), change, depth + 1))
    return made


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor of the same shape, strides, offset, dtype and requires_grad; as a leaf."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
    if offset and tensor.numel():
        length = offset + 1 + sum((one - 1) * step for one, step in zip(size, stride, strict=True))
        made = torch.empty(length, dtype=tensor.dtype, device="meta").as_strided(size, stride, offset)
    else:
        made = torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad)


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of an argument on its device, since a model may change its input in place."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def losses(output: Any) -> list[torch.Tensor]:
    """Return the tensors that a backward starts from: the output's loss, or else all its tensors that require a gradient."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return [loss]
    return list({id(tensor): tensor for tensor in tensors_in(output) if tensor.requires_grad}.values())
