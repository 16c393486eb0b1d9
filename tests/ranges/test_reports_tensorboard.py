"""The TensorBoard log, read back with TensorBoard's own reader."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import sessions
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c as tensorboards_crc32c

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.numeric.formats import FLOAT16
from mpinspect.ranges.analysis import recommend_loss_scale
from mpinspect.ranges.kinds import ACTIVATION_GRADIENT, WEIGHT_GRADIENT
from mpinspect.ranges.report.crc32c import crc32c
from mpinspect.ranges.report.tensorboard import TensorBoardLog, TensorBoardSink
from mpinspect.ranges.session import Progress, ScaleChange, TensorKey
from mpinspect.runtime.appending import AppendedFile


def read(path):
    found = EventAccumulator(str(path), size_guidance={"histograms": 0, "scalars": 0, "tensors": 0})
    found.Reload()
    return found


def windows(tensors, count=3):
    return sessions.session(tensors, windows=count).windows


KEY = TensorKey("decoder.weight", WEIGHT_GRADIENT)


@pytest.mark.parametrize(
    "histogram", [sessions.bell(-14, zeros=7), sessions.bell(-60), sessions.bell(40), sessions.bell(-149, 1.0)]
)
def test_the_counts_come_back_exactly(histogram, tmp_path):
    log = TensorBoardLog(tmp_path)
    for window in windows({KEY: histogram}):
        log.write(window)
    log.close()
    events = read(tmp_path).Histograms("exponents/weight_gradient/decoder.weight")
    assert [event.step for event in events] == [9, 19, 29]
    value = events[0].histogram_value
    counts = dict(zip(value.bucket_limit, value.bucket, strict=True))
    # The bucket up to e + 1 holds what has exponent e.
    expected = {histogram.min_exponent + i + 1: count for i, count in enumerate(histogram.counts)}
    assert {limit: count for limit, count in counts.items() if count} == {e: c for e, c in expected.items() if c}
    assert value.num == histogram.nonzero
    assert np.all(np.diff(value.bucket_limit) == 1)


@pytest.mark.parametrize("centre", range(-80, 60, 7))
def test_the_range_is_a_multiple_of_the_bars_that_tensorboard_draws(centre, tmp_path):
    """30 bars: each then covers whole exponents, and no count is spread over two bars."""
    log = TensorBoardLog(tmp_path)
    log.write(windows({KEY: sessions.bell(centre)}, 1)[0])
    log.close()
    value = read(tmp_path).Histograms("exponents/weight_gradient/decoder.weight")[0].histogram_value
    assert (value.max - value.min) % 30 == 0
    assert value.min == value.bucket_limit[0] - 1
    assert value.max == value.bucket_limit[-1]


def test_scalars_of_a_layer(tmp_path):
    histogram = sessions.bell(-26, zeros=3000)
    log = TensorBoardLog(tmp_path)
    log.write(windows({KEY: histogram}, 1)[0])
    log.close()
    found = read(tmp_path)
    expected = {
        "flushed_fraction": histogram.flushed_fraction(FLOAT16),
        "range_offset": histogram.range_offset(FLOAT16),
        "zero_fraction": 3000 / histogram.total,
    }
    for name, value in expected.items():
        (event,) = found.Scalars(f"{name}/weight_gradient/decoder.weight")
        assert (event.step, event.value) == (9, pytest.approx(value, rel=1e-6))
    assert not [tag for tag in found.Tags()["scalars"] if tag.startswith(("infs", "nans"))]


def test_empty_and_broken_windows(tmp_path):
    """Nothing finite: no histogram, but the numbers of what is there; once broken, zeros are written too."""
    log = TensorBoardLog(tmp_path)
    empty = ExponentHistogram.empty()
    broken = ExponentHistogram.from_counts([], 0, zeros=1, infs=2, nans=5)
    for histogram in (empty, broken, sessions.bell(0)):
        log.write(windows({KEY: histogram}, 1)[0])
    log.write(dataclasses.replace(windows({KEY: empty}, 1)[0], tensors={}))
    log.close()
    found = read(tmp_path)
    assert [event.value for event in found.Scalars("nans/weight_gradient/decoder.weight")] == [5, 0]
    assert [event.value for event in found.Scalars("infs/weight_gradient/decoder.weight")] == [2, 0]
    assert len(found.Histograms("exponents/weight_gradient/decoder.weight")) == 1


def test_the_suggested_scale_and_its_window(tmp_path):
    made = sessions.word_model()
    advice = recommend_loss_scale(made)
    log = TensorBoardLog(tmp_path)
    log.advice(5, advice)
    log.advice(6, sessions.report_by_hand(made))
    log.advice(7, sessions.no_advice("because"))
    log.close()
    found = read(tmp_path)
    assert [event.value for event in found.Scalars("loss_scale/suggested")] == [math.log2(advice.recommended), 13]
    assert [event.value for event in found.Scalars("loss_scale/lowest")] == [math.log2(advice.lowest), 7]
    assert [event.value for event in found.Scalars("loss_scale/highest")] == [math.log2(advice.highest), 20]


def test_the_sink_writes_advice_for_each_window_and_the_scale_in_use(tmp_path):
    made = sessions.word_model()
    sink = TensorBoardSink(tmp_path)
    sink.watched(made.watched)
    for index, window in enumerate(made.windows):
        sink.window(window)
        sink.progress(Progress(scales=tuple(ScaleChange(10 * i, 2.0**i) for i in range(index + 1))))
    sink.event(sessions.culprit())
    sink.close()
    found = read(tmp_path)
    assert len(found.Scalars("loss_scale/suggested")) == len(made.windows)
    assert [(event.step, event.value) for event in found.Scalars("loss_scale/used")] == [
        (0, 0),
        (10, 1),
        (20, 2),
        (30, 3),
    ]
    assert any("events" in tag for tag in found.Tags()["tensors"])


def test_no_advice_where_the_scale_is_not_known(tmp_path):
    sink = TensorBoardSink(tmp_path)
    made = sessions.unknown_scale()
    sink.progress(made.progress)
    sink.window(made.windows[0])
    sink.close()
    assert "loss_scale/suggested" not in read(tmp_path).Tags()["scalars"]


def test_tags_are_safe_and_tell_every_tensor_apart(tmp_path):
    names = (*sessions.HOSTILE_NAMES, "a b", "a_b", "a/b")
    log = TensorBoardLog(tmp_path)
    log.write(windows({TensorKey(name, ACTIVATION_GRADIENT): sessions.bell(-5) for name in names}, 1)[0])
    log.close()
    tags = [tag for tag in read(tmp_path).Tags()["histograms"] if not tag.startswith("exponents/_bits")]
    assert len(tags) == len(names)
    for tag in tags:
        assert tag.startswith("exponents/activation_gradient/")
        assert tag.isascii()
        assert tag.isprintable()
        assert tag.count("/") == 2


def test_the_custom_scalars_page_has_a_layout(tmp_path):
    TensorBoardLog(tmp_path).close()
    assert "custom_scalars__config__" in read(tmp_path).Tags()["tensors"]


def test_a_live_tensorboard_sees_each_window_at_once(tmp_path):
    log = TensorBoardLog(tmp_path)
    first, second, _ = windows({KEY: sessions.bell(-5)})
    log.write(first)
    assert len(read(tmp_path).Histograms("exponents/weight_gradient/decoder.weight")) == 1
    log.write(second)
    assert len(read(tmp_path).Histograms("exponents/weight_gradient/decoder.weight")) == 2
    log.close()


def test_a_directory_that_vanishes_stops_nobody(tmp_path):
    path = tmp_path / "run"
    log = TensorBoardLog(path)
    shutil.rmtree(path)
    for window in windows({KEY: sessions.bell(-5)}, 20):
        log.write(window)
    log.close()
    assert not path.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_is_an_os_error(tmp_path, monkeypatch):
    log = TensorBoardLog(tmp_path)
    log._file.close()
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(log._file, "_file", AppendedFile(full))
        with pytest.raises(OSError, match="No space left"):
            log.write(windows({KEY: sessions.bell(-5)}, 1)[0])
    log.close()


def test_two_logs_in_one_directory_have_a_file_each(tmp_path):
    TensorBoardLog(tmp_path).close()
    TensorBoardLog(tmp_path).close()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_directory_that_can_not_be_made_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(OSError, match="file"):
        TensorBoardLog(tmp_path / "file" / "run")


@pytest.mark.parametrize("length", [0, 1, 3, 127, 128, 129, 1000, 65536, 100_003])
def test_the_checksum_is_tensorboards(length):
    data = np.random.default_rng(length).bytes(length)
    assert crc32c(data) == tensorboards_crc32c(data)


def test_the_checksum_of_the_standard():
    assert crc32c(b"123456789") == 0xE3069283
