"""Inspector: records the number ranges of a PyTorch model's tensors while the model trains."""

from __future__ import annotations

import difflib
import math
import platform
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch

from mpinspect.numeric.formats import FormatLike
from mpinspect.numeric.recipes import RECIPES, TrainingRecipe, as_recipes
from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.at_exit import AtExit, print_report
from mpinspect.ranges.capture import layers as model_layers
from mpinspect.ranges.capture.broken_off import is_failure, may_be_for_a_value, uncaught
from mpinspect.ranges.capture.budget import USUAL_LIMIT, check_max_overhead
from mpinspect.ranges.capture.capture import Capture
from mpinspect.ranges.capture.optimizers import plain_optimizer
from mpinspect.ranges.capture.recording import MpinspectWarning, Recording, warn
from mpinspect.ranges.capture.steps import Schedule
from mpinspect.ranges.faults.measure.second_steps import SecondSteps
from mpinspect.ranges.faults.observers import diagnosing_observers
from mpinspect.ranges.kinds import ACTIVATION, DEFAULT_KINDS, INFERENCE_KINDS, KINDS, UPDATE
from mpinspect.ranges.report.tensorboard_curves import MOST_CURVES, check_curves
from mpinspect.ranges.session import Event, RunInfo, Session
from mpinspect.ranges.store.sinks import open_sinks
from mpinspect.ranges.tracking import Tracking
from mpinspect.reporting.trackers import Tracker
from mpinspect.reporting.words import filled
from mpinspect.runtime.appending import timestamp
from mpinspect.runtime.device import devices_named
from mpinspect.runtime.distributed import rank_and_world
from mpinspect.runtime.finalizing import until_finalized
from mpinspect.runtime.guard import unseen
from mpinspect.runtime.wrappers import class_of

__all__ = ["Inspector", "MpinspectWarning"]


#: The first note in the session of an inspector that was never attached.
NEVER_ATTACHED = (
    "the inspector was never attached, so nothing was watched: train inside its block, 'with inspector:', or call "
    "inspector.attach() first"
)

_NEW = "not attached yet"
#: The default schedule for a model on a device.
_ON_DEVICES = Schedule(every=10, dense=10)


class Inspector:
    """Watches the number range of a model's gradients while it trains.

    Training is bit-identical to training without the inspector, and no error of the inspector reaches the training. The
    inspector holds no tensor or graph, except one copy of the weights during a sampled ``optimizer.step()`` if updates are
    captured. Training never waits for the GPU: counts are copied to the host asynchronously and read a step later::

        with mpinspect.Inspector(model, optimizers=optimizer, scalers=scaler) as inspector:
            train()
        print(inspector.report())

    Args:
        model: any torch.nn.Module. If the model or a part of it is wrapped (DistributedDataParallel, torch.compile,
            FSDP, activation checkpointing), names are still those of the unwrapped model. FSDP2 may be applied before or after
            attaching, as long as the optimizer is made after both.
        optimizers: one or several optimizers. Optional: optimizers of the model's parameters are found automatically. Pass
            optimizers of FP32 master copies, which can't be found. A trainer's wrapper (Accelerate's, Lightning's) is replaced
            by the optimizer inside.
        scalers: one or several loss scalers. Optional: every torch.amp.GradScaler that scales a loss is found
            automatically.
        every: sample every n-th step (the non-finite watch covers all steps), or a Schedule that selects the steps. By default
            every step if the model is on the CPU; if it is on a device, where counting is expensive, the first ten steps and
            then every tenth.
        capture: kinds to count: "weight_gradient", "activation_gradient", "activation", "weight", "update". "update" is
            added automatically if parameters are stored in FP16 or BF16.
        include, exclude: shell patterns over dotted paths of modules and parameters. Activations are captured for
            modules without submodules, and for containers that ``include`` names without wildcards.
        loss_scale: for loops that scale the loss by hand: the scale, or a callable that returns it at each backward. A power of
            two from 128 on by which the loop multiplies the loss last is found without it; with FP16 weights, any power of two
            and any factor from 1,024 on.
        log_dir: directory for the session file and the TensorBoard log; None stores everything in memory. If it holds another
            run, or several ranks pass the same one, the next free sibling name is used (``runs/a-2``), with a warning. A
            relative path is resolved now, before any change of the working directory. A script that ends without ``detach``
            writes its last steps at exit; a script that is killed loses only its last seconds.
        watch: check every step for infinities and NaNs. On a device, steps that are not sampled are checked block by block
            (``layers.outline``).
        max_overhead: maximum time of the inspector as a share of the training's own time: 0.02 for 2%. The cost (time
            in the inspector's hooks and, on a CUDA GPU, in its kernels) is measured during training, and steps are
            sampled as often as the budget allows, ``every`` being the smallest interval. If the watch alone exceeds the budget,
            it covers fewer steps; the report shows how many. None: ``every`` and ``watch`` apply, until the inspector of a
            single process has taken half of the training's own time and 20 s more; then a budget of one half begins, with a
            note. math.inf: at any cost.
        eager_samples: run the model's compiled regions (torch.compile) eagerly in the training forwards of sampled steps, so
            that activations and their gradients inside are seen. This changes results: an eager step rounds differently from a
            compiled one, draws other random numbers, and takes the time and memory of an uncompiled one. Use it with ``every``;
            the steps between stay compiled. If False, only weight gradients are seen inside compiled code.
        second: compute an early step, steps 30, 100, 1,000 and 10,000, up to eight after an infinite or NaN forward, and two
            with a validation or with writes to frozen weights, if these come regularly, a second time in FP32 (as
            ``second_opinion`` does; compiled code in its eager form), and follow the loss scale in uncompiled ones; or the
            numbers of the chosen steps, from 0. The training's own numbers stay. Such a step takes three to four times as long on
            a CPU, waits for the device, and copies its 16-bit tensors in FP32, up to 2 GiB of them; after 20 s the rest is left
            out. The first two, and those after an infinity or NaN, run in FP64 as well, up to 5 s in all, which takes eight times
            as long. ``max_overhead`` does not include it. Attach the inspector on the thread that trains, before anything is
            compiled.
            CUDA graphs, several ranks and tensors of other classes are left out, with a note, and so are loops without an
            optimizer of torch.
        tracker: logs a few scalars (``ranges/report/scalars.py``) every second or more, and the report's page at the end:
            "wandb", "mlflow" or "trackio", to the run that the script has open; or an object with the methods
            ``scalars(step, values)`` and ``artifact(path)``. If it fails, a note is recorded and the training continues.
        recipes: names of recipes of FP8 and FP4 ("mxfp8", "nvfp4"; ``numeric.recipes.RECIPES``). The report then has a table of
            the loss by each in every Linear layer's products, measured in the first, second, fourth, eighth, ... sampled step
            (``compare_recipes`` has the details). Such a step takes several times as long, and waits for the GPU.
        inference: each forward of the model is a step, since no backward follows: activations are counted (``capture``:
            "activation", "weight"), and ``second`` compares the outputs. mpinspect run recognises such scripts.
        curves: number of tensors of each kind that have scalars of their own in the TensorBoard log, those that lose most to
            flushing; None: all. Histograms and session hold every tensor.

    Raises:
        TypeError: model is not a Module, or optimizers, loss_scale, watch, max_overhead, eager_samples, second or tracker have
            the wrong type.
        ValueError: an unknown kind, tracker or recipe, ``every`` below 1, ``max_overhead`` neither between 0 and 1 nor inf, a
            ``loss_scale`` that is not positive and finite, ``curves`` below 0, or a step of ``second`` below 0.
        ImportError: the tracker's package is not installed.
    """

    #: Whether the inspector detaches by itself when the process ends.
    _ends_with_the_process = True
    #: Called after each write to ``log_dir``, on the thread that writes; must not raise.
    _written: Callable[[], None] | None = None

    @unseen
    def __init__(
        self,
        model: torch.nn.Module,
        *,
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        scalers: Any | Iterable[Any] | None = None,
        every: int | Schedule | None = None,
        capture: Iterable[str] = DEFAULT_KINDS,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        loss_scale: float | Callable[[], Any] | None = None,
        log_dir: str | Path | None = None,
        watch: bool = True,
        max_overhead: float | None = None,
        eager_samples: bool = False,
        second: bool | Iterable[int] = False,
        tracker: str | Tracker | None = None,
        recipes: str | Iterable[str] = (),
        curves: int | None = MOST_CURVES,
        inference: bool = False,
    ) -> None:
        _check(model, watch=watch, eager_samples=eager_samples, inference=inference)
        check_curves(curves)
        has_limit, max_overhead = max_overhead is None, _finite_share(max_overhead)
        if every is not None and not isinstance(every, Schedule):
            every = Schedule(every)
        self._scale_by_hand, self._eager_samples = _scale_by_hand(loss_scale), eager_samples
        selection = model_layers.Selection(include, exclude)
        found = model_layers.find_layers(model, selection)
        parameters = model_layers.find_parameters(model, selection)
        on_device = any(watched.parameter.device.type not in ("cpu", "meta") for watched in parameters)
        self._schedule = every or (_ON_DEVICES if on_device else Schedule())
        kinds = _kinds(capture, parameters, inference)
        self._recipes = _recipes(recipes, kinds)
        info = RunInfo(
            *(class_of(model).__name__, timestamp(), kinds, self._schedule.every, watch, _versions(), max_overhead),
            *(*rank_and_world(), selection.include or (), selection.exclude),
            devices_named(watched.parameter.device for watched in parameters),
            model_layers.numbered(found),
            inference,
        )
        # The ranks of a job sample the same steps.
        self._is_limited = has_limit and info.world_size == 1
        self._tracking = None if tracker is None else Tracking(tracker, self.bring_tracker_up_to_date)
        self.log_dir, sinks, troubles = open_sinks(log_dir, info, curves)
        if self._tracking is not None:
            sinks.append(self._tracking.sink)
        self._recording = Recording(
            info, sinks, tell=self._tell, announce=self._announce, before_write=self._find_run, written=self._written
        )
        self._recording.watch(model_layers.describe(found, parameters, kinds))
        self._capture = self._new_capture(found, parameters, _optimizers(optimizers), _several(scalers))
        self._second_steps = self._new_second_steps(model, second)
        self._at_exit: AtExit | None = None
        self._running = False
        #: Names of the weights that were non-finite when the run began, and the event for weights that are when it ended.
        self._broken_before: frozenset[str] = frozenset()
        self._left: Event | None = None
        for trouble in troubles + _misgivings(found, parameters, selection):
            self._recording.note(trouble)

    # -- attaching ----------------------------------------------------------------------------------------------

    def attach(self) -> Inspector:
        """Install the hooks, begin to record and return self. The inspector holds a reference to the model until ``detach``.

        Reads all weights once, as ``detach`` does, and therefore waits for the GPU.

        Raises:
            RuntimeError: the inspector is attached already or was detached (make a new Inspector for another run).
        """
        if self._state() != _NEW:
            raise RuntimeError(f"this inspector is {self._state()} already; make a new Inspector for another run")
        self._broken_before = self._capture.broken_weights() or frozenset()
        # Set before attaching, so that detach also cleans up after an attach that fails halfway.
        self._running = True
        self._find_run()
        self._capture.attach()
        if self._second_steps is not None:
            self._second_steps.attach()
        if self.log_dir is not None and self._ends_with_the_process:
            self._at_exit = AtExit(self._process_ends)
        return self

    def detach(self) -> None:
        """Remove all hooks, collect the remaining counts (waits for the GPU) and close the files. Idempotent."""
        if self._running:
            self._end()
            self._running = False
            if self._at_exit is not None:
                self._at_exit.call_off()

    def __enter__(self) -> Inspector:
        return self.attach()

    @until_finalized
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.broke_off(error)
        self.detach()
        if is_failure(error) or isinstance(error, KeyboardInterrupt):
            print_report(self.report)

    # -- reading ------------------------------------------------------------------------------------------------

    def session(self) -> Session:
        """Return everything recorded so far. While attached, waits for the GPU."""
        if self._capture.attached:
            self._capture.collect(wait=True)
        session = self._recording.session()
        if self._running or session.progress.ended:
            return session
        return replace(session, notes=(NEVER_ATTACHED, *session.notes))

    def report(self, format: FormatLike | None = None) -> RangeReport:
        """Return the report: verdict, findings, ranges by layer, suggested loss scale. While attached, waits for the GPU.

        Args:
            format: the format to judge the tensors against ("bfloat16", torch.float16, mpinspect.FLOAT8_E4M3, ...);
                None for the run's compute format, or FP16 if that is FP32 or unknown.

        Raises:
            ValueError: ``format`` is the name of no known format.
        """
        return analyse(self.session(), format)

    def __repr__(self) -> str:
        """Return the model's name, the state and the progress in one line; never waits for the GPU."""
        progress, where = self._recording.progress, filled(", writes to {}", self.log_dir)
        counts = f"{progress.steps} steps, {progress.sampled_steps} sampled"
        return f"<{type(self).__name__} of {self._recording.info.model}: {self._state()}, {counts}{where}>"

    # -- internal, and for subclasses ----------------------------------------------

    def _state(self) -> str:
        if self._capture.attached:
            return "attached"
        return "detached" if self._recording.progress.ended else _NEW

    def broke_off(self, error: BaseException | None) -> None:
        """Record the exception that is about to end the run, unless it is Ctrl-C or an exit with status 0."""
        if error is None or not is_failure(error) or not self._capture.attached:
            return
        has_loss = self._capture.search_variables(error)
        step = None if has_loss else self._capture.between_forward_and_backward()
        self._capture.broken_off(error)
        if step is not None and may_be_for_a_value(error):
            self._recording.note(
                f"{type(error).__name__} broke off step {step} after its forward, whose last output was finite, and before a "
                "backward: if a check of the loss raised it, the loss became infinite or NaN in the loss function, or in "
                "other code after the last module"
            )

    def _new_capture(
        self,
        layers: Iterable[model_layers.Layer],
        parameters: Iterable[model_layers.WatchedParameter],
        optimizers: Collection[torch.optim.Optimizer],
        scalers: Collection[Any] = (),
    ) -> Capture:
        """Return a capture of these layers and parameters with the inspector's settings, not yet attached."""
        info = self._recording.info
        return Capture(
            layers,
            parameters,
            kinds=info.kinds,
            schedule=self._schedule,
            watch=info.watch,
            loss_scale=self._scale_by_hand,
            optimizers=optimizers,
            scalers=scalers,
            recording=self._recording,
            max_overhead=info.max_overhead,
            limit=USUAL_LIMIT if self._is_limited else None,
            eager_samples=self._eager_samples,
            diagnosing=partial(diagnosing_observers, recipes=self._recipes),
            before_forward=self._before_forward if info.inference else None,
        )

    def _before_forward(self) -> None:
        """Begin or end a step that is computed twice: a forward of an inference follows another one."""
        if self._second_steps is not None:
            self._second_steps.step_may_have_ended()

    def _new_second_steps(self, model: torch.nn.Module, second: bool | Iterable[int]) -> SecondSteps | None:
        """Return the observer of the steps that are computed twice; None if there are none."""
        if second is False:
            return None
        steps = None if second is True else list(second)
        if any(isinstance(step, bool) or not isinstance(step, int) for step in steps or ()):
            raise TypeError(f"second={second!r}: give True, or the numbers of the steps to compute twice")
        if any(step < 0 for step in steps or ()):
            raise ValueError(f"second={second!r}: steps have numbers from 0 on")
        return SecondSteps(model, steps, self._capture.clock, self._recording, self._recording.info.inference)

    def _find_run(self) -> None:
        if self._tracking is not None:
            self._tracking.find_run()

    def _process_ends(self) -> None:
        self.broke_off(uncaught())
        self._end()

    def _end(self) -> None:
        """Detach the hooks and close the record; after an interruption (Ctrl-C), a second call skips the completed parts."""
        if self._second_steps is not None:
            self._second_steps.detach()
        if self._capture.attached:
            self._capture.search_variables()
            self._capture.detach()
            self._left = self._capture.weights_left(self._broken_before)
        if not self._recording.progress.ended:
            if self._left is not None:
                self._recording.event(self._left)
            self._recording.close()
            if self._tracking is not None:
                self._hand_over(self._tracking)
                self._tracking.leave()

    def bring_tracker_up_to_date(self) -> None:
        """Log the remaining scalars and the page, since the script is about to end the tracker's run before the inspection."""
        if self._tracking is None or self._recording.progress.ended:
            return
        try:
            if self._capture.attached:
                self._capture.collect(wait=True)
            self._recording.flush()
            self._tracking.sink.settle()
        except Exception as error:
            self._recording.note(f"the tracker lacks some scalars: {error!r}")
        self._hand_over(self._tracking)

    def _hand_over(self, tracking: Tracking) -> None:
        """Send the report's page to the tracker; note a failure."""
        for sentence in tracking.hand_over(self.report):
            self._recording.note(sentence)

    def _tell(self, note: str) -> None:
        """Warn the user of a new note on a missing measurement."""
        warn(note)

    def _announce(self, event: Event) -> None:
        """React to an event as soon as it is recorded; subclasses override this."""


def _check(model: object, **switches: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"Inspector needs a torch.nn.Module, not {type(model).__name__}")
    for name, switch in switches.items():
        if not isinstance(switch, bool):
            raise TypeError(f"{name}={switch!r}: give True or False")


def _finite_share(max_overhead: float | None) -> float | None:
    if max_overhead is None or math.isinf(share := check_max_overhead(max_overhead)):
        return None
    return share


def _scale_by_hand(loss_scale: Any) -> float | Callable[[], Any] | None:
    if loss_scale is None or callable(loss_scale):
        return cast(Callable[[], Any] | None, loss_scale)
    if isinstance(loss_scale, bool) or not isinstance(loss_scale, Real):
        raise TypeError(f"loss_scale={loss_scale!r}: give a number or a callable that returns one")
    if not 0 < float(loss_scale) < float("inf"):
        raise ValueError(f"loss_scale={loss_scale!r}: a loss scale is positive and finite")
    return float(loss_scale)


def _kinds(
    asked: Iterable[str], parameters: Iterable[model_layers.WatchedParameter], inference: bool
) -> tuple[str, ...]:
    wanted = {ACTIVATION} if inference and asked is DEFAULT_KINDS else set(model_layers.several(asked))
    unknown = sorted(wanted.difference(KINDS))
    if unknown:
        raise ValueError(f"capture names unknown kinds {unknown}; there are {', '.join(KINDS)}")
    if inference and wanted.difference(INFERENCE_KINDS):
        raise ValueError(f"capture={tuple(sorted(wanted))!r}: an inference has activations and weights alone")
    if not inference and model_layers.any_in_16_bits(parameters):
        wanted.add(UPDATE)
    return tuple(kind for kind in KINDS if kind in wanted)


def _recipes(given: str | Iterable[str], kinds: Collection[str]) -> tuple[TrainingRecipe, ...]:
    chosen = as_recipes(() if given is None else given)
    if chosen and not kinds:
        raise ValueError("recipes are measured in sampled steps, and capture=() samples none: capture a kind")
    if any(RECIPES.get(recipe.name) != recipe for recipe in chosen):
        raise TypeError(f"recipes={given!r}: give names, such as 'mxfp8' (compare_recipes takes recipes of your own)")
    return chosen


def _optimizers(given: object) -> list[torch.optim.Optimizer]:
    several = []
    for optimizer in _several(given):
        plain = plain_optimizer(optimizer)
        if plain is None:
            raise TypeError(f"optimizers must be torch.optim.Optimizer objects, not {type(optimizer).__name__}")
        several.append(plain)
    return several


def _several(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple, set, frozenset)) else [given]


def _misgivings(
    layers: list[model_layers.Layer], parameters: list[model_layers.WatchedParameter], selection: model_layers.Selection
) -> list[str]:
    """Return warnings about the arguments, as sentences: no trainable parameters, or patterns without a match."""
    sentences = []
    if not parameters:
        sentences.append("the model has no parameters: there are no weight gradients to see")
    elif not any(watched.parameter.requires_grad for watched in parameters):
        sentences.append("every parameter is frozen (requires_grad is False): no weight gradient will be seen")
    for pattern in selection.unmatched():
        sentences.append(
            f"the pattern {pattern!r} matches no module or parameter; patterns go over dotted paths as in "
            f"model.named_modules() and model.named_parameters(){_nearest(pattern, layers, parameters)}"
        )
    return sentences


def _nearest(pattern: str, layers: list[model_layers.Layer], parameters: list[model_layers.WatchedParameter]) -> str:
    """Return a clause that suggests up to 3 matching patterns, preferably similar ones, or ""."""
    names = [layer.path if layer.is_leaf else f"{layer.path}.*" for layer in layers if layer.path]
    names = [name for name in (*names, *(watched.name for watched in parameters)) if name != pattern]
    nearest = difflib.get_close_matches(pattern, names, n=3) or names[:3]
    return filled("; in this model for example {}", ", ".join(map(repr, nearest)))


def _versions() -> dict[str, str]:
    from mpinspect.runtime.version import __version__

    return {"mpinspect": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
