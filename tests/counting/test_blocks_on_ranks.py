"""Counts of shards add up to the whole's over two and four gloo processes; where shards cut blocks, they are bounds."""

import math
from functools import reduce
from operator import add
from pathlib import Path

import forked_ranks
import pytest
import torch
import torch.distributed as dist

from mpinspect import count_blocks
from mpinspect.counting.blocks import quantization_loss
from mpinspect.numeric.blocks import BlockCounts
from mpinspect.numeric.recipes import MXFP4, MXFP8_E4M3, NVFP4

#: Rows that 32 and the ranks divide, and rows that they do not.
ROWS = (256, 150)
COLUMNS = 96
#: By rows, sharded dimension and block.
Counts = dict[tuple[int, int, str], list[BlockCounts]]


def matrix(rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    spread = torch.randint(-24, 1, (rows, COLUMNS), generator=generator)
    return torch.randn(rows, COLUMNS, generator=generator) * torch.exp2(spread)


def count_shards(folder: Path) -> dict[tuple[int, int, str], BlockCounts]:
    """Return the counts of this rank's shards, by case."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    for rows in ROWS:
        for dim in (0, 1):
            shard = distribute_tensor(matrix(rows), mesh, [Shard(dim)])
            found[rows, dim, "1x32"] = count_blocks(shard)
            found[rows, dim, "32x1"] = count_blocks(shard.T)
            found[rows, dim, "16x1"] = count_blocks(shard.T, NVFP4.block)
    return found


@pytest.fixture(scope="module", params=[2, 4], ids=["two ranks", "four ranks"])
def ranks(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture(scope="module")
def counts(ranks: int, tmp_path_factory: pytest.TempPathFactory) -> Counts:
    """Returns the counts of every rank, by case."""
    folder = tmp_path_factory.mktemp(f"{ranks}-ranks")
    of_ranks = forked_ranks.results(folder, ranks, count_shards, ["torch.distributed.tensor"])
    return {case: [found[case] for found in of_ranks] for case in of_ranks[0]}


def _cut(length: int, ranks: int) -> int:
    """Return how many parts of blocks of 32 lie on shards without the rest of their block. Shards are equal but for the last."""
    size = math.ceil(length / ranks)
    shards = [range(start, min(start + size, length)) for start in range(0, length, size)]
    begins = [(shard, begin) for shard in shards for begin in {place // 32 * 32 for place in shard}]
    return sum(not {*range(begin, min(begin + 32, length))} <= {*shard} for shard, begin in begins)


@pytest.mark.parametrize("orientation", ["1x32", "32x1"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("rows", ROWS)
def test_counts_of_shards_add_up_or_say_that_blocks_are_cut(
    rows: int, dim: int, orientation: str, ranks: int, counts: Counts
) -> None:
    x = matrix(rows)
    whole = count_blocks(x if orientation == "1x32" else x.T)
    total = reduce(add, counts[rows, dim, orientation])
    along = dim == (orientation == "1x32")
    cut = _cut(x.shape[dim], ranks) * x.shape[1 - dim] if along else 0
    assert total.cut_blocks == cut
    assert (total.nonzero, total.zeros) == (whole.nonzero, whole.zeros)
    for quantization in (MXFP8_E4M3, MXFP4):
        low, high = total.flushed_bounds(quantization)
        assert low <= whole.flushed(quantization) <= high
        if cut:
            with pytest.raises(ValueError, match=f"cut {cut} blocks"):
                total.flushed(quantization)
            with pytest.raises(ValueError, match="flushed_bounds"):
                total.subnormal(quantization)
    if not cut:
        assert total == whole


def test_some_cases_are_cut_and_some_are_not(ranks: int, counts: Counts) -> None:
    cut = {case for case, found in counts.items() if any(each.cut_blocks for each in found)}
    # 150 rows: no shard has a multiple of 32. 96 columns: two shards have 48, four have 24. 256 rows are cut by none.
    assert cut == {(150, 0, "32x1"), (150, 0, "16x1"), (256, 1, "1x32"), (150, 1, "1x32")}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("rows", ROWS)
def test_bounds_for_nvfp4_need_the_largest_value_of_all_ranks(rows: int, dim: int, ranks: int, counts: Counts) -> None:
    x = matrix(rows).T
    exact, shards = quantization_loss(x, NVFP4).flushed, counts[rows, dim, "16x1"]
    total = reduce(add, shards)
    assert (total.shards, total.tensors) == (ranks, ranks)
    low, high = total.flushed_bounds(NVFP4, largest=float(x.abs().max()))
    assert 0 < low <= exact <= high
    assert total.cut_blocks or high < total.nonzero
    # Another rank may hold a value so large that this rank's are all flushed.
    lowest, highest = total.flushed_bounds(NVFP4)
    assert lowest <= low
    assert highest == total.nonzero
