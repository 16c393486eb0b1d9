"""Outputs that are not looked at because they cannot but be finite: only where that is certain, and the culprit stays right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("numba")

from mpinspect import Inspector
from mpinspect.capture import keeps_finite as kinds
from mpinspect.capture import watch as watching


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The looks of the run: phase, and the module or parameter."""
    looks: list[tuple[str, str]] = []
    look = watching.Watch._look

    def recorded(self: Any, phase: str, what: str, name: str, *rest: Any, **more: Any) -> Any:
        looks.append((phase, name))
        return look(self, phase, what, name, *rest, **more)

    monkeypatch.setattr(watching.Watch, "_look", recorded)
    return looks


def _step(model: nn.Module, x: torch.Tensor) -> list[Any]:
    with Inspector(model, capture=()) as inspector:
        model(x).sum().backward()
    return list(inspector.session().events)


@pytest.mark.parametrize("kind", list(kinds._FORWARDS), ids=lambda kind: kind.__name__)
def test_these_kinds_never_exceed_their_input(kind: Callable[..., nn.Module]) -> None:
    """|f(x)| <= max(|x|, 1), up to the largest values that are left unlooked at."""
    module = kind(1, (1, -1)) if kind is nn.Unflatten else kind()
    for dtype, most in kinds._LARGEST.items():
        magnitudes = torch.logspace(-30, math.log10(most) - 1e-6, 2000, dtype=torch.float64)
        x = torch.cat([magnitudes, -magnitudes, torch.zeros(1)]).clamp(-most, most).to(dtype)[None]
        y = module(x)
        assert bool((y.reshape(-1).abs() <= x.reshape(-1).abs().clamp(min=1.0)).all())


def test_their_outputs_are_not_looked_at(looked_at: list[tuple[str, str]]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 1))
    assert not _step(model, torch.randn(3, 4))
    assert [name for phase, name in looked_at if phase == "forward"] == ["0", "2", "5"]


def _another_hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, y: None)


def _own_forward(module: nn.Module) -> None:
    module.forward = module.forward  # type: ignore[method-assign]


@pytest.fixture
def _everybodys_hook() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, y: None)
    yield
    handle.remove()


@pytest.mark.parametrize("change", [_another_hook, _own_forward])
def test_looked_at_where_something_else_may_change_it(
    change: Callable[[nn.Module], None], looked_at: list[tuple[str, str]]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    change(model[1])
    _step(model, torch.randn(3, 4))
    assert ("forward", "1") in looked_at


@pytest.mark.usefixtures("_everybodys_hook")
def test_looked_at_under_a_hook_for_all_modules(looked_at: list[tuple[str, str]]) -> None:
    _step(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4))
    assert ("forward", "1") in looked_at


def test_looked_at_where_the_class_computes_something_else(
    monkeypatch: pytest.MonkeyPatch, looked_at: list[tuple[str, str]]
) -> None:
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: x / 0.0)
    events = _step(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(3, 4))
    assert ("forward", "1") in looked_at
    assert events[0].module == "1"


class _Squares(nn.ReLU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square()


def test_a_subclass_may_do_anything() -> None:
    events = _step(nn.Sequential(nn.Identity(), nn.Linear(1, 1, bias=False), _Squares()), torch.full((1, 1), 3e38))
    assert [event.module for event in events] == ["2"]


def test_looked_at_where_the_input_is_large(looked_at: list[tuple[str, str]]) -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.GELU())
    nn.init.constant_(model[0].weight, 1e15)
    assert not _step(model, torch.ones(1, 1))
    assert ("forward", "1") in looked_at


def test_looked_at_where_nobody_saw_what_went_in(looked_at: list[tuple[str, str]]) -> None:
    _step(nn.Sequential(nn.ReLU(), nn.Linear(2, 1)), torch.ones(1, 2))
    assert ("forward", "0") in looked_at


def test_an_infinite_input_of_a_module_that_hides_it_is_told_of_the_next() -> None:
    """ReLU(-inf) is 0 and nothing broke; a Linear given the same tensor breaks, and its input was broken already."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu, self.linear = nn.ReLU(), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            broken = x / 0.0
            return self.relu(broken) + self.linear(broken)

    events = _step(Both(), torch.full((1, 2), -1.0))
    assert (events[0].phase, events[0].module, events[0].tensor) == ("forward", "", "linear")
    assert "whose input was not finite already" in events[0].explanation
