"""The twins of a step's tensors in a wider dtype, by storage: views and writes in place need no bookkeeping."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from mpinspect.runtime.storages import StorageReference, storage_key

#: Elements that are compared in FP32 at once, so that the copies stay in the processor's cache.
_PIECE = 1 << 17
#: Number of elements by which a write is noticed.
_SEEN = 64
#: A gradient of this part of the largest one, by root mean square, is zero but for rounding in FP32.
ZERO_BUT_FOR_ROUNDING = 2.0**-20


class Widening(NamedTuple):
    """Which tensors of a run are computed again, and in which dtype.

    Args:
        narrow: the dtypes of tensors whose operators run again.
        having: the dtypes of tensors that may have a twin: these, and those that inherit their errors.
        wide: the dtype of the twins.
    """

    narrow: tuple[torch.dtype, ...]
    having: tuple[torch.dtype, ...]
    wide: torch.dtype


FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
NARROW = (torch.float16, torch.bfloat16)
OF_NARROW = Widening((*FP8, *NARROW), (*FP8, *NARROW, torch.float32), torch.float32)
OF_ALL = Widening(OF_NARROW.having, OF_NARROW.having, torch.float64)
#: Results in fewer bits are taken as exact.
OF_FP32 = Widening((torch.float32,), (torch.float32,), torch.float64)


class Twin(NamedTuple):
    """The wide values, or the decisions, of a whole storage.

    Args:
        storage: the storage, whose end removes the twin.
        is_cast: whether the values were only cast, copied or selected, never computed with.
        is_shared: whether another twin, or a tensor of the run, has the same memory, which must not be written then.
    """

    storage: weakref.ref[torch.UntypedStorage]
    dtype: torch.dtype
    values: torch.Tensor
    is_cast: bool
    is_shared: bool


class Twins:
    """Holds twins as long as the storages that they belong to.

    Args:
        wide: the dtype of the twins of numbers.
        checks: whether writes by other means than torch's operators, such as NumPy's, are looked for: such a tensor is exact.
    """

    def __init__(self, wide: torch.dtype, checks: bool = False) -> None:
        self._wide, self._checks = wide, checks
        #: Some elements of storages with twins, as an operator has written them last.
        self._seen: dict[int, torch.Tensor] = {}
        self._of: dict[int, Twin] = {}
        #: The storages whose twins have shared memory, by that memory's storage, which may be a tensor's of the run.
        self._borrowers: defaultdict[int, list[int]] = defaultdict(list)
        #: The bytes of all twins.
        self.bytes = 0

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the twin of a tensor; None if it has none of its own."""
        key = storage_key(tensor)
        twin = self._of.get(key)
        if twin is None:
            return None
        if twin.dtype != tensor.dtype or self._is_overwritten(key):
            self._drop(key)
            return None
        return twin.values.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def is_cast(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's values were never computed with in 16 bits; one without a twin is exact."""
        twin = self._of.get(storage_key(tensor))
        return twin is None or twin.is_cast

    def to_write(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the twin of a tensor, in memory of its own; one with the tensor's values if it had none."""
        self._part(storage_key(tensor))
        twin = self.of(tensor)
        if twin is None:
            self.add(tensor, tensor, is_cast=False)
            return self.to_write(tensor)
        return twin

    def living(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
        """Yield each storage that has a twin as one dimension, the twin, and whether its values were only cast."""
        for key, twin in list(self._of.items()):
            storage = twin.storage()
            if storage is not None and twin.dtype is not torch.bool and not self._is_overwritten(key):
                yield _whole(storage, twin.dtype), twin.values, twin.is_cast

    def written(self, tensors: Iterable[torch.Tensor]) -> None:
        """Handle that tensors of the run are about to be written: twins that have their memory get a copy."""
        for each in tensors:
            self._seen.pop(storage_key(each), None)
            for key in self._borrowers.pop(storage_key(each), ()):
                self._part(key)

    def update(self, tensor: torch.Tensor, twin: torch.Tensor, is_cast: bool) -> None:
        """Write new values into the twin that a tensor has."""
        key = storage_key(tensor)
        known = self._of[key]
        self._of[key] = known._replace(is_cast=known.is_cast and is_cast)
        own = self.to_write(tensor)
        if own.data_ptr() != twin.data_ptr():
            own.copy_(twin)
        self._see(key)

    def add(self, tensor: torch.Tensor, twin: torch.Tensor, is_cast: bool, is_ours: bool = False) -> None:
        """Remember a tensor's twin. Other elements of its storage retain their values.

        It is copied, unless nothing else has its memory (``is_ours``) and the layouts are the same.
        """
        if is_ours and have_one_layout(tensor, twin):
            self._set(tensor, flat(twin), is_cast, is_shared=False)
            return
        dtype = torch.bool if tensor.dtype is torch.bool else self._wide
        values = _whole(tensor.untyped_storage(), tensor.dtype).to(dtype, copy=True)
        values.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).copy_(twin)
        self._set(tensor, values, is_cast, is_shared=False)

    def share(self, tensor: torch.Tensor, source: torch.Tensor, twin: torch.Tensor, is_cast: bool) -> None:
        """Let a cast have the twin, or else the values, of its source, which has the same layout."""
        self._borrowers[storage_key(twin)].append(storage_key(tensor))
        lender = self._of.get(storage_key(source))
        if lender is not None:
            self._of[storage_key(source)] = lender._replace(is_shared=True)
        self._set(tensor, flat(twin.detach()), is_cast, is_shared=True)

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take tensors as exact."""
        for each in tensors:
            self._drop(storage_key(each))

    def clear(self) -> None:
        """Forget all twins."""
        self._of.clear()
        self._seen.clear()
        self._borrowers.clear()
        self.bytes = 0

    def _set(self, tensor: torch.Tensor, values: torch.Tensor, is_cast: bool, is_shared: bool) -> None:
        key = storage_key(tensor)
        self._drop(key)
        # torch keeps a storage's object as long as its memory, so that the key is free again only after this callback.
        storage = weakref.ref(tensor.untyped_storage(), partial(_died, weakref.ref(self), key))
        self._of[key] = Twin(storage, tensor.dtype, values, is_cast, is_shared)
        self.bytes += values.nbytes
        self._see(key)

    def _see(self, key: int) -> None:
        storage = self._of[key].storage()
        if self._checks and storage is not None:
            self._seen[key] = _few(storage, self._of[key].dtype).clone()

    def _is_overwritten(self, key: int) -> bool:
        """Return whether a storage has other elements than an operator has written. Waits for the device."""
        seen, storage = self._seen.get(key), self._of[key].storage()
        if seen is None or storage is None:
            return False
        now = _few(storage, self._of[key].dtype)
        return not bool(((now == seen) | ((now != now) & (seen != seen))).all())

    def _part(self, key: int) -> None:
        """Give a twin memory of its own."""
        twin = self._of.get(key)
        if twin is not None and twin.is_shared:
            self._of[key] = twin._replace(values=twin.values.clone(), is_shared=False)

    def _drop(self, key: int) -> None:
        twin = self._of.pop(key, None)
        self._seen.pop(key, None)
        if twin is not None:
            self.bytes -= twin.values.nbytes


def _died(twins: weakref.ref[Twins], key: int, storage: Any) -> None:
    """Remove the twin of a storage that has been freed; runs wherever its last tensor ends."""
    those = twins()
    if those is not None:
        those._drop(key)


_Mark = TypeVar("_Mark")


class Marks(Generic[_Mark]):
    """Remembers one thing of each storage."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[StorageReference, _Mark]] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def of(self, tensor: torch.Tensor) -> _Mark | None:
        """Return the mark of a tensor's storage."""
        storage, mark = self._of.get(storage_key(tensor), (None, None))
        return None if storage is None or storage.expired() else mark

    def put(self, tensor: torch.Tensor, mark: _Mark | None) -> None:
        """Mark a tensor's storage; None removes its mark."""
        key = storage_key(tensor)
        if mark is None:
            self._of.pop(key, None)
        else:
            self._of[key] = StorageReference(tensor), mark


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that covers its storage as one dimension."""
    return tensor.as_strided((tensor.numel(),), (1,), 0)


def _whole(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of all elements of a storage, in one dimension."""
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))


def _few(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    """Return some elements of a storage, evenly spread."""
    elements = _whole(storage, dtype)
    return elements[:: max(1, len(elements) // _SEEN)]


def _covers(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has each element of its storage once."""
    is_whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return is_whole and 0 not in tensor.stride()


def have_one_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors cover their storages, on one device, in the same order."""
    are_alike = one.shape == other.shape and one.stride() == other.stride() and one.device == other.device
    return are_alike and _covers(one) and _covers(other)


def _pieces(one: torch.Tensor, other: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield two tensors of one shape in pieces, so that copies of them stay in a processor's cache; whole on a GPU."""
    if one.is_cpu and one.numel() > _PIECE and have_one_layout(one, other):
        yield from zip(torch.split(flat(one), _PIECE), torch.split(flat(other), _PIECE), strict=True)
    else:
        yield one, other


def distance(one: torch.Tensor, twin: torch.Tensor) -> float:
    """Return the norm of the difference of a tensor and its twin, in the twin's dtype."""
    # Memory of its own for each piece would cost more than the arithmetic.
    room = torch.empty(min(_PIECE, one.numel()) * one.is_cpu, dtype=twin.dtype, device="cpu")
    norms = []
    for left, right in _pieces(one, twin):
        # Also one without elements, which would fit, may be on a device.
        is_small = one.is_cpu and left.dim() == 1 and len(left) <= len(room)
        off = room[: len(left)].copy_(left).sub_(right) if is_small else left.to(right.dtype) - right
        norms.append(float(off.norm()))
    return math.hypot(*norms)


def is_equal(one: torch.Tensor, twin: torch.Tensor) -> bool:
    """Return whether two tensors of one shape have the same values."""
    return all(torch.equal(left.to(right.dtype), right) for left, right in _pieces(one, twin))


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no element of a floating-point tensor is infinite or NaN."""
    if tensor.dtype in FP8:
        # It has no sums.
        tensor = tensor.float()
    # A finite sum has finite terms only, and an infinite one may have too.
    return math.isfinite(tensor.sum()) or all(map(math.isfinite, torch.aminmax(tensor)))
