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
    """Holds samples of a model's weights from the start of its last training."""

    def __init__(self) -> None:
        self._last: torch.Tensor | None = None

    def begins(self, model: torch.nn.Module) -> ReturnedWeights | None:
        """Return a record if a later training begins with weights that have the values of a 16-bit format alone.

        Waits for the device.
        """
        parameters = named_plainly(model, model.named_parameters())
        weights = (each for _, each in parameters if each.dtype is torch.float32 and is_plain(each) and each.numel())
        samples = [each.detach().flatten()[:_MOST_ELEMENTS].cpu() for each in islice(weights, _MOST_WEIGHTS)]
        now = torch.cat(samples) if samples else None
        last, self._last = self._last, now
        if last is None or now is None or last.shape != now.shape or len(torch.unique(now)) < _FEWEST_DISTINCT:
            return None
        for dtype in (torch.bfloat16, torch.float16):
            if torch.equal(now.to(dtype).float(), now):
                equal = float((now == last).float().mean())
                return ReturnedWeights(text=dtype_name(dtype), equal=equal, of=now.numel())
        return None
