"""StepClock: where steps end."""

from __future__ import annotations

from mpinspect.ranges.capture.steps import Schedule, StepClock


class Optimizer:
    """Something to know by identity."""


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


def test_one_optimizer() -> None:
    clock, optimizer = StepClock(Schedule(2)), Optimizer()
    sampled = []
    for _ in range(4):
        sampled.append(clock.sampled)
        _train(clock)
        _step(clock, optimizer)
    assert clock.step == 4
    assert sampled == [True, False, True, False]


def test_micro_batches() -> None:
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


def test_a_skipped_step_is_a_step() -> None:
    clock, optimizer = StepClock(Schedule(1)), Optimizer()
    for skipped in (False, True, False):
        _train(clock)
        _step(clock, optimizer, skipped=skipped)
    assert (clock.step, clock.skipped_steps) == (3, 1)


def test_two_known_optimizers_make_one_step() -> None:
    clock, generator, discriminator = StepClock(Schedule(1)), Optimizer(), Optimizer()
    clock.know(generator)
    clock.know(discriminator)
    for _ in range(3):
        for optimizer in (discriminator, generator):
            _train(clock)
            _step(clock, optimizer)
    assert clock.step == 3


def test_a_critic_that_steps_more_often() -> None:
    clock, generator, critic = StepClock(Schedule(1)), Optimizer(), Optimizer()
    clock.know(generator)
    clock.know(critic)
    for _ in range(2):
        for optimizer in (critic, critic, critic, generator):
            _train(clock)
            _step(clock, optimizer)
    # Each further critic step ends a step; the generator's completes the last.
    assert clock.step == 6


def test_without_an_optimizer_a_forward_after_a_backward_begins_a_step() -> None:
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


def test_without_an_optimizer_an_unchanged_weight_is_another_micro_batch() -> None:
    clock = StepClock(Schedule(1))
    for _ in range(3):
        assert not clock.forward(lambda: False)
        clock.backward()
    assert (clock.step, clock.micro_batch) == (0, 2)


def test_an_optimizer_that_replaces_another_ends_steps_by_itself() -> None:
    clock, first, second = StepClock(Schedule(1)), Optimizer(), Optimizer()
    for _ in range(3):
        _train(clock)
        _step(clock, first)
    steps = []
    for _ in range(4):
        _train(clock)
        _step(clock, second)
        steps.append(clock.step)
    # The first of its steps waits for the other optimizer; from the second on it is known to be alone.
    assert steps == [3, 5, 6, 7]
    del first
    assert len(clock._known) == 1


def test_a_loop_without_a_sign_of_updates_does_not_pile_up() -> None:
    clock = StepClock(Schedule(1))
    ends = 0
    for _ in range(600):
        if clock.forward(lambda: False):
            ends += 1
            clock.advance()
            clock.forward(lambda: False)
        clock.backward()
    assert ends == 2


def test_the_first_steps_may_be_sampled_densely() -> None:
    schedule = Schedule(every=10, dense=3)
    assert [step for step in range(32) if schedule.samples(step)] == [0, 1, 2, 10, 20, 30]
    assert [step for step in range(5) if Schedule(every=2).samples(step)] == [0, 2, 4]
