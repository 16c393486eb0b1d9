"""The sum of the ranks' sessions equals an oracle's counts, with two and four gloo processes."""

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import forked_ranks
import pytest
import ranks_training as trained
import torch
from sharded_training import MODULES
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from mpinspect import Session
from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.analysis.ranks import merge_ranks
from mpinspect.ranges.faults.measure.averaged import AVERAGED
from mpinspect.ranges.kinds import ACTIVATION, ACTIVATION_GRADIENT, UPDATE, WEIGHT, WEIGHT_GRADIENT
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.run.directory import ALL_RANKS

_WITHOUT_FSDP2 = pytest.mark.skipif(bool(trained.NO_FSDP2), reason=trained.NO_FSDP2)
CASES = [
    pytest.param(ranks, name, marks=_WITHOUT_FSDP2 if "shards" in name else ())
    for ranks in (2, 4)
    for name in trained.models_of(ranks)
]
Run = Callable[[int], Path]
#: The kinds of tensor that the oracle counts.
COUNTED = (WEIGHT_GRADIENT, ACTIVATION, ACTIVATION_GRADIENT)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns the folder of the trainings with a number of ranks, which run once."""

    @functools.cache
    def folder_of(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp(f"{ranks}-ranks")
        forked_ranks.results(folder, ranks, trained.train_all, MODULES)
        return folder

    return folder_of


def _as_counter(histogram: ExponentHistogram) -> trained.Counts:
    found: trained.Counts = Counter({histogram.min_exponent + i: int(n) for i, n in enumerate(histogram.counts) if n})
    if histogram.zeros:
        found["zeros"] = histogram.zeros
    return found


def _oracle(folder: Path, ranks: int, name: str, moment: str) -> dict[TensorKey, trained.Counts]:
    found: dict[TensorKey, trained.Counts] = {}
    for rank in range(ranks):
        own = torch.load(folder / f"rank{rank}.pt", weights_only=False)[name][moment]
        for tensor, counts in own.items():
            found.setdefault(TensorKey(*tensor), Counter()).update(counts)
    assert {key.kind for key in found} == set(COUNTED)
    assert all(counts.total() for counts in found.values())
    return found


def _counts(session: Session) -> dict[TensorKey, trained.Counts]:
    return {key: _as_counter(found.histogram) for key, found in session.totals().items() if key.kind in COUNTED}


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_the_sum_of_the_ranks_equals_an_oracles_counts(ranks: int, name: str, run: Run) -> None:
    folder = run(ranks)
    merged = merge_ranks(Session.load(folder / name / f"rank{rank}" / "Net") for rank in range(ranks))
    assert _counts(merged) == _oracle(folder, ranks, name, "whole")
    assert all(torch.load(folder / f"rank{rank}.pt", weights_only=False)[name]["same"] for rank in range(ranks))
    # Every element of the weights is counted once per step, on any number of ranks.
    totals = merged.totals()
    shapes = {info.name: info.shape for info in merged.watched if info.kind == WEIGHT}
    for tensor, shape in shapes.items():
        weight = totals[TensorKey(tensor, WEIGHT)]
        assert weight.histogram.total == trained.STEPS * torch.Size(shape).numel()
        assert weight.samples == totals[TensorKey(tensor, UPDATE)].samples == trained.STEPS
    held = {info.name: info.held for info in merged.watched if info.kind == WEIGHT_GRADIENT}
    if name == "split products":
        assert held == {"0.weight": "shard", "0.bias": "shard", "2.weight": "shard", "2.bias": "replica"}
    else:
        assert set(held.values()) == {"shard" if "shards" in name else "own"}
    assert [(rank.info.rank, rank.info.world_size) for rank in merged.ranks] == [(rank, ranks) for rank in range(ranks)]
    assert merged.progress.steps == merged.progress.sampled_steps == trained.STEPS
    assert merged.precision.reduced == (("float32",) if name == "copies" or "shards" in name else ())


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_the_sum_during_the_training_equals_the_counts_so_far(ranks: int, name: str, run: Run) -> None:
    folder = run(ranks)
    so_far = Session.load(folder / name / ALL_RANKS / "Net")
    oracle = _oracle(folder, ranks, name, "middle")
    assert _counts(so_far) == oracle
    assert so_far.progress.steps == so_far.progress.sampled_steps == trained.MIDDLE
    assert [rank.info.rank for rank in so_far.ranks] == list(range(ranks))
    assert not so_far.progress.ended
    without_zeros = {tensor: counts - Counter(zeros=counts["zeros"]) for tensor, counts in oracle.items()}
    assert _in_the_log(folder / name / ALL_RANKS / "Net") == without_zeros


@_WITHOUT_FSDP2
@pytest.mark.parametrize("ranks", [2, 4])
def test_exact_sums_equal_those_of_one_process_on_the_whole_batch(ranks: int, run: Run) -> None:
    folder = run(ranks)
    whole = torch.load(folder / "rank0.pt", weights_only=False)
    shards, copies = (
        merge_ranks(Session.load(folder / name / f"rank{rank}" / "Net") for rank in range(ranks))
        for name in ("exact shards", "exact copies")
    )
    gradients = {key.name: counts for key, counts in _counts(shards).items()}
    assert gradients == whole["exact shards"] == whole["exact copies"]
    (averaged,) = (_counted(each.figures) for each in copies.measurements if each.what == AVERAGED)
    assert averaged == sum(whole["exact copies"].values(), Counter())


@pytest.mark.parametrize("ranks", [2, 4])
def test_averaged_gradients_are_reported_with_the_ranks_own(ranks: int, run: Run) -> None:
    folder = run(ranks)
    merged = merge_ranks(Session.load(folder / "copies" / f"rank{rank}" / "Net") for rank in range(ranks))
    found = {each.step: each for each in merged.measurements if each.what == AVERAGED}
    # Not in step 0: the inspector was attached before DistributedDataParallel. Only rank 0 counts, as all ranks have the same.
    assert {step: each.rank for step, each in found.items()} == {1: 0, trained.LAST_AVERAGED: 0}
    counts = _counted(found[trained.LAST_AVERAGED].figures)
    for rank in range(ranks):
        averaged = torch.load(folder / f"rank{rank}.pt", weights_only=False)["copies"]["averaged"]
        assert counts == averaged
    exponents = counts.keys() - {"zeros"}
    reach = f"2^{min(exponents)} to 2^{max(exponents)}"
    said = f"Averaged, as the optimizer was given them in step 2, they reach from {reach}, on average "
    assert said in " ".join(str(analyse(merged)).split())
    stages = merge_ranks(Session.load(folder / "stages" / f"rank{rank}" / "Net") for rank in range(ranks))
    assert AVERAGED not in {each.what for each in stages.measurements}


def _counted(figures: Mapping[str, float]) -> trained.Counts:
    """Return a measurement of averaged gradients in the form of the oracle's counts."""
    assert figures["nonfinite"] == 0
    return +Counter({name if name == "zeros" else int(name): figures[name] for name in figures if name != "nonfinite"})


def _in_the_log(folder: Path) -> dict[TensorKey, trained.Counts]:
    """Return the exponents in TensorBoard's log of the oracle's kinds, added over the steps."""
    log = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    log.Reload()
    assert "verdict/text_summary" in log.Tags()["tensors"]
    found: dict[TensorKey, trained.Counts] = {}
    for tag in log.Tags()["tensors"]:
        kind, _, name = tag.removeprefix("tensor_exponents/").partition("/")
        for event in log.Tensors(tag) if kind in COUNTED else ():
            bars = make_ndarray(event.tensor_proto)
            found.setdefault(TensorKey(name, kind), Counter()).update(
                {int(low): int(count) for low, _, count in bars if count}
            )
    return found
