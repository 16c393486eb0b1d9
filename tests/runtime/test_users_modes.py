"""The user's active dispatch modes receive the training's operators, but not the inspector's."""

from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from trainings import take_step

import mpinspect
from mpinspect.ranges.kinds import KINDS


class Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, calls: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self, calls: Counter[str]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._calls[getattr(func, "__qualname__", str(func))] += 1
        return func(*args, **(kwargs or {}))


def seen(
    mode: Any, inspected: bool, broken: bool = False
) -> tuple[Counter[str], mpinspect.Session | None, torch.Tensor]:
    """Train; return the operators that a mode receives, the session, and the final weights."""
    calls: Counter[str] = Counter()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu")

    def train() -> None:
        for step in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = torch.nn.functional.mse_loss(model(torch.randn(4, 8)).float(), torch.randn(4, 4))
            take_step(optimizer, loss * (float("inf") if broken and step == 1 else 1.0), scaler)

    session = None
    with mode(calls):
        if inspected:
            with mpinspect.Inspector(model, optimizers=optimizer, capture=KINDS) as inspector:
                train()
                session = inspector.session()
        else:
            train()
        # The mode is active again, exactly once.
        before = calls.total()
        torch.ones(1).add(1)
        assert calls.total() > before
    return calls, session, model[0].weight.detach()


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("mode", [Dispatched, Functions])
def test_a_users_mode_sees_no_operator_of_mpinspect(mode: Any, broken: bool) -> None:
    plain, _, before = seen(mode, inspected=False, broken=broken)
    inspected, session, after = seen(mode, inspected=True, broken=broken)
    assert inspected == plain
    assert torch.equal(before, after)
    assert session is not None
    assert session.progress.sampled_steps == 3
    assert bool(session.events) == broken


class Logged(torch.Tensor):
    calls: ClassVar[Counter[str]] = Counter()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls[getattr(func, "__qualname__", str(func))] += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_that_logs_functions_sees_no_function_of_mpinspect() -> None:
    def trained(kind: type[torch.Tensor], inspected: bool) -> tuple[Counter[str], mpinspect.Session]:
        Logged.calls.clear()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inspector = mpinspect.Inspector(model, optimizers=optimizer, capture=KINDS)
        if inspected:
            inspector.attach()
        for _ in range(3):
            take_step(optimizer, model(torch.randn(4, 8).as_subclass(kind)).square().mean())
        calls = Counter(Logged.calls)
        inspector.detach()
        return calls, inspector.session()

    plain, _ = trained(Logged, inspected=False)
    inspected, session = trained(Logged, inspected=True)
    # The first tensor's dtype is read before its class is known.
    assert inspected.total() - plain.total() <= 1
    assert session.totals() == trained(torch.Tensor, inspected=True)[1].totals()


def test_a_mode_that_raises_leaves_the_stacks_as_they_were() -> None:
    class Raises(Dispatched):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "relu" in str(func):
                raise ValueError("the user's own")
            return super().__torch_dispatch__(func, types, args, kwargs)

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    with mpinspect.Inspector(model) as inspector:
        with Raises(Counter()), pytest.raises(ValueError, match="the user's own"):
            model(torch.ones(1, 2))
        assert torch._C._len_torch_dispatch_stack() == 0
        model(torch.ones(1, 2)).sum().backward()
    assert inspector.session().progress.backwards == 1
