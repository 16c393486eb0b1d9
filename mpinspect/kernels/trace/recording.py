"""Sort the events of a trace by category, and store the data of each event that attribution needs."""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

from mpinspect.kernels.records import BACKWARD_RANGE, MODULE_RANGE
from mpinspect.kernels.trace.columns import LONGEST, Columns, Numbering, integer, number, word
from mpinspect.kernels.trace.producers import Producer, producer

#: Name prefixes of Python stack frames, and of ranges that torch marks.
MODULE_FRAME = "nn.Module: "
STEP_RANGE = "ProfilerStep#"
OPTIMIZER_RANGES = ("Optimizer.step#", "Optimizer.zero_grad#")

#: The version of marshal's format without references: its output depends only on the value.
_MARSHAL = 2
#: The keys that every operator event has.
_USUAL = itemgetter("ts", "dur", "name", "pid", "tid", "args", "ph")
_ARGUMENTS = ("Input Dims", "Input Strides", "Input type", "Concrete Inputs")

#: Maximum number of stored marks of the producer; other profilers leave theirs in a trace's first events.
_MOST_MARKS = 1 << 12

_Handler = Callable[[dict[str, Any]], None]


class _Handlers(dict[object, _Handler]):
    """Event handlers by category, since Kineto has changed the spelling ("Kernel" and "kernel", "Operator" and "cpu_op", ...).

    Args:
        known: handlers by category in lower case without underscores and spaces; events of other categories are ignored.
        without_category: the handler of events without a category.
    """

    def __init__(self, known: dict[tuple[str, ...], _Handler], without_category: _Handler) -> None:
        super().__init__({None: without_category})
        self._known = {name: handler for names, handler in known.items() for name in names}

    def __missing__(self, category: object) -> _Handler:
        plain = str(category).lower().replace("_", "").replace(" ", "")
        handler = self[category] = self._known.get(plain, _ignore)
        return handler


def _ignore(event: dict[str, Any]) -> None:
    """Ignore an event that attribution does not need."""


class Recording:
    """The events of one trace that matter, as columns. Times are in microseconds; -1 replaces missing values.

    Attributes:
        names, threads, arguments: the values numbered in the columns; a thread is (pid, tid); arguments are marshalled.
        operators: name, thread, arguments, id (External id, else Ev Idx), sequence, forward_thread.
        launches: name, thread, correlation.
        kernels: name, device, stream, correlation, external, graph (1 if the profiler marks the kernel as a node of a graph).
        copies: device.
        modules, backwards: this package's ranges around forwards and backwards: name, thread, id.
        frames: nn.Module frames of the Python stack.
        steps, optimizers: torch's annotations.
        flow_starts, flow_ends: arrows from forward to backward: id (number in ``flows``), thread.
        unreadable, without_duration, pairs, without_phase: numbers of events that were left out or repaired.
    """

    def __init__(self) -> None:
        self.names, self.threads, self.arguments, self.flows = Numbering(), Numbering(), Numbering(), Numbering()
        self.operators = Columns("name", "thread", "arguments", "id", "sequence", "forward_thread")
        self.launches = Columns("name", "thread", "correlation")
        self.kernels = Columns("name", "device", "stream", "correlation", "external", "graph")
        self.copies = Columns("device")
        self.modules = Columns("name", "thread", "id")
        self.backwards = Columns("name", "thread", "id")
        self.frames = Columns("name", "thread", "id")
        self.steps = Columns("name", "thread", "id")
        self.optimizers = Columns("name", "thread", "id")
        self.flow_starts, self.flow_ends = Columns("id", "thread"), Columns("id", "thread")
        self.unreadable = self.without_duration = self.pairs = self.without_phase = 0
        self.has_shapes = False
        self._operator_names: dict[object, int] = {}
        self._marks: set[str] = set()
        runtimes = (
            "cudaruntime",
            "cudadriver",
            "runtime",
            "driver",
            "hipruntime",
            "hipdriver",
            "xpuruntime",
            "xpudriver",
        )
        self._handlers = _Handlers(
            {
                ("kernel", "concurrentkernel"): self._kernel,
                ("gpumemcpy", "gpumemset", "memcpy", "memset", "asyncmemcpy", "asyncmemset"): self._copy,
                runtimes: self._launch,
                ("cpuop", "operator"): self._operator,
                ("userannotation",): self._annotation,
                ("pythonfunction", "python"): self._frame,
                ("fwdbwd", "forwardbackward"): self._flow,
            },
            without_category=self._mark,
        )

    def add(self, batch: list[Any]) -> None:
        """Add events; values that are not events are counted in ``unreadable``."""
        handlers = self._handlers
        for event in batch:
            try:
                handlers[event.get("cat")](event)
            except (AttributeError, TypeError, ValueError):
                self.unreadable += 1
                self.without_phase += not isinstance(event, dict)

    # -- kinds of events --------------------------------------------------------------------------------------------------

    def _operator(self, event: dict[str, Any]) -> None:
        """Add an operator. Most events are operators in the usual form, which is handled with as few calls as possible."""
        try:
            start, duration, name, pid, tid, args, phase = _USUAL(event)
            number_of_name = self._operator_names[name]
            usual = phase == "X" and 0 <= duration < LONGEST > start > -LONGEST and args
        except (KeyError, TypeError):
            usual = False
        if not usual:
            if (unusual := self._unusual_operator(event)) is None:
                return
            number_of_name, start, duration, args = unusual
            pid, tid = event.get("pid"), event.get("tid")
        self.operators.add(
            (
                start,
                duration,
                number_of_name,
                self.threads[pid, tid],
                self._arguments(args),
                _identity(args),
                integer(args.get("Sequence number")),
                integer(args.get("Fwd thread id")),
            )
        )

    def _unusual_operator(self, event: dict[str, Any]) -> tuple[int, float, float, dict[str, Any]] | None:
        """Return an operator with a new name, with numbers as strings or without arguments; None if it is not an operator."""
        name, span, args = event.get("name"), self._span(event), event.get("args") or {}
        if span is None or not isinstance(name, str):
            return None
        # Before ranges had a category of their own, they were recorded as operators.
        if name.startswith((MODULE_RANGE, BACKWARD_RANGE, STEP_RANGE, *OPTIMIZER_RANGES)):
            self._range(name, span, event, args)
            return None
        number_of_name = self._operator_names[name] = self.names[name]
        return number_of_name, *span, args

    def _arguments(self, args: dict[str, Any]) -> int:
        if "Input type" not in args and "Input Dims" not in args:
            return -1
        described = [args.get(key) for key in _ARGUMENTS]
        self.has_shapes |= described[0] is not None
        return self.arguments[marshal.dumps(described, _MARSHAL)]

    def _launch(self, event: dict[str, Any]) -> None:
        args = event.get("args") or {}
        correlation = integer(args.get("correlation"))
        if correlation >= 0 and (span := self._span(event)) is not None:
            thread = self.threads[event.get("pid"), event.get("tid")]
            self.launches.add((*span, self.names[str(event.get("name"))], thread, correlation))

    def _kernel(self, event: dict[str, Any]) -> None:
        if (span := self._span(event)) is None:
            return
        args = event.get("args") or {}
        stream = integer(args.get("stream"))
        self.kernels.add(
            (
                *span,
                self.names[str(event.get("name"))],
                _device(event, args),
                stream if stream >= 0 else integer(event.get("tid")),
                integer(args.get("correlation")),
                integer(args.get("External id", args.get("external id"))),
                "graph id" in args or "graph node id" in args,
            )
        )

    def _copy(self, event: dict[str, Any]) -> None:
        if (span := self._span(event)) is not None:
            self.copies.add((*span, _device(event, event.get("args") or {})))

    def _annotation(self, event: dict[str, Any]) -> None:
        name = event.get("name")
        if isinstance(name, str) and (span := self._span(event)) is not None:
            self._range(name, span, event, event.get("args") or {})

    def _frame(self, event: dict[str, Any]) -> None:
        name = event.get("name")
        if isinstance(name, str) and name.startswith(MODULE_FRAME) and (span := self._span(event)) is not None:
            thread = self.threads[event.get("pid"), event.get("tid")]
            args = event.get("args") or {}
            identity = integer(args.get("Python id"), _identity(args))
            self.frames.add((*span, self.names[name.removeprefix(MODULE_FRAME)], thread, identity))

    def _range(self, name: str, span: tuple[float, float], event: dict[str, Any], args: dict[str, Any]) -> None:
        if name.startswith(MODULE_RANGE):
            columns, name = self.modules, name.removeprefix(MODULE_RANGE)
        elif name.startswith(BACKWARD_RANGE):
            columns, name = self.backwards, name.removeprefix(BACKWARD_RANGE)
        elif name.startswith(STEP_RANGE):
            columns = self.steps
        elif name.startswith(OPTIMIZER_RANGES):
            columns = self.optimizers
        else:
            return
        thread = self.threads[event.get("pid"), event.get("tid")]
        columns.add((*span, self.names[name], thread, _identity(args)))

    def _flow(self, event: dict[str, Any]) -> None:
        time = number(event.get("ts"))
        columns = {"s": self.flow_starts, "f": self.flow_ends}.get(str(event.get("ph")))
        if time is not None and columns is not None:
            flow = self.flows[event.get("pid"), event.get("id")]
            columns.add((time, 0.0, flow, self.threads[event.get("pid"), event.get("tid")]))

    def _mark(self, event: dict[str, Any]) -> None:
        """Add the marks of an event that names a process or thread; Kineto's instants (phase i) mark its window."""
        if "ph" not in event:
            self.without_phase += 1
        elif event["ph"] not in ("i", "I") and len(self._marks) < _MOST_MARKS:
            self._marks.update(_marks(event))

    def producer(self) -> Producer | None:
        """Return the other profiler or accelerator behind the events; None for torch.profiler on a GPU or CPU."""
        ignored = (word(category) for category, handler in self._handlers.items() if handler is _ignore)
        return producer([*sorted(self._marks), *ignored])

    def _span(self, event: dict[str, Any]) -> tuple[float, float] | None:
        """Return start and duration; None if the event has no start or is not of phase X."""
        start: Any = event.get("ts")
        duration: Any = event.get("dur")
        phase = event.get("ph")
        if phase != "X":
            self.pairs += phase in ("B", "E")
            return None
        if _is_span(start, duration):
            return start, duration
        start, duration = number(start), number(duration)
        if start is None:
            self.unreadable += 1
            return None
        if duration is None or duration < 0:
            self.without_duration += 1
            duration = 0.0
        return start, duration


def _marks(event: dict[str, Any]) -> Iterator[str]:
    """Yield the names that identify an event's profiler if the event has no category: its own, its arguments', a process's."""
    args = event.get("args")
    yield word(event.get("name"))
    if isinstance(args, dict):
        yield from map(word, args)
        yield word(args.get("name"))
        yield f"hlo_module={word(args.get('hlo_module'))}"


def _is_span(start: Any, duration: Any) -> bool:
    """Return whether start and duration are valid clock values, not strings, infinities or NaN."""
    try:
        return bool(0 <= duration < LONGEST > start > -LONGEST)
    except TypeError:
        return False


def _identity(args: dict[str, Any]) -> int:
    """Return a number that grows in the order of calls, to order events with equal start and end."""
    found = args.get("External id")
    if type(found) is int and 0 <= found < 1 << 53:
        return found
    return integer(args.get("Ev Idx"))


def _device(event: dict[str, Any], args: dict[str, Any]) -> int:
    """Return the GPU's number, which Kineto also writes as the pid of GPU events."""
    device = integer(args.get("device"))
    return device if device >= 0 else max(integer(event.get("pid"), 0), 0)
