"""Faults by which gradients never become updates: no step, zeros in their place, gradients of earlier steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mpinspect.numeric.formats import BFLOAT16, FLOAT16
from mpinspect.ranges import records
from mpinspect.ranges.analysis.precision import run_format
from mpinspect.ranges.faults.name.case import MOST_LEFT_OVER, SIGNIFICAND_BITS, Case, FP32Weights, grouped
from mpinspect.ranges.faults.name.fault import MOST_NAMES, Fault, Found
from mpinspect.ranges.faults.name.forward import Inspect, where_to_inspect
from mpinspect.ranges.faults.name.replaced import is_broken_by_loop
from mpinspect.reporting.sentences import Said, Sentences
from mpinspect.reporting.words import filled

#: Fewest backwards without an update that count as a training that never updates.
_FEWEST_BACKWARDS = 3
#: The least average number of backwards in a step, relative to those of steps that lose some.
_USUALLY = 0.9
#: Fewest steps that must leave the weights as they are.
_FEWEST_STILL = 8
#: Fewest backwards per step, on average, that count as several micro-batches.
_SEVERAL = 1.5
#: Shares of an optimizer's steps, up to the run's end, at a learning rate of 0: more than a schedule's natural end has, and
#: enough for a warning.
_SOME_STILL, _MUCH_STILL = 0.05, 0.25
#: The same at learning rates that are low but not 0.
_MOSTLY_LOW = 0.5
#: A smaller factor makes gradients too small to learn from, unless the largest one still has this magnitude, as after a clip of
#: enormous gradients.
_NOTHING, _SOMETHING = 1e-6, 1e-4


# -- no update ----------------------------------------------------------------------------------------------------------


class _Never(Sentences):
    NO_STEP = (
        "None of {backwards:.0f} backwards led to an update: no step{of_optimizer} was seen, and the weights have not changed "
        "since the start."
    )
    MAY_SKIP_ALL = "Gradients were infinite or NaN: a loop that skips such steps by itself may skip all."
    KEPT_BROKEN = (
        "The gradients of {kept_broken:count weight} hold infinities or NaNs and were never zeroed. Each backward adds to them, "
        "so that a loop that skips such steps never finds finite ones again, whatever the loss scale."
    )
    NOT_COPIED = (
        "The optimizer stepped masters, copies of the weights, in {steps:.0f} steps, and the model's weights have not changed "
        "since the start: the updates never reach the model."
    )
    SMALLER_SCALE = "Take a smaller loss scale, or let torch.amp.GradScaler find one."
    ZERO_FIRST = "Zero the gradients before each backward, also after a step that the loop skips."
    ZERO = "# before {last_backward}\noptimizer.zero_grad()"
    LET_SCALER_STEP = "Let the scaler step the optimizer of these weights after their backward."
    STEP = "Call the optimizer's step after the backward; see that it holds these weights."
    COPY = (
        "Copy the masters into the weights themselves after each step. Casts by .float(), .half() or .to() return another "
        "tensor: a value written to it never reaches the weight."
    )
    SCALER_STEP = "# after {last_backward}\n# before the scaler's one update()\nscaler.step(optimizer)"
    OPTIMIZER_STEP = "# after {last_backward}\noptimizer.step()"
    COPY_LOOP = (
        "# after {at_step}\n"
        "weights = model.parameters()\n"
        "with torch.no_grad():\n"
        "    for p, master in zip(weights, masters):\n"
        "        p.copy_(master)"
    )


def _never_updated(case: Case) -> Iterator[Found]:
    """Backwards without any update of the weights, or updates of masters that never reached the weights.

    False alarms: A script that only reads gradients is reported if it has an optimizer or a scaler, from three backwards on.
    A run whose steps a scaler skipped is not: other findings cover it.
    """
    for measured in case.recorded(records.NeverUpdated):
        if measured.backwards >= _FEWEST_BACKWARDS and not case.progress.skipped_steps:
            yield _no_step(measured, case)
    for masters in case.recorded(records.MastersNotCopied):
        yield Found.of(case, [masters], _Never.NOT_COPIED, _Never.COPY, _Never.COPY_LOOP, step=None)


def _no_step(measured: records.NeverUpdated, case: Case) -> Found:
    broke = next((event for event in case.events if event.gradients_finite is False), None)
    words: dict[str, object] = {}
    fix: Sentences = _Never.LET_SCALER_STEP.when(case.scalers) or _Never.STEP
    if broke is not None:
        fix = _Never.SMALLER_SCALE
        if broke.forward_finite is False:
            fix, words = where_to_inspect(broke, case.session)
    code: Sentences = _Never.SCALER_STEP.when(case.scalers or broke) or _Never.OPTIMIZER_STEP
    if measured.kept_broken:
        fix, code = _Never.ZERO_FIRST, _Never.ZERO
        words["kept_broken"] = int(measured.kept_broken)
    may_skip = _Never.KEPT_BROKEN.when(measured.kept_broken) or _Never.MAY_SKIP_ALL.when(broke)
    return Found(
        (_Never.NO_STEP, may_skip),
        {"backwards": measured.backwards, "optimizers": list(measured.names)},
        {**words, "of_optimizer": filled(" of its optimizer ({})", " and ".join(dict.fromkeys(measured.names)))},
        fix,
        code,
    )


class _Stopped(Sentences):
    STOPPED = (
        "No optimizer step followed step {last_step}: {backwards:.0f} backwards have run since, and each step before had at most "
        "{most:.0f}."
    )
    MAY_ADD_UP = (
        "A loop that skips a step without zeroing the gradients adds each backward to the last one, so that a limit which they "
        "exceeded once is exceeded ever after."
    )
    ZERO_FIRST = (
        "Zero the gradients before each backward, also after a skipped step. See why the first step was skipped."
    )
    LEFT = (
        "No backward followed the last {forwards:.0f} forwards of the model, from step {step} on ({places}). Earlier forwards "
        "from there had one: the loop leaves the step between forward and backward."
    )
    READ_THE_NUMBER = (
        "Print the number by which the loop decides that, such as a divergence, a norm or a loss. Compute it and its inputs in "
        "FP32: in 16 bits the difference of large numbers is mostly rounding error."
    )
    ZERO_FIRST_IN_LOOP = "# first in the loop, before any continue\n# and before {at_forward}\noptimizer.zero_grad()"


def _steps_stopped(case: Case) -> Iterator[Found]:
    """Backwards that go on after the optimizer has stepped for the last time, or forwards after the last backward.

    False alarms: A script that reads many gradients after its training, such as attributions, is reported, and one that evaluates
    with gradients enabled in the function that trains.
    """
    for left in case.recorded(records.ForwardsLeft):
        yield Found(
            _Stopped.LEFT,
            {"forwards": left.forwards, "line": left.names[-1] if left.names else ""},
            {"places": ", called at ".join(filter(None, left.names)), "step": left.step},
            _Stopped.READ_THE_NUMBER,
            step=left.step,
            is_inferred=True,
        )
    for measured in case.recorded(records.StepsStopped):
        # Gradients that are cleared may be of an attribution.
        if not measured.cleared:
            yield Found(
                (_Stopped.STOPPED, _Stopped.MAY_ADD_UP),
                {"backwards": measured.backwards, "most": measured.most},
                {"last_step": measured.step - 1},
                _Stopped.ZERO_FIRST,
                _Stopped.ZERO_FIRST_IN_LOOP,
                step=measured.step,
                is_inferred=True,
            )


class _Still(Sentences):
    UNCHANGED = (
        "The weights have not changed after step {step}, although {optimizer} stepped {steps:count time} since with a learning "
        "rate other than 0."
    )
    SAME_LOSS = "The loss is {loss:.6g} to the last bit in all {losses:.0f} measured steps since."
    LINE_SEARCH = (
        "Its line search finds no smaller loss: the forward is computed in {format:format}, where the losses and gradients of "
        "near points differ by rounding alone."
    )
    FP32_CLOSURE = "Compute the closure in FP32: L-BFGS needs exact losses and gradients."
    READ_UPDATE = "Read one update: the gradients, the learning rate, and the spacing of the weights' dtype."
    CLOSURE = (
        "# in the closure, in place of {forward_at}\n"
        "with torch.autocast({device_type}, enabled=False):\n"
        "    output = model(x.float())"
    )


class _Rate(Sentences):
    ZERO = (
        "The learning rate of {optimizer} was 0 in the last {steps:.0f} of its {of:.0f} steps, from step {step} on: these steps "
        "change no weight."
    )
    FALLEN = (
        "The weights stand still from step {step} on, in the last {steps:.0f} of {of:.0f} steps, since the learning rate of "
        "{optimizer} has fallen from {highest:.3g} to {latest:.3g} and is at most 1e-4 of its highest value in these steps. The "
        "weights have gradients, but change by {moved:.1g} of their norm after step {compared:.0f}."
    )
    OF_THE_RATE = "Another precision does not change that."
    READS_16_BITS = (
        "The loop reads a number in {dtype:format} ({line}), whose neighbours lie {apart:percent} apart: a "
        "ReduceLROnPlateau that waits for this number to fall does not see smaller progress."
    )
    NUMBER_IN_FP32 = (
        "Compute the number that a schedule waits for in FP32, from FP32 values. Step a schedule that counts epochs once per "
        "epoch."
    )
    METRIC = "# {line}, before it is averaged\nerror = output.float() - target.float()"
    ALWAYS_ZERO = "The learning rate of {optimizer} was 0 in all of its {of:.0f} steps: they change no weight."
    BACKWARDS = (
        "A step has {backwards:.3g} backwards on average: a scheduler that steps once per backward ends too early."
    )
    SET_TOTAL = (
        "Let the scheduler step once per optimizer step, and make it for the number of optimizer steps in the whole run: a "
        "scheduler that steps once per micro-batch or once per process, or a total that is too small, reaches 0 early."
    )
    SET_UNIT = (
        "Step a schedule that counts epochs once per epoch, after the loop over the batches. Make one that counts steps for the "
        "number of optimizer steps in the whole run."
    )
    SET_RATE = (
        "See that the schedule, or the factor that multiplies the initial learning rate, is not 0 from the start."
    )
    ONE_STEP = "# per update, not per micro-batch:\n# after {at_step}\nscheduler.step()"
    ONE_EPOCH = "# once per epoch, not per update:\n# after the loop over the batches\nscheduler.step()"
    READ = 'for group in optimizer.param_groups:\n    print(group["lr"])'


def _rate_is_low(case: Case) -> Iterator[Found]:
    """Yield the optimizers whose learning rate was 0, or low, up to the run's end; each class once, not per rank."""
    fallen = {each.text: each for each in case.recorded(records.RateFallen) if each.steps >= _MOSTLY_LOW * each.of}
    read = next(case.recorded(records.ReadNumber), None)
    for low in fallen.values():
        words: dict[str, object] = {"optimizer": low.text}
        if read is None or not low.by_metric:
            alone = (_Rate.FALLEN, _Rate.OF_THE_RATE)
            yield Found.of(case, [low], alone, _Rate.SET_UNIT, _Rate.ONE_EPOCH, words=words)
            continue
        words |= {"dtype": read.text, "line": read.names[1], "apart": 2.0 ** (1 - SIGNIFICAND_BITS[read.text])}
        both = (_Rate.FALLEN, _Rate.READS_16_BITS)
        yield Found.of(case, [low], both, _Rate.NUMBER_IN_FP32, _Rate.METRIC, words=words, is_inferred=True)
    found = {each.text: each for each in case.recorded(records.RateZero) if each.steps > _SOME_STILL * each.of}
    backwards = case.progress.backwards / max(case.progress.steps, 1)
    for each in found.values():
        says: Said = (_Rate.ZERO, _Rate.BACKWARDS.when(backwards >= _SEVERAL))
        fix, code = _Rate.SET_TOTAL, _Rate.ONE_STEP
        if each.steps == each.of:
            says, fix, code = _Rate.ALWAYS_ZERO, _Rate.SET_RATE, _Rate.READ
        words = {"optimizer": each.text, "backwards": backwards}
        is_mild = each.steps < _MUCH_STILL * each.of
        yield Found.of(case, [each], says, fix, code, words=words, is_mild=is_mild)


def _stands_still(case: Case) -> Iterator[Found]:
    """FP32 weights that no step changes any more up to the run's end, in a run that computes in 16 bits; learning rates of 0, or
    nearly 0.

    A few elements of each weight are compared at the ends of measured steps and of the run, over at least eight steps. Steps with
    a learning rate of 0 do not count, nor runs in which these elements have no gradient. A learning rate that is exactly 0 up to
    the run's end is reported in any format, from eight steps and 5% of the run on. So is one that is at most 1e-4 of its highest
    value in half of the steps or more, up to the run's end, if the weights have gradients and change by less than 0.1%.

    False alarms: A line search that has reached the minimum of the rounded loss is reported; in FP32 it may find a lower one. An
    optimizer that is stopped on purpose by a learning rate of 0 is reported, as info below a quarter of its steps, and so is one
    that is stopped by a rate near 0.
    """
    of_rates = list(_rate_is_low(case))
    yield from of_rates
    format, found = run_format(case.session), next(case.recorded(records.Standstill), None)
    if found is None or of_rates or format not in (FLOAT16, BFLOAT16):
        return
    # A scaler may skip a fused optimizer's step on the device.
    if found.steps - case.progress.skipped_steps < _FEWEST_STILL:
        return
    types = {optimizer.type for optimizer in case.precision.optimizers}
    is_line_search = types == {"LBFGS"}
    yield Found.of(
        case,
        [found],
        (
            _Still.UNCHANGED,
            _Still.SAME_LOSS.when(found.loss is not None and found.losses > 1),
            _Still.LINE_SEARCH.when(is_line_search),
        ),
        _Still.FP32_CLOSURE.when(is_line_search) or _Still.READ_UPDATE,
        _Still.CLOSURE.when(is_line_search),
        words={"optimizer": " and ".join(sorted(types)), "format": format.name, "steps": int(found.steps)},
        is_inferred=is_line_search,
    )


# -- gradients that became zero -----------------------------------------------------------------------------------------


class _Clipped(Sentences):
    ZEROS = (
        "In step {step}{again} the gradients{whose} that the optimizer was given were zeros{or_nans}: {cause}, and dividing by "
        "the norm left nothing."
    )
    MASTERS_IN_FP32 = (
        "Divide the masters' gradients by the loss scale and clip them, in FP32. Skip a step whose norm is not finite."
    )
    FP32_WEIGHTS = (
        "Keep the weights in FP32, and compute in BF16. The gradients of FP32 weights are FP32 too, and finite in BF16 (or in "
        "FP16 with a GradScaler that begins below 1). Skip a step whose norm is not finite."
    )
    NORM_IN_FP32 = "Compute norms in FP32 and clip by that."
    CLIP_MASTERS = (
        "# in place of {at_clip}\n"
        "for p, master in zip(parameters, masters):\n"
        "    master.grad = p.grad.float() / scale\n"
        "total = torch.nn.utils.clip_grad_norm_(\n"
        "    masters, max_norm\n"
        ")"
    )
    CLIP_BY_FP32_NORM = (
        "# in place of {at_clip}\n"
        "params = [\n"
        "    p for p in model.parameters()\n"
        "    if p.grad is not None\n"
        "]\n"
        "norm = torch.nn.utils.get_total_norm(\n"
        "    [p.grad.float() for p in params]\n"
        ")\n"
        "torch.nn.utils.clip_grads_with_norm_(\n"
        "    params, max_norm, norm\n"
        ")"
    )


class _Zeroed(Sentences):
    NOTHING = (
        "In step {step}{again} the backward gave gradients, and the optimizer was given {given}{whose}: the weights learn "
        "nothing from them."
    )
    LOOK = "Look at the code between backward() and step(): zero_grad(), a mask, a factor."
    BACKWARDS = (
        "In step {step}{again} the gradients of {lost:.0f} of {backwards:.0f} backwards were zeroed before an optimizer stepped "
        "on them: the weights learn from the last backward of a step alone."
    )
    ONLY_THESE = "In these steps it got no gradient of {modules}."
    ONCE_A_STEP = (
        "Zero the gradients once per optimizer step, after it, in place of before each backward. To learn from the last backward "
        "alone, leave out the others."
    )
    COPY = "Look at the code between backward() and step(): it is to copy the model's gradients to the masters."
    COPY_LOOP = "# before {at_step}\nfor p, master in zip(parameters, masters):\n    master.grad = p.grad.float()"
    ZERO_AFTER_STEP = "# after {at_step}, not before it\noptimizer.zero_grad()"


def _gone(case: Case) -> list[records.ChangedBeforeStep]:
    """Return the measured steps whose optimizer got zeros, or nearly zeros, instead of the gradients."""
    return [
        each
        for each in case.recorded(records.ChangedBeforeStep)
        if not is_broken_by_loop(each)
        and (
            each.zeroed >= MOST_LEFT_OVER * each.of
            # A copy may be divided by the loss scale on the way to a master.
            or (0 < each.factor < _NOTHING and not each.masters and (each.largest or 0.0) < _SOMETHING)
        )
    ]


def _is_by_norm(gone: records.ChangedBeforeStep) -> bool:
    """Return whether the norm of these gradients was not finite in FP16, which explains the zeros."""
    squares = gone.sum_of_squares
    return squares > FLOAT16.max_finite or bool(gone.not_finite)


def _were_broken(gone: records.ChangedBeforeStep, case: Case) -> bool:
    """Return whether the backward made infinities or NaNs that another format would not avoid: no norm is to blame for them."""
    precision, format = case.precision, run_format(case.session)
    has_float16 = FLOAT16.name in (*precision.weights, *precision.gradients, *precision.outputs)
    is_wide = format not in (None, FLOAT16) and not has_float16
    is_alike = any(each.step == gone.step for each in case.recorded(records.BrokenAlike))
    return bool(gone.not_finite) and gone.sum_of_squares <= FLOAT16.max_finite and (is_alike or is_wide)


def _clipped_to_zero(case: Case) -> Iterator[Found]:
    """Gradients that were finite after the backward, and zero or NaN after they were divided by a norm that was not finite.

    Where the backward itself made infinities or NaNs without FP16, the event alone is reported.

    False alarms: Gradients that a script zeroes on purpose before a step (a warm-up that trains nothing) are reported if their
    norm would not be finite in FP16.
    """
    gone = _gone(case)
    if not gone or not _is_by_norm(gone[0]) or _were_broken(gone[0], case):
        return
    first = gone[0]
    whose, fix = "", _Clipped.NORM_IN_FP32
    code: Sentences = _Clipped.CLIP_BY_FP32_NORM
    if first.masters:
        whose, fix, code = " of the masters", _Clipped.MASTERS_IN_FP32, _Clipped.CLIP_MASTERS
    elif first.not_finite:
        fix, code = _Clipped.FP32_WEIGHTS, FP32Weights.IN_BF16
    words = {"whose": whose, "cause": _why_not_finite(first), "or_nans": " or NaNs" * (first.nans != 0)}
    yield Found.of(case, gone, _Clipped.ZEROS, fix, code, words=words, is_inferred=True)


def _why_not_finite(gone: records.ChangedBeforeStep) -> str:
    """Return a clause on why the norm was not finite."""
    squares, not_finite = gone.sum_of_squares, gone.not_finite
    norm, limit = math.sqrt(squares), FLOAT16.max_finite
    what, value = ("norm", norm) if norm > limit else ("sum of squares", squares)
    if not not_finite:
        return f"the {what} of the model's FP16 gradients, {value:.3g}, is beyond {limit:g}, where FP16 ends"
    clause = f"{not_finite:.0f} of the model's gradients held infinities or NaNs, so that the norm was not finite"
    if squares <= limit:
        return clause
    others = f"the {what} of the others, {value:.3g}, is beyond {limit:g} too: summed up in FP16 it is infinite as well"
    return f"{clause} ({others})"


def _zeroed(case: Case) -> Iterator[Found]:
    """Gradients that were finite after the backward, and zero when the optimizer got them, or zeroed before the next backward.

    Backwards are reported as lost if this is so in nearly all steps, each backward begins without gradients, the weights are the
    same in all, no loss reaches other tensors, and the optimizer gets the gradients of the last backward.

    False alarms: Gradients that a script zeroes on purpose before a step (a warm-up that trains nothing) are reported. So is a
    loop that only reads the gradients of its earlier backwards in every step, such as their norms.
    """
    lost = list(case.recorded(records.LostBackwards))
    # Steps are measured at powers of two, where a loop may do work that other steps do not have.
    usual = case.progress.backwards / max(case.progress.steps, 1)
    if lost and usual >= _USUALLY * min(each.backwards for each in lost):
        says = (_Zeroed.BACKWARDS, _Zeroed.ONLY_THESE.when(lost[0].names))
        yield Found.of(case, lost, says, _Zeroed.ONCE_A_STEP, _Zeroed.ZERO_AFTER_STEP, is_mild=True)
    gone = _gone(case)
    if not gone or _is_by_norm(gone[0]):
        return
    first, given = gone[0], "zeros"
    whose, fix, code = "", _Zeroed.LOOK, _Zeroed.ZERO_AFTER_STEP
    if not first.zeroed:
        given = f"{first.factor:.1g} times their values"
    if first.masters:
        whose, fix, code = " in its masters", _Zeroed.COPY, _Zeroed.COPY_LOOP
    yield Found.of(case, gone, _Zeroed.NOTHING, fix, code, words={"given": given, "whose": whose})


# -- gradients of earlier steps -----------------------------------------------------------------------------------------


class _Sum(Sentences):
    HELD = (
        "In step {step}{again} .grad still held the previous step's gradients when the backward began: each step "
        "uses the sum of all gradients so far."
    )
    GROWN = "The largest element of .grad rose from {largest_first:.3g} to {largest_last:.3g}."
    BROKEN = (
        "In step {step}{again} .grad still held infinities or NaNs of an earlier step when the backward began: their sums with "
        "later gradients are not finite."
    )
    NONE_TAKEN = "So no later step is taken."
    ZERO_SKIPPED = "Zero the gradients in each iteration, also after a step that the scaler skipped."
    MASTERS = (
        "In step {step}{again} the optimizer stepped with the sum of this step's gradients and of the masters' earlier .grad: "
        "each step uses the sum of all gradients so far."
    )
    MASTERS_GROWN = (
        "The largest element of the masters' .grad, in the tensors that were compared, rose from {largest_first:.3g} to "
        "{largest_last:.3g}."
    )
    ZERO = "Zero the gradients once a step."
    ZERO_BOTH = "Zero the gradients once a step: the model's, and those of the copies that the optimizer steps."
    ZERO_MASTERS = "Zero the masters' gradients once a step, like the model's."
    ZERO_GRAD = "# after {at_step}\noptimizer.zero_grad()"
    ZERO_GRAD_OF_BOTH = "# after {at_step}\noptimizer.zero_grad()\nmodel.zero_grad()"


#: Fewest measured steps that must begin with gradients of earlier steps before these count as never zeroed.
_FEWEST_LEFT_OVER = 2
#: Ratios that differ by at most this relative amount count as equal.
_SAME = 0.01


def _never_zeroed(case: Case) -> Iterator[Found]:
    """Gradients that add up over optimizer steps, or stay in .grad after a step that was skipped because of them.

    False alarms: It is reported only if at least nine in ten parameters still hold gradients when the next step's backward
    begins. A loop that accumulates over several optimizer steps on purpose is reported too. Masters' gradients are reported
    only if they are the sum of their earlier values and of this step's gradients, all multiplied by one factor at most. Left-over
    gradients that are not finite are reported wherever a backward finds them.
    """
    masters = [
        each
        for each in case.recorded(records.MastersAddedUp)
        if _is_kept_whole(each, case.progress.scale_at(each.step))
    ]
    if len(masters) >= _FEWEST_LEFT_OVER:
        says = (_Sum.MASTERS, _Sum.MASTERS_GROWN.when(_has_grown(masters)))
        yield Found.of(case, masters, says, _Sum.ZERO_MASTERS, _Sum.ZERO_GRAD_OF_BOTH, **_growth(masters))
    left = list(case.recorded(records.LeftOver))
    finite, broken = ([each for each in left if bool(each.not_finite) is is_broken] for is_broken in (False, True))
    if broken and len(finite) < _FEWEST_LEFT_OVER:
        began = min(broken[0].step, *(event.step for event in case.events))
        are_skipped = bool(case.events) and all(event.skipped for event in case.events)
        says = (_Sum.BROKEN, _Sum.NONE_TAKEN.when(are_skipped))
        fix = _Sum.ZERO_SKIPPED.when(are_skipped) or _Sum.ZERO
        yield Found.of(case, broken, says, fix, _Sum.ZERO_GRAD, step=began, **_growth(finite))
        return
    held = [each for each in left if each.parameters >= MOST_LEFT_OVER * each.of]
    if len(held) >= _FEWEST_LEFT_OVER:
        fix, code = _Sum.ZERO, _Sum.ZERO_GRAD
        if case.precision.has_masters:
            fix, code = _Sum.ZERO_BOTH, _Sum.ZERO_GRAD_OF_BOTH
        says = (_Sum.HELD, _Sum.GROWN.when(_has_grown(held)))
        yield Found.of(case, held, says, fix, code, **_growth(held))


def _growth(found: Sequence[records.MastersAddedUp | records.LeftOver]) -> dict[str, dict[str, object]]:
    """Return the words and the evidence on the sums: the largest magnitude of each, and its step."""
    largest, steps = [each.largest for each in found], [each.step for each in found]
    return {
        "words": {"largest_first": largest[0], "largest_last": largest[-1]} if found else {},
        "evidence": {"largest": largest, "steps": steps},
    }


def _has_grown(found: Sequence[records.MastersAddedUp | records.LeftOver]) -> bool:
    """Return whether the largest element grew from the first record to the last."""
    return found[0].largest < found[-1].largest


def _is_kept_whole(found: records.MastersAddedUp, scale: float | None) -> bool:
    """Return whether old and new gradients have the same weight: a gradient with momentum keeps a part of the old ones."""
    kept, added = found.kept, found.added * (scale or 1.0)
    return abs(kept - 1) <= _SAME or (kept < 1 and abs(kept - added) <= _SAME * kept)


class _Stale(Sentences):
    STEPPED = (
        "In step {step}{again} the optimizer stepped {modules}{later} with gradients left over from an earlier step: no "
        "backward had reached these parameters since."
    )
    ZERO_ALL = "Zero all gradients once a step, including branches that this batch does not use."
    SET_TO_NONE = "# after {at_step}\noptimizer.zero_grad(set_to_none=True)"


def _stale(case: Case) -> Iterator[Found]:
    """Gradients of an earlier step that the optimizer received again.

    False alarms: A branch whose gradients are kept over steps on purpose (accumulation over optimizer steps) is reported.
    """
    found = list(case.recorded(records.Stale))
    if not found:
        return
    names = list(dict.fromkeys(name for each in found for name in each.names))
    later = [name for name in names if name not in found[0].names]
    words = {"later": filled(", later also {},", later and grouped(later))}
    evidence = {"parameters": len(names), "names": names[:MOST_NAMES]}
    fix, code = _Stale.ZERO_ALL, _Stale.SET_TO_NONE
    yield Found.of(case, found, _Stale.STEPPED, fix, code, words=words, evidence=evidence, layer=names[0])


class _Late(Sentences):
    CLIPPED = (
        "In step {step}{again} the gradients of the weights were multiplied by {factor:.3g} after they had been copied to the "
        "masters: a clip that comes after the copy has no effect on the step."
    )
    CLIP_MASTERS = "Clip the gradients of the masters, between the copy and the optimizer's step."
    CLIP = "# in place of the clip, before\n# {at_step}\ntorch.nn.utils.clip_grad_norm_(\n    masters, max_norm\n)"


def _clipped_late(case: Case) -> Iterator[Found]:
    """Gradients of weights that the loop clips after it has copied them to FP32 masters, which step on them unclipped.

    False alarms: A clip of the weights' gradients for another purpose than the step.
    """
    if found := list(case.recorded(records.MastersClippedLate)):
        yield Found.of(case, found, _Late.CLIPPED, _Late.CLIP_MASTERS, _Late.CLIP)


NEVER_UPDATED = Fault("never-updated", "error", _never_updated, (_Never, Inspect))
STEPS_STOPPED = Fault("steps-stopped", "warning", _steps_stopped, (_Stopped,))
STANDS_STILL = Fault(
    "weights-stand-still",
    "warning",
    _stands_still,
    (_Still, _Rate),
    ("updates-lost",),
    "warning",
    is_of_every_step=True,
)
GONE = (
    Fault("clipped-after-copy", "warning", _clipped_late, (_Late,)),
    Fault(
        "gradients-clipped-to-zero",
        "error",
        _clipped_to_zero,
        (_Clipped, FP32Weights),
        ("non-finite-event", "gradients-inaccurate"),
    ),
    Fault("gradients-zeroed", "error", _zeroed, (_Zeroed,)),
)
OF_EARLIER_STEPS = (
    Fault("gradients-never-zeroed", "error", _never_zeroed, (_Sum,), ("non-finite-event", "scale-window-empty")),
    Fault("gradients-stale", "warning", _stale, (_Stale,)),
)
