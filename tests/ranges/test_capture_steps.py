"""StepClock decides where steps end."""

import math

import pytest
import torch
from trainings import closure_of, take_step

from mpinspect import Inspector
from mpinspect.ranges.capture.steps import CallChoice, Schedule, StepClock
from mpinspect.ranges.windows.tensors import TensorKey


class Optimizer:
    """An optimizer that is known by its identity alone."""


def _train(clock: StepClock) -> None:
    if clock.forward(lambda: True):
        clock.advance()
        assert not clock.forward(lambda: True)
    clock.backward()


def _step(clock: StepClock, optimizer: object, *, skipped: bool = False) -> None:
    if clock.optimizer_again(optimizer):
        clock.advance()
    if clock.optimizer_done(optimizer, skipped=skipped):
        clock.advance()


def test_each_step_of_a_single_optimizer_is_a_step() -> None:
    clock, optimizer = StepClock(Schedule(2)), Optimizer()
    sampled = []
    for _ in range(4):
        sampled.append(clock.sampled)
        _train(clock)
        _step(clock, optimizer)
    assert clock.step == 4
    assert sampled == [True, False, True, False]


def test_several_backwards_before_a_step_are_micro_batches() -> None:
    clock, optimizer = StepClock(Schedule(1)), Optimizer()
    clock.know(optimizer)
    seen = []
    for _ in range(2):
        for _ in range(3):
            _train(clock)
            seen.append((clock.step, clock.micro_batch))
        _step(clock, optimizer)
    assert seen == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert clock.backwards == 6


def test_a_skipped_step_counts_as_a_step() -> None:
    clock, optimizer = StepClock(Schedule(1)), Optimizer()
    for skipped in (False, True, False):
        _train(clock)
        _step(clock, optimizer, skipped=skipped)
    assert (clock.step, clock.skipped_steps) == (3, 1)


@pytest.mark.parametrize("critic_steps", [1, 3])
def test_two_known_optimizers_make_one_step_and_further_steps_of_a_critic_end_steps(critic_steps: int) -> None:
    clock, generator, critic = StepClock(Schedule(1)), Optimizer(), Optimizer()
    clock.know(generator)
    clock.know(critic)
    for _ in range(3):
        for optimizer in (*[critic] * critic_steps, generator):
            _train(clock)
            _step(clock, optimizer)
    # Each further critic step ends a step; the generator's completes the last.
    assert clock.step == 3 * critic_steps


def test_a_forward_after_a_backward_begins_a_step_without_an_optimizer() -> None:
    clock = StepClock(Schedule(1))
    for _ in range(3):
        _train(clock)
    assert (clock.step, clock.micro_batch) == (2, 0)
    assert clock.begun


def test_several_losses_of_one_forward_are_one_micro_batch() -> None:
    clock = StepClock(Schedule(1))
    clock.forward(lambda: True)
    clock.backward()
    clock.backward()
    assert (clock.micro_batch, clock.backwards) == (0, 1)


def test_unchanged_weights_continue_the_step_without_an_optimizer() -> None:
    clock = StepClock(Schedule(1))
    for _ in range(3):
        assert not clock.forward(lambda: False)
        clock.backward()
    assert (clock.step, clock.micro_batch) == (0, 2)


def test_an_optimizer_that_replaces_another_soon_ends_steps_alone() -> None:
    clock, first, second = StepClock(Schedule(1)), Optimizer(), Optimizer()
    for _ in range(3):
        _train(clock)
        _step(clock, first)
    steps = []
    for _ in range(4):
        _train(clock)
        _step(clock, second)
        steps.append(clock.step)
    # Its first step waits for the other optimizer; its second step shows that it is alone.
    assert steps == [3, 5, 6, 7]
    del first
    assert len(clock._known) == 1


def test_a_loop_without_updates_ends_steps_at_a_limit_of_micro_batches() -> None:
    clock = StepClock(Schedule(1))
    ends = 0
    for _ in range(600):
        if clock.forward(lambda: False):
            ends += 1
            clock.advance()
            clock.forward(lambda: False)
        clock.backward()
    assert ends == 2


def test_the_first_steps_can_be_sampled_densely() -> None:
    schedule = Schedule(every=10, dense=3)
    assert [step for step in range(32) if schedule.samples(step)] == [0, 1, 2, 10, 20, 30]
    assert [step for step in range(5) if Schedule(every=2).samples(step)] == [0, 2, 4]


# -- many calls in one step -----------------------------------------------------------------------------------------------


class Recurrent(torch.nn.Module):
    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls, self.cell, self.head = calls, torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, x, broken=-1):
        for call in range(self.calls):
            x = self.cell(x * math.inf if call == broken else x).tanh()
        return self.head(x)


def train_recurrent(calls, steps=4, broken=-1, inspect=True):
    torch.manual_seed(0)
    model = Recurrent(calls)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inspector = Inspector(model, optimizers=optimizer)
    if inspect:
        inspector.attach()
    for step in range(steps):
        take_step(optimizer, model(torch.ones(2, 4), broken if step == steps - 1 else -1).sum())
    inspector.detach()
    return model, inspector


@pytest.mark.parametrize("calls", [32, 33, 64, 200, 1000])
def test_an_evenly_spread_part_of_many_calls_is_counted(calls):
    bare, _ = train_recurrent(calls, inspect=False)
    model, inspector = train_recurrent(calls)
    assert all(torch.equal(one, other) for one, other in zip(bare.parameters(), model.parameters(), strict=True))
    session = inspector.session()
    cell = session.totals()[TensorKey("cell", "activation_gradient")]
    assert session.totals()[TensorKey("head", "activation_gradient")].samples == 4
    assert session.totals()[TensorKey("cell.weight", "weight_gradient")].samples == 4
    told = [each for each in session.measurements if each.what == "calls-left-out"]
    if calls == 32:
        assert cell.samples == 4 * 32
        assert not told
        return
    assert 4 * 31 <= cell.samples <= 4 * 64 + 64
    assert not session.notes
    assert (told[0].name, told[0].figures["calls"]) == ("cell", calls)
    coverage = str(inspector.report())
    assert f"'cell' is called up to {calls:,} times in a forward" in coverage


def test_the_counted_calls_shift_with_each_forward():
    choice = CallChoice()
    taken = []
    for _ in range(5):
        choice.begin_forward()
        taken.append([call for call in range(128) if choice.takes("cell")])
    assert [len(calls) for calls in taken[1:]] == [32] * 4
    assert sorted(call for calls in taken[1:] for call in calls) == list(range(128))
    assert choice.often == {"cell": (128, len(taken[0]))}


def test_an_infinity_in_an_unobserved_call_is_reported_with_that_reservation():
    _, inspector = train_recurrent(200, broken=101)
    (event,) = inspector.session().events
    assert (event.step, event.phase) == (3, "forward")
    assert event.module in ("", "cell")
    if event.module == "":
        assert "not every call of this step was observed" in event.explanation


def test_only_the_first_calls_of_a_closure_are_observed():
    def trained(inspect):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=12, tolerance_grad=0, tolerance_change=0)
        inspector = Inspector(model, optimizers=optimizer)
        if inspect:
            inspector.attach()
        for _ in range(3):
            x = torch.randn(8, 4)
            optimizer.step(closure_of(optimizer, lambda x=x: (model(x) - x.sum(1, keepdim=True)).square().mean()))
        inspector.detach()
        return model, inspector

    (bare, _), (model, inspector) = trained(False), trained(True)
    assert all(torch.equal(one, other) for one, other in zip(bare.parameters(), model.parameters(), strict=True))
    session = inspector.session()
    assert (session.progress.steps, session.progress.backwards) == (3, 12)
    assert {window.samples for window in session.totals().values()} == {12}
    assert [each.what for each in session.measurements if "left-out" in each.what] == ["closures-left-out"]
    assert not session.notes
    assert "first 4 calls of a closure" in str(inspector.report())
