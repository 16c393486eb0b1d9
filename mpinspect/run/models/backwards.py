"""What a backward tells that no call of a module told: the last chance to attach to what it will reach.

So models are found whose hooks never fire (compiled ones, functional calls), parameters of no module, FP32 master copies, and
loops without any torch optimizer.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from mpinspect.run.models import graph
from mpinspect.run.models.attaching import Attaching, script_names
from mpinspect.run.models.inspector import LaunchedInspector
from mpinspect.run.models.naming import Label, label
from mpinspect.run.models.owners import Holders, Parameters, living_modules
from mpinspect.run.seen import Seen
from mpinspect.runtime.guard import Guarded, guarded

#: Graphs that are searched in vain, after which a backward is only counted until another optimizer is made.
_MOST_SEARCHES = 16
#: A leaf of no module and no optimizer is a parameter, and not an input, if so many backwards reach it.
_LASTS = 3


class Backwards(Guarded):
    """Looks at backwards while something is still to be found.

    Args:
        attaching: attaches, and knows the optimizers that wait.
        seen: the counts.
    """

    def __init__(self, attaching: Attaching, seen: Seen) -> None:
        super().__init__(seen.note)
        self._attaching = attaching
        self._seen = seen
        self._searches = 0
        self._lasting: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        #: Losses that a scaler has scaled and that no backward has begun at, with the scaler.
        self._scaled: deque[tuple[weakref.ref[torch.Tensor], Any]] = deque(maxlen=8)

    def search_again(self) -> None:
        """There is something new to be found."""
        self._searches = 0

    @property
    def settled(self) -> bool:
        """Whether nothing is left to be found: something is inspected and no optimizer waits."""
        waiting = any(not each.done and each.optimizer is not None for each in self._attaching.pending)
        return bool(self._attaching.models.all) and not waiting

    def scaled(self, scaler: Any, scaled: Any) -> None:
        """A scaler scaled a loss; if this leads to an attachment the inspector must hear of it."""
        if isinstance(scaled, torch.Tensor):
            self._scaled.append((weakref.ref(scaled), scaler))

    @guarded
    def begins(self, tensors: Any) -> None:
        """A backward is about to run."""
        if self._searches >= _MOST_SEARCHES or self.settled:
            return
        self._searches += 1
        before = {id(each): each.inspector.attached for each in self._attaching.models.all}
        self._attach_to(graph.leaves(tensors))
        for each in self._attaching.models.all:
            if each.inspector.attached and not before.get(id(each), False):
                self._tell_scales(each.inspector, tensors)

    def _attach_to(self, leaves: Mapping[int, torch.Tensor]) -> None:
        waiting = [each for each in self._attaching.pending if not each.done and each.optimizer is not None]
        reached = [each for each in waiting if not each.parameters.isdisjoint(leaves)]
        for each in reached:
            self._attaching.attach_without_call(each)
        inspected = self._attaching.models.holding(leaves) if leaves else None
        if reached or inspected is not None or any(each.has_modules for each in waiting):
            return
        self._attach_without_owner(leaves, waiting)

    def _attach_without_owner(self, leaves: Mapping[int, torch.Tensor], waiting: list[Any]) -> None:
        """No optimizer steps what this backward reaches: a loop that updates by hand, or one that steps copies."""
        holders = Holders(leaves, living_modules())
        tops = holders.targets(None) if holders.modules else []
        if waiting and len(tops) == 1:
            self._seen.note(
                "an optimizer steps tensors of no module that no backward reaches: they were taken for the weights' master copies"
            )
            self._attaching.attach(waiting[0], tops)
            return
        known = script_names(holders, ()) if tops else {}
        for model in tops:
            self._attaching.inspect_without_optimizer(model, label(model, holders, known))
        if not tops and not waiting:
            self._attach_to_lasting(leaves)

    def _attach_to_lasting(self, leaves: Mapping[int, torch.Tensor]) -> None:
        counted = {}
        for key, leaf in leaves.items():
            reference, times = self._lasting.get(key, (None, 0))
            same = reference is not None and reference() is leaf
            counted[key] = (weakref.ref(leaf), times + 1 if same else 1)
        self._lasting = counted
        lasting = [leaf for key, leaf in leaves.items() if counted[key][1] >= _LASTS]
        if lasting:
            self._seen.note(
                f"{len(lasting)} parameters are in no module and have numbers for names: {_shapes(lasting)}"
            )
            self._attaching.inspect_without_optimizer(Parameters(lasting), Label())

    def _tell_scales(self, inspector: LaunchedInspector, tensors: Any) -> None:
        starts = tensors if isinstance(tensors, (list, tuple)) else [tensors]
        for reference, scaler in self._scaled:
            scaled = reference()
            if scaled is not None and any(scaled is start for start in starts):
                inspector.loss_scaled(scaler, scaled)


def _shapes(tensors: list[torch.Tensor]) -> str:
    shown = ", ".join(f"{number} {tuple(tensor.shape)}" for number, tensor in enumerate(tensors[:4]))
    return shown + (", ..." if len(tensors) > 4 else "")
