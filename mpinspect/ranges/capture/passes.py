"""Runs single training passes of a model in FP32 and in FP16, from the same state, and compares their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from mpinspect.counting import count_exponents
from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.ranges.capture.capture import Capture
from mpinspect.ranges.capture.layers import Selection, describe, find_layers, find_parameters
from mpinspect.ranges.capture.recording import Recording
from mpinspect.ranges.capture.steps import Schedule
from mpinspect.ranges.kinds import GRADIENT_KINDS
from mpinspect.ranges.session import RunInfo, Session
from mpinspect.runtime.emulation import half_arithmetic
from mpinspect.runtime.untouched import ModelState
from mpinspect.runtime.wrappers import compiled_modules_eager

LossFunction = Callable[[torch.nn.Module, Any], torch.Tensor]
Gradients = dict[str, torch.Tensor]


class Passes:
    """Runs single passes of one model; each starts from the model's original state and returns its gradients."""

    def __init__(self, model: torch.nn.Module, loss_fn: LossFunction) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.device = next(iter(self.trainable.values())).device.type
        self.emulated = self.device == "cpu"
        self.model_state = ModelState(model)
        self._counted = Recording(RunInfo(type(model).__name__, kinds=GRADIENT_KINDS, watch=False))
        self._capture = _gradient_capture(model, self._counted)
        self.notes: list[str] = []

    def reference(self, batch: Any, number: int, *, count: bool) -> Gradients:
        """Return the FP32 gradients by parameter name; record their counts if ``count``."""
        if count:
            self._capture.attach()
        try:
            gradients = self._run(batch, number, 1.0, half=False)
        finally:
            if count:
                # Each batch is a separate step; detaching ends the step.
                self._capture.detach()
        if not gradients:
            raise ValueError(
                f"no parameter got a gradient from batch {number}: the loss does not depend on any parameter that requires one. "
                "Let loss_fn use the model it is given, without detach() or no_grad()"
            )
        return gradients

    def session(self) -> Session:
        """Return the counts of the FP32 gradients so far, one step per batch."""
        return self._counted.session()

    def half(self, batch: Any, number: int, loss_scale: float) -> Gradients:
        """Return the FP16 gradients by parameter name, still multiplied by the scale."""
        with half_arithmetic() if self.emulated else ExitStack():
            return self._run(batch, number, loss_scale, half=True)

    def _run(self, batch: Any, number: int, loss_scale: float, *, half: bool) -> Gradients:
        self.model_state.restore()
        for parameter in self.model.parameters():
            parameter.grad = None
        # The backward runs outside of any autocast, including the caller's.
        with compiled_modules_eager(), torch.enable_grad(), torch.autocast(self.device, enabled=False):
            with torch.autocast(self.device, torch.float16, enabled=half):
                loss = self.loss_fn(self.model, batch)
            require_loss(loss, number, finite=not half)
            self._notice(loss, half)
            # Scale in FP32: an FP16 loss times the scale would overflow before any gradient does.
            (loss.float() * loss_scale).sum().backward()  # type: ignore[no-untyped-call]
        return {name: p.grad.detach() for name, p in self.trainable.items() if p.grad is not None}

    def _notice(self, loss: torch.Tensor, half: bool) -> None:
        if half and loss.dtype == torch.float16:
            self._note(
                "the loss is an FP16 tensor in the FP16 pass: its gradient, the loss scale itself, overflows from 2^16 on. "
                "Compute the loss in FP32: loss_function(output.float(), target)"
            )
        if half and not bool(torch.isfinite(loss).all()):
            self._note("the loss is finite in the FP32 pass but not in the FP16 pass: the forward overflowed")

    def _note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)


def _gradient_capture(model: torch.nn.Module, recording: Recording) -> Capture:
    """Return a capture that counts every gradient of plain backwards, without scaler, autocast or optimizer."""
    everything = Selection(None, None)
    layers, parameters = find_layers(model, everything), find_parameters(model, everything)
    recording.watch(describe(layers, parameters, GRADIENT_KINDS))
    return Capture(
        layers,
        parameters,
        kinds=GRADIENT_KINDS,
        schedule=Schedule(),
        watch=False,
        loss_scale=1.0,
        optimizers=(),
        scalers=(),
        recording=recording,
    )


def materialised(batches: Iterable[Any]) -> list[Any]:
    """Return the batches as a list; raise TypeError or ValueError if there are none."""
    if isinstance(batches, (torch.Tensor, Mapping, str, bytes)) or not isinstance(batches, Iterable):
        raise TypeError(
            f"batches must be an iterable of batches, not a single {type(batches).__name__}: put one batch into a list, [batch]"
        )
    given = list(batches)
    if not given:
        raise ValueError(
            "batches holds no batch: it is empty, or an iterator that was used up before. Give a list, or make a new iterator"
        )
    return given


def require_step(model: Any, loss_fn: Any) -> None:
    """Raise TypeError unless these are a module and a function."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is of type {type(model).__name__}, not a torch.nn.Module")
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn is of type {type(loss_fn).__name__}: give a function that returns loss_fn(model, batch)"
        )


def require_loss(loss: Any, number: int, *, finite: bool) -> None:
    """Raise TypeError or ValueError unless a batch's loss is one number with a graph, and finite if required."""
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"loss_fn returned {type(loss).__name__} for batch {number}, not a tensor: return the scalar loss itself "
            "(a Transformers model's is model(...).loss)"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"loss_fn returned a tensor of shape {tuple(loss.shape)} for batch {number}: reduce it to one number, loss.mean()"
        )
    if not loss.requires_grad:
        raise ValueError(
            f"the loss of batch {number} has no graph: it does not depend on a parameter that requires a gradient, or loss_fn "
            "computed it under no_grad() or took it out of the graph with detach() or item()"
        )
    if finite and not math.isfinite(loss.item()):
        raise ValueError(
            f"the loss of batch {number} is {loss.item()} in FP32: there is no reference to compare with. Look for a NaN "
            "in the batch or the weights, or a learning rate that was too large"
        )


class GradientDifference:
    """Accumulates the differences between FP32 and FP16 gradients of one parameter: counts, and sums in float64.

    Attributes:
        vanished: the exponents of the FP32 values of elements that are non-zero in FP32 but zero in the FP16 pass.
        infs, nans: the numbers of infinities and NaNs in the gradients of the FP16 pass.
        in_half: whether FP16 can represent every finite value of the FP16 pass, still scaled.

    Args:
        loss_scale: the loss scale by which the gradients of the FP16 pass are multiplied.
    """

    def __init__(self, loss_scale: float) -> None:
        self._scale = loss_scale
        self.vanished = ExponentHistogram.empty()
        self.infs = 0
        self.nans = 0
        self.in_half = True
        self._all_finite = True
        self._product = self._reference_square = self._half_square = self._error_square = 0.0

    def add(self, reference: torch.Tensor, half: torch.Tensor | None) -> None:
        """Add one pair of gradients of the same shape; ``half`` is still scaled, None means zeros. Waits for the device."""
        reference = _flat(reference)
        half = torch.zeros_like(reference) if half is None else _flat(half)
        counts = count_exponents(half)
        self.infs += counts.infs
        self.nans += counts.nans
        self.in_half &= _holds_half(half)
        self.vanished += count_exponents(reference[(half == 0) & (reference != 0) & reference.isfinite()])
        self._add_sums(reference.double(), half.double() / self._scale)

    def _add_sums(self, reference: torch.Tensor, half: torch.Tensor) -> None:
        error = half - reference
        sums = [float(a.dot(b)) for a, b in ((half, reference), (reference, reference), (half, half), (error, error))]
        self._all_finite &= all(map(math.isfinite, sums))
        self._product += sums[0]
        self._reference_square += sums[1]
        self._half_square += sums[2]
        self._error_square += sums[3]

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between both gradients; None if either is zero or not finite."""
        if not self._all_finite:
            return None
        norms = math.sqrt(self._reference_square) * math.sqrt(self._half_square)
        if not norms:
            return None
        # Rounding may push the quotient slightly beyond 1.
        return max(-1.0, min(1.0, self._product / norms))

    @property
    def relative_error(self) -> float | None:
        """L2 norm of the difference over the L2 norm of the reference; None if the latter is zero or a value is not finite."""
        if not self._all_finite or not self._reference_square:
            return None
        return math.sqrt(self._error_square / self._reference_square)


def _flat(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout != torch.strided:
        gradient = gradient.to_dense()
    return gradient.reshape(-1)


def _holds_half(values: torch.Tensor) -> bool:
    finite = values[values.isfinite()]
    return bool((finite.half().to(finite.dtype) == finite).all())
