"""Modules that certainly cannot make an infinity are excluded as culprits, and the true culprit is still named."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Of
from torch import nn
from torch.nn.utils import parametrizations
from trainings import take_step

pytest.importorskip("numba")

from mpinspect import Inspector
from mpinspect.ranges.capture import innocent, largest
from mpinspect.ranges.capture.innocent import gradient_stays_finite, stays_finite
from mpinspect.runtime.hooks import ModelHook

KINDS = list(innocent.VALUE_BY_VALUE)


def _made(kind: Callable[..., nn.Module]) -> nn.Module:
    return kind(1, (1, -1)) if kind is nn.Unflatten else kind()


def _values(most: float, dtype: torch.dtype) -> torch.Tensor:
    magnitudes = torch.logspace(-30, math.log10(most) - 1e-6, 2000, dtype=torch.float64)
    return torch.cat([magnitudes, -magnitudes, torch.zeros(1)]).clamp(-most, most).to(dtype)[None]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_excluded_kinds_never_exceed_their_input(kind: Callable[..., nn.Module], dtype: torch.dtype) -> None:
    """|f(x)| <= max(|x|, 1) up to the fourth root of the dtype's maximum, and f is finite up to the maximum."""
    module = _made(kind)
    assert stays_finite(module)
    x = _values(torch.finfo(dtype).max ** 0.25, dtype)
    assert bool((module(x).reshape(-1).abs() <= x.reshape(-1).abs().clamp(min=1.0)).all())
    assert bool(module(_values(torch.finfo(dtype).max, dtype)).isfinite().all())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_excluded_kinds_pass_no_larger_gradient(kind: Callable[..., nn.Module]) -> None:
    """Kinds whose formula may multiply infinity by zero are not excluded."""
    module = _made(kind)
    assert gradient_stays_finite(module, 3e38) == (kind in innocent.NO_STEEPER_THAN_1)
    if kind in innocent.NO_STEEPER_THAN_1:
        x = _values(torch.finfo(torch.float32).max, torch.float32).requires_grad_()
        y = module(x)
        y.backward(torch.full_like(y, 3e38))
        assert x.grad is not None
        assert bool((x.grad <= 3e38).all())


_SCALES = st.sampled_from([1e-6, 1.1e-3, 1.0, 1.7, 100.0, 3e3])
_PRODUCTS: tuple[Callable[[int, int], Any], ...] = (
    nn.Linear,
    lambda ins, outs: nn.Conv1d(ins, outs, 3, padding=1),
    lambda ins, outs: nn.Conv2d(ins, outs, 3, padding=1),
    lambda ins, outs: nn.Conv2d(ins, ins * outs, (2, 3), stride=2, groups=ins),
    lambda ins, outs: nn.Conv3d(ins, outs, 2, dilation=2),
)


@settings(max_examples=120, deadline=None)
@given(
    which=st.integers(0, len(_PRODUCTS) - 1),
    ins=st.integers(1, 20),
    outs=st.integers(1, 20),
    one_sign=st.booleans(),
    scale=_SCALES,
    weight_scale=_SCALES,
)
def test_an_excluded_product_passes_a_gradient_within_fp16(
    which: int, ins: int, outs: int, one_sign: bool, scale: float, weight_scale: float
) -> None:
    module = _PRODUCTS[which](ins, outs)
    generator = torch.Generator().manual_seed(ins * 21 + outs)
    with torch.no_grad():
        # All weights have the largest magnitude, with one or two signs, so that a bound that is too small would fail.
        signs = torch.randn(module.weight.shape, generator=generator).sign()
        module.weight.copy_(weight_scale * (torch.ones_like(signs) if one_sign else signs))
    x = torch.zeros(2, ins, *([6] * (module.weight.dim() - 2)), requires_grad=True)
    y = module(x)
    y.backward(torch.full_like(y, scale))
    assert x.grad is not None
    largest = float(x.grad.abs().max())
    if gradient_stays_finite(module, scale):
        assert largest <= 1.001 * innocent.LARGEST_GRADIENT
    else:
        terms = module.weight.numel() // module.weight.shape[1]
        assert terms * scale * weight_scale * 1.001 > innocent.LARGEST_GRADIENT


@pytest.mark.parametrize("is_compiled", [True, False], ids=["loops compiled", "not compiled yet"])
@pytest.mark.parametrize("value", [math.inf, math.nan, 1e30], ids=str)
def test_a_product_with_a_non_finite_or_huge_weight_is_not_excluded(
    value: float, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr(largest, "largest_magnitude", lambda tensor: None)
    linear = nn.Linear(4, 4)
    assert gradient_stays_finite(linear, 1.0)
    with torch.no_grad():
        linear.weight[1, 2] = value
    assert not gradient_stays_finite(linear, 1.0)


# -- unknown code ----------------------------------------------------------------------------------------------------------


def _another_hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, y: None)


def _a_hook_before(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda module, args: None)


def _a_backward_hook(module: nn.Module) -> None:
    module.register_full_backward_hook(lambda module, given, made: None)


def _own_forward(module: nn.Module) -> None:
    module.forward = module.forward  # type: ignore[method-assign]


@pytest.fixture
def _global_hook() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, y: None)
    yield
    handle.remove()


@pytest.mark.parametrize("change", [_another_hook, _a_hook_before, _a_backward_hook, _own_forward])
@pytest.mark.parametrize("kind", [nn.ReLU, lambda: nn.Linear(2, 2)], ids=["ReLU", "Linear"])
def test_a_module_with_other_hooks_or_its_own_forward_is_not_excluded(
    kind: Callable[[], nn.Module], change: Callable[[nn.Module], None]
) -> None:
    module = kind()
    assert gradient_stays_finite(module, 1.0)
    change(module)
    assert not gradient_stays_finite(module, 1.0)
    assert not stays_finite(module)


@pytest.mark.usefixtures("_global_hook")
def test_no_module_is_excluded_under_a_global_hook() -> None:
    assert not stays_finite(nn.ReLU())
    assert not gradient_stays_finite(nn.Linear(2, 2), 1.0)


def test_a_class_with_a_replaced_forward_is_not_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: x / 0.0)
    assert not stays_finite(nn.ReLU())
    assert not gradient_stays_finite(nn.ReLU(), 1.0)
    events = _step(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(3, 4))
    assert events[0].module == "1"


class _Squares(nn.ReLU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square()


def test_a_subclass_is_not_excluded() -> None:
    assert not stays_finite(_Squares())
    events = _step(nn.Sequential(nn.Identity(), nn.Linear(1, 1, bias=False), _Squares()), torch.full((1, 1), 3e38))
    assert [event.module for event in events] == ["2"]


def test_a_product_with_a_parametrized_weight_is_not_excluded() -> None:
    linear = nn.Linear(4, 4)
    parametrizations.weight_norm(linear)
    assert not gradient_stays_finite(linear, 1.0)


# -- the named culprit -----------------------------------------------------------------------------------------------------


def _step(model: nn.Module, x: torch.Tensor) -> list[Any]:
    with Inspector(model, capture=()) as inspector:
        model(x).sum().backward()
    return list(inspector.session().events)


def _train(model: nn.Module, steps: int, at_step: Callable[[int], None]) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Inspector(model, capture=(), optimizers=optimizer) as inspector:
        for step in range(steps):
            at_step(step)
            take_step(optimizer, model(torch.randn(_ROWS, 4, generator=torch.Generator().manual_seed(0))).sum())
    return list(inspector.session().events)


#: With these, an output has 2^16 values.
_ROWS, _WIDTH = 1024, 64


def test_an_infinity_hidden_by_one_module_is_reported_as_the_next_modules_input() -> None:
    """ReLU(-inf) is 0; a Linear with the same input has a NaN output, and its input was infinite already."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        broken = x / 0.0
        return self.relu(broken) + self.linear(broken)

    events = _step(Of(forward, relu=nn.ReLU(), linear=nn.Linear(2, 2)), torch.full((1, 2), -1.0))
    assert (events[0].phase, events[0].module, events[0].tensor) == ("forward", "", "linear")
    assert "whose input already held it" in events[0].explanation


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38], ids=str)
def test_a_large_linear_with_a_broken_weight_is_named_with_its_last_maxima(value: float) -> None:
    """Every output is read, even one that input and weight bound; the last maxima are exact."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, _WIDTH), nn.GELU())
    largest = []
    model[1].register_forward_hook(lambda module, args, y: largest.append(float(y.detach().abs().max())))

    def break_it(step: int) -> None:
        with torch.no_grad():
            model[1].weight[5, 1] = value if step == 3 else float(step)

    event = _train(model, 4, break_it)[0]
    assert (event.step, event.phase, event.what, event.module) == (3, "forward", "activation", "1")
    assert event.forward_finite is False
    assert event.last_maxima == tuple(largest[:3])


@pytest.mark.parametrize(("by", "module"), [("last", ""), (None, "")], ids=["before a layer", "at the end"])
def test_an_infinity_made_by_code_after_a_large_product_is_attributed_to_the_code(by: str | None, module: str) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = self.large(self.first(x)) / self.by
        return self.last(hidden) if by else hidden.flatten()

    layers = {"first": nn.Linear(4, 8), "large": nn.Linear(8, _WIDTH), "last": nn.Linear(_WIDTH, 2)}
    model = Of(forward, **layers, by=1.0)
    event = _train(model, 3, lambda step: setattr(model, "by", 0.0 if step == 2 else 1.0))[0]
    assert (event.step, event.phase, event.module) == (2, "forward", module)
    if by:
        assert event.tensor == by
        assert "whose input already held it" in event.explanation


def test_a_broken_layer_after_large_products_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 2))

    def break_it(step: int) -> None:
        if step == 2:
            with torch.no_grad():
                model[3].weight[0, 0] = float("inf")

    event = _train(model, 3, break_it)[0]
    assert (event.step, event.phase, event.module) == (2, "forward", "3")


def test_a_layer_is_named_rather_than_the_container_that_returns_its_output() -> None:
    """The container returns the output in another shape, which is another tensor."""

    model = Of(
        lambda self, x: self.head(self.first(x)).unflatten(0, (2, -1)).flatten(0, 1),
        first=nn.Linear(4, 8),
        head=nn.Linear(8, _WIDTH),
    )

    def break_it(step: int) -> None:
        if step == 2:
            nn.init.constant_(model.head.weight, 3e38)

    event = _train(model, 3, break_it)[0]
    assert (event.step, event.phase, event.module) == (2, "forward", "head")


def test_a_module_with_the_inspectors_hooks_is_excluded() -> None:
    linear = nn.Linear(2, 2)
    for register in (linear.register_forward_pre_hook, linear.register_forward_hook):
        register(ModelHook(linear, lambda *given: None))
    assert gradient_stays_finite(linear, 1.0)
