"""Diagnoses: each names a cause that the record of a run shows, with its evidence and the fix as code."""
