"""The dispatch mode below autograd that records every matrix product and copy."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from mpinspect.runtime.emulation.products import is_composite
from mpinspect.shapes.operators import matmuls_of, product_name
from mpinspect.shapes.record.attribution import Forward, Forwards, ModuleCalls, Parameters, role_and_parameter
from mpinspect.shapes.record.failures import first_line, mixed_dtypes, result_of_refused
from mpinspect.shapes.record.fused import Attended, operand, running_attention
from mpinspect.shapes.record.meta import MISSING_META, Pointwise, all_on_meta, is_pointwise
from mpinspect.shapes.record.values import Values, targets
from mpinspect.shapes.records import ITEM_SIZES, LayoutCopy, Matmul, Operand

aten = torch.ops.aten

_PLAIN_TENSOR = torch.Tensor.__torch_dispatch__
_COPIES = (aten._to_copy.default, aten.clone.default, aten.copy_.default)
#: How the mode handles an operator: run it, record the product, record the copy, decompose it, or cache its result.
_PLAIN, _PRODUCT, _COPY, _COMPOSITE, _POINTWISE = range(5)
#: The alignment of base pointers, in bytes, that decides between kernels (NVIDIA, "Matrix Multiplication Background").
_LINE = 16
_SIXTEEN_BIT = ("float16", "bfloat16")


class MatmulMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record products and copies while the mode is active.

    Args:
        calls: gives the running module.
        parameters: gives the parameter that owns a storage.
        autocast: whether the model runs under autocast.
        lowers: returns whether autocast applies to the running operator.
        meta: whether the model runs on meta tensors; tensors on other devices are then replaced by meta tensors.
        values: the values attached to meta tensors; None without values.
    """

    def __init__(
        self,
        calls: ModuleCalls,
        parameters: Parameters,
        *,
        autocast: bool,
        lowers: Callable[[], bool],
        meta: bool,
        values: Values | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls, self.parameters, self.autocast = calls, parameters, autocast
        self.lowers, self.meta, self.values = lowers, meta, values
        #: True while the backward runs: a forward within it is a recomputation.
        self.in_backward = False
        self.unreadable: Counter[str] = Counter()
        #: The last operator that failed, and its exception.
        self.failed: tuple[BaseException, str] | None = None
        self._matmuls: dict[tuple[int, Matmul], tuple[Matmul, int]] = {}
        self._copies: dict[tuple[int, str], list[int]] = {}
        self._kinds: dict[Any, int] = {}
        self._pointwise = Pointwise()
        self._forwards = Forwards()
        #: Calls of attention that are recorded as CUDA's fused operator, in the order of their autograd nodes.
        self._attended: list[Attended] = []

    # -- the recording -----------------------------------------------------------------------------------------------

    def matmuls(self) -> tuple[Matmul, ...]:
        """Return the products, in the order of their first call."""
        return tuple(
            replace(
                record,
                module=self.calls.paths[module],
                module_type=self.calls.types[module],
                calls=record.calls * times,
            )
            for (module, _), (record, times) in self._matmuls.items()
        )

    def copies(self) -> tuple[LayoutCopy, ...]:
        """Return the copies, in the order of their first call; ``bytes`` sums the reads and writes of all calls."""
        return tuple(
            LayoutCopy(self.calls.paths[module], kind, moved, times)
            for (module, kind), (moved, times) in self._copies.items()
        )

    # -- the dispatcher's call ---------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and any(issubclass(one, FakeTensor) for one in types):
            # Its own mode, below this one, has to see the operator; tensors without values are no part of the run.
            return func(*args, **(kwargs or {}))
        if types and any(one.__torch_dispatch__ is not _PLAIN_TENSOR for one in types):
            # A subclass (nested, sharded, quantised) calls the mode again with its inner operators.
            return NotImplemented
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind(func)
        if kind == _COMPOSITE:
            with self:
                return func.decompose(*args, **(kwargs or {}))
        refused = ""
        try:
            result = self._run(func, args, kwargs or {}, kind)
        except Exception as error:
            # If the result is known without the operator, the run continues, so that later products are recorded too.
            if kind != _PRODUCT or not self.meta:
                raise
            result = result_of_refused(func, self._records(func, args, None), error)
            if result is None:
                raise
            refused = first_line(error)
        if kind == _PRODUCT:
            self._product(func, args, result, refused)
        elif kind == _COPY:
            self._copy(func, args, result)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: int) -> Any:
        schema = getattr(func, "_schema", None)
        if self.values is None or schema is None:
            if self.meta and schema is not None and schema.is_mutable and _makes_stale(func, args, kwargs):
                raise RuntimeError("a result of meta tensors is written to a tensor that has values")
            return self._run_bare(kind, func, args, kwargs)
        try:
            return self.values.run(func, args, kwargs, partial(self._run_bare, kind))
        except Exception as error:
            self.failed = (error, str(func))
            raise

    def _run_bare(self, kind: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator without values; if it fails on meta tensors, replace its result or the tensors on other devices."""
        try:
            if kind == _POINTWISE and self.meta:
                return self._pointwise.run(func, args, kwargs)
            return func(*args, **kwargs)
        except Exception as error:
            if not self.meta:
                raise
            missing = MISSING_META.get(func)
            if missing is not None and args[0].is_meta:
                return missing(args)
            self.failed = (error, str(func))
            moved = all_on_meta(args, kwargs)
            if moved is None:
                raise
            return func(*moved[0], **moved[1])

    # -- products ----------------------------------------------------------------------------------------------------

    def _records(self, func: Any, args: tuple[Any, ...], output: Operand | None) -> tuple[Matmul, ...]:
        inputs = [_input(value) for value in args]
        scalars = [_scalar(value) for value in args]
        if func is aten.mkldnn_rnn_layer_backward.default:
            x, hx, cx = args[0], args[5], args[6]
            scalars.append([x.requires_grad, hx.requires_grad, cx.requires_grad, True])
        return matmuls_of(func._schema.name, inputs, scalars=scalars, output=output)

    def _product(self, func: Any, args: tuple[Any, ...], result: Any, refused: str) -> None:
        node = self._backward_node()
        attended = self._attention_of(node)
        if attended is not None:
            self._as_on_cuda(attended, node)
            return
        first = result
        if isinstance(result, (tuple, list)) and result:
            first = result[0]
        records = self._records(func, args, operand(first))
        if not records:
            self.unreadable[func._schema.name] += 1
            return
        raises = refused
        if self.meta and not refused:
            raises = mixed_dtypes(records[0])
        if raises:
            records = tuple(replace(record, raises=raises) for record in records)
        if node is None:
            self._of_forward(args, records)
        else:
            self._of_backward(node, args, records)

    def _backward_node(self) -> Any:
        """Return the autograd node whose backward is running; None in a forward, also in one within the backward."""
        node = torch._C._current_autograd_node()
        # The engine's own operators run with grad mode off; a forward within the backward runs with grad mode on.
        if self.in_backward and torch.is_grad_enabled():
            return None
        return node

    def _attention_of(self, node: Any) -> Attended | None:
        """Return the call of attention that the running operator is part of, if CUDA would fuse it; else None."""
        if node is None:
            call = running_attention()
            return call if call.operators else None
        number = node._sequence_nr()
        place = bisect_right(self._attended, number, key=lambda call: call.first) - 1
        if place < 0 or number >= self._attended[place].last:
            return None
        return self._attended[place]

    def _as_on_cuda(self, call: Attended, node: Any) -> None:
        """Record CUDA's fused operator once in place of the products of a call, or of the call's backward."""
        if node is not None:
            task = torch._C._current_graph_task_id()
            if task not in call.backwards:
                call.backwards.add(task)
                self._add(call.module, replace(call.operators[1], autocast=call.autocast))
        elif not call.is_recorded:
            record = call.operators[0]
            call.is_recorded, call.module = True, self._module_of_forward()
            call.autocast = self._is_cast(record)
            self._attended.append(call)
            self._add(call.module, replace(record, autocast=call.autocast, recomputed=self.in_backward))

    def _module_of_forward(self) -> int:
        if self.calls.any_running:
            return self.calls.current
        return self._module_of(torch._C._current_autograd_node())

    def _module_of(self, node: Any) -> int:
        """Return the module whose forward made an autograd node; without a node, the running module."""
        return self.calls.current if node is None else self.calls.of_node(node._sequence_nr())

    def _is_cast(self, record: Matmul) -> bool | None:
        if not self.autocast:
            return None
        return self.lowers() and record.dtype in _SIXTEEN_BIT

    def _of_forward(self, args: tuple[Any, ...], records: tuple[Matmul, ...]) -> None:
        module = self._module_of_forward()
        first, second = _factors(records[0], args)
        applied = self._is_cast(records[0])
        a_name, b_name = self.parameters.name(first, module), self.parameters.name(second, module)
        record = records[0]
        unfused = ""
        if record.kind in ("gemm", "attention"):
            unfused = running_attention().why
        forward = Forward(module, (record.m, record.n, record.k), a_name, b_name, applied, unfused)
        node = None
        if torch.is_grad_enabled() and any(_requires_grad(value) for value in args):
            # Autograd has already made and numbered the operator's node.
            node = _get_sequence_nr() - 1
        self._forwards.add(forward, node)
        if record.kind == "recurrent":
            self._add_recurrent(module, args, records, applied)
            return
        for record in records:
            known = replace(
                _on_math_path(record, forward),
                parameter=b_name or a_name,
                autocast=applied,
                recomputed=self.in_backward,
            )
            self._add(module, self._in_cell(module, known))

    def _of_backward(self, node: Any, args: tuple[Any, ...], records: tuple[Matmul, ...]) -> None:
        forward = self._forwards.of_node(node._sequence_nr())
        module = forward.module if forward else self._module_of(node)
        first, second = _factors(records[0], args)
        weight = self.parameters.name(first, module) or self.parameters.name(second, module)
        if forward is None:
            forward = self._forwards.likeliest(module, records[0], weight)
        applied = self._backward_autocast(forward, records[0])
        if records[0].kind == "recurrent":
            self._add_recurrent(module, args, records, applied)
            return
        for record in records:
            role, parameter = record.role, ""
            if record.kind == "gemm":
                role, parameter = role_and_parameter(forward, record, weight)
            elif record.kind == "convolution":
                parameter = self.parameters.name(args[2], module)
            unfused = _on_math_path(record, forward)
            known = replace(unfused, role=role, parameter=parameter, autocast=applied)
            self._add(module, self._in_cell(module, known))

    def _backward_autocast(self, forward: Forward | None, record: Matmul) -> bool | None:
        if not self.autocast:
            return None
        return record.dtype in _SIXTEEN_BIT and (forward is None or bool(forward.autocast))

    def _in_cell(self, module: int, record: Matmul) -> Matmul:
        """Mark products of recurrent cells, and of recurrent layers that a CPU decomposes, as recurrent."""
        recurrent = isinstance(self.calls.module(module), (torch.nn.RNNBase, torch.nn.RNNCellBase))
        if recurrent and record.kind == "gemm":
            return replace(record, kind="recurrent")
        return record

    def _add_recurrent(
        self, module: int, args: tuple[Any, ...], records: tuple[Matmul, ...], applied: bool | None
    ) -> None:
        """Add the products of a recurrent layer under the weights' full names; frozen weights have no wgrad."""
        for record in records:
            if record.op.startswith("aten::mkldnn"):  # a single layer and direction, identified by its weights
                weight = args[1 if record.parameter.startswith("weight_ih") else 2]
                name = self.parameters.name(weight, module)
            else:
                weight = self.calls.module(module)._parameters.get(record.parameter)
                name = self.parameters.local(module, record.parameter)
            if record.role == "wgrad" and weight is not None and not weight.requires_grad:
                continue
            again = self.in_backward and record.role == "forward"
            self._add(module, replace(record, parameter=name, autocast=applied, recomputed=again))

    def _add(self, module: int, record: Matmul) -> None:
        key = (module, _aligned(record))
        first, times = self._matmuls.get(key, (record, 0))
        self._matmuls[key] = first, times + 1

    # -- copies ------------------------------------------------------------------------------------------------------

    def _copy(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        is_new = func is not aten.copy_.default
        source = args[0 if is_new else 1]
        if not isinstance(source, torch.Tensor) or not isinstance(result, torch.Tensor):
            return
        if is_new:
            self.parameters.derive(source, result)
        kind = _copy_kind(source, result)
        if not kind:
            return
        node = self._backward_node()
        if self._attention_of(node) is not None:
            return
        moved = source.numel() * source.element_size() + result.numel() * result.element_size()
        entry = self._copies.setdefault((self._module_of(node), kind), [0, 0])
        entry[0] += moved
        entry[1] += 1


def _kind(func: Any) -> int:
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator
        return _PLAIN
    if func in _COPIES:
        return _COPY
    if func.namespace == "aten" and is_composite(func):
        return _COMPOSITE
    if product_name(schema.name):
        return _PRODUCT
    if is_pointwise(func):
        return _POINTWISE
    return _PLAIN


def _makes_stale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator would write meta data to a tensor with values, whose old values would then be read later."""
    if all(one.is_meta for one in targets(func, args, kwargs)):
        return False
    return any(isinstance(one, torch.Tensor) and one.is_meta for one in (*args, *kwargs.values()))


def _input(value: Any) -> Any:
    if _is_tensors(value):
        return [operand(one) for one in value]
    return operand(value)


def _is_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], torch.Tensor)


def _scalar(value: Any) -> object:
    if isinstance(value, torch.Tensor) or _is_tensors(value):
        return None
    if isinstance(value, (list, tuple)):
        return list(value)
    return str(value) if isinstance(value, torch.dtype) else value


def _factors(record: Matmul, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return the two tensors that are multiplied; operators named add... have their addend as first argument."""
    start = int("add" in record.op)
    tensors = [value for value in args[start:] if isinstance(value, torch.Tensor)]
    return (*tensors[:2], None, None)[:2]  # type: ignore[return-value]


def _requires_grad(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    return isinstance(value, (list, tuple)) and any(_requires_grad(one) for one in value)


def _aligned(record: Matmul) -> Matmul:
    """Reduce offsets modulo 16 bytes, which is all that kernels distinguish, so that slices in a loop count as equal calls."""
    a, b, out = record.a, record.b, record.out
    if not ((a and a.offset) or (b and b.offset) or (out and out.offset)):
        return record
    return replace(record, a=_within_line(a), b=_within_line(b), out=_within_line(out))


def _within_line(one: Operand | None) -> Operand | None:
    if one is None or not one.offset:
        return one
    return replace(one, offset=one.offset % max(_LINE // ITEM_SIZES.get(one.dtype, 1), 1))


def _on_math_path(record: Matmul, forward: Forward | None) -> Matmul:
    """Return the record as part of torch's unfused attention if the forward is part of it, else unchanged.

    The record's backend is then "math", also on a CPU, which has a fused kernel.
    """
    if forward is None or not forward.math_path:
        return record
    attention = record.attention and replace(record.attention, backend="math")
    return replace(record, math_path=forward.math_path, attention=attention)


def _copy_kind(source: torch.Tensor, result: torch.Tensor) -> str:
    if source.device != result.device or source.numel() < 2 or source.shape != result.shape:
        return ""
    if source.dtype != result.dtype:
        return "dtype"
    steps = [(a, b) for size, a, b in zip(source.shape, source.stride(), result.stride(), strict=True) if size > 1]
    # An expansion that is written out is not the same memory in another order.
    if all(a for a, _ in steps) and any(a != b for a, b in steps):
        return "layout"
    return ""
