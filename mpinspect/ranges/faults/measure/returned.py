"""Compares a model's FP32 weights where one training of it ends and the next begins, as of a client that exchanges weights."""

from __future__ import annotations

from itertools import islice

import torch

from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.records import ReturnedWeights
from mpinspect.runtime.wrappers import named_plainly

#: Maximum number of weights that are compared, and of elements of each.
_MOST_WEIGHTS, _MOST_ELEMENTS = 64, 256
#: The fewest distinct values that show a format: zeros and ones fit any.
_FEWEST_DISTINCT = 32


class WeightsAtStarts:
    """Holds a sample of a model's weights from the start of its last training, at most 64 kB on their device."""

    def __init__(self) -> None:
        self._last: torch.Tensor | None = None

    @torch.no_grad()
    def begins(self, model: torch.nn.Module) -> ReturnedWeights | None:
        """Return a record if a later training begins with weights that have the values of a 16-bit format alone.

        Does not wait for the device when the first training begins, and waits for it in later ones.
        """
        now = _sample(model)
        last, self._last = self._last, now
        if last is None or now is None or (last.shape, last.device) != (now.shape, now.device):
            return None
        if len(torch.unique(now)) < _FEWEST_DISTINCT:
            return None
        for dtype in (torch.bfloat16, torch.float16):
            if torch.equal(now.to(dtype).float(), now):
                equal = float((now == last).float().mean())
                return ReturnedWeights(text=dtype_name(dtype), equal=equal, of=now.numel())
        return None


def _sample(model: torch.nn.Module) -> torch.Tensor | None:
    """Return the first elements of FP32 weights as one tensor of their device, the first weight's; None without any."""
    parameters = (each for _, each in named_plainly(model, model.named_parameters()))
    weights = [each for each in parameters if is_plain(each) and each.dtype is torch.float32 and each.numel()]
    alike = (each for each in weights if each.device == weights[0].device and not each.is_meta)
    samples = [each.detach().flatten()[:_MOST_ELEMENTS] for each in islice(alike, _MOST_WEIGHTS)]
    return torch.cat(samples) if samples else None
