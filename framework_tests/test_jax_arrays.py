"""Recordings of JAX's array types, compared with JAX's casts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from oracle import agrees

from mpinspect.ranges.recorder import Recorder

jax = pytest.importorskip("jax")
jnp = jax.numpy

VALUES = np.array([0.0, -1.0, 1.5, 3e-8, 6e-5, 250.0, 448.0, np.nan], dtype=np.float32)
DTYPES = [
    "float32",
    "float16",
    "bfloat16",
    "complex64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
]
DTYPES += ["float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz", "float4_e2m1fn"]


def histogram(array: object, **given: object):
    recorder = Recorder()
    recorder.observe("x", array, **given)
    assert recorder.session().notes == ()
    return next(iter(recorder.session().totals().values())).histogram


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(name):
    values = VALUES[:-1] if name == "float4_e2m1fn" else VALUES
    array = jnp.array(values).astype(getattr(jnp, name))
    if name == "complex64":
        truth = np.concatenate([np.asarray(array.real), np.asarray(array.imag)]).astype(np.float64)
    else:
        truth = np.asarray(array.astype(jnp.float32)).astype(np.float64)
    assert agrees(histogram(array), truth)


def test_weak_scalars_and_transposed_views():
    assert agrees(histogram(jnp.float32(3.0)), np.array([3.0]))
    array = jnp.arange(12, dtype=jnp.float32).reshape(3, 4).T[::2]
    assert agrees(histogram(array), np.asarray(array).astype(np.float64))


class State(NamedTuple):
    momentum: object
    rest: object


@jax.tree_util.register_dataclass
@__import__("dataclasses").dataclass
class Layer:
    kernel: object
    bias: object


def test_a_tree_is_taken_apart_by_its_names():
    tree = {"a": [jnp.ones(2), None, State(jnp.ones(3), {"b": jnp.ones(1)})], "layer": Layer(jnp.ones(4), jnp.ones(5))}
    recorder = Recorder()
    recorder.observe("net", tree)
    found = {key.name: window.histogram.total for key, window in recorder.session().totals().items()}
    assert found == {
        "net.a.0": 2,
        "net.a.2.momentum": 3,
        "net.a.2.rest.b": 1,
        "net.layer.kernel": 4,
        "net.layer.bias": 5,
    }


@pytest.mark.parametrize("transform", [jax.jit, jax.grad])
def test_a_tracer_is_refused_and_the_transform_continues(transform):
    recorder = Recorder()

    def loss(x):
        recorder.observe("x", x)
        return (x * 2).sum()

    with pytest.warns(UserWarning, match=r"jax\.jit"):
        result = transform(loss)(jnp.ones(3))
    assert float(result.sum()) == 6.0
    assert not recorder.session().windows


def test_debug_callback_observes_from_inside_jit():
    recorder = Recorder()

    @jax.jit
    def step(x):
        jax.debug.callback(lambda value: recorder.observe("x", value), x)
        return x * 2

    step(jnp.array(VALUES))
    jax.effects_barrier()
    assert agrees(recorder.session().totals()["x", "weight_gradient"].histogram, VALUES.astype(np.float64))


def test_a_deleted_array_and_a_key_are_refused():
    recorder = Recorder()
    gone = jnp.ones(3)
    gone.delete()
    with pytest.warns(UserWarning, match="deleted"):
        recorder.observe("gone", gone)
    with pytest.warns(UserWarning, match="PRNGKey"):
        recorder.observe("key", jax.random.key(0))


def test_a_sparse_array_counts_its_zeros():
    from jax.experimental import sparse

    dense = jnp.array([[0.0, 2.0], [0.0, -0.5]])
    assert agrees(histogram(sparse.BCOO.fromdense(dense)), np.asarray(dense).astype(np.float64))


def test_the_loss_scale_may_be_an_array():
    assert agrees(histogram(jnp.array([256.0, 512.0]), loss_scale=jnp.float32(256.0)), np.array([1.0, 2.0]))
