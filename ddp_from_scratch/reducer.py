"""Averages a module's gradients over ranks while backward still runs: steps 2, 3 and 6.

The order to read in: `_on_gradient` is called by autograd for every parameter, it fills buckets
and launches them in order; `_on_backward_end` is called by autograd when the backward pass is
over, waits for them, and puts the averages back into `.grad`.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import comm_hooks
from .bucket import Bucket
from .layout import Gradient, assign_buckets, bucket_caps
from .snapshot import Snapshot

_AGAIN = "call remove() on the Reducer and make a new one, on every rank"


class Reducer:
    """All-reduces the gradients of a module in buckets; the module itself stays as it is.

    The phases of one backward pass:

    1. mark ready: a hook on each parameter runs when its `.grad` is complete.
    2. launch: a full bucket is all-reduced asynchronously, once every earlier bucket has been
       launched. The order is that of the bucket's index on every rank, never that of readiness,
       so that all ranks issue the same collectives.
    3. finish: at the end of backward wait for every bucket in order. When `backward()` returns,
       every `.grad` is the average over ranks.

    The average is taken of what `.grad` holds. So gradients that were accumulated locally, under
    `no_sync()`, are averaged by the next backward pass outside of it; and a second backward pass
    through one graph adds its gradient to an average and is averaged again, which is right,
    since averaging is linear.

    After the first full backward pass the buckets are laid out anew, in the order in which rank
    0's gradients became ready (as torch's DDP does before its second step).

    The rungs of the ladder are settings of this class:

    ===============================  =========================================
    one all-reduce per parameter     `bucket_cap_mb=0, overlap=False`
    one flat bucket                  `bucket_cap_mb=inf, overlap=False`
    several buckets                  `overlap=False`
    several buckets, overlapped      the default
    ===============================  =========================================

    Args:
        module: its parameters with `requires_grad` are synchronised. All ranks must hold the same
            ones (`broadcast_parameters` checks that).
        process_group: the ranks that take part; None means all of them.
        bucket_cap_mb: size in MiB at which a bucket is closed. None means 1 for the first, 25 for
            the others; 0 one bucket for each parameter; `inf` one for all.
        overlap: launch buckets during backward. False launches all of them at its end.
        gradient_as_bucket_view: let `.grad` be a window of its bucket rather than a copy. Saves
            most of the memory of the gradients; `.grad` must then not be detached in place.
        ready_order: names of the parameters as `Reducer.ready_order` gave them in an earlier run.
            The buckets are laid out by it at once, as that run's were in the end: sums are taken
            in the same order and have the same bits.

    Raises:
        ValueError: no parameter requires a gradient, `bucket_cap_mb` is negative, this rank is
            not in the group, or `ready_order` names other parameters.
        RuntimeError: from a forward pass, or the step of an optimizer of these parameters: a
            parameter got no gradient in the last backward pass, or was added, replaced, removed,
            frozen, unfrozen or moved since construction. From `backward()`: a gradient that is
            sparse, or that came a second time while others were missing.

    Follows: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"
    (VLDB 2020), and torch/csrc/distributed/c10d/reducer.cpp.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        bucket_cap_mb: float | None = None,
        overlap: bool = True,
        gradient_as_bucket_view: bool = False,
        ready_order: Sequence[str] | None = None,
    ) -> None:
        self._first_cap, self._cap = bucket_caps(bucket_cap_mb)
        self._snapshot = Snapshot(module)
        trainable = {n: p for n, p in self._snapshot.parameters.items() if p.requires_grad}
        if not trainable:
            raise ValueError("the module has no parameter that requires a gradient")
        if dist.get_rank(process_group) < 0:
            raise ValueError("this rank is not a member of the process group")
        self._names = list(trainable)
        self._parameters = list(trainable.values())
        self._process_group = process_group
        self._comm_hook: comm_hooks.CommHook = comm_hooks.allreduce_hook
        self._comm_state: Any = process_group
        self._overlap = overlap
        self._gradient_as_bucket_view = gradient_as_bucket_view

        self._sync = True  # False inside no_sync()
        self._graph_task = -1  # autograd's number of the backward pass that will call us at its end
        self._next_bucket = 0  # every bucket before it has been launched
        self._counted: list[int] = []  # in the order of readiness, until the buckets are rebuilt
        self.ready_order: list[str] | None = None
        if ready_order is None:
            # Reverse order of registration: the last layer's gradient is ready first.
            self._lay_out(reversed(range(len(self._parameters))))
        else:
            if sorted(ready_order) != sorted(self._names):
                raise ValueError(
                    "ready_order must name each parameter that requires a gradient once"
                )
            self.ready_order = list(ready_order)
            self._lay_out(self._names.index(name) for name in ready_order)

        # The parameters' hooks know the Reducer weakly and the module's hook keeps it alive: the
        # garbage collector cannot see a cycle that goes through a parameter's hooks.
        this = weakref.ref(self)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(partial(_on_gradient, this, index))
            for index, parameter in enumerate(self._parameters)
        ]
        self._hooks.append(module.register_forward_pre_hook(_ForwardCheck(self)))
        self._hooks.append(register_optimizer_step_pre_hook(partial(_on_optimizer_step, this)))
        # Parameters may live on without the module, and are then like any other.
        weakref.finalize(self, _remove, self._hooks)

    @property
    def buckets(self) -> tuple[tuple[str, ...], ...]:
        """The names of the parameters of each bucket, in the order of launch."""
        return tuple(
            tuple(self._names[index] for index in bucket.layout.members) for bucket in self._buckets
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are accumulated locally; the next backward outside averages the sum."""
        before = self._sync
        self._sync = False
        try:
            yield
        finally:
            self._sync = before

    def register_comm_hook(self, state: Any, hook: comm_hooks.CommHook) -> None:
        """Lets `hook(state, bucket)` average each bucket from now on; see `comm_hooks`.

        torch's own hooks work too. One that is not of `ddp.comm_hooks` has one bucket under way
        at a time, since it may start further collectives.

        Raises:
            RuntimeError: a backward pass is under way.
            TypeError: `hook` cannot be called.
        """
        if not callable(hook):
            raise TypeError(f"a communication hook must be callable, got {hook!r}")
        if any(bucket.begun for bucket in self._buckets):
            raise RuntimeError("a comm hook cannot be registered while gradients are under way")
        self._comm_hook, self._comm_state = hook, state

    def remove(self) -> None:
        """Takes every hook off the module, whose gradients are local from then on. Idempotent."""
        _remove(self._hooks)

    # 1. mark ready ------------------------------------------------------------------------------

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """Post-accumulate-grad hook: `parameter.grad` (not the argument itself) is complete."""
        bucket = self._buckets[self._bucket_of[index]]
        if bucket.launched:  # also under no_sync(): the average would overwrite what was added
            missing = self._missing_names()
            raise RuntimeError(
                f"parameter {self._names[index]} got a second gradient {self._on_this_rank()} "
                f"while the first was being averaged"
                f"{f' and these had none: {missing}' if missing else ''}. "
                f"Accumulate several backward passes under no_sync(), all but the last"
            )
        if not self._sync:
            return
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise RuntimeError(
                f"the gradient of parameter {self._names[index]} is sparse, which the Reducer "
                f"cannot lay into a bucket: make it dense (for an embedding, sparse=False)"
            )
        # Known by its number, so that a backward pass that was broken off by an exception, whose
        # callback never came, is not taken for this one.
        if self._graph_task != torch._C._current_graph_task_id():
            self._graph_task = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)
        if self.ready_order is None and index in bucket.missing:
            self._counted.append(index)
        if bucket.mark_ready(index) and self._overlap:
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
            bucket.launch(self._comm_hook, self._comm_state)
            self._next_bucket += 1

    # 3. finish ----------------------------------------------------------------------------------

    def _on_backward_end(self) -> None:
        """Autograd's callback: launches what is left, waits for each bucket in order, unpacks.

        Where gradients are still missing nothing is waited for: a later backward pass may bring
        them (a loss computed in parts, reentrant checkpointing), or else the next forward raises.
        Idempotent: called again after the last bucket was unpacked, it does nothing.
        """
        self._graph_task = -1
        self._launch_full_buckets()
        if self._next_bucket < len(self._buckets):
            return
        for bucket in self._buckets:
            bucket.finish()
        self._next_bucket = 0
        if self.ready_order is None and self._counted:
            self._rebuild()

    def _rebuild(self) -> None:
        """Lays the buckets out anew in rank 0's order of readiness.

        Called at the end of a backward pass and not before a forward one, because here every rank
        is known to take part: forward alone may be one rank's own affair (an evaluation).
        """
        order = torch.tensor(self._counted, dtype=torch.int64, device=self._parameters[0].device)
        dist.broadcast(order, group=self._process_group, group_src=0)
        self._lay_out(order.tolist())
        self.ready_order = [self._names[index] for index in order.tolist()]

    def _lay_out(self, order: Iterable[int]) -> None:
        gradients = [
            Gradient(p.numel(), p.numel() * p.element_size(), (p.dtype, p.device))
            for p in self._parameters
        ]
        layouts = assign_buckets(gradients, order, self._first_cap, self._cap)
        self._buckets = [
            Bucket(
                layout,
                [self._parameters[index] for index in layout.members],
                self._gradient_as_bucket_view,
                index=position,
                is_last=position == len(layouts) - 1,
            )
            for position, layout in enumerate(layouts)
        ]
        self._bucket_of = {
            index: position
            for position, bucket in enumerate(self._buckets)
            for index in bucket.layout.members
        }

    # What must not pass in silence --------------------------------------------------------------

    def _on_forward(self, module: torch.nn.Module) -> None:
        """Forward-pre-hook: raises where ranks would get out of step."""
        recomputing = torch._C._current_graph_task_id() != -1  # activation checkpointing
        # Reentrant checkpointing of the whole module runs it without gradients first, while it
        # trains; an evaluation is one rank's own affair.
        if recomputing or not (torch.is_grad_enabled() or module.training):
            return
        difference = self._snapshot.difference(module)
        if difference is not None:
            raise RuntimeError(
                f"{difference} {self._on_this_rank()} after the Reducer was made: {_AGAIN}"
            )
        self._check_complete()

    def _on_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Before any optimizer's step: raises if it would apply gradients that are not averaged.

        Unlike the check before a forward pass it does not depend on how the model is called.
        """
        if self._next_bucket or any(bucket.begun for bucket in self._buckets):
            ours = {id(parameter) for parameter in self._parameters}
            if any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
                self._check_complete()

    def _check_complete(self) -> None:
        """Raises unless every gradient of the last backward pass has been averaged."""
        if self._graph_task != -1:
            raise RuntimeError(
                f"the last backward pass {self._on_this_rank()} was broken off: {_AGAIN}"
            )
        if any(bucket.begun for bucket in self._buckets):
            raise RuntimeError(
                f"no gradient in the last backward pass {self._on_this_rank()} for: "
                f"{self._missing_names()}. Every parameter must take part in the loss on every "
                f"rank, or have requires_grad=False before the Reducer is made"
            )

    def _missing_names(self) -> str:
        missing = [self._names[i] for b in self._buckets for i in sorted(b.missing)]
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        return ", ".join(missing[:10]) + more

    def _on_this_rank(self) -> str:
        return f"on rank {dist.get_rank(self._process_group)}"


def _on_gradient(reducer: "weakref.ref[Reducer]", index: int, parameter: torch.Tensor) -> None:
    found = reducer()
    if found is not None:
        found._on_gradient(index, parameter)


def _on_optimizer_step(
    reducer: "weakref.ref[Reducer]", optimizer: torch.optim.Optimizer, *arguments: object
) -> None:
    found = reducer()
    if found is not None:
        found._on_optimizer_step(optimizer)


def _remove(hooks: list[torch.utils.hooks.RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


class _ForwardCheck:
    """The module's forward-pre-hook. In a copy of the module, deep or pickled, it does nothing."""

    def __init__(self, reducer: Reducer | None = None) -> None:
        self._reducer = reducer

    def __call__(self, module: torch.nn.Module, inputs: object) -> None:
        # A compiled model is one graph, without this check; the optimizer's step has one, too.
        if self._reducer is not None and not torch.compiler.is_compiling():
            self._reducer._on_forward(module)

    def __reduce__(self) -> tuple[type["_ForwardCheck"], tuple[()]]:
        return _ForwardCheck, ()
