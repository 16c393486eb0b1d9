"""Describe recurrent layers as cuDNN computes them, by layer and direction: one product of all steps' inputs with the input
weights, and at each step one product of the hidden state with the hidden weights.

"Optimizing Performance of Recurrent Neural Networks on GPUs" (arXiv 1604.01946, section 3) is the source of that order. For
a backward, only the requested gradients are counted: an input or initial state may require no gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mpinspect.shapes.operators.call import Call, UnknownSizesError, fresh, traffic, transposed
from mpinspect.shapes.records import Matmul, Operand

#: Gates by cudnnRNNMode_t: ReLU, tanh, LSTM, GRU (ATen/native/cudnn/RNN.cpp).
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}


@dataclass(frozen=True, slots=True)
class _Network:
    """A recurrent network's sizes; ``rows`` is the batch size of each step, which shrinks in packed sequences."""

    gates: int
    hidden: int
    projection: int
    inputs: int
    layers: int
    directions: int
    rows: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The gradients that a backward must compute."""

    input: bool
    state: bool
    weights: bool

    @classmethod
    def from_mask(cls, mask: object) -> _Wanted:
        """Read cuDNN's output_mask (input, hx, cx, weights); all gradients if the mask was not recorded."""
        if not isinstance(mask, (list, tuple)) or len(mask) < 4:
            return cls(True, True, True)
        # No product multiplies cx.
        return cls(bool(mask[0]), bool(mask[1]), bool(mask[3]))


def cudnn_rnn(call: Call) -> tuple[Matmul, ...]:
    """Return the records of _cudnn_rnn(input, weight, weight_stride0, weight_buf, hx, cx, mode, hidden_size, proj_size, ...)."""
    return tuple(_forward(call.op, _of_cudnn(call, first=6)))


def cudnn_rnn_backward(call: Call) -> tuple[Matmul, ...]:
    """Return the records of _cudnn_rnn_backward(input, weight, ..., mode at 10, ..., output_mask at 21): dgrads and wgrads."""
    return tuple(_backward(call.op, _of_cudnn(call, first=10), _Wanted.from_mask(call.value(21))))


def miopen_rnn(call: Call) -> tuple[Matmul, ...]:
    """Return the records of miopen_rnn(input, weight, weight_stride0, hx, cx, mode, hidden_size, ...): no projections."""
    batch_first, bidirectional = call.flag(8), call.flag(11)
    network = _network(
        call, call.integer(5), call.integer(6), 0, call.integer(7), batch_first, bidirectional, call.value(12)
    )
    return tuple(_forward(call.op, network))


def mkldnn_layer(call: Call) -> tuple[Matmul, ...]:
    """Return the records of mkldnn_rnn_layer(input, weight0, weight1, ...): one layer in one direction with two weights."""
    return tuple(_forward(call.op, _of_mkldnn(call)))


def mkldnn_layer_backward(call: Call) -> tuple[Matmul, ...]:
    """Return the records of mkldnn_rnn_layer_backward(input, weight1, weight2, ..., reverse at 13, ...). The operator has no
    mask; a recorder that knows which tensors require gradients appends a mask like cuDNN's to the arguments."""
    wanted = _Wanted.from_mask(call.value(23))
    return tuple(_backward(call.op, _of_mkldnn(call), wanted, reverse=call.flag(13)))


def layers(call: Call) -> tuple[Matmul, ...]:
    """Return the records of lstm, gru, rnn_tanh or rnn_relu (input, hx, params, has_biases, num_layers, ..., bidirectional,
    batch_first), or of their forms for packed sequences (data, batch_sizes, hx, params, ...). The batch sizes of packed
    sequences are values, so every step is assumed to have the largest batch.
    """
    x = call.tensor(0)
    packed = len(x.shape) == 2 and call.optional(1) is not None and len(call.tensor(1).shape) == 1
    shift = int(packed)
    states, weights = call.tensors(1 + shift) or [call.tensor(1 + shift)], call.tensors(2 + shift)
    if len(weights) < 2 or not states:
        raise UnknownSizesError
    projection, gates_hidden = weights[1].shape[-1], weights[0].shape[0]
    cell = _cell_size(call.op, gates_hidden)
    if projection == cell:
        projection = 0
    if packed:
        most = next(iter(states[0].shape[-2:-1]), 1)
        rows = (most,) * call.tensor(1).shape[0]
    else:
        rows = _rows(x, call.flag(8))
    gates, count, bidirectional = gates_hidden // cell, call.integer(4 + shift), call.flag(7 + shift)
    network = _Network(gates, cell, projection, x.shape[-1], count, 1 + bidirectional, rows, x.dtype)
    return tuple(_forward(call.op, network))


#: By name without the namespace.
FAMILY: dict[str, Callable[[Call], tuple[Matmul, ...]]] = {
    "_cudnn_rnn": cudnn_rnn,
    "_cudnn_rnn_backward": cudnn_rnn_backward,
    "miopen_rnn": miopen_rnn,
    "mkldnn_rnn_layer": mkldnn_layer,
    "mkldnn_rnn_layer_backward": mkldnn_layer_backward,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), layers),
}


def _of_cudnn(call: Call, first: int) -> _Network:
    mode, hidden, projection, count = (call.integer(first + place) for place in range(4))
    batch_first, bidirectional = call.flag(first + 4), call.flag(first + 7)
    return _network(call, mode, hidden, projection, count, batch_first, bidirectional, call.value(first + 8))


def _of_mkldnn(call: Call) -> _Network:
    x, weight, hidden_weight = call.tensor(0), call.tensor(1, 2), call.tensor(2, 2)
    hidden = hidden_weight.shape[1]
    gates = hidden_weight.shape[0] // max(hidden, 1)
    if weight.shape[0] != hidden_weight.shape[0]:
        raise UnknownSizesError
    return _Network(gates, hidden, 0, weight.shape[1], 1, 1, _rows(x, False), x.dtype)


def _network(
    call: Call,
    mode: int,
    hidden: int,
    projection: int,
    count: int,
    batch_first: bool,
    bidirectional: bool,
    batch_sizes: object,
) -> _Network:
    x = call.tensor(0)
    if mode not in _GATES or not x.shape:
        raise UnknownSizesError
    if isinstance(batch_sizes, (list, tuple)) and batch_sizes and all(isinstance(n, int) for n in batch_sizes):
        rows = tuple(batch_sizes)
    else:
        rows = _rows(x, batch_first)
    return _Network(_GATES[mode], hidden, projection, x.shape[-1], count, 1 + bidirectional, rows, x.dtype)


def _rows(x: Operand, batch_first: bool) -> tuple[int, ...]:
    if len(x.shape) == 2:
        return (1,) * x.shape[0]
    if len(x.shape) != 3:
        raise UnknownSizesError
    steps, batch = x.shape[:2]
    if batch_first:
        steps, batch = batch, steps
    return (batch,) * steps


def _cell_size(op: str, gates_hidden: int) -> int:
    gates = {"aten::lstm": 4, "aten::gru": 3}.get(op, 1)
    if not gates_hidden or gates_hidden % gates:
        raise UnknownSizesError
    return gates_hidden // gates


def _forward(op: str, net: _Network) -> Iterator[Matmul]:
    width, state = net.gates * net.hidden, net.projection or net.hidden
    for inputs, place in _layers(net, state):
        yield _product(op, net, "forward", (sum(net.rows), width, inputs), f"weight_ih_{place}")
        for rows, steps in Counter(net.rows).items():
            yield _product(op, net, "forward", (rows, width, state), f"weight_hh_{place}", steps)
            if net.projection:
                yield _product(op, net, "forward", (rows, state, net.hidden), f"weight_hr_{place}", steps)


def _backward(op: str, net: _Network, wanted: _Wanted, reverse: bool = False) -> Iterator[Matmul]:
    """Yield the state gradients one step at a time, and the gradients of inputs and weights over all steps at once.

    Args:
        reverse: whether the only direction starts at the last step.
    """
    width, state, total = net.gates * net.hidden, net.projection or net.hidden, sum(net.rows)
    for inputs, place in _layers(net, state):
        # The first step's state is hx; the reverse direction starts at the last step.
        begins = len(net.rows) - 1 if reverse or place.endswith("_reverse") else 0
        rest = Counter(net.rows)
        if not wanted.state and net.rows:
            rest[net.rows[begins]] -= 1
        for rows, steps in Counter(net.rows).items():
            if rest[rows]:
                yield _product(op, net, "dgrad", (rows, state, width), f"weight_hh_{place}", rest[rows])
            if net.projection:
                yield _product(op, net, "dgrad", (rows, net.hidden, state), f"weight_hr_{place}", steps)
        if wanted.input or not place.startswith("l0"):
            yield _product(op, net, "dgrad", (total, inputs, width), f"weight_ih_{place}")
        if wanted.weights:
            yield _product(op, net, "wgrad", (width, inputs, total), f"weight_ih_{place}")
            yield _product(op, net, "wgrad", (width, state, total), f"weight_hh_{place}")
            if net.projection:
                yield _product(op, net, "wgrad", (state, net.hidden, total), f"weight_hr_{place}")


def _layers(net: _Network, state: int) -> Iterator[tuple[int, str]]:
    """Yield the input's width and the suffix of the weights' names, as in torch.nn.LSTM, for each layer and direction."""
    for layer in range(net.layers):
        for ending in ("", "_reverse")[: net.directions]:
            yield net.inputs if layer == 0 else state * net.directions, f"l{layer}{ending}"


def _product(op: str, net: _Network, role: str, sizes: tuple[int, int, int], weight: str, calls: int = 1) -> Matmul:
    """Return a product in cuDNN's own memory: weights stored (outputs, inputs), all else row-major, everything aligned."""
    m, n, k = sizes
    a, out = fresh((m, k), net.dtype), fresh((m, n), net.dtype)
    b = fresh((k, n), net.dtype)
    if role == "forward":
        b = transposed(fresh((n, k), net.dtype))
    elif role == "wgrad":
        a = transposed(fresh((k, m), net.dtype))
    return Matmul(
        op=op,
        kind="recurrent",
        role=role,
        m=m,
        n=n,
        k=k,
        batch=1,
        dtype=net.dtype,
        flops=2 * m * n * k,
        bytes=traffic(a, b, out),
        a=a,
        b=b,
        out=out,
        parameter=weight,
        calls=calls,
    )
