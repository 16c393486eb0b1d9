"""Names our modules that stack checks look for among frames, in one place, so that a test can check that each exists.

A name of a module that no longer exists would silently match no frame.
"""

from __future__ import annotations

from types import FrameType

#: Packages that run scripts: their frames are never the script's.
RUNNING_SCRIPTS = ("mpinspect.run",)
#: Modules that wrap functions of torch: errors of these functions pass through them.
WRAPPING_TORCH = (
    "mpinspect.ranges.capture.optimizer_steps",
    "mpinspect.ranges.capture.scalers",
    "mpinspect.runtime.torch_calls",
)

#: Modules that must not be interrupted by detaching a model from its inspector.
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
#: Modules that write files, which involves no models and may take seconds.
WRITING_FILES = ("mpinspect.runtime.background",)

#: Modules of the recorder of matrix products, through which operators pass.
RECORDING_PRODUCTS = ("mpinspect.shapes.record",)


def is_of(frame: FrameType, modules: tuple[str, ...]) -> bool:
    """Return whether the frame runs code of these modules or packages."""
    name = str(frame.f_globals.get("__name__", ""))
    return any(name == module or name.startswith(f"{module}.") for module in modules)
