"""The largest magnitude of a CPU tensor is exact, distinguishes infinity from NaN, and is None for unsupported tensors."""

import math
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("numba")

from mpinspect.counting.cpu import available
from mpinspect.counting.magnitude import largest_magnitude

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
#: Lengths around the lengths of SIMD vectors, and one that is split between threads.
LENGTHS = (1, 3, 17, 1000, (1 << 20) + 5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_result_is_the_largest_magnitude(dtype: torch.dtype, length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    values = torch.randn(length, generator=generator, dtype=torch.float32).to(dtype)
    for place in {0, length // 2, length - 1}:
        for planted in (7.5, -7.5):
            several = values.clone()
            several[place] = planted
            assert largest_magnitude(several) == several.abs().max().item() == 7.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_infinity_and_nan_are_distinguished(dtype: torch.dtype, length: int) -> None:
    values = torch.full((length,), torch.finfo(dtype).max, dtype=dtype)
    assert largest_magnitude(values) == torch.finfo(dtype).max
    values[length // 2] = -math.inf
    assert largest_magnitude(values) == math.inf
    values[-1] = math.nan
    assert math.isnan(largest_magnitude(values) or 0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_code(dtype: torch.dtype) -> None:
    for value in torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)[::37]:
        found = largest_magnitude(value.reshape(1))
        assert found == abs(value.item()) or (math.isnan(found or 0.0) and math.isnan(value.item()))


def test_subnormals_are_not_zero() -> None:
    assert largest_magnitude(torch.tensor([1, 0], dtype=torch.int32).view(torch.float32)) == 2.0**-149


@pytest.mark.parametrize(
    "arrange",
    [
        lambda x: x.t(),
        lambda x: x.reshape(4, 6, 1, 2).to(memory_format=torch.channels_last),
        lambda x: x[None, :, None],
        lambda x: x.reshape(()) if x.numel() == 1 else x,
        lambda x: x[1:],
    ],
    ids=["transposed", "channels last", "ones", "scalar", "rows"],
)
def test_any_order_in_memory(arrange: Callable[[torch.Tensor], torch.Tensor]) -> None:
    values = arrange(torch.arange(-48.0, 0.0).reshape(12, 4))
    assert largest_magnitude(values) == values.abs().max().item()


class _Own(torch.Tensor):
    """A subclass, which may redefine any operation."""


@pytest.mark.parametrize(
    "values",
    [
        torch.arange(12.0).reshape(3, 4)[:, :2],
        torch.ones(1).expand(5),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3).to(torch.float8_e5m2),
        torch.ones(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.ones(2).as_subclass(_Own),
    ],
    ids=["gaps", "overlaps", "complex", "float8", "meta", "sparse", "subclass"],
)
def test_unsupported_tensors_give_none(values: torch.Tensor) -> None:
    assert largest_magnitude(values) is None


def test_without_numba_the_result_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "loops", lambda: None)
    assert largest_magnitude(torch.ones(2)) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flushing_denormals_changes_no_magnitude(dtype: torch.dtype) -> None:
    """The largest of many subnormals is not flushed, in float64 either."""
    smallest = torch.finfo(dtype).smallest_normal
    values = (torch.arange(300, dtype=torch.float64) / 512 * smallest).to(dtype)
    truth = float(values.abs().max())
    assert 0 < truth < smallest
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        found = largest_magnitude(values)
    finally:
        torch.set_flush_denormal(False)
    assert found == truth


def test_parameters_are_supported() -> None:
    assert largest_magnitude(torch.nn.Parameter(torch.tensor([1.0, -2.5]))) == 2.5
