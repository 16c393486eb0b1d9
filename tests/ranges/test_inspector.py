"""The inspector's public behaviour: records, messages about wrong input, and files in the log directory."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from models import cnn
from torch import nn
from trainings import take_step

import mpinspect
from mpinspect import Inspector, MpinspectWarning, Recorder, Session
from mpinspect.commands import cli
from mpinspect.ranges.capture.recording import EVENT_LIMIT, Recording
from mpinspect.ranges.session import Event, RunInfo
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.ranges.windows.window import WINDOW_LIMIT, Window
from mpinspect.runtime.device import devices_named
from mpinspect.training import LossScaleWarning


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    take_step(optimizer, model(x).square().mean())


def _trained(model: nn.Module, steps: int = 3, **options: object) -> Inspector:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Inspector(model, **options) as inspector:
        for _ in range(steps):
            _step(model, optimizer, torch.randn(8, 4))
    return inspector


# -- the object -------------------------------------------------------------------------------------------------------


def test_attach_and_detach_work_without_the_context_manager() -> None:
    model = nn.Linear(4, 1)
    inspector = Inspector(model)
    assert inspector.attach() is inspector
    model(torch.ones(1, 4)).sum().backward()
    inspector.detach()
    inspector.detach()
    assert not model._forward_hooks
    with pytest.raises(RuntimeError, match="make a new Inspector"):
        inspector.attach()
    assert inspector.session().progress.ended


def test_attaching_twice_raises_an_error() -> None:
    with Inspector(nn.Linear(1, 1)) as inspector, pytest.raises(RuntimeError, match="attached already"):
        inspector.attach()


def test_a_report_is_available_during_the_run() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Inspector(model) as inspector:
        for steps in (1, 2):
            _step(model, optimizer, torch.ones(1, 4))
            report = inspector.report()
            assert report.session.progress.steps == steps
            assert report.session.totals()[TensorKey("weight", "weight_gradient")].samples == steps


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"every": 0}, ValueError, "every=0"),
        ({"every": True}, ValueError, "every=True"),
        ({"every": 2.0}, ValueError, "whole number"),
        ({"capture": ("gradients",)}, ValueError, "unknown kinds"),
        ({"capture": "weights"}, ValueError, "weight_gradient"),
        ({"loss_scale": 0.0}, ValueError, "positive"),
        ({"loss_scale": "128"}, TypeError, "number or a callable"),
        ({"loss_scale": float("inf")}, ValueError, "finite"),
        ({"optimizers": [3]}, TypeError, "Optimizer"),
        ({"eager_samples": "yes"}, TypeError, "eager_samples='yes': give True or False"),
        ({"watch": "no"}, TypeError, "True or False"),
    ],
)
def test_wrong_arguments_raise_an_error_that_names_them(
    options: dict[str, object], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        Inspector(nn.Linear(1, 1), **options)


def test_a_model_that_is_not_a_module_is_refused() -> None:
    with pytest.raises(TypeError, match="not function"):
        Inspector(lambda x: x)  # type: ignore[arg-type]


def test_include_and_exclude_select_modules_by_pattern() -> None:
    model = cnn().model
    with Inspector(model, include=["block.*", "head"], exclude="*.norm") as inspector:
        model(torch.randn(2, 1, 8, 8)).sum().backward()
    names = {key.name for key in inspector.session().totals()}
    assert names == {"block.conv", "block.conv.weight", "block.conv.bias", "head", "head.weight", "head.bias"}


def test_include_can_name_a_container() -> None:
    model = cnn().model
    with Inspector(model, include="block", capture="activation") as inspector:
        model(torch.randn(2, 1, 8, 8))
    assert set(inspector.session().totals()) == {TensorKey("block", "activation")}


def test_a_long_recording_is_bounded_and_exact() -> None:
    recording = Recording(RunInfo())
    steps = 5 * WINDOW_LIMIT
    for step in range(steps):
        recording.add_window(Window(step, step, 1, {}, {0: 1}))
    windows = recording.session().windows
    assert len(windows) < 2 * WINDOW_LIMIT
    assert sum(window.sampled_steps for window in windows) == steps
    assert recording.session().gradient_peaks() == {0: steps}


def test_the_number_of_events_is_bounded() -> None:
    recording = Recording(RunInfo())
    for step in range(EVENT_LIMIT):
        recording.event(Event(step, 0, "forward", "", "activation", "", "nan"))
    with pytest.warns(MpinspectWarning, match="not listed"):
        recording.event(Event(EVENT_LIMIT, 0, "forward", "", "activation", "", "nan"))
    assert len(recording.session().events) == EVENT_LIMIT


# -- wrong input produces a clear message and does not stop the training -----------------------------------------------


def test_the_report_of_a_run_without_a_forward_says_so() -> None:
    with Inspector(nn.Linear(1, 1)) as inspector:
        pass
    assert "no forward ran" in str(inspector.report())
    assert not inspector.report().loss_scale.available


def test_the_report_of_a_run_without_a_backward_says_so() -> None:
    model = nn.Linear(1, 1)
    with Inspector(model) as inspector:
        model(torch.ones(1, 1))
    report = inspector.report()
    assert not report.loss_scale.available
    assert "backward" in str(report)


def test_a_model_without_parameters_produces_a_warning() -> None:
    model = nn.ReLU()
    with pytest.warns(MpinspectWarning, match="no parameters"), Inspector(model) as inspector:
        model(torch.ones(2, requires_grad=True)).sum().backward()
    assert inspector.session().totals()[TensorKey("", "activation_gradient")].histogram.nonzero == 2


def test_a_frozen_model_produces_a_warning() -> None:
    model = nn.Linear(1, 1).requires_grad_(False)
    with pytest.warns(MpinspectWarning, match="frozen"), Inspector(model) as inspector:
        model(torch.ones(1, 1))
    assert "requires_grad" in str(inspector.report())


def test_a_pattern_without_a_match_produces_a_warning() -> None:
    model = nn.Linear(4, 1)
    with pytest.warns(MpinspectWarning, match="'decoder"):
        inspector = _trained(model, include=["decoder.*", "weight"])
    assert set(inspector.session().totals()) == {TensorKey("weight", "weight_gradient")}


def test_a_scaler_without_an_optimizer_of_the_model_produces_a_warning() -> None:
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    inspector = Inspector(model, scalers=scaler).attach()
    for _ in range(2):
        scaler.scale(model(other(torch.ones(1, 1))).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
    with pytest.warns(MpinspectWarning, match="no optimizer"):
        inspector.detach()
    assert inspector.session().totals()[TensorKey("weight", "weight_gradient")].samples == 2


def test_a_model_of_nans_has_events_and_no_advice() -> None:
    model = nn.Linear(4, 1)
    nn.init.constant_(model.weight, float("nan"))
    report = _trained(model).report()
    assert report.events
    assert not report.loss_scale.available
    assert "nan" in str(report).lower()


def test_a_log_dir_that_is_a_file_produces_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    path.write_text("something else")
    with pytest.warns(MpinspectWarning, match="held in memory"):
        inspector = _trained(nn.Linear(4, 1), log_dir=path)
    assert inspector.log_dir is None
    assert inspector.session().progress.steps == 3
    assert path.read_text() == "something else"


def test_a_log_dir_that_cannot_be_created_produces_a_warning() -> None:
    with pytest.warns(MpinspectWarning, match="held in memory"):
        inspector = _trained(nn.Linear(4, 1), log_dir="/proc/nowhere/run")
    assert inspector.session().progress.steps == 3


def test_a_log_dir_of_another_run_gets_a_numbered_sibling(tmp_path: Path) -> None:
    first = _trained(nn.Linear(4, 1), steps=2, log_dir=tmp_path / "run")
    with pytest.warns(MpinspectWarning, match="holds another run"):
        second = _trained(nn.Linear(4, 1), steps=3, log_dir=tmp_path / "run")
    assert (first.log_dir, second.log_dir) == (tmp_path / "run", tmp_path / "run-2")
    assert Session.load(tmp_path / "run").progress.steps == 2
    assert Session.load(tmp_path / "run-2").progress.steps == 3


def test_a_log_dir_deleted_during_the_run_does_not_stop_the_training(tmp_path: Path) -> None:
    import shutil

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings(), Inspector(model, log_dir=tmp_path / "run") as inspector:
        warnings.simplefilter("ignore", MpinspectWarning)
        for step in range(4):
            _step(model, optimizer, torch.ones(1, 4))
            if step == 1:
                shutil.rmtree(tmp_path / "run")
            inspector._recording.flush()
    assert inspector.session().progress.steps == 4
    assert inspector.session().totals()[TensorKey("weight", "weight_gradient")].samples == 4


def test_warnings_as_errors_do_not_stop_the_training() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inspector = _trained(nn.Linear(4, 1), include=["nothing.*", "weight"])
    assert inspector.session().progress.steps == 3
    assert any("matches no module" in note for note in inspector.session().notes)


def _encoder() -> nn.Module:
    return nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "head": nn.Linear(4, 1)})


@pytest.mark.parametrize(
    ("pattern", "suggested"),
    [
        ("encoder", "'encoder.*'"),
        ("encodre.*", "'encoder.*'"),
        ("module.encoder.*", "'encoder.*'"),
        ("encoder.0.wieght", "'encoder.0.weight'"),
        ("decoder[0]", "'encoder.0'"),
        ("zzz", "'encoder.*'"),
    ],
)
@pytest.mark.parametrize("option", ["include", "exclude"])
def test_the_hint_for_a_pattern_without_a_match_suggests_an_existing_name(option, pattern, suggested) -> None:
    model = _encoder()
    given = {"include": ["head", pattern]} if option == "include" and pattern != "encoder" else {"exclude": pattern}
    with pytest.warns(MpinspectWarning, match="matches no module") as told:
        inspector = Inspector(model, **given)
    (note,) = _notes_on_patterns(inspector)
    assert str(told[0].message) == note
    hint = note.partition("; patterns go over")[2]
    assert suggested in hint
    assert repr(pattern) not in hint
    for name in re.findall(r"'([^']+)'", hint):
        assert not _notes_on_patterns(Inspector(model, include=name))


def _notes_on_patterns(inspector: Inspector) -> list[str]:
    return [note for note in inspector.session().notes if "never attached" not in note]


def test_the_hint_never_repeats_the_pattern() -> None:
    """The usual example "encoder.*" is replaced too, for a model without an encoder."""
    model = nn.ModuleDict({"backbone": nn.Sequential(nn.Linear(4, 4))})
    with pytest.warns(MpinspectWarning, match="matches no module"):
        (note,) = _notes_on_patterns(Inspector(model, exclude="encoder.*"))
    assert note.count("encoder") == 1
    assert "'backbone.*'" in note


def test_a_pattern_that_names_a_container_matches() -> None:
    inspector = Inspector(_encoder(), include="encoder")
    assert not _notes_on_patterns(inspector)
    assert [info.name for info in inspector.session().watched] == ["encoder"]


# -- warnings and reprs -------------------------------------------------------------------------------------------------


def _warned_here(told: list[warnings.WarningMessage], line: int) -> None:
    assert [(warning.filename, warning.lineno) for warning in told] == [(__file__, line)]


def _line() -> int:
    return sys._getframe(1).f_lineno


def test_warnings_point_to_the_users_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("ours")

    model = nn.Sequential(nn.Linear(4, 1))
    with pytest.warns(MpinspectWarning, match="matches no") as told:
        inspector, line = Inspector(model, include=["0", "nothing.*"]), _line()
    _warned_here(told, line)
    # The next warnings are raised in hooks, below torch's own calls.
    monkeypatch.setattr(inspector._capture._watch, "called", broken)
    with contextlib.ExitStack() as stack:
        stack.enter_context(inspector)
        with pytest.warns(MpinspectWarning, match="mpinspect failed in") as told:
            output, line = model(torch.ones(2, 4)), _line()
        _warned_here(told, line)
        monkeypatch.setattr(inspector._capture, "_context", broken)
        with pytest.warns(MpinspectWarning, match="mpinspect failed in") as told:
            _, line = output.sum().backward(), _line()
        assert {(warning.filename, warning.lineno) for warning in told} == {(__file__, line)}
    (tmp_path / "a").mkdir()
    Recorder(tmp_path / "a").close()
    with pytest.warns(MpinspectWarning, match="another run") as told:
        recorder, line = Recorder(tmp_path / "a"), _line()
    _warned_here(told, line)
    with recorder, pytest.warns(MpinspectWarning, match="'x'") as told:
        _, line = recorder.observe("x", object()), _line()
    _warned_here(told, line)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.warns(LossScaleWarning, match="eps") as told:
        _, line = mpinspect.MixedPrecision(model, optimizer, "fp16-pure"), _line()
    _warned_here(told, line)


def test_warnings_can_point_to_code_without_a_file() -> None:
    code = "import torch, mpinspect\nmpinspect.Inspector(torch.nn.Linear(1, 1), include='nothing')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("<string>:2: MpinspectWarning: the pattern 'nothing'")


def test_reprs_are_one_line(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    inspector = Inspector(model, log_dir=tmp_path / "a")
    assert (
        repr(inspector)
        == f"<Inspector of Sequential: not attached yet, 0 steps, 0 sampled, writes to {tmp_path / 'a'}>"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with inspector:
        assert ": attached, 0 steps" in repr(inspector)
        for _ in range(3):
            _step(model, optimizer, torch.randn(8, 4))
    assert str(inspector).startswith("<Inspector of Sequential: detached, 3 steps, 3 sampled")
    session, report = inspector.session(), inspector.report()
    advice = report.loss_scale
    assert repr(session) == "<Session of Sequential: 3 steps, 3 sampled, 6 tensors>"
    assert repr(report) == f"<RangeReport: {len(report.findings)} findings; print() shows it, save() writes it>"
    assert repr(advice).startswith("<LossScaleAdvice: ")
    for words in ("window 2^", "2^"):
        assert words in repr(advice)
    assert repr(advice)[len("<LossScaleAdvice: ") : -1] in str(advice)
    assert advice.reason in str(advice)
    none = Inspector(model).report().loss_scale
    assert repr(none) == "<LossScaleAdvice: No window of loss scales can be given>"
    for finding in report.findings:
        assert finding.message in str(finding)
        assert str(finding).startswith(finding.severity)
    with Recorder(tmp_path / "b") as recorder:
        assert repr(recorder) == f"<Recorder: open, 0 steps, 0 sampled, writes to {tmp_path / 'b'}>"
    mp = mpinspect.MixedPrecision(model, optimizer, "bf16-amp")
    shapes = mpinspect.lint_shapes(model, (torch.ones(2, 4),), gpu="ampere")
    for each in (inspector, session, report, advice, recorder, mp, shapes):
        assert len(repr(each)) < 200 + len(str(tmp_path))
        assert "\n" not in repr(each)


# -- the run directory ----------------------------------------------------------------------------------------------


def test_the_session_file_equals_the_inspectors_session(tmp_path: Path) -> None:
    inspector = _trained(nn.Linear(4, 1), 5, log_dir=tmp_path / "run")
    held, kept = inspector.session(), Session.load(tmp_path / "run")
    assert kept.totals() == held.totals()
    assert kept.watched == held.watched
    assert kept.events == held.events
    assert kept.progress == held.progress
    assert kept.info == held.info
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))


_ENDLESS_RUN = """
import sys, torch, mpinspect
from mpinspect.ranges.capture import recording
recording.WRITE_INTERVAL_S = 0.0
recording.WRITE_COST_FACTOR = 0
last = int(sys.argv[2])
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with mpinspect.Inspector(model, log_dir=sys.argv[1]) as inspector:
    step = 0
    while True:
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        step += 1
        if step == last:
            inspector._recording.flush()
        print(step, flush=True)
"""


def test_kill_9_loses_at_most_the_last_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", _ENDLESS_RUN, str(tmp_path / "run"), "40"], stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    for line in run.stdout:
        if int(line) == 40:
            break
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    run.stdout.close()
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    assert "weight" in capsys.readouterr().out
    session = Session.load(tmp_path / "run")
    # An interval ended with step 40; later steps may be lost.
    assert session.progress.steps >= 40
    assert not session.progress.ended
    assert session.totals()[TensorKey("weight", "weight_gradient")].samples >= 40


def test_every_public_name_exists() -> None:
    for name in mpinspect.__all__:
        assert getattr(mpinspect, name) is not None


def test_an_error_in_the_report_does_not_hide_the_users_exception(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(session: Session) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr("mpinspect.ranges.inspector.analyse", broken)
    with pytest.raises(ValueError, match="theirs"), Inspector(nn.Linear(1, 1)):
        raise ValueError("theirs")
    assert "could not print its report" in capsys.readouterr().err


def test_a_model_on_the_meta_device_has_one_note_and_no_claim_of_health() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(inspector: Inspector) -> None:
        with inspector:
            for _ in range(3):
                take_step(optimizer, model(torch.ones(2, 4, device="meta")).sum())

    inspector = Inspector(model)
    with pytest.warns(MpinspectWarning, match="the meta device, which holds shapes and no values") as told:
        train(inspector)
    assert len(told) == len(inspector.session().notes) == 1
    assert inspector.report().verdict.healthy is None


def test_a_model_that_leaves_the_meta_device_before_training_is_inspected_from_its_first_step() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 1)
    with Inspector(model) as inspector:
        model.to_empty(device="cpu")
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert inspector.session().notes == ()
    assert inspector.report().session.progress.sampled_steps == 1
    assert inspector.report().verdict.healthy is True


def test_two_inspectors_of_one_model_have_equal_counts() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Inspector(model) as first, Inspector(model) as second:
        for _ in range(3):
            take_step(optimizer, model(torch.ones(2, 4)).sum())
    assert first.session().totals() == second.session().totals()
    assert len(first.session().totals()) == 7
    assert first.session().notes == second.session().notes == ()


def test_an_inspector_that_was_never_attached_says_so() -> None:
    model = nn.Linear(2, 2)
    inspector = Inspector(model)
    model(torch.ones(1, 2)).sum().backward()
    for text in (str(inspector.report()), inspector.report().to_json()):
        assert "the inspector was never attached" in " ".join(text.split())
    with inspector:
        model(torch.ones(1, 2)).sum().backward()
        assert not inspector.session().notes
    assert "never attached" not in str(inspector.report())
    inspector.detach()
    assert not inspector.session().notes


def test_a_record_holds_the_devices_and_the_time_up_to_the_last_step() -> None:
    time = [10.0]
    recording = Recording(RunInfo(), clock=lambda: time[0])
    assert recording.progress.elapsed_s == 0
    time[0] = 735.25
    recording.step_done(1, 0, 1, sampled=True)
    time[0] = 900.0
    assert recording.session().progress.elapsed_s == 725.25
    assert Inspector(torch.nn.Linear(2, 2)).session().info.devices == "cpu"
    assert devices_named(torch.device(name) for name in ("meta", "cpu", "meta")) == "meta, cpu"
