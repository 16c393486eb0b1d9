"""Which of the processes of a distributed job this one is."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Rank:
    """This process among those of a job, by the launcher's environment variables.

    Args:
        number: 0 .. of - 1.
        of: how many there are; 1 where there is no job.
        job: the same text in all processes of a job; "" where there is none.
    """

    number: int = 0
    of: int = 1
    job: str = ""

    @property
    def folder(self) -> str:
        """Of its own in the job's directory; "" where there is no job."""
        return f"rank{self.number}" if self.of > 1 else ""

    @classmethod
    def of_environment(cls) -> Rank:
        """By RANK and WORLD_SIZE, as torchrun and its like set them before the script begins."""
        try:
            number, of = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        except (KeyError, ValueError):
            return cls()
        if of < 2 or number < 0:
            return cls()
        names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
        return cls(number, of, " ".join(os.environ.get(name, "") for name in names))
