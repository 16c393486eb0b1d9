"""The input of every diagnosis: the record of a run, and the results derived from its ranges."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mpinspect.numeric.formats import BFLOAT16, FLOAT16, FloatFormat
from mpinspect.ranges.analysis.report import LayerReport
from mpinspect.ranges.analysis.scale_advice import Advised
from mpinspect.ranges.session import (
    Event,
    Measurement,
    Precision,
    Progress,
    ScalerRecord,
    Session,
    TensorInfo,
    TensorKey,
    TensorWindow,
)
from mpinspect.reporting.finding import Finding

#: Bits of the significand, including the hidden one: 8 in BF16, 11 in FP16.
SIGNIFICAND_BITS = {format.name: format.mantissa_bits + 1 for format in (BFLOAT16, FLOAT16)}


@dataclass(frozen=True)
class Case:
    """One run, with the results that diagnoses need.

    Args:
        session: the record of the run.
        layers: one report per watched tensor.
        totals: every tensor's counts over the run.
        infos: every tensor's description.
        advised: the advice on the loss scale, with the decision behind it.
        format: the format in which the run is judged.
    """

    session: Session
    layers: Sequence[LayerReport]
    totals: Mapping[TensorKey, TensorWindow]
    infos: Mapping[TensorKey, TensorInfo]
    advised: Advised
    format: FloatFormat

    @property
    def precision(self) -> Precision:
        return self.session.precision

    @property
    def progress(self) -> Progress:
        return self.session.progress

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(event for event in self.session.events if not event.aside)

    @property
    def scalers(self) -> list[ScalerRecord]:
        """The enabled gradient scalers."""
        return [scaler for scaler in self.precision.scalers if scaler.enabled]

    def measured(self, what: str) -> Iterator[Measurement]:
        """Return the measurements of one kind, in the order in which they were made."""
        return (each for each in self.session.measurements if each.what == what)


def fp32_weights(dtype: str = BFLOAT16.name) -> str:
    """Return the code of FP32 weights whose products are computed in a 16-bit dtype by autocast."""
    narrow = FLOAT16.name if dtype == FLOAT16.name else BFLOAT16.name
    return (
        "model.float()  # FP32 weights, and with them the optimizer's states\n"
        f"with torch.autocast(device_type, dtype=torch.{narrow}):\n"
        "    output = model(x)\n"
        f"loss = loss_fn(output.float(), target){'  # for torch.amp.GradScaler to scale' if narrow == FLOAT16.name else ''}"
    )


def quoted(name: str) -> str:
    """Return a name as a literal for a fix's code, in double quotes."""
    return json.dumps(name, ensure_ascii=False)


Diagnosis = Callable[[Case], Iterable[Finding]]
