"""The torch side of a launch: from the import of torch to the recorded sessions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mpinspect.run.options import LaunchOptions
from mpinspect.run.seen import Parts, Seen

if TYPE_CHECKING:
    from mpinspect.run.models.watching import Watching


class Watcher:
    """Finds the models that a script trains and has them inspected. Made before torch is there; imports it for nobody.

    Args:
        options: the launch's.
        directory: each model gets a directory below it.
        say: writes a line to stderr.

    Attributes:
        sightings: what was seen so far, plain counts.
    """

    def __init__(self, options: LaunchOptions, directory: Path, say: Callable[[str], None]) -> None:
        self._options = options
        self._directory = directory
        self._say = say
        self._watching: Watching | None = None
        self._parts: Parts | None = None
        self._abandoned = False
        self.sightings = Seen()

    def install(self) -> None:
        """Begin to watch; called right after the script has imported torch. Twice does nothing."""
        if self._watching is not None or self._parts is not None or self._abandoned:
            return
        self.sightings.torch_imported = True
        try:
            from mpinspect.run.models.watching import Watching

            self._watching = Watching(self._options, self._directory, self._say, self.sightings)
            self._watching.install()
        except Exception as error:
            self.sightings.note(f"mpinspect could not begin to watch torch: {error!r}")

    def broke_off(self, error: BaseException) -> None:
        """An exception is about to end the script."""
        if self._watching is not None:
            self._watching.broke_off(error)

    def abandon(self) -> None:
        """This is a forked child: forget everything, write nothing, leave what is in the parent's models inert."""
        self._abandoned = True
        watching, self._watching = self._watching, None
        if watching is not None:
            try:
                watching.abandon()
            except Exception as error:
                self.sightings.note(f"mpinspect could not withdraw from a forked process: {error!r}")

    def finish(self) -> Parts:
        """Detach from everything (waits for the GPU) and hand over what was recorded. Never raises; twice gives the same."""
        if self._parts is not None:
            return self._parts
        watching, self._watching = self._watching, None
        self._parts = Parts(notes=[])
        if watching is not None and not self._abandoned:
            try:
                self._parts = watching.finish()
            except Exception as error:
                self._parts.notes.append(f"mpinspect failed while it finished: {error!r}")
        return self._parts
