"""A finding's code names the line of the training loop at which it goes, and has the loop's own names."""

import os
from dataclasses import replace
from textwrap import dedent, indent

import pytest
import torch
from agreeing_reports import analyse
from torch import nn

from mpinspect import Inspector
from mpinspect.ranges.records import LoopLine, recorded
from mpinspect.ranges.report.place import began

MADE = """
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.01)
amp = torch.amp.GradScaler("cpu", init_scale=1024.0)
"""
CLIPPED = """
with torch.autocast("cpu", torch.float16):
    y = net(torch.randn(16, 8))
opt.zero_grad()
cost = y.float().square().mean()
amp.scale(cost).backward()
nn.utils.clip_grad_norm_(net.parameters(), 0.1)
amp.step(opt)
amp.update()
"""
FORGOTTEN = """
cost = net(torch.randn(16, 8)).square().mean()
cost.backward()
opt.step()
"""
UNSCALED = """
opt.zero_grad()
with torch.autocast("cpu", torch.float16):
    y = net(torch.randn(16, 8))
y.float().mean().backward()
opt.step()
"""


def session_of(folder, loop, made=MADE, steps=6):
    """Run a script, and return its session and the number of the line of each of its statements."""
    script = (
        f"{made}with Inspector(net) as inspector:\n    for step in range({steps}):\n{indent(dedent(loop), ' ' * 8)}"
    )
    path = folder / f"{folder.name}.py"
    path.write_text(script, "utf-8")
    os.utime(path, (0, 0))
    names = {"torch": torch, "nn": nn, "Inspector": Inspector, "__name__": "script"}
    torch.manual_seed(0)
    exec(compile(script, str(path), "exec"), names)
    numbers = {text.strip(): f"{path.name}:{number}" for number, text in enumerate(script.splitlines(), 1)}
    return names["inspector"].session(), numbers


def test_each_line_of_the_loop_is_recorded_once(tmp_path):
    session, numbers = session_of(tmp_path, CLIPPED)
    found = [(each.text, *each.names) for each in recorded(session.measurements, LoopLine)]
    assert len(found) == len({role for role, *_ in found})
    lines = {
        "forward": ("", "y = net(torch.randn(16, 8))"),
        "backward": ("", "amp.scale(cost).backward()"),
        "clip": ("", "nn.utils.clip_grad_norm_(net.parameters(), 0.1)"),
        "step": ("", "amp.step(opt)"),
        "optimizer": ("opt", "opt = torch.optim.SGD(net.parameters(), lr=0.01)"),
        "scaler": ("amp", 'amp = torch.amp.GradScaler("cpu", init_scale=1024.0)'),
        "loss": ("cost", "cost = y.float().square().mean()"),
        "model": ("net", "net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))"),
    }
    assert {role: (name, line) for role, name, line in found} == {
        role: (name, numbers[text]) for role, (name, text) in lines.items()
    }


@pytest.mark.parametrize(
    ("loop", "id", "at", "code"),
    [
        (CLIPPED, "unscale-missing", "nn.utils.clip_grad_norm_(net.parameters(), 0.1)", "amp.unscale_(opt)"),
        (FORGOTTEN, "gradients-never-zeroed", "opt.step()", "opt.zero_grad()"),
        (UNSCALED, "scaler-missing-in-float16", "y.float().mean().backward()", "scaler.step(opt)"),
        (
            UNSCALED,
            "scaler-missing-in-float16",
            "y.float().mean().backward()",
            "scaler.scale(y.float().mean()).backward()",
        ),
    ],
)
def test_code_names_its_line_and_has_the_names_of_the_loop(tmp_path, loop, id, at, code):
    session, numbers = session_of(tmp_path, loop)
    report = analyse(session)
    finding = next(each for each in report.findings if each.id == id)
    assert finding.evidence["change_at"] == numbers[at]
    assert f"{numbers[at]}: " in finding.code
    assert code in finding.code.splitlines()
    assert numbers[at] in began(report).headline


def test_a_name_that_is_assigned_twice_has_no_line(tmp_path):
    session, _ = session_of(tmp_path, CLIPPED, MADE.replace("opt =", "opt = None\nopt ="))
    found = {each.text: each.names for each in recorded(session.measurements, LoopLine)}
    assert found["optimizer"] == ("opt", "")
    assert "model" not in found


def test_calls_of_a_helper_whose_line_lacks_them_are_left_out(tmp_path):
    helper = "def take(y, opt):\n    y.float().mean().backward(), opt.step()\n"
    session, numbers = session_of(tmp_path, "y = net(torch.randn(16, 8))\ntake(y, opt)", MADE + helper)
    found = {each.text: each.names[1] for each in recorded(session.measurements, LoopLine)}
    assert found["backward"] == found["step"] == numbers["y.float().mean().backward(), opt.step()"]
    assert found["forward"] == numbers["y = net(torch.randn(16, 8))"]


def test_code_without_a_known_line_names_the_call(tmp_path):
    session, _ = session_of(tmp_path, CLIPPED)
    bare = [each for each in session.measurements if each.what != LoopLine.kind]
    finding = analyse(replace(session, measurements=tuple(bare))).findings[0]
    assert finding.code == "# before clip_grad_norm_()\nscaler.unscale_(optimizer)"
    assert "change_at" not in finding.evidence
