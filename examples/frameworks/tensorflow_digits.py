"""TensorFlow: a Keras model trained on scikit-learn's digits by a GradientTape, in FP32 or in mixed_float16 with loss scaling.

    pip install mpinspect tensorflow scikit-learn
    python examples/frameworks/tensorflow_digits.py --precision mixed_float16

The pixels, integers from 0 to 16, are the inputs of an embedding, so one of the gradients is a tf.IndexedSlices.

Keras' LossScaleOptimizer stores its scale in ``dynamic_scale`` and unscales inside ``apply``. The tape's gradients are still
scaled, so they are observed before ``apply``, with the scale of that time. Under mixed_float16 the gradients of the float32
weights are float32 copies of FP16 values, which ``passed_through="float16"`` declares.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import mpinspect

BATCH = 64


def make_layers() -> list[keras.Layer]:
    return [
        keras.layers.Embedding(17, 4, name="pixels"),
        keras.layers.Flatten(name="flatten"),
        keras.layers.Dense(64, activation="relu", name="hidden"),
        keras.layers.Dense(10, name="logits"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=("float32", "mixed_float16"), default="mixed_float16")
    parser.add_argument("--steps", type=int, default=40, help="training steps (%(default)s)")
    parser.add_argument("--log-dir", help="directory for the session file and the TensorBoard log")
    parser.add_argument(
        "--check", metavar="FILE", help="also write every array observed, as TensorFlow casts it, to FILE (.npz)"
    )
    options = parser.parse_args()

    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_global_policy(options.precision)
    digits = load_digits()
    images, labels = digits.images.reshape(-1, 64).astype("int32"), digits.target.astype("int32")
    layers = make_layers()
    model = keras.Sequential(layers, name="Digits")
    model(images[:1])
    half = options.precision == "mixed_float16"
    optimizer = keras.optimizers.SGD(0.5)
    if half:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**10, dynamic_growth_steps=15)
    optimizer.build(model.trainable_variables)

    @tf.function
    def backward(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, dict[str, object], dict[str, object]]:
        """Loss, gradients by variable, and gradients by layer output: what mpinspect is to see leaves the graph here."""
        outputs = {}
        with tf.GradientTape() as tape:
            for layer in layers:
                x = outputs[layer.name] = layer(x)
            loss = tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(y, tf.cast(x, tf.float32), from_logits=True)
            )
            scaled = optimizer.scale_loss(loss) if half else loss
        by_weight, by_output = tape.gradient(scaled, (list(model.trainable_variables), outputs))
        named = {
            variable.path: gradient for variable, gradient in zip(model.trainable_variables, by_weight, strict=True)
        }
        return loss, named, by_output

    kept: dict[str, np.ndarray] = {}
    order = np.random.default_rng(0)
    with mpinspect.Recorder(options.log_dir, model=model.name) as recorder:
        for step in range(options.steps):
            batch = order.choice(len(images), BATCH, replace=False)
            loss, by_weight, by_output = backward(tf.constant(images[batch]), tf.constant(labels[batch]))
            scale = float(optimizer.dynamic_scale.numpy()) if half else 1.0
            recorder.observe("", by_weight, step=step, loss_scale=scale, passed_through="float16" if half else None)
            recorder.observe("", by_output, kind="activation_gradient", step=step, loss_scale=scale)
            if options.check:
                for kind, gradients in (("weight_gradient", by_weight), ("activation_gradient", by_output)):
                    for name, gradient in gradients.items():
                        dense = tf.convert_to_tensor(gradient)
                        kept[f"{step}|{kind}|{name}|{scale!r}"] = tf.cast(dense, tf.float64).numpy()
            optimizer.apply(list(by_weight.values()), model.trainable_variables)
            skipped = half and float(optimizer.dynamic_scale.numpy()) < scale
            recorder.next_step(skipped=skipped)
    if options.check:
        np.savez(options.check, **kept)
    print(recorder.report())
    print(f"loss of the last batch: {float(loss):.3f}")


if __name__ == "__main__":
    main()
