"""The fault of adding values that the loss scale multiplies to values that it does not."""

from __future__ import annotations

from collections.abc import Iterator

from mpinspect.ranges.faults.name.case import Case
from mpinspect.ranges.faults.name.fault import Fault, Found
from mpinspect.ranges.records import (
    ChangedBeforeStep,
    ChangedWhileScaled,
    MixedPowers,
    SteppedWhileScaled,
    UnscaledAgain,
    UnscaledNeverScaled,
)
from mpinspect.ranges.session import module_named
from mpinspect.reporting.sentences import Sentences

#: Measured of all gradients, these say more of a step with gradients at a wrong scale.
_MEASURED_TOO = (ChangedBeforeStep, ChangedWhileScaled, SteppedWhileScaled, UnscaledAgain, UnscaledNeverScaled)


class _Mixed(Sentences):
    ACCUMULATED = (
        "In step {step} two backwards added their gradients in {parameters:some}: the loss of one was multiplied by the loss "
        "scale of {loss_scale:scale}, the other's was not. The scaler divides the sum, so the unscaled loss counts "
        "{loss_scale:factor} times too little."
    )
    DIVIDED = (
        "In step {step} a backward added gradients that are multiplied by the loss scale of {loss_scale:scale} to the gradients "
        "in {parameters:some} that had been divided by it already. The next division makes the earlier ones "
        "{loss_scale:factor} times too small."
    )
    GRADIENT = (
        "In step {step} ({line}) a value that is not multiplied by the loss scale is added to the gradient of {parameters:some}, "
        "which is still multiplied by it. After the scaler's division the value counts {loss_scale:factor} times too little."
    )
    TOO_LARGE = (
        "In step {step} the optimizer takes a gradient of {parameters:some} that is still multiplied by the loss scale of "
        "{loss_scale:scale}: the scaler divided it less often than its loss was multiplied."
    )
    TOO_SMALL = (
        "In step {step} the optimizer takes a gradient of {parameters:some} that is too small by the loss scale of "
        "{loss_scale:scale}: the scaler divided it, and had not multiplied its loss."
    )
    NUMBER = (
        "In step {step}, in {place}, a number is added to a value that is still multiplied by the loss scale of "
        "{loss_scale:scale}, or subtracted from it: gradients of a scaled output go into a loss undivided."
    )
    VALUES = (
        "In step {step}, in {place}, values that are multiplied by the loss scale of {loss_scale:scale} are added to values "
        "that are not."
    )
    DIVIDE_ONCE = "Divide the gradients once, after the last backward of the step."
    SCALE_EACH = "Scale each loss."
    UNSCALE_FIRST = "Unscale the gradients before anything is added to them."
    DIVIDE = "Divide the gradients by the loss scale before the penalty, and scale the whole loss once."
    SCALE_WHOLE = "Add the losses first, and scale their sum."
    ONCE = "Scale each loss once, and let the scaler divide and step."
    UNSCALE_ONCE = (
        "for micro_batch in micro_batches:\n"
        "    scaler.scale(loss_of(micro_batch)).backward()\n"
        "scaler.unscale_(optimizer)  # once, before clipping\n"
        "scaler.step(optimizer)"
    )
    BOTH_LOSSES = "scaler.scale(loss).backward()\nscaler.scale(other_loss).backward()"
    THEN_ADD = "scaler.unscale_(optimizer)\nadd_noise_or_weight_decay(model)\nscaler.step(optimizer)"
    PENALTY = (
        "(scaled,) = torch.autograd.grad(scaler.scale(output.sum()), inputs, create_graph=True)\n"
        "gradient = scaled / scaler.get_scale()\n"
        "scaler.scale(loss + penalty(gradient)).backward()"
    )
    SUM = "scaler.scale(loss + other_loss).backward()"
    STEP = "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()"


_VARIANTS = {
    "accumulated": (_Mixed.ACCUMULATED, _Mixed.SCALE_EACH, _Mixed.BOTH_LOSSES),
    "divided": (_Mixed.DIVIDED, _Mixed.DIVIDE_ONCE, _Mixed.UNSCALE_ONCE),
    "gradient": (_Mixed.GRADIENT, _Mixed.UNSCALE_FIRST, _Mixed.THEN_ADD),
    "optimizer": (_Mixed.TOO_LARGE, _Mixed.ONCE, _Mixed.STEP),
    "number": (_Mixed.NUMBER, _Mixed.DIVIDE, _Mixed.PENALTY),
    "values": (_Mixed.VALUES, _Mixed.SCALE_WHOLE, _Mixed.SUM),
}


def _scaled_plus_unscaled(case: Case) -> Iterator[Found]:
    """A sum of values that carry different powers of the loss scale, in a backward, a loss, a gradient or an optimizer.

    Checked under ``mpinspect run`` or ``Inspector(second=True)``, in one early step with a GradScaler.

    False alarms: None is known: an operator whose effect on the power is not certain makes it unknown.
    """
    for mixed in case.recorded(MixedPowers):
        if mixed.text in ("optimizer", "accumulated") and case.has(*_MEASURED_TOO):
            continue
        operator, line, *parameters = mixed.names
        says, fix, code = _VARIANTS[mixed.text]
        if mixed.text == "optimizer" and (mixed.second or mixed.first) < 0:
            says, fix, code = _Mixed.TOO_SMALL, _Mixed.SCALE_EACH, _Mixed.BOTH_LOSSES
        module = module_named(mixed.name) if mixed.name else ""
        yield Found(
            says,
            {"operator": operator, "line": line, **mixed.figures},
            {
                "place": f"{module} ({line})" if module and line else module or line or "code outside of modules",
                "parameters": parameters or [mixed.name],
            },
            fix,
            code,
            layer=mixed.name,
            step=mixed.step,
        )
        return


FAULTS = (
    Fault(
        "scaled-plus-unscaled",
        "error",
        _scaled_plus_unscaled,
        (_Mixed,),
        ("initial-scale-too-high", "scale-too-high", "overflow-recurs", "non-finite-event"),
        is_of_every_step=True,
    ),
)
