"""mpinspect: what mixed precision does to a model's numbers, layer by layer.

with mpinspect.Inspector(model, optimizers=optimizer, scalers=scaler) as inspector:
    train()
print(inspector.report())
"""

from importlib import import_module
from typing import TYPE_CHECKING

from mpinspect.analysis import recommend_loss_scale
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
from mpinspect.session import Session
from mpinspect.version import __version__

if TYPE_CHECKING:
    from mpinspect.counting import count_exponents
    from mpinspect.emulation import half_arithmetic
    from mpinspect.inspector import Inspector, MpinspectWarning
    from mpinspect.mixed_precision import MixedPrecision
    from mpinspect.probing import probe
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
    "LossScaler",
    "MixedPrecision",
    "MpinspectWarning",
    "Session",
    "__version__",
    "count_exponents",
    "half_arithmetic",
    "probe",
    "recommend_loss_scale",
]

#: Names that need torch, and where they are: found when they are used, so that a saved session is read without it.
_WITH_TORCH = {
    "Inspector": "inspector",
    "LossScaler": "training.loss_scaler",
    "MixedPrecision": "mixed_precision",
    "MpinspectWarning": "inspector",
    "count_exponents": "counting",
    "half_arithmetic": "emulation",
    "probe": "probing",
}


def __getattr__(name: str) -> object:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
