"""Cross-entropy of half logits that keeps the half logits for its backward, not their FP32 log-softmax.

Under autocast the logits are half, their log-softmax is computed in FP32 and kept in FP32: for a vocabulary of 50,257 that
is 200 kB a token, the largest tensor that a small language model keeps. It follows from the logits, which are kept as it is
computed once more in the backward; values and gradients are the same to the last bit.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mpinspect.training.recompute import recomputed

_HALVES = (torch.float16, torch.bfloat16)


class LeanCrossEntropy(TorchFunctionMode):
    """Within the block ``F.cross_entropy``, and so ``nn.CrossEntropyLoss``, of half logits under autocast keeps no FP32.

    Everything else runs as ever: FP32 logits, and code that torch.compile compiles, which chooses itself what to keep.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.cross_entropy:
            return _cross_entropy(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _cross_entropy(
    input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, *rest: Any, **options: Any
) -> torch.Tensor:
    lean = input.dtype in _HALVES and torch.is_autocast_enabled(input.device.type)
    if not lean or torch.compiler.is_compiling():
        return F.cross_entropy(input, target, weight, *rest, **options)
    return recomputed(partial(_in_float32, rest, options), input, target, weight)


def _in_float32(
    rest: tuple[Any, ...],
    options: dict[str, Any],
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
) -> torch.Tensor:
    soft = target.float() if target.is_floating_point() else target
    return F.cross_entropy(input.float(), soft, None if weight is None else weight.float(), *rest, **options)
