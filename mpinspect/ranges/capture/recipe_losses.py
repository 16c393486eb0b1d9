"""Measures the losses by the recipes that a run was asked for, in a few sampled steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mpinspect.numeric.recipes import TrainingRecipe
from mpinspect.ranges.capture.experts import ExpertModules
from mpinspect.ranges.capture.layers import Layer
from mpinspect.ranges.capture.observations import Backward, Call, Observer, OutputGradient
from mpinspect.ranges.capture.operands import OperandLosses, may_be_layer
from mpinspect.ranges.capture.recording import Recording
from mpinspect.ranges.session import OperandRecord


class RecipeLosses(Observer):
    """Measures one call of every layer in the first, second, fourth, eighth, ... sampled step. Waits for the GPU there.

    Args:
        recipes: the recipes.
        recording: receives the sums of each such step.
        layers: the model's modules.
    """

    def __init__(self, recipes: Sequence[TrainingRecipe], recording: Recording, layers: Iterable[Layer]) -> None:
        self._recipes, self._recording = recipes, recording
        self._experts = ExpertModules(layers, recording.note)
        self._sampled_steps = 0
        self._begin()

    def _begin(self) -> None:
        self._losses = OperandLosses(self._recipes)
        #: The products of the layers that were called in this step.
        self._products: dict[str, tuple[str, ...]] = {}
        self._arrived: set[str] = set()

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Activate this observer if the number of sampled steps becomes a power of two."""
        self._sampled_steps += sampled
        self.at_work = sampled and self._sampled_steps & (self._sampled_steps - 1) == 0
        self._begin()
        self._experts.begin_step(self._losses if self.at_work else None)

    def called(self, call: Call) -> None:
        """Measure the input and weight at a layer's first call that needs a gradient, and request that gradient."""
        path, module = call.layer.path, call.layer.module
        if not call.layer.counted or path in self._products or not may_be_layer(module):
            return
        if call.inputs() and call.outputs:
            products = self._losses.called(path, module, call.inputs()[0], call.outputs[0])
            if products:
                self._products[path] = products
                call.wants_gradients = True

    def output_gradient(self, gradient: OutputGradient, backward: Backward) -> None:
        """Measure the first gradient at the output of each layer."""
        path = gradient.layer.path
        if gradient.is_input or path not in self._products or path in self._arrived:
            return
        self._arrived.add(path)
        self._losses.arrived(path, self._products[path], gradient.values)

    def end_step(self, step: int, sampled: bool) -> None:
        """Record the sums, unless the step was dropped."""
        if self.at_work and sampled and self._losses.losses:
            found = self._losses
            others = {*found.others, *found.experts}
            self._recording.operands(
                OperandRecord(
                    *key,
                    found.shapes[key[0]],
                    loss,
                    is_linear=key[0] not in others,
                    is_experts=key[0] in found.experts,
                    tokens=found.tokens.get(key[0], 0),
                    function=found.experts.get(key[0], ""),
                )
                for key, loss in found.losses.items()
            )
        self._begin()

    def run_ends(self) -> None:
        """Remove the hooks on experts."""
        self._experts.remove_hooks()
