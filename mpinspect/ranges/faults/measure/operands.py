"""The operators of a step that is computed twice: their arguments and results, as they are and as twins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch._C._autograd import _get_sequence_nr

from mpinspect.ranges.faults.measure.twins import FP8, NARROW, OF_NARROW
from mpinspect.ranges.records import Record
from mpinspect.runtime.outputs import leaves
from mpinspect.runtime.storages import storage_key

aten = torch.ops.aten

_NUMBERS = OF_NARROW.having
ADDITIONS = frozenset({aten.add, aten.add_, aten.sub, aten.sub_})
DIFFERENCES = ADDITIONS | {aten.rsub}
SUBTRACTIONS = frozenset({aten.sub, aten.sub_, aten.rsub})
#: Products with a factor and quotients, by which loops decay averages and divide gradients.
SCALING = frozenset({aten.mul, aten.mul_, aten.div, aten.div_})
#: Operators that change no value but by its dtype.
CASTS = frozenset({aten._to_copy, aten.copy_, aten.clone, aten.cat, aten.stack, aten.index, aten.index_select})
_CLAMPS = frozenset({aten.clamp, aten.clamp_, aten.hardtanh, aten.hardtanh_})
#: The places of divisors, and of running variances, among the arguments of operators.
_DIVISORS = {
    **dict.fromkeys(("div", "div_"), 1),
    **dict.fromkeys(("reciprocal", "rsqrt"), 0),
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_no_update"), 4),
    "_native_batch_norm_legit_no_training": 4,
}
#: Beginnings of the names of operators that a backend implements as it likes.
_BACKENDS = ("mkldnn", "mkl", "cudnn", "miopen", "thnn", "fused", "xnnpack", "quantize", "weight_int", "batch_norm")
#: The overloads of single operators, by those of foreach operators.
_SINGLE = {"Scalar": "Scalar", "List": "Tensor", "Tensor": "Tensor", "ScalarList": "Scalar", "": "default"}


#: Operators of three tensors and a value, which only the foreach ones take by its place.
_WITH_VALUE = (aten.addcmul, aten.addcmul_, aten.addcdiv, aten.addcdiv_)


class OperatorCall(NamedTuple):
    """An operator that has run, with its arguments and its result.

    Args:
        frame: its caller's.
        in_optimizer: whether it is a part of an optimizer's step.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    frame: FrameType
    in_optimizer: bool


def rows(args: tuple[Any, ...], result: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the arguments and the result of each call that a foreach operator stands for."""
    for place, made in enumerate(result or args[0]):
        yield tuple(each[place] if isinstance(each, (list, tuple)) else each for each in args), made


class Pending(NamedTuple):
    """An operator that is about to run.

    Args:
        arguments: its arguments, with twins.
        exact: its arguments as they are, in FP32 if it overwrites them; None if none of them has a twin of its own.
        before: the largest relative error that its inputs had inherited; None if they are not overwritten.
        given: its arguments as they are.
        dtype: of its first argument, if that is a tensor.
        is_cast: whether it casts, copies or selects values that were never computed with in 16 bits.
        node: the sequence number of its autograd node; None if it has none.
        old: the 16-bit values that an operator of the forward changes in place, before it does; None for other operators.
        frame: its caller's, once it has run; None before.
        place: among the operators that a foreach operator stands for; None if it is not a foreach operator.
    """

    func: Any
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    exact: tuple[tuple[Any, ...], dict[str, Any]] | None
    before: float | None
    given: tuple[tuple[Any, ...], dict[str, Any]]
    dtype: torch.dtype | None
    is_cast: bool
    node: int | None
    old: torch.Tensor | None
    frame: Any = None
    place: int | None = None


class Judged(NamedTuple):
    """An operator's first result, finite or not, that is compared with exact ones.

    Args:
        pending: the operator.
        value: the result.
        twin: the exact one of all arithmetic so far.
        local: returns the exact result of the operator's arguments as they are.
        describe: makes a record of a class at this line, with figures.
    """

    pending: Pending
    value: torch.Tensor
    twin: torch.Tensor
    local: Callable[[], torch.Tensor]
    describe: Callable[..., Any]

    @property
    def operator(self) -> Any:
        """The operator, without its overload."""
        return self.pending.func.overloadpacket

    @property
    def args(self) -> tuple[Any, ...]:
        """The operator's positional arguments, as they are."""
        return self.pending.given[0]

    def origin(self) -> tuple[str, ...]:
        """Return the operator, its line, its module and the dtype of the result."""
        record = self.describe(Record)
        return *record.names[:2], record.name, record.text


def single_operators(func: Any, args: tuple[Any, ...]) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]] | None:
    """Return the operators that a foreach operator stands for, each with its arguments; None for other operators."""
    name = func.overloadpacket.__name__
    if not name.startswith("_foreach_"):
        return None
    packet: Any = getattr(aten, name.removeprefix("_foreach_"), None)
    single, most = getattr(packet, _SINGLE.get(func._overloadname, ""), None), len(args)
    if func._overloadname.startswith("Scalar") and packet in _WITH_VALUE:
        single, most = packet.default, 3
    if single is None:
        return None
    return [(single, row[:most], dict(zip(("value",), row[most:], strict=False))) for row, _ in rows(args, args[0])]


def is_cast_to_fp8(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator casts to FP8, or copies into a tensor in FP8."""
    operator = func.overloadpacket
    return (operator is aten._to_copy and kwargs.get("dtype") in FP8) or (
        operator is aten.copy_ and args[0].dtype in FP8
    )


def divisor_of(func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    """Return an operator's divisor, or the variance whose square root it divides by; None for other operators."""
    place = _DIVISORS.get(func.overloadpacket.__name__)
    divisor = args[place] if place is not None and len(args) > place else None
    return divisor if has_numbers(divisor) else None


@cache
def saturates(dtype: torch.dtype, device: str) -> bool:
    """Return whether a cast to an FP8 dtype bounds what is beyond its range, as that to E4M3 does in new versions of torch."""
    beyond = torch.tensor(2 * torch.finfo(dtype).max, dtype=torch.float32, device=device)
    return bool(beyond.to(dtype).float().isfinite())


def clamps_for(func: Any, args: tuple[Any, ...]) -> torch.dtype | None:
    """Return the FP8 dtype whose largest number, and its negative, are the bounds of a clamp; None for another operator."""
    if func.overloadpacket not in _CLAMPS or len(args) != 3 or not has_numbers(args[0]):
        return None
    _, low, high = args
    if not (isinstance(low, (int, float)) and isinstance(high, (int, float))):
        return None
    return next((dtype for dtype in FP8 if high == -low == torch.finfo(dtype).max), None)


def is_opaque(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operator belongs to a backend, or takes its workspace, whose layout depends on dtypes."""
    if func.overloadpacket.__name__.lstrip("_").startswith(_BACKENDS):
        return True
    return any(isinstance(each, torch.Tensor) and each.dtype is torch.uint8 for each in args)


def mutated_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operator writes to."""
    given = [(*args[place:], kwargs.get(name))[0] for place, name in _written(func)]
    return [each for each in leaves(given) if isinstance(each, torch.Tensor)]


@cache
def _written(func: Any) -> list[tuple[int, str]]:
    """Return places and names of arguments that an operator writes to; `native_batch_norm` does without saying so."""
    return [
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.name.startswith("running_") or (argument.alias_info is not None and argument.alias_info.is_write)
    ]


def mapped(
    function: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an operator's arguments, and the elements of its lists, each replaced by a function's result for it."""

    def replaced(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [function(each) for each in value]
        return function(value)

    return tuple(map(replaced, args)), {name: replaced(value) for name, value in kwargs.items()}


def wide_copy(value: Any, is_mutated: bool, wide: torch.dtype = torch.float32) -> Any:
    """Return a tensor of numbers in a wide dtype, as a copy if the operator writes to it; a narrower dtype as the wide one."""
    if not has_numbers(value):
        return wide if isinstance(value, torch.dtype) and value in _NUMBERS else value
    return value.to(wide, copy=is_mutated)


def _scaled_product(
    left: torch.Tensor,
    right: torch.Tensor,
    left_scale: torch.Tensor,
    right_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    *more: Any,
    **others: Any,
) -> torch.Tensor:
    """Return a product of FP8 operands' twins, with one scale a tensor or row.

    Raises:
        NotImplementedError: the scales are of blocks, or the result is scaled.
    """
    if scale_result is not None:
        raise NotImplementedError
    for scale, shape in ((left_scale, (len(left), 1)), (right_scale, (1, right.shape[1]))):
        if scale.numel() != 1 and scale.shape != shape:
            raise NotImplementedError
    product = left @ right * left_scale * right_scale
    return product if bias is None else product + bias


def _scaled_product_v2(
    left: torch.Tensor, right: torch.Tensor, left_scales: Any, *middle: Any, bias: Any = None, **more: Any
) -> torch.Tensor:
    """Return the same for the operator that takes several scales for each operand, of which there is one."""
    _, _, right_scales, _, _, *given = middle
    ((left_scale,), (right_scale,)) = left_scales, right_scales
    return _scaled_product(left, right, left_scale, right_scale, (given or [bias])[0])


#: Exact computations of products in FP8, which run in no other dtype.
SCALED_PRODUCTS: dict[Any, Callable[..., torch.Tensor]] = {aten._scaled_mm.default: _scaled_product}
if hasattr(aten, "_scaled_mm_v2"):
    SCALED_PRODUCTS[aten._scaled_mm_v2.default] = _scaled_product_v2


def local_result(pending: Pending, twin: torch.Tensor) -> torch.Tensor:
    """Return an operator's first result in its twin's dtype, from its arguments as they are."""
    if pending.exact is None:
        return twin
    args, kwargs = pending.exact
    if not pending.func._schema.is_mutable:
        args, kwargs = mapped(lambda each: wide_copy(each, False, twin.dtype), args, kwargs)
    result = SCALED_PRODUCTS.get(pending.func, pending.func)(*args, **kwargs)
    return next(each for each in leaves((result,)) if isinstance(each, torch.Tensor))


def summands(pending: Pending, total: torch.Tensor) -> list[torch.Tensor]:
    """Return the two tensors whose sum an operator has made, in FP32; a number as a tensor without dimensions."""
    args, kwargs = pending.exact or pending.arguments
    if pending.old is not None and pending.func.overloadpacket not in ADDITIONS:
        return [pending.old.float(), total - pending.old.float()]
    operands = [torch.as_tensor(each, dtype=torch.float32, device=total.device) for each in args[:2]]
    if pending.old is not None:
        # The first was overwritten by the second computation.
        sign = -1 if pending.func.overloadpacket is aten.sub_ else 1
        operands = [pending.old.float(), sign * kwargs.get("alpha", 1) * operands[1]]
    return operands


def narrow_storages(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[int, str]:
    """Return the names of the tensors in 16 bits or FP8 by storage."""
    return {storage_key(each): name for name, each in tensors if has_numbers(each) and each.dtype in OF_NARROW.narrow}


def numbers_of(result: Any) -> list[torch.Tensor]:
    return [each for each in leaves((result,)) if has_numbers(each)]


def has_numbers(value: Any) -> bool:
    """Return whether a value is a strided floating-point tensor of torch's own class, in 32 bits or fewer."""
    return isinstance(value, torch.Tensor) and value.dtype is not torch.bool and may_have_twin(value)


def may_have_twin(tensor: torch.Tensor, having: tuple[torch.dtype, ...] = _NUMBERS) -> bool:
    """Return whether a tensor is strided, of torch's own class, and one of decisions, or of numbers in one of these dtypes."""
    return tensor.dtype in (*having, torch.bool) and not tensor.is_meta and not is_strange(tensor)


def is_decision(value: Any) -> bool:
    """Return whether a value is a strided tensor of decisions, of torch's own class."""
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool and may_have_twin(value)


def is_integer(value: Any) -> bool:
    """Return whether a value is a tensor of integers."""
    return isinstance(value, torch.Tensor) and not (
        value.is_floating_point() or value.is_complex() or value.dtype is torch.bool
    )


def is_narrow(value: Any, narrow: Sequence[torch.dtype] = NARROW) -> bool:
    """Return whether a value is a tensor in a narrow dtype, or such a dtype."""
    dtype = value.dtype if isinstance(value, torch.Tensor) else value
    # Some objects of torch's own, such as a profiler's record, can't be compared.
    return isinstance(dtype, torch.dtype) and dtype in narrow


def is_strange(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of another class or layout, or has no storage or a lazy sign, as in forward-mode AD."""
    return (
        type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor._is_zerotensor()
        or tensor.is_neg()
        or tensor.is_conj()
    )


def is_in_forward() -> bool:
    return torch._C._current_autograd_node() is None


def node_of(tensors: list[torch.Tensor]) -> int | None:
    """Return the sequence number of the autograd node that an operator on these tensors has got; None if it has none."""
    if torch._C._current_autograd_node() is not None or not torch.is_grad_enabled():
        return None
    return next((_get_sequence_nr() - 1 for each in tensors if each.requires_grad), None)


def takes_gradient(args: tuple[Any, ...]) -> bool:
    """Return whether an operator on these arguments gets an autograd node."""
    return torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in args)
