"""Compose the lint's text: headline, FLOPs by verdict, findings, sizes to pad, products from worst to best, notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from mpinspect.reporting import speed
from mpinspect.reporting.document import (
    Cell,
    Column,
    Document,
    Findings,
    Limit,
    Line,
    Tab,
    Tables,
    Tone,
    bullets,
    is_empty,
    lines,
    most,
    section,
    table,
)
from mpinspect.reporting.words import (
    NOT_APPLICABLE,
    UNKNOWN,
    and_more,
    bracketed,
    by_number,
    class_beside,
    duration,
    filled,
    number_of,
    percent,
    upper_first,
)
from mpinspect.shapes.analysis.report import Padding, ShapeReport, ShapeRow
from mpinspect.shapes.analysis.verdict import VERDICTS
from mpinspect.shapes.analysis.wording import dtype_name, members

#: Maximum numbers of product rows shown in a terminal and on a page; GitHub cuts a comment at 65,536 characters.
_TERMINAL, _PAGE = 20, 60
NOTES = Limit(10, 30)

#: Sort order of the verdicts, worst first.
_RANK = {"off": 0, "degraded": 1, "unknown": 2, "native": 3}
#: The colours of verdicts on products and kernels.
TONES: dict[str, Tone] = {"off": "error", "degraded": "warning", "unknown": "unknown", "native": "good"}
#: Share of the FLOPs that counts as nearly all: a ResNet's stem is 3%.
_NEARLY_ALL = 0.95
#: Share of the estimated time from which tiles and waves that are not full are mentioned.
_WORTH_MENTIONING = 0.05
_SHORT_OF_NATIVE = {
    "off": "are not on Tensor Cores",
    "degraded": "are on Tensor Cores behind narrower loads or copies",
    "unknown": "have no verdict",
}
_TALK = {True: "yes", False: "no", None: NOT_APPLICABLE}


def document(report: ShapeReport) -> Document:
    bars = section("Products, worst first", _products(product_rows(report)), is_on_front=True)
    clean = clean_sentence(report)
    return Document(
        headline(report),
        (
            *section("Findings", Findings(report.listed), *_unchanging(report), is_on_front=True),
            *section("Sizes to pad", _padding(report.padding)),
            *bars,
            *section("Notes", bullets(report.notes, NOTES)),
        ),
        verdict=(*lines(*totals(report)), *lines(clean, tone="good" if is_clean(report) else "strong")),
        front=speed.front(
            report.model or "A model",
            tuple(headline(report).partition(" on ")[2].split(", ")),
            report.listed,
            Tab("Shapes", Document("", bars)),
            headline=f"{totals(report)[0]}.".replace("..", "."),
            unasked=clean,
            notes=tuple(line.text for line in _unchanging(report)),
        ),
    )


def _unchanging(report: ShapeReport) -> Iterator[Line]:
    """Yield a sentence that counts the findings whose fix has no measurable effect."""
    ids = Counter(finding.id for finding in report.unchanging)
    if ids:
        noun = "more finding" if report.listed else "finding"
        named = ", ".join(by_number(number, id, f"{id} ({number} times)") for id, number in ids.items())
        yield Line(f"{number_of(ids.total(), noun)} would have no measurable effect: {named}. JSON has all.", "dim")


def padding_document(report: ShapeReport) -> Document:
    """Return the table of sizes that are worth padding on its own, or a sentence if it is empty."""
    table = _padding(report.padding)
    if is_empty(table):
        return Document("", lines("No size needs padding."))
    return Document("", (table,))


# -- the verdict ----------------------------------------------------------------------------------------------------


def headline(report: ShapeReport) -> str:
    """Return the model, GPU and dtype in one line."""
    dtype = dtype_name(report.dtype) or "no dtype"
    cast = filled(" under {} autocast", dtype_name(report.autocast_dtype or ""))
    what = "forward and backward" if report.backward else "forward only"
    gpu = report.gpu.name + filled(" ({})", report.gpu.architecture)
    if report.device == "cpu":
        gpu += ", recorded on a CPU"
    return f"{report.model or 'A model'} on {gpu}: {dtype}{cast}, {what}"


def totals(report: ShapeReport) -> list[str]:
    """Return sentences on the FLOPs by verdict, the talk's rule, and the roofline's time."""
    if not report.matmuls:
        return ["No matrix product was recorded."]
    kept, broken = report.calls_by_talk.get(True, 0), report.calls_by_talk.get(False, 0)
    verdicts = ", ".join(
        f"{percent(report.flops_by_verdict.get(verdict, 0) / (report.flops or 1))} {verdict}"
        for verdict in VERDICTS
        if verdict == "native" or report.flops_by_verdict.get(verdict, 0)
    )
    lines = [
        f"{number_of(report.calls, 'product')}, {flops_words(report.flops)}; Tensor Cores by today's rule: {verdicts} (of the "
        "FLOPs)",
        f"multiples of 8 (a requirement before cuBLAS 11 and cuDNN 7.6.3): {kept:,} of "
        f"{number_of(kept + broken, 'product')} {by_number(kept, 'has', 'have')} them",
    ]
    if report.estimated_us is not None:
        lines.append(
            f"at least {duration(report.estimated_us)} for the products on this GPU{_partial(report, report.estimated_us)} "
            "(estimated: roofline of its peak rates)"
        )
    return lines


def _partial(report: ShapeReport, estimated_us: float) -> str:
    """Return a clause on tiles and waves that are not full, if they add a share of the time that is worth mentioning."""
    added = report.estimated_partial_tiles_fraction or 0.0
    if added < _WORTH_MENTIONING:
        return ""
    return f", {duration(estimated_us * (1 + added))} with tiles and waves that are not full"


def clean_sentence(report: ShapeReport) -> str:
    """Return the sentence for a report without findings above "info"; "" with such findings or without any FLOP."""
    if not report.flops or any(finding.severity != "info" for finding in report.findings):
        return ""
    if report.gpu.has_tensor_cores is not True:
        return ""
    if is_clean(report):
        native = report.flops_by_verdict.get("native", 0) / report.flops
        words = by_number(native, "the shapes suit", f"{percent(native)} of the FLOPs suit")
        if not report.listed:
            words = f"nothing to fix: {words}"
        return f"{upper_first(words)} the Tensor Cores of {report.gpu.name}."
    shares = [
        f"{percent(report.flops_by_verdict[verdict] / report.flops)} of the FLOPs {words}"
        for verdict, words in _SHORT_OF_NATIVE.items()
        if report.flops_by_verdict.get(verdict)
    ]
    ids = dict.fromkeys(row.finding for row in report.matmuls if row.verdict != "native" and row.finding)
    why = bracketed(*ids)
    return f"No finding above info; {' and '.join(shares)}{why}."


def is_clean(report: ShapeReport) -> bool:
    """Return whether no finding is above "info" and nearly all FLOPs can use the fastest kernels."""
    if not report.flops or any(finding.severity != "info" for finding in report.findings):
        return False
    return report.flops_by_verdict.get("native", 0) >= _NEARLY_ALL * report.flops


# -- tables ---------------------------------------------------------------------------------------------------------


def _padding(paddings: Iterable[Padding]) -> Tables:
    columns = (
        Column("what", is_left=True),
        Column("name", is_name=True),
        Column("from"),
        Column("to"),
        Column("least", priority=1, meaning="a multiple of 8 with rows of whole 16 bytes (input channels: of 4)"),
        Column("128 bytes", priority=1, meaning="with rows of whole 128 bytes, where the GPU prefers them"),
        Column("share"),
    )
    return table(columns, (_padding_cells(padding) for padding in paddings if padding.is_worth_it))


def _padding_cells(padding: Padding) -> list[str]:
    return [
        padding.what,
        (", ".join(padding.names[:3]) or UNKNOWN) + and_more(len(padding.names) - 3),
        str(padding.size),
        str(padding.advised),
        str(padding.to),
        str(padding.to_preferred),
        percent(min(padding.share, 1.0)),
    ]


def _products(rows: list[ProductRow]) -> Tables:
    limit = Limit(_TERMINAL, _PAGE, _rest(rows[_TERMINAL:]), _rest(rows[_PAGE:]))
    columns = (
        Column("of the FLOPs", is_left=True),
        Column("module", is_name=True),
        Column("role", is_left=True),
        Column("M x N x K"),
        Column("dtype", priority=1),
        Column("calls", priority=1),
        Column("x8", meaning="the rule of multiples of 8, which libraries before cuBLAS 11 and cuDNN 7.6.3 required"),
        Column("verdict", meaning="by today's rule, aligned strides and a dtype that the GPU's Tensor Cores multiply"),
        Column("why", is_left=True, priority=2),
    )
    shown = rows[: most(limit, len(rows))]
    largest = max((row.share for row in rows), default=0.0) or 1.0
    cells = (_product_cells(row, row.share / largest) for row in shown)
    return table(columns, cells, limit=limit, total=len(rows))


def _rest(rows: list[ProductRow]) -> str:
    share = percent(min(sum(row.share for row in rows), 1.0))
    return f"more {by_number(len(rows), 'kind', 'kinds')} of products ({share} of the FLOPs); all are in JSON"


def verdict_cell(verdict: str, *, is_to_do: bool) -> Cell:
    """Return a verdict's cell; a loss has a colour only if a finding asks for a change."""
    if verdict in ("off", "degraded") and not is_to_do:
        return Cell(verdict)
    return Cell(verdict, TONES.get(verdict, ""))


def _product_cells(row: ProductRow, bar: float) -> list[str | Cell]:
    verdict = verdict_cell(row.verdict, is_to_do=row.is_to_do)
    return [
        Cell(percent(min(row.share, 1.0)), verdict.tone or "dim", bar=bar),
        row.module,
        row.role,
        row.sizes,
        row.dtype,
        f"{row.calls:,}",
        row.talk,
        verdict,
        row.reason,
    ]


@dataclass(frozen=True)
class ProductRow:
    """Equal products of one or more modules in words.

    ``share`` is their combined share of the FLOPs, 0..1; ``is_to_do`` whether a finding asks for a change.
    """

    module: str
    role: str
    sizes: str
    dtype: str
    calls: int
    share: float
    talk: str
    verdict: str
    reason: str
    is_to_do: bool = False


def product_rows(report: ShapeReport) -> list[ProductRow]:
    """Return one row per kind of product, merging layers that differ only in number; worst verdict first, then by share."""
    merged: dict[tuple[object, ...], list[ShapeRow]] = {}
    for row in report.matmuls:
        key = (row.role, sizes(row), row.dtype, row.verdict, row.multiples_of_8, row.reason)
        merged.setdefault(key, []).append(row)
    grave = {finding.id for finding in report.listed if finding.is_alarm}
    rows = [part for equal in merged.values() for part in _by_pattern(equal, grave)]
    return sorted(rows, key=lambda row: (_RANK[row.verdict], -row.share))


def _by_pattern(rows: list[ShapeRow], grave: Collection[str]) -> Iterable[ProductRow]:
    """Yield one row for each pattern of module paths among rows with equal figures."""
    by_name: dict[str, list[ShapeRow]] = {}
    for row in rows:
        by_name.setdefault(row.module, []).append(row)
    for pattern, names in members(by_name).items():
        yield _product_row(pattern, [row for name in names for row in by_name[name]], grave)


def _product_row(pattern: str, rows: list[ShapeRow], grave: Collection[str]) -> ProductRow:
    first = rows[0]
    return ProductRow(
        module=f"{pattern}{class_beside(pattern, first.module_type)}" or "(outside of submodules)",
        role=first.role,
        sizes=sizes(first),
        dtype=dtype_name(first.dtype),
        calls=sum(row.calls for row in rows),
        share=sum(row.share for row in rows),
        talk=_TALK[first.multiples_of_8],
        verdict=first.verdict,
        reason=first.reason,
        is_to_do=any(row.finding in grave for row in rows),
    )


def sizes(row: ShapeRow) -> str:
    """Return "1024 x 512 x 2048" (M x N x K), preceded by the batch size if above 1; for a convolution its geometry."""
    convolution, attention = row.matmul.convolution, row.matmul.attention
    if convolution is not None:
        kernel = "x".join(map(str, convolution.kernel_size))
        channels = f"{convolution.in_channels}->{convolution.out_channels}"
        if convolution.groups > 1:
            channels += f" / {convolution.groups}"
        return f"{convolution.batch} x {channels} {kernel} conv"
    if attention is not None:
        heads = attention.batch * attention.heads
        return f"{heads} heads: {attention.queries} x {attention.keys} x {attention.head_dim}"
    batch = f"{row.batch} of " if row.batch > 1 else ""
    return f"{batch}{row.m} x {row.n} x {row.k}"


def flops_words(flops: int) -> str:
    """Return a number of FLOPs in words: "1.2 TFLOP"."""
    for name, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if flops >= size:
            return f"{flops / size:.3g} {name}"
    return f"{flops:,} FLOP"
