"""Runs the benchmarks one after the other, stores their results, and makes docs/performance.md from them: ``make bench``.

    python benchmarks/run_all.py [NAME ...] [--quick] [--results DIR]

Each is a separate process, and a failure does not stop the others. The output ends with the targets and their measured values.
Results are written to benchmarks/results/NAME-cpu.json, or to NAME-gpu.json by benchmarks that need a CUDA GPU. --quick runs
only benchmarks with a short version, and stores no results. With --results the page is not rewritten.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import performance_page
import torch
from machine import RESULTS, results_file
from page_tables import promises_text

from mpinspect.counting import fastest

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Benchmark:
    """A script of this folder.

    Args:
        quick: its arguments for a short run, or None.
        device: the measured device, "cpu" or "gpu"; None: a GPU if there is one.
    """

    name: str
    quick: tuple[str, ...] | None = None
    device: str | None = "cpu"


BENCHMARKS = (
    Benchmark("counting", ("--quick",)),
    Benchmark("blocks", ("--quick",)),
    Benchmark("overhead", ("--quick",)),
    Benchmark("where_it_goes", ("--quick",)),
    Benchmark("cold_starts", ("--quick",)),
    Benchmark("session", ("--layers", "200", "--samples", "100", "--writes", "20", "--repeats", "1")),
    Benchmark("ranks", ("--layers", "100", "--samples", "50", "--ranks", "1", "4")),
    Benchmark("page", ("--tensors", "200")),
    Benchmark("rank_kills", ("--runs", "2")),
    Benchmark("kernel_names", ("--repeats", "5")),
    Benchmark("shape_lint", ("--runs", "1")),
    Benchmark("traces", ("--repeats", "1", "--without-hta")),
    Benchmark("training_speed", ("--rounds", "1"), device=None),
    Benchmark("emulation", ("--steps", "3")),
    Benchmark("saved_memory"),
    Benchmark("second_steps", ("--quick",)),
    Benchmark("device_reads"),
    Benchmark("loss_scale_window"),
    Benchmark("curves"),
    Benchmark("gpu_counting", device="gpu"),
    Benchmark("gpu_overhead", ("--quick",), device="gpu"),
    Benchmark("training_modes", device="gpu"),
    Benchmark("tensor_cores", device="gpu"),
)


def run(benchmark: Benchmark, folder: Path, quick: bool) -> bool:
    """Run a benchmark; return whether it succeeded and met its targets."""
    kept = results_file(benchmark.name, benchmark.device, folder)
    arguments = (benchmark.quick or ()) if quick else ()
    print(f"== {benchmark.name}", flush=True)
    command = [sys.executable, str(HERE / f"{benchmark.name}.py"), *arguments, "--json", str(kept)]
    return subprocess.run(command, check=False).returncode == 0


def chosen(names: list[str], quick: bool) -> list[Benchmark]:
    """Return the named benchmarks; by default all, those of a GPU only if there is one."""
    known = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(known)}")
    several = [known[name] for name in names] or [
        one for one in BENCHMARKS if torch.cuda.is_available() or one.device != "gpu"
    ]
    return [one for one in several if one.quick is not None or not quick]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which ones (all by default)")
    parser.add_argument("--quick", action="store_true", help="short runs, nothing kept")
    parser.add_argument("--results", type=Path, help="keep the results in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as nowhere:
        folder = options.results or (Path(nowhere) if options.quick else RESULTS)
        # Compile first, so that no benchmark runs during a compilation.
        fastest.warm_up(compile_here=True)
        failed = [one.name for one in chosen(options.names, options.quick) if not run(one, folder, options.quick)]
        print(f"\n{promises_text(performance_page.load(folder))}")
    if folder == RESULTS:
        performance_page.write()
        print(f"\nwritten: {performance_page.PAGE}")
    if failed:
        print(f"failed, or missed a bound of their own: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
