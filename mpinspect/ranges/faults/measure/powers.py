"""The power of the loss scale that each tensor of a step carries, by dimensional analysis of the operators that run.

A loss that a scaler has multiplied carries the scale to the power 1, and so do its gradients, until the scaler divides them. A
sum of terms with different powers is a fault: a penalty on gradients that were never divided, weight decay on scaled gradients,
one backward scaled and another not. A number that limits a scaled value is one too, if it changes any element: there alone
values are read. Powers belong to storages, so that views need no bookkeeping. Where an operator's effect on the power is not
certain, the power is unknown, and nothing is reported.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten

from mpinspect.ranges.capture.graph import walk
from mpinspect.ranges.faults.measure.operands import OperatorCall, rows
from mpinspect.ranges.faults.measure.twins import Marks
from mpinspect.ranges.records import MixedPowers, Record, WrittenByLoop
from mpinspect.runtime.storages import has_storage, storage_key
from mpinspect.runtime.user_line import innermost_line

#: A power; None if it is unknown, and ZERO for zeros, which may be added to anything. EMPTY memory has that of its first part.
Power = float | None
ZERO, EMPTY = math.inf, -math.inf

#: Positions of the terms that sums add to their first argument; a pair of positions is a product, as in ``addmm``.
_SUMS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("add", "sub", "rsub", "lerp"), (1,)),
    **dict.fromkeys(("index_add", "scatter_add"), (3,)),
    **dict.fromkeys(("addmm", "addmv", "addr", "addbmm", "baddbmm", "addcmul"), (1, 2)),
}
#: Operators that compare a value with the bounds in their other arguments, or keep it within these.
_COMPARISONS = frozenset({"gt", "ge", "lt", "le"})
_LIMITS = _COMPARISONS | {"clamp", "clamp_min", "clamp_max"}
_PRODUCTS = frozenset({"mul", "mm", "bmm", "mv", "dot", "vdot", "convolution"})
_EXPONENTS = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0, "var": 2.0, "std": 1.0}
#: Operators whose result has the power of their first tensor.
_LINEAR = frozenset(
    {
        *("neg", "abs", "sum", "mean", "clone", "contiguous", "_to_copy", "cumsum", "linalg_vector_norm", "norm"),
        *("max", "min", "amax", "amin", "index", "index_select", "gather", "select", "slice", "view", "_unsafe_view"),
        *("reshape", "repeat", "flip", "roll", "relu", "native_dropout", "masked_fill", "masked_select"),
        *("nan_to_num", "unfold", "constant_pad_nd", "tril", "triu", "diagonal", "sort", "topk", "median", "trace"),
        *("_coalesce", "values", "_values", "coalesce", "lift_fresh", "lift_fresh_copy"),
    }
)
#: Operators whose tensors should have one power; different powers are a fault only in some of their uses.
_MERGING = frozenset({"where", "cat", "stack", "maximum", "minimum", "fmax", "fmin", "index_put", "_index_put_impl"})
#: Positions of the value of operators that fill.
_FILLS = {"fill": 1, "full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}
#: The powers of results that do not depend on the size of an operator's tensors; a fill may be one with zeros.
_INDEPENDENT: dict[str, Power] = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero"), ZERO),
    **dict.fromkeys(
        ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"), EMPTY
    ),
    **dict.fromkeys(
        ("ones", "ones_like", "new_ones", "rand_like", "randn_like", "randint_like", "sign", "sgn", "normal"), 0.0
    ),
    **dict.fromkeys(("uniform", "random", "bernoulli", "exponential"), 0.0),
    **dict.fromkeys(_FILLS, 0.0),
}
#: The most nodes of a loss's graph that are searched for functions with backwards of their own.
_MOST_NODES = 4096
#: A smaller number is an epsilon, which may be added to a scaled value.
_EPSILON = 1e-3
#: A number may be a loss scale, or its reciprocal, from this scale on; smaller ones are too common.
_LEAST_SCALE = 128.0


class _Operator(NamedTuple):
    """An operator that has run, by its name without the underscore of those in place, with its caller's frame and the number by
    which it multiplies what it adds.
    """

    name: str
    args: tuple[Any, ...]
    frame: FrameType
    in_optimizer: bool
    factor: Any = 1


class PowersOfScale:
    """Follows the power of the loss scale through a step, and records the sums of terms with different powers.

    Args:
        module: returns the dotted path of the module that is running.
        parameters: the model's parameters by name.
    """

    def __init__(self, module: Callable[[], str], parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        self._module = module
        self._parameters = list(parameters)
        self._known: Marks[tuple[Power]] = Marks()
        self._scale = 1.0
        #: Whether the loop has read the scale as a number, with which it may divide.
        self._is_read = False
        #: Numbers that the loop has multiplied by since.
        self._numbers: set[float] = set()
        self._found: MixedPowers | None = None
        self._written: WrittenByLoop | None = None
        #: Sums in gradients and in tensors outside of autograd, by storage: they do no harm until an optimizer takes them, or a
        #: scaler divides the gradient.
        self._in_gradients: dict[int, MixedPowers | None] = {}
        #: Storages whose values the step has divided by the scale.
        self._divided: set[int] = set()
        #: The functions in the graph of a scaled loss whose backwards are Python code.
        self._own_backwards: tuple[str, ...] = ()
        #: The last function whose backward has made a constant.
        self._maker = ""
        self._is_ours = False
        for _, parameter in self._parameters:
            if has_storage(parameter):
                self._set(parameter, 0.0)
            if parameter.grad is not None and has_storage(parameter.grad):
                # It may be left over from the step before.
                self._set(parameter.grad, None)

    def scaled(self, scaler: Any, given: Any, scaled: Any) -> None:
        """Raise the powers of the tensors that ``scaler.scale(given)`` returned as ``scaled``; waits for the GPU."""
        scale = getattr(scaler, "_scale", None)
        if scaled is given or not isinstance(scale, torch.Tensor):
            return
        self._is_ours = True
        try:
            self._scale = float(scale)
        finally:
            self._is_ours = False
        self._set(scale, 1.0)
        for before, after in zip(_tensors(given), _tensors(scaled), strict=False):
            self._set(after, _times(self._power(before), 1.0))
        nodes = walk((each.grad_fn for each in _tensors(scaled)), _MOST_NODES)
        own = (type(each) for each in nodes if isinstance(each, torch.autograd.function.BackwardCFunction))
        names = (each.__name__.removesuffix("Backward") for each in own if not _is_of_torch(each))
        self._own_backwards = tuple(dict.fromkeys((*self._own_backwards, *names)))

    def ran(self, call: OperatorCall) -> None:
        """Follow one operator."""
        if self._is_ours:
            return
        func, args, kwargs, result, frame, in_optimizer = call
        name, factor = func.overloadpacket.__name__, kwargs.get("alpha", kwargs.get("value", 1))
        if self._written is None and func._schema.is_mutable and not in_optimizer:
            self._write(name, args, frame)
        if self._found is not None:
            # Later sums follow from the first.
            return
        if in_optimizer or name == "_amp_foreach_non_finite_check_and_unscale_":
            self._takes(_tensors(args), in_optimizer)
        if name == "_local_scalar_dense":
            self._is_read |= self._power(args[0]) not in (0.0, ZERO)
        elif name == "_amp_foreach_non_finite_check_and_unscale_":
            self._divide(args[0], args[2], frame)
        elif name.startswith(("_fused_adam", "_fused_sgd", "_fused_adagrad")):
            self._fused(_Operator(name, args, frame, in_optimizer), kwargs)
        elif name.startswith("_foreach_"):
            for row, each in rows(args, result):
                self._one(_Operator(name.removeprefix("_foreach_"), row, frame, in_optimizer, factor), each)
        elif not _is_view(func):
            self._one(_Operator(name, args, frame, in_optimizer, factor), result)

    def records(self) -> list[Record]:
        """Return the first sum of terms with different powers, if any, and the loop's first own write to a weight."""
        return list(filter(None, [self._found, self._written]))

    # -- operators --------------------------------------------------------------------------------------------------

    def _divide(self, gradients: list[torch.Tensor], by: torch.Tensor, frame: FrameType) -> None:
        """Follow a scaler's division, and record one of gradients that lost the scale in a function's own backward."""
        for gradient in gradients:
            # Code outside of torch may have written a gradient that no operator has.
            known = self._known.of(gradient)
            power = None if known in (None, (EMPTY,)) else known[0]
            if self._own_backwards and power == 0.0 and self._found is None:
                found = self._mixed(_Operator("div", (), frame, False), (0.0, -1.0), "function", (gradient,))
                self._found = found and replace(found, names=("", "", *self._own_backwards))
            self._set(gradient, _times(power, self._power(by)))

    def _one(self, operator: _Operator, result: Any) -> None:
        is_in_place = operator.name.endswith("_")
        operator = operator._replace(name=operator.name.rstrip("_"))
        name, args = operator.name, operator.args
        results = _tensors(result)
        if name in _LIMITS and not operator.in_optimizer and self._power(args[0]) == 1.0:
            self._limited(operator, results[0])
        terms, node = self._terms(operator), torch._C._current_autograd_node()
        power = _merged(*terms) if terms else self._result(name, args)
        if node is not None and name in _INDEPENDENT and power == 0.0:
            self._maker = node.name().removesuffix("Backward")
        if is_in_place and power == 0.0 and name in ("mul", "div"):
            self._divided.update(
                storage_key(each) for each in results if has_storage(each) and self._power(each) == 1.0
            )
        for each in results:
            if not (each.is_floating_point() or each.is_complex()):
                self._set(each, 0.0)
            elif (
                is_in_place
                and has_storage(each)
                and each.numel() * each.element_size() < each.untyped_storage().nbytes()
            ):
                is_empty = self._known.of(each) == (EMPTY,)
                self._set(each, power if is_empty else _merged(self._power(each), power))
            else:
                self._set(each, power)
        if terms and power is None and None not in terms:
            self._differ(operator, terms, results)

    def _result(self, name: str, args: tuple[Any, ...]) -> Power:
        """Return the power of an operator's result."""
        if name in _FILLS and 0 in args[_FILLS[name] :][:1]:
            return ZERO
        if name in _INDEPENDENT:
            return _INDEPENDENT[name]
        if name in _PRODUCTS:
            return _times(self._factor(args[0], args[1]), self._factor(args[1], args[0]))
        if name == "div":
            divisor = self._factor(args[1], args[0])
            return _times(self._power(args[0]), None if divisor == ZERO else _raised(divisor, -1.0))
        if name == "copy":
            return self._power(args[1])
        # Indices and masks have no part of the scale.
        powers = [self._power(each) for each in _tensors(args) if each.is_floating_point() or each.is_complex()]
        if not powers:
            return 0.0
        if name in _EXPONENTS or name == "pow":
            return _raised(powers[0], _EXPONENTS.get(name, (*args, None)[1]))
        if name in _MERGING:
            return _merged(*powers)
        return self._of_others(name, powers)

    def _of_others(self, name: str, powers: list[Power]) -> Power:
        """Return the power of the result of an operator that is not listed: in a backward it is linear in the gradient."""
        carrying = [power for power in powers if power not in (0.0, ZERO)]
        if None in powers or len(carrying) > 1:
            return None
        linear_in = powers[: name in _LINEAR]
        if torch._C._current_autograd_node() is not None:
            linear_in = carrying or powers
        if carrying:
            return next(iter(linear_in), None)
        return next((power for power in linear_in if power == ZERO), 0.0)

    def _factor(self, value: Any, other: Any) -> Power:
        """Return the power of a factor, which may be a number."""
        if isinstance(value, torch.Tensor):
            return self._power(value)
        if not isinstance(value, (int, float)):
            return None
        if value == 0:
            return ZERO
        number = float(value)
        # A scale that was halved again and again is zero in the end.
        for power in (1.0, -1.0) if self._scale > 0 else ():
            if math.isclose(number, self._scale**power, rel_tol=1e-6) and self._scale != 1.0:
                # A loop that has not read the scale, and a derivative, have another reason for this number.
                is_loops = self._is_read and torch._C._current_autograd_node() is None
                if is_loops and self._scale >= _LEAST_SCALE:
                    return power
                return None
        carries = isinstance(other, torch.Tensor) and self._power(other) not in (0.0, ZERO)
        if self._is_read and carries and abs(number) != 1.0:
            # It may contain the scale, as in 1 / (scale * micro_batches).
            if torch._C._current_autograd_node() is None:
                self._numbers.add(number)
            if number in self._numbers:
                return None
        return 0.0

    def _fused(self, operator: _Operator, kwargs: dict[str, Any]) -> None:
        """Follow an optimizer's fused step, which divides the gradients itself."""
        divided_by = kwargs.get("grad_scale")
        by = 0.0 if divided_by is None else self._power(divided_by)
        for parameter, gradient in zip(*operator.args[:2], strict=False):
            power = self._power(gradient)
            if by is not None and power is not None and power not in (ZERO, by):
                self._found = self._mixed(operator, (0.0, power - by), "optimizer", (parameter, gradient))
                return

    def _write(self, name: str, args: tuple[Any, ...], frame: FrameType) -> None:
        """Record the loop's own write to a weight; a module's forward may write its weights as well."""
        written = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
        if torch._C._current_autograd_node() is not None or self._module():
            return
        keys = {storage_key(each) for each in written if isinstance(each, torch.Tensor) and has_storage(each)}
        found = (path for path, weight in self._parameters if has_storage(weight) and storage_key(weight) in keys)
        path = next(found, None)
        if path is not None:
            self._written = WrittenByLoop(name=path, names=(name, innermost_line(frame)))

    # -- limits -----------------------------------------------------------------------------------------------------

    def _limited(self, operator: _Operator, result: torch.Tensor) -> None:
        """Handle a limit of a scaled value, such as a gradient's clamp in a hook; waits for the GPU."""
        name, args = operator.name, operator.args
        lower = args[1]
        bounds = [each for each in args[1:3] if each is not None and self._is_constant(each)]
        if name.startswith("clamp") and name != "clamp_max" and bounds == [lower] and _is_epsilon(lower):
            return
        shares = [0.0]
        for bound in bounds:
            differs = result == bound
            if name in _COMPARISONS:
                differs = result != getattr(torch, name)(args[0] / self._scale, bound)
            shares.append(float(differs.float().mean()))
        if max(shares) > 0:
            mixed = self._mixed(operator, (1.0, 0.0), "limit", args[:1])
            self._found = mixed and replace(mixed, share=max(shares))

    def _is_constant(self, bound: Any) -> bool:
        """Return whether a bound is certainly not multiplied by the loss scale, and neither zero nor infinite."""
        if isinstance(bound, torch.Tensor):
            return self._power(bound) == 0.0
        # If the bound is a multiple of the scale, dividing by the scale leaves fewer digits.
        return 0 < abs(bound) < math.inf and _digits(bound) < _digits(bound / self._scale)

    # -- sums -------------------------------------------------------------------------------------------------------

    def _terms(self, operator: _Operator) -> tuple[Power, Power] | None:
        """Return the powers of a sum's two terms; None if the operator is not a sum."""
        name, args = operator.name, operator.args
        if name == "addcdiv":
            return self._term(args[0]), self._result("div", args[1:3])
        if name not in _SUMS:
            return None
        added = [args[place] for place in _SUMS[name] if place < len(args)]
        factors = [self._term(each) for each in added]
        if operator.factor != 1:
            factors.append(self._factor(operator.factor, added[0]))
        return self._term(args[0]), functools.reduce(_times, factors)

    def _term(self, value: Any) -> Power:
        """Return the power of a term, which may be a number."""
        return ZERO if _is_epsilon(value) else self._factor(value, None)

    def _differ(self, operator: _Operator, powers: tuple[Power, Power], results: list[torch.Tensor]) -> None:
        """Handle a sum whose terms have different powers."""
        node, terms = torch._C._current_autograd_node(), operator.args[:2]
        mixed = functools.partial(self._mixed, operator, powers)
        if operator.in_optimizer:
            self._found = mixed("optimizer", terms)
        elif node is not None and "AccumulateGrad" in node.name():
            kind = "divided" if storage_key(results[0]) in self._divided else "accumulated"
            self._in_gradients[storage_key(results[0])] = mixed(kind, (getattr(node, "variable", None),))
        elif self._is_inner_step(terms[0], results[0]):
            self._found = mixed("weights", terms)
        elif self._name(terms[0]):
            self._in_gradients[storage_key(results[0])] = mixed("gradient", terms)
        elif node is not None or any(isinstance(each, torch.Tensor) and each.requires_grad for each in terms):
            # Any other sum may be of a log.
            is_number = not all(isinstance(each, torch.Tensor) for each in terms)
            self._found = mixed("number" if is_number else "values", terms)
            if self._found is not None and self._maker and not is_number:
                names = (*self._found.names, self._maker)
                self._found = replace(self._found, text="backward", names=names)
        elif 0.0 in powers and all(isinstance(each, torch.Tensor) for each in terms):
            self._in_gradients[storage_key(results[0])] = mixed("state", ())

    def _mixed(
        self, operator: _Operator, powers: tuple[Power, Power], kind: str, terms: tuple[Any, ...]
    ) -> MixedPowers | None:
        first, second = powers
        if self._scale <= 1.0 or first is None or second is None:
            return None
        named = next((path for each in terms if (path := self._name(each))), "")
        return MixedPowers(
            name=named or self._module(),
            text=kind,
            names=(operator.name, innermost_line(operator.frame)),
            loss_scale=self._scale,
            first=first,
            second=second,
        )

    def _takes(self, tensors: list[torch.Tensor], in_optimizer: bool) -> None:
        """Record the sums in gradients that a scaler divides or an optimizer takes."""
        taken = [self._in_gradients.get(storage_key(each)) for each in tensors if has_storage(each)]
        # A scaler's division of such a sum may be right: a tensor may hold scaled gradients of earlier steps.
        found = [each for each in taken if each is not None and (in_optimizer or each.text != "state")]
        if found:
            self._found = replace(found[0], names=(*found[0].names, *dict.fromkeys(each.name for each in found)))

    def _is_inner_step(self, weight: Any, result: torch.Tensor) -> bool:
        """Return whether a sum in the graph makes new weights of a parameter, as an inner step of meta-learning does."""
        is_weight = any(weight is parameter for _, parameter in self._parameters)
        return is_weight and torch.is_grad_enabled() and storage_key(weight) != storage_key(result)

    def _name(self, tensor: Any) -> str:
        """Return the name of a parameter, or of the parameter whose gradient it is; "" if it is neither."""
        for name, parameter in self._parameters:
            if parameter is tensor or parameter.grad is tensor:
                return name
        return ""

    # -- powers -----------------------------------------------------------------------------------------------------

    def _power(self, tensor: Any) -> Power:
        if not isinstance(tensor, torch.Tensor) or not has_storage(tensor):
            return None
        known = self._known.of(tensor)
        if known is not None:
            return None if known[0] == EMPTY else known[0]
        if torch._C._current_autograd_node() is not None:
            # An unknown tensor may be a gradient that compiled code or a custom kernel has written.
            return None
        return 0.0

    def _set(self, tensor: torch.Tensor, power: Power) -> None:
        if has_storage(tensor):
            if power == ZERO or self._known.of(tensor) is None:
                self._in_gradients.pop(storage_key(tensor), None)
            self._known.put(tensor, (power,))


def _digits(number: float) -> int:
    """Return how many significant decimal digits a number has, up to 12."""
    return len(f"{number:.11e}".partition("e")[0].rstrip("0").strip("-"))


def _is_epsilon(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < _EPSILON


def _times(first: Power, second: Power) -> Power:
    """Return the power of a product."""
    if ZERO in (first, second):
        return ZERO
    if first is None or second is None:
        return None
    return first + second


def _raised(power: Power, exponent: Any) -> Power:
    if power is None or power in (0.0, ZERO):
        return power
    if isinstance(exponent, (int, float)):
        return power * exponent
    return None


def _merged(*powers: Power) -> Power:
    """Return the one power of terms, apart from zeros; None if it is unknown or they differ."""
    carried = {*powers} - {ZERO}
    if len(carried) > 1:
        return None
    return next(iter(carried), ZERO)


def _is_view(func: Any) -> bool:
    """Return whether an operator returns a view of its argument, and writes nothing."""
    schema = func._schema
    return not schema.is_mutable and any(each.alias_info is not None for each in schema.returns)


def _is_of_torch(node: type[Any]) -> bool:
    """Return whether a function with a backward in Python is torch's own, such as that of checkpointing."""
    return str(getattr(node, "_forward_cls", node).__module__).partition(".")[0] == "torch"


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in tree_flatten(value)[0] if isinstance(each, torch.Tensor)]
