"""A plain Transformers script: the Trainer on a tiny GPT-2 made from a config, on the text of Python's standard library.

Nothing is downloaded. It does not use mpinspect: `mpinspect run gpt2_trainer.py` inspects it from outside.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

VOCABULARY, LENGTH = 256, 32


class Text(torch.utils.data.Dataset):
    """The bytes of a few modules of the standard library, in pieces of LENGTH."""

    def __init__(self, pieces: int) -> None:
        home = Path(sysconfig.get_path("stdlib"))
        text = b"".join((home / name).read_bytes() for name in ("abc.py", "argparse.py", "ast.py"))
        self.tokens = torch.tensor(list(text[: pieces * LENGTH])).view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (%(default)s)")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step (%(default)s)")
    parser.add_argument("--save", metavar="PATH", help="where the weights go at the end")
    options = parser.parse_args()

    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    with tempfile.TemporaryDirectory() as directory:
        arguments = transformers.TrainingArguments(
            directory,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=options.accumulate,
            learning_rate=3e-3,
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = transformers.Trainer(
            transformers.GPT2LMHeadModel(config),
            arguments,
            train_dataset=Text(512),
            eval_dataset=Text(64),
        )
        # The Trainer's own lines hold times; the losses are printed below.
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]

    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']}: loss {entry['loss']:.9f}")
    print(f"loss in evaluation {evaluated:.9f}")
    if options.save:
        torch.save(trainer.model.state_dict(), options.save)


if __name__ == "__main__":
    main()
