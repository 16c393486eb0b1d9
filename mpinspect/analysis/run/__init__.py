"""A whole run of a script: ranges of each model, shapes and kernels, joined."""

from mpinspect.analysis.run.by_module import ModuleRow, by_module
from mpinspect.analysis.run.report import ModelPart, RunReport

__all__ = ["ModelPart", "ModuleRow", "RunReport", "by_module"]
