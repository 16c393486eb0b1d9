"""classify_kernel: judge a name by the first matching rule, then by the alignment in the name and by the GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpinspect.kernels.names import facets
from mpinspect.kernels.names.rules import RULES, Rule, first_match
from mpinspect.kernels.names.spelling import Spelling
from mpinspect.reporting.words import bracketed
from mpinspect.runtime import gpus
from mpinspect.runtime.gpus import ARCHITECTURES, Gpu
from mpinspect.shapes.records import ITEM_SIZES

#: Alignment in bytes that lets Tensor Core kernels load operands at full speed (NVIDIA's matrix multiplication guide).
FULL_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class KernelVerdict:
    """The verdict on Tensor Cores by a kernel's name.

    Args:
        verdict: "native" (Tensor Cores at full alignment), "degraded" (on Tensor Cores, but slowed down), "off" (a product
            on CUDA cores), "helper" (work that accompanies a product), "unknown" (a product on an unknown unit, or an
            unfamiliar name, which may be a product's), "other" (not a product).
        architecture: the architecture that the kernel was built for, not the GPU's; "any" if the name lacks one.
        reason: the verdict's reason in one sentence.
        dtypes: the operands' dtypes in the name ("tfloat32" for TF32); () if the name has no dtype.
        kind: "gemm", "convolution", "attention", "recurrent", "gemv", "communication" or "".
        alignment: the operands' alignment in elements by the name; None if the name lacks one.
        rule: id of the rule that matched.
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
        """Return whether the kernel may compute a matrix product: native, degraded, off or unknown."""
        return self.verdict in ("native", "degraded", "off", "unknown")


def classify_kernel(name: str, gpu: str | Gpu | None = None, dtype: str | None = None) -> KernelVerdict:
    """Judge by its name whether a kernel ran on Tensor Cores.

    Args:
        name: the name as a profiler wrote it, mangled or not.
        gpu: the GPU that the kernel ran on ("hopper", "H100 PCIe", or a Gpu); None: judge by the name alone.
        dtype: the operator's dtype ("bfloat16"), used for names without a dtype; None if unknown.

    Returns:
        The verdict. By name, a kernel is *degraded* only if its alignment is below 16 bytes (align4 is full alignment for TF32
        and half of it for FP16); an older architecture or a small tile is no evidence. KernelReport also judges by rates.

    Raises:
        TypeError: ``name`` is not a string.
        ValueError: no GPU of that name is known.
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
    dtypes = facets.dtypes(lowered, letter, digits) or tuple(filter(None, [dtype]))
    alignment = facets.alignment(lowered)
    verdict, reason = rule.verdict, rule.meaning
    if verdict == "native":
        verdict, reason = _aligned(lowered, dtypes, alignment, reason + bracketed(digits))
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
    """Return "native", or "degraded" if operands are aligned to fewer than 16 bytes, with the reason."""
    if "notaligned" in lowered:
        return "degraded", f"{reason}; built for operands that are not aligned to {FULL_ALIGNMENT} bytes"
    if alignment is None or not dtypes:
        return "native", reason
    stored = [each.replace("tfloat32", "float32") for each in dtypes]
    bytes_ = alignment * min(ITEM_SIZES.get(each, FULL_ALIGNMENT) for each in stored)
    # FP64 kernels load 8 bytes at a time: all of them are align1 or align2 (CUTLASS's procedural names).
    if bytes_ >= FULL_ALIGNMENT or "float64" in dtypes:
        return "native", reason
    return "degraded", (
        f"{reason}; but align{alignment}: it loads {bytes_} bytes at a time where {FULL_ALIGNMENT} are full speed, because an "
        f"operand's row stride or address is not a multiple of {FULL_ALIGNMENT} bytes"
    )


def _on(gpu: Gpu | None, found: KernelVerdict, since: str) -> KernelVerdict:
    """Return the verdict on a GPU, which may have no Tensor Cores, may not multiply the dtype, or may be AMD's."""
    if gpu is None:
        return found
    if gpu.vendor == "AMD":
        reason = "AMD's matrix cores are not Tensor Cores: names and rules here are NVIDIA's"
        return replace(found, verdict="unknown", reason=reason)
    card = gpu.name or "this GPU"
    if gpu.has_tensor_cores is False and found.verdict != "off":
        return replace(found, verdict="off", reason=f"{card} has no Tensor Cores")
    if since and gpu.architecture and ARCHITECTURES.index(gpu.architecture) < ARCHITECTURES.index(since):
        reason = f"{found.reason}; on {card}, older than {since}, it uses CUDA cores"
        return replace(found, verdict="off", reason=reason)
    if found.verdict in ("native", "degraded") and found.dtypes and gpu.multiplies(found.dtypes[0]) is False:
        reason = f"the name implies Tensor Cores and {found.dtypes[0]}, which {card}'s Tensor Cores do not multiply"
        return replace(found, verdict="unknown", reason=reason)
    if found.rule == "nvjet" and gpu.architecture in ("hopper", "blackwell"):
        return replace(found, architecture=gpu.architecture)
    return found


#: The verdicts that depend on the rule alone.
_NO_PRODUCT = {
    rule.id: KernelVerdict(rule.verdict, "any", rule.meaning, kind=rule.kind, rule=rule.id)
    for rule in RULES
    if rule.verdict in ("other", "helper")
}
