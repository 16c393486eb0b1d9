"""The joined report of a script's run: the ranges of each model, the shapes and the kernels."""

from mpinspect.run.report.by_module import ModuleRow, by_module
from mpinspect.run.report.report import ModelPart, RankPart, RunReport

__all__ = ["ModelPart", "ModuleRow", "RankPart", "RunReport", "by_module"]
