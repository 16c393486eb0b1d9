"""Modules of ours that are looked for by name among the frames of a stack: named here alone, and each is tested to exist.

A name that nothing bears any more would match no frame, without an error.
"""

from __future__ import annotations

from types import FrameType

#: Runs scripts: its frames are never the script's own.
RUNNING_SCRIPTS = ("mpinspect.run",)

#: Must not be interrupted by detaching a model from its inspector.
NOT_TO_BE_INTERRUPTED = (
    "mpinspect.counting",
    "mpinspect.kernels.capture",
    "mpinspect.kernels.report",
    "mpinspect.ranges.at_exit",
    "mpinspect.ranges.capture",
    "mpinspect.ranges.inspector",
    "mpinspect.ranges.report",
    "mpinspect.ranges.store",
    "mpinspect.reporting",
    "mpinspect.run.models.attaching",
    "mpinspect.run.models.inspected_models",
    "mpinspect.run.models.launched_inspector",
    "mpinspect.run.models.naming",
    "mpinspect.run.report",
    "mpinspect.runtime.guard",
    "mpinspect.runtime.hooks",
    "mpinspect.shapes.record",
    "mpinspect.shapes.report",
)
#: Writes files, which has nothing to do with models, and may take seconds.
WRITING_FILES = ("mpinspect.runtime.background",)

#: The way of an operator through the recorder of matrix products.
RECORDING_PRODUCTS = ("mpinspect.shapes.record",)
#: Copies tensors to count them, or is called for that.
COUNTING = (
    "mpinspect.counting",
    "mpinspect.kernels.capture",
    "mpinspect.ranges.capture",
    "mpinspect.runtime.distributed",
    "mpinspect.runtime.guard",
)
#: Calls the user's code: what that copies is the user's.
CALLING_THE_USER = ("mpinspect.runtime.hooks", "mpinspect.ranges.capture.scalers")


def is_of(frame: FrameType, modules: tuple[str, ...]) -> bool:
    """Return whether the frame runs code of these modules, or of what is in these packages."""
    name = str(frame.f_globals.get("__name__", ""))
    return any(name == module or name.startswith(f"{module}.") for module in modules)
