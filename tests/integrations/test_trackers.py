"""Logging to the real W&B, MLflow and Trackio, offline: runs hold the scalars, and the script's own rows are unchanged."""

import dataclasses
import json
import struct
import sys
import threading
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import launched
import pytest
import sessions
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from trainings import take_step

import mpinspect
from mpinspect.numeric.formats import FLOAT16
from mpinspect.ranges import tracking as sinks
from mpinspect.ranges.analysis.loss_scale import recommend_loss_scale
from mpinspect.ranges.capture import recording
from mpinspect.ranges.kinds import GRADIENT_KINDS
from mpinspect.ranges.report.tensorboard import TensorBoardSink
from mpinspect.ranges.session import Progress, ScaleChange, Session
from mpinspect.reporting import trackers
from mpinspect.reporting.active_run import ActiveRun

NAMES = {
    *(f"mpinspect/loss_scale/{name}" for name in ("used", "suggested", "lowest", "highest", "headroom")),
    *("mpinspect/flushed/worst_layer", "mpinspect/flushed/worst_layer_unscaled"),
    *("mpinspect/steps/not_finite", "mpinspect/steps/skipped"),
}
#: Those in TensorBoard's group "summary".
SEEN_FIRST = ("flushed/worst_layer", "steps/not_finite", "steps/skipped")


class Kept:
    """A tracker that stores its arguments."""

    def __init__(self, scalars=None, artifact=None):
        self.rows, self.pages = [], []
        self._meanwhile = {"scalars": scalars, "artifact": artifact}

    def scalars(self, step, values):
        if self._meanwhile["scalars"] is not None:
            self._meanwhile["scalars"]()
        self.rows.append((step, dict(values)))

    def artifact(self, path):
        if self._meanwhile["artifact"] is not None:
            self._meanwhile["artifact"]()
        self.pages.append((path.name, path.read_text("utf-8")))


def train(log=lambda step, loss: None, steps=6, **options):
    """Train with an inspector; return it and the weights. Each step waits until the writing thread is idle."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inspector = mpinspect.Inspector(model, optimizers=optimizer, **options)
    with inspector:
        for step in range(steps):
            loss = model(torch.randn(16, 4)).square().mean()
            take_step(optimizer, loss)
            log(step, loss.item())
            if inspector._recording.is_writing:
                inspector._recording.flush()
    return inspector, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.fixture
def writes_each_step(monkeypatch):
    monkeypatch.setattr(recording, "WRITE_INTERVAL_S", 0.0)
    monkeypatch.setattr(recording, "WRITE_COST_FACTOR", 0.0)


def notes(inspector, about):
    return [note for note in inspector.session().notes if about in note]


# -- logged values -------------------------------------------------------------------------------------------------------


def test_a_tracker_object_receives_scalars_and_the_report_page(writes_each_step):
    kept = Kept()
    inspector, _ = train(tracker=kept)
    assert [step for step, _ in kept.rows] == sorted({step for step, _ in kept.rows})
    assert kept.rows[-1][0] == 5
    assert set(kept.rows[-1][1]) == NAMES
    ((name, page),) = kept.pages
    assert name == "report.html"
    assert page.rstrip().endswith("</html>")
    assert "Sequential" in page
    assert inspector.session().notes == ()


def test_the_scalars_equal_the_analysis():
    made = sessions.word_model()
    window, scale = made.windows[0], 8.0
    progress = Progress(skipped_steps=3, scales=(ScaleChange(0, 2.0), ScaleChange(1, scale), ScaleChange(10**6, 4.0)))
    kept = Kept()
    sink = sinks.TrackerSink(kept)
    sink.watched(made.watched)
    event = dataclasses.replace(sessions.culprit(), step=window.last_step)
    sink.event(event)
    sink.window(window)
    sink.progress(progress)
    sink.close()
    ((step, values),) = kept.rows
    advice = recommend_loss_scale(Session(watched=made.watched, windows=(window,), events=(event,), progress=progress))
    found = {name.removeprefix("mpinspect/"): value for name, value in values.items()}
    worst = {
        scale: max(
            tensor.histogram.lost_l1_share(FLOAT16, scale).estimate
            for key, tensor in window.tensors.items()
            if key.kind in GRADIENT_KINDS
        )
        for scale in (0, 3)
    }
    assert step == window.last_step
    assert 2.0 ** found["loss_scale/suggested"] == advice.recommended
    assert (2.0 ** found["loss_scale/lowest"], 2.0 ** found["loss_scale/highest"]) == (advice.lowest, advice.highest)
    assert found["loss_scale/used"] == 3
    assert found["loss_scale/headroom"] == found["loss_scale/highest"] - 3
    assert (found["flushed/worst_layer_unscaled"], found["flushed/worst_layer"]) == (worst[0], worst[3])
    assert worst[0] > worst[3] > 0
    assert (found["steps/not_finite"], found["steps/skipped"]) == (1, 3)


def test_tensorboard_and_a_tracker_receive_equal_scalars(tmp_path):
    made, kept = sessions.word_model(), Kept()
    both = TensorBoardSink(tmp_path), sinks.TrackerSink(kept)
    for sink in both:
        sink.watched(made.watched)
        for window in made.windows:
            sink.window(window)
            sink.progress(Progress(scales=(ScaleChange(0, 8.0),)))
            if sink is both[1]:
                sink.settle()
        sink.close()
    found = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    found.Reload()
    summary = {f"mpinspect/{name}": f"summary/{name.replace('/', '_')}" for name in SEEN_FIRST}
    for name in NAMES - {"mpinspect/loss_scale/used"}:
        tag = summary.get(name, name.replace("mpinspect/", "summary_more/"))
        events = [(event.step, event.value) for event in found.Scalars(tag)]
        assert events == [(step, pytest.approx(row[name], rel=1e-6)) for step, row in kept.rows]
        assert len(events) == len(made.windows)


# -- failures ------------------------------------------------------------------------------------------------------------


def broken():
    raise ConnectionError("the server is gone")


@pytest.mark.parametrize(
    ("kept", "note"),
    [
        (Kept(scalars=broken), "TrackerSink failed and is no longer written: the server is gone"),
        (Kept(artifact=broken), "did not take the report's page: ConnectionError"),
    ],
)
@pytest.mark.filterwarnings("ignore::mpinspect.MpinspectWarning")
def test_a_failing_tracker_adds_a_note_and_changes_no_result(kept, note, writes_each_step, tmp_path):
    inspector, weights = train(tracker=kept, log_dir=tmp_path)
    _, bare = train()
    assert all(torch.equal(a, b) for a, b in zip(weights, bare, strict=True))
    assert len(notes(inspector, note)) == 1
    assert Session.load(tmp_path).progress == inspector.session().progress


@pytest.mark.filterwarnings("ignore::mpinspect.MpinspectWarning")
def test_a_tracker_that_does_not_answer_blocks_neither_training_nor_session(writes_each_step, monkeypatch, tmp_path):
    monkeypatch.setattr(sinks, "PATIENCE_S", 0.05)
    answer = threading.Event()
    kept = Kept(scalars=answer.wait)
    inspector, _ = train(tracker=kept, log_dir=tmp_path)
    try:
        assert kept.rows == []
        assert notes(inspector, "has not answered for 0.05 s")
        assert Session.load(tmp_path).progress.ended
    finally:
        answer.set()


@pytest.mark.parametrize(
    ("tracker", "error", "words"),
    [
        ("tensorboard", ValueError, "'tensorboard': there are wandb, mlflow, trackio"),
        (3, TypeError, r"scalars\(step, values\) and artifact\(path\)"),
    ],
)
def test_invalid_trackers_are_refused(tracker, error, words):
    with pytest.raises(error, match=words):
        mpinspect.Inspector(nn.Linear(1, 1), tracker=tracker)


@pytest.mark.parametrize("name", trackers.PACKAGES)
def test_the_error_for_a_missing_package_names_its_extra(name, monkeypatch):
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(trackers, "find_spec", lambda name: ModuleSpec(name, None))
    with pytest.raises(ImportError, match=rf"pip install mpinspect\[{name}\]"):
        mpinspect.Inspector(nn.Linear(1, 1), tracker=name)


# -- the tracker's run ---------------------------------------------------------------------------------------------------


@pytest.fixture
def package(monkeypatch):
    """A tracker's package whose open run is its attribute ``run``."""
    fake = types.ModuleType("fake")
    fake.run = None
    monkeypatch.setitem(sys.modules, "fake", fake)
    made = trackers.Package("Fake", "fake.init()", lambda fake: fake.run, lambda run: run)
    monkeypatch.setitem(trackers.PACKAGES, "fake", made)
    monkeypatch.setattr(Kept, "release", lambda self: None, raising=False)
    return fake


@pytest.mark.filterwarnings("ignore::mpinspect.MpinspectWarning")
def test_without_an_open_run_the_first_rank_has_a_note_on_how_to_start_one(package, monkeypatch):
    inspector, _ = train(tracker="fake")
    assert notes(inspector, "nothing was logged to Fake: the training opened no run of it (fake.init())")
    monkeypatch.setenv("RANK", "1")
    inspector, _ = train(tracker="fake")
    assert inspector.session().notes == ()


def test_logging_starts_with_a_run_and_moves_to_the_next_run(package, writes_each_step):
    first, second = Kept(), Kept()

    def log(step, loss):
        package.run = {1: first, 3: second}.get(step, package.run)

    train(log, tracker="fake")
    assert first.rows
    assert first.pages == []
    assert max(step for step, _ in first.rows) <= 3 < max(step for step, _ in second.rows)
    assert len(second.pages) == 1


@pytest.mark.filterwarnings("ignore::mpinspect.MpinspectWarning")
def test_a_run_that_ends_before_the_training_adds_a_note(package, writes_each_step, monkeypatch):
    """W&B's runs accept no data after their end."""
    package.run = kept = Kept()
    ends = []
    monkeypatch.setattr(Kept, "before_end", lambda self, call: ends.append(call), raising=False)
    monkeypatch.setattr("mpinspect.reporting.active_run.WandbRun", Kept)

    def log(step, loss):
        if step == 2:
            package.run = None
            ends[0]()

    inspector, _ = train(log, tracker="fake")
    assert [step for step, _ in kept.rows][-1] == 2
    assert len(kept.pages) == 1
    assert notes(inspector, "the run of Fake ended before the training: it has no scalars from step 3 on")


def test_all_models_but_the_first_of_a_run_log_under_their_names(package):
    active = ActiveRun("fake", lambda: None)
    one, other = active.part("Net"), active.part("Head")
    for first, later in ((one, other), (other, one)):
        package.run = Kept()
        first.find_run()
        later.find_run()
        later.scalars(0, {"mpinspect/steps/skipped": 2})
        first.scalars(0, {"mpinspect/steps/skipped": 1})
        assert package.run.rows == [
            (0, {f"mpinspect/{later.name}/steps/skipped": 2}),
            (0, {"mpinspect/steps/skipped": 1}),
        ]


OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HF_HUB_OFFLINE": "1"}
_TRAINS = """
import contextlib, sys
import torch
from torch import nn

def train(log, attach=contextlib.nullcontext):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model):
        for step in range(6):
            optimizer.zero_grad()
            model(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
            log(step)
"""
_TRACKIO = f"""{_TRAINS}
import json
import mpinspect, trackio
from trackio.sqlite_storage import SQLiteStorage

trackio.init(project="p", name="n")
log = (lambda step: trackio.log({{"loss": step}})) if sys.argv[1] == "True" else (lambda step: None)
train(log, lambda model: mpinspect.Inspector(model, tracker="trackio"))
log(6)
trackio.finish()
print(json.dumps(SQLiteStorage.get_logs("p", "n")))
"""
_WANDB = f"""{_TRAINS}
import wandb

run = wandb.init(project="p")
train(lambda step: wandb.log({{"loss": step}}, step=10 * step))
if "finish" in sys.argv:
    wandb.finish()
"""


# -- real trackers -------------------------------------------------------------------------------------------------------


def wandb_rows(folder):
    """Return the rows of the runs in a folder, and the files that they name, read from W&B's log (LevelDB's format)."""
    from wandb.proto import wandb_internal_pb2

    rows, files = [], []
    for path in sorted(folder.glob("**/run-*.wandb")):
        if "latest-run" in path.parts:
            continue
        for record in _wandb_records(path.read_bytes()):
            entry = wandb_internal_pb2.Record()
            entry.ParseFromString(record)
            if entry.HasField("history"):
                items = {item.key or "/".join(item.nested_key): item.value_json for item in entry.history.item}
                rows.append({name: json.loads(value) for name, value in items.items()})
            if entry.HasField("files"):
                files += [path.parent / "files" / file.path for file in entry.files.files]
    return rows, files


def _wandb_records(data):
    block, at, record = 32768, 7, b""
    while at < len(data):
        left = block - at % block
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def own(rows):
    """Return the script's own rows."""
    return [(row["_step"], row["loss"]) for row in rows if "loss" in row]


def ours(rows, step="mpinspect/step"):
    """Return mpinspect's rows, by the training's step."""
    return {row[step]: {name for name in row if name in NAMES} for row in rows if any(name in NAMES for name in row)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["rows", "rows with steps", "no rows"])
def test_wandb(way, writes_each_step, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb = pytest.importorskip("wandb")
    run = wandb.init(mode="offline", dir=str(tmp_path), project="p", settings=wandb.Settings(console="off"))
    log = {
        "rows": lambda step, loss: run.log({"loss": step}),
        "rows with steps": lambda step, loss: run.log({"loss": step}, step=10 * step),
        "no rows": lambda step, loss: None,
    }[way]
    train(log, tracker="wandb")
    log(6, 0.0)
    run.finish()
    # W&B's service process writes the last records after ``finish`` returns.
    wandb.teardown()
    rows, files = wandb_rows(tmp_path)
    factor, count = {"rows": (1, 7), "rows with steps": (10, 7), "no rows": (1, 0)}[way]
    assert own(rows) == [(factor * step, step) for step in range(count)]
    assert ours(rows)[5] == NAMES
    (page,) = [path for path in files if path.suffix == ".html"]
    assert page.read_text("utf-8").rstrip().endswith("</html>")
    assert any(row.get("mpinspect/report/_type") == "html-file" for row in rows)


@pytest.mark.filterwarnings("ignore")
def test_mlflow(writes_each_step, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as run:
        train(lambda step, loss: mlflow.log_metric("loss", step, step=step), tracker="mlflow")
    client = mlflow.MlflowClient()
    assert set(client.get_run(run.info.run_id).data.metrics) == {"loss", *NAMES}
    history = client.get_metric_history(run.info.run_id, "mpinspect/loss_scale/suggested")
    assert history[-1].step == 5
    assert [metric.value for metric in client.get_metric_history(run.info.run_id, "loss")] == list(range(6))
    assert [file.path for file in client.list_artifacts(run.info.run_id, "mpinspect")] == ["mpinspect/report.html"]
    page = Path(client.download_artifacts(run.info.run_id, "mpinspect/report.html", str(tmp_path)))
    assert page.read_text("utf-8").rstrip().endswith("</html>")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("logs", [True, False])
def test_trackio(logs, writes_each_step, tmp_path):
    """Runs in a separate process, since Trackio chooses its data folder at import."""
    pytest.importorskip("trackio")
    launched.write(tmp_path, _TRACKIO)
    done = launched.bare(tmp_path, "train.py", str(logs), env={**OFFLINE, "TRACKIO_DIR": str(tmp_path / "data")})
    assert done.status == 0, done.err
    rows = json.loads(done.out.splitlines()[-1])
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [(i, i) for i in range(7 * logs)]
    assert ours(rows)[5] == NAMES
    (page,) = [row["mpinspect/report"]["file_path"] for row in rows if "mpinspect/report" in row]
    assert (tmp_path / "data" / "media" / page).read_text("utf-8").rstrip().endswith("</html>")


@pytest.mark.parametrize("end", ["finish", "the end of the process"])
def test_mpinspect_run_logs_to_the_scripts_own_wandb_run(end, tmp_path):
    pytest.importorskip("wandb")
    launched.write(tmp_path / "s", _WANDB)
    env = {**OFFLINE, "WANDB_DIR": str(tmp_path / "w")}
    (tmp_path / "w").mkdir()
    done = launched.watched(tmp_path / "s", "train.py", end, options=["--tracker", "wandb"], env=env)
    assert done.status == 0, done.err
    rows, files = wandb_rows(tmp_path / "w")
    assert own(rows) == [(10 * step, step) for step in range(6)]
    assert ours(rows)
    assert all(found == NAMES for found in ours(rows).values())
    (page,) = [path for path in files if path.suffix == ".html"]
    assert "mpinspect run" in page.read_text("utf-8")
    assert (tmp_path / launched.RUN_DIR / "report.html").exists()
