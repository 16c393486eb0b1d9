"""The compiled code of a captured model: its eager calls in sampled steps, and the tensors inside that no hook saw."""

from __future__ import annotations

from collections.abc import Iterable

from mpinspect.ranges.capture.compiled_regions import Ask, EagerCalls, not_seen_inside, unseen_regions
from mpinspect.ranges.capture.layers import Layer
from mpinspect.ranges.capture.model_hooks import ModelHooks
from mpinspect.ranges.capture.recording import Recording
from mpinspect.ranges.capture.steps import StepClock
from mpinspect.ranges.session import is_below
from mpinspect.runtime.compiled_graphs import compiled_graphs
from mpinspect.runtime.guard import Guarded, guarded


class CompiledCode(Guarded):
    """Reroutes the compiled code of one model if sampled steps are to run eagerly; records and notes the unseen tensors inside.

    Args:
        layers: the model's modules.
        ask: returns whether a compiled region that is about to be called runs eagerly; None if regions never do.
        clock: the run's step clock.
        hooks: the capture's hooks.
        recording: receives the paths and the notes.
    """

    def __init__(
        self, layers: Iterable[Layer], ask: Ask | None, clock: StepClock, hooks: ModelHooks, recording: Recording
    ) -> None:
        super().__init__(recording.note)
        self._layers = list(layers)
        self._clock, self._hooks, self._recording = clock, hooks, recording
        self._eager_calls = None if ask is None else EagerCalls(self._layers, ask)
        #: Paths of the modules with observed calls.
        self.called: set[str] = set()
        #: Whether any region ran eagerly in this step.
        self.ran_eagerly = False
        #: How many graphs had been compiled when the model was last searched for compiled modules.
        self._known_graphs = 0

    def attach(self) -> None:
        """Record that sampled steps are to run eagerly, if that was requested."""
        if self._eager_calls is not None:
            self._recording.ran_eagerly(0)

    def remove(self) -> None:
        """Put the compiled functions back."""
        if self._eager_calls is not None:
            self._eager_calls.remove()

    def begin_step(self, sampled: bool) -> None:
        """Reroute the regions compiled since the last sampled step, if this one is sampled."""
        self.ran_eagerly = False
        if sampled and self._eager_calls is not None:
            self.attempt("find compiled", self._eager_calls.reroute)

    @guarded
    def step_ended(self, sampled: bool) -> None:
        """Record whether a sampled step ran eagerly, and the modules that were compiled in the step; the next one has begun."""
        if sampled and self.ran_eagerly:
            self._recording.ran_eagerly()
        graphs = compiled_graphs()
        # The inspector may have been attached in the middle of the first step, after its forward.
        if graphs != self._known_graphs and self._clock.step > 1 and self._trained_with_hooks:
            self._known_graphs = graphs
            self._record(search=False)

    @guarded
    def note_unseen(self) -> None:
        """Note the unseen tensors inside compiled code, and why sampled steps that were to run eagerly did not."""
        if not self._trained_with_hooks:
            return
        if compiled_graphs():
            self._record(search=True)
        elif not self.called:
            self._recording.note(
                "gradients arrived without any observed call of a module, so only weight gradients were counted and watched: "
                "hooks run when modules are called, but not in compiled or scripted code, or code that uses only the parameters"
            )
        progress = self._recording.progress
        if progress.eager_steps is None:
            if progress.compiled:
                self._recording.note(not_seen_inside(progress.compiled))
        elif progress.compiled and progress.eager_steps < progress.sampled_steps:
            self._recording.note(
                f"{progress.sampled_steps - progress.eager_steps} of {progress.sampled_steps} sampled steps did not run "
                "eagerly, and inside their compiled code only weight gradients were counted: it was compiled after the inspector "
                "was attached (its first step), is a function that calls the model (compile the model itself), was called "
                "under activation checkpointing or in other compiled code, or a stance of torch.compiler was set"
            )

    @property
    def _trained_with_hooks(self) -> bool:
        """Whether a backward reached the model while its modules had hooks."""
        return bool(self._clock.backwards) and self._hooks.any_on_modules

    def _record(self, search: bool) -> None:
        """Record the compiled modules inside which no hook ran.

        A module with observed calls inside was called uncompiled and is left out, unless regions run eagerly.
        """
        paths = unseen_regions(self._layers, search=search) if self.called else [""]
        if self._eager_calls is None:
            paths = [path for path in paths if not any(is_below(called, path) for called in self.called)]
        self._recording.compiled(paths)
