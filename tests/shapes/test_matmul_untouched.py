"""record_matmuls leaves the model, its gradients, the random generators and torch's settings exactly as they were."""

import random

import numpy as np
import pytest
import torch
from models import Of
from torch import nn
from torch.nn import functional as F

from mpinspect.shapes.record.recording import record_matmuls

DEVICES = pytest.mark.parametrize("device", ["meta", "real"])


class Model(nn.Module):
    """Everything that a forward may change: statistics, counters, buffers, attributes, lists, random draws."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5)
        self.rnn, self.out = nn.LSTM(8, 8, batch_first=True), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, 8, bias=False)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.head.weight
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", torch.ones(4), persistent=False)
        self.seen, self.last, self.table = [], None, {"a": 1}

    def forward(self, x):
        self.steps += 1
        self.hidden = self.hidden * 2
        self.seen.append(x)
        self.last = x = self.drop(self.norm(self.conv(x)))
        self.table["b"] = x
        self.new_attribute = x
        if not hasattr(self, "cache"):
            self.register_buffer("cache", x.mean())
        x = self.rnn(x.flatten(2).transpose(1, 2))[0] + torch.rand(8)
        return self.tied(self.head(self.out(x))) * self.frozen


def state(model):
    """Every entry of every module, the identity of each object and the values of tensors."""
    found = {}
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            entry = (path, name)
            found[entry] = id(value)
            if isinstance(value, dict):
                found[(*entry, "keys")] = [(key, id(one)) for key, one in value.items()]
            elif isinstance(value, (list, set)):
                found[(*entry, "items")] = [id(one) for one in value]
            elif isinstance(value, bool):
                found[entry] = value
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        values = (
            tensor.detach().clone().tolist(),
            tensor.requires_grad,
            tensor._version,
            id(tensor.grad) if tensor.is_leaf else None,
            tensor.device,
        )
        found["tensor", name] = values
        found["gradient", name] = tensor.grad.tolist() if tensor.is_leaf and tensor.grad is not None else None
    return found


@DEVICES
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_the_model_is_as_before(device, training, dtype):
    model = Model().train(training)
    model(torch.randn(2, 3, 6, 6)).sum().backward()
    model.norm.eval()
    before = state(model)
    recording = record_matmuls(model, torch.randn(2, 3, 6, 6), dtype=dtype, device=device)
    assert recording.notes == ()
    assert any(record.role == "wgrad" for record in recording.matmuls)
    assert state(model) == before


@DEVICES
def test_gradients_are_the_same_objects_and_hooks_on_parameters_stay_silent(device):
    model = nn.Linear(4, 4)
    model(torch.randn(2, 4)).sum().backward()
    gradient, values = model.weight.grad, model.weight.grad.clone()
    fired = []
    model.weight.register_hook(lambda grad: fired.append("gradient"))
    model.weight.register_post_accumulate_grad_hook(lambda parameter: fired.append("accumulated"))
    record_matmuls(model, torch.randn(2, 4), device=device)
    assert model.weight.grad is gradient
    assert torch.equal(gradient, values)
    assert fired == []


@DEVICES
def test_a_model_without_gradients_still_has_no_gradients_afterwards(device):
    model = nn.Linear(4, 4)
    record_matmuls(model, torch.randn(2, 4), device=device)
    assert model.weight.grad is None


@DEVICES
def test_a_parameter_reached_past_the_module_gets_no_gradient(device):
    model = nn.Linear(4, 4)
    weight = model.weight
    holder = type("Holder", (), {"weight": weight})

    weight.grad = torch.ones(4, 4)
    past = Of(lambda self, x: F.linear(x, self.holder.weight), inner=model, holder=holder)
    record_matmuls(past, torch.randn(2, 4), device=device)
    assert torch.equal(weight.grad, torch.ones(4, 4))


@DEVICES
def test_random_generators_are_restored(device):
    torch.manual_seed(1), random.seed(2), np.random.seed(3)

    draw = lambda x: F.dropout(x, 0.5) + torch.rand(4) * random.random() * float(np.random.rand())  # noqa: E731
    model, x = Of(lambda self, x: draw(self.inner(x)), inner=nn.Linear(4, 4)), torch.randn(2, 4)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    record_matmuls(model, x, device=device)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


@DEVICES
def test_the_inputs_are_not_changed(device):
    x = torch.randn(2, 4, requires_grad=True)
    batch = {"x": [x], "y": torch.randn(2, 4)}
    values = x.detach().clone(), batch["y"].clone()

    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, batch):
            y = batch["y"].add_(1)
            batch["x"].append(y)
            batch["new"] = y
            return self.inner(batch["x"][0] + y)

    record_matmuls(InPlace(), (batch,), device=device)
    assert torch.equal(x.detach(), values[0])
    assert torch.equal(batch["y"], values[1])
    assert x.grad is None
    assert list(batch) == ["x", "y"]
    assert len(batch["x"]) == 1


@DEVICES
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("fails", [False, True])
def test_hooks_modes_and_torchs_functions_are_restored(device, dtype, fails):
    class Fails(nn.Module):
        def forward(self, x):
            if fails:
                raise KeyError("on purpose")
            return x

    model = nn.Sequential(nn.Linear(4, 4), Fails())
    hook = model[0].register_forward_hook(lambda module, args, output: None)
    names = ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype")
    kept = [getattr(torch, name) for name in names] + [torch.autocast.__init__, torch.amp.is_autocast_available]
    settings = settings_now()
    recording = record_matmuls(model, torch.randn(2, 4), dtype=dtype, device=device)
    assert recording.complete != fails
    assert recording.notes == ()
    if fails:
        assert "stopped in 1: KeyError" in recording.stopped
    assert list(model[0]._forward_hooks.values()) == [model[0]._forward_hooks[hook.id]]
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not nn.modules.module._global_forward_hooks
    assert [getattr(torch, name) for name in names] + [torch.autocast.__init__, torch.amp.is_autocast_available] == kept
    assert settings_now() == settings
    assert not model(torch.randn(2, 4)).is_meta if not fails else True


def settings_now():
    return (
        torch.is_autocast_enabled("cuda"),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.is_autocast_cache_enabled(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.autograd.is_multithreading_enabled(),
        len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
        torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.AutocastIPU),
        torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutocastIPU),
    )


def test_users_hooks_run_and_may_change_outputs():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(4, 2))
    model[0].register_forward_hook(lambda module, args, output: output[:, :4])
    assert record_matmuls(model, torch.randn(2, 4)).notes == ()


def test_weights_of_old_style_weight_norm_are_restored():
    with pytest.warns(FutureWarning):
        model = nn.utils.weight_norm(nn.Linear(4, 4))
    before = model.weight
    assert record_matmuls(model, torch.randn(2, 4)).notes == ()
    assert model.weight is before
    assert not model(torch.randn(2, 4)).is_meta


def test_hooks_of_an_attached_inspector_stay_silent():
    model, seen = nn.Linear(4, 4), []

    def hook(module, args, output):
        seen.append(output)

    hook.__module__ = "mpinspect.runtime.hooks"
    model.register_forward_hook(hook)
    record_matmuls(model, torch.randn(2, 4))
    assert seen == []
    model(torch.randn(2, 4))
    assert len(seen) == 1


def test_weights_are_not_copied(monkeypatch):
    """On the meta device, parameters are neither cloned nor copied, which would need memory."""
    model = nn.Linear(64, 64)
    copied = []
    original = torch.Tensor.clone
    monkeypatch.setattr(
        torch.Tensor, "clone", lambda self, **options: copied.append(self.device) or original(self, **options)
    )
    record_matmuls(model, torch.randn(2, 64))
    assert all(device.type == "meta" for device in copied)


def test_real_runs_use_the_memory_of_the_weights():
    seen = []

    class Looks(nn.Linear):
        def forward(self, x):
            seen.append(self.weight.data_ptr())
            return super().forward(x)

    model = Looks(4, 4)
    record_matmuls(model, torch.randn(2, 4), device="real")
    assert seen == [model.weight.data_ptr()]
