"""Observers that measure what no histogram tells, each for the diagnoses of one file in ``ranges/analysis/diagnoses``."""
