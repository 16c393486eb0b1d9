"""Counting by numba's loops: equals counting with torch for any bits, and falls back to torch where numba fails."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm
from hypothesis import example, given, settings
from hypothesis import strategies as st
from together import together
from trainings import inspected

import mpinspect
from mpinspect.counting import count_exponents, fastest, reference
from mpinspect.counting.cpu import available, compiler, compiling, counter, planes
from mpinspect.counting.cpu.available import Loops

#: Integer dtype, mantissa bits and exponent bits.
ENCODINGS = {
    torch.float32: (np.uint32, 23, 8),
    torch.float64: (np.uint64, 52, 11),
    torch.float16: (np.uint16, 10, 5),
    torch.bfloat16: (np.uint16, 7, 8),
}
KINDS = ("any", "zeros", "subnormals", "infinities", "nans", "powers of two", "near the top", "narrow", "one outlier")


def bits_of_kind(kind: str, size: int, dtype: torch.dtype, random: np.random.Generator) -> np.ndarray:
    """Draw bit patterns of one kind, with random signs."""
    word, mantissa_bits, exponent_bits = ENCODINGS[dtype]
    ones = (1 << exponent_bits) - 1
    mantissas = random.integers(0, 1 << mantissa_bits, size, dtype=np.uint64)
    fields = random.integers(1, ones, size, dtype=np.uint64)
    if kind == "any":
        fields = random.integers(0, ones + 1, size, dtype=np.uint64)
    elif kind == "zeros":
        fields[:], mantissas[:] = 0, 0
    elif kind == "subnormals":
        # Vary the number of significant bits: uniform mantissas nearly all have one of the highest bits set.
        fields[:], mantissas = 0, mantissas >> random.integers(0, mantissa_bits, size, dtype=np.uint64)
    elif kind in ("infinities", "nans"):
        fields[:], mantissas = ones, np.maximum(mantissas, 1) if kind == "nans" else 0 * mantissas
    elif kind == "powers of two":
        mantissas[:] = 0
    elif kind == "near the top":
        top = (1 << mantissa_bits) - (1 << max(mantissa_bits - 11, 0))
        mantissas = (top + random.integers(-3, 3, size)).astype(np.uint64) & np.uint64((1 << mantissa_bits) - 1)
    else:
        fields[:] = ones // 2 + random.integers(-4, 4, size)
        if kind == "one outlier":
            fields[:1] = 1
    signs = random.integers(0, 2, size, dtype=np.uint64) << np.uint64(mantissa_bits + exponent_bits)
    return (signs | (fields << np.uint64(mantissa_bits)) | mantissas).astype(word)


def tensor_of(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(bits.view(f"i{bits.itemsize}")).view(dtype)


@pytest.fixture(scope="module", autouse=True)
def _every_dtype_has_a_loop() -> None:
    assert fastest.warm_up() == []
    assert fastest.cpu_counter().WORK.keys() == ENCODINGS.keys()


def expect_the_same(tensor: torch.Tensor) -> None:
    """Assert that the row of the fastest implementation equals the reference's."""
    row = fastest.count(tensor)
    truth = reference.count(tensor)
    assert row.dtype == truth.dtype
    assert row.tolist() == truth.tolist()


PARTS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.one_of(st.integers(0, 600), st.sampled_from([4095, 4096, 4097]))), max_size=5
)


@pytest.mark.parametrize("dtype", ENCODINGS, ids=str)
@given(parts=PARTS, seed=st.integers(0, 2**32 - 1), shuffled=st.booleans())
@example(parts=[("near the top", 4096), ("powers of two", 4096)], seed=0, shuffled=True)
@example(parts=[("zeros", 4096), ("one outlier", 4096), ("subnormals", 4096)], seed=1, shuffled=False)
@settings(max_examples=60, deadline=None)
def test_any_bit_patterns_give_identical_counts(
    dtype: torch.dtype, parts: list[tuple[str, int]], seed: int, shuffled: bool
) -> None:
    random = np.random.default_rng(seed)
    pieces = [bits_of_kind(kind, size, dtype, random) for kind, size in parts]
    bits = np.concatenate([np.empty(0, ENCODINGS[dtype][0]), *pieces])
    if shuffled:
        random.shuffle(bits)
    expect_the_same(tensor_of(bits, dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_code(dtype: torch.dtype) -> None:
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    expect_the_same(codes)
    for code in codes[::97]:
        expect_the_same(code)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_field_with_edge_mantissas(dtype: torch.dtype) -> None:
    word, mantissa_bits, exponent_bits = ENCODINGS[dtype]
    top = (1 << mantissa_bits) - (1 << (mantissa_bits - 11))
    mantissas = np.array([0, 1, top - 1, top, (1 << mantissa_bits) - 1], np.uint64)
    fields = np.arange(1 << exponent_bits, dtype=np.uint64)
    bits = ((fields[:, None] << np.uint64(mantissa_bits)) | mantissas).astype(word)
    expect_the_same(tensor_of(bits, dtype))
    for row in bits:
        expect_the_same(tensor_of(row, dtype))


@pytest.mark.parametrize("size", [255, 256, 257, 4095, 4096, 4097, counter._LEAST_CHUNK + 1, counter._TEAM_FROM + 4097])
def test_sizes_around_groups_blocks_and_chunks(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(size, generator=generator)
    values[-1] = 2.0**100
    expect_the_same(values)
    expect_the_same(values.masked_fill(torch.rand(size, generator=generator) < 0.5, 0))


@pytest.mark.parametrize("dtype", ENCODINGS, ids=str)
def test_more_blocks_than_the_planes_hold(dtype: torch.dtype, threads: int) -> None:
    generator = torch.Generator().manual_seed(threads)
    values = torch.randn((2 * planes.MOST_BLOCKS + 3) * planes.BLOCK + 5, generator=generator)
    values[::1001] = 0
    expect_the_same(values.to(dtype))


def test_exponents_that_drift_between_blocks(threads: int) -> None:
    """Blocks whose exponents leave the window of earlier blocks by a little or by much; and a block that fits no window."""
    blocks = torch.randn(100, planes.BLOCK, generator=torch.Generator().manual_seed(0))
    for scales in (torch.arange(100) - 50.0, 40.0 * (torch.arange(100) % 3) - 60, torch.arange(100) // 9 * 11.0 - 60):
        moved = blocks * torch.exp2(scales)[:, None]
        moved[7] = torch.exp2(torch.arange(planes.BLOCK) % 200 - 100.0)
        moved[8, 5], moved[20], moved[30, :7] = torch.inf, 0, 1e-40
        expect_the_same(moved)


@pytest.mark.parametrize("field", [1, 2, 30, 31, 223, 224, 225, 253, 254])
def test_windows_at_both_ends_of_the_range(field: int) -> None:
    mantissas = np.random.default_rng(field).integers(0, 1 << 23, planes.BLOCK, dtype=np.uint32)
    bits = np.tile(np.uint32(field << 23) | mantissas, 3)
    bits[3] = max(field - 30, 1) << 23
    bits[planes.BLOCK + 3] = min(field + 30, 254) << 23
    expect_the_same(tensor_of(bits, torch.float32))


def test_without_torchs_thread_team_the_pool_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpinspect.counting.cpu.counter.TEAM", _NoTeam())
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expect_the_same(torch.randn(counter._POOL_FROM + 77))
    finally:
        torch.set_num_threads(before)


class _NoTeam:
    there = False


def test_more_exponents_than_are_compared_at_once() -> None:
    """Blocks hold 2,000 exponents in float64, and 250 in float32."""
    random = np.random.default_rng(0)
    wide = np.ldexp(random.uniform(1, 2, 20_000), random.integers(-1074, 1024, 20_000))
    expect_the_same(torch.from_numpy(wide))
    expect_the_same(
        torch.from_numpy(np.ldexp(random.uniform(1, 2, 20_000), random.integers(-149, 128, 20_000))).float()
    )
    expect_the_same(torch.from_numpy(np.ldexp(1.0, random.integers(-1074, 1024, 20_000))))


@pytest.mark.parametrize("dtype", ENCODINGS, ids=str)
def test_strides_expansion_and_shape(dtype: torch.dtype) -> None:
    values = torch.randn(60, 70, 3).to(dtype)
    for view in (values.t() if values.dim() == 2 else values.permute(2, 0, 1), values[::2, 1::3], values[0, 0, 0]):
        expect_the_same(view)
    expect_the_same(values[:, :1].expand(-1, 9, -1))
    expect_the_same(torch.randn(1).to(dtype).expand(700_000))
    expect_the_same(torch.randn(900, 900).to(dtype)[:, :800])
    expect_the_same(values[:0])
    expect_the_same(values[:, 0, 0])
    expect_the_same(values.view(-1)[1::7])


def test_complex_sparse_and_narrow_tensors() -> None:
    expect_the_same(torch.randn(50, dtype=torch.complex64).conj())
    expect_the_same(torch.eye(9).to_sparse())
    expect_the_same(torch.randn(300).to(torch.float8_e5m2))
    expect_the_same(torch.nn.Parameter(torch.randn(10)))


def test_torch_counts_when_a_divisor_is_given() -> None:
    values = torch.randn(1000)
    assert torch.equal(fastest.count(values, 3.0), reference.count(values, 3.0))


def test_flushing_denormals_changes_no_count() -> None:
    values = [
        tensor_of(bits_of_kind("subnormals", 5000, dtype, np.random.default_rng(0)), dtype) for dtype in ENCODINGS
    ]
    truths = [reference.count(tensor) for tensor in values]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        rows = [fastest.count(tensor) for tensor in values]
    finally:
        torch.set_flush_denormal(False)
    for row, truth in zip(rows, truths, strict=True):
        assert torch.equal(row, truth)


def test_inference_tensors_inside_and_outside() -> None:
    with torch.inference_mode():
        values = torch.randn(1000)
        expect_the_same(values)
    expect_the_same(values)


def test_counting_leaves_the_tensor_unchanged() -> None:
    values = torch.randn(10_000)
    before = values.clone()
    fastest.count(values)
    assert torch.equal(values, before)


def test_from_several_threads_at_once() -> None:
    tensors = [torch.randn(counter._TEAM_FROM + 1000 * seed) for seed in range(4)]
    truths = [reference.count(tensor) for tensor in tensors]

    def is_right(index: int) -> bool:
        return all(torch.equal(fastest.count(tensors[index]), truths[index]) for _ in range(3))

    assert all(together(4, is_right))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_in_a_forked_child() -> None:
    values = torch.randn(counter._TEAM_FROM)
    truth = fastest.count(values)
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(fastest.count(values), truth) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- numba's availability ------------------------------------------------------------------------------------------------

COUNT_AND_TELL = """
import sys, torch, mpinspect
assert "numba" not in sys.modules, "importing mpinspect imports numba"
from mpinspect.counting import fastest, reference
troubles = fastest.warm_up()
values = torch.randn(1000)
assert torch.equal(fastest.count(values), reference.count(values))
print("numba" in sys.modules, troubles)
"""


def told(code: str = COUNT_AND_TELL, *, path: Path | None = None, **environment: str) -> str:
    """Return the output of the code in a fork of a process that has imported torch, with ``path`` first on its import path."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(f"import sys; sys.path[0] = {str(path or folder)!r}\n{code}")
        status, out, err = warm.run(Path.cwd(), [str(script)], environment, modules=warm.ALONE)
    assert status == 0, err
    return out.strip()


def test_a_broken_numba_is_reported_and_not_used(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('numba needs another NumPy')\n")
    said = told(path=tmp_path)
    assert "numba is installed and does not work here (numba needs another NumPy)" in said


def test_a_missing_numba_is_not_reported(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise ModuleNotFoundError('No module named numba', name='numba')\n")
    assert told(path=tmp_path) == "False []"


def test_another_process_loads_the_compiled_loops_from_the_cache() -> None:
    """A new process neither compiles nor changes the cache, which the test session filled at its start."""
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or Path(mpinspect.__file__).parent / "counting" / "cpu")
    first = {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.nb?")}
    assert any(name.endswith(".nbc") for name in first)
    assert told(COUNT_AND_TELL + "assert fastest.cpu_counter() is not None\n") == "True []"
    assert {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.nb?")} == first


def test_a_missing_loop_is_loaded_once_it_is_on_disk(tmp_path: Path) -> None:
    """A compiling process that was terminated leaves an incomplete cache; waiting processes load the rest when it appears."""
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or Path(mpinspect.__file__).parent / "counting" / "cpu")
    kept = {path.name: path for path in folder.rglob("*.nb?")}
    missing = [name for name in kept if "_largest_of_16_bits_" in name]
    assert missing
    look = f"""
import shutil
from pathlib import Path
from mpinspect.counting.cpu import available, compiling
cache = compiling.cache_folder()
for path in {[str(path) for name, path in kept.items() if name not in missing]!r}:
    shutil.copy2(path, cache)
print(available.AVAILABLE._from_disk())
for path in {[str(kept[name]) for name in missing]!r}:
    shutil.copy2(path, cache)
print(available.AVAILABLE._from_disk() is not None)
"""
    assert told(look, NUMBA_CACHE_DIR=str(tmp_path)) == "None\nTrue"


def test_cached_loops_of_other_sources_are_removed(tmp_path: Path) -> None:
    today, before, other = (
        tmp_path / name
        for name in (f"a.b_{compiling._DIGEST}-1.py312.nbi", "a.b_000000000000-1.py312.1.nbc", "a.b.pyc")
    )
    for path in (today, before, other):
        path.touch()
    compiling.remove_others(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([today, other])


def test_without_a_cache_folder_torch_counts_and_a_note_says_so() -> None:
    """With a read-only installation and home, numba refuses to cache, and compiling at every start would take a minute."""
    nowhere = "from numba.core import caching; caching.CacheImpl._locator_classes = []; import sys\n"
    without = COUNT_AND_TELL.replace("import sys, torch", "import torch").replace('"numba" not in sys.modules', "True")
    assert re.fullmatch(
        r"True \[.numba can't store compiled loops: .* NUMBA_CACHE_DIR .* takes several times longer.\]",
        told(nowhere + without),
    )


# -- the compiling process ----------------------------------------------------------------------------------------------

#: A stand-in for the compiling process: it writes its state to a file, then waits for a signal to end.
COMPILE_NOTHING = """
import json, os, time
from pathlib import Path
streams = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
told = {"pid": os.getpid(), "session": os.getsid(0), "nice": os.nice(0), "cwd": os.getcwd(), "streams": streams}
with open("told", "a") as file:
    file.write(json.dumps(told) + "\\n")
while not Path("end").exists():
    time.sleep(0.01)
"""


class ColdCache:
    """A cache that is empty until ``full`` is set; the compiling processes are stand-ins."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.full = folder, False
        imported = available._imported

        def refused() -> Loops:
            if not self.full:
                raise compiling.NotOnDiskError("a loop")
            return imported()

        monkeypatch.setattr(available, "_imported", refused)
        monkeypatch.setattr(available, "_LOOK_EVERY_S", 0.0)
        monkeypatch.setattr(compiling, "cache_folder", lambda: folder)
        monkeypatch.setattr(compiler, "_WORK", COMPILE_NOTHING)
        monkeypatch.setattr("mpinspect.counting.apart._said", set())

    def processes(self) -> list[dict[str, Any]]:
        """Return the states that the started processes wrote; waits for the first."""
        wait_until((self.folder / "told").exists)
        wait_until(lambda: (self.folder / "told").read_text().endswith("\n"))
        return [json.loads(line) for line in (self.folder / "told").read_text().splitlines()]

    def end(self) -> None:
        (self.folder / "end").touch()
        wait_until(lambda: not compiler.at_work(self.folder))


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ColdCache]:
    if sys.platform != "linux":
        pytest.skip("the process is observed through /proc")
    cache = ColdCache(tmp_path, monkeypatch)
    yield cache
    cache.end()


def test_a_cold_start_does_not_compile_in_the_training_process(tmp_path: Path) -> None:
    code = "from mpinspect.counting.cpu import compiler\ncompiler._WORK = ''\n" + COUNT_AND_TELL
    assert told(code, NUMBA_CACHE_DIR=str(tmp_path)) == "True []"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_one_process_compiles_for_several_ranks(cold: ColdCache, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = [available.Available(), available.Available()]
    assert [rank.loops() for rank in ranks] == [None, None]
    assert [rank.loops() for rank in ranks] == [None, None]
    err = capsys.readouterr().err
    assert err == available._STARTED + "\n"
    assert len(cold.processes()) == 1
    cold.end()
    cold.full = True
    assert [rank.loops().counter for rank in ranks] == [counter, counter]  # type: ignore[union-attr]
    assert [rank.trouble for rank in ranks] == ["", ""]


def test_the_compiling_process_shares_no_resources_with_the_training(cold: ColdCache) -> None:
    handled: list[int] = []
    before = signal.signal(signal.SIGCHLD, lambda number, frame: handled.append(number))
    try:
        assert available.Available().loops() is None
        (process,) = cold.processes()
        handled.clear()
        cold.end()
        wait_until(lambda: not Path(f"/proc/{process['pid']}").exists())
        assert handled == []
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert process["session"] not in (os.getsid(0), process["pid"])
    assert process["nice"] == 19
    assert process["cwd"] == str(cold.folder)
    assert process["streams"] == [os.devnull] * 3
    with pytest.raises(ChildProcessError):
        os.waitpid(process["pid"], os.WNOHANG)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_starved_compiling_process_raises_its_priority(tmp_path: Path) -> None:
    code = (
        "import os, time\nfrom mpinspect.counting.cpu import compiler\n"
        "compiler._PATIENCE_S, compiler._LEAST_SHARE = 0.05, 100.0\ncompiler.give_way()\n"
        "with open('nice', 'a') as file:\n    file.write(f'{os.nice(0)} ')\n"
        "if os.nice(0) == 19:\n    time.sleep(60)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=50)
    assert (tmp_path / "nice").read_text() == f"19 {max(5, os.nice(0))} "


def test_a_killed_compiling_process_is_reported_and_can_be_restarted(cold: ColdCache) -> None:
    first = available.Available()
    assert first.loops() is None
    (process,) = cold.processes()
    os.kill(process["pid"], signal.SIGKILL)
    wait_until(lambda: not compiler.at_work(cold.folder))
    assert first.loops() is None
    assert first.trouble.startswith(
        "the process that was to compile the counting kernels ended early: counting on the CPU"
    )
    assert available.Available().loops() is None
    wait_until(lambda: len(cold.processes()) == 2)


@pytest.mark.parametrize(
    ("attribute", "value"), [("executable", ""), ("executable", "/nowhere/python"), ("frozen", True)], ids=str
)
def test_where_no_process_can_be_started_torch_counts_and_a_note_says_so(
    cold: ColdCache, monkeypatch: pytest.MonkeyPatch, attribute: str, value: object
) -> None:
    monkeypatch.setattr(sys, attribute, value, raising=False)
    here = available.Available()
    assert here.loops() is None
    assert here.trouble.startswith("no process could be started to compile the counting kernels (")
    assert not compiler.at_work(cold.folder)


def test_counts_do_not_change_when_the_loops_arrive_during_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch counts the first tensors and the compiled loops the rest; the change may fall within a step."""

    def run(by_torch: int) -> Any:
        loops, asked = available.AVAILABLE.loops(), 0

        def found() -> Loops | None:
            nonlocal asked
            asked += 1
            return None if asked <= by_torch else loops

        monkeypatch.setattr(available, "loops", found)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        inspector = inspected(
            model,
            lambda _: model(torch.randn(4, 6)).square().mean(),
            3,
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
            capture=mpinspect.ranges.kinds.KINDS,
        )
        assert asked > by_torch
        weights = [parameter.tolist() for parameter in model.parameters()]
        return inspector.session().totals(), weights

    compiled = run(0)
    for by_torch in (1, 10, 25, 40):
        assert run(by_torch) == compiled


def test_a_changed_source_file_changes_the_names_of_the_loops(tmp_path: Path) -> None:
    """numba's own cache would return a function whose callee in another file has changed."""
    assert counter.shares.fill_row.__qualname__ == f"fill_row_{compiling._DIGEST}"
    package = tmp_path / "mpinspect"
    shutil.copytree(Path(mpinspect.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    name = f"import sys; sys.path[0] = {str(tmp_path)!r}\nfrom mpinspect.counting.cpu import compiling\n"
    name += "print(compiling._DIGEST, compiling.__file__)"
    assert told(name, NUMBA_CACHE_DIR=str(tmp_path / "cache")).split() == [
        compiling._DIGEST,
        str(package / "counting" / "cpu" / "compiling.py"),
    ]
    with (package / "counting" / "cpu" / "shares.py").open("a") as file:
        file.write("# changed\n")
    for path in (package / "counting" / "cpu").glob("*.py"):
        makes_loops = re.search(
            r"^(import numba|from mpinspect\.counting\.cpu\.compiling)", path.read_text(), re.MULTILINE
        )
        # The layout has constants alone.
        is_layout = path.stem == "block_layout"
        assert (bool(makes_loops) or is_layout) == (path.stem in compiling._MADE_OF), path
    assert told(name, NUMBA_CACHE_DIR=str(tmp_path / "cache")).split()[0] != compiling._DIGEST


def test_count_exponents_uses_the_compiled_loops() -> None:
    assert count_exponents(torch.randn(5000)).total == 5000
    assert "mpinspect.counting.cpu.counter" in sys.modules


def test_torch_counts_dtypes_without_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counter, "count", None)
    values = torch.randn(100).to(torch.float8_e5m2)
    assert torch.equal(fastest.count(values), reference.count(values))
