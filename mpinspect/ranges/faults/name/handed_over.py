"""Diagnoses of gradients that changed, or were lost, between the backward and the optimizer's step."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

from mpinspect.numeric.formats import FLOAT16
from mpinspect.ranges.analysis.precision import damped_by_epsilon, run_format
from mpinspect.ranges.analysis.visibility import always_zero
from mpinspect.ranges.faults.event_findings import look_at
from mpinspect.ranges.faults.name.case import Case, Diagnosis, fp32_weights, quoted
from mpinspect.ranges.kinds import ACTIVATION_GRADIENT, WEIGHT_GRADIENT
from mpinspect.ranges.session import FROZEN, Event, Measurement, TensorKey, TensorWindow
from mpinspect.reporting.finding import INFERRED, Finding
from mpinspect.reporting.words import as_power, number_of, number_or_power, some, with_power

#: Fewest measured steps that must begin with gradients of earlier steps before these count as never zeroed.
_FEWEST_LEFT_OVER = 2
#: Fewest backwards without an update that count as a training that never updates.
_FEWEST_BACKWARDS = 3
#: Share of the parameters that must hold such gradients.
_MOST_LEFT_OVER = 0.9
#: A loss scale that may be raised by this factor is to be raised before anything else is tried.
_MUCH_ROOM = 256.0
#: A smaller factor is not clipping: it leaves nothing to learn from.
_NOTHING = 1e-6
#: Ratios that differ by at most this relative amount count as equal.
_SAME = 0.01
#: A gradient of at most this multiple of the true one has been divided by the scale by other code.
_UNSCALED_BY_HAND = 2.0
#: Division by a whole number up to this is taken for averaging over micro-batches, which may happen before unscaling.
_MOST_MICRO_BATCHES = 1024
#: Modules whose weights' gradients are sums of products with every element of the gradient at their output.
_PRODUCTS = ("Linear", "Conv1d", "Conv2d", "Conv3d")


def never_updated(case: Case) -> Iterator[Finding]:
    """Backwards of which none was followed by an update of the weights, or updates of masters that never reached them.

    False alarms: A script that only looks at gradients is reported if it has an optimizer or a scaler, from three backwards on.
    A run whose steps a scaler skipped is not: other findings cover it.
    """
    for found in case.measured("never-updated"):
        backwards = found.figures["backwards"]
        if backwards < _FEWEST_BACKWARDS or case.progress.skipped_steps:
            continue
        has_scaler = bool(case.scalers)
        broke = next((event for event in case.events if event.gradients_finite is False), None)
        whose = f" of its optimizer ({' and '.join(dict.fromkeys(found.names))})" if found.names else ""
        yield Finding(
            "never-updated",
            "error",
            "",
            f"None of {backwards:.0f} backwards led to an update: no step{whose} was seen, and the weights are what they were "
            "at the start."
            + (
                " Gradients were infinite or NaN: a loop that skips such steps by itself may skip all." if broke else ""
            ),
            {"backwards": backwards, "optimizers": list(found.names)},
            look_at(broke, case.session)
            if broke and broke.forward_finite is False
            else "Take a smaller loss scale, or let torch.amp.GradScaler find one."
            if broke
            else "Let the scaler step the optimizer of these weights after their backward."
            if has_scaler
            else "Call the optimizer's step after the backward; see that it holds these weights.",
            "scaler.step(optimizer)  # before the scaler's one update()" if has_scaler or broke else "optimizer.step()",
        )
    for found in case.measured("masters-not-copied"):
        yield Finding(
            "never-updated",
            "error",
            "",
            f"The optimizer stepped masters, copies of the weights, in {found.figures['steps']:.0f} steps, and the model's "
            "weights are what they were at the start: the updates never reach the model.",
            {"steps": found.figures["steps"], "names": list(found.names[:20])},
            "Copy the masters into the weights after each step, and into the weights themselves: what .float(), .half() or .to() "
            "returns is a copy, which holds what is written to it and is dropped.",
            "with torch.no_grad():\n    for weight, master in zip(model.parameters(), masters):\n        weight.copy_(master)",
        )


def unscale_missing(case: Case) -> Iterator[Finding]:
    """Gradients that were clipped, or changed otherwise, while they were multiplied by the loss scale.

    False alarms: Division by a whole number of micro-batches is not reported. A limit that was multiplied by the loss scale
    on purpose is reported.
    """
    found = [each for each in case.measured("changed-while-scaled") if not math.isnan(each.figures["factor"])]
    if _is_unscaled_by_hand(case, found):
        return
    scales = {change.scale for change in case.progress.scales}
    if not found or scales <= {1.0, None} or _is_average(found):
        return
    first = found[0]
    factor, scale = first.figures["factor"], case.progress.scale_at(first.step)
    is_by_norm = first.figures["is_uniform"]
    clip = f"clip_grad_{'norm' if is_by_norm else 'value'}_(model.parameters(), {'max_norm' if is_by_norm else 'clip_value'})"
    how = "clipped" if is_by_norm else "changed, or clipped value by value,"
    smaller = f"{number_or_power(scale)} times smaller" if scale else "smaller by the loss scale"
    yield Finding(
        "unscale-missing",
        "warning",
        "",
        f"In step {first.step}{_again(found)} the gradients were {how} while they were still multiplied by the loss scale"
        f"{f' of {with_power(scale)}' if scale else ''}: what was left was {factor:.2g} times as large. The limit was meant "
        f"for the true gradients, {smaller}.",
        {
            "factor": factor,
            "is_uniform": bool(is_by_norm),
            "loss_scale": scale,
            "measured_steps": len(found),
        },
        "Unscale before clipping or reading gradients.",
        f"scaler.unscale_(optimizer)\ntorch.nn.utils.{clip}\nscaler.step(optimizer)",
        step=first.step,
    )


def stepped_while_scaled(case: Case) -> Iterator[Finding]:
    """Optimizer steps on gradients that are still multiplied by a scaler's loss scale.

    False alarms: Gradients of at most twice their true size are taken to have been unscaled by hand, and are not reported.
    """
    for found in case.measured("stepped-while-scaled"):
        scale, factor = case.progress.scale_at(found.step), found.figures["factor"]
        if not scale or scale <= 1 or not factor * scale > _UNSCALED_BY_HAND:
            continue
        yield Finding(
            "unscale-missing",
            "error",
            "",
            f"In step {found.step} the optimizer stepped with gradients that were still multiplied by the loss scale of "
            f"{with_power(scale)}: scaler.scale() was called, and neither scaler.step() nor scaler.unscale_().",
            {"loss_scale": scale, "factor": factor, "parameters": len(found.names)},
            "Let the scaler step the optimizer: it divides by the scale first, and skips a step that overflowed.",
            "scaler.step(optimizer)  # instead of optimizer.step()\nscaler.update()",
            step=found.step,
        )
        return


def unscaled_too_often(case: Case) -> Iterator[Finding]:
    """Gradients that were divided by a scaler's loss scale more often than they were multiplied by it.

    False alarms: A loss that the loop multiplies by the scaler's scale by hand, beside others that the scaler multiplies, is
    reported.
    """
    by_hand = [each for each in case.measured("changed-while-scaled") if not math.isnan(each.figures["factor"])]
    again, never = list(case.measured("unscaled-again")), list(case.measured("unscaled-never-scaled"))
    names: tuple[str, ...] = ()
    if _is_unscaled_by_hand(case, by_hand):
        found = by_hand
        what = "the loop divided all gradients by the loss scale{of} and the scaler divided them by it once more"
        fix = "Let the scaler divide, and divide nothing by hand."
        code = (
            "scaler.unscale_(optimizer)\ntorch.nn.utils.clip_grad_norm_(parameters, max_norm)\nscaler.step(optimizer)"
        )
    elif again:
        found, names = again, again[0].names
        what = (
            f"the scaler unscaled the same gradients {number_of(round(again[0].figures['times']), 'time')} while they were "
            "accumulated, which divides those of the earlier micro-batches by the loss scale{of} again"
        )
        fix = "Unscale, clip, step and update once, after the last micro-batch."
        code = (
            "if is_last_micro_batch:\n    scaler.unscale_(optimizer)\n    scaler.step(optimizer)\n    scaler.update()"
        )
    elif never:
        found, names = never, never[0].names
        what = (
            f"the gradients of {_grouped(never[0].names)} came from a loss that no scaler had multiplied, and the scaler divided "
            "them by the loss scale{of}"
        )
        fix, code = "Scale each loss.", "scaler.scale(loss).backward()\nscaler.scale(other_loss).backward()"
    else:
        return
    scale = case.progress.scale_at(found[0].step)
    if scale is not None and scale <= 1:
        return
    outcome = "only the last one counts" if found is again else "they are too small by that factor"
    yield Finding(
        "unscaled-too-often",
        "error",
        names[0] if names else "",
        f"In step {found[0].step}{_again(found)} {what.replace('{of}', f' of {with_power(scale)}' if scale else '')}: {outcome}.",
        {"loss_scale": scale, "names": list(names[:20]), "measured_steps": len(found)},
        fix,
        code,
        step=found[0].step,
    )


def _is_unscaled_by_hand(case: Case, found: Sequence[Measurement]) -> bool:
    """Return whether all gradients were divided by exactly the loss scale before a scaler unscaled them."""
    batches = round(case.progress.backwards / max(case.progress.steps, 1))
    scales = [case.progress.scale_at(each.step) for each in found]
    return bool(found) and all(
        scale is not None
        and scale > 1
        and scale != batches
        and each.figures["is_uniform"]
        and abs(each.figures["factor"] * scale - 1) <= _SAME
        for each, scale in zip(found, scales, strict=True)
    )


def _again(found: Sequence[Measurement]) -> str:
    """Return words on the further checked steps with the same fault, to follow "In step 3"; "" if there are none."""
    return f", and in {len(found) - 1} more of the few steps that are checked for this," if len(found) > 1 else ""


def _is_average(found: list[Measurement]) -> bool:
    """Return whether all gradients were divided by the same small whole number: an average over micro-batches."""
    factors = [each.figures["factor"] for each in found]
    divisor = 1 / factors[0] if factors[0] > 0 else math.inf
    is_whole = divisor <= _MOST_MICRO_BATCHES and abs(divisor - round(divisor)) < _SAME * divisor
    is_one = all(abs(factor - factors[0]) <= _SAME * factors[0] for factor in factors)
    return is_whole and is_one and all(each.figures["is_uniform"] for each in found)


def gradients_gone(case: Case) -> Iterator[Finding]:
    """Gradients that were finite after the backward, and zero or not finite when the optimizer got them.

    False alarms: Gradients that a script zeroes on purpose before a step (a warm-up that trains nothing) are reported.
    """
    found = [
        each
        for each in case.measured("changed-before-step")
        if each.figures["zeroed"] >= _MOST_LEFT_OVER * each.figures["of"]
        # What a copy is divided by on the way to a master may be the loss scale.
        or (0 < each.figures["factor"] < _NOTHING and "masters" not in each.figures)
    ]
    if not found:
        return
    first = found[0]
    of_masters = "masters" in first.figures
    nans = first.figures.get("nans")
    squares, not_finite = first.figures.get("sum_of_squares", 0.0), first.figures.get("not_finite", 0.0)
    evidence = {**first.figures, "measured_steps": len(found)}
    if squares > FLOAT16.max_finite or not_finite:
        norm, limit = math.sqrt(squares), FLOAT16.max_finite
        what, value = ("norm", norm) if norm > limit else ("sum of squares", squares)
        others = (
            f" (the {what} of the others, {value:.3g}, is beyond {limit:g} too: summed up in FP16 it is infinite as well)"
            if squares > limit
            else ""
        )
        cause = (
            f"{not_finite:.0f} of the model's gradients held infinities or NaNs, so that the norm was not finite{others}"
            if not_finite
            else f"the {what} of the model's FP16 gradients, {value:.3g}, is beyond {limit:g}, where FP16 ends"
        )
        yield Finding(
            "gradients-clipped-to-zero",
            "error",
            "",
            f"In step {first.step}{_again(found)} the gradients{' of the masters' if of_masters else ''} that the optimizer was "
            f"given were {'zeros' if nans == 0 else 'zeros or NaNs'}: {cause}, and dividing by the norm left nothing.",
            evidence,
            "Divide the masters' gradients by the loss scale and clip them, in FP32, and skip a step whose norm is not finite."
            if of_masters
            else "Keep the weights in FP32, so that their gradients are FP32 too, and compute in BF16, in which such gradients "
            "are finite (or in FP16 with a GradScaler that begins below 1); compute the norm in FP32; skip a step whose norm is "
            "not finite."
            if not_finite
            else "Compute norms in FP32 and clip by that.",
            "for p, master in zip(parameters, masters):\n    master.grad = p.grad.float() / loss_scale\n"
            "total = torch.nn.utils.clip_grad_norm_(masters, max_norm)  # FP32\n"
            "if torch.isfinite(total):\n    optimizer.step()"
            if of_masters
            else f"{fp32_weights()}\nloss.backward()\n"
            "total = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)\n"
            "if torch.isfinite(total):\n    optimizer.step()"
            if not_finite
            else "grads = [p.grad for p in model.parameters() if p.grad is not None]\n"
            "total = torch.stack([grad.float().norm() for grad in grads]).norm()  # FP32\n"
            "for grad in grads:\n    grad.mul_((max_norm / total).clamp(max=1))",
            INFERRED,
            first.step,
        )
        return
    yield Finding(
        "gradients-zeroed",
        "error",
        "",
        f"In step {first.step}{_again(found)} the backward gave gradients, and the optimizer was given "
        + ("zeros" if first.figures["zeroed"] else f"{first.figures['factor']:.1g} times their values")
        + (" in its masters" if of_masters else "")
        + ": the weights learn nothing from them.",
        evidence,
        "Look at the code between backward() and step(): "
        + ("it is to copy the model's gradients to the masters." if of_masters else "zero_grad(), a mask, a factor."),
        "for p, master in zip(parameters, masters):\n    master.grad = p.grad.float()\noptimizer.step()"
        if of_masters
        else "optimizer.zero_grad()\nloss.backward()\noptimizer.step()",
        step=first.step,
    )


def replaced(case: Case) -> list[str]:
    """Return the weights whose gradients held infinities or NaNs that were made finite before the optimizer's step."""
    measured = [name for found in case.measured("replaced-before-step") for name in found.names]
    return list(dict.fromkeys(measured)) or _replaced_in_backward(case)


def _replaced_in_backward(case: Case) -> list[str]:
    """Return the weights whose gradients must have been replaced within the backward, as the counts and the steps taken show.

    A scaler would have skipped these steps, and of what it does not check the weights would have broken the next forward.
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


def gradients_replaced(case: Case) -> Iterator[Finding]:
    """Infinities and NaNs in gradients that were replaced by finite values before the optimizer's step.

    False alarms: torch.nan_to_num on gradients is reported even if it is intended; a step that a scaler skips is not. What a
    hook replaces within the backward is inferred, in runs with a scaler: where the gradient at the output of a linear layer or
    convolution is not finite, those of its weights can't be.
    """
    fix, code = _instead_of_replacing(case)
    for found in case.measured("replaced-before-step"):
        yield Finding(
            "gradients-replaced",
            "error",
            found.name,
            f"In step {found.step}{_again(list(case.measured(found.what)))} the gradients of {some(list(found.names), 3)} held "
            "infinities or NaNs, and were replaced by finite values before the optimizer stepped: the step was taken on numbers "
            "that no backward gave.",
            {"parameters": len(found.names), "of": found.figures["of"], "names": list(found.names[:20])},
            fix,
            code,
            step=found.step,
        )
        return
    names = _replaced_in_backward(case)
    if names:
        first = _taken(case)[0]
        scale = f", so that its scale never falls from {with_power(first.loss_scale)}" if first.loss_scale else ""
        yield Finding(
            "gradients-replaced",
            "error",
            names[0],
            f"From step {first.step} on gradients held infinities or NaNs, which must have reached the weight gradients of "
            f"{_grouped(names)}, and no step was skipped: a hook (nan_to_num) replaced them by finite values before the scaler "
            f"looked{scale}. The optimizer stepped on numbers that no backward gave.",
            {"parameters": len(names), "names": names[:20], "loss_scale": first.loss_scale},
            fix,
            code,
            INFERRED,
            first.step,
        )


def _instead_of_replacing(case: Case) -> tuple[str, str]:
    """Return what to do instead of making gradients finite, in words and as code."""
    broken, steps = [event for event in case.events if event.gradients_finite is False], case.progress.steps
    number = len({event.step for event in broken})
    if case.scalers and any(each.value == "inf" and each.forward_finite and each.loss_scale != 1 for each in broken):
        return (
            "Take the replacement out: the scaler then skips such steps, and lowers its scale until they end.",
            "scaler.scale(loss).backward()\n"
            "scaler.unscale_(optimizer)  # looks for infinities and NaNs; clip after it\n"
            "scaler.step(optimizer)  # skips the step if there were any\nscaler.update()",
        )
    if 2 * number >= steps:
        # To skip most steps would be no training.
        return (
            f"Mend what makes the infinities and NaNs: they come in {number} of {steps} steps, so skipping such steps would "
            "leave few or none.",
            "",
        )
    return (
        "Mend what makes the infinities and NaNs; until then skip a step that has any, as a GradScaler does.",
        "# in place of the replacement\n"
        "if all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters()):\n    optimizer.step()",
    )


def gradients_stale(case: Case) -> Iterator[Finding]:
    """Gradients of an earlier step that the optimizer received again.

    False alarms: A branch whose gradients are kept over steps on purpose (accumulation over optimizer steps) is reported.
    """
    found = list(case.measured("stale"))
    if not found:
        return
    names = list(dict.fromkeys(name for each in found for name in each.names))
    later = [name for name in names if name not in found[0].names]
    others = f", later also {_grouped(later)}," if later else ""
    yield Finding(
        "gradients-stale",
        "warning",
        names[0],
        f"In step {found[0].step}{_again(found)} the optimizer stepped {_grouped(found[0].names)}{others} with gradients left "
        "over from an earlier step: no backward had reached these parameters since.",
        {"parameters": len(names), "names": names[:20], "measured_steps": len(found)},
        "Zero all gradients once a step, also those of branches that this batch does not use.",
        "optimizer.zero_grad(set_to_none=True)",
        step=found[0].step,
    )


def gradients_never_zeroed(case: Case) -> Iterator[Finding]:
    """Gradients that add up over optimizer steps.

    False alarms: It is reported only if at least nine in ten parameters still hold gradients when the next step's backward
    begins. A loop that accumulates over several optimizer steps on purpose is reported too. Masters' gradients are reported
    only if they are the sum of what they held before and of this step's gradients, all multiplied by one factor at most.
    """
    yield from _masters_never_zeroed(case)
    found = [
        each
        for each in case.measured("left-over")
        if each.figures["parameters"] >= _MOST_LEFT_OVER * each.figures["of"]
    ]
    if len(found) < _FEWEST_LEFT_OVER:
        return
    both = ", those of the copies that the optimizer steps and the model's"
    yield Finding(
        "gradients-never-zeroed",
        "error",
        "",
        f"In step {found[0].step}{_again(found)} .grad still held the gradients of the step before when the backward began: "
        f"each step is taken with the sum of all gradients so far{_grown(found, 'of .grad')}.",
        {"measured_steps": len(found), "largest": [each.figures["largest"] for each in found]},
        f"Zero the gradients once a step{both if case.precision.has_masters else ''}.",
        "optimizer.zero_grad()" + ("\nmodel.zero_grad()" if case.precision.has_masters else ""),
        step=found[0].step,
    )


def _masters_never_zeroed(case: Case) -> Iterator[Finding]:
    found = [
        each for each in case.measured("masters-added-up") if _is_kept_whole(each, case.progress.scale_at(each.step))
    ]
    if len(found) < _FEWEST_LEFT_OVER:
        return
    grown = _grown(found, "of the masters' .grad, in the tensors that were compared,")
    yield Finding(
        "gradients-never-zeroed",
        "error",
        "",
        f"In step {found[0].step}{_again(found)} the optimizer stepped with the sum of this step's gradients and of what the "
        f"masters' .grad held before: each step is taken with the sum of all gradients so far"
        f"{grown}.",
        {"measured_steps": len(found), **found[0].figures, "names": list(found[0].names[:20])},
        "Zero the gradients of the masters once a step, as those of the model.",
        "optimizer.zero_grad()  # the masters'\nmodel.zero_grad()",
        step=found[0].step,
    )


def _grown(found: Sequence[Measurement], which: str) -> str:
    """Return in brackets how the largest element grew from the first record to the last; "" if it did not."""
    first, last = (each.figures["largest"] for each in (found[0], found[-1]))
    return f" (the largest element {which} rose from {first:.3g} to {last:.3g})" if first < last else ""


def _is_kept_whole(found: Measurement, scale: float | None) -> bool:
    """Return whether old and new gradients have the same weight: a gradient with momentum keeps a part of the old ones."""
    kept, added = found.figures["kept"], found.figures["added"] * (scale or 1.0)
    return abs(kept - 1) <= _SAME or (kept < 1 and abs(kept - added) <= _SAME * kept)


def gradients_missing(case: Case) -> Iterator[Finding]:
    """Parameters in an optimizer that never got a gradient, and parameters that a name's prefix froze by mistake.

    False alarms: Modules that were not called (an expert without tokens, a head for a later phase) are reported as
    information. A frozen prefix is inferred from names alone.
    """
    never = {name for name, kind, _ in _never_fired(case) if kind == WEIGHT_GRADIENT}
    for found in case.measured("missing"):
        names = [name for name in found.names if name in never]
        if not names:
            continue
        which = repr(names[0]) if len(names) == 1 else f"The {len(names)} parameters of {_grouped(names)}"
        severity, cause, fix, code = _why_missing(found, "it" if len(names) == 1 else "them")
        yield Finding(
            "gradients-missing",
            severity,
            names[0],
            f"{which} {'is' if len(names) == 1 else 'are'} in the optimizer but never got a gradient: {cause}",
            {"parameters": len(names), "names": names[:20], **found.figures},
            fix,
            code,
            INFERRED,
        )
    yield from _caught_by_prefix(case)


def _why_missing(found: Measurement, them: str) -> tuple[str, str, str, str]:
    """Return the severity, the cause in words, the fix and its code, by how the parameters' modules were called."""
    if "not_called" in found.figures:
        where = "the module" if them == "it" else "their modules"
        return "info", f"{where} did not run in the steps that were looked at.", "", ""
    if "without_graph" in found.figures:
        return (
            "warning",
            f"the forward that uses {them} built no graph. It ran under torch.no_grad(), or in a reentrant checkpoint none of "
            "whose inputs needs a gradient.",
            "Call these modules with gradients enabled, and checkpoint without reentry.",
            "torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)\n"
            '# in Transformers: model.gradient_checkpointing_enable({"use_reentrant": False})',
        )
    return (
        "warning",
        f"the loss does not reach {them}. A result is detached, converted to a number or computed under no_grad, or not used.",
        "Look for detach(), .data, .item(), argmax or torch.no_grad() in the code that uses these modules' outputs; "
        f"freeze {them} if {'it is' if them == 'it' else 'they are'} not meant to learn.",
        "",
    )


def gradients_all_zero(case: Case) -> Iterator[Finding]:
    """Modules whose weights get gradients in FP16 that are zero in every sampled step.

    False alarms: Gradients that are zero in FP32 too (an expert that no sample reached, a dead ReLU) are reported likewise, since
    the counts cannot tell them from flushed ones. A module is reported only if all its weights get zeros, in at least three
    samples each.
    """
    if run_format(case.session) != FLOAT16:
        return
    zero, unseen = always_zero(case.totals), replaced(case)
    names = [name for name in zero if name not in unseen]
    if zero and not names:
        yield Finding(
            "gradients-all-zero",
            "info",
            zero[0],
            f"Every weight gradient of {_grouped(zero)} was zero in all sampled steps, since infinities and NaNs were replaced: "
            "these weights do not learn.",
            {"parameters": len(zero), "names": zero[:20]},
        )
    if not names:
        return
    scale, highest = case.session.last_scale, case.advised.advice.highest
    recommended = case.advised.advice.recommended
    raised = recommended if scale and recommended and recommended >= _MUCH_ROOM * scale else None
    limit = (
        f" rather than raise the loss scale for all: above {with_power(highest)} the other layers may overflow"
        if highest and not raised
        else ""
    )
    edge = f"{as_power(2.0**-25 / scale)} at the loss scale of {with_power(scale)}" if scale else "2^-25"
    damped = damped_by_epsilon(case.session, 2.0**-25 / (scale or 1.0))
    in_fp32 = "" if damped else "compute these modules in FP32, or "
    look = "with torch.autocast(device_type, enabled=False):  # for this one batch\n    y = module(x.float())"
    first = (
        f"Raise the loss scale to {with_power(raised)}, where nothing seen overflows. If the zeros stay, take"
        if raised
        else "Take"
    )
    yield Finding(
        "gradients-all-zero",
        "warning",
        names[0],
        f"Every weight gradient of {_grouped(names)} was zero in all sampled steps: these weights do not learn. FP16 flushes "
        f"gradients up to {edge}; whether that made the zeros is not known.",
        {"parameters": len(names), "names": names[:20], "loss_scale": scale},
        f"{first} the gradients of one batch with autocast off. If they are not zero there, {in_fp32}multiply this part's loss "
        f"by a factor of its own{limit}.{f' Computing them in FP32 would not do: {damped}.' if damped else ''}",
        f"scaler = torch.amp.GradScaler(device_type, init_scale={raised:.0f})" if raised else look,
        INFERRED,
    )


def _never_fired(case: Case) -> Iterator[tuple[str, str, str]]:
    for key, info in case.infos.items():
        window = case.totals.get(key)
        if window is None or not window.samples:
            yield info.name, info.kind, info.note


def _caught_by_prefix(case: Case) -> Iterator[Finding]:
    """Yield a finding if blocks 1, 10, 11, ... are frozen and 2..9 are trained, as by a name's prefix without its final dot."""
    frozen: dict[str, Counter[str]] = defaultdict(Counter)
    trained: dict[str, Counter[str]] = defaultdict(Counter)
    for info in case.infos.values():
        if info.kind == WEIGHT_GRADIENT:
            kept = frozen if info.note.startswith(FROZEN) else trained
            match = re.search(r"\d+(?=\.)", info.name)
            if match is not None:
                kept[info.name[: match.start()]][match.group()] += 1
    groups = {
        f"{place}{meant}": [f"{place}{number}" for number in caught]
        for place, numbers in frozen.items()
        for meant, caught in _prefixes(numbers, trained.get(place, Counter())).items()
    }
    if not groups:
        return
    parameters = {f"{place}{number}": count for place, numbers in frozen.items() for number, count in numbers.items()}
    told = [
        f"{meant} is frozen, and with it {', '.join(caught)} ({sum(parameters[each] for each in caught)} parameters)"
        for meant, caught in groups.items()
    ]
    prefix = next(iter(groups))
    place = next(place for place in frozen if prefix.removeprefix(place).isdecimal() and prefix.startswith(place))
    yield Finding(
        "gradients-missing",
        "warning",
        groups[prefix][0],
        f"{'; '.join(told)}, while all other blocks are trained: it looks as if names that begin with "
        f"{' or '.join(map(repr, groups))} were frozen, without the trailing dot.",
        {
            "frozen": sorted(frozen[place], key=int),
            "trained": sorted(trained[place].keys() - frozen[place].keys(), key=int),
            "groups": {meant: list(caught) for meant, caught in groups.items()},
        },
        f"Compare with the trailing dot: names that begin with {' or '.join(repr(meant + '.') for meant in groups)}.",
        f"if name.startswith({_one_or_several([meant + '.' for meant in groups])}):\n    parameter.requires_grad_(False)",
        INFERRED,
    )


def _prefixes(frozen: Collection[str], trained: Collection[str]) -> dict[str, list[str]]:
    """Return the numbers whose prefix explains all frozen blocks, each with those that it caught; empty if there are none."""
    meant = [number for number in frozen if not any(number.startswith(other) for other in frozen if other != number)]
    caught = {one: sorted((each for each in frozen if each.startswith(one) and each != one), key=int) for one in meant}
    others = set(trained) - set(frozen)
    spared = any(other.startswith(one) for other in others for one in meant)
    return caught if others and not spared and all(caught.values()) else {}


def _one_or_several(names: Sequence[str]) -> str:
    several = ", ".join(map(quoted, names))
    return several if len(names) == 1 else f"({several})"


def parameters_not_optimized(case: Case) -> Iterator[Finding]:
    """Parameters that get gradients and that no optimizer steps.

    False alarms: Parameters that the script steps by hand are reported. If most of the model is left out the finding is
    only "info", since usually a head is trained on a backbone, unless the optimizer holds tensors that never get gradients.
    """
    for found in case.measured("not-optimized"):
        idle = int(found.figures.get("idle", 0))
        share, modules = found.figures["fraction"], {name.rpartition(".")[0] for name in found.names}
        yield Finding(
            "parameters-not-optimized",
            # Leaving out most of a model is usually intended: a head is trained on a backbone that was not frozen.
            "warning" if share < 0.5 or idle else "info",
            found.name,
            (
                f"{found.name!r} gets gradients but is in no optimizer that was seen: it never changes."
                if len(found.names) == 1
                else f"The {len(found.names)} parameters of {_grouped(found.names)} get gradients but are in no optimizer that "
                "was seen: they never change."
            )
            + (
                f" The optimizer holds {number_of(idle, 'tensor')} that never got a gradient and {'is' if idle == 1 else 'are'} "
                "not in the model: it was made before parameters were replaced."
                if idle
                else ""
            ),
            {"parameters": len(found.names), "fraction": share, "idle": idle, "names": list(found.names[:20])},
            "Make the optimizer after the last module was added, or add that module's parameters to it; freeze what is not "
            "meant to learn.",
            f'optimizer.add_param_group({{"params": model.get_submodule({quoted(*modules)}).parameters()}})'
            if len(modules) == 1
            else 'known = {id(p) for group in optimizer.param_groups for p in group["params"]}\n'
            'optimizer.add_param_group({"params": [p for p in model.parameters() if id(p) not in known]})',
        )


def _grouped(names: Iterable[str]) -> str:
    """Return the parameters' modules in words, with repeated blocks as one: "'h.{0..11}.attn', 'head'"."""
    modules = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
    groups: dict[str, list[str]] = {}
    for module in modules:
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "{}", module), []).append(module)
    told = []
    for pattern, members in groups.items():
        numbers = sorted({int(number) for member in members for number in re.findall(r"(?<=\.)(\d+)(?=\.)", member)})
        if len(members) > 1 and pattern.count("{}") == 1:
            told.append(pattern.replace("{}", f"{{{numbers[0]}..{numbers[-1]}}}"))
        else:
            told += members
    return some(told)


DIAGNOSES: tuple[Diagnosis, ...] = (
    never_updated,
    gradients_gone,
    gradients_replaced,
    gradients_never_zeroed,
    unscale_missing,
    stepped_while_scaled,
    unscaled_too_often,
    gradients_stale,
    gradients_missing,
    gradients_all_zero,
    parameters_not_optimized,
)
