"""Which shapes a model's training forwards had: what cuDNN's benchmark mode needs to know."""

from __future__ import annotations

from typing import Any

import torch

from mpinspect.training.suggestions import Seen

#: Shapes kept; a model with more has no constant one.
_MOST_SHAPES = 16


class ForwardShapes:
    """Counts the training forwards of a model and the different shapes of their inputs. One cheap hook, on the model itself."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._forwards = 0
        self._shapes: set[tuple[torch.Size, ...]] = set()
        self._convolutions = any(isinstance(module, torch.nn.modules.conv._ConvNd) for module in model.modules())
        self._handle = model.register_forward_pre_hook(_Hook(self), with_kwargs=True)

    def seen(self, device: str, float32_fraction: float) -> Seen:
        """What was seen until now, with torch's switches as they stand."""
        capability = torch.cuda.get_device_capability() if device == "cuda" else None
        return Seen(
            device,
            capability,
            self._forwards,
            len(self._shapes),
            self._convolutions,
            float32_fraction,
            torch.backends.cudnn.benchmark,
            _allows_tf32(torch.backends.cuda.matmul),
            _allows_tf32(torch.backends.cudnn),
        )

    def look(self, inputs: Any) -> None:
        """A training forward begins."""
        self._forwards += 1
        if len(self._shapes) < _MOST_SHAPES:
            leaves = torch.utils._pytree.tree_leaves(inputs)
            self._shapes.add(tuple(leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor)))

    def detach(self) -> None:
        self._handle.remove()


def _allows_tf32(backend: Any) -> bool:
    try:
        return bool(backend.allow_tf32)
    except RuntimeError:
        # Since torch 2.9 there is a second switch, and reading the old one raises where the new one was set.
        return getattr(backend, "fp32_precision", "") == "tf32"


class _Hook:
    """The hook; in a copy of the model (an average of its weights, say) it does nothing, and it pickles to nothing."""

    def __init__(self, shapes: ForwardShapes | None = None) -> None:
        self._shapes = shapes

    def __call__(self, module: torch.nn.Module, inputs: Any, named: Any) -> None:
        if self._shapes is not None and module.training and not torch.compiler.is_compiling():
            self._shapes.look((inputs, named))

    def __deepcopy__(self, memo: object) -> _Hook:
        return _Hook()

    def __reduce__(self) -> Any:
        return _Hook, ()
