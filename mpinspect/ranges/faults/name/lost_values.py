"""Faults that a second computation of a step shows: values that 16 bits lose in sums, additions, flushes and differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice

from mpinspect.numeric.formats import FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT32, FORMATS
from mpinspect.ranges.faults.name.case import SIGNIFICAND_BITS, Case, quoted
from mpinspect.ranges.faults.name.fault import TWICE, Fault, Found
from mpinspect.ranges.faults.name.infinities import Born, beginning, first_event
from mpinspect.ranges.faults.name.operators import (
    CONCENTRATED,
    MATTERS,
    PRODUCTS,
    Gradients,
    by_place,
    found_at,
    gradients_off,
    of_learning_steps,
    optimizer_of,
    origin_of,
    percent_up_to,
    place_of,
)
from mpinspect.ranges.faults.name.own_names import with_cast
from mpinspect.ranges.faults.name.stores import epsilon_zero, moments_cannot_decay, moments_flushed, no_weight_changes
from mpinspect.ranges.records import (
    MOSTLY_ERROR,
    AbsorbedOperand,
    AmplifiedError,
    BornInfinite,
    CastToFP8,
    DividedInHalf,
    ExaminedBatch,
    FlushedResult,
    FrozenBuffer,
    GradientsError,
    GrowingSum,
    LostSum,
    RoundedConstant,
    SaturatedCast,
    StuckNumber,
    WeightGrowth,
)
from mpinspect.ranges.session import SKIPPED, module_named
from mpinspect.reporting.sentences import Sentences

#: A larger lost part of a sum counts as harmful even if the gradients are nearly right.
_MOST_OF_IT = 0.25
#: The share of a sum's elements that do not change, from which on an addition does nothing.
_MOSTLY = 0.5
#: The root mean square of a branch that begins near zero on purpose, as LayerScale and zero-initialised adapters do, is smaller.
_LEAST_BRANCH = 2.0**-6
#: The error of all gradients together, relative to their size, from which on they hardly point anywhere.
_AS_LARGE = 1.0
#: The ids of findings that may follow from steps on wrong gradients, and from differences that are rounding error.
_OF_WRONG_GRADIENTS = ("non-finite-event", "argument-out-of-range")
#: More terms than a model has layers.
_MANY = 128
#: The error of gradients that have hardly a right element left.
_NEARLY_ALL = 0.9
#: Powers of two of FP8's range whose use is worth a sentence.
_UNUSED = 6
#: torch's dtypes of the FP8 formats.
_FP8_TYPES = {FLOAT8_E4M3.name: "float8_e4m3fn", FLOAT8_E5M2.name: "float8_e5m2"}


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

    False alarms: The error is measured, and reported from 3% on. Below 25% the severity is info, unless a weight's gradient is
    off by 10%. Of a backward's sum that error alone counts.
    """
    for lost in by_place(case.recorded(LostSum), "error"):
        also, words = gradients_off(lost)
        # All that a backward's sum does is done to the gradients.
        is_measured = lost.gradients_error is not None and not lost.names[2].startswith("forward")
        is_fault = also is not None or (lost.error >= _MOST_OF_IT and not is_measured)
        operator = lost.names[0].strip("_")
        code = _Sum.CAST_INDEXED.when(operator.startswith(("index", "scatter", "embedding"))) or _Sum.CAST
        code = _Sum.CAST_PUT.when(operator.startswith("index_put")) or code
        fix = _Sum.IN_FP32.when(is_fault)
        is_grave = is_fault and _spoils_gradients(lost, case)
        yield found_at(
            lost,
            (_Sum.LOSES, also),
            fix,
            code.when(is_fault),
            words,
            operator=lost.names[0],
            is_mild=not is_fault,
            is_grave=is_grave,
        )


class _Absorbed(Sentences):
    NOTHING_CHANGES = (
        "In step {step}, in {place}, an addition in {dtype:format} leaves {unchanged:percent} of the elements as they were: the "
        "smaller operand is below half a unit in the last place of the larger one, and {error:percent} of it is lost."
    )
    SUM_STOPS = (
        "In step {step}, in {place}, {times:.0f} additions in {dtype:format} to one sum lose {error:percent} of their terms: "
        "each leaves {unchanged:percent} of the elements unchanged, since the terms are below half a unit in the last place."
    )
    LARGER_IS_OFF = (
        "The larger one was off by {inherited_by} of the smaller one's size before: in {origin_place}, {origin_operator} "
        "rounds it to {origin_dtype:format}."
    )
    SUM_IN_FP32 = "Keep the running sum in FP32, and add FP32 terms to it."
    ZERO_IN_FP32 = "# once\ntotal = total.float()\n# in the loop\ntotal = total + term.float()"
    STREAM_IN_FP32 = "Keep the larger operand, such as a residual stream or a running sum, in FP32, and add in FP32."
    CAST = "# once, before the blocks\nx = x.float()\n# in each block\ny = a.float() + b.float()\nz = g(y)"


def _addition_changes_nothing(case: Case) -> Iterator[Found]:
    """An addition in 16 bits whose smaller operand the larger one absorbs.

    False alarms: A branch that begins near zero on purpose (LayerScale, a zero-initialised adapter) is reported as info: its
    root mean square is below 2^-6.
    """
    for absorbed in by_place(case.recorded(AbsorbedOperand), "error"):
        also, words = gradients_off(absorbed)
        if _is_explained(absorbed, case):
            also = None
        begins_near_zero = absorbed.size is not None and absorbed.size < _LEAST_BRANCH and also is None
        is_fault = absorbed.unchanged >= _MOSTLY and not begins_near_zero
        says: Sentences = _Absorbed.NOTHING_CHANGES
        fix: Sentences = _Absorbed.STREAM_IN_FP32
        code: Sentences = _Absorbed.CAST
        if absorbed.times > 1:
            # It has lost most of its terms, although it may have changed until it stopped. The branches of a model are few.
            is_fault = absorbed.times >= _MANY or not (absorbed.name and begins_near_zero)
            says, fix, code = _Absorbed.SUM_STOPS, _Absorbed.SUM_IN_FP32, _Absorbed.ZERO_IN_FP32
        origin = origin_of(absorbed)
        if origin is not None:
            fix, code = Born.FROM_ORIGIN_IN_FP32, Born.CAST_BOTH
        yield found_at(
            absorbed,
            (says, _Absorbed.LARGER_IS_OFF.when(origin), also),
            fix.when(is_fault),
            code.when(is_fault),
            {**words, "inherited_by": percent_up_to(absorbed.inherited)},
            operator="add" * (origin is None),
            is_mild=not is_fault,
            is_grave=is_fault and _spoils_gradients(absorbed, case),
            origin=origin,
        )


def _is_explained(absorbed: AbsorbedOperand, case: Case) -> bool:
    """Return whether another operator of the step leaves mostly rounding error, which did not arise in this one's module."""
    others = (each for each in case.recorded(AmplifiedError) if each.step == absorbed.step and not each.unit)
    return any(absorbed.name != (origin_of(each) or each).name for each in others)


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
    BUFFER_IN_FP32 = (
        "Keep this buffer in FP32, and add FP32 terms to it. A cast of the model (.to(dtype), Lightning's bf16-true) casts its "
        "buffers too, whatever dtype they were registered in: cast this one back afterwards. A single number can be a "
        "Python float."
    )
    IN_FP32 = "Keep this tensor in FP32, and add FP32 terms to it."
    SCALED_IN_FP32 = "Keep this tensor in FP32, or a schedule's number as a Python float."
    WEIGHT_IN_FP32 = "Keep this weight in FP32, change it there, and cast it where it is used."
    MASTER = "# once\nmaster = weight.detach().float()\n# in each step\nmaster.add_(update)\nweight.copy_(master)"
    STORED_IN_FP32 = "Keep this {sort} in FP32: store the new values without a cast, and cast them where they are used."
    UNCAST_STORE = "# once\nkept = kept.float()\n# in place of the cast\nkept = new_values.float()"
    NUMBER = "Keep this sum in FP32 or as a Python number; a counter is best an integer."
    UNCAST = (
        "# after model.to(dtype), or in\n"
        "# Lightning's on_fit_start\n"
        "buffer = model.get_buffer({path})\n"
        "buffer.data = buffer.data.float()"
    )
    FLOAT = "# once; or a Python number, such as\n# value = start * rate**step\nvalue = value.float()"
    CAST = (
        "# once\n"
        "average = weight.detach().float().clone()\n"
        "# in each step\n"
        "new = weight.detach().float()\n"
        "average.lerp_(new, 1 - decay)"
    )
    ITEM = "total += loss.item()"


_STORED = "new values that are stored"
#: In words, the operators that change a tensor by an amount that depends on its own size.
_SCALING = {
    "mul": "multiplications",
    "div": "divisions",
    "pow": "powers",
    "lerp": "interpolations",
    **dict.fromkeys(("to_copy", "copy"), _STORED),
}


def _sum_stops(case: Case) -> Iterator[Found]:
    """A moving average, running sum, counter, schedule, optimizer's state or loop-updated weight in 16 bits or FP8 that has
    stopped changing, will stop soon, or changes in a step mostly by rounding.

    False alarms: A sum that is reset to zero in time only rounds its terms. A number at the bound of a clamp is left out, and a
    copy of FP32 values that live on, such as masters. A later stop is inferred, assuming one addition a step; if the run ends
    before, the severity is info.
    """
    flushed = _flushed_lines(case)
    moments = {found.evidence["state"] for found in moments_cannot_decay(case) if not found.is_inferred}
    summed = {growing.names[:2] for growing in case.recorded(GrowingSum)}
    for frozen in by_place(case.recorded(FrozenBuffer), "unchanged"):
        buffer = frozen.names[-1]
        if frozen.names[1] in flushed or (optimizer_of(frozen) and buffer in moments):
            # Another fault names the line, or the state.
            continue
        changes = _SCALING.get(frozen.names[0].strip("_"), "additions")
        is_scaled = changes in ("multiplications", "divisions", "powers")
        is_sum = frozen.names[:2] in summed
        fix, code = (_Kept.NUMBER, _Kept.ITEM) if is_sum else (_Kept.IN_FP32, _Kept.CAST)
        if is_scaled:
            fix, code = _Kept.SCALED_IN_FP32, _Kept.FLOAT
        if buffer:
            fix, code = _Kept.BUFFER_IN_FP32, _Kept.UNCAST
        if frozen.is_weight:
            fix, code = _Kept.WEIGHT_IN_FP32, _Kept.MASTER
        elif changes == _STORED:
            fix, code = _Kept.STORED_IN_FP32, _Kept.UNCAST_STORE
        says = _Kept.BUFFER_STOPS.when(buffer) or _Kept.STOPS
        if buffer and optimizer_of(frozen):
            says, fix, code = _Kept.STATE_STOPS, _Kept.STATE_IN_FP32, _Kept.STATE
        sort = ("buffer", "weight")[frozen.is_weight] if buffer else "tensor"
        whose = "the change of a tensor that persists from step to step"
        if buffer:
            whose = f"the change of the {'state' if optimizer_of(frozen) else sort} {buffer!r}"
        words = {
            "whose": whose,
            "buffer": buffer,
            "sort": sort,
            "path": quoted(buffer),
            "changes": changes,
            "such_as": "a sum of losses"
            if is_sum
            else ("a moving average", "a schedule or a decaying average")[is_scaled],
        }
        yield found_at(frozen, _Kept.ROUNDED.when(frozen.rounded) or says, fix, code, words)
    stopped = {frozen.names[:2] for frozen in case.recorded(FrozenBuffer)}
    for growing in by_place(case.recorded(GrowingSum), "total"):
        left = (growing.stops_at - growing.total) / growing.term
        stops = left <= case.progress.steps - growing.step
        if growing.names[:2] in stopped or (not stops and growing.term % growing.unit == 0):
            # It has stopped, or loses nothing before the run ends.
            continue
        buffer = growing.names[-1]
        fix, code = _Kept.BUFFER_IN_FP32.when(buffer) or _Kept.NUMBER, _Kept.UNCAST.when(buffer) or _Kept.ITEM
        words = {"path": quoted(buffer)}
        yield found_at(growing, _Kept.WILL_STOP, fix, code, words, is_mild=not stops, is_inferred=True)


class _Stuck(Sentences):
    STAYS = (
        "In step {measured}, in {place}, {operator} computes a number that the loop keeps from step to step. It was not finite "
        "before the step, and is {broken} now."
    )
    COMPARED = "The loop compares it, and such a comparison has the same result in every step."
    OF_BATCH = (
        "The model's input has infinities or NaNs from step {first} on: such a number, as a count, may normalise it."
    )
    IN_FP32 = "Keep counts, means and sums in FP32 or in integers: FP16 ends at 65504."
    FLOAT = "# where it is made\ncount = torch.zeros((), dtype=torch.float32)"
    SINCE = "The gradients of step {skipped}, which the scaler skipped, were not finite either."
    ONLY_FINITE = "Update such a number with finite values alone, and not in a step that the scaler skips."
    IF_FINITE = "if torch.isfinite(norm):\n    mean = decay * mean + (1 - decay) * norm"


def _number_stays_broken(case: Case) -> Iterator[Found]:
    """A number that the loop keeps, such as a running mean of norms, and that one infinity or NaN has spoilt for good.

    It is an error, and inferred, if a batch was not finite before: by such a count or mean its values are normalised.

    False alarms: A number that is only printed is left out: the loop must compare it, or a number computed from it, or the
    model's input must have infinities or NaNs.
    """
    for stuck in islice(case.recorded(StuckNumber), 1):
        batch = next((each for each in case.recorded(ExaminedBatch) if each.step <= stuck.step), None)
        if not (stuck.is_compared or batch):
            continue
        skipped = [event.step for event in case.events if event.skipped and event.step < stuck.step]
        is_of_range = stuck.text == FLOAT16.name and not stuck.is_nan and not skipped
        yield found_at(
            stuck,
            (
                _Stuck.STAYS,
                _Stuck.COMPARED.when(stuck.is_compared),
                _Stuck.SINCE.when(skipped),
                _Stuck.OF_BATCH.when(batch),
            ),
            _Stuck.IN_FP32.when(is_of_range) or _Stuck.ONLY_FINITE,
            _Stuck.FLOAT.when(is_of_range) or _Stuck.IF_FINITE,
            {
                "broken": ("infinite", "NaN")[stuck.is_nan],
                "skipped": max(skipped, default=0),
                "first": batch and batch.step,
            },
            is_grave=batch is not None,
            is_inferred=batch is not None,
            step=(batch or stuck).step,
        )


class _Flush(Sentences):
    BECOMES_ZERO = (
        "In step {step}, in {place}, {operator} flushes {flushed:percent} of {count:count non-zero result} to zero. Their "
        "exact values are up to {largest:.2g}; FP16 flushes magnitudes of 3e-8 and below."
    )
    TAKEN = "A tensor that persists from step to step takes them."
    READ = "The loop reads a number that is computed from them, such as a norm, as 0; it is {exact:.2g}."
    OF_LOGARITHM = "A logarithm takes them: its result depends on the magnitudes of small values."
    CAST = (
        "In step {step}, in {place}, a cast to {dtype:format} flushes {flushed:percent} of {count:count non-zero value} to zero. "
        "They are up to {largest:.2g}; {dtype:format} flushes magnitudes of 2^{edge} and below."
    )
    ROWS = (
        "In step {step}, in {place}, a cast to {dtype:format} with one scale for all rows flushes nearly all values of "
        "{rows:percent} of the rows to zero: others are so much larger. Its lost inputs are up to {largest:.2g}."
    )
    UNUSED = (
        "The flushed values are {lost:percent} of the sum of magnitudes. The largest value is {unused:.0f} powers of two below "
        "the end of {dtype:format}'s range: a scale that uses them keeps the small ones."
    )
    SPOILS = "With it, the gradients of the weights are off by {off_by} of their size, all together{in_step}."
    SCALE_ROWS = (
        "Scale each row by its own largest magnitude before the cast, and divide the product's rows by the scales."
    )
    IN_FP32 = "Compute this operator in FP32, from FP32 inputs, and keep averages and sums of its results in FP32."
    SCALE = "Multiply the values by a scale before the cast, and divide by it after the product."
    FLOAT = "# total in FP32\ntotal += {expression}"
    WIDE_SUM = "# or t.float() first\nnorm = torch.linalg.vector_norm(\n    t, dtype=torch.float32\n)"
    SCALED = (
        "end = torch.finfo(torch.{type}).max\n"
        "largest = x.abs().amax().clamp(min=1e-30)\n"
        "scale = end / largest\n"
        "x8 = (x.float() * scale).to(torch.{type})\n"
        "y = product(x8.float()) / scale"
    )
    SCALED_ROWS = (
        "end = torch.finfo(torch.{type}).max\n"
        "largest = x.abs().amax(-1, keepdim=True)\n"
        "scale = end / largest.clamp(min=1e-30)\n"
        "x8 = (x.float() * scale).to(torch.{type})\n"
        "y = product(x8.float()) / scale"
    )


class _Taken(Sentences):
    BECOME_ZERO = (
        "In step {step}, in {place}, {operator} flushes {flushed:percent} of {count:count non-zero value} to zero. They are up "
        "to {largest:.2g}; FP16 flushes magnitudes of 3e-8 and below. The optimizer takes zeros for {taken:percent} of its "
        "gradients' sum of magnitudes."
    )
    EMPTIED = "These are most of the gradients of {emptied:.0f} of {weights:.0f} weights."
    WIDER = (
        "Exchange and sum gradients in BF16 or FP32. In FP16 multiply them by a scale before the cast, such as 2^16, and divide "
        "by it in FP32 after the sum."
    )
    TO_BF16 = "gradient.to(torch.bfloat16)"


def _gradients_flush(case: Case) -> Iterator[Found]:
    """Gradients that flush in FP16 between a backward and the optimizer, as in a cast for an exchange between ranks.

    It is an error if half of the gradients' sum of magnitudes becomes zero, or half of the weights lose most of theirs.

    False alarms: The shares are measured, and reported from a tenth of the sum, or of the weights of an optimizer like Adam, on.
    Gradients that a hook of a
    backward casts are left out.
    """
    divided = {each.text for each in case.recorded(DividedInHalf)}
    is_adaptive = any("beta2" in optimizer.settings for optimizer in case.precision.optimizers)
    for flushed in by_place(case.recorded(FlushedResult), "flushed"):
        # Steps of SGD are as small as the gradients.
        is_of_sum = not is_adaptive and (flushed.taken or 0.0) < MATTERS
        if flushed.taken is not None and flushed.names[1] not in divided and not is_of_sum:
            emptied = flushed.emptied * is_adaptive
            is_grave = flushed.taken >= _MOSTLY or emptied >= _MOSTLY * (flushed.weights or 1)
            says = (_Taken.BECOME_ZERO, _Taken.EMPTIED.when(emptied))
            yield found_at(flushed, says, _Taken.WIDER, _Taken.TO_BF16, is_grave=is_grave)


def _operator_flushes(case: Case) -> Iterator[Found]:
    """An operator in FP16 that flushes most of its results, in an optimizer's step or in values that the loop keeps; or a cast to
    FP8 that flushes nearly all values.

    False alarms: The flushed share is measured, and reported from half of the results on. Values that tend to zero, such as
    updates after the training has converged, are reported too. A cast to FP8 is reported if it flushes nine tenths of the values
    and half of their sum; nine tenths of the values of a tenth of the rows of a forward's tensor; or a twentieth of the sum while
    six powers of two of the range above the largest value are unused.
    """
    yield from _casts_flush(case)
    if any(moments_flushed(case)) or any(epsilon_zero(case)):
        return
    divided = {each.text for each in case.recorded(DividedInHalf)}
    for flushed in by_place(case.recorded(FlushedResult), "flushed"):
        if flushed.text not in _FP8_TYPES and flushed.taken is None and flushed.names[1] not in divided:
            taken, code = _Flush.TAKEN.when(not optimizer_of(flushed)), _Flush.FLOAT
            if flushed.exact is not None:
                taken, code = _Flush.READ, _Flush.WIDE_SUM
            if is_of_log := any(flushed.names[3:]):
                taken = _Flush.OF_LOGARITHM
            yield found_at(flushed, (_Flush.BECOMES_ZERO, taken), _Flush.IN_FP32, () if is_of_log else code)


def _casts_flush(case: Case) -> Iterator[Found]:
    """Yield casts to FP8 without a scale, or with one scale for rows of very different magnitudes."""
    for flushed in by_place(case.recorded(FlushedResult), "flushed"):
        if flushed.text in _FP8_TYPES:
            words = {"edge": FORMATS[flushed.text].flush_exponent}
            says, fix, code = _Flush.CAST, _Flush.SCALE, _Flush.SCALED
            if flushed.rows:
                says, fix, code = _Flush.ROWS, _Flush.SCALE_ROWS, _Flush.SCALED_ROWS
            unused = _Flush.UNUSED.when(not flushed.rows and flushed.unused >= _UNUSED)
            yield _of_cast(flushed, case, (says, unused), fix, code, words)


def _of_cast(
    cast: FlushedResult | SaturatedCast,
    case: Case,
    says: tuple[Sentences | None, ...],
    fix: Sentences,
    code: Sentences,
    words: Mapping[str, object],
) -> Found:
    """Return the occurrence of a cast to FP8 that loses values, with the error of the gradients if it begins at its line."""
    worst = max(_begins_at({cast.names[1]} - {""}, case), key=lambda each: each.error, default=None)
    error, step = (worst.error, worst.step) if worst else (0.0, cast.step)
    in_step = "" if step == cast.step else f", in step {step}"
    words = {"type": _FP8_TYPES[cast.text], "off_by": percent_up_to(error), "in_step": in_step, **words}
    is_grave = error >= _NEARLY_ALL or bool(optimizer_of(cast) and case.has(WeightGrowth))
    return found_at(cast, (*says, _Flush.SPOILS.when(error)), fix, code, words, is_grave=is_grave)


def _begins_at(lines: set[str], case: Case) -> Iterator[GradientsError]:
    """Yield the errors of gradients that begin at one of these lines of casts to FP8, or, in FP8, at no known line."""
    for each in case.recorded(GradientsError):
        origin = origin_of(each)
        places = {each.names[1], origin.names[1] if origin else ""} - {""}
        is_of_casts = lines and not places and each.text in _FP8_TYPES
        if each.error >= _MOSTLY and (is_of_casts or not lines.isdisjoint(places)):
            yield each


def _lines_of_fp8(case: Case) -> set[str]:
    """Return the lines that lose values in FP8."""
    flushed = {each.names[1] for each in case.recorded(FlushedResult) if each.text in _FP8_TYPES}
    return (flushed | {each.names[1] for each in case.recorded(SaturatedCast)}) - {""}


class _Saturated(Sentences):
    CUT = (
        "In step {step}, in {place}, {operator} cuts {saturated:percent} of the values off at {bound:g}, the largest number of "
        "{dtype:format}, and {lost:percent} of their sum of magnitudes is lost. They are up to {largest:.4g}: their scale is "
        "too large."
    )
    CURRENT_SCALE = "Compute the scale from the tensor that is cast, or from its largest magnitude in the last steps."


def _cast_saturates(case: Case) -> Iterator[Found]:
    """A clamp before a cast to FP8 that cuts off a part of the values, since their scale is too large for them.

    False alarms: The cut is measured, and reported from 5% of the sum of magnitudes on. Some trainings converge in spite of it.
    """
    for clamp in by_place(case.recorded(SaturatedCast), "lost"):
        yield _of_cast(clamp, case, (_Saturated.CUT,), _Saturated.CURRENT_SCALE, _Flush.SCALED, {})


class _Overflows(Sentences):
    NOT_BOUNDED = (
        "In step {step} the {phase} of {module} became infinite or NaN from finite values. It casts to {dtype:format} ({line}), "
        "where magnitudes beyond {end:g} become infinite or NaN, and nothing bounds the values before that cast."
    )
    CLAMP = (
        "Clamp the scaled values to the format's range before the cast, and compute the scale from the tensor itself where its "
        "magnitudes may rise faster than their history."
    )
    CLAMPED = "end = torch.finfo(torch.{type}).max\nx8 = (x.float() * scale).clamp(-end, end)\nx8 = x8.to(torch.{type})"


def _cast_overflows(case: Case) -> Iterator[Found]:
    """A cast to FP8 without a clamp in the module, and the phase, where finite values became infinite or NaN.

    False alarms: That the cast made them is inferred. Whether torch itself bounds a cast to E4M3 depends on its version, and is
    measured. Steps that a scaler skipped are left out.
    """
    unbounded = [each for each in case.recorded(CastToFP8) if not each.is_bounded]
    event = next((each for each in case.events if each.story != SKIPPED), None)
    if event is None or event.given:
        return
    # The module of a backward is unknown where its forward computes in FP32 alone.
    of_phase = [each for each in unbounded if each.names[2] == event.phase and each.name in ("", event.module)]
    cast = max(of_phase, key=lambda each: each.name, default=None)
    if cast is not None:
        words = {
            "type": _FP8_TYPES[cast.text],
            "module": module_named(event.module),
            "end": FORMATS[cast.text].max_finite,
            "phase": event.phase,
        }
        says, fix, code = _Overflows.NOT_BOUNDED, _Overflows.CLAMP, _Overflows.CLAMPED
        yield found_at(cast, says, fix, code, words, layer=event.module, is_inferred=True, step=event.step)


def _flushed_lines(case: Case) -> set[str]:
    return {each.names[1] for each in case.recorded(FlushedResult)} - {""}


class _One(Sentences):
    IS_ONE = (
        "In step {step}, in {place}, the difference of 1 and a number in {dtype:format} is 0: factors above "
        "1 - 2^-{bits} = {most:.6g} are rounded to 1, such as a beta2 of {such_as}. A bias correction or a weight that is "
        "computed from this difference is lost."
    )
    ARE_ONE = (
        "In step {measured}, in {place}, {elements:.0f} of {of:.0f} differences of 1 and a factor that a parameter gives are 0 "
        "in {dtype:format}, and not in FP32: factors above 1 - 2^-{bits} = {most:.6g} are rounded to 1. What such a "
        "factor should let through is lost."
    )
    ALL_LOST = "With it nearly no update changes a weight: the model hardly trains."
    PYTHON = "Keep decay factors, and their powers, as Python numbers or in FP32."
    IN_FP32 = "Compute the factors, and their differences from 1, in FP32."
    DIFFERENCE = "# the factor in FP32, without a cast\nrest = 1 - factor"
    CORRECTION = "# Python numbers\ncorrection = 1 - beta2**step"


def _constant_is_one(case: Case) -> Iterator[Found]:
    """Decay factors that round to 1 in 16 bits, so that an optimizer's step, or a layer, computes 1 - factor as zero.

    It is an error if nearly no update changes a weight: dividing by that zero gives infinities, and then updates of zero.

    False alarms: That the number was rounded to 1 is inferred. A factor that is 1 on purpose is reported too.
    """
    all_lost = no_weight_changes(case)
    for constant in by_place(case.recorded(RoundedConstant), "elements"):
        bits = SIGNIFICAND_BITS[constant.text] + 1
        words = {"bits": bits, "most": 1 - 2.0**-bits, "such_as": ("0.999", "0.9999")[constant.text == FLOAT16.name]}
        if not optimizer_of(constant):
            yield found_at(constant, _One.ARE_ONE, _One.IN_FP32, _One.DIFFERENCE, words)
            continue
        says = (_One.IS_ONE, _One.ALL_LOST.when(all_lost))
        yield found_at(constant, says, _One.PYTHON, _One.CORRECTION, words, is_grave=all_lost, is_inferred=True)


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
    ERROR_IS_RAISED = (
        "In step {measured}, in {place}, {operator} multiplies an error by {times:.0f}: its {inputs} off by "
        "{before:percent}, its result is off by {off}."
    )
    RAISES_EARLIER = (
        "In step {measured}, in {origin_place}, {origin_operator} rounds to {origin_dtype:format}, and in {place}, {operator} "
        "multiplies that error by {times:.0f}: its {inputs} off by {before:percent}, its result is off by {off}."
    )
    SIGN_OF_ZERO = (
        "In step {measured}, in {place}, a sign is 0 for numbers that were flushed to zero: in FP32 they differ from it, and the "
        "signs are off by {off}."
    )
    SCALE_FIRST = (
        "Compute the argument of the sign in FP32. If it is a gradient, multiply the loss by a loss scale before it is taken: "
        "that changes no sign."
    )
    SCALED = "(gradient,) = torch.autograd.grad(\n    loss * 2.0**14, x\n)"
    LARGE_NUMBERS = (
        "In step {step}, in {place}, numbers up to {largest:.4g} in {dtype:format} are subtracted from each other, where "
        "neighbouring numbers lie {unit:g} apart. The differences are multiples of that, {typical:g} in the median: smaller "
        "ones were lost when the numbers became {dtype:format}."
    )
    CLOSE_TOGETHER = (
        "In step {step}, in {place}, numbers up to {largest:.4g} in {dtype:format} have a centre subtracted. Neighbouring "
        "numbers lie {unit:g} apart there, and the differences have a root mean square of {typical:.2g}: what distinguishes the "
        "numbers was lost when they became {dtype:format}."
    )
    BEFORE_THE_HALF = "Subtract in FP32, before the numbers are cast to {dtype:format}, and cast the difference."
    STANDARDISED = "# where they are made, in FP32\nvalues = (values - mean) / std\nvalues = values.to(torch.{dtype})"
    BEFORE_THE_CAST = (
        "Subtract before the numbers are cast to {dtype:format}, in int64 or FP64, and cast the difference."
    )
    IN_INT64 = "# the same on the data in int64 or FP64\n{cast_difference}"
    OPERANDS_IN_FP32 = "Compute the operands of this difference in FP32, from inputs in FP32."
    INPUT_IN_FP32 = "Compute the input of this operator in FP32, from FP32 values."
    ORIGIN_IN_FP32 = "Compute {origin_operator} in FP32 in {origin_place}, and keep its result in FP32."
    DIFFERENCE = (
        "with torch.autocast({device_type}, enabled=False):\n"
        "    # from inputs in FP32\n"
        "    a = f(x.float())\n"
        "    b = g(x.float())\n"
        "    difference = a - b"
    )


def _rounding_error_left(case: Case) -> Iterator[Found]:
    """An operator whose result is mostly the rounding error of its inputs: a difference that cancels, a sine of a large number, a
    difference of whole numbers that FP32 can't represent, such as Unix times. Or the operator that enlarged an error most, if the
    gradients are off by as much as their size and nothing else explains it.

    False alarms: The error is measured. The severity is info if no weight's gradient is off by 10% and no infinity or NaN
    follows, except for a difference in 16 bits outside of modules, as in a loss. The finding is inferred for data of 16 bits with
    fractions, and beyond 2^24 in FP32: the numbers may be multiples of the format's spacing by chance.
    """
    first = first_event(case)
    flushed = _flushed_lines(case)
    of_fp8 = _lines_of_fp8(case)
    others = (
        each
        for each in case.recorded(AmplifiedError)
        if each.names[1] not in flushed and not ((origin := origin_of(each)) and origin.names[1] in of_fp8)
    )
    for cancelled in by_place(others, "after", most=1.0):
        if cancelled.unit:
            yield _of_rounded_numbers(cancelled, case)
            continue
        operator = cancelled.names[0].rstrip("_")
        is_loss, is_difference = operator.endswith("_loss"), operator in ("add", "sub", "rsub")
        also, words = gradients_off(cancelled)
        born, origin = _born_from(cancelled, case), origin_of(cancelled)
        # The loss's own difference is reported as a value, too, and its remedy is simple.
        is_of_loss = not cancelled.name and is_difference and cancelled.text in SIGNIFICAND_BITS
        is_mild, step = also is None and born is None and not is_of_loss, cancelled.step
        # FP8's errors of 4% a number are large beside any difference of results, and most such trainings converge.
        is_mild |= born is None and any(
            each.step == step and each.text in _FP8_TYPES and each.error < _AS_LARGE
            for each in case.recorded(GradientsError)
        )
        if born is not None:
            place = place_of(born)
            words |= {"broken": place["operator"], "broken_place": place["place"], "count": int(born.elements)}
            _, _, step = beginning(born, first)
        says, fix, code = _left_in_words(cancelled, origin, is_difference, is_loss)
        is_subtracted = cancelled.names[0].strip("_") in ("sub", "rsub") and not origin
        yield found_at(
            cancelled,
            (says, also, _Left.BREAKS.when(born)),
            fix.when(not is_mild),
            code.when(not is_mild),
            words={
                **words,
                "off": percent_up_to(cancelled.after),
                "times": cancelled.before and cancelled.after / cancelled.before,
                "inputs": ("input was", "operands were")[is_difference or is_loss],
                **({"operator": f"the difference in {operator}"} if is_loss else {}),
            },
            operator=cancelled.names[0] * is_subtracted,
            is_grave=born is not None,
            is_mild=is_mild,
            origin=origin,
            step=step,
        )


def _of_rounded_numbers(cancelled: AmplifiedError, case: Case) -> Found:
    """Return the occurrence of a difference of numbers that were rounded before the step."""
    source = case.session.source_of(cancelled.names[1])
    own = {"cast_difference": with_cast(source) or "difference = (x - y).float()"}
    sentences = (_Left.LARGE_NUMBERS, _Left.BEFORE_THE_CAST, _Left.IN_INT64)
    if cancelled.text in SIGNIFICAND_BITS:
        sentences = (_Left.CLOSE_TOGETHER, _Left.BEFORE_THE_HALF, _Left.STANDARDISED)
    return found_at(cancelled, *sentences, own, is_inferred=True)


def _left_in_words(
    cancelled: AmplifiedError, origin: AmplifiedError | None, is_difference: bool, is_loss: bool
) -> tuple[Sentences, Sentences, Sentences]:
    """Return the sentence on an error, the change and its code; ``origin``: the earlier operator that made the error."""
    if cancelled.names[0] == "sign":
        return _Left.SIGN_OF_ZERO, _Left.SCALE_FIRST, _Left.SCALED
    from_origin = _Left.ORIGIN_IN_FP32 if cancelled.names[2] == "backward" else Born.FROM_ORIGIN_IN_FP32
    fix = from_origin.when(origin) or _Left.OPERANDS_IN_FP32.when(is_difference or is_loss) or _Left.INPUT_IN_FP32
    earlier, alone = _Left.ARISES_EARLIER, _Left.ERROR_IS_LEFT
    if cancelled.after < MOSTLY_ERROR:
        earlier, alone = _Left.RAISES_EARLIER, _Left.ERROR_IS_RAISED
    code = _Left.DIFFERENCE.when((is_difference or is_loss) and not origin) or Born.CAST_BOTH
    return earlier.when(origin) or alone, fix, code


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


class _Inaccurate(Sentences):
    MOSTLY_ERROR = (
        "In step {step} the gradients of the weights are mostly rounding error: all together they are off by {off_by} of their "
        "size, and {off:.0f} of {of:.0f} by half of it or more."
    )
    OUTPUTS = "In step {step} the model's outputs are mostly rounding error: they are off by {off_by} of their size."
    OUTPUTS_OFF = "In step {step} rounding puts the model's outputs off by {off_by} of their size."
    OF_RANK = "In step {step} this rank's gradients are mostly rounding error: they are off by {off_by} of their size."
    GROWS = "The errors grow most in {place}, in {operator}."
    ORIGIN = "They begin in {origin_place}, where {origin_operator} rounds to {origin_dtype:format}."
    SPREAD = "The errors grow in many layers alike, as those of deep networks with BatchNorm do when a training starts."
    LINE_IN_FP32 = "Compute this line in FP32, from values that were never rounded to {dtype:format}."
    FINER = (
        "Keep what is cast in {origin_place} in 16 bits. Or subtract before the cast what its values have in common, such as "
        "their mean over a sequence, where only differences matter."
    )
    SIXTEEN_BITS = "x = x.to(torch.bfloat16)"


def _gradients_inaccurate(case: Case) -> Iterator[Found]:
    """Gradients of the weights that are mostly rounding error, with the line at which the errors grow most; in an inference,
    outputs of the model that rounding puts off by 10% or more.

    It is an error if they are off by as much as their size, and an info if the errors grow in many layers alike: no line is to
    blame, and most such trainings recover.

    False alarms: Gradients that cancel over a batch are small beside their rounding. So a step is left out if its gradients are
    smaller than a tenth of another step's, as in a model that has converged, and if the errors grow in the sums over the batch.
    """
    learning = of_learning_steps(each for each in case.recorded(GradientsError) if each.text != FLOAT32.name)
    large = (
        each
        for each in learning
        if each.error >= (MATTERS if each.of_outputs else _MOSTLY)
        # The operands were right: over the batch their products cancel, as at an optimum.
        and not (each.names[2] == "backward" and each.names[0] in PRODUCTS)
    )
    # Other faults name the gradients that the backward or the loop flushed.
    first = next((each for each in large if each.zeroed < _MOSTLY or (each.name and each.names[2] == "forward")), None)
    if first is None:
        return
    kinds: tuple[type[LostSum | AbsorbedOperand | AmplifiedError], ...] = (LostSum, AbsorbedOperand, AmplifiedError)
    if any(each.step == first.step and gradients_off(each)[0] for kind in kinds for each in case.recorded(kind)):
        return
    if any(each.step == first.step and each.did_harm for each in case.recorded(BornInfinite)):
        return
    if first in _begins_at(_lines_of_fp8(case), case):
        # Other faults name the cast.
        return
    off_by = {"off_by": percent_up_to(first.error)}
    mostly: Sentences = _Inaccurate.MOSTLY_ERROR.when(first.of) or _Inaccurate.OF_RANK
    if first.of_outputs:
        mostly = _Inaccurate.OUTPUTS.when(first.error >= _MOSTLY) or _Inaccurate.OUTPUTS_OFF
    origin = origin_of(first)
    # Gradients of FP8 trainings that converge are off by up to three quarters.
    is_of_fp8 = origin is not None and origin.text in _FP8_TYPES and first.error >= _AS_LARGE
    if first.share < CONCENTRATED and not is_of_fp8:
        yield found_at(first, (mostly, _Inaccurate.SPREAD), (), (), off_by, severity="info", layer="")
        return
    says = (mostly, _Inaccurate.GROWS, _Inaccurate.ORIGIN.when(origin))
    fix = _Inaccurate.FINER.when(is_of_fp8) or Born.FROM_ORIGIN_IN_FP32.when(origin) or _Inaccurate.LINE_IN_FP32
    code = _Inaccurate.SIXTEEN_BITS.when(is_of_fp8) or Born.CAST_BOTH.when(origin) or Born.CAST_INPUTS
    words, is_grave = {**off_by}, first.error >= _AS_LARGE
    operator = first.names[0] * (origin is None)
    yield found_at(first, says, fix, code, words, is_grave=is_grave, operator=operator, origin=origin)


def _spoils_gradients(record: LostSum | AbsorbedOperand, case: Case) -> bool:
    """Return whether an operator's line is the one that makes the gradients of its step as wrong as they are large."""
    return any(
        each.error >= _AS_LARGE
        and each.share >= CONCENTRATED
        and (each.step, each.names[1]) == (record.step, record.names[1])
        for each in case.recorded(GradientsError)
    )


#: The ids of findings that may follow from values that a cast to FP8 loses, or from an optimizer's that it loses.
_OF_CASTS = ("gradients-all-zero", "result-is-rounding-error", "weights-exploded", "training-diverged")
#: A fault that only a step computed twice can show, as all of these are.
_checked_twice = partial(Fault, checked=TWICE)
FAULTS = (
    _checked_twice("constant-is-one", "warning", _constant_is_one, (_One,), ("updates-lost",)),
    _checked_twice(
        "gradients-flushed-before-step",
        "warning",
        _gradients_flush,
        (_Taken,),
        ("gradients-zeroed", "gradients-all-zero"),
        is_of_every_step=True,
    ),
    _checked_twice(
        "kept-number-not-finite",
        "warning",
        _number_stays_broken,
        (_Stuck,),
        ("batch-not-finite", "non-finite-event", "breaks-in-fp32-too"),
    ),
    _checked_twice("operator-flushes", "warning", _operator_flushes, (_Flush,), _OF_CASTS, is_of_every_step=True),
    _checked_twice(
        "cast-saturates", "warning", _cast_saturates, (_Saturated, _Flush), _OF_CASTS, is_of_every_step=True
    ),
    _checked_twice("cast-overflows", "error", _cast_overflows, (_Overflows,), ("non-finite-event",)),
    _checked_twice("sum-loses-terms", "warning", _sum_loses_terms, (_Sum, Gradients), _OF_WRONG_GRADIENTS),
    _checked_twice(
        "addition-changes-nothing", "warning", _addition_changes_nothing, (_Absorbed, Gradients), _OF_WRONG_GRADIENTS
    ),
    _checked_twice("buffer-stops-changing", "warning", _sum_stops, (_Kept,)),
    _checked_twice(
        "result-is-rounding-error", "warning", _rounding_error_left, (_Left, Gradients), _OF_WRONG_GRADIENTS
    ),
    _checked_twice(
        "gradients-inaccurate",
        "warning",
        _gradients_inaccurate,
        (_Inaccurate, Born),
        _OF_WRONG_GRADIENTS,
        heading="Gradients or outputs are mostly rounding error",
    ),
)
