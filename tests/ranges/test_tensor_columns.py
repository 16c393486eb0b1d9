"""Windows as columns say what windows of objects say, merged or not."""

from __future__ import annotations

import dataclasses

import made_sessions as made
import pytest
from hypothesis import HealthCheck, given, settings

from mpinspect.ranges import kinds
from mpinspect.ranges import session as s
from mpinspect.ranges.store.columns import TensorColumns
from mpinspect.ranges.store.merging import merge_columns


def as_columns(window: s.Window) -> s.Window:
    return dataclasses.replace(window, tensors=TensorColumns.of(window.tensors))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(session=made.sessions)
def test_columns_hold_what_objects_hold(session: s.Session) -> None:
    for window in session.windows:
        columns = as_columns(window)
        assert columns == window
        assert list(columns.tensors) == list(window.tensors)
        assert dict(TensorColumns.of(window.tensors).each()) == window.tensors


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(session=made.sessions)
def test_merging_columns_is_merging_objects(session: s.Session) -> None:
    columns = dataclasses.replace(session, windows=tuple(map(as_columns, session.windows)))
    assert columns.totals() == session.totals()
    assert list(columns.totals()) == list(session.totals())
    assert columns.passed_through() == session.passed_through()
    if session.windows:
        merged = s.merge_windows(*session.windows)
        assert s.merge_windows(*columns.windows) == merged
        # Merged ones merge, with objects too.
        some = s.merge_windows(*columns.windows[:2])
        assert s.merge_windows(some, *session.windows[2:]) == merged


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(session=made.sessions)
def test_a_choice_of_kinds(session: s.Session) -> None:
    for window in session.windows:
        chosen = as_columns(window).of_kinds(kinds.GRADIENT_KINDS)
        assert chosen == window.of_kinds(kinds.GRADIENT_KINDS)
        assert all(key.kind in kinds.GRADIENT_KINDS for key in chosen.tensors)
        keys = set(chosen.tensors)
        formats = {window.tensors[key].passed_through for key in keys}
        assert TensorColumns.of(window.tensors).passed_through(keys) == formats


def test_columns_that_do_not_fit_together_are_refused() -> None:
    columns = TensorColumns.of(made.full_session().windows[0].tensors)
    for name in ("zeros", "counts", "peak_counts"):
        with pytest.raises(ValueError, match="entries"):
            dataclasses.replace(columns, columns={**columns.columns, name: columns.columns[name][1:]})
    with pytest.raises(ValueError, match="context"):
        dataclasses.replace(columns, contexts=())
    with pytest.raises(ValueError, match="nothing to merge"):
        merge_columns([])
