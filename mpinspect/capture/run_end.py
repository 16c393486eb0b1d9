"""The end of a run that nobody ends: the script is over, or the model is given up."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

from mpinspect.capture.recording import Recording, warn
from mpinspect.capture.tally import Tally

if TYPE_CHECKING:
    from mpinspect.capture.capture import Capture


def end_unattended(capture: Capture, tally: Tally, recording: Recording) -> weakref.finalize[..., Capture]:
    """From now on, unless the result's ``detach`` is called: what was recorded is written at the interpreter's end, or sooner
    if nothing but this knows ``capture`` any more. In a forked child nothing is done."""
    return weakref.finalize(capture, _end, weakref.ref(capture), tally, recording, os.getpid())


def _end(capture: weakref.ref[Capture], tally: Tally, recording: Recording, process: int) -> None:
    if process != os.getpid():
        return
    try:
        alive = capture()
        if alive is not None:
            alive.detach()
        else:
            window = tally.close_window(wait=True)
            if window is not None:
                recording.add_window(window)
        # The garbage collector may call this anywhere, under any lock. At the interpreter's end nothing is left to wait for.
        recording.close(wait=False)
    except Exception as error:
        warn(f"the inspector did not end as it should: {error!r}; what it wrote until then is in its log_dir")
