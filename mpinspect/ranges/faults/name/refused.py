"""Runs that GradScaler itself has ended with an exception, by torch's words for it."""

from __future__ import annotations

from collections.abc import Iterator

from mpinspect.numeric.formats import FLOAT16
from mpinspect.ranges.faults.name.case import Case
from mpinspect.ranges.faults.name.fault import MOST_NAMES, Fault, Found
from mpinspect.ranges.kinds import WEIGHT_GRADIENT
from mpinspect.reporting.sentences import Sentences


class _Refused(Sentences):
    ENDED = "GradScaler ended the run: it does not unscale FP16 gradients, whose true values FP16 may flush."
    IN_HALF = "The gradients of {names:some 6} are in FP16."
    TRAIN_IN_FP32 = (
        "Cast the trained weights to FP32 before the optimizer is made. Autocast casts them for each product, and frozen weights "
        "may stay in FP16."
    )
    CAST_TRAINED = (
        "# before {at_optimizer}\n"
        "for p in model.parameters():\n"
        "    if p.requires_grad:\n"
        "        p.data = p.data.float()"
    )


def _gradients_refused(case: Case) -> Iterator[Found]:
    """A run that ended because its GradScaler was given FP16 gradients: torch refuses to unscale them.

    False alarms: None is known: torch's own exception says so.
    """
    error = case.session.ended_by
    if error is None or _REFUSED not in error.text:
        return
    given = {
        key.name: case.infos[key].dtype for key in case.totals if key.kind == WEIGHT_GRADIENT and key in case.infos
    }
    half = [name for name, dtype in given.items() if dtype == FLOAT16.name]
    yield Found(
        (_Refused.ENDED, _Refused.IN_HALF.when(half)),
        {"parameters": len(half), "names": half[:MOST_NAMES]},
        {"names": half},
        _Refused.TRAIN_IN_FP32,
        _Refused.CAST_TRAINED,
        layer="".join(half[:1]),
        step=error.step,
    )


class _Calls(Sentences):
    UPDATED_FIRST = (
        "GradScaler ended the run: scaler.update() came before any scaler.step() or scaler.unscale_() since the last update, so "
        "no gradient had been searched for infinities."
    )
    NO_GRADIENT = (
        "GradScaler ended the run: the optimizer that scaler.step() was given holds no parameter with a gradient, so none was "
        "searched for infinities."
    )
    UNSCALED_TWICE = (
        "GradScaler ended the run: scaler.unscale_() was called twice for one optimizer since the last scaler.update(). The "
        "gradients would have been divided by the scale twice."
    )
    UNSCALED_LATE = "GradScaler ended the run: scaler.unscale_() came after scaler.step(), which unscales by itself."
    STEPPED_TWICE = "GradScaler ended the run: scaler.step() was called twice for one optimizer between updates."
    NOT_SCALED = "GradScaler ended the run: no loss had been scaled, so there was no loss scale to divide by."
    UPDATE_LAST = "Call scaler.update() once an iteration, after the last scaler.step()."
    STEP_WITH_GRADIENTS = (
        "Make the optimizer once the model has its final parameters: a converted or replaced layer has new ones. Check that they "
        "require gradients, that the loss depends on them, and that zero_grad() follows the step."
    )
    UNSCALE_ONCE = (
        "Unscale once an iteration: after the last micro-batch's backward, before clipping. Call scaler.update() in each "
        "iteration that unscales, also where it takes no step."
    )
    UNSCALE_BEFORE_STEP = "Unscale before the step, or leave it to scaler.step()."
    UPDATE_AFTER_STEP = "Call scaler.update() at the end of each iteration that steps."
    SCALE = "Scale the loss before its backward."
    ONE_ITERATION = (
        "# after {last_backward}\n"
        "# only to clip: step() unscales itself\n"
        "scaler.unscale_(optimizer)\n"
        "scaler.step(optimizer)\n"
        "# once, after all steps\n"
        "scaler.update()"
    )
    WITHOUT_GRADIENT = (
        "# before scaler.step(optimizer)\n"
        "for group in optimizer.param_groups:\n"
        '    for p in group["params"]:\n'
        "        has = p.grad is not None\n"
        "        print(p.shape, has)"
    )
    SCALE_LOSS = "# in place of {at_backward}\nscaler.scale(loss).backward()"


#: By torch's words: the sentence, the change and its code.
_ENDED = {
    "No inf checks were recorded prior to update": (_Calls.UPDATED_FIRST, _Calls.UPDATE_LAST, _Calls.ONE_ITERATION),
    "No inf checks were recorded for this optimizer": (
        _Calls.NO_GRADIENT,
        _Calls.STEP_WITH_GRADIENTS,
        _Calls.WITHOUT_GRADIENT,
    ),
    "unscale_() has already been called": (_Calls.UNSCALED_TWICE, _Calls.UNSCALE_ONCE, _Calls.ONE_ITERATION),
    "unscale_() is being called after step()": (
        *(_Calls.UNSCALED_LATE, _Calls.UNSCALE_BEFORE_STEP),
        _Calls.ONE_ITERATION,
    ),
    "step() has already been called": (_Calls.STEPPED_TWICE, _Calls.UPDATE_AFTER_STEP, _Calls.ONE_ITERATION),
    "but _scale is None": (_Calls.NOT_SCALED, _Calls.SCALE, _Calls.SCALE_LOSS),
}


def _calls_refused(case: Case) -> Iterator[Found]:
    """A run that ended because its loop called a GradScaler's methods in an order that torch refuses.

    False alarms: None is known: torch's own exception says so.
    """
    error = case.session.ended_by
    words = "" if error is None else next((each for each in _ENDED if each in error.text), "")
    if error is not None and words:
        says, fix, code = _ENDED[words]
        yield Found(says, {"exception": words}, {}, fix, code, step=error.step)


#: torch's words.
_REFUSED = "Attempting to unscale FP16 gradients"
FAULTS = (
    Fault("gradients-refused", "error", _gradients_refused, (_Refused,), ("scaler-missing-in-float16",)),
    Fault("scaler-call-refused", "error", _calls_refused, (_Calls,)),
)
