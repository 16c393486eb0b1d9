"""Counting on a CUDA GPU, compared with reading the same memory by a device copy, torch.histc, torch.frexp and sum().

    python benchmarks/gpu_counting.py [--json benchmarks/results/gpu_counting-gpu.json] [--tiny]

Times are medians of device events around one call, after a warm-up. Before each call the L2 cache is overwritten, and the calls
alternate between several tensors of fresh data. A copy reads and writes, so reading counts as half of its time. A kernel launch
from Python takes the host some microseconds, during which the GPU may wait. For the gradients of ResNet-50 this is part of the
measurement, hence the limit's additional 10 us. Without a CUDA GPU the script prints this and exits. --tiny tests the script
with toy sizes, on a CPU with the reference.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from machine import ResultsFile, arguments
from targets import checked, verdicts

from mpinspect.counting import reference
from mpinspect.counting.bits import merge_rows
from mpinspect.counting.blocks import count_blocks
from mpinspect.counting.cuda import available

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64)
#: The limit for counting ResNet-50's gradients in one launch: a multiple of a read, plus microseconds.
MOST_OF_MANY, MOST_OF_MANY_US = 2.0, 10.0
#: A slow call is not repeated beyond this many microseconds in total, but at least ``_FEWEST`` times.
_MOST_US, _FEWEST = 1e6, 5
#: Larger than any L2 cache.
_FLUSH_BYTES = 256 << 20

Call = Callable[[torch.Tensor], object]


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Return the shapes of ResNet-50's 161 parameters: 25.6 million values."""
    shapes: list[tuple[int, ...]] = []

    def convolution(channels_out: int, channels_in: int, side: int) -> None:
        shapes.extend([(channels_out, channels_in, side, side), (channels_out,), (channels_out,)])

    convolution(64, 3, 7)
    channels_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolution(width, channels_in, 1)
            convolution(width, width, 3)
            convolution(4 * width, width, 1)
            if block == 0:
                convolution(4 * width, channels_in, 1)
            channels_in = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


class Stopwatch:
    """Measures median times in microseconds, by GPU events or, on a CPU, by the host's clock."""

    def __init__(self, repeats: int, device: str) -> None:
        self.device = device
        self._repeats = repeats
        self._flush = torch.empty(_FLUSH_BYTES if device == "cuda" else 0, dtype=torch.uint8, device=device)

    def us(self, calls: list[Callable[[], object]]) -> float:
        """Return the median time of the calls, which do the same to different data and alternate."""
        for call in calls:
            call()
        times: list[float] = []
        while len(times) < self._repeats and (len(times) < _FEWEST or sum(times) < _MOST_US):
            self._flush.zero_()
            times.append(self._once(calls[len(times) % len(calls)]))
        return statistics.median(times)

    def _once(self, call: Callable[[], object]) -> float:
        if self.device != "cuda":
            started = time.perf_counter()
            call()
            return (time.perf_counter() - started) * 1e6
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def each(self, tensors: list[torch.Tensor], call: Call) -> float:
        """Return the median time of ``call`` on one of the tensors."""
        return self.us([lambda tensor=tensor: call(tensor) for tensor in tensors])

    def read_us(self, tensors: list[torch.Tensor]) -> float:
        """Return the time of reading one of the tensors: half the time of a copy."""
        target = torch.empty_like(tensors[0])
        return self.each(tensors, target.copy_) / 2


def values(numel: int, dtype: torch.dtype, device: str, make_up: str = "normal") -> torch.Tensor:
    """Draw normal values; or values rounded to bfloat16, as with autocast; with half zeros; or with every exponent."""
    if make_up == "every exponent":
        return torch.randint(-(1 << 31), 1 << 31, (numel,), device=device, dtype=torch.int32).view(torch.float32)
    normal = torch.randn(numel, device=device, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    if make_up == "half zeros":
        normal.masked_fill_(torch.rand(numel, device=device) < 0.5, 0)
    elif make_up == "through bfloat16":
        normal = normal.bfloat16().float()
    return normal.to(dtype)


def one_tensor(stopwatch: Stopwatch, size: int, dtype: torch.dtype, make_up: str) -> dict[str, Any]:
    """Time counting ``size`` bytes of one dtype, and the alternatives that support the dtype."""
    from mpinspect.counting.cuda import counter

    tensors = [values(size // dtype.itemsize, dtype, stopwatch.device, make_up) for _ in range(3)]
    slots = torch.zeros(2, dtype=torch.int64, device=stopwatch.device)
    read_us = stopwatch.read_us(tensors)
    row = {
        "case": f"{size / 2**20:.3g} MiB {str(dtype).removeprefix('torch.')}, {make_up}",
        "read_us": read_us,
        "read_gb_s": size / read_us / 1e3,
        "count_us": stopwatch.each(tensors, counter.count),
        "largest_us": stopwatch.us([lambda tensor=tensor: largest([tensor], slots) for tensor in tensors]),
    }
    if make_up == "normal":
        row["reference_us"] = stopwatch.each(tensors[:1], reference.count)
        if dtype in (torch.float32, torch.float64):
            row["histc_us"] = stopwatch.each(tensors, lambda tensor: torch.histc(tensor, 256, -8.0, 8.0))
            row["frexp_us"] = stopwatch.each(tensors[:1], torch.frexp)
            row["aminmax_us"] = stopwatch.each(tensors, torch.aminmax)
        if dtype.itemsize in (2, 4):
            row["blocks_us"] = stopwatch.each(tensors, count_blocks)
        if dtype.itemsize > 1:
            row["sum_us"] = stopwatch.each(tensors, torch.sum)
    row["count_over_read"] = row["count_us"] / read_us
    row["largest_over_read"] = row["largest_us"] / read_us
    return row


def largest(tensors: list[torch.Tensor], slots: torch.Tensor) -> None:
    """Compute the largest magnitude of each tensor into its slot; the last slot is the flag for infinities and NaNs."""
    from mpinspect.counting.cuda import counter

    begin = slots.data_ptr()
    counter.largest_many(tensors, range(begin, begin + 8 * len(tensors), 8), slots[-1:])


def many_tensors(stopwatch: Stopwatch, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> dict[str, Any]:
    """Time gradients of these shapes, in one launch and one by one, relative to a read of one tensor of their total size."""
    from mpinspect.counting.cuda import counter

    sets = [[values(torch.Size(shape).numel(), dtype, stopwatch.device) for shape in shapes] for _ in range(3)]
    memory = [torch.cat(tensors) for tensors in sets]
    length = counter.encoding_of(dtype).layout.length
    rows = [torch.zeros(len(tensors), length, dtype=torch.int64, device=stopwatch.device).unbind(0) for tensors in sets]
    packed = [
        [counter.Counted(tensor, row) for tensor, row in zip(tensors, into, strict=True)]
        for tensors, into in zip(sets, rows, strict=True)
    ]
    network = "ResNet-50" if shapes == resnet50_shapes() else "a toy"
    read_us = stopwatch.read_us(memory)
    together_us = stopwatch.us([lambda group=group: counter.add_many(group) for group in packed])
    slots = torch.zeros(len(shapes) + 1, dtype=torch.int64, device=stopwatch.device)
    largest_us = stopwatch.us([lambda tensors=tensors: largest(tensors, slots) for tensors in sets])
    aminmax_us = stopwatch.us([lambda tensors=tensors: [torch.aminmax(each) for each in tensors] for tensors in sets])
    single_us = stopwatch.us([lambda group=group: [counter.add(*each) for each in group] for group in packed])
    return {
        "case": f"{network}'s {len(sets[0])} gradients, {str(dtype).removeprefix('torch.')}",
        "read_us": read_us,
        "count_us": together_us,
        "one_by_one_us": single_us,
        "largest_us": largest_us,
        "aminmax_us": aminmax_us,
        "count_over_read": together_us / read_us,
        "limit_us": MOST_OF_MANY * read_us + MOST_OF_MANY_US,
    }


def measurements(stopwatch: Stopwatch, size: int, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each case, beginning with the cases that have a target."""
    shapes = [(7,), (3, 5)] if tiny else resnet50_shapes()
    yield one_tensor(stopwatch, size, torch.float32, "normal")
    yield many_tensors(stopwatch, shapes, torch.float32)
    if not tiny:
        yield many_tensors(stopwatch, shapes, torch.bfloat16)
        for make_up in ("through bfloat16", "half zeros", "every exponent"):
            yield one_tensor(stopwatch, size, torch.float32, make_up)
    for dtype in DTYPES[1:2] if tiny else DTYPES[1:]:
        yield one_tensor(stopwatch, size, dtype, "normal")


def results(rows: list[dict[str, Any]], tiny: bool) -> dict[str, Any]:
    promised = [] if tiny else [checked("gpu.count_over_read", row["count_over_read"]) for row in rows[:1]]
    promised += [] if tiny else [checked("gpu.count_many", row["count_us"] / row["limit_us"]) for row in rows[1:2]]
    return {"rows": rows, "checked": promised}


def line(row: dict[str, Any]) -> str:
    others = [
        f"{name.removesuffix('_us')} {us / row['count_us']:.1f}x of counting"
        for name, us in row.items()
        if name
        in ("reference_us", "histc_us", "frexp_us", "sum_us", "one_by_one_us", "largest_us", "aminmax_us", "blocks_us")
    ]
    return (
        f"{row['case']:44} read {row['read_us']:8.1f} us, count {row['count_us']:8.1f} us:"
        f" {row['count_over_read']:.2f}x   {', '.join(others)}"
    )


def why_not(device: str) -> str:
    """Return why the kernels can't be used; "" if they can. On a CPU, install torch in their place."""
    if device == "cuda":
        return available.warm_up([torch.device("cuda", torch.cuda.current_device())])
    from mpinspect.counting.cuda import counter

    def add_many(counted: list[Any]) -> None:
        for tensor, row in counted:
            row.copy_(merge_rows([row, reference.count(tensor)]))

    counter.add_many = add_many
    counter.largest_many = lambda tensors, slots, broken: [torch.aminmax(tensor.float()) for tensor in tensors]
    return ""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the large tensors (default 1024)")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to see that the script works; also on a CPU")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        print("There is no CUDA GPU here, so nothing was measured (--tiny runs toy sizes on the CPU).")
        return
    file = ResultsFile(options.json, rehearsal=options.tiny)
    trouble = why_not(device)
    if trouble:
        print(trouble)
        file.write({"rows": [], "note": trouble, "checked": []})
        # Without the kernels, a rehearsal still succeeds.
        raise SystemExit(0 if options.tiny else 1)
    stopwatch = Stopwatch(1 if options.tiny else options.repeats, device)
    rows: list[dict[str, Any]] = []
    for row in measurements(stopwatch, 1024 if options.tiny else options.mib << 20, options.tiny):
        rows.append(row)
        print(line(row), flush=True)
        file.write(results(rows, options.tiny), complete=False)
    print(verdicts(results(rows, options.tiny)["checked"]))
    file.write(results(rows, options.tiny))


if __name__ == "__main__":
    main()
