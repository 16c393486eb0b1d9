"""Findings whose cause is a size: vocabulary, features, channels, tokens, and those that no longer matter."""

from __future__ import annotations

import math

from mpinspect.reporting.finding import Finding
from mpinspect.shapes.analysis.alignment import PREFERRED_ALIGNMENT
from mpinspect.shapes.analysis.group import Group
from mpinspect.shapes.analysis.latent import is_latent, once_mended
from mpinspect.shapes.analysis.report import Padding
from mpinspect.shapes.analysis.talk import binding_sizes
from mpinspect.shapes.analysis.wording import count
from mpinspect.shapes.records import ITEM_SIZES


def odd_vocabulary(group: Group) -> Finding:
    padding = group.padding
    if padding is None:
        return odd_size(group)
    tied = {
        row.parameter: group.recording.embeddings[row.parameter]
        for row in group.rows
        if row.parameter in group.recording.embeddings
    }
    multiple = _multiple(padding)
    name = padding.names[0].rsplit(".", 1)[-1] if padding.names else "vocab_size"
    together = "".join(f"; {head} is tied to {table}, both grow" for head, table in tied.items() if head != table)
    return group.finding(
        f"the vocabulary of {padding.size:,} gives rows of {_row_bytes(group)} bytes, no multiple of 16, to {group.products} in "
        f"{group.where}: {_binds(group)}",
        f"pad {name} {padding.size} -> {padding.advised}{_why_advised(padding)}: "
        f"model.resize_token_embeddings(pad_to_multiple_of={multiple}) in Transformers{together}; the extra logits must be "
        "masked or sliced off before sampling and the loss" + _inductor(group),
    )


def odd_size(group: Group) -> Finding:
    padding = group.padding
    if padding is None:
        return group.finding(
            f"{group.products} in {group.where} {group.have} misaligned rows", "pad them to a multiple of 16 bytes"
        )
    names = f" ({', '.join(padding.names[:3])})" if padding.names else ""
    name = padding.names[0] if padding.names else "the size"
    return group.finding(
        f"a size of {padding.size:,}{names} gives rows of {_row_bytes(group)} bytes, no multiple of 16, to {group.products} in "
        f"{group.where}{_follow(group)}: {_binds(group)}",
        f"pad {name} {padding.size} -> {padding.advised}{_why_advised(padding)}{_makes(group)}{_each_part(group)}"
        + _inductor(group),
    )


def odd_channels(group: Group) -> Finding:
    padding = group.padding
    if padding is None:
        return group.finding(f"{group.products} in {group.where} have odd channels", "pad them to a multiple of 8")
    names = f" ({', '.join(padding.names[:3])})" if padding.names else ""
    convolutions = [row.matmul.convolution for row in group.rows]
    a_group = " of a group" if any(found is not None and found.groups > 1 for found in convolutions) else ""
    return group.finding(
        f"{padding.size:,} channels{a_group}{names} in {group.products} of {group.where} are no multiple of 16 "
        f"bytes: cuDNN pads them or takes a slower kernel; {group.talk_words}; {group.gain_words}",
        f"pad the channels{a_group} {padding.size} -> {padding.advised}" + _inductor(group),
    )


def odd_tokens(group: Group) -> Finding:
    size = group.cause.size or 0
    return group.finding(
        f"{size} tokens{_plus_one(size)} make the scores' rows odd in {group.products} of {group.where}, whose attention is not "
        f"fused: {_binds(group)}",
        f"fuse the attention, where the number of tokens is free; else pad or cut the sequence to {-(-size // 8) * 8}"
        + _inductor(group),
    )


def multiples_only(group: Group) -> Finding:
    by_letter: dict[str, list[int]] = {}
    for row in group.rows:
        for letter, size in binding_sizes(row.matmul).items():
            by_letter.setdefault(letter, []).append(size)
    sizes = {letter: sorted(set(found)) for letter, found in by_letter.items()}
    which = "; ".join(f"{letter} {_some(found)}" for letter, found in sizes.items())
    return group.finding(
        f"{group.products} {group.verb('break')} the rule of multiples of 8 and no rule of today ({which}): their strides are "
        f"aligned, rows and batches are free, no change expected on {group.gpu.name}. Libraries before cuBLAS 11 "
        "and cuDNN 7.6.3 would not have used Tensor Cores for them",
        "nothing, with today's libraries; for older ones make batch (and tokens) a multiple of 8",
        "info",
        sizes=sizes,
    )


def prefers_more(group: Group) -> Finding:
    return group.finding(
        f"{group.products} in {group.where} {group.are} aligned to 16 bytes and not to {PREFERRED_ALIGNMENT}, "
        "which A100 and later prefer: full speed by the rule of 16 bytes; a few percent at most, or no change",
        "where a size is free to choose, take multiples of 64 (FP16, BF16), 32 (TF32), 128 (FP8, INT8)",
        "info",
    )


def _follow(group: Group) -> str:
    """ "; 300 (c_attn.weight) is 3 x 100 and a head of 25 is 100 / 4": what is no cause of its own."""
    words = []
    for padding in group.also:
        name = f" ({padding.names[0]})" if padding.names else ""
        if padding.what == "head":
            words.append(f"{group.parts.number} heads of {padding.size} make it up")
        else:
            words.append(f"{padding.size:,}{name} is {padding.size // (group.cause.size or 1)} x {group.cause.size}")
    return f"; {' and '.join(words)}" if words else ""


def _makes(group: Group) -> str:
    """What padding makes of the sizes that follow."""
    words = [
        f"{'the head' if padding.what == 'head' else padding.names[0] if padding.names else 'the size'} {padding.size} -> "
        f"{padding.advised}"
        for padding in group.also
    ]
    return f", which makes {' and '.join(words)}" if words else ""


def _each_part(group: Group) -> str:
    """Parts that a layer's output is split into are padded each, or the split no longer fits."""
    padding, parts = group.padding, group.parts
    if padding is None:
        return ""
    if parts.heads:
        least = -(-padding.size // 8) * 8
        return f"; {least} would mend the layers and not the heads" if least < padding.advised else ""
    if parts.number > 1:
        size, to = padding.size // parts.number, padding.advised // parts.number
        doubt = "" if parts.is_shown else f"; if its output is not split, {-(-padding.size // 8) * 8} will do"
        return f", each of its {parts.number} parts {size} -> {to}{doubt}"
    return "; if the layer's output is split into equal parts, pad each part" if parts.may_be else ""


def _binds(group: Group) -> str:
    """What both rules think, and what mending it brings."""
    latent = sum(row.calls for row in group.rows if is_latent(row))
    when = (
        f", {'all' if latent == group.calls else f'{latent:,}'} of them once they are on Tensor Cores" if latent else ""
    )
    return f"loads narrower than 16 bytes{when}; {group.talk_words}; {group.gain_words}"


def _row_bytes(group: Group) -> str:
    """Bytes a row of the odd size takes."""
    for row in group.rows:
        for layout in row.judged.layouts:
            if layout.row_stride == group.cause.size and layout.stride_bytes is not None:
                return f"{layout.stride_bytes:,}"
    dtype = once_mended(group.rows[0], group.recording.autocast_dtype).dtype
    return f"{(group.cause.size or 0) * ITEM_SIZES.get(dtype, 2):,}"


def _multiple(padding: Padding) -> int:
    """What ``advised`` is a multiple of: the largest power of two that 128 bytes of FP16 ask for."""
    return math.gcd(64, padding.advised) if padding.advised == padding.to_preferred else math.gcd(8, padding.advised)


def _why_advised(padding: Padding) -> str:
    if padding.to == padding.to_preferred:
        return ""
    if padding.advised == padding.to_preferred:
        return (
            f" (a multiple of {_multiple(padding)}, which A100 and later prefer; {padding.to} is the least that helps)"
        )
    return f" ({padding.to_preferred} would be the multiple of 64 that A100 and later prefer)"


def _plus_one(tokens: int) -> str:
    """Images cut into a square of patches, and a class token: 197, 257, 577, 1025."""
    root = math.isqrt(max(tokens - 1, 0))
    return f" ({tokens - 1} patches and a class token)" if root > 1 and root * root == tokens - 1 else ""


def _some(sizes: list[int]) -> str:
    shown = ", ".join(f"{size:,}{_plus_one(size)}" for size in sizes[:4])
    return shown + (f" and {count(len(sizes) - 4, 'other')}" if len(sizes) > 4 else "")


def _inductor(group: Group) -> str:
    if not group.recording.compiled:
        return ""
    return ". Inductor may pad this by itself (16-bit dtypes to multiples of 8, FP32 to 4): look at a profile first"
