"""Observers, each of which measures what the findings of a file in ``name`` are made of."""
