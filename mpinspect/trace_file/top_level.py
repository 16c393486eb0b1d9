"""What a trace says of itself beside its events: rank, size of the job, and which job."""

from __future__ import annotations

import ast
import json
import re
from pathlib import PurePosixPath
from typing import Any

from mpinspect.trace_file.columns import integer

#: Names that a launcher gives a run, the same on all ranks: those of PyTorch's own launchers and of common schedulers.
_JOB_KEYS = ("mast_job_name", "job_name", "slurm_job_id", "job_id", "root_workflow_run_id", "workflow_run_id", "tw_job")
_ATTEMPT_KEYS = ("mast_job_attempt",)
#: Names that tell nothing of the run: temporary files, and <host>_<pid>.<time> as tensorboard_trace_handler has them.
_NAMELESS = re.compile(r"^(?:tmp\w*|file|trace|libkineto_activities_?#?|.+_\d+\.\d+)$")


def structure(value: Any) -> Any:
    """A value that some exporters write as a string of JSON or of Python; other strings as they are."""
    if not isinstance(value, str):
        return value
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return value


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
        if name := top_level.get(key):
            attempts = [str(top_level[attempt]) for attempt in _ATTEMPT_KEYS if top_level.get(attempt)]
            return " attempt ".join([str(name), *attempts])
    name = PurePosixPath(str(top_level.get("traceName") or "").replace("\\", "/")).name
    stem = re.sub(r"(\.pt)?(\.trace)?\.json(\.gz)?$", "", name)
    return "" if not stem or _NAMELESS.match(stem) else re.sub(r"\d+", "#", stem)
