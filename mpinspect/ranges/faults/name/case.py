"""The input of every rule: the record of a run, and the results derived from its ranges."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mpinspect.numeric.formats import BFLOAT16, FLOAT16, FloatFormat
from mpinspect.ranges.analysis.layer_report import LayerReport
from mpinspect.ranges.analysis.report import Coverage
from mpinspect.ranges.analysis.scale_advice import Advised
from mpinspect.ranges.records import AnyRecord, Record, recorded
from mpinspect.ranges.session import Event, Precision, Progress, ScalerRecord, Session
from mpinspect.ranges.windows.tensors import TensorInfo, TensorKey, TensorWindow
from mpinspect.reporting.sentences import Sentences
from mpinspect.reporting.words import filled, some

#: How many layers the evidence lists.
MOST_LAYERS_LISTED = 20
#: If at least this share of the parameters has gradients that are zero or left over, all count as such.
MOST_LEFT_OVER = 0.9
#: Powers of two by which a measured factor may differ from one.
_ALIKE = 0.01
#: Bits of the significand, including the hidden one: 8 in BF16, 11 in FP16.
SIGNIFICAND_BITS = {format.name: format.mantissa_bits + 1 for format in (BFLOAT16, FLOAT16)}


@dataclass(frozen=True)
class Case:
    """One run, with the results that rules need.

    Args:
        session: the record of the run.
        layers: one report per watched tensor.
        totals: every tensor's counts over the run.
        infos: every tensor's description.
        advised: the advice on the loss scale, with the decision behind it.
        format: the format in which the run is judged.
        coverage: the tensors that were watched and never seen.
        is_explained: whether a finding names the cause of the steps that were not finite.
    """

    session: Session
    layers: Sequence[LayerReport]
    totals: Mapping[TensorKey, TensorWindow]
    infos: Mapping[TensorKey, TensorInfo]
    advised: Advised
    format: FloatFormat
    coverage: Coverage
    is_explained: bool = False

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

    def has(self, *kinds: type[Record]) -> bool:
        """Return whether there is a record of one of these classes."""
        names = {kind.kind for kind in kinds}
        return any(each.what in names for each in self.session.measurements)

    def recorded(self, of: type[AnyRecord]) -> Iterator[AnyRecord]:
        """Yield the records of a class, in the order in which they were made."""
        return recorded(self.session.measurements, of)


class FP32Weights(Sentences):
    """The code of FP32 weights whose products autocast computes in 16 bits."""

    TO_FP32 = "# before {at_optimizer}\nmodel.float()"
    AUTOCAST_BF16 = "# in place of {forward_at}\nwith torch.autocast({device_type}, torch.bfloat16):\n    {forward}"
    IN_BF16 = f"{TO_FP32}\n{AUTOCAST_BF16}"
    IN_FP16 = IN_BF16.replace("bfloat16", "float16")

    @classmethod
    def of(cls, dtype: str) -> FP32Weights:
        """Return the code for a 16-bit dtype; BF16's for any other."""
        return cls.IN_FP16.when(dtype == FLOAT16.name) or cls.IN_BF16

    @classmethod
    def in_bf16(cls, precision: Precision) -> FP32Weights:
        """Return the code that computes an FP16 run in BF16."""
        return cls.IN_BF16.when(FLOAT16.name in precision.weights) or cls.AUTOCAST_BF16


class LayerInFP32(Sentences):
    """The code that computes a module, whose path is ``path``, in FP32."""

    TO_FP32 = "model.get_submodule({path}).float()"
    FORWARD = (
        "# once; also modules that use its result\n"
        "layer = model.get_submodule({path})\n"
        "forward = layer.forward\n"
        "def in_fp32(*inputs):\n"
        "    inputs = [\n"
        "        x.float() if x.is_floating_point()\n"
        "        else x for x in inputs\n"
        "    ]\n"
        "    with torch.autocast(\n"
        "        {device_type}, enabled=False\n"
        "    ):\n"
        "        return forward(*inputs)\n"
        "layer.forward = in_fp32"
    )

    @classmethod
    def of(cls, precision: Precision) -> tuple[LayerInFP32 | None, LayerInFP32]:
        """Return the code for a run whose weights are stored in these dtypes."""
        return cls.TO_FP32.when({FLOAT16.name, BFLOAT16.name} & set(precision.weights)), cls.FORWARD


def is_power_of_two(number: float) -> bool:
    """Return whether a positive number is a power of two, up to the rounding of a measured factor."""
    return abs(math.log2(number) - round(math.log2(number))) <= _ALIKE


def quoted(name: str) -> str:
    """Return a name as a literal for a fix's code, in double quotes."""
    return json.dumps(name, ensure_ascii=False)


def again(measured: Sequence[Record]) -> str:
    """Return words on the further checked steps with the same fault, to follow "In step 3"; "" if there are none."""
    more = len(measured) - 1
    return filled(", and in {} more of the few steps that are checked for this,", more or None)


def grouped(names: Iterable[str]) -> str:
    """Return the parameters' modules in words, with repeated blocks as one: "'h.{0..11}.attn', 'head'"."""
    modules = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
    groups: dict[str, list[str]] = {}
    for module in modules:
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "{}", module), []).append(module)
    shown = []
    for pattern, members in groups.items():
        numbers = sorted({int(number) for member in members for number in re.findall(r"(?<=\.)(\d+)(?=\.)", member)})
        if len(members) > 1 and pattern.count("{}") == 1:
            shown.append(pattern.replace("{}", f"{{{numbers[0]}..{numbers[-1]}}}"))
        else:
            shown += members
    return some(shown)
