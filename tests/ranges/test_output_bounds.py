"""Outputs that are not looked at because they cannot but be finite: only where that is certain, and the culprit stays right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("numba")

from mpinspect import Inspector
from mpinspect.ranges.capture import output_bounds as kinds
from mpinspect.ranges.capture import watch as watching
from mpinspect.ranges.capture.output_bounds import output_bound


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


@pytest.mark.parametrize("kind", list(kinds._VALUE_BY_VALUE), ids=lambda kind: kind.__name__)
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


# -- products: how large their outputs can be -------------------------------------------------------------------------------

_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def _unread(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, float | None]:
    """The output of a module that has one hook, as ours, and its bound."""
    module.register_forward_hook(lambda module, args, output: None)
    with torch.no_grad():
        output = module(x)
    return output, output_bound(module, output, max(1.0, float(x.abs().max())))


def _within(output: torch.Tensor, bound: float | None, terms: int) -> bool:
    """But for the rounding of so many sums: each makes it larger by a unit in the last place at most."""
    assert bound is not None
    room = 1.0 + (terms + 4) * torch.finfo(output.dtype).eps
    return bool(output.isfinite().all()) and float(output.double().abs().max()) <= bound * room


def _filled(tensor: torch.Tensor, how: str, scale: float, generator: torch.Generator) -> torch.Tensor:
    """Values in which a bound that is too small would show: all at the largest, one sign or two; or anything."""
    if how == "constant":
        return torch.full_like(tensor, scale)
    values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return (values.sign() * scale if how == "signs" else values * scale).to(tensor.dtype)


def _fill(module: Any, how: str, scale: float, generator: torch.Generator) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(_filled(parameter, how, scale, generator))


_HOW = st.sampled_from(["constant", "signs", "normal"])
_SCALES = st.sampled_from([1.1e-3, 1.0, 1.7, 3e3, 1e10])


def _unread_however_small(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, float | None]:
    """The same of a small one, of which many can be tried."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds, "_LEAST_PRODUCT", 1)
        return _unread(module, x)


@settings(max_examples=150, deadline=None)
@given(
    width=st.integers(1, 40),
    outputs=st.integers(1, 40),
    bias=st.booleans(),
    dtype=st.sampled_from(_DTYPES),
    of_input=_HOW,
    of_weight=_HOW,
    scale=_SCALES,
    weight_scale=_SCALES,
)
def test_a_linear_layers_output_stays_within_its_bound(
    width: int,
    outputs: int,
    bias: bool,
    dtype: torch.dtype,
    of_input: str,
    of_weight: str,
    scale: float,
    weight_scale: float,
) -> None:
    generator = torch.Generator().manual_seed(width * 41 + outputs)
    linear = nn.Linear(width, outputs, bias=bias, dtype=dtype)
    _fill(linear, of_weight, weight_scale, generator)
    x = _filled(torch.empty(3 * width, width, dtype=dtype), of_input, scale, generator)
    output, bound = _unread_however_small(linear, x)
    assert _within(output, bound, width)


_CONVOLUTIONS: tuple[type[Any], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@settings(max_examples=150, deadline=None)
@given(
    dimensions=st.integers(1, 3),
    groups=st.sampled_from([1, 2, 4]),
    wide=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    padding=st.integers(0, 2),
    mode=st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    bias=st.booleans(),
    dtype=st.sampled_from(_DTYPES),
    of_input=_HOW,
    of_weight=_HOW,
    scale=_SCALES,
    weight_scale=_SCALES,
)
def test_a_convolutions_output_stays_within_its_bound(
    dimensions: int,
    groups: int,
    wide: int,
    kernel: int,
    stride: int,
    dilation: int,
    padding: int,
    mode: str,
    bias: bool,
    dtype: torch.dtype,
    of_input: str,
    of_weight: str,
    scale: float,
    weight_scale: float,
) -> None:
    generator = torch.Generator().manual_seed(kernel * 100 + wide * 10 + groups)
    settings_of = {"stride": stride, "dilation": dilation, "padding": padding, "padding_mode": mode, "bias": bias}
    convolution = _CONVOLUTIONS[dimensions - 1](
        groups, groups * wide, kernel, groups=groups, dtype=dtype, **settings_of
    )
    _fill(convolution, of_weight, weight_scale, generator)
    # However few positions are left, the output is several times the weight.
    sizes = {1: (40,), 2: (12, 11), 3: (7, 8, 9)}[dimensions]
    x = _filled(torch.empty(16, groups, *sizes, dtype=dtype), of_input, scale, generator)
    output, bound = _unread_however_small(convolution, x)
    assert _within(output, bound, kernel**dimensions)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_where_a_product_is_not_read_its_bound_is_far_from_the_largest_value(dtype: torch.dtype) -> None:
    """On the way to it the numbers may grow by what an algorithm takes: 2^40 of room is left, and no more is asked for."""
    most = torch.finfo(dtype).max
    linear = nn.Linear(1, 1 << 16, bias=False, dtype=dtype)
    x = torch.ones(2, 1, dtype=dtype)
    for exponent, known in ((-41, True), (-39, False)):
        nn.init.constant_(linear.weight, most * 2.0**exponent)
        linear._forward_hooks.clear()
        _, bound = _unread(linear, x)
        assert (bound is not None) == known
    # The same where input and weight share it between them.
    root = math.sqrt(most) * 2.0**-20
    for factor, known in ((0.4, True), (2.5, False)):
        nn.init.constant_(linear.weight, root)
        linear._forward_hooks.clear()
        assert (_unread(linear, x * (root * factor))[1] is not None) == known


# -- products: which outputs are not looked at ------------------------------------------------------------------------------

#: Rows enough for an output of 2^16 values and more.
_ROWS, _WIDTH = 1024, 64


class _Net(nn.Sequential):
    """A layer whose output is looked at, and one whose output is large."""

    def __init__(self, large: nn.Module | None = None) -> None:
        super().__init__(nn.Linear(4, 8), nn.Linear(8, _WIDTH) if large is None else large)


def _x(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(_ROWS, 4, generator=torch.Generator().manual_seed(0)).to(dtype)


def _forward(looked_at: list[tuple[str, str]]) -> list[str]:
    return [name for phase, name in looked_at if phase == "forward"]


def test_a_large_output_that_is_certainly_finite_is_not_looked_at(looked_at: list[tuple[str, str]]) -> None:
    """Nor is what it goes through: the container's output is the same tensor, and GELU's is no larger."""
    model = nn.Sequential(_Net(), nn.GELU(), nn.Flatten())
    assert not _step(model, _x())
    assert _forward(looked_at) == ["0.0"]


@pytest.mark.parametrize(
    ("first", "large", "x"),
    [
        (nn.Conv1d(2, 2, 3, padding=1), nn.Conv1d(2, 16, 3), torch.randn(8, 2, 512)),
        (nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 16, 3, stride=2, groups=2), torch.randn(8, 2, 64, 64)),
        (nn.Conv3d(2, 2, 3, padding=1), nn.Conv3d(2, 16, 3, padding_mode="replicate"), torch.randn(4, 2, 16, 16, 16)),
    ],
    ids=["Conv1d", "Conv2d", "Conv3d"],
)
def test_nor_is_a_convolutions(
    first: nn.Module, large: nn.Module, x: torch.Tensor, looked_at: list[tuple[str, str]]
) -> None:
    assert not _step(nn.Sequential(first, large, nn.ReLU()), x)
    # Of the first one the data went in, which nobody looked at.
    assert _forward(looked_at) == ["0"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_nor_is_one_in_another_dtype(dtype: torch.dtype, looked_at: list[tuple[str, str]]) -> None:
    assert not _step(_Net().to(dtype), _x(dtype))
    assert "1" not in _forward(looked_at)


def test_nor_is_one_under_autocast_to_bfloat16(looked_at: list[tuple[str, str]]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert not _step(_Net(), _x())
    assert "1" not in _forward(looked_at)


def test_a_chain_of_products_is_looked_at_once_its_bound_has_grown_large(looked_at: list[tuple[str, str]]) -> None:
    """Bounds multiply: where one comes near the largest value the output is read, and its maximum is known again."""
    model = nn.Sequential(nn.Linear(4, 8), *(nn.Linear(8, 8, bias=False) for _ in range(40)))
    with torch.no_grad():
        for layer in model[1:]:
            layer.weight.copy_(torch.eye(8))
    assert not _step(model, torch.randn(1 << 13, 4))
    seen = [int(name) for name in _forward(looked_at) if name]
    # Each adds up 8 terms: 2^88 is left of 2^128 after so many of them.
    assert seen[0] == 0
    assert len(seen) == 2
    assert 25 < seen[1] < 32


def _small(model: _Net) -> torch.Tensor:
    return _x()[:100]


def _smaller_than_its_weight(model: _Net) -> torch.Tensor:
    model[0], model[1] = nn.Linear(4, 512), nn.Linear(512, 512)
    return _x()[:256]


def _another_hook_on_it(model: _Net) -> torch.Tensor:
    _another_hook(model[1])
    return _x()


def _a_hook_that_changes_it(model: _Net) -> torch.Tensor:
    model[1].register_forward_hook(lambda module, args, y: y * 2)
    return _x()


def _own_forward_of_it(model: _Net) -> torch.Tensor:
    _own_forward(model[1])
    return _x()


class _LinearOfOurs(nn.Linear):
    pass


def _a_subclass(model: _Net) -> torch.Tensor:
    model[1] = _LinearOfOurs(8, _WIDTH)
    return _x()


def _in_fp16(model: _Net) -> torch.Tensor:
    model.half()
    return _x(torch.float16)


def _an_infinite_weight_that_a_zero_hides(model: _Net) -> torch.Tensor:
    nn.init.zeros_(model[0].weight)
    nn.init.ones_(model[0].bias)
    with torch.no_grad():
        model[1].weight[0, 0] = float("inf")
    return _x()


def _a_nan_in_the_weight(model: _Net) -> torch.Tensor:
    with torch.no_grad():
        model[1].weight[3, 2] = float("nan")
    return _x()


def _an_infinite_bias(model: _Net) -> torch.Tensor:
    with torch.no_grad():
        model[1].bias[3] = -float("inf")
    return _x()


def _a_nan_in_the_bias(model: _Net) -> torch.Tensor:
    with torch.no_grad():
        model[1].bias[3] = float("nan")
    return _x()


def _a_huge_weight(model: _Net) -> torch.Tensor:
    with torch.no_grad():
        model[1].weight[3, 2] = 1e30
    return _x()


def _a_huge_bias(model: _Net) -> torch.Tensor:
    with torch.no_grad():
        model[1].bias[3] = 1e30
    return _x()


def _a_huge_input(model: _Net) -> torch.Tensor:
    with torch.no_grad():
        model[0].bias[3] = 1e30
    return _x()


def _weight_norm(model: _Net) -> torch.Tensor:
    parametrizations.weight_norm(model[1])
    return _x()


def _weight_norm_by_a_hook(model: _Net) -> torch.Tensor:
    """Its weight is no parameter: the module is given another one before every call."""
    weight = model[1].weight.detach()
    del model[1].weight
    model[1].register_parameter("weight_v", nn.Parameter(weight))
    model[1].register_forward_pre_hook(lambda module, args: setattr(module, "weight", module.weight_v * 2.0))
    return _x()


def _a_bias_that_is_no_parameter(model: _Net) -> torch.Tensor:
    del model[1].bias
    model[1].bias = torch.full((_WIDTH,), math.inf)
    return _x()


def _own_convolution(model: _Net) -> torch.Tensor:
    """What makes pictures that can be tiled does this."""
    model[0], model[1] = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 16, 3)
    model[1]._conv_forward = lambda x, weight, bias: torch.conv2d(x, weight * 2, bias)
    return torch.randn(4, 1, 64, 64)


_CHANGES: tuple[Callable[[_Net], torch.Tensor], ...] = (
    *(_small, _smaller_than_its_weight, _another_hook_on_it, _a_hook_that_changes_it, _own_forward_of_it, _a_subclass),
    *(_in_fp16, _an_infinite_weight_that_a_zero_hides, _a_nan_in_the_weight, _an_infinite_bias, _a_nan_in_the_bias),
    *(_a_huge_weight, _a_huge_bias, _a_huge_input, _weight_norm, _weight_norm_by_a_hook, _own_convolution),
    _a_bias_that_is_no_parameter,
)


@pytest.mark.parametrize("change", _CHANGES, ids=lambda change: change.__name__.strip("_").replace("_", " "))
def test_a_product_is_looked_at_where_it_is_not_certain(
    change: Callable[[_Net], torch.Tensor], looked_at: list[tuple[str, str]]
) -> None:
    model = _Net()
    _step(model, change(model))
    assert "1" in _forward(looked_at)


def test_a_product_is_looked_at_where_nobody_saw_what_went_in(looked_at: list[tuple[str, str]]) -> None:
    """The data itself; and what code beside the modules made of an output."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.large = nn.Linear(8, 8), nn.Linear(8, _WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.large(self.first(x) * 2)

    _step(nn.Sequential(nn.Linear(8, _WIDTH)), torch.randn(_ROWS, 8))
    assert _forward(looked_at) == ["0"]
    looked_at.clear()
    _step(Scaled(), torch.randn(_ROWS, 8))
    assert "large" in _forward(looked_at)


def test_a_product_is_looked_at_where_its_input_was_changed_in_place(looked_at: list[tuple[str, str]]) -> None:
    class InPlace(_Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self[0](x)
            hidden.mul_(1e30).mul_(1e30)
            return self[1](hidden)

    events = _step(InPlace(), _x())
    assert "1" in _forward(looked_at)
    assert (events[0].phase, events[0].value in ("inf", "nan")) == ("forward", True)


@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_a_product_is_looked_at_where_its_function_is_another_one(
    monkeypatch: pytest.MonkeyPatch, looked_at: list[tuple[str, str]], name: str
) -> None:
    function = getattr(torch.nn.functional, name)

    def broken(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        found: torch.Tensor = function(x, weight, *rest)
        return found / 0.0 if len(weight) > 8 else found

    model, x = _Net(), _x()
    if name == "conv2d":
        model, x = _Net(nn.Conv2d(2, 16, 3)), torch.randn(4, 1, 64, 64)
        model[0] = nn.Conv2d(1, 2, 3)
    monkeypatch.setattr(torch.nn.functional, name, broken)
    events = _step(model, x)
    assert "1" in _forward(looked_at)
    assert (events[0].phase, events[0].module) == ("forward", "1")


def test_a_product_is_looked_at_where_its_class_convolves_another_way(
    monkeypatch: pytest.MonkeyPatch, looked_at: list[tuple[str, str]]
) -> None:
    conv_forward = nn.Conv2d._conv_forward

    def broken(self: nn.Conv2d, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        found = conv_forward(self, x, *rest)
        return found / 0.0 if self.out_channels > 8 else found

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", broken)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 16, 3))
    events = _step(model, torch.randn(4, 1, 64, 64))
    assert "1" in _forward(looked_at)
    assert (events[0].phase, events[0].module) == ("forward", "1")


class _OfFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _OfOperations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [_OfFunctions, _OfOperations])
def test_a_product_is_looked_at_under_a_mode(
    mode: Callable[[], AbstractContextManager[Any]], looked_at: list[tuple[str, str]]
) -> None:
    """It may compute anything instead."""
    model = _Net()
    with Inspector(model, capture=()):
        with mode():
            loss = model(_x()).sum()
        loss.backward()
    assert "1" in _forward(looked_at)


class _TensorOfOurs(torch.Tensor):
    pass


@pytest.mark.parametrize("which", ["weight", "bias"])
def test_a_product_is_looked_at_where_a_parameter_is_of_another_class(
    which: str, looked_at: list[tuple[str, str]]
) -> None:
    model = _Net()
    setattr(model[1], which, nn.Parameter(getattr(model[1], which).detach().as_subclass(_TensorOfOurs)))
    model[1].register_parameter(which, getattr(model[1], which))
    with Inspector(model, capture=()):
        output = model(_x())
    assert isinstance(output, torch.Tensor)
    assert "1" in _forward(looked_at)


def test_a_layer_that_changes_its_class_while_it_is_watched_is_no_fault(looked_at: list[tuple[str, str]]) -> None:
    """As ``parametrize`` has it do: from then on it is unknown code."""

    class Twice(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    model = _Net()
    with Inspector(model, capture=()) as inspector:
        model(_x()).sum().backward()
        assert "1" not in _forward(looked_at)
        parametrize.register_parametrization(model[1], "weight", Twice())
        model(_x()).sum().backward()
    assert "1" in _forward(looked_at)
    assert not [note for note in inspector.session().notes if "failed" in note]


# -- products: what is told of them -----------------------------------------------------------------------------------------


def _train(model: nn.Module, steps: int, at_step: Callable[[int], None], x: torch.Tensor | None = None) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Inspector(model, capture=(), optimizers=optimizer) as inspector:
        for step in range(steps):
            at_step(step)
            optimizer.zero_grad()
            model(_x() if x is None else x).sum().backward()
            optimizer.step()
    return list(inspector.session().events)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38], ids=str)
def test_a_large_linear_whose_weight_breaks_is_named_with_what_it_was_within(
    looked_at: list[tuple[str, str]], value: float
) -> None:
    torch.manual_seed(0)
    model = _Net()
    x = 10 * _x()
    first = model[0](x).detach().abs().max()
    bound = float(8 * max(1.0, first) * model[1].weight.detach().abs().max() + model[1].bias.detach().abs().max())

    def break_it(step: int) -> None:
        if step == 3:
            assert "1" not in _forward(looked_at)
            with torch.no_grad():
                model[1].weight[5, 1] = value

    event = _train(model, 4, break_it, x)[0]
    assert (event.step, event.phase, event.what, event.module) == (3, "forward", "activation", "1")
    assert (event.forward_finite, event.last_maxima) == (False, ())
    if math.isfinite(value):
        clause = f"before, where input and weight kept it small, it was not read: within {bound:.3g} the last time"
        assert clause in event.explanation
    else:
        assert "'1.weight' itself" in event.explanation
    assert looked_at.count(("forward", "1")) == 1


def test_the_clause_tells_of_the_step_before() -> None:
    """The bound moves with the weights."""
    model = _Net()
    nn.init.constant_(model[0].weight, 0.0)
    nn.init.constant_(model[0].bias, 2.0)
    nn.init.zeros_(model[1].bias)

    def change(step: int) -> None:
        # Finite, and what it makes of 8 terms of 2 is not.
        nn.init.constant_(model[1].weight, 3e38 if step == 3 else float(step + 1))

    event = _train(model, 4, change)[0]
    assert "within 48 the last time" in event.explanation  # 8 terms of 2 times 3.


def test_a_layer_that_was_read_all_along_has_no_such_clause() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))

    def break_it(step: int) -> None:
        if step == 2:
            nn.init.constant_(model[1].weight, float("inf"))

    event = _train(model, 3, break_it)[0]
    assert event.module == "1"
    assert len(event.last_maxima) == 2
    assert "not read" not in event.explanation


def test_an_infinity_made_after_a_product_that_was_not_read_is_told_of_what_made_it() -> None:
    class Divides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.large, self.last = nn.Linear(4, 8), nn.Linear(8, _WIDTH), nn.Linear(_WIDTH, 2)
            self.by = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.large(self.first(x)) / self.by)

    model = Divides()
    event = _train(model, 3, lambda step: setattr(model, "by", 0.0 if step == 2 else 1.0))[0]
    # Between its parts, in code of the module itself: what ``last`` was given was broken already.
    assert (event.step, event.phase, event.module, event.tensor) == (2, "forward", "", "last")
    assert "whose input was not finite already" in event.explanation


def test_an_infinity_made_in_a_container_after_a_product_that_was_not_read() -> None:
    class Divides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.large = nn.Linear(4, 8), nn.Linear(8, _WIDTH)
            self.by = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.large(self.first(x)).div(self.by).flatten()

    model = Divides()
    event = _train(model, 3, lambda step: setattr(model, "by", 0.0 if step == 2 else 1.0))[0]
    assert (event.step, event.phase, event.module) == (2, "forward", "")


def test_a_layer_after_products_that_were_not_read_is_named_itself() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 2))

    def break_it(step: int) -> None:
        if step == 2:
            with torch.no_grad():
                model[3].weight[0, 0] = float("inf")

    event = _train(model, 3, break_it)[0]
    assert (event.step, event.phase, event.module) == (2, "forward", "3")


def test_a_container_that_hands_on_a_product_that_was_not_read_is_not_read_either(
    looked_at: list[tuple[str, str]],
) -> None:
    """In another shape, so it is another tensor: and once the weight breaks, the layer is named and not the container."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(4, 8), nn.Linear(8, _WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.first(x)).flatten(0, 1)

    model = Flat()

    def break_it(step: int) -> None:
        if step == 2:
            assert set(_forward(looked_at)) == {"first"}
            nn.init.constant_(model.head.weight, 3e38)

    event = _train(model, 3, break_it, torch.full((2, 512, 4), 9.0))[0]
    assert (event.step, event.phase, event.module) == (2, "forward", "head")
    assert "not read" in event.explanation
