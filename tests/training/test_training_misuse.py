"""Misuse that would go unnoticed: dropped batches, direct optimizer steps, foreign checkpoints."""

import copy
import gc
import pickle
import traceback

import pytest
import torch
from equality import equal
from models import Of
from torch import nn

import mpinspect
from mpinspect.training import (
    CheckpointError,
    LossScaler,
    master_params_to_model_params,
    model_grads_to_master_grads,
    prep_param_lists,
)

SCALED = ["fp16-amp", "fp16-master", "fp16-pure"]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def make(precision: str = "fp16-master", loss_scale=2.0**6, kind=torch.optim.SGD):
    model = network()
    return mpinspect.MixedPrecision(model, kind(model.parameters(), lr=0.125), precision, loss_scale)


def gradients(mp: mpinspect.MixedPrecision, factor: float = 1.0) -> None:
    with mp.autocast():
        loss = nn.functional.mse_loss(mp.model(torch.linspace(-1, 1, 24).reshape(6, 4)), torch.ones(6, 2))
    mp.backward(loss * factor)


# -- a batch that is dropped --------------------------------------------------------------------------------------------


def plain(precision: str) -> dict[str, torch.Tensor]:
    mp = make(precision)
    mp.model.eval()
    gradients(mp)
    assert mp.step()
    return mp.weights()


@pytest.mark.parametrize("precision", SCALED)
def test_a_batch_dropped_after_clipping_leaves_no_trace(precision):
    mp = make(precision)
    mp.model.eval()
    gradients(mp, factor=3.0)
    mp.clip_grad_norm_(1.0)
    mp.zero_grad()
    gradients(mp)
    assert mp.step()
    assert equal(plain(precision), mp.weights())


@pytest.mark.parametrize("precision", SCALED)
def test_the_verdict_on_a_dropped_batch_is_dropped_too(precision):
    mp = make(precision)
    mp.model.eval()
    gradients(mp, factor=float("nan"))
    mp.unscale_()
    mp.zero_grad()
    gradients(mp)
    assert mp.step()
    assert mp.skipped_steps == 0
    assert equal(plain(precision), mp.weights())


@pytest.mark.parametrize("precision", SCALED)
def test_an_overflow_after_a_dropped_nan_is_the_scales_doing(precision):
    mp = make(precision, "dynamic")
    mp.model.eval()
    gradients(mp, factor=float("nan"))
    mp.zero_grad()
    gradients(mp, factor=2.0**20)
    assert mp.step() is False
    assert mp.skips[0].phase == "backward"
    assert mp.loss_scale == 2.0**15


@pytest.mark.parametrize("precision", SCALED)
def test_an_error_inside_a_step_leaves_no_trace(precision):
    mp = make(precision)
    mp.model.eval()
    (optimizer,) = mp.optimizers

    def interrupt(*args):
        raise KeyboardInterrupt

    handle = optimizer.register_step_pre_hook(interrupt)
    gradients(mp)
    with pytest.raises(KeyboardInterrupt):
        mp.step()
    handle.remove()
    mp.zero_grad()
    gradients(mp)
    assert mp.step()
    assert equal(plain(precision), mp.weights())


def test_a_state_loaded_after_unscaling_leaves_no_trace():
    mp = make()
    mp.model.eval()
    state = mp.state_dict()
    gradients(mp)
    mp.unscale_()
    mp.load_state_dict(state)
    mp.model.zero_grad()
    gradients(mp)
    assert mp.step()
    assert equal(plain("fp16-master"), mp.weights())


# -- who steps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [*SCALED, "bf16-master"])
def test_stepping_an_optimizer_directly_raises_an_error(precision):
    mp = make(precision, None)
    (optimizer,) = mp.optimizers
    gradients(mp)
    before = mp.weights()
    with pytest.raises(RuntimeError, match="MixedPrecision's step"):
        optimizer.step()
    assert equal(before, mp.weights())
    mp.detach()
    optimizer.step()


def test_schedulers_may_wrap_the_step():
    mp = make("fp16-amp")
    scheduler = torch.optim.lr_scheduler.StepLR(mp.optimizers[0], 1, 0.5)
    gradients(mp)
    if mp.step():
        scheduler.step()
    assert mp.optimizers[0].param_groups[0]["lr"] == 0.0625


def test_an_optimizer_of_masters_is_not_taken_twice():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = mpinspect.MixedPrecision(model, optimizer)
    with pytest.raises(ValueError, match="FP32 masters of another MixedPrecision"):
        mpinspect.MixedPrecision(model, optimizer, "bf16-master")
    assert first.precision == "fp16-master"
    assert model[0].weight.dtype == torch.float16


def test_an_amp_optimizer_may_go_to_another_mixed_precision():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = mpinspect.MixedPrecision(model, optimizer, "fp16-amp", 1.0)
    second = mpinspect.MixedPrecision(model, optimizer, "fp16-amp", 2.0)
    gradients(second)
    assert second.step()
    assert first.steps == 0


def test_optimizers_that_overlap_are_refused():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for other in (optimizer, torch.optim.Adam(model[0].parameters())):
        with pytest.raises(ValueError, match="same parameters"):
            mpinspect.MixedPrecision(model, [optimizer, other])


def test_one_scaler_serves_one_mixed_precision():
    scaler = LossScaler("cpu")
    first = make(loss_scale=scaler)
    with pytest.raises(ValueError, match="is used by another"):
        make(loss_scale=scaler)
    del first
    gc.collect()
    assert make(loss_scale=scaler).scaler is scaler


def test_gradients_of_a_plain_backward_and_used_ones_are_refused():
    mp = make("fp16-amp")
    gradients(mp)
    assert mp.step()
    before = mp.weights()
    with pytest.raises(RuntimeError, match="since its last step"):
        mp.step()
    mp.zero_grad()
    mp.model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="since its last step"):
        mp.step()
    after = mp.weights()
    assert all(torch.equal(before[name], after[name]) for name in ("0.weight", "2.weight"))


def test_clipping_the_models_gradients_after_unscaling_is_refused():
    mp = make()
    gradients(mp)
    mp.unscale_()
    before = mp.weights()
    nn.utils.clip_grad_norm_(mp.model.parameters(), 1e-9)
    with pytest.raises(RuntimeError, match="clip_grad_norm_"):
        mp.step()
    assert equal(before, mp.weights())


def test_torchs_clipping_of_the_masters_is_ours():
    """The norm and the gradients are equal."""
    ours, theirs = make(), make()
    gradients(ours)
    gradients(theirs)
    norm = ours.clip_grad_norm_(0.01)
    theirs.unscale_()
    assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs.master_parameters(), 0.01))
    assert ours.step()
    assert theirs.step()
    assert equal(ours.weights(), theirs.weights())


# -- a forward outside autocast() ---------------------------------------------------------------------------------------


FORWARDS = {
    "linear": (lambda: nn.Linear(4, 2), torch.ones(3, 4)),
    "convolution": (lambda: nn.Conv1d(4, 2, 1), torch.ones(3, 4, 5)),
    "recurrent": (lambda: nn.LSTM(4, 2), torch.ones(3, 2, 4)),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8), torch.ones(3, 2, 4)),
    "bare weight": (
        lambda: Of(lambda self, x: x @ self.weight, weight=nn.Parameter(torch.ones(4, 2))),
        torch.ones(3, 4),
    ),
}


def said(error: BaseException) -> str:
    """Return the last part of a traceback."""
    return "".join(traceback.format_exception_only(error))


@pytest.mark.parametrize("kind", FORWARDS)
@pytest.mark.parametrize("precision", ["fp16-master", "bf16-master", "fp16-pure"])
def test_a_forward_outside_autocast_is_explained(precision, kind):
    make_layer, x = FORWARDS[kind]
    model = nn.ModuleDict({"parts": nn.ModuleList([make_layer()])})
    layer = model["parts"][0]
    mp = mpinspect.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), precision)
    with torch.no_grad(), pytest.raises((RuntimeError, ValueError)) as caught:
        layer(x)
    assert said(caught.value).count("with precision.autocast()") == 1
    with mp.autocast():
        layer(x)


def test_only_dtype_errors_are_explained_and_only_once():
    mp = make()
    x = torch.ones(6, 4)
    for model in (mp.model, nn.Sequential(mp.model), mp.model.forward):
        with pytest.raises(RuntimeError, match="dtype") as caught:
            model(x)
        assert said(caught.value).count("with precision.autocast()") == 1
    with pytest.raises(RuntimeError) as caught:
        mp.model(torch.ones(6, 3, dtype=torch.float16))
    assert "autocast" not in said(caught.value)
    with mp.autocast(), pytest.raises(RuntimeError) as caught:
        mp.model(torch.ones(6, 3))
    assert "autocast()" not in said(caught.value)
    # Inputs in the weights' dtype raise no error.
    assert mp.model[0](x.half()).dtype == torch.float16
    mp.detach()
    for model in (mp.model, copy.deepcopy(make().model)):
        with pytest.raises(RuntimeError, match="dtype") as caught:
            model(x)
        assert "autocast()" not in said(caught.value)


# -- valid loss scales --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["automatic", "Dynamic", "", "static"])
def test_the_error_for_an_unknown_loss_scale_lists_every_name(given):
    with pytest.raises(ValueError, match=f"loss_scale={given!r}") as caught:
        make(loss_scale=given)
    for name in ("dynamic", "auto", "none", "torch", "talk", "apex"):
        assert f'"{name}"' in str(caught.value)
        make(loss_scale=name)


# -- checkpoints --------------------------------------------------------------------------------------------------------


def test_parameters_outside_the_model_are_saved():
    model, temperature = network(), nn.Parameter(torch.ones(()))
    mp = mpinspect.MixedPrecision(model, torch.optim.SGD([*model.parameters(), temperature], lr=0.1))
    state = mp.state_dict()
    with torch.no_grad():
        temperature.fill_(9.0)
    mp.load_state_dict(state)
    assert temperature.item() == 1.0
    with pytest.raises(CheckpointError, match="not the model's"):
        make().load_state_dict({**state, "optimizers": make().state_dict()["optimizers"]})


@pytest.mark.parametrize(("there", "here"), [(torch.optim.SGD, torch.optim.Adam), (torch.optim.Adam, torch.optim.SGD)])
def test_a_checkpoint_of_another_kind_of_optimizer_is_refused(there, here):
    state = make(kind=there).state_dict()
    target = make(kind=here)
    before = target.weights()
    with pytest.raises(CheckpointError, match="another kind of optimizer"):
        target.load_state_dict(state)
    assert equal(before, target.weights())


def test_parameters_in_another_order_are_refused():
    model = network()
    mp = mpinspect.MixedPrecision(model, torch.optim.Adam(reversed(list(model.parameters()))), "fp16-amp", 1.0)
    gradients(mp)
    mp.step()
    with pytest.raises(CheckpointError, match="another order"):
        make("fp16-amp", kind=torch.optim.Adam).load_state_dict(mp.state_dict())


@pytest.mark.parametrize(
    "damage",
    [
        {"scaler": {"scale": "large"}},
        {"counters": {}},
        {"optimizers": [{"x": 1}]},
        {"optimizers": None},
        {"precision": ["fp32"]},
        {"weights": None},
        {"others": None},
    ],
    ids=str,
)
def test_a_damaged_checkpoint_changes_no_state(damage):
    state = make().state_dict()
    target = make("fp16-master")
    gradients(target)
    target.step()
    before, steps, scale = target.weights(), target.steps, target.loss_scale
    with pytest.raises(CheckpointError):
        target.load_state_dict({**state, **damage})
    assert equal(before, target.weights())
    assert (target.steps, target.loss_scale) == (steps, scale)


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        self.seen = state["seen"]


@pytest.mark.parametrize("precision", ["fp32", "fp16-master"])
def test_modules_may_have_extra_state(precision, tmp_path):
    model = Extra(4, 2)
    mp = mpinspect.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), precision)
    mp.save(tmp_path / "c.pt")
    mp.load(tmp_path / "c.pt")
    assert model.seen == 3


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no directory .*missing"):
        make().save(tmp_path / "missing" / "c.pt")


def test_mixed_precision_itself_is_not_copied():
    mp = make()
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(mp)
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(mp)


# -- the rest -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16-amp", "fp16-master"])
def test_lazy_and_complex_models_are_refused(precision):
    lazy = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="lazy"):
        mpinspect.MixedPrecision(lazy, torch.optim.SGD(lazy[1].parameters(), lr=0.1), precision)
    model = nn.Linear(2, 2)
    model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="complex"):
        mpinspect.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), precision, 8.0)
    assert model.weight.dtype == torch.float32


@pytest.mark.parametrize(("device", "error"), [(16.0, TypeError), ("banana", ValueError)])
def test_a_scale_in_the_devices_place_is_refused(device, error):
    with pytest.raises(error, match="device is"):
        LossScaler(device)


def test_a_forgotten_flat_master_is_named():
    params, masters = prep_param_lists(nn.Linear(2, 2).half(), flat_master=True)
    with pytest.raises(ValueError, match="flat_master=True"):
        model_grads_to_master_grads(params, masters)
    with pytest.raises(ValueError, match="flat_master=True"):
        master_params_to_model_params(params, masters)


def test_an_auto_scale_that_is_dropped_listens_no_more():
    scale = torch.amp.GradScaler.scale
    mp = make("fp16-amp", "auto")
    gradients(mp)
    mp.step()
    assert "inspected for 24 more steps" in str(mp)
    assert torch.amp.GradScaler.scale is not scale
    del mp
    gc.collect()
    assert torch.amp.GradScaler.scale is scale


def test_detach_removes_every_hook():
    mp = make("fp16-amp", "auto")
    mp.detach()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in mp.model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in mp.model.parameters())
    gradients(mp)
    mp.step()
    assert mp.steps == 1
