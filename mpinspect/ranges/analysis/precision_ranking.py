"""The report of rank_precision: the errors of a step's gradients, and those with one module or operator in FP32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpinspect.reporting.finding import Finding
from mpinspect.reporting.rendering import RendersItself


@dataclass(frozen=True)
class GradientErrors:
    """The errors of the weights' gradients, each relative to the norm of the gradient in FP32.

    Args:
        mean: over the weights, each counted as 1 at most.
        worst: the largest.
        whose: the path of the weight with the largest.
    """

    mean: float
    worst: float
    whose: str


@dataclass(frozen=True)
class Widening:
    """The errors that remain with one module, or one of its operators, in FP32.

    Args:
        module: dotted path; "" for code outside of modules.
        operator: "" for the whole module.
        errors: the remaining errors.
        is_own: whether the modules below it stay as they are.
    """

    module: str
    operator: str
    errors: GradientErrors
    is_own: bool = False


@dataclass(frozen=True, repr=False)
class PrecisionRanking(RendersItself):
    """The modules and operators whose computation in FP32 would change a step's gradients most.

    Renders itself: ``str()``, ``_repr_html_()``, ``save(path)``, ``to_json()``.

    Args:
        model: class name.
        weights: number of weights whose gradients were compared; those that are zero in theory were not.
        errors: of the step as it is computed; None if a gradient is not finite or the FP32 copies had no room.
        modules: those that were tried, the most effective first.
        left_out: how many candidates were left out for want of time.
    """

    kind: ClassVar[str] = "ranking"

    model: str
    weights: int
    errors: GradientErrors | None
    modules: tuple[Widening, ...] = ()
    left_out: int = 0

    @property
    def findings(self) -> tuple[Finding, ...]:
        """No findings: the table is the judgement."""
        return ()
