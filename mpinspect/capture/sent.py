"""What became of a step's rows of counts that lay in a buffer."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch

from mpinspect.capture.host_copy import HostCopy


@dataclass(frozen=True)
class Sent:
    """A step's rows on their way to the host.

    Args:
        copies: the rows sent, by their index, and the copy that takes them in this order: one, or none.
        done: indices of all rows that lie in the buffer, with those that could not be counted.
    """

    copies: list[tuple[list[int], HostCopy]]
    done: set[int]


def sorted_out(
    rows: Sequence[torch.Tensor], slot_of: Mapping[int, int], not_counted: Container[int]
) -> tuple[dict[int, int], set[int]]:
    """Of a step's rows those that lie in a buffer: the slots of those that were counted, by index, and the indices of all.

    Args:
        slot_of: the buffer's slots by the id of their row.
        not_counted: slots that hold nothing.
    """
    slots = {index: slot_of[id(row)] for index, row in enumerate(rows) if id(row) in slot_of}
    return {index: slot for index, slot in slots.items() if slot not in not_counted}, set(slots)
