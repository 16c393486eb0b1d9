"""Decoding: sizes are bounded, and a value either matches its field's annotation or raises an error."""

import dataclasses
import json
import math
import zlib
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpinspect.runtime.decoding import Between, DecodingError, OneOf, bytes_of, each, inflated, json_of, parsed, typed


class Pair(NamedTuple):
    step: int
    scale: float | None = None


@dataclasses.dataclass(frozen=True)
class Record:
    name: str
    kind: Annotated[str, OneOf(("a", "b"))] = "a"
    steps: Annotated[int, Between(0, 100)] = 0
    share: Annotated[float, Between(0.0, 1.0)] | None = None
    pairs: tuple[Pair, ...] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_known: bool | None = None


def test_a_record_is_decoded_with_defaults_and_without_fields_of_a_later_version() -> None:
    found = typed(Record, {"name": "x", "pairs": [[1, "inf"], [2, None]], "versions": {"torch": "2"}, "mood": [[]]})
    assert found == Record("x", pairs=(Pair(1, math.inf), Pair(2, None)), versions={"torch": "2"})
    assert typed(Record, {"name": "", "share": 1, "is_known": False}) == Record("", share=1.0, is_known=False)
    assert typed(Pair, {"step": 3}) == Pair(3)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "name is missing"),
        ({"name": 3}, "name is 3, not text"),
        ({"name": None}, "name is null, not text"),
        ({"name": "x", "kind": "c" * 99}, f"kind is '{'c' * 40}', none of a, b"),
        ({"name": "x", "steps": "x"}, "steps is 'x', not a whole number"),
        ({"name": "x", "steps": True}, "steps is True, not a whole number"),
        ({"name": "x", "steps": 1.0}, "steps is 1.0, not a whole number"),
        ({"name": "x", "steps": 10**30}, "steps is 1000000000000000000000000000000, not within 0 .. 100"),
        ({"name": "x", "steps": 10**400}, "not within 0 .. 100"),
        ({"name": "x", "share": 10**400}, "beyond float64"),
        ({"name": "x", "share": "nan"}, "share is nan, not within 0.0 .. 1.0"),
        ({"name": "x", "share": "2"}, "share is '2', not a number"),
        ({"name": "x", "pairs": {}}, "pairs is an object, not an array"),
        ({"name": "x", "pairs": [[1, 2.0, 3]]}, "pairs is an array of 3, not of 2"),
        ({"name": "x", "pairs": [[1, 2.0], ["x", 2.0]]}, "pairs.step is 'x', not a whole number"),
        ({"name": "x", "versions": {"torch": 2}}, "versions is 2, not text"),
        ({"name": "x", "is_known": 0}, "is_known is 0, not true or false"),
        ([], "is an array, not an object"),
    ],
)
def test_the_error_for_an_invalid_record_names_the_field(fields: Any, says: str) -> None:
    with pytest.raises(DecodingError) as caught:
        typed(Record, fields)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 120


def test_one_wrong_value_among_many_is_found() -> None:
    good = [{"name": str(number)} for number in range(1000)]
    assert [record.name for record in each(Record, good)] == [str(number) for number in range(1000)]
    with pytest.raises(DecodingError, match="name is 7, not text"):
        each(Record, [*good, {"name": 7}, *good])


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=8,
    )
)
def test_any_json_is_a_record_or_an_error(value: Any) -> None:
    for document in (value, {"name": "x", "pairs": value}, {"name": "x", "share": value, "versions": value}):
        try:
            assert isinstance(typed(Record, document), Record)
        except DecodingError:
            continue


# -- JSON and bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("NaN", "holds NaN"),
        ('{"a": -Infinity}', "holds -Infinity"),
        ('{"a": 1, "a": 2}', "has a key twice"),
        ("[" * 200_000, "nested too deeply"),
        ('{"a":' * 200_000, "nested too deeply"),
        ("[1" + "0" * 5000 + "]", "is not valid JSON"),
        ("{", "is not valid JSON"),
        (b"\xff", "is not valid JSON (invalid start byte)"),
        ("[" + " " * 100 + "]", "has 102 bytes of JSON, more than 100"),
    ],
)
def test_invalid_json_is_refused(text: str | bytes, says: str) -> None:
    with pytest.raises(DecodingError) as caught:
        parsed(text, 100 if "102" in says else 1 << 20)
    assert says in str(caught.value)


def test_a_lone_surrogate_in_a_name_survives() -> None:
    assert parsed(json.dumps("\udcff", ensure_ascii=False).encode("utf-8", "surrogatepass")) == "\udcff"


def test_a_bomb_is_unpacked_to_the_bound_and_no_further(peak_mb: Any) -> None:
    pack = zlib.compressobj(9)
    bomb = b"".join([*(pack.compress(bytes(1 << 20)) for _ in range(256)), pack.flush()])
    assert len(bomb) < 1 << 20
    with pytest.raises(DecodingError, match="unpacks to more than 1,048,576 bytes"):
        inflated(bomb, 1 << 20)
    assert peak_mb() < 16
    assert inflated(zlib.compress(b"x" * 100), 100) == b"x" * 100
    for broken in (b"", b"nothing", zlib.compress(b"x" * 100)[:-5]):
        with pytest.raises(DecodingError, match="zlib stream"):
            inflated(broken, 100)


def test_no_more_of_a_file_is_read_than_it_may_have(tmp_path: Any, peak_mb: Any) -> None:
    file = tmp_path / "large"
    with file.open("wb") as out:
        out.truncate(1 << 40)
    for read in (bytes_of, json_of):
        with pytest.raises(DecodingError, match="is larger than 1,000,000 bytes"):
            read(file, 1_000_000)
    assert peak_mb() < 16
