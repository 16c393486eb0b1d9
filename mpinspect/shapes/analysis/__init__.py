"""Judge whether shapes, layouts and dtypes of matrix products suit Tensor Cores: pure functions, without torch or a GPU."""

from __future__ import annotations

from mpinspect.shapes.analysis.analysing import analyse_shapes
from mpinspect.shapes.analysis.judging import judge
from mpinspect.shapes.analysis.report import Padding, ShapeReport, ShapeRow
from mpinspect.shapes.analysis.rules import FINDING_IDS
from mpinspect.shapes.analysis.verdict import VERDICTS, ShapeVerdict

__all__ = ["FINDING_IDS", "VERDICTS", "Padding", "ShapeReport", "ShapeRow", "ShapeVerdict", "analyse_shapes", "judge"]
