"""torchao, if it is installed: its import prints, and some of its versions warn. And a stub of it, whose products are wide."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn


def torchao() -> None:
    """Skip the test if torchao is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchao.float8", reason="needs torchao (the extra fp8)")
        pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear", reason="needs torchao 0.18 or newer")


_STUB = {
    "torchao/float8/__init__.py": """
from dataclasses import dataclass
from torch import nn

@dataclass(frozen=True)
class Float8LinearConfig:
    recipe: str
    emulate: bool = False

    @classmethod
    def from_recipe_name(cls, name):
        return cls(name)

class Float8Linear(nn.Linear):
    pass

def convert_to_float8_training(module, *, config, module_filter_fn):
    for path, each in list(module.named_modules()):
        if isinstance(each, nn.Linear) and module_filter_fn(each, path):
            made = Float8Linear(each.in_features, each.out_features, each.bias is not None)
            made.weight, made.bias, made.config = each.weight, each.bias, config
            module.set_submodule(path, made)
    return module
""",
    "torchao/prototype/moe_training/mxfp8_linear.py": """
import enum
from torch import nn

ScaleCalculationMode = enum.Enum("ScaleCalculationMode", {"RCEIL": "rceil"})
calls = []

class MXFP8Linear(nn.Linear):
    pass

def _to_mxfp8_then_scaled_mm(input, weight, **options):
    calls.append((input.dtype, weight.dtype, options))
    return nn.functional.linear(input, weight)
""",
    "torchao/quantization/quantize_/common.py": """
import enum
KernelPreference = enum.Enum("KernelPreference", {"AUTO": "auto", "EMULATED": "emulated"})
""",
}


@contextmanager
def stubbed(folder: Path, version: str = "0.18.0", code: str = "") -> Iterator[None]:
    """Put a torchao of this version first on the path. ``code`` runs at its import."""
    for name, source in {"torchao/__init__.py": code, **_STUB}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source)
    (folder / f"torchao-{version}.dist-info").mkdir()
    (folder / f"torchao-{version}.dist-info" / "METADATA").write_text(f"Name: torchao\nVersion: {version}\n")
    before = _taken_modules()
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        _taken_modules()
        sys.modules.update(before)


def _taken_modules() -> dict[str, ModuleType]:
    """Return torchao's imported modules, and forget them."""
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "torchao"}


def to_float8(model: nn.Module, recipe: str = "tensorwise", names=None, **options) -> nn.Module:
    """Convert the layers of these names, all by default."""
    torchao()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe) if not options else Float8LinearConfig(**options)
    return convert_to_float8_training(
        model, module_filter_fn=lambda _, name: names is None or name in names, config=config
    )


def to_mxfp8(model: nn.Module, names=None) -> nn.Module:
    """Convert the Linear of these names to emulated MXFP8, all by default."""
    torchao()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
        from torchao.quantization import quantize_

        config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
        quantize_(
            model,
            config,
            filter_fn=lambda module, name: isinstance(module, nn.Linear) and (names is None or name in names),
        )
    return model


def emulate(model: nn.Module) -> None:
    """Let MXFP8 layers compute on a CPU."""
    from torchao.quantization.quantize_.common import KernelPreference

    for module in model.modules():
        if type(module).__name__ == "MXFP8Linear":
            module.kernel_preference = KernelPreference.EMULATED
