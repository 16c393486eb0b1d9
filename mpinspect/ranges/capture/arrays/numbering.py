"""Which step an array belongs to, from the numbers that come with the arrays, if any do."""

from __future__ import annotations


class StepNumbers:
    """Step numbers that only grow, whatever numbers are given: a loop that counts from 0 in each epoch goes on.

    ``number`` is that of the open step, or of the last one; ``count`` how many have begun.
    """

    def __init__(self) -> None:
        self.number = -1
        self.first = 0
        self.count = 0
        self.is_open = False
        #: What was given for ``number``; None if nothing was.
        self.given: int | None = None

    @property
    def span(self) -> int:
        """Steps from the first to this one, those in which nothing was observed included."""
        return self.number - self.first + 1 if self.count else 0

    def belongs(self, given: int | None) -> bool:
        """Whether something observed with this number belongs to the step that is open."""
        return self.is_open and (given is None or self.given is None or given == self.given)

    def went_back(self, given: int | None) -> bool:
        """Whether this number is smaller than the one before."""
        return given is not None and self.given is not None and given < self.given

    def stay(self, given: int | None) -> None:
        """Something more of the open step."""
        if self.given is None:
            self.given = given

    def begin(self, given: int | None) -> None:
        """Another step begins."""
        if not self.count:
            self.number = self.first = max(given or 0, 0)
        elif given is None or self.given is None:
            self.number += 1
        else:
            self.number += max(given - self.given, 1)
        self.count += 1
        self.is_open = True
        self.given = given

    def end(self) -> None:
        """The open step is over."""
        self.is_open = False
