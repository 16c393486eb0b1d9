"""Determine a product's module, the parameter it multiplies, and the gradient it computes.

Module: in the forward, the innermost running call; in the backward, the call whose forward made the autograd node.
Parameter: the one whose storage the product reads. Gradient: for out = a @ b, the gradient of a is grad @ b.T and the
gradient of b is a.T @ grad (torch/csrc/autograd/FunctionsManual.cpp), so the sizes distinguish them. If the sizes are equal,
a parameter that the backward reads is not the one whose gradient the product computes. Memory addresses cannot distinguish
them: checkpointing frees activations, and other tensors reuse their memory. A parameter's gradient is a wgrad, an
activation's gradient is a dgrad.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr

from mpinspect.runtime.storages import StorageReference, storage_key
from mpinspect.shapes.records import Matmul


def plain_path(path: str) -> str:
    """Remove the parts that torch.compile's wrappers add to a dotted path."""
    if "_orig_mod" not in path:
        return path
    return ".".join(step for step in path.split(".") if step != "_orig_mod")


def joined(path: str, name: str) -> str:
    """Return the dotted path of a module's attribute, without the wrappers' parts; ``path`` is "" for the model itself."""
    return plain_path(f"{path}.{name}".removeprefix("."))


class ModuleCalls:
    """Follow the calls of a model's modules.

    Autograd numbers its nodes in the order of their creation (sequence numbers, counted per thread). The sequence numbers at the
    start and end of each call give, for any node, the innermost module whose forward made the node.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.paths = {id(module): plain_path(path) for path, module in model.named_modules()}
        self.types = {id(module): type(module).__name__ for module in model.modules()}
        self._modules = {id(module): module for module in model.modules()}
        self._root = id(model)
        self._running: list[int] = []
        self._numbers: list[int] = []
        self._owners: list[int] = []
        self._thread = threading.get_ident()
        self._failed: tuple[BaseException, str] | None = None

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Register hooks on every module within the block, around the user's own hooks."""
        handles = []
        for module in self._modules.values():
            # The module inside torch.compile's wrapper has hooks too, which suffice. TorchScript's modules accept no hooks.
            if hasattr(module, "_orig_mod") or isinstance(module, torch.jit.ScriptModule):
                continue
            handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def current(self) -> int:
        """Return the id of the innermost running module; the model's id between calls."""
        return next(reversed(self._running), self._root)

    @property
    def any_running(self) -> bool:
        """Return whether a module's forward is running."""
        return bool(self._running)

    def of_node(self, number: int) -> int:
        """Return the id of the module whose forward made the autograd node with this sequence number."""
        place = bisect_right(self._numbers, number)
        return self._owners[place - 1] if place else self._root

    def module(self, key: int) -> torch.nn.Module:
        """Return the module with this id."""
        return self._modules[key]

    def where_failed(self, error: BaseException) -> str | None:
        """Return the dotted path of the innermost module that raised an exception; None if no module raised it."""
        seen: BaseException | None = error
        while seen is not None:
            if self._failed is not None and self._failed[0] is seen:
                return self._failed[1]
            seen = seen.__cause__ or seen.__context__
        return None

    def _enter(self, module: torch.nn.Module, _args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._running.append(id(module))
        self._mark()

    def _leave(self, module: torch.nn.Module, _args: Any, _output: Any) -> None:
        if threading.get_ident() != self._thread or not self._running:
            return
        error = sys.exc_info()[1]
        if error is not None and (self._failed is None or self._failed[0] is not error):
            self._failed = (error, self.paths[self._running[-1]])
        self._running.pop()
        self._mark()

    def _mark(self) -> None:
        self._numbers.append(_get_sequence_nr())
        self._owners.append(self.current)


class Parameters:
    """Recognise a model's parameters, also as views, casts or copies, while the model runs on stand-in tensors.

    Args:
        model: the model itself; tied parameters have several names.
        stand_ins: the tensors that the model runs on, by the id of the parameter that each replaces.
    """

    def __init__(self, model: torch.nn.Module, stand_ins: Mapping[int, torch.Tensor]) -> None:
        self._names: dict[int, list[str]] = {}
        self._owned: dict[tuple[int, int], str] = {}
        self._local: dict[tuple[int, str], str] = {}
        #: The parameters' ids, by the keys of the storages that have their values.
        self._storages: dict[int, tuple[StorageReference, int]] = {}
        by_id = {id(tensor): tensor for tensor in stand_ins.values()}
        for path, module in model.named_modules(remove_duplicate=True):
            for local, parameter in module._parameters.items():
                if parameter is None or id(parameter) not in by_id:
                    continue
                name = joined(path, local)
                self._names.setdefault(id(parameter), []).append(name)
                self._owned[id(parameter), id(module)] = name
                self._local[id(module), local] = name
                self._hold(parameter, id(parameter))

    def name(self, tensor: Any, module: int) -> str:
        """Return the name of the parameter that shares a tensor's memory (for a tied one, its name in ``module``), or ""."""
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return ""
        key = self._known(tensor)
        if key is None:
            return ""
        return self._owned.get((key, module)) or self._names[key][0]

    def local(self, module: int, name: str) -> str:
        """Return the dotted name of a module's own parameter; "" if the module has no parameter of this name."""
        return self._local.get((module, name), "")

    def derive(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """Record that a result is a cast or copy of the source, so that both count as the same parameter."""
        if source.layout is not torch.strided:
            return
        key = self._known(source)
        if key is not None and result.layout is torch.strided:
            self._hold(result, key)

    def _hold(self, tensor: torch.Tensor, key: int) -> None:
        if tensor.layout is not torch.strided:
            return
        self._storages[storage_key(tensor)] = StorageReference(tensor), key

    def _known(self, tensor: torch.Tensor) -> int | None:
        """Return the id of the parameter that has a tensor's memory, or had its values before a cast or copy."""
        storage, key = self._storages.get(storage_key(tensor), (None, None))
        return None if storage is None or storage.expired() else key


@dataclass(frozen=True, slots=True)
class Forward:
    """The facts about a product of the forward that the backward needs.

    Args:
        module: id of its module.
        sizes: m, n and k.
        a_parameter, b_parameter: names of the parameters passed as a and b; "" for activations.
        autocast, math_path: as in Matmul.
    """

    module: int
    sizes: tuple[int, int, int]
    a_parameter: str
    b_parameter: str
    autocast: bool | None
    math_path: str = ""


class Forwards:
    """Find products of the forward by their autograd node, or by module and sizes."""

    def __init__(self) -> None:
        self._by_node: dict[int, Forward] = {}
        self._by_module: dict[int, dict[tuple[Any, ...], Forward]] = {}

    def add(self, forward: Forward, node: int | None) -> None:
        """Add a product; ``node`` is the sequence number of its autograd node, None if it has no node of its own."""
        if node is not None:
            self._by_node.setdefault(node, forward)
        self._by_module.setdefault(forward.module, {})[forward.sizes, forward.a_parameter, forward.b_parameter] = (
            forward
        )

    def of_node(self, number: int) -> Forward | None:
        """Return the product that made a node; None if no product made it."""
        return self._by_node.get(number)

    def likeliest(self, module: int, record: Matmul, weight: str) -> Forward | None:
        """Return the best match for a custom Function's product, which has no node, by the parameter read and by the sizes."""
        wanted = sorted((record.m, record.n, record.k))
        fitting = [one for one in self._by_module.get(module, {}).values() if sorted(one.sizes) == wanted]
        reading = [one for one in fitting if weight and weight in (one.a_parameter, one.b_parameter)]
        return next(iter(reading or fitting), None)


def role_and_parameter(forward: Forward | None, record: Matmul, weight: str) -> tuple[str, str]:
    """Return the role and the parameter of a product of the backward.

    Args:
        forward: the corresponding product of the forward; None if not known.
        record: the product of the backward.
        weight: the parameter among the product's operands, or "".
    """
    if forward is None:
        return "dgrad", weight
    of_a = _is_gradient_of_a(forward, record, weight)
    parameter, other = forward.a_parameter, forward.b_parameter
    if not of_a:
        parameter, other = other, parameter
    if parameter:
        return "wgrad", parameter
    return "dgrad", other


def _is_gradient_of_a(forward: Forward, record: Matmul, weight: str) -> bool:
    # The gradient of a sums over n and has the shape (m, k); the gradient of b sums over m and has the shape (k, n).
    m, n, k = forward.sizes
    could_be_a = record.k == n and {record.m, record.n} == {m, k}
    could_be_b = record.k == m and {record.m, record.n} == {k, n}
    if could_be_a != could_be_b:
        return could_be_a
    if weight:
        return weight == forward.b_parameter
    return bool(forward.a_parameter)
