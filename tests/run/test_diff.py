"""Comparisons of two runs: run directories, sessions, several models, shapes, kernels, invalid input."""

import dataclasses
import json

import made_kernels
import pytest
import sessions
import shape_records
import torch

import mpinspect
from mpinspect.commands import cli
from mpinspect.kernels.analysis import analyse_kernels
from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.kinds import ACTIVATION_GRADIENT
from mpinspect.ranges.session import Session
from mpinspect.ranges.store import FILE_NAME, SessionError
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.reporting import forms
from mpinspect.run.diff import diff
from mpinspect.run.diff.products import Product, compare_kernels, compare_shapes
from mpinspect.runtime import gpus
from mpinspect.shapes.analysis import analyse_shapes

DECODER = TensorKey("decoder", ACTIVATION_GRADIENT)


def flushed() -> Session:
    """Return the word model, with half of its decoder's gradients zero."""
    made = sessions.word_model()
    tensors = dict(made.windows[0].tensors)
    kept = tensors[DECODER].histogram
    half = ExponentHistogram.from_counts(
        kept.counts // 2, kept.min_exponent, zeros=kept.nonzero - int((kept.counts // 2).sum())
    )
    tensors[DECODER] = dataclasses.replace(tensors[DECODER], histogram=half)
    # The first of four windows equals the healthy run's.
    windows = (made.windows[0], *(dataclasses.replace(each, tensors=tensors) for each in made.windows[1:]))
    return dataclasses.replace(made, windows=windows)


def saved(place, session):
    place.mkdir(parents=True)
    session.save(place)
    return place


def run_of(place, report=None, command="train.py", **models):
    """Write a run directory with these models and the run's final report."""
    for name, session in models.items():
        saved(place / name, session)
    (place / "run.json").write_text(json.dumps({"command": command, "outcome": "ended", "saw": [], "models": []}))
    if report is not None:
        (place / "report.json").write_text(json.dumps(report))
    return place


def printed(*words, capsys, status=0):
    assert cli.main(["diff", *map(str, words)]) == status
    return capsys.readouterr()


@pytest.fixture
def pair(tmp_path):
    return saved(tmp_path / "healthy", sessions.word_model()), saved(tmp_path / "flushed", flushed())


# -- two sessions -------------------------------------------------------------------------------------------------------


def test_the_first_line_names_the_step_and_the_layer(pair, capsys):
    out, err = printed(*pair, capsys=capsys)
    lines = out.splitlines()
    assert " ".join(out.split()).startswith(
        "They part in steps 10-19: 38% of the activation gradients of 'decoder' lie in other powers of two, a mean over the "
        "steps (0% of them zero in A, 38% in B). A "
    )
    assert "Moved, worst first: 1 of 7 tensors" in lines
    assert any(line.split()[:5] == ["decoder", "activation", "gradients", "10-19", "38%"] for line in lines)
    assert err == ""


def test_the_same_run_twice(pair, capsys):
    out, _ = printed(pair[0], pair[0], "--fail-on", "info", capsys=capsys)
    assert " ".join(out.split()).startswith(
        "The ranges do not differ: the counts of 7 tensors are equal in all 40 steps counted of steps 0-39. A "
    )
    assert "- B: it is the same run as A" in out
    assert "Moved" not in out
    assert "Not moved: 7 of 7 tensors" in printed(pair[0], pair[0], "--all", capsys=capsys).out


def test_every_form_and_json_agree(pair, tmp_path, capsys):
    page, text = tmp_path / "d.html", tmp_path / "d.md"
    out, _ = printed(*pair, "--json", "--html", page, "--md", text, capsys=capsys)
    found = json.loads(out)
    assert (found["schema"], found["schema_version"], found["matters"]) == ("mpinspect.diff", 1, True)
    assert found["verdict"].startswith("They part in steps 10-19: 38%")
    (model,) = found["models"]
    moved = model["ranges"]["moved"]
    assert (moved["first_step"], moved["name"], moved["kind"]) == (10, "decoder", "activation_gradient")
    assert model["ranges"]["layers"][0]["zeros_fraction"] == [0.0, pytest.approx(0.375, abs=0.01)]
    assert {finding["id"] for finding in found["findings"]} >= {"runs-part", "layers-moved"}
    assert text.read_text("utf-8").startswith("# They part in steps 10-19: 38%")
    assert page.read_text("utf-8").count("data-widget=") == 1


@pytest.mark.parametrize(
    ("fail_on", "status"),
    [([], 0), (["warning"], 1), (["error"], 0), (["layers-moved"], 1), (["runs-part"], 1), (["events-differ"], 0)],
)
def test_fail_on(pair, fail_on, status, capsys):
    printed(*pair, *(word for name in fail_on for word in ("--fail-on", name)), capsys=capsys, status=status)


def test_in_python_sessions_and_paths_may_be_mixed(pair):
    report = mpinspect.diff(sessions.word_model(), pair[1])
    assert str(report).startswith("They part in steps 10-19: ")
    assert [finding.id for finding in report.findings][:1] == ["layers-moved"]
    assert report.models[0].ranges.moved.name == "decoder"
    with pytest.raises(ValueError, match="float99"):
        mpinspect.diff(*pair, format="float99")


def test_reports_are_compared_by_their_sessions():
    reports = [analyse(session) for session in (sessions.word_model(), flushed())]
    sides = [report.session for report in reports]
    assert str(diff(*reports)) == str(diff(*sides)) == str(diff(reports[0], sides[1]))
    assert "The ranges do not differ" in str(diff(reports[0], reports[0]))


def test_an_object_that_is_not_a_run_is_refused_with_the_types_to_pass():
    with pytest.raises(TypeError, match=r"not Inspector: pass its session\(\) or report\(\)"):
        diff(mpinspect.Inspector(torch.nn.Linear(2, 2)), sessions.word_model())


def test_runs_in_two_formats_are_judged_in_the_narrower_one(pair):
    assert mpinspect.diff(*pair, format="bfloat16").models[0].ranges.first.format == "bfloat16"
    precision = mpinspect.Session.load(pair[0]).precision
    ledger = dataclasses.replace(precision, weights={"float32": 9}, autocast=("bfloat16",))
    other = dataclasses.replace(sessions.word_model(), precision=ledger)
    for both in ((pair[0], other), (other, pair[0])):
        diffed = mpinspect.diff(*both).models[0].ranges
        assert (diffed.first.format, diffed.second.format) == ("float16", "float16")


# -- run directories ----------------------------------------------------------------------------------------------------


def test_models_are_matched_by_name_and_the_worst_is_first(tmp_path, capsys):
    first = run_of(tmp_path / "a", Net=sessions.word_model(), Critic=sessions.word_model(), Old=sessions.word_model())
    second = run_of(tmp_path / "b", Net=sessions.word_model(), Critic=flushed())
    report = diff(first, second)
    assert {model.name for model in report.models} == {"Net", "Critic"}
    assert (report.only_first, report.only_second) == (("Old",), ())
    assert "models-differ" in {finding.id for finding in report.findings}
    out = printed(first, second, capsys=capsys).out
    assert out.startswith("Critic: They part in steps 10-19: ")
    assert "Net: The ranges do not differ: " in out
    assert out.count("train.py (ended)") == 2


def test_a_run_of_one_model_is_compared_with_a_saved_session(tmp_path, pair):
    report = diff(run_of(tmp_path / "run", Net=sessions.word_model()), pair[1])
    assert [model.name for model in report.models] == ["WordModel"]


def test_notes_are_shown_where_only_one_run_has_them(tmp_path):
    runs = [
        run_of(tmp_path / name, {"shapes": None, "saw": ["seen twice"]}, Net=sessions.word_model()) for name in "ab"
    ]
    (runs[1] / "report.json").write_text(json.dumps({"shapes": None, "saw": ["seen twice", "seen once"]}))
    said = str(diff(*runs))
    assert "- B: seen once" in said
    assert "seen twice" not in said


def shapes(n):
    products = (*shape_records.linear(64, n, 4096, name="hidden"), *shape_records.linear(64, 4096, 512, name="head"))
    return analyse_shapes(shape_records.recording(*products), gpus.named("hopper"), model="Net")


def test_shapes_are_compared_where_both_runs_have_them(tmp_path, capsys):
    first, second = (
        run_of(tmp_path / name, {"shapes": json.loads(shapes(n).to_json())}, Net=sessions.word_model())
        for name, n in (("a", 1023), ("b", 1024))
    )
    report = diff(first, second)
    assert {change.module for change in report.shapes.changes} == {"hidden"}
    assert {change.role for change in report.shapes.changes} == {"forward", "dgrad", "wgrad"}
    out = printed(first, second, "--fail-on", "shapes-differ", capsys=capsys, status=1).out
    assert ". 3 matrix products differ in shape, verdict." in " ".join(out.split())
    assert "64x1023x4096 float16, degraded" in " ".join(out.split())
    assert diff(first, first).shapes.changes == ()
    assert diff(first, run_of(tmp_path / "c", Net=sessions.word_model())).shapes is None


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ("train.py --lr 0.1 -x", "train.py --lr -1 -x", "Arguments that differ: A --lr 0.1; B --lr -1."),
        ("train.py", "train.py data 'a b'", "Arguments that differ: A none; B data 'a b'."),
        ("train.py 1 2 3 4 5", "train.py", "Arguments that differ: A 1 2 3 and 2 more; B none."),
        ("train.py --lr 1", "other.py --lr 1", ""),
        # A damaged file.
        ("train.py --lr '1", "train.py", ""),
    ],
)
def test_the_arguments_that_differ_are_named(one, other, words, tmp_path):
    places = [tmp_path / "a", tmp_path / "b"]
    runs = [run_of(place, command=command, net=flushed()) for place, command in zip(places, (one, other), strict=True)]
    text = " ".join(str(diff(*runs)).split())
    assert ("Arguments" in text) == bool(words)
    assert words in text


def test_unreadable_shapes_are_noted(tmp_path):
    damaged = {"shapes": {"matmuls": [{"module": 3}]}}
    first, second = (run_of(tmp_path / name, damaged, Net=sessions.word_model()) for name in "ab")
    report = diff(first, second)
    assert report.shapes is None
    assert any("report.json is damaged" in note for note in report.second.notes)


def test_the_order_of_products_does_not_matter():
    one = Product("a", "forward", "aten::mm", 8, 8, 8, 1, "float16", 2, "native")
    other = dataclasses.replace(one, n=16, verdict="off", calls=1)
    assert compare_shapes((one, other), (other, one)).changes == ()
    (change,) = compare_shapes((one,), (one, other)).changes
    assert (change.first, change.second) == ((one,), (one, other))
    assert other.words == "8x16x8 float16, off"


def kernels(name, time_us, module="net.0"):
    product = made_kernels.kernel(name, time_us, made_kernels.mm(64, 64, 64), module=module, module_is_path=True)
    rest = made_kernels.kernel(made_kernels.NATIVE, 50, made_kernels.mm(8, 8, 8), module="net.1", module_is_path=True)
    return analyse_kernels([made_kernels.trace(product, rest)])


def test_kernels_that_leave_the_tensor_cores_or_take_longer_are_named():
    native = kernels(made_kernels.NATIVE, 50)
    assert compare_kernels(native, native).findings == ()
    # Two steps of one run may differ by a tenth of the time.
    assert compare_kernels(native, kernels(made_kernels.NATIVE, 55)).changes == ()
    slower = compare_kernels(native, kernels(made_kernels.NATIVE, 100))
    assert [(each.module, each.time_us) for each in slower.changes] == [("net.0", (50, 100))]
    off = compare_kernels(native, kernels(made_kernels.SGEMM, 50))
    assert off.tensor_core_fraction == (1.0, 0.5)
    assert [each.tensor_core_fraction for each in off.changes] == [(1.0, 0.0)]
    assert "kernels-differ" in {finding.id for finding in off.findings}
    assert "eligible-not-used" in {finding.id for finding in off.new}


# -- bad input ----------------------------------------------------------------------------------------------------------


def refused(first, second, capsys):
    out, err = printed(first, second, capsys=capsys, status=2)
    assert out == ""
    assert err.startswith("mpinspect: ")
    assert err.count("\n") == 1
    return err


def test_two_models_without_a_layer_in_common(tmp_path, pair, capsys):
    other = saved(tmp_path / "other", sessions.all_sessions()["layers_300"])
    err = refused(pair[0], other, capsys)
    assert "have no layer in common ('embedding.weight', 'hidden.weight', 'hidden.bias', ... against" in err


def test_models_with_different_names_are_refused(tmp_path, capsys):
    first = run_of(tmp_path / "a", Net=sessions.word_model(), Critic=sessions.word_model())
    second = run_of(tmp_path / "b", Actor=sessions.word_model())
    err = refused(first, second, capsys)
    assert "against Actor" in err
    assert "Give one model of each" in err


def test_runs_without_counts_are_refused(tmp_path, pair, capsys):
    empty = saved(tmp_path / "empty", dataclasses.replace(Session(), progress=sessions.word_model().progress))
    assert "holds no counts to compare: no step was sampled" in refused(pair[0], empty, capsys)
    begun = saved(tmp_path / "begun", Session())
    assert "the run has not written any yet, or was killed before it could" in refused(begun, pair[0], capsys)
    none = run_of(tmp_path / "none", Net=sessions.word_model())
    (none / "Net" / FILE_NAME).write_bytes(b"PK\x03\x04 not ours")
    assert "no recorded model can be read" in refused(none, pair[0], capsys)


def test_missing_foreign_and_newer_files(tmp_path, pair, capsys):
    assert "There is no" in refused(pair[0], tmp_path / "nowhere", capsys)
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"PK\x03\x04 not ours")
    assert "is not an mpinspect session file" in refused(foreign, pair[0], capsys)
    newer = pair[1] / FILE_NAME
    data = bytearray(newer.read_bytes())
    data[9] = 9
    newer.write_bytes(data)
    assert "newer mpinspect" in refused(*pair, capsys)
    with pytest.raises(SessionError):
        mpinspect.diff(*pair)


def test_an_unfinished_run_is_compared_up_to_its_last_window(pair, tmp_path, capsys):
    made = sessions.word_model()
    unfinished = dataclasses.replace(
        made, windows=made.windows[:2], progress=dataclasses.replace(made.progress, steps=20, ended=False)
    )
    out, _ = printed(pair[0], saved(tmp_path / "unfinished", unfinished), capsys=capsys)
    assert " ".join(out.split()).startswith(
        "The ranges do not differ: the counts of 7 tensors are equal in all 20 steps counted of steps 0-19. A "
    )
    assert "B: WordModel is still running, or was killed: only its data on disk is compared" in " ".join(out.split())
    assert "20 so far" in out


@pytest.mark.parametrize("name", [name for name in sessions.all_sessions() if name not in ("empty", "no_gradients")])
def test_every_session_can_be_compared_with_itself(name):
    session = sessions.all_sessions()[name]
    report = diff(session, session)
    assert report.findings == ()
    for suffix in (".txt", ".md", ".html", ".json"):
        assert forms.render(report, suffix)


def test_a_changed_dtype_is_not_called_a_changed_shape(tmp_path, capsys):
    rows = json.loads(shapes(1024).to_json())
    wide = {**rows, "matmuls": [{**row, "dtype": "float32"} for row in rows["matmuls"]]}
    first, second = (
        run_of(tmp_path / name, {"shapes": given}, Net=sessions.word_model())
        for name, given in (("a", rows), ("b", wide))
    )
    changes = diff(first, second).shapes.changes
    assert {change.aspects for change in changes} == {("dtype",)}
    said = " ".join(printed(first, second, capsys=capsys).out.split())
    assert ". 6 matrix products differ in dtype." in said
    assert "in shape" not in said


def test_tensors_that_did_not_move_are_counted_in_a_line(tmp_path, capsys):
    """Every tensor of the second run has one more element."""
    session = sessions.word_model()
    windows = tuple(
        dataclasses.replace(
            window,
            tensors={
                key: dataclasses.replace(tensor, histogram=tensor.histogram + ExponentHistogram.from_counts([1], -8))
                for key, tensor in window.tensors.items()
            },
        )
        for window in session.windows
    )
    first, second = saved(tmp_path / "a", session), saved(tmp_path / "b", dataclasses.replace(session, windows=windows))
    said = " ".join(printed(first, second, capsys=capsys).out.split())
    assert "The counts of 7 tensors differ within their normal variation (--all lists them)." in said
    assert "tensor elsewhere" not in said
    assert "Not moved: 7 of 7 tensors" in printed(first, second, "--all", capsys=capsys).out
