"""classify_kernel against the labelled corpus, the names in real traces, and misleading names."""

import csv
import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpinspect.kernels.names import RULES, RULES_VERSION, VERDICTS, classify_kernel
from mpinspect.kernels.names.rules import first_match
from mpinspect.runtime import gpus

DATA = Path(__file__).parents[1] / "data"
TRACES = sorted((DATA / "traces").rglob("*.json.gz"))

with (DATA / "kernel_names.tsv").open(encoding="utf-8", newline="") as file:
    LABELLED = list(csv.DictReader(file, delimiter="\t"))

#: Names whose truth was read from source: whether the function reaches tl.dot, the class an mma instruction, the file neither.
with (DATA / "kernel_truth.tsv").open(encoding="utf-8", newline="") as file:
    FROM_SOURCE = list(csv.DictReader(file, delimiter="\t"))

#: The verdicts that a truth allows; "unknown" is never wrong.
ALLOWED = {"product": ("native", "degraded", "unknown"), "none": ("other", "helper", "off", "unknown")}

#: The permitted verdicts for each label of the corpus. A kernel that uses Tensor Cores may still be degraded.
VERDICTS_OF_LABEL = {
    "yes": ("native", "degraded"),
    "no": ("off",),
    "helper": ("helper",),
    "unknown": ("unknown",),
    # Not a product; helper or other, since the boundary is unclear.
    "none": ("other", "helper"),
}


def kernel_names(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        events = json.load(stream)["traceEvents"]
    return [event["name"] for event in events if str(event.get("cat")).lower() == "kernel"]


def is_labelled_right(row: dict[str, str]) -> bool:
    found = classify_kernel(row["name"])
    on = (each.split(":") for each in row["on"].split())
    return (
        found.verdict in VERDICTS_OF_LABEL[row["tensor_core"]]
        and found.architecture == row["architecture"]
        and all(classify_kernel(row["name"], gpu).verdict == verdict for gpu, verdict in on)
        and all(found.verdict == verdict for verdict in ("degraded", "native") if verdict in row["note"])
    )


def test_every_label_is_right():
    wrong = {row["name"]: classify_kernel(row["name"]) for row in LABELLED if not is_labelled_right(row)}
    assert wrong == {}


def test_the_corpus_is_there():
    assert len({row["name"] for row in LABELLED}) == len(LABELLED) >= 300
    assert min(Counter(row["tensor_core"] for row in LABELLED).values()) >= 15
    assert all(row["note"] for row in LABELLED)


def test_names_with_a_truth_from_source_get_no_wrong_verdict():
    """Measures the rules: at most 3 of 1,000 names are wrong, and one in six names without a product is unknown."""
    assert len({row["name"] for row in FROM_SOURCE}) == 1000
    verdicts = {row["name"]: classify_kernel(row["name"]).verdict for row in FROM_SOURCE}
    wrong = [row["name"] for row in FROM_SOURCE if verdicts[row["name"]] not in ALLOWED[row["truth"]]]
    assert len(wrong) <= 3, wrong
    unknown = Counter(row["truth"] for row in FROM_SOURCE if verdicts[row["name"]] == "unknown")
    assert unknown["none"] <= 100
    assert unknown["product"] <= 310


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        # The class decides; the module's path is not evidence.
        ("kernel_cutlass_kernel_flashinfermoe_epkernelsSm100SwigluMxfp8Fc12Kernel_object_at__t", "native"),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100FlashAttentionForwardSm100_object_at__t", "native"),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_combineFlashAttentionForwardCombine_object_at__t", "helper"),
        ("kernel_cutlass_reduction_kernel_cute_dslattentionmla_decodeMultiLatentAttention_object_at__t", "helper"),
        ("kernel_cutlass_device_kernel_vllmattentionDequantGatherKCacheKernel_object_at__t", "other"),
        ("kernel_cutlass_kernel_flashinferattentionPrepareBlockSparseRoutes_object_at__t", "unknown"),
        ("kernel_cutlass_kernel_flashinfergemmkernelsGemvBf16Fp4Sm12x_object_at__t", "off"),
        ("kernel_cutlass_kernel_vllmkernelslinearCuteSkinnyGemm_object_at__t", "unknown"),
        # Weak words also occur in the names of products.
        ("_scatter2scatter", "unknown"),
        ("_swiglu_kernel_forward", "unknown"),
        ("_fp8_indexer_kernel", "unknown"),
        ("_attn_fwd_align", "unknown"),
        ("fused_moe_gating_gemm_kernel", "unknown"),
        ("gemm_reduce_scatter_kernel", "unknown"),
        ("schedule_grouped_gemm_kernel", "unknown"),
        ("_fwd_none_diag_kernel", "unknown"),
        ("_fwd_kernel_split_kv", "unknown"),
        ("_rotate_quantize_q_kernel", "unknown"),
        ("kernel_cutlass_kernel_flashinfermoe_epkernel_fp8Sm90MegaMoESwapABFp8Kernel_object_at__t", "unknown"),
        # They exclude a product if all words of a name are known, and a verb is next to its noun.
        ("_gather_tokens_kernel", "other"),
        ("_shift_input_ids_kernel", "other"),
        ("calc_gather_index_from_scatter_index_kernel", "other"),
        ("_gather_acme_tokens_kernel", "unknown"),
        ("_gather_tokens_gemm_kernel", "unknown"),
        ("_eq_kernel", "other"),
        ("_tile_eq_kernel", "unknown"),
        ("kernel_cutlass_kernel_flash_attncutecu_blocks_kernelCuSeqlensToBlocksKernel_object_at__t", "other"),
        # A strong word excludes a product by itself.
        ("kernel_cutlass_saxpy_kernel_tensorptrbf16gmem_o1_0", "other"),
        ("_temperature_kernel", "other"),
        ("_nan_to_num_kernel", "other"),
        ("_silu_and_mul_moe_ep_kernel", "helper"),
        ("void aiter::concat_and_cache_mla_kernel<float>(float*)", "helper"),
        ("void aiter::mla_decode_kernel<float>(float*)", "unknown"),
        ("kernel_inter_node_p2p_for_same_local_rank", "other"),
        ("nonzero_kernel", "other"),
        ("multinomial_with_replacement", "other"),
        ("prepare_prefill_inputs_kernel", "helper"),
    ],
)
def test_weak_words_and_paths_are_not_evidence(name, verdict):
    assert classify_kernel(name).verdict == verdict


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        # 884 inside another number, or without the letter of an accumulator, is not evidence.
        ("my_tile_18840_kernel", "unknown"),
        ("my_kernel_x8841", "unknown"),
        ("volta_sgemm_128x64_8841", "off"),
        ("volta_hgemm_128x128_nn_mma884", "native"),
        ("volta_hgemm_128x128_nn", "off"),
        ("maxwell_hgemm_64x64_nn", "off"),
        ("volta_s884gemm_64x64_nn", "native"),
        ("cutlass_80_tensorop_z884gemm_64x64_16x4_nn_align1", "native"),
        ("turing_int8_i8816cudnn_int8_256x128_ldg16_relu_singleBuffer_small_nt_v1", "native"),
        ("ampere_int8_i16832gemm_int8_256x128_ldg16_stages_64x3_nt", "native"),
        ("cutlass3x_sm100_tensorop_s128x256x16gemm_bf16_bf16_f32_void_bf16_128x256x64", "native"),
        ("cutlass3x_sm90_simt_sgemm_f32_f32_f32_f32_f32_128x128x16", "off"),
        ("_ZN7cutlass6KernelINS_4gemm6kernel4GemmINS1_11threadblock12MmaPipelinedILi1EEEEEE4MmaTensorOp", "native"),
        ("_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalINS1_17GroupProbl", "native"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int>>>(P)", "native"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<int>>>(P)", "native"),
        ("void cutlass::device_kernel<flash::FlashAttnBwdPreprocess<int>>(P)", "helper"),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>)", "native"),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm75(PyTorchMemEffAttention::AttentionKernel<float>)", "off"),
        ("fmha_cutlassF_f16_notaligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<half>)", "degraded"),
        ("fmha_cutlassF_f16_aligned_64x64_rf_sm50(PyTorchMemEffAttention::AttentionKernel<half>)", "off"),
        ("fmhaSm100aKernel_QkvBfloat16OBfloat16H128PagedKvDense", "native"),
        ("bmm_Bfloat16_E2m1E2m1_Fp32_t128x8x512u2_s6_et64x8_m64x8x64_cga1x1x1_16dp256b_sm100f", "native"),
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 4096u>(float*)", "native"),
        ("nvjet_sm90_hss_320x128_64x3_1x2_h_bz_coopB_NNT", "native"),
        # Pointwise, although it holds a product's name: the product's epilogue.
        ("triton_poi_fused_addmm_relu_0", "other"),
        ("triton_per_fused_mm_native_layer_norm_3", "other"),
        ("triton_mm", "unknown"),
        ("triton_tem_fused_bmm_7", "unknown"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_stage3_warpsize1x4x1_kernel", "unknown"),
        ("sm80_xmma_gemm_f64f64_f64f64_f64_tn_n_tilesize64x64x16_stage3_tensor8x8x4_kernel", "native"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::addmm_epilogue>(int)", "other"),
        ("void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, float, int>(int)", "off"),
        ("void at::native::im2col_kernel<float>(long)", "helper"),
        (
            "void split_embedding_backward_codegen_adagrad_unweighted_kernel_cta_per_row_1<float>(fbgemm_gpu::X)",
            "other",
        ),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*)", "other"),
        ("void fft2d_r2c_32x32<float, false, 0u, false>(float2*)", "off"),
        ("void wgrad_alg0_engine<float, 128, 6, 7, 3, 3, 5, false, 512>(int)", "off"),
        (
            "void gemmSN_TN_kernel<float, 128, 16, 2, 4, 8, 9, false, cublasGemvTensorStridedBatched<float const>>",
            "off",
        ),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT32x32x256_MI16x16x1_SN", "unknown"),
        ("some_vendor_gemm_v7", "unknown"),
        ("LSTM_elementWise_fp", "other"),
        ("", "unknown"),
        # Unfamiliar names are unknown, rather than "not a product".
        ("my_kernel", "unknown"),
        ("_fwd_kernel", "unknown"),
        ("void acme::warp_specialized<128, 128>(float*)", "unknown"),
        # Words in template arguments do not describe the function.
        ("void acme::forward<acme::gemm_traits<4>, acme::softmax_policy>(P)", "unknown"),
        ("void acme::rms_norm<acme::gemm_traits<4> >(P)", "other"),
        ("void acme::launch<acme::RMSNorm<4> >(acme::GemmParams)", "other"),
        # A product of two: which words are its verb.
        ("_fused_gemm_a8w8_blockscale_mul_add_kernel", "unknown"),
        ("_fused_gemm_a8w8_blockscale_mul_add_reduce_kernel", "helper"),
        ("moe_gemm_int8_smoothquant", "unknown"),
        # MIOpen's tensor operators do not use Tensor Cores, and the letters "mma" in "gamma" do not name an instruction.
        ("SubTensorOpWithTransform3d", "other"),
        ("compute_gamma_beta_kernel", "unknown"),
    ],
)
def test_names_that_resemble_other_kernels(name, verdict):
    assert classify_kernel(name).verdict == verdict


@pytest.mark.parametrize(
    ("name", "dtype", "verdict"),
    [
        # Alignment counts in bytes: four elements are 16 bytes of TF32 and 8 of FP16.
        ("cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align4", None, "native"),
        ("cutlass_80_tensorop_f16_s16816gemm_f16_64x64_32x6_tn_align4", None, "degraded"),
        ("cutlass_80_tensorop_f16_s16816gemm_f16_64x64_32x6_tn_align8", None, "native"),
        ("cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align2", None, "degraded"),
        ("cutlass_80_tensorop_d884gemm_64x128_16x3_nn_align1", None, "native"),
        ("cutlass_80_tensorop_i16832gemm_s8_128x128_64x4_tn_align16", None, "native"),
        ("cutlass_80_tensorop_i16832gemm_s8_128x128_64x4_tn_align8", None, "degraded"),
        ("cutlass_tensorop_special_align4", "float16", "degraded"),
        ("cutlass_tensorop_special_align4", "float32", "native"),
        ("cutlass_tensorop_special_align4", None, "native"),
        # A kernel of an older generation, or a small wmma tile, is not evidence.
        ("cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align8", None, "native"),
    ],
)
def test_alignment_counts_in_bytes(name, dtype, verdict):
    assert classify_kernel(name, gpu="hopper", dtype=dtype).verdict == verdict


def test_the_reason_names_the_alignment():
    reason = classify_kernel("cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_64x3_tn_align2").reason
    assert "align2" in reason
    assert "4 bytes" in reason
    assert "16" in reason


@pytest.mark.parametrize(
    ("name", "gpu", "verdict"),
    [
        ("cutlass_75_tensorop_f16_s1688gemm_f16_256x128_tn_align8", "T4", "native"),
        ("cutlass_75_tensorop_bf16_s1688gemm_bf16_256x128_tn_align8", "T4", "unknown"),
        ("cutlass_75_tensorop_bf16_s1688gemm_bf16_256x128_tn_align8", "hopper", "native"),
        ("cutlass_80_tensorop_d884gemm_64x128_16x3_nn_align1", "A100", "native"),
        ("cutlass_80_tensorop_d884gemm_64x128_16x3_nn_align1", "A10", "unknown"),
        ("volta_sgemm_128x64_nn", "hopper", "off"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "blackwell", "native"),
    ],
)
def test_the_gpu_is_an_argument(name, gpu, verdict):
    assert classify_kernel(name, gpu=gpu).verdict == verdict


def test_a_gpu_without_tensor_cores_has_no_native_kernels():
    gpu = gpus.of_device("Quadro GP100", 6, 0)
    found = classify_kernel("triton_tem_fused_addmm_0", gpu=gpu)
    assert (found.verdict, found.reason) == ("off", "Quadro GP100 has no Tensor Cores")
    assert classify_kernel("maxwell_sgemm_128x64_nn", gpu=gpu).verdict == "off"
    assert classify_kernel("void cub::DeviceScanKernel<int>(int)", gpu=gpu).verdict == "other"


def test_amd_is_not_judged():
    gpu = gpus.of_device("AMD Instinct MI300X", 9, 4, vendor="AMD")
    for name in ("Cijk_Alik_Bljk_BBS_BH_MT16x16x256", "some_sgemm", "void flash_fwd_kernel<half>"):
        assert classify_kernel(name, gpu=gpu).verdict == "unknown"


def test_nvjet_takes_the_gpus_architecture():
    name = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT"
    assert classify_kernel(name).architecture == "hopper"
    assert classify_kernel(name, gpu="B200").architecture == "blackwell"


def test_an_unknown_gpu_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"not a GPU known here.*hopper.*H100 PCIe"):
        classify_kernel("volta_sgemm_128x64_nn", gpu="pascal")
    with pytest.raises(ValueError, match=r"not a GPU known here"):
        classify_kernel("elementwise", gpu="pascal")


@pytest.mark.parametrize("name", [None, 3, b"volta_sgemm"])
def test_a_name_is_a_string(name):
    with pytest.raises(TypeError, match=f"not {type(name).__name__}"):
        classify_kernel(name)


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn", ("float16",)),
        ("cutlass_80_tensorop_d884gemm_64x128_16x3_nn_align1", ("float64",)),
        ("cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align4", ("tfloat32",)),
        ("cutlass_80_tensorop_s1688tf32gemm_256x128_16x3_nn_align4", ("tfloat32",)),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", ("bfloat16",)),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc", ("tfloat32",)),
        ("sm80_xmma_gemm_f16f16_f16f32_f32_nn_n_tilesize96x64x32", ("float16",)),
        ("nvjet_qqtst_112x128_128x7_2x1_v_bz", ("float8_e4m3fn",)),
        ("nvjet_sm90_hss_320x128", ("float16",)),
        # The dtype of a block's scale is none of an operand's.
        ("nvjet_sm100_ootst_128x128_256x7_4x1_2cta_v_bx_Avec16UE4M3_Bvec16UE4M3_TNT", ("float4_e2m1fn_x2",)),
        ("cutlass3x_sm100_bstensorop_s256x256x64gemm_block_scaled_ue4m3xf4_ue4m3xf4_f32_f16", ("float4_e2m1fn_x2",)),
        ("cutlass3x_sm120_bstensorop_s16864gemm_block_scaled_ue4m3xe2m1_ue4m3xe2m1_f32", ("float4_e2m1fn_x2",)),
        ("cutlass3x_sm120_bstensorop_s16832gemm_block_scaled_ue8m0xe4m3_ue8m0xe4m3_f32", ("float8_e4m3fn",)),
        ("ampere_sgemm_128x64_tn", ("float32",)),
        ("volta_gcgemm_32x32_nt", ("complex64",)),
        ("volta_dgemm_128x64_nn", ("float64",)),
        (
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, cutlass::bfloat16_t>>(P)",
            ("bfloat16",),
        ),
        ("triton_tem_fused_addmm_0", ()),
    ],
)
def test_dtypes_from_kernel_names(name, dtypes):
    assert classify_kernel(name).dtypes == dtypes


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_every_kernel_of_real_traces_has_a_verdict(path):
    for name in set(kernel_names(path)):
        found = classify_kernel(name)
        assert found.verdict in VERDICTS
        assert found.reason
        assert found.rule


@pytest.mark.parametrize(
    ("trace", "wrongly"),
    [
        ("v100_fp32_training.json.gz", ("native", "degraded", "unknown")),
        ("a100_switch_transformer_fp32.json.gz", ("native", "degraded", "unknown")),
        ("gp100_no_tensor_cores.json.gz", ("native", "degraded", "unknown")),
        ("ranks/worker0.json.gz", ("native", "degraded", "unknown")),
        # These traces have no product on CUDA cores, and every name is known.
        ("h100_vit.json.gz", ("off", "unknown", "degraded")),
        ("h100_bert_small.json.gz", ("off", "unknown")),
    ],
)
def test_verdicts_that_a_trace_cannot_have(trace, wrongly):
    names = set(kernel_names(DATA / "traces" / trace))
    assert names
    assert {name: found for name in names if (found := classify_kernel(name).verdict) in wrongly} == {}


def test_every_rule_decides_the_verdict_on_a_labelled_name():
    """A rule could never apply if another's words shadow its words, or if its pattern contradicts them."""
    names = [row["name"] for row in LABELLED]
    # Its label is not known: it may use Tensor Cores in TF32, or none.
    names.append("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_stage3_warpsize1x4x1_kernel")
    deciding = {first_match(name).id for name in names}
    assert [rule.id for rule in RULES if rule.id not in deciding] == []


def test_every_rule_has_a_verdict_a_meaning_and_a_source():
    assert len({rule.id for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.verdict in set(VERDICTS) - {"degraded"}
        assert rule.meaning
        assert rule.source
        assert rule.any_of == rule.any_of.lower()
    assert RULES_VERSION


@given(st.text(max_size=300))
def test_any_text_has_a_verdict(name):
    assert classify_kernel(name).verdict in VERDICTS


# Mangled names write words with numbers and in one case.
@given(st.sampled_from([row["name"] for row in LABELLED if row["name"][:2] != "_Z"]), st.sampled_from(["void ", ""]))
def test_case_does_not_matter(name, prefix):
    assert classify_kernel(prefix + name.upper()).verdict == classify_kernel(prefix + name.lower()).verdict


@pytest.mark.parametrize("part", ["gemm_", "a_b", "<", "9a", "marlin", "fused_w", "attention::"])
def test_a_name_without_end_gets_a_verdict(part):
    assert classify_kernel(part * 50_000).verdict in VERDICTS
    assert classify_kernel("_Z" + part * 50_000).verdict in VERDICTS


@pytest.mark.parametrize(
    ("name", "verdict", "kind"),
    [
        # The time of attention and recurrent layers is not judged by rates, so a wrong kind would make them degraded.
        (
            "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100FlashAttentionForwardSm100_object_at__t",
            "native",
            "attention",
        ),
        (
            "kernel_cutlass_kernel_flashinfercute_dslBlockSparseAttnForwardSm120Blk64_object_at__t",
            "native",
            "attention",
        ),
        ("RNN_blockPersist_fp_LSTM_HMMA<__half, __half, float, 1, 128>(const", "native", "recurrent"),
        ("_v4_attention_bwd_kernel", "unknown", "attention"),
        ("void explicit_convolve_sgemm<__half, int, (int)128, (int)6>(int)", "off", "convolution"),
        ("void implicit_convolve_dgemm<int=128, int=5>(int)", "off", "convolution"),
        ("cudnn_generated_fort_native_sm80_convFwd_pointwise_pointwise_kernel0_0", "unknown", "convolution"),
        ("cudnn_generated_fort_native_sm120_matMul_pointwise_pointwise_knob_20_32x32x128_0_0", "unknown", "gemm"),
        (
            "_ZN9spconvlib4cumm4conv4main59Ampere_f16f16f16f16f16tnt_m128n64k32m64n32k32A1T1688_200_C301",
            "native",
            "convolution",
        ),
        ("flashinfer::comm::ulysses_pcie::UlyssesPcieBarrier(unsigned long *)", "other", "communication"),
        ("void dpsk::ep::internode::dispatch<false, 8, true, 8>(int4*)", "other", "communication"),
        ("implicit_convolveNd_sgemm", "off", "convolution"),
        ("my_tile_a1t16880_kernel", "unknown", "gemm"),
        ("gemm_fp16_fp16_fp16_fp32_accumulate", "unknown", "gemm"),
        ("bmm_Bfloat16_E2m1E2m1_Fp32_bA16_bB16_", "native", "gemm"),
    ],
)
def test_kinds(name, verdict, kind):
    found = classify_kernel(name)
    assert (found.verdict, found.kind) == (verdict, kind)


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        # "threadblock::" is not a namespace of composable_kernel's.
        (
            "void cutlass::Kernel<cutlass::gemm::kernel::GemmGrouped<cutlass::gemm::threadblock::MmaTensorOp>>(P)",
            "native",
        ),
        # The sums and set-up of a convolution are not the convolution.
        ("sm80_xmma_depthwise_convolution_dgrad_tiling_f16f16_f32f32_f32_execute_helper_kernel__5x_cudnn", "helper"),
        ("sm80_xmma_depthwise_convolution_wgrad_tiling_f16f16_f32f32_f32_post_execute_kernel__5x_cudnn", "helper"),
        ("void cudnn::cnn::wgrad2d_c1_k1_nhwc_reduction_kernel<__half, float, 1, 5, 5>(P)", "helper"),
        # Tables cut CuTe names after the class; the path before it is still no evidence.
        ("kernel_cutlass_kernel_flash_attncutecu_blocks_kernelCuSeqlensToBlocksKernel_objec", "other"),
        ("kernel_cutlass_kernel_flash_attncuteflash_bwd_preprocessFlashAttentionBackwardPreprocess_obj", "helper"),
        # A product's namespace makes no product of a function that computes none.
        ("void dpsk::grouped_gemm::cuda::utils::transpose<512, 128, 4, 4>(unsigned char const*)", "helper"),
        ("void moe::dev::activation::activationDeepSeekKernel<moe::dev::activation::KernelParams<float>>(P)", "helper"),
        # Products written by hand, which words of elementwise kernels (mul, memory) would make "other".
        ("block_mul_kernel(int, int, float*, float*, float*)", "unknown"),
        ("matproductsharedmemory(__int64*, __int64*, __int64*)", "unknown"),
        ("triton_poi_fused_block_mul_0", "other"),
        # Words that only capitals separate; those of a mangled name too.
        ("sumChannelsNCHWKernel", "other"),
        ("_Z9AddKerneliPdS_", "other"),
        ("void dgl::aten::cuda::SpMMCooKernel<int, float, BinaryMul<float>>(P)", "unknown"),
        ("duplicateWithKeys(int)", "unknown"),
    ],
)
def test_parts_of_names_that_mislead(name, verdict):
    assert classify_kernel(name).verdict == verdict


def test_the_first_rule_decides():
    lowered = "void at::native::vectorized_elementwise_kernel<4, gemm_epilogue>"
    assert first_match(lowered).id == "torch-native"
