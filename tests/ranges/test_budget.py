"""A budget chooses the sampled and watched steps, so that the cost stays below a share of the training's own time."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainings import inspected, take_step

import mpinspect
from mpinspect import Inspector, Session
from mpinspect.ranges.capture.budget import FIRST_STEPS, LONGEST_PAUSE, PLANNED, Budget
from mpinspect.run.models.launched_inspector import LaunchedInspector
from mpinspect.run.options import LaunchOptions
from mpinspect.runtime.meter import Meter

BARE = 1.0


def _run(
    budget: Budget, steps: int, costs: tuple[float, float, float], stalls: dict[int, float] | None = None
) -> tuple[list[int], list[int], float]:
    """Return the sampled steps, the watched steps and the spent share, for costs of a sampled, a watched and an idle step."""
    sampled, watched, own, bare = [], [], 0.0, 0.0
    for step in range(steps):
        cost = costs[0] if budget.samples else costs[1] if budget.watches else costs[2]
        sampled += [step] if budget.samples else []
        watched += [step] if budget.watches else []
        length = (stalls or {}).get(step, BARE)
        counted, _ = budget.end_step(None if step == 0 else length + cost, cost)
        own, bare = own + (cost if step else 0.0), bare + counted
    return sampled, watched, own / bare


@pytest.mark.parametrize("share", [0.005, 0.02, 0.1])
@pytest.mark.parametrize("costs", [(0.13, 0.0, 0.0), (0.13, 0.001, 0.0), (0.9, 0.004, 0.0001), (0.13, 0.3, 0.0)])
def test_the_cost_is_just_below_the_given_share(share: float, costs: tuple[float, float, float]) -> None:
    budget = Budget(share, watches=costs[1] > 0)
    sampled, watched, spent = _run(budget, 5000, costs)
    assert spent == pytest.approx(PLANNED * share, rel=0.07)
    assert spent < share
    assert sampled[:FIRST_STEPS] == list(range(FIRST_STEPS))
    if costs[1] > 0:
        assert set(sampled) <= set(watched)


def test_every_step_is_sampled_if_the_budget_covers_it() -> None:
    sampled, watched, spent = _run(Budget(0.02), 200, (0.015, 0.01, 0.0))
    assert watched == list(range(200))
    # The first steps have not earned the cost of a sample yet.
    assert sampled[5:] == list(range(sampled[5], 200))
    assert len(sampled) >= 196
    assert spent == pytest.approx(0.015, rel=0.01)


def test_watching_has_priority_over_sampling() -> None:
    """A watch that costs 1% runs in every step of a budget of 2%; samples get the rest."""
    sampled, watched, spent = _run(Budget(0.02), 3000, (0.13, 0.01, 0.0))
    assert watched == list(range(3000))
    assert len(sampled) == pytest.approx(3000 * (PLANNED * 0.02 - 0.01) / 0.12, rel=0.1)
    assert spent <= 0.02


def test_a_watch_above_the_budget_is_thinned_out_and_sampling_continues() -> None:
    sampled, watched, _ = _run(Budget(0.02), 4000, (0.2, 0.08, 0.0))
    assert len(watched) - len(sampled) == pytest.approx(4000 * 0.8 * PLANNED * 0.02 / 0.08, rel=0.1)
    gaps = [late - early for early, late in pairwise(watched[20:])]
    assert max(gaps) <= 6
    assert len(sampled) == pytest.approx(4000 * 0.2 * PLANNED * 0.02 / 0.2, rel=0.2)


def test_every_is_the_minimum_interval_between_samples() -> None:
    sampled, _, spent = _run(Budget(0.5, every=7, watches=False), 100, (0.01, 0.0, 0.0))
    assert sampled == list(range(0, 100, 7))
    assert spent < 0.01


def test_the_number_of_samples_follows_changing_costs() -> None:
    budget = Budget(0.02, watches=False)
    counts = [len(_run(budget, 1000, (cost, 0.0, 0.0))[0]) for cost in (0.1, 0.4, 0.02)]
    assert counts[0] == pytest.approx(1000 * PLANNED * 0.02 / 0.1, rel=0.05)
    assert counts[1] == pytest.approx(1000 * PLANNED * 0.02 / 0.4, rel=0.1)
    assert counts[2] == pytest.approx(1000 * PLANNED * 0.02 / 0.02, rel=0.05)


@pytest.mark.parametrize("stall", [50.0, 10_000.0])
def test_a_stalled_step_earns_little_allowance(stall: float) -> None:
    """Time for a validation or a checkpoint between two steps does not add samples."""
    plain, _, _ = _run(Budget(0.02, watches=False), 1000, (0.1, 0.0, 0.0))
    stalled, _, spent = _run(
        Budget(0.02, watches=False), 1000, (0.1, 0.0, 0.0), dict.fromkeys(range(5, 1000, 50), stall)
    )
    assert len(plain) <= len(stalled) <= len(plain) * 1.05
    assert spent == pytest.approx(PLANNED * 0.02, rel=0.05)


def test_sampling_resumes_after_a_long_stall_inside_the_inspector() -> None:
    budget = Budget(0.02, watches=False)
    before, _, _ = _run(budget, 200, (0.1, 0.0, 0.0))
    assert len(before) == pytest.approx(200 * PLANNED * 0.02 / 0.1, abs=3)
    while not budget.samples:
        budget.end_step(BARE, 0.0)
    budget.end_step(BARE + 1e6, 1e6)
    after, _, _ = _run(budget, 200, (0.1, 0.0, 0.0))
    assert 15 <= len(after) < len(before)


def test_short_stalls_inside_the_inspector_count_as_cost() -> None:
    """Every fifth watched step takes ten times as long, as on a busy machine; the share is still met."""
    budget = Budget(0.02, samples=False)
    spent = bare = 0.0
    watched = 0
    for _ in range(20_000):
        cost = 0.0
        if budget.watches:
            watched += 1
            cost = 0.3 if watched % 5 == 0 else 0.03
        spent += cost
        bare += budget.end_step(BARE + cost, cost)[0]
    assert spent / bare == pytest.approx(PLANNED * 0.02, rel=0.02)


def test_the_cost_of_idle_steps_is_part_of_the_share() -> None:
    """This holds even if a sample costs as much as a thousand steps earn."""
    _, watched, spent = _run(Budget(0.05), 20_000, (2.0, 0.5, 0.02))
    assert spent == pytest.approx(PLANNED * 0.05, rel=0.07)
    assert len(watched) > 100


def test_samples_and_watched_steps_never_stop() -> None:
    """There is a longest pause, whatever a sample costs."""
    sampled, watched, _ = _run(Budget(0.001), 5 * LONGEST_PAUSE, (1e4, 1e3, 0.0))
    assert len(sampled) >= 5
    assert max(late - early for early, late in pairwise(watched)) <= LONGEST_PAUSE


def test_the_first_steps_are_sampled_at_any_cost() -> None:
    sampled, _, _ = _run(Budget(0.02), 10, (1e3, 0.0, 0.0))
    assert sampled == list(range(FIRST_STEPS))


@pytest.mark.parametrize("hidden", [0.0, 0.2])
def test_slowdowns_outside_of_callbacks_are_charged(hidden: float) -> None:
    """The meter compares the bare times of watched and idle steps."""
    budget, own, watched = Budget(0.1), 0.0, 0
    charged = 0.0
    for step in range(4000):
        cost = 0.3 if budget.samples or budget.watches else 0.0
        is_watched = bool(cost)
        varying = 1 + 0.02 * math.sin(step * 1.7)
        _, counted = budget.end_step(None if step == 0 else BARE * varying + cost + hidden * is_watched, cost)
        watched += is_watched
        own, charged = own + cost, charged + counted
    assert watched * (0.3 + hidden) == pytest.approx(PLANNED * 0.1 * 4000, rel=0.05)
    assert charged - own == pytest.approx(watched * hidden, rel=0.15, abs=0.01 * own)


class _Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_meter_times_outermost_callbacks_and_whole_steps() -> None:
    clock = _Clock()
    meter = Meter(clock)
    meter.begin()
    clock.now += 2
    assert meter.end_step() == (None, 2.0)
    clock.now += 3
    meter.end()
    clock.now += 10
    meter.begin()
    clock.now += 1
    assert meter.end_step() == (14.0, 4.0)


class _Device:
    """A device whose measured times arrive one step late."""

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self.done: list[float] = []
        self.late: list[float] = []

    def begin(self) -> None:
        self.begun += 1

    def end(self) -> None:
        self.ended += 1

    def end_step(self) -> None:
        self.late.append(0.5)

    def arrived(self) -> list[float]:
        arrived, self.done, self.late = self.done, self.late, []
        return arrived


def test_the_devices_time_is_charged_on_arrival_and_then_as_an_average() -> None:
    device = _Device()
    meter = Meter(_Clock(), device)
    told = []
    for _ in range(40):
        meter.begin()
        told.append(meter.next_step(True))
        meter.end()
    assert device.begun == device.ended
    assert device.begun < 2 * 40
    assert sum(told) == pytest.approx(0.5 * 40, rel=0.1)
    assert told[:3] == [0.0, 0.0, 0.5]


def _trained(
    clock: _Clock, steps: int, cost: Callable[[Any], float], of: Callable[..., Inspector] = Inspector, **options: Any
) -> Inspector:
    """Train with steps of one second on the inspector's clock; ``cost`` returns the inspection's seconds per module call."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inspector = of(model, optimizers=optimizer, **options)
    capture = inspector._capture
    capture.meter.clock = clock
    forward_ran = capture.forward_ran

    def expensive(*args: Any) -> None:
        meter = capture.meter
        meter.begin()
        clock.now += cost(capture)
        meter.end()
        forward_ran(*args)

    capture.forward_ran = expensive
    with inspector:
        for _ in range(steps):
            clock.now += 1.0
            take_step(optimizer, model(torch.randn(3, 4)).sum())
    return inspector


def test_the_session_records_the_watched_steps_and_the_overhead(tmp_path: Path) -> None:
    clock = _Clock()
    inspected: list[tuple[int, bool]] = []

    def cost(capture: Any) -> float:
        inspected.append((capture.clock.step, capture._counting.at_work))
        return 0.05 if capture._counting.at_work else 0.01

    inspector = _trained(clock, 400, cost, max_overhead=0.02, log_dir=tmp_path / "run")
    session = inspector.session()
    progress = session.progress
    assert session.info.max_overhead == 0.02
    assert progress.sampled_steps == len({step for step, sampled in inspected if sampled})
    assert progress.watched_steps == len({step for step, _ in inspected})
    assert 2 < progress.sampled_steps < progress.watched_steps < 400
    assert progress.measured_steps == 399
    assert progress.bare_s == pytest.approx(399.0, rel=1e-6)
    assert progress.overhead == pytest.approx(PLANNED * 0.02, rel=0.1)
    loaded = Session.load(tmp_path / "run")
    assert loaded.progress == progress
    assert loaded.info == session.info
    report = inspector.report()
    for text in (str(report), report.to_json()):
        assert "max_overhead" in text
    assert f"the watch checked {progress.watched_steps} of 400 steps" in " ".join(str(report).split())


def test_a_first_culprit_after_an_unwatched_step_says_so() -> None:
    clock = _Clock()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    inspector = Inspector(model, optimizers=optimizer, max_overhead=0.01, capture=())
    inspector._capture.meter.clock = clock
    with inspector:
        for step in range(300):
            clock.now += 1.0
            loss = model(torch.full((1, 2), math.inf if step >= 200 else 1.0)).sum()
            inspector._capture.meter.begin()
            clock.now += 0.05 if inspector._capture._watch.at_work else 0.0
            inspector._capture.meter.end()
            loss.backward()
            optimizer.step()
    events = inspector.session().events
    assert events
    assert 200 <= events[0].step < 210
    assert "the step before was not watched" in events[0].explanation


@pytest.mark.parametrize("cost", [0.4, 2.0])
def test_a_run_is_limited_after_a_long_inspection(cost: float) -> None:
    clock = _Clock()
    inspector = _trained(clock, 120, lambda capture: cost / 4 * capture._watch.at_work)
    session = inspector.session()
    progress, notes = session.progress, [note for note in session.notes if "limited" in note]
    assert session.info.max_overhead is None
    if cost < 0.5:
        assert (progress.watched_steps, progress.overhead, notes) == (None, None, [])
        assert "measured cost" not in str(inspector.report())
        return
    # Four modules run in each step. The part of their cost above half a second is taken from an allowance of 20 s.
    first = next(step for step in range(120) if cost * step > 0.5 * step + 20)
    assert notes == [
        f"the inspection took {first * cost:.3g} s of the first {first + 1} steps, the training itself {first} s: in the steps "
        "after, it is limited to 50% of the training's own time, and not every step is watched. max_overhead=0.02 sets another "
        "limit, max_overhead=math.inf none (mpinspect run: --max-overhead 0.02, --max-overhead none)"
    ]
    assert progress.watched_steps is not None
    assert first < progress.watched_steps < 120
    assert progress.own_s <= 0.5 * progress.bare_s + 20 + 2 * cost
    assert progress.measured_steps == 119
    assert f"the watch checked {progress.watched_steps} of 120 steps" in " ".join(str(inspector.report()).split())


@pytest.mark.parametrize(("share", "world"), [(math.inf, 1), (None, 2)])
def test_a_launched_run_of_several_ranks_or_with_limit_none_is_not_limited(
    share: float | None, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world))
    model = nn.Linear(4, 1)
    inspector = _launched(share)(model, torch.optim.SGD(model.parameters(), lr=0.01))
    assert inspector._capture.meter is None
    assert inspector.session().info.max_overhead is None


def _launched(share: float | None = None) -> Callable[..., Inspector]:
    def launched(model: nn.Module, optimizers: torch.optim.Optimizer) -> Inspector:
        options = LaunchOptions("train.py", max_overhead=share)
        return LaunchedInspector(model, options, [optimizers], None, say=print)

    return launched


@pytest.mark.parametrize("bad", [0, 0.0, -0.1, 1, 1.5, math.nan, -math.inf])
def test_a_share_outside_of_0_to_1_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"max_overhead=.*between 0 and 1"):
        Inspector(nn.Linear(1, 1), max_overhead=bad)


@pytest.mark.parametrize("bad", [True, False, "2%", [0.1]])
def test_a_budget_that_is_not_a_number_is_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"max_overhead=.*give a number"):
        Inspector(nn.Linear(1, 1), max_overhead=bad)


def test_no_step_is_timed_without_a_limit() -> None:
    model = nn.Linear(2, 1)
    inspector = inspected(model, lambda _: model(torch.ones(1, 2)).sum(), 3, max_overhead=math.inf)
    progress = inspector.session().progress
    assert (progress.watched_steps, progress.measured_steps, progress.overhead) == (None, 0, None)
    assert inspector._capture.meter is None
    assert "max_overhead" not in str(mpinspect.Inspector(model).report())
