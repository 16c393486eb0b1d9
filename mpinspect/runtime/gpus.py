"""Data on NVIDIA's GPUs: architecture, the dtypes that their Tensor Cores multiply, and peak rates for rooflines.

Rates are dense (without structured sparsity) peaks in TFLOP/s at boost clock with FP32 accumulation, and bandwidths are
in GB/s, from NVIDIA's data sheets and architecture white papers (named above the rows). They are upper bounds that
kernels do not reach.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from difflib import get_close_matches

ARCHITECTURES = ("volta", "turing", "ampere", "ada", "hopper", "blackwell")

#: The rates' dtype keys are torch's names, except "tfloat32" for FP32, and "float8" and "float4" for all such formats.
_16_BIT = ("float16", "bfloat16")

#: Dtypes that Tensor Cores multiply (NVIDIA's tuning guides and white papers); FP64 only on data-centre chips.
TENSOR_CORE_DTYPES = {
    "volta": ("float16",),
    "turing": ("float16", "int8"),
    "ampere": (*_16_BIT, "tfloat32", "int8", "float64"),
    "ada": (*_16_BIT, "tfloat32", "int8", "float8"),
    "hopper": (*_16_BIT, "tfloat32", "int8", "float64", "float8"),
    "blackwell": (*_16_BIT, "tfloat32", "int8", "float64", "float8", "float4"),
}

#: The card whose rates represent an architecture in rooflines: its first data-centre card.
_REFERENCE = {
    "volta": "V100 SXM2",
    "turing": "T4",
    "ampere": "A100",
    "ada": "L40S",
    "hopper": "H100",
    "blackwell": "B200",
}


@dataclass(frozen=True)
class Gpu:
    """The known properties of a GPU.

    Args:
        name: the card, or the name that the device reports.
        architecture: one of ARCHITECTURES; "" if it is older, another vendor's or unknown.
        has_tensor_cores: None if unknown.
        tensor_core_tflops: peak by dtype; empty if unknown.
        cuda_core_tflops: peak without Tensor Cores by dtype ("float32", "float16"); empty if unknown.
        bandwidth_gb_s: peak memory bandwidth; None if unknown.
        sms: number of streaming multiprocessors; None if unknown.
        vendor: "NVIDIA", "AMD" or "".
    """

    name: str
    architecture: str = ""
    has_tensor_cores: bool | None = None
    tensor_core_tflops: dict[str, float] = field(default_factory=dict, hash=False)
    cuda_core_tflops: dict[str, float] = field(default_factory=dict, hash=False)
    bandwidth_gb_s: float | None = None
    vendor: str = "NVIDIA"
    sms: int | None = None

    def multiplies(self, dtype: str) -> bool | None:
        """Return whether its Tensor Cores multiply a dtype (TF32 for "float32"); None if unknown."""
        if self.has_tensor_cores is None:
            return None
        if not self.has_tensor_cores:
            return False
        if self.tensor_core_tflops:
            return rate_key(dtype) in self.tensor_core_tflops
        if self.architecture not in TENSOR_CORE_DTYPES:
            return None
        known = rate_key(dtype) in TENSOR_CORE_DTYPES[self.architecture]
        if known and dtype == "float64":
            # Only an architecture's data-centre chips have FP64 Tensor Cores, and this card is not in the table.
            return None
        return known


def rate_key(dtype: str) -> str:
    """Return the rates' key for a dtype name: "float32" -> "tfloat32", "float8_e4m3fn" -> "float8"; else the name."""
    if dtype == "float32":
        return "tfloat32"
    if dtype == "uint8":
        return "int8"
    return next((family for family in ("float8", "float4") if dtype.startswith(family)), dtype)


@dataclass(frozen=True)
class _Card:
    """A row of the table. ``half``: FP16 and (from Ampere on) BF16 Tensor Core peak; None for rates that the card lacks."""

    name: str
    pattern: str
    architecture: str
    half: float
    fp32: float
    half_cores: float
    bandwidth: float
    tf32: float | None = None
    fp8: float | None = None
    int8: float | None = None
    fp64: float | None = None
    fp4: float | None = None
    sms: int | None = None


#: Patterns are searched in the device's name after ``_words``. The first match wins, so special cards precede general ones.
_CARDS = (
    # Volta: V100 data sheet (2020); Titan V and GV100 product pages.
    _Card("V100 PCIe", r"v100 pcie|v100s", "volta", 112, 14.0, 28.0, 900, sms=80),
    _Card("V100 SXM2", r"v100", "volta", 125, 15.7, 31.4, 900, sms=80),
    # Turing: T4 data sheet; Turing white paper (FP16 with FP32 accumulation, reference clocks).
    _Card("T4", r"\bt4\b", "turing", 65, 8.1, 16.2, 300, int8=130, sms=40),
    _Card("RTX 2080 Ti", r"rtx 2080 ti", "turing", 53.8, 13.4, 26.9, 616, int8=215.2, sms=68),
    # Ampere: A100, A30, A10, A40 data sheets; GA102 white paper.
    _Card("A100 80GB PCIe", r"a100 80gb pcie", "ampere", 312, 19.5, 78, 1935, 156, int8=624, fp64=19.5, sms=108),
    _Card("A100 80GB", r"a100.*80gb", "ampere", 312, 19.5, 78, 2039, 156, int8=624, fp64=19.5, sms=108),
    _Card("A100", r"a100", "ampere", 312, 19.5, 78, 1555, 156, int8=624, fp64=19.5, sms=108),
    # A800: A100's rates with a slower NVLink (NVIDIA A800 data sheets).
    _Card("A800 80GB PCIe", r"a800 80gb pcie", "ampere", 312, 19.5, 78, 1935, 156, int8=624, fp64=19.5, sms=108),
    _Card("A800 80GB", r"a800.*80gb", "ampere", 312, 19.5, 78, 2039, 156, int8=624, fp64=19.5, sms=108),
    _Card("A800", r"a800", "ampere", 312, 19.5, 78, 1555, 156, int8=624, fp64=19.5, sms=108),
    # A10G: NVIDIA's data sheet for AWS (2022).
    _Card("A10G", r"a10g", "ampere", 70, 35, 35, 600, 35, int8=140, sms=80),
    _Card("A30", r"\ba30\b", "ampere", 165, 10.3, 41.2, 933, 82, int8=330, fp64=10.3, sms=56),
    _Card("A40", r"\ba40\b", "ampere", 149.7, 37.4, 37.4, 696, 74.8, int8=299.3, sms=84),
    _Card("A10", r"\ba10\b", "ampere", 125, 31.2, 31.2, 600, 62.5, int8=250, sms=72),
    _Card("RTX A6000", r"rtx a6000", "ampere", 154.8, 38.7, 38.7, 768, 77.4, int8=309.7, sms=84),
    _Card("RTX 3090", r"rtx 3090(?! ti)", "ampere", 71, 35.6, 35.6, 936, 35.6, int8=284, sms=82),
    # Ada: L4, L40, L40S data sheets; Ada white paper.
    _Card("L40S", r"l40s", "ada", 362, 91.6, 91.6, 864, 183, fp8=733, int8=733, sms=142),
    _Card("L40", r"\bl40\b", "ada", 181, 90.5, 90.5, 864, 90.5, fp8=362, int8=362, sms=142),
    _Card("L4", r"\bl4\b", "ada", 121, 30.3, 30.3, 300, 60, fp8=242, int8=242, sms=58),
    # L20: NVIDIA's product brief, without sparsity.
    _Card("L20", r"\bl20\b", "ada", 119.5, 59.8, 59.8, 864, 59.8, fp8=239, int8=239, sms=92),
    _Card("RTX 4090", r"rtx 4090(?! d| l)", "ada", 165.2, 82.6, 82.6, 1008, 82.6, fp8=330.3, int8=660.6, sms=128),
    # Hopper: H100, H200 and GH200 (96 GB of HBM3, or 144 GB of HBM3e) data sheets; Hopper white paper.
    _Card(
        "GH200 144GB",
        r"gh200 144gb?|gh200.* hbm3e",
        "hopper",
        989.4,
        66.9,
        133.8,
        4900,
        494.7,
        fp8=1978.9,
        int8=1978.9,
        fp64=66.9,
        sms=132,
    ),
    _Card("GH200", r"gh200", "hopper", 989.4, 66.9, 133.8, 4000, 494.7, fp8=1978.9, int8=1978.9, fp64=66.9, sms=132),
    # H800: H100's Tensor Cores without most of FP64. H20: its product brief, without sparsity (78 SMs).
    _Card("H800 PCIe", r"h800 pcie", "hopper", 756, 51.2, 102.4, 2000, 378, fp8=1513, int8=1513, fp64=0.8, sms=114),
    _Card("H800", r"h800", "hopper", 989.4, 66.9, 133.8, 3350, 494.7, fp8=1978.9, int8=1978.9, fp64=1, sms=132),
    _Card("H20", r"h20(?! 3e)", "hopper", 148, 44, 88, 4000, 74, fp8=296, int8=296, fp64=1, sms=78),
    _Card("H200", r"h200", "hopper", 989.4, 66.9, 133.8, 4800, 494.7, fp8=1978.9, int8=1978.9, fp64=66.9, sms=132),
    _Card("H100 PCIe", r"h100 pcie", "hopper", 756, 51.2, 102.4, 2000, 378, fp8=1513, int8=1513, fp64=51.2, sms=114),
    _Card("H100 NVL", r"h100 nvl", "hopper", 835, 60, 120, 3900, 417.5, fp8=1671, int8=1671, fp64=60, sms=132),
    _Card("H100", r"h100", "hopper", 989.4, 66.9, 133.8, 3350, 494.7, fp8=1978.9, int8=1978.9, fp64=66.9, sms=132),
    # Blackwell: HGX B200 and GB200 data sheets, a GPU's share, without sparsity; RTX Blackwell white paper.
    _Card("GB200", r"gb200", "blackwell", 2500, 80, 160, 8000, 1250, fp8=5000, int8=5000, fp64=40, fp4=10000),
    _Card("B200", r"b200", "blackwell", 2250, 75, 150, 8000, 1125, fp8=4500, int8=4500, fp64=37, fp4=9000, sms=148),
    # Blackwell Ultra: HGX B300 and GB300 data sheets, a GPU's share, without sparsity; INT8 and FP64 are a fraction of B200's.
    _Card("GB300", r"gb300", "blackwell", 2500, 80, 160, 8000, 1250, fp8=5000, int8=165, fp64=1.3, fp4=15000),
    _Card("B300", r"b300", "blackwell", 2250, 75, 150, 8000, 1125, fp8=4500, int8=150, fp64=1.25, fp4=14000),
    _Card(
        "RTX 5090",
        r"rtx 5090(?! d| l)",
        "blackwell",
        209.5,
        104.8,
        104.8,
        1792,
        104.8,
        fp8=419,
        int8=838,
        fp4=1676,
        sms=170,
    ),
)


#: Matches a slice of a card (MIG's "1g.5gb", a virtual GPU's "8C"), for which the card's rates are wrong.
_SLICE = re.compile(r"\bmig\b|\b\d+g \d+gb\b|\b\d{1,3}[abcq]\b")

#: Turing's chips without Tensor Cores, TU116 and TU117, also have compute capability 7.5 (Turing white paper).
_TURING_WITHOUT = re.compile(r"gtx 16\d\d|\bt(?:400|500|550|600|1000|1200|2000)\b|mx ?[45]50")

#: The beginning of the note on a GPU that was assumed because the user named none and the machine has none.
ASSUMED = "no CUDA device is at hand"
#: Compute capability by a model's token in the name, first match wins (developer.nvidia.com/cuda-gpus), with examples.
_MODELS: tuple[tuple[tuple[int, int], str, tuple[str, ...]], ...] = (
    ((12, 1), r"gb10", ("GB10",)),
    ((12, 0), r"(?:rtx )?50[5-9]0|rtx pro \d{3,4}|rtx \d{3,4} blackwell", ("RTX 5080", "RTX PRO 6000 Blackwell")),
    ((11, 0), r"thor", ("Thor",)),
    ((10, 3), r"g?b300", ("B300", "GB300")),
    ((10, 0), r"g?b[12]00", ("B100",)),
    ((9, 0), r"g?h[128]00[a-z]*|h20", ("H800", "H20", "GH200")),
    ((8, 9), r"l40[sg]?|l4|l20|l2|(?:rtx )?40[5-9]0|\d{3,4} (?:sff )?ada", ("RTX 4080", "RTX 6000 Ada", "L20")),
    ((8, 7), r"orin", ("Jetson Orin",)),
    ((8, 0), r"a100[dx]?|a800|a30x?|cmp 170hx", ("A800",)),
    (
        (8, 6),
        r"a40|a10[gm]?|a16|a2|(?:rtx )?30[5-9]0|rtx 2050|(?:rtx )?a(?:[3-5]00|[1-6]000|[45]500)h?|mx570|cmp 90hx",
        ("A10G", "A16", "RTX 3060", "RTX 3080", "RTX A2000"),
    ),
    ((7, 2), r"xavier", ("Jetson Xavier",)),
    (
        (7, 5),
        rf"t4g?|t10|(?:rtx )?20[6-8]0|titan rtx|rtx [34568]000|{_TURING_WITHOUT.pattern}",
        ("RTX 2080", "TITAN RTX", "Quadro RTX 6000", "GTX 1660"),
    ),
    ((7, 0), r"v100[a-z]*|gv100|titan v", ("TITAN V", "Quadro GV100")),
    ((6, 2), r"tx2", ()),
    ((6, 0), r"g?p100", ("P100", "Quadro GP100")),
    ((6, 1), r"p40|p4|p6|gtx 10\d\d|titan xp?|quadro p\d{3,4}|mx ?[123]\d0", ("P40", "P4", "GTX 1080")),
    ((5, 2), r"m4|m6|m40|m60|gtx 9\d\d|gtx 75\d|quadro m\d{4}|tegra x1", ("M40", "M60")),
    ((3, 7), r"k80|k40[a-z]?|k20[a-z]*|quadro k\d{4}|gtx [67]\d\d", ("K80", "K40")),
)
_EXAMPLES = tuple(name for _, _, names in _MODELS for name in names)
_CAPABILITY = re.compile(r"(?:sm|compute)? ?(\d{1,2}) (\d)|(?:sm|compute) ?(\d{1,2})(\d)[af]?")
_AMD = re.compile(r"\b(?:amd|instinct|radeon)\b|\bmi\d{2,3}[a-z]?\b|\bgfx\d+[a-z]?\b")


def named(text: str) -> Gpu:
    """Return the GPU of a given name, ignoring case.

    Args:
        text: an architecture ("hopper": the rates of its first data-centre card), a card ("H100 PCIe"), a name from
            nvidia-smi or a trace ("NVIDIA GeForce RTX 4090 Laptop GPU"), or a compute capability ("sm_90", "9.0").

    Raises:
        ValueError: no GPU is known by this name; the message suggests similar names and lists all.
    """
    wanted = text.strip().lower()
    by_name = {card.name.lower(): card for card in _CARDS}
    if wanted in _REFERENCE:
        return _gpu(by_name[_REFERENCE[wanted].lower()], _REFERENCE[wanted])
    if wanted in by_name:
        return _gpu(by_name[wanted], by_name[wanted].name)
    words = _words(text)
    if _AMD.search(words):
        return of_device(text.strip(), None, vendor="AMD")
    spelt = _CAPABILITY.fullmatch(words)
    if spelt:
        return _of_capability(text.strip(), *(int(digits) for digits in spelt.groups() if digits))
    if _capability(words) is not None:
        return of_device(text.strip(), None)
    known = {name.lower(): name for name in (*ARCHITECTURES, *(card.name for card in _CARDS), *_EXAMPLES)}
    near = [known[name] for name in get_close_matches(words, known, cutoff=0.5)]
    nearest = ""
    if near:
        nearest = f" (near it: {', '.join(near)})"
    raise ValueError(
        f"{text!r} is not a GPU known here{nearest}: give 'auto', an architecture "
        f"({', '.join(ARCHITECTURES)}), a card ({', '.join(card.name for card in _CARDS)}), the name that nvidia-smi prints, "
        "or a compute capability such as 9.0"
    )


def _words(name: str) -> str:
    """Return a device's name in lower case, with words and numbers separated by one space: "rtx 4090 laptop gpu"."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).strip()
    return re.sub(r"\b(rtx|gtx)(?=[a\d])", r"\1 ", words)


def _capability(words: str) -> tuple[int, int] | None:
    """Return the compute capability of the GPU model in a name; None if no known model is in the name."""
    return next(
        (capability for capability, model, _ in _MODELS if re.search(rf"(?<![a-z0-9])(?:{model})(?![0-9])", words)),
        None,
    )


def _of_capability(name: str, major: int, minor: int) -> Gpu:
    """Return the reference card of a compute capability, or a GPU without rates if that card has another capability."""
    of = of_device(name, major, minor)
    reference = next((card for card in _CARDS if card.name == _REFERENCE.get(of.architecture)), None)
    if reference is not None and _capability(_words(reference.name)) == (major, minor):
        return _gpu(reference, reference.name)
    return of


def of_device(name: str, major: int | None, minor: int | None = None, vendor: str = "NVIDIA") -> Gpu:
    """Return the GPU for the properties of a device, from a trace or from torch.cuda.get_device_properties.

    ``major`` and ``minor`` are the CUDA compute capability; if None, it follows from the model in the name. A card that
    is not in the table, or a slice of a card (MIG), gets its architecture and no rates.
    """
    if vendor == "AMD":
        # AMD's matrix cores have their own kernel names and shape rules, which are unknown here.
        return Gpu(name or "AMD GPU", has_tensor_cores=None, vendor="AMD")
    words = _words(name)
    if major is None:
        major, minor = _capability(words) or (None, None)
    if not _SLICE.search(words):
        for card in _CARDS:
            if re.search(rf"(?<![a-z0-9])(?:{card.pattern})(?!\d)", words) and (
                major is None or architecture_of(major, minor) == card.architecture
            ):
                return _gpu(card, name)
    if major is None:
        return Gpu(name, has_tensor_cores=None, vendor=vendor)
    if major < 7 or _TURING_WITHOUT.search(words):
        return Gpu(name, has_tensor_cores=False)
    architecture = architecture_of(major, minor)
    return Gpu(name, architecture, has_tensor_cores=bool(architecture) or None)


def architecture_of(major: int, minor: int | None = None) -> str:
    """Return the architecture of a CUDA compute capability; "" if it has no Tensor Cores or is not known here."""
    if (major, minor) in ((7, 5), (8, 9)):
        return {7: "turing", 8: "ada"}[major]
    return {7: "volta", 8: "ampere", 9: "hopper", 10: "blackwell", 11: "blackwell", 12: "blackwell"}.get(major, "")


def _gpu(card: _Card, name: str) -> Gpu:
    rates = {
        "float16": card.half,
        "bfloat16": card.half,
        "tfloat32": card.tf32,
        "float8": card.fp8,
        "int8": card.int8,
        "float64": card.fp64,
        "float4": card.fp4,
    }
    return Gpu(
        name=name,
        architecture=card.architecture,
        has_tensor_cores=True,
        tensor_core_tflops={
            dtype: rate
            for dtype, rate in rates.items()
            if rate is not None and dtype in TENSOR_CORE_DTYPES[card.architecture]
        },
        cuda_core_tflops={"float32": card.fp32, "float16": card.half_cores},
        bandwidth_gb_s=card.bandwidth,
        sms=card.sms,
    )
