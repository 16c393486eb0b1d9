"""Compares FP16 with and without loss scaling to FP32: the demo's curves with three seeds, and their margins.

    python benchmarks/curves.py [--json benchmarks/results/curves-cpu.json] [--png curves.png] [--seeds 3] [--steps N]

The exit status is 1 if a margin is missed. With every seed, FP32, FP16 with the recommended scale and FP16 with the dynamic
scale must end within 0.02 of each other in validation loss, and FP16 without scaling at least 0.4 above FP32. About 20 minutes
on two cores.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from machine import arguments, write_results

from mpinspect.demo.curves import UNSCALED, Comparison, Setting, run
from mpinspect.demo.loss_curves import Curve

CLOSE, APART = 0.02, 0.4


@dataclass(frozen=True)
class Margins:
    """Margins of final validation loss over all seeds: the widest spread of the runs that must agree, and the least gap."""

    widest_spread: float
    least_gap_without_scaling: float

    @property
    def hold(self) -> bool:
        return self.widest_spread <= CLOSE and self.least_gap_without_scaling >= APART


def margins(curves: Sequence[Curve]) -> Margins:
    spreads, gaps = [], []
    for seed in dict.fromkeys(curve.seed for curve in curves):
        finals = {curve.name: curve.final_validation_loss for curve in curves if curve.seed == seed}
        unscaled = finals.pop(UNSCALED.name)
        spreads.append(max(finals.values()) - min(finals.values()))
        gaps.append(unscaled - max(finals.values()))
    return Margins(max(spreads), min(gaps))


def results(comparison: Comparison, measured: Margins, seconds: float) -> dict[str, object]:
    return {
        "setting": asdict(comparison.setting),
        "recommended_loss_scale": comparison.report.loss_scale.recommended,
        "margins": asdict(measured) | {"hold": measured.hold},
        "seconds": round(seconds),
        "runs": [asdict(curve) | {"best_validation_loss": curve.best_validation_loss} for curve in comparison.curves],
    }


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--png", help="keep the chart as this file")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of each run; the demo's by default")
    options = parser.parse_args()
    setting = replace(Setting(), steps=options.steps) if options.steps else Setting()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        comparison = run(log_dir=directory, setting=setting, seeds=range(options.seeds), quiet=True)
        if options.png:
            shutil.copyfile(comparison.picture, options.png)
    measured = margins(comparison.curves)
    print(f"{comparison}\n")
    print(f"widest spread of FP32 and FP16 with scaling: {measured.widest_spread:.4f} (at most {CLOSE})")
    print(f"least gap without scaling: {measured.least_gap_without_scaling:.3f} (at least {APART})")
    if options.json:
        write_results(options.json, results(comparison, measured, time.monotonic() - start))
    return 0 if measured.hold else 1


if __name__ == "__main__":
    sys.exit(main())
