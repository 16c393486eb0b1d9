"""Observers that measure what histograms do not show, each for the diagnoses of one file in ``ranges/analysis/diagnoses``."""

from __future__ import annotations

from collections.abc import Sequence

from mpinspect.ranges.capture.diagnosing.accumulation import Accumulation
from mpinspect.ranges.capture.diagnosing.averaged import Averaged
from mpinspect.ranges.capture.diagnosing.averages import Averages
from mpinspect.ranges.capture.diagnosing.buffers import Buffers
from mpinspect.ranges.capture.diagnosing.equal_by_rounding import EqualByRounding
from mpinspect.ranges.capture.diagnosing.examination import Examination
from mpinspect.ranges.capture.diagnosing.handed_over import HandedOver
from mpinspect.ranges.capture.diagnosing.ledger import Ledger
from mpinspect.ranges.capture.diagnosing.master_gradients import MasterGradients
from mpinspect.ranges.capture.diagnosing.masters import Masters
from mpinspect.ranges.capture.diagnosing.new_scalers import NewScalers
from mpinspect.ranges.capture.diagnosing.overflowed_norms import OverflowedNorms
from mpinspect.ranges.capture.layers import Layer, WatchedParameter
from mpinspect.ranges.capture.observations import Observer
from mpinspect.ranges.capture.optimizers import ModelOptimizers
from mpinspect.ranges.capture.recording import Recording
from mpinspect.ranges.capture.steps import StepClock


def diagnosing_observers(
    layers: Sequence[Layer],
    parameters: Sequence[WatchedParameter],
    optimizers: ModelOptimizers,
    clock: StepClock,
    recording: Recording,
) -> tuple[Observer, ...]:
    """Return all of them, to come after the watch: some react to the events that it records at the step's end."""
    modules = [layer.module for layer in layers]
    masters = Masters(parameters, optimizers)
    return (
        Ledger(parameters, optimizers, masters, clock, recording, modules),
        NewScalers(recording),
        MasterGradients(masters, clock, recording),
        HandedOver(parameters, optimizers, masters, clock, recording),
        Averages(parameters, optimizers, clock, recording),
        Averaged(optimizers, clock, recording),
        Accumulation(clock, recording),
        Buffers(layers, clock, recording),
        Examination(layers, parameters, clock, recording),
        EqualByRounding(clock, recording),
        OverflowedNorms(clock, recording),
    )
