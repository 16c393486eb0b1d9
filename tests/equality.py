"""Compares trainings' results, which nest tensors."""

from typing import Any

import torch


def equal(one: Any, other: Any) -> bool:
    """Return whether nested dicts and sequences of tensors and numbers have equal keys, dtypes and values."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)
