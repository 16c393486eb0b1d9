"""``hook_gradient`` calls hooks with the same gradients and in the same order as ``torch.Tensor.register_hook``."""

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpinspect.runtime.hooks import hook_gradient

Hook = Callable[[torch.Tensor], None]
Register = Callable[[torch.Tensor, Hook], Any]
#: The calls in order: the hook's name and its gradient.
Calls = list[tuple[str, list[Any] | None]]


class _Recorded:
    """A hook that records its calls. Like the inspector's hooks, it is marked as unserializable."""

    __torch_unserializable__ = True

    def __init__(self, calls: Calls, name: str) -> None:
        self._calls, self._name = calls, name

    def __call__(self, gradient: torch.Tensor | None) -> None:
        # None: this output was not used, but another output of the same operation was.
        self._calls.append((self._name, None if gradient is None else gradient.tolist()))


def _with_torch(tensor: torch.Tensor, hook: Hook) -> Any:
    # Reading grad_fn makes a view whose base was changed in place update its node in the graph. Without it, torch registers
    # the hook on the old node, or crashes.
    assert tensor.grad_fn is not None or tensor.is_leaf
    return tensor.register_hook(hook)


class _Run:
    """The hooks of one scenario: the inspector's, registered through ``register``, and the user's."""

    def __init__(self, register: Register) -> None:
        self.calls: Calls = []
        self._register = register
        torch.manual_seed(0)

    def ours(self, tensor: torch.Tensor, name: str = "ours") -> Any:
        return self._register(tensor, _Recorded(self.calls, name))

    def users(self, tensor: torch.Tensor, name: str = "user's", factor: float | None = None) -> Any:
        recorded = _Recorded(self.calls, name)

        def hook(gradient: torch.Tensor) -> torch.Tensor | None:
            recorded(gradient)
            return None if factor is None else gradient * factor

        return tensor.register_hook(hook)


def _leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


#: Gets the leaf x and y = 3 x, registers hooks, and returns the loss of the last backward, or None if there is none.
Scenario = Callable[[_Run, torch.Tensor, torch.Tensor], "torch.Tensor | None"]
_SCENARIOS: list[Scenario] = []


def _scenario(scenario: Scenario) -> Scenario:
    _SCENARIOS.append(scenario)
    return scenario


@_scenario
def _alone(run: _Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    run.ours(y)
    return y.square().sum()


@_scenario
def _users_hooks_before_and_after(run: _Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    run.users(y, "before", 2.0)
    run.ours(y)
    run.users(y, "after", 5.0)
    run.users(y, "last")
    return y.square().sum()


@_scenario
def _users_hooks_only_after(run: _Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    run.ours(y)
    run.users(y, "after", 5.0)
    run.ours(y, "ours again")
    run.users(y, "last")
    return y.square().sum()


@_scenario
def _a_users_hook_removed(run: _Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    run.ours(y)
    handle = run.users(y, "removed", 5.0)
    run.users(y, "stays")
    handle.remove()
    y.square().sum().backward(retain_graph=True)
    run.users(y, "late")
    return y.square().sum()


@_scenario
def _two_backwards_of_one_graph(run: _Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    run.ours(y)
    loss = y.square().sum()
    loss.backward(retain_graph=True)
    return loss


@_scenario
def _a_backward_of_a_backward(run: _Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    run.ours(y)
    (gradient,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    run.ours(gradient, "gradient")
    return gradient.square().sum()


@_scenario
def _used_twice(run: _Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    run.ours(y)
    return y.square().sum() + y.exp().sum()


def _retained(run: _Run, y: torch.Tensor) -> None:
    run.users(y, "after", 2.0)
    y.square().sum().backward()
    assert y.grad is not None
    run.calls.append(("retained", y.grad.tolist()))


@_scenario
def _its_gradient_retained_before(run: _Run, x: torch.Tensor, y: torch.Tensor) -> None:
    y.retain_grad()
    run.ours(y)
    _retained(run, y)


@_scenario
def _its_gradient_retained_after(run: _Run, x: torch.Tensor, y: torch.Tensor) -> None:
    run.ours(y)
    y.retain_grad()
    _retained(run, y)


@_scenario
def _asked_for_by_grad(run: _Run, x: torch.Tensor, y: torch.Tensor) -> None:
    run.ours(y)
    run.users(y, "after", 2.0)
    (gradient,) = torch.autograd.grad(y.square().sum(), y)
    run.calls.append(("grad", gradient.tolist()))


@_scenario
def _outputs_of_one_operation(run: _Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    parts = y.unbind(0)
    for number in (2, 0, 1):
        run.ours(parts[number], f"part {number}")
    run.users(parts[1], "user's", 2.0)
    return parts[0].sum() + parts[1].square().sum() + parts[2].exp().sum()


@_scenario
def _one_of_several_outputs_unused(run: _Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first, second = torch.split(y, 2, dim=1)
    run.ours(first, "first")
    run.ours(second, "second")
    return second.square().sum()


@_scenario
def _lstm(run: _Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    output, (hidden, cell) = nn.LSTM(4, 5, batch_first=True)(y.view(1, 3, 4))
    for name, tensor in (("output", output), ("hidden", hidden), ("cell", cell)):
        run.ours(tensor, name)
    run.users(cell, "user's", 2.0)
    return output.square().sum() + hidden.sum() + cell.exp().sum()


@_scenario
def _changed_in_place_afterwards(run: _Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    run.ours(y, "before")
    y.mul_(5)
    run.ours(y, "after")
    run.users(y, "user's")
    return y.square().sum()


@_scenario
def _changed_in_place_with_a_users_hook(run: _Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    run.ours(y, "before")
    run.users(y, "user's before", 2.0)
    y.mul_(5)
    run.users(y, "user's after")
    run.ours(y, "after")
    return y.square().sum()


@_scenario
def _a_view_changed_in_place_afterwards(run: _Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    row = y[0]
    run.ours(y, "base")
    run.ours(row, "view")
    row.mul_(5)
    run.ours(row, "view after")
    run.ours(y, "base after")
    return y.square().sum() + row.exp().sum()


@_scenario
def _a_view_whose_base_is_changed_in_place_afterwards(run: _Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    row = y[0]
    run.ours(row, "view")
    y.mul_(5)
    run.ours(row, "view after")
    run.users(row, "user's", 2.0)
    run.ours(y, "base after")
    return y.square().sum() + row.exp().sum()


@_scenario
def _a_view_whose_base_was_changed_in_place_before(run: _Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    row = y[0]
    y.mul_(5)
    run.ours(row)
    run.users(row, "user's", 2.0)
    return y.square().sum() + row.exp().sum()


@_scenario
def _a_leaf(run: _Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    run.users(x, "before")
    run.ours(x)
    run.users(x, "after", 2.0)
    x.square().sum().backward()
    return x.square().sum()


@_scenario
def _a_leaf_whose_hook_is_removed(run: _Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    handle = run.ours(x)
    x.square().sum().backward()
    handle.remove()
    return x.square().sum()


@_scenario
def _detached_in_place(run: _Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = (y + x).square().sum()
    run.ours(y)
    y.detach_()
    run.users(z)
    return z


@_scenario
def _gone_before_its_backward(run: _Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    # Unlike y, this tensor has no other reference.
    product = x * 3
    run.ours(product)
    return product.square().sum()


@_scenario
def _checkpointed(run: _Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    def part(given: torch.Tensor) -> torch.Tensor:
        hidden = given * 3
        run.ours(hidden, "inside")
        return hidden.exp()

    made = checkpoint(part, x, use_reentrant=False)
    run.ours(made, "outside")
    return made.square().sum()


def _ran(scenario: Scenario, register: Register) -> tuple[Calls, torch.Tensor | None]:
    """Return the hooks' calls and the leaf's gradient."""
    run = _Run(register)
    x = _leaf(3, 4)
    loss = scenario(run, x, x * 3)
    if loss is not None:
        loss.backward()
    return run.calls, x.grad


@pytest.mark.parametrize("scenario", _SCENARIOS, ids=lambda scenario: scenario.__name__.strip("_").replace("_", " "))
def test_hooks_are_called_as_by_register_hook(scenario: Scenario) -> None:
    calls, gradient = _ran(scenario, hook_gradient)
    expected_calls, expected = _ran(scenario, _with_torch)
    assert calls == expected_calls
    assert any(name != "user's" for name, _ in calls)
    assert (gradient is None) == (expected is None)
    if gradient is not None and expected is not None:
        assert torch.equal(gradient, expected)


def test_only_hooks_of_leaves_return_a_handle() -> None:
    x = _leaf(4)
    assert hook_gradient(x * 3, lambda gradient: None) is None
    y = x * 3
    y.register_hook(lambda gradient: None)
    assert hook_gradient(y, lambda gradient: None) is None
    handle = hook_gradient(x, lambda gradient: None)
    assert handle is not None
    handle.remove()
    assert not x._backward_hooks


def test_a_tensor_without_a_gradient_raises_torchs_error() -> None:
    with pytest.raises(RuntimeError) as expected:
        torch.ones(3).register_hook(lambda gradient: None)
    with pytest.raises(RuntimeError) as refused:
        hook_gradient(torch.ones(3), lambda gradient: None)
    assert str(refused.value) == str(expected.value)


def test_a_subclass_receives_the_call_of_register_hook() -> None:
    """A subclass may override ``register_hook``."""
    called = []

    class Recording(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(getattr(func, "__name__", ""))
            return super().__torch_function__(func, types, args, kwargs or {})

    calls: Calls = []
    y = _leaf(3).as_subclass(Recording) * 2
    called.clear()
    hook_gradient(y, _Recorded(calls, "ours"))
    assert "register_hook" in called
    y.sum().backward()
    assert [name for name, _ in calls] == ["ours"]


def test_the_hook_is_released_with_the_graph() -> None:
    alive = []
    for register in (_with_torch, hook_gradient):
        hook = _Recorded([], "ours")
        y = _leaf(3) * 2
        register(y, hook)
        y.sum().backward()
        there = weakref.ref(hook)
        del y, hook
        gc.collect()
        alive.append(there() is not None)
    assert alive == [False, False]


# -- copies and pickles ----------------------------------------------------------------------------------------------------


def _outcome(work: Callable[[], Any]) -> tuple[str, Any, list[str]]:
    """Return the result or the error, and the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = work()
        except Exception as error:
            result: tuple[str, Any] = (type(error).__name__, str(error))
        else:
            result = ("", (found.tolist(), found.requires_grad, bool(found._backward_hooks)))
    return (*result, [str(warning.message) for warning in said])


def _saved_and_loaded(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file, weights_only=False)
    return loaded


_COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda tensor: pickle.loads(pickle.dumps(tensor)),
    "torch.save": _saved_and_loaded,
    "detach": torch.Tensor.detach,
    "clone": torch.Tensor.clone,
}


@pytest.mark.parametrize("users_hook", [False, True], ids=["alone", "with a user's hook"])
@pytest.mark.parametrize("kind", ["a leaf", "an output"])
@pytest.mark.parametrize("way", _COPIES)
def test_copies_and_pickles_of_a_hooked_tensor_are_as_with_register_hook(way: str, kind: str, users_hook: bool) -> None:
    outcomes = []
    for register in (_with_torch, hook_gradient):
        run = _Run(register)
        tensor = _leaf(4) if kind == "a leaf" else _leaf(4) * 3
        run.ours(tensor)
        if users_hook:
            tensor.register_hook(_Recorded(run.calls, "user's"))
        outcomes.append(_outcome(lambda tensor=tensor: _COPIES[way](tensor)))
    assert outcomes[1] == outcomes[0]


def test_saving_a_tensor_with_a_serializable_hook_produces_torchs_warning() -> None:
    """torch warns that the hook is lost, unless it has ``__torch_unserializable__``."""
    outcomes = []
    for register in (_with_torch, hook_gradient):
        tensor = torch.ones(4, requires_grad=True) * 3
        register(tensor, print)
        outcomes.append(_outcome(lambda tensor=tensor: _saved_and_loaded(tensor)))
    assert outcomes[1] == outcomes[0]
    assert any("will not be serialized" in message for message in outcomes[1][2])
