"""The sessions of two ranks under DDP, FSDP2, tensor parallelism and a pipeline (``sharded_training.py``)."""

from typing import Any

import forked_ranks
import pytest
import sharded_training as trained

from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.analysis.ranks import merge_ranks
from mpinspect.ranges.windows.tensors import TensorKey


class Cases(dict[str, Any]):
    """The results of a rank, by case. Reading a case that this torch cannot train skips the test."""

    def __missing__(self, name: str) -> Any:
        if trained.NO_FSDP2:
            pytest.skip(trained.NO_FSDP2)
        raise KeyError(name)


Found = list[Cases]
#: A rank's explanations: for reduced values, for weights, and for the gradient that a pipeline stage received.
ALL_RANKS = "the tensor combines values of all ranks, so it may have arisen on another one"
OTHER_RANK = "its gradients may be sums over the ranks, so look for the rank with the earliest event"
NEXT_STAGE = "the gradient passed to backward() for its output was not finite"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The results of each rank, by case, from one pair of processes for all tests."""
    folder = tmp_path_factory.mktemp("ranks")
    modules = (*trained.MODULES, "torch.distributed.checkpoint.state_dict")
    return [Cases(each) for each in forked_ranks.results(folder, trained.RANKS, trained.all_cases, modules)]


@pytest.mark.parametrize("way", trained.WAYS)
def test_a_healthy_sharded_training_is_unchanged_and_completely_counted(found: Found, way: str) -> None:
    for rank in found:
        case = rank[f"planted {way} "]
        assert case["same"] == [True, True]
        for told in (case["gradients"], case["everything"]):
            assert told["steps"] == trained.STEPS
            assert (told["notes"], told["events"], told["uncounted"]) == ((), [], [])


@pytest.mark.parametrize("way", trained.WAYS)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_rank_of_the_first_infinity_names_step_phase_and_module(found: Found, way: str, phase: str) -> None:
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
def test_the_other_rank_reports_that_the_infinity_may_be_from_another_rank(
    found: Found, way: str, phase: str, step: int, says: str
) -> None:
    case = found[0][f"planted {way} {phase}"]
    assert case["same"] == [True, True]
    for told in (case["gradients"], case["everything"]):
        assert told["events"][0][0] == step
        assert says in told["events"][0][3]


@pytest.mark.parametrize("capture", trained.CAPTURES)
def test_the_input_of_a_later_pipeline_stage_is_not_reported_as_the_batch(found: Found, capture: str) -> None:
    first, second = (rank["first stage"][capture] for rank in found)
    assert first["events"][0][:3] == (trained.BROKEN_AT, "forward", "1")
    given = (trained.BROKEN_AT, "forward", "", "the previous stage of the pipeline sent it: look at that stage's rank")
    assert second["events"][0] == given
    reports = [analyse(second["session"]), analyse(merge_ranks(each["session"] for each in (first, second)))]
    wrong = {"batch-not-finite", "weights-broken-elsewhere"}
    assert not [each for report in reports for each in report.findings if each.id in wrong]
    assert reports[1].findings[0].id == "non-finite-event"
    named = "'1' (Plant)" if capture == "everything" else "'1'"
    assert f"the activation of {named} held an inf on rank 0" in " ".join(str(reports[1]).split())


@pytest.mark.parametrize("way", ["pipeline", "pipeline-fsdp"])
def test_a_pipelines_micro_batches_are_counted_without_its_trial_run(found: Found, way: str) -> None:
    all_of_them = trained.STEPS * trained.MICRO_BATCHES
    for rank in found:
        samples = rank[f"planted {way} "]["everything"]["samples"]
        assert samples[TensorKey("1", "activation")] == all_of_them
        assert samples[TensorKey("1", "activation_gradient")] == all_of_them
        # FSDP2 reduces gradients once per step, after the last micro-batch.
        reduced = trained.STEPS if way == "pipeline-fsdp" else all_of_them
        assert samples[TensorKey("0.up.weight", "weight_gradient")] == reduced


@pytest.mark.parametrize("ranks", [1, trained.RANKS])
@pytest.mark.parametrize("when", ["before", "made before", "after"])
def test_the_inspector_can_be_attached_before_or_after_fsdp2(found: Found, when: str, ranks: int) -> None:
    for rank in found:
        told, after = rank[f"{when} {ranks}"], rank[f"after {ranks}"]
        assert told["same"]
        assert (told["notes"], told["uncounted"], told["steps"]) == ((), [], trained.STEPS)
        assert told["totals"] == after["totals"]
        assert len(told["exact"]) == 10
        # The name is not FSDPSequential.
        assert told["model"] == "Sequential"
        assert told["types"] == {"Linear", "Tanh", "Plant"}


def test_parameters_swapped_in_an_optimizer_are_noted_at_its_step(found: Found) -> None:
    for rank in found:
        told = rank["swapped"]
        assert told["same"]
        assert len(told["notes"]) == 1
        assert (
            "10 parameters were replaced after the inspector was attached, and this was noticed in step 0"
            in told["notes"][0]
        )
        assert told["samples"][TensorKey("0.up.weight", "weight_gradient")] == trained.STEPS - 1


def test_only_updates_count_as_steps_before_the_optimizer_is_known(found: Found) -> None:
    bodies = [each for way, each in trained.BODIES.items() if way != "fsdp" or not trained.NO_FSDP2]
    for rank in found:
        steps = {name: count for name, count in rank.items() if name.startswith("steps ")}
        assert len(steps) == 2 * sum(map(len, bodies))
        assert {name: count for name, count in steps.items() if count != 3} == {}


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["GradScaler", "LossScaler"])
def test_scaled_clipped_and_resumed_trainings_are_unchanged(found: Found, way: str, kind: str) -> None:
    for number, rank in enumerate(found):
        case = rank[f"scaled {way} {kind}"]
        assert case["same"] == [True, True]
        assert case["finite"]
        for told, steps in ((case["inspected"], trained.STEPS), (case["resumed"], 2)):
            # Creating the optimizer's states, as torch's checkpoints do, does not count as a step.
            assert (told["steps"], told["skipped"], told["notes"]) == (steps, 1, ())
            step, phase, module, explanation = told["events"][0]
            assert (step, phase) == (trained.BROKEN_AT - trained.STEPS + steps, "backward")
            assert module == "1" if number else ALL_RANKS in explanation


def test_all_ranks_skip_the_same_steps_in_mixed_precision(found: Found) -> None:
    expected = [number != trained.BROKEN_AT for number in range(trained.STEPS)]
    for rank in found:
        for name in ("fp16-amp", "policy"):
            told = rank[f"mixed {name}"]
            assert told["same"]
            assert told["stepped"] == [expected, expected]
            assert (told["steps"], told["skipped"], told["notes"]) == (trained.STEPS, 1, ())


def test_the_error_of_mixed_precision_under_fsdp2_names_the_policy_to_use(found: Found) -> None:
    for rank in found:
        for half, dtype in (("fp16", "float16"), ("bf16", "bfloat16")):
            said = rank[f"mixed {half}-master"]["error"]
            assert said.startswith("the model was sharded by fully_shard")
            assert f"mp_policy=MixedPrecisionPolicy(param_dtype=torch.{dtype})), and use precision='fp32'" in said
        assert "first call fully_shard, or whatever replaced them, then make the optimizer" in rank["too late"]


def test_detaching_after_the_process_group_was_destroyed_works(found: Found) -> None:
    for rank in found:
        for told in rank["outlived"].values():
            assert (told["steps"], told["notes"], told["uncounted"]) == (1, (), [])
