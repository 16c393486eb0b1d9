"""A whole run of a script: ranges of each model, shapes and kernels, joined."""

from mpinspect.run.report.by_module import ModuleRow, by_module
from mpinspect.run.report.report import ModelPart, RunReport

__all__ = ["ModelPart", "ModuleRow", "RunReport", "by_module"]
