"""The time to classify 1,000 distinct kernel names.

    python benchmarks/kernel_names.py [--json benchmarks/results/kernel_names-cpu.json]

The names and their proportions are from the real traces in tests/data/traces; an appended number makes 1,000 of them distinct.
Wall-clock time, several runs. The baseline is one broad regular expression over the same names, as in other tools. It is
faster, but classifies a run of FP32 sgemm as 93% Tensor Core.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from machine import arguments, write_results

from mpinspect.kernels.names import RULES, RULES_VERSION, classify_kernel

TRACES = Path(__file__).parents[1] / "tests" / "data" / "traces"
BROAD = re.compile(r"[hsi]\d{3,6}|gemm|tensorop|xmma|wgmma|nvjet|flash|fmha")


def distinct_names(wanted: int) -> list[str]:
    found: set[str] = set()
    for path in sorted(TRACES.rglob("*.json.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            events = json.load(stream)["traceEvents"]
        found |= {event["name"] for event in events if str(event.get("cat")).lower() == "kernel"}
    names = sorted(found)
    turns = range(-(-wanted // len(names)))
    return [f"{name}/{turn}" if turn else name for turn in turns for name in names][:wanted]


def milliseconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--names", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=21)
    options = parser.parse_args()
    names = distinct_names(options.names)
    ours = [milliseconds(lambda: [classify_kernel(name) for name in names]) for _ in range(options.repeats)]
    broad = [milliseconds(lambda: [BROAD.search(name) for name in names]) for _ in range(options.repeats)]
    results = {
        "names": len(names),
        "mean_length": statistics.mean(map(len, names)),
        "rules": len(RULES),
        "rules_version": RULES_VERSION,
        "classify_median_ms": statistics.median(ours),
        "classify_min_ms": min(ours),
        "one_regex_median_ms": statistics.median(broad),
        "ratio_to_one_regex": statistics.median(ours) / statistics.median(broad),
    }
    print(json.dumps(results, indent=2))
    if options.json:
        write_results(options.json, results)


if __name__ == "__main__":
    main()
