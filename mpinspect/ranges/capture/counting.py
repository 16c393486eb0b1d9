"""An observer that counts the exponents of outputs, gradients and weights at sampled steps, as samples for the tally."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from mpinspect.ranges.capture.backward_scale import BackwardScale
from mpinspect.ranges.capture.layers import Layer, WatchedParameter
from mpinspect.ranges.capture.loss_scale import ScaleOfBackward
from mpinspect.ranges.capture.observations import Backward, Call, Held, Observer, OutputGradient, ParameterGradient
from mpinspect.ranges.capture.tally import Sample, Tally, dtype_name, passed_through
from mpinspect.ranges.kinds import ACTIVATION, ACTIVATION_GRADIENT, WEIGHT, WEIGHT_GRADIENT
from mpinspect.ranges.windows.tensors import TensorKey, narrowest
from mpinspect.runtime.distributed import local_part


class StepPrecision:
    """Determines the narrow format that the values of the open step have passed through.

    Args:
        scale: knows whether a GradScaler scales the current backward.
    """

    def __init__(self, scale: ScaleOfBackward) -> None:
        self._scale = scale
        #: The formats in the last graph that was read; they hold until another is read.
        self._in_graph: list[torch.dtype] = []
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the formats of the previous step."""
        #: The narrowest format of the outputs and gradients observed in this step.
        self.narrowest = "float32"
        self._any_output = self.has_read_graph = False
        for dtype in self._in_graph:
            self._pass_through(dtype)

    def graph_read(self, formats: Collection[str]) -> None:
        """Record the dtypes of the values in the graph of this step's losses."""
        self.has_read_graph = True
        self._in_graph = [getattr(torch, name) for name in formats if name]
        for dtype in self._in_graph:
            self._pass_through(dtype)

    def called(self, call: Call) -> None:
        """Record the dtypes of a module's outputs, if gradients may flow through them.

        With gradients disabled (the first forward of a reentrant checkpoint), that depends on the module's parameters.
        """
        for tensor in call.outputs:
            self._any_output = True
            if tensor.dtype is not torch.float32 and (tensor.requires_grad or _may_be_recomputed(call)):
                self._pass_through(tensor.dtype)

    def of_gradient(self, dtype: torch.dtype) -> str:
        """Return the narrowest format that a gradient of this dtype may have been rounded to.

        Under autocast an FP32 gradient may be an upcast FP16 gradient, from this layer or any later one. It therefore counts as
        rounded if any tensor of the step was rounded. If neither an output nor the graph of the loss shows a narrow format, and
        no output was observed (torch.compile), a GradScaler implies FP16.
        """
        if dtype is not torch.float32:
            self._pass_through(dtype)
        if self.narrowest == "float32" and not self._any_output and self._scale.by_scaler:
            return "float16"
        return self.narrowest

    def _pass_through(self, dtype: torch.dtype) -> None:
        name = passed_through(dtype)
        if name not in ("float32", self.narrowest):
            self.narrowest = narrowest((self.narrowest, name))


def _may_be_recomputed(call: Call) -> bool:
    if torch.is_grad_enabled():
        return False
    return any(parameter.requires_grad for parameter in call.layer.module.parameters())


class Counting(Observer):
    """Counts the observed tensors at sampled steps.

    Args:
        kinds: kinds of tensor to count.
        parameters: the model's parameters; only weights marked as ``counted`` are counted.
        tally: receives the samples.
        precision: determines the format that gradients were rounded to.
        is_inference: whether forwards without gradients are counted.
    """

    def __init__(
        self,
        kinds: Collection[str],
        parameters: Sequence[WatchedParameter],
        tally: Tally,
        precision: StepPrecision,
        is_inference: bool = False,
    ) -> None:
        self._is_inference = is_inference
        self._parameters, self._tally, self._precision = parameters, tally, precision
        self._counts_weights = WEIGHT in kinds
        self._counts_outputs = ACTIVATION in kinds
        self._counts_output_gradients = ACTIVATION_GRADIENT in kinds
        self.lets_gradients_wait = WEIGHT_GRADIENT in kinds
        self.lets_outputs_wait = self._counts_output_gradients
        #: The gradients of layers with a call that needed gradients, and of layers without such a call so far.
        self._needed: set[TensorKey] = set()
        self.not_needed: set[TensorKey] = set()
        #: Layers whose outputs were counted in this step with their gradients enabled.
        self._counted_layers: set[str] = set()
        #: Uncounted containers whose output gradient is counted, since they pass it on to a counted layer.
        self._counted_ahead: set[str] = set()
        #: The layer of the previous output gradient; "" if that layer is counted.
        self._last_path = ""

    def takes_parameter_gradients(self, checked_by_scaler: bool) -> bool:
        return self.lets_gradients_wait

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Activate this observer if the step is sampled."""
        self.at_work = sampled
        self._counted_layers.clear()
        self._last_path = ""

    def called(self, call: Call) -> None:
        """Count the outputs of a counted layer, and request the gradients of the outputs."""
        if call.layer.counted:
            if self._counts_outputs and self._is_first(call):
                call.rows = self._count_outputs(call.layer, call.outputs)
            call.counts_gradients = self._counts_output_gradients
            if call.counts_gradients and call.layer.gradient_key not in self._needed and torch.is_grad_enabled():
                self._note_whether_needed(call)

    def _note_whether_needed(self, call: Call) -> None:
        key, module = call.layer.gradient_key, call.layer.module
        if any(tensor.requires_grad for tensor in (*call.outputs, *call.inputs(), *module.parameters())):
            self._needed.add(key)
            self.not_needed.discard(key)
        else:
            self.not_needed.add(key)

    def _is_first(self, call: Call) -> bool:
        """Return whether to count a call's outputs: in a training with gradients enabled, and once if they are recomputed."""
        if not (torch.is_grad_enabled() or self._is_inference):
            return False
        if call.recomputed:
            return call.layer.path not in self._counted_layers
        self._counted_layers.add(call.layer.path)
        return True

    def _count_outputs(self, layer: Layer, outputs: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        key, rows = TensorKey(layer.path, ACTIVATION), {}
        for tensor in outputs:
            row = self._count(key, tensor)
            if row is not None:
                rows[id(tensor)] = row
        return rows

    def _count(self, key: TensorKey, tensor: torch.Tensor) -> torch.Tensor | None:
        """Count a tensor other than a gradient; return its row, or None if it can't be counted."""
        narrow, values = passed_through(tensor.dtype), local_part(tensor)
        row = self._tally.count(key, values)
        if row is not None:
            self._tally.add(Sample(key, row, values.numel(), dtype_name(values.dtype), narrow))
        return row

    def output_gradient(self, gradient: OutputGradient, backward: Backward) -> None:
        """Count the gradient of an output of a counted layer, or of a container that passes it on to such a layer."""
        layer, counted = gradient.layer, gradient.counted
        if counted or layer.path in self._counted_ahead:
            if backward.divisor is None:
                row = self._row_of(gradient)
                if row is not None:
                    gradient.found = row
            else:
                row = self._tally.count(layer.gradient_key, gradient.values, backward.divisor)
            if counted and row is not None:
                self._add_gradient(layer.gradient_key, gradient.values, row, backward.scale)
        self._last_path = layer.path * (not counted)

    def _row_of(self, gradient: OutputGradient) -> torch.Tensor | None:
        """Return the row of counts of a gradient's values, which are not divided by the loss scale.

        Gradients are counted for layers, not for containers, but a container and its last layer mostly share their gradient's
        memory. Such a gradient is counted at its first arrival, at the container, since the watch would otherwise read it
        again.
        """
        if isinstance(gradient.found, torch.Tensor):
            return gradient.found
        if gradient.found is not None:
            self._counted_ahead.add(self._last_path)
        elif gradient.counted and self._last_path:
            self._counted_ahead.discard(self._last_path)
        return self._tally.count(gradient.layer.gradient_key, gradient.values, later=True)

    def parameter_gradient(self, gradient: ParameterGradient, backward: Backward) -> None:
        watched = gradient.watched
        if not (self.lets_gradients_wait and watched.counted):
            return
        row = self._tally.count(watched.gradient_key, gradient.values, backward.divisor)
        if row is not None:
            self._add_gradient(watched.gradient_key, gradient.values, row, backward.scale)
        if backward.divisor is None:
            # With a divisor the row counts divided values, not the gradient's values.
            gradient.found = row

    def held_gradients(self, gradients: list[Held], backward: Backward) -> None:
        """Count several gradients together."""
        chosen = [each for each in gradients if self._is_counted(each)]
        self._tally.count_together(chosen)
        for each in chosen:
            if isinstance(each.found, torch.Tensor):
                self._add_gradient(each.key, each.values, each.found, backward.scale)
        self._last_path = ""

    def _is_counted(self, gradient: Held) -> bool:
        if isinstance(gradient, ParameterGradient):
            return self.lets_gradients_wait and gradient.watched.counted
        return gradient.counted

    def _add_gradient(self, key: TensorKey, gradient: torch.Tensor, row: torch.Tensor, scale: BackwardScale) -> None:
        dtype = gradient.dtype
        narrow = self._precision.of_gradient(dtype)
        self._tally.add(Sample(key, row, gradient.numel(), dtype_name(dtype), narrow, scale))

    def end_step(self, step: int, sampled: bool) -> None:
        """Count the weights and send the step's samples to the host; drop the samples if the step is not sampled."""
        if not self.at_work:
            return
        if not sampled:
            self._tally.drop_step()
            return
        if self._counts_weights:
            for watched in self._parameters:
                if watched.counted:
                    self._count(TensorKey(watched.name, WEIGHT), watched.parameter)
        self._tally.end_step(step)
