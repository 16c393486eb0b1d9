"""An observer that finds the operation that made the first infinity or NaN, and its arguments.

When backward is called, the graph of the loss still exists. If the loss is not finite, the whole graph is searched for the
earliest singular operation. If the loss is finite, only the few nodes nearest to it are searched, and the result is recorded only
if the watch finds a non-finite gradient in this step's backward. On a device, where reading would wait, graphs are searched
only after a step with an infinity or NaN in the forward, at most three times.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch

from mpinspect.numeric.exponents import ratio
from mpinspect.numeric.formats import FLOAT16
from mpinspect.ranges import records
from mpinspect.ranges.capture.graph import graph, numel_of
from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.observations import Call
from mpinspect.ranges.capture.optimizers import states_of
from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.faults.measure.loss_terms import operations
from mpinspect.ranges.faults.measure.measuring import Measuring, Run, Sent, norms
from mpinspect.ranges.faults.measure.singularities import (
    Rows,
    Singular,
    added_constant,
    applies_mask,
    earliest,
    infinite_operand,
    is_packed,
    may_be_singular,
    overflowed,
    overflowed_pack,
    singular,
)
from mpinspect.ranges.kinds import ACTIVATION
from mpinspect.ranges.session import MOST_ROWS, Event, containers
from mpinspect.reporting.words import optional
from mpinspect.runtime.distributed import is_from_stage_before
from mpinspect.runtime.storages import StorageReference, storage_key

#: Maximum number of nodes searched if the loss is not finite; and if it is finite, in the first steps and in others.
_MOST_NODES, _EARLY_NODES, _NEAREST_NODES = 20_000, 2_000, 48
_FIRST_STEPS = 4
#: Maximum number of elements of a node's result that are read if the loss is finite.
_MOST_ELEMENTS = 1 << 16
#: Maximum number of examined steps.
_MOST_EXAMINED = 3
#: Maximum number of a weight's states that are read.
_MOST_STATES = 16
#: A weight is recorded once its norm has grown by this factor since the first step.
_GROWN = 16.0
#: Maximum number of rows of each weight compared after measured steps. Once these have grown, the whole weights are compared.
_MOST_COMPARED = 16
#: Weights are also compared when a finite loss exceeds the first one by this factor.
_LOSS_GROWN = 100.0
#: Modules whose output is finite if their input is and their weight is zero, unless code of their own divides by the weight.
_PRODUCTS = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
#: The records of singular operations, by their kind.
_KINDS: dict[str, type[records.Examined]] = {
    "argument": records.ExaminedArgument,
    "mask": records.ExaminedMask,
    "zero-row": records.ExaminedZeroRow,
    "target": records.ExaminedTarget,
    "difference": records.ExaminedDifference,
}


class Examining(Measuring):
    """Base of the observers that record singular operations in the first few steps that are not finite."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._examined = 0
        #: The first operations near the losses of steps that a scaler skipped, with their steps.
        self._suspects: list[tuple[int, Singular]] = []

    def _suspect(self, step: int, found: Singular | None) -> None:
        """Remember an operation of a skipped step: unless its derivative is infinite, the loss scale may be the cause."""
        if found is not None and has_infinite_derivative(found) and len(self._suspects) < _MOST_EXAMINED:
            self._suspects.append((step, found))

    def _record_suspects(self, harmless: Collection[tuple[str, str]]) -> None:
        """Record the operations of skipped steps, unless a backward through the operation was finite in another step."""
        for step, found in self._suspects:
            if key_of(found) not in harmless:
                self._record_singular(found, step)
        self._suspects.clear()

    def _record_singular(
        self, found: Singular, step: int, *, loss_finite: bool = True, call: tuple[int, int] | None = None
    ) -> None:
        """Record a singular operation.

        Args:
            found: the operation.
            step: its step.
            loss_finite: whether the loss was finite.
            call: its number among the step's calls of its operator, and their number, if both are known.
        """
        text = f"{found.operator} {found.what}".strip()
        figures: dict[str, Any] = {"loss_finite": loss_finite, "bits": found.bits}
        if call is not None:
            figures |= {"call": call[0], "calls": call[1]}
        by = next((each.name for each in self._parameters if each.parameter is found.by), None)
        if by is not None:
            text = text.replace("a tensor that takes a gradient", f"the parameter {by!r}")
        self._tell_examined(_KINDS[found.kind], step, found.elements, found.rows, text, **figures)

    def _tell_examined(
        self,
        kind: type[records.Examined],
        step: int,
        elements: int,
        rows: Rows,
        text: str = "",
        name: str = "",
        **figures: float,
    ) -> None:
        names, more = tuple(map(str, rows.first)), {"rows": rows.number, "of_rows": rows.of, **figures}
        self._record(kind(name=name, step=step, names=names, text=text, elements=elements, **more))  # type: ignore[arg-type]


class Examination(Examining):
    """Examines the first few steps with a non-finite loss or gradient. Must run after the watch."""

    #: The examinations of all models, and the storages of their last outputs: one model's output may be another one's input.
    _all: ClassVar[weakref.WeakSet[Examination]] = weakref.WeakSet()
    _outputs: ClassVar[dict[int, Any]] = {}

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._all.add(self)
        #: The first parameter's device when all parameters were last found on the CPU, or not.
        self._device: torch.device | None = None
        self._all_on_cpu = True
        #: Whether all parameters and losses are on the CPU now, so that reading does not wait; the number of steps read on a
        #: device.
        self._on_cpu = True
        self._waited = 0
        #: The last step in which an optimizer has stepped.
        self._stepped = -1
        #: Whether the last step had an event of the forward, and whether this step may therefore be read on a device.
        self._forward_broke = self._may_wait = False
        #: The singular operation near this step's finite loss, recorded if the backward turns out to be non-finite.
        self._candidate: Singular | None = None
        #: The product or division with a mask's infinity near this step's finite loss.
        self._infinite: Singular | None = None
        #: The nodes' names and arguments of the candidates of steps whose backward was finite.
        self._harmless: set[tuple[str, str]] = set()
        #: The singular operations of this step's non-finite losses, each with the modules whose outputs were made before it,
        #: and its number among the operator's calls and that of all of them.
        self._found: list[tuple[Singular, frozenset[str], tuple[int, int] | None]] = []
        #: The sequence numbers of the nodes that multiplied this step's losses by a loss scale.
        self._products: set[int] = set()
        #: By module, the sequence number of the node that made its last output.
        self._output_of: dict[str, int] = {}
        #: This step's inputs that no module made, with the module that received them; its calls without a graph. Weak
        #: references.
        self._inputs: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        self._graphless: list[tuple[str, weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]]] = []
        #: The last step whose inputs were searched for values that FP16 can't hold, and the number of steps that had some.
        self._searched, self._outliers = -1, 0
        self._made: set[int] = set()
        #: The tensors that were the only input of a call: a mask never is.
        self._alone: set[int] = set()
        self._called: set[str] = set()
        #: The sequence numbers of the graph nodes that made modules' outputs.
        self._ends: set[int] = set()
        #: The weights that were zero when this step's loss was not finite.
        self._zero: set[str] = set()
        #: Norms of the weights and of some of their rows before the first step.
        self._began: tuple[Sent, Sent] | None = None
        #: The weights whose growth is recorded, and whether with that of the loss.
        self._grown: set[tuple[str, bool]] = set()
        self._first_loss: float | None = None
        #: Each group's learning rate in the last step, and its initial one if a scheduler has recorded it.
        self._rates: WeakKeyDictionary[torch.optim.Optimizer, list[dict[str, float]]] = WeakKeyDictionary()
        #: Number of comparisons of the weights that a grown loss has caused.
        self._compared = 0

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Activate this observer in watched steps (on a device: measured ones, or after an event) until enough were examined."""
        device = next((watched.parameter.device for watched in self._parameters), None)
        if device != self._device or self._clock.measured:
            # Most steps compare one parameter, since a model is moved as a whole.
            self._device = device
            self._all_on_cpu = all(watched.parameter.is_cpu for watched in self._parameters)
        self._on_cpu = self._all_on_cpu
        self._may_wait = self._forward_broke and self._waited < _MOST_EXAMINED
        self._forward_broke = False
        is_wanted = self._on_cpu or self._may_wait or self._clock.measured
        self.at_work = watched and is_wanted and self._examined < _MOST_EXAMINED
        self._candidate = self._infinite = None
        for of_last_step in (
            *(self._found, self._products, self._output_of, self._inputs, self._graphless),
            *(self._made, self._alone, self._called, self._ends, self._zero),
        ):
            of_last_step.clear()
        if self._began is None:
            self._began = self._weight_norms(), self._weight_norms(_MOST_COMPARED)

    def called(self, call: Call) -> None:
        """Remember the inputs that no module made, the calls without a graph, and the nodes of the outputs."""
        if call.recomputed or not call.outputs:
            return
        path, inputs = call.layer.path, call.inputs()
        if len(inputs) == 1:
            self._alone.add(id(inputs[0]))
        for tensor in inputs:
            if id(tensor) not in self._made and tensor.grad_fn is None and tensor.is_floating_point():
                if not is_from_stage_before(tensor):
                    self._inputs.append((path, weakref.ref(tensor)))
                if call.outputs[0].grad_fn is None:
                    self._graphless.append((path, weakref.ref(tensor), weakref.ref(call.outputs[0])))
        self._called.add(path)
        if not path:
            self._remember_outputs(call.outputs)
        for output in reversed(call.outputs):
            self._made.add(id(output))
            node = output.grad_fn
            if node is not None:
                self._output_of[path] = number = node._sequence_nr()
                self._ends.add(number)

    def loss_scaled(self, losses: list[torch.Tensor], scaled: list[torch.Tensor], micro_batch: int) -> None:
        """Record the sequence numbers of the nodes of the losses' products with a scale."""
        # The model may have been moved since the step began.
        self._on_cpu = self._on_cpu and all(loss.is_cpu for loss in losses)
        bare = [loss.grad_fn for loss in losses]
        made = [loss.grad_fn for loss in scaled]
        self._products.update(node._sequence_nr() for node in made if node is not None and node not in bare)

    def backward_left_out(self, losses: list[torch.Tensor]) -> None:
        """Search the graph of the losses, which have been read, so that another wait for the device matters little."""
        if self._examined < _MOST_EXAMINED:
            self._may_wait = True
            self.backward_called(losses)

    @torch.no_grad()
    def backward_called(self, losses: list[torch.Tensor]) -> None:
        """Search the graph of the losses."""
        self._on_cpu = self._on_cpu and all(loss.is_cpu for loss in losses)
        if not self._on_cpu:
            if not self._may_wait:
                return
            self._waited += 1
            self._may_wait = False
        starts = [loss.grad_fn for loss in losses]
        if all(map(_is_finite, losses)):
            near = [
                node
                for node in graph(starts, _EARLY_NODES if self._clock.step < _FIRST_STEPS else _NEAREST_NODES)
                if (may_be_singular(node) or is_packed(node)) and numel_of(node) <= _MOST_ELEMENTS
            ]
            self._candidate = self._earliest(near) or earliest(map(overflowed_pack, near))
            if any(map(applies_mask, near)):
                self._infinite = earliest(map(infinite_operand, near))
            self._compare_if_grown(losses)
            return
        self._examined += 1
        step = self._clock.step
        if self.at_work:
            # Elsewhere it is not known where the modules end.
            self._name_operations(starts)
        # This step's update has not been applied yet, so these weights made the loss.
        norms = self._weight_norms(fewest_dims=1).read()
        self._zero = {name for name, norm in norms.items() if not norm}
        if broken := _broken(norms):
            self._tell_broken_weights(broken, len(norms))
            return
        if elsewhere := self._broken_elsewhere(starts):
            self._record(elsewhere)
            self._examined = _MOST_EXAMINED
            return
        batch = self._batch_not_finite()
        if batch is not None:
            self._tell_examined(records.ExaminedBatch, step, int(batch.sum()), Rows.where(batch))
            return
        self._tell_outliers(step)
        self._compare_norms(step, norms)
        if self._tell_graphless(step):
            return
        nodes = graph(starts, _MOST_NODES)
        found = earliest((self._earliest(nodes), overflowed(nodes)))
        if found is None and self._ends:
            found = added_constant(nodes, max(self._ends))
        if found is not None:
            # A mask's output holds infinities on purpose.
            masks = {node._sequence_nr() for node in nodes if applies_mask(node)}
            before = (path for path, made in self._output_of.items() if made < found.order and made not in masks)
            alike = sorted(node._sequence_nr() for node in nodes if node.name() == found.node)
            call = (alike.index(found.order), len(alike)) if found.order in alike else None
            self._found.append((found, frozenset(before), call))

    def _tell_broken_weights(self, broken: tuple[str, ...], of: int) -> None:
        # They have not changed since the last step of an optimizer.
        events = [each for each in self._recording.events if each.phase == "forward" and each.step > self._stepped]
        step = min((each.step for each in events), default=self._clock.step)
        self._record_names(records.BrokenWeights(step=step, names=broken, of=of))
        self._tell_states(step, broken[0])
        # Non-finite weights explain every later infinity or NaN, so the examination ends.
        self._examined = _MOST_EXAMINED

    def _tell_states(self, step: int, weight: str) -> None:
        """Record, of a weight that is not finite, the optimizers' states: how many of their elements are not."""
        parameter = next(each.parameter for each in self._parameters if each.name == weight)
        for optimizer in self._optimizers.living():
            states = ((name, each) for name, each in states_of(optimizer, parameter).items() if is_plain(each))
            for name, state in itertools.islice(states, _MOST_STATES):
                broken, of = int((~state.isfinite()).sum()), state.numel()
                names, dtype = (type(optimizer).__name__, str(name)), dtype_name(state.dtype)
                self._record(records.BrokenState(name=weight, step=step, names=names, text=dtype, broken=broken, of=of))

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the learning rates."""
        if self.at_work:
            named = [{name: group.get(name) for name in ("lr", "initial_lr")} for group in optimizer.param_groups]
            self._rates[optimizer] = [
                {name: float(rate) for name, rate in group.items() if isinstance(rate, (int, float))} for group in named
            ]

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the step."""
        self._stepped = self._clock.step

    def end_step(self, step: int, sampled: bool) -> None:
        """Record the singular operations found, near a finite loss if the backward was not finite; compare the weights' norms."""
        super().end_step(step, sampled)
        new = self._new_events()
        self._forward_broke = any(event.phase == "forward" for event in new)
        candidate, infinite, self._candidate, self._infinite = self._candidate, self._infinite, None, None
        broken = [event for event in new if event.gradients_finite is False]
        if candidate is not None and not broken:
            self._harmless.add(key_of(candidate))
        # The loss scale may cause an overflow in the backward, which a scaler skips.
        if all(event.phase == "backward" and event.skipped for event in broken):
            if broken:
                self._suspect(step, candidate)
            candidate = None
        if not broken:
            infinite = None
        candidate = candidate or infinite
        if candidate is not None:
            self._examined += 1
            self._record_singular(candidate, step)
        for found, before, call in self._found:
            # An argument computed from a non-finite output is not the cause; a row of -inf makes no NaN before its softmax.
            is_late = any(
                (event.phase, event.what) == ("forward", ACTIVATION)
                and event.tensor in before
                and (found.kind in ("argument", "difference") or (found.kind == "mask" and event.value == "nan"))
                for event in new
            )
            if not is_late:
                self._record_singular(found, step, loss_finite=False, call=call)
        self._found.clear()
        self._tell_zero_weights(new)
        if any((event.step, event.phase, event.dtype) == (step, "forward", FLOAT16.name) for event in new):
            self._tell_outliers(step)
        if self._clock.measured and not self._recording.events:
            self._send(self._weight_norms(_MOST_COMPARED), partial(self._compare_rows, step))

    def run_ends(self) -> None:
        """Judge all values, and record suspects of skipped steps; end this model's part in other models' examinations."""
        super().run_ends()
        self._record_suspects(self._harmless)
        self._all.discard(self)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _earliest(self, nodes: Sequence[object]) -> Singular | None:
        """Return the singular operation that ran first; a difference counts only if it was taken from a module's output."""
        found = filter(None, map(singular, nodes))
        return earliest(each for each in found if each.kind != "difference" or each.of in self._ends)

    def _name_operations(self, starts: Sequence[object]) -> None:
        """Record the operations of a loss that is not finite."""
        made = operations(starts, self._ends, self._products)
        dtype = optional(made.dtype, dtype_name, "")
        self._record(records.BrokenLoss(step=self._clock.step, names=made.names, text=dtype, in_half=made.in_half))

    def _broken_elsewhere(self, starts: Sequence[object]) -> records.BrokenElsewhere | None:
        """Return the record of a loss's graph that leads to infinities or NaNs in weights of another model; None without any."""
        own = {id(each.parameter) for each in self._parameters}
        used = (getattr(node, "variable", None) for node in graph(starts, _MOST_NODES))
        # Other leaves are data, such as the input that a pipeline's stage has received.
        others = (
            each for each in used if isinstance(each, torch.nn.Parameter) and is_plain(each) and id(each) not in own
        )
        broken = {id(each) for each in others if not bool(each.isfinite().all())}
        if not broken:
            return None
        named = [(each, [one.name for one in each._parameters if id(one.parameter) in broken]) for each in self._all]
        model, names = next(((each._recording.info.model, names) for each, names in named if names), ("", []))
        return records.BrokenElsewhere(step=self._clock.step, names=tuple(names), text=model or "")

    def _batch_not_finite(self) -> torch.Tensor | None:
        """Return where the first non-finite input of the model is not finite; None if all (that still exist) are finite.

        Inputs of nested modules are left out, since the outer module's code may make them, and all inputs if another model's
        weights are broken. A mask's -inf counts as finite.
        """
        others = (each for each in tuple(self._all) if each is not self)
        if any(_broken(each._weight_norms(fewest_dims=1).read()) for each in others):
            return None
        for path, given in self._inputs:
            tensor = given()
            if (
                tensor is None
                or self._is_of_a_model(tensor)
                or self._called.intersection(containers(path))
                or id(tensor) in self._made
                or not is_plain(tensor)
            ):
                continue
            broken = ~tensor.isfinite()
            if id(tensor) not in self._alone:
                broken &= tensor != -math.inf
            if bool(broken.any()):
                return broken
        return None

    def _tell_outliers(self, step: int) -> None:
        """Record the finite values of the batch that FP16 can't hold, in the innermost module that was given them.

        Once a step, and in a few steps. Waits for the device.
        """
        if self._searched == step or self._outliers == MOST_ROWS:
            return
        self._searched = step
        for path, given in self._inputs:
            tensor = given()
            if not is_plain(tensor) or self._is_of_a_model(tensor):
                continue
            magnitudes = tensor.abs()
            beyond = (magnitudes >= FLOAT16.overflow_edge) & magnitudes.isfinite()
            if bool(beyond.any()):
                self._outliers += 1
                largest = float(magnitudes[beyond].max())
                self._tell_examined(
                    records.ExaminedOutliers, step, int(beyond.sum()), Rows.where(beyond), name=path, largest=largest
                )
                return

    @classmethod
    def _remember_outputs(cls, outputs: Sequence[torch.Tensor]) -> None:
        alive = {key: storage for key, storage in cls._outputs.items() if not storage.expired()}
        cls._outputs = alive | {storage_key(each): StorageReference(each) for each in outputs if is_plain(each)}

    @classmethod
    def _is_of_a_model(cls, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has the memory of a model's output, as after ``detach()``."""
        return is_plain(tensor) and (made := cls._outputs.get(storage_key(tensor))) is not None and not made.expired()

    def _tell_graphless(self, step: int) -> bool:
        """Record the first untrained module (without a graph) that made NaNs from rows of zeros; return whether there is one."""
        for path, given, made in self._graphless:
            tensor, output = given(), made()
            if not (is_plain(tensor) and is_plain(output)) or tensor.dim() < 2 or not bool(tensor.isfinite().all()):
                continue
            broken = ~output.isfinite()
            if broken.dim() != tensor.dim() or broken.shape[0] != tensor.shape[0] or not bool(broken.any()):
                continue
            rows = broken.flatten(1).any(1)
            if bool((tensor.flatten(1)[rows] == 0).all()):
                self._tell_examined(
                    records.ExaminedZeroRow, step, int(broken.sum()), Rows.where(rows), "a division", path
                )
                return True
        return False

    def _tell_zero_weights(self, events: Sequence[Event]) -> None:
        """Record a product with a weight of zeros whose output was the first NaN: the weight was divided by its own zero."""
        if not events:
            return
        modules = {layer.path: layer.module for layer in self._layers if isinstance(layer.module, _PRODUCTS)}
        for event in events:
            name = f"{event.module}.weight".lstrip(".")
            is_first = (event.phase, event.value, event.tensor) == ("forward", "nan", event.module)
            # Whether the whole input was read, and fits FP16, stands in the explanation alone.
            is_alone = is_first and event.explanation.endswith("its input was finite")
            if is_alone and event.module in modules and name in self._zero:
                rows = len(modules[event.module].weight)
                whole = Rows(tuple(range(min(rows, MOST_ROWS))), rows, rows)
                self._tell_examined(records.ExaminedZeroRow, event.step, rows, whole, name, event.module)

    @torch.no_grad()
    def _weight_norms(self, most_rows: float = math.inf, fewest_dims: int = 2) -> Sent:
        """Return the norms of the weights of that many dimensions, or of evenly spread rows of each, in FP32 or FP64.

        Frozen ones need two dimensions: one of a single dimension may be a mask of -inf.
        """
        plain = (each for each in self._parameters if is_plain(each.parameter))
        least = {True: fewest_dims, False: 2}
        watched = [each for each in plain if each.parameter.dim() >= least[each.parameter.requires_grad]]
        return Sent.of(((each.name, _spread_rows(each.parameter, most_rows)) for each in watched), norms)

    def _compare_rows(self, step: int, rows: dict[str, float]) -> None:
        """Compare the whole weights if the norm of a few rows of any has grown far."""
        began = (self._began and self._began[1].read()) or {}
        if any(grown >= _GROWN for name, grown in _ratios(rows, began).items() if (name, False) not in self._grown):
            self._send(self._weight_norms(), partial(self._compare_norms, step))

    def _compare_if_grown(self, losses: list[torch.Tensor]) -> None:
        """Compare the norms of the weights, in a few steps, when the loss has grown far beyond the first one."""
        loss = max((abs(loss.item()) for loss in losses if loss.numel() == 1), default=0.0)
        if self._first_loss is None:
            self._first_loss = loss
        elif loss > _LOSS_GROWN * max(self._first_loss, 1.0) and self._compared < _MOST_EXAMINED:
            self._compared += 1
            self._compare_norms(
                self._clock.step, self._weight_norms().read(), ratio(loss, self._first_loss) or math.inf
            )

    def _compare_norms(self, step: int, norms: dict[str, float], loss_ratio: float = 0.0) -> None:
        """Record each weight whose norm has grown far beyond its first one: once, and once more if the loss has grown, too."""
        began = (self._began and self._began[0].read()) or {}
        for name, grown in _ratios(norms, began).items():
            is_known = (name, loss_ratio > 0) in self._grown
            if not is_known and _GROWN <= grown < math.inf and len(self._grown) < MOST_ROWS:
                self._grown.add((name, loss_ratio > 0))
                self._record(
                    records.WeightGrowth(
                        name=name,
                        step=step,
                        ratio=grown,
                        began=began[name],
                        elements=next(each.parameter.numel() for each in self._parameters if each.name == name),
                        loss_ratio=loss_ratio,
                        **self._rates_of(name),  # type: ignore[arg-type]
                    )
                )

    def _rates_of(self, name: str) -> dict[str, float]:
        """Return the learning rates of a weight's last step, and its group's number if the groups' rates differ."""
        parameter = next(each.parameter for each in self._parameters if each.name == name)
        for optimizer, rates in self._rates.items():
            for number, (group, named) in enumerate(zip(optimizer.param_groups, rates, strict=False)):
                if any(each is parameter for each in group["params"]):
                    if len({each.get("lr") for each in rates}) > 1:
                        return {**named, "group": float(number)}
                    return named
        # The optimizer steps masters in place of the weights.
        return next((rates[0] for rates in self._rates.values() if rates), {})


def key_of(found: Singular) -> tuple[str, str]:
    """Return a key that an operation shares with those of other steps."""
    return found.node, found.what


def has_infinite_derivative(found: Singular) -> bool:
    """Return whether an operation's gradient is infinite or NaN whatever gradient arrives: g / 0 is, for zeros too."""
    return found.kind == "argument" and "zero" in found.what


def _broken(norms: Mapping[str, float]) -> tuple[str, ...]:
    return tuple(name for name, norm in norms.items() if not math.isfinite(norm))


def _ratios(norms: Mapping[str, float], began: Mapping[str, float]) -> dict[str, float]:
    """Return each norm's factor of growth; weights that began at zero are left out."""
    return {name: norm / began[name] for name, norm in norms.items() if began.get(name, 0.0) > 0}


def _spread_rows(weight: torch.Tensor, most: float) -> torch.Tensor:
    """Return at most this many rows of a weight, evenly spread, without a copy."""
    return weight[:: max(1, math.ceil(weight.shape[0] / most))]


def _is_finite(loss: torch.Tensor) -> bool:
    if loss.numel() == 1 and not loss.is_complex():
        return math.isfinite(loss.item())
    return bool(loss.isfinite().all())
