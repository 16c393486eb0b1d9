"""The windows of a run that goes on: as many as are wanted, however long it gets, and never much work at once."""

from __future__ import annotations

from mpinspect.ranges.session import Window, merge_windows


class WindowList:
    """Fewer than twice ``limit`` windows of about one length, every total kept exactly.

    ``session.coarsen`` would merge all of them at a time, which takes a second where there are a thousand tensors. Here the
    wanted length doubles when there are too many windows, and from then on each that comes has one pair of neighbours merged.
    """

    def __init__(self) -> None:
        self._windows: list[Window] = []
        #: Sampled steps that a window should have.
        self.length = 1
        #: Windows before this one have been looked at since the length doubled; None: all have.
        self._looked_at: int | None = None

    def add(self, window: Window, limit: int) -> None:
        """Take a window that follows on the last; merges at most two pairs."""
        self.length = max(self.length, window.sampled_steps)
        if self._windows and self._fit(self._windows[-1], window):
            self._windows[-1] = merge_windows(self._windows[-1], window)
        else:
            self._windows.append(window)
        if self._looked_at is not None:
            self._merge_a_pair()
        while len(self._windows) >= 2 * limit:
            self.length *= 2
            self._looked_at = 0
            self._merge_a_pair()

    def __len__(self) -> int:
        return len(self._windows)

    def as_tuple(self) -> tuple[Window, ...]:
        """In the order of their steps."""
        return tuple(self._windows)

    def _merge_a_pair(self) -> None:
        for index in range(self._looked_at or 0, len(self._windows) - 1):
            if self._fit(*self._windows[index : index + 2]):
                self._windows[index : index + 2] = [merge_windows(*self._windows[index : index + 2])]
                self._looked_at = index
                return
        self._looked_at = None

    def _fit(self, first: Window, second: Window) -> bool:
        # A window without a sample still counts as one, else any number of them would pass for few.
        return max(first.sampled_steps, 1) + max(second.sampled_steps, 1) <= self.length
