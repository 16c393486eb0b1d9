"""The laws of ExponentHistogram, and its results against correctly rounded integer arithmetic."""

import dataclasses
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding_oracle import exponent_counts, fates, rounded

from mpinspect.numeric.exponents import ExponentHistogram, UndecidableCountError, merge
from mpinspect.numeric.formats import FLOAT8_E4M3, FLOAT16, FLOAT16_FTZ, FLOAT32, FORMATS, TFLOAT32, FloatFormat

SCALES = range(-30, 41)
ALL_FORMATS = list(FORMATS.values())


def histogram_of(values: list[float]) -> ExponentHistogram:
    """Build a histogram from the oracle's counts, so that this file does not depend on counting tensors."""
    truth = exponent_counts(np.array(values, dtype=np.float64))
    counts = truth["counts"]
    assert isinstance(counts, dict)
    low, high = (min(counts), max(counts)) if counts else (0, -1)
    columns = {
        name: [truth[name].get(exponent, 0) for exponent in range(low, high + 1)]  # type: ignore[attr-defined]
        for name in ("counts", "powers_of_two", "near_top")
    }
    scalars = {name: truth[name] for name in ("zeros", "infs", "nans")}
    extremes = {name: truth[name] for name in ("min_abs", "max_abs")} if counts else {}
    return ExponentHistogram.from_counts(columns.pop("counts"), low, **columns, **scalars, **extremes)  # type: ignore[arg-type]


@st.composite
def edge_values(draw: st.DrawFn) -> float:
    """Draw values of any exponent around the formats' ranges, half of them near rounding boundaries."""
    mantissas = st.one_of(
        st.sampled_from(
            [1.0, 1 + 2.0**-52, 1.5, 1.75, 1.8125, 1.875, 2 - 2.0**-8, 2 - 2.0**-10, 2 - 2.0**-11, 2 - 2.0**-12, 2 - 2.0**-52]
        ),
        st.floats(1.0, 2.0, exclude_max=True),
    )  # fmt: skip
    sign = draw(st.sampled_from([1.0, -1.0]))
    return sign * math.ldexp(draw(mantissas), draw(st.integers(-170, 160)))


def anything() -> st.SearchStrategy[float]:
    return st.one_of(edge_values(), st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan]))


def histograms() -> st.SearchStrategy[ExponentHistogram]:
    return st.lists(anything(), max_size=12).map(histogram_of)


FORMAT = st.sampled_from(ALL_FORMATS)
SHIFT = st.integers(-60, 60)


@given(histograms(), histograms(), histograms())
def test_merging_commutes_and_associates(a: ExponentHistogram, b: ExponentHistogram, c: ExponentHistogram) -> None:
    assert a + b == b + a
    assert (a + b) + c == a + (b + c) == merge((a, b, c)) == merge((c, a, b)) == sum((a, b, c))


@given(histograms())
def test_the_empty_histogram_is_neutral(a: ExponentHistogram) -> None:
    assert a + ExponentHistogram.empty() == a == merge([a]) == ExponentHistogram.empty() + a
    assert merge([]) == ExponentHistogram.empty()


@given(st.lists(anything(), max_size=20), st.integers(0, 20))
def test_merged_parts_equal_the_whole(values: list[float], cut: int) -> None:
    whole = histogram_of(values)
    assert histogram_of(values[:cut]) + histogram_of(values[cut:]) == whole
    assert whole.total == len(values)


@given(histograms(), SHIFT, SHIFT)
def test_shifting_composes(a: ExponentHistogram, j: int, k: int) -> None:
    assert a.shifted(j).shifted(k) == a.shifted(j + k)
    assert a.shifted(k).shifted(-k) == a
    assert (a + a).shifted(k) == a.shifted(k) + a.shifted(k)


@given(st.lists(edge_values(), min_size=1, max_size=12), SHIFT)
def test_shifting_equals_counting_scaled_values(values: list[float], k: int) -> None:
    assert histogram_of(values).shifted(k) == histogram_of([math.ldexp(value, k) for value in values])


@given(histograms(), FORMAT, SHIFT, SHIFT)
def test_counts_at_a_scale_equal_counts_of_the_shifted_histogram(
    a: ExponentHistogram, format: FloatFormat, j: int, k: int
) -> None:
    assert a.flushed(format, j + k) == a.shifted(j).flushed(format, k)
    assert a.subnormal(format, j + k) == a.shifted(j).subnormal(format, k)
    assert a.overflowed_bounds(format, j + k) == a.shifted(j).overflowed_bounds(format, k)


@given(histograms(), FORMAT)
def test_a_larger_scale_flushes_no_more_and_overflows_no_less(a: ExponentHistogram, format: FloatFormat) -> None:
    flushed = [a.flushed(format, k) for k in SCALES]
    assert flushed == sorted(flushed, reverse=True)
    for bounds in zip(*(a.overflowed_bounds(format, k) for k in SCALES), strict=True):
        assert list(bounds) == sorted(bounds)


@given(histograms(), FORMAT, SHIFT)
def test_a_value_is_flushed_subnormal_or_overflowed_but_only_one_of_them(
    a: ExponentHistogram, format: FloatFormat, k: int
) -> None:
    flushed, subnormal = a.flushed(format, k), a.subnormal(format, k)
    low, high = a.overflowed_bounds(format, k)
    assert flushed >= 0
    assert subnormal >= 0
    assert 0 <= low <= high
    assert flushed + subnormal + high <= a.nonzero
    if a.nonzero:
        assert a.flushed_fraction(format, k) == flushed / a.nonzero
        assert a.subnormal_fraction(format, k) == subnormal / a.nonzero
    else:
        assert a.flushed_fraction(format, k) == a.subnormal_fraction(format, k) == 0.0


@given(st.lists(edge_values(), min_size=1, max_size=12))
@settings(max_examples=150)
def test_flushed_and_overflowed_against_the_integer_oracle(values: list[float]) -> None:
    histogram = histogram_of(values)
    for format in ALL_FORMATS:
        flushed, overflowed = fates(np.array(values), format, SCALES)
        assert [histogram.flushed(format, k) for k in SCALES] == flushed.tolist()
        for k, true in zip(SCALES, overflowed.tolist(), strict=True):
            low, high = histogram.overflowed_bounds(format, k)
            assert low <= true <= high
            if format in (FLOAT16, FLOAT16_FTZ, TFLOAT32):
                assert histogram.overflowed(format, k) == true
            # The exact extremes determine whether any value overflows, and settle the case of a single value.
            assert (high == 0) == (true == 0)
            if len(values) == 1:
                assert low == high


@given(edge_values(), FORMAT, st.sampled_from(SCALES))
@settings(max_examples=300)
def test_the_vectorised_oracle_equals_the_plain_one(value: float, format: FloatFormat, k: int) -> None:
    exact = abs(Fraction(value)) * Fraction(2) ** k
    flushed, overflowed = fates(np.array([value]), format, range(k, k + 1))
    if not format.flushes_subnormals:
        assert bool(flushed[0]) == (rounded(exact, format) == 0)
    assert bool(overflowed[0]) == (rounded(exact, format) > Fraction(format.max_finite))


@given(st.lists(edge_values(), min_size=1, max_size=12), FORMAT)
def test_max_log2_scale_is_the_largest_without_overflow(values: list[float], format: FloatFormat) -> None:
    histogram = histogram_of(values)
    k = histogram.max_log2_scale(format)
    assert k is not None
    assert histogram.overflowed_bounds(format, k) == (0, 0)
    assert histogram.overflowed_bounds(format, k + 1)[0] >= 1
    assert fates(np.array(values), format, range(k, k + 2))[1].tolist()[0] == 0


@given(st.lists(edge_values(), min_size=1, max_size=12))
def test_sums_lie_within_their_bounds(values: list[float]) -> None:
    histogram = histogram_of(values)
    for interval, power in ((histogram.sum_abs(), 1), (histogram.sum_squares(), 2)):
        true = sum(abs(Fraction(value)) ** power for value in values)
        # The rounding error of at most 400 additions in float64 is far below 1e-12.
        assert Fraction(interval.low) * Fraction(1 - 1e-12) <= true <= Fraction(interval.high) * Fraction(1 + 1e-12)
        assert interval.low <= interval.estimate <= interval.high


@given(st.lists(edge_values(), min_size=1, max_size=12), FORMAT, st.sampled_from(SCALES))
def test_lost_l1_share_lies_within_its_bounds(values: list[float], format: FloatFormat, k: int) -> None:
    share = histogram_of(values).lost_l1_share(format, k)
    lost = sum(abs(Fraction(v)) for v in values if fates(np.array([v]), format, range(k, k + 1))[0][0])
    true = float(lost / sum(abs(Fraction(v)) for v in values))
    assert share.low - 1e-12 <= true <= share.high + 1e-12
    assert share.low <= share.estimate <= share.high
    assert share.low >= 0
    assert share.high <= 1


def test_noise_to_signal_matches_real_rounding() -> None:
    """Significands are uniform in [1, 2), as the estimate assumes; exponents lie on both sides of FP16's flush edge."""
    random = np.random.default_rng(0)
    values = np.ldexp(random.uniform(1, 2, 200_000), random.integers(-30, -11, 200_000))
    histogram = histogram_of(values.tolist())
    for k in (0, 6, 12, 20):
        scaled = values * 2.0**k
        error = scaled.astype(np.float16).astype(np.float64) - scaled
        measured = (error**2).sum() / (scaled**2).sum()
        # The statistical error of 200,000 draws is well below 2%.
        assert histogram.noise_to_signal(FLOAT16, k) == pytest.approx(measured, rel=0.02)
    assert histogram.noise_to_signal(FLOAT16, 60) == math.inf


def test_undecidable_overflow_raises_an_error() -> None:
    histogram = histogram_of([300.0, 450.0, 470.0, 500.0])
    assert histogram.overflowed_bounds(FLOAT8_E4M3) == (1, 3)
    with pytest.raises(UndecidableCountError, match="overflowed_bounds"):
        histogram.overflowed(FLOAT8_E4M3)
    assert histogram_of([300.0, 464.0]).overflowed(FLOAT8_E4M3) == 0
    assert histogram_of([465.0, 500.0]).overflowed(FLOAT8_E4M3) == 2


def test_infinities_are_not_counted_as_overflow() -> None:
    histogram = histogram_of([math.inf, 1.0])
    assert (histogram.overflowed(FLOAT16), histogram.infs, histogram.max_abs) == (0, 1, 1.0)


@given(histograms())
def test_pickling_and_hashing(a: ExponentHistogram) -> None:
    again = pickle.loads(pickle.dumps(a))
    assert again == a
    assert hash(again) == hash(a)
    assert a != "a histogram"


def test_equality_compares_every_field() -> None:
    a = histogram_of([1.0, 1.5, 3.0, 0.0, math.inf, math.nan, 2 - 2.0**-11])
    for field in dataclasses.fields(a):
        value = getattr(a, field.name)
        changed = value.copy() if isinstance(value, np.ndarray) else value + 1
        if isinstance(changed, np.ndarray):
            changed[0] += 1
        assert dataclasses.replace(a, **{field.name: changed}) != a, field.name


def test_a_histogram_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        histogram_of([1.0]).zeros = 3  # type: ignore[misc]


def test_merging_leaves_its_parts_unchanged() -> None:
    a, b = histogram_of([1.0, 4.0]), histogram_of([2.0])
    before = pickle.dumps((a, b))
    merge([a, b]).counts[:] = 7
    a.shifted(3)
    assert pickle.dumps((a, b)) == before


def test_the_results_of_an_empty_histogram() -> None:
    empty = histogram_of([0.0, math.nan])
    assert (empty.nonzero, empty.total, empty.max_abs, empty.min_abs) == (0, 2, 0.0, 0.0)
    assert empty.range_offset(FLOAT16) is None
    assert empty.max_log2_scale(FLOAT16) is None
    assert empty.noise_to_signal(FLOAT16) == 0.0
    assert empty.sum_abs().high == empty.lost_l1_share(FLOAT16).high == 0.0
    assert "no finite non-zero value" in repr(empty)
    with pytest.raises(ValueError, match="no finite non-zero value"):
        _ = empty.max_exponent


def test_range_offset() -> None:
    """If the largest exponent is -1, 16 of FP16's powers of two are unused."""
    histogram = histogram_of([0.75, 1e-6])
    assert histogram.range_offset(FLOAT16) == 16
    assert histogram.max_log2_scale(FLOAT16) == 16
    assert histogram_of([2.0**16]).range_offset(FLOAT16) == -1
    assert histogram_of([(2 - 2.0**-11) / 2]).peak_exponent == 0


def test_extremes_beyond_float64_after_a_shift() -> None:
    histogram = histogram_of([3.0]).shifted(2000)
    assert histogram.max_abs == math.inf
    assert histogram.shifted(-2000).max_abs == 3.0
    assert histogram.overflowed(FLOAT32) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"counts": [[1]], "min_exponent": 0}, "one-dimensional"),
        ({"counts": [1, 2], "min_exponent": 0, "near_top": [1]}, "one length"),
        ({"counts": [-1], "min_exponent": 0}, "negative"),
        ({"counts": [1], "min_exponent": 0, "zeros": -1}, "negative"),
        ({"counts": [1], "min_exponent": 0, "powers_of_two": [1], "near_top": [1]}, "larger than the count"),
        ({"counts": [1], "min_exponent": 0, "max_abs": 2.0}, "max_abs"),
        ({"counts": [1], "min_exponent": 0, "min_abs": math.nan}, "min_abs"),
    ],
)
def test_inconsistent_counts_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExponentHistogram.from_counts(**arguments)  # type: ignore[arg-type]


def test_counts_are_trimmed() -> None:
    histogram = ExponentHistogram.from_counts([0, 0, 2, 0, 1, 0], -3)
    assert (histogram.min_exponent, histogram.counts.tolist(), histogram.max_exponent) == (-1, [2, 0, 1], 1)
