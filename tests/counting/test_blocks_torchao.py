"""Counts of blocks against torchao's casts to MX formats and NVFP4; skipped without torchao (the extra fp8)."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torchao_here
from quantising import quantised
from test_blocks import DATA, _data

from mpinspect.counting.blocks import count_blocks
from mpinspect.counting.blocks import quantization_loss as loss
from mpinspect.numeric.recipes import EVEN, FLOOR, MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4, RCEIL, Quantization

#: torchao takes rows that blocks divide.
WHOLE = tuple(name for name in DATA if name != "ragged")
FORMATS = (MXFP8_E4M3, MXFP8_E5M2, MXFP4)
each_format = pytest.mark.parametrize("format", FORMATS, ids=lambda each: each.element)


@pytest.fixture(autouse=True)
def _torchao() -> None:
    torchao_here.torchao()


def to_mx(x: torch.Tensor, quantization: Quantization) -> tuple[torch.Tensor, torch.Tensor]:
    """Return torchao's scales and the magnitudes of its elements before they are scaled."""
    from torchao.prototype.mx_formats import mx_tensor
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    dtypes: dict[str, Any] = {
        "float8_e4m3": torch.float8_e4m3fn,
        "float8_e5m2": torch.float8_e5m2,
        "float4_e2m1": torch.float4_e2m1fn_x2,
    }
    dtype = dtypes[quantization.element]
    scales, elements = mx_tensor.to_mx(x, dtype, 32, ScaleCalculationMode(quantization.rule))
    return scales, fp4_magnitudes(elements) if quantization.element == "float4_e2m1" else elements.float().abs()


def fp4_magnitudes(packed: torch.Tensor) -> torch.Tensor:
    """Return two numbers for each byte, the lower half first."""
    codes = packed.view(torch.uint8)
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return numbers[torch.stack([codes & 7, codes >> 4 & 7], dim=-1).flatten(-2).long()]


@each_format
@pytest.mark.parametrize("rule", [FLOOR, EVEN, RCEIL])
@pytest.mark.parametrize("name", WHOLE)
def test_flushed_elements_equal_those_of_to_mx(name: str, rule: str, format: Quantization) -> None:
    quantization = replace(format, rule=rule)
    for x in (_data(name), _data(name).T.contiguous()):
        if rule == RCEIL and name == "maxima at the cuts":
            continue
        _, elements = to_mx(x, quantization)
        flushed = int(((elements == 0) & (x != 0)).sum())
        assert loss(x, quantization).flushed == flushed
        if rule != EVEN:
            assert count_blocks(x).flushed(quantization) == flushed


@each_format
@pytest.mark.parametrize("name", WHOLE)
def test_quantised_values_equal_those_of_to_mx(name: str, format: Quantization) -> None:
    x = _data(name)
    quantization = replace(format, rule=FLOOR)
    scales, elements = to_mx(x, quantization)
    theirs = elements.view(*scales.shape, 32) * scales.float()[..., None]
    assert torch.equal(theirs.view(x.shape), quantised(x, quantization).abs())


@pytest.mark.parametrize("format", FORMATS[:2], ids=lambda each: each.element)
def test_torchaos_rceil_is_not_an_oracle_one_unit_above_the_cut(format: Quantization) -> None:
    """In eager code it rounds the logarithm up in FP32, where that of the next number is still the power of two."""
    cut = torch.tensor(format.format.max_significand)
    above = torch.nextafter(cut, torch.tensor(2.0))
    scales, _ = to_mx(torch.stack([cut, above, 1.9 * torch.ones(())])[:, None].expand(3, 32).contiguous(), format)
    cut_scale, above_scale, far_scale = scales.float().flatten().tolist()
    assert cut_scale == above_scale == far_scale / 2
    counts = count_blocks(torch.full((1, 32), float(above)))
    assert counts.clipped(replace(format, rule=FLOOR)) == 32
    assert counts.clipped(format) == 0


@pytest.mark.parametrize("name", WHOLE)
def test_the_same_elements_are_flushed_as_by_nvfp4_quantize(name: str) -> None:
    """Blocks whose scale torchao raises to the smallest normal number of E4M3 are left out."""
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    x = _data(name)
    scales, packed = nvfp4_quantize(x, 16, per_tensor_amax_to_scale(x.abs().amax().float()))
    is_raised = (scales.float() == 2.0**-6).repeat_interleave(16, dim=1)
    theirs, ours = (fp4_magnitudes(packed) == 0) & (x != 0), (quantised(x, NVFP4) == 0) & (x != 0)
    assert torch.equal(theirs & ~is_raised, ours & ~is_raised)
    assert int(ours.sum()) == loss(x, NVFP4).flushed
    assert not is_raised.all()
