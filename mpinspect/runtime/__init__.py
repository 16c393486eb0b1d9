"""Shared code close to torch and Python: hooks, threads, files, stack checks, emulation and data on GPUs."""
