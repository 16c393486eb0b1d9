"""The products as rows of words, equal layers merged, worst first: what the text and the Markdown print."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mpinspect.reporting.words import NOT_APPLICABLE, UNKNOWN, percent
from mpinspect.shapes.analysis.report import Padding, ShapeReport, ShapeRow
from mpinspect.shapes.analysis.verdict import VERDICTS
from mpinspect.shapes.analysis.wording import count, dtype_name, members

#: Worst first.
_RANK = {"off": 0, "degraded": 1, "unknown": 2, "native": 3}
#: Share of the FLOPs that is nearly all of them: a ResNet's stem is 3%.
_NEARLY_ALL = 0.95
_SHORT_OF_NATIVE = {
    "off": "are not on Tensor Cores",
    "degraded": "are on Tensor Cores behind narrower loads or copies",
    "unknown": "have no verdict",
}
_TALK = {True: "yes", False: "no", None: NOT_APPLICABLE}

LEGEND = (
    "share: of the FLOPs; x8: the rule of multiples of 8, which libraries before cuBLAS 11 and cuDNN 7.6.3 required; verdict: "
    "by today's rule, aligned strides and a dtype that the GPU's Tensor Cores multiply"
)


@dataclass(frozen=True)
class ProductRow:
    """Equal products of one or more modules in words; ``share`` is that of all of them together, 0..1."""

    module: str
    role: str
    sizes: str
    dtype: str
    calls: int
    share: float
    talk: str
    verdict: str
    reason: str


def product_rows(report: ShapeReport) -> list[ProductRow]:
    """One row for each kind of product, layers that differ in their number only merged; worst verdict first, then by share."""
    merged: dict[tuple[object, ...], list[ShapeRow]] = {}
    for row in report.matmuls:
        key = (row.role, sizes(row), row.dtype, row.verdict, row.multiples_of_8, row.reason)
        merged.setdefault(key, []).append(row)
    rows = [part for equal in merged.values() for part in _by_pattern(equal)]
    return sorted(rows, key=lambda row: (_RANK[row.verdict], -row.share))


def _by_pattern(rows: list[ShapeRow]) -> Iterable[ProductRow]:
    """Rows with equal figures, by the patterns of their paths."""
    by_name: dict[str, list[ShapeRow]] = {}
    for row in rows:
        by_name.setdefault(row.module, []).append(row)
    for pattern, names in members(by_name).items():
        yield _product_row(pattern, [row for name in names for row in by_name[name]])


def _product_row(pattern: str, rows: list[ShapeRow]) -> ProductRow:
    first = rows[0]
    return ProductRow(
        module=pattern or "(the model)",
        role=first.role,
        sizes=sizes(first),
        dtype=dtype_name(first.dtype),
        calls=sum(row.calls for row in rows),
        share=sum(row.share for row in rows),
        talk=_TALK[first.multiples_of_8],
        verdict=first.verdict,
        reason=first.reason,
    )


def sizes(row: ShapeRow) -> str:
    """ "1024 x 512 x 2048" (M x N x K), with the number of products in a batch before it; a convolution's geometry instead."""
    convolution, attention = row.matmul.convolution, row.matmul.attention
    if convolution is not None:
        kernel = "x".join(map(str, convolution.kernel_size))
        groups = f" / {convolution.groups}" if convolution.groups > 1 else ""
        channels = f"{convolution.in_channels}->{convolution.out_channels}{groups}"
        return f"{convolution.batch} x {channels} {kernel} conv"
    if attention is not None:
        heads = attention.batch * attention.heads
        return f"{heads} heads: {attention.queries} x {attention.keys} x {attention.head_dim}"
    batch = f"{row.batch} of " if row.batch > 1 else ""
    return f"{batch}{row.m} x {row.n} x {row.k}"


def headline(report: ShapeReport) -> str:
    """Model, GPU and dtype in a line."""
    dtype = dtype_name(report.dtype) or "no dtype"
    cast = f" under {dtype_name(report.autocast_dtype)} autocast" if report.autocast_dtype else ""
    what = "forward and backward" if report.backward else "forward only"
    gpu = report.gpu.name + (f" ({report.gpu.architecture})" if report.gpu.architecture else "")
    return f"{report.model or 'A model'} on {gpu}: {dtype}{cast}, {what}"


def totals(report: ShapeReport) -> list[str]:
    """FLOPs by verdict, the talk's rule, and the roofline's time."""
    if not report.matmuls:
        return ["No matrix product was recorded."]
    kept, broken = report.calls_by_talk.get(True, 0), report.calls_by_talk.get(False, 0)
    verdicts = ", ".join(
        f"{percent(report.flops_by_verdict.get(verdict, 0) / report.flops if report.flops else 0.0)} {verdict}"
        for verdict in VERDICTS
        if verdict == "native" or report.flops_by_verdict.get(verdict, 0)
    )
    lines = [
        f"{count(report.calls, 'product')}, {flops_words(report.flops)}; Tensor Cores by today's rule: {verdicts} (of the FLOPs)",
        f"multiples of 8 (a requirement before cuBLAS 11 and cuDNN 7.6.3): {_with_verb(kept, kept + broken)} them",
    ]
    if report.estimated_us is not None:
        lines.append(
            f"at least {time_words(report.estimated_us)} for the products on this GPU (estimated: roofline of its peak rates)"
        )
    return lines


def _with_verb(kept: int, total: int) -> str:
    """ "3 of 5 products have", "1 of 1 product has"."""
    return f"{kept:,} of {count(total, 'product')} {'has' if kept == 1 else 'have'}"


def clean_sentence(report: ShapeReport) -> str:
    """What is said where no finding is more than a remark; "" where one is, or nothing was recorded."""
    if not report.flops or any(finding.severity != "info" for finding in report.findings):
        return ""
    if report.gpu.has_tensor_cores is not True:
        return ""
    if is_clean(report):
        return f"Nothing to mend: the shapes suit the Tensor Cores of {report.gpu.name}."
    shares = [
        f"{percent(report.flops_by_verdict[verdict] / report.flops)} of the FLOPs {words}"
        for verdict, words in _SHORT_OF_NATIVE.items()
        if report.flops_by_verdict.get(verdict)
    ]
    ids = list(dict.fromkeys(row.finding for row in report.matmuls if row.verdict != "native" and row.finding))
    why = f" ({', '.join(ids)})" if ids else ""
    return f"No finding above info; {' and '.join(shares)}{why}."


def is_clean(report: ShapeReport) -> bool:
    """Whether no finding is more than a remark, and nearly all that is computed can take the fastest kernels."""
    if not report.flops or any(finding.severity != "info" for finding in report.findings):
        return False
    return report.flops_by_verdict.get("native", 0) >= _NEARLY_ALL * report.flops


def padding_cells(padding: Padding) -> list[str]:
    """One row of the table of padded sizes: what, its names, from, to, preferred, share."""
    names = padding.names[:3]
    more = f" and {len(padding.names) - 3} more" if len(padding.names) > 3 else ""
    return [
        padding.what,
        (", ".join(names) or UNKNOWN) + more,
        str(padding.size),
        str(padding.advised),
        str(padding.to),
        str(padding.to_preferred),
        percent(min(padding.share, 1.0)),
        "a gain" if padding.is_worth_it else "no change",
    ]


PADDING_HEADINGS = ("what", "name", "from", "to", "least", "128 bytes", "share", "expected")


def flops_words(flops: int) -> str:
    """ "1.2 TFLOP"."""
    for name, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if flops >= size:
            return f"{flops / size:.3g} {name}"
    return f"{flops:,} FLOP"


def time_words(microseconds: float) -> str:
    """ "1.2 ms"."""
    for name, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:.3g} {name}"
    return f"{microseconds:.3g} us"
