"""Compose the kernel report's text: Tensor Core time, findings, losses, kernels, modules, possible gains, traces, coverage."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from functools import partial

from mpinspect.kernels.analysis.findings import cost_us
from mpinspect.kernels.analysis.limits import Limits
from mpinspect.kernels.analysis.losses import Loss
from mpinspect.kernels.analysis.ranks import RankReport
from mpinspect.kernels.analysis.report import KernelReport
from mpinspect.kernels.analysis.rows import PRODUCTS, VERDICTS
from mpinspect.kernels.analysis.savings import Saving
from mpinspect.kernels.analysis.shares import ModuleRow, NameRow, Shares
from mpinspect.reporting import speed
from mpinspect.reporting.document import (
    Block,
    Cell,
    Column,
    Document,
    Findings,
    Front,
    Item,
    Items,
    Limit,
    Line,
    Section,
    Tab,
    Tables,
    Tone,
    lines,
    most,
    section,
    table,
)
from mpinspect.reporting.finding import SEVERITIES, Finding
from mpinspect.reporting.words import (
    NOT_APPLICABLE,
    UNKNOWN,
    and_more,
    duration,
    filled,
    format_name,
    number_of,
    optional,
    percent,
    shortened,
    upper_first,
)
from mpinspect.shapes.report.document import verdict_cell

#: Maximum numbers of rows in a terminal and on a page; GitHub cuts a comment at 65,536 characters.
ROWS = Limit(15, 50, "more; the JSON report has all")
LOSSES = Limit(8, 50, "more; the JSON report has all")
TRACES = Limit(32, 256, "more; the JSON report has all")
#: Maximum number of characters of a name, if there is room.
_NAME = 100

#: The meaning of each verdict.
_MEANINGS = {
    "native": "on Tensor Cores",
    "degraded": "on Tensor Cores, held back",
    "off": "a product on CUDA cores",
    "unknown": "a product on unknown units",
    "helper": "work for a product",
    "other": "no product",
}


def document(report: KernelReport) -> Document:
    """Return the report as a document. Recommended actions precede the figures behind them."""
    bars = tuple(_bars(report))
    return Document(
        title(report),
        (*section("Findings", Findings(report.findings), is_on_front=True), *bars, *_blocks(report)),
        verdict=(*_verdict(report), *lines(*_totals(report))),
        front=_front(report, bars),
    )


def _front(report: KernelReport, bars: tuple[Section, ...]) -> Front:
    """Return the first screen of the report's own page."""
    return speed.front(
        _sources(report),
        tuple(filter(None, (*_gpus(report), *_totals(report)))),
        report.findings,
        Tab("Kernels", Document("", bars)),
        headline=_headline(report),
        unasked=report.phrase,
        place=partial(_cost_words, report),
    )


def _verdict(report: KernelReport) -> Iterator[Line]:
    """Yield a line on the costliest finding that asks for a change; nothing without one."""
    found, _ = _costs(report)
    finding = next((finding for finding, _ in found if finding.is_alarm), None)
    if finding is not None:
        tone: Tone = "error" if finding.severity == SEVERITIES[-1] else "warning"
        yield Line(f"{upper_first(finding.severity)}: {finding.id}, {_cost_words(report, finding)}.", tone)


def _bars(report: KernelReport) -> Iterator[Section]:
    """Yield the tables with bars of the GPU's time: by verdict, idle time first, and by kernel."""
    if report.kernels:
        yield from section("GPU time", _verdicts(report), is_on_front=True)
        yield from section("By kernel", _names(report), is_on_front=True)


def _blocks(report: KernelReport) -> Iterator[Block]:
    if report.kernels:
        yield from section("Tensor Cores", *_tensor_cores(report))
        yield from section("Eligible but not used", _losses(report.eligible))
        yield from section("Used but degraded", _losses(report.degraded))
        if has_modules(report):
            yield from section("By module", _modules(report.by_module))
        yield from section("What mixed precision can still bring", *lines(*_limits(report.limits)))
    if len(report.ranks) > 1:
        yield from section("By trace", _traces(report.ranks))
    if report.kernels:
        yield from section("Coverage", *lines(*_coverage(report)))


def title(report: KernelReport) -> str:
    """Return a title with the traces that were judged, and their GPUs."""
    gpus = list(_gpus(report))
    if not report.kernels or not gpus:
        return f"Kernels of {_sources(report)}"
    return f"Kernels of {_sources(report)} on {', '.join(gpus)}"


def _sources(report: KernelReport) -> str:
    if len(report.ranks) == 1:
        return report.ranks[0].label
    is_read = any(rank.source for rank in report.ranks) or not report.ranks
    return f"{len(report.ranks)} {'traces' if is_read else 'profiles'}"


def _gpus(report: KernelReport) -> Iterator[str]:
    """Yield each GPU's name, followed by its architecture unless the name contains it."""
    for gpu in report.gpus:
        name = gpu.name or "a GPU that the trace does not name"
        if gpu.architecture and gpu.architecture not in gpu.name.lower():
            name = f"{name} ({gpu.architecture.title()})"
        yield name


def _costs(report: KernelReport) -> tuple[list[tuple[Finding, float]], float]:
    """Return the findings, an idle GPU first, each with its cost in us, and the total time that the costs are shares of."""
    # Kernels with unknown names may already run at full speed.
    findings = (finding for finding in report.findings if finding.id != "unknown-kernels")
    found = [(finding, time) for finding in findings if (time := cost_us(finding))]
    found.sort(key=lambda pair: (pair[0].id != "gpu-idle", -pair[1]))
    return found, max([_whole_us(report), *(time for _, time in found)])


def _cost_words(report: KernelReport, finding: Finding) -> str:
    """Return a finding's share of the time in words; "" if it costs none."""
    found, span = _costs(report)
    time = next((time for each, time in found if each is finding), 0.0)
    about = "saves ~" if finding.evidence.get("saved_us") else ""
    return f"{about}{percent(time / span)} of {duration(span)}" if time else ""


def _whole_us(report: KernelReport) -> float:
    """Return the total that bars are shares of: the time from the first kernel to the last, or the sum of overlapping kernels."""
    return max(report.limits.span_us, report.shares.kernel_time_us, 1e-9)


def costliest(report: KernelReport) -> Iterator[str]:
    """Yield the costliest finding and its share of the time in words; nothing if no finding costs time."""
    for finding, _ in _costs(report)[0][:1]:
        yield f"costliest: {finding.id}, {_cost_words(report, finding)}"


def _headline(report: KernelReport) -> str:
    """Return the share on Tensor Cores; before it the idle share if a finding names that, since it costs more."""
    if not report.shares.calls:
        return ""
    used, idle = report.tensor_core_fraction, report.limits.idle_fraction
    on = "No matrix product ran"
    if used == 0 and not report.shares.of_products("unknown"):
        calls, time_us = report.shares.verdict_calls["off"], report.shares.verdict_time_us["off"]
        share = percent(time_us / _whole_us(report))
        on = f"{calls:,} matrix products, {share} of the time, ran on CUDA cores, none on Tensor Cores"
    elif used is not None:
        on = f"{next(figures(report.shares))[0]} of the matrix products' time is on Tensor Cores"
    if not _is_idle(report):
        return f"{on}."
    return f"The GPU is idle {share_words(idle)} of {duration(report.limits.span_us)}; {on[0].lower()}{on[1:]}."


def _totals(report: KernelReport) -> Iterator[str]:
    shares = report.shares
    if not shares.calls:
        yield "No kernel was recorded."
        return
    limits = report.limits
    yield (
        f"{number_of(shares.calls, 'kernel')}, {duration(shares.kernel_time_us)} of kernel time; "
        f"the GPU idle {share_words(limits.idle_fraction)} of {duration(limits.span_us)}"
    )


# -- Tensor Cores ---------------------------------------------------------------------------------------------------


def _tensor_cores(report: KernelReport) -> Iterator[Block]:
    yield from (Line(f"{figure} {of}") for figure, of in figures(report.shares))
    yield Line(report.phrase, "strong")


def _bar_column(report: KernelReport, meaning: str = "") -> Column:
    return Column(f"of {duration(_whole_us(report))}", is_left=True, meaning=meaning)


def _bar(report: KernelReport, time_us: float, tone: Tone) -> Cell:
    part = time_us / _whole_us(report)
    return Cell(percent(part), tone or "dim", bar=part)


def figures(shares: Shares) -> Iterator[tuple[str, str]]:
    """Yield the three shares of Tensor Core time, each as (share, denominator in words)."""
    if shares.calls == 0:
        return
    unknown = shares.of_products("unknown")
    products = f"of the matrix products' time ({duration(shares.product_time_us)})"
    on_of_products, on_of_all = (
        share_words(shares.tensor_core_fraction),
        share_words(shares.tensor_core_fraction_of_all),
    )
    if unknown is None:
        products = "of the products: none ran"
    elif unknown == 1.0:
        # 0% would claim that all ran off Tensor Cores.
        on_of_products = on_of_all = UNKNOWN
        products += ": all unknown"
    elif unknown > 0:
        products += f"; unknown for another {percent(unknown)}"
    yield on_of_products, products
    if shares.communication_time_us <= 0:
        yield on_of_all, f"of all kernel time ({duration(shares.kernel_time_us)})"
    else:
        yield on_of_all, f"of all kernel time ({duration(shares.kernel_time_us)}, communication included)"
        apart = f"of kernel time without communication ({duration(shares.compute_time_us)})"
        yield share_words(shares.tensor_core_fraction_of_compute), apart


def _verdicts(report: KernelReport) -> Tables:
    """Return a row for idle time, one for each verdict that occurs, and one for copies."""
    columns = (
        _bar_column(report, "share of the time from the first kernel to the last"),
        Column("time"),
        Column("verdict", is_left=True),
        Column("", is_left=True, priority=1),
        Column("kernels", priority=1),
        Column("of products", priority=1),
    )
    return table(columns, _verdict_rows(report))


def _is_idle(report: KernelReport) -> bool:
    return any(finding.id == "gpu-idle" and finding.is_alarm for finding in report.findings)


def _verdict_rows(report: KernelReport) -> Iterator[list[str | Cell]]:
    shares, limits = report.shares, report.limits
    rows: list[tuple[float, Cell, str, str, str]] = [
        (
            limits.idle_us,
            Cell("idle", "warning" if _is_idle(report) else ""),
            "no kernel or copy runs",
            NOT_APPLICABLE,
            NOT_APPLICABLE,
        )
    ]
    for verdict in VERDICTS:
        cell = verdict_cell(verdict, is_to_do=bool(_to_do(report)))
        calls, of_products = shares.verdict_calls[verdict], shares.of_products(verdict)
        words = share_words(of_products) if verdict in PRODUCTS else NOT_APPLICABLE
        rows.append((shares.verdict_time_us[verdict], cell, _MEANINGS[verdict], f"{calls:,}", words))
    rows.append((limits.copies_us, Cell("copies"), "copies and memsets", NOT_APPLICABLE, NOT_APPLICABLE))
    for time, verdict_shown, *others in rows:
        if time > 0:
            yield [_bar(report, time, verdict_shown.tone), duration(time), verdict_shown, *others]


# -- losses, kernels, modules, traces -------------------------------------------------------------------------------


def _losses(losses: tuple[Loss, ...]) -> Items:
    return Items(tuple(map(_loss, losses[: most(LOSSES, len(losses))])), LOSSES, total=len(losses))


def _loss(loss: Loss) -> Item:
    times = f"{duration(loss.time_us)}, {share_words(loss.fraction)} of all, {loss.calls:,} x"
    details = [shortened(clean_name(loss.kernel), _NAME, "middle"), loss.cause, *map(_saving, loss.savings)]
    if loss.modules:
        details.insert(0, f"in {shortened(loss.module, _NAME, 'start')}{and_more(len(loss.modules) - 1)}")
    return Item(f"{_product(loss)}: {times}, {_rate(loss.tflops)} TFLOP/s", details=tuple(details))


def _product(loss: Loss) -> str:
    """Return the product's operator, sizes (M x N x K) and dtype, as far as known: "addmm 128 x 30522 x 512 BF16"."""
    sizes = [loss.m, loss.n, loss.k]
    if loss.batch is not None and loss.batch > 1:
        sizes.insert(0, loss.batch)
    written = " x ".join(str(size) for size in sizes if size is not None)
    op = loss.op.removeprefix("aten::") or loss.kind
    return " ".join(filter(None, (op, written, loss.dtype and format_name(loss.dtype))))


def _saving(one: Saving) -> str:
    """Return an estimate with its basis: "aligned: ~32.0 us at most, by the roofline (then memory-limited)"."""
    return f"{one.way}: ~{duration(one.saved_us)} at most, by the {one.basis} (then {one.limited_by}-limited)"


def _to_do(report: KernelReport) -> Collection[str]:
    """Return the names of the kernels for which a finding asks for a change."""
    grave = [finding for finding in report.findings if finding.is_alarm]
    causes = {finding.evidence.get("cause") for finding in grave} - {None}
    # All products of this finding are losses.
    is_all = any(finding.id == "tensor-cores-unused" for finding in grave)
    found = {row.name for row in report.by_name if is_all and row.verdict == "off"}
    return found | {loss.kernel for loss in report.losses if loss.cause_id in causes}


def _names(report: KernelReport) -> Tables:
    columns = (
        _bar_column(report),
        Column("time"),
        Column("verdict", is_left=True),
        Column("calls", priority=1),
        *[Column("TFLOP/s", priority=1)] * _has_rates(report),
        Column("kernel", is_name=True, cut="middle"),
    )
    to_do = _to_do(report)
    names = sorted(report.by_name, key=lambda row: row.name not in to_do)
    rows = [_name_cells(report, row, is_to_do=row.name in to_do) for row in names[: most(ROWS, len(names))]]
    return table(columns, rows, limit=ROWS, total=len(names))


def _name_cells(report: KernelReport, row: NameRow, *, is_to_do: bool) -> list[str | Cell]:
    doubt = (row.reason,) if row.verdict in ("degraded", "unknown") else ()
    name = Cell(shortened(clean_name(row.name), _NAME, "middle"), notes=doubt)
    verdict = verdict_cell(row.verdict, is_to_do=is_to_do)
    bar = _bar(report, row.time_us, verdict.tone)
    rate = [_rate(row.tflops)] * _has_rates(report)
    return [bar, duration(row.time_us), verdict, f"{row.calls:,}", *rate, name]


def _has_rates(report: KernelReport) -> bool:
    return any(row.tflops is not None for row in report.by_name)


def _modules(modules: tuple[ModuleRow, ...]) -> Tables:
    columns = (
        Column("time"),
        Column("of all"),
        # Verdicts that no module has would only take room from the names.
        *(Column(verdict, priority=1, is_optional=True) for verdict in (*PRODUCTS, "rest")),
        Column("module", is_name=True, cut="start"),
    )
    rows = map(_module_cells, modules[: most(ROWS, len(modules))])
    return table(columns, rows, limit=ROWS, total=len(modules))


def _module_cells(row: ModuleRow) -> list[str]:
    """Return the cells: time, share, time by product verdict, other time, name; "-" for no time."""
    verdicts = [row.verdict_time_us[verdict] for verdict in PRODUCTS]
    rest = row.time_us - sum(verdicts)
    times = [duration(time) if time > 0 else NOT_APPLICABLE for time in (*verdicts, rest)]
    return [duration(row.time_us), share_words(row.fraction), *times, row.module or "(unknown)"]


def _traces(ranks: tuple[RankReport, ...]) -> Tables:
    columns = (
        Column("trace", is_name=True),
        Column("kernels", priority=2),
        Column("kernel time"),
        Column("TC of products"),
        Column("TC of all", priority=1),
        Column("communication", priority=1),
        Column("idle"),
        Column("attributed", priority=2),
    )
    return table(columns, map(_trace_cells, ranks[: most(TRACES, len(ranks))]), limit=TRACES, total=len(ranks))


def _trace_cells(rank: RankReport) -> list[str]:
    shares, idle = rank.shares, [device.idle_fraction for device in rank.devices]
    return [
        rank.label,
        f"{shares.calls:,}",
        duration(shares.kernel_time_us),
        share_words(shares.tensor_core_fraction),
        share_words(shares.tensor_core_fraction_of_all),
        share_words(shares.communication_fraction),
        ", ".join(map(share_words, idle)) or UNKNOWN,
        share_words(rank.coverage.attributed_fraction),
    ]


# -- the rest -------------------------------------------------------------------------------------------------------


def _coverage(report: KernelReport) -> Iterator[str]:
    """Yield sentences on how much of the kernel time was attributed."""
    covered = report.coverage
    reasons = [f"{percent(part)} {reason}" for reason, part in covered.unattributed_fractions.items() if part > 0]
    rest = filled("; the rest: {}", ", ".join(reasons))
    yield f"operator known for {share_words(covered.attributed_fraction)} of kernel time{rest}"
    chains = ""
    if covered.path_fraction != covered.module_fraction:
        chains = f" (as a dotted path {share_words(covered.path_fraction)})"
    yield f"module known for {share_words(covered.module_fraction)} of kernel time{chains}"
    if covered.flops_fraction is not None:
        yield f"FLOPs known for {share_words(covered.flops_fraction)} of the matrix products' time"


def _limits(limits: Limits) -> Iterator[str]:
    """Yield sentences on math-limited, memory-limited and idle time, and on the bound."""
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
    yield f"from first to last kernel {duration(limits.span_us)}: {_times(parts)}"
    if limits.speedup_at_most is None:
        yield "No bound on the gain by mixed precision: no Tensor Cores are known, kernels overlap, or FLOPs are unknown."
        return
    bound = f"~{limits.speedup_at_most:.2f}x as fast"
    if limits.kernel_speedup_at_most is not None and limits.idle_us > 0:
        bound += f" (~{limits.kernel_speedup_at_most:.2f}x if only kernel time counted)"
    saved = _times(limits.saved_at_most_us.items(), "~") or "nothing left to save"
    yield f"mixed precision and Tensor Cores can make this at most {bound}: {saved}"
    yield f"A bound, which assumes: {'; '.join(limits.assumptions)}."


def _times(parts: Iterable[tuple[str, float]], mark: str = "") -> str:
    return ", ".join(f"{name} {mark}{duration(time)}" for name, time in parts if time > 0)


def share_words(fraction: float | None) -> str:
    """Return a share 0..1 in words; "?" if unknown."""
    return optional(fraction, percent, UNKNOWN)


def has_modules(report: KernelReport) -> bool:
    return any(row.module for row in report.by_module)


def clean_name(name: str) -> str:
    """Return a kernel's name without its parameters and torch's namespaces."""
    text = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    text = _without_parameters(text).replace("at::native::", "").replace("pytorch_flash::", "")
    # CUTLASS kernels have their name inside Kernel<...>, and again among the parameters.
    return re.sub(r"^cutlass\w*::Kernel2?<(\w+)>?$", r"\1", text)


def _without_parameters(text: str) -> str:
    """Return a C++ signature up to its parameter list, which starts at the first parenthesis outside template arguments."""
    depth = 0
    for place, character in enumerate(text):
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "(" and depth <= 0 and place:
            return text[:place]
    return text


def _rate(tflops: float | None) -> str:
    """Return the estimated TFLOP/s in words; "?" if unknown."""
    return optional(tflops, "~{:.3g}".format, UNKNOWN)
