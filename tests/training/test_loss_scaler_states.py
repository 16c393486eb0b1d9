"""Conversion between state dicts of LossScaler, GradScaler and apex.amp; pickles and copies."""

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from mpinspect.training.loss_scaler import LossScaleCollapsedError, LossScaler
from mpinspect.training.skipped_steps import NonFinite, SkippedStep

Scaler = torch.amp.GradScaler


def train(scaler: Scaler, overflows: list[bool], fused: bool = False) -> list[float]:
    """Return the scale after each step."""
    scales = []
    for overflow in overflows:
        weight = torch.ones((), requires_grad=True)
        scaler.scale(weight * 1.0).backward()
        weight.grad.fill_(math.inf if overflow else 1.0)
        scaler.step(torch.optim.SGD([weight], lr=0.0, fused=fused))
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


PLAN = [False, False, True, False, True, True, False, False, False, False, True, False]


def full() -> LossScaler:
    """Return a scaler without default settings, after some steps."""
    scaler = LossScaler(
        "cpu",
        2.0**10,
        growth_factor=4.0,
        backoff_factor=0.25,
        growth_interval=3,
        floor=2.0**2,
        ceiling=2.0**15,
        hysteresis=2,
        tolerance=0.25,
        forward_nonfinite="hold",
        window=(2.0**3, 2.0**12),
    )
    train(scaler, [False, True, True, False, True])
    return scaler


def everything(scaler: LossScaler) -> tuple[Any, ...]:
    return (
        *(scaler.rules, scaler._state, scaler.get_scale(), scaler._get_growth_tracker()),
        *(scaler.steps, scaler.skipped_steps, scaler.forward_nonfinite, scaler.window),
    )


def test_every_field_survives() -> None:
    saved = full()
    for started in (False, True):
        loaded = LossScaler("cpu")
        if started:
            train(loaded, [False])
        loaded.load_state_dict(saved.state_dict())
        assert everything(loaded) == everything(saved)
        assert loaded.state_dict() == saved.state_dict()
        twin = copy.deepcopy(saved)
        assert train(loaded, PLAN) == train(twin, PLAN)


def test_a_state_dict_is_plain_data() -> None:
    """torch.load reads it with weights_only, without mpinspect."""
    state = full().state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state
    assert list(state) == [
        "scale",
        "growth_factor",
        "backoff_factor",
        "growth_interval",
        "_growth_tracker",
        "mpinspect",
    ]
    assert set(map(type, state.values())) == {float, int, dict}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_states_convert_to_grad_scaler_and_back(started: bool, fused: bool) -> None:
    """At any step, either scaler can replace the other without changing later decisions."""
    alone = train(Scaler("cpu", growth_interval=3), PLAN, fused)
    for cut in (1, 3, 6, 11):
        for first, second in ((Scaler, LossScaler), (LossScaler, Scaler), (LossScaler, LossScaler)):
            before, after = first("cpu", growth_interval=3), second("cpu", 8.0)
            if started:
                train(after, [False, True], fused)
            scales = train(before, PLAN[:cut], fused)
            after.load_state_dict(before.state_dict())
            assert scales + train(after, PLAN[cut:], fused) == alone


def test_a_static_scale_stays_static_in_grad_scaler() -> None:
    stock = Scaler("cpu")
    stock.load_state_dict(LossScaler.static(128.0, device="cpu", growth_interval=2).state_dict())
    assert train(stock, PLAN) == [128.0] * len(PLAN)
    back = LossScaler("cpu")
    back.load_state_dict(stock.state_dict())
    assert back.is_static


def test_grad_scalers_state_does_not_change_the_other_rules() -> None:
    scaler = full()
    scaler.load_state_dict(Scaler("cpu", 2.0**20, growth_interval=7).state_dict())
    assert scaler.rules == full().rules.with_torchs(2.0, 0.5, 7)
    # 2^20 is above the ceiling.
    assert scaler.get_scale() == 2.0**15
    assert (scaler.forward_nonfinite, scaler.window) == ("hold", (8.0, 4096.0))
    assert (scaler.steps, scaler.skipped_steps) == (0, 0)


def apex(**scales: tuple[float, int]) -> dict[str, Any]:
    """As apex.amp.state_dict() writes it."""
    return {name: {"loss_scale": scale, "unskipped": unskipped} for name, (scale, unskipped) in scales.items()}


def test_apexs_state() -> None:
    state = apex(loss_scaler0=(2.0**12, 1), loss_scaler1=(2.0**5, 2))
    for loss_id, scale in ((0, 2.0**12), (1, 2.0**5)):
        scaler = LossScaler("cpu", growth_interval=3)
        scaler.load_state_dict(state, loss_id=loss_id)
        assert (scaler.get_scale(), scaler._get_growth_tracker()) == (scale, loss_id + 1)
        assert scaler.to_apex_state_dict(loss_id) == {f"loss_scaler{loss_id}": state[f"loss_scaler{loss_id}"]}
        assert train(scaler, [False, False])[loss_id == 0] == scale * 2
    with pytest.raises(ValueError, match="no loss_id 2: there are loss_scaler0, loss_scaler1"):
        LossScaler("cpu").load_state_dict(state, loss_id=2)


def test_apexs_count_beyond_this_growth_interval() -> None:
    """apex's window is 2000; torch's tracker would have passed an interval of 10 for good."""
    scaler = LossScaler("cpu", growth_interval=10)
    scaler.load_state_dict(apex(loss_scaler0=(8.0, 1500)))
    assert train(scaler, [False]) == [16.0]


def test_steps_that_only_the_device_knows_are_saved_too() -> None:
    scaler = LossScaler("cpu", growth_interval=3)
    train(scaler, PLAN, fused=True)
    assert len(scaler._unread) == len(PLAN)
    state = scaler.state_dict()
    assert (state["mpinspect"]["steps"], state["mpinspect"]["skipped_steps"]) == (12, 4)
    assert (state["scale"], state["_growth_tracker"]) == (scaler.get_scale(), scaler._get_growth_tracker())


def own(**changes: Any) -> dict[str, Any]:
    state = full().state_dict()
    return {**state, "mpinspect": {**state["mpinspect"], **changes}}


def torchs(**changes: Any) -> dict[str, Any]:
    return {**Scaler("cpu").state_dict(), **changes}


MODEL = nn.Linear(2, 2)
REFUSED: dict[str, tuple[Any, str]] = {
    "a model's": (MODEL.state_dict(), "not a loss scaler's state dict: it looks like a model's"),
    "an optimizer's": (torch.optim.SGD(MODEL.parameters()).state_dict(), "it looks like an optimizer's"),
    "a checkpoint": ({"model": {}, "scaler": torchs()}, "looks like a whole checkpoint; .* is its entry 'scaler'"),
    "apex's checkpoint": ({"model": {}, "amp": apex(loss_scaler0=(8.0, 0))}, "whole checkpoint; .* is its entry 'amp'"),
    "DeepSpeed's": (
        {"cur_scale": 8.0, "cur_iter": 3},
        "it looks like an FP16 optimizer's of DeepSpeed, Megatron or apex",
    ),
    "half of it": (
        {"scale": 8.0, "growth_factor": 2.0},
        "GradScaler's without backoff_factor, growth_interval, _growth",
    ),
    "something": ({"a": 1, "b": "x"}, "its entries are a, b"),
    "None": (None, "it is NoneType, not a dict"),
    "a scaler": (Scaler("cpu"), "it is GradScaler, not a dict"),
    "scale 0": (torchs(scale=0.0), "the saved loss scale is 0.0: that run had collapsed before it was saved"),
    "scale nan": (torchs(scale=math.nan), "the saved loss scale is nan: that run had collapsed"),
    "scale inf": (torchs(scale=math.inf), "the saved loss scale is inf"),
    "scale subnormal": (torchs(scale=1e-42), "scale is 1e-42: a loss scale must be finite"),
    "scale text": (torchs(scale="8"), "the state dict's 'scale' is str, not a number"),
    "factor": (torchs(growth_factor=0.5), "growth_factor is 0.5: it must be 1 or more"),
    "backoff": (torchs(backoff_factor=None), "'backoff_factor' is NoneType, not a number"),
    "interval": (torchs(growth_interval=0), "growth_interval is 0: it must be a whole number"),
    "tracker": (torchs(_growth_tracker=-1), "'_growth_tracker' is -1, not a count of steps"),
    "newer": (own(version=2), "written by a newer mpinspect .version 2 of its entry 'mpinspect', this one reads 1"),
    "no version": ({**torchs(), "mpinspect": {}}, "entry 'mpinspect' has no version"),
    "lacking": (
        {**torchs(), "mpinspect": {"version": 1, "floor": None}},
        "'mpinspect' lacks ceiling, forward_nonfinite",
    ),
    "floor": (own(floor=-1.0), "floor is -1.0: a loss scale must be finite"),
    "mode": (own(forward_nonfinite="never"), "forward_nonfinite is 'never'"),
    "steps": (own(steps=1.5), "'steps' is 1.5, not a count of steps"),
    "window": (own(window=[8.0, 4.0]), "lowest scale 8 is above its highest"),
    "apex lacking": ({"loss_scaler0": {"loss_scale": 8.0}}, "'loss_scaler0' has no 'loss_scale' and 'unskipped'"),
    "apex zero": (apex(loss_scaler0=(0.0, 1)), "the saved loss scale is 0.0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_states_are_refused(name: str) -> None:
    state, words = REFUSED[name]
    scaler = full()
    before = everything(scaler), dict(vars(scaler))
    with pytest.raises(ValueError, match=words):
        scaler.load_state_dict(state)
    assert (everything(scaler), dict(vars(scaler))) == before


def test_an_empty_state_and_disabled_scalers() -> None:
    """As in GradScaler, a disabled scaler saves {}, which enabled ones refuse, and accepts any state."""
    disabled, scaler = LossScaler("cpu", enabled=False), full()
    assert disabled.state_dict() == disabled.to_apex_state_dict() == Scaler("cpu", enabled=False).state_dict() == {}
    before = everything(scaler)
    with pytest.raises(RuntimeError, match="source state dict is empty, possibly because it was saved from a disabled"):
        scaler.load_state_dict(disabled.state_dict())
    assert everything(scaler) == before
    for anything in (scaler.state_dict(), {}, None):
        disabled.load_state_dict(anything)
    assert disabled.get_scale() == 1.0
    assert pickle.loads(pickle.dumps(disabled)).state_dict() == copy.deepcopy(disabled).state_dict() == {}


class Knows:
    def gradient(self, optimizer: torch.optim.Optimizer) -> NonFinite:
        return NonFinite("head", "head.weight", "inf")

    def forward(self) -> None:
        return None

    def step_ended(self, *, forward_finite: bool) -> None:
        return None


@pytest.mark.parametrize("fused", [False, True])
def test_pickles_and_copies(fused: bool) -> None:
    scaler = full()
    scaler.explainer = Knows()
    scaler.process_group = False
    train(scaler, [False, True], fused)
    for copied in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler), copy.copy(scaler)):
        assert everything(copied) == everything(scaler)
        assert list(copied.skips) == list(scaler.skips)
        assert copied.skips[-1].culprit == NonFinite("head", "head.weight", "inf")
        # The copy has no explainer, which belongs to a model.
        assert copied.explainer is None
        assert copied.process_group is False
        assert copied.last_step_skipped is True
        assert copied.found_inf.item() == 1.0
    twin, alone = copy.deepcopy(scaler), copy.deepcopy(scaler)
    assert train(twin, PLAN) == train(alone, PLAN)
    assert scaler.steps == 7


def test_copies_are_made_between_iterations_only() -> None:
    scaler = LossScaler("cpu")
    weight = torch.ones((), requires_grad=True)
    scaler.scale(weight * 1.0).backward()
    scaler.unscale_(torch.optim.SGD([weight], lr=1.0))
    with pytest.raises(AssertionError, match="may only be pickled at the beginning of an iteration, or at the end"):
        pickle.dumps(scaler)


def test_the_collapse_is_pickled_with_its_words() -> None:
    error = LossScaleCollapsedError(SkippedStep(3, "backward", 2.0, 2.0, NonFinite("head", "head.weight", "nan")))
    copied = pickle.loads(pickle.dumps(error))
    assert str(copied) == str(error)
    assert copied.skipped == error.skipped
    assert "A NaN is often not an overflow" in str(error)
    unknown = LossScaleCollapsedError(SkippedStep(3, "backward", 2.0, 2.0))
    assert str(unknown).endswith("Run the layers that overflow in FP32 or BF16, clip its values, or lower the floor.")
