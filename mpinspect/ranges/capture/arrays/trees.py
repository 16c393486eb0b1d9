"""Nested arrays taken apart: a gradient tree of JAX, a dict or list of TensorFlow's, each leaf with its dotted name."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from mpinspect.counting.foreign import is_number_or_numbers


def leaves(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """Every array in ``thing`` with its name: keys, indices and fields are joined to ``name`` by dots.

    None (a variable without a gradient) is left out. A list of numbers is an array, a list of arrays is not.

    Args:
        name: of the whole; "" for none.
        thing: an array; a mapping, list, tuple or named tuple of such; where JAX is loaded, any of its pytrees.
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
    """The key, index or field of one step of a pytree's path."""
    for attribute in ("key", "idx", "name"):
        if hasattr(step, attribute):
            return str(getattr(step, attribute))
    return str(step)


def _joined(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part
