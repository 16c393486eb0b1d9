"""Real traces: figures equal independent sums of the file's events, and every format can be rendered."""

import gzip
import json
import re

import made_kernels as made
import pytest

from mpinspect.kernels.analysis import KernelReport, analyse_kernels
from mpinspect.kernels.trace import read_trace_files
from mpinspect.reporting import plot_style
from mpinspect.reporting.forms import render


@pytest.fixture(scope="module")
def reports() -> dict[str, KernelReport]:
    return {name: analyse_kernels(read_trace_files([made.TRACES / name])) for name in made.REAL}


def summed(name: str, pattern: str) -> tuple[float, float]:
    """Return (the time of kernels whose names match the pattern, the time of all kernels), in us, from the file's events."""
    events = json.loads(gzip.decompress((made.TRACES / f"{name}.json.gz").read_bytes()))["traceEvents"]
    times = [(event["name"], event["dur"]) for event in events if str(event.get("cat", "")).lower() == "kernel"]
    return sum(time for kernel, time in times if re.search(pattern, kernel)), sum(time for _, time in times)


@pytest.mark.parametrize(
    ("name", "on_tensor_cores", "about"),
    [
        ("h100_bert_small", r"s161616|s16816|flash_fwd|bf16bf16", 0.76),
        ("h100_vit", r"s16816|flash_fwd|bf16bf16", 0.78),
        ("a100_tf32_convnet", r"tensorop|TensorOp|tf32f32", 0.24),
        ("a100_alexnet", r"tf32f32", 0.17),
        ("a100_switch_transformer_fp32", r"$^", 0.0),
        ("v100_fp32_training", r"$^", 0.0),
        ("gp100_no_tensor_cores", r"$^", 0.0),
        ("a100_triton", r"$^", 0.0),
    ],
)
def test_share_of_all_kernel_time(name, on_tensor_cores, about, reports):
    part, whole = summed(name, on_tensor_cores)
    report = reports[f"{name}.json.gz"]
    assert report.shares.kernel_time_us == pytest.approx(whole)
    assert report.tensor_core_fraction_of_all == pytest.approx(part / whole)
    assert report.tensor_core_fraction_of_all == pytest.approx(about, abs=0.006)


def test_the_bert_head_is_degraded_and_named(reports):
    (loss,) = reports["h100_bert_small.json.gz"].degraded
    assert (loss.n, loss.k, loss.dtype, loss.calls) == (30522, 512, "bfloat16", 1)
    assert loss.module == "BertLMHeadModel_0/BertOnlyMLMHead_0/BertLMPredictionHead_0/Linear_25"
    assert "_align2" in loss.cause
    (saving,) = loss.savings
    assert (saving.basis, saving.limited_by) == ("roofline", "memory")
    (finding,) = [f for f in reports["h100_bert_small.json.gz"].findings if f.id == "used-but-degraded"]
    assert finding.fix.startswith("Pad 30522 -> 30528")


@pytest.mark.parametrize("name", ["h100_bert_small", "h100_vit"])
def test_no_product_that_ran_native_is_flagged_by_the_stride_rule(name, reports):
    native = [row for row in reports[f"{name}.json.gz"].kernels if row.verdict == "native" and row.kind == "gemm"]
    assert len(native) >= 25
    assert [row.shape.verdict for row in native] == ["native"] * len(native)
    assert all(row.flops is not None for row in native)


@pytest.mark.parametrize("name", ["h100_bert_small", "h100_vit"])
def test_flops_of_a_whole_model(name, reports):
    """Kernels of equal calls have equal FLOPs, whose sum equals the FLOPs of the operators' shapes."""
    products = [row for row in reports[f"{name}.json.gz"].kernels if row.is_product]
    assert sum(row.flops for row in products) == sum(row.matmul.flops for row in products)


def test_the_switch_transformer_used_no_tensor_core(reports):
    report = reports["a100_switch_transformer_fp32.json.gz"]
    assert report.phrase == "Tensor Core kernels: 0 of 131 GEMMs"
    assert report.tensor_core_fraction == 0
    found = {finding.id: finding for finding in report.findings}
    assert {"tensor-cores-unused", "eligible-not-used"} <= set(found)
    assert found["eligible-not-used"].evidence["calls"] == 131
    assert all(row.op in ("aten::addmm", "aten::bmm", "aten::mm") for row in report.kernels if row.is_product)
    # 8192 x 100000 x 1024 in FP32, at 10.7 of the 19.5 TFLOP/s that the CUDA cores have.
    (largest,) = [loss for loss in report.eligible if loss.n == 100_000]
    assert (largest.m, largest.k, largest.calls) == (8192, 1024, 1)
    assert largest.tflops == pytest.approx(10.7, abs=0.05)
    assert {saving.way for saving in largest.savings} == {"TF32", "FP16 or BF16"}


def test_no_verdict_of_a_real_trace_depends_on_its_rate(reports):
    """All verdicts follow from names, and no rate contradicts them: wrong thresholds would flag healthy kernels."""
    assert {row.basis for report in reports.values() for row in report.kernels} == {"name"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gp100_no_tensor_cores", {"no-tensor-cores"}),
        ("edge_cpu_only", {"no-gpu-activity"}),
        ("edge_no_device_properties", {"no-gpu-activity"}),
        ("edge_launches_without_kernels", {"no-kernels"}),
        ("edge_cuda_graph_mi300x", {"not-nvidia", "low-attribution"}),
        ("a100_tf32_convnet", {"layout-conversions", "communication", "eligible-not-used"}),
    ],
)
def test_findings(name, expected, reports):
    assert expected <= {finding.id for finding in reports[f"{name}.json.gz"].findings}


def test_amd_products_are_unknown(reports):
    report = reports["edge_cuda_graph_mi300x.json.gz"]
    assert report.verdict_time_us["off"] == report.verdict_time_us["native"] == 0
    assert report.verdict_time_us["unknown"] > 0
    assert report.coverage.unattributed_fractions["CUDA graph"] > 0.9


@pytest.mark.parametrize("name", made.REAL)
def test_a_report_in_every_form(name, reports, tmp_path, monkeypatch):
    monkeypatch.setattr(plot_style, "DPI", 30)
    report = reports[name]
    for suffix in (".txt", ".md", ".html", ".json", ".png"):
        assert report.save(tmp_path / "new" / f"report{suffix}").stat().st_size > 200
    assert (tmp_path / "new" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert report._repr_html_().startswith("<style>")


def test_golden(reports, golden):
    golden("kernels_bert_100.txt", render(reports["h100_bert_small.json.gz"], ".txt", width=100))
