"""The results of a run as plain data, rendered by every form of the joined report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from mpinspect.ranges.analysis.first_line import first_line
from mpinspect.ranges.faults.registry import what_broke
from mpinspect.ranges.faults.verdict import of_what_was_seen
from mpinspect.reporting.finding import Finding, gravest_first
from mpinspect.reporting.rendering import RendersItself
from mpinspect.reporting.words import filled

if TYPE_CHECKING:
    from mpinspect.kernels.analysis import KernelReport
    from mpinspect.ranges.analysis.report import RangeReport
    from mpinspect.shapes.analysis import ShapeReport


#: A run stopped by Ctrl-C after fewer steps is not judged.
_FEW_STEPS = 5


@dataclass(frozen=True)
class ModelPart:
    """A model of the run. ``name`` is its class, numbered if not unique, and also its folder in the run directory."""

    name: str
    ranges: RangeReport


@dataclass(frozen=True)
class RankPart(ModelPart):
    """A model of one rank; ``name`` is the rank's, and the model's before it if there are several.

    ``differs`` names the figures in which it differs from most ranks: "differs in events"; "" without a difference.
    """

    differs: str = ""


@dataclass(frozen=True, repr=False)
class RunReport(RendersItself):
    """The ranges, shapes and kernels of one run of a script.

    Renders itself: ``str()``, ``_repr_html_()``, ``save(path)``, ``to_json()``.

    Args:
        command: the script and its arguments, quoted for a shell.
        outcome: how the script ended, in words: "ended", "exit status 3", "RuntimeError: ...", "stopped by Ctrl-C".
        parts: one per model, in the order of discovery.
        shapes: shapes of one step's matrix products; None if not recorded.
        kernels: kernels of one profiled step; None if not recorded.
        saw: sentences on the observed and unobserved parts of the script.
        log_dir: the run directory; "" if no files are written.
        is_shape_detail: whether the shapes were recorded without --lint; a terminal then shows them only in brief.
        broke_elsewhere: first line of the report of another process that broke before this one, or that died before any
            model was seen; "" without such a process.
        by_error: whether an uncaught exception ended the script.
        unreadable: a sentence on each model whose session can't be read; ``saw`` holds them too.
        ranks: models of single ranks, which only the page shows, in addition to their sums in ``parts``.
    """

    kind: ClassVar[str] = "run"

    command: str
    outcome: str
    parts: tuple[ModelPart, ...] = ()
    shapes: ShapeReport | None = None
    kernels: KernelReport | None = None
    saw: tuple[str, ...] = ()
    log_dir: str = ""
    is_shape_detail: bool = False
    broke_elsewhere: str = ""
    by_error: bool = False
    unreadable: tuple[str, ...] = ()
    ranks: tuple[RankPart, ...] = ()

    def __post_init__(self) -> None:
        """Withhold the verdict "healthy" if the script failed or was stopped within a few steps."""
        object.__setattr__(self, "parts", tuple(map(self._judged, self.parts)))

    def _judged(self, part: ModelPart) -> ModelPart:
        ranges = part.ranges
        failed = self.by_error or self.outcome.startswith("exit status")
        stopped = self.outcome.startswith("stopped") and ranges.session.progress.steps < _FEW_STEPS
        if not failed and not stopped:
            return part
        return replace(part, ranges=replace(ranges, verdict=of_what_was_seen(ranges.session, ranges.verdict)))

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the parts, in their order; "" for the only one, which needs none."""
        return ("",) if len(self.parts) == 1 else tuple(part.name for part in self.parts)

    @property
    def ended(self) -> str:
        """The exception that ended the script, with its step and phase if a model was in training; else ""."""
        told = [part.ranges for part in self.parts if part.ranges.verdict.ended]
        # Prefer the model in whose forward the exception was raised: its sentence is the most specific.
        told.sort(key=lambda ranges: ranges.session.ended_by is None or not ranges.session.ended_by.name)
        of_ranks = any(finding.id == "rank-ended-early" for finding in self.findings)
        if told:
            return told[0].verdict.ended
        if of_ranks or not self.by_error:
            return ""
        return f"Ended by an exception: {self.outcome}"

    @property
    def outcome_beside(self) -> str:
        """The outcome, unless the script simply ended or ``ended`` says the same; else ""."""
        return "" if self.ended or self.outcome == "ended" else self.outcome

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of all parts, the most severe first; if ``is_shape_detail``, without findings on shapes."""
        of_ranges = (finding for part in self.parts for finding in part.ranges.findings)
        return tuple(gravest_first([*of_ranges, *self.speed_findings]))

    @property
    def speed_findings(self) -> tuple[Finding, ...]:
        """The findings on shapes (unless ``is_shape_detail``) and kernels, which the verdicts on ranges leave out."""
        return (*self.shape_findings, *self.kernel_findings)

    @property
    def shape_findings(self) -> tuple[Finding, ...]:
        """The findings on shapes; () without --lint."""
        return () if self.is_shape_detail or self.shapes is None else self.shapes.listed

    @property
    def kernel_findings(self) -> tuple[Finding, ...]:
        """The findings on kernels; () without --kernels."""
        return () if self.kernels is None else self.kernels.findings

    @property
    def holds_more_than_its_verdict(self) -> bool:
        """Whether anything was recorded of a model, of shapes or of kernels."""
        return bool(self.parts) or self.shapes is not None or self.kernels is not None

    @property
    def shapes_asked(self) -> ShapeReport | None:
        """The shapes; None if they were recorded without --lint and judged for an assumed GPU."""
        if self.shapes is None or (self.is_shape_detail and self.shapes.is_gpu_assumed):
            return None
        return self.shapes

    @property
    def first_line(self) -> str:
        """The first non-finite event that no loss scaler caught, in one line, with all models that it names; "" without one."""
        if self.broke_elsewhere:
            return self.broke_elsewhere
        labelled = zip(self.labels, self.parts, strict=True)
        broken = [(event, label) for label, part in labelled if (event := what_broke(part.ranges)) is not None]
        if not broken:
            return ""
        # Each model counts its own steps.
        line = first_line(min(broken, key=lambda pair: pair[0].step)[0])
        labels = ", ".join(label for event, label in broken if first_line(event) == line)
        return filled("{}: ", labels) + line
