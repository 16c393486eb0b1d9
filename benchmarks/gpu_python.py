"""Finds a Python whose torch reaches a CUDA GPU, and unpacks its missing packages from wheels.

Wheels of missing packages are unpacked into a folder for PYTHONPATH, without installation or network. Installed packages,
torch above all, are left unchanged. A virtual environment would not work: if another environment's Python creates it, it sees
neither's packages. This module uses only the standard library.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Never unpacked: the machine's own packages are built for its driver.
_NEVER = ("torch", "triton", "nvidia", "cuda")
#: Folders, in addition to the home directory, that may hold a Python outside of PATH.
_FOLDERS = ("/opt", "/usr/local")
_INSIDE = ("bin/python3", "*/bin/python3", "*/.venv/bin/python3", "*/venv/bin/python3", "*/envs/*/bin/python3")
_HERE = Path(__file__).resolve().parents[1]
#: Importing torch from a cold disk and initialising a GPU takes most of this time.
_PROBE_SECONDS = 90

_PROBE = """
import importlib.metadata, json, os, platform, shutil, sys, sysconfig
import torch

def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None

why = ""
if torch.version.cuda and not torch.cuda.is_available():
    try:
        torch.cuda.init()
    except Exception as error:
        why = str(error).partition(chr(10))[0]
print(json.dumps({
    "python": platform.python_version(),
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    "why": why,
    "headers": os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")),
    "versions": {name: version(name) for name in sys.argv[1:]},
}))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python that has torch.

    Args:
        gpu: the CUDA device that its torch reaches, or None.
        why: CUDA's error if it reaches no device.
        headers: whether Python.h exists, which torch.compile needs.
        versions: of each requested package; None where it is missing.
    """

    path: str
    python: str
    torch: str
    cuda: str | None
    gpu: str | None
    why: str
    headers: bool
    versions: dict[str, str | None]

    def __str__(self) -> str:
        reaches = self.gpu or ("no CUDA device" if self.cuda else "not made for CUDA")
        return f"{self.path}: Python {self.python}, torch {self.torch}: {reaches}{self.why and f' ({self.why})'}"


def candidates(first: str | None = None) -> Iterator[str]:
    """Yield paths of Pythons, each once: the given one, this one, those on PATH, those in the usual folders."""
    several = [first or os.environ.get("PYTHON"), sys.executable, str(_HERE / ".venv" / "bin" / "python3")]
    several += [shutil.which(name) for name in ("python3", "python")]
    places = [os.environ.get(name) for name in ("VIRTUAL_ENV", "CONDA_PREFIX")]
    several += [str(Path(place, "bin", "python3")) for place in places if place]
    for folder in filter(None, (*_FOLDERS, os.environ.get("HOME"))):
        root = Path(folder)
        for pattern in _INSIDE:
            several += map(str, sorted(root.glob(pattern)))
    # Links are not resolved: the Python of an environment is a link, whose place identifies the environment.
    paths = [shutil.which(path) for path in several if path]
    return iter(dict.fromkeys(str(Path(path).absolute()) for path in paths if path))


def probe(path: str, packages: Iterable[str] = ()) -> Interpreter | None:
    """Query a Python for its torch and for the versions of packages; return None if it has no torch."""
    try:
        done = subprocess.run([path, "-c", _PROBE, *packages], capture_output=True, text=True, timeout=_PROBE_SECONDS)
        found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return Interpreter(path=path, **found)


def find(
    first: str | None = None, packages: Iterable[str] = (), gpu: bool = True
) -> tuple[Interpreter | None, list[str]]:
    """Find the first Python whose torch reaches a GPU, or that has torch if ``gpu`` is False.

    Returns:
        The Python, and a line on each earlier one that has torch.
    """
    names, said = list(packages), []
    for path in candidates(first):
        found = probe(path, names)
        if found is not None and (found.gpu or not gpu):
            return found, said
        if found is not None:
            said.append(str(found))
    return None, said


def wheels(folder: Path) -> dict[str, Path]:
    """Return the wheels of a folder by package name, without torch and CUDA's packages."""
    found = {path.name.partition("-")[0].replace("_", "-").lower(): path for path in sorted(folder.glob("*.whl"))}
    return {name: path for name, path in found.items() if not name.startswith(_NEVER)}


def fits(wheel: Path, python: str) -> bool:
    """Return whether a wheel's tags match this Python ("3.12.3"), any Python, or the stable ABI. Ignores the platform."""
    _, tag, interface, _ = wheel.stem.rsplit("-", 3)
    ours = f"cp{''.join(python.split('.')[:2])}"
    return ours in tag.split(".") or "py3" in tag.split(".") or (interface == "abi3" and tag.startswith("cp3"))


def unpack(brought: dict[str, Path], interpreter: Interpreter, into: Path) -> list[str]:
    """Unpack the interpreter's missing packages; return lines that describe the result."""
    lacking = {name: path for name, path in brought.items() if interpreter.versions.get(name) is None}
    unpacked = [name for name, path in lacking.items() if fits(path, interpreter.python)]
    for name in unpacked:
        with zipfile.ZipFile(lacking[name]) as wheel:
            wheel.extractall(into)
        for extra in into.glob("*.data/*lib"):
            # Some wheels store modules in a data folder; copy them next to the others.
            shutil.copytree(extra, into, dirs_exist_ok=True)
    left = sorted(set(lacking) - set(unpacked))
    lines = [f"unpacked what {interpreter.path} lacks: {', '.join(unpacked)}"] if unpacked else []
    return lines + ([f"brought along for another Python than {interpreter.python}: {', '.join(left)}"] if left else [])
