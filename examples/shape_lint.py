"""Which matrix shapes of well-known models suit Tensor Cores, by the GTC 2018 talk's rule and by today's.

    python examples/shape_lint.py [--gpu hopper] [--full MODEL]

Every model is built from its config on the meta device, without weights, downloads or a GPU. Each model has a row: the share of
products with multiples of 8 everywhere, the share of FLOPs that today's rule judges native, and the lint's fixes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

import mpinspect

Made = tuple[nn.Module, dict[str, torch.Tensor]]


def tokens(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(batch, length, dtype=torch.int64)}


def images(batch: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.zeros(batch, 3, 224, 224)}


def rows(batch: int, width: int) -> dict[str, torch.Tensor]:
    return {"input": torch.zeros(batch, width)}


MODELS: dict[str, Callable[[], Made]] = {
    "linear, 1024": lambda: (nn.Linear(1024, 1024), rows(512, 1024)),
    "linear, 1023": lambda: (nn.Linear(1023, 1024), rows(512, 1023)),
    "GPT-2": lambda: (GPT2LMHeadModel(GPT2Config()), tokens(4, 1024)),
    "BERT": lambda: (BertForMaskedLM(BertConfig()), tokens(16, 512)),
    "ViT": lambda: (ViTForImageClassification(ViTConfig(num_labels=1000)), images(32)),
    "ResNet-50": lambda: (ResNetForImageClassification(ResNetConfig(num_labels=1000)), images(64)),
}


def lint(name: str, gpu: str) -> mpinspect.ShapeReport:
    with torch.device("meta"):
        model, inputs = MODELS[name]()
    return mpinspect.lint_shapes(model, kwargs=inputs, dtype=torch.float16, gpu=gpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="hopper", help="an architecture or a card (%(default)s)")
    parser.add_argument("--full", metavar="MODEL", choices=list(MODELS), help="the whole report of one of them")
    options = parser.parse_args()
    if options.full:
        print(lint(options.full, options.gpu))
        return
    print(f"{'':14}{'products':>10}{'multiples of 8':>16}{'native FLOPs':>14}   findings")
    for name in MODELS:
        report = lint(name, options.gpu)
        native = report.flops_by_verdict["native"] / report.flops
        of_eight = report.calls_by_talk.get(True, 0)
        found = ", ".join(finding.id for finding in report.findings if finding.severity != "info") or "nothing to mend"
        print(f"{name:14}{report.calls:>10}{of_eight:>16}{native:>14.1%}   {found}")
        for padding in report.padding:
            if padding.is_worth_it:
                print(f"{'':14}pad {padding.names[0]} {padding.size} -> {padding.advised}")


if __name__ == "__main__":
    main()
