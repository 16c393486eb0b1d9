"""How an exception leaves the script: shown as Python shows it, without the frames that are ours."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import TracebackType

from mpinspect.run import script
from mpinspect.runtime import own_code

_IMPORT_MACHINERY = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")


def show_without_our_frames(afterwards: Callable[[], None]) -> None:
    """From now on whatever hook shows the exception that ends the script gets it as if Python had run the script.

    Args:
        afterwards: called when the exception has been shown.
    """
    # A script may have deleted it.
    is_missing = not hasattr(sys, "excepthook")
    shown_by = sys.__excepthook__ if is_missing else sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        clean(error)
        sys.last_traceback = error.__traceback__
        if is_missing:
            _write("sys.excepthook is missing\n")
        # The script's hook finds things as it left them.
        sys.excepthook = shown_by
        _show(shown_by, error)
        afterwards()

    sys.excepthook = show


def clean(error: BaseException) -> None:
    """Take our frames out of the tracebacks of an exception and of all that it came from."""
    for each in _family(error):
        each.__traceback__ = _without_ours(each.__traceback__)


def _show(hook: Callable[..., object], error: BaseException) -> None:
    """Call the hook; a hook that fails is shown as the interpreter shows it."""
    try:
        hook(type(error), error, error.__traceback__)
        return
    except SystemExit:
        raise
    except BaseException as fault:
        broken = fault
    clean(broken)
    _write("Error in sys.excepthook:\n")
    sys.__excepthook__(type(broken), broken, broken.__traceback__)
    _write("\nOriginal exception was:\n")
    sys.__excepthook__(type(error), error, error.__traceback__)


def _write(text: str) -> None:
    # print() would turn to stdout where there is no stderr.
    if sys.stderr is not None:
        sys.stderr.write(text)


def _family(error: BaseException) -> Iterator[BaseException]:
    """The exception, its causes and contexts, and those of a group, each once."""
    known: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in known:
            continue
        known.add(id(each))
        yield each
        waiting += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    frames = list(_links(trace))
    kept = [link for link, drop in zip(frames, _dropped(frames), strict=True) if not drop]
    following = None
    for link in reversed(kept):
        link.tb_next = following
        following = link
    return following


def _dropped(frames: list[TracebackType]) -> list[bool]:
    """Whether each frame goes: all up to the one that runs the script, ours wherever they are, and the import machinery
    right before one of ours, which Python takes out itself where nobody stands between."""
    starts = [i for i, link in enumerate(frames) if link.tb_frame.f_code in script.LAST_OF_OURS]
    first = starts[-1] + 1 if starts else 0
    dropped = [i < first or _is_ours(link) for i, link in enumerate(frames)]
    for i in range(len(frames) - 2, first - 1, -1):
        if dropped[i + 1] and frames[i].tb_frame.f_code.co_filename in _IMPORT_MACHINERY:
            dropped[i] = True
    return dropped


def _is_ours(link: TracebackType) -> bool:
    return own_code.is_of(link.tb_frame, own_code.RUNNING_SCRIPTS)


def _links(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
