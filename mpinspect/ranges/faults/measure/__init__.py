"""Observers that record the facts behind the findings of ``name``."""
