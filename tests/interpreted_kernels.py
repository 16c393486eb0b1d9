"""Run by test_counting_cuda.py in a process of its own, with TRITON_INTERPRET=1: prints "held: NAME" for each check that held."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mpinspect.counting import reference
from mpinspect.counting.cuda import counter, kernels
from mpinspect.counting.pieces import COUNTABLE

# The interpreter's time goes by operations, not by values: fewer programs, of more lanes than on a GPU, are faster.
LANES = 64
counter._LANES = LANES
TILE = LANES * kernels.VALUES.value
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def agree(tensor: torch.Tensor) -> None:
    """Every field of the row is that of the reference."""
    ours, true = counter.count(tensor), reference.count(tensor)
    differing = (ours != true).nonzero().view(-1).tolist()
    assert not differing, [(i, int(ours[i]), int(true[i])) for i in differing[:10]]


def from_codes(codes: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(codes, dtype=torch.int64).to(INTEGERS[dtype.itemsize]).view(dtype)


def codes_of(dtype: torch.dtype) -> st.SearchStrategy[int]:
    """Bit patterns, those near where the exponent field changes among them."""
    bits, mantissa = 8 * dtype.itemsize, {torch.float64: 52, torch.float32: 23, torch.bfloat16: 7}.get(dtype, 10)
    if bits == 8:
        return st.integers(0, 255)
    anything = st.integers(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    edges = st.builds(
        lambda field, offset: max((field << mantissa) + offset, 0),
        st.integers(0, (1 << (bits - 1 - mantissa)) - 1),
        st.integers(-3, 3) | st.just(-(1 << max(mantissa - 11, 0))),
    )
    return anything | edges | st.just(0)


def by_hypothesis(*dtypes: torch.dtype) -> Callable[[], None]:
    @settings(
        max_examples=4,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        for dtype in dtypes:
            codes = data.draw(st.lists(codes_of(dtype), max_size=40))
            full = from_codes((codes * (TILE // max(len(codes), 1) + 1))[:TILE], dtype)
            # A last tile that is not full alone, and with a full one before it.
            agree(from_codes(codes, dtype))
            if data.draw(st.booleans()):
                agree(torch.cat((full, from_codes(codes, dtype))))

    return check


def every_code() -> None:
    for dtype in COUNTABLE:
        if dtype.itemsize == 1:
            agree(from_codes(list(range(256)) * (TILE // 256 + 1), dtype))
    for dtype in (torch.float16, torch.bfloat16):
        agree(from_codes(list(range(0, 1 << 16, 13)), dtype))


def sizes_around_a_tile() -> None:
    for size in (0, 1, 15, LANES, TILE - 1, TILE, TILE + 1, 3 * TILE, 5 * TILE + 7):
        agree(torch.randn(size))
    agree(torch.tensor(3.5))


def one_kind_of_value() -> None:
    for value in (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0, 2 - 2.0**-11, 2.0**-149, -(2.0**-126)):
        agree(torch.full((2 * TILE + 3,), value))
    agree(torch.randint(0, 1 << 23, (TILE + 5,), dtype=torch.int32).view(torch.float32))
    agree(torch.full((TILE,), 5e-324, dtype=torch.float64))


def window() -> None:
    """Values at both ends of what is counted fast, and far beyond."""
    for exponent in (-120, -30, 0, 90):
        spread = torch.exp2(torch.arange(-25.0, 16.0)).repeat(TILE // 40 + 2)
        centre = torch.full((TILE,), 2.0**exponent)
        agree(torch.cat((centre, spread * 2.0**exponent)))
    agree(torch.exp2(torch.randint(-140, 120, (2 * TILE,)).float()) * 1.5)


def strides() -> None:
    base = torch.randn(40, 60)
    agree(base.t())
    agree(base[::3, 5::2])
    agree(base[:, :1].expand(40, 70))
    agree(torch.view_as_real(torch.randn(30, 7, dtype=torch.complex64))[..., 1])
    agree(torch.randn(2, 3, 8, 5).to(memory_format=torch.channels_last))
    agree(torch.randn(9)[1:])


def twice() -> None:
    """A row takes another tensor's counts on top of its own, an expanded one's too."""
    first, second, third = torch.randn(TILE + 9) * 2.0**-40, torch.randn(50), torch.randn(3, 1).expand(3, 5)
    row = counter.count(first)
    counter.add(second, row)
    counter.add(third, row)
    assert torch.equal(row, reference.count(torch.cat((first, second, third.reshape(-1)))))


def many() -> None:
    tensors = [
        torch.randn(size).to(dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float8_e5m2)
        for size in (1, TILE + 1, 0, 31 * TILE + 5, 600)
        if size < 2 * TILE or dtype == torch.float32
    ]
    rows = [counter.empty_row(counter.encoding_of(tensor.dtype), tensor.device) for tensor in tensors]
    counter.add_many([counter.Counted(tensor, row) for tensor, row in zip(tensors, rows, strict=True)])
    for tensor, row in zip(tensors, rows, strict=True):
        assert torch.equal(row, reference.count(tensor))


def shares() -> None:
    """Programs as full as they may be: the sums over lanes must not overflow."""
    counter._FEWEST_TILES = counter._MOST_IN_A_PROGRAM // TILE
    agree(torch.ones(counter._MOST_IN_A_PROGRAM // TILE * TILE + 5))


def flush_denormals() -> None:
    if torch.set_flush_denormal(True):
        tensor = torch.cat((torch.randint(0, 1 << 23, (TILE,), dtype=torch.int32).view(torch.float32), torch.randn(9)))
        ours = counter.count(tensor)
        torch.set_flush_denormal(False)
        assert torch.equal(ours, reference.count(tensor))


CHECKS: dict[str, Callable[[], None]] = {
    "hypothesis float32": by_hypothesis(torch.float32),
    "hypothesis float16": by_hypothesis(torch.float16),
    "hypothesis bfloat16": by_hypothesis(torch.bfloat16),
    "hypothesis float64": by_hypothesis(torch.float64),
    "hypothesis float8": by_hypothesis(torch.float8_e4m3fn, torch.float8_e5m2),
    "every code": every_code,
    "sizes around a tile": sizes_around_a_tile,
    "one kind of value": one_kind_of_value,
    "window": window,
    "strides": strides,
    "twice": twice,
    "many": many,
    "shares": shares,
    "flush-denormals": flush_denormals,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    for name in sys.argv[1:] or CHECKS:
        try:
            CHECKS[name]()
        except Exception:
            print(f"failed: {name}\n{traceback.format_exc()}", flush=True)
        else:
            print(f"held: {name}", flush=True)
