"""Time and memory of a step that is computed a second time, over the bare step: once in a run under ``mpinspect run``.

    python benchmarks/second_steps.py [--json benchmarks/results/second_steps-cpu.json] [--quick]

A forward and backward in BF16 autocast, bare and by ``mpinspect.second_opinion``, without and with ``fp64``, which also sets the
gradients and the random state back. Each is a process of its own, whose largest resident memory is read, and the three alternate;
times are those of the processor, the least of all rounds.
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
#: Processes of each mode, and steps of each.
PROCESSES, ROUNDS = 3, 3
MODES = ("bare", "second", "fp64")


def loss(model: torch.nn.Module, batch: networks.Batch) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(batch[0]).float(), batch[1])


def measured(name: str, mode: str) -> dict[str, float]:
    """Processor seconds of a step, and MB beyond those before the first step."""
    make, draw = {**SUBJECTS, **QUICK}[name]
    torch.manual_seed(0)
    model, batch = make(), draw("cpu")
    before = _resident_mb()
    seconds = []
    for _ in range(ROUNDS):
        model.zero_grad()
        began = time.process_time()
        if mode == "bare":
            loss(model, batch).backward()
        else:
            mpinspect.second_opinion(model, loss, batch, fp64=mode == "fp64")
        seconds.append(time.process_time() - began)
    return {"seconds": min(seconds), "megabytes": _resident_mb() - before}


def _resident_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _in_a_process(name: str, mode: str) -> dict[str, float]:
    words = [sys.executable, __file__, "--one", name, "--mode", mode]
    measured: dict[str, float] = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return measured


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--one", help="measure one network in this process, and print JSON")
    parser.add_argument("--mode", choices=MODES, default="bare")
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measured(asked.one, asked.mode)))
        return
    rows = []
    for name in QUICK if asked.quick else SUBJECTS:
        runs = [[_in_a_process(name, mode) for mode in MODES] for _ in range(PROCESSES)]
        least = [{of: min(each[of] for each in mode) for of in mode[0]} for mode in zip(*runs, strict=True)]
        bare, *others = least
        times = [{of: each[of] / bare[of] for of in ("seconds", "megabytes") if bare[of]} for each in others]
        rows.append(
            {"model": name, **dict(zip(MODES, least, strict=True)), "times": dict(zip(MODES[1:], times, strict=True))}
        )
        for mode, ratios in zip(MODES[1:], times, strict=True):
            print(
                f"{name}, {mode}: {ratios['seconds']:.2f} times the time, {ratios.get('megabytes', 0):.2f} times the memory "
                "of a step"
            )
    if asked.json:
        write_results(asked.json, rows)


if __name__ == "__main__":
    main()
