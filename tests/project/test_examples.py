"""The examples run as scripts and print their documented results."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from mpinspect.ranges.session import Session

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, monkeypatch, capsys, *options: str) -> str:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "argv", [name, *options])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_every_example_is_tested():
    tested = {
        "accelerate_loop.py",
        "lightning_digits.py",
        "transformers_trainer.py",
        "talk_network.py",
        "talk_stages.py",
        "digits_cnn.py",
        "digits_parity.py",
        "fp16_reductions.py",
        "gan_digits.py",
        "lost_updates.py",
        "lstm_language_model.py",
        "shape_lint.py",
        "transformers_gpt2.py",
    }
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_talk_network_reports_the_same_ranges_in_fp32_and_in_scaled_fp16(monkeypatch, capsys):
    printed = run_example("talk_network.py", monkeypatch, capsys, "--steps=10")
    fp32, fp16 = printed.split("--- FP16 with FP32 master weights, loss scale 128 ---")
    for part in (fp32, fp16):
        assert "10 steps, 10 sampled" in part
        assert "No numerical problem was found in 10 steps." in part
    assert "FP16 would fit at any loss scale in the window" in fp32
    assert "The loss scale, 128 (2^7), lies in the window" in fp16
    rows = [re.findall(r"^(weight|bias) +(\d+) .* (2\^-\d+) ", part, re.MULTILINE) for part in (fp32, fp16)]
    assert len(rows[0]) == 2
    assert rows[0] == rows[1]


def test_digits_cnn_is_healthy(monkeypatch, capsys):
    pytest.importorskip("sklearn")
    printed = run_example("digits_cnn.py", monkeypatch, capsys, "--steps=12")
    assert "12 steps, 12 sampled" in printed
    assert "all 16 watched tensors were seen" in printed
    assert "loss scaling needed: False; scale: 1" in printed
    assert "warning" not in printed


def test_transformers_gpt2_trains_and_is_probed(monkeypatch, capsys):
    pytest.importorskip("transformers")
    printed = run_example("transformers_gpt2.py", monkeypatch, capsys, "--steps=3")
    assert "3 steps, 3 sampled" in printed
    assert "FP16 against FP32 on 1 batch" in printed
    rows = re.findall(r"^transformer\.\S+ +\S+%? .*0\.99\d+|^transformer\.\S+ .* 1\.000000 ", printed, re.MULTILINE)
    # 28 parameters: at scale 1 and, if a scale is needed, also at that scale.
    assert len(rows) in (28, 56)


# -- training in mixed precision ------------------------------------------------------------------------------------------


def test_each_stage_of_the_talk_fixes_one_fault(monkeypatch, capsys):
    printed = run_example("talk_stages.py", monkeypatch, capsys, "--steps=8")
    assert ("emulated" in printed) == (not torch.cuda.is_available())
    first, second = printed.split("last loss in training")
    #            final loss, moved, distance from FP32, subnormal, distinguished, largest scale
    rows = {row[0]: [figure.rstrip("%") for figure in row.split()[-6:]] for row in stages(first)}
    assert list(rows) == list("01234")
    moved, off, subnormal = ({stage: float(row[column]) for stage, row in rows.items()} for column in (1, 2, 3))
    assert moved["1"] < 10 < 99 < min(moved[stage] for stage in "0234")
    assert off["1"] > 90
    assert max(off[stage] for stage in "234") < 1
    assert min(subnormal[stage] for stage in "12") > 50
    assert max(subnormal[stage] for stage in "34") < 2
    assert [row[5] for row in rows.values()] == ["2^127", "2^15", "2^15", "2^15", "2^127"]
    # BatchNorm: loss in evaluation, largest running variance
    rows = {row[0]: [float(figure) for figure in row.split()[-2:]] for row in stages(second)}
    assert list(rows) == list("0456")
    assert rows["4"][1] == float("inf")
    assert rows["5"] == rows["6"]
    assert rows["5"] == pytest.approx(rows["0"], rel=0.02)
    assert "the same weights bit for bit: True" in second


def stages(printed: str) -> list[str]:
    return re.findall(r"^\d  .*", printed, re.MULTILINE)


def test_gan_digits_discriminator_overflow_does_not_affect_the_generator(monkeypatch, capsys):
    pytest.importorskip("sklearn")
    printed = run_example("gan_digits.py", monkeypatch, capsys, "--steps=32", "--jump")
    rows = [row.split() for row in re.findall(r"^ +\d+ .*", printed, re.MULTILINE)]
    assert len(rows) == 8
    before, after = rows[3], rows[-1]
    skipped = int(after[5]) - int(before[5])
    assert skipped >= 4
    # Each skipped step halves only the discriminator's scale.
    assert power(before[3]) - power(after[3]) == skipped
    assert before[4] == after[4]
    assert before[6] == after[6]
    skips, untouched, stepped = re.search(
        r"skipped (\d+) steps\. In (\d+) of them .*; in (\d+) the generator", printed
    ).groups()
    assert skips == untouched == stepped == after[5]
    assert rows[-1][5] == rows[-2][5], "the discriminator trains again"


def power(scale: str) -> int:
    return int(scale.removeprefix("2^"))


def test_gan_digits_skips_no_step_in_bf16(monkeypatch, capsys):
    pytest.importorskip("sklearn")
    printed = run_example("gan_digits.py", monkeypatch, capsys, "--steps=8", "--jump", "--precision=bf16-master")
    assert printed.count("bf16-master: 8 steps, 0 skipped") == 2
    assert "The discriminator skipped" not in printed


@pytest.mark.parametrize(("precision", "tolerance"), [("fp16-master", 0.1), ("bf16-amp", 1.0)])
def test_lstm_language_model_matches_fp32(precision, tolerance, monkeypatch, capsys):
    printed = run_example("lstm_language_model.py", monkeypatch, capsys, "--steps=10", f"--precision={precision}")
    rows = [row.split() for row in re.findall(r"^ +\d+ .*", printed, re.MULTILINE)]
    assert [int(row[0]) for row in rows] == list(range(1, 11))
    assert float(rows[-1][1]) < float(rows[0][1]) - 1
    assert all(float(row[2]) == pytest.approx(float(row[1]), rel=0.01) for row in rows)
    # per cent
    assert abs(float(re.search(r"\(([+-][\d.]+)%\)", printed)[1])) < tolerance
    assert f"{precision}: 10 steps, 0 skipped" in printed


def test_lost_updates_are_predicted_and_measured(monkeypatch, capsys):
    pytest.importorskip("sklearn")
    printed = run_example("lost_updates.py", monkeypatch, capsys, "--steps=120")
    found = re.findall(r"were stored in (\w+), rounding would lose (\d+)% of the updates", printed)
    predicted = {storage: int(share) for storage, share in found}
    rows = re.findall(r"^  (\w.*?)  +([\d.]+) +([+-][\d.]+)% +([\d.]+)%", printed, re.MULTILINE)
    lost = {name: float(share) for name, _, _, share in rows}
    assert predicted["FP16"] == pytest.approx(lost["FP16 weights without"], abs=3)
    assert predicted["BF16"] == pytest.approx(lost["BF16 weights without"], abs=3)
    assert lost["FP16 weights with FP32 masters"] < 2
    assert lost["FP16 weights without"] > 80
    against = {name: float(difference) for name, _, difference, _ in rows}
    assert abs(against["FP16 weights with FP32 masters"]) < 0.1
    assert 0.1 < against["FP16 weights without"] < against["BF16 weights without"]


def test_fp16_reductions_prints_results_in_fp16(monkeypatch, capsys):
    printed = run_example("fp16_reductions.py", monkeypatch, capsys, "--steps=20")
    rows = {row[:44].strip(): row[44:].split() for row in printed.splitlines()}
    assert rows["sum of 65,536 ones"] == ["inf", "65536.0", "65536.0"]
    assert rows["mean square error of differences of 256"] == ["inf", "65536.0", "65536.0"]
    assert rows["4,096 ones added one by one"] == ["2048.0", "4096.0", "2048.0"]
    assert rows["running variance is in"] == ["float16", "float32", "float32"]
    largest = rows["running variance, largest"]
    assert largest[0] == "inf"
    assert 65504 < float(largest[1]) == float(largest[2]) < 250_000
    assert re.fullmatch(r"\d+ steps never never", " ".join(rows["all of it infinite after"]))
    assert max(map(float, rows["training output, largest error"])) < 0.01
    assert rows["evaluation output, exact zeros"] == ["100%", "0%", "0%"]
    assert max(map(float, rows["evaluation output, largest error"][1:])) < 0.01


def test_digits_parity_has_a_row_for_each_precision(monkeypatch, capsys):
    pytest.importorskip("sklearn")
    printed = run_example("digits_parity.py", monkeypatch, capsys, "--seeds=2", "--epochs=1")
    rows = re.findall(r"^(\S+) +([\d.]+)% +([\d.]+) +([+-][\d.]+) +\S+ +(\d+) ", printed, re.MULTILINE)
    assert [row[0] for row in rows] == ["fp32", "fp16-amp", "fp16-master", "bf16-amp", "bf16-master"]
    assert min(float(row[1]) for row in rows) > 85
    assert max(abs(float(row[3])) for row in rows) < 1


def test_shape_lint_reports_expected_findings_on_well_known_models(monkeypatch, capsys):
    pytest.importorskip("transformers")
    printed = run_example("shape_lint.py", monkeypatch, capsys)
    assert "pad 1023" not in printed
    for line in ("in_features 1023 -> 1024", "config.vocab_size 50257 -> 50304", "config.vocab_size 30522 -> 30528"):
        assert line in printed
    rows = {line.split("  ")[0]: line for line in printed.splitlines() if line[:1].strip()}
    assert rows["ViT"].endswith("nothing to mend")
    assert rows["ResNet-50"].endswith("not-channels-last")


# -- trainers that own the loop -------------------------------------------------------------------------------------------


def test_lightning_digits_shows_scale_and_skipped_steps(monkeypatch, capsys, tmp_path):
    pytest.importorskip("lightning")
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    printed = run_example("lightning_digits.py", monkeypatch, capsys, "--steps=10", "--log-dir=log")
    assert re.search(r"^Digits against float16\nComputes in FP16: ", printed, re.MULTILINE)
    assert re.search(r"^  10 steps, 10 sampled, [1-9]\d* updates? skipped", printed, re.MULTILINE)
    skipped = int(re.search(r"; (\d+) of 10 steps were skipped", printed)[1])
    assert len(re.findall(r"^step \d+ skipped: ", printed, re.MULTILINE)) == skipped >= 1
    assert re.search(r"^net\.0\.weight ", printed, re.MULTILINE)
    assert Session.load(tmp_path / "log").progress.skipped_steps == skipped


def test_lightning_digits_needs_no_scale_in_fp32(monkeypatch, capsys, tmp_path):
    pytest.importorskip("lightning")
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    printed = run_example("lightning_digits.py", monkeypatch, capsys, "--steps=5", "--precision=32-true")
    assert "5 steps, 5 sampled, 10 backwards;" in printed
    assert "FP16 would fit at any loss scale in the window" in printed
    assert "loss scale " not in printed.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_transformers_trainer_names_its_layers_and_a_scale(monkeypatch, capsys, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    printed = run_example("transformers_trainer.py", monkeypatch, capsys, "--steps=4", "--log-dir=log")
    assert "GPT2LMHeadModel against float16\nComputes in FP32: " in printed
    assert "  4 steps, 4 sampled" in printed
    assert re.search(
        r"the gradients would need a loss scale in FP16: \d+|FP16 would fit at any loss scale in the window", printed
    )
    assert re.search(r"^transformer\.h\.\{0\.\.1\}\.attn\.c_attn\.weight ", printed, re.MULTILINE)
    assert Session.load(tmp_path / "log").progress.backwards == 8


def test_accelerate_loop_counts_its_optimizer_steps(monkeypatch, capsys):
    pytest.importorskip("accelerate")
    pytest.importorskip("sklearn")
    printed = run_example("accelerate_loop.py", monkeypatch, capsys, "--steps=6")
    assert "Sequential against float16\nComputes in FP32: " in printed
    assert "  6 steps, 6 sampled" in printed
    assert "; 0 of 6 steps were skipped" in printed
    assert re.search(r"^hidden\.weight ", printed, re.MULTILINE)
