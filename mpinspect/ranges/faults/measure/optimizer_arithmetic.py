"""The second computation of a whole step: its forwards and backwards, and each optimizer's own arithmetic in 16 bits."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.optimizers import states_of
from mpinspect.ranges.faults.measure.edges import has_one
from mpinspect.ranges.faults.measure.kept_sums import KeptSums
from mpinspect.ranges.faults.measure.operands import (
    DIFFERENCES,
    Pending,
    has_numbers,
    is_narrow,
    narrow_storages,
)
from mpinspect.ranges.faults.measure.repeats import Repeats
from mpinspect.ranges.faults.measure.second import SUMS, SecondComputation
from mpinspect.ranges.faults.measure.twins import NARROW, OF_NARROW, distance, is_finite
from mpinspect.ranges.records import LostFactor, LostSum, Record, RoundedConstant, UpdateEffect
from mpinspect.runtime.compiled_graphs import Captured, Compiled
from mpinspect.runtime.outputs import leaves
from mpinspect.runtime.storages import storage_key

aten = torch.ops.aten

#: Bytes of twins, and seconds, after which the rest of an optimizer's step is left out: all parameters get the same arithmetic.
_MOST_BYTES, _MOST_SECONDS = 1 << 30, 2.0
#: Elements after which the rest of a foreach operator is left out: it may have all parameters at once.
_MOST_ELEMENTS = 1 << 25

#: The least share of weights that a multiplication must leave as they were.
_NEARLY_ALL = 0.99

_Parameters = Iterable[tuple[str, torch.nn.Parameter]]


class WholeStep(SecondComputation):
    """Recomputes a running step, optimizers included; arguments as of ``SecondComputation``."""

    def __init__(
        self,
        module: Any,
        parameters: _Parameters,
        buffers: Iterable[tuple[str, torch.Tensor]] = (),
        by_hand: bool = False,
        is_inference: bool = False,
    ) -> None:
        parameters = list(parameters)
        # Without a reference cycle: the model must be freed with its last user.
        own: Any = weakref.proxy(self)
        repeats = Repeats(
            parameters,
            lambda: own._unless_avoided(),
            lambda result, eager: own._repeated(result, eager),
            lambda *given: own._differentiated(*given),
            lambda error: own._not_repeated(error),
        )
        super().__init__(
            lambda: module() if repeats.path is None else repeats.path, parameters, buffers, by_hand, is_inference
        )
        self._repeats = repeats
        self._of_optimizers: list[OptimizerArithmetic] = []
        #: Whether compiled code has something finite that is not finite in its eager form.
        self._is_avoided = False

    def calls_graphs(self, captured: Captured, compiled: Compiled, args: tuple[Any, ...]) -> Any:
        """Run a compiled graph, and compute its eager form twice."""
        return self._repeats.call(captured, compiled, args, is_repeated=self.of_optimizer is None)

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Pending]:
        """Prepare an operator's second run; operators of compiled code are left out."""
        return [] if self._repeats.hides_operator() else super().before(func, args, kwargs)

    @contextmanager
    def _unless_avoided(self) -> Iterator[None]:
        """Drop the infinities of an eager form that compiled code avoids: it does not round between fused operators."""
        before, self._is_avoided = len(self._broken.born), False
        yield
        if self._is_avoided:
            del self._broken.born[before:]

    def _repeated(self, result: torch.Tensor, eager: torch.Tensor | None) -> bool:
        """Let a result of compiled code have the twin of its eager form's; return whether it avoids no infinity.

        Without an eager form, the result is taken as exact.
        """
        self._kept.made([result])
        if eager is None:
            self._forget([result])
        if eager is None or not has_numbers(eager) or not has_numbers(result):
            return True
        twin = self.twin(eager)
        if twin is not None and result.shape == twin.shape:
            self._keep(result, _exact(result, eager, twin), is_cast=False, is_ours=False)
        return self._agrees(result, eager)

    def _differentiated(self, argument: torch.Tensor, name: str, gradient: torch.Tensor) -> None:
        """Compare the gradient of a graph's argument, such as a parameter, in the eager form of compiled code."""
        if not has_numbers(gradient):
            return
        if self.twin(gradient) is not None:
            self._errors[name] = max(self._error_and_size(gradient), self._errors.get(name, (0.0, 0.0)))
        if argument.is_leaf and argument.grad is not None and has_numbers(argument.grad):
            self._agrees(argument.grad, gradient)

    def _agrees(self, ran: torch.Tensor, eager: torch.Tensor) -> bool:
        """Return whether a tensor of compiled code avoids no infinity of the eager form."""
        is_avoided = is_finite(ran) and not is_finite(eager)
        self._is_avoided |= is_avoided
        return not is_avoided

    def _not_repeated(self, error: Exception) -> None:
        self.skipped[f"a compiled graph ({error!r})"] += 1

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin the arithmetic of an optimizer, and search its gradients for zeros."""
        super().optimizer_steps(optimizer)
        self.of_optimizer = OptimizerArithmetic(optimizer, self._parameters, self._repeats.hides_operator)
        self._of_optimizers.append(self.of_optimizer)
        self.takes(each.grad for group in optimizer.param_groups for each in group["params"])

    def _end(self) -> None:
        super()._end()
        self._repeats.is_over = True

    def records(self) -> list[Record]:
        """Return the records of the forwards and backwards, then those of the optimizers."""
        return [*super().records(), *(record for each in self._of_optimizers for record in each.records())]


_is_narrow = partial(is_narrow, narrow=OF_NARROW.narrow)


class OptimizerArithmetic(SecondComputation):
    """Recomputes an optimizer's arithmetic in FP32, from its weights, gradients and states in 16 bits or FP8 as they are.

    Lost updates of the weights have a fault of their own (``updates.py``), whose harm is measured here. Kahan summation makes
    rounding errors on purpose: additions and differences are judged only where they change a state.

    Args:
        optimizer: is about to step.
        parameters: the model's parameters by name.
        is_hidden: returns whether the operator that is about to run is left out.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: _Parameters, is_hidden: Callable[[], bool] = bool
    ) -> None:
        super().__init__(lambda: "", parameters)
        self._phase = f"step of {type(optimizer).__name__}"
        # The settings of torch's own show which of its states can't change: see moments-cannot-decay.
        self._is_of_torch = type(optimizer).__module__.startswith("torch.optim.")
        stepped = [each for group in optimizer.param_groups for each in group["params"]]
        states = [
            (name, state)
            for each in stepped
            for name, state in states_of(optimizer, each).items()
            if isinstance(state, torch.Tensor)
        ]
        others = (*stepped, *(each.grad for each in stepped))
        self._kept = KeptSums(others, narrow_storages(states), {})
        self._readers = {}
        self._read_back.is_on = False
        self._gradients = {storage_key(each): each.grad for each in stepped if is_plain(each) and is_plain(each.grad)}
        #: The decrease of the loss by exact and by rounded updates.
        self._exact = self._rounded = 0.0
        #: The multiplications of weights, by their lines.
        self._factors: dict[str, LostFactor] = {}
        self._is_hidden = is_hidden
        #: Elements of the operator that is being prepared.
        self._elements = 0

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Pending]:
        """Prepare an operator's second run; operators in FP32 and those of a closure are left out."""
        if torch.is_grad_enabled() or self._is_hidden():
            return []
        if not self._twins.bytes and not any(map(_is_narrow, leaves((*args, *kwargs.values())))):
            return []
        self._elements = 0
        return super().before(func, args, kwargs)

    def _prepare(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pending | None:
        tensors = [each for each in leaves((*args, *kwargs.values())) if isinstance(each, torch.Tensor)]
        self._elements += max((each.numel() for each in tensors), default=0)
        if self._elements <= _MOST_ELEMENTS:
            return super()._prepare(func, args, kwargs)
        if func._schema.is_mutable:
            self._forget(tensors)
        return None

    def _is_used_up(self) -> bool:
        return self._elapsed() > _MOST_SECONDS or self._twins.bytes > _MOST_BYTES

    def _compare(self, pending: Pending, value: torch.Tensor, twin: torch.Tensor) -> None:
        operator = pending.func.overloadpacket
        judged = self._judged(pending, value, twin)
        local = judged.local
        if not is_finite(value):
            self._broken.judge(judged)
            return
        if value.dtype not in NARROW:
            return
        if pending.old is not None and storage_key(value) in self._gradients:
            self._weigh_update(self._gradients[storage_key(value)], pending.old, value, local())
            if operator in (aten.mul, aten.mul_):
                self._compare_factor(pending, value, local())
        if not self._is_of_torch:
            self._compare_kept(judged)
        if operator in SUMS:
            self._compare_sum(pending, value, local())
        if not isinstance(value, torch.nn.Parameter):
            self._flushes.made(judged)
        if operator in DIFFERENCES and _is_one_less_one(pending.given[0], value):
            self._found[RoundedConstant].append(self._record(pending, value, RoundedConstant))

    def _weigh_update(
        self, gradient: torch.Tensor, old: torch.Tensor, rounded: torch.Tensor, exact: torch.Tensor
    ) -> None:
        """Add the effect on the loss of one operator's change of a weight. Waits for the device."""
        slope = gradient.flatten().float()
        self._exact -= float(slope.dot((exact - old).flatten()))
        self._rounded -= float(slope.dot((rounded - old).flatten().float()))

    def _compare_factor(self, pending: Pending, rounded: torch.Tensor, exact: torch.Tensor) -> None:
        """Count the weights that a multiplication leaves as they were. Waits for the device."""
        old = pending.old
        assert old is not None
        moved = exact != old
        if bool(moved.any()):
            figures = {"elements": float(moved.sum()), "lost": float((moved & (rounded == old)).sum())}
            factor = float((exact[moved] / old[moved].float()).median())
            found = self._record(pending, rounded, LostFactor, factor=factor, **figures)
            so_far = self._factors.setdefault(found.names[1], replace(found, elements=0, lost=0))
            elements, lost = so_far.elements + found.elements, so_far.lost + found.lost
            self._factors[found.names[1]] = replace(so_far, elements=elements, lost=lost)

    def _compare_choices(self, pending: Pending, result: Any, exact: Any) -> None:
        """Judge no choices: a mask of updates may differ where both are small."""

    def records(self) -> list[Record]:
        """Return the first operators that overflow, flush or lose a constant, the worst sum, and the states that stop."""
        found = [*self._kept.records(), *self._divided.records(), *self._flushes.most()]
        found += [*self._flushes.casts.values(), *self._flushes.clamps.values()]
        found += [*self._broken.born[:1], *self._found[RoundedConstant][:1]]
        found += sorted(self._found[LostSum], key=lambda each: getattr(each, "error", math.nan))[-1:]
        found += [each for each in self._factors.values() if each.lost >= _NEARLY_ALL * each.elements]
        found += [UpdateEffect(exact=self._exact, rounded=self._rounded)] * bool(self._exact)
        self._end()
        return found


def _exact(result: torch.Tensor, eager: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
    """Return a twin for a result of compiled code, whose error is at most that of its eager form.

    If the result is further from the eager form's twin, compiled code has drawn other random numbers.
    """
    if not is_finite(result) or distance(result, twin) <= distance(eager, twin):
        return twin
    moved = result.float() + (twin - eager.float())
    return torch.where(moved.isfinite(), moved, result.float())


def _is_one_less_one(given: tuple[Any, ...], value: torch.Tensor) -> bool:
    """Return whether an operator subtracts a single number in 16 bits from the constant 1, or the other way, and gets zero."""
    return has_one(given) and value.numel() == 1 and not float(value)
