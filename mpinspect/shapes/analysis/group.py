"""Group all products that share one cause, and word the group's figures and sizes for the finding's sentences."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from mpinspect.reporting.words import by_number, filled, number_of, percent
from mpinspect.runtime.gpus import Gpu
from mpinspect.shapes.analysis.alignment import up_to
from mpinspect.shapes.analysis.causes import Cause, is_latent, once_mended
from mpinspect.shapes.analysis.padding import Parts
from mpinspect.shapes.analysis.report import Padding, ShapeRow
from mpinspect.shapes.analysis.roofline import Gain, gain_words, is_worth_it
from mpinspect.shapes.analysis.wording import OUTSIDE, dtype_name, grouped, some_modules
from mpinspect.shapes.records import ITEM_SIZES, MatmulRecording

#: Maximum number of modules listed in the evidence; enough for all groups of a large model.
MAX_MODULES = 50


@dataclass(frozen=True)
class Group:
    """All products that share one cause.

    Args:
        cause: why the products do not reach full speed.
        rows: the products.
        gain: the estimated gain of the fix; None if the GPU's rates are not known.
        padding: how to pad the cause's size; None for causes without a size to pad.
        gpu, recording: the GPU and the recording that the report is about.
        also: the paddings of the sizes that follow from the padded one.
        parts: the equal parts of the size.
    """

    cause: Cause
    rows: tuple[ShapeRow, ...]
    gain: Gain | None
    padding: Padding | None
    gpu: Gpu
    recording: MatmulRecording
    also: tuple[Padding, ...]
    parts: Parts

    @property
    def paddings(self) -> tuple[Padding, ...]:
        """Return all sizes to pad, the one to blame first."""
        return (*filter(None, [self.padding]), *self.also)

    @property
    def share(self) -> float:
        """Return the products' share of all FLOPs, 0..1."""
        # Divide whole numbers: rounded shares may add up to slightly less than 1, and print as less than all.
        every = sum(matmul.flops * matmul.calls for matmul in self.recording.matmuls)
        return sum(row.flops * row.calls for row in self.rows) / (every or 1)

    @property
    def calls(self) -> int:
        return sum(row.calls for row in self.rows)

    @property
    def layer(self) -> str:
        """Return the products' module if they share one, else ""."""
        modules = {row.module for row in self.rows}
        return modules.pop() if len(modules) == 1 else ""

    @property
    def where(self) -> str:
        """Return the modules in words: "h.{0..11}.fc, lm_head and 2 more"."""
        return some_modules(row.module or ("" if row.parameter else OUTSIDE) for row in self.rows)

    @property
    def products(self) -> str:
        """Return the number of products in words: "12 products (3.1% of the FLOPs)"."""
        return f"{number_of(self.calls, 'product')} ({percent(self.share)} of the FLOPs)"

    @property
    def are(self) -> str:
        """Return the verb after ``products``: "is" or "are"."""
        return by_number(self.calls, "is", "are")

    @property
    def s(self) -> str:
        """Return the ending of any other verb after ``products``: "s" for one product, else ""."""
        return by_number(self.calls, "s", "")

    @property
    def is_worth_it(self) -> bool:
        return is_worth_it(self.gain, self.share)

    def evidence(self) -> dict[str, Any]:
        """Return the figures that every finding has."""
        talk = Counter[bool | None]()
        verdicts: Counter[str] = Counter()
        for row in self.rows:
            talk[row.multiples_of_8] += row.calls
            verdicts[row.verdict] += row.calls
        found: dict[str, Any] = {
            "flops_fraction": self.share,
            "calls": self.calls,
            "modules": grouped(row.module for row in self.rows)[:MAX_MODULES],
            "parameters": list(dict.fromkeys(row.parameter for row in self.rows if row.parameter))[:MAX_MODULES],
            "verdicts": dict(verdicts),
            "talk_rule_kept": talk[True],
            "talk_rule_broken": talk[False],
        }
        if self.padding is not None:
            found |= {
                "size": self.padding.size,
                "size_names": list(self.padding.names),
                "padded": self.padding.to,
                "padded_preferred": self.padding.to_preferred,
            }
        if self.also:
            found["consequent_sizes"] = [padding.size for padding in self.also]
        if self.gain is not None:
            found |= {
                "estimated_speedup_low": self.gain.speedup_low,
                "estimated_speedup_high": self.gain.speedup_high,
                "estimated_saved_fraction_high": self.gain.saved_fraction_high,
                "roofline_bound": self.gain.bound,
            }
        return found

    @property
    def gain_words(self) -> str:
        return gain_words(self.gain, by_padding=self.cause.size is not None)

    @property
    def talk_words(self) -> str:
        """Return a clause on the talk's rule: whether it flags these products."""
        broken = sum(row.calls for row in self.rows if row.multiples_of_8 is False)
        if not broken:
            return "the rule of multiples of 8 does not flag them"
        if broken == self.calls:
            return "the rule of multiples of 8 flags them too"
        return f"the rule of multiples of 8 flags {broken:,} of them too"

    @property
    def reasons(self) -> list[str]:
        """Return the distinct reasons of the products' verdicts."""
        return list(dict.fromkeys(row.reason for row in self.rows))

    @property
    def dtypes(self) -> str:
        return ", ".join(sorted({row.dtype for row in self.rows}))

    @property
    def autocast(self) -> str:
        """Return the name of autocast's dtype: "FP16" for float16."""
        return dtype_name(self.recording.autocast_dtype or "")

    @property
    def tf32_switch(self) -> str:
        """Return the statements that allow TF32 for these products."""
        kinds = {row.kind for row in self.rows}
        switches = []
        if kinds & {"gemm", "attention"}:
            switches.append('torch.set_float32_matmul_precision("high")')
        if kinds & {"convolution", "recurrent"}:
            switches.append("torch.backends.cudnn.allow_tf32 = True")
        return " and ".join(switches)

    @property
    def gpu_name(self) -> str:
        return self.gpu.name or "this GPU"

    # -- sizes -------------------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Return the size to blame; 0 if no size is to blame."""
        return self.cause.size or 0

    @property
    def block(self) -> int:
        """Return the largest number of values that share a scale in these products; 0 without shared scales."""
        return max((row.matmul.block for row in self.rows), default=0)

    @property
    def next_multiple_of_8(self) -> int:
        return up_to(self.size, 8)

    @property
    def plus_one(self) -> str:
        """Return how an image makes up this number of tokens: " (196 patches and a class token)"; else ""."""
        return plus_one(self.size)

    @property
    def of_a_group(self) -> str:
        """Return " of a group" if any product is a grouped convolution, else ""."""
        convolutions = [row.matmul.convolution for row in self.rows]
        if any(found is not None and found.groups > 1 for found in convolutions):
            return " of a group"
        return ""

    @property
    def to_pad(self) -> Padding:
        """Return ``padding`` for a cause that must have one."""
        assert self.padding is not None
        return self.padding

    @property
    def size_name(self) -> str:
        """Return what to pad: the config's size, from which the others follow, else the size's names; or "the size"."""
        names = self.to_pad.names
        settings = [name for name in names if name.startswith("config.")]
        return some_modules(settings[:1] or names) or "the size"

    @property
    def size_names(self) -> str:
        """Return the size's names: " (config.n_embd, h.0.in_features)"; "" if the size has no name."""
        return filled(" ({})", ", ".join(self.to_pad.names[:3]))

    @property
    def pads_to(self) -> str:
        """Return the padding with the reason for its target: "1023 -> 1024 (...)"."""
        padding = self.to_pad
        least, preferred, advised = padding.to, padding.to_preferred, padding.advised
        why = ""
        if least != preferred and advised == preferred:
            why = f" (a multiple of {self.multiple}, which A100 and later prefer; {least} is the least that helps)"
        elif least != preferred:
            why = f" ({preferred} would be the multiple of 64 that A100 and later prefer)"
        return f"{padding.size} -> {advised}{why}"

    @property
    def multiple(self) -> int:
        """Return the largest power of two that divides the advised size: at most 64 (128-byte alignment), else 8."""
        padding = self.to_pad
        most = 64 if padding.advised == padding.to_preferred else 8
        return math.gcd(most, padding.advised)

    @property
    def row_bytes(self) -> str:
        """Return the number of bytes in a row of the odd size."""
        for row in self.rows:
            for layout in row.judged.layouts:
                if layout.row_stride == self.cause.size and layout.stride_bytes is not None:
                    return f"{layout.stride_bytes:,}"
        dtype = once_mended(self.rows[0], self.recording.autocast_dtype).dtype
        return f"{self.size * ITEM_SIZES.get(dtype, 2):,}"

    @property
    def what_follows(self) -> str:
        """Word the sizes that follow from this one: "; 300 (c_attn.weight) is 3 x 100 and 12 heads of 25 make it up"."""
        words = []
        for padding in self.also:
            name = filled(" ({})", padding.name)
            if padding.what == "head":
                words.append(f"{self.parts.number} heads of {padding.size} make it up")
            elif padding.size < self.size:
                words.append(f"{padding.size:,}{name} is made up of fewer such heads")
            else:
                words.append(f"{padding.size:,}{name} is {padding.size // (self.size or 1)} x {self.size}")
        return filled("; {}", " and ".join(words))

    @property
    def makes(self) -> str:
        """Return how the padding changes the sizes that follow from this one."""
        words = []
        for padding in self.also:
            name = "the head" if padding.what == "head" else padding.name or "the size"
            words.append(f"{name} {padding.size} -> {padding.advised}")
        return filled(", which makes {}", " and ".join(words))

    @property
    def each_part(self) -> str:
        """Return how to pad the equal parts of a layer's output, by the same amount, so that the split still fits."""
        padding, parts = self.to_pad, self.parts
        least = self.next_multiple_of_8
        if parts.heads and least < padding.advised:
            return f"; {least} would fix the layers but not the heads"
        if parts.number > 1 and not parts.heads:
            size, to = padding.size // parts.number, padding.advised // parts.number
            each = f", each of its {parts.number} parts {size} -> {to}"
            return each if parts.is_shown else f"{each}; if its output is not split, {least} will do"
        if parts.may_be:
            return "; if the layer's output is split into equal parts, pad each part"
        return ""

    @property
    def binds(self) -> str:
        """Return a sentence on misaligned rows by both rules, and the estimated gain of the fix."""
        latent = sum(row.calls for row in self.rows if is_latent(row))
        loads = "loads narrower than 16 bytes"
        if latent == self.calls:
            loads += ", all of them once they are on Tensor Cores"
        elif latent:
            loads += f", {latent:,} of them once they are on Tensor Cores"
        return f"{loads}; {self.talk_words}; {self.gain_words}"

    @property
    def inductor(self) -> str:
        """Return a sentence on how torch.compile may pad a size by itself; "" if the model is not compiled."""
        if not self.recording.compiled:
            return ""
        return ". Inductor may pad this by itself (16-bit dtypes to multiples of 8, FP32 to 4): check a profile first"


def plus_one(tokens: int) -> str:
    """Return " (196 patches and a class token)" for 197 tokens, and so for any square plus one; else ""."""
    patches = tokens - 1
    if patches < 4 or math.isqrt(patches) ** 2 != patches:
        return ""
    return f" ({patches} patches and a class token)"
