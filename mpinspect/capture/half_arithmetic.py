"""FP16 arithmetic on a CPU as Tensor Cores do it: operands in FP16, sums in FP32, the result rounded to FP16.

An emulation for ``torch.autocast("cpu", torch.float16)``. Autocast makes real FP16 tensors; this module makes it

* fast: torch's own FP16 matrix products on a CPU are orders of magnitude slower than its FP32 ones, so products and
  convolutions are computed in FP32 and rounded. A product of two FP16 numbers is exact in FP32;
* alike CUDA's: functions that autocast runs in FP32 on CUDA but not on a CPU (softmax, sums, powers, norms; see "CUDA Ops
  that can autocast to float32" in torch's documentation of autocast) run in FP32 here too.

An operation that is not named below keeps torch's own FP16 kernel: as right, only slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_aten = torch.ops.aten
#: Products as they arrive below autograd, where ``linear``, ``matmul``, ``einsum`` and their gradients are among these.
_PRODUCTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.addbmm.default,
        _aten.mv.default,
        _aten.addmv.default,
        _aten.convolution.default,
        _aten.convolution_backward.default,
    }
)

#: Functions that CUDA's autocast runs in FP32 and the CPU's does not, under the names that torch, Tensor or functional give them.
_FLOAT32_NAMES = [
    "__pow__",
    "__rdiv__",
    "__rpow__",
    "__rtruediv__",
    "acos",
    "asin",
    "cosh",
    "cosine_similarity",
    "cumprod",
    "cumsum",
    "dist",
    "erfinv",
    "exp",
    "expm1",
    "group_norm",
    "layer_norm",
    "log",
    "log10",
    "log1p",
    "log2",
    "log_softmax",
    "norm",
    "normalize",
    "pow",
    "prod",
    "reciprocal",
    "renorm",
    "rms_norm",
    "rsqrt",
    "sinh",
    "softmax",
    "softmin",
    "softplus",
    "sum",
    "tan",
]

#: Recurrent layers: oneDNN's fused kernel has no FP16 on most CPUs and hides its products.
_RECURRENT_NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@contextmanager
def half_arithmetic() -> Iterator[None]:
    """Within the block FP16 tensors on the CPU are multiplied as Tensor Cores do it, forward and backward.

    Use it around an FP16 autocast block *and* its backward. Attention is computed by its plain formula, with FP32
    scores. Affects the calling thread's operations; every setting is as before afterwards.
    """
    with sdpa_kernel(SDPBackend.MATH), _Float32Functions(), _HalfProducts():  # type: ignore[no-untyped-call]
        yield


class _HalfProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes FP16 products in FP32 and rounds their results."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS or not _is_cpu_half(args[0]):
            return func(*args, **kwargs)
        return tree_map(_to_half, func(*tree_map(_to_float32, args), **tree_map(_to_float32, kwargs)))


class _Float32Functions(TorchFunctionMode):
    """Hands FP32 copies of FP16 arguments to the functions that CUDA's autocast runs in FP32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RECURRENT:
            with _without_onednn():
                return func(*args, **kwargs)
        if func in _FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_to_float32, args), tree_map(_to_float32, kwargs)
        return func(*args, **kwargs)


def _named(names: Iterable[str], *homes: object) -> frozenset[Callable[..., Any]]:
    found = (getattr(home, name, None) for name in names for home in homes)
    return frozenset(function for function in found if function is not None)


_FLOAT32 = _named(_FLOAT32_NAMES, torch, torch.Tensor, torch.nn.functional)
_RECURRENT = _named(_RECURRENT_NAMES, torch, torch._VF)


@contextmanager
def _without_onednn() -> Iterator[None]:
    onednn: Any = torch.backends.mkldnn
    # Every flag is named: the defaults of this context manager would change the others.
    with onednn.flags(enabled=False, deterministic=onednn.deterministic, allow_tf32=onednn.allow_tf32):
        yield


def _is_cpu_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float16 and value.device.type == "cpu"


def _to_float32(value: Any) -> Any:
    return value.float() if _is_cpu_half(value) else value


def _to_half(value: Any) -> Any:
    return value.half() if isinstance(value, torch.Tensor) else value
