"""FP32 master weights: the optimizer updates the masters, and the model's half weights are their rounded copies.

`MasterWeights` manages masters for any model and optimizer. For training loops that manage masters by hand there are also
the four functions of NVIDIA's GTC 2018 talk on mixed precision in PyTorch, with the same names and arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from mpinspect.training.closures import held_parameters
from mpinspect.training.precision import (
    Precision,
    cast_state,
    check_convertible,
    convert_model,
    is_convertible,
    keeps_float32,
    stored_dtypes,
)
from mpinspect.training.transfer import copy_gradients, copy_gradients_flat, require_zeroed, unflatten

Tensor = torch.Tensor
#: Every existing master, held weakly.
_MASTERS: Any = WeakIdKeyDictionary()


class MasterWeights:
    """Holds FP32 master weights of every half parameter in the optimizers. Created by `MasterWeights.split`.

    Parameters that stay FP32 (such as BatchNorm's) are their own masters, as are optimizer parameters outside the model.
    Methods wait for the GPU only if their docstrings mention it.

    One step of training::

        masters.zero_grad()
        loss(model, batch).backward()
        masters.gradients_to_masters()
        optimizer.step()
        masters.masters_to_model()
    """

    def __init__(self, model: nn.Module, pairs: Mapping[Tensor, Tensor], own: Iterable[Tensor]) -> None:
        self._names: dict[Tensor, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(parameter, []).append(name)
        self._own = list(own)
        self._pairs: dict[Tensor, Tensor] = {}
        self._parameters: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, int] = {}
        self._add(pairs)

    @classmethod
    def split(
        cls, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], precision: Precision
    ) -> MasterWeights:
        """Create the masters, convert the model in place and put the masters into the optimizers.

        The masters hold the exact values that the weights had before the conversion; if the model is half already, its
        weights in FP32. Parameter groups, their order and options, and the optimizers' state stay; state moves to the
        masters, and half state becomes FP32. Frozen parameters get frozen masters. A parameter outside all optimizers is
        only converted. In a precision without masters (``"fp16-pure"``) the optimizers hold the parameters themselves, and
        existing state is cast to their dtype. If the precision stores FP32, this has no effect. Waits for the GPU.

        Raises:
            ValueError: the model can't be converted (see `check_convertible`); it is then unchanged.
        """
        optimizers = list(optimizers)
        check_convertible(model, precision)
        dtypes = stored_dtypes(model, precision)
        held = list(dict.fromkeys(parameter for optimizer in optimizers for parameter in held_parameters(optimizer)))
        halved = [parameter for parameter in held if dtypes.get(parameter, torch.float32) != torch.float32]
        pairs = {parameter: _master(parameter) for parameter in halved if precision.masters}
        for optimizer in optimizers:
            _exchange(optimizer, pairs)
        convert_model(model, precision, optimizers)
        return cls(model, pairs, (parameter for parameter in held if parameter not in pairs))

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Create masters for an optimizer's half parameters without a master, for example after ``add_param_group``."""
        held = held_parameters(optimizer)
        half = [p for p in held if p in self._names and is_convertible(p) and p.dtype != torch.float32]
        new = [p for p in half if p not in self._pairs]
        masters = {parameter: _master(parameter) for parameter in new}
        known = {id(tensor) for tensor in (*self._own, *self._pairs.values())}
        self._own += [p for p in held if p not in self._pairs and p not in masters and id(p) not in known]
        self._add(masters)
        _exchange(optimizer, self._pairs)

    def __len__(self) -> int:
        """Return how many parameters have a master of their own."""
        return len(self._pairs)

    def parameter_of(self, held: Tensor) -> Tensor:
        """Return the model parameter whose master is ``held``; ``held`` itself if it is not a master of this model."""
        return self._parameters.get(held, held)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return (model parameter, FP32 master) for every parameter that has a separate master."""
        return list(self._pairs.items())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the FP32 masters by their parameters' names in the model; a master of tied weights appears under every name.

        Parameters that are their own masters are left out: the model's own ``state_dict`` has them in FP32.
        """
        return {
            name: master.detach()
            for parameter, master in self._pairs.items()
            for name in self._names.get(parameter, [])
        }

    @torch.no_grad()
    def gradients_to_masters(self) -> None:
        """Overwrite each master's gradient with its parameter's, in FP32; None stays None.

        Sparse gradients are coalesced in FP32, so that sums of duplicate entries do not overflow.
        """
        copy_gradients(list(self._pairs), list(self._pairs.values()))

    @torch.no_grad()
    def masters_to_model(self) -> None:
        """Round the masters to the model's dtype."""
        if self._pairs:
            torch._foreach_copy_(list(self._pairs), list(self._pairs.values()))
        self._note_versions(self._pairs)

    @torch.no_grad()
    def model_to_masters(self) -> None:
        """Overwrite the masters with the model's weights, as needed after ``model.load_state_dict`` or a broadcast."""
        if self._pairs:
            torch._foreach_copy_(list(self._pairs.values()), list(self._pairs))
        self._note_versions(self._pairs)

    def changed_in_model(self) -> list[str]:
        """Return the names of half parameters that were written in place since they were last in sync with their masters.

        The next `masters_to_model` overwrites such a change unless `model_to_masters` is called first. Writes through
        ``parameter.data`` are not detected.
        """
        return [self._name(parameter) for parameter, version in self._versions.items() if parameter._version != version]

    def differs_from_model(self) -> bool:
        """Return whether any model weight differs from its rounded master. Waits for the GPU."""
        return any(not torch.equal(parameter, master.to(parameter.dtype)) for parameter, master in self._pairs.items())

    @torch.no_grad()
    def take_changes(self) -> None:
        """Copy changed elements of the model's weights to the masters; other masters retain their full precision."""
        for parameter, master in self._pairs.items():
            master.copy_(torch.where(master.to(parameter.dtype) == parameter, master, parameter.float()))
        self.note_agreement()

    def note_agreement(self) -> None:
        """Mark model and masters as in sync, so that `changed_in_model` reports only later writes."""
        self._note_versions(self._pairs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients of the masters and of the model parameters that the optimizers hold."""
        for tensor in (*self._pairs, *self._pairs.values(), *self._own):
            if tensor.grad is None:
                continue
            if set_to_none:
                tensor.grad = None
            else:
                tensor.grad.detach_()
                tensor.grad.zero_()

    def check_zeroed(self) -> None:
        """Raise if gradients already copied to the masters were not zeroed in the model; call before the next backward.

        Reads gradient values, which waits for the GPU, only if a gradient is the same tensor, unwritten since the copy.

        Raises:
            RuntimeError: the next backward would add to gradients that were already copied to the masters.
        """
        require_zeroed(((self._name(parameter), parameter) for parameter in self._pairs), writes=0)

    def load_state_dict(self, weights: Mapping[str, Tensor]) -> None:
        """Load the masters by name from `state_dict` or an FP32 model's ``state_dict``, then round them into the model.

        Other names are ignored.

        Raises:
            ValueError: a name is missing or a shape differs; the masters are then unchanged.
        """
        masters = self.state_dict()
        for name, master in masters.items():
            if name not in weights:
                raise ValueError(f"{name!r} is missing: these are not the weights of this model")
            if weights[name].shape != master.shape:
                shapes = f"{tuple(weights[name].shape)}, not {tuple(master.shape)}"
                raise ValueError(f"{name!r} has the shape {shapes}: these are not the weights of this model")
        with torch.no_grad():
            for name, master in masters.items():
                master.copy_(weights[name])
        self.masters_to_model()

    def _name(self, parameter: Tensor) -> str:
        return self._names.get(parameter, ["a parameter that the model does not have"])[0]

    def _add(self, pairs: Mapping[Tensor, Tensor]) -> None:
        self._pairs.update(pairs)
        self._parameters.update((master, parameter) for parameter, master in pairs.items())
        self._note_versions(pairs)

    def _note_versions(self, parameters: Iterable[Tensor]) -> None:
        self._versions.update({parameter: parameter._version for parameter in parameters})


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Return a model's trainable parameters, and their FP32 master copies for the optimizer.

    Args:
        model: a model already converted to half (``BN_convert_float(model.half())``), or an FP32 model.
        flat_master: if True, one 1-d master holds all the weights in the order of the list.

    Returns:
        ``model_params, master_params``; with ``flat_master``, ``master_params`` has one element.

    Raises:
        ValueError: ``flat_master`` without parameters, or with parameters of several dtypes.
    """
    model_params: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not flat_master:
        return model_params, [_master(parameter) for parameter in model_params]
    dtypes = sorted({str(parameter.dtype) for parameter in model_params})
    if len(dtypes) != 1:
        found = " and ".join(dtypes) or "no parameters at all"
        raise ValueError(
            f"flat_master=True needs parameters of one dtype, the model has {found}; use flat_master=False"
        )
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model_params])
    return model_params, [_master(flat.requires_grad_())]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the model's gradients to the masters', in FP32.

    A gradient of None stays None; with ``flat_master``, which has one gradient for all, it becomes zeros.

    Raises:
        RuntimeError: the backward added to a gradient that had already been copied: ``optimizer.zero_grad()`` zeroes only
            the masters' gradients. Detected only after exactly one backward, and if gradients are not views of a bucket.
    """
    _require_flat(model_params, master_params, flat_master)
    # A backward writes to a gradient once; zeroing plus a backward writes twice, or creates a new tensor.
    require_zeroed(((f"model_params[{index}]", parameter) for index, parameter in enumerate(model_params)), writes=1)
    if flat_master:
        copy_gradients_flat(model_params, master_params[0])
    else:
        copy_gradients(model_params, master_params)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the masters to the model's parameters, rounding to the parameters' dtype."""
    _require_flat(model_params, master_params, flat_master)
    masters = list(master_params)
    if flat_master:
        masters = unflatten(master_params[0], model_params)
    if masters:
        torch._foreach_copy_(list(model_params), masters)


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Convert every BatchNorm and InstanceNorm of a module back to FP32, in place; for a model after ``.half()``.

    Unlike apex's function of this name, this also converts BatchNorm with ``affine=False``, and InstanceNorm. Both may have
    running statistics, which can overflow FP16 whatever the weights are: with inputs of variance 160,000, ``running_var``
    becomes infinite within ten steps, and the layer returns zeros in evaluation.

    Returns:
        The module.
    """
    for layer in module.modules():
        if keeps_float32(layer):
            layer.float()
    return module


def is_master(tensor: Tensor) -> bool:
    """Return whether the tensor is a master created by this module."""
    return tensor in _MASTERS


def _master(parameter: Tensor) -> Tensor:
    copy = parameter.detach().to(torch.float32, copy=True)
    master = nn.Parameter(copy, requires_grad=parameter.requires_grad)
    _MASTERS[master] = True
    return master


def _require_flat(model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool) -> None:
    wanted, hint = len(model_params), "pass flat_master=True here as to prep_param_lists"
    if flat_master:
        wanted, hint = 1, "flat_master=True needs one"
    if len(master_params) != wanted:
        raise ValueError(f"there are {len(model_params)} model_params and {len(master_params)} master_params: {hint}")


def _exchange(optimizer: torch.optim.Optimizer, masters: Mapping[Tensor, Tensor]) -> None:
    """Replace parameters by their masters in an optimizer's groups, and move their state to the masters."""
    for parameters in _parameter_lists(optimizer):
        parameters[:] = [masters.get(parameter, parameter) for parameter in parameters]
    state = list(optimizer.state.items())
    optimizer.state.clear()
    for parameter, value in state:
        master = masters.get(parameter, parameter)
        optimizer.state[master] = value
        if parameter in masters:
            cast_state(optimizer, master, parameter.dtype, master.dtype)


def _parameter_lists(optimizer: torch.optim.Optimizer) -> Iterator[list[Any]]:
    """Yield every parameter list of an optimizer: its groups' lists and extra attributes such as ``_params`` of LBFGS."""
    yield from (group["params"] for group in optimizer.param_groups)
    for name, value in vars(optimizer).items():
        if name != "param_groups" and isinstance(value, list) and all(isinstance(item, Tensor) for item in value):
            yield value
