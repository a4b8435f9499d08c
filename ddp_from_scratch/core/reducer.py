"""Averages a module's gradients over ranks while backward still runs.

The file follows one gradient from top to bottom: `grad_hook`, or from the second average on
`bucket_hook` once for a bucket; `launch_full_buckets` (pack and launch); `end_pass` and `finish`
(wait and unpack). Options are observers (`observer.py`).
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from ddp_from_scratch.common.memory import give_own_gradients
from ddp_from_scratch.core.average import Average, BackwardPass
from ddp_from_scratch.core.bucket import Bucket, BucketState, CommHook, FlatBucket, gradient_of
from ddp_from_scratch.core.comm_hooks import CommConfig
from ddp_from_scratch.core.gradient_errors import (
    check_bucket,
    check_gradient,
    check_not_launching,
    compiled_autograd,
    no_gradient,
    second_gradient,
    taken_gradient,
)
from ddp_from_scratch.core.hooks import EndOfPass, Hooks, current_pass, hook_module
from ddp_from_scratch.core.layout import Layout
from ddp_from_scratch.core.observer import Calls, Observer
from ddp_from_scratch.core.policies import LaunchOrder, Usage
from ddp_from_scratch.core.view_bucket import ViewBucket

Kind = TypeVar("Kind", bound=Observer)
NO_SPAN = nullcontext()  # where no profiler runs
_packs_early = attrgetter("packs_early")


class CoreReducer:
    """All-reduces the gradients of a module in buckets, without wrapping the module.

    The phases of one backward pass:

    - ready: a hook on each parameter marks it ready when its `.grad` is complete.
    - pack and launch: a full bucket is copied into one flat tensor and all-reduced asynchronously,
      by index, so all ranks issue the same collectives in the same order.
    - wait and unpack: at the end of backward, in order. Then every `.grad` is the average.

    It averages the whole `.grad`, with what earlier passes accumulated under `no_sync()`. A second
    pass through one graph adds to an average, and the sum is averaged again. After the first pass
    the buckets are rebuilt in the order of rank 0's gradients.

    Attributes:
        names, parameters: an index into these identifies a parameter everywhere.
        all_buckets: in launch order.
        flat_buckets: excludes separate buckets, such as those of sparse gradients.
        backward: the backward pass under way; None without one.
        average: the average that this pass and the ones before it under `no_sync()` belong to.
        joining: True inside `join()`, which sets the weights.
        by_hand: True while `average_now` averages, without a backward pass.
        view_buckets: the flat ones if `.grad` is a window of a bucket; else empty.
        usage: the policy that knows which parameters a pass uses; None if it uses all.
        order: the policy that knows when to launch; None if full buckets are launched.
        step_bucket: steps the parameters of a bucket that has landed; see `step_in_backward`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        comm: CommConfig,
        layout: Layout,
        *,
        bucket_caps: Sequence[int],
        overlap: bool = True,
        views: bool = False,
        ready_order: Sequence[str] | None = None,
        abandon_in_flight: bool = False,
        observers: Iterable[Observer] = (),
    ) -> None:
        if ready_order is not None and sorted(ready_order) != sorted(layout.names):
            raise ValueError("ready_order must name each parameter that requires a gradient once")
        self.observers: list[Observer] = []
        self.calls: Calls = Calls()
        self.usage: Usage | None = None
        self.order: LaunchOrder | None = None
        self.step_bucket: Callable[[Bucket], None] | None = None
        self.module = module
        self.comm = comm
        self.layout = layout
        self.overlap = overlap
        self.process_group: dist.ProcessGroup | None = comm.process_group
        self.rank: int = dist.get_rank(self.process_group)
        self.names: list[str] = layout.names
        self.parameters: list[torch.nn.Parameter] = layout.parameters
        self.device: torch.device = self.parameters[0].device
        self.caps: Sequence[int] = bucket_caps
        self.sync: bool = True
        self.joining: bool = False
        self.iteration: int = 0
        self.backward: BackwardPass | None = None
        self.average: Average = Average()
        self.ready_order: list[str] | None = None if ready_order is None else list(ready_order)
        # True if autograd must call for each gradient: a pass may end before all of them.
        self._hook_per_gradient = False
        self.by_hand: bool = False
        self._abandon_in_flight = abandon_in_flight
        self._seen: dict[int, None] = {}  # indices in the order in which they became ready
        # Held while buckets change: autograd has a thread for each device, and hooks run in all.
        self._lock = threading.RLock()  # a comm hook that calls back gets an error, not a deadlock
        self._launching: Bucket | None = None  # observers and the comm hook are called for it
        self._bucket_type: type[FlatBucket] = ViewBucket if views else FlatBucket
        # Replaced, never changed in place: the stall watch reads these tuples from its own thread.
        self.all_buckets: tuple[Bucket, ...] = ()
        self.flat_buckets: tuple[FlatBucket, ...] = ()
        self.view_buckets: tuple[ViewBucket, ...] = ()
        self.bucket_of: dict[int, Bucket] = {}
        self._shared: frozenset[int] = frozenset()
        self.hooks: Hooks | None = None
        self.lay_out()
        for observer in observers:
            self.add_observer(observer)
        self.hooks = Hooks(self)
        # These hooks keep the Reducer alive as long as its module.
        self.hooks.handles += hook_module(module, self)
        self._hook_parameters()

    def add_observer(self, observer: Observer, first: bool = False) -> None:
        """Starts to call this observer. Asks a policy instead of an earlier one of its kind."""
        if isinstance(observer, Usage):
            self.usage = observer
        elif isinstance(observer, LaunchOrder):
            self.order = observer
            # Without it, nothing may have noticed that an exception ended a pass (`EndOfPass`).
            if self.backward is not None and not self.is_in_pass():
                self.backward.failed = True
        observer.attach(self)
        self.observers.insert(0 if first else len(self.observers), observer)
        self._observers_changed()

    def remove_observer(self, observer: Observer) -> None:
        """Stops calling this observer."""
        self.observers.remove(observer)
        if observer is self.usage:
            self.usage = None
        if observer is self.order:
            self.order = None
        self._observers_changed()

    def _observers_changed(self) -> None:
        # A new object: observers are added and removed in the middle of a phase.
        self.calls = Calls(self.observers)
        self._hook_parameters()

    def observer(self, kind: type[Kind]) -> Kind | None:
        """Returns the observer of this type, or None."""
        for observer in self.observers:
            if isinstance(observer, kind):
                return observer
        return None

    @property
    def allows_unused(self) -> bool:
        """True if a parameter may get no gradient in a pass."""
        return self.usage is not None and self.usage.allows_unused

    # Layout -------------------------------------------------------------------------------------

    def lay_out(self, kind: type[FlatBucket] | None = None) -> None:
        """Rebuilds the buckets, if they change, and moves gradients from the old ones."""
        kind = kind or self._bucket_type
        # Before the order is known, a guess: last layer first.
        plan = self.layout.plan(self.ready_order or self.names[::-1], self.caps)
        if kind is not self._bucket_type or plan != [b.members for b in self.all_buckets]:
            self._bucket_type = kind
            flat, separate = self.layout.make(plan, kind, self.view_buckets, self.process_group)
            self.flat_buckets, self.all_buckets = tuple(flat), (*flat, *separate)
            self.view_buckets = tuple(b for b in flat if isinstance(b, ViewBucket))
            self.bucket_of = {i: bucket for bucket in self.all_buckets for i in bucket.members}
        self.set_shared(self._shared)
        self._hook_parameters()

    def set_shared(self, indices: frozenset[int]) -> None:
        """Tells the buckets which parameters another Reducer averages, too."""
        self._shared = indices
        for bucket in self.flat_buckets:
            bucket.shared = indices.intersection(bucket.members)

    def _hook_parameters(self) -> None:
        """Chooses for which gradients autograd calls Python: see `Hooks.choose`. Idempotent."""
        if self.hooks is not None:
            per_gradient = self._hook_per_gradient or bool(self.calls.on_gradient)
            self.hooks.choose(self, per_gradient or self.ready_order is None)

    def _agree_on_order(self) -> None:
        """Lays the buckets out in the order of rank 0's gradients, on all ranks. Collective."""
        seen_first = dict.fromkeys([*self._seen, *reversed(range(len(self.names)))])
        order = torch.tensor([*seen_first], dtype=torch.int64, device=self.device)
        dist.broadcast(order, group=self.process_group, group_src=0)
        self.ready_order = [*map(self.names.__getitem__, order.tolist())]
        self.lay_out()

    # Ready --------------------------------------------------------------------------------------

    @staticmethod
    def grad_hook(me: "weakref.ref[CoreReducer]", index: int, parameter: torch.Tensor) -> None:
        """Marks parameter `index` ready. Autograd calls, even if the gradient is undefined."""
        self, gradient = me(), parameter.grad
        if self is None:
            return
        if gradient is not None:
            for on_gradient in self.calls.on_gradient:
                on_gradient(index)
        with self._lock:
            self._count(index, gradient)

    @staticmethod
    def bucket_hook(me: "weakref.ref[CoreReducer]", index: int, parameter: torch.Tensor) -> None:
        """Marks a whole bucket ready, whose last member is `index`; the others are deferred."""
        self = me()
        if self is None:
            return
        if parameter.grad is None:
            self.grad_hook(me, index, parameter)
            return
        with self._lock:
            bucket = self.bucket_of[index]
            bucket.deferred[index] = parameter
            # The list lives until the launch, so that Python does not wrap each `.grad` again.
            gradients = [*map(gradient_of, bucket.deferred.values())]
            if (
                bucket.deferred.keys() != bucket.missing
                or not self.sync
                or torch.is_grad_enabled()
                or any(map(is_, gradients, repeat(None)))
            ):
                self._flush_bucket(bucket)
                return
            begins = self.backward is None or self.backward.number != current_pass()
            if begins and index in self.begin_pass():
                return  # deferred until the pass ends
            bucket.deferred.clear()
            bucket.missing.clear()
            self.launch_full_buckets(early=True)

    def flush_deferred(self) -> None:
        """Counts the deferred gradients of all buckets."""
        with self._lock:
            check_not_launching(self._launching, self.rank)
            for bucket in self.all_buckets:
                self._flush_bucket(bucket)

    def _flush_bucket(self, bucket: Bucket) -> None:
        """Counts the deferred gradients of a bucket. The caller holds `_lock`."""
        for index in [*bucket.deferred]:
            parameter = bucket.deferred.pop(index)
            self._count(index, parameter.grad, deferred=True)

    def _count(self, index: int, gradient: torch.Tensor | None, deferred: bool = False) -> None:
        """Counts one gradient; None if autograd left it undefined, which adds nothing."""
        bucket = self.bucket_of[index]
        if not self.sync:
            self._count_local(index, gradient, bucket)
            return
        if gradient is None or gradient.is_sparse or gradient.requires_grad:
            self._check_unusual(index, gradient, bucket, deferred)
        # Reentrant checkpoints run passes inside a pass: the outermost's end shows what is unused.
        number, backward = current_pass(), self.backward
        begins = backward is None or (backward.number != number and not self.allows_unused)
        if number != -1 and begins and index in self.begin_pass() and gradient is not None:
            bucket.deferred[index] = self.parameters[index]
            return
        if self.ready_order is None:
            self._seen.pop(index, None)  # a second gradient moves it to the later place
            self._seen[index] = None
        if self.usage is not None and not self.usage.is_last_gradient(index):
            return
        if gradient is None:
            bucket.mark_unused(index)
        elif bucket.state is not BucketState.FILLING:
            # Raised when no other rank waits.
            self.average.error = second_gradient(self.names[index], self.rank)
        else:
            if isinstance(bucket, ViewBucket) and bucket.packs_early:
                bucket.pack_one(index, self.average.plan or self.comm.plan(self.average))
            bucket.missing.discard(index)
            bucket.unused.discard(index)
        if bucket.state is BucketState.FILLING and not bucket.missing:
            self.launch_full_buckets(early=True)

    def _count_local(self, index: int, gradient: torch.Tensor | None, bucket: Bucket) -> None:
        """Counts a gradient that stays on this rank."""
        if bucket.state is not BucketState.FILLING:
            raise second_gradient(self.names[index], self.rank)
        if gradient is not None:
            self.average.local.add(index)

    def _check_unusual(
        self, index: int, gradient: torch.Tensor | None, bucket: Bucket, deferred: bool
    ) -> None:
        """Raises for a gradient that the bucket cannot hold; notes one that was taken away."""
        if gradient is not None:
            check_gradient(gradient, bucket, self.names[index], self.rank)
        elif self.hooks is not None and self.hooks.was_cleared(index, deferred):
            self.average.error = taken_gradient(self.names[index], self.rank)

    def begin_pass(self) -> set[int]:
        """Begins the pass that autograd is executing; returns what `Hooks.keep_last` returns."""
        dynamo: Any = sys.modules.get("torch._dynamo.compiled_autograd")
        if dynamo and (dynamo.in_compiled_autograd_region or dynamo.compiled_autograd_enabled):
            raise compiled_autograd()
        self.backward = BackwardPass(current_pass(), threading.get_ident())
        notices_errors = self.order is not None or any(map(_packs_early, self.view_buckets))
        at_end = EndOfPass(self) if notices_errors else self.end_pass
        torch.autograd.Variable._execution_engine.queue_callback(at_end)
        for on_begin in self.calls.on_begin:
            on_begin()
        return self.hooks.keep_last() if self.hooks else set()

    def begin_early(self, find_unused: Callable[[], Iterable[int]]) -> None:
        """Begins a pass that averages and has no gradient yet; marks what it finds unused."""
        with self._lock:
            if self.sync and not self.is_in_pass():
                self.begin_pass()
                self.mark_unused(find_unused())
                self.launch_full_buckets(early=True)

    def continue_in(self, outer: BackwardPass) -> None:
        """Leaves the end of this pass to the one around it, of another Reducer."""
        self.backward = outer
        self.restore_grads()

    def is_in_pass(self) -> bool:
        """True if autograd is now executing the pass that has begun."""
        return self.backward is not None and self.backward.number == current_pass()

    def mark_unused(self, indices: Iterable[int]) -> None:
        """Marks parameters that get no gradient in this pass; skips those that are ready."""
        for index in indices:
            self.bucket_of[index].mark_unused(index)

    def missing(self) -> list[str]:
        """Returns the names of the parameters that have no gradient yet."""
        self.flush_deferred()
        return [self.names[i] for bucket in self.all_buckets for i in sorted(bucket.missing)]

    # Pack, launch -------------------------------------------------------------------------------

    def launch_full_buckets(self, early: bool = False) -> None:
        """Launches buckets up to the first that is not full. `early`: backward still runs."""
        if torch.is_grad_enabled():  # outside of a backward pass, or with create_graph=True
            with torch.no_grad():
                self.launch_full_buckets(early)
            return
        if early and not self.overlap:
            return
        if early and self.order is not None and not self.order.may_launch():
            return
        if self._launching is not None:
            check_not_launching(self._launching, self.rank)
        average = self.average
        # By index: readiness differs between ranks, and all must issue the same collectives.
        while average.next_bucket < len(self.all_buckets):
            bucket = self.all_buckets[average.next_bucket]
            if bucket.missing:
                return
            if not self.comm.concurrent:
                self.await_hook()
            if self.usage is None or not self.usage.skips(bucket):
                self._launching = bucket
                try:
                    self._pack_and_launch(bucket)
                finally:
                    self._launching = None
            average.next_bucket += 1

    def _pack_and_launch(self, bucket: Bucket) -> None:
        profiled = torch.autograd.profiler._is_profiler_enabled
        for on_launch in self.calls.on_launch:
            on_launch(bucket)
        try:  # Observers must end what they began in `on_launch`, even if the comm hook raises.
            with record_function(f"{bucket.label}: pack") if profiled else NO_SPAN:
                plan = self.average.plan or self.comm.plan(self.average)
                # An observer may look into a packed bucket.
                if plan.keeps_gradients and not self.calls.on_packed and bucket.keep_gradients():
                    return
                try:
                    gone = bucket.pack(plan)
                except RuntimeError:
                    check_bucket(bucket, self.names, self.rank)
                    raise
                if gone:
                    self.average.error = taken_gradient(self.names[min(gone)], self.rank)
            for on_packed in self.calls.on_packed:
                on_packed(bucket)
            with record_function(f"{bucket.label}: launch") if profiled else NO_SPAN:
                bucket.launch(plan)
        finally:
            for on_launched in self.calls.on_launched:
                on_launched(bucket)

    def set_hook(self, hook: CommHook, state: Any, owner: str = "") -> None:
        """Averages each bucket with `hook(state, bucket)`; the option `owner` needs this hook."""
        self.comm.set_hook(hook, state, owner)
        self.average.plan = None

    def set_weight(self, weight: Callable[[], float] | None) -> None:
        """Sets the factor of this rank's gradients in the next average; None means 1."""
        self.average.weight = weight and partial(self._await_weight, weight)
        self.average.plan = None

    def _await_weight(self, weight: Callable[[], float]) -> float:
        for on_wait in self.calls.on_wait:
            on_wait(None)
        try:
            return weight()
        finally:
            for on_waited in self.calls.on_waited:
                on_waited(None)

    def await_hook(self) -> None:
        """Waits for the last bucket, if the comm hook allows only one in flight."""
        if self.average.next_bucket and not self.comm.concurrent:
            self._wait_traced(self.all_buckets[self.average.next_bucket - 1])

    # Wait, unpack -------------------------------------------------------------------------------

    def end_pass(self) -> None:
        """Launches the rest, and waits. Autograd calls it when the pass is over. Idempotent."""
        if self.backward is None:
            return
        if self.order is not None and self.order.end_backward():
            return
        if self.launch_rest() and (error := self.finish()) is not None:
            raise error

    def launch_rest(self) -> bool:
        """Ends the pass and launches the rest; returns True if all buckets are launched."""
        for bucket in self.all_buckets:
            if bucket.deferred:
                self.flush_deferred()
        self.backward = None
        if self.order is not None:
            self.order.pass_ended()
        if self.usage is not None:
            self.usage.pass_ended()
        if self.average.next_bucket < len(self.all_buckets):
            self.launch_full_buckets()
        if not self.comm.concurrent:
            self.await_hook()
        if self.average.next_bucket < len(self.all_buckets):
            # A later pass may bring the others (a loss in parts); else the next forward raises.
            self.restore_grads()
            self._hook_per_gradient = True
            self._hook_parameters()
            return False
        return True

    def restore_grads(self) -> None:
        """Moves packed gradients back to `.grad`, where a pass or zero_grad() expects them."""
        for bucket in self.view_buckets:
            bucket.restore_grads()

    def on_backward_error(self, number: int) -> None:
        """Called when an exception has ended the pass, before `backward()` raises it."""
        if self.backward is not None and self.backward.number == number:
            self.backward.failed = True
        self.restore_grads()
        if self.order is not None:
            self.order.pass_failed(number)

    @torch.no_grad()
    def finish(self, takes_part: bool = True) -> RuntimeError | None:
        """Waits for all buckets, and unpacks them if this rank takes part; returns its error."""
        has_data, average = takes_part, self.average
        error, average.error = average.error, None
        profiled = torch.autograd.profiler._is_profiler_enabled
        for on_all_launched in self.calls.on_all_launched:
            on_all_launched()
        for verdict in self.calls.verdict:
            error = verdict() or error
        takes_part = has_data and error is None
        used = None if self.usage is None else self.usage.agree_used()
        for bucket in self.all_buckets:
            if profiled or self.calls.on_wait or self.calls.on_waited:
                self._wait_traced(bucket)
            else:
                bucket.wait()
            landed = profiled and bucket.state is BucketState.LANDED
            with record_function(f"{bucket.label}: unpack") if landed else NO_SPAN:
                bucket.unpack(used if takes_part else ())
            for on_unpacked in self.calls.on_unpacked:
                on_unpacked(self.iteration, bucket, takes_part)
            if takes_part and self.step_bucket is not None:
                self.step_bucket(bucket)
        self.average, self.iteration = Average(), self.iteration + 1
        # Every rank reaches this. A forward pass may be one rank's own, as in an evaluation.
        if self.ready_order is None and (self.usage is None or not self.usage.fixed_layout):
            self._agree_on_order()
        for on_average in self.calls.on_average:
            on_average(self.iteration, takes_part)
        # All are called, since each forgets what belongs to this average; the first counts.
        late = [] if self.usage is None else [self.usage.misused]
        for verdict in (*late, *self.calls.late_verdict) if has_data else ():
            found = verdict()
            error = found if error is None else error
        return error

    def _wait_traced(self, bucket: Bucket) -> None:
        profiled = torch.autograd.profiler._is_profiler_enabled
        for on_wait in self.calls.on_wait:
            on_wait(bucket)
        try:
            with record_function(f"{bucket.label}: wait") if profiled else NO_SPAN:
                bucket.wait()
        finally:
            for on_waited in self.calls.on_waited:
                on_waited(bucket)

    # For programs -------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients locally inside; the next backward outside averages the sum."""
        before = self.sync
        self.set_sync(False)
        try:
            yield
        finally:
            self.set_sync(before)

    def set_sync(self, sync: bool) -> None:
        """Lets backward passes average from now on, or accumulate locally."""
        if sync != self.sync:
            self.flush_deferred()
            self.sync = sync

    def average_now(self) -> None:
        """Averages every `.grad` as it is, outside of backward. Collective."""
        give_own_gradients(self.parameters)
        without = []
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                without.append(self.names[index])
                continue
            for on_gradient in self.calls.on_gradient:
                on_gradient(index)
            self.bucket_of[index].missing.discard(index)
        self.mark_unused(range(len(self.parameters)))
        if without and not self.allows_unused:
            # Raised after the average, for which the other ranks wait.
            self.average.error = no_gradient(without, self.rank)
        self.by_hand = True
        try:
            if self.launch_rest() and (error := self.finish()) is not None:
                raise error
        finally:
            self.by_hand = False

    @contextmanager
    def step_in_backward(self, step_bucket: Callable[[Bucket], None]) -> Iterator[None]:
        """Calls this for each bucket whose averages are in `.grad`, in backward passes inside."""
        self.step_bucket = step_bucket
        try:
            yield
        finally:
            self.step_bucket = None  # also after an error: a later backward() must not step

    def abort_step(self) -> None:
        """Drops a step that failed before the optimizer's, so it can be repeated. Idempotent."""
        self.backward = None
        for bucket in self.all_buckets:
            if not self._abandon_in_flight:  # it would write into the repeated step
                with suppress(RuntimeError):
                    bucket.wait()
            bucket.reset()
        self.average = Average()
        for on_abort in self.calls.on_abort:
            on_abort()

    def set_step(self, step: int) -> None:
        """Makes `step`, counted from 0, the next average, perhaps of other ranks."""
        self.iteration, self.backward = step, None
        self.rank = dist.get_rank(self.process_group)  # ranks may have been lost
        for on_set_step in self.calls.on_set_step:
            on_set_step()

    def remove(self) -> None:
        """Removes every hook from the module, whose gradients then stay local. Idempotent."""
        if self.hooks:
            self.hooks.remove(self)
        for remove in self.calls.remove:
            remove()
