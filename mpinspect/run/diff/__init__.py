"""Compares two runs: the ranges of each model, and the shapes and kernels where both runs have them. Needs no torch."""

from mpinspect.run.diff.comparing import diff
from mpinspect.run.diff.report import DiffReport, ModelDiff

__all__ = ["DiffReport", "ModelDiff", "diff"]
