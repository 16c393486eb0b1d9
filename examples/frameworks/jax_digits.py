"""JAX: a small network trained on scikit-learn's digits with FP16 or BF16 arithmetic, FP32 weights and a dynamic loss scale.

    pip install mpinspect jax scikit-learn
    python examples/frameworks/jax_digits.py --dtype float16

Arrays have values only outside ``jax.jit`` and ``jax.grad``, so the jitted step returns its gradients, which are observed
afterwards. ``observe`` accepts a whole tree of gradients; its keys become dotted names. The gradients of the float32 weights
are float32 copies of values in ``--dtype``, which ``passed_through`` declares. The gradient of zeros that are added to a
layer's output is the gradient of that output.
"""

from __future__ import annotations

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import mpinspect

BATCH = 64
SIZES = {"first": (64, 48), "second": (48, 32), "logits": (32, 10)}
GROWTH_INTERVAL = 15

Tree = dict[str, dict[str, jax.Array]]


def make_weights() -> Tree:
    keys = jax.random.split(jax.random.key(0), len(SIZES))
    return {
        name: {"kernel": jax.random.normal(key, shape) * (2 / shape[0]) ** 0.5, "bias": jnp.zeros(shape[1])}
        for key, (name, shape) in zip(keys, SIZES.items(), strict=True)
    }


def make_taps(dtype: str) -> dict[str, jax.Array]:
    """Zeros to be added to the outputs: their gradients are the activation gradients."""
    return {name: jnp.zeros((BATCH, shape[1]), dtype) for name, shape in SIZES.items()}


def scaled_loss(
    weights: Tree, taps: dict[str, jax.Array], x: jax.Array, y: jax.Array, scale: jax.Array, dtype: str
) -> jax.Array:
    x = x.astype(dtype)
    # Not in the order of the dict: jit sorts its keys.
    for name in SIZES:
        layer = weights[name]
        x = x @ layer["kernel"].astype(dtype) + layer["bias"].astype(dtype) + taps[name]
        if name != "logits":
            x = jax.nn.relu(x)
    log_probabilities = jax.nn.log_softmax(x.astype(jnp.float32))
    return -jnp.take_along_axis(log_probabilities, y[:, None], 1).mean() * scale


@partial(jax.jit, static_argnames="dtype")
def training_step(
    weights: Tree, taps: dict[str, jax.Array], x: jax.Array, y: jax.Array, scale: jax.Array, dtype: str
) -> tuple[jax.Array, Tree, Tree, dict[str, jax.Array], jax.Array]:
    """Loss, new weights, both kinds of gradients (still scaled), and whether all of them are finite."""
    loss, (by_weight, by_output) = jax.value_and_grad(scaled_loss, argnums=(0, 1))(weights, taps, x, y, scale, dtype)
    finite = jnp.all(jnp.array([jnp.isfinite(part).all() for part in jax.tree.leaves(by_weight)]))
    stepped = jax.tree.map(lambda w, g: jnp.where(finite, w - 0.1 * g / scale, w), weights, by_weight)
    return loss / scale, stepped, by_weight, by_output, finite


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float16")
    parser.add_argument("--scale", type=float, default=2.0**24, help="loss scale to begin with (%(default)g)")
    parser.add_argument("--steps", type=int, default=40, help="training steps (%(default)s)")
    parser.add_argument("--log-dir", help="directory for the session file and the TensorBoard log")
    parser.add_argument(
        "--check", metavar="FILE", help="also write every array observed, as JAX casts it, to FILE (.npz)"
    )
    options = parser.parse_args()

    digits = load_digits()
    images, labels = jnp.array(digits.images.reshape(-1, 64) / 16, jnp.float32), jnp.array(digits.target)
    weights, taps, scale, healthy = make_weights(), make_taps(options.dtype), options.scale, 0
    through = None if options.dtype == "float32" else options.dtype
    kept: dict[str, np.ndarray] = {}
    order = np.random.default_rng(0)
    with mpinspect.Recorder(options.log_dir, model="Digits") as recorder:
        for step in range(options.steps):
            batch = order.choice(len(images), BATCH, replace=False)
            x, y = images[batch], labels[batch]
            loss, weights, by_weight, by_output, finite = training_step(
                weights, taps, x, y, jnp.float32(scale), options.dtype
            )
            recorder.observe("", by_weight, step=step, loss_scale=scale, passed_through=through)
            recorder.observe("", by_output, step=step, loss_scale=scale, kind="activation_gradient")
            recorder.next_step(skipped=not finite)
            if options.check:
                for kind, tree in (("weight_gradient", by_weight), ("activation_gradient", by_output)):
                    for path, part in jax.tree_util.tree_leaves_with_path(tree):
                        name = ".".join(entry.key for entry in path)
                        kept[f"{step}|{kind}|{name}|{scale!r}"] = np.asarray(part.astype(jnp.float32), np.float64)
            # The usual rule: half after an overflow, double after a while without.
            healthy = healthy + 1 if finite else 0
            if not finite:
                scale /= 2
            elif healthy % GROWTH_INTERVAL == 0:
                scale *= 2
    if options.check:
        np.savez(options.check, **kept)
    print(recorder.report())
    print(f"loss of the last batch: {float(loss):.3f}")


if __name__ == "__main__":
    main()
