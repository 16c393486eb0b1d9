"""Convert the lint's report to JSON and back. The schema is in docs/shape-lint.md."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mpinspect.reporting.json_text import Layout, headed, named, plain
from mpinspect.runtime.decoding import DecodingError, each, typed
from mpinspect.shapes.analysis.report import CallTime, Estimate, Padding, ShapeReport, ShapeRow
from mpinspect.shapes.analysis.verdict import ShapeVerdict
from mpinspect.shapes.records import Matmul, Size

#: The schema's version, which rises when an older reader would misread the file.
_VERSION = 1
#: Each product, finding and padding has its own line.
LAYOUT = Layout(2)


def to_plain(report: ShapeReport) -> dict[str, Any]:
    """Return the report as plain dicts, lists, strings, numbers, booleans and None; floats are rounded to six digits."""
    gpu = report.gpu
    body = {
        "model": report.model,
        "gpu": {"name": gpu.name, "architecture": gpu.architecture, "has_tensor_cores": gpu.has_tensor_cores},
        **named(report, "dtype autocast_dtype device backward complete flops flops_by_verdict calls"),
        "calls_multiples_of_8": report.calls_by_talk.get(True, 0),
        "calls_not_multiples_of_8": report.calls_by_talk.get(False, 0),
        **named(report, "estimated_us estimated_partial_tiles_fraction layout_copy_bytes dtype_copy_bytes findings"),
        "padding": [_padding(padding) for padding in report.padding],
        "matmuls": [_row(row) for row in report.matmuls],
        "notes": report.notes,
    }
    return headed("mpinspect.shapes", _VERSION, plain(body, digits=6))


def _row(row: ShapeRow) -> dict[str, Any]:
    time: dict[str, Any] = {"estimated_us": None, "roofline_us": None, "roofline_bound": None}
    if row.time is not None:
        times = [row.time.low_us, row.time.high_us]
        time = {"estimated_us": times, "roofline_us": row.time.best_us, "roofline_bound": row.time.bound}
    return {
        **named(row.matmul, "module module_type parameter role op kind m n k batch dtype calls flops bytes"),
        "flops_fraction": row.share,
        **named(row.judged, "multiples_of_8 verdict reason cause remarks stride_bytes alignment_bytes"),
        **time,
        "finding": row.finding,
        **named(row.matmul, "block convolution attention"),
    }


def _padding(padding: Padding) -> dict[str, Any]:
    return {
        "finding": padding.finding,
        "what": padding.what,
        "names": padding.names,
        "from": padding.size,
        "to": padding.advised,
        "to_least": padding.to,
        "to_preferred": padding.to_preferred,
        "modules": padding.modules,
        "flops_fraction": padding.share,
        "worth_it": padding.is_worth_it,
    }


# -- back ---------------------------------------------------------------------------------------------------------------


def from_plain(value: Any) -> ShapeReport:
    """Return the report from its ``to_plain``, decoded from JSON; it renders like the original report.

    The operands' layouts and the GPU's rates, which no form shows, are missing.

    Raises:
        DecodingError: a field is missing or has an unexpected value.
    """
    stored = typed(_Stored, value)
    if stored.schema_version > _VERSION:
        raise DecodingError(f"is {stored.schema_version}, of a newer mpinspect: upgrade it", "schema_version")
    report = typed(ShapeReport, value | {"matmuls": [], "padding": [], "calls_by_talk": {}})
    try:
        rows = _rows(list(stored.matmuls))
    except DecodingError as error:
        raise error.below("matmuls") from None
    kept, broken = stored.calls_multiples_of_8, stored.calls_not_multiples_of_8
    return replace(
        report,
        matmuls=rows,
        padding=tuple(typed(Padding, _renamed(each)) for each in stored.padding),
        calls_by_talk={True: kept, False: broken, None: max(report.calls - kept - broken, 0)},
    )


_Object = dict[str, Any]


@dataclass(frozen=True)
class _Stored:
    """The fields of the JSON that ShapeReport lacks, or holds in another form."""

    matmuls: tuple[_Object, ...]
    padding: tuple[_Object, ...]
    calls_multiples_of_8: Size
    calls_not_multiples_of_8: Size
    schema_version: Size = 1


@dataclass(frozen=True)
class _Rest:
    """A product's fields that neither its record nor its verdict has."""

    estimated_us: tuple[Estimate, ...] | None
    roofline_us: Estimate | None
    roofline_bound: str | None = None
    finding: str = ""

    @property
    def time(self) -> CallTime | None:
        if self.roofline_us is None or self.estimated_us is None or len(self.estimated_us) != 2:
            return None
        return CallTime(self.roofline_us, *self.estimated_us, self.roofline_bound or "")


def _rows(values: list[_Object]) -> tuple[ShapeRow, ...]:
    matmuls = each(Matmul, values)
    # The shares in the JSON are rounded.
    total = sum(matmul.flops * matmul.calls for matmul in matmuls) or 1
    parts = zip(matmuls, each(ShapeVerdict, values), each(_Rest, values), strict=True)
    return tuple(
        ShapeRow(matmul, verdict, matmul.flops * matmul.calls / total, rest.time, rest.finding)
        for matmul, verdict, rest in parts
    )


#: A padding's fields that have other names in JSON, where "to" is the advised size.
_PADDING_NAMES = {"size": "from", "to": "to_least", "share": "flops_fraction", "is_worth_it": "worth_it"}


def _renamed(padding: _Object) -> _Object:
    return padding | {name: padding.get(other) for name, other in _PADDING_NAMES.items()}
