"""Define every shape finding as data: its symptoms, its condition, its message and its fix.

A symptom (``causes``) is explained by the first rule that lists the symptom's word and whose condition holds; all products
that one rule explains with one size form one finding. Rules are listed root causes first, which also orders findings of
equal severity. To add a finding, add a rule here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpinspect.reporting.finding import Finding, warning_if
from mpinspect.reporting.words import and_more, number_of, percent
from mpinspect.runtime.gpus import Gpu
from mpinspect.shapes.analysis.causes import Cause, Symptom, unfused_attention
from mpinspect.shapes.analysis.group import Group, plus_one
from mpinspect.shapes.analysis.report import CHANGES_NOTHING, CallTime, ShapeRow
from mpinspect.shapes.analysis.roofline import fused_time, lowered_time, nhwc_time, size_time
from mpinspect.shapes.analysis.todays_rule import STEM_CHANNELS, has_flash_attention, is_nchw
from mpinspect.shapes.analysis.verdict import binding_sizes
from mpinspect.shapes.analysis.whole_recording import layout_copies, nothing_recorded, recording_incomplete
from mpinspect.shapes.analysis.wording import some_modules
from mpinspect.shapes.records import MatmulRecording

#: A sentence with names of a group's attributes in braces, or a function that makes the sentence from a group.
Sentence = str | Callable[[Group], str]
#: A function from a product, its time, the GPU and autocast's dtype to the call's times with the cost of one cause.
TimeOf = Callable[[ShapeRow, CallTime, Gpu, str | None], CallTime | None]


@dataclass(frozen=True)
class Rule:
    """A finding about all products that share one cause.

    Args:
        id: the finding's id.
        on: words of the symptoms that the rule explains.
        message: the problem found. Names in braces are attributes of Group.
        fix: the fix; names in braces as in ``message``.
        when: returns whether the rule explains a symptom with such a word; by default always True.
        severity: "info", "warning" or "error"; "" derives it from the gain.
        pads: the kind of size to pad, if padding helps: "vocabulary", "size", "channels", "input channels" or "head".
        time: returns a call's current time and its time once fixed; by default the roofline's estimates.
        evidence: figures in addition to those that every group has.
        least_share: the share of the FLOPs, 0..1, below which there is no finding.
        changes_nothing: whether the fix has no measurable effect; None: by the estimated gain, if known.
    """

    id: str
    on: tuple[str, ...]
    message: Sentence
    fix: Sentence
    when: Callable[[Symptom], bool] = lambda symptom: True
    severity: Sentence = ""
    pads: str = ""
    time: TimeOf = lambda row, time, gpu, autocast_dtype: time
    evidence: Callable[[Group], dict[str, Any]] = lambda group: {}
    least_share: float = 0.0
    changes_nothing: bool | None = None

    def finding(self, group: Group) -> Finding:
        """Return the finding about a group of products."""
        severity = _said(self.severity, group) or warning_if(group.is_worth_it)
        evidence = group.evidence() | self.evidence(group)
        changes_nothing = self.changes_nothing
        if changes_nothing is None:
            changes_nothing = severity == "info" and group.gain is not None and not group.is_worth_it
        if changes_nothing:
            evidence[CHANGES_NOTHING] = True
        return Finding(self.id, severity, group.layer, _said(self.message, group), evidence, _said(self.fix, group))


class _Words(dict[str, Any]):
    """A group's attributes, for the names in a sentence."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group

    def __missing__(self, name: str) -> Any:
        return getattr(self._group, name)


def _said(sentence: Sentence, group: Group) -> str:
    return sentence.format_map(_Words(group)) if isinstance(sentence, str) else sentence(group)


@dataclass(frozen=True)
class RecordingRule:
    """A finding about a whole recording.

    Args:
        id: the finding's id.
        finding: returns the finding, or None, from the recording, its products, the GPU and the time of all products in
            microseconds (None where unknown).
    """

    id: str
    finding: Callable[[MatmulRecording, Sequence[ShapeRow], Gpu, float | None], Finding | None]


# -- longer sentences ------------------------------------------------------------------------------------------------------


def _raises(group: Group) -> str:
    first, *others = group.reasons
    more = and_more(len(others), " (and {} more)")
    return f"{group.products} in {group.where} can't run on {group.gpu.name}: {first}{more}"


def _what_torch_takes(row: ShapeRow, autocast_dtype: str | None) -> str:
    a, b = row.matmul.a, row.matmul.b
    if " needs " in row.reason:
        return (
            "pad the sizes with zeros before the product and slice the result, or leave these layers in a 16-bit dtype"
        )
    if row.matmul.raises and a is not None and b is not None and a.dtype != b.dtype:
        dtypes = " and ".join(sorted((a.dtype, b.dtype)))
        fix = f"give both the same dtype (here {dtypes}): cast the input to the weight's dtype"
        if autocast_dtype:
            return fix
        return f"{fix}, or run the model under torch.autocast, which casts floating-point operands"
    return "see that the operands fit as torch's message asks"


def _float64(group: Group) -> str:
    where = "on CUDA cores"
    if all(row.verdict == "native" for row in group.rows):
        where = "on Tensor Cores, at a fraction of FP16's rate"
    return f"{group.products} in {group.where} {group.are} FP64, {where}"


#: Prefixes of operators that are in none of CUDA's autocast lists (ATen/autocast_mode.h).
NOT_AUTOCAST = ("grouped_mm", "scaled_", "int_mm", "sparse_", "weight_int", "mixed_dtypes_linear")

#: By the recording's word: why scaled_dot_product_attention takes its math path, and the fix (torch's
#: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
_MATH_PATH = {
    "dimensions": (
        "torch's fused kernels need 4 dimensions (batch, heads, length, head_dim), and these have another number",
        "give query, key and value a head dimension, as query.unsqueeze(1), and take it off the result: .squeeze(1)",
    ),
    "shapes": (
        "batch sizes or heads of query, key and value differ in a way that no fused kernel takes",
        "expand key and value to query's batch and heads (repeat_interleave for grouped heads)",
    ),
    "strides": (
        "the last dimension of query, key or value has no stride 1",
        "make the head's dimension the innermost: .contiguous() on the transposed tensor",
    ),
    "dtype": ("torch's fused kernels take 16-bit dtypes and FP32 only", "cast query, key and value"),
    "head-size": (
        "with a mask, in FP32 or with value heads of another size only the memory-efficient kernel could take these, and its "
        "heads are multiples of 8 (FP32: 4)",
        "make the head's size a multiple of 8, or replace a causal mask by is_causal=True",
    ),
    "disabled": (
        "the fused kernels that could take these are switched off",
        "allow them: torch.nn.attention.sdpa_kernel and torch.backends.cuda.enable_flash_sdp, enable_mem_efficient_sdp",
    ),
}


def _math_paths(group: Group) -> list[str]:
    return list(dict.fromkeys(row.matmul.math_path for row in group.rows if row.matmul.math_path))


def _unfused(group: Group) -> str:
    if not (paths := _math_paths(group)):
        # The first product of attention is recorded first; its result holds the scores.
        sizes = next((f" of {row.m} x {row.n}" for row in group.rows if row.role == "forward"), "")
        return (
            f"{group.products} in {group.where} look like attention in separate products: the scores{sizes} are written to "
            f"memory and read again several times; {group.gain_words}, the softmax between them not counted"
        )
    rest = ""
    if not all(row.matmul.math_path for row in group.rows):
        rest = "; others look like attention in separate products, and scaled_dot_product_attention would fuse them"
    precision = ", in FP32" * any(row.dtype == "float32" for row in group.rows)
    reasons = "; ".join(_MATH_PATH.get(path, ("torch chose it", ""))[0] for path in paths)
    return (
        f"{group.products} in {group.where} are scaled_dot_product_attention's math path, separate products{precision}: "
        f"{reasons}{rest}; {group.gain_words}, the softmax between them not counted"
    )


def _other_dtype(group: Group) -> str:
    if group.gpu.architecture in ("volta", "turing") and group.dtypes == "bfloat16":
        return "use float16 with a loss scaler on this GPU: BF16 needs Ampere or later"
    return "convert to float16"


def _has_attention(group: Group) -> bool:
    attention = {id(group.recording.matmuls[index]) for index in unfused_attention(group.recording)}
    return any(id(row.matmul) in attention for row in group.rows)


def _not_cast(group: Group) -> list[str]:
    """Return the products' operators if autocast casts none of them, even where it is enabled; else []."""
    names = list(dict.fromkeys(row.op.partition("::")[2] for row in group.rows))
    if not all(name.lstrip("_").startswith(NOT_AUTOCAST) for name in names):
        return []
    return names


def _beside_autocast(group: Group) -> str:
    found = f"{group.products} in {group.where} run{group.s} in FP32 despite {group.autocast} autocast, on CUDA cores"
    if operators := _not_cast(group):
        return f"{found}: autocast does not cast {' and '.join(operators)}; {group.gain_words}"
    attention = ""
    if _has_attention(group):
        attention = " (torch's own math attention computes in FP32 too)"
    return (
        f"{found}: autocast is off around them, or their operands are made in FP32 by an operation that autocast leaves "
        f"alone{attention}; {group.gain_words}"
    )


def _lower(group: Group) -> str:
    """Return how FP32 products next to autocast can run in 16 bits; autocast alone leaves torch's math attention in FP32."""
    ways = [f"run {group.where} under autocast too (without enabled=False) or cast the operands to {group.autocast}"]
    if _not_cast(group):
        ways = [f"cast the operands, weights included, to {group.autocast}"]
    if _has_attention(group):
        ways.insert(0, "give scaled_dot_product_attention operands of 4 dimensions, which a fused kernel takes")
    if group.gpu.multiplies("float32"):
        ways.append(f"where FP32's range is needed: {group.tf32_switch}")
    return "; ".join(ways)


def _fuse(group: Group) -> str:
    if paths := _math_paths(group):
        return "; ".join(_MATH_PATH.get(path, ("", "see why"))[1] for path in paths)
    fix = (
        'torch.nn.functional.scaled_dot_product_attention, or attn_implementation="sdpa" for a Transformers model: '
        "any number of tokens is fine in fused kernels"
    )
    if group.recording.device in ("meta", "cpu"):
        return fix
    # On a GPU the recorder sees the products of the math path, and not the call.
    return (
        f"{fix}. If the module calls it already, torch took its math path: make the head's size a multiple of 8 and drop the "
        "arguments that fused kernels don't take"
    )


def _channels_last(group: Group) -> str:
    layout = "channels_last"
    if {len(row.matmul.convolution.kernel_size) for row in group.rows if row.matmul.convolution is not None} == {3}:
        layout = "channels_last_3d"
    return f"model = model.to(memory_format=torch.{layout}), and the same for the input"


def _grow_vocabulary(group: Group) -> str:
    names = group.to_pad.names
    setting = next((name.rpartition(".")[2] for name in names if name.startswith("config.")), "")
    name = setting or some_modules(names) or "the vocabulary"
    tables = group.recording.embeddings
    tied = {row.parameter: tables[row.parameter] for row in group.rows if row.parameter in tables}
    together = "".join(f"; {head} is tied to {table}, both grow" for head, table in tied.items() if head != table)
    return (
        f"pad {name} {group.pads_to}: "
        f"model.resize_token_embeddings(pad_to_multiple_of={group.multiple}) in Transformers{together}; the extra logits must "
        f"be masked or sliced off before sampling and the loss{group.inductor}"
    )


def _stem(group: Group) -> str:
    share = f"{percent(group.share)} of the FLOPs"
    if group.share < 0.1:
        share = f"a small share ({share})"
    saved = ""
    if group.gain is not None:
        saved = f", at most {percent(group.gain.saved_fraction_high)} of the time of all (estimated)"
    return (
        f"{some_modules(row.module for row in group.rows)} reads {number_of(group.size, 'input channel')}, not a multiple of 8: "
        f"{share}{saved}, and cuDNN has kernels made for first layers; usually no change ({group.talk_words})"
    )


def _pad_stem(group: Group) -> str:
    if group.padding is None:
        return f"nothing, with today's libraries: first-layer kernels take {STEM_CHANNELS} channels"
    return (
        f"if a profile shows it: pad the input to {group.padding.to} channels with zeros (and the weight), or 8 for the "
        "rule of multiples of 8"
    )


def _speed_up_depthwise(group: Group) -> str:
    ways = []
    if any(is_nchw(row.matmul) for row in group.rows):
        ways.append("channels_last")
    if not group.recording.compiled:
        ways.append("torch.compile, which fuses them with their neighbours")
    return " and ".join(ways)


def _head_size(group: Group) -> str:
    what = "torch pads copies of query, key and value"
    if not has_flash_attention(group.gpu):
        what = (
            "torch's memory-efficient kernel does not take them, and without flash attention separate products remain"
        )
    share = percent(group.share)
    return f"heads of {group.size} in {group.where} ({share} of the FLOPs) are not a multiple of 8: {what}; {group.gain_words}"


def _mask(group: Group) -> str:
    keys = sorted({row.matmul.attention.keys for row in group.rows if row.matmul.attention is not None})
    return (
        f"the additive mask of {group.products} in {group.where} has rows of {', '.join(map(str, keys[:3]))} elements, no "
        f"multiple of 16 bytes: torch copies it padded at each call; {group.gain_words}"
    )


def _sizes_of_talk(group: Group) -> dict[str, list[int]]:
    """Return the sizes that break the talk's rule, by letter."""
    by_letter: dict[str, set[int]] = {}
    for row in group.rows:
        for letter, size in binding_sizes(row.matmul).items():
            by_letter.setdefault(letter, set()).add(size)
    return {letter: sorted(sizes) for letter, sizes in by_letter.items()}


def _talk_only(group: Group) -> str:
    which = "; ".join(f"{letter} {_some(sizes)}" for letter, sizes in _sizes_of_talk(group).items())
    return (
        f"{group.products} break{group.s} the rule of multiples of 8 and no rule of today ({which}): their strides are "
        f"aligned, rows and batches are free, no change expected on {group.gpu.name}. Libraries before cuBLAS 11 "
        "and cuDNN 7.6.3 would not have used Tensor Cores for them"
    )


def _some(sizes: list[int]) -> str:
    shown = ", ".join(f"{size:,}{plus_one(size)}" for size in sizes[:4])
    if len(sizes) > 4:
        shown += f" and {number_of(len(sizes) - 4, 'other')}"
    return shown


# -- the table -------------------------------------------------------------------------------------------------------------

RULES: tuple[Rule | RecordingRule, ...] = (
    RecordingRule("recording-incomplete", recording_incomplete),
    RecordingRule("nothing-recorded", nothing_recorded),
    Rule(
        "product-raises",
        on=("raises",),
        message=_raises,
        fix=lambda group: "; ".join(
            dict.fromkeys(_what_torch_takes(row, group.recording.autocast_dtype) for row in group.rows)
        ),
        severity="error",
        evidence=lambda group: {"reasons": group.reasons},
    ),
    Rule(
        "gpu-without-tensor-cores",
        on=("gpu-without",),
        message="{gpu.name} has no Tensor Cores: shapes make no difference there",
        fix="give another GPU if the model is meant for one: volta, turing, ampere, ada, hopper, blackwell",
        severity="info",
        changes_nothing=False,
    ),
    Rule(
        "gpu-unknown",
        on=("gpu-unknown",),
        message="the requirements of {gpu_name}'s Tensor Cores are unknown here: no verdict",
        fix="give the GPU's architecture: volta, turing, ampere, ada, hopper or blackwell",
        severity="info",
    ),
    # -- dtypes and switches: to be fixed before any padding
    Rule(
        "float32-beside-autocast",
        on=("tf32-off", "float32"),
        when=lambda symptom: symptom.recording.autocast_dtype is not None,
        message=_beside_autocast,
        fix=_lower,
        # Products outside every module and without its weights belong to the script: its data, its loss, a teacher.
        severity=lambda group: "" if any(row.module or row.parameter for row in group.rows) else "info",
        time=lowered_time,
    ),
    Rule(
        "tf32-off",
        on=("tf32-off",),
        message="{products} {are} FP32 with TF32 off, on CUDA cores; {gain_words}. Their shapes do not matter until "
        "that is fixed",
        fix="{tf32_switch}; or run the model under torch.autocast in bfloat16 or float16",
    ),
    Rule(
        "float32",
        on=("float32",),
        message="{products} {are} FP32, which {gpu.name}'s Tensor Cores do not multiply (no TF32); {gain_words} in FP16",
        fix='run the model under torch.autocast("cuda", torch.float16) with a loss scaler',
    ),
    Rule(
        "float64",
        on=("float64",),
        message=_float64,
        fix="cast to float32 before them, unless FP64 is meant; often one float64 constant or NumPy array is enough to cause it",
        severity=lambda group: warning_if(group.share >= 0.01),
    ),
    Rule(
        "dtype-not-multiplied",
        on=("dtype",),
        message="{products} {are} {dtypes}, which {gpu.name}'s Tensor Cores do not multiply; {gain_words}",
        fix=_other_dtype,
    ),
    # -- how the model computes
    Rule(
        "matrix-vector",
        on=("matrix-vector",),
        message="{products} in {where} {are} matrix-vector (or outer): bound by reading or writing the matrix once; no change "
        "expected from padding ({talk_words})",
        fix="where it is the rows that are few, give them more, if the algorithm allows: a larger batch, several tokens at once",
        severity="info",
        changes_nothing=True,
    ),
    Rule(
        "unfused-attention",
        on=("math-path", "unfused"),
        message=_unfused,
        fix=_fuse,
        time=fused_time,
        evidence=lambda group: {"math_path": paths} if (paths := _math_paths(group)) else {},
    ),
    Rule(
        "not-channels-last",
        on=("nchw",),
        message="{products} {are} in convolutions of NCHW tensors: cuDNN's Tensor Core kernels work on NHWC and convert there "
        "and back (nchwToNhwc in a profile); {gain_words}",
        fix=_channels_last,
        time=nhwc_time,
    ),
    RecordingRule("layout-copies", layout_copies),
    # -- sizes
    Rule(
        "odd-tokens",
        on=("size",),
        when=lambda symptom: symptom.is_of_tokens,
        message="{size} tokens{plus_one} make the scores' rows odd in {products} of {where}, whose attention is not fused: "
        "{binds}",
        fix="fuse the attention, where the number of tokens is free; else pad or cut the sequence to "
        "{next_multiple_of_8}{inductor}",
        time=size_time,
    ),
    Rule(
        "odd-vocabulary",
        on=("size",),
        when=lambda symptom: symptom.is_of_vocabulary,
        message="the vocabulary of {size:,} gives rows of {row_bytes} bytes, not a multiple of 16, to {products} in {where}: "
        "{binds}",
        fix=_grow_vocabulary,
        pads="vocabulary",
        time=size_time,
    ),
    Rule(
        "odd-size",
        on=("size",),
        message="a size of {size:,}{size_names} gives rows of {row_bytes} bytes, not a multiple of 16, to {products} in "
        "{where}{what_follows}: {binds}",
        fix="pad {size_name} {pads_to}{makes}{each_part}{inductor}",
        pads="size",
        time=size_time,
    ),
    Rule(
        "odd-channels",
        on=("channels",),
        message="{size:,} channels{of_a_group}{size_names} in {products} of {where} are not a multiple of 16 bytes: cuDNN pads "
        "them or takes a slower kernel; {talk_words}; {gain_words}",
        fix="pad the channels{of_a_group} {size} -> {to_pad.advised}{inductor}",
        pads="channels",
        time=size_time,
    ),
    Rule(
        "few-input-channels",
        on=("stem",),
        message=_stem,
        fix=_pad_stem,
        severity="info",
        changes_nothing=True,
        pads="input channels",
    ),
    Rule(
        "partial-blocks",
        on=("block",),
        message="{products} in {where} sum over {size:,} values, not a multiple of the {block} that share a scale: torchao and "
        "Transformer Engine refuse to quantise such rows",
        fix="pad the summed size {size} -> {to_pad.to}",
        pads="summed size",
        severity="info",
        changes_nothing=False,
    ),
    Rule(
        "misaligned-view",
        on=("view",),
        message="{products} in {where} read{s} or write{s} a view that is not aligned to 16 bytes, whatever the sizes: "
        "{reasons[0]}; {gain_words}",
        fix="slice at multiples of 8 elements, pad the parts (a head, a chunk) to such a multiple, or .contiguous() where the "
        "view is used more than once",
        evidence=lambda group: {"reasons": group.reasons[:10]},
    ),
    Rule(
        "attention-head-size",
        on=("head-dim",),
        message=_head_size,
        fix="choose a head size of {to_pad.to}, or pad the projections' output per head {size} -> {to_pad.to}",
        pads="head",
    ),
    Rule(
        "attention-mask",
        on=("attention-bias",),
        message=_mask,
        fix="is_causal=True or no mask where that is equivalent; else allocate it with rows of a multiple of 8 and slice "
        "(mask = padded[..., :keys]), which preserves the stride",
    ),
    Rule(
        "depthwise",
        on=("depthwise",),
        message="{products} in {where} {are} of depthwise convolutions: nothing to multiply for Tensor Cores, memory-bound; no "
        "change expected from any size",
        fix=_speed_up_depthwise,
        severity="info",
        changes_nothing=True,
    ),
    # -- rules that no longer matter
    Rule(
        "multiples-of-8-only",
        on=("native", "clean"),
        when=lambda symptom: symptom.row.multiples_of_8 is False,
        message=_talk_only,
        fix="nothing, with today's libraries; for older ones make batch (and tokens) a multiple of 8",
        severity="info",
        evidence=lambda group: {"sizes": _sizes_of_talk(group)},
        changes_nothing=True,
    ),
    Rule(
        "prefers-128-bytes",
        on=("clean",),
        when=lambda symptom: any("prefer" in remark for remark in symptom.row.remarks),
        message="{products} in {where} {are} aligned to 16 bytes and not to 128, which A100 and later prefer: full speed by the "
        "rule of 16 bytes; a few percent at most, or no change",
        fix="where a size is free to choose, take multiples of 64 (FP16, BF16), 32 (TF32), 128 (FP8, INT8)",
        severity="info",
        least_share=0.01,
        changes_nothing=True,
    ),
)

#: Every finding's id, root causes first: the order of findings with equal severity.
FINDING_IDS = tuple(rule.id for rule in RULES)
#: The rules about products, by id.
BY_ID = {rule.id: rule for rule in RULES if isinstance(rule, Rule)}


def cause_of(symptom: Symptom) -> Cause | None:
    """Return the cause that explains a symptom; None if no rule explains it."""
    for rule in BY_ID.values():
        if symptom.word in rule.on and rule.when(symptom):
            return Cause(rule.id, symptom.size, rule.pads)
    return None
