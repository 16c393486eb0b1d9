"""Callables that sit on a model while an inspector is attached, and know how to leave it.

A hook lives in the module's own dictionaries, so whatever copies the module copies the hook: an EMA copy
would count its own forwards, `torch.save(model)` would try to pickle the inspector. Copies and pickles of
our hooks are therefore inert stand-ins that need nothing but the standard library to load.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

#: Takes any arguments, does nothing, returns None, and pickles by the name of a built-in.
_INERT = functools.partial(sys.audit, "mpinspect.inactive")


class ModelHook:
    """A hook on one module: calls ``react`` unless the module is a copy of the one it was put on."""

    __slots__ = ("_module_id", "_react")

    def __init__(self, module: object, react: Callable[..., None]) -> None:
        # The id, not the module: shallow copies share the hooks' dictionary but are other objects.
        self._module_id = id(module)
        self._react = react

    def __call__(self, module: object, *args: Any) -> None:
        # First of all, and before any state is read: torch.compile then traces the hook to nothing.
        if torch.compiler.is_compiling():
            return
        if id(module) == self._module_id:
            self._react(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _INERT

    def __reduce__(self) -> tuple[Any, ...]:
        return (functools.partial, (sys.audit, "mpinspect.inactive"))


#: The number of our hook among a tensor's: torch gives out those from 0 on.
_OURS = -1


def hook_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle | None:
    """Have a hook called with the gradient at a tensor that requires one: as ``tensor.register_hook`` does, without its handle.

    Every output of every step gets one, and what that method does for handles is most of its time. A handle, to remove
    the hook by, is returned where the tensor is a leaf, whose hooks outlive the graph.
    """
    node: Any = tensor.grad_fn
    if node is None or tensor._backward_hooks is not None or type(tensor) is not torch.Tensor:
        handle: RemovableHandle = torch.Tensor.register_hook(tensor, hook)  # type: ignore[no-untyped-call]
        return handle if tensor.is_leaf else None
    hooks: Any = OrderedDict([(_OURS, hook)])
    # The same two steps as torch.Tensor.register_hook takes for a tensor's first hook.
    tensor._backward_hooks = hooks
    node._register_hook_dict(tensor)
    return None


class HandleList:
    """Every handle that attaching gave, removed together."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def add(self, handle: RemovableHandle) -> RemovableHandle:
        self._handles.append(handle)
        return handle

    def remove_all(self) -> None:
        """Remove every hook; a second call does nothing."""
        while self._handles:
            self._handles.pop().remove()
