"""A second computation of a step: every operator runs once more, on FP32 twins of the run's values in 16 bits and FP8.

The run's own tensors are neither read late nor written. A twin belongs to a storage, so that views and writes in place need no
bookkeeping; a tensor without one equals its twin. Each operator is judged twice: its *local* error is the error of its own
arithmetic, on the inputs that it had, and its *inherited* error is the error of all arithmetic so far. The first distinguishes an
operator that loses values from one that passes losses on; the second shows whether more bits would have helped at all.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
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
from mpinspect.ranges.faults.measure.kept_sums import CHANGING, CHANGING_IN_PLACE, NORMALISING, KeptSums, arrives
from mpinspect.ranges.faults.measure.operands import (
    ADDITIONS,
    CASTS,
    DIFFERENCES,
    SCALING,
    Judged,
    Pending,
    clamps_for,
    divisor_of,
    has_numbers,
    is_cast_to_fp8,
    is_in_forward,
    is_integer,
    narrow_storages,
    numbers_of,
    saturates,
    summands,
)
from mpinspect.ranges.faults.measure.origins import Origins
from mpinspect.ranges.faults.measure.read_back import ReadBack
from mpinspect.ranges.faults.measure.recomputation import DECIDING, Recomputation, relative_error
from mpinspect.ranges.faults.measure.rounded_numbers import RoundedNumbers, coarse_difference
from mpinspect.ranges.faults.measure.twins import (
    FP8,
    NARROW,
    OF_NARROW,
    ZERO_BUT_FOR_ROUNDING,
    Marks,
    distance,
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
from mpinspect.runtime.outputs import leaves
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
#: Operators whose result is a running sum's mean, if they take its sum.
_CARRYING_SUMS = frozenset({aten.div, aten.mul, *CASTS})
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
#: Operators whose result is zero, or much too small, if their argument is.
_PASSING = CASTS | {aten.mul, aten.div, aten.sqrt, aten.sum, aten.mean, aten.mm, aten.bmm, aten.clamp, aten.clamp_min}
#: Operators whose result depends on the magnitude of the smallest values.
_LOGARITHMS = frozenset({aten.log, aten.log2, aten.log10})
#: The least local error of a sum, relative to the norm of its exact result. Rounding a sum once makes at most 2^-9 in BF16.
_LOST = 0.03
#: Records of operators that lose most of a result.
_LOSING = (LostSum, AbsorbedOperand, AmplifiedError)
#: The least number of elements of a difference, which is judged by the norm of all its elements, such as one for each channel.
_FEWEST_OF_ONE = 16
#: The least error of gradients of whose operators the worst is named.
_OFF = 0.5
#: The same of an inference's outputs.
_OUTPUTS_OFF = 0.1
#: Maximum number of casts to FP8 that are recorded.
_MOST_CASTS = 64
#: The largest inherited error before a difference whose result is mostly error.
_UNCANCELLED = 0.05
#: The least error of a result, and its least ratio to that of the inputs, of an operator that is recorded where the gradients are
#: off by as much as their size and no other operator explains it.
_RAISED, _RAISED_TIMES, _USELESS_GRADIENTS = 0.05, 10.0, 1.0


class SecondComputation(Recomputation):
    """Recomputes a running step with more bits, operator by operator.

    Args:
        module: returns the dotted path of the module that is running.
        parameters: the model's parameters by name, whose gradients are compared in the end.
        buffers: the model's buffers by name, whose values persist after a step.
        by_hand: whether the loop updates the weights itself, without an optimizer.
        is_inference: whether no gradients follow.
    """

    def __init__(
        self,
        module: Callable[[], str],
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        buffers: Iterable[tuple[str, torch.Tensor]] = (),
        by_hand: bool = False,
        is_inference: bool = False,
    ) -> None:
        super().__init__(module, parameters)
        self._is_inference, self._had_backward = is_inference, False
        stepped = [each for _, each in self._parameters if each.requires_grad and not by_hand]
        # One at a time: another thread may replace its model's gradients meanwhile.
        others = itertools.chain(stepped, (each.grad for _, each in self._parameters))
        left = [(name, each) for name, each in self._parameters if by_hand or not each.requires_grad]
        self._kept = KeptSums(others, narrow_storages(buffers), narrow_storages(left))
        self._choices = Choices()
        self._casts = CachedCasts(self._parameters)
        self._divided = DividedGradients(self._parameters)
        self._flushes = Flushes()
        self._numbers = RoundedNumbers(module, self._kept.is_old)
        #: Functions that read whole numbers, by operator.
        self._readers = self._numbers.watchers()
        #: The dtype of the last operator that had one of fewer than 32 bits.
        self._narrow: torch.dtype = torch.bfloat16
        self._found: defaultdict[type[Record], list[Record]] = defaultdict(list)
        self._nearest_end: NearestEnd | None = None
        self._origins = Origins()
        self._broken = Broken(self._origins, self._makers, is_inference)
        self._effects = Effects()
        self._growth = Growth()
        self._edges = Edges()
        self._read_back = ReadBack(self._kept, is_inference)
        self._additions = Additions(self._kept)
        #: The first difference of numbers too large for FP32 at each line.
        self._coarse: dict[str, AmplifiedError] = {}
        #: The number of terms of the sum behind the number that is recorded as read.
        self._most_terms = 0
        #: The records of differences that are mostly error.
        self._differences: Marks[AmplifiedError] = Marks()
        #: The dtype that FP32 data had before.
        self._widened: Marks[torch.dtype] = Marks()
        #: The first casts to FP8 by module, phase and format, and the dtypes for whose range a clamp has bounded tensors.
        self._casts_to_fp8: dict[tuple[object, ...], CastToFP8] = {}
        self._bounded: Marks[torch.dtype] = Marks()
        #: The operator of the forward that raised an error most times.
        self._raised: AmplifiedError | None = None

    # -- the operators ----------------------------------------------------------------------------------------------

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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

    def _read_casts(self, func: Any, args: tuple[Any, ...]) -> None:
        """Record the first operator that takes an outdated cast of a weight. Waits for the device."""
        if not self._found[StaleCasts] and (weight := self._casts.outdated(args)):
            describe = self._describing(func, args)
            self._found[StaleCasts].append(describe(StaleCasts, weight, text=passed_through(self._narrow), steps=1))

    def _judge_read(self, number: torch.Tensor) -> None:
        """Judge a number that Python reads, and record the first one in 16 bits outside of modules."""
        twin = self.twin(number)
        self._flushes.read_by_loop(number, twin)
        if number.dtype not in NARROW or self._module():
            return
        line, terms = self._additions.sums.behind(number)
        if not self._found[ReadNumber] or terms > self._most_terms:
            self._most_terms = terms
            names = ("item", innermost_line(sys._getframe()), self._phase, line)
            exact = None if twin is None else float(twin)
            record = ReadNumber(names=names, text=dtype_name(number.dtype), terms=float(terms))
            self._found[ReadNumber] = [replace(record, value=float(number), exact=exact)]

    def _read_divisor(self, func: Any, args: tuple[Any, ...]) -> None:
        """Record the first FP16 divisor from before the step with infinities, whose quotients are zeros. Waits for the device."""
        divisor = divisor_of(func, args)
        if divisor is None or divisor.dtype is not torch.float16 or self._found[InfiniteDivisor]:
            return
        infinite = int(divisor.isinf().sum()) if self._kept.is_old(divisor) else 0
        if infinite:
            figures = {"text": "float16", "infinite": infinite, "elements": divisor.numel()}
            self._found[InfiniteDivisor].append(self._describing(func, args)(InfiniteDivisor, **figures))

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
            dtype, figures = found
            half = figures["unit"] / 2
            figures |= {"before": half / figures["largest"], "after": half / figures["typical"]}
            record = self._describing(func, args)(AmplifiedError, text=dtype_name(dtype), **figures)
            self._coarse.setdefault(record.names[1], record)

    def _prepare(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pending | None:
        if self._read_back and is_in_forward():
            self._read_back.called(func.overloadpacket, args, self._describing(func, args))
        pending = super()._prepare(func, args, kwargs)
        if pending is not None:
            given = leaves((*args, *kwargs.values()))
            self._narrow = next(
                (each.dtype for each in given if has_numbers(each) and each.dtype in OF_NARROW.narrow), self._narrow
            )
        return pending

    def _is_judged_anyway(self, func: Any, args: tuple[Any, ...]) -> bool:
        is_bound = is_in_forward() and bounds_for_later(func, args)
        is_followed = is_in_forward() and self._read_back.follows(func.overloadpacket, args)
        return is_followed or is_bound or func.overloadpacket in SEARCHING or clamps_for(func, args) is not None

    def _is_changed(self, func: Any, dtype: torch.dtype | None) -> bool:
        return func.overloadpacket in CHANGING_IN_PLACE and dtype in NARROW and is_in_forward()

    def _error_before(self, func: Any, tensors: list[torch.Tensor]) -> float:
        return self._errors_of(tensors) if func.overloadpacket in _AMPLIFYING else 0.0

    def _remember_module(self, func: Any) -> None:
        super()._remember_module(func)
        if not is_in_forward():
            self._had_backward = True
            self._divided.backward_runs()

    def _communicates(self, tensors: list[torch.Tensor]) -> None:
        super()._communicates(tensors)
        self._broken.is_exchanged = bool(self._exchanged)

    def _follow(self, pending: Pending, result: Any, results: list[torch.Tensor]) -> None:
        if is_cast_to_fp8(pending.func, *pending.given):
            self._compare_cast(pending, result)
        if is_in_forward():
            describe = partial(self._record, pending, result)
            self._read_back.ran(pending.func.overloadpacket, pending.given[0], results, describe)
        self._kept.ran(pending.func, pending.given[0], results)
        if pending.func.overloadpacket in NORMALISING and pending.given[0][3] is not None:
            running = pending.given[0][3]
            if running.dtype in NARROW and self._kept.is_of_model(running):
                self._kept.normalised(pending.given[0], results, partial(self._record, pending, results[0]))
        if pending.func.overloadpacket is aten.topk:
            self._compare_best(pending, result[1])
        self._read_numbers(pending, result)
        is_of_graph = self._is_inference or pending.node is not None or not is_in_forward()
        self._broken.ran(pending.func.overloadpacket, leaves(pending.given[0]), leaves((result,)), is_of_graph)

    def _judge(self, pending: Pending, results: list[torch.Tensor]) -> None:
        for each in results:
            self._bounded.put(each, clamps_for(pending.func, pending.given[0]))
        operator, given = pending.func.overloadpacket, pending.given[0]
        if operator in SCALING and results and is_in_forward():
            self._divided.multiplied(operator.__name__.rstrip("_"), given, pending.old, results[0], pending.frame)
        if operator is aten._to_copy and results:
            self._casts.made(given[0], results[0])
            self._follow_widened(given[0], results[0])

    def _decided_rightly(self, mask: torch.Tensor) -> None:
        self._broken.is_right(mask)

    def _passed_on(self, operands: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        self._origins.passed_on(operands, results)

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
            read(pending.given[0], result)
        except Exception as error:
            self._readers = {}
            self.skipped[f"the search for rounded numbers ({error!r})"] += 1

    # -- comparing --------------------------------------------------------------------------------------------------

    def _compare(self, pending: Pending, value: torch.Tensor, twin: torch.Tensor) -> None:
        operator, judged = pending.func.overloadpacket, self._judged(pending, value, twin)
        is_rounded = value.dtype in NARROW and is_in_forward()
        if is_in_forward():
            self._edges.ran(pending, value, partial(self._record, pending))
        if not is_finite(value):
            self._broken.judge(judged)
            if is_in_forward():
                # A mask's infinities hide no error of the other elements.
                self._origins.passed_on(numbers_of(pending.given[0]), [value])
            return
        self._broken.is_finite(operator, value, twin, numbers_of(pending.given[0]))
        if not (self._had_backward and is_in_forward() and pending.node is None):
            # After the backward, a clip or a norm takes the gradients as they are.
            self._growth.ran(numbers_of(pending.given[0]), value, value, twin, partial(self._raising, pending, value))
        if is_in_forward() and value.dtype is torch.float16 and value.numel():
            largest = float(value.abs().max())
            if self._nearest_end is None or largest > self._nearest_end.largest:
                self._nearest_end = self._record(pending, value, NearestEnd, largest=largest)
        # A merge of trained adapters into weights that persist has a node.
        is_kept = pending.old is not None and self._kept.keeps(pending.given[0][0])
        if is_in_forward() and (pending.node is None or is_kept):
            self._follow_flushed(judged)
            if is_rounded:
                self._compare_kept(judged)
        if operator in _CARRYING_SUMS:
            self._additions.sums.passed_on(pending.given[0], value)
        if operator in SUMS and value.dtype in NARROW:
            self._compare_sum(pending, value, judged.local())
        if is_in_forward():
            self._origins.made(judged, is_sum=operator in SUMS)
        if operator in _AMPLIFYING:
            if operator in ADDITIONS and is_rounded:
                lost = self._additions.judge(judged)
                if lost is not None:
                    self._add(pending, self._with_inherited(pending, lost[0]), lost[1])
            compared = value, twin
            if operator in _LOSSES:
                compared = tuple(
                    given.float() - target.float() for given, target, *_ in (pending.given[0], pending.arguments[0])
                )
            if operator is aten.sign and self._narrow is torch.float16:
                # Rounding turns some signs of small numbers round; a flushed number has none.
                compared = twin.where(value != 0, 0.0), twin
            if compared[0].numel() >= _FEWEST_OF_ONE:
                self._compare_errors(pending, value, twin, relative_error(*compared))

    def _follow_flushed(self, judged: Judged) -> None:
        """Follow values that FP16 has flushed into tensors that persist from step to step, sums, or logarithms."""
        args, operator, value = judged.args, judged.operator, judged.value
        is_kept = judged.pending.func._schema.is_mutable and self._kept.keeps(args[0])
        if is_kept or operator in _PASSING | _LOGARITHMS:
            taker = operator.__name__ * (operator in _LOGARITHMS)
            self._flushes.passed_on(leaves(args[is_kept:]), value, is_kept, taker)
        elif operator in ADDITIONS:
            self._flushes.added(args[:2], value, judged.twin)
        if value.dtype is torch.float16 and not is_kept:
            self._flushes.made(judged)

    def _compare_cast(self, pending: Pending, value: torch.Tensor) -> None:
        """Record the first cast to FP8 and a module's first one that nothing bounds, and judge each, also of a backward."""
        source = pending.given[0][pending.func.overloadpacket is aten.copy_]
        if not has_numbers(value) or source.dtype in FP8:
            return
        is_cut = saturates(value.dtype, value.device.type)
        is_bounded = self._bounded.of(source) is value.dtype or is_cut
        if not (self._casts_to_fp8 and is_bounded) and len(self._casts_to_fp8) < _MOST_CASTS:
            record = self._record(pending, value, CastToFP8, is_bounded=float(is_bounded))
            self._casts_to_fp8.setdefault((record.name, record.names[2], record.text, is_bounded), record)
        if not (has_numbers(source) and source.shape == value.shape and source.numel()):
            return
        describe = self._placing(partial(self._record, pending, value))
        self._flushes.cast(value, source, describe)
        if is_cut:
            self._flushes.clamped(source, torch.finfo(value.dtype).max, describe)

    def _compare_clamp(self, func: Any, args: tuple[Any, ...], fp8: torch.dtype) -> None:
        """Judge a clamp to the range of FP8, also of a backward."""
        describe = partial(self._describing(func, args), text=passed_through(fp8))
        self._flushes.clamped(args[0], args[2], self._placing(describe))

    def _describing(self, func: Any, args: tuple[Any, ...]) -> Callable[..., Any]:
        """Return a function that makes records of an operator that is about to run."""
        pending = Pending(func, (args, {}), None, None, (args, {}), None, False, None, None)
        return partial(self._record, pending, next(iter(args), None))

    def _compare_kept(self, judged: Judged) -> None:
        """Judge a change of a tensor that persists from step to step."""
        args, operator, value = judged.args, judged.operator, judged.value
        if arrives(operator, args, value.dtype):
            return
        self._kept.averaged(judged)
        if judged.pending.old is not None and self._kept.keeps(args[0]):
            before, change = summands(judged.pending, judged.local())
            self._kept.changed(value, before, change, judged.describe)
        elif operator in CHANGING:
            for kept in args[: 1 + (operator is aten.mul)]:
                if self._kept.keeps(kept):
                    self._kept.replaced(judged, kept)

    def _compare_sum(self, pending: Pending, value: torch.Tensor, local: torch.Tensor) -> None:
        """Record a sum that has lost terms."""
        wide = value.float()
        error = ratio(float((wide - local).norm()), float(local.norm()))
        if error >= _LOST:
            worst = int((wide - local).abs().argmax())
            given, exact = float(wide.flatten()[worst]), float(local.flatten()[worst])
            record = self._record(pending, value, LostSum, error=error, value=given, exact=exact)
            self._add(pending, record, wide - local)

    def _compare_best(self, pending: Pending, places: torch.Tensor) -> None:
        """Record a top k whose last score ties in enough rows with one that is left out, where the exact scores differ; and hold
        one with scores that are not near the best exact ones."""
        scores, k, *_ = args = pending.given[0]
        twin, describe = self.twin(scores), partial(self._record, pending, scores, text=passed_through(self._narrow))
        if twin is None:
            return
        dim, largest = args[2] if len(args) > 2 else -1, len(args) <= 3 or args[3]
        if share := tied(scores, twin, *args[1:]):
            self._found[Ties].append(describe(Ties, fraction=share, k=k, scores=scores.shape[dim]))
        elif not self._is_of_fp8(scores):
            self._choices.best(places, twin, k, dim, largest, describe)

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
        describe = partial(self._record, pending, result, text=passed_through(self._narrow))
        if operator is aten.argmin:
            self._choices.looked_up(given[0], describe)
        if pending.exact is None:
            if table is not None:
                self._choices.searched(table, describe)
            return
        if operator in ROUNDING:
            self._choices.rounded(result, given[0], pending.arguments[0][0])
        if operator not in CHOOSING | DECIDING or self._is_of_fp8(given[0]):
            # A quantiser rounds on purpose.
            return
        if operator in DECIDING and not all(map(is_finite, numbers_of(given))):
            # Code that looks for infinities is to find them.
            return
        for value, wanted in zip(leaves([result]), leaves([exact]), strict=True):
            if is_integer(value) or value.dtype is torch.bool:
                dim = (*given, None)[1] if operator in BEST else None
                hardly_matters = partial(is_near_tie, pending.arguments[0][0], value, wanted, dim)
                self._choices.chosen(given[0], value, wanted, table, describe, hardly_matters)

    def _compare_errors(self, pending: Pending, value: torch.Tensor, twin: torch.Tensor, inherited: float) -> None:
        """Record a result that is mostly the error of its inputs; ``inherited``: its error relative to the exact one's norm."""
        self._added_back(pending, inherited)
        if not inherited >= _RAISED or self._kept.is_compensated(value) or self._is_error_of_fp8(pending, value, twin):
            return
        before = self._errors_of(leaves(pending.given[0])) if pending.before is None else pending.before
        place = _SATURATING.get(pending.func.overloadpacket)
        is_sign = pending.func.overloadpacket is aten.sign and self._narrow is torch.float16
        is_lost = is_sign or (place is not None and not bool(value.any()))
        if (inherited >= MOSTLY_ERROR and before <= _UNCANCELLED) or is_lost:
            off = value.float() - twin
            origin = self._origins.of([pending.given[0][place] if place else value]) if is_in_forward() or place else ()
            record = self._record(pending, value, AmplifiedError, *origin, before=before, after=inherited)
            record = _at_its_line(record) if place else record
            self._add(pending, record, off)
            if pending.func.overloadpacket in DIFFERENCES:
                self._differences.put(value, record)
        elif is_in_forward() and 0 < before <= inherited / _RAISED_TIMES and pending.func.overloadpacket not in _LOSSES:
            known = self._raised
            if known is None or known.after / known.before < inherited / before:
                origin = self._origins.of([value])
                self._raised = self._record(pending, value, AmplifiedError, *origin, before=before, after=inherited)

    def _added_back(self, pending: Pending, inherited: float) -> None:
        """Discard the record of a difference whose error is small in the sum to which it is added.

        A straight-through estimator adds the difference of a number and its quantised value back to the number.
        """
        if pending.func.overloadpacket in ADDITIONS and self._differences:
            for operand in numbers_of(pending.given[0]):
                record = self._differences.of(operand)
                if record is not None and inherited <= 2 * record.before and record in self._found[AmplifiedError]:
                    self._found[AmplifiedError].remove(record)

    def _with_inherited(self, pending: Pending, record: AbsorbedOperand) -> AbsorbedOperand:
        """Return the record of an addition with the error that its larger operand had before, and the operator that made it."""
        if pending.old is not None:
            # The operand is overwritten.
            return record
        operands = numbers_of(pending.given[0])
        larger, error = max(
            ((each, self._absolute_error(each)) for each in operands), key=lambda each: float(each[0].norm())
        )
        inherited = ratio(error, (record.size or 0.0) * larger.numel() ** 0.5)
        origin = self._origins.worst_of(larger) if inherited >= MOSTLY_ERROR else ()
        return replace(record, inherited=inherited, names=(*record.names, *origin))

    def _absolute_error(self, tensor: torch.Tensor) -> float:
        """Return the norm of the error of a tensor."""
        twin = self.twin(tensor)
        return 0.0 if twin is None else distance(tensor, twin)

    def _is_error_of_fp8(self, pending: Pending, value: torch.Tensor, twin: torch.Tensor) -> bool:
        """Return whether a difference, or a loss, is that of numbers and the same in FP8, as in a straight-through estimator."""
        is_loss = pending.func.overloadpacket in _LOSSES
        if not (is_loss or pending.func.overloadpacket in DIFFERENCES) or not self._is_of_fp8(value):
            return False
        operands = numbers_of(pending.arguments[0])
        difference = distance(*operands[:2]) if is_loss else float(twin.norm())
        return difference <= ZERO_BUT_FOR_ROUNDING * max(map(float, map(torch.norm, operands)))

    def _is_of_fp8(self, tensor: Any) -> bool:
        """Return whether a cast to FP8 made most of a tensor's error."""
        origin = self._origins.worst_of(tensor) if isinstance(tensor, torch.Tensor) else ()
        return "".join(origin[-1:]).startswith("float8")

    def _add(self, pending: Pending, record: Record, off: torch.Tensor) -> None:
        """Add the record of an operator's result; ``off``: its error, whose effect on the loss may become known."""
        self._found[type(record)].append(record)
        if pending.node is not None:
            self._effects.add(record, pending.node, off)

    def _raising(self, pending: Pending, value: torch.Tensor) -> GradientsError:
        operands = numbers_of(pending.given[0]) if is_in_forward() else []
        origin = next(filter(None, map(self._origins.worst_of, operands)), ())
        record: GradientsError = self._record(pending, value, GradientsError, "", *origin)
        placed: GradientsError = self._placed(record)
        is_narrow = value.dtype in OF_NARROW.narrow
        return placed if is_narrow else replace(placed, text=passed_through(self._narrow))

    def _placed(self, record: Any) -> Any:
        """Return a record of a backward with its line: that of a function whose backward is Python code, or the forward's."""
        is_python = isinstance(torch._C._current_autograd_node(), torch.autograd.function.BackwardCFunction)
        return _at_its_line(record) if is_python else self._makers.placed(record)

    def _placing(self, describe: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that makes a record as another one does, at its line."""
        return lambda kind, **figures: self._placed(describe(kind, **figures))

    def takes(self, gradients: Iterable[Any]) -> None:
        """Search the gradients that an optimizer takes for zeros that FP16 has made outside of a backward."""
        with _disable_current_modes():
            twins = ((each, self.twin(each)) for each in gradients if has_numbers(each))
            self._flushes.taken_as_gradients((each, each if twin is None else twin) for each, twin in twins)

    # -- the end ----------------------------------------------------------------------------------------------------

    def records(self) -> list[Record]:
        """Return the first operator that broke, the operators that lose most, and the error of the gradients."""
        errors = self._all_errors()
        worst, whose = _worst_of(errors)
        of_all = self._of_all_gradients(errors, self._growth, self._narrow, _OUTPUTS_OFF if self._outputs else _OFF)
        if self._exchanged and of_all:
            worst = of_all[0].error
        if self._numbers.found is not None:
            self._found[Positions].append(self._numbers.found)
        self._read_back.clear()
        found = [*self._kept.records(), *self._divided.records(), *self._flushes.taken[:1], *self._flushes.of_gradients]
        of_fp8 = (self._casts_to_fp8, self._flushes.casts, self._flushes.clamps)
        found += [each for by_line in (*of_fp8, self._coarse) for each in by_line.values()]
        firsts: tuple[type[Record], ...] = (ChangedIntegers, InfiniteDivisor, Positions, ReadNumber, StaleCasts, Ties)
        found += self._broken.records()
        found += [each for kind in firsts for each in self._found[kind][:1]]
        found += [*self._edges.records(), *self._choices.used, *filter(None, [self._nearest_end])]
        # A larger error in an addition of its own does not make up for a sum that stopped.
        sums = self._additions.sums.records()
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
            for each in (*weighed[-1:], *others[-1:]):
                reached = self._reached_by(each, errors)
                found.append(_with_gradients(each, *(_worst_of(reached) if reached else (worst, whose))))
        is_useless = worst is not None and worst >= _USELESS_GRADIENTS
        if self._raised is not None and is_useless and not any(isinstance(each, _LOSING) for each in found):
            found.append(_with_gradients(self._raised, worst, whose))
        self._end()
        return [*found, *of_all]

    def _reached_by(self, record: Record, errors: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        """Return the errors of the weights that an operator's inputs were computed from; none if these are not known."""
        reached = self._effects.reached(record)
        names = {name for name, parameter in self._parameters if id(parameter) in reached}
        return {name: error for name, error in errors.items() if name in names}

    def _end(self) -> None:
        super()._end()
        self._effects.clear()


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


def _with_gradients(record: Any, error: float | None, whose: str) -> Record:
    found: Record = replace(record, gradients_error=error, names=(*record.names[:3], whose, *record.names[3:]))
    return found
