"""Runs every script of the gallery under ``mpinspect run`` and prints which faults were named, with module and step.

    python examples/faults/gallery.py [--only NAME ...] [--jobs N] [--json PATH] [--page PATH] [--peers] [--check]

A fault counts as named if a finding above "info" has its id, module and step. A healthy script must have no such finding.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from peers import NOTHING, PEERS

from mpinspect.ranges.faults.registry import DIAGNOSES

HERE = Path(__file__).parent
HEALTHY = [f"healthy/{path.name}" for path in sorted((HERE / "healthy").glob("*.py"))]
#: Seconds that a script may take.
LONGEST_S = 300


@dataclass(frozen=True)
class Fault:
    """The fault of a script.

    Args:
        script: its file.
        id: the id of its finding.
        module: a prefix of its module's name; "" if the fault concerns the whole run.
        step: its first step; None if it belongs to no step.
    """

    script: str
    id: str
    module: str = ""
    step: int | None = None


FAULTS = (
    Fault("bf16_moments.py", "moments-cannot-decay"),
    Fault("bf16_finetune.py", "updates-lost"),
    Fault("bf16_weight_decay.py", "weight-decay-lost"),
    Fault("ema_bf16.py", "average-lost"),
    Fault("ema_dict.py", "average-lost"),
    Fault("bf16_accumulation.py", "accumulation-lost"),
    Fault("fp16_adam_eps.py", "epsilon-zero"),
    Fault("resnet_initial_scale.py", "initial-scale-too-high", step=0),
    Fault("scaler_made_anew.py", "scaler-made-anew", step=0),
    Fault("static_scale_high.py", "scale-too-high", step=0),
    Fault("static_scale_low.py", "scale-too-low", "decoder", 0),
    Fault("fp16_without_scaler.py", "scaler-missing-in-float16"),
    Fault("bf16_with_scaler.py", "scaler-in-bfloat16"),
    Fault("gan_shared_scaler.py", "scaler-shared", step=0),
    Fault("two_branches.py", "scale-window-empty", "cls"),
    Fault("outlier_batch.py", "overflow-recurs", step=5),
    Fault("backoff_for_forward.py", "scale-falls-for-forward", "mlp", 6),
    Fault("clip_before_unscale.py", "unscale-missing", step=0),
    Fault("unscale_each_micro_batch.py", "unscaled-too-often", step=0),
    Fault("clip_fp16_norm.py", "gradients-clipped-to-zero", step=0),
    Fault("masters_clipped_in_fp16.py", "gradients-clipped-to-zero", step=0),
    Fault("noise_before_unscale.py", "scaled-plus-unscaled", "0.weight", 1),
    Fault("penalty_of_scaled.py", "scaled-plus-unscaled", step=1),
    Fault("schedule_fp16.py", "breaks-in-fp32-too", step=2),
    Fault("ids_in_bf16.py", "integers-rounded", step=1),
    Fault("count_in_bf16.py", "addition-changes-nothing", step=1),
    Fault("scale_after_update.py", "divided-by-another-scale", step=3),
    Fault("masters_made_anew.py", "masters-overwritten", step=3),
    Fault("nan_to_num.py", "gradients-replaced", step=0),
    Fault("nan_to_num_hook.py", "gradients-replaced", step=0),
    Fault("zero_grad_too_late.py", "gradients-zeroed", step=0),
    Fault("stale_branch.py", "gradients-stale", "heads.segment", 1),
    Fault("frozen_prefix.py", "gradients-missing", "blocks.10"),
    Fault("detached_encoder.py", "gradients-missing", "encoder"),
    Fault("never_zeroed.py", "gradients-never-zeroed", step=1),
    Fault("forgotten_step.py", "never-updated"),
    Fault("silent_head.py", "gradients-all-zero", "auxiliary"),
    Fault("masters_never_zeroed.py", "gradients-never-zeroed", step=1),
    Fault("masters_not_copied.py", "never-updated"),
    Fault("late_module.py", "parameters-not-optimized", "head"),
    Fault("nan_in_batch.py", "batch-not-finite", step=7),
    Fault("masked_row.py", "mask-hides-whole-row", "attn", 9),
    Fault("zero_row.py", "zero-row-normalized", "normalize", 6),
    Fault("log_of_zero.py", "argument-out-of-range", step=5),
    Fault("norm_at_zero.py", "argument-out-of-range", step=8),
    Fault("learning_rate.py", "weights-exploded"),
    Fault("mse_in_fp16.py", "loss-in-16-bits", step=0),
    Fault("kl_in_bf16.py", "loss-in-16-bits", step=0),
    Fault("norm_overflows.py", "norm-overflows", "blocks.0.norm", 0),
    Fault("positions_bf16.py", "positions-collapse", "0.rotary", 1),
    Fault("indices_bf16.py", "positions-collapse", "attention", 1),
    Fault("autocast_around_loop.py", "autocast-around-updates", step=1),
    Fault("autocast_for_cuda.py", "autocast-for-another-device"),
    Fault("pixel_sum.py", "overflow-in-operator", "pool", 6),
    Fault("hub_sum.py", "sum-loses-terms", "aggregate", 1),
    Fault("residual_stream.py", "addition-changes-nothing", "blocks", 1),
    Fault("average_in_bf16.py", "buffer-stops-changing", "2", 1),
    Fault("variance_by_squares.py", "result-is-rounding-error", "standardize", 1),
    Fault("router_ties.py", "router-ties", "moe", 1),
    Fault("batchnorm_half.py", "statistics-broken", "1"),
    Fault("batchnorm_after_skip.py", "statistics-broken", "1", 5),
    Fault("fp8_filter.py", "nothing-converted"),
    Fault("fp8_head.py", "narrow-head", "lm_head"),
    Fault("fp8_router.py", "narrow-router", "1.router"),
    Fault("fp8_part.py", "converted-in-part", "blocks.0.v_proj"),
    Fault("fp8_sizes.py", "sizes-refused", "projection"),
    Fault("mxfp8_bias.py", "bias-left-out", "blocks.0"),
    Fault("fp16_activation.py", "scale-falls-for-forward", "layers.0", 2),
)


@dataclass(frozen=True)
class Told:
    """A report on one script."""

    script: str
    outcome: str
    verdicts: tuple[str, ...] = ()
    findings: tuple[dict[str, object], ...] = field(default=(), repr=False)

    def above_info(self) -> list[dict[str, object]]:
        return [finding for finding in self.findings if finding["severity"] != "info"]

    def of(self, fault: Fault) -> str:
        """Return "yes", "half" (another module or step) or "no"."""
        named = [finding for finding in self.above_info() if finding["id"] == fault.id]
        if any(
            _in_module(finding, fault) and (fault.step is None or finding["step"] == fault.step) for finding in named
        ):
            return "yes"
        return "half" if named else "no"


def _in_module(finding: dict[str, object], fault: Fault) -> bool:
    return str(finding["layer"]).startswith(fault.module)


def run(script: str) -> Told:
    """Run a script under ``mpinspect run`` and read its report."""
    with tempfile.TemporaryDirectory() as folder:
        log_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "mpinspect", "run", "--log-dir", str(log_dir), str(HERE / script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
        report = log_dir / "report.json"
        if not report.exists():
            return Told(script, f"no report: {done.stderr[-300:]}")
        models = json.loads(report.read_text("utf-8"))["models"]
    findings = [finding for model in models for finding in model["ranges"]["findings"]]
    verdicts = [" ".join(model["ranges"]["verdict"]["sentences"]) for model in models]
    return Told(script, f"exit {done.returncode}", tuple(verdicts), tuple(findings))


def page(faults: list[Fault], told: dict[str, Told]) -> str:
    """Return the page of the diagnoses: each with its condition, its finding on a script of the gallery, and its fix."""
    parts = [_PAGE_HEAD]
    for diagnosis in DIAGNOSES:
        parts += [f"## {diagnosis.id}\n", f"{diagnosis.about}\n"]
        parts += [_example(fault, told[fault.script]) for fault in faults if fault.id == diagnosis.id]
        parts.append(f"**False alarms.** {diagnosis.false_alarms}\n")
    return "\n".join(parts)


def _example(fault: Fault, told: Told) -> str:
    """Return the section on one script: its first line, its thread, the finding and the fix as code."""
    text = (HERE / fault.script).read_text("utf-8")
    thread = re.search(r"^# Thread: (https\S+)", text, re.MULTILINE)
    found = next(finding for finding in told.findings if finding["id"] == fault.id)
    code = f"\n<!-- no-run -->\n```python\n{found['code']}\n```\n" if found["code"] else ""
    after = f" (after [this thread]({thread[1]}))" if thread else ""
    source = f"[`{fault.script}`](../examples/faults/{fault.script}){after}"
    return (
        f"{source}: {ast.get_docstring(ast.parse(text))}\n\n> {found['severity']}{_inferred(found)}: {found['message']}\n>\n"
        f"> {found['fix'] or 'Nothing to do.'}\n{code}"
    )


def _inferred(finding: dict[str, object]) -> str:
    return "" if finding["certainty"] == "measured" else " (inferred)"


_PAGE_HEAD = """# Diagnoses

Findings of the ranges that name a cause. Each is made by one function over the record of a run, and says nothing where the record
does not show the cause. Below: what it looks for, what it says of a script in `examples/faults/`, and when it may be wrong.
`make gallery` runs the scripts and writes this page.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="names of scripts, or parts of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", metavar="PATH", help="write what was told here too")
    parser.add_argument("--page", metavar="PATH", help="write the page of all diagnoses")
    parser.add_argument("--peers", action="store_true", help="run the faults under other tools as well")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 where a fault is missed or a healthy script is not"
    )
    options = parser.parse_args()

    def wanted(script: str) -> bool:
        return not options.only or any(part in script for part in options.only)

    faults = [fault for fault in FAULTS if wanted(fault.script)]
    healthy = [script for script in HEALTHY if wanted(script)]
    scripts = (*(fault.script for fault in faults), *healthy)
    with ThreadPoolExecutor(options.jobs) as pool:
        told = dict(zip(scripts, pool.map(run, scripts), strict=True))
        asked = [peer for peer in PEERS if options.peers and peer.is_installed]
        answers = {peer.name: list(pool.map(peer.ask, [HERE / fault.script for fault in faults])) for peer in asked}
    missed = _print_faults(faults, told) + _print_healthy(healthy, told)
    for name, said in answers.items():
        print(f"\n{name}: something to say on {sum(answer != NOTHING for answer in said)} of {len(faults)}")
        for fault, answer in zip(faults, said, strict=True):
            print(f"  {fault.script:28} {answer}")
    if options.json:
        rows = {script: {"verdicts": found.verdicts, "findings": found.findings} for script, found in told.items()}
        Path(options.json).write_text(json.dumps(rows, indent=1), "utf-8")
    if options.page:
        Path(options.page).write_text(page(faults, told), "utf-8")
    return int(options.check and missed > 0)


def _print_faults(faults: list[Fault], told: dict[str, Told]) -> int:
    """Print a row for each fault and the score; return how many were not named."""
    print(f"{'script':28} {'named':5}  told")
    for fault in faults:
        found = told[fault.script]
        print(f"{fault.script:28} {found.of(fault):5}  {'; '.join(map(_place, found.above_info())) or found.outcome}")
    scores = [told[fault.script].of(fault) for fault in faults]
    print(
        f"{scores.count('yes')} of {len(faults)} faults named with module and step, {scores.count('half')} half, "
        f"{scores.count('no')} not\n"
    )
    return len(faults) - scores.count("yes")


def _print_healthy(healthy: list[str], told: dict[str, Told]) -> int:
    """Print a row for each healthy script; return how many had a finding above info, or no verdict."""
    alarms = 0
    for script in healthy:
        found = told[script]
        alarms += bool(found.above_info()) or not found.verdicts
        words = "; ".join(f"{_place(finding)}: {finding['message']}" for finding in found.above_info())
        print(f"{script:34} {words or ('healthy' if found.verdicts else found.outcome)}")
    print(f"{alarms} false alarms in {len(healthy)} healthy scripts")
    return alarms


def _place(finding: dict[str, object]) -> str:
    step = "" if finding["step"] is None else f" {finding['step']}"
    return f"{finding['id']} {finding['layer'] or '-'}{step}"


if __name__ == "__main__":
    sys.exit(main())
