"""What became of a step's rows of counts that lay in a buffer."""

from __future__ import annotations

from dataclasses import dataclass

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
