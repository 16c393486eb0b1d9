"""What a launch was asked for: plain data that a spawned process can be handed."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import PurePath


@dataclass(frozen=True)
class LaunchOptions:
    """A script and how it is to be watched.

    Args:
        target: the script's path, or a directory or zip file with a ``__main__.py``; a module's name if ``is_module``.
        is_module: whether target is a module, as after ``python -m``.
        arguments: what follows it: the script's own.
        log_dir: the run directory; None: a new one below ``runs``.
        kinds: of tensors to count, of ``ranges.kinds.KINDS``; None: the Inspector's default.
        include, exclude: shell patterns over dotted paths; None: everything, nothing.
        every: sample every n-th step, 1 or more; with ``max_overhead`` the least interval.
        dense: so many first steps are all sampled, 0 or more; without ``max_overhead``.
        steps: stop looking at a model after so many of its steps; None: never.
        lint: record the matrix products of one step.
        kernels: profile one step.
        gpu: which GPU shapes and kernels are judged for; None: the one at hand.
        watch: look at every step for infinities and NaNs.
        loss_scale: of a script that multiplies its loss by hand; None: its scaler tells, if it has one.
        max_overhead: most that inspecting may cost over the script's own time, 0..1; None: as ``every`` says, whatever it costs.
        fail_on: findings, by id or severity, that make an exit status of 0 a 1.
    """

    target: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    log_dir: str | None = None
    kinds: tuple[str, ...] | None = None
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] | None = None
    every: int = 10
    dense: int = 10
    steps: int | None = None
    lint: bool = False
    kernels: bool = False
    gpu: str | None = None
    watch: bool = True
    loss_scale: float | None = None
    max_overhead: float | None = None
    fail_on: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The script and its arguments as a shell would take them."""
        return shlex.join([*(["-m"] if self.is_module else []), self.target, *self.arguments])

    @property
    def stem(self) -> str:
        """A short name of the script, for a directory: ``train`` of train.py, ``package.train`` of -m package.train."""
        name = self.target if self.is_module else PurePath(self.target).stem
        return name.lstrip(".") or "script"
