"""Runs the compiled graphs of a step a second time, in their eager form, where each operator can be computed twice.

The run's own compiled code runs unchanged. Before it, the operators of its graph run on the same arguments and random numbers;
the values that they overwrite are restored. When the gradients of the graph's results are known, the eager form's backward
runs with them, and its results are dropped.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._C._autograd import _get_sequence_nr
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mpinspect.ranges.faults.measure.operands import mutated_by
from mpinspect.runtime.compiled_graphs import Captured, Compiled, modules_of, plain_source
from mpinspect.runtime.device import free_memory
from mpinspect.runtime.storages import storage_key
from mpinspect.runtime.untouched import RandomState
from mpinspect.runtime.user_line import called_at, innermost_place

#: Operators with a part of the graph as their first argument, which their eager forms only call.
_NESTED = ("tag_activation_checkpoint", "wrap")


class _Input(NamedTuple):
    """An argument of a graph that takes a gradient, its name, and the leaf that stands for it in the eager form."""

    argument: torch.Tensor
    name: str
    own: torch.Tensor


#: The results of an eager form, and its inputs.
_Repeated = tuple[list[Any], list[_Input]]


class Repeats:
    """Repeats graphs.

    Args:
        parameters: the model's parameters by name.
        observing: makes a context in which a graph runs in both forms, and one in which its eager form's backward runs.
        made: called with each tensor that compiled code has made or overwritten, and that of its eager form or None; returns
            whether both are finite, or neither.
        differentiated: called with the arguments of graphs, their names, and their gradients in the eager form.
        failed: called with the error of a repetition.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        observing: Callable[[], AbstractContextManager[None]],
        made: Callable[[torch.Tensor, torch.Tensor | None], bool],
        differentiated: Callable[[torch.Tensor, str, torch.Tensor], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._names = {id(parameter): name for name, parameter in parameters}
        self._observing, self._made, self._differentiated = observing, made, differentiated
        self._failed = failed
        #: The module of the operator that is repeated; None without one.
        self.path: str | None = None
        #: Whether compiled code runs.
        self._is_hidden = False
        #: The sequence numbers of compiled code's autograd nodes.
        self._nodes: list[range] = []
        #: The bytes that may be allocated on each GPU while a graph is repeated.
        self._limits: dict[torch.device, float] = {}
        self.is_over = False

    def hides_operator(self) -> bool:
        """Return whether the operator that is about to run is compiled code's own."""
        node = torch._C._current_autograd_node()
        return self._is_hidden or (node is not None and any(node._sequence_nr() in each for each in self._nodes))

    def call(self, captured: Captured, compiled: Compiled, args: tuple[Any, ...], is_repeated: bool) -> Any:
        """Run a compiled graph, after its eager form if it trains, and if that is wanted."""
        trains = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        with self._observing():
            repeated = self._forward(captured, args) if is_repeated and trains and not self.is_over else None
            first, versions, self._is_hidden = _get_sequence_nr(), list(map(_version, args)), True
            try:
                results = compiled(*args)
            finally:
                self._is_hidden = False
                self._nodes.append(range(first, _get_sequence_nr()))
            try:
                written = [each for each, version in zip(args, versions, strict=True) if _version(each) != version]
                self._follow(results, repeated, args, written)
            except Exception as error:
                self._failed(error)
        return results

    # -- the forward ------------------------------------------------------------------------------------------------

    def _forward(self, captured: Captured, args: tuple[Any, ...]) -> _Repeated | None:
        """Run a graph's eager form; return its results and its arguments that take gradients."""
        with ExitStack() as stack:
            try:
                if _has_cuda_graphs():
                    raise NotImplementedError("compiled code runs as CUDA graphs")
                stack.callback(RandomState.now().restore)
                given = [each.detach().requires_grad_(each.requires_grad) if _is_plain(each) else each for each in args]
                if any(isinstance(each, torch.Tensor) and not _is_plain(each) for each in given):
                    raise TypeError("an argument is a tensor of another class")
                self._limits = {each.device: _limit(each.device) for each in given if _is_plain(each) and each.is_cuda}
                eager = _Eager(captured, self, _roots(captured.sources, [self._names.get(id(each)) for each in args]))
                inputs = filter(_is_plain, (*given, *eager.attributes()))
                stack.callback(self._leave)
                # A graph may disable gradients.
                stack.enter_context(torch.enable_grad())
                # Hooks of a checkpoint, which packs saved tensors, count them.
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is))
                stack.callback(eager.leave_autocast)
                with _Undone(inputs, save_all=eager.hides_operators):
                    results = eager.run(*given)
                return list(results), [
                    _Input(each, self._names.get(id(each), f"{place}"), own)
                    for place, (each, own) in enumerate(zip(args, given, strict=True))
                    if _is_plain(own) and own.requires_grad
                ]
            except Exception as error:
                self._failed(error)
                return None

    def _leave(self) -> None:
        self.path = None

    def enter(self, path: str | None) -> None:
        """Handle that the next operator of a graph runs, in this module.

        Raises:
            MemoryError: the run may need the rest of a GPU's memory.
        """
        self.path = path
        if any(torch.cuda.memory_allocated(device) > limit for device, limit in self._limits.items()):
            raise MemoryError("too little memory is free")

    # -- the backward -----------------------------------------------------------------------------------------------

    def _follow(self, results: Any, repeated: _Repeated | None, args: tuple[Any, ...], written: list[Any]) -> None:
        """Follow what compiled code has made and overwritten, and repeat its backward when its gradients are known."""
        eager, inputs = repeated or ([None] * len(results), [])
        given = set(map(id, args))
        pairs = [
            (own, other)
            for own, other in zip(results, eager, strict=True)
            if isinstance(own, torch.Tensor) and id(own) not in given
        ]
        # An eager form writes as compiled code does.
        followed = pairs if repeated else [*pairs, *((each, None) for each in written)]
        with torch.no_grad(), _disable_current_modes():
            are_alike = [
                self._made(own.detach(), other.detach() if isinstance(other, torch.Tensor) else None)
                for own, other in followed
            ]
        pairs = [(own, other) for own, other in pairs if own.grad_fn is not None and _takes_gradient(other)]
        if not pairs or not inputs or not all(are_alike):
            return
        backward = _Backward([other for _, other in pairs], inputs, self._backward, self._failed)
        for place, (own, _) in enumerate(pairs):
            # A compiled function may call the backward, and would compile the hooks too.
            own.register_hook(_disabled(partial(backward.arrived, place)))  # type: ignore[no-untyped-call]

    def _backward(self, backward: _Backward) -> None:
        """Run an eager form's backward at the end of the run's."""
        if self.is_over:
            return
        random = RandomState.now()
        # The function itself, which others may have wrapped.
        grad = inspect.unwrap(torch.autograd.grad)
        try:
            results = [backward.results[place] for place in backward.gradients]
            own = [each.own for each in backward.inputs]
            with self._observing():
                found = grad(results, own, list(backward.gradients.values()), allow_unused=True)
                with _disable_current_modes():
                    for each, gradient in zip(backward.inputs, found, strict=True):
                        if gradient is not None:
                            self._differentiated(each.argument, each.name, gradient)
        except Exception as error:
            self._failed(error)
        finally:
            random.restore()


class _Backward:
    """Collects the gradients of a graph's results until the run's backward ends.

    Args:
        results: the results of the eager form.
        inputs: its arguments that take gradients.
        run: called once, at the end of the first backward that reaches a result.
        failed: called with an error.
    """

    def __init__(
        self,
        results: list[torch.Tensor],
        inputs: list[_Input],
        run: Callable[[_Backward], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self.results, self.inputs, self._run, self._failed = results, inputs, run, failed
        self.gradients: dict[int, torch.Tensor] = {}

    def arrived(self, place: int, gradient: torch.Tensor | None) -> None:
        """Keep a result's gradient; None belongs to a result that this backward does not reach."""
        try:
            if gradient is None or not self.results:
                return
            if not self.gradients:
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(_disabled(self._ended))
            self.gradients[place] = gradient
        except Exception as error:
            self.results, self.inputs = [], []
            self._failed(error)

    def _ended(self) -> None:
        self._run(self)
        self.results, self.inputs, self.gradients = [], [], {}


class _Undone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Restores, at the end, the values of tensors that operators have overwritten.

    Their versions are not restored: compiled code overwrites the same tensors afterwards.

    Args:
        tensors: the tensors whose storages are restored.
        save_all: save all tensors without gradients at once.
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[torch.Tensor], save_all: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors = {storage_key(each): each for each in tensors}
        self._old: dict[int, torch.Tensor] = {}
        if save_all:
            self._save(each for each in self._tensors.values() if not each.requires_grad)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as compiled."""
        return True

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        with _disable_current_modes():
            for key, values in self._old.items():
                _bytes(self._tensors[key]).copy_(values)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload):
            self._save(mutated_by(func, args, kwargs))
        return func(*args, **kwargs)

    def _save(self, written: Iterable[torch.Tensor]) -> None:
        for each in written:
            key = storage_key(each)
            if key in self._tensors and key not in self._old:
                with _disable_current_modes():
                    self._old[key] = _bytes(each).clone()


class _Eager(torch.fx.Interpreter):
    """Runs a graph's operators, each at its line of the user's code.

    Args:
        captured: the graph.
        repeats: has the path of the running operator's module.
        roots: the paths of modules, by the expressions from which the compiled code takes them.
    """

    def __init__(self, captured: Captured, repeats: Repeats, roots: dict[str, str]) -> None:
        super().__init__(captured.owner, graph=captured.graph)
        self._repeats, self._roots = repeats, roots
        self._autocasts: list[Any] = []

    @property
    def hides_operators(self) -> bool:
        """Whether the graph has operators that run others out of our sight."""
        return any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in self.graph.nodes)

    def attributes(self) -> list[Any]:
        """Return the values of the graph's attributes."""
        return [self.fetch_attr(node.target) for node in self.graph.nodes if node.op == "get_attr"]

    def run_node(self, node: torch.fx.Node) -> Any:
        """Run an operator."""
        self._repeats.enter(self._path(node))
        return called_at(innermost_place(node.meta.get("stack_trace")), lambda: super(_Eager, self).run_node(node))

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function; follow an autocast, and run a part of the graph in place of an operator that calls it."""
        if getattr(target, "__name__", "") in _NESTED and isinstance(args[0], torch.fx.GraphModule):
            nested = _Eager(Captured(args[0], args[0].graph, ()), self._repeats, self._roots)
            return nested.run(*args[1:])
        result = super().call_function(target, args, kwargs)
        if target is torch.amp.autocast_mode._enter_autocast:
            self._autocasts.append(result)
        elif target is torch.amp.autocast_mode._exit_autocast:
            self._autocasts.remove(args[0])
        return result

    def leave_autocast(self) -> None:
        """Leave the autocasts that an error has left open."""
        while self._autocasts:
            torch.amp.autocast_mode._exit_autocast(self._autocasts.pop())  # type: ignore[no-untyped-call]

    def _path(self, node: torch.fx.Node) -> str | None:
        """Return the path of an operator's module; None if it is not known."""
        stack = list(modules_of(node).values())
        if not stack:
            return next(iter(self._roots.values())) if len(self._roots) == 1 else None
        source = plain_source(stack[-1][0])
        root = max((each for each in self._roots if f"{source}.".startswith(f"{each}.")), key=len, default=None)
        return None if root is None else f"{self._roots[root]}{source[len(root) :]}".strip(".")


def _roots(sources: Sequence[str], names: Sequence[str | None]) -> dict[str, str]:
    """Return the paths of the modules with a graph's parameters, by the expressions from which compiled code takes them.

    One graph may serve many modules: "L['self'].fc.weight" and "blocks.3.fc.weight" mean that "L['self']" is "blocks.3".
    """
    roots = {}
    for source, name in zip(sources, names, strict=False):
        if name is not None:
            ones, others = source.split("."), name.split(".")
            while len(ones) > 1 and others and ones[-1] == others[-1]:
                ones.pop(), others.pop()
            roots[".".join(ones)] = ".".join(others)
    return roots


def _disabled(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function that torch.compile does not compile; its callees run eagerly too."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call,no-any-return]


def _limit(device: torch.device) -> float:
    """Return how many bytes may be allocated on a GPU: half of the free ones that the run has never needed."""
    allocated = torch.cuda.memory_allocated(device)
    return allocated + (free_memory(device) + allocated - torch.cuda.max_memory_allocated(device)) / 2


def _has_cuda_graphs() -> bool:
    """Return whether compiled code runs as CUDA graphs, which own the memory of its arguments."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False) is not None


def _version(value: Any) -> int:
    """Return how often a tensor has been overwritten; 0 for other values."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def _is_plain(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter)


def _takes_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
