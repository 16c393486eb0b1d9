"""Judge by a kernel's name whether it ran on Tensor Cores; the rules are data (``rules``). Needs no torch."""

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
