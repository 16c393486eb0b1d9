"""Collect the sizes of a model that a user can change, with the user's names; tied embeddings; and torch's TF32 switches.

Equal numbers are not evidence: a setting names a module's size only if the size follows when the setting changes. This is
tried on copies of the configuration, with which the model's class is built again on the meta device.
"""

from __future__ import annotations

import copy
import inspect
import io
import logging
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from mpinspect.runtime.untouched import RandomState
from mpinspect.shapes.record.attribution import joined, plain_path

#: The most settings of a configuration that are tried, each by building the model's class once.
_MOST_TRIED = 16
#: Names of sizes in torch's layers and Transformers' models.
_ATTRIBUTES = (
    "in_features",
    "out_features",
    "in_channels",
    "out_channels",
    "num_embeddings",
    "embedding_dim",
    "input_size",
    "hidden_size",
    "proj_size",
    "embed_dim",
    "head_dim",
    "kdim",
    "vdim",
    "nf",
    "nx",
    "d_model",
    "intermediate_size",
    "vocab_size",
)
#: A size of a module: the module's path, the name of the attribute or parameter, and the dimension of a parameter (else 0).
_Place = tuple[str, str, int]


def named_sizes(model: torch.nn.Module, odd: Collection[int] = ()) -> dict[str, dict[int, tuple[str, ...]]]:
    """Return the names of each module's sizes above 1: {"lm_head": {30522: ("config.vocab_size", "lm_head.out_features")}}.

    A setting of the model's configuration is first among the names of a size that it determines; a module's attributes
    follow, or the names of its parameters where no attribute has the size.

    Args:
        odd: the sizes whose settings are searched, by building the model's class again; empty by default.
    """
    places = dict(_places(model))
    names: dict[str, dict[int, list[str]]] = {}
    for (path, name), value in _determined(model, places, odd):
        names.setdefault(path, {}).setdefault(value, []).append(name)
    for (path, name, _), value in places.items():
        names.setdefault(path, {}).setdefault(value, []).append(joined(path, name))
    _name_heads(model, names)
    return {
        path: {value: tuple(dict.fromkeys(found)) for value, found in sizes.items()} for path, sizes in names.items()
    }


def _places(model: torch.nn.Module) -> Iterator[tuple[_Place, int]]:
    for path, module in model.named_modules():
        path = plain_path(path)
        own = module.__dict__
        attributes = {name: own[name] for name in _ATTRIBUTES if _is_size(own.get(name))}
        yield from (((path, name, 0), value) for name, value in attributes.items())
        for name, parameter in module._parameters.items():
            if parameter is None or is_lazy(parameter):
                continue
            for dimension, size in enumerate(parameter.shape):
                if size > 1 and size not in attributes.values():
                    yield (path, name, dimension), size


def _name_heads(model: torch.nn.Module, names: dict[str, dict[int, list[str]]]) -> None:
    """Add the embedding's name to the outputs of a layer whose weight has the shape of the embedding's table."""
    weights = [
        (path, module, weight) for path, module in model.named_modules() if (weight := _weight(module)) is not None
    ]
    tables = {
        tuple(weight.shape): joined(path, "num_embeddings")
        for path, module, weight in weights
        if isinstance(module, torch.nn.Embedding)
    }
    for path, module, weight in weights:
        table = tables.get(tuple(weight.shape))
        if table is not None and weight.shape[0] > 1 and not isinstance(module, torch.nn.Embedding):
            names.setdefault(plain_path(path), {}).setdefault(weight.shape[0], []).append(table)


def _weight(module: torch.nn.Module) -> torch.Tensor | None:
    """Return a module's own weight, or None. Reading the attribute would compute a parametrised weight."""
    # TorchScript's mapping lacks get().
    weight = dict(module._parameters.items()).get("weight")
    return None if weight is None or is_lazy(weight) else weight


# -- the configuration -----------------------------------------------------------------------------------------------------


def _determined(
    model: torch.nn.Module, places: dict[_Place, int], odd: Collection[int]
) -> Iterator[tuple[tuple[str, str], int]]:
    """Yield (a module's path, a setting's name) and the module's size that follows the setting."""
    config = None
    # A model's own __getattr__ may raise any exception.
    with suppress(Exception):
        config = getattr(model, "config", None)
    wanted = {value for value in places.values() if value in odd}
    settings = [(name, keys, value) for name, keys, value in _integers(config, "config", (), 0) if value in wanted]
    if not settings or not _takes_its_config(type(model)):
        return
    before = _places_with(model, config)
    # The model was changed after it was built, or needs more than its configuration: no setting is named.
    if before != places:
        return
    for name, keys, value in settings[:_MOST_TRIED]:
        # Heads and groups divide twice the size, too.
        changed = _changed(config, keys, 2 * value)
        if changed is None or (after := _places_with(model, changed)) is None:
            continue
        followed = [place for place, size in places.items() if size == value and after.get(place) == 2 * value]
        yield from (((path, name), value) for path, _, _ in followed)


def _takes_its_config(kind: type) -> bool:
    """Return whether a model's class is built of one argument."""
    try:
        parameters = list(inspect.signature(kind).parameters.values())
    except (TypeError, ValueError):
        return False
    needed = [one for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    return (
        bool(parameters)
        and needed in ([], parameters[:1])
        and parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    )


def _places_with(model: torch.nn.Module, config: Any) -> dict[_Place, int] | None:
    """Return the sizes of a model of the same class with another configuration; None if the class refuses it."""
    try:
        with _unnoticed(), torch.device("meta"):
            return dict(_places(type(model)(copy.deepcopy(config))))
    except Exception:
        return None


@contextmanager
def _unnoticed() -> Iterator[None]:
    """Run a constructor without its messages, and restore the random states."""
    state, level = RandomState.now(), logging.root.manager.disable
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            logging.disable(logging.CRITICAL)
            yield
    finally:
        logging.disable(level)
        state.restore()


def _changed(config: Any, keys: tuple[str, ...], value: int) -> Any:
    """Return a copy of a configuration with another value; None if it cannot be copied or changed."""
    try:
        changed = inner = copy.deepcopy(config)
        for key in keys[:-1]:
            inner = _entries(inner)[key]
        if isinstance(inner, dict):
            inner[keys[-1]] = value
        else:
            setattr(inner, keys[-1], value)
    except Exception:
        return None
    return changed


def _entries(config: Any) -> dict[Any, Any]:
    return config if isinstance(config, dict) else getattr(config, "__dict__", {})


def _integers(config: Any, path: str, keys: tuple[str, ...], depth: int) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Yield a configuration's sizes, then nested configurations' sizes: the name, the keys that lead to it, the value."""
    entries = _entries(config).items()
    public = [(name, value) for name, value in entries if isinstance(name, str) and not name.startswith("_")]
    for name, value in public:
        if _is_size(value) and not name.endswith("_id"):
            yield f"{path}.{name}", (*keys, name), value
    if depth < 2:
        for name, value in public:
            if name.endswith("config"):
                yield from _integers(value, f"{path}.{name}", (*keys, name), depth + 1)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


# -- ties and switches -----------------------------------------------------------------------------------------------------


def tied_embeddings(model: torch.nn.Module) -> dict[str, str]:
    """Return the weights of other modules that are tied to an embedding's weight: {"lm_head.weight": "wte.weight"}."""
    tables: dict[int, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and (weight := _weight(module)) is not None:
            tables.setdefault(id(weight), joined(path, "weight"))
    return {
        joined(path, name): tables[id(parameter)]
        for path, module in model.named_modules()
        if not isinstance(module, torch.nn.Embedding)
        for name, parameter in module._parameters.items()
        if parameter is not None and id(parameter) in tables
    }


def allowed_tf32() -> dict[str, bool]:
    """Return whether torch's switches allow TF32 for FP32 products: "matmul" (cuBLAS) and "convolution" (cuDNN)."""
    backends: Any = torch.backends
    if hasattr(backends.cudnn, "conv"):  # torch.backends.cudnn.conv.fp32_precision, since torch 2.9
        matmul, convolution = backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision
        return {"matmul": matmul == "tf32", "convolution": convolution == "tf32"}
    return {"matmul": bool(backends.cuda.matmul.allow_tf32), "convolution": bool(backends.cudnn.allow_tf32)}
