"""Computes a step in FP64 as well: where FP32 itself is too coarse, and at which line its errors grow."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mpinspect.ranges.capture.steps import MOST_SECONDS_IN_FP64
from mpinspect.ranges.faults.measure.growth import Growth
from mpinspect.ranges.faults.measure.operands import Pending, has_numbers, is_integer, local_result, mapped, numbers_of
from mpinspect.ranges.faults.measure.recomputation import Recomputation, relative_error
from mpinspect.ranges.faults.measure.twins import OF_ALL, OF_FP32, is_finite
from mpinspect.ranges.records import FP32_OFF, BrokenInFP32, FlushedInFP32, GradientsError, Record, UpdatesLostInFP32
from mpinspect.runtime.device import computes_in_fp64
from mpinspect.runtime.outputs import leaves
from mpinspect.runtime.storages import storage_key

aten = torch.ops.aten

#: The relative error of rounding once to FP32.
_ROUNDING = 2.0**-24
#: Bytes of copies on a GPU after which the rest of the step is left out: the training may need the memory.
_MOST_BYTES_ON_GPU = 512 << 20
#: Multiplications from which on a product runs in FP32 on the rounded twins: few devices are fast in FP64.
_LARGE = 1 << 26
#: Seconds after which the rest of an optimizer's step is left out, and the most elements of a weight whose changes are judged.
_MOST_SECONDS_OF_UPDATES, _MOST_ELEMENTS = 2.0, 1 << 24
#: The least share of a weight in the effect of all updates, and the largest part of its own that rounding may leave for a record.
_OF_WHOLE, _KEPT = 0.1, 0.5
#: Smaller weights lose updates only once these are small, as at an optimum or a low learning rate.
_LARGE_WEIGHT = 2.0**10
#: The places of the two factors of a product among an operator's arguments.
_FACTORS = {
    **dict.fromkeys((aten.mm, aten.bmm, aten.convolution), (0, 1)),
    **dict.fromkeys((aten.addmm, aten.baddbmm, aten.convolution_backward), (1, 2)),
}
_BATCHED = frozenset({aten.bmm, aten.baddbmm})
_CONVOLUTIONS = frozenset({aten.convolution, aten.convolution_backward})
#: Decompositions whose factors have an arbitrary sign, or basis, with the places of their other results.
_AMBIGUOUS = {
    aten._linalg_svd: (1,),
    aten._linalg_eigh: (0,),
    **dict.fromkeys((aten.linalg_eig, aten.linalg_qr, aten.geqrf), ()),
}
#: Decompositions that choose pivots, which a nearly equal matrix may have elsewhere.
_PIVOTING = frozenset(
    {
        *(aten._linalg_solve_ex, aten._linalg_det, aten._linalg_slogdet, aten.linalg_lu_factor_ex),
        *(aten.linalg_lu_factor, aten.linalg_lu, aten.linalg_ldl_factor_ex),
    }
)


def is_unique(func: Any, place: int, result: Any, exact: Any) -> bool:
    """Return whether exact arithmetic determines an operator's result at this place, for the pivots that the run has chosen."""
    operator = func.overloadpacket
    has_pivots = operator not in _PIVOTING or _are_integers_equal(result, exact)
    return has_pivots and place in _AMBIGUOUS.get(operator, (place,))


def _are_integers_equal(one: Any, other: Any) -> bool:
    pairs = zip(leaves((one,)), leaves((other,)), strict=False)
    return all(torch.equal(mine, its) for mine, its in pairs if is_integer(mine) and is_integer(its))


def run_in_fp64(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator in FP64; in FP32 on rounded arguments if it takes very many multiplications."""
    operator = func.overloadpacket
    if operator is aten._amp_foreach_non_finite_check_and_unscale_:
        # It takes the loss scale and the flag in FP32 alone.
        return func(args[0], *map(_to_fp32, args[1:]))
    if not _is_large(operator, args):
        return func(*args, **kwargs)
    result = func(*mapped(_to_fp32, args, {})[0], **kwargs)
    return [each.double() if isinstance(each, torch.Tensor) else each for each in leaves((result,))]


class InFP64(Recomputation):
    """Recomputes a running step in FP64, and compares the results with those of its second computation, in FP32.

    So it measures what FP32's own rounding does to the gradients, apart from that of 16 bits, and finds the infinities and NaNs
    that it makes.

    Args:
        module, parameters: as of ``Recomputation``.
        in_fp32: computes the step in FP32, and has run an operator before this one does.
        seconds: after which the rest of the step is left out.
    """

    LEFT_OUT = "Left out of the comparison of FP32 with FP64 in a step: {}"

    def __init__(
        self,
        module: Callable[[], str],
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        in_fp32: Recomputation,
        seconds: float = MOST_SECONDS_IN_FP64,
    ) -> None:
        super().__init__(module, parameters, OF_ALL)
        self.judged = self._in_fp32 = in_fp32
        self._seconds = seconds
        self._is_on_gpu = any(each.is_cuda for _, each in self._parameters)
        self.is_over = not all(computes_in_fp64(each.device) for _, each in self._parameters)
        self._growth = Growth(_ROUNDING)
        self._broken: BrokenInFP32 | None = None
        self._flushed: FlushedInFP32 | None = None
        self._updates: UpdatesInFP64 | None = None

    def _is_used_up(self) -> bool:
        if self._elapsed() > self._seconds:
            self._ended_by = f"after {self._seconds:.0f} s"
        elif self._is_on_gpu and self._twins.bytes > _MOST_BYTES_ON_GPU:
            self._ended_by = f"once its copies took {_MOST_BYTES_ON_GPU >> 20} MiB"
        return bool(self._ended_by) or self._in_fp32.is_over or super()._is_used_up()

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Judge the changes of FP32 weights that follow."""
        super().optimizer_steps(optimizer)
        with _disable_current_modes():
            self._updates = self._updates or UpdatesInFP64(self._parameters)
        self.of_optimizer = self._updates

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run_in_fp64(func, args, kwargs)

    def _is_unique(self, func: Any, place: int, result: Any, exact: Any) -> bool:
        return is_unique(func, place, result, exact)

    def _forget(self, results: list[torch.Tensor]) -> None:
        """Take results as those of the computation in FP32."""
        super()._forget(results)
        for each in results:
            if has_numbers(each) and not self.is_over and (twin := self._in_fp32.twin(each)) is not None:
                self._twins.add(each, twin, is_cast=False)

    def _compare(self, pending: Pending, value: torch.Tensor, twin: torch.Tensor) -> None:
        in_fp32 = self._in_fp32.exact(value)
        if is_finite(in_fp32):
            self._find_flushed(pending, in_fp32, twin)
            self._growth.ran(
                numbers_of(pending.given[0]), value, in_fp32, twin, partial(self._placed, pending, in_fp32)
            )
        elif self._broken is None:
            # A sum of two masks, each FP32's lowest number, is -inf, and a mask as well.
            where = ~in_fp32.isfinite() & twin.isfinite() & (in_fp32 != -torch.inf)
            if bool(where.any()):
                worst = self._growth.most()
                origin = () if worst is None else (*worst.names[:2], worst.name, worst.text)
                figures = {"elements": float(where.sum()), "largest": float(twin[where].abs().max())}
                self._broken = self._makers.placed(self._record(pending, in_fp32, BrokenInFP32, "", *origin, **figures))

    def _find_flushed(self, pending: Pending, in_fp32: torch.Tensor, twin: torch.Tensor) -> None:
        """Record the first result of the graph that is zero throughout in FP32 alone, such as a determinant."""
        if self._flushed is not None or pending.node is None or bool(in_fp32.any()) or not bool(twin.any()):
            return
        if bool(local_result(pending, twin).any()):
            figures = {"elements": in_fp32.numel(), "largest": float(twin.abs().max())}
            self._flushed = self._record(pending, in_fp32, FlushedInFP32, **figures)

    def _placed(self, pending: Pending, in_fp32: torch.Tensor) -> GradientsError:
        placed: GradientsError = self._makers.placed(self._record(pending, in_fp32, GradientsError))
        return placed

    def _communicates(self, tensors: list[torch.Tensor]) -> None:
        """Compare no gradients: those that ranks have summed up are not this rank's, and the FP32 ones before are gone."""
        self._exchanged.append((0.0, 0.0))
        self._forget(tensors)

    def _error(self, tensor: torch.Tensor) -> float:
        twin = self.twin(tensor)
        return 0.0 if twin is None else relative_error(self._in_fp32.exact(tensor), twin)

    def records(self) -> Sequence[Record]:
        """Return the first infinity or NaN of FP32's making, and the error of the gradients."""
        found: list[Record] = []
        if not (self.is_over or self._in_fp32.is_over):
            found += self._of_all_gradients(self._all_errors(), self._growth, torch.float32, FP32_OFF)
        self._end()
        updates = () if self._updates is None else self._updates.records()
        return [*found, *filter(None, [self._broken, self._flushed]), *updates]


class UpdatesInFP64(Recomputation):
    """Compares the changes that an optimizer makes to FP32 weights with the exact ones, by their effect on the loss.

    Args:
        parameters: the model's parameters by name.
    """

    def __init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        super().__init__(lambda: "", parameters, OF_FP32)
        weights = {
            storage_key(weight): (name, weight)
            for name, weight in self._parameters
            if weight.dtype is torch.float32 and 0 < weight.numel() <= _MOST_ELEMENTS and has_numbers(weight)
        }
        has_large = any(_largest(weight) >= _LARGE_WEIGHT for _, weight in weights.values())
        #: The weights by storage; none if no weight is large.
        self._weights = weights if has_large else {}
        #: The decrease of the loss by the exact and by the rounded changes of each weight, to first order.
        self._effects: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def _prepare(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pending | None:
        changes = func._schema.is_mutable and args and has_numbers(args[0]) and storage_key(args[0]) in self._weights
        return super()._prepare(func, args, kwargs) if changes and not torch.is_grad_enabled() else None

    def _is_changed(self, func: Any, dtype: torch.dtype | None) -> bool:
        return True

    def _is_used_up(self) -> bool:
        return self._elapsed() > _MOST_SECONDS_OF_UPDATES

    def _compare(self, pending: Pending, value: torch.Tensor, twin: torch.Tensor) -> None:
        name, weight = self._weights[storage_key(value)]
        if pending.old is None or weight.grad is None or not has_numbers(weight.grad) or value.shape != weight.shape:
            return
        slope, old = weight.grad.double(), pending.old.double()
        for place, changed in enumerate((twin, value.double())):
            self._effects[name][place] -= float((slope * (changed - old)).sum())

    def _keep(self, value: torch.Tensor, twin: torch.Tensor, is_cast: bool, is_ours: bool) -> None:
        """Take the weight as it is: each change is judged by itself."""
        self._forget([value])

    def records(self) -> Sequence[Record]:
        """Return the weight of the largest effect that rounding has taken most of, if it matters beside all."""
        whole = math.fsum(abs(exact) for exact, _ in self._effects.values())
        found = [
            UpdatesLostInFP32(
                name=name, text="float32", exact=exact, rounded=rounded, share=exact / whole, largest=_largest(weight)
            )
            for name, weight in self._weights.values()
            for exact, rounded in [self._effects[name]]
            if exact >= _OF_WHOLE * whole > 0 and rounded <= _KEPT * exact and _largest(weight) >= _LARGE_WEIGHT
        ]
        self._end()
        return sorted(found, key=lambda each: each.exact)[-1:]


def _largest(weight: torch.Tensor) -> float:
    return float(weight.detach().abs().max())


def _to_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype is torch.float64 else value


def _is_large(operator: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operator is a product of very many multiplications."""
    places = _FACTORS.get(operator)
    if places is None:
        return False
    left, right = (args[place] for place in places)
    rows = left.numel() // max(1, left.shape[1 if operator in _CONVOLUTIONS else -1])
    return bool(rows * right.numel() // (left.shape[0] if operator in _BATCHED else 1) >= _LARGE)
