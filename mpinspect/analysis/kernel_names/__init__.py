"""A kernel's name -> did it run on Tensor Cores, as far as a name can tell. Data in ``rules``, no torch."""

from mpinspect.analysis.kernel_names.classify import KernelVerdict, classify_kernel
from mpinspect.analysis.kernel_names.rules import RULES, RULES_VERSION, VERDICTS, Rule

__all__ = ["RULES", "RULES_VERSION", "VERDICTS", "KernelVerdict", "Rule", "classify_kernel"]
