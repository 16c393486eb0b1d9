"""Kernel time by kernel name and by module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from mpinspect.kernels.analysis.records import ModuleRow, NameRow
from mpinspect.kernels.analysis.rows import VERDICTS, KernelRow
from mpinspect.kernels.analysis.shares import share


def by_name(rows: Sequence[KernelRow]) -> tuple[NameRow, ...]:
    """One row a kernel name and verdict (a name can have several: alignments, dtypes, GPUs differ), most time first."""
    groups: dict[tuple[str, str, str], list[KernelRow]] = defaultdict(list)
    for row in rows:
        groups[row.name, row.verdict, row.basis].append(row)
    total = sum(row.kernel.time_us for row in rows)
    found = [_name_row(group, total) for group in groups.values()]
    return tuple(sorted(found, key=lambda row: (-row.time_us, row.name)))


def by_module(rows: Sequence[KernelRow]) -> tuple[ModuleRow, ...]:
    """One row a module, most time first; what has no module comes as "", wherever its time puts it."""
    groups: dict[tuple[str, bool], list[KernelRow]] = defaultdict(list)
    for row in rows:
        groups[row.module, row.kernel.module_is_path].append(row)
    total = sum(row.kernel.time_us for row in rows)
    found = [_module_row(module, is_path, group, total) for (module, is_path), group in groups.items()]
    return tuple(sorted(found, key=lambda row: (-row.time_us, row.module)))


def _name_row(rows: list[KernelRow], total: float) -> NameRow:
    first, time = rows[0], sum(row.kernel.time_us for row in rows)
    known = [row for row in rows if row.flops is not None]
    known_time = sum(row.kernel.time_us for row in known)
    return NameRow(
        name=first.name,
        verdict=first.verdict,
        reason=first.reason,
        kind=first.kind,
        architecture=first.architecture,
        ops=tuple(filter(None, dict.fromkeys(row.op for row in rows))),
        calls=len(rows),
        time_us=time,
        fraction=share(time, total) or 0.0,
        tflops=sum(row.flops or 0.0 for row in known) / known_time / 1e6 if known_time > 0 else None,
    )


def _module_row(module: str, is_path: bool, rows: list[KernelRow], total: float) -> ModuleRow:
    verdict_time_us = dict.fromkeys(VERDICTS, 0.0)
    for row in rows:
        verdict_time_us[row.verdict] += row.kernel.time_us
    time = sum(verdict_time_us.values())
    return ModuleRow(module, is_path, len(rows), time, share(time, total) or 0.0, verdict_time_us)
