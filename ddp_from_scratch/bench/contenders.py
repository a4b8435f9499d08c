"""Contenders: implementations of data-parallel training, listed in `CONTENDERS`."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from ddp_from_scratch.bench.results import NO_COMMUNICATION, TORCH
from ddp_from_scratch.bench.workloads import Workload
from ddp_from_scratch.launch.environment import BACKENDS
from ddp_from_scratch.optim.flat_optimizer import SGD, AdamW, FlatOptimizer
from ddp_from_scratch.reducer import Reducer
from ddp_from_scratch.sync.broadcast import broadcast_parameters
from ddp_from_scratch.watch.timeline import Timeline

Group = dist.ProcessGroup | None

# Later versions of torch than 2.11 add options, and warn about the old name `broadcast_buffers`.
OF_TORCH = set(inspect.signature(DistributedDataParallel).parameters)
_SYNC_BUFFERS = max({"forward_sync_buffers", "broadcast_buffers"} & OF_TORCH)

# Does not broadcast buffers, as a Reducer does not.
TORCH_BEST: dict[str, Any] = {"gradient_as_bucket_view": True, _SYNC_BUFFERS: False}


@dataclass(frozen=True)
class Optimizers:
    """torch's optimizer, and this library's of the same kind."""

    name: str  # of torch's class, for the names of contenders
    plain: type[torch.optim.SGD] | type[torch.optim.AdamW]
    flat: type[FlatOptimizer]
    settings: Mapping[str, Any]

    def fused(self, model: nn.Module) -> torch.optim.Optimizer:
        """Returns torch's optimizer in its fastest form, which is not the default on a CPU."""
        return self.plain(model.parameters(), **self.settings, fused=True)


OPTIMIZERS = {
    "sgd": Optimizers("SGD", torch.optim.SGD, SGD, {"lr": 1e-3, "momentum": 0.9}),
    "adamw": Optimizers("AdamW", torch.optim.AdamW, AdamW, {"lr": 1e-4}),
}


@dataclass(frozen=True)
class Training:
    """A model that is ready for training steps."""

    forward: nn.Module
    zero_grad: Callable[[], None]
    update: Callable[[torch.Tensor], object]  # backward and the optimizer's step, given the loss
    # True if communication ends in the next forward pass. Then a step is timed from backward on to
    # the end of that pass, so that it contains all of its communication.
    ends_in_forward: bool = False


Prepare = Callable[[nn.Module, Group, Optimizers], Training]


def _two_calls(forward: nn.Module, optimizer: torch.optim.Optimizer) -> Training:
    def update(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()

    return Training(forward, optimizer.zero_grad, update)


def alone(model: nn.Module, _group: Group, optimizers: Optimizers) -> Training:
    """Trains without communication, the baseline of all other contenders."""
    return _two_calls(model, optimizers.fused(model))


def torch_ddp(tapering: bool = False, **settings: Any) -> Prepare:
    """Uses torch's DDP; `tapering` makes buckets smaller near the end of backward."""

    def prepare(model: nn.Module, group: Group, optimizers: Optimizers) -> Training:
        caps: dict[str, Any] = {}
        if tapering:
            size = sum(parameter.nbytes for parameter in model.parameters()) / 2**20
            parts = (1 / 4, 1 / 4, 1 / 4, 1 / 8, 1 / 16, 1 / 16)
            caps["bucket_cap_mb_list"] = [max(1, round(size * part)) for part in parts]
        wrapped = DistributedDataParallel(model, process_group=group, **settings, **caps)
        return _two_calls(wrapped, optimizers.fused(model))

    return prepare


def torch_zero(model: nn.Module, group: Group, optimizers: Optimizers) -> Training:
    """Uses torch's DDP at its best, and torch's optimizer that shards its state over ranks."""
    # Imported only if used, since some versions of torch compile parts of that package on import.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DistributedDataParallel(model, process_group=group, **TORCH_BEST)
    settings: dict[str, Any] = {**optimizers.settings, "fused": True, "process_group": group}
    sharded = ZeroRedundancyOptimizer(
        model.parameters(), optimizers.plain, parameters_as_bucket_view=True, **settings
    )
    return _two_calls(wrapped, sharded)


def reducer(timeline: bool = False, made: list[Reducer] | None = None, **settings: Any) -> Prepare:
    """Uses a Reducer, appended to `made`, and torch's optimizer; `timeline` records all steps."""

    def prepare(model: nn.Module, group: Group, optimizers: Optimizers) -> Training:
        # The constructor of torch's DDP does this.
        broadcast_parameters(model, process_group=group)
        # The model's hooks keep the Reducer alive, and so its timeline.
        averaging = Reducer(model, group, **settings)
        if made is not None:
            made.append(averaging)
        if timeline:
            Timeline(averaging, None, steps=10**9)  # more than there are
        return _two_calls(model, optimizers.fused(model))

    return prepare


def flat(
    shard: str = "none", at_once: bool = False, overlap_forward: bool = False, **settings: Any
) -> Prepare:
    """Uses a `Reducer` and this library's optimizer, with `backward_and_step` if `at_once`."""

    def prepare(model: nn.Module, group: Group, optimizers: Optimizers) -> Training:
        broadcast_parameters(model, process_group=group)
        options: dict[str, Any] = {"shard": shard, "overlap_forward": overlap_forward}
        options |= {"reducer": Reducer(model, group, **settings), **optimizers.settings}
        stepper = optimizers.flat(model.parameters(), **options)
        if at_once:
            return Training(model, stepper.zero_grad, stepper.backward_and_step, overlap_forward)
        return _two_calls(model, stepper)

    return prepare


SHARING = ("gloo", "mpi")  # backends on which a machine's ranks share memory


@dataclass(frozen=True)
class ContenderSpec:
    """Describes a contender. Each rank makes a `Contender` of it."""

    name: str
    prepare: Prepare
    backends: tuple[str, ...] = BACKENDS  # of the groups on which it works
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)  # with which it is measured
    rung: bool = False  # True for a step toward another contender, measured only on request
    group: str | None = None  # the backend of its group; None means the job's own group


@dataclass
class Contender:
    """A contender on this rank, with its own copy of the model."""

    name: str
    model: nn.Module  # the user's model, not the wrapper
    step: Callable[[], None]
    start: Sequence[torch.Tensor] = field(default=(), repr=False)  # parameters, if known


_VIEWS: dict[str, Any] = {"gradient_as_bucket_view": True}
_TORCHS = ("gloo", "nccl")

CONTENDERS = [
    ContenderSpec(NO_COMMUNICATION, alone),
    # First as most programs use it, then with settings that may be the best for a model.
    ContenderSpec(f"{TORCH}, default", torch_ddp(), _TORCHS),
    # Also on this library's own backends: "node" is shared memory beside gloo.
    ContenderSpec(f"{TORCH}, views", torch_ddp(**TORCH_BEST), (*BACKENDS, "node")),
    *[
        ContenderSpec(f"{TORCH}, {what}", torch_ddp(**TORCH_BEST, **settings), _TORCHS)
        for what, option, settings in (
            ("batched copies", "batched_grad_copy", {"batched_grad_copy": True}),
            ("tapering buckets", "bucket_cap_mb_list", {"tapering": True}),
        )
        if option in OF_TORCH
    ],
    ContenderSpec(f"{TORCH}, ZeroRedundancyOptimizer", torch_zero, _TORCHS, ("adamw",)),
    ContenderSpec("Reducer, no shared memory", reducer(shared_memory=False), ("gloo",)),
    ContenderSpec("Reducer", reducer()),
    ContenderSpec("Reducer, views", reducer(**_VIEWS)),
    ContenderSpec("Reducer, views, timeline", reducer(timeline=True, **_VIEWS), rung=True),
    # These use this library's optimizer; a faster one may bring them below no communication.
    ContenderSpec("ddp.SGD", flat()),
    ContenderSpec("ddp.SGD, one flat bucket", flat(bucket_cap_mb=math.inf, overlap=False)),
    ContenderSpec("ddp.SGD, fuse_wgrad", flat(fuse_wgrad=True), SHARING),
    ContenderSpec("ddp.SGD, shard=world", flat("world", at_once=True)),
    ContenderSpec("ddp.SGD, shard=node", flat("node", at_once=True), SHARING),
    ContenderSpec(
        "ddp.SGD, shard=node, fuse_wgrad", flat("node", at_once=True, fuse_wgrad=True), SHARING
    ),
]


def rows(
    backends: Sequence[str], optimizer: str = "sgd", chosen: Sequence[str] | None = None
) -> list[ContenderSpec]:
    """Returns the rows of a table: each contender on each of these backends, named after both.

    `chosen` are names in `CONTENDERS`; None means all but rungs. The reference is always included.
    """
    reference = "nccl" if "nccl" in backends else "gloo"
    found = []
    for spec in CONTENDERS:
        if optimizer not in spec.optimizers:
            continue
        if spec.name == NO_COMMUNICATION:
            found.append(spec)
            continue
        wanted = not spec.rung if chosen is None else spec.name in chosen
        on = [*backends, *(["node"] if "gloo" in backends else [])] if wanted else []
        if spec.name.startswith(TORCH):
            on = list(dict.fromkeys([reference, *on]))
        what, comma, variant = spec.name.replace("SGD", OPTIMIZERS[optimizer].name).partition(", ")
        found += [
            replace(spec, name=f"{what} on {group}{comma}{variant}", group=group)
            for group in on
            if group in spec.backends
        ]
    return found


def contenders(
    workload: Workload,
    device: torch.device,
    specs: Sequence[ContenderSpec],
    groups: Mapping[str, dist.ProcessGroup] | None = None,
    optimizers: Optimizers = OPTIMIZERS["sgd"],
    keep_start: bool = True,
) -> list[Contender]:
    """Makes all contenders, with equal parameters and the same batch on this rank.

    `groups` are beside the job's own, by backend. `keep_start` keeps what `check_equal` needs.
    """
    # Other convolution kernels of a GPU round differently in each run, so contenders would differ.
    torch.backends.cudnn.deterministic = True
    # A single batch, since loading data is not measured. The caller seeds it by rank.
    batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), workload.batch())
    start: list[torch.Tensor] = []

    def contender(spec: ContenderSpec) -> Contender:
        torch.manual_seed(0)  # the same model for all contenders, on all ranks
        model = workload.model().to(device)
        if keep_start and not start:
            start.extend(parameter.detach().clone() for parameter in model.parameters())
        group = (groups or {}).get(spec.group or "")
        training = spec.prepare(model, group, optimizers)

        losses: list[torch.Tensor] = []

        def step() -> None:
            if not losses:
                losses.append(workload.loss(training.forward, batch))
            training.zero_grad()
            training.update(losses.pop())
            if training.ends_in_forward:
                losses.append(workload.loss(training.forward, batch))

        return Contender(spec.name, model, step, start)

    return [contender(spec) for spec in specs]
