"""Contenders: ways to keep a model in step over ranks, each a function that takes a training step.

A line of `CONTENDERS` adds one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_from_scratch.bench.prepare import (
    OF_TORCH,
    OPTIMIZERS,
    TORCH_BEST,
    Prepare,
    alone,
    flat,
    reducer,
    torch_ddp,
    torch_zero,
)
from ddp_from_scratch.bench.workloads import Workload

Step = Callable[[], None]

NO_COMMUNICATION = "no communication"
TORCH = "torch DDP"
# Ratios are to the fastest of these that there are.
REFERENCES = tuple(
    f"{TORCH}, {what}" for what in ("default", "views", "batched copies", "tapering buckets")
)
BACKENDS = ("gloo", "mpi", "nccl")
SHARING = ("gloo", "mpi")  # backends on which a machine's ranks share memory


@dataclass(frozen=True)
class ContenderSpec:
    """A way to keep models in step, to be made into a `Contender` on each rank.

    Attributes:
        name: for the table.
        prepare: makes a model ready, given the process group (None means all ranks).
        backends: of the groups that it works on.
        optimizers: those it is measured with, of `OPTIMIZERS`.
        rung: a step on the way to another contender, measured only if it is asked for.
        group: the backend of the group that it gets; None means the job's own group.
    """

    name: str
    prepare: Prepare
    backends: tuple[str, ...] = BACKENDS
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    rung: bool = False
    group: str | None = None


@dataclass
class Contender:
    """A way to keep models in step, at work on its own copy of the model.

    Attributes:
        name: for the table.
        model: the user's module, without a wrapper.
        step: takes one training step.
        start: the parameters before the first step, if they are known.
    """

    name: str
    model: nn.Module
    step: Step
    start: Sequence[torch.Tensor] = field(default=(), repr=False)


_VIEWS: dict[str, Any] = {"gradient_as_bucket_view": True}
_FLAT_BUCKET: dict[str, Any] = {"bucket_cap_mb": float("inf"), "overlap": False}
_TORCHS = ("gloo", "nccl")

CONTENDERS = [
    ContenderSpec(NO_COMMUNICATION, alone),
    # As most programs use it, and with what may be its best for a model. Ratios are to the fastest.
    ContenderSpec(f"{TORCH}, default", torch_ddp(), _TORCHS),
    # On this library's own backends as well: "node" is shared memory beside gloo.
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
    # The ladder: each rung adds one idea to the one before.
    ContenderSpec(
        "Reducer, one all-reduce per parameter",
        reducer(bucket_cap_mb=0, overlap=False),
        rung=True,
    ),
    ContenderSpec("Reducer, one flat bucket", reducer(**_FLAT_BUCKET), rung=True),
    ContenderSpec("Reducer, buckets at the end", reducer(overlap=False), rung=True),
    ContenderSpec("Reducer, no shared memory", reducer(shared_memory=False), ("gloo",)),
    ContenderSpec("Reducer", reducer()),
    ContenderSpec("Reducer, views", reducer(**_VIEWS)),
    ContenderSpec("Reducer, views, timeline", reducer(timeline=True, **_VIEWS), rung=True),
    # This library's optimizer may be faster than torch's, and a shared one steps a part: rows from
    # here on may be below no communication. Rows above have torch's, as torch's DDP has.
    ContenderSpec("ddp.SGD", flat()),
    ContenderSpec("ddp.SGD, one flat bucket", flat(**_FLAT_BUCKET)),
    ContenderSpec("ddp.SGD, backward_and_step", flat(at_once=True), rung=True),
    ContenderSpec("ddp.SGD, fuse_wgrad", flat(fuse_wgrad=True), SHARING),
    ContenderSpec("NodeSharedSGD", flat(at_once=True, shared=True), SHARING),
    ContenderSpec(
        "NodeSharedSGD, fuse_wgrad", flat(at_once=True, shared=True, fuse_wgrad=True), SHARING
    ),
]


def rows(
    backends: Sequence[str], optimizer: str = "sgd", chosen: Sequence[str] | None = None
) -> list[ContenderSpec]:
    """Rows of a table of these backends: each contender on each of them, named after both.

    On a CPU torch's DDP on gloo, the reference, is always included.

    Args:
        backends: "nccl", or some of the others.
        optimizer: of `OPTIMIZERS`.
        chosen: by their names in `CONTENDERS`, beside the references; None means all but rungs.
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
            # Whoever chooses contenders, the rival keeps its best setting.
            on = list(dict.fromkeys([reference, *on]))
        found += [_row(spec, group, optimizer) for group in on if group in spec.backends]
    return found


def _row(spec: ContenderSpec, group: str, optimizer: str) -> ContenderSpec:
    what, comma, variant = spec.name.replace("SGD", OPTIMIZERS[optimizer].name).partition(", ")
    return replace(spec, name=f"{what} on {group}{comma}{variant}", group=group)


def contenders(
    workload: Workload,
    device: torch.device,
    specs: Sequence[ContenderSpec],
    groups: Mapping[str, dist.ProcessGroup] | None = None,
    optimizer: str = "sgd",
    keep_start: bool = True,
) -> list[Contender]:
    """Every contender, each with the same parameters and, on this rank, the same batch.

    Args:
        workload: to train.
        device: to train on.
        specs: of the contenders.
        groups: process groups of all ranks by backend, beside the job's own.
        optimizer: of `OPTIMIZERS`.
        keep_start: keep a copy of the parameters as they were, for `check_equal`.
    """
    # One batch for all: loading data is not what is compared. The caller seeds it by rank.
    batch = _moved(workload.batch(), device)
    start: list[torch.Tensor] = []

    def contender(spec: ContenderSpec) -> Contender:
        torch.manual_seed(0)  # the same model for all contenders, on all ranks
        model = workload.model().to(device)
        if keep_start and not start:
            start.extend(parameter.detach().clone() for parameter in model.parameters())
        group = (groups or {}).get(spec.group or "")
        training = spec.prepare(model, group, OPTIMIZERS[optimizer])

        def step() -> None:
            training.zero_grad()
            training.update(workload.loss(training.forward, batch))

        return Contender(spec.name, model, step, start)

    return [contender(spec) for spec in specs]


def _moved(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors, in whatever tuples, lists and dicts, on the device."""
    if isinstance(batch, dict):
        return {key: _moved(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_moved(value, device) for value in batch]
    return batch.to(device) if isinstance(batch, torch.Tensor) else batch
