"""Determine the origin of a trace (rank, job, GPUs) and the busy time of each GPU."""

from __future__ import annotations

import ast
import contextlib
import re
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from mpinspect.kernels.records import Device
from mpinspect.kernels.trace.columns import Floats, integer, word
from mpinspect.kernels.trace.recording import Recording
from mpinspect.runtime.decoding import DecodingError, parsed

#: Longer strings are not parsed; Python's syntax trees take hundreds of bytes per character.
_LONGEST_JSON, _LONGEST_PYTHON = 1 << 20, 1 << 16

#: Keys of names shared by all ranks of a run, as written by PyTorch's own launchers and common schedulers.
_JOB_KEYS = ("mast_job_name", "job_name", "slurm_job_id", "job_id", "root_workflow_run_id", "workflow_run_id", "tw_job")
_ATTEMPT_KEYS = ("mast_job_attempt",)
#: Trace names without information on the run: temporary files, and tensorboard_trace_handler's <host>_<pid>.<time>.
_NAMELESS = re.compile(r"^(?:tmp\w*|file|trace|libkineto_activities_?#?|.+_\d+\.\d+)$")


def structure(value: Any) -> Any:
    """Decode a value that some exporters write as a string of JSON or Python; return other values unchanged."""
    if not isinstance(value, str):
        return value
    with contextlib.suppress(DecodingError):
        return parsed(value, _LONGEST_JSON)
    if len(value) <= _LONGEST_PYTHON:
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return ast.literal_eval(value)
    return value


def rank_and_size(top_level: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return rank and world size from distributedInfo; None for each one that is missing."""
    info = structure(top_level.get("distributedInfo"))
    if not isinstance(info, dict):
        return None, None
    return _known(info.get("rank")), _known(info.get("world_size"), 1)


def job(top_level: dict[str, Any]) -> str:
    """Return a name that all ranks of a run share and other runs do not; "" if missing from the trace."""
    for key in _JOB_KEYS:
        if name := word(top_level.get(key) or ""):
            attempts = [word(top_level[attempt]) for attempt in _ATTEMPT_KEYS if top_level.get(attempt)]
            return " attempt ".join([name, *attempts])
    name = PurePosixPath(word(top_level.get("traceName") or "").replace("\\", "/")).name
    stem = re.sub(r"(\.pt)?(\.trace)?\.json(\.gz)?$", "", name)
    if _NAMELESS.match(stem):
        return ""
    return re.sub(r"\d+", "#", stem)


#: Number of threads that AMD's data-centre GPUs run in lockstep; NVIDIA's GPUs run 32.
_AMD_WAVEFRONT = 64
_AMD = re.compile(r"\bAMD\b|Instinct|Radeon|\bMI\d{2,3}", re.IGNORECASE)
_OTHERS = re.compile(r"\bIntel\b|\bArc\b|Max \d{4}|Ascend|Gaudi", re.IGNORECASE)


def devices(recording: Recording, top_level: dict[str, Any]) -> tuple[Device, ...]:
    """Return the GPUs that ran a kernel, by id."""
    described = structure(top_level.get("deviceProperties"))
    properties: dict[int, dict[str, Any]] = {}
    if isinstance(described, list):
        for entry in described:
            if isinstance(entry, dict):
                properties.setdefault(integer(entry.get("id")), entry)
    hip = _is_hip(recording, top_level)
    ran = np.unique(recording.kernels["device"]).tolist()
    return tuple(_device(number, properties.get(number), hip) for number in ran)


def _device(number: int, properties: dict[str, Any] | None, hip: bool) -> Device:
    if properties is None:
        return Device(number, "", "AMD" * hip)
    name = word(properties.get("name") or "")
    vendor = _vendor(name, integer(properties.get("warpSize")), hip)
    return Device(number, name, vendor, _known(properties.get("computeMajor")), _known(properties.get("computeMinor")))


def _known(value: object, least: int = 0) -> int | None:
    found = integer(value)
    return found if found >= least else None


def _vendor(name: str, warp_size: int, hip: bool) -> str:
    if hip or warp_size == _AMD_WAVEFRONT or _AMD.search(name):
        return "AMD"
    if _OTHERS.search(name):
        return ""
    return "NVIDIA"


def _is_hip(recording: Recording, top_level: dict[str, Any]) -> bool:
    if any(key.startswith(("hip_", "roctracer", "rocprofiler")) for key in top_level):
        return True
    used = set(recording.launches["name"].tolist())
    return any(name.startswith("hip") for number, name in enumerate(recording.names) if number in used)


def busy_and_span(recording: Recording) -> tuple[dict[int, float], dict[int, float]]:
    """Return by device the time with a kernel or copy running, and the time from the first start to the last end, in us."""
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
    """Return the length of the union of intervals."""
    order = np.argsort(start, kind="stable")
    start, latest = start[order], np.maximum.accumulate(end[order])
    # An interval adds only its part after the end of all earlier ones.
    return float(np.maximum(latest - np.maximum(start, np.concatenate([start[:1], latest[:-1]])), 0.0).sum())
