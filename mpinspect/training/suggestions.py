"""Suggests torch settings that would make a training run faster: a pure function of observations of the run."""

from __future__ import annotations

from dataclasses import dataclass

#: The lowest compute capability with TF32 (Ampere).
_TF32_FROM = (8, 0)
#: Number of forwards with one input shape from which the shape counts as constant.
_SEVERAL = 10


@dataclass(frozen=True)
class Seen:
    """Observations of a training run.

    Args:
        device: torch.device.type of the model.
        capability: the GPU's compute capability; None without a GPU.
        forwards: number of training forwards observed.
        input_shapes: number of distinct input shapes among these forwards.
        has_convolutions: whether the model has convolutions.
        float32_fraction: the share of the weights that are multiplied in FP32, 0..1.
        cudnn_benchmark, tf32_matmul, tf32_convolution: the current values of torch's settings.
    """

    device: str
    capability: tuple[int, int] | None
    forwards: int
    input_shapes: int
    has_convolutions: bool
    float32_fraction: float
    cudnn_benchmark: bool
    tf32_matmul: bool
    tf32_convolution: bool


def suggestions(seen: Seen) -> list[str]:
    """Return sentences with the code to write; empty if no setting would help, or without a CUDA GPU."""
    found: list[str] = []
    if seen.device != "cuda":
        return found
    if seen.has_convolutions and not seen.cudnn_benchmark and seen.forwards >= _SEVERAL and seen.input_shapes == 1:
        found.append(
            f"every one of the {seen.forwards} forwards seen had inputs of the same shape: "
            "torch.backends.cudnn.benchmark = True lets cuDNN choose its fastest convolutions once"
        )
    if seen.capability is None or seen.capability < _TF32_FROM or seen.float32_fraction < 0.1:
        return found
    work = f"{seen.float32_fraction:.0%} of the weights are multiplied in FP32"
    if not seen.tf32_matmul:
        found.append(f"{work}: torch.backends.cuda.matmul.allow_tf32 = True puts those products on Tensor Cores")
    if seen.has_convolutions and not seen.tf32_convolution:
        found.append(f"{work}: torch.backends.cudnn.allow_tf32 = True puts those convolutions on Tensor Cores")
    return found
