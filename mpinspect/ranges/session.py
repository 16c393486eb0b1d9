"""Frozen records of a run, the only interface between capture and analysis.

Capture fills a session; analysis and reports read it; neither imports the other. Everything here is plain data without
torch. Counts are of *unscaled* values (divided by the loss scale of their backward).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, NamedTuple

from mpinspect.numeric.blocks import QuantizationLoss
from mpinspect.numeric.recipes import Products, is_grouped, least_even
from mpinspect.ranges.kinds import KINDS
from mpinspect.ranges.windows.tensors import Count, Kind, TensorInfo, TensorKey, TensorWindow, add_counts
from mpinspect.ranges.windows.window import Window, merge_windows
from mpinspect.reporting.words import class_beside
from mpinspect.runtime.decoding import Between, OneOf

if TYPE_CHECKING:
    from os import PathLike
    from pathlib import Path

#: Values of ``Event.what`` in addition to KINDS: the loss before and after a scaler multiplied it.
LOSSES = ("loss", "scaled_loss")
#: The first word of a note on a tensor that needs no gradient.
FROZEN = "frozen"
#: Name of the measurement of training inside torch's ``Join``, where ranks with fewer batches take fewer steps.
UNEVEN_INPUTS = "uneven-inputs"
#: Names of the measurements of unobserved calls: of modules in a forward, of a closure in an optimizer's step.
CALLS_LEFT_OUT, CLOSURES_LEFT_OUT = "calls-left-out", "closures-left-out"
#: The note on activation gradients that no weight needs.
NEEDS_NO_GRADIENT = f"{FROZEN}: nothing in it or before it needs a gradient"
#: The phase of an event found only when the run ended, not in any step.
END = "end"
#: Name of the measurement of an exception that ended the run (``capture/broken_off.py``). Its ``names`` hold one of these
#: phases.
ENDED_BY = "ended-by-exception"
IN_FORWARD, AFTER_FORWARD, IN_BACKWARD, AFTER_BACKWARD = "forward", "after-forward", "backward", "after-backward"
IN_OPTIMIZER, BETWEEN_STEPS = "optimizer", "between-steps"

#: Values of ``Event.story``.
TAKEN, SKIPPED, DROPPED, UNKNOWN = "taken", "skipped", "dropped", ""

#: Traces of a conversion to a narrow format: torchao's converter was called, or one of its configurations exists.
CONVERTER_CALLED, CONFIGURED = "convert_to_float8_training", "config"

Seconds = Annotated[float, Between(-1e18, 1e18)]
#: A loss scale; infinite if a scaler has grown it beyond its dtype.
Scale = Annotated[float, Between(0.0, math.inf)]

#: Gradients that overflow at this loss scale overflow at any: even sums over millions of losses need none so low.
LOWEST_USEFUL_SCALE = 2.0**-8


@dataclass(frozen=True)
class Event:
    """The first tensor of a step, in execution order, that turned infinite or NaN.

    Args:
        step, micro_batch: counted from 0.
        phase: "forward" or "backward"; "end" for weights found non-finite when the run ended, without an event in any
            step.
        module: dotted path of the module that made the value, as far as the observed tensors show ("": the model itself).
        what: the kind of the first tensor seen with the value, or one of LOSSES.
        tensor: name of that tensor (a module's or a parameter's dotted path).
        value: "inf" or "nan" (NaN if both).
        loss_scale: the loss scale of the step's backward; None if unknown or not yet known (forward).
        last_maxima: largest finite magnitudes of the same tensor in the last steps that read it (on a GPU, mostly sampled
            steps), at most 8, oldest first.
        skipped: whether these gradients were discarded without an update; None if unknown. ``story`` is more precise.
        forward_finite: whether every output seen in the step's forward was finite; None if not watched.
        gradients_finite: whether every gradient seen in the step was finite, so that a non-finite forward (a mask,
            perhaps) did no harm; None if no gradient was seen.
        explanation: a sentence on the evidence that the value arose in ``module``.
        after: whether the value arose in the forward code after ``module`` (the loss, or a function between modules),
            so that the gradient arriving at the module's output was already non-finite.
        given: whether the value was already in the model's input.
        of_input: whether it was first seen in the gradient of an input of ``tensor``, not of its output.
        elsewhere: whether other ranks' values enter the tensor, so that the value may have arisen on another rank.
        rank: the rank that saw it; None in a session of one process.
        dropped: whether the loop cleared these gradients by itself, without a scaler.
        aside: whether these gradients belong to another model's loss, like the gradients that a generator's loss leaves in the
            discriminator: another model's optimizer stepped after that backward, and this model's did not use them.
        dtype: the dtype of that tensor ("float16"); "" if not known.
        module_type: class name of the module; "" if not known.
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
    given: bool = False
    of_input: bool = False
    elsewhere: bool = False
    rank: Count | None = None
    dropped: bool = False
    aside: bool = False
    dtype: str = ""
    module_type: str = ""

    @property
    def story(self) -> str:
        """The fate of the step's gradients: TAKEN, SKIPPED (by a scaler), DROPPED (by the loop) or UNKNOWN."""
        if self.skipped and self.dropped:
            return DROPPED
        return {None: UNKNOWN, False: TAKEN, True: SKIPPED}[self.skipped]

    @property
    def broken_phase(self) -> str:
        """The phase that was not finite at any loss scale: "forward", "backward", or "" if the loss scale may be the cause."""
        if self.forward_finite is False:
            return "forward"
        may_be_scale = self.loss_scale is None or self.loss_scale > LOWEST_USEFUL_SCALE
        return "" if may_be_scale or self.phase != "backward" or self.aside else "backward"

    @property
    def place(self) -> str:
        """Where the value arose, in words: a module's quoted path, "the loss", "the model itself" or "the model's input"."""
        if self.given:
            return "the model's input"
        place = "the model itself"
        if self.module:
            place = module_named(self.module, self.module_type)
        elif self.what in LOSSES:
            place = "the loss"
        return f"the code after {place}" if self.after else place

    @property
    def quantity(self) -> str:
        """The tensor with the value, in words: "the weight gradient of 'fc.weight'", "the loss"."""
        quantity = f"the {self.what.replace('_', ' ')}"
        if self.what in LOSSES:
            return quantity
        return f"{quantity} of {module_named(self.tensor)}"


#: Maximum number of rows of a batch that a measurement names.
MOST_ROWS = 8


@dataclass(frozen=True)
class Measurement:
    """A measurement of a run beyond the histograms; rules (``faults/name``) turn it into findings.

    Most kinds have a class of their own in ``records``.

    Args:
        what: name of the measurement, set by the observer that makes it ("gradients-handed-over").
        name: dotted path of the module or parameter; "" for the whole model.
        step: counted from 0.
        figures: numbers by name; they may be non-finite.
        names: further dotted paths.
        text: a few words that the diagnosis quotes: a dtype, an operator, a class name.
        rank: the rank that made it; None in a session of one process.
        sources: the text of each line of the user's code among ``names`` and ``text``, as far as it could be read.
    """

    what: str
    name: str = ""
    step: Count = 0
    figures: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    names: tuple[str, ...] = ()
    text: str = ""
    rank: Count | None = None
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerRecord:
    """An optimizer of the model, with its state at one of its steps.

    Args:
        type: class name.
        settings: settings of the first parameter group by name: "lr", "weight_decay", "eps", "momentum", "beta1",
            "beta2".
        steps: number of elements that the optimizer updates, by dtype.
        states: dtypes of the per-element state by name ("exp_avg_sq"), several as "float16, float32"; empty before the
            optimizer's first step.
        masters: number of updated elements that are not in the model (FP32 masters of a loop that copies them back).
        draws_random: whether each of its steps draws random numbers, as stochastic rounding does.
        compensation: name of the state that holds the rounding errors of 16-bit weights (Kahan summation); "" without one.
    """

    type: str
    settings: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    steps: Mapping[str, Count] = field(default_factory=lambda: MappingProxyType({}))
    states: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    masters: Count = 0
    draws_random: bool = False
    compensation: str = ""

    def dtypes(self, *states: str) -> list[str]:
        """Return the dtypes of these states, of all states without an argument."""
        held = (dtypes for name, dtypes in self.states.items() if not states or name in states)
        return list(dict.fromkeys(dtype for dtypes in held for dtype in dtypes.split(", ")))


@dataclass(frozen=True)
class ScalerRecord:
    """A gradient scaler that multiplied a loss of the model.

    Args:
        type: class name.
        enabled: whether the scaler is enabled.
        init_scale: the loss scale at the scaler's first use; None if unknown.
        growth_interval: growth interval in steps; None if the scaler has none.
        growth_factor, backoff_factor: the scale's multipliers when it grows and after an overflow; None if unknown.
        device: the type of device that it was made for ("cuda"); "" if unknown.
    """

    type: str
    enabled: bool = True
    init_scale: Scale | None = None
    growth_interval: float | None = None
    growth_factor: float | None = None
    backoff_factor: float | None = None
    device: str = ""


@dataclass(frozen=True)
class LayersRecord:
    """Layers with matrix products that are alike: of one class and size, in the same formats.

    Args:
        modules: their dotted paths, in the model's order.
        type: class name.
        shape: input and output features; empty if unknown.
        products: the quantised operands of their products.
        library: the library whose kernels compute them, "torchao" or "transformer_engine"; "" for torch's own products.
        emulated: whether they are computed in a wide format from rounded operands.
        is_head: whether they share their weight with an embedding, or make the model's output.
        without_bias: whether their biases got no gradient in a step in which their weights did.
    """

    modules: tuple[str, ...]
    type: str
    shape: tuple[Count, ...] = ()
    products: Products = field(default_factory=Products)
    library: str = ""
    emulated: bool = False
    is_head: bool = False
    without_bias: bool = False


@dataclass(frozen=True)
class OperandRecord:
    """The loss of an operand of a module's product under a recipe of FP8 or FP4, over the steps that measured it.

    Args:
        module: dotted path.
        recipe: its name (``numeric.recipes.RECIPES``).
        product: "fprop", "dgrad" or "wgrad".
        tensor: "input", "weight" or "gradient".
        shape: input and output features of the module.
        loss: the sums over these steps.
        steps: number of these steps.
        is_linear: whether the module is a torch.nn.Linear, which torchao and TransformerEngine convert.
        is_experts: whether ``module`` is a parameter with a matrix for each expert, and the loss is that of all.
        tokens: the number that wgrad summed over, of several the one with the fewest factors of two (``least_even``); 0 if
            unknown, or if there is no wgrad.
        function: name of the torch function that multiplied experts, if possible one that is not grouped; "" if unknown.
    """

    module: str
    recipe: str
    product: str
    tensor: str
    shape: tuple[Count, Count]
    loss: QuantizationLoss = field(default_factory=QuantizationLoss)
    steps: Count = 1
    is_linear: bool = True
    is_experts: bool = False
    tokens: Count = 0
    function: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.module, self.recipe, self.product, self.tensor

    def __add__(self, other: OperandRecord) -> OperandRecord:
        return replace(
            self,
            loss=self.loss + other.loss,
            steps=self.steps + other.steps,
            tokens=least_even(self.tokens, other.tokens),
            function=min(self.function, other.function, key=is_grouped),
        )


def added_operands(one: Iterable[OperandRecord], other: Iterable[OperandRecord]) -> tuple[OperandRecord, ...]:
    """Return the operands of both; those of both are added."""
    found = {record.key: record for record in one}
    for record in other:
        found[record.key] = found[record.key] + record if record.key in found else record
    return tuple(found.values())


@dataclass(frozen=True)
class Precision:
    """The precision ledger of a run: the dtypes of its storage and computation, by torch's names ("bfloat16").

    Args:
        weights: number of parameter elements by dtype.
        gradients: number of elements of the gradients passed to the optimizers, by dtype; empty if they were not seen.
        autocast: autocast dtypes of the modules' training forwards; "" if leaf modules ran outside of autocast.
        outputs: dtypes of the floating-point outputs of modules in training forwards.
        losses: dtypes of the losses whose backwards were seen.
        optimizers, scalers: the optimizers and loss scalers seen.
        reduced: dtypes of the sums of the ranks' gradients; empty if unknown, or without a process group.
        unseen: dtypes of the values in the losses' graphs, read if some modules' calls were not seen (compiled code); "" for
            values that could not be read. Empty if no graph was read.
        layers: the layers with matrix products and how each product is quantised; empty if they were not recorded.
        asked: the traces of a conversion by torchao (CONVERTER_CALLED, CONFIGURED) in a run that converted no layer.
        operands: the losses by the recipes asked for, by operand.
    """

    weights: Mapping[str, Count] = field(default_factory=lambda: MappingProxyType({}))
    gradients: Mapping[str, Count] = field(default_factory=lambda: MappingProxyType({}))
    autocast: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    optimizers: tuple[OptimizerRecord, ...] = ()
    scalers: tuple[ScalerRecord, ...] = ()
    reduced: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    layers: tuple[LayersRecord, ...] = ()
    asked: tuple[str, ...] = ()
    operands: tuple[OperandRecord, ...] = ()

    @property
    def has_masters(self) -> bool:
        """Whether an optimizer steps copies of the model's weights."""
        return any(optimizer.masters for optimizer in self.optimizers)


class ScaleChange(NamedTuple):
    """The loss scale from a given step on (1.0: no scaling; None: unknown)."""

    step: Count
    scale: Scale | None


@dataclass(frozen=True)
class RunInfo:
    """The settings and versions of a run, fixed from its start.

    ``rank`` of ``world_size`` processes wrote it; a single process is rank 0 of 1. ``include`` and ``exclude`` are the user's
    patterns of names to watch; empty by default. ``devices`` names the devices of the parameters; "" if unknown (arrays, older
    files). ``numbered``: by path, the classes of the modules whose path ends in a number and whose outputs are not counted.
    ``inference``: each step is a forward, since no backward follows.
    """

    model: str = ""
    started: str = ""
    kinds: tuple[Kind, ...] = ()
    every: Count = 1
    watch: bool = True
    versions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    max_overhead: Annotated[float, Between(0.0, math.inf)] | None = None
    rank: Count = 0
    world_size: Count = 1
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    devices: str = ""
    numbered: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    inference: bool = False


@dataclass(frozen=True)
class Progress:
    """The progress of a run.

    ``scale_known`` is False once a backward ran with an unknown loss scale; ``scale_unknown_reason`` is a sentence on the
    cause. ``weights_moved``: whether an optimizer stepped or the weights changed otherwise; None if unknown. With a budget,
    ``watched_steps`` is the number of steps that the watch checked (None: all steps); over ``measured_steps`` steps the
    inspector took ``own_s`` seconds and the training itself ``bare_s`` seconds. ``compiled`` are the paths of the modules that
    torch.compile compiled, where no hook ran ("": the whole model). With ``eager_samples``, ``eager_steps`` is the number of
    sampled steps that ran compiled code eagerly (None: not requested). ``elapsed_s`` is the time from the start of the record to
    the end of the last step, in seconds; 0 if unknown.
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
    compiled: tuple[str, ...] = ()
    eager_steps: Count | None = None
    #: No two runs take the same time, so that it does not count in comparisons.
    elapsed_s: Seconds = field(default=0.0, compare=False)

    @property
    def so_far(self) -> str:
        """Words after a figure of a run that has not ended; else ""."""
        return "" if self.ended else " so far"

    def scale_at(self, step: int) -> float | None:
        """Return the loss scale recorded for a step; None if it is unknown or not yet recorded."""
        return next((change.scale for change in reversed(self.scales) if change.step <= step), None)

    def scale_spans(self) -> Iterator[tuple[float | None, int, int]]:
        """Yield each loss scale with the first step that has it and the first step after it; the last holds to the run's end."""
        for place, change in enumerate(self.scales, start=1):
            end = self.scales[place].step if place < len(self.scales) else max(self.steps, change.step + 1)
            yield change.scale, change.step, end

    def hides(self, module: str) -> bool:
        """Return whether a module is inside compiled code, where no hook ran, by its dotted path."""
        return any(module == path or is_below(module, path) for path in self.compiled)

    @property
    def overhead(self) -> float | None:
        """The inspector's measured time divided by the bare training's (0.02 means 2%); None if not measured."""
        return self.own_s / self.bare_s if self.bare_s > 0 else None


def module_named(module: str, module_type: str = "") -> str:
    """Return a module's dotted path in quotes; "the model" for the model itself.

    A path that ends in a number, of a Sequential's child, says little: its class follows, if it is given: "'2' (ReLU)".
    """
    return repr(module) + class_beside(module, module_type) if module else "the model"


#: A name in quotes (no apostrophe), and the start of a bracket behind it.
_QUOTED = re.compile(r"(?<!\w)('[^'\s]+')( \()?")


def containers(module: str) -> list[str]:
    """Return the dotted paths of the modules around a module, innermost first; "", the model itself, is the last."""
    if not module:
        return []
    parts = module.split(".")[:-1]
    return [".".join(parts[:length]) for length in range(len(parts), -1, -1)]


def is_below(path: str, module: str) -> bool:
    """Return whether a dotted path lies inside a module's ("": the whole model)."""
    return path != module and (not module or path.startswith(f"{module}."))


@dataclass(frozen=True)
class RankRecord:
    """One of the ranks whose counts a merged session adds up.

    Args:
        info, progress: the rank's own.
        events: number of events that it saw.
        tensors: number of tensors that it watched.
    """

    info: RunInfo = RunInfo()
    progress: Progress = Progress()
    events: Count = 0
    tensors: Count = 0


@dataclass(frozen=True)
class Session:
    """The record of a run: tensors watched, counts and events. Pure data; safe to store, merge, send and read anywhere.

    ``notes`` are sentences on missing measurements and the reasons. ``precision`` is empty if the run has no ledger (arrays,
    older files). ``ranks`` are the merged ranks (``analysis/ranks.py``), in order; empty for one process.
    """

    info: RunInfo = RunInfo()
    watched: tuple[TensorInfo, ...] = ()
    windows: tuple[Window, ...] = ()
    events: tuple[Event, ...] = ()
    notes: tuple[str, ...] = ()
    progress: Progress = Progress()
    precision: Precision = Precision()
    measurements: tuple[Measurement, ...] = ()
    ranks: tuple[RankRecord, ...] = ()

    def __repr__(self) -> str:
        """Return a one-line summary, as the fields hold every count of a run."""
        progress, model = self.progress, self.info.model or "a model"
        return f"<Session of {model}: {progress.steps} steps, {progress.sampled_steps} sampled, {len(self.watched)} tensors>"

    @property
    def ended_by(self) -> Measurement | None:
        """The first recorded exception that ended the run (on any rank); None without one."""
        return next((each for each in self.measurements if each.what == ENDED_BY), None)

    @cached_property
    def _classes(self) -> dict[str, str]:
        """The words that follow a module's quoted path that ends in a number: " (ReLU)"."""
        types = {**self.info.numbered, **{info.module: info.module_type for info in self.watched}}
        found = ((repr(path), class_beside(path, type)) for path, type in types.items())
        return {path: shown for path, shown in found if shown}

    def class_beside(self, module: str) -> str:
        """Return the words that follow a module's path, without quotes: " (ReLU)" if it ends in a number, else ""."""
        return self._classes.get(repr(module), "")

    def with_classes(self, text: str) -> str:
        """Return a text with the class of each quoted module whose path ends in a number."""

        def classed(found: re.Match[str]) -> str:
            shown = self._classes.get(found[1], "")
            if not shown or text.startswith(shown[:-1], found.end(1)):
                return found[0]
            return found[1] + (f"{shown[:-1]}, " if found[2] else shown)

        return _QUOTED.sub(classed, text)

    def source_of(self, line: str) -> str:
        """Return the text of a line of the user's code that a measurement names; "" if it is not known."""
        return next((each.sources[line] for each in self.measurements if line in each.sources), "")

    def scale_history(self) -> tuple[ScaleChange, ...]:
        """Return the changes of the loss scale by step, recorded at sampled steps or seen in events between them.

        A scaler lowers its scale in the step that it skips: a lower scale that was recorded later began after that step.
        """
        known = {change.step for change in self.progress.scales}
        told = [
            ScaleChange(event.step, event.loss_scale)
            for event in self.events
            if event.loss_scale is not None and event.step not in known
        ]
        found: list[ScaleChange] = []
        for change in sorted((*self.progress.scales, *told), key=lambda change: change.step):
            if not found:
                found.append(change)
            elif change.scale != found[-1].scale:
                found.append(ScaleChange(self._began(change, found[-1]), change.scale))
        return tuple(found)

    def _began(self, change: ScaleChange, before: ScaleChange) -> int:
        """Return the step in which a change of the loss scale began that was recorded in a later step."""
        if not before.scale or not change.scale or change.scale > before.scale:
            return change.step
        skips = (
            event.step + 1
            for event in self.events
            if event.story == SKIPPED and before.step <= event.step < change.step and event.loss_scale == before.scale
        )
        return max(skips, default=change.step)

    @property
    def last_scale(self) -> float | None:
        """The run's last loss scale; None if unknown, for example after a skipped step, which has lowered it."""
        history = self.scale_history()
        if not history:
            return None
        return None if self._skips_at(history[-1]) else history[-1].scale

    def _skips_at(self, last: ScaleChange) -> set[int]:
        """Return the steps that were skipped at the last known loss scale; after each a scaler lowers it."""
        return {
            event.step
            for event in self.events
            if event.skipped and event.step >= last.step and event.loss_scale == last.scale
        }

    def last_fall(self) -> ScaleChange | None:
        """Return the fall after a skipped step that no later step recorded, by the scaler's factor; None if it is not known."""
        *_, last = (None, *self.scale_history())
        factors = {scaler.backoff_factor for scaler in self.precision.scalers if scaler.enabled}
        if last is None or not last.scale or len(factors) != 1:
            return None
        (skip, *others), (factor,) = sorted(self._skips_at(last)) or (None,), factors
        # If several steps were skipped at this scale, the scaler does not lower it at each one.
        if skip is None or others or factor is None:
            return None
        return ScaleChange(skip + 1, last.scale * factor)

    def totals(self) -> dict[TensorKey, TensorWindow]:
        """Return each tensor's counts merged over the whole run, in the order of ``watched``."""
        if not self.windows:
            return {}
        merged = merge_windows(*self.windows).tensors
        order = dict.fromkeys([*(info.key for info in self.watched), *merged])
        return {key: merged[key] for key in order if key in merged}

    def passed_through(self, keys: Collection[TensorKey] | None = None) -> set[str]:
        """Return the formats that these tensors' values (None: all tensors') were rounded to before counting, in any window."""
        chosen = None if keys is None else frozenset(keys)
        return {name for window in self.windows for name in window.columns().passed_through(chosen)}

    def gradient_peaks(self) -> dict[int, int]:
        """Return the peak exponent over all gradients of a step -> number of sampled steps, over the whole run."""
        return add_counts(window.gradient_peaks for window in self.windows)

    def reached(self) -> Progress:
        """Return the run's progress; for a run that has not ended, raised to the last step found in any window or event.

        If a process is killed between writing a window and writing its progress, the window reaches further.
        """
        if self.progress.ended:
            return self.progress
        lasts = [window.last_step for window in self.windows] + [event.step for event in self.events]
        sampled = sum(window.sampled_steps for window in self.windows)
        return replace(
            self.progress,
            steps=max([self.progress.steps, *(last + 1 for last in lasts)]),
            sampled_steps=max(self.progress.sampled_steps, sampled),
        )

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Session:
        """Read a run: ``path`` is a run directory (the inspector's ``log_dir``) or a session file. Needs no torch.

        Works during the run and after it was killed; ``notes`` names the parts that can't be read.

        Raises:
            SessionError: there is no session, the file is not a session file, or a newer mpinspect wrote it.
        """
        from mpinspect.ranges.store import read_session

        return read_session(path)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the whole session to a file and return its path; in a directory the file gets the name that ``load`` expects.

        Raises:
            SessionError: the file exists already, or it can't be written.
        """
        from mpinspect.ranges.store import save_session

        return save_session(self, path)
