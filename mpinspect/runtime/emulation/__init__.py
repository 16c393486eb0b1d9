"""Half-precision arithmetic on a CPU as Tensor Cores do it: 16-bit operands, FP32 sums, one rounding of the result.

An emulation for ``torch.autocast("cpu", torch.float16)`` and for models whose weights are stored in FP16 or BF16. Autocast
and ``.half()`` make real 16-bit tensors; this room makes what is done with them

* independent of the processor, but for the order of FP32 sums: a product of two 16-bit numbers is exact in FP32, so
  products and convolutions are computed in FP32 and rounded once. torch's own 16-bit kernels depend on the processor.
  Most are orders of magnitude slower than FP32. Where the processor has no 16-bit instructions, oneDNN's convolutions
  round on the way, to 252 units in the last place from the exact result; where it has them for bfloat16, they take
  subnormals (below 2^-126) for zero. BF16 goes the same way as FP16 for that reason, though its own kernels may be faster;
* alike CUDA's: autocast runs functions in FP32 on CUDA that it leaves in FP16 on a CPU (softmax, exp, pow, sums, norms;
  "CUDA Ops that can autocast to float32" in torch's documentation of autocast). Here CUDA's lists hold.

``products`` holds the products, ``blocks`` large matrix products in cache-sized parts, ``autocast_lists`` CUDA's lists,
``recurrent`` LSTM, GRU and RNN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mpinspect.runtime.emulation.autocast_lists import cuda_autocast_lists
from mpinspect.runtime.emulation.products import HalfProducts
from mpinspect.runtime.emulation.recurrent import PlainRecurrence

__all__ = ["half_arithmetic"]


@contextmanager
def half_arithmetic() -> Iterator[None]:
    """Within the block FP16 and BF16 tensors on the CPU are multiplied as Tensor Cores do it, forward and backward.

    Use it around an autocast block *and* its backward, or around training steps of a model with 16-bit weights. Inside it

    * matrix products, convolutions, attention and recurrent layers take 16-bit operands, sum in FP32 and give 16-bit
      results. Tensors on other devices, FP32, FP64 and integer tensors are computed as ever;
    * under ``torch.autocast("cpu", ...)`` the operations of CUDA's lists run in the dtype that CUDA gives them. What CUDA
      refuses in FP16, or has in part only, runs as on a CPU, in FP32: ``binary_cross_entropy``, linear algebra, FFTs,
      quantiles. Without autocast a function keeps the dtype of its input;
    * attention keeps what CUDA's flash kernel keeps for the backward: 16-bit query, key, value and output and one FP32
      number a row. With dropout, or a mask that needs a gradient, it is the plain formula with FP32 scores. The flash
      kernel has no second derivative, here as on CUDA: ask for ``sdpa_kernel(SDPBackend.MATH)`` where one is needed;
    * LSTM, GRU and RNN are computed gate by gate, every gate rounded; cuDNN's fused layers may round less often.

    Nests; affects the calling thread only, the backward included, which runs in the thread that calls it on a CPU.
    Settings are as before afterwards, also after an error. What ``torch.compile`` has compiled runs eagerly inside the
    block (with ``fullgraph=True`` torch refuses to). A dispatch mode entered inside the block sees the 16-bit products; one
    entered before it sees the FP32 ones, and of a large one only the parts that the calling thread computes. The first
    block of a process takes a second or two, in which torch loads what its dispatch modes need.
    """
    with cuda_autocast_lists(), PlainRecurrence(), HalfProducts():  # type: ignore[no-untyped-call]
        yield
