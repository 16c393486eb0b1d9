"""Rows of counts on the CPU: weight gradients are counted together when their backward ends, as they were when they came."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mpinspect
from mpinspect import Inspector
from mpinspect.capture import host_rows, waiting
from mpinspect.capture.host_rows import HostRows
from mpinspect.counting import count_exponents, fastest, reference
from mpinspect.counting.cpu import counter
from mpinspect.counting.layout import decode
from mpinspect.exponents import merge
from mpinspect.session import TensorKey


@pytest.fixture(autouse=True)
def _compiled() -> None:
    assert fastest.warm_up() == []


@pytest.fixture
def notes() -> list[str]:
    return []


def _at_once(work: Callable[[], None]) -> None:
    work()


@pytest.fixture
def rows(notes: list[str]) -> HostRows:
    return HostRows(notes.append, _at_once)


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many gradients each compiled call counted."""
    found: list[int] = []
    fill_many = counter.fill_many

    def counted(pairs: Any) -> None:
        found.append(len(pairs))
        fill_many(pairs)

    monkeypatch.setattr(counter, "fill_many", counted)
    return found


def sent(rows: HostRows, given: list[torch.Tensor]) -> dict[int, np.ndarray]:
    copies = rows.send(given).copies
    return {index: row for indices, copy in copies for index, row in zip(indices, copy.values(), strict=True)}


def hooked(rows: HostRows, *parameters: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Put a hook on each that has its gradient counted; what it got (a copy) and the row are appended to the list."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for parameter in parameters:
        parameter.register_hook(
            lambda gradient, parameter=parameter: seen.append((gradient.clone(), rows.count_later(parameter, gradient)))
        )
    return seen


def test_rows_of_several_steps(rows: HostRows, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of too many rows has the rest beside the memory, and the next one a larger one."""
    monkeypatch.setattr(host_rows, "_FIRST_CAPACITY", 4)
    rows = HostRows([].append, _at_once)
    for step in range(6):
        tensors = [torch.randn(10 + i + step) for i in range(3 if step < 2 else 7)]
        given = [rows.count(tensor) for tensor in tensors]
        found = sent(rows, given)
        assert len(found) == (3 if step < 2 else 4 if step == 2 else 7)
        for index, tensor in enumerate(tensors):
            assert found.get(index, given[index].numpy()).tolist() == reference.count(tensor).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_a_backward_are_counted_in_one_call(
    rows: HostRows, together: list[int], threads: int, dtype: torch.dtype
) -> None:
    shapes = [(3,), (300, 401), (1,), (17, 5), (0,)]
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    seen = hooked(rows, *parameters)
    for micro_batch in range(2):
        sum((parameter * torch.randn(parameter.shape).to(dtype)).sum().float() for parameter in parameters).backward()
        # Before the backward returns: what comes next may change the gradients.
        for parameter in parameters:
            parameter.grad.fill_(float("nan"))
        assert together == [len(shapes)] * (micro_batch + 1)
    found = sent(rows, [row for _, row in seen])
    for index, (gradient, _) in enumerate(seen):
        assert found[index].tolist() == reference.count(gradient).tolist()


def test_the_gradient_is_taken_over_and_not_copied(rows: HostRows, together: list[int]) -> None:
    parameter = nn.Parameter(torch.ones(5))
    addresses = []
    parameter.register_hook(
        lambda gradient: (addresses.append(gradient.data_ptr()), rows.count_later(parameter, gradient))[0]
    )
    (parameter * torch.randn(5)).sum().backward()
    assert together == [1]
    assert parameter.grad.data_ptr() == addresses[0]


def test_a_gradient_that_something_else_may_change_is_counted_at_once(rows: HostRows, together: list[int]) -> None:
    another_hook, in_backward = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    seen = hooked(rows, another_hook, in_backward)
    another_hook.register_hook(lambda gradient: gradient.mul_(0))
    in_backward.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    (another_hook * torch.randn(3) + in_backward * torch.randn(3)).sum().backward()
    assert together == []
    for gradient, row in seen:
        assert torch.equal(row, reference.count(gradient))
        assert decode(row.numpy()).nonzero == 3


def test_a_gradient_changed_while_it_waits_is_left_out_and_said(rows: HostRows, notes: list[str]) -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    seen = hooked(rows, first, second)
    product = second * 2
    # Later in the backward than the gradient of what was made after it.
    product.register_hook(lambda gradient: first.grad.mul_(2).storage_offset() or None)
    (product.exp().sum() + (first * torch.randn(3)).sum()).backward()
    found = rows.send([row for _, row in seen])
    assert found.done == {0, 1}
    ((indices, copy),) = found.copies
    assert indices == [1]
    assert copy.values()[0].tolist() == reference.count(seen[1][0]).tolist()
    assert len(notes) == 1
    assert "changed in place" in notes[0]


def test_a_backward_that_breaks_off_leaves_nothing_behind(rows: HostRows, together: list[int]) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise KeyError("the user's")

    early, late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    seen = hooked(rows, late)
    hidden = early * 2
    hidden.register_hook(fail)
    with pytest.raises(KeyError):
        (hidden.exp() * late).sum().backward()
    rows.drop()
    assert together == [1]
    (late * 2).sum().backward()
    assert together == [1, 1]
    assert torch.equal(seen[-1][1], reference.count(seen[-1][0]))


def test_many_bytes_do_not_wait(rows: HostRows, together: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_MOST_WAITING", 100)
    monkeypatch.setattr(waiting, "_LARGEST_TO_WAIT", 80)
    parameters = [nn.Parameter(torch.ones(n)) for n in (10, 10, 10, 30)]
    seen = hooked(rows, *parameters)
    sum((parameter * torch.randn(parameter.shape)).sum() for parameter in parameters).backward()
    assert sum(together) == 3
    assert max(together) <= 2
    for gradient, row in seen:
        assert torch.equal(row, reference.count(gradient))


def test_counting_that_fails_when_the_backward_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients are no samples, the watch sees nothing wrong, and the training goes on."""

    def broken(pairs: Any) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(counter, "fill_many", broken)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Inspector(model) as inspector:
        with pytest.warns(mpinspect.MpinspectWarning, match="out of order"):
            model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
    session = inspector.session()
    assert {key.kind for key in session.totals()} == {"activation_gradient"}
    assert session.events == ()


def test_what_the_watch_sees_of_gradients_that_waited() -> None:
    """An infinite gradient is named, and the largest magnitudes of the steps before are those of the gradients."""
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    largest = []
    with Inspector(model) as inspector:
        for factor in (1.0, 2.0**20, float("inf")):
            optimizer.zero_grad()
            # The output stays finite, as does the gradient at it.
            (model(torch.ones(1, 3)).sum() + (model.weight * factor).sum()).backward()
            largest.append(float(model.weight.grad.abs().max()))
            optimizer.step()
    (event,) = inspector.session().events
    assert (event.what, event.tensor, event.value) == ("weight_gradient", "weight", "inf")
    assert event.last_maxima == tuple(largest[:2])


def test_the_same_with_and_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> dict[TensorKey, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with Inspector(model, capture=mpinspect.session.KINDS) as inspector:
            for _ in range(3):
                optimizer.zero_grad()
                for _ in range(2):
                    model(torch.randn(4, 6)).square().mean().backward()
                optimizer.step()
        return inspector.session().totals()

    fast = run()
    monkeypatch.setattr(fastest, "cpu_counter", lambda: None)
    assert run() == fast


def test_memory_that_was_given_back_is_an_error_and_no_crash() -> None:
    values = torch.randn(10)
    values.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="memory has been given back"):
        count_exponents(values)


# -- backwards that are not as usual ---------------------------------------------------------------------------------------


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.linspace(-1, 1, 24).view(4, 6)).square().mean()


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def broken_off(inspector: Inspector, train: Callable[[], None]) -> None:
    with pytest.raises(KeyboardInterrupt):
        _inside(inspector, train)


def _inside(inspector: Inspector, train: Callable[[], None]) -> None:
    with inspector:
        train()


def test_a_backward_that_breaks_off_at_the_end_of_the_inspection() -> None:
    """What the watch is told of the last gradients is what they were, not what another step left in memory."""

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


def test_a_gradient_that_is_infinite_where_a_backward_breaks_off() -> None:
    def train() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
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


def test_nothing_is_held_of_a_backward_that_broke_off_once_the_training_goes_on() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Inspector(model, optimizers=optimizer) as inspector:
        hidden = model[0](torch.ones(4, 6))
        handle = hidden.register_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model[2](hidden).square().mean().backward()
        handle.remove()
        held = inspector._capture._tally._host_rows._waiting
        assert len(held) == 2
        loss = loss_of(model)
        assert not held
        loss.backward()
        optimizer.step()


def test_full_backward_hooks_may_do_anything_to_gradients_that_came_before() -> None:
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


def test_one_gradient_that_cannot_be_counted_takes_no_other_with_it() -> None:
    def take_memory(gradient: torch.Tensor) -> None:
        model[2].weight.grad.untyped_storage().resize_(0)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Inspector(model, optimizers=optimizer, capture=("weight_gradient",)) as inspector:
        for step in range(8):
            optimizer.zero_grad()
            hidden = model[0](torch.ones(4, 6))
            if step < 4:
                hidden.register_hook(take_memory)
            with pytest.warns(mpinspect.MpinspectWarning, match="given back") if step == 0 else nullcontext():
                model[2](hidden).square().mean().backward()
            if step < 4:
                model[2].weight.grad = None
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
    samples = {key.name: window.samples for key, window in inspector.session().totals().items()}
    assert samples == {"0.weight": 8, "0.bias": 8, "2.weight": 4, "2.bias": 8}


def test_ctrl_c_while_they_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What their rows hold is of another step: no sample."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Inspector(model, optimizers=optimizer, capture=("weight_gradient",)) as inspector:
        for step in range(4):
            optimizer.zero_grad()
            with monkeypatch.context() as patch:
                if step == 2:
                    patch.setattr(counter, "fill_many", interrupt)
                with pytest.raises(KeyboardInterrupt) if step == 2 else nullcontext():
                    loss_of(model).backward()
            optimizer.step()
    assert {window.samples for window in inspector.session().totals().values()} == {3}
    assert inspector.session().events == ()


def test_a_backward_in_another_thread_in_the_middle_of_this_one() -> None:
    """Its gradients are counted, and leave those that wait in peace."""
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


def test_batched_gradients_are_said_and_stop_nothing() -> None:
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


def test_a_zero_tensor_has_no_memory() -> None:
    row = fastest.count(torch._efficientzerotensor(5))
    assert row.tolist() == reference.count(torch.zeros(5)).tolist()
