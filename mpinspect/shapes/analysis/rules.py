"""Every shape finding, as data: what it is about, when it holds, what it says and what mends it.

The first rule that takes a symptom's word (``causes``) and agrees explains it; all products that one rule explains with one
size are one finding. Order: root causes first, which is that of equal severities. A new finding is a new rule here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpinspect.reporting.finding import Finding
from mpinspect.reporting.words import percent
from mpinspect.runtime.gpus import Gpu
from mpinspect.shapes.analysis.alignment import PREFERRED_ALIGNMENT, up_to
from mpinspect.shapes.analysis.causes import Cause, Symptom
from mpinspect.shapes.analysis.group import Group
from mpinspect.shapes.analysis.report import CallTime, ShapeRow
from mpinspect.shapes.analysis.roofline import fused_time, lowered_time, nhwc_time, size_time
from mpinspect.shapes.analysis.todays_rule import has_flash_attention
from mpinspect.shapes.analysis.verdict import binding_sizes
from mpinspect.shapes.analysis.whole_recording import layout_copies, nothing_recorded, recording_incomplete
from mpinspect.shapes.analysis.wording import count, dtype_name, some_modules
from mpinspect.shapes.records import MatmulRecording

#: A sentence, or what makes it of a group.
Sentence = str | Callable[[Group], str]
#: From a product, its time, the GPU and autocast's dtype to the time as far as a cause is to blame.
TimeOf = Callable[[ShapeRow, CallTime, Gpu, str | None], CallTime | None]


@dataclass(frozen=True)
class Rule:
    """A finding about products that share a cause.

    Args:
        id: the finding's.
        on: words of the symptoms that it may explain.
        message: what was found.
        fix: what to do.
        when: whether it explains such a symptom; always, unless given.
        severity: "info", "warning", "error", or a function of the group; "" follows from the gain.
        pads: what its size is, where padding mends it: "vocabulary", "size", "channels", "input channels" or "head".
        time: what a call takes before and after the mending, where the roofline of the call as it is does not tell.
        evidence: figures beside those that every group has.
        least_share: of the FLOPs, 0..1, below which it is not said.
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

    def finding(self, group: Group) -> Finding:
        """What it says of its products."""
        severity = _said(self.severity, group) or ("warning" if group.is_worth_it else "info")
        evidence = group.evidence() | self.evidence(group)
        return Finding(self.id, severity, group.layer, _said(self.message, group), evidence, _said(self.fix, group))


def _said(sentence: Sentence, group: Group) -> str:
    return sentence if isinstance(sentence, str) else sentence(group)


@dataclass(frozen=True)
class RecordingRule:
    """A finding about a whole recording.

    Args:
        id: the finding's.
        finding: makes it of the recording, its products, the GPU and the time of all products (None where unknown); None where
            the rule does not hold.
    """

    id: str
    finding: Callable[[MatmulRecording, Sequence[ShapeRow], Gpu, float | None], Finding | None]


# -- longer sentences ------------------------------------------------------------------------------------------------------


def _reasons(group: Group) -> list[str]:
    return list(dict.fromkeys(row.reason for row in group.rows))


def _raises(group: Group) -> str:
    reasons = _reasons(group)
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return f"{group.products} in {group.where} can't run on {group.gpu.name}: {reasons[0]}{more}"


def _what_torch_takes(row: ShapeRow, autocast_dtype: str | None) -> str:
    a, b = row.matmul.a, row.matmul.b
    if " needs " in row.reason:
        return (
            "pad the sizes with zeros before the product and slice the result, or leave these layers in a 16-bit dtype"
        )
    if row.matmul.raises and a is not None and b is not None and a.dtype != b.dtype:
        autocast = (
            "" if autocast_dtype else ", or run the model under torch.autocast, which casts floating-point operands"
        )
        dtypes = " and ".join(sorted((a.dtype, b.dtype)))
        return f"give both the same dtype (here {dtypes}): cast the input to the weight's dtype{autocast}"
    return "see that the operands fit as torch's message asks"


def _tf32_switch(group: Group) -> str:
    kinds = {row.kind for row in group.rows}
    switches = []
    if kinds & {"gemm", "attention"}:
        switches.append('torch.set_float32_matmul_precision("high")')
    if kinds & {"convolution", "recurrent"}:
        switches.append("torch.backends.cudnn.allow_tf32 = True")
    return " and ".join(switches)


def _autocast(group: Group) -> str:
    return dtype_name(group.recording.autocast_dtype or "")


def _float64(group: Group) -> str:
    native = all(row.verdict == "native" for row in group.rows)
    where = "on Tensor Cores, at a fraction of FP16's rate" if native else "on CUDA cores"
    return f"{group.products} in {group.where} {group.are} FP64, {where}"


def _dtypes(group: Group) -> str:
    return ", ".join(sorted({row.dtype for row in group.rows}))


#: Why scaled_dot_product_attention takes its math path, by the recording's word, and what mends that (torch's
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
        "make the head's dimension the innermost: .contiguous() on what is transposed",
    ),
    "dtype": ("torch's fused kernels take 16-bit dtypes and FP32 only", "cast query, key and value"),
    "head-size": (
        "with a mask, in FP32 or with value heads of another size only the memory-efficient kernel could take these, and its "
        "heads are multiples of 8 (FP32: 4)",
        "make the head's size a multiple of 8, or is_causal=True in place of a mask that says the same",
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
        # The first product of attention has a head's size to sum over; its result are the scores.
        scores = sorted({(row.m, row.n) for row in group.rows if row.role == "forward" and row.k <= row.n})
        sizes = f" of {scores[-1][0]} x {scores[-1][1]}" if scores else ""
        return (
            f"{group.products} in {group.where} look like attention in separate products: the scores{sizes} are written to "
            f"memory and read again several times; {group.gain_words}, the softmax between them not counted"
        )
    rest = ""
    if not all(row.matmul.math_path for row in group.rows):
        rest = "; others look like attention in separate products, and scaled_dot_product_attention would fuse them"
    precision = ", in FP32" if any(row.dtype == "float32" for row in group.rows) else ""
    reasons = "; ".join(_MATH_PATH.get(path, ("torch chose it", ""))[0] for path in paths)
    return (
        f"{group.products} in {group.where} are scaled_dot_product_attention's math path, separate products{precision}: "
        f"{reasons}{rest}; {group.gain_words}, the softmax between them not counted"
    )


def _fuse(group: Group) -> str:
    if paths := _math_paths(group):
        return "; ".join(_MATH_PATH.get(path, ("", "see why"))[1] for path in paths)
    return (
        'torch.nn.functional.scaled_dot_product_attention, or attn_implementation="sdpa" for a Transformers model: '
        "the number of tokens is free in fused kernels; where that is what it calls, torch took its math path: make the head's "
        "size a multiple of 8 and drop what fused kernels don't take"
    )


def _channels_last(group: Group) -> str:
    sizes = {len(row.matmul.convolution.kernel_size) for row in group.rows if row.matmul.convolution is not None}
    layout = "channels_last_3d" if sizes == {3} else "channels_last"
    return f"model = model.to(memory_format=torch.{layout}) and the input likewise"


def _grow_vocabulary(group: Group) -> str:
    tables = group.recording.embeddings
    tied = {row.parameter: tables[row.parameter] for row in group.rows if row.parameter in tables}
    together = "".join(f"; {head} is tied to {table}, both grow" for head, table in tied.items() if head != table)
    return (
        f"pad {group.size_name.rsplit('.', 1)[-1] or 'vocab_size'} {group.pads_to}: "
        f"model.resize_token_embeddings(pad_to_multiple_of={group.multiple}) in Transformers{together}; the extra logits must "
        f"be masked or sliced off before sampling and the loss{group.inductor}"
    )


def _a_group(group: Group) -> str:
    convolutions = [row.matmul.convolution for row in group.rows]
    return " of a group" if any(found is not None and found.groups > 1 for found in convolutions) else ""


def _stem(group: Group) -> str:
    share = f"{percent(group.share)} of the FLOPs"
    share = f"a small share ({share})" if group.share < 0.1 else share
    saved = ""
    if group.gain is not None:
        saved = f", at most {percent(group.gain.saved_fraction_high)} of the time of all (estimated)"
    return (
        f"{some_modules(row.module for row in group.rows)} reads {count(group.size, 'input channel')}, no multiple of 8: "
        f"{share}{saved}, and cuDNN has kernels made for first layers; usually no change ({group.talk_words})"
    )


def _head_size(group: Group) -> str:
    what = "torch pads copies of query, key and value"
    if not has_flash_attention(group.gpu):
        what = (
            "torch's memory-efficient kernel does not take them, and without flash attention separate products remain"
        )
    share = percent(group.share)
    return f"heads of {group.size} in {group.where} ({share} of the FLOPs) are no multiple of 8: {what}; {group.gain_words}"


def _mask(group: Group) -> str:
    keys = sorted({row.matmul.attention.keys for row in group.rows if row.matmul.attention is not None})
    return (
        f"the additive mask of {group.products} in {group.where} has rows of {', '.join(map(str, keys[:3]))} elements, no "
        f"multiple of 16 bytes: torch copies it padded at each call; {group.gain_words}"
    )


def _sizes_of_talk(group: Group) -> dict[str, list[int]]:
    """The sizes that break the talk's rule, by letter."""
    by_letter: dict[str, set[int]] = {}
    for row in group.rows:
        for letter, size in binding_sizes(row.matmul).items():
            by_letter.setdefault(letter, set()).add(size)
    return {letter: sorted(sizes) for letter, sizes in by_letter.items()}


def _talk_only(group: Group) -> str:
    which = "; ".join(f"{letter} {_some(sizes)}" for letter, sizes in _sizes_of_talk(group).items())
    return (
        f"{group.products} {group.verb('break')} the rule of multiples of 8 and no rule of today ({which}): their strides are "
        f"aligned, rows and batches are free, no change expected on {group.gpu.name}. Libraries before cuBLAS 11 "
        "and cuDNN 7.6.3 would not have used Tensor Cores for them"
    )


def _some(sizes: list[int]) -> str:
    shown = ", ".join(f"{size:,}{_plus_one(size)}" for size in sizes[:4])
    return shown + (f" and {count(len(sizes) - 4, 'other')}" if len(sizes) > 4 else "")


def _plus_one(tokens: int) -> str:
    """Images cut into a square of patches, and a class token: 197, 257, 577, 1025."""
    root = math.isqrt(max(tokens - 1, 0))
    return f" ({tokens - 1} patches and a class token)" if root > 1 and root * root == tokens - 1 else ""


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
        evidence=lambda group: {"reasons": _reasons(group)},
    ),
    Rule(
        "gpu-without-tensor-cores",
        on=("gpu-without",),
        message=lambda group: f"{group.gpu.name} has no Tensor Cores: shapes make no difference there",
        fix="give another GPU if the model is meant for one: volta, turing, ampere, ada, hopper, blackwell",
        severity="info",
    ),
    Rule(
        "gpu-unknown",
        on=("gpu-unknown",),
        message=lambda group: (
            f"what the Tensor Cores of {group.gpu.name or 'this GPU'} need is not known here: no verdict"
        ),
        fix="give the GPU's architecture: volta, turing, ampere, ada, hopper or blackwell",
        severity="info",
    ),
    # -- dtypes and switches: to be mended before any padding
    Rule(
        "float32-under-autocast",
        on=("tf32-off", "float32"),
        when=lambda symptom: symptom.recording.autocast_dtype is not None,
        message=lambda group: (
            f"{group.products} in {group.where} {group.verb('run')} in FP32 under {_autocast(group)} autocast, on CUDA cores: "
            "autocast is disabled around them, or their operands are made in FP32 by an operation that autocast leaves alone "
            f"(torch's own math attention computes in FP32 too); {group.gain_words}"
        ),
        fix=lambda group: (
            f"drop autocast(enabled=False) around {group.where} or cast the operands to {_autocast(group)}; where FP32's range "
            f"is needed: {_tf32_switch(group)}"
        ),
        time=lowered_time,
    ),
    Rule(
        "tf32-off",
        on=("tf32-off",),
        message=lambda group: (
            f"{group.products} {group.are} FP32 with TF32 off, on CUDA cores; {group.gain_words}. "
            "Nothing about their shapes matters before that"
        ),
        fix=lambda group: f"{_tf32_switch(group)}; or run the model under torch.autocast in bfloat16 or float16",
    ),
    Rule(
        "float32",
        on=("float32",),
        message=lambda group: (
            f"{group.products} {group.are} FP32, which {group.gpu.name}'s Tensor Cores do not multiply (no TF32); "
            f"{group.gain_words} in FP16"
        ),
        fix='run the model under torch.autocast("cuda", torch.float16) with a loss scaler',
    ),
    Rule(
        "float64",
        on=("float64",),
        message=_float64,
        fix="cast to float32 before them, unless FP64 is meant; often one float64 constant or NumPy array is enough to cause it",
        severity=lambda group: "warning" if group.share >= 0.01 else "info",
    ),
    Rule(
        "dtype-not-multiplied",
        on=("dtype",),
        message=lambda group: (
            f"{group.products} {group.are} {_dtypes(group)}, which {group.gpu.name}'s Tensor Cores do not multiply; "
            f"{group.gain_words}"
        ),
        fix=lambda group: (
            "use float16 with a loss scaler on this GPU: BF16 needs Ampere or later"
            if group.gpu.architecture in ("volta", "turing") and _dtypes(group) == "bfloat16"
            else "convert to float16"
        ),
    ),
    # -- how the model computes
    Rule(
        "matrix-vector",
        on=("matrix-vector",),
        message=lambda group: (
            f"{group.products} in {group.where} {group.are} matrix-vector (or outer): bound by reading or writing the matrix "
            f"once; no change expected from padding ({group.talk_words})"
        ),
        fix="give them more rows, where the algorithm allows: a larger batch, several tokens at once",
        severity="info",
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
        message=lambda group: (
            f"{group.products} {group.are} in convolutions of NCHW tensors: cuDNN's Tensor Core kernels work on NHWC and "
            f"convert there and back (nchwToNhwc in a profile); {group.gain_words}"
        ),
        fix=_channels_last,
        time=nhwc_time,
    ),
    RecordingRule("layout-copies", layout_copies),
    # -- sizes
    Rule(
        "odd-tokens",
        on=("size",),
        when=lambda symptom: symptom.is_of_tokens,
        message=lambda group: (
            f"{group.size} tokens{_plus_one(group.size)} make the scores' rows odd in {group.products} of {group.where}, whose "
            f"attention is not fused: {group.binds}"
        ),
        fix=lambda group: (
            "fuse the attention, where the number of tokens is free; else pad or cut the sequence to "
            f"{up_to(group.size, 8)}{group.inductor}"
        ),
        time=size_time,
    ),
    Rule(
        "odd-vocabulary",
        on=("size",),
        when=lambda symptom: symptom.is_of_vocabulary,
        message=lambda group: (
            f"the vocabulary of {group.size:,} gives rows of {group.row_bytes} bytes, no multiple of 16, to {group.products} "
            f"in {group.where}: {group.binds}"
        ),
        fix=_grow_vocabulary,
        pads="vocabulary",
        time=size_time,
    ),
    Rule(
        "odd-size",
        on=("size",),
        message=lambda group: (
            f"a size of {group.size:,}{group.size_names} gives rows of {group.row_bytes} bytes, no multiple of 16, to "
            f"{group.products} in {group.where}{group.what_follows}: {group.binds}"
        ),
        fix=lambda group: (
            f"pad {group.size_name or 'the size'} {group.pads_to}{group.makes}{group.each_part}{group.inductor}"
        ),
        pads="size",
        time=size_time,
    ),
    Rule(
        "odd-channels",
        on=("channels",),
        message=lambda group: (
            f"{group.size:,} channels{_a_group(group)}{group.size_names} in {group.products} of {group.where} are no multiple "
            f"of 16 bytes: cuDNN pads them or takes a slower kernel; {group.talk_words}; {group.gain_words}"
        ),
        fix=lambda group: f"pad the channels{_a_group(group)} {group.size} -> {group.to_pad.advised}{group.inductor}",
        pads="channels",
        time=size_time,
    ),
    Rule(
        "few-input-channels",
        on=("stem",),
        message=_stem,
        fix=lambda group: (
            f"if a profile shows it: pad the input to {group.to_pad.to} channels with zeros (the weight likewise), or 8 for the "
            "rule of multiples of 8"
        ),
        severity="info",
        pads="input channels",
    ),
    Rule(
        "misaligned-view",
        on=("view",),
        message=lambda group: (
            f"{group.products} in {group.where} {group.verb('read')} or {group.verb('write')} a view that is not aligned to 16 "
            f"bytes, whatever the sizes: {_reasons(group)[0]}; {group.gain_words}"
        ),
        fix="slice at multiples of 8 elements, pad the parts (a head, a chunk) to such a multiple, or .contiguous() where the "
        "view is used more than once",
        evidence=lambda group: {"reasons": _reasons(group)[:10]},
    ),
    Rule(
        "attention-head-size",
        on=("head-dim",),
        message=_head_size,
        fix=lambda group: (
            f"choose a head size of {group.to_pad.to}, or pad the projections' output per head {group.size} -> "
            f"{group.to_pad.to}"
        ),
        pads="head",
    ),
    Rule(
        "attention-mask",
        on=("attention-bias",),
        message=_mask,
        fix="is_causal=True or no mask where that says the same; else make it with rows of a multiple of 8 and slice "
        "(mask = padded[..., :keys]), which keeps the stride",
    ),
    Rule(
        "depthwise",
        on=("depthwise",),
        message=lambda group: (
            f"{group.products} in {group.where} {group.are} of depthwise convolutions: nothing to multiply for Tensor Cores, "
            "memory-bound; no change expected from any size"
        ),
        fix="channels_last and torch.compile (fusion with what surrounds them) are what helps them",
        severity="info",
    ),
    # -- what no longer matters
    Rule(
        "multiples-of-8-only",
        on=("native", "clean"),
        when=lambda symptom: symptom.row.multiples_of_8 is False,
        message=_talk_only,
        fix="nothing, with today's libraries; for older ones make batch (and tokens) a multiple of 8",
        severity="info",
        evidence=lambda group: {"sizes": _sizes_of_talk(group)},
    ),
    Rule(
        "prefers-128-bytes",
        on=("clean",),
        when=lambda symptom: any("prefer" in remark for remark in symptom.row.remarks),
        message=lambda group: (
            f"{group.products} in {group.where} {group.are} aligned to 16 bytes and not to {PREFERRED_ALIGNMENT}, "
            "which A100 and later prefer: full speed by the rule of 16 bytes; a few percent at most, or no change"
        ),
        fix="where a size is free to choose, take multiples of 64 (FP16, BF16), 32 (TF32), 128 (FP8, INT8)",
        severity="info",
        least_share=0.01,
    ),
)

#: Every finding's id, root causes first: the order of equal severities.
FINDING_IDS = tuple(rule.id for rule in RULES)
#: The rules about products, by id.
BY_ID = {rule.id: rule for rule in RULES if isinstance(rule, Rule)}


def cause_of(symptom: Symptom) -> Cause | None:
    """What explains a symptom; None where no rule does."""
    for rule in BY_ID.values():
        if symptom.word in rule.on and rule.when(symptom):
            return Cause(rule.id, symptom.size, rule.pads)
    return None
