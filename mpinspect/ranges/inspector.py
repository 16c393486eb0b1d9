"""Inspector: the object that a user attaches to a model."""

from __future__ import annotations

import difflib
import platform
from collections.abc import Callable, Iterable
from dataclasses import replace
from numbers import Real
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import Any, cast

import torch

from mpinspect.numeric.formats import FormatLike
from mpinspect.ranges.analysis import analyse
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.at_exit import AtExit, print_report
from mpinspect.ranges.capture import layers as model_layers
from mpinspect.ranges.capture.budget import check_max_overhead
from mpinspect.ranges.capture.capture import Capture
from mpinspect.ranges.capture.optimizers import plain_optimizer
from mpinspect.ranges.capture.recording import MpinspectWarning, Recording, warn
from mpinspect.ranges.capture.steps import Schedule
from mpinspect.ranges.kinds import DEFAULT_KINDS, KINDS, UPDATE
from mpinspect.ranges.session import Event, RunInfo, Session, now
from mpinspect.ranges.store.sinks import open_sinks
from mpinspect.runtime.wrappers import unwrapped

__all__ = ["Inspector", "MpinspectWarning"]


#: The first note of an inspector that was asked before it was attached.
NEVER_ATTACHED = (
    "the inspector was never attached, so nothing was watched: train inside its block, 'with inspector:', or call "
    "inspector.attach() first"
)


class Inspector:
    """Watches the number range of a model's gradients while it trains.

    Training is bit-identical to training without it; no tensor and no graph is kept (but for one copy of the weights
    during a sampled ``optimizer.step()`` where updates are captured); no fault of its own reaches the training. On a
    GPU nothing waits: counts travel to the host asynchronously and are looked at a step later.

        with mpinspect.Inspector(model, optimizers=optimizer, scalers=scaler) as inspector:
            train()
        print(inspector.report())

    Args:
        model: any torch.nn.Module. Names are those of the model itself, whether it is given bare or wrapped
            (DistributedDataParallel, torch.compile, FSDP, activation checkpointing; parts of it too).
        optimizers: one or several. Optional: those that step any of the model's parameters are found. Give the ones
            that step FP32 master copies, which can't be found; of a trainer's wrapper (Accelerate's, Lightning's) the one
            inside is taken.
        scalers: one or several loss scalers. Optional: every torch.amp.GradScaler that scales a loss is found.
        every: sample every n-th step (the non-finite watch looks at all of them), or a Schedule that says which.
        capture: kinds to count: "weight_gradient", "activation_gradient", "activation", "weight", "update". The
            last is added by itself where parameters are stored in FP16 or BF16.
        include, exclude: shell patterns over dotted paths of modules and parameters. Activations are those of modules
            without submodules, and of containers that ``include`` names without wildcards.
        loss_scale: for loops that scale the loss by hand: the scale, or a callable that returns it at each backward.
        log_dir: directory for the session file and the TensorBoard log; None keeps everything in memory. If it holds
            another run, the next free name beside it is taken (``runs/a-2``), with a warning. A script that ends without
            ``detach`` writes its last steps then; one that is killed leaves all but its last seconds.
        watch: look at every step for infinities and NaNs.
        max_overhead: most that inspecting may cost, over the training's own time: 0.02 for 2%. The cost is measured as the
            training runs (the time inside of the inspector's hooks, on a CUDA GPU its kernels' too), and steps are sampled as
            often as that allows, ``every`` being the least interval; where the watch alone costs more, it looks at fewer
            steps. The report says at how many. None: ``every`` and ``watch`` hold, whatever they cost.

    Raises:
        TypeError: model is no Module; optimizers, loss_scale or max_overhead are of the wrong type.
        ValueError: an unknown kind, ``every`` below 1, or ``max_overhead`` not between 0 and 1.
    """

    #: Whether the end of a process that never detached it ends its run.
    _ends_with_the_process = True

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        scalers: Any | Iterable[Any] | None = None,
        every: int | Schedule = 1,
        capture: Iterable[str] = DEFAULT_KINDS,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        loss_scale: float | Callable[[], Any] | None = None,
        log_dir: str | Path | None = None,
        watch: bool = True,
        max_overhead: float | None = None,
    ) -> None:
        if max_overhead is not None:
            max_overhead = check_max_overhead(max_overhead)
        schedule = every if isinstance(every, Schedule) else Schedule(every)
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"Inspector needs a torch.nn.Module, not {type(model).__name__}")
        scale_by_hand = _scale_by_hand(loss_scale)
        selection = model_layers.Selection(include, exclude)
        found = model_layers.find_layers(model, selection)
        parameters = model_layers.find_parameters(model, selection)
        kinds = _kinds(capture, parameters)
        info = RunInfo(type(unwrapped(model)).__name__, now(), kinds, schedule.every, watch, _versions(), max_overhead)
        self.log_dir, sinks, troubles = open_sinks(log_dir, info)
        self._recording = Recording(info, sinks, tell=self._tell, announce=self._announce)
        self._recording.watch(model_layers.describe(found, parameters, kinds))
        self._capture = Capture(
            found,
            parameters,
            kinds=kinds,
            schedule=schedule,
            watch=watch,
            loss_scale=scale_by_hand,
            optimizers=_optimizers(optimizers),
            scalers=_several(scalers),
            recording=self._recording,
            max_overhead=max_overhead,
        )
        self._at_exit: AtExit | None = None
        self._running = False
        #: Weights that were not finite when the run began; and what tells of those that were not when it ended.
        self._broken_before: frozenset[str] = frozenset()
        self._left: Event | None = None
        for trouble in troubles + _misgivings(found, parameters, selection):
            self._recording.note(trouble)

    # -- attaching ----------------------------------------------------------------------------------------------

    def attach(self) -> Inspector:
        """Put the hooks on and begin to record. Returns self. Until ``detach`` the model is held, whoever else drops it.

        Reads all weights once, as ``detach`` does, and so waits for the GPU.

        Raises:
            RuntimeError: attached already, or detached before (make a new Inspector for another run).
        """
        if self._capture.attached or self._recording.progress.ended:
            state = "attached already" if self._capture.attached else "was detached: its record is closed"
            raise RuntimeError(f"this inspector {state}; make a new Inspector for another run")
        self._broken_before = self._capture.broken_weights() or frozenset()
        # First: what fails in the middle of attaching is taken off by detach.
        self._running = True
        self._capture.attach()
        if self.log_dir is not None and self._ends_with_the_process:
            self._at_exit = AtExit(self._end)
        return self

    def detach(self) -> None:
        """Take every hook off, take in what is on its way (waits for the GPU) and close the files. Twice does nothing."""
        if self._running:
            self._end()
            self._running = False
            if self._at_exit is not None:
                self._at_exit.call_off()

    def __enter__(self) -> Inspector:
        return self.attach()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not _went_well(error):
            self.broke_off(error)
        self.detach()
        if kind is not None and not _went_well(error):
            print_report(self.report)

    # -- reading ------------------------------------------------------------------------------------------------

    def session(self) -> Session:
        """Everything recorded so far. While attached it waits for the GPU."""
        if self._capture.attached:
            self._capture.collect(wait=True)
        session = self._recording.session()
        if self._running or session.progress.ended:
            return session
        return replace(session, notes=(NEVER_ATTACHED, *session.notes))

    def report(self, format: FormatLike | None = None) -> RangeReport:
        """What the counts say: verdict, findings, ranges by layer, the suggested loss scale. While attached it waits for the GPU.

        Args:
            format: judged against it ("bfloat16", torch.float16, mpinspect.FLOAT8_E4M3, ...); None for what the run computes in.

        Raises:
            ValueError: ``format`` names none that is known.
        """
        return analyse(self.session(), format)

    def __repr__(self) -> str:
        """Return what it inspects and how far it is, in one line; never waits for the GPU."""
        progress = self._recording.progress
        state = "attached" if self._capture.attached else "detached" if progress.ended else "not attached yet"
        where = "" if self.log_dir is None else f", writes to {self.log_dir}"
        counts = f"{progress.steps} steps, {progress.sampled_steps} sampled"
        return f"<{type(self).__name__} of {self._recording.info.model}: {state}, {counts}{where}>"

    # -- inside, and for those who make an inspector of their own ----------------------------------------------

    def broke_off(self, error: BaseException | None) -> None:
        """An exception ends the run: a note says so where it may have been for the loss, which nobody sees."""
        if error is None or isinstance(error, KeyboardInterrupt) or _in_a_module(error):
            return
        step = self._capture.between_forward_and_backward()
        if step is not None:
            self._recording.note(
                f"{type(error).__name__} broke off step {step} after its forward, whose last output was finite, and before a "
                "backward: if it was for the loss, that became infinite or NaN in the loss function, or in other code after "
                "the last module"
            )

    def _end(self) -> None:
        """Detach and close; what was broken off in there, by Ctrl-C, is left out at the second try."""
        if self._capture.attached:
            self._capture.detach()
            self._left = self._capture.weights_left(self._broken_before)
        if not self._recording.progress.ended:
            if self._left is not None:
                self._recording.event(self._left)
            self._recording.close()

    def _tell(self, note: str) -> None:
        """A note is made: what can't be measured, and why."""
        warn(note)

    def _announce(self, event: Event) -> None:
        """Something turned infinite or NaN, just now."""


def _in_a_module(error: BaseException) -> bool:
    """Return whether it was raised in the call of a module, which then never returned."""
    calls = (torch.nn.Module._call_impl.__code__, torch.nn.Module._wrapped_call_impl.__code__)
    return any(frame.f_code in calls for frame, _ in walk_tb(error.__traceback__))


def _scale_by_hand(loss_scale: Any) -> float | Callable[[], Any] | None:
    if loss_scale is None or callable(loss_scale):
        return cast(Callable[[], Any] | None, loss_scale)
    if isinstance(loss_scale, bool) or not isinstance(loss_scale, Real):
        raise TypeError(f"loss_scale={loss_scale!r}: give a number or a callable that returns one")
    if not 0 < float(loss_scale) < float("inf"):
        raise ValueError(f"loss_scale={loss_scale!r}: a loss scale is positive and finite")
    return float(loss_scale)


def _kinds(asked: Iterable[str], parameters: Iterable[model_layers.WatchedParameter]) -> tuple[str, ...]:
    wanted = {asked} if isinstance(asked, str) else set(asked)
    unknown = sorted(wanted.difference(KINDS))
    if unknown:
        raise ValueError(f"capture names unknown kinds {unknown}; there are {', '.join(KINDS)}")
    if any(watched.parameter.dtype in (torch.float16, torch.bfloat16) for watched in parameters):
        wanted.add(UPDATE)
    return tuple(kind for kind in KINDS if kind in wanted)


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
    layers: list[model_layers.Layer],
    parameters: list[model_layers.WatchedParameter],
    selection: model_layers.Selection,
) -> list[str]:
    """Return what is odd about the request, in sentences."""
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
    """Patterns that would match something, those like this one first; a clause, "" where there is none."""
    names = [layer.path if layer.is_leaf else f"{layer.path}.*" for layer in layers if layer.path]
    names = [name for name in (*names, *(watched.name for watched in parameters)) if name != pattern]
    nearest = difflib.get_close_matches(pattern, names, n=3) or names[:3]
    return f"; in this model for example {', '.join(map(repr, nearest))}" if nearest else ""


def _went_well(error: BaseException | None) -> bool:
    return isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0))


def _versions() -> dict[str, str]:
    from mpinspect.runtime.version import __version__

    return {"mpinspect": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
