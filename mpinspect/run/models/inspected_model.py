"""One model that is, or was, inspected."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection

import torch

from mpinspect.run.models.inspector import LaunchedInspector
from mpinspect.run.models.naming import Label
from mpinspect.run.models.owners import parameter_ids
from mpinspect.run.seen import RecordedModel


class InspectedModel:
    """One model: its inspector, and the optimizers that step it, weakly."""

    def __init__(self, name: str, label: Label, inspector: LaunchedInspector) -> None:
        self.name = name
        self.label = label
        self.inspector = inspector
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self.had_optimizers = False

    def join(self, optimizer: torch.optim.Optimizer, gone: Callable[[object], None]) -> None:
        """This optimizer steps the model too; ``gone`` is called when it dies."""
        self.had_optimizers = True
        if all(known() is not optimizer for known in self.optimizers):
            self.optimizers.append(weakref.ref(optimizer, gone))

    def is_stepped_by(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Whether this optimizer steps it; with None: whether none ever did."""
        if optimizer is None:
            return not self.had_optimizers
        return any(known() is optimizer for known in self.optimizers)

    @property
    def living_optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that the script still has."""
        self.optimizers = [known for known in self.optimizers if known() is not None]
        return [optimizer for known in self.optimizers if (optimizer := known()) is not None]

    def holds(self, parameters: Collection[int]) -> bool:
        """Whether all of these parameters, by id, are the model's."""
        model = self.inspector.model
        return model is not None and frozenset(parameters) <= frozenset(parameter_ids(model))

    def record(self) -> RecordedModel:
        """What was recorded so far."""
        log_dir = self.inspector.log_dir
        return RecordedModel(self.name, self.inspector.session(), None if log_dir is None else str(log_dir))
