"""Recordings of TensorFlow's and Keras' array types, compared with TensorFlow's casts."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import agrees

from mpinspect.ranges.recorder import Recorder

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

VALUES = np.array([0.0, -1.0, 1.5, 3e-8, 6e-5, 250.0, np.inf, np.nan], dtype=np.float32)
DTYPES = ["float64", "float32", "float16", "bfloat16", "complex64", "complex128"]
DTYPES += ["float8_e5m2", "float8_e4m3fn"]


def histogram(array: object, **given: object):
    recorder = Recorder()
    recorder.observe("x", array, **given)
    assert recorder.session().notes == ()
    return next(iter(recorder.session().totals().values())).histogram


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(name):
    dtype = getattr(tf.dtypes, name, None) or getattr(tf.dtypes.experimental, name)
    tensor = tf.cast(tf.constant(VALUES), dtype)
    if dtype.is_complex:
        truth = np.concatenate([tf.math.real(tensor).numpy(), tf.math.imag(tensor).numpy()]).astype(np.float64)
    else:
        truth = tf.cast(tensor, tf.float32).numpy().astype(np.float64)
        truth = tensor.numpy() if name == "float64" else truth
    assert agrees(histogram(tensor), truth)


@pytest.mark.parametrize("make", [tf.Variable, keras.Variable])
def test_variables(make):
    assert agrees(histogram(make(VALUES[:4])), VALUES[:4].astype(np.float64))


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16])
def test_rows_of_indexed_slices_are_added_where_they_belong(dtype):
    values = tf.cast(tf.constant([[1.0, 2.0], [3.0, 0.5], [0.0, 8.0]]), dtype)
    slices = tf.IndexedSlices(values, tf.constant([4, 1, 4]), tf.constant([10, 2], tf.int64))
    dense = tf.cast(tf.convert_to_tensor(slices), tf.float64).numpy()
    assert dense[4].tolist() == [1.0, 10.0]
    assert agrees(histogram(slices), dense)


def test_the_gradient_of_a_lookup():
    table = tf.Variable(tf.random.stateless_normal([50, 8], [1, 2]))
    rows = tf.constant([3, 3, 7, 49, 0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, rows) ** 2)
    gradient = tape.gradient(loss, table)
    assert isinstance(gradient, tf.IndexedSlices)
    assert agrees(histogram(gradient), tf.convert_to_tensor(gradient).numpy().astype(np.float64))


def test_sparse_and_ragged():
    sparse = tf.SparseTensor([[0, 1], [2, 2]], tf.constant([1.0, -4.0]), [3, 3])
    assert agrees(histogram(sparse), tf.sparse.to_dense(sparse).numpy().astype(np.float64))
    assert agrees(histogram(tf.ragged.constant([[1.0, 2.0], [], [4.0]])), np.array([1.0, 2.0, 4.0]))


def test_a_tensor_inside_a_graph_is_refused_and_the_graph_continues():
    recorder = Recorder()

    @tf.function
    def step(x):
        recorder.observe("x", x)
        return 2 * x

    with pytest.warns(UserWarning, match=r"tf\.function"):
        assert step(tf.constant([1.0, 2.0])).numpy().tolist() == [2.0, 4.0]
    assert not recorder.session().windows


def test_py_function_observes_from_inside_a_graph():
    recorder = Recorder()

    @tf.function
    def step(x):
        tf.py_function(lambda value: recorder.observe("x", value), [x], [])
        return 2 * x

    step(tf.constant(VALUES))
    assert agrees(recorder.session().totals()["x", "weight_gradient"].histogram, VALUES.astype(np.float64))


def test_the_loss_scale_may_be_the_optimizers_variable():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=256.0)
    optimizer.build([keras.Variable(np.ones(3, np.float32))])
    found = histogram(tf.constant([256.0, 512.0]), loss_scale=optimizer.dynamic_scale)
    assert agrees(found, np.array([1.0, 2.0]))


def test_step_may_be_the_optimizers_iterations():
    recorder = Recorder()
    iterations = tf.Variable(0, dtype=tf.int64)
    for _ in range(3):
        recorder.observe("x", tf.constant([1.0]), step=iterations)
        iterations.assign_add(1)
    assert [window.first_step for window in recorder.session().windows] == [0, 1, 2]
