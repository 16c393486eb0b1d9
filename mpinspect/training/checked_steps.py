"""torch.amp.GradScaler's scale(), unscale_() and step(), which record skipped steps and their causes and support closures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from mpinspect.training import closures
from mpinspect.training.scaled_losses import Cause, ScaledLosses, find_cause
from mpinspect.training.skipped_steps import Explainer


@dataclass
class Iteration:
    """Everything recorded since the last update()."""

    losses: ScaledLosses = field(default_factory=ScaledLosses)
    #: The optimizers that unscaled or stepped, by id.
    optimizers: dict[int, torch.optim.Optimizer] = field(default_factory=dict)
    #: Whether each optimizer's step was skipped, by id, if known on the host.
    skipped: dict[int, bool] = field(default_factory=dict)
    #: The cause of the first skipped step.
    cause: Cause | None = None


class CheckedSteps(torch.amp.GradScaler):
    """The first half of LossScaler: everything up to update(). Launches the same device operations as GradScaler."""

    def __init__(self, device: str, init_scale: float, enabled: bool, explainer: Explainer | None) -> None:
        super().__init__(device, init_scale, enabled=enabled)
        #: Finds the first non-finite value of a skipped step.
        self.explainer = explainer
        #: Whether FP16 gradients are unscaled in FP16 instead of refused.
        self.allow_fp16_gradients = False
        self._iteration = Iteration()
        self._last_id = 0
        self._last_found: list[torch.Tensor] = []
        self._last_skipped: bool | None = False

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last step() was skipped. Waits for the GPU only if that optimizer is fused."""
        if self._last_skipped is None:
            self._last_skipped = any(bool(found) for found in self._last_found)
            if self._last_id in self._iteration.optimizers:
                # Before update() the gradients still exist, so the cause can be found.
                self._learn(self._last_id, self._last_skipped)
        return self._last_skipped

    @property
    def found_inf(self) -> torch.Tensor:
        """The last step()'s overflow flag: 0-d FP32 on its device, zero if all gradients were finite; does not wait."""
        if not self._last_found:
            return torch.tensor(float(bool(self._last_skipped)), dtype=torch.float32, device="cpu")
        first, *others = self._last_found
        for other in others:
            first = first + other.to(first.device, non_blocking=True)
        return first

    # -- scaling and unscaling --------------------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Return ``outputs`` (a tensor, or tensors in lists, tuples, iterators) times the scale; does not wait for the GPU."""
        if not self._enabled:
            return outputs
        losses = self._iteration.losses
        if isinstance(outputs, (torch.Tensor, list, tuple)) or not isinstance(outputs, Iterable):
            scaled = super().scale(outputs)
            losses.note(outputs)
            losses.watch(scaled)
            return scaled
        return super().scale(losses.noting(outputs))

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the scale, in place; for clipping before step(). Does not wait for the GPU.

        Raises:
            RuntimeError: called before scale(), twice in an iteration, or after step().
            ValueError: gradients are FP16 (see ``allow_fp16_gradients``). No gradient was changed then.
        """
        if not self._enabled:
            return
        self._need_scale("unscale_")
        self._need_stage_ready(optimizer)
        try:
            super().unscale_(optimizer)
        except BaseException as error:
            self._per_optimizer_states.pop(id(optimizer), None)
            if not isinstance(error, ValueError) or "FP16" not in str(error):
                raise
            raise ValueError(
                f"{error} The parameters are stored in FP16: keep them in FP32 and use torch.autocast, or let the optimizer "
                "hold FP32 master weights. LossScaler(allow_fp16_gradients=True) unscales in FP16, where small ones are lost."
            ) from error
        self._iteration.optimizers[id(optimizer)] = optimizer

    def abandon(self) -> None:
        """Discard the current iteration and its batch: the state is then the same as right after update()."""
        if not self._enabled:
            return
        iteration = self._iteration
        iteration.skipped.clear()
        iteration.optimizers.clear()
        iteration.cause = None
        iteration.losses.forget()
        iteration.losses.count = 0
        self._per_optimizer_states.clear()

    @property
    def has_scaled(self) -> bool:
        """Whether a loss was scaled since the last update()."""
        return self._iteration.losses.count > 0

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16 or self.allow_fp16_gradients)

    # -- stepping ---------------------------------------------------------------------------------------------------

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale the gradients if needed, and step unless one is infinite or NaN. Waits for the GPU unless fused.

        A closure may be given by position or keyword; as for the optimizer alone, it runs zero_grad, the forward and
        scale(loss).backward(), and returns the loss. After each run of the closure the gradients are unscaled and checked; if
        they overflow, the step is undone: weights and optimizer state are restored. A step with a closure waits for the GPU
        after every run, even with a fused optimizer.

        Returns:
            The result of ``optimizer.step``; if the step was skipped, None, or the loss of the closure's first run.

        Raises:
            RuntimeError: called before scale(loss).backward(), or twice in an iteration.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if self._stage(optimizer) is OptState.STEPPED:
            raise RuntimeError(
                "step() has already been called since the last update(). Every iteration ends with update(), called once, after "
                "the steps of all optimizers."
            )
        closure, step = closures.taken_from(optimizer, args, kwargs)
        if closure is not None:
            return self._step_with_closure(optimizer, closure, step)
        # GradScaler refuses even closure=None.
        kwargs.pop("closure", None)
        self._need_scale("step")
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            if self._stage(optimizer) is OptState.READY:
                self.unscale_(optimizer)
            self._need_gradients(optimizer)
        result = super().step(optimizer, *args, **kwargs)
        self._stepped(optimizer)
        return result

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        """Step or skip as GradScaler does, and record which."""
        skipped = bool(sum(found.item() for found in optimizer_state["found_inf_per_device"].values()))
        self._iteration.skipped[id(optimizer)] = skipped
        return None if skipped else optimizer.step(*args, **kwargs)

    def _step_with_closure(
        self, optimizer: torch.optim.Optimizer, closure: closures.Evaluation, step: Callable[[closures.Evaluation], Any]
    ) -> Any:
        try:
            outcome = closures.run(optimizer, lambda: self._evaluate(optimizer, closure), step)
        except BaseException:
            self._per_optimizer_states.pop(id(optimizer), None)
            raise
        self._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED
        self._iteration.skipped[id(optimizer)] = outcome.skipped
        self._stepped(optimizer)
        return outcome.result

    def _evaluate(self, optimizer: torch.optim.Optimizer, closure: closures.Evaluation) -> Any:
        """Run the closure once and unscale its gradients; raise closures.Overflow if one is non-finite."""
        self._per_optimizer_states.pop(id(optimizer), None)
        iteration, losses = self._iteration, self._iteration.losses
        losses.forget()
        before = losses.count
        loss = closure()
        if self._iteration is not iteration:
            raise RuntimeError(
                "the closure called update(): call it after step(), when the closure has run for the last time."
            )
        if losses.count == before:
            raise RuntimeError(
                "the closure did not scale its loss: its gradients would be divided by a scale they never had. "
                "Write scaler.scale(loss).backward() in it, and return the unscaled loss."
            )
        if self._stage(optimizer) is OptState.READY:
            self.unscale_(optimizer)
        self._need_gradients(optimizer)
        if sum(found.item() for found in self._found_inf_per_device(optimizer).values()):
            raise closures.Overflow(loss)
        return loss

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self._iteration.optimizers[id(optimizer)] = optimizer
        self._last_id = id(optimizer)
        self._last_found = list(self._found_inf_per_device(optimizer).values())
        self._last_skipped = self._iteration.skipped.get(id(optimizer))
        if self._last_skipped:
            self._learn(id(optimizer), True)

    # -- its outcome ------------------------------------------------------------------------------------------------

    def _learn(self, optimizer_id: int, skipped: bool) -> None:
        """Record whether an optimizer's step was skipped; find the cause of a skip while its gradients still exist."""
        iteration = self._iteration
        iteration.skipped[optimizer_id] = skipped
        if skipped and iteration.cause is None:
            optimizer = iteration.optimizers.get(optimizer_id)
            iteration.cause = find_cause(iteration.losses, self.get_scale(), optimizer, self.explainer)

    def _outcome(self, *, wait: bool) -> bool | None:
        """Return whether a step of this iteration was skipped; None if only the device knows and ``wait`` is False."""
        iteration = self._iteration
        states = self._per_optimizer_states
        unknown = [one for one in states if one not in iteration.skipped]
        if wait:
            for one in unknown:
                self._learn(one, any(bool(found) for found in states[one]["found_inf_per_device"].values()))
            unknown = []
        if any(iteration.skipped.values()):
            return True
        return None if unknown else False

    def _found_of_all(self) -> list[torch.Tensor]:
        """Return this iteration's overflow flags, one for each optimizer and device."""
        states = self._per_optimizer_states.values()
        return [found for state in states for found in state["found_inf_per_device"].values()]

    def _stage(self, optimizer: torch.optim.Optimizer) -> OptState:
        state = self._per_optimizer_states.get(id(optimizer))
        return OptState.READY if state is None else state["stage"]

    # -- refusals ---------------------------------------------------------------------------------------------------

    def _need_scale(self, name: str) -> None:
        if self._scale is None:
            raise RuntimeError(
                f"{name}() before any scale(): every iteration begins with scaler.scale(loss).backward(), which makes the "
                "gradients."
            )

    def _need_stage_ready(self, optimizer: torch.optim.Optimizer) -> None:
        stage = self._stage(optimizer)
        if stage is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update(). Call it once an iteration, after "
                "the last backward(): divided by the scale twice, gradients would be lost. Every iteration ends with update()."
            )
        if stage is OptState.STEPPED:
            raise RuntimeError(
                "unscale_() is being called after step(): the gradients are unscaled already. Clip between unscale_() and "
                "step(), and end the iteration with update()."
            )

    def _need_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._found_inf_per_device(optimizer):
            self._per_optimizer_states.pop(id(optimizer), None)
            raise RuntimeError(
                "no parameter of this optimizer has a gradient: call scaler.scale(loss).backward() before step(), and see that "
                "the loss depends on the optimizer's parameters."
            )
