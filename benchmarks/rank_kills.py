"""Kills ranks at random: two train under ``mpinspect run``, one receives a SIGKILL, and all their files are read.

    python benchmarks/rank_kills.py [--runs 100] [--seed 0] [--json benchmarks/results/rank_kills-cpu.json]

Each run has two gloo processes under DistributedDataParallel, forked from a process that has imported torch. The time of the
kill is drawn uniformly from the duration of a run without a kill, so some ranks die before they have a folder and some at their
end. The other rank ends by itself: gloo notices the missing rank, or waits for it until the training's limit. A run that takes
longer than LIMIT_S counts as a hang. During training, rank 0 adds up all ranks every half second.
"""

from __future__ import annotations

import atexit
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.utils.tensorboard
from machine import arguments, write_results

from mpinspect.commands import cli
from mpinspect.counting import fastest
from mpinspect.ranges.store import SessionError, read_session
from mpinspect.run.reading import read_run
from mpinspect.run.record import read_record
from mpinspect.runtime import background

RANKS, LIMIT_S = 2, 60.0
#: Seconds between two sums during a run.
SUM_EVERY_S = 0.5
SCRIPT = """
import datetime, os, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.FileStore("store", world)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=8))
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(150):
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    time.sleep(0.01)
"""


def start(rank: int, folder: Path) -> int:
    """Fork a rank that runs the script under ``mpinspect run`` and exits as Python does; return its process id."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        os.chdir(folder)
        out = os.open(f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(out, stream)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS), GLOO_SOCKET_IFNAME="lo")
        background._FIRST_S = background._INTERVAL_S = SUM_EVERY_S
        background._COST_FACTOR = 1
        sys.argv = ["mpinspect", "run", "--log-dir", "run", "train.py"]
        try:
            status = cli.main(sys.argv[1:])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except Exception:
            # Python prints the exception that ends a script, too.
            traceback.print_exc()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def one_run(folder: Path, killed: int | None, after_s: float) -> dict[str, Any]:
    """Train, kill a rank after some seconds, and return the state of the ranks and their files."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    began = time.monotonic()
    processes = {start(rank, folder): rank for rank in range(RANKS)}
    statuses: dict[int, int] = {}
    is_killed = False
    while processes:
        now = time.monotonic() - began
        if killed is not None and not is_killed and now >= after_s:
            is_killed = True
            for process, rank in processes.items():
                if rank == killed:
                    os.kill(process, signal.SIGKILL)
        if now > LIMIT_S:
            for process in processes:
                os.kill(process, signal.SIGKILL)
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended:
            statuses[processes.pop(ended)] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.005)
    took = time.monotonic() - began
    return {"took_s": took, "is_hang": took > LIMIT_S, "statuses": statuses} | left(folder / "run", killed, statuses)


def left(place: Path, killed: int | None, statuses: dict[int, int]) -> dict[str, Any]:
    """Read each session file and the whole run; check whether the report names the killed rank."""
    files = [file for file in place.rglob("session.mpinspect*") if file.name == "session.mpinspect"]
    unreadable = []
    for file in files:
        try:
            session = read_session(file)
        except (SessionError, OSError) as error:
            unreadable.append(f"{file.relative_to(place)}: {error}")
            continue
        unreadable += [f"{file.relative_to(place)}: {note}" for note in session.notes if "damaged" in note]
    moment = "after it had ended"
    if killed is not None and statuses[killed] == -signal.SIGKILL:
        folder = place / f"rank{killed}"
        has_session = any(folder.glob("*/session.mpinspect"))
        moment = "while it trained" if has_session else "before its session" if folder.exists() else "before its folder"
        if read_record(folder).ended:
            moment = "after its report"
    try:
        text = " ".join(str(read_run(place)).split())
    except (SessionError, OSError) as error:
        return {"files": len(files), "unreadable": [*unreadable, str(error)], "moment": moment, "is_named": False}
    # Rank 0 reports for the run, and its end is also shown next to its command.
    said = (
        f"ank {killed} ended.{{0,40}} without a report|ank{killed}: ended without|ank {killed} of {RANKS} left nothing"
    )
    named = re.search(said if killed else f"{said}|train.py: ended without a report", text)
    return {
        "files": len(files),
        "unreadable": unreadable,
        "moment": moment,
        "is_named": named is not None,
    }


def measure(runs: int, seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    # Not a TemporaryDirectory, whose clean-up at exit would also run in the forked ranks.
    directory = tempfile.mkdtemp()
    try:
        whole = one_run(Path(directory, "whole"), None, 0.0)
        if any(whole["statuses"].values()) or whole["unreadable"]:
            raise RuntimeError(f"a run without a kill did not end well: {whole}")
        found = []
        for number in range(runs):
            drawn = draw.randrange(RANKS), draw.uniform(0.0, whole["took_s"])
            found.append({"killed": drawn[0]} | one_run(Path(directory, str(number)), *drawn))
            print(number, drawn, {name: value for name, value in found[-1].items() if value}, flush=True)
    finally:
        shutil.rmtree(directory)
    moments: Counter[str] = Counter(each["moment"] for each in found)
    died = [each for each in found if not each["moment"].startswith("after")]
    others: Counter[str] = Counter(
        "ended" if status == 0 else "raised" if status > 0 else "signal"
        for each in found
        for rank, status in each["statuses"].items()
        if rank != each["killed"]
    )
    return {
        "runs": runs,
        "ranks": RANKS,
        "seed": seed,
        "seconds_without_a_kill": whole["took_s"],
        "killed": dict(moments),
        "died_before_its_report": len(died),
        "named_in_the_report": sum(each["is_named"] for each in died),
        "the_other_rank": dict(others),
        "files": sum(each["files"] for each in found),
        "unreadable": [sentence for each in found for sentence in each["unreadable"]],
        "hangs": sum(each["is_hang"] for each in found),
        "longest_s": max(each["took_s"] for each in found),
    }


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    fastest.warm_up(compile_here=True)
    results = measure(options.runs, options.seed)
    print(results)
    if options.json:
        write_results(options.json, results)
    return 1 if results["hangs"] or results["unreadable"] else 0


if __name__ == "__main__":
    sys.exit(main())
