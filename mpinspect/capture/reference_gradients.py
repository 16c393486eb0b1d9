"""Counting every gradient of plain backwards: no scaler, no autocast, no optimizer; one step a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from mpinspect.capture.hooks import HandleList, ModelHook
from mpinspect.capture.layers import Selection, describe, find_layers, find_parameters
from mpinspect.capture.outputs import tensors_in
from mpinspect.counting import count_exponents
from mpinspect.exponents import ExponentHistogram, merge
from mpinspect.session import (
    ACTIVATION_GRADIENT,
    WEIGHT_GRADIENT,
    Progress,
    RunInfo,
    Session,
    TensorKey,
    TensorWindow,
    Window,
    add_counts,
)

_KINDS = (WEIGHT_GRADIENT, ACTIVATION_GRADIENT)


class ReferenceCounts:
    """Histograms of the weight and activation gradients of a model, collected backward by backward."""

    def __init__(self, model: torch.nn.Module) -> None:
        everything = Selection(None, None)
        self._layers = find_layers(model, everything)
        self._watched = tuple(describe(self._layers, find_parameters(model, everything), _KINDS))
        self._step: dict[TensorKey, list[ExponentHistogram]] = {}
        self._windows: list[Window] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block, count the gradient of every output of every leaf module. Waits for the device at each."""
        self._step = {}
        handles = HandleList()
        try:
            for layer in self._layers:
                if layer.counted:
                    react = self._awaits_gradient(TensorKey(layer.path, ACTIVATION_GRADIENT))
                    handles.add(layer.module.register_forward_hook(ModelHook(layer.module, react)))
            yield
        finally:
            handles.remove_all()

    def end_step(self, weight_gradients: Mapping[str, torch.Tensor]) -> None:
        """Count these too, by parameter name, and close the step."""
        for name, gradient in weight_gradients.items():
            self._step.setdefault(TensorKey(name, WEIGHT_GRADIENT), []).append(count_exponents(gradient))
        tensors = {key: _window(histograms) for key, histograms in self._step.items()}
        highest = [max(window.peaks) for window in tensors.values() if window.peaks]
        peaks = {max(highest): 1} if highest else {}
        self._windows.append(Window(len(self._windows), len(self._windows), 1, tensors, peaks))

    def session(self, model: str) -> Session:
        """Everything counted, as a session of one window a step."""
        steps = len(self._windows)
        progress = Progress(steps=steps, sampled_steps=steps, backwards=steps, ended=True)
        return Session(
            RunInfo(model, kinds=_KINDS, watch=False), self._watched, tuple(self._windows), progress=progress
        )

    def _awaits_gradient(self, key: TensorKey) -> Callable[[Any, Any], None]:
        def gradient_arrived(gradient: torch.Tensor) -> None:
            self._step.setdefault(key, []).append(count_exponents(gradient))

        def forward_ran(args: Any, output: Any) -> None:
            for tensor in tensors_in(output):
                # A leaf is a parameter or an input that the module handed on: its hook would stay behind.
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(gradient_arrived)  # type: ignore[no-untyped-call]

        return forward_ran


def _window(histograms: list[ExponentHistogram]) -> TensorWindow:
    peaks = add_counts({histogram.peak_exponent: 1} for histogram in histograms if histogram.nonzero)
    return TensorWindow(
        merge(histograms), len(histograms), peaks, numel_max=max(histogram.total for histogram in histograms)
    )
