"""The verdict, the first lines of a report: the precision that a run uses, and whether the run is healthy."""

import copy
from dataclasses import replace

import pytest
import sessions
import torch
from torch import nn
from trainings import closure_of, inspected, take_step

import mpinspect
from mpinspect import Inspector, MixedPrecision
from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.faults.verdict import verdict
from mpinspect.ranges.report.scale_line import reserve_line
from mpinspect.ranges.session import ScaleChange, ScalerRecord, Session
from mpinspect.reporting.finding import Finding
from mpinspect.reporting.words import as_power


def train(
    dtype=torch.float32, autocast=None, scaler=None, optimizer=torch.optim.AdamW, steps=8, format=None, **options
) -> Inspector:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
    stepping = optimizer(model.parameters(), lr=0.01)
    with Inspector(model, **options) as inspector:
        for _ in range(steps):
            x, y = torch.randn(16, 8, dtype=dtype), torch.randint(0, 4, (16,))
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                loss = nn.functional.cross_entropy(model(x).float(), y)
            stepping.zero_grad()
            (scaler.scale(loss) if scaler else loss).backward()
            if scaler:
                scaler.step(stepping)
                scaler.update()
            else:
                stepping.step()
    return inspector


def scaler(**options) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **options)


def test_a_model_that_casts_one_part_computes_in_two_precisions():
    class Halved(nn.Linear):
        def forward(self, x):
            return super().forward(x).bfloat16()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Halved(16, 4))
    inspector = inspected(model, lambda _: model(torch.randn(4, 8)).float().square().mean(), 3, optimizers=None)
    expected = "Computes in FP32 and BF16: FP32 weights, no autocast, SGD, no scaler."
    assert inspector.report().verdict.precision == expected


@pytest.mark.parametrize(
    ("told", "how"),
    [
        ("Computes in FP32: FP32 weights, no autocast, AdamW with states in FP32, no scaler.", {}),
        (
            "Computes in BF16: FP32 weights, BF16 autocast, AdamW with states in FP32, no scaler.",
            {"autocast": torch.bfloat16},
        ),
        (
            "Computes in FP16: FP32 weights, FP16 autocast, AdamW with states in FP32, GradScaler from 256 (2^8).",
            {"autocast": torch.float16, "scaler": scaler(init_scale=256.0)},
        ),
        (
            "Computes in BF16: BF16 weights, no autocast, SGD, no scaler.",
            {"dtype": torch.bfloat16, "optimizer": torch.optim.SGD},
        ),
        (
            "Computes in FP32: FP32 weights, no autocast, SGD, GradScaler disabled.",
            {"optimizer": torch.optim.SGD, "scaler": scaler(enabled=False)},
        ),
    ],
    ids=["fp32", "bf16 autocast", "fp16 autocast", "bf16 weights", "a scaler that is switched off"],
)
def test_the_verdict_names_the_precision_of_the_run(told, how):
    assert train(**how).report().verdict.precision == told


def test_masters_and_weights_have_their_own_precision():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    precision = MixedPrecision(model, optimizer, precision="bf16-master")
    with Inspector(model, optimizers=[optimizer]) as inspector:
        for _ in range(4):
            with precision.autocast():
                loss = nn.functional.cross_entropy(model(torch.randn(16, 8)).float(), torch.randint(0, 4, (16,)))
            precision.zero_grad()
            precision.backward(loss)
            precision.step()
    line = inspector.report().verdict.precision
    assert line.startswith("Computes in BF16: BF16 weights, ")
    assert "SGD on FP32 masters with states in FP32" in line


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"autocast": torch.bfloat16},
        {"autocast": torch.float16, "scaler": scaler(init_scale=256.0)},
        {"watch": False},
        {"every": 3},
    ],
    ids=["fp32", "bf16", "fp16", "no watch", "every third step"],
)
def test_the_verdict_of_a_healthy_run_has_at_most_four_lines(how):
    verdict = train(**how).report().verdict
    assert verdict.healthy is True
    first, checks, *_ = verdict.sentences
    assert first.startswith("Healthy: the precision needs no change. ")
    assert checks.startswith("No numerical problem was found in 8 steps. ")
    searched = "Only the 8 sampled ones were" if how.get("watch") is False else "Every step was"
    steps = "3 of them" if "every" in how else "each"
    counted = f"in {steps} the ranges of 4 weight gradients and 3 activation gradients were counted."
    assert f" {searched} searched for infinities and NaNs; {counted}" in checks
    assert len(verdict.lines) <= 4
    assert not verdict.code
    assert not verdict.change


def test_no_grad_scaler_is_suggested_for_an_optimizer_with_a_closure():
    def with_closure():
        model, data = nn.Linear(8, 4), torch.randn(16, 8)
        optimizer = torch.optim.LBFGS(model.parameters())
        with Inspector(model) as inspector:
            for _ in range(4):
                optimizer.step(closure_of(optimizer, lambda: model(data).square().mean()))
        return inspector

    advice = "To train in 16 bits, try BF16 autocast"
    assert f"{advice}, or FP16 autocast with a GradScaler" in train().report().verdict.sentences[0]
    assert with_closure().report().verdict.sentences[0].endswith(f"{advice}.")


def test_the_verdict_of_a_bfloat16_run_states_the_scale_that_float16_would_need():
    report = train(autocast=torch.bfloat16).report()
    assert report.format == "bfloat16"
    assert report.loss_scale.needed is False
    assert report.verdict.sentences[2].startswith(
        "BF16 needs no loss scale; FP16 would fit at any loss scale in the window 2^"
    )
    finer = report.in_float16.finer_from
    assert report.verdict.sentences[2].endswith(
        f"; at scales of {as_power(finer)} or more FP16 rounds more finely than BF16, by up to 8x (RMS)."
    )
    assert report.in_float16.lowest <= 1 <= report.in_float16.highest


def test_float16_rounds_more_finely_than_bfloat16_from_the_reported_scale():
    gradients = torch.randn(4096) * 2.0**-20
    with mpinspect.Recorder() as recorder:
        for step in range(4):
            recorder.observe("w", gradients.numpy(), step=step)
    advice = recorder.report().loss_scale

    def noise(scale, dtype):
        held = (gradients.double() * scale).to(dtype).double() / scale
        return float((held - gradients.double()).square().sum())

    finer = advice.finer_from
    assert finer > advice.lowest
    in_bfloat16 = noise(1.0, torch.bfloat16)
    assert noise(finer, torch.float16) < in_bfloat16 < noise(finer / 4, torch.float16)
    assert noise(64 * finer, torch.float16) < in_bfloat16 / 32


def test_a_few_weights_of_another_dtype_are_called_a_few():
    recorded = sessions.word_model()
    weights = {"float32": 1, "bfloat16": 2000}
    session = replace(recorded, precision=replace(recorded.precision, weights=weights, autocast=()))
    assert "BF16 weights (a few in FP32), " in analyse(session).verdict.precision


@pytest.mark.parametrize(
    ("used", "told"),
    [
        (2.0**13, "Healthy: the precision needs no change. Keep FP16 and this loss scale."),
        (
            2.0**24,
            "Healthy. Take the loss scale 32768 (2^15) next, or a GradScaler, which skips a step that overflows.",
        ),
        (None, "Healthy: the precision needs no change in the observed part."),
    ],
)
def test_the_advice_after_a_healthy_float16_run_depends_on_its_scale(used, told):
    recorded = sessions.word_model()
    scales = () if used is None else (ScaleChange(0, used),)
    session = replace(
        recorded,
        precision=replace(recorded.precision, autocast=("float16",), weights={"float32": 1}),
        progress=replace(recorded.progress, scales=scales),
    )
    report = analyse(session)
    healthy = verdict(session, (), report.loss_scale, None)
    assert healthy.healthy is True
    assert (healthy.opening, healthy.sentences[0]) == ("Healthy", told)


def test_a_scaler_above_the_window_may_stay_and_a_static_scale_may_not():
    recorded = sessions.word_model()
    told = []
    for scalers in ((), (ScalerRecord("GradScaler", backoff_factor=0.5),)):
        precision = replace(recorded.precision, autocast=("float16",), weights={"float32": 1}, scalers=scalers)
        progress = replace(recorded.progress, scales=(ScaleChange(0, 2.0**24),))
        session = replace(recorded, precision=precision, progress=progress)
        first, _, scale = verdict(session, (), analyse(session).loss_scale, None).sentences
        told.append((first, scale))
    place = "The loss scale, 16777216 (2^24), leaves little room for larger gradients. Scales up to 2^18 leave enough."
    assert told == [
        ("Healthy. Take the loss scale 32768 (2^15) next, or a GradScaler, which skips a step that overflows.", place),
        (
            "Healthy: the precision needs no change. Keep the scaler: it skips steps that overflow, and lowers the scale.",
            place,
        ),
    ]


def test_the_reserve_of_the_window_is_named_in_powers_of_two():
    advice = analyse(sessions.word_model()).loss_scale
    assert (advice.lowest, advice.highest, advice.recommended) == (2.0**4, 2.0**18, 2.0**15)
    suggested = "Room in the window, in powers of two: the suggested scale, 2^15, has 11 below and 3 above"
    assert reserve_line(advice) == reserve_line(advice, 2.0**15) == f"{suggested}."
    assert reserve_line(advice, 2.0**18) == f"{suggested}; the run's last, 2^18, has 14 below and 0 above."
    assert reserve_line(advice, 2.0**3) == f"{suggested}; the run's last, 2^3, lies 1 below the window."
    assert reserve_line(advice, 2.0**22).endswith("the run's last, 2^22, lies 4 above the window.")
    assert reserve_line(replace(advice, needed=None)) == reserve_line(replace(advice, lowest=2.0**20)) == ""


def test_a_run_can_be_judged_in_any_format():
    inspector = train(autocast=torch.bfloat16)
    assert inspector.report(format="float16").format == "float16"
    assert inspector.report(format=torch.bfloat16).format == "bfloat16"
    assert inspector.report(format=mpinspect.FLOAT16).format == "float16"
    with pytest.raises(ValueError, match="float17"):
        inspector.report(format="float17")


def test_an_unobserved_run_is_neither_healthy_nor_broken():
    model = nn.Linear(4, 2)
    with Inspector(model) as inspector:
        pass
    assert inspector.report().verdict.healthy is None
    with Inspector(model) as inspector:
        model(torch.randn(2, 4))
    assert inspector.report().verdict.healthy is None
    assert "no" in inspector.report().verdict.sentences[0]


def test_a_run_with_a_nan_in_its_first_forward_is_not_healthy():
    model = nn.Linear(4, 2)
    with Inspector(model) as inspector:
        model(torch.full((2, 4), torch.nan)).sum().backward()
    verdict = inspector.report().verdict
    assert verdict.healthy is False
    assert "batch" in verdict.sentences[0]


def test_a_loss_scaled_by_hand_is_not_reported_as_a_scaler():
    report = train(dtype=torch.bfloat16, loss_scale=4.0).report()
    assert "no scaler" in report.verdict.precision


def test_a_wrapped_optimizer_is_named_by_its_inner_optimizer():
    class Around:
        def __init__(self, parameters, lr):
            self.inner = torch.optim.RMSprop(parameters, lr=lr)

        def zero_grad(self):
            self.inner.zero_grad()

        def step(self):
            self.inner.step()

    assert "RMSprop with states in FP32" in train(optimizer=Around).report().verdict.precision


def test_the_session_file_contains_the_ledger(tmp_path):
    inspector = train(autocast=torch.bfloat16, log_dir=tmp_path)
    loaded = Session.load(tmp_path)
    assert loaded.precision == inspector.session().precision
    assert loaded.precision.autocast == ("bfloat16",) or dict(loaded.precision.autocast) == {"bfloat16": 1}


def test_the_verdict_of_a_broken_run_has_at_most_six_lines_and_code():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).bfloat16()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    shadow = copy.deepcopy(model)
    with Inspector(model) as inspector:
        for _ in range(20):
            take_step(optimizer, model(torch.randn(16, 8).bfloat16()).float().square().mean())
            with torch.no_grad():
                for mine, theirs in zip(shadow.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.001)
    verdict = inspector.report().verdict
    assert verdict.healthy is False
    assert verdict.code
    assert 3 <= len(verdict.lines) - len(verdict.code.splitlines()) + 1 <= 6
    assert verdict.more.startswith("Also to fix: ")


def test_the_verdict_summarises_further_warnings():
    messages = (
        "The first.",
        "It was not finite in step 5 (at a scale of 8 (2^3)), where it began (its output; not its input).",
        "The scale, 8 (2^3), is too large: by far.",
        "One.",
        "Two.",
    )
    grave = [Finding(f"id-{place}", "warning", "", message, {}) for place, message in enumerate(messages)]
    advice = analyse(Session()).loss_scale
    said = verdict(Session(), [*grave, Finding("other", "info", "", "x", {})], advice, None).more
    assert said == (
        "Also to fix: It was not finite in step 5 (at a scale of 8 (2^3)), where it began (id-1); "
        "The scale, 8 (2^3), is too large (id-2); and 2 findings more. Also in the report: 1 info."
    )
    assert verdict(Session(), grave[:1], advice, None).more == ""


def test_autocast_of_a_compiled_model_is_unknown() -> None:
    """Autocast is recorded at the calls of modules; without such calls, FP32 weights do not prove FP32 arithmetic."""
    session = sessions.word_model()
    weights = replace(session.precision, weights={"float32": 9}, autocast=(), outputs=())
    compiled = replace(session, precision=weights, progress=replace(session.progress, compiled=("",)))
    assert analyse(compiled).verdict.precision.startswith("FP32 weights, autocast not known (the model is compiled)")
    assert analyse(replace(session, precision=weights)).verdict.precision.startswith("Computes in FP32: FP32 weights")
