"""Faults of the operation in which the first infinity or NaN arose, found in its arguments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mpinspect.numeric.formats import BFLOAT16, FLOAT16
from mpinspect.ranges.analysis.precision import run_format
from mpinspect.ranges.faults.name.case import Case
from mpinspect.ranges.faults.name.fault import Fault, Found
from mpinspect.ranges.faults.name.operators import LogSoftmax, operator_named
from mpinspect.ranges.kinds import WEIGHT_GRADIENT
from mpinspect.ranges.records import (
    BEYOND_FLOAT16,
    CONSTANT,
    ROUNDED_DIFFERENCE,
    TOO_FEW,
    AnyRecord,
    BornInfinite,
    BrokenAlike,
    BrokenWeights,
    CalledLines,
    Examined,
    ExaminedArgument,
    ExaminedBatch,
    ExaminedDifference,
    ExaminedMask,
    ExaminedOutliers,
    ExaminedTarget,
    ExaminedZeroRow,
    NearestEnd,
    Record,
    ReplacedBeforeStep,
    RoundedArgument,
    WeightGrowth,
)
from mpinspect.ranges.session import LOSSES, MOST_ROWS, Event, module_named
from mpinspect.reporting.sentences import Said, Sentences, text
from mpinspect.reporting.words import bracketed, filled, number_of

#: The largest share of the run's steps that are rare.
_RARE = 0.02
#: The ids of findings that follow from a forward or a loss that was not finite.
_EVENT = ("non-finite-event", "cast-overflows")


class _Aftermath(Sentences):
    REPLACED = "The gradients were made finite before the optimizer's step, which was taken on them."
    WEIGHTS_LOST = "The optimizer took the step: the weights are lost, go back to a checkpoint before that step."


def _aftermath(case: Case, event: Event | None) -> _Aftermath | None:
    """Return the effect of an optimizer's step on non-finite gradients; None if there was no such step or it did no harm."""
    if event is None or event.skipped is not False or event.gradients_finite:
        return None
    if any(each.step == event.step for each in case.recorded(ReplacedBeforeStep)):
        return _Aftermath.REPLACED
    later = [each for each in case.events if each.step > event.step]
    recovered = case.progress.steps > event.step + 1 and all(each.forward_finite for each in later)
    return _Aftermath.WEIGHTS_LOST.when(not recovered)


def _event_at(case: Case, step: int) -> Event | None:
    """Return the first event of a step, if there is one."""
    return next((event for event in case.events if event.step == step), None)


def _module(case: Case, measured: Examined) -> str:
    """Return the module in which the infinity or NaN arose; "" for the loss and for code after the last module."""
    event = _event_at(case, measured.step)
    if measured.name or event is None or event.after or event.what in LOSSES:
        return measured.name
    return event.module


def _rows(measured: Examined, one: str = "row", several: str = "rows", of: str = "the batch") -> str:
    """Return the positions along the first dimension in words: "row 5 of the batch", "all 32 rows of the batch"."""
    names, number = measured.names, measured.rows
    if not names:
        return ""
    if number and number == measured.of_rows and number > 1:
        return f"all {number:.0f} {several} of {of}"
    if len(names) == 1:
        return f"{one} {names[0]} of {of}"
    if len(names) >= MOST_ROWS and number != len(names):
        return f"{several} {', '.join(names)}, ... of {of}"
    return f"{several} {', '.join(names)} of {of}"


def _elements(measured: Examined) -> str:
    return number_of(round(measured.elements), "element") if measured.elements else ""


def _examined(
    case: Case,
    measured: Examined,
    says: Sequence[Sentences | None],
    fix: Said,
    code: Said,
    words: Mapping[str, object],
    evidence: Mapping[str, object] | None = None,
    **more: Any,
) -> Found:
    """Return the occurrence that an examination shows, in the module of the operation, with the harm to the weights."""
    module, event = _module(case, measured), _event_at(case, measured.step)
    when = f"In step {measured.step}{filled(', in {!r},', module)}"
    return Found(
        (*says, _aftermath(case, event)),
        {"elements": measured.elements, "rows": list(measured.names), **(evidence or {})},
        {"when": when, "places": bracketed(_elements(measured), _rows(measured)), **words},
        fix,
        code,
        **{"layer": module, "step": measured.step, **more},
    )


# -- the batch ----------------------------------------------------------------------------------------------------------


class _Batch(Sentences):
    BATCH = "In step {step} the batch itself holds infinities or NaNs{places}: the model did not make them."
    TARGETS = "In step {step} the targets hold infinities or NaNs{places}: the model did not make them."
    ALSO = "The model's input was not finite in {further:count further step}."
    ALONE = "The model's input was finite in all other steps."
    LOOK = "Leave out samples that are not finite before they reach the model, and look at their preprocessing."
    LOOK_ON_EACH_RANK = (
        "Leave out the losses of samples that are not finite; every rank still runs its backward. Look at the preprocessing of "
        "these samples."
    )


class _LeftOut(Sentences):
    SAMPLES = (
        "# before {at_forward}\n"
        "good = {good}\n"
        "good = good.reshape(len({bad}), -1).all(1)\n"
        "if not good.any():\n"
        "    continue\n"
        "batch, target = batch[good], target[good]"
    )
    LOSSES = (
        "# before {at_forward}\n"
        "good = {good}\n"
        "good = good.reshape(len({bad}), -1).all(1)\n"
        "# no rank may leave out a backward\n"
        "{bad}[~good] = 0\n"
        '# of a loss made with reduction="none"\n'
        "losses = loss_fn(model(batch), target)\n"
        "count = good.sum().clamp_min(1)\n"
        "loss = losses[good].sum() / count"
    )


def _batch_not_finite(case: Case) -> Iterator[Found]:
    """The batch itself held infinities or NaNs.

    False alarms: Only the inputs of the model's outermost call are searched, and the targets that its loss keeps. A batch
    that the model is meant to clean (NaN for missing values) is still reported if the loss is not finite.
    """
    for measured in case.recorded(Examined):
        event = _event_at(case, measured.step)
        of_targets = _is_of_targets(measured, event)
        if not of_targets and (not isinstance(measured, ExaminedBatch) or _is_batch_rounded(case)):
            continue
        if event is not None and event.rank != measured.rank:
            # Another rank may have made it first and sent it to this one.
            continue
        further = len({each.step for each in case.events if each.given} - {measured.step})
        is_alone, bad = case.session.info.world_size == 1, ("batch", "target")[of_targets]
        yield _examined(
            case,
            measured,
            [_Batch.TARGETS.when(of_targets) or _Batch.BATCH, None if of_targets else _others(further, case)],
            _Batch.LOOK.when(is_alone) or _Batch.LOOK_ON_EACH_RANK,
            _LeftOut.SAMPLES.when(is_alone) or _LeftOut.LOSSES,
            {"further": further, "bad": bad, "good": f"torch.isfinite({bad})"},
            layer="",
            is_mild=event is None,
            is_inferred=isinstance(measured, ExaminedDifference),
        )
        return


def _others(further: int, case: Case) -> _Batch | None:
    """Return the sentence on the further steps with such an input, ``further`` of them; None if their number is not known."""
    is_known = case.session.info.watch and case.progress.watched_steps is None
    is_alone = is_known and len({event.step for event in case.events}) == 1
    return _Batch.ALSO.when(further) or _Batch.ALONE.when(is_alone)


def _is_batch_rounded(case: Case) -> bool:
    """Return whether a step computed twice shows that the loop's own code in 16 bits made the batch infinite."""
    steps = {born.step for born in case.recorded(BornInfinite) if not born.name and born.names[2] == "forward"}
    return any(event.given for event in case.events if event.step in steps)


def _is_of_targets(measured: Examined, event: Event | None) -> bool:
    """Return whether the loss's targets were not finite: of a difference only if the model's own output was finite."""
    if not isinstance(measured, ExaminedDifference):
        return isinstance(measured, ExaminedTarget)
    return event is None or event.what in LOSSES or event.forward_finite is not False


class _Outliers(Sentences):
    BEYOND = (
        "In step {step} the batch holds values up to {largest:.3g}{places}, beyond FP16's maximum of 65504: the cast to FP16 in "
        "{module} turns them into infinities."
    )
    AGAIN = "The same holds for {further:count further step} among those examined."
    LEAVE_OUT = (
        "Leave out samples with values beyond 65504. You can also clamp or standardise the model's input. No loss scale repairs "
        "a forward."
    )
    LEAVE_LOSSES_OUT = (
        "Leave samples beyond 65504 out of the loss. You can also clamp or standardise the model's input. No loss scale repairs "
        "a forward."
    )


def _batch_beyond_float16(case: Case) -> Iterator[Found]:
    """Finite values of a batch became infinities when the first module cast them to FP16.

    False alarms: It is a warning where a scaler skipped such steps, and they were at most 2% of the run.
    """
    broken = {event.step for event in case.events if event.phase == "forward" and event.forward_finite is False}
    further = len({each.step for each in case.recorded(ExaminedOutliers)}) - 1
    for measured in case.recorded(ExaminedOutliers):
        event = _event_at(case, measured.step)
        is_cast = event is not None and (event.phase, event.module) == ("forward", measured.name)
        is_alone = case.session.info.world_size == 1
        if event is None or not is_cast or event.after or event.given or event.dtype != FLOAT16.name:
            continue
        yield _examined(
            case,
            measured,
            [_Outliers.BEYOND, _Outliers.AGAIN.when(further)],
            _Outliers.LEAVE_OUT.when(is_alone) or _Outliers.LEAVE_LOSSES_OUT,
            _LeftOut.SAMPLES.when(is_alone) or _LeftOut.LOSSES,
            {
                "module": module_named(measured.name),
                "largest": measured.largest,
                "further": further,
                "bad": "batch",
                "good": "batch.abs() < 65504",
            },
            is_mild=bool(event.skipped) and len(broken) <= _RARE * case.progress.steps,
        )
        return


# -- masks and rows of zeros --------------------------------------------------------------------------------------------


class _Mask(Sentences):
    ROWS = "{when} a mask hides all scores of {count:count row}{places}, whose softmax is 0/0, which is NaN."
    KEEP_A_KEY = (
        "Leave each row at least one key. A mask of a large finite number of the scores' own dtype, "
        "torch.finfo(scores.dtype).min{in_16_bits}, serves as well."
    )
    BECAME_INFINITE = (
        "The mask is made of finite numbers, up to {largest:.3g} in magnitude, which {dtype:format} makes -inf ({line}). In FP32 "
        "such a row has equal weights."
    )
    FINITE_IN_DTYPE = (
        "Use a number that the scores' own dtype holds, torch.finfo(scores.dtype).min, or compute the scores in FP32. Leave each "
        "row at least one key, too."
    )
    FINITE = "# in place of a number such as -1e9\ntorch.finfo(scores.dtype).min"
    CAUSES = "Possible causes: an empty sample, padding on the wrong side, a mask that is applied twice."
    UNMASK = "# True: visible. A row without keys gets\n# them all; ignore it in the loss\nmask[~mask.any(-1)] = True"


def _mask_hides_whole_row(case: Case) -> Iterator[Found]:
    """A softmax or an attention in which a mask hides every element of a row.

    False alarms: A softmax is reported only if the autograd graph shows a mask just before it; scores that are -inf for
    another reason are not reported. A module whose rounding overflowed in a step computed twice is left out.
    """
    for measured in case.recorded(ExaminedMask):
        if _is_infinity_of_rounding(case, measured):
            return
        words = {
            "count": int(measured.elements),
            "places": bracketed(_rows(measured, "index", "indices", "the first dimension")),
            "in_16_bits": " (float32's becomes -inf in 16 bits)" * (run_format(case.session) in (FLOAT16, BFLOAT16)),
        }
        made = _mask_made_infinite(case, measured)
        if made is not None:
            words |= {"largest": made.largest, "dtype": made.text, "line": made.names[1]}
        says = [_Mask.ROWS, _Mask.BECAME_INFINITE.when(made)]
        fix = (_Mask.FINITE_IN_DTYPE.when(made) or _Mask.KEEP_A_KEY, _Mask.CAUSES)
        code, before = _Mask.FINITE.when(made) or _Mask.UNMASK, [made.names[1]] if made else []
        yield _examined(case, measured, says, fix, code, words, before=before)
        return


def _mask_made_infinite(case: Case, mask: ExaminedMask) -> BornInfinite | None:
    """Return the overflow by which finite numbers of a mask became -inf in its module; None if they were infinite before."""
    module = _module(case, mask)
    found = (each for each in case.recorded(BornInfinite) if each.is_negative and each.largest and each.name == module)
    return next(found, None)


def _is_infinity_of_rounding(case: Case, mask: ExaminedMask) -> bool:
    """Return whether rounding makes infinities in a mask's module that FP32 does not have: a mask has its own in both."""
    module = _module(case, mask)
    return any(
        (each.name, each.names[2], each.largest) == (module, "forward", 0) for each in case.recorded(BornInfinite)
    )


class _ZeroRow(Sentences):
    DIVIDED = (
        "{when} a row of zeros was divided by its own largest magnitude or norm, which is zero{places}: 0/0 is NaN."
    )
    WEIGHT = (
        "{when} the weight is all zeros, and the output is NaN although the input is finite: each row of the weight was divided "
        "by its own largest magnitude (a scale for FP8) or norm, which is zero. 0/0 is NaN."
    )
    BOUND = "Bound the divisor from below."
    BOUND_IN_FP32 = (
        "Bound the divisor from below, in FP32: FP16 rounds an epsilon below 3e-8 to zero, and the gradient of a division by a "
        "slightly larger one overflows."
    )
    CLAMP = (
        "x = x.float()\n"
        "# or x.abs().amax(-1, keepdim=True)\n"
        "norm = x.norm(dim=-1, keepdim=True)\n"
        "x = x / norm.clamp_min(1e-6)"
    )
    CLAMP_SCALE = (
        "largest = weight.float().abs()\n"
        "largest = largest.amax(-1, keepdim=True)\n"
        "end = torch.finfo(torch.float8_e4m3fn).max\n"
        "scale = largest.clamp_min(1e-12) / end"
    )


def _zero_row_normalized(case: Case) -> Iterator[Found]:
    """A row of zeros divided by its own maximum or norm.

    False alarms: A module without trained parameters has no graph: rows of zeros that become NaN there are taken for a
    division, and the finding is inferred. It is inferred, too, for a linear layer or convolution with a weight of zeros whose
    output is the first NaN.
    """
    for measured in case.recorded(ExaminedZeroRow):
        words, is_inferred = {"places": bracketed(_rows(measured))}, bool(measured.name)
        is_weight = measured.text.endswith("weight")
        says, code = _ZeroRow.WEIGHT.when(is_weight) or _ZeroRow.DIVIDED, _ZeroRow.CLAMP_SCALE.when(is_weight)
        fix = _ZeroRow.BOUND_IN_FP32.when(run_format(case.session) == FLOAT16) or _ZeroRow.BOUND
        yield _examined(case, measured, [says], fix, code or _ZeroRow.CLAMP, words, is_inferred=is_inferred)
        return


# -- arguments out of range ---------------------------------------------------------------------------------------------


class _Argument(Sentences):
    COMPUTES = "In step {step} {place} computes {operator}{places}."
    NEAREST = (
        "FP16 may have made it: in step {nearest.step}, which was computed twice, {near_operator} ({near_line}) came nearest to "
        "FP16's end, with numbers up to {nearest.largest:.3g} of 65504."
    )
    OF_ROUNDED_TERMS = "Its argument is a difference of terms rounded to 16 bits."
    NO_HARM = "The loss is not finite, but its gradients are: the step did no harm."
    GRADIENT_BROKEN = "The loss is finite, but its gradient is not."
    ALL_BROKEN = "The values computed from it are not finite."
    FURTHER = "The same operation is out of range in {further}, too."

    ROUNDED = (
        "In step {rounded.step}, which was computed twice, {rounded.elements:.0f} of its {rounded.of:.0f} arguments were mostly "
        "rounding error{difference}: one was {rounded.given:.3g} in 16 bits and {rounded.exact:.3g} in FP32."
    )

    AT_AN_EDGE = (
        "Add a small constant to the argument, or clamp it, before the operation. A torch.where after it does not help: the "
        "gradient of the discarded value is computed too."
    )
    WHERE_FIRST = (
        "Replace the numbers that are out of range by a torch.where before the operation. One after it does not help: the "
        "gradient of the discarded value is computed too."
    )
    IN_FP32 = "Do it in FP32: in 16 bits the constant may be rounded away."
    IN_FP64 = (
        "If it cannot be negative in exact arithmetic, as a variance, its sign is rounding error: compute it in float64, or in a "
        "form without differences."
    )
    ROUNDED_DIFFERENCE = (
        "Compute the terms of this difference in FP32, from inputs in FP32: rounding to 16 bits makes an error of up to 0.4% of "
        "the largest term, which may exceed the difference."
    )
    EQUAL_TERMS = "Clamp it as well: a difference of equal terms is zero in FP32, too."
    COUNT_TARGETS = "Divide by the number of targets that count, at least 1, or leave such a batch out."
    NOTHING = "Divide the sum by the number of its elements, at least 1, or leave such a batch out."
    ONE_SAMPLE = (
        "Leave a batch out that has too few samples, such as the last one of an epoch, or take the deviation without a "
        "correction. No precision helps."
    )
    CTC = (
        "Leave out the samples whose target, with a blank between equal labels, is longer than its input, or lengthen the "
        "input. zero_infinity=True gives them no loss and no gradient."
    )
    MASK_LAST = (
        "Apply the mask after this operation, or mask by a large finite number: the gradient of a masked score is zero, and "
        "zero times infinity is NaN."
    )
    CONSTANT = (
        "Look at the code that makes the constant: a logarithm or negative power of zero, the mean of an empty tensor, the "
        "deviation of one sample, a division of targets."
    )
    NEAREST_IN_FP32 = "Compute {near_operator} ({near_line}) in FP32, and the operators that take its result."
    CLASS_WEIGHTS = (
        "Look at how the weights are made: dividing by the count of a class that never occurs gives infinity."
    )
    PACK_WIDER = (
        "Pack saved tensors in BF16, which has FP32's range, or scale them: the forward is right, but its backward computes with "
        "the packed values."
    )
    BEYOND = "Use FP32 for this operation, and for the operators that take its result."
    EXP = (
        "Subtract the largest first (torch.softmax and torch.logsumexp do), bound the argument, or compute it in FP32."
    )
    LOGARITHMS = (
        "Compute with logarithms: log(x ** k) is k * log(x), and that of a quotient of powers a difference of these."
    )
    WITHOUT_AUTOCAST = "with torch.autocast({device_type}, enabled=False):\n    {indented}"


class _ArgumentCode(Sentences):
    COUNT_TARGETS = (
        "total = F.cross_entropy(\n"
        '    logits, labels, reduction="sum"\n'
        ")\n"
        "count = labels.ne(-100).sum()\n"
        "loss = total / count.clamp_min(1)"
    )
    NOTHING = "count = max(x.numel(), 1)\nmean = x.sum() / count"
    ONE_SAMPLE = (
        "loader = torch.utils.data.DataLoader(\n"
        "    dataset, batch_size, drop_last=True\n"
        ")\n"
        "# or\n"
        "x.std(dim=0, correction=0)"
    )
    CTC = "loss_fn = torch.nn.CTCLoss(\n    zero_infinity=True\n)"
    MASK_LAST = (
        "# divided first, then masked\n"
        "scores = scores / temperature\n"
        'scores = scores.masked_fill(\n    mask, float("-inf")\n)'
    )
    WHERE_FIRST = "is_inside = x > 0\nsafe = torch.where(is_inside, x, 1.0)\ny = torch.where(is_inside, f(safe), 0.0)"
    CONSTANT = "assert torch.isfinite(constant).all()"
    CLASS_WEIGHTS = "# or leave its classes out\nweight[~weight.isfinite()] = 0.0"
    ROUNDED_DIFFERENCE = (
        "with torch.autocast({device_type}, enabled=False):\n"
        "    a, b = f(x.float()), g(x.float())\n"
        "    difference = (a - b).clamp_min(1e-6)\n"
        "    # distances: torch.cdist(a, b)"
    )
    BEYOND = (
        "with torch.autocast({device_type}, enabled=False):\n"
        "    # from inputs in FP32\n"
        "    y = f(x.float())\n"
        "    # the operators that take y"
    )
    PACK_WIDER = "# in the pack hook of\n# torch.autograd.graph.saved_tensors_hooks\npacked = tensor.to(torch.bfloat16)"
    LOG = "# a clamped element gets no gradient\ny = x{cast}.clamp_min(1e-6).log()"
    SQRT = "y = (x{cast} + 1e-12).sqrt()"
    RSQRT = "y = (x{cast} + 1e-12).rsqrt()"
    DIVISION = "y = a{cast} / b{cast}.clamp_min(1e-6)"
    RECIPROCAL = "y = 1 / x{cast}.clamp_min(1e-6)"
    POWER = "y = x{cast}.clamp_min(1e-6) ** p"
    EXP = "# FP16 ends at exp(11.09),\n# BF16 and FP32 at exp(88.7)\ny = x{cast}.clamp_max(80).exp()"
    LOGARITHMS = "# in place of log(x ** k)\nlog_y = k * x{cast}.log()"
    ACOS = "end = 1 - 1e-6\ny = x{cast}.clamp(-end, end).acos()"
    ASIN = "end = 1 - 1e-6\ny = x{cast}.clamp(-end, end).asin()"
    ATANH = "end = 1 - 1e-6\ny = x{cast}.clamp(-end, end).atanh()"


#: The remedy for each word that the operation's description may contain; the first one that it contains counts.
_REMEDIES = {
    BEYOND_FLOAT16: (_Argument.BEYOND, _ArgumentCode.BEYOND),
    "hooks packed": (_Argument.PACK_WIDER, _ArgumentCode.PACK_WIDER),
    "rounded to 16 bits": (_Argument.ROUNDED_DIFFERENCE, _ArgumentCode.ROUNDED_DIFFERENCE),
    f"mean {TOO_FEW}": (_Argument.NOTHING, _ArgumentCode.NOTHING),
    TOO_FEW: (_Argument.ONE_SAMPLE, _ArgumentCode.ONE_SAMPLE),
    "ignored": (_Argument.COUNT_TARGETS, _ArgumentCode.COUNT_TARGETS),
    "CTC": (_Argument.CTC, _ArgumentCode.CTC),
    "of an infinity": (_Argument.MASK_LAST, _ArgumentCode.MASK_LAST),
    CONSTANT: (_Argument.CONSTANT, _ArgumentCode.CONSTANT),
    "with a weight": (_Argument.CLASS_WEIGHTS, _ArgumentCode.CLASS_WEIGHTS),
    "of a softmax": (LogSoftmax.FIX, LogSoftmax.CODE),
    "logarithm": (_Argument.AT_AN_EDGE, _ArgumentCode.LOG),
    "square root": (_Argument.AT_AN_EDGE, _ArgumentCode.SQRT),
    "sqrt": (_Argument.AT_AN_EDGE, _ArgumentCode.RSQRT),
    "division": (_Argument.AT_AN_EDGE, _ArgumentCode.DIVISION),
    "1 / x": (_Argument.AT_AN_EDGE, _ArgumentCode.RECIPROCAL),
    "a power of numbers too large": (_Argument.LOGARITHMS, _ArgumentCode.LOGARITHMS),
    "power": (_Argument.AT_AN_EDGE, _ArgumentCode.POWER),
    "exp": (_Argument.EXP, _ArgumentCode.EXP),
    "acos": (_Argument.AT_AN_EDGE, _ArgumentCode.ACOS),
    "asin": (_Argument.AT_AN_EDGE, _ArgumentCode.ASIN),
    "atanh": (_Argument.AT_AN_EDGE, _ArgumentCode.ATANH),
}


def _argument_out_of_range(case: Case) -> Iterator[Found]:
    """An operation whose argument is at the edge of its domain, or beyond it.

    False alarms: The operation that ran first counts. If a later torch.where discards its result it may be harmless in the
    forward; its gradient is not.
    """
    for measured in case.recorded(ExaminedArgument):
        if is_of_unknown_origin(measured) and _is_origin_known(case):
            return
        event = _event_at(case, measured.step)
        rounded = of_operation(case.recorded(RoundedArgument), measured)
        difference = rounded.names[3] if rounded else ""
        fix, code = _remedy(measured, difference)
        also = _Argument.EQUAL_TERMS.when(fix is _Argument.ROUNDED_DIFFERENCE and "of zero" in measured.text)
        at_an_edge = fix is _Argument.AT_AN_EDGE
        is_narrow = _is_narrow(measured, case) and (at_an_edge or fix is _Argument.EXP)
        bits, cast = _in_more_bits(measured, is_narrow) if at_an_edge else None, ".float()" * is_narrow
        nearest = _nearest_end(case, measured) if CONSTANT in measured.text else None
        code = _ArgumentCode.BEYOND if nearest else code
        lines, further = _lines(case, measured)
        line = "".join(lines) * (len(lines) == 1)
        words = {
            "operator": measured.text.replace(ROUNDED_DIFFERENCE, ""),
            "place": _place(_module(case, measured), event),
            "places": bracketed(" or ".join(lines), _elements(measured), _rows(measured)),
            "cast": cast,
            "indented": is_narrow and text(code, {"cast": cast}).replace("\n", "\n    "),
            "nearest": nearest,
            "near_operator": nearest and operator_named(nearest.names[0]),
            "near_line": nearest and nearest.names[1],
            "rounded": rounded,
            "difference": filled(", after the sum or difference in {}", difference),
            "further": " and ".join(further),
        }
        yield _examined(
            case,
            measured,
            [
                _Argument.COMPUTES,
                _Argument.NEAREST.when(nearest),
                _Argument.OF_ROUNDED_TERMS.when(
                    ROUNDED_DIFFERENCE in measured.text and fix is not _Argument.WHERE_FIRST
                ),
                _effect(measured, event),
                _Argument.ROUNDED.when(rounded),
                _Argument.FURTHER.when(further),
            ],
            (_Argument.NEAREST_IN_FP32.when(nearest), fix, also, bits),
            _Argument.WITHOUT_AUTOCAST.when(code and is_narrow) or code,
            words,
            {"operator": measured.text, "line": line},
            is_mild=event is None,
            operator="log" * (fix is LogSoftmax.FIX),
            before=[nearest.names[1]] if nearest else [difference, *lines, *further],
        )
        return


def _remedy(measured: ExaminedArgument, difference: str) -> tuple[Sentences, Sentences | None]:
    """Return the change and its code; ``difference``: the place of the rounded sum or difference before it, "" without one."""
    if measured.loss_finite and "negative number" in measured.text:
        # Code that leaves its NaN out of the loss expects such numbers, whatever made them.
        return _Argument.WHERE_FIRST, _ArgumentCode.WHERE_FIRST
    fix, code = next((both for word, both in _REMEDIES.items() if word in measured.text), (_Argument.AT_AN_EDGE, None))
    return _REMEDIES["rounded to 16 bits"] if difference and fix is _Argument.AT_AN_EDGE else (fix, code)


def _nearest_end(case: Case, measured: Examined) -> NearestEnd | None:
    """Return the operator that came nearest to FP16's end, in steps before one that broke, if it came near."""
    earlier = (each for each in case.recorded(NearestEnd) if each.step < measured.step and each.largest >= _NEAR)
    return max(earlier, key=lambda each: each.largest, default=None)


def is_of_unknown_origin(measured: Examined) -> bool:
    """Return whether a step computed twice knows more of what broke an examined operation."""
    return CONSTANT in measured.text or BEYOND_FLOAT16 in measured.text


def _is_origin_known(case: Case) -> bool:
    """Return whether a step computed twice shows the operator that made a forward's first infinity or NaN."""
    broken = (*case.recorded(BornInfinite), *case.recorded(BrokenAlike))
    return any(record.names[2] == "forward" and not are_weights_broken(record, case) for record in broken)


def are_weights_broken(found: Record, case: Case) -> bool:
    """Return whether the weights held infinities or NaNs before a record's step: an update is the cause of those after it."""
    return any(broken.step <= found.step for broken in case.recorded(BrokenWeights))


#: From here on a number is near FP16's end: its square overflows.
_NEAR = 256.0
#: A sentence lists at most this many lines, one of them with the operation.
_FEW_LINES = 3
#: Words of an operation's description, by the name of the operator that a second computation records.
_DESCRIBED = {
    "div": "division",
    "exp": "exp",
    **dict.fromkeys(("log", "log1p", "log2", "log10"), "logarithm"),
    **dict.fromkeys(("mm", "bmm", "addmm"), "matrix product"),
    **dict.fromkeys(("index_add", "scatter_add"), "an indexed sum"),
    "mul": "a product",
    "mean": "a mean",
    "std": "a standard deviation",
    "sum": "a sum",
    "var": "a variance",
    "pow": "power",
    "reciprocal": "1 / x",
    "rsqrt": "1 / sqrt",
    "sqrt": "square root",
}


def _lines(case: Case, measured: Examined) -> tuple[list[str], list[str]]:
    """Return the line of the operation in the user's code, or the few that it may be; and, if a step in which it is singular was
    computed twice, further lines on which it is singular there.
    """
    kinds: tuple[type[Record], ...] = (BornInfinite, BrokenAlike, RoundedArgument)
    found = of_operation((record for kind in kinds for record in case.recorded(kind)), measured)
    if found is None:
        return _called_lines(case, measured), []
    return [found.names[1]], further_lines(case, found)


def _called_lines(case: Case, measured: Examined) -> list[str]:
    """Return the line of the operation's call in another step, which was computed twice, or the few that it may be."""
    for called in case.recorded(CalledLines):
        words, lines = _DESCRIBED.get(called.text), called.names
        if words is None or words not in measured.text:
            continue
        if measured.calls and len(lines) == measured.calls:
            return [lines[int(measured.call or 0)]]
        if len(set(lines)) <= _FEW_LINES:
            return list(dict.fromkeys(lines))
    return []


def further_lines(case: Case, found: Record) -> list[str]:
    """Return the other lines on which the operator of a record breaks in the same step, which was computed twice."""
    same = (found.step, found.names[0], found.names[2])
    alike = (each for each in case.recorded(type(found)) if (each.step, each.names[0], each.names[2]) == same)
    lines = dict.fromkeys(each.names[1] for each in alike)
    return [line for line in lines if line and line != found.names[1]]


def of_operation(records: Iterable[AnyRecord], measured: Examined) -> AnyRecord | None:
    """Return the first record of a step computed twice that belongs to the same operation of a forward."""
    for record in records:
        operator, _, phase = record.names[:3]
        words = _DESCRIBED.get(operator.rstrip("_"))
        if phase == "forward" and words and words in measured.text:
            return record
    return None


def _in_more_bits(measured: Examined, is_narrow: bool) -> _Argument | None:
    """Return the sentence on the precision of an argument at an edge; None if it has no part in that."""
    return _Argument.IN_FP32.when(is_narrow) or _Argument.IN_FP64.when("negative" in measured.text)


def _effect(measured: Examined, event: Event | None) -> _Argument:
    if event is None:
        return _Argument.NO_HARM
    return _Argument.GRADIENT_BROKEN.when(measured.loss_finite) or _Argument.ALL_BROKEN


def _place(module: str, event: Event | None) -> str:
    """Return in words the code that computed."""
    if module:
        return f"the code in or before {module!r}, or next to it on the same input,"
    if event is None or event.after or event.what in LOSSES:
        return "the loss, or the code that leads to it,"
    if event.of_input:
        return "the model's own code"
    return "the model's own code, or the loss,"


def _is_narrow(measured: Examined, case: Case) -> bool:
    """Return whether the operation was computed in 16 bits, as the run is if its own dtype is not known."""
    return measured.bits == 16 or (not measured.bits and run_format(case.session) in (FLOAT16, BFLOAT16))


# -- weights ------------------------------------------------------------------------------------------------------------


class _Weights(Sentences):
    GREW = (
        "The weights exploded{at_rate}: after step {step} the norm of {grown:some 3} had grown to {ratio:.3g} times its value at "
        "the start."
    )
    BROKE_THE_FORWARD = "In step {before} the forward was no longer finite."
    BROKE_THE_BACKWARD = "In step {before} the backward was no longer finite."
    RAISED_THE_LOSS = "The loss had grown to {loss_ratio:.3g} times the first one."
    MOVED_FAR = (
        "In each step its elements moved by {moved:,.0f} times the learning rate; {optimizer} should move them by about once "
        "that. It divides by an average of squared gradients that is too small: 8 bits and FP16 round small ones to zero."
    )
    WIDE_SQUARES = (
        "Keep the optimizer's average of squared gradients in FP32, or in 8 bits its square root, rounded up: it must not be "
        "zero where the gradient is not. If the weights still explode, lower the learning rate."
    )
    ROOT = (
        "# v in FP32; or its root in 8 bits\n"
        "root = v.sqrt()\n"
        "codes = (root / scale).ceil()\n"
        "codes = codes.to(torch.uint8)\n"
        "# in the next step\n"
        "v = (codes * scale).square()"
    )
    LOWER_RATE = (
        "Lower the {rate} to a tenth, and again if need be. A warm-up or clipped gradients may help as well, a different "
        "precision or loss scale does not."
    )
    NEW_OPTIMIZER = (
        "# in place of {at_optimizer}\noptimizer = torch.optim.{optimizer}(\n    model.parameters(), lr={lower:g}\n)"
    )
    NEW_RATE_OF_GROUP = '# after {at_optimizer}\noptimizer.param_groups[{group:.0f}]["lr"] = {lower:g}'
    CLIP = "# before {at_step}\ntorch.nn.utils.clip_grad_norm_(\n    model.parameters(), 1.0\n)"


#: Adam's largest update is 3.2 times the learning rate at its default betas.
_LARGEST_UPDATE = 10.0
#: Records of operations that make infinities and NaNs whatever the weights are.
_SINGULAR = (ExaminedArgument, ExaminedMask, ExaminedZeroRow)


def _weights_exploded(case: Case) -> Iterator[Found]:
    """Weights that had exploded before the first infinity.

    False alarms: A norm that grows to 16 times its first value is not a fault if the weights begin near zero (LoRA's B, a
    zero-initialised head): it is reported only if something also became infinite, the training diverged, or an optimizer like
    Adam, without states in FP32, moved the weights by ten learning rates a step. If a scaler skipped all such steps, most weights
    must have grown.
    """
    grown = list(case.recorded(WeightGrowth))
    broken = [event for event in case.events if not event.gradients_finite and not event.skipped]
    if not broken and _most_grew(grown, case):
        # A scaler skips a forward that is not finite, too, although no loss scale makes it so.
        broken = [event for event in case.events if event.phase == "forward"]
    # In a saturating model all values stay finite, and the loss grows.
    loss_ratio = max((each.loss_ratio for each in grown), default=0.0)
    first = min(grown, key=lambda each: each.step, default=None)
    # One weight may be recorded twice, the second time with the growth of the loss.
    at_once = list({each.name: each for each in grown if first is not None and each.step == first.step}.values())
    moved = max((_moved(each) for each in at_once), default=0.0)
    of_adam = [optimizer for optimizer in case.precision.optimizers if "beta2" in optimizer.settings]
    is_far = moved >= _LARGEST_UPDATE and bool(of_adam)
    # With states in FP32, a weight that moves far was written by the script, or is another optimizer's.
    is_alone = is_far and not any("float32" in optimizer.states.values() for optimizer in of_adam)
    if first is None or not (broken or case.advised.diverged or loss_ratio or is_alone):
        return
    # A scaler may have skipped forwards before in which an operation was out of range.
    skipped = [event for event in case.events if broken and event.skipped and _has_singularity(case, event.step)]
    in_trouble = [event for event in skipped if event.phase == "forward"] + broken
    before = min((event.step for event in in_trouble), default=case.progress.steps)
    ratio = max(each.ratio for each in at_once)
    if first.step > before or (_has_singularity(case, before) and ratio < 2.0 ** (first.step + 1)):
        # If an argument was at the edge of its domain, weights count as exploded only if they doubled in each step.
        return
    rate, initial = first.lr, first.initial_lr
    is_scheduled = initial is not None and initial != rate
    yield Found(
        (_Weights.GREW, _consequence(in_trouble, before, loss_ratio), _Weights.MOVED_FAR.when(is_far)),
        {"ratios": {each.name: each.ratio for each in grown}, "lr": rate},
        {
            "at_rate": _at_rate(rate, initial, first.group),
            "grown": [each.name for each in at_once],
            "rate": ("learning rate", "largest learning rate of the scheduler")[is_scheduled],
            "ratio": ratio,
            "before": before,
            "loss_ratio": loss_ratio,
            "optimizer": next((optimizer.type for optimizer in case.precision.optimizers), ""),
            "lower": (rate or 0.0) / 10,
            "group": first.group,
            "moved": moved,
        },
        _Weights.WIDE_SQUARES.when(is_far) or _Weights.LOWER_RATE,
        _Weights.ROOT.when(is_far) or _new_rate(first, is_scheduled),
        layer=first.name.rpartition(".")[0] or first.name,
        is_inferred=True,
        step=first.step,
    )


def _most_grew(grown: Sequence[WeightGrowth], case: Case) -> bool:
    """Return whether most weights of two or more dimensions grew, as no head does that begins near zero."""
    trained = {
        key.name
        for key, info in case.infos.items()
        if key.kind == WEIGHT_GRADIENT and len(info.shape) > 1 and not info.note
    }
    return 2 * len(trained & {each.name for each in grown}) > len(trained)


def moved_far(grown: WeightGrowth) -> bool:
    """Return whether a weight moved by ten learning rates or more in each of its steps."""
    return _moved(grown) >= _LARGEST_UPDATE


def _moved(grown: WeightGrowth) -> float:
    """Return the least root mean square of a weight's change in each of its steps, in learning rates; 0 if it is not known."""
    rate = max(grown.lr or 0.0, grown.initial_lr or 0.0)
    if not rate or not grown.elements or grown.began is None:
        return 0.0
    return (grown.ratio - 1) * grown.began / math.sqrt(grown.elements) / (grown.step + 1) / rate


def _has_singularity(case: Case, step: int) -> bool:
    return any(isinstance(each, _SINGULAR) and each.step == step for each in case.recorded(Examined))


def _consequence(broken: list[Event], before: int, loss_ratio: float) -> _Weights | None:
    if not broken:
        return _Weights.RAISED_THE_LOSS.when(loss_ratio)
    in_forward = any(event.step == before and event.phase != "backward" for event in broken)
    return _Weights.BROKE_THE_FORWARD.when(in_forward) or _Weights.BROKE_THE_BACKWARD


def _new_rate(grown: WeightGrowth, is_scheduled: bool) -> _Weights:
    """Return the code that lowers the learning rate, or that clips if the rate is not known or a schedule sets it."""
    if not grown.lr or is_scheduled:
        return _Weights.CLIP
    return _Weights.NEW_OPTIMIZER.when(grown.group is None) or _Weights.NEW_RATE_OF_GROUP


def _at_rate(rate: float | None, initial: float | None, group: float | None) -> str:
    """Return the learning rate in words, to follow "The weights exploded"; "" if it is not known."""
    if not rate:
        return ""
    words = f" at a learning rate of {rate:g}"
    if group is not None:
        words += f" (of group {group:.0f} of the optimizer, which has several)"
    if initial is not None and initial != rate:
        words += f", which a scheduler had changed from {initial:g}"
    return words


FAULTS = (
    Fault(
        "batch-not-finite", "error", _batch_not_finite, (_Batch, _LeftOut, _Aftermath), (*_EVENT, "breaks-in-fp32-too")
    ),
    Fault(
        "batch-beyond-float16",
        "error",
        _batch_beyond_float16,
        (_Outliers, _LeftOut, _Aftermath),
        (*_EVENT, "overflow-in-operator"),
        explains_from="warning",
        heading="Input beyond FP16's maximum",
    ),
    Fault("mask-hides-whole-row", "error", _mask_hides_whole_row, (_Mask, _Aftermath), _EVENT),
    Fault("zero-row-normalized", "error", _zero_row_normalized, (_ZeroRow, _Aftermath), _EVENT),
    Fault("weights-exploded", "error", _weights_exploded, (_Weights,), (*_EVENT, "overflow-in-operator")),
    Fault(
        "argument-out-of-range",
        "error",
        _argument_out_of_range,
        (_Argument, _ArgumentCode, LogSoftmax, _Aftermath),
        (*_EVENT, "overflow-recurs"),
    ),
)
