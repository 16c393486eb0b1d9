"""Files that are damaged, truncated or not traces; and JSON that is split at every position of a chunk."""

import gc
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mpinspect import read_trace
from mpinspect.kernels.trace import TraceError, read_trace_file
from mpinspect.kernels.trace.events import EventStream
from mpinspect.kernels.trace.recording import Recording
from mpinspect.kernels.trace.text import TextChunks

BERT = Path(__file__).parents[1] / "data" / "traces" / "h100_bert_small.json.gz"


def kernel(name: str = "gemm", **changes: Any) -> dict[str, Any]:
    args = {"device": 0, "stream": 7, "correlation": 1}
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": 0,
        "tid": 7,
        "ts": 10.0,
        "dur": 2.0,
        "args": args,
        **changes,
    }


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / "trace.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def notes(folder: Path, content: str | bytes) -> str:
    return "\n".join(read_trace_file(written(folder, content)).notes)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        (gzip.compress(b"", mtime=0), "is empty"),
        ("hello", "is not JSON: it begins with 'hello'"),
        ("<!DOCTYPE html>", "but HTML or XML"),
        ("PK\x03\x04....", "but a ZIP archive"),
        ("SQLite format 3\0", "SQLite"),
        (b"\x89PNG\r\n", "is not JSON"),
        ("3", "is not JSON"),
        ('"traceEvents"', "is not JSON"),
        ('{"layers": 3}', r"no trace: it has no traceEvents \(it has layers\)"),
        ("{}", "no trace"),
        ('{"traceEvents": 3}', "no trace"),
        ('{"traceEvents"', "cut short before its first event: it ends at byte 14"),
        ('{"a": tru', "cut short before its first event"),
        ('{"a": b' + " " * 100 + "}", "is not valid JSON: Expecting value at byte 6"),
        ('{"a" 3, "b": "' + "x" * 100 + '"}', "a key and a value were expected at byte 5"),
        ('[{"a": 1}, {"b": 2}]', "its entries have no phase"),
        ("[1, 2, 3]", "its entries have no phase"),
        ("[" * 100_000, "is not valid JSON|no phase|cut short"),
        (gzip.compress(b'{"a": 1}', mtime=0)[:12], "cut short"),
        (b"\x1f\x8b\x08\x00junk that is no deflate stream", "damaged"),
    ],
)
def test_other_files_are_refused_with_a_sentence(tmp_path, content, says):
    with pytest.raises(TraceError, match=says) as caught:
        read_trace_file(written(tmp_path, content))
    assert str(tmp_path) in str(caught.value)
    assert str(caught.value).endswith(".")


def test_no_file_a_folder_and_a_file_that_may_not_be_read(tmp_path):
    with pytest.raises(TraceError, match="There is no"):
        read_trace_file(tmp_path / "missing.json")
    with pytest.raises(TraceError, match="is a folder, not a trace"):
        read_trace_file(tmp_path)


@pytest.mark.parametrize("content", ['{"traceEvents": []}', "[]", '{"traceEvents": [], "deviceProperties": []}'])
def test_a_trace_without_events(tmp_path, content):
    read = read_trace_file(written(tmp_path, content))
    assert (read.kernels, read.devices, read.busy_us) == ((), (), {})
    assert "nothing ran while the profiler recorded" in read.notes[0]


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.9, 0.999])
def test_cut_json_gives_the_events_before_the_cut(tmp_path, cut):
    content = gzip.decompress(BERT.read_bytes())
    content = content[: int(len(content) * cut)]
    read = read_trace_file(written(tmp_path, content))
    # The number of complete events in the text, counted independently of the reader.
    whole = content.count(b'\n    },\n    {\n      "ph"') + content.count(b'\n    },\n    {\n      "name"')
    (note,) = [note for note in read.notes if "cut short" in note]
    assert f"it ends at byte {len(content):,}" in note
    assert read.cut_short
    assert not read_trace_file(BERT).cut_short
    assert f"The {whole:,} events" in note or f"The {whole + 1:,} events" in note
    assert {kernel.name for kernel in read.kernels} <= {kernel.name for kernel in read_trace_file(BERT).kernels}


def test_cut_gzip_gives_the_events_before_the_cut(tmp_path):
    whole = BERT.read_bytes()
    read = read_trace_file(written(tmp_path, whole[: len(whole) * 2 // 3]))
    assert 0 < read.operators <= read_trace_file(BERT).operators
    assert read.cut_short
    assert "gzip data are cut short after" in read.notes[0]


@pytest.mark.parametrize("ending", [b"", bytes(8)])
def test_gzip_without_its_checksum_is_damaged_and_not_cut_short(tmp_path, ending):
    read = read_trace_file(written(tmp_path, BERT.read_bytes()[:-8] + ending))
    assert read.kernels == read_trace_file(BERT).kernels
    assert not read.cut_short
    assert read.notes[0].startswith("The file is damaged: its gzip data are")


def test_damaged_gzip_gives_the_events_before_the_damage(tmp_path):
    damaged = bytearray(BERT.read_bytes())
    damaged[len(damaged) // 2 :] = bytes(len(damaged) - len(damaged) // 2)
    read = read_trace_file(written(tmp_path, bytes(damaged)))
    assert read.operators > 0
    assert "cut short or damaged: its gzip data are" in read.notes[0]
    # The note covers only the part that could be read.
    assert "The readable part has no GPU kernels" in read.notes[1]


def test_a_wrong_checksum_is_noted(tmp_path):
    zipped = bytearray(gzip.compress(json.dumps([kernel()]).encode()))
    zipped[-8] ^= 1
    read = read_trace_file(written(tmp_path, bytes(zipped)))
    assert len(read.kernels) == 1
    assert "gzip data are damaged" in read.notes[0]


def test_gzip_of_several_members_and_padding(tmp_path):
    text = json.dumps({"traceEvents": [kernel(), kernel("other")]}).encode()
    zipped = gzip.compress(text[:50], mtime=0) + gzip.compress(text[50:]) + bytes(512)
    read = read_trace_file(written(tmp_path, zipped))
    assert len(read.kernels) == 2
    assert not any("cut" in note or "damaged" in note for note in read.notes)


@pytest.mark.parametrize("junk", [b"\x80\x81\xff", b"{}", b'{"traceEvents": []}', b"\0\0\0junk"])
def test_data_after_the_end_is_ignored(tmp_path, junk):
    content = json.dumps({"traceEvents": [kernel()]}).encode()
    read = read_trace_file(written(tmp_path, content + b"\n" + junk))
    assert len(read.kernels) == 1
    if not junk.startswith(b"\0"):
        assert f"from byte {len(content) + 1} on, is ignored" in read.notes[0]


def test_zeros_at_the_end_are_not_noted(tmp_path):
    assert "ignored" not in notes(tmp_path, json.dumps([kernel()]).encode() + bytes(100))


def test_damage_after_the_events(tmp_path):
    text = json.dumps({"traceEvents": [kernel()]})[:-1] + ', "INFO": nonsense' + " " * 100 + "}"
    read = read_trace_file(written(tmp_path, text))
    assert len(read.kernels) == 1
    assert "damaged after the events (Expecting value at byte" in read.notes[0]


def test_damage_before_the_events(tmp_path):
    text = '{"deviceProperties": [nonsense' + " " * 200 + "], " + json.dumps({"traceEvents": [kernel()]})[1:]
    read = read_trace_file(written(tmp_path, text))
    assert len(read.kernels) == 1
    assert "The text before the events is damaged" in read.notes[0]


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize(
    ("bad", "left_out"),
    [
        ('{"ph": "X", "cat": "kernel", "name": "C:\\Users\\me", "ts": 1.0, "dur": 1.0}', 0),
        (
            '{"ph": "X", "cat": "kernel", "name": "k", "ts": 1.0, "dur": 1.0, "args": {"bw": inf, "b": -nan, "c": nan}}',
            0,
        ),
        ('{"ph": "X", "cat": "kernel", "name": "k", "ts": 1.0, "dur": 1.0, "args": {"grid": NaN, "b": -Infinity}}', 0),
        ('{"ph": "X", "cat": "kernel", "name": "tab\there", "ts": 1.0, "dur": 1.0}', 0),
        ('{"ph": "X", "cat": "kernel" "name": "k", "ts": 1.0, "dur": 1.0}', 1),
        ('{"ph": "X", "cat": "kernel", "name": , "ts": 1.0, "dur": 1.0}', 1),
        ('{"ph": "X", "cat": "kernel", "name": "k", "ts": 1' + "0" * 5000 + ', "dur": 1.0}', 1),
    ],
)
def test_an_event_with_invalid_json_is_repaired_or_skipped(tmp_path, separators, bad, left_out):
    good = [json.dumps(kernel(f"k{number}"), separators=separators) for number in range(40)]
    text = '{"traceEvents": [' + ",".join([*good[:20], bad, *good[20:]]) + "]}"
    read = read_trace_file(written(tmp_path, text))
    assert len(read.kernels) == 41 - left_out
    assert any("1 events are left out" in note for note in read.notes) == bool(left_out)


@pytest.mark.parametrize("ending", ["}", ""])
def test_a_last_event_with_invalid_json(tmp_path, ending):
    text = '{"traceEvents": [' + json.dumps(kernel()) + ', {"ph": "X" "cat": 3}]' + ending
    read = read_trace_file(written(tmp_path, text))
    assert len(read.kernels) == 1
    assert "cut short or damaged" in read.notes[0]


@pytest.mark.parametrize(
    ("changes", "time_us", "says"),
    [
        ({"dur": -3.0}, 0.0, "1 events have no duration or a negative one"),
        ({"dur": float("inf")}, 0.0, "1 events have no duration"),
        ({"dur": float("nan")}, 0.0, "1 events have no duration"),
        ({"ts": -10.0}, 2.0, ""),
        ({"dur": None}, 0.0, "1 events have no duration"),
        ({"dur": "2.5"}, 2.5, ""),
        ({"dur": 3}, 3.0, ""),
        ({"ts": "10"}, 2.0, ""),
        ({"args": None}, 2.0, ""),
        ({"args": {}}, 2.0, ""),
        ({"args": {"device": "0", "stream": "7", "correlation": "5"}}, 2.0, ""),
        ({"args": {"correlation": 1 << 70}}, 2.0, ""),
        ({"pid": "GPU 0"}, 2.0, ""),
        ({"name": None}, 2.0, ""),
    ],
)
def test_odd_fields_of_a_kernel(tmp_path, changes, time_us, says):
    event = {key: value for key, value in kernel(**changes).items() if value is not None or key != "dur"}
    read = read_trace_file(written(tmp_path, json.dumps([event])))
    assert [(each.time_us, each.device) for each in read.kernels] == [(time_us, 0)]
    assert says in "\n".join(read.notes)


@pytest.mark.parametrize(
    "event",
    [
        kernel(ts=None),
        kernel(ts="soon"),
        kernel(ts=float("nan")),
        kernel(ts=float("inf")),
        kernel(ts=1e300),
        kernel(args=[1, 2]),
        kernel(args="none"),
        {"ph": "X", "cat": "cpu_op", "name": "op", "ts": 1.0, "dur": 1.0, "pid": [1], "tid": {}},
        {"ph": "X", "cat": ["kernel"], "name": "op", "ts": 1.0, "dur": 1.0},
        None,
        3,
        "event",
        [kernel()],
    ],
)
def test_other_values_among_the_events_are_skipped(tmp_path, event):
    read = read_trace_file(written(tmp_path, json.dumps([kernel(), event, kernel("other")])))
    assert [each.name for each in read.kernels] == ["gemm", "other"]
    assert any("1 events are left out" in note for note in read.notes)


def test_begin_and_end_pairs_are_noted(tmp_path):
    pair = [kernel(ph="B"), kernel(ph="E", ts=12.0)]
    assert "2 events are halves of begin and end pairs" in notes(tmp_path, json.dumps([*pair, kernel()]))


def test_names_with_invalid_utf8_are_decoded_as_far_as_possible(tmp_path):
    text = json.dumps({"traceEvents": [kernel("aXb")]}).encode().replace(b"aXb", b"a\xff\xfeb")
    (read,) = read_trace_file(written(tmp_path, text)).kernels
    assert read.name == "a\ufffd\ufffdb"


def test_a_byte_order_mark(tmp_path):
    assert len(read_trace_file(written(tmp_path, b"\xef\xbb\xbf" + json.dumps([kernel()]).encode())).kernels) == 1


def test_another_tools_trace_is_reported_as_without_torch_events(tmp_path):
    event = {"ph": "X", "cat": "toplevel", "name": "RunTask", "ts": 1, "dur": 1, "pid": 1, "tid": 1}
    assert "another tool wrote it" in notes(tmp_path, json.dumps({"traceEvents": [event]}))


# -- traces of other profilers ------------------------------------------------------------------------------------------


def process(name: str, pid: int = 1) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}


def thread(name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": 2, "name": "thread_name", "args": {"name": name}}


def span(name: str, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "pid": 1, "tid": 2, "ts": 10.5, "dur": 3.0, "name": name, "args": args}


XLA = {"displayTimeUnit": "ns", "metadata": {"highres-ticks": True}}
JAX = [
    process("/device:GPU:0"),
    thread("Stream #20(Compute)"),
    process("/host:CPU", 701),
    span("PjitFunction(train_step)"),
    span("loop_add_fusion", hlo_module="jit_train_step", hlo_op="loop_add_fusion", correlation_id=1),
    {},
]
TENSORFLOW = [
    process("/device:GPU:0"),
    thread("TensorFlow Ops"),
    span("MatMul", group_id="1", tf_op="dense/MatMul:MatMul", long_name="MatMul"),
]
TIMELINE = [process("/job:localhost/replica:0/task:0/device:GPU:0 Compute"), span("MatMul", op="MatMul")]
ASCEND = [
    process("Python"),
    process("CANN", 2),
    process("Ascend Hardware", 3),
    {**span("aclnnMatmul_MatMulCommon_MatMulV2"), "dur": "12.3", "ts": "1699.1", "pid": 3},
]
ROCPROF = {"rocprofiler-sdk-tool": [{"metadata": {"pid": 7}, "agents": [], "buffer_records": {"kernel_dispatch": []}}]}
XPLANE = b"\n\xd9\x03\x08\x01\x12\r/device:GPU:0\x1a\x10\x08\x14\x12\x0cStream #20"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.trace.json", {**XLA, "traceEvents": JAX}, "a trace of JAX's profiler"),
        ("a.trace.json", {**XLA, "traceEvents": TENSORFLOW}, "a trace of TensorFlow's profiler"),
        ("timeline.json", {"traceEvents": TIMELINE}, "a trace of TensorFlow's profiler"),
        ("trace_view.json", ASCEND, "a trace of Ascend's profiler"),
        ("out_results.json", ROCPROF, "a trace of rocprofv3"),
        ("cut.json", json.dumps(ROCPROF)[:40] + "\x01 no JSON" + " " * 100, "a trace of rocprofv3"),
        ("host.xplane.pb", XPLANE, "a trace of XLA's profiler"),
        ("op_statistic.csv", "Device_id,Model Name,OP Type,Core Type,Count,Total Time(us)\n", "a trace of Ascend's"),
        ("kernel_trace.csv", '"Kind","Agent_Id","Queue_Id","Kernel_Name"\n"KERNEL_DISPATCH",1,1,"gemm"\n', "rocprofv3"),
        ("out_results.pftrace", b"\n\x12\x12\x10\x08\x01rocprofv3", "in Perfetto's binary format"),
    ],
)
def test_traces_of_other_profilers_are_named(tmp_path, name, content, says):
    path = tmp_path / name
    text = content if isinstance(content, (str, bytes)) else json.dumps(content)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(TraceError, match=says) as caught:
        read_trace_file(path)
    assert "read" in str(caught.value)


@pytest.mark.parametrize(("category", "accelerator"), [("mtia_ccp_events", "MTIA"), ("hpu_op", "Gaudi")])
def test_torchs_own_trace_of_another_accelerator_is_named(tmp_path, category, accelerator):
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2, "args": {"Ev Idx": 0}},
        {"ph": "X", "cat": category, "name": "fba_mm", "pid": 0, "tid": 7, "ts": 2, "dur": 1, "args": {"device": 0}},
    ]
    report = read_trace(written(tmp_path, json.dumps({"traceEvents": events})))
    (finding,) = report.findings
    assert finding.id == "no-gpu-activity"
    assert accelerator in finding.message
    assert "there is no GPU" not in finding.message
    assert report.ranks[0].operators == 1


def test_a_name_of_a_torch_trace_is_not_a_mark_of_another_profiler(tmp_path):
    """Only traces without GPU kernels are examined: a torch trace may name jax or TensorFlow anywhere."""
    events = [kernel("jax_jit_fusion"), process("/device:GPU:0"), thread("TensorFlow Ops")]
    assert len(read_trace_file(written(tmp_path, json.dumps({"traceEvents": events}))).kernels) == 1


def test_interrupting_passes_through_and_garbage_collection_is_back(tmp_path, monkeypatch):
    def interrupted(self: Recording, batch: list[Any]) -> None:
        assert not gc.isenabled()
        raise KeyboardInterrupt

    monkeypatch.setattr(Recording, "add", interrupted)
    path = written(tmp_path, json.dumps([kernel()]))
    with pytest.raises(KeyboardInterrupt):
        read_trace_file(path)
    assert gc.isenabled()
    gc.disable()
    try:
        with pytest.raises(KeyboardInterrupt):
            read_trace_file(path)
        assert not gc.isenabled()
    finally:
        gc.enable()


# -- the stream -------------------------------------------------------------------------------------------------------------


def streamed(path: Path, chunk_bytes: int) -> tuple[EventStream, list[Any]]:
    stream = EventStream(TextChunks(path, chunk_bytes))
    return stream, [event for batch in stream.batches() for event in batch]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
#: Nested lists of dicts look like events, and names contain the separators of events.
EVENTS = st.lists(
    st.fixed_dictionaries(
        {"ph": st.sampled_from("XBsfiM"), "name": st.text(alphabet='},{"\\ \né漢😀', max_size=8)},
        optional={
            "cat": st.sampled_from(["kernel", "cpu_op"]),
            "args": VALUES,
            "list": st.just([{"ph": "X"}, {"ph": "f"}]),
        },
    ),
    max_size=8,
)
LAYOUTS = st.sampled_from([{}, {"separators": (",", ":")}, {"indent": 2}, {"indent": 0}, {"ensure_ascii": False}])


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=EVENTS, layout=LAYOUTS, chunk_bytes=st.integers(1, 40), before=VALUES, after=VALUES, zipped=st.booleans())
# Pieces that end within a number, which is a number up to there.
@example(events=[], layout={}, chunk_bytes=1, before=-0.5, after=10.25, zipped=False)
@example(events=[{"ph": "X", "name": ""}], layout={}, chunk_bytes=1, before=1e-07, after=1e16, zipped=False)
def test_any_json_in_any_pieces_is_read_as_by_json(tmp_path, events, layout, chunk_bytes, before, after, zipped):
    content = {"before": before, "traceEvents": events, "after": after}
    text = json.dumps(content, **layout).encode()
    stream, read = streamed(written(tmp_path, gzip.compress(text, 1, mtime=0) if zipped else text), chunk_bytes)
    assert read == events
    assert stream.top_level == {"before": before, "after": after}
    assert (stream.events, stream.damaged, stream.problem) == (len(events), 0, "")


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=EVENTS, layout=LAYOUTS, chunk_bytes=st.integers(1, 40), data=st.data())
def test_any_cut_yields_the_events_before_it(tmp_path, events, layout, chunk_bytes, data):
    text = json.dumps({"traceEvents": events}, **layout).encode()
    start = text.index(b"[") + 1
    cut = data.draw(st.integers(start, text.rindex(b"]")))
    if not whole_values(text[:cut].decode(errors="ignore"), start):
        with pytest.raises(TraceError, match="cut short before its first event"):
            streamed(written(tmp_path, text[:cut]), chunk_bytes)
        return
    stream, read = streamed(written(tmp_path, text[:cut]), chunk_bytes)
    assert read == events[: len(read)]
    assert "cut short" in stream.problem
    assert read == whole_values(text[:cut].decode(errors="ignore"), start)


def whole_values(text: str, at: int) -> list[Any]:
    """Yield the complete JSON values from a position on."""
    found = []
    while True:
        while at < len(text) and text[at] in " ,\n":
            at += 1
        try:
            value, at = json.JSONDecoder().raw_decode(text, at)
        except ValueError:
            return found
        found.append(value)


@pytest.mark.parametrize("chunk_bytes", [7, 1000, 1 << 20])
def test_events_that_are_not_needed_are_counted_and_not_decoded(tmp_path, chunk_bytes):
    flow = {"ph": "s", "id": 5, "pid": 1, "tid": 1, "ts": 3.5, "cat": "ac2g", "name": "ac2g"}
    frame = {
        "ph": "X",
        "cat": "python_function",
        "name": "train.py(3): step",
        "pid": 1,
        "tid": 1,
        "ts": 1.0,
        "dur": 9.0,
    }
    module = {**frame, "name": "nn.Module: Linear_0"}
    idle = {"ph": "X", "cat": "cuda_runtime", "name": "cudaEventRecord", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0}
    forward = {**flow, "cat": "fwdbwd"}
    events = [kernel(), flow, frame, module, idle, forward] * 50 + [kernel()]
    stream, read = streamed(written(tmp_path, json.dumps(events, indent=1)), chunk_bytes)
    assert stream.events == len(events)
    needed = [event for event in events if event not in (flow, frame, idle)]
    assert [event for event in read if event not in (flow, frame, idle)] == needed
    if chunk_bytes == 1 << 20:
        assert len(read) < len(needed) + 10


def test_an_event_inside_an_event_does_not_confuse_the_reader(tmp_path):
    """An event's arguments hold a list of events, formatted like events of the trace."""
    inner = {
        "ph": "f",
        "id": 5,
        "pid": 1,
        "tid": 1,
        "ts": 3.5,
        "cat": "ac2g",
        "name": "ac2g",
        "list": [{"ph": "X"}, {"ph": "X"}],
    }
    outer = kernel(args={"device": 0, "inner": [inner, inner, {"ph": "X", "cat": "kernel"}]})
    events = [kernel(), outer, kernel("last")] * 20
    _, read = streamed(written(tmp_path, json.dumps(events)), 1 << 16)
    assert [event["name"] for event in read] == [event["name"] for event in events]
    assert [event["ts"] for event in read] == [10.0] * 60


def test_memory_stays_bounded_by_the_chunk(tmp_path):
    """The buffered text never exceeds a chunk and the longest event by much."""
    path = written(tmp_path, json.dumps([kernel(f"k{number}") for number in range(5000)]))
    stream = EventStream(TextChunks(path, 4096))
    longest = max(len(stream._text.text) for _ in stream.batches())
    assert longest < 3 * 4096
