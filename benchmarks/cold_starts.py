"""The first run on a machine, with numba's cache empty: its extra time, and whether its training equals the bare script's.

    python benchmarks/cold_starts.py [--json benchmarks/results/cold_starts-cpu.json] [--runs 100] [--starts 5] [--quick]

The first part times ``mpinspect run examples/unmodified/words.py`` with compiled kernels, and with an empty cache, where
another process compiles them. The second trains with an empty cache, two threads and a busy process per core, and compares the
final weights with the bare script's. Bare runs under the same load are listed for comparison, also for a model whose embedding
gradient torch sums in an order that depends on its threads. Each empty cache is a separate folder; its compiling process is
killed after the run (found through /proc, so on Linux only).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

WORDS = Path(__file__).parents[1] / "examples" / "unmodified" / "words.py"
THREADS = "2"


def train(indexed: bool) -> None:
    """Train a language model in FP16 autocast; print its weights' digest. ``indexed``: its embedding is ``weight[tokens]``."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    vocabulary, width, batch, length = 256, 64, 32, 32
    embedding = nn.Embedding(vocabulary, width)
    attention = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
    model = nn.ModuleList([embedding, attention, nn.Linear(width, vocabulary)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(6):
        tokens = torch.randint(vocabulary, (batch, length + 1))
        with torch.autocast("cpu", torch.float16):
            inputs = tokens[:, :-1]
            hidden = attention(embedding.weight[inputs] if indexed else embedding(inputs))
            loss = nn.functional.cross_entropy(model[2](hidden).flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print(digest.hexdigest()[:16])


class Run(NamedTuple):
    """A script's run in a new process.

    Args:
        seconds: from its start to its end.
        processor_seconds: CPU time, which depends less on the machine's other load.
        line: the first line of its output.
    """

    seconds: float
    processor_seconds: float
    line: str


def run(script: list[str], *, inspected: bool, cache: str | None = None) -> Run:
    """Run a script bare or under ``mpinspect run``."""
    environment = {**os.environ, "OMP_NUM_THREADS": THREADS, **({"NUMBA_CACHE_DIR": cache} if cache else {})}
    with tempfile.TemporaryDirectory() as folder:
        way = ["-m", "mpinspect", "run", "--log-dir", folder + "/run"] if inspected else []
        began, used = time.perf_counter(), _processor_seconds()
        done = subprocess.run(
            [sys.executable, *way, *script], env=environment, capture_output=True, text=True, check=True
        )
        return Run(time.perf_counter() - began, _processor_seconds() - used, done.stdout.partition("\n")[0])


def _processor_seconds() -> float:
    """Return the CPU time of all finished child processes; the compiling process is not a child."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_cold(script: list[str]) -> Run:
    """Run a script under ``mpinspect run`` with an empty cache."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        try:
            return run(script, inspected=True, cache=cache)
        finally:
            _end_processes_with(f"NUMBA_CACHE_DIR={cache}")


def _end_processes_with(setting: str) -> None:
    """Kill the processes of one cold run, found by a variable in their environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if setting.encode() in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


@contextlib.contextmanager
def load() -> Iterator[None]:
    """Run a busy process per core."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def starts(rounds: int) -> list[dict[str, Any]]:
    """Run the example bare, with the kernels on disk and with an empty cache, alternately; return medians."""
    script = [str(WORDS)]
    ways = {
        "bare": lambda: run(script, inspected=False),
        "kernels on disk": lambda: run(script, inspected=True),
        "empty cache": lambda: run_cold(script),
    }
    found: dict[str, list[Run]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(way())
            print(name, *found[name][-1][:2], file=sys.stderr, flush=True)
    return [
        {
            "run": name,
            "seconds": statistics.median(each.seconds for each in runs),
            "processor seconds": statistics.median(each.processor_seconds for each in runs),
            "rounds": rounds,
        }
        for name, runs in found.items()
    ]


def comparisons(runs: int) -> list[dict[str, Any]]:
    """Count the runs under load whose final weights differ from those of most bare runs."""
    module, indexed = ([str(Path(__file__)), "--train", kind] for kind in ("module", "indexed"))
    few = max(2, runs // 5)
    ways = [
        ("nn.Embedding, bare", few, lambda: run(module, inspected=False)),
        ("nn.Embedding, inspected, empty cache", runs, lambda: run_cold(module)),
        ("weight[tokens], bare", few, lambda: run(indexed, inspected=False)),
    ]
    rows = []
    usual: dict[str, str] = {}
    with load():
        for name, times, way in ways:
            weights: Counter[str] = Counter()
            for _ in range(times):
                weights[way().line] += 1
                print(f"{name}: {weights.most_common()}", file=sys.stderr, flush=True)
            usually = usual.setdefault(name.partition(",")[0], weights.most_common(1)[0][0])
            rows.append({"run under load": name, "runs": times, "other weights": times - weights[usually]})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100, help="cold runs under load: ten seconds each on two cores")
    parser.add_argument("--starts", type=int, default=5, help="rounds of the example")
    parser.add_argument("--quick", action="store_true", help="two of each")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--train", choices=("module", "indexed"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train == "indexed")
        return
    from machine import write_results
    from targets import checked, verdicts

    from mpinspect.counting import fastest

    fastest.warm_up(compile_here=True)
    rows = starts(2 if options.quick else options.starts)
    print(*rows, sep="\n", flush=True)
    seconds: dict[str, float] = {row["run"]: row["seconds"] for row in rows}
    promises = [checked("cold_starts.added", seconds["empty cache"] - seconds["kernels on disk"])]
    results = {"starts": rows, "under load": comparisons(2 if options.quick else options.runs), "checked": promises}
    print(verdicts(promises))
    if options.json:
        write_results(options.json, results)


if __name__ == "__main__":
    main()
