"""The inspector's cost in trainings on a CPU: a GPT, ResNet-50, an LSTM and many tiny layers, in one run.

    python benchmarks/overhead.py [--json benchmarks/results/overhead-cpu.json] [--rounds 2] [--quick]

Wall-clock time cannot resolve a percent on a busy machine, so the main figure is the time inside the inspector's callbacks
(benchmarks/entrances.py) relative to the bare step. The wall-clock ratio to the neighbouring bare steps is also listed.
Attaching, which compiles the counting kernels, is not part of a step. wandb.watch (offline), TensorBoard's add_histogram of
every gradient and Transformers' DebugUnderflowOverflow are measured too, where installed.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch
from entrances import Stopwatch, faults_are_errors, uncovered
from machine import arguments, write_results
from module_calls import added_us
from networks import GPT, LSTM, Subject, adamw, images, resnet50, sgd, tiny_layers, tokens, vectors
from onlookers import ONLOOKERS, Onlooker, Trainer
from targets import checked, verdicts

import mpinspect
from mpinspect.counting import fastest
from mpinspect.ranges.kinds import KINDS

#: The targets apply to this subject.
PROMISED = "GPT, 13.9 M parameters"
SUBJECTS = (
    Subject(PROMISED, lambda: GPT(6, 384, 6, 256, 8192), tokens(8, 256, 8192), adamw),
    Subject("ResNet-50, batch 24, 64x64", resnet50, images(24, 64, 1000), sgd),
    Subject("LSTM 2x256, vocabulary 8192", lambda: LSTM(2, 256, 8192), tokens(16, 64, 8192), adamw),
    Subject("64 linear layers of 64", lambda: tiny_layers(64, 64, 10), vectors(32, 64, 10), sgd, times=10),
)


@dataclass
class Row:
    """One observer, relative to the bare steps of the same rounds (medians over rounds)."""

    subject: str
    name: str
    step_ms: float
    wall_ratio: float
    callbacks_fraction: float | None


def measure(subject: Subject, rounds: int, onlookers: tuple[Onlooker, ...]) -> list[Row]:
    """Measure every observer against the neighbouring bare steps, in each round."""
    torch.manual_seed(0)
    trainer = Trainer(subject.model(), subject.optimizer, subject.batch)
    trainer.steps(2)
    with mpinspect.Inspector(trainer.model, optimizers=trainer.optimizer, capture=KINDS):
        trainer.steps(1)
    bare = trainer.steps(subject.times)
    found: dict[str, list[tuple[float, float, float | None]]] = {}
    for _ in range(rounds):
        for onlooker in onlookers:
            before = statistics.median(bare[-subject.times :])
            looked = onlooker.look(trainer, onlooker.steps * subject.times)
            if looked is None:
                continue
            bare += trainer.steps(subject.times)
            base = (before + statistics.median(bare[-subject.times :])) / 2
            mean = statistics.mean(looked[0])
            found.setdefault(onlooker.name, []).append((mean, mean / base, looked[1]))
    step = statistics.median(bare)
    rows = [Row(subject.name, "bare", step * 1e3, 1.0, None)]
    for name, measured in found.items():
        means, walls, callbacks = zip(*measured, strict=True)
        inside = None if None in callbacks else statistics.median(callbacks) / step
        rows.append(Row(subject.name, name, statistics.median(means) * 1e3, statistics.median(walls), inside))
    return rows


def require_that_nothing_goes_untimed() -> None:
    """Fail if a step runs code of the inspector outside of every entrance, which the figures would miss."""
    watch = Stopwatch()
    trainer = Trainer(tiny_layers(1, 8, 4), sgd, vectors(4, 8, 4))
    with (
        watch.around_entrances(),
        mpinspect.Inspector(trainer.model, optimizers=trainer.optimizer, capture=KINDS),
    ):
        trainer.steps(1)
        missed = uncovered(watch, lambda: trainer.steps(1))
    if missed:
        raise RuntimeError(f"benchmarks/entrances.py does not cover {', '.join(missed)}")


def promises(rows: list[Row], module_call_us: float) -> list[dict[str, Any]]:
    inside = {row.name: row.callbacks_fraction for row in rows if row.subject == PROMISED}
    answered = [(onlooker.target, inside.get(onlooker.name)) for onlooker in ONLOOKERS]
    kept = [checked(target, value) for target, value in answered if target and value is not None]
    return [*kept, checked("overhead.module_call", module_call_us)]


def table(rows: list[Row]) -> str:
    lines = [f"{rows[0].subject:52} {'step':>10} {'wall':>6} {'in callbacks':>13}"]
    for row in rows:
        inside = "" if row.callbacks_fraction is None else f"{row.callbacks_fraction:.2%}"
        lines.append(f"  {row.name:50} {row.step_ms:7.1f} ms {row.wall_ratio:5.2f}x {inside:>13}")
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="two take under six minutes on two cores")
    parser.add_argument("--quick", action="store_true", help="one round; the GPT and the tiny layers alone")
    options = parser.parse_args()
    faults_are_errors()
    fastest.warm_up(compile_here=True)
    require_that_nothing_goes_untimed()
    subjects = (SUBJECTS[0], SUBJECTS[-1]) if options.quick else SUBJECTS
    rounds = 1 if options.quick else options.rounds
    rows = []
    for subject in subjects:
        found = measure(subject, rounds, ONLOOKERS)
        print(table(found), flush=True)
        rows += found
    missing = [onlooker.name for onlooker in ONLOOKERS if onlooker.name not in {row.name for row in rows}]
    print(f"not to be had here: {', '.join(missing) or 'nothing'}")
    module_call_us = added_us()
    kept = promises(rows, module_call_us)
    print(verdicts(kept))
    if options.json:
        results = {"rounds": rounds, "rows": [asdict(row) for row in rows], "not_available": missing, "checked": kept}
        write_results(options.json, results)


if __name__ == "__main__":
    main()
