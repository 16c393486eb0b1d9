"""The GPUs of a trace: what it says of them, and how long they were busy."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from mpinspect.kernels.records import Device
from mpinspect.kernels.trace.columns import Floats, integer
from mpinspect.kernels.trace.recording import Recording
from mpinspect.kernels.trace.top_level import structure, word

#: Threads that AMD's data-centre GPUs run in lockstep; NVIDIA's are 32.
_AMD_WAVEFRONT = 64
_AMD = re.compile(r"\bAMD\b|Instinct|Radeon|\bMI\d{2,3}", re.IGNORECASE)
_OTHERS = re.compile(r"\bIntel\b|\bArc\b|Max \d{4}|Ascend|Gaudi", re.IGNORECASE)


def devices(recording: Recording, top_level: dict[str, Any]) -> tuple[Device, ...]:
    """The GPUs that ran a kernel, by id."""
    described = structure(top_level.get("deviceProperties"))
    properties: dict[int, dict[str, Any]] = {}
    for entry in described if isinstance(described, list) else []:
        if isinstance(entry, dict):
            properties.setdefault(integer(entry.get("id")), entry)
    hip = _is_hip(recording, top_level)
    ran = np.unique(recording.kernels["device"]).tolist()
    return tuple(_device(number, properties.get(number), hip) for number in ran)


def _device(number: int, properties: dict[str, Any] | None, hip: bool) -> Device:
    if properties is None:
        return Device(number, "", "AMD" if hip else "")
    name = word(properties.get("name") or "")
    known = {
        key: found if (found := integer(properties.get(key))) >= 0 else None
        for key in ("computeMajor", "computeMinor", "numSms")
    }
    vendor = _vendor(name, integer(properties.get("warpSize")), hip)
    return Device(number, name, vendor, known["computeMajor"], known["computeMinor"], known["numSms"])


def _vendor(name: str, warp_size: int, hip: bool) -> str:
    if hip or warp_size == _AMD_WAVEFRONT or _AMD.search(name):
        return "AMD"
    return "" if _OTHERS.search(name) else "NVIDIA"


def _is_hip(recording: Recording, top_level: dict[str, Any]) -> bool:
    if any(key.startswith(("hip_", "roctracer", "rocprofiler")) for key in top_level):
        return True
    used = set(recording.launches["name"].tolist())
    return any(name.startswith("hip") for number, name in enumerate(recording.names) if number in used)


def busy_and_span(recording: Recording) -> tuple[dict[int, float], dict[int, float]]:
    """By device: time in which a kernel or copy ran on any stream, and from the first one's start to the last one's end."""
    device = np.concatenate([recording.kernels["device"], recording.copies["device"]])
    start = np.concatenate([recording.kernels.start, recording.copies.start])
    end = np.concatenate([recording.kernels.end, recording.copies.end])
    busy, span = {}, {}
    for number in np.unique(device).tolist():
        own = device == number
        busy[number] = _union(start[own], end[own])
        span[number] = float(end[own].max() - start[own].min())
    return busy, span


def _union(start: Floats, end: Floats) -> float:
    """Length of the union of intervals."""
    order = np.argsort(start, kind="stable")
    start, latest = start[order], np.maximum.accumulate(end[order])
    # What an interval adds begins where all before it are over.
    return float(np.maximum(latest - np.maximum(start, np.concatenate([start[:1], latest[:-1]])), 0.0).sum())
