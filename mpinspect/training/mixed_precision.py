"""MixedPrecision: trains a model with its optimizer in a chosen precision."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mpinspect.reporting.words import filled, number_or_power
from mpinspect.runtime.distributed import world_size
from mpinspect.runtime.emulation import half_arithmetic
from mpinspect.runtime.user_line import warn_user
from mpinspect.training import checkpoint
from mpinspect.training.auto_scale import AutoScale
from mpinspect.training.chosen_scaler import chosen_scaler, require_real, warn_of_vanishing_eps
from mpinspect.training.closures import held_parameters
from mpinspect.training.explain import ModelExplainer
from mpinspect.training.forwards import ForwardShapes, OutsideAutocast
from mpinspect.training.loss_scaler import LossScaler, LossScaleWarning
from mpinspect.training.masters import MasterWeights
from mpinspect.training.narrow import convert_layers, layers_to_convert
from mpinspect.training.ownership import StepGuard, checked_optimizers, take_scaler
from mpinspect.training.precision import PRECISIONS, check_convertible, get_precision
from mpinspect.training.recompute import LeanCrossEntropy
from mpinspect.training.skipped_steps import FORWARD, SkippedStep
from mpinspect.training.suggestions import suggestions
from mpinspect.training.transfer import any_written_since

_log = logging.getLogger("mpinspect.training")


class MixedPrecision:
    """Trains a model in mixed precision, and reports when and why a step was skipped.

    A loop::

        precision = mpinspect.MixedPrecision(model, optimizer, precision="fp16-master")
        for x, y in data:
            precision.zero_grad()
            with precision.autocast():
                loss = loss_fn(model(x), y)
            precision.backward(loss)
            precision.step()

    The precisions:

    * "fp32": the model and its arithmetic are unchanged;
    * "fp16-amp", "bf16-amp": FP32 weights, 16-bit products (torch.autocast);
    * "fp16-master", "bf16-master": the model is converted to 16 bits *in place*, except BatchNorm, whose weights and
      statistics stay FP32; the optimizer steps FP32 master copies, which are put into its parameter groups;
    * "fp16-pure": 16-bit weights without masters, to show what accuracy is lost without them;
    * "fp8-tensorwise", "fp8-rowwise", "mxfp8": as "bf16-amp", and torchao (``pip install mpinspect[fp8]``) converts the
      ``nn.Linear`` layers *in place*, so that their three products are of FP8 operands. Leave the head out by ``keep_wide``.

    In every precision but "fp32", autocast runs softmax, exp, pow, sums, norms and losses in FP32. On a CPU 16-bit products are
    emulated as Tensor Cores compute them (``mpinspect.half_arithmetic``; ``emulated`` is then True), FP8 products also on a GPU
    that lacks them.

    Give each network of a GAN its own MixedPrecision, so that an overflow in one network leaves the other's loss scale alone.
    Gradients of micro-batches are accumulated in the gradients' own dtype: divide the loss by the number of micro-batches,
    call ``backward`` for each one and ``step`` once. If the weights are stored in 16 bits, create the MixedPrecision first
    and wrap the model in DistributedDataParallel afterwards.

    Args:
        model: an FP32 model on its device; precisions with 16-bit weights also accept a model already in 16 bits.
        optimizer: one optimizer, or several that step together; each holds parameters of the model.
        precision: one of the above.
        loss_scale: "dynamic" (from 2^16, halved at an overflow, doubled after 2000 clean steps), a preset's name ("talk":
            from 2^32, doubled after 1000), a number (static), "auto" (the first steps are inspected, then dynamic within
            the window found), "none", or a LossScaler. By default "dynamic" for the fp16 precisions, "none" for the others.
        keep_wide: paths of Linear layers, or shell patterns, that the FP8 precisions leave in BF16, such as
            ``RecipeReport.kept_wide(recipe)``.

    Raises:
        ImportError: an FP8 precision without torchao 0.18 or newer.
        TypeError: model, optimizer or loss_scale is of the wrong type.
        ValueError: an unknown precision; 16-bit parameters with an AMP precision or fp32; lazy parameters, or complex parameters
            with a loss scale; an optimizer without parameters of the model, with parameters of another optimizer, or with
            masters of another MixedPrecision; a LossScaler in use by another MixedPrecision; a scale that is not positive and
            finite; a model that torchao can't convert (``training/narrow.py``). Model and optimizers are then unchanged.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        precision: str = "fp16-master",
        loss_scale: str | float | LossScaler | None = None,
        keep_wide: Iterable[str] = (),
    ) -> None:
        self._precision = get_precision(precision)
        self.model = model
        self.optimizers = checked_optimizers(model, optimizer)
        self._core = _unwrapped(model)
        self._device = next(self._core.parameters()).device.type
        check_convertible(model, self._precision)
        narrow = layers_to_convert(self._core, self._precision, keep_wide)
        self.scaler = chosen_scaler(loss_scale, self._precision, self._device)
        if self.scaler.is_enabled():
            require_real(self._core)
        take_scaler(self, self.scaler)
        warn_of_vanishing_eps(self.optimizers, self._precision)
        # FP16 weights without masters have FP16 gradients, which are unscaled in FP16: part of the accuracy this mode loses.
        self.scaler.allow_fp16_gradients = self._precision.stored == torch.float16 and not self._precision.masters
        # In a precision without masters this object is empty and its methods have no effect.
        self._masters = MasterWeights.split(self._core, self.optimizers, self._precision)
        self._emulates_narrow = convert_layers(self._core, self._precision, narrow)
        self._explainer = ModelExplainer(self._core, _weakly(self._model_parameters))
        self.scaler.explainer = self._explainer
        self._shapes = ForwardShapes(self._core)
        stored = self._precision.stored
        self._outside = None if stored == torch.float32 else OutsideAutocast(self._core, stored, self._device)
        self._auto = AutoScale(self._core, self.optimizers, self.scaler) if loss_scale == "auto" else None
        #: Whether the optimizers' own steps are called from here.
        self.stepping = False
        if self.scaler.is_enabled() or len(self._masters):
            for one in self.optimizers:
                StepGuard.put(self, one)
        self._unscaled = False
        self._steps = 0
        self._held = self._count_held()
        self._module_named = False

    # -- the step -----------------------------------------------------------------------------------------------

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Return the context manager for the forward and the loss."""
        with ExitStack() as stack:
            stack.enter_context(self._arithmetic())
            autocast = torch.autocast(self._device, dtype=self._autocast_dtype, enabled=self._precision.autocast)
            stack.enter_context(autocast)
            if self._precision.stored != torch.float32:
                # Otherwise the FP32 log-softmax over a large vocabulary is the largest tensor saved for the backward.
                stack.enter_context(LeanCrossEntropy())
            yield

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Scale the loss and run its backward.

        Args:
            loss: 0-d, in FP32 (the gradient of an FP16 loss is the scale itself, and 2^16 is infinite there).
            options: of torch.Tensor.backward.

        Raises:
            RuntimeError: the gradients have been unscaled already; or, with masters, the last step's were never zeroed.
        """
        if self._unscaled:
            raise RuntimeError(
                "backward() after unscale_() and before step(): this gradient would be added to unscaled ones. "
                "Run every micro-batch's backward first, then unscale_(), clip, step(); to drop a batch after unscale_(), call "
                "this object's zero_grad()"
            )
        self._masters.check_zeroed()
        with self._arithmetic():
            self.scaler.scale(loss).backward(**options)

    def unscale_(self) -> None:
        """Divide the gradients by the loss scale, so that they can be read or modified before ``step``.

        With master weights, only the masters' gradients (of ``master_parameters()``) are unscaled.

        Raises:
            RuntimeError: called twice for one step, or before backward.
        """
        if self._unscaled:
            raise RuntimeError("unscale_() was called already since the last step(): gradients would be divided twice")
        self._adopt_new()
        self._require_gradients()
        self._follow_model()
        self._masters.gradients_to_masters()
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        self._unscaled = True

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the unscaled gradients to a total norm of at most ``max_norm``, and return their norm before clipping.

        If the norm is not finite, the gradients are left unchanged: ``step`` will be skipped and its cause recorded.
        """
        if not self._unscaled:
            self.unscale_()
        parameters = [parameter for parameter in self.master_parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters], norm_type)  # type: ignore[misc]
        usable = torch.where(torch.isfinite(norm), norm, torch.zeros_like(norm))
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, usable)
        return norm

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every element of the unscaled gradients to [-clip_value, clip_value].

        Infinite gradients are clamped too, but the step is still skipped because of them.
        """
        if not self._unscaled:
            self.unscale_()
        torch.nn.utils.clip_grad_value_(self.master_parameters(), clip_value)

    def step(self, closure: Callable[[], Any] | None = None) -> bool:
        """Step the optimizers unless a gradient is non-finite, and update the loss scale either way. Waits for the GPU once.

        Args:
            closure: a function for optimizers that evaluate the loss themselves (LBFGS): it zeroes the gradients, runs the
                forward and ``self.backward(loss)``, and returns the unscaled loss.

        Returns:
            Whether every optimizer stepped.

        Raises:
            RuntimeError: no backward has run, so there are no gradients. With masters: the model's gradients were changed after
                unscale_() had copied them to the masters.
            LossScaleCollapsedError: gradients overflow although the scale is at its floor.
        """
        self._adopt_new()
        self._follow_model()
        if closure is None:
            self._require_gradients()
            if self._unscaled:
                self._require_unchanged()
            else:
                self._masters.gradients_to_masters()
        stepped = self._step_all(closure)
        self._masters.masters_to_model()
        self._unscaled = False
        self._steps += 1
        try:
            self.scaler.update()
        finally:
            self._step_ended(stepped)
        return stepped

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model and the masters; this drops a batch whose ``step`` has not run."""
        self.model.zero_grad(set_to_none)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)
        if not self.stepping:
            self._abandon()

    # -- state --------------------------------------------------------------------------------------------------

    @property
    def precision(self) -> str:
        """The precision's name."""
        return self._precision.name

    @property
    def emulated(self) -> bool:
        """Whether 16-bit products are emulated, as on every CPU, or FP8 products, as on GPUs without them."""
        return self._emulates_half or self._emulates_narrow

    @property
    def loss_scale(self) -> float:
        """The current loss scale; 1.0 without one. Waits for the GPU."""
        return self.scaler.get_scale()

    @property
    def steps(self) -> int:
        """The number of ``step`` calls so far, including skipped steps."""
        return self._steps

    @property
    def skipped_steps(self) -> int:
        """The number of skipped steps. Waits for the GPU only with fused optimizers."""
        return self.scaler.skipped_steps

    @property
    def skips(self) -> list[SkippedStep]:
        """The most recent skipped steps, each with its cause."""
        return list(self.scaler.skips)

    def master_parameters(self) -> list[torch.Tensor]:
        """Return the parameters that the optimizers update: FP32 masters where they exist, otherwise the model's own."""
        return [parameter for optimizer in self.optimizers for parameter in held_parameters(optimizer)]

    def suggestions(self) -> list[str]:
        """Return sentences naming torch settings that would make this training faster on its GPU."""
        return suggestions(self._shapes.seen(self._device, self._float32_fraction()))

    def __repr__(self) -> str:
        """Return a one-line summary without waiting for the GPU; ``str()`` gives more detail but waits."""
        return f"<MixedPrecision of {type(self._core).__name__}: {self.precision}, {self._steps} steps>"

    def __str__(self) -> str:
        lines = [f"{self.precision}: {self._steps} steps, {self.skipped_steps} skipped"]
        if self.scaler.is_enabled():
            kind = "static" if self.scaler.is_static else "dynamic"
            lines.append(f"loss scale {number_or_power(self.loss_scale)}, {kind}{filled('; {}', self._auto)}")
        if self._emulates_half:
            lines.append("16-bit arithmetic is emulated on this CPU: Tensor Cores' numbers, not their speed")
        elif self._emulates_narrow:
            lines.append("FP8 products are emulated on this device: Tensor Cores' numbers, not their speed")
        lines += [str(skip) for skip in self.skips[-3:]]
        return "\n".join(lines + self.suggestions())

    # -- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume: weights (FP32 masters where they exist), optimizers, loss scale and counters.

        Resuming is bit-identical to uninterrupted training, except that a block of steps being inspected by
        loss_scale="auto" starts over. The script itself must save torch's random state and the position in the data.
        """
        return {
            "kind": checkpoint.KIND,
            "version": checkpoint.VERSION,
            "precision": self.precision,
            "weights": self.weights(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "others": {name: tensor.detach().clone() for name, tensor in self._others().items()},
            "scaler": self.scaler.state_dict(),
            "counters": {"steps": self._steps} | ({} if self._auto is None else {"auto": self._auto.steps_to_wait}),
        }

    def weights(self) -> dict[str, Any]:
        """Return the model's state dict with FP32 masters in place of 16-bit weights, so that an FP32 model can load it."""
        return checkpoint.weights(self._core, self._masters)

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """Load a checkpoint of this or another precision, and return a sentence on what was loaded and converted.

        Raises:
            CheckpointError: the state is empty, of another kind or of another model. This object is then unchanged.
        """
        state = checkpoint.require(state)
        checkpoint.require_fitting(state, self._core, self.optimizers, self._others())
        # The scaler loads first and validates its own state, so an invalid state leaves everything unchanged.
        scale = self._load_scale(state["scaler"])
        self._core.load_state_dict(state["weights"])
        self._masters.load_state_dict({name: state["weights"][name] for name in self._masters.state_dict()})
        for name, tensor in self._others().items():
            tensor.detach().copy_(state["others"][name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._steps = int(state["counters"]["steps"])
        if self._auto is not None and "auto" in state["counters"]:
            self._auto.resume(int(state["counters"]["auto"]))
        self._abandon()
        statement = checkpoint.statement(PRECISIONS[state["precision"]], self._precision, scale)
        _log.info(statement)
        return statement

    def save(self, path: str | Path) -> None:
        """Write ``state_dict()`` to a file atomically. Raises OSError if the file can't be written."""
        checkpoint.save(self.state_dict(), path)

    def load(self, path: str | Path) -> str:
        """Load a file written by ``save`` with ``load_state_dict``; runs no code from the file.

        Raises:
            FileNotFoundError: the file does not exist.
            CheckpointError: the file is truncated, or belongs to another program or model. This object is then unchanged.
        """
        return self.load_state_dict(checkpoint.load(path))

    def detach(self) -> None:
        """Remove every hook from the model and the optimizers. Converted parameters and buffers stay converted."""
        self._explainer.detach()
        self._shapes.detach()
        if self._outside is not None:
            self._outside.detach()
        if self._auto is not None:
            self._auto.detach()
        for optimizer in self.optimizers:
            StepGuard.remove(optimizer)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a MixedPrecision can't be pickled or copied: it has hooks on its model. Save state_dict(), or use save(), and make "
            "a new one from a model and an optimizer"
        )

    # -- inside -------------------------------------------------------------------------------------------------

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._emulates_half:
                stack.enter_context(half_arithmetic())
            yield

    @property
    def _emulates_half(self) -> bool:
        return self._precision.autocast and self._device == "cpu"

    @property
    def _autocast_dtype(self) -> torch.dtype | None:
        return self._precision.compute if self._precision.autocast else None

    def _step_all(self, closure: Callable[[], Any] | None) -> bool:
        evaluate = (self._replayed(closure),) if closure is not None else ()
        stepped = True
        self.stepping = True
        try:
            for optimizer in self.optimizers:
                self.scaler.step(optimizer, *evaluate)
                stepped = stepped and not (self.scaler.is_enabled() and self.scaler.last_step_skipped)
        except BaseException:
            self._abandon()
            raise
        finally:
            self.stepping = False
        return stepped

    def _abandon(self) -> None:
        """Discard the current step; the next backward starts a new one."""
        self.scaler.abandon()
        self._unscaled = False

    def _require_unchanged(self) -> None:
        if any_written_since(parameter for parameter, _ in self._masters.pairs()):
            raise RuntimeError(
                "the model's gradients were changed after unscale_(), which had copied them to the FP32 masters: the change "
                "would be lost. Use this object's clip_grad_norm_() or clip_grad_value_(), or change the gradients of "
                "master_parameters()"
            )

    def _follow_model(self) -> None:
        """Update the masters after in-place writes to the model's 16-bit weights, such as weight clipping or a broadcast.

        Compares version counters only; waits for the GPU only after such a write. DistributedDataParallel broadcasts
        rank 0's 16-bit weights on construction: if any rank's differ from its masters, all ranks reset their masters to them.
        """
        if not self._masters.changed_in_model():
            return
        differs = self._masters.differs_from_model()
        several = world_size() > 1
        if several:
            flag = torch.tensor(float(differs), dtype=torch.float32, device=next(self._core.parameters()).device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            differs = bool(flag)
        if not differs:
            self._masters.note_agreement()
        elif several:
            self._masters.model_to_masters()
        else:
            self._masters.take_changes()

    def _adopt_new(self) -> None:
        """Create masters for parameters added to an optimizer since the last check (``add_param_group``)."""
        if self._precision.masters and self._count_held() != self._held:
            for optimizer in self.optimizers:
                self._masters.adopt(optimizer)
            self._held = self._count_held()

    def _count_held(self) -> int:
        return len(self.master_parameters())

    def _replayed(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure wrapped to copy the masters to the model before, and the gradients to the masters after."""

        def evaluate() -> Any:
            self._masters.masters_to_model()
            loss = closure()
            self._masters.gradients_to_masters()
            return loss

        return evaluate

    def _model_parameters(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        return [self._masters.parameter_of(held) for held in held_parameters(optimizer)]

    def _require_gradients(self) -> None:
        if self.scaler.is_enabled() and not self.scaler.has_scaled:
            raise RuntimeError(
                "this object's backward(loss) has not run since its last step: gradients of a plain loss.backward() are not "
                "scaled, and the last step's gradients were used already. Call backward(loss), then step(), once each"
            )
        for optimizer in self.optimizers:
            parameters = self._model_parameters(optimizer)
            if all(parameter.grad is None for parameter in parameters):
                if not {*parameters} & {*self._core.parameters()}:
                    raise RuntimeError(
                        f"the parameters of the {type(optimizer).__name__} are no longer the model's: first call fully_shard, "
                        "or whatever replaced them, then make the optimizer, then MixedPrecision"
                    )
                raise RuntimeError(
                    f"no parameter of the {type(optimizer).__name__} has a gradient: call zero_grad(), then backward(loss) "
                    "with a loss that this model computed, then step()"
                )

    def _step_ended(self, stepped: bool) -> None:
        last = self.scaler.skips[-1] if not stepped and self.scaler.skips else None
        broken_forward = last is not None and last.phase == FORWARD
        if last is not None and broken_forward and last.culprit is not None and last.culprit.name != "loss":
            # The scaler itself has already warned about the first failed forward.
            if not self._module_named and sum(skip.phase == FORWARD for skip in self.scaler.skips) > 1:
                warn_user(str(last), LossScaleWarning)
            self._module_named = True
        elif not broken_forward:
            self._module_named = False
        if self._auto is not None and self.scaler.is_enabled():
            self._auto.step_ended(skipped=not stepped)

    def _load_scale(self, saved: dict[str, Any]) -> str:
        """Load the scaler's state if both sides use a scale, and return a clause on the loss scale."""
        if not saved and not self.scaler.is_enabled():
            return "no loss scale is used"
        if not self.scaler.is_enabled():
            return "the loss scale was left out: this precision uses none"
        if not saved:
            return f"the loss scale starts again at {number_or_power(self.loss_scale)}: the checkpoint holds none"
        try:
            self.scaler.load_state_dict(saved)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise checkpoint.CheckpointError(f"the checkpoint's loss scale can't be read: {error}") from error
        return f"the loss scale continues at {number_or_power(self.loss_scale)}"

    def _others(self) -> dict[str, torch.Tensor]:
        return checkpoint.others(self._core, self._masters, self.optimizers)

    def _float32_fraction(self) -> float:
        if self._precision.autocast:
            return 0.0
        sizes = [(parameter.numel(), parameter.dtype) for parameter in self._core.parameters()]
        return sum(size for size, dtype in sizes if dtype == torch.float32) / max(1, sum(size for size, _ in sizes))


def _weakly(method: Callable[[torch.optim.Optimizer], list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    """Return a callable for a bound method that holds the method's object weakly."""
    alive = weakref.WeakMethod(method)

    def call(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        found = alive()
        return found(optimizer) if found is not None else []

    return call


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside DistributedDataParallel and torch.compile wrappers, so that its names do not depend on them."""
    while True:
        if isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            inside: object = model.module
        else:
            inside = vars(model).get("_modules", {}).get("_orig_mod")  # torch.compile's wrapper
        if not isinstance(inside, torch.nn.Module):
            return model
        model = inside
