"""The precisions as data, the conversion of models, and normalisation layers in half precision."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Of
from torch import nn
from torch.nn import functional as F

from mpinspect.runtime.emulation import half_arithmetic
from mpinspect.training.masters import BN_convert_float
from mpinspect.training.precision import PRECISIONS, check_convertible, convert_model, get_precision
from mpinspect.training.recompute import HalfGroupNorm, HalfLayerNorm, HalfRMSNorm

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
FP16_MASTER = PRECISIONS["fp16-master"]


# -- the table ------------------------------------------------------------------------------------------------------


def test_each_precisions_storage_arithmetic_and_requirements():
    table = {p.name: (p.compute, p.stored, p.masters, p.autocast, p.scaled) for p in PRECISIONS.values()}
    assert table == {
        "fp32": (FP32, FP32, False, False, False),
        "fp16-amp": (FP16, FP32, False, True, True),
        "bf16-amp": (BF16, FP32, False, True, False),
        "fp16-master": (FP16, FP16, True, True, True),
        "bf16-master": (BF16, BF16, True, True, False),
        "fp16-pure": (FP16, FP16, False, True, True),
        "fp8-tensorwise": (BF16, FP32, False, True, False),
        "fp8-rowwise": (BF16, FP32, False, True, False),
        "mxfp8": (BF16, FP32, False, True, False),
    }
    recipes = {p.name: p.recipe for p in PRECISIONS.values() if p.recipe}
    assert recipes == {name: name for name in ("fp8-tensorwise", "fp8-rowwise", "mxfp8")}
    assert all(get_precision(name) is precision for name, precision in PRECISIONS.items())


def test_an_unknown_precision_is_answered_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"unknown precision 'fp8'; choose one of fp32, .*fp16-master.*, fp8-tensorwise"
    ):
        get_precision("fp8")


# -- the conversion -------------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """One of each kind of layer and tensor that is converted differently."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.conv = nn.Conv2d(3, 4, 3)
        self.batch = nn.BatchNorm2d(4)
        self.sync = nn.SyncBatchNorm(4)
        self.instance = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.layer = nn.LayerNorm(4)
        self.plain = nn.LayerNorm(4, elementwise_affine=False)
        self.group = nn.GroupNorm(2, 4)
        self.rms = nn.RMSNorm(4)
        self.own = OwnNorm(4)
        self.lstm = nn.LSTM(4, 4)
        self.wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.phases = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.register_buffer("mask", torch.ones(2, 2))
        self.register_buffer("positions", torch.arange(4))
        self.register_buffer("forbidden", torch.tensor([0.0, -1e9]))
        self.register_buffer("never", torch.tensor([0.0, -torch.inf]))


class OwnNorm(nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("precision", [FP16_MASTER, PRECISIONS["bf16-master"]], ids=lambda precision: precision.name)
@pytest.mark.parametrize("before", ["float", "half", "bfloat16"])
def test_dtypes_after_the_conversion(precision, before):
    model = getattr(Everything(), before)()
    if before != "float":
        model.forbidden = torch.tensor([0.0, -1e9])
    model.wide.data = model.wide.data.double()
    identities = {name: id(parameter) for name, parameter in model.named_parameters()}
    assert convert_model(model, precision) is model
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == identities
    for name, tensor in model.state_dict().items():
        layer, _, last = name.rpartition(".")
        if last == "num_batches_tracked" or name == "positions":
            wanted = torch.int64
        elif layer in ("batch", "sync", "instance"):
            wanted = FP32
        else:
            wanted = {"wide": torch.float64, "phases": torch.complex64}.get(name, precision.stored)
        if name == "forbidden" and precision.stored == FP16:
            wanted = FP32  # -1e9 would become -inf
        assert tensor.dtype == wanted, name
    assert model.never[1] == -torch.inf
    kinds = [type(getattr(model, name)) for name in ("layer", "plain", "group", "rms", "own", "batch")]
    assert kinds == [HalfLayerNorm, HalfLayerNorm, HalfGroupNorm, HalfRMSNorm, OwnNorm, nn.BatchNorm2d]
    assert all(a is b for a, b in zip(model.lstm._flat_weights, model.lstm.parameters(), strict=True))


def test_values_equal_torchs_cast_and_gradients_are_converted():
    model, half = nn.Linear(5, 3), nn.Linear(5, 3)
    half.load_state_dict(model.state_dict())
    model(torch.randn(2, 5)).sum().backward()
    gradient = model.weight.grad.clone()
    convert_model(model, FP16_MASTER)
    half.half()
    assert torch.equal(model.weight, half.weight)
    assert model.weight.grad.dtype == FP16
    assert torch.equal(model.weight.grad, gradient.half())


def test_a_shared_buffer_and_a_shared_parameter_stay_shared():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1].weight = model[0].weight
    mask = torch.ones(2)
    for layer in model:
        layer.register_buffer("mask", mask, persistent=False)
    convert_model(model, FP16_MASTER)
    assert model[0].mask is model[1].mask
    assert model[0].mask.dtype == FP16
    assert model[1].weight is model[0].weight
    assert not model.state_dict().keys() & {"0.mask", "1.mask"}


def test_a_parameter_shared_with_a_batch_norm_stays_fp32():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[1].bias = model[0].bias
    convert_model(model, FP16_MASTER)
    assert model[1].bias.dtype == FP32
    assert model[1].weight.dtype == FP16


def test_converting_twice_equals_converting_once():
    model = convert_model(Everything(), FP16_MASTER)
    before = {name: (tensor.dtype, tensor.data_ptr()) for name, tensor in model.state_dict().items()}
    convert_model(model, FP16_MASTER)
    assert {name: (tensor.dtype, tensor.data_ptr()) for name, tensor in model.state_dict().items()} == before


def test_hooks_on_parameters_from_before_the_conversion_see_half_gradients():
    model, seen = nn.Linear(3, 2), []
    model.weight.register_hook(lambda gradient: seen.append(("tensor", gradient.dtype)))
    model.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(("after", parameter.grad.dtype)))
    model(torch.ones(1, 3)).sum().backward()
    convert_model(model, FP16_MASTER)
    model.zero_grad()
    seen.clear()
    with half_arithmetic():
        model(torch.ones(1, 3).half()).sum().backward()
    assert seen == [("tensor", FP16), ("after", FP16)]


@pytest.mark.parametrize("name", ["fp32", "fp16-amp", "bf16-amp"])
@pytest.mark.parametrize("convert", ["half", "bfloat16"])
def test_a_half_model_is_refused_where_weights_stay_fp32(name, convert):
    model = nn.Sequential(nn.Linear(2, 2), getattr(nn.Linear(2, 2), convert)())
    with pytest.raises(
        ValueError, match=rf"'1.weight' is torch\.\w*{convert.removesuffix('half')}.*Give the FP32 model"
    ):
        convert_model(model, PRECISIONS[name])
    convert_model(model[0], PRECISIONS[name])
    assert model[0].weight.dtype == FP32


def test_a_model_wrapped_already_is_refused(one_rank):
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"wrapped in DistributedDataParallel already.*convert first, wrap after"):
        convert_model(wrapped, FP16_MASTER)
    with pytest.raises(ValueError, match="wrap after"):
        convert_model(nn.Sequential(wrapped), PRECISIONS["fp16-pure"])
    assert wrapped.module.weight.dtype == FP32
    check_convertible(wrapped, PRECISIONS["fp16-amp"])


def test_a_lazy_model_is_refused_until_it_has_shapes():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"'0.weight' of a lazy module has no shape yet"):
        convert_model(model, FP16_MASTER)
    model(torch.ones(1, 2))
    assert convert_model(model, FP16_MASTER)[0].weight.dtype == FP16


def test_weights_beyond_fp16_are_refused_and_fit_bf16():
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0, 0] = 65520.0
    with pytest.raises(ValueError, match=r"'weight' holds values beyond 65504"):
        convert_model(model, FP16_MASTER)
    assert model.weight.dtype == FP32
    convert_model(model, PRECISIONS["bf16-master"])
    model.float()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[65519.0, torch.inf], [torch.nan, 0.0]]))
    convert_model(model, FP16_MASTER)  # 65519 rounds to 65504; existing infinities are ignored
    assert model.weight[0].tolist() == [65504.0, torch.inf]


# -- BatchNorm ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_in_half_loses_its_statistics_and_converted_back_does_not(affine):
    """Inputs ~ N(0, 400^2) have a variance of 160,000, beyond FP16. apex's BN_convert_float skips ``affine=False``."""
    half = nn.BatchNorm1d(16, affine=affine).half()
    kept = BN_convert_float(nn.Sequential(nn.BatchNorm1d(16, affine=affine)).half())[0]
    converted = convert_model(nn.Sequential(nn.BatchNorm1d(16, affine=affine)), FP16_MASTER)[0]
    for _ in range(20):
        x = (torch.randn(256, 16) * 400).half()
        right = F.batch_norm(x.float(), None, None, training=True)
        for layer in (half, kept, converted):
            y = layer(x)
            assert y.dtype == FP16
            assert (y.float() - right).abs().max() < 2.0**-8  # training looks fine, also where it is not
    assert half.running_var.isinf().all()
    half.eval()
    assert (half(x) == 0).all()
    for layer in (kept, converted):
        layer.eval()
        assert (layer.running_var / 160_000 - 1).abs().max() < 0.25
        assert (layer(x).float().std() - 1).abs() < 0.1
    # The docstring documents the difference to apex's function.
    assert "affine=False" in BN_convert_float.__doc__
    assert "apex" in BN_convert_float.__doc__


def test_a_residual_network_trains_a_step_with_fp32_batch_norm():
    layers = [each for _ in range(2) for each in (nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))]
    branch = nn.Sequential(*layers[:2], nn.ReLU(), *layers[2:])
    residual = Of(lambda self, x: F.relu(x + self.branch(x)), branch=branch)
    stem, head = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(*stem, residual, *head, nn.Linear(8, 5))
    convert_model(model, FP16_MASTER)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    inputs: dict[nn.Module, torch.Tensor] = {}
    for norm in norms:
        norm.register_forward_hook(lambda module, args, output: inputs.__setitem__(module, args[0].detach()))
    expected = copy.deepcopy(norms)
    with half_arithmetic():
        with torch.autocast("cpu", FP16):
            out = model(torch.randn(4, 3, 12, 12))
            loss = F.cross_entropy(out, torch.tensor([0, 1, 2, 3]))
        (loss * 128).backward()
    assert out.dtype == FP16
    for norm, reference in zip(norms, expected, strict=True):
        assert inputs[norm].dtype == FP16
        reference(inputs[norm].float())
        assert norm.running_var.dtype == FP32
        torch.testing.assert_close(norm.running_mean, reference.running_mean, rtol=2.0**-20, atol=2.0**-24)
        torch.testing.assert_close(norm.running_var, reference.running_var, rtol=2.0**-20, atol=0)
        assert norm.weight.grad.dtype == FP32
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any() or name == "0.bias", name  # a bias before BatchNorm has no gradient


@pytest.mark.parametrize("affine", [False, True])
def test_instance_norm_takes_half_inputs(affine):
    layer = convert_model(nn.InstanceNorm2d(4, affine=affine, track_running_stats=True), FP16_MASTER)
    reference = copy.deepcopy(layer)
    x = (torch.randn(2, 4, 6, 6) * 400).half()
    y = layer(x)
    assert y.dtype == FP16
    expected = reference(x.float())
    assert (y.float() - expected).abs().max() <= 2.0**-11 * expected.abs().max().log2().ceil().exp2()
    torch.testing.assert_close(layer.running_var, reference.running_var, rtol=2.0**-20, atol=0)
    assert isinstance(layer, nn.InstanceNorm2d)
    layer.eval()
    reference.eval()
    assert torch.equal(layer(x[0]), reference(x[0].float()).half())


# -- LayerNorm, GroupNorm, RMSNorm ----------------------------------------------------------------------------------

NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.LayerNorm(32),
    "layer, two dimensions": lambda: nn.LayerNorm((6, 32)),
    "layer without bias": lambda: nn.LayerNorm(32, bias=False),
    "layer, not affine": lambda: nn.LayerNorm(32, elementwise_affine=False),
    "layer, tiny eps": lambda: nn.LayerNorm(32, eps=1e-12),
    "group": lambda: nn.GroupNorm(3, 6),
    "group, not affine": lambda: nn.GroupNorm(3, 6, affine=False),
    "rms": lambda: nn.RMSNorm(32),
    "rms, not affine": lambda: nn.RMSNorm(32, elementwise_affine=False),
}
INPUTS = {
    "normal": lambda: torch.randn(4, 6, 32),
    "large": lambda: torch.empty(4, 6, 32).uniform_(-60000, 60000),
    "far from zero": lambda: torch.randn(4, 6, 32) * 20 + 30000,
    "small": lambda: torch.randn(4, 6, 32) * 2.0**-20,
    "constant": lambda: torch.full((4, 6, 32), 60000.0),
}


def pair(make: Callable[[], nn.Module], stored: torch.dtype = FP16) -> tuple[nn.Module, nn.Module]:
    """Return a converted layer, and an FP32 layer with the same rounded weights."""
    torch.manual_seed(0)
    layer = make()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.5, 1.5)
    name = "fp16-master" if stored == FP16 else "bf16-master"
    reference = copy.deepcopy(layer)
    convert_model(layer, PRECISIONS[name])
    reference.load_state_dict(layer.state_dict())
    return layer, reference


@pytest.mark.parametrize("stored", [FP16, BF16])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", NORMS)
def test_norms_are_the_fp32_norm_rounded_once_forward_and_backward(name, inputs, stored):
    layer, reference = pair(NORMS[name], stored)
    x = INPUTS[inputs]().to(stored).requires_grad_()
    full = x.detach().float().requires_grad_()
    with torch.autocast("cpu", stored):
        y = layer(x)
    expected = reference(full)
    assert y.dtype == stored
    assert y.isfinite().all()
    assert torch.equal(y, expected.to(stored))
    upstream = torch.randn(y.shape).to(stored)
    y.backward(upstream)
    expected.backward(upstream.float())
    assert torch.equal(x.grad, full.grad.to(stored))
    for parameter, other in zip(layer.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad.to(stored))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.floats(-60000, 60000, width=16), min_size=8, max_size=8), min_size=1, max_size=4),
    kind=st.sampled_from([lambda: nn.LayerNorm(8), lambda: nn.GroupNorm(2, 8), lambda: nn.RMSNorm(8)]),
)
def test_any_input_within_60000_gives_finite_outputs_and_gradients(rows, kind):
    layer, reference = pair(kind)
    x = torch.tensor(rows).half().requires_grad_()
    y = layer(x)
    assert torch.equal(y, reference(x.detach().float()).half())
    assert y.isfinite().all()
    y.backward(torch.ones_like(y))
    assert all(tensor.grad.isfinite().all() for tensor in (x, *layer.parameters()))


@pytest.mark.parametrize("name", NORMS)
def test_norms_save_only_half_tensors(name):
    layer, _ = pair(NORMS[name])
    x = torch.randn(4, 6, 32).half().requires_grad_()
    kept = []
    with (
        half_arithmetic(),
        torch.autocast("cpu", FP16),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor),
    ):
        y = layer(x)
    y.sum().backward()
    assert {tensor.dtype for tensor in kept} == {FP16}
    assert sum(tensor.numel() for tensor in kept) == x.numel() + sum(p.numel() for p in layer.parameters())


def test_torchs_half_layer_norm_has_half_statistics_on_a_cpu():
    """The reason not to use it: for inputs far from zero, the gradient's error exceeds a percent instead of 2^-11."""
    x = (torch.randn(64, 64) * 20 + 30000).half()
    upstream = torch.randn(64, 64).half()
    errors = {}
    for own in (True, False):
        layer = nn.LayerNorm(64).half() if own else convert_model(nn.LayerNorm(64), FP16_MASTER)
        a, b = x.clone().requires_grad_(), x.double().requires_grad_()
        layer(a).backward(upstream)
        nn.LayerNorm(64).double()(b).backward(upstream.double())
        errors[own] = ((a.grad - b.grad).abs().max() / b.grad.abs().max()).item()
    assert errors[True] > 0.01
    assert errors[False] < 2.0**-11


@pytest.mark.parametrize("name", ["layer", "group", "rms"])
def test_norms_can_be_differentiated_twice(name):
    layer, reference = pair(NORMS[name])
    reference.double()
    x = torch.randn(4, 6, 32).half()
    penalties = []
    for module, at in ((layer, x.clone().requires_grad_()), (reference, x.double().requires_grad_())):
        (gradient,) = torch.autograd.grad(module(at).double().pow(3).mean(), at, create_graph=True)
        (gradient.double().square().sum() * 1024).backward()
        penalties.append((gradient.double(), at.grad.double(), module.weight.grad.double()))
    for made, exact in zip(*penalties, strict=True):
        assert (made - exact).abs().max() < 2.0**-7 * exact.abs().max()


def test_hooks_on_the_input_see_the_whole_gradient_once():
    layer, _ = pair(NORMS["layer"])
    leaf = torch.randn(4, 6, 32).half().requires_grad_()
    x, seen = leaf * 1, []
    x.register_hook(lambda gradient: seen.append(gradient.clone()))
    layer.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    (layer(x).sum() + x.sum()).backward()
    assert [gradient.shape for gradient in seen] == [layer.weight.shape, x.shape] or [
        gradient.shape for gradient in seen
    ] == [x.shape, layer.weight.shape]
    whole = next(gradient for gradient in seen if gradient.shape == x.shape)
    assert torch.equal(whole, leaf.grad)


@pytest.mark.parametrize("frozen", ["input", "weight", "bias"])
def test_tensors_that_need_no_gradient_have_none(frozen):
    layer, _ = pair(NORMS["layer"])
    x = torch.randn(4, 6, 32).half().requires_grad_()
    tensors = {"input": x, "weight": layer.weight, "bias": layer.bias}
    tensors[frozen].requires_grad_(False)
    layer(x).sum().backward()
    assert {name for name, tensor in tensors.items() if tensor.grad is None} == {frozen}
    with torch.no_grad():
        assert layer(x).grad_fn is None


@pytest.mark.parametrize("name", ["layer", "layer, not affine", "group", "rms"])
def test_norms_are_copied_pickled_and_still_torchs_own(name):
    layer, reference = pair(NORMS[name])
    x = torch.randn(4, 6, 32).half()
    y = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is type(layer)
        assert torch.equal(other(x), y)
    assert isinstance(layer, type(reference))
    assert layer.state_dict().keys() == reference.state_dict().keys()
    assert layer.extra_repr() == reference.extra_repr()


@pytest.mark.parametrize("name", ["layer", "group", "rms"])
def test_norms_compile_in_one_graph(name):
    layer, _ = pair(NORMS[name])
    x = torch.randn(4, 6, 32).half().requires_grad_()
    y = layer(x)
    y.sum().backward()
    expected, x.grad = x.grad, None
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    made = compiled(x)
    made.sum().backward()
    assert torch.equal(made, y)
    assert torch.equal(x.grad, expected)


def test_an_fp32_input_is_rounded_to_the_weights_dtype():
    layer, _ = pair(NORMS["layer"])
    x = torch.randn(4, 6, 32)
    assert torch.equal(layer(x), layer(x.half()))
    back = layer.float()
    assert torch.equal(back(x), F.layer_norm(x, (32,), back.weight, back.bias))


@pytest.mark.gpu
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", NORMS)
def test_norms_on_a_gpu_are_within_one_ulp_of_the_fp32_norm(name, inputs):
    layer, reference = pair(NORMS[name])
    x = INPUTS[inputs]().half().cuda().requires_grad_()
    kept = []
    with (
        torch.autocast("cuda", FP16),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor),
    ):
        y = layer.cuda()(x)
    expected = reference.cuda()(x.detach().float())
    assert y.dtype == FP16
    step = torch.maximum(expected.abs(), torch.tensor(2.0**-14, device="cuda")).log2().floor().exp2() * 2.0**-10
    assert ((y.float() - expected).abs() <= step).all()
    assert all(tensor.dtype == FP16 for tensor in kept if tensor.numel() == x.numel())
