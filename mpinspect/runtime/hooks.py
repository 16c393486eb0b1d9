"""Hooks on a model while an inspector is attached, which can be removed, copied and pickled safely.

A module stores its hooks in its own dictionaries, so copying the module copies the hooks: an EMA copy would
count its own forwards, and `torch.save(model)` would try to pickle the inspector. Our hooks are therefore copied
and pickled as functions without effect that need only the standard library to load.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

Function = TypeVar("Function", bound=Callable[..., Any])

#: A function that accepts any arguments, has no effect, returns None, and is pickled by the name of a built-in.
_INERT = functools.partial(sys.audit, "mpinspect.inactive")


def not_compiled(function: Function) -> Function:
    """Exclude this function's own frame from torch.compile; traced code still inlines the function.

    Hooks of a compiled module can run while its compiler watches every frame: compiling ours would raise an error under
    ``torch.compiler.set_stance("fail_on_recompile")``.
    """
    dynamo: Any = torch._C._dynamo.eval_frame
    if hasattr(dynamo, "set_code_exec_strategy"):
        action = dynamo._FrameAction
        dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(action.SKIP, action.DEFAULT))
    elif hasattr(dynamo, "skip_code"):  # torch 2.6
        dynamo.skip_code(function.__code__)
    return function


def _callback_of_compiled_call() -> Any:
    """Return the result of torch's ``get_eval_frame_callback``, without its reference counting error in torch 2.6."""
    dynamo: Any = torch._C._dynamo.eval_frame
    callback = dynamo.set_eval_frame(None)
    if callback is not None:
        dynamo.set_eval_frame(callback)
    return callback


def _asks_safely() -> Callable[[], Any]:
    """Return torch's function for the current frame compiler, or a replacement where torch's corrupts reference counts.

    In torch 2.6 each call decrements the reference count of its result: some 50,000 calls outside of compiled code deallocate
    None and end the process, and a few calls within one free the compiler's own function.
    """
    dynamo: Any = torch._C._dynamo.eval_frame
    if hasattr(dynamo, "set_code_exec_strategy"):
        return dynamo.get_eval_frame_callback  # type: ignore[no-any-return]
    return not_compiled(_callback_of_compiled_call)


#: Returns the frame compiler while a compiled function is being called, else None or False; never compiled itself.
in_compiled_call: Callable[[], Any] = _asks_safely()


@not_compiled
def compiler_is_off() -> bool:
    """Return whether compiled functions run uncompiled now, by ``set_stance("force_eager")`` or dynamo's ``config.disable``."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and (dynamo._stance.stance == "force_eager" or dynamo.config.disable)


class Uncopied:
    """Base of hooks that have no effect in copies and pickles of the model or optimizer that holds them."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _INERT

    def __reduce__(self) -> tuple[Any, ...]:
        return (functools.partial, (sys.audit, "mpinspect.inactive"))


class ModelHook(Uncopied):
    """A hook on one module: calls ``react`` unless the module is a copy of the one it was put on."""

    __slots__ = ("_module_id", "_react")

    def __init__(self, module: object, react: Callable[..., None]) -> None:
        # Compare the id: a shallow copy of the module shares its dictionary of hooks but has another id.
        self._module_id = id(module)
        self._react = react

    @not_compiled
    def __call__(self, module: object, *args: Any) -> None:
        # Precedes all reads of state, so that torch.compile traces the hook to nothing.
        if torch.compiler.is_compiling() or (in_compiled_call() and not compiler_is_off()):
            return
        if id(module) == self._module_id:
            self._react(*args)


#: The key of our hook among a tensor's hooks; torch uses keys from 0 on.
_OURS = -1


def hook_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle | None:
    """Register a hook on a tensor's gradient like ``tensor.register_hook``; return a handle only for a leaf, else None.

    Every output of every step gets such a hook, and most of the time of ``register_hook`` is spent on its handle. Only
    leaves need a handle for removal, since their hooks outlive the graph.
    """
    node: Any = tensor.grad_fn
    if node is None or tensor._backward_hooks is not None or type(tensor) is not torch.Tensor:
        handle: RemovableHandle = torch.Tensor.register_hook(tensor, hook)  # type: ignore[no-untyped-call]
        return handle if tensor.is_leaf else None
    hooks: Any = OrderedDict()
    hooks[_OURS] = hook
    # torch.Tensor.register_hook takes the same two steps for a tensor's first hook.
    tensor._backward_hooks = hooks
    node._register_hook_dict(tensor)
    return None


class HandleList:
    """A list of hook handles that are removed together."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def add(self, handle: RemovableHandle) -> RemovableHandle:
        self._handles.append(handle)
        return handle

    def add_around(self, module: torch.nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> None:
        """Hook a module's forward, around the script's own hooks; ``leave`` follows an exception too. None in TorchScript's."""
        if not isinstance(module, torch.jit.ScriptModule):
            self.add(module.register_forward_pre_hook(ModelHook(module, enter), prepend=True))
            self.add(module.register_forward_hook(ModelHook(module, leave), always_call=True))

    def remove_all(self) -> None:
        """Remove every hook; a second call has no effect."""
        while self._handles:
            self._handles.pop().remove()
