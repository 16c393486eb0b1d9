"""Counting on an NVIDIA GPU with Triton. Whoever imports ``counter`` does so where it is used: it loads Triton."""
