"""An error at one tensor loses only that tensor and is noted; the other counts are exact and the training is bit-identical."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Of
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from trainings import inspected, take_step

from mpinspect import Inspector, Session
from mpinspect.counting import fastest
from mpinspect.counting.cpu import counter
from mpinspect.ranges.capture import host_rows, judge, largest, tally, updates, watch, weights
from mpinspect.ranges.capture.host_rows import HostRows
from mpinspect.ranges.kinds import KINDS
from mpinspect.ranges.windows.tensors import TensorKey

STEPS = 6
#: The size of the failing layer's tensors; no other tensor has as many elements.
ODD = 7 * 5


class Wrapper(torch.Tensor):
    """A subclass without memory: its operators run on an inner tensor and wrap the result."""

    elem: torch.Tensor

    @staticmethod
    def __new__(cls, elem: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, elem.shape, dtype=elem.dtype)  # type: ignore[attr-defined]
        made.elem = elem
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def bare(value: Any) -> Any:
            return value.elem if isinstance(value, Wrapper) else value

        def wrapped(value: Any) -> Any:
            return cls(value) if isinstance(value, torch.Tensor) else value

        args, kwargs = torch.utils._pytree.tree_map(bare, (args, kwargs or {}))
        return torch.utils._pytree.tree_map(wrapped, func(*args, **kwargs))


class Refuses(Wrapper):
    """Raises in every operator, including detach()."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"Refuses {func}")


class Quantised(Wrapper):
    """Int8 values with a scale; dequantize() returns the real weight, as in torchao."""

    scale = 0.25

    @staticmethod
    def __new__(cls, elem: torch.Tensor) -> Quantised:
        made: Quantised = torch.Tensor._make_wrapper_subclass(cls, elem.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.elem = elem
        return made

    def dequantize(self) -> torch.Tensor:
        return self.elem.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].elem)
        raise NotImplementedError(f"Quantised: {func}")


def _unwrapped(tensor: Any) -> torch.Tensor:
    """Return the plain values of a tensor or subclass."""
    for name in ("elem", "a"):
        if hasattr(tensor, name):
            return _unwrapped(getattr(tensor, name))
    return tensor.detach()


class _Enter(torch.autograd.Function):
    """Wraps a plain tensor in a subclass, and unwraps its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wrap: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return wrap(x.clone())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _unwrapped(gradient), None


class _Leave(torch.autograd.Function):
    """Unwraps a subclass, and wraps its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wrap: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.wrap = wrap
        return _unwrapped(x).clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.wrap(gradient.clone()), None


def _two(x: torch.Tensor) -> TwoTensor:
    return TwoTensor(x, x.clone())


def _train(model: nn.Module, inspect: bool, kinds: tuple[str, ...] = KINDS) -> tuple[Session, list[torch.Tensor]]:
    """Train, and return the session and the final weights."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    inspector = Inspector(model, capture=kinds)
    if inspect:
        inspector.attach()
    torch.manual_seed(1)
    for _ in range(STEPS):
        take_step(optimizer, model(torch.randn(5, 4)).square().mean())
    if inspect:
        inspector.detach()
    return inspector.session(), [_unwrapped(parameter).clone() for parameter in model.parameters()]


def _between(wrap: Callable[[torch.Tensor], torch.Tensor], trainable: bool) -> nn.Module:
    """Return a model whose inner layer has subclasses as weight, outputs and gradients; the others have plain tensors."""
    torch.manual_seed(0)
    inner = nn.Linear(4, 4, bias=False)
    if wrap is not _unwrapped:
        inner.weight = nn.Parameter(wrap(inner.weight.detach().clone()), requires_grad=trainable)
    else:
        inner.weight.requires_grad_(trainable)
    enter, leave = Of(lambda self, x: _Enter.apply(x, wrap)), Of(lambda self, x: _Leave.apply(x, wrap))
    return nn.Sequential(nn.Linear(4, 4), enter, inner, leave, nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


@pytest.mark.parametrize("trainable", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("wrap", [_two, Wrapper], ids=["TwoTensor", "wrapper"])
def test_subclasses_without_memory_do_not_lose_other_tensors(
    wrap: Callable[[torch.Tensor], torch.Tensor], trainable: bool
) -> None:
    """Weights, outputs, gradients and updates are subclasses; all five kinds are captured, with the watch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        odd, weights = _train(_between(wrap, trainable), True)
    plain, plain_weights = _train(_between(_unwrapped, trainable), True)
    _, bare_weights = _train(_between(wrap, trainable), False)
    for weight, bare, other in zip(weights, bare_weights, plain_weights, strict=True):
        assert torch.equal(weight, bare)
        assert torch.equal(weight, other)
    expected = {key: window for key, window in plain.totals().items() if key.name not in ("1", "2", "2.weight")}
    assert len(expected) == 5 * 2 + 6 * 3  # Five modules with two kinds each, six parameters with three.
    assert odd.totals() == expected
    assert odd.progress.steps == STEPS
    assert not [note for note in odd.notes if "sharded" in note]
    for name in ("2.weight", "2"):
        assert [note for note in odd.notes if name in note and wrap(torch.ones(1)).__class__.__name__ in note]
    reasons = {info.key: info.note for info in odd.watched if info.key not in odd.totals()}
    assert all(type(wrap(torch.ones(1))).__name__ in reason or "frozen" in reason for reason in reasons.values()), (
        reasons
    )


@pytest.mark.parametrize("kind", [Wrapper, Refuses, Quantised])
def test_a_frozen_weight_of_a_subclass_does_not_lose_other_tensors(kind: type[Wrapper]) -> None:
    """The outputs and gradients of its layer are plain tensors and are counted too."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        inner = torch.randint(-4, 4, (4, 4), dtype=torch.int8) if kind is Quantised else torch.randn(4, 4)
        value: Any = Quantised.dequantize if kind is Quantised else _unwrapped
        # Parameter() does the same, but calls operators of the class, which may raise.
        weight = kind(inner)
        weight._is_param = True
        # The inputs and outputs of the layer with the subclass are plain tensors.
        odd = Of(lambda self, x: x @ value(self.weight), weight=weight)
        return nn.Sequential(nn.Linear(4, 4), odd, nn.Linear(4, 1))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session, weights = _train(model(), True)
    _, bare = _train(model(), False)
    assert all(torch.equal(here, there) for here, there in zip(weights, bare, strict=True))
    totals = session.totals()
    others = {info.key for info in session.watched if not info.name.startswith("1.")}
    assert others <= set(totals)
    assert {totals[key].samples for key in others} == {STEPS}
    key = TensorKey("1.weight", "weight")
    if kind is Quantised:
        # The dequantised weight is counted.
        assert totals[key].histogram.total == 16 * STEPS
        assert session.notes == ()
    else:
        assert key not in totals
        assert any("'1.weight'" in note and kind.__name__ in note for note in session.notes) or kind is Refuses
        assert any("'1.weight'" in note for note in session.notes)


def _network() -> nn.Module:
    """Return a model in which only the weight of "1" and its outputs have ODD elements, for batches of five."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 7, bias=False), nn.Linear(7, 1))


def _fails_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, which: Callable[..., bool]) -> None:
    real = getattr(owner, name)

    def failing(*args: Any) -> Any:
        if which(*args):
            raise RuntimeError("planted")
        return real(*args)

    monkeypatch.setattr(owner, name, failing)


def _is_odd(*args: Any) -> bool:
    return any(isinstance(each, torch.Tensor) and each.numel() == ODD for each in args)


def _in_hooks(patch: pytest.MonkeyPatch) -> None:
    _fails_at(patch, HostRows, "count", _is_odd)


def _without_numba(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fastest, "cpu_counter", lambda: None)
    _fails_at(patch, fastest.reference, "count", _is_odd)


def _of_those_that_waited(patch: pytest.MonkeyPatch) -> None:
    _fails_at(patch, counter, "fill_many", lambda pairs: any(_is_odd(tensor) for tensor, _ in pairs))
    _fails_at(patch, HostRows, "count", _is_odd)


def _in_updates(patch: pytest.MonkeyPatch) -> None:
    _fails_at(patch, updates, "count", _is_odd)


def _in_lost_updates(patch: pytest.MonkeyPatch) -> None:
    _fails_at(patch, updates, "lost_updates_by_format", _is_odd)


def _in_broken_weights(patch: pytest.MonkeyPatch) -> None:
    _fails_at(patch, weights, "read_largest", _is_odd)


def _in_the_watch(patch: pytest.MonkeyPatch) -> None:
    _fails_at(patch, watch, "largest_of", _is_odd)


OUTPUTS = {("1", "activation"), ("1", "activation_gradient")}
GRADIENT, WEIGHT, UPDATE = (("1.weight", kind) for kind in ("weight_gradient", "weight", "update"))
#: Where an error is planted, and the tensors that it loses.
PLACES = {
    # Small output gradients are counted with those that waited.
    "hooks": (_in_hooks, {("1", "activation"), WEIGHT}),
    "without numba": (_without_numba, OUTPUTS | {WEIGHT, GRADIENT, UPDATE}),
    "waiting": (_of_those_that_waited, OUTPUTS | {WEIGHT, GRADIENT}),
    "updates": (_in_updates, {UPDATE}),
    "lost updates": (_in_lost_updates, {UPDATE}),
    "broken weights": (_in_broken_weights, set()),
    "the watch": (_in_the_watch, set()),
}


def _different(one: Session, other: Session) -> set[tuple[str, str]]:
    ones, others = one.totals(), other.totals()
    return {(key.name, key.kind) for key in {*ones, *others} if ones.get(key) != others.get(key)}


@pytest.mark.filterwarnings("ignore::mpinspect.MpinspectWarning")
@pytest.mark.parametrize("place", PLACES)
def test_an_error_at_one_layer_does_not_change_the_counts_of_others(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail, lost = PLACES[place]
    sound, weights = _train(_network(), True)
    fail(monkeypatch)
    session, after = _train(_network(), True)
    assert all(torch.equal(here, there) for here, there in zip(weights, after, strict=True))
    assert _different(session, sound) == lost
    assert session.progress.steps == session.progress.sampled_steps == STEPS
    named = [note for note in session.notes if "planted" in note]
    assert named
    for name, kind in lost:
        assert any(f"the {kind.replace('_', ' ')} of {name!r}" in note for note in named), (name, kind)
        (info,) = [info for info in session.watched if (info.name, info.kind) == (name, kind)]
        assert "planted" in info.note
    assert any("'1'" in note or "'1.weight'" in note for note in named)


@pytest.mark.filterwarnings("ignore::mpinspect.MpinspectWarning")
@pytest.mark.parametrize("when", ["leaving", "arriving"])
def test_an_error_while_copying_rows_to_the_host_loses_one_tensor(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The joint copy of all rows fails, and then the copy of the third row alone, or its reading on the host."""
    monkeypatch.setattr(fastest, "cpu_counter", lambda: None)
    sound, weights = _train(_network(), True)

    class Failing(host_rows.HostCopy):
        alone = 0

        def __init__(self, stacked: torch.Tensor) -> None:
            if stacked.dtype is torch.int64 and stacked.dim() == 2:
                if len(stacked) > 2:
                    Failing.alone = 0
                    raise RuntimeError("planted")
                Failing.alone += stacked.shape[1] > 2
            self.lost = Failing.alone == 3
            if self.lost and when == "leaving":
                raise RuntimeError("planted")
            super().__init__(stacked)

        def values(self) -> Any:
            if self.lost:
                raise RuntimeError("planted")
            return super().values()

    monkeypatch.setattr(tally, "HostCopy", Failing)
    session, after = _train(_network(), True)
    assert all(torch.equal(here, there) for here, there in zip(weights, after, strict=True))
    assert len(_different(session, sound)) == 1
    assert any("planted" in note for note in session.notes)
    assert session.progress.sampled_steps == STEPS


@pytest.mark.filterwarnings("ignore::mpinspect.MpinspectWarning")
def test_a_magnitude_that_cannot_be_copied_does_not_stop_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Magnitudes are copied together at a step's end, as on a GPU. A failing one is left out; later infinities are found."""
    monkeypatch.setattr(largest, "largest_magnitude", lambda tensor: None)
    real = judge.stacked

    def failing(values: Any) -> torch.Tensor:
        if any(value[0] == 0.5 for value in values if len(value) == 2):
            raise RuntimeError("planted")
        return real(values)

    monkeypatch.setattr(judge, "stacked", failing)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    nn.init.zeros_(model[0].weight)
    nn.init.constant_(model[0].bias, 0.5)

    def loss_of(step: int) -> torch.Tensor:
        return model(torch.randn(5, 4)).sum() * (torch.inf if step == STEPS - 1 else 1.0)

    session = inspected(model, loss_of, STEPS, lr=0.0, optimizers=None, capture=()).session()
    assert [(event.step, event.phase, event.what) for event in session.events] == [(STEPS - 1, "forward", "loss")]
    assert any("the activation of '0' could not be watched" in note and "planted" in note for note in session.notes)


@pytest.mark.filterwarnings("ignore::mpinspect.MpinspectWarning")
def test_an_output_that_cannot_be_hooked_loses_its_layer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output raises an error while the hook searches it for tensors; a note names the layer."""

    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return Output(x * 2)

    class Output(dict[str, torch.Tensor]):
        def __init__(self, x: torch.Tensor) -> None:
            super().__init__(x=x)

        def values(self) -> Any:
            raise RuntimeError("planted")

    layers = {"before": nn.Linear(4, 4), "odd": Odd(), "after": nn.Linear(4, 1)}
    model = Of(lambda self, x: self.after(self.odd(self.before(x))["x"]), **layers)
    session, _ = _train(model, True, ("activation", "activation_gradient"))
    assert {window.samples for key, window in session.totals().items() if key.name != "odd"} == {STEPS}
    assert {key.name for key in session.totals()} == {"before", "after"}
    (note,) = session.notes
    assert "'odd'" in note


@pytest.mark.filterwarnings("ignore::mpinspect.MpinspectWarning")
def test_an_error_of_one_observer_at_the_end_of_a_step_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other observers end the step, and the next step begins."""

    def planted(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(updates.Updates, "end_step", planted)
    session, _ = _train(nn.Linear(4, 1), True, ("weight_gradient",))
    assert session.progress.steps == STEPS
    assert {window.samples for window in session.totals().values()} == {STEPS}
    (note,) = session.notes
    assert "mpinspect failed in finish (RuntimeError: planted)" in note
