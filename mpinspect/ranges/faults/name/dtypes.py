"""Faults of dtypes: a model that is converted, states that are cast when loaded, autocast regions."""

from __future__ import annotations

from collections.abc import Iterator

from mpinspect.ranges.faults.name.case import SIGNIFICAND_BITS, Case, FP32Weights, quoted
from mpinspect.ranges.faults.name.culprit_inputs import moved_far
from mpinspect.ranges.faults.name.fault import Fault, Found
from mpinspect.ranges.faults.name.operators import found_at
from mpinspect.ranges.records import AutocastElsewhere, ParametersCast, StaleCasts, StatesCast, WeightGrowth
from mpinspect.reporting.sentences import Sentences
from mpinspect.reporting.words import filled


class _Converted(Sentences):
    MODEL = (
        "Since step {step} the weights are in {after:format}: {optimizer} stepped them in {before:format} before. "
        "Code between steps {step_before} and {step} converted the model that is trained: .bfloat16(), .half() and .to(dtype) "
        "convert a module in place and return it."
    )
    PART = (
        "Since step {step} {count:.0f} of {of:.0f} weights, in {modules}, are in {after:format}: {optimizer} stepped them in "
        "{before:format} before. Code between steps {step_before} and {step} converted these modules: .bfloat16(), .half() and "
        ".to(dtype) convert a module in place and return it."
    )
    ROUNDED_AWAY = "An update below 2^-{bits} of its weight is rounded away since then."
    COPY = (
        "Convert a copy of the model, or of its state dict. Continue from a checkpoint of before step {step}: .float() restores "
        "the dtype alone, and the values stay rounded."
    )
    DEEPCOPY = "# the model itself keeps its dtype\nexported = copy.deepcopy(model)\nexported.to(torch.{after})"


def _model_converted(case: Case) -> Iterator[Found]:
    """Weights that became 16 bits wide between two steps of the optimizer that was made for them in FP32.

    False alarms: A training that changes to 16-bit weights on purpose, with the same optimizer, is reported.
    """
    found = next((each for each in case.recorded(ParametersCast) if not each.is_new_optimizer), None)
    if found is None:
        return
    before, after = found.dtypes
    bits = SIGNIFICAND_BITS.get(after)
    optimizers = case.precision.optimizers
    optimizer = optimizers[0].type if len(optimizers) == 1 else "the optimizer"
    yield Found.of(
        case,
        [found],
        (_Converted.MODEL.when(found.count == found.of) or _Converted.PART, _Converted.ROUNDED_AWAY.when(bits)),
        _Converted.COPY,
        _Converted.DEEPCOPY,
        words={"step_before": found.step - 1, "optimizer": optimizer, "bits": bits and bits + 1},
        evidence={"before": before, "after": after},
        layer=found.name,
    )


class Loaded(Sentences):
    CAST = (
        "Before step {step} load_state_dict{at} cast the states {states:some} of {optimizer} from {before:format} to "
        "{after:format}: torch casts a loaded state to its parameter's dtype. The training before the load had them in "
        "{before:format}; since then each step rounds them to {after:format}."
    )
    RESTORE = "After the load, put back the states as they were saved, in their own dtypes."
    PUT_BACK = (
        "optimizer.load_state_dict(saved)\n"
        "weights = [\n"
        "    p\n"
        "    for group in optimizer.param_groups\n"
        '    for p in group["params"]\n'
        "]\n"
        'for i, states in saved["state"].items():\n'
        "    own = optimizer.state[weights[i]]\n"
        "    for name in {literal}:\n"
        "        own[name] = states[name].to(\n"
        "            weights[i].device, copy=True\n"
        "        )"
    )


def _states_cast(case: Case) -> Iterator[Found]:
    """States of an optimizer in FP32 that ``load_state_dict`` cast to the 16 bits of their parameters.

    It is an error if weights have moved by ten learning rates a step since.

    False alarms: States of a training in FP32 that is continued in 16 bits on purpose are reported.
    """
    found = next(case.recorded(StatesCast), None)
    if found is None:
        return
    optimizer, line, *states = found.names
    before, after = found.dtypes
    literal = ", ".join(f'"{name}"' for name in states)
    yield Found.of(
        case,
        [found],
        Loaded.CAST,
        Loaded.RESTORE,
        Loaded.PUT_BACK,
        words={
            "at": filled(" ({})", line),
            "states": states,
            "optimizer": optimizer,
            "literal": f"({literal},)" if len(states) == 1 else f"({literal})",
        },
        evidence={"before": before, "after": after, "line": line},
        # Squares of gradients that FP16 has made zero divide the next updates.
        is_grave=any(each.step >= found.step and moved_far(each) for each in case.recorded(WeightGrowth)),
    )


# -- autocast regions ---------------------------------------------------------------------------------------------------


class _Stale(Sentences):
    OLD_CASTS = (
        "In step {step} the forward ran in the autocast region in which the optimizer had stepped. Autocast's cache still held "
        "the 16-bit casts of the weights from before the step, so the forward did not see the update."
    )
    OLD_CAST = (
        "In step {step}, in {place}, the forward took the 16-bit cast of {weight!r} out of autocast's cache, which held "
        "the values from before the weight changed."
    )
    EACH_FORWARD = "Open autocast around each forward alone, so that it casts the new weights."


def _stale_casts(case: Case) -> Iterator[Found]:
    """A forward in an autocast region in which the weights have changed since it cast them.

    False alarms: The stale cast is measured. A loop that clears the cache by itself (torch.clear_autocast_cache) is not reported.
    """
    found = sorted(case.recorded(StaleCasts), key=lambda each: len(each.names))
    for stale in found[:1]:
        if stale.names:
            words = {"weight": stale.names[3]}
            yield found_at(stale, _Stale.OLD_CAST, _Stale.EACH_FORWARD, FP32Weights.AUTOCAST_BF16, words)
            continue
        yield Found(
            _Stale.OLD_CASTS,
            {"measured_steps": stale.steps},
            fix=_Stale.EACH_FORWARD,
            code=FP32Weights.AUTOCAST_BF16,
            step=stale.step,
        )


class _Elsewhere(Sentences):
    NOTHING_CAST = (
        "Autocast was opened for {asked} and the model is on {device}: autocast does nothing there, and everything is computed "
        "in the dtypes of the weights."
    )
    DEVICE_OF_TENSORS = "Give autocast, and the GradScaler, the device of the tensors."


def _autocast_elsewhere(case: Case) -> Iterator[Found]:
    """Autocast regions that are opened for a device on which the model is not.

    False alarms: A script for a GPU that is tried on a CPU is reported.
    """
    for elsewhere in case.recorded(AutocastElsewhere):
        asked, device = elsewhere.names
        yield Found(
            _Elsewhere.NOTHING_CAST,
            {"asked": asked, "device": device, "regions": elsewhere.regions},
            {"device_type": quoted(device)},
            fix=_Elsewhere.DEVICE_OF_TENSORS,
            code=FP32Weights.AUTOCAST_BF16,
        )


_OF_16_BITS = (
    *("updates-lost", "masters-overwritten", "moments-cannot-decay", "moments-flushed", "weight-decay-lost"),
    "epsilon-zero",
)
FAULTS = (
    Fault("model-converted", "warning", _model_converted, (_Converted,), _OF_16_BITS, "warning", is_of_every_step=True),
    Fault(
        "states-cast-by-loading",
        "warning",
        _states_cast,
        (Loaded,),
        (*_OF_16_BITS, "weights-exploded", "buffer-stops-changing"),
        "warning",
        is_of_every_step=True,
    ),
)
OF_AUTOCAST = (
    Fault("autocast-around-updates", "error", _stale_casts, (_Stale, FP32Weights)),
    Fault("autocast-for-another-device", "warning", _autocast_elsewhere, (_Elsewhere, FP32Weights)),
)
