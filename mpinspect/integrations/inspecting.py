"""The base of every trainer's callback: attaches an Inspector to each training run and prints its report."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.at_exit import AtExit, print_report
from mpinspect.ranges.capture.broken_off import uncaught
from mpinspect.ranges.capture.optimizers import plain_optimizer
from mpinspect.ranges.capture.recording import warn
from mpinspect.ranges.inspector import Inspector
from mpinspect.ranges.session import Session

#: The value of ``log_dir`` that means ``mpinspect`` in the directory that the trainer writes to.
AUTO = "auto"


class InspectsTraining:
    """Attaches an Inspector to each training run of a trainer.

    Args:
        log_dir: directory of the session file and the TensorBoard log; "auto" is ``mpinspect`` in the directory that
            the trainer writes to; with None the record stays in memory. With several processes, each has a folder ``rank<n>``.
        print_report: whether the first process prints the report to stderr when training ends or fails.
        options: options of Inspector: every, capture, include, exclude, loss_scale, watch, max_overhead, tracker, curves.

    Raises:
        TypeError, ValueError: Inspector does not accept the options.
    """

    def __init__(self, *, log_dir: str | Path | None = AUTO, print_report: bool = True, **options: Any) -> None:
        # Absolute, since a trainer or its configuration (Hydra) may change the working directory before training begins.
        self._wanted_log_dir = log_dir if log_dir is None or log_dir == AUTO else Path(log_dir).absolute()
        self._print_report = print_report
        self._options = options
        #: The inspector of the last training run begun in this process.
        self.inspector: Inspector | None = None
        self._running = self._speaks = False
        self._at_exit: AtExit | None = None
        self._check(options)

    def session(self) -> Session:
        """Return the record of the last training run. Waits for the GPU if the run is still going on.

        Raises:
            RuntimeError: no training has begun in this process.
        """
        return self._inspector().session()

    def report(self) -> RangeReport:
        """Return the report on the last training run. Waits for the GPU if the run is still going on.

        Raises:
            RuntimeError: no training has begun in this process.
        """
        return self._inspector().report()

    def detach(self) -> None:
        """Stop inspecting (waits for the GPU), close the files and print the report. No effect outside of training."""
        if self._running:
            self._running = False
            if self._at_exit is not None:
                self._at_exit.call_off()
            try:
                self._inspector().detach()
                if self._speaks:
                    print_report(self.report)
            except Exception as error:
                warn(f"the inspector did not end as it should: {error!r}; its records until then are in its log_dir")

    def broke_off(self, error: BaseException | None) -> None:
        """Record the exception that is about to end the training; no effect outside of training."""
        if self._running:
            self._inspector().broke_off(error)

    # -- for the trainers' hooks -------------------------------------------------------------------------------------

    def _begin(
        self,
        model: torch.nn.Module,
        optimizers: Iterable[Any],
        scaler: Any,
        directory: str | Path | None,
        rank: int,
        processes: int,
    ) -> None:
        """Attach to a training run that begins, after detaching from any earlier one; turn failures into warnings."""
        self.detach()
        self.inspector = inspector = None
        try:
            inspector = Inspector(
                model,
                # A trainer may have other optimizers than torch's; the inspector then infers the steps.
                optimizers=[optimizer for optimizer in optimizers if plain_optimizer(optimizer) is not None],
                scalers=scaler,
                log_dir=self._log_dir(directory, rank, processes),
                **self._options,
            )
            inspector.attach()
        except Exception as error:
            warn(f"this training is not inspected, since the inspector could not be attached: {error!r}")
            if inspector is not None:
                with contextlib.suppress(Exception):
                    inspector.detach()
            return
        self.inspector = inspector
        self._running, self._speaks = True, self._print_report and rank == 0
        # Not every trainer calls its callbacks after an exception.
        self._at_exit = AtExit(functools.partial(_detach, weakref.ref(self)))

    def _log_dir(self, directory: str | Path | None, rank: int, processes: int) -> Path | None:
        wanted = self._wanted_log_dir
        if wanted == AUTO and directory is not None:
            wanted = Path(directory, "mpinspect")
        if wanted is None or wanted == AUTO:
            return None
        return Path(wanted, f"rank{rank}") if processes > 1 else Path(wanted)

    def _inspector(self) -> Inspector:
        if self.inspector is None:
            raise RuntimeError(
                "no training was inspected in this process: train first; if the trainer starts processes of its own, read "
                "their log_dir with mpinspect.Session.load"
            )
        return self.inspector

    @staticmethod
    def _check(options: dict[str, Any]) -> None:
        """Check the options now, rather than when training begins."""
        for name in ("model", "optimizers", "scalers"):
            if name in options:
                raise TypeError(f"{name} is not an option of a callback: the trainer knows it")
        patterns = {"include", "exclude"}
        Inspector(torch.nn.Linear(1, 1), **{name: value for name, value in options.items() if name not in patterns})

    def __getstate__(self) -> dict[str, Any]:
        # Trainers pickle their callbacks into the processes that they start.
        return {**self.__dict__, "inspector": None, "_running": False, "_at_exit": None}


def _detach(callback: weakref.ref[InspectsTraining]) -> None:
    """Detach a callback at the end of the process; weakly referenced, so that it and its model can be freed earlier."""
    alive = callback()
    if alive is not None:
        alive.broke_off(uncaught())
        alive.detach()
