"""Sentences on a forward that was not finite, which several faults share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from mpinspect.numeric.formats import FLOAT16
from mpinspect.ranges.records import BrokenLoss, recorded
from mpinspect.ranges.session import LOSSES, Event, Session, is_below, module_named
from mpinspect.reporting.sentences import Sentences
from mpinspect.reporting.words import bracketed, filled, format_name

#: First values of modules whose output is made of products with their weights, or of their weights alone.
_OF_WEIGHTS = frozenset(("nan", kind) for kind in ("Linear", "Conv1d", "Conv2d", "Conv3d", "Embedding"))
#: Fewer steps are not called periodic.
_FEWEST_STEPS = 3


class Inspect(Sentences):
    """The code or data in which to search for the origin of an infinity or NaN of the forward."""

    DATA = "Look at the data of step {step} and at its preprocessing."
    LOSS = "Look at the loss function{made_by}, and at the targets of step {step}."
    LOSS_IN_FP16 = (
        "Look at the loss function{made_by}, and at the targets of step {step}; where a sum or product in it exceeds 65504, "
        "compute it in FP32, from outputs that are cast to FP32 before the loss."
    )
    WEIGHTS = (
        "Look at the weights of {module}, and at what wrote or computes them before the forward of step {step}: an optimizer's "
        "step, the initialisation, a hook. From finite weights, numbers in {dtype:format} become NaN only if they exceed 3e38 "
        "before."
    )
    MODULE = "Look at the inputs, the weights and the arithmetic of {module} at step {step}."
    MODULE_IN_FP16 = (
        "Look at the arithmetic of {module} in step {step}. If values exceed 65504, compute it in FP32, and the modules after "
        "it until values are below that again."
    )


class InVain(Sentences):
    NEW_SCALER = (
        "If you stay in FP16, make a new GradScaler: the scale of this one was lowered {lowered} times for nothing."
    )


def where_to_inspect(first: Event, session: Session) -> tuple[Inspect, dict[str, object]]:
    """Return the sentence for a forward that was not finite, and its figures."""
    words = {"step": first.step, "made_by": loss_made_by(first, session), "module": module_named(first.module)}
    in_half = was_in_half(first, session)
    if first.given:
        return Inspect.DATA, words
    if first.what in LOSSES:
        return Inspect.LOSS_IN_FP16.when(in_half) or Inspect.LOSS, words
    has_finite_input = "its input was finite" in first.explanation.split("; ")
    # On a CPU the weights are read.
    on_device = session.info.devices not in ("", "cpu")
    if (
        (first.value, first.module_type) in _OF_WEIGHTS
        and has_finite_input
        and first.dtype
        and not in_half
        and on_device
    ):
        return Inspect.WEIGHTS, {**words, "dtype": first.dtype}
    return Inspect.MODULE_IN_FP16.when(in_half) or Inspect.MODULE, words


def was_in_half(first: Event, session: Session) -> bool:
    """Return whether FP16 was computed in where an event arose: in the loss's own code, a module, or those within it."""
    loss = _broken_loss(first, session)
    if loss is not None:
        return loss.in_half
    if first.dtype and first.dtype != FLOAT16.name:
        # A container that returns another dtype may compute in FP16 within.
        has_modules = any(is_below(info.module, first.module) for info in session.watched)
        return first.what not in LOSSES and has_modules and _has_half(session)
    return first.dtype == FLOAT16.name or _has_half(session)


def _broken_loss(first: Event, session: Session) -> BrokenLoss | None:
    """Return the record of the loss of an event, if the event is one and its operations are known."""
    losses = recorded(session.measurements, BrokenLoss)
    return next((each for each in losses if each.step == first.step and first.what in LOSSES), None)


def _has_half(session: Session) -> bool:
    return FLOAT16.name in (*session.precision.outputs, *session.passed_through())


def loss_made_by(first: Event, session: Session) -> str:
    """Return the operations of a loss that was not finite and their dtype, in brackets after a space; "" if not known."""
    found = _broken_loss(first, session)
    if found is None or not found.names:
        return ""
    return bracketed(f"autograd's {' of '.join(found.names)}", filled("in {}", format_name(found.text)))


def period(steps: Sequence[int]) -> str:
    """Return " and then every 5 steps" if three steps or more recur with a period of more than one; else ""."""
    gaps = {after - before for before, after in pairwise(steps)}
    recurs = len(steps) >= _FEWEST_STEPS and len(gaps) == 1 and min(gaps) > 1
    return filled(" and then every {} steps", (recurs and min(gaps)) or None)
