"""The waist: frozen records of a run.

Capture fills a session, analysis and reports read it; neither knows the other. Everything here is plain
data without torch: what is counted are the *unscaled* values (the loss scale of that backward divided out).
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, NamedTuple

from mpinspect.numeric.exponents import ExponentHistogram, merge
from mpinspect.numeric.formats import FORMATS
from mpinspect.ranges.kinds import KINDS
from mpinspect.runtime.decoding import Between, OneOf

if TYPE_CHECKING:
    from os import PathLike
    from pathlib import Path

#: What events have beside these kinds: the loss before and after a scaler multiplied it.
LOSSES = ("loss", "scaled_loss")
#: The phase of an event that no step told of.
END = "end"

# What fields may hold; whoever reads a session from a file checks it (``decoding.typed``).
Kind = Annotated[str, OneOf(KINDS)]
#: Steps, elements: what the file's columns hold too.
Count = Annotated[int, Between(0, (1 << 63) - 1)]
#: Of a magnitude: float64's, -1074..1023, moved by a loss scale that is a float64 as well; the next power of two.
LARGEST_EXPONENT = 4096
Exponent = Annotated[int, Between(-LARGEST_EXPONENT, LARGEST_EXPONENT)]
Seconds = Annotated[float, Between(-1e18, 1e18)]
#: A loss scale; infinite where a scaler has grown beyond its dtype.
Scale = Annotated[float, Between(0.0, math.inf)]

#: Windows that a run of any length is coarsened to: an eighth of the run, the block by which drift is told, has 8 or more.
WINDOW_LIMIT = 128
#: Histograms that these hold together, at about 1.5 kB of memory each: twice as many load in about a second.
TENSOR_WINDOW_LIMIT = 1 << 16
#: ... but fewer windows than this would blur the drift over the run, however many tensors there are.
LEAST_WINDOW_LIMIT = 16


class TensorKey(NamedTuple):
    """Which tensor: the dotted path of a parameter (of a module, for the activation kinds), and the kind."""

    name: str
    kind: Kind


@dataclass(frozen=True)
class TensorInfo:
    """One tensor that the inspector watches, whether or not it was ever seen.

    Args:
        name, kind: see TensorKey.
        module: dotted path of the module that owns it ("" is the model itself).
        module_type: class name of that module.
        shape: shape of the parameter; empty for activations, whose shape varies.
        dtype: storage dtype of the parameter ("float32"); "" for activations.
        note: why it can't be captured, if that is known ("frozen: requires_grad is False"), else "".
    """

    name: str
    kind: Kind
    module: str
    module_type: str
    shape: tuple[Count, ...] = ()
    dtype: str = ""
    note: str = ""

    @property
    def key(self) -> TensorKey:
        return TensorKey(self.name, self.kind)


@dataclass(frozen=True)
class LostUpdates:
    """Parameter updates that rounding would lose if the weights were stored in a format: w + dw rounds back to w.

    ``measured`` is True where the weights really are stored so and did not move although their gradient was not zero;
    otherwise every w and dw of a wider weight was rounded to find out.
    """

    lost: int
    nonzero: int
    measured: bool = False

    def __add__(self, other: LostUpdates) -> LostUpdates:
        return LostUpdates(self.lost + other.lost, self.nonzero + other.nonzero, self.measured and other.measured)

    @property
    def fraction(self) -> float:
        """Lost over non-zero updates, 0..1."""
        return self.lost / self.nonzero if self.nonzero else 0.0


@dataclass(frozen=True)
class TensorWindow:
    """What was counted of one tensor over one window of steps.

    Args:
        histogram: unscaled values of all samples together.
        samples: how many tensors were counted (a module used twice gives two a step, micro-batches one each).
        peaks: for how many samples the ``peak_exponent`` (exponent of the largest magnitude, rounded to 11 bits) was what.
        dtypes: storage dtypes of the tensors counted.
        passed_through: name of the narrowest format that the values were rounded to before they could be counted
            ("float16" under FP16 autocast, the FP32 ``.grad`` included), "float32" if none.
        floor_exponent: visibility floor: unscaled magnitudes up to 2^floor_exponent may have been flushed before they were
            counted (the format's flush edge over the smallest scale used); None where nothing was flushed before.
        lost_updates: by name of the storage format asked about; only for kind "update".
        numel_max: elements of the largest single sample.
    """

    histogram: ExponentHistogram
    samples: int
    peaks: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    dtypes: tuple[str, ...] = ("float32",)
    passed_through: str = "float32"
    floor_exponent: int | None = None
    lost_updates: Mapping[str, LostUpdates] = field(default_factory=lambda: MappingProxyType({}))
    numel_max: int = 0


@dataclass(frozen=True)
class Window:
    """All that was counted in the sampled steps from first_step to last_step, both included.

    ``gradient_peaks``: for how many sampled steps the peak exponent over *all* gradients was what.
    """

    first_step: int
    last_step: int
    sampled_steps: int
    tensors: Mapping[TensorKey, TensorWindow]
    gradient_peaks: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))

    def times(self, weight: int) -> Window:
        """Return the window as if each sample had been counted ``weight`` times; its steps and peaks stay."""
        from mpinspect.ranges.store.columns import TensorColumns

        return replace(self, tensors=TensorColumns.of(self.tensors).times(weight))

    def of_kinds(self, kinds: Collection[str]) -> Window:
        """Return the window with the tensors of these kinds only."""
        from mpinspect.ranges.store.columns import TensorColumns

        if isinstance(self.tensors, TensorColumns):
            return replace(self, tensors=self.tensors.only(kinds))
        return replace(self, tensors={key: tensor for key, tensor in self.tensors.items() if key.kind in kinds})


@dataclass(frozen=True)
class Event:
    """Something turned infinite or NaN: the first such tensor of a step, in execution order.

    Args:
        step, micro_batch: counted from 0.
        phase: "forward" or "backward"; "end" for weights that were not finite when the run ended, and no step had told.
        module: dotted path of the module in which it arose, as far as the tensors seen can tell ("" is the model itself).
        what: the kind of tensor in which it was first seen, or one of LOSSES.
        tensor: name of that tensor (a module's or a parameter's dotted path).
        value: "inf" or "nan" (NaN if both).
        loss_scale: the scale of that step's backward; None if unknown or not yet known (forward).
        last_maxima: largest finite magnitudes of the same tensor at the steps before, oldest first (at most 8).
        skipped: whether the optimizer's step was skipped; None if not known.
        forward_finite: whether every output seen in that step's forward was finite; None if not watched.
        gradients_finite: whether every gradient seen in that step was finite (then a non-finite forward did no harm: a mask,
            perhaps); None if no gradient was seen.
        explanation: a sentence: how it is known that it arose there.
        after: whether it arose after ``module``, which was handed a gradient that was not finite already: in the loss, or in a
            function between modules.
    """

    step: Count
    micro_batch: Count
    phase: Annotated[str, OneOf(("forward", "backward", END))]
    module: str
    what: Annotated[str, OneOf((*KINDS, *LOSSES))]
    tensor: str
    value: Annotated[str, OneOf(("inf", "nan"))]
    loss_scale: Scale | None = None
    last_maxima: tuple[float, ...] = ()
    skipped: bool | None = None
    forward_finite: bool | None = None
    gradients_finite: bool | None = None
    explanation: str = ""
    after: bool = False

    @property
    def place(self) -> str:
        """Where it arose, in words: the module's path, or what the empty path stands for."""
        place = self.module or ("the loss" if self.what in LOSSES else "the model itself")
        return f"after {place}" if self.after else place


#: Rows of a batch that a measurement names.
MOST_ROWS = 8


@dataclass(frozen=True)
class Measurement:
    """Something measured of a run that no histogram tells; a diagnosis (``analysis/diagnoses``) makes findings of it.

    Args:
        what: which measurement, as the observer that makes it names it ("gradients-handed-over").
        name: dotted path of the module or parameter; "" for the whole model.
        step: counted from 0.
        figures: numbers by name; those that are not finite are kept.
        names: further dotted paths.
        text: a few words that the diagnosis quotes: a dtype, an operator, a class name.
    """

    what: str
    name: str = ""
    step: Count = 0
    figures: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    names: tuple[str, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class OptimizerRecord:
    """An optimizer of the model, as it was at one of its steps.

    Args:
        type: class name.
        settings: numbers of its first group by name: "lr", "weight_decay", "eps", "momentum", "beta1", "beta2".
        steps: dtypes of the tensors that it steps, and how many elements of each.
        states: by name ("exp_avg_sq") the dtypes in which it keeps the state of each element; empty before its first step.
        masters: elements of those that it steps and the model does not hold (FP32 masters of a loop that copies them back).
    """

    type: str
    settings: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    steps: Mapping[str, Count] = field(default_factory=lambda: MappingProxyType({}))
    states: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    masters: Count = 0


@dataclass(frozen=True)
class ScalerRecord:
    """A gradient scaler that multiplied a loss of the model.

    Args:
        type: class name.
        enabled: whether it scales at all.
        init_scale: the scale at its first use; None if unknown.
        growth_interval: steps; None if it has none.
    """

    type: str
    enabled: bool = True
    init_scale: Scale | None = None
    growth_interval: float | None = None


@dataclass(frozen=True)
class Precision:
    """The ledger of a run: in which dtypes things are kept and computed. Dtypes by torch's names ("bfloat16").

    Args:
        weights: elements of the parameters by dtype.
        gradients: elements of the gradients that the optimizers were given by dtype; empty where none was seen.
        autocast: dtypes of the autocasts in which training forwards ran; "" stands for forwards outside of any.
        outputs: dtypes of the floating outputs of modules in training forwards.
        losses: dtypes of the losses whose backwards were seen.
        optimizers, scalers: those seen.
    """

    weights: Mapping[str, Count] = field(default_factory=lambda: MappingProxyType({}))
    gradients: Mapping[str, Count] = field(default_factory=lambda: MappingProxyType({}))
    autocast: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    optimizers: tuple[OptimizerRecord, ...] = ()
    scalers: tuple[ScalerRecord, ...] = ()


class ScaleChange(NamedTuple):
    """From this step on the loss scale was this (1.0: no scaling; None: not known)."""

    step: Count
    scale: Scale | None


@dataclass(frozen=True)
class RunInfo:
    """What run this is: fixed when the inspector attaches."""

    model: str = ""
    started: str = ""
    kinds: tuple[Kind, ...] = ()
    every: Count = 1
    watch: bool = True
    versions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    max_overhead: Annotated[float, Between(0.0, math.inf)] | None = None


@dataclass(frozen=True)
class Progress:
    """How far the run has come.

    ``scale_known`` is False once a backward ran whose loss scale could not be told; ``scale_unknown_reason`` says why.
    ``weights_moved``: whether an optimizer stepped, or the weights were changed otherwise; None where that is not known.
    With ``max_overhead``: ``watched_steps`` is how many steps the watch looked at (None: at all of them), and over
    ``measured_steps`` of them the inspector took ``own_s`` seconds to ``bare_s`` of training without it.
    """

    steps: Count = 0
    sampled_steps: Count = 0
    skipped_steps: Count = 0
    backwards: Count = 0
    ended: bool = False
    scale_known: bool = True
    scale_unknown_reason: str = ""
    scales: tuple[ScaleChange, ...] = ()
    watched_steps: Count | None = None
    measured_steps: Count = 0
    own_s: Seconds = 0.0
    bare_s: Seconds = 0.0
    weights_moved: bool | None = None

    @property
    def overhead(self) -> float | None:
        """What the inspector took over the bare training, 0.02 for 2%: measured; None where it was not."""
        return self.own_s / self.bare_s if self.bare_s > 0 else None


@dataclass(frozen=True)
class Session:
    """A run: what was watched, what was counted, what broke. Pure data; safe to keep, merge, send and read anywhere.

    ``notes`` are sentences by the capture: what it could not measure and why. ``precision`` is empty where none was recorded
    (arrays, older files).
    """

    info: RunInfo = RunInfo()
    watched: tuple[TensorInfo, ...] = ()
    windows: tuple[Window, ...] = ()
    events: tuple[Event, ...] = ()
    notes: tuple[str, ...] = ()
    progress: Progress = Progress()
    precision: Precision = Precision()
    measurements: tuple[Measurement, ...] = ()

    def __repr__(self) -> str:
        """Return one line: the fields hold every count of a run."""
        progress, model = self.progress, self.info.model or "a model"
        return f"<Session of {model}: {progress.steps} steps, {progress.sampled_steps} sampled, {len(self.watched)} tensors>"

    def totals(self) -> dict[TensorKey, TensorWindow]:
        """Return every tensor's windows merged over the whole run, in the order in which they were watched."""
        merged = _merge_tensors([window.tensors for window in self.windows])
        order = dict.fromkeys([*(info.key for info in self.watched), *merged])
        return {key: merged[key] for key in order if key in merged}

    def passed_through(self, keys: Collection[TensorKey] | None = None) -> set[str]:
        """Return the formats that these tensors' values (None: those of all) were rounded to before counting, in any window."""
        from mpinspect.ranges.store.columns import TensorColumns

        found: set[str] = set()
        for window in self.windows:
            if isinstance(window.tensors, TensorColumns):
                found |= window.tensors.passed_through(keys)
            else:
                found |= {t.passed_through for key, t in window.tensors.items() if keys is None or key in keys}
        return found

    def gradient_peaks(self) -> dict[int, int]:
        """For how many sampled steps the peak exponent over all gradients was what, over the whole run."""
        return add_counts(window.gradient_peaks for window in self.windows)

    def reached(self) -> Progress:
        """Return how far the run has come, as far as anything here tells.

        A process that is killed after a window and before the record of its progress leaves windows that reach further.
        """
        told = [window.last_step + 1 for window in self.windows] + [event.step + 1 for event in self.events]
        sampled = sum(window.sampled_steps for window in self.windows)
        if self.progress.ended or (
            self.progress.steps >= max(told, default=0) and self.progress.sampled_steps >= sampled
        ):
            return self.progress
        return replace(
            self.progress,
            steps=max(self.progress.steps, *told),
            sampled_steps=max(self.progress.sampled_steps, sampled),
        )

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Session:
        """Read a run: ``path`` is a run directory (the inspector's ``log_dir``) or a session file. Needs no torch.

        Works while the run goes on and after it was killed; what can't be read is named in ``notes``.

        Raises:
            SessionError: there is no session, the file is not one, or a newer mpinspect wrote it.
        """
        from mpinspect.ranges.store import read_session

        return read_session(path)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write a session file, every field of it; in a directory it gets the name that ``load`` looks for. Returns its path.

        Raises:
            SessionError: there is such a file already, or it can't be written.
        """
        from mpinspect.ranges.store import save_session

        return save_session(self, path)


def now() -> str:
    """Return the time that ``RunInfo.started`` holds: UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def merge_tensor_windows(parts: list[TensorWindow]) -> TensorWindow:
    """Return several windows of one tensor as one: counts add, the floor is the worst, the narrowest format stays."""
    if len(parts) == 1:
        return parts[0]
    floors = [part.floor_exponent for part in parts if part.floor_exponent is not None]
    lost: dict[str, LostUpdates] = {}
    for part in parts:
        for name, updates in part.lost_updates.items():
            lost[name] = lost[name] + updates if name in lost else updates
    return TensorWindow(
        merge(part.histogram for part in parts),
        sum(part.samples for part in parts),
        add_counts(part.peaks for part in parts),
        tuple(sorted({dtype for part in parts for dtype in part.dtypes})),
        narrowest(part.passed_through for part in parts),
        max(floors) if floors else None,
        lost,
        max(part.numel_max for part in parts),
    )


def merge_windows(first: Window, *others: Window) -> Window:
    """Neighbouring windows as one. Associative: how they are bracketed makes no difference."""
    if not others:
        return first
    windows = (first, *others)
    return Window(
        min(window.first_step for window in windows),
        max(window.last_step for window in windows),
        sum(window.sampled_steps for window in windows),
        _merge_tensors([window.tensors for window in windows]),
        add_counts(window.gradient_peaks for window in windows),
    )


def _merge_tensors(parts: Sequence[Mapping[TensorKey, TensorWindow]]) -> Mapping[TensorKey, TensorWindow]:
    """Return the tensors of several windows as one window's, as columns where there are columns."""
    from mpinspect.ranges.store.columns import TensorColumns
    from mpinspect.ranges.store.merging import merge_columns

    if any(isinstance(part, TensorColumns) for part in parts):
        return merge_columns([TensorColumns.of(part) for part in parts])
    found: dict[TensorKey, list[TensorWindow]] = {}
    for part in parts:
        for key, tensor in part.items():
            found.setdefault(key, []).append(tensor)
    return {key: merge_tensor_windows(tensors) for key, tensors in found.items()}


def coarsen(windows: Sequence[Window], limit: int | None = None) -> tuple[Window, ...]:
    """At most ``limit`` windows that tell the same: neighbours merged, in step order, every total kept exactly.

    Windows come out about equally long (in sampled steps), however often old ones are coarsened together with new ones.
    ``limit`` defaults to ``window_limit`` of the largest window's number of tensors.

    Raises:
        ValueError: limit < 1.
    """
    if limit is None:
        limit = window_limit(max((len(window.tensors) for window in windows), default=0))
    groups = coarsen_plan([window.sampled_steps for window in windows], limit)
    return tuple(merge_windows(*(windows[index] for index in group)) for group in groups)


def window_limit(tensors: int) -> int:
    """Return how many windows of so many tensors a run is coarsened to: 128, and fewer (16 at least) beyond 512 tensors."""
    return max(LEAST_WINDOW_LIMIT, min(WINDOW_LIMIT, TENSOR_WINDOW_LIMIT // max(tensors, 1)))


def coarsen_plan(sampled_steps: Sequence[int], limit: int) -> list[range]:
    """Return which neighbours ``coarsen`` merges: ranges of indices, in order, at most ``limit`` of them.

    New windows are merged to the length that old ones have; only when that leaves too many does the length double.
    """
    if limit < 1:
        raise ValueError(f"windows can't be coarsened to {limit}: at least 1 must stay")
    if len(sampled_steps) <= limit:
        return [range(index, index + 1) for index in range(len(sampled_steps))]
    length = max(2, *sampled_steps)
    while len(groups := _fill(sampled_steps, length)) > limit:
        length *= 2
    return groups


def _fill(sizes: Sequence[int], length: int) -> list[range]:
    """Greedy grouping of neighbours: a group is closed before it would exceed ``length``."""
    groups: list[range] = []
    start, filled = 0, 0
    for index, size in enumerate(sizes):
        # A window without a sample still counts as one, else any number of them would pass for few.
        size = max(size, 1)
        if index > start and filled + size > length:
            groups.append(range(start, index))
            start, filled = index, 0
        filled += size
    return [*groups, range(start, len(sizes))]


def narrowest(formats: Iterable[str]) -> str:
    """Of the formats named the one that flushes most; one that is not known here is taken for the worst."""
    return max(formats, key=lambda name: (FORMATS[name].flush_edge if name in FORMATS else float("inf"), name))


def add_counts(parts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """Sum of mappings exponent -> count."""
    total: dict[int, int] = {}
    for part in parts:
        for exponent, count in part.items():
            total[exponent] = total.get(exponent, 0) + count
    return dict(sorted(total.items()))


def floor_exponent(format_name: str, scale: float | None) -> int:
    """Return the exponent up to which unscaled magnitudes may have been flushed by a format, at a loss scale.

    Of values that were rounded to the format before they could be counted. A scale that is not known counts as 1.
    """
    return math.ceil(math.log2(FORMATS[format_name].flush_edge) - math.log2(scale or 1.0))


def overflow_exponent(format_name: str, scale: float | None) -> int:
    """Return the least exponent, unscaled, of a magnitude that became infinite in a format. How large it was is not known."""
    return math.floor(FORMATS[format_name].max_exponent + 1 - math.log2(scale or 1.0))
