"""What has been observed of the step that is open."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpinspect.ranges.capture.arrays.samples import ArraySample
from mpinspect.ranges.kinds import GRADIENT_KINDS
from mpinspect.ranges.session import TensorKey, TensorWindow, Window, merge_tensor_windows


@dataclass
class OpenStep:
    """A step's samples, merged when it ends."""

    number: int
    sampled: bool
    parts: dict[TensorKey, list[TensorWindow]] = field(default_factory=dict)
    #: The loss scales of its gradients, in the order seen.
    scales: dict[float | None, None] = field(default_factory=dict)
    peak: int | None = None

    def add(self, sample: ArraySample) -> None:
        """One more array."""
        self.parts.setdefault(sample.key, []).append(sample.window)
        if sample.key.kind in GRADIENT_KINDS:
            self.scales[sample.scale] = None
            if sample.peak is not None:
                self.peak = sample.peak if self.peak is None else max(self.peak, sample.peak)

    @property
    def has_gradients(self) -> bool:
        return bool(self.scales)

    def window(self) -> Window | None:
        """The step as a window; None if nothing was counted in it."""
        if not self.parts:
            return None
        tensors = {key: merge_tensor_windows(parts) for key, parts in self.parts.items()}
        return Window(self.number, self.number, 1, tensors, {} if self.peak is None else {self.peak: 1})
