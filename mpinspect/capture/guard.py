"""No fault of ours may reach the user's training: it is noted, and a part that keeps failing is left alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from mpinspect.capture.meter import Meter

#: A part of the capture that failed this often is not tried again.
FAULT_LIMIT = 3


def _short(error: Exception) -> str:
    text = " ".join(repr(error).split())
    return text if len(text) <= 200 else f"{text[:200]}..."


Method = TypeVar("Method", bound=Callable[..., Any])


class Guarded:
    """Something whose ``guarded`` methods never raise an Exception.

    Args:
        note: called with a sentence about each fault.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._faults: dict[str, int] = {}
        #: Times the entrances; None where nobody asks what they cost.
        self.meter: Meter | None = None

    def gives_up(self, part: str) -> bool:
        """Whether this part failed too often to be tried again."""
        return self._faults.get(part, 0) >= FAULT_LIMIT

    def fault(self, part: str, error: Exception) -> None:
        """This part failed."""
        self._faults[part] = self._faults.get(part, 0) + 1
        what = part.strip("_").replace("_", " ")
        rest = "is not tried again" if self.gives_up(part) else "may miss some of it"
        self._note(f"mpinspect failed in {what} ({_short(error)}) and {rest}; the training is not affected")


def guarded(method: Method) -> Method:
    """A method of a Guarded: returns None where it fails. KeyboardInterrupt and SystemExit pass."""

    @functools.wraps(method)
    def run(self: Guarded, *args: Any, **kwargs: Any) -> Any:
        if self._faults and self.gives_up(method.__name__):
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.fault(method.__name__, error)
            return None

    return run  # type: ignore[return-value]


def entrance(method: Method) -> Method:
    """A guarded method through which training enters: the meter, if there is one, runs in the outermost of them."""

    @functools.wraps(method)
    def run(self: Guarded, *args: Any) -> Any:
        if self._faults and self.gives_up(method.__name__):
            return None
        meter = self.meter if self.meter is not None and not self.meter.running else None
        if meter is not None:
            meter.begin()
        try:
            return method(self, *args)
        except Exception as error:
            self.fault(method.__name__, error)
            return None
        finally:
            if meter is not None:
                meter.end()

    return run  # type: ignore[return-value]
