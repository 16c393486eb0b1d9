"""An observer that finds 16-bit copies of the weights (moving averages, shadow weights) whose updates do not change them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch

from mpinspect.ranges.capture.host_rows import HostCopy
from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.layers import WatchedParameter
from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.faults.measure.measuring import NARROW, Measuring, Run, drawn
from mpinspect.ranges.records import Average
from mpinspect.runtime.garbage_collection import living

#: Steps that end with a search for copies among all Python objects (some 100 ms each). Shorter runs are not searched.
_LOOKED_FOR = (8, 64)
#: Minimum number of writes to a reported copy, and minimum unchanged share of its elements that differ from the weight.
_FEWEST_WRITES, _MOST_UNMOVED = 3, 0.5
#: A tensor belongs to another network if its mean distance from every weight of its shape exceeds this multiple of the
#: weight's mean magnitude.
_FARTHEST = 0.5
_MOST_NAMES = 20
_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
#: The attributes of possible copies, for ``living``. Holding any other tensor is a risk: if another thread's backward frees it
#: meanwhile, torch 2.6 warns, and the backward fails if warnings are errors. A nested tensor has no shape.
_MAY_BE_COPIES = (attrgetter("dtype", "is_leaf", "is_nested"), frozenset((dtype, True, False) for dtype in NARROW))
_SHAPE = attrgetter("shape")


class _Copy(NamedTuple):
    tensor: weakref.ref[torch.Tensor]
    version: int
    values: torch.Tensor
    weight: WatchedParameter


class Averages(Measuring):
    """Finds tensors that look like copies of the model's weights, and compares their values later.

    Holds none of the tensors. The optimizers' states do not count as copies.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._copies: dict[int, _Copy] = {}
        self._first_step = 0

    def end_step(self, step: int, sampled: bool) -> None:
        """Search for copies of the weights at the end of certain measured steps."""
        super().end_step(step, sampled)
        if self._clock.measured and step in _LOOKED_FOR and self._optimizers.any_stepped:
            self._find(step)

    @torch.no_grad()
    def run_ends(self) -> None:
        """Record the copies if most of their elements that differ from the weights stayed the same although they were written."""
        super().run_ends()
        counts: list[torch.Tensor] = []
        names: set[str] = set()
        writes, dtype = 0, ""
        for copy in self._copies.values():
            tensor = copy.tensor()
            if tensor is None or tensor._version - copy.version < _FEWEST_WRITES or not is_plain(tensor):
                continue
            if not is_plain(copy.weight.parameter):
                continue
            now, weight = drawn(tensor), drawn(copy.weight.parameter).to(tensor.device, tensor.dtype)
            # An element that equals the weight has no reason to change.
            lags = now != weight
            counts.append(torch.stack([(lags & (now == copy.values)).sum(), lags.sum()]).cpu())
            writes = max(writes, tensor._version - copy.version)
            names.add(copy.weight.name)
            dtype = dtype_name(tensor.dtype)
        self._copies.clear()
        if not counts:
            return
        unmoved, lagging = torch.stack(counts).sum(0).tolist()
        if lagging and unmoved >= _MOST_UNMOVED * lagging:
            of = tuple(each.name for each in self._parameters if each.name in names)[:_MOST_NAMES]
            self._record_names(
                Average(
                    step=self._first_step,
                    names=of,
                    text=dtype,
                    unmoved_fraction=unmoved / lagging,
                    writes=writes,
                    tensors=len(counts),
                )
            )

    @torch.no_grad()
    def _find(self, step: int) -> None:
        """Remember the 16-bit tensors that have a weight's shape and are neither weights, gradients nor optimizer states."""
        shapes: dict[tuple[int, ...], list[WatchedParameter]] = {}
        ours: set[int] = set()
        for watched in self._parameters:
            if is_plain(watched.parameter):
                shapes.setdefault(tuple(watched.parameter.shape), []).append(watched)
            ours |= {id(watched.parameter), id(watched.parameter.grad)}
        ours |= self._optimizers.states()
        ours |= self._copies.keys()
        if not self._copies:
            self._first_step = step
        # A tensor mode of the script would intercept the attributes.
        with torch._C.DisableTorchFunction():
            found = living(_TYPES, _MAY_BE_COPIES, (_SHAPE, shapes))
        for each in found:
            if id(each) not in ours and each.numel() > 1 and is_plain(each) and not each.is_inference():
                values, alike = drawn(each), shapes[tuple(each.shape)]
                distances = [HostCopy(_distance(values, watched)) for watched in alike]
                remember = partial(self._remember, weakref.ref(each), each._version, values, alike, distances)
                self._arrivals.call(distances, remember)

    def _remember(
        self,
        tensor: weakref.ref[torch.Tensor],
        version: int,
        values: torch.Tensor,
        alike: Sequence[WatchedParameter],
        distances: Sequence[HostCopy],
    ) -> None:
        """Remember a tensor as a copy of the weight that it is closest to, if it is close."""
        each = tensor()
        distance, place = min((float(found.values()), place) for place, found in enumerate(distances))
        if each is not None and distance <= _FARTHEST:
            self._copies[id(each)] = _Copy(tensor, version, values, alike[place])


def _distance(values: torch.Tensor, watched: WatchedParameter) -> torch.Tensor:
    """Return the mean distance of a copy from a weight of its shape, in mean magnitudes of the weight; inf for a zero weight.

    The result is on the weight's device.
    """
    weight = drawn(watched.parameter).float()
    size = weight.abs().mean()
    distance = (values.to(weight.device, torch.float32, non_blocking=True) - weight).abs().mean() / size
    return distance.masked_fill(~(size > 0), math.inf)
