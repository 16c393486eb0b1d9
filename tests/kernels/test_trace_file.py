"""Public traces, compared with a brute-force reader: every event, every pair, no index."""

import gzip
import itertools
import json
import random
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mpinspect.kernels.records import Device, KernelTrace
from mpinspect.kernels.trace import TraceError, read_trace_file, read_trace_files

DATA = Path(__file__).parents[1] / "data" / "traces"
NAMES = sorted(str(path.relative_to(DATA)) for path in DATA.rglob("*.json.gz"))
WITH_KERNELS = [name for name in NAMES if not name.startswith("edge_") or "mi300x" in name]
LAUNCHES = ("cuda_runtime", "cuda_driver")


@cache
def document(name: str) -> dict[str, Any]:
    return json.loads(gzip.decompress((DATA / name).read_bytes()))


@cache
def trace(name: str) -> KernelTrace:
    return read_trace_file(DATA / name)


def events(name: str, *categories: str) -> list[dict[str, Any]]:
    return [event for event in document(name)["traceEvents"] if event.get("cat") in categories]


def enclosing(name: str, launch: dict[str, Any], category: str) -> list[dict[str, Any]]:
    """Return the events of the launch's thread that enclose it, outermost first."""
    thread = launch["pid"], launch["tid"]
    found = [
        event
        for event in events(name, category)
        if (event["pid"], event["tid"]) == thread and event["ts"] <= launch["ts"] < event["ts"] + event["dur"]
    ]
    return sorted(found, key=lambda event: (event["ts"], -event["dur"], event["args"].get("External id", 0)))


@cache
def launches(name: str) -> dict[int, dict[str, Any]]:
    return {event["args"]["correlation"]: event for event in events(name, *LAUNCHES)}


def by_brute_force(name: str, limit: int = 10**9) -> dict[tuple[float, int, str], str]:
    """Return (start, device, name) of a kernel -> its operator's name, or the reason of its absence."""
    first = min((launch["ts"] for launch in launches(name).values()), default=0)
    found = {}
    for kernel in events(name, "kernel")[:limit]:
        key = (kernel["ts"], kernel["args"]["device"], kernel["name"])
        launch = launches(name).get(kernel["args"]["correlation"])
        if launch is None:
            lowest = min(launches(name))
            earlier = kernel["ts"] < first or kernel["args"]["correlation"] < lowest
            found[key] = "before the window" if earlier else "no launch"
        elif "GraphLaunch" in launch["name"]:
            found[key] = "CUDA graph"
        else:
            around = enclosing(name, launch, "cpu_op")
            found[key] = around[-1]["name"] if around else "no op"
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_trace_reads_with_its_counts(name):
    read = trace(name)
    kernels = events(name, "kernel")
    assert len(read.kernels) == len(kernels)
    assert read.operators == len(events(name, "cpu_op"))
    assert read.launches == sum("launch" in event["name"].lower() for event in events(name, *LAUNCHES))
    assert sum(kernel.time_us for kernel in read.kernels) == pytest.approx(sum(event["dur"] for event in kernels))
    assert read.copies_us == pytest.approx(sum(event["dur"] for event in events(name, "gpu_memcpy", "gpu_memset")))
    assert [kernel.start_us for kernel in read.kernels] == sorted(event["ts"] for event in kernels)
    assert {device.id for device in read.devices} == {event["args"]["device"] for event in kernels}


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_operators_equal_those_of_brute_force(name):
    """The two large traces are compared only in their first kernels, since brute force tests every operator for each kernel."""
    large = len(events(name, "kernel")) > 1000
    expected = by_brute_force(name, 150 if large else 10**9)
    read = {
        (kernel.start_us, kernel.device, kernel.name): kernel.op.name if kernel.op else kernel.unattributed
        for kernel in trace(name).kernels
    }
    assert {key: read[key] for key in expected} == expected


@pytest.mark.parametrize("name", ["a100_tf32_convnet.json.gz", "v100_fp32_training.json.gz", "h100_vit.json.gz"])
def test_operators_match_external_ids_where_torch_writes_them_correctly(name):
    """All kernels are compared, since these versions of torch write the innermost operator's id to the kernel."""
    by_id = {event["args"]["External id"]: event["name"] for event in events(name, "cpu_op")}
    expected = {(event["ts"], event["name"]): by_id[event["args"]["External id"]] for event in events(name, "kernel")}
    read = {(kernel.start_us, kernel.name): kernel.op.name for kernel in trace(name).kernels}
    assert read == expected
    assert not any("External id" in note for note in trace(name).notes)


def test_no_kernel_is_credited_by_an_external_id_that_is_a_correlation():
    """In these traces External ids equal correlations, which are also ids of unrelated operators."""
    name = "a100_switch_transformer_fp32.json.gz"
    read = trace(name)
    assert any("External id equals their correlation" in note for note in read.notes)
    by_id = {event["args"]["External id"]: event["name"] for event in events(name, "cpu_op")}
    lie = {(event["ts"], event["name"]): by_id.get(event["args"]["External id"]) for event in events(name, "kernel")}
    assert any(lie.values())
    brute = by_brute_force(name)
    own = {(kernel.start_us, kernel.device, kernel.name): kernel.op.name for kernel in read.kernels}
    assert own == brute
    assert (
        sum(lie[start, kernel] is not None and lie[start, kernel] != op for (start, _, kernel), op in own.items()) > 0
    )
    products = [kernel for kernel in read.kernels if "sgemm" in kernel.name]
    assert {kernel.matmul_op.name for kernel in products} <= {"aten::addmm", "aten::mm", "aten::bmm", "aten::matmul"}


def test_the_language_models_head_has_its_shapes_and_its_module():
    read = trace("h100_bert_small.json.gz")
    (kernel,) = [kernel for kernel in read.kernels if "align2" in kernel.name]
    assert kernel.op.name == "aten::addmm"
    assert kernel.op.shapes[:3] == ((30522,), (141, 512), (512, 30522))
    assert kernel.op.strides[:3] == ((1,), (512, 1), (1, 512))
    assert kernel.op.dtypes[:3] == ("c10::BFloat16",) * 3
    assert kernel.op.scalars == ("", "", "", "1", "1")
    assert kernel.matmul_op is kernel.op
    chain = kernel.module.split("/")
    assert chain[0].startswith("BertLMHeadModel")
    assert chain[-1].startswith("Linear")
    assert not kernel.module_is_path
    assert (kernel.phase, kernel.step, kernel.time_us) == ("forward", 6, 41.28)


@pytest.mark.parametrize("name", ["h100_bert_small.json.gz", "a100_switch_transformer_fp32.json.gz"])
def test_modules_of_a_foreign_trace_are_the_enclosing_frames(name):
    by_start = {(kernel.start_us, kernel.name): kernel.module for kernel in trace(name).kernels}
    for kernel in events(name, "kernel"):
        frames = enclosing(name, launches(name)[kernel["args"]["correlation"]], "python_function")
        chain = [frame["name"].removeprefix("nn.Module: ") for frame in frames if frame["name"].startswith("nn.Module")]
        assert by_start[kernel["ts"], kernel["name"]] == "/".join(chain)


def test_convolutions_and_their_backwards_are_found_around_helpers():
    read = trace("a100_tf32_convnet.json.gz")
    helpers = [kernel for kernel in read.kernels if "nchwToNhwc" in kernel.name]
    assert len(helpers) == 474
    assert {kernel.matmul_op.name for kernel in helpers} == {"aten::cudnn_convolution", "aten::convolution_backward"}
    assert {kernel.phase for kernel in read.kernels} == {"forward", "backward", "optimizer"}
    backward = [kernel for kernel in read.kernels if kernel.op.name == "aten::convolution_backward"]
    assert backward
    assert all(kernel.phase == "backward" for kernel in backward)
    assert {kernel.step for kernel in read.kernels} == {4, 5, 6}


def test_kernels_of_one_call_share_its_number():
    read = trace("a100_tf32_convnet.json.gz")
    by_call: dict[int, set[str]] = {}
    for kernel in read.kernels:
        assert (kernel.call is None) == (kernel.matmul_op is None)
        if kernel.call is not None:
            by_call.setdefault(kernel.call, set()).add(kernel.matmul_op.name)
    assert sorted(by_call) == list(range(len(by_call)))
    assert all(len(names) == 1 for names in by_call.values())


def test_cuda_graphs_and_an_amd_gpu():
    read = trace("edge_cuda_graph_mi300x.json.gz")
    graph = [kernel for kernel in read.kernels if kernel.is_graph]
    assert len(graph) == 421
    assert {(kernel.op, kernel.unattributed) for kernel in graph} == {(None, "CUDA graph")}
    assert sum(kernel.op is not None for kernel in read.kernels) == 4
    assert [(device.id, device.vendor) for device in read.devices] == [(2, "AMD")]
    assert any("AMD" in note for note in read.notes)


def test_kernels_from_before_the_window():
    read = trace("ranks/worker1.json.gz")
    assert sum(kernel.unattributed == "before the window" for kernel in read.kernels) == 64
    assert not any(kernel.unattributed == "no launch" for kernel in read.kernels)


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("h100_vit.json.gz", [(0, "NVIDIA H100 80GB HBM3", "NVIDIA", 9, 0)]),
        ("gp100_no_tensor_cores.json.gz", [(0, "Quadro GP100", "NVIDIA", 6, 0)]),
        ("ranks/worker1.json.gz", [(1, "Tesla V100-SXM2-32GB", "NVIDIA", 7, 0)]),
        ("edge_cpu_only.json.gz", []),
    ],
)
def test_only_devices_that_ran_kernels(name, devices):
    assert trace(name).devices == tuple(Device(*device) for device in devices)


@pytest.mark.parametrize("name", ["h100_vit.json.gz", "ranks/worker0.json.gz"])
def test_busy_time_is_the_union_over_streams(name):
    """Compared with a sweep over all starts and ends of events."""
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events(name, "kernel", "gpu_memcpy", "gpu_memset")]
    moments = sorted({moment for span in spans for moment in span})
    busy = sum(
        later - earlier
        for earlier, later in itertools.pairwise(moments)
        if any(start <= earlier and later <= end for start, end in spans)
    )
    read = trace(name)
    (device,) = read.devices
    assert read.busy_us[device.id] == pytest.approx(busy, rel=1e-6)
    assert read.span_us[device.id] == pytest.approx(moments[-1] - moments[0])
    assert read.busy_us[device.id] <= read.span_us[device.id]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("edge_cpu_only.json.gz", "no GPU activity at all: the run was on a CPU, or it was profiled without"),
        ("edge_launches_without_kernels.json.gz", "no GPU kernels, though it has launches"),
        ("edge_no_device_properties.json.gz", "no GPU activity at all"),
        ("gp100_no_tensor_cores.json.gz", "record_shapes=True"),
    ],
)
def test_missing_data_is_noted(name, says):
    assert any(says in note for note in trace(name).notes)


def test_a_trace_of_one_kernel():
    (kernel,) = trace("a100_triton.json.gz").kernels
    assert kernel.op.name.startswith("triton_")
    assert kernel.time_us == 1.76


def test_ranks_and_jobs():
    assert (trace("ranks/worker1.json.gz").rank, trace("ranks/worker1.json.gz").world_size) == (1, 8)
    assert (trace("edge_cpu_only.json.gz").rank, trace("edge_cpu_only.json.gz").world_size) == (34, 300)
    assert trace("edge_cpu_only.json.gz").job == "f581846069-TrainingApplication attempt 1"
    assert trace("ranks/worker0.json.gz").job == trace("ranks/worker1.json.gz").job
    assert trace("h100_vit.json.gz").rank is None


# -- the same trace, written otherwise --------------------------------------------------------------------------------------


def rewritten(tmp_path: Path, content: Any, **options: Any) -> KernelTrace:
    path = tmp_path / "rewritten.json"
    path.write_text(json.dumps(content, **options), encoding="utf-8")
    return replace(read_trace_file(path), source="")


OTHERWISE = ["h100_bert_small.json.gz", "a100_tf32_convnet.json.gz", "edge_cuda_graph_mi300x.json.gz"]


@pytest.mark.parametrize("name", OTHERWISE)
def test_the_order_of_events_does_not_matter(name, tmp_path):
    content = dict(document(name))
    content["traceEvents"] = random.Random(0).sample(content["traceEvents"], len(content["traceEvents"]))
    assert rewritten(tmp_path, content) == replace(trace(name), source="")


@pytest.mark.parametrize("name", OTHERWISE)
@pytest.mark.parametrize("options", [{"separators": (",", ":")}, {"indent": 1}], ids=["minified", "indented"])
def test_the_formatting_does_not_matter(name, options, tmp_path):
    assert rewritten(tmp_path, document(name), **options) == replace(trace(name), source="")


def test_the_order_of_keys_does_not_matter(tmp_path):
    name = "h100_bert_small.json.gz"
    assert rewritten(tmp_path, document(name), sort_keys=True) == replace(trace(name), source="")


def test_a_bare_list_of_events_is_a_trace_without_a_header(tmp_path):
    name = "h100_bert_small.json.gz"
    read = rewritten(tmp_path, document(name)["traceEvents"])
    assert [(kernel.name, kernel.op) for kernel in read.kernels] == [(k.name, k.op) for k in trace(name).kernels]
    assert read.devices[0].name == ""
    assert read.devices[0].vendor == ""
    assert any("no deviceProperties" in note for note in read.notes)


@pytest.mark.parametrize("form", [repr, json.dumps], ids=["Python", "JSON"])
def test_properties_may_be_written_as_a_string(form, tmp_path):
    content = dict(document("h100_bert_small.json.gz"))
    content["deviceProperties"] = form(content["deviceProperties"])
    content["distributedInfo"] = form({"rank": 3, "world_size": 4})
    read = rewritten(tmp_path, content)
    assert read.devices == trace("h100_bert_small.json.gz").devices
    assert (read.rank, read.world_size) == (3, 4)


def test_gzip_is_detected_by_the_content(tmp_path):
    source = DATA / "h100_bert_small.json.gz"
    zipped, plain = tmp_path / "zipped.json", tmp_path / "plain.json.gz"
    zipped.write_bytes(source.read_bytes())
    plain.write_bytes(gzip.decompress(source.read_bytes()))
    assert read_trace_file(zipped).kernels == read_trace_file(plain).kernels == trace("h100_bert_small.json.gz").kernels


# -- several files ----------------------------------------------------------------------------------------------------------


def test_a_folder_of_ranks():
    read = read_trace_files([DATA / "ranks"])
    assert [each.rank for each in read] == [0, 1]
    assert [Path(each.source).name for each in read] == ["worker0.json.gz", "worker1.json.gz"]


def test_files_sort_by_rank_and_then_as_people_count(tmp_path):
    small = DATA / "a100_triton.json.gz"
    for name in ("worker10.json.gz", "worker2.json.gz", "worker1.pt.trace.json.gz"):
        shutil.copy(small, tmp_path / name)
    names = [Path(each.source).name for each in read_trace_files([tmp_path, DATA / "ranks" / "worker1.json.gz"])]
    assert names == ["worker1.json.gz", "worker1.pt.trace.json.gz", "worker2.json.gz", "worker10.json.gz"]


def test_other_files_of_a_folder_are_left_out_and_named(tmp_path):
    shutil.copy(DATA / "a100_triton.json.gz", tmp_path / "trace.json.gz")
    (tmp_path / "config.json").write_text('{"layers": 3}')
    (tmp_path / "notes.txt").write_text("nothing")
    (read,) = read_trace_files([tmp_path])
    assert len(read.kernels) == 1
    assert "config.json" in read.notes[-1]
    assert "traceEvents" in read.notes[-1]


def test_a_folder_without_traces(tmp_path):
    with pytest.raises(TraceError, match=r"holds no trace: it has no \.json or \.json\.gz file"):
        read_trace_files([tmp_path])
    (tmp_path / "config.json").write_text('{"layers": 3}')
    with pytest.raises(TraceError, match="its 1 JSON files are none"):
        read_trace_files([tmp_path])
    with pytest.raises(TraceError, match="No trace was given"):
        read_trace_files([])
    with pytest.raises(TraceError, match="There is no"):
        read_trace_files([tmp_path / "missing"])


def test_two_traces_of_one_rank_are_both_read_with_a_note():
    worker = DATA / "ranks" / "worker0.json.gz"
    first, second, other = read_trace_files([worker, worker, DATA / "ranks" / "worker1.json.gz"])
    assert first.kernels == second.kernels
    assert "2 traces are of rank 0" in first.notes[-1]
    assert first.notes == second.notes
    assert not any("traces are of rank" in note for note in other.notes)
