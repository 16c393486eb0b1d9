"""``record_matmuls``: run a model once and record every matrix product of its forward and backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from mpinspect.numeric.formats import BFLOAT16, FLOAT16, FLOAT32, as_format
from mpinspect.reporting.words import number_of
from mpinspect.runtime.distributed import is_distributed
from mpinspect.runtime.emulation import half_arithmetic
from mpinspect.runtime.wrappers import compiled_modules_eager
from mpinspect.shapes.operators.gemm import dtype_name
from mpinspect.shapes.record.attribution import ModuleCalls, Parameters
from mpinspect.shapes.record.autocast import as_on_cuda, autocast_around, lowering
from mpinspect.shapes.record.failures import RecordingError, first_line, meta_cause, reason
from mpinspect.shapes.record.mode import MatmulMode
from mpinspect.shapes.record.sizes import allowed_tf32, named_sizes, tied_embeddings
from mpinspect.shapes.record.stand_ins import LazyModelError, losses, on_meta, own_copy, replaced, standing_in
from mpinspect.shapes.record.values import (
    COMPUTED,
    FunctionValues,
    Lack,
    Values,
    argument_without_values,
    buffer_without_values,
    forget,
    stand_in,
    values_of,
)
from mpinspect.shapes.records import Matmul, MatmulRecording

DEVICES = ("meta", "real")
#: The formats that ``dtype`` may name; float32 means no autocast.
_AUTOCAST = {FLOAT16: torch.float16, BFLOAT16: torch.bfloat16, FLOAT32: None}


def record_matmuls(
    model: torch.nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    backward: bool = True,
    device: str = "meta",
) -> MatmulRecording:
    """Run a model once and record its matrix products; restore the model, its gradients and the random states.

    Args:
        model: any module, in the train or eval mode to be judged. Compiled modules run eagerly; for a DataParallel or
            DistributedDataParallel wrapper, the module inside runs.
        args: positional arguments of the model's forward, or its only argument; tensors may be nested in tuples, lists,
            mappings and dataclasses.
        kwargs: keyword arguments of the model's forward, nested in the same way.
        dtype: the dtype of a ``torch.autocast("cuda", dtype)`` around the forward: float16 or bfloat16. With None or float32
            there is no autocast, and products have the dtypes of the model's tensors.
        backward: also run the backward, from the output's ``loss`` or else from all its tensors that require a gradient.
        device: "meta": on meta tensors, which need neither memory nor a GPU, with attached values if the model reads any;
            "real": on the tensors and devices as they are, for models whose shapes depend on computed values.

    Returns:
        The recording. If the model stopped before its end, ``stopped`` gives place and reason, and the recording has the
        products that ran before.

    Raises:
        RecordingError: (a ValueError) the recording is empty, because the arguments do not fit the model, an option is
            unknown or the model is lazy and has no shapes yet.
    """
    lower = _autocast_dtype(dtype)
    if device not in DEVICES:
        raise RecordingError(f"device is {device!r}: give 'meta' (shapes only) or 'real' (the tensors as they are)")
    if not isinstance(model, torch.nn.Module):
        raise RecordingError(
            f"model is of type {type(model).__name__}, not a torch.nn.Module: wrap a function in a module"
        )
    inner, notes = _unwrapped(model)
    run = _Run(inner, *_arguments(args, kwargs), lower, backward, _kind_of_device(inner, device))
    attempt = _attempted(run)
    if attempt.error is not None and not attempt.mode.matmuls() and not attempt.lacks_values:
        raise RecordingError(
            f"the model's forward raised {first_line(attempt.error)}. Nothing was recorded: check args and kwargs, they are "
            "passed to the model as model(*args, **kwargs)"
        ) from attempt.error
    matmuls = attempt.mode.matmuls()
    return MatmulRecording(
        matmuls=matmuls,
        copies=attempt.mode.copies(),
        device=run.device,
        backward=attempt.backward,
        autocast_dtype=dtype_name(lower) or None,
        tf32=allowed_tf32(),
        sizes=named_sizes(inner, _odd(matmuls)),
        embeddings=tied_embeddings(inner),
        compiled=_is_compiled(model),
        notes=(*notes, *attempt.notes, *_unreadable(attempt.mode)),
        stopped=attempt.stopped,
    )


def _attempted(run: _Run) -> _Attempt:
    """Return the run's attempt; of two, the one with more products.

    Attaching values takes time, and few models read any: values are attached only if the first attempt lacked one.
    """
    try:
        attempt = run.attempt()
        if not attempt.lacks_values or run.device != "meta":
            return attempt
        return max(run.attempt(Values()), attempt, key=lambda one: len(one.mode.matmuls()))
    except LazyModelError as error:
        raise RecordingError(str(error)) from None


@dataclass
class _Attempt:
    """The outcome of one run.

    Args:
        mode: the mode with the run's recording.
        notes: sentences on what could not be recorded.
        error: the exception that stopped the run; None if the run finished.
        lacks_values: whether the run stopped because it needed a value of a meta tensor.
        backward: whether a backward was started.
        stopped: where and why the run stopped; "" if it finished.
    """

    mode: MatmulMode
    notes: list[str]
    error: BaseException | None = None
    lacks_values: bool = False
    backward: bool = False
    stopped: str = ""


@dataclass(frozen=True)
class _Run:
    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype | None
    wants_backward: bool
    device: str

    def attempt(self, values: Values | None = None) -> _Attempt:
        """Run the model on stand-ins for its parameters, buffers and arguments.

        Args:
            values: attaches values to meta tensors; None for a run without values.
        """
        calls = ModuleCalls(self.model)

        def change(tensor: torch.Tensor, lack: Lack = COMPUTED) -> torch.Tensor:
            if self.device != "meta":
                return own_copy(tensor)
            if values is None:
                return on_meta(tensor)
            return stand_in(tensor, lack)

        def parameter(tensor: torch.Tensor) -> torch.Tensor:
            if self.device != "meta":
                return tensor
            if values and tensor.numel() == 1:
                return stand_in(tensor, COMPUTED)
            return _parameter_on_meta(tensor)

        with (
            compiled_modules_eager(),
            _grad_mode(self.wants_backward),
            standing_in(self.model, parameter, change) as stand_ins,
        ):
            parameters = Parameters(self.model, stand_ins)
            if values is not None:
                _mark_buffers_without_values(self.model)
            mode = MatmulMode(
                calls,
                parameters,
                autocast=self.dtype is not None,
                # A single call does not show the GPU's own autocast: 16-bit products count as cast.
                lowers=(lambda: True) if self.device == "cuda" else lowering,
                meta=self.device == "meta",
                values=values,
            )
            attempt = _Attempt(mode, [])
            args, kwargs = self._given(change)
            with self._surroundings(calls, mode):
                output = self._forward(attempt, args, kwargs)
                if attempt.error is None and self.wants_backward:
                    self._backward(attempt, output)
        return attempt

    def _given(self, change: Callable[[torch.Tensor, Lack], torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Return the forward's arguments with ``change`` applied to their tensors."""
        names = _names(self.model, len(self.args))

        def changed(name: str, value: Any) -> Any:
            return replaced(value, lambda tensor: change(tensor, argument_without_values(name)))

        args = [changed(name, value) for name, value in zip(names, self.args, strict=True)]
        return args, {name: changed(name, value) for name, value in self.kwargs.items()}

    @contextmanager
    def _surroundings(self, calls: ModuleCalls, mode: MatmulMode) -> Iterator[None]:
        with ExitStack() as stack:
            # The backward must stay on this thread, where modules and calls are followed.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(calls.followed())
            if self.device != "cuda":
                stack.enter_context(as_on_cuda(also=self.device))
            if self.device == "cpu" and self.dtype is not None:
                stack.enter_context(half_arithmetic())
            stack.enter_context(mode)
            if mode.values is not None:
                stack.enter_context(FunctionValues())
            yield

    def _forward(self, attempt: _Attempt, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        try:
            with autocast_around(self.dtype, "cpu"):
                return self.model(*args, **kwargs)
        except Exception as error:
            self._stopped(attempt, error, "forward")
        return None

    def _backward(self, attempt: _Attempt, output: Any) -> None:
        starts = losses(output)
        if not starts:
            attempt.notes.append(
                "no backward was recorded: the output has no tensor that requires a gradient (frozen parameters, no_grad() or "
                "detach() in the forward, or an output of no known kind)"
            )
            return
        attempt.mode.in_backward = attempt.backward = True
        try:
            with autocast_around(None, "cpu"):
                torch.autograd.backward(starts, [torch.ones_like(start) for start in starts])
        except Exception as error:
            self._stopped(attempt, error, "backward")

    def _stopped(self, attempt: _Attempt, error: Exception, phase: str) -> None:
        mode, operator, lack = attempt.mode, "", None
        if mode.failed is not None and mode.failed[0] is error:
            operator = mode.failed[1]
        if mode.values and mode.values.lacked and mode.values.lacked[0] is error:
            lack = mode.values.lacked[1]
        attempt.error = error
        attempt.lacks_values = self.device == "meta" and bool(meta_cause(error, operator))
        attempt.stopped = reason(error, phase, mode.calls.where_failed(error), operator, self.device, lack)


def _mark_buffers_without_values(model: torch.nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if values_of(buffer) is None:
            forget(buffer, buffer_without_values(name))


def _odd(matmuls: Sequence[Matmul]) -> set[int]:
    """Return the sizes of products that can misalign a row in any dtype: those that are not a multiple of 16."""
    found: set[int] = set()
    for matmul in matmuls:
        found |= {matmul.m, matmul.n, matmul.k}
        if matmul.convolution is not None:
            found |= {matmul.convolution.in_channels, matmul.convolution.out_channels}
        if matmul.attention is not None:
            found |= {matmul.attention.head_dim, matmul.attention.value_dim}
    return {size for size in found if size % 16}


# -- the arguments ---------------------------------------------------------------------------------------------------------


def _autocast_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None:
        return None
    with suppress(ValueError):
        format = as_format(dtype)
        if format in _AUTOCAST:
            return _AUTOCAST[format]
    raise RecordingError(f"dtype is {dtype}: autocast takes float16 or bfloat16; None or float32 switches autocast off")


def _arguments(args: Any, kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(args, Mapping) and not kwargs:  # a tokenizer's output
        return (), {str(name): value for name, value in args.items()}
    if not isinstance(args, (tuple, list)) or hasattr(args, "_fields"):  # a packed sequence is one argument
        args = (args,)
    return tuple(args), dict(kwargs or {})


def _names(model: torch.nn.Module, count: int) -> list[str]:
    """Return the names of a forward's first positional arguments; an argument without a name gets its position, from 1."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    named = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return named[:count] + [f"argument {place + 1}" for place in range(len(named), count)]


def _unwrapped(model: torch.nn.Module) -> tuple[torch.nn.Module, list[str]]:
    notes: list[str] = []
    parallel = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    while True:
        if isinstance(model, parallel):
            notes.append(
                f"{type(model).__name__} is ignored: the products are one replica's, for the whole given batch"
            )
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), torch.nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            break
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        notes.append(
            "TorchScript modules accept no hooks: their products are attributed to their caller, and the backward may be "
            "missing. Record the model before it is scripted"
        )
    if any(is_distributed(parameter) for parameter in model.parameters()):
        notes.append(
            "the parameters are sharded (DTensor): recorded as one GPU would compute them, with their global shapes"
        )
    return model, notes


def _is_compiled(model: torch.nn.Module) -> bool:
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def _kind_of_device(model: torch.nn.Module, device: str) -> str:
    if device == "meta":
        return "meta"
    return next((tensor.device.type for tensor in chain(model.parameters(), model.buffers())), "cpu")


def _parameter_on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")


@contextmanager
def _grad_mode(wanted: bool) -> Iterator[None]:
    """Switch gradients on or off within the block, regardless of the caller's mode."""
    with torch.inference_mode(False), torch.set_grad_enabled(wanted):
        yield


def _unreadable(mode: MatmulMode) -> Sequence[str]:
    return [
        f"{number_of(times, 'call')} of {op} could not be recorded: its tensors have no plain shapes (nested, "
        "sparse) or its arguments do not determine the sizes"
        for op, times in mode.unreadable.items()
    ]
