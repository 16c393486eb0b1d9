"""mpinspect: what mixed precision does to a model's numbers, layer by layer.

with mpinspect.Inspector(model, optimizers=optimizer, scalers=scaler) as inspector:
    train()
print(inspector.report())
"""

from mpinspect.analysis import recommend_loss_scale
from mpinspect.counting import count_exponents
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
from mpinspect.probe import probe
from mpinspect.session import Session
from mpinspect.version import __version__

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
    "MpinspectWarning",
    "Session",
    "__version__",
    "count_exponents",
    "probe",
    "recommend_loss_scale",
]
