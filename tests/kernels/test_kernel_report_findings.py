"""Findings about kernels: each one's condition, severity and fix."""

import dataclasses
import re
from pathlib import Path

import made_kernels as made
import pytest
from made_kernels import kernel, mm, trace

from mpinspect.kernels import analysis as tensor_cores
from mpinspect.kernels.analysis import KERNEL_FINDING_IDS, analyse_kernels
from mpinspect.kernels.records import Device
from mpinspect.reporting.finding import SEVERITIES
from mpinspect.reporting.forms import document


def findings(*traces, **options):
    return {finding.id: finding for finding in analyse_kernels(traces, **options).findings}


def test_every_finding_is_listed():
    texts = [path.read_text("utf-8") for path in Path(tensor_cores.__file__).parent.glob("*.py")]
    made_ids = {name for text in texts for name in re.findall(r'[Ff]inding\(\s*"([a-z0-9-]+)"', text)}
    assert made_ids == set(KERNEL_FINDING_IDS)


def test_a_healthy_trace_has_no_findings():
    assert findings(trace(kernel(made.NATIVE, 200, mm(4096, 4096, 4096)), kernel(made.ADD_BF16, 10, mm(1, 1, 1)))) == {}


def test_findings_are_sorted_by_severity():
    runs = (kernel(made.SGEMM, 10, mm(64, 64, 64, "float")), kernel(made.LAYOUT, 5))
    found = analyse_kernels([trace(*runs, device=made.A100, idle_us=10, notes=("A note.",)), trace()]).findings
    severities = [SEVERITIES.index(finding.severity) for finding in found]
    assert severities == sorted(severities, reverse=True)
    assert len(set(severities)) == 3


def test_a_trace_of_a_cpu():
    found = findings(trace(launches=0, operators=7379))
    assert set(found) == {"no-gpu-activity"}
    assert found["no-gpu-activity"].severity == "error"
    assert "there is no GPU in this trace: 7,379 operators" in found["no-gpu-activity"].message


def test_launches_without_kernels():
    found = findings(trace(launches=270))
    assert set(found) == {"no-kernels"}
    assert "270 launches were recorded but no kernel" in found["no-kernels"].message


def test_copies_without_kernels_are_activity_of_a_gpu():
    assert set(findings(trace(launches=0, busy_us={0: 5.0}, span_us={0: 5.0}))) == {"no-kernels"}


def test_a_gpu_without_tensor_cores():
    found = findings(trace(kernel(made.NATIVE, 10, mm(64, 64, 64)), device=made.GP100))
    assert [(id, finding.message) for id, finding in found.items()] == [
        ("no-tensor-cores", "Quadro GP100: this GPU has none.")
    ]


def test_amd():
    found = findings(trace(kernel("Cijk_Alik_Bljk_BBS_BH", 10, mm(64, 64, 64)), device=made.MI300X))
    assert set(found) == {"not-nvidia"}
    assert "unknown, not off" in found["not-nvidia"].message


def test_a_gpu_that_the_trace_does_not_name():
    found = findings(trace(kernel(made.NATIVE, 10, mm(64, 64, 64)), device=made.NAMELESS))
    assert set(found) == {"unknown-gpu"}
    assert "--gpu" in found["unknown-gpu"].fix


def test_tensor_cores_unused():
    run = kernel(made.SGEMM, 100, mm(512, 512, 512, "float"))
    found = findings(trace(run, kernel(made.ADD, 100, mm(1, 1, 1)), device=made.A100))
    assert found["tensor-cores-unused"].severity == "warning"
    assert (
        "1 kernel of matrix products ran on CUDA cores, for 100 us of the 200 us of kernel time"
        in found["tensor-cores-unused"].message
    )
    assert "tensor-cores-unused" not in findings(trace(run, kernel(made.TF32, 1), device=made.A100))
    # Unknown kernels do not count as off.
    assert "tensor-cores-unused" not in findings(trace(run, kernel(made.TRITON, 1), device=made.A100))


def test_eligible_not_used_is_one_finding_a_cause():
    runs = [kernel(made.SGEMM, 100, mm(512, 512, k, "float"), module=f"layer.{k}") for k in (256, 512, 1024)]
    runs.append(kernel("ampere_scudnn_128x64_relu_small_nn_v1", 50))
    found = [f for f in analyse_kernels([trace(*runs, device=made.A100)]).findings if f.id == "eligible-not-used"]
    assert [finding.evidence["cause"] for finding in found] == ["tf32-off-cuBLAS", "tf32-off-cuDNN"]
    assert found[0].evidence["calls"] == 3
    assert found[0].evidence["modules"] == ["layer.256", "layer.512", "layer.1024"]
    assert "set_float32_matmul_precision('high')" in found[0].fix
    assert "cudnn.allow_tf32" in found[1].fix
    assert "The cost is unknown" in found[1].message


def test_a_small_share_is_information():
    run = kernel(made.SGEMM, 1, mm(64, 64, 64, "float"))
    found = findings(trace(run, kernel(made.ADD, 99, mm(1, 1, 1)), device=made.A100))
    assert found["eligible-not-used"].severity == "info"
    assert found["tensor-cores-unused"].severity == "info"


@pytest.mark.parametrize(
    ("op", "fix"),
    [
        (mm(128, 30522, 512), "Pad 30522 -> 30528: a row stride that is a multiple of 16 bytes (8 elements)"),
        (mm(128, 512, 1023), "Pad 1023 -> 1024"),
        (mm(128, 1023, 1023), "Pad 1023 -> 1024"),
        (mm(128, 512, 512), "Make every row stride and slice's start a multiple of 16 bytes (8 elements)"),
        (None, "Make every row stride"),
    ],
)
def test_used_but_degraded_names_the_size_to_pad(op, fix):
    found = findings(trace(kernel(made.DEGRADED, 40, op, module="lm_head"), kernel(made.NATIVE, 40, mm(64, 64, 64))))
    finding = found["used-but-degraded"]
    assert (finding.severity, finding.layer) == ("warning", "lm_head")
    assert finding.fix.startswith(fix)


NVJET = "nvjet_tst_128x128_64x4_1x2_h_bz_NNT"


def test_degraded_by_rate_where_the_shape_rule_knows_the_cause():
    """nvjet's names hold no alignment: the rate shows that the kernel was slow, and the strides show the cause."""
    report = analyse_kernels([trace(kernel(NVJET, 2750, mm(4096, 4096, 4095, strides=((4095, 1), (4096, 1)))))])
    (loss,), (finding,) = report.losses, report.findings
    assert (loss.cause_id, loss.uneven_rows) == ("rate-alignment", (4095,))
    assert loss.cause.startswith("by its rate, about 50 TFLOP/s")
    assert "A's rows are 8,190 bytes apart" in loss.cause
    assert [saving.way for saving in loss.savings] == ["aligned"]
    assert finding.fix.startswith("Pad 4095 -> 4096:")
    assert "A's rows are 8,190 bytes apart" in finding.message


def test_degraded_by_rate_at_healthy_shapes():
    report = analyse_kernels([trace(kernel(NVJET, 2750, mm(4096, 4096, 4096)))])
    (loss,), (finding,) = report.losses, report.findings
    assert (loss.cause_id, loss.uneven_rows) == ("rate", ())
    assert "a rate alone shows no cause" in finding.fix
    # This trace has no similar product.
    assert "like" not in finding.message
    assert "at full speed at most 2.61 ms (by the roofline)" in finding.message


def test_the_size_to_pad_is_the_row_stride():
    """A wgrad reads both operands transposed, so its odd k is not a stride."""
    op = mm(1000, 1003, 1023, strides=((1, 1000), (1003, 1)))
    assert findings(trace(kernel(made.DEGRADED, 40, op)))["used-but-degraded"].fix.startswith("Pad 1003 -> 1008:")
    unknown = dataclasses.replace(op, strides=None)
    assert findings(trace(kernel(made.DEGRADED, 40, unknown)))["used-but-degraded"].fix.startswith(
        "Pad 1003 -> 1008, 1023 -> 1024:"
    )


@pytest.mark.parametrize(("runs", "words"), [(1, "1 run was faster than"), (2, "2 runs were faster than")])
def test_a_name_that_its_rate_contradicts(runs, words):
    found = findings(trace(*[kernel(made.HGEMM, 200, mm(4096, 4096, 4096, "c10::Half")) for _ in range(runs)]))
    assert set(found) == {"rate-contradicts-name"}
    assert "by an estimate" in found["rate-contradicts-name"].message
    assert found["rate-contradicts-name"].message.startswith(words)
    assert "the kernel's name says CUDA cores" in found["rate-contradicts-name"].message


def test_matrix_vector_products_alone_are_information():
    """Decoding a single request would not be faster on Tensor Cores, so the finding is not a warning."""
    runs = [kernel("gemv2T_kernel_val<__half>", 30, mm(1, 4096, 4096, "c10::Half")) for _ in range(5)]
    (finding,) = analyse_kernels([trace(*runs)]).findings
    assert (finding.id, finding.severity) == ("tensor-cores-unused", "info")
    assert "matrix-vector products, which memory limits" in finding.message
    assert "larger batch" in finding.fix
    mixed = findings(trace(*runs, kernel(made.SGEMM, 100, mm(512, 512, 512, "float"))))["tensor-cores-unused"]
    assert mixed.severity == "warning"
    assert mixed.code == 'torch.set_float32_matmul_precision(\n    "high",\n)'


def test_a_trace_without_eligible_products_has_a_fix():
    wide = findings(trace(kernel("volta_dgemm_64x64_nn", 100, mm(512, 512, 512, "double")), device=made.V100))
    assert "none is known to be eligible (FP64)" in wide["tensor-cores-unused"].message
    assert wide["tensor-cores-unused"].fix == "Compute in FP16 wherever its range suffices."


def test_a_gpu_that_is_not_known_here():
    rubin = Device(0, "NVIDIA Rubin R100", "NVIDIA", 13, 0)
    found = findings(trace(kernel(made.NATIVE, 10, mm(64, 64, 64)), device=rubin))
    assert set(found) == {"unknown-gpu"}
    assert "The trace is of NVIDIA Rubin R100, which is unknown here" in found["unknown-gpu"].message
    assert "does not tell" not in found["unknown-gpu"].message
    assert "names alone" in found["unknown-gpu"].message


NOTES = ("The file is cut short or damaged: it ends at byte 9.", "Another note.")


def test_a_file_that_is_cut_short_before_its_kernels():
    found = analyse_kernels([trace(launches=0, notes=NOTES, cut_short=True)]).findings
    assert [(finding.id, finding.severity) for finding in found] == [
        ("trace-cut-short", "error"),
        ("trace-note", "info"),
    ]
    assert "ends at byte 9. No kernel was read" in found[0].message
    assert found[1].message == "Another note."


def test_a_file_that_is_cut_short_after_some_kernels():
    found = findings(trace(kernel(made.NATIVE, 10, OP), notes=NOTES[:1], cut_short=True))
    assert set(found) == {"trace-cut-short"}
    assert found["trace-cut-short"].severity == "warning"
    assert "1 kernel was read" in found["trace-cut-short"].message


def test_kernels_with_unknown_names():
    found = findings(trace(kernel(made.TRITON, 50, mm(64, 64, 64)), kernel(made.NATIVE, 50, mm(64, 64, 64))))
    assert set(found) == {"unknown-kernels"}
    assert found["unknown-kernels"].evidence["fraction"] == 0.5
    assert "triton_tem_fused_addmm_0" in found["unknown-kernels"].message


def test_layout_conversions():
    def found(time):
        return findings(trace(kernel(made.LAYOUT, time, mm(1, 1, 1)), kernel(made.NATIVE, 100 - time, mm(64, 64, 64))))

    assert "channels_last" in found(10)["layout-conversions"].fix
    assert found(10)["layout-conversions"].severity == "warning"
    assert found(2)["layout-conversions"].severity == "info"
    assert found(0.5) == {}


def test_communication():
    found = findings(trace(kernel(made.NCCL, 20, mm(1, 1, 1)), kernel(made.NATIVE, 80, mm(64, 64, 64))))
    assert set(found) == {"communication"}
    assert "20% of all kernel time" in found["communication"].message
    assert findings(trace(kernel(made.NCCL, 5, mm(1, 1, 1)), kernel(made.NATIVE, 95, mm(64, 64, 64)))) == {}


@pytest.mark.parametrize(
    ("name", "compressed"),
    [(made.NCCL, False), (made.NCCL.replace("bf16", "f16"), False), (made.NCCL.replace("bf16", "f32"), True)],
)
def test_compression_is_not_suggested_for_gradients_sent_in_16_bits(name, compressed):
    found = findings(trace(kernel(name, 20), kernel(made.NATIVE, 80, mm(64, 64, 64))))["communication"]
    assert ("bf16_compress_hook" in found.fix) == compressed


def test_findings_are_in_the_order_of_the_time_that_they_cost():
    runs = [kernel(made.DEGRADED, 40, mm(128, 30522, 512)), kernel(made.LAYOUT, 10)]
    found = analyse_kernels([trace(*runs, idle_us=5)]).findings
    assert [finding.id for finding in found] == ["used-but-degraded", "layout-conversions"]
    found = analyse_kernels([trace(*runs, idle_us=450)]).findings
    assert next((each.id, each.severity) for each in found) == ("gpu-idle", "warning")


def test_the_same_product_of_several_ranks_is_one():
    ranks = [trace(kernel(made.DEGRADED, 40, mm(128, 30522, 512)), rank=rank, world_size=8) for rank in range(8)]
    report = analyse_kernels(ranks)
    (loss,) = report.losses
    assert (loss.calls, loss.time_us) == (8, 320)
    (finding,) = (f for f in report.findings if f.id == "used-but-degraded")
    assert (finding.evidence["products"], finding.evidence["calls"]) == (1, 8)


@pytest.mark.parametrize(
    ("layout", "padded"),
    [
        ("tn", ["1003 -> 1008", "1023 -> 1024"]),
        ("nn", ["1003 -> 1008", "1023 -> 1024"]),
        ("nt", ["1003 -> 1008", "1001 -> 1008"]),
    ],
)
def test_without_strides_the_layout_in_the_name_gives_the_sizes_to_pad(layout, padded):
    op = dataclasses.replace(mm(1001, 1003, 1023), strides=None)
    fix = findings(trace(kernel(made.DEGRADED.replace("_tn_", f"_{layout}_"), 40, op)))["used-but-degraded"].fix
    assert fix.startswith(f"Pad {', '.join(padded)}:")


def test_a_fix_asks_for_no_recording_that_is_there():
    """If the trace has shapes, recording them again is not recommended."""
    known = findings(trace(kernel(made.TRITON, 10, mm(64, 64, 64)), device=made.NAMELESS))["unknown-kernels"]
    assert "record_shapes" not in known.fix
    blind = dataclasses.replace(mm(64, 64, 64), shapes=None, strides=None)
    assert "record_shapes=True" in findings(trace(kernel(made.TRITON, 10, blind)))["unknown-kernels"].fix
    assert "ProfilerActivity.CPU" in findings(trace(kernel(made.TRITON, 10)))["unknown-kernels"].fix
    assert "ProfilerActivity" not in findings(trace(launches=270))["no-kernels"].fix


def test_a_bound_above_any_gpus_ratio_is_not_reported():
    """The whole time of a product with unknown FLOPs counts as saved: 99.9% would give a speedup of 1000."""
    runs = [kernel(made.HGEMM, 999), kernel(made.NATIVE, 1, mm(64, 64, 64))]
    assert analyse_kernels([trace(*runs)]).limits.speedup_at_most is None
    assert analyse_kernels(
        [trace(kernel(made.HGEMM, 50), kernel(made.NATIVE, 50, mm(64, 64, 64)))]
    ).limits.speedup_at_most


def test_idle():
    run = kernel(made.NATIVE, 80, mm(64, 64, 64))
    assert findings(trace(run, idle_us=5)) == {}
    long = findings(trace(run, idle_us=20))["gpu-idle"]
    assert "idle 20% of the time" in long.message
    # The preferred change is the first: for long kernels the waits, for short ones the launches.
    assert long.fix.startswith("First look for .item()")
    short = findings(trace(*(kernel(made.NATIVE, 4, mm(64, 64, 64)) for _ in range(20)), idle_us=20))["gpu-idle"]
    assert short.fix.startswith("First torch.compile(model, mode='reduce-overhead')")
    assert "only 4.00 us on average" in short.fix


def test_bars_are_shares_of_the_time_from_the_first_kernel_to_the_last_and_a_finding_has_its_own():
    measured = trace(kernel(made.NATIVE, 80, mm(64, 64, 64)), idle_us=40)
    estimated = trace(kernel(made.HGEMM, 80, mm(512, 512, 512)), idle_us=40)
    for given, place in ((measured, "33% of 120 us"), (estimated, "saves ~")):
        front = document(analyse_kernels([given])).front
        (tab,) = front.tabs
        (time,), (kernels,) = (section.blocks[0].tables for section in tab.document.blocks)
        assert [table.columns[0].heading for table in (time, kernels)] == ["of 120 us"] * 2
        idle, product, *_ = time.rows
        assert (idle[0].text, idle[0].bar, idle[2].text) == ("33%", pytest.approx(1 / 3), "idle")
        assert (product[0].text, product[0].bar) == ("67%", pytest.approx(2 / 3))
        assert place in {each.place[: len(place)] for each in front.findings}


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("before the window", "Start the window with torch.cuda.synchronize()"),
        ("CUDA graph", "Profile once without CUDA graphs"),
        ("no launch", "Other launches are in the trace."),
        ("no op", "Code outside operators launched these kernels"),
    ],
)
def test_few_attributed_kernels_are_reported(reason, fix):
    found = findings(trace(kernel(made.NATIVE, 60, unattributed=reason), kernel(made.NATIVE, 40, mm(64, 64, 64))))
    assert set(found) == {"low-attribution"}
    assert f"60% {reason}" in found["low-attribution"].message
    assert found["low-attribution"].fix.startswith(fix)
    blind = trace(kernel(made.NATIVE, 60, unattributed=reason), operators=0, launches=0)
    asks_for_cpu = "ProfilerActivity.CPU" in findings(blind)["low-attribution"].fix
    assert asks_for_cpu == (reason in ("no launch", "no op"))
    mostly = trace(kernel(made.NATIVE, 40, unattributed=reason), kernel(made.NATIVE, 60, mm(64, 64, 64)))
    assert findings(mostly) == {}


OP = mm(64, 64, 64)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (trace(kernel(made.NATIVE, 10, OP), rank=1, world_size=4), "their world sizes are 2, 4"),
        (trace(kernel(made.NATIVE, 10, OP), rank=0, world_size=2), "a rank occurs twice"),
        (trace(kernel(made.NATIVE, 10, OP), rank=1, world_size=2, job="b"), "they name different jobs"),
        (trace(kernel(made.NATIVE, 10, OP), rank=1, world_size=2, device=made.A100), "they ran on NVIDIA A100"),
        (trace(kernel(made.V884, 10, OP), rank=1, world_size=2, device=made.H100), "they share few kernels"),
    ],
)
def test_traces_of_different_jobs(other, why):
    found = findings(trace(kernel(made.NATIVE, 10, OP), rank=0, world_size=2, job="a"), other)
    assert found["different-jobs"].severity == "warning"
    assert why in found["different-jobs"].message
    assert "ranks-differ" not in found


def test_ranks_of_one_job():
    ranks = [trace(kernel(made.NATIVE, 10, OP), rank=rank, world_size=2, job="a") for rank in (0, 1)]
    assert findings(*ranks) == {}


def test_notes_of_the_reader_become_a_finding():
    ranks = [trace(kernel(made.NATIVE, 10, OP), rank=rank, notes=("It is cut.",)) for rank in (0, 1)]
    (finding,) = analyse_kernels(ranks).findings
    assert (finding.id, finding.severity) == ("trace-note", "info")
    assert finding.message == "'rank 0', 'rank 1': It is cut."
