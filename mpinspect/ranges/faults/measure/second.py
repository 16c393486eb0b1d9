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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch._C._autograd import _get_sequence_nr

from mpinspect.numeric.exponents import ratio
from mpinspect.ranges.capture.graph import operator_of
from mpinspect.ranges.capture.tally import dtype_name, passed_through
from mpinspect.ranges.faults.measure.choices import CHOOSING, ROUNDING, SEARCHING, Choices
from mpinspect.ranges.faults.measure.flushed import DividedGradients, Flushes
from mpinspect.ranges.faults.measure.kept_sums import CHANGING, CHANGING_IN_PLACE, KeptSums, arrives
from mpinspect.ranges.faults.measure.origins import Origins
from mpinspect.ranges.faults.measure.powers import rows
from mpinspect.ranges.faults.measure.rounded_numbers import RoundedNumbers, coarse_difference
from mpinspect.ranges.faults.measure.twins import (
    TWIN_DTYPES,
    Marks,
    Twins,
    distance,
    have_one_layout,
    is_equal,
    is_finite,
    storage_key,
)
from mpinspect.ranges.records import (
    AbsorbedOperand,
    AmplifiedError,
    BornInfinite,
    BrokenAlike,
    CalledLines,
    CastToFP8,
    ChangedIntegers,
    LostSum,
    OverflowedNorm,
    Positions,
    Record,
    RoundedArgument,
    Ties,
)
from mpinspect.reporting.words import filled, number_of
from mpinspect.runtime.device import free_memory
from mpinspect.runtime.outputs import leaves
from mpinspect.runtime.user_line import innermost_line

aten = torch.ops.aten

NARROW = (torch.float16, torch.bfloat16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Sums of many terms, whose rounding errors add up.
SUMS = frozenset(
    {
        *(aten.sum, aten.mean, aten.cumsum, aten.index_add, aten.index_add_, aten.index_put, aten.index_put_),
        *(aten._index_put_impl_, aten.scatter_add, aten.scatter_add_, aten.scatter_reduce, aten.var, aten.std),
        *(aten.linalg_vector_norm, aten.norm, aten.logsumexp, aten.var_mean, aten.embedding_dense_backward),
    }
)
ADDITIONS = frozenset({aten.add, aten.add_, aten.sub, aten.sub_})
_DIFFERENCES = ADDITIONS | {aten.rsub}
#: Losses that are differences, whose result is a single number.
_LOSSES = frozenset({aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss})
#: Operators that may make a large relative error of a small one.
_AMPLIFYING = (
    _DIFFERENCES
    | {aten.lerp_}
    | _LOSSES
    | {*(aten.sin, aten.cos, aten.tan, aten.exp, aten.log, aten.pow, aten.remainder, aten.fmod, aten.floor)}
)
_PRODUCTS = frozenset({aten.mm, aten.addmm})
#: Multiplications from which on a product takes longer than choosing its kernel.
_LARGE_PRODUCT = 1 << 24
#: Operators that change no value but by its dtype.
_CASTS = frozenset({aten._to_copy, aten.copy_, aten.clone, aten.cat, aten.stack, aten.index, aten.index_select})
#: Operators that are infinite, or have an infinite derivative, at zero, and the place of the argument.
_EDGES = {
    **dict.fromkeys((aten.sqrt, aten.rsqrt, aten.log, aten.log2, aten.log10, aten.reciprocal, aten.pow), 0),
    aten.div: 1,
}
#: Operators whose calls have their lines recorded: a later step, which is not computed twice, may break in one of them.
_AT_EDGES = frozenset({*_EDGES, aten.exp, aten.log1p})
#: The most such calls of an operator.
_MOST_CALLS = 8
#: Operators whose result has values of their first argument.
_CARRYING = _CASTS | {aten.clamp, aten.clamp_min, aten.clamp_max, aten.relu, aten.abs}
#: Operators that are given a bound or an epsilon, and those that pass on an element that equals it.
_BOUNDING = frozenset(
    {*(aten.clamp, aten.clamp_, aten.clamp_min, aten.clamp_min_), *(aten.clamp_max, aten.clamp_max_, aten.add)}
)
_AFFINE = frozenset({aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.sqrt, aten.neg})
#: The relative error up to which an element equals the number that it follows from.
_SAME = 0.01
#: Operators whose result is zero, or much too small, if their argument is.
_PASSING = _CASTS | {aten.mul, aten.div, aten.sqrt, aten.sum, aten.mean}
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
#: Beginnings of the names of operators that a backend implements as it likes.
_BACKENDS = ("mkldnn", "mkl", "cudnn", "miopen", "thnn", "fused", "xnnpack", "quantize", "weight_int", "batch_norm")
#: Bytes of twins, and seconds, after which the rest of the step is left out.
_MOST_BYTES, _MOST_SECONDS = 2 << 30, 20.0
#: The logarithm of FP16's largest number.
_LARGEST_EXPONENT = math.log(65504)
#: The most modules in which infinite divisors are recorded.
_MOST_NORMS = 3
#: Bytes of errors that are held until the gradient at their operator's result is known.
_MOST_ERRORS = 64 << 20
#: The most operators that are named as left out.
_MOST_NAMED = 5
#: The most lines on which one operator is named as infinite.
_MOST_LINES = 5
#: The least local error of a sum, relative to the norm of its exact result. Rounding a sum once makes at most 2^-9 in BF16.
_LOST = 0.03
#: The part of a sum from which on rounding can't take half of an operand, by 4.
_LEAST_KEPT = 2.0**-6
#: The least part of the smaller operand that an addition loses, of its norm.
_ABSORBED = 0.5
#: The least relative error of a running sum: the rounding of terms that are not lost makes far less.
_SUM_OFF = 0.1
#: The least number of elements of an addition that is judged: a few may be absorbed by chance.
_FEWEST = 64
#: The same of a difference, which is judged by the norm of all its elements, such as one for each channel.
_FEWEST_OF_ONE = 16
#: The fewest rows of scores of which a top k is judged, and the least share of them whose choice is arbitrary.
_FEWEST_ROWS, _LEAST_TIED = 8, 0.01
#: The least error of an argument near zero, relative to its exact value.
_FAR_OFF = 0.5
#: The inherited error after a difference, and before it.
_CANCELLED, _UNCANCELLED = 0.3, 0.05
#: The overloads of single operators, by those of foreach operators.
_SINGLE = {"Scalar": "Scalar", "List": "Tensor", "Tensor": "Tensor", "ScalarList": "Scalar", "": "default"}


class Bound(NamedTuple):
    """A number of the script that rounding changes to a whole number, and the value of an element that equals it.

    Args:
        names: the operator that was given the number, and its line.
        bound, rounded, nearest: the number, its value in the tensor's dtype, and the nearest other value there.
        exact, given: the element that follows from the number, and from its rounded value.
    """

    names: tuple[str, str]
    bound: float
    rounded: float
    nearest: float
    exact: float
    given: float


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
        frame: its caller's, once it has run.
        place: among the operators that a foreach operator stands for; None if it is no foreach operator.
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
        #: The operators of a forward with their lines, by the sequence number of their autograd node; rounded bounds by storage.
        self._makers: dict[int, tuple[str, str]] = {}
        self._bounds: Marks[Bound] = Marks()
        #: Why the rest of the step was left out; "" if it was not.
        self._ended_by = ""
        self._began = time.perf_counter()
        #: The 16-bit dtype of the last operator that had one.
        self._narrow: torch.dtype = torch.bfloat16
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
        #: By operator, the argument near zero that was furthest from its exact value.
        self._arguments: dict[str, RoundedArgument] = {}
        #: The lines of sums and differences, by the storage of their result.
        self._lines_of: Marks[str] = Marks()
        self._origins = Origins()
        #: Additions of few elements, by line: each alone may be absorbed by chance.
        #: Each has the relative error of its result.
        self._repeated: defaultdict[str, list[tuple[AbsorbedOperand, float]]] = defaultdict(list)
        #: The largest argument of the first exponential in FP32 that FP16 can't hold, and its line.
        self._exponent: tuple[float, str] | None = None
        #: The lines of the calls that may be infinite, by operator.
        self._calls: defaultdict[str, list[str]] = defaultdict(list)
        #: The first difference of numbers too large for FP32 at each line.
        self._coarse: dict[str, AmplifiedError] = {}

    # -- the operators ----------------------------------------------------------------------------------------------

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Pending]:
        """Prepare an operator's second run, or those of the operators that a foreach operator stands for.

        Those whose result more bits would not change, or that can't be prepared, are left out.
        """
        if not isinstance(func, torch._ops.OpOverload):
            return []
        try:
            if func.overloadpacket is aten.exp:
                self._remember_exponent(args[0])
            if func.overloadpacket in _AT_EDGES and _is_in_forward() and _takes_gradient(args):
                self._remember_call(func)
            if func.overloadpacket in _DIFFERENCES and self._readers and not kwargs and _is_in_forward():
                self._subtract_large(func, args)
            if self._errors:
                self._weigh(args)
            if self._choices:
                self._choices.use(func, leaves((*args, *kwargs.values())))
            rows_of = _rows(func, args)
            if rows_of is None:
                return list(filter(None, [self._prepare(func, args, kwargs)]))
            found = [(place, self._prepare(one, row, kwargs)) for place, (one, row) in enumerate(rows_of)]
            return [each._replace(place=place) for place, each in found if each is not None]
        except Exception:
            self.skipped[func.overloadpacket.__name__] += 1
            return []

    def _remember_exponent(self, argument: torch.Tensor) -> None:
        """Remember the argument of an exponential in FP32 whose result is infinite in FP16. Waits for the device."""
        if self._exponent is None and _is_plain(argument) and argument.dtype is torch.float32 and argument.numel():
            largest = float(argument.detach().max())
            if _LARGEST_EXPONENT < largest < math.inf:
                self._exponent = largest, innermost_line(sys._getframe())

    def _remember_call(self, func: Any) -> None:
        """Remember the line of an operator that may be infinite at an edge of its domain."""
        lines = self._calls[func.overloadpacket.__name__]
        if len(lines) <= _MOST_CALLS:
            lines.append(innermost_line(sys._getframe()))

    def _subtract_large(self, func: Any, args: tuple[Any, ...]) -> None:
        """Record a difference of numbers that FP32 had rounded before. Waits for the device."""
        is_sum = func.overloadpacket in (aten.add, aten.add_)
        figures: Any = coarse_difference(args[0], args[1], is_sum)
        if figures is not None:
            line, half = innermost_line(sys._getframe()), figures["unit"] / 2
            names = func.overloadpacket.__name__, line, self._phase
            figures |= {"before": half / figures["largest"], "after": half / figures["typical"]}
            record = AmplifiedError(name=self._module(), names=names, text="float32", **figures)
            self._coarse.setdefault(line, record)

    def _prepare(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pending | None:
        schema = func._schema
        writes = schema.is_mutable
        if self._is_over or (not writes and any(each.alias_info is not None for each in schema.returns)):
            return None
        if _is_cast_to_fp8(func, args, kwargs):
            self._remember_module(func)
            return Pending(func, (args, kwargs), None, None, (args, kwargs), args[0].dtype, False, None, None)
        given = [each for each in leaves((*args, *kwargs.values())) if isinstance(each, torch.Tensor)]
        usable = {id(each): each for each in given if _may_have_twin(each)}
        tensors = list(usable.values())
        mutated = _mutated(func, args, kwargs)
        self._twins.written(each for each in mutated if id(each) in usable)
        is_copied = all(id(each) in usable for each in mutated) and not any(
            _is_strange(each) for each in given if id(each) not in usable
        )
        if not self._is_chosen(func) or func.namespace != "aten" or _is_opaque(func, args) or not is_copied:
            # A collective that ran twice would wait for other ranks, the user's own operators may have effects, and a
            # tensor that is written but has no twin would be written twice.
            self._forget(mutated)
            return None
        has_twin = any(self.twin(each) is not None for each in tensors)
        is_narrow = any(each.dtype in NARROW for each in tensors) or kwargs.get("dtype") in NARROW
        if not (has_twin or is_narrow or func.overloadpacket in SEARCHING):
            return None
        if self._is_used_up():
            self._end()
            return None
        if not _is_in_forward():
            self._divided.backward_runs()
        self._remember_module(func)
        if not _fits(tensors):
            self.skipped["too large"] += 1
            self._forget(mutated)
            return None
        written = {id(each) for each in mutated}
        twins = _mapped(
            lambda each: self._twin_or_wide(each, id(each) in written) if id(each) in usable else _wide(each, False),
            args,
            kwargs,
        )
        exact = (args, kwargs) if has_twin else None
        before = 0.0 if writes else None
        if has_twin and writes:
            exact = _mapped(lambda each: _wide(each, id(each) in written), args, kwargs)
            if func.overloadpacket in _AMPLIFYING:
                before = self._errors_of(tensors)
        dtype = getattr((*args, None)[0], "dtype", None)
        self._narrow = next((each.dtype for each in tensors if each.dtype in NARROW), self._narrow)
        is_cast = func.overloadpacket in _CASTS and all(map(self._twins.is_cast, tensors))
        is_changed = func.overloadpacket in CHANGING_IN_PLACE and dtype in NARROW and _is_in_forward()
        old = args[0].detach().clone() if is_changed else None
        return Pending(func, twins, exact, before, (args, kwargs), dtype, is_cast, _node_of(tensors), old)

    def _remember_module(self, func: Any) -> None:
        """Remember the running module of a forward for the backward of its last node, and the operator that has got the node."""
        if _is_in_forward():
            number = _get_sequence_nr() - 1
            self._modules[number] = self._module()
            if number not in self._makers:
                self._makers[number] = func.overloadpacket.__name__, innermost_line(sys._getframe())

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
        if _is_cast_to_fp8(func, *pending.given):
            self._compare_cast(pending, result)
            return
        results = _plain(result)
        self._kept.ran(func, pending.given[0], results)
        self._read_numbers(pending, result)
        if torch.Tag.nondeterministic_seeded in func.tags or name.startswith(_WITHOUT_RESULT):
            self._forget(results)
            return
        try:
            if func.overloadpacket in _SCALING and results and _is_in_forward():
                self._divided.multiplied(name.rstrip("_"), pending.given[0], pending.old, results[0], frame)
            if func.overloadpacket is aten._to_copy and not results:
                self._compare_integers(pending, result)
                return
            if _is_decision(result):
                self._keep_decision(pending, result)
                return
            if func.overloadpacket is aten._to_copy and self._keep_cast(pending, results[0]):
                return
            if func.overloadpacket is aten.topk:
                self._compare_choice(pending)
            args, kwargs = pending.arguments
            exact = _run(func, args, kwargs)
            self._compare_choices(pending, result, exact)
            twins = _plain(exact)
            given = {storage_key(each) for each in leaves(args) if isinstance(each, torch.Tensor)}
            for place, (value, twin) in enumerate(zip(results, twins, strict=False)):
                if value.numel() and value.shape == twin.shape and twin.dtype == torch.float32:
                    if not place:
                        # Further results serve the backward only, and may be written partially.
                        self._compare(pending, value, twin)
                    self._keep(value, twin, pending.is_cast, is_ours=storage_key(twin) not in given)
                    given.add(storage_key(twin))
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
        """Return whether the time or the memory for twins is used up."""
        if time.perf_counter() - self._began > _MOST_SECONDS:
            self._ended_by = f"after {_MOST_SECONDS:.0f} s"
        elif self._twins.bytes > _MOST_BYTES:
            self._ended_by = f"once its copies took {_MOST_BYTES >> 30} GiB"
        return bool(self._ended_by)

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
        is_rounded = value.dtype in NARROW and _is_in_forward()
        if _is_in_forward():
            self._follow_bound(pending, value)
        if pending.exact is not None and _is_in_forward():
            self._compare_argument(pending, value)
        if not is_finite(value):
            self._compare_broken(pending, value, twin, local())
            return
        if BornInfinite in self._found and _is_in_forward():
            self._compare_quotient(pending, value, twin)
        if pending.node is None and _is_in_forward():
            self._follow_flushed(pending, value, local)
            if is_rounded:
                self._compare_kept(pending, value, twin, local)
        if operator in SUMS and value.dtype in NARROW:
            self._compare_sum(pending, value, local())
        if _is_in_forward():
            operands, origin = _plain(pending.given[0]), partial(self._origin, pending, value)
            self._origins.made(pending.func, operands, value, twin, local, origin, operator in SUMS)
        if operator in _AMPLIFYING:
            if operator in ADDITIONS and is_rounded:
                self._compare_addition(pending, value, twin, local)
            if value.numel() >= _FEWEST_OF_ONE or operator in _LOSSES:
                self._compare_errors(pending, value, twin)

    def _follow_bound(self, pending: Pending, value: torch.Tensor) -> None:
        """Follow a bound or an epsilon that rounding changes through operators of one tensor and numbers."""
        func, (first, *others), kwargs = pending.func, *pending.given
        operator, known = func.overloadpacket, self._bounds.of(first) if _is_plain(first) else None
        numbers = [each for each in (*others, *kwargs.values()) if type(each) in (int, float)]
        is_of_numbers = not any(isinstance(each, torch.Tensor) for each in others)
        if operator in _BOUNDING and is_of_numbers and value.dtype in NARROW:
            found = filter(None, (_rounded(each, value.dtype) for each in numbers))
            if whole := next(found, None):
                names = operator.__name__, innermost_line(pending.frame)
                self._bounds.put(value, Bound(names, *whole, exact=whole[0], given=whole[1]))
                return
        if known is not None and operator in _AFFINE and is_of_numbers:
            exact, given = (
                float(func(torch.tensor(each, dtype=torch.float64, device="cpu"), *others, **kwargs))
                for each in known[-2:]
            )
            known = known._replace(exact=exact, given=given)
        elif operator not in _CARRYING:
            known = None
        if known is not None:
            self._bounds.put(value, known)

    def _compare_argument(self, pending: Pending, value: torch.Tensor) -> None:
        """Record an argument near zero, where an operator is singular, that is mostly rounding error."""
        operator, given = pending.func.overloadpacket, pending.given[0]
        if operator in _DIFFERENCES:
            self._lines_of.put(value, innermost_line(pending.frame))
        elif operator in _CARRYING and _is_plain(given[0]) and (line := self._lines_of.of(given[0])):
            self._lines_of.put(value, line)
        is_smooth = operator is aten.pow and not (isinstance(given[1], (int, float)) and given[1] < 1)
        if operator not in _EDGES or is_smooth or not _is_plain(argument := given[_EDGES[operator]]):
            return
        exact = pending.arguments[0][_EDGES[operator]]
        # An exact zero is the script's own.
        error = ((argument.float() - exact) / exact).abs().nan_to_num(0, 0)
        worst, elements = int(error.argmax()), float((error >= _FAR_OFF).sum())
        name = operator.__name__
        if not elements or (name in self._arguments and elements <= self._arguments[name].elements):
            return
        figures = {"given": float(argument.flatten()[worst]), "exact": float(exact.flatten()[worst])}
        line = self._lines_of.of(argument) or ""
        names: tuple[str, ...] = (line,)
        bound = self._bounds.of(argument)
        if (
            bound is not None
            and math.isclose(bound.exact, figures["exact"], rel_tol=_SAME)
            and bound.given == figures["given"]
        ):
            names = (line, *bound.names)
            figures |= {"bound": bound.bound, "rounded": bound.rounded, "nearest": bound.nearest}
        figures |= {"elements": elements, "of": error.numel()}
        self._arguments[name] = self._record(RoundedArgument, pending, argument, *names, **figures)

    def _follow_flushed(self, pending: Pending, value: torch.Tensor, local: Callable[[], torch.Tensor]) -> None:
        """Follow values that FP16 has flushed into a tensor that persists from step to step."""
        args, operator = pending.given[0], pending.func.overloadpacket
        is_kept = pending.func._schema.is_mutable and self._kept.keeps(args[0])
        if is_kept or operator in _PASSING:
            self._flushes.passed_on(args[is_kept:], value, is_kept)
        if value.dtype is torch.float16 and not is_kept:
            self._flushes.made(value, local(), partial(self._record, pending=pending, result=value))

    def _compare_cast(self, pending: Pending, value: torch.Tensor) -> None:
        """Record that there are casts to FP8, and judge one, also of a backward."""
        self._found[CastToFP8] = self._found[CastToFP8] or [self._record(CastToFP8, pending, value)]
        source = pending.given[0][pending.func.overloadpacket is aten.copy_]
        if not (_is_plain(source) and source.shape == value.shape and source.numel()):
            return
        describe = partial(self._record, pending=pending, result=value, text=passed_through(value.dtype))
        self._flushes.cast(value, source, lambda kind, **figures: _at_its_line(describe(kind, **figures)))

    def _compare_kept(
        self, pending: Pending, value: torch.Tensor, twin: torch.Tensor, local: Callable[[], torch.Tensor]
    ) -> None:
        """Judge a change of a tensor that persists from step to step."""
        args, operator = pending.given[0], pending.func.overloadpacket
        if arrives(operator, args, value.dtype):
            return
        describe = partial(self._record, pending=pending, result=value)
        self._kept.averaged(operator, args, pending.old, (value, twin), describe)
        if pending.old is not None and self._kept.keeps(args[0]):
            before, change = _operands(pending, local())
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
            self._add(LostSum, pending, value, wide - local, error=error, value=given, exact=exact)

    def _compare_broken(self, pending: Pending, value: torch.Tensor, twin: torch.Tensor, local: torch.Tensor) -> None:
        """Record infinities and NaNs: which are of the precision, and which the exact computation has too."""
        broken, of = ~value.isfinite(), float(value.numel())
        born, of_precision = broken & local.isfinite(), broken & twin.isfinite()
        if bool(born.any()) and value.dtype in NARROW:
            self._born(pending, value, born, largest=float(local[born].abs().max()))
        elif self._found.get(BornInfinite):
            return
        elif bool(of_precision.any()):
            self._born(pending, value, of_precision, largest=0.0)
        else:
            # Masks and logarithms of zero give -inf, which softmax and sums of exponentials take.
            broken &= value != -torch.inf
            if bool(broken.any()):
                # An operator that overwrote its input can't show it.
                is_seen = not pending.func._schema.is_mutable
                from_finite = is_seen and all(map(is_finite, _plain(pending.given[0])))
                figures = {"elements": float(broken.sum()), "of": of, "from_finite": from_finite}
                self._found[BrokenAlike].append(self._record(BrokenAlike, pending, value, **figures))

    def _born(self, pending: Pending, value: torch.Tensor, where: torch.Tensor, largest: float) -> None:
        """Record an infinity or NaN of the precision, with the operators before it that lead to it."""
        figures = {"elements": float(where.sum()), "of": float(value.numel()), "largest": largest}
        line, operands = "", _plain(pending.given[0])
        names: tuple[str, ...] = ()
        if self._exponent is not None and largest and pending.func.overloadpacket in _CASTS:
            figures["exponent"], line = self._exponent
        elif _is_in_forward() and not largest:
            names = self._origins.of(operands)
        elif _is_in_forward() and (near := self._origins.of_overflow(operands, largest)):
            names, figures["near"] = near.names, near.largest
        record = self._record(BornInfinite, pending, value, line, *names, **figures)
        self._found[BornInfinite].append(self._at_its_maker(record))

    def _at_its_maker(self, record: Any) -> Any:
        """Return a record of a backward with the operator of the forward and its line, without a line if that is not known."""
        node = torch._C._current_autograd_node()
        if node is None:
            return record
        operator, line = self._makers.get(node._sequence_nr(), ("", ""))
        if operator_of(node).lower() != operator.replace("_", ""):
            operator, line = record.names[0], ""
        return replace(record, names=(operator, line, *record.names[2:]))

    def _compare_quotient(self, pending: Pending, value: torch.Tensor, twin: torch.Tensor) -> None:
        """Record an infinity that 16 bits have made and whose quotients are zero: finite, and all values lost."""
        is_zero = (value == 0) & (twin.abs() >= torch.finfo(value.dtype).tiny)
        if not bool(is_zero.any()):
            return
        both = zip(leaves(pending.given[0]), leaves(pending.arguments[0]), strict=True)
        divisors = [each.isinf() & exact.isfinite() for each, exact in both if _is_plain(each) and _is_plain(exact)]
        infinite = next((each for each in divisors if bool(each.any())), None)
        norms, of = self._found[OverflowedNorm], 0 if infinite is None else infinite.numel()
        if infinite is None or len(norms) == _MOST_NORMS or self._module() in [each.name for each in norms]:
            return
        text = f"{dtype_name(self._narrow)} {pending.func.overloadpacket.__name__}"
        figures = {"elements": float(infinite.sum()), "of": of, "is_by_row": of > 1 and infinite.shape[-1] == 1}
        norms.append(self._record(OverflowedNorm, pending, value, text=text, **figures))

    def _compare_addition(
        self, pending: Pending, value: torch.Tensor, twin: torch.Tensor, local: Callable[[], torch.Tensor]
    ) -> None:
        """Record an operand that the other one absorbs; of small tensors, the additions at one line together."""
        is_in_place = pending.func._schema.is_mutable
        given = pending.given[0][:2]
        if is_in_place and pending.node is None and self._kept.keeps(given[0]):
            return
        # Of a result that is no tensor of the script's own yet, a few elements are worth a look.
        is_kept = pending.node is None and value.numel() < _FEWEST and any(map(self._kept.keeps, given))
        if not (is_in_place or is_kept) and (not _are_alike(given, value) or _are_comparable(pending, value)):
            # A small number, as against a division by zero, may be lost; a running sum in place may not.
            return
        wide, operands = value.float(), _operands(pending, local())
        if is_kept and not is_in_place and len(operands) == 2:
            describe = partial(self._record, pending=pending, result=value)
            by_size = sorted(zip(operands, given, strict=True), key=lambda each: float(each[0].abs().max()))
            if self._kept.keeps(by_size[1][1]):
                self._kept.added(value, by_size[1][0], by_size[0][0], describe)
        if not _are_alike(operands, value):
            return
        least = min(float(each.norm()) for each in operands)
        error = float((wide - local()).norm())
        if not least or (value.numel() >= _FEWEST and error < _ABSORBED * least):
            return
        equals_one = (wide == operands[0]).logical_or(wide == operands[1])
        unchanged = float((local() != 0).logical_and(equals_one).float().mean())
        figures = {"error": error / least, "unchanged": unchanged, "size": least / value.numel() ** 0.5}
        if value.numel() >= _FEWEST:
            self._add(AbsorbedOperand, pending, value, wide - local(), **figures)
        else:
            record = self._record(AbsorbedOperand, pending, value, **figures)
            self._repeated[record.names[1]].append((record, _relative(value, twin)))

    def _compare_choice(self, pending: Pending) -> None:
        """Record a top k whose last score ties, in enough rows, with one that is left out, where the exact scores differ."""
        scores, k, dim, largest, _ = (*pending.given[0], -1, True, True)[:5]
        twin = self.twin(scores)
        if (
            twin is None
            or not largest
            or not 0 < k < scores.shape[dim]
            or scores.numel() < _FEWEST_ROWS * scores.shape[dim]
        ):
            return
        best, exact = (each.topk(k + 1, dim).values.movedim(dim, -1)[..., -2:] for each in (scores, twin))
        last = best[..., 0]
        # Ties at zero (of a ReLU) or infinity (of a mask), and those that the exact scores have too, are not rounding's.
        is_tied = (last == best[..., 1]) & (exact[..., 0] != exact[..., 1]) & (last != 0) & last.isfinite()
        share = float(is_tied.float().mean())
        if share >= _LEAST_TIED:
            figures = {"fraction": share, "k": k, "scores": scores.shape[dim], "text": dtype_name(self._narrow)}
            self._found[Ties].append(self._record(Ties, pending, scores, **figures))

    def _compare_integers(self, pending: Pending, value: Any) -> None:
        """Record whole numbers that were rounded before they are made integers."""
        exact = pending.arguments[0][0]
        if not _is_integer(value) or pending.exact is None:
            return
        if not pending.is_cast or not bool((exact == exact.round()).all()):
            self._compare_choices(pending, value, exact.to(value.dtype))
            return
        differ = (value.float() - exact).abs()
        if bool(differ.any()):
            worst = int(differ.argmax())
            given, wanted = float(value.flatten()[worst]), float(exact.flatten()[worst])
            changed, of = float(differ.count_nonzero()), float(value.numel())
            record = self._record(ChangedIntegers, pending, value, changed=changed, of=of, given=given, exact=wanted)
            self._found[ChangedIntegers].append(record)

    def _compare_choices(self, pending: Pending, result: Any, exact: Any) -> None:
        """Record integers and masks that follow from rounding errors."""
        operator, given = pending.func.overloadpacket, pending.given[0]
        table = given[SEARCHING[operator]] if operator in SEARCHING else None
        if not _is_in_forward():
            return
        describe = partial(self._record, pending=pending, result=result, text=dtype_name(self._narrow))
        if pending.exact is None:
            if table is not None:
                self._choices.searched(table, describe)
            return
        if operator in ROUNDING:
            self._choices.rounded(result, given[0], pending.arguments[0][0])
        if operator not in CHOOSING | _DECIDING:
            return
        for value, wanted in zip(leaves([result]), leaves([exact]), strict=True):
            if _is_integer(value) or value.dtype is torch.bool:
                self._choices.chosen(given[0], value, wanted, table, describe)

    def _compare_errors(self, pending: Pending, value: torch.Tensor, twin: torch.Tensor) -> None:
        """Record a result that is mostly the error of its inputs."""
        inherited = _relative(value, twin)
        if not inherited >= _CANCELLED or self._kept.is_compensated(value):
            return
        before = self._errors_of(leaves(pending.given[0])) if pending.before is None else pending.before
        if before <= _UNCANCELLED:
            off = value.float() - twin
            origin = self._origins.of([value]) if _is_in_forward() else ()
            self._add(AmplifiedError, pending, value, off, *origin, before=before, after=inherited)

    def _add(
        self, kind: type[Any], pending: Pending, result: torch.Tensor, off: torch.Tensor, *names: str, **figures: float
    ) -> None:
        """Record an operator's result; ``off``: its error, whose effect on the loss may become known."""
        record = self._record(kind, pending, result, *names, **figures)
        self._found[kind].append(record)
        if pending.node is not None and self._errors_bytes + off.nbytes <= _MOST_ERRORS:
            self._errors[pending.node] = off
            self._errors_bytes += off.nbytes
            self._nodes[id(record)] = pending.node

    def _weigh(self, args: tuple[Any, ...]) -> None:
        """Multiply the error of an operator, whose backward is running, by the gradient of the loss at its result."""
        node = torch._C._current_autograd_node()
        if node is None:
            return
        number = node._sequence_nr()
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

    def _origin(self, pending: Pending, result: torch.Tensor) -> tuple[str, ...]:
        """Return the operator, line, module and dtype of a result."""
        record = self._record(Record, pending, result)
        return *record.names[:2], record.name, record.text

    def _record(self, kind: type[Any], pending: Pending, result: Any, *names: str, **figures: Any) -> Any:
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

    # -- the end ----------------------------------------------------------------------------------------------------

    def records(self) -> list[Record]:
        """Return the first operator that broke, the operators that lose most, and the error of the gradients."""
        worst, whose = self._gradients_error()
        if self._numbers.found is not None:
            self._found[Positions].append(self._numbers.found)
        found = [*self._kept.records(), *self._divided.records(), *self._flushes.taken[:1]]
        found += [*self._flushes.casts.values(), *self._coarse.values()]
        firsts: tuple[type[Record], ...] = (BornInfinite, BrokenAlike, CastToFP8, ChangedIntegers, Positions, Ties)
        # Broken weights break all that follows; an operator with finite inputs is a cause of its own.
        self._found[BrokenAlike].sort(key=lambda each: not getattr(each, "from_finite", False))
        for kind in firsts:
            found += self._found.get(kind, [])[:1]
        calls = ((name, lines) for name, lines in self._calls.items() if len(lines) <= _MOST_CALLS)
        found += [CalledLines(names=tuple(lines), text=name) for name, lines in calls]
        found += [*self._further(BornInfinite), *self._further(BrokenAlike)]
        found += [*self._found[OverflowedNorm], *self._arguments.values(), *self._choices.used]
        # A larger error in an addition of its own does not make up for a sum that stopped.
        found += [_with_gradients(each, worst, whose) for each in _running_sums(self._repeated.values())]
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

    def _further(self, kind: type[Record]) -> Iterator[Record]:
        """Yield records of further lines on which the operator of the first record of a forward breaks by itself."""
        found = self._found.get(kind, [])
        seen = [each.names[1] for each in found[:1]]
        for each in found[1:]:
            is_cause = getattr(each, "largest", 0.0) or getattr(each, "from_finite", False)
            is_alike = each.names[0] == found[0].names[0] and found[0].names[2] == each.names[2] == "forward"
            if is_cause and is_alike and each.names[1] not in seen and len(seen) < _MOST_LINES:
                seen.append(each.names[1])
                yield each

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
        self._makers.clear()

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
        return max((self._error(each) for each in tensors if _is_plain(each)), default=0.0)

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
        is_exact = not _is_plain(source) or (source.dtype in NARROW and self.twin(source) is None)
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
                self._compare_choices(pending, value, decided)
                self._twins.add(value, decided, is_cast=False)
                return
        self._forget([value])

    def _forget(self, results: list[torch.Tensor]) -> None:
        """Take results as exact."""
        self._twins.forget(each for each in results if _is_plain(each) or _is_decision(each))


def _rounded(number: float, dtype: torch.dtype) -> tuple[float, float, float] | None:
    """Return a number, its value in a 16-bit dtype and the nearest other one there; None unless rounding makes it a whole one."""
    value = torch.tensor(number, dtype=dtype, device="cpu")
    rounded = float(value)
    if not math.isfinite(rounded) or rounded == number or rounded != round(rounded):
        return None
    nearest = (value.view(torch.int16) + (1 - 2 * (abs(number) < abs(rounded)))).view(dtype)
    return number, rounded, math.copysign(float(nearest), number)


def _at_its_line(record: Any) -> Any:
    """Return a record of a backward with the class of a function whose backward is Python code; without a line for others."""
    node = torch._C._current_autograd_node()
    if node is None:
        return record
    operator, line, phase = record.names
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return replace(record, names=(operator, line, f"backward of {type(node).__name__.removesuffix('Backward')}"))
    # The line of torch's own nodes is the one that calls the backward.
    return replace(record, names=(operator, "", phase))


def _is_cast_to_fp8(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator casts to FP8, or copies into a tensor in FP8."""
    operator = func.overloadpacket
    return (operator is aten._to_copy and kwargs.get("dtype") in _FP8) or (
        operator is aten.copy_ and args[0].dtype in _FP8
    )


def narrow_storages(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[int, str]:
    """Return the names of the 16-bit tensors by storage."""
    return {storage_key(each): name for name, each in tensors if _is_plain(each) and each.dtype in NARROW}


def _relative(value: torch.Tensor, twin: torch.Tensor) -> float:
    """Return the distance of a tensor from its twin, relative to the twin's norm."""
    return ratio(distance(value, twin), float(twin.norm()))


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


def local_result(pending: Pending, twin: torch.Tensor) -> torch.Tensor:
    """Return an operator's first result in FP32, from its arguments as they are."""
    if pending.exact is None:
        return twin
    args, kwargs = pending.exact
    if not pending.func._schema.is_mutable:
        args, kwargs = _mapped(lambda each: _wide(each, False), args, kwargs)
    return _plain(pending.func(*args, **kwargs))[0]


def _operands(pending: Pending, total: torch.Tensor) -> list[torch.Tensor]:
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


def _running_sums(repeated: Iterable[list[tuple[AbsorbedOperand, float]]]) -> Iterator[AbsorbedOperand]:
    """Yield a record for each line whose many small additions together lose most of the terms, or a part of the last sum."""
    for each in repeated:
        additions, off = [record for record, _ in each], each[-1][1]
        lost = math.hypot(*(each.error * (each.size or 0) for each in additions))
        terms = math.hypot(*(each.size or 0 for each in additions))
        times = len(additions)
        unchanged = sum(each.unchanged for each in additions) / times
        # The rounding of a state, as of a recurrent network, adds up to as much, but it changes with every step.
        has_stopped = off >= _SUM_OFF and unchanged >= _SUM_OFF / 2
        if times >= _FEWEST and (lost >= _ABSORBED * terms or has_stopped):
            yield replace(
                additions[-1], error=lost / terms, unchanged=unchanged, size=terms / times**0.5, times=float(times)
            )


def _with_gradients(record: Any, error: float | None, whose: str) -> Record:
    found: Record = replace(record, gradients_error=error, names=(*record.names[:3], whose, *record.names[3:]))
    return found


def _is_plain(value: Any) -> bool:
    """Return whether a value is a strided floating-point tensor of torch's own class, in 32 bits or fewer."""
    return isinstance(value, torch.Tensor) and value.dtype is not torch.bool and _may_have_twin(value)


def _may_have_twin(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is strided, of torch's own class, and one of decisions, or of numbers in 32 bits or fewer."""
    return tensor.dtype in TWIN_DTYPES and not tensor.is_meta and not _is_strange(tensor)


def _is_integer(value: Any) -> bool:
    """Return whether a value is a tensor of integers."""
    return isinstance(value, torch.Tensor) and not (
        value.is_floating_point() or value.is_complex() or value.dtype is torch.bool
    )


def _is_in_forward() -> bool:
    return torch._C._current_autograd_node() is None


def _node_of(tensors: list[torch.Tensor]) -> int | None:
    """Return the sequence number of the autograd node that an operator on these tensors has got; None if it has none."""
    if torch._C._current_autograd_node() is not None or not torch.is_grad_enabled():
        return None
    return next((_get_sequence_nr() - 1 for each in tensors if each.requires_grad), None)


def _takes_gradient(args: tuple[Any, ...]) -> bool:
    """Return whether an operator on these arguments gets an autograd node."""
    return torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in args)


def _is_decision(value: Any) -> bool:
    """Return whether a value is a strided tensor of decisions, of torch's own class."""
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool and _may_have_twin(value)


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


def _mapped(
    function: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an operator's arguments, each replaced by what a function returns for it, those of its lists too."""

    def replaced(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [function(each) for each in value]
        return function(value)

    return tuple(map(replaced, args)), {name: replaced(value) for name, value in kwargs.items()}


def _plain(result: Any) -> list[torch.Tensor]:
    return [each for each in leaves((result,)) if _is_plain(each)]


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
        return TWIN_DTYPES.get(value, value)
    if is_mutated and value.dtype == torch.float32:
        return value.clone()
    return value.float()


def _mutated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
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


def _are_alike(operands: Sequence[Any], value: torch.Tensor) -> bool:
    """Return whether two operands are tensors of the result's shape."""
    return len(operands) == 2 and all(isinstance(each, torch.Tensor) and each.shape == value.shape for each in operands)


def _are_comparable(pending: Pending, value: torch.Tensor) -> bool:
    """Return whether no operand of an addition is so small that half of it may be lost: rounding takes 2^-9 of the result."""
    operands, numbers = pending.given
    if numbers or value.numel() < _FEWEST:
        return False
    return min(float(each.float().norm()) for each in operands[:2]) > _LEAST_KEPT * float(value.norm())


def _rows(func: Any, args: tuple[Any, ...]) -> list[tuple[Any, tuple[Any, ...]]] | None:
    """Return the operators and arguments that a foreach operator stands for; None of another."""
    name = func.overloadpacket.__name__
    if not name.startswith("_foreach_"):
        return None
    single = getattr(getattr(aten, name.removeprefix("_foreach_"), None), _SINGLE.get(func._overloadname, ""), None)
    if single is None:
        return None
    return [(single, row) for row, _ in rows(args, args[0])]
