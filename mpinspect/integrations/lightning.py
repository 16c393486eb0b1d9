"""A Lightning callback that inspects the model that the Trainer fits.

    trainer = lightning.Trainer(callbacks=[InspectorCallback()])

Works with the packages ``lightning`` and ``pytorch_lightning``. The class is created at the first access, so that this
module can be imported without either.
"""

from __future__ import annotations

import contextlib
import sys
from importlib import import_module
from inspect import getdoc
from typing import Any

from mpinspect.integrations.inspecting import InspectsTraining


class LightningHooks(InspectsTraining):
    """The hooks that Lightning's Trainer calls; ``InspectorCallback`` also derives from Lightning's Callback.

    Attaches when training begins, after the strategy's set-up and the sanity check, to the LightningModule and the
    Trainer's optimizers and scaler. With log_dir="auto" it writes to ``mpinspect`` below the logger's directory; without a
    logger the record stays in memory.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach when the Trainer begins to fit."""
        # Reading log_dir is a broadcast, so either all processes must read it or no process.
        directory = trainer.log_dir if trainer.loggers else None
        self._begin(pl_module, trainer.optimizers, trainer.scaler, directory, trainer.global_rank, trainer.world_size)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach when the Trainer has fitted."""
        self.detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Record the exception that has ended the training, and detach."""
        self.broke_off(exception)
        self.detach()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Detach, if no other hook has done so."""
        self.detach()


def _callback_class() -> Any:
    """Return Lightning's Callback, from the package that is already imported if one of the two is."""
    packages = ["lightning.pytorch", "pytorch_lightning"]
    packages.sort(key=lambda package: package not in sys.modules)
    for package in packages:
        with contextlib.suppress(ImportError):
            return import_module(package).Callback
    raise ImportError("InspectorCallback needs Lightning: pip install mpinspect[lightning]")


def __getattr__(name: str) -> Any:
    if name != "InspectorCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    body = {"__module__": __name__, "__doc__": f"{getdoc(LightningHooks)}\n\n{getdoc(InspectsTraining)}"}
    made = globals()[name] = type(name, (LightningHooks, _callback_class()), body)
    return made
