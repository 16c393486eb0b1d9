"""What a trace says of itself beside its events: rank, size of the job, and which job."""

from __future__ import annotations

import ast
import re
from pathlib import PurePosixPath
from typing import Any

from mpinspect.kernels.trace.columns import integer
from mpinspect.runtime.decoding import DecodingError, parsed

#: Characters of a string that are parsed; Python's syntax trees take hundreds of bytes a character.
_LONGEST_JSON, _LONGEST_PYTHON = 1 << 20, 1 << 16

#: Names that a launcher gives a run, the same on all ranks: those of PyTorch's own launchers and of common schedulers.
_JOB_KEYS = ("mast_job_name", "job_name", "slurm_job_id", "job_id", "root_workflow_run_id", "workflow_run_id", "tw_job")
_ATTEMPT_KEYS = ("mast_job_attempt",)
#: Names that tell nothing of the run: temporary files, and <host>_<pid>.<time> as tensorboard_trace_handler has them.
_NAMELESS = re.compile(r"^(?:tmp\w*|file|trace|libkineto_activities_?#?|.+_\d+\.\d+)$")


def structure(value: Any) -> Any:
    """A value that some exporters write as a string of JSON or of Python; other strings as they are."""
    if not isinstance(value, str):
        return value
    try:
        return parsed(value, _LONGEST_JSON)
    except DecodingError:
        pass
    try:
        return ast.literal_eval(value) if len(value) <= _LONGEST_PYTHON else value
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return value


def word(value: Any) -> str:
    """A name: text as it is, a number in digits, "" for anything else, which may be nested deeply."""
    return str(value) if isinstance(value, (str, int)) else ""


def rank_and_size(top_level: dict[str, Any]) -> tuple[int | None, int | None]:
    """Of distributedInfo; None where it does not say."""
    info = structure(top_level.get("distributedInfo"))
    if not isinstance(info, dict):
        return None, None
    rank, size = integer(info.get("rank")), integer(info.get("world_size"))
    return rank if rank >= 0 else None, size if size > 0 else None


def job(top_level: dict[str, Any]) -> str:
    """What is equal on all ranks of a run and tells it from others; "" where the trace has nothing of the kind."""
    for key in _JOB_KEYS:
        if name := word(top_level.get(key) or ""):
            attempts = [word(top_level[attempt]) for attempt in _ATTEMPT_KEYS if top_level.get(attempt)]
            return " attempt ".join([name, *attempts])
    name = PurePosixPath(word(top_level.get("traceName") or "").replace("\\", "/")).name
    stem = re.sub(r"(\.pt)?(\.trace)?\.json(\.gz)?$", "", name)
    return "" if not stem or _NAMELESS.match(stem) else re.sub(r"\d+", "#", stem)
