"""Many tensors' counts as NumPy columns: what a session file holds, and how large windows are kept and merged."""

from mpinspect.ranges.store.tensor_columns.columns import (
    PER_BIN,
    PER_PEAK,
    PER_TENSOR,
    SIGNIFICANDS,
    Column,
    Context,
    Lost,
    TensorColumns,
    narrowed,
)
from mpinspect.ranges.store.tensor_columns.merging import merge_columns

__all__ = [
    "PER_BIN",
    "PER_PEAK",
    "PER_TENSOR",
    "SIGNIFICANDS",
    "Column",
    "Context",
    "Lost",
    "TensorColumns",
    "merge_columns",
    "narrowed",
]
