"""The shape lint: whether shapes, layouts and dtypes of matrix products suit Tensor Cores. Pure; no torch, no GPU."""

from __future__ import annotations

from mpinspect.analysis.shapes.analysing import analyse_shapes
from mpinspect.analysis.shapes.judging import judge
from mpinspect.analysis.shapes.report import FINDING_IDS, Padding, ShapeReport, ShapeRow
from mpinspect.analysis.shapes.verdict import VERDICTS, ShapeVerdict

__all__ = [
    "FINDING_IDS",
    "VERDICTS",
    "Padding",
    "ShapeReport",
    "ShapeRow",
    "ShapeVerdict",
    "analyse_shapes",
    "judge",
]
