"""Faults of a training: ``measure`` observes what counts do not show, ``name`` makes findings of its records.

``measure`` needs torch. ``name`` and the modules beside it read records alone.
"""
