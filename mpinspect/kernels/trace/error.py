"""What is raised where a trace can't be read at all."""

from __future__ import annotations


class TraceError(ValueError):
    """A file is no trace that could be read: one sentence or two, saying what is wrong and what to do."""
