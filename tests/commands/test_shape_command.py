"""``mpinspect lint`` and lint_shapes: from arguments to reports, and a sentence for each bad input."""

import argparse
import errno
import json

import pytest
import torch

from mpinspect.commands import lint
from mpinspect.commands.lint_model import build_inputs, input_spec
from mpinspect.commands.output import UnusableError
from mpinspect.shapes.lint import choose_gpu, lint_shapes

MODEL = """
import torch

class Small(torch.nn.Module):
    def __init__(self, inputs=1023):
        super().__init__()
        self.fc = torch.nn.Linear(inputs, 1024)

    def forward(self, x):
        return self.fc(x)

def clean():
    return Small(1024)

def needs(size):
    return Small(size)

def broken():
    raise RuntimeError("no weights\\nat all")

def number():
    return 3

def leaves():
    raise SystemExit(5)

def interrupted():
    raise KeyboardInterrupt

def relu():
    return torch.nn.ReLU()

class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(100, 64)

    def forward(self, input_ids, attention_mask=None):
        return self.embedding(input_ids) @ self.embedding.weight.t()

class Stops(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(1023, 1024)

    def forward(self, x):
        y = self.fc(x)
        return self.fc(y[:, :1023]) if y.sum() > 0 else y

class Data(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(64, 64)

    def forward(self, x):
        return self.fc(x[: int((x == x).sum(0).max().item())])

ready = Small()
constant = 5
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    (tmp_path / "shape_lint_models.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "shape_lint_models", raising=False)
    return tmp_path


def run(*argv):
    parser = argparse.ArgumentParser()
    lint.add_options(parser)
    return lint.run(parser.parse_args(argv))


def small(*argv, target="shape_lint_models:Small"):
    return run(target, "--input", "4096,1023", "--dtype", "float16", "--gpu", "hopper", *argv)


def refused(*argv):
    with pytest.raises(UnusableError) as error:
        run(*argv)
    message = str(error.value)
    assert "\n" not in message
    return message


# -- inputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "dtype", "shape"),
    [
        ("64,1024", "", "float32", (64, 1024)),
        ("int64:8,128", "", "int64", (8, 128)),
        ("input_ids=int64:8,128", "input_ids", "int64", (8, 128)),
        ("input_ids=8,128", "input_ids", "int64", (8, 128)),
        ("attention_mask=8,128", "attention_mask", "int64", (8, 128)),
        ("pixel_values=8,3,224,224", "pixel_values", "float32", (8, 3, 224, 224)),
        ("x=torch.bfloat16: 4 , 4", "x", "bfloat16", (4, 4)),
        ("7", "", "float32", (7,)),
    ],
)
def test_inputs_are_read(text, name, dtype, shape):
    spec = input_spec(text)
    assert (spec.name, spec.dtype, spec.shape) == (name, dtype, shape)


@pytest.mark.parametrize(
    "text",
    [
        *("", "64,x", "64,,3", "=3", "1x=3", "-4,3", "4.5", "int65:3", "complex:3", "x=", "x=float32:"),
        *("99999999999999999999,4", "9223372036854775808", "9" * 5000),
    ],
)
def test_bad_inputs_are_refused_with_an_example(text):
    with pytest.raises(argparse.ArgumentTypeError) as error:
        input_spec(text)
    assert any(words in str(error.value) for words in ("as 64,1024", "not a known dtype", "the largest that a tensor"))


def test_inputs_are_made_on_the_meta_device_or_for_real():
    specs = [input_spec(text) for text in ("2,3", "input_ids=2,4", "attention_mask=2,4", "keep=bool:2")]
    args, kwargs = build_inputs(specs, "meta")
    assert args[0].is_meta
    assert args[0].shape == (2, 3)
    assert {name: value.dtype for name, value in kwargs.items()} == {
        "input_ids": torch.int64, "attention_mask": torch.int64, "keep": torch.bool,
    }  # fmt: skip
    # Masks and indices have values even for a model on the meta device, since models may read them.
    for device in ("meta", "cpu"):
        _, kwargs = build_inputs(specs, device)
        assert kwargs["input_ids"].sum() == 0
        assert kwargs["attention_mask"].sum() == 8
        assert kwargs["keep"].all()


def test_integers_that_would_take_much_memory_have_no_values():
    _, kwargs = build_inputs([input_spec("input_ids=1000000,1000000")], "meta")
    assert kwargs["input_ids"].is_meta


def test_inputs_given_twice_or_too_large_are_refused(models):
    clean = ("shape_lint_models:clean", "--input")
    assert "--input x=... is given 2 times" in refused(*clean, "x=4,1024", "--input", "x=8,1024")
    assert "can't be made: Storage size" in refused(*clean, "9999999999999,9999999999999")


def test_ctrl_c_while_a_model_is_built_is_not_reported_as_an_error(models):
    with pytest.raises(KeyboardInterrupt):
        run("shape_lint_models:interrupted")


# -- targets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["shape_lint_models:Small", "shape_lint_models:ready", "shape_lint_models.py:Small"])
def test_a_class_a_model_and_a_file(models, capsys, target):
    assert small(target=target) == 0
    out = capsys.readouterr().out
    assert "odd-size" in out
    assert "1023 -> 1024" in out


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("shape_lint_models", "package.module:build_model"),
        (":build", "package.module:build_model"),
        ("no_such_module_here:x", "there is no module 'no_such_module_here'"),
        ("missing.py:x", "missing.py is not a file"),
        ("shape_lint_models:nothing", "has no 'nothing': it has Small, clean"),
        ("shape_lint_models:constant", "is an int"),
        ("shape_lint_models:number", "returned an int"),
        ("shape_lint_models:leaves", "calling shape_lint_models:leaves without arguments failed: SystemExit: 5"),
        ("shape_lint_models:broken", "RuntimeError: no weights"),
        ("shape_lint_models:needs", "without arguments failed: TypeError"),
    ],
)
def test_bad_targets(models, target, words):
    assert words in refused(target, "--input", "4,4")


def test_a_failing_build_is_reported_with_its_line(models):
    line = 1 + MODEL.splitlines().index('    raise RuntimeError("no weights\\nat all")')
    assert f"shape_lint_models.py, line {line}" in refused("shape_lint_models:broken")


@pytest.mark.parametrize(
    "text", ["import does_not_exist_at_all", "1 +", "raise ValueError('x')", "import sys; sys.exit(3)"]
)
def test_modules_that_fail_on_import(tmp_path, text):
    path = tmp_path / "fails.py"
    path.write_text(text, encoding="utf-8")
    assert "importing" in refused(f"{path}:build")


# -- the run --------------------------------------------------------------------------------------------------------


def test_json_fix_and_markdown(models, capsys):
    assert small("--json", "--md", "report.md") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["gpu"]["architecture"] == "hopper"
    assert document["matmuls"][0]["module"] == "fc"
    assert {row["role"] for row in document["matmuls"]} >= {"forward", "wgrad"}
    assert "odd-size" in (models / "report.md").read_text("utf-8")
    assert small("--fix") == 0
    out = capsys.readouterr().out
    assert "1023" in out
    assert "Findings" not in out


def test_no_backward(models, capsys):
    assert small("--json", "--no-backward") == 0
    assert {row["role"] for row in json.loads(capsys.readouterr().out)["matmuls"]} == {"forward"}


def test_fail_on_a_severity_an_id_and_none(models, capsys):
    assert small("--fail-on", "warning") == 1
    assert small("--fail-on", "odd-size") == 1
    assert small("--fail-on", "error") == 0
    assert small("--fail-on", "odd-vocabulary") == 0


def test_bad_gpu_and_dtype(models):
    assert "not a GPU known here" in refused("shape_lint_models:Small", "--gpu", "hoper")
    refusal = refused("shape_lint_models:Small", "--dtype", "fp16x", "--input", "4,1023")
    assert "autocast takes float16 or bfloat16" in refusal


def test_missing_inputs_are_reported(models):
    assert "add one for each argument of its forward, as --input 64,1024" in refused(
        "shape_lint_models:Small", "--gpu", "hopper"
    )


def test_named_inputs_reach_the_forward(models, capsys):
    assert (
        run(
            "shape_lint_models:Words",
            "--input",
            "input_ids=8,128",
            "--input",
            "attention_mask=8,128",
            "--gpu",
            "hopper",
            "--json",
        )
        == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert document["matmuls"][0]["n"] == 100


# -- recordings that stopped ----------------------------------------------------------------------------------------


def stops(*argv, target="shape_lint_models:Stops"):
    return run(target, "--input", "64,1023", "--dtype", "float16", "--gpu", "hopper", *argv)


def test_a_recording_that_stopped_is_an_error_with_the_next_step(models, capsys):
    assert stops("--fail-on", "error") == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "error recording-incomplete the forward stopped in the model itself" in out
    assert "every figure here is of the 1 product that ran before" in out
    assert "--real" in out
    assert "device='real'" in out
    assert "Nothing to fix" not in out
    assert stops("--fail-on", "recording-incomplete") == 1
    assert stops("--real", "--fail-on", "error") == 0


def test_json_notes_once_that_it_is_incomplete(models, capsys):
    assert stops("--json") == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["complete"] is False
    assert document["findings"][0]["id"] == "recording-incomplete"
    assert captured.out.count("the forward stopped") == 1
    assert captured.err == ""


@pytest.mark.parametrize("option", [("--fix",), ("--write-baseline", "base.json")])
def test_output_of_an_incomplete_recording_has_a_warning_on_stderr(models, capsys, option):
    assert stops(*option) == 0
    assert "the recording is incomplete: the forward stopped" in capsys.readouterr().err
    assert small(*option) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("target", "sizes"), [("shape_lint_models:relu", "4,4"), ("shape_lint_models:clean", "0,1024")]
)
def test_an_empty_recording_writes_no_baseline(models, capsys, target, sizes):
    message = refused(target, "--input", sizes, "--gpu", "hopper", "--write-baseline", "base.json")
    assert "base.json is not written: no matrix product was recorded" in message
    assert not (models / "base.json").exists()
    assert run(target, "--input", sizes, "--gpu", "hopper", "--fail-on", "nothing-recorded") == 1
    assert "Nothing to fix" not in capsys.readouterr().out


def test_shapes_that_depend_on_data_need_real_tensors(models, capsys):
    assert run("shape_lint_models:Data", "--input", "16,64", "--gpu", "hopper", "--real", "--json") == 0
    real = json.loads(capsys.readouterr().out)
    assert real["device"] in ("cpu", "cuda")
    assert real["matmuls"]


# -- baselines ------------------------------------------------------------------------------------------------------


def test_a_baseline_lets_known_findings_pass_and_new_ones_fail(models, capsys):
    assert small("--write-baseline", "base.json", "--fail-on", "warning") == 1
    assert small("--baseline", "base.json", "--fail-on", "warning") == 0
    assert "0 new, 1 known, 0 gone" in capsys.readouterr().out
    assert (
        run(
            "shape_lint_models:clean",
            "--input",
            "4096,1024",
            "--dtype",
            "float16",
            "--gpu",
            "hopper",
            "--baseline",
            "base.json",
        )
        == 0
    )
    assert "gone  odd-size fc 1023" in capsys.readouterr().out
    (models / "base.json").write_text(
        json.dumps({"schema": "mpinspect.shapes.baseline", "schema_version": 1, "findings": []}), encoding="utf-8"
    )
    assert small("--baseline", "base.json", "--fail-on", "warning") == 1
    assert "new   warning  odd-size fc 1023" in capsys.readouterr().out


def test_a_baseline_that_can_not_be_written_is_unchanged(models, monkeypatch):
    small("--write-baseline", "base.json")
    before = (models / "base.json").read_text(encoding="utf-8")

    def full(out, data):
        out.write(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mpinspect.runtime.appending.write_all", full)
    with pytest.raises(UnusableError, match=r"base.json can't be written: No space left on device"):
        small("--write-baseline", "base.json")
    assert (models / "base.json").read_text(encoding="utf-8") == before
    assert [path.name for path in models.glob("base*")] == ["base.json"]


def test_a_baseline_with_json_leaves_stdout_unchanged(models, capsys):
    small("--write-baseline", "base.json")
    capsys.readouterr()
    assert small("--baseline", "base.json", "--json") == 0
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert "1 known" in captured.err


def test_a_baseline_for_another_gpu_or_dtype_is_reported(models, capsys):
    small("--write-baseline", "base.json")
    assert small("--baseline", "base.json") == 0
    assert "was made for" not in "".join(capsys.readouterr())
    assert small("--baseline", "base.json", "--gpu", "ampere") == 0
    captured = capsys.readouterr()
    for text in captured:
        assert "the baseline was made for H100, float16 and this report is for A100, float16" in text
    assert small("--baseline", "base.json", "--dtype", "bfloat16", "--json") == 0
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert captured.err.count("was made for H100, float16 and this report is for H100, bfloat16") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '{"schema": "mpinspect.shapes.baseline", "schema_version": 1, "findings": {}}',
            "findings is an object, not an array",
        ),
        (None, "there is no baseline"),
        ("", "can't be read"),
        ("[1]", "is not a baseline"),
        ('{"schema": "mpinspect.shapes.baseline", "schema_version": 1}', "damaged"),
        ('{"schema": "mpinspect.shapes.baseline", "schema_version": 1, "findings": [3]}', "damaged"),
    ],
)
def test_bad_baselines(models, text, words):
    if text is not None:
        (models / "base.json").write_text(text, encoding="utf-8")
    assert words in refused("shape_lint_models:Small", "--baseline", "base.json")


def test_files_that_can_not_be_written(models):
    argv = ("shape_lint_models:Small", "--input", "4,1023", "--gpu", "hopper")
    assert "can't be written" in refused(*argv, "--write-baseline", str(models / "no" / "base.json"))
    (models / "file").write_text("", encoding="utf-8")
    assert "can't be written" in refused(*argv, "--md", str(models / "file" / "report.md"))


# -- lint_shapes ----------------------------------------------------------------------------------------------------


def linear_model():
    return torch.nn.Linear(64, 64)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"gpu": "hoper"}, "not a GPU known here"),
        ({"gpu": 9}, "an architecture as 'hopper'"),
        ({"dtype": "fp17"}, "autocast takes float16 or bfloat16"),
        ({"dtype": torch.int64}, "autocast takes float16 or bfloat16"),
        ({"args": torch.empty(4, 64)}, "args=(x,)"),
        ({"args": 3}, "args is an int, not a tuple"),
        ({"kwargs": [1]}, "not a dict"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"model": torch.nn.Linear}, "is the class Linear"),
        ({"model": torch.relu}, "is a function"),
        ({"model": 3}, "is an int"),
    ],
)
def test_bad_arguments_are_value_errors(arguments, words):
    arguments = {"model": linear_model(), "args": (torch.empty(4, 64),)} | arguments
    with pytest.raises(ValueError, match=words.replace("(", r"\(").replace(")", r"\)")):
        lint_shapes(arguments.pop("model"), **arguments)


@pytest.mark.parametrize("dtype", ["float16", "torch.float16", torch.float16])
def test_dtypes_by_name(dtype):
    assert lint_shapes(linear_model(), (torch.empty(64, 64),), dtype=dtype, gpu="hopper").dtype == "float16"


def test_auto_without_a_gpu_assumes_ampere_with_a_note(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = lint_shapes(linear_model(), (torch.empty(64, 64),), dtype="float16")
    assert report.gpu.architecture == "ampere"
    assert any("judged for Ampere" in note for note in report.notes)
    assert not lint_shapes(linear_model(), (torch.empty(64, 64),), gpu="hopper").notes


def test_auto_with_a_gpu_is_that_gpu(monkeypatch):
    properties = argparse.Namespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    gpu, notes = choose_gpu("auto")
    assert (gpu.architecture, notes) == ("hopper", ())
