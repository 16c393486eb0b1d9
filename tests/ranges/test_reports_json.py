"""The JSON report contains every field, is strict JSON, and has a stable form."""

import dataclasses
import json

import numpy as np
import pytest
import sessions

from mpinspect.numeric.exponents import ExponentHistogram

#: Fields that are omitted on purpose: they are elsewhere in the report or in the session file, or follow from these.
LEFT_OUT = {("Session", "events"), ("Window", "tensors"), ("LayerReport", "weighed")}


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def report():
    return sessions.report_by_hand(sessions.everything())


def test_the_json_report_matches_its_golden_file(report, golden):
    golden("report.json", report.to_json())


@pytest.mark.parametrize("name", sessions.all_sessions())
def test_every_session_is_strict_json(name):
    document = strict(sessions.report_by_hand(sessions.all_sessions()[name]).to_json())
    assert (document["schema"], document["schema_version"]) == ("mpinspect.report", 1)


def test_every_field_of_every_record_is_in_the_json(report):
    missing = []

    def compare(value, plain, path):
        if dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                if (type(value).__name__, field.name) in LEFT_OUT:
                    continue
                if field.name not in plain:
                    missing.append(f"{path}.{field.name}")
                else:
                    compare(getattr(value, field.name), plain[field.name], f"{path}.{field.name}")
        elif isinstance(value, dict):
            assert set(plain) == set(map(str, value)), path
            for key, item in value.items():
                compare(item, plain[str(key)], f"{path}.{key}")
        elif isinstance(value, (tuple, list, np.ndarray)) and not hasattr(value, "_fields"):
            assert len(plain) == len(value), path
            plain = list(plain.values()) if isinstance(plain, dict) else plain
            for index, item in enumerate(value):
                compare(item, plain[index], f"{path}[{index}]")
        elif isinstance(value, (int, str)) or value is None:
            assert plain == value, path

    compare(report, strict(report.to_json()), "report")
    assert not missing


def test_a_histogram_can_be_rebuilt_from_the_json(report):
    layers = strict(report.to_json())["layers"]
    for layer, plain in zip(report.layers, layers, strict=True):
        if layer.histogram is None:
            assert plain["histogram"] is None
            continue
        found = plain["histogram"]
        again = ExponentHistogram.from_counts(
            found["counts"],
            found["min_exponent"],
            powers_of_two=found["powers_of_two"],
            near_top=found["near_top"],
            zeros=found["zeros"],
            infs=found["infs"],
            nans=found["nans"],
            min_abs=found["min_abs"] or None,
            max_abs=found["max_abs"] or None,
        )
        assert again == layer.histogram


def test_values_that_json_cannot_represent_are_strings(report):
    finding = dataclasses.replace(
        report.findings[0],
        evidence={"inf": float("inf"), "minus": -np.inf, "nan": np.float64("nan"), "int": np.int64(3), "odd": 1j},
    )
    document = strict(dataclasses.replace(report, findings=(finding,)).to_json())
    expected = {"inf": "inf", "minus": "-inf", "nan": "nan", "int": 3, "odd": "1j"}
    assert document["findings"][0]["evidence"] == expected


def test_a_histogram_is_on_one_line(report):
    histograms = [layer for layer in (*report.layers, *report.overall) if layer.histogram is not None]
    lines = report.to_json().splitlines()
    assert sum('"counts": [' in line and line.rstrip(",").endswith("}") for line in lines) == len(histograms)
