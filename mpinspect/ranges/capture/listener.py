"""The listener: passes the calls of optimizers, scalers and ``backward`` on to the observers, if they concern the model.

torch's hooks on optimizers, and the methods of torch that we wrap, report the calls of all models in the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mpinspect.ranges.capture import optimizer_steps
from mpinspect.ranges.capture import scalers as scaler_watch
from mpinspect.ranges.capture.optimizers import stands_still
from mpinspect.runtime import backward_calls
from mpinspect.runtime.guard import Guarded, entrance
from mpinspect.runtime.outputs import tensors_in

if TYPE_CHECKING:
    from mpinspect.ranges.capture.dispatcher import Dispatcher


class Listener(Guarded):
    """Notifies a dispatcher's observers of losses and of optimizers' steps; ends the training step when all optimizers stepped.

    Args:
        dispatcher: the model's dispatcher. Both refer to each other until the dispatcher drops its listener.
        note: called with a sentence about each new kind of exception in a method.
    """

    def __init__(self, dispatcher: Dispatcher, note: Callable[[str], None]) -> None:
        super().__init__(note)
        self.meter = dispatcher.meter
        self._dispatcher = dispatcher
        self._clock, self._waiting = dispatcher.clock, dispatcher.waiting
        self._optimizers, self._scale = dispatcher.optimizers, dispatcher.scale

    def listen(self) -> None:
        """Receive the calls of all optimizers, scalers and backwards of the process from now on."""
        optimizer_steps.listen(self)
        scaler_watch.listen(self)
        backward_calls.listen(self.backward_called)

    def unlisten(self) -> None:
        """Receive no more calls."""
        backward_calls.unlisten(self.backward_called)
        scaler_watch.unlisten(self)
        optimizer_steps.unlisten(self)

    def captured(self, *args: Any) -> None:
        """Note that a graph is captured of a step of this model's optimizers; others' graphs are not its concern."""
        if any(isinstance(each, torch.optim.Optimizer) and self._optimizers.owns(each) for each in args):
            super().captured(*args)

    # -- the losses -----------------------------------------------------------------------------------------------

    @entrance
    def loss_scaled(self, scaler: Any, given: Any, scaled: Any) -> None:
        """Observe a loss that a GradScaler has scaled; a backward from it has that scale if it reaches this model."""
        products = self._scale.loss_scaled(scaler, scaled)
        if self._dispatcher.at_work and self._clock.begun:
            for observer in self._dispatcher.at_work:
                observer.loss_scaled(list(tensors_in(given)), products, self._clock.micro_batch)

    @entrance
    def backward_called(self, given: Any) -> None:
        """Pass the losses of a backward that is about to begin to the observers; the losses may be of another model."""
        losses = [tensor for tensor in tensors_in(given) if tensor.grad_fn is not None]
        if not self._dispatcher.at_work or not losses:
            return
        self._dispatcher.read_graph(losses)
        if self._clock.in_forward:
            for observer in self._dispatcher.at_work:
                observer.backward_called(losses)

    # -- the optimizers -------------------------------------------------------------------------------------------

    @entrance
    def scaler_steps(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Record that ``scaler.step(optimizer)`` begins."""
        self._waiting.finish_left_behind()
        self._optimizers.scaler_steps(optimizer)

    @entrance
    def scaler_stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Record that ``scaler.step(optimizer)`` has ended: if the optimizer did not step, the scaler skipped its step."""
        if not self._optimizers.was_skipped(optimizer):
            return
        if self._clock.optimizer_again(optimizer):
            self._dispatcher.end_step()
        for observer in self._dispatcher.observing:
            observer.step_skipped(optimizer)
        if self._clock.optimizer_done(optimizer, skipped=True):
            self._dispatcher.end_step()

    @entrance
    def scaler_unscales(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Notify the observers that a scaler is about to unscale an optimizer's gradients."""
        if self._dispatcher.at_work and self._optimizers.owns(optimizer):
            for observer in self._dispatcher.at_work:
                observer.unscaling(optimizer)

    @entrance
    def scaler_unscaled(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Notify the observers that a scaler has unscaled an optimizer's gradients."""
        if self._dispatcher.at_work and self._optimizers.owns(optimizer):
            for observer in self._dispatcher.at_work:
                observer.unscaled(optimizer)

    @entrance
    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Find the parameters that were replaced since attaching: an optimizer is made for those that are trained."""
        if self._optimizers.holds_new(optimizer):
            self._dispatcher.find_replaced_parameters(optimizer)

    @entrance
    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Observe the weights and gradients of an optimizer that is about to step."""
        self._waiting.finish_left_behind()
        self.optimizer_made(optimizer)
        if not self._optimizers.steps(optimizer) or self._only_makes_states(optimizer):
            return
        self._clock.know(optimizer)
        if self._clock.optimizer_again(optimizer):
            self._dispatcher.end_step()
        self._optimizers.step_begins(optimizer)
        self._clock.optimizer_begins()
        for observer in self._dispatcher.observing:
            observer.optimizer_steps(optimizer)

    def _only_makes_states(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a step only makes the optimizer's states: nothing ran before it, and it changes no weight."""
        return not self._dispatcher.quiet and not self._clock.begun and stands_still(optimizer)

    @entrance
    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Observe an optimizer's step that has run; the training step ends when every known optimizer has stepped."""
        if self._only_makes_states(optimizer) or not self._optimizers.stepped(optimizer):
            return
        for observer in self._dispatcher.observing:
            observer.optimizer_stepped(optimizer)
        if self._clock.optimizer_done(optimizer, skipped=False):
            self._dispatcher.end_step()
