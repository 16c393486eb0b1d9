"""A second computation of a step: every operator runs once more, on FP32 twins of the run's 16-bit values.

The run's own tensors are neither read late nor written. A twin belongs to a storage, so that views and writes in place need no
bookkeeping; a tensor without one equals its twin. Each operator is judged twice: its *local* error is the error of its own
arithmetic, on the inputs that it had, and its *inherited* error is the error of all arithmetic so far. The first distinguishes an
operator that loses values from one that passes losses on; the second shows whether more bits would have helped at all.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch._C._autograd import _get_sequence_nr
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_map

from mpinspect.ranges.faults.measure.rounded_numbers import RoundedNumbers
from mpinspect.ranges.records import (
    AbsorbedOperand,
    AmplifiedError,
    BornInfinite,
    BrokenAlike,
    ChangedIntegers,
    FrozenBuffer,
    LostSum,
    Positions,
    Record,
)
from mpinspect.reporting.words import number_of
from mpinspect.runtime.device import free_memory
from mpinspect.runtime.user_line import innermost_line

aten = torch.ops.aten

_NARROW = (torch.float16, torch.bfloat16)
#: Sums of many terms, whose rounding errors add up.
_SUMS = frozenset(
    {
        *(aten.sum, aten.mean, aten.cumsum, aten.index_add, aten.index_add_, aten.index_put, aten.index_put_),
        *(aten._index_put_impl_, aten.scatter_add, aten.scatter_add_, aten.scatter_reduce, aten.var, aten.std),
        *(aten.linalg_vector_norm, aten.norm, aten.logsumexp, aten.var_mean, aten.embedding_dense_backward),
    }
)
_ADDITIONS = frozenset({aten.add, aten.add_, aten.sub, aten.sub_})
#: Operators that may make a large relative error of a small one.
_AMPLIFYING = _ADDITIONS | {
    aten.sin,
    aten.cos,
    aten.tan,
    aten.exp,
    aten.log,
    aten.pow,
    aten.remainder,
    aten.fmod,
    aten.floor,
}
#: Operators that change no value but by its dtype.
_CASTS = frozenset({aten._to_copy, aten.copy_, aten.clone, aten.cat, aten.stack, aten.index, aten.index_select})
#: Operators that decide by comparing: in the exact computation a clamp, a `where` and their gradients follow its own decisions.
_DECIDING = frozenset(
    {
        *(aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge),
        *(aten.logical_and, aten.logical_or, aten.logical_xor, aten.logical_not),
        *(aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor, aten.bitwise_not),
        *(aten.logical_and_, aten.logical_or_, aten.bitwise_and_, aten.bitwise_or_),
    }
)
#: Operators whose results are not written yet, or have no exact result.
_WITHOUT_RESULT = ("empty", "new_empty", "set_", "resize_")
#: Beginnings of the names of operators that a backend implements as it likes.
_BACKENDS = ("mkldnn", "mkl", "cudnn", "miopen", "thnn", "fused", "xnnpack", "quantize", "weight_int", "batch_norm")
#: Bytes of twins, and seconds, after which the rest of the step is left out.
_MOST_BYTES, _MOST_SECONDS = 2 << 30, 20.0
#: Above this many bytes of twins, the twins of freed storages are dropped.
_FIRST_SWEEP = 32 << 20
#: Bytes of errors that are held until the gradient at their operator's result is known.
_MOST_ERRORS = 64 << 20
#: The most operators that are named as left out.
_MOST_NAMED = 5
#: The least local error of a sum, relative to the norm of its exact result. Rounding a sum once makes at most 2^-9 in BF16.
_LOST = 0.03
#: The least part of the smaller operand that an addition loses, of its norm.
_ABSORBED = 0.5
#: The least number of elements of an addition that is judged: a few may be absorbed by chance.
_FEWEST = 64
#: The inherited error after a difference, and before it.
_CANCELLED, _UNCANCELLED = 0.3, 0.05


class Twin(NamedTuple):
    """The FP32 values, or the decisions, of a whole storage, and a reference that ends with the storage.

    Args:
        is_cast: whether the values were only cast, copied or selected, never computed with.
    """

    storage: StorageWeakRef
    dtype: torch.dtype
    values: torch.Tensor
    is_cast: bool

    def is_gone(self) -> bool:
        """Return whether the storage has been freed."""
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]


class Pending(NamedTuple):
    """An operator that is about to run.

    Args:
        arguments: its arguments, with twins.
        exact: its arguments as they are, in FP32 if it overwrites them; None if none of them has a twin of its own.
        before: the largest relative error that its inputs had inherited.
        given: its arguments as they are.
        dtype: of its first argument, if that is a tensor.
        is_cast: whether it casts, copies or selects values that were never computed with in 16 bits.
        node: the sequence number of its autograd node; None if it has none.
    """

    func: Any
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    exact: tuple[tuple[Any, ...], dict[str, Any]] | None
    before: float
    given: tuple[tuple[Any, ...], dict[str, Any]]
    dtype: torch.dtype | None
    is_cast: bool
    node: int | None


class Place(NamedTuple):
    """Where an operator ran: its module, the line of the user's code, whether in the backward."""

    module: str
    line: str
    is_backward: bool


class SecondComputation:
    """Recomputes a running step with more bits, operator by operator.

    Args:
        module: returns the dotted path of the module that is running.
        parameters: the model's parameters by name, whose gradients are compared in the end.
        buffers: the model's buffers by name, whose values persist after a step.
    """

    def __init__(
        self,
        module: Callable[[], str],
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        buffers: Iterable[tuple[str, torch.Tensor]] = (),
    ) -> None:
        self._module = module
        #: The names of 16-bit buffers by storage.
        self._buffers = {
            buffer.untyped_storage()._cdata: name
            for name, buffer in buffers
            if _is_plain(buffer) and buffer.dtype in _NARROW
        }
        #: Additions that left buffers as they are, by line.
        self._frozen: defaultdict[str, list[FrozenBuffer]] = defaultdict(list)
        self._numbers = RoundedNumbers()
        #: Functions that read whole numbers, by operator.
        self._readers = self._numbers.watchers()
        self._parameters = list(parameters)
        self._twins: dict[int, Twin] = {}
        #: The modules of forward operators, by the sequence number of their autograd node.
        self._modules: dict[int, str] = {}
        self._bytes = 0
        #: The bytes of twins above which the twins of freed storages are dropped.
        self._sweep_at = min(_FIRST_SWEEP, _MOST_BYTES)
        #: Why the rest of the step was left out; "" if it was not.
        self._ended_by = ""
        self._began = time.perf_counter()
        #: Operators whose twin could not run, by name.
        self.skipped: Counter[str] = Counter()
        self._is_over = False
        self._found: defaultdict[type[Record], list[Record]] = defaultdict(list)
        #: The errors of operators whose backward has not run, by the sequence number of their autograd node.
        self._errors: dict[int, torch.Tensor] = {}
        #: The bytes of errors that were kept.
        self._errors_bytes = 0
        #: The norms of (error times gradient of the loss) by sequence number, and the sequence number by the record's id.
        self._effects: dict[int, float] = {}
        self._nodes: dict[int, int] = {}
        #: Additions of few elements, by line: each alone may be absorbed by chance.
        self._repeated: defaultdict[str, list[AbsorbedOperand]] = defaultdict(list)

    # -- the operators ----------------------------------------------------------------------------------------------

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pending | None:
        """Prepare an operator's second run; None if more bits would not change its result, or if it can't be prepared."""
        if not isinstance(func, torch._ops.OpOverload):
            return None
        try:
            if self._errors:
                self._weigh(args)
            return self._prepare(func, args, kwargs)
        except Exception:
            self.skipped[func.overloadpacket.__name__] += 1
            return None

    def _prepare(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pending | None:
        schema = func._schema
        writes = schema.is_mutable
        if self._is_over or (not writes and any(each.alias_info is not None for each in schema.returns)):
            return None
        mutated = _mutated(schema, args, kwargs)
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
        is_copied = all(_is_plain(each) or _is_decision(each) for each in mutated) and not any(
            map(_is_strange, tensors)
        )
        if func.namespace != "aten" or _is_opaque(func, args) or not is_copied:
            # A collective that ran twice would wait for other ranks, the user's own operators may have effects, and a
            # tensor that is written but has no twin would be written twice.
            self._forget(mutated)
            return None
        tensors = [each for each in tensors if _is_plain(each) or _is_decision(each)]
        has_twin = any(self.twin(each) is not None for each in tensors)
        if not has_twin and not any(each.dtype in _NARROW for each in tensors) and kwargs.get("dtype") not in _NARROW:
            return None
        if self._is_used_up():
            self._end()
            return None
        if not torch._C._current_autograd_node():
            self._modules[_get_sequence_nr() - 1] = self._module()
        if not _fits(tensors):
            self.skipped["too large"] += 1
            self._forget(mutated)
            return None
        written = {id(each) for each in mutated}
        twins = tree_map(lambda each: self._twin_or_wide(each, id(each) in written), (args, kwargs))
        exact = None
        if has_twin and writes:
            exact = tree_map(lambda each: _wide(each, id(each) in written), (args, kwargs))
        elif has_twin:
            exact = (args, kwargs)
        before = 0.0
        if func.overloadpacket in _AMPLIFYING:
            before = max((self._error(each) for each in tensors if _is_plain(each)), default=0.0)
        dtype = getattr(args[0], "dtype", None) if args else None
        is_cast = func.overloadpacket in _CASTS and all(map(self._is_cast, tensors))
        return Pending(func, twins, exact, before, (args, kwargs), dtype, is_cast, _node_of(tensors))

    def after(self, pending: Pending, result: Any, frame: FrameType) -> None:
        """Run the operator again on the twins of its arguments, and compare the results."""
        func = pending.func
        name = func.overloadpacket.__name__
        results = _plain(result)
        self._read_numbers(pending, result)
        if torch.Tag.nondeterministic_seeded in func.tags or name.startswith(_WITHOUT_RESULT):
            self._forget(results)
            return
        try:
            if func.overloadpacket is aten._to_copy and not results:
                self._compare_integers(pending, result, frame)
                return
            if _is_decision(result):
                self._keep_decision(pending, result)
                return
            twins = _plain(func(*pending.arguments[0], **pending.arguments[1]))
            for place, (value, twin) in enumerate(zip(results, twins, strict=False)):
                if value.numel() and value.shape == twin.shape and twin.dtype == torch.float32:
                    wide = value.float()
                    if not place:
                        # Further results are for the backward alone, and may be written in part.
                        self._compare(pending, value, wide, twin, frame)
                    self._keep(value, wide, twin, pending.is_cast)
        except Exception:
            self.skipped[name] += 1
            self._forget(results)

    def _read_numbers(self, pending: Pending, result: Any) -> None:
        """Search an operator of the forward for whole numbers that became equal; if that fails, search no more."""
        read = self._readers.get(pending.func.overloadpacket)
        if read is None or torch._C._current_autograd_node() is not None:
            return
        try:
            read(*pending.given, result, self._module)
        except Exception as error:
            self._readers = {}
            self.skipped[f"the search for rounded numbers ({error!r})"] += 1

    def _is_used_up(self) -> bool:
        """Return whether the time or the memory for twins is used up; drop the twins of storages that are gone."""
        if time.perf_counter() - self._began > _MOST_SECONDS:
            self._ended_by = f"after {_MOST_SECONDS:.0f} s"
        elif self._bytes > self._sweep_at:
            self._twins = {key: twin for key, twin in self._twins.items() if not twin.is_gone()}
            self._bytes = sum(twin.values.nbytes for twin in self._twins.values())
            self._sweep_at = min(max(self._bytes + self._bytes // 4, _FIRST_SWEEP), _MOST_BYTES)
            if self._bytes > _MOST_BYTES / 2:
                self._ended_by = f"once its copies took {_MOST_BYTES >> 30} GiB"
        return bool(self._ended_by)

    def left_out(self) -> str:
        """Return a sentence on the operators that were not computed a second time; "" without any."""
        parts = [f"all of it {self._ended_by}"] if self._ended_by else []
        parts += [f"{number_of(times, 'call')} of {name}" for name, times in self.skipped.most_common(_MOST_NAMED)]
        return f"Left out of the second computation of a step: {', '.join(parts)}" if parts else ""

    # -- comparing --------------------------------------------------------------------------------------------------

    def _compare(
        self, pending: Pending, value: torch.Tensor, wide: torch.Tensor, twin: torch.Tensor, frame: FrameType
    ) -> None:
        # A finite sum takes one reading, and has finite terms only.
        is_finite = bool(wide.sum().isfinite()) or bool(wide.isfinite().all())
        operator = pending.func.overloadpacket
        if is_finite and operator not in _SUMS and operator not in _AMPLIFYING:
            return
        local = _local(pending, twin)
        if not is_finite:
            self._compare_broken(pending, value, wide, twin, local, frame)
            return
        size = float(local.norm())
        if operator in _SUMS and value.dtype in _NARROW and size:
            error = float((wide - local).norm()) / size
            if error >= _LOST:
                worst = int((wide - local).abs().argmax())
                given, exact = float(wide.flatten()[worst]), float(local.flatten()[worst])
                figures = {"error": error, "value": given, "exact": exact}
                self._add(LostSum, pending, value, frame, wide - local, **figures)
        elif operator in _AMPLIFYING:
            if operator in _ADDITIONS:
                self._compare_addition(pending, value, wide, local, frame)
            if value.numel() >= _FEWEST:
                self._compare_errors(pending, value, wide, twin, frame)

    def _compare_broken(
        self,
        pending: Pending,
        value: torch.Tensor,
        wide: torch.Tensor,
        twin: torch.Tensor,
        local: torch.Tensor,
        frame: FrameType,
    ) -> None:
        """Record infinities and NaNs: which are of the precision, and which the exact computation has too."""
        broken = ~wide.isfinite()
        born, of_precision = broken & local.isfinite(), broken & twin.isfinite()
        if bool(born.any()) and value.dtype in _NARROW:
            largest = float(local[born].abs().max())
            figures = {"elements": float(born.sum()), "of": float(value.numel()), "largest": largest}
            self._add(BornInfinite, pending, value, frame, None, **figures)
        elif bool(of_precision.any()) and not self._found.get(BornInfinite):
            figures = {"elements": float(of_precision.sum()), "of": float(value.numel()), "largest": 0.0}
            self._add(BornInfinite, pending, value, frame, None, **figures)
        elif not self._found.get(BornInfinite):
            # Masks and logarithms of zero give -inf, which softmax and sums of exponentials take.
            broken &= wide != -torch.inf
            if bool(broken.any()):
                figures = {"elements": float(broken.sum()), "of": float(value.numel())}
                self._add(BrokenAlike, pending, value, frame, None, **figures)

    def _compare_addition(
        self,
        pending: Pending,
        value: torch.Tensor,
        wide: torch.Tensor,
        local: torch.Tensor,
        frame: FrameType,
    ) -> None:
        """Record an operand that the other one absorbs; of small tensors, the additions at one line together."""
        if torch._C._current_autograd_node() is not None or value.dtype not in _NARROW:
            return
        is_by_number = not all(isinstance(each, torch.Tensor) for each in pending.arguments[0][:2])
        if is_by_number and not pending.func._schema.is_mutable:
            # A small number, as against a division by zero, may be lost; a running sum in place may not.
            return
        operands = _operands(pending, local)
        if pending.func._schema.is_mutable and (buffer := self._buffers.get(value.untyped_storage()._cdata)):
            self._compare_buffer(pending, value, wide, operands, frame, buffer)
            return
        if len(operands) != 2 or any(each.shape != value.shape for each in operands):
            return
        least = min(float(each.norm()) for each in operands)
        error = float((wide - local).norm())
        unchanged = float((local != 0).logical_and(_equals_one(wide, operands)).float().mean())
        figures = (
            {"error": error / least, "unchanged": unchanged, "size": least / value.numel() ** 0.5} if least else {}
        )
        if figures and value.numel() < _FEWEST:
            self._repeated[innermost_line(frame)].append(
                self._record(AbsorbedOperand, pending, value, frame, **figures)
            )
        elif figures and error >= _ABSORBED * least:
            self._add(AbsorbedOperand, pending, value, frame, wide - local, **figures)

    def _compare_buffer(
        self,
        pending: Pending,
        value: torch.Tensor,
        wide: torch.Tensor,
        operands: list[torch.Tensor],
        frame: FrameType,
        buffer: str,
    ) -> None:
        """Record a buffer that additions leave mostly unchanged. Its values persist, so the lost terms are never recovered."""
        before, added = operands
        is_added = (added != 0).expand_as(before)
        unchanged = float((wide == before)[is_added].float().mean()) if bool(is_added.any()) else 0.0
        if unchanged >= _ABSORBED:
            record = self._record(FrozenBuffer, pending, value, frame, unchanged=unchanged)
            self._frozen[innermost_line(frame)].append(replace(record, names=(*record.names, buffer)))

    def _compare_integers(self, pending: Pending, value: Any, frame: FrameType) -> None:
        """Record whole numbers that were rounded before they are made integers."""
        exact = pending.arguments[0][0]
        is_integer = not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool)
        if not pending.is_cast or pending.exact is None or not is_integer or not bool((exact == exact.round()).all()):
            return
        differ = (value.float() - exact).abs()
        if bool(differ.any()):
            worst = int(differ.argmax())
            given, wanted = float(value.flatten()[worst]), float(exact.flatten()[worst])
            changed, of = float(differ.count_nonzero()), float(value.numel())
            self._add(ChangedIntegers, pending, value, frame, None, changed=changed, of=of, given=given, exact=wanted)

    def _compare_errors(
        self, pending: Pending, value: torch.Tensor, wide: torch.Tensor, twin: torch.Tensor, frame: FrameType
    ) -> None:
        """Record a result that is mostly the error of its inputs."""
        size = float(twin.norm())
        inherited = float((wide - twin).norm()) / size if size else 0.0
        if inherited >= _CANCELLED and pending.before <= _UNCANCELLED:
            figures = {"before": pending.before, "after": inherited}
            self._add(AmplifiedError, pending, value, frame, wide - twin, **figures)

    def _add(
        self,
        kind: type[Any],
        pending: Pending,
        result: torch.Tensor,
        frame: FrameType,
        off: torch.Tensor | None,
        **figures: float,
    ) -> None:
        record = self._record(kind, pending, result, frame, **figures)
        self._found[kind].append(record)
        if off is not None and pending.node is not None and self._errors_bytes + off.nbytes <= _MOST_ERRORS:
            self._errors[pending.node] = off
            self._errors_bytes += off.nbytes
            self._nodes[id(record)] = pending.node

    def _weigh(self, args: tuple[Any, ...]) -> None:
        """Multiply the error of an operator, whose backward is running, by the gradient of the loss at its result."""
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        error = self._errors.get(number)
        if error is None:
            return
        gradient = next((each for each in _plain(args) if each.shape == error.shape), None)
        if gradient is not None:
            del self._errors[number]
            self._effects[number] = float((gradient.float() * error).norm())

    def _effect(self, record: Record) -> float | None:
        """Return how much a record's error changes the loss, to first order; None if that is unknown."""
        return self._effects.get(self._nodes.get(id(record), -1))

    def _record(
        self, kind: type[Any], pending: Pending, result: torch.Tensor, frame: FrameType, **figures: float
    ) -> Any:
        node = torch._C._current_autograd_node()
        module = self._module() if node is None else self._modules.get(node._sequence_nr(), "")
        where = Place(module, innermost_line(frame), node is not None)
        names = (pending.func.overloadpacket.__name__, where.line, "backward" if where.is_backward else "forward")
        # The dtype in which numbers were rounded before they became integers.
        rounded = result.dtype if result.is_floating_point() else pending.dtype
        dtype = str(rounded).removeprefix("torch.")
        return kind(name=where.module, names=names, text=dtype, **figures)

    # -- the end ----------------------------------------------------------------------------------------------------

    def records(self) -> list[Record]:
        """Return the first operator that broke, the operators that lose most, and the error of the gradients."""
        worst, whose = self._gradients_error()
        self._found[AbsorbedOperand] += _running_sums(self._repeated.values())
        if self._numbers.found is not None:
            self._found[Positions].append(self._numbers.found)
        # A buffer that several lines, or several modules at one line, add to is frozen at each.
        found: list[Record] = [replace(additions[-1], times=len(additions)) for additions in self._frozen.values()]
        firsts: tuple[type[Record], ...] = (BornInfinite, BrokenAlike, ChangedIntegers, Positions)
        for kind in firsts:
            found += self._found.get(kind, [])[:1]
        worsts: tuple[tuple[type[Record], str], ...] = (
            (LostSum, "error"),
            (AbsorbedOperand, "error"),
            (AmplifiedError, "after"),
        )
        for kind, size in worsts:
            records = self._found.get(kind, [])
            # A large error may be harmless, and a smaller one do all the harm.
            weighed = sorted((each for each in records if self._effect(each) is not None), key=self._effect)  # type: ignore[arg-type]
            others = sorted(
                (each for each in records if self._effect(each) is None), key=lambda each: getattr(each, size)
            )
            found += [_with_gradients(each, worst, whose) for each in (*weighed[-1:], *others[-1:])]
        self._end()
        return found

    def _gradients_error(self) -> tuple[float | None, str]:
        """Return the largest relative error of a weight's gradient, and the weight; None if none can be compared."""
        errors = {
            name: self._error(parameter.grad)
            for name, parameter in self._parameters
            if parameter.grad is not None and _is_plain(parameter.grad) and self.twin(parameter.grad) is not None
        }
        if not errors or not all(map(math.isfinite, errors.values())):
            # A loss scale that is still too high makes infinities, which hide all rounding errors.
            return None, ""
        whose = max(errors, key=lambda name: errors[name])
        return errors[whose], whose

    def _end(self) -> None:
        self._is_over = True
        self._errors.clear()
        self._twins.clear()
        self._modules.clear()

    # -- twins ------------------------------------------------------------------------------------------------------

    def twin(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the twin of a tensor; None if it has none of its own."""
        key = tensor.untyped_storage()._cdata
        twin = self._twins.get(key)
        if twin is None:
            return None
        if twin.is_gone() or twin.dtype != tensor.dtype:
            del self._twins[key]
            return None
        return twin.values.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _twin_or_wide(self, value: Any, is_mutated: bool) -> Any:
        is_decision = _is_decision(value)
        if not is_decision and not _is_plain(value):
            return _wide(value, is_mutated)
        twin = self.twin(value)
        if twin is None and is_mutated:
            self._remember(value, value, is_cast=False)
            twin = self.twin(value)
        if twin is not None:
            return twin
        return value if is_decision else value.float()

    def _error(self, tensor: torch.Tensor) -> float:
        """Return the inherited error of a tensor, relative to its norm."""
        twin = self.twin(tensor)
        if twin is None:
            return 0.0
        size = float(twin.norm())
        return float((tensor.float() - twin).norm()) / size if size else 0.0

    def _is_cast(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's values were never computed with in 16 bits; one without a twin is exact."""
        return self.twin(tensor) is None or self._twins[tensor.untyped_storage()._cdata].is_cast

    def _keep(self, value: torch.Tensor, wide: torch.Tensor, twin: torch.Tensor, is_cast: bool) -> None:
        """Remember a result's twin. Other elements of its storage retain their values."""
        known = self.twin(value)
        if known is not None:
            key = value.untyped_storage()._cdata
            self._twins[key] = self._twins[key]._replace(is_cast=self._twins[key].is_cast and is_cast)
            if known.data_ptr() != twin.data_ptr():
                known.copy_(twin)
            return
        if not torch.equal(wide, twin):
            self._remember(value, twin, is_cast)

    def _keep_decision(self, pending: Pending, value: torch.Tensor) -> None:
        args, kwargs = pending.arguments
        decided = pending.func(*args, **kwargs) if pending.func.overloadpacket in _DECIDING else value
        if torch.equal(value, decided):
            self._forget([value])
        else:
            self._remember(value, decided, is_cast=False)

    def _remember(self, value: torch.Tensor, twin: torch.Tensor, is_cast: bool) -> None:
        storage = value.untyped_storage()
        flat = torch.empty(0, dtype=value.dtype, device=value.device).set_(
            storage, 0, (storage.nbytes() // value.element_size(),), (1,)
        )
        values = flat.float() if value.dtype in _NARROW else flat.clone()
        values.as_strided(value.size(), value.stride(), value.storage_offset()).copy_(twin)
        self._bytes += values.nbytes
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._twins[storage._cdata] = Twin(reference, value.dtype, values, is_cast)

    def _forget(self, results: list[torch.Tensor]) -> None:
        """Take results as exact."""
        for each in results:
            if _is_plain(each) or _is_decision(each):
                self._twins.pop(each.untyped_storage()._cdata, None)


def _local(pending: Pending, twin: torch.Tensor) -> torch.Tensor:
    """Return an operator's first result in FP32, from its arguments as they are."""
    if pending.exact is None:
        return twin
    args, kwargs = pending.exact
    if not pending.func._schema.is_mutable:
        args, kwargs = tree_map(lambda each: _wide(each, False), (args, kwargs))
    return _plain(pending.func(*args, **kwargs))[0]


def _operands(pending: Pending, total: torch.Tensor) -> list[torch.Tensor]:
    """Return the two tensors that an operator has added, in FP32; a number as a tensor without dimensions."""
    args, kwargs = pending.exact or pending.arguments
    operands = [
        each.float()
        if isinstance(each, torch.Tensor)
        else torch.full((), each, dtype=torch.float32, device=total.device)
        for each in args[:2]
    ]
    if len(operands) == 2 and pending.func._schema.is_mutable:
        # The first was overwritten by the second computation.
        sign = -1 if pending.func.overloadpacket in (aten.sub, aten.sub_) else 1
        added = sign * kwargs.get("alpha", 1) * operands[1]
        operands = [(total - added).to(pending.dtype or total.dtype).float(), added]
    return operands


def _running_sums(repeated: Iterable[list[AbsorbedOperand]]) -> Iterator[AbsorbedOperand]:
    """Yield a record for each line whose many small additions together lose most of the terms."""
    for additions in repeated:
        lost = math.hypot(*(each.error * (each.size or 0) for each in additions))
        terms = math.hypot(*(each.size or 0 for each in additions))
        if len(additions) >= _FEWEST and lost >= _ABSORBED * terms:
            times = len(additions)
            unchanged = sum(each.unchanged for each in additions) / times
            yield replace(
                additions[-1], error=lost / terms, unchanged=unchanged, size=terms / times**0.5, times=float(times)
            )


def _with_gradients(record: Any, error: float | None, whose: str) -> Record:
    found: Record = replace(record, gradients_error=error, names=(*record.names, whose))
    return found


def _is_plain(value: Any) -> bool:
    """Return whether a value is a strided floating-point tensor of torch's own class, in 32 bits or fewer."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and value.dtype in (*_NARROW, torch.float32)
        and not value.is_meta
        and not _is_strange(value)
    )


def _node_of(tensors: list[torch.Tensor]) -> int | None:
    """Return the sequence number of the autograd node that an operator on these tensors has got; None if it has none."""
    is_forward = torch._C._current_autograd_node() is None and torch.is_grad_enabled()
    return _get_sequence_nr() - 1 if is_forward and any(each.requires_grad for each in tensors) else None


def _is_decision(value: Any) -> bool:
    """Return whether a value is a strided tensor of decisions, of torch's own class."""
    return type(value) is torch.Tensor and value.dtype is torch.bool and not value.is_meta and not _is_strange(value)


def _is_strange(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of another class or layout, or has no storage or a lazy sign, as in forward-mode AD."""
    return (
        type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor._is_zerotensor()
        or tensor.is_neg()
        or tensor.is_conj()
    )


def _is_opaque(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operator belongs to a backend, or takes its workspace, whose layout depends on dtypes."""
    if func.overloadpacket.__name__.lstrip("_").startswith(_BACKENDS):
        return True
    return any(isinstance(each, torch.Tensor) and each.dtype is torch.uint8 for each in args)


def _plain(result: Any) -> list[torch.Tensor]:
    return [each for each in tree_flatten(result)[0] if _is_plain(each)]


def _fits(tensors: list[torch.Tensor]) -> bool:
    """Return whether storages can be copied in FP32: a GPU has room for three copies in half of its free memory."""
    if any(each.untyped_storage().nbytes() * 4 // each.element_size() > _MOST_BYTES for each in tensors):
        return False
    on_gpus = [each for each in tensors if each.is_cuda]
    wanted = 3 * 4 * sum(each.numel() for each in on_gpus)
    return all(wanted < free_memory(device) / 2 for device in {each.device for each in on_gpus})


def _wide(value: Any, is_mutated: bool) -> Any:
    """Return a floating-point tensor in FP32, as a copy if the operator writes to it; a 16-bit dtype as FP32."""
    if not _is_plain(value):
        return torch.float32 if value in _NARROW else value
    return value.float().clone() if is_mutated and value.dtype == torch.float32 else value.float()


def _mutated(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the tensors that an operator writes to; `native_batch_norm` writes running statistics without saying so."""
    found = []
    for place, argument in enumerate(schema.arguments):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written or argument.name.startswith("running_"):
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [each for each in tree_flatten(given)[0] if isinstance(each, torch.Tensor)]
    return found


def _equals_one(total: torch.Tensor, operands: list[torch.Tensor]) -> torch.Tensor:
    """Return where a sum equals one of its operands."""
    return (total == operands[0]).logical_or(total == operands[1])
