"""Policies of autocast's lists, for kernels in the dispatcher: FP32, FP32 unless a dtype is passed, widest dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

#: Runs an operator with casts: (operation, args, kwargs) -> result.
Policy = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
#: (value, dtype) -> the value in that dtype if it is eligible, else unchanged.
Cast = Callable[[Any, torch.dtype], Any]

#: Dtypes that are cast, as in torch: floating point, but not FP64.
ELIGIBLE = (torch.float32, torch.float16, torch.bfloat16)


def float32(cast: Cast) -> Policy:
    """Return a policy that runs the operator in FP32."""

    def policy(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return operation(*cast_all(args, torch.float32, cast), **kwargs)

    return policy


def float32_by_default(is_eligible: Callable[[Any], bool]) -> Policy:
    """Return a policy that makes the result FP32 unless the caller passes a dtype."""

    def policy(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = _dtype_place(operation)
        given = kwargs.get("dtype")
        if place is not None:
            given = next(iter(args[place : place + 1]), None)
        if given is not None or not is_eligible(args[0]):
            return operation(*args, **kwargs)
        if place is None:
            return operation(*args, **{**kwargs, "dtype": torch.float32})
        return operation(*args[:place], torch.float32, *args[place + 1 :], **kwargs)

    return policy


def widest(cast: Cast, is_eligible: Callable[[Any], bool], device: str) -> Policy:
    """Return a policy that runs in the operands' widest dtype; the narrow one is ``device``'s autocast dtype."""

    def policy(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtype = torch.get_autocast_dtype(device)
        if any(value.dtype != dtype for value in args if is_eligible(value)):
            dtype = torch.float32
        return operation(*cast_all(args, dtype, cast), **kwargs)

    return policy


def cast_all(args: tuple[Any, ...], dtype: torch.dtype, cast: Cast) -> Iterator[Any]:
    """Yield the arguments, cast if eligible, including those inside lists and tuples."""
    for value in args:
        if isinstance(value, (list, tuple)):
            yield [cast(one, dtype) for one in value]
        else:
            yield cast(value, dtype)


def operator_named(name: str) -> Any:
    """Return the aten operator with a given name, such as "norm.ScalarOpt_dim"."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


@cache
def _dtype_place(operation: Any) -> int | None:
    """Return the index of ``dtype`` among the positional arguments; None if it is keyword-only or absent."""
    arguments = operation._schema.arguments
    return next((place for place, one in enumerate(arguments) if one.name == "dtype" and not one.kwarg_only), None)
