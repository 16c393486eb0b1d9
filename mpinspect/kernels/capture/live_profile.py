"""Record one step of a running script with torch.profiler: start between two steps, then write the second step.

Each module's forward gets a range, as in profiling.py, but with hooks on the single modules: a compiled model warns about
torch's global hooks.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mpinspect.kernels.capture import profiling
from mpinspect.runtime.hooks import HandleList
from mpinspect.runtime.torch_calls import PROFILER_MADE


def obstacle() -> str:
    """Return why no profile can start now; "" if one can."""
    if torch.autograd.profiler._is_profiler_enabled:
        return "the script profiles itself, and torch records for one at a time. Give its trace to mpinspect kernels"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "the step is captured into a CUDA graph"
    return ""


class LiveProfile:
    """Profile two steps and write the second one: the first contains the profiler's own start-up.

    Args:
        models: the models by name; if there are several, module paths begin with the model's name.
        path: the trace to write (.json.gz); its directory is created.
        unhookable: ids of compiled modules, which get no range: removing a hook would recompile them.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module], path: Path, *, unhookable: Collection[int] = ()) -> None:
        self.path = path
        self._models = models
        self._unhookable = frozenset(unhookable)
        self._handles = HandleList()
        self._thread = threading.get_ident()
        self._open: list[Any] = []
        self._profiler: Any = None
        self._yielded = False
        self._steps = 0
        self._names_modules = True

    def begin(self) -> None:
        """Start the profiler. Waits for the GPU.

        Raises:
            OSError: the trace's directory cannot be created.
            RuntimeError: torch's profiler cannot start.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _quietly():
            profiling.wait_for_gpu()
            self._profiler = profiling.two_step_profiler()
            self._profiler.start()
        PROFILER_MADE.listen(self._yield_profiler)

    def next_step(self) -> bool:
        """End a step; return whether it was the step to record. Waits for the GPU."""
        self._steps += 1
        if self._profiler is None or self._steps == 2:
            return True
        with _quietly():
            profiling.wait_for_gpu()
            self._profiler.step()
        if self._names_modules:
            self._hook()
        return False

    def end(self, stopped: str = "") -> str:
        """Stop and write the trace; return why there is no trace, or "" if there is one. Waits for the GPU.

        Args:
            stopped: why the step was interrupted; "" if it was not.
        """
        profiler = self._stop()
        if self._yielded:
            return "the script began to profile itself meanwhile, and torch records for one at a time"
        if stopped or profiler is None:
            return stopped or "the profiler did not start"
        try:
            profiler.export_chrome_trace(str(self.path))
        except Exception as error:
            return f"it could not be written to {self.path}: {error}"
        return ""

    def leave_modules(self) -> None:
        """Remove the hooks because a compilation is about to start; no further modules of this step get a range."""
        self._names_modules = False
        self._handles.remove_all()

    def abandon(self) -> None:
        """Drop the profiler in a forked child process, where it belongs to the parent."""
        self._unhook()
        self._profiler = None

    def _stop(self) -> Any:
        self._unhook()
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            with _quietly():
                profiling.wait_for_gpu()
                profiler.stop()
        return profiler

    def _yield_profiler(self) -> None:
        """Stop before the script's own profiler starts, which would otherwise fail."""
        self._yielded = True
        self._stop()

    def _hook(self) -> None:
        for path, module in self._paths():
            if id(module) not in self._unhookable:
                self._handles.add_around(module, functools.partial(self._enter, path), self._leave)

    def _unhook(self) -> None:
        self._handles.remove_all()
        while self._open:
            self._open.pop().__exit__(None, None, None)
        PROFILER_MADE.unlisten(self._yield_profiler)

    def _paths(self) -> list[tuple[str, torch.nn.Module]]:
        paths = []
        for name, model in self._models.items():
            prefix = [name] if len(self._models) > 1 else []
            for path, module in model.named_modules():
                paths.append((".".join(prefix + profiling.plain_parts(model, path)), module))
        return paths

    def _enter(self, path: str, args: Any) -> None:
        if threading.get_ident() == self._thread:
            self._open.append(profiling.opened_range(path))

    def _leave(self, args: Any, output: Any = None) -> None:
        if threading.get_ident() == self._thread and self._open:
            self._open.pop().__exit__(None, None, None)


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress the profiler's warnings, since the script may have turned warnings into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
