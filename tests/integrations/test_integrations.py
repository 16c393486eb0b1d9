"""The common behaviour of all trainers' callbacks; and Accelerate, which works without a callback."""

import sys
from importlib import import_module

import pytest
import torch
from torch import nn
from trainers import LEARNING_RATE, Regressor, loss_of, make_batches, same_weights, train_by_hand

import mpinspect
from mpinspect.ranges.capture.optimizers import plain_optimizer

TRAINERS = {"lightning": ("lightning.pytorch", "pytorch_lightning"), "transformers": ("transformers",)}


@pytest.mark.parametrize("name", TRAINERS)
def test_without_its_package_a_callbacks_error_names_the_extra(name, monkeypatch):
    module = import_module(f"mpinspect.integrations.{name}")
    monkeypatch.delattr(module, "InspectorCallback", raising=False)
    for package in TRAINERS[name]:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"pip install mpinspect\[{name}\]"):
        _ = module.InspectorCallback
    with pytest.raises(AttributeError, match="Callbacks"):
        _ = module.Callbacks


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"every": 0}, ValueError),
        ({"capture": "gradients"}, ValueError),
        ({"loss_scale": -1.0}, ValueError),
        ({"scale": 1.0}, TypeError),
        ({"model": nn.Linear(1, 1)}, TypeError),
    ],
)
def test_wrong_options_are_refused_before_the_training(name, options, error):
    pytest.importorskip(name)
    module = import_module(f"mpinspect.integrations.{name}")
    with pytest.raises(error, match=next(iter(options))):
        module.InspectorCallback(**options)


@pytest.mark.parametrize("name", TRAINERS)
def test_valid_options_are_accepted(name):
    pytest.importorskip(name)
    module = import_module(f"mpinspect.integrations.{name}")
    callback = module.InspectorCallback(every=5, include="net.*", exclude=["head"], watch=False, capture=["update"])
    assert callback.inspector is None
    with pytest.raises(RuntimeError, match="no training was inspected"):
        callback.session()


# -- Accelerate ---------------------------------------------------------------------------------------------------------


def train_with_accelerate(scaler: torch.amp.GradScaler, accumulate: int) -> tuple[Regressor, mpinspect.Inspector, list]:
    """Train with Accelerate; also return, per step, whether Accelerate reports a skipped optimizer step."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    accelerator.scaler = scaler
    model = Regressor()
    plain = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    prepared, optimizer = accelerator.prepare(model, plain)
    assert plain_optimizer(optimizer) is plain
    skipped = []
    with mpinspect.Inspector(model, optimizers=optimizer) as inspector:
        for batch in make_batches():
            with accelerator.accumulate(prepared):
                accelerator.backward(loss_of(prepared.net, batch))
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    skipped.append(accelerator.optimizer_step_was_skipped)
    return model, inspector, skipped


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("init_scale", [2.0**10, 2.0**127])
def test_a_loss_scaler_works_as_accelerates_scaler(accumulate, init_scale):
    ours, torchs, by_hand = (
        make("cpu", init_scale) for make in (mpinspect.LossScaler, torch.amp.GradScaler, torch.amp.GradScaler)
    )
    model, inspector, skipped = train_with_accelerate(ours, accumulate)
    reference, _, torch_skipped = train_with_accelerate(torchs, accumulate)
    expected, loop = train_by_hand(accumulate, by_hand)
    assert same_weights(model, reference)
    assert same_weights(model, loop)
    assert ours.get_scale() == torchs.get_scale() == by_hand.get_scale()
    assert skipped == torch_skipped
    assert ours.skipped_steps == sum(skipped) == inspector.session().progress.skipped_steps
    assert (sum(skipped) > 0) == (init_scale > 2.0**100)
    assert inspector.session().totals() == expected.totals()
    assert inspector.session().progress == expected.progress


def test_accelerate_saves_and_loads_a_loss_scaler(tmp_path):
    accelerate = pytest.importorskip("accelerate")

    def prepare(scaler: mpinspect.LossScaler) -> object:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.scaler = scaler
        model = Regressor()
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
        return accelerator

    first, second = mpinspect.LossScaler("cpu", 2.0**7, hysteresis=2), mpinspect.LossScaler("cpu")
    prepare(first).save_state(str(tmp_path))
    prepare(second).load_state(str(tmp_path))
    assert second.state_dict() == first.state_dict()
    assert second.get_scale() == 2.0**7
