"""The graphs that torch.compile compiles: keeps each as it was captured, and hands its calls to a dispatch mode.

A graph holds the operators that the user's code called, before a backend replaced them by others. Running it has no effects of
Python code, and calls no module and no hook. This file alone has Dynamo's private names for it: a graph that a version of torch
does not show by them counts as missed.
"""

from __future__ import annotations

import copy
import functools
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, MethodType
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from mpinspect.runtime.torch_calls import COMPILED
from mpinspect.runtime.wrappers import compiled_functions, submodules

#: Whether code is compiled under a dispatch mode. Other versions of torch run it uncompiled there, with other results.
_COMPILES_IN_MODES = hasattr(TorchDispatchMode, "ignore_compile_internals")
#: How torch writes a member of a module, such as ``._modules['fc']``.
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")

Compiled = Callable[..., Any]


class Captured(NamedTuple):
    """A graph as it was captured.

    Args:
        owner: has the graph's attributes.
        graph: a copy, since backends change the graphs that they are given.
        sources: the expressions from which the compiled code takes the graph's arguments, such as "L['self'].fc.weight".
    """

    owner: torch.fx.GraphModule
    graph: torch.fx.Graph
    sources: tuple[str, ...]


class CallsGraphs(Protocol):
    """Calls compiled graphs; an attribute ``calls_graphs`` of a dispatch mode."""

    def __call__(self, captured: Captured, compiled: Compiled, args: tuple[Any, ...]) -> Any: ...


class Keeping:
    """Keeps the graphs that are compiled while it has users."""

    def __init__(self) -> None:
        self._kept = 0
        #: The ids of the modules that the graphs call.
        self._modules: set[int] = set()
        self._users: set[int] = set()
        self._replaced: tuple[Any, Any] | None = None

    def begin(self, user: object) -> None:
        """Keep graphs for a user. Waits for a call of ``torch.compile`` if the compiler is not loaded."""
        if not self._users:
            COMPILED.listen(self._may_be_loaded, after=True)
        self._users.add(id(user))
        self._may_be_loaded()

    def end(self, user: object) -> None:
        """Keep no further graphs for a user; without users, those that were compiled so far count as missed."""
        self._users.discard(id(user))
        if not self._users:
            # New modules get the ids of freed ones.
            self._modules.clear()
            self._kept = 0
            COMPILED.unlisten(self._may_be_loaded)
            if self._replaced is not None:
                owner, original = self._replaced
                owner.call_user_compiler, self._replaced = original, None

    def has_missed_any(self, models: Iterable[torch.nn.Module]) -> bool:
        """Return whether torch has compiled a graph that was not kept, or will compile one of these models so."""
        return compiled_graphs() > self._kept or (not _COMPILES_IN_MODES and is_any_compiled(models))

    def inside(self, modules: Iterable[torch.nn.Module]) -> frozenset[int]:
        """Return the ids of modules that are compiled, or are called by compiled code, and of the modules inside them.

        A hook that is added to one may recompile its code, and never runs.
        """
        tops = [each for each in modules if id(each) in self._modules or compiled_functions(each)]
        return frozenset(id(part) for top in tops for part in submodules(top))

    def _call_user_compiler(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Have torch compile a graph; return the function that calls it."""
        captured = self._captured(*args[1:2])
        compiled = original(*args, **kwargs)
        if captured is None or not isinstance(compiled, (FunctionType, MethodType)):
            return compiled
        self._kept += 1
        return _calling(captured, compiled)

    def _captured(self, owner: Any = None) -> Captured | None:
        """Copy a graph before a backend changes it; None if this version of torch does not show it."""
        try:
            captured = Captured(owner, copy.deepcopy(owner.graph), tuple(map(_source, _arguments(owner.graph))))
            self._modules |= {int(key) for node in owner.graph.nodes for key in modules_of(node) if key.isdigit()}
            return captured
        except Exception:
            return None

    def _may_be_loaded(self, *_: Any) -> None:
        module: Any = sys.modules.get("torch._dynamo.output_graph")
        owner = getattr(module, "OutputGraph", None)
        original = getattr(owner, "call_user_compiler", None)
        if owner is not None and original is not None and self._replaced is None:
            self._replaced = owner, original
            owner.call_user_compiler = functools.wraps(original)(
                lambda *args, **kwargs: self._call_user_compiler(original, *args, **kwargs)
            )


KEEPING = Keeping()


def _calling(captured: Captured, compiled: Compiled) -> Compiled:
    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        if torch._C._len_torch_dispatch_stack():
            for mode in _get_current_dispatch_mode_stack():
                calls: CallsGraphs | None = getattr(mode, "calls_graphs", None)
                if calls is not None:
                    return calls(captured, compiled, args)
        return compiled(*args)

    return call


def _arguments(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _source(argument: torch.fx.Node) -> str:
    name = argument.meta["grapharg"].source.name
    return plain_source(name() if callable(name) else name)


def compiled_graphs() -> int:
    """Return how many graphs torch.compile has compiled in this process."""
    return _count("stats", "unique_graphs")


def is_any_compiled(models: Iterable[torch.nn.Module]) -> bool:
    """Return whether torch.compile has compiled a model or anything else."""
    return _count("frames", "total") > 0 or any(
        compiled_functions(part) for model in models for part in model.modules()
    )


def _count(group: str, name: str) -> int:
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters[group].get(name, 0))


def modules_of(node: torch.fx.Node) -> Mapping[str, tuple[str, Any]]:
    """Return the modules around a node, the innermost last: each has its id, and its expression and class."""
    return node.meta.get("nn_module_stack") or {}


def plain_source(name: str) -> str:
    """Return torch's name of a module or parameter with dots: "L['self']._modules['fc']" as "L['self'].fc"."""
    return _MEMBER.sub(r".\1", name)
