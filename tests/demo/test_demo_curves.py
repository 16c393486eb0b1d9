"""The demo's curves: the results of each run, the table, the chart, the document, and the results after Ctrl-C."""

import dataclasses
import json
import math

import pytest
import torch

from mpinspect.demo import curves as demo_curves
from mpinspect.demo import demo, loss_curves, plot_curves
from mpinspect.demo import runs as demo_runs
from mpinspect.demo.loss_curves import Curve
from mpinspect.demo.runs import FP32, Setting, Text, Way
from mpinspect.ranges.session import Session
from mpinspect.run.diff import diff
from mpinspect.runtime import appending
from mpinspect.training.mixed_precision import MixedPrecision

TINY = Setting(steps=5, batch_tokens=64, tokens=20_000, vocabulary=64, validate_every=2)
NAMES = ["FP32", "FP16, no scaling", "FP16, recommended scale", "FP16, dynamic scaling"]


@pytest.fixture(scope="module")
def text():
    return Text.read(TINY)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Run two seeds of the tiny setting; return the comparison, the output and the directory."""
    import contextlib
    import io

    directory = tmp_path_factory.mktemp("runs") / "demo"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        comparison = demo_curves.run(log_dir=directory, setting=TINY, seeds=(3, 4))
    return comparison, printed.getvalue(), directory


@pytest.fixture
def only_curves(monkeypatch):
    """Disable the report's pictures, which take longer than the tiny runs."""
    monkeypatch.setattr(demo_curves, "draw", lambda report, directory: [])


def curve(name, seed=0, final=4.0, *, scales=(None, None), skipped=0, best=None):
    """Return twenty steps whose training losses fall from 4 by 0.1 per step."""
    validation = ((10, final + 1 if best is None else best), (20, final))
    return Curve(name, seed, *scales, skipped, tuple(4 - 0.1 * step for step in range(20)), validation, name != "FP32")


# -- the purpose of scaling -------------------------------------------------------------------------------------------


def test_diff_names_the_output_layer_and_the_first_step_of_fp16_without_scaling(tmp_path):
    """Uses the demo's vocabulary, and fewer words per step."""
    setting = Setting(steps=2, batch_tokens=2048, tokens=20_000, validate_every=2)
    text = Text.read(setting)
    demo_runs.inspected(setting, text, 0, tmp_path / "fp32", lambda loss: None)
    for name, scale in (("unscaled", 1.0), ("scaled", 2.0**13)):
        way = Way(name, "fp16-amp", scale)
        demo_runs.trained(way, setting, text, 0, lambda loss: None, tmp_path / name)
    (model,) = diff(tmp_path / "fp32", tmp_path / "unscaled").models
    assert model.ranges.moved.name == model.ranges.differs.name == "output"
    assert model.ranges.moved.kind == "activation_gradient"
    assert model.ranges.moved.first_step == 0
    assert {"computes in", "scaler"} <= {change.name for change in model.ranges.settings}
    # With a loss scale, the tensors differ only by rounding.
    (model,) = diff(tmp_path / "fp32", tmp_path / "scaled").models
    assert model.ranges.differs.first_step == 0
    assert model.ranges.moved is None


# -- a run --------------------------------------------------------------------------------------------------------------


def test_every_way_is_trained_with_every_seed(compared):
    comparison, _, _ = compared
    assert [(run.seed, run.name) for run in comparison.curves] == [(seed, name) for seed in (3, 4) for name in NAMES]
    for run in comparison.curves:
        assert run.steps == 5
        # Every second step, and the last.
        assert [step for step, _ in run.validation_losses] == [2, 4, 5]
        assert run.emulated == (run.name != "FP32")


def test_the_unscaled_run_of_the_first_seed_is_recorded(compared):
    _, printed, directory = compared
    session = Session.load(directory / "fp16-no-scaling")
    assert session.progress.steps == 5
    assert session.precision.autocast == ("float16",)
    assert f"diff {directory} {directory / 'fp16-no-scaling'}" in printed


def test_each_run_has_its_own_loss_scale(compared):
    comparison, _, _ = compared
    recommended = comparison.report.loss_scale.recommended
    scales = {run.name: (run.loss_scale_start, run.loss_scale_end) for run in comparison.curves}
    assert scales["FP32"] == (None, None)
    assert scales["FP16, no scaling"] == (1.0, 1.0)
    assert scales["FP16, recommended scale"] == (recommended, recommended)
    # 2^32 is too large for every one of these five steps.
    assert scales["FP16, dynamic scaling"] == (2.0**32, 2.0**27)
    assert [run.skipped_steps for run in comparison.curves] == [0, 0, 0, 5] * 2


def test_a_run_whose_steps_were_all_skipped_has_not_moved(compared, text):
    comparison, _, _ = compared
    dynamic = comparison.curves[3]
    untrained = demo_runs.validation_loss(demo.word_model(3, 64).state_dict(), text)
    assert {loss for _, loss in dynamic.validation_losses} == {untrained}


def test_the_inspected_run_is_the_one_that_mixed_precision_trains(compared, text):
    comparison, _, _ = compared
    assert demo_runs.trained(FP32, TINY, text, 3, lambda loss: None) == comparison.curves[0]


def test_all_ways_start_from_the_same_weights_and_batch(compared):
    comparison, _, _ = compared
    for seed in (3, 4):
        first = [run.training_losses[0] for run in comparison.curves if run.seed == seed]
        assert first[1] == first[2] == first[3]
        # FP16 products round: by 2^-11 of a logit, and the mean of 64 words by less.
        assert first[1] == pytest.approx(first[0], abs=1e-3)


def test_validation_is_the_mean_over_every_held_out_word_in_fp32(text):
    model = demo.word_model(1, 64)
    tokens = text.held_out.tokens
    contexts = torch.stack([tokens[:-3], tokens[1:-2], tokens[2:-1]], 1)
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(contexts).double(), tokens[3:]).item()
    assert len(contexts) == text.validation_words == 1997
    with torch.autocast("cpu", torch.float16):
        assert demo_runs.validation_loss(model.state_dict(), text) == pytest.approx(expected, rel=1e-6)


def test_validation_leaves_the_run_as_it_is(text):
    often, seldom = TINY, dataclasses.replace(TINY, validate_every=1000)
    way = Way("FP16", "fp16-amp", 128.0)
    runs = [demo_runs.trained(way, setting, text, 0, lambda loss: None) for setting in (often, seldom)]
    assert runs[0].training_losses == runs[1].training_losses
    assert runs[0].validation_losses[-1:] == runs[1].validation_losses


def test_every_step_is_reported_to_the_callback(text):
    seen = []
    run = demo_runs.trained(FP32, TINY, text, 0, lambda loss: seen.append(loss.item()))
    assert tuple(seen) == run.training_losses


@pytest.mark.parametrize("change", [{"steps": 0}, {"validate_every": 0}])
def test_a_setting_without_steps_is_refused(change):
    with pytest.raises(ValueError, match="must be 1 or more"):
        Setting(**change)


@pytest.mark.parametrize("seeds", [(), (1, 1)])
def test_seeds_must_differ(seeds, tmp_path):
    with pytest.raises(ValueError, match="each once"):
        demo_curves.run(log_dir=tmp_path, setting=TINY, seeds=seeds)
    assert not list(tmp_path.iterdir())


# -- output and files ---------------------------------------------------------------------------------------------------


def test_the_report_precedes_the_table_and_the_paths_are_last(compared):
    comparison, printed, directory = compared
    places = [
        printed.index(part)
        for part in (
            str(comparison.report),
            demo.headline(comparison.report),
            "in FP16 follows",
            loss_curves.table(comparison.curves),
            "emulated on the CPU",
            f"  {directory / 'curves.png'}",
        )
    ]
    assert places == sorted(places)
    assert printed.count("Pictures:") == 1
    for name in ("range_offset.png", "layers.png", "curves.png"):
        assert (directory / name).read_bytes().startswith(b"\x89PNG")
    assert not list(directory.glob("*.part"))


def test_the_notes_describe_the_setting(compared):
    comparison, _, _ = compared
    setting, scales, emulated = comparison.notes
    assert setting == (
        "5 steps of Adam at a learning rate of 0.015, 64 words a step, a vocabulary of 64, seeds 3, 4; "
        "validated on 1,997 words held out."
    )
    assert "report of the FP32 run with seed 3" in scales
    assert emulated.startswith("FP16 was emulated on the CPU")


def test_the_json_is_one_document_with_every_field(compared):
    comparison, _, directory = compared
    document = json.loads(comparison.to_json())
    assert document["report"] == json.loads(comparison.report.to_json())
    curves = document["curves"]
    assert curves["setting"] == dataclasses.asdict(TINY)
    assert curves["picture"] == str(directory / "curves.png")
    for written, run in zip(curves["runs"], comparison.curves, strict=True):
        written["training_losses"] = tuple(written["training_losses"])
        written["validation_losses"] = tuple(map(tuple, written["validation_losses"]))
        assert Curve(**written) == run


def test_losses_that_are_not_finite_are_strings_in_json(compared):
    comparison, _, _ = compared
    broken = dataclasses.replace(comparison, curves=(curve("FP32", final=math.nan, best=math.inf),))
    (run,) = json.loads(broken.to_json())["curves"]["runs"]
    assert run["validation_losses"] == [[10, "inf"], [20, "nan"]]


def test_quiet_prints_nothing(only_curves, tmp_path, capsys):
    demo_curves.run(log_dir=tmp_path, setting=dataclasses.replace(TINY, steps=1), quiet=True)
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / "curves.png").exists()


def test_without_a_recommendation_its_run_is_skipped(only_curves, tmp_path, monkeypatch, capsys):
    def without(*arguments):
        report, run = inspected(*arguments)
        advice = dataclasses.replace(report.loss_scale, recommended=None, reason="nothing was counted.")
        return dataclasses.replace(report, loss_scale=advice), run

    inspected = demo_runs.inspected
    monkeypatch.setattr(demo_curves, "inspected", without)
    comparison = demo_curves.run(log_dir=tmp_path, setting=dataclasses.replace(TINY, steps=1))
    assert [run.name for run in comparison.curves] == [NAMES[0], NAMES[1], NAMES[3]]
    assert "The inspector recommends no loss scale: nothing was counted. The dynamic" in " ".join(
        capsys.readouterr().out.split()
    )


def test_finished_runs_are_drawn_after_an_interruption(only_curves, tmp_path, monkeypatch, capsys):
    def stop(self):
        if self.loss_scale == 2.0**31:
            raise KeyboardInterrupt
        return step(self)

    step = MixedPrecision.step
    monkeypatch.setattr(MixedPrecision, "step", stop)
    with pytest.raises(KeyboardInterrupt, match="3 of 8 runs were finished; the table and the curves hold those"):
        demo_curves.run(log_dir=tmp_path, setting=TINY, seeds=(0, 1))
    printed = capsys.readouterr().out
    assert "FP16, recommended scale  " in printed
    assert "FP16, dynamic scaling  " not in printed
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_no_curves_are_drawn_if_stopped_in_the_first_run(tmp_path, monkeypatch, capsys):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "word_loss", stop)
    with pytest.raises(KeyboardInterrupt, match="no run was finished"):
        demo_curves.run(log_dir=tmp_path, setting=TINY)
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.glob("*.png"))


# -- the table ----------------------------------------------------------------------------------------------------------


def test_the_table_of_one_seed():
    curves = [
        curve("FP32", final=4.5),
        curve("FP16, no scaling", final=5.25, scales=(1.0, 1.0), best=4.75),
        curve("FP16, recommended scale", final=4.4998, scales=(8192.0, 8192.0)),
        curve("FP16, dynamic scaling", final=4.49, scales=(2.0**32, 2.0**20), skipped=12),
    ]
    # The last ten training losses are 3.0, 2.9, ... 2.1.
    assert loss_curves.table(curves).splitlines() == [
        "precision                loss scale    skipped  training  validation   best  from FP32",
        "FP32                     -                   0     2.550       4.500  4.500          -",
        "FP16, no scaling         1                   0     2.550       5.250  4.750     +0.750",
        "FP16, recommended scale  8192 (2^13)         0     2.550       4.500  4.500     +0.000",
        "FP16, dynamic scaling    2^32 -> 2^20       12     2.550       4.490  4.490     -0.010",
    ]


def test_the_table_of_several_seeds_has_means():
    curves = [
        curve("FP32", 1, 4.0),
        curve("FP16", 1, 4.5, scales=(1.0, 1.0)),
        curve("FP32", 2, 5.0),
        curve("FP16", 2, 5.7, scales=(1.0, 1.0)),
    ]
    assert loss_curves.table(curves).splitlines() == [
        "precision  seed  loss scale  skipped  training  validation   best  from FP32",
        "FP32       1     -                 0     2.550       4.000  4.000          -",
        "           2     -                 0     2.550       5.000  5.000          -",
        "           mean                          2.550       4.500  4.500          -",
        "FP16       1     1                 0     2.550       4.500  4.500     +0.500",
        "           2     1                 0     2.550       5.700  5.700     +0.700",
        "           mean                          2.550       5.100  5.100     +0.600",
    ]


def test_a_seed_without_its_reference_has_no_difference():
    curves = [curve("FP32", 1, 4.0), curve("FP16", 1, 4.5), curve("FP16", 2, 4.7)]
    assert [loss_curves.from_reference(run, curves) for run in curves] == [None, 0.5, None]
    assert loss_curves.table(curves).splitlines()[-1].endswith("+0.500")


def test_the_training_loss_at_the_end_is_a_mean_and_the_best_is_a_number():
    run = curve("FP16", final=math.nan, best=4.25)
    assert run.final_training_loss == pytest.approx(2.55)
    assert run.best_validation_loss == 4.25
    short = dataclasses.replace(run, training_losses=(3.0, 1.0))
    assert short.final_training_loss == 2.0


@pytest.mark.parametrize(("difference", "words"), [(-1e-9, "+0.000"), (0.0, "+0.000"), (-0.0006, "-0.001")])
def test_differences_are_signed(difference, words):
    assert loss_curves.signed(difference) == words


# -- the chart ----------------------------------------------------------------------------------------------------------


def chart(curves):
    import labels

    figure = plot_curves.figure(curves, "title")
    labels.assert_readable(figure)
    return figure.axes[0], labels.words(figure)


def drawn(axes):
    """Return the curves' points, without the lines of the labels to the right of the axes."""
    return [line.get_xydata().tolist() for line in axes.lines if line.get_transform() == axes.transData]


def test_the_chart_holds_every_loss_and_names_every_line():
    curves = [curve("FP32", final=4.5), curve("FP16, no scaling", final=5.25, scales=(1.0, 1.0), skipped=1)]
    axes, words = chart(curves)
    for run in curves:
        assert [list(pair) for pair in run.validation_losses] in drawn(axes)
        assert [[step + 1, loss] for step, loss in enumerate(run.training_losses)] in drawn(axes)
    assert "FP32: 4.500" in words
    assert "FP16, no scaling: 5.250 (+0.750)" in words
    assert "loss scale 1, 1 step skipped" in words
    assert "Validation losses are computed in FP32 from the FP32 weights. FP16 was emulated on a CPU." in words


def test_the_chart_of_several_seeds_has_their_mean_and_each():
    curves = [curve("FP32", 1, 4.0), curve("FP32", 2, 5.0)]
    axes, words = chart(curves)
    lines = drawn(axes)
    for run in curves:
        assert [list(pair) for pair in run.validation_losses] in lines
    assert [[10, 5.5], [20, 4.5]] in lines
    assert "FP32: 4.500" in words
    assert any("Means of 2 seeds" in text for text in words)


def test_the_axis_leaves_the_first_steps_out():
    falling = (9.0, 5.0, *[4.0] * 18)
    run = dataclasses.replace(curve("FP32", final=4.5, best=4.6), training_losses=falling)
    axes, _ = chart([run])
    low, high = axes.get_ylim()
    assert 3.9 < low < 4.0
    assert 4.6 < high < 4.7


def test_losses_that_are_not_finite_are_drawn_around():
    axes, words = chart([curve("FP32"), curve("FP16", final=math.nan, best=math.inf)])
    assert all(map(math.isfinite, axes.get_ylim()))
    assert "FP16: nan (+nan)" in words


def test_labels_preserve_their_distance_and_order():
    assert plot_curves._spread([0.9, 0.2, 0.2, 0.2], 0.1) == pytest.approx([0.9, 0.3, 0.2, 0.1])
    assert plot_curves._spread([0.1, 0.5], 0.1) == [0.1, 0.5]
    # A label that moves may touch the next.
    assert plot_curves._spread([0.5, 0.5, 0.6], 0.1) == pytest.approx([0.533333, 0.433333, 0.633333], abs=1e-5)


def test_a_chart_is_written_in_full_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "curves.png"
    assert plot_curves.save([curve("FP32")], path, "title") == path
    before = path.read_bytes()
    assert before.startswith(b"\x89PNG")

    def full(file, data):
        raise OSError("disk full")

    monkeypatch.setattr(appending, "write_all", full)
    with pytest.raises(OSError, match="disk full"):
        plot_curves.save([curve("FP32"), curve("FP16")], path, "title")
    assert [file.name for file in tmp_path.iterdir()] == ["curves.png"]
    assert path.read_bytes() == before
