"""Whether a tensor is a parameter, a view of one, or a cast or copy of one: by its storage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mpinspect.shapes.record.modules import plain_path


class Parameters:
    """The parameters of a model that runs on stand-ins.

    Args:
        model: the model itself; its parameters may be tied, so one has several names.
        stand_ins: by the id of the parameter that they stand for.
    """

    def __init__(self, model: torch.nn.Module, stand_ins: Mapping[int, torch.Tensor]) -> None:
        self._names: dict[int, list[str]] = {}
        self._owned: dict[tuple[int, int], str] = {}
        self._local: dict[tuple[int, str], str] = {}
        self._storages: dict[int, int] = {}
        #: Storages are known by their address, which is used again once nothing holds them.
        self._held: list[StorageWeakRef] = []
        by_id = {id(tensor): tensor for tensor in stand_ins.values()}
        for path, module in model.named_modules(remove_duplicate=True):
            for local, parameter in module._parameters.items():
                if parameter is None or id(parameter) not in by_id:
                    continue
                name = plain_path(f"{path}.{local}" if path else local)
                self._names.setdefault(id(parameter), []).append(name)
                self._owned[id(parameter), id(module)] = name
                self._local[id(module), local] = name
                self._hold(parameter, id(parameter))

    def name(self, tensor: Any, module: int) -> str:
        """Dotted name of the parameter whose memory a tensor shows, the module's own if it is tied; "" if none."""
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return ""
        key = self._storages.get(tensor.untyped_storage()._cdata)
        if key is None:
            return ""
        return self._owned.get((key, module)) or self._names[key][0]

    def local(self, module: int, name: str) -> str:
        """The dotted name of a module's own parameter; "" if it has none of that name."""
        return self._local.get((module, name), "")

    def derive(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """The result is a cast or a copy of the source: it stands for the same parameter."""
        if source.layout is not torch.strided:
            return
        key = self._storages.get(source.untyped_storage()._cdata)
        if key is not None and result.layout is torch.strided:
            self._hold(result, key)

    def _hold(self, tensor: torch.Tensor, key: int) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        # A weak reference keeps the address without the memory.
        self._held.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        self._storages[storage._cdata] = key
