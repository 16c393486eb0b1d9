"""Blocks counted by numba's loops equal those counted with torch, for any bits, shapes, strides and sizes of blocks."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_counting_cpu import KINDS, bits_of_kind, tensor_of
from torch.utils._python_dispatch import TorchDispatchMode

from mpinspect.counting import blocks, fastest
from mpinspect.counting.cpu import available, planes
from mpinspect.numeric.blocks import BlockCounts

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Blocks of recipes, odd ones, ones larger than a tile of the loops, and two that torch counts.
BLOCKS = ((1, 16), (1, 32), (1, 128), (16, 16), (128, 128), (3, 7), (1, 5), (2, 4096), (1, 0), (0, 0))


@pytest.fixture(scope="module", autouse=True)
def _there_are_loops() -> None:
    assert available.BLOCKS.compile_here() is not None


def by_torch(tensor: torch.Tensor, block: tuple[int, int]) -> BlockCounts:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks.on_cpu, "BLOCKS", SimpleNamespace(loops=lambda: None))
        return blocks.count_blocks(tensor, block)


def expect_the_same(tensor: torch.Tensor, block: tuple[int, int]) -> None:
    counts, row = blocks.blocks_and_exponents(tensor, block, exponents=True)
    assert counts == by_torch(tensor, block)
    assert row is not None
    assert torch.equal(row, fastest.count(tensor))


#: Views of a matrix that the loops read in different ways.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda x: x,
    "columns": lambda x: x.T,
    "a part": lambda x: x[1:, 3:],
    "columns of a part": lambda x: x[1:, 3:].T,
    "every other": lambda x: x[:, ::2],
    "flat": torch.flatten,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    shape=st.tuples(st.integers(1, 70), st.one_of(st.integers(1, 300), st.sampled_from([32, 64, 4096]))),
    block=st.sampled_from(BLOCKS),
    view=st.sampled_from(list(VIEWS)),
    seed=st.integers(0, 2**32 - 1),
)
@example(kinds=["subnormals", "narrow"], shape=(64, 64), block=(1, 32), view="columns", seed=0)
@example(kinds=["any", "narrow"], shape=(64, 64), block=(1, 32), view="rows", seed=0)
@example(kinds=["powers of two"], shape=(8, 4096), block=(1, 16), view="rows", seed=0)
@settings(max_examples=80, deadline=None)
def test_any_bits_in_any_blocks(
    dtype: torch.dtype, kinds: list[str], shape: tuple[int, int], block: tuple[int, int], view: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    rows = [bits_of_kind(kinds[row % len(kinds)], shape[1], dtype, random) for row in range(shape[0])]
    expect_the_same(VIEWS[view](tensor_of(np.stack(rows), dtype)), block)


@pytest.mark.parametrize(
    ("dtype", "block", "oriented", "threads"),
    [
        (dtype, block, ("rows", "columns")[(i + j) % 2], 1 + (i + j // 2) % 2)
        for i, dtype in enumerate(DTYPES)
        for j, block in enumerate(BLOCKS[:5])
    ],
    indirect=["threads"],
)
def test_more_values_than_the_planes_hold(
    dtype: torch.dtype, block: tuple[int, int], oriented: str, threads: int
) -> None:
    values = torch.randn(
        threads * planes.MOST_BLOCKS + 100, planes.BLOCK, generator=torch.Generator().manual_seed(0)
    ).exp()
    expect_the_same(VIEWS[oriented](values.to(dtype)), block)


@pytest.mark.parametrize(
    ("dtype", "step", "threads"),
    [
        (dtype, step, 1 + (i + j) % 2)
        for i, dtype in enumerate((torch.float32, torch.bfloat16))
        for j, step in enumerate((0, 1, 5, 31, 40))
    ],
    indirect=["threads"],
)
def test_exponents_whose_window_moves(dtype: torch.dtype, step: int, threads: int) -> None:
    """Rows lie ``step`` powers of two apart, up and down, and hold zeros, powers of two and values just below the next one."""
    generator = torch.Generator().manual_seed(step)
    values = torch.randn(24, 8192, generator=generator)
    edges = torch.tensor([0.0, 1.0, -2.0, 2 - 2**-11, 2 - 2**-11 - 2**-23, 2 - 2**-23, -1 - 2**-23])
    chosen = torch.randint(0, len(edges), values.shape, generator=generator)
    values = torch.where(torch.rand(values.shape, generator=generator) < 0.2, edges[chosen], values)
    scales = torch.exp2(step * (torch.arange(24) % 5 - 2.0))
    for block in ((1, 32), (1, 128), (128, 128)):
        expect_the_same((values * scales[:, None]).to(dtype), block)


#: Arguments of ``special_magnitudes``.
STEPS = range(-40, 200, 7)


def special_magnitudes(step: int) -> list[torch.Tensor]:
    """Return maxima from subnormals to infinity, with elements up to 90 powers of two below, which may be subnormal."""
    generator = torch.Generator().manual_seed(step + 40)
    below = -90 * torch.rand(40, 64, generator=generator)
    x = torch.randn(40, 64, generator=generator) * torch.exp2(below.double() + step - 110)
    x[torch.rand(40, 64, generator=generator) < 0.1] = 0
    powers = torch.exp2((below + step - 110).round().double())
    return [values.float() for values in (x, powers, torch.where(x > 0, x, powers))]


@pytest.mark.parametrize("step", STEPS)
def test_blocks_around_every_special_magnitude(step: int) -> None:
    for values in special_magnitudes(step):
        for block in BLOCKS[:2]:
            expect_the_same(values, block)


def test_a_tensor_without_values_or_of_other_dtypes() -> None:
    for tensor in (torch.zeros(0, 4), torch.zeros(4, 0), torch.tensor(1.5), torch.ones(3, 40).expand(5, 3, 40)):
        assert blocks.count_blocks(tensor) == by_torch(tensor, (1, 32))
    x = torch.randn(20, 70, dtype=torch.float64)
    assert blocks.count_blocks(x) == blocks.count_blocks(x.float())
    x = x.to(torch.float8_e4m3fn)
    assert blocks.count_blocks(x) == blocks.count_blocks(x.float())


def test_a_negated_view_and_a_zero_tensor() -> None:
    imaginary = torch.randn(4, 64, dtype=torch.complex64).conj().imag
    assert imaginary.is_neg()
    assert blocks.count_blocks(imaginary) == blocks.count_blocks(imaginary.clone())
    none = torch._efficientzerotensor((2, 64))
    assert blocks.count_blocks(none).zeros == 128


def test_a_tensor_whose_memory_was_freed_is_not_read() -> None:
    x = torch.ones(4, 32)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="storage of size 0"):
        blocks.count_blocks(x)


class _Made(TorchDispatchMode):
    """Records the largest tensor that operators make in new memory, in elements."""

    largest = 0

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self._given = given.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != self._given:
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("oriented", ["rows", "columns", "a part"])
def test_counting_in_torch_copies_no_more_than_a_piece(dtype: torch.dtype, oriented: str) -> None:
    x = torch.randn(1027, 2053, generator=torch.Generator().manual_seed(0)).to(dtype)
    with _Made(x) as made:
        by_torch(VIEWS[oriented](x), (1, 32))
    assert 0 < made.largest <= blocks._AT_ONCE < x.numel() / 4
