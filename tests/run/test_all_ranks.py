"""Rank 0 adds up the ranks' files during training: only data on disk, tolerating any rank's failure, and without waiting."""

import dataclasses
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import made_sessions as made
import pytest

from mpinspect.integrations.tensorboard_runs import Runs
from mpinspect.ranges import session as s
from mpinspect.ranges.analysis.ranks import merge_ranks
from mpinspect.ranges.store import SessionWriter, read_session
from mpinspect.ranges.windows.tensors import TensorInfo
from mpinspect.run import all_ranks
from mpinspect.run.all_ranks import AllRanks
from mpinspect.run.directory import ALL_RANKS
from mpinspect.run.ranks import ModelsOfRanks
from mpinspect.run.reading import read_run
from mpinspect.run.record import read_record


class Ranks:
    """Ranks that write files, and rank 0's sum, with a simulated clock."""

    def __init__(self, folder: Path, of: int = 2) -> None:
        self.folder, self.now = folder, 0.0
        self.writers = [
            SessionWriter(folder / f"rank{rank}" / "Net", s.RunInfo("Net", rank=rank, world_size=of))
            for rank in range(of)
        ]
        self.steps = [0] * of
        self.sum = AllRanks(folder, lambda: self.now)

    def step(self, rank: int, steps: int = 1, **progress: Any) -> None:
        writer = self.writers[rank]
        writer.watched([TensorInfo(*made.KEY, made.KEY.name, "Linear")])
        for _ in range(steps):
            writer.window(made.step_window(self.steps[rank]))
            self.steps[rank] += 1
        writer.progress(s.Progress(self.steps[rank], self.steps[rank], **progress))

    def add_up(self) -> s.Session | None:
        self.now += 1000.0
        self.sum.written()
        self.sum._background.wait()
        place = self.folder / ALL_RANKS / "Net"
        return read_session(place) if place.exists() else None

    def on_disk(self) -> s.Session:
        return merge_ranks(read_session(self.folder / f"rank{rank}" / "Net") for rank in range(len(self.writers)))

    def shown(self) -> list[int]:
        """Return the steps of the scalars in the summed log."""
        log = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        found = log.EventAccumulator(str(self.folder / ALL_RANKS / "Net"))
        found.Reload()
        tag = "summary/steps_not_finite"
        return [each.step for each in found.Scalars(tag)] if tag in found.Tags()["scalars"] else []


@pytest.fixture
def made_ranks() -> Iterator[Callable[..., Ranks]]:
    """Yield a function that makes ranks; close their files afterwards."""
    all_made: list[Ranks] = []

    def make(folder: Path, of: int = 2) -> Ranks:
        all_made.append(Ranks(folder, of))
        return all_made[-1]

    yield make
    for each in all_made:
        each.sum.finish([])
        for writer in each.writers:
            writer.close()


def test_the_sum_equals_the_files_and_the_report(made_ranks, tmp_path):
    ranks = made_ranks(tmp_path)
    for _ in range(3):
        for rank in range(2):
            ranks.step(rank, 3)
        found = ranks.add_up()
        assert found.windows == ranks.on_disk().windows
        (part,) = read_run(tmp_path).parts
        assert part.ranges.session.totals() == found.totals()
    assert ranks.shown() == list(range(9))
    # TensorBoard's page adds up the newer files itself, so it does not list the stored sum.
    names = sorted(run.name for run in Runs({"": str(tmp_path)}).listing().runs.values())
    assert names == ["Net of 2 ranks", "rank0/Net", "rank1/Net"]
    assert ranks.sum.finish([("Net", ranks.on_disk())]) == []


def test_the_log_waits_once_for_a_slow_rank_and_not_for_one_that_stopped(made_ranks, tmp_path):
    ranks = made_ranks(tmp_path)
    ranks.step(0, 4)
    ranks.step(1, 2)
    ranks.add_up()
    assert ranks.shown() == [0, 1]
    ranks.step(0, 2)
    ranks.step(1, 2)
    ranks.add_up()
    assert ranks.shown()[-1] == 3
    # Rank 1 has stopped writing.
    ranks.step(0, 2)
    found = ranks.add_up()
    assert ranks.shown()[-1] == 7
    assert [(rank.info.rank, rank.progress.steps) for rank in found.ranks] == [(0, 8), (1, 4)]
    assert [each.id for each in read_run(tmp_path).findings if each.id == "rank-steps-differ"]


def test_files_are_added_up_only_after_the_interval_and_new_data(made_ranks, tmp_path):
    ranks = made_ranks(tmp_path)
    for rank in range(2):
        ranks.step(rank)
    ranks.now = 9.0
    ranks.sum.written()
    ranks.sum._background.wait()
    assert not (tmp_path / ALL_RANKS).exists()
    ranks.add_up()
    file = tmp_path / ALL_RANKS / "Net" / "session.mpinspect"
    before = file.stat().st_ino
    ranks.add_up()
    assert file.stat().st_ino == before


def test_an_unreadable_file_omits_that_rank_but_never_replaces_a_larger_sum(made_ranks, tmp_path):
    ranks = made_ranks(tmp_path, 3)
    for rank in range(3):
        ranks.step(rank)
    assert len(ranks.add_up().ranks) == 3
    (tmp_path / "rank2" / "Net" / "session.mpinspect").write_bytes(b"")
    ranks.step(0)
    assert len(ranks.add_up().ranks) == 3
    assert ranks.sum.finish([("Net", merge_ranks([read_session(tmp_path / "rank0" / "Net")]))]) == []


def test_a_hanging_reader_does_not_block(made_ranks, tmp_path, monkeypatch):
    ranks, goes_on = made_ranks(tmp_path), threading.Event()
    monkeypatch.setattr(ModelsOfRanks, "read", lambda *given: goes_on.wait(20))
    monkeypatch.setattr(all_ranks, "_PATIENCE_S", 0.1)
    for rank in range(2):
        ranks.step(rank)
    ranks.now = 11.0
    ranks.sum.written()
    ranks.sum.written()
    (said,) = ranks.sum.finish([])
    assert said == f"the ranks were still being added up after 0 s: mpinspect report {tmp_path} adds them up"
    goes_on.set()
    ranks.sum._background.wait()
    assert not (tmp_path / ALL_RANKS).exists()


def test_errors_and_slow_sums_become_notes(made_ranks, tmp_path, monkeypatch):
    ranks = made_ranks(tmp_path)
    ranks.step(0)
    monkeypatch.setattr(all_ranks, "MOST_S", -1.0)
    ranks.add_up()
    assert ranks.sum.notes == [f"adding up 2 ranks takes more than -1 s: mpinspect report {tmp_path} adds them up"]
    again = made_ranks(tmp_path / "again")
    (tmp_path / "again" / ALL_RANKS).write_text("a file in its place")
    for rank in range(2):
        again.step(rank)
    monkeypatch.setattr(all_ranks, "MOST_S", 60.0)
    again.now += 1000
    again.sum.written()
    again.sum._background.wait()
    assert "could not be added up during training (NotADirectoryError" in again.sum.notes[0]


# -- ranks without data ----------------------------------------------------------------------------------------------------


def _record(place: Path, **fields: Any) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "run.json").write_text(
        json.dumps({"command": "train.py", "outcome": "ended", "saw": [], "models": []} | fields)
    )


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "no folder here"),
        ({"local_world_size": 2, "host": "a"}, "no folder, though started on this machine"),
        (
            {"local_world_size": 1, "host": "a"},
            "1 rank started on other machines: copy their folders (rank0, rank1, ...)",
        ),
    ],
)
def test_the_report_explains_a_missing_rank(fields, why, tmp_path):
    _record(tmp_path / "rank0", world_size=2, **fields)
    made_session = s.Session(s.RunInfo("Net", world_size=2), windows=(made.step_window(0),))
    (tmp_path / "rank0" / "Net").mkdir()
    made_session.save(tmp_path / "rank0" / "Net")
    report = read_run(tmp_path)
    assert why in report.saw[0]
    (found,) = [each for each in report.findings if each.id == "rank-missing"]
    assert why in found.message


@pytest.mark.parametrize("world", [1, 2])
def test_a_single_process_has_no_missing_ranks_and_ranks_without_a_world_size_are_merged(world, tmp_path):
    for rank in range(world):
        session = s.Session(s.RunInfo("Net"), windows=(made.step_window(0),))
        (tmp_path / f"rank{rank}" / "Net").mkdir(parents=True)
        session.save(tmp_path / f"rank{rank}" / "Net")
    report = read_run(tmp_path)
    (part,) = report.parts
    assert [rank.info.rank for rank in part.ranges.session.ranks] == list(range(world) if world > 1 else ())
    assert not [each.id for each in report.findings if each.id.startswith("rank-")]
    assert "rank 1" not in " ".join(report.saw)


def test_a_damaged_rank_is_not_reported_as_killed_or_as_a_pipeline_stage(made_ranks, tmp_path):
    ranks = made_ranks(tmp_path)
    for rank in range(2):
        _record(tmp_path / f"rank{rank}", world_size=2)
        ranks.step(rank, 2, ended=True)
    file = tmp_path / "rank1" / "Net" / "session.mpinspect"
    whole = file.read_bytes()
    # The truncated file still describes the run, but has no tensors.
    file.write_bytes(whole[: whole.index(b"WTCH")])
    text = " ".join(str(read_run(tmp_path)).split())
    assert "layers of its own" not in text
    assert "Rank 1 left a session file that is damaged or cut off." in text
    file.write_bytes(b"")
    text = " ".join(str(read_run(tmp_path)).split())
    assert "rank 1 of 2 left no record that can be added: its files can't be read" in text


@pytest.mark.parametrize("world", [-3, 0, 1 << 30, "two", 1.5])
def test_an_impossible_world_size_is_refused(world, tmp_path):
    _record(tmp_path, world_size=world)
    assert read_record(tmp_path).trouble == "run.json is damaged: world_size can't be read"
    assert read_record(tmp_path).world_size == 1


def test_a_session_with_an_impossible_world_size_is_shown_separately():
    found = ModelsOfRanks()
    session = s.Session(s.RunInfo("Net", rank=1, world_size=1 << 50))
    found.add("rank1", "Net", session)
    assert list(found.models()) == [("rank1/Net", session)]
    assert found.notes == [f"rank1/Net is shown separately: it claims to be rank 1 of {1 << 50:,}"]
    odd = dataclasses.replace(session, info=dataclasses.replace(session.info, rank=5, world_size=2))
    found = ModelsOfRanks()
    found.add("rank5", "Net", odd)
    assert found.notes == ["rank5/Net is shown separately: it claims to be rank 5 of 2"]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux says which processes are zombies")
def test_a_zombie_process_counts_as_ended(tmp_path):
    import platform

    process = os.fork()
    if not process:
        os._exit(0)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    _record(tmp_path, outcome="running", process=process, host=platform.node())
    assert read_record(tmp_path).outcome == "ended without a report (killed, or it crashed)"
    os.waitpid(process, 0)
