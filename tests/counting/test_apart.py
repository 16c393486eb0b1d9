"""``apart`` runs compilation in a thread: a slow compilation prints one line, and results and errors reach the caller."""

import threading
import time

import pytest

from mpinspect.counting.apart import COMPILING, apart


def test_slow_work_is_announced_once_and_fast_work_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mpinspect.counting.apart._said", set())
    assert apart(lambda: 5, COMPILING) == 5
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("mpinspect.counting.apart._SAID_AFTER_S", 0.01)
    assert apart(lambda: time.sleep(0.1) or 6) == 6
    assert capsys.readouterr() == ("", "")
    for _ in range(2):
        assert apart(lambda: time.sleep(0.1) or 7, COMPILING) == 7
    assert capsys.readouterr() == ("", COMPILING + "\n")


@pytest.mark.parametrize("error", [KeyError("x"), TimeoutError("own"), RuntimeError("own")], ids=repr)
def test_errors_reach_the_caller(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        apart(fail)


def test_works_with_a_closed_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpinspect.counting.apart._SAID_AFTER_S", 0.01)
    monkeypatch.setattr("sys.stderr", None)
    monkeypatch.setattr("mpinspect.counting.apart._said", set())
    work = lambda: time.sleep(0.05) or threading.current_thread().name  # noqa: E731
    assert apart(work, COMPILING).startswith("mpinspect-compile")
