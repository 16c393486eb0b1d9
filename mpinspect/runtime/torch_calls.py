"""Reports the calls of some of torch's functions to listeners, by wrapping the functions as long as there are listeners.

torch looks these functions up at each call. If other code has wrapped one of them in the meantime, our wrapper stays in place
without effect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad

#: Called with the arguments that ``Calls`` names, before torch's function runs or after it; must not raise.
Listener = Callable[..., object]


class Calls:
    """The calls of one function.

    Args:
        places: the modules that hold the function, each with its name there; missing ones are skipped.
        **arguments: the arguments that listeners receive, by name, with their positions.
    """

    def __init__(self, *places: tuple[Any, str], **arguments: int) -> None:
        self._places = places
        self._arguments = arguments
        #: Each listener, and whether it is called after the function.
        self._listeners: list[tuple[Listener, bool]] = []
        #: For each place: the module, the name, torch's function and our wrapper.
        self._wrapped: list[tuple[Any, str, Any, Any]] = []

    def listen(self, listener: Listener, after: bool = False) -> None:
        """Call ``listener`` at every call from now on, after the listeners already registered.

        Args:
            after: whether to call it once the function has run, with its result as the last argument.
        """
        if not self._wrapped:
            for owner, name in self._places:
                original = getattr(owner, name, None)
                if original is not None:
                    self._wrapped.append((owner, name, original, self._reporting(original)))
                    setattr(owner, name, self._wrapped[-1][-1])
        self._listeners.append((listener, after))

    def unlisten(self, listener: Listener) -> None:
        """Stop calling ``listener``, and restore torch's function if no listener is left."""
        self._listeners = [each for each in self._listeners if each[0] != listener]
        if not self._listeners and all(getattr(owner, name) is ours for owner, name, _, ours in self._wrapped):
            while self._wrapped:
                owner, name, original, _ = self._wrapped.pop()
                setattr(owner, name, original)

    def _reporting(self, original: Any) -> Any:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._listeners:
                return original(*args, **kwargs)
            given = [args[place] if place < len(args) else kwargs.get(name) for name, place in self._arguments.items()]
            listeners = tuple(self._listeners)
            for listener, after in listeners:
                if not after:
                    listener(*given)
            result = original(*args, **kwargs)
            for listener, after in listeners:
                if after:
                    listener(*given, result)
            return result

        return run


#: ``Tensor.backward`` calls this function. Listeners receive the tensors from which the backward starts.
BACKWARD = Calls((torch.autograd, "backward"), tensors=0)
#: Listeners receive the outputs, the inputs and whether a graph of the gradients is made (None: no); after the call, also the
#: gradients that were returned.
GRADIENTS = Calls((torch.autograd, "grad"), outputs=0, inputs=1, create_graph=4)
#: ``clip_grad_norm_`` calls this function with its limit and the norm that it has found. Private; seen in torch 2.13.
CLIP_WITH_NORM = Calls(
    (clip_grad, "_clip_grads_with_norm_"),
    (torch.nn.utils, "clip_grads_with_norm_"),
    parameters=0,
    max_norm=1,
    total_norm=2,
)
#: An autocast region is made by this function. Listeners receive the type of its device, and whether it is enabled (None: yes).
AUTOCAST_MADE = Calls((torch.amp.autocast_mode.autocast, "__init__"), device_type=1, enabled=3)
#: The end of an outermost autocast region calls this function.
AUTOCAST_CACHE_CLEARED = Calls((torch, "clear_autocast_cache"))
#: Listeners receive the optimizer that is to be made, or has been made.
OPTIMIZER_MADE = Calls((torch.optim.Optimizer, "__init__"), optimizer=0)
#: Inference mode is about to begin or to end. At its end torch restores its state from the beginning: a dispatch mode that was
#: left in between is expected again, and one that was entered in between is forgotten.
INFERENCE_MODE = Calls((torch.inference_mode, "__enter__"), (torch.inference_mode, "__exit__"))
PROFILER_MADE = Calls((torch.autograd.profiler.profile, "__init__"))
#: ``module.compile()`` calls this function too. Listeners receive the model or function that is to be compiled.
COMPILED = Calls((torch, "compile"), model=0)
#: Listeners receive the optimizer and the states that it is to load, or has loaded.
STATES_LOADED = Calls((torch.optim.Optimizer, "load_state_dict"), optimizer=0, state_dict=1)
