"""Read torch.profiler's traces (Chrome JSON, as Kineto writes it) into KernelTrace: files or folders of ranks, without torch."""

from __future__ import annotations

from mpinspect.kernels.trace.reader import read_trace_file, read_trace_files
from mpinspect.kernels.trace.text import TraceError

__all__ = ["TraceError", "read_trace_file", "read_trace_files"]
