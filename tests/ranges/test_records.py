"""Typed records are converted to the measurements that sessions store, and back."""

import dataclasses
import math

import pytest

from mpinspect.ranges import records
from mpinspect.ranges.records import Record, recorded
from mpinspect.ranges.session import Measurement

KINDS = [each for each in vars(records).values() if isinstance(each, type) and issubclass(each, Record) and each.kind]


def example(kind):
    """Return a record with another value in each field."""
    figures = [
        each.name for each in dataclasses.fields(kind) if each.name not in ("name", "step", "names", "text", "rank")
    ]
    stored = Measurement(kind.kind, "fc", 3, {name: float(place % 2) for place, name in enumerate(figures)}, ("a", "b"))
    return kind.read(dataclasses.replace(stored, text="stuck, float16", rank=1))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_a_stored_record_is_read_unchanged(kind):
    record = example(kind)
    stored = record.measurement()
    assert stored.what == kind.kind
    assert kind.read(stored) == record
    assert list(recorded([stored], kind)) == list(recorded([stored], Record)) == [record]


def test_every_record_has_its_own_kind():
    assert len({each.kind for each in KINDS}) == len(KINDS) > 25


def test_figures_are_converted_to_their_type_and_unknown_ones_are_ignored():
    change = records.ChangedBeforeStep.read(
        Measurement("changed-before-step", figures={"factor": 0.5, "zeroed": 2.0, "is_uniform": 1.0})
    )
    assert change.is_uniform is True
    assert change.masters is None
    assert "masters" not in change.figures
    assert change.figures["is_uniform"] == 1.0
    of_later = Measurement("ties", figures={"fraction": 0.1, "k": 2.0, "scores": 8.0, "added-later": 1.0})
    assert records.Ties.read(of_later).figures == {"fraction": 0.1, "k": 2.0, "scores": 8.0}


def test_a_missing_figure_raises_an_error_with_its_name():
    with pytest.raises(KeyError, match="fraction"):
        records.Ties.read(Measurement("ties", figures={"k": 2.0, "scores": 8.0}))


def test_a_figure_that_does_not_fit_its_type_raises_an_error():
    with pytest.raises((ValueError, OverflowError)):
        records.ExaminedArgument.read(Measurement("examined-argument", figures={"elements": 1.0, "bits": math.inf}))


def test_records_of_a_base_class_are_read_in_their_stored_order():
    made = [
        records.ExaminedMask(elements=1),
        records.Ties(fraction=0.1, k=1, scores=4),
        records.ExaminedBatch(elements=2),
    ]
    stored = [each.measurement() for each in made]
    assert [type(each) for each in recorded(stored, records.Examined)] == [records.ExaminedMask, records.ExaminedBatch]


def test_records_of_classes_that_are_gone_are_left_out():
    assert list(recorded([Measurement("overflowed-norm", "fc", 3, {"elements": 1.0})], Record)) == []
