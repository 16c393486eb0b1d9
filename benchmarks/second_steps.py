"""Time and memory of a step that is computed a second time, over the bare step: once in a run under ``mpinspect run``.

    python benchmarks/second_steps.py [--json benchmarks/results/second_steps-cpu.json] [--quick]

A forward and backward in BF16 autocast, bare and by ``mpinspect.second_opinion``, which also sets the gradients and the random
state back. Each is a process of its own, whose largest resident memory is read, and the two alternate; times are those of the
processor, the least of all rounds.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import networks
import torch
from machine import arguments, write_results
from torch.nn import functional as F

import mpinspect

SUBJECTS = {
    "GPT, 13.9 M": (lambda: networks.GPT(6, 384, 6, 256, 8192), networks.tokens(4, 256, 8192)),
    "ResNet-50": (networks.resnet50, networks.images(4, 224, 1000)),
}
QUICK = {"GPT of 2 blocks": (lambda: networks.GPT(2, 64, 2, 32, 256), networks.tokens(2, 32, 256))}
#: Pairs of processes, and steps of each.
PAIRS, ROUNDS = 3, 3


def loss(model: torch.nn.Module, batch: networks.Batch) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(batch[0]).float(), batch[1])


def measured(name: str, twice: bool) -> dict[str, float]:
    """Processor seconds of a step, and MB beyond those before the first step."""
    make, draw = {**SUBJECTS, **QUICK}[name]
    torch.manual_seed(0)
    model, batch = make(), draw("cpu")
    before = _resident_mb()
    seconds = []
    for _ in range(ROUNDS):
        model.zero_grad()
        began = time.process_time()
        if twice:
            mpinspect.second_opinion(model, loss, batch)
        else:
            loss(model, batch).backward()
        seconds.append(time.process_time() - began)
    return {"seconds": min(seconds), "megabytes": _resident_mb() - before}


def _resident_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _in_a_process(name: str, twice: bool) -> dict[str, float]:
    words = [sys.executable, __file__, "--one", name, *(["--twice"] if twice else [])]
    measured: dict[str, float] = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return measured


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--one", help="measure one network in this process, and print JSON")
    parser.add_argument("--twice", action="store_true")
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measured(asked.one, asked.twice)))
        return
    rows = []
    for name in QUICK if asked.quick else SUBJECTS:
        pairs = [[_in_a_process(name, twice) for twice in (False, True)] for _ in range(PAIRS)]
        bare, second = ({of: min(each[of] for each in runs) for of in runs[0]} for runs in zip(*pairs, strict=True))
        ratios = {of: second[of] / bare[of] for of in ("seconds", "megabytes") if bare[of]}
        rows.append({"model": name, "bare": bare, "second": second, "times": ratios})
        print(
            f"{name}: {ratios['seconds']:.2f} times the time, {ratios.get('megabytes', 0):.2f} times the memory of a step"
        )
    if asked.json:
        write_results(asked.json, rows)


if __name__ == "__main__":
    main()
