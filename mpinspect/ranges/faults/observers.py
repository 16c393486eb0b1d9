"""The observers of facts that histograms do not show."""

from __future__ import annotations

from collections.abc import Sequence

from mpinspect.numeric.recipes import TrainingRecipe
from mpinspect.ranges.capture.layers import Layer, WatchedParameter
from mpinspect.ranges.capture.observations import Observer
from mpinspect.ranges.capture.optimizers import ModelOptimizers
from mpinspect.ranges.capture.recipe_losses import RecipeLosses
from mpinspect.ranges.capture.recording import Recording
from mpinspect.ranges.capture.steps import StepClock
from mpinspect.ranges.faults.measure.accumulation import Accumulation
from mpinspect.ranges.faults.measure.averaged import Averaged
from mpinspect.ranges.faults.measure.buffers import Buffers
from mpinspect.ranges.faults.measure.dtype_changes import Autocasts, DtypeChanges
from mpinspect.ranges.faults.measure.examination import Examination
from mpinspect.ranges.faults.measure.flushed import AskedGradients, FlushedStates
from mpinspect.ranges.faults.measure.handed_over import HandedOver
from mpinspect.ranges.faults.measure.ledger import Ledger
from mpinspect.ranges.faults.measure.loop_lines import LoopLines
from mpinspect.ranges.faults.measure.loss_nodes import LossNodes
from mpinspect.ranges.faults.measure.master_gradients import MasterGradients
from mpinspect.ranges.faults.measure.masters import Masters
from mpinspect.ranges.faults.measure.measuring import Run
from mpinspect.ranges.faults.measure.new_scalers import BesideScaler, NewScalers, ScalesUsed
from mpinspect.ranges.faults.measure.saturated import SaturatedFunctions
from mpinspect.ranges.faults.measure.standstill import StandingStill


def diagnosing_observers(
    layers: Sequence[Layer],
    parameters: Sequence[WatchedParameter],
    optimizers: ModelOptimizers,
    clock: StepClock,
    recording: Recording,
    recipes: Sequence[TrainingRecipe] = (),
) -> tuple[Observer, ...]:
    """Return all of them, to follow the watch: some react to the events that it records at the step's end."""
    asked = (RecipeLosses(recipes, recording, layers),) if recipes else ()
    run = Run(layers, parameters, optimizers, Masters(parameters, optimizers), clock, recording)
    kinds = (
        *(Ledger, LoopLines, NewScalers, ScalesUsed, BesideScaler, MasterGradients, HandedOver, Averaged, Accumulation),
        *(Buffers, Autocasts, SaturatedFunctions, DtypeChanges, StandingStill),
        *(Examination, LossNodes, AskedGradients, FlushedStates),
    )
    return (*(kind(run) for kind in kinds), *asked)
