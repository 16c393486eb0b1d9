"""Handles the wrappers of parallel, compiled and checkpointed models: finds and names the modules inside."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

#: Class names of wrapper modules, each with the attribute that holds the wrapped module.
#: By name, because importing the classes takes a second, and torch has moved some of them between versions.
_WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "ActivationWrapper": "_checkpoint_wrapped_module",
}
#: The attributes of a module that hold a compiled function: the first for ``torch.compile(module)``'s wrapper and for
#: ``model.forward = torch.compile(model.forward)``, the second for ``module.compile()``.
_ENTRIES = ("forward", "_compiled_call_impl")


def wrapped_by(module: nn.Module) -> nn.Module | None:
    """Return the module that this one wraps, or None. Read only ``_modules``: other reads could load lazy proxies."""
    for kind in type(module).__mro__:
        if kind.__name__ in _WRAPPERS:
            inner: nn.Module | None = registered(module, "_modules").get(_WRAPPERS[kind.__name__])
            return inner
    return None


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the innermost module, with all wrappers removed."""
    while (inner := wrapped_by(module)) is not None:
        module = inner
    return module


def class_of(module: nn.Module) -> type:
    """Return the innermost module's class: Linear also after FSDP2 has made it an "FSDPLinear"."""
    kinds = type(unwrapped(module)).__mro__
    is_sharded = len(kinds) > 2 and kinds[1].__name__ == "FSDPModule"
    return kinds[2 if is_sharded else 0]


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Return whether the module was returned by ``torch.compile(module)``, or wraps such a module."""
    inner = wrapped_by(module)
    return inner is not None and (type(module).__name__ == "OptimizedModule" or is_compiled_wrapper(inner))


def compiled_functions(module: nn.Module) -> dict[str, FunctionType]:
    """Return the compiled functions stored on a module, by attribute. Reads its dictionary only.

    Without compilation (``disable=True``, TORCHDYNAMO_DISABLE) torch stores functions that are not compiled in the same places.
    """
    attributes = object.__getattribute__(module, "__dict__")
    found = {name: attributes.get(name) for name in _ENTRIES}
    return {name: each for name, each in found.items() if isinstance(each, FunctionType) and _is_compiled(each)}


def _is_compiled(function: FunctionType) -> bool:
    return hasattr(function, "_torchdynamo_orig_callable") and not getattr(function, "_torchdynamo_disable", False)


def plain_names(model: nn.Module) -> dict[str, str]:
    """Map the names of ``model.named_modules()`` to names without wrappers: "module.0._orig_mod.fc" -> "0.fc".

    A wrapper and the module that it wraps get the same name. A user's own module named ``module`` retains its name.
    """
    plain: dict[str, str] = {}
    wrapped: dict[str, Any] = {}
    for name, module in model.named_modules():  # yields parents before children
        above, _, own = name.rpartition(".")
        is_own = bool(name) and wrapped[above] is not module
        plain[name] = f"{plain[above]}.{own}".lstrip(".") if is_own else plain.get(above, "")
        wrapped[name] = wrapped_by(module)
    return plain


def named_plainly(model: nn.Module, named: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return named parameters or buffers of a model with names without wrappers."""
    plain = plain_names(model)
    parts = [(*name.rpartition("."), each) for name, each in named]
    return [(f"{plain.get(owner, owner)}.{name}".lstrip("."), each) for owner, _, name, each in parts]


def registered(module: nn.Module, table: str) -> dict[str, Any]:
    """Return ``module._modules`` or a similar table, bypassing ``__getattribute__``; {} if ``__init__`` has not run."""
    found = object.__getattribute__(module, "__dict__").get(table)
    return found if isinstance(found, dict) else {}


def named_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a module's direct submodules, with their names."""
    from torch import nn

    return [
        (name, child) for name, child in registered(module, "_modules").items() if issubclass(type(child), nn.Module)
    ]


def submodules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and all modules inside it, each once, without ``module.modules()``, which users may override."""
    seen = {id(module)}
    waiting = [module]
    while waiting:
        each = waiting.pop()
        yield each
        for _, child in named_children(each):
            if id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)


@contextmanager
def compiled_modules_eager() -> Iterator[None]:
    """Run compiled modules eagerly within the block, since compiled graphs have fixed dtypes and ignore modes."""
    if "torch._dynamo" in sys.modules:
        # No module can be compiled while torch._dynamo is not imported, and importing it takes seconds.
        import torch

        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield
