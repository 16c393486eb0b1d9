"""Saves and restores the state that a training pass changes: a model's values and flags, and random generators."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy


@dataclass(frozen=True)
class RandomState:
    """The state of every random generator that training commonly draws from."""

    torch_cpu: torch.Tensor
    torch_cuda: tuple[torch.Tensor, ...]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> RandomState:
        """Return the state of torch's generators (all GPUs' if CUDA is in use), ``random`` and NumPy's legacy one."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
        return cls(torch.get_rng_state(), tuple(cuda), random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Restore all generators to this state."""
        torch.set_rng_state(self.torch_cpu)
        for device, state in enumerate(self.torch_cuda):
            torch.cuda.set_rng_state(state, device)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


@dataclass(frozen=True)
class _ModuleState:
    module: torch.nn.Module
    training: bool
    parameters: dict[str, torch.nn.Parameter | None]
    buffers: dict[str, torch.Tensor | None]

    def restore(self) -> None:
        self.module.training = self.training
        # The dictionaries are public in torch, so refill them instead of replacing them.
        for held, kept in ((self.module._parameters, self.parameters), (self.module._buffers, self.buffers)):
            if _identities(held) != _identities(kept):
                held.clear()
                held.update(kept)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _TensorState:
    tensor: torch.Tensor
    value: torch.Tensor
    gradient: torch.Tensor | None
    requires_grad: bool

    def restore(self) -> None:
        # Use .data, so that the version counter does not change for a graph that the user still holds.
        self.tensor.data.copy_(self.value)
        if self.tensor.is_leaf:
            self.tensor.requires_grad_(self.requires_grad)
            self.tensor.grad = self.gradient


class ModelState:
    """A model's saved state: parameters, buffers, ``.grad`` (the same objects), requires_grad and train/eval flags.

    Holds a copy of all parameters and buffers on their device.

    Raises:
        ValueError: a parameter or buffer of a lazy module that has no shape yet.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = [
            _ModuleState(module, module.training, dict(module._parameters), dict(module._buffers))
            for module in model.modules()
        ]
        found = [*model.named_parameters(), *model.named_buffers()]
        for name, tensor in found:
            if is_lazy(tensor):
                raise ValueError(f"{name} has no shape yet (a lazy module): run one batch through the model first")
        self._tensors = [
            _TensorState(tensor, tensor.detach().clone(), tensor.grad if tensor.is_leaf else None, tensor.requires_grad)
            for _, tensor in found
        ]

    def restore(self) -> None:
        for module in self._modules:
            module.restore()
        for tensor in self._tensors:
            tensor.restore()


def _identities(tensors: dict[str, Any]) -> list[tuple[str, int]]:
    return [(name, id(tensor)) for name, tensor in tensors.items()]
