"""Lists the different settings of two runs: precision, optimizers, scalers, shapes, sampling, versions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from mpinspect.ranges.analysis.precision import run_format
from mpinspect.ranges.kinds import PARAMETER_KINDS
from mpinspect.ranges.session import OptimizerRecord, ScalerRecord, Session
from mpinspect.reporting.words import NOT_APPLICABLE, filled, format_name, with_power

Record = TypeVar("Record")
#: Settings in words, by name. A missing or unknown setting has no entry.
Settings = dict[str, str]
#: Settings that a run shows only once its steps reach them; older files name no devices.
_SEEN_LATER = ("devices", "gradients", "outputs", "loss", " states")
_OF_PRECISION = {"computes in", "weights", "gradients", "autocast", "outputs", "loss"}
#: Dtypes that follow from the others.
_FOLLOWING = {"computes in", "gradients", "outputs", "loss"}
#: No value of these breaks a training; a model is named by its class.
_OF_CAPTURE = {"captured", "every", "watch", "max_overhead", "steps", "model", "mpinspect"}


@dataclass(frozen=True)
class Change:
    """A setting that differs: its name, and its value in each run in words ("-" if missing)."""

    name: str
    first: str
    second: str

    @property
    def words(self) -> str:
        """Its name with both values."""
        first, second = ("none" if value == NOT_APPLICABLE else value for value in (self.first, self.second))
        return f"{self.name} {first} -> {second}"

    @property
    def is_of_precision(self) -> bool:
        """Whether it is a dtype of the training."""
        return self.name in _OF_PRECISION

    @property
    def follows(self) -> bool:
        """Whether it is a dtype that follows from other settings."""
        return self.name in _FOLLOWING

    @property
    def may_break(self) -> bool:
        """Whether it is a setting of the training, not of its capture."""
        return self.name not in _OF_CAPTURE


def changed_settings(first: Session, second: Session) -> Iterator[Change]:
    """Yield the settings that differ, precision first; settings unknown for a run are not compared."""
    parts = [_shapes, _inspector]
    if first.precision.weights and second.precision.weights:
        parts = [_precision, _optimizers, _scalers, *parts]
    for part in parts:
        one, other = part(first), part(second)
        # A parameter that only one run has counts as a layer that differs, not as a setting.
        lone = ""
        for name in dict.fromkeys([*one, *other]):
            if lone and name.startswith(lone):
                # A setting of an optimizer or scaler that one run lacks.
                continue
            here, there = one.get(name, NOT_APPLICABLE), other.get(name, NOT_APPLICABLE)
            needs_both = part is _shapes or name.endswith(_SEEN_LATER)
            if here != there and not (needs_both and NOT_APPLICABLE in (here, there)):
                yield Change(name, here, there)
                lone = f"{name} " if NOT_APPLICABLE in (here, there) else ""


def _precision(session: Session) -> Settings:
    ledger, format = session.precision, run_format(session)
    found = {
        "computes in": format.name if format is not None else "",
        "weights": _names(ledger.weights),
        "gradients": _names(ledger.gradients),
        "autocast": _names(dtype or "none" for dtype in ledger.autocast),
        "outputs": _names(ledger.outputs),
        "loss": _names(ledger.losses),
    }
    return {name: format_name(words) for name, words in found.items() if words}


def _optimizers(session: Session) -> Settings:
    found: Settings = {}
    for name, optimizer in _numbered("optimizer", session.precision.optimizers):
        found |= _optimizer(name, optimizer)
    return found


def _optimizer(name: str, optimizer: OptimizerRecord) -> Settings:
    found = {name: optimizer.type} | {f"{name} {key}": f"{value:g}" for key, value in optimizer.settings.items()}
    states = sorted(optimizer.dtypes())
    if states:
        found[f"{name} states"] = _names(states)
    if optimizer.masters:
        found[f"{name} masters"] = f"{optimizer.masters:,} elements"
    return found


def _scalers(session: Session) -> Settings:
    found: Settings = {}
    for name, scaler in _numbered("scaler", [scaler for scaler in session.precision.scalers if scaler.enabled]):
        found |= _scaler(name, scaler)
    return found or ({"scaler": "disabled"} if session.precision.scalers else {})


def _scaler(name: str, scaler: ScalerRecord) -> Settings:
    found = {name: scaler.type}
    if scaler.init_scale is not None:
        found[f"{name} init_scale"] = with_power(scaler.init_scale)
    if scaler.growth_interval is not None:
        found[f"{name} growth_interval"] = f"{scaler.growth_interval:g}"
    return found


def _shapes(session: Session) -> Settings:
    return {
        f"shape of {info.name}": "x".join(map(str, info.shape))
        for info in session.watched
        if info.kind in PARAMETER_KINDS and info.shape
    }


def _inspector(session: Session) -> Settings:
    info, progress = session.info, session.progress
    found = {
        "model": info.model,
        "devices": info.devices,
        "captured": ", ".join(info.kinds),
        "every": f"{info.every:,}",
        "watch": "on" if info.watch else "off",
        "max_overhead": filled("{:g}", info.max_overhead),
        "steps": f"{progress.steps:,}{progress.so_far}",
    }
    return {name: words for name, words in found.items() if words} | dict(info.versions)


def _numbered(name: str, records: Iterable[Record]) -> Iterator[tuple[str, Record]]:
    """Yield the records with the name, numbered from the second on."""
    for number, record in enumerate(records, start=1):
        yield (name if number == 1 else f"{name} {number}"), record


def _names(dtypes: Iterable[str]) -> str:
    return ", ".join(map(format_name, dtypes))
