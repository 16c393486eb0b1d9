"""A model's arguments and outputs: tensors inside whatever nesting they come in."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from mpinspect.runtime.outputs import tensors_in

#: Nesting deeper than this is some object's private life.
_MAX_DEPTH = 8

Change = Callable[[torch.Tensor], torch.Tensor]


def replaced(value: Any, change: Change, depth: int = 0) -> Any:
    """The same nesting of tuples, lists, mappings and dataclasses with every tensor changed; the user's own is left alone."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if depth > _MAX_DEPTH or value is None or isinstance(value, (str, bytes, int, float)):
        return value
    if isinstance(value, PackedSequence):
        # The batch sizes are read on the host wherever the data is.
        order = [None if one is None else change(one) for one in (value.sorted_indices, value.unsorted_indices)]
        made: Any = PackedSequence
        return made(change(value.data), value.batch_sizes, *order)
    if isinstance(value, tuple):
        items = [replaced(item, change, depth + 1) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [replaced(item, change, depth + 1) for item in value]
    if isinstance(value, Mapping):
        return _mapping(value, change, depth)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(value, change, depth)
    return value


def _mapping(value: Mapping[Any, Any], change: Change, depth: int) -> Any:
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


def _dataclass(value: Any, change: Change, depth: int) -> Any:
    made = copy.copy(value)
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            object.__setattr__(made, field.name, replaced(getattr(value, field.name), change, depth + 1))
    return made


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor of the same shape, strides, offset and dtype; a leaf of its own that requires a gradient likewise."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
    if offset and tensor.numel():
        length = offset + 1 + sum((one - 1) * step for one, step in zip(size, stride, strict=True))
        made = torch.empty(length, dtype=tensor.dtype, device="meta").as_strided(size, stride, offset)
    else:
        made = torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")
    return made.requires_grad_() if tensor.requires_grad else made


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy where it is, since a model may change its input in place."""
    made = tensor.detach().clone()
    return made.requires_grad_() if tensor.requires_grad and _differentiable(made) else made


def losses(output: Any) -> list[torch.Tensor]:
    """What a backward starts from: the loss, if the output has one, else every tensor in it that requires a gradient."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return [loss]
    return list(_once(tensor for tensor in tensors_in(output) if tensor.requires_grad))


def _once(tensors: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    seen: set[int] = set()
    for tensor in tensors:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def _differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
