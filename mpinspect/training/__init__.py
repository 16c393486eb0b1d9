"""Training in mixed precision: loss scaling, FP32 master weights, precisions. Does not depend on the inspector."""

from mpinspect.training.checkpoint import CheckpointError
from mpinspect.training.explain import ModelExplainer
from mpinspect.training.loss_scaler import LossScaleCollapsedError, LossScaler, LossScaleWarning
from mpinspect.training.masters import (
    BN_convert_float,
    master_params_to_model_params,
    model_grads_to_master_grads,
    prep_param_lists,
)
from mpinspect.training.precision import PRECISIONS
from mpinspect.training.skipped_steps import NonFinite, SkippedStep

__all__ = [
    "PRECISIONS",
    "BN_convert_float",
    "CheckpointError",
    "LossScaleCollapsedError",
    "LossScaleWarning",
    "LossScaler",
    "ModelExplainer",
    "NonFinite",
    "SkippedStep",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "prep_param_lists",
]
