"""Finds, among one step's operators, whole numbers that became equal in 16 bits and whose differences are used later, and
differences of whole numbers too large for FP32.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from mpinspect.ranges.capture.largest import has_memory
from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.faults.measure.operands import OperatorCall, is_in_forward
from mpinspect.ranges.faults.measure.twins import Marks
from mpinspect.ranges.records import Positions, Record
from mpinspect.runtime.device import computes_in_fp64, is_capturing
from mpinspect.runtime.outputs import leaves
from mpinspect.runtime.user_line import innermost_line

aten = torch.ops.aten

#: The 16-bit formats and the first whole number that each can't represent.
FIRST_LOST = {torch.bfloat16: 257, torch.float16: 2049}
#: Minimum number of elements of a tensor of several numbers, and of distinct numbers lost to rounding.
_FEWEST, _FEWEST_LOST = 4, 4
#: The fewest different numbers, both of those that a dtype would have rounded and of smaller ones, that show that it has: each of
#: the first is one of its numbers by chance in every second case or fewer.
_FEWEST_OF_STORED = 16
#: The least share of scattered numbers that rounding changes.
_MOSTLY = 0.5
#: Maximum number of elements compared per tensor and in all, and of tensors on a GPU that are read.
_MOST_ELEMENTS, _MOST_IN_ALL, _MOST_ON_DEVICE = 1 << 18, 1 << 22, 64
#: Number of a float tensor's elements that must be whole before all elements are checked.
_FEW = 64
#: Maximum number of operators between the rounding and the use.
_MOST_HOPS = 8

#: The magnitude from which on FP32 has no odd numbers.
_LAST_EXACT = 2.0**24
#: The least share of such numbers, and of odd multiples of their distance: data that are coarser than FP32 were not rounded.
_LARGE, _ODD = 0.9, 0.05
#: Maximum median of differences, in units of the distance of neighbouring numbers, that counts as lost.
_FEW_UNITS = 16
#: The bits after the first one of the 16-bit formats' numbers.
_BITS = {torch.bfloat16: 7, torch.float16: 10}
#: The same maximum for the root mean square of 16-bit data, whose rounding is a tenth of it, and that of all differences.
_FEW_OF_DATA, _MOST_OF_DATA = 2, 32

#: Operators whose result represents the same numbers. Views need no entry, since they share memory.
_CARRYING = (
    *(aten.mul_, aten.div_, aten.add_, aten.sub_),
    *(aten.rsub, aten.neg, aten.floor, aten.round, aten.clamp),
    *(aten.cat, aten.stack, aten.clone, aten.repeat, aten.where, aten.masked_fill, aten.sum),
    *(aten.index, aten.index_select, aten.gather, aten.sort),
)
_COMPARING = (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge)

#: Called with an operator's arguments and its result.
Watcher = Callable[[tuple[Any, ...], Any], None]


class _Rounded(NamedTuple):
    """Rounded whole numbers, the operator that rounded them and its line, and the number of operators since.

    For numbers from before the step, it is the line that takes them.
    """

    operator: str
    numbers: Positions
    line: str
    hops: int = 0


class RoundedNumbers:
    """Follows whole numbers rounded to 16 bits until their differences matter. Waits for the device.

    Neighbours become equal in a cast, an ``arange`` or a ``cumsum``, which does little harm to a divisor or a target, or before
    the step, in a table of the script's, whose numbers above the format's exact ones are taken for rounded ones. They are
    recorded if they, or simple functions of them, are passed to a sine or cosine, become integers again, or are subtracted from
    or compared with each other. The results of an ``arange`` or ``cumsum`` are also recorded if compared with other numbers.

    Args:
        module: returns the dotted path of the module that is running.
        is_old: returns whether a tensor's values were made before the step.
    """

    def __init__(
        self, module: Callable[[], str], is_old: Callable[[torch.Tensor], bool] = lambda tensor: False
    ) -> None:
        self._module, self._is_old = module, is_old
        #: The first numbers whose differences matter; their step is not set.
        self.found: Positions | None = None
        self._rounded: Marks[_Rounded] = Marks()
        self._left, self._left_on_device = _MOST_IN_ALL, _MOST_ON_DEVICE

    def watchers(self) -> dict[Any, Watcher]:
        """Return the functions to call after each call of an operator of the forward, by operator."""
        return {
            aten.arange: self._made,
            aten.cumsum: self._added_up,
            aten._to_copy: self._cast,
            aten.copy_: lambda args, result: self._cast(args[1:], result),
            **dict.fromkeys(_CARRYING, self._carried),
            **dict.fromkeys((aten.remainder, aten.fmod), self._scaled),
            **dict.fromkeys((aten.mul, aten.add), self._computed),
            aten.sub: self._subtracted,
            aten.div: self._divided,
            **dict.fromkeys((aten.mm, aten.bmm), self._multiplied),
            **dict.fromkeys((aten.sin, aten.cos), self._given_an_angle),
            aten.polar: lambda args, result: self._given_an_angle(args[1:], result),
            **dict.fromkeys(_COMPARING, self._compared),
        }

    # -- where numbers are rounded -----------------------------------------------------------------------------------

    def _made(self, args: tuple[Any, ...], result: Any) -> None:
        if self._is_worth_reading(result, result):
            exact = torch.arange(*args, dtype=torch.float64, device=result.device)
            self._look("arange", exact, result, result)

    def _added_up(self, args: tuple[Any, ...], result: Any) -> None:
        terms, dim = args[:2]
        if self._is_worth_reading(terms, result) and _is_whole(terms):
            terms, sums = _part(terms, dim), _part(result, dim)
            self._look("cumsum", terms.double().cumsum(dim), sums, result)

    def _cast(self, args: tuple[Any, ...], result: Any) -> None:
        source = args[0]
        if not result.is_floating_point() and result.dtype != torch.bool:
            self._given(source)
        if self._of(source) is not None:
            if result.is_floating_point():
                self._carried(args, result)
            elif result.dtype != torch.bool:
                self._used("become integers again", source)
        elif source.element_size() > 1 and self._is_worth_reading(source, result) and _is_whole(source):
            part = _part(source).double()
            self._look("cast", part, part.to(result.dtype), result)

    def _given(self, source: Any) -> None:
        """Remember whole numbers that are too large for their format, and were rounded, if at all, before the step."""
        if not isinstance(source, torch.Tensor) or self._of(source) is not None:
            return
        dtype = source.dtype
        if dtype is torch.float32:
            dtype = self._stored_in(source)
        elif not self._is_old(source) or not self._is_worth_reading(source, source) or not _is_whole(source):
            return
        if dtype not in FIRST_LOST:
            return
        largest = float(source.abs().max())
        if FIRST_LOST[dtype] <= largest < math.inf:
            after = _representable(int(largest), dtype)
            stored = dtype is not source.dtype
            numbers = Positions(largest=largest, before=largest + 1, after=after, is_table=False, stored=stored)
            self._remember(source, "", numbers, dtype)

    def _stored_in(self, source: torch.Tensor) -> torch.dtype:
        """Return the 16-bit dtype in which whole numbers in FP32 were once; FP32 if that is not certain."""
        if self._is_worth_reading(source, source, (torch.float32,)) and _is_whole(source):
            for dtype in FIRST_LOST:
                if _were_in(torch.unique(source.detach()), dtype):
                    return dtype
        return torch.float32

    def _scaled(self, args: tuple[Any, ...], result: Any) -> None:
        """Follow a phase or an angle; its whole numbers may have been made before the step."""
        for given in args[:2]:
            self._given(given)
        self._carried(args, result)

    def _computed(self, args: tuple[Any, ...], result: Any) -> None:
        """Treat integers as cast if the other operand has 16 bits."""
        for given in args[:2]:
            if isinstance(given, torch.Tensor) and not given.is_floating_point():
                self._cast((given,), result)
        self._scaled(args, result)

    def _subtracted(self, args: tuple[Any, ...], result: Any) -> None:
        self._computed(args, result)
        self._used("are subtracted from each other", *args[:2])

    def _divided(self, args: tuple[Any, ...], result: Any) -> None:
        """Follow dividends only: a rounded divisor does little harm."""
        self._computed(args[:1], result)

    def _look(self, operator: str, exact: torch.Tensor, rounded: torch.Tensor, result: torch.Tensor) -> None:
        """Remember a result if rounding has made enough neighbours equal."""
        numbers = _collapsed(exact.flatten(), rounded.flatten())
        if numbers is not None:
            self._remember(result, operator, numbers, result.dtype)

    def _is_worth_reading(self, source: Any, result: Any, dtypes: Collection[torch.dtype] = FIRST_LOST.keys()) -> bool:
        """Return whether values may be compared; subtract the cost from the remaining allowance.

        Args:
            dtypes: those that the result may have.
        """
        if (
            self.found is not None
            or not is_readable(source)
            or not is_readable(result)
            or result.dtype not in dtypes
            or source.numel() < _FEWEST + _FEWEST_LOST
            or source.is_complex()
            or source.requires_grad
        ):
            return False
        if not source.is_cpu:
            self._left_on_device -= 1
            if self._left_on_device < 0 or is_capturing():
                return False
        self._left -= min(source.numel(), _MOST_ELEMENTS if not source.is_floating_point() else _FEW)
        return self._left >= 0

    # -- where they go -----------------------------------------------------------------------------------------------

    def _carried(self, args: tuple[Any, ...], result: Any) -> None:
        """Remember the result of an operator with rounded numbers as an operand."""
        if not self._rounded:
            return
        result = result[0] if isinstance(result, tuple) else result
        origins = filter(None, map(self._of, leaves(args)))
        origin = next((each for each in origins if each.hops < _MOST_HOPS), None)
        if origin is not None:
            self._put(result, origin._replace(hops=origin.hops + 1))

    def _multiplied(self, args: tuple[Any, ...], result: Any) -> None:
        """Follow outer products (of positions and frequencies), which add up no terms."""
        if args[0].shape[-1] == 1:
            self._scaled(args, result)

    def _given_an_angle(self, args: tuple[Any, ...], result: Any) -> None:
        self._given(args[0])
        self._used("get a sine or cosine", args[0])

    def _compared(self, args: tuple[Any, ...], result: Any) -> None:
        operands = [each for each in args[:2] if isinstance(each, torch.Tensor) and each.numel() > 1]
        if len(operands) == 2:
            made = [each for each in operands if (origin := self._of(each)) is not None and origin.operator != "cast"]
            self._used("are compared with others", *(made or operands))

    def _used(self, how: str, *operands: Any) -> None:
        """Record the numbers if all operands are rounded numbers."""
        origins = [self._of(each) for each in operands]
        origin = origins[0]
        if origin is None or None in origins or self.found is not None:
            return
        self.found = replace(origin.numbers, names=(origin.operator, how, origin.line))
        self._rounded = Marks()

    def _of(self, tensor: Any) -> _Rounded | None:
        if not self._rounded or not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return None
        return self._rounded.of(tensor)

    def _remember(self, result: torch.Tensor, operator: str, numbers: Positions, dtype: torch.dtype) -> None:
        """Remember a tensor of numbers that were rounded to a dtype, at the running module and line."""
        numbers = replace(numbers, name=self._module(), text=dtype_name(dtype))
        self._put(result, _Rounded(operator, numbers, innermost_line(sys._getframe())))

    def _put(self, result: torch.Tensor, rounded: _Rounded) -> None:
        if result.is_floating_point() and result.numel() >= _FEWEST:
            self._rounded.put(result, rounded)


class StoredNumbers:
    """Finds whole numbers in FP32 that were in 16 bits before, and whose small differences matter: these are lost.

    Args:
        module: returns the dotted path of the module that is running.
    """

    def __init__(self, module: Callable[[], str]) -> None:
        self._numbers = RoundedNumbers(module)
        # Numbers that an operator rounds now have a judgement of their own.
        rounding = (aten.arange, aten.cumsum, aten.copy_)
        self._watchers = {each: watch for each, watch in self._numbers.watchers().items() if each not in rounding}

    def ran(self, call: OperatorCall) -> None:
        """Follow an operator; if that fails, follow none any more. Waits for the device."""
        operator, result = call.func.overloadpacket, call.result
        watch = self._watchers.get(operator)
        is_number = operator is aten._to_copy and result.is_floating_point()
        if watch is None or is_number or call.in_optimizer or not is_in_forward() or is_capturing():
            return
        try:
            watch(call.args, result)
        except Exception:
            self._watchers = {}

    def records(self) -> list[Record]:
        """Return the first such numbers."""
        return list(filter(None, [self._numbers.found]))


def coarse_difference(
    one: Any, other: Any, is_sum: bool, dtype: torch.dtype | None
) -> tuple[torch.dtype, dict[str, float]] | None:
    """Return the dtype of numbers whose difference is a few units in their last place, and figures of it; else None.

    These are FP32 numbers beyond 2^24; or many numbers with a fraction that were rounded to 16 bits, such as data, from which
    fewer are subtracted, such as a mean. Numbers that were computed for a gradient are left out. Waits for the device.

    Args:
        one, other: the operands; tensors or numbers.
        is_sum: whether they are added, as a number and a negative one.
        dtype: the 16-bit dtype that the first operand had; None if it is not known to have had one.
    """
    operands = [each for each in (one, other) if isinstance(each, torch.Tensor)]
    if isinstance(other, complex) or any(
        each.requires_grad or not each.is_floating_point() or not is_readable(each) for each in operands
    ):
        return None
    if is_capturing() or any(not 0 < each.numel() <= _MOST_ELEMENTS for each in operands):
        return None
    subtracted = other.numel() if isinstance(other, torch.Tensor) else 1
    if isinstance(one, torch.Tensor) and dtype is not None and one.numel() >= max(_FEWEST, 2 * subtracted):
        figures = _coarse_data(one, other, is_sum, _BITS[dtype])
        return None if figures is None else (dtype, figures)
    if not operands or any(each.dtype != torch.float32 for each in operands):
        return None
    given = [torch.as_tensor(each, dtype=torch.float32, device=operands[0].device) for each in (one, other)]
    # One element rejects nearly all tensors.
    if any(abs(float(each[(-1,) * each.dim()])) < _LAST_EXACT for each in given):
        return None
    sizes = [each.abs() for each in given]
    if not all(map(_is_large, sizes)):
        return None
    largest = max(float(each.max()) for each in sizes)
    unit = 2.0 ** (math.floor(math.log2(largest)) - 23)
    differences = (one + other if is_sum else one - other).abs()
    differences = differences[differences > 0]
    is_rounded = any(float((each / unit % 2 == 1).float().mean()) >= _ODD for each in operands)
    if not is_rounded or not differences.numel() or float(typical := differences.median()) > _FEW_UNITS * unit:
        return None
    return torch.float32, {"largest": largest, "unit": unit, "typical": float(typical)}


def _coarse_data(data: torch.Tensor, other: Any, is_sum: bool, bits: int) -> dict[str, float] | None:
    """Return figures of data of a few bits from which few numbers are subtracted; the rest as of ``coarse_difference``."""
    numbers, others = data.float(), torch.as_tensor(other, dtype=torch.float32, device=data.device)
    largest = float(numbers.abs().max())
    is_exact = bool((numbers == numbers.round()).all() | (numbers == numbers.min()).all())
    if is_exact or not 0 < largest < math.inf:
        return None
    differences = (numbers + others if is_sum else numbers - others).abs()
    unit = 2.0 ** (math.floor(math.log2(largest)) - bits)
    typical = float(differences.square().mean().sqrt())
    if not 0 < typical <= _FEW_OF_DATA * unit or float(differences.max()) > _MOST_OF_DATA * unit:
        return None
    return {"largest": largest, "unit": unit, "typical": typical}


def _is_large(sizes: torch.Tensor) -> bool:
    return bool(sizes.isfinite().all()) and float((sizes >= _LAST_EXACT).float().mean()) >= _LARGE


def is_readable(tensor: Any) -> bool:
    """Return whether this is a dense tensor (no subclass) with memory on a device that computes in FP64."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and has_memory(tensor)
        and computes_in_fp64(tensor.device)
    )


def _part(tensor: torch.Tensor, keep: int | None = None) -> torch.Tensor:
    """Return the compared part of a tensor: if possible, the whole of one dimension (by default the longest)."""
    if keep is None:
        keep = max(range(tensor.dim()), key=tensor.shape.__getitem__)
    for dim in (*(each for each in range(tensor.dim()) if each != keep % tensor.dim()), keep):
        most = max(_MOST_ELEMENTS * tensor.shape[dim] // tensor.numel(), 1)
        tensor = tensor.narrow(dim, 0, min(most, tensor.shape[dim]))
    return tensor


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds whole numbers; a check of a few elements rejects most others."""
    if not tensor.is_floating_point():
        return True
    part = _part(tensor)
    return all(bool((each == each.round()).all()) for each in (part.flatten()[:_FEW], part))


def _were_in(numbers: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether different whole numbers in FP32 were once in a 16-bit dtype, which has rounded the larger ones.

    All of them are then numbers of that dtype, and the smaller ones are closer together than those.
    """
    large = numbers[numbers.abs() >= FIRST_LOST[dtype]]
    if len(large) < _FEWEST_OF_STORED or not bool((numbers.to(dtype).float() == numbers).all()):
        return False
    spacing = 2.0 ** (math.floor(math.log2(float(large.abs().max()))) - _BITS[dtype])
    return int((numbers % spacing != 0).sum()) >= _FEWEST_OF_STORED


def _representable(largest: int, dtype: torch.dtype) -> int:
    """Return how many of the whole numbers from 0 to ``largest``, which exceeds the format's exact ones, it holds."""
    exact = FIRST_LOST[dtype] - 1
    bits = exact.bit_length() - 1
    exponent = largest.bit_length() - 1
    of_last_binade = (largest - (1 << exponent)) // (1 << (exponent - bits + 1)) + 1
    return exact + (exponent - bits) * exact // 2 + of_last_binade


def _collapsed(exact: torch.Tensor, rounded: torch.Tensor) -> Positions | None:
    """Return the numbers of distinct values before and after rounding; None unless enough became equal.

    Of scattered numbers, which become others without becoming equal, those of all whole numbers up to the largest.
    """
    largest = float(exact.abs().max())
    if not FIRST_LOST[rounded.dtype] <= largest < float("inf"):
        return None
    before, after = (len(torch.unique(each)) for each in (exact, rounded))
    if before - after < _FEWEST_LOST:
        if int((exact != rounded).sum()) < _MOSTLY * len(exact):
            return None
        before, after = int(largest) + 1, _representable(int(largest), rounded.dtype)
    return Positions(largest=largest, before=before, after=after, is_table=True)
