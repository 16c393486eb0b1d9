"""Runs each operator of a step once more, on twins of the run's tensors in a wider dtype.

The run's own tensors are neither read late nor written. A twin belongs to a storage, so that views and writes in place need no
bookkeeping; a tensor without one equals its twin.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from types import FrameType
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr
from torch.utils._python_dispatch import _disable_current_modes

from mpinspect.numeric.exponents import ratio
from mpinspect.ranges.capture.graph import operator_of
from mpinspect.ranges.capture.tally import passed_through
from mpinspect.ranges.faults.measure.growth import Growth
from mpinspect.ranges.faults.measure.operands import (
    CASTS,
    SCALED_PRODUCTS,
    Judged,
    Pending,
    clamps_for,
    has_numbers,
    is_decision,
    is_in_forward,
    is_opaque,
    is_strange,
    local_result,
    mapped,
    may_have_twin,
    mutated_by,
    node_of,
    numbers_of,
    single_operators,
    wide_copy,
)
from mpinspect.ranges.faults.measure.twins import (
    FP8,
    OF_FP32,
    OF_NARROW,
    Twins,
    Widening,
    distance,
    have_one_layout,
    is_equal,
    is_finite,
)
from mpinspect.ranges.records import OUTPUTS, GradientsError, Record
from mpinspect.reporting.words import filled, number_of
from mpinspect.runtime.device import computes_in_fp64, free_memory
from mpinspect.runtime.outputs import leaves, tensor_list
from mpinspect.runtime.storages import has_storage, storage_key
from mpinspect.runtime.user_line import innermost_line

aten = torch.ops.aten

_PRODUCTS = frozenset({aten.mm, aten.addmm})
#: Multiplications from which on a product takes longer than choosing its kernel.
_LARGE_PRODUCT = 1 << 24
#: Operators that decide by comparing: in the exact computation a clamp, a `where` and their gradients follow its own decisions.
DECIDING = frozenset(
    {
        *(aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge),
        *(aten.logical_and, aten.logical_or, aten.logical_xor, aten.logical_not),
        *(aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor, aten.bitwise_not),
        *(aten.logical_and_, aten.logical_or_, aten.bitwise_and_, aten.bitwise_or_),
    }
)
#: Operators whose results are not written yet, or have no exact result.
_WITHOUT_RESULT = ("empty", "new_empty", "set_", "resize_")
#: Bytes of twins, and seconds, after which the rest of the step is left out.
_MOST_BYTES, _MOST_SECONDS = 2 << 30, 20.0
#: The most operators that are named as left out.
_MOST_NAMED = 5


class Recomputation:
    """Recomputes a running step with more bits, operator by operator; subclasses judge the results.

    Args:
        module: returns the dotted path of the module that is running.
        parameters: the model's parameters by name, whose gradients are compared in the end.
        widening: the dtypes that are recomputed, and that of the twins.
    """

    #: Recomputes the optimizer that is stepping; None while none is.
    of_optimizer: Recomputation | None = None
    #: The computation whose results this one judges; None for those of the run.
    judged: Recomputation | None = None
    #: Begins the sentence on operators that were left out.
    LEFT_OUT = "Left out of the second computation of a step: {}"

    def __init__(
        self,
        module: Callable[[], str],
        parameters: Iterable[tuple[str, torch.nn.Parameter]] = (),
        widening: Widening = OF_NARROW,
    ) -> None:
        self._module, self._parameters = module, list(parameters)
        self._widening = widening
        #: The name of operators outside of a backward.
        self._phase = "forward"
        # With 16 bits, memory that NumPy shares is rare.
        self._twins = Twins(widening.wide, checks=torch.float32 in widening.narrow)
        #: The modules of forward operators, by the sequence number of their autograd node.
        self._modules: dict[int, str] = {}
        self._makers = Makers()
        #: The errors of weights' gradients that are in no ``.grad``, and the root mean squares of the exact ones.
        self._errors: dict[str, tuple[float, float]] = {}
        #: The norms of errors and of exact values of gradients that this rank has given to a collective, by bucket.
        self._exchanged: list[tuple[float, float]] = []
        #: The same of gradients that an optimizer was about to take, and may have changed since.
        self._taken: dict[str, tuple[float, float]] = {}
        #: The norms of errors and of exact values of the outputs of an inference.
        self._outputs: list[tuple[float, float]] = []
        #: Why the rest of the step was left out; "" if it was not.
        self._ended_by = ""
        #: When the first operator was computed twice: before it, code may have been compiled.
        self._began = 0.0
        #: The time from there to the last operator.
        self.seconds = 0.0
        #: Operators whose twin could not run, by name.
        self.skipped: Counter[str] = Counter()
        self.is_over = False

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare the gradients before an optimizer may change them, and take the weights that it leaves as exact."""
        stepped = {id(each): each for group in optimizer.param_groups for each in group["params"]}
        with _disable_current_modes():
            taken = [(name, each) for name, each in self._parameters if id(each) in stepped]
            self._taken |= self._errors_of_gradients(taken or self._masters(stepped.values()))
            if not self.is_over:
                self._forget(list(stepped.values()))

    @torch.no_grad()
    def returned(self, output: Any) -> None:
        """Compare what a model has returned in an inference, where no gradients follow. Waits for the device."""
        if not self.is_over:
            with _disable_current_modes():
                # A tensor without a twin is exact, or no result of an operator.
                outputs = [each for each in tensor_list(output) if has_numbers(each) and self.twin(each) is not None]
                self._outputs += map(self._norms, outputs)

    def _masters(self, stepped: Collection[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors that an optimizer steps in place of the model's weights, with the weights' names.

        Before the step each weight is its master, rounded. Empty if any tensor has no such weight, as for another model's
        optimizer. Waits for the device.
        """
        weights, found = [(name, each) for name, each in self._parameters if has_numbers(each)], []
        for master in filter(has_numbers, stepped):
            alike = (pair for pair in weights if pair[1].shape == master.shape)
            of = next((pair for pair in alike if torch.equal(pair[1], master.to(pair[1]))), None)
            if of is not None:
                weights.remove(of)
                found.append((of[0], master))
        return found if len(found) == len(stepped) else []

    # -- the operators ----------------------------------------------------------------------------------------------

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Pending]:
        """Prepare an operator's second run, or those of the operators that a foreach operator stands for.

        Those whose result more bits would not change, or that can't be prepared, are left out.
        """
        if not isinstance(func, torch._ops.OpOverload):
            return []
        try:
            self._called(func, args, kwargs)
            rows_of = single_operators(func, args)
            if rows_of is None:
                return list(filter(None, [self._prepare(func, args, kwargs)]))
            found = [(place, self._prepare(one, row, kwargs | more)) for place, (one, row, more) in enumerate(rows_of)]
            return [each._replace(place=place) for place, each in found if each is not None]
        except Exception:
            self.skipped[func.overloadpacket.__name__] += 1
            self._forget(mutated_by(func, args, kwargs))
            return []

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Judge the arguments of an operator that is about to run."""

    def _prepare(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pending | None:
        schema = func._schema
        writes = schema.is_mutable
        if self.is_over or (not writes and any(each.alias_info is not None for each in schema.returns)):
            return None
        given = [each for each in leaves((*args, *kwargs.values())) if isinstance(each, torch.Tensor)]
        usable = {id(each): each for each in given if self._may_have_twin(each)}
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
            if func.namespace == "c10d" and not self.is_over:
                self._communicates(list(filter(has_numbers, given)))
            return None
        has_twin = any(self.twin(each) is not None for each in tensors)
        narrow, wide = self._widening.narrow, self._widening.wide
        is_narrow = any(each.dtype in narrow for each in tensors) or kwargs.get("dtype") in narrow
        if not (has_twin or is_narrow or self._is_judged_anyway(func, args)):
            return None
        if self._is_used_up():
            self._end()
            return None
        self._remember_module(func)
        if not self._fits(tensors):
            self.skipped["too large"] += 1
            self._forget(mutated)
            return None
        written = {id(each) for each in mutated}
        twins = mapped(
            lambda each: (
                self._twin_or_wide(each, id(each) in written) if id(each) in usable else wide_copy(each, False, wide)
            ),
            args,
            kwargs,
        )
        exact = (args, kwargs) if has_twin else None
        before = 0.0 if writes else None
        if has_twin and writes:
            exact = mapped(lambda each: wide_copy(each, id(each) in written, wide), args, kwargs)
            before = self._error_before(func, tensors)
        dtype = getattr((*args, None)[0], "dtype", None)
        is_cast = func.overloadpacket in CASTS and all(map(self._twins.is_cast, tensors))
        old = args[0].detach().clone() if self._is_changed(func, dtype) else None
        return Pending(func, twins, exact, before, (args, kwargs), dtype, is_cast, node_of(tensors), old)

    def _communicates(self, tensors: list[torch.Tensor]) -> None:
        """Handle that a collective is about to write tensors, which its schema does not say: gradients that ranks sum up."""
        if not is_in_forward():
            self._exchanged += [self._norms(each) for each in tensors]
        self._forget(tensors)

    def _norms(self, tensor: torch.Tensor) -> tuple[float, float]:
        """Return the norms of a tensor's error and of its exact values."""
        error, size = self._error_and_size(tensor)
        norm = size * tensor.numel() ** 0.5
        return error * norm, norm

    def _is_chosen(self, func: Any) -> bool:
        """Return whether to run an operator again; the results of others are taken as exact."""
        return True

    def _is_judged_anyway(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Return whether an operator is judged although none of its tensors is narrow or has a twin."""
        return False

    def _is_changed(self, func: Any, dtype: torch.dtype | None) -> bool:
        """Return whether the values that an operator overwrites are kept."""
        return False

    def _error_before(self, func: Any, tensors: list[torch.Tensor]) -> float:
        """Return the largest error of tensors that an operator is about to overwrite, relative to their norm."""
        return 0.0

    def _remember_module(self, func: Any) -> None:
        """Remember the running module of a forward for the backward of its last node, and the operator that has got the node."""
        if is_in_forward():
            number = _get_sequence_nr() - 1
            self._modules[number] = self._module()
            self._makers.made(number, func.overloadpacket)

    def after(self, pending: Sequence[Pending], result: Any, frame: FrameType) -> None:
        """Run each operator again on the twins of its arguments, and compare the results."""
        for each in pending:
            made = result
            if each.place is not None:
                # A foreach operator in place returns nothing.
                made = result[each.place] if result else each.given[0][0]
            self._ran(each._replace(frame=frame), made, numbers_of(made))

    def _ran(self, pending: Pending, result: Any, results: list[torch.Tensor]) -> None:
        func, name = pending.func, pending.func.overloadpacket.__name__
        try:
            self._follow(pending, result, results)
            if torch.Tag.nondeterministic_seeded in func.tags or name.startswith(_WITHOUT_RESULT):
                self._forget(results)
                return
            self._judge(pending, results)
            if func.overloadpacket is aten._to_copy and not results:
                self._compare_integers(pending, result)
            elif is_decision(result):
                self._keep_decision(pending, result)
            elif func.overloadpacket is not aten._to_copy or not self._keep_cast(pending, results[0]):
                self._run_again(pending, result, results)
        except Exception:
            self.skipped[name] += 1
            self._forget([*results, *mutated_by(func, *pending.given)])

    def _run_again(self, pending: Pending, result: Any, results: list[torch.Tensor]) -> None:
        args, kwargs = pending.arguments
        product = SCALED_PRODUCTS.get(pending.func)
        if product is not None:
            exact: Any = product(*args, **kwargs)
        else:
            bounds = self._widening is not OF_FP32 and clamps_for(pending.func, pending.given[0])
            exact = self._unbounded(pending) if bounds else self._run(pending.func, args, kwargs)
        self._compare_choices(pending, result, exact)
        given = {storage_key(each) for each in leaves(args) if isinstance(each, torch.Tensor)}
        for place, (value, twin) in enumerate(zip(results, _tensors_of(exact), strict=False)):
            is_alike = value.numel() and value.shape == twin.shape and twin.dtype == self._widening.wide
            if not self._is_unique(pending.func, place, result, exact):
                self._forget([value])
            elif is_alike and value.dtype in self._widening.having:
                if not place:
                    # Further results may be written partially.
                    self._compare(pending, value, twin)
                    self._passed_on([value], results[1:])
                self._keep(value, twin, pending.is_cast, is_ours=storage_key(twin) not in given)
                given.add(storage_key(twin))

    def _unbounded(self, pending: Pending) -> torch.Tensor:
        """Return the twin of a clamp to FP8's range, which a wide dtype does not need, but for infinities."""
        args, kwargs = pending.arguments
        twin: torch.Tensor = args[0]
        if is_finite(twin):
            return twin
        finite = twin.isfinite()
        return torch.where(finite, twin.clone(), self._run(pending.func, args, kwargs))

    def _is_unique(self, func: Any, place: int, result: Any, exact: Any) -> bool:
        """Return whether exact arithmetic determines an operator's result at this place."""
        return True

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on twins; a large product on a CPU with oneDNN, which on some processors takes half the time."""
        if func.overloadpacket not in _PRODUCTS or kwargs or not _suits_onednn(*args):
            return func(*args, **kwargs)
        bias, left, right = (None, *args)[-3:]
        return torch.ops.mkldnn._linear_pointwise(left, right.t(), bias, "none", [], "")

    # -- what subclasses judge --------------------------------------------------------------------------------------

    def _follow(self, pending: Pending, result: Any, results: list[torch.Tensor]) -> None:
        """Judge an operator that has run, also one whose result is random or not written yet."""

    def _judge(self, pending: Pending, results: list[torch.Tensor]) -> None:
        """Judge an operator that has run, before it runs again."""

    def _compare(self, pending: Pending, value: torch.Tensor, twin: torch.Tensor) -> None:
        """Judge an operator's first result by its exact one."""

    def _compare_choices(self, pending: Pending, result: Any, exact: Any) -> None:
        """Judge integers and masks by those of the exact computation."""

    def _compare_integers(self, pending: Pending, value: Any) -> None:
        """Judge a cast to integers."""

    def _passed_on(self, operands: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        """Handle results whose own errors are not measured."""

    def _record(self, pending: Pending, result: Any, kind: type[Any], *names: str, **figures: Any) -> Any:
        """Return a record of an operator; ``names``: those that follow the operator, its line and its phase."""
        node = torch._C._current_autograd_node()
        if node is None:
            module, phase = self._module(), self._phase
        else:
            module, phase = self._modules.get(node._sequence_nr(), ""), "backward"
        # A frame of ours would keep the operator's tensors.
        line = innermost_line(pending.frame or sys._getframe())
        names = (pending.func.overloadpacket.__name__, line, phase, *names)
        # The dtype in which numbers were rounded before they became integers.
        is_float = isinstance(result, torch.Tensor) and result.is_floating_point()
        rounded = result.dtype if is_float else pending.dtype
        dtype = passed_through(rounded) if rounded in FP8 else str(rounded).removeprefix("torch.")
        return kind(**{"name": module, "names": names, "text": dtype, **figures})

    def _judged(self, pending: Pending, value: torch.Tensor, twin: torch.Tensor) -> Judged:
        """Return a result to be compared with exact ones."""
        # An operator that overwrites its arguments can be run again only once.
        local = cache(partial(local_result, pending, twin))
        return Judged(pending, value, twin, local, partial(self._record, pending, value))

    # -- the end ----------------------------------------------------------------------------------------------------

    def records(self) -> Sequence[Record]:
        """Return the records, once the step has ended. Waits for the device."""
        return ()

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
        self.seconds = now - self._began
        return self.seconds

    def cut_short(self, when: str) -> None:
        """Compute nothing more, and forget all exact values; ``when`` completes a sentence."""
        self._ended_by = self._ended_by or when
        self._end()

    def left_out(self) -> str:
        """Return a sentence on the operators that were not computed a second time; "" without any."""
        skipped = [f"{number_of(times, 'call')} of {name}" for name, times in self.skipped.most_common(_MOST_NAMED)]
        parts = filter(None, (filled("all of it {}", self._ended_by), *skipped))
        return filled(self.LEFT_OUT, ", ".join(parts))

    def _end(self) -> None:
        self.is_over = True
        self._twins.clear()
        self._modules.clear()
        self._makers.clear()

    # -- errors -----------------------------------------------------------------------------------------------------

    def _all_errors(self) -> dict[str, tuple[float, float]]:
        """Return the relative error of each weight's gradient, and the root mean square of the exact one; in an inference, the
        relative error of all outputs together, and the norm of the exact ones."""
        if self._outputs:
            off, size = (math.hypot(*each) for each in zip(*self._outputs, strict=True))
            return {OUTPUTS: (off / size, size)} if size else {}
        if self._exchanged:
            # What the weights hold is the sum over the ranks.
            return {}
        return self._errors | self._errors_of_gradients(self._parameters) | self._taken

    def _errors_of_gradients(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[float, float]]:
        return {
            name: self._error_and_size(parameter.grad)
            for name, parameter in parameters
            if parameter.grad is not None and has_numbers(parameter.grad) and self.twin(parameter.grad) is not None
        }

    def _of_all_gradients(
        self, errors: dict[str, tuple[float, float]], growth: Growth, dtype: torch.dtype, least: float
    ) -> list[GradientsError]:
        """Return a record of the error of all gradients together; [] if none can be compared.

        Args:
            errors: as of ``_all_errors``.
            growth: knows the line to blame, which is recorded from the relative error ``least`` on.
            dtype: the narrow one of the step.
        """
        roots = {name: parameter.numel() ** 0.5 for name, parameter in self._parameters} | {OUTPUTS: 1.0}
        # Those of a compiled graph have no name.
        compared = {name: each for name, each in errors.items() if name in roots}
        norms = [(error * size * roots[name], size * roots[name]) for name, (error, size) in compared.items()]
        norms = self._exchanged or norms
        off, size = (math.hypot(*each) for each in zip(*norms, strict=True)) if norms else (0.0, 0.0)
        if not 0 < size < math.inf or not off < math.inf:
            return []
        record: GradientsError | None = None
        of_outputs = float(OUTPUTS in compared)
        figures: dict[str, Any] = {"error": off / size, "of": len(compared), "size": size, "of_outputs": of_outputs}
        if off >= least * size:
            record, zeroed = growth.most(), math.hypot(*(self._zeroed(each) for _, each in self._parameters))
            figures |= {"off": sum(error >= least for error, _ in compared.values()), "zeroed": zeroed / off}
        record = record or GradientsError(names=("", "", ""), text=passed_through(dtype))
        return [replace(record, **figures)]

    def _zeroed(self, parameter: torch.nn.Parameter) -> float:
        """Return the norm of the exact values of a gradient's elements that are zero in the run."""
        twin = None if parameter.grad is None or not has_numbers(parameter.grad) else self.twin(parameter.grad)
        return 0.0 if twin is None else float(twin[parameter.grad == 0].norm())

    def _errors_of(self, tensors: Iterable[Any]) -> float:
        """Return the largest inherited error of tensors, each relative to its norm."""
        return max((self._error(each) for each in tensors if has_numbers(each)), default=0.0)

    def _error_and_size(self, tensor: torch.Tensor) -> tuple[float, float]:
        """Return the inherited error of a tensor, and the root mean square of its twin."""
        exact = tensor if (twin := self.twin(tensor)) is None else twin
        return self._error(tensor), float(exact.norm(dtype=self._widening.wide)) / max(exact.numel(), 1) ** 0.5

    def _error(self, tensor: torch.Tensor) -> float:
        """Return the inherited error of a tensor, relative to its norm."""
        twin = self.twin(tensor)
        return 0.0 if twin is None else relative_error(tensor, twin)

    # -- twins ------------------------------------------------------------------------------------------------------

    def twin(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the twin of a tensor; None if it has none of its own."""
        return self._twins.of(tensor)

    def exact(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the wide values of a tensor that the step has made."""
        twin = self.twin(tensor)
        return tensor.to(self._widening.wide) if twin is None else twin

    def _may_have_twin(self, tensor: torch.Tensor) -> bool:
        has_wide = self._widening.wide is not torch.float64 or computes_in_fp64(tensor.device)
        return has_wide and may_have_twin(tensor, self._widening.having)

    def _twin_or_wide(self, value: torch.Tensor, is_mutated: bool) -> torch.Tensor:
        if is_mutated:
            return self._twins.to_write(value)
        twin = self.twin(value)
        if twin is not None:
            return twin
        return value if value.dtype is torch.bool else value.to(self._widening.wide)

    def _keep(self, value: torch.Tensor, twin: torch.Tensor, is_cast: bool, is_ours: bool) -> None:
        """Remember a result's twin; ``is_ours`` if nothing else has its memory."""
        if self.twin(value) is not None:
            self._twins.update(value, twin, is_cast)
        elif not is_equal(value, twin):
            self._twins.add(value, twin, is_cast, is_ours)

    def _keep_cast(self, pending: Pending, value: torch.Tensor) -> bool:
        """Let the result of a cast have the exact values of its argument. Return False if it needs a copy."""
        source, twin = pending.given[0][0], pending.arguments[0][0]
        is_exact = source.dtype in self._widening.narrow and self.twin(source) is None
        has_twins = all(each.dtype in self._widening.having for each in (source, value))
        if is_exact or not has_twins or not value.numel() or not have_one_layout(value, twin):
            return False
        self._compare(pending, value, twin)
        if not is_equal(value, twin):
            self._twins.share(value, source, twin, pending.is_cast)
        return True

    def _keep_decision(self, pending: Pending, value: torch.Tensor) -> None:
        args, kwargs = pending.arguments
        if pending.func.overloadpacket in DECIDING:
            decided = pending.func(*args, **kwargs)
            if not torch.equal(value, decided):
                self._passed_on(numbers_of(pending.given[0]), [value])
                self._compare_choices(pending, value, decided)
                self._twins.add(value, decided, is_cast=False)
                return
            self._decided_rightly(value)
        self._forget([value])

    def _decided_rightly(self, mask: torch.Tensor) -> None:
        """Handle a comparison with the exact result."""

    def _forget(self, results: list[torch.Tensor]) -> None:
        """Take results, and other tensors in their storages, as exact."""
        self._twins.forget(filter(has_storage, results))

    def _fits(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether storages can be copied in the wide dtype: a GPU has room for three copies in half of its free memory."""
        size = self._widening.wide.itemsize
        if any(each.untyped_storage().nbytes() * size // each.element_size() > _MOST_BYTES for each in tensors):
            return False
        on_gpus = [each for each in tensors if each.is_cuda]
        wanted = 3 * size * sum(each.numel() for each in on_gpus)
        return all(wanted < free_memory(device) / 2 for device in {each.device for each in on_gpus})


class Makers:
    """Remembers the operators of a forward and their lines, by the sequence number of their autograd node."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[str, str]] = {}

    def made(self, number: int, operator: Any) -> None:
        """Remember an operator that has got the node with this number: the first one that has it."""
        if number not in self._of:
            self._of[number] = operator.__name__, innermost_line(sys._getframe())

    def of(self, node: Any) -> tuple[str, str] | None:
        """Return the operator that has a node, and its line; None if it is not known."""
        return self._of.get(node._sequence_nr())

    def placed(self, record: Any) -> Any:
        """Return a record of a backward with the operator of the forward and its line, without a line if that is not known."""
        node = torch._C._current_autograd_node()
        if node is None:
            return record
        operator, line = self.of(node) or ("", "")
        if operator_of(node).lower() != operator.replace("_", ""):
            operator, line = record.names[0], ""
        return replace(record, names=(operator, line, *record.names[2:]))

    def clear(self) -> None:
        """Forget all."""
        self._of.clear()


def relative_error(value: torch.Tensor, twin: torch.Tensor) -> float:
    """Return the distance of a tensor from its twin, relative to the twin's norm."""
    off = ratio(distance(value, twin), float(twin.norm()))
    if math.isnan(off) and bool(((value == twin) | (value - twin).isfinite()).all()):
        # A mask's infinities are intended.
        finite = twin.isfinite()
        return ratio(distance(value[finite], twin[finite]), float(twin[finite].norm()))
    return off


def _tensors_of(result: Any) -> list[torch.Tensor]:
    return [each for each in leaves((result,)) if isinstance(each, torch.Tensor) and each.is_floating_point()]


def _suits_onednn(*operands: torch.Tensor) -> bool:
    """Return whether a product of two matrices, to which a row may be added, is worth choosing oneDNN's kernel."""
    *bias, left, right = operands
    is_large = left.numel() * right.shape[1] >= _LARGE_PRODUCT
    is_linear = all(each.is_cpu and each.dtype is torch.float32 for each in operands) and (
        not bias or bias[0].shape == right.shape[1:]
    )
    return is_large and is_linear and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
