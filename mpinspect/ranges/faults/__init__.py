"""Faults of a training: ``measure`` records facts that the counts do not show, ``name`` makes findings of the records.

``measure`` and ``observers`` need torch. The other modules read records only.
"""
