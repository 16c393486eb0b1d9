"""Collect the sizes of a model that a user can change, with the user's names; tied embeddings; and torch's TF32 switches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mpinspect.shapes.record.attribution import plain_path

#: The maximum number of names kept for one value.
_MOST_NAMES = 6
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
    "num_heads",
    "head_dim",
    "kdim",
    "vdim",
    "d_model",
    "intermediate_size",
    "vocab_size",
    "groups",
)


def named_sizes(model: torch.nn.Module) -> dict[int, tuple[str, ...]]:
    """Return the names of a model's sizes above 1 by value, the configuration's first: {30522: ("config.vocab_size",)}."""
    names: dict[int, list[str]] = {}
    for name, value in (*_of_config(model), *_of_modules(model)):
        known = names.setdefault(value, [])
        if len(known) < _MOST_NAMES and name not in known:
            known.append(name)
    return {value: tuple(found) for value, found in names.items()}


def tied_embeddings(model: torch.nn.Module) -> dict[str, str]:
    """Return the weights of other modules that are tied to an embedding's weight: {"lm_head.weight": "wte.weight"}."""
    tables: dict[int, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding):
            tables.setdefault(id(module.weight), _joined(path, "weight"))
    return {
        _joined(path, name): tables[id(parameter)]
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


def _of_config(model: torch.nn.Module) -> Iterator[tuple[str, int]]:
    config = getattr(model, "config", None)
    if config is not None:
        yield from _integers(config, "config", 0)


def _integers(config: Any, path: str, depth: int) -> Iterator[tuple[str, int]]:
    """Yield a configuration's sizes, then those of nested configurations (text_config, vision_config)."""
    entries = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    public = [(name, value) for name, value in entries.items() if isinstance(name, str) and not name.startswith("_")]
    yield from ((f"{path}.{name}", value) for name, value in public if _is_size(value) and not name.endswith("_id"))
    if depth < 2:
        for name, value in public:
            if name.endswith("config"):
                yield from _integers(value, f"{path}.{name}", depth + 1)


def _of_modules(model: torch.nn.Module) -> Iterator[tuple[str, int]]:
    for path, module in model.named_modules():
        own = module.__dict__
        for name in _ATTRIBUTES:
            value = own.get(name)
            if _is_size(value):
                yield _joined(path, name), value


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def _joined(path: str, name: str) -> str:
    return plain_path(f"{path}.{name}" if path else name)
