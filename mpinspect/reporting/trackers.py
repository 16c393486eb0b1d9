"""Experiment trackers: one small protocol, and W&B, MLflow and Trackio behind it.

Each of the three logs to a run that the user's script has begun, and does not change the run's count of steps. A tracker that
numbers rows by the calls of ``log`` gets our values in the script's last row, with the training step in ``mpinspect/step``.
The packages are never imported from here: a script that has begun a run has imported its package.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

#: The first part of every name in a tracker, so that its page shows them as a group.
GROUP = "mpinspect"
STEP, REPORT = f"{GROUP}/step", f"{GROUP}/report"
#: Most rows that wait for the script's first own row; beyond, every other one is dropped.
_MOST_WAITING = 1000


@runtime_checkable
class Tracker(Protocol):
    """Receives an inspector's scalars and pages; an Exception leaves a note and ends the logging.

    Called by different threads, but never concurrently.
    """

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log finite numbers by name for a training step, counted from 0; steps ascend."""

    def artifact(self, path: Path) -> None:
        """Copy a file, a page in HTML; it may be deleted after the call."""


class _BesideRows(ABC):
    """A tracker that numbers rows by the calls of ``log``: our values join the script's rows, whose numbers stay unchanged.

    Our rows wait until the script has logged its first row, which may have any number and must be the first.
    """

    def __init__(self) -> None:
        self._waiting: list[dict[str, float]] = []

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._waiting.append({STEP: step, **values})
        if self._script_has_logged():
            while self._waiting:
                self._log_beside(self._waiting.pop(0))
        elif len(self._waiting) > _MOST_WAITING:
            del self._waiting[1::2]

    def release(self) -> None:
        """Log the waiting rows as separate rows, since the script has stopped logging."""
        while self._waiting:
            self._log_apart(self._waiting.pop(0))

    @abstractmethod
    def _script_has_logged(self) -> bool: ...

    @abstractmethod
    def _log_beside(self, row: dict[str, Any]) -> None: ...

    @abstractmethod
    def _log_apart(self, row: dict[str, float]) -> None: ...


class WandbRun(_BesideRows):
    """A run of W&B. Its rows must ascend in steps, so that one more row could make it drop the script's next.

    Between two of the script's rows the newest of ours stays. Charts show ours over ``mpinspect/step``.

    Args:
        run: as ``wandb.init`` returned it.
    """

    def __init__(self, run: Any) -> None:
        super().__init__()
        self._run = run
        run.define_metric(STEP, hidden=True)
        run.define_metric(f"{GROUP}/*", step_metric=STEP)

    def before_end(self, call: Callable[[], None]) -> None:
        """Register ``call``, which must not raise, to run when the script itself finishes the run."""
        module = sys.modules[type(self._run).__module__]
        self._run._teardown_hooks.append(module.TeardownHook(call, module.TeardownStage.EARLY))

    def artifact(self, path: Path) -> None:
        # Injecting a style sheet would break the page's content security policy.
        with path.open(encoding="utf-8") as file:
            self._log_beside({REPORT: sys.modules["wandb"].Html(file, inject=False)})

    def _script_has_logged(self) -> bool:
        return bool(self._run.step > 0) or bool(self._run.resumed)

    def _log_beside(self, row: dict[str, Any]) -> None:
        self._run.log(row, commit=False)

    def _log_apart(self, row: dict[str, float]) -> None:
        self._run.log(row)


class MlflowRun:
    """A run of MLflow, which numbers each metric by itself and accepts rows after its end, too.

    Args:
        run: as ``mlflow.start_run`` returned it.
    """

    def __init__(self, run: Any) -> None:
        mlflow = sys.modules["mlflow"]
        self._id = run.info.run_id
        # A client, since the functions of the module log to the calling thread's run.
        self._client = mlflow.MlflowClient()
        self._metric = mlflow.entities.Metric

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [self._metric(name, value, now, step) for name, value in values.items()])

    def artifact(self, path: Path) -> None:
        self._client.log_artifact(self._id, str(path), GROUP)

    def release(self) -> None:
        """Has no effect, since no rows wait."""


class TrackioRun(_BesideRows):
    """A run of Trackio. A row with a step moves the script's count of rows up to it.

    Args:
        run: as ``trackio.init`` returned it.
    """

    def __init__(self, run: Any) -> None:
        super().__init__()
        self._run = run

    def artifact(self, path: Path) -> None:
        self.release()
        self._log_beside({REPORT: sys.modules["trackio"].Html(path, inject=False)})

    def _script_has_logged(self) -> bool:
        return int(self._run._next_step) > 0

    def _log_beside(self, row: dict[str, Any]) -> None:
        self._run.log(row, step=max(int(self._run._next_step) - 1, 0))

    def _log_apart(self, row: dict[str, float]) -> None:
        self._run.log(row, step=int(row[STEP]))


class Package(NamedTuple):
    """A tracker's package.

    Args:
        title: its name in sentences.
        begin: how a script begins a run.
        open: returns the run that the calling thread would log to, or None; its argument is the imported package.
        log_to: makes a Tracker of such a run.
    """

    title: str
    begin: str
    open: Callable[[Any], Any]
    log_to: Callable[[Any], WandbRun | MlflowRun | TrackioRun]


#: By the name under which a package is imported, which is also our extra's.
PACKAGES = {
    "wandb": Package("W&B", "wandb.init()", lambda wandb: wandb.run, WandbRun),
    "mlflow": Package("MLflow", "mlflow.start_run()", lambda mlflow: mlflow.active_run(), MlflowRun),
    "trackio": Package("Trackio", "trackio.init()", lambda trackio: trackio.context_vars.current_run.get(), TrackioRun),
}


def check_name(name: str) -> str:
    """Return the name of a tracker that is installed, without importing its package.

    Raises:
        ValueError: there is no such tracker.
        ImportError: its package is not installed.
    """
    if name not in PACKAGES:
        raise ValueError(
            f"tracker={name!r}: there are {', '.join(PACKAGES)} (in Python also objects with scalars and artifact)"
        )
    # A folder ./wandb, as W&B makes it, is found as a package without an origin.
    if name not in sys.modules and getattr(find_spec(name), "origin", None) is None:
        raise ImportError(f"tracker={name!r} needs {PACKAGES[name].title}: pip install mpinspect[{name}]")
    return name
