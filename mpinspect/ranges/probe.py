"""Runs the same batches in FP32 and in FP16, and compares the predicted with the measured FP16 gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.numeric.formats import FLOAT16, floor_log2, is_power_of_two
from mpinspect.ranges.analysis.agreement import GradientAgreement, LayerProbe
from mpinspect.ranges.analysis.loss_scale import recommend_loss_scale
from mpinspect.ranges.analysis.noise import is_rounding_noise, rounding_noise_ceilings, without_noise
from mpinspect.ranges.analysis.ranges import tensor_infos
from mpinspect.ranges.analysis.report import LossScaleAdvice
from mpinspect.ranges.capture.passes import GradientDifference, LossFunction, Passes, materialised
from mpinspect.ranges.kinds import WEIGHT_GRADIENT
from mpinspect.ranges.session import Session
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.reporting.rendering import RendersItself
from mpinspect.runtime.untouched import RandomState


@dataclass(frozen=True)
class ProbeReport(RendersItself):
    """The effect of FP16 on a model's gradients, predicted from FP32 counts and measured.

    Renders itself: ``str()``, ``_repr_html_()``, ``save(path)``, ``to_json()``.

    Args:
        layers: one entry per parameter with a gradient, in the model's order.
        loss_scale: the advice derived from the FP32 reference, including activation gradients.
        second_scale: the second loss scale of the FP16 passes: the ``loss_scale`` passed to ``probe``, else the recommended
            scale; None if neither exists.
        emulated: True if FP16 was emulated on a CPU, False if the device ran FP16 itself.
        device: type of the passes' device ("cpu", "cuda").
        batches: number of batches.
        reference: the FP32 passes as a session with one step per batch, for ``mpinspect.ranges.analysis.analyse``.
        without_gradient: names of the trainable parameters without a gradient in any batch.
        notes: further observations, as sentences.
    """

    kind: ClassVar[str] = "probe"

    layers: tuple[LayerProbe, ...]
    loss_scale: LossScaleAdvice
    second_scale: float | None
    emulated: bool
    device: str
    batches: int
    reference: Session
    without_gradient: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> LayerProbe | None:
        """The comparable layer whose measured flushed fraction at scale 1 differs most from the predicted one.

        None if no layer is comparable.
        """
        comparable = [layer for layer in self.layers if layer.comparable]
        return max(comparable, key=lambda layer: abs(layer.unscaled.difference), default=None)

    @property
    def largest_difference(self) -> float:
        """Largest |measured - predicted| flushed fraction of a comparable layer at scale 1, 0..1; 0.0 without such a layer."""
        return max((abs(layer.unscaled.difference) for layer in self.layers if layer.comparable), default=0.0)


def probe(
    model: torch.nn.Module, loss_fn: LossFunction, batches: Iterable[Any], *, loss_scale: float | None = None
) -> ProbeReport:
    """Run batches in FP32 and in FP16 and compare every weight gradient.

    Each batch runs forward and backward in FP32 (autocast off, scale 1), then in FP16 (``torch.autocast``) at loss
    scale 1, then in FP16 at the scale recommended from the FP32 gradients. Every pass starts from the same buffers and
    random state. A GPU runs its own FP16. On a CPU, FP16 is emulated: FP16 tensors, with products summed in FP32 and
    rounded once, as in Tensor Cores, so only the order of FP32 sums depends on the processor.

    Afterwards, even after an error, the model (parameters, buffers, ``.grad``, requires_grad, train/eval flags), the
    random generators of torch, Python and NumPy, and autocast are restored. The model is not trained.

    Args:
        model: a model with FP32 trainable parameters, on the batches' device; it runs in its current mode (train or
            eval).
        loss_fn: ``loss_fn(model, batch)`` returns the unscaled scalar loss. It is called up to four times per batch and
            must not use autocast or call backward itself.
        batches: an iterable of batches, which are all held in memory: limit a long one with ``itertools.islice(loader, 4)``.
            Each batch is a separate step.
        loss_scale: the second scale, a power of two; the recommended one by default.

    The reference is as precise as the device's FP32 setting (``torch.backends.cuda.matmul.allow_tf32``). Synchronises
    the device. Needs memory for a copy of the model's values and two sets of gradients.

    Raises:
        TypeError: model is not a Module, loss_fn is not callable, the loss is not a tensor, or batches is not an
            iterable.
        ValueError: no batches, parameters that are not FP32, a loss that is not scalar, not finite or without a graph,
            no parameter with a gradient, or a loss_scale that is not a power of two.
    """
    _require(model, loss_fn, loss_scale)
    random = RandomState.now()
    passes = Passes(model, loss_fn)
    try:
        given = materialised(batches)
        # Drawing the batches may have advanced the random generators: every sweep starts from this state.
        start = RandomState.now()
        first = _sweep(passes, given, 1.0)
        session = passes.session()
        advice = recommend_loss_scale(session)
        second_scale = loss_scale or advice.recommended
        start.restore()
        second: _Sweep | None = None
        if second_scale == 1.0:
            second = first
        elif second_scale is not None:
            second = _sweep(passes, given, float(second_scale))
    finally:
        passes.model_state.restore()
        random.restore()
    return _report(passes, session, advice, first, second, len(given))


class _Sweep(NamedTuple):
    """The differences between FP16 and FP32 gradients over all batches at one loss scale, by parameter name."""

    loss_scale: float
    differences: dict[str, GradientDifference]


def _sweep(passes: Passes, batches: list[Any], loss_scale: float) -> _Sweep:
    """Run all batches in FP32 and in FP16 at a loss scale; FP32 runs again in each sweep to save gradient memory."""
    differences: dict[str, GradientDifference] = {}
    for number, batch in enumerate(batches):
        start = RandomState.now()
        reference = passes.reference(batch, number, count=loss_scale == 1.0)
        start.restore()
        half = passes.half(batch, number, loss_scale)
        for name, gradient in reference.items():
            differences.setdefault(name, GradientDifference(loss_scale)).add(gradient, half.get(name))
    return _Sweep(loss_scale, differences)


def _report(
    passes: Passes, session: Session, advice: LossScaleAdvice, first: _Sweep, second: _Sweep | None, batches: int
) -> ProbeReport:
    totals = session.totals()
    ceilings = rounding_noise_ceilings(tensor_infos(session, totals), totals)
    layers = []
    for name, parameter in passes.trainable.items():
        key = TensorKey(name, WEIGHT_GRADIENT)
        if key in totals:
            shape = tuple(parameter.shape)
            layers.append(_layer(name, shape, totals[key].histogram, ceilings.get(key, 0.0), first, second))
    return ProbeReport(
        layers=tuple(layers),
        loss_scale=advice,
        second_scale=second.loss_scale if second else None,
        emulated=passes.emulated,
        device=passes.device,
        batches=batches,
        reference=session,
        without_gradient=tuple(name for name in passes.trainable if TensorKey(name, WEIGHT_GRADIENT) not in totals),
        notes=tuple(passes.notes),
    )


def _layer(
    name: str,
    shape: tuple[int, ...],
    histogram: ExponentHistogram,
    ceiling: float,
    first: _Sweep,
    second: _Sweep | None,
) -> LayerProbe:
    is_noise = is_rounding_noise(histogram, ceiling)
    # Remove the noise only from gradients that are partly noise (a fused bias): pure noise would vanish.
    floor = 0.0 if is_noise else ceiling
    sweeps = [sweep for sweep in (first, second) if sweep]
    return LayerProbe(
        name=name,
        shape=shape,
        histogram=histogram,
        unscaled=_agreement(first, name, histogram, floor),
        scaled=_agreement(second, name, histogram, floor) if second else None,
        # Check all scales: at one scale the values of a small gradient may be FP16 numbers by chance.
        in_half=all(sweep.differences[name].in_half for sweep in sweeps),
        rounding_noise=is_noise,
    )


def _agreement(sweep: _Sweep, name: str, histogram: ExponentHistogram, noise_floor: float) -> GradientAgreement:
    log2_scale = floor_log2(sweep.loss_scale)
    difference = sweep.differences[name]
    reference = without_noise(histogram, noise_floor)
    # The same exponents are removed from both histograms, since only the ceiling decides which exponents are noise.
    vanished = without_noise(difference.vanished, noise_floor)
    return GradientAgreement(
        loss_scale=sweep.loss_scale,
        nonzero=reference.nonzero,
        predicted_flushed=reference.flushed(FLOAT16, log2_scale),
        measured_flushed=vanished.nonzero,
        lost_upstream=vanished.nonzero - vanished.flushed(FLOAT16, log2_scale),
        infs=difference.infs,
        nans=difference.nans,
        cosine=difference.cosine,
        relative_error=difference.relative_error,
    )


# -- bad input ----------------------------------------------------------------------------------------------------------


def _require(model: object, loss_fn: object, loss_scale: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"probe needs a torch.nn.Module, not {type(model).__name__}")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be callable as loss_fn(model, batch), not {type(loss_fn).__name__}")
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("the model has no parameter that requires a gradient: there is nothing to compare")
    for name, parameter in trainable:
        if parameter.dtype != torch.float32:
            stored = str(parameter.dtype).removeprefix("torch.")
            raise ValueError(
                f"{name} is stored in {stored}: the reference must be FP32. Probe an FP32 copy, copy.deepcopy(model).float()"
            )
    if loss_scale is None:
        return
    if isinstance(loss_scale, bool) or not isinstance(loss_scale, (int, float)):
        raise TypeError(f"loss_scale={loss_scale!r}: give a number, a power of two")
    if not 0 < loss_scale < math.inf or not is_power_of_two(loss_scale):
        raise ValueError(
            f"loss_scale={loss_scale!r}: give a power of two, such as 1024.0; counts predict those exactly"
        )
