"""Compares the demo's model in FP32 with FP16 without loss scaling, with the recommended scale and with a dynamic one.

As in NVIDIA's papers and talks on mixed precision, the curves show loss against steps, and the curve without scaling
departs from the others. All runs start from the same weights and train on the same batches. The FP32 run is the demo's
own, with the inspector on; the recommended scale is the one in its report.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpinspect.demo.demo import draw, free_directory, headline, progress, whereabouts
from mpinspect.demo.loss_curves import LAST_STEPS, Curve, table
from mpinspect.demo.runs import FP32, Setting, Text, Way, inspected, trained
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.reporting.words import by_number, lower_first

__all__ = ["Comparison", "Setting", "run"]

PICTURE = "curves.png"
UNSCALED = Way("FP16, no scaling", "fp16-amp", 1.0)
#: The initial scale of the "talk" policy is too large for any model, so that the run shows how it is halved.
DYNAMIC = Way("FP16, dynamic scaling", "fp16-amp", "talk")
#: Directory, below the FP32 run's, for the session of the unscaled run with the first seed, to compare both.
UNSCALED_RUN = "fp16-no-scaling"
_TITLE = "A language model in FP32, and in FP16 with and without loss scaling"
_ANNOUNCEMENT = (
    "\nThe same training in FP16 follows: without scaling, with the recommended scale, with a dynamic scale."
)
_WIDTH = 110
_LOSSES = (
    f"Losses are in nats a word. Training: mean of the last {LAST_STEPS} steps, as trained. Validation: after the last step, "
    "in FP32 from the FP32 weights; best: the lowest on the way; from FP32: its difference."
)


@dataclass(frozen=True)
class Comparison:
    """The finished runs, and the inspector's report of the first run.

    Args:
        setting: settings of all runs.
        report: report of the FP32 run with the first seed.
        curves: the runs, seed by seed.
        notes: sentences on how the runs were made.
        picture: path of the chart.
    """

    setting: Setting
    report: RangeReport
    curves: tuple[Curve, ...]
    notes: tuple[str, ...]
    picture: Path

    def __str__(self) -> str:
        words = (textwrap.fill(note, _WIDTH) for note in (_LOSSES, *self.notes))
        return "\n".join([table(self.curves), "", *words])

    def to_json(self) -> str:
        """Return JSON with the report's under "report" and the rest under "curves"; non-finite losses are strings."""
        curves = {
            "setting": asdict(self.setting),
            "notes": self.notes,
            "picture": str(self.picture),
            "runs": [asdict(curve) for curve in self.curves],
        }
        document = {"report": json.loads(self.report.to_json()), "curves": _strict(curves)}
        return json.dumps(document, allow_nan=False) + "\n"


def run(
    *,
    log_dir: str | Path | None = None,
    setting: Setting | None = None,
    seeds: Sequence[int] = (0,),
    quiet: bool = False,
) -> Comparison:
    """Run the demo, train its model in FP16 in three ways, print a table and draw ``curves.png`` next to its pictures.

    Args:
        log_dir: as for ``demo.run``.
        setting: settings of all runs.
        seeds: seeds of weights and batches, each used for every way; the FP32 run of the first is inspected.
        quiet: suppress all output.

    Raises:
        ValueError: no seeds, or one given twice.
        FileNotFoundError: the standard library's source is missing.
        OSError: log_dir can't be written.
        KeyboardInterrupt: on Ctrl-C; the finished runs have been printed and drawn, and the message gives their number.
    """
    setting = setting or Setting()
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds={list(seeds)}: give one or more, each once")
    directory = free_directory(log_dir)
    text = Text.read(setting)
    try:
        with progress(setting.steps, quiet, FP32.name, of=4 * len(seeds)) as advance:
            report, first = inspected(setting, text, seeds[0], directory, advance)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("no run was finished, so there are no curves") from None
    pictures = draw(report, directory)
    _print(quiet, report, headline(report), _ANNOUNCEMENT)
    curves = [first]
    todo = list(_rest(report, seeds))
    try:
        for number, (way, seed) in enumerate(todo, start=2):
            with progress(setting.steps, quiet, way.name, place=number, of=1 + len(todo)) as advance:
                log_dir = directory / UNSCALED_RUN if (way, seed) == (UNSCALED, seeds[0]) else None
                curves.append(trained(way, setting, text, seed, advance, log_dir))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"{len(curves)} of {1 + len(todo)} runs were finished; the table and the curves hold those"
        ) from None
    finally:
        notes = _notes(setting, text, report, curves)
        comparison = Comparison(setting, report, tuple(curves), notes, directory / PICTURE)
        _draw(comparison)
        unscaled = directory / UNSCALED_RUN
        shown = whereabouts(directory, [*pictures, comparison.picture], unscaled if unscaled.exists() else None)
        _print(quiet, "", comparison, shown)
    return comparison


def recommended(report: RangeReport) -> Way | None:
    """Return FP16 with the report's loss scale, held constant; None without a recommendation."""
    scale = report.loss_scale.recommended
    return None if scale is None else Way("FP16, recommended scale", "fp16-amp", scale)


def _rest(report: RangeReport, seeds: Sequence[int]) -> Iterator[tuple[Way, int]]:
    """Yield the runs that follow the inspected one: every way with every seed."""
    for seed in seeds:
        for way in (FP32, UNSCALED, recommended(report), DYNAMIC):
            if way is not None and (way, seed) != (FP32, seeds[0]):
                yield way, seed


def _notes(setting: Setting, text: Text, report: RangeReport, curves: Sequence[Curve]) -> tuple[str, ...]:
    seeds = list(dict.fromkeys(curve.seed for curve in curves))
    named = f"{by_number(len(seeds), 'seed', 'seeds')} {', '.join(map(str, seeds))}"
    notes = [
        f"{setting}, {named}; validated on {text.validation_words:,} words held out.",
        f"{_recommendation(report, seeds[0])} The dynamic scale starts at 2^32, is halved at an overflow and doubled after "
        "1,000 clean steps.",
    ]
    if any(curve.emulated for curve in curves):
        notes.append("FP16 was emulated on the CPU as Tensor Cores compute: FP16 operands, sums in FP32, FP16 results.")
    return tuple(notes)


def _recommendation(report: RangeReport, seed: int) -> str:
    if recommended(report) is None:
        return f"The inspector recommends no loss scale: {lower_first(report.loss_scale.reason.rstrip('.'))}."
    return f"The recommended scale is from the inspector's report of the FP32 run with seed {seed}."


def _draw(comparison: Comparison) -> None:
    from mpinspect.demo import plot_curves

    plot_curves.save(comparison.curves, comparison.picture, _TITLE)


def _print(quiet: bool, *parts: object) -> None:
    if not quiet:
        print(*parts, sep="\n", flush=True)


def _strict(value: Any) -> Any:
    """Return ``value`` with infinity and NaN, which JSON lacks, as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, (list, tuple)) else value
