"""What a script calls its objects: the names bound to them in the frames that are running.

Only dictionaries are read, and nothing of the script's is called.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterator, Mapping
from types import FrameType
from typing import Any

#: Whose frames are no script's.
_OTHERS = ("torch", "mpinspect")
#: Frames looked at, from the inside.
_MOST_FRAMES = 40
#: In functions that use these, reading the frame would change the dictionary that they were given.
_READ_LOCALS = frozenset(("locals", "vars", "eval", "exec", "dir"))
#: Entries looked at in one list, tuple or dictionary.
_MOST_ENTRIES = 64


def names_of(wanted: Collection[int], kin: tuple[type, ...]) -> dict[int, str]:
    """The names of objects, by id: as the script's outermost frame that knows them calls them.

    An entry of a list, tuple or dictionary is "nets.0", unless all of its entries have names of their own (of the rest one may
    be a loop's variable).

    Args:
        wanted: ids of the objects.
        kin: their classes; other entries of such a list do not matter.
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
    """Local names, attributes of ``self`` and global names, the outermost frame's first."""
    frames = list(_script_frames(sys._getframe(1)))
    seen: set[int] = set()
    for frame in reversed(frames):
        held = _locals(frame)
        yield held
        owner = held.get("self")
        attributes = _attributes(owner)
        if attributes is not None:
            yield attributes
    for frame in reversed(frames):
        if id(frame.f_globals) not in seen:
            seen.add(id(frame.f_globals))
            yield frame.f_globals


def _script_frames(frame: FrameType | None) -> Iterator[FrameType]:
    looked_at = 0
    while frame is not None and looked_at < _MOST_FRAMES:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _OTHERS:
            looked_at += 1
            yield frame
            if module == "__main__" and frame.f_code.co_name == "<module>":
                return
        frame = frame.f_back


def _locals(frame: FrameType) -> Mapping[str, Any]:
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED or sys.version_info >= (3, 13):
        return frame.f_locals
    if sys.gettrace() is not None or not _READ_LOCALS.isdisjoint(frame.f_code.co_names):
        return {}
    # The frame keeps what was read, and its models alive with it.
    kept = frame.f_locals
    names = dict(kept)
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
