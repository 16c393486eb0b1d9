"""Names models for the report: by class, by path in a larger model, or by the variable that the script binds them to.

Reads only dictionaries of the script's frames and objects, and never calls the script's code.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn

from mpinspect.run.models.owners import Holders, Parameters
from mpinspect.runtime.wrappers import class_of, named_children, unwrapped, wrapped_by

#: Packages whose frames do not count as the script's.
_OTHERS = ("torch", "mpinspect")
#: Most frames that are read, starting from the innermost.
_MOST_FRAMES = 40
#: Functions that use one of these are not read: reading their frame would change the dictionary of locals they hold.
_READ_LOCALS = frozenset(("locals", "vars", "eval", "exec", "dir"))
#: Largest number of entries read from one list, tuple or dictionary.
_MOST_ENTRIES = 64


@dataclass(frozen=True)
class Label:
    """The candidates for a model's name.

    Args:
        parent: class of the outermost enclosing module and the path from it, as "ActorCritic.actor"; "" without one.
        variable: name of the script's variable that holds the model; "" without one.
    """

    parent: str = ""
    variable: str = ""


def label(model: nn.Module, holders: Holders, variables: Mapping[int, str]) -> Label:
    """Return a model's label, from its enclosing modules and ``variables``, the script's names by object id."""
    around = {id(top): top for top in map(unwrapped, holders.outermost(model))}
    if len(around) != 1 or id(model) in around:
        # If two separate outermost modules hold it, it is named after neither.
        return Label("", variables.get(id(model), ""))
    (top,) = around.values()
    path = _path(top, model)
    of_torch = _is_of_torch(top) and variables.get(id(top))
    parent = ".".join((of_torch or class_of(top).__name__, *path)) if path else ""
    return Label(parent, variables.get(id(model), ""))


def free_name(model: nn.Module, known: Label, taken: Mapping[str, Label]) -> str:
    """Return a unique name for a model and its directory: its path in a larger model, its class or its variable.

    ``known``: the model's label; ``taken``: labels of the models named before, by name.
    """
    wanted = [_plain(name) for name in _wanted(model, known) if name] or ["Model"]
    for name in wanted:
        if name not in taken:
            return name
        if taken[name] == known:  # a model created again in the same place
            return _numbered(name, taken)
    return _numbered(wanted[0], taken)


def _wanted(model: nn.Module, known: Label) -> Iterable[str]:
    if isinstance(model, Parameters):
        return ("Parameters",)
    if known.parent:
        return (known.parent,)
    names = (class_of(model).__name__, known.variable)
    # A class of torch's, such as Sequential, names a model less well than its variable.
    return names[::-1] if _is_of_torch(model) else names


def _numbered(name: str, taken: Mapping[str, Any]) -> str:
    numbers = range(2, len(taken) + 3)
    return next(each for number in numbers if (each := f"{name}-{number}") not in taken)


def _plain(name: str) -> str:
    return re.sub(r"[^\w.\-]+", "_", name)


def _is_of_torch(model: nn.Module) -> bool:
    """Return whether the model's class is one of torch's, such as Sequential, and so makes a poor name."""
    return class_of(model).__module__.startswith("torch.nn.")


def _path(top: nn.Module, model: nn.Module) -> tuple[str, ...]:
    """Return the shortest path from ``top`` to ``model``, without wrappers; () if no path exists."""
    seen = {id(top)}
    waiting: list[tuple[nn.Module, tuple[str, ...]]] = [(top, ())]
    for each, path in waiting:
        for name, child in named_children(each):
            inside = path if wrapped_by(each) is child else (*path, name)
            if child is model:
                return inside
            if id(child) not in seen:
                seen.add(id(child))
                waiting.append((child, inside))
    return ()


# -- the script's variables ----------------------------------------------------------------------------------------------


def names_of(wanted: Collection[int], kin: tuple[type, ...]) -> dict[int, str]:
    """Return the script's names for objects, by id; if several frames name an object, use the outermost frame.

    An entry of a list, tuple or dictionary is named like "nets.0", unless every entry has its own variable. If only some
    entries have one, it may be a loop variable.

    Args:
        wanted: ids of the objects.
        kin: their base classes; container entries of other classes are ignored.
    """
    if not wanted:
        return {}
    own: dict[int, str] = {}
    several: list[dict[int, str]] = []
    for scope in _scopes():
        for name, value in list(scope.items()):
            if not isinstance(name, str) or name.startswith("_"):
                continue
            own.setdefault(id(value), name)
            entries = {id(each): f"{name}.{key}" for key, each in _entries(value) if issubclass(type(each), kin)}
            if not entries.keys().isdisjoint(wanted):
                several.append(entries)
    found = {key: name for key, name in own.items() if key in wanted}
    for entries in reversed(several):
        if not entries.keys() <= own.keys():
            found.update((key, name) for key, name in entries.items() if key in wanted)
    return found


def _scopes() -> Iterator[Mapping[str, Any]]:
    """Yield each frame's attributes of ``self`` and its locals, outermost frame first, then the global namespaces.

    Attributes precede the locals, which from Python 3.12 on include the variables of comprehensions.
    """
    frames = list(_script_frames(sys._getframe(1)))
    seen: set[int] = set()
    for frame in reversed(frames):
        held = _locals(frame)
        attributes = _attributes(held.get("self"))
        if attributes is not None:
            yield attributes
        yield held
    for frame in reversed(frames):
        if id(frame.f_globals) not in seen:
            seen.add(id(frame.f_globals))
            yield frame.f_globals


def _script_frames(frame: FrameType | None) -> Iterator[FrameType]:
    read = 0
    while frame is not None and read < _MOST_FRAMES:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _OTHERS:
            read += 1
            yield frame
            if module == "__main__" and frame.f_code.co_name == "<module>":
                return
        frame = frame.f_back


def _locals(frame: FrameType) -> dict[str, Any]:
    """Return a frame's variables by name; variables that may belong to a comprehension come last or are omitted."""
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED:
        # The fast locals of a module or class are the variables of its comprehensions, from Python 3.12 on.
        return {name: value for name, value in frame.f_locals.items() if name not in code.co_varnames}
    is_cached = sys.version_info < (3, 13)
    if is_cached and (sys.gettrace() is not None or not _READ_LOCALS.isdisjoint(code.co_names)):
        return {}
    kept = frame.f_locals
    # Variables shared with a closure are not fast locals, so they can't be comprehension variables.
    names = dict(sorted(kept.items(), key=lambda item: item[0] in code.co_varnames))
    if is_cached:
        # Before Python 3.13 the frame caches this dictionary, which would extend the models' lifetime.
        kept.clear()
    return names


def _attributes(owner: object) -> dict[str, Any] | None:
    try:
        attributes = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None
    return attributes if type(attributes) is dict else None


def _entries(value: Any) -> Iterator[tuple[Any, Any]]:
    if type(value) in (list, tuple):
        yield from enumerate(value[:_MOST_ENTRIES])
    elif type(value) is dict and len(value) <= _MOST_ENTRIES:
        yield from ((key, entry) for key, entry in list(value.items()) if type(key) in (str, int))
