"""Averages a module's gradients over ranks while backward still runs: steps 2, 3 and 6.

The order to read in: `_on_gradient` is called by autograd for every parameter, it fills buckets
and launches them in order; `_on_backward_end` is called by autograd when the backward pass is
over, waits for them, and puts the averages back into `.grad`.
"""

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from . import comm_hooks, guard
from .bucket import Bucket, CommHook, make_buckets
from .check_sync import DriftCheck
from .layout import bucket_caps
from .memory import allocate
from .ready_order import ReadyOrder
from .share import Share
from .snapshot import Snapshot
from .stall import Progress, StallWatch
from .unused_parameters import GraphWatch
from .usage import Usage


class Reducer:
    """All-reduces the gradients of a module in buckets; the module itself stays as it is.

    The phases of one backward pass:

    1. mark ready: a hook on each parameter runs when its `.grad` is complete.
    2. launch: a full bucket is all-reduced asynchronously, once every earlier bucket has been
       launched. The order is that of the bucket's index on every rank, never that of readiness,
       so that all ranks issue the same collectives.
    3. finish: at the end of backward wait for every bucket in order. When `backward()` returns,
       every `.grad` is the average over ranks.

    The average is taken of what `.grad` holds, and averaging is linear: gradients accumulated under
    `no_sync()` are averaged by the next pass outside of it, and a second pass through one graph
    adds to an average and is averaged again. After the first pass the buckets are laid out anew,
    in the order in which rank 0's gradients became ready (torch's DDP: before its second step).

    Args:
        module: its parameters with `requires_grad` are synchronised. All ranks must hold the same
            ones (`broadcast_parameters` checks that).
        process_group: the ranks that take part; None means all of them.
        bucket_cap_mb: size in MiB at which a bucket is closed. None means 1 for the first, 25 for
            the others; 0 one bucket for each parameter; `inf` one for all; a sequence gives the
            first bucket's, the second's, ..., and its last holds for the rest.
        overlap: launch buckets during backward. False launches all of them at its end.
        gradient_as_bucket_view: let `.grad` be a window of its bucket rather than a copy. Saves
            most of the memory of the gradients; `.grad` must then not be detached in place.
        find_unused_parameters: parameters may take no part in a backward pass, others on each
            rank. `.grad` of what no rank used stays as it was, elsewhere it becomes the average.
            The buckets keep their first layout.
        static_graph: every backward pass is as the first: what is unused, and how many gradients a
            parameter gets. One that differs raises and names the parameter.
        skip_unused: do not send buckets that no rank makes use of; all must know that alike.
        ignore: names of parameters that are not synchronised.
        check_every: compare all ranks' parameters, and the state for them of optimizers that step
            them, in every so many averages; see `check_sync`. None means never.
        stall_after: seconds that a step waits for other ranks before it is reported, on standard
            error, what for and on which ranks (`stall.py`). None means never.
        ready_order: `ready_order` of an earlier run. The buckets are laid out by it at once, so
            that sums are taken in the same order and have the same bits.

    Attributes:
        sync: whether backward passes average. `no_sync()` sets it to False and back.
        share: what gradients are multiplied by before the next average (None means 1), and
            `joining`: whether `join()` is in charge of it.
        futures: what else the end of the next backward pass that averages waits for.
        on_landed: called with each bucket at the end of backward, as soon as its averages are in
            `.grad`.
        iteration: the number of averages so far.

    Raises:
        ValueError: no parameter requires a gradient, `bucket_cap_mb` is negative, `check_every`
            is less than 1, `stall_after` is not positive, this rank is not in the group, or
            `ready_order` names other parameters.
        RuntimeError: from a forward pass, or the step of an optimizer of these parameters: a
            parameter got no gradient in the last backward pass, or was changed (`snapshot.py`).
            From `backward()`: what `guard.py` names, and on every rank what has
            drifted apart (`check_every`).

    Follows: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"
    (VLDB 2020), and torch/csrc/distributed/c10d/reducer.cpp.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        bucket_cap_mb: float | Sequence[float] | None = None,
        overlap: bool = True,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        skip_unused: bool = False,
        check_every: int | None = None,
        stall_after: float | None = None,
        ignore: Collection[str] = (),
        ready_order: Sequence[str] | None = None,
    ) -> None:
        self._caps = bucket_caps(bucket_cap_mb)
        self._snapshot = Snapshot(module, ignore)
        trainable = {n: p for n, p in self._snapshot.parameters.items() if p.requires_grad}
        if not trainable:
            raise ValueError("the module has no parameter that requires a gradient")
        self._rank = dist.get_rank(process_group)
        if self._rank < 0:
            raise ValueError("this rank is not a member of the process group")
        self.module = module
        self._names = list(trainable)
        self._parameters = list(trainable.values())
        self.device = self._parameters[0].device
        self.process_group = process_group
        self._comm_hook: CommHook = comm_hooks.average
        self._comm_state: Any = process_group
        self._overlap = overlap
        self._gradient_as_bucket_view = gradient_as_bucket_view
        self._skip_unused = skip_unused
        self._usage = Usage(self._parameters, process_group, find_unused_parameters, static_graph)
        self._drift = DriftCheck(check_every, module, process_group, ignore)
        self._watch = GraphWatch(self._parameters, self._on_enter)

        self.sync = True
        self.joining = False
        self.iteration = 0
        self.share: Share | None = None
        self.futures: list[torch.futures.Future[Any]] = []
        self.on_landed: Callable[[Bucket], None] | None = None
        self._graph_task = -1  # autograd's number of the backward pass that will call us at its end
        self._next_bucket = 0  # every bucket before it has been launched
        self._lock = threading.Lock()  # autograd has a thread for each device
        self._order = ReadyOrder(self._names, ready_order)
        self._memory = allocate(self._parameters, process_group)
        self._buckets: list[Bucket] = []
        self._lay_out(self._order.first())

        # The parameters' hooks know the Reducer weakly and the module's hooks keep it alive: the
        # garbage collector cannot see a cycle that goes through a parameter's hooks.
        this = weakref.ref(self)
        self._hooks: list[guard.Handle] = [
            parameter.register_post_accumulate_grad_hook(partial(_on_gradient, this, index))
            for index, parameter in enumerate(self._parameters)
        ]
        self._hooks += [
            module.register_forward_pre_hook(guard.ModuleHook(self._before_forward)),
            module.register_forward_hook(guard.ModuleHook(self._after_forward)),
            guard.before_optimizer_steps(self._parameters, self._before_step),
        ]
        # Parameters may live on without the module, and are then like any other.
        weakref.finalize(self, guard.remove_all, self._hooks)
        self._stall = StallWatch(stall_after, self._progress, process_group)

    @property
    def buckets(self) -> tuple[tuple[str, ...], ...]:
        """The names of the parameters of each bucket, in the order of launch."""
        return tuple(
            tuple(self._names[index] for index in bucket.layout.members) for bucket in self._buckets
        )

    @property
    def ready_order(self) -> list[str] | None:
        """The names of the parameters in the order of the final layout, or None."""
        return self._order.final

    @property
    def flat_buckets(self) -> tuple[Bucket, ...]:
        """The buckets of the present layout, in the order of launch."""
        return tuple(self._buckets)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are accumulated locally; the next backward outside averages the sum."""
        before = self.sync
        self.sync = False
        try:
            yield
        finally:
            self.sync = before

    def weight(self, amount: float) -> None:
        """Lets this rank's gradients count by `amount` in the next average, then equally again.

        With the number of samples (or tokens) that its loss is the mean over, the result is the
        gradient of the mean over the whole batch. Collective: called on every rank before the
        backward pass. A rank with 0 runs backward, too; what it computes does not matter.

        Raises:
            ValueError: `amount` is negative or not finite.
            RuntimeError: inside `join()`.
        """
        if self.joining:
            raise RuntimeError("weight() cannot be used inside join(), which weighs ranks itself")
        self.share = Share.of(amount, self.device, self.process_group)

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Lets `hook(state, bucket)` average each bucket from now on; see `comm_hooks`.

        One that is not of `ddp.comm_hooks` has one bucket under way at a time.

        Raises:
            RuntimeError: a backward pass is under way.
            TypeError: `hook` cannot be called.
        """
        if not callable(hook):
            raise TypeError(f"a communication hook must be callable, got {hook!r}")
        if any(bucket.begun for bucket in self._buckets):
            raise RuntimeError("a comm hook cannot be registered while gradients are under way")
        self._comm_hook, self._comm_state = hook, state

    def set_static_graph(self) -> None:
        """As `static_graph=True`, from the next backward pass on. Idempotent."""
        self._usage.set_static()

    def contribute_nothing(self, share: Share) -> None:
        """Takes part in the others' next average, with a share of 0; `.grad` stays as it is."""
        self.share = share
        self._mark_rest_absent()
        self._launch_full_buckets()
        self._finish(unpack=False)

    def remove(self) -> None:
        """Takes every hook off the module, whose gradients are local from then on. Idempotent."""
        guard.remove_all(self._hooks)

    # 1. mark ready ------------------------------------------------------------------------------

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """Post-accumulate-grad hook: `parameter.grad` (not the argument itself) is complete."""
        if parameter.grad is None:  # an undefined gradient: backward came by and brought nothing
            return
        bucket = self._buckets[self._bucket_of[index]]
        if bucket.launched:  # also under no_sync(): the average would overwrite what was added
            raise guard.second_gradient(index, self._buckets, self._names, self._rank)
        self._usage.note(index)
        if not self.sync:
            return
        if parameter.grad.is_sparse:
            raise guard.sparse_gradient(self._names[index])
        # What may be unused is told at the end of the outermost pass, whose beginning we saw.
        if self._graph_task == -1 or not self._usage.may_be_unused:
            self._begin()
        self._order.count(index)
        if not self._usage.count(index):
            return
        if bucket.mark_ready(index) and self._overlap:
            self._launch_full_buckets()

    def _begin(self) -> None:
        """Asks autograd to call us at the end of this backward pass. Idempotent within it.

        Known by its number, so that a pass that was broken off by an exception, whose callback
        never came, is not taken for this one.
        """
        if self._graph_task != torch._C._current_graph_task_id():
            self._graph_task = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)

    def _on_enter(self, unreached: set[int]) -> None:
        """A backward pass has come to an output of the module, and will not reach these."""
        with self._lock:
            if not self.sync or self._graph_task == torch._C._current_graph_task_id():
                return
            self._begin()
            for index in self._usage.unused(unreached):
                self._buckets[self._bucket_of[index]].mark_absent(index)
            if self._overlap:
                self._launch_full_buckets()

    # 2. launch ----------------------------------------------------------------------------------

    def _launch_full_buckets(self) -> None:
        """Launches, in order, up to the first bucket that is not full. Idempotent."""
        while self._next_bucket < len(self._buckets):
            bucket = self._buckets[self._next_bucket]
            if bucket.missing:
                return
            if self._next_bucket and not comm_hooks.may_overlap(self._comm_hook):
                self._buckets[self._next_bucket - 1].wait()
            if not (self._skip_unused and self._usage.none_of(bucket.layout.members)):
                share = 1.0 if self.share is None else self.share.value()
                bucket.launch(self._comm_hook, self._comm_state, share)
            self._next_bucket += 1

    # 3. finish ----------------------------------------------------------------------------------

    def _on_backward_end(self) -> None:
        """Autograd's callback: launches what is left, waits for each bucket in order, unpacks.

        Where gradients are still missing nothing is waited for: a later backward pass may bring
        them (a loss computed in parts, reentrant checkpointing), or else the next forward raises.
        Where parameters may be unused, what is missing now is unused in this pass.
        Idempotent: called again after the last bucket was unpacked, it does nothing.
        """
        if self._graph_task == -1:
            return
        self._graph_task = -1
        if self._usage.may_be_unused:
            self._mark_rest_absent()
        self._launch_full_buckets()
        if self._next_bucket == len(self._buckets):
            self._finish()
            guard.check_static(self._usage.end_pass(), self._names, self._rank)

    def _mark_rest_absent(self) -> None:
        for bucket in self._buckets:
            for index in tuple(bucket.missing):
                bucket.mark_absent(index)

    def _finish(self, unpack: bool = True) -> None:
        if not comm_hooks.may_overlap(self._comm_hook):
            self._buckets[-1].wait()
        used = self._usage.agree()
        for bucket in self._buckets:
            bucket.finish(used if unpack else ())
            self._stall.on_finish(self.iteration, bucket)
            if unpack and self.on_landed is not None:
                self.on_landed(bucket)
        for future in self.futures:
            future.wait()
        self.futures.clear()
        self._next_bucket = 0
        self.share = None
        self.iteration += 1
        # Here and not before a forward pass, which may be one rank's own affair (an evaluation):
        # every rank is known to take part.
        if self.ready_order is None and not self._usage.varies:
            self._lay_out(self._order.agree(self.device, self.process_group))
        self._drift.on_average(self.iteration, is_current=unpack)

    def _lay_out(self, order: Sequence[str]) -> None:
        for bucket in self._buckets:
            bucket.leave()  # the new ones lie in the same memory
        index_of = {name: index for index, name in enumerate(self._names)}
        self._buckets = make_buckets(
            self._parameters,
            [index_of[name] for name in order],
            self._caps,
            self._gradient_as_bucket_view,
            self._memory,
        )
        self._bucket_of = {
            index: bucket.index() for bucket in self._buckets for index in bucket.layout.members
        }

    # Around forward -----------------------------------------------------------------------------

    def _before_forward(self, module: torch.nn.Module, inputs: object) -> None:
        self.check_forward()

    def check_forward(self) -> None:
        """Raises if the forward pass that begins, one of training, would not be averaged right."""
        if guard.trains(self.module):
            self._snapshot.check(self.module, self._usage.varies, self._rank)
            self.check_complete()

    def _after_forward(self, module: torch.nn.Module, inputs: object, outputs: object) -> None:
        if self._usage.may_be_unused:
            self._watch.on_forward(outputs, as_before=self._usage.is_static)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.check_complete()
        self._drift.on_step(optimizer)

    def _progress(self) -> Progress:
        return Progress.of(self.iteration, self._next_bucket, self._buckets, self._names)

    def check_complete(self) -> None:
        """Raises unless every gradient of the last backward pass has been averaged."""
        guard.check_complete(self._graph_task != -1, self._buckets, self._names, self._rank)


def _on_gradient(reducer: "weakref.ref[Reducer]", index: int, parameter: torch.Tensor) -> None:
    found = reducer()
    if found is not None:
        with found._lock:
            found._on_gradient(index, parameter)
