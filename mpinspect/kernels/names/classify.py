"""classify_kernel: judges a name by the first rule that matches, then by the alignment it spells and by the GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpinspect.kernels.names import facets
from mpinspect.kernels.names.rules import RULES, Rule, first_match
from mpinspect.kernels.names.spelling import Spelling
from mpinspect.runtime import gpus
from mpinspect.runtime.gpus import ARCHITECTURES, Gpu
from mpinspect.shapes.records import ITEM_SIZES

#: Alignment in bytes at which Tensor Core kernels load operands at full speed (NVIDIA's matrix multiplication guide).
FULL_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class KernelVerdict:
    """What a kernel's name says about Tensor Cores.

    Args:
        verdict: "native" (Tensor Cores at full alignment), "degraded" (on Tensor Cores, evidently held back), "off" (a product on
            CUDA cores), "helper" (work beside a product), "unknown" (a product whose name does not say, or an unfamiliar name,
            which may be a product's), "other" (no product).
        architecture: the one it was built for, not the GPU's; "any" where the name does not say.
        reason: one sentence.
        dtypes: the operands' dtypes that the name spells ("tfloat32" for TF32); () where it spells none.
        kind: "gemm", "convolution", "attention", "recurrent", "gemv", "communication" or "".
        alignment: number of elements to which operands are aligned by the name; None where it does not say.
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
    """Judge by its name whether a kernel ran on Tensor Cores.

    Args:
        name: as a profiler wrote it, mangled or not.
        gpu: the one it ran on ("hopper", "H100 PCIe", or a Gpu); None: judge by the name alone.
        dtype: the operator's dtype ("bfloat16"), used where the name spells none; None where unknown.

    Returns:
        The verdict. By its name a kernel is *degraded* only if its alignment is under 16 bytes (align4 is full alignment for TF32
        and half of it for FP16); an older architecture or a small tile is no evidence. KernelReport judges by rates too.

    Raises:
        TypeError: ``name`` is no string.
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
    """Return "native", or "degraded" where operands are aligned to fewer than 16 bytes, with the reason."""
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
    """Return the verdict on a GPU, which may have no Tensor Cores, or none for that dtype, or be AMD's."""
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
        reason = f"the name says Tensor Cores and {found.dtypes[0]}, which those of {card} do not multiply"
        return replace(found, verdict="unknown", reason=reason)
    if found.rule == "nvjet" and gpu.architecture in ("hopper", "blackwell"):
        return replace(found, architecture=gpu.architecture)
    return found


def _sentence(rule: Rule, digits: str = "") -> str:
    return f"{rule.meaning} ({digits})" if digits and rule.verdict == "native" else rule.meaning


#: The verdicts that depend on the rule alone.
_NO_PRODUCT = {
    rule.id: KernelVerdict(rule.verdict, "any", rule.meaning, kind=rule.kind, rule=rule.id)
    for rule in RULES
    if rule.verdict in ("other", "helper")
}
