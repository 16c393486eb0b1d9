"""Faults of autocast regions: opened for another device, or around updates of the weights."""

from __future__ import annotations

from collections.abc import Iterator

from mpinspect.ranges.faults.name.case import Case, quoted
from mpinspect.ranges.faults.name.fault import Fault, Found
from mpinspect.ranges.records import AutocastElsewhere, StaleCasts
from mpinspect.reporting.sentences import Sentences


class _Stale(Sentences):
    OLD_CASTS = (
        "In step {step} the forward ran in the autocast region in which the optimizer had stepped. Autocast's cache still held "
        "the 16-bit casts of the weights from before the step, so the forward did not see the update."
    )
    EACH_FORWARD = (
        "Open autocast around each forward and its loss alone, so that it casts the new weights; or switch "
        "its cache off."
    )
    REGION = (
        "# in the loop, or with cache_enabled=False\n"
        "with torch.autocast({device_type}, torch.bfloat16):\n"
        "    loss = loss_fn(model(x), target)\n"
        "loss.backward()\n"
        "optimizer.step()"
    )


def _stale_casts(case: Case) -> Iterator[Found]:
    """A forward in an autocast region in which the weights have been updated since it began.

    False alarms: It is measured. A loop that clears the cache by itself (torch.clear_autocast_cache) is not reported.
    """
    for stale in case.recorded(StaleCasts):
        yield Found(
            _Stale.OLD_CASTS,
            {"measured_steps": stale.steps},
            fix=_Stale.EACH_FORWARD,
            code=_Stale.REGION,
            step=stale.step,
        )


class _Elsewhere(Sentences):
    NOTHING_CAST = (
        "Autocast was opened for {asked} and the model is on {device}: autocast does nothing there, and everything is computed "
        "in the dtypes of the weights."
    )
    DEVICE_OF_TENSORS = "Give autocast, and the GradScaler, the device of the tensors."
    REGION = "with torch.autocast({device_type}, torch.bfloat16):\n    loss = loss_fn(model(x), target)"


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
            code=_Elsewhere.REGION,
        )


FAULTS = (
    Fault("autocast-around-updates", "error", _stale_casts, (_Stale,)),
    Fault("autocast-for-another-device", "warning", _autocast_elsewhere, (_Elsewhere,)),
)
