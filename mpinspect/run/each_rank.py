"""Reads each rank's own models for the page, which has a switch between the ranks' sum and the ranks."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.session import RankRecord
from mpinspect.ranges.store import FILE_NAME, read_session
from mpinspect.run.report import ModelPart, RankPart

#: Most ranks on a page: each has a map of its own. Ranks that differ are first.
MOST_SHOWN = 8


def with_each_rank(
    whole: Path, parts: Sequence[ModelPart], format: str | None = None, within_s: float = math.inf
) -> tuple[RankPart, ...]:
    """Return the models of some ranks; empty for a run without ranks.

    Args:
        whole: the directory with the ranks' directories.
        parts: the models' sums over the ranks.
        format: the format to judge the models against; None for the format that each uses.
        within_s: seconds after which no further rank is read.
    """
    enough = time.monotonic() + within_s
    found: list[RankPart] = []
    for part in parts:
        records = part.ranges.session.ranks
        differs = {record.info.rank: words for record, words in _differing(records)}
        ranks = sorted((record.info.rank for record in records), key=lambda rank: (rank not in differs, rank))
        for rank in sorted(ranks[:MOST_SHOWN]) if len(ranks) > 1 else ():
            if time.monotonic() > enough:
                return tuple(found)
            name = f"{part.name}, rank {rank}" if len(parts) > 1 else f"rank {rank}"
            # The rank may be replacing its files; its map is then left out without a note.
            with suppress(Exception):
                session = read_session(whole / f"rank{rank}" / part.name / FILE_NAME)
                found.append(RankPart(name, analyse(session, format), differs.get(rank, "")))
    return tuple(found)


def _differing(records: Sequence[RankRecord]) -> Iterator[tuple[RankRecord, str]]:
    """Yield the ranks whose figures differ from most ranks', with the names of these figures."""
    figures = [
        {
            "events": record.events,
            "steps": record.progress.steps,
            "skipped steps": record.progress.skipped_steps,
            "loss scales": record.progress.scales,
        }
        for record in records
    ]
    usual = {name: Counter(each[name] for each in figures).most_common(1)[0][0] for name in (figures or [{}])[0]}
    for record, each in zip(records, figures, strict=True):
        names = [name for name, value in each.items() if value != usual[name]]
        if names:
            yield record, f"differs in {' and '.join(names)}"
