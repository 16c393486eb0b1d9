"""On a CUDA device, verdicts on profiled kernels follow torch's settings. Skipped without a GPU."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mpinspect
from mpinspect.runtime import gpus

pytestmark = pytest.mark.gpu

SIZE = 2048


@pytest.fixture(autouse=True)
def tf32_put_back() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def this_gpu() -> gpus.Gpu:
    return gpus.of_device(torch.cuda.get_device_name(), *torch.cuda.get_device_capability())


def product(dtype: torch.dtype, n: int = SIZE) -> mpinspect.KernelReport:
    a = torch.randn(SIZE, SIZE, device="cuda", dtype=dtype)
    b = torch.randn(SIZE, n, device="cuda", dtype=dtype)
    return mpinspect.profile_kernels(lambda: a @ b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_product_runs_on_tensor_cores(dtype: torch.dtype) -> None:
    if not this_gpu().multiplies(str(dtype).removeprefix("torch.")):
        pytest.skip(f"this GPU's Tensor Cores do not multiply {dtype}")
    report = product(dtype)
    assert report.tensor_core_fraction == 1.0
    assert report.verdict_time_us["degraded"] == 0.0
    assert report.attributed_fraction == 1.0


def test_fp32_uses_them_only_where_tf32_is_allowed() -> None:
    if not this_gpu().multiplies("float32"):
        pytest.skip("this GPU has no TF32")
    torch.backends.cuda.matmul.allow_tf32 = False
    assert product(torch.float32).tensor_core_fraction == 0.0
    torch.backends.cuda.matmul.allow_tf32 = True
    assert product(torch.float32).tensor_core_fraction == 1.0


def test_an_odd_row_is_degraded_or_padded_by_the_library() -> None:
    """cuBLAS may copy to aligned rows. A kernel whose alignN name means less than 16 bytes must not be judged native."""
    report = product(torch.float16, SIZE + 1)
    assert report.tensor_core_fraction is not None
    for kernel in report.kernels:
        if "align1" in kernel.name or "align2" in kernel.name:
            assert kernel.verdict == "degraded"


def test_convolutions_and_attention_name_their_modules() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(64, 64, 3, padding=1)
            self.out = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.conv(x).flatten(2).transpose(1, 2)[:, None]
            return self.out(F.scaled_dot_product_attention(q, q, q))

    model = Network().cuda().half().to(memory_format=torch.channels_last)
    x = torch.randn(8, 64, 32, 32, device="cuda", dtype=torch.half).to(memory_format=torch.channels_last)
    report = mpinspect.profile_kernels(lambda: model(x).float().sum().backward())
    products = [kernel for kernel in report.kernels if kernel.verdict in ("native", "degraded")]
    assert {"conv", "out", ""} <= {kernel.module for kernel in products}
    assert {kernel.phase for kernel in products} == {"forward", "backward"}
    assert report.tensor_core_fraction is not None
    assert report.tensor_core_fraction > 0.9


# Inductor warns on every GPU that has TF32, for any dtype.
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_a_compiled_model_is_read() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).cuda().half()
    compiled = torch.compile(model)
    x = torch.randn(512, 512, device="cuda", dtype=torch.half)
    report = mpinspect.profile_kernels(lambda: compiled(x).sum().backward())
    assert report.kernels
    assert report.attributed_fraction is not None


def test_no_rate_contradicts_a_verdict() -> None:
    """A product faster than the CUDA cores' peak ran on Tensor Cores, so products judged "off" must be slower."""
    peak = this_gpu().cuda_core_tflops.get("float32")
    if peak is None:
        pytest.skip("the peak rate of this GPU is not known here")
    torch.backends.cuda.matmul.allow_tf32 = False
    for kernel in product(torch.float32).kernels:
        if kernel.verdict == "off":
            assert 2 * SIZE**3 / kernel.time_us / 1e6 < 1.05 * peak
