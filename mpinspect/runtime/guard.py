"""Isolates the user's training from our exceptions and operators.

An exception of ours is noted, and only the work that failed is lost. A mode that the user has active (``TorchDispatchMode``,
``TorchFunctionMode``) does not see the operators that an entrance calls, and neither does a tensor subclass that only overrides
``__torch_function__``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch.utils._device import DeviceContext

from mpinspect.runtime.briefly import brief
from mpinspect.runtime.device import is_capturing

if TYPE_CHECKING:
    from mpinspect.runtime.meter import Meter


_GRAPHED = "steps run as CUDA graphs are not seen: nothing can be counted inside one"


class Nameable:
    """Base of objects, such as layers, that the note on a failed method names if they are its first argument."""

    __slots__ = ()


Method = TypeVar("Method", bound=Callable[..., Any])
Key = TypeVar("Key")


class Guarded:
    """Base of classes whose ``guarded`` methods never raise an Exception.

    A method that failed is still called later: it may work for other layers or steps.

    Args:
        note: called with a sentence about each new kind of exception in a method.
    """

    #: Whether ``overrides_functions`` held for a tensor that was met: from then on ``entrance`` methods bypass such classes.
    met_overrides = False

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        #: Methods and exception types already noted; not the messages, which may differ every time.
        self._told: set[tuple[str, type[Exception]]] = set()
        #: Times the ``entrance`` methods; None if their cost is not measured.
        self.meter: Meter | None = None
        #: Whether an ``entrance`` was ever called while the user had a mode active.
        self.met_modes = False

    def captured(self, *args: Any) -> None:
        """Note that an ``entrance`` with these arguments did nothing because a graph was being captured."""
        self._note(_GRAPHED)

    def attempt(self, what: str, function: Callable[..., object], *args: Any) -> None:
        """Call a function; if it raises an Exception, note that mpinspect failed in ``what``, so that only this call is lost."""
        try:
            function(*args)
        except Exception as error:
            self.fault(what, args, error)

    def fault(self, method: str, args: tuple[Any, ...], error: Exception) -> None:
        """Note once that a method raised, with the layer or parameter that it was called for, if any."""
        if (method, type(error)) in self._told:
            return
        self._told.add((method, type(error)))
        what = method.strip("_").replace("_", " ")
        of = ""
        if args and isinstance(args[0], Nameable):
            of = f" of {args[0]}"
        self._note(
            f"mpinspect failed in {what}{of} ({brief(error)}) and may miss some of it; the training is not affected"
        )


class Unread(Generic[Key]):
    """Collects the keys of tensors that could not be read, with the reasons, for the report.

    A tensor that can't be read is left out this time, and read again the next time.
    """

    def __init__(self) -> None:
        self._told: set[tuple[Key, type[Exception]]] = set()
        self._new: dict[str, list[Key]] = {}

    def failed(self, key: Key, error: Exception) -> None:
        """Record the key of a tensor that could not be read, and the exception."""
        if (key, type(error)) not in self._told:
            self._told.add((key, type(error)))
            self._new.setdefault(brief(error), []).append(key)

    @contextmanager
    def left_out(self, key: Key) -> Iterator[None]:
        """Run a block that reads this tensor; if it raises an Exception, record the failure and suppress it."""
        try:
            yield
        except Exception as error:
            self.failed(key, error)

    def take_new(self) -> dict[str, list[Key]]:
        """Return the keys of the tensors that failed since the last call, by reason."""
        new = self._new
        if new:
            self._new = {}
        return new


#: Return the number of this thread's active modes, of either kind.
_dispatch_modes: Any = torch._C._len_torch_dispatch_stack
_function_modes: Any = torch._C._len_torch_function_stack
#: Modes under which tensors hold no values or operators are traced: hiding them would mix real and traced tensors.
_TRACERS: Any = [getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL")]


class _Hidden(threading.local):
    any = False


_hidden = _Hidden()
_Taken = list[tuple[Callable[[Any], None], Any]]


def _take_modes_off(taken: _Taken) -> None:
    """Take all modes off this thread's two stacks, except while torch traces; append to ``taken`` how to restore each.

    A lone default device (``torch.set_default_device``) stays: it is a mode too, but observes no operators.
    """
    own: Any = torch._C
    if _dispatch_modes():
        if any(own._get_dispatch_mode(tracer) is not None for tracer in _TRACERS):
            return
    elif _function_modes() == 1 and type(own._get_function_stack_at(0)) is DeviceContext:
        return
    while _function_modes():
        taken.append((own._push_on_torch_function_stack, own._pop_torch_function_stack()))
    while _dispatch_modes():
        taken.append((own._push_on_torch_dispatch_stack, own._pop_torch_dispatch_stack(None)))
    _hidden.any = bool(taken)


def _put_modes_back(taken: _Taken) -> None:
    _hidden.any = _hidden.any and not taken
    while taken:
        push, mode = taken.pop()
        push(mode)


def hides_modes() -> bool:
    """Return whether modes of this thread are hidden at the moment, because an entrance runs below them."""
    return _hidden.any


@functools.cache
def overrides_functions(kind: type[torch.Tensor]) -> bool:
    """Return whether a class overrides ``__torch_function__`` alone, as loggers do; its values can be read without it."""
    own = getattr(kind.__torch_function__, "__func__", None)
    return own not in (None, torch.Tensor.__torch_function__.__func__) and (  # type: ignore[attr-defined]
        kind.__torch_dispatch__ == torch.Tensor.__torch_dispatch__
    )


def unseen(method: Method) -> Method:
    """Wrap a method so that the user's active modes do not see the operators that it calls."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        taken: _Taken = []
        try:
            if _dispatch_modes() or _function_modes():
                _take_modes_off(taken)
            return method(*args, **kwargs)
        finally:
            _put_modes_back(taken)

    return run  # type: ignore[return-value]


def guarded(method: Method) -> Method:
    """Wrap a method of a Guarded to note any Exception and return None; KeyboardInterrupt and SystemExit pass."""

    @functools.wraps(method)
    def run(self: Guarded, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.fault(method.__name__, args, error)
            return None

    return run  # type: ignore[return-value]


def entrance(method: Method) -> Method:
    """Wrap a method called by the training like ``guarded`` and ``unseen``; time the outermost such call if there is a meter.

    While a graph is captured the method is not called: its launches would become part of the graph, and each replay would
    write to memory that we have freed.
    """

    @functools.wraps(method)
    def run(self: Guarded, *args: Any) -> Any:
        if is_capturing():
            self.captured(*args)
            return None
        meter = self.meter
        if meter is not None and meter.running:
            meter = None
        if meter is not None:
            meter.begin()
        taken: _Taken | None = None
        try:
            if _dispatch_modes() or _function_modes():
                taken = []
                _take_modes_off(taken)
            if self.met_overrides:
                with torch._C.DisableTorchFunctionSubclass():
                    return method(self, *args)
            return method(self, *args)
        except Exception as error:
            self.fault(method.__name__, args, error)
            return None
        finally:
            if taken:
                self.met_modes = True
                _put_modes_back(taken)
            if meter is not None:
                meter.end()

    return run  # type: ignore[return-value]
