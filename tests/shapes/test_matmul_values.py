"""Values of meta tensors: models that read one are recorded exactly as with real tensors, or refused."""

import random

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mpinspect.shapes.record import values
from mpinspect.shapes.record.recording import record_matmuls


class Asks(nn.Module):
    """Multiplies a number of rows of its input, which a function of the model and its arguments returns."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows
        self.inner = nn.Linear(8, 4)
        self.register_buffer("four", torch.tensor([1, 4]))

    def forward(self, x, *args, **kwargs):
        return self.inner(x[: int(self.rows(self, x, *args, **kwargs))])


def lines(recording):
    return [(record.role, record.m, record.n, record.k, record.calls) for record in recording.matmuls]


X = torch.randn(9, 8)


def changed(tensor, change):
    change(tensor)
    return tensor


MADE = {
    "ones": lambda self, x: torch.ones(3, device=x.device).sum(),
    "zeros_like": lambda self, x: (torch.zeros_like(self.inner(x)) == 0).all() * 5,
    "new_ones": lambda self, x: self.inner(x).new_ones(4).sum(),
    "full_like": lambda self, x: torch.full_like(self.inner(x), 5)[0, 0],
    "arange": lambda self, x: torch.arange(7, device=x.device).max(),
    "tensor": lambda self, x: torch.tensor([2, 6], device=x.device)[1],
    "tensor of one": lambda self, x: torch.tensor(2.0, device=x.device) * 2,
    "new_tensor": lambda self, x: x.new_tensor([3, 5]).sum(),
    "as_tensor": lambda self, x: torch.as_tensor([[1, 2]], device=x.device).numel(),
    "tril": lambda self, x: torch.ones(3, 3, device=x.device).tril().sum(),
    "eye": lambda self, x: torch.eye(5, device=x.device).nonzero().shape[0],
    "linspace": lambda self, x: torch.linspace(0, 1, 5, device=x.device).tolist()[-1] * 3,
    "cumsum of a mask": lambda self, x: torch.ones(2, 4, dtype=torch.int64, device=x.device).cumsum(1)[:, -1].max(),
    "bool index": lambda self, x: x[torch.arange(9, device=x.device) > 4].shape[0],
    "bool index of what is computed": lambda self, x: self.inner(x)[torch.arange(9, device=x.device) > 6].shape[0],
    "masked_select": lambda self, x: self.inner(x).masked_select((torch.arange(4) > 2).to(x.device)).shape[0],
    "list index": lambda self, x: self.four[[-1, 0]][0],
    "list index of bools": lambda self, x: (
        3 if 1 in torch.arange(4, device=x.device)[[True, False, True, False]] else 6
    ),
    "unique": lambda self, x: torch.tensor([1, 2, 2, 5], device=x.device).unique().shape[0],
    "repeat_interleave": lambda self, x: x.repeat_interleave(torch.arange(9, device=x.device) % 2, 0).shape[0],
    "equal": lambda self, x: 3 if torch.equal(torch.ones(2, device=x.device), x.new_ones(2)) else 6,
    "buffer": lambda self, x: self.four[-1],
    "to the host": lambda self, x: self.four.cpu().numpy()[1],
    "in": lambda self, x: 2 if 3 in torch.arange(4, device=x.device) else 7,
    "a fill of empty": lambda self, x: changed(torch.empty(3, device=x.device), lambda one: one.fill_(2)).sum(),
    "an empty one, element by element": lambda self, x: changed(
        torch.empty(2, 2, dtype=torch.int64, device=x.device),
        lambda t: [t.__setitem__((i, j), i + 1) for i in (0, 1) for j in (0, 1)],
    ).sum(),
    "a change seen by a view": lambda self, x: changed(torch.zeros(4, device=x.device), lambda t: t[1:3].add_(2)).sum(),
    "a copy is another's": lambda self, x: changed(self.four.clone(), lambda t: t.clone().zero_())[1],
    "isfinite of what is computed": lambda self, x: 3 if self.inner(x).isfinite().all() else 6,
    "isnan of what is computed": lambda self, x: 3 if torch.isnan(self.inner(x)).any() else 6,
}


@pytest.mark.parametrize("name", MADE)
def test_a_value_that_the_model_makes_itself_is_known(name):
    meta, real = (record_matmuls(Asks(MADE[name]), X, device=device) for device in ("meta", "real"))
    assert (meta.stopped, meta.notes) == ("", ())
    assert sorted(lines(meta)) == sorted(lines(real))


def ones(like):
    return torch.ones(4, device=like.device)


UNKNOWN = {
    "computed": lambda self, x: self.inner(x).sum(),
    "random": lambda self, x: torch.rand(3, device=x.device).sum() * 0 + 3,
    "written to a view": lambda self, x: changed(ones(x), lambda t: t[:2].copy_(self.inner(x)[0, :2])).sum(),
    "written to the base of a view": lambda self, x: changed(ones(x), lambda t: t.view(2, 2).mul_(self.inner(x)[0, 0]))[3],
    "filled at random": lambda self, x: changed(ones(x), lambda t: t.uniform_()).sum(),
    "an index": lambda self, x: changed(ones(x), lambda t: t.__setitem__(1, self.inner(x)[0, 0]))[0],
    "scattered": lambda self, x: torch.zeros(4, device=x.device).scatter_(0, self.inner(x)[0].argmax()[None], 1.0)[0],
    "a router's": lambda self, x: (self.inner(x).argmax(-1) == 1).nonzero().shape[0],
    "through out=": lambda self, x: changed(ones(x), lambda t: torch.add(self.inner(x)[0], 1, out=t))[0],
    "made on the host": lambda self, x: changed(torch.ones(4), lambda t: t.mul_(self.inner(x)[0, 0].detach()))[0],
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_value_that_is_not_known_is_refused(name):
    def rows(self, x):
        with torch.no_grad():
            return UNKNOWN[name](self, x)

    recording = record_matmuls(Asks(rows), X)
    assert "that tensor is computed by the model from its weights" in recording.stopped
    assert "record a real run, with device='real', mpinspect lint --real or mpinspect run --lint" in recording.stopped


def test_required_inputs_are_named():
    def rows(self, x, mask, lengths=None):
        return self.four[1] if lengths is None and mask.all() else lengths.max()

    meta = torch.empty(2, dtype=torch.int64, device="meta")
    ones = torch.ones(2, dtype=torch.int64)
    outer = nn.Sequential(Asks(rows))
    outer.forward = lambda *args, **kwargs: outer[0](*args, **kwargs)
    stopped = record_matmuls(outer, (X, meta)).stopped
    assert "stopped in 0 at aten._local_scalar_dense.default: it reads a value" in stopped
    assert "follows from the argument 'argument 2', which was given without values; give 'argument 2'" in stopped
    stopped = record_matmuls(Asks(rows), (X, ones), {"lengths": meta}).stopped
    assert "give 'lengths' as a tensor with values, on the CPU" in stopped
    assert record_matmuls(Asks(rows), (X, ones), {"lengths": ones}).matmuls[0].m == 1
    with torch.device("meta"):
        model = Asks(rows)
    stopped = record_matmuls(model, (X, ones)).stopped
    assert (
        "follows from the buffer 'four', which has no values on the meta device; build the model on the CPU" in stopped
    )


def test_arguments_have_their_given_values():
    """Values of slices, whose twins have the same strides, and of floats, which a model may compare."""
    ids = torch.arange(24).view(4, 6)
    boxes = [{"boxes": torch.tensor([[1.0, 2.0], [3.0, 1.0]])}]

    def rows(self, x, ids, boxes):
        return ids[-1, 0] - 16 + (boxes[0]["boxes"][:, 1] > boxes[0]["boxes"][:, 0]).sum()

    recording = record_matmuls(Asks(rows), (X, ids[:, 1:5], boxes))
    assert (recording.stopped, recording.matmuls[0].m) == ("", 19 - 16 + 1)
    assert ids[-1, 0] == 18


def test_a_tensor_that_is_too_large_has_no_values(monkeypatch):
    monkeypatch.setattr(values, "MOST_BYTES", 64)
    assert record_matmuls(Asks(lambda self, x: torch.ones(16, device=x.device).sum() / 4), X).stopped == ""
    stopped = record_matmuls(Asks(lambda self, x: torch.ones(17, device=x.device).sum() / 4), X).stopped
    assert "the limit for stored values; give a smaller batch" in stopped


def test_a_model_that_reads_no_values_stores_none(monkeypatch):
    monkeypatch.setattr(values.Values, "run", None)
    assert record_matmuls(nn.Linear(8, 4), X).complete


# -- random programs: values on the meta device equal a real run's -----------------------------------------------------------


def made(rng, x):
    """Return a new tensor; half of the kinds depend only on their sizes."""
    n = rng.choice([1, 2, 4])
    return rng.choice(
        [
            lambda: torch.arange(n * 4, device=x.device).view(n, 4) * 1.0,
            lambda: torch.ones(n, 4, device=x.device),
            lambda: torch.full((4,), 3.0, device=x.device),
            lambda: torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device),
            lambda: x.new_zeros(n, 4),
            lambda: torch.zeros_like(x[:n, :4]),
            lambda: torch.empty(4, device=x.device).fill_(2),
            lambda: torch.arange(4.0),
            lambda: torch.relu(x[:n, :4] @ torch.eye(4, device=x.device)),
        ]
    )()


def written(rng, a, b):
    """A change in place of one tensor, by another."""
    rng.choice(
        [
            lambda: a.add_(1),
            lambda: a.mul_(b),
            lambda: a.copy_(b),
            lambda: a[..., 1:].zero_(),
            lambda: a.__setitem__((..., 2), b[..., 0].max()),
            lambda: a.masked_fill_(b > 1, 5.0),
            lambda: a.view(-1)[:2].add_(b.sum()),
            lambda: torch.maximum(a, b.expand_as(a), out=a),
            lambda: a.index_fill_(-1, torch.tensor([0], device=a.device), 7.0),
            lambda: a.transpose_(0, -1),
        ]
    )()


def shown(rng, a, b):
    """A view of one tensor, or a new one of two."""
    return rng.choice(
        [
            lambda: a.view(-1)[:4],
            lambda: a.t() if a.dim() == 2 else a[None],
            lambda: a[..., 1:3].detach(),
            lambda: a.expand(2, *a.shape)[0],
            lambda: a.reshape(-1, 2),
            lambda: a + b,
            lambda: torch.cat([a.flatten(), b.flatten()])[:8].view(2, 4),
            lambda: a[a > 1][:4],
            lambda: a.to(torch.int64).cumsum(-1).float(),
            lambda: torch.where(a > b, a, b).clone(),
            lambda: a.cpu().clone(),  # a GPU has no tensor that is on the CPU already
            lambda: a.chunk(2, -1)[-1],
        ]
    )()


def program(seed, answers):
    def forward(self, x):
        answers.clear()  # the second attempt starts from the beginning
        rng = random.Random(seed)
        pool = [made(rng, x) for _ in range(4)]
        with torch.no_grad():
            for _ in range(14):
                kind, a, b = rng.choice("mwwvva"), rng.choice(pool), rng.choice(pool)
                # Sizes that do not fit raise on both devices and are ignored. A missing value raises only on the meta device,
                # and ends the program; the message depends on torch's version.
                try:
                    if kind == "m":
                        pool.append(made(rng, x))
                    elif kind == "w":
                        written(rng, a, b)
                    elif kind == "v":
                        pool.append(shown(rng, a, b))
                    else:
                        answers.append(float(a.sum()))
                except (RuntimeError, IndexError) as error:
                    if isinstance(error, NotImplementedError) or "meta" in str(error):
                        raise
        answers.extend(float(one.sum()) for one in pool)
        return self.inner(x)

    model = Asks(None)
    model.forward = lambda x: forward(model, x)
    return model


def test_values_on_the_meta_device_equal_a_real_runs():
    answered = 0
    for seed in range(120):
        on_meta, real = [], []
        record_matmuls(program(seed, real), X.abs(), device="real", backward=False)
        record_matmuls(program(seed, on_meta), X.abs().to("meta"), backward=False)
        assert on_meta == real[: len(on_meta)], seed
        answered += len(on_meta)
    assert answered > 300


# -- models ----------------------------------------------------------------------------------------------------------------

IDS = torch.arange(64).view(2, 32) % 90 + 3
MASK = torch.ones_like(IDS).index_fill_(1, torch.arange(24, 32), 0)


def bart(transformers):
    config = transformers.BartConfig(
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        vocab_size=99,
    )
    return transformers.BartForConditionalGeneration(config), {"input_ids": IDS, "attention_mask": MASK, "labels": IDS}


def pegasus(transformers):
    model, inputs = bart(transformers)
    config = transformers.PegasusConfig(**{name: getattr(model.config, name) for name in SHARED}, vocab_size=99)
    return transformers.PegasusForConditionalGeneration(config), inputs


SHARED = (
    *("d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"),
    *("encoder_ffn_dim", "decoder_ffn_dim"),
)


def detr(transformers):
    backbone = transformers.ResNetConfig(
        depths=[1, 1], embedding_size=16, hidden_sizes=[16, 32], layer_type="basic", out_features=["stage2"]
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        num_queries=6,
    )
    return transformers.DetrForObjectDetection(config), {"pixel_values": torch.randn(2, 3, 64, 64)}


@pytest.mark.parametrize("make", [bart, pegasus, detr])
def test_models_that_ask_for_values_of_their_own_have_torchs_flops(make):
    model, inputs = make(pytest.importorskip("transformers"))
    model.set_attn_implementation("eager")
    recording = record_matmuls(model, (), inputs)
    assert (recording.stopped, recording.notes, recording.device) == ("", (), "meta")
    with FlopCounterMode(display=False) as counter:
        output = model(**inputs)
        tensors = [output.loss] if getattr(output, "loss", None) is not None else list(output.values())
        sum(one.sum() for one in tensors if isinstance(one, torch.Tensor) and one.requires_grad).backward()
    assert sum(record.flops * record.calls for record in recording.matmuls) == counter.get_total_flops()


def test_a_mixture_of_experts_is_refused_because_its_routing_is_computed():
    transformers = pytest.importorskip("transformers")
    config = transformers.SwitchTransformersConfig(
        d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=99, num_experts=4
    )
    model = transformers.SwitchTransformersForConditionalGeneration(config)
    stopped = record_matmuls(model, (), {"input_ids": IDS, "decoder_input_ids": IDS}).stopped
    assert "mlp.experts at aten.nonzero.default: the shape of its result depends on values" in stopped
    assert "mpinspect run --lint" in stopped
