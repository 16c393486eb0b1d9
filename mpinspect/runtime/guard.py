"""No fault of ours may reach the user's training: it is noted, and costs no more than what it was about."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from mpinspect.runtime.meter import Meter


class Nameable:
    """What a method may be called for: a fault of the method says its name, as ``str`` gives it."""

    __slots__ = ()


def _short(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 200 else f"{text[:200]}..."


Method = TypeVar("Method", bound=Callable[..., Any])
Key = TypeVar("Key")


class Guarded:
    """Something whose ``guarded`` methods never raise an Exception.

    A method that failed is called again the next time: what failed at one layer, or at one step, may serve all others.

    Args:
        note: called with a sentence about each fault.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        #: Methods, and types of errors, that were told of: an error's text may differ every time.
        self._told: set[tuple[str, type[Exception]]] = set()
        #: Times the entrances; None where nobody asks what they cost.
        self.meter: Meter | None = None

    def fault(self, method: str, args: tuple[Any, ...], error: Exception) -> None:
        """Note that a method failed, with the layer or parameter that it was called for, if any."""
        if (method, type(error)) in self._told:
            return
        self._told.add((method, type(error)))
        what = method.strip("_").replace("_", " ")
        of = f" of {args[0]}" if args and isinstance(args[0], Nameable) else ""
        self._note(
            f"mpinspect failed in {what}{of} ({_short(error)}) and may miss some of it; the training is not affected"
        )


class Unread(Generic[Key]):
    """Gathers the tensors, by whatever tells them apart, that could not be read, for the report to name them with the reason.

    A fault at a tensor costs that tensor where it happens. It is read again the next time, which may go well.
    """

    def __init__(self) -> None:
        self._told: set[tuple[Key, type[Exception]]] = set()
        self._new: dict[str, list[Key]] = {}

    def failed(self, key: Key, error: Exception) -> None:
        """Take a tensor that could not be read, and what was raised."""
        if (key, type(error)) not in self._told:
            self._told.add((key, type(error)))
            self._new.setdefault(_short(error), []).append(key)

    @contextmanager
    def left_out(self, key: Key) -> Iterator[None]:
        """Run a block that reads this tensor; if it raises an Exception, the tensor has failed and what follows goes on."""
        try:
            yield
        except Exception as error:
            self.failed(key, error)

    def take_new(self) -> dict[str, list[Key]]:
        """Return the tensors that failed since the last call, by reason."""
        new = self._new
        if new:
            self._new = {}
        return new


def guarded(method: Method) -> Method:
    """Return a method of a Guarded: returns None where it fails. KeyboardInterrupt and SystemExit pass."""

    @functools.wraps(method)
    def run(self: Guarded, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.fault(method.__name__, args, error)
            return None

    return run  # type: ignore[return-value]


def entrance(method: Method) -> Method:
    """Return a guarded method through which training enters: the meter, if there is one, runs in the outermost of them."""

    @functools.wraps(method)
    def run(self: Guarded, *args: Any) -> Any:
        meter = self.meter if self.meter is not None and not self.meter.running else None
        if meter is not None:
            meter.begin()
        try:
            return method(self, *args)
        except Exception as error:
            self.fault(method.__name__, args, error)
            return None
        finally:
            if meter is not None:
                meter.end()

    return run  # type: ignore[return-value]
