"""Interprets the arguments of a recorder: flattens nested arrays, and checks the caller's statements about an array."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mpinspect.counting.foreign import is_number_or_numbers, on_host
from mpinspect.numeric.formats import FORMATS
from mpinspect.ranges.kinds import GRADIENT_KINDS, KINDS

#: Step numbers are 64 bits wide in a session's file.
_STEPS_END = 2**63
#: Most characters quoted of an argument's value.
_LONGEST = 60


class ArgumentError(ValueError):
    """Raised for an invalid argument other than the array; ``kind`` identifies the problem, so that it is noted once."""

    def __init__(self, argument: str, given: Any, why: str) -> None:
        super().__init__(f"{argument}={quoted(given)} {why}")
        self.kind = f"{argument} of type {type(given).__name__} {why}"


@dataclass(frozen=True)
class Given:
    """The caller's statements about an array.

    Args:
        scale: the loss scale by which the array is still multiplied; None if unknown.
        passed_through: name of the format that its values were rounded to; "float32" for unrounded values.
        unknown: why the scale is unknown; "" if it is known.
        unknown_kind: the same without the scale's value, so that each reason is noted once.
    """

    scale: float | None = 1.0
    passed_through: str = "float32"
    unknown: str = ""
    unknown_kind: str = ""


def understand(kind: str, loss_scale: Any, passed_through: str | None) -> Given:
    """Return the checked arguments of ``Recorder.observe``; the loss scale is ignored unless ``kind`` is a gradient.

    Raises:
        ArgumentError: an unknown kind or format, or a loss scale that is not a number.
    """
    if not isinstance(kind, str) or kind not in KINDS:
        raise ArgumentError("kind", kind, f"is none of {', '.join(KINDS)}")
    if passed_through is not None and not (isinstance(passed_through, str) and passed_through in FORMATS):
        raise ArgumentError("passed_through", passed_through, f"is none of {', '.join(FORMATS)}")
    through = passed_through or "float32"
    if kind not in GRADIENT_KINDS:
        return Given(passed_through=through)
    if loss_scale is None:
        return Given(None, through, "loss_scale=None was given", "None")
    try:
        scale = _number(loss_scale)
    except Exception as error:
        raise ArgumentError("loss_scale", loss_scale, "is not a number; give a positive number, or None") from error
    if not math.isfinite(scale) or scale <= 0:
        kind_of_scale = "negative" if -math.inf < scale < 0 else str(scale)
        return Given(None, through, f"the loss scale was {scale}", kind_of_scale)
    return Given(scale, through)


def step_number(given: Any) -> int | None:
    """Return a step number as an exact integer, or None for None; waits for the device that holds it, if any.

    Raises:
        ArgumentError: the given value is not a whole number that fits in 64 bits.
    """
    if given is None:
        return None
    try:
        step = _whole(given)
    except Exception as error:
        raise ArgumentError("step", given, "is not a step number; give a whole number") from error
    if not -_STEPS_END < step < _STEPS_END:
        raise ArgumentError("step", given, "is too large; a step is a whole number below 2^63")
    return step


def quoted(given: Any) -> str:
    """Return the value's repr, shortened, or its type's name if repr fails."""
    try:
        text = " ".join(repr(given).split())
    except Exception:
        return f"<{type(given).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _whole(given: Any) -> int:
    """Convert a value to int; raise an Exception of any kind if the value is not a whole number."""
    try:
        return operator.index(given)
    except TypeError:
        # An array or variable that holds an integer, or a float with an integer value.
        value = _item(given)
    if isinstance(value, int):
        return value
    fraction = _number(given)
    if fraction != math.floor(fraction):
        raise ValueError("no whole number")
    return int(fraction)


def _number(given: Any) -> float:
    """Convert a number, or an array or variable that holds one, to float; waits for the device that holds it."""
    try:
        # float() itself warns for an array with dimensions and for a torch tensor that requires a gradient.
        return float(_item(given))
    except (TypeError, ValueError):
        return float(on_host(given).values.reshape(()))


def _item(given: Any) -> Any:
    return given.item() if hasattr(given, "item") else given


def leaves(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield every array in ``thing`` with its name. Keys, indices and fields are appended to ``name`` with dots.

    None (a variable without a gradient) is left out. A list of numbers counts as one array.

    Args:
        name: name of the whole structure, or "".
        thing: an array; a mapping, list, tuple or named tuple of arrays, also nested; if JAX is loaded, any of its
            pytrees.
    """
    if thing is None:
        return
    if isinstance(thing, Mapping):
        for key, part in thing.items():
            yield from leaves(_joined(name, str(key)), part)
    elif isinstance(thing, (list, tuple)) and not is_number_or_numbers(thing):
        for key, part in zip(getattr(thing, "_fields", range(len(thing))), thing, strict=True):
            yield from leaves(_joined(name, str(key)), part)
    elif "jax" in sys.modules and not hasattr(thing, "dtype"):
        yield from _of_jax(name, thing)
    else:
        yield name, thing


def _of_jax(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    jax: Any = sys.modules["jax"]
    for path, leaf in jax.tree_util.tree_flatten_with_path(thing)[0]:
        whole = name
        for step in path:
            whole = _joined(whole, _step_name(step))
        yield whole, leaf


def _step_name(step: Any) -> str:
    """Return the key, index or field name of one entry in a pytree's path."""
    for attribute in ("key", "idx", "name"):
        if hasattr(step, attribute):
            return str(getattr(step, attribute))
    return str(step)


def _joined(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part
