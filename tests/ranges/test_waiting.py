"""Weight gradients wait for the end of their backward: they are read with the values they had on arrival, then released."""

import math
import sys
import threading
import types
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainings import inspected, take_step
from waiting_gradients import interrupt, loss_of, network, of_slope

import mpinspect
from mpinspect import Inspector, count_exponents
from mpinspect.counting import fastest
from mpinspect.numeric.exponents import merge
from mpinspect.ranges.capture import waiting
from mpinspect.ranges.capture.host_rows import HostRows
from mpinspect.ranges.capture.layers import WatchedParameter
from mpinspect.ranges.capture.loss_scale import NO_BACKWARD
from mpinspect.ranges.capture.observations import ParameterGradient
from mpinspect.ranges.capture.waiting import WaitingGradients
from mpinspect.ranges.capture.watch import Watch
from mpinspect.ranges.windows.tensors import TensorKey


@dataclass
class Arrived:
    """A gradient that arrived: its parameter's name, a copy, its address, and whether it waits."""

    name: str
    gradient: torch.Tensor
    address: int
    waits: bool


class Backwards:
    """Makes gradients wait as the capture does, and records the gradients that arrived and the batches that were read."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.arrived: list[Arrived] = []
        #: Per batch that was read: names and copies of its gradients, and the argument of ``begin``.
        self.reads: list[tuple[dict[str, torch.Tensor], int]] = []
        self.places: dict[str, int] = {}
        self.read_before: list[None] = []
        self.fails: BaseException | None = None
        self._task = NO_BACKWARD
        self.begun = 0
        self.waiting: WaitingGradients[int] = WaitingGradients(self._read, self.notes.append, self._enter)

    def hook(self, **parameters: torch.Tensor) -> None:
        for name, parameter in parameters.items():
            watched = WatchedParameter(name, "", parameter, True)  # type: ignore[arg-type]
            parameter.register_hook(lambda gradient, watched=watched: self._arrives(watched, gradient))

    def hooked(self, *names: str) -> list[nn.Parameter]:
        """Return parameters of three ones with these names."""
        parameters = {name: ones(3) for name in names}
        self.hook(**parameters)
        return list(parameters.values())

    def waits(self) -> dict[str, bool]:
        """Return whether each gradient that arrived has waited."""
        return {each.name: each.waits for each in self.arrived}

    def sizes(self) -> list[int]:
        """Return the number of gradients in each batch that was read."""
        return [len(found) for found, _ in self.reads]

    def check(self) -> None:
        """Assert that each gradient that waited was read once, with the values it had on arrival."""
        seen = [(name, found[name]) for found, _ in self.reads for name in found]
        waited = [each for each in self.arrived if each.waits]
        assert len(seen) == len(waited)
        for each in waited:
            assert any(name == each.name and torch.equal(values, each.gradient) for name, values in seen)

    def _arrives(self, watched: WatchedParameter, gradient: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self.begun += 1
            self.waiting.begin(self.begun, self.read_before)
        kept = gradient.to_dense().clone() if type(gradient) is torch.Tensor else torch.zeros(0)
        waits = False
        if self.waiting.task == task:
            self.waiting.make_room(gradient)
            waits = self.waiting.hold(watched, gradient)
        address = gradient.data_ptr() if gradient.layout is torch.strided else 0
        self.arrived.append(Arrived(watched.name, kept, address, waits))

    def _enter(self, finish: Callable[[], None]) -> None:
        self._task = NO_BACKWARD
        finish()

    def _read(self, begun: int, gradients: list[ParameterGradient]) -> None:
        if self.fails is not None:
            raise self.fails
        self.reads.append(({each.watched.name: each.values.clone() for each in gradients}, begun))
        self.places.update({each.watched.name: each.place for each in gradients})


@pytest.fixture
def backwards() -> Backwards:
    return Backwards()


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, dtype=dtype))


def loss(*parameters: torch.Tensor) -> torch.Tensor:
    """Return a loss with random gradients."""
    terms = [(parameter * torch.randn(parameter.shape).to(parameter.dtype)).sum().float() for parameter in parameters]
    return torch.stack(terms).sum()


# -- which gradients wait, and until when ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_a_backward_are_read_together_before_it_returns(backwards: Backwards, dtype: torch.dtype) -> None:
    parameters = {f"p{i}": ones(*shape, dtype=dtype) for i, shape in enumerate([(3,), (300, 401), (1,), (17, 5), (0,)])}
    backwards.hook(**parameters)
    for micro_batch in range(2):
        loss(*parameters.values()).backward()
        # After the backward, any code may change the gradients.
        for parameter in parameters.values():
            assert parameter.grad is not None
            parameter.grad.fill_(float("nan"))
        assert backwards.sizes() == [len(parameters)] * (micro_batch + 1)
        assert not len(backwards.waiting)
    assert all(each.waits for each in backwards.arrived)
    backwards.check()
    assert backwards.notes == []


def test_each_batch_is_read_with_the_state_of_its_own_backward(backwards: Backwards) -> None:
    (parameter,) = backwards.hooked("parameter")
    for _ in range(3):
        loss(parameter).backward()
    assert [begun for _, begun in backwards.reads] == [1, 2, 3]


def test_each_gradient_stores_the_number_of_readings_before_it(backwards: Backwards) -> None:
    late, early = backwards.hooked("late", "early")
    hidden = late * 2
    hidden.register_hook(lambda gradient: backwards.read_before.extend([None] * 5))
    (hidden.exp() * early).sum().backward()
    assert backwards.places == {"early": 0, "late": 5}


def test_torch_stores_a_waiting_gradient_without_a_copy(backwards: Backwards) -> None:
    watched, plain = ones(5), ones(5)
    backwards.hook(watched=watched)
    addresses: list[int] = []
    plain.register_hook(lambda gradient: addresses.append(gradient.data_ptr()))
    for parameter in (watched, plain):
        loss(parameter).backward()
        assert parameter.grad is not None
    assert plain.grad is not None
    assert watched.grad is not None
    assert plain.grad.data_ptr() == addresses[0], "torch stores gradients without a copy by itself"
    assert [each.waits for each in backwards.arrived] == [True]
    assert watched.grad.data_ptr() == backwards.arrived[0].address


def test_a_gradient_that_something_else_may_change_does_not_wait(backwards: Backwards) -> None:
    another_hook, in_backward, alone = backwards.hooked("another_hook", "in_backward", "alone")
    another_hook.register_hook(lambda gradient: gradient.mul_(0))
    in_backward.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    loss(another_hook, in_backward, alone).backward()
    assert backwards.waits() == {"another_hook": False, "in_backward": False, "alone": True}
    backwards.check()


class _Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "gradient",
    [torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,), check_invariants=True), torch.randn(3).as_subclass(_Subclass)],
    ids=["sparse", "a subclass"],
)
def test_sparse_tensors_and_subclasses_do_not_wait(backwards: Backwards, gradient: torch.Tensor) -> None:
    held: list[bool] = []
    usual, parameter = ones(2), ones(3)
    backwards.hook(usual=usual, parameter=parameter)
    watched = WatchedParameter("other", "", parameter, True)

    def other_arrives(_: torch.Tensor) -> None:
        held.append(backwards.waiting.hold(watched, gradient))
        held.append(backwards.waiting.hold(watched, torch.ones(3)))

    hidden = parameter * 2
    hidden.register_hook(other_arrives)
    (hidden.exp().sum() + loss(usual)).backward()
    assert held == [False, True]


def test_gradients_do_not_wait_outside_of_a_backward(backwards: Backwards) -> None:
    watched = WatchedParameter("parameter", "", ones(3), True)
    backwards.waiting.begin(1, ())
    assert backwards.waiting.task == NO_BACKWARD
    assert not backwards.waiting.hold(watched, torch.ones(3))


def test_gradients_do_not_wait_after_a_call_of_stop(backwards: Backwards) -> None:
    early, late = backwards.hooked("early", "late")
    hidden = late * 2
    hidden.register_hook(lambda gradient: backwards.waiting.stop())
    (hidden.exp() * early).sum().backward()
    assert backwards.waits() == {"early": True, "late": False}
    assert backwards.sizes() == [1]
    loss(early).backward()
    assert backwards.sizes() == [1, 1]


@pytest.mark.parametrize("library", ["horovod.torch", "byteps.torch"])
def test_gradients_do_not_wait_while_a_distributed_library_is_loaded(
    backwards: Backwards, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    """These libraries average each gradient in place on arrival, through ``.data``."""
    monkeypatch.setitem(sys.modules, library, types.ModuleType(library))
    (parameter,) = backwards.hooked("parameter")
    loss(parameter).backward()
    monkeypatch.delitem(sys.modules, library)
    loss(parameter).backward()
    assert [each.waits for each in backwards.arrived] == [False, True]


def test_gradients_do_not_wait_in_a_process_group(backwards: Backwards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    (parameter,) = backwards.hooked("parameter")
    loss(parameter).backward()
    assert [each.waits for each in backwards.arrived] == [False]


def test_large_gradients_do_not_wait_and_a_full_batch_is_read_early(
    backwards: Backwards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_MOST_WAITING", 100)
    monkeypatch.setattr(waiting, "_LARGEST_TO_WAIT", 80)
    parameters = {f"p{i}": ones(length) for i, length in enumerate((10, 10, 10, 30))}
    backwards.hook(**parameters)
    loss(*parameters.values()).backward()
    assert backwards.waits() == {"p0": True, "p1": True, "p2": True, "p3": False}
    assert sum(backwards.sizes()) == 3
    assert max(backwards.sizes()) == 2
    backwards.check()


# -- changed gradients, interrupted and nested backwards --------------------------------------------------------------------


def test_a_gradient_changed_while_it_waits_is_left_out_with_a_note(backwards: Backwards) -> None:
    first, second = backwards.hooked("first", "second")
    product = second * 2
    # The backward reaches this product after `first`, because the forward computes the product earlier.
    product.register_hook(lambda gradient: first.grad.mul_(2).storage_offset() or None)  # type: ignore[union-attr]
    (product.exp().sum() + loss(first)).backward()
    ((found, _),) = backwards.reads
    assert list(found) == ["second"]
    assert torch.equal(found["second"], next(each.gradient for each in backwards.arrived if each.name == "second"))
    assert len(backwards.notes) == 1
    assert "changed in place" in backwards.notes[0]


def break_off(backwards: Backwards, error: BaseException) -> tuple[nn.Parameter, torch.Tensor]:
    """Interrupt a backward with an error, and return the parameter whose gradient had arrived, with that gradient."""

    def fail(gradient: torch.Tensor) -> None:
        raise error

    early, late = ones(3), ones(3)
    backwards.hook(late=late)
    hidden = early * 2
    hidden.register_hook(fail)
    with pytest.raises(type(error)):
        (hidden.exp() * late).sum().backward()
    assert backwards.arrived[-1].waits
    return late, backwards.arrived[-1].gradient


@pytest.mark.parametrize("error", [KeyError("the user's"), KeyboardInterrupt()], ids=["an error", "Ctrl-C"])
def test_gradients_of_an_interrupted_backward_are_read_and_released(backwards: Backwards, error: BaseException) -> None:
    late, _ = break_off(backwards, error)
    backwards.waiting.finish_left_behind()
    assert not len(backwards.waiting)
    assert backwards.sizes() == [1]
    loss(late).backward()
    assert backwards.sizes() == [1, 1]
    backwards.check()
    assert backwards.notes == []


def test_gradients_of_an_interrupted_backward_are_read_before_the_next_one_begins(backwards: Backwards) -> None:
    late, left = break_off(backwards, KeyError("the user's"))
    loss(late).backward()
    assert backwards.sizes() == [1, 1]
    assert torch.equal(backwards.reads[0][0]["late"], left)
    # Each is read with the state of its own backward.
    assert [begun for _, begun in backwards.reads] == [1, 2]
    backwards.check()


def test_a_gradient_changed_after_an_interrupted_backward_is_left_out(backwards: Backwards) -> None:
    late, _ = break_off(backwards, KeyError("the user's"))
    assert late.grad is not None
    late.grad.zero_()
    backwards.waiting.finish()
    assert backwards.sizes() in ([], [0])
    assert len(backwards.notes) == 1
    assert "changed in place" in backwards.notes[0]


def test_gradients_of_an_interrupted_backward_are_read_in_their_own_thread_only(backwards: Backwards) -> None:
    break_off(backwards, KeyError("the user's"))
    thread = threading.Thread(target=backwards.waiting.finish_left_behind)
    thread.start()
    thread.join()
    assert len(backwards.waiting) == 1
    backwards.waiting.finish_left_behind()
    assert not len(backwards.waiting)


@pytest.mark.parametrize("error", [RuntimeError("out of order"), KeyboardInterrupt()], ids=["a fault", "Ctrl-C"])
def test_gradients_are_released_if_reading_them_fails(backwards: Backwards, error: BaseException) -> None:
    (parameter,) = backwards.hooked("parameter")
    backwards.fails = error
    with pytest.raises(type(error)):
        loss(parameter).backward()
    assert not len(backwards.waiting)
    backwards.fails = None
    loss(parameter).backward()
    assert backwards.sizes() == [1]


def test_waiting_gradients_are_read_before_a_reentrant_backward(backwards: Backwards) -> None:
    parameter = nn.Parameter(torch.randn(4))
    backwards.hook(parameter=parameter)

    def once(x: torch.Tensor) -> torch.Tensor:
        return x * parameter

    x = torch.randn(4, requires_grad=True)
    for _ in range(2):
        x = checkpoint(once, x, use_reentrant=True)
    x.sum().backward()
    assert backwards.sizes() == [1, 1]
    backwards.check()


def test_a_nested_backward_splits_the_outer_ones_gradients_into_two_batches(backwards: Backwards) -> None:
    """The outer backward's gradients are read before the inner backward; its later gradients form a second batch."""
    outer, inner, last = backwards.hooked("outer", "inner", "last")
    inner_loss, hidden = loss(inner), last * 2
    hidden.register_hook(lambda gradient: inner_loss.backward())
    (hidden.exp() * outer).sum().backward()
    assert [list(found) for found, _ in backwards.reads] == [["outer"], ["inner"], ["last"]]
    assert [begun for _, begun in backwards.reads] == [1, 2, 3]
    backwards.check()


def test_a_backward_of_another_thread_does_not_touch_waiting_gradients(backwards: Backwards) -> None:
    outer, other, last = backwards.hooked("outer", "other", "last")
    held: list[int] = []

    def another(gradient: torch.Tensor) -> None:
        thread = threading.Thread(target=lambda: loss(other).backward())
        thread.start()
        thread.join()
        held.append(len(backwards.waiting))

    hidden = last * 2
    hidden.register_hook(another)
    (hidden.exp() * outer).sum().backward()
    assert held == [1]
    assert backwards.waits()["other"] is False
    assert not len(backwards.waiting)
    backwards.check()


# -- in an inspected training ----------------------------------------------------------------------------------------------


def broken_off(inspector: Inspector, train: Callable[[], None]) -> None:
    with pytest.raises(KeyboardInterrupt):
        _inside(inspector, train)


def _inside(inspector: Inspector, train: Callable[[], None]) -> None:
    with inspector:
        train()


Log = list[tuple[str, str, str]]


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Log:
    """The watch's readings at the end of each step: phase, kind and name."""
    found: Log = []
    end_step = Watch.end_step

    def recorded(self: Watch, step: int, sampled: bool) -> None:
        found.extend((reading.phase, reading.what, reading.name) for reading in self._log.readings)
        end_step(self, step, sampled)

    monkeypatch.setattr(Watch, "end_step", recorded)
    return found


def test_waiting_changes_neither_the_readings_nor_their_order(monkeypatch: pytest.MonkeyPatch, readings: Log) -> None:
    def run() -> tuple[dict[TensorKey, Any], list[tuple[tuple[str, str], list[float]]], Log]:
        model = network()
        model[2].bias.register_hook(lambda gradient: None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with Inspector(model, capture=mpinspect.ranges.kinds.KINDS) as inspector:
            for _ in range(3):
                optimizer.zero_grad()
                for _ in range(2):
                    loss_of(model).backward()
                optimizer.step()
        watch = inspector._capture._watch
        assert watch is not None
        rings = [(key, list(ring)) for key, ring in sorted(watch._judge._history._maxima.items())]
        seen = list(readings)
        readings.clear()
        return inspector.session().totals(), rings, seen

    waited: list[bool] = []
    outputs: list[bool] = []
    hold, hold_output = WaitingGradients.hold, WaitingGradients.hold_output

    def held_output(self: Any, *given: Any) -> bool:
        outputs.append(hold_output(self, *given))
        return outputs[-1]

    def held(self: Any, watched: Any, gradient: Any) -> bool:
        waited.append(hold(self, watched, gradient))
        return waited[-1]

    monkeypatch.setattr(WaitingGradients, "hold", held)
    monkeypatch.setattr(WaitingGradients, "hold_output", held_output)
    together = run()
    assert waited.count(True) == 18
    assert False in waited
    # The first gradient of each backward begins the holding.
    assert [outputs.count(is_held) for is_held in (True, False)] == [12, 0]
    monkeypatch.setattr(WaitingGradients, "hold", lambda self, watched, gradient: False)
    monkeypatch.setattr(WaitingGradients, "hold_output", lambda self, *given: False)
    assert run() == together
    assert ("backward", "weight_gradient", "0.weight") in together[2]


class _Given(torch.autograd.Function):
    """Passes the given tensor itself to a parameter as its gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return parameter.detach().real.float().sum()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return ctx.gradient, None


class _Gradients(nn.Module):
    def __init__(self, gradients: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.gradients = gradients
        for name, gradient in gradients.items():
            dense = torch.zeros(gradient.shape, dtype=gradient.dtype)
            self.register_parameter(name, nn.Parameter(dense))

    def forward(self) -> torch.Tensor:
        return torch.stack([_Given.apply(getattr(self, name), given) for name, given in self.gradients.items()]).sum()


_LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "float64": lambda: torch.randn(5, 3, dtype=torch.float64),
    "complex64": lambda: torch.randn(5, 3, dtype=torch.complex64),
    "complex128": lambda: torch.randn(5, 3, dtype=torch.complex128),
    "bfloat16": lambda: torch.randn(5, 3).bfloat16(),
    "transposed": lambda: torch.randn(3, 5).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "with gaps": lambda: torch.randn(10, 3)[::2],
    "expanded": lambda: torch.randn(1, 3).expand(5, 3),
    "one value expanded": lambda: torch.tensor(2.5).expand(5, 3),
    "not from its memory's start": lambda: torch.randn(20)[4:19].view(5, 3),
    "empty": lambda: torch.randn(0, 3),
    "a single value": lambda: torch.tensor(-3.0),
}


@pytest.mark.parametrize("numba", [True, False], ids=["compiled", "without numba"])
def test_counts_and_magnitudes_are_exact_for_every_dtype_and_layout(
    monkeypatch: pytest.MonkeyPatch, numba: bool
) -> None:
    if not numba:
        monkeypatch.setattr(fastest, "cpu_counter", lambda: None)
    gradients = {f"p{number}": make() for number, make in enumerate(_LAYOUTS.values())}
    model = _Gradients(gradients)
    inspector = inspected(model, lambda _: model(), 2, capture=("weight_gradient",))
    totals = inspector.session().totals()
    assert inspector._capture._watch is not None
    maxima = inspector._capture._watch._judge._history._maxima
    for name, gradient in gradients.items():
        once = count_exponents(gradient)
        if gradient.numel():
            assert totals[TensorKey(name, "weight_gradient")].histogram == merge([once, once]), name
            real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            assert list(maxima[name, "weight_gradient"]) == [float(real.abs().max())] * 2, name


@pytest.mark.parametrize("layout", ["float64", "complex64", "with gaps", "expanded", "transposed"])
def test_an_infinity_is_found_in_a_gradient_of_any_layout(layout: str) -> None:
    gradient = _LAYOUTS[layout]()
    model = _Gradients({"usual": torch.randn(4), "odd": gradient})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Inspector(model, capture=(), optimizers=optimizer) as inspector:
        for step in range(3):
            optimizer.zero_grad()
            if step == 2:
                (gradient._base if gradient._base is not None else gradient).view(-1)[0] = float("inf")
            model().backward()
            optimizer.step()
    (event,) = inspector.session().events
    assert (event.step, event.what, event.tensor, event.value) == (2, "weight_gradient", "odd", "inf")
    assert len(event.last_maxima) == 2


def test_the_watch_reads_gradients_that_waited() -> None:
    """The event names the infinite gradient and lists the largest gradient magnitudes of the steps before."""
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    largest = []
    with Inspector(model) as inspector:
        for factor in (1.0, 2.0**20, float("inf")):
            optimizer.zero_grad()
            # The output, its gradient and the loss stay finite.
            (model(torch.ones(1, 3)).sum() + of_slope(model.weight, factor)).backward()
            assert model.weight.grad is not None
            largest.append(float(model.weight.grad.abs().max()))
            optimizer.step()
    (event,) = inspector.session().events
    assert (event.what, event.tensor, event.value) == ("weight_gradient", "weight", "inf")
    assert event.last_maxima == tuple(largest[:2])


def test_gradients_of_a_backward_interrupted_at_the_end_have_their_own_values() -> None:
    """The watch reads the last gradients themselves, not values of another step that remain in their memory."""

    def train() -> None:
        for step in range(2):
            optimizer.zero_grad()
            (loss_of(model) * (float("inf") if step == 1 else 1.0)).backward()
            if step == 1:
                optimizer.zero_grad()
            optimizer.step()
        optimizer.zero_grad()
        hidden = model[0](torch.ones(4, 6))
        hidden.register_hook(interrupt)
        model[2](hidden).square().mean().backward()

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inspector = Inspector(model, optimizers=optimizer)
    broken_off(inspector, train)
    assert [event.step for event in inspector.session().events] == [1]


def test_an_infinite_gradient_of_an_interrupted_backward_is_named() -> None:
    def train() -> None:
        for _ in range(3):
            take_step(optimizer, loss_of(model))
        optimizer.zero_grad()
        hidden = model[1](model[0](torch.ones(4, 6)))
        hidden.register_hook(interrupt)
        model[2](hidden.detach() * 1e20 + hidden).backward(torch.full((4, 3), 1e25))

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inspector = Inspector(model, optimizers=optimizer, capture=("weight_gradient",))
    broken_off(inspector, train)
    (event,) = inspector.session().events
    assert (event.step, event.what, event.tensor, event.value) == (3, "weight_gradient", "2.weight", "inf")


def test_the_next_forward_releases_the_gradients_of_an_interrupted_backward() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Inspector(model, optimizers=optimizer) as inspector:
        hidden = model[0](torch.ones(4, 6))
        handle = hidden.register_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model[2](hidden).square().mean().backward()
        handle.remove()
        held = inspector._capture.waiting
        # Those of the parameters, and of the output where the interruption came.
        assert len(held) == 3
        loss = loss_of(model)
        assert len(held) == 0
        loss.backward()
        optimizer.step()


def test_changes_by_full_backward_hooks_do_not_reach_the_counts() -> None:
    def clamp(*_: object) -> None:
        for parameter in model[2].parameters():
            parameter.grad.data.clamp_(-1e-3, 1e-3)

    def largest(with_hook: bool) -> float:
        handle = model[1].register_full_backward_hook(clamp) if with_hook else None
        model.zero_grad()
        with Inspector(model) as inspector:
            loss_of(model).backward()
        if handle is not None:
            handle.remove()
        return inspector.session().totals()[TensorKey("2.weight", "weight_gradient")].histogram.max_exponent

    model = network()
    assert largest(with_hook=True) == largest(with_hook=False) > -9


def test_an_output_gradient_changed_in_place_is_counted_at_its_arrival_from_then_on() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    with Inspector(model, optimizers=optimizer) as inspector:
        for step in range(3):
            optimizer.zero_grad()
            hidden = model[0](torch.linspace(-1, 1, 24).view(4, 6))
            hidden.register_hook(lambda gradient: counts.append(mpinspect.count_exponents(gradient)))
            hidden.register_hook(lambda gradient: gradient.mul_(2).storage_offset() or None)
            loss = model[2](model[1](hidden)).square().mean()
            if step:
                loss.backward()
            else:
                with pytest.warns(mpinspect.MpinspectWarning, match="the gradient of '0' was changed in place"):
                    loss.backward()
            optimizer.step()
    totals = inspector.session().totals()
    assert totals[TensorKey("0", "activation_gradient")].histogram == merge(counts[1:])
    assert [totals[TensorKey(name, "activation_gradient")].samples for name in ("0", "1", "2")] == [2, 3, 3]


def test_a_gradient_whose_memory_was_freed_does_not_lose_the_others() -> None:
    """The freed gradient is neither counted nor read; the others are, without an error."""

    def take_memory(gradient: torch.Tensor) -> None:
        assert model[2].weight.grad is not None
        model[2].weight.grad.untyped_storage().resize_(0)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Inspector(model, optimizers=optimizer, capture=("weight_gradient",)) as inspector, warnings.catch_warnings():
        # A warning about it is optional.
        warnings.simplefilter("ignore", mpinspect.MpinspectWarning)
        for _ in range(4):
            optimizer.zero_grad()
            hidden = model[0](torch.ones(4, 6))
            hidden.register_hook(take_memory)
            model[2](hidden).square().mean().backward()
            model[2].weight.grad = None
            optimizer.step()
    assert inspector._capture._watch is not None
    maxima = inspector._capture._watch._judge._history._maxima
    seen = {name: len(ring) for (name, what), ring in maxima.items() if what == "weight_gradient"}
    assert seen == {"2.bias": 4, "0.weight": 4, "0.bias": 4}
    assert not [note for note in inspector.session().notes if "failed" in note]


def test_an_error_while_a_full_batch_is_read_does_not_reach_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full batch is read in the middle of a backward, when the next gradient arrives."""

    def broken(*_: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(waiting, "_MOST_WAITING", 100)
    monkeypatch.setattr(HostRows, "count_together", broken)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Inspector(model, optimizers=optimizer, capture=("weight_gradient",)) as inspector:
        for step in range(5):
            optimizer.zero_grad()
            with pytest.warns(mpinspect.MpinspectWarning, match="out of order") if step == 0 else nullcontext():
                loss_of(model).backward()
            assert all(parameter.grad is not None for parameter in model.parameters())
            optimizer.step()
    assert inspector.session().progress.steps == 5
    assert any("training is not affected" in note for note in inspector.session().notes)


def test_gradients_of_a_concurrent_backward_in_another_thread_are_counted() -> None:
    model = network()
    expected: dict[str, list[Any]] = {}
    with Inspector(model, capture=("weight_gradient",)) as inspector:
        hidden = model[0](torch.ones(4, 6))

        def another(gradient: torch.Tensor) -> None:
            thread = threading.Thread(target=lambda: loss_of(model).backward())
            thread.start()
            thread.join()

        hidden.register_hook(another)
        hooks = [
            parameter.register_hook(
                lambda gradient, name=name: expected.setdefault(name, []).append(count_exponents(gradient.clone()))
            )
            for name, parameter in model.named_parameters()
            if name.startswith("0")
        ]
        model[2](hidden).square().mean().backward()
        for handle in hooks:
            handle.remove()
    totals = inspector.session().totals()
    assert {key.name: window.samples for key, window in totals.items()} == dict.fromkeys(
        dict(model.named_parameters()), 2
    )
    for name, histograms in expected.items():
        assert totals[TensorKey(name, "weight_gradient")].histogram == merge(histograms)


def test_batched_gradients_produce_a_warning_and_counting_continues() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Inspector(model, optimizers=optimizer) as inspector:
        for step in range(4):
            optimizer.zero_grad()
            output = model(torch.ones(4, 6))
            if step == 1:
                with pytest.warns(mpinspect.MpinspectWarning, match="is_grads_batched"):
                    torch.autograd.grad(
                        output,
                        list(model.parameters()),
                        torch.eye(12).view(12, 4, 3),
                        is_grads_batched=True,
                        retain_graph=True,
                    )
            output.square().mean().backward()
            optimizer.step()
    totals = inspector.session().totals()
    assert totals[TensorKey("0.weight", "weight_gradient")].samples == 4
    assert totals[TensorKey("0", "activation_gradient")].samples == 4


def test_gradients_read_by_the_watch_alone_do_not_wait() -> None:
    """A change later in the same backward cannot hide the infinity."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Inspector(model, optimizers=optimizer, capture=()) as inspector:
        hidden = model[0](torch.ones(4, 6))
        hidden.register_hook(lambda gradient: model[2].weight.grad.zero_().storage_offset() or None)
        (model[2](hidden).sum() + of_slope(model[2].weight, math.inf)).backward()
        optimizer.step()
    (event,) = inspector.session().events
    assert (event.what, event.tensor, event.value) == ("weight_gradient", "2.weight", "inf")


def test_sparse_gradients_do_not_wait_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_MOST_WAITING", 100)
    model = nn.Sequential(nn.Embedding(9, 8, sparse=True), nn.Linear(8, 8), nn.Linear(8, 2))
    inspector = inspected(
        model, lambda _: model(torch.tensor([1, 4, 4])).square().sum(), 5, capture=("weight_gradient",)
    )
    assert {window.samples for window in inspector.session().totals().values()} == {5}
    assert inspector.session().notes == ()


def test_a_backward_of_two_losses_uses_the_scale_of_each() -> None:
    """Gradients that arrive before the scaled loss's backward are not unscaled."""
    plain, scaled = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    model = nn.Module()
    model.plain, model.scaled = plain, scaled
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Inspector(model, optimizers=optimizer, capture=("weight_gradient",), watch=False) as inspector:
        # Autograd runs the node that was created first last.
        first = scaler.scale((scaled * 1.0).sum())
        torch.autograd.backward([first, (plain * 1.0).sum()])
        optimizer.step()
    exponents = {key.name: window.histogram.max_abs for key, window in inspector.session().totals().items()}
    assert exponents == {"plain": 1.0, "scaled": 1.0}


@pytest.mark.parametrize("by", ["optimizer", "scaler"])
def test_gradients_of_an_interrupted_backward_are_counted_before_a_step(by: str) -> None:
    """A scaler divides gradients in place without raising their version counter."""
    late, early = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    model = nn.Module()
    model.late, model.early = late, early
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def fail(gradient: torch.Tensor) -> None:
        raise KeyError("the user's")

    with Inspector(model, optimizers=optimizer, capture=("weight_gradient",), watch=False) as inspector:
        hidden = early * 2
        hidden.register_hook(fail)
        loss = (hidden.exp() + late).sum()
        with pytest.raises(KeyError):
            scaler.scale(loss).backward()
        if by == "scaler":
            scaler.step(optimizer)
        else:
            optimizer.step()
    window = inspector.session().totals()[TensorKey("late", "weight_gradient")]
    assert (window.samples, window.histogram.max_abs) == (1, 1.0)
