"""What is asked of the garbage collector: to pause while many objects are made, and which objects are alive."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, compress, islice, tee
from typing import Any


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable garbage collection within the block, and restore its setting afterwards.

    Collection would take three quarters of the time of decoding a large JSON file, and a quarter of analysing it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def living(kinds: Iterable[type], *having: tuple[Callable[[Any], Any], Container[Any]]) -> list[Any]:
    """Return the objects of exactly these types that the garbage collector tracks, in no particular order.

    Reads only types, since reading an attribute of a lazy proxy would trigger it. Takes some 0.2 s for a million objects.

    While anything holds all objects, no other thread may run: ``tuple(generator)`` in it raises SystemError where somebody else
    refers to the tuple that it fills (CPython before 3.14). So the list of them is made, searched and freed within one call of a
    C function, which holds the interpreter's lock throughout, and no finalizer runs meanwhile.

    Args:
        having: for each, a function and a container: only objects for which the container has the function's result are
            returned. Both must be C code that keeps the lock, such as an ``operator.attrgetter`` and a set.
    """
    held: deque[list[object]] = deque()
    with without_collection():
        try:
            # No variable may refer to the iterator, which keeps some of the objects until it is freed.
            return list(_of_types(frozenset(map(id, kinds)), having, held))
        finally:
            # There is none unless a function has failed: then its iterators, which it holds, still hold the list.
            for objects in held:
                objects.clear()


def with_subclasses(kind: type) -> set[type]:
    """Return a class and all classes derived from it."""
    return {kind}.union(*map(with_subclasses, kind.__subclasses__()))


def _of_types(
    wanted: frozenset[int],
    having: Iterable[tuple[Callable[[Any], Any], Container[Any]]],
    held: deque[list[object]],
) -> Iterator[object]:
    """Iterate over the tracked objects whose types have these ids. No Python code runs in it, and at its end the list is freed.

    The list holds these very iterators, so it lives on unless each of them has come to its end: hence the last None.
    """
    these, those = (chain.from_iterable(map(held.__getitem__, (0,))) for _ in range(2))
    found: Iterator[object] = compress(chain(these, (None,)), map(wanted.__contains__, map(id, map(type, those))))
    for function, values in having:
        each, same = tee(found)
        found = compress(each, map(values.__contains__, map(function, same)))
    # Of one list: that of all objects, as they are when the first is asked for.
    taken = map(held.append, islice(iter(gc.get_objects, None), 1))
    return chain(filter(None, taken), found, filter(None, map(held.__delitem__, (0,))))
