"""torch.amp.GradScaler's update(), extended with further scaling rules and a record of the skipped steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from mpinspect.runtime.distributed import world_size
from mpinspect.training.checked_steps import CheckedSteps, Iteration
from mpinspect.training.scale_rules import ScaleRules, ScaleState, checked_scale
from mpinspect.training.scaled_losses import Cause, ScaledLosses, find_cause, let_go
from mpinspect.training.skip_log import BACK_OFF, HOLD, SkipLog
from mpinspect.training.skipped_steps import FORWARD, Explainer, LossScaleCollapsedError, SkippedStep

#: Number of unread device tensors (outcomes and losses of fused optimizers' steps) that triggers reading them all.
_MOST_UNREAD = 2048


@dataclass
class _Unread:
    """A step whose outcome is known only on the device."""

    step: int
    found_inf: list[torch.Tensor]
    losses: ScaledLosses


class MovingScale(CheckedSteps):
    """The second half of LossScaler: update().

    With GradScaler's rules, GradScaler's own operation updates the scale on the device, and ``_state`` on the host lags behind
    by the steps not read yet. Other rules are applied on the host, and the resulting scale is written to the device.
    """

    def __init__(
        self,
        device: str,
        init_scale: float,
        enabled: bool,
        rules: ScaleRules,
        log: SkipLog,
        explainer: Explainer | None,
        process_group: Any,
    ) -> None:
        # GradScaler refuses factors of 1.0, so the rules are set after its constructor.
        super().__init__(device, init_scale, enabled, explainer)
        self._rules = rules
        self._set_rules(rules)
        self._log = log
        self._state = ScaleState(init_scale)
        self._unread: deque[_Unread] = deque()
        self._unread_tensors = 0
        #: The recommended scales: (lowest, highest).
        self.window: tuple[float, float] | None = None
        #: Process group whose ranks hold the scale together: None for the default group, False for no group.
        self.process_group = process_group
        #: Iterations ended by update(), including those with skipped steps.
        self.steps = 0

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def rules(self) -> ScaleRules:
        """The rules for changes of the scale, including floor and ceiling."""
        torchs = (self._growth_factor, self._backoff_factor, self._growth_interval)
        if torchs != self._rules.torchs:
            # GradScaler's own attributes were assigned from outside.
            self._rules = self._rules.with_torchs(*torchs)
        return self._rules

    @property
    def is_static(self) -> bool:
        """Whether both factors are 1.0, so that the scale never changes by itself."""
        return self.rules.is_static

    @property
    def forward_nonfinite(self) -> str:
        """The reaction of the scale to a non-finite loss of the forward: "back_off" or "hold"."""
        return self._log.forward_nonfinite

    @property
    def skipped_steps(self) -> int:
        """The number of skipped steps. Waits for the GPU only if fused optimizers have stepped."""
        self._read()
        return self._log.count

    @property
    def skips(self) -> deque[SkippedStep]:
        """The last hundred skipped steps. Waits for the GPU only if fused optimizers have stepped."""
        self._read()
        return self._log.skips

    # -- moving the scale -------------------------------------------------------------------------------------------

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """End the iteration: update the scale, or set it to ``new_scale`` (waits for the GPU if that is a GPU tensor).

        Raises:
            RuntimeError: no step() or unscale_() since the last update().
            LossScaleCollapsedError: a step overflowed although the scale was at its floor. The iteration has still ended.
            ValueError, TypeError: an invalid new scale, or one outside [floor, ceiling]. The scaler is then unchanged.
        """
        if not self._enabled:
            return
        self._need_scale("update")
        given = None
        if new_scale is not None:
            given = self._checked_new_scale(new_scale)
        found = self._found_of_all()
        if given is None and not found:
            raise RuntimeError(
                "No inf checks were recorded prior to update(): call step() or unscale_() of an optimizer that has gradients "
                "before it, in every iteration."
            )
        torch_moves = given is None and self.rules.are_torchs and self.forward_nonfinite == BACK_OFF
        skipped = self._outcome(wait=not torch_moves)
        if skipped is None or (torch_moves and self._unread and not skipped):
            self._update_unread(found)
            return
        self._read()
        if skipped and torch_moves:
            self._know_state()
        before, collapsed = self._state, False
        if torch_moves:
            self._let_torch_move(found)
            self._state = self._rules.next(before, skipped=skipped)
        elif given is not None:
            self._move_to(given)
        else:
            collapsed = self._move_by_rules(skipped)
        self._finish(before, collapsed, counts=bool(found))

    def _move_by_rules(self, skipped: bool) -> bool:
        """Update the scale by rules that torch lacks, and return whether a back-off was due at the floor."""
        before = self._state
        if self._holds(skipped):
            return False
        self._write(self._rules.next(before, skipped=skipped))
        return skipped and self._rules.collapses(before)

    def _finish(self, before: ScaleState, collapsed: bool, *, counts: bool) -> None:
        """End an iteration whose outcome is known on the host, and record its skipped step, if any."""
        cause = self._end_iteration(counts=counts)
        if self.explainer is not None:
            let_go(self.explainer, forward_finite=cause is None or cause.phase != FORWARD)
        if cause is None:
            return
        skip = self._log.add(self.steps - 1, cause, before, self._state, self._rules, self.window)
        if collapsed:
            raise LossScaleCollapsedError(skip)

    def _update_unread(self, found: list[torch.Tensor]) -> None:
        """End an iteration whose outcome is known only on the device, where torch's rules update the scale."""
        self._unread.append(_Unread(self.steps, found, self._iteration.losses))
        self._unread_tensors += len(found) + len(self._iteration.losses)
        self._let_torch_move(found)
        self._end_iteration(counts=True)
        if self._unread_tensors >= _MOST_UNREAD:
            self._read()

    def _let_torch_move(self, found: list[torch.Tensor]) -> None:
        last = {id(flag) for flag in self._last_found}
        if len(found) > len(last) and id(found[0]) in last:
            # torch adds the other optimizers' flags to the first flag, in place.
            self._last_found = [flag.clone() for flag in self._last_found]
        super().update()

    def _holds(self, skipped: bool) -> bool:
        """Return whether to hold the scale after a skipped step because a rank's unscaled loss was non-finite."""
        if self.forward_nonfinite != HOLD:
            return False
        # The all-reduce needs every rank in every update(), including ranks that did not skip.
        failed = self._failed_on_any_rank()
        cause = self._iteration.cause
        if not skipped or cause is None:
            return False
        if failed is not None and bool(failed) and cause.phase != FORWARD:
            cause = self._iteration.cause = Cause(FORWARD)
        return cause.phase == FORWARD

    def _failed_on_any_rank(self) -> torch.Tensor | None:
        """Return a device flag: whether a loss of any rank was non-finite; None if there is only one rank."""
        group = self.process_group
        if group is False or world_size(group) == 1:
            return None
        failed = self._iteration.losses.failed(self._check_scale_growth_tracker("update")[0].device)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
        return failed

    def _end_iteration(self, *, counts: bool) -> Cause | None:
        """Begin the next iteration, and return why a step of the ended one was skipped (None if all steps ran)."""
        cause = self._iteration.cause
        self._iteration = Iteration()
        self._per_optimizer_states.clear()
        self.steps += counts
        return cause

    def _read(self) -> None:
        """Read the outcomes of the steps that are known only on the device. Waits for the GPU if there are any."""
        if not self._unread:
            return
        flags = deque(_any_nonzero([step.found_inf for step in self._unread]))
        while self._unread:
            step, before, skipped = self._unread.popleft(), self._state, flags.popleft()
            self._state = self.rules.next(before, skipped=skipped)
            if skipped:
                cause = find_cause(step.losses, before.scale, None, None)
                self._log.add(step.step, cause, before, self._state, self._rules, self.window)
        self._unread_tensors = 0

    def _know_state(self) -> None:
        """Read the scale and the growth tracker from the device into ``_state``. Waits for the GPU."""
        self._read()
        self._state = replace(self._state, scale=self.get_scale(), clean_steps=self._get_growth_tracker())

    def _move_to(self, scale: float) -> None:
        self._log.check_power_of_two(scale)
        self._init_scale = scale
        if self._scale is not None:
            self._scale.fill_(scale)
        self._state = self._state.at(scale)

    def _write(self, state: ScaleState) -> None:
        before, self._state = self._state, state
        if self._scale is not None and self._growth_tracker is not None:
            if state.scale != before.scale:
                self._scale.fill_(state.scale)
            if state.clean_steps != before.clean_steps:
                self._growth_tracker.fill_(state.clean_steps)

    def _checked_new_scale(self, new_scale: float | torch.Tensor) -> float:
        if isinstance(new_scale, torch.Tensor):
            if new_scale.numel() != 1 or new_scale.requires_grad:
                raise ValueError(
                    "new_scale should be a number, or a tensor of one element that requires no gradient, not one of shape "
                    f"{tuple(new_scale.shape)} with requires_grad={new_scale.requires_grad}"
                )
            new_scale = new_scale.item()
        scale = checked_scale(new_scale, "new_scale")
        if self._rules.clamped(scale) != scale:
            floor, ceiling = self._rules.floor, self._rules.ceiling
            raise ValueError(
                f"new_scale is {scale:g}, outside floor {floor} and ceiling {ceiling}: move these with bound()"
            )
        return scale

    def _change(self, rules: ScaleRules) -> None:
        rules.check()
        # Steps not read yet must be evaluated with the old rules.
        self._read()
        self._set_rules(rules)

    def _set_rules(self, rules: ScaleRules) -> None:
        self._rules = rules
        self._growth_factor, self._backoff_factor, self._growth_interval = rules.torchs


def _any_nonzero(groups: list[list[torch.Tensor]]) -> list[bool]:
    """Return for each group of 0-d tensors whether any of them is non-zero, with one copy to the host for all groups."""
    device = groups[0][0].device
    flat = [found.to(device, non_blocking=True) for group in groups for found in group]
    values = iter(torch.stack(flat).tolist() if flat else [])
    return [any(value != 0 for value in [next(values) for _ in group]) for group in groups]
