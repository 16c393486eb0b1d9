"""Adding up many ranks' sessions: time, memory and file sizes, as functions of the number of ranks.

    python benchmarks/ranks.py [--layers 2000] [--samples 1000] [--ranks 1 4 16 64 1024] [--json FILE]

One rank's run is made as in session.py. Every other rank is the same file, read and decoded again, with another rank number.
For each number of ranks a fresh process reads and adds them one after the other, reports on the sum, and saves it; the results
hold its peak resident memory. Then the ranks are added up as a tree: several processes each add some ranks (one of them is
measured), and another adds their saved sums. Times are for one core, with the file in the page cache; one run each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import arguments, write_results
from session import PEAK, MadeRun, write

#: Adds up repeated readings of a session, reports and saves; prints the seconds of each part and the peak resident memory.
ADDS = f"""
import json, sys, time
from dataclasses import replace
from pathlib import Path
{PEAK}
from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.analysis.ranks import RankSum
from mpinspect.ranges.store import read_session
source, readings, target = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])

def read(number):
    session = read_session(source)
    first = number * max(len(session.ranks), 1)
    ranks = (replace(each, info=replace(each.info, rank=first + place)) for place, each in enumerate(session.ranks))
    return replace(session, info=replace(session.info, rank=first, world_size=1 << 20), ranks=tuple(ranks))

began = time.process_time()
total = RankSum()
for number in range(readings):
    total.add(read(number))
merged = total.session(absent={{}})
added = time.process_time()
str(analyse(merged))
reported = time.process_time()
peak = peak_rss_mb()
saved = merged.save(target)
print(json.dumps({{
    "ranks": len(merged.ranks), "add_cpu_s": added - began, "report_cpu_s": reported - added, "peak_rss_mb": peak,
    "windows": len(merged.windows), "saved_mb": saved.stat().st_size / 1e6,
    "counted": sum(tensor.samples for tensor in merged.totals().values()),
}}))
"""


def add(source: Path, readings: int, target: Path, samples_a_rank: int) -> dict[str, float]:
    """Add up repeated readings of a session in a fresh process; return its figures."""
    words = [sys.executable, "-c", ADDS, str(source), str(readings), str(target)]
    row: dict[str, float] = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    if row.pop("counted") != samples_a_rank * row["ranks"]:
        raise RuntimeError(f"not {samples_a_rank} samples of each of the {row['ranks']} ranks in their sum")
    return row


def measure(options: argparse.Namespace) -> dict[str, Any]:
    *fewer, most = sorted(options.ranks)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        size = write(folder / "rank", MadeRun(options.layers, 1), options.samples)["file_mb"]
        of_each = options.layers * options.samples
        rows = [add(folder / "rank", ranks, folder / str(ranks), of_each) for ranks in (*fewer, most)]
        tree = []
        if fewer:
            merged = add(folder / str(fewer[-1]), most // fewer[-1], folder / "tree", of_each)
            tree = [
                {"processes": most // fewer[-1], "ranks_each": fewer[-1], "each_cpu_s": rows[-2]["add_cpu_s"], **merged}
            ]
    found = {"layers": options.layers, "samples": options.samples, "file_of_one_rank_mb": size}
    return found | {"one_process": rows, "tree": tree}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=2000)
    parser.add_argument("--samples", type=int, default=1000, help="sampled steps of each rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 16, 64, 1024])
    options = parser.parse_args()
    results = measure(options)
    print(json.dumps(results, indent=2))
    if options.json:
        write_results(options.json, results)


if __name__ == "__main__":
    main()
