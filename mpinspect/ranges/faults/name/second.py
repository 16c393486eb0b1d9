"""Faults that a second computation of a step shows: operators whose exact result differs from the one in 16 bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from mpinspect.numeric.formats import FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FORMATS
from mpinspect.ranges.faults.name.arithmetic import overflowed_norms
from mpinspect.ranges.faults.name.case import SIGNIFICAND_BITS, Case, LayerInFP32, quoted
from mpinspect.ranges.faults.name.culprit_inputs import CONSTANT, OF_FORWARD, further_lines, of_operation
from mpinspect.ranges.faults.name.fault import AFTER_BREAK, TWICE, Fault, Found
from mpinspect.ranges.faults.name.stores import epsilon_zero, moments_cannot_decay, moments_flushed, no_weight_changes
from mpinspect.ranges.records import (
    AbsorbedOperand,
    AmplifiedError,
    BornInfinite,
    BrokenAlike,
    BrokenWeights,
    ChangedChoices,
    ChangedIntegers,
    DividedInHalf,
    ExaminedArgument,
    FlushedResult,
    FrozenBuffer,
    GrowingSum,
    LostSum,
    Record,
    RoundedArgument,
    RoundedConstant,
)
from mpinspect.ranges.session import Event, module_named
from mpinspect.reporting.sentences import Said, Sentences
from mpinspect.reporting.words import bracketed, upper_first

#: An error of the gradients from which on rounding matters: BF16 alone makes some 1%.
_MATTERS = 0.1
#: From here on a number is FP32's largest, up to rounding.
_LARGEST_OF_FP32 = 3.4e38
#: The part of a sum that is not lost by rounding alone, whatever the gradients are.
_MOST_OF_IT = 0.25
#: The share of a sum's elements that do not change, from which on an addition does nothing.
_MOSTLY = 0.5
#: The root mean square of a branch that begins near zero on purpose, as LayerScale and zero-initialised adapters do, is smaller.
_LEAST_BRANCH = 2.0**-6


_Placed = TypeVar("_Placed", bound=Record)

_OUTSIDE = "code outside of modules"
#: The beginning of the phase of an optimizer's operators.
_STEP_OF = "step of "
#: The beginning of the phase of the operators of a backward that is Python code.
_BACKWARD_OF = "backward of "
#: torch's dtypes of the FP8 formats.
_FP8_TYPES = {FLOAT8_E4M3.name: "float8_e4m3fn", FLOAT8_E5M2.name: "float8_e5m2"}
#: Operators whose names say little.
_IN_WORDS = {
    "_to_copy": "a cast",
    "copy_": "a copy",
    "mm": "a matrix product",
    "addmm": "a linear layer",
    "bmm": "a batched matrix product",
    "_softmax": "softmax",
    "rsub": "a difference",
}
#: The binary operators as code.
_SIGNS = {"add": "+", "sub": "-", "rsub": "-", "mul": "*", "div": "/", **dict.fromkeys(("mm", "bmm", "mv", "dot"), "@")}
#: The methods of a tensor that operators are, as code.
_METHODS = {
    "linalg_vector_norm": "norm()",
    "pow": "pow(p)",
    **{name: f"{name}(dim)" for name in ("cumsum", "log_softmax", "logsumexp", "softmax")},
    **{name: f"{name}()" for name in ("exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "reciprocal")},
    **{name: f"{name}()" for name in ("cos", "rsqrt", "sigmoid", "sin", "sqrt", "tan", "tanh")},
    **{name: f"{name}()" for name in ("mean", "norm", "prod", "std", "sum", "var")},
}


def _expression(operator: str, cast: str = ".float()", other: str = "b") -> str:
    """Return an operator as code.

    Args:
        operator: its name in torch.
        cast: follows each operand.
        other: the second operand of a binary operator.
    """
    name = operator.strip("_")
    if operator in _CASTS:
        return "x.float()"
    if name == "addmm":
        return f"x{cast} @ w{cast}.T + b{cast}"
    if name in _SIGNS:
        return f"a{cast} {_SIGNS[name]} {other}{cast}"
    return f"x{cast}.{_METHODS[name]}" if name in _METHODS else f"f(x{cast})"


def _by_place(records: Iterable[_Placed], size: str) -> Iterator[_Placed]:
    """Yield one record of each operator and line: the first, of all steps computed twice, with at least half the largest size."""
    alike: dict[tuple[str, tuple[str, ...]], list[_Placed]] = {}
    for record in records:
        alike.setdefault((record.name, record.names[:3]), []).append(record)
    for found in alike.values():
        largest = max(getattr(record, size) for record in found)
        yield next(record for record in found if getattr(record, size) >= largest / 2)


def operator_named(operator: str) -> str:
    """Return torch's name of an operator in words."""
    return _IN_WORDS.get(operator, operator.strip("_"))


def _place(record: Record) -> dict[str, object]:
    """Return in words the operator of a record, its place and its dtype."""
    operator, line, phase = record.names[:3]
    operator = operator_named(operator)
    module = record.name and module_named(record.name)
    place = (module and module + bracketed(line)) or line or _OUTSIDE
    if phase == "backward":
        place = f"the backward of {module or _OUTSIDE}{bracketed(line)}"
        operator = f"the gradient of {operator}" if line else operator
    if phase.startswith(_BACKWARD_OF):
        place = f"the {phase}{bracketed(line)}"
    if optimizer := _optimizer_of(record):
        place = f"{optimizer}'s step{bracketed(line)}"
    return {
        "operator": operator,
        "place": place,
        "line": line,
        "expression": _expression(record.names[0]),
        "of_x": _expression(record.names[0], "", "x"),
        "dtype": record.text,
        "end": FORMATS[record.text].max_finite,
    }


def _optimizer_of(record: Record) -> str:
    """Return the class of the optimizer in whose step an operator ran; "" for an operator outside of one."""
    return record.names[2].removeprefix(_STEP_OF) if record.names[2].startswith(_STEP_OF) else ""


def _origin(record: _Placed) -> _Placed | None:
    """Return a record of the earlier operator that a record names, at another line; None without one."""
    names = record.names[4:]
    if len(names) < len(("operator", "line", "module", "dtype")) or names[1] == record.names[1]:
        return None
    operator, line, module, dtype = names
    return replace(record, name=module, names=(operator, line, "forward"), text=dtype)


def _words_of(origin: Record | None) -> dict[str, object]:
    """Return the words of an earlier operator, whose names begin with "origin"."""
    return {f"origin_{name}": value for name, value in _place(origin).items()} if origin else {}


def _found(
    record: Record, says: Said, fix: Said, code: Said = (), words: Mapping[str, object] | None = None, **more: Any
) -> Found:
    """Return the occurrence that a record shows, at its operator; the sentences may use its figures and its place."""
    operator, line, phase = record.names[:3]
    evidence = {"operator": operator, "line": line, "phase": phase, "dtype": record.text, **record.figures}
    words = {**_place(record), "measured": record.step, **(words or {})}
    return Found(says, evidence, words, fix, code, **{"layer": record.name, "step": record.step, **more})


class _Gradients(Sentences):
    OFF = "With all rounding of the step together, the gradient of {weight!r} is off by {gradients_error:.0%}."


def _gradients(record: LostSum | AbsorbedOperand | AmplifiedError) -> tuple[_Gradients | None, dict[str, object]]:
    """Return the sentence on the gradients' error, if it matters, and the weight."""
    matters = record.gradients_error is not None and record.gradients_error >= _MATTERS
    return _Gradients.OFF.when(matters), {"weight": "".join(record.names[3:4])}


# -- infinities ---------------------------------------------------------------------------------------------------------


class _Born(Sentences):
    BEYOND = (
        "{at}, {operator} overflows {dtype:format} in {count:count element}: the exact result is finite, up to "
        "{largest:.3g}, and {dtype:format} ends at {end:g}."
    )
    FROM_ROUNDED_INPUTS = (
        "{at}, {operator} is infinite or NaN in {count:count element} in {dtype:format}, and finite in FP32: an "
        "earlier operator had rounded away the value that keeps it finite."
    )
    FROM_ORIGIN = (
        "{at_origin}, {origin_operator} rounds to {origin_dtype:format} and loses the value that keeps {operator} finite: in "
        "{place}, it is infinite or NaN in {count:count element}, and finite in FP32."
    )
    NEAR = (
        "{at_origin}, {origin_operator} makes numbers up to {near:.3g}, near {dtype:format}'s end of {end:g}; in {place}, "
        "{operator} overflows in {count:count element}: the exact result is finite, up to {largest:.3g}."
    )
    FIRST = (
        "The first infinity or NaN was in the forward of step {step}, in {first_place}. These figures are those of step "
        "{measured}, which was computed a second time, in FP32."
    )
    FIRST_OF_BACKWARD = (
        "The first infinity or NaN was in the backward of step {step}, in {first_place}; at far lower loss scales there were "
        "more. These figures are those of step {measured}, which was computed a second time, in FP32."
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
    PRODUCT_IN_FP32 = "Multiply in FP32, and keep the result in FP32 until its values are small again."
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
    FROM_NEAR_IN_FP32 = (
        "Compute in FP32 from {origin_place} to {place}, and keep the result in FP32 until its values are small again."
    )
    SUBTRACT_LARGEST = "If it is normalised afterwards, subtract the largest exponent first."
    OPERATOR_IN_FP32 = "Compute this operator, and the operators before it that make its inputs, in FP32."
    PLAIN = "y = {expression}"
    CAST_INPUTS = "with torch.autocast({device_type}, enabled=False):\n    # from inputs in FP32\n    y = {expression}"
    CAST_BOTH = "with torch.autocast({device_type}, enabled=False):\n    x = {origin_expression}\n    y = {of_x}"
    CAST_ON = (
        "with torch.autocast({device_type}, enabled=False):\n"
        "    y = {expression}\n"
        "    # and the operators that take y\n"
        "    z = g(y)"
    )
    CAST_BOTH_ON = f"{CAST_BOTH}\n    # and the operators that take y\n    z = g(y)"
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
_CASTS = ("_to_copy", "copy_")
#: Operators that are infinite at zero.
_AT_ZERO = ("div", "log", "pow", "reciprocal", "rsqrt")


def _overflow_in_operator(case: Case) -> Iterator[Found]:
    """An operator whose result in 16 bits overflows, where the exact one is finite: of the forward, of an optimizer's step, or of
    a backward that breaks at loss scales below 2^-8 too.

    False alarms: It is measured. A mask of -inf that the exact computation does not have is reported too.
    """
    return (found for found in _born_infinite(case) if found.evidence["largest"])


def _input_rounded_away(case: Case) -> Iterator[Found]:
    """An operator whose result in 16 bits is infinite or NaN, since an earlier operator rounded one of its inputs: a division by
    a difference or an epsilon that became zero.

    False alarms: It is measured. The operator that rounded is named where it stands on another line.
    """
    return (found for found in _born_infinite(case) if not found.evidence["largest"])


def _born_infinite(case: Case) -> Iterator[Found]:
    """Yield the first operators that are infinite or NaN in 16 bits alone, of the model and of an optimizer's step."""
    born = list(case.recorded(BornInfinite))
    yield from _infinite_in_model(case, [each for each in born if not _optimizer_of(each)])
    yield from _infinite_in_optimizer(case, [each for each in born if _optimizer_of(each)])


def _infinite_in_model(case: Case, of_model: list[BornInfinite]) -> Iterator[Found]:
    norms = {norm.step for norm in overflowed_norms(case)}
    possible = (each for each in of_model if _is_of_precision(each, case) and each.step not in norms)
    born = next((each for each in possible if each.largest or not _are_weights_broken(each, case)), None)
    if born is None:
        return
    if born.largest and any(not _is_of_rounding(each, case) for each in case.recorded(ExaminedArgument)):
        # That fault names the operation, with a remedy of its own. It does not know that an argument is zero in 16 bits alone.
        return
    bound = _bound_of(born, case)
    origin = _origin(born)
    fix, code = _remedy(born, origin)
    if bound:
        origin, fix, code = None, _Born.BOUND_IN_FP32, _Born.CAST_BEFORE
    if not bound and origin is None and born.name and born.names[0] == "addmm" and code is _Born.CAST_ON:
        code = LayerInFP32.of(case.precision)
    phase = born.names[2]
    first = _first_event(case, phase)
    further = further_lines(case, born) if born.largest else []
    is_later, layer, step = _beginning(born, first)
    began = _Born.FIRST.when(phase == "forward") or _Born.FIRST_OF_BACKWARD
    yield _found(
        born,
        (
            _how(born, origin),
            _Born.OF_BOUND.when(bound),
            _Born.OF_EXPONENT.when(born.exponent),
            _Born.FURTHER.when(further),
            began.when(is_later),
        ),
        fix,
        code,
        {
            "count": int(born.elements),
            "first_place": first and first.place,
            "path": quoted(born.name),
            "at": _at(born, is_later),
            "at_origin": origin and _at(origin, is_later),
            **_words_of(origin),
            "bound": bound,
            "bounding": bound and _IN_WORDS.get(bound.names[4], bound.names[4].strip("_")),
            "bound_line": bound and bound.names[5],
            "last": f"{_IN_WORDS.get(born.names[0], born.names[0].strip('_'))} ({born.names[1]})",
            "at_exponent": bracketed("".join(born.names[3:4])),
            "further": " and ".join(further),
        },
        layer=layer,
        operator="" if origin else born.names[0],
        is_grave=first is not None,
        before=[
            *([origin.names[1]] if origin else born.names[3:4]),
            *(bound.names[5:] if bound else ()),
            born.names[1],
            *further,
        ],
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
    is_grave = any(event.forward_finite is False and event.step > (born.step or 0) for event in case.events)
    says = _Born.BEYOND.when(born.largest) or _Born.FROM_ROUNDED_INPUTS
    words = {"count": int(born.elements), "at": _at(born, False)}
    yield _found(born, says, fix, _Born.PLAIN, words, is_grave=is_grave)


def _is_of_precision(born: BornInfinite, case: Case) -> bool:
    """Return whether a step's infinities are of the precision, and not of a loss scale that was too high for its backward."""
    events = [event for event in case.events if event.step == born.step]
    return born.names[2] == "forward" or any(event.broken_phase == "backward" for event in events)


def _are_weights_broken(found: Record, case: Case) -> bool:
    """Return whether the weights held infinities or NaNs before a record's step: an update is the cause of those after it."""
    return any(broken.step <= found.step for broken in case.recorded(BrokenWeights))


def _is_of_rounding(examined: ExaminedArgument, case: Case) -> bool:
    """Return whether an argument's origin is unknown, or a step computed twice shows that it differs from the exact one."""
    return CONSTANT in examined.text or of_operation(case.recorded(RoundedArgument), examined) is not None


def _how(born: BornInfinite, origin: BornInfinite | None) -> _Born:
    if born.largest:
        return _Born.NEAR.when(origin) or _Born.BEYOND
    return _Born.FROM_ORIGIN.when(origin) or _Born.FROM_ROUNDED_INPUTS


def _remedy(born: BornInfinite, origin: BornInfinite | None) -> tuple[Said, Said]:
    operator = born.names[0]
    is_epsilon = not born.largest and operator.rstrip("_") in _AT_ZERO and born.text == FLOAT16.name
    # The operators that take a large result would round it again.
    casts = ((_Born.CAST_INPUTS, _Born.CAST_BOTH), (_Born.CAST_ON, _Born.CAST_BOTH_ON))[bool(born.largest)]
    cast = casts[origin is not None]
    if origin is not None and born.largest:
        return (_Born.FROM_NEAR_IN_FP32, _Born.SUBTRACT_LARGEST.when(origin.names[0].startswith("exp"))), cast
    if origin is not None:
        return (_Born.FROM_ORIGIN_IN_FP32, _Born.EPSILON.when(is_epsilon)), cast
    if operator.rstrip("_") in _SUMS:
        return _Born.SUM_IN_FP32, cast
    if operator.rstrip("_") in _PRODUCTS:
        return _Born.PRODUCT_IN_FP32, cast
    if operator.startswith("exp"):
        return _Born.BOUND_EXP, cast
    if born.largest >= _LARGEST_OF_FP32:
        return _Born.MASK_OF_THE_DTYPE, _Born.FINFO
    if born.exponent:
        return _Born.BOUND_EXPONENT, _Born.CLAMP_EXPONENT
    if operator in _CASTS:
        return _Born.STAY_IN_FP32, _Born.UNCAST
    return (_Born.OPERATOR_IN_FP32, _Born.EPSILON.when(is_epsilon)), cast


def _first_event(case: Case, phase: str = "forward") -> Event | None:
    """Return the first event of a forward, or else of the backward of a finite one."""
    return next((event for event in case.events if (event.forward_finite is False) == (phase == "forward")), None)


def _beginning(found: Record, first: Event | None) -> tuple[bool, str, int]:
    """Return whether an event comes before a record's step, and the module and the step in which the problem began."""
    if first is not None and first.step < found.step:
        return True, first.module, first.step
    return False, found.name, found.step


def _at(found: Record, is_later: bool) -> str:
    """Return in words where an operator ran, and in which step, unless another sentence names the step."""
    place = f"in {_place(found)['place']}"
    return upper_first(place) if is_later else f"In step {found.step}, {place}"


class _Alike(Sentences):
    IN_FP32_TOO = (
        "{at}, {operator} is infinite or NaN in {count:count element}, in FP32 as well: more bits do not help. Its inputs or its "
        "weights are the cause."
    )
    INPUTS = (
        "Correct the inputs of {operator} in {place}: a zero that divides, the logarithm of zero, an empty row, or a constant "
        "that was rounded to 16 bits before the step, such as a noise schedule."
    )
    NEW_SCALER = (
        "If you stay in FP16, make a new GradScaler: the scale of this one was lowered {lowered} times for nothing."
    )


def _breaks_in_fp32_too(case: Case) -> Iterator[Found]:
    """An operator whose result is infinite or NaN in the exact computation as well.

    False alarms: It is measured. It is information if no forward of the run was infinite or NaN.
    """
    examined = case.recorded(ExaminedArgument)
    if overflowed_norms(case) or any(CONSTANT not in each.text for each in examined):
        # Another fault names these inputs already.
        return
    broken = [event for event in case.events if event.forward_finite is False]
    first = _first_event(case)
    # Once an optimizer has stepped on them the weights are broken, whatever the precision was.
    is_stepped_on = any(event.skipped is False for event in broken)
    for alike in case.recorded(BrokenAlike):
        if (is_stepped_on or _are_weights_broken(alike, case)) and not alike.from_finite:
            continue
        # A step of a second opinion has no events.
        if not case.progress.steps or (first is not None and first.step <= alike.step):
            is_later, layer, step = _beginning(alike, first)
            lowered = len({event.step for event in broken if event.skipped})
            words = {"count": int(alike.elements), "lowered": lowered, "first_place": first and first.place}
            yield _found(
                alike,
                (_Alike.IN_FP32_TOO, _Born.FIRST.when(is_later)),
                (_Alike.INPUTS.when(first), _Alike.NEW_SCALER.when(lowered > 1)),
                words={**words, "at": _at(alike, is_later)},
                layer=layer,
                severity="info" if first is None else "error",
                step=step,
            )
            return


# -- losses -------------------------------------------------------------------------------------------------------------


class _Sum(Sentences):
    LOSES = (
        "In step {step}, in {place}, {operator} adds up in {dtype:format} and loses {error:.0%} of its result: one element "
        "is {value:.4g} where the exact result is {exact:.4g}."
    )
    IN_FP32 = "Add up in FP32: cast the terms before the sum, and its result afterwards."
    CAST = "total = {expression}"
    CAST_INDEXED = "total = total.float().index_add(\n    0, index, terms.float()\n)"
    CAST_PUT = "total = total.float().index_put(\n    index, terms.float(), accumulate=True\n)"


def _sum_loses_terms(case: Case) -> Iterator[Found]:
    """A sum in 16 bits whose terms are rounded away.

    False alarms: It is measured, from an error of 3% on. It is information below 25% if no weight's gradient is off by 10%.
    """
    for lost in _by_place(case.recorded(LostSum), "error"):
        also, words = _gradients(lost)
        is_fault = also is not None or lost.error >= _MOST_OF_IT
        operator = lost.names[0].strip("_")
        code = _Sum.CAST_INDEXED.when(operator.startswith(("index", "scatter", "embedding"))) or _Sum.CAST
        code = _Sum.CAST_PUT.when(operator.startswith("index_put")) or code
        fix = _Sum.IN_FP32.when(is_fault)
        more = {"operator": lost.names[0], "is_mild": not is_fault}
        yield _found(lost, (_Sum.LOSES, also), fix, code.when(is_fault), words, **more)


class _Absorbed(Sentences):
    NOTHING_CHANGES = (
        "In step {step}, in {place}, an addition in {dtype:format} leaves {unchanged:percent} of the elements as they were: the "
        "smaller operand is below half a unit in the last place of the larger one, and {error:percent} of it is lost."
    )
    SUM_STOPS = (
        "In step {step}, in {place}, {unchanged:percent} of {times:.0f} additions in {dtype:format} leave the sum as it was: it "
        "has grown until a term is below half a unit in its last place."
    )
    SUM_IN_FP32 = "Keep the running sum in FP32, and add FP32 terms to it."
    ZERO_IN_FP32 = "total = torch.zeros((), dtype=torch.float32)"
    STREAM_IN_FP32 = "Keep the larger operand, such as a residual stream or a running sum, in FP32, and add in FP32."
    CAST = "# once, before the blocks\nx = x.float()\n# in each block\nx = x + block(x.to(torch.{dtype})).float()"


def _addition_changes_nothing(case: Case) -> Iterator[Found]:
    """An addition in 16 bits whose smaller operand the larger one absorbs.

    False alarms: A branch that begins near zero on purpose (LayerScale, a zero-initialised adapter) is information: its root mean
    square is below 2^-6.
    """
    for absorbed in _by_place(case.recorded(AbsorbedOperand), "error"):
        also, words = _gradients(absorbed)
        begins_near_zero = absorbed.size is not None and absorbed.size < _LEAST_BRANCH and also is None
        is_fault = absorbed.unchanged >= _MOSTLY and not begins_near_zero
        says, fix, code = _Absorbed.NOTHING_CHANGES, _Absorbed.STREAM_IN_FP32, _Absorbed.CAST
        if absorbed.times > 1:
            # Such a sum has lost most of its terms, although it has changed until it stopped.
            is_fault = True
            says, fix, code = _Absorbed.SUM_STOPS, _Absorbed.SUM_IN_FP32, _Absorbed.ZERO_IN_FP32
        yield _found(absorbed, (says, also), fix.when(is_fault), code.when(is_fault), words, is_mild=not is_fault)


class _Kept(Sentences):
    BUFFER_STOPS = (
        "In step {step}, in {place}, {changes} in {dtype:format} leave {unchanged:percent} of the {sort} {buffer!r} as it was: "
        "they change it by less than half a unit in the last place of its values."
    )
    STOPS = (
        "In step {step}, in {place}, {changes} leave {unchanged:percent} of a tensor unchanged that persists from step to step "
        "in {dtype:format}, such as {such_as}: they change it by less than half a unit in the last place of its values."
    )
    WILL_STOP = (
        "In step {step}, in {place}, {term:.3g} is added to a sum of {total:.4g} that persists from step to step in "
        "{dtype:format}, whose numbers lie {unit:g} apart there: it will not grow beyond about {stops_at:.3g}."
    )
    STATE_STOPS = (
        "In step {step}, in {place}, {changes} leave {unchanged:percent} of the state {buffer!r} as it was, which is in "
        "{dtype:format}: they change it by less than half a unit in the last place of its values."
    )
    ROUNDED = (
        "In step {step}, in {place}, {whose} is mostly rounding, as in a moving average in {dtype:format} whose decay is near 1: "
        "the error of its operators together is {rounded:.3g} times the exact change, and {unchanged:percent} of the elements "
        "are as before."
    )
    STATE_IN_FP32 = (
        "Keep this state in FP32. Optimizer.load_state_dict casts states to the dtype of their parameter: cast them back after "
        "loading."
    )
    STATE = 'state["{buffer}"] = torch.zeros_like(\n    parameter, dtype=torch.float32\n)'
    BUFFER_IN_FP32 = "Keep this buffer in FP32, and add FP32 terms to it."
    BUFFER_SCALED_IN_FP32 = (
        "Keep this buffer in FP32, or compute it from the step's number. A cast of the model casts its buffers too."
    )
    IN_FP32 = "Keep this tensor in FP32, and add FP32 terms to it."
    SCALED_IN_FP32 = "Keep this tensor in FP32, or a schedule's number as a Python float."
    WEIGHT_IN_FP32 = "Keep this weight in FP32, change it there, and cast it where it is used."
    MASTER = "# once\nmaster = weight.detach().float()\n# in each step\nmaster.add_(update)\nweight.copy_(master)"
    NUMBER = "Keep this sum in FP32 or as a Python number; a counter is best an integer."
    REGISTER = 'self.register_buffer(\n    "{name}",\n    torch.zeros(shape, dtype=torch.float32),\n)'
    UNCAST = "# after model.to(dtype)\nbuffer = model.get_buffer({path})\nbuffer.data = buffer.data.float()"
    FLOAT = "# once; or a Python number, such as\n# value = start * rate**step\nvalue = value.float()"
    CAST = (
        "# once\n"
        "average = weight.detach().float().clone()\n"
        "# in each step\n"
        "new = weight.detach().float()\n"
        "average.lerp_(new, 1 - decay)"
    )
    ITEM = "total += loss.item()"


#: In words, the operators that change a tensor by an amount that depends on its own size.
_SCALING = {"mul": "multiplications", "div": "divisions", "pow": "powers", "lerp": "interpolations"}


def _sum_stops(case: Case) -> Iterator[Found]:
    """A moving average, running sum, counter or schedule in 16 bits, an optimizer's state, or a weight that the loop changes,
    that no longer changes, or will not for long, or whose change in a step is mostly rounding.

    False alarms: A sum that is set to zero again in time only rounds its terms. A number at the bound of a clamp is left out.
    That a sum will stop is inferred from one addition a step, and information if it would not within the run.
    """
    flushed = _flushed_lines(case)
    moments = {found.evidence["state"] for found in moments_cannot_decay(case) if not found.is_inferred}
    for frozen in _by_place(case.recorded(FrozenBuffer), "unchanged"):
        buffer = frozen.names[-1]
        if frozen.names[1] in flushed or (_optimizer_of(frozen) and buffer in moments):
            # Another fault names the line, or the state.
            continue
        changes = _SCALING.get(frozen.names[0].strip("_"), "additions")
        is_scaled = changes not in ("additions", "interpolations")
        fix, code = _Kept.BUFFER_IN_FP32.when(buffer) or _Kept.IN_FP32, _Kept.REGISTER.when(buffer) or _Kept.CAST
        if is_scaled:
            fix = _Kept.BUFFER_SCALED_IN_FP32.when(buffer) or _Kept.SCALED_IN_FP32
            code = _Kept.UNCAST.when(buffer) or _Kept.FLOAT
        if frozen.is_weight:
            fix, code = _Kept.WEIGHT_IN_FP32, _Kept.MASTER
        says = _Kept.BUFFER_STOPS.when(buffer) or _Kept.STOPS
        if buffer and _optimizer_of(frozen):
            says, fix, code = _Kept.STATE_STOPS, _Kept.STATE_IN_FP32, _Kept.STATE
        sort = ("buffer", "weight")[frozen.is_weight]
        whose = "the change of a tensor that persists from step to step"
        if buffer:
            whose = f"the change of the {'state' if _optimizer_of(frozen) else sort} {buffer!r}"
        words = {
            "whose": whose,
            "buffer": buffer,
            "sort": sort,
            "name": buffer.rpartition(".")[2],
            "path": quoted(buffer),
            "changes": changes,
            "such_as": ("a moving average", "a schedule or a decaying average")[is_scaled],
        }
        yield _found(frozen, _Kept.ROUNDED.when(frozen.rounded) or says, fix, code, words)
    stopped = {frozen.names[:2] for frozen in case.recorded(FrozenBuffer)}
    for growing in _by_place(case.recorded(GrowingSum), "total"):
        left = (growing.stops_at - growing.total) / growing.term
        stops = left <= case.progress.steps - (growing.step or 0)
        if growing.names[:2] in stopped or (not stops and growing.term % growing.unit == 0):
            # It has stopped, or loses nothing before the run ends.
            continue
        fix, code = _Kept.NUMBER, _Kept.ITEM
        yield _found(growing, _Kept.WILL_STOP, fix, code, is_mild=not stops, is_inferred=True)


class _Flush(Sentences):
    BECOMES_ZERO = (
        "In step {step}, in {place}, {operator} flushes {flushed:percent} of {count:count non-zero result} to zero. Their "
        "exact values are up to {largest:.2g}; FP16 flushes magnitudes of 3e-8 and below."
    )
    TAKEN = "A tensor that persists from step to step takes them."
    CAST = (
        "In step {step}, in {place}, a cast to {dtype:format} flushes {flushed:percent} of {count:count non-zero value} to zero. "
        "They are up to {largest:.2g}; {dtype:format} flushes magnitudes of 2^{edge} and below."
    )
    IN_FP32 = "Compute this operator in FP32, from FP32 inputs, and keep averages and sums of its results in FP32."
    SCALE = "Multiply the values by a scale before the cast, and divide by it after the product."
    FLOAT = "# total in FP32\ntotal += {expression}"
    SCALED = (
        "end = torch.finfo(torch.{type}).max\n"
        "largest = x.abs().amax().clamp(min=1e-30)\n"
        "scale = end / largest\n"
        "x8 = (x.float() * scale).to(torch.{type})\n"
        "y = product(x8.float()) / scale"
    )


def _operator_flushes(case: Case) -> Iterator[Found]:
    """An operator of an optimizer's step, or of values that the loop keeps, most of whose results FP16 flushes; or a cast to FP8
    that flushes nearly all values.

    False alarms: It is measured, from half of the results on. Values that are to be zero in the end, such as updates after the
    training has converged, are reported too. A cast to FP8 is reported if it flushes nine tenths of the values and half of their
    sum.
    """
    yield from _casts_flush(case)
    if any(moments_flushed(case)) or any(epsilon_zero(case)):
        return
    divided = {each.text for each in case.recorded(DividedInHalf)}
    for flushed in _by_place(case.recorded(FlushedResult), "flushed"):
        if flushed.text not in _FP8_TYPES and flushed.names[1] not in divided:
            taken = _Flush.TAKEN.when(not _optimizer_of(flushed))
            words = {"count": int(flushed.elements)}
            yield _found(flushed, (_Flush.BECOMES_ZERO, taken), _Flush.IN_FP32, _Flush.FLOAT, words)


def _casts_flush(case: Case) -> Iterator[Found]:
    """Yield casts to FP8 without a scale."""
    for flushed in _by_place(case.recorded(FlushedResult), "flushed"):
        if flushed.text in _FP8_TYPES:
            edge, type = FORMATS[flushed.text].flush_exponent, _FP8_TYPES[flushed.text]
            words = {"count": int(flushed.elements), "edge": edge, "type": type}
            yield _found(flushed, _Flush.CAST, _Flush.SCALE, _Flush.SCALED, words)


def _flushed_lines(case: Case) -> set[str]:
    return {each.names[1] for each in case.recorded(FlushedResult)} - {""}


class _One(Sentences):
    IS_ONE = (
        "In step {step}, in {place}, the difference of 1 and a number in {dtype:format} is 0: factors above "
        "1 - 2^-{bits} = {most:.6g} are rounded to 1, such as a beta2 of {such_as}. A bias correction or a weight that is "
        "computed from this difference is lost."
    )
    ALL_LOST = "With it nearly no update changes a weight: the model hardly trains."
    PYTHON = "Keep decay factors, and their powers, as Python numbers or in FP32."
    CORRECTION = "# Python numbers\ncorrection = 1 - beta2**step"


def _constant_is_one(case: Case) -> Iterator[Found]:
    """A decay factor in 16 bits that an optimizer's step subtracts from 1, which it equals.

    It is an error if nearly no update changes a weight: a division by the difference gives infinities, and these updates of zero.

    False alarms: That the number was rounded to 1 is inferred. A factor that is 1 on purpose is reported too.
    """
    all_lost = no_weight_changes(case)
    for constant in _by_place(case.recorded(RoundedConstant), "step"):
        bits = SIGNIFICAND_BITS[constant.text] + 1
        words = {"bits": bits, "most": 1 - 2.0**-bits, "such_as": ("0.999", "0.9999")[constant.text == FLOAT16.name]}
        says = (_One.IS_ONE, _One.ALL_LOST.when(all_lost))
        yield _found(constant, says, _One.PYTHON, _One.CORRECTION, words, is_grave=all_lost, is_inferred=True)


class _Left(Sentences):
    ERROR_IS_LEFT = (
        "In step {measured}, in {place}, {operator} leaves mostly rounding error: its {inputs} off by {before:percent}, its "
        "result is off by {off}."
    )
    BREAKS = (
        "From there {broken} in {broken_place} becomes infinite or NaN in {count:count element}, and is finite in FP32."
    )
    ARISES_EARLIER = (
        "In step {measured}, in {origin_place}, {origin_operator} rounds to {origin_dtype:format}, and in {place}, {operator} "
        "leaves mostly that error: its {inputs} off by {before:percent}, its result is off by {off}."
    )
    LARGE_NUMBERS = (
        "In step {step}, in {place}, numbers up to {largest:.4g} in {dtype:format} are subtracted from each other, where "
        "neighbouring numbers lie {unit:g} apart. The differences are multiples of that, {typical:g} in the median: smaller "
        "ones were lost when the numbers became {dtype:format}."
    )
    BEFORE_THE_CAST = (
        "Subtract in int64 or FP64, and cast the difference. For one difference from a fixed origin, subtract that origin before "
        "the cast."
    )
    IN_INT64 = "# x, y in int64 or FP64,\n# as the data have them\ndifference = (x - y).float()"
    OPERANDS_IN_FP32 = "Compute the operands of this difference in FP32, from inputs in FP32."
    INPUT_IN_FP32 = "Compute the input of this operator in FP32, from FP32 values."
    DIFFERENCE = (
        "with torch.autocast({device_type}, enabled=False):\n"
        "    # from inputs in FP32\n"
        "    a = f(x.float())\n"
        "    b = g(x.float())\n"
        "    difference = a - b"
    )


def _rounding_error_left(case: Case) -> Iterator[Found]:
    """An operator whose result is mostly the rounding error of its inputs: a difference that cancels, a sine of a large number, a
    difference of whole numbers that FP32 can't represent, such as Unix times.

    False alarms: It is measured. It is information if no weight's gradient is off by 10% and no infinity or NaN follows from it,
    unless it is a difference in 16 bits in code outside of modules, as of a loss. Of numbers beyond 2^24 in FP32 it is inferred:
    they may be multiples of their distance there by chance.
    """
    first = _first_event(case)
    flushed = _flushed_lines(case)
    others = (each for each in case.recorded(AmplifiedError) if each.names[1] not in flushed)
    for cancelled in _by_place(others, "after"):
        if cancelled.unit:
            yield _found(cancelled, _Left.LARGE_NUMBERS, _Left.BEFORE_THE_CAST, _Left.IN_INT64, is_inferred=True)
            continue
        is_difference = cancelled.names[0].rstrip("_") in ("add", "sub", "rsub")
        also, words = _gradients(cancelled)
        born = _born_from(cancelled, case)
        # The loss's own difference is reported as a value, too, and its remedy is simple.
        is_of_loss = not cancelled.name and is_difference and cancelled.text in SIGNIFICAND_BITS
        is_mild, step = also is None and born is None and not is_of_loss, cancelled.step
        if born is not None:
            place = _place(born)
            words |= {"broken": place["operator"], "broken_place": place["place"], "count": int(born.elements)}
            _, _, step = _beginning(born, first)
        off = f"{cancelled.after:.0%}" if cancelled.after < 10 else "more than 1,000%"
        origin = _origin(cancelled)
        fix = (
            _Born.FROM_ORIGIN_IN_FP32.when(origin) or _Left.OPERANDS_IN_FP32.when(is_difference) or _Left.INPUT_IN_FP32
        )
        is_subtracted = cancelled.names[0].strip("_") in ("sub", "rsub") and not origin
        yield _found(
            cancelled,
            (_Left.ARISES_EARLIER.when(origin) or _Left.ERROR_IS_LEFT, also, _Left.BREAKS.when(born)),
            fix.when(not is_mild),
            (_Left.DIFFERENCE.when(is_difference and not origin) or _Born.CAST_BOTH).when(not is_mild),
            words={
                **words,
                "off": off,
                "inputs": ("input was", "operands were")[is_difference],
                "origin_expression": "f(z.float())",
                **_words_of(origin),
            },
            operator=cancelled.names[0] if is_subtracted else "",
            is_grave=born is not None,
            is_mild=is_mild,
            before=[origin.names[1]] if origin else [],
            step=step,
        )


def _born_from(cancelled: AmplifiedError, case: Case) -> BornInfinite | None:
    """Return an infinity or NaN of the same module and step that the exact computation does not have, for its inputs' errors."""
    return next(
        (
            born
            for born in case.recorded(BornInfinite)
            if not born.largest and (born.name, born.step, born.names[2]) == (cancelled.name, cancelled.step, "forward")
        ),
        None,
    )


class _Integers(Sentences):
    CHANGED = (
        "In step {step}, in {place}, whole numbers pass through {dtype:format} before they become integers, which "
        "changed {changed:.0f} of the {of:.0f}: {exact:.0f} became {given:.0f}."
    )
    APART = "Keep ids, indices and counts in an integer tensor of their own, apart from the values that are cast to 16 bits."
    CAST_THE_REST = "# from the FP32 batch\nids = batch[:, 0].long()\nfeatures = batch[:, 1:].to(torch.{dtype})"


def _integers_rounded(case: Case) -> Iterator[Found]:
    """Ids, indices or counts that pass through a 16-bit format and are made integers again.

    False alarms: It is measured: all were whole numbers before the cast, and some are others after it.
    """
    for changed in _by_place(case.recorded(ChangedIntegers), "changed"):
        yield _found(changed, _Integers.CHANGED, _Integers.APART, _Integers.CAST_THE_REST)


class _Choices(Sentences):
    OTHERS = (
        "In step {step}, in {place}, {choice} of numbers in {dtype:format} makes other integers than in FP32: {changed:.0f} of "
        "{of:.0f}, such as {given:.0f} in place of {exact:.0f}. They are used as indices or weights."
    )
    OTHER_MASK = (
        "In step {step}, in {place}, {choice} decides otherwise of numbers in {dtype:format} than in FP32, in {changed:.0f} of "
        "{of:.0f} elements. The result is used as a mask."
    )
    NO_FRACTION = (
        "{whole:percent} of these numbers have a fraction in FP32 and none in {dtype:format}, so that their floor is their "
        "ceiling."
    )
    CROWDED = (
        "In step {step}, in {place}, {choice} searches a table in {dtype:format}, which has {distinct:.0f} distinct values in "
        "{entries:.0f} entries: the others are never found."
    )
    OF_THEM = "{changed:.0f} of {of:.0f} results differ from FP32's."
    DECIDE_IN_FP32 = (
        "Compute the numbers that decide (positions, distances, scores) in FP32, from FP32 inputs, and cast afterwards."
    )
    TABLE_IN_FP32 = "Compute and keep the table in FP32. A cast of the model casts its buffers too."
    POSITION = "position = x.float() * scale\nlow = position.floor().long()"
    CUMSUM = "# or torch.multinomial\ntable = probabilities.float().cumsum(0)"


#: In words, the operators that make integers.
_COMPARISONS = dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), "a comparison")
_CHOICES = {"_to_copy": "a cast to integers", "max": "a maximum", "min": "a minimum", **_COMPARISONS}


def _choices_differ(case: Case) -> Iterator[Found]:
    """Integers or a mask that rounding decides: the floor of a position, the nearest code, the entry of a cumulative sum.

    False alarms: It is measured, from one integer in twenty on, if they are used in the same step. A choice between near equals,
    such as a maximum of similar scores, may matter little. Of a table that was made before the step it is inferred: it has
    nearly all numbers of its format, and most of them several times.
    """
    by_kind: dict[bool, ChangedChoices] = {}
    for choices in _by_place(case.recorded(ChangedChoices), "changed"):
        by_kind.setdefault(choices.is_of_crowded_table, choices)
    for is_crowded, choices in by_kind.items():
        says = (_Choices.CROWDED, _Choices.OF_THEM.when(choices.of))
        operator = choices.names[0]
        if not is_crowded:
            others = _Choices.OTHER_MASK.when(operator in _COMPARISONS) or _Choices.OTHERS
            says = (others, _Choices.NO_FRACTION.when((choices.whole or 0) >= _MATTERS))
        yield _found(
            choices,
            says,
            _Choices.TABLE_IN_FP32.when(is_crowded) or _Choices.DECIDE_IN_FP32,
            _Choices.CUMSUM.when(is_crowded) or _Choices.POSITION.when(operator == "_to_copy"),
            {"choice": _CHOICES.get(operator, operator)},
            is_inferred=not choices.of,
        )


#: The findings that an infinity of the precision explains.
_OF_BORN = ("non-finite-event", "argument-out-of-range")
FAULTS = (
    Fault(
        "breaks-in-fp32-too",
        "error",
        _breaks_in_fp32_too,
        (_Alike, _Born),
        ("scale-falls-for-forward", "non-finite-event", "argument-out-of-range"),
    ),
    Fault(
        "overflow-in-operator", "warning", _overflow_in_operator, (_Born, LayerInFP32), _OF_BORN, checked=AFTER_BREAK
    ),
    Fault("input-rounded-away", "warning", _input_rounded_away, (_Born, LayerInFP32), _OF_BORN, checked=AFTER_BREAK),
    Fault(
        "integers-rounded",
        "warning",
        _integers_rounded,
        (_Integers,),
        checked=f"{TWICE}, if the cast to 16 bits is in the step too",
    ),
    Fault("choices-differ", "warning", _choices_differ, (_Choices,), checked=TWICE),
    Fault("constant-is-one", "warning", _constant_is_one, (_One,), ("updates-lost",), checked=TWICE),
    Fault("operator-flushes", "warning", _operator_flushes, (_Flush,), checked=TWICE),
    Fault("sum-loses-terms", "warning", _sum_loses_terms, (_Sum, _Gradients), checked=TWICE),
    Fault("addition-changes-nothing", "warning", _addition_changes_nothing, (_Absorbed, _Gradients), checked=TWICE),
    Fault("buffer-stops-changing", "warning", _sum_stops, (_Kept,), checked=TWICE),
    Fault(
        "result-is-rounding-error",
        "warning",
        _rounding_error_left,
        (_Left, _Gradients),
        (*OF_FORWARD, "argument-out-of-range"),
        checked=TWICE,
    ),
)
