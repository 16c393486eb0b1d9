"""Faults that a second computation of a step shows: infinities and NaNs of 16 bits, and those that FP32 has too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from mpinspect.numeric.formats import FLOAT16
from mpinspect.ranges.faults.name.case import Case, LayerInFP32, quoted
from mpinspect.ranges.faults.name.culprit_inputs import (
    are_weights_broken,
    further_lines,
    is_of_unknown_origin,
    of_operation,
)
from mpinspect.ranges.faults.name.fault import AFTER_BREAK, TWICE, Fault, Found
from mpinspect.ranges.faults.name.forward import InVain
from mpinspect.ranges.faults.name.operators import (
    AT_ZERO,
    CASTS,
    LogSoftmax,
    expression,
    found_at,
    is_log_of_softmax,
    operator_named,
    optimizer_of,
    origin_of,
    place_of,
)
from mpinspect.ranges.faults.name.own_names import operand_in
from mpinspect.ranges.faults.name.stores import epsilon_zero, moments_flushed
from mpinspect.ranges.records import (
    BornInfinite,
    BrokenAlike,
    BrokenInFP32,
    Examined,
    ExaminedArgument,
    ExaminedDifference,
    ExaminedMask,
    ExaminedTarget,
    GradientsError,
    InfiniteDivisor,
    Record,
    RoundedArgument,
    RoundedBound,
)
from mpinspect.ranges.session import Event
from mpinspect.reporting.sentences import Said, Sentences
from mpinspect.reporting.words import bracketed, upper_first

#: From here on a number is FP32's largest, up to rounding.
_LARGEST_OF_FP32 = 3.4e38


class Born(Sentences):
    BEYOND = (
        "{at}, {operator} overflows {dtype:format} in {count:count element}: the exact result is finite, up to "
        "{largest:.3g}, and {dtype:format} ends at {end:g}."
    )
    FROM_ROUNDED_INPUTS = (
        "{at}, {operator} is infinite or NaN in {count:count element} in {dtype:format}, and finite in FP32: an "
        "earlier operator had rounded away the value that keeps it finite."
    )
    FROM_ROUNDED_INPUTS_OF_FP32 = (
        "{at}, {operator} in FP32 is infinite or NaN in {count:count element}, and finite if the operators before it compute in "
        "FP32, too."
    )
    AFTER_NARROW = "The last one in {origin_dtype:format} before it is {origin_operator} ({origin_line})."
    FROM_ORIGIN = (
        "{at_origin}, {origin_operator} rounds to {origin_dtype:format} and loses the value that keeps {operator} finite: in "
        "{place}, it is infinite or NaN in {count:count element}, and finite in FP32."
    )
    NEAR = (
        "{at_origin}, {origin_operator} makes numbers up to {near:.3g}, near {dtype:format}'s end of {end:g}; in {place}, "
        "{operator} overflows in {count:count element}: the exact result is finite, up to {largest:.3g}."
    )
    FIRST = "It began in step {step}; step {measured} was computed a second time for these figures, in FP32."
    FIRST_OF_BACKWARD = (
        "It began in the backward of step {step}, in {first_place}, and recurred at far lower loss scales; step {measured} was "
        "computed a second time for these figures, in FP32."
    )
    OF_BOUND = (
        "Its argument is {bound.given:g} in {dtype:format} there, and {bound.exact:.3g} in FP32: {bounding} ({bound_line}) is "
        "given {bound.bound:.9g}, which {dtype:format} rounds to {bound.rounded:g}. The nearest other number is "
        "{bound.nearest:.6g}."
    )
    BOUND_IN_FP32 = "Compute in FP32 from {bounding} ({bound_line}) to {last}."
    CAST_BEFORE = (
        "with torch.autocast({device_type}, enabled=False):\n"
        "    # the input of {bounding}\n"
        "    x = x.float()\n"
        "    # {bounding} and the operators after it"
    )
    FURTHER = "It overflows in {further}, too."
    EPSILON = "If it has an epsilon: FP16 rounds one below 3e-8 to zero."
    SUM_IN_FP32 = "Cast the terms to FP32 before they are added up, and keep the result in FP32."
    PRODUCT_IN_FP32 = "Use FP32 for {operator}, and for the operators that take its result."
    BOUND_EXP = "Bound the exponent, or compute the exponential and its factors in FP32."
    OF_EXPONENT = (
        "Before it, exp{at_exponent} gets arguments up to {exponent:.3g}; exp(11.09) is FP16's largest number."
    )
    BOUND_EXPONENT = "Bound the exponent. A learned scale is initialised with its logarithm."
    CLAMP_EXPONENT = "most = math.log(100)\nscale = log_scale.clamp_max(most).exp()"
    STAY_IN_FP32 = "Leave this value in FP32, or bound it first."
    FROM_ORIGIN_IN_FP32 = (
        "Compute in FP32 from {origin_place} to {place}: a cast to FP32 in between does not restore the lost bits."
    )
    FROM_NEAR_IN_FP32 = "Compute in FP32 from {origin_place} to {place}, and in the operators that take its result."
    SUBTRACT_LARGEST = "If it is normalised afterwards, subtract the largest exponent first."
    OPERATOR_IN_FP32 = "Compute this operator, and the operators before it that make its inputs, in FP32."
    PLAIN = "y = {expression}"
    CAST_INPUTS = "with torch.autocast({device_type}, enabled=False):\n    # from inputs in FP32\n    y = {expression}"
    CAST_BOTH = "with torch.autocast({device_type}, enabled=False):\n    x = {origin_expression}\n    y = {of_x}"
    CAST_ON = (
        "with torch.autocast({device_type}, enabled=False):\n"
        "    y = {expression}\n"
        "    # the operators that take y\n"
        "    z = g(y)"
    )
    CAST_BOTH_ON = f"{CAST_BOTH}\n    # the operators that take y\n    z = g(y)"
    UNCAST = "with torch.autocast({device_type}, enabled=False):\n    # x as it was before the cast\n    y = layer(x)"
    MASK_OF_THE_DTYPE = (
        "The value is FP32's largest, as masks often use it: take the largest of the scores' own dtype, so that a fully masked "
        "row stays finite."
    )
    FINFO = (
        "low = torch.finfo(scores.dtype).min\nmask = scores.new_zeros(shape)\nmask = mask.masked_fill(~allowed, low)"
    )


_SUMS = ("sum", "mean", "index_add", "index_put", "scatter_add", "cumsum", "linalg_vector_norm", "norm")
_PRODUCTS = ("mul", "pow")
#: The error of all gradients, relative to their size, from which on an overflow has spoilt them.
_SPOILT = 0.9


def _overflow_in_operator(case: Case) -> Iterator[Found]:
    """An operator whose result in 16 bits overflows, where the exact one is finite: of the forward, of an optimizer's step, or of
    a backward that breaks at loss scales below 2^-8 too.

    False alarms: The overflow is measured. If nothing else broke, it is an info if it is -inf, as in a mask, or if nothing with a
    gradient took it, as of a monitor.
    """
    return (found for found in _born_infinite(case) if found.evidence["largest"])


def _input_rounded_away(case: Case) -> Iterator[Found]:
    """An operator whose result in 16 bits is infinite or NaN, since an earlier operator rounded one of its inputs: a division by
    a difference or an epsilon that became zero.

    False alarms: The rounding is measured. The operator that rounded is named if it stands on another line.
    """
    return (found for found in _born_infinite(case) if not found.evidence["largest"])


def _born_infinite(case: Case) -> Iterator[Found]:
    """Yield the first operators that are infinite or NaN in 16 bits alone, of the model and of an optimizer's step."""
    born = list(case.recorded(BornInfinite))
    yield from _infinite_in_model(case, [each for each in born if not optimizer_of(each)])
    yield from _infinite_in_optimizer(case, [each for each in born if optimizer_of(each)])


def _infinite_in_model(case: Case, of_model: list[BornInfinite]) -> Iterator[Found]:
    possible = (each for each in of_model if _is_of_precision(each, case))
    born = next((each for each in possible if each.largest or not are_weights_broken(each, case)), None)
    if born is None:
        return
    if born.largest and any(not _is_of_rounding(each, case) for each in case.recorded(ExaminedArgument)):
        # That fault names the operation, with a remedy of its own. It does not know that an argument is zero in 16 bits alone.
        return
    bound = _bound_of(born, case)
    origin = origin_of(born)
    fix, code = _remedy(born, origin)
    if bound:
        origin, fix, code = None, Born.BOUND_IN_FP32, Born.CAST_BEFORE
    if not bound and origin is None and born.name and born.names[0] == "addmm" and code is Born.CAST_ON:
        code = LayerInFP32.of(case.precision)
    is_of_loss = _is_of_loss(born, case)
    first = first_event(case, "forward" if is_of_loss else "backward")
    further = further_lines(case, born) if born.largest else []
    is_later, layer, step = beginning(born, first)
    yield found_at(
        born,
        (
            _how(born, origin),
            Born.AFTER_NARROW.when(born.is_last and origin),
            Born.OF_BOUND.when(bound),
            Born.OF_EXPONENT.when(born.exponent),
            Born.FURTHER.when(further),
            (Born.FIRST.when(is_of_loss) or Born.FIRST_OF_BACKWARD).when(is_later),
        ),
        fix,
        code,
        {
            "first_place": first and first.place,
            "path": quoted(born.name),
            "at": _at(born, is_later),
            "at_origin": origin and _at(origin, is_later),
            # A product there would round its result before a cast of the last operator's operands.
            **({"origin_expression": "f(z.float())"} if born.is_last else {}),
            "bound": bound,
            "bounding": bound and operator_named(bound.names[4]),
            "bound_line": bound and bound.names[5],
            "last": f"{operator_named(born.names[0])} ({born.names[1]})",
            "at_exponent": bracketed("".join(born.names[3:4])),
            "further": " and ".join(further),
        },
        layer=layer,
        operator="" if origin else born.names[0],
        is_grave=first is not None or (born.did_harm and _spoils_gradients(born, case)),
        # A softmax, an exponential and a maximum take -inf as they take a large negative number.
        is_mild=first is None and bool(born.is_negative or born.is_unused),
        origin=origin,
        before=[*(() if origin else born.names[3:4]), *(bound.names[5:] if bound else ()), born.names[1], *further],
        step=step,
    )


def _bound_of(born: BornInfinite, case: Case) -> RoundedArgument | None:
    """Return the argument of an infinite operator, or of its gradient, that is a rounded bound or epsilon of the script."""
    same = (each for each in case.recorded(RoundedArgument) if each.bound is not None and each.step == born.step)
    return next((each for each in same if not born.largest and each.names[:2] == born.names[:2]), None)


def _infinite_in_optimizer(case: Case, of_optimizer: list[BornInfinite]) -> Iterator[Found]:
    is_known = any(epsilon_zero(case)) or any(moments_flushed(case))
    born = next((each for each in of_optimizer if each.largest or not is_known), None)
    if born is None:
        return
    fix, _ = _remedy(born, None)
    # The weights that it steps on break the next forward.
    is_grave = any(event.forward_finite is False and event.step > born.step for event in case.events)
    says = Born.BEYOND.when(born.largest) or Born.FROM_ROUNDED_INPUTS
    yield found_at(born, says, fix, Born.PLAIN, {"at": _at(born, False)}, is_grave=is_grave)


def _spoils_gradients(born: BornInfinite, case: Case) -> bool:
    """Return whether the gradients of a step in which an operator overflowed are off by nearly their size."""
    return any(each.step == born.step and each.error >= _SPOILT for each in case.recorded(GradientsError))


def _is_of_precision(born: BornInfinite, case: Case) -> bool:
    """Return whether a step's infinities are of the precision, and not of a loss scale that was too high for its backward."""
    if born.names[2] == "backward" and _follow_scale(case):
        # A scaler's search lowers it.
        return False
    events = [event for event in case.events if event.step == born.step]
    return _is_of_loss(born, case) or any(event.broken_phase == "backward" for event in events)


def _follow_scale(case: Case) -> bool:
    """Return whether the exact results that overflow in several backwards vary as the loss scale, so that they contain it."""
    scales = {event.step: event.loss_scale for event in case.events}
    overflowed = (each for each in case.recorded(BornInfinite) if each.names[2] == "backward" and each.largest)
    pairs = [(math.log2(each.largest), math.log2(scale)) for each in overflowed if (scale := scales.get(each.step))]
    if len({scale for _, scale in pairs}) <= 1:
        return False
    spread, unscaled = _spread(largest for largest, _ in pairs), _spread(largest - scale for largest, scale in pairs)
    return unscaled < spread / 2


def _spread(numbers: Iterable[float]) -> float:
    numbers = list(numbers)
    return max(numbers) - min(numbers)


def _is_of_loss(born: BornInfinite, case: Case) -> bool:
    """Return whether the loss contains an infinite result: of a forward, or of a backward in it, as of a penalty on gradients.

    That is so where the loss is not finite although nothing in FP32 was infinite or NaN.
    """
    broken = {event.step for event in case.events if event.forward_finite is False}
    alike = {record.step for record in case.recorded(BrokenAlike)}
    return born.names[2] == "forward" or born.step in broken - alike


def _is_of_rounding(examined: ExaminedArgument, case: Case) -> bool:
    """Return whether an argument's origin is unknown, or a step computed twice shows that it differs from the exact one."""
    return is_of_unknown_origin(examined) or of_operation(case.recorded(RoundedArgument), examined) is not None


def _how(born: BornInfinite, origin: BornInfinite | None) -> Born:
    if born.largest:
        return Born.NEAR.when(origin) or Born.BEYOND
    if born.is_last:
        return Born.FROM_ROUNDED_INPUTS_OF_FP32
    return Born.FROM_ORIGIN.when(origin) or Born.FROM_ROUNDED_INPUTS


def _remedy(born: BornInfinite, origin: BornInfinite | None) -> tuple[Said, Said]:
    operator = born.names[0]
    is_epsilon = not born.largest and operator.rstrip("_") in AT_ZERO and born.text == FLOAT16.name
    # The operators that take a large result would round it again.
    casts = ((Born.CAST_INPUTS, Born.CAST_BOTH), (Born.CAST_ON, Born.CAST_BOTH_ON))[bool(born.largest)]
    cast = casts[origin is not None]
    if is_log_of_softmax(born):
        return LogSoftmax.FIX, LogSoftmax.CODE
    if origin is not None and born.largest:
        return (Born.FROM_NEAR_IN_FP32, Born.SUBTRACT_LARGEST.when(origin.names[0].startswith("exp"))), cast
    if origin is not None:
        return (Born.FROM_ORIGIN_IN_FP32, Born.EPSILON.when(is_epsilon)), cast
    if operator.rstrip("_") in _SUMS:
        return Born.SUM_IN_FP32, cast
    if operator.rstrip("_") in _PRODUCTS:
        return Born.PRODUCT_IN_FP32, cast
    if operator.startswith("exp"):
        return Born.BOUND_EXP, cast
    if born.largest >= _LARGEST_OF_FP32:
        return Born.MASK_OF_THE_DTYPE, Born.FINFO
    if born.exponent:
        return Born.BOUND_EXPONENT, Born.CLAMP_EXPONENT
    if operator in CASTS:
        return Born.STAY_IN_FP32, Born.UNCAST
    return (Born.OPERATOR_IN_FP32, Born.EPSILON.when(is_epsilon)), cast


def first_event(case: Case, phase: str = "forward") -> Event | None:
    """Return the first event of a forward, or else of the backward of a finite one."""
    return next((event for event in case.events if (event.forward_finite is False) == (phase == "forward")), None)


def beginning(found: Record, first: Event | None) -> tuple[bool, str, int]:
    """Return whether an event comes before a record's step, and the module and the step in which the problem began."""
    if first is not None and first.step < found.step:
        return True, first.module, first.step
    return False, found.name, found.step


def _at(found: Record, is_later: bool) -> str:
    """Return in words where an operator ran, and in which step, unless another sentence names the step."""
    place = f"in {place_of(found)['place']}"
    return upper_first(place) if is_later else f"In step {found.step}, {place}"


class _Alike(Sentences):
    IN_FP32_TOO = (
        "{at}, {operator} is infinite or NaN in {count:count element}, in FP32 as well: more bits do not help. Its inputs or its "
        "weights are the cause."
    )
    INPUTS = (
        "Correct the inputs of {operator} in {place}. Look for a zero that divides, the logarithm of zero, an empty row, or a "
        "constant that was rounded to 16 bits before the step, such as a noise schedule."
    )
    TAKES = "{at}, {operator} takes {tensor}, which is not finite."
    MAKER = "Correct {tensor}, which holds {given:count infinite or NaN value}."
    SHOW_TENSOR = "# the elements that break\nprint((~{tensor}.isfinite()).nonzero())"
    SHOW = "y = {of_inputs}\n# the elements that break\nprint((~y.isfinite()).nonzero())"


def _breaks_in_fp32_too(case: Case) -> Iterator[Found]:
    """An operator whose result is infinite or NaN in the exact computation as well.

    False alarms: The result is measured. The severity is info if no forward of the run was infinite or NaN.
    """
    examined = case.recorded(ExaminedArgument)
    if not all(map(is_of_unknown_origin, examined)):
        # Another fault names these inputs already.
        return
    broken = [event for event in case.events if event.forward_finite is False]
    first = first_event(case)
    # Once an optimizer has stepped on them the weights are broken, whatever the precision was.
    is_stepped_on = any(event.skipped is False for event in broken)
    of_fp32 = {each.step for each in case.recorded(BrokenInFP32)}
    # An input that was infinite already shows nothing of a step whose input was finite.
    of_input = {event.step for event in case.events if event.given and first is not None and not first.given}
    for alike in case.recorded(BrokenAlike):
        is_explained = is_stepped_on or are_weights_broken(alike, case)
        if alike.step in of_fp32 | of_input or (is_explained and not alike.from_finite):
            continue
        # A step of a second opinion has no events.
        if not case.progress.steps or (first is not None and first.step <= alike.step):
            is_later, layer, step = beginning(alike, first)
            lowered = len({event.step for event in broken if event.skipped})
            tensor = operand_in(case.session.source_of(alike.names[1]), alike.names[0], alike.operand)
            words = {"given": int(alike.given), "lowered": lowered, "tensor": tensor}
            yield found_at(
                alike,
                (_Alike.TAKES.when(tensor) or _Alike.IN_FP32_TOO, Born.FIRST.when(is_later)),
                ((_Alike.MAKER.when(tensor) or _Alike.INPUTS).when(first), InVain.NEW_SCALER.when(lowered > 1)),
                (_Alike.SHOW_TENSOR.when(tensor) or _Alike.SHOW).when(first),
                {**words, "at": _at(alike, is_later), "of_inputs": expression(alike.names[0], "")},
                layer=layer,
                operator=alike.names[0],
                severity="info" if first is None else "error",
                step=step,
            )
            return


class _Divisor(Sentences):
    HOLDS = (
        "In step {step}, in {place}, {operator} divides by {count:count infinite number} in FP16, in a tensor of "
        "{of:count element}: the quotients are zeros, and no later value shows it."
    )
    OF_CAST = "A cast of larger values than 65504, such as running variances, leaves infinities."
    IN_BF16 = (
        "Cast this model to BF16, which has FP32's range, or keep its normalisations and their statistics in FP32."
    )
    CODE = "# in place of half(), on the FP32 model\nmodel = model.bfloat16()"
    OTHER = "# in place of half(), on the FP32 model\nother = other.bfloat16()"


def _divisor_infinite(case: Case) -> Iterator[Found]:
    """A stored divisor in FP16 that is infinite, such as the running variance of a model that was cast for evaluation.

    False alarms: The divisor is measured. An infinite divisor may switch a channel off on purpose.
    """
    for divisor in case.recorded(InfiniteDivisor):
        code = _Divisor.CODE.when(divisor.name) or _Divisor.OTHER
        words = {"count": int(divisor.infinite), "of": int(divisor.elements)}
        yield found_at(divisor, (_Divisor.HOLDS, _Divisor.OF_CAST), _Divisor.IN_BF16, code, words)
        return


#: The findings that an infinity of the precision explains.
_OF_BORN = ("non-finite-event", "cast-overflows", "argument-out-of-range")


class _Bound(Sentences):
    ROUNDS_AWAY = (
        "In {place}, {operator} or its derivative is infinite at {given:g}. {bounding} ({bound_line}) does not exclude that "
        "argument: {dtype:format} rounds its bound {bound:.9g} to {rounded:g}. The nearest other number is {nearest:.6g}."
    )
    BROKE = "In step {broken}, {broken_place} was no longer finite."
    BROKE_BACKWARD = "In step {broken} the backward of {broken_place} was not finite."
    IN_FP32 = "Compute in FP32 from {bounding} ({bound_line}) to {last}."
    WIDER = "A bound that {dtype:format} holds, such as {nearest:.6g}, does as well."


def _bound_rounds_away(case: Case) -> Iterator[Found]:
    """A bound that is to keep a value from the edge of an operator's domain, and that 16 bits round to that edge.

    It is an error if a forward broke in the operator's module, in the loss, or in the operator's line, or a backward just after
    that module, and an info otherwise.

    False alarms: The rounding is measured. Whether a value was at the bound when the forward broke is inferred.
    """
    bound = next(case.recorded(RoundedBound), None)
    event = min(
        filter(None, (first_event(case), first_event(case, "backward"))), key=lambda each: each.step, default=None
    )
    # A step with a value at its bound, which was computed twice, shows more.
    if bound is None or any(each.bound is not None for each in case.recorded(RoundedArgument)):
        return
    bounding, bound_line = bound.names[3:5]
    broke = event if event is not None and _broke_at(bound, event, case) else None
    says = _Bound.BROKE_BACKWARD.when(broke and broke.phase == "backward") or _Bound.BROKE
    yield found_at(
        bound,
        (_Bound.ROUNDS_AWAY, says.when(broke)),
        (_Bound.IN_FP32, _Bound.WIDER),
        Born.CAST_BEFORE,
        {
            "bounding": operator_named(bounding),
            "bound_line": bound_line,
            "last": f"{operator_named(bound.names[0])} ({bound.names[1]})",
            "broken": broke and broke.step,
            "broken_place": broke and broke.place,
        },
        severity="" if broke else "info",
        is_inferred=True,
        before=[bound_line, bound.names[1]],
        step=broke.step if broke else bound.step,
    )


def _broke_at(bound: RoundedBound, event: Event, case: Case) -> bool:
    """Return whether a forward broke where the operator runs: in its module or the loss, and in no other known operation."""
    if event.phase == "backward" and event.forward_finite:
        # At the bound the operator's derivative is infinite.
        others = (born for born in case.recorded(BornInfinite) if born.names[1] != bound.names[1])
        return event.after and event.module == bound.name and not any(born.step >= event.step for born in others)
    if event.forward_finite is not False or event.given:
        return False
    if any(born.names[:3] != bound.names[:3] for born in case.recorded(BornInfinite) if born.names[2] == "forward"):
        return False
    examined = next((each for each in case.recorded(Examined) if each.step == event.step), None)
    # Code outside of the graph, such as that of targets, may have computed the operator.
    of_data = isinstance(examined, (ExaminedMask, ExaminedTarget, ExaminedDifference))
    if examined is not None and not of_data and not is_of_unknown_origin(examined):
        return of_operation([bound], examined) is not None
    return event.module == bound.name


FAULTS = (
    Fault(
        "bound-rounds-away",
        "error",
        _bound_rounds_away,
        (_Bound, Born),
        ("non-finite-event", "argument-out-of-range", "mask-hides-whole-row", "batch-not-finite"),
        checked=TWICE,
    ),
    Fault(
        "breaks-in-fp32-too",
        "error",
        _breaks_in_fp32_too,
        (_Alike, Born, InVain),
        ("non-finite-event", "argument-out-of-range"),
        heading="Not finite in FP32 either",
    ),
    Fault("divisor-infinite", "error", _divisor_infinite, (_Divisor,), checked=TWICE),
    Fault(
        "overflow-in-operator",
        "warning",
        _overflow_in_operator,
        (Born, LayerInFP32, LogSoftmax),
        _OF_BORN,
        checked=AFTER_BREAK,
    ),
    Fault(
        "input-rounded-away",
        "warning",
        _input_rounded_away,
        (Born, LayerInFP32, LogSoftmax),
        (*_OF_BORN, "zero-row-normalized"),
        checked=AFTER_BREAK,
    ),
)
