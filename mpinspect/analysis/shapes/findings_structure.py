"""Findings whose cause is how the model computes: too thin products, unfused attention, layouts."""

from __future__ import annotations

from mpinspect.analysis.finding import Finding
from mpinspect.analysis.shapes.group import Group
from mpinspect.analysis.shapes.wording import some_modules
from mpinspect.analysis.wording import percent


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


def unfused_attention(group: Group) -> Finding:
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
    to = group.padding.to if group.padding is not None else 4
    saved = (
        ""
        if group.gain is None
        else f", at most {percent(group.gain.saved_fraction_high)} of the time of all (estimated)"
    )
    return group.finding(
        f"{some_modules(row.module for row in group.rows)} reads {channels} input channels, no multiple of 8: a small share "
        f"({percent(group.share)} of the FLOPs){saved}, and cuDNN has kernels made for first layers; "
        f"usually no change ({group.talk_words})",
        f"if a profile shows it: pad the input to {to} channels with zeros (the weight likewise), or 8 for the rule of "
        "multiples of 8",
        "info",
    )


def misaligned_view(group: Group) -> Finding:
    reasons = list(dict.fromkeys(row.reason for row in group.rows))
    return group.finding(
        f"{group.products} in {group.where} read or write a view that is not aligned to 16 bytes, whatever the sizes: "
        f"{reasons[0]}; {group.gain_words}",
        "slice at multiples of 8 elements, pad the parts (a head, a chunk) to such a multiple, or .contiguous() where the "
        "view is used more than once",
        reasons=reasons[:10],
    )


def attention_head_size(group: Group) -> Finding:
    to = group.padding.to if group.padding is not None else 0
    return group.finding(
        f"heads of {group.cause.size} in {group.where} ({percent(group.share)} of the FLOPs) are no multiple of 8: torch pads "
        f"copies of query, key and value; {group.gain_words}",
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
