"""torchao, if it is installed: its import prints, and some of its versions warn."""

from __future__ import annotations

import warnings

import pytest
from torch import nn


def torchao() -> None:
    """Skip the test if torchao is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchao.float8", reason="needs torchao (the extra fp8)")


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
