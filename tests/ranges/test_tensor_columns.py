"""Windows as columns equal windows of objects, merged or not."""

import dataclasses

import made_sessions as made
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpinspect.ranges import kinds
from mpinspect.ranges import session as s
from mpinspect.ranges.windows.columns import TensorColumns
from mpinspect.ranges.windows.merging import merge_columns
from mpinspect.ranges.windows.tensors import TensorKey, TensorWindow, merge_tensor_windows
from mpinspect.ranges.windows.window import Window, merge_windows

Tensors = dict[TensorKey, TensorWindow]


def window_of(tensors: Tensors) -> Window:
    return Window(0, 0, 1, tensors)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tensors=made.tensors)
def test_columns_equal_objects_and_can_be_filtered_by_kind(tensors: Tensors) -> None:
    window = window_of(tensors)
    columns = window.columns()
    assert dict(columns) == tensors
    assert list(columns) == list(tensors)
    assert list(columns.each()) == list(tensors.items())
    chosen = {key: tensor for key, tensor in tensors.items() if key.kind in kinds.GRADIENT_KINDS}
    assert window.of_kinds(kinds.GRADIENT_KINDS).tensors == chosen
    assert columns.passed_through(set(chosen)) == {tensor.passed_through for tensor in chosen.values()}


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60)
@given(parts=st.lists(made.tensors, min_size=1, max_size=3))
def test_merging_columns_equals_merging_objects(parts: list[Tensors]) -> None:
    windows = tuple(map(window_of, parts))
    order = list(dict.fromkeys(key for part in parts for key in part))
    objects = {key: merge_tensor_windows([part[key] for part in parts if key in part]) for key in order}
    merged = merge_windows(*windows)
    assert merged.tensors == objects
    assert list(merged.tensors) == order
    assert merge_windows(merge_windows(*windows[:2]), *windows[2:]).tensors == objects
    session = s.Session(windows=windows)
    assert session.totals() == objects
    assert session.passed_through() == {tensor.passed_through for part in parts for tensor in part.values()}


def test_columns_of_different_lengths_are_refused() -> None:
    columns = TensorColumns.of(made.full_session().windows[0].tensors)
    for name in ("zeros", "counts", "peak_counts"):
        with pytest.raises(ValueError, match="entries"):
            dataclasses.replace(columns, columns={**columns.columns, name: columns.columns[name][1:]})
    with pytest.raises(ValueError, match="context"):
        dataclasses.replace(columns, contexts=())
    with pytest.raises(ValueError, match="nothing to merge"):
        merge_columns([])
