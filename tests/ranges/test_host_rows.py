"""Rows of counts on the CPU: their memory is reused, and waiting weight gradients are counted together."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from waiting_gradients import interrupt, loss_of, network, of_slope, row_of, waited

import mpinspect
from mpinspect import Inspector, count_exponents
from mpinspect.counting import fastest, reference
from mpinspect.counting.cpu import counter
from mpinspect.ranges.capture import host_rows
from mpinspect.ranges.capture.host_rows import HostRows
from mpinspect.ranges.capture.tally import Tally
from mpinspect.ranges.windows.tensors import TensorKey


@pytest.fixture(autouse=True)
def _compiled() -> None:
    assert fastest.warm_up() == []


@pytest.fixture
def rows() -> HostRows:
    return HostRows()


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of gradients in each call of the compiled loops."""
    found: list[int] = []
    fill_many = counter.fill_many

    def counted(pairs: Any) -> None:
        found.append(len(pairs))
        fill_many(pairs)

    monkeypatch.setattr(counter, "fill_many", counted)
    return found


def sent(rows: HostRows, given: list[torch.Tensor]) -> dict[int, np.ndarray]:
    copies = rows.send(given)
    return {index: row for indices, copy in copies for index, row in zip(indices, copy.values(), strict=True)}


def test_the_memory_of_rows_grows_after_a_step_with_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that do not fit are allocated separately, and the next step has a larger memory."""
    monkeypatch.setattr(host_rows, "_FIRST_CAPACITY", 4)
    rows = HostRows()
    for step in range(6):
        tensors = [torch.randn(10 + i + step) for i in range(3 if step < 2 else 7)]
        given = [rows.count(tensor) for tensor in tensors]
        found = sent(rows, given)
        assert len(found) == (3 if step < 2 else 4 if step == 2 else 7)
        for index, tensor in enumerate(tensors):
            assert found.get(index, given[index].numpy()).tolist() == reference.count(tensor).tolist()


def test_a_step_sends_only_the_rows_in_its_memory(rows: HostRows) -> None:
    first = rows.count(torch.randn(5))
    elsewhere = reference.count(torch.randn(5))
    second = rows.count(torch.randn(6))
    ((indices, copy),) = rows.send([elsewhere, second, first])
    assert set(indices) == {1, 2}
    for index, row in zip(indices, copy.values(), strict=True):
        assert row.tolist() == {1: second, 2: first}[index].tolist()


def test_dropping_a_step_frees_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_rows, "_FIRST_CAPACITY", 2)
    rows = HostRows()
    for _ in range(3):
        tensors = [torch.randn(5), torch.randn(6)]
        given = [rows.count(tensor) for tensor in tensors]
        rows.drop()
    last = torch.randn(7)
    given = [rows.count(last)]
    assert sent(rows, given)[0].tolist() == reference.count(last).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_waiting_gradients_are_counted_in_one_call(
    rows: HostRows, together: list[int], threads: int, dtype: torch.dtype
) -> None:
    alone = torch.randn(4)
    row = rows.count(alone)
    for _ in range(2):
        gradients = [torch.randn(shape).to(dtype) for shape in [(3,), (300, 401), (1,), (17, 5), (0,)]]
        waiting = waited(*gradients)
        before = len(together)
        rows.count_together(waiting)
        assert together[before:] == [len(gradients)]
        for gradient, each in zip(gradients, waiting, strict=True):
            assert torch.equal(row_of(each), reference.count(gradient))
    step = sent(rows, [row, *(row_of(each) for each in waiting)])
    assert step[0].tolist() == reference.count(alone).tolist()
    for index, gradient in enumerate(gradients, 1):
        assert step[index].tolist() == reference.count(gradient).tolist()


def test_gradients_beyond_the_memory_are_left_for_separate_counting(
    monkeypatch: pytest.MonkeyPatch, together: list[int]
) -> None:
    monkeypatch.setattr(host_rows, "_FIRST_CAPACITY", 2)
    rows = HostRows()
    gradients = [torch.randn(length) for length in (5, 6, 7)]
    for step in range(2):
        waiting = waited(*gradients)
        rows.count_together(waiting)
        assert [each.found is None for each in waiting] == [False, False, step == 0]
        given = [row_of(each) for each in waiting if each.found is not None]
        for gradient, row in zip(gradients, given, strict=False):
            assert torch.equal(row, reference.count(gradient))
        assert set(sent(rows, given)) == set(range(len(given)))
    assert together == [2, 3]


def test_gradients_unsupported_by_the_compiled_loops_are_left_for_separate_counting(rows: HostRows) -> None:
    gradients = [torch.randn(3, dtype=torch.float64), torch.randn(4, 6).t(), torch.randn(5)]
    waiting = waited(*gradients)
    rows.count_together(waiting)
    assert [each.found is None for each in waiting] == [True, True, False]
    assert torch.equal(row_of(waiting[2]), reference.count(gradients[2]))


def test_an_empty_list_of_gradients_makes_no_call(rows: HostRows, together: list[int]) -> None:
    rows.count_together([])
    assert together == []


def test_a_gradient_that_cannot_be_counted_does_not_lose_the_others() -> None:
    notes: list[str] = []
    tally = Tally(notes.append, lambda step, scale: None)
    gradients = [torch.randn(5), torch.randn(6), torch.randn(7)]
    waiting = waited(*gradients)
    gradients[1].untyped_storage().resize_(0)
    tally.count_together(waiting)
    assert waiting[1].found is None
    ((reason, keys),) = tally.unread.take_new().items()
    assert (keys, "memory has been freed" in reason) == ([TensorKey("weight", "weight_gradient")], True)
    assert tally.unread.take_new() == {}
    for number in (0, 2):
        assert torch.equal(row_of(waiting[number]), reference.count(gradients[number]))


def test_counts_are_equal_with_and_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> dict[TensorKey, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with Inspector(model, capture=mpinspect.ranges.kinds.KINDS) as inspector:
            for _ in range(3):
                optimizer.zero_grad()
                for _ in range(2):
                    model(torch.randn(4, 6)).square().mean().backward()
                optimizer.step()
        return inspector.session().totals()

    fast = run()
    monkeypatch.setattr(fastest, "cpu_counter", lambda: None)
    assert run() == fast


def test_a_tensor_without_its_memory_raises_an_error() -> None:
    values = torch.randn(10)
    values.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="memory has been freed"):
        count_exponents(values)


def test_an_efficient_zero_tensor_without_memory_is_counted() -> None:
    row = fastest.count(torch._efficientzerotensor(5))
    assert row.tolist() == reference.count(torch.zeros(5)).tolist()


# -- errors while counting --------------------------------------------------------------------------------------------------


def test_gradients_are_counted_separately_if_counting_together_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch reports no event, and the training continues."""

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
    assert {key.kind for key in session.totals()} == {"activation_gradient", "weight_gradient"}
    assert session.totals()[TensorKey("bias", "weight_gradient")].histogram == count_exponents(model.bias.grad)
    assert session.events == ()


def test_the_watch_reads_gradients_that_could_not_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(pairs: Any) -> None:
        raise RuntimeError("out of order")

    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Inspector(model, capture=("weight_gradient",)) as inspector:
        for factor in (1.0, float("inf")):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 3)).sum() + of_slope(model.weight, factor)
            with pytest.warns(mpinspect.MpinspectWarning, match="out of order") if factor != 1.0 else nullcontext():
                loss.backward()
            monkeypatch.setattr(counter, "fill_many", broken)
            optimizer.step()
    (event,) = inspector.session().events
    assert (event.step, event.what, event.tensor, event.value) == (1, "weight_gradient", "weight", "inf")


def test_a_gradient_that_cannot_be_counted_in_a_training_does_not_lose_the_others() -> None:
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
            with (
                pytest.warns(mpinspect.MpinspectWarning, match="memory has been freed") if step == 0 else nullcontext()
            ):
                model[2](hidden).square().mean().backward()
            if step < 4:
                model[2].weight.grad = None
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
    samples = {key.name: window.samples for key, window in inspector.session().totals().items()}
    assert samples == {"0.weight": 8, "0.bias": 8, "2.weight": 4, "2.bias": 8}


def test_gradients_whose_counting_was_interrupted_are_not_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C leaves rows with the counts of another step."""
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
