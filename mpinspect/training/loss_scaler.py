"""A torch.amp.GradScaler that says why it skipped a step, keeps its scale within bounds, and takes closures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mpinspect.training import scaler_states
from mpinspect.training.checked_steps import Iteration
from mpinspect.training.scale_moves import MovingScale
from mpinspect.training.scale_rules import PRESETS, ScaleRules, checked_scale, checked_window
from mpinspect.training.skip_log import BACK_OFF, HOLD, SkipLog
from mpinspect.training.skipped_steps import Explainer, LossScaleCollapsedError, LossScaleWarning

__all__ = ["BACK_OFF", "HOLD", "LossScaleCollapsedError", "LossScaleWarning", "LossScaler"]


class LossScaler(MovingScale):
    """Scales losses, skips the steps that overflow, and moves the scale.

    With its defaults it decides exactly as torch.amp.GradScaler does, bit for bit, with the same operations on the device and no
    wait of its own. On top it knows which steps were skipped and why, keeps the scale within bounds, and steps with closures::

        scaler = LossScaler()                               # or .static(128.0), .preset("talk")
        scaler.scale(loss).backward()
        scaler.step(optimizer)                              # or step(optimizer, closure)
        scaler.update()
        print(scaler.skips[-1])                             # step 7 skipped: the gradient of 'head.weight' was infinite, ...

    Fused optimizers decide on the device. What they skipped is read, with a wait for the GPU, when somebody asks (``skips``,
    ``skipped_steps``, ``last_step_skipped``, ``state_dict()``), or else after about a thousand steps; asked after update() it
    names no culprit, since the gradients may be gone. The rules that GradScaler does not have (floor, ceiling, hysteresis,
    tolerance, "hold") are decided on the host: with a fused optimizer update() then waits for the GPU, as step() always does
    with the others.

    Args:
        device: device type of the losses; None: "cuda" where there is one, else "cpu".
        init_scale: 2^-127 .. 2^127, best a power of two; moved into [floor, ceiling].
        growth_factor, backoff_factor, growth_interval: as GradScaler's; both factors 1.0 make the scale static.
        enabled: False makes everything a pass-through, as in GradScaler.
        floor: the scale never goes below it; a step that overflows there raises LossScaleCollapsedError from update().
        ceiling: the scale never goes above it.
        hysteresis: the scale backs off at this many skipped steps in a row, and at each that follows (apex's meaning; Megatron's
            count does not start again at a clean step).
        tolerance: it backs off only where at least this share of the steps since it last moved was skipped (fairseq's meaning).
        forward_nonfinite: what to do when the loss was infinite or NaN before it was scaled. "back_off": as GradScaler does.
            "hold": the scale and its growth tracker stay as they are. Either warns once.
        window: (lowest, highest) of the scales that fit, for the words only; see bound().
        explainer: finds the first value that was not finite when a step was skipped; asked only then. Not pickled or copied.
        allow_fp16_gradients: unscale FP16 gradients in FP16 instead of refusing them: what falls below 2^-24 is lost.
        process_group: for "hold" with several processes that average their gradients: where one rank's loss was not finite all
            hold, by a reduction of one number in every update(). None: the default group, where there is one; False: never.
            Not pickled or copied.

    Raises:
        ValueError, TypeError: an argument that makes no sense.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        floor: float | None = None,
        ceiling: float | None = None,
        hysteresis: int = 1,
        tolerance: float = 0.0,
        forward_nonfinite: str = BACK_OFF,
        window: tuple[float, float] | None = None,
        explainer: Explainer | None = None,
        allow_fp16_gradients: bool = False,
        process_group: Any = None,
    ) -> None:
        rules = ScaleRules(growth_factor, backoff_factor, growth_interval, floor, ceiling, hysteresis, tolerance)
        log = SkipLog(forward_nonfinite)
        if enabled:
            rules.check()
            init_scale = rules.clamped(checked_scale(init_scale, "init_scale"))
            window = None if window is None else checked_window(*window)
        if device is not None:
            _check_device(device)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(device, init_scale, enabled, rules, log, explainer, process_group)
        self.window = window
        self.allow_fp16_gradients = allow_fp16_gradients
        if self._enabled:
            log.check_power_of_two(init_scale)

    @classmethod
    def static(cls, scale: float, **options: Any) -> LossScaler:
        """Return a scaler whose scale stays ``scale``. Loaded into GradScaler its state dict stays static too."""
        for name in ("init_scale", "growth_factor", "backoff_factor"):
            if name in options:
                raise TypeError(f"{name} is no option of a static scale: it starts at {scale!r} and stays there")
        return cls(init_scale=scale, growth_factor=1.0, backoff_factor=1.0, **options)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> LossScaler:
        """Return a scaler with the settings of "torch", "talk" (NVIDIA, GTC 2018) or "apex", and ``changes`` to them."""
        if name not in PRESETS:
            raise ValueError(f"no preset {name!r}: there are {', '.join(map(repr, PRESETS))}")
        return cls(**{**PRESETS[name], **changes})

    # -- settings ---------------------------------------------------------------------------------------------------

    def bound(self, lowest: float, highest: float, *, floor: float | None = None) -> None:
        """Move the scale into the window [lowest, highest], and let it go no higher from now on. Waits for the GPU.

        Args:
            lowest, highest: scales, 2^-127 .. 2^127; become ``window``, and ``highest`` the ceiling.
            floor: how far overflows may take it below the window; None: not at all.

        Raises:
            ValueError: the window is empty, or the floor lies above its bottom. Nothing has changed then.
        """
        lowest, highest = checked_window(lowest, highest)
        floor = lowest if floor is None else checked_scale(floor, "floor")
        if floor > lowest:
            raise ValueError(f"floor {floor:g} is above the window's lowest scale, {lowest:g}")
        self._change(replace(self.rules, floor=floor, ceiling=highest))
        self.window = (lowest, highest)
        if self._enabled:
            self._know_state()
            self._move_to(min(max(self._state.scale, lowest), highest))

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor, 1 or more."""
        self._change(replace(self.rules, growth_factor=new_factor))

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor, above 0 and at most 1."""
        self._change(replace(self.rules, backoff_factor=new_factor))

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval in steps, 1 or more."""
        self._change(replace(self.rules, growth_interval=new_interval))

    # -- saving and copying -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """GradScaler's five entries, which it loads as they are, and the rest under "mpinspect". {} where disabled. Waits."""
        if not self._enabled:
            return {}
        self._know_state()
        return scaler_states.to_state_dict(self._saved())

    def to_apex_state_dict(self, loss_id: int = 0) -> dict[str, Any]:
        """For apex.amp.load_state_dict: {"loss_scaler0": {"loss_scale": ..., "unskipped": ...}}; {} where disabled. Waits."""
        if not self._enabled:
            return {}
        self._know_state()
        return scaler_states.to_apex_state_dict(self._state, loss_id)

    def load_state_dict(self, state_dict: dict[str, Any], loss_id: int = 0) -> None:
        """Load the state dict of a LossScaler, a GradScaler, or apex.amp (there of loss ``loss_id``).

        As in GradScaler, saved rules replace those of the constructor; what the state does not have stays as it is.

        Raises:
            RuntimeError: an empty one, of a disabled scaler.
            ValueError: anything else. Nothing has changed then.
        """
        if not self._enabled:
            return
        self._read()
        saved = scaler_states.read(state_dict, self._saved(), loss_id)
        super().load_state_dict(scaler_states.to_state_dict(saved))
        self._set_rules(saved.rules)
        self._state, self.window, self.steps = saved.state, saved.window, saved.steps
        self._log.forward_nonfinite, self._log.count = saved.forward_nonfinite, saved.skipped_steps

    def _saved(self) -> scaler_states.Saved:
        log = self._log
        return scaler_states.Saved(self.rules, self._state, self.steps, log.count, log.forward_nonfinite, self.window)

    def __getstate__(self) -> dict[str, Any]:
        if self._last_skipped is None:
            self._last_skipped = any(bool(found) for found in self._last_found)
        self._read()
        state: dict[str, Any] = super().__getstate__()
        # Tensors become numbers; what belongs to a model or a process stays behind.
        group = self.process_group
        left_behind: dict[str, Any] = {
            "_last_found": [],
            "explainer": None,
            "process_group": False if group is False else None,
        }
        return {**state, **left_behind, "_iteration": Iteration()}


def _check_device(device: object) -> None:
    """torch.cuda.amp.GradScaler took the scale first."""
    if not isinstance(device, str):
        raise TypeError(
            f"device is {device!r}: it must be a device type such as 'cuda' or 'cpu'; the scale is init_scale="
        )
    try:
        torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}, which torch does not know: 'cuda' or 'cpu', say") from error
