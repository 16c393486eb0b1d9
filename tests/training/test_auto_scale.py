"""loss_scale="auto": inspects a block of steps and sets the scale from it, without affecting the training."""

import logging
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from equality import equal
from models import Of
from torch import nn
from trainings import mixed_step

from mpinspect import LossScaler, MixedPrecision
from mpinspect.demo.demo import LEARNING_RATE, stdlib_tokens, word_loss, word_model
from mpinspect.ranges.capture import optimizer_steps
from mpinspect.ranges.capture import scalers as scaler_watch
from mpinspect.ranges.inspector import Inspector
from mpinspect.training import LossScaleCollapsedError
from mpinspect.training.auto_scale import BLOCK, AutoScale

PRECISIONS = ["fp16-amp", "fp16-master"]
#: Makes the gradients of `network` too small for FP16 at scale 1.
SMALL = 2.0**-14


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def make(precision: str = "fp16-amp", loss_scale: object = "auto", growth_interval: int = 2000) -> MixedPrecision:
    model = network()
    mp = MixedPrecision(model, torch.optim.Adam(model.parameters(), lr=0.01), precision, loss_scale)
    if mp.scaler.is_enabled():
        mp.scaler.set_growth_interval(growth_interval)
    return mp


def batches(seed: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(32, 8, generator=generator), torch.randn(32, 4, generator=generator)


def train(
    mp: MixedPrecision,
    data: Iterator[tuple[torch.Tensor, torch.Tensor]],
    steps: int,
    times: float = SMALL,
    before_step: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Train on the loss times ``times``. Returns the scale of each step."""
    scales = []
    for step in range(steps):
        before_step(step)
        scales.append(mp.loss_scale)
        x, y = next(data)
        mixed_step(mp, lambda x=x, y=y: nn.functional.mse_loss(mp.model(x).float(), y) * times)
    return scales


# -- the demo's model ---------------------------------------------------------------------------------------------------


def test_the_demos_model_trains_as_in_fp32():
    """A model that needs scaling: at scale 1 its losses are off by 2e-3 of themselves within these steps."""
    corpus = stdlib_tokens(30_000)

    def losses(precision: str, loss_scale: str | None) -> tuple[list[float], MixedPrecision]:
        model = word_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        mp = MixedPrecision(model, optimizer, precision, loss_scale)
        generator = torch.Generator().manual_seed(0)
        found = []
        for _ in range(52):
            found.append(mixed_step(mp, lambda: word_loss(mp.model, corpus.batch(generator, 1024))).item())
        return found, mp

    exact, _ = losses("fp32", None)
    scaled, mp = losses("fp16-amp", "auto")
    assert mp.skipped_steps == 0
    lowest, highest = mp.scaler.window
    assert 1.0 < lowest <= mp.loss_scale <= highest < 2.0**24
    assert exact[-1] < 0.6 * exact[0]
    assert max(abs(there - here) / there for there, here in zip(exact, scaled, strict=True)) < 2e-4


# -- the block ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_scale_moves_into_the_window_when_the_block_is_over(precision):
    mp = make(precision)
    data = batches()
    assert train(mp, data, BLOCK) == [2.0**16] * BLOCK
    lowest, highest = mp.scaler.window
    assert lowest < mp.loss_scale < highest
    assert mp.scaler.rules.ceiling == highest
    after = mp.loss_scale
    assert train(mp, data, 30) == [after] * 30
    assert mp.skipped_steps == 0


def test_the_recommendation_equals_an_inspectors():
    mp = make(loss_scale=2.0**16)
    with Inspector(mp.model, optimizers=mp.optimizers, scalers=mp.scaler) as inspector:
        train(mp, batches(), BLOCK)
    advice = inspector.report().loss_scale
    auto = make()
    train(auto, batches(), BLOCK)
    assert advice.recommended == auto.loss_scale
    assert (advice.lowest, advice.highest) == auto.scaler.window


@pytest.mark.parametrize("precision", PRECISIONS)
def test_training_is_bit_identical_to_the_same_scales_without_the_inspector(precision):
    mp = make(precision)
    scales = train(mp, batches(), 60)
    plain = make(precision, LossScaler("cpu"))
    train(plain, batches(), 60, before_step=lambda step: plain.scaler.update(scales[step]) if step else None)
    assert len(set(scales)) == 2
    assert equal(mp.weights(), plain.weights())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_inspector_is_removed_after_the_block(precision):
    original = (torch.amp.GradScaler.step, LossScaler.step, torch.optim.Adam.step)
    mp, plain = make(precision), make(precision, 2.0**10)
    assert any(module._forward_hooks for module in mp.model.modules())
    data = batches()
    train(mp, data, BLOCK)
    for here, there in zip(mp.model.modules(), plain.model.modules(), strict=True):
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            assert len(getattr(here, hooks)) == len(getattr(there, hooks)), hooks
    for here, there in zip(mp.model.parameters(), plain.model.parameters(), strict=True):
        assert not here._backward_hooks
        assert len(here._post_accumulate_grad_hooks) == len(there._post_accumulate_grad_hooks)
    assert not scaler_watch._listeners
    assert not optimizer_steps._listeners
    assert (torch.amp.GradScaler.step, LossScaler.step, torch.optim.Adam.step) == original


def test_a_model_that_needs_no_scaling_gets_scale_one_and_room_to_move():
    mp = make()
    train(mp, batches(), 60, times=1.0)
    assert mp.loss_scale == 1.0
    lowest, highest = mp.scaler.window
    assert lowest <= 1.0 < highest
    assert mp.skipped_steps == 0


def test_overflows_within_the_block_lower_the_scale_and_count():
    """Gradients reach about 2^10, so scale 2^16 overflows and must not be recommended."""
    mp = make()
    scales = train(mp, batches(), BLOCK, times=2.0**10)
    assert 0 < mp.skipped_steps < BLOCK
    assert mp.scaler.window[1] < 2.0**16
    assert mp.loss_scale <= min(scales)
    skipped = mp.skipped_steps
    train(mp, batches(), 30, times=2.0**10)
    assert mp.skipped_steps == skipped


def test_without_advice_the_scale_stays_dynamic(caplog):
    mp = make()
    with caplog.at_level(logging.INFO, "mpinspect.training"):
        train(mp, batches(), BLOCK, times=0.0)
    assert mp.scaler.window is None
    assert mp.scaler.rules.ceiling is None
    assert mp.loss_scale == 2.0**16
    assert "no loss scale could be recommended" in caplog.text
    train(mp, batches(), 5)
    assert mp.skipped_steps == 0


def test_a_fault_of_the_inspection_does_not_reach_the_training(monkeypatch, caplog):
    def out_of_order(self: Inspector) -> None:
        raise ZeroDivisionError("out of order")

    monkeypatch.setattr(Inspector, "report", out_of_order)
    mp = make()
    with caplog.at_level(logging.WARNING, "mpinspect.training"):
        train(mp, batches(), 30)
    assert "out of order" in caplog.text
    assert (mp.loss_scale, mp.skipped_steps, mp.scaler.window) == (2.0**16, 0, None)


def test_layers_that_no_scale_serves_get_the_largest_that_does_not_overflow():
    # Weight gradients of 2^8 and of 2^-36.
    model = Of(
        lambda self, x: self.large(x).float() * 2.0**8 + self.small(x).float() * 2.0**-36,
        large=nn.Linear(1, 1, bias=False),
        small=nn.Linear(1, 1, bias=False),
    )
    mp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=2.0**-20), "fp16-amp", "auto")
    for _ in range(BLOCK + 5):
        mixed_step(mp, lambda: mp.model(torch.ones(1, 1)).sum())
    lowest, highest = mp.scaler.window
    # 2^8 * 2^7 is the last power of two below 65520. One power is reserved, since only the exponents of peaks are known.
    assert lowest == highest == mp.loss_scale == 2.0**6


# -- later --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_that_outgrow_the_window_are_followed(precision):
    """A jump by 2^32, more than the window is wide: the scale falls out of it, and a new window is found."""
    mp = make(precision)
    data = batches()
    train(mp, data, 30)
    lowest, highest = mp.scaler.window
    assert highest / lowest < 2.0**32
    train(mp, data, 60, times=SMALL * 2.0**32)
    new_lowest, new_highest = mp.scaler.window
    assert new_highest < lowest
    assert new_lowest <= mp.loss_scale <= new_highest
    skipped = mp.skipped_steps
    assert 0 < skipped < 30
    train(mp, data, 30, times=SMALL * 2.0**32)
    assert mp.skipped_steps == skipped


def test_gradients_that_shrink_are_followed_once_every_growth_interval():
    mp = make(growth_interval=40)
    data = batches()
    train(mp, data, BLOCK)
    window = mp.scaler.window
    train(mp, data, 40, times=SMALL * 2.0**-8)
    assert mp.scaler.window == window
    train(mp, data, BLOCK, times=SMALL * 2.0**-8)
    moved = [math.log2(after / before) for before, after in zip(window, mp.scaler.window, strict=True)]
    # 2^8, with a tolerance for the progress of training.
    assert all(7 <= powers <= 11 for powers in moved)
    assert mp.scaler.window[0] <= mp.loss_scale <= mp.scaler.window[1]
    assert mp.skipped_steps == 0


def test_gradients_that_always_overflow_are_still_a_collapse():
    mp = make()
    data = batches()
    train(mp, data, 30)
    mp.model[2].register_full_backward_hook(lambda module, at_input, at_output: (at_input[0] * math.inf,))
    with pytest.raises(LossScaleCollapsedError, match=r"0\.(weight|bias)"):
        train(mp, data, 100)
    assert mp.loss_scale == 2.0**-16


def test_incomplete_captures_do_not_change_the_scale(caplog):
    """After torch.compile, new module hooks do not fire. A block that captures fewer gradients must not change the scale."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = LossScaler("cpu", growth_interval=5)
    mp = MixedPrecision(model, optimizer, "fp16-amp", scaler)
    auto = AutoScale(model, [optimizer], scaler, block=3)
    data = batches()

    def steps(count: int) -> None:
        for _ in range(count):
            train(mp, data, 1)
            auto.step_ended(skipped=False)

    steps(3)
    window = scaler.window
    assert window is not None
    steps(5)
    assert auto.steps_to_wait == 0
    model[2].weight.requires_grad_(False)
    with caplog.at_level(logging.INFO, "mpinspect.training"):
        steps(3)
    assert "fewer gradients" in caplog.text
    assert scaler.window == window
    assert auto.steps_to_wait == 5


@pytest.mark.parametrize("precision", PRECISIONS)
def test_stop_and_resume_between_blocks_is_bit_identical(precision, tmp_path):
    straight, stopped = make(precision, growth_interval=20), make(precision, growth_interval=20)
    data = batches()
    train(straight, data, 80)
    data = batches()
    train(stopped, data, 32)
    stopped.save(tmp_path / "checkpoint.pt")
    resumed = make(precision, growth_interval=20)
    resumed.load(tmp_path / "checkpoint.pt")
    train(resumed, data, 48)
    assert straight.loss_scale == resumed.loss_scale
    assert straight.scaler.window == resumed.scaler.window
    assert equal(straight.weights(), resumed.weights())


def test_a_block_that_was_interrupted_begins_again():
    stopped = make()
    data = batches()
    train(stopped, data, 10)
    resumed = make()
    resumed.load_state_dict(stopped.state_dict())
    train(resumed, data, BLOCK - 1)
    assert resumed.scaler.window is None
    train(resumed, data, 1)
    assert resumed.scaler.window is not None
