"""The options of a launch, and this process's rank in a job: plain data that can be passed to a spawned process."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import PurePath

#: Largest world size that is believed; a larger one in a file indicates damage.
MOST_RANKS = 1 << 20
#: Most characters that are shown of a program given as an argument.
_LONGEST_CODE = 60


@dataclass(frozen=True)
class LaunchOptions:
    """The script to run, and how to inspect it.

    Args:
        target: the script's path, a directory or zip file with a ``__main__.py``, or "-" for stdin; a module's name if
            ``is_module``, the program itself if ``is_code``.
        is_module: whether ``target`` is a module, as after ``python -m``.
        is_code: whether ``target`` is the program, as after ``python -c``.
        arguments: the script's arguments.
        log_dir: the run directory; None: a new one below ``runs``.
        kinds: kinds of tensors to count, from ``ranges.kinds.KINDS``; None: the Inspector's default.
        include, exclude: shell patterns for dotted paths; None includes everything or excludes nothing.
        every: sample every n-th step, 1 or more; with ``max_overhead`` the smallest interval.
        dense: number of initial steps that are all sampled, 0 or more; ignored with ``max_overhead``.
        steps: stop inspecting a model after this many of its steps; None: never.
        lint: record the matrix products of one step; None: record them if possible, and skip them silently if not.
        kernels: profile one step.
        gpu: the GPU that shapes and kernels are judged for; None: this machine's GPU.
        watch: check every step for infinities and NaNs.
        loss_scale: the factor by which the script itself scales its loss; None: read the scale of its scaler, if any.
        max_overhead: limit on the inspection's time relative to the script's own, 0..1; inf: no limit, use ``every``; None: no
            limit until the inspection of a tiny model has taken long.
        eager_samples: run compiled models uncompiled in sampled steps.
        tracker: the tracker whose open run gets scalars and the page: "wandb", "mlflow" or "trackio"; None for no tracker.
        curves: number of tensors of each kind with scalars of their own in the TensorBoard log; None: all.
        fail_on: findings, by id or severity, that turn an exit status of 0 into 1.
        full: print the whole report at the end, not the verdict alone.
        recipes: the recipes of FP8 and FP4 to measure, by name (``numeric.recipes.RECIPES``).
    """

    target: str
    is_module: bool = False
    is_code: bool = False
    arguments: tuple[str, ...] = ()
    log_dir: str | None = None
    kinds: tuple[str, ...] | None = None
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] | None = None
    every: int = 10
    dense: int = 10
    steps: int | None = None
    lint: bool | None = None
    kernels: bool = False
    gpu: str | None = None
    watch: bool = True
    loss_scale: float | None = None
    max_overhead: float | None = None
    eager_samples: bool = False
    tracker: str | None = None
    curves: int | None = 20
    fail_on: tuple[str, ...] = ()
    full: bool = False
    recipes: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command line of the script, quoted for a shell; code given as an argument is shortened."""
        if self.is_module:
            return shlex.join(["-m", self.target, *self.arguments])
        if not self.is_code:
            return shlex.join([self.target, *self.arguments])
        code = " ".join(self.target.split())
        if len(code) > _LONGEST_CODE:
            code = f"{code[:_LONGEST_CODE]}..."
        return shlex.join(["-c", code, *self.arguments])

    @property
    def stem(self) -> str:
        """A short name for directories: ``train`` for train.py, ``package.train`` for -m package.train, ``code`` for -c."""
        if self.is_code:
            return "code"
        if self.is_module:
            return self.target.lstrip(".") or "script"
        if self.target == "-":
            return "stdin"
        return PurePath(self.target).stem.lstrip(".") or "script"


@dataclass(frozen=True)
class Rank:
    """This process's place in a distributed job.

    Args:
        number: 0 .. of - 1.
        of: the number of processes; 1 if there is no job.
        job: identifies the job and the elastic launcher's attempt, the same in all its processes; "" without a job.
        here: number of processes that the launcher started on this machine; None if unknown.
    """

    number: int = 0
    of: int = 1
    job: str = ""
    here: int | None = None

    @property
    def folder(self) -> str:
        """The name of this rank's folder in the job's directory; "" if there is no job."""
        return f"rank{self.number}" if self.of > 1 else ""

    @classmethod
    def of_environment(cls) -> Rank:
        """Return the rank given by RANK and WORLD_SIZE, which torchrun and similar launchers set for the script."""
        try:
            number, of = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        except (KeyError, ValueError):
            return cls()
        if not (0 <= number < of and 2 <= of <= MOST_RANKS):
            return cls()
        names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
        here = os.environ.get("LOCAL_WORLD_SIZE", "")
        job = " ".join(os.environ.get(name, "") for name in names)
        return cls(number, of, job, int(here) if here.isdecimal() else None)
