"""A second computation of a step: every operator runs once more, on FP32 twins of the run's 16-bit values.

The run's own tensors are neither read late nor written. A twin belongs to a storage, so that views and writes in place need no
bookkeeping; a tensor without one equals its twin. Each operator is judged twice: its *local* error is the error of its own
arithmetic, on the inputs that it had, and its *inherited* error is the error of all arithmetic so far. The first distinguishes an
operator that loses values from one that passes losses on; the second shows whether more bits would have helped at all.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from types import FrameType
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr
from torch.utils._python_dispatch import _disable_current_modes

from mpinspect.numeric.exponents import ratio
from mpinspect.ranges.capture.tally import dtype_name, passed_through
from mpinspect.ranges.faults.measure.additions import Additions
from mpinspect.ranges.faults.measure.broken import Broken
from mpinspect.ranges.faults.measure.cached_casts import CachedCasts
from mpinspect.ranges.faults.measure.choices import BEST, CHOOSING, ROUNDING, SEARCHING, Choices, is_near_tie, tied
from mpinspect.ranges.faults.measure.edges import Edges, bounds_for_later
from mpinspect.ranges.faults.measure.effects import Effects
from mpinspect.ranges.faults.measure.flushed import DividedGradients, Flushes
from mpinspect.ranges.faults.measure.growth import Growth
from mpinspect.ranges.faults.measure.kept_sums import CHANGING, CHANGING_IN_PLACE, KeptSums, arrives
from mpinspect.ranges.faults.measure.operands import (
    ADDITIONS,
    CASTS,
    DIFFERENCES,
    NARROW,
    Pending,
    clamps_for,
    divisor_of,
    has_numbers,
    is_cast_to_fp8,
    is_decision,
    is_in_forward,
    is_integer,
    is_opaque,
    is_strange,
    local_result,
    mapped,
    may_have_twin,
    mutated_by,
    narrow_storages,
    node_of,
    numbers_of,
    single_operators,
    summands,
    wide_copy,
)
from mpinspect.ranges.faults.measure.origins import Origins
from mpinspect.ranges.faults.measure.rounded_numbers import RoundedNumbers, coarse_difference
from mpinspect.ranges.faults.measure.twins import (
    ZERO_BUT_FOR_ROUNDING,
    Marks,
    Twins,
    distance,
    have_one_layout,
    is_equal,
    is_finite,
)
from mpinspect.ranges.records import (
    MOSTLY_ERROR,
    AbsorbedOperand,
    AmplifiedError,
    CastToFP8,
    ChangedIntegers,
    GradientsError,
    InfiniteDivisor,
    LostSum,
    NearestEnd,
    Positions,
    ReadNumber,
    Record,
    StaleCasts,
    Ties,
)
from mpinspect.reporting.words import filled, number_of
from mpinspect.runtime.device import free_memory
from mpinspect.runtime.outputs import leaves
from mpinspect.runtime.storages import storage_key
from mpinspect.runtime.user_line import innermost_line

aten = torch.ops.aten

#: Sums of many terms, whose rounding errors add up.
SUMS = frozenset(
    {
        *(aten.sum, aten.mean, aten.cumsum, aten.index_add, aten.index_add_, aten.index_put, aten.index_put_),
        *(aten._index_put_impl_, aten.scatter_add, aten.scatter_add_, aten.scatter_reduce, aten.var, aten.std),
        *(aten.linalg_vector_norm, aten.norm, aten.logsumexp, aten.var_mean, aten.embedding_dense_backward),
    }
)
#: Losses of a difference, which is judged in place of their result: a single number may be right by chance.
_LOSSES = frozenset({aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss})
#: Gradients of functions that rounding makes exactly 1, where the gradient is zero, and the place of the function's result.
_SATURATING = {aten.sigmoid_backward: 1, aten.tanh_backward: 1}
#: Operators that may make a large relative error of a small one.
_AMPLIFYING = (
    DIFFERENCES
    | {aten.lerp_, *_SATURATING}
    | _LOSSES
    | {*(aten.sin, aten.cos, aten.tan, aten.exp, aten.log, aten.pow, aten.remainder, aten.fmod, aten.floor, aten.sign)}
)
_PRODUCTS = frozenset({aten.mm, aten.addmm})
#: Multiplications from which on a product takes longer than choosing its kernel.
_LARGE_PRODUCT = 1 << 24
#: Operators whose result is zero, or much too small, if their argument is.
_PASSING = CASTS | {aten.mul, aten.div, aten.sqrt, aten.sum, aten.mean, aten.mm, aten.bmm, aten.clamp, aten.clamp_min}
#: Operators whose result depends on the magnitude of the smallest values.
_LOGARITHMS = frozenset({aten.log, aten.log2, aten.log10})
#: Operators that decide by comparing: in the exact computation a clamp, a `where` and their gradients follow its own decisions.
_DECIDING = frozenset(
    {
        *(aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge),
        *(aten.logical_and, aten.logical_or, aten.logical_xor, aten.logical_not),
        *(aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor, aten.bitwise_not),
        *(aten.logical_and_, aten.logical_or_, aten.bitwise_and_, aten.bitwise_or_),
    }
)
#: Operators by which a loop divides its gradients.
_SCALING = frozenset({aten.mul, aten.mul_, aten.div, aten.div_})
#: Operators whose results are not written yet, or have no exact result.
_WITHOUT_RESULT = ("empty", "new_empty", "set_", "resize_")
#: Bytes of twins, and seconds, after which the rest of the step is left out.
_MOST_BYTES, _MOST_SECONDS = 2 << 30, 20.0
#: The most operators that are named as left out.
_MOST_NAMED = 5
#: The least local error of a sum, relative to the norm of its exact result. Rounding a sum once makes at most 2^-9 in BF16.
_LOST = 0.03
#: Records of operators that lose most of a result.
_LOSING = (LostSum, AbsorbedOperand, AmplifiedError)
#: The least number of elements of a difference, which is judged by the norm of all its elements, such as one for each channel.
_FEWEST_OF_ONE = 16
#: The least error of gradients of whose operators the worst is named.
_OFF = 0.5
#: The largest inherited error before a difference whose result is mostly error.
_UNCANCELLED = 0.05
#: The least error of a result, and its least ratio to that of the inputs, of an operator that is recorded where the gradients are
#: off by as much as their size and no other operator explains it.
_RAISED, _RAISED_TIMES, _USELESS_GRADIENTS = 0.1, 10.0, 1.0


class SecondComputation:
    """Recomputes a running step with more bits, operator by operator.

    Args:
        module: returns the dotted path of the module that is running.
        parameters: the model's parameters by name, whose gradients are compared in the end.
        buffers: the model's buffers by name, whose values persist after a step.
        by_hand: whether the loop updates the weights itself, without an optimizer.
    """

    def __init__(
        self,
        module: Callable[[], str],
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        buffers: Iterable[tuple[str, torch.Tensor]] = (),
        by_hand: bool = False,
    ) -> None:
        self._module = module
        self._parameters = list(parameters)
        stepped = [each for _, each in self._parameters if each.requires_grad and not by_hand]
        # One at a time: another thread may replace its model's gradients meanwhile.
        others = itertools.chain(stepped, (each.grad for _, each in self._parameters))
        left = [(name, each) for name, each in self._parameters if by_hand or not each.requires_grad]
        self._kept = KeptSums(others, narrow_storages(buffers), narrow_storages(left))
        self._choices = Choices()
        self._casts = CachedCasts(self._parameters)
        self._divided = DividedGradients(self._parameters)
        self._flushes = Flushes()
        #: Recomputes the optimizer that is stepping; None while none is.
        self.of_optimizer: SecondComputation | None = None
        #: The name of operators outside of a backward.
        self._phase = "forward"
        self._numbers = RoundedNumbers(self._kept.is_old)
        #: Functions that read whole numbers, by operator.
        self._readers = self._numbers.watchers()
        self._twins = Twins()
        #: The modules of forward operators, by the sequence number of their autograd node.
        self._modules: dict[int, str] = {}
        #: Why the rest of the step was left out; "" if it was not.
        self._ended_by = ""
        #: When the first operator was computed twice: before it, code may have been compiled.
        self._began = 0.0
        #: The 16-bit dtype of the last operator that had one.
        self._narrow: torch.dtype = torch.bfloat16
        #: Operators whose twin could not run, by name.
        self.skipped: Counter[str] = Counter()
        self._is_over = False
        self._found: defaultdict[type[Record], list[Record]] = defaultdict(list)
        self._nearest_end: NearestEnd | None = None
        self._origins = Origins()
        self._broken = Broken(self._origins)
        self._effects = Effects()
        self._growth = Growth()
        self._edges = Edges()
        self._additions = Additions(self._kept)
        #: The first difference of numbers too large for FP32 at each line.
        self._coarse: dict[str, AmplifiedError] = {}
        #: The dtype that FP32 data had before.
        self._widened: Marks[torch.dtype] = Marks()
        #: The operator of the forward that raised an error most times.
        self._raised: AmplifiedError | None = None
        #: The errors of weights' gradients that are in no ``.grad``, and the root mean squares of the exact ones.
        self._errors: dict[str, tuple[float, float]] = {}

    # -- the operators ----------------------------------------------------------------------------------------------

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Pending]:
        """Prepare an operator's second run, or those of the operators that a foreach operator stands for.

        Those whose result more bits would not change, or that can't be prepared, are left out.
        """
        if not isinstance(func, torch._ops.OpOverload):
            return []
        try:
            if func.overloadpacket is aten.exp:
                self._broken.exponential(args[0])
            if is_in_forward():
                self._edges.called(func.overloadpacket, args)
                self._read_casts(func, args)
                self._read_divisor(func, args)
                if func.overloadpacket in DIFFERENCES and self._readers and not kwargs:
                    self._subtract_large(func, args)
            if fp8 := clamps_for(func, args):
                self._compare_clamp(func, args, fp8)
            if func.overloadpacket is aten._local_scalar_dense:
                self._judge_read(args[0])
            self._effects.weigh(args)
            if self._choices:
                self._choices.use(func, leaves((*args, *kwargs.values())))
            rows_of = single_operators(func, args)
            if rows_of is None:
                return list(filter(None, [self._prepare(func, args, kwargs)]))
            found = [(place, self._prepare(one, row, kwargs | more)) for place, (one, row, more) in enumerate(rows_of)]
            return [each._replace(place=place) for place, each in found if each is not None]
        except Exception:
            self.skipped[func.overloadpacket.__name__] += 1
            return []

    def _read_casts(self, func: Any, args: tuple[Any, ...]) -> None:
        """Record the first operator that takes an outdated cast of a weight. Waits for the device."""
        if not self._found[StaleCasts] and (weight := self._casts.outdated(args)):
            names = (func.overloadpacket.__name__, innermost_line(sys._getframe()), self._phase, weight)
            text = dtype_name(self._narrow)
            self._found[StaleCasts].append(StaleCasts(name=self._module(), names=names, text=text, steps=1))

    def _judge_read(self, number: torch.Tensor) -> None:
        """Judge a number that Python reads, and record the first one in 16 bits outside of modules."""
        self._flushes.read_by_loop(number, self.twin(number))
        if number.dtype in NARROW and not self._module() and not self._found[ReadNumber]:
            names = ("item", innermost_line(sys._getframe()), self._phase)
            self._found[ReadNumber].append(ReadNumber(names=names, text=dtype_name(number.dtype)))

    def _read_divisor(self, func: Any, args: tuple[Any, ...]) -> None:
        """Record the first FP16 divisor from before the step with infinities, whose quotients are zeros. Waits for the device."""
        divisor = divisor_of(func, args)
        if divisor is None or divisor.dtype is not torch.float16 or self._found[InfiniteDivisor]:
            return
        infinite = int(divisor.isinf().sum()) if self._kept.is_old(divisor) else 0
        if infinite:
            names = (func.overloadpacket.__name__, innermost_line(sys._getframe()), self._phase)
            record = InfiniteDivisor(
                name=self._module(), names=names, text="float16", infinite=infinite, elements=divisor.numel()
            )
            self._found[InfiniteDivisor].append(record)

    def _subtract_large(self, func: Any, args: tuple[Any, ...]) -> None:
        """Record a difference of numbers that a format had rounded before the step. Waits for the device."""
        is_sum = func.overloadpacket in (aten.add, aten.add_)
        if isinstance(args[0], torch.Tensor) and self.twin(args[0]) is not None:
            return
        first, dtype = args[0], None
        if isinstance(first, torch.Tensor) and has_numbers(first):
            dtype = first.dtype if first.dtype in NARROW else self._widened.of(first)
        found = coarse_difference(first, args[1], is_sum, dtype)
        if found is not None:
            (dtype, figures), line = found, innermost_line(sys._getframe())
            half, names = figures["unit"] / 2, (func.overloadpacket.__name__, line, self._phase)
            more: Any = figures | {"before": half / figures["largest"], "after": half / figures["typical"]}
            record = AmplifiedError(name=self._module(), names=names, text=dtype_name(dtype), **more)
            self._coarse.setdefault(line, record)

    def _prepare(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pending | None:
        schema = func._schema
        writes = schema.is_mutable
        if self._is_over or (not writes and any(each.alias_info is not None for each in schema.returns)):
            return None
        if is_cast_to_fp8(func, args, kwargs):
            self._remember_module(func)
            return Pending(func, (args, kwargs), None, None, (args, kwargs), args[0].dtype, False, None, None)
        given = [each for each in leaves((*args, *kwargs.values())) if isinstance(each, torch.Tensor)]
        usable = {id(each): each for each in given if may_have_twin(each)}
        tensors = list(usable.values())
        mutated = mutated_by(func, args, kwargs)
        self._twins.written(each for each in mutated if id(each) in usable)
        is_copied = all(id(each) in usable for each in mutated) and not any(
            is_strange(each) for each in given if id(each) not in usable
        )
        if not self._is_chosen(func) or func.namespace != "aten" or is_opaque(func, args) or not is_copied:
            # A collective that ran twice would wait for other ranks, the user's own operators may have effects, and a
            # tensor that is written but has no twin would be written twice.
            self._forget(mutated)
            return None
        has_twin = any(self.twin(each) is not None for each in tensors)
        is_narrow = any(each.dtype in NARROW for each in tensors) or kwargs.get("dtype") in NARROW
        is_bound = is_in_forward() and bounds_for_later(func, args)
        if not (has_twin or is_narrow or func.overloadpacket in SEARCHING or is_bound):
            return None
        if self._is_used_up():
            self._end()
            return None
        if not is_in_forward():
            self._divided.backward_runs()
        self._remember_module(func)
        if not _fits(tensors):
            self.skipped["too large"] += 1
            self._forget(mutated)
            return None
        written = {id(each) for each in mutated}
        twins = mapped(
            lambda each: (
                self._twin_or_wide(each, id(each) in written) if id(each) in usable else wide_copy(each, False)
            ),
            args,
            kwargs,
        )
        exact = (args, kwargs) if has_twin else None
        before = 0.0 if writes else None
        if has_twin and writes:
            exact = mapped(lambda each: wide_copy(each, id(each) in written), args, kwargs)
            if func.overloadpacket in _AMPLIFYING:
                before = self._errors_of(tensors)
        dtype = getattr((*args, None)[0], "dtype", None)
        self._narrow = next((each.dtype for each in tensors if each.dtype in NARROW), self._narrow)
        is_cast = func.overloadpacket in CASTS and all(map(self._twins.is_cast, tensors))
        is_changed = func.overloadpacket in CHANGING_IN_PLACE and dtype in NARROW and is_in_forward()
        old = args[0].detach().clone() if is_changed else None
        return Pending(func, twins, exact, before, (args, kwargs), dtype, is_cast, node_of(tensors), old)

    def _remember_module(self, func: Any) -> None:
        """Remember the running module of a forward for the backward of its last node, and the operator that has got the node."""
        if is_in_forward():
            number = _get_sequence_nr() - 1
            self._modules[number] = self._module()
            self._broken.made(number, func.overloadpacket)

    def _is_chosen(self, func: Any) -> bool:
        """Return whether to run an operator again; the results of others are taken as exact."""
        return True

    def after(self, pending: Sequence[Pending], result: Any, frame: FrameType) -> None:
        """Run each operator again on the twins of its arguments, and compare the results."""
        for each in pending:
            made = result
            if each.place is not None:
                # A foreach operator in place returns nothing.
                made = result[each.place] if result else each.given[0][0]
            self._ran(each, made, frame)

    def _ran(self, pending: Pending, result: Any, frame: FrameType) -> None:
        func, pending = pending.func, pending._replace(frame=frame)
        name = func.overloadpacket.__name__
        if is_cast_to_fp8(func, *pending.given):
            self._compare_cast(pending, result)
            return
        results = numbers_of(result)
        self._kept.ran(func, pending.given[0], results)
        self._read_numbers(pending, result)
        if torch.Tag.nondeterministic_seeded in func.tags or name.startswith(_WITHOUT_RESULT):
            self._forget(results)
            return
        try:
            if func.overloadpacket in _SCALING and results and is_in_forward():
                self._divided.multiplied(name.rstrip("_"), pending.given[0], pending.old, results[0], frame)
            if func.overloadpacket is aten._to_copy and not results:
                self._compare_integers(pending, result)
                return
            if is_decision(result):
                self._keep_decision(pending, result)
                return
            if func.overloadpacket is aten._to_copy:
                self._casts.made(pending.given[0][0], results[0])
                self._follow_widened(pending.given[0][0], results[0])
            if func.overloadpacket is aten._to_copy and self._keep_cast(pending, results[0]):
                return
            if func.overloadpacket is aten.topk:
                self._compare_ties(pending)
            args, kwargs = pending.arguments
            exact = _run(func, args, kwargs)
            self._compare_choices(pending, result, exact)
            twins = numbers_of(exact)
            given = {storage_key(each) for each in leaves(args) if isinstance(each, torch.Tensor)}
            for place, (value, twin) in enumerate(zip(results, twins, strict=False)):
                if value.numel() and value.shape == twin.shape and twin.dtype == torch.float32:
                    if not place:
                        # Further results may be written partially.
                        self._compare(pending, value, twin)
                        self._origins.passed_on([value], results[1:])
                    self._keep(value, twin, pending.is_cast, is_ours=storage_key(twin) not in given)
                    given.add(storage_key(twin))
        except Exception:
            self.skipped[name] += 1
            self._forget(results)

    def _follow_widened(self, source: torch.Tensor, cast: torch.Tensor) -> None:
        """Remember the dtype of 16-bit data that are cast to FP32."""
        is_data = source.dtype in NARROW and self.twin(source) is None
        self._widened.put(cast, source.dtype if is_data and cast.dtype is torch.float32 else None)

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
        """Return whether the time or the memory for twins is used up."""
        if self._elapsed() > _MOST_SECONDS:
            self._ended_by = f"after {_MOST_SECONDS:.0f} s"
        elif self._twins.bytes > _MOST_BYTES:
            self._ended_by = f"once its copies took {_MOST_BYTES >> 30} GiB"
        return bool(self._ended_by)

    def _elapsed(self) -> float:
        """Return the time since the first operator that was computed twice."""
        now = time.perf_counter()
        self._began = self._began or now
        return now - self._began

    def left_out(self) -> str:
        """Return a sentence on the operators that were not computed a second time; "" without any."""
        skipped = [f"{number_of(times, 'call')} of {name}" for name, times in self.skipped.most_common(_MOST_NAMED)]
        parts = filter(None, (filled("all of it {}", self._ended_by), *skipped))
        return filled("Left out of the second computation of a step: {}", ", ".join(parts))

    # -- comparing --------------------------------------------------------------------------------------------------

    def _compare(self, pending: Pending, value: torch.Tensor, twin: torch.Tensor) -> None:
        operator = pending.func.overloadpacket
        # An operator that overwrites its arguments can be run again only once.
        local = cache(partial(local_result, pending, twin))
        is_rounded = value.dtype in NARROW and is_in_forward()
        if is_in_forward():
            self._edges.ran(pending, value, partial(self._record, pending))
        if not is_finite(value):
            self._broken.judge(pending, value, twin, local(), partial(self._record, pending, value))
            if is_in_forward():
                # A mask's infinities hide no error of the other elements.
                self._origins.passed_on(numbers_of(pending.given[0]), [value])
            return
        self._growth.ran(numbers_of(pending.given[0]), value, twin, partial(self._raising, pending, value))
        if is_in_forward() and value.dtype is torch.float16 and value.numel():
            largest = float(value.abs().max())
            if self._nearest_end is None or largest > self._nearest_end.largest:
                self._nearest_end = self._record(pending, value, NearestEnd, largest=largest)
        # A merge of trained adapters into weights that persist has a node.
        is_kept = pending.old is not None and self._kept.keeps(pending.given[0][0])
        if is_in_forward() and (pending.node is None or is_kept):
            self._follow_flushed(pending, value, twin, local)
            if is_rounded:
                self._compare_kept(pending, value, twin, local)
        if operator in SUMS and value.dtype in NARROW:
            self._compare_sum(pending, value, local())
        if is_in_forward():
            operands, origin = numbers_of(pending.given[0]), partial(self._origin, pending, value)
            self._origins.made(pending.func, operands, value, twin, local, origin, operator in SUMS)
        if operator in _AMPLIFYING:
            if operator in ADDITIONS and is_rounded:
                describe = partial(self._record, pending, value)
                lost = self._additions.judge(pending, value, local, describe)
                if lost is not None:
                    self._add(pending, *lost)
            compared = value, twin
            if operator in _LOSSES:
                compared = tuple(
                    given.float() - target.float() for given, target, *_ in (pending.given[0], pending.arguments[0])
                )
            if operator is aten.sign and self._narrow is torch.float16:
                # Rounding turns some signs of small numbers round; a flushed number has none.
                compared = twin.where(value != 0, 0.0), twin
            if compared[0].numel() >= _FEWEST_OF_ONE:
                self._compare_errors(pending, value, twin, _relative(*compared))

    def _follow_flushed(
        self, pending: Pending, value: torch.Tensor, twin: torch.Tensor, local: Callable[[], torch.Tensor]
    ) -> None:
        """Follow values that FP16 has flushed into tensors that persist from step to step, sums, or logarithms."""
        args, operator = pending.given[0], pending.func.overloadpacket
        is_kept = pending.func._schema.is_mutable and self._kept.keeps(args[0])
        if is_kept or operator in _PASSING | _LOGARITHMS:
            taker = operator.__name__ * (operator in _LOGARITHMS)
            self._flushes.passed_on(leaves(args[is_kept:]), value, is_kept, taker)
        elif operator in ADDITIONS:
            self._flushes.added(args[:2], value, twin)
        if value.dtype is torch.float16 and not is_kept:
            self._flushes.made(value, local(), partial(self._record, pending, value))

    def _compare_cast(self, pending: Pending, value: torch.Tensor) -> None:
        """Record that there are casts to FP8, and judge one, also of a backward."""
        self._found[CastToFP8] = self._found[CastToFP8] or [self._record(pending, value, CastToFP8)]
        source = pending.given[0][pending.func.overloadpacket is aten.copy_]
        if not (has_numbers(source) and source.shape == value.shape and source.numel()):
            return
        describe = partial(self._record, pending, value, text=passed_through(value.dtype))
        self._flushes.cast(value, source, lambda kind, **figures: _at_its_line(describe(kind, **figures)))

    def _compare_clamp(self, func: Any, args: tuple[Any, ...], fp8: torch.dtype) -> None:
        """Judge a clamp to the range of FP8, also of a backward."""
        pending = Pending(func, (args, {}), None, None, (args, {}), fp8, False, None, None, sys._getframe())
        describe = partial(self._record, pending, None, text=passed_through(fp8))
        self._flushes.clamped(args[0], args[2], lambda kind, **figures: _at_its_line(describe(kind, **figures)))

    def _compare_kept(
        self, pending: Pending, value: torch.Tensor, twin: torch.Tensor, local: Callable[[], torch.Tensor]
    ) -> None:
        """Judge a change of a tensor that persists from step to step."""
        args, operator = pending.given[0], pending.func.overloadpacket
        if arrives(operator, args, value.dtype):
            return
        describe = partial(self._record, pending, value)
        self._kept.averaged(operator, args, pending.old, (value, twin), describe)
        if pending.old is not None and self._kept.keeps(args[0]):
            before, change = summands(pending, local())
            self._kept.changed(value, before, change, describe)
        elif operator in CHANGING:
            for kept in args[: 1 + (operator is aten.mul)]:
                if self._kept.keeps(kept):
                    self._kept.replaced(value, kept, local, describe)

    def _compare_sum(self, pending: Pending, value: torch.Tensor, local: torch.Tensor) -> None:
        """Record a sum that has lost terms."""
        wide = value.float()
        error = ratio(float((wide - local).norm()), float(local.norm()))
        if error >= _LOST:
            worst = int((wide - local).abs().argmax())
            given, exact = float(wide.flatten()[worst]), float(local.flatten()[worst])
            record = self._record(pending, value, LostSum, error=error, value=given, exact=exact)
            self._add(pending, record, wide - local)

    def _compare_ties(self, pending: Pending) -> None:
        """Record a top k whose last score ties, in enough rows, with one that is left out, where the exact scores differ."""
        scores, k, *_ = args = pending.given[0]
        twin = self.twin(scores)
        if twin is not None and (share := tied(scores, twin, *args[1:])):
            dim = args[2] if len(args) > 2 else -1
            figures = {"fraction": share, "k": k, "scores": scores.shape[dim], "text": dtype_name(self._narrow)}
            self._found[Ties].append(self._record(pending, scores, Ties, **figures))

    def _compare_integers(self, pending: Pending, value: Any) -> None:
        """Record whole numbers that were rounded before they are made integers."""
        exact = pending.arguments[0][0]
        if not is_integer(value) or pending.exact is None:
            return
        if not pending.is_cast or not bool((exact == exact.round()).all()):
            self._compare_choices(pending, value, exact.to(value.dtype))
            return
        differ = (value.float() - exact).abs()
        if bool(differ.any()):
            worst = int(differ.argmax())
            given, wanted = float(value.flatten()[worst]), float(exact.flatten()[worst])
            changed, of = float(differ.count_nonzero()), float(value.numel())
            record = self._record(pending, value, ChangedIntegers, changed=changed, of=of, given=given, exact=wanted)
            self._found[ChangedIntegers].append(record)

    def _compare_choices(self, pending: Pending, result: Any, exact: Any) -> None:
        """Record integers and masks that follow from rounding errors."""
        operator, given = pending.func.overloadpacket, pending.given[0]
        table = given[SEARCHING[operator]] if operator in SEARCHING else None
        if not is_in_forward():
            return
        describe = partial(self._record, pending, result, text=dtype_name(self._narrow))
        if pending.exact is None:
            if table is not None:
                self._choices.searched(table, describe)
            return
        if operator in ROUNDING:
            self._choices.rounded(result, given[0], pending.arguments[0][0])
        if operator not in CHOOSING | _DECIDING:
            return
        for value, wanted in zip(leaves([result]), leaves([exact]), strict=True):
            if is_integer(value) or value.dtype is torch.bool:
                dim = (*given, None)[1] if operator in BEST else None
                hardly_matters = partial(is_near_tie, pending.arguments[0][0], value, wanted, dim)
                self._choices.chosen(given[0], value, wanted, table, describe, hardly_matters)

    def _compare_errors(self, pending: Pending, value: torch.Tensor, twin: torch.Tensor, inherited: float) -> None:
        """Record a result that is mostly the error of its inputs; ``inherited``: its error relative to the exact one's norm."""
        if not inherited >= _RAISED or self._kept.is_compensated(value):
            return
        before = self._errors_of(leaves(pending.given[0])) if pending.before is None else pending.before
        place = _SATURATING.get(pending.func.overloadpacket)
        is_sign = pending.func.overloadpacket is aten.sign and self._narrow is torch.float16
        is_lost = is_sign or (place is not None and not bool(value.any()))
        if (inherited >= MOSTLY_ERROR and before <= _UNCANCELLED) or is_lost:
            off = value.float() - twin
            origin = self._origins.of([pending.given[0][place] if place else value]) if is_in_forward() or place else ()
            record = self._record(pending, value, AmplifiedError, *origin, before=before, after=inherited)
            self._add(pending, _at_its_line(record) if place else record, off)
        elif is_in_forward() and 0 < before <= inherited / _RAISED_TIMES and pending.func.overloadpacket not in _LOSSES:
            known = self._raised
            if known is None or known.after / known.before < inherited / before:
                origin = self._origins.of([value])
                self._raised = self._record(pending, value, AmplifiedError, *origin, before=before, after=inherited)

    def _add(self, pending: Pending, record: Record, off: torch.Tensor) -> None:
        """Add the record of an operator's result; ``off``: its error, whose effect on the loss may become known."""
        self._found[type(record)].append(record)
        if pending.node is not None:
            self._effects.add(record, pending.node, off)

    def _origin(self, pending: Pending, result: torch.Tensor) -> tuple[str, ...]:
        """Return the operator, line, module and dtype of a result."""
        record = self._record(pending, result, Record)
        return *record.names[:2], record.name, record.text

    def _record(self, pending: Pending, result: Any, kind: type[Any], *names: str, **figures: Any) -> Any:
        """Return a record of an operator; ``names``: those that follow the operator, its line and its phase."""
        node = torch._C._current_autograd_node()
        if node is None:
            module, phase = self._module(), self._phase
        else:
            module, phase = self._modules.get(node._sequence_nr(), ""), "backward"
        names = (pending.func.overloadpacket.__name__, innermost_line(pending.frame), phase, *names)
        # The dtype in which numbers were rounded before they became integers.
        is_float = isinstance(result, torch.Tensor) and result.is_floating_point()
        rounded = result.dtype if is_float else pending.dtype
        dtype = str(rounded).removeprefix("torch.")
        return kind(**{"name": module, "names": names, "text": dtype, **figures})

    def _raising(self, pending: Pending, value: torch.Tensor) -> GradientsError:
        operands = numbers_of(pending.given[0]) if is_in_forward() else []
        origin = next(filter(None, map(self._origins.worst_of, operands)), ())
        record: GradientsError = self._record(pending, value, GradientsError, "", *origin)
        is_python = isinstance(torch._C._current_autograd_node(), torch.autograd.function.BackwardCFunction)
        placed: GradientsError = _at_its_line(record) if is_python else self._broken.at_its_maker(record)
        is_narrow = value.dtype in NARROW
        return placed if is_narrow else replace(placed, text=dtype_name(self._narrow))

    def takes(self, gradients: Iterable[Any]) -> None:
        """Search the gradients that an optimizer takes for zeros that FP16 has made outside of a backward."""
        with _disable_current_modes():
            twins = ((each, self.twin(each)) for each in gradients if has_numbers(each))
            self._flushes.taken_as_gradients((each, each if twin is None else twin) for each, twin in twins)

    # -- the end ----------------------------------------------------------------------------------------------------

    def records(self) -> list[Record]:
        """Return the first operator that broke, the operators that lose most, and the error of the gradients."""
        errors = self._errors_of_gradients()
        worst, whose = _worst_of(errors)
        of_all = self._of_all_gradients(errors)
        if self._numbers.found is not None:
            self._found[Positions].append(self._numbers.found)
        found = [*self._kept.records(), *self._divided.records(), *self._flushes.taken[:1]]
        found += [
            *self._flushes.of_gradients,
            *self._flushes.casts.values(),
            *self._flushes.clamps.values(),
            *self._coarse.values(),
        ]
        firsts: tuple[type[Record], ...] = (
            CastToFP8,
            ChangedIntegers,
            InfiniteDivisor,
            Positions,
            ReadNumber,
            StaleCasts,
            Ties,
        )
        found += self._broken.records()
        found += [each for kind in firsts for each in self._found[kind][:1]]
        found += [*self._edges.records(), *self._choices.used, *filter(None, [self._nearest_end])]
        # A larger error in an addition of its own does not make up for a sum that stopped.
        sums = self._additions.running_sums()
        found += [_with_gradients(each, worst, whose) for each in sums]
        judged = {each.names[:2] for each in sums}
        worsts: tuple[tuple[type[Record], str], ...] = (
            (LostSum, "error"),
            (AbsorbedOperand, "error"),
            (AmplifiedError, "after"),
        )
        for kind, size in worsts:
            records = [each for each in self._found.get(kind, []) if each.names[:2] not in judged]
            # Sorted by effect where it is known: a large error may be harmless, and a small one harmful.
            weighed = sorted((each for each in records if self._effects.of(each) is not None), key=self._effects.of)  # type: ignore[arg-type]
            others = sorted(
                (each for each in records if self._effects.of(each) is None), key=lambda each: getattr(each, size)
            )
            found += [_with_gradients(each, worst, whose) for each in (*weighed[-1:], *others[-1:])]
        is_useless = worst is not None and worst >= _USELESS_GRADIENTS
        if self._raised is not None and is_useless and not any(isinstance(each, _LOSING) for each in found):
            found.append(_with_gradients(self._raised, worst, whose))
        self._end()
        return [*found, *of_all]

    def _errors_of_gradients(self) -> dict[str, tuple[float, float]]:
        """Return the relative error of each weight's gradient, and the root mean square of the exact one."""
        return self._errors | {
            name: self._error_and_size(parameter.grad)
            for name, parameter in self._parameters
            if parameter.grad is not None and has_numbers(parameter.grad) and self.twin(parameter.grad) is not None
        }

    def _of_all_gradients(self, errors: dict[str, tuple[float, float]]) -> list[GradientsError]:
        """Return a record of the error of all gradients together; [] if none can be compared."""
        roots = {name: parameter.numel() ** 0.5 for name, parameter in self._parameters}
        # Those of a compiled graph have no name.
        compared = {name: each for name, each in errors.items() if name in roots}
        size = math.hypot(*(size * roots[name] for name, (_, size) in compared.items()))
        off = math.hypot(*(error * size * roots[name] for name, (error, size) in compared.items()))
        if not 0 < size < math.inf or not off < math.inf:
            return []
        record: GradientsError | None = None
        figures: dict[str, Any] = {"error": off / size, "of": len(compared), "size": size}
        if off >= _OFF * size:
            record, zeroed = self._growth.most(), math.hypot(*(self._zeroed(each) for _, each in self._parameters))
            figures |= {"off": sum(error >= _OFF for error, _ in compared.values()), "zeroed": zeroed / off}
        record = record or GradientsError(names=("", "", ""), text=dtype_name(self._narrow))
        return [replace(record, **figures)]

    def _zeroed(self, parameter: torch.nn.Parameter) -> float:
        """Return the norm of the exact values of a gradient's elements that are zero in the run."""
        twin = None if parameter.grad is None or not has_numbers(parameter.grad) else self.twin(parameter.grad)
        return 0.0 if twin is None else float(twin[parameter.grad == 0].norm())

    def _end(self) -> None:
        self._is_over = True
        self._effects.clear()
        self._twins.clear()
        self._modules.clear()

    # -- twins ------------------------------------------------------------------------------------------------------

    def twin(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the twin of a tensor; None if it has none of its own."""
        return self._twins.of(tensor)

    def _twin_or_wide(self, value: torch.Tensor, is_mutated: bool) -> torch.Tensor:
        if is_mutated:
            return self._twins.to_write(value)
        twin = self.twin(value)
        if twin is not None:
            return twin
        if value.dtype is torch.bool:
            return value
        return value.float()

    def _errors_of(self, tensors: Iterable[Any]) -> float:
        """Return the largest inherited error of tensors, each relative to its norm."""
        return max((self._error(each) for each in tensors if has_numbers(each)), default=0.0)

    def _error_and_size(self, tensor: torch.Tensor) -> tuple[float, float]:
        """Return the inherited error of a tensor, and the root mean square of its twin."""
        exact = tensor if (twin := self.twin(tensor)) is None else twin
        return self._error(tensor), float(exact.float().norm()) / max(exact.numel(), 1) ** 0.5

    def _error(self, tensor: torch.Tensor) -> float:
        """Return the inherited error of a tensor, relative to its norm."""
        twin = self.twin(tensor)
        if twin is None:
            return 0.0
        return _relative(tensor, twin)

    def _keep(self, value: torch.Tensor, twin: torch.Tensor, is_cast: bool, is_ours: bool) -> None:
        """Remember a result's twin; ``is_ours`` if nothing else has its memory."""
        if self.twin(value) is not None:
            self._twins.update(value, twin, is_cast)
        elif not is_equal(value, twin):
            self._twins.add(value, twin, is_cast, is_ours)

    def _keep_cast(self, pending: Pending, value: torch.Tensor) -> bool:
        """Let the result of a cast have the FP32 values of its argument. Return False if it needs a copy."""
        source, twin = pending.given[0][0], pending.arguments[0][0]
        is_exact = not has_numbers(source) or (source.dtype in NARROW and self.twin(source) is None)
        if is_exact or not value.numel() or not have_one_layout(value, twin):
            return False
        self._compare(pending, value, twin)
        if not is_equal(value, twin):
            self._twins.share(value, source, twin, pending.is_cast)
        return True

    def _keep_decision(self, pending: Pending, value: torch.Tensor) -> None:
        args, kwargs = pending.arguments
        if pending.func.overloadpacket in _DECIDING:
            decided = pending.func(*args, **kwargs)
            if not torch.equal(value, decided):
                self._origins.passed_on(numbers_of(pending.given[0]), [value])
                self._compare_choices(pending, value, decided)
                self._twins.add(value, decided, is_cast=False)
                return
        self._forget([value])

    def _forget(self, results: list[torch.Tensor]) -> None:
        """Take results as exact."""
        self._twins.forget(each for each in results if has_numbers(each) or is_decision(each))


def _worst_of(errors: dict[str, tuple[float, float]]) -> tuple[float | None, str]:
    """Return the largest relative error of a weight's gradient, and the weight; None if none can be compared.

    A gradient that is zero but for rounding, such as that of a key's bias before a softmax, is left out.

    Args:
        errors: by weight, the relative error of its gradient and the root mean square of the exact one.
    """
    if not errors or not all(map(math.isfinite, itertools.chain(*errors.values()))):
        # A loss scale that is still too high makes infinities, which hide all rounding errors.
        return None, ""
    least = ZERO_BUT_FOR_ROUNDING * max(size for _, size in errors.values())
    large = {name: error for name, (error, size) in errors.items() if size >= least}
    whose = max(large, key=lambda name: large[name])
    return large[whose], whose


def _at_its_line(record: Any) -> Any:
    """Return a record of a backward with the class of a function whose backward is Python code; without a line for others."""
    node = torch._C._current_autograd_node()
    if node is None:
        return record
    operator, line, phase, *origin = record.names
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return replace(
            record, names=(operator, line, f"backward of {type(node).__name__.removesuffix('Backward')}", *origin)
        )
    # The line of torch's own nodes is the one that calls the backward.
    return replace(record, names=(operator, "", phase, *origin))


def _relative(value: torch.Tensor, twin: torch.Tensor) -> float:
    """Return the distance of a tensor from its twin, relative to the twin's norm."""
    off = ratio(distance(value, twin), float(twin.norm()))
    if math.isnan(off) and bool(((value == twin) | (value - twin).isfinite()).all()):
        # A mask's infinities are intended.
        finite = twin.isfinite()
        return ratio(distance(value[finite], twin[finite]), float(twin[finite].norm()))
    return off


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on twins; a large product on a CPU with oneDNN, which on some processors takes half the time."""
    if func.overloadpacket not in _PRODUCTS or kwargs or not _suits_onednn(*args):
        return func(*args, **kwargs)
    bias, left, right = (None, *args)[-3:]
    return torch.ops.mkldnn._linear_pointwise(left, right.t(), bias, "none", [], "")


def _suits_onednn(*operands: torch.Tensor) -> bool:
    """Return whether a product of two matrices, to which a row may be added, is worth choosing oneDNN's kernel."""
    *bias, left, right = operands
    is_large = left.numel() * right.shape[1] >= _LARGE_PRODUCT
    is_linear = all(each.is_cpu and each.dtype is torch.float32 for each in operands) and (
        not bias or bias[0].shape == right.shape[1:]
    )
    return is_large and is_linear and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def _with_gradients(record: Any, error: float | None, whose: str) -> Record:
    found: Record = replace(record, gradients_error=error, names=(*record.names[:3], whose, *record.names[3:]))
    return found


def _fits(tensors: list[torch.Tensor]) -> bool:
    """Return whether storages can be copied in FP32: a GPU has room for three copies in half of its free memory."""
    if any(each.untyped_storage().nbytes() * 4 // each.element_size() > _MOST_BYTES for each in tensors):
        return False
    on_gpus = [each for each in tensors if each.is_cuda]
    wanted = 3 * 4 * sum(each.numel() for each in on_gpus)
    return all(wanted < free_memory(device) / 2 for device in {each.device for each in on_gpus})
