"""rank_precision: measures how much closer the weights' gradients come to FP32's if one module is computed in FP32."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mpinspect.numeric.exponents import ratio
from mpinspect.ranges.analysis.precision_ranking import GradientErrors, PrecisionRanking, Widening
from mpinspect.ranges.capture.passes import LossFunction, require_step
from mpinspect.ranges.faults.measure.widened import Widened
from mpinspect.ranges.second_opinion import run_twice
from mpinspect.reporting.words import filled
from mpinspect.runtime.untouched import ModelState, RandomState

#: Limits after which no further module is tried.
_MOST_PASSES, _MOST_SECONDS = 40, 60.0
#: The least share of the error that a module must take away, for its parts to be tried.
_WORTH_A_LOOK = 0.1
#: An FP32 gradient below this share of another gradient of its module is rounding noise, as of a bias before a BatchNorm.
_NOISE = 2.0**-14
#: The most operators of one module that are tried.
_MOST_OPERATORS = 8

#: In place of an operator: the module without those below it.
_OWN = "own"

Chosen = Callable[[str, str], bool]


def rank_precision(model: torch.nn.Module, loss_fn: LossFunction, batch: Any) -> PrecisionRanking:
    """Return how far the gradients of a step are from FP32's, and which modules and operators in FP32 would change that most.

    The step is computed as the training does, then in FP32, then once for each candidate: the operators of one module, forward
    and backward, in FP32, and all others as they are. The model's children are candidates first, then the parts of the module
    that takes most of the errors away, and its operators at last. An error is the norm of a weight gradient's difference from the
    one in FP32, relative to that one's norm. The ranking is by its mean over the weights, each counted as 1 at most. Weights
    whose gradient is zero in theory, and rounding noise in FP32, are left out: biases before a normalisation.

    Afterwards, even after an error, the model and the random generators are restored. Nothing is trained. Compiled modules run
    eagerly.

    Args:
        model, loss_fn, batch: as in ``second_opinion``.

    Returns:
        The report. It has no modules if nothing is computed in FP16 or BF16, or if a gradient is not finite.

    A pass takes up to four times as long as the step on a CPU; after 40 passes or 60 s the rest is left out. Needs memory for
    FP32 copies of the step's 16-bit tensors and of the gradients. Synchronises the device.

    Raises:
        TypeError, ValueError: as ``second_opinion``.
    """
    search = _Search(model, loss_fn, batch)
    try:
        return search.ranking()
    finally:
        search.restore()


class _Search:
    """Computes a step again and again, with other operators in FP32 each time."""

    def __init__(self, model: torch.nn.Module, loss_fn: LossFunction, batch: Any) -> None:
        require_step(model, loss_fn)
        self._model, self._loss_fn, self._batch = model, loss_fn, batch
        self._random, self._state = RandomState.now(), ModelState(model)
        self._began = time.perf_counter()
        self._passes = 0
        self._exact: dict[str, torch.Tensor] = {}
        self._calls: Counter[tuple[str, str]] = Counter()

    def restore(self) -> None:
        """Restore the model and the random generators."""
        self._state.restore()
        self._random.restore()

    def ranking(self) -> PrecisionRanking:
        """Return the report."""
        self._exact = _without_noise(self._gradients(lambda *_: True, is_exact=True) or {})
        errors = self._errors(lambda *_: False)
        name = type(self._model).__name__
        if errors is None or not errors.mean:
            return PrecisionRanking(name, len(self._exact), errors)
        found: list[Widening] = []
        left = sum(not self._try(found, *candidate) for candidate in self._candidates(found, errors))
        ranked = sorted(found, key=lambda each: each.errors.mean)
        return PrecisionRanking(name, len(self._exact), errors, tuple(ranked), left)

    def _candidates(self, found: list[Widening], errors: GradientErrors) -> Iterator[tuple[str, str, Chosen]]:
        """Yield modules, beginning with the model's children; then parts of the best of them, its operators at last."""
        path: str | None = ""
        while path is not None:
            tried = len(found)
            parts = self._parts(path)
            yield from ((part, "", _within(part)) for part in parts)
            if any(path == module for module, _ in self._calls):
                yield path, _OWN, _alone(path)
            level = found[tried:]
            best = min(level, key=lambda each: each.errors.mean, default=None)
            if best is None or errors.mean - best.errors.mean < _WORTH_A_LOOK * errors.mean:
                return
            if best.is_own or not self._parts(best.module):
                yield from self._operators(best.module)
                return
            path = best.module

    def _parts(self, path: str) -> list[str]:
        """Return the modules directly below a module in which operators ran."""
        before = filled("{}.", path)
        inside = (module for module, _ in self._calls if module.startswith(before) and module not in (path, ""))
        return list(dict.fromkeys(before + module[len(before) :].partition(".")[0] for module in inside))

    def _operators(self, path: str) -> Iterator[tuple[str, str, Chosen]]:
        """Yield the most frequent operators of a module."""
        calls = Counter({name: number for (module, name), number in self._calls.items() if module == path})
        for name, _ in calls.most_common(_MOST_OPERATORS):
            yield path, name, _one(path, name)

    def _try(self, found: list[Widening], module: str, operator: str, chosen: Chosen) -> bool:
        """Measure a candidate. Return False if time or passes are used up."""
        if self._passes >= _MOST_PASSES or time.perf_counter() - self._began > _MOST_SECONDS:
            return False
        errors = self._errors(chosen)
        if errors is not None:
            is_own = operator == _OWN
            found.append(Widening(module, "" if is_own else operator, errors, is_own))
        return errors is not None

    def _errors(self, chosen: Chosen) -> GradientErrors | None:
        """Return the errors of the gradients with these operators in FP32; None if one is not finite."""
        gradients = self._gradients(chosen)
        if gradients is None or not self._exact:
            return None
        errors = {
            name: ratio(float((gradient - self._exact[name]).norm()), float(self._exact[name].norm()))
            for name, gradient in gradients.items()
            if name in self._exact
        }
        if not errors or not all(map(math.isfinite, errors.values())):
            return None
        whose = max(errors, key=lambda name: errors[name])
        return GradientErrors(sum(min(each, 1.0) for each in errors.values()) / len(errors), errors[whose], whose)

    def _gradients(self, chosen: Chosen, is_exact: bool = False) -> dict[str, torch.Tensor] | None:
        """Return the weights' gradients in FP32; None if time or memory ended the pass."""
        self.restore()
        self._passes += 1
        (second,) = run_twice(self._model, self._loss_fn, self._batch, lambda running: (Widened(running, chosen),))
        gradients = {
            name: second.exact(each.grad).clone() if is_exact else each.grad.float()
            for name, each in self._model.named_parameters()
            if each.grad is not None and each.grad.layout is torch.strided
        }
        self._calls = self._calls or second.calls
        return gradients if second.is_whole else None


def _without_noise(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradients that are not zero in theory."""
    norms = {name: float(each.norm()) for name, each in gradients.items()}
    largest: dict[str, float] = {}
    for name, norm in norms.items():
        module = name.rpartition(".")[0]
        largest[module] = max(largest.get(module, 0.0), norm)
    return {name: each for name, each in gradients.items() if norms[name] > _NOISE * largest[name.rpartition(".")[0]]}


def _within(path: str) -> Chosen:
    return lambda module, _: module == path or module.startswith(f"{path}.")


def _alone(path: str) -> Chosen:
    return lambda module, _: module == path


def _one(path: str, name: str) -> Chosen:
    return lambda module, operator: (module, operator) == (path, name)
