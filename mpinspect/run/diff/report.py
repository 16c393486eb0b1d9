"""The differences of two runs, as plain data that every form of the report renders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpinspect.ranges.analysis.comparison import RANGE_DIFF_IDS, RangeDiff
from mpinspect.reporting.finding import Finding, gravest_first
from mpinspect.reporting.rendering import RendersItself
from mpinspect.run.diff.products import PRODUCT_DIFF_IDS, KernelsDiff, ShapesDiff

#: The ids of the findings on differences.
DIFF_IDS = (*RANGE_DIFF_IDS, *PRODUCT_DIFF_IDS, "models-differ")


@dataclass(frozen=True)
class ModelDiff:
    """A model of both runs; ``name`` is its name in the second."""

    name: str
    ranges: RangeDiff


@dataclass(frozen=True)
class Side:
    """One of the two runs.

    Args:
        path: its directory or file; "" for a session in memory.
        words: a summary: the model, its steps and its precision.
        notes: sentences on unreadable parts, and on a run that is still running.
        arguments: the script's arguments, each option with its values: "--lr 0.1"; None if they are not known.
    """

    path: str
    words: str
    notes: tuple[str, ...] = ()
    arguments: tuple[str, ...] | None = None


@dataclass(frozen=True, repr=False)
class DiffReport(RendersItself):
    """The differences of two runs, A (the first) and B (the second).

    Renders itself: ``str()``, ``_repr_html_()``, ``save(path)``, ``to_json()``.

    Args:
        first, second: the runs.
        models: one difference for each model of both runs, in the second's order.
        only_first, only_second: names of the models of one run alone.
        shapes: differences in the shapes of one step's matrix products; None if a run has no shapes.
        kernels: differences in the kernels of one profiled step; None if a run has no kernels.
    """

    kind: ClassVar[str] = "diff"

    first: Side
    second: Side
    models: tuple[ModelDiff, ...]
    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()
    shapes: ShapesDiff | None = None
    kernels: KernelsDiff | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The differences, and findings of B alone, the gravest first; empty if nothing differs."""
        found = [finding for model in self.models for finding in model.ranges.findings]
        for products in (self.shapes, self.kernels):
            found += () if products is None else products.findings
        if self.only_first or self.only_second:
            names = [*self.only_first, *self.only_second]
            evidence = {"only_first": self.only_first, "only_second": self.only_second}
            found.append(Finding("models-differ", "info", "", f"One run alone has {', '.join(names)}.", evidence))
        return tuple(gravest_first(found))
