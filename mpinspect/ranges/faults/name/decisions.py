"""Faults that a second computation of a step shows: integers and masks that follow from rounding errors, unlike shapes."""

from __future__ import annotations

from collections.abc import Iterator

from mpinspect.ranges.faults.name.case import Case
from mpinspect.ranges.faults.name.fault import TWICE, Fault, Found
from mpinspect.ranges.faults.name.operators import MATTERS, by_place, found_at
from mpinspect.ranges.records import BroadcastDifference, ChangedChoices, ChangedIntegers, TruncatedWrite
from mpinspect.reporting.sentences import Sentences


class _Integers(Sentences):
    CHANGED = (
        "In step {step}, in {place}, whole numbers pass through {dtype:format} before they become integers, which "
        "changed {changed:.0f} of the {of:.0f}: {exact:.0f} became {given:.0f}."
    )
    TRUNCATED = (
        "In step {step}, in {place}, {changed:.0f} of {of:.0f} numbers that are written into a tensor of {into} have a fraction, "
        "which it drops: {exact:.4g} became {given:.0f}. The precision of the training has no part in that."
    )
    OF_NUMBERS = (
        "Make this tensor with the dtype of the numbers; zeros_like and empty_like take that of their argument."
    )
    OF_DTYPE = "values = torch.zeros_like(\n    integers, dtype=torch.float32\n)"
    APART = "Keep ids, indices and counts in an integer tensor of their own, which is not cast to 16 bits."
    CAST_THE_REST = "# from the FP32 batch\nids = batch[:, 0].long()\nfeatures = batch[:, 1:].to(torch.{dtype})"


def _integers_rounded(case: Case) -> Iterator[Found]:
    """Ids, indices or counts that pass through a 16-bit format and are made integers again. Or numbers with a fraction that an
    assignment writes into a tensor of integers.

    False alarms: The change is measured: all were whole numbers before the cast, and some are others after it; of the numbers
    that are written, half have a fraction or more. An assignment may drop fractions on purpose.
    """
    for written in by_place(case.recorded(TruncatedWrite), "changed"):
        words = {"into": written.names[3]}
        yield found_at(written, _Integers.TRUNCATED, _Integers.OF_NUMBERS, _Integers.OF_DTYPE, words)
    for changed in by_place(case.recorded(ChangedIntegers), "changed"):
        yield found_at(changed, _Integers.CHANGED, _Integers.APART, _Integers.CAST_THE_REST)


class _Choices(Sentences):
    OTHERS = (
        "In step {step}, in {place}, {choice} of numbers in {dtype:format} makes other integers than in FP32: {changed:.0f} of "
        "{of:.0f}, such as {given:.0f} in place of {exact:.0f}. They are used as indices or weights, or compared."
    )
    OTHER_MASK = (
        "In step {step}, in {place}, {choice} of numbers in {dtype:format} has another result than in FP32 in {changed:.0f} of "
        "{of:.0f} elements. The result is used as a mask."
    )
    NOT_BEST = (
        "In step {step}, in {place}, {changed:.0f} of {of:.0f} places that a top {best:.0f} takes, by numbers in {dtype:format}, "
        "are not even among the best {twice:.0f} in FP32."
    )
    NO_FRACTION = (
        "{whole:percent} of these numbers have a fraction in FP32 and none in {dtype:format}, so that their floor is their "
        "ceiling."
    )
    CROWDED = (
        "In step {step}, in {place}, {choice} searches a table in {dtype:format}, which has {distinct:.0f} distinct values in "
        "{entries:.0f} entries: the others are never found."
    )
    EQUAL = (
        "In step {step}, in {place}, {choice} searches a table in {dtype:format} for a number that {equal:.0f} of its "
        "{entries:.0f} entries are: it finds the first of them each time."
    )
    OF_THEM = "{changed:.0f} of {of:.0f} results differ from FP32's."
    DECIDE_IN_FP32 = (
        "Compute the numbers that decide (positions, distances, scores) in FP32, from FP32 inputs, and cast afterwards."
    )
    TABLE_IN_FP32 = "Compute and keep the table in FP32. A cast of the model casts its buffers too."
    POSITION = "position = x.float() * scale\nlow = position.floor().long()"
    SCORES = "# from operands in FP32\nscores = a.float() @ b.float().T"
    CUMSUM = "# or torch.multinomial\ntable = probabilities.float().cumsum(0)"


#: In words, the operators that make integers.
_COMPARISONS = dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), "a comparison")
_CHOICES = {"_to_copy": "a cast to integers", "max": "a maximum", "min": "a minimum", **_COMPARISONS}


def _choices_differ(case: Case) -> Iterator[Found]:
    """Integers or a mask that rounding decides: the floor of a position, the nearest code, the entry of a cumulative sum.

    False alarms: The changed integers are measured, and reported from one in twenty on if they are used in the same step. A
    choice between near equals, less than a tenth of the scores' standard deviation apart, is left out, and so are places of a
    top k that are among the best 2 k exact scores. For a table made before
    the step the finding is inferred: the table has nearly all numbers of its format, and most of them several times.
    """
    by_kind: dict[bool, ChangedChoices] = {}
    for choices in by_place(case.recorded(ChangedChoices), "changed"):
        by_kind.setdefault(choices.is_of_crowded_table, choices)
    for is_crowded, choices in by_kind.items():
        says = (_Choices.EQUAL.when(choices.equal) or _Choices.CROWDED, _Choices.OF_THEM.when(choices.of))
        operator = choices.names[0]
        if not is_crowded:
            others = (
                _Choices.NOT_BEST.when(choices.best)
                or _Choices.OTHER_MASK.when(operator in _COMPARISONS)
                or _Choices.OTHERS
            )
            says = (others, _Choices.NO_FRACTION.when((choices.whole or 0) >= MATTERS))
        yield found_at(
            choices,
            says,
            _Choices.TABLE_IN_FP32.when(is_crowded) or _Choices.DECIDE_IN_FP32,
            _Choices.CUMSUM.when(is_crowded and not choices.equal)
            or _Choices.POSITION.when(operator == "_to_copy")
            or _Choices.SCORES.when(operator in ("argmax", "argmin", "topk") and not is_crowded),
            {"choice": _CHOICES.get(operator, operator), "twice": choices.best and 2 * choices.best},
            is_inferred=not (choices.of or choices.equal),
        )


class _Broadcast(Sentences):
    MATRIX = (
        "In step {step}, in {place}, a difference of shapes ({rows:.0f}, 1) and ({rows:.0f},) has the shape "
        "({rows:.0f}, {rows:.0f}): it compares each element with all others, not with its own. The precision has no part in that."
    )
    SAME_SHAPE = "Give both the same shape."
    SQUEEZE = "# the column as a vector\nx = x.squeeze(1)"


def _difference_broadcasts(case: Case) -> Iterator[Found]:
    """A loss's difference of a column and a vector, such as a network's output of shape (n, 1) and targets of shape (n,).

    False alarms: Differences of all pairs are often made so on purpose, but from a view (``unsqueeze``, an index with None),
    which is left out.
    """
    for found in by_place(case.recorded(BroadcastDifference), "rows"):
        yield found_at(found, _Broadcast.MATRIX, _Broadcast.SAME_SHAPE, _Broadcast.SQUEEZE, is_inferred=True)


FAULTS = (
    Fault("difference-broadcasts", "warning", _difference_broadcasts, (_Broadcast,), checked=TWICE),
    Fault(
        "integers-rounded",
        "warning",
        _integers_rounded,
        (_Integers,),
        checked=f"{TWICE}, if the cast to 16 bits is in the step too",
    ),
    Fault("choices-differ", "warning", _choices_differ, (_Choices,), checked=TWICE),
)
