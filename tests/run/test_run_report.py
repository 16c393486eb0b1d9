"""The report of a run: its first line, its table of modules, and every format."""

import dataclasses
import json
import re
from dataclasses import replace

import made_kernels
import pytest
import sessions
import shape_records
import torch
from analysis_sessions import session_of, spread, window_of
from trainings import inspected

from mpinspect.kernels.analysis import analyse_kernels
from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.analysis.first_line import first_line, gravest
from mpinspect.ranges.kinds import ACTIVATION_GRADIENT, WEIGHT_GRADIENT
from mpinspect.ranges.report.explorer import ModuleNotes
from mpinspect.ranges.session import ENDED_BY, IN_FORWARD, Event, Measurement, Progress, ScaleChange, Session
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.reporting import text as text_renderer
from mpinspect.reporting.forms import render
from mpinspect.run.report import ModelPart, RunReport, by_module
from mpinspect.run.report.document import in_brief
from mpinspect.run.report.module_notes import module_notes
from mpinspect.runtime import gpus
from mpinspect.shapes.analysis import analyse_shapes

INF = Event(
    412, 0, "backward", "decoder.3.attn", "activation_gradient", "decoder.3.attn", "inf", 65536.0, forward_finite=True
)
PROBING = dataclasses.replace(INF, step=3, skipped=True)
MASK = dataclasses.replace(INF, step=4, phase="forward", value="nan", forward_finite=False, gradients_finite=True)


def ranges(name: str = "word_model"):
    return analyse(sessions.all_sessions()[name])


def broken(*events: Event):
    return analyse(dataclasses.replace(sessions.word_model(), events=events))


def shapes():
    products = (*shape_records.linear(64, 1023, 4096, name="hidden"), *shape_records.linear(64, 4096, 512, name="head"))
    return analyse_shapes(shape_records.recording(*products), gpus.named("hopper"), model="Net")


# -- the first line ---------------------------------------------------------------------------------------------------


def test_the_first_line_names_step_phase_module_value_scale_and_forward():
    assert first_line(INF) == "step 412, backward, 'decoder.3.attn', first inf, scale 65536, forward finite"


def test_the_first_line_omits_unknown_and_adds_relevant_facts():
    event = Event(7, 2, "forward", "", "activation", "", "nan")
    assert first_line(event) == "step 7, micro-batch 2, forward, the model itself, first NaN"
    assert first_line(dataclasses.replace(INF, forward_finite=False, skipped=True, loss_scale=2.0**-20)) == (
        "step 412, backward, 'decoder.3.attn', first inf, scale 2^-20, forward not finite, step skipped"
    )


def _ended_by(error: Measurement, session: Session | None = None):
    session = session or sessions.word_model()
    return analyse(dataclasses.replace(session, measurements=(*session.measurements, error)))


def test_the_exception_that_ended_the_script_is_reported_first_and_once():
    error = Measurement(ENDED_BY, "head", 3, {"begun": 1.0}, (IN_FORWARD,), "ValueError: bad")
    ended = "Ended by an exception in step 3, in the forward of 'head': ValueError: bad"
    parts = [ModelPart(name, _ended_by(error)) for name in ("Net", "Other")]
    for of in ((), parts[:1], parts):
        report = RunReport("train.py", "ValueError: bad", tuple(of), by_error=True)
        lines = str(report).splitlines()
        expected = ended if of else "Ended by an exception: ValueError: bad"
        assert [line for line in lines if line.startswith("Ended by")] == [expected]
        assert lines[1] == expected
        assert "Healthy" not in str(report)
    # A model whose inspection ended earlier does not report it; with several ranks, a finding does.
    over = RunReport("train.py", "ValueError: bad", (ModelPart("Net", ranges()),), by_error=True)
    assert over.ended == "Ended by an exception: ValueError: bad"
    of_ranks = dataclasses.replace(error, what="rank-ended-early", rank=1, figures={"order": 0.0})
    assert not RunReport("x", "ValueError: bad", (ModelPart("Net", _ended_by(of_ranks)),), by_error=True).ended
    assert not RunReport("x", "exit status 3").ended


def _healthy_session(steps: int) -> Session:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    return inspected(model, lambda _: model(torch.randn(4, 8)).square().mean(), steps).session()


@pytest.mark.parametrize(
    ("steps", "end", "opening"),
    [
        (6, {"outcome": "ended"}, "Healthy"),
        (6, {"outcome": "stopped by Ctrl-C"}, "Healthy"),
        (2, {"outcome": "stopped by Ctrl-C"}, "No numerical problem was found in 2 steps"),
        (6, {"outcome": "exit status 7"}, "No numerical problem was found in 6 steps"),
        (6, {"outcome": "ValueError: boom", "by_error": True}, "No numerical problem was found in 6 steps"),
    ],
)
def test_a_script_that_failed_after_its_record_had_ended_is_not_called_healthy(steps, end, opening):
    report = RunReport("train.py", parts=(ModelPart("Linear", analyse(_healthy_session(steps))),), **end)
    assert report.parts[0].ranges.verdict.opening == opening
    assert ("Healthy" in str(report)) is (opening == "Healthy")


def test_a_page_on_healthy_models_begins_with_one_headline_for_all():
    parts = tuple(ModelPart(name, analyse(_healthy_session(6))) for name in ("Actor", "Critic"))
    page = render(RunReport("train.py", "ended", parts), ".html")
    panel = page[page.index('class="panel"') : page.index("</section>")]
    assert re.findall(r'<p class="good">(.*?)</p>', panel) == ["Actor, Critic: Healthy: the precision needs no change."]
    assert "<p>Actor, Critic: To train in 16 bits, " in panel


def test_harmful_events_precede_a_scalers_probing_and_harmless_masks():
    assert gravest([PROBING, MASK, INF]) is INF
    assert gravest([PROBING, MASK]) is None
    assert gravest([]) is None
    # A skipped step whose forward already failed is not probing, since no scale repairs it.
    hopeless = dataclasses.replace(PROBING, step=5, forward_finite=False)
    assert gravest([PROBING, hopeless, INF]) is hopeless


def test_the_model_that_broke_first_is_named():
    later, earlier = broken(INF), broken(dataclasses.replace(INF, step=9))
    report = RunReport("gan.py", "ended", (ModelPart("Generator", later), ModelPart("Critic", earlier)))
    assert report.first_line.startswith("Critic: step 9, backward, 'decoder.3.attn', first inf")
    assert RunReport("gan.py", "ended", (ModelPart("Generator", ranges()),)).first_line == ""
    lines = [line.strip() for line in render(report, ".txt", width=140).splitlines()]
    assert lines[0] == report.first_line
    assert lines.index(f"broke  {report.first_line}") > lines.index("In brief")


# -- in brief -----------------------------------------------------------------------------------------------------------


def brief(*products, **fields):
    """Return the lines on shapes and on findings of a run with these products."""
    judged = analyse_shapes(shape_records.recording(*products, **fields), gpus.named("ampere"))
    report = RunReport("a.py", "ended", shapes=judged, is_shape_detail=True)
    lines = (line.strip().split("  ", 1) for line in render(report, ".txt", width=400).splitlines())
    found = dict(line for line in lines if len(line) == 2)
    return found["shapes"].removesuffix(" (--lint, report.md)"), found.get("findings", "")


def test_fp32_products_are_reported_with_the_effect_of_16_bits():
    even, odd = (shape_records.linear(64, size, 512, "float32") for size in (1024, 1023))
    gpu = "of one step's FLOPs suit the Tensor Cores of A100"
    assert brief(*even)[0].startswith(f"0% {gpu}; all run in FP32; with those in 16 bits all would suit")
    assert brief(*odd)[0].startswith(f"0% {gpu}; all run in FP32")
    assert brief(*even, *shape_records.linear(64, 1024, 512))[0].startswith(
        f"50% {gpu}; 50% run in FP32; with those in 16 bits all would suit"
    )
    assert "16 bits" not in brief(*odd)[0]
    # Products with a vector count as FP32 too, although their shape already excludes Tensor Cores.
    assert "; all run in FP32" in brief(*shape_records.linear(1, 1024, 512, "float32"))[0]
    assert brief(*shape_records.linear(64, 1024, 512)) == (f"100% {gpu}", "")


def test_cudnns_default_tf32_is_named():
    products = (shape_records.convolution(dtype="float32"), *shape_records.linear(64, 1024, 512))
    words, _ = brief(products[0])
    assert words == "100% of one step's FLOPs suit the Tensor Cores of A100 (in TF32, cuDNN's default)"
    assert "in TF32, cuDNN's default); " not in brief(*products)[0]
    assert "% in TF32, cuDNN's default)" in brief(*products)[0]


def test_unsuitable_shapes_and_fp32_products_are_both_reported():
    products = (*shape_records.linear(64, 1023, 512), *shape_records.linear(64, 1023, 512, "float32"))
    words = brief(*products)[0]
    assert words.startswith(
        "0% of one step's FLOPs suit the Tensor Cores of A100; 50% use them with narrower loads or padded copies; "
        "50% run in FP32"
    )


def test_the_worst_finding_on_shapes_is_named_where_the_shapes_are_not_shown():
    products = shape_records.linear(4096, 4096, 4096, "float32", name="attention")
    words, findings = brief(*products, autocast_dtype="bfloat16")
    assert words.endswith("; see float32-beside-autocast in 'attention'")
    assert findings == "1 warning on the speed of shapes (report.md)"


# -- the output at the end of a run -------------------------------------------------------------------------------------


def printed(report: RunReport) -> list[str]:
    """Return the lines that ``Ending`` prints before the path of the page, at the default width."""
    return text_renderer.render(in_brief(report), 100).splitlines()


SAW = ("1 optimizer was made; 1 model was inspected",)


@pytest.mark.parametrize("name", sessions.all_sessions())
def test_the_verdict_is_short(name):
    report = RunReport("train.py", "ended", (ModelPart("Net", ranges(name)),), saw=SAW)
    lines = printed(report)
    verdict = report.parts[0].ranges.verdict
    # The path of the page adds one line, and an error another.
    assert len(lines) < (20 if verdict.healthy is False or report.first_line else 10), "\n".join(lines)
    whole = " ".join(" ".join(lines).split())
    for words in (report.first_line, *verdict.sentences, verdict.change, *verdict.code.splitlines()):
        assert " ".join(words.split()) in whole
    assert "1 model was inspected" not in whole
    assert not {"Findings", "In brief", "Coverage"} & set(lines)


def test_the_change_for_the_worst_model_is_shown():
    worst = broken(INF)
    report = RunReport("gan.py", "ended", (ModelPart("Critic", ranges()), ModelPart("Generator", worst)), saw=SAW)
    lines = printed(report)
    assert lines[0] == report.first_line
    whole = " ".join(" ".join(lines).split())
    assert f"Change in Generator: {worst.verdict.change}" in whole
    assert f"Critic: {report.parts[0].ranges.verdict.sentences[0]}" in whole
    assert len(lines) < 20


def test_unseen_parts_and_the_scripts_outcome_are_shown():
    saw = ("the pattern 'a' matches no module", *SAW, *(f"note {number}" for number in range(5)))
    lines = printed(RunReport("a.py", "exit status 3", (ModelPart("Net", ranges("empty")),), saw=saw))
    assert lines[0] == "mpinspect run a.py: exit status 3"
    assert lines[-4:] == ["- the pattern 'a' matches no module", "- note 0", "- note 1", "... and 3 more in the report"]
    nothing = printed(RunReport("a.py", "ended", saw=saw))
    assert nothing == ["mpinspect run a.py", *(f"- {sentence}" for sentence in saw)]


@pytest.mark.parametrize(
    ("notes", "is_detail", "is_told"),
    [((f"{gpus.ASSUMED}: judged",), True, False), ((f"{gpus.ASSUMED}: judged",), False, True), ((), True, True)],
    ids=["neither asked nor a GPU", "--lint", "--gpu or a GPU"],
)
def test_shapes_are_shown_on_request(notes, is_detail, is_told):
    judged = dataclasses.replace(shapes(), notes=notes)
    report = RunReport("a.py", "ended", (ModelPart("Net", ranges()),), judged, is_shape_detail=is_detail)
    for lines in (printed(report), render(report, ".txt", width=100).splitlines()):
        assert any("Tensor Cores of" in line for line in lines) == is_told
    # The page and the files always include them.
    assert json.loads(report.to_json())["shapes"] is not None
    assert "shapes of one step" in render(report, ".md")


# -- module by module ---------------------------------------------------------------------------------------------------


def test_without_shapes_and_kernels_the_table_of_modules_is_empty():
    assert by_module(RunReport("a.py", "ended", (ModelPart("Net", ranges()),))) == ()


def test_a_row_joins_the_gradients_range_the_shapes_and_the_kernels():
    session = sessions.session({TensorKey("hidden.weight", WEIGHT_GRADIENT): sessions.bell(-26)})
    report = RunReport("a.py", "ended", (ModelPart("Net", analyse(session)),), shapes())
    rows = {row.module: row for row in by_module(report)}
    products = report.shapes.matmuls
    assert rows["hidden"].flops_fraction == pytest.approx(sum(row.share for row in products if row.module == "hidden"))
    assert sum(row.flops_fraction for row in rows.values()) == pytest.approx(1.0)
    assert (rows["hidden"].shape_verdict, rows["head"].shape_verdict) == ("degraded", "native")
    (layer,) = report.parts[0].ranges.layers
    assert rows["hidden"].log2_scale_needed == layer.log2_scale_needed > 0
    assert rows["hidden"].lost_l1_share == layer.lost_l1_share
    assert (rows["head"].log2_scale_needed, rows["head"].lost_l1_share) == (None, None)
    assert rows["hidden"].kernel_time_us is None


@pytest.mark.parametrize("case", ["scale not known", "no finite value", "all may have been flushed"])
def test_a_module_is_unknown_if_one_of_its_gradients_is_unknown(case):
    layers = {
        TensorKey("hidden.weight", WEIGHT_GRADIENT): spread({-3: 1000}),
        TensorKey("hidden", ACTIVATION_GRADIENT): spread({-3: 1000}),
    }
    progress = Progress(8, 8, 0, 8, True)
    if case == "scale not known":
        progress = dataclasses.replace(progress, scale_known=False, scales=(ScaleChange(0, None),))
    if case == "no finite value":
        layers[TensorKey("hidden", ACTIVATION_GRADIENT)] = spread({}, infs=1000)
    if case == "all may have been flushed":
        hidden = window_of(spread({-20: 10}, zeros=990), passed_through="float16", floor_exponent=-25)
        layers[TensorKey("hidden", ACTIVATION_GRADIENT)] = hidden
    part = ModelPart("Net", analyse(session_of(layers, progress=progress)))
    row = next(row for row in by_module(RunReport("a.py", "ended", (part,), shapes())) if row.module == "hidden")
    assert row.log2_scale_needed is None
    if case == "all may have been flushed":
        assert row.lost_l1_share.high > 0.01
    else:
        assert row.lost_l1_share is None


def test_a_module_that_overflows_at_scale_1_is_not_served_above_the_window():
    # The values that overflowed at 2^-1 are not counted; the finite values alone would allow that scale.
    values = {TensorKey("hidden.weight", WEIGHT_GRADIENT): spread({16: 1000})}
    overflow = dataclasses.replace(
        INF, module="hidden", what=WEIGHT_GRADIENT, tensor="hidden.weight", loss_scale=0.5, skipped=True
    )
    session = dataclasses.replace(sessions.session(values), events=(overflow,))
    part = ModelPart("Net", analyse(session))
    assert part.ranges.loss_scale.highest == 0.25
    row = next(row for row in by_module(RunReport("a.py", "ended", (part,), shapes())) if row.module == "hidden")
    assert row.log2_scale_needed == -2


def test_kernel_times_of_modules_known_by_path():
    on = made_kernels.kernel("ampere_h16816gemm_256x128_ldg8_stages_64x3_tn", 30.0)
    off = made_kernels.kernel("sgemm_128x128x8_NN", 10.0)
    kernels = analyse_kernels([made_kernels.trace(on, off)], None, None)
    path = dataclasses.replace(
        kernels.by_module[0], module="hidden", is_path=True, time_us=40.0, verdict_time_us={"native": 30.0, "off": 10.0}
    )
    report = RunReport("a.py", "ended", kernels=dataclasses.replace(kernels, by_module=(path,)))
    (row,) = by_module(report)
    assert (row.module, row.kernel_time_us, row.tensor_core_fraction) == ("hidden", 40.0, 0.75)


def test_the_map_shows_shapes_and_kernels_of_each_module():
    session = sessions.session({TensorKey("hidden.weight", WEIGHT_GRADIENT): sessions.bell(-26)})
    on = made_kernels.kernel("ampere_h16816gemm_256x128_ldg8_stages_64x3_tn", 30.0)
    off = made_kernels.kernel("sgemm_128x128x8_NN", 10.0)
    owned = [dataclasses.replace(kernel, module="hidden", module_is_path=True) for kernel in (on, off)]
    kernels = analyse_kernels([made_kernels.trace(*owned, made_kernels.kernel("sgemm_128x128x8_NN", 40.0))], None, None)
    report = RunReport("a.py", "ended", (ModelPart("Net", analyse(session)),), shapes(), kernels)
    notes = module_notes(report)["Net"]
    assert [heading for heading, _ in notes.columns] == ["shapes", "kernels", "on Tensor Cores"]
    # The map has no layer "head".
    assert [[cell.text for cell in cells] for cells in notes.cells.values()] == [["degraded", "50%", "75%"]]
    *products, finding, kernel = notes.lines["hidden"]
    assert [line.split(",")[1].strip() for line in products] == ["forward", "dgrad", "wgrad"]
    (odd,) = (each for each in report.shapes.findings if each.id == "odd-size")
    assert finding == f"Shapes, warning, odd-size: {odd.message}. Fix: {odd.fix}"
    assert kernel.startswith("Kernels, 40.0 us: ampere_h16816gemm")
    # With two models, paths begin with the model's name; without kernels, their columns are absent.
    part = report.parts[0]
    several = RunReport("a.py", "ended", (ModelPart("hidden", part.ranges), ModelPart("Net", part.ranges)), shapes())
    assert not module_notes(several)["Net"].cells
    assert [heading for heading, _ in module_notes(several)["hidden"].columns] == ["shapes"]
    assert module_notes(RunReport("a.py", "ended", (part,))) == {"Net": ModuleNotes()}


def test_equal_precisions_of_several_models_are_shown_once():
    critic, generator = (
        replace(ranges(), verdict=replace(ranges().verdict, precision=f"Computes in {dtype}."))
        for dtype in ("BF16", "FP16")
    )
    same = printed(RunReport("gan.py", "ended", (ModelPart("Critic", critic), ModelPart("Generator", critic))))
    assert same[1] == "Computes in BF16."
    lines = printed(RunReport("gan.py", "ended", (ModelPart("Critic", critic), ModelPart("Generator", generator))))
    assert "Critic: Computes in BF16." in lines
    assert "Generator: Computes in FP16." in lines


# -- every form -----------------------------------------------------------------------------------------------------------


def whole():
    kernels = analyse_kernels([made_kernels.trace(made_kernels.kernel("sgemm_128x128x8_NN"))], None, None)
    parts = (ModelPart("Net", ranges("everything")),)
    return RunReport("a.py -x", "ended", parts, shapes(), kernels, ("one",), "runs/a")


def test_json_holds_names_as_they_are():
    parts = tuple(ModelPart(name, analyse(Session())) for name in sessions.HOSTILE_NAMES)
    document = json.loads(RunReport("a.py", "ended", parts, saw=sessions.HOSTILE_NAMES).to_json())
    assert [model["name"] for model in document["models"]] == document["saw"] == list(sessions.HOSTILE_NAMES)


def test_the_parts_in_json_equal_their_separate_reports():
    report = whole()
    document = json.loads(report.to_json())
    assert document["models"][0]["ranges"] == json.loads(report.parts[0].ranges.to_json())
    assert document["shapes"] == json.loads(report.shapes.to_json())
    assert document["kernels"] == json.loads(report.kernels.to_json())


def test_nested_markdown_has_one_title():
    lines = re.sub(r"```.*?```", "", render(whole(), ".md"), flags=re.DOTALL).splitlines()
    assert [line for line in lines if line.startswith("# ")] == ["# mpinspect run a.py -x"]
    assert sum(line.startswith("## ") for line in lines) >= 5


def test_a_page_names_the_failure_once_below_its_top():
    report = RunReport("a.py", "ended", (ModelPart("Net", broken(INF)),))
    (sentence, *_) = report.parts[0].ranges.verdict.sentences
    error = sentence.partition(": ")[2]
    assert render(report, ".txt", width=400).count(error) == 3
    # Without tags, and without the explanations of terms, which are read on hover.
    shown = re.sub(r'<span class="meaning">.*?</span>|<[^>]*>', "", render(report, ".html"))
    # The headline of the HTML page has the module.
    when = report.first_line.replace(" 'decoder.3.attn',", "")
    assert "Backward not finite: in 'decoder.3.attn'\n" in shown
    for page, line in ((shown, when), (render(report, ".md"), report.first_line)):
        assert page.count("a loss scale of 65536") == 1, page
        assert page.count(line) == 1
        assert "Said above" not in page


def test_findings_of_all_parts_are_in_order_of_severity():
    report = whole()
    parts = [*report.parts[0].ranges.findings, *report.shapes.findings, *report.kernels.findings]
    assert sorted(finding.id for finding in report.findings) == sorted(finding.id for finding in parts)
    ranks = [("info", "warning", "error").index(finding.severity) for finding in report.findings]
    assert ranks == sorted(ranks, reverse=True)


def test_the_summary_is_last():
    text = render(whole(), ".txt", width=140)
    last = text[text.index("In brief") :]
    assert "a.py -x: ended" in last
    assert "Suggested loss scale" in last
    assert "files  runs/a" in last


def test_the_worst_models_are_shown_in_full_and_the_rest_in_a_line():
    parts = [ModelPart(f"Fold-{number}", ranges()) for number in range(8)]
    parts[6] = ModelPart("Fold-6", broken(dataclasses.replace(INF, skipped=False)))
    report = RunReport("folds.py", "ended", tuple(parts))
    text = render(report, ".txt", width=140)
    shown = [line.split()[1] for line in text.splitlines() if line.startswith("ranges: ")]
    assert len(shown) == 4
    assert "Fold-6" in shown
    assert "4 more models: below in brief; in full in report.md" in text
    assert all(f"Fold-{number}  " in text[text.index("In brief") :] for number in range(8))
    assert sum(line.startswith("### WordModel against") for line in render(report, ".md").splitlines()) == 8


def test_large_scales_are_written_as_powers_of_two():
    assert "scale 2^127" in first_line(dataclasses.replace(INF, loss_scale=2.0**127))
    assert "scale 1000," in first_line(dataclasses.replace(INF, loss_scale=1000.0))
    lost = dataclasses.replace(INF, module="", what="scaled_loss")
    assert first_line(lost).startswith("step 412, backward, the loss, first inf")


def test_probing_gives_no_first_line_but_a_scale_that_never_fits_does():
    probing = [dataclasses.replace(PROBING, step=step, loss_scale=2.0 ** (20 - step)) for step in range(3)]
    assert RunReport("a.py", "ended", (ModelPart("Net", broken(*probing)),)).first_line == ""
    stuck = tuple(dataclasses.replace(PROBING, step=step) for step in range(40))
    progress = dataclasses.replace(sessions.word_model().progress, steps=40, skipped_steps=40)
    report = analyse(dataclasses.replace(sessions.word_model(), events=stuck, progress=progress))
    line = RunReport("a.py", "ended", (ModelPart("Net", report),)).first_line
    assert line == "step 0, backward, 'decoder.3.attn', first inf, scale 65536, forward finite, step skipped"


def test_repeated_modules_share_a_row():
    from dataclasses import replace

    from mpinspect.numeric.exponents import Interval
    from mpinspect.run.report.by_module import ModuleRow, folded

    share = [Interval(value, value, value) for value in (0.1, 0.3)]
    rows = (
        ModuleRow("h.0.fc", "Linear", 0.25, "native", share[0], 3, 10.0, 0.1, 1.0),
        ModuleRow("head", "Linear", 0.2, "native", share[0], 1, 5.0, 0.05, 1.0),
        ModuleRow("h.1.fc", "Linear", 0.25, "native", share[1], 5, 30.0, 0.3, 0.5),
        ModuleRow("h.2.fc", "Linear", 0.1, "off", None, None, 1.0, 0.01, 0.0),
    )
    one, head, off = folded(rows)
    assert (one.module, one.flops_fraction, one.lost_l1_share, one.log2_scale_needed) == (
        "h.{0..1}.fc",
        0.5,
        share[1],
        5,
    )
    assert (one.kernel_time_us, one.kernel_time_fraction, one.tensor_core_fraction) == (40.0, 0.4, 0.625)
    assert (head, off) == (rows[1], rows[3])
    # A figure that one row lacks is unknown for the group.
    assert folded((rows[0], replace(rows[2], lost_l1_share=None, log2_scale_needed=None)))[0].lost_l1_share is None
