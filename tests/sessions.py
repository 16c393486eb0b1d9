"""Hand-written sessions and reports, for the tests of rendering. Deterministic and without torch."""

import dataclasses
import math

import numpy as np

from mpinspect.numeric.exponents import ExponentHistogram, Interval, merge
from mpinspect.numeric.formats import FLOAT16
from mpinspect.ranges.analysis.report import (
    Coverage,
    DynamicSettings,
    FormatVerdict,
    LayerReport,
    LossScaleAdvice,
    RangeReport,
    ScaleConflict,
    TimeBlock,
    Verdict,
)
from mpinspect.ranges.kinds import ACTIVATION, ACTIVATION_GRADIENT, GRADIENT_KINDS, KINDS, UPDATE, WEIGHT_GRADIENT
from mpinspect.ranges.session import Event, Progress, RunInfo, ScaleChange, Session
from mpinspect.ranges.windows.tensors import LostUpdates, TensorInfo, TensorKey, TensorWindow
from mpinspect.ranges.windows.window import Window
from mpinspect.reporting.finding import Finding

HOSTILE_NAMES = (
    "[red]not red[/red]",
    "a|pipe*and_`code`",
    "<script>alert(1)</script>&amp;",
    "two\nlines\r\tand a tab",
    "\x1b[31mescape\x1b[0m",
    "schicht.größe.层.🔥",
    "right\u202eto left",
    "lone \ud800 surrogate",
    "$x_1^{2}$ \\frac",
    "deep." * 59 + "block",
    "",
)


def bell(centre: int, spread: float = 3.0, elements: int = 10_000, **extra: int) -> ExponentHistogram:
    """Return bell-shaped counts around 2^centre, about ``elements`` in all; zeros, infs, nans as given."""
    exponents = np.arange(centre - int(4 * spread), centre + int(2 * spread) + 1)
    weight = np.exp(-0.5 * ((exponents - centre) / spread) ** 2)
    counts = np.floor(weight / weight.sum() * elements).astype(np.int64)
    return ExponentHistogram.from_counts(counts, int(exponents[0]), **extra)


def session(
    tensors: dict[TensorKey, ExponentHistogram],
    *,
    never_fired: dict[TensorKey, str] | None = None,
    windows: int = 4,
    floors: dict[TensorKey, int] | None = None,
    lost_updates: dict[TensorKey, dict[str, LostUpdates]] | None = None,
    model: str = "WordModel",
    **fields: object,
) -> Session:
    """A session of ``windows`` equal windows of ten steps, each holding these counts of every tensor."""
    never_fired = never_fired or {}
    watched = tuple(
        TensorInfo(key.name, key.kind, key.name.rpartition(".")[0], "Linear", note=never_fired.get(key, ""))
        for key in (*tensors, *never_fired)
    )
    counted = {
        key: _tensor_window(key, histogram, floors or {}, lost_updates or {}) for key, histogram in tensors.items()
    }
    peaks = [h.peak_exponent for key, h in tensors.items() if h.nonzero and key.kind in GRADIENT_KINDS]
    made = [
        Window(10 * i, 10 * i + 9, 10, counted, {max(peaks): 10} if peaks else {})
        for i in range(windows if tensors else 0)
    ]
    steps = 10 * len(made)
    result = Session(
        info=RunInfo(model, "2026-01-01T00:00:00+00:00", KINDS, 1, True, {"mpinspect": "0.1.0"}),
        watched=watched,
        windows=tuple(made),
        progress=Progress(steps, steps, 0, steps, True, True, "", (ScaleChange(0, 1.0),)),
    )
    return dataclasses.replace(result, **fields)  # type: ignore[arg-type]


def _tensor_window(
    key: TensorKey,
    histogram: ExponentHistogram,
    floors: dict[TensorKey, int],
    lost_updates: dict[TensorKey, dict[str, LostUpdates]],
) -> TensorWindow:
    return TensorWindow(
        histogram,
        samples=10,
        peaks={histogram.peak_exponent: 10} if histogram.nonzero else {},
        passed_through="float16" if key in floors else "float32",
        floor_exponent=floors.get(key),
        lost_updates=lost_updates.get(key, {}),
        numel_max=histogram.total // 10,
    )


# -- sessions that every report must accept -----------------------------------------------------------------------


def word_model() -> Session:
    """The usual case: weight gradients fit FP16, gradients of the last activations do not."""
    tensors = {
        TensorKey("embedding.weight", WEIGHT_GRADIENT): bell(-14, zeros=90_000),
        TensorKey("hidden.weight", WEIGHT_GRADIENT): bell(-12),
        TensorKey("hidden.bias", WEIGHT_GRADIENT): bell(-10, elements=640),
        TensorKey("decoder.weight", WEIGHT_GRADIENT): bell(-17, elements=262_144),
        TensorKey("embedding", ACTIVATION_GRADIENT): bell(-19, zeros=500),
        TensorKey("hidden", ACTIVATION_GRADIENT): bell(-18),
        TensorKey("decoder", ACTIVATION_GRADIENT): bell(-29, 4.0, elements=1_000_000),
    }
    return session(tensors, never_fired={TensorKey("spare.weight", WEIGHT_GRADIENT): "frozen: requires_grad is False"})


def everything() -> Session:
    """A session without default fields: every kind, a visibility floor, lost updates, events, notes, changes of scale."""
    bias, inner = (
        TensorKey("decoder.3.attn.key.bias", WEIGHT_GRADIENT),
        TensorKey("decoder.3.attn", ACTIVATION_GRADIENT),
    )
    step = TensorKey("decoder.3.attn.weight", UPDATE)
    made = word_model()
    tensors = made.windows[0].tensors
    return session(
        {key: window.histogram for key, window in tensors.items()}
        | {
            inner: bell(-20, zeros=9_000, infs=12, nans=3),
            bias: bell(-30, 1.0, elements=200),
            TensorKey("decoder.3.mlp", ACTIVATION): bell(14, 2.0),
            TensorKey("decoder.3.attn.weight", "weight"): bell(-6),
            step: bell(-16),
        },
        never_fired={
            TensorKey(f"tower.{i}.weight", WEIGHT_GRADIENT): "not part of the graph of any loss" for i in range(30)
        }
        | {TensorKey("spare.weight", WEIGHT_GRADIENT): "frozen: requires_grad is False"},
        floors={inner: -30},
        lost_updates={step: {"float16": LostUpdates(870, 1000), "bfloat16": LostUpdates(995, 1000, measured=True)}},
        events=(culprit(), dataclasses.replace(culprit(), step=413, value="nan", last_maxima=(), skipped=None)),
        notes=("TensorBoard could not be written: disk full; the report is still complete",),
        progress=Progress(500, 40, 2, 500, False, True, "", (ScaleChange(0, 65536.0), ScaleChange(413, 32768.0))),
    )


def culprit() -> Event:
    return Event(
        step=412,
        micro_batch=1,
        phase="backward",
        module="decoder.3.attn",
        what=ACTIVATION_GRADIENT,
        tensor="decoder.3.attn",
        value="inf",
        loss_scale=65536.0,
        last_maxima=(0.12, 0.25, 0.5, 0.97),
        skipped=True,
        forward_finite=True,
        gradients_finite=False,
        explanation="The gradients of the modules behind it were finite.",
    )


def unknown_scale() -> Session:
    made = word_model()
    reason = "the loss was multiplied by a tensor before backward"
    return dataclasses.replace(
        made, progress=dataclasses.replace(made.progress, scale_known=False, scale_unknown_reason=reason)
    )


def all_sessions() -> dict[str, Session]:
    """Return all sessions by name."""
    gradients = [TensorKey("a.weight", WEIGHT_GRADIENT), TensorKey("a", ACTIVATION_GRADIENT)]
    never = dict.fromkeys(gradients, "no backward ran")
    many = {
        TensorKey(
            f"encoder.layers.{i // 2}.attention.output.weight", (WEIGHT_GRADIENT, ACTIVATION_GRADIENT)[i % 2]
        ): bell(-12 - i // 20)
        for i in range(300)
    }
    return {
        "empty": Session(),
        "no_gradients": session({}, never_fired=never),
        "zero_gradients": session({key: ExponentHistogram.from_counts([], 0, zeros=100) for key in gradients}),
        "nan_everywhere": session({key: ExponentHistogram.from_counts([], 0, nans=100) for key in gradients}),
        "extreme_values": session({gradients[0]: bell(120, 1.0), gradients[1]: bell(-140, 1.0)}),
        "one_layer": session({gradients[0]: bell(-12)}),
        "word_model": word_model(),
        "everything": everything(),
        "unknown_scale": unknown_scale(),
        "layers_300": session(many, model="Encoder"),
        "hostile": session(
            {TensorKey(name, WEIGHT_GRADIENT): bell(-12 - i) for i, name in enumerate(HOSTILE_NAMES)},
            never_fired={TensorKey(name, ACTIVATION_GRADIENT): name for name in HOSTILE_NAMES},
            model=HOSTILE_NAMES[0],
            events=tuple(dataclasses.replace(culprit(), module=n, tensor=n, explanation=n) for n in HOSTILE_NAMES),
            notes=HOSTILE_NAMES,
        ),
    }


# -- reports filled in by hand --------------------------------------------------------------------------------------


def report_by_hand(session: Session) -> RangeReport:
    """Return a report with fixed advice (2^13 in 2^7 .. 2^20), so that it does not depend on the analysis's wording."""
    totals = session.totals()
    layers = tuple(_layer(info, totals.get(info.key)) for info in session.watched)
    gradients = [layer for layer in layers if layer.kind in (WEIGHT_GRADIENT, ACTIVATION_GRADIENT)]
    known = session.progress.scale_known and any(layer.max_log2_scale is not None for layer in gradients)
    never = tuple((info.name, info.kind, info.note) for info in session.watched if info.key not in totals)
    return RangeReport(
        session=session,
        format="float16",
        layers=layers,
        findings=FINDINGS if known else (),
        events=session.events,
        coverage=Coverage(len(layers), len(totals), never),
        loss_scale=ADVICE if known else no_advice("It can't be given here."),
        formats=VERDICTS if known else (),
        verdict=VERDICT if known else Verdict(None, "", ("Health unknown: no training step was seen yet.",)),
        overall=tuple(_pooled(layers, kind) for kind in GRADIENT_KINDS if any(_of(layers, kind))),
    )


def _layer(info: TensorInfo, window: TensorWindow | None) -> LayerReport:
    if window is None:
        return LayerReport(info.name, info.kind, info.module, info.module_type, 0, None)
    histogram = window.histogram
    flushed = histogram.flushed_fraction(FLOAT16)
    hidden = histogram.zeros / max(histogram.zeros + histogram.nonzero, 1)
    has_floor = window.floor_exponent is not None
    k = histogram.max_log2_scale(FLOAT16)
    return LayerReport(
        name=info.name,
        kind=info.kind,
        module=info.module,
        module_type=info.module_type,
        samples=window.samples,
        histogram=histogram,
        range_offset=histogram.range_offset(FLOAT16),
        flushed_fraction=Interval(flushed, flushed, flushed + (1 - flushed) * hidden if has_floor else flushed),
        already_flushed_fraction=Interval(0.0, 0.0, hidden) if has_floor else None,
        floor_exponent=window.floor_exponent,
        subnormal_fraction=histogram.subnormal_fraction(FLOAT16),
        overflowed=histogram.overflowed(FLOAT16),
        lost_l1_share=histogram.lost_l1_share(FLOAT16),
        noise_to_signal=histogram.noise_to_signal(FLOAT16),
        log2_scale_needed=None if k is None else max(0, k - 20),
        max_log2_scale=k,
        lost_updates=dict(window.lost_updates) or None,
        rounding_noise=info.name.endswith("key.bias"),
    )


def _of(layers: tuple[LayerReport, ...], kind: str) -> list[ExponentHistogram]:
    return [layer.histogram for layer in layers if layer.kind == kind and layer.histogram is not None]


def _pooled(layers: tuple[LayerReport, ...], kind: str) -> LayerReport:
    return _layer(TensorInfo("", kind, "", ""), TensorWindow(merge(_of(layers, kind)), samples=10))


ADVICE = LossScaleAdvice(
    available=True,
    needed=True,
    recommended=8192.0,
    lowest=128.0,
    highest=2.0**20,
    headroom=7,
    flushed_fraction_unscaled=0.8655,
    flushed_fraction_scaled=0.000123,
    worst_layer="decoder",
    conflicts=(ScaleConflict("decoder", 7, "hidden.bias", 5),),
    samples=40,
    overflow_probability_bound=3 / 40,
    static_scale=8192.0,
    dynamic=DynamicSettings(8192.0, 2000),
    blocks=(TimeBlock(0, 19, 3, 20), TimeBlock(20, 39, 7, 22), TimeBlock(40, 49, None, None)),
    reason="A loss scale is needed: at scale 1 FLOAT16 flushes 87% of the activation gradients of 'decoder'.",
)

VERDICT = Verdict(
    False,
    "Computes in FP16: FP32 weights, FP16 autocast, Adam with states in FP32, GradScaler from 65536 (2^16).",
    ("Warning: the initial loss scale, 65536 (2^16), is 8 times (3 powers of two) too large.",),
    "Begin at 8192 (2^13).",
    "scaler = torch.amp.GradScaler(init_scale=2.0**13)",
    "3 more findings below.",
)
FINDINGS = (
    Finding("bfloat16-would-do", "info", "", "BF16 would hold every gradient without a loss scale.", {}),
    Finding(
        "gradients-flushed",
        "warning",
        "decoder",
        "87% of the non-zero activation gradients of 'decoder' flush in float16 at scale 1.",
        {"flushed_fraction": 0.8655, "lost_l1_share": Interval(0.11, 0.07, 0.17), "worst": math.inf},
        "Use a loss scale of 8192.",
    ),
    Finding(
        "non-finite", "error", "decoder.3.attn", "Infinite gradients at step 412.", {"step": 412}, "Lower the scale."
    ),
)

VERDICTS = (
    FormatVerdict("bfloat16", WEIGHT_GRADIENT, "none", True, "", 0.0, False),
    FormatVerdict("float8_e5m2", ACTIVATION_GRADIENT, "per-tensor", True, "decoder", 0.0004, False),
    FormatVerdict("float8_e4m3", ACTIVATION_GRADIENT, "per-tensor", False, "decoder", 0.031, True),
)


def no_advice(reason: str) -> LossScaleAdvice:
    empty = dict.fromkeys((field.name for field in dataclasses.fields(LossScaleAdvice)), None)
    given = {"available": False, "worst_layer": "", "conflicts": (), "samples": 0, "blocks": (), "reason": reason}
    return LossScaleAdvice(**(empty | given))  # type: ignore[arg-type]
