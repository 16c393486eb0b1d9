"""Attribution on synthetic traces: modules, forwards of backward nodes, phases, graphs, merged ranks, clocks."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpinspect.kernels.records import Kernel, KernelTrace
from mpinspect.kernels.trace import read_trace_file
from mpinspect.kernels.trace.columns import Columns, Nesting, Numbering
from mpinspect.kernels.trace.events import EventStream
from mpinspect.kernels.trace.forwards import Forwards
from mpinspect.kernels.trace.recording import Recording
from mpinspect.kernels.trace.text import TextChunks

DATA = Path(__file__).parents[1] / "data" / "traces"
MAIN, ENGINE = 10, 20
Event = dict[str, Any]


class Made:
    """A builder of events that numbers their identifiers."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._id = 0

    def op(
        self,
        name: str,
        start: float,
        end: float,
        *,
        tid: int = MAIN,
        pid: int = 1,
        cat: str = "cpu_op",
        launches: Mapping[str, float] = MappingProxyType({}),
        **args: Any,
    ) -> None:
        """Add an operator, and the kernels that it launches at the given times."""
        self._id += 1
        named = {key.replace("_", " "): value for key, value in args.items()}
        event = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": end - start}
        self.events.append({**event, "args": {"External id": self._id, **named}})
        for kernel, launched in launches.items():
            self.kernel(kernel, launched, tid=tid, pid=pid)

    def range(self, name: str, start: float, end: float, *, tid: int = MAIN, pid: int = 1) -> None:
        self.op(name, start, end, tid=tid, pid=pid, cat="user_annotation")

    def kernel(
        self,
        name: str,
        launched: float | None,
        *,
        tid: int = MAIN,
        pid: int = 1,
        start: float | None = None,
        correlation: int | None = None,
        call: str = "cudaLaunchKernel",
        cat: str = "cuda_runtime",
        device: int = 0,
    ) -> None:
        self._id += 1
        number = 1000 + self._id if correlation is None else correlation
        if launched is not None:
            event = {"ph": "X", "cat": cat, "name": call, "pid": pid, "tid": tid, "ts": launched, "dur": 0.5}
            self.events.append({**event, "args": {"correlation": number, "cbid": 211}})
        began = start if start is not None else (launched or 0) + 1000
        args = {"device": device, "stream": 7, "correlation": number}
        self.events.append(
            {"ph": "X", "cat": "kernel", "name": name, "pid": device, "tid": 7, "ts": began, "dur": 2.0, "args": args}
        )

    def read(self, folder: Path, **top_level: Any) -> KernelTrace:
        path = folder / "made.json"
        properties = [{"id": 0, "name": "NVIDIA H100", "computeMajor": 9, "computeMinor": 0, "warpSize": 32}]
        content = {"deviceProperties": properties, **top_level, "traceEvents": self.events}
        path.write_text(json.dumps(content), encoding="utf-8")
        return read_trace_file(path)


@pytest.fixture
def made() -> Made:
    return Made()


def by_name(trace: KernelTrace) -> dict[str, Kernel]:
    return {kernel.name: kernel for kernel in trace.kernels}


def each_has(kernels: dict[str, Kernel], field: str) -> dict[str, Any]:
    return {name: getattr(kernel, field) for name, kernel in kernels.items()}


# -- own profiles -----------------------------------------------------------------------------------------------------------


def test_the_innermost_range_names_the_module(made, tmp_path):
    made.range("mpinspect::module::", 0, 100)
    made.range("mpinspect::module::encoder", 10, 50)
    made.range("mpinspect::module::encoder.linear", 20, 30)
    made.op("aten::linear", 21, 29)
    made.op("aten::addmm", 22, 28, launches={"inner": 25})
    made.op("aten::relu", 40, 45, launches={"middle": 42})
    made.op("aten::add", 60, 70, launches={"outer": 65})
    made.op("aten::sum", 110, 120, launches={"outside": 115})
    kernels = by_name(made.read(tmp_path))
    modules = {"inner": "encoder.linear", "middle": "encoder", "outer": "", "outside": ""}
    assert each_has(kernels, "module") == modules
    # The model's own path is ""; the flag distinguishes it from a missing path.
    assert each_has(kernels, "module_is_path") == {"inner": True, "middle": True, "outer": True, "outside": False}
    assert all(kernel.phase == "forward" for kernel in kernels.values())
    assert kernels["inner"].matmul_op.name == "aten::addmm"


def test_a_call_around_another_product_encloses_it(made, tmp_path):
    made.op("aten::_convolution", 0, 100)
    made.op("aten::cudnn_convolution", 10, 40, launches={"product": 20})
    made.op("aten::add_", 50, 60, launches={"bias": 55})
    made.op("vllm::moe_forward", 110, 150, launches={"direct": 115})
    made.op("_moe_C::topk_softmax", 120, 130, launches={"nested": 125})
    made.op("vllm::attention", 160, 190)
    made.op("aten::copy_", 165, 170, launches={"copy": 167})
    made.kernel("alone", 180)
    found = each_has(by_name(made.read(tmp_path)), "encloses")
    assert found == {"product": False, "bias": True, "direct": True, "nested": False, "copy": False, "alone": False}


def backward_node(made: Made, name: str, start: float, sequence: int, *, thread: int = 1, tid: int = ENGINE) -> None:
    args = {"Sequence_number": sequence, "Fwd_thread_id": thread}
    made.op(f"autograd::engine::evaluate_function: {name}", start, start + 10, tid=tid, **args)
    made.op(name, start + 1, start + 9, tid=tid, **args)


def test_a_backward_kernel_has_the_module_of_its_forward(made, tmp_path):
    """Of operators with one sequence number, the last to begin made the node; earlier ones made no node or enclose it."""
    made.range("mpinspect::module::first", 0, 20)
    made.op("aten::relu", 1, 5, Sequence_number=6, Fwd_thread_id=0)
    # Makes no node, so it has the number of the next operator, which belongs to another module.
    made.op("aten::detach", 10, 12, Sequence_number=7, Fwd_thread_id=0)
    made.range("mpinspect::module::second", 20, 40)
    made.op("aten::linear", 21, 39, Sequence_number=7, Fwd_thread_id=0)
    made.op("aten::t", 22, 24, Sequence_number=7, Fwd_thread_id=0)
    made.op("aten::addmm", 26, 38, Sequence_number=8, Fwd_thread_id=0)
    for start, node, sequence in ((100, "AddmmBackward0", 8), (120, "TBackward0", 7), (140, "ReluBackward0", 6)):
        backward_node(made, node, start, sequence)
        made.op("aten::mm", start + 2, start + 8, tid=ENGINE, launches={node: start + 4})
    made.op("torch::autograd::AccumulateGrad", 160, 170, tid=ENGINE, launches={"accumulate": 165})
    kernels = by_name(made.read(tmp_path))
    modules = {"AddmmBackward0": "second", "TBackward0": "second", "ReluBackward0": "first", "accumulate": ""}
    assert each_has(kernels, "module") == modules
    assert kernels["AddmmBackward0"].phase == "backward"
    assert kernels["AddmmBackward0"].op.name == "aten::mm"


def test_a_forward_outside_all_modules_has_a_backward_without_module(made, tmp_path):
    made.range("mpinspect::module::net", 0, 20)
    made.op("aten::mse_loss", 30, 35, Sequence_number=3, Fwd_thread_id=0)
    made.range("mpinspect::backward::net", 90, 200, tid=ENGINE)
    backward_node(made, "MseLossBackward0", 100, 3)
    made.kernel("loss", 105, tid=ENGINE)
    assert by_name(made.read(tmp_path))["loss"].module == ""


def test_without_sequence_numbers_the_backwards_range_gives_the_module(made, tmp_path):
    made.range("mpinspect::backward::decoder", 90, 200, tid=ENGINE)
    made.range("mpinspect::backward::decoder.out", 95, 150, tid=ENGINE)
    made.op("autograd::engine::evaluate_function: AddmmBackward0", 100, 110, tid=ENGINE, launches={"inner": 105})
    made.op("autograd::engine::evaluate_function: MulBackward0", 160, 170, tid=ENGINE, launches={"outer": 165})
    kernels = by_name(made.read(tmp_path))
    assert (kernels["inner"].module, kernels["outer"].module) == ("decoder.out", "decoder")
    assert kernels["inner"].module_is_path


def test_without_sequence_numbers_arrows_give_the_module(made, tmp_path):
    made.range("mpinspect::module::layer", 0, 50)
    made.op("aten::addmm", 10, 20)
    made.op("autograd::engine::evaluate_function: AddmmBackward0", 100, 110, tid=ENGINE)
    made.op("AddmmBackward0", 101, 109, tid=ENGINE, launches={"dgrad": 105})
    arrow = {"cat": "fwdbwd", "name": "fwdbwd", "id": 4, "pid": 1}
    made.events.append({**arrow, "ph": "s", "tid": MAIN, "ts": 10})
    made.events.append({**arrow, "ph": "f", "tid": ENGINE, "ts": 101, "bp": "e"})
    assert by_name(made.read(tmp_path))["dgrad"].module == "layer"


def test_two_threads_with_the_same_numbers(made, tmp_path):
    """Each thread has its own sequence numbers (DataParallel): numbers that occur in only one thread identify the threads."""
    for tid, module in ((MAIN, "left"), (11, "right")):
        made.range(f"mpinspect::module::{module}", 0, 50, tid=tid)
        made.op("aten::addmm", 10, 20, tid=tid, Sequence_number=5, Fwd_thread_id=0)
    made.op("aten::relu", 30, 40, tid=MAIN, Sequence_number=6, Fwd_thread_id=0)
    made.op("aten::tanh", 30, 40, tid=11, Sequence_number=9, Fwd_thread_id=0)
    known = ((100, "ReluBackward0", 6, 1), (120, "TanhBackward0", 9, 2), (140, "left", 5, 1), (160, "right", 5, 2))
    for start, node, sequence, thread in (*known, (180, "unknown", 5, 3)):
        backward_node(made, node, start, sequence, thread=thread)
        made.kernel(node, start + 5, tid=ENGINE)
    modules = {"ReluBackward0": "left", "TanhBackward0": "right", "left": "left", "right": "right", "unknown": ""}
    assert each_has(by_name(made.read(tmp_path)), "module") == modules


def test_recomputation_in_the_backward_belongs_to_its_own_module(made, tmp_path):
    made.range("mpinspect::module::block", 0, 20)
    made.op("CheckpointFunction", 1, 19, Sequence_number=2, Fwd_thread_id=0)
    backward_node(made, "CheckpointFunctionBackward", 100, 2)
    made.range("mpinspect::module::block.linear", 102, 106, tid=ENGINE)
    made.op("aten::addmm", 103, 105, tid=ENGINE, launches={"again": 104})
    made.kernel("own", 107, tid=ENGINE)
    kernels = by_name(made.read(tmp_path))
    assert (kernels["again"].module, kernels["own"].module) == ("block.linear", "block")
    assert kernels["again"].phase == "backward"


def test_ranges_that_overlap_operators_do_not_change_their_nesting(made, tmp_path):
    """A backward range begins in one node's hook and ends in another node's."""
    made.op("autograd::engine::evaluate_function: AddmmBackward0", 100, 120, tid=ENGINE)
    made.op("aten::mm", 112, 118, tid=ENGINE)
    made.range("mpinspect::backward::net", 105, 150, tid=ENGINE)
    made.kernel("late", 115, tid=ENGINE)
    kernel = by_name(made.read(tmp_path))["late"]
    assert (kernel.op.name, kernel.matmul_op.name, kernel.module) == ("aten::mm", "aten::mm", "net")


@pytest.mark.parametrize("name", ["a100_tf32_convnet", "ranks/worker0"])
def test_nodes_of_real_traces_find_the_operator_they_are_named_after(name):
    """Hundreds of nodes AddmmBackward0 belong to aten::addmm, and sequence numbers agree with Kineto's arrows."""
    recording = Recording()
    for batch in EventStream(TextChunks(DATA / f"{name}.json.gz")).batches():
        recording.add(batch)
    forwards = Forwards(recording, Nesting(recording.operators))
    names = list(recording.names)
    operators = [names[number] for number in recording.operators["name"].tolist()]
    arrows = dict(forwards._by_arrow)
    forwards._by_arrow.clear()
    assert all(forwards.of(head) == tail for head, tail in arrows.items())
    checked = 0
    for position, operator in enumerate(operators):
        node = re.fullmatch(r"(\w+)Backward\d?", operator)
        if node and forwards.is_backward(position):
            found = operators[forwards.of(position)].removeprefix("aten::").replace("_", "").lower()
            assert found == node[1].replace("_", "").lower()
            checked += 1
    assert checked > 30


# -- phases, steps, frames ----------------------------------------------------------------------------------------------


def test_phases_and_steps(made, tmp_path):
    made.range("ProfilerStep#41", 0, 100)
    made.range("ProfilerStep#42", 100, 200)
    made.op("aten::add", 10, 20, launches={"forward": 15})
    made.range("Optimizer.step#AdamW.step", 110, 150)
    made.op("aten::_foreach_add_", 120, 130, launches={"optimizer": 125})
    made.op("aten::sum", 210, 220, launches={"after": 215})
    made.kernel("bare", 230)
    # The autograd engine's thread has no ProfilerStep ranges.
    made.op("autograd::engine::evaluate_function: AddBackward0", 160, 170, tid=ENGINE, launches={"backward": 165})
    kernels = by_name(made.read(tmp_path))
    assert {name: (kernel.phase, kernel.step) for name, kernel in kernels.items()} == {
        "forward": ("forward", 41),
        "optimizer": ("optimizer", 42),
        "after": ("forward", None),
        "bare": ("", None),
        "backward": ("backward", 42),
    }
    assert kernels["bare"].unattributed == "no op"


def test_backwards_of_a_foreign_trace_have_the_chain_of_their_forward(made, tmp_path):
    for name, start, end in (("Net_0", 0, 50), ("Linear_3", 5, 40)):
        made.op(f"nn.Module: {name}", start, end, cat="python_function")
    made.op("aten::addmm", 10, 20, Sequence_number=5, Fwd_thread_id=0)
    backward_node(made, "AddmmBackward0", 100, 5)
    made.kernel("dgrad", 105, tid=ENGINE)
    kernel = by_name(made.read(tmp_path))["dgrad"]
    assert (kernel.module, kernel.module_is_path) == ("Net_0/Linear_3", False)


def test_names_of_categories_and_types_of_numbers_drift(made, tmp_path):
    made.op("ProfilerStep#3", 0, 100, cat="Operator")
    made.op("aten::mm", 10, 20, cat="Operator", Input_Dims=[[2, 3], [3, 4]], Input_type=["float", "float"])
    made.kernel("driver", 15, call="cuLaunchKernel", cat="cuda_driver")
    made.kernel("old", 16, cat="Runtime")
    for event in made.events:
        event["cat"] = "Kernel" if event["cat"] == "kernel" else event["cat"]
        event["ts"], event["dur"] = str(event["ts"]), str(event["dur"])
    kernels = by_name(made.read(tmp_path))
    found = {name: (kernel.op.name, kernel.step, kernel.time_us) for name, kernel in kernels.items()}
    assert found == dict.fromkeys(("driver", "old"), ("aten::mm", 3, 2.0))
    assert kernels["old"].op.shapes == ((2, 3), (3, 4))
    assert kernels["old"].op.strides is None


def test_arguments_other_than_tensors(made, tmp_path):
    sizes = {"Input_Dims": [[[2, 3], [4, 3]], [], [5]], "Input_Strides": [[[3, 1], [3, 1]], [], [1]]}
    kinds = {"Input_type": ["TensorList", "Scalar", "float"], "Concrete_Inputs": ["", "0", None]}
    made.op("aten::cat", 0, 10, **sizes, **kinds)
    made.kernel("k", 5)
    op = by_name(made.read(tmp_path))["k"].op
    assert op.shapes == (*op.strides[:2], (5,)) == ((), (), (5,))
    assert op.scalars == ("", "0", "")


def test_a_product_inside_its_wrappers_and_a_wrapper_alone(made, tmp_path):
    made.op("aten::linear", 0, 50)
    made.op("aten::to", 1, 10, launches={"cast": 5})
    made.op("aten::addmm", 20, 40)
    made.op("aten::copy_", 22, 30, launches={"copy": 25})
    made.op("aten::relu", 60, 70, launches={"relu": 65})
    kernels = by_name(made.read(tmp_path))
    products = {name: kernel.matmul_op and kernel.matmul_op.name for name, kernel in kernels.items()}
    assert products == {"cast": "aten::linear", "copy": "aten::addmm", "relu": None}


# -- launches ---------------------------------------------------------------------------------------------------------------


def test_kernels_without_operators_have_a_reason(made, tmp_path):
    made.op("aten::mm", 100, 120)
    made.kernel("launched", 110, correlation=500)
    made.kernel("early", None, start=50, correlation=900)
    made.kernel("low", None, start=5000, correlation=499)
    made.kernel("lost", None, start=5000, correlation=501)
    made.kernel("unlinked", None, start=5000, correlation=0)
    made.kernel("graph", 115, correlation=502, call="cudaGraphLaunch")
    made.kernel("graph too", None, correlation=502, start=7000)
    kernels = by_name(made.read(tmp_path))
    assert {name: kernel.unattributed for name, kernel in kernels.items()} == {
        "launched": "",
        "early": "before the window",
        "low": "before the window",
        "lost": "no launch",
        "unlinked": "no launch",
        "graph": "CUDA graph",
        "graph too": "CUDA graph",
    }
    assert [kernels[name].is_graph for name in ("graph", "graph too", "launched")] == [True, True, False]
    assert kernels["graph"].op is None
    assert kernels["graph"].matmul_op is None


def test_kernels_that_share_a_launch_have_no_operator(made, tmp_path):
    """A launch starts one kernel: if three have its correlation, two are wrong, and the right one is unknown."""
    made.op("aten::index_select", 0, 10)
    made.kernel("select", 1, correlation=5)
    made.kernel("gemm", None, correlation=5, start=2000)
    made.kernel("add", None, correlation=5, start=2010)
    made.op("aten::add", 20, 30)
    made.kernel("other", 21, start=3000)
    read = made.read(tmp_path)
    assert [(kernel.name, kernel.op and kernel.op.name, kernel.unattributed) for kernel in read.kernels] == [
        ("select", None, "no launch"),
        ("gemm", None, "no launch"),
        ("add", None, "no launch"),
        ("other", "aten::add", ""),
    ]
    assert any(note.startswith("3 kernels have a correlation that others have too") for note in read.notes)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("cudaGraphLaunch", "CUDA graph"),
        ("hipGraphLaunch", "CUDA graph"),
        ("cudaLaunchCooperativeKernelMultiDevice", ""),
        # A copy that is done by kernels.
        ("cudaMemcpy2DAsync", ""),
    ],
)
def test_calls_that_start_several_kernels(made, tmp_path, call, why):
    made.op("aten::mm", 0, 10)
    made.kernel("first", 1, correlation=5, call=call)
    made.kernel("second", None, correlation=5, start=2000)
    read = made.read(tmp_path)
    assert [kernel.unattributed for kernel in read.kernels] == [why, why]
    assert not any("a correlation that others have too" in note for note in read.notes)


def test_the_same_correlation_in_two_processes(made, tmp_path):
    """Ranks merged into one file. A GPU whose kernels precede a process's launches can't belong to that process."""
    for pid, device, late in ((1, 0, 0), (2, 1, 500)):
        for number in range(20):
            at = late + 10 * number
            made.op(f"rank{pid}::op", at, at + 9, pid=pid)
            made.kernel(f"k{device}", at + 4, pid=pid, device=device, correlation=number + 1, start=at + 6)
    trace = made.read(tmp_path)
    found = {(kernel.device, kernel.op and kernel.op.name) for kernel in trace.kernels}
    assert found == {(0, "rank1::op"), (1, "rank2::op")}


def test_equal_correlations_without_evidence_of_the_process(made, tmp_path):
    for pid in (1, 2):
        made.op(f"rank{pid}::op", 0, 10, pid=pid)
        made.kernel(f"k{pid}", 5, pid=pid, device=0, correlation=1)
    trace = made.read(tmp_path)
    assert {kernel.unattributed for kernel in trace.kernels} == {"no launch"}
    assert any("several processes share this file" in note for note in trace.notes)


def test_the_same_correlation_twice_in_one_process_is_the_last_launch_before(made, tmp_path):
    made.op("first", 0, 10)
    made.kernel("a", 5, correlation=7, start=20)
    made.op("second", 100, 110)
    made.kernel("b", 105, correlation=7, start=120)
    kernels = by_name(made.read(tmp_path))
    assert (kernels["a"].op.name, kernels["b"].op.name) == ("first", "second")


def test_an_operators_end_is_outside_and_its_beginning_inside(made, tmp_path):
    """Traces in whole microseconds: neighbours touch."""
    made.op("aten::mm", 100, 105)
    made.op("aten::empty", 105, 105)
    made.op("aten::relu", 105, 110, launches={"relu": 105})
    made.op("aten::bmm", 120, 130)
    made.op("aten::add", 120, 130, launches={"inner of two alike": 120})
    kernels = by_name(made.read(tmp_path))
    assert (kernels["relu"].op.name, kernels["relu"].matmul_op) == ("aten::relu", None)
    alike = kernels["inner of two alike"]
    assert (alike.op.name, alike.matmul_op.name) == ("aten::add", "aten::bmm")


def test_operators_that_overlap_by_rounded_times_do_not_enclose_each_other(made, tmp_path):
    """Microseconds since 1970 in a double have steps of a quarter: a product may end after the next operator's beginning."""
    made.op("aten::mm", 1.7e15, 1.7e15 + 10.25)
    made.op("aten::copy_", 1.7e15 + 10, 1.7e15 + 20, launches={"copy": 1.7e15 + 12})
    kernel = by_name(made.read(tmp_path))["copy"]
    assert (kernel.op.name, kernel.matmul_op) == ("aten::copy_", None)


@pytest.mark.parametrize(
    ("properties", "call", "vendor"),
    [
        ({"name": "", "warpSize": 64}, "cudaLaunchKernel", "AMD"),
        ({"name": "AMD Instinct MI300X", "warpSize": 32}, "cudaLaunchKernel", "AMD"),
        ({"name": "unnamed"}, "hipModuleLaunchKernel", "AMD"),
        ({"name": "NVIDIA H100"}, "cudaLaunchKernel", "NVIDIA"),
        ({"name": "Tesla V100-SXM2-32GB", "warpSize": 32}, "cudaLaunchKernel", "NVIDIA"),
        ({"name": "Intel(R) Data Center GPU Max 1550"}, "urEnqueueKernelLaunch", ""),
    ],
)
def test_vendors(made, tmp_path, properties, call, vendor):
    made.kernel("k", 5, call=call)
    trace = made.read(tmp_path, deviceProperties=[{"id": 0, **properties}])
    assert [device.vendor for device in trace.devices] == [vendor]


@pytest.mark.parametrize(
    ("top_level", "job"),
    [
        ({"mast_job_name": "train", "mast_job_attempt": "2", "traceName": "x.json"}, "train attempt 2"),
        ({"slurm_job_id": 17}, "17"),
        ({"traceName": "/runs/resnet_rank3.json"}, "resnet_rank#"),
        ({"traceName": "/tmp/tmpu3g3sevh.json"}, ""),
        ({"traceName": "./log/node-a_4242.1712195495.pt.trace.json"}, ""),
        ({}, ""),
    ],
)
def test_jobs(made, tmp_path, top_level, job):
    assert made.read(tmp_path, **top_level).job == job


# -- nesting ------------------------------------------------------------------------------------------------------------------

SPANS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 12), st.integers(0, 8)), max_size=12)
POINTS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 20)), max_size=8)


@settings(deadline=None)
@given(spans=SPANS, points=POINTS)
def test_innermost_is_the_last_started_enclosing_span(spans, points):
    columns = Columns("thread", "id")
    for number, (thread, start, duration) in enumerate(spans):
        columns.add((start, duration, thread, number))
    asked = Columns("thread")
    for thread, time in points:
        asked.add((time, 0, thread))
    found = Nesting(columns, proper=False).innermost(asked["thread"], asked.start).tolist()
    for (thread, time), position in zip(points, found, strict=True):
        around = [
            (start, -duration, number)
            for number, (own, start, duration) in enumerate(spans)
            if own == thread and start <= time < start + duration
        ]
        assert position == (max(around)[2] if around else -1)


def test_values_are_numbered_in_the_order_of_first_use():
    numbers = Numbering()
    assert [numbers[value] for value in ("a", "b", "a", ("c", 1))] == [0, 1, 0, 2]
    assert list(numbers) == ["a", "b", ("c", 1)]
