"""The fault of tensors that a script computes before its first step, with too few bits."""

from __future__ import annotations

from collections.abc import Iterator

from mpinspect.numeric.formats import FLOAT32, FORMATS
from mpinspect.ranges.faults.name.case import Case
from mpinspect.ranges.faults.name.fault import Fault, Found
from mpinspect.ranges.faults.name.operators import AT_ZERO, MATTERS, expression, found_at, operator_named, percent_up_to
from mpinspect.ranges.records import ROUNDED_DIFFERENCE, BrokenAlike, ChangedChoices, ExaminedArgument, PreparedError
from mpinspect.reporting.sentences import Sentences


class _Prepared(Sentences):
    OFF = (
        "Before the first step, in {place}, {operator} rounds to {dtype:format}. A tensor of {of:count element} made from "
        "its result is off by {error:percent} when the training begins: one element is {value:.4g} where FP32 gives {exact:.4g}."
    )
    BREAKS = (
        "Before the first step, in {place}, {operator} overflows in {dtype:format}, whose largest finite number is {end:.0f}. "
        "In a tensor of {of:count element} made from its result, {broken:.0f} are infinite or NaN that are finite in FP32."
    )
    ROUNDED = (
        "Before the first step, in {place}, a cast to {dtype:format} changes {changed:.0f} of {of:count whole number} in a "
        "tensor that is left when the training begins: {exact:.0f} became {value:.0f}."
    )
    FLUSHED = (
        "Before the first step, in {place}, {operator} rounds to {dtype:format}. A tensor of {of:count element} made from its "
        "result has {flushed:count zero} that FP32 does not have: one is {exact:.2g} there."
    )
    ONES = (
        "Before the first step, in {place}, a cast to {dtype:format} makes {ones:count number} of {of} equal to 1, such as "
        "{exact:.9g}: 1 minus such a number is zero. That may be the zero in {operation}, in step {broken_step}."
    )
    EQUAL = (
        "Before the first step, in {place}, {operator} rounds to {dtype:format}. In a schedule of {of:count number} made from "
        "its result, {equal:.0f} equal the one before; in FP32 all differ. A search for one of them finds the first."
    )
    SUM_STOPS = (
        "Before the first step, in {place}, {times:.0f} additions in {dtype:format} to one sum lose {error:percent} of their "
        "terms: each leaves {unchanged:percent} of the elements unchanged. Later additions were not followed."
    )
    KEEP_IN_FP32 = (
        "Keep this tensor in FP32, or take differences from 1 before the cast. Only the weights need the cast."
    )
    KEEP = "# after the cast of the model\nmodule.table = table.float()"
    IN_FP32 = "Compute it in FP32 from FP32 values. Cast the finished tensor if it has to be in fewer bits."
    IN_INTEGERS = (
        "Keep ids, and all numbers whose last digit matters, in int64. {dtype:format} holds every whole number only up to "
        "{most:.0f}. Numbers that are no ids, such as times, take FP32. A trainer's bf16-true or 16-true casts every batch; its "
        "bf16-mixed or 16-mixed does not."
    )
    SUM_IN_FP32 = "Keep the running sum, such as the state of a sampler, in FP32, and add FP32 terms to it."
    FLOAT = "# before the loop\ntotal = total.float()"
    CODE = "# from inputs in FP32\ny = {expression}"
    INTEGERS = "ids = ids.long()"


def _is_inexact(case: Case) -> Iterator[Found]:
    """A table, a schedule or features that the script computes before its first step in 16 bits, far from their FP32 values.

    Checked under ``mpinspect run`` in a process that trains alone, until the first step or the first ``torch.compile``.

    It is an error if elements are infinite or NaN, or if a schedule has ones that FP32 does not have and a zero broke the loss.
    It is an info if the tensor is off by less than 10% and no element that is at least 2^-11 of the largest became zero.

    False alarms: A tensor that the training does not use is reported if it still exists, and a running sum in 16 bits if it was
    not followed to its end, after 3 s. Features that are off by a constant may train as well.
    """
    for prepared in case.recorded(PreparedError):
        says, fix, code = _Prepared.OFF, _Prepared.IN_FP32, _Prepared.CODE
        if prepared.text == FLOAT32.name:
            continue
        if prepared.broken:
            says = _Prepared.BREAKS
        elif prepared.times:
            says, fix, code = _Prepared.SUM_STOPS, _Prepared.SUM_IN_FP32, _Prepared.FLOAT
        elif prepared.changed:
            says, fix, code = _Prepared.ROUNDED, _Prepared.IN_INTEGERS, _Prepared.INTEGERS
        elif prepared.equal:
            says = _Prepared.EQUAL
        elif prepared.flushed:
            says = _Prepared.FLUSHED
        elif prepared.ones:
            says, fix, code = _Prepared.ONES, _Prepared.KEEP_IN_FP32, _Prepared.KEEP
        operation, broken_step = _at_zero(case, prepared.text)
        if prepared.ones and not operation:
            # Nothing shows that such a difference matters.
            continue
        if prepared.equal and not any(each.is_of_crowded_table for each in case.recorded(ChangedChoices)):
            # Nothing shows that equal numbers matter.
            continue
        is_mild = says is _Prepared.OFF and prepared.error < MATTERS
        words = {
            "of": int(prepared.elements),
            "flushed": int(prepared.flushed),
            "ones": int(prepared.ones),
            "operation": operation,
            "broken_step": broken_step,
            "most": 2.0 ** (FORMATS[prepared.text].mantissa_bits + 1),
        }
        yield found_at(
            prepared,
            says,
            fix,
            code.when(not prepared.equal),
            words,
            operator=prepared.names[0],
            is_grave=bool(prepared.broken or prepared.ones),
            is_mild=is_mild,
            is_inferred=bool(prepared.ones),
            step=None,
        )


def _at_zero(case: Case, dtype: str) -> tuple[str, int | None]:
    """Return the operation that broke at zero and its step; "" and None without one.

    ``dtype``: that of the zero, if a step that was computed twice shows the operation.
    """
    for examined in case.recorded(ExaminedArgument):
        if "zero" in examined.text:
            return examined.text.replace(ROUNDED_DIFFERENCE, ""), examined.step
    for broken in case.recorded(BrokenAlike):
        operator, line = broken.names[:2]
        if broken.from_finite and operator.rstrip("_") in AT_ZERO and broken.text == dtype:
            return f"{operator_named(operator)} ({line})", broken.step
    return "", None


class _InFP32(Sentences):
    OFF = (
        "Before the first step, in {place}, {operator} rounds to FP32. A tensor of {of:count element} made from its result is "
        "off by {off_by} of its standard deviation when the training begins: one element is {value:.9g} where FP64 gives "
        "{exact:.9g}."
    )
    IN_FP64 = (
        "Compute it in FP64, and cast the finished tensor. Or subtract a centre from the numbers first: small differences of "
        "large numbers, and of sums of very many, are lost in FP32."
    )
    DOUBLE = "# from inputs in FP64\ny = {in_fp64}\ny = y.float()"


def _is_inexact_in_fp32(case: Case) -> Iterator[Found]:
    """A table or features that the script computes in FP32 before its first step, where FP32's rounding is large beside the
    differences of the elements: of sums of very many numbers, or of numbers far from zero.

    Checked under ``mpinspect run`` in a process that trains alone, in tensors of 16 to 8 million elements, until the first step
    or the first ``torch.compile``. It is an info if the tensor is off by less than 10% of its standard deviation.

    False alarms: A tensor that the training does not use is reported if it still exists.
    """
    for prepared in case.recorded(PreparedError):
        if prepared.text == FLOAT32.name:
            words = {
                "of": int(prepared.elements),
                "off_by": percent_up_to(prepared.error),
                "in_fp64": expression(prepared.names[0], ".double()"),
            }
            is_mild, operator = prepared.error < MATTERS, prepared.names[0]
            says, fix, code = _InFP32.OFF, _InFP32.IN_FP64, _InFP32.DOUBLE
            yield found_at(prepared, says, fix, code, words, operator=operator, is_mild=is_mild, step=None)
            return


FAULTS = (
    Fault(
        "prepared-in-16-bits",
        "warning",
        _is_inexact,
        (_Prepared,),
        ("non-finite-event", "argument-out-of-range", "batch-not-finite", "breaks-in-fp32-too"),
        is_of_every_step=True,
    ),
    Fault("prepared-in-fp32", "warning", _is_inexact_in_fp32, (_InFP32,)),
)
