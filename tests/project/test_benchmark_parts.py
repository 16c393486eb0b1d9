"""The benchmarks' components, without measuring times."""

import blocks
import counting
import entrances
import gpu_overhead
import hard_data
import module_calls
import networks
import onlookers
import overhead
import pytest
import torch
import where_it_goes
from trainings import take_step

import mpinspect
from mpinspect.ranges.capture import optimizer_steps
from mpinspect.ranges.kinds import KINDS

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


# -- data --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("data", hard_data.KINDS)
def test_hard_data_has_the_named_distribution(data, dtype):
    values = hard_data.fresh(data, 20_000, dtype)
    assert (values.dtype, values.shape) == (dtype, (20_000,))
    histogram = mpinspect.count_exponents(values)
    zeros, powers, exponents = (
        histogram.zeros / 20_000,
        int(histogram.powers_of_two.sum()),
        histogram.counts.nonzero()[0],
    )
    finite_normal = torch.isfinite(values) & (values.abs() >= torch.finfo(dtype).tiny)
    if data == hard_data.ZEROS:
        assert zeros == 1
    elif data == hard_data.SUBNORMALS:
        assert zeros == 0
        assert not finite_normal.any()
    elif data == hard_data.HALF_ZEROS:
        assert 0.48 < zeros < 0.52
    elif data == hard_data.POWERS:
        assert powers == 20_000
        assert finite_normal.all()
    elif data == hard_data.WIDE:
        assert finite_normal.all()
        assert len(exponents) == (30 if dtype == torch.float16 else 60)
    else:
        assert zeros < 0.01
        assert len(exponents) < 25


def test_every_way_of_counting_blocks_counts_the_exponents_too():
    values = hard_data.fresh(hard_data.DENSE, 256 * 128, torch.bfloat16).reshape(256, 128)
    alone, *others = [call() for call in blocks.ways(values).values()]
    assert len({counts for counts, _ in others}) == len(others) > 1
    assert all(torch.equal(row, alone) for _, row in others)


def test_large_data_repeats_a_block_and_fills_all_of_the_memory(monkeypatch):
    monkeypatch.setattr(hard_data, "_BLOCK", 64)
    values = hard_data.fresh(hard_data.DENSE, 150, torch.float32)
    assert torch.equal(values[:64], values[64:128])
    assert torch.equal(values[:22], values[128:])


# -- counting ----------------------------------------------------------------------------------------------------------


def test_ratios_are_relative_to_dense_data():
    medians = {("dense", "sum"): 2.0, ("dense", "mpinspect"): 6.0, ("zeros", "mpinspect"): 9.0}
    row = counting.row(torch.float16, 1000, "zeros", "mpinspect", medians)
    assert (row.dtype, row.over_sum, row.over_dense) == ("float16", 4.5, 1.5)
    assert row.us == 9e6
    assert row.ns_per_value == 9e6
    assert row.gb_per_s == pytest.approx(2000 / 9 / 1e9)


def test_every_contestant_is_first_once():
    ways = dict.fromkeys("abc")
    assert ["".join(counting.in_turn(ways, turn)) for turn in range(3)] == ["abc", "bca", "cab"]


def test_the_promises_are_judged_at_their_size_only():
    def rows(elements):
        return [
            counting.Row("float32", elements, data, way, us, 0, 0, over_sum, over_dense)
            for data, way, us, over_sum, over_dense in [
                ("dense", "mpinspect", 10.0, 5.5, 1.0),
                ("half zeros", "mpinspect", 12.0, 6.6, 1.2),
                ("dense", "add_histogram", 300.0, 0, 1.0),
            ]
        ]

    kept = {row["key"]: (row["value"], row["met"]) for row in counting.promises(rows(counting.PROMISED))}
    assert kept == {
        "counting.over_sum": (5.5, False),
        "counting.add_histogram": (30.0, True),
        "counting.half_zeros": (1.2, True),
    }
    assert counting.promises(rows(1000)) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_contestant_runs(dtype):
    rows = counting.measure(1 << 20, dtype, (hard_data.DENSE, hard_data.ZEROS), 1)
    ways = [row.way for row in rows if row.data == hard_data.DENSE]
    assert {"mpinspect", "mpinspect in torch", "sum", "copy", "read"} <= set(ways)
    assert ("add_histogram" in ways) == (dtype == torch.float32)
    assert [row.way for row in rows if row.data == hard_data.ZEROS] == ["mpinspect"]


# -- the stopwatch -----------------------------------------------------------------------------------------------------


def scaled_step(model, optimizer, scaler):
    take_step(optimizer, model(torch.randn(4, 8)).square().mean(), scaler)


def small():
    model = networks.tiny_layers(2, 8, 4)
    return model, networks.sgd(model.parameters()), torch.amp.GradScaler("cpu")


def test_the_entrances_cover_all_that_the_inspector_does_in_a_step():
    model, optimizer, scaler = small()
    watch = entrances.Stopwatch()
    with watch.around_entrances(), mpinspect.Inspector(model, optimizers=optimizer, capture=KINDS):
        scaled_step(model, optimizer, scaler)
        assert entrances.uncovered(watch, lambda: scaled_step(model, optimizer, scaler)) == []
    assert watch.seconds > 0
    assert watch.depth == 0


def test_an_entrance_that_is_not_listed_is_found(monkeypatch):
    left = tuple(path for path in entrances.ENTRANCES if "ParameterHook" not in path)
    monkeypatch.setattr(entrances, "ENTRANCES", left)
    model, optimizer, scaler = small()
    watch = entrances.Stopwatch()
    with watch.around_entrances(), mpinspect.Inspector(model, optimizers=optimizer):
        missed = entrances.uncovered(watch, lambda: scaled_step(model, optimizer, scaler))
    assert "tensor_hooks.py:__call__" in missed


@pytest.mark.parametrize(
    "gone",
    [
        "mpinspect.ranges.capture.dispatcher:Dispatcher.gone",
        "mpinspect.ranges.capture.dispatcher:Gone.__call__",
        "mpinspect.runtime.hooks:gone",
    ],
)
def test_a_missing_entrance_is_named(monkeypatch, gone):
    monkeypatch.setattr(entrances, "ENTRANCES", (*entrances.ENTRANCES, gone))
    with pytest.raises(LookupError, match=gone), entrances.Stopwatch().around_entrances():
        pass


def test_the_entrances_are_restored():
    before = [entrances._found(path) for path in entrances.ENTRANCES]
    with entrances.Stopwatch().around_entrances():
        assert [entrances._found(path) for path in entrances.ENTRANCES] != before
    assert [entrances._found(path) for path in entrances.ENTRANCES] == before


def test_an_entrance_inside_another_counts_once(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(entrances.time, "perf_counter", lambda: next(clock))
    watch = entrances.Stopwatch()
    inner = watch.timed(lambda: None)
    outer = watch.timed(lambda: (inner(), inner()))
    outer()
    # Readings 0 to 3: inner calls read the clock only at their start.
    assert watch.seconds == 3
    assert {name.rpartition(".")[2]: spent.calls for name, spent in watch.by_entrance.items()} == {"<lambda>": 1}


# -- models, onlookers -------------------------------------------------------------------------------------------------


def test_the_models_have_their_published_sizes():
    resnet50 = networks.resnet50()
    assert len(list(resnet50.parameters())) == 161
    assert sum(parameter.numel() for parameter in resnet50.parameters()) == 25_557_032
    with torch.device("meta"):
        gpt2 = networks.gpt2_small()
    assert sum(parameter.numel() for parameter in gpt2.parameters()) == 124_475_904


@pytest.mark.parametrize("onlooker", onlookers.ONLOOKERS, ids=lambda onlooker: onlooker.name)
def test_every_onlooker_measures_and_removes_its_hooks(onlooker):
    trainer = onlookers.Trainer(networks.tiny_layers(2, 8, 4), networks.sgd, networks.vectors(4, 8, 4))
    if "wandb" in onlooker.name:
        pytest.importorskip("wandb")
    times, callbacks = onlooker.look(trainer, 2)
    assert len(times) == 2
    timed = not onlooker.name.startswith(("TensorBoard", "wandb", "Transformers"))
    assert (callbacks is not None) is timed
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in trainer.model.modules())
    assert not any(parameter._backward_hooks for parameter in trainer.model.parameters())
    assert trainer.after_backward() is None


@pytest.mark.parametrize("outputs", [False, True])
def test_the_reading_benchmark_reads_the_tensors_that_the_inspector_counts(outputs, monkeypatch):
    summed = []
    monkeypatch.setattr(
        entrances.Stopwatch, "timed", lambda watch, original: lambda tensor: summed.append(tensor.numel())
    )
    trainer = onlookers.Trainer(networks.tiny_layers(2, 8, 4), networks.sgd, networks.vectors(5, 8, 4))
    onlookers.with_sums(trainer, 2, outputs=outputs)
    gradients = [8 * 8, 8, 8 * 8, 8, 8 * 4, 4] + 4 * [5 * 8] + [5 * 4]
    # The watch also reads the container's output, which is the last layer's.
    returned = 4 * [5 * 8] + 2 * [5 * 4] if outputs else []
    assert sorted(summed) == sorted(3 * (gradients + returned))


def test_the_overhead_is_measured_against_bare_steps():
    subject = overhead.Subject(
        "tiny", lambda: networks.tiny_layers(2, 8, 4), networks.vectors(4, 8, 4), networks.sgd, 2
    )
    rows = overhead.measure(subject, 1, onlookers.ONLOOKERS[:1])
    assert [row.name for row in rows] == ["bare", onlookers.ONLOOKERS[0].name]
    assert rows[0].callbacks_fraction is None
    assert rows[1].callbacks_fraction > 0


def test_only_the_promised_model_is_compared_with_promises():
    name = next(onlooker.name for onlooker in onlookers.ONLOOKERS if onlooker.target == "overhead.watch")
    rows = [overhead.Row(overhead.PROMISED, name, 1.0, 1.0, 0.02), overhead.Row("another", name, 1.0, 1.0, 0.5)]
    assert [(row["key"], row["value"]) for row in overhead.promises(rows, 0.9)] == [
        ("overhead.watch", 0.02),
        ("overhead.module_call", 0.9),
    ]


def test_module_calls_are_timed_bare_and_between_samples(monkeypatch):
    monkeypatch.setattr(module_calls, "MODULES", 3)
    monkeypatch.setattr("mpinspect.ranges.capture.model_hooks.compiled_graphs", lambda: 0)
    seen = []

    def seconds(model, x, passes):
        # An attached inspector without samples or watch has hooks only on optimizers.
        seen.append(len(optimizer_steps._listeners))
        assert not any(module._forward_hooks for module in model.modules())
        assert not any(parameter._backward_hooks for parameter in model.parameters())
        # 4 modules, a microsecond each.
        return 4e-6 if seen[-1] else 0.0

    monkeypatch.setattr(module_calls, "_seconds", seconds)
    assert module_calls.added_us(rounds=2) == pytest.approx(1.0)
    assert seen == [0, 1, 0, 1]


# -- where_it_goes -----------------------------------------------------------------------------------------------------


def test_time_outside_of_the_package_is_charged_to_the_calling_function():
    def ours(name):
        return str(where_it_goes._PACKAGE / "ranges" / "capture" / "watch.py"), 1, name

    training, wrapper, operator = ("train.py", 1, "train"), ("torch.py", 1, "no_grad"), ("~", 0, "add")
    first, second = ours("first"), ours("second")
    # train -> first -> wrapper -> second -> operator, and train -> operator. Seconds: 1, 2, 4 and 8; 8 the training's.
    stats = {
        training: (1, 1, 100.0, 123.0, {}),
        first: (1, 1, 1.0, 15.0, {training: (1, 1, 1.0, 15.0)}),
        wrapper: (1, 1, 2.0, 14.0, {first: (1, 1, 2.0, 14.0)}),
        second: (3, 3, 4.0, 12.0, {wrapper: (3, 3, 4.0, 12.0)}),
        operator: (6, 6, 16.0, 16.0, {second: (3, 3, 8.0, 8.0), training: (3, 3, 8.0, 8.0)}),
    }
    own = where_it_goes.own_seconds(stats)
    assert own == {first: (1, pytest.approx(3.0)), second: (3, pytest.approx(12.0))}
    rows = where_it_goes.rows_of(own, steps=3)
    assert [(row.function, row.calls_per_step) for row in rows] == [
        ("ranges/capture/watch.py:second", 1.0),
        ("ranges/capture/watch.py:first", pytest.approx(1 / 3)),
    ]
    assert [row.fraction for row in rows] == [pytest.approx(0.8), pytest.approx(0.2)]


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def test_the_worst_row_is_compared_with_the_promise_on_synchronisations():
    rows = [
        gpu_overhead.Row(subject, name, 1.0, 1.01, 1.1, 0.0, 0.0, 0.0, 0.0, synchronisations)
        for subject in gpu_overhead.PROMISED.values()
        for name, synchronisations in ((gpu_overhead.DEFAULTS, 0.0), ("another", 0.5))
    ]
    kept = {row["key"]: row["value"] for row in gpu_overhead.promises(rows)}
    assert kept == {"gpu.resnet50": 1.01, "gpu.gpt2": 1.01, "gpu.synchronisations": 0.5}
    assert [row["key"] for row in gpu_overhead.promises(rows[:2])] == ["gpu.gpt2"]
