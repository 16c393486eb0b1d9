"""Faults that a second computation of a step shows: operators whose exact result differs from the one in 16 bits."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mpinspect.numeric.formats import FORMATS
from mpinspect.ranges.faults.name.case import Case
from mpinspect.ranges.faults.name.fault import Fault, Found
from mpinspect.ranges.records import (
    AbsorbedOperand,
    BornInfinite,
    BrokenAlike,
    CancelledDifference,
    ExaminedArgument,
    LostSum,
    OverflowedNorm,
    Record,
    WholeLoss,
)
from mpinspect.ranges.session import module_named
from mpinspect.reporting.sentences import Sentences

#: An error of the gradients from which on rounding matters: BF16 alone makes some 1%.
_MATTERS = 0.1
#: The part of a sum that is not lost by rounding alone, whatever the gradients are.
_MOST_OF_IT = 0.25
#: The share of a sum's elements that do not change, from which on an addition does nothing.
_MOSTLY = 0.5


#: Operators whose names say little.
_IN_WORDS = {
    "_to_copy": "a cast",
    "copy_": "a copy",
    "mm": "a matrix product",
    "addmm": "a linear layer",
    "bmm": "a batched matrix product",
    "_softmax": "softmax",
}


def _place(record: Record) -> dict[str, object]:
    """Return in words the operator of a record, its place and its dtype."""
    operator, line, phase = record.names[:3]
    operator = _IN_WORDS.get(operator, operator.strip("_"))
    module = module_named(record.name) if record.name else "code outside of modules"
    whose = f"the backward of {module}" if phase == "backward" else module
    return {
        "operator": operator,
        "place": f"{whose} ({line})" if line and phase != "backward" else whose,
        "line": line,
        "dtype": record.text,
        "end": FORMATS[record.text].max_finite,
    }


def _evidence(record: Record) -> dict[str, object]:
    operator, line, phase = record.names[:3]
    return {"operator": operator, "line": line, "phase": phase, "dtype": record.text, **record.figures}


class _Gradients(Sentences):
    OFF = "With all rounding of the step together, the gradient of {weight!r} is off by {gradients_error:percent}."


def _gradients(record: LostSum | AbsorbedOperand | CancelledDifference) -> tuple[_Gradients | None, dict[str, object]]:
    """Return the sentence on the gradients' error, if it matters, and the weight."""
    matters = record.gradients_error is not None and record.gradients_error >= _MATTERS
    return (_Gradients.OFF if matters else None), {"weight": record.names[3] if len(record.names) > 3 else ""}


# -- infinities ---------------------------------------------------------------------------------------------------------


class _Born(Sentences):
    BEYOND = (
        "In step {measured}, in {place}, {operator} in {dtype:format} gives {elements:.0f} infinities or NaNs. The exact result "
        "is finite, up to {largest:.3g}; {dtype:format} ends at {end:g}."
    )
    FROM_ROUNDED_INPUTS = (
        "In step {measured}, in {place}, {operator} in {dtype:format} gives {elements:.0f} infinities or NaNs. The same step "
        "computed in FP32 gives none there: an earlier operator had rounded away what keeps it finite."
    )
    FIRST = "The first step of that kind was step {step}; a later one was computed a second time, in FP32."
    SUM_IN_FP32 = "Cast the terms to FP32 before they are added up or multiplied, and keep the result in FP32."
    BOUND_EXP = "Bound the exponent, or compute the exponential and what it is multiplied with in FP32."
    OPERATOR_IN_FP32 = "Compute this operator, and the operators before it that make its inputs, in FP32."
    CAST = "with torch.autocast(device_type, enabled=False):\n    y = f(x.float())"


_SUMS = ("sum", "mean", "index_add", "index_put", "scatter_add", "cumsum", "mul", "linalg_vector_norm", "norm", "pow")


def _overflow_in_operator(case: Case) -> Iterator[Found]:
    """An operator of the forward whose result in 16 bits is infinite or NaN, where the exact one is finite.

    It is looked for under ``mpinspect run``, in one early step and in a step after the first infinity or NaN.

    False alarms: It is measured. A mask of -inf that the exact computation does not have is reported too.
    """
    known = (ExaminedArgument, OverflowedNorm, WholeLoss)
    if any(isinstance(each, known) for each in case.recorded(Record)):
        # Another fault names this operation already.
        return
    for born in case.recorded(BornInfinite):
        if born.names[2] == "backward":
            # There a loss scale may be too high.
            continue
        operator = born.names[0]
        fix = _Born.SUM_IN_FP32 if operator.rstrip("_") in _SUMS else _Born.OPERATOR_IN_FP32
        broke = any(event.forward_finite is False for event in case.events)
        first = _begins(born, case)
        yield Found(
            (
                _Born.BEYOND if born.largest else _Born.FROM_ROUNDED_INPUTS,
                _Born.FIRST if first < born.step else None,
            ),
            _evidence(born),
            {**_place(born), "measured": born.step},
            _Born.BOUND_EXP if operator.startswith("exp") else fix,
            _Born.CAST,
            layer=born.name,
            severity="error" if broke else "warning",
            step=first,
        )
        return


def _begins(record: Record, case: Case) -> int:
    """Return the step of the first event of the forward, if the record was made because of it."""
    steps = [event.step for event in case.events if event.forward_finite is False]
    return min([record.step, *steps])


class _Alike(Sentences):
    IN_FP32_TOO = (
        "In step {step}, in {place}, {operator} gives {elements:.0f} infinities or NaNs, and the same computation in FP32 does "
        "as well: more bits do not help. Its inputs or its weights are the cause."
    )


def _breaks_in_fp32_too(case: Case) -> Iterator[Found]:
    """An operator whose result is infinite or NaN in the exact computation as well.

    False alarms: It is information, and measured.
    """
    for alike in case.recorded(BrokenAlike):
        if any(event.forward_finite is False and event.step <= alike.step for event in case.events):
            yield Found(_Alike.IN_FP32_TOO, _evidence(alike), _place(alike), layer=alike.name, step=alike.step)
            return


# -- losses -------------------------------------------------------------------------------------------------------------


class _Sum(Sentences):
    LOSES = (
        "In step {step}, in {place}, {operator} adds up in {dtype:format} and loses {error:percent} of its result: one element "
        "is {value:.4g} where the exact sum is {exact:.4g}."
    )
    IN_FP32 = "Add up in FP32: cast the terms before the sum, and its result afterwards."
    CAST = "total = torch.zeros(..., dtype=torch.float32).index_add(0, index, terms.float())  # or terms.float().sum()"


def _sum_loses_terms(case: Case) -> Iterator[Found]:
    """A sum in 16 bits whose terms are rounded away.

    It is looked for under ``mpinspect run``, in one early step.

    False alarms: It is measured, from an error of 3% on. It is information below 25% if no weight's gradient is off by 10%.
    """
    for lost in case.recorded(LostSum):
        also, words = _gradients(lost)
        is_fault = also is not None or lost.error >= _MOST_OF_IT
        yield Found(
            (_Sum.LOSES, also),
            _evidence(lost),
            {**_place(lost), **words},
            _Sum.IN_FP32 if is_fault else (),
            _Sum.CAST if is_fault else (),
            layer=lost.name,
            severity="warning" if is_fault else "info",
            step=lost.step,
        )


class _Absorbed(Sentences):
    NOTHING_CHANGES = (
        "In step {step}, in {place}, an addition in {dtype:format} leaves {unchanged:percent} of the elements as they were: the "
        "smaller operand is below half a unit in the last place of the larger one, and {error:percent} of it is lost."
    )
    STREAM_IN_FP32 = "Keep the larger operand, such as a residual stream or a running sum, in FP32, and add in FP32."
    CAST = "x = x.float()  # once, before the blocks\nx = x + block(x.to(torch.bfloat16)).float()"


def _addition_changes_nothing(case: Case) -> Iterator[Found]:
    """An addition in 16 bits whose smaller operand the larger one absorbs.

    It is looked for under ``mpinspect run``, in one early step.

    False alarms: A branch that begins near zero on purpose (LayerScale, a zero-initialised adapter) is reported if it is not
    exactly zero.
    """
    for absorbed in case.recorded(AbsorbedOperand):
        is_fault = absorbed.unchanged >= _MOSTLY
        also, words = _gradients(absorbed)
        yield Found(
            (_Absorbed.NOTHING_CHANGES, also),
            _evidence(absorbed),
            {**_place(absorbed), **words},
            _Absorbed.STREAM_IN_FP32 if is_fault else (),
            _Absorbed.CAST if is_fault else (),
            layer=absorbed.name,
            severity="warning" if is_fault else "info",
            step=absorbed.step,
        )


class _Cancelled(Sentences):
    ERRORS_LEFT = (
        "In step {step}, in {place}, {operator} leaves mostly rounding error: its operands were off by {before:percent}, its "
        "result is off by {off}."
    )
    OPERANDS_IN_FP32 = "Compute the operands of this difference in FP32, from inputs in FP32."


def _difference_cancels(case: Case) -> Iterator[Found]:
    """A sum or difference of rounded operands that nearly cancel, so that their rounding errors are most of the result.

    It is looked for under ``mpinspect run``, in one early step.

    False alarms: It is measured. It is information if no weight's gradient is off by 10%.
    """
    for cancelled in case.recorded(CancelledDifference):
        also, words = _gradients(cancelled)
        off = (
            f"{cancelled.after:.0%}"
            if cancelled.after < 10 and math.isfinite(cancelled.after)
            else "far more than itself"
        )
        yield Found(
            (_Cancelled.ERRORS_LEFT, also),
            _evidence(cancelled),
            {**_place(cancelled), **words, "off": off},
            _Cancelled.OPERANDS_IN_FP32 if also else (),
            layer=cancelled.name,
            severity="warning" if also else "info",
            step=cancelled.step,
        )


FAULTS = (
    Fault("overflow-in-operator", "warning", _overflow_in_operator, (_Born,), ("non-finite-event",)),
    Fault("sum-loses-terms", "warning", _sum_loses_terms, (_Sum, _Gradients)),
    Fault("addition-changes-nothing", "warning", _addition_changes_nothing, (_Absorbed, _Gradients)),
    Fault("difference-cancels", "warning", _difference_cancels, (_Cancelled, _Gradients)),
)
BREAKS_ALIKE = Fault("breaks-in-fp32-too", "info", _breaks_in_fp32_too, (_Alike,))
