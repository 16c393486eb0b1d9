"""The charts of TensorBoard's "custom scalars" page.

TensorBoard draws all lines of a run in one colour and distinguishes them by markers: a chart of every layer is unreadable.
So each kind of tensor has a chart of its median layer between the lowest and the highest, and each chart of single layers
holds a few that belong together: the same layer of a model's blocks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from typing import Any

from mpinspect.ranges.kinds import KINDS, TABLE, UPDATE
from mpinspect.ranges.report.layers import by_pattern, common_name
from mpinspect.ranges.windows.tensors import TensorInfo, TensorKey
from mpinspect.reporting.streams import printable

#: Most lines of a chart, about as many as TensorBoard has markers for.
MOST_LINES = 8
FLUSHED = "flushed_fraction"
#: The scalars that have charts.
MEASURES = {FLUSHED: "flushed at scale 1", "range_offset": "range offset"}
#: The limits of the suggested scale.
_LOSS_SCALE = ("Margin", [f"summary_more/loss_scale/{name}" for name in ("suggested", "lowest", "highest")])


def over_layers(measure: str, kind: str) -> list[str]:
    """Return the tags of a measure's median, lowest and highest tensor of a kind, in the order of a margin chart."""
    return [f"summary_over_layers/{measure}/{kind}/{which}" for which in ("median", "lowest", "highest")]


def layout(
    infos: Iterable[TensorInfo], tags: Mapping[TensorKey, str], drawn: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Return the page's charts by category and title, each with its type and its tags (regular expressions for lines).

    Args:
        infos: the tensors that are watched.
        tags: the tag of each, ``<kind>/<layer>``.
        drawn: the tags of the curves that the log has; others get no chart.
    """
    counted = sorted((info for info in infos if info.kind != UPDATE), key=lambda info: KINDS.index(info.kind))
    kinds = {kind: list(of_kind) for kind, of_kind in groupby(counted, lambda info: info.kind)}
    titles = {kind.name: kind.title.lower() for kind in TABLE}
    overview: dict[str, Any] = {"loss scale, log2: suggested, and the safe window": _LOSS_SCALE}
    for measure, words in MEASURES.items():
        for kind in kinds:
            group = over_layers(measure, kind)
            if group[0] in drawn:
                overview[f"{words}: {titles[kind]}, the median layer, between the lowest and the highest"] = (
                    "Margin",
                    group,
                )
    found = {"mpinspect": overview}
    for measure, words in MEASURES.items():
        for kind, of_kind in kinds.items():
            shown = [info for info in of_kind if f"tensor_{measure}/{tags[info.key]}" in drawn]
            found[f"{words}: {titles[kind]}"] = {
                title: ("Multiline", [f"tensor_{measure}/{re.escape(tags[info.key])}$" for info in group])
                for title, group in _charts(shown)
            }
    return {title: charts for title, charts in found.items() if charts}


def _charts(infos: list[TensorInfo]) -> Iterable[tuple[str, list[TensorInfo]]]:
    """Yield the title and the tensors of each chart: first layers repeated in the model's blocks, then the others."""
    groups = by_pattern(infos)
    singles = [info for group in groups if len(group) == 1 for info in group]
    taken: set[str] = set()
    for group in (*(group for group in groups if len(group) > 1), singles):
        for start in range(0, len(group), MOST_LINES):
            part = group[start : start + MOST_LINES]
            names = [info.name or "(the model)" for info in part]
            title = printable(
                common_name(names) if group is not singles else " .. ".join(dict.fromkeys((names[0], names[-1])))
            )
            # Modules of two classes may have the same merged name.
            while title in taken:
                title += "'"
            taken.add(title)
            yield title, part
