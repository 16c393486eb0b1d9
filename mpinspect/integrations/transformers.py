"""A Transformers callback that inspects the model that the Trainer trains.

    trainer = transformers.Trainer(model, arguments, train_dataset=..., callbacks=[InspectorCallback()])

The class is created at the first access, so that this module can be imported without Transformers.
"""

from __future__ import annotations

from inspect import getdoc
from typing import Any

from mpinspect.integrations.inspecting import InspectsTraining


class TransformersHooks(InspectsTraining):
    """The hooks that Transformers' Trainer calls; ``InspectorCallback`` also derives from TrainerCallback.

    Attaches when training begins, to the model and the optimizer that Accelerate has prepared; the scaler, if there is one,
    is found when it scales the first loss. With log_dir="auto" it writes to ``mpinspect`` below ``args.output_dir``.

    After an exception the Trainer calls no callback, so the report is printed when the process ends. If the process
    continues, as in a notebook, call ``report()`` and ``detach()``; the next training run also detaches first.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach when the Trainer begins to train, with model and optimizer prepared."""
        optimizer = kwargs.get("optimizer")
        optimizers = [] if optimizer is None else [optimizer]
        self._begin(kwargs["model"], optimizers, None, args.output_dir, args.process_index, args.world_size)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach when the Trainer has trained."""
        self.detach()


def _callback_class() -> Any:
    try:
        from transformers import TrainerCallback
    except ImportError:
        raise ImportError("InspectorCallback needs Transformers: pip install mpinspect[transformers]") from None
    return TrainerCallback


def __getattr__(name: str) -> Any:
    if name != "InspectorCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    body = {"__module__": __name__, "__doc__": f"{getdoc(TransformersHooks)}\n\n{getdoc(InspectsTraining)}"}
    made = globals()[name] = type(name, (TransformersHooks, _callback_class()), body)
    return made
