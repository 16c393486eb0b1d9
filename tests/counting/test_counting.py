"""Counting against integer oracles, real casts and every code of the narrow dtypes; layouts and dtypes of tensors."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator

import ml_dtypes
import numpy as np
import pytest
import torch
from rounding_oracle import exponent_counts, fates
from together import together

from mpinspect.counting import count, count_exponents
from mpinspect.counting.arrays import count_values
from mpinspect.counting.binary32 import count_chunks
from mpinspect.counting.bits import (
    BINARY32,
    BINARY64,
    HOST_CHUNK,
    count_on_device,
    histogram_on_device,
    merge_rows,
)
from mpinspect.counting.layout import MIN_BITS, NARROW, WIDE, decode
from mpinspect.counting.reference import count_codes, float32_bits
from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.numeric.formats import (
    BFLOAT16,
    FLOAT4_E2M1,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT16_FTZ,
    FLOAT32,
    FORMATS,
    TFLOAT32,
)
from mpinspect.runtime.workers import POOL, single_threaded

SCALES = range(-30, 41)
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16] + [
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
]
NARROW_DTYPES = DTYPES[2:]
#: Casts of other libraries to each format; they receive exact float32 values.
CASTS = {
    FLOAT16: [np.float16, torch.float16],
    BFLOAT16: [ml_dtypes.bfloat16, torch.bfloat16],
    FLOAT8_E4M3: [ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn],
    FLOAT8_E5M2: [ml_dtypes.float8_e5m2, torch.float8_e5m2],
    FLOAT4_E2M1: [ml_dtypes.float4_e2m1fn],
}
NEAR = 2 - 2.0**-11


def expect(histogram: ExponentHistogram, values: np.ndarray) -> None:
    """Assert that every field of the histogram matches these float64 values."""
    truth = exponent_counts(values.reshape(-1))

    def nonzero(array: np.ndarray) -> dict[int, int]:
        return {histogram.min_exponent + i: int(n) for i, n in enumerate(array) if n}

    assert nonzero(histogram.counts) == truth["counts"]
    assert nonzero(histogram.powers_of_two) == truth["powers_of_two"]
    assert nonzero(histogram.near_top) == truth["near_top"]
    assert (histogram.zeros, histogram.infs, histogram.nans) == (truth["zeros"], truth["infs"], truth["nans"])
    assert (histogram.min_abs, histogram.max_abs) == (truth["min_abs"], truth["max_abs"])
    assert histogram.total == values.size


def exact_values(tensor: torch.Tensor) -> np.ndarray:
    """Return the values as float64, which represents every dtype here exactly."""
    return tensor.detach().to(torch.float64).numpy()


def log_uniform(dtype: torch.dtype, seed: int, size: int = 150) -> torch.Tensor:
    """Draw values from a part of the dtype's range or beyond it, with powers of two, edges, zeros and non-finite values."""
    random = np.random.default_rng(seed)
    lowest, highest = (-1074, 1023) if dtype == torch.float64 else (-149, 127) if dtype.itemsize > 1 else (-20, 16)
    if dtype == torch.float16:
        lowest, highest = -24, 15
    first, last = sorted(random.integers(lowest, highest + 1, 2))
    exponents = random.integers(first, last + 1, size)
    edges = np.array([1, 1, 1.25, 1.75, 1.8125, 1.875, 2 - 2.0**-8, 2 - 2.0**-10, NEAR, 2 - 2.0**-12, 2 - 2.0**-23])
    significands = np.where(random.random(size) < 0.4, random.choice(edges, size), random.uniform(1, 2, size))
    values = np.ldexp(significands, exponents) * random.choice([-1.0, 1.0], size)
    values[random.random(size) < 0.1] = 0.0
    if seed % 3 == 0:
        values[:3] = np.inf, -np.inf, np.nan
    return torch.from_numpy(values).to(dtype)


def ways(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the row of every implementation that supports the dtype, regardless of the size that it is intended for."""
    flat = tensor.reshape(-1)
    yield count(tensor)
    if tensor.dtype == torch.float64:
        yield torch.from_numpy(count_values(flat.numpy()))
        yield count_on_device(flat.view(torch.int64), BINARY64)
        return
    codes = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])
    bits = codes if tensor.dtype == torch.float32 else float32_bits(codes, tensor.dtype)
    yield torch.from_numpy(count_values(bits.view(torch.float32).numpy()))
    yield count_on_device(bits, BINARY32)
    yield count_chunks(torch.split(bits, 47))
    if tensor.dtype.itemsize < 4:
        yield count_codes(torch.split(codes, 47), tensor.dtype)


# -- correct counts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_100_random_tensors(dtype: torch.dtype) -> None:
    """Compares every implementation's counts, and flushed and overflowed counts in every fourth format at every scale."""
    for seed in range(100):
        tensor = log_uniform(dtype, seed)
        values = exact_values(tensor)
        histogram = count_exponents(tensor)
        expect(histogram, values)
        if seed % 8 == 0:
            assert all(decode(row.numpy()) == histogram for row in ways(tensor))
        finite = values[np.isfinite(values) & (values != 0)]
        for format in list(FORMATS.values())[seed % 4 :: 4]:
            flushed, overflowed = fates(finite, format, SCALES)
            assert [histogram.flushed(format, k) for k in SCALES] == flushed.tolist()
            bounds = [histogram.overflowed_bounds(format, k) for k in SCALES]
            assert all(low <= true <= high for (low, high), true in zip(bounds, overflowed.tolist(), strict=True))
            if format in (FLOAT16, FLOAT16_FTZ, TFLOAT32):
                assert bounds == [(true, true) for true in overflowed.tolist()]
            assert [high > 0 for _, high in bounds] == [low > 0 for low, _ in bounds] == (overflowed > 0).tolist()
        if seed % 4 == 0:
            compare_with_casts(histogram, finite)


def compare_with_casts(histogram: ExponentHistogram, finite: np.ndarray) -> None:
    """Assert that flushed counts, and FP16's overflowed counts, match real casts, for values that are exact in float32."""
    with np.errstate(over="ignore"):
        scaled = np.ldexp(finite, np.array(SCALES)[:, None])
        single = scaled.astype(np.float32)
    exact = (single.astype(np.float64) == scaled) & (np.ldexp(scaled, -np.array(SCALES)[:, None]) == finite)
    fates_by_cast = {format: [by_cast(single, cast) for cast in casts] for format, casts in CASTS.items()}
    for row, k in enumerate(SCALES):
        kept = exact[row]
        part = histogram if kept.all() else count_exponents(finite[kept])
        for format, results in fates_by_cast.items():
            for result in results:
                assert part.flushed(format, k) == (result[row][kept] == 0).sum(), (format.name, k)
                if format is FLOAT16:
                    assert part.overflowed(format, k) == np.isinf(result[row][kept]).sum()


def by_cast(values: np.ndarray, to: object) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        if isinstance(to, torch.dtype):
            return torch.from_numpy(values).to(to).to(torch.float64).numpy()
        return values.astype(to).astype(np.float64)


@pytest.mark.parametrize("dtype", NARROW_DTYPES, ids=str)
def test_every_code(dtype: torch.dtype) -> None:
    """All 65,536 codes of the 16-bit dtypes and all 256 of the 8-bit ones, together; 8-bit codes also one by one."""
    wide = dtype.itemsize == 2
    codes = torch.arange(1 << 8 * dtype.itemsize, dtype=torch.int32).to(torch.int16 if wide else torch.uint8)
    tensor = codes.view(dtype)
    values = exact_values(tensor)
    histogram = count_exponents(tensor)
    expect(histogram, values)
    assert all(decode(row.numpy()) == histogram for row in ways(tensor))
    for code in range(0, len(codes), 257 if wide else 1):
        expect(count_exponents(tensor[code]), values[code])


def test_every_float32_exponent_with_edge_mantissas() -> None:
    mantissas = torch.tensor(
        [0, 1, 2, 0xFFF, 0x1000, 0x1001, 0x3FFFFF, 0x400000, 0x7FEFFE, 0x7FEFFF, 0x7FF000, 0x7FF001, 0x7FFFFE, 0x7FFFFF]
        + [1 << bit for bit in range(23)]
        + [(0xFFF << bit) & 0x7FFFFF for bit in range(12)],
        dtype=torch.int32,
    )
    fields = torch.arange(256, dtype=torch.int32)[:, None] << 23
    positive = (fields | mantissas).reshape(-1)
    bits = torch.cat((positive, positive | torch.iinfo(torch.int32).min))
    tensor = bits.view(torch.float32)
    with np.errstate(invalid="ignore"):
        values = tensor.numpy().astype(np.float64)
    for row in ways(tensor):
        expect(decode(row.numpy()), values)
    for part in torch.split(tensor, 1 << 9):
        with np.errstate(invalid="ignore"):
            expect(count_exponents(part), part.numpy().astype(np.float64))


def test_every_float64_exponent_with_edge_mantissas() -> None:
    top = 1 << 52
    mantissas = [0, 1, 2, top >> 1, top - (1 << 41) - 1, top - (1 << 41), top - 1, *(1 << bit for bit in range(52))]
    bits = torch.tensor([(field << 52) | mantissa for field in range(2048) for mantissa in mantissas])
    tensor = bits.view(torch.float64)
    for row in ways(tensor):
        expect(decode(row.numpy()), tensor.numpy())


@pytest.mark.parametrize("size", [0, 1, 2, 15, 16, 17, HOST_CHUNK - 1, HOST_CHUNK, HOST_CHUNK + 1, 3 * HOST_CHUNK + 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.float8_e5m2], ids=str)
def test_sizes_around_a_chunk(dtype: torch.dtype, size: int) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    expect(count_exponents(tensor), exact_values(tensor))


def messy(size: int, kind: str) -> torch.Tensor:
    random = torch.Generator().manual_seed(7)
    tensor = torch.randn(size, generator=random)
    if kind == "half zeros":
        tensor[torch.rand(size, generator=random) < 0.5] = 0
    elif kind == "powers of two":
        tensor = torch.exp2(torch.randint(-140, 120, (size,), generator=random).float())
    elif kind == "subnormals":
        tensor = torch.randint(0, 1 << 23, (size,), generator=random, dtype=torch.int32).view(torch.float32)
    elif kind == "random bits":
        tensor = torch.randint(-(1 << 31), 1 << 31, (size,), generator=random).to(torch.int32).view(torch.float32)
    elif kind == "near the top":
        tensor = torch.where(tensor > 0, NEAR, 2 - 2.0**-10)
    elif kind == "one of each":
        tensor[size // 2 : size // 2 + 4] = torch.tensor([0.0, float("inf"), float("nan"), 2.0**-149])
    return tensor


KINDS = ["dense", "half zeros", "powers of two", "subnormals", "random bits", "near the top", "one of each", "all zero"]


@pytest.mark.parametrize("kind", KINDS)
def test_large_tensors_of_every_kind(kind: str) -> None:
    """The size gives each of several threads several chunks, the last of them incomplete."""
    tensor = messy((1 << 20) + 77, kind) if kind != "all zero" else torch.zeros((1 << 20) + 77)
    with np.errstate(invalid="ignore"):
        expect(count_exponents(tensor), tensor.numpy().astype(np.float64))


@pytest.mark.parametrize("length", [1, 4096])
def test_the_device_histogram_equals_bincount(length: int) -> None:
    slots = torch.randint(0, length, (10_000,), dtype=torch.int32)
    assert torch.equal(histogram_on_device(slots, length), torch.bincount(slots, minlength=length))


@pytest.mark.parametrize("encoding", [BINARY32, BINARY64], ids=["float32", "float64"])
def test_merging_the_row_of_an_empty_tensor_changes_nothing(encoding) -> None:
    empty = torch.empty(0, dtype=encoding.dtype)
    some = torch.tensor([0.5, 3.0, 0.0], dtype=encoding.dtype)
    bits = empty.view(encoding.int_dtype)
    rows = [count_on_device(bits, encoding), count(torch.zeros(0, dtype=encoding.dtype))]
    for row in rows:
        assert torch.equal(merge_rows([row, count(some)]), count(some))
        assert decode(row.numpy()) == ExponentHistogram.empty()
    assert len(rows[0]) == encoding.layout.length


# -- pitfalls of other implementations ----------------------------------------------------------------------------------


def test_ten_thousand_bfloat16_ones_are_counted() -> None:
    """torch.histc counts in the tensor's dtype, and bfloat16 cannot count beyond a few hundred."""
    ones = torch.ones(10_000, dtype=torch.bfloat16)
    assert count_exponents(ones).counts.tolist() == [10_000]


def test_zero_inf_and_nan_are_not_exponent_zero() -> None:
    """torch.frexp gives exponent 0 for 0, inf and NaN, and for values in [0.5, 1)."""
    histogram = count_exponents(torch.tensor([0.0, -0.0, float("inf"), float("nan"), 0.5]))
    assert (histogram.zeros, histogram.infs, histogram.nans) == (2, 1, 1)
    assert (histogram.min_exponent, histogram.counts.tolist()) == (-1, [1])


def test_values_just_below_a_power_of_two_have_the_lower_exponent() -> None:
    """floor(log2(x)) in float32 would round up to the power of two."""
    below = torch.nextafter(torch.exp2(torch.arange(-100.0, 100.0)), torch.zeros(()))
    assert (torch.log2(below).floor() != torch.arange(-101.0, 99.0)).any(), "the trap is gone: log2 is exact now"
    histogram = count_exponents(below)
    assert (histogram.min_exponent, set(histogram.counts.tolist()), histogram.nonzero) == (-101, {1}, 200)


def test_float32_subnormals_have_their_own_exponents() -> None:
    """The exponent field is 0 for all subnormals and for zero."""
    tensor = torch.tensor([1, 2, 3, 4, 0x7FFFFF, 0, 0x800000], dtype=torch.int32).view(torch.float32)
    histogram = count_exponents(tensor)
    assert (histogram.min_exponent, histogram.zeros, histogram.min_abs) == (-149, 1, 2.0**-149)
    assert histogram.counts[:3].tolist() == [1, 2, 1]
    assert histogram.counts[-2:].tolist() == [1, 1]


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
def test_flushing_denormals_changes_no_count(dtype: torch.dtype) -> None:
    tensor = torch.cat([log_uniform(dtype, seed, 300) for seed in range(150)])
    values = exact_values(tensor)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        histograms = [count_exponents(tensor), count_exponents(tensor[:1000])]
        devices = [decode(row.numpy()) for row in ways(tensor[:1000])]
        divided = count_exponents_of(count(tensor, 3.0)) if dtype == torch.float32 else None
    finally:
        torch.set_flush_denormal(False)
    expect(histograms[0], values)
    expect(histograms[1], values[:1000])
    assert devices == [histograms[1]] * len(devices)
    if divided is not None:
        expect(divided, values / 3.0)


def test_more_values_than_torch_quantile_accepts() -> None:
    """torch.quantile raises an error above 2^24 elements."""
    tensor = torch.tensor([1.5], dtype=torch.float16).expand(1 << 13, 1 << 20)
    histogram = count_exponents(tensor)
    assert histogram.counts.tolist() == [1 << 33]


# -- layouts and dtypes of tensors ----------------------------------------------------------------------------------


def count_exponents_of(row: torch.Tensor) -> ExponentHistogram:
    return decode(row.numpy())


def strided_views() -> dict[str, torch.Tensor]:
    base = torch.randn(6, 5, 8, 4, generator=torch.Generator().manual_seed(3))
    large = torch.randn(400, 600, generator=torch.Generator().manual_seed(4))
    return {
        "transposed": base.transpose(0, 2),
        "channels last": base.to(memory_format=torch.channels_last),
        "every second": base[:, ::2, 1::3],
        "one column": large[:, 5],
        "large, every second": large[:, ::2],
        "large, transposed": large.t(),
        "expanded": base[:, :1].expand(6, 9, 8, 4),
        "expanded scalar": torch.tensor(0.75).expand(300, 400),
        "expanded, then a slice": base[:, :1].expand(6, 9, 8, 4)[::2, 1:, ::3],
        "overlapping": base.view(-1).as_strided((100, 10), (3, 1)),
        "0-d": torch.tensor(-3.0),
        "empty": torch.empty(3, 0, 2),
        "empty expanded": torch.empty(1, 0).expand(5, 0),
    }


@pytest.mark.parametrize("name", strided_views())
def test_strides(name: str) -> None:
    view = strided_views()[name]
    before = view.clone()
    expect(count_exponents(view), view.double().numpy())
    expect(count_exponents(view.to(torch.float16)), view.to(torch.float16).double().numpy())
    assert torch.equal(view, before)


def test_a_tensor_of_zero_elements_has_no_exponents() -> None:
    assert count_exponents(torch.empty(0)) == ExponentHistogram.empty()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32], ids=str)
def test_real_and_imaginary_parts_are_counted_separately(dtype: torch.dtype) -> None:
    parts = torch.tensor([[1.0, -0.5], [0.0, 3.0], [float("inf"), float("nan")]])
    tensor = torch.view_as_complex(parts.to(torch.empty(0, dtype=dtype).real.dtype))
    expected = parts.double().numpy()
    expect(count_exponents(tensor), expected)
    expect(count_exponents(tensor.conj()), expected)
    expect(count_exponents(tensor.conj().imag), expected[:, 1])
    assert len(count(tensor)) == (WIDE if dtype == torch.complex128 else NARROW).length


SPARSE = torch.tensor([[0.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.5], [1.5, 0.0, 0.0, 0.0], [0.0] * 4])


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64], ids=str)
def test_the_implicit_zeros_of_sparse_tensors_are_counted(layout: str, dtype: torch.dtype) -> None:
    dense = SPARSE.to(dtype)
    make: dict[str, Callable[[], torch.Tensor]] = {
        "coo": dense.to_sparse,
        "csr": dense.to_sparse_csr,
        "csc": dense.to_sparse_csc,
        "bsr": lambda: dense.to_sparse_bsr((2, 2)),
        "bsc": lambda: dense.to_sparse_bsc((2, 2)),
    }
    histogram = count_exponents(make[layout]())
    assert histogram == count_exponents(dense)
    assert histogram.zeros == (29 if dtype.is_complex else 13)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_sparse_duplicates_are_summed_first() -> None:
    """The sparse gradient of an embedding has a row for every occurrence of a word."""
    indices = torch.tensor([[0, 1, 0]])
    tensor = torch.sparse_coo_tensor(indices, torch.tensor([[1.0, 0.0], [2.0, 2.0], [3.0, 0.5]]), (5, 2))
    assert not tensor.is_coalesced()
    assert count_exponents(tensor) == count_exponents(tensor.to_dense())
    assert not tensor.is_coalesced()


def test_gradients_parameters_and_subclasses() -> None:
    class Tagged(torch.Tensor):
        pass

    values = torch.randn(50)
    expected = count_exponents(values)
    needs_grad = values.clone().requires_grad_()
    assert count_exponents(needs_grad) == expected
    assert count_exponents(needs_grad * 1.0) == expected
    assert count_exponents(torch.nn.Parameter(values)) == expected
    assert count_exponents(values.as_subclass(Tagged)) == expected
    row = count(needs_grad)
    assert not row.requires_grad
    assert row.dtype == torch.int64
    assert needs_grad.grad is None


def test_counting_works_inside_and_outside_inference_mode() -> None:
    values = torch.randn(200_000)
    expected = exact_values(values)
    with torch.inference_mode():
        expect(count_exponents(values), expected)
        made_inside = values.clone()
    expect(count_exponents(values), expected)
    expect(count_exponents(made_inside), expected)
    expect(count_exponents(made_inside.half()), exact_values(made_inside.half()))


def test_the_default_device_and_dtype_do_not_matter() -> None:
    values = torch.randn(200_000)
    expected = count_exponents(values)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert count_exponents(values) == expected
            assert count_exponents(values[:10]) == count_exponents(values[:10].clone())
            assert count_exponents(values.half()).total == 200_000
    finally:
        torch.set_default_dtype(torch.float32)


def test_numpy_arrays() -> None:
    array = np.array([1.0, 0.0, -6.0, 2.0**-1074])
    expect(count_exponents(array), array)
    expect(count_exponents(array.astype(">f4")[::-1]), array.astype(np.float32).astype(np.float64))
    array.setflags(write=False)
    expect(count_exponents(array), array)
    expect(count_exponents(np.float16([[1, 2], [3, 0]])), np.array([1.0, 2, 3, 0]))
    with pytest.raises(TypeError, match="int64"):
        count_exponents(np.arange(3))


@pytest.mark.parametrize(
    ("thing", "error", "message"),
    [
        (torch.ones(3, dtype=torch.int32), TypeError, "int32"),
        (torch.ones(3, dtype=torch.bool), TypeError, "bool"),
        ([1.0, 2.0], TypeError, r"list"),
        (None, TypeError, "NoneType"),
        (torch.empty(3, device="meta"), ValueError, "meta"),
    ],
    ids=["int32", "bool", "list", "None", "meta"],
)
def test_objects_that_cannot_be_counted_are_refused(thing: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        count_exponents(thing)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_quantized_and_nested_tensors_are_refused() -> None:
    with pytest.raises(TypeError, match="qint8"):
        count_exponents(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
    with pytest.raises(TypeError, match="nested"):
        count_exponents(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


# -- a divisor --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES[:6], ids=str)
@pytest.mark.parametrize("divisor", [1000.0, -3.0, 448 / 0.37])
def test_dividing_by_a_scale_that_is_not_a_power_of_two(dtype: torch.dtype, divisor: float) -> None:
    tensor = log_uniform(dtype, 6)
    with np.errstate(invalid="ignore"):
        expected = exact_values(tensor) / divisor
    row = count(tensor, divisor)
    assert len(row) == WIDE.length
    expect(decode(row.numpy()), expected)
    assert torch.equal(count(tensor, torch.tensor(divisor, dtype=torch.float64)), row)


def test_dividing_by_a_power_of_two_shifts_exponents() -> None:
    tensor = torch.randn(40_000)
    assert decode(count(tensor, 2.0**16).numpy()) == count_exponents(tensor).shifted(-16)


@pytest.mark.parametrize("divisor", [0.0, float("inf"), float("nan")])
def test_invalid_divisors_are_refused(divisor: float) -> None:
    with pytest.raises(ValueError, match="finite number other than zero"):
        count(torch.ones(3), divisor)


def test_dividing_a_sparse_tensor_keeps_its_implicit_zeros() -> None:
    assert decode(count(SPARSE.to_sparse(), 3.0).numpy()) == decode(count(SPARSE, 3.0).numpy())


# -- threads ------------------------------------------------------------------------------------------------------------


def test_counting_from_several_threads_at_once() -> None:
    tensors = [messy(150_000 + 1000 * i, kind) for i, kind in enumerate(KINDS[:4])] + [messy(1 << 20, "half zeros")]
    expected = [count(tensor) for tensor in tensors]

    def wrong(offset: int) -> list[int]:
        chosen = [(i + offset) % len(tensors) for i in range(2 * len(tensors))]
        return [which for which in chosen if not torch.equal(count(tensors[which]), expected[which])]

    assert together(4, wrong) == [[]] * 4


def test_counting_leaves_the_number_of_threads_unchanged() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen = []
        assert count(torch.ones(5))[MIN_BITS] == np.float64(1).view(np.int64)
        count(torch.randn((1 << 20) + 1))
        assert torch.get_num_threads() == 2
        new = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        new.start()
        new.join()
        assert seen == [2]
        with pytest.raises(KeyError), single_threaded():
            raise KeyError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_an_error_in_a_worker_reaches_the_caller() -> None:
    both_at_work = threading.Barrier(2, timeout=30)
    caller = threading.get_ident()

    def work(items: Iterable[int]) -> int:
        first = next(iter(items))
        both_at_work.wait()
        if threading.get_ident() != caller and fails:
            raise LookupError("in a worker")
        return first

    fails = False
    assert sorted(POOL.map(work, range(2), 2)) == [0, 1]
    fails = True
    with pytest.raises(LookupError, match="in a worker"):
        POOL.map(work, range(2), 2)


def test_counting_works_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another threading library, chunks stay below the size that torch would split; the counts are equal."""
    tensor = messy((1 << 20) + 3, "half zeros")
    expected = count(tensor)
    monkeypatch.setattr("mpinspect.runtime.workers._openmp_setter", lambda: None)
    assert torch.equal(count(tensor), expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_counting_in_a_forked_child() -> None:
    """The workers of a DataLoader are forks, which lack the parent's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(2, before))
    tensor = messy((1 << 20) + 3, "half zeros")
    expected = count(tensor)
    child = os.fork()
    if not child:
        # OpenMP's threads do not survive a fork either. torch's DataLoader, too, sets one thread in its workers.
        torch.set_num_threads(1)
        same = torch.equal(count(tensor), expected) and sum(POOL.map(sum, range(4), 2)) == 6
        os._exit(0 if same else 1)
    torch.set_num_threads(before)
    assert os.waitpid(child, 0)[1] == 0


# -- on a GPU -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_sync() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: counting on a GPU is checked where there is one")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_counts_on_a_gpu_without_a_wait(no_sync: None, dtype: torch.dtype) -> None:
    tensor = torch.cat([log_uniform(dtype, seed).view(torch.uint8) for seed in range(20)]).view(dtype)
    torch.cuda.set_sync_debug_mode("default")
    on_gpu = tensor.cuda()
    by = torch.tensor(3.0, device="cuda", dtype=torch.float64)
    torch.cuda.set_sync_debug_mode("error")
    rows = [count(on_gpu), count(on_gpu, 3.0), count(on_gpu, by), count(on_gpu[:0]), count(on_gpu[::2])]
    torch.cuda.set_sync_debug_mode("default")
    expected = [count(tensor), count(tensor, 3.0), count(tensor, 3.0), count(tensor[:0]), count(tensor[::2])]
    assert all(torch.equal(row.cpu(), other) for row, other in zip(rows, expected, strict=True))


@pytest.mark.gpu
def test_a_large_tensor_on_a_gpu(no_sync: None) -> None:
    on_gpu = torch.randn(9_000_001, device="cuda")
    row = count(on_gpu)
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(row.cpu(), count(on_gpu.cpu()))
    assert count_exponents(on_gpu).total == 9_000_001


def test_float32_values_neither_flush_nor_overflow_in_float32() -> None:
    histogram = count_exponents(messy(100_000, "random bits"))
    assert (histogram.flushed(FLOAT32), histogram.overflowed(FLOAT32)) == (0, 0)
