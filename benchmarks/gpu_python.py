"""The Python whose torch reaches a CUDA GPU, and the packages that it lacks, out of wheels that were brought along.

Nothing is installed and no network is needed: wheels of what is missing are unpacked into a folder for PYTHONPATH, and what is
there already stays as it is, torch above all. A virtual environment would not do: made by the Python of another one, it sees the
packages of neither. Needs no package itself.
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

#: Never unpacked: these are the machine's own, built for its driver.
_NEVER = ("torch", "triton", "nvidia", "cuda")
#: Below these folders, or at home, a Python may lie that is not on PATH.
_FOLDERS = ("/opt", "/usr/local")
_INSIDE = ("bin/python3", "*/bin/python3", "*/.venv/bin/python3", "*/venv/bin/python3", "*/envs/*/bin/python3")
_HERE = Path(__file__).resolve().parents[1]
#: Importing torch from a cold disk and waking a GPU takes most of this.
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
        gpu: the CUDA device that its torch reaches; None if there is none.
        why: what CUDA says where it reaches none.
        headers: whether Python.h is there, against which torch.compile compiles.
        versions: of each package asked for; None where it is missing.
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
    """Yields paths of Pythons, each once: the one named, this one, those on PATH, those in the usual places."""
    several = [first or os.environ.get("PYTHON"), sys.executable, str(_HERE / ".venv" / "bin" / "python3")]
    several += [shutil.which(name) for name in ("python3", "python")]
    places = [os.environ.get(name) for name in ("VIRTUAL_ENV", "CONDA_PREFIX")]
    several += [str(Path(place, "bin", "python3")) for place in places if place]
    for folder in filter(None, (*_FOLDERS, os.environ.get("HOME"))):
        root = Path(folder)
        for pattern in _INSIDE:
            several += map(str, sorted(root.glob(pattern)))
    # Not by what a link points to: the Python of an environment is a link, and the environment is told by the link's place.
    paths = [shutil.which(path) for path in several if path]
    return iter(dict.fromkeys(str(Path(path).absolute()) for path in paths if path))


def probe(path: str, packages: Iterable[str] = ()) -> Interpreter | None:
    """Ask a Python for its torch, and for the versions of packages; None where it has no torch."""
    try:
        done = subprocess.run([path, "-c", _PROBE, *packages], capture_output=True, text=True, timeout=_PROBE_SECONDS)
        found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return Interpreter(path=path, **found)


def find(
    first: str | None = None, packages: Iterable[str] = (), gpu: bool = True
) -> tuple[Interpreter | None, list[str]]:
    """Find the first Python whose torch reaches a GPU; any torch will do where ``gpu`` is False.

    Returns:
        It, and a line on each one before it that has torch.
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
    """Returns the wheels of a folder by the name of what they install; never torch or what belongs to CUDA."""
    found = {path.name.partition("-")[0].replace("_", "-").lower(): path for path in sorted(folder.glob("*.whl"))}
    return {name: path for name, path in found.items() if not name.startswith(_NEVER)}


def fits(wheel: Path, python: str) -> bool:
    """Whether a wheel's tags name this Python ("3.12.3"), any, or the stable interface. The platform is not checked."""
    _, tag, interface, _ = wheel.stem.rsplit("-", 3)
    ours = f"cp{''.join(python.split('.')[:2])}"
    return ours in tag.split(".") or "py3" in tag.split(".") or (interface == "abi3" and tag.startswith("cp3"))


def unpack(brought: dict[str, Path], interpreter: Interpreter, into: Path) -> list[str]:
    """Unpack what the interpreter lacks. Returns a line on what was done."""
    lacking = {name: path for name, path in brought.items() if interpreter.versions.get(name) is None}
    unpacked = [name for name, path in lacking.items() if fits(path, interpreter.python)]
    for name in unpacked:
        with zipfile.ZipFile(lacking[name]) as wheel:
            wheel.extractall(into)
        for extra in into.glob("*.data/*lib"):
            # Wheels may keep modules aside, to be laid beside the others.
            shutil.copytree(extra, into, dirs_exist_ok=True)
    left = sorted(set(lacking) - set(unpacked))
    lines = [f"unpacked what {interpreter.path} lacks: {', '.join(unpacked)}"] if unpacked else []
    return lines + ([f"brought along for another Python than {interpreter.python}: {', '.join(left)}"] if left else [])
