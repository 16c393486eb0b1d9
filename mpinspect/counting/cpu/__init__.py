"""Counting on a CPU with numba (the extra mpinspect[cpu]). Whoever wants the compiled loops asks ``available``."""
