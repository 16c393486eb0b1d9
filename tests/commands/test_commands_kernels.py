"""``mpinspect kernels``: its output and files, its exit statuses, and every form of --fail-on."""

import gzip
import json
import shutil

import made_kernels as made
import pytest
from made_kernels import kernel, mm, trace

from mpinspect.commands import cli
from mpinspect.kernels.analysis import KERNEL_FINDING_IDS, analyse_kernels
from mpinspect.kernels.analysis.conditions import QUANTITIES, parse

BERT = str(made.TRACES / "h100_bert_small.json.gz")
CPU = str(made.TRACES / "edge_cpu_only.json.gz")


def test_text(capsys):
    assert cli.main(["kernels", BERT]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Kernels of h100_bert_small.json.gz on NVIDIA H100 80GB HBM3")
    assert "used-but-degraded" in out
    assert err == ""


def test_output_is_only_json(capsys):
    assert cli.main(["kernels", BERT, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "mpinspect.kernels"
    assert round(document["tensor_core_fraction_of_all"], 2) == 0.77


def test_files(tmp_path, capsys):
    png, md = tmp_path / "a" / "k.png", tmp_path / "b" / "k.md"
    assert cli.main(["kernels", BERT, "--png", str(png), "--md", str(md)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert md.read_text("utf-8").startswith("# Kernels of h100")


def test_a_folder_of_ranks(capsys):
    assert cli.main(["kernels", str(made.TRACES / "ranks")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Kernels of 2 traces on Tesla V100-SXM2-32GB")
    assert "rank 1" in out


def test_several_traces(capsys):
    assert cli.main(["kernels", BERT, str(made.TRACES / "a100_alexnet.json.gz")]) == 0
    assert "different-jobs" in capsys.readouterr().out


def test_the_gpu_can_be_named(tmp_path, capsys):
    path = tmp_path / "nameless.json"
    content = json.loads(gzip.decompress((made.TRACES / "a100_alexnet.json.gz").read_bytes()))
    content["deviceProperties"] = []
    path.write_text(json.dumps(content))
    assert cli.main(["kernels", str(path), "--json"]) == 0
    nameless = json.loads(capsys.readouterr().out)
    assert {finding["id"] for finding in nameless["findings"]} >= {"unknown-gpu"}
    assert nameless["losses"] == []
    assert cli.main(["kernels", str(path), "--json", "--gpu", "a100"]) == 0
    named = json.loads(capsys.readouterr().out)
    assert [gpu["name"] for gpu in named["gpus"]] == ["A100"]
    assert named["losses"]


@pytest.mark.parametrize("make", ["nothing", "empty folder", "no JSON", "cut gzip", "no trace"])
def test_unreadable_input_is_a_sentence_and_status_2(make, tmp_path, capsys):
    path = tmp_path / "trace.json"
    if make == "empty folder":
        path.mkdir()
    elif make == "no JSON":
        path.write_bytes(b"PK\x03\x04 not ours")
    elif make == "cut gzip":
        path.write_bytes(gzip.compress(b'{"traceEvents": [')[:15])
    elif make == "no trace":
        path.write_text('{"a": 1}')
    assert cli.main(["kernels", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mpinspect: ")
    assert err.count("\n") == 1
    assert str(path) in err


def test_the_error_for_a_wrong_comparison_lists_the_valid_ones(capsys):
    with pytest.raises(SystemExit):
        cli.main(["kernels", "x", "--fail-on", "tensorcore share < 60%"])
    shown = capsys.readouterr().err
    for name in QUANTITIES:
        assert name in shown


@pytest.mark.parametrize(
    ("what", "status"),
    [
        ("error", 0),
        ("warning", 1),
        ("info", 1),
        ("used-but-degraded", 1),
        ("tensor-cores-unused", 0),
        ("tensor-core share < 60%", 0),
        ("tensor-core share of all < 77%", 1),
        ("tensor-core share of all < 76%", 0),
        ("Tensor-core  share of all<0.77", 1),
        ("tensor-core share of compute >= 76.5%", 1),
        ("native share < 90%", 1),
        ("degraded share > 17%", 1),
        ("degraded share > 18%", 0),
        ("off share > 0%", 0),
        ("off share >= 0%", 1),
        ("unknown share > 5%", 0),
        ("communication share > 10%", 0),
        ("attributed share < 95%", 0),
        ("idle share > 50%", 1),
        ("idle share <= .5", 0),
        ("tensor-core share < 1e-1", 0),
        ("tensor-core share > 1E-1", 1),
        ("native share < 9.0e1%", 1),
        ("idle share <= .5e+0", 0),
    ],
)
def test_fail_on(what, status, capsys):
    assert cli.main(["kernels", BERT, "--fail-on", what]) == status


def test_several_fail_on(capsys):
    both = ["--fail-on", "tensor-core share < 10%", "--fail-on", "used-but-degraded"]
    assert cli.main(["kernels", BERT, *both]) == 1
    assert cli.main(["kernels", BERT, "--fail-on", "off share > 0%", "--fail-on", "error"]) == 0


def test_a_share_of_zero_kernels_does_not_pass_silently(capsys):
    assert cli.main(["kernels", CPU, "--fail-on", "tensor-core share < 60%"]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("Kernels of edge_cpu_only")
    assert "can't be decided: the traces lack the total that it is a share of (the matrix products' time)" in err


def test_an_undecidable_condition_is_reported_even_if_another_holds(capsys):
    options = ["--fail-on", "attributed share > 50%", "--fail-on", "tensor-core share < 60%"]
    assert cli.main(["kernels", str(made.TRACES / "a100_triton.json.gz"), *options]) == 2


def test_a_share_that_depends_on_unknown_verdicts_is_undecided():
    report = analyse_kernels([trace(kernel(made.NATIVE, 50, mm(64, 64, 64)), kernel(made.TRITON, 50))])
    assert parse("tensor-core share < 60%").holds(report) is None
    assert parse("tensor-core share < 40%").holds(report) is False
    assert parse("tensor-core share <= 100%").holds(report) is True
    assert parse("off share > 60%").holds(report) is False
    assert parse("off share > 10%").holds(report) is None
    assert parse("unknown share > 40%").holds(report) is True
    assert "between 50% and 100%" in parse("tensor-core share < 60%").doubt(report)


@pytest.mark.parametrize("name", QUANTITIES)
def test_every_share_can_be_compared(name):
    report = analyse_kernels([trace(kernel(made.NATIVE, 50, mm(64, 64, 64)))])
    low, high = parse(f"{name} >= 0").range(report)
    assert 0 <= low <= high <= 1
    assert parse(f"{name} >= 0").holds(report) is True
    assert parse(f"{name} > 100%").holds(report) is False
    assert parse(f"{name} >= 0").holds(analyse_kernels([])) is None


def test_no_comparison_has_the_name_of_a_finding():
    assert not set(QUANTITIES) & set(KERNEL_FINDING_IDS)


def test_a_mix_of_files_and_folders(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    shutil.copy(made.TRACES / "ranks" / "worker0.json.gz", tmp_path / "run" / "a.pt.trace.json.gz")
    assert cli.main(["kernels", str(tmp_path / "run"), str(made.TRACES / "ranks" / "worker1.json.gz"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [rank["label"] for rank in document["ranks"]] == ["rank 0", "rank 1"]


def test_a_misspelt_gpu_has_suggestions(capsys):
    with pytest.raises(SystemExit):
        cli.main(["kernels", BERT, "--gpu", "RTX 4091"])
    assert "near it: RTX 4090" in capsys.readouterr().err
