"""record_matmuls on models whose products are known by hand: sizes, modules, parameters, roles, dtypes, notes."""

from dataclasses import dataclass

import pytest
import torch
from models import Of
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from mpinspect.runtime.gpus import named
from mpinspect.shapes.analysis import analyse_shapes
from mpinspect.shapes.record.failures import RecordingError
from mpinspect.shapes.record.recording import record_matmuls

HALF = (torch.float16, torch.bfloat16)


def lines(recording, *fields):
    fields = fields or ("module", "role", "parameter")
    return [tuple(getattr(record, field) for field in fields) for record in recording.matmuls]


def sizes(recording):
    return [(record.role, record.batch, record.m, record.n, record.k) for record in recording.matmuls]


def by_role(recording, role):
    return [record for record in recording.matmuls if record.role == role]


# -- products and their modules ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["meta", "real"])
def test_a_linear_layer_forward_dgrad_and_wgrad(device):
    model = nn.Sequential(nn.Linear(1023, 512), nn.ReLU(), nn.Linear(512, 10))
    recording = record_matmuls(model, torch.randn(64, 1023), device=device)
    assert sizes(recording) == [
        ("forward", 1, 64, 512, 1023),
        ("forward", 1, 64, 10, 512),
        ("dgrad", 1, 64, 512, 10),
        ("wgrad", 1, 10, 512, 64),
        ("wgrad", 1, 512, 1023, 64),  # the input needs no gradient: no dgrad
    ]
    assert {(record.module, record.module_type, record.parameter) for record in recording.matmuls} == {
        ("0", "Linear", "0.weight"),
        ("2", "Linear", "2.weight"),
    }
    assert recording.matmuls[0].a.strides == (1023, 1)
    assert recording.matmuls[0].b.strides == (1, 1023)
    assert recording.matmuls[2].a.strides == (10, 1)  # the gradient as a loss would hand it on, not an expanded scalar
    assert (recording.device, recording.backward, recording.notes) == ("meta" if device == "meta" else "cpu", True, ())
    assert {record.dtype for record in recording.matmuls} == {"float32"}
    assert {record.autocast for record in recording.matmuls} == {None}


def test_forward_only():
    recording = record_matmuls(nn.Linear(8, 4), torch.randn(2, 8), backward=False)
    assert sizes(recording) == [("forward", 1, 2, 4, 8)]
    assert not recording.backward


def test_an_input_that_requires_a_gradient_has_a_dgrad():
    recording = record_matmuls(nn.Linear(8, 4), torch.randn(2, 8, requires_grad=True))
    assert [record.role for record in recording.matmuls] == ["forward", "dgrad", "wgrad"]


def test_a_frozen_weight_has_no_wgrad():
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2), nn.Linear(2, 3))
    model[1].weight.requires_grad_(False)
    recording = record_matmuls(model, torch.randn(5, 8))
    assert lines(recording) == [
        ("0", "forward", "0.weight"),
        ("1", "forward", "1.weight"),
        ("2", "forward", "2.weight"),
        ("2", "dgrad", "2.weight"),
        ("2", "wgrad", "2.weight"),
        ("1", "dgrad", "1.weight"),
        ("0", "wgrad", "0.weight"),
    ]


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_functional_calls_are_seen_like_layers(dtype):
    def forward(self, x):
        return torch.einsum("bi,oi->bo", F.linear(x, self.inner.weight), self.table)

    model = Of(forward, inner=nn.Linear(8, 6, bias=False), table=nn.Parameter(torch.randn(5, 6)))
    recording = record_matmuls(model, torch.randn(3, 8), dtype=dtype)
    assert {line for line in lines(recording) if line[1] != "dgrad"} == {
        ("", "forward", "inner.weight"),
        ("", "forward", "table"),
        ("", "wgrad", "inner.weight"),
        ("", "wgrad", "table"),
    }
    assert [record.parameter for record in by_role(recording, "dgrad")] == ["table"]


def test_products_of_two_activations_have_two_dgrads():
    model = Of(lambda self, x: self.up(x) @ self.down(x).transpose(1, 2), up=nn.Linear(8, 6), down=nn.Linear(8, 6))
    recording = record_matmuls(model, torch.randn(3, 7, 8))
    own = [record for record in recording.matmuls if record.module == ""]
    assert [record.role for record in own] == ["forward", "dgrad", "dgrad"]
    assert {record.parameter for record in own} == {""}
    assert [(record.batch, record.m, record.n, record.k) for record in own] == [
        (3, 7, 7, 6),
        (3, 6, 7, 7),
        (3, 7, 6, 7),
    ]


def test_a_weight_on_the_left_is_a_weight_too():
    model = Of(lambda self, x: self.weight @ x, weight=nn.Parameter(torch.randn(5, 8)))
    recording = record_matmuls(model, torch.randn(8, 3, requires_grad=True))
    assert {(record.role, record.parameter) for record in recording.matmuls} == {
        ("forward", "weight"),
        ("wgrad", "weight"),
        ("dgrad", "weight"),
    }
    (wgrad,) = by_role(recording, "wgrad")
    assert (wgrad.m, wgrad.n, wgrad.k) == (5, 8, 3)


def test_gradients_of_square_products_are_distinguished():
    recording = record_matmuls(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(8, 8))
    assert lines(recording, "module", "role") == [
        ("0", "forward"),
        ("1", "forward"),
        ("1", "dgrad"),
        ("1", "wgrad"),
        ("0", "wgrad"),
    ]


@pytest.mark.parametrize(
    ("layer", "shape", "forward", "dgrad", "wgrad"),
    [
        (nn.Conv2d(3, 64, 7, 2, 3), (4, 3, 32, 32), (1, 1024, 64, 147), (1, 4096, 3, 3136), (1, 147, 64, 1024)),
        (nn.Conv2d(32, 32, 3, padding=1, groups=32), (2, 32, 8, 8), (32, 128, 1, 9), (32, 128, 1, 9), (32, 9, 1, 128)),
        (nn.Conv1d(8, 6, 3), (2, 8, 10), (1, 16, 6, 24), (1, 20, 8, 18), (1, 24, 6, 16)),
        (nn.ConvTranspose2d(8, 6, 2, 2), (2, 8, 5, 5), (1, 200, 6, 32), (1, 50, 8, 24), (1, 24, 8, 50)),
    ],
)
def test_convolutions(layer, shape, forward, dgrad, wgrad):
    recording = record_matmuls(layer, torch.randn(shape).requires_grad_())
    assert sizes(recording) == [("forward", *forward), ("dgrad", *dgrad), ("wgrad", *wgrad)]
    assert {record.parameter for record in recording.matmuls} == {"weight"}
    assert {record.kind for record in recording.matmuls} == {"convolution"}


def test_channels_last_is_detected():
    layer = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
    recording = record_matmuls(layer, torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last))
    assert {record.convolution.channels_last for record in recording.matmuls} == {True}


def test_equal_calls_of_a_module_are_one_record():
    model = Of(lambda self, x: self.one(self.one(self.one(x))), one=nn.Linear(4, 4))
    recording = record_matmuls(model, torch.randn(2, 4))
    assert lines(recording, "module", "role", "calls") == [
        ("one", "forward", 3),
        ("one", "dgrad", 2),
        ("one", "wgrad", 3),
    ]


def test_a_module_under_two_names_has_its_first():
    shared = nn.Linear(4, 4)
    recording = record_matmuls(nn.Sequential(shared, nn.Tanh(), shared), torch.randn(2, 4))
    assert {record.module for record in recording.matmuls} == {"0"}


def test_a_tied_weight_has_the_name_that_its_module_gives_it():
    model = Of(lambda self, x: self.head(self.embed(x)), embed=nn.Embedding(50, 8), head=nn.Linear(8, 50, bias=False))
    model.head.weight = model.embed.weight
    recording = record_matmuls(model, torch.randint(0, 50, (2, 3)))
    assert {record.parameter for record in recording.matmuls} == {"head.weight"}
    assert recording.embeddings == {"head.weight": "embed.weight"}


class Doubled(torch.autograd.Function):
    """x @ weight.T by hand."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


def test_custom_functions_are_attributed_to_the_module_that_called_them():
    inner = Of(lambda self, x: Doubled.apply(x, self.weight), weight=nn.Parameter(torch.randn(5, 8)))
    recording = record_matmuls(
        Of(lambda self, x: self.inner(self.first(x)), first=nn.Linear(4, 8), inner=inner), torch.randn(3, 4)
    )
    assert [line for line in lines(recording) if line[0] == "inner"] == [
        ("inner", "forward", "inner.weight"),
        ("inner", "dgrad", "inner.weight"),
        ("inner", "wgrad", "inner.weight"),
    ]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_recomputation_is_recorded_separately(reentrant, dtype):
    def forward(self, x):
        return checkpoint(self.inner, self.first(x), use_reentrant=reentrant).relu()

    inner = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    recording = record_matmuls(Of(forward, first=nn.Linear(5, 8), inner=inner), torch.randn(3, 5), dtype=dtype)
    own = [line for line in lines(recording, "module", "role", "recomputed", "calls") if line[0] == "inner.0"]
    assert own == [
        ("inner.0", "forward", False, 1),
        ("inner.0", "forward", True, 1),
        ("inner.0", "dgrad", False, 1),
        ("inner.0", "wgrad", False, 1),
    ]
    assert not any(record.recomputed for record in recording.matmuls if record.module == "first")
    assert {record.autocast for record in recording.matmuls} == {True if dtype else None}


def test_torch_func_inside_a_forward():
    def forward(self, x):
        return torch.func.vmap(lambda row: self.inner(row))(x)

    recording = record_matmuls(Of(forward, inner=nn.Linear(8, 4)), torch.randn(3, 5, 8))
    assert [record.role for record in recording.matmuls][:1] == ["forward"]
    assert recording.notes == ()
    assert sum(record.flops * record.calls for record in by_role(recording, "forward")) == 2 * 3 * 5 * 8 * 4


def test_a_backward_inside_the_forward():
    def forward(self, x):
        energy = self.inner(x.requires_grad_()).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force.square().sum() + energy

    recording = record_matmuls(Of(forward, inner=nn.Sequential(nn.Linear(8, 4), nn.Tanh())), torch.randn(3, 8))
    assert recording.notes == ()
    assert [record.role for record in recording.matmuls][:2] == ["forward", "dgrad"]
    assert not any(record.recomputed for record in recording.matmuls)


# -- attention -----------------------------------------------------------------------------------------------------------


def attend(mask=None, **options):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, mask, **options)

    return Of(forward)


def heads(heads=4, kv_heads=4, head_dim=16, dtype=torch.float16, length=32):
    query = torch.randn(2, heads, length, head_dim, dtype=dtype, requires_grad=True)
    return query, *(torch.randn(2, kv_heads, length, head_dim, dtype=dtype, requires_grad=True) for _ in "kv")


@pytest.mark.parametrize(
    ("mask", "arguments", "options", "backend"),
    [
        (None, {}, {}, "flash"),
        (None, {}, {"is_causal": True, "dropout_p": 0.1}, "flash"),
        (None, {"dtype": torch.float32}, {}, "efficient"),
        (torch.ones(32, 32, dtype=torch.bool), {}, {}, "efficient"),
        (torch.zeros(2, 1, 32, 32, dtype=torch.float16), {}, {}, "efficient"),
        (None, {"kv_heads": 2}, {"enable_gqa": True}, "flash"),
        (None, {"head_dim": 20}, {}, "flash"),
        (None, {"head_dim": 264}, {}, "efficient"),
    ],
)
def test_attention_is_recorded_as_on_a_gpu(mask, arguments, options, backend):
    recording = record_matmuls(attend(mask, **options), heads(**arguments))
    assert recording.notes == ()
    assert lines(recording, "kind", "role") == [("attention", "forward"), ("attention", "backward")]
    assert [record.attention.backend for record in recording.matmuls] == [backend] * 2
    forward = recording.matmuls[0]
    head_dim = arguments.get("head_dim", 16)
    assert (forward.batch, forward.m, forward.n, forward.k) == (8, 32, 32, head_dim)
    assert forward.attention.kv_heads == arguments.get("kv_heads", 4)
    assert forward.attention.is_causal == options.get("is_causal", False)
    assert (forward.attention.bias is None) == (mask is None)


@pytest.mark.parametrize(
    ("arguments", "mask"), [({"dtype": torch.float64}, None), ({"head_dim": 20}, torch.ones(32, 32, dtype=torch.bool))]
)
def test_attention_without_a_fused_kernel_is_two_products(arguments, mask):
    recording = record_matmuls(attend(mask), heads(**arguments))
    assert {record.kind for record in recording.matmuls} == {"gemm"}
    assert [record.role for record in recording.matmuls] == ["forward"] * 2 + ["dgrad"] * 4


def test_the_users_choice_of_a_kernel_counts():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for choice, backend in ((SDPBackend.EFFICIENT_ATTENTION, "efficient"), (SDPBackend.CUDNN_ATTENTION, "cudnn")):
        with sdpa_kernel(choice):
            recording = record_matmuls(attend(), heads())
        assert [record.attention.backend for record in recording.matmuls] == [backend] * len(recording.matmuls)
    with sdpa_kernel(SDPBackend.MATH):
        recording = record_matmuls(attend(), heads())
    assert {record.kind for record in recording.matmuls} == {"gemm"}


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_multihead_attention_layers(dtype):
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    recording = record_matmuls(layer, torch.randn(2, 10, 32), dtype=dtype)
    assert recording.notes == ()
    (forward,) = (record for record in recording.matmuls if record.kind == "attention" and record.role == "forward")
    assert (forward.module, forward.attention.backend) == ("self_attn", "flash" if dtype else "efficient")
    assert {"self_attn.in_proj_weight", "linear1.weight", "linear2.weight", "self_attn.out_proj.weight"} <= {
        record.parameter for record in recording.matmuls
    }
    in_eval = record_matmuls(layer.eval(), torch.randn(2, 10, 32), dtype=dtype, backward=False)
    assert "linear1.weight" in {record.parameter for record in in_eval.matmuls}


# -- recurrent layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_recurrent_layers_as_cudnn_computes_them(kind, gates, dtype):
    recording = record_matmuls(
        Of(lambda self, x: self.rnn(x)[0], rnn=kind(12, 16, batch_first=True)), torch.randn(3, 5, 12), dtype=dtype
    )
    assert recording.notes == ()
    assert lines(recording, "role", "parameter", "m", "n", "k", "calls") == [
        ("forward", "rnn.weight_ih_l0", 15, gates * 16, 12, 1),
        ("forward", "rnn.weight_hh_l0", 3, gates * 16, 16, 5),
        # Neither the input nor the initial state needs a gradient.
        ("dgrad", "rnn.weight_hh_l0", 3, 16, gates * 16, 4),
        ("wgrad", "rnn.weight_ih_l0", gates * 16, 12, 15, 1),
        ("wgrad", "rnn.weight_hh_l0", gates * 16, 16, 15, 1),
    ]
    assert {(record.kind, record.dtype) for record in recording.matmuls} == {
        ("recurrent", "float16" if dtype else "float32")
    }


def flops(recording):
    return sum(record.flops * record.calls for record in recording.matmuls)


def flops_taken_apart(model, *args):
    """FLOPs equal torch's counter on the layer's separate products, without a fused library call."""
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        model(*args).sum().backward()
    return counter.get_total_flops()


RECURRENT = {"lstm": (nn.LSTM, {}), "projected": (nn.LSTM, {"proj_size": 8}), "gru": (nn.GRU, {}), "rnn": (nn.RNN, {})}
STACKED = [(1, False), (2, False), (1, True), (3, True)]


@pytest.mark.filterwarnings("ignore:TF32 acceleration", "ignore:LSTM with projections is not supported")
@pytest.mark.parametrize(
    ("kind", "layers", "bidirectional", "device"),
    [
        (kind, *stacked, ("meta", "real")[(i + j) % 2])
        for i, kind in enumerate(RECURRENT)
        for j, stacked in enumerate(STACKED)
    ],
)
def test_a_recurrent_layer_has_only_the_requested_gradients(kind, layers, bidirectional, device):
    make, options = RECURRENT[kind]
    layer = make(12, 16, layers, bidirectional=bidirectional, **options)
    model = Of(lambda self, x, *state: self.rnn(x, *state)[0], rnn=layer)
    directions = 2 if bidirectional else 1
    states = [torch.randn(layers * directions, 3, options.get("proj_size", 16), requires_grad=True)]
    if make is nn.LSTM:
        states = [(*states, torch.randn(layers * directions, 3, 16))]
    needs_none, needs_one = torch.randn(5, 3, 12), torch.randn(5, 3, 12, requires_grad=True)
    for args in ((needs_none,), (needs_one,), (needs_none, *states), (needs_one, *states)):
        assert flops(record_matmuls(model, args, device=device)) == flops_taken_apart(model, *args)
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    frozen = record_matmuls(model, (needs_one,), device=device)
    assert by_role(frozen, "wgrad") == []
    assert flops(frozen) == flops_taken_apart(model, needs_one)
    layer.weight_hh_l0.requires_grad_(True)
    thawed = record_matmuls(model, (needs_one,), device=device)
    assert {record.parameter for record in by_role(thawed, "wgrad")} == {"rnn.weight_hh_l0"}


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(("layers", "bidirectional"), STACKED)
def test_packed_sequences_have_only_the_requested_gradients(kind, layers, bidirectional):
    model = Of(lambda self, x: self.rnn(x)[0].data, rnn=kind(12, 16, layers, bidirectional=bidirectional))
    for needs in (False, True):
        packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 4, 12), torch.tensor([5, 3, 3, 1]))
        packed = packed._replace(data=packed.data.requires_grad_(needs))
        assert flops(record_matmuls(model, packed)) == flops_taken_apart(model, packed)


def test_packed_sequences():
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(4, 3, 8), torch.tensor([4, 2, 1]))
    recording = record_matmuls(Of(lambda self, x: self.rnn(x)[0].data, rnn=nn.LSTM(8, 16)), packed)
    assert recording.notes == ()
    assert lines(recording, "m", "n", "k", "calls")[:4] == [
        (7, 64, 8, 1),
        (3, 64, 16, 1),
        (2, 64, 16, 1),
        (1, 64, 16, 2),
    ]


def test_cells():
    def forward(self, x):
        state = (x.new_zeros(3, 16), x.new_zeros(3, 16))
        for step in range(5):
            state = self.cell(x[step], state)
        return state[0]

    recording = record_matmuls(Of(forward, cell=nn.LSTMCell(8, 16)), torch.randn(5, 3, 8))
    assert {record.kind for record in recording.matmuls} == {"recurrent"}
    assert {line for line in lines(recording, "role", "m", "n", "k", "calls") if line[0] == "forward"} == {
        ("forward", 3, 64, 8, 5),
        ("forward", 3, 64, 16, 5),
    }


# -- dtypes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("device", ["meta", "real"])
def test_autocast_casts_and_the_models_own_regions_do_not(dtype, device):
    def forward(self, x):
        y = self.first(x)
        with torch.autocast("cuda", enabled=False):
            y = self.second(y.float())
            with torch.autocast("cuda", dtype=dtype):
                y = self.third(y)
        return y

    model = Of(forward, first=nn.Linear(8, 8), second=nn.Linear(8, 8), third=nn.Linear(8, 8))
    recording = record_matmuls(model, torch.randn(4, 8), dtype=dtype, device=device)
    name = str(dtype).removeprefix("torch.")
    found = {(record.module, record.dtype, record.autocast) for record in recording.matmuls}
    assert found == {("first", name, True), ("second", "float32", False), ("third", name, True)}
    assert recording.autocast_dtype == name


def test_float64_is_not_cast():
    recording = record_matmuls(nn.Linear(8, 4).double(), torch.randn(2, 8).double(), dtype=torch.float16)
    assert {(record.dtype, record.autocast) for record in recording.matmuls} == {("float64", False)}


def test_a_half_models_products_are_half_without_autocast():
    recording = record_matmuls(nn.Linear(8, 4).bfloat16(), torch.randn(2, 8).bfloat16())
    assert {(record.dtype, record.autocast) for record in recording.matmuls} == {("bfloat16", None)}
    assert recording.autocast_dtype is None


def test_autocast_around_the_caller_has_no_effect():
    with torch.autocast("cpu", torch.bfloat16):
        recording = record_matmuls(nn.Linear(8, 4), torch.randn(2, 8), device="real")
        assert torch.is_autocast_enabled("cpu")
    assert {record.dtype for record in recording.matmuls} == {"float32"}


def test_custom_functions_with_autocasts_decorators():
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad @ weight.t(), x.t() @ grad

    model = Of(lambda self, x: Product.apply(x, self.weight), weight=nn.Parameter(torch.randn(8, 4)))
    recording = record_matmuls(model, torch.randn(3, 8), dtype=torch.float16)
    assert {record.dtype for record in recording.matmuls} == {"float16"}
    assert recording.notes == ()


def test_casts_are_counted_as_copies():
    recording = record_matmuls(nn.Linear(8, 4, bias=False), torch.randn(2, 8), dtype=torch.float16, backward=False)
    (copy,) = recording.copies
    assert (copy.module, copy.kind, copy.calls) == ("", "dtype", 2)
    assert copy.bytes == (32 + 16) * (4 + 2)


def test_layout_changes_are_counted_as_copies():
    model = Of(lambda self, x: x.transpose(1, 2).contiguous())
    recording = record_matmuls(model, torch.randn(2, 3, 4), backward=False)
    (copy,) = recording.copies
    assert (copy.kind, copy.bytes, copy.calls) == ("layout", 2 * 24 * 4, 1)


def test_tf32_settings_are_read():
    assert record_matmuls(nn.Linear(2, 2), torch.randn(1, 2)).tf32["matmul"] is False
    settings = torch.backends.cuda.matmul
    # torch 2.6 has only the older API.
    name, value = ("fp32_precision", "tf32") if hasattr(settings, "fp32_precision") else ("allow_tf32", True)
    before = getattr(settings, name)
    setattr(settings, name, value)
    try:
        assert record_matmuls(nn.Linear(2, 2), torch.randn(1, 2)).tf32["matmul"] is True
    finally:
        setattr(settings, name, before)


# -- inputs and outputs --------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    x: torch.Tensor
    name: str = "a"


def test_tensors_in_any_nesting():
    def forward(self, first, *, batch, more):
        return {"deep": [self.inner(first[0] + batch.x + more["x"])], "none": None}

    model = Of(forward, inner=nn.Linear(8, 4))
    batch = Batch(torch.randn(2, 8))
    recording = record_matmuls(model, ([torch.randn(2, 8)],), {"batch": batch, "more": {"x": torch.randn(2, 8)}})
    assert [record.role for record in recording.matmuls] == ["forward", "wgrad"]
    assert not batch.x.is_meta


def test_a_loss_in_the_output_is_where_the_backward_starts():
    def forward(self, x):
        return {"loss": self.used(x).sum(), "logits": self.unused(x)}

    recording = record_matmuls(Of(forward, used=nn.Linear(8, 4), unused=nn.Linear(8, 4)), torch.randn(2, 8))
    assert [record.module for record in by_role(recording, "wgrad")] == ["used"]


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(8, 4).requires_grad_(False),
        Of(lambda self, x: self.inner(x).detach(), inner=nn.Linear(8, 4)),
        Of(torch.no_grad()(lambda self, x: self.inner(x)), inner=nn.Linear(8, 4)),
        Of(torch.inference_mode()(lambda self, x: self.inner(x)), inner=nn.Linear(8, 4)),
        Of(lambda self, x: str(self.inner(x).shape), inner=nn.Linear(8, 4)),
    ],
)
def test_outputs_without_a_gradient_are_a_note(model):
    recording = record_matmuls(model, torch.randn(2, 8))
    assert [record.role for record in recording.matmuls] == ["forward"]
    assert not recording.backward
    assert "requires a gradient" in recording.notes[0]


def test_products_are_recorded_in_inference_mode():
    @torch.inference_mode()
    def forward(self, x):
        return F.scaled_dot_product_attention(*self.qkv(self.conv(x).flatten(2).mT).unflatten(-1, (3, 1, 8)).unbind(-3))

    model = Of(forward, conv=nn.Conv2d(3, 8, 3), qkv=nn.Linear(8, 24))
    recording = record_matmuls(model, torch.randn(2, 3, 8, 8), dtype=torch.float16)
    assert [record.kind for record in recording.matmuls] == ["convolution", "gemm", "attention"]


def test_grad_mode_of_the_caller_does_not_matter():
    with torch.no_grad():
        assert record_matmuls(nn.Linear(8, 4), torch.randn(2, 8)).backward
    with torch.inference_mode():
        assert record_matmuls(nn.Linear(8, 4), torch.randn(2, 8)).backward


def test_a_model_that_is_on_meta_already():
    with torch.device("meta"):
        model, x = nn.Linear(8, 4), torch.randn(2, 8)
    assert len(record_matmuls(model, x).matmuls) == 2
    assert model.weight.grad is None


def test_sliced_inputs_preserve_their_offset_and_strides():
    x = torch.randn(4, 33)[:, 1:]
    recording = record_matmuls(nn.Linear(32, 8), x)
    assert recording.matmuls[0].a.strides == (33, 1)
    assert recording.matmuls[0].a.offset == 1


def test_in_place_models_run():
    model = nn.Sequential(
        nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True)
    )
    for device in ("meta", "real"):
        recording = record_matmuls(model, torch.randn(4, 8), device=device)
        assert len(recording.matmuls) == 5
        assert recording.notes == ()


def test_tensors_other_than_parameters_and_buffers_work():
    """A plain attribute, a constant made in the forward, and an index remain on their device."""
    model = Of(lambda self, x: self.inner(x * self.scale)[torch.arange(2)] + torch.ones(4), inner=nn.Linear(8, 4))
    object.__setattr__(model, "scale", torch.randn(8))
    assert record_matmuls(model, torch.randn(3, 8)).notes == ()


# -- what cannot be run on meta tensors ----------------------------------------------------------------------------------


def finding(recording):
    """Return the lint's finding on a recording that stopped."""
    return next(one for one in analyse_shapes(recording, named("hopper")).findings if one.id == "recording-incomplete")


def advice(recording) -> str:
    return finding(recording).fix


def test_a_value_read_on_the_host_ends_the_recording_with_a_sentence():
    def forward(self, x):
        y = self.first(x)
        return self.second(y) if y.sum().item() > 0 else y

    model = Of(forward, first=nn.Linear(8, 8), second=nn.Linear(8, 8))
    outer = Of(lambda self, x: self.inner(x), inner=model)
    recording = record_matmuls(outer, torch.ones(2, 8))
    assert [record.module for record in recording.matmuls] == ["inner.first"]
    assert recording.notes == ()
    assert "stopped in inner at" in recording.stopped
    assert "device='real'" in advice(recording)
    assert not recording.complete
    real = record_matmuls(outer, torch.ones(2, 8), device="real")
    assert (real.notes, real.complete, real.stopped) == ((), True, "")


@pytest.mark.parametrize(
    ("message", "end"), [("ends here.", "ends here"), ("goes on ...", "goes on"), ("", "RuntimeError")]
)
def test_sentences_have_one_full_stop(message, end):
    def forward(self, x):
        raise RuntimeError(message) if self.inner(x).shape[0] else x

    recording = record_matmuls(Of(forward, inner=nn.Linear(8, 8)), torch.ones(2, 8))
    assert recording.stopped.endswith(end)
    assert f"{end}; every figure here" in finding(recording).message


def test_integers_have_values_where_the_forward_needs_them():
    def forward(self, x, lengths):
        return self.inner(x[:, : int(lengths.to(x.device).max())])

    recording = record_matmuls(Of(forward, inner=nn.Linear(8, 4)), (torch.randn(3, 9, 8), torch.tensor([2, 5, 3])))
    assert recording.notes == ()
    assert recording.matmuls[0].m == 3 * 5


def test_small_buffers_have_values_where_the_forward_needs_them():
    model = Of(lambda self, x: self.inner(x) * self.scale.item(), inner=nn.Linear(8, 4))
    model.register_buffer("scale", torch.tensor(2.0), persistent=False)
    assert record_matmuls(model, torch.randn(3, 8)).notes == ()


def test_shapes_that_depend_on_values():
    def forward(self, x):
        y = self.first(x)
        return self.second(y[y[:, 0] > 0])

    recording = record_matmuls(Of(forward, first=nn.Linear(8, 8), second=nn.Linear(8, 8)), torch.randn(3, 8))
    assert [record.module for record in recording.matmuls] == ["first"]
    assert "depends on values" in recording.stopped
    assert "computed by the model" in recording.stopped


def test_numpy_in_a_forward():
    model = Of(lambda self, x: torch.from_numpy(self.inner(x).detach().numpy()), inner=nn.Linear(8, 4))
    recording = record_matmuls(model, torch.randn(3, 8))
    assert len(recording.matmuls) == 1
    assert "device='real'" in advice(recording)


def test_an_error_in_the_backward_is_reported():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("no gradient today")

    recording = record_matmuls(nn.Sequential(nn.Linear(8, 4), Of(lambda self, x: Fails.apply(x))), torch.randn(3, 8))
    assert [record.role for record in recording.matmuls] == ["forward"]
    assert "backward stopped" in recording.stopped
    assert "no gradient today" in recording.stopped


def test_wrong_arguments_are_an_error():
    with pytest.raises(RecordingError, match=r"missing 1 required positional argument.*check args and kwargs"):
        record_matmuls(nn.Linear(8, 4))
    with pytest.raises(RecordingError, match="must be"):
        record_matmuls(Of(lambda self, x: (_ for _ in ()).throw(TypeError("x must be a list"))), torch.randn(2))
    assert issubclass(RecordingError, ValueError)


def test_wrong_options_are_an_error():
    with pytest.raises(RecordingError, match=r"'meta' .* or 'real'"):
        record_matmuls(nn.Linear(8, 4), torch.randn(2, 8), device="cuda")
    with pytest.raises(RecordingError, match="float16 or bfloat16"):
        record_matmuls(nn.Linear(8, 4), torch.randn(2, 8), dtype=torch.int8)
    with pytest.raises(RecordingError, match=r"not a torch\.nn\.Module"):
        record_matmuls(lambda x: x, torch.randn(2, 8))


def test_lazy_modules_are_an_error_before_their_first_batch():
    with pytest.raises(RecordingError, match="run one batch"):
        record_matmuls(nn.LazyLinear(4), torch.randn(2, 8))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_do_not_crash():
    def forward(self, x):
        parts = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)])
        return self.inner(x) + F.linear(parts, torch.ones(4, 8)).to_padded_tensor(0.0).sum()

    recording = record_matmuls(Of(forward, inner=nn.Linear(8, 4)), torch.randn(2, 8), device="real")
    assert "inner" in {record.module for record in recording.matmuls}


def test_complex_products_are_recorded():
    model = Of(lambda self, x: (x @ self.weight).abs(), weight=nn.Parameter(torch.randn(8, 4, dtype=torch.complex64)))
    recording = record_matmuls(model, torch.randn(2, 8, dtype=torch.complex64), dtype=torch.float16)
    assert {(record.dtype, record.autocast) for record in recording.matmuls} == {("complex64", False)}


# -- wrappers, sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_models_run_eagerly_under_their_own_names():
    model = nn.Sequential(nn.Linear(8, 4), torch.compile(nn.Linear(4, 2)))
    recording = record_matmuls(torch.compile(model), torch.randn(3, 8))
    assert recording.compiled
    assert {(record.module, record.parameter) for record in recording.matmuls} == {("0", "0.weight"), ("1", "1.weight")}
    assert not record_matmuls(nn.Linear(8, 4), torch.randn(3, 8)).compiled


def test_data_parallel_is_ignored_with_a_note():
    recording = record_matmuls(nn.DataParallel(nn.Linear(8, 4)), torch.randn(3, 8))
    assert {record.parameter for record in recording.matmuls} == {"weight"}
    assert "DataParallel" in recording.notes[0]


def test_a_setting_names_a_size_only_if_the_size_follows(capsys):
    class Model(nn.Module):
        def __init__(self, config):
            super().__init__()
            print("a constructor's message")
            self.config = config
            self.embed = nn.Embedding(50, config["width"])
            self.out = nn.Linear(config["width"], config["classes"] + int(torch.randint(0, 1, (), device="cpu")))

        def forward(self, x):
            return self.out(self.embed(x))

    config = {"classes": 30522, "length": 30522, "width": 9, "layers": 9, "pad_token_id": 9, "flag": True}
    built = Model(config)
    capsys.readouterr()
    recording = record_matmuls(built, torch.randint(0, 50, (2, 3)))
    sizes = recording.sizes
    assert capsys.readouterr() == ("", "")
    assert sizes["out"][30522] == ("config.classes", "out.out_features")
    assert sizes["out"][9] == ("config.width", "out.in_features")
    assert sizes["embed"] == {9: ("config.width", "embed.embedding_dim"), 50: ("embed.num_embeddings",)}
    assert recording.size_values == {9, 50, 30522}
    # Settings do not name sizes of a model that was changed after its construction.
    built.embed = nn.Embedding(51, 9)
    assert record_matmuls(built, torch.randint(0, 50, (2, 3))).sizes["out"][9] == ("out.in_features",)


def test_lengths_are_read_where_sequences_are_packed():
    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]

    model = Of(forward, rnn=nn.GRU(8, 16, batch_first=True))
    recording = record_matmuls(model, (torch.randn(3, 9, 8), torch.tensor([9, 4, 7])))
    assert recording.notes == ()
    assert lines(recording, "m", "k", "calls")[:4] == [(20, 8, 1), (3, 16, 4), (2, 16, 3), (1, 16, 2)]


def test_fp8_products_are_recorded_and_their_missing_backward_is_a_note():
    def forward(self, x):
        one, eighth = torch.ones((), device=x.device), torch.float8_e4m3fn
        y = torch._scaled_mm(x.to(eighth), self.weight.to(eighth).t(), one, one, out_dtype=torch.bfloat16)
        return self.inner(y.float())

    model = Of(forward, inner=nn.Linear(32, 16), weight=nn.Parameter(torch.randn(32, 64)))
    recording = record_matmuls(model, torch.randn(16, 64))
    record = recording.matmuls[0]
    assert (record.op, record.dtype, record.parameter) == ("aten::_scaled_mm", "float8_e4m3fn", "weight")
    assert "_scaled_mm is not implemented" in recording.stopped


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_jagged_tensors_run_on_their_values():
    parts = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged)
    recording = record_matmuls(nn.Linear(8, 4), parts, device="real")
    assert sizes(recording) == [("forward", 1, 5, 4, 8), ("wgrad", 1, 4, 8, 5)]
    assert "device='real'" in advice(record_matmuls(nn.Linear(8, 4), parts))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_scripted_modules_are_a_note():
    model = nn.Sequential(torch.jit.script(nn.Linear(8, 8)), nn.Linear(8, 4))
    recording = record_matmuls(model, torch.randn(2, 8), device="real")
    assert "TorchScript" in recording.notes[0]
    assert "1.weight" in {record.parameter for record in recording.matmuls}
    assert model[0].weight.grad is None


# -- products that torch refuses, attention that it does not fuse ----------------------------------------------------------


@pytest.mark.parametrize("given", [torch.float16, torch.int64])
def test_mixed_dtypes_are_refused_as_on_a_device(given):
    model = nn.Linear(64, 32)
    with pytest.raises(RuntimeError, match="mat1 and mat2 must have the same dtype"):
        model(torch.zeros(8, 64, dtype=given))
    forward = record_matmuls(model, torch.zeros(8, 64, dtype=given), backward=False).matmuls[0]
    name = str(given).removeprefix("torch.")
    assert forward.raises == f"mat1 and mat2 must have the same dtype, but got {name} and float32"


@pytest.mark.parametrize("dtype", HALF)
def test_autocast_resolves_mixed_dtypes(dtype):
    recording = record_matmuls(nn.Linear(64, 32), torch.zeros(8, 64, dtype=torch.float16), dtype=dtype)
    assert {record.raises for record in recording.matmuls} == {""}


def scaled_product(k, n):
    def forward(self, x):
        one = torch.ones((), device=x.device)
        weight = self.weight.to(torch.float8_e4m3fn).t()
        return self.last(
            torch._scaled_mm(x.to(torch.float8_e4m3fn), weight, one, one, out_dtype=torch.bfloat16).float()
        )

    model = Of(forward, last=nn.Linear(n, 8))
    model.weight = nn.Parameter(torch.empty(n, k))
    return model


@pytest.mark.parametrize(("k", "n", "refused"), [(1000, 512, True), (1024, 520, True), (1024, 512, False)])
def test_products_that_a_meta_kernel_refuses_are_recorded_and_the_run_continues(k, n, refused):
    recording = record_matmuls(scaled_product(k, n), torch.empty(64, k), backward=False)
    assert lines(recording, "op", "m", "n", "k", "dtype") == [
        ("aten::_scaled_mm", 64, n, k, "float8_e4m3fn"),
        ("aten::addmm", 64, 8, n, "float32"),
    ]
    assert [bool(record.raises) for record in recording.matmuls] == [refused, False]
    # torch 2.6 misspells "divisible".
    assert ("ble by 16" in recording.matmuls[0].raises) == refused
    assert recording.matmuls[0].out.dtype == "bfloat16"


def test_sizes_that_do_not_fit_stop_the_run_as_before():
    with pytest.raises(RecordingError, match=r"must have same reduction dim|shapes cannot be multiplied"):
        record_matmuls(nn.Linear(64, 32), torch.zeros(8, 63))


@pytest.mark.parametrize("device", ["meta", "real"])
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_attention_of_three_dimensions_takes_the_math_path(device, dtype):
    model = Of(lambda self, x: F.scaled_dot_product_attention(self.q(x), x, x), q=nn.Linear(16, 16))
    recording = record_matmuls(model, torch.randn(4, 8, 16, requires_grad=True), dtype=dtype, device=device)
    paths = {(record.op, record.role): record.math_path for record in recording.matmuls}
    # Newer versions of torch have a fused kernel for it on a CPU, but not on CUDA.
    attends = [op == "aten::bmm" or "flash_attention_for_cpu" in op for op, _ in paths]
    assert list(paths.values()) == ["dimensions" if one else "" for one in attends]
    assert any(attends)
    assert len(paths) > 3


@pytest.mark.parametrize(
    ("shapes", "mask", "why"),
    [(((2, 4, 8, 12), (2, 4, 8, 12)), True, "head-size"), (((2, 4, 8, 16), (1, 4, 8, 16)), False, "shapes")],
)
def test_why_the_math_path_is_taken(shapes, mask, why):
    def forward(self, x):
        q, k = (torch.empty(shape, dtype=torch.float16, device=x.device) for shape in shapes)
        bias = torch.empty(8, 8, dtype=torch.float16, device=x.device) if mask else None
        return F.scaled_dot_product_attention(q, k, k, bias)

    recording = record_matmuls(Of(forward), torch.empty(1), backward=False)
    assert {record.math_path for record in recording.matmuls} == {why}


def test_math_attention_that_is_asked_for_is_disabled():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def forward(self, x):
        with sdpa_kernel([SDPBackend.MATH]):
            return F.scaled_dot_product_attention(x, x, x)

    recording = record_matmuls(Of(forward), torch.empty(2, 4, 8, 16, dtype=torch.float16), backward=False)
    assert {record.math_path for record in recording.matmuls} == {"disabled"}
