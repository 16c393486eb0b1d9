"""Paddle's array types: its ``numpy()`` returns raw codes for bfloat16 and FP8, and crashes on sparse tensors."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import agrees

from mpinspect.ranges.recorder import Recorder

# Its import complains of a missing compiler cache.
pytestmark = pytest.mark.filterwarnings("ignore")
paddle = pytest.importorskip("paddle")

VALUES = np.array([0.0, -1.0, 1.5, 3e-8, 6e-5, 250.0, 448.0, np.nan], dtype=np.float32)
DTYPES = ["float64", "float32", "float16", "bfloat16", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"]


def histogram(array: object, **given: object):
    recorder = Recorder()
    recorder.observe("x", array, **given)
    assert recorder.session().notes == ()
    return next(iter(recorder.session().totals().values())).histogram


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(name):
    tensor = paddle.to_tensor(VALUES).astype(name)
    if name.startswith("complex"):
        truth = np.concatenate([tensor.real().numpy(), tensor.imag().numpy()]).astype(np.float64)
    else:
        truth = (tensor if name == "float64" else tensor.astype("float32")).numpy().astype(np.float64)
    assert agrees(histogram(tensor), truth)


def lookup(dtype: str):
    """Return the gradient of a sparse embedding and of an equal dense one."""
    gradients = []
    for sparse in (True, False):
        paddle.seed(0)
        table = paddle.nn.Embedding(10, 3, sparse=sparse)
        weights = paddle.to_tensor([[1.0, 0.5, 0.0], [2.0, 4.0, 8.0], [3.0, 1.0, 1.0]])
        (table(paddle.to_tensor([1, 7, 1])) * weights).sum().backward()
        gradients.append(table.weight.grad)
    return gradients


def test_rows_of_a_sparse_embedding_are_added_where_they_belong():
    rows, dense = lookup("float32")
    assert rows.is_selected_rows()
    assert dense.numpy()[1].tolist() == [4.0, 1.5, 1.0]
    assert agrees(histogram(rows), dense.numpy().astype(np.float64))


def test_sparse_tensors_do_not_crash():
    coo = paddle.sparse.sparse_coo_tensor([[0, 0, 1], [1, 1, 2]], [1.0, 5.0, 2.0], [3, 3])
    assert agrees(histogram(coo), np.array([6.0, 2.0] + 7 * [0.0]))
    csr = paddle.sparse.sparse_csr_tensor([0, 1, 2, 2], [1, 2], [1.0, 2.0], [3, 3])
    assert agrees(histogram(csr), np.array([1.0, 2.0] + 7 * [0.0]))


def test_a_tensor_without_values_is_refused():
    with pytest.warns(UserWarning, match="holds no values"):
        Recorder().observe("x", paddle.Tensor())


def test_bfloat16_is_recognised():
    recorder = Recorder()
    recorder.observe("x", paddle.to_tensor([1.0, 3.0]).astype("bfloat16"))
    window = recorder.session().totals()["x", "weight_gradient"]
    assert (window.dtypes, window.passed_through) == (("bfloat16",), "bfloat16")


def test_the_loss_scale_may_be_a_tensor():
    assert agrees(
        histogram(paddle.to_tensor([256.0, 512.0]), loss_scale=paddle.to_tensor([256.0])), np.array([1.0, 2.0])
    )
