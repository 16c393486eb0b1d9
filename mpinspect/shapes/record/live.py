"""Record the matrix products of a running script's step, on the script's own tensors.

The recorder's dispatch mode runs below autograd and passes every operator on unchanged, so results are bit-identical. The mode
is entered and exited between steps, not around a block, so the script can enter modes of its own meanwhile.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from types import FrameType
from typing import Any

import torch

from mpinspect.reporting.words import number_of
from mpinspect.runtime import own_code
from mpinspect.runtime.dispatch import OwnMode
from mpinspect.runtime.guard import Guarded, guarded
from mpinspect.runtime.hooks import HandleList
from mpinspect.shapes.operators.gemm import dtype_name
from mpinspect.shapes.record.attribution import ModuleCalls, Parameters
from mpinspect.shapes.record.fused import observe_attention
from mpinspect.shapes.record.mode import MatmulMode
from mpinspect.shapes.record.sizes import allowed_tf32, named_sizes, tied_embeddings
from mpinspect.shapes.records import MatmulRecording

#: Modules whose stack frames lie between an operator's caller and the mode.
_ON_THE_WAY = (
    *own_code.RECORDING_PRODUCTS,
    "torch.utils._python_dispatch",
    "torch._ops",
    "torch._compile",
    "torch._dynamo",
)


class LiveMatmuls:
    """Record from ``begin`` to ``end``, on the calling thread and on autograd's threads.

    Args:
        models: the models by name; if there are several, each module's path begins with its model's name.
        unhookable: ids of the modules that get no hooks, since they are compiled.
        is_inference: whether a forward without gradients is no evaluation beside a training.
    """

    def __init__(
        self, models: Mapping[str, torch.nn.Module], unhookable: Collection[int] = (), is_inference: bool = False
    ) -> None:
        self._model = next(iter(models.values())) if len(models) == 1 else _together(models)
        #: Knows the running modules.
        notes: list[str] = []
        whole = frozenset(map(id, models.values()))
        self.calls = _LiveCalls(self._model, unhookable, is_inference, whole, notes.append)
        parameters = Parameters(self._model, {id(parameter): parameter for parameter in self._model.parameters()})
        self._mode = _LiveMode(self.calls, parameters, notes)
        self._device = _device_of(self._model)
        self._thread = threading.get_ident()

    def begin(self) -> None:
        """Enter the mode and register hooks on the modules."""
        self._thread = threading.get_ident()
        self.calls.follow()
        if self._device == "cpu":
            observe_attention(True)
        self._mode.__enter__()
        self._mode.recording = True

    def end(self, stopped: str = "") -> MatmulRecording | None:
        """Exit the mode, remove the hooks and return the recording; None if no product ran and the step was not stopped.

        Args:
            stopped: why the step did not finish; "" if it finished.
        """
        mode, model = self._mode, self._model
        self.abandon()
        matmuls = mode.matmuls()
        if not matmuls and not stopped:
            return None
        dtype = self.calls.autocast_dtype
        return MatmulRecording(
            matmuls=matmuls,
            copies=mode.copies(),
            device=self._device,
            backward=any(record.role != "forward" for record in matmuls),
            autocast_dtype=dtype_name(dtype) or None,
            tf32=allowed_tf32(),
            sizes=named_sizes(model),
            embeddings=tied_embeddings(model),
            notes=tuple(mode.sentences()),
            stopped=stopped,
        )

    def abandon(self) -> None:
        """Stop recording, and exit the mode if that is possible now."""
        self._mode.recording = False
        self.calls.unfollow()
        if self._device == "cpu" and self._thread == threading.get_ident():
            observe_attention(False)
        # Modes belong to a thread and end with the thread.
        if not self.leave() and self._thread == threading.get_ident():
            self._mode.notes.append(
                "the script entered a torch dispatch mode of its own while its step was recorded: some of it may be missing"
            )

    def leave(self) -> bool:
        """Exit the mode. Return False where that isn't possible now; it then passes everything on."""
        return self._mode.leave()


class _LiveMode(OwnMode, MatmulMode):  # type: ignore[no-untyped-call]
    """Pass every operator on; an error in the recording ends only the recording."""

    #: If False, torch refuses higher-order operators while the mode is active.
    supports_higher_order_operators = True

    def __init__(self, calls: _LiveCalls, parameters: Parameters, notes: list[str]) -> None:
        # A single call does not show the device's own autocast: 16-bit products count as cast.
        super().__init__(calls, parameters, autocast=False, lowers=lambda: True, meta=False)
        self.recording = False
        self.notes = notes
        self._live_calls = calls

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as compiled, without recording it, instead of falling back to other kernels."""
        return True

    @property
    def in_backward(self) -> bool:
        """Return whether a backward is running Python code: a forward within it is then a recomputation.

        Calls made by the autograd engine itself do not count, even with gradients enabled (create_graph).
        """
        return torch._C._current_graph_task_id() != -1 and not _called_by_the_engine()

    @in_backward.setter
    def in_backward(self, value: bool) -> None: ...

    def sentences(self) -> list[str]:
        """Return sentences on what could not be recorded, and why."""
        unreadable = [
            f"{number_of(times, 'call')} of {op} could not be recorded: its tensors have no plain shapes"
            for op, times in self.unreadable.items()
        ]
        return [*self.notes, *unreadable]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.recording or getattr(func, "_schema", None) is None:
            return func(*args, **(kwargs or {}))
        self.autocast = self._live_calls.autocast_dtype is not None
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _product(self, func: Any, args: tuple[Any, ...], result: Any, refused: str) -> None:
        self._record(super()._product, func, args, result, refused)

    def _copy(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        self._record(super()._copy, func, args, result)

    def _record(self, record: Callable[..., None], *args: Any) -> None:
        try:
            if not self._is_beside_the_step():
                record(*args)
        except Exception as error:
            self.recording = False
            self.notes.append(
                f"mpinspect failed in recording a matrix product ({error!r}): the rest of the step is missing"
            )

    def _is_beside_the_step(self) -> bool:
        """Return whether an operator is the optimizer's own arithmetic, or part of a validation."""
        if torch._C._current_autograd_node() is not None:
            return False
        return self._live_calls.evaluates or (self._live_calls.in_optimizer and not self.calls.any_running)


class _LiveCalls(Guarded, ModuleCalls):
    """Follow module calls with hooks that are not inherited by copies and pickles of the model made meanwhile."""

    def __init__(
        self,
        model: torch.nn.Module,
        unhookable: Collection[int],
        is_inference: bool,
        whole: Collection[int],
        note: Callable[[str], None],
    ) -> None:
        Guarded.__init__(self, note)
        ModuleCalls.__init__(self, model)
        self._unhookable, self._is_inference = unhookable, is_inference
        #: The ids of the models.
        self._whole = whole
        self._handles = HandleList()
        self._device = _device_of(model)
        self._dtypes: Counter[torch.dtype | None] = Counter()
        #: Depth of the module whose forward began an evaluation; 0 while no evaluation is running.
        self._evaluates_from = 0
        #: Whether an optimizer is stepping; its products outside of modules are not recorded.
        self.in_optimizer = False
        #: Called with each output of the whole model, if it is set.
        self.model_returned: Callable[[Any], None] | None = None

    def path(self) -> str:
        """Return the dotted path of the innermost module that is running; "" outside of all."""
        return self.paths[self.current]

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Return the dtype of the autocast around most module calls; None if no call ran under autocast."""
        known = {dtype: times for dtype, times in self._dtypes.items() if dtype is not None}
        return max(known, key=lambda dtype: (known[dtype], str(dtype)), default=None)

    @property
    def evaluates(self) -> bool:
        """Return whether the model runs for evaluation: in eval mode without gradients."""
        return self._evaluates_from > 0 and not self._is_inference

    def follow(self) -> None:
        """Register the hooks, around the script's own hooks."""
        for module in (each for key, each in self._modules.items() if key not in self._unhookable):
            enter, leave = (functools.partial(each, module) for each in (self._enter_live, self._leave_live))
            self._handles.add_around(module, enter, leave)

    def unfollow(self) -> None:
        """Remove the hooks."""
        self._handles.remove_all()

    def began_before(self, module: torch.nn.Module) -> None:
        """Take a module as running whose forward had begun before the hooks were registered."""
        if id(module) in self._modules and not self._running:
            self._enter_live(module, ())

    @guarded
    def _enter_live(self, module: torch.nn.Module, args: Any) -> None:
        self._enter(module, args)
        if not torch.is_grad_enabled() and not module.training and not self._evaluates_from:
            self._evaluates_from = len(self._running)
        if torch.is_grad_enabled() or self._is_inference:
            dtype = None
            if torch.is_autocast_enabled(self._device):
                dtype = torch.get_autocast_dtype(self._device)
            self._dtypes[dtype] += 1

    @guarded
    def _leave_live(self, module: torch.nn.Module, args: Any, output: Any = None) -> None:
        if self._evaluates_from == len(self._running):
            self._evaluates_from = 0
        self._leave(module, args, output)
        if self.model_returned is not None and id(module) in self._whole:
            self.model_returned(output)


def _device_of(model: torch.nn.Module) -> str:
    """Return the type of the first device on which parameters have values, "cpu" without any."""
    types = (parameter.device.type for parameter in model.parameters())
    return next((each for each in types if each != "meta"), "cpu")


def _called_by_the_engine() -> bool:
    """Return whether the autograd engine called the operator, without a Python function in between."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_ON_THE_WAY):
        frame = frame.f_back
    # On a GPU, the engine has threads of its own.
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


def _together(models: Mapping[str, torch.nn.Module]) -> torch.nn.Module:
    """Return a module, never called, that contains several models, so that module paths begin with the models' names."""
    holder = torch.nn.Module()
    holder._modules.update(models)
    return holder
