"""Faults by which gradients carry a wrong power of the loss scale: divided by it too late, too often or by another, or mixed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from mpinspect.ranges.faults.name.case import Case, is_power_of_two
from mpinspect.ranges.faults.name.fault import TWICE, Fault, Found
from mpinspect.ranges.faults.name.operators import in_words
from mpinspect.ranges.records import (
    ChangedBeforeStep,
    ChangedWhileScaled,
    DividedByAnother,
    DividedInHalf,
    GradientsUnderflow,
    MixedPowers,
    SteppedOnChangingScale,
    SteppedWhileScaled,
    UnscaledAgain,
    UnscaledNeverScaled,
)
from mpinspect.reporting.sentences import Sentences
from mpinspect.reporting.words import filled

#: Ratios that differ by at most this relative amount count as equal.
_SAME = 0.01
#: A gradient of at most this multiple of the true one has been divided by the scale by other code.
_UNSCALED_BY_HAND = 2.0
#: The share of the non-zero elements whose loss leaves no training.
_HALF = 0.5
#: Fewest measured steps with zeros alone that count as flushed.
_FEWEST_SILENT = 3
#: Division by a whole number up to this is taken for averaging over micro-batches, which may happen before unscaling.
_MOST_MICRO_BATCHES = 1024
#: Steps of a growth interval from which on the scale is meant to stay as it is.
_NEVER = 100_000


class _Unscale(Sentences):
    CLIPPED = (
        "In step {step}{again} the gradients were clipped while they were still multiplied by the loss scale{of_scale}: "
        "clipping multiplied them by {factor:.2g}. The limit was meant for the true gradients, smaller by that scale."
    )
    CHANGED = (
        "In step {step}{again} the gradients were changed, or clipped value by value, while they were still multiplied by the "
        "loss scale{of_scale}: that multiplied them by {factor:.2g}. The limit was meant for the true gradients, smaller by "
        "that scale."
    )
    PARTLY = (
        "In step {step}{again} all gradients were clipped together: those of {modules} were still multiplied by the loss "
        "scale{of_scale}, the others were unscaled. The norm is almost that of the scaled ones, and the factor of {factor:.2g} "
        "is far too small for the others."
    )
    STEPPED = (
        "In step {step} the optimizer stepped with gradients that were still multiplied by the loss scale{of_scale}: "
        "scaler.scale() was called, and neither scaler.step() nor scaler.unscale_()."
    )
    DIVIDED_EARLY = (
        "In step {step}{again} the optimizer stepped with gradients that were still multiplied by the loss scale{of_scale}: "
        "scaler.unscale_() was called before the last micro-batch's backward, and scaler.step() divides once. Compared with the "
        "later micro-batches, those before that call count for nothing."
    )
    CHANGING = (
        "The loop multiplies its loss by a scale of its own, and its optimizer steps on the gradients undivided. The scale "
        "changed, from {before:scale} before step {step} to {after:scale}, and the sizes of all gradients with it: the "
        "optimizer's states mix gradients of different scales."
    )
    DIVIDE = "Divide the gradients by the scale before each step, in FP32; torch.amp.GradScaler does so."
    DIVIDE_GRADIENTS = (
        "# before {at_step}\nfor p in model.parameters():\n    if p.grad is not None:\n        p.grad.div_(scale)"
    )
    UNSCALE_FIRST = "Unscale before clipping or reading gradients."
    DIVIDE_FIRST = "Divide the gradients by the scale before clipping or reading them."
    DIVIDE_BEFORE_CLIP = "# before {at_clip}\nfor p in model.parameters():\n    p.grad.div_(scale)"
    UNSCALE_ALL = "Unscale the gradients of every optimizer before clipping them together."
    LET_SCALER_STEP = (
        "Let the scaler step the optimizer: it divides by the scale first, and skips a step that overflowed."
    )
    AFTER_LAST_BACKWARD = "Unscale, clip and read gradients after the last micro-batch's backward."
    BEFORE_CLIP = "# before {at_clip}\nscaler.unscale_(optimizer)"
    ALL_BEFORE_CLIP = "# before {at_clip}\nfor each in (optimizer, other_optimizer):\n    scaler.unscale_(each)"
    AFTER_BACKWARD = "# after {last_backward}\nscaler.unscale_(optimizer)"
    CLIP_VALUE = (
        "# after {last_backward}\n"
        "scaler.unscale_(optimizer)\n"
        "torch.nn.utils.clip_grad_value_(\n"
        "    model.parameters(), clip_value\n"
        ")"
    )
    SCALER_STEP = "# in place of {at_step}\nscaler.step(optimizer)\nscaler.update()"


def _unscale_missing(case: Case) -> Iterator[Found]:
    """Gradients that were clipped, changed otherwise, or stepped with while they were multiplied by the loss scale.

    False alarms: Division by a whole number of micro-batches is not reported, nor is a limit of ``clip_grad_norm_`` that is so
    large that it seems to contain the loss scale. Gradients of at most twice their true size are taken to have been unscaled by
    hand, and an optimizer's step with them is not reported.
    """
    changed = _changed(case)
    scales = {change.scale for change in case.progress.scales}
    is_scaled = not scales <= {1.0, None}
    if changed and is_scaled and not _is_divided_by_hand(case, changed) and not _is_average(changed):
        says, fix, code = _Unscale.CHANGED, _Unscale.UNSCALE_FIRST, _Unscale.AFTER_BACKWARD
        if changed[0].is_uniform:
            says, code = _Unscale.CLIPPED, _Unscale.BEFORE_CLIP
        if not case.scalers:
            fix, code = _Unscale.DIVIDE_FIRST, _Unscale.DIVIDE_BEFORE_CLIP
        if any(_are_clipped_together(changed[0], others) for others in case.recorded(ChangedBeforeStep)):
            says, fix, code = _Unscale.PARTLY, _Unscale.UNSCALE_ALL, _Unscale.ALL_BEFORE_CLIP
        scale = case.progress.scale_at(changed[0].step)
        yield Found.of(case, changed, says, fix, code, evidence={"loss_scale": scale})
    for stepped in case.recorded(SteppedWhileScaled):
        scale = case.progress.scale_at(stepped.step)
        says, fix, code = _Unscale.STEPPED, _Unscale.LET_SCALER_STEP, _Unscale.SCALER_STEP
        if stepped.divided_early:
            says, fix, code = _Unscale.DIVIDED_EARLY, _Unscale.AFTER_LAST_BACKWARD, _Unscale.AFTER_BACKWARD
        # A clip hides by how much gradients are too large; and gradients that a scaler divides are not divided by hand.
        if scale and scale > 1 and (stepped.divided_early or stepped.factor * scale > _UNSCALED_BY_HAND):
            yield Found.of(case, [stepped], says, fix, code, evidence={"loss_scale": scale}, is_grave=True)
            return
    for changing in case.recorded(SteppedOnChangingScale):
        says, fix, code = _Unscale.CHANGING, _Unscale.DIVIDE, _Unscale.DIVIDE_GRADIENTS
        yield Found.of(case, [changing], says, fix, code, is_grave=True)
    if not changed:
        yield from _limit_of_scaled(case)


def _changed(case: Case) -> list[ChangedWhileScaled]:
    """Return the measured changes of gradients before they were unscaled, by one factor or to one limit.

    Others may be averages over replicas. A norm that is infinite makes zeros, and its steps come last.
    """
    found = [
        each
        for each in case.recorded(ChangedWhileScaled)
        if not math.isnan(each.factor)
        and (
            each.is_uniform
            or each.at_limit is None
            or each.at_limit >= min(2, len(each.names))
            or any(_are_clipped_together(each, others) for others in case.recorded(ChangedBeforeStep))
        )
    ]
    return sorted(found, key=lambda each: each.factor == 0)


def _are_clipped_together(scaled: ChangedWhileScaled, unscaled: ChangedBeforeStep) -> bool:
    """Return whether other gradients were multiplied by the same factor in the same step after they had been unscaled."""
    are_others = scaled.step == unscaled.step and not set(scaled.names) & set(unscaled.names)
    return are_others and math.isclose(scaled.factor, unscaled.factor, rel_tol=0.01)


class _Limit(Sentences):
    CLAMPED = (
        "In step {step}, in {line}, {operator} sets {share:percent} of a gradient to its bounds while it is still multiplied by "
        "the loss scale of {loss_scale:scale}. They were meant for the true gradient, smaller by that scale."
    )
    COMPARED = (
        "In step {step}, in {line}, a gradient or its norm is compared with a number while it is still multiplied by the loss "
        "scale of {loss_scale:scale}: for the true values {share:percent} of the results would differ."
    )
    AFTER_UNSCALING = (
        "Unscale first, and limit gradients after the backward instead of in a hook; a limit within the backward is to be "
        "multiplied by the loss scale."
    )


def _limit_of_scaled(case: Case) -> Iterator[Found]:
    """Yield a number that limits scaled gradients, within the backward or after it."""
    by_place: dict[tuple[str, ...], list[MixedPowers]] = {}
    for mixed in case.recorded(MixedPowers):
        if mixed.text == "limit":
            by_place.setdefault((mixed.name, *mixed.names[:2]), []).append(mixed)
    for (name, operator, line), same in by_place.items():
        words = {"operator": operator.strip("_"), "line": in_words("", line)}
        says = _Limit.CLAMPED.when(operator.strip("_").startswith(("clamp", "_foreach_clamp"))) or _Limit.COMPARED
        fix, code = _Limit.AFTER_UNSCALING, _Unscale.CLIP_VALUE
        yield Found.of(case, same, says, fix, code, words=words, evidence={"line": line}, layer=name)


class _TooOften(Sentences):
    BY_HAND = (
        "In step {step}{again} the loop divided all gradients by the loss scale{of_scale} and the scaler divided them by it once "
        "more: they are too small by that factor."
    )
    AGAIN = (
        "In step {step}{again} the scaler unscaled the same gradients {times:.0f} times while they were accumulated, which "
        "divides the earlier micro-batches' gradients by the loss scale{of_scale} again: only the last one counts."
    )
    NEVER_SCALED = (
        "In step {step}{again} the gradients of {modules} came from a loss that no scaler had multiplied, and the scaler "
        "divided them by the loss scale{of_scale}: they are too small by that factor."
    )
    DIVIDE_NOTHING = "Let the scaler divide, and do not divide by hand."
    ONCE = "Unscale, clip, step and update once, after the last micro-batch."
    SCALE_EACH = "Scale each loss."
    IN_PLACE = "# after {last_backward}\n# in place of the division by hand\nscaler.unscale_(optimizer)"
    AFTER_LAST = "# in place of {at_unscale}\nif is_last_micro_batch:\n    scaler.unscale_(optimizer)"
    BOTH_LOSSES = "scaler.scale(loss).backward()\nscaler.scale(other_loss).backward()"


def _unscaled_too_often(case: Case) -> Iterator[Found]:
    """Gradients that were divided by a scaler's loss scale more often than they were multiplied by it.

    False alarms: A loss that the loop multiplies by the scaler's scale by hand, while the scaler multiplies others, is
    reported.
    """
    by_hand = _changed(case)
    rows: tuple[tuple[list[Any], _TooOften, _TooOften, _TooOften], ...] = (
        (by_hand * _is_divided_by_hand(case, by_hand), _TooOften.BY_HAND, _TooOften.DIVIDE_NOTHING, _TooOften.IN_PLACE),
        (list(case.recorded(UnscaledAgain)), _TooOften.AGAIN, _TooOften.ONCE, _TooOften.AFTER_LAST),
        (list(case.recorded(UnscaledNeverScaled)), _TooOften.NEVER_SCALED, _TooOften.SCALE_EACH, _TooOften.BOTH_LOSSES),
    )
    for found, says, fix, code in rows:
        if found:
            scale = case.progress.scale_at(found[0].step)
            if scale is None or scale > 1:
                # The others are about all of an optimizer's gradients.
                layer = found[0].name * (says is _TooOften.NEVER_SCALED)
                yield Found.of(case, found, says, fix, code, evidence={"loss_scale": scale}, layer=layer)
            return


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


# -- divided by another scale -------------------------------------------------------------------------------------------


class _OtherScale(Sentences):
    TOO_SMALL = (
        "In step {step}{again} the loop multiplied the loss by {multiplied_by:factor} and divided the gradients by "
        "{divided_by:factor}: the optimizer got {error:.3g} times the true gradients. In other steps both were equal."
    )
    UPDATED = (
        "In step {step}{again} scaler.update() was called between the backward of {modules} and the division of their gradients. "
        "In each step in which the scale changes there, they are divided by the new scale: halved where it doubles, doubled "
        "where it halves."
    )
    CHANGED = "The scale changed {changes} times in this run."
    TWICE = (
        "In step {step}{again} scaler.update() was called between unscale_() and step() of the optimizer of {modules}. After it "
        "the scaler divides these gradients by the loss scale{of_scale} once more: they are too small by that factor."
    )
    OTHER_SCALER = (
        "In step {step}{again} one GradScaler multiplied the loss of {modules}, and another one divided the gradients, by a "
        "scale of its own."
    )
    UPDATE_LAST = "Call scaler.update() once a step, after the last scaler.step()."
    ONE_SCALER = "Scale a loss, and step its optimizer, with the same GradScaler."
    ONE_UPDATE = "# once, after {at_step}\n# and all other steps\nscaler.update()"
    WITH_ITS_SCALER = "scaler.scale(loss).backward()\nscaler.step(optimizer)"
    SAME_SCALE = "Divide by the scale with which the backward was run; change the scale after the optimizer's step."
    ORDER = "# move the change of the scale\n# after {at_step}"


def _divided_by_another_scale(case: Case) -> Iterator[Found]:
    """Gradients that were divided by another loss scale than the scale that multiplied their loss.

    False alarms: An update between the backward and the division is reported in runs whose scale never changes, too: as an info
    if its growth interval is 100,000 steps or more. In a loop with a scale of its own, the finding needs scales that are equal in
    most of the measured steps, and differ by a power of two in the others.
    """
    yield from _updated_before(list(case.recorded(DividedByAnother)), case)
    changed = [
        each
        for each in case.recorded(ChangedBeforeStep)
        if each.multiplied_by and each.multiplied_by > 1 and each.is_uniform and each.factor > 0 and not each.masters
    ]
    errors = [each.factor * (each.multiplied_by or 1.0) for each in changed]
    other = [(each, error) for each, error in zip(changed, errors, strict=True) if abs(error - 1) > _SAME]
    if not other or 2 * len(other) > len(changed) or not all(is_power_of_two(error) for _, error in other):
        return
    first, error = other[0]
    yield Found.of(
        case,
        [each for each, _ in other],
        _OtherScale.TOO_SMALL,
        _OtherScale.SAME_SCALE,
        _OtherScale.ORDER,
        words={"error": error},
        evidence={"divided_by": 1 / first.factor},
    )


def _updated_before(found: Sequence[DividedByAnother], case: Case) -> Iterator[Found]:
    """Yield the gradients that a GradScaler divided by another scale, as its calls show."""
    if not found:
        return
    known = [change.scale for change in case.progress.scales if change.scale]
    changes = len(known) - 1
    says, fix, code = _OtherScale.UPDATED, _OtherScale.UPDATE_LAST, _OtherScale.ONE_UPDATE
    if found[0].repeated:
        says = _OtherScale.TWICE
    elif found[0].other_scaler:
        says, fix, code = _OtherScale.OTHER_SCALER, _OtherScale.ONE_SCALER, _OtherScale.WITH_ITS_SCALER
    is_updated = says is _OtherScale.UPDATED
    words = {"changes": changes}
    also, is_mild = _OtherScale.CHANGED.when(is_updated and changes > 0), is_updated and changes < 1
    more: dict[str, Any] = {"is_mild": is_mild}
    if is_mild and all((each.growth_interval or 0) >= _NEVER for each in case.scalers):
        more = {"severity": "info"}
    yield Found.of(case, found, (says, also), fix, code, words=words, layer=found[0].name, **more)


# -- divided too early, or not multiplied --------------------------------------------------------------------------------


class _InHalf(Sentences):
    DIVIDED = (
        "In step {step}{again} the loop multiplies the gradients of {modules} by {by} in FP16 ({line}): {lost:percent} of all "
        "non-zero elements become zero there. In the backward the loss scale had kept them."
    )
    FP32_FIRST = "Convert the gradients to FP32 first, and divide them there."
    CONVERT = "# in place of p.grad.div_(scale)\nmaster.grad = p.grad.float() / scale"


def _divided_in_float16(case: Case) -> Iterator[Found]:
    """FP16 gradients that the loop divides in FP16, so that elements become zero.

    False alarms: The share is measured, and reported from 1% of the non-zero elements on; below half of them as a warning.
    """
    found = list(case.recorded(DividedInHalf))
    if found:
        first = found[0]
        by = filled("{}", first.factor and f"{first.factor:.3g}") or "a factor"
        words = {"by": by, "line": in_words("", first.text)}
        fix, code = _InHalf.FP32_FIRST, _InHalf.CONVERT
        is_grave = max(each.lost for each in found) >= _HALF
        yield Found.of(
            case, found, _InHalf.DIVIDED, fix, code, words=words, evidence={"line": first.text}, is_grave=is_grave
        )


class _Asked(Sentences):
    FLUSHED = (
        "In step {step}{again} torch.autograd.grad ({line}) returned gradients{whose} that were all zero or crowd at FP16's "
        "lower end, 2^-24: its output was not multiplied by a loss scale. A norm, a ratio or a penalty made of them is noise."
    )
    ALL_ZERO = (
        "In step {step}{again} torch.autograd.grad ({line}) returned gradients{whose} that were all zero. FP16 flushes gradients "
        "up to 2^-25, and its output was not multiplied by a loss scale; whether that made the zeros is not known."
    )
    MULTIPLY = "Multiply the output by the loss scale before torch.autograd.grad, and divide its result in FP32."
    BY_THE_SCALE = (
        "scale = scaler.get_scale()\n"
        "(scaled,) = torch.autograd.grad(\n"
        "    output * scale, inputs\n"
        ")\n"
        "gradient = scaled.float() / scale"
    )


def _asked_gradients_flushed(case: Case) -> Iterator[Found]:
    """Gradients from torch.autograd.grad whose output was not scaled, and that FP16 flushed.

    False alarms: That values were flushed is inferred from the crowd of values just above the flush edge. Gradients that are all
    zero are reported from three measured steps on, though they may be zero in FP32 too.
    """
    found = list(case.recorded(GradientsUnderflow))
    is_crowded = any(each.lost < 1 for each in found)
    if is_crowded or len({each.step for each in found}) >= _FEWEST_SILENT:
        line, name = found[0].text, found[0].name
        words = {"line": in_words("", line), "whose": filled(" of {!r}", name or None)}
        says, fix = _Asked.FLUSHED.when(is_crowded) or _Asked.ALL_ZERO, (_Asked.MULTIPLY, _Asked.BY_THE_SCALE)
        yield Found.of(case, found, says, *fix, words=words, evidence={"line": line}, layer=name, is_inferred=True)


# -- sums of different powers -------------------------------------------------------------------------------------------

#: Measured of all gradients, these say more of a step with gradients at a wrong scale.
_MEASURED_TOO = (ChangedBeforeStep, ChangedWhileScaled, SteppedWhileScaled, UnscaledAgain, UnscaledNeverScaled)


class _Mixed(Sentences):
    ACCUMULATED = (
        "In step {step} two backwards added their gradients in {parameters:some}: the loss of one was multiplied by the loss "
        "scale of {loss_scale:scale}, the other's was not. The scaler divides the sum, so the unscaled loss counts "
        "{loss_scale:factor} times too little."
    )
    DIVIDED = (
        "In step {step} a backward added gradients that are multiplied by the loss scale of {loss_scale:scale} to the gradients "
        "in {parameters:some} that had been divided by it already. The next division makes the earlier ones "
        "{loss_scale:factor} times too small."
    )
    GRADIENT = (
        "In step {step} ({line}) a value that is not multiplied by the loss scale is added to the gradient of {parameters:some}, "
        "which is still multiplied by it. After the scaler's division the value counts {loss_scale:factor} times too little."
    )
    TOO_LARGE = (
        "In step {step} the optimizer takes a gradient of {parameters:some} that is still multiplied by the loss scale of "
        "{loss_scale:scale}: the scaler divided it less often than its loss was multiplied."
    )
    TOO_SMALL = (
        "In step {step} the optimizer takes a gradient of {parameters:some} that is too small by the loss scale of "
        "{loss_scale:scale}: the scaler divided it, and had not multiplied its loss."
    )
    STATE = (
        "In step {step}, in {place}, values computed from gradients that are still multiplied by the loss scale of "
        "{loss_scale:scale} are added to a tensor that the optimizer takes: they are too large by {too_large:factor}."
    )
    NUMBER = (
        "In step {step}, in {place}, a number is added to a value that is still multiplied by the loss scale of "
        "{loss_scale:scale}, or subtracted from it: gradients of a scaled output go into a loss undivided."
    )
    VALUES = (
        "In step {step}, in {place}, values that are multiplied by the loss scale of {loss_scale:scale} are added to values "
        "that are not."
    )
    WEIGHTS = (
        "In step {step}, in {place}, new weights are made of {parameter!r} and a gradient that is still multiplied by the loss "
        "scale of {loss_scale:scale}: this inner step is {too_large:factor} times too long."
    )
    BACKWARD = (
        "In step {step} the backward ({line}) adds a gradient that is not multiplied by the loss scale of {loss_scale:scale} to "
        "one that is: {parameters[0]!r} makes a gradient in its backward, such as torch.ones_like of an auxiliary loss. After "
        "the scaler's division it counts {loss_scale:factor} times too little."
    )
    FUNCTION = (
        "In step {step} the loss was multiplied by the loss scale of {loss_scale:scale}, and the gradient of {parameter!r} does "
        "not carry that scale. The scaler divided it by the scale: it is {loss_scale:factor} times too small. The backward of "
        "{parameters:some} returns a gradient that it does not multiply by the one it was given."
    )
    MULTIPLY = "Multiply by the gradient that the backward is given."
    TIMES_GIVEN = (
        "@staticmethod\ndef backward(ctx, grad_output):\n    (grad,) = ctx.saved_tensors\n    return grad * grad_output"
    )
    DIVIDE_ONCE = "Divide the gradients once, after the last backward of the step."
    SCALE_EACH = "Scale each loss."
    UNSCALE_FIRST = "Unscale the gradients before anything is added to them."
    DIVIDE_FOR_STATE = (
        "Divide such gradients by the loss scale before their values are kept. unscale_() may be called just once between two "
        "updates of the scaler."
    )
    DIVIDE_INNER = "Divide its gradients by the loss scale, in FP32, or leave the inner loss unscaled."
    DIVIDE = "Divide the gradients by the loss scale before the penalty, and scale the whole loss once."
    SCALE_MADE = (
        "Return the auxiliary loss and add it to the others, or multiply the gradient that is made by the loss scale."
    )
    SCALE_WHOLE = "Add the losses first, and scale their sum."
    ONCE = "Scale each loss once, and let the scaler divide and step."
    UNSCALE_ONCE = "# once, after {last_backward}\nscaler.unscale_(optimizer)"
    BOTH_LOSSES = "scaler.scale(loss).backward()\nscaler.scale(other_loss).backward()"
    THEN_ADD = "# before it, once a step\nscaler.unscale_(optimizer)"
    DIVIDE_BY_HAND = (
        "# after their backward, before {line}\n"
        "for p in model.parameters():\n"
        "    if p.grad is not None:\n"
        "        p.grad.div_(scaler.get_scale())"
    )
    PENALTY = (
        "output = scaler.scale(output.sum())\n"
        "(scaled,) = torch.autograd.grad(\n"
        "    output, inputs, create_graph=True\n"
        ")\n"
        "gradient = scaled / scaler.get_scale()\n"
        "loss = loss + penalty(gradient)\n"
        "scaler.scale(loss).backward()"
    )
    INNER = "# before {line}\nscale = scaler.get_scale()\ngradients = [\n    g.float() / scale for g in gradients\n]"
    SUM = "scaler.scale(loss + other_loss).backward()"
    STEP = "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()"


_VARIANTS = {
    "accumulated": (_Mixed.ACCUMULATED, _Mixed.SCALE_EACH, _Mixed.BOTH_LOSSES),
    "divided": (_Mixed.DIVIDED, _Mixed.DIVIDE_ONCE, _Mixed.UNSCALE_ONCE),
    "gradient": (_Mixed.GRADIENT, _Mixed.UNSCALE_FIRST, _Mixed.THEN_ADD),
    "optimizer": (_Mixed.TOO_LARGE, _Mixed.ONCE, _Mixed.STEP),
    "state": (_Mixed.STATE, _Mixed.DIVIDE_FOR_STATE, _Mixed.DIVIDE_BY_HAND),
    "weights": (_Mixed.WEIGHTS, _Mixed.DIVIDE_INNER, _Mixed.INNER),
    "number": (_Mixed.NUMBER, _Mixed.DIVIDE, _Mixed.PENALTY),
    "backward": (_Mixed.BACKWARD, _Mixed.SCALE_MADE, _Mixed.SUM),
    "function": (_Mixed.FUNCTION, _Mixed.MULTIPLY, _Mixed.TIMES_GIVEN),
    "values": (_Mixed.VALUES, _Mixed.SCALE_WHOLE, _Mixed.SUM),
}


def _scaled_plus_unscaled(case: Case) -> Iterator[Found]:
    """A sum of values that carry different powers of the loss scale, in a backward, a loss, a gradient or an optimizer.

    False alarms: None is known: an operator whose effect on the power is not certain makes it unknown.
    """
    for mixed in case.recorded(MixedPowers):
        if mixed.text == "limit":
            continue
        if mixed.text in ("optimizer", "accumulated") and case.has(*_MEASURED_TOO):
            continue
        operator, line, *parameters = mixed.names
        says, fix, code = _VARIANTS[mixed.text]
        if mixed.text == "optimizer" and (mixed.second or mixed.first) < 0:
            says, fix, code = _Mixed.TOO_SMALL, _Mixed.SCALE_EACH, _Mixed.BOTH_LOSSES
        words = {
            "place": in_words(mixed.name, line),
            "parameters": parameters or [mixed.name],
            "too_large": mixed.loss_scale ** (mixed.second or mixed.first),
            "line": line or "that",
            "parameter": mixed.name,
        }
        evidence = {"operator": operator, "line": line}
        yield Found.of(case, [mixed], says, fix, code, words=words, evidence=evidence, layer=mixed.name)
        return


FAULTS = (
    Fault("divided-by-another-scale", "error", _divided_by_another_scale, (_OtherScale,)),
    Fault(
        "divided-in-float16",
        "warning",
        _divided_in_float16,
        (_InHalf,),
        ("gradients-zeroed", "gradients-all-zero", "gradients-inaccurate"),
        is_of_every_step=True,
        checked=TWICE,
    ),
    Fault("asked-gradients-flushed", "warning", _asked_gradients_flushed, (_Asked,)),
    Fault("unscale-missing", "warning", _unscale_missing, (_Unscale, _Limit)),
    Fault("unscaled-too-often", "error", _unscaled_too_often, (_TooOften,)),
    Fault(
        "scaled-plus-unscaled",
        "error",
        _scaled_plus_unscaled,
        (_Mixed,),
        ("initial-scale-too-high", "scale-too-high", "overflow-recurs", "non-finite-event"),
        is_of_every_step=True,
        checked="in one early step with a GradScaler",
    ),
)
