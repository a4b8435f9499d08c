"""Tracks one backward pass from its first gradient to its end."""

import threading
import weakref
from collections.abc import Callable, Sequence
from enum import Enum, auto

import torch

from ddp_from_scratch.autograd.graph_walk import GraphWatch, will_accumulate
from ddp_from_scratch.autograd.ready_order import ReadyOrder
from ddp_from_scratch.autograd.used_parameters import UsedParameters

# The number that autograd gives to the backward pass that this thread is in; -1 outside of one.
_current_pass = torch._C._current_graph_task_id


class PassState(Enum):
    """The state of a `BackwardPass`.

    IDLE -- begin --> RUNNING -- end --> IDLE
    RUNNING -- an exception --> BROKEN_OFF -- begin --> RUNNING
    """

    IDLE = auto()
    RUNNING = auto()
    # Autograd will not call back at its end. It stays broken off until the next pass begins.
    BROKEN_OFF = auto()


class BackwardPass:
    """The backward pass under way, if any. Counts its gradients and calls back at its end.

    Args:
        parameters, names: their indices stand for the parameters here.
        find_unused, static_graph, skip_unused: options of `Reducer`.
        ready_order: the order that an earlier run recorded, or None.
        on_enter: see `GraphWatch`.
        at_end: a bound method, called by autograd when the pass is over. Held weakly.
        broken_off: a bound method, called with the pass's number instead if an exception ends the
            pass, before `backward()` raises it. Held weakly.

    Attributes:
        state: IDLE, RUNNING or BROKEN_OFF.
        number: autograd's number of the pass under way. A pass that an exception ended never
            reports its end, but the next pass has another number.
        order: the order in which gradients become ready.
        used: the parameters that were used; None if no option needs them.
        may_be_unused: True if a parameter may get no gradient.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        *,
        find_unused: bool,
        static_graph: bool,
        skip_unused: bool,
        ready_order: Sequence[str] | None,
        on_enter: Callable[[set[int]], None],
        at_end: Callable[[], None],
        broken_off: Callable[[int], None],
    ) -> None:
        self._at_end = weakref.WeakMethod(at_end)
        self._broken_off = weakref.WeakMethod(broken_off)
        self.state = PassState.IDLE
        self.number = -1
        self._thread = -1
        self._parameters = parameters
        self.order = ReadyOrder(names, ready_order)
        # None keeps the way of a gradient short: without these options each parameter gets one
        # gradient in every pass, so there is nothing to count.
        self.used: UsedParameters | None = None
        self.may_be_unused = find_unused
        if find_unused or skip_unused:
            self.used = UsedParameters(parameters, find_unused)
        self._graphs = GraphWatch(parameters, on_enter)
        if static_graph:
            self.set_static()

    @property
    def varies(self) -> bool:
        """True if the set of used parameters may change from pass to pass."""
        return self.used is not None and self.used.varies

    def set_static(self) -> None:
        """Makes the graph static from the next pass on. Idempotent."""
        self.may_be_unused = True
        if self.used is None:
            self.used = UsedParameters(self._parameters, False)
        if not self.used.is_static:
            # Passes before this one may have had another graph.
            self._graphs.forget()
        self.used.set_static()

    def on_forward(self, outputs: object) -> None:
        """Looks for parameters that this forward pass does not use, if any may be unused."""
        if self.used is not None and self.may_be_unused:
            self._graphs.on_forward(outputs, as_before=self.used.is_static)

    def is_current(self) -> bool:
        """True if autograd is now executing the pass that has begun."""
        return self.state is not PassState.IDLE and self.number == _current_pass()

    def begin(self) -> None:
        """Begins the pass that autograd is executing."""
        self.number, self.state = _current_pass(), PassState.RUNNING
        self._thread = threading.get_ident()
        at_end = self._at_end()
        assert at_end is not None, "its owner called this"
        callback = _Callback(at_end, self._broken_off)
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def on_gradient(self, index: int) -> bool:
        """Counts a gradient of a synchronised pass; True if it is its parameter's last.

        The first gradient begins the pass.
        """
        # Reentrant checkpointing runs passes inside a pass. Unused parameters are known at the end
        # of the outermost pass, which has begun here when it entered the graph (`GraphWatch`).
        if self.number != _current_pass() and not (
            self.state is not PassState.IDLE and self.may_be_unused
        ):
            self.begin()
        # The order is agreed on once. Later passes need not record it.
        if self.order.final is None:
            self.order.count(index)
        return self.used is None or self.used.is_last_gradient(index)

    def end(self) -> None:
        """Ends the pass. Idempotent."""
        self.state, self.number = PassState.IDLE, -1

    def drop(self) -> None:
        """Forgets the pass under way, and the gradients since the last average. Idempotent."""
        self.end()
        if self.used is not None:
            self.used.drop()

    def break_off(self, number: int) -> bool:
        """Marks the pass of this number as broken off; False if another one is under way."""
        if self.number != number or self.state is not PassState.RUNNING:
            return False
        self.state = PassState.BROKEN_OFF
        return True

    def is_same(self, other: "BackwardPass") -> bool:
        """True if both are under way in the same pass of autograd's."""
        return self.state is PassState.RUNNING and self.number == other.number

    def is_inside(self, other: "BackwardPass") -> bool:
        """True if this pass runs inside the other, as in a reentrant checkpoint's backward."""
        # A pass of another thread is no part of this one. (On a GPU all passes have one thread.)
        return (
            other.state is PassState.RUNNING
            and other._thread == self._thread
            and other.number < self.number
        )

    def end_with(self, other: "BackwardPass") -> None:
        """Goes on until the other pass ends."""
        self.number = other.number

    def will_run(self) -> bool:
        """True if the pass that autograd is executing is, or will be, one of these parameters'."""
        # A pass may go through the module and use none of them.
        return any(map(will_accumulate, self._parameters)) or self._graphs.will_enter()

    @property
    def hides_parameters(self) -> bool:
        """True if a graph that was walked hides parameters in a reentrant checkpoint."""
        return self._graphs.hides_parameters

    def stop(self) -> None:
        """Ignores all graphs from now on, also those still alive. Idempotent."""
        self._graphs.stop()


class _Callback:
    """A callback for a pass's end; autograd drops it uncalled if an exception ends the pass."""

    def __init__(
        self, at_end: Callable[[], None], broken_off: "weakref.WeakMethod[Callable[[int], None]]"
    ) -> None:
        self._number = _current_pass()
        self._at_end, self._broken_off = at_end, broken_off
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._at_end()

    # Autograd does not report a failed pass; it only drops the callbacks of that pass.
    def __del__(self) -> None:
        if not self._called and (broken_off := self._broken_off()) is not None:
            broken_off(self._number)
