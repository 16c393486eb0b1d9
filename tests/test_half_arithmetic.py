"""FP16 products on a CPU: as torch's own FP16 kernels have them, and in FP32 where CUDA's autocast has FP32."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mpinspect.emulation import half_arithmetic


def half(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).half().requires_grad_()


def ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """Largest distance in units in the last place: FP16 codes, counted through zero."""
    assert a.dtype == b.dtype == torch.float16
    assert a.shape == b.shape
    codes = [x.detach().contiguous().view(torch.int16).int() for x in (a, b)]
    ordered = [torch.where(code < 0, -(code & 0x7FFF), code) for code in codes]
    return int((ordered[0] - ordered[1]).abs().max())


PRODUCTS = {
    "mm": (torch.mm, [(5, 16), (16, 7)]),
    "addmm": (torch.addmm, [(7,), (5, 16), (16, 7)]),
    "bmm": (torch.bmm, [(3, 5, 16), (3, 16, 7)]),
    "baddbmm": (torch.baddbmm, [(3, 5, 7), (3, 5, 16), (3, 16, 7)]),
    "addbmm": (torch.addbmm, [(5, 7), (3, 5, 16), (3, 16, 7)]),
    "mv": (torch.mv, [(5, 16), (16,)]),
    "addmv": (torch.addmv, [(5,), (5, 16), (16,)]),
    "matmul": (torch.matmul, [(2, 3, 5, 16), (16, 7)]),
    "linear": (F.linear, [(2, 5, 16), (7, 16), (7,)]),
    "conv1d": (F.conv1d, [(2, 3, 9), (4, 3, 3), (4,)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1), [(2, 3, 7, 7), (4, 3, 3, 3), (4,)]),
    "conv2d grouped": (lambda x, w: F.conv2d(x, w, groups=2), [(2, 4, 5, 5), (4, 2, 3, 3)]),
    "conv_transpose2d": (F.conv_transpose2d, [(2, 3, 4, 4), (3, 2, 3, 3), (2,)]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_and_their_gradients_are_within_one_ulp_of_torchs_own_fp16(name):
    """Sums in another order may round to the neighbouring value; cancelling ones are kept away by positive operands."""
    function, shapes = PRODUCTS[name]
    torch.manual_seed(0)
    operands = [half(*shape).detach().abs().requires_grad_() for shape in shapes]
    own = function(*operands)
    upstream = torch.rand(own.shape).half()
    own_gradients = torch.autograd.grad(own, operands, upstream)
    with half_arithmetic():
        made = function(*operands)
        gradients = torch.autograd.grad(made, operands, upstream)
    assert ulps(made, own) <= 1
    for gradient, own_gradient in zip(gradients, own_gradients, strict=True):
        assert ulps(gradient, own_gradient) <= 1


def test_the_mode_is_what_computes_the_products(monkeypatch):
    from mpinspect.capture import half_arithmetic as module

    seen = []
    monkeypatch.setattr(module, "_to_half", lambda value: seen.append(value.dtype) or value.half())
    with half_arithmetic():
        torch.mm(half(2, 3), half(3, 2))
    assert seen == [torch.float32]


def test_sums_are_kept_in_fp32_and_the_result_is_rounded():
    with half_arithmetic():
        # Summed in FP16 this would stop at 2048: 2048 + 1 rounds back.
        assert torch.mm(torch.ones(1, 4097).half(), torch.ones(4097, 1).half()).item() == 4096
        assert torch.isinf(torch.mm(torch.full((1, 2), 256.0).half(), torch.full((2, 1), 256.0).half())).all()
        assert torch.mm(torch.full((1, 1), 2.0**-13).half(), torch.full((1, 1), 2.0**-12).half()).item() == 0


def test_fp32_products_are_left_alone():
    torch.manual_seed(0)
    a, b = torch.randn(5, 16), torch.randn(16, 7)
    with half_arithmetic():
        assert torch.equal(a @ b, torch.mm(a, b))
        inside = a @ b
    assert torch.equal(inside, a @ b)


def test_autocast_inside_runs_in_fp32_what_cuda_runs_in_fp32():
    x = torch.full((4,), 256.0).half()
    with half_arithmetic(), torch.autocast("cpu", torch.float16):
        for result in (x.pow(2), x**2, x.sum(), torch.softmax(x, 0), x.log(), F.layer_norm(x, (4,)), x.norm()):
            assert result.dtype == torch.float32
            assert result.isfinite().all()
        assert F.relu(x).dtype == torch.float16
    with torch.autocast("cpu", torch.float16):
        assert x.pow(2).isinf().all()


def test_without_autocast_fp16_functions_stay_fp16():
    with half_arithmetic():
        assert torch.full((4,), 256.0).half().sum().dtype == torch.float16


def recurrent(kind: type[nn.Module]):
    model = kind(8, 8)
    return model, torch.randn(4, 5, 8), lambda m, x: m(x)[0]


BLOCKS = {
    "LSTM": lambda: recurrent(nn.LSTM),
    "GRU": lambda: recurrent(nn.GRU),
    "attention": lambda: (nn.MultiheadAttention(8, 2), torch.randn(4, 5, 8), lambda m, x: m(x, x, x)[0]),
    "encoder": lambda: (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), torch.randn(4, 5, 8), lambda m, x: m(x)),
    "conv": lambda: (nn.Conv2d(1, 3, 3), torch.randn(2, 1, 6, 6), lambda m, x: m(x)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_layers_run_forward_and_backward_close_to_fp32(name):
    torch.manual_seed(0)
    model, x, call = BLOCKS[name]()
    call(model, x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with half_arithmetic():
        with torch.autocast("cpu", torch.float16):
            loss = call(model, x).square().sum()
        loss.backward()
    largest = max(gradient.abs().max() for gradient in expected)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        # A few roundings of 2^-11 each, relative to the largest terms of the sums.
        assert (parameter.grad - gradient).abs().max() < 2.0**-7 * largest
        assert not torch.equal(parameter.grad, gradient)


def test_a_gradient_that_enters_a_product_is_rounded_there():
    """FP32 logits' gradients flush where they enter the FP16 product: here 2^-26, summed over 64 rows."""
    layer = nn.Linear(4, 4)
    with half_arithmetic():
        with torch.autocast("cpu", torch.float16):
            out = layer(torch.ones(64, 4))
        (out.float() * 2.0**-26).sum().backward()
    assert (layer.weight.grad == 0).all()
    assert (layer.bias.grad == 0).all()


def test_every_setting_is_as_before_also_after_an_error():
    def settings():
        cuda = torch.backends.cuda
        return (
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            torch.backends.mkldnn.enabled,
            torch.backends.mkldnn.deterministic,
        )

    before = settings()

    def fail():
        with half_arithmetic(), torch.autocast("cpu", torch.float16):
            nn.LSTM(4, 4)(torch.randn(2, 3, 4))
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert settings() == before
    assert torch.ones(2).half().sum().dtype == torch.float16
