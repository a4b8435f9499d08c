"""The backward pass under way: its beginning, its gradients, its end."""

from collections.abc import Callable, Sequence
from enum import Enum, auto

import torch
import torch.distributed as dist

from ddp_from_scratch.autograd.graph_walk import GraphWatch
from ddp_from_scratch.autograd.ready_order import ReadyOrder
from ddp_from_scratch.autograd.used_parameters import UsedParameters

_current_pass = torch._C._current_graph_task_id  # autograd's number of it; -1 outside of one


class PassState(Enum):
    """The state of a `BackwardPass`.

    IDLE -- begin --> RUNNING -- end --> IDLE; RUNNING -- an exception --> BROKEN_OFF -- begin -->
    """

    IDLE = auto()
    RUNNING = auto()
    BROKEN_OFF = auto()  # it never comes to its end: the next pass begins anew


class BackwardPass:
    """One backward pass at a time, from its first gradient to autograd's callback at its end.

    It is known by autograd's number of it, so that a pass that an exception broke off is not taken
    for the next.

    Args:
        parameters, names: an index into these stands for a parameter.
        process_group: the ranks that take part.
        find_unused, static_graph, skip_unused: as of `Reducer`.
        ready_order: the order of an earlier run, or None.
        on_enter: as of `GraphWatch`.

    Attributes:
        state: IDLE, RUNNING or BROKEN_OFF.
        order: the order in which gradients become ready.
        used: the parameters that were used; None where each gets one gradient in every pass.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        process_group: dist.ProcessGroup | None,
        *,
        find_unused: bool,
        static_graph: bool,
        skip_unused: bool,
        ready_order: Sequence[str] | None,
        on_enter: Callable[[set[int]], None],
    ) -> None:
        self.state = PassState.IDLE
        self._number = -1
        self._parameters, self._process_group = parameters, process_group
        self.order = ReadyOrder(names, ready_order)
        self.used: UsedParameters | None = None
        if find_unused or static_graph or skip_unused:
            self.used = UsedParameters(parameters, process_group, find_unused, static_graph)
        self._graphs = GraphWatch(parameters, on_enter)

    @property
    def may_be_unused(self) -> bool:
        """Whether a parameter may get no gradient."""
        return self.used is not None and self.used.may_be_unused

    @property
    def varies(self) -> bool:
        """Whether other parameters may be used in each pass."""
        return self.used is not None and self.used.varies

    def set_static(self) -> None:
        """Makes the graph static from the next pass on. Idempotent."""
        if self.used is None:
            self.used = UsedParameters(self._parameters, self._process_group, False, True)
        self.used.set_static()

    def on_forward(self, outputs: object) -> None:
        """Looks for parameters that the graph of this forward pass misses, if any may be unused."""
        if self.used is not None and self.used.may_be_unused:
            self._graphs.on_forward(outputs, as_before=self.used.is_static)

    def is_current(self) -> bool:
        """Whether the pass that autograd is executing is the one that has begun."""
        return self.state is not PassState.IDLE and self._number == _current_pass()

    def begin(self, at_end: Callable[[], None], broken_off: Callable[[], None]) -> None:
        """Lets autograd call `at_end` when the pass is over.

        Where an exception breaks the pass off, `broken_off` is called instead, before
        `backward()` raises.
        """
        self._number, self.state = _current_pass(), PassState.RUNNING
        callback = _Callback(self, at_end, broken_off)
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def on_gradient(
        self, index: int, at_end: Callable[[], None], broken_off: Callable[[], None]
    ) -> bool:
        """Counts a gradient that is to be averaged; True when it is its parameter's last.

        The first one begins the pass: arguments as of `begin`.
        """
        # Reentrant checkpointing runs passes inside a pass. Unused parameters are known at the end
        # of the outermost one, whose beginning was seen when it entered the graph.
        if self._number != _current_pass() and not (
            self.state is not PassState.IDLE and self.may_be_unused
        ):
            self.begin(at_end, broken_off)
        if self.order.final is None:
            self.order.count(index)
        return self.used is None or self.used.is_last_gradient(index)

    def end(self) -> bool:
        """Ends the pass; False if there is none. Idempotent."""
        ended = self.state is not PassState.IDLE
        self.state, self._number = PassState.IDLE, -1
        return ended

    def break_off(self, number: int) -> None:
        """Notes that the pass of this number will not come to its end."""
        if self._number == number:
            self.state = PassState.BROKEN_OFF

    def stop(self) -> None:
        """Notices nothing from now on, whatever graphs are still alive. Idempotent."""
        self._graphs.stop()


class _Callback:
    """Called by autograd at the end of a pass, and merely dropped when the pass is broken off."""

    def __init__(
        self, of: BackwardPass, at_end: Callable[[], None], broken_off: Callable[[], None]
    ) -> None:
        self._of, self._number = of, _current_pass()
        self._at_end, self._broken_off = at_end, broken_off
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._at_end()

    def __del__(self) -> None:
        if not self._called:
            self._of.break_off(self._number)
            self._broken_off()
