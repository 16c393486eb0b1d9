"""MixedPrecision: a model and its optimizer, trained in a precision of one's choice."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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
from mpinspect.training.ownership import StepGuard, checked_optimizers, take_scaler
from mpinspect.training.precision import PRECISIONS, check_convertible, get_precision
from mpinspect.training.recompute import LeanCrossEntropy
from mpinspect.training.skipped_steps import FORWARD, SkippedStep, power
from mpinspect.training.suggestions import suggestions
from mpinspect.training.transfer import any_written_since

_log = logging.getLogger("mpinspect.training")


class MixedPrecision:
    """Trains a model in mixed precision, and says when and why a step was skipped.

        precision = mpinspect.MixedPrecision(model, optimizer, precision="fp16-master")
        for x, y in data:
            precision.zero_grad()
            with precision.autocast():
                loss = loss_fn(model(x), y)
            precision.backward(loss)
            precision.step()

    The precisions:

    * "fp32": nothing is changed;
    * "fp16-amp", "bf16-amp": FP32 weights, 16-bit products (torch.autocast);
    * "fp16-master", "bf16-master": the model is converted to 16 bits *in place*, but for BatchNorm, whose weights and
      statistics stay FP32; the optimizer steps FP32 master copies, which are put into its parameter groups;
    * "fp16-pure": 16-bit weights without masters, to show what is lost.

    In all but the first, autocast keeps softmax, exp, pow, sums, norms and losses in FP32. On a CPU 16-bit products are
    emulated as Tensor Cores compute them (``mpinspect.half_arithmetic``; ``emulated`` says so).

    Give each network of a GAN a MixedPrecision of its own: then one's overflow leaves the other's scale alone. Micro-batches
    add up in the gradients' own dtype: call ``backward`` for each and ``step`` once, and divide the loss by their number.
    Wrap the model in DistributedDataParallel *after* this where the weights are stored in 16 bits.

    Args:
        model: in FP32 (for the stored 16-bit precisions also in 16 bits already), on its device.
        optimizer: one, or several that step together; holds parameters of the model.
        precision: one of the above.
        loss_scale: "dynamic" (from 2^16, halved at an overflow, doubled after 2000 clean steps), a preset's name ("talk":
            from 2^32, doubled after 1000), a number (static), "auto" (the first steps are inspected, then dynamic within
            the window found), "none", or a LossScaler. By default "dynamic" for the fp16 precisions, none for the others.

    Raises:
        TypeError: model, optimizer or loss_scale is of the wrong type.
        ValueError: an unknown precision; 16-bit parameters given to an AMP mode or fp32; lazy parameters, or complex ones with a
            loss scale; an optimizer that holds none of the model's parameters, those of another optimizer, or another
            MixedPrecision's masters; a LossScaler that another one has; a scale that is not positive and finite. Nothing
            has been changed then.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        precision: str = "fp16-master",
        loss_scale: str | float | LossScaler | None = None,
    ) -> None:
        self._precision = get_precision(precision)
        self.model = model
        self.optimizers = checked_optimizers(model, optimizer)
        self._core = _unwrapped(model)
        self._device = next(self._core.parameters()).device.type
        check_convertible(model, self._precision)
        self.scaler = chosen_scaler(loss_scale, self._precision, self._device)
        if self.scaler.is_enabled():
            require_real(self._core)
        take_scaler(self, self.scaler)
        warn_of_vanishing_eps(self.optimizers, self._precision)
        # FP16 weights without masters have FP16 gradients: that they are unscaled in FP16 is part of what is lost.
        self.scaler.allow_fp16_gradients = self._precision.stored == torch.float16 and not self._precision.masters
        # Without masters to keep it holds none, and passes everything on.
        self._masters = MasterWeights.split(self._core, self.optimizers, self._precision)
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
        """The context for the forward and the loss."""
        with ExitStack() as stack:
            stack.enter_context(self._arithmetic())
            autocast = torch.autocast(self._device, dtype=self._autocast_dtype, enabled=self._precision.autocast)
            stack.enter_context(autocast)
            if self._precision.stored != torch.float32:
                # Else the FP32 log-softmax over a large vocabulary is the largest tensor that is kept.
                stack.enter_context(LeanCrossEntropy())
            yield

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Scale the loss and run its backward.

        Args:
            loss: 0-d, in FP32 (the gradient of an FP16 loss is the scale itself, and 2^16 is infinite there).
            options: of torch.Tensor.backward.

        Raises:
            RuntimeError: the gradients have been unscaled already; or, with masters, those of the last step were never zeroed.
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
        """Divide the gradients by the loss scale, to look at them or change them before ``step``.

        With master weights the unscaled ones are the masters' (``master_parameters()``).

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
        """Scale the unscaled gradients down so that their common norm is at most ``max_norm``. Returns the norm before.

        Gradients that are not finite are left as they are: the step will be skipped, and told about, for them.
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

        Infinities are clamped too, but the step is skipped for them all the same.
        """
        if not self._unscaled:
            self.unscale_()
        torch.nn.utils.clip_grad_value_(self.master_parameters(), clip_value)

    def step(self, closure: Callable[[], Any] | None = None) -> bool:
        """Step the optimizers, unless a gradient is not finite; then move the loss scale. Waits for the GPU once.

        Args:
            closure: for optimizers that evaluate the loss themselves (LBFGS): zeroes the gradients, runs forward and
                ``self.backward(loss)``, and returns the loss, unscaled.

        Returns:
            Whether every optimizer stepped.

        Raises:
            RuntimeError: no backward has run; its gradients would be missing. With masters: the model's gradients were changed
                after unscale_() had copied them to the masters.
            LossScaleCollapsedError: the scale stands at its floor and gradients still overflow.
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
        """Clear the gradients of the model, and of the masters. A batch that has not been stepped on is dropped by it."""
        self.model.zero_grad(set_to_none)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)
        if not self.stepping:
            self._abandon()

    # -- what it knows ------------------------------------------------------------------------------------------

    @property
    def precision(self) -> str:
        """The precision's name."""
        return self._precision.name

    @property
    def emulated(self) -> bool:
        """Whether 16-bit products are emulated, as on every CPU."""
        return self._precision.autocast and self._device == "cpu"

    @property
    def loss_scale(self) -> float:
        """The scale now; 1.0 where none is used. Waits for the GPU."""
        return self.scaler.get_scale()

    @property
    def steps(self) -> int:
        """Calls of ``step``, skipped ones included."""
        return self._steps

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped. Waits for the GPU with fused optimizers only."""
        return self.scaler.skipped_steps if self.scaler.is_enabled() else 0

    @property
    def skips(self) -> list[SkippedStep]:
        """The last steps that were skipped, and why."""
        return list(self.scaler.skips) if self.scaler.is_enabled() else []

    def master_parameters(self) -> list[torch.Tensor]:
        """Return what the optimizers step: the FP32 masters where there are any, else the model's parameters."""
        return [parameter for optimizer in self.optimizers for parameter in held_parameters(optimizer)]

    def suggestions(self) -> list[str]:
        """Switches of torch that would make this training faster on its GPU, in sentences."""
        return suggestions(self._shapes.seen(self._device, self._float32_fraction()))

    def __repr__(self) -> str:
        """Return one line, without a wait; ``str()`` says more and waits for the GPU."""
        return f"<MixedPrecision of {type(self._core).__name__}: {self.precision}, {self._steps} steps>"

    def __str__(self) -> str:
        lines = [f"{self.precision}: {self._steps} steps, {self.skipped_steps} skipped"]
        if self.scaler.is_enabled():
            kind = "static" if self.scaler.is_static else "dynamic"
            auto = f"; {self._auto}" if self._auto is not None else ""
            lines.append(f"loss scale {power(self.loss_scale)}, {kind}{auto}")
        if self.emulated:
            lines.append("16-bit arithmetic is emulated on this CPU: numbers as on Tensor Cores, no speed")
        lines += [str(skip) for skip in self.skips[-3:]]
        return "\n".join(lines + self.suggestions())

    # -- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that resuming needs: weights (the masters where there are any), optimizers, scale, counters.

        Resuming from it is bit-identical to not having stopped (within a block that loss_scale="auto" inspects, that block
        begins again). torch's random state and the data's position are the script's own.
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
        """Return the model's state dict with the FP32 masters in place of their 16-bit copies: loads into an FP32 model."""
        return checkpoint.weights(self._core, self._masters)

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """Take over a checkpoint's state, from this precision or another. Returns what was loaded and converted, in words.

        Raises:
            CheckpointError: it is empty, of another kind or of another model. Nothing has been changed then.
        """
        state = checkpoint.require(state)
        checkpoint.require_fitting(state, self._core, self.optimizers, self._others())
        # First, since it looks at its part itself and changes nothing where that is wrong.
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
        """Write ``state_dict()`` to a file, which is there in full or not at all. Raises OSError if it can't be written."""
        checkpoint.save(self.state_dict(), path)

    def load(self, path: str | Path) -> str:
        """``load_state_dict`` from a file that ``save`` wrote; runs no code from it.

        Raises:
            FileNotFoundError: there is none.
            CheckpointError: it is cut off, another program's, or of another model. Nothing has been changed then.
        """
        return self.load_state_dict(checkpoint.load(path))

    def detach(self) -> None:
        """Take every hook off the model and the optimizers. What was converted stays converted."""
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
            if self.emulated:
                stack.enter_context(half_arithmetic())
            yield

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
        """Forget the step that is under way: the next backward begins another."""
        self.scaler.abandon()
        self._unscaled = False

    def _require_unchanged(self) -> None:
        if any_written_since(parameter for parameter, _ in self._masters.pairs()):
            raise RuntimeError(
                "the model's gradients were changed after unscale_(), which had copied them to the FP32 masters: the change "
                "would be lost. Use this object's clip_grad_norm_() or clip_grad_value_(), or change those of master_parameters()"
            )

    def _follow_model(self) -> None:
        """Take over into the masters what was written to the model's 16-bit weights: clipping them, say, or a broadcast.

        Costs a look at version counters; waits for the GPU only after such a write. DistributedDataParallel broadcasts
        rank 0's 16-bit weights when it is made: where they differ, every rank's masters start from these.
        """
        if not self._masters.changed_in_model():
            return
        differs = self._masters.differs_from_model()
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if several:
            flag = torch.tensor(float(differs), device=next(self._core.parameters()).device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            differs = bool(flag)
        if not differs:
            self._masters.note_agreement()
        elif several:
            self._masters.model_to_masters()
        else:
            self._masters.take_changes()

    def _adopt_new(self) -> None:
        """Give masters to parameters that were added to an optimizer since (``add_param_group``)."""
        if self._precision.masters and self._count_held() != self._held:
            for optimizer in self.optimizers:
                self._masters.adopt(optimizer)
            self._held = self._count_held()

    def _count_held(self) -> int:
        return len(self.master_parameters())

    def _replayed(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure as master weights need it: the model follows the masters before, the gradients after."""

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
                "no backward(loss) of this object since its last step: gradients of a plain loss.backward() are not scaled, "
                "and those of the last step were used already. Call backward(loss), then step(), once each"
            )
        for optimizer in self.optimizers:
            if all(self._masters.parameter_of(held).grad is None for held in held_parameters(optimizer)):
                raise RuntimeError(
                    f"no parameter of the {type(optimizer).__name__} has a gradient: call backward(loss) before, with a loss "
                    "that comes from this model, and zero_grad() before that, not after"
                )

    def _step_ended(self, stepped: bool) -> None:
        last = self.scaler.skips[-1] if not stepped and self.scaler.skips else None
        broken_forward = last is not None and last.phase == FORWARD
        if last is not None and broken_forward and last.culprit is not None and last.culprit.name != "loss":
            # Of the first one the scaler has warned itself.
            if not self._module_named and sum(skip.phase == FORWARD for skip in self.scaler.skips) > 1:
                warn_user(str(last), LossScaleWarning)
            self._module_named = True
        elif not broken_forward:
            self._module_named = False
        if self._auto is not None and self.scaler.is_enabled():
            self._auto.step_ended(skipped=not stepped)

    def _load_scale(self, saved: dict[str, Any]) -> str:
        """Load the scaler's state where there is one on both sides. Returns what became of it: a clause."""
        if not self.scaler.is_enabled():
            return "no loss scale is used" if not saved else "the loss scale was left out: this precision uses none"
        if not saved:
            return f"the loss scale starts anew, at {power(self.loss_scale)}: the checkpoint holds none"
        try:
            self.scaler.load_state_dict(saved)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise checkpoint.CheckpointError(f"the checkpoint's loss scale can't be read: {error}") from error
        return f"the loss scale goes on at {power(self.loss_scale)}"

    def _others(self) -> dict[str, torch.Tensor]:
        return checkpoint.others(self._core, self._masters, self.optimizers)

    def _float32_fraction(self) -> float:
        if self._precision.autocast:
            return 0.0
        sizes = [(parameter.numel(), parameter.dtype) for parameter in self._core.parameters()]
        return sum(size for size, dtype in sizes if dtype == torch.float32) / max(1, sum(size for size, _ in sizes))


def _weakly(method: Callable[[torch.optim.Optimizer], list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    """Return the method of an object that it does not keep alive."""
    alive = weakref.WeakMethod(method)

    def call(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        found = alive()
        return found(optimizer) if found is not None else []

    return call


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model itself, so that its names are the same with and without DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            inside: object = model.module
        else:
            inside = vars(model).get("_modules", {}).get("_orig_mod")  # what torch.compile puts around it
        if not isinstance(inside, torch.nn.Module):
            return model
        model = inside
