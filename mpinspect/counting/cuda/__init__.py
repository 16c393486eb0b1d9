"""Counts tensors, and finds their largest magnitudes, on an NVIDIA GPU, with kernels compiled when they are first used."""
