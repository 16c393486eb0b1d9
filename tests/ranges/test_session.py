"""Laws of a session's records: merging is associative and commutative, and preserves counts."""

from dataclasses import replace
from itertools import pairwise

import made_sessions as made
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpinspect.numeric.exponents import merge
from mpinspect.ranges.kinds import ACTIVATION
from mpinspect.ranges.session import Event, Precision, Progress, ScaleChange, ScalerRecord, Session
from mpinspect.ranges.windows.tensors import LostUpdates, TensorInfo, TensorWindow, add_counts, merge_tensor_windows
from mpinspect.ranges.windows.window import (
    LEAST_WINDOW_LIMIT,
    WINDOW_LIMIT,
    Window,
    coarsen,
    coarsen_plan,
    merge_windows,
    window_limit,
)

KEY = made.KEY


@given(st.lists(made.peak_maps, max_size=4))
def test_add_counts_adds_every_exponent(parts):
    total = add_counts(parts)
    assert list(total) == sorted({exponent for part in parts for exponent in part})
    assert all(count == sum(part.get(exponent, 0) for part in parts) for exponent, count in total.items())


@given(made.windows, made.windows, made.windows)
def test_merging_windows_is_associative(a, b, c):
    left = merge_windows(merge_windows(a, b), c)
    assert left == merge_windows(a, merge_windows(b, c))
    assert left == merge_windows(a, b, c)


@given(st.lists(made.tensor_windows, min_size=2, max_size=4))
def test_merging_tensor_windows_adds_counts_and_takes_the_worst_of_other_fields(parts):
    merged = merge_tensor_windows(parts)
    assert merged == merge_tensor_windows(parts[::-1])
    assert merged.histogram == merge(part.histogram for part in parts)
    assert merged.samples == sum(part.samples for part in parts)
    assert merged.numel_max == max(part.numel_max for part in parts)
    assert set(merged.dtypes) == {dtype for part in parts for dtype in part.dtypes}
    floors = [part.floor_exponent for part in parts if part.floor_exponent is not None]
    assert merged.floor_exponent == (max(floors) if floors else None)
    for name, updates in merged.lost_updates.items():
        assert updates.lost == sum(part.lost_updates[name].lost for part in parts if name in part.lost_updates)


def test_merging_takes_the_format_that_flushes_most():
    histogram = made.step_window(0).tensors[KEY].histogram
    parts = {
        name: TensorWindow(histogram, 1, passed_through=name) for name in ("float32", "bfloat16", "float16", "new")
    }
    assert merge_tensor_windows([parts["bfloat16"], parts["float16"]]).passed_through == "float16"
    assert merge_tensor_windows([parts["float32"], parts["bfloat16"]]).passed_through == "bfloat16"
    assert merge_tensor_windows([parts["new"], parts["float16"]]).passed_through == "new"


def test_totals_are_in_the_order_of_watching_without_tensors_that_never_arrived():
    session = made.full_session()
    (key,) = [info.key for info in session.watched]
    unwatched = made.step_window(3)
    totals = Session(watched=session.watched, windows=(unwatched, *session.windows)).totals()
    assert list(totals) == [key, KEY]
    assert totals[key].samples == 8
    assert (
        totals[key].histogram == session.windows[0].tensors[key].histogram + session.windows[1].tensors[key].histogram
    )
    assert Session(watched=session.watched).totals() == {}


def test_gradient_peaks_of_a_run_are_the_sum_of_its_windows():
    assert made.full_session().gradient_peaks() == {-3: 4, -2: 5}


def test_a_sum_of_lost_updates_is_measured_only_if_all_parts_are():
    assert LostUpdates(1, 4, True) + LostUpdates(2, 6, False) == LostUpdates(3, 10, False)
    assert LostUpdates(1, 4).fraction == 0.25
    assert LostUpdates(0, 0).fraction == 0.0


@given(st.integers(0, 60), st.integers(1, 20))
def test_coarsening_preserves_totals_and_order(steps, limit):
    windows = [made.step_window(step) for step in range(steps)]
    coarse = coarsen(windows, limit)
    assert len(coarse) <= limit
    assert Session(windows=coarse).totals() == Session(windows=tuple(windows)).totals()
    assert Session(windows=coarse).gradient_peaks() == Session(windows=tuple(windows)).gradient_peaks()
    edges = [(window.first_step, window.last_step) for window in coarse]
    assert [step for first, last in edges for step in range(first, last + 1)] == list(range(steps))


def test_windows_have_similar_lengths_after_many_coarsenings():
    windows: tuple[Window, ...] = ()
    for step in range(2000):
        windows = (*windows, made.step_window(step))
        if len(windows) > 16:
            windows = coarsen(windows, 8)
            lengths = [window.sampled_steps for window in windows]
            # No two neighbours fit into one window of the largest length.
            assert all(a + b > max(lengths) for a, b in pairwise(lengths))
            assert 3 <= len(lengths) <= 8
    assert sum(window.sampled_steps for window in windows) == 2000


def test_coarsening_does_not_change_few_windows():
    windows = tuple(made.step_window(step) for step in range(5))
    assert all(kept is window for kept, window in zip(coarsen(windows, 5), windows, strict=True))
    assert coarsen((), 1) == ()


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 10))
def test_the_plan_covers_every_window_once(sizes, limit):
    plan = coarsen_plan(sizes, limit)
    assert len(plan) <= limit
    assert [index for group in plan for index in group] == list(range(len(sizes)))


def test_a_limit_below_one_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        coarsen([made.step_window(0)], 0)


def test_the_limit_falls_with_the_number_of_tensors():
    assert window_limit(0) == window_limit(512) == WINDOW_LIMIT
    assert window_limit(1000) == 65
    assert window_limit(10**6) == LEAST_WINDOW_LIMIT


def test_the_scale_history_includes_the_scales_of_events() -> None:
    """A scaler lowers its scale in consecutive steps, but only a few steps are sampled."""
    changes = (ScaleChange(0, 16.0), ScaleChange(1, 8.0), ScaleChange(9, 1.0))
    skips = tuple(Event(step, 0, "backward", "a", "weight_gradient", "a", "inf", 16.0 / 2**step) for step in range(4))
    unknown = Event(6, 0, "backward", "a", "weight_gradient", "a", "inf", None)
    session = Session(events=(*skips, unknown), progress=Progress(steps=10, scales=changes))
    history = [(change.step, change.scale) for change in session.scale_history()]
    assert history == [(0, 16.0), (1, 8.0), (2, 4.0), (3, 2.0), (9, 1.0)]


def test_a_scale_falls_in_the_step_after_the_skipped_one_and_not_in_the_next_sampled_step() -> None:
    changes = (ScaleChange(0, 16.0), ScaleChange(20, 8.0), ScaleChange(30, 16.0), ScaleChange(40, 8.0))
    skip = Event(11, 0, "backward", "a", "weight_gradient", "a", "inf", 16.0, skipped=True)
    session = Session(events=(skip,), progress=Progress(steps=50, scales=changes))
    history = [(change.step, change.scale) for change in session.scale_history()]
    assert history == [(0, 16.0), (12, 8.0), (30, 16.0), (40, 8.0)]
    kept = replace(session, events=(replace(skip, skipped=False),))
    assert [change.step for change in kept.scale_history()] == [0, 20, 30, 40]


def test_the_fall_after_the_last_skipped_step_follows_from_the_scalers_factor() -> None:
    skip = Event(6, 0, "backward", "a", "weight_gradient", "a", "inf", 16.0, skipped=True)
    scaler = ScalerRecord("GradScaler", backoff_factor=0.25)
    session = Session(
        events=(skip,),
        progress=Progress(steps=10, scales=(ScaleChange(0, 16.0),)),
        precision=Precision(scalers=(scaler,)),
    )
    assert session.last_fall() == ScaleChange(7, 4.0)
    assert session.last_scale is None
    for unknown in (
        replace(session, events=()),
        replace(session, events=(replace(skip, skipped=False),)),
        # A later step had the same scale.
        replace(session, events=(skip, replace(skip, step=8))),
        replace(session, precision=Precision()),
        replace(session, precision=Precision(scalers=(replace(scaler, backoff_factor=None),))),
        replace(session, precision=Precision(scalers=(scaler, replace(scaler, backoff_factor=0.5)))),
    ):
        assert unknown.last_fall() is None
    # A fall that a later step recorded is in the history.
    assert replace(session, progress=Progress(scales=(ScaleChange(0, 16.0), ScaleChange(9, 4.0)))).last_fall() is None


def test_quoted_paths_that_end_in_a_number_get_their_class_once():
    infos = (("0.weight", "0", "Linear"), ("blocks.2", "blocks.2", "ReLU"), ("head", "head", "Linear"))
    session = Session(watched=tuple(TensorInfo(name, ACTIVATION, module, of) for name, module, of in infos))
    for text, expected in (
        ("In '0' and 'head'.", "In '0' (Linear) and 'head'."),
        ("the model's gradient of '0.weight'", "the model's gradient of '0.weight'"),
        ("In 'blocks.2' (train.py:9), it", "In 'blocks.2' (ReLU, train.py:9), it"),
        ("In 'blocks.2' (ReLU) and '7'", "In 'blocks.2' (ReLU) and '7'"),
    ):
        assert session.with_classes(text) == session.with_classes(expected) == expected
