"""Averages a module's gradients over ranks while backward still runs: steps 2, 3 and 6.

The order to read in: `_on_gradient` is called by autograd for every parameter, it fills buckets
and launches them in order; `_on_backward_end` is called by autograd when the backward pass is
over, waits for them, and puts the averages back into `.grad`.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from . import comm_hooks
from .bucket import Bucket
from .layout import Gradient, assign_buckets, bucket_caps
from .snapshot import Snapshot


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
            the memory of all gradients once over; `.grad` must then not be detached in place.

    Raises:
        ValueError: no parameter requires a gradient, `bucket_cap_mb` is negative, or this rank is
            not in the group.
        RuntimeError: from a forward pass: a parameter got no gradient in the last backward pass,
            or was added, replaced, removed, frozen, unfrozen or moved since construction. From
            `backward()`: a gradient that is sparse, or that came a second time while others were
            missing.

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
        self._comm_hook = partial(comm_hooks.average, process_group=process_group)
        self._overlap = overlap
        self._gradient_as_bucket_view = gradient_as_bucket_view

        self._sync = True  # False inside no_sync()
        self._graph_task = -1  # autograd's number of the backward pass that will call us at its end
        self._next_bucket = 0  # every bucket before it has been launched
        self._ready_order: list[int] | None = []  # None once the buckets have been rebuilt
        # Reverse order of registration: the last layer's gradient is ready first.
        self._lay_out(reversed(range(len(self._parameters))))

        # The parameters' hooks know the Reducer weakly and the module's hook keeps it alive: the
        # garbage collector cannot see a cycle that goes through a parameter's hooks.
        self._hooks: list[torch.utils.hooks.RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(
                partial(_on_gradient, weakref.ref(self), index)
            )
            for index, parameter in enumerate(self._parameters)
        ]
        self._hooks.append(module.register_forward_pre_hook(_ForwardCheck(self)))

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

    def remove(self) -> None:
        """Takes every hook off the module, whose gradients are local from then on. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

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
        if self._ready_order is not None and index in bucket.missing:
            self._ready_order.append(index)
        if bucket.mark_ready(index) and self._overlap:
            self._launch_full_buckets()

    # 2. launch ----------------------------------------------------------------------------------

    def _launch_full_buckets(self) -> None:
        """Launches, in order, up to the first bucket that is not full. Idempotent."""
        while self._next_bucket < len(self._buckets):
            bucket = self._buckets[self._next_bucket]
            if bucket.missing:
                return
            bucket.launch(self._comm_hook)
            self._next_bucket += 1

    # 3. finish ----------------------------------------------------------------------------------

    def _on_backward_end(self) -> None:
        """Autograd's callback: launches what is left, waits for each bucket in order, unpacks.

        Where gradients are still missing nothing is waited for: a later backward pass may bring
        them (a loss computed in parts, reentrant checkpointing), or else the next forward raises.
        Idempotent: called again after the last bucket was unpacked, it does nothing.
        """
        self._launch_full_buckets()
        if self._next_bucket < len(self._buckets):
            return
        for bucket in self._buckets:
            bucket.finish()
        self._next_bucket = 0
        if self._ready_order is not None:
            self._rebuild(self._ready_order)
            self._ready_order = None

    def _rebuild(self, ready_order: list[int]) -> None:
        """Lays the buckets out anew in rank 0's order of readiness.

        Called at the end of a backward pass and not before a forward one, because here every rank
        is known to take part: forward alone may be one rank's own affair (an evaluation).
        """
        order = torch.tensor(ready_order, dtype=torch.int64, device=self._parameters[0].device)
        dist.broadcast(order, group=self._process_group, group_src=0)
        self._lay_out(order.tolist())

    def _lay_out(self, order: Iterable[int]) -> None:
        gradients = [
            Gradient(p.numel(), p.numel() * p.element_size(), (p.dtype, p.device))
            for p in self._parameters
        ]
        self._buckets = [
            Bucket(
                layout, [self._parameters[i] for i in layout.members], self._gradient_as_bucket_view
            )
            for layout in assign_buckets(gradients, order, self._first_cap, self._cap)
        ]
        self._bucket_of = {
            index: position
            for position, bucket in enumerate(self._buckets)
            for index in bucket.layout.members
        }

    # What must not pass in silence --------------------------------------------------------------

    def _on_forward(self, module: torch.nn.Module) -> None:
        """Forward-pre-hook: raises where the last backward pass left ranks out of step."""
        recomputing = torch._C._current_graph_task_id() != -1  # activation checkpointing
        # Reentrant checkpointing of the whole module runs it without gradients first, while it
        # trains; an evaluation is one rank's own affair.
        if recomputing or not (torch.is_grad_enabled() or module.training):
            return
        again = "call remove() on the Reducer and make a new one, on every rank"
        difference = self._snapshot.difference(module)
        if difference is not None:
            raise RuntimeError(
                f"{difference} {self._on_this_rank()} after the Reducer was made: {again}"
            )
        if self._next_bucket or any(len(b.missing) < len(b.parameters) for b in self._buckets):
            missing = self._missing_names()
            if missing:
                raise RuntimeError(
                    f"no gradient in the last backward pass {self._on_this_rank()} for: {missing}. "
                    f"Every parameter must take part in the loss on every rank, or have "
                    f"requires_grad=False before the Reducer is made"
                )
            raise RuntimeError(
                f"the last backward pass {self._on_this_rank()} was broken off: {again}"
            )

    def _missing_names(self) -> str:
        missing = [self._names[i] for b in self._buckets for i in sorted(b.missing)]
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        return ", ".join(missing[:10]) + more

    def _on_this_rank(self) -> str:
        return f"on rank {dist.get_rank(self._process_group)}"


def _on_gradient(reducer: "weakref.ref[Reducer]", index: int, parameter: torch.Tensor) -> None:
    found = reducer()
    if found is None:
        raise RuntimeError("a parameter's gradient is not averaged: its module is gone")
    found._on_gradient(index, parameter)


class _ForwardCheck:
    """The module's forward-pre-hook. In a copy of the module, deep or pickled, it does nothing."""

    def __init__(self, reducer: Reducer | None = None) -> None:
        self._reducer = reducer

    def __call__(self, module: torch.nn.Module, inputs: object) -> None:
        if self._reducer is not None:
            self._reducer._on_forward(module)

    def __reduce__(self) -> tuple[type["_ForwardCheck"], tuple[()]]:
        return _ForwardCheck, ()
