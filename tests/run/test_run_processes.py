"""``mpinspect run`` with scripts that start processes or skip their exit handlers: unchanged behaviour, and the reports."""

import dataclasses
import json
import os
import pickle
import platform
import re
import signal
import subprocess
import sys
import time
import types

import pytest
import sessions
import sharded_training
from launched import RUN_DIR, bare, run, silent, watched, write

from mpinspect.ranges.kinds import WEIGHT_GRADIENT
from mpinspect.ranges.store import read_session
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.run import processes
from mpinspect.run.directory import ALL_RANKS, others_of
from mpinspect.run.ending import Ending
from mpinspect.run.import_hook import when_imported
from mpinspect.run.joining import with_others, with_ranks
from mpinspect.run.options import LaunchOptions
from mpinspect.run.outcome import Outcome, RecordedModel, outcome_of
from mpinspect.run.reading import read_run
from mpinspect.run.record import read_record

#: Scripts with children of every kind; their stdout, stderr and exit status must equal plain Python's.
SCRIPTS = {
    "fork": "import os\nif not os.fork():\n    print('child', flush=True)\n    raise SystemExit(3)\nprint(os.wait()[1])",
    "fork that raises": "import os\nif not os.fork():\n    1 / 0\nprint(os.wait()[1])",
    "fork that goes on alone": "import os\nif os.fork():\n    os._exit(0)\nprint('child')",
    "forked pool": """
import multiprocessing
def double(i): return 2 * i
with multiprocessing.get_context("fork").Pool(2) as pool: print(pool.map(double, [1, 2]))
""",
    "spawned": """
import multiprocessing, sys
def work(queue):
    queue.put((__name__, sys.argv, sys.modules["__main__"].__file__, sorted(vars(multiprocessing.current_process()))))
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    print(queue.get(), sorted(vars(process)))
    process.join()
""",
    "spawned, raising": """
import multiprocessing
def work(): 1 / 0
if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=work)
        process.start(), process.join(), print(process.exitcode)
""",
    "spawned, leaving": """
import multiprocessing, os
class Leaves(multiprocessing.get_context("spawn").Process):
    def run(self):
        print("lost")
        os._exit(5)
if __name__ == "__main__":
    process = Leaves()
    process.start(), process.join(), print(process.exitcode)
""",
    "spawned pool": """
import concurrent.futures, multiprocessing
def double(i): return 2 * i
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool: print(list(pool.map(double, [1, 2])))
    with context.Manager() as manager: print(manager.list([1]))
""",
    "os._exit": "import os\nprint('lost')\nos._exit(5)",
    "os._exit in a handler": "import atexit, os\nprint('lost')\natexit.register(os._exit, 6)",
    "os.abort": "import os\nprint('lost')\nos.abort()",
    "another program": "import os\nprint('lost')\nos.execvp('echo', ['echo', 'it'])",
    "another program that is missing": "import os\nprint(1)\nos.execvp('no-such-program', ['x'])",
    "subprocess": "import subprocess\nprint(subprocess.run(['echo', '1'], capture_output=True, preexec_fn=lambda: None).stdout)",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_output_and_status_are_pythons(name, tmp_path):
    folder = tmp_path / "work"
    write(folder, SCRIPTS[name])
    alone, with_us = silent(folder, "train.py", "a")
    if name == "spawned":
        with_us = types.SimpleNamespace(**{**vars(with_us), "out": with_us.out.replace("'_mpinspect_payload', ", "")})
    assert vars(with_us) == vars(alone)


TRAINS = """
import os, sys, torch
class Net(torch.nn.Linear): ...
def train(rank, steps=3):
    torch.manual_seed(rank)
    model = Net(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    print(rank, model.weight.sum().item(), flush=True)
def fail(rank):
    print(rank, flush=True)
    raise ValueError("early")
def quiet(rank): torch.zeros(1)
if __name__ == "__main__":
"""
FAIL = "    import torch.multiprocessing\n    torch.multiprocessing.spawn(fail, nprocs=1)"
FORK = "    pid = os.fork()\n    train(0 if pid else 1)\n    if pid: os.wait()"
LEAVE = "    train(0)\n    sys.stdout.write('lost')\n    os._exit(4)"
REPLACE = "    train(0)\n    os.execvp('echo', ['echo', 'it'])"
FORKSERVER = """
    import multiprocessing
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo"])
    for work in (train, quiet):
        process = context.Process(target=work, args=(0,))
        process.start(), process.join()
"""
LOADERS = """
    data = torch.utils.data.TensorDataset(torch.arange(4))
    for method in ("fork", "spawn"):
        print(*torch.utils.data.DataLoader(data, num_workers=1, multiprocessing_context=method))
"""


def record(path):
    return json.loads((path / "run.json").read_text())


#: For the bare script: forks are faster, since they import nothing again, and compute the same.
FORKS = (
    ("spawn(fail, nprocs=1)", 'start_processes(fail, nprocs=1, start_method="fork")'),
    ('"forkserver"', '"fork"'),
    ('"spawn"', '"fork"'),
)


def compare(tmp_path, ending):
    """Run the script under mpinspect run; compare stdout and status with Python's; return its run directory and stderr."""
    folder, alone_in = tmp_path / "work", tmp_path / "alone"
    write(folder, TRAINS + ending)
    for other, fork in FORKS:
        ending = ending.replace(other, fork)
    write(alone_in, TRAINS + ending)
    alone, with_us = (how(place, "train.py", forked=True) for how, place in ((bare, alone_in), (watched, folder)))
    assert sorted(with_us.out.splitlines()) == sorted(alone.out.splitlines())
    assert with_us.status == alone.status
    return tmp_path / RUN_DIR, with_us.err


def test_a_spawned_process_that_raises(tmp_path):
    directory, err = compare(tmp_path, FAIL)
    assert record(directory)["outcome"].startswith("ProcessRaisedException: -- Process 0 terminated")
    child = record(directory / "process-0")
    assert (child["outcome"], child["status"], child["by_error"]) == ("ValueError: early", 1, True)
    assert err.splitlines().count("mpinspect: process-0 ended by ValueError: early") == 1
    assert "process-0 ended by ValueError: early" in record(directory)["saw"]
    assert "mpinspect/run/" not in err


def test_a_forkservers_children(tmp_path):
    directory, _ = compare(tmp_path, FORKSERVER)
    assert record(directory / "process-0")["models"][0]["name"] == "Net"
    # The second process did not train.
    assert not (directory / "process-1").exists()


def test_a_forked_child_is_counted_and_not_watched(tmp_path):
    directory, err = compare(tmp_path, FORK)
    assert record(directory)["saw"][1:] == ["1 process was forked; computations in it were not inspected"]
    assert err.count("\nComputes in FP32: ") == 1
    assert not list(directory.glob("process-*"))


def test_workers_of_data_loaders_are_not_reported(tmp_path):
    directory, _ = compare(tmp_path, LOADERS)
    assert not any("process" in sentence for sentence in record(directory)["saw"])


@pytest.mark.parametrize(
    ("ending", "outcome"), [(LEAVE, "left by os._exit, status 4"), (REPLACE, "replaced by another")]
)
def test_the_report_is_written_before_an_exit_without_handlers(ending, outcome, tmp_path):
    directory, err = compare(tmp_path, ending)
    assert record(directory)["outcome"].startswith(outcome)
    assert (directory / "report.json").exists()
    assert "\nComputes in FP32: " in err


RANKS = """
import torch
from torch import distributed
class Net(torch.nn.Linear): ...
distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(Net(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
del model  # As in examples/unmodified/ddp.py.
distributed.destroy_process_group()
"""


#: Another model, sharded.
SHARDED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
class Sharded(torch.nn.Linear): ...
sharded = fully_shard(Sharded(4, 2), mesh=init_device_mesh("cpu", (2,)))
of_sharded = torch.optim.SGD(sharded.parameters(), 0.1)
sharded(torch.ones(2, 4)).sum().backward()
of_sharded.step()
"""


def test_ranks_share_a_run_directory_and_the_first_reports(tmp_path):
    folder = tmp_path / "work"
    sharded = "" if sharded_training.NO_FSDP2 else SHARDED
    write(folder, RANKS.replace("del model", f"{sharded}del model"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = [*torchrun, "-m", "mpinspect", "run", "train.py"]
    # The launcher is forked; each rank is a new interpreter.
    ended = run(folder, command, forked=True)
    assert ended.status == 0, ended.err
    (directory,) = (folder / "runs").iterdir()
    assert [record(directory / f"rank{rank}")["rank"] for rank in range(2)] == [0, 1]
    assert ended.err.count("mpinspect: rank 0: recording into") == ended.err.count("recording into") == 1
    assert ended.err.count("mpinspect run train.py\n") == ended.err.count("the whole report: ") == 1
    assert "The counts of all 2 ranks are added up" in (directory / "rank0" / "report.md").read_text()
    # The page of the whole job has a switch between the sum and the ranks.
    assert f"the whole report: runs/{directory.name}/report.html (" in ended.err
    page = (directory / "report.html").read_text()
    assert "all ranks&quot;" in page
    assert "rank 1&quot;" in page
    assert "rank 1&quot;" not in (directory / "rank0" / "report.html").read_text()
    found = {part.name: part.ranges.session for part in read_run(directory).parts}
    # DDP ranks each count their own gradients; FSDP ranks count shards of one gradient.
    elements = {"Net": 16, "Sharded": 8} if sharded else {"Net": 16}
    counted = {name: session.totals()[TensorKey("weight", WEIGHT_GRADIENT)] for name, session in found.items()}
    assert {name: window.histogram.total for name, window in counted.items()} == elements
    assert {len(session.ranks) for session in found.values()} == {2}


#: A data-parallel network; a product overflows FP16 on one rank.
OVERFLOWS = """
import torch
from torch import distributed, nn
class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1)
    def forward(self, x):
        gated = self.a(x) * self.b(x)
        return self.out(gated)
distributed.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Gate())
optimizer, scaler = torch.optim.SGD(model.parameters(), 1e-3), torch.amp.GradScaler("cpu", init_scale=64.0)
for step in range(8):
    x = torch.randn(32, 16)
    if distributed.get_rank() == 1 and step >= 4:
        x[0] *= 3000
    with torch.autocast("cpu", torch.float16):
        loss = model(x).float().square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
distributed.barrier()
del model  # As in examples/unmodified/ddp.py.
distributed.destroy_process_group()
"""


def test_an_overflow_on_one_rank_is_named_with_its_line(tmp_path):
    folder = tmp_path / "work"
    write(folder, OVERFLOWS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    ended = run(folder, [*torchrun, "-m", "mpinspect", "run", "train.py"], forked=True)
    assert ended.status == 0, ended.err
    (directory,) = (folder / "runs").iterdir()
    (part,) = read_run(directory).parts
    (found,) = [each for each in part.ranges.findings if each.id == "overflow-in-operator"]
    line = 1 + OVERFLOWS.splitlines().index("        gated = self.a(x) * self.b(x)")
    assert (found.severity, found.evidence["operator"], found.evidence["line"]) == ("error", "mul", f"train.py:{line}")
    assert "That was on rank 1." in found.message
    # What reaches the other rank's weights is not blamed on its own operators.
    assert "breaks-in-fp32-too" not in {each.id for each in part.ranges.findings}
    errors = [
        each for each in part.ranges.session.measurements if each.what == "second-gradients" and each.text == "float16"
    ]
    assert errors
    assert all(0 < each.figures["error"] < 0.1 for each in errors if each.step < 4)


#: A network on each rank; it breaks at the step that the arguments give for its rank, if any.
BREAKS = """
import os, sys, torch
breaks = sys.argv[1:][int(os.environ["RANK"])]
class Net(torch.nn.Linear): ...
model = Net(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.0)
for step in range(5):
    scale = float("inf") if str(step) == breaks else 1.0
    (model(torch.ones(2, 4)) * scale).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    for parameter in model.parameters(): parameter.data.fill_(1.0)
if breaks == "error": raise ValueError("rank")
"""


def rank_after_rank(tmp_path, *steps):
    """Run rank 1, then rank 0, as one job; return their stderr, rank 0's first."""
    folder = tmp_path / "work"
    write(folder, BREAKS)
    second, first = (
        watched(folder, "train.py", *steps, env={"WORLD_SIZE": "2", "RANK": rank}, forked=True).err for rank in "10"
    )
    return first, second


def test_a_rank_that_broke_earlier_leads_the_first_ranks_report(tmp_path):
    first, second = rank_after_rank(tmp_path, "3", "1")
    assert second.startswith("mpinspect: rank 1: step 1, ")
    assert len(second.splitlines()) == 1
    directory = tmp_path / RUN_DIR
    lines = first.splitlines()
    assert lines[0].startswith(f"mpinspect: rank 0: recording into {directory} (")
    assert lines[1].startswith("mpinspect: rank 0: step 3, ")
    report = json.loads((directory / "rank0" / "report.json").read_text())
    assert report["first_line"].startswith("rank 1, step 1, ")
    assert "\nrank 1, step 1, " in first
    (model,) = report["models"]
    assert [(event["step"], event["rank"]) for event in model["ranges"]["events"]][:2] == [(1, 1), (3, 0)]
    assert report["log_dir"] == str(directory)


def test_a_rank_that_broke_later_or_failed_does_not_lead(tmp_path):
    rank_after_rank(tmp_path, "1", "3")
    report = json.loads((tmp_path / RUN_DIR / "rank0" / "report.json").read_text())
    assert report["first_line"].startswith("rank 0, step 1, ")
    assert not any(sentence.startswith("rank 1") for sentence in report["saw"])


def test_a_rank_that_failed_is_named_and_reports_for_all(tmp_path):
    first, second = rank_after_rank(tmp_path, "none", "error")
    report = json.loads((tmp_path / RUN_DIR / "rank0" / "report.json").read_text())
    assert report["saw"][0] == "rank 1 ended by ValueError: rank"
    assert report["first_line"] == ""
    cause = "Error: Rank 1 ended in step 5 by ValueError: rank."
    assert cause in report["models"][0]["ranges"]["verdict"]["sentences"][0]
    # Both ranks report it, since a launcher might have stopped the first rank earlier.
    assert cause in first
    assert cause in second
    assert "mpinspect: the whole report: " in second


def test_a_second_rank_that_fails_leaves_the_report_to_the_first(tmp_path):
    first, second = rank_after_rank(tmp_path, "error", "error")
    assert "\nError: " in second
    assert "\nError: " not in first
    assert record(tmp_path / RUN_DIR / "rank0")["outcome"] == "ValueError: rank"


#: Rank 1 is killed at its first line, or after some training.
DIES = """
import os, signal, sys, torch
is_to_die = os.environ["RANK"] == "1"
def die(): os.kill(os.getpid(), signal.SIGKILL)
if is_to_die and sys.argv[1] == "at once": die()
class Net(torch.nn.Linear): ...
model = Net(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(20):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    if is_to_die and step == 18: die()
print(model.weight.sum().item())
"""


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_killed_rank_is_named_with_its_step_and_the_other_is_unaffected(when, tmp_path):
    folder = tmp_path / "work"
    write(folder, DIES)
    ranks = {rank: {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": rank} for rank in "10"}
    second, first = (
        watched(folder, "train.py", when, options=["--full"], env=env, forked=True) for env in ranks.values()
    )
    assert second.status == -9
    alone = bare(folder, "train.py", when, env=ranks["0"], forked=True)
    assert (first.status, first.out) == (alone.status, alone.out)
    directory, dead = tmp_path / RUN_DIR, "ended without a report (killed, or it crashed)"
    for text in (first.err, str(read_run(directory))):
        said = " ".join(text.split())
        if when == "at once":
            assert f"rank 1 of 2 left no record that can be added: no model was recorded ({dead})" in said
        else:
            ended = re.search(
                r"Rank 1 ended (after step \d+|in step 0 or later) without a report \(killed, or it", said
            )
            wrote = re.search(r"The record of rank 1 ends at step (\d+); the others' at 20", said)
            assert ended is not None
            assert wrote is not None
            # The step of its last write; it writes at most once a second.
            steps = int(wrote[1])
            assert steps in range(20)
            assert ended[1] == (f"after step {steps - 1}" if steps else "in step 0 or later")
        assert "still running" not in said
    # Rank 0's sum over all ranks is completed with the last data of both.
    whole = directory / ALL_RANKS / "Net" / "session.mpinspect"
    assert whole.exists() == (when == "later")
    if when == "later":
        merged, (part,) = read_session(whole), read_run(directory).parts
        assert merged.totals() == part.ranges.session.totals()


@pytest.mark.slow
def test_torchrun_kills_the_others_of_a_dead_rank_and_the_report_names_it(tmp_path):
    folder = tmp_path / "work"
    dies = "\nimport os, signal\nif distributed.get_rank() == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
    step = RANKS[RANKS.index("model(") : RANKS.index("del model")]
    write(folder, RANKS.replace("del model", f"{dies}{step}del model"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = [*torchrun, "-m", "mpinspect", "run", "--log-dir", "here", "train.py"]
    assert run(folder, command, forked=True).status == 1
    said = " ".join(str(read_run(folder / "here")).split())
    dead = r"without a report \(killed, or it crashed\)"
    # The launcher may stop rank 0 before its collective fails. A rank that was killed before it wrote a whole step, as happens
    # on a busy machine, is only known to have started.
    killed = "after step 0|in step 0 or later"
    last = rf"Then rank 0 ended (in step 1 by \w+ in a collective|({killed}) by a SIGTERM)"
    assert re.search(rf"Rank 1 ended (in one of steps 0-1|in step 1|{killed}) {dead}\. {last}", said)


#: A rank that is stopped while it waits in C code, after one of its children has been stopped.
WAITS = """
import ctypes, os, signal, threading, torch
if not os.fork(): os.kill(os.getpid(), signal.SIGTERM)
os.wait()
if %r: os._exit(0)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
ctypes.CDLL(None).sleep(60)
"""


@pytest.mark.parametrize("leaves", [False, True])
def test_a_rank_stopped_by_its_launcher_still_records_its_end(leaves, tmp_path):
    folder = tmp_path / "work"
    write(folder, WAITS % leaves)
    began = time.monotonic()
    ended = watched(folder, "train.py", env={"WORLD_SIZE": "2", "RANK": "0"}, forked=True)
    assert time.monotonic() - began < 30
    found = read_record(tmp_path / RUN_DIR / "rank0").outcome
    if leaves:
        assert (ended.status, found) == (0, "left by os._exit, status 0")
    else:
        assert (ended.status, found) == (-signal.SIGTERM, "ended by a SIGTERM")
    assert (tmp_path / RUN_DIR / "rank0" / ".sigterm").exists() != leaves


def test_a_running_rank_is_waited_for_briefly_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr("mpinspect.run.joining._ENDS_WITHIN_S", 0.2)
    for rank, outcome in enumerate(("running", "running", "ended")):
        model = tmp_path / f"rank{rank}" / "Net"
        model.mkdir(parents=True)
        session = sessions.word_model()
        session = dataclasses.replace(session, info=dataclasses.replace(session.info, rank=rank, world_size=4))
        session.save(model)
        running = {"process": os.getpid(), "host": platform.node(), "world_size": 4}
        (model.parent / "run.json").write_text(json.dumps({"command": "train.py", "outcome": outcome} | running))
        if not rank:
            own = RecordedModel("Net", session)
    others = [tmp_path / "rank1", tmp_path / "rank2"]
    began = time.monotonic()
    (model,), read, notes = with_ranks([own], tmp_path / "rank0", others, outcome=Outcome())
    assert time.monotonic() - began < 5
    assert [rank.info.rank for rank in model.session.ranks] == [0, 1, 2]
    assert read == others
    assert notes == [
        "rank 3 of 4 left no record that can be added: no folder here",
        "rank 1 had not ended: only data already on disk is included, mpinspect report adds the rest",
    ]


# -- the parts --------------------------------------------------------------------------------------------------------


def ending(path):
    return Ending(LaunchOptions("train.py"), path, {}, speaks=False)


def test_a_payload_that_can_not_be_unpickled_does_no_harm(tmp_path, monkeypatch):
    text = pickle.dumps({"payload": processes.SpawnPayload(LaunchOptions("train.py"), tmp_path, True)})
    begun = []
    monkeypatch.setattr(processes, "begin_in_child", lambda *given: begun.append(given))
    assert pickle.loads(text) == {"payload": None}
    assert begun == [(LaunchOptions("train.py"), str(tmp_path), True)]
    # As in a child that can't import mpinspect.
    monkeypatch.setitem(sys.modules, "mpinspect.run", None)
    assert pickle.loads(text) == {"payload": None}
    assert len(begun) == 1


def test_a_report_is_made_once_and_never_after_a_fork(tmp_path, capfd):
    first, child = ending(tmp_path / "first"), ending(tmp_path / "child")
    first.finish()
    written = (tmp_path / "first" / "run.json").stat()
    first.finish()
    assert (tmp_path / "first" / "run.json").stat() == written
    child.abandon()
    child.finish()
    child.watch()
    assert not (tmp_path / "child").exists()
    assert capfd.readouterr() == ("", "")


def test_a_child_that_fails_is_recorded_if_it_might_have_trained(tmp_path, capfd):
    for number, torch_imported in enumerate((False, True)):
        directory = tmp_path / f"process-{number}"
        child = Ending(LaunchOptions("train.py"), directory, {}, speaks=False, leaves_no_trace=True)
        child.seen.torch_imported = torch_imported
        child.outcome = outcome_of(ValueError("early"))
        child.finish()
        assert directory.exists() == torch_imported
    assert capfd.readouterr() == ("", "mpinspect: process-1 ended by ValueError: early\n")


@pytest.mark.parametrize("record", ["", "[]", "null", '{"by_error": true}', '{"by_error": "yes", "outcome": 3}'])
def test_damaged_files_of_other_processes_are_tolerated(record, tmp_path):
    from mpinspect.run.report import RunReport

    for name in ("rank0", "rank1", "rank10", "rank2", "ranks", "process-x"):
        (tmp_path / name / "Net").mkdir(parents=True)
        (tmp_path / name / "Net" / "session.mpinspect").write_bytes(b"no session")
        (tmp_path / name / "run.json").write_text(record)
    others = others_of(tmp_path / "rank0", tmp_path)
    assert [path.name for path in others] == ["rank1", "rank2", "rank10"]
    report = with_others(RunReport("train.py", "ended"), others)
    assert report.first_line == ""
    assert len(report.saw) == (3 if "true" in record else 0)


SIGTERMS = """
import os, signal, sys
from mpinspect.run.sigterm import Sigterm
if "handles" in sys.argv: signal.signal(signal.SIGTERM, lambda *_: print("handled"))
def report():
    if has_begun: return
    has_begun.append(True)
    if "during" in sys.argv: os.kill(os.getpid(), signal.SIGTERM)
    print("report", flush=True)
    sigterm.let_through()
has_begun, sigterm = [], Sigterm(report)
sigterm.put_off()
if "before" in sys.argv: os.kill(os.getpid(), signal.SIGTERM)
report()
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, flush=True)
"""


@pytest.mark.parametrize(
    ("words", "out", "status"),
    [
        (["before"], "report", -signal.SIGTERM),
        (["during"], "report", -signal.SIGTERM),
        ([], "report True", 0),
        (["handles", "during"], "handled report False", 0),
    ],
)
def test_sigterm_ends_the_process_after_the_report(words, out, status):
    ended = subprocess.run([sys.executable, "-c", SIGTERMS, *words], capture_output=True, text=True, check=False)
    assert (ended.stdout.split(), ended.returncode) == (out.split(), status), ended.stderr


#: A rank that fails, and that its launcher stops while Python prints the exception.
STOPPED = """
import os, signal, sys, torch
class Net(torch.nn.Linear): ...
model = Net(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
sys.excepthook = lambda *error: os.kill(os.getpid(), signal.SIGTERM)
raise RuntimeError("Connection closed by peer")
"""


def test_a_rank_stopped_while_its_exception_is_printed_still_reports(tmp_path):
    folder = tmp_path / "work"
    write(folder, STOPPED)
    ended = watched(folder, "train.py", env={"WORLD_SIZE": "2", "RANK": "0"}, forked=True)
    assert ended.status == -signal.SIGTERM
    assert record(tmp_path / RUN_DIR / "rank0")["outcome"] == "RuntimeError: Connection closed by peer"
    assert "Rank 0 ended in step 1 by RuntimeError in a collective." in " ".join(ended.err.split())


def test_a_directory_that_can_not_be_written_at_the_end_is_reported_in_one_line(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    ending(tmp_path / "file").finish()
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"mpinspect: the report can't be written to {tmp_path / 'file'}: ")
    assert err.count("\n") == 1


def test_an_import_callback_runs_once_and_its_error_does_not_reach_the_import(tmp_path, monkeypatch):
    (tmp_path / "told_module.py").write_text("value = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen, finders = [], list(sys.meta_path)

    def callback():
        seen.append(sys.modules["told_module"].value)
        raise ValueError

    when_imported("told_module", callback)
    import told_module

    assert seen == [told_module.value] == [1]
    assert sys.meta_path == finders
    assert "exec_module" not in vars(told_module.__loader__)
    when_imported("told_module", callback)
    assert seen == [1, 1]
    monkeypatch.delitem(sys.modules, "told_module")


def test_the_callback_runs_when_a_failed_import_is_repeated(tmp_path, monkeypatch):
    path = tmp_path / "late_module.py"
    path.write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    seen = []
    when_imported("late_module", lambda: seen.append(1))
    with pytest.raises(ZeroDivisionError):
        import late_module
    path.write_text("value = 10")
    import late_module

    assert seen == [1]
    assert late_module.value == 10
    monkeypatch.delitem(sys.modules, "late_module")
