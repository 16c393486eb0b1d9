"""Two ranks under DDP, FSDP2, tensor parallelism and a pipeline (``sharded_training.py``): what each rank's session tells."""

from __future__ import annotations

from typing import Any

import pytest
import sharded_training as trained
import torch
import warm

from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.analysis.ranks import merge_ranks
from mpinspect.ranges.session import TensorKey


class Cases(dict[str, Any]):
    """What a rank found, by case; a case that this torch can't train skips the test that asks for it."""

    def __missing__(self, name: str) -> Any:
        if trained.NO_FSDP2:
            pytest.skip(trained.NO_FSDP2)
        raise KeyError(name)


Found = list[Cases]
#: What a rank says of values that are made of those of all ranks, of weights, and of a stage's gradient.
ALL_RANKS = "the tensor combines values of all ranks, so it may have arisen on another one"
OTHER_RANK = "its gradients may be sums over the ranks, so look for the rank with the earliest event"
NEXT_STAGE = "the gradient passed to backward() for its output was not finite"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank found, by case; one pair of processes for all tests."""
    folder = tmp_path_factory.mktemp("ranks")
    status, out, err = warm.run(folder, [trained.__file__, str(folder)])
    assert status == 0, out + err
    return [Cases(torch.load(folder / f"rank{rank}.pt", weights_only=False)) for rank in range(trained.RANKS)]


@pytest.mark.parametrize("way", trained.WAYS)
def test_a_healthy_sharded_training_is_the_same_and_all_of_it_is_counted(found: Found, way: str) -> None:
    for rank in found:
        case = rank[f"planted {way} "]
        assert case["same"] == [True, True]
        for told in (case["gradients"], case["everything"]):
            assert told["steps"] == trained.STEPS
            assert (told["notes"], told["events"], told["uncounted"]) == ((), [], [])


@pytest.mark.parametrize("way", trained.WAYS)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_rank_that_made_an_infinity_names_step_phase_and_module(found: Found, way: str, phase: str) -> None:
    case = found[1][f"planted {way} {phase}"]
    assert case["same"] == [True, True]
    for told in (case["gradients"], case["everything"]):
        assert told["events"][0][:3] == (trained.BROKEN_AT, phase, "1")
        assert told["notes"] == ()
    for capture in trained.CAPTURES:
        merged = merge_ranks(rank[f"planted {way} {phase}"][capture]["session"] for rank in found)
        first = merged.events[0]
        assert (first.rank, first.step, first.phase, first.module) == (1, trained.BROKEN_AT, phase, "1")


@pytest.mark.parametrize(
    ("way", "phase", "step", "says"),
    [
        ("ddp", "forward", trained.BROKEN_AT + 1, OTHER_RANK),
        ("ddp", "backward", trained.BROKEN_AT + 1, OTHER_RANK),
        ("fsdp", "forward", trained.BROKEN_AT, ALL_RANKS),
        ("fsdp", "backward", trained.BROKEN_AT, ALL_RANKS),
        ("tp", "forward", trained.BROKEN_AT, ALL_RANKS),
        ("tp", "backward", trained.BROKEN_AT + 1, ALL_RANKS),
        ("pipeline", "forward", trained.BROKEN_AT, NEXT_STAGE),
        ("pipeline", "backward", trained.BROKEN_AT, NEXT_STAGE),
        ("pipeline-fsdp", "backward", trained.BROKEN_AT, NEXT_STAGE),
    ],
)
def test_the_other_rank_says_that_it_may_come_from_elsewhere(
    found: Found, way: str, phase: str, step: int, says: str
) -> None:
    case = found[0][f"planted {way} {phase}"]
    assert case["same"] == [True, True]
    for told in (case["gradients"], case["everything"]):
        assert told["events"][0][0] == step
        assert says in told["events"][0][3]


@pytest.mark.parametrize("capture", trained.CAPTURES)
def test_what_a_stage_was_given_by_the_one_before_is_not_the_batch(found: Found, capture: str) -> None:
    first, second = (rank["first stage"][capture] for rank in found)
    assert first["events"][0][:3] == (trained.BROKEN_AT, "forward", "1")
    given = (trained.BROKEN_AT, "forward", "", "the previous stage of the pipeline sent it: look at that stage's rank")
    assert second["events"][0] == given
    reports = [analyse(second["session"]), analyse(merge_ranks(each["session"] for each in (first, second)))]
    assert not [each for report in reports for each in report.findings if each.id == "batch-not-finite"]
    assert "the activation of '1' held an inf on rank 0" in " ".join(str(reports[1]).split())


@pytest.mark.parametrize("way", ["pipeline", "pipeline-fsdp"])
def test_a_pipelines_micro_batches_are_counted_and_its_trial_is_not(found: Found, way: str) -> None:
    all_of_them = trained.STEPS * trained.MICRO_BATCHES
    for rank in found:
        samples = rank[f"planted {way} "]["everything"]["samples"]
        assert samples[TensorKey("1", "activation")] == all_of_them
        assert samples[TensorKey("1", "activation_gradient")] == all_of_them
        # FSDP2 reduces once a step, after the last micro-batch.
        reduced = trained.STEPS if way == "pipeline-fsdp" else all_of_them
        assert samples[TensorKey("0.up.weight", "weight_gradient")] == reduced


@pytest.mark.parametrize("ranks", [1, trained.RANKS])
@pytest.mark.parametrize("when", ["before", "made before", "after"])
def test_fsdp2_is_seen_whether_attached_before_or_after_it(found: Found, when: str, ranks: int) -> None:
    for rank in found:
        told, after = rank[f"{when} {ranks}"], rank[f"after {ranks}"]
        assert told["same"]
        assert (told["notes"], told["uncounted"], told["steps"]) == ((), [], trained.STEPS)
        assert told["totals"] == after["totals"]
        assert len(told["exact"]) == 10
        # Not FSDPSequential.
        assert told["model"] == "Sequential"
        assert told["types"] == {"Linear", "Tanh", "Plant"}


def test_parameters_swapped_in_an_optimizer_are_noticed_at_its_step_and_said(found: Found) -> None:
    for rank in found:
        told = rank["swapped"]
        assert told["same"]
        assert len(told["notes"]) == 1
        assert (
            "10 parameters were replaced after the inspector was attached, and this was noticed in step 0"
            in told["notes"][0]
        )
        assert told["samples"][TensorKey("0.up.weight", "weight_gradient")] == trained.STEPS - 1


def test_only_updates_are_steps_before_the_optimizer_is_known(found: Found) -> None:
    bodies = [each for way, each in trained.BODIES.items() if way != "fsdp" or not trained.NO_FSDP2]
    for rank in found:
        steps = {name: count for name, count in rank.items() if name.startswith("steps ")}
        assert len(steps) == 2 * sum(map(len, bodies))
        assert {name: count for name, count in steps.items() if count != 3} == {}


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["GradScaler", "LossScaler"])
def test_scaled_clipped_and_resumed_trainings_are_the_same(found: Found, way: str, kind: str) -> None:
    for number, rank in enumerate(found):
        case = rank[f"scaled {way} {kind}"]
        assert case["same"] == [True, True]
        assert case["finite"]
        for told, steps in ((case["inspected"], trained.STEPS), (case["resumed"], 2)):
            # Making the optimizer's states, as torch's checkpoints do, is no step.
            assert (told["steps"], told["skipped"], told["notes"]) == (steps, 1, ())
            step, phase, module, explanation = told["events"][0]
            assert (step, phase) == (trained.BROKEN_AT - trained.STEPS + steps, "backward")
            assert module == "1" if number else ALL_RANKS in explanation


def test_mixed_precision_of_sharded_weights_skips_together(found: Found) -> None:
    expected = [number != trained.BROKEN_AT for number in range(trained.STEPS)]
    for rank in found:
        for name in ("fp16-amp", "policy"):
            told = rank[f"mixed {name}"]
            assert told["same"]
            assert told["stepped"] == [expected, expected]
            assert (told["steps"], told["skipped"], told["notes"]) == (trained.STEPS, 1, ())


def test_mixed_precision_says_what_fsdp2_needs_instead(found: Found) -> None:
    for rank in found:
        for half, dtype in (("fp16", "float16"), ("bf16", "bfloat16")):
            said = rank[f"mixed {half}-master"]["error"]
            assert said.startswith("the model was sharded by fully_shard")
            assert f"mp_policy=MixedPrecisionPolicy(param_dtype=torch.{dtype})), and use precision='fp32'" in said
        assert "fully_shard, or whatever replaced them, comes first" in rank["too late"]


def test_a_process_group_may_be_gone_before_detaching(found: Found) -> None:
    for rank in found:
        for told in rank["outlived"].values():
            assert (told["steps"], told["notes"], told["uncounted"]) == (1, (), [])
