"""Many ranks' sessions added up: time, memory and file sizes, and how they grow with the number of ranks.

    python benchmarks/ranks.py [--layers 2000] [--samples 1000] [--ranks 1 4 16 64] [--json benchmarks/results/ranks-cpu.json]

One rank's run is made as in session.py and written by the writer; the other ranks have the same counts under their own number.
For each number of ranks a fresh process reads and adds them one after the other, reports on the sum, and saves it; its largest
resident memory is given. What 1,024 ranks take is extrapolated along a straight line through the last two numbers measured, and
stands apart: time and memory. Times are the process's own on one core, with the files in the page cache; one run each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from machine import arguments, write_results
from session import PEAK, MadeRun, write

from mpinspect.ranges.session import Session
from mpinspect.ranges.store import FILE_NAME

#: The number of ranks that is extrapolated.
FAR = 1024
#: Adds the ranks of a folder, reports, saves; prints the seconds of each part and the process's largest resident memory.
ADDS = f"""
import json, sys, time
from pathlib import Path
{PEAK}
from mpinspect.ranges.analysis import analyse
from mpinspect.ranges.analysis.ranks import RankSum
from mpinspect.ranges.store import read_session
began = time.process_time()
total = RankSum()
for number in range(int(sys.argv[2])):
    total.add(read_session(Path(sys.argv[1], f"rank{{number}}")))
merged = total.session()
added = time.process_time()
str(analyse(merged))
reported = time.process_time()
peak = peak_rss_mb()
saved = merged.save(Path(sys.argv[1], f"sum-of-{{sys.argv[2]}}"))
print(json.dumps({{
    "ranks": int(sys.argv[2]), "add_cpu_s": added - began, "report_cpu_s": reported - added, "peak_rss_mb": peak,
    "windows": len(merged.windows), "saved_mb": saved.stat().st_size / 1e6,
    "counted": sum(tensor.samples for tensor in merged.totals().values()),
}}))
"""


def make(folder: Path, layers: int, samples: int, ranks: int) -> float:
    """Write the ranks' files; returns the size of one in MB."""
    run = MadeRun(layers, 1)
    write(folder / "made", run, samples)
    session = Session.load(folder / "made")
    for rank in range(ranks):
        (folder / f"rank{rank}").mkdir()
        replace(session, info=replace(session.info, rank=rank, world_size=ranks)).save(folder / f"rank{rank}")
    return (folder / "rank0" / FILE_NAME).stat().st_size / 1e6


def add(folder: Path, ranks: int) -> dict[str, float]:
    """Add so many ranks in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", ADDS, str(folder), str(ranks)], capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


def extrapolated(rows: list[dict[str, float]]) -> dict[str, float]:
    """What FAR ranks would take if time and memory went on as between the last two numbers measured."""
    first, last = rows[-2:]

    def at_far(name: str) -> float:
        slope = (last[name] - first[name]) / max(last["ranks"] - first["ranks"], 1)
        return last[name] + slope * (FAR - last["ranks"])

    return {"ranks": FAR, "add_cpu_s": at_far("add_cpu_s"), "peak_rss_mb": at_far("peak_rss_mb")}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        size = make(folder, options.layers, options.samples, max(options.ranks))
        rows = [add(folder, ranks) for ranks in sorted(options.ranks)]
    for row in rows:
        expected = options.layers * options.samples * row["ranks"]
        if row.pop("counted") != expected:
            raise RuntimeError(f"not {expected} samples in the sum of {row['ranks']:.0f} ranks")
    found = {"layers": options.layers, "samples": options.samples, "file_of_one_rank_mb": size, "rows": rows}
    return found | {"extrapolated": [extrapolated(rows)] if len(rows) > 1 else []}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=2000)
    parser.add_argument("--samples", type=int, default=1000, help="sampled steps of each rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 16, 64])
    options = parser.parse_args()
    results = measure(options)
    print(json.dumps(results, indent=2))
    if options.json:
        write_results(options.json, results)


if __name__ == "__main__":
    main()
