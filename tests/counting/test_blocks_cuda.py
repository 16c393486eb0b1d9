"""Blocks counted by the CUDA kernel, run as host code, equal those counted with torch."""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cuda_on_host import HostGpu, build
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_blocks_cpu import BLOCKS, DTYPES, STEPS, VIEWS, by_torch, special_magnitudes
from test_counting_cpu import KINDS, bits_of_kind, tensor_of

from mpinspect.counting import blocks
from mpinspect.counting.cuda import available, counter, driver
from mpinspect.counting.cuda import blocks as on_cuda
from mpinspect.numeric.blocks import BlockCounts


@pytest.fixture(scope="module", autouse=True)
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostGpu]:
    stand_in = HostGpu(build(tmp_path_factory.mktemp("kernels"), 32), 32, most_blocks=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "gpu_of", lambda device: stand_in)
        yield stand_in


def by_kernel(tensor: torch.Tensor, block: tuple[int, int]) -> BlockCounts:
    kernel = SimpleNamespace(
        takes=on_cuda.takes, count=lambda region, size, block, row: on_cuda.count(region, size, block)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks.on_cpu, "BLOCKS", SimpleNamespace(loops=lambda: kernel))
        return blocks.count_blocks(tensor, block)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    shape=st.tuples(st.integers(1, 70), st.one_of(st.integers(1, 300), st.sampled_from([32, 64, 4096]))),
    block=st.sampled_from(BLOCKS),
    view=st.sampled_from(list(VIEWS)),
    threads=st.sampled_from([1, 3, 500]),
    seed=st.integers(0, 2**32 - 1),
)
@example(kinds=["subnormals", "narrow"], shape=(64, 64), block=(1, 32), view="columns", threads=3, seed=0)
@example(kinds=["any", "powers of two"], shape=(64, 64), block=(16, 16), view="rows", threads=3, seed=0)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bits_in_any_blocks(
    gpu: HostGpu,
    dtype: torch.dtype,
    kinds: list[str],
    shape: tuple[int, int],
    block: tuple[int, int],
    view: str,
    threads: int,
    seed: int,
) -> None:
    gpu.most_blocks = threads
    random = np.random.default_rng(seed)
    rows = [bits_of_kind(kinds[row % len(kinds)], shape[1], dtype, random) for row in range(shape[0])]
    tensor = VIEWS[view](tensor_of(np.stack(rows), dtype))
    assert by_kernel(tensor, block) == by_torch(tensor, block)


@pytest.mark.parametrize("step", STEPS)
def test_blocks_around_every_special_magnitude(step: int) -> None:
    for values in special_magnitudes(step):
        for block in BLOCKS[:2]:
            assert by_kernel(values, block) == by_torch(values, block)


def test_a_launch_for_each_part_with_blocks_of_one_size(gpu: HostGpu) -> None:
    before = len(gpu.launched)
    by_kernel(torch.ones(40, 100, dtype=torch.bfloat16), (16, 16))
    # Full blocks, narrow ones, flat ones, and the corner.
    assert gpu.launched[before:] == ["blocks_bfloat16"] * 4


def test_an_expanded_tensor() -> None:
    x = torch.randn(1, 64).expand(40, 64)
    assert by_kernel(x, (1, 32)) == by_torch(x, (1, 32))
    assert by_kernel(x.T, (1, 32)) == by_torch(x.T, (1, 32))


def test_a_kernel_that_fails_leaves_the_count_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> HostGpu:
        raise RuntimeError("CUDA: no kernel image")

    monkeypatch.setattr(available, "counter", lambda: counter)
    monkeypatch.setattr(available, "_trouble", [])
    x = torch.randn(8, 64)
    assert available.count_blocks(x, (1, 32), (1, 32)) == by_torch(x, (1, 32))
    assert available.count_blocks(x.double(), (1, 32), (1, 32)) is None
    monkeypatch.setattr(driver, "gpu_of", refuse)
    assert available.count_blocks(x, (1, 32), (1, 32)) is None
    assert "no kernel image" in available.trouble()


def test_the_size_of_the_kernels_parameter_equals_the_layout(gpu: HostGpu) -> None:
    assert gpu.constant(4) == driver.MATRIX.size
