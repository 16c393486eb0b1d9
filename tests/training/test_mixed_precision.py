"""MixedPrecision: every precision trains, resumes, explains skipped steps and refuses unsupported input."""

import copy
import logging
import pickle
import warnings

import pytest
import torch
from equality import equal
from models import Of, Times
from torch import nn

import mpinspect
from mpinspect.training import PRECISIONS, CheckpointError, LossScaleCollapsedError, LossScaleWarning

EVERY = sorted(name for name, each in PRECISIONS.items() if not each.recipe)  # test_narrow.py has the others
SCALED = ["fp16-amp", "fp16-master", "fp16-pure"]
WITH_MASTERS = ["fp16-master", "bf16-master"]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))


def batches(count: int, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(32, 8, generator=generator), torch.randint(4, (32,), generator=generator)) for _ in range(count)
    ]


def loss_of(mp: mpinspect.MixedPrecision, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with mp.autocast():
        return nn.functional.cross_entropy(mp.model(x), y)


def train(mp: mpinspect.MixedPrecision, data, clip: float | None = None) -> list[float]:
    losses = []
    for x, y in data:
        mp.zero_grad()
        loss = loss_of(mp, x, y)
        mp.backward(loss)
        if clip:
            mp.clip_grad_norm_(clip)
        mp.step()
        losses.append(loss.item())
    return losses


def make(precision: str, loss_scale=None, optimizer=torch.optim.Adam, seed: int = 0, **options):
    model = network(seed)
    if optimizer is torch.optim.Adam:
        # FP16 weights have FP16 state, in which Adam's default eps of 1e-8 rounds to 0: a gradient of 0 would give 0/0.
        options.setdefault("eps", 1e-4)
    return mpinspect.MixedPrecision(model, optimizer(model.parameters(), lr=0.01, **options), precision, loss_scale)


# -- training -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", EVERY)
def test_every_precision_learns(precision):
    mp = make(precision)
    losses = train(mp, batches(1) * 60)
    assert losses[-1] < losses[0] / 2
    assert mp.steps == 60
    assert mp.skipped_steps == 0
    assert mp.precision == precision


def test_fp32_is_the_plain_loop_bit_for_bit():
    mp = make("fp32")
    torch.manual_seed(5)
    losses = train(mp, batches(20), clip=0.5)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4)
    torch.manual_seed(5)
    for (x, y), expected in zip(batches(20), losses, strict=True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert loss.item() == expected
    assert equal(model.state_dict(), mp.model.state_dict())


def test_fp16_amp_is_autocast_with_a_grad_scaler_bit_for_bit():
    mp = make("fp16-amp")
    torch.manual_seed(5)
    train(mp, batches(20), clip=0.5)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4)
    scaler = torch.amp.GradScaler("cpu")
    torch.manual_seed(5)
    for x, y in batches(20):
        optimizer.zero_grad()
        with mpinspect.half_arithmetic():
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    assert equal(model.state_dict(), mp.model.state_dict())


@pytest.mark.parametrize("precision", WITH_MASTERS)
def test_the_model_holds_the_masters_rounded(precision):
    mp = make(precision)
    train(mp, batches(5))
    masters = mp.master_parameters()
    for parameter, master in zip(mp.model.parameters(), masters, strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(parameter, master.to(parameter.dtype))
    assert mp.model[0].weight.dtype == PRECISIONS[precision].stored
    assert mp.model[1].weight.dtype == mp.model[1].running_var.dtype == torch.float32


@pytest.mark.parametrize("precision", EVERY)
def test_accumulation_over_micro_batches_is_the_whole_batch(precision):
    """A model of integers and powers of two, whose sums are exact in FP16 too."""

    def trained(parts: int) -> dict[str, torch.Tensor]:
        model = nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.arange(16.0).reshape(4, 4) / 16)
        scale = 128.0 if precision in SCALED else None
        mp = mpinspect.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=2.0**-6), precision, scale)
        for step in range(3):
            x = torch.tensor([[1.0, 0, 2, 1], [2, 1, 0, 1], [0, 1, 1, 2], [1, 1, 0, 0]]).roll(step, 0)
            mp.zero_grad()
            for part in x.chunk(parts):
                with mp.autocast():
                    loss = mp.model(part).sum() / 4
                mp.backward(loss)
            assert mp.step()
        return mp.weights()

    assert equal(trained(1), trained(4))


@pytest.mark.parametrize("precision", EVERY)
def test_lbfgs_and_closures(precision):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    mp = mpinspect.MixedPrecision(model, optimizer, precision, 128.0 if precision in SCALED else None)
    x, y = torch.randn(16, 4), torch.randn(16, 1)

    def closure() -> torch.Tensor:
        mp.zero_grad()
        with mp.autocast():
            loss = nn.functional.mse_loss(mp.model(x), y)
        mp.backward(loss)
        return loss

    first = closure().item()
    mp.zero_grad()
    for _ in range(5):
        assert mp.step(closure)
    assert closure().item() < first


def test_several_optimizers_step_together():
    model = network()
    optimizers = [
        torch.optim.SGD(model[0].parameters(), lr=0.1),
        torch.optim.Adam([*model[1].parameters(), *model[4].parameters()]),
    ]
    mp = mpinspect.MixedPrecision(model, optimizers, "fp16-master")
    losses = train(mp, batches(1) * 30)
    assert losses[-1] < losses[0]


def test_fused_optimizers_are_skipped_on_the_device():
    mp = make("fp16-master", loss_scale=2.0**10, fused=True)
    before = mp.weights()
    mp.zero_grad()
    mp.backward(loss_of(mp, *batches(1)[0]) * 1e30)
    assert mp.step() is False
    after = mp.weights()
    assert all(torch.equal(before[name], after[name]) for name in before if "running" not in name and "num" not in name)
    assert mp.skipped_steps == 1


def test_parameters_added_later_get_masters():
    model = network()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    mp = mpinspect.MixedPrecision(model, optimizer, "fp16-master")
    train(mp, batches(2))
    optimizer.add_param_group({"params": list(model[4].parameters())})
    before = model[4].weight.clone()
    train(mp, batches(2))
    assert optimizer.param_groups[1]["params"][0].dtype == torch.float32
    assert not torch.equal(before, model[4].weight)


def test_writes_to_the_models_weights_reach_the_masters():
    """For example a GAN's weight clipping. Unchanged weights must not lose their masters' lower bits."""
    mp = make("fp16-master", 128.0)
    train(mp, batches(3))
    before = mp.weights()["0.weight"]
    with torch.no_grad():
        mp.model[0].weight.clamp_(-0.125, 0.125)
    mp.zero_grad()
    mp.backward(loss_of(mp, *batches(1)[0]) * 0)
    (optimizer,) = mp.optimizers
    optimizer.param_groups[0]["lr"] = 0.0
    mp.step()
    after = mp.weights()["0.weight"]
    inside = before.half().abs() <= 0.125
    assert 0 < inside.sum() < inside.numel()
    assert torch.equal(after[inside], before[inside])
    assert torch.equal(after[~inside], before[~inside].clamp(-0.125, 0.125))


@pytest.mark.parametrize("precision", WITH_MASTERS)
def test_half_logits_are_saved_without_an_fp32_copy(precision):
    """Their FP32 log-softmax would be the largest saved tensor of a small language model."""
    mp = make(precision)
    x, y = batches(1)[0]
    kept = []
    with mp.autocast():
        logits = mp.model(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t.detach(), lambda t: t):
            loss = nn.functional.cross_entropy(logits, y)
    assert loss.dtype == torch.float32
    assert {t.dtype for t in kept if t.is_floating_point()} == {PRECISIONS[precision].compute}


# -- messages -----------------------------------------------------------------------------------------------------------


class Overflows(nn.Module):
    """Five linear layers. The one at index 3 has inputs, and so weight gradients, 2^10 times the others'."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = Times.apply(layer(Times.apply(x, 2.0**10, 1.0)), 2.0**-10, 1.0) if index == 3 else layer(x)
        return x


@pytest.mark.parametrize("precision", SCALED)
def test_the_layer_that_overflows_is_named(precision):
    model = Overflows()
    mp = mpinspect.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1e-6), precision, 2.0**16)
    x = torch.ones(8, 4)
    with mp.autocast():
        loss = mp.model(x).float().pow(2).mean() / 2**4
    mp.backward(loss)
    assert mp.step() is False
    (skip,) = mp.skips
    assert skip.phase == "backward"
    assert skip.culprit.layer == "layers.3"
    assert "layers.3" in str(skip)
    assert "layers.3" in str(mp)


def test_a_forward_that_turns_nan_leaves_the_scale_and_names_the_module():
    model = Of(
        lambda self, x: self.last(self.broken(self.first(x))),
        first=nn.Linear(8, 8),
        broken=nn.Tanh(),
        last=nn.Linear(8, 4),
        on=False,
    )
    model.broken.register_forward_hook(lambda module, inputs, output: output * float("nan") if model.on else None)
    mp = mpinspect.MixedPrecision(model, torch.optim.Adam(model.parameters()), "fp16-amp", "dynamic")
    train(mp, batches(3))
    scale, weights = mp.loss_scale, mp.weights()
    model.on = True
    with pytest.warns(LossScaleWarning) as caught:
        train(mp, batches(40))
    assert mp.loss_scale == scale
    assert equal(weights, mp.weights())
    assert mp.skipped_steps == 40
    assert [skip.phase for skip in mp.skips] == ["forward"] * 40
    assert mp.skips[-1].culprit.layer == "broken"
    assert any("'broken'" in str(warning.message) for warning in caught)
    assert len(caught) == 2
    model.on = False
    train(mp, batches(3))
    assert mp.skipped_steps == 40


def test_a_poisoned_weight_is_named_at_the_first_step():
    mp = make("fp16-amp")
    with torch.no_grad():
        mp.model[4].bias[1] = float("nan")
    with pytest.warns(LossScaleWarning, match=r"4\.bias"):
        train(mp, batches(1))
    assert mp.skips[0].culprit.name == "4.bias"


def test_collapse_is_an_error_with_the_layer(caplog):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mp = mpinspect.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", "dynamic")

    def overflow(steps: int) -> None:
        for _ in range(steps):
            mp.zero_grad()
            out = mp.model(torch.ones(1, 2))
            out.register_hook(lambda gradient: gradient * float("inf"))
            mp.backward(out.sum())
            mp.step()

    with caplog.at_level(logging.INFO, "mpinspect.training"), pytest.raises(LossScaleCollapsedError) as caught:
        overflow(100)
    assert "'1'" in str(caught.value)
    assert mp.loss_scale == 2.0**-16
    assert mp.skipped_steps == 33  # 2^16 .. 2^-16, each once
    assert "skipped" in caplog.text


# -- checkpoints --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", EVERY)
def test_stop_and_resume_is_bit_identical(precision, tmp_path):
    optimizer, options = (torch.optim.SGD, {"momentum": 0.9}) if precision == "fp16-pure" else (torch.optim.Adam, {})
    scale = mpinspect.LossScaler("cpu", growth_interval=20, init_scale=2.0**30) if precision in SCALED else None
    data = batches(100)

    straight = make(precision, copy.deepcopy(scale), optimizer, **options)
    torch.manual_seed(3)
    train(straight, data)

    stopped = make(precision, copy.deepcopy(scale), optimizer, **options)
    torch.manual_seed(3)
    train(stopped, data[:57])
    stopped.save(tmp_path / "checkpoint.pt")
    random_state = torch.get_rng_state()
    del stopped

    resumed = make(precision, copy.deepcopy(scale), optimizer, seed=9, **options)
    statement = resumed.load(tmp_path / "checkpoint.pt")
    torch.set_rng_state(random_state)
    train(resumed, data[57:])
    assert "as it was saved" in statement
    assert equal(straight.weights(), resumed.weights())
    assert equal(straight.model.state_dict(), resumed.model.state_dict())
    assert straight.loss_scale == resumed.loss_scale
    assert straight.skipped_steps == resumed.skipped_steps
    assert resumed.steps == 100
    if precision in SCALED:
        assert straight.skipped_steps > 0


@pytest.mark.parametrize("there", EVERY)
@pytest.mark.parametrize("here", EVERY)
def test_a_checkpoint_of_one_precision_loads_into_another(there, here, tmp_path):
    source = make(there)
    train(source, batches(5))
    target = make(here, seed=4)
    statement = target.load_state_dict(source.state_dict())
    assert there in statement
    assert here in statement
    saved = source.weights()
    stored = PRECISIONS[here].stored
    for name, tensor in target.weights().items():
        wanted = saved[name].to(tensor.dtype)
        if stored != torch.float32 and PRECISIONS[here].masters:
            assert tensor.dtype == torch.float32 or "num_batches" in name
        assert torch.equal(tensor, wanted), name
    losses = train(target, batches(1) * 20)
    assert losses[-1] < losses[0]


def test_checkpoints_are_written_in_full_or_not_at_all(tmp_path, monkeypatch):
    mp = make("fp16-master")
    path = tmp_path / "checkpoint.pt"
    mp.save(path)
    before = path.read_bytes()
    monkeypatch.setattr(torch, "save", fails_half_way)
    with pytest.raises(OSError, match="disk full"):
        mp.save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint.pt"]


def fails_half_way(state, file):
    file.write(b"half")
    raise OSError("disk full")


BAD_STATES = [
    ({}, "empty"),
    ({"weight": torch.ones(2)}, "model's weights"),
    (torch.optim.SGD([torch.ones(1)], lr=1.0).state_dict(), "optimizer's"),
    ({"scale": 1.0, "_growth_tracker": 0}, "scaler.load_state_dict"),
    ({"loss_scaler0": {}}, "loss scaler's"),
    ([1], "is a dict"),
    ({"kind": "mpinspect.MixedPrecision", "version": 99}, "version 99"),
    ({"kind": "mpinspect.MixedPrecision", "version": 1}, "lacks"),
    ({"epoch": 3}, "holds epoch"),
]


@pytest.mark.parametrize(("state", "words"), BAD_STATES)
def test_foreign_states_are_refused_without_any_change(state, words):
    mp = make("fp16-master")
    train(mp, batches(2))
    before = mp.weights()
    with pytest.raises(CheckpointError, match=words):
        mp.load_state_dict(state)
    assert equal(before, mp.weights())


def test_checkpoints_of_other_models_and_optimizers_are_refused():
    state = make("fp32").state_dict()
    other = nn.Linear(3, 3)
    with pytest.raises(CheckpointError, match="another model"):
        mpinspect.MixedPrecision(other, torch.optim.Adam(other.parameters()), "fp32").load_state_dict(state)
    wider = nn.Sequential(nn.Linear(8, 17), nn.BatchNorm1d(17), nn.ReLU(), nn.Dropout(0.1), nn.Linear(17, 4))
    with pytest.raises(CheckpointError, match="shape"):
        mpinspect.MixedPrecision(wider, torch.optim.Adam(wider.parameters()), "fp32").load_state_dict(state)
    model = network()
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    with pytest.raises(CheckpointError, match="groups"):
        mpinspect.MixedPrecision(model, torch.optim.Adam(groups), "fp32").load_state_dict(state)


def test_cut_off_and_foreign_files_are_refused(tmp_path):
    mp = make("fp32")
    path = tmp_path / "checkpoint.pt"
    mp.save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cut off"):
        mp.load(path)
    (tmp_path / "code.pt").write_bytes(pickle.dumps(print))
    with pytest.raises(CheckpointError, match="can't be read"):
        mp.load(tmp_path / "code.pt")
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        mp.load(tmp_path / "none.pt")


# -- bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16-amp", "bf16-amp"])
def test_half_parameters_are_refused_by_the_amp_modes(precision):
    model = network().half()
    with pytest.raises(ValueError, match=r"0\.weight"):
        mpinspect.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), precision)
    assert model[0].weight.dtype == torch.float16


def test_an_optimizer_of_another_model_is_refused():
    model = network()
    with pytest.raises(ValueError, match="none of the model's parameters"):
        mpinspect.MixedPrecision(model, torch.optim.SGD(network().parameters(), lr=0.1))
    assert model[0].weight.dtype == torch.float32


@pytest.mark.parametrize("scale", [0, 0.0, -1.0, float("nan"), float("inf")])
def test_impossible_scales_are_refused_before_anything_changes(scale):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="scale"):
        mpinspect.MixedPrecision(model, optimizer, "fp16-master", scale)
    assert model[0].weight.dtype == torch.float32
    assert optimizer.param_groups[0]["params"][0] is model[0].weight


def test_a_scale_other_than_a_power_of_two_only_warns():
    with pytest.warns(LossScaleWarning, match="power of two"):
        mp = make("fp16-amp", 1000.0)
    assert mp.loss_scale == 1000.0


def test_an_eps_that_vanishes_in_fp16_is_warned_of():
    model = network()
    with pytest.warns(LossScaleWarning, match="eps=1e-08 is 0 in FP16"):
        mpinspect.MixedPrecision(model, torch.optim.Adam(model.parameters()), "fp16-pure")


def test_wrong_types_have_separate_errors():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="Module"):
        mpinspect.MixedPrecision(optimizer, model)
    with pytest.raises(TypeError, match="Optimizer"):
        mpinspect.MixedPrecision(model, model)
    with pytest.raises(TypeError, match="needs an optimizer"):
        mpinspect.MixedPrecision(model, [])
    with pytest.raises(TypeError, match="GradScaler"):
        mpinspect.MixedPrecision(model, optimizer, "fp16-amp", torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="fp16-master"):
        mpinspect.MixedPrecision(model, optimizer, "fp17")
    with pytest.raises(ValueError, match="talk"):
        mpinspect.MixedPrecision(model, optimizer, "fp16-amp", "dynamik")


@pytest.mark.parametrize("precision", EVERY)
def test_calls_out_of_order_are_refused_before_any_weight_changes(precision):
    mp = make(precision)
    before = mp.weights()
    with pytest.raises(RuntimeError, match="backward"):
        mp.step()
    with pytest.raises(RuntimeError, match="backward"):
        mp.unscale_()
    mp.model.eval()
    loss = loss_of(mp, *batches(1)[0])
    mp.backward(loss, retain_graph=True)
    mp.unscale_()
    with pytest.raises(RuntimeError, match="twice"):
        mp.unscale_()
    with pytest.raises(RuntimeError, match="unscaled"):
        mp.backward(loss)
    assert equal(before, mp.weights())
    assert mp.step()


@pytest.mark.parametrize("precision", WITH_MASTERS)
def test_zeroing_only_the_masters_gradients_is_noticed(precision):
    mp = make(precision)
    train(mp, batches(1))
    (optimizer,) = mp.optimizers
    optimizer.zero_grad()
    before = mp.weights()
    mp.model.eval()
    loss = loss_of(mp, *batches(1)[0])
    with pytest.raises(RuntimeError, match=r"model\.zero_grad"):
        mp.backward(loss)
    assert equal(before, mp.weights())
    mp.model.zero_grad()
    mp.backward(loss)
    assert mp.step()


def test_clipping_does_not_hide_infinities_from_the_step():
    mp = make("fp16-amp", 2.0**4)
    mp.backward(loss_of(mp, *batches(1)[0]) * 1e30)
    assert mp.clip_grad_norm_(1.0).isfinite().item() is False
    assert mp.step() is False
    assert mp.skips[0].culprit.value in ("inf", "nan")


def test_the_message_for_a_half_loss_names_its_dtype():
    mp = make("fp16-amp", 2.0**16)
    x, _ = batches(1)[0]
    with mp.autocast():
        loss = mp.model(x).mean()
    assert loss.dtype == torch.float16
    mp.backward(loss)
    assert mp.step() is False
    assert "compute the loss in FP32" in str(mp.skips[0])


# -- auto ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", SCALED[:2])
def test_auto_takes_the_inspectors_advice_after_the_first_block(precision):
    mp = make(precision, "auto")
    train(mp, batches(24))
    assert mp.loss_scale == 2.0**16
    train(mp, batches(1))
    lowest, highest = mp.scaler.window
    assert lowest <= mp.loss_scale <= highest
    with mpinspect.Inspector(network()) as untouched:
        pass
    assert untouched.report() is not None
    without = make(precision, "dynamic")
    for module, other in zip(mp.model.modules(), without.model.modules(), strict=True):
        assert len(module._forward_hooks) == len(other._forward_hooks)


def test_the_inspector_sees_a_mixed_precision_run():
    mp = make("fp16-master", 128.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with mpinspect.Inspector(mp.model, optimizers=mp.optimizers, scalers=mp.scaler) as inspector:
            train(mp, batches(5))
    session = inspector.session()
    assert session.progress.steps == 5
    assert session.progress.scale_known
