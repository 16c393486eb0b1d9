"""Unmodified scripts have the same output and weights under plain Python and under ``mpinspect run``."""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import warm
from equality import equal

from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.kinds import ACTIVATION_GRADIENT, WEIGHT_GRADIENT
from mpinspect.ranges.session import Session
from mpinspect.ranges.windows.tensors import TensorKey

EXAMPLES = Path(__file__).parents[2] / "examples"
UNMODIFIED = EXAMPLES / "unmodified"
INSPECTED = (sys.executable, "-m", "mpinspect", "run", "--log-dir", "log")
TRANSFORMERS = ("transformers.models.gpt2.modeling_gpt2", "transformers.trainer")
#: Forks into two ranks with the variables of torchrun, which test_run_processes starts.
RANKS = """
import os, runpy, socket, sys
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
for rank in "01":
    if not os.fork():
        os.environ.update(RANK=rank, LOCAL_RANK=rank)
        del sys.argv[0]
        if sys.argv[0] == "-m":
            runpy._run_module_as_main(sys.argv[1], not sys.argv.pop(1))
        runpy.run_path(sys.argv[0], run_name="__main__")
        break
else:
    sys.exit(max(os.wait()[1] for _ in "01"))
"""


@dataclass(frozen=True)
class Ran:
    """A finished command, and its directory."""

    code: int
    out: bytes
    err: str
    directory: Path

    @property
    def weights(self) -> object:
        return torch.load(self.directory / "weights.pt")

    @property
    def layers(self) -> set[str]:
        """Return all layers of the written reports; a terminal shows only some."""
        reports = [json.loads(path.read_text("utf-8")) for path in (self.directory / "log").rglob("report.json")]
        return {
            layer["name"] for report in reports for model in report["models"] for layer in model["ranges"]["layers"]
        }

    @property
    def report(self) -> str:
        """Return the whole report; stderr shows only its verdict."""
        reports = sorted((self.directory / "log").rglob("report.md"))
        return "\n".join(path.read_text("utf-8") for path in reports)

    def session(self, *path: str) -> Session:
        return Session.load(self.directory.joinpath("log", *path))


def run(directory: Path, *command: str, modules: tuple[str, ...] = ()) -> Ran:
    """Run a command in a new directory, forked from a process that has imported torch and ``modules``."""
    directory.mkdir()
    settings = {"OMP_NUM_THREADS": "1", "COLUMNS": "100", "HF_HUB_OFFLINE": "1"}
    status, out, err = warm.run(directory, command[1:], settings, modules=modules)
    return Ran(status, out.encode(), err, directory)


def both(
    directory: Path,
    script: Path,
    *arguments: str,
    options: tuple[str, ...] = (),
    launcher: Path | None = None,
    modules: tuple[str, ...] = (),
) -> tuple[Ran, Ran]:
    """Run the script bare and inspected; assert equal exit statuses and stdout."""
    words, first = (str(script), *arguments), () if launcher is None else (str(launcher),)
    bare = run(directory / "bare", sys.executable, *first, *words, modules=modules)
    inspected = run(directory / "inspected", sys.executable, *first, *INSPECTED[1:], *options, *words, modules=modules)
    assert inspected.code == bare.code, inspected.err
    assert inspected.out == bare.out
    return bare, inspected


def check(bare: Ran, inspected: Ran, *layers: str) -> None:
    """Assert that the training is unchanged, and that the report names the layers and a loss scale."""
    assert bare.code == 0, bare.err
    assert equal(inspected.weights, bare.weights)
    assert not re.search("Traceback|Exception ignored|mpinspect failed", inspected.err), inspected.err
    assert re.search(r"Suggested loss scale: \d+|Scale 1 (will|would) do", inspected.report), inspected.err
    assert set(layers) <= inspected.layers, inspected.err


def test_a_plain_loop(tmp_path):
    bare, inspected = both(tmp_path, UNMODIFIED / "digits_mlp.py", "--epochs", "2", "--save", "weights.pt")
    check(bare, inspected, "encoder.0.weight", "head.bias", "encoder.2")
    session = inspected.session("DigitsMLP")
    # 30 batches per epoch. The first ten steps are sampled, then every tenth. Evaluation does not count as steps.
    assert session.progress.steps == 60
    assert session.progress.sampled_steps == 10 + 5
    assert session.totals()[TensorKey("head", ACTIVATION_GRADIENT)].samples == 15
    for name in ("run.json", "report.md", "report.json", "report.html"):
        assert (inspected.directory / "log" / name).stat().st_size > 0
    assert "DigitsMLP" in (inspected.directory / "log" / "report.md").read_text("utf-8")
    json.loads((inspected.directory / "log" / "report.json").read_text("utf-8"))
    assert inspected.err.splitlines()[-1] == (
        "mpinspect: the whole report: log/report.html (mpinspect report log prints it)"
    )
    # In addition to the script's own lines: the directory, an empty line, the verdict and the path of the page.
    assert len(inspected.err.splitlines()) - len(bare.err.splitlines()) <= 12, inspected.err


def test_shapes_and_kernels_of_the_steps_that_ran(tmp_path):
    arguments = ("--epochs", "1", "--width", "100", "--save", "weights.pt")
    bare, inspected = both(
        tmp_path, UNMODIFIED / "digits_mlp.py", *arguments, options=("--lint", "--kernels", "--full")
    )
    check(bare, inspected, "encoder.0.weight")
    # Neither 100 nor the number of classes, 10, is a multiple of 8.
    assert re.search(r"encoder\.0.*\b100\b|\b100\b.*encoder\.0", inspected.err), inspected.err
    assert (inspected.directory / "log" / "trace.json.gz").stat().st_size > 0


def test_a_model_that_needs_a_loss_scale(tmp_path):
    bare, inspected = both(tmp_path, UNMODIFIED / "words.py", "--steps", "40", "--save", "weights.pt")
    check(bare, inspected, "embedding.weight", "output")
    advice = analyse(inspected.session("WordModel")).loss_scale
    assert advice.needed
    assert f"Suggested loss scale: {advice.recommended:.0f} (2^" in inspected.report
    # The saved run gives the same report.
    again = run(tmp_path / "again", sys.executable, "-m", "mpinspect", "report", str(inspected.directory / "log"))
    assert again.code == 0, again.err
    assert f"Suggested loss scale: {advice.recommended:.0f} (2^" in again.out.decode()


def test_two_networks_that_train_each_other(tmp_path):
    bare, inspected = both(tmp_path, UNMODIFIED / "gan.py", "--save", "weights.pt")
    check(bare, inspected, "pixels.weight", "verdict.weight")
    generator, discriminator = inspected.session("Generator"), inspected.session("Discriminator")
    assert (generator.progress.steps, generator.progress.backwards) == (60, 60)
    # The generator's backward passes through the discriminator, as a backward but not as a step.
    assert (discriminator.progress.steps, discriminator.progress.backwards) == (60, 120)
    assert generator.totals()[TensorKey("pixels.weight", WEIGHT_GRADIENT)].samples == 15
    assert discriminator.totals()[TensorKey("verdict.weight", WEIGHT_GRADIENT)].samples >= 15


def test_accumulation_under_a_grad_scaler(tmp_path):
    bare, inspected = both(tmp_path, UNMODIFIED / "accumulation_scaler.py", "--save", "weights.pt")
    check(bare, inspected, "hidden.weight", "output.bias")
    session = inspected.session("Digits")
    scales = [float(scale) for scale in re.findall(r"scale (\S+)$", bare.out.decode(), re.MULTILINE)]
    skipped = sum(after < before for before, after in zip([2.0**24, *scales], scales, strict=False))
    assert skipped >= 4
    assert session.progress.steps == 20
    assert session.progress.backwards == 80
    assert session.progress.skipped_steps == skipped
    assert session.progress.scales[0].scale == 2.0**24
    assert session.totals()[TensorKey("hidden.weight", WEIGHT_GRADIENT)].samples == 4 * 11


@pytest.mark.slow
def test_the_transformers_trainer(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    bare, inspected = both(tmp_path, UNMODIFIED / "gpt2_trainer.py", "--save", "weights.pt", modules=TRANSFORMERS)
    check(bare, inspected, "transformer.h.0.attn.c_attn.weight", "transformer.wte.weight", "transformer.h.1.ln_1")
    session = inspected.session("GPT2LMHeadModel")
    assert (session.progress.steps, session.progress.backwards) == (20, 40)


@pytest.mark.slow
def test_a_lightning_module(tmp_path):
    pytest.importorskip("lightning")
    bare, inspected = both(tmp_path, UNMODIFIED / "lightning_module.py", "--save", "weights.pt", modules=("lightning",))
    check(bare, inspected, "net.0.weight", "net.2.bias")
    session = inspected.session("DigitsModule")
    assert (session.progress.steps, session.progress.backwards) == (30, 60)


def test_ranks_of_a_distributed_training(tmp_path):
    launcher = tmp_path / "ranks.py"
    launcher.write_text(RANKS)
    bare, inspected = both(tmp_path, UNMODIFIED / "ddp.py", "--save", "weights.pt", launcher=launcher)
    check(bare, inspected, "0.weight", "2.bias")
    for rank in ("rank0", "rank1"):
        session = inspected.session(rank, "network")
        assert session.progress.steps == 20
        assert TensorKey("0.weight", WEIGHT_GRADIENT) in session.totals()
    # One rank reports for both.
    assert inspected.err.count("the whole report: ") == 1
    assert inspected.err.count("mpinspect: rank 0: recording into") == inspected.err.count("recording into") == 1


@pytest.mark.slow
def test_processes_that_the_script_spawns(tmp_path):
    """The bare script forks its processes instead, which import nothing again and compute the same."""
    script = (UNMODIFIED / "spawn.py").read_text("utf-8")
    forks = tmp_path / "forks.py"
    script = script.replace("multiprocessing.spawn(", "multiprocessing.start_processes(")
    forks.write_text(script.replace("nprocs=", 'start_method="fork", nprocs='))
    bare = run(tmp_path / "bare", sys.executable, str(forks), "--save", "weights.pt")
    inspected = run(tmp_path / "inspected", *INSPECTED, str(UNMODIFIED / "spawn.py"), "--save", "weights.pt")
    assert (inspected.code, inspected.out) == (bare.code, bare.out) == (0, inspected.out), inspected.err
    assert equal(inspected.weights, bare.weights)
    sessions = [
        Session.load(path.parent) for path in (inspected.directory / "log").glob("*/Regressor/session.mpinspect")
    ]
    assert [session.progress.steps for session in sessions] == [20, 20]
    log = inspected.directory / "log"
    for number in range(2):
        assert json.loads((log / f"process-{number}" / "run.json").read_text())["models"][0]["name"] == "Regressor"
    assert (
        "2 processes were spawned and watched: each that trained has a directory of its own (process-0, ...)"
        in json.loads((log / "run.json").read_text())["saw"]
    )
    assert "2 processes were spawned" in " ".join(inspected.err.split())
    # The first process reports for all.
    assert inspected.err.count("\nComputes in FP32: ") == 1


def test_a_gradient_that_breaks_is_named_while_it_happens(tmp_path):
    bare, inspected = both(tmp_path, UNMODIFIED / "breaks.py", "--save", "weights.pt")
    assert bare.code == 0
    nan_equal = [
        torch.equal(torch.nan_to_num(bare.weights[key]), torch.nan_to_num(value))
        for key, value in inspected.weights.items()
    ]
    assert all(nan_equal)
    assert re.search(r"^mpinspect: step 12, backward, 'blocks\.1' \(Block\),", inspected.err, re.MULTILINE), (
        inspected.err
    )
    event = inspected.session("Network").events[0]
    assert (event.step, event.phase, event.module) == (12, "backward", "blocks.1")


def test_an_exception_ends_the_script_as_without_mpinspect(tmp_path):
    bare, inspected = both(tmp_path, UNMODIFIED / "breaks.py", "--raise")
    assert bare.code == 1
    # The fork's frames come first.
    first, _, rest = bare.err.partition(f'  File "{UNMODIFIED / "breaks.py"}", ')
    assert first.startswith("Traceback (most recent call last):\n")
    _, found, after = inspected.err.partition(bare.err.removeprefix(first))
    assert rest
    assert found
    assert "blocks.1" in after


# -- this repository's examples, without their Inspector --------------------------------------------------------------------


#: Substitutions that remove mpinspect from a script and add a print of the weights' hash.
_WITHOUT = (
    (r"^import mpinspect\n", ""),
    (
        r"^def main\(",
        "def show(model):\n    import hashlib\n"
        "    print([hashlib.sha256(each.detach().numpy().tobytes()).hexdigest() for each in model.parameters()])\n\n\ndef main(",
    ),
    (r"with mpinspect\.Inspector\(.*\) as inspector:", "if True:"),
    (r"return inspector$", "show(model)"),
    (r"^ *if report\..*\n.*\n", ""),
    (r"^ *report = .*\n|^ *print\((report|inspector\.report\(\)|mpinspect\.probe.*)\)\n", ""),
    (r"print\((train_fp32\(.*\))\.report\(\)\)", r"\1"),
    (r'^( *)(print\(f"last loss.*)', r"\1\2\n\1show(model)"),
)


def without_inspector(script: Path) -> str:
    """Return the script's source without mpinspect."""
    source = script.read_text("utf-8")
    for pattern, instead in _WITHOUT:
        source = re.sub(pattern, instead, source, flags=re.MULTILINE)
    assert not re.search(r"Inspector\(|inspector\.|report\(", source), source
    return source


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps", "part", "layers"),
    [
        ("digits_cnn", 30, "model", ("conv1.weight", "head.bias", "norm2.weight")),
        ("transformers_gpt2", 10, "GPT2LMHeadModel", ("transformer.h.1.mlp.c_fc.weight", "transformer.h.1.ln_1")),
        ("talk_network", 20, "Linear", ("weight", "bias")),
    ],
)
def test_examples_with_the_inspector_taken_out(name, steps, part, layers, tmp_path):
    script = tmp_path / f"{name}.py"
    script.write_text(without_inspector(EXAMPLES / f"{name}.py"))
    modules = TRANSFORMERS if name == "transformers_gpt2" else ()
    bare, inspected = both(tmp_path, script, f"--steps={steps}", modules=modules)
    assert bare.code == 0, bare.err
    assert bare.out.count(b"[") == (2 if name == "talk_network" else 1)
    assert set(layers) <= inspected.layers, inspected.err
    assert inspected.session(part).progress.steps == steps


@pytest.mark.slow
def test_a_script_with_an_inspector_of_its_own(tmp_path):
    """Both inspectors observe one model, and the script's own report on stdout is unchanged."""
    pytest.importorskip("accelerate")
    bare, inspected = both(tmp_path, EXAMPLES / "accelerate_loop.py", "--steps=6", modules=TRANSFORMERS)
    assert bare.code == 0
    assert b"6 steps, 6 sampled" in inspected.out
    assert not re.search("Traceback|Exception ignored|mpinspect failed", inspected.err), inspected.err
    assert inspected.session("model").progress.steps == 6


def test_every_unmodified_script_is_tested():
    source = Path(__file__).read_text("utf-8")
    for path in UNMODIFIED.glob("*.py"):
        assert f'"{path.name}"' in source
        assert not re.search(r"^\s*(import|from) mpinspect", path.read_text("utf-8"), re.MULTILINE)
