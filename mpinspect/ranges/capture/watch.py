"""The non-finite watch: an observer that records the largest magnitude of every output and gradient in execution order.

Each tensor costs one reduction, or none if an observer counted it, since the row of counts contains the magnitude. On a CPU
the value is known immediately; on a GPU it stays on the device until the step ends (``judge``). The first culprit and the
recent maxima are derived from these values.

Between sampled steps on a GPU, a large model is watched block by block (``layers.outline``), and its weight gradients are read
when the optimizer steps. If ``clip_grad_norm_`` clips them, the watch reads its norm, and the gradients only if the norm is not
finite. With a GradScaler, they are read only after a skipped step. Without FP16 operations, they are read only if another value
of the step is not finite: in FP32 and BF16, sums of products of finite inputs and finite gradients are finite. An FP16 tensor in
any step so far, or compiled code, whose formats no hook sees, counts as FP16 operations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sized
from dataclasses import replace

import torch
from torch.autograd.graph import GradientEdge

from mpinspect.counting.cuda import available
from mpinspect.ranges.capture import device_magnitudes
from mpinspect.ranges.capture.culprit import BACKWARD, FORWARD, LOSS, SCALED_LOSS
from mpinspect.ranges.capture.device_magnitudes import LEARNING_STEPS, DeviceMagnitudes, StepSlot
from mpinspect.ranges.capture.judge import Judge, Reading, ReadTogether, StepLog
from mpinspect.ranges.capture.largest import Found, Value, extremes, is_broken, largest_of
from mpinspect.ranges.capture.layers import WatchedParameter
from mpinspect.ranges.capture.observations import (
    Backward,
    Call,
    Held,
    LastValues,
    Observer,
    OutputGradient,
    ParameterGradient,
)
from mpinspect.ranges.capture.optimizers import ModelOptimizers, skips_on_device
from mpinspect.ranges.capture.recording import Recording
from mpinspect.ranges.capture.steps import CallChoice, StepClock
from mpinspect.ranges.capture.weights import BrokenWeights, all_finite
from mpinspect.ranges.kinds import ACTIVATION, ACTIVATION_GRADIENT, WEIGHT_GRADIENT
from mpinspect.ranges.session import Event
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.runtime.compiled_graphs import compiled_graphs
from mpinspect.runtime.distributed import is_distributed, is_from_stage_before, local_part, world_size
from mpinspect.runtime.guard import Unread

#: Kinds of tensor that later tensors depend on, so that an infinity or NaN mostly spreads to these.
_PASSED_ON = (ACTIVATION, ACTIVATION_GRADIENT)


#: Number of steps after an event that observe every module, on a device too: a broken module may break again.
_STEPS_IN_FULL = 10


class Watch(Observer):
    """Reads every observed tensor, and records the first culprit of each step as an event.

    Args:
        modules: the watched modules, by path.
        optimizers: the model's optimizers.
        broken_weights: explains events of the forward.
        clock: the run's step clock.
        recording: receives the events.
        may_pause: whether some steps may not be watched.
        choice: knows whether calls of a step were not observed.
    """

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        optimizers: ModelOptimizers,
        broken_weights: BrokenWeights,
        clock: StepClock,
        recording: Recording,
        may_pause: bool,
        choice: CallChoice,
    ) -> None:
        #: The tensors that could not be read.
        self.unread = Unread[TensorKey]()
        self._optimizers, self._broken_weights, self._clock = optimizers, broken_weights, clock
        self._recording, self._may_pause, self._choice = recording, may_pause, choice
        self._judge = Judge(modules, self.unread, clock.loss_level)
        self._log = StepLog()
        #: The modules that contain others, without the model itself: the loss depends on its output.
        self._containers = {
            path for path, module in modules.items() if path and next(module.children(), None) is not None
        }
        self._on_devices: dict[torch.device, DeviceMagnitudes] = {}
        #: Whether every tensor of this step is read, even on a device with only finite values.
        self._reads_all = True
        #: The number of further steps that observe every module after an event.
        self._in_full = 0
        #: The last watched steps that follow an unwatched step; eight suffice, since events are at most a few steps late.
        self._after_pause: deque[int] = deque(maxlen=8)
        #: The previous output and its largest magnitude.
        self._last_output: LastValues[Value] = LastValues()
        self._last_module = ""
        #: Modules whose output a container has been seen to return.
        self._handed_on: set[str] = set()
        self._steps = 0
        #: Whether any tensor so far was in FP16. A block's inner tensors are seen in some steps only.
        self._has_float16 = False

    @property
    def _may_be_float16(self) -> bool:
        return self._has_float16 or compiled_graphs() > 0

    @property
    def readings(self) -> Sized:
        """The tensors read in this step."""
        return self._log.readings

    def forward_broke(self) -> bool | None:
        """Return whether the last output of this step is non-finite; None without an output, or while its value is on a device.

        If an earlier output was non-finite, the last output usually is too.
        """
        last = self._log.last_output
        return None if last is None else last.is_broken

    def backward_ends(self) -> None:
        """Read the gradients that are held: unscaling or clipping may change them next."""
        self._read_held()

    # -- the forward ------------------------------------------------------------------------------------------------

    def called(self, call: Call) -> None:
        """Read the new outputs and, if an output may be non-finite, the inputs that no observed module produced."""
        log, path, inputs, rows, finite = self._log, call.layer.path, call.inputs(), call.rows, True
        call.fresh = fresh = log.calls.called(path, inputs, call.outputs)
        if fresh and fresh[0][2]:
            log.unseen_inputs.update(number for _, number, is_input in fresh if is_input)
            log.is_later_stage |= is_from_stage_before(fresh[0][0])
        if not call.recomputed:
            for tensor, number, is_input in fresh:
                if not is_input:
                    row = None if rows is None else rows.get(id(tensor))
                    finite = self._output(path, tensor, number, call.micro_batch, row) and finite
        if log.unseen_inputs and (not finite or log.may_be_broken):
            self._read_inputs(path, inputs, call.micro_batch)

    def _output(
        self, module: str, tensor: torch.Tensor, number: int, micro_batch: int, row: torch.Tensor | None
    ) -> bool:
        """Read an output (``row``: its row of counts, if any); return False if it is non-finite or its value not yet known."""
        log, last = self._log, self._last_output
        found: Found | None = row
        local = local_part(tensor)
        if local is not tensor:
            if not tensor.is_nested:
                log.of_all_ranks.add(number)
            tensor = local
        if last.remembers and row is None:
            found = last.found_in(tensor)
            if found is not None:
                self._handed_on.add(self._last_module)
        reading = self._log_reading(FORWARD, ACTIVATION, module, module, number, micro_batch, tensor, found)
        log.last_output = reading
        if reading is None:
            return True
        broken = None if isinstance(reading.value, StepSlot) else is_broken(reading.value)
        if broken is not False:
            log.may_be_broken = True
        if not isinstance(reading.value, tuple):
            if self._steps < LEARNING_STEPS or module in self._handed_on:
                # A container may return this output. After the first steps the watch knows such outputs.
                last.keep(tensor, reading.value)
                self._last_module = module
            elif last.remembers:
                last.forget()
        return broken is False

    def _read_inputs(self, module: str, inputs: Iterable[torch.Tensor], micro_batch: int) -> None:
        """Read the inputs that no observed module produced, because an output may be non-finite."""
        for tensor in inputs:
            number = self._log.calls.number_of(tensor)
            if number is not None and number in self._log.unseen_inputs:
                self._log.unseen_inputs.discard(number)
                self._log_reading(FORWARD, ACTIVATION, module, module, number, micro_batch, tensor, None, is_input=True)

    def unseen_input(self) -> int:
        """Return a new number for a tensor that is not accessible, because it is inside a wrapper."""
        return self._log.calls.unseen()

    def wrapped_input(self, number: int, module: str) -> None:
        """Record that a full backward hook wrapped tensor ``number`` before passing it to ``module``."""
        self._log.calls.wrapped(number, module)

    # -- the backward -----------------------------------------------------------------------------------------------

    def backward_begins(self, backward: Backward) -> None:
        """Record the backward's loss scale, and whether the loop has dropped the gradients of the step's earlier backwards."""
        # Tensors of the forward would otherwise be held while the backward frees them.
        self._read_held()
        log = self._log
        if not log.scales or not backward.scale.is_aside:
            log.scales[backward.micro_batch] = backward.scale
        log.is_checked = backward.checked_by_scaler
        log.read_before_clipping.clear()
        if backward.micro_batch and self._broken_weights.hold_no_gradient(log.backward_broke):
            log.dropped_before = backward.micro_batch

    def output_gradient(self, gradient: OutputGradient, backward: Backward) -> None:
        """Read a gradient at an output, or at an input that no observed module produced."""
        if gradient.number < 0:
            return
        path = gradient.layer.path
        reading = self._log_reading(
            BACKWARD,
            ACTIVATION_GRADIENT,
            path,
            path,
            gradient.number,
            backward.micro_batch,
            gradient.values,
            gradient.found,
            gradient.is_input,
        )
        if reading is None:
            gradient.found = None
        elif gradient.found is None:
            gradient.found = reading.value

    def takes_parameter_gradients(self, checked_by_scaler: bool) -> bool:
        """Return True unless a scaler checks them: the watch then reads only gradients that other observers count."""
        return not checked_by_scaler

    def parameter_gradient(self, gradient: ParameterGradient, backward: Backward) -> None:
        """Read a parameter's gradient if it was counted or no scaler checks it."""
        if gradient.found is not None or not backward.checked_by_scaler:
            name, owner, batch = gradient.watched.name, gradient.watched.owner, backward.micro_batch
            if is_distributed(gradient.watched.parameter):
                self._log.of_all_ranks.add(name)
            self._log_reading(BACKWARD, WEIGHT_GRADIENT, name, owner, -1, batch, gradient.values, gradient.found)

    def held_gradients(self, gradients: list[Held], backward: Backward) -> None:
        """Read gradients held until the end of their backward, and log each one at the position of its arrival."""
        arrived, merged, done = self._log.readings, list[Reading](), 0
        self._log.readings = merged
        try:
            for each in gradients:
                if each.place > done:
                    merged += arrived[done : each.place]
                    done = each.place
                if isinstance(each, OutputGradient):
                    self.output_gradient(each, backward)
                else:
                    self.parameter_gradient(each, backward)
        finally:
            arrived[:] = merged + arrived[done:]
            self._log.readings = arrived
        self._read_held()

    def backward_called(self, losses: list[torch.Tensor]) -> None:
        """Record the outputs where a backward begins, whose gradients are its arguments. Read the losses not read so far.

        An FP16 loss is not read: it may be a loop's own product with a loss scale, which may overflow although the loss did
        not.
        """
        self._log.calls.backward_called(losses)
        if self._log.loss_is_scaled:
            return
        for loss in losses:
            is_read = self._log.calls.number_of(loss) is not None
            if loss.numel() == 1 and loss.dtype is not torch.float16 and not is_read:
                self._log_reading(FORWARD, LOSS, "", "", -1, self._clock.micro_batch, loss, None)

    def backward_left_out(self, losses: list[torch.Tensor]) -> None:
        """Read the losses."""
        if self.at_work:
            self.loss_scaled(losses, [], self._clock.micro_batch)

    def backward_called_on_edges(self, edges: list[GradientEdge]) -> None:
        """Record the outputs where a backward begins."""
        self._log.calls.backward_called((), edges)

    def loss_scaled(self, losses: list[torch.Tensor], scaled: list[torch.Tensor], micro_batch: int) -> None:
        """Read the losses, and the scaled losses where the backward begins."""
        self._log.loss_is_scaled = True
        for loss in losses:
            self._log_reading(FORWARD, LOSS, "", "", -1, micro_batch, loss, None)
        for loss in scaled:
            self._log_reading(BACKWARD, SCALED_LOSS, "", "", -1, micro_batch, loss, None)

    # -- the optimizers ---------------------------------------------------------------------------------------------

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Collect the evidence that is lost once the optimizer has updated the weights."""
        if self.at_work:
            if not self._broken_weights.exhausted and self.forward_broke():
                self._broken_weights.read_before_step()
            self._judge.find_innocent(self._log)
            if self._log.dropped_before is not None and self._is_given_broken(optimizer):
                self._log.dropped_before = None
            if self._log.reads_at_optimizers and not self._log.is_checked:
                self._read_held()
                self._weight_gradients(self._optimizers.parameters(optimizer))
                # An optimizer may change them.
                self._read_held()
        found_inf = getattr(optimizer, "found_inf", None)
        if isinstance(found_inf, torch.Tensor):
            # A fused optimizer skips on the device: the host knows whether it stepped once found_inf has been copied.
            self._log.found_inf.append(found_inf.detach().clone().reshape(()))

    def _is_given_broken(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the optimizer may have non-finite gradients that are no longer on the weights, but on masters.

        On a GPU, where reading would wait, the answer is yes for an optimizer that steps no weight of the model.
        """
        given = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        if all(gradient.is_cpu for gradient in given):
            return self._log.backward_broke() and not all_finite(given)
        return next(self._optimizers.parameters(optimizer), None) is None

    def gradients_dropped(self) -> None:
        """Record that the loop cleared the gradients of the step that ends, and updated no weight."""
        self._log.dropped_before = self._clock.micro_batch + 1

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that the step was not skipped, unless the optimizer decides this on the device."""
        if self.at_work and not skips_on_device(optimizer):
            self._log.skipped = bool(self._log.skipped)

    def step_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the gradients of the optimizer's parameters, to find the non-finite one that made the scaler skip."""
        if self.at_work:
            self._log.skipped = True
            self._weight_gradients(self._optimizers.parameters(optimizer))

    def clipping(self, parameters: list[WatchedParameter], limit: object, norm: torch.Tensor) -> None:
        """Read the norm and, only if it is not finite, its gradients: clipping would spread a NaN to all of them."""
        log = self._log
        if not log.reads_at_optimizers or log.is_checked or not device_magnitudes.is_on_device(norm):
            return
        if self._on_device("", "norm", norm, is_input=False, is_spared=False) is not None:
            self._read_held()
            self._weight_gradients(parameters, norm.device)
            self._read_held()
            log.read_before_clipping.update(watched.name for watched in parameters)

    def _weight_gradients(self, parameters: Iterable[WatchedParameter], summed_on: torch.device | None = None) -> None:
        """Read the gradients in ``.grad``, after any changes by the loop.

        ``summed_on``: the device that has read a norm of these gradients.
        """
        log, batch = self._log, self._clock.micro_batch
        found = [
            (watched, local_part(gradient))
            for watched in parameters
            if (gradient := watched.parameter.grad) is not None and watched.name not in log.read_before_clipping
        ]
        if world_size() > 1:
            log.of_all_ranks.update(watched.name for watched, _ in found)
        on_devices: dict[int, tuple[list[WatchedParameter], list[torch.Tensor]]] = {}
        for watched, gradient in found:
            if device_magnitudes.is_on_device(gradient):
                group = on_devices.setdefault(gradient.get_device(), ([], []))
                group[0].append(watched)
                group[1].append(gradient)
            else:
                self._log_reading(BACKWARD, WEIGHT_GRADIENT, watched.name, watched.owner, -1, batch, gradient, None)
        for group in on_devices.values():
            self._read_together(*group, batch, is_spared=group[1][0].device == summed_on)

    def _read_together(
        self, parameters: list[WatchedParameter], gradients: list[torch.Tensor], micro_batch: int, is_spared: bool
    ) -> None:
        """Read gradients on one device in one launch, or one by one if the kernels can't read all of them."""
        dtypes = [gradient.dtype for gradient in gradients]
        self._has_float16 |= torch.float16 in dtypes
        magnitudes, found = self._magnitudes_on(gradients[0].device), None
        try:
            found = magnitudes.read_now(gradients, only_if_broken=is_spared or self._spares_weight_gradients)
        except Exception as error:
            self._kernels_failed(error)
        if found is not None:
            self._log.together.append(ReadTogether(len(self._log.readings), parameters, dtypes, micro_batch, *found))
            return
        for watched, gradient in zip(parameters, gradients, strict=True):
            name, owner = watched.name, watched.owner
            self._log_reading(
                BACKWARD, WEIGHT_GRADIENT, name, owner, -1, micro_batch, gradient, None, is_spared=is_spared
            )

    # -- the step ---------------------------------------------------------------------------------------------------

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Work only in watched steps."""
        if self._may_pause and watched and not self.at_work and self._clock.step:
            self._after_pause.append(self._clock.step)
        self.at_work = watched
        self._broken_weights.begin_step()
        self._reads_all = sampled or self._clock.measured or self._in_full > 0
        self._in_full -= self._in_full > 0
        # With tensors on a device, each hook takes the host as long as a small layer.
        self.outline_suffices = bool(self._on_devices) and not self._reads_all

    def outlined(self, are_some_left_out: bool, at_optimizers: bool) -> None:
        """Record whether the calls of some modules are not observed in the step that begins.

        ``at_optimizers``: whether weight gradients are not observed either, so that they are read when an optimizer steps.
        """
        self._log.is_outlined = are_some_left_out
        self._log.reads_at_optimizers = are_some_left_out and at_optimizers

    def end_step(self, step: int, sampled: bool) -> None:
        """Start copying the step's values to the host; record events of steps whose values have arrived. Does not wait."""
        log, self._log = self._log, StepLog()
        log.calls.forget_tensors()
        self._last_output.forget()
        log.step, log.is_partial = step, self._choice.any_left_out
        log.spares_weight_gradients = not self._may_be_float16
        log.is_on_devices = not self._reads_all and all(isinstance(each.value, StepSlot) for each in log.readings)
        if not log.is_on_devices:
            log.spread_out()
        for magnitudes in self._on_devices.values():
            try:
                sent = magnitudes.send()
            except Exception as error:
                self._kernels_failed(error)
            else:
                if sent is not None:
                    log.magnitudes.append(sent)
        if log.readings or log.together or log.found_inf:
            self._steps += 1
            self._judge.send(log)
        self._record(wait=False)

    def drain(self) -> None:
        """Record the events of all remaining steps, waiting for their values to reach the host."""
        self._record(wait=True)
        self._recording.skips(self._clock.skipped_steps)

    def _record(self, *, wait: bool) -> None:
        for event in self._judge.events(wait=wait):
            self._in_full = _STEPS_IN_FULL
            self._recording.event(self._explained(event))
        self._clock.skipped_steps += self._judge.take_skips_on_device()

    def _explained(self, event: Event) -> Event:
        """Return the event with an explanation: the module's weights if they broke the forward, or an unwatched step before."""
        if event.phase == "forward" and not self._broken_weights.exhausted:
            # The optimizer's step was skipped, or no optimizer has stepped since the forward.
            unmoved = event.skipped or (event.skipped is None and self._clock.has_optimizers)
            event = self._broken_weights.explain(event, unmoved=event.step == self._clock.step and unmoved)
        if event.step in self._after_pause:
            gap = "the step before was not watched, since the watch's time is limited, so it may have begun earlier"
            event = replace(event, explanation=f"{event.explanation}; {gap}")
        return event

    # -- reading ----------------------------------------------------------------------------------------------------

    def _log_reading(
        self,
        phase: str,
        what: str,
        name: str,
        module: str,
        number: int,
        micro_batch: int,
        tensor: torch.Tensor,
        found: Found | None,
        is_input: bool = False,
        is_spared: bool = False,
    ) -> Reading | None:
        """Log a tensor's largest magnitude; return None if the tensor has no values or can't be read.

        ``is_input``: both extremes of a forward's input are read, to distinguish a mask's -inf from other infinities.
        ``is_spared``: a device reads the tensor only if another value of the step is not finite.
        """
        value, both = None, is_input and phase == FORWARD
        try:
            tensor = local_part(tensor)
            if found is None and device_magnitudes.is_on_device(tensor):
                value = self._on_device(name, what, tensor, both, is_spared)
            if value is None:
                value = extremes(tensor) if both else largest_of(tensor, found)
        except Exception as error:
            self.unread.failed(TensorKey(name, what), error)
            return None
        if value is None:
            return None
        dtype = tensor.dtype
        if dtype is torch.float16:
            self._has_float16 = True
        reading = Reading(phase, what, name, module, number, micro_batch, value, is_input, dtype)
        self._log.readings.append(reading)
        return reading

    def _on_device(self, name: str, what: str, tensor: torch.Tensor, is_input: bool, is_spared: bool) -> Value | None:
        """Return the slot of a tensor on a CUDA device; None if it must be read alone."""
        if what == WEIGHT_GRADIENT and self._spares_weight_gradients:
            is_spared = True
        is_depended_on = what not in _PASSED_ON or (what == ACTIVATION and name in self._containers)
        always = not is_input and (self._reads_all or is_depended_on)
        try:
            return self._magnitudes_on(tensor.device).read(
                tensor, (what, name, is_input), always=always, is_spared=is_spared
            )
        except Exception as error:
            self._kernels_failed(error)
            return None

    def _magnitudes_on(self, device: torch.device) -> DeviceMagnitudes:
        magnitudes = self._on_devices.get(device)
        if magnitudes is None:
            magnitudes = self._on_devices[device] = DeviceMagnitudes(device)
            # Weight gradients are read together too.
            self.wants_backward_end = self.lets_gradients_wait = True
        return magnitudes

    @property
    def _spares_weight_gradients(self) -> bool:
        """Whether weight gradients on a device are read only if another value of the step is not finite."""
        return not (self._reads_all or self._may_be_float16 or self._log.skipped)

    def _read_held(self) -> None:
        """Read the tensors that are held on devices. Does not wait."""
        for magnitudes in self._on_devices.values():
            try:
                magnitudes.flush()
            except Exception as error:
                self._kernels_failed(error)

    def _kernels_failed(self, error: Exception) -> None:
        """Continue without the kernels; the tensors of the failed launch are lost."""
        available.gave_up(error)
        self._recording.note(available.trouble())
