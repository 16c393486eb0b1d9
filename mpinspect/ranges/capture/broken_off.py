"""Finds the step, phase and module of the exception that ended a run, and the loss whose backward the loop left out."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any

import torch

from mpinspect.ranges.capture.layers import Layer
from mpinspect.ranges.capture.steps import StepClock
from mpinspect.ranges.session import (
    AFTER_BACKWARD,
    AFTER_FORWARD,
    BETWEEN_STEPS,
    ENDED_BY,
    IN_BACKWARD,
    IN_FORWARD,
    IN_OPTIMIZER,
    Measurement,
)
from mpinspect.runtime.briefly import brief
from mpinspect.runtime.user_line import users_frame

#: Most frames that are searched for a loss, elements of a container among their variables, and losses that are read.
_MOST_FRAMES, _MOST_IN_VARIABLE, _MOST_LOSSES = 16, 64, 64
_CALLS = (torch.nn.Module._call_impl.__code__, torch.nn.Module._wrapped_call_impl.__code__)
#: Words in the messages of checks for infinities and NaNs.
_OF_A_VALUE = re.compile(r"\b(nans?|infs?|(non-?)?finite|infinit\w*)\b", re.IGNORECASE)
#: The names of torch's functions that run a backward, and of the one that it wraps around every optimizer's step, by their files.
_PHASES = {
    (torch.autograd.__file__, "backward"): IN_BACKWARD,
    (torch.autograd.graph.__file__, "_engine_run_backward"): IN_BACKWARD,
    (torch.optim.Optimizer.profile_hook_step.__code__.co_filename, "wrapper"): IN_OPTIMIZER,
}


def is_failure(error: BaseException | None) -> bool:
    """Return whether an exception ends a run as a failure: neither Ctrl-C, nor an exit with status 0, nor a closed generator."""
    if isinstance(error, SystemExit):
        # Trainers turn Ctrl-C into an exit.
        return error.code not in (None, 0) and not isinstance(error.__context__, KeyboardInterrupt)
    return error is not None and not isinstance(error, (KeyboardInterrupt, GeneratorExit))


def uncaught() -> BaseException | None:
    """Return the exception that is ending this process; None without one, or in a session that continues after exceptions."""
    if hasattr(sys, "ps1"):
        return None
    error: BaseException | None = getattr(sys, "last_value", None)
    return error


def may_be_for_a_value(error: BaseException) -> bool:
    """Return whether an exception may come from a check for infinities or NaNs: by its type or text, and outside of modules."""
    if any(frame.f_code in _CALLS for frame in _frames(error)):
        return False
    return isinstance(error, (ArithmeticError, AssertionError)) or bool(_OF_A_VALUE.search(str(error)))


def broken_off(error: BaseException, layers: Iterable[Layer], clock: StepClock) -> Measurement:
    """Return the exception, its step and phase and, if it was raised in a module's forward, the module's dotted path.

    Args:
        error: the exception.
        layers: the model's modules.
        clock: the run's step clock.
    """
    paths = {id(layer.module): layer.path for layer in layers}
    phase, module = _by_clock(clock), ""
    for frame in _frames(error):
        code = frame.f_code
        if code in _CALLS and (called := id(frame.f_locals.get("self"))) in paths:
            phase, module = IN_FORWARD, paths[called]
        elif found := _PHASES.get((code.co_filename, code.co_name)):
            phase, module = found, ""
            if found == IN_BACKWARD:
                # Checkpointing recomputes forwards within a backward.
                break
    figures = {"begun": float(clock.begun), "steps": float(clock.step)}
    return Measurement(ENDED_BY, module, clock.step, figures, (phase,), brief(error))


def lost_losses(variables: Iterable[Mapping[str, Any]], waits: bool) -> list[torch.Tensor]:
    """Return the scalars with a graph that are infinite or NaN: losses that a loop has computed and left without a backward.

    Args:
        variables: the variables of the script's frames, the innermost first; small containers of tensors are searched, too.
        waits: whether to read also losses on other devices than the CPU.
    """
    found: dict[int, torch.Tensor] = {}
    for values in variables:
        for value in list(values.values()):
            for each in [value, *_inside(value)]:
                if type(each) is torch.Tensor and each.grad_fn is not None and each.numel() == 1:
                    found.setdefault(id(each), each)
    read = (each for each in found.values() if waits or each.is_cpu)
    return [each for each in islice(read, _MOST_LOSSES) if not bool(each.detach().isfinite())]


def _inside(value: object) -> list[object]:
    if not isinstance(value, (Mapping, list, tuple)) or len(value) > _MOST_IN_VARIABLE:
        return []
    return list(value.values() if isinstance(value, Mapping) else value)


#: The user's frame that has called a model, until the backward of its loss: at most one, so that little memory is kept.
_caller: list[FrameType] = []


def keep_caller() -> FrameType | None:
    """Keep the frame that has called a model, and return it: a function that returns without a backward leaves its variables."""
    _caller[:] = filter(None, [users_frame(sys._getframe(1))])
    return _caller[0] if _caller else None


def forget_caller() -> None:
    """Free the variables of a function that has returned."""
    _caller.clear()


def variables_of(error: BaseException | None) -> Iterator[dict[str, Any]]:
    """Yield the variables of the user's frames, and the script's own.

    The frames are those that an exception has left, or those that run now; then the model's caller and its callers.
    """
    left = reversed(_frames(error)) if error is not None else _with_callers(sys._getframe(1))
    for frame in dict.fromkeys([*left, *(each for caller in _caller for each in _with_callers(caller))]):
        if not str(frame.f_globals.get("__name__")).startswith(("torch.", f"{__name__.partition('.')[0]}.")):
            yield frame.f_locals
    yield vars(sys.modules["__main__"])


def _with_callers(frame: FrameType) -> Iterator[FrameType]:
    return (each for each, _ in islice(walk_stack(frame), _MOST_FRAMES))


def _by_clock(clock: StepClock) -> str:
    if clock.after_backward:
        return AFTER_BACKWARD
    if clock.in_forward:
        return AFTER_FORWARD
    return BETWEEN_STEPS


def _frames(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in walk_tb(error.__traceback__)]
