"""Merging the sessions of several ranks, and findings on ranks that differ."""

import dataclasses
import functools
import math
from itertools import accumulate, pairwise

import made_sessions as made
import numpy as np
import pytest
from analysis_sessions import session_of, spread, weight, window_of
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.ranges import kinds
from mpinspect.ranges import session as s
from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.analysis.ranks import ENDED_EARLY, NotOneModelError, RankSum, largest_of, merge_ranks, ranks_named
from mpinspect.ranges.kinds import GRADIENT_KINDS
from mpinspect.ranges.report.rank_words import rank_sentences
from mpinspect.ranges.windows.tensors import TensorInfo, TensorKey
from mpinspect.ranges.windows.window import Window, coarsen

quick = settings(
    deadline=None,
    max_examples=12,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)


def ranked(session, rank, of=4, **info):
    return dataclasses.replace(session, info=dataclasses.replace(session.info, rank=rank, world_size=of, **info))


def of_rank(rank, centre=-10, of=4, blocks=8, held="own", progress=None, **others):
    """Return the session of a rank: eight windows of ten steps, with one gradient near 2^centre that varies by a tenth."""
    key = weight("fc.weight")
    parts = [{key: spread({centre: 1000 + 100 * (i % 2), centre + 1: 1000, centre + 2: 500})} for i in range(blocks)]
    infos = [TensorInfo(*key, "fc", "Linear", (50, 50), "float32", held=held, **others)]
    return ranked(session_of(*parts, infos=infos, progress=progress), rank, of)


def ids(report):
    return [finding.id for finding in report.findings if finding.id.startswith(("rank-", "gradients-summed"))]


def finding(report, id):
    (found,) = [each for each in report.findings if each.id == id]
    return found


# -- the sum ------------------------------------------------------------------------------------------------------------


@st.composite
def several_ranks(draw):
    """Sessions of the ranks of one run, with the same steps; each rank may have merged neighbouring windows."""
    keys = [TensorKey(name, kind) for name in "ab" for kind in GRADIENT_KINDS]
    ranks = []
    for rank in range(3):
        windows = []
        for step in range(4):
            chosen = draw(st.lists(st.sampled_from(keys), unique=True, max_size=3))
            windows.append(Window(step, step, 1, {key: draw(made.tensor_windows) for key in chosen}, {-step: 1}))
        if draw(st.booleans()):
            windows = coarsen(windows, 2)
        infos = tuple(TensorInfo(*key, key.name, "Linear") for key in keys)
        progress = s.Progress(4, 4)
        ranks.append(s.Session(s.RunInfo("Net", rank=rank, world_size=3), infos, tuple(windows), progress=progress))
    return ranks


def counts(session):
    """Return the counts of every tensor over the run."""
    return {
        key: (t.histogram, t.samples, t.peaks, {name: (u.lost, u.nonzero) for name, u in t.lost_updates.items()})
        for key, t in session.totals().items()
    }


@quick
@given(several_ranks())
def test_merging_ranks_is_commutative_and_associative(ranks):
    one, two, three = ranks
    whole = merge_ranks(ranks)
    shuffled = merge_ranks([three, one, two])
    # Estimates differ in their last bits.
    estimated = [[(each.what, each.name, each.rank) for each in found.measurements] for found in (shuffled, whole)]
    assert estimated[0] == estimated[1]
    for field in dataclasses.fields(whole):
        if field.name != "measurements":
            assert getattr(shuffled, field.name) == getattr(whole, field.name), field.name
    for parts in ([merge_ranks([one, two]), three], [one, merge_ranks([three, two])]):
        again = merge_ranks(parts)
        assert counts(again) == counts(whole)
        assert (again.windows, again.ranks, again.progress) == (whole.windows, whole.ranks, whole.progress)


@quick
@given(several_ranks())
def test_merging_ranks_adds_their_counts(ranks):
    windows = [window for rank in ranks for window in rank.windows]
    expected = s.Session(watched=ranks[0].watched, windows=tuple(windows))
    assert counts(merge_ranks(ranks)) == counts(expected)


def test_overlapping_windows_are_merged_and_steps_count_once():
    key = made.KEY
    one = s.Session(s.RunInfo(world_size=2), windows=tuple(made.step_window(step) for step in range(4)))
    other = s.Session(s.RunInfo(rank=1, world_size=2), windows=coarsen(one.windows[:3], 2))
    merged = merge_ranks([one, other])
    assert [(w.first_step, w.last_step, w.sampled_steps) for w in merged.windows] == [(0, 1, 2), (2, 2, 1), (3, 3, 1)]
    assert [w.tensors[key].samples for w in merged.windows] == [4, 2, 1]
    assert merged.windows[0].gradient_peaks == {0: 2}


@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=2, max_size=2), st.integers(2, 9))
def test_windows_of_ranks_that_write_at_different_times_merge_within_blocks_of_the_longest(writes, limit):
    ranks = []
    for rank, sizes in enumerate(writes):
        starts = [0, *accumulate(sizes)]
        kept = [
            window
            for start, end in pairwise(starts)
            for window in coarsen([made.step_window(step) for step in range(start, end)], limit, start)
        ]
        ranks.append(s.Session(s.RunInfo(rank=rank, world_size=2), windows=coarsen(kept, 2 * limit)))
    longest = max(window.sampled_steps for rank in ranks for window in rank.windows)
    block = 2 ** math.ceil(math.log2(longest))
    assert all(w.first_step // block == w.last_step // block for w in merge_ranks(ranks).windows)


def test_the_largest_peaks_of_the_ranks_are_bounded_by_the_steps():
    assert largest_of([{0: 3, 5: 1}, {0: 4}]) == {0: 3, 5: 1}
    # Peaks of two ranks may be in different steps or in the same.
    assert largest_of([{0: 3, 5: 1}, {0: 3, 5: 1}]) == {0: 2, 5: 2}
    assert largest_of([{7: 4}, {0: 4}]) == {7: 4}
    assert largest_of([{}, {}]) == {}


def test_replicas_are_counted_on_the_first_rank_and_shards_are_one_sample():
    copy = [of_rank(rank, held="replica", replicas=2, is_first=rank == 0, of=2) for rank in range(2)]
    key = weight("fc.weight")
    assert merge_ranks(copy).totals()[key].histogram == copy[0].totals()[key].histogram
    shards = merge_ranks([of_rank(rank, held="shard", of=2) for rank in range(2)])
    alone = of_rank(0).totals()[key]
    assert shards.totals()[key].histogram.total == 2 * alone.histogram.total
    assert shards.totals()[key].samples == alone.samples


def test_tensors_of_a_single_rank_are_part_of_the_sum():
    stages = [
        ranked(session_of({weight(f"layers.{rank}.weight"): spread({-5: 10 + rank})}), rank, 2) for rank in range(2)
    ]
    merged = merge_ranks(stages)
    assert {key.name: window.histogram.total for key, window in merged.totals().items()} == {
        "layers.0.weight": 10,
        "layers.1.weight": 11,
    }
    assert any("each counted layers of its own" in sentence for sentence in rank_sentences(merged))
    assert ids(analyse(merged)) == []


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        (
            {"-12": 300, "-10": 100, "zeros": 9, "nonfinite": 0},
            "from 2^-12 to 2^-10, on average 2.3 powers of two lower than",
        ),
        (
            {"-9": 4, "-10": 1, "--9": 5, "x": 1, "7": math.nan, "8": math.inf, "9": -1},
            "from 2^-10 to 2^-9, on average as large as",
        ),
        ({"zeros": 12}, None),
    ],
)
def test_averaged_gradients_are_compared_with_the_ranks_own_of_their_step(figures, said):
    ranks = [of_rank(rank, of=2, blocks=1) for rank in range(2)]
    found = s.Measurement("gradients-averaged", "", 3, figures), s.Measurement("gradients-averaged", "", 900, {"1": 1})
    ranks[0] = dataclasses.replace(ranks[0], measurements=found)
    (sentence,) = [each for each in rank_sentences(merge_ranks(ranks)) if "Averaged" in each] or [None]
    assert (sentence is None) is (said is None)
    if said is not None:
        assert sentence.startswith(f"Averaged, as the optimizer was given them in step 3, they reach {said}")
        assert sentence.endswith("(2^-10 to 2^-8).")


def test_events_are_sorted_by_step_and_contain_their_rank():
    event = s.Event(4, 0, "backward", "fc", kinds.WEIGHT_GRADIENT, "fc.weight", "inf")
    ranks = [
        dataclasses.replace(of_rank(0, of=2), events=(dataclasses.replace(event, step=6),)),
        dataclasses.replace(of_rank(1, of=2), events=(event,)),
    ]
    assert [(each.step, each.rank) for each in merge_ranks(ranks).events] == [(4, 1), (6, 0)]


def test_a_merged_session_can_be_saved_loaded_and_merged_again(tmp_path):
    ranks = [dataclasses.replace(of_rank(rank), notes=("on all", f"on {rank}")) for rank in range(4)]
    for name, pair in (("low", ranks[:2]), ("high", ranks[2:])):
        merge_ranks(pair).save(tmp_path / name)
    again = merge_ranks(s.Session.load(tmp_path / name) for name in ("low", "high"))
    whole = merge_ranks(ranks)
    assert counts(again) == counts(whole)
    assert again.ranks == whole.ranks
    # Each half lacks two ranks, which the other half contains.
    assert not [each for each in again.measurements if each.what == "rank-missing"]
    assert whole.notes == ("on all", "rank 0: on 0", "rank 1: on 1", "rank 2: on 2", "rank 3: on 3")


def test_a_rank_of_another_model_is_refused_without_changing_the_sum():
    total = RankSum()
    total.add(of_rank(0))
    other = of_rank(1)
    for wrong, why in (
        (of_rank(0), "there are two sessions of rank 0"),
        (
            dataclasses.replace(other, watched=(dataclasses.replace(other.watched[0], shape=(7, 50)),)),
            r"fc.weight has the shape 7 x 50 there and 50 x 50 here",
        ),
    ):
        with pytest.raises(NotOneModelError, match=why):
            total.add(wrong)
    assert total.ranks == (0,)
    with pytest.raises(ValueError, match="no rank to merge"):
        merge_ranks([])


def test_merging_a_single_rank_returns_its_windows():
    alone = of_rank(0, of=1)
    merged = merge_ranks([alone])
    assert merged.windows == alone.windows
    assert merged.ranks == ()
    assert ids(analyse(merged)) == []


@pytest.mark.parametrize(
    ("ranks", "words"),
    [((3,), "rank 3"), ((1, 0), "ranks 0 and 1"), (range(4), "ranks 0-3"), ((1, 5, 7), "ranks 1, 5 and 7")],
)
def test_lists_of_ranks_are_written_as_text(ranks, words):
    assert ranks_named(list(ranks)) == words
    assert ranks_named(list(range(0, 40, 2))) == "ranks 0, 2, 4, 6 and 16 more"


# -- ranks that differ ----------------------------------------------------------------------------------------------------


def test_equal_ranks_have_no_finding_and_the_advice_of_one():
    report = analyse(merge_ranks(of_rank(rank) for rank in range(4)))
    assert ids(report) == []
    assert report.loss_scale.recommended == analyse(of_rank(0)).loss_scale.recommended
    assert report.verdict.healthy


def test_a_rank_whose_gradients_have_another_range_is_named():
    report = analyse(merge_ranks(of_rank(rank, centre=-4 if rank == 2 else -10) for rank in range(4)))
    found = finding(report, "rank-ranges-differ")
    assert "On rank 2 1 of 1 tensors" in found.message
    assert "6.0 powers higher" in found.message
    assert found.evidence["ranks"] == [2]
    # A difference of up to one power of two may be due to other data.
    nearly = [of_rank(rank) for rank in range(3)] + [of_rank(3, centre=-9)]
    assert ids(analyse(merge_ranks(nearly))) == []


def test_ranges_of_ranks_are_not_compared_in_a_short_run():
    report = analyse(merge_ranks(of_rank(rank, centre=-4 * rank, blocks=2) for rank in range(4)))
    assert ids(report) == []


def test_replicas_of_weights_that_differ_are_an_error():
    key = TensorKey("fc.weight", kinds.WEIGHT)

    def copy(rank, top):
        info = TensorInfo(*key, "fc", "Linear", (5, 5), "float32", "", "replica", 3, rank == 0)
        return ranked(session_of({key: spread({-3: 20, top: 5})}, infos=[info]), rank, 3)

    report = analyse(merge_ranks([copy(0, 0), copy(1, 0), copy(2, 1)]))
    assert finding(report, "rank-replicas-unequal").evidence["rank"] == 2
    assert ids(analyse(merge_ranks([copy(0, 0), copy(1, 0), copy(2, 0)]))) == []


def ending_at(rank, steps, ended=True):
    return of_rank(rank, progress=s.Progress(steps, 80, 0, steps, ended))


def test_uneven_steps_and_missing_ranks_are_named():
    report = analyse(merge_ranks([ending_at(0, 600), ending_at(1, 600), ending_at(3, 412, ended=False)]))
    said = finding(report, "rank-steps-differ").message
    still = "Rank 3 had not ended: still running, killed, or the file is cut off."
    assert said == f"The record of rank 3 ends at step 412; the others' at 600. {still}"
    assert finding(report, "rank-missing").message.startswith("Rank 2 of 4 left no record")
    later = finding(analyse(merge_ranks([ending_at(0, 600), ending_at(1, 412)])), "rank-steps-differ")
    assert (later.severity, later.message) == ("warning", "The record of rank 1 ends at step 412; the others' at 600.")
    assert later.fix.startswith("Each rank counts its steps from where it was attached")


def test_uneven_steps_inside_torchs_join_are_healthy():
    joined = s.Measurement(s.UNEVEN_INPUTS, "", 412)
    for ended in (True, False):
        ranks = [ending_at(0, 600), ending_at(1, 412, ended=ended)]
        report = analyse(merge_ranks([dataclasses.replace(rank, measurements=(joined,)) for rank in ranks]))
        # A rank that still runs or was killed is named in any case.
        assert ("rank-steps-differ" in ids(report)) is not ended


def left(rank, words, order=0.0):
    return s.Measurement(ENDED_EARLY, rank=rank, figures={"order": order}, text=words)


def test_ranks_that_ended_early_are_first_in_the_verdict_with_their_cause():
    total = RankSum()
    for rank, steps in enumerate((580, 570, 580)):
        total.add(ending_at(rank, steps, ended=rank == 1))
    killed = "without a report (killed, or it crashed)"
    measured = [left(0, killed, 1.0), left(1, "by ValueError: bad batch"), left(2, killed, 1.0), left(3, killed, 1.0)]
    report = analyse(total.session(ended_early=measured))
    said = finding(report, "rank-ended-early")
    assert report.findings[0] is said
    assert (said.severity, said.step) == ("error", 570)
    first = "Rank 1 ended in step 570 by ValueError: bad batch."
    assert said.message == f"{first} Then ranks 0, 2 and 3 ended after step 579 {killed}."
    assert report.verdict.sentences[0] == f"Error: {said.message}"
    assert "rank 1" in report.verdict.change
    # The finding that rank 3 was killed explains its missing file.
    assert "rank-missing" not in ids(report)
    alone = analyse(total.session(ended_early=[left(3, killed, 1.0)]))
    assert finding(alone, "rank-ended-early").message == f"Rank 3 ended before a step was recorded, {killed}."
    slow = analyse(total.session(ended_early=[left(2, killed, 1.0)]))
    assert finding(slow, "rank-ended-early").message == f"Rank 2 ended after step 579 {killed}."
    assert "signal 9" in finding(slow, "rank-ended-early").fix
    # The step of the rank that waited for it bounds the step of the kill.
    waited = left(1, "by DistBackendError in a collective", 2.0)
    for wrote, when in ((560, "in one of steps 560-570"), (570, "in step 570"), (571, "after step 570")):
        two = RankSum()
        two.add(ending_at(0, wrote, ended=False))
        two.add(ending_at(1, 570, ended=True))
        dead = analyse(two.session(ended_early=[left(0, killed, 1.0), waited]))
        then = f"Then rank 1 ended in step 570 {waited.text}."
        assert finding(dead, "rank-ended-early").message == f"Rank 0 ended {when} {killed}. {then}"
    # A rank that was killed before its first write may have finished some steps.
    early = RankSum()
    early.add(ranked(session_of(progress=s.Progress(0, 0, 0, 0, False)), 0, 4))
    early.add(ending_at(1, 570, ended=True))
    none = analyse(early.session(ended_early=[left(0, killed, 1.0)]))
    assert finding(none, "rank-ended-early").message == f"Rank 0 ended in step 0 or later {killed}."
    # A launcher stops the remaining ranks, a scheduler stops the whole job.
    sigterms = [left(rank, "by a SIGTERM", 3.0) for rank in (0, 2)]
    ended = finding(analyse(total.session(ended_early=[*sigterms, left(3, killed, 1.0)])), "rank-ended-early")
    then = "Then ranks 0 and 2 ended after step 579 by a SIGTERM."
    assert ended.message == f"Rank 3 ended before a step was recorded, {killed}. {then}"
    cancelled = finding(analyse(total.session(ended_early=sigterms)), "rank-ended-early")
    assert (cancelled.severity, cancelled.message) == ("warning", "Ranks 0 and 2 ended after step 579 by a SIGTERM.")
    assert "the scheduler" in cancelled.fix
    # If all ranks were killed, the job may have been stopped.
    stopped = finding(
        analyse(total.session(ended_early=[left(rank, killed, 1.0) for rank in range(4)])), "rank-ended-early"
    )
    assert stopped.severity == "warning"
    assert "the job was stopped" in stopped.message
    assert finding(slow, "rank-steps-differ").severity == "info"


def test_a_different_loss_scale_is_reported_with_its_first_step():
    def scaled(rank, *scales):
        changes = tuple(s.ScaleChange(step, scale) for step, scale in scales)
        return of_rank(rank, progress=s.Progress(80, 80, 0, 80, True, scales=changes), of=3)

    ranks = [scaled(0, (0, 1024.0)), scaled(1, (0, 1024.0), (30, 512.0)), scaled(2, (0, 1024.0))]
    said = finding(analyse(merge_ranks(ranks)), "rank-scales-differ")
    assert said.step == 30
    assert "rank 1 had another loss scale than rank 0" in said.message


def test_the_only_rank_with_infinities_is_named():
    event = s.Event(4, 0, "backward", "fc", kinds.WEIGHT_GRADIENT, "fc.weight", "inf", skipped=False)
    ranks = [of_rank(rank) for rank in range(4)]
    ranks[2] = dataclasses.replace(ranks[2], events=(event,))
    report = analyse(merge_ranks(ranks))
    said = finding(report, "rank-events-differ").message
    assert said.startswith("Infinities or NaNs occurred on rank 2 in 1 step, the others saw none")
    assert "rank 2, step 4, backward, 'fc', first inf" in str(report)
    # A rank that received the infinity from another rank is not named as its origin.
    batch = s.Event(4, 0, "forward", "", kinds.ACTIVATION, "fc", "inf", given=True)
    examined = s.Measurement("examined-batch", step=4, figures={"elements": 1.0}, names=("0",))
    first = dataclasses.replace(of_rank(0, of=2), events=(dataclasses.replace(event, elsewhere=True),))
    second = dataclasses.replace(of_rank(1, of=2), events=(batch,), measurements=(examined,))
    said = finding(analyse(merge_ranks([first, second])), "batch-not-finite").message
    assert said.endswith("That was on rank 1.")
    everywhere = [dataclasses.replace(rank, events=(event,)) for rank in ranks]
    assert ids(analyse(merge_ranks(everywhere))) == []


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"versions": {"torch": "2.6"}}, "rank 1: versions torch 2.6"),
        ({"model": "Other"}, "rank 1: model Other (the others: ?)"),
        ({"include": ("head.*",)}, r"rank 1: patterns include=['head.*'], exclude=[]"),
        ({"started": "2026-01-01T12:00:00+00:00"}, "rank 1 began up to 720 minutes after the first"),
    ],
)
def test_ranks_with_different_settings_are_named(info, said):
    started = {"started": "2026-01-01T00:00:00+00:00"}
    ranks = [ranked(of_rank(rank), rank, 4, **(started | (info if rank == 1 else {}))) for rank in range(4)]
    found = finding(analyse(merge_ranks(ranks)), "rank-settings-differ")
    assert said in found.message
    assert ("two runs" in found.fix) is ("started" in info)


def test_a_rank_without_records_adds_no_counts_and_no_difference_in_settings():
    ranks = [of_rank(rank, of=2) for rank in range(2)]
    ranks[1] = s.Session(s.RunInfo(rank=1, world_size=2))
    merged = merge_ranks(ranks)
    assert ids(analyse(merged)) == ["rank-steps-differ"]
    assert next(rank_sentences(merged)) == "The counts of rank 0 of 2 are added up; a step counts once."


@pytest.mark.parametrize(("dtype", "world", "severity"), [("bfloat16", 8, "info"), ("bfloat16", 256, "warning")])
def test_a_sum_in_16_bits_is_a_finding(dtype, world, severity):
    reduced = s.Precision({"float32": 2500}, reduced=(dtype,))
    session = dataclasses.replace(of_rank(0, of=world), precision=reduced)
    assert finding(analyse(merge_ranks([session])), "gradients-summed-in-16-bits").severity == severity


@pytest.mark.parametrize(
    ("centre", "dtype", "flushed"), [(-30, "float16", 1), (-30, "bfloat16", 0), (-10, "float16", 0)]
)
def test_gradients_that_flush_in_the_sum_are_a_finding(centre, dtype, flushed):
    reduced = s.Precision({"float32": 2500}, reduced=(dtype,))
    session = dataclasses.replace(of_rank(0, centre=centre, of=1), precision=reduced)
    found = [each for each in analyse(session).findings if each.id == "gradients-flushed-in-sum"]
    assert [(each.severity, each.evidence["flushed"], each.layer) for each in found] == [
        ("warning", 1, "fc.weight")
    ] * flushed


def test_equal_measurements_of_several_ranks_are_merged_into_one():
    measured = s.Measurement("gradients-replaced", "fc.weight", 3)
    ranks = [dataclasses.replace(of_rank(rank, of=2), measurements=(measured,)) for rank in range(2)]
    ranks[1] = dataclasses.replace(ranks[1], measurements=(measured, s.Measurement("average", "ema")))
    assert [(each.what, each.rank) for each in merge_ranks(ranks).measurements] == [
        ("gradients-replaced", 0),
        ("average", 1),
    ]


def test_shards_count_once_when_columns_are_merged():
    """Columns add samples of shards as objects do."""
    tensors = {
        TensorKey(f"{n}", kinds.WEIGHT_GRADIENT): window_of(ExponentHistogram.from_counts([n + 1], -n), n + 1)
        for n in range(50)
    }
    infos = tuple(TensorInfo(*key, key.name, "Linear", held="shard" if int(key.name) % 2 else "own") for key in tensors)
    ranks = [ranked(s.Session(watched=infos, windows=(Window(0, 0, 1, dict(tensors)),)), rank, 3) for rank in range(3)]
    totals = functools.reduce(lambda total, rank: merge_ranks([total, rank]), ranks[1:], ranks[0]).totals()
    samples = np.array([totals[key].samples for key in tensors])
    assert (samples == np.array([(n + 1) * (1 if n % 2 else 3) for n in range(50)])).all()
    assert all(totals[key].histogram.total == 3 * (int(key.name) + 1) for key in tensors)
