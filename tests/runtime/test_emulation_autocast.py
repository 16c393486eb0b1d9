"""Under autocast a CPU has CUDA's lists inside ``half_arithmetic()``: every operation of them, by name.

The oracle is CUDA's own autocast, run on fake CUDA tensors: they have shapes and dtypes, and need no GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from mpinspect.runtime.emulation import half_arithmetic


class Tensors:
    """Makes the operands of a case: h is FP16 (or BF16), f is FP32, both between 1/4 and 3/4.

    With ``exact`` h holds the same rounded values in FP32.
    """

    def __init__(self, device: str, dtype: torch.dtype, exact: bool = False) -> None:
        self.device, self.dtype, self.exact = device, dtype, exact

    def h(self, *shape: int) -> torch.Tensor:
        rounded = self.f(*shape).to(self.dtype)
        return rounded.float() if self.exact else rounded

    def f(self, *shape: int) -> torch.Tensor:
        return torch.linspace(0.25, 0.75, max(1, torch.Size(shape).numel()), device=self.device).reshape(shape)

    def i(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device)


def pointwise(name: str, t: Tensors) -> torch.Tensor:
    return getattr(t.h(2, 3), name)()


#: Every name of CUDA's lists, with a call that reaches it. Operands are 16-bit for CUDA's list of FP32, FP32 for its list of
#: FP16, and mixed for its list of the widest type.
CASES: dict[str, Callable[[Tensors], Any]] = {
    # -- FP16
    "_convolution": lambda t: torch._convolution(
        t.f(1, 2, 4, 4), t.f(3, 2, 2, 2), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, True, True
    ),
    "_convolution.deprecated": lambda t: torch._convolution(
        t.f(1, 2, 4, 4), t.f(3, 2, 2, 2), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, True
    ),
    "convolution": lambda t: torch.convolution(
        t.f(1, 2, 4, 4), t.f(3, 2, 2, 2), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    ),
    "conv1d": lambda t: F.conv1d(t.f(1, 2, 4), t.f(3, 2, 2)),
    "conv2d": lambda t: F.conv2d(t.f(1, 2, 4, 4), t.f(3, 2, 2, 2)),
    "conv3d": lambda t: F.conv3d(t.f(1, 2, 4, 4, 4), t.f(3, 2, 2, 2, 2)),
    "conv_tbc": lambda t: torch.conv_tbc(t.f(4, 1, 2), t.f(2, 2, 3), t.f(3)),
    "conv_transpose1d": lambda t: F.conv_transpose1d(t.f(1, 2, 4), t.f(2, 3, 2)),
    "conv_transpose2d.input": lambda t: F.conv_transpose2d(t.f(1, 2, 4, 4), t.f(2, 3, 2, 2)),
    "conv_transpose3d.input": lambda t: F.conv_transpose3d(t.f(1, 2, 4, 4, 4), t.f(2, 3, 2, 2, 2)),
    "prelu": lambda t: F.prelu(t.f(2, 3), t.f(3)),
    "addmm": lambda t: torch.addmm(t.f(4), t.f(2, 3), t.f(3, 4)),
    "addmv": lambda t: torch.addmv(t.f(2), t.f(2, 3), t.f(3)),
    "addr": lambda t: torch.addr(t.f(2, 3), t.f(2), t.f(3)),
    "matmul": lambda t: t.f(2, 2, 3) @ t.f(3, 4),
    "einsum": lambda t: torch.einsum("bij,bjk->bik", t.f(2, 2, 3), t.f(2, 3, 4)),
    "mm": lambda t: torch.mm(t.f(2, 3), t.f(3, 4)),
    "mv": lambda t: t.f(2, 3).mv(t.f(3)),
    "linalg_vecdot": lambda t: torch.linalg.vecdot(t.f(2, 3), t.f(2, 3)),
    "linear": lambda t: F.linear(t.f(2, 2, 3), t.f(4, 3)),
    "addbmm": lambda t: torch.addbmm(t.f(2, 4), t.f(2, 2, 3), t.f(2, 3, 4)),
    "baddbmm": lambda t: torch.baddbmm(t.f(2, 2, 4), t.f(2, 2, 3), t.f(2, 3, 4)),
    "bmm": lambda t: torch.bmm(t.f(2, 2, 3), t.f(2, 3, 4)),
    "chain_matmul": lambda t: torch.ops.aten.chain_matmul([t.f(2, 3), t.f(3, 4), t.f(4, 2)]),
    "linalg_multi_dot": lambda t: torch.linalg.multi_dot([t.f(2, 3), t.f(3, 4), t.f(4, 2)]),
    "rnn_tanh_cell": lambda t: torch._VF.rnn_tanh_cell(t.f(2, 3), t.f(2, 4), t.f(4, 3), t.f(4, 4)),
    "rnn_relu_cell": lambda t: torch._VF.rnn_relu_cell(t.f(2, 3), t.f(2, 4), t.f(4, 3), t.f(4, 4)),
    "scaled_dot_product_attention": lambda t: F.scaled_dot_product_attention(
        t.f(1, 2, 4, 8), t.f(1, 2, 4, 8), t.f(1, 2, 4, 8)
    ),
    # -- FP32
    **{
        name: partial(pointwise, name)
        for name in (
            *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p"),
            *("reciprocal", "rsqrt", "sinh", "tan"),
        )
    },
    "pow.Tensor_Scalar": lambda t: t.h(2) ** 2,
    "pow.Tensor_Tensor": lambda t: torch.pow(t.h(2), t.h(2)),
    "pow.Scalar": lambda t: 2 ** t.h(2),
    "softplus": lambda t: F.softplus(t.h(2)),
    "layer_norm": lambda t: F.layer_norm(t.h(2, 3), (3,), t.h(3), t.f(3)),
    "native_layer_norm": lambda t: torch.native_layer_norm(t.h(2, 3), (3,), None, None, 1e-5)[0],
    "rms_norm": lambda t: F.rms_norm(t.h(2, 3), (3,), t.h(3)),
    "group_norm": lambda t: F.group_norm(t.h(2, 4), 2, t.f(4), t.f(4)),
    "norm.Scalar": lambda t: torch.ops.aten.norm(t.h(2, 3)),
    "norm.ScalarOpt_dim": lambda t: torch.ops.aten.norm(t.h(2, 3), 2, [1]),
    "frobenius_norm.dim": lambda t: torch.frobenius_norm(t.h(2, 3), 1),
    "nuclear_norm": lambda t: torch.nuclear_norm(t.h(3, 3)),
    "nuclear_norm.dim": lambda t: torch.nuclear_norm(t.h(3, 3), (0, 1)),
    "cosine_similarity": lambda t: F.cosine_similarity(t.h(2, 3), t.h(2, 3)),
    "poisson_nll_loss": lambda t: F.poisson_nll_loss(t.h(3), t.h(3)),
    "cosine_embedding_loss": lambda t: F.cosine_embedding_loss(t.h(2, 3), t.h(2, 3), t.h(2)),
    "nll_loss": lambda t: torch.ops.aten.nll_loss(t.h(2, 3), t.i(2)),
    "nll_loss2d": lambda t: torch.ops.aten.nll_loss2d(t.h(1, 3, 2, 2), t.i(1, 2, 2)),
    "hinge_embedding_loss": lambda t: F.hinge_embedding_loss(t.h(3), t.h(3)),
    "kl_div": lambda t: F.kl_div(t.h(2, 3), t.h(2, 3), reduction="sum"),
    "l1_loss": lambda t: F.l1_loss(t.h(3), t.h(3)),
    "smooth_l1_loss": lambda t: F.smooth_l1_loss(t.h(3), t.h(3)),
    "huber_loss": lambda t: F.huber_loss(t.h(3), t.h(3)),
    "mse_loss": lambda t: F.mse_loss(t.h(3), t.h(3)),
    "margin_ranking_loss": lambda t: F.margin_ranking_loss(t.h(3), t.h(3), t.h(3)),
    "multilabel_margin_loss": lambda t: F.multilabel_margin_loss(t.h(2, 3), t.i(2, 3)),
    "soft_margin_loss": lambda t: F.soft_margin_loss(t.h(3), t.h(3)),
    "triplet_margin_loss": lambda t: F.triplet_margin_loss(t.h(2, 3), t.h(2, 3), t.h(2, 3)),
    "multi_margin_loss": lambda t: F.multi_margin_loss(t.h(2, 3), t.i(2)),
    "binary_cross_entropy_with_logits": lambda t: F.binary_cross_entropy_with_logits(t.h(3), t.h(3)),
    "linalg_matrix_sqrth": lambda t: torch.ops.aten.linalg_matrix_sqrth(torch.diag(t.h(3).abs() + 1)),
    "dist": lambda t: torch.dist(t.h(3), t.h(3)),
    "pdist": lambda t: F.pdist(t.h(3, 4)),
    "cdist": lambda t: torch.cdist(t.h(2, 3), t.h(2, 3)),
    "renorm": lambda t: torch.renorm(t.h(2, 3), 2, 0, 1.0),
    "logsumexp": lambda t: t.h(2, 3).logsumexp(1),
    "upsample_nearest1d": lambda t: F.interpolate(t.h(1, 2, 4), scale_factor=2),
    "upsample_nearest2d": lambda t: F.interpolate(t.h(1, 2, 4, 4), scale_factor=2),
    "upsample_nearest3d": lambda t: F.interpolate(t.h(1, 2, 4, 4, 4), scale_factor=2),
    "_upsample_nearest_exact1d": lambda t: F.interpolate(t.h(1, 2, 4), scale_factor=2, mode="nearest-exact"),
    "_upsample_nearest_exact2d": lambda t: F.interpolate(t.h(1, 2, 4, 4), scale_factor=2, mode="nearest-exact"),
    "_upsample_nearest_exact3d": lambda t: F.interpolate(t.h(1, 2, 4, 4, 4), scale_factor=2, mode="nearest-exact"),
    "upsample_linear1d": lambda t: torch.ops.aten.upsample_linear1d(t.h(1, 2, 4), [8], False),
    "upsample_bilinear2d": lambda t: torch.ops.aten.upsample_bilinear2d(t.h(1, 2, 4, 4), [8, 8], False),
    "_upsample_bilinear2d_aa": lambda t: torch.ops.aten._upsample_bilinear2d_aa(t.h(1, 2, 4, 4), [8, 8], False),
    "upsample_trilinear3d": lambda t: torch.ops.aten.upsample_trilinear3d(t.h(1, 2, 4, 4, 4), [8, 8, 8], False),
    "upsample_bicubic2d": lambda t: torch.ops.aten.upsample_bicubic2d(t.h(1, 2, 4, 4), [8, 8], False),
    "_upsample_bicubic2d_aa": lambda t: torch.ops.aten._upsample_bicubic2d_aa(t.h(1, 2, 4, 4), [8, 8], False),
    # -- FP32 unless a dtype is named
    "prod": lambda t: t.h(3).prod(),
    "prod.dim_int": lambda t: t.h(2, 3).prod(1),
    "softmax.int": lambda t: F.softmax(t.h(2, 3), dim=1),
    "log_softmax.int": lambda t: t.h(2, 3).log_softmax(1),
    "cumprod": lambda t: t.h(3).cumprod(0),
    "cumsum": lambda t: torch.cumsum(t.h(3), 0),
    "linalg_vector_norm": lambda t: torch.linalg.vector_norm(t.h(2, 3)),
    "linalg_matrix_norm": lambda t: torch.linalg.matrix_norm(t.h(2, 3), 1),
    "linalg_matrix_norm.str_ord": lambda t: torch.linalg.matrix_norm(t.h(2, 3)),
    "sum": lambda t: t.h(2, 3).sum(),
    "sum.dim_IntList": lambda t: torch.sum(t.h(2, 3), 1),
    # -- the widest of the operands
    "addcdiv": lambda t: torch.addcdiv(t.h(3), t.f(3), t.h(3)),
    "addcmul": lambda t: torch.addcmul(t.h(3), t.f(3), t.h(3)),
    "atan2": lambda t: torch.atan2(t.h(3), t.f(3)),
    "bilinear": lambda t: F.bilinear(t.h(2, 3), t.h(2, 3), t.f(4, 3, 3)),
    "cross": lambda t: torch.cross(t.h(2, 3), t.f(2, 3), dim=1),
    "dot": lambda t: torch.dot(t.h(3), t.f(3)),
    "vdot": lambda t: torch.vdot(t.h(3), t.f(3)),
    "index_put": lambda t: torch.index_put(t.h(3), (t.i(2),), t.f(2)),
    "tensordot": lambda t: torch.tensordot(t.h(2, 3), t.f(3, 2), 1),
    "scatter_add": lambda t: torch.scatter_add(t.f(3), 0, t.i(2), t.h(2)),
}

#: Names in CUDA's lists that are not CPU operations, or that CUDA's autocast refuses.
ELSEWHERE = {
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "lstm_cell",  # of these two and
    "gru_cell",  # the layers the fake CUDA has no kernels: test_recurrent_layers_... below
    "_scaled_dot_product_flash_attention",
    "grid_sampler",  # the fake one wants a GPU: test_grid_sample_... below
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "_cudnn_rnn",  # from torch 2.15 on
    "binary_cross_entropy",
    # Overloads for named tensors, which versions after torch 2.6 omit.
    "cumprod.dimname",
    "cumsum.dimname",
    "log_softmax.Dimname",
    "norm.names_ScalarOpt_dim",
    "prod.dim_Dimname",
    "softmax.Dimname",
    "sum.dim_DimnameList",
}

#: Other ways to call them, other dtypes, and operations that the CPU's autocast casts but CUDA's does not.
ALSO: dict[str, Callable[[Tensors], Any]] = {
    "cross_entropy": lambda t: F.cross_entropy(t.h(2, 3), t.i(2)),
    "cross_entropy of probabilities": lambda t: F.cross_entropy(t.h(2, 3), t.h(2, 3), label_smoothing=0.1),
    "softmax, dtype named": lambda t: F.softmax(t.h(2, 3), dim=1, dtype=t.dtype),
    "softmax, FP64": lambda t: F.softmax(t.h(2, 3), dim=1, dtype=torch.float64),
    "sum, dtype named": lambda t: t.h(2, 3).sum(dtype=t.dtype),
    "sum of dim, dtype named": lambda t: t.h(2, 3).sum(1, dtype=t.dtype),
    "prod, dtype named": lambda t: t.h(2, 3).prod(dtype=t.dtype),
    "cumsum, dtype named": lambda t: t.h(3).cumsum(0, dtype=t.dtype),
    "sum of FP64": lambda t: t.f(3).double().sum(),
    "exp of FP64": lambda t: t.f(3).double().exp(),
    "sum of integers": lambda t: t.i(3).sum(),
    "softmin": lambda t: F.softmin(t.h(2, 3), dim=1),
    "normalize": lambda t: F.normalize(t.h(2, 3)),
    "torch.norm": lambda t: torch.norm(t.h(2, 3)),
    "torch.norm, dim": lambda t: t.h(2, 3).norm(1, dim=1),
    "1 / x": lambda t: 1 / t.h(3),
    "x ** x": lambda t: t.h(3) ** t.h(3),
    "in place": lambda t: t.h(3).exp_(),
    "gumbel_softmax": lambda t: F.gumbel_softmax(t.h(2, 3)),
    "atan2 of FP16": lambda t: torch.atan2(t.h(3), t.h(3)),
    "dot of FP16": lambda t: torch.dot(t.h(3), t.h(3)),
    "mm of both": lambda t: torch.mm(t.h(2, 3), t.f(3, 4)),
    "mm of FP64": lambda t: torch.mm(t.f(2, 3).double(), t.f(3, 4).double()),
    "prelu of both": lambda t: F.prelu(t.h(2, 3), t.f(1)),
    "interpolate, bilinear": lambda t: F.interpolate(t.h(1, 2, 4, 4), scale_factor=2, mode="bilinear"),
    "mean": lambda t: t.h(3).mean(),
    "var": lambda t: t.h(3).var(),
    "std": lambda t: t.h(3).std(),
    "sqrt": lambda t: t.h(3).sqrt(),
    "tanh": lambda t: t.h(3).tanh(),
    "gelu": lambda t: F.gelu(t.h(3)),
    "batch_norm": lambda t: F.batch_norm(t.h(4, 3), None, None, training=True),
    "embedding": lambda t: F.embedding(t.i(2), t.f(3, 2)),
    "add": lambda t: t.h(3) + t.f(3),
    "cat": lambda t: torch.cat([t.h(3), t.f(3)]),
    "stack of FP16": lambda t: torch.stack([t.h(3), t.h(3)]),
    "avg_pool2d": lambda t: F.avg_pool2d(t.h(1, 2, 4, 4), 2),
    "avg_pool3d": lambda t: F.avg_pool3d(t.h(1, 2, 4, 4, 4), 2),
    "adaptive_avg_pool3d": lambda t: F.adaptive_avg_pool3d(t.h(1, 2, 4, 4, 4), 2),
    "max_pool3d": lambda t: F.max_pool3d(t.h(1, 2, 4, 4, 4), 2),
    "adaptive_max_pool3d": lambda t: F.adaptive_max_pool3d(t.h(1, 2, 4, 4, 4), 2),
    "reflection_pad2d": lambda t: F.pad(t.h(1, 2, 4, 4), (1, 1, 1, 1), mode="reflect"),
    "replication_pad3d": lambda t: F.pad(t.h(1, 2, 4, 4, 4), (1, 1, 1, 1, 1, 1), mode="replicate"),
    "trace": lambda t: t.h(3, 3).trace(),
}


@contextmanager
def cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """``torch.autocast("cuda", dtype)``, which disables itself where there is no GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


#: Error messages of torch 2.6 with CUDA for operations of fake CUDA tensors that need a real GPU.
NEEDS_GPU = ("NVIDIA driver", "CUDA driver", "convolution_overrideable")


def on_cuda(case: Callable[[Tensors], Any], dtype: torch.dtype) -> torch.dtype | None:
    """Return the result's dtype under CUDA's autocast; None where this torch needs a GPU to determine it."""
    try:
        with FakeTensorMode(), cuda_autocast(dtype):
            return case(Tensors("cuda", dtype)).dtype
    except RuntimeError as error:
        if torch.cuda.is_available() or not any(words in str(error) for words in NEEDS_GPU):
            raise
        return None


def on_cpu(case: Callable[[Tensors], Any], dtype: torch.dtype) -> torch.Tensor:
    with half_arithmetic(), torch.autocast("cpu", dtype):
        return case(Tensors("cpu", dtype))


@pytest.mark.filterwarnings("ignore:(at..(frobenius|nuclear)_norm|torch.chain_matmul) is deprecated")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["FP16", "BF16"])
@pytest.mark.parametrize("name", [*CASES, *ALSO])
def test_a_result_has_the_dtype_that_cuda_gives_it(name, dtype):
    case = CASES.get(name) or ALSO[name]
    if name not in ALSO and not hasattr(torch.ops.aten, name.partition(".")[0]):
        pytest.skip(f"this torch has no {name}")
    expected = on_cuda(case, dtype)
    if expected is None:
        pytest.skip(f"torch {torch.__version__} needs a GPU to say what dtype CUDA gives")
    made = on_cpu(case, dtype)
    assert made.dtype == expected
    if name != "gumbel_softmax":
        # FP32 results are exact up to FP32's rounding; others up to the rounding of operands and result.
        exact = case(Tensors("cpu", dtype, exact=True))
        eps = 2.0**-20 if made.dtype == torch.float32 else 3 * torch.finfo(dtype).eps
        torch.testing.assert_close(made.double(), exact.double(), rtol=eps, atol=eps)


def test_every_name_of_cudas_lists_has_its_case():
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    names = {name.removeprefix("aten::") for name in registered if name.startswith("aten::")}
    assert names - ELSEWHERE == {name for name in CASES if name in names}
    assert names - ELSEWHERE <= set(CASES)


@pytest.mark.filterwarnings("ignore:(at..(frobenius|nuclear)_norm|torch.chain_matmul) is deprecated")
def test_the_cpus_own_lists_differ():
    """The cases above are meaningful only if the CPU's own autocast differs from CUDA's."""
    differing = []
    for name, case in {**CASES, **ALSO}.items():
        with torch.autocast("cpu", torch.float16):
            try:
                dtype = case(Tensors("cpu", torch.float16)).dtype
            except AttributeError:  # of an operation that this torch has not
                continue
            except RuntimeError:
                dtype = None
        expected = on_cuda(case, torch.float16)
        if expected is not None and dtype != expected:
            differing.append(name)
    assert {"softmax.int", "exp", "sum", "layer_norm", "pow.Scalar", "mv", "reflection_pad2d"} <= set(differing)


@pytest.mark.parametrize("dims", [2, 3])
def test_grid_sample_has_the_widest_dtype_of_its_operands(dims):
    def sample(values: torch.dtype, grid: torch.dtype) -> torch.dtype:
        image = torch.rand(1, 2, *[4] * dims).to(values)
        return F.grid_sample(image, torch.zeros(1, *[2] * dims, dims).to(grid), align_corners=False).dtype

    with half_arithmetic(), torch.autocast("cpu", torch.float16):
        assert sample(torch.float16, torch.float16) == torch.float16
        assert sample(torch.float16, torch.float32) == sample(torch.float32, torch.float16) == torch.float32
    with torch.autocast("cpu", torch.float16):
        assert sample(torch.float16, torch.float16) == torch.float32


def test_without_autocast_a_function_preserves_its_dtype():
    with half_arithmetic():
        for name in ("exp", "softmax.int", "sum", "rms_norm", "mse_loss", "linalg_vector_norm", "cumsum"):
            assert CASES[name](Tensors("cpu", torch.float16)).dtype == torch.float16
        with torch.autocast("cpu", torch.float16, enabled=False):
            assert torch.ones(3).half().exp().dtype == torch.float16


def test_outside_the_context_the_cpus_autocast_is_as_before():
    with half_arithmetic():
        pass
    with torch.autocast("cpu", torch.float16):
        t = Tensors("cpu", torch.float16)
        assert t.h(3).exp().dtype == torch.float16
        assert t.h(2, 3).sum(1).dtype == torch.float16
        assert t.f(2, 3).mv(t.f(3)).dtype == torch.float32
        assert F.pad(t.h(1, 2, 4, 4), (1, 1, 1, 1), mode="reflect").dtype == torch.float32
        # A composite operation, whose inner products are still under autocast.
        assert torch.linalg.multi_dot([t.f(2, 3), t.f(3, 4)]).dtype == torch.float16
        assert torch.einsum("ij,jk->ik", t.f(2, 3), t.f(3, 4)).dtype == torch.float16


def test_functions_that_are_made_of_others_are_reached():
    """Softmax inside multi-head attention, the norm inside weight norm: no list names these."""
    attention = nn.MultiheadAttention(8, 2)
    with half_arithmetic(), torch.autocast("cpu", torch.float16):
        x = torch.randn(4, 3, 8)
        out, weights = attention(x, x, x, need_weights=True)
        assert out.dtype == torch.float16
        assert weights.dtype == torch.float32
        module = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
        assert module(torch.ones(2, 3)).dtype == torch.float16


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_give_fp16_outputs_and_states_as_cudnn_does(kind):
    layer = kind(3, 4, num_layers=2, bidirectional=True)
    with half_arithmetic(), torch.autocast("cpu", torch.float16):
        out, states = layer(torch.randn(5, 2, 3))
        packed, _ = layer(nn.utils.rnn.pack_sequence([torch.randn(3, 3), torch.randn(2, 3)]))
    states = states if isinstance(states, tuple) else (states,)
    assert {out.dtype, packed.data.dtype, *(state.dtype for state in states)} == {torch.float16}


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells_give_fp16_states(kind):
    with half_arithmetic(), torch.autocast("cpu", torch.float16):
        state = kind(3, 4)(torch.randn(2, 3))
    state = state if isinstance(state, tuple) else (state,)
    assert {one.dtype for one in state} == {torch.float16}


def test_gradients_pass_through_the_casts():
    weight = torch.randn(3, requires_grad=True)
    with half_arithmetic():
        with torch.autocast("cpu", torch.float16):
            loss = (weight.half() * 2).exp().sum()
        loss.backward()
    expected = (2 * (weight.detach().half() * 2).float().exp()).half().float()
    assert loss.dtype == torch.float32
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad, expected, rtol=2.0**-10, atol=0)


def test_values_that_fp16_cannot_hold_survive_where_cuda_has_fp32():
    x = torch.full((4,), 256.0).half()
    with half_arithmetic(), torch.autocast("cpu", torch.float16):
        for result in (x.pow(2), x**2, x.sum(), torch.softmax(x, 0), x.log(), F.layer_norm(x, (4,)), x.norm()):
            assert result.isfinite().all()
        assert x.pow(2).tolist() == [65536.0] * 4
        assert F.mse_loss(x, -x).item() == 2.0**18
    with torch.autocast("cpu", torch.float16):
        assert x.pow(2).isinf().all()


def test_binary_cross_entropy_is_left_to_the_cpu():
    """CUDA's autocast refuses it; the CPU's runs it in FP32."""
    with half_arithmetic(), torch.autocast("cpu", torch.float16):
        assert F.binary_cross_entropy(torch.full((3,), 0.5).half(), torch.ones(3).half()).dtype == torch.float32
