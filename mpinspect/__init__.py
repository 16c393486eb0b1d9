"""mpinspect: what mixed precision does to a model's numbers, layer by layer.

with mpinspect.Inspector(model, optimizers=optimizer, scalers=scaler) as inspector:
    train()
print(inspector.report())
"""

from importlib import import_module
from typing import TYPE_CHECKING

from mpinspect.version import __version__

if TYPE_CHECKING:
    from mpinspect.analysis import recommend_loss_scale
    from mpinspect.analysis.kernel_names import KernelVerdict, classify_kernel
    from mpinspect.analysis.shapes import ShapeReport
    from mpinspect.analysis.tensor_cores import KernelReport
    from mpinspect.counting import count_exponents
    from mpinspect.emulation import half_arithmetic
    from mpinspect.exponents import ExponentHistogram
    from mpinspect.formats import (
        BFLOAT16,
        FLOAT4_E2M1,
        FLOAT8_E4M3,
        FLOAT8_E5M2,
        FLOAT16,
        FLOAT32,
        TFLOAT32,
        FloatFormat,
    )
    from mpinspect.inspector import Inspector, MpinspectWarning
    from mpinspect.kernel_profile import profile_kernels, read_trace
    from mpinspect.mixed_precision import MixedPrecision
    from mpinspect.probing import probe
    from mpinspect.recorder import Recorder
    from mpinspect.session import Session
    from mpinspect.shape_lint import lint_shapes
    from mpinspect.training.loss_scaler import LossScaler

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
    "count_exponents",
    "half_arithmetic",
    "lint_shapes",
    "probe",
    "profile_kernels",
    "read_trace",
    "recommend_loss_scale",
]

#: Names found when they are used, and where they are. Importing the package loads neither torch nor NumPy: `mpinspect run` must
#: not, before the script has said in its environment how many threads they may have; and a saved session is read without torch.
_WHEN_USED = {
    "BFLOAT16": "formats",
    "FLOAT4_E2M1": "formats",
    "FLOAT8_E4M3": "formats",
    "FLOAT8_E5M2": "formats",
    "FLOAT16": "formats",
    "FLOAT32": "formats",
    "TFLOAT32": "formats",
    "ExponentHistogram": "exponents",
    "FloatFormat": "formats",
    "Inspector": "inspector",
    "KernelReport": "analysis.tensor_cores",
    "KernelVerdict": "analysis.kernel_names",
    "LossScaler": "training.loss_scaler",
    "MixedPrecision": "mixed_precision",
    "MpinspectWarning": "inspector",
    "Recorder": "recorder",
    "Session": "session",
    "ShapeReport": "analysis.shapes",
    "classify_kernel": "analysis.kernel_names",
    "count_exponents": "counting",
    "half_arithmetic": "emulation",
    "lint_shapes": "shape_lint",
    "probe": "probing",
    "profile_kernels": "kernel_profile",
    "read_trace": "kernel_profile",
    "recommend_loss_scale": "analysis",
}


def __getattr__(name: str) -> object:
    if name not in _WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"{__name__}.{_WHEN_USED[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
