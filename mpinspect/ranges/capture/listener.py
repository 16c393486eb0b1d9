"""The listener: passes the calls of optimizers, scalers and ``backward`` on to the observers, if they concern the model.

torch's hooks on optimizers, and the methods of torch that we wrap, report the calls of all models in the process.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.autograd.graph import GradientEdge

from mpinspect.ranges.capture import optimizer_steps
from mpinspect.ranges.capture import scalers as scaler_watch
from mpinspect.ranges.capture.broken_off import forget_caller
from mpinspect.ranges.capture.graph import graph, operator_of, walk
from mpinspect.ranges.capture.observations import out_of_reach
from mpinspect.ranges.capture.optimizers import skips_on_device, stands_still
from mpinspect.runtime.guard import Guarded, entrance
from mpinspect.runtime.outputs import tensors_in
from mpinspect.runtime.torch_calls import AUTOCAST_CACHE_CLEARED, AUTOCAST_MADE, BACKWARD, CLIP_WITH_NORM, GRADIENTS

if TYPE_CHECKING:
    from mpinspect.ranges.capture.dispatcher import Dispatcher
    from mpinspect.ranges.capture.recording import Recording

#: Maximum number of nodes of a loss's graph in a search for a module's output: some 1 ms.
_MOST_NODES = 2048
#: How many of a loss's last operations identify its kind.
_OPERATORS = 8


class Listener(Guarded):
    """Notifies a dispatcher's observers of losses and of optimizers' steps; ends the training step when all optimizers stepped.

    Args:
        dispatcher: the model's dispatcher. Both refer to each other until the dispatcher drops its listener.
        made: the sequence numbers of the graph nodes that made this step's outputs, as they become known.
        recording: receives the notes, and which backwards served another model's optimizer.
    """

    #: The listeners of all models.
    _all: ClassVar[weakref.WeakSet[Listener]] = weakref.WeakSet()

    def __init__(self, dispatcher: Dispatcher, made: Collection[int], recording: Recording) -> None:
        super().__init__(recording.note)
        self._recording, self._made = recording, made
        self.meter = dispatcher.meter
        self._dispatcher = dispatcher
        self._clock, self._waiting = dispatcher.clock, dispatcher.waiting
        #: The losses that are not finite and have had no backward, as far as they are known.
        self._left_out: list[weakref.ref[torch.Tensor]] = []
        self._optimizers, self._scale = dispatcher.optimizers, dispatcher.scale
        #: The last step and micro-batch whose backward served another model's optimizer; None without one.
        self._aside: tuple[int, int] | None = None

    def listen(self) -> None:
        """Receive the calls of all optimizers, scalers and backwards of the process from now on."""
        self._all.add(self)
        optimizer_steps.listen(self)
        scaler_watch.listen(self)
        BACKWARD.listen(self.backward_called)
        CLIP_WITH_NORM.listen(self.clipping)
        GRADIENTS.listen(self.gradients_asked_for)
        GRADIENTS.listen(self.gradients_returned, after=True)
        AUTOCAST_MADE.listen(self.autocast_made)
        AUTOCAST_CACHE_CLEARED.listen(self.autocast_cache_cleared)

    def unlisten(self) -> None:
        """Receive no more calls."""
        self._all.discard(self)
        AUTOCAST_CACHE_CLEARED.unlisten(self.autocast_cache_cleared)
        AUTOCAST_MADE.unlisten(self.autocast_made)
        GRADIENTS.unlisten(self.gradients_returned)
        GRADIENTS.unlisten(self.gradients_asked_for)
        CLIP_WITH_NORM.unlisten(self.clipping)
        BACKWARD.unlisten(self.backward_called)
        scaler_watch.unlisten(self)
        optimizer_steps.unlisten(self)

    def captured(self, *args: Any) -> None:
        """Note that a CUDA graph is captured with a step of this model's optimizers; other optimizers' graphs are ignored."""
        if any(isinstance(each, torch.optim.Optimizer) and self._optimizers.owns(each) for each in args):
            super().captured(*args)

    # -- the losses -----------------------------------------------------------------------------------------------

    @entrance
    def loss_scaled(self, scaler: Any, given: Any, scaled: Any) -> None:
        """Observe a loss that a GradScaler has scaled; a backward from it has that scale if it reaches this model."""
        products = self._scale.loss_scaled(scaler, scaled)
        if self._dispatcher.at_work and self._clock.begun and self._reaches_model(tensors_in(given)):
            for observer in self._dispatcher.at_work:
                observer.loss_scaled(list(tensors_in(given)), products, self._clock.micro_batch)

    @entrance
    def backward_called(self, given: Any) -> None:
        """Pass the losses of a backward that is about to begin and reaches the model to the observers."""
        forget_caller()
        starts = given if isinstance(given, (list, tuple)) and not isinstance(given, GradientEdge) else (given,)
        edges = [each for each in starts if isinstance(each, GradientEdge)]
        if edges:
            # Of a gradient that a pipeline passes on, no factor is known.
            self._scale.backward_called([])
        if edges and self._clock.in_forward:
            for observer in self._dispatcher.at_work:
                observer.backward_called_on_edges(edges)
        losses = [tensor for tensor in tensors_in(given) if tensor.grad_fn is not None]
        if not self._dispatcher.at_work or not losses or not self._reaches_model(losses):
            return
        self._scale.backward_called(losses)
        self._clock.backward_called()
        self._dispatcher.read_graph(losses)
        self._clock.loss_kind = tuple(map(operator_of, graph((each.grad_fn for each in losses), _OPERATORS)))
        # Of a compiled model no forward is seen.
        if self._clock.in_forward or not self._dispatcher.any_called:
            for observer in self._dispatcher.at_work:
                observer.backward_called(losses)

    @entrance
    def backward_left_out(self, losses: list[torch.Tensor]) -> None:
        """Pass losses that are not finite, and have no backward, to the observers if they are this model's."""
        if not self._clock.awaits_backward:
            return
        known = [reference() for reference in self._left_out]
        new = [loss for loss in losses if all(loss is not each for each in known) and self._reaches_model([loss])]
        self._left_out += map(weakref.ref, new)
        for observer in self._dispatcher.observing if new else ():
            observer.backward_left_out(new)

    @entrance
    def autocast_made(self, device: Any, enabled: Any) -> None:
        """Notify the observers that an autocast region is made."""
        for observer in self._dispatcher.observing:
            observer.autocast_made(str(device), enabled is not False)

    @entrance
    def autocast_cache_cleared(self) -> None:
        """Notify the observers that autocast's cache is cleared."""
        for observer in self._dispatcher.observing:
            observer.autocast_cache_cleared()

    @entrance
    def clipping(self, parameters: Any, limit: Any, norm: Any) -> None:
        """Notify the observers that the gradients of these parameters are about to be clipped by their norm."""
        # A generator is left to torch, since it can be consumed only once.
        if (
            not self._dispatcher.at_work
            or not isinstance(parameters, list | tuple)
            or not isinstance(norm, torch.Tensor)
        ):
            return
        watched = self._optimizers.watched(parameters)
        if watched:
            self._waiting.finish_left_behind()
            for observer in self._dispatcher.at_work:
                observer.clipping(watched, limit, norm)

    @entrance
    def gradients_asked_for(self, outputs: Any, inputs: Any, makes_graph: Any) -> None:
        """Pass the losses of a ``torch.autograd.grad`` that asks for parameters' gradients and makes no graph of them."""
        if self._dispatcher.at_work and not makes_graph and self._optimizers.watched(tensors_in(inputs)):
            self.backward_called(outputs)

    @entrance
    def gradients_returned(self, outputs: Any, inputs: Any, makes_graph: Any, gradients: Any) -> None:
        """Pass the results of ``torch.autograd.grad`` to the observers: for this model's parameters, or no model's at all."""
        if not self._dispatcher.at_work or out_of_reach() is not None:
            return
        given = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
        pairs = [pair for pair in zip(given, gradients, strict=False) if isinstance(pair[1], torch.Tensor)]
        of_none = not any(isinstance(each, torch.nn.Parameter) for each, _ in pairs)
        made = list(tensors_in(outputs))
        if self._optimizers.watched(each for each, _ in pairs) or (of_none and pairs and self._reaches_model(made)):
            for observer in self._dispatcher.at_work:
                observer.gradients_returned(made, *map(list, zip(*pairs, strict=True)))

    def _reaches_model(self, losses: Iterable[torch.Tensor]) -> bool:
        """Return whether the losses' graph leads to an output of this step's modules; True if that can't be known."""
        starts = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
        if not self._made or not starts:
            return not self._is_of_another_model(starts)
        walked = 0
        for node in walk(starts, _MOST_NODES):
            if node._sequence_nr() in self._made:
                return True
            walked += 1
        return walked >= _MOST_NODES

    def _is_of_another_model(self, starts: Iterable[Any]) -> bool:
        """Return whether a graph leads to parameters of another inspected model, and to none of this one."""
        others = [each for each in self._all if each is not self]
        if not others:
            return False
        nodes = list(walk(starts, _MOST_NODES))
        leaves = [each for node in nodes if (each := getattr(node, "variable", None)) is not None]
        is_known = len(nodes) < _MOST_NODES and not self._optimizers.watched(leaves)
        return is_known and any(each._optimizers.watched(leaves) for each in others)

    # -- the optimizers -------------------------------------------------------------------------------------------

    @entrance
    def scaler_steps(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Record that ``scaler.step(optimizer)`` begins."""
        self._waiting.finish_left_behind()
        self._optimizers.scaler_steps(optimizer)
        if skips_on_device(optimizer):
            self._scaler_divides(scaler, optimizer)

    @entrance
    def scaler_stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Record that ``scaler.step(optimizer)`` has ended: if the optimizer did not step, the scaler skipped its step."""
        self._note_aside(optimizer)
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
            self._scaler_divides(scaler, optimizer)
            for observer in self._dispatcher.at_work:
                observer.unscaling(optimizer)

    def _scaler_divides(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        if self._optimizers.owns(optimizer):
            for observer in self._dispatcher.at_work:
                observer.scaler_divides(scaler, optimizer)

    @entrance
    def scaler_unscaled(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Notify the observers that a scaler has unscaled an optimizer's gradients."""
        if self._dispatcher.at_work and self._optimizers.owns(optimizer):
            for observer in self._dispatcher.at_work:
                observer.unscaled(optimizer)

    @entrance
    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Find the parameters that were replaced since attaching: a new optimizer holds the trained ones."""
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

    def _note_aside(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that the last backward served another model's optimizer, until one of this model's steps on it, too."""
        now = self._clock.step, self._clock.micro_batch
        if not self._optimizers.owns(optimizer):
            if self._clock.may_be_aside:
                self._aside = now
                self._recording.aside(*now, self._scale.last)
        elif self._aside == now:
            self._aside = None
            self._recording.aside(self._clock.step, None, self._scale.last)

    def _only_makes_states(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a step only creates the optimizer's states: it precedes the training step and changes no weight."""
        return not self._dispatcher.quiet and not self._clock.begun and stands_still(optimizer)

    @entrance
    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Observe an optimizer's step that has run; the training step ends when every known optimizer has stepped."""
        if self._only_makes_states(optimizer):
            return
        self._note_aside(optimizer)
        if not self._optimizers.stepped(optimizer):
            return
        for observer in self._dispatcher.observing:
            observer.optimizer_stepped(optimizer)
        if self._clock.optimizer_done(optimizer, skipped=False):
            self._dispatcher.end_step()
