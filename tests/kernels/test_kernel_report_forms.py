"""Formats of the kernel report: text, Markdown, JSON, picture; hostile names, narrow terminals."""

import json

import labels
import made_kernels as made
import pytest
from made_kernels import everything, kernel, mm, trace
from matplotlib.figure import Figure

from mpinspect.kernels.analysis import analyse_kernels
from mpinspect.kernels.report import plot as plot_kernels
from mpinspect.kernels.report.document import clean_name
from mpinspect.reporting.escaping import escaped
from mpinspect.reporting.words import shortened


def hostile():
    name = "evil|kernel`<script>alert(1)</script>\x1b[31m\n[red]*_$#@"
    runs = [kernel(name, 5), kernel(f"{name}sgemm_", 5, mm(8, 8, 8, "float"), module=f"{name}/schicht.gr\u00f6\u00dfe")]
    return analyse_kernels([trace(*runs, device=made.A100, source="/tmp/<b>|.json", notes=(name,))])


def test_json_adds_up():
    report = everything()
    document = json.loads(report.to_json())
    assert (document["schema"], document["schema_version"]) == ("mpinspect.kernels", 1)
    assert document["tensor_core_fraction"] == report.tensor_core_fraction
    assert sum(row["time_us"] for row in document["kernels"]) == pytest.approx(200)
    assert sum(row["calls"] for row in document["kernels"]) == 14
    assert {row["trace"] for row in document["kernels"]} == {0, 1}
    head = next(row for row in document["kernels"] if row["module"] == "head")
    assert (head["verdict"], head["matmul"]["n"], head["shape_verdict"]) == ("degraded", 30522, "degraded")
    assert document["losses"][0]["savings"][0]["basis"] == "roofline"
    assert document["ranks"][1]["devices"][0]["idle_fraction"] == 0


def test_json_puts_equal_runs_together():
    runs = [kernel(made.ADD, time) for time in (1, 3, 2)]
    (row,) = json.loads(analyse_kernels([trace(*runs)]).to_json())["kernels"]
    assert (row["calls"], row["time_us"], row["min_time_us"], row["max_time_us"]) == (3, 6, 1, 3)


def test_json_has_no_nan():
    text = analyse_kernels([trace(kernel(made.ADD, float("nan")))]).to_json()
    assert json.loads(text, parse_constant=pytest.fail)["kernels"][0]["time_us"] == "nan"


# -- the picture ----------------------------------------------------------------------------------------------------


def test_bars_add_up_to_all_time_but_communication():
    report = everything()
    found = plot_kernels.bars(report)
    assert {bar.label for bar in found} == {"(unknown)", "layer.0", "head", "layer.1"}
    unknown = next(bar for bar in found if bar.label == "(unknown)")
    assert unknown.times == {"unknown": 20, "helper": 10, "other": 20}
    assert sum(bar.total for bar in found) == report.shares.compute_time_us
    assert sum(bar.regained_us for bar in found) == pytest.approx(sum(report.limits.saved_at_most_us.values()))


def test_bars_are_sorted_by_possible_saving():
    runs = [
        kernel(made.NATIVE, 90, mm(64, 64, 64), module="fine"),
        kernel(made.SGEMM, 40, mm(64, 64, 64), module="off"),
    ]
    report = analyse_kernels([trace(*runs, kernel(made.NCCL, 100))])
    assert [bar.label for bar in plot_kernels.bars(report)] == ["off", "fine"]
    shown = labels.words(plot_kernels.kernels(report))
    assert any("at most" in text and "of the kernel time could be regained" in text for text in shown)
    assert any("Communication, which no precision shortens, is in the first bar only." in text for text in shown)


def test_kernels_replace_modules_where_no_module_is_known():
    report = analyse_kernels([trace(kernel(made.ADD_BF16, 5), kernel(made.NATIVE, 7), kernel(made.NCCL, 1))])
    assert [bar.times for bar in plot_kernels.bars(report)] == [{"native": 7}, {"other": 5}]


@pytest.mark.parametrize(
    "make", [everything, hostile, lambda: analyse_kernels([]), lambda: analyse_kernels([trace(kernel(made.ADD, 0))])]
)
def test_every_report_has_a_picture(make, tmp_path):
    report = make()
    assert isinstance(plot_kernels.kernels(report), Figure)
    assert plot_kernels.save(report, tmp_path / "k.png").read_bytes().startswith(b"\x89PNG")


def test_the_number_of_bars_is_limited():
    runs = [kernel(made.NATIVE, 5, mm(64, 64, 64), module=f"layer.{number}") for number in range(40)]
    assert len(plot_kernels.bars(analyse_kernels([trace(*runs)]))) == plot_kernels.MAX_BARS


@pytest.mark.parametrize("make", [everything, hostile, lambda: analyse_kernels([])])
def test_no_label_in_the_picture_is_cut(make):
    labels.assert_readable(plot_kernels.kernels(escaped(make())))


def test_the_verdicts_colours_are_distinguishable():
    labels.assert_distinct(plot_kernels.COLOURS)


# -- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("volta_sgemm_128x64_nn", "volta_sgemm_128x64_nn"),
        (f"void cutlass::Kernel2<{made.NATIVE}>({made.NATIVE}::Params)", made.NATIVE),
        ("void (anonymous namespace)::softmax_warp_forward<float, 10>(float*, int)", "softmax_warp_forward<float, 10>"),
        (made.LAYOUT, "cudnn::ops::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)2>"),
        (made.ADD, "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>, int>"),
        ("", ""),
        ("(", "("),
    ],
)
def test_short_names(name, short):
    assert clean_name(name) == short


@pytest.mark.parametrize("length", range(4, 60))
def test_a_shortened_name_has_at_most_the_requested_length(length):
    assert len(shortened(clean_name(made.LAYOUT), length, "middle")) <= length
    assert len(shortened("encoder.layers.0.self_attention.out_proj" * 3, length, "start")) <= length
