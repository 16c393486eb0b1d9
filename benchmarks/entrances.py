"""Measures the time that training spends inside the inspector, with a stopwatch around its entry points.

``ENTRANCES`` lists them. Each must exist, and together they must cover every function of the package that a training step
calls: ``Stopwatch`` fails for a missing name, and ``uncovered`` finds functions outside of every entrance.
"""

from __future__ import annotations

import functools
import importlib
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import mpinspect

#: The place of each lookup, at a call or when the inspector attaches: "module:name" or "module:class.name".
ENTRANCES = (
    "mpinspect.ranges.capture.tensor_hooks:ForwardHook.__call__",
    "mpinspect.ranges.capture.tensor_hooks:OutputGradientHook.__call__",
    "mpinspect.ranges.capture.tensor_hooks:ParameterHook.__call__",
    "mpinspect.ranges.capture.tensor_hooks:AccumulatedHook.__call__",
    "mpinspect.ranges.capture.waiting:WaitingGradients._backward_ends",
    "mpinspect.ranges.capture.optimizer_steps:_before",
    "mpinspect.ranges.capture.optimizer_steps:_after",
    "mpinspect.ranges.capture.loss_scale:ScaleOfBackward._begins",
    "mpinspect.ranges.capture.loss_scale:ScaleOfBackward._ended",
    "mpinspect.ranges.capture.scalers:_is_refused",
    "mpinspect.ranges.capture.listener:Listener.loss_scaled",
    "mpinspect.ranges.capture.listener:Listener.scaler_steps",
    "mpinspect.ranges.capture.listener:Listener.scaler_stepped",
    "mpinspect.ranges.capture.listener:Listener.scaler_unscales",
    "mpinspect.ranges.capture.listener:Listener.scaler_unscaled",
    "mpinspect.ranges.capture.listener:Listener.backward_called",
    "mpinspect.ranges.capture.listener:Listener.clipping",
    "mpinspect.ranges.capture.dispatcher:Dispatcher.runs_eagerly",
    "mpinspect.ranges.capture.dispatcher:backward_ended",
)
#: Functions that only call another: wrappers of torch functions, which take most of the time themselves, and a closure.
_PASSING = {
    ("scalers.py", "run"),
    ("torch_calls.py", "run"),
    ("torch_calls.py", "<listcomp>"),
    ("loss_scale.py", "backward_begins"),
}
_PACKAGE = str(Path(mpinspect.__file__).parent)


@dataclass
class Spent:
    """The calls of one entrance, in seconds of the clock and of its thread's processor: the difference is waiting."""

    calls: int = 0
    seconds: float = 0.0
    processor_seconds: float = 0.0


class Stopwatch:
    """Measures seconds inside the entrances, in outermost calls only. Waiting for the inspector's threads counts.

    Attributes:
        seconds: the sum over all entrances.
        by_entrance: the same by the entrance's name.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.by_entrance: defaultdict[str, Spent] = defaultdict(Spent)
        self.depth = 0

    def restart(self) -> None:
        self.seconds = 0.0
        self.by_entrance.clear()

    @contextmanager
    def around_entrances(self) -> Iterator[None]:
        """Time all entrances. Enter before an inspector attaches, since some hooks are looked up then.

        Raises:
            LookupError: an entrance does not exist; the message names it.
        """
        originals = [(*_found(path), path) for path in ENTRANCES]
        for owner, original, path in originals:
            setattr(owner, _name(path), self.timed(original))
        try:
            yield
        finally:
            for owner, original, path in originals:
                setattr(owner, _name(path), original)

    def timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of the function that times its calls."""

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            started, processor_started = time.perf_counter(), time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                self.depth -= 1
                if not self.depth:
                    spent, seconds = self.by_entrance[original.__qualname__], time.perf_counter() - started
                    spent.calls += 1
                    spent.seconds += seconds
                    spent.processor_seconds += time.thread_time() - processor_started
                    self.seconds += seconds

        return run


def faults_are_errors() -> None:
    """Turn the inspector's internal errors into exceptions: the work that a failed hook skips would look like speed."""
    warnings.filterwarnings("error", message="mpinspect failed", category=mpinspect.MpinspectWarning)


def uncovered(watch: Stopwatch, step: Callable[[], object]) -> list[str]:
    """Return the functions of the package that ``step`` calls outside of every entrance, as "file:function", each once.

    Args:
        watch: is timing the entrances.
        step: trains an inspected model on a CPU, once.
    """
    found: dict[str, None] = {}

    def called(frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or watch.depth or not _is_ours(frame) or _is_passing(frame):
            return
        callers = _frames_from(frame.f_back)
        # Callees of a reported function are not reported again.
        if not any(_is_ours(caller) and not _is_passing(caller) for caller in callers):
            found[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] = None

    sys.setprofile(called)
    try:
        step()
    finally:
        sys.setprofile(None)
    return list(found)


def _frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PACKAGE)


def _is_passing(frame: FrameType) -> bool:
    return (Path(frame.f_code.co_filename).name, frame.f_code.co_name) in _PASSING


def _found(path: str) -> tuple[Any, Any]:
    """Return the owner of an entrance, and the entrance."""
    module, _, inside = path.partition(":")
    owner: Any = importlib.import_module(module)
    try:
        for name in inside.split(".")[:-1]:
            owner = getattr(owner, name)
        # Only the owner's own attribute: restoring an inherited one would leave it in the subclass.
        return owner, vars(owner)[_name(path)]
    except (AttributeError, KeyError):
        raise LookupError(
            f"{path} is listed in benchmarks/entrances.py and is not there: what was called so has another name now, and its "
            "time would be missing from every figure. Name what training enters the inspector through instead"
        ) from None


def _name(path: str) -> str:
    return path.partition(":")[2].rpartition(".")[2]
