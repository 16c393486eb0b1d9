"""Faults of the division by the loss scale: left out, too late, or done more than once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mpinspect.ranges.faults.name.case import Case, again, grouped
from mpinspect.ranges.faults.name.fault import Fault, Found
from mpinspect.ranges.records import (
    ChangedBeforeStep,
    ChangedWhileScaled,
    SteppedWhileScaled,
    UnscaledAgain,
    UnscaledNeverScaled,
)
from mpinspect.reporting.sentences import Sentences
from mpinspect.reporting.words import filled, with_power

#: Ratios that differ by at most this relative amount count as equal.
_SAME = 0.01
#: A gradient of at most this multiple of the true one has been divided by the scale by other code.
_UNSCALED_BY_HAND = 2.0
#: Division by a whole number up to this is taken for averaging over micro-batches, which may happen before unscaling.
_MOST_MICRO_BATCHES = 1024


class _Unscale(Sentences):
    CLIPPED = (
        "In step {step}{again} the gradients were clipped while they were still multiplied by the loss scale of "
        "{loss_scale:scale}: the result was {factor:.2g} times as large. The limit was meant for the true gradients, "
        "{loss_scale:factor} times smaller."
    )
    CHANGED = (
        "In step {step}{again} the gradients were changed, or clipped value by value, while they were still multiplied by the "
        "loss scale of {loss_scale:scale}: the result was {factor:.2g} times as large. The limit was meant for the true "
        "gradients, {loss_scale:factor} times smaller."
    )
    CLIPPED_AT_UNKNOWN_SCALE = (
        "In step {step}{again} the gradients were clipped while they were still multiplied by the loss scale: the result was "
        "{factor:.2g} times as large. The limit was meant for the true gradients, smaller by the loss scale."
    )
    CHANGED_AT_UNKNOWN_SCALE = (
        "In step {step}{again} the gradients were changed, or clipped value by value, while they were still multiplied by the "
        "loss scale: the result was {factor:.2g} times as large. The limit was meant for the true gradients, smaller by the "
        "loss scale."
    )
    STEPPED = (
        "In step {step} the optimizer stepped with gradients that were still multiplied by the loss scale of "
        "{loss_scale:scale}: scaler.scale() was called, and neither scaler.step() nor scaler.unscale_()."
    )
    UNSCALE_FIRST = "Unscale before clipping or reading gradients."
    LET_SCALER_STEP = (
        "Let the scaler step the optimizer: it divides by the scale first, and skips a step that overflowed."
    )
    CLIP_NORM = (
        "scaler.unscale_(optimizer)\n"
        "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)\n"
        "scaler.step(optimizer)"
    )
    CLIP_VALUE = (
        "scaler.unscale_(optimizer)\n"
        "torch.nn.utils.clip_grad_value_(model.parameters(), clip_value)\n"
        "scaler.step(optimizer)"
    )
    SCALER_STEP = "scaler.step(optimizer)  # instead of optimizer.step()\nscaler.update()"


def _unscale_missing(case: Case) -> Iterator[Found]:
    """Gradients that were clipped, changed otherwise, or stepped with while they were multiplied by the loss scale.

    False alarms: Division by a whole number of micro-batches is not reported. A limit that was multiplied by the loss scale
    on purpose is reported. Gradients of at most twice their true size are taken to have been unscaled by hand, and an optimizer's
    step with them is not reported.
    """
    changed = _changed(case)
    scales = {change.scale for change in case.progress.scales}
    is_scaled = not scales <= {1.0, None}
    if changed and is_scaled and not _is_divided_by_hand(case, changed) and not _is_average(changed):
        yield _clipped(changed, case)
    for measured in case.recorded(SteppedWhileScaled):
        scale, factor = case.progress.scale_at(measured.step), measured.factor
        if scale and scale > 1 and factor * scale > _UNSCALED_BY_HAND:
            yield Found(
                _Unscale.STEPPED,
                {"loss_scale": scale, "factor": factor, "parameters": len(measured.names)},
                fix=_Unscale.LET_SCALER_STEP,
                code=_Unscale.SCALER_STEP,
                is_grave=True,
                step=measured.step,
            )
            return


def _clipped(changed: Sequence[ChangedWhileScaled], case: Case) -> Found:
    first = changed[0]
    scale, is_by_norm = case.progress.scale_at(first.step), bool(first.is_uniform)
    known, unknown, code = _Unscale.CHANGED, _Unscale.CHANGED_AT_UNKNOWN_SCALE, _Unscale.CLIP_VALUE
    if is_by_norm:
        known, unknown, code = _Unscale.CLIPPED, _Unscale.CLIPPED_AT_UNKNOWN_SCALE, _Unscale.CLIP_NORM
    return Found(
        known.when(scale) or unknown,
        {"factor": first.factor, "is_uniform": is_by_norm, "loss_scale": scale, "measured_steps": len(changed)},
        {"again": again(changed)},
        _Unscale.UNSCALE_FIRST,
        code,
        step=first.step,
    )


def _changed(case: Case) -> list[ChangedWhileScaled]:
    """Return the measured changes of gradients before they were unscaled."""
    return [each for each in case.recorded(ChangedWhileScaled) if not math.isnan(each.factor)]


class _TooOften(Sentences):
    BY_HAND = (
        "In step {step}{again} the loop divided all gradients by the loss scale{of} and the scaler divided them by it once "
        "more: they are too small by that factor."
    )
    AGAIN = (
        "In step {step}{again} the scaler unscaled the same gradients {times:.0f} times while they were accumulated, which "
        "divides the earlier micro-batches' gradients by the loss scale{of} again: only the last one counts."
    )
    NEVER_SCALED = (
        "In step {step}{again} the gradients of {modules} came from a loss that no scaler had multiplied, and the scaler "
        "divided them by the loss scale{of}: they are too small by that factor."
    )
    DIVIDE_NOTHING = "Let the scaler divide, and do not divide by hand."
    ONCE = "Unscale, clip, step and update once, after the last micro-batch."
    SCALE_EACH = "Scale each loss."
    CLIP = "scaler.unscale_(optimizer)\ntorch.nn.utils.clip_grad_norm_(parameters, max_norm)\nscaler.step(optimizer)"
    AFTER_LAST = (
        "if is_last_micro_batch:\n    scaler.unscale_(optimizer)\n    scaler.step(optimizer)\n    scaler.update()"
    )
    BOTH_LOSSES = "scaler.scale(loss).backward()\nscaler.scale(other_loss).backward()"


def _unscaled_too_often(case: Case) -> Iterator[Found]:
    """Gradients that were divided by a scaler's loss scale more often than they were multiplied by it.

    False alarms: A loss that the loop multiplies by the scaler's scale by hand, while the scaler multiplies others, is
    reported.
    """
    by_hand = _changed(case)
    repeated, never = list(case.recorded(UnscaledAgain)), list(case.recorded(UnscaledNeverScaled))
    if _is_divided_by_hand(case, by_hand):
        yield from _too_often(case, by_hand, (_TooOften.BY_HAND, _TooOften.DIVIDE_NOTHING, _TooOften.CLIP), ())
    elif repeated:
        says = (_TooOften.AGAIN, _TooOften.ONCE, _TooOften.AFTER_LAST)
        yield from _too_often(case, repeated, says, repeated[0].names)
    elif never:
        says = (_TooOften.NEVER_SCALED, _TooOften.SCALE_EACH, _TooOften.BOTH_LOSSES)
        yield from _too_often(case, never, says, never[0].names)


def _too_often(
    case: Case,
    found: Sequence[ChangedWhileScaled | UnscaledAgain | UnscaledNeverScaled],
    says: tuple[_TooOften, _TooOften, _TooOften],
    names: tuple[str, ...],
) -> Iterator[Found]:
    """Yield the finding with these three sentences (message, fix, code), unless the loss scale is 1 or less."""
    first, scale = found[0], case.progress.scale_at(found[0].step)
    if scale is not None and scale <= 1:
        return
    message, fix, code = says
    yield Found(
        message,
        {"loss_scale": scale, "names": list(names[:20]), "measured_steps": len(found)},
        {
            **first.figures,
            "again": again(found),
            "of": filled(" of {}", scale and with_power(scale)),
            "modules": grouped(names),
        },
        fix,
        code,
        layer=next(iter(names), ""),
        step=first.step,
    )


def _is_divided_by_hand(case: Case, changed: Sequence[ChangedWhileScaled]) -> bool:
    """Return whether all gradients were divided by exactly the loss scale before a scaler unscaled them."""
    batches = round(case.progress.backwards / max(case.progress.steps, 1))
    scales = [case.progress.scale_at(each.step) for each in changed]
    return bool(changed) and all(
        scale is not None
        and scale > 1
        and scale != batches
        and each.is_uniform
        and abs(each.factor * scale - 1) <= _SAME
        for each, scale in zip(changed, scales, strict=True)
    )


def _is_average(changed: Sequence[ChangedWhileScaled]) -> bool:
    """Return whether all gradients were divided by the same small whole number: an average over micro-batches."""
    factors = [each.factor for each in changed]
    divisor = 1 / factors[0] if factors[0] > 0 else math.inf
    is_whole = divisor <= _MOST_MICRO_BATCHES and abs(divisor - round(divisor)) < _SAME * divisor
    is_one = all(abs(factor - factors[0]) <= _SAME * factors[0] for factor in factors)
    return is_whole and is_one and all(each.is_uniform for each in changed)


# -- scales by hand -----------------------------------------------------------------------------------------------------


class _OtherScale(Sentences):
    TOO_SMALL = (
        "In step {step}{again} the loop multiplied the loss by {multiplied_by:factor} and divided the gradients by "
        "{divided_by:factor}: the optimizer got {error:.3g} times the true gradients. In other steps both were equal."
    )
    SAME_SCALE = "Divide by the scale with which the backward was run; change the scale after the optimizer's step."
    ORDER = (
        "(loss * scale).backward()\n"
        "for p in parameters:\n"
        "    p.grad.div_(scale)\n"
        "optimizer.step()\n"
        "scale = next_scale(scale)  # last"
    )


def _divided_by_another_scale(case: Case) -> Iterator[Found]:
    """Gradients that a loop with a scale of its own divided by another scale than it had multiplied the loss by.

    False alarms: It is reported only if both are equal in most of the measured steps, and where they differ, by a power of two.
    """
    changed = [
        each
        for each in case.recorded(ChangedBeforeStep)
        if each.multiplied_by and each.multiplied_by > 1 and each.is_uniform and each.factor > 0 and not each.masters
    ]
    errors = [each.factor * (each.multiplied_by or 1.0) for each in changed]
    other = [(each, error) for each, error in zip(changed, errors, strict=True) if abs(error - 1) > _SAME]
    if not other or 2 * len(other) > len(changed) or not all(_is_power(error) for _, error in other):
        return
    first, error = other[0]
    yield Found(
        _OtherScale.TOO_SMALL,
        {"multiplied_by": first.multiplied_by, "divided_by": 1 / first.factor, "measured_steps": len(other)},
        {"again": again([each for each, _ in other]), "error": error},
        _OtherScale.SAME_SCALE,
        _OtherScale.ORDER,
        step=first.step,
    )


def _is_power(number: float) -> bool:
    """Return whether a positive number is a power of two, up to rounding."""
    return abs(math.log2(number) - round(math.log2(number))) <= _SAME


FAULTS = (
    Fault("divided-by-another-scale", "error", _divided_by_another_scale, (_OtherScale,)),
    Fault("unscale-missing", "warning", _unscale_missing, (_Unscale,)),
    Fault("unscaled-too-often", "error", _unscaled_too_often, (_TooOften,)),
)
