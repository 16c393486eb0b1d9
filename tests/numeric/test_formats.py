"""Each format's derived limits, against the casts of torch, numpy and ml_dtypes."""

import dataclasses
import inspect
import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from rounding_oracle import floor_log2, rounded
from sessions import word_model

import mpinspect
from mpinspect.commands.lint_model import input_spec
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
    FloatFormat,
    as_format,
)
from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.report.tensorboard import TensorBoardLog

IN_TORCH = {
    FLOAT32: torch.float32,
    BFLOAT16: torch.bfloat16,
    FLOAT16: torch.float16,
    FLOAT8_E4M3: torch.float8_e4m3fn,
    FLOAT8_E5M2: torch.float8_e5m2,
}
IN_NUMPY = {
    FLOAT32: np.float32,
    BFLOAT16: ml_dtypes.bfloat16,
    FLOAT16: np.float16,
    FLOAT8_E4M3: ml_dtypes.float8_e4m3fn,
    FLOAT8_E5M2: ml_dtypes.float8_e5m2,
    FLOAT4_E2M1: ml_dtypes.float4_e2m1fn,
}
TORCH_NARROW = [format for format in IN_TORCH if format is not FLOAT32]
NUMPY_NARROW = [format for format in IN_NUMPY if format is not FLOAT32]


def name(format: FloatFormat) -> str:
    return format.name


def cast_by_torch(value: float, format: FloatFormat) -> float:
    assert float(np.float32(value)) == value, "torch casts through float32: the value must be exact in it"
    return float(torch.tensor(value, dtype=torch.float32).to(IN_TORCH[format]).to(torch.float64))


def cast_by_numpy(value: float, format: FloatFormat) -> float:
    assert float(np.float32(value)) == value
    with np.errstate(over="ignore"):
        return float(np.array(np.float32(value)).astype(IN_NUMPY[format]).astype(np.float64))


def neighbour(value: float, towards: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(towards)))


def decoded_by_numpy(codes: np.ndarray, format: FloatFormat) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # ml_dtypes raises the flag for signalling NaNs
        return codes.view(IN_NUMPY[format]).astype(np.float64)


def values_of(format: FloatFormat) -> list[Fraction]:
    """Return all positive finite values of a narrow format, from the definition of its fields."""
    values = []
    fields = range(1 << format.exponent_bits)
    for field in fields[: -1 if format.has_infinity else None]:
        for mantissa in range(1 << format.mantissa_bits):
            lead = (1 << format.mantissa_bits) if field else 0
            values.append((lead + mantissa) * Fraction(2) ** (max(field, 1) - format.bias - format.mantissa_bits))
    values = values[: len(values) - format.reserved_top_codes]
    return values[1:]


@pytest.mark.parametrize("format", IN_TORCH, ids=name)
def test_limits_equal_torchs(format: FloatFormat) -> None:
    info = torch.finfo(IN_TORCH[format])
    assert (format.max_finite, format.min_normal) == (info.max, info.smallest_normal)
    # torch's eps is the step above 1: 2^-mantissa_bits.
    assert 2.0**-format.mantissa_bits == info.eps


@pytest.mark.parametrize("format", IN_NUMPY, ids=name)
def test_limits_equal_ml_dtypes(format: FloatFormat) -> None:
    info = ml_dtypes.finfo(IN_NUMPY[format])
    assert format.max_finite == float(info.max)
    assert format.min_normal == float(info.smallest_normal)
    assert format.min_subnormal == float(info.smallest_subnormal)
    assert (format.mantissa_bits, format.exponent_bits) == (info.nmant, info.bits - 1 - info.nmant)


@pytest.mark.parametrize("format", NUMPY_NARROW, ids=name)
def test_every_code_is_a_value_of_the_definition(format: FloatFormat) -> None:
    bits = 1 + format.exponent_bits + format.mantissa_bits
    codes = np.arange(1 << bits, dtype=np.uint16 if bits == 16 else np.uint8)
    decoded = decoded_by_numpy(codes, format)
    finite = decoded[np.isfinite(decoded)]
    expected = np.array([0.0, *(float(value) for value in values_of(format))])
    assert np.array_equal(np.sort(finite), np.sort(np.concatenate((-expected, expected))))
    assert expected.max() == format.max_finite
    assert np.isinf(decoded).sum() == (2 if format.has_infinity else 0)
    if not format.has_infinity:
        assert np.isnan(decoded).sum() == 2 * format.reserved_top_codes


@pytest.mark.parametrize("format", TORCH_NARROW, ids=name)
def test_torch_and_numpy_decode_every_code_equally(format: FloatFormat) -> None:
    bits = 1 + format.exponent_bits + format.mantissa_bits
    codes = torch.arange(1 << bits, dtype=torch.int32).to(torch.uint8 if bits == 8 else torch.int16)
    by_torch = codes.view(IN_TORCH[format]).to(torch.float64).numpy()
    by_numpy = decoded_by_numpy(codes.numpy(), format)
    assert len(by_torch) == 1 << bits
    assert np.array_equal(by_torch, by_numpy, equal_nan=True)


@pytest.mark.parametrize("format", NUMPY_NARROW, ids=name)
def test_significant_bits_of_every_value(format: FloatFormat) -> None:
    """A value has floor(log2(value / smallest step at its exponent)) + 1 significant bits."""
    values = values_of(format)
    steps = dict.fromkeys((floor_log2(value) for value in values), Fraction(0))
    for lower, upper in itertools.pairwise(values):
        steps[floor_log2(lower)] = upper - lower
    for exponent, step in steps.items():
        if step and exponent < format.max_exponent:
            assert format.significant_bits(exponent) == exponent - floor_log2(step) + 1
    assert format.significant_bits(format.min_subnormal_exponent - 1) == 0
    assert format.significant_bits(format.max_exponent + 1) == 0


def test_significant_bits_of_a_float16_subnormal() -> None:
    assert [FLOAT16.significant_bits(exponent) for exponent in (-25, -24, -20, -15, -14, 15, 16)] == [
        0, 1, 5, 10, 11, 11, 0,
    ]  # fmt: skip
    assert [FLOAT16_FTZ.significant_bits(exponent) for exponent in (-24, -15, -14)] == [0, 0, 11]


@pytest.mark.parametrize("format", NUMPY_NARROW, ids=name)
def test_flush_edge(format: FloatFormat) -> None:
    edge = format.flush_edge
    casts = [cast_by_numpy] + ([cast_by_torch] if format in IN_TORCH else [])
    for cast in casts:
        assert cast(neighbour(edge, 0), format) == 0
        assert cast(edge, format) == 0
        assert cast(neighbour(edge, 1), format) == format.min_subnormal
        assert cast(format.min_subnormal, format) == format.min_subnormal


@pytest.mark.parametrize("format", NUMPY_NARROW, ids=name)
def test_overflow_edge(format: FloatFormat) -> None:
    edge = format.overflow_edge
    casts = [cast_by_numpy] + ([cast_by_torch] if format in IN_TORCH else [])
    for cast in casts:
        assert cast(neighbour(edge, 0), format) == format.max_finite
        beyond = cast(neighbour(edge, math.inf), format)
        assert_overflowed(beyond, format)
        on_the_edge = cast(edge, format)
        if format.overflow_edge_overflows:
            assert_overflowed(on_the_edge, format)
        else:
            assert on_the_edge == format.max_finite


def assert_overflowed(result: float, format: FloatFormat) -> None:
    """Assert infinity if the format has one, else NaN or the largest value: newer versions of torch saturate E4M3."""
    if format.has_infinity:
        assert result == math.inf
    else:
        assert math.isnan(result) or result == format.max_finite


@pytest.mark.parametrize("format", NUMPY_NARROW, ids=name)
def test_the_edges_agree_with_correct_rounding(format: FloatFormat) -> None:
    tiny, edge = Fraction(1, 2**400), Fraction(format.overflow_edge)
    assert rounded(Fraction(format.flush_edge), format) == 0
    assert rounded(Fraction(format.flush_edge) + tiny, format) == Fraction(format.min_subnormal)
    assert rounded(edge - tiny, format) == Fraction(format.max_finite)
    assert rounded(edge + tiny, format) > Fraction(format.max_finite)
    assert (rounded(edge, format) > Fraction(format.max_finite)) == format.overflow_edge_overflows


def test_the_published_limits() -> None:
    """IEEE 754-2019; OCP 8-bit Floating Point Specification 1.0, table 1; OCP Microscaling Formats 1.0, table 5."""
    assert (FLOAT16.max_finite, FLOAT16.overflow_edge, FLOAT16.min_normal) == (65504, 65520, 2.0**-14)
    assert (FLOAT16.min_subnormal, FLOAT16.flush_edge, FLOAT16.range_powers_of_two) == (2.0**-24, 2.0**-25, 40)
    assert (FLOAT8_E4M3.max_finite, FLOAT8_E4M3.overflow_edge, FLOAT8_E4M3.min_subnormal) == (448, 464, 2.0**-9)
    assert (FLOAT8_E5M2.max_finite, FLOAT8_E5M2.overflow_edge, FLOAT8_E5M2.min_subnormal) == (57344, 61440, 2.0**-16)
    assert (FLOAT4_E2M1.max_finite, FLOAT4_E2M1.overflow_edge, FLOAT4_E2M1.flush_edge) == (6, 7, 0.25)
    assert (BFLOAT16.min_subnormal, BFLOAT16.overflow_edge) == (2.0**-133, (2 - 2.0**-8) * 2.0**127)
    assert (TFLOAT32.max_finite, TFLOAT32.flush_edge) == ((2 - 2.0**-10) * 2.0**127, 2.0**-150)


def test_flushing_hardware() -> None:
    assert FLOAT16_FTZ.flush_edge == FLOAT16_FTZ.min_subnormal == FLOAT16.min_normal
    assert FLOAT16_FTZ.max_finite == FLOAT16.max_finite
    assert FLOAT16_FTZ.range_powers_of_two == 30
    assert FLOAT16.with_flushed_subnormals() == FLOAT16_FTZ


def test_formats_are_frozen_and_found_by_name() -> None:
    assert all(FORMATS[format.name] is format for format in FORMATS.values())
    assert len(FORMATS) == 8
    with pytest.raises(dataclasses.FrozenInstanceError):
        FLOAT16.mantissa_bits = 3  # type: ignore[misc]


# -- by name ------------------------------------------------------------------------------------------------------------

SPELLINGS = [
    (
        FLOAT16,
        ["float16", "fp16", "FP16", "f16", "half", "torch.float16", torch.float16, np.float16, np.dtype("float16")],
    ),
    (BFLOAT16, ["bfloat16", "bf16", "BF16", torch.bfloat16, ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)]),
    (FLOAT32, ["float32", "fp32", torch.float32, np.float32]),
    (TFLOAT32, ["tfloat32", "tf32", "TF32"]),
    (
        FLOAT8_E4M3,
        ["e4m3", "E4M3", "fp8-e4m3", "fp8_e4m3", "float8_e4m3fn", torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn],
    ),
    (FLOAT8_E5M2, ["e5m2", "fp8_e5m2", torch.float8_e5m2, ml_dtypes.float8_e5m2]),
    (FLOAT4_E2M1, ["e2m1", "fp4_e2m1", ml_dtypes.float4_e2m1fn]),
    (FLOAT16_FTZ, ["float16-ftz", "fp16_ftz"]),
]


@pytest.mark.parametrize(
    ("format", "given"), [(format, given) for format, all_ in SPELLINGS for given in all_], ids=str
)
def test_a_format_is_found_by_its_usual_names_and_dtypes(format, given) -> None:
    assert as_format(given) is format


@pytest.mark.parametrize("format", FORMATS.values(), ids=name)
def test_as_format_accepts_a_format_and_its_name(format) -> None:
    custom = dataclasses.replace(format, name="mine")
    assert as_format(format.name) is format
    assert as_format(custom) is custom


@pytest.mark.parametrize(
    "given",
    # FP8 variants with another bias or with infinities differ from OCP's formats.
    [
        "fp17",
        "fp8",
        "",
        "int8",
        torch.int32,
        torch.float64,
        torch.float8_e4m3fnuz,
        ml_dtypes.float8_e4m3,
        16,
        None,
        float,
    ],
    ids=str,
)
def test_the_error_for_an_unknown_format_lists_all_formats(given) -> None:
    with pytest.raises(ValueError, match="names no format") as caught:
        as_format(given)
    assert all(known in str(caught.value) for known in FORMATS)


def takes_a_format(method: object) -> bool:
    return callable(method) and "format" in inspect.signature(method).parameters


METHODS = [each for each, method in vars(ExponentHistogram).items() if each[0] != "_" and takes_a_format(method)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("values", [[], [1e-9, 3e-6, 70000.0]], ids=["empty", "values"])
def test_every_method_accepts_a_formats_name(method, values) -> None:
    assert len(METHODS) >= 11
    ask = getattr(mpinspect.count_exponents(torch.tensor(values)), method)
    assert ask("fp16") == ask(torch.float16) == ask(FLOAT16)
    assert ask("e5m2") == ask(FLOAT8_E5M2)
    with pytest.raises(ValueError, match="names no format"):
        ask("fp17")


def test_advice_reports_logs_and_the_lint_accept_a_formats_name(tmp_path) -> None:
    histogram = mpinspect.count_exponents(torch.tensor([1e-9, 3e-6, 1.0]))
    advice = mpinspect.recommend_loss_scale(histogram, format="bf16")
    assert advice == mpinspect.recommend_loss_scale(histogram, format=BFLOAT16)
    assert advice != mpinspect.recommend_loss_scale(histogram, format="fp16")
    assert analyse(word_model(), "bf16").format == "bfloat16"
    TensorBoardLog(tmp_path, "e4m3").close()
    for given in ("FP16", "half", np.float16):
        report = mpinspect.lint_shapes(torch.nn.Linear(8, 8), (torch.ones(2, 8),), dtype=given, gpu="ampere")
        assert report.dtype == "float16"
    assert input_spec("x=fp16:8,8").dtype == "float16"
    assert input_spec("x=e4m3:8,8").dtype == "float8_e4m3fn"
    for refused in (
        lambda: mpinspect.recommend_loss_scale(histogram, format="fp17"),
        lambda: analyse(word_model(), "fp17"),
        lambda: TensorBoardLog(tmp_path, "fp17"),
    ):
        with pytest.raises(ValueError, match="names no format: there are"):
            refused()
