"""Which machine a result comes from, and the file it is kept in."""

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
#: Beside torch: what counting runs on. None where it is not installed.
_LIBRARIES = ("numpy", "numba")


@cache
def machine() -> dict[str, Any]:
    """Processor, cores, GPU and versions, without the host's name."""
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
    """The parser of a benchmark's arguments: --json, and its docstring as help."""
    parser = argparse.ArgumentParser(description=described, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    return parser


def results_file(name: str, device: str | None = None, folder: Path = RESULTS) -> Path:
    """Where a benchmark's results are kept; ``device`` is "cpu" or "gpu", by default what this machine has."""
    return folder / f"{name}-{device or ('gpu' if torch.cuda.is_available() else 'cpu')}.json"


def write_results(path: str | Path, results: Any) -> None:
    """Write results, the machine and today's date as JSON."""
    ResultsFile(path).write(results)


class ResultsFile:
    """A results file that is written anew after every result, so that a run that is cut short leaves what it has measured.

    Args:
        path: None: nothing is written.
        rehearsal: toy sizes, which say nothing of speed; the file says so.
    """

    def __init__(self, path: str | Path | None, rehearsal: bool = False) -> None:
        self._path = path
        self._marks = {"rehearsal": True} if rehearsal else {}

    def write(self, results: Any, complete: bool = True) -> None:
        """Write results, the machine and today's date as JSON; ``complete``: nothing is to come."""
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
