"""Counting with NumPy alone: equals counting with torch on every dtype, and agrees with numpy.frexp and ml_dtypes' casts."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rounding_oracle import exponent_counts

from mpinspect.counting import count, count_array, count_exponents
from mpinspect.counting.encodings import NARROW_ENCODINGS, magnitudes
from mpinspect.counting.foreign import on_host
from mpinspect.counting.layout import decode
from mpinspect.numeric.exponents import ExponentHistogram

TORCH_NARROW = (
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
DIVISORS = (None, 3.0, -1000.0, 2.0**-30 * 5, 1e300)


def expect(histogram: ExponentHistogram, values: np.ndarray) -> None:
    """Assert that every field of the histogram matches these float64 values."""
    truth = exponent_counts(values.reshape(-1))
    for name in ("counts", "powers_of_two", "near_top"):
        counts = getattr(histogram, name)
        assert {histogram.min_exponent + i: int(n) for i, n in enumerate(counts) if n} == truth[name]
    for name in ("zeros", "infs", "nans", "min_abs", "max_abs"):
        assert getattr(histogram, name) == truth[name]


def same(array: np.ndarray, tensor: torch.Tensor, dtype: str = "") -> None:
    """Assert that the row equals torch's, with and without a divisor."""
    for divisor in DIVISORS:
        assert np.array_equal(count_array(array, divisor, dtype), count(tensor, divisor).numpy()), divisor


# -- equal counts -----------------------------------------------------------------------------------------------------


@given(hnp.arrays(st.sampled_from([np.uint32, np.uint64]), st.integers(0, 70)))
def test_any_bit_patterns_of_float32_and_float64(bits: np.ndarray) -> None:
    values = bits.view(f"f{bits.itemsize}")
    same(values, torch.from_numpy(values))
    with np.errstate(invalid="ignore"):
        expect(count_exponents(values), values.astype(np.float64))


@given(hnp.arrays(st.sampled_from([np.complex64, np.complex128]), hnp.array_shapes(min_dims=0, max_dims=3)))
def test_both_parts_of_complex_numbers_are_counted(values: np.ndarray) -> None:
    same(values, torch.from_numpy(values))


@pytest.mark.parametrize("name", TORCH_NARROW)
def test_every_code_is_counted_as_by_torch(name: str) -> None:
    dtype = getattr(torch, name, None) or pytest.skip(f"this torch has no {name}")
    codes = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}")
    same(codes, torch.from_numpy(codes).view(dtype), name)


@pytest.mark.parametrize("name", NARROW_ENCODINGS)
def test_every_code_has_its_librarys_value(name: str) -> None:
    dtype = np.dtype(np.float16 if name == "float16" else getattr(ml_dtypes, name))
    encoding = NARROW_ENCODINGS[name]
    codes = np.arange(1 << encoding.bits, dtype=f"u{encoding.item_size}")
    assert dtype.itemsize == encoding.item_size
    with np.errstate(invalid="ignore"):
        truth = np.abs(codes.view(dtype).astype(np.float64))
    np.testing.assert_array_equal(magnitudes(name)[: len(codes)], truth)
    expect(count_exponents(codes.view(dtype)), truth)


def test_arrays_larger_than_a_chunk() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_003, dtype=np.uint32)
    for values in (bits.view(np.float32), bits[:200_002].view(np.float64), bits.view(np.float16)):
        same(values, torch.from_numpy(values))


def test_flushing_denormals_changes_no_count() -> None:
    tiny = (np.arange(1, 1 << 23, 4097, dtype=np.uint32)).view(np.float32)
    codes = np.arange(1 << 16, dtype=np.uint16)
    magnitudes.cache_clear()
    plain = count_array(tiny), count_array(tiny, 3.0)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        magnitudes.cache_clear()
        flushed = count_array(tiny), count_array(tiny, 3.0)
        narrow = count_array(codes, dtype="bfloat16")
    finally:
        torch.set_flush_denormal(False)
        magnitudes.cache_clear()
    assert all(np.array_equal(one, other) for one, other in zip(plain, flushed, strict=True))
    assert np.array_equal(narrow, count_array(codes, dtype="bfloat16"))


# -- layouts and dtypes of arrays ---------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(hnp.arrays(np.float32, hnp.array_shapes(max_dims=4, max_side=4), elements=st.floats(width=32)), st.data())
def test_views_of_any_strides(array: np.ndarray, data: st.DataObject) -> None:
    view = array.transpose(data.draw(st.permutations(range(array.ndim))))
    view = view[tuple(slice(None, None, data.draw(st.sampled_from([1, 2, -1, -2]))) for _ in range(view.ndim))]
    if data.draw(st.booleans()):
        view = np.broadcast_to(view, (3, *view.shape))
    with np.errstate(invalid="ignore"):
        expect(count_exponents(view), view.astype(np.float64))


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16"])
def test_byte_order_read_only_and_scalars(dtype: str) -> None:
    values = np.array([1.5, 0.0, -3e-7, 2.0**-24, np.inf], dtype=dtype)
    native = count_array(values)
    swapped = values.astype(values.dtype.newbyteorder())
    assert np.array_equal(count_array(swapped), native)
    assert np.array_equal(count_array(np.stack([swapped, swapped])[::2, ::-1]), native)
    values.setflags(write=False)
    assert np.array_equal(count_array(values), native)
    assert decode(count_array(np.asarray(values[0]))).total == (2 if dtype[0] == "c" else 1)
    assert decode(count_array(np.zeros((0, 3), dtype))).total == 0
    assert count_exponents(values[2]) == count_exponents(values[2:3])


def test_a_broadcast_array_is_counted_once() -> None:
    huge = np.broadcast_to(np.float32([1.0, 3.0]), (1 << 40, 2))
    histogram = count_exponents(huge)
    assert (histogram.total, histogram.max_abs) == (1 << 41, 3.0)


@pytest.mark.parametrize(
    "array", [np.arange(3), np.array([True]), np.array(["a"]), np.array([None]), np.ones(2, np.longdouble)]
)
def test_dtypes_without_exponents_are_refused(array: np.ndarray) -> None:
    with pytest.raises(TypeError, match=array.dtype.name):
        count_array(array)


@pytest.mark.parametrize("divisor", [0.0, np.inf, np.nan])
def test_invalid_divisors_are_refused(divisor: float) -> None:
    with pytest.raises(ValueError, match="cannot divide"):
        count_array(np.ones(3), divisor)


def test_codes_of_another_size_are_refused() -> None:
    with pytest.raises(TypeError, match="bfloat16"):
        count_array(np.zeros(3, np.uint8), dtype="bfloat16")


# -- other libraries' arrays --------------------------------------------------------------------------------------------


class OnlyDLPack:
    """An array with DLPack as its only interface, backed by a torch tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: object) -> object:
        return self._tensor.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.__dlpack_device__()


def test_dlpack() -> None:
    host = on_host(OnlyDLPack(torch.tensor([1.0, -0.5])))
    assert (host.values.tolist(), host.dtype, host.shape) == ([1.0, -0.5], "float32", (2,))


def test_dlpack_of_a_dtype_that_numpy_lacks_is_converted_by_torch() -> None:
    host = on_host(OnlyDLPack(torch.tensor([1.0, -0.5], dtype=torch.bfloat16)))
    assert (host.values.tolist(), host.encoding) == ([1.0, -0.5], "")


class MXNetLike:
    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def asnumpy(self) -> np.ndarray:
        return self._array


def test_mxnets_bfloat16_is_a_record_of_codes() -> None:
    record = np.array([0x3F80, 0xC040], np.uint16).view([("bfloat16", np.uint16)])
    host = on_host(MXNetLike(record))
    assert host.encoding == "bfloat16"
    expect(decode(count_array(host.values, dtype=host.encoding)), np.array([1.0, -3.0]))
    assert on_host(MXNetLike(np.ones(3))).values.tolist() == [1, 1, 1]


class CuPyLike:
    __cuda_array_interface__ = ()

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def get(self) -> np.ndarray:
        return np.ones(2, np.float16)


def test_cupys_arrays_are_fetched() -> None:
    assert on_host(CuPyLike()).dtype == "float16"


class IndexedSlices:
    def __init__(self, values: np.ndarray, indices: np.ndarray, dense_shape: np.ndarray | None) -> None:
        self.values, self.indices, self.dense_shape = values, indices, dense_shape


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_repeated_indices_of_indexed_slices_are_summed(dtype: object) -> None:
    values = np.array([[1, 2], [3, 4], [0, 6]], dtype=dtype)
    host = on_host(IndexedSlices(values, np.array([5, 0, 5]), np.array([7, 2])))
    assert host.shape == (7, 2)
    assert sorted(host.values.reshape(-1).astype(float).tolist()) == [1, 3, 4, 8]
    assert host.implicit_zeros == 10
    assert host.dtype == np.dtype(dtype).name
    unknown = on_host(IndexedSlices(values, np.array([5, 0, 1]), None))
    assert (unknown.implicit_zeros, unknown.shape) == (0, (3, 2))


def test_numbers_and_lists_of_numbers() -> None:
    assert on_host(2).values.tolist() == 2.0
    assert on_host([[1, 2.5], [0, 4]]).dtype == "float64"


@pytest.mark.parametrize("thing", [None, "text", object(), True, {"a": 1.0}])
def test_objects_other_than_arrays_are_refused(thing: object) -> None:
    with pytest.raises(TypeError, match="is not an array"):
        on_host(thing)


def test_scipys_sparse_matrices() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    dense = np.array([[0.0, 2.0], [0.0, -0.5]])
    assert on_host(sparse.csr_matrix(dense)).values.tolist() == dense.tolist()
