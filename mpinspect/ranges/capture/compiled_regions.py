"""The compiled regions of a model (torch.compile): names them, reads their formats, and runs them eagerly in chosen steps.

No hook runs inside compiled code. ``torch.compiler.set_stance("force_eager")`` would run everything in the process eagerly, the
optimizer's compiled step and other threads' models too. So only the calls of this model's own regions are rerouted: the
function that ``torch.compile`` stored on a module is replaced by one that chooses, at each call, between the compiled function
and its eager original. Compiled code is never changed, so there is no recompilation.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch

from mpinspect.ranges.capture.graph import graph
from mpinspect.ranges.capture.layers import Layer
from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.reporting.words import some
from mpinspect.runtime.compiled_graphs import compiled_graphs
from mpinspect.runtime.garbage_collection import living
from mpinspect.runtime.hooks import in_compiled_call, not_compiled
from mpinspect.runtime.wrappers import compiled_functions, submodules, unwrapped

#: Maximum number of regions named in a sentence.
_MOST_NAMED = 5
#: Maximum number of nodes read in a loss's graph. A node takes some 4 microseconds; compiled code is one node.
_MOST_NODES = 4096
#: Minimum share of a format among the elements that compiled code saved. A smaller share may be a buffer or the data.
_LEAST_SHARE = 1 / 16

#: Returns whether the region that is about to be called runs eagerly. Must not raise.
Ask = Callable[[], bool]


def unseen_regions(layers: Iterable[Layer], *, search: bool = False) -> list[str]:
    """Return the paths of the layers with compiled code that hides tensors from hooks; a compiled leaf in a wrapper does not.

    Args:
        search: also search all living objects for wrappers of ``torch.compile`` that contain the model.
    """
    layers = list(layers)
    paths = {id(unwrapped(layer.module)): layer.path for layer in layers}
    unseen: dict[str, None] = {}
    if search:
        unseen = {paths.get(id(unwrapped(wrapper)), ""): None for wrapper in _wrappers_around(_with_inner(layers))}
    for layer in layers:
        attributes = compiled_functions(layer.module).keys()
        if attributes - {"forward"} or (attributes and not layer.is_leaf):
            unseen[layer.path] = None
    return list(unseen)


def not_seen_inside(paths: Collection[str]) -> str:
    """Return a sentence on the unseen tensors inside compiled modules ("": the whole model), and how to see them."""
    where = "the compiled model"
    if "" not in paths:
        where = f"the compiled {'module' if len(paths) == 1 else 'modules'} {some(list(paths), _MOST_NAMED)}"
    return (
        f"hooks do not run inside torch.compile: inside {where} only weight gradients were counted and watched. "
        "eager_samples=True (mpinspect run --eager-samples) runs the sampled steps uncompiled to see the rest, which changes "
        "the last bits of their results"
    )


def formats_in_graph(losses: Iterable[torch.Tensor], parameters: Iterable[torch.Tensor]) -> list[str] | None:
    """Return the dtypes of the values in the losses' graph; None if the graph does not reach the parameters.

    These are the results of the graph's operations, and the tensors that compiled code saved for its backward. "" stands for
    values that could not be read. Reads dtypes only, and unpacks no tensor that hooks packed.
    """
    nodes = graph([loss.grad_fn for loss in losses], _MOST_NODES)
    leaves = {id(getattr(node, "variable", None)) for node in nodes}
    if leaves.isdisjoint(map(id, parameters)):
        return None
    found: dict[str, None] = {}
    if len(nodes) >= _MOST_NODES:
        found[""] = None
    for node in nodes:
        made = getattr(node, "_input_metadata", None)
        if made is None:
            found[""] = None
        elif not hasattr(node, "variable"):
            found.update((dtype_name(each.dtype), None) for each in made if each.dtype.is_floating_point)
        if _is_compiled_node(node):
            found.update(dict.fromkeys(_saved_formats(node)))
    return list(found)


def _is_compiled_node(node: Any) -> bool:
    return type(node).__name__ == "CompiledFunctionBackward"


def _saved_formats(node: Any) -> Iterator[str]:
    """Yield the dtypes with a noticeable share of a compiled node's saved tensors; "" for a tensor that can't be read."""
    elements: Counter[str] = Counter()
    for saved in getattr(node, "_raw_saved_tensors", (None,)):
        value = getattr(saved, "data", None)
        if not isinstance(value, torch.Tensor):
            yield ""
        elif value.dtype.is_floating_point and not value.requires_grad:
            elements[dtype_name(value.dtype)] += value.numel()
    yield from (dtype for dtype, count in elements.items() if count >= _LEAST_SHARE * elements.total())


class EagerCalls:
    """Reroutes the calls of a model's compiled regions; ``reroute`` begins it and ``remove`` ends it.

    Args:
        layers: the model's modules. Compiled wrappers around the model, or around a module that contains it, count too.
        ask: called at each call of a region.
    """

    def __init__(self, layers: Iterable[Layer], ask: Ask) -> None:
        self._modules = _with_inner(layers)
        self._ask = ask
        self._entries: list[_Entry] = []
        self._graphs: int | None = None

    def reroute(self) -> None:
        """Find and reroute the regions that exist now, if torch.compile has compiled anything since the last call."""
        graphs = compiled_graphs()
        if graphs == self._graphs:
            return
        self._graphs = graphs
        for module in (*self._modules.values(), *_wrappers_around(self._modules)):
            for attribute, function in compiled_functions(module).items():
                entry = _entry(module, attribute, function)
                if self._ask not in entry.asks:
                    entry.asks.append(self._ask)
                    self._entries.append(entry)

    def remove(self) -> None:
        """Restore the compiled functions that no other inspector reroutes."""
        while self._entries:
            self._entries.pop().leave(self._ask)


def may_run_eagerly() -> bool:
    """Return whether a compiled region that is called now may run eagerly, with no effect other than its rounding.

    It must run compiled if gradients are disabled; in a recomputation, or if hooks pack saved tensors (a checkpoint compares
    its saved tensors with a compiled recomputation); inside other compiled code; and under a stance set by the user, which may
    forbid compiling functions that the eager code calls.
    """
    if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
        return False
    if _packs_saved_tensors():
        return False
    dynamo: Any = sys.modules["torch._dynamo.eval_frame"]
    return not in_compiled_call() and dynamo._stance.stance in ("default", "force_eager")


def _packs_saved_tensors() -> bool:
    """Return whether the user's hooks pack the tensors that autograd saves on this thread."""
    autograd: Any = torch._C._autograd
    if hasattr(autograd, "_top_saved_tensors_default_hooks"):
        return autograd._top_saved_tensors_default_hooks(True) is not None
    if not autograd._saved_tensors_hooks_is_enabled():
        return False
    # torch 2.6 has no such query, but refuses to disable existing hooks.
    try:
        autograd._saved_tensors_hooks_disable("")
    except RuntimeError:
        return True
    finally:
        autograd._saved_tensors_hooks_enable()
    return False


class _Entry:
    """Replaces a compiled function on its module; calls the eager original if any inspector requests it."""

    def __init__(self, module: torch.nn.Module, attribute: str, compiled: FunctionType) -> None:
        self.asks: list[Ask] = []
        self._module, self._attribute, self._compiled = module, attribute, compiled
        asks, eager = self.asks, compiled._torchdynamo_orig_callable  # type: ignore[attr-defined]

        # ``wraps`` copies the compiled function's attributes, so that calls from compiled code inline the same function.
        @not_compiled
        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return compiled(*args, **kwargs)
            # Ask every inspector, since each reports the call to its own step clock.
            wanted = [ask() for ask in tuple(asks)]
            if any(wanted):
                return eager(*args, **kwargs)
            return compiled(*args, **kwargs)

        self._call = call
        vars(module)[attribute] = call

    @property
    def is_in_place(self) -> bool:
        return vars(self._module).get(self._attribute) is self._call

    def leave(self, ask: Ask) -> None:
        """Remove ``ask``; restore the compiled function if no inspector is left."""
        if ask in self.asks:
            self.asks.remove(ask)
        if not self.asks and self.is_in_place:
            del _entries[id(self._module), self._attribute]
            vars(self._module)[self._attribute] = self._compiled


#: The entries of all inspectors, by the id of their module and its attribute.
_entries: dict[tuple[int, str], _Entry] = {}


def _entry(module: torch.nn.Module, attribute: str, compiled: FunctionType) -> _Entry:
    """Return the entry at an attribute of a module, and create it if it is missing."""
    key = id(module), attribute
    known = _entries.get(key)
    if known is None or not known.is_in_place:
        known = _entries[key] = _Entry(module, attribute, compiled)
    return known


def _with_inner(layers: Iterable[Layer]) -> dict[int, torch.nn.Module]:
    """Return the modules of layers, and those that they wrap, by id."""
    return {id(each): each for layer in layers for each in (layer.module, unwrapped(layer.module))}


def _wrappers_around(modules: Mapping[int, torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the living wrappers of ``torch.compile`` that contain any of these modules and are not among them."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return []
    wrappers = [
        each for each in living([dynamo.OptimizedModule]) if id(each) not in modules and compiled_functions(each)
    ]
    return [each for each in wrappers if any(id(part) in modules for part in submodules(each))]
