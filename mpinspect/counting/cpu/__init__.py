"""Counting on a CPU with numba. Needs the extra mpinspect[cpu]; whoever imports ``counter`` does so where it is used."""
