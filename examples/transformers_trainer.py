"""Transformers' Trainer on a small GPT-2 made from a config, inspected by a callback. Nothing is downloaded.

    pip install mpinspect[transformers]
    python examples/transformers_trainer.py
    python examples/transformers_trainer.py --fp16        on a GPU: with mpinspect's loss scaler

It learns the text of the Python standard library, word by word, with gradients accumulated over two micro-batches.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import transformers

import mpinspect
from mpinspect.demo.demo import stdlib_tokens
from mpinspect.integrations.transformers import InspectorCallback

VOCABULARY, LENGTH = 1024, 64


class Pieces(torch.utils.data.Dataset):
    """A text in pieces of LENGTH words."""

    def __init__(self, count: int) -> None:
        self.tokens = stdlib_tokens(count * LENGTH, VOCABULARY).tokens[: count * LENGTH].view(count, LENGTH)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make_model() -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps (%(default)s)")
    parser.add_argument("--fp16", action="store_true", help="train in mixed precision; needs a GPU")
    parser.add_argument("--log-dir", help="where the session file and the TensorBoard log go (nowhere)")
    options = parser.parse_args()

    transformers.set_seed(0)
    callback = InspectorCallback(log_dir=options.log_dir, print_report=False)
    with tempfile.TemporaryDirectory() as directory:
        arguments = transformers.TrainingArguments(
            directory,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            fp16=options.fp16,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        trainer = transformers.Trainer(make_model(), arguments, train_dataset=Pieces(1024), callbacks=[callback])
        # The last line that the Trainer prints holds times.
        trainer.remove_callback(transformers.PrinterCallback)
        if options.fp16:
            # Before train(), which passes it to the optimizer.
            trainer.accelerator.scaler = mpinspect.LossScaler("cuda")
        loss = trainer.train().training_loss

    # Without print_report=False the callback would print this to stderr.
    print(callback.report())
    print(f"mean loss: {loss:.3f}")


if __name__ == "__main__":
    main()
