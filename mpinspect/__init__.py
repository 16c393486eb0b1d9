"""mpinspect: what mixed precision does to a model's numbers, layer by layer.

with mpinspect.Inspector(model, optimizers=optimizer, scalers=scaler) as inspector:
    train()
print(inspector.report())
"""

from mpinspect.runtime.version import __version__

# ``typing`` is not imported, since that takes longer than the rest; type checkers treat a variable of this name as True.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from mpinspect.counting import count_exponents
    from mpinspect.counting.blocks import count_blocks
    from mpinspect.kernels.analysis import KernelReport
    from mpinspect.kernels.names import KernelVerdict, classify_kernel
    from mpinspect.kernels.profile import profile_kernels, read_trace
    from mpinspect.numeric.exponents import ExponentHistogram
    from mpinspect.numeric.formats import (
        BFLOAT16,
        FLOAT4_E2M1,
        FLOAT8_E4M3,
        FLOAT8_E5M2,
        FLOAT16,
        FLOAT32,
        TFLOAT32,
        FloatFormat,
    )
    from mpinspect.ranges.analysis.loss_scale import recommend_loss_scale
    from mpinspect.ranges.inspector import Inspector, MpinspectWarning
    from mpinspect.ranges.probe import probe
    from mpinspect.ranges.rank_precision import rank_precision
    from mpinspect.ranges.recipes import compare_recipes
    from mpinspect.ranges.recorder import Recorder
    from mpinspect.ranges.second_opinion import second_opinion
    from mpinspect.ranges.session import Session
    from mpinspect.run.diff import diff
    from mpinspect.runtime.emulation import half_arithmetic
    from mpinspect.shapes.analysis import ShapeReport
    from mpinspect.shapes.lint import lint_shapes
    from mpinspect.training.loss_scaler import LossScaler
    from mpinspect.training.mixed_precision import MixedPrecision

__all__ = [
    "BFLOAT16",
    "FLOAT4_E2M1",
    "FLOAT8_E4M3",
    "FLOAT8_E5M2",
    "FLOAT16",
    "FLOAT32",
    "TFLOAT32",
    "ExponentHistogram",
    "FloatFormat",
    "Inspector",
    "KernelReport",
    "KernelVerdict",
    "LossScaler",
    "MixedPrecision",
    "MpinspectWarning",
    "Recorder",
    "Session",
    "ShapeReport",
    "__version__",
    "classify_kernel",
    "compare_recipes",
    "count_blocks",
    "count_exponents",
    "diff",
    "half_arithmetic",
    "lint_shapes",
    "probe",
    "profile_kernels",
    "rank_precision",
    "read_trace",
    "recommend_loss_scale",
    "second_opinion",
]

#: Names found when they are used, and where they are. Importing the package loads neither torch nor NumPy: `mpinspect run` must
#: not, before the script has said in its environment how many threads they may have; and a saved session is read without torch.
_WHEN_USED = {
    "BFLOAT16": "numeric.formats",
    "FLOAT4_E2M1": "numeric.formats",
    "FLOAT8_E4M3": "numeric.formats",
    "FLOAT8_E5M2": "numeric.formats",
    "FLOAT16": "numeric.formats",
    "FLOAT32": "numeric.formats",
    "TFLOAT32": "numeric.formats",
    "ExponentHistogram": "numeric.exponents",
    "FloatFormat": "numeric.formats",
    "Inspector": "ranges.inspector",
    "KernelReport": "kernels.analysis",
    "KernelVerdict": "kernels.names",
    "LossScaler": "training.loss_scaler",
    "MixedPrecision": "training.mixed_precision",
    "MpinspectWarning": "ranges.inspector",
    "Recorder": "ranges.recorder",
    "Session": "ranges.session",
    "ShapeReport": "shapes.analysis",
    "classify_kernel": "kernels.names",
    "compare_recipes": "ranges.recipes",
    "count_blocks": "counting.blocks",
    "count_exponents": "counting",
    "diff": "run.diff",
    "half_arithmetic": "runtime.emulation",
    "lint_shapes": "shapes.lint",
    "probe": "ranges.probe",
    "profile_kernels": "kernels.profile",
    "read_trace": "kernels.profile",
    "recommend_loss_scale": "ranges.analysis.loss_scale",
    "rank_precision": "ranges.rank_precision",
    "second_opinion": "ranges.second_opinion",
}


def __getattr__(name: str) -> object:
    if name not in _WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found: object = getattr(import_module(f"{__name__}.{_WHEN_USED[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
