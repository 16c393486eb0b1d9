"""A capture's hooks on a model's modules, parameters and tensors; removed in unobserved steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as global_hooks
from torch.utils.hooks import RemovableHandle

from mpinspect.ranges.capture.layers import Layer, WatchedParameter, is_never_called, outline
from mpinspect.ranges.capture.tensor_hooks import AccumulatedHook, ForwardHook, OutputGradientHook, ParameterHook
from mpinspect.ranges.capture.weights import can_be_hooked
from mpinspect.runtime.compiled_graphs import compiled_graphs
from mpinspect.runtime.distributed import is_distributed
from mpinspect.runtime.hooks import HandleList, ModelHook, hook_gradient

if TYPE_CHECKING:
    from mpinspect.ranges.capture.dispatcher import Dispatcher
    from mpinspect.ranges.capture.observations import Call
    from mpinspect.ranges.capture.watch import Watch


class ModelHooks:
    """Installs and removes hooks. Holds the dispatcher by a weak reference.

    Args:
        dispatcher: the object that the hooks call.
    """

    def __init__(self, dispatcher: weakref.ref[Dispatcher]) -> None:
        self._dispatcher = dispatcher
        self._handles = HandleList()
        #: The hooked modules, each with torch's id of the hook, and the hooked parameters with the hook's handle.
        self._on_modules: list[tuple[torch.nn.Module, int]] = []
        self._on_parameters: list[tuple[WatchedParameter, RemovableHandle]] = []
        #: The hooked modules that lie inside the blocks of the model's outline, by id.
        self._inside_blocks: set[int] = set()
        #: The hooks that are temporarily removed.
        self._lifted_modules: list[tuple[torch.nn.Module, int, Any]] = []
        self._lifted_parameters: list[tuple[torch.Tensor, int, Any]] = []
        #: The arguments of the last ``begin_step``, while its choice of hooks is in force.
        self._chosen: tuple[bool, bool, bool] | None = None
        #: Parameters that can't be hooked yet: frozen ones, and lazy ones without a shape.
        self._later: list[WatchedParameter] = []
        #: Whether another library's full backward hooks wrap some module's inputs.
        self.wrapped_inputs = False
        #: Whether other hooks may change gradients after ours have received them.
        self.others_change_gradients = False
        #: The sequence numbers of the graph nodes that made this step's outputs.
        self.nodes_made: set[int] = set()

    @property
    def any_on_modules(self) -> bool:
        return bool(self._on_modules)

    def hook_modules(self, layers: Collection[Layer]) -> None:
        """Add a forward hook to every module that has a forward."""
        dispatcher = self._alive()
        outlining = outline(layers)
        self._inside_blocks = {id(layer.module) for layer in layers if layer.path not in outlining}
        for layer in layers:
            if not is_never_called(layer.module):
                hook = ForwardHook(dispatcher, layer)
                handle = self._handles.add(layer.module.register_forward_hook(hook, with_kwargs=True))
                self._on_modules.append((layer.module, handle.id))

    def before_forward(self, layers: Collection[Layer], react: Callable[[], None]) -> None:
        """Have a function called before each forward of these modules."""
        for layer in layers:
            hook = ModelHook(layer.module, lambda *_: react())
            self._handles.add(layer.module.register_forward_pre_hook(hook, prepend=True))

    def hook_parameters(self, parameters: Iterable[WatchedParameter]) -> None:
        """Hook the parameters that can be hooked now; ``begin_step`` hooks the others once they can be."""
        dispatcher, later = self._alive(), []
        for watched in parameters:
            parameter: Any = watched.parameter
            if not can_be_hooked(parameter):
                later.append(watched)
                continue
            if is_distributed(parameter):
                handle = parameter.register_post_accumulate_grad_hook(AccumulatedHook(dispatcher, watched))
            else:
                handle = parameter.register_hook(ParameterHook(dispatcher, watched))
            self._on_parameters.append((watched, self._handles.add(handle)))
        self._later = later

    def rehook(self, replaced: Collection[WatchedParameter]) -> None:
        """Move the hooks of these parameters, if hooked, from the replaced tensors to the new ones."""
        self._put_back()
        hooked, self._on_parameters = self._on_parameters, []
        for watched, handle in hooked:
            if watched in replaced:
                handle.remove()
                self._later.append(watched)
            else:
                self._on_parameters.append((watched, handle))
        self.hook_parameters(self._later)

    def begin_step(self, quiet: bool, outlined: bool = False, without_parameters: bool = False) -> bool:
        """Update the hooks for the model's current state; return whether some modules are without a hook in this step.

        Args:
            quiet: remove all hooks, since this step is not observed.
            outlined: remove the hooks of modules inside the blocks of the model's outline.
            without_parameters: if that removes any, remove the parameters' hooks too.
        """
        self.nodes_made.clear()
        chosen = quiet, outlined, without_parameters
        if chosen == self._chosen and self._lifted_parameters:
            # Most steps return here: removing and restoring hundreds of hooks costs more than running those that are left.
            if not quiet:
                self._tend(each for each in self._on_modules if id(each[0]) not in self._inside_blocks)
            return bool(self._lifted_modules)
        if quiet:
            self._lift_modules(self._on_modules)
            self._lift_parameters()
        else:
            self._put_back()
            if any(can_be_hooked(watched.parameter) for watched in self._later):
                self.hook_parameters(self._later)
            self._tend(self._on_modules)
            if outlined:
                self._lift_modules(each for each in self._on_modules if id(each[0]) in self._inside_blocks)
            if self._lifted_modules and without_parameters:
                self._lift_parameters()
        self._chosen = chosen
        return bool(self._lifted_modules)

    def _tend(self, hooked: Iterable[tuple[torch.nn.Module, int]]) -> None:
        """Find full backward hooks on these modules, and move our forward hooks behind all other hooks."""
        self.wrapped_inputs = False
        for module, number in hooked:
            if module._backward_hooks:
                self.wrapped_inputs = True
            hooks: Any = module._forward_hooks
            # A hook added later may change the output; running last, ours sees the input of the next module.
            if len(hooks) > 1 and number in hooks and next(reversed(hooks)) != number:
                hooks.move_to_end(number)
        self.others_change_gradients = self.wrapped_inputs or bool(global_hooks._global_backward_hooks)

    def unhook(self, modules: Collection[int]) -> bool:
        """Remove the hooks of these modules (given by id) permanently; return whether there were any."""
        leave = [(module, number) for module, number in self._on_modules if id(module) in modules]
        self._on_modules = [each for each in self._on_modules if id(each[0]) not in modules]
        self._lifted_modules = [each for each in self._lifted_modules if id(each[0]) not in modules]
        for module, number in leave:
            module._forward_hooks.pop(number, None)
            module._forward_hooks_with_kwargs.pop(number, None)
        return bool(leave)

    def remove(self) -> None:
        self._handles.remove_all()

    def forget(self) -> None:
        """Drop all references to modules and parameters."""
        for hooks in (self._on_modules, self._on_parameters, self._lifted_modules, self._lifted_parameters):
            hooks.clear()

    # -- lifting ------------------------------------------------------------------------------------------------------

    def _lift_modules(self, hooked: Iterable[tuple[torch.nn.Module, int]]) -> None:
        """Remove hooks until ``_put_back``: even a hook that returns immediately costs a microsecond or more per call.

        Has no effect if torch.compile has compiled anything: changing a module's hooks would trigger recompilation.
        """
        if compiled_graphs():
            return
        for module, number in hooked:
            hook: Any = module._forward_hooks.pop(number, None)
            if hook is not None:
                module._forward_hooks_with_kwargs.pop(number, None)
                self._lifted_modules.append((module, number, hook))

    def _lift_parameters(self) -> None:
        """Remove the parameters' hooks in the same way."""
        if compiled_graphs():
            return
        for watched, handle in self._on_parameters:
            parameter = watched.parameter
            known = _hooks_of(parameter)
            # If the parameter has other hooks, ours stays, to preserve the order of the hooks.
            if known is not None and len(known) == 1 and handle.id in known:
                self._lifted_parameters.append((parameter, handle.id, known.pop(handle.id)))

    def _put_back(self) -> None:
        """Restore removed hooks under the same ids: after hooks added since on modules, before them on parameters."""
        self._chosen = None
        modules, self._lifted_modules = self._lifted_modules, []
        for module, number, hook in modules:
            module._forward_hooks[number] = hook
            module._forward_hooks_with_kwargs[number] = True
        parameters, self._lifted_parameters = self._lifted_parameters, []
        for parameter, number, hook in parameters:
            known = _hooks_of(parameter)
            if known is not None:
                # Autograd reads the plain dictionary, in the order of insertion: ``move_to_end`` would have no effect.
                since = list(known.items())
                known.clear()
                known[number] = hook
                known.update(since)

    # -- tensors ------------------------------------------------------------------------------------------------------

    def await_gradients(self, call: Call) -> None:
        """Hook the call's tensors whose gradients are traced, and the outputs whose gradients are counted or asked for."""
        counted, fresh = call.counts_gradients, call.fresh
        hooked = 0
        for tensor, number, is_input in fresh:
            if not is_input:
                hooked += 1
            elif tensor.is_leaf:
                continue
            if tensor.requires_grad:
                self._await_gradient(call.layer, tensor, counted and not is_input, number, is_input)
        if (counted or call.wants_gradients) and hooked < len(call.outputs):
            followed = {id(tensor) for tensor, _, is_input in fresh if not is_input}
            for tensor in call.outputs:
                if tensor.requires_grad and id(tensor) not in followed:
                    self._await_gradient(call.layer, tensor, counted, -1, False)

    def _await_gradient(self, layer: Layer, tensor: torch.Tensor, counted: bool, number: int, is_input: bool) -> None:
        handle = hook_gradient(tensor, OutputGradientHook(self._dispatcher, layer, counted, number, is_input))
        node: Any = tensor.grad_fn
        if node is not None and not is_input:
            self.nodes_made.add(node._sequence_nr())
        if self.wrapped_inputs and node is not None:
            node.metadata[id(self), tensor.output_nr] = number
        if handle is not None:
            # Only a leaf has a removable hook: the module returned a parameter.
            self._handles.add(handle)

    def see_through_wrappers(self, call: Call, watch: Watch) -> None:
        """Find and hook the input tensors that full backward hooks have wrapped, and report them to the watch.

        A full backward hook may change the gradient as it leaves the wrapper.
        """
        for tensor in call.inputs():
            node: Any = tensor.grad_fn
            if node is None or type(node).__name__ != "BackwardHookFunctionBackward":
                continue
            inner, index = node.next_functions[tensor.output_nr]
            if inner is None or not inner.next_functions:
                continue
            number = inner.metadata.get((id(self), index))
            if number is None:
                number = inner.metadata[id(self), index] = watch.unseen_input()
                inner.register_prehook(self._prehook(call.layer, number, index))
            watch.wrapped_input(number, call.layer.path)

    def _prehook(self, layer: Layer, number: int, index: int) -> Callable[[Sequence[torch.Tensor]], None]:
        hook = OutputGradientHook(self._dispatcher, layer, False, number, True)
        return lambda gradients: hook(gradients[index])

    def _alive(self) -> Dispatcher:
        dispatcher = self._dispatcher()
        assert dispatcher is not None
        return dispatcher


def _hooks_of(parameter: torch.Tensor) -> Any:
    """Return torch's dictionary with our hook on a parameter; None if the parameter never had hooks."""
    return parameter._post_accumulate_grad_hooks if is_distributed(parameter) else parameter._backward_hooks
