"""NVIDIA's GPUs as data: architecture, the dtypes that their Tensor Cores multiply, and peak rates for rooflines.

Rates are dense (without structured sparsity) peaks in TFLOP/s at boost clock with FP32 accumulation, bandwidths in GB/s, as
NVIDIA's data sheets and architecture white papers give them (sources beside the rows): bounds, not what a kernel reaches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

ARCHITECTURES = ("volta", "turing", "ampere", "ada", "hopper", "blackwell")

#: dtype keys of the rates: torch's names, with "tfloat32" for FP32 storage, "float8" and "float4" for any such format.
_16_BIT = ("float16", "bfloat16")

#: What Tensor Cores multiply, by architecture (NVIDIA's tuning guides and white papers). FP64 only on the data-centre chips.
TENSOR_CORE_DTYPES = {
    "volta": ("float16",),
    "turing": ("float16", "int8"),
    "ampere": (*_16_BIT, "tfloat32", "int8", "float64"),
    "ada": (*_16_BIT, "tfloat32", "int8", "float8"),
    "hopper": (*_16_BIT, "tfloat32", "int8", "float64", "float8"),
    "blackwell": (*_16_BIT, "tfloat32", "int8", "float64", "float8", "float4"),
}

#: The card an architecture's name stands for in rooflines: its first data-centre one.
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
    """A GPU, or what is known of one.

    Args:
        name: the card, or what the device calls itself.
        architecture: one of ARCHITECTURES; "" where it is older, another vendor's or unknown.
        has_tensor_cores: None where unknown.
        tensor_core_tflops: peak by dtype; empty where unknown.
        cuda_core_tflops: peak without Tensor Cores by dtype ("float32", "float16"); empty where unknown.
        bandwidth_gb_s: peak memory bandwidth; None where unknown.
        vendor: "NVIDIA", "AMD" or "".
    """

    name: str
    architecture: str = ""
    has_tensor_cores: bool | None = None
    tensor_core_tflops: dict[str, float] = field(default_factory=dict, hash=False)
    cuda_core_tflops: dict[str, float] = field(default_factory=dict, hash=False)
    bandwidth_gb_s: float | None = None
    vendor: str = "NVIDIA"

    def multiplies(self, dtype: str) -> bool | None:
        """Whether its Tensor Cores multiply a dtype ("float32" means TF32, "float8_e4m3fn" float8); None where unknown."""
        if self.has_tensor_cores is None:
            return None
        if not self.has_tensor_cores:
            return False
        if self.tensor_core_tflops:
            return rate_key(dtype) in self.tensor_core_tflops
        if self.architecture not in TENSOR_CORE_DTYPES:
            return None
        known = rate_key(dtype) in TENSOR_CORE_DTYPES[self.architecture]
        # FP64 is in the Tensor Cores of an architecture's data-centre chips only, and this card is not in the table.
        return None if known and dtype == "float64" else known


def rate_key(dtype: str) -> str:
    """The key of the rates for a dtype's name: "float32" -> "tfloat32", "float8_e4m3fn" -> "float8"; others themselves."""
    if dtype == "float32":
        return "tfloat32"
    if dtype == "uint8":
        return "int8"
    return next((family for family in ("float8", "float4") if dtype.startswith(family)), dtype)


@dataclass(frozen=True)
class _Card:
    """A row of the table. ``half``: FP16 and (from Ampere on) BF16 Tensor Core peak; None: no such rate."""

    name: str
    pattern: str
    architecture: str
    half: float
    fp32: float
    half_cores: float
    bandwidth: float
    tf32: float | None = None
    eight_bit: float | None = None
    int8: float | None = None
    fp64: float | None = None
    four_bit: float | None = None


#: Patterns are searched in the device's name, first match wins: the special card before the general one.
_CARDS = (
    # Volta: V100 data sheet (2020); Titan V and GV100 product pages.
    _Card("V100 PCIe", r"V100-PCIE|V100S", "volta", 112, 14.0, 28.0, 900),
    _Card("V100 SXM2", r"V100", "volta", 125, 15.7, 31.4, 900),
    # Turing: T4 data sheet; Turing white paper (FP16 with FP32 accumulation, reference clocks).
    _Card("T4", r"\bT4\b", "turing", 65, 8.1, 16.2, 300, int8=130),
    _Card("RTX 2080 Ti", r"RTX 2080 Ti", "turing", 53.8, 13.4, 26.9, 616, int8=215.2),
    # Ampere: A100, A30, A10, A40 data sheets; GA102 white paper.
    _Card("A100 80GB PCIe", r"A100 80GB PCIe", "ampere", 312, 19.5, 78, 1935, 156, int8=624, fp64=19.5),
    _Card("A100 80GB", r"A100.*80GB", "ampere", 312, 19.5, 78, 2039, 156, int8=624, fp64=19.5),
    _Card("A100", r"A100", "ampere", 312, 19.5, 78, 1555, 156, int8=624, fp64=19.5),
    _Card("A30", r"\bA30\b", "ampere", 165, 10.3, 41.2, 933, 82, int8=330, fp64=10.3),
    _Card("A40", r"\bA40\b", "ampere", 149.7, 37.4, 37.4, 696, 74.8, int8=299.3),
    _Card("A10", r"\bA10\b", "ampere", 125, 31.2, 31.2, 600, 62.5, int8=250),
    _Card("RTX A6000", r"RTX A6000", "ampere", 154.8, 38.7, 38.7, 768, 77.4, int8=309.7),
    _Card("RTX 3090", r"RTX 3090(?! Ti)", "ampere", 71, 35.6, 35.6, 936, 35.6, int8=284),
    # Ada: L4, L40, L40S data sheets; Ada white paper.
    _Card("L40S", r"L40S", "ada", 362, 91.6, 91.6, 864, 183, eight_bit=733, int8=733),
    _Card("L40", r"\bL40\b", "ada", 181, 90.5, 90.5, 864, 90.5, eight_bit=362, int8=362),
    _Card("L4", r"\bL4\b", "ada", 121, 30.3, 30.3, 300, 60, eight_bit=242, int8=242),
    _Card("RTX 4090", r"RTX 4090(?! D| L)", "ada", 165.2, 82.6, 82.6, 1008, 82.6, eight_bit=330.3, int8=660.6),
    # Hopper: H100, H200 data sheets; Hopper white paper.
    _Card("H200", r"H200", "hopper", 989.4, 66.9, 133.8, 4800, 494.7, eight_bit=1978.9, int8=1978.9, fp64=66.9),
    _Card("H100 PCIe", r"H100 PCIe", "hopper", 756, 51.2, 102.4, 2000, 378, eight_bit=1513, int8=1513, fp64=51.2),
    _Card("H100 NVL", r"H100 NVL", "hopper", 835, 60, 120, 3900, 417.5, eight_bit=1671, int8=1671, fp64=60),
    _Card("H100", r"H100", "hopper", 989.4, 66.9, 133.8, 3350, 494.7, eight_bit=1978.9, int8=1978.9, fp64=66.9),
    # Blackwell: HGX B200 and GB200 data sheets, a GPU's share, without sparsity; RTX Blackwell white paper.
    _Card(
        "GB200", r"GB200", "blackwell", 2500, 80, 160, 8000, 1250, eight_bit=5000, int8=5000, fp64=40, four_bit=10000
    ),
    _Card("B200", r"B200", "blackwell", 2250, 75, 150, 8000, 1125, eight_bit=4500, int8=4500, fp64=37, four_bit=9000),
    _Card(
        "RTX 5090",
        r"RTX 5090(?! D| L)",
        "blackwell",
        209.5,
        104.8,
        104.8,
        1792,
        104.8,
        eight_bit=419,
        int8=838,
        four_bit=1676,
    ),
)


def named(text: str) -> Gpu:
    """An architecture ("hopper": the rates of its first data-centre card) or a card ("H100 PCIe"), case aside.

    Raises:
        ValueError: neither; the message lists what there is.
    """
    wanted = text.strip().lower()
    by_name = {card.name.lower(): card for card in _CARDS}
    if wanted in _REFERENCE:
        return _gpu(by_name[_REFERENCE[wanted].lower()], _REFERENCE[wanted])
    if wanted in by_name:
        return _gpu(by_name[wanted], by_name[wanted].name)
    raise ValueError(
        f"{text!r} is no GPU known here: give 'auto', an architecture ({', '.join(ARCHITECTURES)}) "
        f"or a card ({', '.join(card.name for card in _CARDS)})"
    )


def of_device(name: str, major: int | None, minor: int | None = None, vendor: str = "NVIDIA") -> Gpu:
    """The GPU that a device describes itself to be: a trace's deviceProperties, or torch.cuda.get_device_properties.

    ``major``, ``minor``: CUDA compute capability; None where the trace has none. A card that the table lacks gets its
    architecture and no rates.
    """
    if vendor == "AMD":
        # Matrix cores, not Tensor Cores, with kernel names and shape rules of their own: nothing here applies to them.
        return Gpu(name or "AMD GPU", has_tensor_cores=None, vendor="AMD")
    for card in _CARDS:
        if re.search(rf"(?:{card.pattern})(?!\d)", name) and (
            major is None or architecture_of(major, minor) == card.architecture
        ):
            return _gpu(card, name)
    if major is None:
        return Gpu(name, has_tensor_cores=None, vendor=vendor)
    architecture = architecture_of(major, minor)
    # TU116 and TU117 (GTX 16xx, T400..T1200, MX450/550) say 7.5 as Turing does and have no Tensor Cores (Turing white paper).
    lacks = major < 7 or re.search(r"GTX 16\d\d|\bT(400|500|550|600|1000|1200)\b|MX[45]50", name) is not None
    return Gpu(name, "" if lacks else architecture, has_tensor_cores=not lacks if architecture or lacks else None)


def architecture_of(major: int, minor: int | None = None) -> str:
    """The architecture of a CUDA compute capability; "" for one without Tensor Cores or not known here."""
    if major == 7:
        return "turing" if minor == 5 else "volta"
    if major == 8:
        return "ada" if minor == 9 else "ampere"
    return {9: "hopper", 10: "blackwell", 11: "blackwell", 12: "blackwell"}.get(major, "")


def _gpu(card: _Card, name: str) -> Gpu:
    rates = {
        "float16": card.half,
        "bfloat16": card.half if "bfloat16" in TENSOR_CORE_DTYPES[card.architecture] else None,
        "tfloat32": card.tf32,
        "float8": card.eight_bit,
        "int8": card.int8,
        "float64": card.fp64,
        "float4": card.four_bit,
    }
    return Gpu(
        name=name,
        architecture=card.architecture,
        has_tensor_cores=True,
        tensor_core_tflops={dtype: rate for dtype, rate in rates.items() if rate is not None},
        cuda_core_tflops={"float32": card.fp32, "float16": card.half_cores},
        bandwidth_gb_s=card.bandwidth,
    )
