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


def _alone(run: _Run) -> torch.Tensor:
    x = _leaf(4)
    y = x * 3
    run.ours(y)
    y.square().sum().backward()
    return x


def _users_hooks_before_and_after(run: _Run) -> torch.Tensor:
    x = _leaf(4)
    y = x * 3
    run.users(y, "before", 2.0)
    run.ours(y)
    run.users(y, "after", 5.0)
    run.users(y, "last")
    y.square().sum().backward()
    return x


def _users_hooks_only_after(run: _Run) -> torch.Tensor:
    x = _leaf(4)
    y = x * 3
    run.ours(y)
    run.users(y, "after", 5.0)
    run.ours(y, "ours again")
    run.users(y, "last")
    y.square().sum().backward()
    return x


def _a_users_hook_removed(run: _Run) -> torch.Tensor:
    x = _leaf(4)
    y = x * 3
    run.ours(y)
    handle = run.users(y, "removed", 5.0)
    run.users(y, "stays")
    handle.remove()
    y.square().sum().backward(retain_graph=True)
    run.users(y, "late")
    y.square().sum().backward()
    return x


def _two_backwards_of_one_graph(run: _Run) -> torch.Tensor:
    x = _leaf(4)
    y = x * 3
    run.ours(y)
    loss = y.square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return x


def _a_backward_of_a_backward(run: _Run) -> torch.Tensor:
    x = _leaf(4)
    y = x * 3
    run.ours(y)
    (gradient,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    run.ours(gradient, "gradient")
    gradient.square().sum().backward()
    return x


def _used_twice(run: _Run) -> torch.Tensor:
    x = _leaf(4)
    y = x * 3
    run.ours(y)
    (y.square().sum() + y.exp().sum()).backward()
    return x


def _its_gradient_retained_before(run: _Run) -> torch.Tensor:
    x = _leaf(4)
    y = x * 3
    y.retain_grad()
    run.ours(y)
    run.users(y, "after", 2.0)
    y.square().sum().backward()
    assert y.grad is not None
    run.calls.append(("retained", y.grad.tolist()))
    return x


def _its_gradient_retained_after(run: _Run) -> torch.Tensor:
    x = _leaf(4)
    y = x * 3
    run.ours(y)
    y.retain_grad()
    run.users(y, "after", 2.0)
    y.square().sum().backward()
    assert y.grad is not None
    run.calls.append(("retained", y.grad.tolist()))
    return x


def _asked_for_by_grad(run: _Run) -> torch.Tensor:
    x = _leaf(4)
    y = x * 3
    run.ours(y)
    run.users(y, "after", 2.0)
    (gradient,) = torch.autograd.grad(y.square().sum(), y)
    run.calls.append(("grad", gradient.tolist()))
    return x


def _outputs_of_one_operation(run: _Run) -> torch.Tensor:
    x = _leaf(3, 4)
    parts = (x * 3).unbind(0)
    for number in (2, 0, 1):
        run.ours(parts[number], f"part {number}")
    run.users(parts[1], "user's", 2.0)
    (parts[0].sum() + parts[1].square().sum() + parts[2].exp().sum()).backward()
    return x


def _one_of_several_outputs_unused(run: _Run) -> torch.Tensor:
    x = _leaf(6)
    first, second = torch.split(x * 3, 3)
    run.ours(first, "first")
    run.ours(second, "second")
    second.square().sum().backward()
    return x


def _lstm(run: _Run) -> torch.Tensor:
    x = _leaf(2, 3, 4)
    lstm = nn.LSTM(4, 5, batch_first=True)
    output, (hidden, cell) = lstm(x)
    for name, tensor in (("output", output), ("hidden", hidden), ("cell", cell)):
        run.ours(tensor, name)
    run.users(cell, "user's", 2.0)
    (output.square().sum() + hidden.sum() + cell.exp().sum()).backward()
    return x


def _changed_in_place_afterwards(run: _Run) -> torch.Tensor:
    x = _leaf(4)
    y = x * 3
    run.ours(y, "before")
    y.mul_(5)
    run.ours(y, "after")
    run.users(y, "user's")
    y.square().sum().backward()
    return x


def _changed_in_place_with_a_users_hook(run: _Run) -> torch.Tensor:
    x = _leaf(4)
    y = x * 3
    run.ours(y, "before")
    run.users(y, "user's before", 2.0)
    y.mul_(5)
    run.users(y, "user's after")
    run.ours(y, "after")
    y.square().sum().backward()
    return x


def _a_view_changed_in_place_afterwards(run: _Run) -> torch.Tensor:
    x = _leaf(2, 4)
    y = x * 3
    row = y[0]
    run.ours(y, "base")
    run.ours(row, "view")
    row.mul_(5)
    run.ours(row, "view after")
    run.ours(y, "base after")
    (y.square().sum() + row.exp().sum()).backward()
    return x


def _a_view_whose_base_is_changed_in_place_afterwards(run: _Run) -> torch.Tensor:
    x = _leaf(2, 4)
    y = x * 3
    row = y[0]
    run.ours(row, "view")
    y.mul_(5)
    run.ours(row, "view after")
    run.users(row, "user's", 2.0)
    run.ours(y, "base after")
    (y.square().sum() + row.exp().sum()).backward()
    return x


def _a_view_whose_base_was_changed_in_place_before(run: _Run) -> torch.Tensor:
    x = _leaf(2, 4)
    y = x * 3
    row = y[0]
    y.mul_(5)
    run.ours(row)
    run.users(row, "user's", 2.0)
    (y.square().sum() + row.exp().sum()).backward()
    return x


def _a_leaf(run: _Run) -> torch.Tensor:
    x = _leaf(4)
    run.users(x, "before")
    run.ours(x)
    run.users(x, "after", 2.0)
    for _ in range(2):
        x.square().sum().backward()
    return x


def _a_leaf_whose_hook_is_removed(run: _Run) -> torch.Tensor:
    x = _leaf(4)
    handle = run.ours(x)
    x.square().sum().backward()
    handle.remove()
    x.square().sum().backward()
    return x


def _detached_in_place(run: _Run) -> torch.Tensor:
    x = _leaf(4)
    y = x * 3
    z = (y + x).square().sum()
    run.ours(y)
    y.detach_()
    run.users(z)
    z.backward()
    return x


def _gone_before_its_backward(run: _Run) -> torch.Tensor:
    x = _leaf(4)
    y = x * 3
    run.ours(y)
    z = y.square().sum()
    del y
    z.backward()
    return x


def _checkpointed(run: _Run) -> torch.Tensor:
    x = _leaf(4)

    def part(given: torch.Tensor) -> torch.Tensor:
        hidden = given * 3
        run.ours(hidden, "inside")
        return hidden.exp()

    y = checkpoint(part, x, use_reentrant=False)
    run.ours(y, "outside")
    y.square().sum().backward()
    return x


_SCENARIOS = (
    *(_alone, _users_hooks_before_and_after, _users_hooks_only_after, _a_users_hook_removed),
    *(_two_backwards_of_one_graph, _a_backward_of_a_backward, _used_twice),
    *(_its_gradient_retained_before, _its_gradient_retained_after, _asked_for_by_grad),
    *(_outputs_of_one_operation, _one_of_several_outputs_unused, _lstm),
    *(_changed_in_place_afterwards, _changed_in_place_with_a_users_hook),
    *(_a_view_changed_in_place_afterwards, _a_view_whose_base_is_changed_in_place_afterwards),
    _a_view_whose_base_was_changed_in_place_before,
    *(_a_leaf, _a_leaf_whose_hook_is_removed, _detached_in_place, _gone_before_its_backward, _checkpointed),
)


@pytest.mark.parametrize("scenario", _SCENARIOS, ids=lambda scenario: scenario.__name__.strip("_").replace("_", " "))
def test_hooks_are_called_as_by_register_hook(scenario: Callable[[_Run], torch.Tensor]) -> None:
    oracle = _Run(_with_torch)
    expected = scenario(oracle)
    run = _Run(hook_gradient)
    x = scenario(run)
    assert run.calls == oracle.calls
    assert any(name != "user's" for name, _ in run.calls)
    assert (x.grad is None) == (expected.grad is None)
    if x.grad is not None and expected.grad is not None:
        assert torch.equal(x.grad, expected.grad)


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
