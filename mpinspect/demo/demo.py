"""The demo: a small word-level language model, trained in FP32 with the inspector on.

The model needs loss scaling: its loss is a mean over many tokens and a wide softmax, so most gradients of the logits
are too small for FP16. Its text is the source of the Python standard library.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from mpinspect.ranges.analysis.layer_report import LayerReport
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.inspector import Inspector
from mpinspect.ranges.kinds import ACTIVATION_GRADIENT, GRADIENT_KINDS, WEIGHT_GRADIENT
from mpinspect.ranges.store import FILE_NAME
from mpinspect.reporting.words import percent

TOKENS = 400_000
VOCABULARY = 4096
CONTEXT = 3
BATCH_TOKENS = 8192
LEARNING_RATE = 5e-3
#: Minimum number of words for a vocabulary of 4096: about five occurrences of each.
LEAST_TOKENS = 20_000

_WORD = re.compile(r"\w+|[^\w\s]")
_PICTURES = ("range_offset.png", "layers.png")
_PAGE = "report.html"


# -- the text -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """Text as token ids: ``tokens`` is int64, shape (n,); 0 is the id of all words not in ``words``."""

    tokens: torch.Tensor
    words: tuple[str, ...]

    def batch(self, generator: torch.Generator, size: int = BATCH_TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random contexts, shape (size, CONTEXT), and the word that follows each, shape (size,)."""
        ends = torch.randint(CONTEXT, len(self.tokens), (size,), generator=generator, device="cpu")
        return self.tokens[ends[:, None] + torch.arange(-CONTEXT, 0, device="cpu")], self.tokens[ends]

    def in_order(self, size: int = BATCH_TOKENS) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield every context and the word that follows it, once each, in batches of ``size``; the last may be smaller."""
        for ends in torch.split(torch.arange(CONTEXT, len(self.tokens), device="cpu"), size):
            yield self.tokens[ends[:, None] + torch.arange(-CONTEXT, 0, device="cpu")], self.tokens[ends]

    def split(self, held_out: float = 0.1) -> tuple[Corpus, Corpus]:
        """Return the first part, for training, and the last part, a fraction ``held_out``, for validation."""
        edge = round(len(self.tokens) * (1 - held_out))
        return Corpus(self.tokens[:edge], self.words), Corpus(self.tokens[edge:], self.words)


def stdlib_tokens(count: int = TOKENS, vocabulary: int = VOCABULARY, *, directory: Path | None = None) -> Corpus:
    """Return the first ``count`` words and symbols of the standard library's top-level ``*.py``, sorted by file name.

    The vocabulary consists of the most frequent words; ties are in alphabetical order. The same Python gives the same
    tokens.

    Args:
        count: number of tokens; fewer are returned if the library has fewer, at least 20,000 (or ``count``).
        vocabulary: number of distinct tokens, including the unknown word.
        directory: folder of the ``*.py`` files; by default the running Python's.

    Raises:
        FileNotFoundError: there is too little text, for example because the standard library is in a zip file.
    """
    home = directory or Path(sysconfig.get_path("stdlib"))
    found: list[str] = []
    for path in sorted(home.glob("*.py")):
        found += _WORD.findall(path.read_text(encoding="utf-8", errors="replace"))
        if len(found) >= count:
            break
    if len(found) < min(count, LEAST_TOKENS):
        raise FileNotFoundError(
            f"the demo reads the Python standard library's source, but {home} holds only {len(found):,} words of it "
            f"({min(count, LEAST_TOKENS):,} are needed): this Python may keep its library in a zip file. Use one that is "
            "installed in full"
        )
    found = found[:count]
    ranked = sorted(Counter(found).items(), key=lambda item: (-item[1], item[0]))
    words = ("<unknown>", *(word for word, _ in ranked[: vocabulary - 1]))
    numbers = {word: number for number, word in enumerate(words)}
    return Corpus(torch.tensor([numbers.get(word, 0) for word in found], dtype=torch.int64, device="cpu"), words)


# -- the model ----------------------------------------------------------------------------------------------------------


class WordModel(nn.Module):
    """Predicts a word from the three before it: embedding 32 -> tanh 64 -> vocabulary."""

    def __init__(self, vocabulary: int = VOCABULARY, embedding: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.hidden = nn.Linear(CONTEXT * embedding, hidden)
        self.tanh = nn.Tanh()
        self.output = nn.Linear(hidden, vocabulary)

    def forward(self, contexts: torch.Tensor) -> torch.Tensor:
        """Return the logits, shape (n, vocabulary), of contexts, int64 of shape (n, CONTEXT)."""
        logits: torch.Tensor = self.output(self.tanh(self.hidden(self.embedding(contexts).flatten(1))))
        return logits


def word_model(seed: int = 0, vocabulary: int = VOCABULARY) -> WordModel:
    """Return the model with weights drawn from ``seed``; the global random state is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return WordModel(vocabulary)


def word_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the cross-entropy, 0-d: the mean over the batch's tokens, computed in FP32."""
    contexts, following = batch
    return nn.functional.cross_entropy(model(contexts).float(), following)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    corpus: Corpus,
    *,
    steps: int,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    after_step: Callable[[torch.Tensor], None] = lambda loss: None,
) -> None:
    """Train in a plain loop on batches drawn from ``seed``; ``after_step`` is called with each step's loss."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        loss = word_loss(model, corpus.batch(generator, batch_tokens))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        after_step(loss.detach())


# -- the demo -----------------------------------------------------------------------------------------------------------


def run(
    *, log_dir: str | Path | None = None, steps: int = 160, seed: int = 0, quiet: bool = False, tokens: int = TOKENS
) -> RangeReport:
    """Train the model, print the inspector's report, and write the page, the pictures and the TensorBoard log.

    Args:
        log_dir: where to write, "runs/demo" by default; if that holds a run already, the next free name ("runs/demo-2").
        steps: training steps, at least 1; 160 take about a minute on two cores.
        seed: seed of weights and batches.
        quiet: suppress all output.
        tokens: number of tokens of text to read.

    Raises:
        ValueError: steps below 1.
        FileNotFoundError: the standard library's source is missing.
        OSError: log_dir can't be written.
    """
    if steps < 1:
        raise ValueError(f"steps={steps}: the demo needs at least one training step to see a gradient")
    directory = free_directory(log_dir)
    corpus, _ = stdlib_tokens(tokens).split()
    with progress(steps, quiet) as advance:
        report = train_inspected(word_model(seed), corpus, directory, steps=steps, seed=seed, after_step=advance)
    pictures = draw(report, directory)
    if not quiet:
        print(report)
        print(headline(report))
        print(whereabouts(directory, pictures))
    return report


def train_inspected(
    model: nn.Module,
    corpus: Corpus,
    directory: Path,
    *,
    steps: int,
    seed: int = 0,
    learning_rate: float = LEARNING_RATE,
    batch_tokens: int = BATCH_TOKENS,
    after_step: Callable[[torch.Tensor], None] = lambda loss: None,
) -> RangeReport:
    """Train in FP32 with the inspector on, which writes its session and the TensorBoard log into ``directory``."""
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    with Inspector(model, optimizers=optimizer, log_dir=directory) as inspector:
        train(model, optimizer, corpus, steps=steps, seed=seed, batch_tokens=batch_tokens, after_step=after_step)
    return inspector.report()


def headline(report: RangeReport) -> str:
    """Return the demo's findings in a few sentences, with figures from the report."""
    parts = [_range_offset(report)]
    if report.loss_scale.recommended is not None:
        exponent = math.log2(report.loss_scale.recommended)
        parts.append(f"Suggested loss scale: {report.loss_scale.recommended:g} (2^{exponent:g}).")
    logits = _layer(report, "output", ACTIVATION_GRADIENT)
    if logits is not None and logits.flushed_fraction is not None:
        parts.append(
            f"Without scaling {percent(logits.flushed_fraction.estimate)} of the non-zero gradient elements at the output "
            f"layer's activations would flush, {_weight_gradients(report)}."
        )
    return "\n".join(filter(None, parts))


def _range_offset(report: RangeReport) -> str:
    offsets = [
        layer.range_offset for layer in report.layers if layer.kind in GRADIENT_KINDS and layer.range_offset is not None
    ]
    if not offsets:
        return ""
    return f"Range offset: no gradient uses the top {min(offsets)} powers of two of {report.format}."


def _weight_gradients(report: RangeReport) -> str:
    flushed = [
        layer.flushed_fraction.estimate
        for layer in report.layers
        if layer.kind == WEIGHT_GRADIENT and layer.flushed_fraction is not None
    ]
    lost = [
        layer.log2_scale_needed
        for layer in report.layers
        if layer.kind == WEIGHT_GRADIENT and layer.log2_scale_needed is not None
    ]
    worst = percent(max(flushed, default=0.0))
    if max(lost, default=0) == 0:
        return f"while the weight gradients are fine: none loses more than {worst} of its own"
    return f"and of the weight gradients up to {worst}"


def _layer(report: RangeReport, name: str, kind: str) -> LayerReport | None:
    return next((layer for layer in report.layers if (layer.name, layer.kind) == (name, kind)), None)


def draw(report: RangeReport, directory: Path) -> list[Path]:
    """Write the report's page and its pictures, and return the pictures' paths."""
    from mpinspect.ranges.report import plots
    from mpinspect.reporting.plot_style import write

    report.save(directory / _PAGE)
    figures = plots.range_offset(report), plots.heat_map(report)
    return [write(figure, directory / name) for name, figure in zip(_PICTURES, figures, strict=True)]


def whereabouts(directory: Path, pictures: list[Path], unscaled: Path | None = None) -> str:
    """Return text with the paths of the pictures, the commands that show the run and, in its last line, the page's path.

    Args:
        unscaled: directory of the same training in FP16 without loss scaling, if it was recorded too.
    """
    lines = [
        "",
        "Pictures:",
        *(f"  {path}" for path in pictures),
        "TensorBoard:",
        f"  {_command('tensorboard')} --logdir {directory}",
    ]
    if unscaled is not None:
        lines += ["The effect of FP16 without loss scaling:", f"  {_command('mpinspect')} diff {directory} {unscaled}"]
    lines += ["This report again:", f"  {_command('mpinspect')} report {directory}", "To explore in a browser:"]
    return "\n".join([*lines, f"  {directory / _PAGE}"])


def _command(name: str) -> str:
    """Return the name of a program installed with this Python, or its path if the shell would not find it."""
    here = Path(sys.executable).parent / name
    if shutil.which(name) or not here.exists():
        return name
    return os.path.relpath(here)


def free_directory(wanted: str | Path | None) -> Path:
    """Make and return ``wanted`` (default "runs/demo"), or the first of "wanted-2", "wanted-3", ... without a run."""
    path, number = Path(wanted or "runs/demo"), 1
    first = path
    while (path / FILE_NAME).exists():
        number += 1
        path = first.with_name(f"{first.name}-{number}")
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def progress(
    steps: int, quiet: bool, name: str = "training", *, place: int = 1, of: int = 1
) -> Iterator[Callable[[torch.Tensor], None]]:
    """Yield a function to call with each step's loss; show progress, time left and loss if stderr is a terminal.

    Args:
        steps: number of steps of this run.
        quiet: show nothing.
        name: the run's name.
        place, of: number of this run, from 1, and of all runs: the bar and the time left are of all runs.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda loss: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        if of > 1:
            name += f" ({place} of {of})"
        task = bar.add_task(name, total=steps * of, completed=steps * (place - 1))
        yield lambda loss: bar.update(task, advance=1, description=f"{name}, loss {loss.item():.3f}")
