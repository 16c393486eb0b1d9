"""A kernel's name -> did it run on Tensor Cores, as far as a name can tell. Data in ``rules``, no torch."""

from mpinspect.kernels.names.classify import KernelVerdict, classify_kernel
from mpinspect.kernels.names.rules import GUESSES, RULES, RULES_VERSION, UNFAMILIAR, VERDICTS, Rule, by_words

__all__ = [
    "GUESSES",
    "RULES",
    "RULES_VERSION",
    "UNFAMILIAR",
    "VERDICTS",
    "KernelVerdict",
    "Rule",
    "by_words",
    "classify_kernel",
]
