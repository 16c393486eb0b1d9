"""The wording that the forms of the kernel report share: times, shares, kernels' names, products, and what stands where.

*Measured* figures stand bare, *estimates* are marked "~", what is not known is "?".
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mpinspect.kernels.analysis.limits import Limits
from mpinspect.kernels.analysis.losses import Loss
from mpinspect.kernels.analysis.ranks import RankReport
from mpinspect.kernels.analysis.report import KernelReport
from mpinspect.kernels.analysis.rows import PRODUCTS, VERDICTS
from mpinspect.kernels.analysis.savings import Saving
from mpinspect.kernels.analysis.shares import ModuleRow, NameRow, Shares
from mpinspect.reporting.words import UNKNOWN, duration, format_name, percent

#: What each verdict says, for legends.
MEANINGS = {
    "native": "on Tensor Cores",
    "degraded": "on Tensor Cores, held back",
    "off": "a product on CUDA cores",
    "unknown": "a product; no name tells",
    "helper": "work beside a product",
    "other": "no product",
}
_ANONYMOUS = "(anonymous namespace)::"


def share(fraction: float | None) -> str:
    return UNKNOWN if fraction is None else percent(fraction)


def rate(tflops: float | None) -> str:
    """TFLOP/s, an estimate; "?" where unknown."""
    return UNKNOWN if tflops is None else f"~{tflops:.3g}"


def short_name(name: str, length: int) -> str:
    """A kernel's name without its parameters and torch's namespaces, at most ``length`` long: the middle gives way."""
    text = name.replace(_ANONYMOUS, "").removeprefix("void ")
    text = _without_parameters(text).replace("at::native::", "").replace("pytorch_flash::", "")
    # CUTLASS's kernels name themselves inside Kernel<...>, and once more among the parameters.
    wrapped = re.fullmatch(r"cutlass\w*::Kernel2?<(\w+)>?", text)
    text = wrapped[1] if wrapped else text
    if len(text) <= length:
        return text
    tail = (length - 3) // 3
    return f"{text[: length - 3 - tail]}...{text[-tail:] if tail > 0 else ''}"


def _without_parameters(text: str) -> str:
    """A C++ signature up to its parameter list: the first parenthesis outside of template arguments."""
    depth = 0
    for place, character in enumerate(text):
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "(" and depth <= 0 and place:
            return text[:place]
    return text


def short_module(module: str, length: int) -> str:
    """A module's path; its end tells most."""
    text = module or "(unknown)"
    return text if len(text) <= length else f"...{text[3 - length :]}"


def product(loss: Loss) -> str:
    """ "addmm 128 x 30522 x 512 bfloat16": M x N x K, as far as known."""
    sizes = "" if loss.m is None else f"{loss.m} x {loss.n} x {loss.k}"
    batch = f"{loss.batch} x " if loss.batch is not None and loss.batch > 1 else ""
    op = loss.op.removeprefix("aten::") or loss.kind
    return " ".join(filter(None, (op, f"{batch}{sizes}" if sizes else "", loss.dtype and format_name(loss.dtype))))


def saving(one: Saving) -> str:
    """ "~32.0 us by the roofline, memory-limited": an estimate and its basis."""
    return f"{one.way}: ~{duration(one.saved_us)} at most, by the {one.basis} (then {one.limited_by}-limited)"


def modules(loss: Loss, length: int) -> str:
    """ "encoder.layers.0.linear1 and 11 more"; "" where unknown."""
    if not loss.modules:
        return ""
    more = f" and {len(loss.modules) - 1:,} more" if len(loss.modules) > 1 else ""
    return short_module(loss.modules[0], length) + more


def headline(report: KernelReport) -> str:
    files = [rank.source for rank in report.ranks if rank.source]
    if len(report.ranks) == 1:
        return report.ranks[0].label
    return f"{len(report.ranks)} traces" if files or not report.ranks else f"{len(report.ranks)} profiles"


def gpus(report: KernelReport) -> str:
    """The GPUs by name, and what they are; "" without any."""
    words = []
    for gpu in report.gpus:
        known = (
            f" ({gpu.architecture.title()})" if gpu.architecture and gpu.architecture not in gpu.name.lower() else ""
        )
        words.append(f"{gpu.name or 'a GPU that the trace does not name'}{known}")
    return ", ".join(words)


def figures(shares: Shares) -> Iterator[tuple[str, str]]:
    """(share, of what): the three shares of Tensor Core time, each with its denominator."""
    if shares.calls == 0:
        return
    unknown = shares.of_products("unknown")
    # Where no verdict of a product is known, nothing is: 0% would be a "no".
    all_unknown = unknown == 1.0
    more = "" if not unknown else ": all unknown" if all_unknown else f"; of {percent(unknown)} more it is unknown"
    products = f"of the matrix products' time ({duration(shares.product_time_us)}){more}"
    on = None if all_unknown else shares.tensor_core_fraction
    yield share(on), products if shares.product_time_us > 0 else "of the products: none ran"
    beside = ", communication included" if shares.communication_time_us > 0 else ""
    on = None if all_unknown else shares.tensor_core_fraction_of_all
    yield share(on), f"of all kernel time ({duration(shares.kernel_time_us)}{beside})"
    if shares.communication_time_us > 0:
        apart = f"of kernel time without communication ({duration(shares.compute_time_us)})"
        yield share(shares.tensor_core_fraction_of_compute), apart


def verdict_cells(shares: Shares) -> Iterator[list[str]]:
    """Verdict, meaning, calls, time, share of all, share of products; those that occur."""
    for verdict in VERDICTS:
        calls, time = shares.verdict_calls[verdict], shares.verdict_time_us[verdict]
        if not calls:
            continue
        of_all = share(time / shares.kernel_time_us if shares.kernel_time_us > 0 else None)
        of_products = share(shares.of_products(verdict)) if verdict in PRODUCTS else "-"
        yield [verdict, MEANINGS[verdict], f"{calls:,}", duration(time), of_all, of_products]


VERDICT_COLUMNS = ["verdict", "", "kernels", "time", "of all", "of products"]


def name_cells(row: NameRow) -> list[str]:
    return [row.verdict, duration(row.time_us), share(row.fraction), f"{row.calls:,}", rate(row.tflops)]


NAME_COLUMNS = ["verdict", "time", "of all", "calls", "TFLOP/s"]


def module_cells(row: ModuleRow) -> list[str]:
    """Time, share, and the times of the verdicts of products; "-" where there is none."""
    verdicts = [row.verdict_time_us[verdict] for verdict in PRODUCTS]
    rest = row.time_us - sum(verdicts)
    times = [duration(time) if time > 0 else "-" for time in (*verdicts, rest)]
    return [duration(row.time_us), share(row.fraction), *times]


MODULE_COLUMNS = ["time", "of all", *PRODUCTS, "rest"]


def has_modules(report: KernelReport) -> bool:
    return any(row.module for row in report.by_module)


def rank_cells(rank: RankReport) -> list[str]:
    shares, idle = rank.shares, [device.idle_fraction for device in rank.devices]
    return [
        rank.label,
        f"{shares.calls:,}",
        duration(shares.kernel_time_us),
        share(shares.tensor_core_fraction),
        share(shares.tensor_core_fraction_of_all),
        share(shares.communication_fraction),
        ", ".join(share(each) for each in idle) or UNKNOWN,
        share(rank.coverage.attributed_fraction),
    ]


RANK_COLUMNS = ["trace", "kernels", "kernel time", "TC of products", "TC of all", "communic.", "idle", "attributed"]


def coverage_words(report: KernelReport) -> Iterator[str]:
    """How far kernel time was attributed, in sentences."""
    covered = report.coverage
    if covered.attributed_fraction is None:
        yield "No kernel, so nothing to attribute."
        return
    reasons = [f"{percent(part)} {reason}" for reason, part in covered.unattributed_fractions.items() if part > 0]
    yield f"operator known for {share(covered.attributed_fraction)} of kernel time" + (
        f"; the rest: {', '.join(reasons)}" if reasons else ""
    )
    chains = (
        ""
        if covered.path_fraction == covered.module_fraction
        else f" (as a dotted path {share(covered.path_fraction)})"
    )
    yield f"module known for {share(covered.module_fraction)} of kernel time{chains}"
    if covered.flops_fraction is not None:
        yield f"FLOPs known for {share(covered.flops_fraction)} of the matrix products' time"


def limit_words(limits: Limits) -> Iterator[str]:
    """Math-limited, memory-limited and idle time, and the bound."""
    if limits.span_us <= 0:
        yield "Unknown: nothing ran on a GPU."
        return
    parts = (
        ("math-limited products", limits.math_limited_us),
        ("memory-limited kernels", limits.memory_limited_us),
        ("products with unknown limit", limits.unknown_us),
        ("communication", limits.communication_us),
        ("copies", limits.copies_us),
        ("idle", limits.idle_us),
    )
    yield f"from first to last kernel {duration(limits.span_us)}: " + ", ".join(
        f"{name} {duration(time)}" for name, time in parts if time > 0
    )
    saved = {cause: time for cause, time in limits.saved_at_most_us.items() if time > 0}
    if limits.speedup_at_most is None:
        yield "No bound of what mixed precision can bring: the GPU has no Tensor Cores, is unknown, or kernels overlap."
        return
    alone = limits.kernel_speedup_at_most
    kernels = f" (~{alone:.2f}x if only kernel time counted)" if alone is not None and limits.idle_us > 0 else ""
    yield (
        f"mixed precision and Tensor Cores can make this at most ~{limits.speedup_at_most:.2f}x as fast{kernels}: "
        + (
            ", ".join(f"{cause} ~{duration(time)}" for cause, time in saved.items())
            if saved
            else "nothing left to save"
        )
    )
    yield f"A bound, which assumes: {'; '.join(limits.assumptions)}."
