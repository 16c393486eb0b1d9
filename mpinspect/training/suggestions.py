"""Switches of torch that would make this training faster: a pure function of what was seen of it."""

from __future__ import annotations

from dataclasses import dataclass

#: Compute capability from which GPUs have TF32 (Ampere).
_TF32_FROM = (8, 0)
#: Steps of one shape before it is called constant.
_SEVERAL = 10


@dataclass(frozen=True)
class Seen:
    """What was seen of a training run.

    Args:
        device: torch.device.type of the model.
        capability: the GPU's compute capability; None without one.
        forwards: training forwards seen.
        input_shapes: how many different shapes of inputs they had.
        has_convolutions: whether the model has any.
        float32_fraction: the share of the weights that are multiplied in FP32, 0..1.
        cudnn_benchmark, tf32_matmul, tf32_convolution: torch's switches as they stand.
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
    """Sentences, the code to write included; none where there is nothing to gain, or no GPU."""
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
