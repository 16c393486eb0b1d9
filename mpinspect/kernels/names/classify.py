"""classify_kernel: the first rule that a name matches, then what the alignment and the GPU have to say."""

from __future__ import annotations

from dataclasses import dataclass

from mpinspect.kernels.names import facets
from mpinspect.kernels.names.rules import RULES, Rule, first_match
from mpinspect.kernels.names.spelling import Spelling
from mpinspect.runtime import gpus
from mpinspect.runtime.gpus import ARCHITECTURES, Gpu
from mpinspect.shapes.records import ITEM_SIZES

#: Bytes that a Tensor Core kernel loads at once an operand's row (NVIDIA's matrix multiplication guide: 16-byte alignment).
FULL_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class KernelVerdict:
    """What a kernel's name tells.

    Args:
        verdict: "native" (Tensor Cores at full alignment), "degraded" (on Tensor Cores, held back, with evidence), "off" (a
            product on CUDA cores), "helper" (work beside a product), "unknown" (a product, and no name could tell; or a name like
            none known, which may be a product's), "other" (no product).
        architecture: the one it was built for, "any" where the name does not say. Not the GPU it ran on.
        reason: one sentence.
        dtypes: the operands' dtypes that the name tells ("tfloat32" for TF32); () where it tells none.
        kind: "gemm", "convolution", "attention", "recurrent", "gemv", "communication" or "".
        alignment: elements that the name says its operands are aligned to; None where it does not.
        rule: id of the rule that decided.
    """

    verdict: str
    architecture: str
    reason: str
    dtypes: tuple[str, ...] = ()
    kind: str = ""
    alignment: int | None = None
    rule: str = ""

    @property
    def is_product(self) -> bool:
        """Whether it is matrix-multiplication work: native, degraded, off or unknown."""
        return self.verdict in ("native", "degraded", "off", "unknown")


def classify_kernel(name: str, gpu: str | Gpu | None = None, dtype: str | None = None) -> KernelVerdict:
    """Tell by its name whether a kernel ran on Tensor Cores.

    Args:
        name: as a profiler wrote it, mangled or not.
        gpu: the one it ran on ("hopper", "H100 PCIe", or a Gpu); None: not known, and the verdict is the name's alone.
        dtype: the operator's dtype where known ("bfloat16"): used where the name tells none.

    Returns:
        The verdict. *Degraded* on a name's evidence alone means an alignment under 16 bytes: align4 is full for TF32 and half
        for FP16. An older architecture's kernel or a small tile is no evidence. Rates are another: see KernelReport.

    Raises:
        TypeError: ``name`` is no string.
        ValueError: a GPU that is not known by that name.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a kernel's name, a str, not {type(name).__name__}")
    device = gpus.named(gpu) if isinstance(gpu, str) else gpu
    rule = first_match(name)
    if rule.id in _NO_PRODUCT:
        return _NO_PRODUCT[rule.id]
    return _on(device, _product(rule, Spelling.of(name).whole, dtype), rule.since)


def _product(rule: Rule, lowered: str, dtype: str | None) -> KernelVerdict:
    letter, digits = facets.instruction(lowered)
    dtypes = facets.dtypes(lowered, letter, digits) or ((dtype,) if dtype else ())
    alignment = facets.alignment(lowered)
    verdict, reason = rule.verdict, _sentence(rule, digits)
    if verdict == "native":
        verdict, reason = _aligned(lowered, dtypes, alignment, reason)
    return KernelVerdict(
        verdict=verdict,
        architecture="any" if rule.any_architecture else facets.architecture(lowered, digits),
        reason=reason,
        dtypes=dtypes,
        kind=rule.kind or facets.kind(lowered),
        alignment=alignment,
        rule=rule.id,
    )


def _aligned(lowered: str, dtypes: tuple[str, ...], alignment: int | None, reason: str) -> tuple[str, str]:
    """Native, or degraded because the operands' rows are not aligned to 16 bytes."""
    if "notaligned" in lowered:
        return "degraded", f"{reason}; built for operands that are not aligned to {FULL_ALIGNMENT} bytes"
    if alignment is None or not dtypes:
        return "native", reason
    bytes_ = alignment * min(
        ITEM_SIZES.get("float32" if each == "tfloat32" else each, FULL_ALIGNMENT) for each in dtypes
    )
    # FP64's own granule is 8 bytes: its kernels are all align1 or align2 (CUTLASS's procedural names).
    if bytes_ >= FULL_ALIGNMENT or "float64" in dtypes:
        return "native", reason
    return "degraded", (
        f"{reason}; but align{alignment}: it loads {bytes_} bytes at a time where {FULL_ALIGNMENT} are full speed, because an "
        f"operand's row stride or address is no multiple of {FULL_ALIGNMENT} bytes"
    )


def _on(gpu: Gpu | None, found: KernelVerdict, since: str) -> KernelVerdict:
    """The verdict on a GPU: one without Tensor Cores runs nothing on them, and AMD's kernels are not judged here."""
    if gpu is None:
        return found
    if gpu.vendor == "AMD":
        return _with(found, "unknown", "AMD's matrix cores are not Tensor Cores: names and rules here are NVIDIA's")
    if gpu.has_tensor_cores is False and found.verdict != "off":
        return _with(found, "off", f"{gpu.name or 'this GPU'} has no Tensor Cores")
    if since and gpu.architecture and ARCHITECTURES.index(gpu.architecture) < ARCHITECTURES.index(since):
        return _with(
            found, "off", f"{found.reason}; on {gpu.name or 'this GPU'}, older than {since}, it uses CUDA cores"
        )
    if found.verdict in ("native", "degraded") and found.dtypes and gpu.multiplies(found.dtypes[0]) is False:
        return _with(
            found,
            "unknown",
            f"the name says Tensor Cores and {found.dtypes[0]}, which those of {gpu.name or 'this GPU'} do not multiply",
        )
    if found.rule == "nvjet" and gpu.architecture in ("hopper", "blackwell"):
        return KernelVerdict(
            found.verdict, gpu.architecture, found.reason, found.dtypes, found.kind, found.alignment, found.rule
        )
    return found


def _with(found: KernelVerdict, verdict: str, reason: str) -> KernelVerdict:
    return KernelVerdict(verdict, found.architecture, reason, found.dtypes, found.kind, found.alignment, found.rule)


def _sentence(rule: Rule, digits: str = "") -> str:
    return f"{rule.meaning} ({digits})" if digits and rule.verdict == "native" else rule.meaning


#: The verdicts that depend on the rule alone.
_NO_PRODUCT = {
    rule.id: KernelVerdict(rule.verdict, "any", rule.meaning, kind=rule.kind, rule=rule.id)
    for rule in RULES
    if rule.verdict in ("other", "helper")
}
