"""Observers that measure what histograms do not show, each for the diagnoses of one file in ``ranges/analysis/diagnoses``."""
