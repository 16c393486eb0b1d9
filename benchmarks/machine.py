"""Describes the machine of a result, and writes results files."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from whole_file import write_json

import mpinspect

RESULTS = Path(__file__).parent / "results"
#: Libraries that counting uses, in addition to torch. Their version is None where not installed.
_LIBRARIES = ("numpy", "numba")


@cache
def machine() -> dict[str, Any]:
    """Return processor, cores, GPU and versions, without the host's name."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: _version(name) for name in _LIBRARIES},
        "torch_threads": torch.get_num_threads(),
        "mpinspect": mpinspect.__version__,
    }


def arguments(described: str | None) -> argparse.ArgumentParser:
    """Return a benchmark's argument parser, with --json and the docstring as help."""
    parser = argparse.ArgumentParser(description=described, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    return parser


def results_file(name: str, device: str | None = None, folder: Path = RESULTS) -> Path:
    """Return the path of a benchmark's results. ``device``: "cpu" or "gpu", by default "gpu" if this machine has one."""
    return folder / f"{name}-{device or ('gpu' if torch.cuda.is_available() else 'cpu')}.json"


def write_results(path: str | Path, results: Any) -> None:
    """Write results, the machine and today's date as JSON."""
    ResultsFile(path).write(results)


class ResultsFile:
    """A results file that is rewritten after every result, so that an interrupted run leaves its results so far.

    Args:
        path: None disables writing.
        rehearsal: marks results of toy sizes, which are not measurements of speed.
    """

    def __init__(self, path: str | Path | None, rehearsal: bool = False) -> None:
        self._path = path
        self._marks = {"rehearsal": True} if rehearsal else {}

    def write(self, results: Any, complete: bool = True) -> None:
        """Write results, the machine and today's date as JSON. ``complete``: these are all results."""
        if self._path is None:
            return
        marks = self._marks if complete else {**self._marks, "complete": False}
        document = {"date": datetime.date.today().isoformat(), **marks, "machine": machine(), "results": results}
        write_json(self._path, document)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
