"""Preparation of a model for training steps, one function for each kind of contender."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_from_scratch.optim.flat_optimizer import SGD, AdamW, FlatOptimizer
from ddp_from_scratch.optim.node_shared import NodeSharedAdamW, NodeSharedSGD
from ddp_from_scratch.reducer import Reducer
from ddp_from_scratch.sync.broadcast import broadcast_parameters
from ddp_from_scratch.watch.timeline import Timeline

# What this version of torch has: 2.11 has neither the last two nor the new name of
# `broadcast_buffers`, of which later ones warn.
OF_TORCH = set(inspect.signature(DistributedDataParallel).parameters)
_SYNC_BUFFERS = max({"forward_sync_buffers", "broadcast_buffers"} & OF_TORCH)

_ENDLESS = 10**9  # steps

# As a Reducer: buffers stay where they are.
TORCH_BEST: dict[str, Any] = {"gradient_as_bucket_view": True, _SYNC_BUFFERS: False}


@dataclass(frozen=True)
class Optimizers:
    """torch's optimizer and this library's two of the same kind.

    Attributes:
        name: torch's class, as it is called in the names of contenders.
        plain, flat, shared: torch's class, and this library's.
        settings: of all of them.
    """

    name: str
    plain: type[torch.optim.SGD] | type[torch.optim.AdamW]
    flat: type[FlatOptimizer]
    shared: type[FlatOptimizer]
    settings: Mapping[str, Any]

    def fused(self, model: nn.Module) -> torch.optim.Optimizer:
        """Torch's in its fastest form; its default is another one on a CPU."""
        return self.plain(model.parameters(), **self.settings, fused=True)


OPTIMIZERS = {
    "sgd": Optimizers("SGD", torch.optim.SGD, SGD, NodeSharedSGD, {"lr": 1e-3, "momentum": 0.9}),
    "adamw": Optimizers("AdamW", torch.optim.AdamW, AdamW, NodeSharedAdamW, {"lr": 1e-4}),
}


@dataclass(frozen=True)
class Training:
    """A model made ready to take steps.

    Attributes:
        forward: the module to call.
        zero_grad: comes before it.
        update: backward and the optimizer's step, given the loss.
    """

    forward: nn.Module
    zero_grad: Callable[[], None]
    update: Callable[[torch.Tensor], None]


Prepare = Callable[[nn.Module, dist.ProcessGroup | None, Optimizers], Training]


def two_calls(forward: nn.Module, optimizer: torch.optim.Optimizer) -> Training:
    """`loss.backward()`, then `optimizer.step()`."""

    def update(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()

    return Training(forward, optimizer.zero_grad, update)


def alone(model: nn.Module, group: dist.ProcessGroup | None, optimizers: Optimizers) -> Training:
    """No communication at all: every other contender adds to that."""
    return two_calls(model, optimizers.fused(model))


def torch_ddp(tapering: bool = False, **settings: Any) -> Prepare:
    """A `DistributedDataParallel` of torch's with these arguments, and torch's optimizer.

    Args:
        tapering: buckets that get smaller toward the end of backward, where nothing hides them.
        settings: of torch's class.
    """

    def prepare(
        model: nn.Module, group: dist.ProcessGroup | None, optimizers: Optimizers
    ) -> Training:
        caps: dict[str, Any] = {"bucket_cap_mb_list": tapering_caps(model)} if tapering else {}
        wrapped = DistributedDataParallel(model, process_group=group, **settings, **caps)
        return two_calls(wrapped, optimizers.fused(model))

    return prepare


def tapering_caps(model: nn.Module) -> list[int]:
    """Sizes of buckets in MiB: three quarters of the gradients in three, the rest in smaller."""
    # The last all-reduce begins when backward has ended, so nothing hides its time.
    size = sum(parameter.nbytes for parameter in model.parameters()) / 2**20
    return [max(1, round(size * part)) for part in (1 / 4, 1 / 4, 1 / 4, 1 / 8, 1 / 16, 1 / 16)]


def torch_zero(
    model: nn.Module, group: dist.ProcessGroup | None, optimizers: Optimizers
) -> Training:
    """Torch's DDP at its best, and torch's optimizer whose state is divided among the ranks."""
    # Here and not above: some versions of torch compile parts of that package as they import it.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DistributedDataParallel(model, process_group=group, **TORCH_BEST)
    settings: dict[str, Any] = {**optimizers.settings, "fused": True, "process_group": group}
    sharded = ZeroRedundancyOptimizer(
        model.parameters(), optimizers.plain, parameters_as_bucket_view=True, **settings
    )
    return two_calls(wrapped, sharded)


def reducer(timeline: bool = False, made: list[Reducer] | None = None, **settings: Any) -> Prepare:
    """A `Reducer` with these arguments, and torch's optimizer.

    Args:
        timeline: record every step.
        made: gets the Reducer.
        settings: of the Reducer.
    """

    def prepare(
        model: nn.Module, group: dist.ProcessGroup | None, optimizers: Optimizers
    ) -> Training:
        # Torch's DDP does so when it is made.
        broadcast_parameters(model, process_group=group)
        # Held by the model's own hook for as long as the model lives, and so is its timeline.
        averaging = Reducer(model, group, **settings)
        if made is not None:
            made.append(averaging)
        if timeline:
            Timeline(averaging, None, steps=_ENDLESS)
        return two_calls(model, optimizers.fused(model))

    return prepare


def flat(at_once: bool = False, shared: bool = False, **settings: Any) -> Prepare:
    """A `Reducer` with these arguments, and this library's optimizer.

    Args:
        at_once: `backward_and_step()` in place of the two calls.
        shared: one copy of parameters and state for a machine.
        settings: of the Reducer.
    """

    def prepare(
        model: nn.Module, group: dist.ProcessGroup | None, optimizers: Optimizers
    ) -> Training:
        broadcast_parameters(model, process_group=group)
        averaging = Reducer(model, group, **settings)
        kind = optimizers.shared if shared else optimizers.flat
        stepper = kind(model.parameters(), reducer=averaging, **optimizers.settings)
        if at_once:
            return Training(model, stepper.zero_grad, stepper.backward_and_step)
        return two_calls(model, stepper)

    return prepare
