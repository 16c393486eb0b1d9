"""Runs all tests and benchmarks that need a CUDA GPU, in nine minutes, the most informative first: ``make gpu``.

    python benchmarks/gpu.py [NAME ...] [--out DIR] [--seconds 540] [--python PATH] [--rehearse]

The parts are the GPU tests, counting, a step's overhead and synchronisations, the training modes, and the Tensor Core cases
with their traces. Each part is a separate process with a share of the time, and writes its file after every result, so that a
part that fails, hangs or takes too long loses only its remaining results. --out (default: the environment variable OUT, else
benchmarks/results) receives each part's results, ``gpu_parts-gpu.json`` (each part's outcome), ``gpu.log`` (all output) and
``tensor_cores-traces.tar``. The exit status is 0 if all parts were done, else 1.

Any Python >= 3.10 can run this file, which then searches for a Python whose torch reaches a GPU (first --python, then PYTHON).
Its missing packages are unpacked from the wheels in gpu-wheels/, which ``make gpu-wheels`` downloads. No package is installed,
and caches are in a temporary folder.

--rehearse runs every part on a CPU with its smallest sizes, and torch instead of the counting kernels. Its files are marked
"rehearsal" and written to a temporary folder.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import gpu_python
from parts import Outcome, Part, run_parts
from whole_file import write_json

HERE = Path(__file__).resolve().parent
ROOT, RESULTS, WHEELS = HERE.parent, HERE / "results", HERE.parent / "gpu-wheels"
#: The parts in order, with their shares of 530 seconds, estimated for an H100. Unused time passes to the next parts.
WEIGHTS = {"gpu_tests": 130, "gpu_counting": 35, "gpu_overhead": 190, "training_modes": 105, "tensor_cores": 70}
#: Seconds reserved for ending the last part and writing the files.
_RESERVE = 10.0
#: Some containers set these variables, which select other kernels or make the host wait.
_UNSET = (
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUDA_LAUNCH_BLOCKING"),
    *("PYTHONWARNINGS", "PYTHONHOME", "PYTEST_ADDOPTS"),
)


def environment(scratch: Path, rehearse: bool) -> dict[str, str]:
    """Return the parts' environment: this tree's package, the unpacked packages, and caches in the scratch folder."""
    found = {name: value for name, value in os.environ.items() if name not in _UNSET}
    paths = [str(ROOT), found.get("PYTHONPATH", ""), str(scratch / "packages")]
    found |= {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        # The machine's pytest plugins would add warnings and options.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        # Files of a terminated part are removed with the folder.
        "TMPDIR": str(scratch),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "NUMBA_CACHE_DIR": str(scratch / "numba"),
        "MPLCONFIGDIR": str(scratch / "matplotlib"),
        "CUDA_CACHE_PATH": str(scratch / "cuda"),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis"),
    }
    return found | ({"CUDA_VISIBLE_DEVICES": ""} if rehearse else {})


def parts(names: list[str], python: str, out: Path, scratch: Path, rehearse: bool) -> list[Part]:
    """Return the named parts (default: all), in their order."""
    unknown = set(names) - set(WEIGHTS)
    if unknown:
        raise SystemExit(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(WEIGHTS)}")
    made = []
    for name in [name for name in WEIGHTS if not names or name in names]:
        file = out / f"{name}-{'cpu' if rehearse else 'gpu'}.json"
        # An earlier run's file must not be taken for this run's.
        file.unlink(missing_ok=True)
        command = [python, str(HERE / f"{name}.py"), "--json", str(file), *(["--tiny"] if rehearse else [])]
        command += ["--traces", str(scratch / "traces")] if name == "tensor_cores" else []
        made.append(Part(name, tuple(command), WEIGHTS[name], file))
    return made


class Summary:
    """The outcomes of all parts, in a file that is rewritten at every change, and as a table."""

    def __init__(self, out: Path, interpreter: gpu_python.Interpreter, rehearse: bool) -> None:
        self.notes: list[str] = []
        self._out, self._interpreter, self._rehearse = out, interpreter, rehearse
        self._begun, self._told = time.monotonic(), ""

    def tell(self, outcomes: list[Outcome]) -> None:
        """Write the file; print the changed outcome."""
        device = "cpu" if self._rehearse else "gpu"
        write_json(self._out / f"gpu_parts-{device}.json", self._document(outcomes))
        latest = next((one for one in reversed(outcomes) if one.state != "not begun"), None)
        if latest is not None and f"{latest.name} {latest.state}" != self._told:
            self._told = f"{latest.name} {latest.state}"
            if latest.state == "running":
                print(f"== {latest.name}: at most {latest.limit:.0f} s", flush=True)
            else:
                print("\n".join(f"   {line}" for line in latest.said))
                print(f"   {latest.state} after {latest.seconds:.0f} s", flush=True)

    def table(self, outcomes: list[Outcome]) -> str:
        lines = [f"{one.name:16} {one.state:10} {one.seconds:6.0f} s   {one.file or '-'}" for one in outcomes]
        return "\n".join([f"\n{self._out}, {time.monotonic() - self._begun:.0f} s:", *lines])

    def _document(self, outcomes: list[Outcome]) -> dict[str, Any]:
        found = self._interpreter
        machine = {"system": f"{platform.system()} {platform.machine()}", "cores": os.cpu_count(), "gpu": found.gpu}
        machine |= {"python": found.python, "torch": found.torch, "cuda": found.cuda, "packages": found.versions}
        seconds = round(time.monotonic() - self._begun, 1)
        return {
            "date": datetime.date.today().isoformat(),
            **({"rehearsal": True} if self._rehearse else {}),
            "machine": machine,
            "results": {"seconds": seconds, "notes": self.notes, "parts": [vars(one) for one in outcomes]},
        }


def what_compiling_lacks(interpreter: gpu_python.Interpreter) -> list[str]:
    """Return notes on missing tools. torch.compile compiles C code for each kernel."""
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)
    lacking = [] if compiler else ["no C compiler is on PATH (gcc, clang or cc; CC names another)"]
    lacking += [] if interpreter.headers else [f"Python.h of {interpreter.path} is missing"]
    return [f"{what}: torch.compile may not work" for what in lacking]


def keep_traces(scratch: Path, out: Path) -> None:
    """Pack the traces into one archive, since fetching may limit the number of files."""
    traces = sorted((scratch / "traces").glob("*.json.gz"))
    if traces:
        with tarfile.open(out / "tensor_cores-traces.tar", "w") as archive:
            for trace in traces:
                archive.add(trace, trace.name)


def folder(options: argparse.Namespace) -> Path:
    """Return the folder for the files."""
    if options.rehearse:
        out = options.out or Path(tempfile.mkdtemp(prefix="mpinspect-rehearsal-"))
        if out.resolve() == RESULTS:
            raise SystemExit("a rehearsal measures nothing: name another folder than that of the results")
    else:
        out = options.out or Path(os.environ.get("OUT") or RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    return out.resolve()


def stop_at(number: int, frame: object) -> None:
    """Signal handler: raise SystemExit, so that the files are still written."""
    raise SystemExit(128 + number)


def main() -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which parts (all by default): {', '.join(WEIGHTS)}")
    parser.add_argument("--out", type=Path, help="where the files go")
    parser.add_argument("--seconds", type=float, default=540.0, help="the time for everything (default 540)")
    parser.add_argument("--python", help="the Python whose torch reaches the GPU; found by itself if it is not named")
    parser.add_argument(
        "--rehearse", action="store_true", help="the same on a CPU, at the smallest sizes; keeps nothing"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, stop_at)
    brought = gpu_python.wheels(WHEELS)
    shown = dict.fromkeys(("numba", *brought))
    interpreter, others = gpu_python.find(options.python, shown, gpu=not options.rehearse)
    if interpreter is None:
        print("No Python was found here whose torch reaches a CUDA GPU (--python PATH names one).", *others, sep="\n")
        return 1
    out = folder(options)
    with tempfile.TemporaryDirectory(prefix="mpinspect-gpu-", ignore_cleanup_errors=True) as nowhere:
        scratch = Path(nowhere)
        summary = Summary(out, interpreter, options.rehearse)
        summary.notes += [str(interpreter), *what_compiling_lacks(interpreter)]
        summary.notes += gpu_python.unpack(brought, interpreter, scratch / "packages")
        print("\n".join(summary.notes), flush=True)
        log = out / "gpu.log"
        log.write_text("\n".join(summary.notes) + "\n", encoding="utf-8")
        chosen = parts(options.names, interpreter.path, out, scratch, options.rehearse)
        around = environment(scratch, options.rehearse)
        try:
            outcomes = run_parts(chosen, started + options.seconds - _RESERVE, log, around, summary.tell)
        finally:
            keep_traces(scratch, out)
        print(summary.table(outcomes))
        if out == RESULTS:
            subprocess.run([interpreter.path, str(HERE / "performance_page.py")], env=around, check=False)
    return 0 if all(one.state == "done" for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
