"""The TensorBoard log, read with TensorBoard's own reader."""

import dataclasses
import io
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import sessions
import torch
from agreeing_reports import analyse
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c as tensorboards_crc32c
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.util.tensor_util import make_ndarray
from trainings import inspected

from mpinspect import Inspector, Recorder
from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.numeric.formats import FLOAT16, FORMATS
from mpinspect.ranges.analysis.loss_scale import recommend_loss_scale
from mpinspect.ranges.kinds import ACTIVATION_GRADIENT, KINDS, UPDATE, WEIGHT_GRADIENT
from mpinspect.ranges.report import tensorboard_map
from mpinspect.ranges.report.crc32c import crc32c
from mpinspect.ranges.report.tensorboard import TensorBoardLog, TensorBoardSink
from mpinspect.ranges.session import Progress, RunInfo, ScaleChange
from mpinspect.ranges.store.sinks import open_sinks
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.runtime.appending import AppendedFile


def read(path):
    found = EventAccumulator(str(path), size_guidance={"histograms": 0, "scalars": 0, "tensors": 0})
    found.Reload()
    return found


def histograms(path, tag="tensor_exponents/weight_gradient/decoder.weight"):
    """Return each event's step and rows; a row is a bar's left end, right end and count."""
    return [(event.step, make_ndarray(event.tensor_proto)) for event in read(path).Tensors(tag)]


def windows(tensors, count=3):
    return sessions.session(tensors, windows=count).windows


KEY = TensorKey("decoder.weight", WEIGHT_GRADIENT)


@pytest.mark.parametrize(
    "histogram", [sessions.bell(-14, zeros=7), sessions.bell(-60), sessions.bell(40), sessions.bell(-149, 1.0)]
)
def test_the_log_contains_the_exact_counts(histogram, tmp_path):
    log = TensorBoardLog(tmp_path)
    for window in windows({KEY: histogram}):
        log.write(window)
    log.close()
    events = histograms(tmp_path)
    assert [step for step, _ in events] == [9, 19, 29]
    rows = events[0][1]
    # The bar from e to e + 1 counts the values with exponent e.
    expected = {histogram.min_exponent + i: count for i, count in enumerate(histogram.counts)}
    assert {left: count for left, _, count in rows if count} == {e: c for e, c in expected.items() if c}
    assert np.all(rows[:, 1] == rows[:, 0] + 1)
    assert np.all(rows[1:, 0] == rows[:-1, 1])


@pytest.mark.parametrize("centre", range(-80, 60, 7))
def test_the_range_is_a_multiple_of_tensorboards_30_bars(centre, tmp_path):
    """Each bar then covers whole exponents, and no count is split between two bars."""
    log = TensorBoardLog(tmp_path)
    log.write(windows({KEY: sessions.bell(centre)}, 1)[0])
    log.close()
    ((_, rows),) = histograms(tmp_path)
    assert (rows[-1, 1] - rows[0, 0]) % 30 == 0


def test_a_layers_shares_are_scalars(tmp_path):
    histograms = sessions.bell(-26, zeros=3000), sessions.bell(-24, zeros=2000)
    log = TensorBoardLog(tmp_path)
    for number, histogram in enumerate(histograms):
        log.write(windows({KEY: histogram})[number])
    log.close()
    found = read(tmp_path)
    measures = {
        "flushed_fraction": lambda histogram: histogram.flushed_fraction(FLOAT16),
        "range_offset": lambda histogram: histogram.range_offset(FLOAT16),
        "zero_fraction": lambda histogram: histogram.zeros / histogram.total,
    }
    for name, measure in measures.items():
        events = [(event.step, event.value) for event in found.Scalars(f"tensor_{name}/weight_gradient/decoder.weight")]
        expected = [pytest.approx(measure(histogram), rel=1e-6) for histogram in histograms]
        assert events == list(zip((9, 19), expected, strict=True))
    assert not [tag for tag in found.Tags()["scalars"] if tag.startswith(("tensor_infs", "tensor_nans"))]


def test_a_constant_scalar_is_written_when_it_first_changes(tmp_path):
    made = windows({KEY: sessions.bell(-26)}, 4)
    changed = windows({KEY: sessions.bell(-24)}, 4)
    log = TensorBoardLog(tmp_path)
    tags = []
    for window in (*made[:3], changed[3]):
        log.write(window)
        tags.append([tag for tag in read(tmp_path).Tags()["scalars"] if "flushed_fraction" in tag])
    log.close()
    assert tags[:3] == [[], [], []]
    assert len(tags[3]) == 4
    flushed = [sessions.bell(centre).flushed_fraction(FLOAT16) for centre in (-26, -26, -24)]
    for tag in tags[3]:
        # The ends of the constant part, and the change.
        assert [event.step for event in read(tmp_path).Scalars(tag)] == [9, 29, 39]
        assert [event.value for event in read(tmp_path).Scalars(tag)] == pytest.approx(flushed, rel=1e-6)


def layers_losing(*centres):
    """Return a window's tensors: layers around these exponents, which lose the more to flushing the lower they are."""
    return {
        TensorKey(f"layer{number}", WEIGHT_GRADIENT): sessions.bell(centre) for number, centre in enumerate(centres)
    }


@pytest.mark.parametrize(("curves", "expected"), [(3, 3), (0, 0), (None, 40)])
def test_the_worst_layers_of_each_kind_have_curves(curves, expected, tmp_path):
    centres = [-8 - number % 20 for number in range(40)]
    log = TensorBoardLog(tmp_path, curves=curves)
    for number, shift in enumerate((0, 1, 2)):
        log.write(windows(layers_losing(*(centre - shift for centre in centres)))[number])
    log.close()
    tags = [tag for tag in read(tmp_path).Tags()["scalars"] if tag.startswith("tensor_range_offset/")]
    assert len(tags) == expected
    if curves == 3:
        assert set(tags) <= {f"tensor_range_offset/weight_gradient/layer{number}" for number in (18, 19, 38, 39)}
    # The histograms are all there.
    assert len([tag for tag in read(tmp_path).Tags()["tensors"] if "/weight_gradient/" in tag]) == 40


def test_a_layer_that_grows_worse_gets_a_curve_and_similar_ones_do_not_take_turns(tmp_path):
    log = TensorBoardLog(tmp_path, curves=2)
    steps = [(-26, -26, -25, -8), (-25, -25, -26, -8), (-26, -25, -26, -40), (-25, -26, -25, -39)]
    for number, centres in enumerate(steps):
        log.write(windows(layers_losing(*centres), 4)[number])
    log.close()
    found = read(tmp_path)
    drawn = {
        tag[-1]: [event.step for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
        if tag.startswith("tensor_range_offset/")
    }
    assert drawn["3"] == [29, 39]
    assert drawn.keys() == {"0", "1", "3"}


@pytest.mark.parametrize("curves", [-1, True, 2.5, "all"])
def test_the_number_of_curves_is_a_whole_number(curves):
    for make in (lambda: Inspector(torch.nn.Linear(2, 2), curves=curves), lambda: Recorder(curves=curves)):
        with pytest.raises(ValueError, match="curves="):
            make()


def test_the_inspector_and_the_recorder_pass_the_number_of_curves_on(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    factors, options = (1.0, 1e-3, 1e-5), {"log_dir": tmp_path / "a", "curves": 1}
    inspected(model, lambda step: model(torch.ones(1, 2)).sum() * factors[step], 3, lr=0.0, optimizers=None, **options)
    with Recorder(tmp_path / "b", curves=1) as recorder:
        for factor in factors:
            recorder.observe("", {"x": np.full(2, factor), "y": np.full(2, factor)})
            recorder.next_step()
    for name in "ab":
        tags = [tag for tag in read(tmp_path / name).Tags()["scalars"] if tag.startswith("tensor_range_offset/weight")]
        assert len(tags) == 1, name


def test_the_summary_is_the_first_group(tmp_path):
    made = sessions.everything()
    sink = TensorBoardSink(tmp_path, lambda: made)
    sink.watched(made.watched)
    for window in made.windows:
        sink.window(window)
    sink.progress(made.progress)
    sink.close()
    found = read(tmp_path).Tags()
    tags = [tag for kind in ("scalars", "images") for tag in found[kind]]
    tags += [tag for tag in found["tensors"] if "exponents" in tag]
    assert {"summary/loss_scale", "summary/steps_not_finite", "summary/steps_skipped"} <= set(tags)
    assert min(tag.partition("/")[0] for tag in tags) == "summary"


def test_counts_of_a_batch_of_windows_end_with_each_window(tmp_path):
    made = sessions.word_model()
    sink = TensorBoardSink(tmp_path)
    for window in made.windows:
        sink.window(window)
    last = [window.last_step for window in made.windows]
    for step in (last[0] + 1, last[1] + 1):
        sink.event(dataclasses.replace(sessions.culprit(), step=step, skipped=True))
    sink.progress(Progress(skipped_steps=3))
    sink.close()
    for name, values in (("not_finite", [0, 1, 2]), ("skipped", [1, 2, 3])):
        assert [event.value for event in read(tmp_path).Scalars(f"summary/steps_{name}")][:3] == values


def test_the_text_page_has_the_first_harmful_event_once(tmp_path):
    sink = TensorBoardSink(tmp_path)
    # A scaler that overflows and skips the step with a finite forward finds its scale.
    harmless = dataclasses.replace(sessions.culprit(), step=40)
    for event in (harmless, *(dataclasses.replace(harmless, step=step, skipped=False) for step in (41, 42, 43))):
        sink.event(event)
    sink.close()
    (said,) = read(tmp_path).Tensors("first_event/text_summary")
    assert said.step == 41
    assert "step 41" in said.tensor_proto.string_val[0].decode()


def test_windows_without_finite_values_have_scalars_but_no_histogram(tmp_path):
    log = TensorBoardLog(tmp_path)
    empty = ExponentHistogram.empty()
    broken = ExponentHistogram.from_counts([], 0, zeros=1, infs=2, nans=5)
    for number, histogram in enumerate((empty, sessions.bell(0), broken, sessions.bell(0))):
        log.write(windows({KEY: histogram}, 4)[number])
    log.write(dataclasses.replace(windows({KEY: empty}, 5)[4], tensors={}))
    log.close()
    found = read(tmp_path)
    assert [event.value for event in found.Scalars("tensor_nans/weight_gradient/decoder.weight")] == [0, 5, 0]
    assert [event.value for event in found.Scalars("tensor_infs/weight_gradient/decoder.weight")] == [0, 2, 0]
    assert len(histograms(tmp_path)) == 2


def test_the_suggested_scale_and_its_window_are_scalars(tmp_path):
    made = sessions.word_model()
    advice = recommend_loss_scale(made)
    log = TensorBoardLog(tmp_path)
    for step, each in enumerate((advice, sessions.report_by_hand(made).loss_scale, sessions.no_advice("because")), 5):
        log.scales(step, {"suggested": each.recommended, "lowest": each.lowest, "highest": each.highest})
    log.close()
    found = read(tmp_path)
    assert [event.value for event in found.Scalars("summary_more/loss_scale/suggested")] == [
        math.log2(advice.recommended),
        13,
    ]
    assert [event.value for event in found.Scalars("summary_more/loss_scale/lowest")] == [math.log2(advice.lowest), 7]
    assert [event.value for event in found.Scalars("summary_more/loss_scale/highest")] == [
        math.log2(advice.highest),
        20,
    ]


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
    assert len(found.Scalars("summary_more/loss_scale/suggested")) == len(made.windows)
    assert [(event.step, event.value) for event in found.Scalars("summary/loss_scale")] == [
        (0, 0),
        (10, 1),
        (20, 2),
        (30, 3),
    ]


def test_there_is_no_suggested_scale_if_the_loss_scale_is_unknown(tmp_path):
    sink = TensorBoardSink(tmp_path)
    made = sessions.unknown_scale()
    sink.progress(made.progress)
    sink.window(made.windows[0])
    sink.close()
    assert "summary_more/loss_scale/suggested" not in read(tmp_path).Tags()["scalars"]


def test_tags_are_plain_and_unique_for_every_tensor(tmp_path):
    names = (*sessions.HOSTILE_NAMES, "a b", "a_b", "a/b")
    log = TensorBoardLog(tmp_path)
    log.write(windows({TensorKey(name, ACTIVATION_GRADIENT): sessions.bell(-5) for name in names}, 1)[0])
    log.close()
    tags = [tag for tag in read(tmp_path).Tags()["tensors"] if tag.startswith("tensor_exponents/a")]
    assert len(tags) == len(names)
    for tag in tags:
        assert tag.startswith("tensor_exponents/activation_gradient/")
        assert tag.isascii()
        assert tag.isprintable()
        assert tag.count("/") == 2


def test_the_custom_scalars_page_has_a_layout(tmp_path):
    TensorBoardLog(tmp_path).close()
    assert "custom_scalars__config__" in read(tmp_path).Tags()["tensors"]


def test_each_window_is_readable_at_once(tmp_path):
    log = TensorBoardLog(tmp_path)
    first, second, _ = windows({KEY: sessions.bell(-5)})
    log.write(first)
    assert len(histograms(tmp_path)) == 1
    log.write(second)
    assert len(histograms(tmp_path)) == 2
    log.close()


def test_deleting_the_directory_does_not_stop_the_writer(tmp_path):
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


def test_two_logs_in_one_directory_have_different_files(tmp_path):
    TensorBoardLog(tmp_path).close()
    TensorBoardLog(tmp_path).close()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_directory_that_cannot_be_created_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(OSError, match="file"):
        TensorBoardLog(tmp_path / "file" / "run")


@pytest.mark.parametrize("length", [0, 1, 3, 127, 128, 129, 1000, 2048, 2049, 65536, 100_003])
def test_the_checksum_equals_tensorboards(length):
    data = np.random.default_rng(length).bytes(length)
    assert crc32c(data) == tensorboards_crc32c(data)


def test_the_checksum_has_the_standards_check_value():
    assert crc32c(b"123456789") == 0xE3069283


# -- TensorBoard's standard pages ------------------------------------------------------------------------------------------


def test_the_formats_bits_are_drawn_on_the_axis_of_the_histograms(tmp_path):
    log = TensorBoardLog(tmp_path)
    log.write(windows({KEY: sessions.bell(-5)}, 1)[0])
    log.close()
    ((_, rows),) = histograms(tmp_path, "tensor_exponents/_bits_that_float16_keeps")
    ((_, counted),) = histograms(tmp_path)
    assert np.array_equal(rows[:, :2], counted[:, :2])
    kept = {int(left): int(bits) for left, _, bits in rows}
    # The bits of an exponent follow from the number of FP16 values between 2^e and 2^(e+1).
    codes = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    for exponent, bits in kept.items():
        values = np.count_nonzero((codes >= 2.0**exponent) & (codes < 2.0 ** (exponent + 1)))
        assert values == (2 ** (bits - 1) if bits else 0), exponent
    for tag in ("tensor_exponents/_bits_that_float16_keeps", "tensor_exponents/weight_gradient/decoder.weight"):
        said = read(tmp_path).SummaryMetadata(tag).summary_description
        assert "flushes to zero below 2^-25" in said
        assert "overflows from 2^16" in said


def changing(path, tensors, **options):
    """Log two windows with different counts: constant scalars are not written."""
    made = sessions.session(tensors)
    other = sessions.session(dict.fromkeys(tensors, sessions.bell(-7)))
    sink = TensorBoardSink(path, **options)
    sink.watched(made.watched)
    sink.window(made.windows[0])
    sink.window(other.windows[1])
    sink.close()


def charts(path):
    layout = layout_pb2.Layout()
    layout.ParseFromString(read(path).Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0])
    return {category.title: {chart.title: chart for chart in category.chart} for category in layout.category}


def test_charts_have_at_most_eight_lines_and_every_layer_has_one(tmp_path):
    names = [f"h.{block}.{part}" for block in range(12) for part in ("attn.weight", "mlp.weight")]
    singles = [f"part{number}" for number in range(11)]
    tensors = {TensorKey(name, WEIGHT_GRADIENT): sessions.bell(-24) for name in (*names, *singles)}
    changing(tmp_path, tensors, curves=None)
    found = charts(tmp_path)["flushed at scale 1: weight gradients"]
    assert list(found)[:2] == ["h.{0..7}.attn.weight", "h.{8..11}.attn.weight"]
    assert list(found)[-2:] == ["part0 .. part7", "part8 .. part10"]
    lines = [tag for chart in found.values() for tag in chart.multiline.tag]
    assert max(len(chart.multiline.tag) for chart in found.values()) == 8
    written = [tag for tag in read(tmp_path).Tags()["scalars"] if tag.startswith("tensor_flushed_fraction/")]
    assert len(written) == len(lines) == len(tensors)
    for line in lines:
        assert sum(re.match(line, tag) is not None for tag in written) == 1, line


def test_the_overview_draws_the_median_layer_between_the_others(tmp_path):
    centres = (-20, -14, -8)
    tensors = {TensorKey(f"layer{centre}", WEIGHT_GRADIENT): sessions.bell(centre) for centre in centres}
    changing(tmp_path, tensors)
    (title,) = [title for title in charts(tmp_path)["mpinspect"] if title.startswith("flushed at scale 1")]
    (series,) = charts(tmp_path)["mpinspect"][title].margin.series
    drawn = [read(tmp_path).Scalars(tag)[0].value for tag in (series.lower, series.value, series.upper)]
    assert drawn == pytest.approx([sessions.bell(centre).flushed_fraction(FLOAT16) for centre in reversed(centres)])


def test_closing_the_log_writes_verdict_and_maps(tmp_path):
    made = sessions.everything()
    sink = TensorBoardSink(tmp_path, lambda: made)
    sink.close()
    found = read(tmp_path)
    (said,) = found.Tensors("verdict/text_summary")
    text = said.tensor_proto.string_val[0].decode()
    report = analyse(made)
    assert report.findings
    for finding in report.findings:
        assert finding.id in text
    assert sorted(found.Tags()["images"]) == [f"summary/map/{kind}" for kind in sorted(set(KINDS) - {UPDATE})]
    (image,) = found.Images(f"summary/map/{WEIGHT_GRADIENT}")
    drawn = Image.open(io.BytesIO(image.encoded_image_string))
    assert drawn.size == (image.width, image.height)
    # The colours of the background, the regions and the cells.
    assert len(drawn.getcolors(1 << 16)) > 10


def test_verdict_and_maps_are_written_at_growing_intervals(tmp_path):
    made, now = sessions.word_model(), [0.0]
    reads = []

    def written():
        reads.append(now[0])
        return made

    sink = TensorBoardSink(tmp_path, written, lambda: now[0])
    for seconds in (1, 9, 11, 12, 60, 72, 73, 1000, 1001, 1090, 1105, 1106):
        now[0] = seconds
        sink.progress(made.progress)
        sink._aside.wait()
    # They are written after 10 s, a minute later, and then after each tenth of the run's age.
    assert reads == [11, 72, 1000, 1105]
    found = read(tmp_path)
    assert len(found.Images(f"summary/map/{WEIGHT_GRADIENT}")) == 4
    texts = [each.tensor_proto.string_val[0].decode() for each in found.Tensors("verdict/text_summary")]
    # The same verdict is not repeated.
    assert len(texts) == 1
    assert analyse(made).verdict.sentences[0] in " ".join(texts[0].split())
    sink.close()
    assert reads == [11, 72, 1000, 1105, 1106]


def test_reading_an_incomplete_session_is_retried_later(tmp_path):
    now = [0.0]

    def damaged():
        raise ValueError("half a record")

    sink = TensorBoardSink(tmp_path, damaged, lambda: now[0])
    for seconds in (11, 12):
        now[0] = seconds
        sink.progress(Progress())
        sink._aside.wait()
    assert "images" not in read(tmp_path).Tags() or not read(tmp_path).Tags()["images"]
    assert sink._seldom.due_at == 71
    with pytest.raises(ValueError, match="half a record"):
        sink.close()


@pytest.mark.parametrize("name", sessions.all_sessions())
def test_every_session_has_its_maps(name):
    report = analyse(sessions.all_sessions()[name])
    for layers in tensorboard_map.layers_by_kind(report).values():
        png, width, height = tensorboard_map.draw(layers, FORMATS[report.format])
        assert Image.open(io.BytesIO(png)).size == (width, height)
        assert width < 2_000
        assert height < 1_300


def test_a_run_with_an_unreadable_session_has_no_verdict(tmp_path):
    opened = open_sinks(tmp_path / "run", RunInfo())
    (tmp_path / "run" / "session.mpinspect").unlink()
    opened.sinks[1].close()
    assert "verdict/text_summary" not in read(tmp_path / "run").Tags()["tensors"]
    assert opened.troubles == []
