"""Attach values to meta tensors, for models whose forward reads a value of a tensor.

A meta tensor has a storage without memory. If a tensor's values follow from the inputs (arguments, buffers, ``ones``,
``arange``, ...), this module attaches real memory to the storage, so that all views share the values and see in-place
changes. An operator whose operands all have values is also computed on the CPU; the results of other operators have no
values. Tensors that a model computes from its weights, by a matrix product or at random, have no values and are assumed to
be finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mpinspect.shapes.operators import product_name
from mpinspect.shapes.record.meta import all_tensors_in
from mpinspect.shapes.record.stand_ins import on_meta

aten = torch.ops.aten

#: Size in bytes of the largest tensor with values: 2^21 elements of int64, 2^24 of bool, some 5 ms per pointwise operator.
MOST_BYTES = 1 << 24
#: Attribute of a meta tensor's storage: the values, or the reason for their absence. It lives as long as the storage.
_BESIDE = "_mpinspect_values"
#: Operators that leave memory uninitialised. A correct model never reads that memory, so its values are set to zeros.
_EMPTY = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
#: For operators whose result depends on a shape alone: a function that gets the fill value from the arguments.
_FILLED: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("zeros_like", "new_zeros", *_EMPTY), lambda args: 0),
    **dict.fromkeys(("ones_like", "new_ones"), lambda args: 1),
    "full_like": lambda args: args[1],
    "new_full": lambda args: args[2],
}
#: Operators with results on the CPU, regardless of the operands' device.
_PARTLY_ON_HOST = (aten._pack_padded_sequence.default,)
#: Functions that build a tensor from numbers on the meta device without a dispatched operator.
_FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)
#: Functions that make an index tensor from a list of numbers without a dispatched operator.
_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
#: Functions that copy a tensor to NumPy without a dispatched operator.
_HOST_ONLY = (torch.Tensor.numpy, torch.Tensor.__array__)

#: Functions that test whether numbers are finite, and their result for a finite number.
_FINITE: dict[Any, bool] = {
    **dict.fromkeys((torch.isfinite, torch.Tensor.isfinite), True),
    **dict.fromkeys((torch.isinf, torch.Tensor.isinf, torch.isnan, torch.Tensor.isnan), False),
}

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Lack:
    """Why a tensor has no values.

    Args:
        why: the end of the sentence "that tensor ...", such as "follows from ...".
        give: how the user can supply the values.
    """

    why: str
    give: str


#: The lack of a tensor that the model computes.
COMPUTED = Lack(
    "is computed by the model from its weights, by a matrix product or at random",
    "record a real run, with device='real', mpinspect lint --real or mpinspect run --lint",
)
TOO_LARGE = Lack(f"is larger than {MOST_BYTES >> 20} MiB, the limit for stored values", "give a smaller batch")


def argument_without_values(name: str) -> Lack:
    """Return the reason why an argument of the forward that was passed on the meta device has no values."""
    return Lack(
        f"follows from the argument {name!r}, which was given without values",
        f"give {name!r} as a tensor with values, on the CPU",
    )


def buffer_without_values(name: str) -> Lack:
    """Return the reason why a buffer of a model that was built on the meta device has no values."""
    return Lack(
        f"follows from the buffer {name!r}, which has no values on the meta device",
        "build the model on the CPU (mpinspect lint --real does)",
    )


# -- stored values -------------------------------------------------------------------------------------------------------


def values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a tensor, sharing memory with its views' values; None if the values are not known."""
    if _lack(tensor) is not None:
        return None
    if tensor.is_meta:
        return _shown(_beside(tensor), tensor)
    return tensor


def keep(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Store the values of a new meta tensor, unless the tensor is too large."""
    storage = tensor.untyped_storage()
    if storage.nbytes() > MOST_BYTES:
        forget(tensor, TOO_LARGE)
    elif tensor.numel() * tensor.element_size() == storage.nbytes():
        beside = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
        _shown(beside, tensor).copy_(value)
        setattr(storage, _BESIDE, beside)


def forget(tensor: torch.Tensor, lack: Lack = COMPUTED) -> None:
    """Mark the values of a tensor's storage, and thereby of all its views, as unknown."""
    if _is_plain(tensor):
        setattr(tensor.untyped_storage(), _BESIDE, lack)


def stand_in(tensor: torch.Tensor, lack: Lack) -> torch.Tensor:
    """Return a meta tensor with the values of ``tensor``, or with the reason for their absence."""
    made = on_meta(tensor)
    if made is tensor or not _is_plain(tensor):
        return made
    length = made.untyped_storage().nbytes()
    beside = _beside(tensor) if tensor.is_meta else tensor.untyped_storage()
    if not isinstance(beside, torch.UntypedStorage):
        forget(made, lack)
    elif length > MOST_BYTES:
        forget(made, TOO_LARGE)
    elif beside.nbytes() >= length:
        # Copies the memory between the elements of a slice too, which a view can reach.
        stored = torch.empty(0, dtype=torch.uint8, device=beside.device).set_(beside, 0, (length,), (1,))
        setattr(made.untyped_storage(), _BESIDE, stored.cpu().clone().untyped_storage())
    return made


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether memory, sizes and strides determine a tensor's values."""
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return strided and not tensor.is_conj() and not tensor.is_neg()


def _beside(tensor: torch.Tensor) -> Any:
    return getattr(tensor.untyped_storage(), _BESIDE, None)


def _lack(tensor: torch.Tensor) -> Lack | None:
    """Return why a tensor has no values; None if it has values."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return COMPUTED
    storage = tensor.untyped_storage()
    beside = getattr(storage, _BESIDE, None)
    if beside is None:
        return COMPUTED if tensor.is_meta else None
    if isinstance(beside, Lack):
        return beside
    # A storage that was enlarged has more memory than there are known values.
    if beside.nbytes() < storage.nbytes() or not _is_plain(tensor):
        return COMPUTED
    return None


def _shown(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    made = torch.empty(0, dtype=like.dtype, device="cpu")
    return made.set_(storage, like.storage_offset(), like.size(), like.stride())


# -- operators -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rule:
    """How an operator uses and changes values.

    Args:
        name: the operator's name without the namespace.
        lack: why its results never have values; None if their values follow from its operands.
        writes: whether it changes values in place (``squeeze_``, for one, only changes sizes and strides).
        shows: whether its results are views of its operands.
        asks: whether the host gets values from its results or their shapes.
    """

    name: str
    lack: Lack | None
    writes: bool
    shows: bool
    asks: bool

    @classmethod
    def of(cls, func: Any) -> _Rule:
        schema, tags = func._schema, func.tags
        name = schema.name.partition("::")[2]
        random = torch.Tag.nondeterministic_seeded in tags
        return cls(
            name,
            COMPUTED if random or product_name(schema.name) else None,
            schema.is_mutable and torch.Tag.inplace_view not in tags,
            any(one.alias_info is not None for one in schema.returns) and not schema.is_mutable,
            torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags,
        )


def targets(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operator writes to."""
    found = [
        args[place] if place < len(args) else kwargs.get(one.name)
        for place, one in enumerate(func._schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write
    ]
    return list(all_tensors_in(found))


class Values:
    """Compute the values of each operator's results from the values of its operands."""

    def __init__(self) -> None:
        #: The last error caused by a missing value, and the reason why the value is missing.
        self.lacked: tuple[BaseException, Lack] | None = None
        self._rules: dict[Any, _Rule] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Any:
        """Return the result of ``run(func, args, kwargs)``, with values if they are known.

        If ``run`` fails and all values are known, the result is computed from the values alone.

        Raises:
            Exception: the exception of ``run``, if a value that ``run`` needs is not known.
        """
        rule = self._rules.get(func)
        if rule is None:
            rule = self._rules[func] = _Rule.of(func)
        tensors = list(all_tensors_in((*args, *kwargs.values())))
        if not _on_meta(kwargs) and not any(one.is_meta for one in tensors):
            return self._run_on_cpu(rule, func, args, kwargs, _deciding_lack(tensors))
        written = targets(func, args, kwargs) if rule.writes else []
        lack = rule.lack or _deciding_lack(tensors)
        if lack is None and not all(one.is_meta for one in written):
            return _computed(func, args, kwargs)
        try:
            result = run(func, args, kwargs)
        except Exception as error:
            try:
                if lack is None and func not in _PARTLY_ON_HOST:
                    computed = _computed(func, args, kwargs)
                    return written[0] if written else _placed(computed, kwargs)
                if written:
                    raise
                result = _with_indices(func, args, kwargs, run)
            except Exception:
                if lack is not None:
                    self.lacked = (error, lack)
                raise error from None
        if written:
            _write(func, args, kwargs, written, lack)
        else:
            _keep_results(rule, func, args, kwargs, result, lack)
        return result

    def _run_on_cpu(self, rule: _Rule, func: Any, args: Any, kwargs: Any, lack: Lack | None) -> Any:
        """Run an operator on CPU tensors; their memory is their values, unless unknown values were to be written to it."""
        if lack is not None and rule.asks:
            error = RuntimeError("the tensor holds a result of meta tensors, which have no data")
            self.lacked = (error, lack)
            raise error
        result = func(*args, **kwargs)
        if lack is not None:
            for one in all_tensors_in((result,)):
                forget(one, lack)
        return result


def _in_engine() -> bool:
    """Return whether the autograd engine itself runs, whose values no model reads. Recomputations have grad mode on."""
    return torch._C._current_autograd_node() is not None and not torch.is_grad_enabled()


def _deciding_lack(tensors: Iterable[torch.Tensor]) -> Lack | None:
    """Return the lack that a result inherits: COMPUTED before TOO_LARGE before any other; None if all have values."""
    worst = None
    for one in tensors:
        lack = _lack(one)
        if lack is COMPUTED:
            return lack
        if worst is None or lack is TOO_LARGE:
            worst = lack or worst
    return worst


def _write(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[torch.Tensor], lack: Lack | None
) -> None:
    """Update the values of the tensors that an operator writes to; mark them as unknown if the written values are not known."""
    if lack is None:
        try:
            _computed(func, args, kwargs)
        except Exception:
            lack = COMPUTED
    if lack is not None:
        for one in written:
            forget(one, lack)


def _keep_results(
    rule: _Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, lack: Lack | None
) -> None:
    """Store the values of new tensors, or the reason for their absence."""
    if rule.name in _FILLED:
        lack = None
    if lack is COMPUTED or rule.shows or _in_engine():
        return
    made = list(all_tensors_in((result,)))
    if lack is None and any(one.numel() * one.element_size() > MOST_BYTES for one in made):
        lack = TOO_LARGE
    if lack is None and made:
        try:
            values = list(all_tensors_in((_filled(rule, made[0], args) or _computed(func, args, kwargs),)))
        except Exception:
            return
        for one, value in zip(made, values, strict=False):
            # The result of _unsafe_view is a view and already has its operand's values.
            if one.is_meta and _beside(one) is None and (one.shape, one.dtype) == (value.shape, value.dtype):
                keep(one, value)
    if lack is not None:
        for one in made:
            forget(one, lack)


def _filled(rule: _Rule, like: torch.Tensor, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the result of an operator that depends on a shape alone, in a list; an empty list for any other operator."""
    fill = _FILLED.get(rule.name)
    if fill is None:
        return []
    return [torch.full(like.shape, fill(args), dtype=like.dtype, device="cpu")]


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the values of its operands."""
    named = {name: _valued(one) for name, one in kwargs.items()}
    if _on_meta(kwargs):
        named["device"] = torch.device("cpu")
    return func(*(_valued(one) for one in args), **named)


def _valued(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return values_of(value)
    return _in_each(_valued, value)


def _in_each(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a plain list or tuple with each of its entries changed; other values unchanged."""
    if type(value) not in (list, tuple):
        return value
    return type(value)(map(change, value))


def _with_indices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Any:
    """Run an operator with indices, masks and lengths replaced by their values, if these are known."""
    if func is aten.masked_select.default:
        source, mask = args
        shape = torch.broadcast_shapes(source.shape, mask.shape)  # type: ignore[no-untyped-call]
        func, args = aten.index.Tensor, (source.expand(shape), [_as_index(mask).expand(shape)])
    return run(func, tuple(map(_as_index, args)), kwargs)


def _as_index(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return _in_each(_as_index, value)
    if not value.is_meta or value.is_floating_point() or value.is_complex() or _lack(value) is not None:
        return value
    return values_of(value)


def _placed(result: Any, kwargs: dict[str, Any]) -> Any:
    """Move results from the CPU to the meta device, unless the operator itself moves data to the CPU."""
    device = kwargs.get("device")
    if device is not None and device.type == "cpu":
        return result
    if isinstance(result, torch.Tensor):
        made = on_meta(result.detach())
        keep(made, result)
        return made
    return _in_each(partial(_placed, kwargs=kwargs), result)


def _on_meta(kwargs: dict[str, Any]) -> bool:
    return getattr(kwargs.get("device"), "type", "") == "meta"


# -- tensors made without an operator --------------------------------------------------------------------------------------


class FunctionValues(TorchFunctionMode):
    """Supply values in functions that dispatch no operator: tensors from numbers, indexing, ``numpy()``.

    Tensors without values count as finite: models check ``torch.isfinite(x).all()`` before they clamp in FP16.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FROM_NUMBERS:
            made = _from_numbers(func, args, kwargs)
            if made is not None:
                return made
        elif func in _INDEXING and args[0].is_meta:
            args = (args[0], _with_tensors(args[1]), *args[2:])
        elif func in _FINITE and _is_computed(args):
            known = torch.full((), _FINITE[func], dtype=torch.bool, device="cpu").to("meta")
            return known.expand(func(*args, **kwargs).shape)
        elif func in _HOST_ONLY and args[0].is_meta and _lack(args[0]) is None:
            return func(_shown(_beside(args[0]), args[0]).clone(), *args[1:], **kwargs)
        return func(*args, **kwargs)


def _with_tensors(index: Any) -> Any:
    """Replace lists of numbers in an index by tensors on the CPU, whose values are known."""
    if isinstance(index, tuple):
        return tuple(map(_with_tensors, index))
    if not (isinstance(index, list) and index and _is_numbers(index)):
        return index
    # An index is made of whole numbers or of booleans, so the default dtype does not matter.
    return torch.as_tensor(index, device="cpu")


def _is_numbers(index: list[Any]) -> bool:
    return all(_is_numbers(one) if isinstance(one, list) else isinstance(one, int) for one in index)


def _is_computed(args: tuple[Any, ...]) -> bool:
    """Return whether a function's only argument is a meta tensor without values."""
    return len(args) == 1 and isinstance(args[0], torch.Tensor) and args[0].is_meta and _lack(args[0]) is not None


def _from_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return a meta tensor made from numbers, by way of the CPU; None for other data or if this fails."""
    data, device = args, torch.get_default_device()
    if func is torch.Tensor.new_tensor:
        data, device = args[1:], args[0].device
    if kwargs.get("device") is not None:
        device = kwargs["device"]
    if len(data) != 1 or isinstance(data[0], torch.Tensor) or torch.device(device).type != "meta":
        return None
    try:
        made = func(*args, **{**kwargs, "device": "cpu"})
    except Exception:
        return None
    return made.detach().to(device).requires_grad_(made.requires_grad)  # type: ignore[no-any-return]
