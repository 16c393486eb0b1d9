"""What a run of a script came to, as plain data: what every form of the joined report renders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mpinspect.ranges.analysis.first_line import first_line, what_broke
from mpinspect.reporting.finding import SEVERITIES, Finding
from mpinspect.reporting.rendering import RendersItself

if TYPE_CHECKING:
    from mpinspect.kernels.analysis import KernelReport
    from mpinspect.ranges.analysis.report import RangeReport
    from mpinspect.shapes.analysis import ShapeReport


@dataclass(frozen=True)
class ModelPart:
    """One model of the run. ``name``: its class, numbered where two share it; also its folder in the run directory."""

    name: str
    ranges: RangeReport


@dataclass(frozen=True, repr=False)
class RunReport(RendersItself):
    """Ranges, shapes and kernels of one run of a script.

    Renders itself: ``str()``, ``_repr_html_()``, ``save(path)``, ``to_json()``.

    Args:
        command: the script and its arguments, as a shell would take them.
        outcome: how the script ended, in words: "ended", "exit status 3", "RuntimeError: ...", "stopped by Ctrl-C".
        parts: one a model, in the order in which they were found.
        shapes: of the products of one step; None if they could not be recorded.
        kernels: of one profiled step; None likewise.
        saw: sentences: what was seen of the script, and what was not.
        log_dir: the run directory; "" where nothing is written.
        is_shape_detail: whether nobody asked for the shapes: a terminal has them in brief.
        broke_elsewhere: the first line of another process of the run that broke before this one; "" where none did.
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

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Those of all parts that were asked for, the gravest first."""
        shapes = None if self.is_shape_detail else self.shapes
        reports = [*(part.ranges for part in self.parts), shapes, self.kernels]
        found = [finding for report in reports if report is not None for finding in report.findings]
        return tuple(sorted(found, key=lambda finding: -SEVERITIES.index(finding.severity)))

    @property
    def first_line(self) -> str:
        """What broke first and was not caught by a loss scaler, in one line; "" where everything was finite."""
        if self.broke_elsewhere:
            return self.broke_elsewhere
        broken = [(event, part.name) for part in self.parts if (event := what_broke(part.ranges)) is not None]
        if not broken:
            return ""
        # Of several models each has its own count of steps.
        first, name = min(broken, key=lambda pair: pair[0].step)
        return first_line(first) if len(self.parts) == 1 else f"{name}: {first_line(first)}"
