"""What a kernel's name tells about Tensor Cores, as data: the first rule that matches decides.

A rule looks at the name in lower case. ``any_of`` are plain substrings, one of which must be there, ``none_of`` such as must not:
they make a thousand names cheap. ``pattern`` is a regular expression that must match too, if given. A new kind of kernel is a
new line here, with its source.
Sources: "traces": names in public torch.profiler traces (tests/data/traces); "labelled": tests/data/kernel_names.tsv; else
the library whose source or documentation has the name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

#: Changes whenever a rule does; every report carries it.
RULES_VERSION = "2026.11"

VERDICTS = ("native", "degraded", "off", "helper", "unknown", "other")


@dataclass(frozen=True)
class Rule:
    """One line of the table.

    Args:
        id: name of the rule, in reports.
        verdict: one of VERDICTS but "degraded", which takes evidence beside the name's family.
        kind: "gemm", "convolution", "attention", "recurrent", "gemv", "communication" or "" (no product, or any).
        any_of: lower-case substrings.
        meaning: completes "this is ...".
        source: where the name was seen or is defined.
        pattern: regular expression on the lower-case name, or "".
        none_of: lower-case substrings that rule it out.
        any_architecture: the name's prefix is not the GPU: cuBLAS runs volta_sgemm on a Turing card.
    """

    id: str
    verdict: str
    kind: str
    any_of: tuple[str, ...]
    meaning: str
    source: str
    pattern: str = ""
    none_of: tuple[str, ...] = ()
    any_architecture: bool = False
    regex: re.Pattern[str] | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "regex", re.compile(self.pattern) if self.pattern else None)


#: Shapes of one mma instruction (m8n8k4, m16n8k8, ...) as cuBLAS, cuDNN and CUTLASS write them, behind the letter of what
#: they accumulate in. Anchored on both sides: 884 inside another number is nothing.
MMA = r"(?:(?<![a-z0-9])g?[hsidcz]|mma_?)(884|1684|1688|16816|161616|8816|8832|16832|16864|168128|168256)(?!\d)"

#: What of their digits must be in a name for that: "168" is in 1684, 1688, 16816, 16832, ...
MMA_DIGITS = ("884", "168", "1616", "8816", "8832")

RULES = (
    # -- not products, and the most frequent names: decided first ---------------------------------------------------
    Rule(
        "torch-native",
        "other",
        "",
        ("at::native::", "at_cuda_detail", "at::cuda::", "_zn2at6native"),
        "one of torch's own kernels: no matrix product",
        "traces; torch, aten/src/ATen/native/cuda",
        none_of=(
            "cutlass",
            "tensorop",
            "depthwise",
            "dwconv",
            "im2col",
            "col2im",
            "vol2col",
            "col2vol",
            "grouped_gemm",
        ),
    ),
    Rule(
        "normalisation-and-sorting",
        "other",
        "",
        ("cudnn::bn_", "cub::", "softmax", "norm", "multi_tensor"),
        "normalisation, softmax, sorting or an optimizer: no matrix product",
        "traces; cuDNN, CUB, apex",
        none_of=("gemm", "mma", "attention", "attn", "flash", "fmha", "sdpa", "nvjet"),
    ),
    Rule(
        "embedding",
        "other",
        "",
        ("embedding", "fbgemm_gpu"),
        "an embedding table's kernel: no matrix product, though its library is named after one",
        "traces; FBGEMM",
        none_of=("tensorop",),
    ),
    Rule(
        "communication",
        "other",
        "communication",
        ("ccl", "nvshmem", "allreduce", "all_reduce", "cross_device", "multimem"),
        "communication between GPUs",
        "traces; NCCL",
    ),
    Rule(
        "amd-tensile",
        "unknown",
        "gemm",
        ("cijk_",),
        "AMD's Tensile product: matrix cores are not Tensor Cores",
        "traces; Tensile",
    ),
    Rule(
        "small-gemm",
        "off",
        "gemm",
        ("gemmsn_", "gemmk1_", "gemm_small", "tinygemm_kernel"),
        "cuBLAS's product of a very small dimension: CUDA cores",
        "traces; cuBLAS",
    ),
    Rule(
        "gemv",
        "off",
        "gemv",
        ("gemv", "dot_kernel", "gevv", "dotc", "reduce_1block"),
        "a matrix-vector or scalar product: bound by memory, CUDA cores",
        "labelled; traces; cuBLAS",
        none_of=("triton", "flash"),
    ),
    Rule(
        "torch-depthwise",
        "off",
        "convolution",
        ("depthwise", "dwconv"),
        "torch's own depthwise convolution: CUDA cores",
        "torch, DepthwiseConv2d.cu",
    ),
    Rule(
        "torch-im2col",
        "helper",
        "convolution",
        ("im2col", "col2im", "col2vol", "vol2col"),
        "the unfolding beside a convolution",
        "torch, im2col.cuh",
    ),
    Rule(
        "torch-grouped-gemm-setup",
        "helper",
        "gemm",
        ("grouped_gemm",),
        "the set-up of a grouped product",
        "torch, GroupMM.cu",
        r"(?:prepare|compute)_grouped_gemm",
    ),
    Rule(
        "triton-fused",
        "other",
        "",
        ("triton_",),
        "Inductor's fused pointwise or reduction kernel; a product in its name is the one it follows",
        "torch, inductor's kernel names",
        r"triton_(?:poi|red|per|for|split_scan)_",
    ),
    # -- beside products --------------------------------------------------------------------------------------------
    Rule(
        "split-k-reduce",
        "helper",
        "gemm",
        ("splitk", "gemmk_reduce"),
        "the sum of a product's partial results",
        "labelled; cuBLAS, CUTLASS",
        r"splitk_?reduce|reducesplitk|gemmk_reduce",
    ),
    Rule(
        "layout",
        "helper",
        "",
        ("nhwc", "tensortransform", "converttensor"),
        "a layout conversion beside a product",
        "labelled; cuDNN",
        r"nchwtonhwc|nhwctonchw|nchw2nhwc|nhwc2nchw|nhwcaddpadding|foldednhwc|tensortransform|converttensor",
        none_of=("tensorop", "xmma", "hmma", "16816", "1688", "884"),
    ),
    Rule(
        "convolution-setup",
        "helper",
        "convolution",
        ("offsetskernel", "kern_precompute", "reduce_wgrad"),
        "the set-up of a convolution, or the sum of its parts",
        "traces; cuDNN",
    ),
    Rule(
        "gemm-epilogue",
        "helper",
        "gemm",
        ("epilogue::impl::globalkernel", "scal_kernel", "scalepackedtensor"),
        "the bias or scale that follows a product",
        "traces; cuBLASLt, cuDNN",
    ),
    Rule(
        "attention-setup",
        "helper",
        "attention",
        ("flash",),
        "preparation or conversion beside attention",
        "labelled; flash-attention",
        r"flashattn(?:bwdpreprocess|bwdpostprocess|fwdcombine)|flash_bwd_(?:dot_do_o|convert|clear)|splitkv_combine",
    ),
    # -- attention --------------------------------------------------------------------------------------------------
    Rule(
        "efficient-attention-cuda-cores",
        "off",
        "attention",
        ("fmha_cutlass",),
        "memory-efficient attention built for a GPU, or FP32 on one, without fitting Tensor Cores: SIMT",
        "torch, mem_eff_attention/kernels (Sm50 has none, FP32 below Sm80 is SIMT)",
        r"fmha_cutlass[fb]_(?:\w*_sm5\d|\w*_sm6\d|f32_\w*_sm7\d)",
    ),
    Rule(
        "efficient-attention",
        "native",
        "attention",
        ("fmha_cutlass",),
        "memory-efficient attention on Tensor Cores (FP32 as three TF32 products)",
        "labelled; torch, mem_eff_attention/kernels",
        r"fmha_cutlass[fb]_(?:f16|bf16|f32)",
    ),
    Rule(
        "flash-attention",
        "native",
        "attention",
        ("flash", "fmhasm100", "fmha_v2"),
        "flash attention",
        "labelled; traces; flash-attention",
        r"flash_(?:fwd|bwd|attn)|flashattn(?:fwd|bwd)|flash::|fmhasm100|fmha_v2",
    ),
    Rule(
        "cudnn-attention",
        "native",
        "attention",
        ("sdpa", "cudnn_mha"),
        "cuDNN's fused attention",
        "labelled; cuDNN",
        r"cudnn.*sdpa|cudnn_mha|sdpa_sm\d+",
    ),
    # -- Tensor Cores, said by the name -----------------------------------------------------------------------------
    Rule(
        "mma-digits",
        "native",
        "",
        MMA_DIGITS,
        "built on an mma instruction that its name spells",
        "labelled; traces; cuBLAS, cuDNN, CUTLASS",
        MMA,
    ),
    Rule(
        "tensorop",
        "native",
        "",
        ("tensorop", "hmma", "imma_", "_imma", "dmma", "wgmma", "tcgen05", "utcmma", "umma_"),
        "a kernel whose name says Tensor Core",
        "labelled; traces; CUTLASS, cuDNN",
    ),
    Rule(
        "nvjet",
        "native",
        "gemm",
        ("nvjet_",),
        "cuBLAS's nvjet family, all of which is Tensor Core",
        "labelled; cuBLAS on Hopper and later",
    ),
    Rule(
        "xmma-cuda-cores",
        "off",
        "",
        ("xmma",),
        "an xmma kernel of FP32 multiply-adds (ffma): CUDA cores",
        "labelled; cuBLAS",
        r"xmma.*ffma",
    ),
    Rule(
        "xmma",
        "native",
        "",
        ("xmma",),
        "an xmma kernel whose operands only Tensor Cores multiply",
        "labelled; traces; cuBLAS, cuDNN",
        r"xmma.*(?:_tensor\d+x\d+x\d+|tf32|bf16|(?<![a-z])f16f16|(?<![a-z])f16_|i8i8|e4m3|e5m2)",
    ),
    Rule(
        "xmma-unknown",
        "unknown",
        "",
        ("xmma",),
        "an xmma kernel that names neither ffma nor operands that only Tensor Cores multiply",
        "cuBLAS, cuDNN",
    ),
    Rule(
        "trtllm-bmm",
        "native",
        "gemm",
        ("bmm_", "gemm_"),
        "a generated product for Blackwell's Tensor Cores",
        "TensorRT-LLM, trtllm-gen kernels",
        r"(?<![a-z0-9])(?:bmm|gemm)_[a-z0-9]+_.*sm1\d\d[af]?(?![0-9])",
    ),
    Rule("deep-gemm", "native", "gemm", ("deep_gemm::",), "DeepGEMM's FP8 or BF16 product", "DeepGEMM"),
    Rule(
        "marlin",
        "native",
        "gemm",
        ("marlin::", "marlin<", "machete::"),
        "a product of quantised weights by mma instructions",
        "vLLM, csrc/quantization",
        r"(?:marlin\w*(?:::|<)|machete::)(?!.*repack)",
    ),
    Rule(
        "cutlass-simt", "off", "", ("simt",), "CUTLASS on CUDA cores (SIMT)", "labelled; CUTLASS", any_architecture=True
    ),
    Rule(
        "cutlass-device-gemm",
        "native",
        "gemm",
        ("device_kernel",),
        "a CUTLASS 3 product: collectives for Tensor Cores",
        "CUTLASS 3; mangled in traces of SGLang",
        r"device_kernel.*gemm",
    ),
    Rule(
        "cutlass-opaque",
        "unknown",
        "gemm",
        ("device_kernel", "cutlass::kernel", "cutlass6kernel", "cutlass7kernel2"),
        "a CUTLASS kernel whose template argument hides what it computes",
        "labelled; CUTLASS 3",
    ),
    # -- CUDA cores -------------------------------------------------------------------------------------------------
    Rule(
        "cuda-core-gemm",
        "off",
        "gemm",
        ("sgemm", "dgemm", "hgemm", "cgemm", "zgemm", "igemm"),
        "a product on CUDA cores: no mma instruction in its name",
        "labelled; traces; cuBLAS",
        any_architecture=True,
    ),
    Rule(
        "scudnn",
        "off",
        "convolution",
        ("scudnn", "hcudnn", "icudnn", "winograd"),
        "cuDNN's convolution on CUDA cores",
        "labelled; traces; cuDNN",
        any_architecture=True,
    ),
    Rule(
        "fft-convolution",
        "off",
        "convolution",
        ("fft2d_", "fft1d_", "fft3d_"),
        "the transform of an FFT convolution: CUDA cores",
        "traces; cuDNN",
    ),
    Rule(
        "cudnn-engines",
        "off",
        "convolution",
        (
            "wgrad_alg",
            "dgrad_engine",
            "dgrad2d_",
            "wgrad2d_",
            "dgrad_alg",
            "convolve_sgemm",
            "convolve_common_engine",
            "conv2d_grouped_direct",
            "conv2d_c1_k1",
            "grouped_direct_kernel",
            "first_layer",
            "convolution_kernel_direct",
        ),
        "cuDNN's older engines: CUDA cores",
        "traces; cuDNN",
    ),
    # -- what no name can tell --------------------------------------------------------------------------------------
    Rule(
        "triton-attention",
        "unknown",
        "attention",
        ("triton_tem_", "unified_attention", "_attn_fwd", "_attn_bwd", "flex_attention", "paged_attention"),
        "a Triton or custom attention: the name cannot tell",
        "torch, inductor's templates; vLLM",
        r"attention|attn",
    ),
    Rule(
        "triton-product",
        "unknown",
        "gemm",
        ("triton_tem_", "triton_mm", "triton_bmm", "triton_", "_matmul", "matmul_"),
        "a Triton product: the name cannot tell",
        "labelled; torch, inductor's templates; traces",
        r"triton_tem_|triton_\w*mm|matmul(?!_scatter)",
    ),
    Rule(
        "triton-other",
        "other",
        "",
        ("triton_",),
        "a Triton kernel that names no product",
        "traces; torch, inductor's kernel names",
    ),
    Rule(
        "persistent-recurrent",
        "unknown",
        "recurrent",
        ("persist", "rnn_"),
        "cuDNN's persistent recurrent kernel: the name cannot tell",
        "cuDNN",
        r"rnn_\w*persist|persist\w*rnn|persistent_(?:lstm|gru)",
    ),
    Rule(
        "opaque-product",
        "unknown",
        "gemm",
        ("gemm", "_mm_", "matmul"),
        "a product by its name, of a family not known here",
        "none",
        r"(?<!fb)gemm|(?<![a-z])b?mm_|matmul(?!_scatter)",
    ),
    Rule(
        "opaque-convolution",
        "unknown",
        "convolution",
        ("conv", "fprop", "wgrad", "dgrad"),
        "a convolution by its name, of a family not known here",
        "none",
        r"conv(?:\d?d|olution|olve|_)|fprop|wgrad|dgrad",
    ),
    Rule(
        "opaque-attention",
        "unknown",
        "attention",
        ("attention", "fmha"),
        "attention by its name, of a family not known here",
        "none",
        r"(?:attention|fmha)(?!\w*(?:mask|reduce|combine|cache))",
    ),
)

#: What is left: elementwise kernels, reductions, normalisations, optimizers, embeddings, copies.
OTHER = Rule("other", "other", "", ("",), "no matrix product", "none")

#: One line a substring: first_match walks it without inner loops, since traces have thousands of names.
_TABLE = tuple((literal, rule) for rule in RULES for literal in rule.any_of)


def first_match(lowered: str) -> Rule:
    """The rule that decides about a name in lower case."""
    for literal, rule in _TABLE:
        if (
            literal in lowered
            and (rule.regex is None or rule.regex.search(lowered))
            and not any(each in lowered for each in rule.none_of)
        ):
            return rule
    return OTHER
