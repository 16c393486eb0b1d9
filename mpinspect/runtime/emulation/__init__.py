"""Emulates Tensor Cores' half-precision arithmetic on a CPU: 16-bit operands, FP32 sums, one rounding of the result.

The emulation is for ``torch.autocast("cpu", torch.float16)`` and for models whose weights are stored in FP16 or BF16.
Autocast and ``.half()`` make real 16-bit tensors; this package makes the operations on them

* independent of the processor, except for the order of FP32 sums: a product of two 16-bit numbers is exact in FP32, so
  products and convolutions are computed in FP32 and rounded once. torch's own 16-bit kernels depend on the processor.
  Most are orders of magnitude slower than FP32. Where the processor has no 16-bit instructions, oneDNN's convolutions
  round intermediate results, up to 252 units in the last place from the exact result; where it has them for bfloat16,
  they treat subnormals (below 2^-126) as zero. BF16 is therefore treated like FP16, though its kernels may be faster;
* like CUDA's: autocast runs functions in FP32 on CUDA that it leaves in FP16 on a CPU (softmax, exp, pow, sums, norms;
  "CUDA Ops that can autocast to float32" in torch's documentation of autocast). Here CUDA's lists apply.

``products`` computes products, ``blocks`` large matrix products in cache-sized parts; ``autocast_lists`` applies CUDA's
lists; ``recurrent`` handles LSTM, GRU and RNN.
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
    """Multiply FP16 and BF16 CPU tensors as Tensor Cores do within the block, in the forward and the backward.

    Use it around an autocast block *and* its backward, or around training steps of a model with 16-bit weights. Inside it

    * matrix products, convolutions, attention and recurrent layers take 16-bit operands, sum in FP32 and give 16-bit
      results. Operations on other devices and on FP32, FP64 and integer tensors are unchanged;
    * under ``torch.autocast("cpu", ...)`` the operations of CUDA's lists run in the dtype that CUDA uses. Those that
      CUDA does not support in FP16, or only in part, run in FP32, as on a CPU: ``binary_cross_entropy``, linear
      algebra, FFTs, quantiles. Without autocast a function runs in the dtype of its input;
    * attention saves the same tensors for the backward as CUDA's flash kernel: 16-bit query, key, value, output, and one FP32
      number per row. With dropout, or a mask that needs a gradient, it uses the plain formula with FP32 scores. As on
      CUDA, the flash kernel has no second derivative: use ``sdpa_kernel(SDPBackend.MATH)`` if one is needed;
    * LSTM, GRU and RNN are computed gate by gate, every gate rounded; cuDNN's fused layers may round less often.

    Blocks can be nested. They affect the calling thread only, including its backwards, which run in the same thread on
    a CPU. Settings are restored afterwards, also after an error. Compiled functions run eagerly inside the block (with
    ``fullgraph=True`` torch raises an error). A dispatch mode entered inside the block sees the 16-bit products; one
    entered before it sees the FP32 ones, and of a large product only the parts that the calling thread computes. The
    first block of a process takes a second or two, in which torch loads the dependencies of its dispatch modes.
    """
    with cuda_autocast_lists(), PlainRecurrence(), HalfProducts():  # type: ignore[no-untyped-call]
        yield
