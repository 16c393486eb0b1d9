"""Attaches to models whose calls were not seen, by searching the graph of a backward as it begins.

These are models whose hooks never run (compiled ones, functional calls), parameters that belong to no module, FP32
master copies of weights, and models trained without a torch optimizer.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from mpinspect.ranges.capture.graph import walk
from mpinspect.run.models.attaching import Attacher, PendingOptimizer, script_names
from mpinspect.run.models.launched_inspector import LaunchedInspector
from mpinspect.run.models.naming import Label, label
from mpinspect.run.models.owners import Holders, Parameters, are_masters, living_modules
from mpinspect.run.outcome import Seen
from mpinspect.runtime.guard import Guarded, guarded
from mpinspect.runtime.wrappers import class_of, unwrapped

#: Most nodes read of one graph; reading them takes some 0.2 s and is enough for thousands of layers.
_MOST_NODES = 300_000
#: Most searches of graphs. After these, backwards are only counted until another optimizer is made.
_MOST_SEARCHES = 16
#: A leaf of no module and no optimizer counts as a parameter, not an input, if this many backwards in a row reach it.
_LASTS = 3
#: Bytes of a 16-bit number.
_HALF = 2


class BackwardSearch(Guarded):
    """Searches the graphs of backwards as long as a model may still be found.

    Args:
        attaching: attaches, and knows the pending optimizers.
        seen: receives the notes.
    """

    def __init__(self, attaching: Attacher, seen: Seen) -> None:
        super().__init__(seen.note)
        self._attaching = attaching
        self._seen = seen
        self._searches = 0
        self._lasting: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        #: The most recent scaled losses, with their scalers.
        self._scaled: deque[tuple[weakref.ref[torch.Tensor], Any]] = deque(maxlen=8)

    def search_again(self) -> None:
        """Allow further searches, since an optimizer was made."""
        self._searches = 0

    @property
    def settled(self) -> bool:
        """Whether the search is over: a model is inspected and no optimizer is pending."""
        waiting = any(not each.done and each.optimizer is not None for each in self._attaching.pending)
        return bool(self._attaching.models.all) and not waiting

    def scaled(self, scaler: Any, scaled: Any) -> None:
        """Keep a weak reference to a scaled loss, from which an inspector attached by its backward gets the scale."""
        if isinstance(scaled, torch.Tensor):
            self._scaled.append((weakref.ref(scaled), scaler))

    @guarded
    def begins(self, tensors: Any) -> None:
        """Attach to the models whose parameters the backward that is about to run will reach."""
        if self._searches >= _MOST_SEARCHES or self.settled:
            return
        self._searches += 1
        before = {id(each): each.inspector.attached for each in self._attaching.models.all}
        self._attach_to(leaves(tensors))
        for each in self._attaching.models.all:
            if each.inspector.attached and not before.get(id(each), False):
                self._tell(each.inspector, tensors)

    @guarded
    def asked_for(self, inputs: Any) -> None:
        """Attach to the models whose parameters' gradients ``torch.autograd.grad`` has returned."""
        given = [each for each in _several(inputs) if isinstance(each, torch.Tensor) and each.is_leaf]
        if given and self._searches < _MOST_SEARCHES and not self.settled and self._may_be_trained(given):
            self._searches += 1
            self._attach_to({id(each): each for each in given})

    def _may_be_trained(self, given: Sequence[torch.Tensor]) -> bool:
        """Return whether the loop may train these leaves: there is no optimizer, or one steps as many elements."""
        optimizers = [each.optimizer for each in self._attaching.pending if each.optimizer is not None]
        size = sum(each.numel() for each in given)
        return not self._seen.optimizers or any(size == _size(optimizer) for optimizer in optimizers)

    def _attach_to(self, leaves: Mapping[int, torch.Tensor]) -> None:
        waiting = [each for each in self._attaching.pending if not each.done and each.optimizer is not None]
        reached = [each for each in waiting if not each.parameters.isdisjoint(leaves)]
        for each in reached:
            self._attaching.attach_without_call(each)
        if reached or (leaves and self._attaching.models.holding(leaves) is not None):
            return
        with_modules = [each for each in waiting if each.has_modules]
        if with_modules:
            self._attach_to_copies(leaves, with_modules)
        else:
            self._attach_without_owner(leaves, waiting)

    def _attach_to_copies(self, leaves: Mapping[int, torch.Tensor], waiting: Sequence[PendingOptimizer]) -> None:
        """Attach to the model whose masters are the parameters of a module that optimizers step but no backward reaches."""
        if not any(leaf.is_floating_point() and leaf.element_size() <= _HALF for leaf in leaves.values()):
            return
        holders = Holders(leaves, living_modules())
        for each in waiting:
            if each.done:
                continue
            owners = each.models(None)
            copies = [_copies(owner, holders) for owner in owners]
            if not copies or any(len(found) != 1 for found in copies):
                continue
            models = [model for found in copies for model in found]
            known = script_names(holders, ())
            each.labels.update((id(model), label(model, holders, known)) for model in models)
            owned = " and ".join(f"a {class_of(owner).__name__}" for owner in owners)
            self._seen.note(
                f"an optimizer steps the parameters of {owned}, which no backward reaches: they are assumed to be master "
                "copies of the weights of another model, which computes in 16 bits"
            )
            self._attaching.attach(each, models, [other for other in waiting if other.models(None) == owners])

    def _attach_without_owner(self, leaves: Mapping[int, torch.Tensor], waiting: list[Any]) -> None:
        """Attach to leaf tensors that no optimizer steps: the script updates them by hand or steps copies of them."""
        holders, tops, known = Holders(leaves, living_modules()), [], {}
        if holders.modules:
            tops = holders.targets(None)
        if waiting and len(tops) == 1:
            self._seen.note(
                "an optimizer steps tensors that belong to no module and that no backward reaches: "
                "they are assumed to be master copies of the weights"
            )
            self._attaching.attach(waiting[0], tops)
            return
        if tops:
            known = script_names(holders, ())
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
            self._seen.note(f"parameters that belong to no module are named by number: {_shapes(lasting)}")
            self._attaching.inspect_without_optimizer(Parameters(lasting), Label())

    def _tell(self, inspector: LaunchedInspector, tensors: Any) -> None:
        """Pass this backward's losses, and their scaler if any, to an inspector that this backward attached."""
        inspector.backward_called(tensors)
        starts = tensors if isinstance(tensors, (list, tuple)) else [tensors]
        for reference, scaler in self._scaled:
            scaled = reference()
            if scaled is not None and any(scaled is start for start in starts):
                inspector.loss_scaled(scaler, scaled)


def _size(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of elements that an optimizer steps."""
    return sum(each.numel() for group in optimizer.param_groups for each in group["params"])


def _copies(owner: torch.nn.Module, holders: Holders) -> list[torch.nn.Module]:
    """Return the modules, without wrappers, whose masters ``owner`` may hold."""
    return list({id(unwrapped(each)): unwrapped(each) for each in holders.modules if are_masters(owner, each)}.values())


def _shapes(tensors: list[torch.Tensor]) -> str:
    shown = [f"{number} {tuple(tensor.shape)}" for number, tensor in enumerate(tensors[:4])]
    if len(tensors) > 4:
        shown.append("...")
    return ", ".join(shown)


# -- the graph -----------------------------------------------------------------------------------------------------------


def leaves(tensors: Any) -> dict[int, torch.Tensor]:
    """Return the leaf tensors, by id, whose ``.grad`` a backward from the given tensors can change.

    Args:
        tensors: the argument of ``torch.autograd.backward``: a tensor, a GradientEdge, or a sequence of them.
    """
    found: dict[int, torch.Tensor] = {}
    waiting: list[Any] = []
    for start in _several(tensors):
        if isinstance(start, torch.Tensor) and start.grad_fn is None and start.requires_grad:
            found[id(start)] = start
        node = start.grad_fn if isinstance(start, torch.Tensor) else getattr(start, "node", None)
        if node is not None:
            waiting.append(node)
    for node in walk(waiting, _MOST_NODES):
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            found[id(variable)] = variable
    return found


def _several(tensors: Any) -> Iterable[Any]:
    if isinstance(tensors, torch.Tensor) or hasattr(tensors, "node"):
        return (tensors,)
    if isinstance(tensors, (list, tuple)):
        return tensors
    return ()
