"""The inspector's cost per training step on a CUDA GPU: ResNet-50 and GPT-2 small in FP16 AMP with a GradScaler.

    python benchmarks/gpu_overhead.py [--json benchmarks/results/gpu_overhead-gpu.json] [--rounds 5] [--quick] [--tiny]

CUDA events time the steps, in blocks that alternate with blocks of the bare loop. The ratio compares a block's mean step with
the bare blocks before and after it, and is the median over the rounds. The first ten steps, which the defaults all count, are a
separate block. The results also hold the host's time inside the inspector's callbacks, the added GPU time from torch.profiler
(by kernel in the file), the peak of torch's memory, and the added synchronisations with their lines, as reported by
torch.cuda.set_sync_debug_mode. GradScaler synchronises itself, so the bare loop's synchronisations are subtracted. Explicit
waits for an event or a stream are not reported. Without a GPU the script prints this and exits. --tiny tests the script with
toy sizes, also on a CPU.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from entrances import Stopwatch, faults_are_errors
from machine import ResultsFile, arguments
from networks import GPT, Subject, adamw, gpt2_small, images, resnet, resnet50, sgd, tokens
from targets import checked, verdicts
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import mpinspect

DEFAULTS = "defaults: counts in ten steps and every tenth, watch on"
#: Name -> the inspector's options.
SETTINGS: dict[str, dict[str, Any]] = {
    DEFAULTS: {},
    "the watch alone": {"capture": ()},
    "counts in every step, watch on": {"every": 1},
    "every=10, watch off": {"every": 10, "watch": False},
    "between samples, watch off": {"capture": (), "watch": False},
}
#: A network starts no further round after this time, so that both finish within gpu.py's limit.
MOST_SECONDS = 25
#: The number of steps after attaching that are timed separately; the defaults count all of them.
FIRST_STEPS = 10
#: The number of steps timed next, after one more step: the defaults neither count nor measure them.
STEADY_STEPS = 5
#: The results list only the most expensive kernels that the inspector adds.
MOST_KERNELS = 8
#: Target -> the subject on which it is measured.
PROMISED = {"gpu.gpt2": "GPT-2 small, 8 x 1024 tokens", "gpu.resnet50": "ResNet-50, batch 128"}


@dataclass
class Row:
    """One setting on one model. ``added_``: relative to the bare loop. Memory and GPU times are None on a CPU.

    ``each_step_ms``: the steps of one round, starting after attaching. ``added_kernels``: launches and microseconds per step of
    the most expensive added kernels, by name. ``steady_entrances``: by entrance, in a step between samples: calls, milliseconds,
    and milliseconds of the processor; the rest of the time is waiting.
    """

    subject: str
    name: str
    step_ms: float
    step_ratio: float
    first_steps_ratio: float
    callbacks_ms: float | None
    added_gpu_ms: float | None
    added_launches: float | None
    added_memory_mib: float | None
    added_synchronisations_per_step: float
    synchronised_at: dict[str, int] = field(default_factory=dict)
    each_step_ms: list[float] = field(default_factory=list)
    added_kernels: dict[str, tuple[float, float]] = field(default_factory=dict)
    steady_entrances: dict[str, tuple[float, float, float]] = field(default_factory=dict)


def subjects(tiny: bool) -> list[Subject]:
    if tiny:
        return [
            Subject("ResNet", lambda: resnet((1, 1), 8, 10), images(4, 32, 10), sgd),
            Subject("GPT-2", lambda: GPT(1, 32, 2, 16, 64), tokens(2, 16, 64), adamw),
        ]
    return [
        Subject(PROMISED["gpu.gpt2"], gpt2_small, tokens(8, 1024, 50304), adamw),
        # In the first subject the host is as slow as the GPU; here the GPU is slower.
        Subject("GPT-2 small, 32 x 1024 tokens", gpt2_small, tokens(32, 1024, 50304), adamw),
        Subject(PROMISED["gpu.resnet50"], resnet50, images(128, 224, 1000), sgd, channels_last=True),
    ]


class Training:
    """A model in FP16 AMP with a GradScaler on one device, always on the same batch."""

    def __init__(self, subject: Subject, device: str) -> None:
        torch.manual_seed(0)
        layout = torch.channels_last if subject.channels_last else torch.contiguous_format
        self.device = device
        self.model = subject.model().to(device).to(memory_format=layout)
        x, self.y = subject.batch(device)
        self.x = x.to(memory_format=layout) if x.dim() == 4 else x
        self.optimizer = subject.optimizer(self.model.parameters())
        self.scaler = torch.amp.GradScaler(device)

    def step(self) -> None:
        self.optimizer.zero_grad()
        # FP16 products are too slow on a CPU, which only tests the script.
        with torch.autocast(self.device, torch.float16 if self.device == "cuda" else torch.bfloat16):
            loss = F.cross_entropy(self.model(self.x), self.y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def milliseconds(self, steps: int) -> float:
        """Return the mean step of a block, in which only some steps are sampled."""
        return statistics.mean(self.each_milliseconds(steps))

    def each_milliseconds(self, steps: int) -> list[float]:
        """Return the time of each step of a block."""
        if self.device != "cuda":
            times = [time.perf_counter()]
            for _ in range(steps):
                self.step()
                times.append(time.perf_counter())
            return [(after - before) * 1e3 for before, after in itertools.pairwise(times)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        events[0].record()
        for event in events[1:]:
            self.step()
            event.record()
        torch.cuda.synchronize()
        return [float(before.elapsed_time(after)) for before, after in itertools.pairwise(events)]

    def inspected(self, options: dict[str, Any]) -> mpinspect.Inspector:
        return mpinspect.Inspector(self.model, optimizers=self.optimizer, scalers=self.scaler, **options)


def measure(subject: Subject, device: str, rounds: int, steps: int, first_steps: int) -> list[Row]:
    training = Training(subject, device)
    training.milliseconds(steps)
    for options in SETTINGS.values():
        # Warm up: compile and allocate.
        with training.inspected(options):
            training.milliseconds(2)
    bare_syncs, bare_kernels = synchronisations(training, steps), kernels(training, steps)
    bare = [training.milliseconds(steps)]
    times: dict[str, list[float]] = {name: [] for name in SETTINGS}
    ratios: dict[str, list[float]] = {name: [] for name in SETTINGS}
    first_ratios: dict[str, list[float]] = {name: [] for name in SETTINGS}
    each: dict[str, list[float]] = {}
    started = time.monotonic()
    for done in range(rounds):
        if done and time.monotonic() - started > MOST_SECONDS:
            print(f"{subject.name}: {done} rounds of {rounds}, for {MOST_SECONDS} s have gone by")
            break
        for name, options in SETTINGS.items():
            with training.inspected(options):
                first = training.each_milliseconds(first_steps)
                later = training.each_milliseconds(steps)
                times[name].append(statistics.mean(later))
                each[name] = [round(ms, 2) for ms in first + later]
            bare.append(training.milliseconds(steps))
            ratios[name].append(times[name][-1] / statistics.mean(bare[-2:]))
            first_ratios[name].append(statistics.mean(first) / statistics.mean(bare[-2:]))
    rows = [Row(subject.name, "bare", statistics.median(bare), 1.0, 1.0, None, None, None, None, 0.0)]
    peaks: list[float | None] = []
    for name, options in SETTINGS.items():
        watch = Stopwatch()
        with watch.around_entrances(), training.inspected(options):
            training.milliseconds(first_steps + 1)
            watch.restart()
            training.milliseconds(STEADY_STEPS)
            steady = by_entrance(watch, STEADY_STEPS)
            watch.restart()
            training.milliseconds(steps)
        with training.inspected(options):
            syncs, peak = synchronisations(training, first_steps), peak_mib(training)
            added_kernels = added(kernels(training, steps), bare_kernels)
        peaks.append(peak)
        row = Row(
            subject.name,
            name,
            statistics.median(times[name]),
            statistics.median(ratios[name]),
            statistics.median(first_ratios[name]),
            watch.seconds / steps * 1e3,
            sum(us for _, us in added_kernels.values()) / 1e3 if device == "cuda" else None,
            sum(launches for launches, _ in added_kernels.values()) if device == "cuda" else None,
            None,
            syncs.total() / first_steps - bare_syncs.total() / steps,
            dict(syncs - bare_syncs),
            each[name],
            dict(sorted(added_kernels.items(), key=lambda item: -abs(item[1][1]))[:MOST_KERNELS]),
            steady,
        )
        rows.append(row)
    # Measured last: cuDNN's search for algorithms holds memory in the first steps, with or without an inspector.
    bare_peak = peak_mib(training)
    for row, peak in zip(rows[1:], peaks, strict=True):
        row.added_memory_mib = None if peak is None or bare_peak is None else peak - bare_peak
    return rows


def kernels(training: Training, steps: int) -> dict[str, tuple[float, float]]:
    """Return a step's launches and microseconds by kernel name; empty on a CPU."""
    if training.device != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        training.milliseconds(steps)
    launches, times = Counter[str](), Counter[str]()
    for event in profiled.events():
        if str(event.device_type).endswith("CUDA"):
            launches[event.name] += 1
            times[event.name] += event.time_range.elapsed_us()
    return {name: (launches[name] / steps, times[name] / steps) for name in launches}


def by_entrance(watch: Stopwatch, steps: int) -> dict[str, tuple[float, float, float]]:
    """Return a step's calls, milliseconds and milliseconds of the processor by entrance, the most expensive first."""
    spent = sorted(watch.by_entrance.items(), key=lambda item: -item[1].seconds)
    return {
        name: (each.calls / steps, each.seconds / steps * 1e3, each.processor_seconds / steps * 1e3)
        for name, each in spent
    }


def added(
    inspected: dict[str, tuple[float, float]], bare: dict[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """Return the differences between two steps, negative where the training's own kernels took less time."""
    none = 0.0, 0.0
    return {
        name: (
            inspected.get(name, none)[0] - bare.get(name, none)[0],
            inspected.get(name, none)[1] - bare.get(name, none)[1],
        )
        for name in {**inspected, **bare}
    }


def synchronisations(training: Training, steps: int) -> Counter[str]:
    """Count the synchronisations that torch reports in these steps, by source line; empty on a CPU."""
    with _warning_of_synchronisations(training.device), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            training.step()
    waited = [warning for warning in caught if "synchronizing" in str(warning.message)]
    return Counter(f"{'/'.join(Path(warning.filename).parts[-3:])}:{warning.lineno}" for warning in waited)


@contextlib.contextmanager
def _warning_of_synchronisations(device: str) -> Iterator[None]:
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def peak_mib(training: Training) -> float | None:
    if training.device != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    training.milliseconds(3)
    return torch.cuda.max_memory_allocated() / 2**20


def promises(rows: list[Row]) -> list[dict[str, Any]]:
    found = {row.subject: row for row in rows if row.name == DEFAULTS}
    kept = [checked(key, found[subject].step_ratio) for key, subject in PROMISED.items() if subject in found]
    if len(kept) == len(PROMISED):
        kept.append(checked("gpu.synchronisations", max(row.added_synchronisations_per_step for row in rows)))
    return kept


def results(rows: list[Row]) -> dict[str, Any]:
    return {"rows": [asdict(row) for row in rows], "checked": promises(rows)}


def line(row: Row) -> str:
    host = "" if row.callbacks_ms is None else f"{row.callbacks_ms:.2f} ms in callbacks"
    gpu = "" if row.added_gpu_ms is None else f"{row.added_gpu_ms:+.2f} ms in {row.added_launches:+.0f} launches"
    memory = "" if row.added_memory_mib is None else f"{row.added_memory_mib:+.0f} MiB"
    return (
        f"{row.subject:30} {row.name:52} {row.step_ms:8.2f} ms {row.step_ratio:6.3f}x, at first {row.first_steps_ratio:6.3f}x "
        f"{host:>24} {gpu:>27} {memory:>10} {row.added_synchronisations_per_step:+.1f} synchronisations "
        f"{' '.join(row.synchronised_at)}"
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to see that the script works; also on a CPU")
    options = parser.parse_args()
    faults_are_errors()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        print("There is no CUDA GPU here, so nothing was measured (--tiny runs toy sizes on the CPU).")
        return
    torch.backends.cudnn.benchmark = True
    file, rows = ResultsFile(options.json, rehearsal=options.tiny), []
    for subject in subjects(options.tiny):
        rounds = 1 if options.quick or options.tiny else options.rounds
        found = measure(subject, device, rounds, *((2, 2) if options.tiny else (20, FIRST_STEPS)))
        print("\n".join(map(line, found)), flush=True)
        rows += found
        file.write(results(rows), complete=False)
        if device == "cuda":
            torch.cuda.empty_cache()
    print(verdicts(promises(rows)))
    file.write(results(rows))


if __name__ == "__main__":
    main()
