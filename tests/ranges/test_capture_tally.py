"""Rows become windows: scales are divided out, extremes are exact, and values may arrive a step late, as from a GPU."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from trainings import take_step

from mpinspect import Inspector, count_exponents
from mpinspect.counting import count, layout
from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.ranges.capture import tally as tally_module
from mpinspect.ranges.capture.backward_scale import BackwardScale, from_number
from mpinspect.ranges.capture.tally import HostCopy, Sample, Tally
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.ranges.windows.window import Window

KEY = TensorKey("fc.weight", "weight_gradient")


def _tally() -> tuple[Tally, list[str], list[tuple[int, float | None]]]:
    dropped: list[str] = []
    scales: list[tuple[int, float | None]] = []
    return Tally(dropped.append, lambda step, scale: scales.append((step, scale))), dropped, scales


def _sample(values: torch.Tensor, scale: float = 1.0, narrow: str = "float32") -> Sample:
    known = from_number(scale)
    return Sample(KEY, count(values * scale, known.divisor), values.numel(), "float32", narrow, known)


def _window(*samples: Sample, steps: int = 1) -> Window:
    """Return the window of steps that each hold these samples; none may be dropped."""
    tally, dropped, _ = _tally()
    for step in range(steps):
        for sample in samples:
            tally.add(sample)
        tally.end_step(step)
    window = tally.close_window()
    assert dropped == []
    assert window is not None
    return window


@pytest.mark.parametrize("scales", [(1.0,), (1.0, 2.0**16), (0.5, 1000.0, 8.0)])
def test_samples_of_different_scales_add_up_unscaled(scales: tuple[float, ...]) -> None:
    tally, dropped, seen = _tally()
    parts = [torch.randn(100) for _ in scales]
    for step, (values, scale) in enumerate(zip(parts, scales, strict=True)):
        tally.add(_sample(values, scale))
        tally.end_step(step)
    window = tally.close_window()
    assert window is not None
    expected = count_exponents(torch.cat(parts))
    found = window.tensors[KEY]
    if 1000.0 in scales:
        # x * 1000 is rounded to float32 before the division, so counts may differ at the edges of bins.
        assert found.histogram.total == expected.total
        assert np.abs(found.histogram.counts - expected.counts).sum() <= 2
    else:
        assert found.histogram == expected
    assert (found.samples, found.numel_max) == (len(scales), 100)
    assert seen == list(enumerate(scales))
    assert dropped == []
    assert tally.close_window() is None


def test_zeros_infinities_and_nans_have_no_peak() -> None:
    window = _window(*(_sample(torch.tensor(each)) for each in ([0.0, math.nan], [math.inf], [0.5], [0.0])))
    histogram = window.tensors[KEY].histogram
    assert (histogram.zeros, histogram.nans, histogram.infs, histogram.nonzero) == (2, 1, 1, 1)
    assert (histogram.min_abs, histogram.max_abs) == (0.5, 0.5)
    assert window.tensors[KEY].peaks == {-1: 1}
    assert window.gradient_peaks == {-1: 1}


def test_peaks_are_rounded_to_eleven_bits() -> None:
    window = _window(_sample(torch.tensor([2 - 2**-11])), _sample(torch.tensor([1.5, 2.0**-30])))
    assert window.tensors[KEY].peaks == {0: 1, 1: 1}
    assert window.gradient_peaks == {1: 1}


@pytest.mark.parametrize(("scale", "floor"), [(1.0, -25), (2.0**16, -41), (1000.0, -34)])
def test_the_visibility_floor_follows_from_format_and_scale(scale: float, floor: int) -> None:
    window = _window(_sample(torch.full((3,), 0.25), scale, narrow="float16"))
    assert window.tensors[KEY].floor_exponent == floor


@pytest.mark.parametrize("outside", [2.0**-25, 65536.0])
def test_a_tensor_with_values_outside_of_fp16_was_never_rounded_to_it(outside: float) -> None:
    scale, other = 2.0**4, TensorKey("other.weight", "weight_gradient")
    window = _window(
        _sample(torch.tensor([outside, 1.0]) / scale, scale, narrow="float16"),
        # The other layer is in FP16 and has a smaller peak. A gradient in FP32 overflows at no scale.
        Sample(other, count(torch.ones(2)), 2, "float32", "float16", from_number(scale)),
        steps=2,
    )
    found = window.tensors[KEY]
    assert (found.passed_through, found.floor_exponent) == ("float32", None)
    assert (window.tensors[other].passed_through, window.tensors[other].floor_exponent) == ("float16", -29)
    assert window.gradient_peaks == {-4: 2}


@pytest.mark.parametrize("value", [1000.0, 8.0])
def test_a_scale_on_the_device_is_divided_out_on_the_host_if_it_is_a_power_of_two(value: float) -> None:
    tally, dropped, seen = _tally()
    scale = BackwardScale(None, torch.tensor(value), power_of_two=True)
    tally.add(Sample(KEY, count(torch.ones(3)), 3, "float32", scale=scale))
    tally.end_step(4)
    window = tally.close_window()
    assert window is not None
    if value == 8.0:
        assert window.tensors[KEY].histogram.max_abs == 0.125
        assert (seen, dropped) == ([(4, 8.0)], [])
    else:
        (note,) = dropped
        assert "not a power of two" in note


def test_rows_of_two_lengths_of_one_tensor_are_added() -> None:
    narrow, wide = torch.tensor([1.0]), torch.tensor([2.0**-1000], dtype=torch.float64)
    window = _window(*(Sample(KEY, count(values), 1, str(values.dtype)) for values in (narrow, wide)))
    assert window.tensors[KEY].histogram == count_exponents(narrow) + count_exponents(wide)


class _LateCopy(HostCopy):
    """A copy that, like one from a GPU, has not arrived at the first call of ``ready``."""

    asked = 0
    waited = 0

    def __init__(self, stacked: torch.Tensor) -> None:
        super().__init__(stacked)
        self._questions = 0

    def ready(self) -> bool:
        type(self).asked += 1
        self._questions += 1
        return self._questions > 1

    def values(self) -> object:
        type(self).waited += self._questions < 2
        return super().values()


def test_steps_do_not_wait_for_copies_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts and events are one step late, complete and in order; only detaching waits, for the last step."""
    monkeypatch.setattr(tally_module, "HostCopy", _LateCopy)
    monkeypatch.setattr("mpinspect.ranges.capture.judge.HostCopy", _LateCopy)
    # As on a GPU, no magnitude is known at once.
    monkeypatch.setattr("mpinspect.ranges.capture.largest.largest_magnitude", lambda tensor: None)
    _LateCopy.asked = _LateCopy.waited = 0
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Inspector(model) as inspector:
        for step in range(4):
            take_step(optimizer, model(torch.full((1, 2), float("nan") if step == 2 else 2.0**step)).sum())
            if step == 2:
                assert inspector._recording.events == []
        assert _LateCopy.asked > 0
        assert _LateCopy.waited == 0
    assert _LateCopy.waited > 0
    session = inspector.session()
    # The NaN reaches the weights in spite of lr=0, and so the last step.
    assert [event.step for event in session.events] == [2, 3]
    assert session.totals()[TensorKey("weight", "weight_gradient")].peaks == {0: 1, 1: 1, 3: 1}


def test_row_layouts_are_recognised_by_length() -> None:
    with pytest.raises(ValueError, match="values, not 7"):
        layout.decode(np.zeros(7, np.int64))
    assert layout.decode(np.zeros(layout.NARROW.length, np.int64)) == ExponentHistogram.empty()


def test_an_overflow_in_fp16_has_the_smallest_overflowing_peak_at_its_scale() -> None:
    """The largest remaining finite value is not an estimate of the overflowed one."""
    values = torch.tensor([math.inf, 2.0], dtype=torch.float16)
    window = _window(Sample(KEY, count(values), 2, "float16", "float16", from_number(2.0**20)))
    assert window.gradient_peaks == {16 - 20: 1}


def test_an_infinity_in_fp32_has_no_peak() -> None:
    assert _window(_sample(torch.tensor([math.inf, 2.0]))).gradient_peaks == {1: 1}


def test_the_window_contains_the_narrowest_format() -> None:
    window = _window(*(_sample(torch.ones(1), narrow=narrow) for narrow in ("float16", "bfloat16", "float32")))
    assert window.tensors[KEY].passed_through == "float16"


@pytest.mark.parametrize(("scale", "least"), [(1.0, 16), (1024.0, 6), (1000.0, 6)])
def test_the_peak_of_an_overflow_is_unscaled(scale: float, least: int) -> None:
    window = _window(_sample(torch.tensor([1.0, math.inf]), scale, narrow="float16"))
    assert window.gradient_peaks == {least: 1}
