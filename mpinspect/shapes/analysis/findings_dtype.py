"""Findings whose cause is a dtype, a switch or the GPU: to be mended before any padding."""

from __future__ import annotations

from mpinspect.reporting.finding import Finding
from mpinspect.shapes.analysis.group import Group
from mpinspect.shapes.analysis.report import ShapeRow
from mpinspect.shapes.analysis.wording import dtype_name


def product_raises(group: Group) -> Finding:
    reasons = list(dict.fromkeys(row.reason for row in group.rows))
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return group.finding(
        f"{group.products} in {group.where} can't run on {group.gpu.name}: {reasons[0]}{more}",
        "; ".join(dict.fromkeys(_what_torch_takes(row, group.recording.autocast_dtype) for row in group.rows)),
        "error",
        reasons=reasons,
    )


def _what_torch_takes(row: ShapeRow, autocast_dtype: str | None) -> str:
    a, b = row.matmul.a, row.matmul.b
    if row.matmul.raises and a is not None and b is not None and a.dtype != b.dtype and " needs " not in row.reason:
        autocast = (
            "" if autocast_dtype else ", or run the model under torch.autocast, which casts floating-point operands"
        )
        dtypes = " and ".join(sorted((a.dtype, b.dtype)))
        return f"give both the same dtype (here {dtypes}): cast the input to the weight's dtype{autocast}"
    if " needs " in row.reason:
        return (
            "pad the sizes with zeros before the product and slice the result, or leave these layers in a 16-bit dtype"
        )
    return "see that the operands fit as torch's message asks"


def gpu_without(group: Group) -> Finding:
    return group.finding(
        f"{group.gpu.name} has no Tensor Cores: shapes make no difference there",
        "give another GPU if the model is meant for one: volta, turing, ampere, ada, hopper, blackwell",
        "info",
    )


def gpu_unknown(group: Group) -> Finding:
    return group.finding(
        f"what the Tensor Cores of {group.gpu.name or 'this GPU'} need is not known here: no verdict",
        "give the GPU's architecture: volta, turing, ampere, ada, hopper or blackwell",
        "info",
    )


def float32_under_autocast(group: Group) -> Finding:
    name = dtype_name(group.recording.autocast_dtype or "")
    return group.finding(
        f"{group.products} in {group.where} {group.verb('run')} in FP32 under {name} autocast, on CUDA "
        f"cores: autocast is disabled around them, or their operands are made in FP32 by an operation that autocast leaves "
        f"alone (torch's own math attention computes in FP32 too); {group.gain_words}",
        f"drop autocast(enabled=False) around {group.where} or cast the operands to {name}; where FP32's range is needed: "
        + _tf32_switch(group),
    )


def tf32_off(group: Group) -> Finding:
    return group.finding(
        f"{group.products} {group.are} FP32 with TF32 off, on CUDA cores; {group.gain_words}. "
        "Nothing about their shapes matters before that",
        f"{_tf32_switch(group)}; or run the model under torch.autocast in bfloat16 or float16",
    )


def float32(group: Group) -> Finding:
    return group.finding(
        f"{group.products} {group.are} FP32, which {group.gpu.name}'s Tensor Cores do not multiply (no TF32); "
        f"{group.gain_words} in FP16",
        'run the model under torch.autocast("cuda", torch.float16) with a loss scaler',
    )


def float64(group: Group) -> Finding:
    native = all(row.verdict == "native" for row in group.rows)
    where = "on Tensor Cores, at a fraction of FP16's rate" if native else "on CUDA cores"
    return group.finding(
        f"{group.products} in {group.where} {group.are} FP64, {where}",
        "cast to float32 before them, unless FP64 is meant; often one float64 constant or NumPy array is enough to cause it",
        "warning" if group.share >= 0.01 else "info",
    )


def dtype_not_multiplied(group: Group) -> Finding:
    dtypes = ", ".join(sorted({row.dtype for row in group.rows}))
    fix = "convert to float16"
    if group.gpu.architecture in ("volta", "turing") and dtypes == "bfloat16":
        fix = "use float16 with a loss scaler on this GPU: BF16 needs Ampere or later"
    return group.finding(
        f"{group.products} {group.are} {dtypes}, which {group.gpu.name}'s Tensor Cores do not multiply; {group.gain_words}",
        fix,
    )


def _tf32_switch(group: Group) -> str:
    kinds = {row.kind for row in group.rows}
    switches = []
    if kinds & {"gemm", "attention"}:
        switches.append('torch.set_float32_matmul_precision("high")')
    if kinds & {"convolution", "recurrent"}:
        switches.append("torch.backends.cudnn.allow_tf32 = True")
    return " and ".join(switches)
