"""Contenders: ways to keep a model in step over ranks, each a function that takes a training step.

A line of `CONTENDERS` adds one.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ddp_from_scratch as ddp
from benchmarks.harness.workloads import WORKLOADS, Workload

__all__ = ["WORKLOADS", "Contender", "ContenderSpec", "Workload", "contenders"]

Step = Callable[[], None]

REFERENCES = ("torch DDP, default", "torch DDP, views")
GLOO_REFERENCES = ("torch DDP on gloo, default", "torch DDP on gloo, views")
NO_COMMUNICATION = "no communication"

BACKENDS = ("gloo", "mpi", "nccl")
LEARNING_RATE, MOMENTUM = 1e-3, 0.9


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


Prepare = Callable[[nn.Module, dist.ProcessGroup | None], Training]


@dataclass(frozen=True)
class ContenderSpec:
    """A way to keep models in step, to be made into a `Contender` on each rank.

    Attributes:
        name: for the table.
        prepare: makes a model ready, given the process group (None means all ranks).
        backends: those of the job in which it is measured.
        on_gloo: it gets a gloo group beside the job's own.
    """

    name: str
    prepare: Prepare
    backends: tuple[str, ...] = BACKENDS
    on_gloo: bool = False


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


def two_calls(forward: nn.Module, optimizer: torch.optim.Optimizer) -> Training:
    """`loss.backward()`, then `optimizer.step()`."""

    def update(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()

    return Training(forward, optimizer.zero_grad, update)


def foreach_sgd(model: nn.Module) -> torch.optim.Optimizer:
    # The same in every contender that uses torch's optimizer: its default depends on the device.
    return torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM, foreach=True)


def alone(model: nn.Module, group: dist.ProcessGroup | None) -> Training:
    """No communication at all: every other contender adds to that."""
    return two_calls(model, foreach_sgd(model))


def torch_ddp(**settings: object) -> Prepare:
    """A `DistributedDataParallel` of torch's with these arguments, and torch's optimizer."""

    def prepare(model: nn.Module, group: dist.ProcessGroup | None) -> Training:
        wrapped = DistributedDataParallel(model, process_group=group, **settings)  # type: ignore[arg-type]
        return two_calls(wrapped, foreach_sgd(model))

    return prepare


def reducer(**settings: object) -> Prepare:
    """A `Reducer` with these arguments, and torch's optimizer."""

    def prepare(model: nn.Module, group: dist.ProcessGroup | None) -> Training:
        # Torch's DDP does so when it is made.
        ddp.broadcast_parameters(model, process_group=group)
        # Held by the model's own hook for as long as the model lives.
        ddp.Reducer(model, group, **settings)  # type: ignore[arg-type]
        return two_calls(model, foreach_sgd(model))

    return prepare


def flat_sgd(
    at_once: bool = False, optimizer: type[ddp.SGD] = ddp.SGD, **settings: object
) -> Prepare:
    """A `Reducer` with these arguments, its gradients views, and `ddp.SGD`.

    Args:
        at_once: `backward_and_step()` in place of the two calls.
        optimizer: or one that extends it.
        settings: of the Reducer.
    """

    def prepare(model: nn.Module, group: dist.ProcessGroup | None) -> Training:
        ddp.broadcast_parameters(model, process_group=group)
        averaging = ddp.Reducer(model, group, gradient_as_bucket_view=True, **settings)  # type: ignore[arg-type]
        stepper = optimizer(model.parameters(), LEARNING_RATE, MOMENTUM, reducer=averaging)
        if at_once:
            return Training(model, stepper.zero_grad, stepper.backward_and_step)
        return two_calls(model, stepper)

    return prepare


# torch's best setting: views, and buffers stay where they are, as with a Reducer. Some versions of
# torch have another name for the latter and warn of the old one.
_SYNC_BUFFERS = {"forward_sync_buffers", "broadcast_buffers"} & set(
    inspect.signature(DistributedDataParallel).parameters
)
TORCH_BEST: dict[str, object] = {"gradient_as_bucket_view": True, max(_SYNC_BUFFERS): False}

CONTENDERS = [
    ContenderSpec(NO_COMMUNICATION, alone),
    # Twice: as most programs use it, and at its best. Ratios are to the faster of the two.
    ContenderSpec(REFERENCES[0], torch_ddp()),
    ContenderSpec(REFERENCES[1], torch_ddp(**TORCH_BEST)),
    # In an mpi job also on gloo, in the same rounds: that is what a program would use without this
    # backend.
    ContenderSpec(GLOO_REFERENCES[0], torch_ddp(), ("mpi",), on_gloo=True),
    ContenderSpec(GLOO_REFERENCES[1], torch_ddp(**TORCH_BEST), ("mpi",), on_gloo=True),
    # The ladder: each rung adds one idea to the one before.
    ContenderSpec("one all-reduce per parameter", reducer(bucket_cap_mb=0, overlap=False)),
    ContenderSpec("one flat bucket", reducer(bucket_cap_mb=float("inf"), overlap=False)),
    ContenderSpec("buckets", reducer(overlap=False)),
    ContenderSpec("buckets, overlapped (default)", reducer()),
    ContenderSpec("buckets, overlapped, views", reducer(gradient_as_bucket_view=True)),
    # This library's optimizer is faster than torch's, or steps a share: rows from here on may be
    # below no communication. Rows above have torch's, as torch's DDP has.
    ContenderSpec("ddp.SGD", flat_sgd()),
    ContenderSpec("ddp.SGD, one flat bucket", flat_sgd(bucket_cap_mb=float("inf"), overlap=False)),
    ContenderSpec("ddp.SGD, backward_and_step", flat_sgd(at_once=True)),
    ContenderSpec("NodeSharedSGD, backward_and_step", flat_sgd(True, ddp.NodeSharedSGD), ("mpi",)),
]


def contenders(
    workload: Workload,
    device: torch.device,
    specs: Sequence[ContenderSpec] | None = None,
    gloo: dist.ProcessGroup | None = None,
    keep_start: bool = True,
) -> list[Contender]:
    """Every contender, each with the same parameters and, on this rank, the same batch.

    Args:
        workload: to train.
        device: to train on.
        specs: None means those that need no group but the default one, on any backend.
        gloo: a gloo group of all ranks, for contenders that need one.
        keep_start: keep a copy of the parameters as they were, for `check_equal`.
    """
    if specs is None:
        specs = [s for s in CONTENDERS if s.backends == BACKENDS]
    # One batch for all: loading data is not what is compared. The caller seeds it by rank.
    inputs, labels = (tensor.to(device) for tensor in workload.batch())
    start: list[torch.Tensor] = []

    def contender(spec: ContenderSpec) -> Contender:
        torch.manual_seed(0)  # the same model for all contenders, on all ranks
        model = workload.model().to(device)
        if keep_start and not start:
            start.extend(parameter.detach().clone() for parameter in model.parameters())
        # None is the job's own group, in which most contenders are compared.
        training = spec.prepare(model, gloo if spec.on_gloo else None)

        def step() -> None:
            training.zero_grad()
            training.update(cross_entropy(training.forward(inputs), labels))

        return Contender(spec.name, model, step, start)

    return [contender(spec) for spec in specs]
