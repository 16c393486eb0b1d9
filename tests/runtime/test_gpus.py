"""GPUs as data: names of devices, architectures, and plausible rates."""

import pytest

from mpinspect.runtime import gpus


@pytest.mark.parametrize(
    ("name", "major", "minor", "card", "architecture"),
    [
        ("NVIDIA H100 80GB HBM3", 9, 0, "H100", "hopper"),
        ("NVIDIA H100 PCIe", 9, 0, "H100 PCIe", "hopper"),
        ("NVIDIA H200", 9, 0, "H200", "hopper"),
        ("NVIDIA A100-PG509-200", 8, 0, "A100", "ampere"),
        ("NVIDIA A100 80GB PCIe", 8, 0, "A100 80GB PCIe", "ampere"),
        ("NVIDIA A100-SXM4-80GB", 8, 0, "A100 80GB", "ampere"),
        ("Tesla V100-SXM2-32GB", 7, 0, "V100 SXM2", "volta"),
        ("Tesla V100-PCIE-16GB", 7, 0, "V100 PCIe", "volta"),
        ("Tesla T4", 7, 5, "T4", "turing"),
        ("NVIDIA L4", 8, 9, "L4", "ada"),
        ("NVIDIA L40S", 8, 9, "L40S", "ada"),
        ("NVIDIA GeForce RTX 4090", 8, 9, "RTX 4090", "ada"),
        ("NVIDIA B200", 10, 0, "B200", "blackwell"),
        ("NVIDIA GB200", 10, 0, "GB200", "blackwell"),
    ],
)
def test_devices_are_known_by_their_names(name, major, minor, card, architecture):
    found = gpus.of_device(name, major, minor)
    assert found.architecture == architecture
    assert found.has_tensor_cores is True
    known = gpus.named(card)
    assert found.tensor_core_tflops == known.tensor_core_tflops
    assert found.bandwidth_gb_s == known.bandwidth_gb_s


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA H1000X"])
def test_a_card_that_only_resembles_a_known_one_has_no_rates(name):
    found = gpus.of_device(name, 9 if "H1000" in name else 8, 0 if "H1000" in name else 9)
    assert found.architecture in ("ada", "hopper")
    assert found.tensor_core_tflops == {}


@pytest.mark.parametrize(
    ("name", "major", "minor", "has"),
    [
        ("Quadro GP100", 6, 0, False),
        ("NVIDIA GeForce GTX 1660 Ti", 7, 5, False),
        ("NVIDIA T1000", 7, 5, False),
        ("NVIDIA GeForce RTX 2070", 7, 5, True),
        ("NVIDIA Thor", 11, 0, True),
        ("A GPU from the future", 15, 0, None),
        ("", None, None, None),
    ],
)
def test_who_has_tensor_cores(name, major, minor, has):
    assert gpus.of_device(name, major, minor).has_tensor_cores is has


def test_amd_gpus_have_no_known_architecture_or_tensor_cores():
    found = gpus.of_device("", 9, 4, vendor="AMD")
    assert (found.vendor, found.architecture, found.has_tensor_cores) == ("AMD", "", None)
    assert found.multiplies("float16") is None


@pytest.mark.parametrize("architecture", gpus.ARCHITECTURES)
def test_an_architecture_name_selects_a_card_with_rates(architecture):
    found = gpus.named(architecture.upper())
    assert found.architecture == architecture
    assert found.tensor_core_tflops["float16"] > found.cuda_core_tflops["float16"]
    assert found.cuda_core_tflops["float16"] >= found.cuda_core_tflops["float32"]
    assert set(found.tensor_core_tflops) <= set(gpus.TENSOR_CORE_DTYPES[architecture])
    assert found.multiplies("float16") is True


@pytest.mark.parametrize(
    ("architecture", "dtype", "answer"),
    [
        ("volta", "bfloat16", False),
        ("volta", "float32", False),
        ("turing", "int8", True),
        ("turing", "float32", False),
        ("ampere", "float32", True),
        ("ampere", "float8_e4m3fn", False),
        ("ada", "float64", False),
        ("hopper", "float8_e5m2", True),
        ("hopper", "float4_e2m1fn_x2", False),
        ("blackwell", "float4_e2m1fn_x2", True),
        ("hopper", "complex64", False),
    ],
)
def test_the_dtypes_that_tensor_cores_multiply(architecture, dtype, answer):
    assert gpus.named(architecture).multiplies(dtype) is answer


def test_fp64_is_the_data_centre_chips():
    assert gpus.named("A100").multiplies("float64") is True
    assert gpus.of_device("NVIDIA GeForce RTX 3090", 8, 6).multiplies("float64") is False
    assert gpus.of_device("NVIDIA RTX A2000", 8, 6).multiplies("float64") is None
    assert gpus.of_device("NVIDIA RTX A2000", 8, 6).multiplies("bfloat16") is True


#: Names of GPUs by their architecture and their Tensor Cores' peak in FP16, in TFLOP/s.
NAMES = {
    ("volta", 125): ["V100", "Tesla V100-SXM2-32GB", "Tesla V100-DGXS-32GB"],
    ("volta", None): ["NVIDIA TITAN V", "Quadro GV100", "Xavier"],
    ("turing", 65): ["Tesla T4"],
    ("turing", None): ["Quadro RTX 8000", "TITAN RTX", "rtx2070"],
    ("turing", 53.8): ["NVIDIA GeForce RTX 2080 Ti"],
    ("ampere", 312): ["NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A800-SXM4-80GB"],
    ("ampere", None): [
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "GRID A100D-80C",
        "RTX 3060",
        "NVIDIA GeForce RTX 3080 Laptop GPU",
        "NVIDIA GeForce RTX 2050",
        "NVIDIA RTX A2000 12GB",
        "Orin",
        "compute_86",
    ],
    ("ampere", 125): ["NVIDIA A10"],
    ("ampere", 70): ["A10G"],
    ("ampere", 154.8): ["NVIDIA RTX A6000"],
    ("ada", 121): ["NVIDIA L4"],
    ("ada", 119.5): ["NVIDIA L20"],
    ("ada", 165.2): ["NVIDIA GeForce RTX 4090"],
    ("ada", None): [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA RTX 6000 Ada Generation",
        "NVIDIA RTX 4000 SFF Ada Generation",
    ],
    ("hopper", 989.4): ["NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB", "H800", "sm_90", "9.0", "sm_90a"],
    ("hopper", None): ["NVIDIA H100 80GB HBM3 MIG 3g.40gb", "NVIDIA H20-3e"],
    ("hopper", 148): ["NVIDIA H20"],
    ("blackwell", 2250): ["NVIDIA B200", "B300"],
    ("blackwell", 2500): ["NVIDIA GB300"],
    ("blackwell", None): [
        "NVIDIA GB10",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA Thor",
        "12.0",
    ],
}


@pytest.mark.parametrize(
    ("text", "architecture", "half"), [(name, *known) for known, names in NAMES.items() for name in names]
)
def test_a_gpu_is_known_by_any_of_its_names(text, architecture, half):
    for spelt in (text, text.lower(), f" {text} "):
        found = gpus.named(spelt)
        assert (found.architecture, found.has_tensor_cores, found.vendor) == (architecture, True, "NVIDIA")
        assert found.tensor_core_tflops.get("float16") == half


@pytest.mark.parametrize(
    "text",
    [
        *("Tesla P100-PCIE-16GB", "Tesla K80", "P40", "GTX 1080 Ti", "NVIDIA GeForce GTX 1660 Ti"),
        *("Quadro T1000", "MX450", "6.1"),
    ],
)
def test_named_gpus_without_tensor_cores(text):
    assert (gpus.named(text).architecture, gpus.named(text).has_tensor_cores) == ("", False)


@pytest.mark.parametrize("text", ["AMD Instinct MI300X", "MI100", "mi355x", "gfx942", "AMD Radeon RX 7900 XTX"])
def test_amds_are_known_as_amds(text):
    assert (gpus.named(text).vendor, gpus.named(text).has_tensor_cores) == ("AMD", None)


def test_a_trace_without_a_compute_capability_is_judged_by_the_model():
    assert gpus.of_device("NVIDIA A10G", None).architecture == "ampere"
    assert gpus.of_device("Tesla P100-PCIE-16GB", None).has_tensor_cores is False


@pytest.mark.parametrize(("text", "near"), [("RTX 4091", "RTX 4090"), ("h110", "H100"), ("hoper", "hopper")])
def test_a_misspelt_name_has_suggestions(text, near):
    with pytest.raises(ValueError, match=rf"near it: .*{near}"):
        gpus.named(text)


def test_the_error_for_an_unknown_name_lists_known_gpus():
    with pytest.raises(ValueError, match=r"'pascal' is not a GPU known here.*volta.*H100 PCIe"):
        gpus.named("pascal")


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [
        ("NVIDIA GH200 480GB", 4000),
        ("NVIDIA GH200 120GB", 4000),
        ("NVIDIA GH200 144G HBM3e", 4900),
        ("NVIDIA H800 PCIe", 2000),
        ("NVIDIA H800", 3350),
        ("NVIDIA H20", 4000),
        ("NVIDIA A800 80GB PCIe", 1935),
        ("NVIDIA A800-SXM4-80GB", 2039),
        ("NVIDIA A800 40GB Active", 1555),
    ],
)
def test_variants_of_a_card_differ_in_bandwidth(name, bandwidth):
    assert gpus.of_device(name, None).bandwidth_gb_s == bandwidth


def test_a_b300_multiplies_fp4_faster_and_int8_slower_than_a_b200():
    older, newer = (gpus.named(name).tensor_core_tflops for name in ("B200", "B300"))
    assert newer["float4"] > older["float4"]
    assert newer["int8"] < older["int8"] / 10
