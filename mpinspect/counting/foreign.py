"""Converts any framework's array to a NumPy array, with the dtype, shape and implicit zeros that NumPy does not represent.

No framework is imported here: a framework is already loaded when its array is passed in, and is recognised by the module of
the array's type. Arrays on devices are copied to the host, which waits for the device.

Cases that a plain ``numpy.asarray`` gets wrong: Paddle's bfloat16 and FP8 become bare integers (so does MXNet's bfloat16),
Paddle's sparse tensors crash the process, and gradients of embeddings (IndexedSlices, SelectedRows) may have several rows
for one index.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpinspect.counting.encodings import NARROW_ENCODINGS

AnyArray = npt.NDArray[Any]


@dataclass(frozen=True)
class HostArray:
    """An array in NumPy's memory.

    Args:
        values: the elements; bare codes (integers) for encodings that NumPy lacks, float32 for sums of narrow formats.
        dtype: name of the array's original dtype: "float32", "bfloat16", ...
        shape: shape of the whole array.
        implicit_zeros: the number of a sparse array's zeros that are not among ``values``.
    """

    values: AnyArray
    dtype: str
    shape: tuple[int, ...]
    implicit_zeros: int = 0

    @property
    def encoding(self) -> str:
        """The name of the encoding if the values are bare codes; "" if their own NumPy dtype applies."""
        return self.dtype if self.values.dtype.kind in "iu" else ""


def on_host(array: Any) -> HostArray:
    """Return the elements of an array of any framework. Waits for the device that holds them.

    Args:
        array: an array of NumPy, TensorFlow or Keras (tensors, variables, IndexedSlices), JAX, Paddle, MXNet, CuPy, or anything
            that has ``__array__``, ``numpy()`` or DLPack; a Python number, or nested lists of numbers (as float64).

    Raises:
        TypeError: not an array, or an array without values yet (inside ``tf.function`` or ``jax.jit``).
    """
    if is_number_or_numbers(array):
        return _plain(np.asarray(array, dtype=np.float64))
    framework = type(array).__module__.partition(".")[0]
    if framework == "paddle":
        return _of_paddle(array)
    if _is_indexed_slices(array):
        return _summed_rows(_plain(_as_numpy(array.values)), _as_numpy(array.indices), _rows(array.dense_shape))
    if framework == "tensorflow" and hasattr(array, "flat_values"):
        return _plain(_as_numpy(array.flat_values))
    if framework == "tensorflow" and hasattr(array, "dense_shape"):
        return _sparse(_plain(_as_numpy(array.values)), array.dense_shape)
    return _plain(_as_numpy(array))


def is_number_or_numbers(thing: object) -> bool:
    """Return whether ``thing`` is a Python number or a (nested) list of Python numbers."""
    if isinstance(thing, (list, tuple)):
        return not hasattr(thing, "_fields") and bool(thing) and all(is_number_or_numbers(item) for item in thing)
    return isinstance(thing, (int, float)) and not isinstance(thing, (bool, np.generic))


# -- by protocol ------------------------------------------------------------------------------------------------------


def _as_numpy(array: Any) -> AnyArray:
    """Return a NumPy array by the first protocol that gives numbers; raise TypeError if all fail."""
    if isinstance(array, (np.ndarray, np.generic)):
        return np.asarray(array)
    reasons = []
    for convert in _protocols(array):
        try:
            found = convert()
        except Exception as error:
            reasons.append(_first_sentence(error))
            continue
        if isinstance(found, np.ndarray) and found.dtype != object:
            return found
    kind = f"{type(array).__module__}.{type(array).__qualname__}"
    if not reasons:
        raise TypeError(f"{kind} is not an array")
    raise TypeError(
        f"no values can be had from {kind} here ({reasons[0]}). Inside tf.function, jax.jit or jax.grad there are none yet: "
        "return the array and observe it outside"
    )


def _protocols(array: Any) -> list[Callable[[], Any]]:
    """Return functions that convert this object to NumPy, by the protocols it has, best first."""
    ways: list[Callable[[], Any]] = []
    if hasattr(array, "__array__"):
        ways.append(lambda: np.asarray(array))
    if callable(getattr(array, "numpy", None)):
        ways.append(lambda: array.numpy())
    if callable(getattr(array, "asnumpy", None)):
        # MXNet; CuPy has get().
        ways.append(lambda: array.asnumpy())
    if hasattr(array, "__cuda_array_interface__") and callable(getattr(array, "get", None)):
        ways.insert(0, lambda: array.get())
    if callable(getattr(array, "todense", None)):
        ways.append(lambda: np.asarray(array.todense()))
    if hasattr(array, "__dlpack__"):
        ways.append(lambda: np.from_dlpack(array))
        if "torch" in sys.modules:
            ways.append(lambda: _by_torch(array))
    return ways


def _by_torch(array: Any) -> AnyArray:
    """Convert by torch's DLPack, which supports more devices and dtypes than NumPy's; bfloat16 becomes float32."""
    torch: Any = sys.modules["torch"]
    tensor = torch.from_dlpack(array).cpu()
    with contextlib.suppress(TypeError):
        found: AnyArray = tensor.numpy()
        return found
    widened: AnyArray = tensor.to(torch.float32).numpy()
    return widened


def _plain(values: AnyArray) -> HostArray:
    if values.dtype.names is not None and len(values.dtype.names) == 1 and values.dtype.names[0] in NARROW_ENCODINGS:
        # MXNet's bfloat16 is a structured dtype with one field named after the encoding.
        name = values.dtype.names[0]
        return HostArray(values[name], name, values.shape)
    return HostArray(values, values.dtype.name, values.shape)


def _first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    if len(text) > 160:
        text = f"{text[:160]}..."
    return f"{type(error).__name__}: {text}"


# -- sparse -----------------------------------------------------------------------------------------------------------


def _is_indexed_slices(array: Any) -> bool:
    return type(array).__name__.startswith("IndexedSlices") and hasattr(array, "indices")


def _rows(dense_shape: Any) -> int | None:
    """Return the number of rows of the whole array; None if ``dense_shape`` is unknown."""
    return None if dense_shape is None else int(_as_numpy(dense_shape)[0])


def _sparse(values: HostArray, dense_shape: Any) -> HostArray:
    if dense_shape is None:
        return values
    shape = tuple(int(length) for length in _as_numpy(dense_shape))
    return HostArray(values.values, values.dtype, shape, math.prod(shape) - values.values.size)


def _summed_rows(slices: HostArray, indices: AnyArray, rows: int | None) -> HostArray:
    """Return slices with the rows of equal index summed, as optimizers do; narrow formats are summed in float32."""
    unique, places = np.unique(indices.reshape(-1), return_inverse=True)
    values = slices.values
    if len(unique) != len(indices.reshape(-1)):
        wide = _float32(values, slices.dtype) if slices.dtype in NARROW_ENCODINGS else values
        values = np.zeros((len(unique), *wide.shape[1:]), dtype=wide.dtype)
        with np.errstate(all="ignore"):
            np.add.at(values, places.reshape(-1), wide)
    shape = (rows or len(unique), *values.shape[1:])
    return HostArray(values, slices.dtype, shape, math.prod(shape) - values.size)


def _float32(values: AnyArray, name: str) -> AnyArray:
    if values.dtype.name == name:
        return values.astype(np.float32)
    if name == "bfloat16":
        shifted: AnyArray = (values.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        return shifted
    raise TypeError(f"rows of {name} can't be added up")


# -- Paddle -------------------------------------------------------------------------------------------------------------


def _of_paddle(tensor: Any) -> HostArray:
    """Return a Paddle tensor's elements; ``numpy()`` gives codes for bfloat16 and FP8, and crashes on sparse tensors."""
    name = str(getattr(tensor, "dtype", "")).rpartition(".")[2]
    if callable(getattr(tensor, "_is_initialized", None)) and not tensor._is_initialized():
        raise TypeError("this Paddle tensor holds no values")
    if tensor.is_selected_rows():
        slices = _of_name(tensor.numpy(), name)
        return _summed_rows(slices, np.asarray(tensor.rows()), int(tensor.get_selected_rows().height()))
    if tensor.is_sparse():
        stored = tensor.coalesce() if tensor.is_sparse_coo() else tensor
        return _sparse(_of_name(stored.values().numpy(), name), np.asarray(tensor.shape))
    return _of_name(tensor.numpy(), name)


def _of_name(values: AnyArray, name: str) -> HostArray:
    """Return ``values`` as a HostArray with Paddle's dtype name if they are codes of a narrow format."""
    return HostArray(values, name if name in NARROW_ENCODINGS else values.dtype.name, values.shape)
