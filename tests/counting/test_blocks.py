"""Counts of blocks and quantised values against casts by ml_dtypes."""

import math
from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantising import quantised

from mpinspect.counting.blocks import count_blocks
from mpinspect.counting.blocks import quantization_loss as loss
from mpinspect.numeric.blocks import BlockCounts
from mpinspect.numeric.recipes import (
    EVEN,
    FLOOR,
    FP8_BLOCK_128,
    HISTORY,
    MXFP4,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4,
    RECIPES,
    STOCHASTIC,
    Quantization,
)

ELEMENTS = {
    "float8_e4m3": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float4_e2m1": ml_dtypes.float4_e2m1fn,
}
MX = [replace(each, rule=rule) for each in (MXFP8_E4M3, MXFP8_E5M2, MXFP4) for rule in ("rceil", FLOOR)]
FP32_SCALES = [replace(each, scale="float32", rule="amax") for each in (MXFP8_E4M3, MXFP8_E5M2, MXFP4)]


def _name(quantization: Quantization) -> str:
    return f"{quantization.element}-{quantization.rule}"


def _data(name: str) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(64, 256)
    if name == "log-normal":
        return torch.sign(x) * torch.exp(3 * torch.randn(64, 256))
    if name == "rows spread over 2^20":
        return x * 2.0 ** torch.linspace(-20, 0, 64)[:, None]
    if name == "a channel times 1000":
        x[:, 7] *= 1000
    elif name == "bfloat16 values":
        return x.bfloat16()
    elif name == "zero rows":
        x[::3] = 0
        x[1, ::2] = 0
    elif name == "powers of two":
        return 2.0 ** torch.randint(-20, 3, x.shape).float()
    elif name == "maxima at the cuts":
        x = 2.0 ** torch.randint(-22, 0, x.shape).float()
        cuts = torch.tensor([1.5, 1.75])
        up, down = torch.nextafter(cuts, torch.tensor(2.0)), torch.nextafter(cuts, torch.tensor(1.0))
        x[:, ::32] = torch.cat([cuts, up, down]).repeat(86)[: 64 * 8].reshape(64, 8)
    elif name == "far below each other":
        return x * 2.0 ** torch.randint(-40, 1, x.shape).float()
    elif name == "ragged":
        return x[:, :229]
    return x


DATA = (
    *("normal", "log-normal", "rows spread over 2^20", "a channel times 1000", "bfloat16 values", "zero rows"),
    *("powers of two", "maxima at the cuts", "far below each other", "ragged"),
)


def _oracle(x: torch.Tensor, quantization: Quantization) -> np.ndarray:
    """Return the quantised values of 1 x 32 blocks in float64, cast by ml_dtypes, with scales from exact arithmetic."""
    values = x.double().numpy()
    format, out = quantization.format, np.empty_like(values)
    for row in range(values.shape[0]):
        for start in range(0, values.shape[1], 32):
            block = values[row, start : start + 32]
            peak = np.abs(block).max()
            scale = 1.0
            if peak and quantization.rule == "amax":
                scale = float(np.float32(peak) / np.float32(format.max_finite))
            elif peak:
                power = math.frexp(peak)[1] - 1 - format.max_exponent
                is_above = Fraction(peak) / Fraction(2) ** power > Fraction(format.max_finite)
                scale = 2.0 ** (power + (quantization.rule == "rceil" and is_above))
            divided = np.clip((block.astype(np.float32) / np.float32(scale)), -format.max_finite, format.max_finite)
            cast = divided.astype(ELEMENTS[quantization.element])
            out[row, start : start + 32] = cast.astype(np.float64) * scale
    return out


@pytest.mark.parametrize("quantization", [*MX, *FP32_SCALES], ids=_name)
@pytest.mark.parametrize("name", DATA)
def test_quantised_values_equal_casts_by_ml_dtypes(name: str, quantization: Quantization) -> None:
    x = _data(name)
    for oriented in (x, x.T.contiguous()):
        assert np.array_equal(
            quantised(oriented, quantization).numpy(), _oracle(oriented, quantization).astype(np.float32)
        )


@pytest.mark.parametrize("quantization", MX, ids=_name)
@pytest.mark.parametrize("name", DATA)
def test_counts_equal_casts_by_ml_dtypes(name: str, quantization: Quantization) -> None:
    x = _data(name)
    for oriented in (x, x.T.contiguous()):
        counts, exact, cast = count_blocks(oriented), oriented.double().numpy(), _oracle(oriented, quantization)
        flushed = (cast == 0) & (exact != 0)
        assert counts.nonzero == np.count_nonzero(exact)
        assert counts.zeros == exact.size - counts.nonzero
        assert counts.flushed(quantization) == flushed.sum()
        found = loss(oriented, quantization)
        assert (found.nonzero, found.flushed) == (counts.nonzero, flushed.sum())
        assert found.clipped == counts.clipped(quantization)
        assert found.lost == pytest.approx(np.abs(exact[flushed]).sum(), rel=1e-12)
        assert found.noise == pytest.approx(((cast - exact) ** 2).sum(), rel=1e-9)


@pytest.mark.parametrize("name", DATA)
def test_subnormal_counts_are_those_of_the_scaled_values(name: str) -> None:
    x = _data(name)
    counts = count_blocks(x)
    for quantization in MX:
        cast = _oracle(x, quantization)
        blocks = np.abs(np.pad(x.double().numpy(), ((0, 0), (0, -x.shape[1] % 32))).reshape(x.shape[0], -1, 32))
        format = quantization.format
        power = np.frexp(blocks.max(-1))[1] - 1 - format.max_exponent
        if quantization.rule == "rceil":
            power += np.frexp(blocks.max(-1))[0] * 2 > format.max_significand
        scaled = (blocks / 2.0 ** power[..., None]).reshape(x.shape[0], -1)[:, : x.shape[1]]
        below = (scaled < 2.0**format.min_normal_exponent) & (scaled > 0) & (cast != 0)
        assert counts.subnormal(quantization) == below.sum()


@pytest.mark.parametrize("quantization", FP32_SCALES, ids=_name)
@pytest.mark.parametrize("name", DATA)
def test_bounds_hold_for_scales_in_fp32(name: str, quantization: Quantization) -> None:
    x = _data(name)
    low, high = count_blocks(x).flushed_bounds(quantization)
    assert low <= loss(x, quantization).flushed <= high


def test_bounds_are_equal_for_scales_that_are_powers_of_two() -> None:
    counts = count_blocks(_data("far below each other"))
    exact = counts.flushed(MXFP4)
    assert counts.flushed_bounds(MXFP4) == (exact, exact)
    assert exact > 0


@given(st.integers(1, 5), st.integers(1, 70), st.sampled_from([(1, 16), (1, 32), (4, 8), (0, 0), (1, 0)]), st.randoms())
def test_the_counts_of_rows_add_up_to_the_whole(
    rows: int, columns: int, block: tuple[int, int], random: object
) -> None:
    generator = torch.Generator().manual_seed(random.getrandbits(30))  # type: ignore[attr-defined]
    x = torch.randn(rows * 4, columns, generator=generator) * 2.0 ** torch.randint(
        -40, 40, (rows * 4, columns), generator=generator
    )
    whole = count_blocks(x, block)
    assert whole.nonzero + whole.zeros == x.numel()
    if block[0]:
        parts = [count_blocks(x[start : start + 4], block) for start in range(0, rows * 4, 4)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        assert total == whole


def test_counts_of_steps_add_up_to_those_of_all_their_values() -> None:
    steps = [_data(name) for name in ("normal", "log-normal", "maxima at the cuts")]
    for orient in (torch.Tensor.contiguous, torch.t):
        a, b, c = (count_blocks(orient(x)) for x in steps)
        # Every step's rows and columns are whole blocks, so that they can be joined in either direction.
        assert a + b + c == count_blocks(orient(torch.cat(steps))) == count_blocks(orient(torch.cat(steps, dim=1)))


@pytest.mark.parametrize("block", [(1, 16), (4, 8), (0, 0), (0, 4), (1, 0)])
@pytest.mark.parametrize("shape", [(300, 70), (3, 5000), (5000, 3), (0, 8)])
def test_a_tensor_examined_piece_by_piece_counts_the_same(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], block: tuple[int, int]
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).exp().square() - 1
    x[-1:, -1:] = math.inf
    quantization = replace(MXFP4, block=block)
    counts, lost = count_blocks(x, block), loss(x, quantization)
    monkeypatch.setattr("mpinspect.counting.blocks._AT_ONCE", 1000)
    assert count_blocks(x, block) == counts
    pieces = loss(x, quantization)
    assert [getattr(pieces, each) for each in ("nonzero", "flushed", "clipped", "broken")] == [
        getattr(lost, each) for each in ("nonzero", "flushed", "clipped", "broken")
    ]
    assert [pieces.magnitudes, pieces.noise] == pytest.approx([lost.magnitudes, lost.noise])


def test_blocks_with_an_infinity_or_nan_are_counted_apart_and_become_nan() -> None:
    x = _data("normal")
    x[0, 0], x[1, 40] = math.inf, math.nan
    counts = count_blocks(x)
    assert (counts.broken_blocks, counts.broken_elements) == (2, 64)
    assert counts.nonzero == x.numel() - 64
    assert loss(x, MXFP8_E4M3).broken == 64
    out = quantised(x, MXFP8_E4M3)
    assert int(out.isnan().sum()) == 64
    assert bool(torch.cat([out[0, :32], out[1, 32:64]]).isnan().all())
    untouched = x.clone()
    untouched[0, :32] = untouched[1, 32:64] = 0
    assert torch.equal(out.nan_to_num(0.0), quantised(untouched, MXFP8_E4M3))


def test_blocks_near_the_least_scale_are_counted_apart() -> None:
    x = torch.ones(2, 32)
    x[1] = 2.0**-113
    counts = count_blocks(x)
    assert (counts.blocks, counts.tiny_blocks, counts.tiny_elements, counts.nonzero) == (2, 1, 32, 32)


def test_the_values_of_a_block_of_even_scale() -> None:
    # 1.9375 rounds to 2 in E4M3, so the scale grows; 1.875 is E4M3's own number and does not.
    even = replace(MXFP8_E4M3, rule=EVEN)
    for top, grows in ((1.9375, True), (1.93749, False), (1.875, False)):
        x = torch.full((1, 32), 2.0**-10)
        x[0, 0] = top
        assert (float(quantised(x, even)[0, 0]) > 1.75) is grows


def _nvfp4(x: torch.Tensor, block: tuple[int, int]) -> np.ndarray:
    """Return NVFP4's values in float64, by the published rule: E4M3 scales of blocks below an FP32 scale of the tensor.

    Each step rounds once, to the format that holds its result: the tensor's scale 2688 / amax to FP32; a block's scale
    amax_b S / 6 to E4M3; a value times S over the block's scale to E2M1.
    """
    values = x.double().numpy()
    whole = float(np.float32(448 * 6 / np.abs(values).max()))
    height, width = block
    out = np.zeros_like(values)
    for row in range(0, values.shape[0], height):
        for column in range(0, values.shape[1], width):
            part = values[row : row + height, column : column + width]
            scale = float(ml_dtypes.float8_e4m3fn(np.abs(part).max() * whole / 6))
            if scale:
                divided = np.clip(part * whole / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn)
                out[row : row + height, column : column + width] = divided.astype(np.float64) * scale / whole
    return out


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
@pytest.mark.parametrize("name", DATA)
def test_nvfp4_has_a_scale_in_e4m3_for_each_block_below_one_for_the_tensor(name: str, block: tuple[int, int]) -> None:
    x, quantization = _data(name), replace(NVFP4, block=block)
    for oriented in (x, x.T.contiguous()):
        exact, expected = oriented.double().numpy(), _nvfp4(oriented, block)
        found = quantised(oriented, quantization).double().numpy()
        # FP32 rounds the products: a value midway between two of E2M1, within 2^-21, may round to either.
        is_close = np.isclose(found, expected, rtol=2.0**-21, atol=0)
        assert (~is_close).mean() <= 0.01
        assert (found == 0).sum() == (expected == 0).sum()
        flushed = (expected == 0) & (exact != 0)
        lost = loss(oriented, quantization)
        assert lost.flushed == flushed.sum()
        assert lost.lost == pytest.approx(np.abs(exact[flushed]).sum(), rel=1e-12)


def test_a_block_of_nvfp4_far_below_the_largest_is_flushed_whole() -> None:
    x = torch.ones(2, 16)
    x[1] = 2.0**-20
    assert torch.equal(quantised(x, NVFP4)[1], torch.zeros(16))
    assert loss(x, NVFP4).flushed == 16
    assert loss(x, MXFP8_E4M3).flushed == 0


def test_square_blocks_share_a_scale_in_both_directions() -> None:
    x = torch.ones(256, 256)
    x[0, 0] = 2.0**30
    counts = count_blocks(x, (128, 128))
    square = replace(FP8_BLOCK_128, block=(128, 128))
    assert counts.flushed(square) == 128 * 128 - 1 == loss(x, square).flushed
    assert torch.equal(quantised(x, square), quantised(x.T, square).T)


def test_stochastic_rounding_reports_the_expected_squared_error() -> None:
    x = torch.tensor([[6.0, 2.5, 0.1, *[0.0] * 13]])
    found = loss(x, replace(MXFP4, block=(1, 16), rounding=STOCHASTIC))
    # Neighbours are 2 and 3, and 0 and 0.5.
    assert found.noise == pytest.approx(0.5 * 0.5 + 0.1 * 0.4)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_every_recipe_quantises_any_shape(recipe: object) -> None:
    for _, product in recipe.products.each():  # type: ignore[attr-defined]
        for quantization in (product.left, product.right):
            if quantization is None:
                continue
            for x in (torch.randn(3, 5), torch.randn(7), torch.tensor(2.0), torch.zeros(0, 4), torch.zeros(4, 0)):
                out = quantised(x, quantization)
                assert out.shape == x.shape
                assert bool(out.isfinite().all())
            x = torch.randn(40, 48)
            assert loss(x, quantization).noise < 0.05 * float(x.square().sum())


def test_bad_input_is_named() -> None:
    with pytest.raises(TypeError, match="floating-point"):
        count_blocks(torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="negative"):
        count_blocks(torch.ones(3), (1, -1))
    with pytest.raises(ValueError, match="meta"):
        count_blocks(torch.ones(3, device="meta"))
    for block in ((1,), (1, 2, 3), (1.0, 32), "1x32", 32, None):
        with pytest.raises(ValueError, match="two integers"):
            count_blocks(torch.ones(3, 32), block)  # type: ignore[arg-type]
    for other in ([1.0], None, np.ones(3)):
        with pytest.raises(TypeError, match=type(other).__name__):
            count_blocks(other)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="complex64"):
        count_blocks(torch.ones(3, dtype=torch.complex64))
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for each in (torch.eye(32).to_sparse(), ragged):
        with pytest.raises(TypeError, match="dense values"):
            count_blocks(each)
    counts = count_blocks(torch.ones(3, 32))
    with pytest.raises(ValueError, match="flushed_bounds"):
        counts.flushed(FP32_SCALES[0])
    with pytest.raises(ValueError, match="earlier steps"):
        count_blocks(torch.ones(3, 32)).flushed_bounds(replace(FP32_SCALES[0], rule=HISTORY))
    with pytest.raises(ValueError, match=r"exceeds 0\.5"):
        count_blocks(torch.ones(3, 32), (1, 16)).flushed_bounds(NVFP4, largest=0.5)
    with pytest.raises(ValueError, match="1x16"):
        counts.flushed_bounds(NVFP4)
    with pytest.raises(ValueError, match="can't be added"):
        counts + count_blocks(torch.ones(3, 32), (1, 16))
    assert isinstance(counts, BlockCounts)


NVFP4_BLOCKS = [NVFP4, replace(NVFP4, block=(16, 16))]


def _near_edges_of_scales() -> torch.Tensor:
    """Return blocks whose scales lie at each of E4M3's lowest numbers and midway between them, and one unit either side."""
    exact = torch.arange(1, 40).double() / 4 / (448 * 512)
    tops = torch.cat([exact.float(), *(torch.nextafter(exact.float(), torch.tensor(each)) for each in (0.0, 1.0))])
    below = torch.exp2(torch.linspace(0, -9, 16)).expand(len(tops), 16)
    x = torch.cat([tops[:, None] * below, torch.tensor([[1.0, *[0.25] * 15]])])
    return torch.cat([x, x * 1.9])


EDGES = {
    "scales at the edges": _near_edges_of_scales,
    "tiny blocks": lambda: torch.randn(64, 64) * torch.exp2(torch.linspace(-149, -100, 64).double()[:, None]).float(),
    "subnormals": lambda: torch.randint(1, 1 << 23, (40, 64), dtype=torch.int32).view(torch.float32),
    "columns times 1000": lambda: torch.randn(64, 64) * torch.where(torch.arange(64) % 9 == 0, 1000.0, 1.0),
    "blocks far below": lambda: torch.randn(320, 16) * torch.exp2(-torch.arange(320) / 13)[:, None],
    "half zeros far below": lambda: torch.randn(320, 16).relu() * torch.exp2(-torch.arange(320) / 13)[:, None],
    "infinite": lambda: torch.cat([torch.randn(20, 64), torch.full((1, 64), math.inf)]),
    "zeros": lambda: torch.zeros(20, 64),
}


def _expect_bounds(x: torch.Tensor, quantization: Quantization) -> tuple[int, int, int]:
    """Check the bounds against the second pass; return them around its result."""
    counts, exact = count_blocks(x, quantization.block), loss(x, quantization).flushed
    low, high = counts.flushed_bounds(quantization)
    assert low <= exact <= high
    # Where a block has an infinity, its finite values do not count for the largest.
    if not counts.broken_blocks:
        near, far = counts.flushed_bounds(quantization, largest=float(x.abs().max()))
        assert low <= near <= exact <= far <= high
    return low, exact, high


@pytest.mark.parametrize("quantization", NVFP4_BLOCKS, ids=lambda each: each.block_name)
@pytest.mark.parametrize("name", [*DATA, *EDGES])
def test_bounds_hold_for_nvfp4(name: str, quantization: Quantization) -> None:
    x = EDGES[name]() if name in EDGES else _data(name)
    for oriented in (x, x.T.contiguous()):
        _expect_bounds(oriented, quantization)


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
    st.lists(st.integers(-40, 0), min_size=1, max_size=40),
    st.sampled_from([*NVFP4_BLOCKS, *(replace(each, block=(1, 16)) for each in FP32_SCALES)]),
)
def test_bounds_hold_for_any_bits(bits: list[int], spread: list[int], quantization: Quantization) -> None:
    exact = torch.from_numpy(np.array(bits, np.uint32).view(np.float32).copy())
    _expect_bounds(torch.cat([exact, exact.flip(0)])[None], quantization)
    # The same significands, within reach of each other.
    significands = torch.frexp(exact.nan_to_num(1.0, 1.0, 1.0))[0]
    rows = torch.exp2(torch.tensor(spread).float())[:, None]
    _expect_bounds(significands * rows, quantization)


def test_bounds_for_nvfp4_are_narrow_where_a_block_is_flushed_whole_or_its_scale_is_normal() -> None:
    x = torch.randn(64, 256)
    assert _expect_bounds(x, NVFP4)[0] > 0
    # An FP32 scale is within E4M3's rounding, so these bounds are within the wider ones.
    near, far = count_blocks(x, (1, 16)).flushed_bounds(replace(FP32_SCALES[2], block=(1, 16)))
    low, _, high = _expect_bounds(x, NVFP4)
    assert low <= near <= far <= high
    x[:16] *= 2.0**-30
    low, _, high = _expect_bounds(x, NVFP4)
    assert low >= 16 * 256
    assert high - low < 0.4 * 48 * 256
    x[:16] = x[:16].relu()
    assert _expect_bounds(x, NVFP4)[0] >= int((x[:16] != 0).sum())


def test_bounds_of_added_counts_hold_whatever_each_tensor_has_as_its_largest_value() -> None:
    steps = [torch.randn(32, 64) * torch.exp2(torch.linspace(-24, scale, 32))[:, None] for scale in (-8, 0, 8)]
    counts = [count_blocks(x, (1, 16)) for x in steps]
    exact = sum(loss(x, NVFP4).flushed for x in steps)
    single = [each.flushed_bounds(NVFP4) for each in counts]
    low, high = (counts[0] + counts[1] + counts[2]).flushed_bounds(NVFP4)
    assert low <= sum(each for each, _ in single) <= exact <= sum(each for _, each in single) <= high
    # One tensor's largest value is not another's: the first has none that is flushed whole for the third's.
    assert high > sum(each for _, each in single)
    assert sum(counts, BlockCounts((1, 16))).tensors == 3
