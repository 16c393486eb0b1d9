"""Decodes files into Python objects, strictly, within bounded memory, and typed by the annotations of the records.

Sessions, baselines and run records are passed between people, and may be damaged or malicious. Every reader uses this
module: ``inflated`` and ``parsed`` bound the memory that a few bytes can take, and ``typed`` checks each value against
its field's annotation, including ``Annotated`` bounds, so that users of a reader get only values of the right type.
"""

from __future__ import annotations

import dataclasses
import json
import math
import stat
import types
import typing
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

#: Most bytes of JSON parsed at once: a list of a million empty lists takes 24 times as much memory as its text.
LARGEST_JSON = 32 << 20
#: Most characters of a value that an error quotes.
_QUOTED = 40

Kind = TypeVar("Kind")


class DecodingError(ValueError):
    """Decoded data is not as expected. The message is a phrase that names the field and the error.

    Args:
        phrase: the error, worded to follow the name of the file or field.
        field: dotted path of the field; "" for the whole file.
    """

    def __init__(self, phrase: str, field: str = "") -> None:
        super().__init__(f"{field} {phrase}".lstrip())
        self.phrase = phrase
        self.field = field

    def below(self, name: str) -> DecodingError:
        """Return the same error with the field's path prefixed by ``name``, the field of the enclosing record."""
        return DecodingError(self.phrase, f"{name}.{self.field}".rstrip("."))


class Between(typing.NamedTuple):
    """A bound on numbers, for use in ``Annotated``: ``low`` <= number <= ``high``."""

    low: float
    high: float


class OneOf(typing.NamedTuple):
    """The strings allowed in a field, for use in ``Annotated``."""

    words: tuple[str, ...]


# -- bytes ----------------------------------------------------------------------------------------------------------------


def bytes_of(path: Path, most: int) -> bytes:
    """Return the content of a file.

    Raises:
        DecodingError: the file has more than ``most`` bytes; the rest is not read.
        OSError: the file can't be read, or is a pipe or a device.
    """
    check_is_file(path)
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise DecodingError(f"is larger than {most:,} bytes")
    return data


def check_is_file(path: Path) -> None:
    """Raise OSError for a pipe or a device, whose opening or reading may wait without end; a descriptor in /dev may be one."""
    kind = path.stat().st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind) or path.parts[1:2] in (("dev",), ("proc",))):
        raise OSError("it is a pipe or a device, not a file")


def inflated(data: bytes, most: int) -> bytes:
    """Return the decompressed data of a whole zlib stream; ignore bytes after its end.

    Raises:
        DecodingError: ``data`` is no zlib stream, is cut short, or has more than ``most`` bytes, which are not decompressed.
    """
    stream = zlib.decompressobj()
    try:
        unpacked = stream.decompress(data, most + 1)
    except zlib.error as error:
        raise DecodingError(f"is no zlib stream ({error})") from None
    if len(unpacked) > most:
        raise DecodingError(f"unpacks to more than {most:,} bytes")
    if not stream.eof:
        raise DecodingError("is a zlib stream that is cut short")
    return unpacked


# -- JSON -----------------------------------------------------------------------------------------------------------------


def parsed(text: str | bytes, most: int = LARGEST_JSON) -> Any:
    """Return the value of strict JSON text, without NaN, infinities or duplicate keys in an object.

    Args:
        text: a string, or bytes in UTF-8, which may contain encoded lone surrogates.
        most: largest allowed length, in characters or bytes.

    Raises:
        DecodingError: the text is longer, nested beyond the interpreter's recursion limit, or not valid JSON.
    """
    if len(text) > most:
        raise DecodingError(f"has {len(text):,} bytes of JSON, more than {most:,}")
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "surrogatepass")
        return _JSON.decode(text)
    except RecursionError:
        raise DecodingError("is nested too deeply") from None
    except DecodingError:
        raise
    except UnicodeDecodeError as error:
        # Its message quotes the whole text.
        raise DecodingError(f"is not valid JSON ({error.reason})") from None
    except ValueError as error:
        raise DecodingError(f"is not valid JSON ({error})") from None


def json_of(path: Path, most: int = LARGEST_JSON) -> Any:
    """Return the value in a JSON file.

    Raises:
        DecodingError: as for ``bytes_of`` and ``parsed``.
        OSError: the file can't be read.
    """
    return parsed(bytes_of(path, most), most)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise DecodingError("has a key twice in one JSON object")
    return found


def _no_number(name: str) -> float:
    raise DecodingError(f"holds {name}, which is no JSON")


_JSON = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_number)


# -- types ----------------------------------------------------------------------------------------------------------------

#: Checks and converts many values of one annotation at once: checking a column takes a few calls of built-in functions,
#: however long the column is.
_Reader = Callable[[list[Any]], list[Any]]


def typed(kind: type[Kind], value: Any) -> Kind:
    """Return a parsed JSON value as an instance of ``kind``; see ``each``."""
    (found,) = each(kind, [value])
    return found


def each(kind: type[Kind], values: list[Any]) -> list[Kind]:
    """Return parsed JSON values, each as an instance of ``kind``.

    Args:
        kind: a dataclass or NamedTuple, or an annotation that their fields may have: str, int, float, bool, Any,
            tuple[X, ...], Mapping[str, X], dict[str, X], X | None, and Annotated with Between or OneOf. Dataclasses
            and NamedTuples are made from objects, ignoring unknown fields and using defaults for missing ones; NamedTuples
            also from arrays. A float may also be one of the strings "inf", "-inf" and "nan".
        values: as returned by ``parsed``.

    Raises:
        DecodingError: a value can't be converted to ``kind``.
    """
    found: list[Kind] = _reader(typing.cast(Hashable, kind))(values)
    return found


@cache
def _reader(kind: Hashable) -> _Reader:
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        base, *bounds = typing.get_args(kind)
        return _bounded(_reader(base), bounds)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (part for part in typing.get_args(kind) if part is not types.NoneType)
        return _optional(_reader(inner))
    if origin is tuple:
        return _several(_reader(typing.get_args(kind)[0]))
    if origin in (Mapping, dict):
        return _mapping(_reader(typing.get_args(kind)[1]), types.MappingProxyType if origin is Mapping else dict)
    if kind is Any:
        return _unchecked
    if kind is float:
        return _floats
    if kind in _NAMES:
        return _plain(kind)
    return _record(kind)


#: Names of types of JSON values in errors.
_NAMES: dict[type, str] = {
    str: "text", int: "a whole number", float: "a number", bool: "true or false", list: "an array", dict: "an object",
    types.NoneType: "null",
}  # fmt: skip


def _plain(kind: type) -> _Reader:
    def read(values: list[Any]) -> list[Any]:
        _require(kind, values)
        return values

    return read


def _unchecked(values: list[Any]) -> list[Any]:
    return values


def _require(kind: type, values: list[Any]) -> None:
    """Raise DecodingError if a value is not exactly of type ``kind``; True, for example, is not an int."""
    if not set(map(type, values)) <= {kind}:
        wrong = next(value for value in values if type(value) is not kind)
        raise DecodingError(f"is {_shown(wrong)}, not {_NAMES[kind]}")


def _shown(value: Any) -> str:
    """Return a short text of a value for an error; only the type of a container, which may be deeply nested."""
    if isinstance(value, (list, dict)) or value is None:
        return _NAMES[type(value)]
    if isinstance(value, str):
        return repr(value[:_QUOTED])
    text = repr(value)
    return text if len(text) <= _QUOTED + 2 else f"{text[:_QUOTED]}..."


def _floats(values: list[Any]) -> list[Any]:
    if set(map(type, values)) <= {float} and all(map(math.isfinite, values)):
        return values
    return [*map(_float, values)]


def _float(value: Any) -> float:
    if type(value) is float or type(value) is int:
        # Reject a number beyond float64 instead of making it infinite.
        if abs(value) <= _LARGEST_FLOAT:
            return float(value)
        raise DecodingError(f"is {_shown(value)}, beyond float64")
    if isinstance(value, str) and value in ("inf", "-inf", "nan"):
        return float(value)
    raise DecodingError(f"is {_shown(value)}, not {_NAMES[float]}")


_LARGEST_FLOAT = (2.0 - 2.0**-52) * 2.0**1023


def _bounded(read: _Reader, bounds: list[Between | OneOf]) -> _Reader:
    def read_bounded(values: list[Any]) -> list[Any]:
        found = read(values)
        if not found:
            return found
        for bound in bounds:
            if isinstance(bound, OneOf):
                if not set(found) <= set(bound.words):
                    wrong = next(value for value in found if value not in bound.words)
                    raise DecodingError(f"is {_shown(wrong)}, none of {', '.join(bound.words)}")
            # Also rejects NaN.
            elif not (bound.low <= min(found) and max(found) <= bound.high and not any(map(math.isnan, found))):
                wrong = next(value for value in found if not bound.low <= value <= bound.high)
                raise DecodingError(f"is {_shown(wrong)}, not within {bound.low:,} .. {bound.high:,}")
        return found

    return read_bounded


def _optional(read: _Reader) -> _Reader:
    def read_optional(values: list[Any]) -> list[Any]:
        return _apart(read, values, None, None)

    return read_optional


def _several(read: _Reader) -> _Reader:
    def read_several(values: list[Any]) -> list[Any]:
        _require(list, values)
        if len(values) == 1:
            return [tuple(read(values[0]))]
        found = iter(read(list(chain.from_iterable(values))))
        return [tuple(islice(found, len(value))) for value in values]

    return read_several


def _mapping(read: _Reader, made: Callable[[dict[str, Any]], Any]) -> _Reader:
    def read_mapping(values: list[Any]) -> list[Any]:
        _require(dict, values)
        found = iter(read([item for value in values for item in value.values()]))
        return [made({key: next(found) for key in value}) for value in values]

    return read_mapping


def _record(kind: Any) -> _Reader:
    """Return the reader of a dataclass or a NamedTuple."""
    annotations = typing.get_type_hints(kind, include_extras=True)
    names = _field_names(kind)
    readers = {name: _reader(annotations[name]) for name in names}
    defaults = _defaults(kind)
    is_tuple = issubclass(kind, tuple)

    def read(values: list[Any]) -> list[Any]:
        if is_tuple and set(map(type, values)) <= {list}:
            columns = _transposed(values, len(names))
        else:
            _require(dict, values)
            columns = [[value.get(name, _MISSING) for value in values] for name in names]
        read_columns = []
        for name, column in zip(names, columns, strict=True):
            try:
                read_columns.append(_present(readers[name], list(column), defaults.get(name, _MISSING)))
            except DecodingError as error:
                raise error.below(name) from None
        return [*map(kind, *read_columns)]

    return read


_MISSING: Any = object()


def _field_names(kind: Any) -> tuple[str, ...]:
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    names: tuple[str, ...] = kind._fields
    return names


def _defaults(kind: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(kind):
        return dict(kind._field_defaults)
    fields = dataclasses.fields(kind)
    made = {f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING}
    return made | {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}


def _transposed(rows: list[list[Any]], width: int) -> Iterable[Iterable[Any]]:
    if not set(map(len, rows)) <= {width}:
        wrong = next(row for row in rows if len(row) != width)
        raise DecodingError(f"is an array of {len(wrong):,}, not of {width}")
    if not rows:
        return [()] * width
    return zip(*rows, strict=True)


def _present(read: _Reader, values: list[Any], default: Any) -> list[Any]:
    """Return a column with each missing field replaced by its default."""
    if not any(value is _MISSING for value in values):
        return read(values)
    if default is _MISSING:
        raise DecodingError("is missing")
    return _apart(read, values, _MISSING, default)


def _apart(read: _Reader, values: list[Any], mark: object, default: Any) -> list[Any]:
    """Return a column that is read without the values that are ``mark``, which become the default."""
    found = iter(read([value for value in values if value is not mark]))
    return [default if value is mark else next(found) for value in values]
