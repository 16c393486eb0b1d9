"""Recognise traces of other profilers by their own marks, so that they are named instead of misread."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Producer:
    """A profiler other than torch.profiler, or an accelerator other than a GPU.

    Args:
        name: how a sentence calls its files.
        marks: a regular expression on the marks, one a line: names of processes, threads and categories, keys, or the first
            characters.
        can_be_read: clause on the parts that can or cannot be read.
        is_torch: whether torch.profiler wrote the trace, so that its operators can be read.
    """

    name: str
    marks: str
    can_be_read: str
    is_torch: bool = False


#: The first match counts: XLA's profiler, which writes the traces of JAX and TensorFlow, follows these two.
_PRODUCERS = (
    Producer(
        "of rocprofv3 (ROCm)",
        r'rocprofiler-sdk|^"?Kind"?,"?Agent_Id"?,|ROCPROFV3',
        "its kernels have no torch operators, and AMD's matrix cores are not judged by name, so the trace is not read",
    ),
    Producer(
        "of Ascend's profiler (msprof, torch_npu)",
        r"Ascend Hardware|^CANN$|AscendCL|Accelerator Core|OP Type,Core Type|^Model Name,Op Name",
        "an NPU has no Tensor Cores, so the trace is not read",
    ),
    Producer(
        "of JAX's profiler (XLA)",
        r"^PjitFunction|^hlo_module=jit",
        "its XLA operations name no torch operator, so the trace is not read",
    ),
    Producer(
        "of TensorFlow's profiler (XLA)",
        r"TensorFlow (?:Ops|Name Scope)|^tf_op$|/job:\w+/replica:",
        "its operations are not torch's, so the trace is not read",
    ),
    Producer(
        "of XLA's profiler (JAX or TensorFlow)",
        r"/device:(?:GPU|TPU):\d|/host:CPU|xplane|^XLA Ops$|^hlo_op$",
        "its operations are not torch's, so the trace is not read",
    ),
    Producer(
        "in Perfetto's binary format",
        r"perfetto|TracePacket|\.pftrace$",
        "only JSON is read: export the trace as Chrome JSON",
    ),
    Producer(
        "on MTIA (Meta's accelerator)",
        r"^mtia_",
        "its operators are read, but MTIA's kernels are not judged here",
        is_torch=True,
    ),
    Producer(
        "on Gaudi (Intel's accelerator)",
        r"^hpu_",
        "its operators are read, but Gaudi's kernels are not judged here",
        is_torch=True,
    ),
)


def producer(marks: Iterable[str]) -> Producer | None:
    """Return the producer that left these marks; None for a trace of torch.profiler on a GPU or CPU."""
    text = "\n".join(marks)
    return next((known for known in _PRODUCERS if re.search(known.marks, text, re.MULTILINE)), None)
