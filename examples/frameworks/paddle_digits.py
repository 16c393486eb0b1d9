"""PaddlePaddle: a small network trained on scikit-learn's digits with FP16 gradients and loss scaling.

    pip install mpinspect paddlepaddle scikit-learn
    python examples/frameworks/paddle_digits.py --dtype float16

The pixels, whole numbers from 0 to 16, are looked up in a sparse embedding, whose gradient is a SelectedRows.

What there is to know: on a GPU paddle.amp does the rounding and GradScaler the scaling; ``scaler.step`` divides the scale out, so
gradients are observed between ``backward`` and ``step``. The current scale is in ``scaler.state_dict()``. On a CPU both
turn themselves off: there every layer's input and output are rounded to ``--dtype`` here, forward and backward, and the loss is
scaled by hand.
"""

from __future__ import annotations

import argparse
import warnings

import numpy as np
import paddle
from sklearn.datasets import load_digits

import mpinspect

BATCH = 64
RATE = 0.1
SCALE = 2.0**10


class Digits(paddle.nn.Layer):
    """Rounds to ``dtype`` between its layers, if that is not float32; the gradients on their way back are rounded too."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.rounded_to = dtype
        self.pixels = paddle.nn.Embedding(17, 4, sparse=True)
        self.hidden = paddle.nn.Linear(256, 64)
        self.logits = paddle.nn.Linear(64, 10)

    def rounded(self, x: paddle.Tensor) -> paddle.Tensor:
        return x if self.rounded_to == "float32" else x.astype(self.rounded_to).astype("float32")

    def forward(self, images: paddle.Tensor) -> dict[str, paddle.Tensor]:
        """The output of each layer, by its name."""
        pixels = self.rounded(self.pixels(images))
        hidden = self.rounded(paddle.nn.functional.relu(self.hidden(pixels.flatten(1))))
        return {"pixels": pixels, "hidden": hidden, "logits": self.rounded(self.logits(hidden))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float16")
    parser.add_argument("--steps", type=int, default=40, help="training steps (%(default)s)")
    parser.add_argument("--log-dir", help="directory for the session file and the TensorBoard log")
    parser.add_argument(
        "--check", metavar="FILE", help="also write every array observed, as Paddle casts it, to FILE (.npz)"
    )
    options = parser.parse_args()

    paddle.seed(0)
    digits = load_digits()
    images = paddle.to_tensor(digits.images.reshape(-1, 64).astype("int64"))
    labels = paddle.to_tensor(digits.target.astype("int64"))
    model = Digits(options.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaler = paddle.amp.GradScaler(enable=options.dtype == "float16", init_loss_scaling=SCALE)
    by_hand = SCALE if options.dtype == "float16" and not scaler.is_enable() else 1.0
    # Plain SGD with a rate divided by the scale is SGD on unscaled gradients.
    optimizer = paddle.optimizer.SGD(RATE / by_hand, parameters=model.parameters())
    through = None if options.dtype == "float32" else options.dtype
    kept: dict[str, np.ndarray] = {}

    order = np.random.default_rng(0)
    with mpinspect.Recorder(options.log_dir, model="Digits") as recorder:
        for step in range(options.steps):
            scale = float(np.asarray(scaler.state_dict()["scale"]).item()) if scaler.is_enable() else by_hand

            def observe(name: str, gradient: paddle.Tensor, kind: str, step: int = step, scale: float = scale) -> None:
                recorder.observe(name, gradient, kind=kind, step=step, loss_scale=scale, passed_through=through)
                if options.check:
                    key = f"{step}|{kind}|{name}|{scale!r}"
                    kept[key] = dense(gradient, model.pixels.weight.shape).astype(np.float64)

            batch = paddle.to_tensor(order.choice(len(digits.target), BATCH, replace=False))
            outputs = model(images[batch])
            for name, output in outputs.items():
                output.register_hook(lambda gradient, name=name: observe(name, gradient, "activation_gradient"))
            loss = paddle.nn.functional.cross_entropy(outputs["logits"], labels[batch])
            (scaler.scale(loss) * by_hand).backward()
            for name, parameter in model.named_parameters():
                observe(name, parameter.grad, "weight_gradient")
            scaler.step(optimizer)
            scaler.update()
            optimizer.clear_grad()
    if options.check:
        np.savez(options.check, **kept)
    print(recorder.report())
    print(f"loss of the last batch: {float(loss):.3f}")


def dense(gradient: paddle.Tensor, shape: list[int]) -> np.ndarray:
    """A gradient as NumPy's float32; the rows of an embedding's added up where they belong."""
    if not gradient.is_selected_rows():
        return gradient.astype("float32").numpy()
    whole = np.zeros(shape, np.float32)
    for row, values in zip(gradient.rows(), gradient.numpy(), strict=True):
        whole[row] += values
    return whole


if __name__ == "__main__":
    main()
