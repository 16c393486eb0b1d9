"""Define the rules on kernel names and Tensor Cores as data: the first rule that matches decides.

Families have precedence: libraries whose kernels are known by name. A name outside all families is judged by its words. A word
for products makes it a product on an unknown unit. A word for elementwise or similar work makes it not a product. Words that
move data or find its place do so too, if every word of the name is known here. The verdict on all other names is "unknown",
never "other".
To support a new kind of kernel, add a rule here, with its source, and a row of tests/data/kernel_names.tsv that it decides.
Sources: "traces": names in public torch.profiler traces (tests/data/traces, TraceLens, HolisticTraceAnalysis); "labelled":
tests/data/kernel_names.tsv; else the library whose source or documentation has the name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from mpinspect.kernels.names.spelling import Spelling, with_words_apart

#: Version of the rules, included in every report; change it with every change to the rules.
RULES_VERSION = "2026.17"

VERDICTS = ("native", "degraded", "off", "helper", "unknown", "other")


@dataclass(frozen=True)
class Rule:
    """A verdict on names; names are matched in lower case and without their parameters.

    Args:
        id: id of the rule in reports.
        verdict: any of VERDICTS except "degraded", which needs more evidence than a name's family.
        kind: "gemm", "convolution", "attention", "recurrent", "gemv", "communication" or "" (not a product, or any kind).
        any_of: substrings, separated by spaces; the name must have at least one: a cheap check before the pattern;
            "" allows any name.
        meaning: the end of the sentence "this is ...".
        source: where the name was seen or is defined.
        pattern: a regular expression that the name must match too, or "".
        none_of: substrings that must not be in the name.
        own: whether to match only the function with its namespaces, and not the template arguments.
        any_architecture: whether the name's prefix is independent of the GPU (cuBLAS runs volta_sgemm on a Turing card).
        since: the first architecture whose Tensor Cores the kernel uses, if it also runs on older ones.
    """

    id: str
    verdict: str
    kind: str
    any_of: str
    meaning: str
    source: str
    pattern: str = ""
    none_of: tuple[str, ...] = ()
    own: bool = False
    any_architecture: bool = False
    since: str = ""

    @cached_property
    def regex(self) -> re.Pattern[str] | None:
        """The compiled pattern; compiling all of them would take as long as importing numpy."""
        return re.compile(self.pattern) if self.pattern else None

    def decides(self, text: str) -> bool:
        """Return whether a lower-case text, which has one of ``any_of``, satisfies ``pattern`` and ``none_of``."""
        return (self.regex is None or self.regex.search(text) is not None) and not any(
            each in text for each in self.none_of
        )


#: Shapes of one mma instruction (m8n8k4, m16n8k8, ...) as cuBLAS, cuDNN and CUTLASS write them, after the letter of the
#: accumulator's dtype, and spconv after the width of its loads (k32A1T1688). Anchored on both sides, so that 884 inside another
#: number does not match.
MMA = r"(?:(?<![a-z0-9])g?[hsidcz]|(?<=\da\d)t|mma_?)(884|1684|1688|16816|161616|8816|8832|16832|16864|168128|168256)(?!\d)"

#: Substrings such that every match of MMA contains at least one: "168" is in 1684, 1688, 16816, 16832, ...
MMA_DIGITS = "884 168 1616 8816 8832"

#: The beginning and the end of a word in lower case.
_B, _E = r"(?<![a-z])(?:", r")(?![a-z])"

#: Words of matrix products, in names of functions and operators.
PRODUCT_WORDS = (
    r"(?<!fb)gemm|gmm|mat(?:rix|rices)?_?(?:mul|prod)|mul_?mat|(?:block|tiled?)_?mul|(?<![a-z])mmul|tensordot|einsum|conv(?:\d?d|olution|olve|_|fwd|bwd)|(?<!relu_)(?<!moid_)(?<!add_)fprop|dgrad"
    r"|wgrad|blockscaled|attend|attention|attn|fmha|prefill|flash_?(?:fwd|bwd|decod|packed|kda)|mhsa|mqa_?logits|lightning_?indexer|kernel_stage1|marlin"
    r"|__myl_\w*(?:fc|gemm|matmul|mha)|moe_?(?:kernel|mlp|fwd|bwd|gemm|forward|fused)|delta_?rule|chunk_(?:scan|state)_|chunk(?:wise)?_(?:\w+_)?(?:fwd|bwd)_\w*kernel"
    r"|intra_sub|delta_?net|indexer|block_?scores?|hadamard|_rht_|solve_tril|rotate_quant|recompute_w|wy_repr|householder|\d+x\d+_inverse|delta_product|deltaformer|[bs]gmv"
    rf"|{_B}b?mm|dot|att|mha|mla|mqa|gqa|sdpa|xqa|moe|mlp|(?<!upsample_)(?<!quantize_)linear|decode|kkt|[aw]\d+_?[aw](?:\w?fp)?\d+|experts?|nsa|fc\d*|proj|projection|lm_head|lora|sdd|dsd|dds|kda|gla|gdn{_E}"
)

#: Words for work that accompanies a product: a kernel with one of these in its name computes no product itself ...
HELPER_WORDS = (
    r"(?<!all)(?<!all_)reduc(?!e_?scatter)|per_token_group_quant|finali[sz]e|(?<!chunk_)pre_?process|post_?process|prep_|metadata|repack|prepack"
    r"|_to_marlin|workspace|fixup|align_?block|permut|indices|_ids|expert_id_|histogram|prefix_?sum|sort|top_?k|merge_?(?:states?|attn|vec|kernel|q(?![a-z]))"
    r"|kernel_stage2|decode_stage2|vsm_stage2|_odo_|_args|convert|(?<!broad)cast_|(?:store|append|write|copy|update|concat|quant|and|cat)\w*cache"
    r"|cache_(?:copy|store|update)|_trans_|attentionsum|advance_step|smooth|mask_to|mask_kernel|softmax(?!_gemm)|dequant|layout|(?<!pre)shuffle"
    r"|rope|rotary|aux_loss|norm_kernel|_helper|moe_sum|expand_?(?:input|to)|strides|expert_?map|qkvzba|_cat_kernel|_info"
    r"|(?:pre|post)_attn|(?<!gemm_)(?:moe|experts?)_combine|memcpy|memset|(?<![a-z])cop(?:y|ies)(?![a-z])|prefill_cache"
    r"|per_tensor_(?:amax|quant|scale)|states_fwd|varlen_states|gate_(?:fwd|bwd)|save_|init_|fused_recurrent|src2dst|(?:re|out|in)puts_kernel"
    r"|^\W*_?(?:kernel_cutlass_kernel::)?(?:prepare(?!_\w*wy)|build|set|get|store|stage|alloc|compact|commit|update|assign|insert|count|plan|gen|generate|calc|(?:silu|gelu|act)_(?:and_)?mul|(?:pre|post)_reorder)_"
)
#: ... unless the product is the name's verb.
_PRODUCT_VERB = (
    r"(?:gemm|matmul|moe)_kernel|moe_gemm|decode_stage1|fused_\w*(?:(?<!fb)gemm|bmm)"
    r"|gemm_\w*_(?:quant_kernel|split_cat)|gemm_\w*fusion|dequant\w*gemm|kernel_stage1"
)

#: Verbs that move data without arithmetic, and data. Neither proves anything alone: a product gathers its rows too.
_MOVES = (
    r"gather|scatter|shift|move|store|save|load|write|read|get|set|put|insert|append|push|pop|pull|dispatch|extract|expand|evict"
    r"|drop|verify|collect|offload|assign|flatten"
)
_DATA = r"tokens?|ep|inputs?|rows?|ranks?|buffers?|entry|entries|elements?|samples?|reqs?|slots?|drafts?|pages?|halos?|tables?"
#: Verbs that find out where data lies, and such places and numbers.
_FINDS = rf"to|calc(?:ulate)?|compute|find|gen(?:erate)?|make|create|advance|filter|mark|record|prepare|build|update|{_MOVES}"
_PLACES = (
    r"index|idx|addr(?:s|ess|esses)?|offsets?|locs?|locations?|ids?|lens?|lengths?|seqlens?|masks?|ranks?|ptrs?|tables?|flags?"
    r"|bounds|boundaries|ranges?|buckets?|mapping|capacity|owners?|inputs|cu_blocks"
)
#: Torch's pointwise operators whose names are also words for tiles and modes.
_POINTWISE = r"eq|ne|ge|gt|le|lt|round|sign|square|threshold|tan|angle|not|and|or|xor|rsub|copysign|addr|diff|swap"
#: Words that name no operation: the kernel's form, its dtypes and its data.
_NEUTRAL = (
    r"[a-z]|kernel|ker|impl|triton|cuda|jit|func|function|fwd|bwd|forward|backward|fw|bw|fused|fast|simple|naive|vec|vectorized?|bf|fp|half"
    r"|float|double|int|uint|from|by|of|in|on|for|with|the|per|last|first|next|prev|current|new|old|cur|num|total|local|global|same|batch"
    r"|batched|flat|dim|along|col|device|host|gpu|cpu|output|src|dst|source|target|out|grad|seq|sequence|requests?|spec|speculative|single|multi|static"
    r"|dynamic|large|small|opt|optimized|strided|contiguous|varlen|paged|ragged|jagged|padded|binned|masked|kv|blocks?|inplace|tensor"
    r"|scalar|op|one|two|step|cu|cutlass"
)
#: A function that moves data or finds out where it lies, and whose last name has no word that is not listed above.
_MOVES_ONLY = (
    rf"(?:^|::)(?=(?=\w*{_B}{_MOVES}{_E})\w*{_B}{_DATA}{_E}|(?=\w*{_B}{_FINDS}{_E})\w*{_B}{_PLACES}{_E}"
    rf"|\w*{_B}{_POINTWISE}{_E})"
    rf"(?!\w*(?<![a-z])(?!{_B}{'|'.join((_MOVES, _DATA, _FINDS, _PLACES, _POINTWISE, _NEUTRAL))}{_E})[a-z])\w+$"
)

#: Words for products of few rows, which CUDA cores compute as dot products.
_FEW_ROWS = r"gemv|skinny|decode|dot_?prod"
#: Words, in the names of classes, for work that prepares, plans or inspects a product.
_PLANS = r"(?<![a-z])(?:prepare|schedule|plan|build|inspect|reset|gather|scatter|routes?|sparsity|convert|sum|combine)(?![a-z])"

#: Words for elementwise kernels, reductions, normalisations, sorting, copies, random numbers, optimizers, losses, bookkeeping.
OTHER_WORDS = (
    r"element_?wise|el(?:em|t)_?wise|pointwise|element_|reduc|softm|soft_?(?:max|cap)|sparsemax|norm|welford|memset|memcpy|copy|copies|quant|transpos|permut"
    r"|sort|top_?[kp]|scan|indices|indexing|index_(?:select|put|add|fill|copy)|merge_?states?|embed|rope|rotary|rotate|silu|gelu|swish|relu|sigmoid|activat|act_and"
    r"|tanh|dropout|adam|optimi|multi_tensor|entropy|kl_?div|loss|distance|sinkhorn|sampl|penalt|argm(?:ax|in)|amax|abs_?max"
    r"|hist|bincount|unique|pool|interp|upsampl|upscale|bicubic|bilinear|nms|roi_?(?:align|pool)|resize|rasteri[sz]e|lrn|rand|philox|seed|fft|hadamard|thrust"
    r"|rocprim|hipcub|barrier|pack(?!ed)|convert|upcast|downcast|concat|clamp|arange|linspace|triu|(?<!solve_)tril|residual|page_table|metadata"
    r"|token_id|token_shift|count|cumsum|cumprod|prefix|compar|radix|segments|segment_(?:sum|reduce|mean|max)"
    r"|segsum|fillfunctor|fill_|memory|delay|noop|dummy|init_|initial|signal|wait|unary|binary_op|op_?(?:generic_)?tensor|tensor_?op|bias|scaling|scale_"
    r"|_scale|grid_sampler|logits|bucketize|linearize|cache(?<!prompt_cache)(?<!_k_cache)|functor|permutation|window"
    r"|shuffle|broadcast|flush|bounds_check|log_?prob|split_?qkv|eigenmetakernel|spmv|trsm|trsv|getrf|potrf|larf[tg]|laswp|geqr|gesvd|syev"
    r"|addcmul|addcdiv|state_passing|_lens|mapping|_map_|_info|csr|marker|restore|_trans_|preprocess|position|kernel_stage2|smooth"
    r"|rowwise_to|float(?:_to|\d?2(?:half|bf16|int))|half2?2float|fp\d+_to|_to_(?:fp|float|mxfp|q_)|(?:get|set)_rows|bcast|dcpy|(?:cuda|fake)cast|exponent|divide|check_|assert|clean"
    r"|clear|nvfuser_(?:inner|outer)|_gpu_dt_|set_value|vector_set|finali[sz]e|numerics|nonfinite|_stats|publish|tensormaps|reorder|rearrange|remap|selective_state"
    r"|state_update|populate|qparam|prun|glu(?:fwd|bwd)|prelu|kthvalue|getitem|gradgamma|gradinput|submean|meanscale|combine|decompress|fwht"
    r"|reconstruct|make_sequential|thd_|stochastic_round|sparse24_|kernel_args|descriptors|transform(?:4d)?_0|to_dense_|compute_cuda_kernel|gen_seq"
    r"|batched_ptrs|pointers|strides|expand_?input|dispatch_(?:kernel|token)|fillgaps|curand|cudnn::(?:ops|bn)|timestep|mse"
    r"|(?:exact|approx)_(?:forward|backward)|(?:loop|input|wrapped)_\w*(?:fusion|add|mul|reduce)"
    rf"|{_B}add|addition|avg|mul|sub(?!_chunk)|div|max|min|sum|mean|exp|log|sqrt|pow|cos|sin|erf|abs|neg|cat|pad|act|cast|fill|mask|scale|slice|where|roll"
    rf"|flip|repeat|stack|ln|rms|bn|gn|lamb|sgd|lars|lion|ce|jsd|zeros?|empty|cub|[sdcz]?axpy|scal|nrm2|iamax|asum|clip|unfold|fold|cpy"
    rf"|tri|acc|any|all|ones|isin|nonzero|multinomial|prod|uniform|eye|logspace|trace|std|var|vstack|bitmask|log_?probs?|logsumexp|lookup"
    rf"|hash|select|rejection|accept(?:ance)?|fused_recurrent|plan|replay"
    rf"|rsqrt|expm1|log1p|log2|log10|atan\d?|asin|acos|[sc]inh|is_?(?:nan|inf|finite|close)|nan_to_num|lerp|hypot|logaddexp\d?|softplus|mish|[cs]?elu"
    rf"|hard(?:tanh|swish|shrink)|soft(?:sign|shrink)|bitwise|logical|reciprocal|maximum|minimum|cum(?:max|min)|searchsorted|one_?hot|trunc|floor|ceil"
    rf"|fmod|remainder|masked_(?:fill|select|scatter)|quantile|median|minmax|lgamma|digamma|gumbel|noise|bernoulli|ema|foreach|adagrad"
    rf"|rmsprop|adadelta|adafactor|nll|tvd|dyt|grpo|huber|hinge|triplet|iota|meshgrid|rdma|roce|lamport|sync|notify|sleep|spin|checksum|bbox|boxes|iou|crop|voxel"
    rf"|bad_?words|min_p|temperature|gather_?backward|scatter_?add|slice_scatter|select_scatter{_E}"
)

FAMILIES = (
    # -- not products, and the most frequent names: decided first ---------------------------------------------------
    Rule(
        "torch-native",
        "other",
        "",
        "at:: at_cuda_detail",
        "one of torch's own kernels: no matrix product",
        "traces; torch, aten/src/ATen/native/cuda",
        rf"^(?:at(?:::|_cuda_detail))(?!.*(?:{_B}b?mm|bmm_\w*|sparse_?mm{_E}|gemm|depthwise|dwconv|im2col|col2im|vol2col|col2vol|conv_?\d?d|attention|attn))",
        own=True,
    ),
    Rule(
        "communication",
        "other",
        "communication",
        "ccl nvshmem shmem reduce gather cross_device multimem userbuffers deep_ep alltoall all_to_all fusion_kernel p2p "
        "node comm::",
        "communication between GPUs",
        "traces; NCCL, RCCL, NVSHMEM, DeepEP, TransformerEngine",
        r"(?<![a-z])(?:n|r|ms|one|h)ccl|shmem|all_?reduce|reduce_?scatter|all_?gather|cross_device|multimem|userbuffers|deep_ep|all_?to_?all|p2p|int(?:er|ra)_?node|(?<![a-z])comm::",
        none_of=("gemm", "matmul"),
        own=True,
    ),
    Rule(
        "triton-fused",
        "other",
        "",
        "triton_",
        "Inductor's fused pointwise or reduction kernel; a product in its name is the one it follows",
        "torch, inductor's kernel names",
        r"triton_(?:poi|red|per|for|split_scan|mix)_|triton__\d+d\d+d|triton_(?:softmax|\w*fusion\w*reduce)",
    ),
    # -- AMD: matrix cores are not Tensor Cores ---------------------------------------------------------------------
    Rule(
        "amd-helper",
        "other",
        "",
        "tensorop op1dtensor op2dtensor op3dtensor miopenbatchnorm batched_transpose_ transpose_n transpose_c im2d2col "
        "rocprim",
        "MIOpen's or rocPRIM's elementwise, normalisation or layout kernel",
        "traces; MIOpen, src/kernels",
        r"subtensorop|op[1-5]dtensor|optensor|miopenbatchnorm|batched_transpose_\d|transpose_[nc]\w*2[nc]|im2d2col|rocprim::",
    ),
    Rule(
        "amd-product",
        "unknown",
        "",
        "cijk_ igemm_ gtcx xdl mfma _cshuffle wmma_gfx ck:: ck_tile:: aiter:: miopen _gfx gridwise_ ll4mi naive_conv_ "
        "wvsplitk",
        "an AMD product: matrix cores are not Tensor Cores",
        "traces; Tensile, MIOpen, composable_kernel, AITER",
        r"cijk_|igemm_\w*gtcx|xdl|mfma|(?:gemm|conv|contraction)\w*_cshuffle|wmma_gfx"
        rf"|(?:(?<![a-z])(?:ck|ck_tile)::|aiter::(?![^<]*(?:{HELPER_WORDS}))).*(?:gemm|fmha|conv|attention|contraction|moe|mla|matmul)"
        r"|miopen\w*conv|gridwise_\w*(?:conv|gemm)|naive_conv_|gemm_\w*_gfx\d|ll4mi_qkv|wvsplitk",
        none_of=("generic_reduce",),
    ),
    # -- helpers of products ----------------------------------------------------------------------------------------
    Rule(
        "split-k-reduce",
        "helper",
        "gemm",
        "splitk split_k gemmk_reduce reduce_1block",
        "the sum of a product's partial results",
        "labelled; cuBLAS, CUTLASS, AITER",
        r"split_?k_?reduc|reducesplitk|gemmk_reduce|reduce_1block",
    ),
    Rule(
        "layout",
        "helper",
        "",
        "nhwc tensortransform converttensor",
        "a layout conversion for a product",
        "labelled; cuDNN",
        r"nchwtonhwc|nhwctonchw|nchw2nhwc|nhwc2nchw|nhwcaddpadding|foldednhwc|tensortransform|converttensor",
        none_of=("tensorop", "xmma", "hmma", "16816", "1688", "884", "cudnn_"),
    ),
    Rule(
        "convolution-setup",
        "helper",
        "convolution",
        "offsetskernel kern_precompute reduce_wgrad reduction_kernel execute_",
        "the set-up of a convolution, or the sum of its parts",
        "traces; cuDNN",
        r"compute\w*offsetskernel|kern_precompute|reduce_wgrad|(?:[wd]grad|fprop|conv)\w*(?:reduction|execute_helper|post_execute)_kernel",
    ),
    Rule(
        "gemm-epilogue",
        "helper",
        "gemm",
        "epilogue::impl::globalkernel scal_kernel scalepackedtensor",
        "the bias or scale that follows a product",
        "traces; cuBLASLt, cuDNN",
    ),
    Rule(
        "im2col",
        "helper",
        "convolution",
        "im2col col2im col2vol vol2col",
        "the unfolding for a convolution",
        "torch, im2col.cuh; ggml",
    ),
    Rule(
        "grouped-gemm-setup",
        "helper",
        "gemm",
        "grouped_gemm group_gemm",
        "the set-up of a grouped product",
        "torch, GroupMM.cu; FlashInfer; TransformerEngine",
        r"(?:prepare|compute|setup|set)_(?:sm\d+_)?(?:cutlass_)?(?:nvfp4_)?group(?:ed)?_gemm",
    ),
    Rule(
        "attention-setup",
        "helper",
        "attention",
        "flash prepare_varlen fmhareduction dot_do_o",
        "preparation, conversion or combination for attention",
        "labelled; flash-attention, FlashMLA, ggml, TensorRT-LLM",
        r"flash_?att(?:n|ention)\w*(?:preprocess|postprocess|combine)|prepare_varlen|fmhareduction|dot_do_o"
        r"|flash_bwd_(?:convert|clear)|splitkv_combine|flash_fwd_\w*combine|flash_attn_(?:combine|mask_to|stream_k_fixup)",
    ),
    # -- CUDA cores, though the name sounds like more -----------------------------------------------------------------
    Rule(
        "small-gemm",
        "off",
        "gemm",
        "gemmsn_ gemmk1_ gemm_small cudacoregemm cudacorevec weight_int8pack_mm router_gemm dense_kernel0",
        "a product of a very small dimension: CUDA cores",
        "traces; cuBLAS; TensorRT-LLM, FBGEMM cudaCoreGemm",
        none_of=("kernel_cutlass_",),
    ),
    Rule(
        "quantised-gemv",
        "off",
        "gemv",
        "kgemm_4bit_inference gemm_4bit_simt weight_only::kernel mul_mat_vec matvec gemm_half_q_half h_gemm_tall "
        "h_gemm_wide matmulkernel bgmv llgemm",
        "a product of quantised weights by few rows: dot products on CUDA cores",
        "bitsandbytes, TensorRT-LLM weight_only, ggml mmvq, exllama, GPTQ, punica",
        r"kgemm_4bit_inference_naive|gemm_4bit_simt|weight_only::kernel|mul_mat_vec|matvec|gemm_half_q_half|h_gemm_(?:tall|wide)"
        r"|(?:vecquant\d|nuq4)matmulkernel|bgmv_(?:shrink|expand)_kernel|llgemm",
    ),
    Rule(
        "gemv",
        "off",
        "gemv",
        "gemv dot_kernel gevv dotc",
        "a matrix-vector or scalar product: bound by memory, CUDA cores",
        "labelled; traces; cuBLAS, AWQ",
        r"gemv|(?<![a-z_])dot_kernel|gevv|dotc",
        none_of=("triton", "flash"),
    ),
    Rule(
        "sparse-product",
        "off",
        "gemm",
        "csrm spmm spmv",
        "a product of a sparse matrix: CUDA cores",
        "cuSPARSE",
        r"csrm[mv]|(?<![a-z])spm[mv](?![a-z])",
    ),
    Rule(
        "depthwise-convolution",
        "off",
        "convolution",
        "depthwise dwconv causal_conv1d ssm_conv conv2d_dw",
        "a depthwise convolution: CUDA cores",
        "torch, DepthwiseConv2d.cu; causal-conv1d; ggml",
        none_of=("_states", "state_update"),
    ),
    Rule(
        "cuda-core-attention",
        "off",
        "attention",
        "paged_attention_v flash_attn_vec flash_attn_ext_vec flash_attn_tile batchdecodewithpagedkvcache "
        "singledecodewithkvcache masked_multihead_attention mmha flash_fwd_kernel_cpu",
        "attention of one query a head by dot products on CUDA cores",
        "vLLM, csrc/attention; ggml, fattn-vec and fattn-tile; FlashInfer, decode.cuh; TensorRT-LLM",
        none_of=("reduce", "sm80", "tensorop", "hmma"),
    ),
    Rule(
        "efficient-attention-cuda-cores",
        "off",
        "attention",
        "fmha_cutlass",
        "memory-efficient attention built for a GPU, or FP32 on one, without fitting Tensor Cores: SIMT",
        "torch, mem_eff_attention/kernels (Sm50 has none, FP32 below Sm80 is SIMT)",
        r"fmha_cutlass[fb]_(?:\w*_sm5\d|\w*_sm6\d|f32_\w*_sm7\d)",
    ),
    # -- attention --------------------------------------------------------------------------------------------------
    Rule(
        "efficient-attention",
        "native",
        "attention",
        "fmha_cutlass",
        "memory-efficient attention on Tensor Cores (FP32 as three TF32 products)",
        "labelled; torch, mem_eff_attention/kernels",
        r"fmha_cutlass[fb]_(?:f16|bf16|f32)",
    ),
    Rule(
        "flash-attention",
        "native",
        "attention",
        "flash fmhasm fmha_v2 sparse_attn_fwd fmha_fprop_ fmha_dgrad_ fmha_fwd_loop fmha_bwd_loop",
        "flash attention",
        "labelled; traces; flash-attention, FlashMLA, TensorRT-LLM, ggml",
        r"flash_(?:fwd|bwd)_\w*kernel|flash_attn_ext_f16|flashattn(?:fwd|bwd)|flashattention(?:forward|backward)\w*sm\d|flash::\w*(?:fwd|bwd)"
        r"|fmhasm\d|fmha_v2|fmha_(?:fprop|dgrad)_\w*fp16|fmha_(?:fwd|bwd)_loop_kernel|(?<![a-z_])sparse_attn_fwd\w*_kernel",
    ),
    Rule(
        "flashinfer-attention",
        "native",
        "attention",
        "withpagedkvcache withraggedkvcache withkvcache mlapagedattention mlapageattention kernel_mha "
        "attention_kernel_ws attend_ker",
        "attention by mma instructions, for prefill or several queries a head",
        "FlashInfer, prefill.cuh and mla.cuh; TensorRT-LLM, xqa; ThunderKittens",
        none_of=("decodewith", "append"),
    ),
    Rule(
        "sage-attention",
        "native",
        "attention",
        "qk_int compute_attn_ws attn_kernel",
        "SageAttention: 8-bit products of queries and keys by mma instructions",
        "SageAttention, csrc/qattn; Hopper's flash-attention 3",
        r"qk_int\d?_sv_f(?:8|16)|compute_attn_ws",
    ),
    Rule(
        "cudnn-attention",
        "native",
        "attention",
        "sdpa cudnn_mha",
        "cuDNN's fused attention",
        "labelled; cuDNN",
        r"cudnn.*sdpa|cudnn_mha|sdpa_sm\d+",
    ),
    # -- Tensor Cores, by the name ----------------------------------------------------------------------------------
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
        "tensorop mma m16n tcgen05",
        "a kernel whose name says Tensor Core",
        "labelled; traces; CUTLASS, cuDNN, AWQ, bitsandbytes",
        # bs: block-scaled (MXFP8, MXFP4, NVFP4); sp: sparse.
        rf"{_B}(?:bs)?(?:sp)?tensorop|(?:opclass|warp|default)?w?mma_?tensorop{_E}|opclass\w*tensorop|multiplyadd\w*tensorop|mmatensorop"
        rf"|{_B}[hidq]?mma|wgmma|wmma|utc[a-z]*mma|umma{_E}|hopperwgmma|tcgen05|m16n\d*x?k\d",
    ),
    Rule(
        "nvjet",
        "native",
        "gemm",
        "nvjet_",
        "cuBLAS's nvjet family, whose kernels all use Tensor Cores",
        "labelled; cuBLAS on Hopper and later",
    ),
    Rule(
        "xmma-cuda-cores",
        "off",
        "",
        "xmma",
        "an xmma kernel of FP32 multiply-adds (ffma): CUDA cores",
        "labelled; cuBLAS",
        r"xmma.*ffma",
    ),
    Rule(
        "xmma",
        "native",
        "",
        "xmma",
        "an xmma kernel whose operands, or whose GPU's xmma kernels, are Tensor Cores' alone",
        "labelled; traces; cuBLAS, cuDNN, TensorRT",
        r"xmma.*(?:_tensor\d+x\d+x\d+|tf32|bf16|(?<![a-z])f16f16|(?<![a-z])f16_|[iu]8[iu]8|e4m3|e5m2|e2m1|e3m2|e2m3|f8f8|mx|fp[48])|sm(?:9|1[0-9])\d_xmma",
        none_of=("xmma_pool",),
    ),
    Rule(
        "xmma-unknown",
        "unknown",
        "",
        "xmma",
        "an xmma kernel that names neither ffma nor operands that only Tensor Cores multiply",
        "cuBLAS, cuDNN",
        none_of=("xmma_pool",),
    ),
    Rule(
        "trtllm-gen",
        "native",
        "gemm",
        "bmm_ gemm_ gemmkernel_ gatedactkernel_",
        "a generated product for Hopper's or Blackwell's Tensor Cores",
        "TensorRT-LLM, trtllm-gen kernels; traces",
        # The result's dtype, the operands', the accumulator's, then tiles and GPU, which traces cut off.
        r"(?<![a-z0-9])(?:bmm|gemm|gemmgatedact(?:kernel)?|gemmkernel)_[a-z0-9]+_"
        r"(?:.*(?:sm(?:9|1\d)\d[af]?(?![0-9])|(?:_t|tile)\d+x\d+x\d+)|(?:mx)?(?:e\dm\d|bfloat16|fp16)\w*_fp32_(?:ba|ab)\d)",
    ),
    Rule(
        "deep-gemm",
        "native",
        "gemm",
        "deep_gemm sm90_ sm100_ sm120_ smxx_ gemm_kernel gemm_impl gemm_1d",
        "DeepGEMM's FP8, FP4, TF32 or BF16 product",
        "DeepGEMM, deep_gemm/include/deep_gemm/impls",
        r"(?:sm\d+_|deep_gemm::)(?:fp8|fp4|bf16|tf32)\w*(?:gemm|mqa_logits|b[mh][kr]_|bmk|hc_prenorm|moe)|deep_gemm::\w*gemm_kernel",
        none_of=("metadata", "clean_logits"),
    ),
    Rule(
        "marlin",
        "native",
        "gemm",
        "marlin machete:: _forward_4bit_cuda turbomind::gemm quant_gemm_kernel exl3_gemm gemm_w4a16_t gemm_w4a4 "
        "gemm_w8a8_",
        "a product of quantised weights by mma instructions",
        "vLLM, csrc/quantization; Marlin; sparse Marlin; FP6-LLM; exllamav3; AWQ; nunchaku",
        r"(?:marlin\w*(?:::|<|$)|(?<![a-z])marlin(?:moe|_24|_qqq|_moe\w*)?(?![a-z])|machete::|gemm(?:v2)?_forward_4bit_cuda|turbomind::gemm|quant_gemm_kernel|exl3_gemm|gemm_w4a16_t\d|gemm_w4a4|gemm_w8a8)"
        r"(?!.*(?:repack|permute|prepack|transpose|quantize|dequant_|awq_to|gptq_to))",
        none_of=("_to_marlin", "dequant_marlin", "repack", "retile"),
    ),
    Rule(
        "llama-cpp",
        "native",
        "gemm",
        "mul_mat_q",
        "llama.cpp's product of quantised weights by mma instructions",
        "ggml, ggml-cuda/mmq.cuh (DP4A on CUDA cores before Turing)",
        r"(?<![a-z])mul_mat_q(?:_moe)?(?![a-z0-9_])",
        since="turing",
    ),
    Rule(
        "llama-cpp-float",
        "native",
        "gemm",
        "mul_mat_f",
        "llama.cpp's product of few columns by mma instructions",
        "ggml, ggml-cuda/mmf.cuh",
        r"(?<![a-z])mul_mat_f(?:_ids)?(?![a-z0-9_])",
    ),
    Rule(
        "tinygemm",
        "native",
        "gemm",
        "tinygemm",
        "a product of few rows by mma instructions",
        "torch, int4mm.cu (m16n8k16); TensorRT-LLM, tinygemm2",
    ),
    Rule(
        "cute-dsl-cuda-cores",
        "off",
        "gemm",
        "kernel_cutlass_",
        "a CuTe product of FP32 multiply-adds: CUDA cores",
        "CUTLASS, examples/python/CuTeDSL/ampere/sgemm.py",
        r"(?<![a-z])s_?gemm",
    ),
    Rule(
        "cute-dsl",
        "native",
        "",
        "kernel_cutlass_ sm100blockscaled sm120blockscaled sm90blockscaled sm103blockscaled",
        "a product that the CuTe DSL built for Tensor Cores",
        "CUTLASS, examples/python/CuTeDSL; FlashInfer; flash-attention",
        # An mma instruction in the name decides. A word for products decides too, unless another word means a preparation, a
        # reduction, or a product of few rows, which may be dot products on CUDA cores.
        rf"(?<!ga)mma(?!r)|^(?!.*(?:{HELPER_WORDS}|{_FEW_ROWS}|{_PLANS}))"
        r".*(?:gemm|attention|::\w*attn|mla|conv(?:2d|3d|olution|_)|block_?scaled|fmha|fc\d|delta_?(?:rule|net))",
        own=True,
    ),
    Rule(
        "cutlass-simt",
        "off",
        "",
        "simt",
        "CUTLASS on CUDA cores (SIMT)",
        "labelled; CUTLASS",
        any_architecture=True,
    ),
    Rule(
        "cutlass-device-product",
        "native",
        "",
        "device_kernel rht_gemm_device",
        "a CUTLASS 3 product: collectives for Tensor Cores",
        "CUTLASS 3; traces of SGLang; TransformerEngine",
        r"device_kernel.*(?:gemm|fmha|attention|mla|attn|conv(?:universal|olution))|rht_gemm_device",
        none_of=("kernel_cutlass_",),
    ),
    Rule(
        "cutlass-attention",
        "native",
        "attention",
        "attention_kernel_batched attention_kernel_backward_batched",
        "CUTLASS's memory-efficient attention, whose template argument names a GPU with Tensor Cores",
        "xformers; DeepSpeed, evoformer",
        r"arch::sm[7-9]\d",
    ),
    Rule(
        "cutlass-opaque",
        "unknown",
        "gemm",
        "device_kernel cutlass::kernel cutlass6kernel cutlass7kernel2",
        "a CUTLASS kernel whose template argument hides what it computes",
        "labelled; CUTLASS 3",
        none_of=("kernel_cutlass_",),
    ),
    # -- CUDA cores -------------------------------------------------------------------------------------------------
    Rule(
        "cuda-core-gemm",
        "off",
        "gemm",
        "sgemm dgemm hgemm cgemm zgemm igemm",
        "a product on CUDA cores: no mma instruction in its name",
        "labelled; traces; cuBLAS",
        none_of=("cublasdgemm", "lora", "convolve"),
        any_architecture=True,
    ),
    Rule(
        "scudnn",
        "off",
        "convolution",
        "scudnn hcudnn icudnn winograd",
        "cuDNN's convolution on CUDA cores",
        "labelled; traces; cuDNN",
        none_of=("batched_gemm",),
        any_architecture=True,
    ),
    Rule(
        "fft-convolution",
        "off",
        "convolution",
        "fft2d_ fft1d_ fft3d_",
        "the transform of an FFT convolution: CUDA cores",
        "traces; cuDNN",
    ),
    Rule(
        "cudnn-engines",
        "off",
        "convolution",
        # Without conv2d_c1_k1 and first_layer, which NVIDIA's DLProf counts as Tensor Core.
        "wgrad_alg dgrad_engine dgrad2d_ wgrad2d_ dgrad_alg convolve_ convolvend grouped_direct_kernel convolution_kernel_direct",
        "cuDNN's older engines: CUDA cores",
        "traces; cuDNN",
    ),
    # -- undecided by the name --------------------------------------------------------------------------------------
    Rule(
        "triton-kernels",
        "native",
        "gemm",
        "matmul",
        "a product of 16-bit or narrower operands by Triton's dot: Tensor Cores",
        "triton_kernels, matmul_ogs: layouts, then the dtypes of the result and the two operands",
        r"(?:^|_)matmul(?:_ogs)?_[nt]{3}_\w+?x(?:bf16|fp16|fp8\w*|mxfp\d)x(?:bf16|fp16|fp8\w*|mxfp\d)",
    ),
    Rule(
        "triton-template",
        "unknown",
        "",
        "triton_tem_ triton_mm triton_bmm",
        "a Triton template of Inductor's, a product or attention: the name does not show which",
        "labelled; torch, inductor's templates",
    ),
    Rule(
        "persistent-recurrent",
        "unknown",
        "recurrent",
        "persist rnn_",
        "cuDNN's persistent recurrent kernel: the name does not show its kind",
        "cuDNN",
        r"rnn_\w*persist|persist\w*rnn(?!_?(?:add|init))|persistent_(?:lstm|gru)",
    ),
)

#: Rules for names outside all families, by the words of the function, or of its template arguments without a function.
WORDS = (
    Rule(
        "tensorrt-myelin",
        "other",
        "",
        "__myl_",
        "TensorRT's fused pointwise or reduction kernel",
        "TensorRT, Myelin's names: the operations that were fused, shortened",
        r"__myl_(?!\w*(?:fc|gem|mat|mha|conv|att|dot))",
    ),
    Rule(
        "beside-product",
        "helper",
        "",
        "",
        "work for a product, by its name",
        "vLLM, SGLang, FlashInfer, AITER: reductions, routing, caches and layouts of products",
        rf"^(?=.*(?:{PRODUCT_WORDS}))(?:(?=.*(?:{HELPER_WORDS}))(?!.*(?:{_PRODUCT_VERB}))|.*(?<!all)_reduce(?:_kernel)?$|\W*interleave)",
    ),
    Rule(
        "product-word",
        "unknown",
        "",
        "",
        "a product by its name, of a family whose names do not show the kind",
        "Triton kernels of vLLM, SGLang, Mamba, flash-linear-attention, AITER",
        PRODUCT_WORDS,
    ),
    Rule(
        "other-word",
        "other",
        "",
        "",
        "by its name elementwise, a reduction, normalisation, sorting, a copy or their like: no matrix product",
        "traces; Triton and CUDA kernels of vLLM, Liger, apex, TransformerEngine, FBGEMM, ggml",
        OTHER_WORDS,
    ),
    Rule(
        "moves-only",
        "other",
        "",
        "",
        "by all words of its name a move of data, or the bookkeeping of where it lies: no matrix product",
        "Triton and CUDA kernels of Megatron, SGLang, vLLM, DeepSpeed",
        _MOVES_ONLY,
    ),
)

#: The rule for all other names; the kernel may or may not be a product.
UNFAMILIAR = Rule("unfamiliar", "unknown", "", "", "a name of no family known here: it may be a product or not", "none")

RULES = (*FAMILIES, *WORDS, UNFAMILIAR)

#: Ids of the rules that use words or no evidence; evidence from operators overrides these rules.
GUESSES = frozenset(rule.id for rule in (*WORDS, UNFAMILIAR))

_BESIDE, _PRODUCT = (next(rule for rule in WORDS if rule.id == name) for name in ("beside-product", "product-word"))

#: Pairs of a substring and its rule, so that first_match has no inner loop: traces have thousands of names.
_TABLE = tuple((literal, rule) for rule in FAMILIES for literal in rule.any_of.split())


def first_match(name: str) -> Rule:
    """Return the rule that decides a name as a profiler wrote it."""
    spelt = Spelling.of(name)
    for literal, rule in _TABLE:
        text = spelt.function if rule.own else spelt.whole
        if literal in text and rule.decides(text):
            return rule
    # Template arguments also name the work around a product (attention's softmax), so helper rules do not apply to them.
    return (
        _by_function(spelt.function)
        or by_words(spelt.arguments, ("unknown", "other"))
        or by_words(with_words_apart(name))
        or UNFAMILIAR
    )


def _by_function(lowered: str) -> Rule | None:
    """Return the rule for a function in its namespaces: one that computes no product, in a product's namespace, is a helper."""
    found = by_words(lowered)
    if found is _PRODUCT and "::" in lowered:
        alone = by_words(lowered.rpartition("::")[2])
        return _BESIDE if alone is not None and alone.verdict == "other" else found
    return found


def by_words(lowered: str, verdicts: tuple[str, ...] = VERDICTS) -> Rule | None:
    """Return the rule that decides a function's or an operator's name by its words; None if no rule matches."""
    return next(
        (rule for rule in WORDS if rule.verdict in verdicts and rule.any_of in lowered and rule.decides(lowered)), None
    )
