"""Read a kernel's architecture, operand dtypes, required alignment and kind from its name."""

from __future__ import annotations

import re

from mpinspect.kernels.names.rules import MMA, MMA_DIGITS
from mpinspect.runtime.gpus import architecture_of

#: Patterns start with plain letters, which re finds quickly in names of a thousand characters.
_SM = re.compile(r"sm_?(\d{2,3})[af]?(?!\d)")
_CUTLASS = re.compile(r"cutlass_(\d{2})(?!\d)")
_WORDS = ("volta", "turing", "ampere", "hopper", "blackwell")

#: Architectures by the digits of the mma instruction, for names without other signs: m8n8k4 is Volta's, m16n8k8 Turing's.
_INSTRUCTIONS = {"884": "volta", "1688": "turing", "8816": "turing", "8832": "turing"}
#: Architectures by other signs; the first one found counts.
_SIGNS = (("nvjet_", "hopper"), ("fmhasm100", "blackwell"), ("wgmma", "hopper"))

#: Spellings of dtypes, with a pattern for those that other words can contain; the first one found in a name counts. FP32 is
#: excluded because it is often the accumulator's dtype.
_DTYPES = tuple(
    (word, re.compile(pattern or word), dtype)
    for word, pattern, dtype in (
        # A block's scale precedes its elements' dtype: ue4m3xf4.
        ("e2m1", "", "float4_e2m1fn_x2"),
        ("xf4", "xf4(?![0-9])", "float4_e2m1fn_x2"),
        ("e4m3", "(?<!u)e4m3", "float8_e4m3fn"),
        ("e5m2", "", "float8_e5m2"),
        ("tf32", "", "tfloat32"),
        ("bf16", "", "bfloat16"),
        ("bfloat16", "", "bfloat16"),
        ("fp16", "(?<!b)fp16", "float16"),
        ("f16", "(?<![a-z])f16", "float16"),
        ("half", "(?<!b)half", "float16"),
        ("int8", "", "int8"),
        ("i8i8", "", "int8"),
        ("f64", "(?<![a-z])f64", "float64"),
        ("double", "", "float64"),
    )
)
_NVJET = re.compile(r"nvjet_(?:sm\d+_)?([a-z]{3,5})_")
_NVJET_LETTERS = {
    "h": "float16",
    "t": "bfloat16",
    "s": "float32",
    "o": "float4_e2m1fn_x2",
    "q": "float8_e4m3fn",
    "r": "float8_e5m2",
    "d": "float64",
}
_MMA, _DIGITS = re.compile(MMA), MMA_DIGITS.split()
_BLAS = re.compile(r"(?:^|[^a-z])(?:g?)([shdczi])gemm")
_BLAS_LETTERS = {"s": "float32", "h": "float16", "d": "float64", "c": "complex64", "z": "complex128", "i": "int8"}
_ALIGNMENT = re.compile(r"(?:align[abc]?|ldg)(\d+)")

#: Operands of mma instructions by a word in the name.
_NARROW = tuple(row for row in _DTYPES if row[2].startswith(("float8", "float4")))
_OF_MMA = (("bf16", "bfloat16"), ("tf32", "tfloat32"), ("f16", "float16"), ("fp16", "float16"))

#: Kinds by words, "gemm" without any; the first one found counts. Attention and recurrent layers have precedence: their
#: rates are not judged.
_KINDS = (
    ("recurrent", ("rnn", "lstm")),
    (
        "attention",
        ("attention", "attn", "fmha", "_mha", "sdpa", "flash_fwd", "flash_bwd", "mqa_logits", "_mla_", "mla_decode"),
    ),
    ("gemm", ("matmul",)),
    ("convolution", ("fprop", "dgrad", "wgrad", "conv", "cudnn", "implicit_gemm", "gtcx")),
)


def architecture(lowered: str, digits: str) -> str:
    """Return the architecture a kernel was built for, "any" if unknown. ``digits``: the mma instruction's, or ""."""
    for word in _WORDS:
        if f"{word}_" in lowered:
            return word
    number = _compute_capability(lowered)
    if number:
        return architecture_of(number // 10, number % 10) or "any"
    # Two CTAs per tile and block-scaled operands exist only from Blackwell on.
    if "nvjet_" in lowered and any(sign in lowered for sign in ("2cta", "ue8m0", "ue4m3")):
        return "blackwell"
    for sign, built_for in _SIGNS:
        if sign in lowered:
            return built_for
    return _INSTRUCTIONS.get(digits, "ampere" if digits else "any")


def _compute_capability(lowered: str) -> int | None:
    if "sm" in lowered:
        for found in _SM.finditer(lowered):
            start = found.start()
            if start == 0 or not lowered[start - 1].isalnum():
                return int(found.group(1))
    built_for = _CUTLASS.search(lowered)
    return int(built_for.group(1)) if built_for else None


def instruction(lowered: str) -> tuple[str, str]:
    """Return a name's mma instruction: the accumulator's letter ("m" for names with mma) and the digits, or ("", "")."""
    for each in _DIGITS:
        if each in lowered:
            if found := _MMA.search(lowered):
                return found.group().strip("g")[0], found.group(1)
            break
    return "", ""


def dtypes(lowered: str, letter: str, digits: str) -> tuple[str, ...]:
    """Return the operands' dtypes in a name, by torch's names or "tfloat32"; () without a dtype."""
    if "nvjet_" in lowered:
        return _nvjet_dtypes(lowered)
    if digits:
        return _of_mma(lowered, letter, digits)
    for word, pattern, dtype in _DTYPES:
        if word in lowered and pattern.search(lowered):
            return (dtype,)
    if "hmma" in lowered:
        return ("float16",)
    if "gemm" in lowered and (blas := _BLAS.search(lowered)):
        return (_BLAS_LETTERS[blas.group(1)],)
    if any(sign in lowered for sign in ("f32f32", "scudnn", "<float", "_f32")):
        return ("float32",)
    return ()


def alignment(lowered: str) -> int | None:
    """Return the smallest alignment of an operand, in elements, by the name (_align2, aligna4_alignc4, ldg8), or None."""
    return min(map(int, _ALIGNMENT.findall(lowered)), default=None)


def kind(lowered: str) -> str:
    """Return the kind of product that a Tensor Core kernel computes, by its name."""
    for name, words in _KINDS:
        if any(word in lowered for word in words):
            return name
    return "gemm"


def _nvjet_dtypes(lowered: str) -> tuple[str, ...]:
    """Return the dtypes of A and B from nvjet_<A><B><C><compute><D>, or from three letters if A and B are equal."""
    jet = _NVJET.search(lowered)
    if jet is None:
        return ()
    operands = jet[1][:2] if len(jet[1]) == 5 else jet[1][:1]
    return tuple(dict.fromkeys(_NVJET_LETTERS[letter] for letter in operands if letter in _NVJET_LETTERS))


def _of_mma(lowered: str, letter: str, digits: str) -> tuple[str, ...]:
    if digits in ("8816", "8832", "16832", "16864"):
        # m16n8k32 multiplies int8 or FP8, m16n8k64 int4 or FP4.
        return next(((dtype,) for _, pattern, dtype in _NARROW if pattern.search(lowered)), ("int8",))
    if letter in ("d", "z"):
        return ("float64",)
    for word, dtype in _OF_MMA:
        if word in lowered:
            return (dtype,)
    if letter == "h" or digits == "884":
        return ("float16",)
    # s1688 without another dtype reads FP32 operands as TF32 (CUTLASS's procedural names).
    return ("tfloat32",) if digits in ("1688", "1684") else ()
