"""What became of a step's rows of counts that lay in a buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mpinspect.capture.host_copy import HostCopy


@dataclass(frozen=True)
class Sent:
    """A step's rows on their way to the host.

    Args:
        copies: the rows sent, by their index, and the copy that takes them in this order: one, or none.
        done: indices of all rows that lie in the buffer.
    """

    copies: list[tuple[list[int], HostCopy]]
    done: set[int]


def slots_of(rows: Sequence[torch.Tensor], slot_of: Mapping[int, int]) -> dict[int, int]:
    """Of a step's rows those that lie in a buffer: their slots, by index. ``slot_of``: the slots by the id of their row."""
    return {index: slot_of[id(row)] for index, row in enumerate(rows) if id(row) in slot_of}
