"""The CUDA kernels, run as host code, equal the reference and torch exactly; and they compile for GPUs."""

import itertools
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_on_host import HostGpu, build
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpinspect.counting import reference
from mpinspect.counting.cuda import compiling, counter, driver
from mpinspect.counting.cuda.blocks import _KINDS as BLOCK_KINDS

INF, NAN = math.inf, math.nan
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = sorted(counter.DTYPES, key=str)
WIDE = [torch.float32, torch.float64]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


#: Runs a test with both layouts of the counters in shared memory; the others use 32 columns.
both_layouts = pytest.mark.parametrize("library", [32, 16], ids=["32 columns", "16 columns"], indirect=True)


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    columns = getattr(request, "param", 32)
    folder = tmp_path_factory.getbasetemp() / f"kernels{columns}"
    if not folder.exists():
        folder.mkdir()
        build(folder, columns)
    return next(folder.glob("*.so")), columns


@pytest.fixture
def gpu(library: tuple[Path, int], monkeypatch: pytest.MonkeyPatch) -> HostGpu:
    stand_in = HostGpu(*library, most_blocks=3)
    monkeypatch.setattr(driver, "gpu_of", lambda device: stand_in)
    return stand_in


def agree(tensor: torch.Tensor) -> None:
    """Assert that the counts equal the reference's, and the largest magnitude torch's."""
    ours, true = counter.count(tensor), reference.count(tensor)
    differing = (ours != true).nonzero().view(-1).tolist()
    assert not differing, [(i, int(ours[i]), int(true[i])) for i in differing[:10]]
    if tensor.is_contiguous():
        found, broken = largest([tensor])
        assert found == [_true_largest(tensor)], (found, _true_largest(tensor))
        assert broken is bool(true[1] + true[2])


def largest(
    tensors: list[torch.Tensor], broken: int = 0, only_if_broken: bool = False
) -> tuple[list[float | str | None], bool]:
    """Return the largest magnitudes ("nan" for NaN, since NaN != NaN), and the flag ``broken``."""
    slots, word = torch.zeros(len(tensors), dtype=torch.int64), torch.tensor([broken])
    addresses = range(slots.data_ptr(), slots.data_ptr() + 8 * len(tensors), 8)
    counter.largest_many(tensors, addresses, word, only_if_broken)
    is_double = np.array([tensor.dtype == torch.float64 for tensor in tensors])
    found = counter.largest_of_slots(slots.numpy().view(np.uint64), is_double)
    assert int(word) in (0, 1)
    return [_named(value) for value in found], bool(word)


def _true_largest(tensor: torch.Tensor) -> float | str | None:
    """Compute the largest magnitude with float64 arithmetic."""
    if not tensor.numel():
        return None
    wide = tensor.double().numpy().reshape(-1)
    if np.isnan(wide).any():
        return "nan"
    if np.isinf(wide).any():
        return INF if wide.max() == INF else -INF
    return float(np.abs(wide).max())


def _named(value: float | None) -> float | str | None:
    return "nan" if value is not None and math.isnan(value) else value


def from_codes(codes: list[int], dtype: torch.dtype) -> torch.Tensor:
    bits = 8 * dtype.itemsize
    signed = codes if bits == 8 else [code - ((code >> (bits - 1)) << bits) for code in codes]
    return torch.tensor(signed, dtype=BITS[dtype.itemsize]).view(dtype)


def drawn(dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Draw values in a gradient's range; for 8-bit types, any code."""
    generator = torch.Generator().manual_seed(numel)
    if dtype.itemsize == 1:
        return torch.randint(0, 256, (numel,), generator=generator, dtype=torch.uint8).view(dtype)
    return (torch.randn(numel, generator=generator) * 1e-3).to(dtype)


def per_tile(dtype: torch.dtype) -> int:
    return counter._TILE_BYTES // dtype.itemsize


# -- values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "library"),
    [
        *((dtype, 32) for dtype in DTYPES if dtype.itemsize <= 2),
        *((dtype, 16) for dtype in (torch.bfloat16, torch.float16, torch.float8_e5m2)),
    ],
    indirect=["library"],
)
def test_every_code(gpu: HostGpu, dtype: torch.dtype) -> None:
    codes = list(range(1 << 8 * dtype.itemsize))
    agree(from_codes(codes, dtype))
    # A single code fills a tensor, short or long; then codes at addresses that are not aligned to vectors.
    for number, code in enumerate(codes[:: 1 if dtype.itemsize == 1 else 257]):
        agree(from_codes([code] * (1, 40)[number % 2], dtype))
    agree(from_codes([*codes, *codes], dtype)[1:])


@pytest.mark.parametrize("kind", ["finite", "subnormal", "up to infinity", "no infinity but NaN"])
def test_every_kind_of_half(gpu: HostGpu, kind: str) -> None:
    """Each kind of codes has another largest magnitude."""
    for dtype, infinity, normal in ((torch.bfloat16, 0x7F80, 0x80), (torch.float16, 0x7C00, 0x400)):
        codes = {
            "finite": range(infinity),
            "subnormal": range(1, normal),
            "up to infinity": range(infinity + 1),
            "no infinity but NaN": [*range(infinity), infinity + 1],
        }[kind]
        agree(from_codes([*codes, *(0x8000 | code for code in codes)] * 3, dtype))


def codes_of(dtype: torch.dtype) -> st.SearchStrategy[int]:
    """Draw bit patterns, including those near a change of the exponent field."""
    bits, mantissa = 8 * dtype.itemsize, {torch.float64: 52, torch.float32: 23}[dtype]
    edges = st.builds(
        lambda sign, field, offset: (sign << bits - 1) + max((field << mantissa) + offset, 0),
        st.integers(0, 1),
        st.integers(0, (1 << (bits - 1 - mantissa)) - 1),
        st.integers(-3, 3) | st.integers(-2, 2).map(lambda offset: offset - (1 << (mantissa - 11))),
    )
    subnormals = st.builds(
        lambda top, below: max((1 << top) - below, 0), st.integers(0, mantissa), st.integers(0, 3) | st.just(1 << 11)
    )
    return st.integers(0, (1 << bits) - 1) | edges | subnormals | st.just(0)


@both_layouts
@pytest.mark.parametrize("dtype", WIDE, ids=str)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_bit_patterns(gpu: HostGpu, dtype: torch.dtype, data: st.DataObject) -> None:
    codes = data.draw(st.lists(codes_of(dtype), max_size=40))
    agree(from_codes(codes, dtype))
    if codes and data.draw(st.booleans()):
        agree(from_codes((codes * 10_000)[: per_tile(dtype) + 5], dtype))


@both_layouts
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_every_exponent_and_edge(gpu: HostGpu, dtype: torch.dtype) -> None:
    mantissa, fields = (23, 256) if dtype == torch.float32 else (52, 2048)
    edges = (
        0,
        1,
        1 << mantissa - 11,
        (1 << mantissa) - (1 << mantissa - 11) - 1,
        (1 << mantissa) - (1 << mantissa - 11),
    )
    normal = [(field << mantissa) + edge for field in range(1, fields - 1) for edge in (*edges, (1 << mantissa) - 1)]
    subnormal = [code for top in range(mantissa) for code in (1 << top, (2 << top) - 1, (3 << top) // 2 or 1)]
    near = [(2 << top) - (1 << max(top - 11, 0)) - miss for top in range(11, mantissa) for miss in (0, 1)]
    special = [0, (fields - 1) << mantissa, ((fields - 1) << mantissa) + 1, (fields << mantissa) - 1]
    for codes in (normal, subnormal, near, special, [*normal, *subnormal, *near], [*subnormal, *near, *special]):
        agree(from_codes(codes * 3, dtype))
    for code in (*subnormal, *special, *normal[::97]):
        agree(from_codes([code] * 9, dtype))


@pytest.mark.parametrize("value", [0.0, -0.0, INF, -INF, NAN, 1.0, 2 - 2.0**-11, 2.0**-149, -(2.0**-126)])
def test_tensors_of_one_repeated_value(gpu: HostGpu, value: float) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        agree(torch.full((2 * per_tile(dtype) + 3,), value, dtype=dtype))


@pytest.mark.parametrize("position", [0, 1, 1000, -1, -2])
@pytest.mark.parametrize("value", [INF, -INF, NAN, 2.0**-140])
def test_one_unusual_value_among_others(gpu: HostGpu, value: float, position: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensor = drawn(dtype, 2 * per_tile(dtype) + 7)
        tensor[position] = value
        agree(tensor)


def test_flush_denormals_changes_nothing(gpu: HostGpu) -> None:
    tensor = torch.cat((torch.randint(0, 1 << 23, (5000,), dtype=torch.int32).view(torch.float32), torch.ones(9)))
    expected = reference.count(tensor), largest([tensor[:5000]])
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        found = counter.count(tensor), largest([tensor[:5000]])
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found[0], expected[0])
    assert found[1] == expected[1]
    assert found[1][0][0] > 0


# -- sizes and layouts ---------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_sizes_around_tiles_and_vectors(gpu: HostGpu, dtype: torch.dtype, blocks: int) -> None:
    gpu.most_blocks = blocks
    tile, vector = per_tile(dtype), 16 // dtype.itemsize
    sizes = {
        0,
        1,
        vector - 1,
        vector,
        vector + 1,
        256 * vector + 1,
        *(n * tile + d for n in (1, 3) for d in (-1, 0, 1)),
    }
    for size in sorted(sizes):
        agree(drawn(dtype, size))


@each_dtype
def test_misaligned_tensors(gpu: HostGpu, dtype: torch.dtype) -> None:
    tile, vector = per_tile(dtype), 16 // dtype.itemsize
    memory = drawn(dtype, 2 * tile + 3 * vector)
    for offset in range(min(vector, 5) + 1):
        for size in (1, vector - 1, vector, 2 * vector - 1, tile - offset, tile, 2 * tile + 1):
            agree(memory[offset : offset + size])


def test_strides(gpu: HostGpu) -> None:
    base = torch.randn(50, 60)
    agree(base.t())
    agree(base[::3, 5::2])
    agree(base[:, :1].expand(40, 50, 70))
    agree(torch.view_as_real(torch.randn(30, 7, dtype=torch.complex64))[..., 1])
    agree(torch.randn(2, 3, 8, 5).to(memory_format=torch.channels_last))
    agree(torch.tensor(3.5))
    assert gpu.launched.count("count_float32") == 6


def test_counts_are_added_to_a_row(gpu: HostGpu) -> None:
    first, second, third = torch.randn(5000) * 2.0**-40, torch.randn(50), torch.randn(3, 1).expand(3, 5)
    row = counter.count(first)
    counter.add(second, row)
    counter.add(third, row)
    assert torch.equal(row, reference.count(torch.cat((first, second, third.reshape(-1)))))


@both_layouts
@pytest.mark.parametrize("blocks", [1, 7, 1000])
def test_many_tensors_of_every_dtype(gpu: HostGpu, blocks: int) -> None:
    gpu.most_blocks = blocks
    sizes = (1, 5000, 0, 20_000, 600, 3)
    tensors = [drawn(dtype, size) for size in sizes for dtype in DTYPES]
    tensors[3], tensors[7] = torch.full((70,), -INF), torch.tensor([1.0, NAN], dtype=torch.bfloat16)
    rows = [counter.empty_row(counter.encoding_of(tensor.dtype), tensor.device) for tensor in tensors]
    counter.add_many([counter.Counted(tensor, row) for tensor, row in zip(tensors, rows, strict=True)])
    assert len(gpu.launched) == len(DTYPES)
    for tensor, row in zip(tensors, rows, strict=True):
        assert torch.equal(row, reference.count(tensor))
    assert largest(tensors) == ([_true_largest(tensor) for tensor in tensors], True)


def test_more_tensors_than_a_table_holds(gpu: HostGpu) -> None:
    tensors = [drawn(torch.float32, 1 + index % 7) for index in range(2 * driver.ENTRIES + 1)]
    row = counter.empty_row(counter.BINARY32, torch.device("cpu"))
    counter.add_many([counter.Counted(tensor, row) for tensor in tensors])
    assert torch.equal(row, reference.count(torch.cat(tensors)))
    assert largest(tensors) == ([_true_largest(tensor) for tensor in tensors], False)
    assert gpu.launched == ["count_float32"] * 3 + ["largest_float32"] * 3


def test_a_tensor_larger_than_an_entry(gpu: HostGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counter, "_MOST_IN_AN_ENTRY", 1 << 12)
    for dtype in (torch.bfloat16, torch.float64):
        agree(drawn(dtype, 3 * (1 << 12) + 11))
    assert len(gpu.launched) == 4


# -- largest magnitudes --------------------------------------------------------------------------------------------------


def test_magnitudes_are_read_only_if_broken(gpu: HostGpu) -> None:
    tensors = [torch.ones(3), torch.ones(5, dtype=torch.float64)]
    assert largest(tensors, broken=0, only_if_broken=True) == ([None, None], False)
    assert largest(tensors, broken=1, only_if_broken=True) == ([1.0, 1.0], True)
    assert largest(tensors, broken=1) == ([1.0, 1.0], True)


def test_a_slot_stores_the_larger_magnitude(gpu: HostGpu) -> None:
    ascending: list[float] = [0.0, 1.0, 3.0, -INF, INF, NAN]
    for first, second in itertools.product(range(len(ascending)), repeat=2):
        tensors = [torch.tensor([ascending[index]]) for index in (first, second)]
        slot, broken = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        counter.largest_many(tensors, [slot.data_ptr()] * 2, broken)
        (found,) = counter.largest_of_slots(slot.numpy(), False)
        assert _named(found) == _named(ascending[max(first, second)])


# -- compilation for absent GPUs -----------------------------------------------------------------------------------------

#: The limit of registers per thread, at which 4 blocks fit on a multiprocessor.
REGISTERS = 64
#: The limit of instructions per value in the loop over whole tiles, on 8.0 and later; see docs/performance.md.
INSTRUCTIONS = {"count_float32": 12, "count_bfloat16": 12, "largest_float32": 4, "largest_bfloat16": 4}


def instructions_a_value(listing: str) -> dict[str, float]:
    """Return each kernel's instructions per value, from nvdisasm's output, in the loop that loads four vectors of 16 bytes.

    Inner loops, which handle rare values near the top of the range, are excluded.
    """
    found = {}
    for section in re.split(r"\.section\s+\.text\.", listing)[1:]:
        code: list[str] = []
        labels: dict[str, int] = {}
        for line in section.splitlines():
            if label := re.match(r"\s*(\.L_\S+):", line):
                labels[label[1]] = len(code)
            if instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
                code.append(instruction[1])
        jumps = [(re.search(r"BRA\S*.*?`\((\.L_\S+)\)", text), index) for index, text in enumerate(code)]
        loops = [range(labels[to[1]], index + 1) for to, index in jumps if to and labels[to[1]] <= index]
        main = next(loop for loop in sorted(loops, key=len) if sum("LDG.E.128" in code[i] for i in loop) == 4)
        inside = {i for loop in loops if loop != main and set(loop) < set(main) for i in loop}
        name = section.split(",")[0].strip('"')
        found[name] = (len(main) - len(inside)) / (4 * 16 // (2 if "float16" in name else 4))
    return found


def test_constants_equal_the_sources(gpu: HostGpu) -> None:
    assert gpu.constant(0) == driver.ENTRIES
    assert gpu.constant(1) == driver._THREADS
    assert gpu.constant(2) == counter._TILE_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("capability", [70, 80, 90, 120])
def test_the_kernels_compile_without_spills(tmp_path: Path, capability: int) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is missing: it compiles for GPUs that are not here")
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout.split()
    if f"compute_{capability}" not in known:
        pytest.skip(f"this nvcc does not compile for compute capability {capability / 10}")
    (tmp_path / "kernels.cu").write_text(compiling.source())
    kinds = [f"-DONLY_{kind.upper()}" for kind in driver._COUNTERS]
    blocks = [f"-DBLOCKS_{kind.upper()}" for kind in BLOCK_KINDS.values()]
    options = ["-std=c++14", "-cubin", f"-arch=sm_{capability}", "-Xptxas", "-v", *kinds, *blocks]
    done = subprocess.run(
        [nvcc, *options, "-o", str(tmp_path / "kernels.cubin"), str(tmp_path / "kernels.cu")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    assert re.findall(r"[1-9]\d* bytes (?:spill|stack)", done.stderr) == []
    used = re.findall(r"Used (\d+) registers", done.stderr)
    assert len(used) == 2 * len(kinds) + len(blocks)
    assert max(map(int, used)) <= REGISTERS
    nvdisasm = shutil.which("nvdisasm")
    if nvdisasm is not None and capability >= 80:
        options = ["-c", str(tmp_path / "kernels.cubin")]
        listing = subprocess.run([nvdisasm, *options], capture_output=True, text=True, check=True).stdout
        found = instructions_a_value(listing)
        assert all(found[name] <= most for name, most in INSTRUCTIONS.items()), found


@pytest.mark.parametrize(
    "unit", [*(f"only_{kind}" for kind in driver._COUNTERS), *(f"blocks_{kind}" for kind in BLOCK_KINDS.values())]
)
def test_nvrtc_compiles_the_kernels(unit: str) -> None:
    try:
        image, log = compiling.compiled(unit, 32, 90)
    except OSError as error:
        pytest.skip(f"{error}: it compiles the kernels when they are first used")
    assert image.startswith(b"\x7fELF")
    assert log == ""
    # GPUs newer than this NVRTC receive PTX.
    assert b".target sm_" in compiling.compiled(unit, 32, 9990)[0]
