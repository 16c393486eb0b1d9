"""Synthetic sessions for tests: random ones (hypothesis), and one in which no field has its default."""

import numpy as np
from hypothesis import strategies as st

from mpinspect.numeric.blocks import QuantizationLoss
from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.numeric.recipes import STOCHASTIC, WHOLE, Quantization, uniform
from mpinspect.ranges import kinds
from mpinspect.ranges import session as s
from mpinspect.ranges.windows.tensors import LostUpdates, TensorInfo, TensorKey, TensorWindow
from mpinspect.ranges.windows.window import Window

names = st.text(max_size=12)
counts = st.integers(0, 2**40)
exponents = st.integers(-1074, 1023)
steps = st.integers(0, 2**63 - 1)
floats = st.floats(allow_nan=False)
peak_maps = st.dictionaries(exponents, st.integers(1, 10**6), max_size=3)


@st.composite
def histograms(draw: st.DrawFn) -> ExponentHistogram:
    bins = draw(st.lists(counts, max_size=6))
    low = draw(st.integers(-149, 100))
    tops = [draw(st.integers(0, count)) for count in bins]
    powers = [draw(st.integers(0, count - top)) for count, top in zip(bins, tops, strict=True)]
    used = np.flatnonzero(bins)
    edges = {}
    if used.size:
        edges["min_abs"] = 2.0 ** (low + int(used[0])) * draw(st.floats(1, 2, exclude_max=True))
        edges["max_abs"] = 2.0 ** (low + int(used[-1])) * draw(st.floats(1, 2, exclude_max=True))
    zeros, infs, nans = draw(counts), draw(counts), draw(counts)
    return ExponentHistogram.from_counts(
        bins, low, powers_of_two=powers, near_top=tops, zeros=zeros, infs=infs, nans=nans, **edges
    )


lost_updates = st.builds(LostUpdates, counts, counts, st.booleans())
storage_formats = st.sampled_from(["float16", "bfloat16", "float8_e4m3", "float8_e5m2"])
tensor_windows = st.builds(
    TensorWindow,
    histograms(),
    st.integers(0, 10**9),
    peak_maps,
    st.lists(storage_formats, min_size=1, max_size=2, unique=True).map(lambda found: tuple(sorted(found))),
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.none() | exponents,
    st.dictionaries(storage_formats, lost_updates, max_size=2),
    counts,
)
keys = st.builds(TensorKey, names, st.sampled_from(kinds.KINDS))
tensors = st.dictionaries(keys, tensor_windows, max_size=4)
windows = st.builds(Window, st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**6), tensors, peak_maps)
tensor_infos = st.builds(
    TensorInfo,
    names,
    st.sampled_from(kinds.KINDS),
    names,
    names,
    st.lists(st.integers(0, 10**6), max_size=4).map(tuple),
    names,
    names,
)
events = st.builds(
    s.Event,
    steps,
    steps,
    st.sampled_from(["forward", "backward"]),
    names,
    st.sampled_from(kinds.KINDS),
    names,
    st.sampled_from(["inf", "nan"]),
    st.none() | st.floats(0, allow_nan=False),
    st.lists(floats, max_size=8).map(tuple),
    st.none() | st.booleans(),
    st.none() | st.booleans(),
    st.none() | st.booleans(),
    names,
)
infos = st.builds(
    s.RunInfo,
    names,
    names,
    st.lists(st.sampled_from(kinds.KINDS), unique=True).map(tuple),
    st.integers(1, 10**6),
    st.booleans(),
    st.dictionaries(names, names, max_size=3),
)
scale_changes = st.builds(s.ScaleChange, steps, st.none() | st.floats(0, allow_nan=False))
progresses = st.builds(
    s.Progress,
    steps,
    steps,
    steps,
    steps,
    st.booleans(),
    st.booleans(),
    names,
    st.lists(scale_changes, max_size=4).map(tuple),
)
sessions = st.builds(
    s.Session,
    infos,
    st.lists(tensor_infos, max_size=4, unique_by=lambda info: info.key).map(tuple),
    st.lists(windows, max_size=3).map(tuple),
    st.lists(events, max_size=3).map(tuple),
    st.lists(names, max_size=3).map(tuple),
    progresses,
)


KEY = TensorKey("weight", kinds.WEIGHT_GRADIENT)


def step_window(step: int, key: TensorKey = KEY) -> Window:
    """Return the window of one sampled step that counted step + 1 ones, so that the total of any prefix of a run is known."""
    histogram = ExponentHistogram.from_counts([step + 1], 0, powers_of_two=[step + 1], min_abs=1.0, max_abs=1.0)
    return Window(step, step, 1, {key: TensorWindow(histogram, 1, {0: 1}, numel_max=step + 1)}, {0: 1})


def full_session() -> s.Session:
    """Return a session in which no field has its default, neighbouring fields differ, and names hold non-ASCII characters."""
    histogram = ExponentHistogram.from_counts(
        [3, 0, 70_000],
        -5,
        powers_of_two=[1, 0, 300],
        near_top=[1, 0, 5],
        zeros=2**33,
        infs=7,
        nans=8,
        min_abs=1.25 * 2**-5,
        max_abs=1.75 * 2**-3,
    )
    tensor = TensorWindow(
        histogram,
        4,
        {-3: 3, -4: 1},
        ("bfloat16", "float16"),
        "float16",
        -41,
        {"bfloat16": LostUpdates(5, 9, True)},
        2**34,
    )
    key = TensorKey("encoder.Schicht_äß.重み", kinds.WEIGHT_GRADIENT)
    info = s.RunInfo(
        *("GröβeNet", "2024-05-06T07:08:09", (kinds.WEIGHT_GRADIENT, kinds.UPDATE), 10, False, {"torch": "2.13"}, 0.02),
        *(3, 8, ("encoder.*",), ("größe",), "cuda (Karte)"),
        numbered={"layer.9": "Block"},
        inference=True,
    )
    progress = s.Progress(
        *(91, 9, 2, 180, True, False, "the callable raised", (s.ScaleChange(0, 65536.0), s.ScaleChange(7, None))),
        *(45, 90, 0.125, 7.5, False, ("layer.9",), 4, 61.5),
    )
    return s.Session(
        info,
        (
            TensorInfo(
                *(*key, "encoder.Schicht_äß", "Linear", (3, 5), "float32", "frozen: requires_grad is False"),
                *("shard", 2, False),
            ),
        ),
        (Window(10, 49, 4, {key: tensor}, {-3: 4}), Window(50, 90, 5, {key: tensor}, {-2: 5})),
        (
            s.Event(
                step=12,
                micro_batch=1,
                phase="backward",
                module="encoder",
                what=kinds.ACTIVATION_GRADIENT,
                tensor="encoder",
                value="nan",
                loss_scale=65536.0,
                last_maxima=(0.5, 3e38),
                skipped=True,
                forward_finite=False,
                gradients_finite=False,
                explanation="為: its outputs were finite",
                after=True,
                given=True,
                of_input=True,
                elsewhere=True,
                rank=3,
                dropped=True,
                aside=True,
                dtype="float16",
                module_type="Linear",
            ),
        ),
        ("No gradient of the head was seen.",),
        progress,
        s.Precision(
            {"bfloat16": 15},
            {"bfloat16": 15, "float32": 3},
            ("bfloat16", ""),
            ("bfloat16",),
            ("float32",),
            (
                s.OptimizerRecord(
                    "AdamW", {"lr": 1e-3, "eps": 1e-8}, {"float32": 15}, {"exp_avg": "float32"}, 15, True, "残り"
                ),
            ),
            (s.ScalerRecord("GradScaler", False, 65536.0, 2000.0, 2.0, 0.5, "cuda"),),
            ("bfloat16",),
            ("bfloat16", ""),
            (
                s.LayersRecord(
                    ("encoder.重み", "head"),
                    "Float8Linear",
                    (32, 64),
                    uniform(*[Quantization("float8_e4m3", (1, WHOLE), "float32", "amax", STOCHASTIC)] * 3),
                    "torchao",
                    True,
                    True,
                    True,
                ),
            ),
            ("config",),
            (
                s.OperandRecord(
                    *("encoder.重み", "mxfp8", "dgrad", "gradient", (32, 64)),
                    QuantizationLoss(100, 3, 1, 32, 25.0, 0.25, 50.0, 49.5, 0.125),
                    4,
                    False,
                    True,
                    40,
                    "_grouped_mm",
                ),
            ),
        ),
        (
            s.Measurement(
                "gradients",
                "encoder.重み",
                3,
                {"before": 1.5, "after": float("inf")},
                ("encoder",),
                "größer",
                3,
                {"train.py:7": "x = x + größer"},
            ),
        ),
        (s.RankRecord(info, progress, 1, 1),),
    )
