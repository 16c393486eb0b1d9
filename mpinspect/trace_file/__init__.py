"""torch.profiler's traces (Chrome JSON, as Kineto writes it): a file, or a folder of ranks, to KernelTrace. No torch needed."""

from __future__ import annotations

from mpinspect.trace_file.error import TraceError
from mpinspect.trace_file.folder import read_trace_files
from mpinspect.trace_file.reader import read_trace_file

__all__ = ["TraceError", "read_trace_file", "read_trace_files"]
