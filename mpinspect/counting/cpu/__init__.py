"""Counting on a CPU with numba (the extra mpinspect[cpu]). Callers get the compiled loops from ``available``."""
