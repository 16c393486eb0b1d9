"""Windows computed from matrices of rows equal windows of samples that are decoded, shifted and added one by one."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpinspect import count_exponents
from mpinspect.counting import count, layout
from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.ranges.capture.arrangement import Arrangement, RowSet, SampleOf, StepScale, rounds
from mpinspect.ranges.capture.backward_scale import UNSCALED, BackwardScale, from_number
from mpinspect.ranges.capture.tally import Sample, Tally, dtype_name
from mpinspect.ranges.capture.window_rows import WindowRows, row_columns
from mpinspect.ranges.kinds import GRADIENT_KINDS
from mpinspect.ranges.windows.columns import TensorColumns
from mpinspect.ranges.windows.tensors import (
    LostUpdates,
    TensorKey,
    TensorWindow,
    floor_exponent,
    narrowest,
    overflow_exponent,
)
from mpinspect.ranges.windows.window import Window

# -- the oracle: one sample after the other -----------------------------------------------------------------------------


@dataclass
class _Gathered:
    histogram: ExponentHistogram = field(default_factory=ExponentHistogram.empty)
    samples: int = 0
    peaks: dict[int, int] = field(default_factory=dict)
    dtypes: set[str] = field(default_factory=set)
    passed_through: str = "float32"
    floor_exponent: int | None = None
    numel_max: int = 0
    lost_updates: dict[str, LostUpdates] = field(default_factory=dict)

    def add(self, sample: Sample, scale: float | None, log2_scale: int) -> int | None:
        """Add a sample, and return its peak exponent."""
        histogram = layout.decode(sample.row.numpy()).shifted(-log2_scale)
        self.histogram = self.histogram + histogram
        self.samples += 1
        self.dtypes.add(sample.dtype)
        self.numel_max = max(self.numel_max, sample.numel)
        peak = histogram.peak_exponent if len(histogram.counts) else None
        if sample.passed_through != "float32":
            self.passed_through = narrowest((self.passed_through, sample.passed_through))
            floor = floor_exponent(sample.passed_through, scale)
            self.floor_exponent = floor if self.floor_exponent is None else max(floor, self.floor_exponent)
            if histogram.infs and sample.key.kind in GRADIENT_KINDS:
                least = overflow_exponent(sample.passed_through, scale)
                peak = least if peak is None else max(peak, least)
        if peak is not None:
            self.peaks[peak] = self.peaks.get(peak, 0) + 1
        return peak

    def window(self) -> TensorWindow:
        return TensorWindow(
            self.histogram,
            self.samples,
            dict(sorted(self.peaks.items())),
            tuple(sorted(self.dtypes)),
            self.passed_through,
            self.floor_exponent,
            self.lost_updates,
            self.numel_max,
        )


class _OneByOne:
    """Computes the results of ``Tally`` sample by sample."""

    def __init__(self) -> None:
        self._tensors: dict[TensorKey, _Gathered] = {}
        self._steps: list[int] = []
        self._gradient_peaks: dict[int, int] = {}
        self._in_float32: set[tuple[str, str]] = set()
        self.dropped: list[str] = []
        self.scales: list[tuple[int, float | None]] = []

    def add_step(self, step: int, samples: list[Sample], lost: list[tuple[TensorKey, str, LostUpdates]]) -> None:
        if not samples and not lost:
            return
        peaks = []
        self._in_float32 |= {_of_module(sample.key) for sample in samples if _was_never_rounded(sample)}
        samples = [
            sample._replace(passed_through="float32")
            if _is_upcast(sample) and _of_module(sample.key) in self._in_float32
            else sample
            for sample in samples
        ]
        gradients = [sample for sample in samples if sample.key.kind in GRADIENT_KINDS]
        narrow = [sample for sample in gradients if sample.passed_through != "float32"]
        # Rows of one length are copied together, in the order of their first samples.
        lengths = list(dict.fromkeys(len(sample.row) for sample in samples))
        for sample in sorted(samples, key=lambda sample: lengths.index(len(sample.row))):
            value, log2_scale = _scale(sample.scale)
            if log2_scale is None:
                self.dropped.append(sample.key.name)
                continue
            peak = self._tensors.setdefault(sample.key, _Gathered()).add(sample, value, log2_scale)
            if peak is not None and any(each is sample for each in narrow or gradients):
                peaks.append(peak)
        gradient_scales = [_scale(sample.scale)[0] for sample in gradients]
        self.scales += [(step, scale) for scale in dict.fromkeys(gradient_scales)]
        for key, name, found in lost:
            kept = self._tensors.setdefault(key, _Gathered()).lost_updates
            kept[name] = kept[name] + found if name in kept else found
        self._steps.append(step)
        if peaks:
            self._gradient_peaks[max(peaks)] = self._gradient_peaks.get(max(peaks), 0) + 1

    def close_window(self) -> Window | None:
        if not self._steps:
            return None
        tensors = {key: gathered.window() for key, gathered in self._tensors.items()}
        peaks = dict(sorted(self._gradient_peaks.items()))
        window = Window(min(self._steps), max(self._steps), len(self._steps), tensors, peaks)
        self._tensors, self._steps, self._gradient_peaks = {}, [], {}
        return window


def _is_upcast(sample: Sample) -> bool:
    """Return whether the sample counts as an FP16 gradient that was cast to FP32."""
    return (sample.dtype, sample.passed_through) == ("float32", "float16") and sample.key.kind in GRADIENT_KINDS


def _was_never_rounded(sample: Sample) -> bool:
    """Return whether the sample contains, without unscaling, a finite value outside of FP16's range."""
    value, log2_scale = _scale(sample.scale)
    is_as_it_arrived = log2_scale is not None and (value is None or value == 2.0**log2_scale)
    if not _is_upcast(sample) or not is_as_it_arrived:
        return False
    histogram = layout.decode(sample.row.numpy())
    return bool(histogram.nonzero) and (histogram.min_abs < 2.0**-24 or histogram.max_abs > 65504)


def _of_module(key: TensorKey) -> tuple[str, str]:
    return (key.name.rpartition(".")[0] if key.kind == "weight_gradient" else key.name), key.kind


def _scale(scale: BackwardScale) -> tuple[float | None, int | None]:
    """Return the scale's value and the powers of two to shift by; None if no shift removes the scale."""
    value = scale.value if scale.on_device is None else float(scale.on_device)
    if scale.unknown or not scale.power_of_two:
        return value, 0
    assert value is not None
    mantissa, exponent = math.frexp(value)
    return value, exponent - 1 if mantissa == 0.5 else None


# -- random samples -----------------------------------------------------------------------------------------------------


def _tensors() -> Iterator[torch.Tensor]:
    torch.manual_seed(0)
    yield torch.empty(0)
    yield torch.zeros(3)
    yield torch.tensor([math.inf, -math.inf, math.nan])
    yield torch.tensor([math.inf, 1.0, 0.0])
    yield torch.tensor([2.0 - 2.0**-11, 2.0**-149, 3 * 2.0**-149])
    yield torch.randn(50) * 2.0**-20
    yield torch.randn(50) * 2.0**30
    yield torch.tensor([1.0, math.inf, 2.0**-24, 65504.0], dtype=torch.float16)
    yield torch.randn(7).to(torch.bfloat16)
    yield torch.tensor([2.0**-1074, 1.75 * 2.0**-1060, 2.0**-1022, 1.0], dtype=torch.float64)
    yield torch.tensor([1.999 * 2.0**1023, 2.0**-1074, math.inf], dtype=torch.float64)
    yield torch.zeros(2, dtype=torch.float64)


SCALES = (
    UNSCALED,
    from_number(1024.0),
    from_number(0.5),
    from_number(1000.0),
    BackwardScale(None, torch.tensor(8.0)),
    BackwardScale(None, torch.tensor(1000.0)),
    BackwardScale(None, unknown="nobody told"),
)
COUNTED = [(tensor, count(tensor), count(tensor, 1000.0)) for tensor in _tensors()]
KEYS = [TensorKey(name, kind) for name in ("a", "b", "c") for kind in ("weight_gradient", "activation", "weight")]


class _Step(NamedTuple):
    samples: list[Sample]
    lost: list[tuple[TensorKey, str, LostUpdates]]
    closes: bool


@st.composite
def _steps(draw: st.DrawFn) -> list[_Step]:
    """Steps that mostly resemble each other: the same tensors in the same order, with other values."""
    sample = st.tuples(
        st.sampled_from(KEYS), st.sampled_from(SCALES), st.sampled_from(("float32", "float16", "bfloat16"))
    )
    patterns = draw(st.lists(st.lists(sample, max_size=6), min_size=1, max_size=3))
    updates = st.tuples(
        st.sampled_from(KEYS),
        st.sampled_from(("float16", "bfloat16")),
        st.builds(LostUpdates, st.integers(0, 5), st.integers(5, 9), st.booleans()),
    )
    steps = []
    for _ in range(draw(st.integers(1, 6))):
        pattern = draw(st.sampled_from(patterns)) * draw(st.integers(1, 3))
        samples = [_sample(draw(st.sampled_from(COUNTED)), *each) for each in pattern]
        steps.append(_Step(samples, draw(st.lists(updates, max_size=2)), draw(st.booleans())))
    return steps


def _sample(
    counted: tuple[torch.Tensor, torch.Tensor, torch.Tensor], key: TensorKey, scale: BackwardScale, narrow: str
) -> Sample:
    tensor, row, divided = counted
    row = row if scale.divisor is None else divided
    return Sample(key, row, tensor.numel(), dtype_name(tensor.dtype), narrow, scale)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=120)
@given(steps=_steps())
def test_windows_equal_samples_added_one_by_one(steps: list[_Step]) -> None:
    dropped: list[str] = []
    scales: list[tuple[int, float | None]] = []
    tally = Tally(dropped.append, lambda step, scale: scales.append((step, scale)))
    plain = _OneByOne()
    for number, step in enumerate(steps):
        for sample in step.samples:
            tally.add(sample)
        for key, name, found in step.lost:
            counts = torch.tensor([found.lost, found.nonzero])
            tally.add_lost_updates(key, name, counts, measured=found.measured)
        tally.end_step(number)
        plain.add_step(number, step.samples, step.lost)
        if step.closes or step is steps[-1]:
            _assert_same(tally.close_window(), plain.close_window())
    assert [sentence.split()[3] for sentence in dropped] == plain.dropped
    assert scales == plain.scales


def _assert_same(found: Window | None, expected: Window | None) -> None:
    assert found == expected
    if found is None or expected is None:
        return
    assert isinstance(found.tensors, TensorColumns)
    assert list(found.tensors) == list(expected.tensors)
    assert list(found.gradient_peaks) == list(expected.gradient_peaks)
    for key, tensor in found.tensors.items():
        assert list(tensor.peaks) == list(expected.tensors[key].peaks)
    plain = TensorColumns.of(expected.tensors)
    assert found.tensors.columns.keys() == plain.columns.keys()
    for name, column in plain.columns.items():
        np.testing.assert_array_equal(found.tensors.columns[name], column)


# -- the parts ------------------------------------------------------------------------------------------------------------


def test_row_sets_of_one_length_are_added_together() -> None:
    """The sets are from two devices; the first has as many rows as there are tensors, but two for one tensor."""
    keys = [KEYS[0], KEYS[0], KEYS[1]]
    samples = [SampleOf(key, "float32", "float32", 0) for key in keys]
    arrangement = Arrangement(samples, [StepScale(1.0, 0)], [RowSet(layout.NARROW.length, rows) for rows in (2, 1)])
    values = [torch.tensor([1.0]), torch.tensor([8.0, 0.25]), torch.tensor([2.0])]
    rows = [count(each).numpy() for each in values]
    window = WindowRows()
    largest = window.add_step(arrangement, [np.stack(rows[:2]), np.stack(rows[2:])], np.array([1, 2, 1]))
    columns = window.columns()
    assert largest == 3
    assert columns[KEYS[0]].histogram == count_exponents(torch.cat(values[:2]))
    assert columns[KEYS[1]].histogram == count_exponents(values[2])
    assert [(tensor.samples, tensor.numel_max) for tensor in columns.values()] == [(2, 2), (1, 1)]


def test_windows_of_the_same_tensors_share_their_keys() -> None:
    tally = Tally(lambda sentence: None, lambda step, scale: None)
    orders = []
    for step in range(2):
        for key in KEYS:
            # Equal but not identical keys.
            tally.add(Sample(TensorKey(*key), count(torch.ones(2)), 2, "float32"))
        tally.end_step(step)
        window = tally.close_window()
        assert window is not None
        assert isinstance(window.tensors, TensorColumns)
        orders.append(window.tensors.order)
    assert orders[0] is orders[1]


def test_a_counters_row_is_not_changed() -> None:
    """Later steps are added to a copy of the first step's rows."""
    tally = Tally(lambda sentence: None, lambda step, scale: None)
    row = count(torch.ones(2))
    before = row.clone()
    for step in range(3):
        tally.add(Sample(KEYS[0], row, 2, "float32"))
        tally.end_step(step)
    assert torch.equal(row, before)


def test_peaks_are_complete_beyond_the_limit_of_uncombined_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpinspect.ranges.capture.window_rows._LOOSE_PEAKS", 3)
    tally = Tally(lambda sentence: None, lambda step, scale: None)
    for step in range(8):
        for key in KEYS[:2]:
            tally.add(Sample(key, count(torch.tensor([2.0 ** (step % 3)])), 1, "float32"))
        tally.end_step(step)
    window = tally.close_window()
    assert window is not None
    assert [window.tensors[key].peaks for key in KEYS[:2]] == [{0: 3, 1: 3, 2: 2}] * 2


def test_rows_of_subnormals_are_decoded_while_the_processor_flushes_them() -> None:
    rows = np.stack([row.numpy() for _, row, _ in COUNTED if len(row) == layout.WIDE.length])
    scales = np.zeros(len(rows), dtype=np.int64)
    expected = row_columns(rows, scales)
    flushes = torch.set_flush_denormal(True)
    try:
        found = row_columns(rows, scales)
    finally:
        torch.set_flush_denormal(False)
    if not flushes:
        pytest.skip("this processor does not flush subnormals")
    assert min(expected["min_exponent"]) == -1074
    for name, column in expected.items():
        np.testing.assert_array_equal(found[name], column)


@pytest.mark.parametrize("damage", [(layout.MIN_BITS, 1), (layout.MAX_BITS, 1 << 52), (layout.HEADER, 1)])
@pytest.mark.parametrize("add", [1, -1])
def test_rows_whose_extremes_contradict_their_counts_raise_an_error(damage: tuple[int, int], add: int) -> None:
    at, by = damage
    rows = count(torch.tensor([1.0, 4.0])).numpy()[None].copy()
    rows[0, at] += add * (by << 52 if at == layout.MIN_BITS else by)
    with pytest.raises(ValueError, match="magnitude"):
        row_columns(rows, np.zeros(1, dtype=np.int64))


@given(st.lists(st.integers(0, 4)))
def test_rounds_cover_every_position_with_distinct_targets(targets: list[int]) -> None:
    positions = np.arange(len(targets))
    seen = []
    for chosen, at in rounds(np.array(targets, dtype=np.int64)):
        targets_of = np.arange(5)[chosen].tolist()
        assert targets_of == [targets[position] for position in positions[at]]
        assert len(set(targets_of)) == len(targets_of)
        seen += positions[at].tolist()
    assert sorted(seen) == positions.tolist()
