"""Policies of autocast's lists (FP32, FP32 unless a dtype is passed, widest dtype), and kernels of single threads for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

#: Runs an operator with casts: (operation, args, kwargs) -> result; NotImplemented leaves the call to the next policy or torch.
Policy = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
#: (value, dtype) -> the value in that dtype if it is eligible, else unchanged.
Cast = Callable[[Any, torch.dtype], Any]

#: Dtypes that are cast, as in torch: floating point, but not FP64.
ELIGIBLE = (torch.float32, torch.float16, torch.bfloat16)
_OF_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def float32(cast: Cast) -> Policy:
    """Return a policy that runs the operator in FP32."""

    def policy(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return operation(*cast_all(args, torch.float32, cast), **kwargs)

    return policy


def float32_by_default(is_eligible: Callable[[Any], bool]) -> Policy:
    """Return a policy that makes the result FP32 unless the caller passes a dtype."""

    def policy(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = _dtype_place(operation)
        given = kwargs.get("dtype")
        if place is not None:
            given = next(iter(args[place : place + 1]), None)
        if given is not None or not is_eligible(args[0]):
            return operation(*args, **kwargs)
        if place is None:
            return operation(*args, **{**kwargs, "dtype": torch.float32})
        return operation(*args[:place], torch.float32, *args[place + 1 :], **kwargs)

    return policy


def widest(cast: Cast, is_eligible: Callable[[Any], bool], device: str) -> Policy:
    """Return a policy that runs in the operands' widest dtype; the narrow one is ``device``'s autocast dtype."""

    def policy(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtype = torch.get_autocast_dtype(device)
        if any(value.dtype != dtype for value in args if is_eligible(value)):
            dtype = torch.float32
        return operation(*cast_all(args, dtype, cast), **kwargs)

    return policy


def where_enabled(device: str, policy: Policy) -> Policy:
    """Return a policy that leaves calls to torch unless ``device``'s autocast is enabled; the CPU's own does not act below it."""

    def run(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_autocast_enabled(device):
            return NotImplemented
        with torch._C._ExcludeDispatchKeyGuard(_OF_CPU):
            return policy(operation, args, kwargs)

    return run


def cast_all(args: tuple[Any, ...], dtype: torch.dtype, cast: Cast) -> Iterator[Any]:
    """Yield the arguments, cast if eligible, including those inside lists and tuples."""
    for value in args:
        if isinstance(value, (list, tuple)):
            yield [cast(one, dtype) for one in value]
        else:
            yield cast(value, dtype)


def operator_named(name: str) -> Any:
    """Return the aten operator with a given name, such as "norm.ScalarOpt_dim"."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


@cache
def _dtype_place(operation: Any) -> int | None:
    """Return the index of ``dtype`` among the positional arguments; None if it is keyword-only or absent."""
    arguments = operation._schema.arguments
    return next((place for place, one in enumerate(arguments) if one.name == "dtype" and not one.kwarg_only), None)


class _Thread(threading.local):
    """The policies of a thread; autograd's own threads inherit the key without any."""

    policies: tuple[Mapping[str, Policy], ...] = ()


class ThreadKernels:
    """Kernels in torch's dispatcher that run in chosen threads, for tensors of any device.

    As in autocast, they also handle calls through aliases and from composite functions. They are registered at the first use,
    until the process ends, under a dispatch key for which torch has neither kernels nor a fallback.

    Args:
        key: "AutocastIPU" (Graphcore's) or "AutocastHPU" (Habana's).
    """

    def __init__(self, key: str) -> None:
        self._key = getattr(torch._C.DispatchKey, key)
        self._this, self._below = torch._C.DispatchKeySet(self._key), torch._C._dispatch_keyset_full_after(self._key)
        self._registering = threading.Lock()
        self._registered: set[str] = set()
        self._libraries: list[torch.library.Library] = []
        self._thread = _Thread()

    @contextmanager
    def running(self, policies: Mapping[str, Policy]) -> Iterator[None]:
        """Run this thread's calls of operators by these policies, then those of an outer block, within the block; see ``use``."""
        before = self._thread.policies
        self.use(policies, *before)
        try:
            yield
        finally:
            self.use(*before)

    def use(self, *policies: Mapping[str, Policy]) -> None:
        """Run this thread's calls of operators by these policies from now on, except those that a policy makes.

        Args:
            policies: by the operator's name, such as "norm.ScalarOpt_dim". The next ones get the calls that a policy leaves.
        """
        with self._registering:
            for name in sorted(set().union(*policies) - self._registered):
                self._register(name)
        self._thread.policies = policies
        torch._C._dispatch_tls_set_dispatch_key_excluded(self._key, not policies)
        torch._C._dispatch_tls_set_dispatch_key_included(self._key, bool(policies))

    def _register(self, name: str) -> None:
        if not self._libraries:
            self._libraries = [torch.library.Library(of, "IMPL") for of in ("_", "aten")]  # type: ignore[no-untyped-call]
            self._libraries[0].fallback(torch.library.fallthrough_kernel, self._key.name)  # type: ignore[no-untyped-call]
        operation = operator_named(name)

        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            for policy in [policies[name] for policies in self._thread.policies if name in policies]:
                with torch._C._ExcludeDispatchKeyGuard(self._this):
                    result = policy(operation, args, kwargs)
                if result is not NotImplemented:
                    return result
            return operation.redispatch(keys & self._below, *args, **kwargs)

        self._libraries[1].impl(name, kernel, self._key.name, with_keyset=True)  # type: ignore[no-untyped-call]
        self._registered.add(name)


#: For CUDA's autocast on other devices.
CASTING = ThreadKernels("AutocastIPU")
