"""A script that never detaches its Inspector: the recording is written at any kind of exit."""

import sys
from pathlib import Path

import launched
import numpy as np
import pytest
import torch
from torch import nn

from mpinspect import Inspector, Session
from mpinspect.ranges.kinds import WEIGHT_GRADIENT
from mpinspect.ranges.windows.tensors import TensorKey

_TRAINS = """
import os, sys, warnings, torch, mpinspect
from torch import nn

# torch 2.6 makes a temporary folder with an optimizer, and removes it only at the interpreter's end.
warnings.filterwarnings("ignore", "Implicitly cleaning up", ResourceWarning)

def train(steps=7):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inspector = mpinspect.Inspector(model, optimizers=optimizer, log_dir=sys.argv[1]).attach()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    return model, optimizer, inspector
"""

_ENDS = {
    "everything is alive": "everything = train()",
    "the inspector is dropped": "model, optimizer, _ = train(); del _",
    "it all was a function's": "train()",
    "it was somebody's reference cycle": "loop = [train()]; loop.append(loop); del loop",
    "a forked child ends first": """
everything = train()
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
""",
}


def _run(tmp_path: Path, code: str, *, warnings: str = "error", forked: bool = True) -> launched.Ended:
    """Run with a normal interpreter shutdown; ``forked`` from a process that has imported torch."""
    launched.write(tmp_path, _TRAINS + code)
    return launched.run(tmp_path, [sys.executable, "-W", warnings, "train.py", str(tmp_path / "run")], forked=forked)


def _check(tmp_path: Path, steps: int = 7) -> Session:
    session = Session.load(tmp_path / "run")
    assert session.progress.ended
    assert session.progress.steps == steps
    assert session.totals()[TensorKey("0.weight", WEIGHT_GRADIENT)].samples == steps
    return session


@pytest.mark.parametrize("end", _ENDS.values(), ids=_ENDS.keys())
def test_all_steps_are_written(tmp_path: Path, end: str) -> None:
    ran = _run(tmp_path, end, forked=end != _ENDS["everything is alive"])
    assert (ran.status, ran.out, ran.err) == (0, "", "")
    _check(tmp_path)


def test_the_session_is_complete_after_an_exception(tmp_path: Path) -> None:
    ran = _run(tmp_path, "everything = train()\nraise RuntimeError('theirs')")
    assert ran.status == 1
    assert ran.err.strip().endswith("RuntimeError: theirs")
    _check(tmp_path)


def test_an_interrupted_step_is_not_counted(tmp_path: Path) -> None:
    code = """
model, optimizer, inspector = train()
model(torch.randn(3, 4)).sum().backward()
raise KeyboardInterrupt
"""
    assert _run(tmp_path, code).status != 0
    assert Session.load(tmp_path / "run").progress.steps == 7


def test_an_internal_error_at_the_end_is_a_warning(tmp_path: Path) -> None:
    code = """
everything = train()
def fails():
    raise RuntimeError("ours")
everything[2]._capture.detach = fails
"""
    ran = _run(tmp_path, code, warnings="default")
    assert ran.status == 0
    assert "the inspector failed to close: RuntimeError('ours')" in ran.err
    assert "Traceback" not in ran.err


def _attached(log_dir: Path | None) -> tuple[nn.Module, Inspector]:
    model = nn.Linear(2, 1)
    inspector = Inspector(model, log_dir=log_dir).attach()
    model(torch.ones(1, 2)).sum().backward()
    return model, inspector


_SEVERAL = """
import multiprocessing
if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=train)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


def test_the_session_is_complete_after_a_process_of_multiprocessing(tmp_path: Path) -> None:
    """A forked process exits by os._exit, without running atexit functions."""
    ran = _run(tmp_path, _SEVERAL)
    assert (ran.status, ran.out, ran.err) == (0, "", "")
    _check(tmp_path)


def test_a_detach_interrupted_by_ctrl_c_is_completed_at_exit(tmp_path: Path) -> None:
    code = """
model, optimizer, inspector = train()
collect = inspector._capture.collect
def interrupted(wait):
    inspector._capture.collect = collect
    raise KeyboardInterrupt
inspector._capture.collect = interrupted
inspector.detach()
"""
    ran = _run(tmp_path, code)
    assert ran.status != 0
    session = Session.load(tmp_path / "run")
    assert session.progress.ended
    assert session.progress.steps == 7


def test_a_dropped_inspector_continues_without_hooks_between_samples(tmp_path: Path) -> None:
    code = """
import gc
train(2)
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mpinspect.Inspector(model, optimizers=optimizer, log_dir=sys.argv[1] + "-b", every=5, watch=False).attach()
for step in range(21):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    gc.collect()
"""
    ran = _run(tmp_path, code)
    assert (ran.status, ran.err) == (0, "")
    progress = Session.load(tmp_path / "run-b").progress
    assert (progress.steps, progress.sampled_steps, progress.ended) == (21, 5, True)


#: Holds the globals of __main__ until torch's modules have been cleared, like dill's reference to __main__.
_KEEPS_MAIN = """
import sys
sys.kept = sys.modules["__main__"]
"""
_TRAINS_UNSEEN = (
    _KEEPS_MAIN
    + """
import os, types, torch
from torch import nn

def train():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    return model, optimizer

class AtTheEnd:
    # Calls a function when the interpreter drops it, among its last globals.
    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments
    def __del__(self):
        self.function(*self.arguments)
"""
)
_HELD = {
    "globals": "model, optimizer = train()",
    "a cycle of a global": "kept = [*train()]; kept.append(kept)",
    "a module": "kept = types.ModuleType('kept'); sys.modules['kept'] = kept; kept.both = train(); torch.kept = kept",
    "a forked child's globals": "model, optimizer = train()\nif os.fork() == 0:\n    sys.exit(0)\nos.wait()",
    "os._exit of a finalizer": "both = train(); last = AtTheEnd(os._exit, 5)",
    "os.execv of a finalizer": "both = train(); last = AtTheEnd(os.execv, sys.executable, [sys.executable, '-c', 'print(3)'])",
    "gc.freeze of a finalizer": "import gc; both = train(); last = AtTheEnd(gc.freeze)",
}


@pytest.mark.parametrize("code", _HELD.values(), ids=_HELD.keys())
def test_mpinspect_raises_no_error_during_interpreter_shutdown(tmp_path: Path, code: str) -> None:
    launched.write(tmp_path / "work", _TRAINS_UNSEEN + code)
    alone, ran = launched.silent(tmp_path / "work", "train.py", forked=True)
    assert ran == alone
    assert (ran.status in (0, 5), ran.err) == (True, "")


_LEFT = {
    "globals": "everything = train()",
    "a forked child": "everything = train()\nif os.fork() == 0:\n    sys.exit(0)\nos.wait()",
    "a file that nobody closes": """
from mpinspect.ranges.session import (RunInfo)
from mpinspect.ranges.store import SessionWriter
everything = SessionWriter(sys.argv[1], RunInfo())
""",
    "a generator that nobody ends": """
def loop():
    model = nn.Linear(4, 1)
    with mpinspect.Inspector(model, log_dir=sys.argv[1]):
        while True:
            model(torch.ones(3, 4)).sum().backward()
            yield
everything = loop()
next(everything)
""",
    "a generator with a recorder": """
def loop():
    with mpinspect.Recorder(log_dir=sys.argv[1]):
        yield
everything = loop()
next(everything)
""",
    "a recorder of a forked child": """
everything = mpinspect.Recorder(log_dir=sys.argv[1])
if os.fork() == 0:
    sys.exit(0)
os.wait()
""",
}


@pytest.mark.parametrize("code", _LEFT.values(), ids=_LEFT.keys())
def test_an_inspector_that_outlives_the_modules(tmp_path: Path, code: str) -> None:
    ran = _run(tmp_path, _KEEPS_MAIN + code)
    assert (ran.status, ran.out, ran.err) == (0, "", "")
    assert Session.load(tmp_path / "run").progress is not None


def test_detaching_removes_the_exit_handler(tmp_path: Path) -> None:
    code = """
model, optimizer, inspector = train()
inspector.detach()
inspector._at_exit._end = lambda: print("ended again")
inspector.detach()
"""
    ran = _run(tmp_path, code)
    assert (ran.status, ran.out, ran.err) == (0, "", "")
    _check(tmp_path)


def test_an_inspector_without_files_has_no_exit_handler() -> None:
    with Inspector(nn.Linear(2, 1)) as inspector:
        assert inspector._at_exit is None


def test_numbers_of_numpy_are_numbers() -> None:
    model = nn.Linear(2, 1)
    inspector = Inspector(model, max_overhead=np.float32(0.25), loss_scale=np.float32(8))
    assert inspector.session().info.max_overhead == 0.25
    with inspector:
        (model(torch.ones(1, 2)).sum() * 8).backward()
    assert inspector.session().progress.scales[0].scale == 8.0
    assert type(inspector.session().progress.scales[0].scale) is float


def test_before_the_first_step_no_step_of_a_budget_is_sampled() -> None:
    text = " ".join(str(Inspector(nn.Linear(2, 1), max_overhead=0.02).report()).split())
    assert "sampled none so far" in text
    assert "all 0 steps" not in text
