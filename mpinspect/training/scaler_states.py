"""Reads and writes state dicts of loss scalers: LossScaler's own, torch.amp.GradScaler's and apex.amp's."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from mpinspect.reporting.json_text import named
from mpinspect.training.scale_rules import ScaleRules, ScaleState, checked_scale, checked_window
from mpinspect.training.skip_log import BACK_OFF, HOLD

#: The key of the entry that GradScaler does not have, and the version of that entry's format.
OWN_KEY, VERSION = "mpinspect", 1
_TORCHS_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


@dataclass(frozen=True)
class Saved:
    """Everything in a scaler's checkpoint.

    Args:
        rules: the rules for changes of the scale.
        state: the current scale and its counters.
        steps: number of steps, including skipped ones.
        skipped_steps: number of skipped steps.
        forward_nonfinite: "back_off" or "hold".
        window: (lowest, highest) recommended scale, or None.
    """

    rules: ScaleRules
    state: ScaleState
    steps: int
    skipped_steps: int
    forward_nonfinite: str
    window: tuple[float, float] | None


def to_state_dict(saved: Saved) -> dict[str, Any]:
    """Return GradScaler's five entries and OWN_KEY, made of dicts, numbers, strings, lists and None only."""
    rules, state = saved.rules, saved.state
    return {
        "scale": state.scale,
        **named(rules, "growth_factor backoff_factor growth_interval"),
        "_growth_tracker": state.clean_steps,
        OWN_KEY: {
            "version": VERSION,
            **named(rules, "floor ceiling hysteresis tolerance"),
            "forward_nonfinite": saved.forward_nonfinite,
            "window": None if saved.window is None else list(saved.window),
            **named(saved, "steps skipped_steps"),
            **named(state, "skipped_in_a_row steps_since_move skips_since_move"),
        },
    }


def to_apex_state_dict(state: ScaleState, loss_id: int) -> dict[str, Any]:
    """Return a state dict of one loss for apex.amp.load_state_dict."""
    return {f"loss_scaler{loss_id}": {"loss_scale": state.scale, "unskipped": state.clean_steps}}


def read(state_dict: Any, current: Saved, loss_id: int) -> Saved:
    """Parse a state dict; values that it lacks are taken from ``current``.

    Raises:
        RuntimeError: the state dict is empty.
        ValueError: the state dict is invalid or of an unknown kind; the message guesses its kind.
    """
    if isinstance(state_dict, Mapping) and not state_dict:
        raise RuntimeError(
            "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
        )
    if isinstance(state_dict, Mapping) and all(key in state_dict for key in _TORCHS_KEYS):
        torchs = _read_torchs(state_dict, current)
        if OWN_KEY not in state_dict:
            return torchs
        return _read_own(state_dict[OWN_KEY], torchs)
    if isinstance(state_dict, Mapping) and any(str(key).startswith("loss_scaler") for key in state_dict):
        return _read_apex(state_dict, current, loss_id)
    raise ValueError(f"this is not a loss scaler's state dict: {_looks_like(state_dict)}")


def _read_torchs(state_dict: Mapping[str, Any], current: Saved) -> Saved:
    factors = (_number(state_dict, "growth_factor"), _number(state_dict, "backoff_factor"))
    rules = current.rules.with_torchs(*factors, state_dict["growth_interval"])
    rules.check()
    return replace(
        current, rules=rules, state=_state(state_dict, "scale", "_growth_tracker", rules), steps=0, skipped_steps=0
    )


def _read_apex(state_dict: Mapping[str, Any], current: Saved, loss_id: int) -> Saved:
    name = f"loss_scaler{loss_id}"
    own = state_dict.get(name)
    if own is None:
        there = ", ".join(sorted(map(str, state_dict)))
        raise ValueError(
            f"apex.amp's state has no loss_id {loss_id}: there are {there}. It has one scaler for each loss."
        )
    if not isinstance(own, Mapping) or not {"loss_scale", "unskipped"} <= own.keys():
        raise ValueError(f"this is not a state dict of apex.amp: {name!r} has no 'loss_scale' and 'unskipped'")
    state = _state(own, "loss_scale", "unskipped", current.rules)
    # apex's scale_window may have been longer than this growth interval: then the scale grows after the next clean step.
    clean = min(state.clean_steps, current.rules.growth_interval - 1)
    return replace(current, state=replace(state, clean_steps=clean), steps=0, skipped_steps=0)


def _read_own(own: Any, torchs: Saved) -> Saved:
    if not isinstance(own, Mapping) or not isinstance(own.get("version"), int):
        raise ValueError(f"the state dict's entry {OWN_KEY!r} has no version")
    if own["version"] > VERSION:
        raise ValueError(
            f"the state dict was written by a newer mpinspect (version {own['version']} of its entry {OWN_KEY!r}, this one "
            f"reads {VERSION}): upgrade, or load the state without that entry"
        )
    missing = sorted(to_state_dict(torchs)[OWN_KEY].keys() - own.keys())
    if missing:
        raise ValueError(f"the state dict's entry {OWN_KEY!r} lacks {', '.join(missing)}")
    rules = replace(torchs.rules, **{name: own[name] for name in ("floor", "ceiling", "hysteresis", "tolerance")})
    rules.check()
    counters = {field.name: _count(own, field.name) for field in fields(ScaleState) if field.name in own}
    if own["forward_nonfinite"] not in (BACK_OFF, HOLD):
        raise ValueError(f"the state dict's forward_nonfinite is {own['forward_nonfinite']!r}")
    return Saved(
        rules,
        replace(torchs.state, **counters, scale=rules.clamped(torchs.state.scale)),
        _count(own, "steps"),
        _count(own, "skipped_steps"),
        own["forward_nonfinite"],
        None if own["window"] is None else checked_window(*own["window"]),
    )


def _state(entries: Mapping[str, Any], scale: str, clean_steps: str, rules: ScaleRules) -> ScaleState:
    value = _number(entries, scale)
    if not (0 < value < math.inf):
        raise ValueError(
            f"the saved loss scale is {value}: that run had collapsed before it was saved. Load an earlier checkpoint, or start "
            "with a new scaler."
        )
    return ScaleState(rules.clamped(checked_scale(value, scale)), _count(entries, clean_steps))


def _number(entries: Mapping[str, Any], name: str) -> float:
    value = entries[name]
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise ValueError(f"the state dict's {name!r} is {type(value).__name__}, not a number")
    return float(value)


def _count(entries: Mapping[str, Any], name: str) -> int:
    value = entries[name]
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 0:
        raise ValueError(f"the state dict's {name!r} is {value!r}, not a count of steps")
    return int(value)


def _looks_like(found: Any) -> str:
    """Return a clause with a guess at the kind of an invalid state dict."""
    if not isinstance(found, Mapping):
        return f"it is {type(found).__name__}, not a dict"
    names = {str(key) for key in found}
    if {"state", "param_groups"} <= names:
        return "it looks like an optimizer's"
    if "cur_scale" in names or "dynamic_loss_scale" in names:
        return "it looks like an FP16 optimizer's of DeepSpeed, Megatron or apex.fp16_utils; set the scale with update(new_scale)"
    inside = sorted(str(key) for key, entry in found.items() if _is_scalers(entry))
    if inside:
        return f"it looks like a whole checkpoint; the scaler's state is its entry {inside[0]!r}"
    if any(hasattr(entry, "dtype") for entry in found.values()):
        return "it looks like a model's"
    missing = [key for key in _TORCHS_KEYS if key not in names]
    if len(missing) < len(_TORCHS_KEYS):
        return f"it looks like GradScaler's without {', '.join(missing)}"
    return f"its entries are {', '.join(sorted(names)[:6])}"


def _is_scalers(entry: Any) -> bool:
    if not isinstance(entry, Mapping):
        return False
    return all(key in entry for key in _TORCHS_KEYS) or "loss_scaler0" in entry
