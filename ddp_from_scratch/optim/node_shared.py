r"""Optimizers with one copy of parameters and state for all ranks of a machine.

Each rank steps its share of that copy for all:

    gradients    rank 0   |  a0  |  b0  |        rank 1   |  a1  |  b1  |
                             \______\__________________/______/
    parameters            |  a - lr (a0 + a1) / 2  |  b - lr (b0 + b1) / 2  |
                             rank 0's share           rank 1's share

A chunk of the average exists only in the cache of the rank that steps with it. With several
machines, the ranks with the same share on each machine average it.
"""

import zlib
from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from ddp_from_scratch.backend.process_group import SharedMemoryGroup
from ddp_from_scratch.common.memory import same_memory
from ddp_from_scratch.core.bucket import Bucket
from ddp_from_scratch.optim.flat_optimizer import SGD, Adam, AdamW, FlatOptimizer
from ddp_from_scratch.optim.flat_params import FlatParams, can_move, overlapping
from ddp_from_scratch.reducer import Reducer
from ddp_from_scratch.sync.check_sync import check_sync


class NodeSharedOptimizer(FlatOptimizer):
    """A flat optimizer with one copy of parameters and state for all ranks of a machine.

    The second base of a subclass is the flat optimizer. Parameters equal that optimizer's, to the
    last bit if the world size is a power of two, else to rounding. `backward_and_step` is faster,
    since it averages nothing in `.grad`, which is None afterwards (except sparse gradients). With
    `backward()` and `step()`, `.grad` holds averages in between, which may be clipped or unscaled.

    No forward or backward pass sees a half-written parameter. If a program writes to a parameter,
    all ranks of the machine see it: let all write the same values, or let one rank write, with a
    barrier (`dist.barrier()`) before and after. The first step compares the parameters over all
    ranks, and moves them into shared memory.

    Args:
        params, args, settings, reducer: see `FlatOptimizer`. The reducer must be on mpi, or on
            gloo with shared memory. All its parameters must be among `params`, float32 or float64
            on the CPU, and in separate memory.

    Raises:
        TypeError, ValueError: see `FlatOptimizer`; or these conditions are not met.
        RuntimeError: from a step: `.data` of a parameter was replaced, a comm hook is registered,
            the ranks step with different settings or parameters, or the step is inside `join()`.
    """

    _cuts_gradients = True

    def __init__(
        self, params: Iterable[Any], *args: Any, reducer: Reducer, **settings: Any
    ) -> None:
        super().__init__(params, *args, reducer=reducer, **settings)
        name = type(self).__name__
        reducer.check_free(name)
        group = reducer.sender.group()
        if not isinstance(group, SharedMemoryGroup):
            raise ValueError(
                f"{name} needs ranks that share memory: a process group of the mpi backend, or of "
                f"gloo with several ranks on a machine and a Reducer with shared_memory=True"
            )
        self._group = group
        shared = overlapping([p for bucket in self._buckets for p in bucket.parameters()])
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters(), bucket.views, strict=True):
                if id(parameter) in shared or not can_move(parameter, view):
                    one = f"shape {tuple(parameter.shape)}, {parameter.dtype}"
                    raise ValueError(
                        f"{name} needs parameters of float32 or float64, each in memory of its "
                        f"own: it cannot move one of {one}"
                    )
        if not all(group.is_shared(bucket.buffer()) for bucket in self._buckets):
            raise ValueError(
                f"{name} needs gradients in memory that the machine's ranks share, and there was "
                f"none: the Reducer's warning says why, or its module is a copy of a wrapped one, "
                f"to be wrapped itself; ddp.{name.removeprefix('NodeShared')} does without"
            )
        self._check_groups()
        # `_moved`: tensors have moved, and the next step frees their old memory.
        self._moved = self._checked = False

    def backward_and_step(self, loss: torch.Tensor) -> None:
        """Runs `loss.backward()` and `step()` in one, without averages in `.grad` or comm hooks."""
        if self._reducer is None:
            super().backward_and_step(loss)  # raises: a copy of the optimizer has no Reducer
            return
        self._check_groups()
        self._arrange()
        # The ranks read each other's local gradients from shared memory, so buckets send nothing.
        with self._reducer.keeping_local():
            super().backward_and_step(loss)
        for run in chain.from_iterable(self._runs.values()):
            for parameter in run.parameters:
                parameter.grad = None  # local, but would be taken for an average

    def _arrange(self) -> None:
        ours = {id(parameter) for bucket in self._buckets for parameter in bucket.parameters()}
        if self._reducer is not None and not self._checked:
            # All ranks' parameters become one copy, which would hide a difference.
            module = self._reducer.module
            others = [n for n, p in module.named_parameters() if id(p) not in ours]
            check_sync(module, self._reducer.process_group, ignore=others)
            self._checked = True
        super()._arrange()
        # Gradients in `.grad` may be local, so no parameter may be stepped alone.
        for parameter, _ in self._alone:
            if id(parameter) in ours:
                shape, name = tuple(parameter.shape), type(self).__name__
                raise RuntimeError(
                    f"a parameter of shape {shape} cannot be moved into shared memory any longer: "
                    f"its .data was replaced after {name} was made"
                )

    def _check_groups(self) -> None:
        if any(group is None for bucket in self._buckets for group in self._groups_of(bucket)):
            raise ValueError(
                "params must hold all of the reducer's parameters: the gradient of another one "
                "would not be averaged"
            )

    def _allocate(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        self._moved = True
        return self._group.empty(numel, like.dtype, for_all=True)

    @torch.no_grad()
    def _step_bucket(self, bucket: Bucket) -> None:
        if self._reducer is not None and self._reducer.joining:
            raise RuntimeError("every rank steps its share: none can be missing, as inside join()")
        for run in self._runs[bucket]:
            if not run.gradient.numel():
                continue
            group = self.param_groups[run.group]
            stretches = run.gather(_members(run), self.state, group)
            # The ranks compare this text, because each steps its share for all.
            values = {name: group[name] for name in self._rule.settings if group[name]}
            # A tensor would be printed with only four digits.
            exact = {k: v.item() if torch.is_tensor(v) else v for k, v in values.items()}
            settings = ", ".join(f"{name}={value}" for name, value in exact.items())
            text = f"step with {settings} of parts {zlib.crc32(repr(stretches).encode()):08x}"
            receive = partial(run.update, stretches, group)
            # In `step` the gradients are averages already, and averaging equal values keeps them.
            self._group.reduce_to_owners(run.gradient, dist.ReduceOp.AVG, receive, text)
            run.count(stretches)
            # Autograd cannot see writes to the flat tensor, nor those of other ranks.
            increment_version(run.parameters)
        if bucket.index() == len(self._runs) - 1:
            # After this barrier all parameters are written, and no rank reads another's gradients.
            end = self._group.free_unused if self._moved else self._group.barrier().wait
            self._moved = False
            end()


class NodeSharedSGD(NodeSharedOptimizer, SGD):
    """`ddp.SGD` with one copy of parameters and momentum for a machine: `NodeSharedOptimizer`."""


class NodeSharedAdam(NodeSharedOptimizer, Adam):
    """`ddp.Adam` with one copy of parameters and moments for a machine: `NodeSharedOptimizer`."""


class NodeSharedAdamW(NodeSharedOptimizer, AdamW):
    """`ddp.AdamW` with one copy of parameters and moments for a machine: `NodeSharedOptimizer`."""


def _members(run: FlatParams) -> list[int]:
    """Returns the members that have gradients, after copying these into their buckets."""
    members = run.in_place()
    if len(members) == len(run.parameters):
        return members
    members.clear()
    for index, (parameter, place) in enumerate(zip(run.parameters, run.places, strict=True)):
        if not same_memory(parameter, place):
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} does not lie in shared memory any "
                f"longer: its .data was replaced after the first step"
            )
        if parameter.grad is not None:
            # The buckets were rebuilt, or the program has set another `.grad`.
            if not same_memory(parameter.grad, run.gradients[index]):
                run.gradients[index].copy_(parameter.grad)
            members.append(index)
    return members
