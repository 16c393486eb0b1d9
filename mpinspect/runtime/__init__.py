"""What touches torch's or Python's machinery, whatever the question: hooks, threads, files, stack checks, GPUs as data."""
