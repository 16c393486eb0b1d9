"""Findings whose cause is how the model computes: too thin products, unfused attention, layouts."""

from __future__ import annotations

from mpinspect.reporting.finding import Finding
from mpinspect.reporting.words import percent
from mpinspect.shapes.analysis.attention import has_flash_attention
from mpinspect.shapes.analysis.group import Group
from mpinspect.shapes.analysis.wording import count, some_modules

#: Share of the FLOPs below which it is called small.
_SMALL = 0.1


def matrix_vector(group: Group) -> Finding:
    return group.finding(
        f"{group.products} in {group.where} {group.are} matrix-vector (or outer): bound by reading or writing the matrix once; "
        f"no change expected from padding ({group.talk_words})",
        "give them more rows, where the algorithm allows: a larger batch, several tokens at once",
        "info",
    )


def depthwise(group: Group) -> Finding:
    return group.finding(
        f"{group.products} in {group.where} {group.are} of depthwise convolutions: nothing to multiply for "
        "Tensor Cores, memory-bound; no change expected from any size",
        "channels_last and torch.compile (fusion with what surrounds them) are what helps them",
        "info",
    )


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


def unfused_attention(group: Group) -> Finding:
    paths = list(dict.fromkeys(row.matmul.math_path for row in group.rows if row.matmul.math_path))
    if not paths:
        return _separate_products(group)
    reasons, fixes = zip(*(_MATH_PATH.get(path, ("torch chose it", "see why")) for path in paths), strict=True)
    rest = ""
    if not all(row.matmul.math_path for row in group.rows):
        rest = "; others look like attention in separate products, and scaled_dot_product_attention would fuse them"
    precision = ", in FP32" if any(row.dtype == "float32" for row in group.rows) else ""
    return group.finding(
        f"{group.products} in {group.where} are scaled_dot_product_attention's math path, separate products{precision}: "
        f"{'; '.join(reasons)}{rest}; {group.gain_words}, the softmax between them not counted",
        "; ".join(fixes),
        math_path=paths,
    )


def _separate_products(group: Group) -> Finding:
    # The first product of attention has a head's size to sum over; its result are the scores.
    scores = sorted({(row.m, row.n) for row in group.rows if row.role == "forward" and row.k <= row.n})
    sizes = f" of {scores[-1][0]} x {scores[-1][1]}" if scores else ""
    return group.finding(
        f"{group.products} in {group.where} look like attention in separate products: the scores{sizes} are written to memory "
        f"and read again several times; {group.gain_words}, the softmax between them not counted",
        'torch.nn.functional.scaled_dot_product_attention, or attn_implementation="sdpa" for a Transformers model: '
        "the number of tokens is free in fused kernels; where that is what it calls, torch took its math path: make the head's "
        "size a multiple of 8 and drop what fused kernels don't take",
    )


def not_channels_last(group: Group) -> Finding:
    sizes = {len(row.matmul.convolution.kernel_size) for row in group.rows if row.matmul.convolution is not None}
    layout = "channels_last_3d" if sizes == {3} else "channels_last"
    return group.finding(
        f"{group.products} {group.are} in convolutions of NCHW tensors: cuDNN's Tensor Core kernels work on NHWC and "
        f"convert there and back (nchwToNhwc in a profile); {group.gain_words}",
        f"model = model.to(memory_format=torch.{layout}) and the input likewise",
    )


def few_input_channels(group: Group) -> Finding:
    channels = group.cause.size or 0
    share = f"{percent(group.share)} of the FLOPs"
    share = f"a small share ({share})" if group.share < _SMALL else share
    to = group.padding.to if group.padding is not None else 4
    saved = (
        ""
        if group.gain is None
        else f", at most {percent(group.gain.saved_fraction_high)} of the time of all (estimated)"
    )
    return group.finding(
        f"{some_modules(row.module for row in group.rows)} reads {count(channels, 'input channel')}, no multiple of 8: "
        f"{share}{saved}, and cuDNN has kernels made for first layers; "
        f"usually no change ({group.talk_words})",
        f"if a profile shows it: pad the input to {to} channels with zeros (the weight likewise), or 8 for the rule of "
        "multiples of 8",
        "info",
    )


def misaligned_view(group: Group) -> Finding:
    reasons = list(dict.fromkeys(row.reason for row in group.rows))
    return group.finding(
        f"{group.products} in {group.where} {group.verb('read')} or {group.verb('write')} a view that is not "
        f"aligned to 16 bytes, whatever the sizes: {reasons[0]}; {group.gain_words}",
        "slice at multiples of 8 elements, pad the parts (a head, a chunk) to such a multiple, or .contiguous() where the "
        "view is used more than once",
        reasons=reasons[:10],
    )


def attention_head_size(group: Group) -> Finding:
    to = group.padding.to if group.padding is not None else 0
    what = "torch pads copies of query, key and value"
    if not has_flash_attention(group.gpu):
        what = (
            "torch's memory-efficient kernel does not take them, and without flash attention separate products remain"
        )
    return group.finding(
        f"heads of {group.cause.size} in {group.where} ({percent(group.share)} of the FLOPs) are no multiple of 8: {what}; "
        f"{group.gain_words}",
        f"choose a head size of {to}, or pad the projections' output per head {group.cause.size} -> {to}",
    )


def attention_mask(group: Group) -> Finding:
    keys = sorted({row.matmul.attention.keys for row in group.rows if row.matmul.attention is not None})
    return group.finding(
        f"the additive mask of {group.products} in {group.where} has rows of {', '.join(map(str, keys[:3]))} elements, no "
        f"multiple of 16 bytes: torch copies it padded at each call; {group.gain_words}",
        "is_causal=True or no mask where that says the same; else make it with rows of a multiple of 8 and slice "
        "(mask = padded[..., :keys]), which keeps the stride",
    )
