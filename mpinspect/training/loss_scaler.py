"""A torch.amp.GradScaler that reports why it skipped a step, limits its scale to bounds, and supports closures."""

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

    With the default arguments, it skips and scales bit-for-bit like torch.amp.GradScaler, with the same device operations
    and no additional GPU synchronisation. LossScaler also records the skipped steps and their causes, limits the scale to
    bounds, and supports optimizer steps with closures::

        scaler = LossScaler()                               # or .static(128.0), .preset("talk")
        scaler.scale(loss).backward()
        scaler.step(optimizer)                              # or step(optimizer, closure)
        scaler.update()
        print(scaler.skips[-1])                             # step 7 skipped: the gradient of 'head.weight' was infinite, ...

    Fused optimizers decide on the device whether to skip. The scaler reads their decisions, which waits for the GPU, when
    ``skips``, ``skipped_steps``, ``last_step_skipped`` or ``state_dict()`` is used, or otherwise after about a thousand steps;
    a skip read after update() has no culprit, since the gradients may be gone. The rules that GradScaler lacks (floor, ceiling,
    hysteresis, tolerance, "hold") are applied on the host: with a fused optimizer update() then waits for the GPU; with other
    optimizers step() always waits.

    Args:
        device: device type of the losses; None: "cuda" if available, else "cpu".
        init_scale: 2^-127 .. 2^127, best a power of two; moved into [floor, ceiling].
        growth_factor, backoff_factor, growth_interval: as GradScaler's; both factors 1.0 make the scale static.
        enabled: False makes everything a pass-through, as in GradScaler.
        floor: the smallest allowed scale; a step that overflows at the floor makes update() raise LossScaleCollapsedError.
        ceiling: the largest allowed scale.
        hysteresis: the scale backs off at this many skipped steps in a row, and at each further one in that row (as in apex;
            Megatron does not reset its count at a clean step).
        tolerance: the scale backs off only if at least this share of steps since its last change was skipped (as in fairseq).
        forward_nonfinite: what to do when the loss was infinite or NaN before it was scaled. "back_off": as GradScaler does.
            "hold": the scale and its growth tracker stay unchanged. Either warns once.
        window: (lowest, highest) recommended scale, used only in messages; see bound().
        explainer: finds the first non-finite value of a skipped step; called only after a skip. Not pickled or copied.
        allow_fp16_gradients: unscale FP16 gradients in FP16 instead of raising; values below 2^-24 are lost.
        process_group: for "hold" with several processes that average their gradients: if one rank's loss was non-finite, all
            ranks hold, which takes an all-reduce of one number in every update(). None: the default group, if there is one;
            False: no all-reduce. Not pickled or copied.

    Raises:
        ValueError, TypeError: an invalid argument.
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
            if window is not None:
                window = checked_window(*window)
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
        """Return a scaler with a constant scale, also for a GradScaler that loads its state dict."""
        for name in ("init_scale", "growth_factor", "backoff_factor"):
            if name in options:
                raise TypeError(f"{name} is not an option of a static scale: it starts at {scale!r} and stays there")
        return cls(init_scale=scale, growth_factor=1.0, backoff_factor=1.0, **options)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> LossScaler:
        """Return a scaler with the settings of "torch", "talk" (NVIDIA, GTC 2018) or "apex", overridden by ``changes``."""
        if name not in PRESETS:
            raise ValueError(f"no preset {name!r}: there are {', '.join(map(repr, PRESETS))}")
        return cls(**{**PRESETS[name], **changes})

    # -- settings ---------------------------------------------------------------------------------------------------

    def bound(self, lowest: float, highest: float, *, floor: float | None = None) -> None:
        """Move the scale into the window [lowest, highest], and make ``highest`` its ceiling. Waits for the GPU.

        Args:
            lowest, highest: scales, 2^-127 .. 2^127; they become ``window``.
            floor: the smallest scale that overflows may lead to; None: ``lowest``.

        Raises:
            ValueError: the window is empty, or the floor is above ``lowest``. The scaler is then unchanged.
        """
        lowest, highest = checked_window(lowest, highest)
        floor = checked_scale(lowest if floor is None else floor, "floor")
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
        """Return a state dict that GradScaler can load, with LossScaler's own state under "mpinspect"; {} if disabled.

        Waits for the GPU.
        """
        if not self._enabled:
            return {}
        self._know_state()
        return scaler_states.to_state_dict(self._saved())

    def to_apex_state_dict(self, loss_id: int = 0) -> dict[str, Any]:
        """Return a state dict for apex.amp.load_state_dict; {} if disabled. Waits for the GPU.

        Its form is {"loss_scaler0": {"loss_scale": ..., "unskipped": ...}}.
        """
        if not self._enabled:
            return {}
        self._know_state()
        return scaler_states.to_apex_state_dict(self._state, loss_id)

    def load_state_dict(self, state_dict: dict[str, Any], loss_id: int = 0) -> None:
        """Load the state dict of a LossScaler, a GradScaler, or apex.amp (its entry for loss ``loss_id``).

        As in GradScaler, saved rules replace the constructor's; settings missing from the state stay unchanged.

        Raises:
            RuntimeError: the state dict is empty, like a disabled scaler's.
            ValueError: the state dict is not valid. The scaler is then unchanged.
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
        # Tensors become numbers; objects that belong to a model or a process are left out.
        state |= {"_last_found": [], "explainer": None, "_iteration": Iteration()}
        if self.process_group is not False:
            state["process_group"] = None
        return state


def _check_device(device: object) -> None:
    """Raise if ``device`` is not a device type; torch.cuda.amp.GradScaler took the scale as its first argument."""
    if not isinstance(device, str):
        raise TypeError(
            f"device is {device!r}: it must be a device type such as 'cuda' or 'cpu'; the scale is init_scale="
        )
    try:
        torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device is {device!r}, which torch does not know: give 'cuda' or 'cpu', for example"
        ) from error
