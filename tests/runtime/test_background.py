"""The background thread runs calls in order, can be waited for, and never runs in a forked child."""

import os
import subprocess
import sys
import textwrap
import threading

import pytest

from mpinspect.runtime import background
from mpinspect.runtime.background import Background, give_way


def test_calls_run_in_order_on_another_thread() -> None:
    beside, seen = Background(), []
    for number in range(50):
        beside.call(lambda number=number: seen.append((number, threading.current_thread())))
    beside.wait()
    assert [number for number, _ in seen] == list(range(50))
    assert threading.current_thread() not in {thread for _, thread in seen}
    assert not beside.busy


def test_the_caller_does_not_wait_and_the_thread_ends_with_the_work() -> None:
    beside, go = Background(), threading.Event()
    beside.call(go.wait)
    assert beside.busy, "call returned although the work can't be done yet"
    go.set()
    beside.wait()
    assert not [thread for thread in threading.enumerate() if thread.name == "mpinspect-write"]


def test_work_may_ask_for_more_and_may_wait() -> None:
    """A finalizer that closes a recording may run on its writing thread."""
    beside, seen = Background(), []

    def first() -> None:
        beside.call(lambda: seen.append("second"))
        beside.wait()
        seen.append("first")

    beside.call(first)
    beside.wait()
    assert seen == ["first", "second"]


def test_where_no_thread_can_be_started_the_caller_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    beside, seen = Background(), []
    beside.call(lambda: seen.append(threading.current_thread()))
    assert seen == [threading.current_thread()]
    beside.wait()
    assert not beside.busy


def test_ctrl_c_in_work_done_by_the_caller_leaves_the_rest_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError

    def interrupted() -> None:
        beside.call(lambda: seen.append("after"))
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", refuse)
    beside, seen = Background(), []
    with pytest.raises(KeyboardInterrupt):
        beside.call(interrupted)
    beside.call(lambda: seen.append("later"))
    assert seen == ["after", "later"]


def test_the_thread_sleeps_between_its_parts_until_a_caller_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(background, "_WORK_S", 0.0)
    monkeypatch.setattr(background.time, "sleep", rests.append)
    beside = Background()
    # On other threads, ``give_way`` has no effect.
    give_way()
    assert not rests
    rested, go_on = threading.Event(), threading.Event()

    def work() -> None:
        give_way()
        rested.set()
        go_on.wait()
        give_way()

    beside.call(work)
    rested.wait()
    beside.call(lambda: None, urgent=True)
    go_on.set()
    beside.wait()
    assert len(rests) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_neither_runs_calls_nor_waits() -> None:
    beside, go, seen = Background(), threading.Event(), []
    beside.call(go.wait)
    child = os.fork()
    if not child:
        # The thread does not exist in the child, and its lock may stay held forever.
        beside.call(lambda: seen.append("child"))
        beside.wait()
        os._exit(len(seen))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    go.set()
    beside.wait()


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)", "import os, signal; os.kill(os.getpid(), signal.SIGINT)"])
def test_the_interpreter_finishes_pending_work_before_it_exits(end: str) -> None:
    done = run(
        f"""
        import time
        from mpinspect.runtime.background import Background
        Background().call(lambda: (time.sleep(0.2), print("done", flush=True)))
        {end}
        """
    )
    assert done.stdout == "done\n"


def test_calls_after_the_threads_end_run_at_once() -> None:
    done = run(
        """
        import atexit
        from mpinspect.runtime.background import Background
        atexit.register(lambda: (Background().call(lambda: print("work")), print("after")))
        """
    )
    assert (done.stdout, done.stderr) == ("work\nafter\n", "")
