"""Run operators on meta tensors where torch cannot or is slow: missing kernels, mixed devices, pointwise operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from mpinspect.shapes.record.stand_ins import on_meta

aten = torch.ops.aten


class Pointwise:
    """Cache the results of pointwise operators on meta tensors by shapes, strides and dtypes.

    Many of torch's meta kernels are Python code that takes at least 100 us, and a transformer calls the same ones in each
    layer.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of ``func``, from the cache if it is known; exceptions of ``func`` pass through."""
        if kwargs or (key := _key(func, args)) is None:
            return func(*args, **kwargs)
        if (known := self._known.get(key)) is not None:
            size, stride, dtype = known
            return torch.empty_strided(size, stride, dtype=dtype, device="meta")
        result = func(*args)
        if isinstance(result, torch.Tensor) and result.is_meta and result.layout is torch.strided:
            self._known[key] = tuple(result.shape), result.stride(), result.dtype
        return result


def is_pointwise(func: Any) -> bool:
    """Return whether an operator returns one new tensor whose shape, strides and dtype follow from its arguments'."""
    schema = func._schema
    one = len(schema.returns) == 1 and schema.returns[0].alias_info is None
    return one and torch.Tag.pointwise in func.tags and not schema.is_mutable


def _key(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the key of everything that determines the result; None if an argument cannot be keyed. Numbers are keyed with
    their type, since 1 == 1.0 == True."""
    key: list[Any] = [func]
    for value in args:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if not value.is_meta or value.layout is not torch.strided:
                return None
            key += [value.shape, value.stride(), value.dtype]
        elif kind in (int, float, bool, str, type(None)):
            key += [kind, value]
        else:
            return None
    return tuple(key)


def all_on_meta(args: Iterable[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]] | None:
    """Replace tensors on other devices among the arguments by meta tensors; return None if devices are not mixed."""
    args = list(args)
    tensors = list(all_tensors_in([*args, *kwargs.values()]))
    if not any(one.is_meta for one in tensors) or all(one.is_meta for one in tensors):
        return None
    return [_moved(one) for one in args], {name: _moved(one) for name, one in kwargs.items()}


def all_tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among these values and in nested lists and tuples of them, of any dtype."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from all_tensors_in(value)


def _moved(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not value.is_meta:
        return on_meta(value.detach())
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(one) for one in value)
    return value


def _rnn_gradients(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the results of _cudnn_rnn_backward: gradients of the input, hx, cx and the weights."""
    x, weights, hx, cx, mask = args[0], args[1], args[4], args[5], args[21]
    gradients = [
        torch.empty_like(one) if wanted and one is not None else None
        for one, wanted in zip((x, hx, cx), mask[:3], strict=True)
    ]
    return (*gradients, [torch.empty_like(weight) for weight in weights if mask[3]])


def _grouped_product(args: tuple[Any, ...]) -> torch.Tensor:
    """Return the result of _grouped_mm, whose meta kernel accepts only BF16, unlike its CUDA kernel."""
    a, b = args[0], args[1]
    groups = a.shape[0]
    if len(args) > 2 and args[2] is not None:
        groups = args[2].shape[0]
    shapes = {
        (2, 3): (a.shape[0], b.shape[-1]),
        (3, 2): (a.shape[-2], b.shape[-1]),
        (2, 2): (groups, a.shape[0], b.shape[-1]),
        (3, 3): (groups, a.shape[-2], b.shape[-1]),
    }
    return torch.empty(shapes[a.dim(), b.dim()], dtype=a.dtype, device=a.device)


#: The functions that make the results of operators that fail on meta tensors.
MISSING_META: dict[Any, Callable[[tuple[Any, ...]], Any]] = {aten._cudnn_rnn_backward.default: _rnn_gradients}
if hasattr(aten, "_grouped_mm"):  # since torch 2.8
    MISSING_META[aten._grouped_mm.default] = _grouped_product
