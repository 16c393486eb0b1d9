"""Infinities and NaNs in gradients that pass by the scaler's check: replaced by finite values, written into weights, or used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpinspect.numeric.formats import FLOAT16, FLOAT32
from mpinspect.ranges import records
from mpinspect.ranges.analysis.evidence import survived
from mpinspect.ranges.faults.name.case import SIGNIFICAND_BITS, Case, grouped
from mpinspect.ranges.faults.name.fault import MOST_NAMES, Fault, Found
from mpinspect.ranges.faults.name.stores import epsilon_zero, moments_flushed
from mpinspect.ranges.kinds import ACTIVATION_GRADIENT, WEIGHT_GRADIENT
from mpinspect.ranges.session import END, SKIPPED, Event
from mpinspect.ranges.windows.tensors import TensorKey, TensorWindow
from mpinspect.reporting.sentences import Sentences
from mpinspect.reporting.words import bracketed, filled, with_power

#: Modules whose weights' gradients are sums of products with every element of the gradient at their output.
_PRODUCTS = ("Linear", "Conv1d", "Conv2d", "Conv3d")


class _Replaced(Sentences):
    BEFORE_STEP = (
        "In step {step}{again} the gradients of {held:some 3} held infinities or NaNs, and were replaced by finite values "
        "before the optimizer stepped: the step used the replaced numbers."
    )
    IN_BACKWARD = (
        "From step {step} on the gradients that reach the weights of {modules} held infinities or NaNs. A hook (nan_to_num) "
        "replaced them by finite values before the scaler checked, so no step was skipped{and_scale}. The optimizer used the "
        "replaced numbers."
    )
    TAKE_OUT = "Remove the replacement. The scaler then skips such steps, and lowers its scale until they end."
    REPAIR = (
        "Remove the cause of the infinities and NaNs: they occur in {broken} of {all_steps} steps, so skipping such steps would "
        "leave few or none."
    )
    REPAIR_OR_SKIP = (
        "Remove the cause of the infinities and NaNs; until then skip a step that has any, as a GradScaler does."
    )
    DELETE = "# delete nan_to_num, or its hook, before\n# {at_step}"
    SKIP = (
        "# in place of {at_step}\n"
        "norm = torch.nn.utils.clip_grad_norm_(\n"
        '    model.parameters(), float("inf")\n'
        ")\n"
        "if norm.isfinite():\n"
        "    optimizer.step()"
    )


def _gradients_replaced(case: Case) -> Iterator[Found]:
    """Infinities and NaNs in gradients that were replaced by finite values before the optimizer's step.

    False alarms: torch.nan_to_num on gradients is reported even if it is intended; a step that a scaler skips is not. A
    replacement by a hook within the backward is inferred, in runs with a scaler: if the gradient at the output of a linear layer
    or convolution is not finite, its weights' gradients can't be finite.
    """
    fix, code, words = _remedy(case)
    measured = list(case.recorded(records.ReplacedBeforeStep))
    if measured:
        words |= {"held": measured[0].names}
        evidence = {"parameters": len(measured[0].names)}
        layer, says = measured[0].name, _Replaced.BEFORE_STEP
        yield Found.of(case, measured, says, fix, code, words=words, evidence=evidence, layer=layer)
    elif names := _replaced_in_backward(case):
        first = _taken(case)[0]
        and_scale = filled(", and the scale stays at {}", first.loss_scale and with_power(first.loss_scale))
        yield Found(
            _Replaced.IN_BACKWARD,
            {"parameters": len(names), "names": names[:MOST_NAMES], "loss_scale": first.loss_scale},
            {**words, "modules": grouped(names), "and_scale": and_scale},
            fix,
            code,
            layer=names[0],
            is_inferred=True,
            step=first.step,
        )


#: The states of torch's optimizers that are means, or sums, of the gradients.
_MEAN_OF = {**dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax"), "exp_avg"), "SGD": "momentum_buffer"}


class _AfterCheck(Sentences):
    BROKEN = (
        "In step {step}{again} all gradients were finite {when}, and {nans:.0f} of {of:.0f} held infinities or NaNs when the "
        "optimizer stepped on them: the loop's own code wrote these in between."
    )
    HELD_IN_STATE = (
        "In step {before} {weights:some 3} became infinite or NaN. All gradients were finite {when}, and {optimizer}'s {held}, a "
        "{mean} of the gradients that it got, is not: the loop's own code wrote infinities or NaNs into them in between."
    )
    BEFORE_UNSCALING = (
        "Run code that writes into gradients, such as an average over replicas or an all-reduce, before scaler.unscale_(): there "
        "the scaler looks for infinities, in the gradients that it is given. All replicas have to skip the same steps."
    )
    LOOK = "Look at what divides, averages or replaces gradients between the backward and the step."
    MOVE = "# after the code that writes into gradients\n# {at_unscale}\nscaler.unscale_(optimizer)"


def _broken_after_check(case: Case) -> Iterator[Found]:
    """Gradients that were finite after the backward, and after a scaler's check, and infinite or NaN when the optimizer stepped.

    False alarms: In a measured step the values are measured. Else they are inferred: an optimizer of torch keeps a mean of its
    gradients in FP32, and the infinities and NaNs in it were theirs. A division by a norm beyond FP16's end is another fault.
    """
    broken = [each for each in case.recorded(records.ChangedBeforeStep) if is_broken_by_loop(each)]
    fix, code, when = _AfterCheck.LOOK, None, "after the backward"
    if case.scalers:
        fix, code, when = _AfterCheck.BEFORE_UNSCALING, _AfterCheck.MOVE, "when the scaler looked for infinities"
    if broken:
        yield Found.of(case, broken, _AfterCheck.BROKEN, fix, code, words={"when": when})
    elif (state := _mean_of_broken(case)) is not None:
        weights = next(case.recorded(records.BrokenWeights))
        words = {
            "before": state.step - 1,
            "weights": list(weights.names),
            "optimizer": state.names[0],
            "held": state.names[1],
            "mean": "sum" if state.names[0] == "SGD" else "mean",
            "when": when,
        }
        more: dict[str, Any] = {"is_inferred": True, "step": state.step - 1}
        yield Found.of(case, [weights], _AfterCheck.HELD_IN_STATE, fix, code, words=words, **more)


def _broken_in_step(case: Case) -> records.BrokenWeights | None:
    """Return the weights that became infinite or NaN after a backward whose gradients were finite; None without any."""
    broken = next(case.recorded(records.BrokenWeights), None)
    is_first = broken is not None and broken.step and not any(event.step < broken.step for event in case.events)
    return broken if is_first and any(case.recorded(records.BrokenState)) else None


def _mean_of_broken(case: Case) -> records.BrokenState | None:
    """Return an optimizer's mean of gradients that is infinite or NaN, so that gradients were; None if that is not known."""
    if _broken_in_step(case) is None:
        return None
    # Broken weights enter the mean, too, where their decay is added to the gradients.
    decaying = {each.type for each in case.precision.optimizers if each.settings.get("weight_decay")} - {"AdamW"}
    states = (
        each
        for each in case.recorded(records.BrokenState)
        if each.names[0] in _MEAN_OF.keys() - decaying and each.text == FLOAT32.name
    )
    return next((each for each in states if each.broken and each.names[1] == _MEAN_OF[each.names[0]]), None)


def is_broken_by_loop(changed: records.ChangedBeforeStep) -> bool:
    """Return whether finite gradients became infinite or NaN before the step, and not by a norm that overflowed in FP16."""
    is_by_norm = changed.sum_of_squares > FLOAT16.max_finite
    return bool(changed.nans) and not changed.not_finite and not changed.masters and not is_by_norm


class _Broken(Sentences):
    WRITTEN = (
        "In step {step} {weights:some 3} became infinite or NaN although no optimizer had stepped: the backward of step "
        "{overflowed} overflowed at the loss scale {loss_scale:scale}, and the loop's own code{at_line} writes to the weights. A "
        "GradScaler skips its optimizer's step alone."
    )
    CHECK_FIRST = (
        "Unscale gradients before anything is computed from them, and leave out a step whose gradients are not finite."
    )
    UNSCALE_AND_CHECK = (
        "# before it\n"
        "scaler.unscale_(optimizer)\n"
        "norm = torch.nn.utils.clip_grad_norm_(\n"
        '    model.parameters(), float("inf")\n'
        ")\n"
        "scaler.update()\n"
        "# around it and the second backward\n"
        "if norm.isfinite():\n"
        "    perturb(model)"
    )


def _broken_by_loop(case: Case) -> Iterator[Found]:
    """Weights that became infinite or NaN by a write outside of the step that a scaler guards, after an overflow.

    False alarms: That the gradients made the weights infinite is inferred: they overflowed in the backward before, and no
    optimizer had stepped on them.
    """
    broken = next(case.recorded(records.BrokenWeights), None)
    if broken is None:
        return
    before = [event for event in case.events if event.step <= broken.step and event.phase != END]
    # The first event of its step, a backward's, precedes a forward that breaks in the same step.
    overflow = next((event for event in reversed(before) if event.phase == "backward"), None)
    if overflow is None or overflow.step < broken.step - 1 or any(event.story != SKIPPED for event in before):
        return
    line = next((written.names[1] for written in case.recorded(records.WrittenByLoop)), "")
    yield Found(
        _Broken.WRITTEN,
        {**broken.figures, "names": list(broken.names[:MOST_NAMES]), "loss_scale": overflow.loss_scale, "line": line},
        {"weights": list(broken.names), "overflowed": overflow.step, "at_line": bracketed(line)},
        _Broken.CHECK_FIRST,
        _Broken.UNSCALE_AND_CHECK,
        layer=broken.name,
        is_inferred=True,
        step=broken.step,
    )


class _ByStep(Sentences):
    WRITTEN = (
        "In step {before} {weights:some 3} became infinite or NaN, although all gradients were finite after each backward: the "
        "arithmetic of the optimizer's step made them so, or code between the backward and the step."
    )
    STATES = "Its states {broken:some 3} of {weight!r} hold infinities or NaNs too."
    IN_16_BITS = "{optimizer} keeps {narrow:some 3} in {dtype:format}."
    IN_FP32 = (
        "Keep these states in FP32. Rounding can make a sum of squares zero, or a positive definite matrix indefinite, and its "
        "root or inverse is then infinite or NaN."
    )
    LOOK = "Look at the divisions, roots and logarithms in the optimizer's step, and at what divides the gradients before it."
    FLOAT = 'state["{first}"] = state["{first}"].float()'


def _broken_by_step(case: Case) -> Iterator[Found]:
    """Weights that became infinite or NaN in an optimizer's step on finite gradients.

    False alarms: That the optimizer wrote them is inferred. Code between its step and the next forward may have done so.
    """
    broken, states = _broken_in_step(case), list(case.recorded(records.BrokenState))
    if broken is None or _mean_of_broken(case) is not None:
        return
    if any(epsilon_zero(case)) or any(moments_flushed(case)):
        return
    narrow = [each for each in states if each.text in SIGNIFICAND_BITS]
    held = [each.names[1] for each in states if each.broken]
    words = {
        "before": broken.step - 1,
        "weights": list(broken.names),
        "weight": broken.name,
        "broken": held,
        "optimizer": states[0].names[0],
        "narrow": [each.names[1] for each in narrow],
        "dtype": narrow[0].text if narrow else "",
        "first": narrow[0].names[1] if narrow else "",
    }
    yield Found(
        (_ByStep.WRITTEN, _ByStep.STATES.when(held), _ByStep.IN_16_BITS.when(narrow)),
        {**broken.figures, "names": list(broken.names[:MOST_NAMES]), "states": held},
        words,
        _ByStep.IN_FP32.when(narrow) or _ByStep.LOOK,
        _ByStep.FLOAT.when(narrow),
        layer=broken.name,
        is_inferred=True,
        step=broken.step - 1,
    )


class _Elsewhere(Sentences):
    BROKEN = (
        "In step {step} the loss was not finite, and it was computed with weights of another model, {model}, that held "
        "infinities or NaNs: neither this model nor its loss is the cause."
    )
    OTHER_MODEL = "Repair the other model: an earlier update, or other code, broke its weights."


def _broken_elsewhere(case: Case) -> Iterator[Found]:
    """A loss that is not finite because weights of another model, such as a discriminator, are infinite or NaN.

    False alarms: The cause is measured: these weights are in the graph of the loss, and this model's weights are finite.
    """
    for broken in case.recorded(records.BrokenElsewhere):
        yield Found(
            _Elsewhere.BROKEN,
            {"model": broken.text, "names": list(broken.names[:MOST_NAMES])},
            {"model": broken.text or "which is not inspected"},
            _Elsewhere.OTHER_MODEL,
            step=broken.step,
        )
        return


class _Unguarded(Sentences):
    STEPPED = (
        "In step {step} the gradients overflowed at the loss scale {loss_scale:scale}, and the optimizer stepped on them. The "
        "loss is scaled by a GradScaler, which skips only the steps that it takes itself: unscale_ divides and skips nothing."
    )
    LET_THE_SCALER_STEP = "Replace optimizer.step() by scaler.step(optimizer), which skips the step after an overflow."
    SCALER_STEPS = "# in place of {at_step}\nscaler.step(optimizer)"


def _step_unguarded(case: Case) -> Iterator[Found]:
    """A step on gradients that overflowed at a GradScaler's scale, which its step would have skipped.

    False alarms: That the loop calls the optimizer's step itself is inferred: the scaler is enabled, and the weights broke.
    """
    if not case.scalers or case.has(records.SteppedWhileScaled):
        return
    taken = (event for event in _taken(case) if event.forward_finite and (event.loss_scale or 1) > 1)
    first = next((event for event in taken if event.value == "inf"), None)
    if first is None or survived(first, case.session) or not case.has(records.BrokenWeights):
        return
    yield Found(
        _Unguarded.STEPPED,
        {"loss_scale": first.loss_scale},
        {},
        _Unguarded.LET_THE_SCALER_STEP,
        _Unguarded.SCALER_STEPS,
        layer=first.module,
        is_inferred=True,
        step=first.step,
    )


class _Beside(Sentences):
    AFTER_SKIPPED = (
        "In step {step} the loop called optimizer.step(){at_line} after scaler.step(optimizer), on the same gradients. The "
        "scaler had found infinities or NaNs in them and skipped its step; the optimizer's own call wrote them into the weights."
    )
    TWICE = (
        "In step {step}{again} the loop called optimizer.step(){at_line} after scaler.step(optimizer), on the same gradients: "
        "each update is made twice, and no scaler checks the second one."
    )
    REMOVE = "Remove the loop's own optimizer.step(): scaler.step(optimizer) calls it."
    DELETE = "# delete this line{bare}"


def _stepped_beside_scaler(case: Case) -> Iterator[Found]:
    """An optimizer's step that the loop takes itself, after a scaler's step has used or refused the same gradients.

    It is an error if the scaler had refused them, and a warning otherwise.

    False alarms: None is known: the gradients were neither replaced nor written in between.
    """
    found = list(case.recorded(records.SteppedBesideScaler))
    skipped = [each for each in found if each.skipped]
    if not found:
        return
    line = found[0].text
    yield Found.of(
        case,
        skipped or found,
        _Beside.AFTER_SKIPPED.when(skipped) or _Beside.TWICE,
        _Beside.REMOVE,
        _Beside.DELETE,
        words={"at_line": bracketed(line), "bare": "" if case.session.source_of(line) else ": optimizer.step()"},
        evidence={"line": line, "names": []},
        is_grave=bool(skipped),
    )


def replaced(case: Case) -> list[str]:
    """Return the weights whose gradients held infinities or NaNs that were made finite before the optimizer's step."""
    measured = [name for found in case.recorded(records.ReplacedBeforeStep) for name in found.names]
    return list(dict.fromkeys(measured)) or _replaced_in_backward(case)


def _replaced_in_backward(case: Case) -> list[str]:
    """Return the weights whose gradients must have been replaced within the backward, as the counts and the steps taken show.

    A scaler would have skipped these steps, and weights that it does not check would have broken the next forward.
    """
    taken = _taken(case)
    unchecked = any(each.what in ("not-optimized", "stepped-while-scaled") for each in case.session.measurements)
    if not case.scalers or not taken or case.progress.skipped_steps or unchecked:
        return []
    if any(event.forward_finite is False for event in case.events):
        return []
    weights = {key: info for key, info in case.infos.items() if key.kind == WEIGHT_GRADIENT and key in case.totals}
    broken = [key.name for key in weights if case.totals[key].histogram.nonfinite]
    if broken:
        # They were counted before a later hook.
        return broken if taken[0].step + 2 < case.progress.steps else []
    return [
        key.name
        for key, info in weights.items()
        if _must_overflow(case.totals.get(TensorKey(info.module, ACTIVATION_GRADIENT)), case.totals[key].samples)
        and info.module_type in _PRODUCTS
    ]


def _taken(case: Case) -> list[Event]:
    """Return the events of backwards that were not finite, after which the optimizer stepped."""
    return [event for event in case.events if event.phase == "backward" and event.skipped is False]


def _must_overflow(at_output: TensorWindow | None, samples: int) -> bool:
    """Return whether the gradient at a product's output was not finite, in as many backwards as gave its weights gradients."""
    return at_output is not None and at_output.samples == samples and bool(at_output.histogram.nonfinite)


def _remedy(case: Case) -> tuple[_Replaced, _Replaced | tuple[()], dict[str, Any]]:
    """Return the change to make instead of making gradients finite, its code, and their figures."""
    broken, steps = [event for event in case.events if event.gradients_finite is False], case.progress.steps
    number = len({event.step for event in broken})
    words: dict[str, Any] = {"broken": number, "all_steps": steps}
    if case.scalers and any(each.value == "inf" and each.forward_finite and each.loss_scale != 1 for each in broken):
        return _Replaced.TAKE_OUT, _Replaced.DELETE, words
    if 2 * number >= steps:
        # To skip most steps would be no training.
        return _Replaced.REPAIR, (), words
    return _Replaced.REPAIR_OR_SKIP, _Replaced.SKIP, words


_OF_BROKEN_WEIGHTS = ("breaks-in-fp32-too", "overflow-in-operator", "input-rounded-away", "non-finite-event")
FAULTS = (
    Fault(
        "weights-broken-elsewhere",
        "warning",
        _broken_elsewhere,
        (_Elsewhere,),
        (*_OF_BROKEN_WEIGHTS, "argument-out-of-range", "scaler-shared"),
        "warning",
    ),
    Fault("gradients-broken-after-check", "error", _broken_after_check, (_AfterCheck,), _OF_BROKEN_WEIGHTS),
    Fault("weights-broken-by-step", "error", _broken_by_step, (_ByStep,), _OF_BROKEN_WEIGHTS),
    Fault("weights-broken-by-loop", "error", _broken_by_loop, (_Broken,), _OF_BROKEN_WEIGHTS, is_of_every_step=True),
    Fault(
        "scaler-step-missing",
        "error",
        _step_unguarded,
        (_Unguarded,),
        (*_OF_BROKEN_WEIGHTS, "gradients-clipped-to-zero", "scaler-shared"),
        is_of_every_step=True,
    ),
    Fault(
        "stepped-beside-scaler",
        "warning",
        _stepped_beside_scaler,
        (_Beside,),
        (*_OF_BROKEN_WEIGHTS, "argument-out-of-range", "weights-exploded", "scaler-shared"),
        heading="optimizer.step() called after scaler.step()",
    ),
    Fault("gradients-replaced", "error", _gradients_replaced, (_Replaced,)),
)
