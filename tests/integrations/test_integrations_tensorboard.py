"""TensorBoard's page "Ranges": its routes through the real application, and the page in a browser."""

import base64
import gzip
import json
import re
import shutil
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import sessions
import shape_records
from werkzeug.test import Client

import mpinspect
from mpinspect.integrations.tensorboard import RangesPlugin
from mpinspect.integrations.tensorboard_runs import BESIDE, FILE_NAME, Runs, roots_of
from mpinspect.ranges import store
from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.analysis.ranks import merge_ranks
from mpinspect.ranges.kinds import WEIGHT_GRADIENT
from mpinspect.ranges.report.explorer import packed
from mpinspect.ranges.session import Precision, Session
from mpinspect.ranges.store import save_session
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.run import record
from mpinspect.run.report import ModelPart, RunReport
from mpinspect.runtime import gpus
from mpinspect.shapes.analysis import analyse_shapes

with warnings.catch_warnings():
    # TensorBoard's copy of html5lib.
    warnings.simplefilter("ignore", DeprecationWarning)
    from tensorboard import default, program
    from tensorboard.backend import application
    from tensorboard.backend.event_processing import data_ingester

ROOT = Path(mpinspect.__file__).parents[1]
#: A plugin's routes.
HERE = "/data/plugin/mpinspect_ranges"


def written(folder: Path, session: Session) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_session(session, folder)
    return folder / FILE_NAME


def client(logdir: Path | str, spec: str = "") -> Client:
    """TensorBoard's own application with the plugin, called without a server."""
    board = program.TensorBoard(plugins=[*default.get_static_plugins(), RangesPlugin])
    board.configure(argv=["", "--logdir", str(logdir)] if logdir else ["", "--logdir_spec", spec])
    provider = data_ingester.LocalDataIngester(board.flags).data_provider
    return Client(application.TensorBoardWSGIApp(board.flags, [RangesPlugin], data_provider=provider))


def told(client: Client, path: str, **query: str) -> Any:
    return json.loads(client.get(f"{HERE}/{path}", query_string=query).data)


def unpacked(map: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(map)))


def runs(client: Client) -> dict[str, str]:
    return {run["name"]: run["id"] for run in told(client, "runs")["runs"]}


def test_the_entry_point_names_the_plugin() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    ((module, name),) = re.findall(r'^\[project\.entry-points\.tensorboard_plugins\]\n\w+ = "(.*):(.*)"$', text, re.M)
    assert getattr(import_module(module), name) is RangesPlugin


def test_starting_tensorboard_imports_no_heavy_modules() -> None:
    code = (
        "import sys; from tensorboard import default, program; default.get_static_plugins(); before = set(sys.modules)\n"
        "from mpinspect.integrations.tensorboard import RangesPlugin; print(*(set(sys.modules) - before))"
    )
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    added = ended.stdout.split()
    assert "mpinspect.integrations.tensorboard" in added
    assert not {"torch", "matplotlib", "numba", "rich", "mpinspect.ranges.store", "mpinspect.ranges.analysis"} & set(
        added
    )
    assert len(added) < 40


def test_a_run_directorys_shapes_are_shown_with_their_modules_layers(tmp_path: Path) -> None:
    session = sessions.session({TensorKey("hidden.weight", WEIGHT_GRADIENT): sessions.bell(-26)})
    products = (
        *shape_records.linear(64, 1023, 4096, name="Net.hidden"),
        *shape_records.linear(64, 64, 64, name="Critic.head"),
    )
    shapes = analyse_shapes(shape_records.recording(*products), gpus.named("hopper"), model="Net")
    for name in ("Net", "Critic"):
        written(tmp_path / "run" / name, session)
    board = client(tmp_path)
    before = told(board, "run", id=runs(board)["run/Net"])
    assert unpacked(before["map"])["notes"]["columns"] == []
    (tmp_path / "run" / "run.json").write_text("{}")
    own = RunReport("train.py", "ended", tuple(ModelPart(name, analyse(session)) for name in ("Net", "Critic")), shapes)
    own.save(tmp_path / "run" / "report.json")
    after = told(board, "run", id=runs(board)["run/Net"], version=before["version"])
    notes = unpacked(after["map"])["notes"]
    assert notes["columns"][0][0] == "shapes"
    assert notes["cells"] == {"hidden": [["degraded", "warning", 3]]}
    assert any("64 x 1023 x 4096 in FP16: degraded on H100" in line for line in notes["lines"]["hidden"])
    # A report that is a link out of the log directory is not read, and a damaged one is named.
    elsewhere = tmp_path.parent / f"{tmp_path.name}.json"
    (tmp_path / "run" / "report.json").rename(elsewhere)
    (tmp_path / "run" / "report.json").symlink_to(elsewhere)
    linked = told(board, "run", id=runs(board)["run/Net"])
    assert unpacked(linked["map"])["notes"]["columns"] == []
    (tmp_path / "run" / "report.json").unlink()
    (tmp_path / "run" / "report.json").write_text(json.dumps({"shapes": {"model": 3}}))
    assert any("the shapes can't be read" in note for note in told(board, "run", id=runs(board)["run/Net"])["notes"])


def test_file_names_equal_the_writers_constants() -> None:
    assert BESIDE == (record.FILE_NAME, "report.json", record.TRACE)
    assert record.REPORTS[1] == "report.json"
    assert FILE_NAME == store.FILE_NAME


def test_a_run_is_served_as_the_page_embeds_it(tmp_path: Path) -> None:
    session = sessions.everything()
    written(tmp_path / "a" / "WordModel", session)
    written(tmp_path / "rank10", session)
    written(tmp_path / "rank2", session)
    board = client(tmp_path)
    assert list(runs(board)) == ["a/WordModel", "rank2", "rank10"]
    answer = told(board, "run", id=runs(board)["a/WordModel"])
    report = analyse(session)
    assert answer["map"] == packed(report)
    assert [line["text"] for line in answer["verdict"] if line["tone"] != "code"]
    assert {finding["message"] for finding in answer["findings"]} == {finding.message for finding in report.findings}
    assert answer["ended"] is session.progress.ended
    unchanged = told(board, "run", id=runs(board)["a/WordModel"], version=answer["version"])
    assert unchanged == {"version": answer["version"]}


def test_a_model_of_several_ranks_is_served_added_up(tmp_path: Path) -> None:
    def of_rank(rank: int) -> Session:
        session = sessions.word_model()
        return replace(session, info=replace(session.info, rank=rank, world_size=2))

    for rank in range(2):
        written(tmp_path / "a" / f"rank{rank}" / "Net", of_rank(rank))
    board = client(tmp_path)
    assert list(runs(board)) == ["a/Net of 2 ranks", "a/rank0/Net", "a/rank1/Net"]
    id = runs(board)["a/Net of 2 ranks"]
    answer = told(board, "run", id=id)
    merged = analyse(merge_ranks(map(of_rank, range(2))))
    assert answer["map"] == packed(merged)
    assert told(board, "run", id=id, version=answer["version"]) == {"version": answer["version"]}
    # The verdict begins with the dead rank.
    died = {"command": "train.py", "outcome": "ValueError: 3", "by_error": True, "saw": [], "models": []}
    (tmp_path / "a" / "rank1" / "run.json").write_text(json.dumps(died))
    (tmp_path / "a" / "rank0" / "run.json").write_text(json.dumps({**died, "outcome": "ended", "by_error": False}))
    assert any(
        "Rank 1 ended in step 40 by ValueError: 3" in line["text"] for line in told(board, "run", id=id)["verdict"]
    )
    # A rank without a file is omitted, and a rank that does not fit is noted.
    (tmp_path / "a" / "rank1" / "Net" / FILE_NAME).unlink()
    assert told(board, "run", id=id)["version"] != answer["version"]
    written(tmp_path / "a" / "rank1" / "Net", of_rank(0))
    assert "there are two sessions of rank 0" in told(board, "run", id=id)["error"]


def test_a_running_run_is_read_again(tmp_path: Path) -> None:
    session = sessions.word_model()
    goes_on = replace(session, windows=session.windows[:1], progress=replace(session.progress, ended=False, steps=10))
    path = written(tmp_path / "run", goes_on)
    board = client(tmp_path)
    (id,) = runs(board).values()
    first = told(board, "run", id=id)
    assert first["ended"] is False
    assert "so far" in first["steps"]
    path.unlink()
    written(tmp_path / "run", session)
    later = told(board, "run", id=id, version=first["version"])
    assert later["version"] != first["version"]
    assert later["map"] == packed(analyse(session))


def test_scripts_and_styles_are_served(tmp_path: Path) -> None:
    board = client(tmp_path)
    for name, kind in {
        "tensorboard.js": "text/javascript",
        "explorer.js": "text/javascript",
        "style.css": "text/css",
    }.items():
        response = board.get(f"{HERE}/{name}")
        assert response.status_code == 200
        assert response.mimetype == kind
        assert response.headers["X-Content-Type-Options"] == "nosniff"
    listing = json.loads(board.get("/data/plugins_listing").data)["mpinspect_ranges"]
    assert listing["tab_name"] == "Ranges"
    assert listing["loading_mechanism"] == {"type": "IFRAME", "module_path": f"{HERE}/tensorboard.js"}
    assert "nnerHTML" not in board.get(f"{HERE}/tensorboard.js").text


def test_it_is_active_where_there_is_a_run(tmp_path: Path) -> None:
    def active() -> bool:
        return bool(json.loads(client(tmp_path).get("/data/plugins_listing").data)["mpinspect_ranges"]["enabled"])

    assert active() is False
    written(tmp_path / "run", sessions.word_model())
    assert active() is True


def test_files_outside_of_the_log_directory_are_not_read(tmp_path: Path) -> None:
    outside = written(tmp_path / "outside", sessions.word_model())
    logs = tmp_path / "logs"
    (logs / "linked file").mkdir(parents=True)
    (logs / "linked file" / FILE_NAME).symlink_to(outside)
    (logs / "linked folder").symlink_to(outside.parent)
    inside = written(logs / "inside", sessions.word_model())
    board = client(logs)
    assert list(runs(board)) == ["inside"]
    assert told(board, "runs")["troubles"] == [f"Not followed: 2 links out of {logs}."]
    for wanted in ("../outside", str(outside), f"../outside/{FILE_NAME}", "inside", "", "\0"):
        response = board.get(f"{HERE}/run", query_string={"id": wanted})
        assert response.status_code == 404
        assert "no longer" in response.json["error"]
    # A file that is replaced by a link between the listing and the request.
    (id,) = runs(board).values()
    inside.unlink()
    inside.symlink_to(outside)
    response = board.get(f"{HERE}/run", query_string={"id": id})
    assert response.status_code == 404
    for path in ("/run/../../../../pyproject.toml", "/..%2f..%2fpyproject.toml", "/tensorboard.py"):
        assert board.get(HERE + path).status_code == 404


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "holds nothing"),
        (b"something else", "is not an mpinspect session file"),
        (store.frames.MAGIC + (99).to_bytes(4, "little"), "was written by a newer mpinspect"),
    ],
)
def test_unreadable_files_give_a_sentence(data: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / FILE_NAME).write_bytes(data)
    written(tmp_path / "good", sessions.word_model())
    board = client(tmp_path)
    assert sentence in told(board, "run", id=runs(board)["bad"])["error"]
    assert told(board, "run", id=runs(board)["good"])["map"]


@pytest.mark.parametrize("name", sessions.all_sessions())
def test_every_session_is_served(name: str, tmp_path: Path) -> None:
    written(tmp_path, sessions.all_sessions()[name])
    board = client(tmp_path)
    answer = told(board, "run", id=runs(board)["."])
    assert "error" not in answer
    assert all(text.isprintable() for text in (answer["title"], *answer["notes"]))


def test_the_searched_folder_is_named(tmp_path: Path) -> None:
    (trouble,) = told(client(tmp_path / "missing"), "runs")["troubles"]
    assert trouble == f"{tmp_path / 'missing'} can't be searched: No such file or directory."
    assert told(client("gs://bucket/logs"), "runs")["where"] == "no local directory"
    written(tmp_path / "one" / "x", sessions.word_model())
    written(tmp_path / "two", sessions.word_model())
    assert list(runs(client("", f"first:{tmp_path / 'one'},second:{tmp_path / 'two'}"))) == ["first/x", "second"]
    assert roots_of("", "/a:b,name:/c,s3://x,y:s3://x") == {"/a:b": "/a:b", "name": "/c"}


def test_a_listing_is_searched_again_only_after_a_while(tmp_path: Path) -> None:
    found = Runs({"": str(tmp_path)})
    assert found.listed()["runs"] == []
    written(tmp_path, sessions.word_model())
    assert found.listed()["runs"] == []
    found._searched -= 3600
    assert [run["name"] for run in found.listed()["runs"]] == ["."]


# -- in a browser --------------------------------------------------------------------------------------------------------


@pytest.fixture
def page(tmp_path: Path) -> Any:
    """The page of a real TensorBoard server in a browser; ``frame`` waits for the plugin's frame."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'mpinspect[browser]'")
    chromium = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)
    if chromium is None:
        pytest.skip("needs Chromium, which is not installed")
    board = program.TensorBoard(plugins=[*default.get_static_plugins(), RangesPlugin])
    board.configure(
        argv=["", "--logdir", str(tmp_path), "--port", "0", "--load_fast", "false", "--reload_interval", "0"]
    )
    server = board._make_server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.troubles = []
        page.on("console", lambda message: page.troubles.extend([message.text] if message.type == "error" else []))
        page.on("pageerror", lambda error: page.troubles.append(str(error)))
        page.address = f"http://localhost:{server.server_port}/#mpinspect_ranges"
        yield page
        browser.close()
    server.shutdown()
    server.server_close()


def frame(page: Any) -> Any:
    page.goto(page.address)
    return page.wait_for_selector("iframe[src*=mpinspect_ranges]", state="attached").content_frame()


def test_two_runs_one_of_them_running(page: Any, tmp_path: Path) -> None:
    session = sessions.word_model()
    totals = {key: tensor.histogram for key, tensor in session.totals().items()}
    other = {key: counts.shifted(-6 if key.name == "hidden.weight" else 0) for key, counts in totals.items()}
    in_half = Precision({"float32": 100}, autocast=("float16",))
    written(tmp_path / "<b>ended", replace(sessions.session(other), precision=in_half))
    session = replace(session, precision=Precision({"float32": 100}, autocast=("bfloat16",)))
    early = replace(session, windows=session.windows[:1], progress=replace(session.progress, ended=False, steps=10))
    path = written(tmp_path / "going on", early)
    here = frame(page)
    here.wait_for_selector(".part .explorer tbody tr[data-name]")
    assert here.text_content(".part h2") == "going on"
    assert "10 steps so far" in here.text_content(".part > p")
    assert "Healthy so far: " in here.text_content(".part")
    formats = here.locator(".explorer label:has-text('Format') select")
    assert formats.first.input_value() == "bfloat16"
    here.get_by_text("<b>ended").click()
    here.wait_for_selector(".part >> nth=1 >> .explorer tbody tr[data-name]")
    # The runs are compared in the narrower of their formats, and a selection applies to both maps.
    here.wait_for_function(
        "[...document.querySelectorAll('.explorer select')].filter((each) => each.value === 'float16').length === 2"
    )
    here.locator(".explorer select").first.select_option("weight_gradient")
    here.locator(".explorer input[type=range]").first.fill("12")
    here.locator(".explorer input[type=search]").first.fill("hidden")
    here.click(".explorer tbody tr[data-name='hidden.weight'] >> nth=0")
    # A hidden map is updated once it becomes visible.
    here.locator(".explorer .legend").last.scroll_into_view_if_needed()
    here.wait_for_selector(".explorer .detail h3 >> nth=1")
    assert here.locator(".explorer .detail h3").all_text_contents() == ["hidden.weight"] * 2
    assert "2¹²" in here.locator(".explorer .said").nth(1).text_content()
    assert here.locator(".differences thead th").all_text_contents() == ["layer", "going on", "<b>ended"]
    assert here.locator(".differences tbody th").all_text_contents() == ["hidden.weight"]
    # The selection survives updates of the run.
    path.unlink()
    written(tmp_path / "going on", session)
    here.wait_for_function("!document.querySelector('.part > p').textContent.includes('so far')")
    here.wait_for_function("document.querySelectorAll('.explorer input[type=range]').length > 2")
    assert here.locator(".explorer .detail h3").all_text_contents() == ["hidden.weight"] * 2
    assert here.locator(".explorer input[type=search]").first.input_value() == "hidden"
    assert "2¹²" in here.locator(".explorer .said").first.text_content()
    assert page.troubles == []


def test_a_folder_without_runs_is_a_sentence(page: Any, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    here = frame(page)
    here.wait_for_function("document.body.textContent.includes('No run of mpinspect lies below')")
    assert str(tmp_path) in here.text_content("[role=status]")
    assert page.troubles == []
