"""What listens for a capture without keeping it alive: who drops a model that is still inspected gets its memory back."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from mpinspect.capture import optimizer_steps, pickling
from mpinspect.capture import scalers as scaler_watch

if TYPE_CHECKING:
    from mpinspect.capture.capture import Capture


class WeakListener:
    """Passes on what torch's optimizers and scalers do, as long as there is anybody to pass it on to."""

    def __init__(self, capture: Capture) -> None:
        self._capture = weakref.ref(capture)
        self._end = weakref.finalize(capture, self._leave)
        # The interpreter's end takes the hooks along, and who writes then is not to find them gone.
        self._end.atexit = False

    def listen(self, modules: Iterable[torch.nn.Module]) -> None:
        """Begin; and leave our hooks out of what is pickled of these modules."""
        pickling.leave_hooks_out(self, modules)
        optimizer_steps.listen(self)
        scaler_watch.listen(self)

    def stop(self) -> None:
        """Listen no more. Twice does nothing."""
        self._end()

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        capture = self._capture()
        if capture is not None:
            capture.optimizer_steps(optimizer)

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        capture = self._capture()
        if capture is not None:
            capture.optimizer_stepped(optimizer)

    def loss_scaled(self, scaler: Any, given: Any, scaled: Any) -> None:
        capture = self._capture()
        if capture is not None:
            capture.loss_scaled(scaler, given, scaled)

    def scaler_steps(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        capture = self._capture()
        if capture is not None:
            capture.scaler_steps(scaler, optimizer)

    def scaler_stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        capture = self._capture()
        if capture is not None:
            capture.scaler_stepped(scaler, optimizer)

    def _leave(self) -> None:
        scaler_watch.unlisten(self)
        optimizer_steps.unlisten(self)
        pickling.stop(self)
