"""16-bit products on a CPU: within one unit in the last place of the exact result, and never further from it than torch's own.

torch's own 16-bit kernels alone are not an oracle: where the processor has no 16-bit instructions, oneDNN's convolutions
round on the way, to 252 units in the last place from the exact result.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from together import together
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mpinspect.runtime.emulation import blocks, half_arithmetic

HALVES = [torch.float16, torch.bfloat16]


def ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the largest distance in units in the last place, between 16-bit codes ordered through zero."""
    assert a.dtype == b.dtype
    assert a.dtype in HALVES
    assert a.shape == b.shape
    codes = [x.detach().contiguous().view(torch.int16).int() for x in (a, b)]
    ordered = [torch.where(code < 0, -(code & 0x7FFF), code) for code in codes]
    return int((ordered[0] - ordered[1]).abs().max())


def equal(made: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Return whether dtypes and values are equal; NaN equals NaN."""
    return all(
        a.dtype == b.dtype and torch.equal(a.nan_to_num(0.123), b.nan_to_num(0.123))
        for a, b in zip(made, expected, strict=True)
    )


def as_near_as_torchs_own(made: torch.Tensor, own: torch.Tensor, exact: torch.Tensor) -> bool:
    """Return whether a result is within one unit in the last place of torch's, or nearer to the exact FP64 result."""
    return ulps(made, own) <= 1 or bool((made - exact).square().sum() < (own - exact).square().sum())


def forward_and_gradients(function: Callable[..., Any], operands: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the result, and the operands' gradients for an upstream gradient of small integers."""
    leaves = [operand.detach().requires_grad_() for operand in operands]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream(out))]


def upstream(out: torch.Tensor) -> torch.Tensor:
    return (torch.arange(out.numel()) % 3 + 1).reshape(out.shape).to(out.dtype)


class Products(TorchDispatchMode):
    """Entered before ``half_arithmetic()``: records the name and dtype of products that reach torch's kernels."""

    NAMES = ("mm", "addmm", "bmm", "conv", "mv", "dot", "addr", "mkldnn", "attention", "encoder", "linear", "matmul")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype]] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if tensors and any(part in name for part in self.NAMES) and "choice" not in name:
            self.seen.append((name, tensors[0].dtype))
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype == torch.float32:
            self.largest = max(self.largest, made.numel())
        return made

    @property
    def dtypes(self) -> set[torch.dtype]:
        assert self.seen
        return {dtype for _, dtype in self.seen}


# -- every product ----------------------------------------------------------------------------------------------------

PRODUCTS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "mm": (torch.mm, [(5, 16), (16, 7)]),
    "addmm": (torch.addmm, [(7,), (5, 16), (16, 7)]),
    "addmm, alpha and beta": (partial(torch.addmm, beta=0.5, alpha=2), [(5, 7), (5, 16), (16, 7)]),
    "bmm": (torch.bmm, [(3, 5, 16), (3, 16, 7)]),
    "baddbmm": (torch.baddbmm, [(3, 5, 7), (3, 5, 16), (3, 16, 7)]),
    "addbmm": (torch.addbmm, [(5, 7), (3, 5, 16), (3, 16, 7)]),
    "mv": (torch.mv, [(5, 16), (16,)]),
    "addmv": (torch.addmv, [(5,), (5, 16), (16,)]),
    "addr": (torch.addr, [(5, 7), (5,), (7,)]),
    "dot": (torch.dot, [(33,), (33,)]),
    "vdot": (torch.vdot, [(33,), (33,)]),
    "outer": (torch.outer, [(5,), (7,)]),
    "vecdot": (torch.linalg.vecdot, [(3, 9), (3, 9)]),
    "matmul": (torch.matmul, [(2, 3, 5, 16), (16, 7)]),
    "linear": (F.linear, [(2, 5, 16), (7, 16), (7,)]),
    "einsum": (lambda a, b: torch.einsum("bij,kjl->bikl", a, b), [(2, 3, 4), (5, 4, 2)]),
    "tensordot": (partial(torch.tensordot, dims=2), [(3, 4, 5), (4, 5, 2)]),
    "multi_dot": (lambda *operands: torch.linalg.multi_dot(operands), [(3, 8), (8, 4), (4, 9)]),
    "bilinear": (F.bilinear, [(5, 3), (5, 4), (2, 3, 4), (2,)]),
    "conv1d": (F.conv1d, [(2, 3, 9), (4, 3, 3), (4,)]),
    "conv2d": (partial(F.conv2d, stride=2, padding=1), [(2, 3, 7, 7), (4, 3, 3, 3), (4,)]),
    "conv2d grouped": (partial(F.conv2d, groups=2), [(2, 4, 5, 5), (4, 2, 3, 3)]),
    "conv2d depthwise": (partial(F.conv2d, groups=4), [(2, 4, 5, 5), (4, 1, 3, 3)]),
    "conv2d dilated": (partial(F.conv2d, dilation=2), [(2, 4, 7, 7), (3, 4, 3, 3)]),
    "conv3d": (F.conv3d, [(2, 3, 5, 5, 5), (4, 3, 3, 3, 3), (4,)]),
    "conv_transpose1d": (F.conv_transpose1d, [(2, 3, 4), (3, 2, 3), (2,)]),
    "conv_transpose2d": (F.conv_transpose2d, [(2, 3, 4, 4), (3, 2, 3, 3), (2,)]),
    "conv_transpose3d": (F.conv_transpose3d, [(2, 3, 3, 3, 3), (3, 2, 2, 2, 2), (2,)]),
    "conv_tbc": (torch.conv_tbc, [(5, 2, 3), (3, 3, 4), (4,)]),
}

#: torch's own kernels round these between their sums: they are compared with the exact result only.
ROUNDED_OFTEN = ("addbmm", "addr")
#: Several products one after the other, each rounded, or elementwise products rounded before they are summed, as on CUDA.
CHAINS = ("multi_dot", "conv_tbc", "bilinear", "outer", "vecdot")


def drawn(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for shape in PRODUCTS[name][1]]


def whole_numbers(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randint(-2, 3, shape).to(dtype) for shape in PRODUCTS[name][1]]


@pytest.mark.parametrize("dtype", HALVES, ids=["FP16", "BF16"])
@pytest.mark.parametrize("name", [name for name in PRODUCTS if name not in ROUNDED_OFTEN])
def test_products_and_their_gradients_are_as_near_as_torchs_own(name, dtype):
    """Both sum in FP32 but in different orders, so results may differ by one rounding."""
    function, operands = PRODUCTS[name][0], drawn(name, dtype)
    own = forward_and_gradients(function, operands)
    exact = forward_and_gradients(function, [operand.double() for operand in operands])
    with half_arithmetic():
        made = forward_and_gradients(function, operands)
    for one, other, right in zip(made, own, exact, strict=True):
        assert as_near_as_torchs_own(one, other, right)


@pytest.mark.parametrize("dtype", HALVES, ids=["FP16", "BF16"])
@pytest.mark.parametrize("name", [name for name in PRODUCTS if name not in CHAINS])
def test_products_and_their_gradients_are_within_one_ulp_of_the_exact_result(name, dtype):
    """A product is rounded once, so it equals the rounded FP64 result."""
    function, operands = PRODUCTS[name][0], drawn(name, dtype)
    exact = forward_and_gradients(function, [operand.double() for operand in operands])
    with half_arithmetic():
        made = forward_and_gradients(function, operands)
    for one, other in zip(made, exact, strict=True):
        assert ulps(one, other.to(dtype)) <= 1


@pytest.mark.parametrize("dtype", HALVES, ids=["FP16", "BF16"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_whole_numbers_are_exact(name, dtype):
    """Sums of these integers fit FP32's 24 bits, so the order of summation does not matter and all bits are equal."""
    function, operands = PRODUCTS[name][0], whole_numbers(name, dtype)
    exact = [one.to(dtype) for one in forward_and_gradients(function, [operand.double() for operand in operands])]
    with half_arithmetic():
        made = forward_and_gradients(function, operands)
    if name in CHAINS and dtype == torch.bfloat16:
        # Chains round in between, where BF16's 8 bits do not hold these whole numbers.
        own = forward_and_gradients(function, operands)
        assert all(ulps(one, other) <= 1 for one, other in zip(made, own, strict=True))
    else:
        assert equal(made, exact)


@pytest.mark.parametrize("name", PRODUCTS)
def test_no_16_bit_product_is_left_to_torch(name):
    function, operands = PRODUCTS[name][0], drawn(name, torch.float16)
    for context in (torch.no_grad, torch.inference_mode):
        with Products() as inside, half_arithmetic(), context():
            within = function(*operands)
        with half_arithmetic():
            expected = function(*operands)
        assert torch.equal(within, expected)
        if name not in ("bilinear", "outer", "vecdot"):  # elementwise products, no matrix product
            assert inside.dtypes == {torch.float32}


def test_sums_are_in_fp32_and_the_result_is_rounded():
    ones = torch.ones(1, 4097)
    with half_arithmetic():
        # Summed in FP16 this would stop at 2048, in BF16 at 256.
        assert torch.mm(ones.half(), ones.half().t()).item() == 4096
        assert torch.mm(ones.bfloat16(), ones.bfloat16().t()).item() == 4096
        assert torch.isinf(torch.mm(torch.full((1, 2), 256.0).half(), torch.full((2, 1), 256.0).half())).all()
        assert torch.mm(torch.full((1, 1), 2.0**-13).half(), torch.full((1, 1), 2.0**-12).half()).item() == 0
        # CPUs' BF16 instructions treat subnormal operands as zero; Tensor Cores do not.
        subnormal, large = torch.full((64, 64), 2.0**-130).bfloat16(), torch.full((64, 64), 2.0**100).bfloat16()
        assert (torch.mm(subnormal, large) == 2.0**-24).all()


def test_a_gradient_that_enters_a_product_is_rounded_there():
    """FP32 logits' gradients flush where they enter the FP16 product: here 2^-26, summed over 64 rows."""
    layer = nn.Linear(4, 4)
    with half_arithmetic():
        with torch.autocast("cpu", torch.float16):
            out = layer(torch.ones(64, 4))
        (out.float() * 2.0**-26).sum().backward()
    assert (layer.weight.grad == 0).all()
    assert (layer.bias.grad == 0).all()


# -- large products in parts --------------------------------------------------------------------------------------------


@pytest.fixture(params=["one thread", "threads of ours", "threads of torch's"])
def small_parts(request, monkeypatch) -> Iterator[None]:
    """Parts of 64 values, on each way to share them."""
    before = torch.get_num_threads()
    monkeypatch.setattr(blocks, "PART", 64)
    if request.param == "threads of torch's":
        monkeypatch.setattr(blocks, "MOST_THREADS", 0)
    torch.set_num_threads(1 if request.param == "one thread" else 3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("layout", ["rows, rows", "rows, columns", "columns, rows", "columns, columns"])
@pytest.mark.parametrize(
    "shape", [(3, 5, 200), (200, 5, 3), (3, 200, 5), (60, 70, 3), (3, 70, 60), (60, 3, 70), (1, 300, 1), (2, 9000, 1)]
)
def test_parts_make_the_same_product(shape, layout, small_parts):
    m, k, n = shape
    columns = [side == "columns" for side in layout.split(", ")]
    a, b = (
        (torch.randint(-3, 4, size[::-1]).half().t() if by_columns else torch.randint(-3, 4, size).half())
        for size, by_columns in zip([(m, k), (k, n)], columns, strict=True)
    )
    for bias in (None, torch.randint(-3, 4, (n,)).half()):
        made = blocks.product(a, b, bias)
        expected = a.double() @ b.double() + (0 if bias is None else bias.double())
        assert torch.equal(made, expected.half())
        assert made.is_contiguous()


def test_parts_give_the_same_bits_each_time(small_parts):
    for shape in [(20, 500, 3), (500, 20, 30), (3, 500, 20)]:
        a, b = torch.randn(shape[:2]).half(), torch.randn(shape[1:]).half()
        for left, right in ((a, b), (a.t().contiguous().t(), b.t().contiguous().t())):
            first = blocks.product(left, right)
            assert all(torch.equal(blocks.product(left, right), first) for _ in range(5))


def test_parts_with_and_without_autograd(small_parts):
    layer, x = nn.Linear(20, 30), torch.randint(-3, 4, (50, 20)).half()
    layer.half()
    with half_arithmetic():
        made = layer(x)
        made.backward(torch.ones_like(made))
        assert made.requires_grad
        assert torch.equal(layer.weight.grad, x.double().sum(0).half().expand(30, 20))
        with torch.no_grad():
            assert torch.equal(layer(x), made)
        with torch.inference_mode():
            inferred = layer(x)
        assert inferred.is_inference()
        assert torch.equal(inferred, made)
        assert not inferred.requires_grad


def test_an_error_in_a_part_is_raised(small_parts):
    def fail(taken: Any) -> None:
        for _ in taken:
            raise RuntimeError("on purpose")

    threads = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="on purpose"):
        blocks._share(fail, range(5))
    assert torch.get_num_threads() == threads


def test_parts_bound_the_memory(monkeypatch):
    """No FP32 tensor is larger than the small operand or two parts."""
    monkeypatch.setattr(blocks, "PART", 2**10)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # a dispatch mode sees its own thread only
    try:
        layer, x = nn.Linear(64, 512).half(), torch.randn(1024, 64).half()
        with Products() as inside, half_arithmetic():
            layer(x).sum().backward()
    finally:
        torch.set_num_threads(before)
    assert inside.dtypes == {torch.float32}
    assert inside.largest <= 64 * 1024


# -- attention ------------------------------------------------------------------------------------------------------------

ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.5},
    "bool mask": {"attn_mask": torch.ones(9, 9).tril().bool()},
    "float mask": {"attn_mask": -torch.arange(9.0).expand(9, 9) / 8},
}


def attention(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    options = dict(ATTENTION[name])
    if name == "float mask":  # of another dtype than the query's, torch's kernel reads the mask's memory as the query's
        options["attn_mask"] = options["attn_mask"].to(dtype)
    return partial(F.scaled_dot_product_attention, **options)


def drawn_heads(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 2, 9, 8).abs().to(dtype) for _ in range(3)]


def rounding_bounds(name: str, operands: list[torch.Tensor], u: float) -> list[torch.Tensor]:
    """Return the bound on the errors of the gradients of query and key, if the output is saved rounded to ``u``.

    Both depend on the difference P * (dP - D), where D holds the row sums of upstream gradient times output. D's error is up to
    u times the sum of the magnitudes. P, dP and all other terms are in FP32. The last rounding adds u of the result.
    """
    query, key, value = operands
    options = attention(name, torch.float64).keywords
    scale = options.get("scale", key.shape[-1] ** -0.5)
    scores = scale * query @ key.mT
    if name in ("causal", "bool mask"):
        scores = scores.masked_fill(~ATTENTION["bool mask"]["attn_mask"], -torch.inf)
    elif name == "float mask":
        scores = scores + options["attn_mask"]
    weights = scores.softmax(-1)
    out = weights @ value
    sums = (upstream(out).abs() * out.abs()).sum(-1, keepdim=True)
    return [u * scale * weights @ key.abs() * sums, u * scale * weights.mT @ (sums * query.abs())]


@pytest.mark.parametrize("dtype", HALVES, ids=["FP16", "BF16"])
@pytest.mark.parametrize("name", ATTENTION)
def test_the_error_of_attention_is_at_most_torchs_or_its_roundings_where_values_cancel(name, dtype):
    """The output and the value's gradient are sums of positive terms, so they are within one unit in the last place of the
    exact result, and nearer to it than torch's kernel, which also rounds the weights. The gradients of query and key are
    differences of nearly equal terms, so their errors are compared with the bound of the one rounding."""
    operands = drawn_heads(dtype)
    own = forward_and_gradients(attention(name, dtype), operands)
    with half_arithmetic():
        made = forward_and_gradients(attention(name, dtype), operands)
    doubles = [operand.double() for operand in operands]
    exact = forward_and_gradients(attention(name, torch.float64), doubles)
    for place in (0, 3):
        assert ulps(made[place], exact[place].to(dtype)) <= 1
        assert (made[place] - exact[place]).square().sum() <= (own[place] - exact[place]).square().sum()
    u = torch.finfo(dtype).eps / 2
    for gradient, right, bound in zip(made[1:3], exact[1:3], rounding_bounds(name, doubles, u), strict=True):
        # FP32's own roundings, 2^-24 each, a few dozen of them.
        assert ((gradient - right).abs() <= bound * (1 + 2.0**-6) + u * right.abs() + 2.0**-18).all()


@pytest.mark.parametrize("zero", ["query", "key"])
def test_attention_of_whole_numbers_is_exact(zero):
    """All scores 0, eight keys: every weight is 1/8, and every sum is exact. Equal to torch's own in every bit."""
    operands = [torch.randint(-3, 4, (1, 2, 8, 16)).half() for _ in range(3)]
    operands[["query", "key"].index(zero)].zero_()
    with half_arithmetic():
        made = forward_and_gradients(F.scaled_dot_product_attention, operands)
    assert equal(made, forward_and_gradients(F.scaled_dot_product_attention, operands))
    exact = forward_and_gradients(F.scaled_dot_product_attention, [operand.double() for operand in operands])
    assert equal(made, [one.half() for one in exact])


def test_attention_saves_no_scores():
    """As in CUDA's flash kernel: 16-bit query, key, value and output, and one FP32 number per row are saved."""
    heads = [torch.randn(1, 2, 64, 8).half().requires_grad_() for _ in range(3)]
    with half_arithmetic(), kept() as saved:
        F.scaled_dot_product_attention(*heads)
    assert sorted((str(one.dtype), one.numel()) for one in saved) == sorted(
        [("torch.float16", 2 * 64 * 8)] * 4 + [("torch.float32", 2 * 64)]
    )


def test_attention_where_the_flash_kernel_does_not_serve():
    """Dropout, trained masks and an explicit request use the plain implementation, which has second derivatives."""
    heads = [torch.randn(1, 2, 8, 8).half().requires_grad_() for _ in range(3)]
    mask = torch.zeros(8, 8).half().requires_grad_()
    with Products() as inside, half_arithmetic():
        out = F.scaled_dot_product_attention(*heads, attn_mask=mask, dropout_p=0.5)
        out.sum().backward()
        assert mask.grad.dtype == out.dtype == torch.float16
        with sdpa_kernel(SDPBackend.MATH):
            (slope,) = torch.autograd.grad(F.scaled_dot_product_attention(*heads).sum(), heads[0], create_graph=True)
            slope.square().sum().backward()
    assert inside.dtypes == {torch.float32}
    assert heads[1].grad.isfinite().all()


# -- layers ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=["FP16", "BF16"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_layers_are_as_torchs_own(kind, dtype, monkeypatch):
    """Within one unit in the last place of torch's plain 16-bit layers, forward and backward. oneDNN may lack FP16."""
    layer = kind(8, 6).to(dtype)
    x = torch.randn(3, 8).to(dtype) if "Cell" in kind.__name__ else torch.randn(5, 3, 8).to(dtype)

    def run() -> list[torch.Tensor]:
        def call(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
            names = [name for name, _ in layer.named_parameters()]
            out = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))
            return out[0] if isinstance(out, tuple) else out

        return forward_and_gradients(call, [x, *layer.parameters()])

    with Products() as inside, half_arithmetic():
        made = run()
    assert inside.dtypes == {torch.float32}
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    own = run()
    for one, other in zip(made, own, strict=True):
        assert ulps(one, other) <= 1


def recurrent(kind: type[nn.Module]) -> Any:
    return kind(8, 8), torch.randn(4, 5, 8), lambda m, x: m(x)[0]


BLOCKS = {
    "LSTM": lambda: recurrent(nn.LSTM),
    "GRU": lambda: recurrent(nn.GRU),
    "attention": lambda: (nn.MultiheadAttention(8, 2), torch.randn(4, 5, 8), lambda m, x: m(x, x, x)[0]),
    "encoder": lambda: (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), torch.randn(4, 5, 8), lambda m, x: m(x)),
    "conv": lambda: (nn.Conv2d(1, 3, 3), torch.randn(2, 1, 6, 6), lambda m, x: m(x)),
}


@pytest.mark.parametrize("dtype", HALVES, ids=["FP16", "BF16"])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_layers_run_forward_and_backward_close_to_fp32(name, dtype):
    model, x, call = BLOCKS[name]()
    call(model, x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with half_arithmetic():
        with torch.autocast("cpu", dtype):
            loss = call(model, x).square().sum()
        loss.backward()
    largest = max(gradient.abs().max() for gradient in expected)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        # A few roundings of half an eps each, relative to the largest terms of the sums.
        assert (parameter.grad - gradient).abs().max() < 8 * torch.finfo(dtype).eps * largest
        assert not torch.equal(parameter.grad, gradient)


FAST_PATHS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, torch.Tensor], torch.Tensor]]] = {
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda m, x: m(x, x, x, need_weights=False)[0],
    ),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), lambda m, x: m(x)),
}


@pytest.mark.parametrize("dtype", HALVES, ids=["FP16", "BF16"])
@pytest.mark.parametrize("name", FAST_PATHS)
def test_the_fast_path_of_evaluation_is_emulated_too(name, dtype):
    """One operation for the whole layer, whose products are inside."""
    make, call = FAST_PATHS[name]
    exact, x = make().eval(), torch.randn(4, 5, 8)
    model = copy.deepcopy(exact).to(dtype)
    for context in (torch.no_grad, torch.inference_mode):
        with Products() as inside, half_arithmetic(), context():
            made = call(model, x.to(dtype))
        assert inside.dtypes == {torch.float32}
        with torch.no_grad():
            assert (made - call(exact, x)).abs().max() < 8 * torch.finfo(dtype).eps


def test_a_model_stored_in_half_precision_with_normalisation():
    """Outside autocast normalisation runs torch's own 16-bit kernels, products the emulation."""
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8)
    )
    x = torch.randn(3, 2, 6, 6)
    expected = model(x)
    half = copy.deepcopy(model).half()
    with Products() as inside, half_arithmetic():
        with torch.autocast("cpu", torch.float16, enabled=False):
            out = half(x.half())
        out.float().square().sum().backward()
    assert inside.dtypes == {torch.float32}
    assert (out - expected).abs().max() < 2.0**-7
    assert all(parameter.grad.dtype == torch.float16 for parameter in half.parameters())


# -- with the rest of torch --------------------------------------------------------------------------------------------


@contextmanager
def kept() -> Iterator[list[torch.Tensor]]:
    """Yield the tensors that autograd saves for the backward."""
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        yield saved


def small_network() -> nn.Sequential:
    """For images of shape (n, 2, 8, 8)."""
    torch.manual_seed(0)
    convolutions = (nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Tanh())
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 3))


def test_saved_activations_take_half_of_the_bytes():
    batch = 7  # no layer's width

    def activations(half: bool) -> int:
        model, x = small_network(), torch.randn(batch, 2, 8, 8)
        with half_arithmetic(), torch.autocast("cpu", torch.float16, enabled=half), kept() as saved:
            model(x)
        return sum(one.nbytes for one in saved if one.dim() and one.shape[0] == batch)

    assert activations(half=True) == activations(half=False) / 2 > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_gradient(reentrant):
    def gradients(checkpointed: bool) -> list[torch.Tensor]:
        model = small_network()
        x = torch.randn(3, 2, 8, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
        with half_arithmetic():
            with torch.autocast("cpu", torch.float16):
                out = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
                loss = out.softmax(1).square().sum()
            loss.backward()
        return [x.grad, *(parameter.grad for parameter in model.parameters())]

    assert equal(gradients(True), gradients(False))


def test_second_derivatives_of_whole_numbers_are_exact():
    """A gradient penalty through a convolution and a matrix product."""
    operands = [torch.randint(-1, 2, shape) for shape in [(2, 1, 4, 4), (2, 1, 3, 3), (8, 3)]]

    def penalty(dtype: torch.dtype) -> list[torch.Tensor]:
        x, kernel, matrix = (operand.to(dtype).requires_grad_() for operand in operands)
        out = F.conv2d(x, kernel).flatten(1) @ matrix
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(slope.sum(), [kernel, matrix]))

    with Products() as inside, half_arithmetic():
        made = penalty(torch.float16)
    assert inside.dtypes == {torch.float32}
    exact = penalty(torch.float64)
    assert max(one.abs().max() for one in exact) <= 2048
    assert equal(made, [one.half() for one in exact])


def test_a_compiled_function_runs_inside():
    torch._dynamo.reset()
    model, x = small_network(), torch.randn(3, 2, 8, 8)
    compiled = torch.compile(model, backend="eager")
    with torch.autocast("cpu", torch.float16):
        compiled(x)
        with half_arithmetic():
            expected = model(x)
            assert torch.equal(compiled(x), expected)
            assert torch.equal(torch.compile(copy.deepcopy(model), backend="eager")(x), expected)


def test_distributed_data_parallel_and_its_compression_hook(one_rank):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    x = torch.randn(3, 2, 8, 8)

    def gradients(wrap: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        model = small_network()
        wrapped = wrap(model)
        with half_arithmetic():
            with torch.autocast("cpu", torch.float16):
                loss = wrapped(x).square().sum()
            loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    def parallel(model: nn.Module) -> nn.Module:
        wrapped = nn.parallel.DistributedDataParallel(model)
        wrapped.register_comm_hook(None, fp16_compress_hook)
        return wrapped

    assert equal(gradients(parallel), gradients(lambda model: model))


def test_layouts_make_no_difference():
    model = nn.Conv2d(4, 4, 3).half()
    x = torch.randn(2, 4, 6, 6).half()
    with half_arithmetic():
        expected = model(x)
        last = copy.deepcopy(model).to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
        assert last.is_contiguous(memory_format=torch.channels_last)
        assert ulps(last, expected) <= 1
        a, b = torch.randint(-9, 9, (12, 10)).half(), torch.randint(-9, 9, (10, 8)).half()
        assert torch.equal(a[::2, 1::3] @ b[:3, ::2], a[::2, 1::3].contiguous() @ b[:3, ::2].contiguous())
        assert torch.equal(a[:, :1].expand(12, 10) @ b, a[:, :1].repeat(1, 10) @ b)


@pytest.mark.parametrize("dtype", HALVES, ids=["FP16", "BF16"])
def test_out_and_in_place_variants(dtype):
    a, b, c = (torch.randn(shape).to(dtype) for shape in [(4, 5), (5, 3), (4, 3)])
    with Products() as inside, half_arithmetic():
        product, total = a @ b, torch.addmm(c, a, b)
        out = torch.empty(4, 3, dtype=dtype)
        assert torch.mm(a, b, out=out) is out
        assert torch.equal(out, product)
        columns = torch.empty(3, 4, dtype=dtype).t()
        assert torch.addmm(c, a, b, out=columns) is columns
        assert torch.equal(columns, total)
        assert torch.equal(torch.bmm(a[None], b[None], out=torch.empty(0, dtype=dtype))[0], product)
        place = c.clone()
        assert place.addmm_(a, b) is place
        assert torch.equal(place, total)
        assert torch.equal(c.clone()[None].baddbmm_(a[None], b[None], beta=0)[0], product)
        assert torch.equal(torch.zeros(4, dtype=dtype).addmv_(a, b[:, 0]), (a @ b[:, 0]))
        square = torch.eye(3).to(dtype)
        assert torch.equal(torch.mm(square, square, out=square), torch.eye(3).to(dtype))
    assert inside.dtypes == {torch.float32}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: torch.mm(torch.ones(2, 3).half(), torch.ones(3, 2)), "same dtype"),
        (lambda: torch.mm(torch.ones(2, 3).half(), torch.ones(3, 2).bfloat16()), "same dtype"),
        (lambda: torch.mm(torch.ones(2, 3).half(), torch.ones(2, 3).half()), "cannot be multiplied"),
        (lambda: torch.mm(torch.ones(2).half(), torch.ones(2).half()), "must be a matrix"),
        (lambda: torch.addmm(torch.ones(5).half(), torch.ones(2, 3).half(), torch.ones(3, 2).half()), "expand"),
        (lambda: torch.ones(5).half().addmm_(torch.ones(2, 3).half(), torch.ones(3, 2).half()), "expand|output"),
        (lambda: F.conv2d(torch.ones(1, 1, 3, 3).half(), torch.ones(1, 1, 2, 2)), "type"),
        (lambda: torch.mm(torch.ones(2, 3).half(), torch.ones(3, 2).half(), out=torch.empty(2, 2)), "dtype"),
    ],
)
def test_operations_that_torch_refuses_are_refused(call, message):
    with half_arithmetic(), pytest.raises(RuntimeError, match=message):
        call()


def test_empty_tensors():
    with half_arithmetic():
        assert torch.mm(torch.ones(0, 3).half(), torch.ones(3, 2).half()).shape == (0, 2)
        assert torch.equal(torch.mm(torch.ones(2, 0).half(), torch.ones(0, 2).half()), torch.zeros(2, 2).half())
        assert torch.equal(
            F.linear(torch.ones(2, 0).half(), torch.ones(2, 0).half(), torch.ones(2).half()), torch.ones(2, 2).half()
        )
        assert torch.bmm(torch.ones(0, 2, 3).half(), torch.ones(0, 3, 2).half()).shape == (0, 2, 2)
        assert F.conv2d(torch.ones(0, 1, 4, 4).half(), torch.ones(2, 1, 3, 3).half()).shape == (0, 2, 2, 2)


def test_other_tensors_are_not_changed():
    a, b = torch.randn(5, 16), torch.randn(16, 7)
    with Products() as inside, half_arithmetic():
        products = [a @ b, a.double() @ b.double(), (a * 9).long() @ (b * 9).long(), a.cfloat() @ b.cfloat()]
        assert torch.mm(a.to("meta").half(), b.to("meta").half()).device.type == "meta"
    assert [dtype for _, dtype in inside.seen][:4] == [torch.float32, torch.float64, torch.int64, torch.complex64]
    expected = [a @ b, a.double() @ b.double(), (a * 9).long() @ (b * 9).long(), a.cfloat() @ b.cfloat()]
    assert equal(products, expected)
    assert ("mm", torch.float16) in inside.seen  # the meta tensors' product: only its shape is computed


def test_foreach_operations_and_copies():
    model = small_network().half()
    with half_arithmetic():
        clone = copy.deepcopy(model)
        sums = torch._foreach_add(list(model.parameters()), list(clone.parameters()))
        norms = torch._foreach_norm(list(model.parameters()))
    assert equal(sums, [2 * parameter for parameter in model.parameters()])
    assert all(norm.dtype == torch.float16 for norm in norms)


# -- the context -----------------------------------------------------------------------------------------------------


def settings() -> tuple[Any, ...]:
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        torch.backends.mkldnn.enabled,
        torch.backends.mkldnn.deterministic,
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_num_threads(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
    )


def emulated() -> bool:
    """Return whether this thread is inside the context, by a product and by a function of CUDA's lists."""
    with Products() as seen:
        pass
    assert seen.seen == []
    with torch.autocast("cpu", torch.float16):
        return torch.ones(2).half().exp().dtype == torch.float32


def test_every_setting_is_as_before_also_after_an_error():
    before = settings()

    def fail() -> None:
        with half_arithmetic(), torch.autocast("cpu", torch.float16):
            nn.LSTM(4, 4)(torch.randn(2, 3, 4))
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    with half_arithmetic(), pytest.raises(RuntimeError):
        torch.lstm(torch.ones(2, 3).half(), (), (), True, 1, 0.0, True, False, False)
    assert settings() == before
    assert not emulated()


def test_emulation_nests():
    a, b = torch.randn(4, 5).half(), torch.randn(5, 3).half()
    with half_arithmetic():
        once = a @ b
        with half_arithmetic():
            assert emulated()
            assert torch.equal(a @ b, once)
        assert emulated()
        with Products() as inner:
            a @ b
        assert inner.dtypes == {torch.float16}  # entered inside: receives the original product
    assert not emulated()


def test_other_threads_are_not_changed():
    seen: list[bool] = []

    def look() -> None:
        seen.append(emulated())
        with half_arithmetic():
            seen.append(emulated())
        seen.append(emulated())

    with half_arithmetic():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert emulated()
    assert seen == [False, True, False]


def test_threads_that_run_recurrent_layers_restore_onednn():
    before = torch.backends.mkldnn.enabled

    def train(_: int) -> None:
        layer = nn.LSTM(4, 4).half()
        for _ in range(10):
            with half_arithmetic():
                layer(torch.randn(3, 2, 4).half())[0].sum().backward()

    together(3, train)
    assert torch.backends.mkldnn.enabled == before


class Scaled(torch.Tensor):
    """A tensor of 16-bit values and a scale, which multiplies them itself, as torchao's FP8 tensors do."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)  # type: ignore[attr-defined]
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.mm.default
        return torch.mm(*(arg.values if isinstance(arg, cls) else arg for arg in args)) * 2


def test_a_subclass_computes_its_products_by_plain_ones_that_are_emulated():
    a, b = (torch.randn(*shape).half() for shape in ((5, 16), (16, 7)))
    products = Products()
    with products, half_arithmetic():
        found = torch.mm(Scaled(a), b)
    assert products.dtypes == {torch.float32}
    assert torch.equal(found, (a.float() @ b.float()).half() * 2)
