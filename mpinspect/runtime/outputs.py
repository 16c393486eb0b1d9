"""Finds the tensors inside the inputs or outputs of a module or an operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

#: Deeper nesting is not searched: it is the internals of some object rather than a module's output.
_MAX_DEPTH = 6


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the floating-point and complex tensors in nested tuples, lists, mappings and dataclasses, in order.

    A Transformers ``ModelOutput`` is a mapping; packed sequences are named tuples.
    """
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif value is None or depth > _MAX_DEPTH:
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth + 1)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), depth + 1)


def tensor_list(value: Any) -> list[torch.Tensor]:
    """Return ``tensors_in(value)`` as a list; faster for the usual case of a tensor or a tuple of tensors."""
    if type(value) is torch.Tensor:
        return [value] if value.is_floating_point() or value.is_complex() else []
    if type(value) is tuple:
        found = []
        for item in value:
            if type(item) is not torch.Tensor:
                break
            if item.is_floating_point() or item.is_complex():
                found.append(item)
        else:
            return found
    return list(tensors_in(value))


def leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Yield an operator's arguments or results, those of its lists too."""
    for each in values:
        if isinstance(each, (list, tuple)):
            yield from leaves(each)
        else:
            yield each
