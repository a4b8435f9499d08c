"""The Reducer with its options, each an observer of `core/reducer.py` in its own file."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist

from ddp_from_scratch.common.arguments import check_ignore
from ddp_from_scratch.common.group import check_group
from ddp_from_scratch.common.memory import sparse_parameters
from ddp_from_scratch.core.bucket import CommHook
from ddp_from_scratch.core.comm_hooks import CommConfig, average
from ddp_from_scratch.core.hooks import current_pass
from ddp_from_scratch.core.layout import Caps, Layout, bucket_caps
from ddp_from_scratch.core.observer import Observer
from ddp_from_scratch.core.reducer import CoreReducer
from ddp_from_scratch.core.view_bucket import ViewBucket
from ddp_from_scratch.node import gloo_alone, shared_memory_group
from ddp_from_scratch.options import launch_order
from ddp_from_scratch.options.buffers import BufferSync
from ddp_from_scratch.options.checks import (
    Checks,
    ModuleSnapshot,
    sync_batch_norms,
)
from ddp_from_scratch.options.finite import FiniteCheck
from ddp_from_scratch.options.fused_wgrad import FusedWgrad
from ddp_from_scratch.options.local_steps import LocalSteps, StepsInHooks
from ddp_from_scratch.options.sparse import SparseBucket
from ddp_from_scratch.options.stats import ReducerStats
from ddp_from_scratch.options.unused import Unused
from ddp_from_scratch.options.weight import agree_weight
from ddp_from_scratch.sync.broadcast import check_same_parameters
from ddp_from_scratch.sync.check_sync import DriftCheck
from ddp_from_scratch.virtual_ranks.tree_reduction import TreeReduction
from ddp_from_scratch.virtual_ranks.virtual_ranks import Result, VirtualRanks
from ddp_from_scratch.watch.stall import stall_watch
from ddp_from_scratch.watch.stragglers import StragglerReport, StragglerWatch


class Reducer:
    """Averages the gradients of a module over ranks during backward, without wrapping the module.

    A hook on each parameter marks its gradient ready. A bucket with all its gradients is copied
    into one flat tensor and all-reduced while backward continues. At the end of backward the
    Reducer waits for all buckets; then every `.grad` is the average. Each option is an observer of
    `core/reducer.py`, which does the steps.

    Args:
        module: the module whose gradients are averaged. All ranks must hold the same model.
        process_group: the ranks that take part; None means all.
        bucket_cap_mb: size in MiB at which a bucket is closed. 0 makes one bucket for each
            parameter, `inf` one for all; a sequence has the first bucket's cap, the second's, and
            so on; None is 1 for the first and 25 for the others.
        overlap: launch buckets during backward. False launches all of them at its end.
        gradient_as_bucket_view: make `.grad` a window of its bucket instead of a copy, which saves
            memory. Do not detach `.grad` in place then. On a CPU a large `.grad` is None from the
            time it is ready until it is averaged.
        find_unused_parameters: allow parameters without a gradient in a backward pass, even
            different ones on each rank. A parameter that no rank used keeps its `.grad`; others get
            the average. The buckets keep their first layout.
        static_graph: assume that every backward pass has the same unused parameters as the first,
            and as many gradients for each parameter. A pass that differs raises an error that names
            the parameter.
        skip_unused: skip a bucket if this rank has used none of its parameters since the last
            average; the first average skips none. If ranks use different parameters, they hang.
        sync_buffers: send rank 0's buffers to all ranks at the end of each backward pass that
            averages, so any rank may evaluate at any time.
        shared_memory: on a gloo group on Linux, if two ranks share a machine, reduce in memory that
            the ranks of a machine share, and send only between machines. Sums add up ranks in
            order, so with more than 2 ranks their last bits differ from gloo's.
        fuse_wgrad: compute the gradients of large linear layers directly into their buckets
            (`FusedWgrad`). CPU only. Implies `gradient_as_bucket_view`.
        ignore: a list of names of parameters and buffers that are not synchronised. A parameter
            with several names is ignored under all of them. A name that this rank's module lacks
            warns.
        check_every: N: run `check_sync` in every Nth average, including the state of optimizers
            that step these parameters. None means never, unless forward passes write to parameters:
            then in the first average and in every hundredth.
        stall_after: seconds after which a waiting step is reported, with the ranks that it waits
            for and the line of the program at which each is (`watch/stall.py`). At most half the
            group's timeout. None means never. "auto" is 60 on CPUs and None on GPUs, where it takes
            two kernel launches for each bucket.
        straggler_every: N: in every Nth average, print on rank 0 which rank the others waited
            for (`watch/stragglers.py`). None means never.
        ready_order: an earlier run's `ready_order`. The first layout uses it, so sums have the same
            bits.
        virtual_ranks: a power of two. Splits a step's batch into this many equal virtual ranks.
            Each rank runs those of `virtual_rank_range`, and their gradients are summed along a
            fixed tree (`virtual_ranks/`), which gives the same bits on any number of ranks. Implies
            `sync_buffers`; buckets keep their layout.
        balance: assign virtual ranks by the ranks' measured speed, so slow ranks run fewer
            (`virtual_ranks/balance.py`). The bits of the result do not change.
            `virtual_rank_range` may change from step to step.
        recheck_every: N: in every Nth step another rank repeats one virtual rank. If the bits of
            its gradients or buffers differ, `run_virtual_ranks` raises a WrongResultError on all
            ranks before the average counts (`virtual_ranks/recheck.py`). None means never.
        reduce: "sum" sums the ranks' gradients without dividing. Every `.grad` is summed as a
            whole, so set it to None or zero after each step; otherwise an earlier sum is summed
            again. Not with a comm hook or virtual ranks.
        check_first_average: compare the ranks' parameters in the first average. False is for
            programs in which each rank changes parameters in its own way before backward, and
            restores them before the step (sharpness-aware minimisation).
        check_finite: raise on every rank if a gradient is not finite before it is averaged, and
            name its rank and parameter (`FiniteCheck`). Not with virtual ranks.
        local_steps: let optimizers step on gradients that are not averaged, as in local SGD.
            Otherwise the first such step warns, and with `check_every` each raises
            (`options/local_steps.py`).
        observers: your own observers (`core/observer.py`), called after those of the options.

    Attributes:
        core: the object that observers are attached to: its parameters, buckets and phases.
        buffer_sync: sends the module's buffers.
        tree_reduction: the sum over virtual ranks; None without them.

    Raises:
        ValueError: no parameter requires a gradient; a parameter is lazy, expanded, computed from
            others, not dense, a DTensor, on the meta device or made in inference mode; this rank is
            not in the group; or an argument is out of range.
        TypeError: `module` is not a module, `process_group` not a process group, `ignore` a text
            instead of a list of them, or a number not whole.
        RuntimeError: no process group is open, inference mode is on, the ranks' parameters differ
            in name, shape, strides or dtype, or their options differ. From a forward pass, an
            optimizer's step or `backward()`: see `options/checks.py` and `check_every`.

    Follows: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"
    (VLDB 2020), and torch/csrc/distributed/c10d/reducer.cpp.
    """

    def __init__(  # noqa: C901
        self,
        module: torch.nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        bucket_cap_mb: Caps = None,
        overlap: bool = True,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        skip_unused: bool = False,
        sync_buffers: bool = False,
        check_every: int | None = None,
        stall_after: float | str | None = "auto",
        straggler_every: int | None = None,
        shared_memory: bool = True,
        fuse_wgrad: bool = False,
        ignore: Collection[str] = (),
        ready_order: Sequence[str] | None = None,
        virtual_ranks: int | None = None,
        balance: bool = False,
        recheck_every: int | None = None,
        reduce: Literal["mean", "sum"] = "mean",
        check_finite: bool = False,
        check_first_average: bool = True,
        local_steps: bool = False,
        observers: Iterable[Observer] = (),
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        caps = bucket_caps(bucket_cap_mb)
        self._ignore = ignore = check_ignore(ignore, module)
        snapshot = ModuleSnapshot(module, ignore)
        parameters = {name: p for name, p in snapshot.parameters.items() if p.requires_grad}
        if not parameters:
            raise ValueError("the module has no parameter that requires a gradient")
        self._backend = str(dist.get_backend(check_group(process_group)))
        on_cpu = all(parameter.device.type == "cpu" for parameter in parameters.values())
        if fuse_wgrad and not on_cpu:
            raise ValueError("fuse_wgrad needs all parameters on a CPU: leave it out")
        snapshot.check_supported()
        if reduce not in ("mean", "sum"):
            raise ValueError(f'reduce must be "mean" or "sum", got {reduce!r}')
        sums = reduce == "sum"
        refused = {'reduce="sum"': sums, "check_finite": check_finite}
        if virtual_ranks is not None and (names := [name for name in refused if refused[name]]):
            raise ValueError(f"{names[0]} cannot be used with virtual_ranks=V: leave it out")
        self.buffer_sync: BufferSync = BufferSync(module, process_group, ignore)
        # What decides which numbers a Reducer sends and computes; the others may be a rank's own.
        same_on_all = {
            "bucket_cap_mb": [cap / 2**20 for cap in caps],
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "skip_unused": skip_unused,
            "sync_buffers": sync_buffers,
            "check_every": check_every,
            "straggler_every": straggler_every,
            "shared_memory": shared_memory,
            "ready_order": ready_order and [*ready_order],
            "virtual_ranks": virtual_ranks,
            "balance": balance,
            "recheck_every": recheck_every,
            "reduce": reduce,
            "check_finite": check_finite,
            "grad_dtype": {
                n: p.grad_dtype for n, p in parameters.items() if p.grad_dtype != p.dtype
            },
        }
        lines = [f"{name}={value!r}" for name, value in same_on_all.items()]
        regroups = virtual_ranks is not None
        self._checks = Checks(snapshot, ignore, lines, check_first_average, regroups)
        self._virtual_ranks: VirtualRanks | None = None
        self.tree_reduction: TreeReduction | None = None  # of virtual ranks
        if virtual_ranks is not None:
            self._virtual_ranks = VirtualRanks(
                virtual_ranks,
                self.buffer_sync,
                windows=fuse_wgrad,
                balances=balance,
                recheck_every=recheck_every,
            )
            self.tree_reduction = self._virtual_ranks.reduction
        elif balance or recheck_every is not None:
            name = "balance=True" if balance else f"recheck_every={recheck_every}"
            raise ValueError(f"{name} needs virtual ranks: add virtual_ranks=V")

        device = next(iter(parameters.values())).device

        def options() -> Iterator[Observer]:
            # In the order of their calls. An option that is off costs nothing.
            yield self._checks
            if not local_steps:
                yield LocalSteps()
                yield StepsInHooks()
            if find_unused_parameters or static_graph or skip_unused:
                yield Unused(find_unused_parameters, static_graph, skip_unused)
            if sync_buffers or virtual_ranks is not None:
                self.buffer_sync.enable(True)
                yield self.buffer_sync
            if self._virtual_ranks is not None:
                yield from self._virtual_ranks.observers()
            # One rank may make this object alone, and the ranks count their watches.
            after = stall_after if self._collective_init else None
            if (watch := stall_watch(after, device)) is not None:
                yield watch
            if straggler_every is not None:
                yield StragglerWatch(straggler_every, device, process_group)
            if check_every is not None:
                yield DriftCheck(check_every, module, process_group, ignore)
            if fuse_wgrad:
                yield FusedWgrad()
            if check_finite:
                yield FiniteCheck()
            yield from observers

        if virtual_ranks is not None and ready_order is None:
            # The first layout is final, even if an average fails on some ranks.
            ready_order = list(parameters)[::-1]
        group_for = shared_memory_group if shared_memory else gloo_alone
        launch_order.check_overlap(module, parameters, process_group, sums)
        comm = CommConfig(process_group, group_for if on_cpu else None, sums)
        # Elastic ranks, which have virtual ranks, may not have met yet. Nor may they keep shared
        # memory, which is freed with its group.
        together = self._collective_init and virtual_ranks is None
        if together:
            check_same_parameters(parameters, module, process_group, lines)
        memory_of = comm.open_group() if together else None
        sparse = sparse_parameters(module)
        separate = {name: SparseBucket for name, p in parameters.items() if id(p) in sparse}
        layout = Layout(parameters, separate, memory_of, launch_order.next_name(memory_of))
        self.core: CoreReducer = self._core_type(
            module,
            comm,
            layout,
            bucket_caps=caps,
            overlap=overlap,
            views=gradient_as_bucket_view or fuse_wgrad,
            ready_order=ready_order,
            # Ranks may be lost, and partial sums have memory of their own.
            abandon_in_flight=virtual_ranks is not None,
            observers=options(),
        )
        launch_order.look_for_layers(self.core)
        launch_order.add(self.core, memory_of)

    _collective_init = True  # all ranks construct this object together
    _core_type = CoreReducer

    # Inspection ---------------------------------------------------------------------------------

    def __call__(self, *_args: object, **_options: object) -> NoReturn:
        raise TypeError(
            "a Reducer does not wrap its module: call the module itself, model(x); "
            "ddp.DistributedDataParallel(model) is a wrapper"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Reducer cannot be copied or pickled, since it hooks the parameters of one module in "
            "one process group: copy the module, and make a new Reducer for the copy"
        )

    def __repr__(self) -> str:
        virtual_ranks = "" if self._virtual_ranks is None else f", {self._virtual_ranks}"
        return f"Reducer({self.stats()}{virtual_ranks})"

    @property
    def module(self) -> torch.nn.Module:
        """The module whose gradients are averaged."""
        return self.core.module

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that take part; None means all."""
        return self.core.process_group

    @property
    def ignore(self) -> frozenset[str]:
        """The names of parameters and buffers that are not synchronised."""
        return self._ignore

    @property
    def overlap(self) -> bool:
        """True if buckets are launched during backward."""
        return self.core.overlap

    @property
    def sync(self) -> bool:
        """True if backward passes average. `no_sync()` sets it to False and back."""
        return self.core.sync

    @property
    def iteration(self) -> int:
        """The number of averages so far."""
        return self.core.iteration

    @property
    def buckets(self) -> tuple[tuple[str, ...], ...]:
        """The names of the parameters of each bucket, in launch order."""
        names = self.core.names
        return tuple(tuple(names[i] for i in bucket.members) for bucket in self.core.all_buckets)

    @property
    def ready_order(self) -> list[str] | None:
        """The names of the parameters in the order of the final layout; None before it."""
        return self.core.ready_order

    def stats(self) -> ReducerStats:
        """Returns the current settings, buckets and their sizes."""
        return ReducerStats.of(self.core, self._backend)

    # Settings -----------------------------------------------------------------------------------

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Averages each bucket with `hook(state, bucket)` from now on; see `comm_hooks`.

        Unless a hook has `hook.one_collective = True`, it may start a second collective, so only
        one bucket is in flight at a time. Raises a RuntimeError while a gradient waits for its
        average, and with virtual ranks or `reduce="sum"`.
        """
        launch_order.check_current(self.core)
        self._check_idle("a comm hook cannot be registered while gradients wait for their average")
        self.core.comm.require_unowned_hook("a comm hook")
        if self.core.comm.sums and hook is not average:
            name = getattr(hook, "__name__", hook)
            raise RuntimeError(f'reduce="sum" cannot be used with a comm hook: leave {name} out')
        self.core.set_hook(hook, state)

    def keep_bucket_views(self) -> None:
        """Switches to `gradient_as_bucket_view=True`. Idempotent.

        An existing `.grad` keeps its memory until the next average. Raises a RuntimeError while
        gradients are ready but not averaged.
        """
        launch_order.check_current(self.core)
        self._check_idle("gradients that wait for their average cannot move into their buckets")
        self.core.lay_out(kind=ViewBucket)

    def set_static_graph(self) -> None:
        """Switches to `static_graph=True` from the next forward pass on. Idempotent.

        Every rank must call it. Backward through a graph that exists already may raise if the graph
        has reentrant checkpoints.
        """
        launch_order.check_current(self.core)
        unused = self.core.observer(Unused)
        if unused is None:
            self.core.add_observer(Unused(find_unused=False, static=True, skip=False))
        else:
            unused.set_static()

    def set_sync_buffers(self, enabled: bool) -> None:
        """Sets `sync_buffers`. Every rank must call it."""
        launch_order.check_current(self.core)
        self.buffer_sync.enable(enabled)
        if enabled and self.buffer_sync not in self.core.observers:
            self.core.add_observer(self.buffer_sync, first=True)

    def watch_stragglers(
        self, every: int, tell: Callable[[StragglerReport], None] | None = None
    ) -> None:
        """Sets `straggler_every`, on every rank. `tell` gets reports; None prints on rank 0."""
        watch = StragglerWatch(every, self.core.device, self.process_group, tell)
        self.core.add_observer(watch)

    def prepare_backward(self, outputs: object) -> None:
        """Searches the graph of these tensors, where backward begins, for unused parameters."""
        if (unused := self.core.observer(Unused)) is not None:
            unused.prepare(outputs)

    def check_forward(self) -> None:
        """Raises, in training, if the averages after a forward pass would be missing or wrong."""
        self._checks.on_forward()

    def check_complete(self) -> None:
        """Raises unless every gradient of the last backward pass has been averaged."""
        self._checks.check_complete()

    def _check_idle(self, text: str) -> None:
        if any(bucket.begun for bucket in self.core.all_buckets):
            raise RuntimeError(text)

    def average_gradients(self) -> None:
        """Averages every `.grad` as it is, without a backward pass. Collective.

        For gradients that did not come from `backward()`, such as those of `torch.autograd.grad`,
        and for sums of passes under `no_sync()`. All options apply as in a backward pass. Every
        parameter needs a gradient, unless the Reducer has `find_unused_parameters`. A `.grad` that
        is expanded, or that shares memory with another one or with a parameter, is first replaced
        by a copy; other gradients keep their memory.

        Raises:
            RuntimeError: this is inside a backward pass or `join()`; the last backward pass was
                interrupted; a parameter has no gradient, or with `static_graph` has one that no
                rank had in the first average (on the rank concerned, after the average); the ranks'
                buffers differ; or the Reducer has virtual ranks.
        """
        launch_order.check_current(self.core)
        self.core.comm.require_unowned_hook("average_gradients()")
        if self.core.joining or current_pass() != -1:
            where = "join()" if self.core.joining else "a backward pass"
            raise RuntimeError(f"average_gradients() cannot be used inside {where}")
        self.check_complete()
        self.core.average_now()

    # Weights ------------------------------------------------------------------------------------

    def weight(self, amount: float) -> None:
        """Weights this rank's gradients by `amount` in the next average only. Collective.

        Pass the number of samples (or tokens) over which this rank's loss is a mean. The result is
        then the gradient of the mean over the whole batch, or with `reduce="sum"` of the sum. Every
        rank, even one with amount 0, must call this and then run backward.

        Raises:
            ValueError: `amount` is negative or not finite; on the other ranks from `backward()`.
            RuntimeError: inside `join()`; or the amounts differ with synchronised batch norm.
        """
        launch_order.check_current(self.core)
        if self.core.joining:
            raise RuntimeError("weight() cannot be used inside join(), which weights ranks itself")
        weight = agree_weight(self.core, amount)
        if sync_batch_norms(self.module):
            weight.check_equal()
        self.core.set_weight(weight.value)

    # Virtual ranks ------------------------------------------------------------------------------

    @property
    def virtual_rank_count(self) -> int:
        """The number of virtual ranks of a step, on all ranks together."""
        return self._with_virtual_ranks().count

    @property
    def virtual_rank_range(self) -> Sequence[int]:
        """The virtual ranks that this rank runs in a step of the current group, in order."""
        return self._with_virtual_ranks().range()

    @property
    def rechecked_steps(self) -> int:
        """In how many steps so far `recheck_every` has found the same bits on two ranks."""
        recheck = self._with_virtual_ranks().recheck
        return 0 if recheck is None else recheck.steps

    def virtual_rank(self, index: int) -> AbstractContextManager[None]:
        """A context for virtual rank `index`: forward, and one backward without `no_sync()`."""
        return self._with_virtual_ranks().run(index)

    def run_virtual_ranks(self, function: Callable[[int], Result]) -> list[Result]:
        """Calls a function for each index in `virtual_rank_range`, as inside `virtual_rank(i)`.

        Returns the results, in order. If an elastic run loses a rank, the others keep the gradients
        and results of the virtual ranks that they have finished.
        """
        return self._with_virtual_ranks().run_all(function)

    def set_step(self, step: int, seed: int | None = None, keep: bool = False) -> int:
        """Sets the number of the next step, from 0 on. All ranks must call it.

        `seed`, the same on all ranks, seeds the generators; None keeps the last seed, at first 0.
        With `keep` the call is collective, and returns how many virtual ranks of an aborted step
        are kept.
        """
        kept = self._with_virtual_ranks().set_step(step, seed, keep)
        self.core.set_step(step)
        return kept

    # The end ------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates local gradients; the next backward pass outside the context averages the sum.

        Raises a RuntimeError if a later Reducer has replaced this one.
        """
        launch_order.check_current(self.core)
        with self.core.no_sync():
            yield

    def abort_step(self) -> None:
        """Drops a step that failed before the optimizer's step, so it can run again. Idempotent."""
        self.core.abort_step()

    def add_observer(self, observer: Observer) -> None:
        """Starts to call this observer, after those that were added before."""
        self.core.add_observer(observer)

    def remove_observer(self, observer: Observer) -> None:
        """Stops calling this observer."""
        self.core.remove_observer(observer)

    def remove(self) -> None:
        """Removes every hook from the module, whose gradients then stay local. Idempotent."""
        self.core.remove()
        launch_order.remove(self.core)

    def _with_virtual_ranks(self) -> VirtualRanks:
        launch_order.check_current(self.core)
        if self._virtual_ranks is None:
            raise RuntimeError("this Reducer has no virtual ranks: make it with virtual_ranks=V")
        return self._virtual_ranks
