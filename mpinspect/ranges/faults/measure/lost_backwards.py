"""Finds backwards whose gradients are zeroed before any optimizer has stepped on them, so that the last one alone counts."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from mpinspect.ranges import records
from mpinspect.ranges.capture.graph import walk
from mpinspect.ranges.capture.host_rows import HostCopy
from mpinspect.ranges.capture.layers import WatchedParameter
from mpinspect.ranges.capture.optimizers import ModelOptimizers
from mpinspect.ranges.faults.measure.masters import Samples, samples
from mpinspect.ranges.faults.measure.measuring import Magnitudes

#: Fewest steps that must lose backwards, and the share of the compared steps that must.
_FEWEST_STEPS, _NEARLY_ALL = 3, 0.9
#: Maximum number of a step's backwards before which a few elements of the weights are read, and of a graph's nodes in a search.
_MOST_SAMPLED, _MOST_NODES = 4, 20_000
#: Gradients that one factor of at most 1 changed on their way to the optimizer agree up to 16-bit rounding.
_ALIKE = 0.01


@dataclass
class Backwards:
    """The evidence of one step.

    Args:
        is_proof: whether the weights and the losses' graphs are read, too.
        begun: the gradients at the beginning of the last backward.
        last: the gradients at its end; None once an optimizer has stepped on them.
        backwards: the gradients at the beginning and the end of each backward, and at the beginning of the next.
        micro_batches: the number of each backward's forward.
        weights, versions: a few elements of the weights when a backward began, and their version counters.
        outputs: the outputs of the modules' calls since the last backward.
        serves_others: whether a loss reaches a tensor outside of the model and its optimizers, or an output keeps its gradient.
    """

    is_proof: bool = False
    begun: Magnitudes | None = None
    last: Magnitudes | None = None
    backwards: list[tuple[Magnitudes, Magnitudes, Magnitudes]] = field(default_factory=list)
    micro_batches: list[int] = field(default_factory=list)
    weights: list[Samples] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    outputs: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    serves_others: bool = False

    def copies(self) -> list[HostCopy]:
        """Return the copies that judging the step reads."""
        found = [copy for each in self.backwards for moment in each for copy in moment.copies()]
        return found + [copy for each in self.weights for copy in each.copies]

    def lost(self, of: Collection[str]) -> list[set[str]]:
        """Return the parameters of each backward whose gradients were zeroed before the next; [] if any stayed. ``of``: read."""
        found: list[set[str]] = []
        for moments in self.backwards:
            before, after, later = (
                {name: value for name, value in each.read().items() if name in of} for each in moments
            )
            # A backward that asks for other gradients, such as an input's, leaves these as they are.
            given = {name for name, value in after.items() if value and value != before.get(name)}
            stayed = {name for name, value in later.items() if value}
            if given and stayed:
                return []
            found += filter(None, [given])
        return found

    def weights_stayed(self) -> bool:
        """Return whether the weights are the same in all backwards; writes through ``.data`` are seen in a few elements."""
        first, *others = [each.read() for each in self.weights]
        is_same = all(torch.equal(first[name], other[name]) for other in others for name in first if name in other)
        return is_same and all(each == self.versions[0] for each in self.versions)


class LostBackwards:
    """Counts the steps that lose backwards. A first one is only suspected; the weights are read in later measured steps.

    Loops that use such gradients otherwise are left out: the weights change between the backwards (sharpness-aware minimisation),
    several backwards share a forward (norms of the gradients of tasks), a loss serves other tensors (adversarial examples, a
    generator before a discriminator), or the optimizer gets other gradients than the last backward's (sums that the loop makes).
    """

    def __init__(self, parameters: Sequence[WatchedParameter], optimizers: ModelOptimizers) -> None:
        self._parameters, self._optimizers = parameters, optimizers
        self._is_suspected = False
        #: The steps that were compared, and those that lost backwards.
        self._compared = 0
        self._found: list[records.LostBackwards] = []
        #: The parameters whose gradients were lost, and those whose gradients an optimizer received.
        self._lost: set[str] = set()
        self._used: set[str] = set()

    def begin_step(self, is_measured: bool) -> Backwards:
        """Return the empty evidence of a step."""
        return Backwards(is_measured and self._is_suspected)

    def called(self, now: Backwards, outputs: Sequence[torch.Tensor]) -> None:
        """Remember a call's outputs: the loop may retain their gradients until the backward is called."""
        if now.is_proof:
            now.outputs += map(weakref.ref, outputs)

    def backward_called(self, now: Backwards, losses: Sequence[torch.Tensor]) -> None:
        """Search for outputs that retain their gradients, and the losses' graph for other tensors than the model's."""
        if not now.is_proof or now.serves_others:
            return
        known = {id(each.parameter) for each in self._parameters}
        groups = (group for optimizer in self._optimizers.living() for group in optimizer.param_groups)
        known |= {id(parameter) for group in groups for parameter in group["params"]}
        leaves = (getattr(node, "variable", None) for node in walk((loss.grad_fn for loss in losses), _MOST_NODES))
        outputs = [reference() for reference in now.outputs]
        now.outputs.clear()
        retains = any(output is not None and output.retains_grad for output in outputs)
        now.serves_others = retains or any(leaf is not None and id(leaf) not in known for leaf in leaves)

    def backward_begins(self, now: Backwards, gradients: Magnitudes, micro_batch: int) -> None:
        """Record the gradients at the beginning of a backward of a micro-batch's forward."""
        now.micro_batches.append(micro_batch)
        if now.last is not None and now.begun is not None:
            now.backwards.append((now.begun, now.last, gradients))
        now.begun, now.last = gradients, None
        if now.is_proof and len(now.weights) < _MOST_SAMPLED:
            now.weights.append(samples((each.name, each.parameter) for each in self._parameters))
            now.versions.append([each.parameter._version for each in self._parameters])

    def judge(self, step: int, now: Backwards, given: Mapping[str, float], handed: Mapping[str, float]) -> None:
        """Judge a step whose values have reached the host.

        Args:
            step: its number.
            now: its evidence.
            given: the largest magnitude of each gradient at the end of the last backward.
            handed: the largest magnitude of each gradient that an optimizer received; 0 for None.
        """
        lost = now.lost(handed) if _is_alike(given, handed) else []
        if not now.is_proof:
            self._is_suspected |= bool(lost)
            return
        self._compared += 1
        self._used |= {name for name, value in handed.items() if value}
        backwards = len(now.micro_batches)
        if lost and not now.serves_others and len(set(now.micro_batches)) == backwards and now.weights_stayed():
            self._lost = self._lost.union(*lost)
            self._found.append(records.LostBackwards(step=step, lost=len(lost), backwards=backwards))

    def found(self) -> Iterator[records.LostBackwards]:
        """Yield the record of each step that lost backwards, if nearly all steps did."""
        if len(self._found) >= max(_FEWEST_STEPS, _NEARLY_ALL * self._compared):
            only = tuple(each.name for each in self._parameters if each.name in self._lost - self._used)
            for each in self._found:
                yield replace(each, names=only)


def _is_alike(given: Mapping[str, float], handed: Mapping[str, float]) -> bool:
    """Return whether an optimizer got the gradients of the last backward, all multiplied by one factor of at most 1."""
    factors = [value / given[name] if given.get(name) else math.inf for name, value in handed.items() if value]
    return bool(factors) and max(factors) <= min(1.0, min(factors)) * (1 + _ALIKE)
