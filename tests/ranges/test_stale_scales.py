"""The share that delayed scaling would have clipped, from the maxima of sampled steps, against a simulation of each step."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from trainings import take_step

from mpinspect import Inspector
from mpinspect.counting import count_exponents
from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.analysis.stale_scales import stale_scales, unserved_at_scale_one
from mpinspect.ranges.kinds import ACTIVATION_GRADIENT
from mpinspect.ranges.session import OperandRecord, Precision, Progress, Session
from mpinspect.ranges.windows.tensors import TensorInfo, TensorKey, TensorWindow
from mpinspect.ranges.windows.window import Window, coarsen

KEY = TensorKey("fc", ACTIVATION_GRADIENT)


def session_of(values: list[np.ndarray], every: int = 1) -> Session:
    """Return a session with a gradient's values of every n-th step."""
    windows = tuple(
        Window(step, step, 1, {KEY: TensorWindow(count_exponents(torch.from_numpy(array)), 1)})
        for step, array in enumerate(values)
        if step % every == 0
    )
    info = TensorInfo("fc", ACTIVATION_GRADIENT, "fc", "Linear")
    return Session(watched=(info,), windows=windows, progress=Progress(steps=len(values), sampled_steps=len(windows)))


def gradients(steps: int = 60, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    scales = 2.0 ** random.normal(-8, 2, steps)
    return [(random.standard_normal(200) * scale).astype(np.float32) for scale in scales]


def clipped_steps(values: list[np.ndarray], history: int) -> list[tuple[float, float]]:
    """Return the excess and the clipped share of each step whose largest magnitude exceeds that of its history."""
    largest = [np.abs(array).max() for array in values]
    found = []
    for step in range(1, len(values)):
        before = max(largest[max(step - history, 0) : step])
        if largest[step] > before:
            found.append((largest[step] / before, float((np.abs(values[step]) > before).mean())))
    return found


@pytest.mark.parametrize("history", [1, 3, 16, 1024])
@pytest.mark.parametrize("seed", range(4))
def test_every_step_sampled_is_exact_and_the_share_lies_within_its_bounds(history, seed):
    values = gradients(seed=seed)
    (found,) = stale_scales(session_of(values), history)
    expected = clipped_steps(values, history)
    assert (found.judged, found.clipped, found.possible) == (59, len(expected), 0)
    factor, share = max(expected)
    assert found.factor == pytest.approx(factor, rel=1e-6)
    assert found.share[0] <= share <= found.share[1]


@pytest.mark.parametrize("history", [1, 3, 16, 1024])
@pytest.mark.parametrize("limit", [7, 20])
def test_merged_windows_bound_the_figures_of_every_step(history, limit):
    values = gradients()
    whole = session_of(values)
    merged = replace(whole, windows=coarsen(whole.windows, limit))
    (found,) = stale_scales(merged, history)
    steps = set(range(len(values)))
    largest = [np.abs(array).max() for array in values]
    clipping = {step for step in steps - {0} if largest[step] > max(largest[max(step - history, 0) : step])}
    with_one = sum(any(w.first_step <= step <= w.last_step for step in clipping) for w in merged.windows[1:])
    assert found.clipped <= with_one <= found.clipped + found.possible


def test_steps_that_were_not_sampled_are_never_certain():
    values = gradients()
    (found,) = stale_scales(session_of(values, every=5), 16)
    assert found.clipped == 0
    assert found.possible > 0
    falling = [array * 0.5**step for step, array in enumerate([values[0]] * 60)]
    (found,) = stale_scales(session_of(falling, every=5), 16)
    assert (found.clipped, found.possible) == (0, 0)


def test_a_spike_is_clipped_once_by_a_long_history_and_its_return_again_by_a_short_one():
    quiet, spike = np.ones(8, np.float32), np.full(8, 4.0, np.float32)
    values = [quiet, quiet, spike, quiet, quiet, quiet, spike]
    (long,), (short,) = (stale_scales(session_of(values), history) for history in (1024, 1))
    assert (long.clipped, short.clipped) == (1, 2)
    assert (long.factor, long.share) == (4.0, (1.0, 1.0))


def test_an_empty_history_loses_small_gradients_and_clips_large_ones():
    for value, is_lost in ((2.0**-20, True), (1.0, False), (2.0**17, True)):
        assert bool(unserved_at_scale_one(session_of([np.full(8, value, np.float32)]))) is is_lost


def test_sessions_without_counts_are_not_judged():
    assert stale_scales(Session(), 16) == ()
    assert unserved_at_scale_one(Session()) == ()
    (found,) = stale_scales(session_of(gradients(1)), 16)
    assert (found.judged, found.clipped, found.possible) == (0, 0, 0)
    with pytest.raises(ValueError, match="0 steps has no maximum"):
        stale_scales(Session(), 0)


def test_layers_that_are_not_operands_are_left_out():
    session = session_of(gradients())
    other = Precision(operands=(OperandRecord("other", "fp8-delayed", "fprop", "input", (32, 32)),))
    assert stale_scales(replace(session, precision=other), 16) == ()


def test_the_report_says_it_only_where_delayed_scaling_was_asked_for():
    def report(recipe: str) -> str:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with Inspector(model, optimizers=optimizer, recipes=recipe) as inspector:
            for scale in (1.0, 1.0, 8.0, 1.0):
                take_step(optimizer, model(torch.ones(4, 32)).square().sum() * scale)
        return str(analyse(inspector.session()))

    text = " ".join(report("fp8-delayed").split())
    words = "With scales from the maximum of 1,024, 16 or 1 earlier steps, gradients of '{0,2}' would have been clipped"
    assert words in text
    assert "by values 8x too large" in text
    assert "1 of 3 samples" in text
    assert "With scales from" not in report("mxfp8")
